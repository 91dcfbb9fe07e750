/* SPDX-License-Identifier: MIT */
/* remote/block_disk_list.c - whose blocks there are, and how many, for people. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/err.h"
#include "base/fsutil.h"
#include "remote/block_disk_priv.h"

enum { NAMES_MAX = 64 << 10 }; /* bytes of the file of owners' names */

/* All names, NUL-terminated; NULL: none. */
static char *read_names(const struct block_disk *d)
{
    CLEANUP_FREE char *text = malloc(NAMES_MAX + 1);
    ssize_t n = text && d->names >= 0 ? pread(d->names, text, NAMES_MAX, 0) : -1;

    if (n < 0)
        return NULL;
    text[n] = '\0';
    return steal(&text);
}

/* The owner's line, behind its number; NULL: it has none. */
static const char *find_name(const char *names, uint32_t owner)
{
    char number[16];
    int len = snprintf(number, sizeof number, "%08x ", owner);

    for (const char *p = names; p && *p;) {
        if (strncmp(p, number, (size_t)len) == 0)
            return p + len;
        p = strchr(p, '\n');
        p = p ? p + 1 : NULL;
    }
    return NULL;
}

void block_disk_name_owner(struct block_disk *d, uint32_t owner, const char *name)
{
    CLEANUP_FREE char *names = read_names(d);
    CLEANUP_FREE char *line = NULL;
    struct err ignored = {0};

    if (d->read_only || !names || find_name(names, owner) || strchr(name, '\n'))
        return;
    if (asprintf(&line, "%08x %s\n", owner, name) < 0) {
        line = NULL;
        return;
    }
    if (strlen(line) < NAMES_MAX - strlen(names))
        write_all(d->names, line, strlen(line), &ignored);
}

static void copy_name(struct block_owner *o, const char *names)
{
    const char *name = find_name(names, o->owner);
    size_t len = name ? MIN(strcspn(name, "\n"), sizeof o->name - 1) : 0;

    if (len)
        memcpy(o->name, name, len);
    o->name[len] = '\0';
}

static struct block_owner *owner_of(struct block_owner *owner, size_t max, size_t *n,
                                    uint32_t number)
{
    for (size_t i = 0; i < *n; i++)
        if (owner[i].owner == number)
            return &owner[i];
    if (*n == max)
        return NULL;
    owner[*n] = (struct block_owner){.owner = number};
    return &owner[(*n)++];
}

static void add_way(const struct block_way *w, struct block_disk_stats *stats,
                    struct block_owner *owner, size_t max, size_t *n)
{
    uint64_t bytes = (uint64_t)__builtin_popcount(w->valid) * BLOCK_SECTOR;
    struct block_owner *o;

    if (!w->tag || !bytes)
        return;
    stats->blocks++;
    stats->valid += bytes;
    o = owner_of(owner, max, n, w->owner);
    if (!o)
        return;
    o->blocks++;
    o->bytes += bytes;
    o->used = MAX(o->used, (int64_t)(w->used / 1000));
}

static uint64_t disk_bytes(int fd)
{
    struct stat st;

    return fd >= 0 && fstat(fd, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

static int by_bytes(const void *a, const void *b)
{
    const struct block_owner *x = a, *y = b;

    return (x->bytes < y->bytes) - (x->bytes > y->bytes);
}

int block_disk_list(struct block_disk *d, struct block_disk_stats *stats,
                    struct block_owner *owner, size_t max, size_t *n, struct err *e)
{
    CLEANUP_FREE struct block_set *s = malloc(sizeof *s);
    CLEANUP_FREE char *names = read_names(d);
    uint64_t sets;

    if (!s)
        return err_nomem(e);
    *n = 0;
    block_disk_look(d);
    sets = atomic_load(&d->sets);
    *stats = (struct block_disk_stats){
        .limit = atomic_load(&d->limit),
        .room = sets * BLOCK_WAYS * BLOCK_BYTES,
        .taken = disk_bytes(d->table) + disk_bytes(d->data) + disk_bytes(d->names),
        .read_only = d->read_only,
    };
    for (uint64_t set = 0; set < sets && block_disk_read_set(d, set, s); set++)
        for (unsigned i = 0; i < BLOCK_WAYS; i++)
            add_way(&s->way[i], stats, owner, max, n);
    for (size_t i = 0; i < *n; i++)
        copy_name(&owner[i], names);
    qsort(owner, *n, sizeof *owner, by_bytes);
    return 0;
}
