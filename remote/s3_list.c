/* SPDX-License-Identifier: MIT */
/* remote/s3_list.c - the answers of ListObjectsV2: one page of a directory. */
#include "remote/s3_list.h"

#include <errno.h>
#include <string.h>
#include <strings.h>

#include "base/err.h"
#include "remote/http.h"
#include "remote/xml.h"

/* As the elements come: keys may only be decoded once it is known whether they are to be. */
struct raw_entry {
    size_t key, etag; /* in `text`; SIZE_MAX: none */
    uint64_t size;
    time_t modified;
    bool is_dir, has_size;
};

struct reading {
    struct buf text, entries; /* struct raw_entry */
    struct raw_entry now;
    bool listing, encoded, truncated;
    struct s3_page *page;
};

static const struct raw_entry none = {.key = SIZE_MAX, .etag = SIZE_MAX};

void s3_page_release(struct s3_page *p)
{
    buf_release(&p->next);
    buf_release(&p->names);
    buf_release(&p->entries);
}

static int keep(struct buf *b, const char *text, size_t len, size_t *at, struct err *e)
{
    *at = b->len;
    buf_add(b, text, len);
    return buf_addc(b, '\0') < 0 ? err_nomem(e) : 0;
}

static int read_size(const char *text, uint64_t *out, struct err *e)
{
    uint64_t value = 0;

    for (const char *p = text; *p; p++)
        if (*p < '0' || *p > '9' || __builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*p - '0'), &value))
            return err_set(e, EBADMSG, "a listing with a size that is no number");
    if (!*text || value > INT64_MAX)
        return err_set(e, EBADMSG, "a listing with a size that no object has");
    *out = value;
    return 0;
}

static bool is_true(const char *text)
{
    return strcasecmp(text, "true") == 0;
}

/* Elements of the listing itself. */
static int on_field(struct reading *r, const char *name, const char *text, size_t len,
                    struct err *e)
{
    if (strcmp(name, "IsTruncated") == 0)
        r->truncated = is_true(text);
    else if (strcmp(name, "EncodingType") == 0)
        r->encoded = strcasecmp(text, "url") == 0;
    else if (strcmp(name, "NextContinuationToken") == 0) {
        buf_clear(&r->page->next);
        if (buf_add(&r->page->next, text, len) < 0)
            return err_nomem(e);
    }
    return 0;
}

/* Elements of one object. */
static int on_object(struct reading *r, const char *name, const char *text, size_t len,
                     struct err *e)
{
    if (strcmp(name, "Key") == 0)
        return keep(&r->text, text, len, &r->now.key, e);
    if (strcmp(name, "ETag") == 0)
        return keep(&r->text, text, len, &r->now.etag, e);
    if (strcmp(name, "LastModified") == 0)
        r->now.modified = http_date(text);
    if (strcmp(name, "Size") != 0)
        return 0;
    r->now.has_size = true;
    return read_size(text, &r->now.size, e);
}

static int end_entry(struct reading *r, struct err *e)
{
    if (r->now.key == SIZE_MAX)
        return err_set(e, EBADMSG, "a listing with an object that has no key");
    if (!r->now.is_dir && !r->now.has_size)
        return err_set(e, EBADMSG, "a listing with an object that has no size");
    if (buf_add(&r->entries, &r->now, sizeof r->now) < 0)
        return err_nomem(e);
    r->now = none;
    return 0;
}

static int on_element(void *user, const char *path, const char *text, size_t len,
                      struct err *e)
{
    static const char root[] = "ListBucketResult";
    const char *name = path + strlen(root) + 1;
    struct reading *r = user;

    if (strncmp(path, root, strlen(root)) != 0)
        return 0;
    if (path[strlen(root)] == '\0') {
        r->listing = true;
        return 0;
    }
    if (path[strlen(root)] != '/')
        return 0;
    if (strlen(text) != len)
        return err_set(e, EBADMSG, "a listing with a NUL in it");
    if (strcmp(name, "CommonPrefixes/Prefix") == 0) {
        r->now.is_dir = true;
        return keep(&r->text, text, len, &r->now.key, e);
    }
    if (strcmp(name, "CommonPrefixes") == 0 || strcmp(name, "Contents") == 0)
        return end_entry(r, e);
    if (strncmp(name, "Contents/", 9) == 0)
        return on_object(r, name + 9, text, len, e);
    return on_field(r, name, text, len, e);
}

/* ---- from keys to names ---- */

/* As application/x-www-form-urlencoded has it: some stores write a blank as '+'. */
static int decode(char *key, struct buf *out)
{
    for (char *p = key; *p; p++)
        if (*p == '+')
            *p = ' ';
    return http_decode(key, strlen(key), out);
}

static int settle(const struct reading *r, const struct raw_entry *raw,
                  const char *prefix, struct err *e)
{
    struct s3_page *page = r->page;
    CLEANUP(buf_release) struct buf decoded = {0};
    char *key = r->text.data + raw->key;
    struct s3_entry entry = {.etag = SIZE_MAX,
                             .size = raw->size,
                             .modified = raw->modified,
                             .is_dir = raw->is_dir};
    size_t len;
    int rc;

    if (r->encoded && key[0]) {
        rc = decode(key, &decoded);
        if (rc < 0)
            return rc == -ENOMEM ? err_nomem(e)
                                 : err_set(e, EBADMSG, "a key that cannot be decoded");
        key = decoded.data;
    }
    if (strncmp(key, prefix, strlen(prefix)) != 0)
        return err_set(e, EBADMSG,
                       "a listing with a key outside of what was asked for");
    page->objects++;
    key += strlen(prefix);
    len = strlen(key);
    if (!raw->is_dir && len == 0) {
        page->marker = true;
        return 0;
    }
    if (raw->is_dir && len && key[len - 1] == '/')
        len--;
    TRY(keep(&page->names, key, len, &entry.name, e));
    if (raw->etag != SIZE_MAX && r->text.data[raw->etag])
        TRY(keep(&page->names, r->text.data + raw->etag,
                 strlen(r->text.data + raw->etag), &entry.etag, e));
    return buf_add(&page->entries, &entry, sizeof entry) < 0 ? err_nomem(e) : 0;
}

static int settle_all(const struct reading *r, const char *prefix, struct err *e)
{
    const struct raw_entry *raw =
        (const struct raw_entry *)(const void *)r->entries.data;
    int rc = 0;

    if (!r->listing)
        return err_set(e, EBADMSG, "the answer is no listing of a bucket");
    if (r->truncated && r->page->next.len == 0)
        return err_set(e, EBADMSG, "a listing that goes on, and does not tell where");
    if (!r->truncated)
        buf_clear(&r->page->next);
    for (size_t i = 0; rc == 0 && i < r->entries.len / sizeof *raw; i++)
        rc = settle(r, &raw[i], prefix, e);
    return rc;
}

int s3_page_read(const void *data, size_t len, const char *prefix, struct s3_page *out,
                 struct err *e)
{
    struct reading r = {.now = none, .page = out};
    int rc = xml_each(data, len, on_element, &r, e);

    if (rc == 0)
        rc = settle_all(&r, prefix, e);
    buf_release(&r.text);
    buf_release(&r.entries);
    return rc;
}
