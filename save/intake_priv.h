/* SPDX-License-Identifier: MIT */
/* save/intake_priv.h - what the parts of an intake share. */
#ifndef UFS_SAVE_INTAKE_PRIV_H
#define UFS_SAVE_INTAKE_PRIV_H

#include <pthread.h>
#include <stdatomic.h>

#include "save/intake.h"
#include "save/sums.h"

struct arena;
struct format_writer;
struct layout;

/* ---- descriptors ---- */

/* A file in the staging directory that bytes are put into. */
struct staged {
    const char *path; /* relative to the staging directory */
    uint64_t size;    /* as the layout has it; 0: it grows */
    size_t boxes;
    bool summed;            /* the format wants checksums of its boxes */
    atomic_bool unsummed;   /* some of its bytes were written twice: it is read again */
    atomic_bool dirty;      /* written since the last sync */
    struct staged_fd *slot; /* guarded by the cache's lock; NULL: it is closed */
};

/* Descriptors that an intake has open at once: those of the files that are written now. */
enum { INTAKE_FDS = 48 };

struct fds {
    pthread_mutex_t lock; /* of all that follows */
    struct staged_fd {
        struct staged *of; /* NULL: free */
        int fd;
        unsigned users;
        uint64_t used; /* the tick of its last use */
    } slot[INTAKE_FDS];
    uint64_t tick;
    atomic_int lost; /* errno of a close(2) that failed: bytes of some file are lost */
};

/* One that is being used; slot NULL: it is the user's alone. */
struct fd_use {
    struct staged_fd *slot;
    int fd;
};

void fds_init(struct fds *c);
void fds_release(struct fds *c);
int fds_get(struct fds *c, int dir, struct staged *s, struct fd_use *out,
            struct err *e);
void fds_put(struct fds *c, struct fd_use *use);
void fds_drop(struct fds *c, struct staged *s); /* nobody uses it */

/* ---- an incoming file ---- */

/* A box of a tensor in a staged file. All counts are bytes: also of the last axis. */
struct place {
    uint32_t staged;
    uint64_t at, len;    /* in the file */
    uint64_t first, end; /* of the tensor: its span */
    uint64_t reach;      /* the largest `end` of this place and all before it */
    const uint64_t *start, *size;
};

struct taken {
    uint64_t begin, end; /* in the data of the incoming file */
    uint32_t nd;
    const uint64_t *dim; /* the last one in bytes */
    struct place *place; /* by `first` */
    size_t places;       /* 0: its bytes are in the plain file */
};

/* Where the bytes of an incoming file go. */
struct placement {
    struct arena *arena;
    struct taken *tensor; /* in the order of the data; none is empty */
    size_t tensors;
    struct staged *staged;
    size_t files;
};

struct intake_file {
    struct intake *intake;
    char *path;
    char *dir; /* "intake/NAME" */
    struct staged plain;
    /*
     * Held for reading while bytes are put to their places, for writing while these
     * change. It is held across I/O: the places are what the I/O goes to.
     */
    pthread_rwlock_t lock;
    bool known;           /* the header is, and the places of the data */
    bool laying;          /* it is being laid out, by who has the lock */
    uint64_t data, total; /* where the data begins, and the end, as the header says */
    atomic_bool named;    /* the names of its staged files are durable */
    atomic_bool synced;   /* the plain file was, and may be relied on */
    struct placement p;
    struct sums sums; /* of staged files, by number; has a lock of its own */

    pthread_mutex_t mutex; /* of what follows; never held across I/O */
    struct ranges received;
    struct ranges claimed; /* what may have been written: all of `received`, and more */
    uint64_t size;
};

struct intake {
    struct intake_spec spec;
    struct fds fds;
    pthread_mutex_t lock;      /* of what follows */
    struct intake_file **file; /* by path */
    size_t files, cap;
};

/* The bytes of one staged file: all of them or an error. */
int staged_file_write(struct intake *k, struct staged *s, const void *data, size_t len,
                      uint64_t at, struct err *e);
/* Bytes behind the end of the file are zeros. */
int staged_file_read(struct intake *k, struct staged *s, void *dst, size_t len,
                     uint64_t at, struct err *e);

/*
 * Bytes of the data that the header announces, [at, at + len), to and from their places; with the
 * lock. `again`: some were written before.
 */
int placement_write(struct intake_file *f, const void *data, size_t len, uint64_t at,
                    bool again, struct err *e);
int placement_read(struct intake_file *f, void *dst, size_t len, uint64_t at,
                   struct err *e);

/*
 * Lays out the tensors of the header, which is whole, in `plain`; `data` and `total` are
 * set. Makes the staged files, or (`resumed`) takes those that are there: -ESTALE where
 * they are not all there, or made by another layout.
 */
int placement_new(struct intake_file *f, bool resumed, struct err *e);
void placement_release(struct intake_file *f);

/* The tensor that begins at this byte of the data, or NULL. */
struct taken *placement_find(const struct placement *p, uint64_t at);

/* The place of a box of the layout, given in units of bytes; NULL: it has no such place. */
struct layout_piece;
struct shape;
const struct place *placement_box(const struct taken *t,
                                  const struct layout_piece *piece, unsigned unit);

/* All that has arrived is in its place: the next process may rely on it. */
int placement_mark(struct intake_file *f, struct err *e);

/*
 * Where the writer of `spec` puts all of `m`, which is settled by this. -EINVAL names what its
 * format cannot hold. *out may be set then too.
 */
int intake_lay_out(const struct intake_spec *spec, struct merge *m, struct layout **out,
                   struct err *e);

/* Removes a directory with all that is in it; missing ones are fine. */
int intake_remove_tree(int dir, const char *path, struct err *e);
int intake_make_parents(int dir, const char *path, struct err *e);

#endif
