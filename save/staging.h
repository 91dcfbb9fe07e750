/* SPDX-License-Identifier: MIT */
/* save/staging.h - a conversion's staging directory: its parts, their journals, its publication. */
#ifndef UFS_SAVE_STAGING_H
#define UFS_SAVE_STAGING_H

#include "base/base.h"
#include "base/buf.h"

struct err;
struct staging;

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
    bool
        mount; /* of a URL: what a mount of this host that died has begun is ended first */
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

int staging_dir(const struct staging *s); /* a descriptor of data/ */

/* Units of this part's stage that are durable, from the journal; `done`: all are. */
uint64_t staging_progress(const struct staging *s, unsigned stage, bool *done);

/* Notes it, durably. What it speaks of must be durable before. */
int staging_note(struct staging *s, unsigned stage, uint64_t units, bool done,
                 struct err *e);

/* All of data/ becomes the target; the staging directory goes away. */
int staging_publish(struct staging *s, struct err *e);

/*
 * Is the process dead whose line this is in the journal of an older mount: host, boot and
 * process? Of another host that cannot be known: no.
 */
bool staging_writer_is_dead(const char *line);

/* Removes it with all that is in it. */
int staging_discard(struct staging *s, struct err *e);

#endif
