/* SPDX-License-Identifier: MIT */
/* remote/hub_tree.c - names and answers of the Hugging Face Hub's interface. */
#include "remote/hub_tree.h"

#include <errno.h>
#include <string.h>
#include <strings.h>

#include "base/err.h"
#include "base/json.h"
#include "remote/http.h"
#include "remote/store.h"

/* ---- names ---- */

void hub_name_release(struct hub_name *n)
{
    free(n->repo);
    free(n->revision);
    free(n->path);
    *n = (struct hub_name){0};
}

static bool begins(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

/* Letters, digits, and -._ not at an end: what the Hub allows in names. */
static bool repo_is_safe(const char *name, size_t len)
{
    size_t slashes = 0;

    for (size_t i = 0; i < len; i++) {
        char c = name[i];

        slashes += c == '/';
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
              (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.' || c == '/'))
            return false;
    }
    return len > 0 && len <= 200 && slashes <= 1 && name[0] != '/' &&
           name[len - 1] != '/' && name[0] != '.' && !memmem(name, len, "..", 2) &&
           !memmem(name, len, "/.", 2);
}

/* How long the repository's name is: to the '@', or two parts. */
static size_t repo_len(const char *text)
{
    size_t first = strcspn(text, "/@"), second;

    if (text[first] != '/')
        return first;
    second = strcspn(text + first + 1, "/@");
    return second ? first + 1 + second : first;
}

static size_t revision_len(const char *text)
{
    static const char *const refs[] = {"refs/pr/", "refs/convert/"};

    for (size_t i = 0; i < ARRAY_SIZE(refs); i++)
        if (begins(text, refs[i]))
            return strlen(refs[i]) + strcspn(text + strlen(refs[i]), "/");
    return strcspn(text, "/");
}

static int take_decoded(const char *text, size_t len, char **out)
{
    CLEANUP(buf_release) struct buf b = {0};

    TRY(http_decode(text, len, &b));
    *out = b.data ? buf_steal(&b, NULL) : strdup("");
    return *out ? 0 : -ENOMEM;
}

static int bad_name(const char *url, const char *why, struct err *e)
{
    err_set(e, EINVAL, "%s: %s", url, why);
    return err_hint(e, "hf://ORG/NAME[@REVISION][/PATH]");
}

int hub_name_parse(const char *url, struct hub_name *out, struct err *e)
{
    const char *p = strstr(url, "://");
    size_t len;
    int rc = 0;

    *out = (struct hub_name){.kind = "models"};
    if (!p)
        return bad_name(url, "is no URL", e);
    p += 3;
    if (begins(p, "models/"))
        p += strlen("models/");
    else if (begins(p, "datasets/") || begins(p, "spaces/")) {
        out->kind = *p == 'd' ? "datasets" : "spaces";
        p += strlen(out->kind) + 1;
    }
    len = repo_len(p);
    if (!repo_is_safe(p, len))
        return bad_name(url, "is no repository's name", e);
    out->repo = strndup(p, len);
    p += len;
    len = *p == '@' ? revision_len(p + 1) : 0;
    if (*p == '@' && len == 0)
        return bad_name(url, "has an empty revision", e);
    if (len)
        rc = take_decoded(p + 1, len, &out->revision);
    else
        out->revision = strdup("main");
    p += len ? len + 1 : 0;
    p += strspn(p, "/");
    len = strlen(p);
    while (len && p[len - 1] == '/')
        len--;
    if (rc == 0)
        out->path = strndup(p, len);
    if (rc == 0 && (!out->repo || !out->revision || !out->path))
        rc = -ENOMEM;
    if (rc == 0 && out->path[0] && !store_name_is_safe(out->path, len))
        rc = -EINVAL;
    if (rc == 0)
        return 0;
    hub_name_release(out);
    return rc == -ENOMEM ? err_nomem(e)
                         : bad_name(url, "has a part that is no name", e);
}

bool hub_is_commit(const char *text)
{
    size_t len = strspn(text, "0123456789abcdef");

    return text[len] == '\0' && (len == 40 || len == 64);
}

/* ---- a page of a tree ---- */

static int read_entry(const struct json *v, const char *dir, struct hub_entry *out,
                      struct err *e)
{
    const struct json *lfs = json_get(v, "lfs");
    const char *type, *path;
    size_t n = strlen(dir);

    *out = (struct hub_entry){0};
    if (!json_string(json_get(v, "type"), &type) ||
        !json_string(json_get(v, "path"), &path))
        return err_set(e, EBADMSG, "an entry without type or path");
    if (n && (strncmp(path, dir, n) != 0 || path[n] != '/'))
        return err_set(e, EBADMSG, "an entry outside of what was asked for");
    out->name = path + n + (n > 0);
    if (strchr(out->name, '/') || !store_name_is_safe(out->name, strlen(out->name)))
        return err_set(e, EBADMSG, "an entry whose name is no name");
    json_string(json_get(v, "oid"), &out->oid);
    if (strcmp(type, "directory") == 0) {
        out->is_dir = true;
        return 0;
    }
    if (lfs && json_kind(lfs) == JSON_OBJECT) {
        v = lfs; /* its own size and hash, not those of the pointer in git */
        json_string(json_get(v, "oid"), &out->oid);
    }
    if (!json_u64(json_get(v, "size"), &out->size))
        return err_set(e, EBADMSG, "a file without a size");
    return 0;
}

int hub_tree_read(const char *text, size_t len, const char *dir, hub_entry_fn *fn,
                  void *user, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    int rc = json_parse(text, len, NULL, &doc, e);

    if (rc == 0 && json_kind(doc) != JSON_ARRAY)
        rc = err_set(e, EBADMSG, "the answer is no listing");
    for (const struct json *v = json_first(doc); rc == 0 && v; v = json_next(v)) {
        struct hub_entry entry;

        rc = read_entry(v, dir, &entry, e);
        if (rc == 0)
            rc = fn(user, &entry, e);
    }
    return rc;
}

/* ---- the header Link (RFC 8288) ---- */

/* The parameters of one link, up to the ',' behind it: is one of them rel=next? */
static const char *link_parameters(const char *p, bool *next)
{
    *next = false;
    while (*p && *p != ',') {
        p += strspn(p, "; \t");
        if (strncasecmp(p, "rel=\"next\"", 10) == 0 ||
            (strncasecmp(p, "rel=next", 8) == 0 && strchr(";, \t", p[8])))
            *next = true;
        while (*p && !strchr(";,", *p)) {
            if (*p == '"') /* up to the other one */
                p += 1 + strcspn(p + 1, "\"");
            p += *p != '\0';
        }
    }
    return p;
}

int hub_next_page(const char *link, struct buf *out, struct err *e)
{
    for (const char *p = link ? link : "";;) {
        const char *url, *end;
        bool next;

        p += strspn(p, ", \t");
        if (*p == '\0')
            return 0;
        end = *p == '<' ? strchr(p, '>') : NULL;
        if (!end)
            return err_set(e, EBADMSG, "a header Link that cannot be read");
        url = p + 1;
        p = link_parameters(end + 1, &next);
        if (!next)
            continue;
        return buf_add(out, url, (size_t)(end - url)) < 0 ? err_nomem(e) : 1;
    }
}
