/* SPDX-License-Identifier: MIT */
/* cli/source.c - a command's source: how it is opened, and what of it is meant. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <malloc.h>
#include <string.h>
#include <sys/resource.h>

#include "base/buf.h"
#include "base/confine.h"
#include "base/log.h"
#include "cli/cli.h"
#include "cli/suggest.h"
#include "index/dtype.h"
#include "index/formats/scan.h"
#include "index/formats/unread.h"
#include "lib/unshard.h"
#include "remote/http.h"
#include "remote/store.h"
#include "save/publish.h"

enum {
    NAMED_CHECKPOINTS = 3, /* in the message about a tree */
    /* Windows and spans are no longer than this: what is freed of them stays with us. */
    KEPT_MEMORY = 8 << 20,
};

static void cover(char *text, size_t len)
{
    memset(text, 'x', len);
}

int cli_hide(char *arg, char **secret, char **shown)
{
    char *host, *path, *at;

    *secret = NULL;
    if (!store_is_url(arg))
        return 0;
    host = strstr(arg, "://") + 3;
    path = host + strcspn(host, "/?#");
    at = (char *)(uintptr_t)http_url_user(arg);
    if (!at && !strchr(path, '?'))
        return 0;
    *secret = strdup(arg);
    *shown = store_name_shown(arg);
    if (!*secret || !*shown) {
        free(*secret);
        free(*shown);
        return -ENOMEM;
    }
    if (at)
        cover(host, (size_t)(at - host));
    if ((path = strchr(path, '?')))
        cover(path + 1, strlen(path + 1));
    return 0;
}

/* What the user wrote. */
static const char *as_given(const struct cli *c, const char *name)
{
    for (int i = 0; i < (int)ARRAY_SIZE(c->secret) && i < c->args; i++)
        if (c->secret[i] && c->arg[i] == name)
            return c->secret[i];
    return name;
}

static struct reading_options options_of(const struct cli *c)
{
    const struct cli_options *o = &c->opt;

    return (struct reading_options){.cache_dir = o->cache_dir,
                                    .index_memory = o->index_memory,
                                    .no_cache = o->no_cache,
                                    .cache_size = o->cache_size,
                                    .follow_symlinks = o->follow_symlinks,
                                    .jobs = o->jobs,
                                    .once = true,
                                    .mapping = o->mapping};
}

void cli_confine(const struct cli *c)
{
    CLEANUP(buf_release) struct buf dir = {0};
    const struct reading_options o = options_of(c);
    const char *writable[] = {NULL, NULL};

    for (int i = 0; i < c->args; i++)
        if (store_is_url(c->arg[i]))
            return;
    if (reading_writes_to(&o, &dir) < 0)
        return;
    writable[0] = dir.data;
    /* A scan that outgrows its memory goes on in a file of sqlite's, which must be able to be. */
    if (setenv("SQLITE_TMPDIR", dir.data, 1) < 0)
        return;
    (void)confine(CONFINE_CALLS | CONFINE_FILES, writable);
}

/* Every shard of a checkpoint may be open at once. */
static void raise_open_files(void)
{
    struct rlimit lim;

    if (getrlimit(RLIMIT_NOFILE, &lim) == 0 && lim.rlim_cur < lim.rlim_max) {
        lim.rlim_cur = lim.rlim_max;
        setrlimit(RLIMIT_NOFILE, &lim);
    }
}

/*
 * A command that goes over all bytes frees and takes windows all the time. By default the
 * C library gives them back to the kernel, which clears each page anew: an eighth of the
 * processor time of a conversion.
 */
static void keep_memory(void)
{
#ifdef M_TRIM_THRESHOLD
    (void)mallopt(M_MMAP_THRESHOLD, KEPT_MEMORY);
    (void)mallopt(M_TRIM_THRESHOLD, KEPT_MEMORY);
#endif
}

/* Why all is scanned anew each time; `unshard doctor` says it too. */
static void tell_of_index(const struct reading *r)
{
    char line[1400];

    if (r->why_memory.code)
        log_msg(LOG_CLI, LOG_INFO, "the index is kept in memory: %s",
                err_line(&r->why_memory, line, sizeof line));
}

static bool is_in_progress(const char *dir, const char *name)
{
    CLEANUP_FD int fd = open(*dir ? dir : "/", O_PATH | O_DIRECTORY | O_CLOEXEC);

    return fd >= 0 && publish_in_progress(fd, name);
}

/* Of a directory between its old and its new files: what is missing there is no damage. */
static void tell_of_step(const char *name)
{
    char path[PATH_MAX];
    char *slash =
        store_is_url(name) || !realpath(name, path) ? NULL : strrchr(path, '/');
    bool begun = slash && is_in_progress(path, ".");

    if (slash && slash[1] && !begun) {
        *slash = '\0';
        begun = is_in_progress(path, slash + 1);
    }
    if (begun)
        log_msg(
            LOG_CLI, LOG_WARN,
            "%s: a publication into it was interrupted: files may be missing until it "
            "is mounted with -o rw, which ends it",
            name);
}

int cli_open(struct cli *c, const char *name, struct reading *out)
{
    const struct reading_options o = options_of(c);
    int ret;

    keep_memory();
    raise_open_files();
    tell_of_step(name);
    ret = reading_open(as_given(c, name), &o, out, &c->err);
    out->name = name;
    tell_of_index(out);
    if (ret == 0)
        return 0;
    if (!out->store && ret == -ENOTSUP && store_is_url(name))
        ret = cli_usage(c);
    reading_close(out);
    return ret;
}

void cli_library_options(const struct cli *c, struct unshard_options *out)
{
    const struct cli_options *o = &c->opt;

    *out = (struct unshard_options){.size = sizeof *out,
                                    .cache_dir = o->cache_dir,
                                    .index_memory = o->index_memory,
                                    .follow_symlinks = o->follow_symlinks,
                                    .no_cache = o->no_cache,
                                    .cache_size = o->cache_size,
                                    .jobs = o->jobs,
                                    .map = o->mapping.map,
                                    .hf = o->mapping.hf,
                                    .module_weights = o->mapping.module_weights};
    if (o->mapping.dtype != DTYPE_NONE)
        out->dtype = dtype_name(o->mapping.dtype);
}

int cli_is_checkpoint(struct cli *c, struct reading *s)
{
    int ret = reading_is_tree(s, &c->err);

    return ret < 0 ? ret : !ret;
}

struct found {
    struct buf names;
    size_t count;
    char unfinished[300]; /* the first, and why */
};

static int note_checkpoint(void *user, const char *dir, const char *file,
                           const struct format_driver *d)
{
    struct found *f = user;

    (void)d;
    if (f->count++ < NAMED_CHECKPOINTS)
        buf_addf(&f->names, "%s%s%s%s", f->count > 1 ? ", " : "", dir,
                 file && *dir ? "/" : "", file ? file : "");
    return f->count > 1000; /* enough to tell a person */
}

static int note_unfinished(void *user, const char *dir, const char *why)
{
    struct found *f = user;

    if (!f->unfinished[0])
        snprintf(f->unfinished, sizeof f->unfinished, "; %s: %s", dir, why);
    return 0;
}

/* A save that is not finished has its shards and not yet what tells where they belong. */
static size_t shards_without_metadata(const struct listing *l)
{
    size_t shards = 0;

    if (listing_find(l, ".metadata"))
        return 0;
    for (size_t i = 0; i < listing_count(l); i++) {
        const char *dot = strrchr(listing_at(l, i)->name, '.');

        shards += dot && strcmp(dot, ".distcp") == 0;
    }
    return shards;
}

int cli_no_checkpoint(struct cli *c, struct reading *s)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct err ignored = {0};
    bool listed = s->store->ops->list(s->store, "", &l, &ignored) == 0;
    size_t shards = listed ? shards_without_metadata(l) : 0;

    if (shards) {
        err_set(&c->err, ENOENT,
                "%s: no checkpoint: %zu .distcp files, and no .metadata beside them",
                s->name, shards);
        return err_hint(&c->err,
                        "the save is not finished, or .metadata was not copied "
                        "along: names that begin with a dot are left out by *");
    }
    if (listed)
        TRY(unread_tell(l, s->store->file, s->name, &c->err));
    err_set(&c->err, ENOENT, "%s: no checkpoint that a driver recognises", s->name);
    return err_hint(&c->err, "`unshard probe %s` tells what each driver saw", s->name);
}

static int not_one_checkpoint(struct cli *c, struct reading *s)
{
    struct found found = {.names = {.max = 4096}};
    struct err why = {0};
    int rc = scanner_walk_all(s->scanner, "", note_checkpoint, note_unfinished, &found,
                              &why);

    if (!found.count && rc < 0) {
        c->err = why;
    } else if (!found.count) {
        cli_no_checkpoint(c, s);
    } else {
        err_set(&c->err, ENOENT, "%s: a tree with %zu%s checkpoint%s (%s%s)%s", s->name,
                found.count, found.count > 1000 ? " or more" : "",
                found.count > 1 ? "s" : "", found.names.data ? found.names.data : "",
                found.count > NAMED_CHECKPOINTS ? ", ..." : "", found.unfinished);
        err_hint(&c->err, "name one: %s/CHECKPOINT", s->name);
    }
    buf_release(&found.names);
    return -c->err.code;
}

int cli_checkpoint(struct cli *c, struct reading *s, struct arena *a,
                   struct checkpoint_info *out)
{
    struct progress progress = {0};
    int ret;

    progress_begin(&progress, c, "scan", s->name, 0);
    ret = reading_checkpoint(s, a, out, &c->err);
    progress_end(&progress);
    return ret > 0 ? not_one_checkpoint(c, s) : ret;
}

/* ---- keys that are not there ---- */

struct near {
    struct suggestion suggestion;
    const char *part; /* of keys, literally */
    size_t len;
    uint64_t with_part;
};

static int see_key(void *user, const struct tensor_info *t)
{
    struct near *n = user;

    suggest_try(&n->suggestion, t->key, t->key_len);
    n->with_part += n->len && memmem(t->key, t->key_len, n->part, n->len);
    return 0;
}

/* What a key or a pattern that nothing matches may have meant. */
static int hint_key(struct cli *c, struct reading *s, int64_t checkpoint,
                    const char *word)
{
    size_t skip = strspn(word, "*."), len = strcspn(word + skip, "*?[");
    struct near n = {.part = word + skip, .len = len};
    struct err ignored = {0};

    while (n.len && n.part[n.len - 1] == '.')
        n.len--;
    suggest_begin(&n.suggestion, n.part, n.len);
    if (catalog_tensors(s->catalog, checkpoint, 0, see_key, &n, &ignored) == 0) {
        if (n.with_part > 1)
            return err_hint(&c->err, "\"*%.*s*\" matches %" PRIu64 " of its keys",
                            (int)n.len, n.part, n.with_part);
        if (suggest_found(&n.suggestion))
            return err_hint(&c->err, "is %s meant?", suggest_found(&n.suggestion));
    }
    return err_hint(&c->err, "`unshard ls %s` lists them", s->name);
}

int cli_no_match(struct cli *c, struct reading *s, int64_t checkpoint,
                 const char *pattern)
{
    err_set(&c->err, ENOENT, "%s: no tensor matches %s", s->name, pattern);
    return hint_key(c, s, checkpoint, pattern);
}

int cli_tensor(struct cli *c, struct reading *s, const char *key, struct arena *a,
               struct checkpoint_info *info, struct tensor_info *out)
{
    int ret = cli_checkpoint(c, s, a, info);

    if (ret < 0)
        return ret;
    ret =
        catalog_tensor_by_key(s->catalog, info->id, key, strlen(key), a, out, &c->err);
    if (ret != -ENOENT)
        return ret;
    err_set(&c->err, ENOENT, "%s: no tensor %s", s->name, key);
    return hint_key(c, s, info->id, key);
}
