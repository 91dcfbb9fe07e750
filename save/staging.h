/* SPDX-License-Identifier: MIT */
/* save/staging.h - the directory that nobody looks at yet, its journal, its publication. */
#ifndef UFS_SAVE_STAGING_H
#define UFS_SAVE_STAGING_H

#include <sys/stat.h>

#include "base/base.h"
#include "base/buf.h"

struct err;
struct staging;
struct witness_filter;

/*
 * When directories were looked through last for what mounts that died have left: where many
 * saves are staged at once, each would look at all others again.
 */
enum { STAGING_SWEPT = 8 };
struct staging_swept {
    struct {
        uint64_t dev, ino;
        int64_t next_ns; /* monotonic: not again before then */
    } dir[STAGING_SWEPT];
    unsigned next; /* whose place another takes */
};

/*
 * A save to DIR/NAME is made in DIR/.unshard-staging-NAME/ (a long NAME is cut there):
 * data/ becomes the target, a journal of each part says what is being written and how far
 * it is. Everything is on the target's file system, so that one rename publishes it.
 */
struct staging_claim {
    const char *target; /* the path of what is to be made */
    const char
        *what; /* pins sources, options and version: another text is another save */
    unsigned part, parts; /* 1 to parts; 1, 1: the whole */
    bool finish;          /* takes up what all parts have written */
    /*
     * For a save by writing into a mount: the target may be there, the staging directory
     * has a spool besides, and what a mount that died has left is removed. `parent` is a
     * descriptor of the target's directory, in which the target is called `name`; `target`
     * is for messages then. -EBUSY: something else is saved there.
     */
    bool mount;
    int parent;
    const char *name;
    const struct witness_filter *storage; /* its files that hold tensors, or NULL */
    struct staging_swept
        *swept; /* of all saves of this mount, one at a time; or NULL */
};

/*
 * Makes or takes up the staging directory. -EEXIST: the target is there and not empty;
 * -EBUSY: another process writes this part; -EINVAL: what is staged there is another save,
 * or (finish) a part is missing or not done.
 */
int staging_open(const struct staging_claim *claim, struct staging **out,
                 struct err *e);

/* Leaves what is staged for another try. NULL is fine. */
void staging_close(struct staging *s);

int staging_dir(const struct staging *s);   /* a descriptor of data/ */
int staging_spool(const struct staging *s); /* of a mount's in/: files as they come */

/* Units of this part's stage that are durable, from the journal; `done`: all are. */
uint64_t staging_progress(const struct staging *s, unsigned stage, bool *done);

/* Notes it, durably. What it speaks of must be durable before. */
int staging_note(struct staging *s, unsigned stage, uint64_t units, bool done,
                 struct err *e);

/* All of data/ becomes the target; the staging directory goes away. */
int staging_publish(struct staging *s, struct err *e);

/*
 * -ESTALE: the storage of directory `name` of `parent` is not what it was when this staging
 * directory was opened (links that data/ had to its files move their ctime, and that only).
 * From now on others' changes of any of it are seen: staging_replace() looks once more, when
 * nobody can find it any more, and leaves it there if there are some. -EBUSY: a checkpoint
 * below it is being saved.
 */
int staging_watch(struct staging *s, int parent, const char *name,
                  const struct witness_filter *storage, struct err *e);

/*
 * The same for a mount: in one step data/ takes the place of directory `name` of `parent`,
 * which is then deleted; -EEXIST when there is one that is not `replaces` (NULL: only an
 * empty one may be there). -EROFS where the file system cannot exchange directories.
 */
int staging_replace(struct staging *s, int parent, const char *name,
                    const struct stat *replaces, struct err *e);

/*
 * In one step file `name` of data/ is in the directory `dir` (a descriptor of the target), in
 * the place of the one of this name there, if it `replaces` one (its inode; 0: none); nothing
 * else of it changes. -EEXIST: it does not, and there is one; -ESTALE: it is another one by now.
 */
int staging_add(struct staging *s, int dir, const char *name, uint64_t replaces,
                struct err *e);

/* Directory `name` of `parent` is gone, in one step; then it is deleted. */
int staging_take_away(struct staging *s, int parent, const char *name, struct err *e);

/* Empties data/ for another try. */
int staging_restart(struct staging *s, struct err *e);

/* Is this the name of a staging directory? */
bool staging_is_named(const char *name);

/* Is this staging directory a living writer's, or a save's that can be taken up again? */
bool staging_in_use(int parent, const char *name);

/*
 * Who writes, for a journal of a mount: host, boot and process. Is the one whose line this
 * is dead? Of another host that cannot be known: no.
 */
int staging_writer(struct buf *out, struct err *e);
bool staging_writer_is_dead(const char *line);

/* Removes it with all that is in it. */
int staging_discard(struct staging *s, struct err *e);

#endif
