/* SPDX-License-Identifier: MIT */
/* remote/open_files.h - the shards that are open now, shared by all who read them. */
#ifndef UFS_REMOTE_OPEN_FILES_H
#define UFS_REMOTE_OPEN_FILES_H

#include "base/fsutil.h"

struct err;
struct source;
struct store;
struct open_files;

/* Keeps up to `keep` files open that nobody uses at the moment (least recent go first). */
int open_files_new(struct store *store, unsigned keep, struct open_files **out,
                   struct err *e);

void open_files_free(struct open_files *f);

/*
 * To be called now and then: local files that nobody has used for `idle_ns` nanoseconds, as
 * these calls saw it, are closed. Deleted ones give their room on the disk back then, and
 * the source's file system can be unmounted. `now_ns` is a monotonic clock's.
 */
void open_files_rest(struct open_files *f, int64_t now_ns, int64_t idle_ns);

/*
 * The file at `path`, opened now or before, when it is still the one that `expect`
 * describes: else -ESTALE (it changed), -ENOENT (it is gone). One reference is the
 * caller's. An entry whose file changed on disk is dropped and opened anew, so that an
 * old reader keeps its bytes and a new one gets the new file.
 */
int open_files_get(struct open_files *f, const char *path, const struct file_id *expect,
                   struct source **out, struct err *e);

/*
 * May n files be had by open_files_get() and kept for long, beside all that are in use?
 * True: they count as open until open_files_promised() is called, when all of them are (or
 * will not be). False: each is to be had when it is needed, and put soon.
 */
bool open_files_promise(struct open_files *f, size_t n);
void open_files_promised(struct open_files *f, size_t n);

/* How many files one window may have at a time of those that are not kept. */
size_t open_files_at_once(const struct open_files *f);

#endif
