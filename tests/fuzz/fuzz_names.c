/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_names.c - any key gets a safe file name, and its own one. */
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "index/names.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds, const char *what, const struct buf *name)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, name->data);
        abort();
    }
}

static void check_safe(const struct buf *name)
{
    require(buf_failed(name) == 0, "memory", name);
    require(name->len >= 1 && name->len <= NAME_MAX_BYTES, "length", name);
    require(name->data[0] != '.', "leading dot", name);
    for (size_t i = 0; i < name->len;) {
        unsigned char c = (unsigned char)name->data[i];
        size_t n = utf8_char(name->data + i, name->len - i);

        require(c != '/' && c >= 0x20 && c != 0x7f, "a byte that must not be", name);
        require(n > 0, "no UTF-8", name);
        i += n;
    }
}

static int digit(char c)
{
    return c <= '9' ? c - '0' : c - 'A' + 10;
}

/* A name that was not cut gives its key back. */
static void check_reversible(const struct buf *name, const char *key, size_t len)
{
    size_t at = 0;

    if (strcmp(name->data, "%empty") == 0) {
        require(len == 0, "empty", name);
        return;
    }
    for (size_t i = 0; i < name->len; at++) {
        char c = name->data[i++];

        if (c == '%') {
            require(i + 2 <= name->len, "a cut escape", name);
            c = (char)(digit(name->data[i]) * 16 + digit(name->data[i + 1]));
            i += 2;
        }
        require(at < len && key[at] == c, "another key", name);
    }
    require(at == len, "a shorter key", name);
}

static bool is_cut(const struct buf *name)
{
    return name->len >= 252 && name->data[name->len - 17] == '~';
}

static void check_key(const char *key, size_t len)
{
    CLEANUP(buf_release) struct buf raw = {0}, npy = {0};

    name_of_key(key, len, "", &raw);
    check_safe(&raw);
    if (!is_cut(&raw))
        check_reversible(&raw, key, len);
    name_of_key(key, len, ".npy", &npy);
    check_safe(&npy);
    require(npy.len > 4 && strcmp(npy.data + npy.len - 4, ".npy") == 0, "suffix", &npy);
}

static void check_parts(const char *key, size_t len)
{
    size_t pos = 0, n, total = 0, count = 0;
    const char *part;

    while (key_part(key, len, &pos, &part, &n)) {
        CLEANUP(buf_release) struct buf dir = {0}, leaf = {0};

        name_of_part(part, n, false, &dir);
        check_safe(&dir);
        name_of_part(part, n, true, &leaf);
        check_safe(&leaf);
        require(strcmp(dir.data, leaf.data) != 0, "directory and file meet", &dir);
        require(!memchr(part, '.', n), "a dot in a part", &dir);
        total += n;
        count++;
    }
    if (count < 1 || total + count - 1 != len)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE char *key = malloc(size + 1); /* keys have a NUL behind them */

    if (!key)
        return 0;
    if (size > 0)
        memcpy(key, data, size);
    key[size] = '\0';
    check_key(key, size);
    check_parts(key, size);
    role_of(NULL, key, size);
    role_of(key, key, size);
    return 0;
}
