/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_key.c - keys of classic OLMo's safetensors: paths as base64 pickles. */
#include "index/formats/olmo/olmo_key.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/endian.h"
#include "base/err.h"
#include "index/formats/pickle/pickle.h"
#include "index/formats/hf/safetensors_header.h"
#include "remote/source.h"

enum { MAX_KEY = 1 << 16 };

/* ---- base64url ---- */

static int digit(char c)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                 "0123456789-_";
    const char *at = c ? strchr(digits, c) : NULL;

    return at ? (int)(at - digits) : -1;
}

/* Whole groups of four, the last one padded by '='; no blanks, no other alphabet. */
static bool decode_base64(const char *text, size_t len, struct buf *out)
{
    size_t pad = 0;

    if (len == 0 || len % 4 != 0)
        return false;
    while (pad < 2 && text[len - 1 - pad] == '=')
        pad++;
    for (size_t i = 0; i < len; i += 4) {
        size_t keep = i + 4 == len ? 3 - pad : 3;
        uint32_t group = 0;

        for (size_t k = 0; k < 4; k++) {
            int d = i + k >= len - pad ? 0 : digit(text[i + k]);

            if (d < 0)
                return false;
            group = group << 6 | (uint32_t)d;
        }
        for (size_t k = 0; k < keep; k++)
            buf_addc(out, (char)(group >> (16 - 8 * k)));
    }
    return buf_failed(out) == 0;
}

/* ---- the pickle ---- */

static int add_part(struct buf *key, const struct pv *part)
{
    size_t len;
    const char *text;

    if (part->kind == PV_INT)
        return buf_addf(key, "%" PRId64, part->i);
    if (part->kind != PV_STR)
        return -EBADMSG;
    text = pv_bytes(part, &len);
    return buf_add(key, text, len);
}

static int take_path(const struct pv *root, struct buf *key, bool *pickled)
{
    struct pv path, flag;

    if (root->kind != PV_TUPLE || pv_count(root) != 2)
        return -EBADMSG;
    path = pv_at(root, 0);
    flag = pv_at(root, 1);
    if (path.kind != PV_TUPLE || pv_count(&path) == 0 || flag.kind != PV_BOOL)
        return -EBADMSG;
    for (size_t i = 0; i < pv_count(&path); i++) {
        struct pv part = pv_at(&path, i);
        int rc = i > 0 ? buf_addc(key, '.') : 0;

        if (rc == 0)
            rc = add_part(key, &part);
        if (rc < 0)
            return rc;
    }
    *pickled = flag.b;
    return 0;
}

int olmo_key_decode(const char *text, size_t len, struct buf *key, bool *pickled,
                    struct err *e)
{
    CLEANUP(buf_release) struct buf bytes = {.max = MAX_KEY};
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    uint64_t used = 0;
    struct pv root;
    int rc;

    if (!decode_base64(text, len, &bytes))
        return err_set(e, EBADMSG, "a key that is no base64 as OLMo writes it");
    TRY(source_from_memory(bytes.data, bytes.len, false, "key", &src, e));
    TRY(pickle_load(src, 0, bytes.len, NULL, &p, &used, e));
    root = pickle_root(p);
    rc = used == bytes.len ? take_path(&root, key, pickled) : -EBADMSG;
    if (rc == -EBADMSG)
        return err_set(e, EBADMSG, "a key that is no pickled path");
    return rc < 0 ? err_nomem(e) : 0;
}

/* ---- bids ---- */

const char *olmo_first_key(const char *head, size_t len, size_t *key_len)
{
    static const char mark[] = "__metadata__";
    const char *s = head + SAFETENSORS_PREFIX, *end = head + len, *close;

    if (len <= SAFETENSORS_PREFIX || *s != '{')
        return NULL;
    while (++s < end) {
        s = memchr(s, '"', (size_t)(end - s));
        close = s ? memchr(s + 1, '"', (size_t)(end - s - 1)) : NULL;
        if (!close)
            return NULL;
        *key_len = (size_t)(close - s - 1);
        if (*key_len != sizeof mark - 1 || memcmp(s + 1, mark, *key_len) != 0)
            return s + 1;
        s = memchr(close, '}', (size_t)(end - close)); /* its strings hold none */
        if (!s)
            return NULL;
    }
    return NULL;
}

/* PROTO 2, EMPTY_DICT, BINPUT 0, MARK if there are more, BINUNICODE with its length. */
const char *olmo_first_torch_key(const char *head, size_t len, size_t *key_len)
{
    static const char start[] = {'\x80', 2, '}', 'q', 0};
    const char *s = memmem(head, len, start, sizeof start), *end = head + len;

    if (!s)
        return NULL;
    s += sizeof start;
    if (s < end && *s == '(')
        s++;
    if (end - s < 5 || *s != 'X')
        return NULL;
    *key_len = get_le32(s + 1);
    s += 5;
    return *key_len <= (size_t)(end - s) ? s : NULL;
}
