/* SPDX-License-Identifier: MIT */
/* remote/web_priv.h - what the files of plain web servers share. */
#ifndef UFS_REMOTE_WEB_PRIV_H
#define UFS_REMOTE_WEB_PRIV_H

#include <pthread.h>

#include "remote/objects.h"
#include "remote/web.h"

struct manifest;

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
    pthread_mutex_t lock;
    /* guarded by lock: what was fetched a moment ago, for who asks for it now */
    struct manifest *manifest;
    struct buf page; /* of the root */
    int64_t until;
};

void web_close(void *self);

/* The URL of what `path` and `tail` name below the directory. */
int web_add_url(const struct web *p, const char *path, const char *tail,
                struct buf *out, struct err *e);

bool web_is_html(const struct http_answer *a);

/* Keeps it for a moment, with a reference of its own. */
void web_keep_manifest(struct web *p, struct manifest *m);

/* When that moment will be over. */
int64_t web_moment(void);

extern const struct http_auth web_auth;
extern const struct object_protocol web_protocol;

#endif
