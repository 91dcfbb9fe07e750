/* SPDX-License-Identifier: MIT */
/* remote/customer_key.c - the key of the user's own under which a store encrypts objects. */
#include "remote/customer_key.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"

enum {
    KEY_BYTES = 32,                       /* AES-256 */
    TEXT_BYTES = (KEY_BYTES + 2) / 3 * 4, /* in base64 */
    FILE_MAX = 64,
};

static const char variable[] = "UNSHARD_CUSTOMER_KEY";

struct customer_key {
    bool google;
    char key[TEXT_BYTES + 1], sum[TEXT_BYTES + 1]; /* base64; of MD5 or SHA-256 */
};

/* Exactly one key out of what the file holds, blanks at its end aside. */
static bool take_key(const unsigned char *text, size_t len,
                     unsigned char key[KEY_BYTES])
{
    unsigned char plain[TEXT_BYTES];

    if (len == KEY_BYTES) {
        memcpy(key, text, KEY_BYTES);
        return true;
    }
    while (len && strchr(" \t\r\n", text[len - 1]))
        len--;
    if (len != TEXT_BYTES || text[len - 1] != '=' || text[len - 2] == '=' ||
        EVP_DecodeBlock(plain, text, TEXT_BYTES) != KEY_BYTES + 1)
        return false;
    memcpy(key, plain, KEY_BYTES);
    explicit_bzero(plain, sizeof plain);
    return true;
}

static int read_key(const char *path, unsigned char key[KEY_BYTES], struct err *e)
{
    CLEANUP_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
    unsigned char text[FILE_MAX];
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text);
    bool taken;

    if (n < 0)
        return err_set(e, errno, "%s=%s: %s", variable, path, strerror(errno));
    taken = take_key(text, (size_t)n, key);
    explicit_bzero(text, sizeof text);
    if (taken)
        return 0;
    err_set(e, EBADMSG, "%s=%s: is no key", variable, path);
    return err_hint(e, "a file of 32 bytes, or of their base64");
}

static int describe(struct customer_key *k, const unsigned char key[KEY_BYTES],
                    struct err *e)
{
    unsigned char sum[EVP_MAX_MD_SIZE];
    unsigned n = 0;

    if (EVP_Digest(key, KEY_BYTES, sum, &n, k->google ? EVP_sha256() : EVP_md5(),
                   NULL) != 1 ||
        n > KEY_BYTES)
        return err_set(e, EIO, "%s: libcrypto has no sum for it", variable);
    EVP_EncodeBlock((unsigned char *)k->key, key, KEY_BYTES);
    EVP_EncodeBlock((unsigned char *)k->sum, sum, (int)n);
    return 0;
}

int customer_key_load(bool google, struct customer_key **out, struct err *e)
{
    const char *path = getenv(variable);
    unsigned char key[KEY_BYTES];
    struct customer_key *k;
    int rc;

    *out = NULL;
    if (!path || !path[0])
        return 0;
    TRY(read_key(path, key, e));
    k = calloc(1, sizeof *k);
    if (k)
        k->google = google;
    rc = k ? describe(k, key, e) : err_nomem(e);
    explicit_bzero(key, sizeof key);
    if (rc < 0) {
        customer_key_free(k);
        return rc;
    }
    *out = k;
    return 0;
}

void customer_key_free(struct customer_key *k)
{
    if (k)
        explicit_bzero(k, sizeof *k);
    free(k);
}

size_t customer_key_headers(const struct customer_key *k,
                            struct sigv4_header dst[CUSTOMER_KEY_HEADERS])
{
    if (!k)
        return 0;
    dst[0] = (struct sigv4_header){
        k->google ? "x-goog-encryption-algorithm"
                  : "x-amz-server-side-encryption-customer-algorithm",
        "AES256"};
    dst[1] =
        (struct sigv4_header){k->google ? "x-goog-encryption-key"
                                        : "x-amz-server-side-encryption-customer-key",
                              k->key};
    dst[2] = (struct sigv4_header){
        k->google ? "x-goog-encryption-key-sha256"
                  : "x-amz-server-side-encryption-customer-key-MD5",
        k->sum};
    return CUSTOMER_KEY_HEADERS;
}
