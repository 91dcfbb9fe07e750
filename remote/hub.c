/* SPDX-License-Identifier: MIT */
/* remote/hub.c - repositories of the Hugging Face Hub as a store of objects. */
#include "remote/hub.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/err.h"
#include "base/json.h"
#include "remote/http.h"
#include "remote/hub_tree.h"
#include "remote/objects.h"
#include "remote/store.h"

enum {
    MAX_PAGES = 10000,
    MAX_TOKEN = 4096,
    /* A revision's answer names all files, 50,000 of them and more: as much as JSON may be. */
    MAX_ANSWER = 100000000,
};

struct hub {
    struct http *http; /* borrowed from the store */
    char *endpoint;    /* "https://huggingface.co", without a slash at its end */
    char *token;       /* NULL: none */
    struct hub_name name;
    char *commit;
    time_t modified; /* of the commit */
};

/* ---- settings ---- */

static const char *set_variable(const char *name)
{
    const char *value = getenv(name);

    return value && value[0] ? value : NULL;
}

static bool is_true(const char *value)
{
    return value && (strcmp(value, "1") == 0 || strcasecmp(value, "true") == 0 ||
                     strcasecmp(value, "yes") == 0 || strcasecmp(value, "on") == 0);
}

/* Where huggingface_hub keeps it (constants.py). */
static int token_path(struct buf *out)
{
    const char *path = set_variable("HF_TOKEN_PATH"), *home = set_variable("HF_HOME");
    const char *cache = set_variable("XDG_CACHE_HOME"), *user = set_variable("HOME");

    if (path)
        return buf_adds(out, path);
    if (home)
        return buf_addf(out, "%s/token", home);
    if (cache)
        return buf_addf(out, "%s/huggingface/token", cache);
    return user ? buf_addf(out, "%s/.cache/huggingface/token", user) : 0;
}

/* A file that is not there, or not for us, is no token. */
static int token_from_file(char **out)
{
    CLEANUP(buf_release) struct buf path = {0};
    CLEANUP_FD int fd = -1;
    char text[MAX_TOKEN + 1];
    ssize_t n;

    if (token_path(&path) < 0)
        return -ENOMEM;
    if (path.len)
        fd = open(path.data, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return 0;
    n = read(fd, text, MAX_TOKEN);
    if (n <= 0)
        return 0;
    text[n] = '\0';
    *out = strdup(text);
    explicit_bzero(text, sizeof text);
    return *out ? 0 : -ENOMEM;
}

static int take_token(struct hub *h, struct err *e)
{
    const char *given = set_variable("HF_TOKEN");
    size_t len, blank;
    int rc = 0;

    if (!given)
        given = set_variable("HUGGING_FACE_HUB_TOKEN"); /* its name up to 2023 */
    if (given)
        rc = (h->token = strdup(given)) ? 0 : -ENOMEM;
    else if (!is_true(getenv("HF_HUB_DISABLE_IMPLICIT_TOKEN")))
        rc = token_from_file(&h->token);
    if (rc < 0)
        return err_nomem(e);
    if (!h->token)
        return 0;
    len = strlen(h->token);
    while (len && strchr(" \t\r\n", h->token[len - 1]))
        h->token[--len] = '\0';
    blank = strspn(h->token, " \t\r\n");
    memmove(h->token, h->token + blank, len - blank + 1);
    if (h->token[0] == '\0') {
        free(h->token);
        h->token = NULL;
    }
    return 0;
}

static int take_endpoint(struct hub *h, struct err *e)
{
    const char *url = set_variable("HF_ENDPOINT");
    size_t len;

    if (!url)
        url = "https://huggingface.co";
    len = strlen(url);
    while (len && url[len - 1] == '/')
        len--;
    if ((strncasecmp(url, "https://", 8) != 0 && strncasecmp(url, "http://", 7) != 0) ||
        strpbrk(url, "@?#"))
        return err_set(e, EINVAL, "HF_ENDPOINT must be https://HOST or http://HOST");
    h->endpoint = strndup(url, len);
    return h->endpoint ? 0 : err_nomem(e);
}

/* ---- requests ---- */

/* Is this URL one of the Hub itself? */
static bool is_ours(const struct hub *h, const char *url)
{
    size_t len = strlen(h->endpoint);

    return strncmp(url, h->endpoint, len) == 0 && url[len] == '/';
}

static int hub_authorize(void *user, struct http_try *t, struct err *e)
{
    const struct hub *h = user;
    CLEANUP(buf_release) struct buf value = {0};
    int rc;

    if (!h->token || !is_ours(h, t->url))
        return 0;
    if (buf_addf(&value, "Bearer %s", h->token) < 0)
        return err_nomem(e);
    rc = http_try_header(t, "Authorization", value.data, e);
    explicit_bzero(value.data, value.len);
    return rc;
}

static const struct http_auth hub_auth = {.authorize = hub_authorize};

static int explain(const struct hub *h, struct err *e)
{
    if (e->code == EACCES && !e->hint[0])
        err_hint(e, h->token
                        ? "there is no such repository, or the token is not for it"
                        : "there is no such repository, or it is private or gated: "
                          "set HF_TOKEN");
    else if (e->code == ENOENT && !e->hint[0])
        err_hint(e, "check the names: hf://ORG/NAME@REVISION, a branch, tag or commit");
    return -e->code;
}

static int get(const struct hub *h, const char *url, const char *what,
               unsigned deadline_s, struct http_answer *answer, struct err *e)
{
    struct http_request r = {.url = url,
                             .what = what,
                             .auth = &hub_auth,
                             .auth_user = (void *)(uintptr_t)h,
                             .max = MAX_ANSWER,
                             .deadline_s = deadline_s};

    return http_do(h->http, &r, answer, e) < 0 ? explain(h, e) : 0;
}

static int shown(const struct hub *h, const char *path, struct buf *out)
{
    buf_addf(out, "hf://%s%s%s@%s", strcmp(h->name.kind, "models") ? h->name.kind : "",
             strcmp(h->name.kind, "models") ? "/" : "", h->name.repo, h->name.revision);
    if (path[0])
        buf_addf(out, "/%s", path);
    return buf_failed(out);
}

static int add_api(const struct hub *h, const char *what, struct buf *url)
{
    buf_addf(url, "%s/api/%s/%s/%s/", h->endpoint, h->name.kind, h->name.repo, what);
    return http_encode(h->commit ? h->commit : h->name.revision, false, url);
}

/* The commit that the revision is now. */
static int pin(struct hub *h, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP(buf_release) struct buf url = {0};
    CLEANUP(buf_release) struct buf what = {0};
    const char *text;
    int rc;

    if (add_api(h, "revision", &url) < 0 || shown(h, "", &what) < 0)
        return err_nomem(e);
    rc = get(h, url.data, what.data, 0, &answer, e);
    if (rc == 0)
        rc = json_parse(answer.body.data, answer.body.len, NULL, &doc, e);
    if (rc == 0 && (!json_string(json_get(doc, "sha"), &text) || !hub_is_commit(text)))
        rc = err_set(e, EBADMSG, "the answer tells no commit");
    if (rc < 0)
        return rc == -EBADMSG ? err_wrap(e, "%s", what.data) : rc;
    h->commit = strdup(text);
    if (json_string(json_get(doc, "lastModified"), &text))
        h->modified = http_date(text);
    return h->commit ? 0 : err_nomem(e);
}

/* ---- listing ---- */

/* "NAME" or "PATH/NAME" as the repository has it; `path` is below what was opened. */
static int repo_path(const struct hub *h, const char *path, struct buf *out)
{
    buf_adds(out, h->name.path);
    if (h->name.path[0] && path[0])
        buf_addc(out, '/');
    return buf_adds(out, path);
}

static int tree_url(const struct hub *h, const char *dir, struct buf *url)
{
    add_api(h, "tree", url);
    if (dir[0]) {
        buf_addc(url, '/');
        http_encode(dir, false, url);
    }
    return buf_adds(url, "?recursive=false&expand=false");
}

/* "/api/..." of a page of the same listing, which another host's URL tells; or NULL. */
static const char *page_of(const struct hub *h, const char *url, const char *next)
{
    const char *ours = url + strlen(h->endpoint), *host = strstr(next, "://");
    const char *theirs = host ? strchr(host + 3, '/') : NULL;
    size_t len = strcspn(ours, "?");

    return theirs && strncmp(theirs, ours, len) == 0 && theirs[len] == '?' ? theirs
                                                                           : NULL;
}

/*
 * Another host is never asked: it would get the token, or could say anything. Mirrors
 * ($HF_ENDPOINT) pass on the Hub's own links: they are asked for that page themselves.
 */
static int next_page(const struct hub *h, const struct http_answer *answer,
                     struct buf *url, struct err *e)
{
    CLEANUP(buf_release) struct buf next = {0};
    const char *page;
    int rc = hub_next_page(http_answer_header(answer, "link"), &next, e);

    if (rc <= 0)
        return rc;
    page = is_ours(h, next.data) ? next.data + strlen(h->endpoint)
                                 : page_of(h, url->data, next.data);
    if (!page)
        return err_set(e, EPROTO, "the next page of the listing is on another host");
    if (strcmp(page, url->data + strlen(h->endpoint)) == 0)
        return err_set(e, EPROTO, "a listing that does not go on");
    buf_clear(url);
    return buf_addf(url, "%s%s", h->endpoint, page) < 0 ? err_nomem(e) : 1;
}

static int each_entry(const struct hub *h, const char *dir, unsigned deadline_s,
                      hub_entry_fn *fn, void *user, struct err *e)
{
    CLEANUP(buf_release) struct buf url = {0};
    CLEANUP(buf_release) struct buf what = {0};
    int rc = 1;

    if (tree_url(h, dir, &url) < 0 || shown(h, dir, &what) < 0)
        return err_nomem(e);
    for (unsigned pages = 0; rc == 1; pages++) {
        CLEANUP(http_answer_release) struct http_answer answer = {0};

        if (pages == MAX_PAGES)
            return err_set(e, EFBIG, "%s: more than %d pages", what.data, MAX_PAGES);
        rc = get(h, url.data, what.data, deadline_s, &answer, e);
        if (rc < 0)
            return rc;
        rc = hub_tree_read(answer.body.data, answer.body.len, dir, fn, user, e);
        if (rc == 0)
            rc = next_page(h, &answer, &url, e);
    }
    return rc < 0 ? err_wrap(e, "%s", what.data) : 0;
}

struct adding {
    const struct hub *hub;
    struct object_list *list;
};

static int add_entry(void *user, const struct hub_entry *from, struct err *e)
{
    const struct adding *a = user;

    return object_list_add(a->list,
                           &(struct object_entry){.name = from->name,
                                                  .is_dir = from->is_dir,
                                                  .size = from->size,
                                                  .modified = a->hub->modified,
                                                  .version = from->oid},
                           e);
}

static int hub_list(void *self, const char *path, unsigned deadline_s,
                    struct object_list *out, struct err *e)
{
    struct adding adding = {self, out};
    CLEANUP(buf_release) struct buf dir = {0};

    if (repo_path(self, path, &dir) < 0)
        return err_nomem(e);
    return each_entry(self, dir.data, deadline_s, add_entry, &adding, e);
}

static int hub_url(void *self, const char *path, const char *version, struct buf *out,
                   struct err *e)
{
    const struct hub *h = self;
    CLEANUP(buf_release) struct buf full = {0};
    bool model = strcmp(h->name.kind, "models") == 0;

    (void)version; /* the commit says all */
    if (repo_path(h, path, &full) < 0)
        return err_nomem(e);
    buf_addf(out, "%s/%s%s%s/resolve/%s/", h->endpoint, model ? "" : h->name.kind,
             model ? "" : "/", h->name.repo, h->commit);
    return http_encode(full.data, true, out) < 0 ? err_nomem(e) : 0;
}

static void hub_close(void *self)
{
    struct hub *h = self;

    if (h->token)
        explicit_bzero(h->token, strlen(h->token));
    free(h->token);
    free(h->endpoint);
    free(h->commit);
    hub_name_release(&h->name);
    free(h);
}

static const struct object_protocol hub_protocol = {
    .name = "hub",
    .pinned = true,
    .list = hub_list,
    .url = hub_url,
    .auth = &hub_auth,
    .close = hub_close,
};

/* ---- opening ---- */

struct looking {
    const char *name;
    bool found, is_dir;
};

static int look(void *user, const struct hub_entry *entry, struct err *e)
{
    struct looking *l = user;

    (void)e;
    if (strcmp(entry->name, l->name) == 0) {
        l->found = true;
        l->is_dir = entry->is_dir;
    }
    return 0;
}

/* What is the path that was asked for? Of a file its directory becomes the root. */
static int settle_path(struct hub *h, char **file, struct err *e)
{
    char *slash = strrchr(h->name.path, '/');
    CLEANUP_FREE char *dir = NULL;
    struct looking l = {.name = slash ? slash + 1 : h->name.path};

    if (h->name.path[0] == '\0')
        return 0;
    dir = strndup(h->name.path, slash ? (size_t)(slash - h->name.path) : 0);
    if (!dir)
        return err_nomem(e);
    TRY(each_entry(h, dir, 0, look, &l, e));
    if (!l.found)
        return err_set(e, ENOENT, "hf://%s@%s: there is no %s in it", h->name.repo,
                       h->name.revision, h->name.path);
    if (l.is_dir)
        return 0;
    *file = strdup(l.name);
    if (!*file)
        return err_nomem(e);
    *(slash ? slash : h->name.path) = '\0';
    return 0;
}

static int open_root(struct hub *h, const char *url, char **file, struct err *e)
{
    int rc = hub_name_parse(url, &h->name, e);

    if (rc == 0 && is_true(getenv("HF_HUB_OFFLINE"))) {
        err_set(e, EACCES, "HF_HUB_OFFLINE is set");
        rc = err_hint(e, "unset it to mount from the Hub");
    }
    if (rc == 0)
        rc = take_endpoint(h, e);
    if (rc == 0)
        rc = take_token(h, e);
    if (rc == 0)
        rc = pin(h, e);
    return rc < 0 ? rc : settle_path(h, file, e);
}

int hub_open(const char *url, const struct store_options *options, struct store **out,
             struct err *e)
{
    struct hub *h = calloc(1, sizeof *h);
    struct http *http = NULL;
    CLEANUP(buf_release) struct buf name = {0};
    CLEANUP(buf_release) struct buf identity = {0};
    CLEANUP(buf_release) struct buf path = {0};
    CLEANUP_FREE char *file = NULL;
    int rc;

    rc = h ? http_new(NULL, &http, e) : err_nomem(e);
    if (rc == 0) {
        h->http = http;
        rc = open_root(h, url, &file, e);
    }
    if (rc == 0) {
        repo_path(h, file ? file : "", &path);
        shown(h, path.data ? path.data : "", &name);
        buf_addf(&identity, "hub %s %s %s %s %s", h->endpoint, h->name.kind,
                 h->name.repo, h->commit, h->name.path);
        if (buf_failed(&path) || buf_failed(&name) || buf_failed(&identity))
            rc = err_nomem(e);
    }
    if (rc < 0) {
        if (h)
            hub_close(h);
        http_free(http);
        return rc;
    }
    return objects_open(
        &(struct objects_spec){.protocol = &hub_protocol,
                               .self = h,
                               .http = http,
                               .url = name.data,
                               .identity = identity.data,
                               .file = file,
                               .dir = h->name.path[0] ? h->name.path : h->name.repo},
        options, out, e);
}
