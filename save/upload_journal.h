/* SPDX-License-Identifier: MIT */
/* save/upload_journal.h - the small object that says what is being uploaded. */
#ifndef UFS_SAVE_UPLOAD_JOURNAL_H
#define UFS_SAVE_UPLOAD_JOURNAL_H

#include "base/base.h"
#include "base/buf.h"

struct err;

/*
 * The first line is what is saved (staging_claim.what); then a line each for what is known:
 * "upload PATH ID" (the path is percent-encoded), "done": the parts of all uploads are in
 * the store, "publishing PATH": objects begin to appear, of which that comes last. Which parts
 * of an upload are there only the store knows.
 */
struct upload_journal {
    char *what;
    struct upload_id {
        char *path, *id;
    } * upload; /* sorted by path, each once */
    size_t uploads, cap;
    bool done;
    char *last; /* publishing, and this object completes it; or NULL */
};

void upload_journal_release(struct upload_journal *j);

/* Adds what the text says to *j. -EBADMSG: no journal. */
int upload_journal_read(struct upload_journal *j, const char *text, size_t len,
                        struct err *e);
int upload_journal_text(const struct upload_journal *j, struct buf *out, struct err *e);

/* The id of the upload of this file, or NULL. */
const char *upload_journal_find(const struct upload_journal *j, const char *path);

/* In the place of one that was there. Ids that were found before stay valid, but that. */
int upload_journal_set(struct upload_journal *j, const char *path, const char *id,
                       struct err *e);

/* After any number of upload_journal_add(), which does not look. */
int upload_journal_add(struct upload_journal *j, const char *path, const char *id,
                       struct err *e);
void upload_journal_sort(struct upload_journal *j);

#endif
