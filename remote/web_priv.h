/* SPDX-License-Identifier: MIT */
/* remote/web_priv.h - what the files of plain web servers share. */
#ifndef UFS_REMOTE_WEB_PRIV_H
#define UFS_REMOTE_WEB_PRIV_H

#include <pthread.h>

#include "remote/objects.h"
#include "remote/store.h"
#include "remote/web.h"

struct manifest;

/* Names of files in one directory, owned. */
struct web_names {
    char **name;
    size_t count, cap;
};

/*
 * What the files that a directory had when it was listed last (struct store_options,
 * recall) told of themselves while it was asked for its names. That counts only for files
 * that it still has.
 */
struct web_early {
    struct web_names names;     /* sorted */
    struct http_answer *answer; /* of each; NULL: nothing was asked */
};

enum { PAGE_MAX = 256 << 20 /* about 1,000,000 links */ };

struct web {
    struct http *http; /* the store's */
    char *base;        /* URL of the directory, with a slash at its end */
    char *shown;       /* the same without secrets */
    char *dir;         /* its path, decoded, with a slash at its end */
    char *query;       /* "" or "?...", goes with every request */
    char *basic;       /* NULL, or what stands behind "Authorization: " */
    char *file;        /* NULL, or the one file that was opened */
    bool has_manifest;
    bool by_get; /* the file tells of itself with its first byte: HEAD is not let in */
    store_recall_fn *recall; /* as struct store_options has them */
    store_note_fn *note;
    void *user;
    pthread_mutex_t lock;
    /* guarded by lock: what was fetched a moment ago, for who asks for it now */
    struct manifest *manifest;
    struct buf page;        /* of the root */
    struct web_early early; /* of the files in the root */
    int64_t until;
};

void web_close(void *self);

/* The URL of what `path` and `tail` name below the directory. */
int web_add_url(const struct web *p, const char *path, const char *tail,
                struct buf *out, struct err *e);

bool web_is_html(const struct http_answer *a);

/* Makes a request one that asks a file what it is. */
void web_ask_for(const struct web *p, struct http_request *r);

/* Keeps it for a moment, with a reference of its own. */
void web_keep_manifest(struct web *p, struct manifest *m);

/* When that moment will be over. */
int64_t web_moment(void);

/* ---- web_ask.c ---- */

/* A copy of the name. -ENOMEM. */
int web_names_add(struct web_names *n, const char *name, size_t len, struct err *e);
void web_names_release(struct web_names *n);
void web_early_release(struct web_early *early);

/*
 * Does n requests (http_do_many()) for what lists the directory `path`, and asks the files
 * that it had, in one go; `early` NULL: the former alone.
 */
int web_do_early(const struct web *p, const char *path, const struct http_request *r,
                 size_t n, struct http_answer *a, struct web_early *early,
                 struct err *e);

/*
 * Adds the files of the directory `dir`, as they tell of themselves, by HEAD, many at once.
 * Those that tell no length or nothing that changes would be seen by are left out with a
 * warning. `n` is sorted, each name is in it once then.
 */
int web_ask(const struct web *p, const char *dir, struct web_names *n,
            const struct web_early *early, unsigned deadline_s, struct object_list *out,
            struct err *e);

extern const struct http_auth web_auth;
extern const struct object_protocol web_protocol;

#endif
