/* SPDX-License-Identifier: MIT */
/* index/sink_files.c - the files of a running scan: numbers, sizes, rights. */
#include "index/sink_files.h"

#include "base/err.h"
#include "base/vec.h"
#include "index/key_text.h"
#include "index/watched.h"

#include <xxhash.h>

#include <errno.h>
#include <string.h>
#include <sys/random.h>

enum {
    FIRST_SLOTS = 64,
    MAX_FILES = 20 * 1000 * 1000, /* a file a chunk, and some */
};

int sink_files_init(struct sink_files *f, struct store *store, struct stage *stage,
                    struct err *e)
{
    *f = (struct sink_files){.store = store, .stage = stage, .nslots = FIRST_SLOTS};
    f->slot = calloc(f->nslots, sizeof *f->slot);
    /* Another one each scan, so that nobody can make up paths with equal hashes. */
    if (getrandom(&f->seed, sizeof f->seed, 0) != sizeof f->seed)
        f->seed = (uintptr_t)f->slot;
    return f->slot ? 0 : err_nomem(e);
}

void sink_files_release(struct sink_files *f)
{
    free(f->file);
    free(f->slot);
}

/* The slot of a path, or the free one where it would go. */
static uint32_t *find_slot(const struct sink_files *f, uint32_t *slots, uint32_t n,
                           uint64_t low, uint64_t high)
{
    uint32_t i = (uint32_t)low & (n - 1);

    while (slots[i] != 0 &&
           (f->file[slots[i] - 1].low != low || f->file[slots[i] - 1].high != high))
        i = (i + 1) & (n - 1);
    return &slots[i];
}

static int grow_slots(struct sink_files *f)
{
    uint32_t n = f->nslots * 2, *slots = calloc(n, sizeof *slots);

    if (!slots)
        return -ENOMEM;
    for (uint32_t i = 0; i < f->count; i++)
        *find_slot(f, slots, n, f->file[i].low, f->file[i].high) = i + 1;
    free(f->slot);
    f->slot = slots;
    f->nslots = n;
    return 0;
}

/* Room for one more; the slots at most half full. */
static int make_room(struct sink_files *f, struct err *e)
{
    if (f->count == MAX_FILES)
        return err_set(e, EFBIG, "more than %d files", MAX_FILES);
    if (!VEC_ROOM(f->file, f->count, f->cap))
        return err_nomem(e);
    return f->count >= f->nslots / 2 && grow_slots(f) < 0 ? err_nomem(e) : 0;
}

/*
 * The device is left out: its number can change when the machine starts again, and inode
 * numbers of the mount should not.
 */
static uint64_t identity_of(const char *path, const struct file_id *id)
{
    const uint64_t v[] = {id->size, id->ino, (uint64_t)id->mtime_ns,
                          (uint64_t)id->ctime_ns};

    return XXH3_64bits_withSeed(v, sizeof v, XXH3_64bits(path, strlen(path)));
}

/* -ENOMEM is an error; everything else that stat says is what is known of the file. */
static int look_at(struct sink_files *f, const char *path, struct entry_stat *st,
                   int *problem, struct err *e)
{
    struct err why = {0};
    int rc = f->store->ops->stat(f->store, path, st, &why);

    *problem = 0;
    if (rc == -ENOMEM)
        return err_nomem(e);
    if (rc == -ENOENT || rc == -ENOTDIR)
        *problem = ENOENT;
    else if (rc < 0)
        *problem = -rc;
    else if (st->kind == ENTRY_DIR)
        *problem = EISDIR;
    else if (st->kind != ENTRY_FILE)
        *problem = EINVAL;
    if (*problem == EISDIR)
        return watched_directory(f->store, path, st, &st->id, e);
    if (*problem != 0)
        *st = (struct entry_stat){.kind = ENTRY_OTHER};
    return 0;
}

static int add_new(struct sink_files *f, const char *path, bool storage, uint64_t low,
                   uint64_t high, struct err *e)
{
    struct entry_stat st = {0};
    struct sink_file *file;
    int problem, rc = make_room(f, e);

    if (rc == 0)
        rc = look_at(f, path, &st, &problem, e);
    st.mode &= 0777;
    if (rc == 0)
        rc = stage_file(f->stage, f->count, path, &st, e);
    if (rc < 0)
        return rc;
    file = &f->file[f->count];
    *file = (struct sink_file){
        .size = st.id.size,
        .identity = identity_of(path, &st.id),
        .low = low,
        .high = high,
        .problem = problem,
        .storage = storage,
    };
    if (problem == 0)
        file->rights = (struct stage_rights){.any = true,
                                             .mode = st.mode,
                                             .uid = st.uid,
                                             .gid = st.gid,
                                             .mtime_ns = st.id.mtime_ns};
    *find_slot(f, f->slot, f->nslots, low, high) = ++f->count;
    return 0;
}

int sink_files_add(struct sink_files *f, const char *path, bool storage,
                   uint32_t *number, bool *known, struct err *e)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(path, strlen(path), f->seed);
    uint32_t slot = *find_slot(f, f->slot, f->nslots, h.low64, h.high64);
    int rc = 0;

    *known = slot != 0 && (!storage || f->file[slot - 1].storage);
    if (slot == 0) {
        rc = add_new(f, path, storage, h.low64, h.high64, e);
        slot = f->count;
    }
    if (rc < 0)
        return rc;
    f->file[slot - 1].storage |= storage;
    *number = slot - 1;
    return 0;
}

int sink_files_name(struct sink_files *f, uint32_t number, size_t skip, char *dst,
                    size_t size, struct err *e)
{
    struct buf path = {0};
    int rc = stage_file_path(f->stage, number, &path, e);

    if (rc == 0) {
        skip = MIN(skip, path.len);
        while (skip < path.len && path.data[skip] == '/')
            skip++;
        key_text(dst, size, path.data + skip, path.len - skip);
    }
    buf_release(&path);
    return rc;
}

int sink_files_first(struct sink_files *f, struct stage_rights *out, struct err *e)
{
    uint32_t number;
    int rc = stage_first_file(f->stage, &number, e);

    *out = (struct stage_rights){0};
    if (rc == 1)
        *out = f->file[number].rights;
    return rc < 0 ? rc : 0;
}
