/* SPDX-License-Identifier: MIT */
/* remote/sigv4.c - AWS Signature Version 4 of a request, in its headers. */
#include "remote/sigv4.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "base/err.h"

/*
 * The steps are those of "Signature Version 4 signing process" (AWS IAM user guide), with
 * S3's rule that a path is not normalised.
 */

enum { HASH_SIZE = 32, MAX_PARTS = 256 };

static const char algorithm[] = "AWS4-HMAC-SHA256";

void sigv4_date(time_t now, char dst[SIGV4_DATE_SIZE])
{
    struct tm tm = {0};

    gmtime_r(&now, &tm);
    strftime(dst, SIGV4_DATE_SIZE, "%Y%m%dT%H%M%SZ", &tm);
}

static void to_hex(const unsigned char hash[HASH_SIZE], char hex[2 * HASH_SIZE + 1])
{
    static const char digits[] = "0123456789abcdef";

    for (size_t i = 0; i < HASH_SIZE; i++) {
        hex[2 * i] = digits[hash[i] >> 4];
        hex[2 * i + 1] = digits[hash[i] & 15];
    }
    hex[2 * HASH_SIZE] = '\0';
}

int sigv4_hash(const void *data, size_t len, char hex[65], struct err *e)
{
    unsigned char hash[HASH_SIZE];
    unsigned size = sizeof hash;

    if (EVP_Digest(data, len, hash, &size, EVP_sha256(), NULL) != 1)
        return err_set(e, EIO, "libcrypto has no SHA-256");
    to_hex(hash, hex);
    return 0;
}

/* ---- the canonical request ---- */

/* A parameter of the query, or a header. */
struct part {
    const char *name, *value;
    size_t name_len, value_len;
    size_t order; /* qsort(3) is not stable: values of one header keep their order */
};

static int compare_bytes(const char *a, size_t a_len, const char *b, size_t b_len)
{
    int d = memcmp(a, b, MIN(a_len, b_len));

    return d ? d : (a_len > b_len) - (a_len < b_len);
}

static int compare_parameters(const void *va, const void *vb)
{
    const struct part *a = va, *b = vb;
    int d = compare_bytes(a->name, a->name_len, b->name, b->name_len);

    return d ? d : compare_bytes(a->value, a->value_len, b->value, b->value_len);
}

static int compare_headers(const void *va, const void *vb)
{
    const struct part *a = va, *b = vb;
    int d = strcasecmp(a->name, b->name);

    return d ? d : (a->order > b->order) - (a->order < b->order);
}

static int too_many(struct err *e)
{
    return err_set(e, EINVAL, "more than %d parameters or headers to sign", MAX_PARTS);
}

static int add_query(struct buf *dst, const char *query, struct err *e)
{
    struct part parts[MAX_PARTS];
    size_t n = 0;

    for (const char *p = query ? query : ""; *p;) {
        size_t len = strcspn(p, "&"), name = MIN(strcspn(p, "="), len);

        if (n == MAX_PARTS)
            return too_many(e);
        if (len)
            parts[n++] = (struct part){.name = p,
                                       .name_len = name,
                                       .value = p + MIN(name + 1, len),
                                       .value_len = len - MIN(name + 1, len)};
        p += len + (p[len] == '&');
    }
    qsort(parts, n, sizeof parts[0], compare_parameters);
    for (size_t i = 0; i < n; i++) {
        buf_adds(dst, i ? "&" : "");
        buf_add(dst, parts[i].name, parts[i].name_len);
        buf_addc(dst, '=');
        buf_add(dst, parts[i].value, parts[i].value_len);
    }
    return 0;
}

static void add_lower(struct buf *dst, const char *name)
{
    for (; *name; name++)
        buf_addc(dst, *name >= 'A' && *name <= 'Z' ? (char)(*name + 32) : *name);
}

/* Without blanks at both ends, and runs of them as one. */
static void add_trimmed(struct buf *dst, const char *value)
{
    bool gap = false, any = false;

    for (; *value; value++) {
        if (strchr(" \t\r\n", *value)) {
            gap = any;
            continue;
        }
        buf_adds(dst, gap ? " " : "");
        buf_addc(dst, *value);
        gap = false;
        any = true;
    }
}

static int add_headers(struct buf *dst, struct buf *names,
                       const struct sigv4_request *r, struct err *e)
{
    struct part parts[MAX_PARTS];
    bool host = false;

    if (r->nheaders > MAX_PARTS)
        return too_many(e);
    for (size_t i = 0; i < r->nheaders; i++) {
        host = host || strcasecmp(r->headers[i].name, "host") == 0;
        parts[i] = (struct part){
            .name = r->headers[i].name, .value = r->headers[i].value, .order = i};
    }
    if (!host)
        return err_set(e, EINVAL, "a request without a host cannot be signed");
    qsort(parts, r->nheaders, sizeof parts[0], compare_headers);
    for (size_t i = 0; i < r->nheaders; i++) {
        bool again = i > 0 && strcasecmp(parts[i - 1].name, parts[i].name) == 0;

        if (!again) {
            buf_adds(names, i ? ";" : "");
            buf_adds(dst, i ? "\n" : "");
            add_lower(names, parts[i].name);
            add_lower(dst, parts[i].name);
        }
        buf_addc(dst, again ? ',' : ':');
        add_trimmed(dst, parts[i].value);
    }
    buf_addc(dst, '\n');
    return 0;
}

int sigv4_canonical(const struct sigv4_request *r, struct buf *dst,
                    struct buf *signed_headers, struct err *e)
{
    buf_addf(dst, "%s\n%s\n", r->method, r->path);
    TRY(add_query(dst, r->query, e));
    buf_addc(dst, '\n');
    TRY(add_headers(dst, signed_headers, r, e));
    buf_addc(dst, '\n');
    buf_add(dst, signed_headers->data ? signed_headers->data : "", signed_headers->len);
    buf_addf(dst, "\n%s", r->payload_hash);
    if (buf_failed(dst) || buf_failed(signed_headers))
        return err_nomem(e);
    return 0;
}

/* ---- the signature ---- */

/* One link of the chain of keys; `key` and `out` may be the same. */
static bool hmac(const void *key, size_t key_len, const char *text, size_t len,
                 unsigned char out[HASH_SIZE])
{
    unsigned char result[EVP_MAX_MD_SIZE];
    unsigned size = 0;

    if (!HMAC(EVP_sha256(), key, (int)key_len, (const unsigned char *)text, len, result,
              &size) ||
        size != HASH_SIZE)
        return false;
    memcpy(out, result, HASH_SIZE);
    OPENSSL_cleanse(result, sizeof result);
    return true;
}

/* Of the key "AWS4" + secret: the day's, the region's, the service's, the last one. */
static int signing_key(const struct sigv4_scope *s, unsigned char key[HASH_SIZE],
                       struct err *e)
{
    CLEANUP(buf_release) struct buf first = {0};
    bool ok;

    if (buf_addf(&first, "AWS4%s", s->secret) < 0)
        return err_nomem(e);
    ok = hmac(first.data, first.len, s->date, 8, key) &&
         hmac(key, HASH_SIZE, s->region, strlen(s->region), key) &&
         hmac(key, HASH_SIZE, s->service, strlen(s->service), key) &&
         hmac(key, HASH_SIZE, "aws4_request", strlen("aws4_request"), key);
    OPENSSL_cleanse(first.data, first.len);
    return ok ? 0 : err_set(e, EIO, "libcrypto has no HMAC with SHA-256");
}

static int add_scope(struct buf *dst, const struct sigv4_scope *s)
{
    return buf_addf(dst, "%.8s/%s/%s/aws4_request", s->date, s->region, s->service);
}

int sigv4_sign(const struct sigv4_scope *s, const struct sigv4_request *request,
               struct buf *dst, struct err *e)
{
    CLEANUP(buf_release) struct buf canonical = {0};
    CLEANUP(buf_release) struct buf names = {0};
    CLEANUP(buf_release) struct buf text = {0};
    unsigned char key[HASH_SIZE];
    char hex[2 * HASH_SIZE + 1];

    if (strlen(s->date) + 1 != SIGV4_DATE_SIZE)
        return err_set(e, EINVAL, "%s is no date to sign with", s->date);
    TRY(sigv4_canonical(request, &canonical, &names, e));
    TRY(sigv4_hash(canonical.data, canonical.len, hex, e));
    TRY(signing_key(s, key, e));
    buf_addf(&text, "%s\n%s\n", algorithm, s->date);
    add_scope(&text, s);
    if (buf_addf(&text, "\n%s", hex) < 0)
        return err_nomem(e);
    if (!hmac(key, sizeof key, text.data, text.len, key))
        return err_set(e, EIO, "libcrypto has no HMAC with SHA-256");
    to_hex(key, hex);
    OPENSSL_cleanse(key, sizeof key);
    buf_addf(dst, "%s Credential=%s/", algorithm, s->key_id);
    add_scope(dst, s);
    buf_addf(dst, ", SignedHeaders=%s, Signature=%s", names.data, hex);
    return buf_failed(dst) ? err_nomem(e) : 0;
}
