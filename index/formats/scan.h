/* SPDX-License-Identifier: MIT */
/* index/formats/scan.h - which directory is what, and its index kept fresh. */
#ifndef UFS_INDEX_FORMATS_SCAN_H
#define UFS_INDEX_FORMATS_SCAN_H

#include "base/base.h"
#include "index/catalog.h"
#include "index/formats/format.h"

struct arena;
struct err;
struct mapping;
struct scanner;

/* What the drivers say of a directory. */
enum place_kind {
    PLACE_PLAIN,      /* mirrored; its subdirectories may be checkpoints */
    PLACE_CHECKPOINT, /* the directory is one checkpoint */
    PLACE_FILES       /* mirrored, and some files are checkpoints by themselves */
};

struct place_file {
    const char *name; /* borrowed from the listing */
    const struct format_driver *driver;
    /* NULL, or where the first file of a set lies (format.h), and that file's stat. */
    const char *set_dir;
    struct entry_stat st;
};

struct place {
    enum place_kind kind;
    const struct format_driver *driver; /* PLACE_CHECKPOINT */
    const char *file;         /* PLACE_CHECKPOINT by its only model file, else NULL */
    struct place_file *files; /* PLACE_FILES; malloc; those of sets are the last */
    size_t nfiles;
    /*
     * Of what is no PLACE_CHECKPOINT: a file whose first bytes could not be read, so that
     * it may be one; the listing's. NULL: none.
     */
    const struct err *trouble;
    /* Of PLACE_PLAIN: why it is none although its files are those of a save; or "". */
    char unfinished[200];
};

/*
 * Asks every driver. One model file and else only side files: the directory is the
 * checkpoint; several unrelated ones: PLACE_FILES. `only` restricts to one file (a source
 * that is a file), or NULL.
 */
int place_of(struct listing *l, const char *only, struct place *out, struct err *e);
void place_release(struct place *p);

/*
 * Is a folder of this name in a part no piece of it, but shown beside it? What NVIDIA's Model
 * Optimizer keeps is: a checkpoint in the directory of another one (NeMo 2's weights/).
 */
bool place_is_apart(const char *name);

/* Of PLACE_FILES: is this subdirectory one of the files of sets alone? */
bool place_hides(const struct place *p, const char *dir);

/* Every driver's bid, for `unshard probe`. */
void place_bids(struct listing *l,
                void (*fn)(void *user, const struct format_driver *d, const char *file,
                           const struct bid *b),
                void *user);

/* Everything borrowed, for as long as the scanner lives. */
int scanner_new(struct store *store, struct catalog *catalog, struct pool *pool,
                struct scanner **out, struct err *e);
/*
 * What it scans goes through this mapping (index/map/mapping.h), which lives as long; the
 * catalog must have been opened with its identity. To be called before the first scan.
 */
void scanner_use(struct scanner *s, const struct mapping *m);
void scanner_free(struct scanner *s);

/* Any thread: scans that are under way end with -ECANCELED, and so do all that come later. */
void scanner_stop(struct scanner *s);

/*
 * The checkpoint at directory `path` (and `file` of it, or NULL), from the index when that
 * is fresh (every file of it has its identity, the directory its names), else scanned
 * anew. Several callers of one place wait for one scan. -ENOENT: there is no checkpoint
 * there (any more). A failed scan is a checkpoint with info->error. Within a second after a
 * check the answer is taken from memory; a check that takes long is repeated less often.
 */
int scanner_get(struct scanner *s, const char *path, const char *file, struct arena *a,
                struct checkpoint_info *out, struct err *e);

/*
 * 1 when the index has directory `path`, whose names `l` lists, as a checkpoint and all its
 * files are as they were: nobody need read their first bytes to find that out again. 0: not,
 * or not sure.
 */
int scanner_knows(struct scanner *s, const char *path, const struct listing *l,
                  struct err *e);

/* Forgets what it knows of the place's freshness: the next get checks (open saw ESTALE). */
void scanner_suspect(struct scanner *s, const char *path, const char *file);

/*
 * All checkpoints below `path`, outermost first, in byte order; calls fn with their place
 * (not scanned yet). For `unshard ls` and verify of a tree. Links to directories are not
 * followed. An error at the end, when all others were told: a file could not be read that may
 * be one. -EFBIG: there was no end of directories, or they lay too deep; the deepest are left
 * out, and after 4,000 on a server (for each checkpoint 100 more) it ends. Saves that are not
 * finished are no checkpoints: `unfinished` is called with them.
 */
typedef int unfinished_fn(void *user, const char *dir, const char *why);
int scanner_walk_all(struct scanner *s, const char *path,
                     int (*fn)(void *user, const char *dir, const char *file,
                               const struct format_driver *d),
                     unfinished_fn *unfinished, void *user, struct err *e);

/* The same without those that are not finished. */
int scanner_walk(struct scanner *s, const char *path,
                 int (*fn)(void *user, const char *dir, const char *file,
                           const struct format_driver *d),
                 void *user, struct err *e);

#endif
