/* SPDX-License-Identifier: MIT */
/* save/publish.h - one step that brings staged files into a directory of the disk. */
#ifndef UFS_SAVE_PUBLISH_H
#define UFS_SAVE_PUBLISH_H

#include <limits.h>
#include <sys/types.h>

#include "base/base.h"
#include "base/fsutil.h"

struct err;

/*
 * A target directory, and where its staging directory is: both in `dir`, a descriptor. The
 * target is called `name` there; "." where `dir` is the target itself (the source's root),
 * whose staging directory is inside it. `path` is for messages. All are the caller's.
 */
struct publish_place {
    int dir;
    const char *name;
    const char *path;
};

/*
 * The staging directory of a target: ".unshard-staging-NAME"; a long NAME is cut, with its
 * hash behind. Its data/ has the new files at their paths relative to the target.
 * -ENAMETOOLONG, -EINVAL.
 */
int publish_staging_name(const char *name, char dst[NAME_MAX + 1], struct err *e);

/* Is this the name of a staging directory? */
bool publish_is_staging(const char *name);

/*
 * Not empty, no empty part, no "." or "..", no '/' at an end, no part longer than NAME_MAX
 * or named as a staging directory is; shorter than PATH_MAX.
 */
bool publish_path_is_safe(const char *path);

/*
 * Is what is there `now` what was `seen`? Devices are not compared, and times of change only where
 * the one seen is not 0.
 */
bool publish_is_seen(const struct file_id *seen, const struct file_id *now);

enum publish_kind {
    PUBLISH_PUT,    /* data/PATH becomes PATH, replacing what is there if anything is */
    PUBLISH_REMOVE, /* PATH goes */
    /*
     * PATH stays as it is, but is out of sight during the step: a completing file that
     * does not change (.metadata, when only bytes of shards do). Without it a reader of
     * the plain disk could take old and new shards for one checkpoint. Ignored in a step
     * that is one rename.
     */
    PUBLISH_HOLD,
};

struct publish_file {
    enum publish_kind kind;
    const char *path; /* in the target */
    /*
     * As in index/layout.h: files of a higher stage complete what is below. They leave
     * first and arrive last; each stage is durable before the next begins.
     */
    unsigned stage;
    /*
     * What had this name when the transaction began (publish_identity()); ino 0: nothing.
     * REMOVE and HOLD need one.
     */
    struct file_id seen;
    /* Of a new file. One that replaces a regular file gets the owner, mode, ACL and other
     * attributes of that. */
    uid_t uid;
    gid_t gid;
    mode_t mode;
};

struct publish_spec {
    struct publish_place at;
    const struct publish_file *file; /* each path once, in any order */
    size_t files;
    const char *const *directory; /* that must be there afterwards, even empty */
    size_t directories;
    uid_t uid; /* owner of directories that the step makes */
    gid_t gid;
    /*
     * NULL: the staging directory goes with the step. Else it stays, for what else is staged
     * there; and so does the step's journal, as "ended", with this text of the caller, who removes
     * it when he has settled what the step means for the rest (save/txn.c).
     */
    const char *note;
    /* Result: the step had begun and was undone: the files have other times of change now. */
    bool undone;
};

/*
 * Looks at PATH of the directory `dir`, without following links. A missing one: 0, and all
 * of *out is zero.
 */
int publish_identity(int dir, const char *path, struct file_id *out, struct err *e);

/*
 * The step. Files in data/ that no PUT names are dropped with the staging directory.
 *
 * 1. Checks: the target has what was seen, under each of the paths; data/ has each new file.
 * 2. Owners, modes and attributes; fsync of all that is new; a durable redo journal. From
 *    here on a crash is followed by publish_recover().
 * 3. Old files leave (renamed into the staging directory), highest stage first; new ones
 *    arrive, lowest stage first. So no moment shows old and new files as one whole
 *    checkpoint. Where one file only is replaced, and it arrives last, it is exchanged: then
 *    every moment shows the old or the new checkpoint. Files that the step does not name
 *    keep their inode; nothing is written in place.
 * 4. Directories that removals left empty go; the staging directory goes (but see `note`).
 *
 * Returns 0, the step is durable and the staging directory is gone or its rest is marked as
 * of no use (but see `note`); or
 *   -ESTALE  a file is not the one seen: nothing has changed, all is still staged;
 *   -EINPROGRESS  the step has begun and could not be ended (the disk failed: the message says
 *            how). Nothing was deleted; publish_recover() goes on, now or after a crash.
 *   another  nothing has changed, all is still staged.
 * If a step was interrupted there, publish_recover() comes first; where that ends one, it is the
 * whole result.
 * The caller has the staging directory for itself (a transaction's lock), and nobody has a
 * staged file open for writing.
 */
int publish(struct publish_spec *spec, struct err *e);

/*
 * All of data/ becomes a directory that is not there yet, in one rename (an empty one may
 * be there). The caller made all of it durable but data/ itself. The staging directory is
 * gone then. -EEXIST: there is something of this name. Other errors: nothing is there, and
 * all is still staged.
 */
int publish_new(const struct publish_place *at, struct err *e);

/*
 * Ends what a crash or a failed disk interrupted, for who has the staging directory for
 * himself. Returns
 *   1  a step had begun: it is done now, and the staging directory is gone, unless the step had
 *      a note (also: it held only the rest of a step that was done);
 *   0  none had begun: nothing was changed, what is staged is still staged (also: there
 *      is no staging directory);
 *   -ESTALE  it had begun, and files were changed by others since: it was undone,
 *      what is staged is still staged, their files are kept;
 *   -EBUSY  it had begun in another directory than has this name now;
 *   -EINPROGRESS, others: as publish().
 */
int publish_recover(const struct publish_place *at, struct err *e);

/*
 * Has a step into directory `name` of `dir` begun and not ended? For readers, which touch
 * nothing: the checkpoint is incomplete until a writable mount goes on.
 */
bool publish_in_progress(int dir, const char *name);

#endif
