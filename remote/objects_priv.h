/* SPDX-License-Identifier: MIT */
/* remote/objects_priv.h - what the files of the object store share. */
#ifndef UFS_REMOTE_OBJECTS_PRIV_H
#define UFS_REMOTE_OBJECTS_PRIV_H

#include <pthread.h>
#include <stdatomic.h>

#include "remote/listing.h"
#include "remote/objects.h"
#include "remote/source.h"
#include "remote/store.h"

struct arena;

/* One entry of a directory. Texts live in its list. */
struct object {
    const char *name;
    const char *etag, *version; /* or NULL */
    struct entry_stat st;
};

/* A directory as it was listed; frozen once object_list_finish() is through. */
struct object_list {
    atomic_uint refs;
    struct arena *arena;
    char *path;
    uint64_t store; /* hash of the store's identity: the device of its files */
    struct object *object;
    size_t count, cap;
    uint64_t names; /* hash of names and kinds */
    size_t left_out;
};

int object_list_new(const char *path, uint64_t store, struct object_list **out,
                    struct err *e);
struct object_list *object_list_get(struct object_list *l);
void object_list_put(struct object_list *l); /* NULL is fine */
void object_list_putp(struct object_list **l);
void object_list_finish(struct object_list *l);
const struct object *object_list_find(const struct object_list *l, const char *name);

/* What stat() says of a directory: its identity changes with the names in it. */
void object_dir_stat(const struct object_list *l, struct entry_stat *out);

/* The first bytes and other small pieces of objects, kept for who asks again. */
enum { PIECE_SIZE = 64 << 10, PIECES = 64 };
struct piece {
    struct file_id id; /* of the object; all zero: free */
    uint64_t off;
    size_t len;
    unsigned char *data;
    uint64_t used; /* by the store's count of uses */
};

struct objects {
    struct store base;
    const struct object_protocol *protocol;
    void *self;
    struct http *http;
    struct store_options options;
    uint64_t id;        /* hash of the identity */
    int64_t refresh_ns; /* how long a listing counts */
    struct dirs *dirs;
    pthread_mutex_t pieces_lock;
    struct piece piece[PIECES]; /* guarded by pieces_lock */
    uint64_t uses;              /* the same */
};

/* The directories that are known (objects_dirs.c). */
int dirs_new(struct objects *o, struct dirs **out, struct err *e);
void dirs_free(struct dirs *d); /* NULL is fine */

/* The listing of a directory, from memory while it is fresh; one reference. -ENOENT. */
int dirs_get(struct objects *o, const char *path, struct object_list **out,
             struct err *e);

/* What is known of this directory is out of date. */
void dirs_forget(struct objects *o, const char *path);
/* We wrote into it: what was listed before serves nobody, also where the server is silent. */
void dirs_changed(struct objects *o, const char *path);

/* An object as a source (objects_source.c). */
int object_source(struct objects *o, const char *path, const struct object *object,
                  struct source **out, struct err *e);

#endif
