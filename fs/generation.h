/* SPDX-License-Identifier: MIT */
/* fs/generation.h - generations of checkpoints, and the node ids of what is inside them. */
#ifndef UFS_FS_GENERATION_H
#define UFS_FS_GENERATION_H

#include "fs/fs.h"

struct arena;

/* What a node of a checkpoint is. Part of its id. */
enum inside {
    INSIDE_TENSORS = 1,
    INSIDE_TREE, /* index: the directory of the tree */
    INSIDE_RAW,
    INSIDE_OPTIMIZER,
    INSIDE_META, /* .unshard */
    INSIDE_LAST_DIR = INSIDE_META,
    INSIDE_NPY,  /* index: ord of the tensor; in tensors/ and in tree/ */
    INSIDE_BARE, /* index: ord of the tensor; in raw/ */
    INSIDE_MODEL,
    INSIDE_OPTIMIZER_FILE,
    INSIDE_CHECKPOINT_JSON,
    INSIDE_OBJECTS_JSON,
    INSIDE_COUNTERS_JSON,
    INSIDE_LAST_ERROR,
    INSIDE_LATEST,
    INSIDE_OVERLAY, /* index: of the file in the overlay */
    INSIDE_INDEX,   /* model.safetensors.index.json, of the model's one file */
};

static inline bool inside_is_dir(enum inside kind)
{
    return kind <= INSIDE_LAST_DIR;
}

/* counters.json and last-error: what the mount says now, whichever generation is asked. */
static inline bool inside_is_of_mount(enum inside kind)
{
    return kind == INSIDE_COUNTERS_JSON || kind == INSIDE_LAST_ERROR;
}

/* Ceiling of what is known of one checkpoint as a whole (topology is the largest). */
enum { INFO_MEMORY = 64 << 20 };

/* The generated files, made once a generation when their size is first asked for. */
enum { REPORT_CHECKPOINT, REPORT_OBJECTS, REPORT_INDEX, REPORTS };

static inline bool inside_is_report(enum inside kind)
{
    return kind == INSIDE_CHECKPOINT_JSON || kind == INSIDE_OBJECTS_JSON ||
           kind == INSIDE_INDEX;
}

/* Names of a checkpoint's directory that its mount does not show. */
struct hidden {
    const char *
        *name; /* relative to the checkpoint, sorted; in the generation's arena */
    size_t count;
    const char **part; /* directories whose side files are lifted, in order */
    size_t nparts;
};

/* Names that lookups were told not to exist, for as long as the kernel believes it. */
struct absent {
    char **name;
    size_t count;
};

/*
 * What a scan found of one checkpoint, as long as the kernel knows a node of it or
 * somebody uses it. A newer scan that finds something else is another generation with other node
 * ids: what the kernel cached of an old one never mixes with the new.
 */
struct generation {
    uint32_t number;
    uint64_t generation;
    uint64_t refs; /* guarded by the lock of generations */

    /* constant */
    struct arena *arena;
    struct checkpoint_info info;
    const char *path, *file; /* as scanner_get takes them */
    const char *place;       /* in the store: of its directory, or of its file */
    uint64_t dir_ino;        /* node of its directory when it was made */
    struct entry_stat dir;   /* whose mode and owner its directories have */
    struct hidden hidden;

    atomic_bool stale;  /* a newer one took its place, or it is gone */
    atomic_bool warned; /* of names of the source that ours cover */
    /* How often a shard was found changed, or the index without it, and how many of these
     * had been found when the last look began: where they differ, the next use looks. */
    atomic_uint suspect, answered;
    atomic_int_fast64_t checked_ns, used_ns;
    atomic_bool dormant; /* not watched: the kernel asks before it uses what it has */
    atomic_uint_fast64_t names;     /* names_hash, as of the last look */
    atomic_int_fast64_t changed_ns; /* newest ctime of its files; 0: not looked up */

    pthread_mutex_t lock;
    struct source *report[REPORTS]; /* guarded by lock */
    struct absent absent;           /* guarded by lock */
};

int generations_new(struct generations **out, struct err *e);
void generations_free(struct generations *s);

/*
 * The id of a node inside a checkpoint: bit 63, number of its generation and kind; below them the
 * index, mixed with those. The kernel's table of inodes, where it is small, takes no account
 * of bits above 37: with the index as it is, one entry of all checkpoints was one chain.
 */
fuse_ino_t generation_ino(const struct generation *s, enum inside kind, uint32_t index);

static inline uint32_t ino_mix(uint64_t generation_and_kind)
{
    return (uint32_t)generation_and_kind * 0x9e3779b1;
}

static inline bool ino_is_inside(fuse_ino_t ino)
{
    return ino >> 63;
}

static inline enum inside ino_kind(fuse_ino_t ino)
{
    return (enum inside)(ino >> 32 & 0xff);
}

static inline uint32_t ino_index(fuse_ino_t ino)
{
    return (uint32_t)ino ^ ino_mix(ino >> 32);
}

/*
 * A generation for what the scanner found; takes the arena over, which holds all of info. One
 * reference is the caller's.
 */
struct generation_place {
    const char *path, *file;
    uint64_t dir_ino;
    const struct entry_stat *dir;
};
int generation_new(struct fs *fs, const struct generation_place *place,
                   struct arena *arena, const struct checkpoint_info *info,
                   struct generation **out, struct err *e);

/* A reference to the generation of a node id that the kernel knows. */
struct generation *generation_of_ino(struct fs *fs, fuse_ino_t ino);

struct generation *generation_get(struct fs *fs, struct generation *s);
/* `n` references that belong to the kernel: lookups that were answered. */
void generation_ref(struct fs *fs, struct generation *s, uint64_t n);
void generation_unref(struct fs *fs, struct generation *s,
                      uint64_t n); /* NULL is fine */
void generation_forget(struct fs *fs, fuse_ino_t ino, uint64_t n);

/* Marks it as replaced or gone; true for the one caller that did. */
bool generation_retire(struct fs *fs, struct generation *s);

/*
 * To be called before the kernel is given what it may keep: where the checkpoint was not
 * watched any more, it is from now on.
 */
void generation_used(struct fs *fs, struct generation *s);

static inline bool generation_fresh(const struct generation *s, int64_t now)
{
    return s->suspect == s->answered && now - s->checked_ns < FRESH_NS;
}

/*
 * Looks whether it is still what the source has, through the scanner (which may scan for
 * long). 0, or -ESTALE, and then it is retired and the kernel will be told.
 */
int generation_refresh(struct fs *fs, struct generation *s, struct err *e);

/* What the sink hid: is this name (relative to the checkpoint) not to be shown? */
bool generation_hides(const struct generation *s, const char *name);
/* Is one in this directory of the checkpoint, or this directory in one that is not shown? */
bool generation_hides_in(const struct generation *s, const char *dir);

/*
 * Remembers an absent name of the checkpoint's directory, so that the kernel can be told
 * when it appears; false when no more can be remembered.
 */
bool generation_note_absent(struct generation *s, const char *name);

#endif
