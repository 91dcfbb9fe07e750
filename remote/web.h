/* SPDX-License-Identifier: MIT */
/* remote/web.h - files on a plain web server, by its listing pages or by a manifest. */
#ifndef UFS_REMOTE_WEB_H
#define UFS_REMOTE_WEB_H

#include "base/base.h"

struct err;
struct store;
struct store_options;

/*
 * https://HOST/PATH, a directory or one file; http:// of this machine, or with
 * UNSHARD_ALLOW_HTTP=1. A directory has MANIFEST_NAME in it (remote/manifest.h), or its
 * server shows a page with links to what is in it (Apache, nginx, python -m
 * http.server, ...). What files are they tell by HEAD: length, ETag, Last-Modified; one
 * that was opened by itself and lets no HEAD in, by a GET of its first byte. A user and
 * password in the URL go out as Basic authorization, its query with every request.
 */
int web_open(const char *url, const struct store_options *options, struct store **out,
             struct err *e);

/*
 * Calls fn with each name that a listing page links to below its own directory, decoded;
 * what ends in a slash is a directory. `dir` is the path of the page's URL, with a slash
 * at its end. Stops at and returns what is not 0. Any bytes are fine as a page.
 */
typedef int page_link_fn(void *user, const char *name, bool is_dir);
int page_links(const char *html, size_t len, const char *dir, page_link_fn *fn,
               void *user);

#endif
