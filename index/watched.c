/* SPDX-License-Identifier: MIT */
/* index/watched.c - directories by their times, or by their names while those are too new. */
#include "index/watched.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#include "base/err.h"

#define SECOND_NS INT64_C(1000000000)
#define RACY_NS (2 * SECOND_NS) /* what file systems with coarse clocks need */
#define BY_NAMES INT64_MIN      /* in the place of a time that no directory has */

/* Where a save of ours is made (save/staging.h): what comes and goes there is no one's yet. */
static bool is_staging(const struct listing_entry *entry)
{
    static const char start[] = ".unshard-staging-";

    return entry->st.kind == ENTRY_DIR &&
           strncmp(entry->name, start, sizeof start - 1) == 0;
}

uint64_t watched_names(const struct listing *l, uint64_t seed)
{
    uint64_t hash = seed;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        uint64_t kind = (uint64_t)entry->st.kind * 2 + entry->st.is_link;

        if (is_staging(entry))
            continue;
        hash = XXH3_64bits_withSeed(entry->name, strlen(entry->name) + 1, hash + kind);
    }
    return hash;
}

static bool is_racy(const struct entry_stat *st)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec -
               MAX(st->id.mtime_ns, st->id.ctime_ns) <
           RACY_NS;
}

static int by_names(struct store *s, const char *path, const struct entry_stat *st,
                    struct file_id *out, struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = NULL;

    TRY(s->ops->list(s, path, &l, e));
    *out = (struct file_id){.dev = st->id.dev,
                            .ino = st->id.ino,
                            .mtime_ns = BY_NAMES,
                            .ctime_ns = (int64_t)(watched_names(l, 1) >> 1)};
    return 0;
}

int watched_directory(struct store *s, const char *path, const struct entry_stat *st,
                      struct file_id *out, struct err *e)
{
    struct err why = {0};

    *out = st->id;
    if (!is_racy(st) || by_names(s, path, st, out, &why) == 0)
        return 0;
    out->mtime_ns = BY_NAMES; /* it cannot be listed: it is never the same */
    return why.code == ENOMEM ? err_nomem(e) : 0;
}

bool watched_same(struct store *s, const char *path, const struct entry_stat *st,
                  const struct file_id *was)
{
    struct file_id now = st->id;
    struct err ignored = {0};

    if (was->mtime_ns == BY_NAMES && by_names(s, path, st, &now, &ignored) < 0)
        return false;
    return file_id_equal(&now, was);
}
