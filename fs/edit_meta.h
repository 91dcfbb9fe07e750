/* SPDX-License-Identifier: MIT */
/* fs/edit_meta.h - `.unshard` of plain directories, and what is written into one and dropped. */
#ifndef UFS_FS_EDIT_META_H
#define UFS_FS_EDIT_META_H

#include "fs/edit_priv.h"

/*
 * In a mount for writing every directory has `.unshard/`, by name: a checkpoint's reports
 * (fs/report.h), elsewhere what the mount says of itself. It stores nothing: files that are
 * made in it take everything and keep nothing.
 */
enum edit_meta {
    META_DIR = 1,   /* `.unshard` */
    META_COUNTERS,  /* counters.json */
    META_ERROR,     /* last-error */
    META_LATEST,    /* `latest` beside trackers */
    META_LATEST_IN, /* `.unshard/latest` */
    META_DROPPED    /* a file that is written there */
};

/* The kind is in bits 56 to 61 of a number; below it, the directory's. */
static inline enum edit_meta edit_meta_kind(fuse_ino_t ino)
{
    return (enum edit_meta)(ino >> 56 & 0x3f);
}

static inline bool edit_meta_is(fuse_ino_t ino)
{
    return ino_is_edit(ino) && edit_meta_kind(ino) != 0;
}

/* The directory of such a node, pinned; NULL: it is forgotten. */
struct disk_node *edit_meta_dir(struct fs *fs, fuse_ino_t ino);

int edit_meta_lookup(struct request *r, struct disk_node *dir,
                     struct fuse_entry_param *out, struct err *e);
/* A name in `.unshard`, of a plain directory or of a checkpoint. */
int edit_meta_lookup_in(struct request *r, const struct edit_place *p,
                        struct fuse_entry_param *out, struct err *e);
/* `latest` of a directory with trackers. EDIT_ABSENT: there is none. */
int edit_latest_lookup(struct request *r, struct disk_node *dir,
                       struct fuse_entry_param *out, struct err *e);
void edit_meta_forget(struct fs *fs, fuse_ino_t ino, uint64_t lookups);
int edit_meta_getattr(struct request *r, struct err *e);
int edit_meta_open(struct request *r, struct err *e);
/* Opens (entry NULL) or creates a file of which nothing is kept. */
int edit_meta_drop(struct request *r, const struct fuse_entry_param *entry,
                   struct err *e);
int edit_meta_create(struct request *r, const struct edit_place *p, struct err *e);
int edit_meta_list(struct request *r, struct edit_names *out, struct err *e);

#endif
