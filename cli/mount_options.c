/* SPDX-License-Identifier: MIT */
/* cli/mount_options.c - names, values and refusals of mount options, in one table. */
#include "cli/mount_options.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "cli/cli.h"
#include "cli/suggest.h"

struct option_kind {
    const char *name;  /* with '=' when it takes a value */
    const char *later; /* what it will be for; refused by name until then */
    /* NULL: not built yet */
    int (*take)(const char *value, struct mount_options *o, struct err *e);
};

static int wrong_value(const char *name, const char *value, struct err *e,
                       const char *hint)
{
    err_set(e, EINVAL, "-o %s=%s: not a value of this option", name, value);
    return err_hint(e, "%s", hint);
}

static bool parse_number(const char *text, int base, uint64_t max, uint64_t *out)
{
    char *end;

    errno = 0;
    *out = strtoull(text, &end, base);
    return !errno && end != text && !*end && *text != '-' && *out <= max;
}

static int take_nothing(const char *value, struct mount_options *o, struct err *e)
{
    (void)value;
    (void)o;
    (void)e;
    return 0;
}

static int take_allow_other(const char *value, struct mount_options *o, struct err *e)
{
    (void)value;
    (void)e;
    o->allow_other = true;
    return 0;
}

static int take_follow(const char *value, struct mount_options *o, struct err *e)
{
    (void)value;
    (void)e;
    o->follow_symlinks = true;
    return 0;
}

static int take_debug(const char *value, struct mount_options *o, struct err *e)
{
    (void)value;
    (void)e;
    o->debug = true;
    o->foreground = true;
    return 0;
}

static int take_uid(const char *value, struct mount_options *o, struct err *e)
{
    uint64_t v;

    if (!parse_number(value, 10, UINT32_MAX - 1, &v))
        return wrong_value("uid", value, e, "a user number");
    o->has_uid = true;
    o->uid = (uid_t)v;
    return 0;
}

static int take_gid(const char *value, struct mount_options *o, struct err *e)
{
    uint64_t v;

    if (!parse_number(value, 10, UINT32_MAX - 1, &v))
        return wrong_value("gid", value, e, "a group number");
    o->has_gid = true;
    o->gid = (gid_t)v;
    return 0;
}

static int take_umask(const char *value, struct mount_options *o, struct err *e)
{
    uint64_t v;

    if (!parse_number(value, 8, 0777, &v))
        return wrong_value("umask", value, e, "an octal number such as 027");
    o->umask = (mode_t)v;
    return 0;
}

static int take_cache_dir(const char *value, struct mount_options *o, struct err *e)
{
    if (!*value)
        return wrong_value("cache_dir", value, e, "a directory");
    o->cache_dir = value;
    return 0;
}

static int take_cache_size(const char *value, struct mount_options *o, struct err *e)
{
    if (!parse_bytes(value, &o->cache_size))
        return wrong_value("cache_size", value, e,
                           "bytes, or a number with K, M, G, T");
    o->no_cache = o->cache_size == 0;
    return 0;
}

enum { SETTLED_SECONDS = 60 };

/* SIZE[:settled=SECONDS] */
static int take_materialize(const char *value, struct mount_options *o, struct err *e)
{
    const char *more = strchr(value, ':');
    uint64_t seconds = SETTLED_SECONDS;
    char size[32];

    snprintf(size, sizeof size, "%.*s", (int)strcspn(value, ":"), value);
    if (!parse_bytes(size, &o->materialize) ||
        (more && (strncmp(more, ":settled=", 9) != 0 ||
                  !parse_number(more + 9, 10, 86400, &seconds))))
        return wrong_value("materialize", value, e,
                           "bytes of disk, or a number with K, M, G, T; and "
                           ":settled=SECONDS behind it");
    o->settled = (unsigned)seconds;
    return 0;
}

static int take_stage_size(const char *value, struct mount_options *o, struct err *e)
{
    if (!parse_bytes(value, &o->stage_size) || o->stage_size == 0)
        return wrong_value("stage_size", value, e,
                           "bytes, or a number with K, M, G, T");
    return 0;
}

static int take_jobs(const char *value, struct mount_options *o, struct err *e)
{
    return parse_jobs(value, &o->jobs)
               ? 0
               : wrong_value("jobs", value, e, "a number of threads, 1 to 1024");
}

static int take_refresh(const char *value, struct mount_options *o, struct err *e)
{
    uint64_t v;

    if (!parse_number(value, 10, 86400, &v))
        return wrong_value("refresh", value, e, "seconds");
    o->has_refresh = true;
    o->refresh = (unsigned)v;
    return 0;
}

static int take_index(const char *value, struct mount_options *o, struct err *e)
{
    if (strcmp(value, "memory") != 0)
        return wrong_value("index", value, e, "memory");
    o->memory_index = true;
    return 0;
}

static int take_prefix(const char *value, struct mount_options *o, struct err *e)
{
    static const char *const name[] = {
        [PREFIX_AUTO] = "auto", [PREFIX_KEEP] = "keep", [PREFIX_DROP] = "drop"};

    for (size_t i = 0; i < ARRAY_SIZE(name); i++)
        if (!strcmp(value, name[i])) {
            o->prefix = (enum view_prefix)i;
            return 0;
        }
    return wrong_value("prefix", value, e, "auto, keep or drop");
}

static int take_map(const char *value, struct mount_options *o, struct err *e)
{
    if (!*value)
        return wrong_value("map", value, e, "a map's name, or its file");
    o->mapping.map = value;
    return 0;
}

static int take_hf(const char *value, struct mount_options *o, struct err *e)
{
    if (!*value)
        return wrong_value("hf", value, e, "a directory with a config.json");
    o->mapping.hf = value;
    return 0;
}

static int take_weights(const char *value, struct mount_options *o, struct err *e)
{
    o->mapping.module_weights = strcmp(value, "module") == 0;
    if (!o->mapping.module_weights && strcmp(value, "master") != 0)
        return wrong_value("weights", value, e, "master or module");
    return 0;
}

static int take_dtype(const char *value, struct mount_options *o, struct err *e)
{
    if (!mapping_dtype(value, &o->mapping.dtype))
        return wrong_value("dtype", value, e,
                           "F64, F32, F16, BF16, F8_E4M3 or F8_E5M2");
    return 0;
}

/* views=tensors+raw: the list's own comma separates options. */
static int take_views(const char *value, struct mount_options *o, struct err *e)
{
    char list[256];

    if (snprintf(list, sizeof list, "%s", value) >= (int)sizeof list)
        return wrong_value("views", value, e, "tensors+tree+raw+optimizer+model");
    for (char *p = list; *p; p++)
        if (*p == '+' || *p == ':')
            *p = ',';
    return mount_views_parse(list, &o->views, e);
}

static int take_rw(const char *value, struct mount_options *o, struct err *e)
{
    (void)value;
    (void)e;
    o->rw = true;
    return 0;
}

static int take_ro(const char *value, struct mount_options *o, struct err *e)
{
    (void)value;
    (void)e;
    o->rw = false;
    return 0;
}

static int take_save(const char *value, struct mount_options *o, struct err *e)
{
    if (!*value)
        return wrong_value("save", value, e, "a format, as in hf or dcp:ranks=8");
    o->save = value;
    return mount_save_check(value, e);
}

/* A device's number, as `unshard hold --device` takes it. */
static int take_gpu(const char *value, struct mount_options *o, struct err *e)
{
    unsigned n;
    int end = 0;

    o->gpu = 0;
    if (!strcmp(value, "off"))
        return 0;
    if (sscanf(value, "%2u%n", &n, &end) != 1 || value[end] || *value < '0')
        return wrong_value("gpu", value, e, "off, or the number of a device");
    o->gpu = n + 1;
    return 0;
}

static const struct option_kind kinds[] = {
    {"allow_other", NULL, take_allow_other},
    {"uid=", NULL, take_uid},
    {"gid=", NULL, take_gid},
    {"umask=", NULL, take_umask},
    {"cache_dir=", NULL, take_cache_dir},
    {"cache_size=", NULL, take_cache_size},
    {"materialize=", NULL, take_materialize},
    {"jobs=", NULL, take_jobs},
    {"index=", NULL, take_index},
    {"prefix=", NULL, take_prefix},
    {"views=", NULL, take_views},
    {"map=", NULL, take_map},
    {"hf=", NULL, take_hf},
    {"dtype=", NULL, take_dtype},
    {"weights=", NULL, take_weights},
    {"refresh=", NULL, take_refresh},
    {"follow_symlinks", NULL, take_follow},
    {"debug", NULL, take_debug},
    {"gpu=", NULL, take_gpu},
    {"rw", NULL, take_rw},
    {"save=", NULL, take_save},
    {"keep_files", NULL, take_nothing}, /* files stay files in every mount with rw */
    {"stage_size=", NULL, take_stage_size},
    /* Computed views and what else is to come. */
    {"dequant", "weights of a quantised model as numbers", NULL},
    {"dequant=", "weights of a quantised model as numbers", NULL},
    {"lora=", "an adapter added to the model", NULL},
    {"mean=", "the mean of several checkpoints", NULL},
    {"fill=", "missing tensors from a base model", NULL},
    {"materialize_dir=", "another directory for copies", NULL},
    {"warm=", "reading the latest checkpoint ahead", NULL},
    /* What fstab and mount(8) pass: true of every mount of ours, or not for us. */
    {"ro", NULL, take_ro},
    {"defaults", NULL, take_nothing},
    {"default_permissions", NULL, take_nothing},
    {"nosuid", NULL, take_nothing},
    {"nodev", NULL, take_nothing},
    {"noexec", NULL, take_nothing},
    {"suid", NULL, take_nothing},
    {"dev", NULL, take_nothing},
    {"exec", NULL, take_nothing},
    {"noatime", NULL, take_nothing},
    {"relatime", NULL, take_nothing},
    {"norelatime", NULL, take_nothing},
    {"strictatime", NULL, take_nothing},
    {"nostrictatime", NULL, take_nothing},
    {"diratime", NULL, take_nothing},
    {"nodiratime", NULL, take_nothing},
    {"lazytime", NULL, take_nothing},
    {"nolazytime", NULL, take_nothing},
    {"async", NULL, take_nothing},
    {"auto", NULL, take_nothing},
    {"noauto", NULL, take_nothing},
    {"nofail", NULL, take_nothing},
    {"_netdev", NULL, take_nothing},
    {"user", NULL, take_nothing},
    {"users", NULL, take_nothing},
    {"nouser", NULL, take_nothing},
    {"nousers", NULL, take_nothing},
    {"owner", NULL, take_nothing},
    {"group", NULL, take_nothing},
};

const char *mount_option_name(size_t i)
{
    for (size_t k = 0; k < ARRAY_SIZE(kinds); k++)
        if (kinds[k].take != take_nothing && kinds[k].take && i-- == 0)
            return kinds[k].name;
    return NULL;
}

int option_not_built(const char *dashes, const char *option, const char *what,
                     struct err *e)
{
    err_set(e, EINVAL, "%s%s: this version does not have it yet (%s)", dashes, option,
            what);
    return err_hint(e, "leave the option out");
}

static int unknown(const char *option, struct err *e)
{
    struct suggestion s;

    suggest_begin(&s, option, strcspn(option, "="));
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        if (kinds[i].take && kinds[i].take != take_nothing)
            suggest_try(&s, kinds[i].name, strcspn(kinds[i].name, "="));
    err_set(e, EINVAL, "-o %s: no such option", option);
    if (suggest_found(&s))
        return err_hint(e, "is %s meant?", suggest_found(&s));
    return err_hint(e, "man mount.unshardfs lists them");
}

static int take_option(const char *option, struct mount_options *out, struct err *e)
{
    if (!strncmp(option, "x-", 2) || !strncmp(option, "comment=", 8))
        return 0; /* for systemd and people */
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        const struct option_kind *k = &kinds[i];
        size_t n = strlen(k->name);

        if (k->name[n - 1] == '=' ? strncmp(option, k->name, n) != 0
                                  : strcmp(option, k->name) != 0)
            continue;
        return k->take ? k->take(option + n, out, e)
                       : option_not_built("-o ", option, k->later, e);
    }
    return unknown(option, e);
}

bool mount_option_later(const char *option, struct err *e)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        size_t n = strlen(kinds[i].name);

        if (kinds[i].take || strncmp(option, kinds[i].name, n) != 0 ||
            (kinds[i].name[n - 1] != '=' && option[n]))
            continue;
        option_not_built("-o ", option, kinds[i].later, e);
        return true;
    }
    return false;
}

/* What one option says and another one forbids. */
static int check_together(const struct mount_options *o, struct err *e)
{
    if (o->save && !o->rw) {
        err_set(e, EINVAL, "-o save=%s: nothing is saved in a mount for reading",
                o->save);
        return err_hint(e, "add rw");
    }
    if (o->stage_size && !o->rw) {
        err_set(e, EINVAL, "-o stage_size=: nothing is staged in a mount for reading");
        return err_hint(e, "add rw");
    }
    if (o->materialize && (o->rw || o->memory_index)) {
        err_set(e, EINVAL, "-o materialize=: not with %s",
                o->rw ? "rw, where files change under who reads them"
                      : "index=memory, which writes nothing to disk");
        return err_hint(e, "leave one of the two out");
    }
    return 0;
}

int mount_options_parse(char *text, struct mount_options *out, struct err *e)
{
    int ret = 0;

    for (char *o; ret == 0 && (o = option_next(&text));)
        if (*o)
            ret = take_option(o, out, e);
    return ret == 0 ? check_together(out, e) : ret;
}
