/* SPDX-License-Identifier: MIT */
/* cli/cmd_cache.c - what lies in the cache directory, how much it may be, and away with it. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>

#include "base/buf.h"
#include "base/fsutil.h"
#include "cli/cli.h"
#include "index/catalog_list.h"
#include "remote/block_disk.h"

enum { OWNERS = 256, WHEN_MAX = 24 };

/* What the directory holds. */
struct cache_facts {
    char dir[PATH_MAX];
    struct block_disk_stats blocks;
    struct block_owner owner[OWNERS];
    size_t owners;
    uint64_t indexes, index_bytes;
    uint64_t pieces, piece_bytes; /* unnamed files of processes that run */
};

static const char *when(int64_t used, char dst[WHEN_MAX])
{
    time_t t = (time_t)used;
    struct tm tm;

    if (!localtime_r(&t, &tm) || !strftime(dst, WHEN_MAX, "%Y-%m-%d %H:%M", &tm))
        snprintf(dst, WHEN_MAX, "?");
    return dst;
}

/* ---- decoded pieces ---- */

/*
 * A file without a name of a process, that lies on the cache's disk: its link in /proc
 * names the directory that it was made in. Those of other users are not to be seen.
 */
static void add_piece(struct cache_facts *f, int fds, const char *name)
{
    char text[PATH_MAX];
    ssize_t n = readlinkat(fds, name, text, sizeof text - 1);
    size_t len = strlen(f->dir);
    struct stat st;

    if (n <= 0)
        return;
    text[n] = '\0';
    if (strncmp(text, f->dir, len) != 0 || text[len] != '/' ||
        strchr(text + len + 1, '/') || !strstr(text + len, " (deleted)"))
        return;
    if (fstatat(fds, name, &st, 0) == 0 && S_ISREG(st.st_mode)) {
        f->pieces++;
        f->piece_bytes += (uint64_t)st.st_blocks * 512;
    }
}

static void add_process(struct cache_facts *f, int proc, const char *pid)
{
    char path[64];
    int fd;
    DIR *d;

    snprintf(path, sizeof path, "%.20s/fd", pid);
    fd = openat(proc, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    d = fd >= 0 ? fdopendir(fd) : NULL;
    if (!d && fd >= 0)
        close(fd);
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.')
            add_piece(f, dirfd(d), e->d_name);
    if (d)
        closedir(d);
}

static void add_pieces(struct cache_facts *f)
{
    DIR *d = opendir("/proc");

    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] >= '1' && e->d_name[0] <= '9')
            add_process(f, dirfd(d), e->d_name);
    if (d)
        closedir(d);
}

/* ---- showing ---- */

/* One row for each index as it is found. */
struct index_rows {
    struct cli *c;
    struct cache_facts *facts;
};

static void json_index(const struct catalog_listed *l, bool first)
{
    printf("%s\n    {\"source\": ", first ? "" : ",");
    if (l->source)
        out_json(stdout, l->source, strlen(l->source));
    else
        fputs("null", stdout);
    printf(", \"file\": \"%s\", \"bytes\": %" PRIu64 ", \"changed\": %" PRId64
           ", \"in_use\": %s}",
           l->name, l->bytes, l->used, l->in_use ? "true" : "false");
}

static int show_index(void *user, const struct catalog_listed *l)
{
    struct index_rows *r = user;
    const char *source = l->source ? l->source : "(damaged)";
    char size[16], date[WHEN_MAX];

    if (r->c->opt.json) {
        json_index(l, r->facts->indexes == 0);
    } else {
        printf("  index   %10s  %-16s  ", out_size(l->bytes, size),
               when(l->used, date));
        out_text(stdout, source, strlen(source), 0);
        puts(l->in_use ? "  (in use)" : "");
    }
    r->facts->indexes++;
    r->facts->index_bytes += l->bytes;
    return 0;
}

static const char *owner_name(const struct block_owner *o)
{
    return o->name[0] ? o->name : "(not named)";
}

static void show_owners(const struct cache_facts *f)
{
    char size[16], date[WHEN_MAX];

    for (size_t i = 0; i < f->owners; i++) {
        const struct block_owner *o = &f->owner[i];

        printf("  blocks  %10s  %-16s  ", out_size(o->bytes, size),
               when(o->used, date));
        out_text(stdout, owner_name(o), strlen(owner_name(o)), 0);
        putchar('\n');
    }
}

static void show_totals(const struct cache_facts *f)
{
    char taken[16], limit[16], indexes[16], pieces[16];

    printf("blocks of remote sources: %s on disk of at most %s%s\n",
           out_size(f->blocks.taken, taken), out_size(f->blocks.limit, limit),
           f->blocks.read_only ? ", read only" : "");
    printf("indexes: %" PRIu64 ", %s\n", f->indexes, out_size(f->index_bytes, indexes));
    printf("decoded pieces of running processes: %" PRIu64 ", %s\n", f->pieces,
           out_size(f->piece_bytes, pieces));
}

static void json_blocks(const struct cache_facts *f)
{
    printf(",\n \"blocks\": {\"limit\": %" PRIu64 ", \"bytes\": %" PRIu64
           ", \"valid\": %" PRIu64 ", \"blocks\": %" PRIu64
           ", \"read_only\": %s, \"sources\": [",
           f->blocks.limit, f->blocks.taken, f->blocks.valid, f->blocks.blocks,
           f->blocks.read_only ? "true" : "false");
    for (size_t i = 0; i < f->owners; i++) {
        const struct block_owner *o = &f->owner[i];

        printf("%s\n    {\"source\": ", i ? "," : "");
        if (o->name[0])
            out_json(stdout, o->name, strlen(o->name));
        else
            fputs("null", stdout);
        printf(", \"blocks\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"used\": %" PRId64
               "}",
               o->blocks, o->bytes, o->used);
    }
    fputs("]}", stdout);
}

/* Its blocks, when there are any: to look must not make them. */
static int find_blocks(struct cli *c, struct cache_facts *f)
{
    CLEANUP(block_disk_closep) struct block_disk *d = NULL;
    CLEANUP_FREE char *table = NULL;

    f->blocks.limit = BLOCK_DISK_DEFAULT;
    if (asprintf(&table, "%s/blocks/table", f->dir) < 0) {
        table = NULL;
        return err_nomem(&c->err);
    }
    if (access(table, F_OK) < 0)
        return 0;
    TRY(block_disk_open(f->dir, BLOCK_DISK_AS_IS, &d, &c->err));
    return block_disk_list(d, &f->blocks, f->owner, OWNERS, &f->owners, &c->err);
}

static int list(struct cli *c, struct cache_facts *f)
{
    struct index_rows rows = {.c = c, .facts = f};
    int rc = find_blocks(c, f);

    if (rc < 0)
        return rc;
    add_pieces(f);
    if (c->opt.json) {
        fputs("{\"schema\": 1, \"directory\": ", stdout);
        out_json(stdout, f->dir, strlen(f->dir));
        json_blocks(f);
        fputs(",\n \"indexes\": [", stdout);
    } else {
        out_text(stdout, f->dir, strlen(f->dir), 0);
        putchar('\n');
        show_owners(f);
    }
    rc = catalog_list(f->dir, show_index, &rows, &c->err);
    if (rc == 0 && !c->opt.json)
        show_totals(f);
    else if (rc == 0)
        printf("],\n \"decoded\": {\"pieces\": %" PRIu64 ", \"bytes\": %" PRIu64 "}}\n",
               f->pieces, f->piece_bytes);
    return rc;
}

/* ---- changing ---- */

struct clearing {
    struct cli *c;
    const char *dir;
    uint64_t cleared, bytes, kept;
};

static int clear_index(void *user, const struct catalog_listed *l)
{
    struct clearing *x = user;
    int rc = catalog_remove(x->dir, l->name, &x->c->err);

    if (rc == -EBUSY) { /* a mount goes on with it */
        x->c->err = (struct err){0};
        x->kept++;
        return 0;
    }
    x->cleared++;
    x->bytes += l->bytes;
    return rc;
}

static int clear_blocks(struct cli *c, struct cache_facts *f)
{
    CLEANUP(block_disk_closep) struct block_disk *d = NULL;
    int rc = find_blocks(c, f);

    if (rc < 0 || !f->blocks.taken)
        return rc;
    rc = block_disk_open(f->dir, BLOCK_DISK_AS_IS, &d, &c->err);
    return rc < 0 ? rc : block_disk_clear(d, &c->err);
}

static int clear(struct cli *c, struct cache_facts *f)
{
    struct clearing x = {.c = c, .dir = f->dir};
    char blocks[16], indexes[16];
    int rc = clear_blocks(c, f);

    if (rc == 0)
        rc = catalog_list(f->dir, clear_index, &x, &c->err);
    if (rc < 0)
        return rc;
    if (c->opt.json)
        printf("{\"schema\": 1, \"blocks_bytes\": %" PRIu64 ", \"indexes\": %" PRIu64
               ", \"indexes_bytes\": %" PRIu64 ", \"in_use\": %" PRIu64 "}\n",
               f->blocks.taken, x.cleared, x.bytes, x.kept);
    else if (!c->opt.quiet)
        printf("gone: blocks, %s; indexes: %" PRIu64 ", %s%s\n",
               out_size(f->blocks.taken, blocks), x.cleared, out_size(x.bytes, indexes),
               x.kept ? " (those in use stayed)" : "");
    return 0;
}

static int show_limit(struct cli *c, struct cache_facts *f)
{
    char limit[16];
    int rc = find_blocks(c, f);

    if (rc == 0 && c->opt.json)
        printf("{\"schema\": 1, \"limit\": %" PRIu64 "}\n", f->blocks.limit);
    else if (rc == 0)
        puts(out_size(f->blocks.limit, limit));
    return rc;
}

static int set_limit(struct cli *c, struct cache_facts *f, const char *text)
{
    CLEANUP(block_disk_closep) struct block_disk *d = NULL;
    uint64_t limit;

    if (!parse_bytes(text, &limit) || limit < BLOCK_DISK_MIN) {
        err_set(&c->err, EINVAL, "cache limit %s: not a size of 4M or more", text);
        err_hint(&c->err, "bytes, or a number with K, M, G, T; none at all: mount with "
                          "-o cache_size=0");
        return cli_usage(c);
    }
    TRY(block_disk_open(f->dir, limit, &d, &c->err));
    return show_limit(c, f);
}

static int run(struct cli *c)
{
    CLEANUP_FREE struct cache_facts *f = calloc(1, sizeof *f);
    CLEANUP(buf_release) struct buf dir = {.max = PATH_MAX};
    const char *verb = c->args ? c->arg[0] : "list";

    if (!f)
        return err_nomem(&c->err);
    TRY(cache_dir(c->opt.cache_dir, &dir, &c->err));
    if (!realpath(dir.data, f->dir))
        return err_set(&c->err, errno, "%s: %s", dir.data, strerror(errno));
    if (!strcmp(verb, "list") && c->args < 2)
        return list(c, f);
    if (!strcmp(verb, "clear") && c->args < 2)
        return clear(c, f);
    if (!strcmp(verb, "limit"))
        return c->args < 2 ? show_limit(c, f) : set_limit(c, f, c->arg[1]);
    err_set(&c->err, EINVAL, "cache %s: nothing that can be done with it",
            c->args < 2 ? verb : c->arg[1]);
    err_hint(&c->err, "usage: unshard cache [list|clear|limit [SIZE]]");
    return cli_usage(c);
}

const struct cli_command cmd_cache = {
    .name = "cache",
    .usage = "cache [list|clear|limit [SIZE]]",
    .summary = "what the cache directory holds, and how much it may",
    .min_args = 0,
    .max_args = 2,
    .takes = "",
    .run = run,
};
