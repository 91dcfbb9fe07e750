/* SPDX-License-Identifier: MIT */
/* remote/source.h - a byte source: one file's bytes, wherever they lie. */
#ifndef UFS_REMOTE_SOURCE_H
#define UFS_REMOTE_SOURCE_H

#include <stdatomic.h>

#include "base/base.h"
#include "base/fsutil.h"

struct err;
struct source;

struct source_range {
    uint64_t off;
    size_t len;
    void *dst;
};

/*
 * What a kind of source does. Every call may come from any thread, several at once.
 * Ranges were checked against `size` by the wrappers below. NULL where optional.
 */
struct source_ops {
    const char *name;

    /* Fills all of dst or fails: never short, never zeros for missing bytes. */
    int (*read)(struct source *s, uint64_t off, size_t len, void *dst, struct err *e);

    /* Optional: several ranges at once, any order; default: read() one by one. */
    int (*read_many)(struct source *s, const struct source_range *r, size_t n,
                     struct err *e);

    /*
     * Optional: all of the source in memory, valid until close; NULL when it cannot.
     * Touching it raises SIGBUS when the file was cut: copy under base's guard, or let
     * the kernel copy (writev gives EFAULT).
     */
    const void *(*map)(struct source *s);

    /* Optional: is this range in memory (page cache) now? Default: true. */
    bool (*resident)(struct source *s, uint64_t off, size_t len);

    /* Optional: this range will be read soon. */
    void (*will_need)(struct source *s, uint64_t off, uint64_t len);

    /*
     * Optional: 0 while it is still the file that was opened, else -ESTALE. That its name
     * went to another file does not count: its own bytes are still there.
     */
    int (*check)(struct source *s, struct err *e);

    /* Optional: the descriptor of a local file that is all of the source, still its own. */
    int (*fd)(struct source *s);

    void (*close)(struct source *s); /* frees s */
};

/* Kinds embed this as their first member. */
struct source {
    const struct source_ops *ops;
    uint64_t size;
    char *name; /* for messages: path in the store; owned, freed by source_put() */
    struct file_id id;
    bool remote; /* what is not resident() waits for a server: ask for it early */
    /* map() is of a file's pages: touching one costs a fault, and it counts as memory of ours. */
    bool file_mapped;
    atomic_uint refs;
    /* Who read it from its start has come to its end: a cache may let it go first. */
    atomic_bool used_up;
};

/* Sets the common part, one reference. Copies name. */
int source_init(struct source *s, const struct source_ops *ops, const char *name,
                uint64_t size, struct err *e);

struct source *source_get(struct source *s);
void source_put(struct source *s); /* NULL is fine */
void source_putp(struct source **s);

/* All or error; -EBADMSG with file and byte when the range is not within the source. */
int source_read(struct source *s, uint64_t off, size_t len, void *dst, struct err *e);
int source_read_many(struct source *s, const struct source_range *r, size_t n,
                     struct err *e);

/*
 * How often in this process a read or an open failed by the disk, the network or a limit
 * (EIO, ENOMEM, EMFILE, ...) and not by what stands in a file. Who keeps what it found asks
 * before and after: where this has grown, a missing tensor may be there the next time. One
 * number for all, since another's trouble costs no more than a second look.
 */
unsigned source_troubles(void);
bool source_is_trouble(int rc);
void source_note_trouble(
    int rc); /* of an open or a stat; reads are noted by themselves */

const void *source_map(struct source *s);
bool source_resident(struct source *s, uint64_t off, size_t len);
void source_will_need(struct source *s, uint64_t off, uint64_t len);
int source_check(struct source *s, struct err *e);
int source_fd(struct source *s); /* -1: it is no local file */

/* -ESTALE in words: which of inode, size and times of the file `name` is not as it was. */
int source_stale(const char *name, const struct file_id *was, const struct file_id *now,
                 struct err *e);

/*
 * A regular file by its descriptor, which the source owns from now on (also on failure).
 * `name` is for messages. -EINVAL when it is not a regular file.
 */
int source_from_fd(int fd, const char *name, struct source **out, struct err *e);

/*
 * Bytes in memory; `data` is borrowed until close, or owned from now on (also on failure)
 * and freed when `own`.
 */
int source_from_memory(const void *data, size_t len, bool own, const char *name,
                       struct source **out, struct err *e);

/* `size` bytes of memory, for more than a few on pages of its own: source_map() may be written. */
int source_from_pages(size_t size, struct source **out, struct err *e);

/*
 * `size` bytes that repeat the `unit` bytes (at most SOURCE_FILL_MAX) of `value`, which
 * are copied. Costs no memory.
 */
enum { SOURCE_FILL_MAX = 16 };
int source_from_fill(const void *value, unsigned unit, uint64_t size,
                     struct source **out, struct err *e);

/*
 * The bytes [off, off + len) of another source, as a source of its own (holds a reference).
 * It maps and checks as the other does.
 */
int source_window(struct source *inner, uint64_t off, uint64_t len, struct source **out,
                  struct err *e);

/*
 * For tests: passes on to `inner` (holds a reference) and does damage on purpose. Each
 * field is off when zero.
 */
struct source_faults {
    uint64_t fail_at;   /* the n-th read (from 1) fails with `code` */
    int code;           /* positive errno, default EIO */
    uint64_t fail_from; /* reads that touch this offset or beyond fail */
    unsigned delay_us;  /* before every read */
    bool stale;         /* check() says -ESTALE */
};
int source_with_faults(struct source *inner, const struct source_faults *faults,
                       struct source **out, struct err *e);

#endif
