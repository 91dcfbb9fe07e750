/* SPDX-License-Identifier: MIT */
/* remote/bucket.c - the requests of S3's REST interface that write, and their answers. */
#include "remote/bucket.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/err.h"
#include "remote/http.h"
#include "remote/s3.h"
#include "remote/store.h"
#include "remote/xml.h"

enum {
    ANSWER_MAX = 16 << 20, /* a listing of a thousand names has one at most */
    COMPLETE_TRIES = 4,
    HEADERS = 6,
    HEADER_MAX = 256,
    /* A part may take long over a slow line; what stalls ends sooner (http_options). */
    PUT_SECONDS = 600,
};

/* Documented with "CompleteMultipartUpload" and "PutObject" of the API reference. */
static const char tag_header[] = "x-amz-meta-unshard-save";

struct bucket {
    struct http *http;
    struct s3 *s3;
};

bool bucket_is_url(const char *url)
{
    return strncasecmp(url, "s3://", 5) == 0 || strncasecmp(url, "gs://", 5) == 0;
}

int bucket_open(const char *url, struct bucket **out, char **prefix, struct err *e)
{
    CLEANUP_FREE char *shown = store_name_shown(url);
    struct http_options o;
    struct bucket *b;
    int ret;

    *prefix = NULL;
    if (!shown)
        return err_nomem(e);
    if (!bucket_is_url(url)) {
        err_set(e, ENOTSUP, "%s: nothing is saved there", shown);
        return err_hint(e, "save to s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or a path");
    }
    b = calloc(1, sizeof *b);
    ret = b ? http_options_get(&o, e) : err_nomem(e);
    if (ret == 0)
        ret = http_new(&o, &b->http, e);
    if (ret == 0)
        ret = s3_new(url, b->http, &b->s3, prefix, e);
    if (ret == 0)
        ret = s3_locate(b->s3, e);
    if (ret < 0) {
        free(*prefix);
        *prefix = NULL;
        bucket_close(b);
        return ret;
    }
    *out = b;
    return 0;
}

void bucket_close(struct bucket *b)
{
    if (!b)
        return;
    s3_free(b->s3);
    http_free(b->http);
    free(b);
}

const char *bucket_url(const struct bucket *b)
{
    return s3_shown(b->s3);
}

/* ---- requests ---- */

struct ask {
    const char *method, *key, *query; /* query: encoded, or NULL */
    const void *body;
    size_t len;
    unsigned flags;
    size_t max;
    char text[HEADERS][HEADER_MAX];
    const char *header[HEADERS + 1];
    unsigned headers;
};

static void add_header(struct ask *a, const char *name, const char *value)
{
    snprintf(a->text[a->headers], HEADER_MAX, "%s: %s", name, value);
    a->header[a->headers] = a->text[a->headers];
    a->headers++;
}

/*
 * The server compares it with what came. (Where MD5 is not to be had, TLS must do; a
 * directory bucket compares the hash that is signed.)
 */
static void add_md5(const struct bucket *b, struct ask *a)
{
    unsigned char sum[EVP_MAX_MD_SIZE];
    char text[2 * EVP_MAX_MD_SIZE];
    unsigned n = 0;

    if (!s3_takes_md5(b->s3))
        return;
    if (EVP_Digest(a->body, a->len, sum, &n, EVP_md5(), NULL) != 1 || n != 16)
        return;
    EVP_EncodeBlock((unsigned char *)text, sum, (int)n);
    add_header(a, "Content-MD5", text);
}

static int ask(struct bucket *b, const struct ask *a, struct http_answer *answer,
               struct err *e)
{
    CLEANUP(buf_release) struct buf url = {0}, what = {0};
    int ret = s3_url(b->s3, a->key ? a->key : "", a->query, &url, e);

    if (ret < 0)
        return ret;
    buf_addf(&what, "%s/%s", bucket_url(b), a->key ? a->key : "");
    if (buf_failed(&url) || buf_failed(&what))
        return err_nomem(e);
    const struct http_request r = {.method = a->method,
                                   .url = url.data,
                                   .what = what.data,
                                   .headers = a->headers ? a->header : NULL,
                                   .auth = &s3_auth,
                                   .auth_user = b->s3,
                                   .body = a->body,
                                   .body_size = a->len,
                                   .max = a->max ? a->max : ANSWER_MAX,
                                   .flags = a->flags,
                                   .deadline_s = a->body ? PUT_SECONDS : 0};

    ret = http_do(b->http, &r, answer, e);
    return ret < 0 ? s3_explain(b->s3, e) : 0;
}

/* ---- what servers say when they will not ---- */

struct refusal {
    char code[64], message[200];
    bool error; /* the document is one */
};

static int see_error(void *user, const char *path, const char *text, size_t len,
                     struct err *e)
{
    struct refusal *r = user;

    (void)len;
    (void)e;
    if (strcmp(path, "Error/Code") == 0)
        snprintf(r->code, sizeof r->code, "%s", text);
    else if (strcmp(path, "Error/Message") == 0)
        snprintf(r->message, sizeof r->message, "%s", text);
    else if (strcmp(path, "Error") == 0)
        r->error = true;
    return 0;
}

static struct refusal refusal_of(const struct http_answer *a)
{
    struct refusal r = {0};
    struct err ignored = {0};

    xml_each(a->body.data, a->body.len, see_error, &r, &ignored);
    return r;
}

/* S3 says 400 of keys whose time is over. */
static bool is_of_keys(const char *code)
{
    return strcmp(code, "ExpiredToken") == 0 || strcmp(code, "InvalidToken") == 0 ||
           strcmp(code, "TokenRefreshRequired") == 0;
}

/* An answer that is not 2xx, or says that it is none. */
static int refused(struct bucket *b, const struct ask *a,
                   const struct http_answer *answer, struct err *e)
{
    struct refusal r = refusal_of(answer);
    int code = EIO;

    if (answer->status == 401 || answer->status == 403 || is_of_keys(r.code))
        code = EACCES;
    else if (answer->status == 404)
        code = ENOENT;
    else if (answer->status == 412 || strcmp(r.code, "PreconditionFailed") == 0)
        code = EEXIST;
    err_set(e, code, "%s/%s: %s: HTTP %d %s%s%s", bucket_url(b), a->key ? a->key : "",
            a->method, answer->status, r.code, r.message[0] ? ": " : "", r.message);
    return s3_explain(b->s3, e);
}

/* A request whose answer says nothing more. */
static int demand(struct bucket *b, struct ask *a, struct http_answer *answer,
                  struct err *e)
{
    int ret;

    a->flags |= HTTP_ANY_STATUS;
    ret = ask(b, a, answer, e);
    if (ret == 0 && answer->status / 100 != 2)
        ret = refused(b, a, answer, e);
    return ret;
}

/* ---- lists, a page at a time ---- */

struct page {
    void *fn_user;
    bool truncated, encoded;
    struct buf next, next_id; /* where the next page begins */
    int (*take)(struct page *p, const char *path, const char *text, struct err *e);
    /* The item that is being read. */
    struct buf key, id, etag;
    uint64_t size, number;
    union {
        bucket_object_fn *object;
        bucket_part_fn *part;
        bucket_upload_fn *upload;
    } fn;
    int ret; /* of the caller's function */
};

static void page_release(struct page *p)
{
    buf_release(&p->next);
    buf_release(&p->next_id);
    buf_release(&p->key);
    buf_release(&p->id);
    buf_release(&p->etag);
}

static void keep(struct buf *b, const char *text)
{
    buf_clear(b);
    buf_adds(b, text);
}

/* Where the answer says so, keys are encoded as forms are: a space is a plus. */
static int keep_key(const struct page *p, struct buf *b, const char *text,
                    struct err *e)
{
    CLEANUP_FREE char *copy = strdup(text);

    if (!copy)
        return err_nomem(e);
    buf_clear(b);
    if (!p->encoded) {
        buf_adds(b, text);
        return 0;
    }
    for (char *c = copy; *c; c++)
        *c = *c == '+' ? ' ' : *c;
    if (http_decode(copy, strlen(copy), b) == -EINVAL)
        return err_set(e, EBADMSG, "a key that is not encoded: %.200s", text);
    return 0;
}

static int keep_number(uint64_t *n, const char *text, struct err *e)
{
    char *end;

    errno = 0;
    *n = strtoull(text, &end, 10);
    if (end == text || *end || *text == '-' || errno)
        return err_set(e, EBADMSG, "no number: %.100s", text);
    return 0;
}

static int see_item(void *user, const char *path, const char *text, size_t len,
                    struct err *e)
{
    struct page *p = user;
    const char *slash = strchr(path, '/');

    (void)len;
    if (!slash)
        return 0;
    path = slash + 1;
    if (strcmp(path, "IsTruncated") == 0)
        p->truncated = strcmp(text, "true") == 0;
    else if (strcmp(path, "EncodingType") == 0)
        p->encoded = strcmp(text, "url") == 0;
    return p->take(p, path, text, e);
}

static int read_page(struct page *p, const struct bucket *b, const struct ask *a,
                     const struct http_answer *answer, struct err *e)
{
    int ret;

    p->truncated = p->encoded = false;
    ret = xml_each(answer->body.data, answer->body.len, see_item, p, e);
    if (p->ret)
        return p->ret;
    if (ret < 0)
        return err_wrap(e, "%s: list %s", bucket_url(b), a->key ? a->key : "");
    if (buf_failed(&p->next) || buf_failed(&p->next_id) || buf_failed(&p->key) ||
        buf_failed(&p->id) || buf_failed(&p->etag))
        return err_nomem(e);
    return 0;
}

/* Where the next page begins, as one text. */
static void add_place(const struct page *p, struct buf *out)
{
    buf_add(out, p->next.data ? p->next.data : "", p->next.len);
    buf_addc(out, '\0');
    buf_add(out, p->next_id.data ? p->next_id.data : "", p->next_id.len);
}

/* Asks for pages until there is no more; `query` makes the text for the next one. */
static int each_page(struct bucket *b, const char *key, struct page *p,
                     void (*query)(const struct page *p, void *user, struct buf *out),
                     void *user, struct err *e)
{
    int ret;

    do {
        CLEANUP(http_answer_release) struct http_answer answer = {0};
        CLEANUP(buf_release) struct buf text = {0};
        struct ask a = {.method = "GET", .key = key};
        CLEANUP(buf_release) struct buf before = {0}, after = {0};

        query(p, user, &text);
        add_place(p, &before);
        if (buf_failed(&text) || buf_failed(&before))
            return err_nomem(e);
        a.query = text.data;
        ret = demand(b, &a, &answer, e);
        if (ret == 0)
            ret = read_page(p, b, &a, &answer, e);
        add_place(p, &after);
        if (buf_failed(&after))
            return err_nomem(e);
        if (ret == 0 && p->truncated && before.len == after.len &&
            memcmp(before.data, after.data, after.len) == 0)
            ret = err_set(e, EBADMSG, "%s: a list that does not go on", bucket_url(b));
    } while (ret == 0 && p->truncated);
    return ret;
}

static void add_parameter(struct buf *out, const char *name, const char *value)
{
    buf_addf(out, "%s%s=", out->len ? "&" : "", name);
    http_encode(value, false, out);
}

/* ---- objects ---- */

static int take_object(struct page *p, const char *path, const char *text,
                       struct err *e)
{
    if (strcmp(path, "NextContinuationToken") == 0)
        keep(&p->next, text);
    else if (strcmp(path, "Contents/Key") == 0)
        return keep_key(p, &p->key, text, e);
    else if (strcmp(path, "Contents/ETag") == 0)
        keep(&p->etag, text);
    else if (strcmp(path, "Contents/Size") == 0)
        return keep_number(&p->size, text, e);
    else if (strcmp(path, "Contents") == 0 && p->key.data) {
        const struct bucket_object o = {.key = p->key.data,
                                        .etag = p->etag.data ? p->etag.data : "",
                                        .size = p->size};

        p->ret = p->fn.object(p->fn_user, &o);
        return p->ret;
    }
    return 0;
}

static void query_objects(const struct page *p, void *user, struct buf *out)
{
    add_parameter(out, "list-type", "2");
    add_parameter(out, "encoding-type", "url");
    add_parameter(out, "prefix", user);
    if (p->next.len)
        add_parameter(out, "continuation-token", p->next.data);
}

int bucket_list(struct bucket *b, const char *prefix, bucket_object_fn *fn, void *user,
                struct err *e)
{
    CLEANUP(page_release)
    struct page p = {.fn_user = user, .take = take_object, .fn.object = fn};
    CLEANUP_FREE char *text = strdup(prefix);

    return text ? each_page(b, NULL, &p, query_objects, text, e) : err_nomem(e);
}

int bucket_tag(struct bucket *b, const char *key, struct buf *tag, uint64_t *size,
               struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    struct ask a = {.method = "HEAD", .key = key};
    int ret = demand(b, &a, &answer, e);
    const char *value;

    if (ret < 0)
        return ret;
    value = http_answer_header(&answer, tag_header);
    if (!value) /* as Google's own interface calls it */
        value = http_answer_header(&answer, "x-goog-meta-unshard-save");
    *size = answer.size;
    buf_adds(tag, value ? value : "");
    return buf_failed(tag) ? err_nomem(e) : 0;
}

int bucket_get(struct bucket *b, const char *key, size_t max, struct buf *out,
               struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    struct ask a = {.method = "GET", .key = key, .max = max};
    int ret = demand(b, &a, &answer, e);

    if (ret == 0)
        buf_add(out, answer.body.data, answer.body.len);
    return ret == 0 && buf_failed(out) ? err_nomem(e) : ret;
}

/* Does the store not know conditional writes? Then it is done without. */
static bool knows_no_condition(const struct http_answer *a)
{
    return a->status == 400 || a->status == 501
               ? strcmp(refusal_of(a).code, "NotImplemented") == 0 ||
                     strcmp(refusal_of(a).code, "InvalidArgument") == 0
               : false;
}

int bucket_put(struct bucket *b, const char *key, const void *data, size_t len,
               const struct bucket_put *how, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    struct bucket_put without = *how;
    struct ask a = {.method = "PUT", .key = key, .body = data ? data : "", .len = len};
    int ret;

    add_md5(b, &a);
    if (how->tag)
        add_header(&a, tag_header, how->tag);
    if (how->absent)
        add_header(&a, "If-None-Match", "*");
    ret = demand(b, &a, &answer, e);
    if (ret < 0 && how->absent && knows_no_condition(&answer)) {
        without.absent = false;
        return bucket_put(b, key, data, len, &without, e);
    }
    return ret;
}

static int see_copied(void *user, const char *path, const char *text, size_t len,
                      struct err *e)
{
    bool *copied = user;

    (void)text;
    (void)e;
    if (strcmp(path, "CopyObjectResult/ETag") == 0 && len > 0)
        *copied = true;
    return 0;
}

/* As of CompleteMultipartUpload, 200 may hold an error (API reference, "CopyObject"). */
int bucket_copy(struct bucket *b, const char *from, const char *to, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(buf_release) struct buf source = {0};
    struct ask a = {.method = "PUT", .key = to, .body = "", .len = 0};
    struct err ignored = {0};
    bool copied = false;

    buf_addf(&source, "x-amz-copy-source: /%s/", strchr(bucket_url(b), ':') + 3);
    http_encode(from, true, &source);
    if (buf_failed(&source))
        return err_nomem(e);
    a.header[a.headers++] = source.data;
    TRY(demand(b, &a, &answer, e));
    xml_each(answer.body.data, answer.body.len, see_copied, &copied, &ignored);
    return copied ? 0 : refused(b, &a, &answer, e);
}

int bucket_delete(struct bucket *b, const char *key, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    struct ask a = {.method = "DELETE", .key = key};
    int ret = demand(b, &a, &answer, e);

    return ret == -ENOENT ? 0 : ret;
}

/* ---- in parts ---- */

static int see_id(void *user, const char *path, const char *text, size_t len,
                  struct err *e)
{
    (void)e;
    if (strcmp(path, "InitiateMultipartUploadResult/UploadId") == 0)
        buf_add(user, text, len);
    return 0;
}

/* An id goes into journals, a line each. */
static bool is_id(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)text[i] <= ' ' || (unsigned char)text[i] >= 0x7f)
            return false;
    return len > 0 && len <= BUCKET_ID_MAX;
}

int bucket_create(struct bucket *b, const char *key, const char *tag, struct buf *id,
                  struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    struct ask a = {.method = "POST", .key = key, .query = "uploads=", .body = ""};
    size_t from = id->len;
    int ret;

    add_header(&a, tag_header, tag);
    ret = demand(b, &a, &answer, e);
    if (ret == 0)
        ret = xml_each(answer.body.data, answer.body.len, see_id, id, e);
    if (ret < 0)
        return err_wrap(e, "begin an upload");
    if (buf_failed(id))
        return err_nomem(e);
    if (id->len == from || !is_id(id->data + from, id->len - from))
        return err_set(e, EBADMSG, "%s/%s: an upload without an id", bucket_url(b),
                       key);
    return 0;
}

static void query_id(const char *id, struct buf *out)
{
    add_parameter(out, "uploadId", id);
}

int bucket_part(struct bucket *b, const char *key, const char *id, unsigned number,
                const void *data, size_t len, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(buf_release) struct buf query = {0};
    struct ask a = {.method = "PUT", .key = key, .body = data, .len = len};
    int ret;

    buf_addf(&query, "partNumber=%u", number);
    query_id(id, &query);
    if (buf_failed(&query))
        return err_nomem(e);
    a.query = query.data;
    add_md5(b, &a);
    ret = demand(b, &a, &answer, e);
    return ret < 0 ? err_wrap(e, "part %u", number) : 0;
}

static int take_part(struct page *p, const char *path, const char *text, struct err *e)
{
    if (strcmp(path, "NextPartNumberMarker") == 0)
        keep(&p->next, text);
    else if (strcmp(path, "Part/PartNumber") == 0)
        return keep_number(&p->number, text, e);
    else if (strcmp(path, "Part/ETag") == 0)
        keep(&p->etag, text);
    else if (strcmp(path, "Part/Size") == 0)
        return keep_number(&p->size, text, e);
    else if (strcmp(path, "Part") == 0 && p->etag.data) {
        const struct bucket_part part = {
            .number = (unsigned)p->number, .etag = p->etag.data, .size = p->size};

        p->ret = p->number > UINT32_MAX ? 0 : p->fn.part(p->fn_user, &part);
        return p->ret;
    }
    return 0;
}

static void query_parts(const struct page *p, void *user, struct buf *out)
{
    query_id(user, out);
    if (p->next.len)
        add_parameter(out, "part-number-marker", p->next.data);
}

int bucket_parts(struct bucket *b, const char *key, const char *id, bucket_part_fn *fn,
                 void *user, struct err *e)
{
    CLEANUP(page_release)
    struct page p = {.fn_user = user, .take = take_part, .fn.part = fn};
    CLEANUP_FREE char *text = strdup(id);

    return text ? each_page(b, key, &p, query_parts, text, e) : err_nomem(e);
}

/* An ETag stands in quotes, which XML may have as they are. */
static void add_part(struct buf *out, const struct bucket_part *p)
{
    buf_addf(out, "<Part><PartNumber>%u</PartNumber><ETag>", p->number);
    for (const char *c = p->etag; *c; c++)
        switch (*c) {
        case '&':
            buf_adds(out, "&amp;");
            break;
        case '<':
            buf_adds(out, "&lt;");
            break;
        case '"':
            buf_adds(out, "&quot;");
            break;
        default:
            buf_addc(out, *c);
        }
    buf_adds(out, "</ETag></Part>");
}

/*
 * The answer begins before the work is done: 200 may hold an error, and is then to be asked
 * again (API reference, "CompleteMultipartUpload").
 */
static int complete_once(struct bucket *b, struct ask *a, bool *again, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    int ret = demand(b, a, &answer, e);
    struct refusal r;

    *again = false;
    if (ret == 0) {
        r = refusal_of(&answer);
        if (!r.error)
            return 0;
        *again = strcmp(r.code, "InternalError") == 0 ||
                 strcmp(r.code, "SlowDown") == 0 ||
                 strcmp(r.code, "ServiceUnavailable") == 0;
        ret = refused(b, a, &answer, e);
        if (strcmp(r.code, "NoSuchUpload") == 0) {
            e->code = ENOENT;
            ret = -ENOENT;
        }
        return ret;
    }
    /* 409: another writer is at it now. */
    *again = answer.status == 409;
    if (a->headers && knows_no_condition(&answer)) {
        a->headers = 0;
        *again = true;
    }
    return ret;
}

int bucket_complete(struct bucket *b, const char *key, const char *id,
                    const struct bucket_part *part, size_t parts, bool absent,
                    struct err *e)
{
    CLEANUP(buf_release) struct buf body = {0}, query = {0};
    struct ask a = {.method = "POST", .key = key};
    bool again = true;
    int ret = -EIO;

    query_id(id, &query);
    buf_adds(&body, "<CompleteMultipartUpload "
                    "xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    for (size_t i = 0; i < parts; i++)
        add_part(&body, &part[i]);
    buf_adds(&body, "</CompleteMultipartUpload>");
    if (buf_failed(&body) || buf_failed(&query))
        return err_nomem(e);
    a.query = query.data;
    a.body = body.data;
    a.len = body.len;
    if (absent)
        add_header(&a, "If-None-Match", "*");
    for (unsigned i = 0; again && i < COMPLETE_TRIES; i++)
        ret = complete_once(b, &a, &again, e);
    return ret;
}

int bucket_abort(struct bucket *b, const char *key, const char *id, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(buf_release) struct buf query = {0};
    struct ask a = {.method = "DELETE", .key = key};
    int ret;

    query_id(id, &query);
    if (buf_failed(&query))
        return err_nomem(e);
    a.query = query.data;
    ret = demand(b, &a, &answer, e);
    return ret == -ENOENT ? 0 : ret;
}

static int take_upload(struct page *p, const char *path, const char *text,
                       struct err *e)
{
    if (strcmp(path, "NextKeyMarker") == 0)
        return keep_key(p, &p->next, text, e);
    if (strcmp(path, "NextUploadIdMarker") == 0)
        keep(&p->next_id, text);
    else if (strcmp(path, "Upload/Key") == 0)
        return keep_key(p, &p->key, text, e);
    else if (strcmp(path, "Upload/UploadId") == 0)
        keep(&p->id, text);
    else if (strcmp(path, "Upload") == 0 && p->key.data && p->id.data) {
        const struct bucket_upload u = {.key = p->key.data, .id = p->id.data};

        p->ret = p->fn.upload(p->fn_user, &u);
        return p->ret;
    }
    return 0;
}

static void query_uploads(const struct page *p, void *user, struct buf *out)
{
    add_parameter(out, "uploads", "");
    add_parameter(out, "encoding-type", "url");
    add_parameter(out, "prefix", user);
    if (p->next.len)
        add_parameter(out, "key-marker", p->next.data);
    if (p->next_id.len)
        add_parameter(out, "upload-id-marker", p->next_id.data);
}

int bucket_uploads(struct bucket *b, const char *prefix, bucket_upload_fn *fn,
                   void *user, struct err *e)
{
    CLEANUP(page_release)
    struct page p = {.fn_user = user, .take = take_upload, .fn.upload = fn};
    CLEANUP_FREE char *text = strdup(prefix);

    return text ? each_page(b, NULL, &p, query_uploads, text, e) : err_nomem(e);
}
