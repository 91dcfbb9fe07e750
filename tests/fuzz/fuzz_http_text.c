/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_http_text.c - what servers say in words: redirections, dates, escaped names. */
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "remote/http_wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

/* Never to file: or another scheme, from https never to http, never with a password. */
static void try_redirection(const char *from, const char *location)
{
    CLEANUP_FREE char *url = wire_redirect(from, location);
    CLEANUP_FREE char *origin = NULL;
    bool secure = false, secrets = false;

    if (!url)
        return;
    require(strncmp(url, "https://", 8) == 0 ||
                (strncmp(url, "http://", 7) == 0 && strncmp(from, "http://", 7) == 0),
            url);
    origin = wire_origin(url, &secure, &secrets);
    require(origin && secure == (strncmp(url, "https://", 8) == 0), "its origin");
}

static void try_escapes(const char *text, size_t len)
{
    CLEANUP(buf_release) struct buf plain = {0};
    CLEANUP(buf_release) struct buf again = {0};
    CLEANUP(buf_release) struct buf back = {0};

    if (http_decode(text, len, &plain) < 0)
        return;
    buf_addc(&plain, '\0');
    require(strlen(plain.data) == plain.len - 1, "a NUL in a name");
    require(http_encode(plain.data, true, &again) == 0, "encode");
    if (again.len > 0)
        require(http_decode(again.data, again.len, &back) == 0 &&
                    back.len == plain.len - 1 &&
                    memcmp(back.data, plain.data, back.len) == 0,
                "escaped and back");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE char *text = malloc(size + 1);
    CLEANUP(buf_release) struct buf shown = {0};
    const char *at;

    if (!text)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    try_redirection("https://host.example/run/model.safetensors?X-Amz=1", text);
    try_redirection("http://127.0.0.1:8000/run/", text);
    try_escapes(text, size);
    (void)http_date(text);
    http_url_shown(text, &shown);
    at = shown.data ? strstr(shown.data, "://") : NULL;
    require(!at || !strchr(at, '?'), "a query that is shown");
    return 0;
}
