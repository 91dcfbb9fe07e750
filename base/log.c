/* SPDX-License-Identifier: MIT */
/* base/log.c - areas and levels, one line an event, on stderr or syslog-like sinks. */
#include "base/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/err.h"
#include "base/utf8.h"

enum {
    TEXT_MAX = 2048,
    LINE_MAX_BYTES = 4096 /* PIPE_BUF: lines never mix in a pipe */
};

static const char *const level_names[] = {"error", "warn", "info", "debug"};
static const char *const area_names[] = {"base", "remote", "index", "format",
                                         "gpu",  "fs",     "cli"};

/* The one piece of state without an owner: any code may have something to say. */
static _Atomic unsigned char levels[ARRAY_SIZE(area_names)] = {
    LOG_WARN, LOG_WARN, LOG_WARN, LOG_WARN, LOG_WARN, LOG_WARN, LOG_WARN};
static atomic_int sink = 2;

/* Index of the name that is text[0..len), or -1. */
static int find_name(const char *const *names, size_t count, const char *text,
                     size_t len)
{
    for (size_t i = 0; i < count; i++)
        if (strlen(names[i]) == len && memcmp(names[i], text, len) == 0)
            return (int)i;
    return -1;
}

/* One "area:level" or "level". */
static bool configure_item(const char *item, size_t len)
{
    const char *colon = memchr(item, ':', len);
    size_t area_len = colon ? (size_t)(colon - item) : 0,
           skip = colon ? area_len + 1 : 0;
    int level =
        find_name(level_names, ARRAY_SIZE(level_names), item + skip, len - skip);
    int area = find_name(area_names, ARRAY_SIZE(area_names), item, area_len);

    if (level < 0 || (colon && area < 0))
        return false;
    for (int i = 0; i < (int)ARRAY_SIZE(area_names); i++)
        if (!colon || i == area)
            atomic_store(&levels[i], (unsigned char)level);
    return true;
}

bool log_configure(const char *spec)
{
    bool good = true;

    while (spec && *spec) {
        size_t len = strcspn(spec, ",");

        good = configure_item(spec, len) && good;
        spec += len;
        spec += *spec == ',';
    }
    return good;
}

void log_to(int fd)
{
    atomic_store(&sink, fd);
}

bool log_enabled(enum log_area area, enum log_level level)
{
    return (unsigned)level <= atomic_load_explicit(&levels[area], memory_order_relaxed);
}

/* One write(2), so that lines of several threads and processes do not mix. */
static void write_line(enum log_area area, enum log_level level, const char *text)
{
    char line[LINE_MAX_BYTES];
    int saved = errno;
    size_t len = (size_t)snprintf(
        line, sizeof line, "unshard: %s %s: ", area_names[area], level_names[level]);

    len += text_escape(line + len, sizeof line - len - 1, text);
    line[len++] = '\n';
    while (write(atomic_load(&sink), line, len) < 0 && errno == EINTR)
        ;
    errno = saved;
}

void log_msg(enum log_area area, enum log_level level, const char *fmt, ...)
{
    char text[TEXT_MAX];
    va_list args;

    if (!log_enabled(area, level))
        return;
    va_start(args, fmt);
    if (vsnprintf(text, sizeof text, fmt, args) < 0)
        snprintf(text, sizeof text, "%s", fmt);
    va_end(args);
    write_line(area, level, text);
}

/* ---- errors of one cause ---- */

enum {
    CAUSES = 16,       /* that are remembered */
    SHOWN = 3,         /* of each */
    QUIET_SECONDS = 60 /* then it is a new one */
};

static pthread_mutex_t causes_lock = PTHREAD_MUTEX_INITIALIZER;
static struct cause {
    uint64_t hash, count;
    time_t last;
} causes[CAUSES]; /* guarded by causes_lock */

/* FNV-1a; the same for texts that differ in offsets and sizes, not in names. */
static uint64_t hash_cause(const char *text)
{
    uint64_t h = 14695981039346656037u;
    char before = ' ';

    for (; *text; before = *text++) {
        if (before == ' ' || before == '+')
            text += strspn(text, "0123456789");
        h = (h ^ (unsigned char)*text) * 1099511628211u;
        if (!*text)
            break;
    }
    return h;
}

/* How often the cause was met, with this time. */
static uint64_t count_cause(const char *text)
{
    uint64_t hash = hash_cause(text), count;
    struct cause *c = &causes[0];
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&causes_lock);
    for (size_t i = 0; i < CAUSES && c->hash != hash; i++)
        if (causes[i].hash == hash || causes[i].last < c->last)
            c = &causes[i];
    if (c->hash != hash || now.tv_sec - c->last > QUIET_SECONDS)
        *c = (struct cause){.hash = hash};
    c->last = now.tv_sec;
    count = ++c->count;
    pthread_mutex_unlock(&causes_lock);
    return count;
}

static bool is_power_of_ten(uint64_t n)
{
    while (n >= 10 && n % 10 == 0)
        n /= 10;
    return n == 1;
}

void log_err(enum log_area area, const struct err *e)
{
    char line[LINE_MAX_BYTES], counted[LINE_MAX_BYTES + 64];
    uint64_t n;

    if (!log_enabled(area, LOG_ERROR))
        return;
    n = log_enabled(area, LOG_INFO) ? 1 : count_cause(err_cause(e));
    err_line(e, line, sizeof line);
    if (n <= SHOWN) {
        write_line(area, LOG_ERROR, line);
    } else if (is_power_of_ten(n)) {
        snprintf(counted, sizeof counted,
                 "%" PRIu64 " errors of one cause, the last: %s", n, line);
        write_line(area, LOG_ERROR, counted);
    }
}
