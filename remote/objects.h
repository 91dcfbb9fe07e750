/* SPDX-License-Identifier: MIT */
/* remote/objects.h - a store of objects behind HTTP: names with slashes, read in ranges. */
#ifndef UFS_REMOTE_OBJECTS_H
#define UFS_REMOTE_OBJECTS_H

#include "base/base.h"
#include "remote/http.h"

struct err;
struct object_list;
struct source;
struct store;
struct store_options;

/* One object, or one directory (a prefix), as a listing tells of it. */
struct object_entry {
    const char *name; /* within its directory, decoded, without a slash */
    bool is_dir;
    uint64_t size;
    time_t modified; /* 0: not told */
    /*
     * NULL, or the ETag that a GET of it tells, quotes and all: sent in If-Match. Where the
     * listing has none, the first answer's is held on to.
     */
    const char *etag;
    /* NULL, or any text that is another one when the content is (a version, a hash). */
    const char *version;
};

/*
 * Adds one, copied, in any order. Names that cannot be file names are left out with a
 * warning; an object "a" beside objects "a/..." is left out likewise: the directory stays,
 * as the data of a checkpoint is in there. -ENOMEM, -EFBIG.
 */
int object_list_add(struct object_list *l, const struct object_entry *entry,
                    struct err *e);

/*
 * A protocol: S3, the Hub, plain HTTPS. `self` is its own state. Any thread, several at
 * once. Paths are relative to what was opened, decoded, without leading or trailing
 * slashes; "" is the root.
 */
struct object_protocol {
    const char *name;
    /*
     * A URL names one version of an object for ever: neither ETag nor date is compared.
     * Those of the Hub are of the place that it sends us to, which may be any of many. Nor
     * are directories listed again.
     */
    bool pinned;

    /*
     * One directory, all of it: does the requests (continuation too) and adds what it
     * finds. `deadline_s` is for each request. -ENOENT: there is no such directory; one
     * that is empty is none, but for the root.
     */
    int (*list)(void *self, const char *path, unsigned deadline_s,
                struct object_list *out, struct err *e);

    /* The URL of an object; `version` is what the listing told, or NULL. */
    int (*url)(void *self, const char *path, const char *version, struct buf *out,
               struct err *e);

    /* How its requests are let in; NULL: by nothing. The user is `self`. */
    const struct http_auth *auth;

    /* Adds to the error of a read what the user can do about it; NULL: nothing. */
    int (*explain)(void *self, struct err *e);

    void (*close)(void *self);
};

/* What objects_open() is told. Strings are copied. */
struct objects_spec {
    const struct object_protocol *protocol;
    void *self;           /* owned from now on, also on failure */
    struct http *http;    /* likewise */
    const char *url;      /* how people name it: no secrets */
    const char *identity; /* of what the same answers come from: no secrets either */
    const char *file;     /* NULL, or the one object that was opened, in the root */
    const char *dir;      /* struct store's */
};

/*
 * The store, archives and all (remote/archives.h). Directories are looked at again once
 * options->refresh seconds are over; while the server cannot be asked, what was there
 * before counts. Every read names the version that was listed: -ESTALE when there is
 * another one by now, never bytes of both.
 */
int objects_open(const struct objects_spec *spec, const struct store_options *options,
                 struct store **out, struct err *e);

#endif
