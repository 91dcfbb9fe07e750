/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_http_answer.c - a server's answer, headers and body, to requests of each kind. */
#include <stdio.h>
#include <string.h>

#include "remote/http_call.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { OFF = 16, LEN = 64, OBJECT = 1000, BODY_MAX = 512, HEAD_MAX = 256 };

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

/* As the wire hands it on: lines until an empty one. How many bytes these are. */
static size_t give_headers(struct wire_try *t, const char *data, size_t len)
{
    size_t at = 0;

    while (at < len) {
        const char *end = memchr(data + at, '\n', len - at);
        size_t n = end ? (size_t)(end - data) + 1 - at : len - at;

        if (wire_header_line(&t->head, data + at, n) < 0)
            t->end = WIRE_BROKEN;
        at += n;
        if (n <= 2 || t->end == WIRE_BROKEN)
            break;
    }
    return at;
}

static void give_body(struct wire_try *t, const char *data, size_t len)
{
    t->begun = true;
    if (!t->begin(t)) {
        t->end = WIRE_UNWANTED;
    } else if (len > t->room) {
        t->too_long = true;
        t->end = WIRE_UNWANTED;
    } else {
        require(!t->to || (t->room == LEN && t->got == 0), "room for another range");
        if (t->to)
            memcpy(t->to, data, len);
        else
            buf_add(&t->body, data, len);
        t->got = len;
    }
}

/* What counts as the range that was asked for, read once more by other means. */
static void check_range(const struct call *c)
{
    const char *range = wire_header(&c->a->headers, "Content-Range");
    unsigned first, last;

    require(c->t.got == LEN, "a part of the range");
    if (c->a->status == 206)
        require(range && sscanf(range + 6, "%u-%u/", &first, &last) == 2 &&
                    first == c->r->off && last == first + LEN - 1,
                "another range");
    else
        require(c->a->status == 200 && c->r->off == 0, "another status");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int statuses[] = {206, 200, 204, 301, 307, 400, 403,
                                   404, 412, 416, 429, 500, 503};
    struct http h = {.options = {.tries = 2, .deadline_s = 60},
                     .lock = PTHREAD_MUTEX_INITIALIZER};
    struct http_request r = {.url = "https://host.example/run/w", .what = "w"};
    struct http_answer a = {0};
    struct call c = {.h = &h, .r = &r, .a = &a, .tries = 1, .begun = http_clock()};
    unsigned char dst[LEN];
    size_t at;

    if (size < 2)
        return 0;
    r.dst = data[0] & 1 ? dst : NULL;
    r.off = data[0] & 2 ? OFF : 0;
    r.len = LEN;
    r.size = data[0] & 4 ? OBJECT : data[0] & 8 ? LEN : 0;
    r.etag = data[0] & 16 ? "\"v1\"" : NULL;
    r.modified = data[0] & 32 ? 784111777 : 0;
    r.max = BODY_MAX;
    r.method = data[0] & 64 ? "HEAD" : NULL;
    c.t = (struct wire_try){.begin = call_begin,
                            .status = statuses[data[1] % ARRAY_SIZE(statuses)],
                            .head.max = data[0] & 128 ? HEAD_MAX : WIRE_HEADERS_MAX};
    c.url = strdup(r.url);
    c.origin = strdup("https://host.example:443");
    c.deadline = c.begun + (int64_t)60 * 1000000000;
    at = give_headers(&c.t, (const char *)data + 2, size - 2);
    if (c.t.end == WIRE_DONE)
        give_body(&c.t, (const char *)data + 2 + at, size - 2 - at);
    if (c.url && c.origin)
        call_judge(&c);
    if (c.state == CALL_ENDED && c.rc == 0 && r.dst)
        check_range(&c);
    http_answer_release(&a);
    buf_release(&c.t.head);
    buf_release(&c.t.body);
    for (size_t i = 0; i < SKEWS; i++)
        free(h.skew[i].origin);
    free(c.url);
    free(c.origin);
    return 0;
}
