/* SPDX-License-Identifier: MIT */
/* cli/cmd_mount.c - `unshard mount`, and mount.unshardfs for fstab. */
#include <errno.h>
#include <getopt.h>
#include <string.h>

#include "base/arena.h"
#include "cli/cli.h"
#include "cli/mount_helper.h"
#include "cli/mount_options.h"
#include "remote/store.h"

enum { SCAN_MEMORY = 16 << 20 };

/* mount(8), "Exit status". */
enum { MOUNT_USAGE = 1, MOUNT_SYSTEM = 2, MOUNT_FAILED = 32 };

static int try_scan(const struct mount_options *o, const struct mapping_choice *mapping,
                    struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(SCAN_MEMORY);
    const struct reading_options how = {.cache_dir = o->cache_dir,
                                        .cache_optional = true,
                                        .index_memory = o->memory_index,
                                        .no_cache = o->no_cache,
                                        .cache_size = o->cache_size,
                                        .follow_symlinks = o->follow_symlinks,
                                        .jobs = o->jobs,
                                        .mapping = *mapping};
    struct checkpoint_info info;
    struct reading r;
    int ret = a ? reading_open(o->source, &how, &r, e) : err_nomem(e);

    if (ret == 0)
        ret = reading_checkpoint(&r, a, &info, e);
    if (a)
        reading_close(&r);
    return MIN(ret, 0);
}

/*
 * A map or a cast that refuses the checkpoint: then there is nothing to mount. What cannot
 * be read without it either is mounted, and told there. The scan is kept in the index.
 */
static int check_mapping(const struct mount_options *o, struct err *e)
{
    static const struct mapping_choice none = {0};
    struct err refused = {0}, plain = {0};

    if ((!o->mapping.map && !o->mapping.dtype) ||
        try_scan(o, &o->mapping, &refused) == 0 || try_scan(o, &none, &plain) < 0)
        return 0;
    return err_copy(e, &refused);
}

int mount_source(struct cli *c, const char *source, const char *mountpoint, char *text)
{
    struct mount_options o = {.source = source,
                              .mountpoint = mountpoint,
                              .foreground = c->opt.foreground,
                              .jobs = c->opt.jobs,
                              .cache_dir = c->opt.cache_dir,
                              .memory_index = c->opt.index_memory};

    int ret;

    if (text && mount_options_parse(text, &o, &c->err) < 0)
        return cli_usage(c);
    if (o.has_refresh && !o.refresh && store_is_url(source))
        o.refresh =
            1; /* as often as a server is asked at most: 0 leaves it to the mount */
    TRY(check_mapping(&o, &c->err));
    ret = fs_mount(&o, &c->err);
    return ret == -ENOTSUP && store_is_url(source) ? cli_usage(c) : ret;
}

static int run(struct cli *c)
{
    return mount_source(c, c->secret[0] ? c->secret[0] : c->arg[0], c->arg[1],
                        c->opt.mount);
}

/* The option of this name ("rw", "save=") in a comma list, or NULL. */
static char *find_option(char *text, const char *name)
{
    size_t len = strlen(name);

    for (char *o = text; o && *o;) {
        char *end = o;

        if (strncmp(o, name, len) == 0 &&
            (name[len - 1] == '=' || o[len] == ',' || o[len] == '\0'))
            return o;
        while (*end && *end != ',')
            end += 1 + (*end == '\\' && end[1]);
        o = *end ? end + 1 : end;
    }
    return NULL;
}

/*
 * mount(8) says "rw" to its helpers wherever nobody said "ro" (util-linux 2.38): that is no
 * wish to save. Who has it says how, or how much.
 */
static void settle_rw(char *text)
{
    char *rw;

    if (find_option(text, "save=") || find_option(text, "stage_size=") ||
        find_option(text, "keep_files"))
        return;
    while ((rw = find_option(text, "rw")))
        memcpy(rw, "ro", 2);
}

int mount_helper(struct cli *c, int argc, char **argv)
{
    CLEANUP_FREE char *secret = NULL;
    CLEANUP_FREE char *shown = NULL;
    char *text = NULL;
    int o, ret;

    opterr = 0;
    while ((o = getopt(argc, argv, "sfnvo:t:")) != -1) {
        switch (o) {
        case 'o':
            text = optarg;
            break;
        case 'f': /* mount -f: everything but the mount itself */
            return STATUS_DONE;
        case 's': /* sloppy; -n no mtab; -v; -t the type: nothing for us */
        case 'n':
        case 'v':
        case 't':
            break;
        default:
            err_set(&c->err, EINVAL, "usage: %s SOURCE MNT [-o options]", c->program);
            cli_fail(c, -EINVAL);
            return MOUNT_USAGE;
        }
    }
    if (argc - optind != 2) {
        err_set(&c->err, EINVAL, "usage: %s SOURCE MNT [-o options]", c->program);
        cli_fail(c, -EINVAL);
        return MOUNT_USAGE;
    }
    if (cli_hide(argv[optind], &secret, &shown) < 0) {
        cli_fail(c, err_nomem(&c->err));
        return MOUNT_SYSTEM;
    }
    settle_rw(text);
    ret = mount_source(c, secret ? secret : argv[optind], argv[optind + 1], text);
    if (ret >= 0)
        return STATUS_DONE;
    switch (cli_fail(c, ret)) {
    case STATUS_USAGE:
        return MOUNT_USAGE;
    case STATUS_ROOM:
        return MOUNT_SYSTEM;
    default:
        return MOUNT_FAILED;
    }
}

const struct cli_command cmd_mount = {
    .name = "mount",
    .usage = "mount SOURCE MNT [-o opt,...] [-f]",
    .summary = "shows the source's checkpoints as full tensors",
    .min_args = 2,
    .max_args = 2,
    .takes = "f",
    .run = run,
};
