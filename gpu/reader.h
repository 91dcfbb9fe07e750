/* SPDX-License-Identifier: MIT */
/* gpu/reader.h - open tensors and views: a plan, its shards, and windows of their bytes. */
#ifndef UFS_GPU_READER_H
#define UFS_GPU_READER_H

#include <sys/uio.h>

#include "base/base.h"
#include "index/catalog.h"
#include "index/view.h"

struct catalog;
struct chunk_codec;
struct chunk_look;
struct decoded_cache;
struct err;
struct open_files;
struct plan;
struct pool;
struct reader;
struct source;

/* What readers share. Everything is borrowed and outlives them. */
struct reader_env {
    /* Bytes to ask for in front of who reads from start to end; 0: READER_AHEAD. */
    uint64_t ahead;
    struct catalog *catalog;
    struct open_files *files;
    struct decoded_cache *decoded;
    struct pool *pool; /* may be NULL */
    const struct chunk_codec *(*codec)(enum chunk_encoding encoding);
    /*
     * Each byte is wanted once, in windows that stay in the processor's cache: files are
     * read, not mapped. That costs less than a fault a page, and pages of files do not
     * count as memory of this process (docs/decisions/023).
     */
    bool once;
};

/*
 * A reader answers for the bytes of one file of the mount: a tensor (with its .npy header
 * or bare), a role's safetensors file, or a file of the source. Its shards are known by
 * identity: opened when first needed, checked with every read, after what was copied was.
 * Any thread, several at once.
 *
 * Opening checks the metadata: -EBADMSG with the tensor's fault, -ESTALE when a shard or
 * the index is no longer what was scanned, -ENOENT when a shard is gone.
 */
int reader_open_tensor(const struct reader_env *env, int64_t checkpoint, uint32_t ord,
                       bool npy, struct reader **out, struct err *e);
int reader_open_view(const struct reader_env *env, int64_t checkpoint,
                     const struct view_info *view, struct reader **out, struct err *e);

/* Any source as a reader (side files, generated files). Takes the reference over. */
int reader_open_source(struct source *src, struct reader **out, struct err *e);

void reader_close(struct reader *r); /* NULL is fine */
void reader_closep(struct reader **r);

uint64_t reader_size(const struct reader *r);

/*
 * Fills dst with bytes [off, off + len), which must lie within the size: all or an error.
 * Warm ranges are copied from mapped shards under the SIGBUS guard, cold ones are read
 * in few large parallel pieces.
 */
int reader_read(struct reader *r, uint64_t off, size_t len, void *dst, struct err *e);

/*
 * The same range as at most `max` pieces of memory that can be written out at once, when
 * it lies in mapped, resident shards in long enough runs: then 1 and the pieces, whose
 * sources `held` keeps until reader_unmap. 0 when it is not to be had this way: use
 * reader_read. The shards' identity was checked just before; a file that is cut while the
 * kernel copies makes the write fail (EFAULT), never zeros beyond its last page.
 */
struct reader_iov {
    struct iovec *iov; /* the caller's array */
    int max, count;
    struct source *held[8];
    unsigned nheld;
    bool ask_warm; /* set before: shall reader_map say so, */
    bool warm;     /* when it gives 0: does reader_read only copy memory then? */
};
int reader_map(struct reader *r, uint64_t off, size_t len, struct reader_iov *v,
               struct err *e);
void reader_unmap(struct reader_iov *v);

/*
 * For who reads before bytes are asked for: is [off, off + len) better copied together than
 * handed over by reader_map, in part at least, and can reader_unchanged vouch for it later?
 * Copied by a processor that has time, rows of less than READER_PIECE_EARLY are (decision
 * 026). Resolves what it has to, reads no bytes of the range.
 */
enum { READER_PIECES = 1000, READER_PIECE_EARLY = 128 << 10 };
bool reader_gathers(struct reader *r, uint64_t off, size_t len);

/*
 * Are the shards of a range that gathers still what was scanned, so that what was read
 * before is what reader_read would give? 0, or its error.
 */
int reader_unchanged(struct reader *r, uint64_t off, size_t len, struct err *e);

/* Starts fetching [off, off + len) from disk or server, following the plan. */
enum { READER_AHEAD = 4 << 20 };
void reader_will_need(struct reader *r, uint64_t off, uint64_t len);
uint64_t reader_ahead(const struct reader_env *env);

/*
 * For `unshard plan` and tests: the chunks of an open tensor in order, and where chunk i
 * lies once resolved (opens its shard).
 */
const struct plan *reader_plan(const struct reader *r);
int reader_place(struct reader *r, size_t i, struct chunk_place *out, const char **path,
                 struct err *e);

/* Chunk i's own checksums, as chunk_codec.verify tells. */
int reader_verify(struct reader *r, size_t i, struct chunk_look *look, struct err *e);

/* Chunk i against copies of it in other files, as chunk_codec.compare tells; 0: none. */
int reader_compare(struct reader *r, size_t i, struct err *e);

#endif
