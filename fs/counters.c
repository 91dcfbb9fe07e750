/* SPDX-License-Identifier: MIT */
/* fs/counters.c - what a mount did so far, and its last error. */
#include "fs/counters.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/err.h"
#include "base/log.h"
#include "remote/block_cache.h"

enum { REPEAT_SECONDS = 5 };

static const char *const counter_names[COUNTERS] = {
    [COUNT_REQUESTS] = "requests",
    [COUNT_LOOKUPS] = "lookups",
    [COUNT_LISTED] = "names_listed",
    [COUNT_OPENS] = "opens",
    [COUNT_OPENS_PASSTHROUGH] = "opens_passthrough",
    [COUNT_READS] = "reads",
    [COUNT_BYTES_READ] = "bytes_read",
    [COUNT_REPLIES_MAPPED] = "replies_mapped",
    [COUNT_REPLIES_COPIED] = "replies_copied",
    [COUNT_REPLIES_EARLY] = "replies_early",
    [COUNT_GENERATIONS] = "generations",
    [COUNT_INVALIDATED] = "invalidated",
    [COUNT_MATERIALIZED] = "materialized",
    [COUNT_BYTES_MATERIALIZED] = "bytes_materialized",
    [COUNT_ERRORS] = "errors",
};

const char counters_on[] = "on";

static void remote_json(const struct counters_remote *r, struct buf *out)
{
    const struct block_cache_counts *b = r->blocks;
    const struct {
        const char *name;
        uint64_t value;
    } counts[] = {{"bytes_from_memory", b->from_memory},
                  {"bytes_from_disk", b->from_disk},
                  {"bytes_fetched", b->fetched},
                  {"bytes_kept", b->written},
                  {"bytes_not_kept", b->not_kept},
                  {"blocks_evicted", b->evicted},
                  {"sectors_damaged", b->damaged},
                  {"memory", b->memory},
                  {"retries", r->retries}};

    buf_adds(out, ", \"remote\": {");
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++)
        buf_addf(out, "%s\"%s\": %" PRIu64, i ? ", " : "", counts[i].name,
                 counts[i].value);
    buf_adds(out, "}");
}

int counters_json(const struct counters *c, const struct counters_remote *remote,
                  struct buf *out)
{
    const char *passthrough = c->passthrough, *materialize = c->materialize;

    buf_adds(out, "{\"schema\": 1");
    for (int i = 0; i < COUNTERS; i++)
        buf_addf(out, ", \"%s\": %" PRIuFAST64, counter_names[i],
                 atomic_load_explicit(&c->value[i], memory_order_relaxed));
    buf_addf(out, ", \"known_bytes\": %" PRIuFAST64,
             atomic_load_explicit(&c->known_bytes, memory_order_relaxed));
    buf_addf(out, ", \"passthrough\": \"%s\"", passthrough ? passthrough : "off");
    buf_addf(out, ", \"materialize\": \"%s\"", materialize ? materialize : "off");
    buf_addf(out, ", \"materialized_bytes\": %" PRIuFAST64,
             atomic_load_explicit(&c->materialized_bytes, memory_order_relaxed));
    if (remote)
        remote_json(remote, out);
    buf_adds(out, "}\n");
    return buf_failed(out);
}

void counters_log(const struct counters *c)
{
    CLEANUP(buf_release) struct buf text = {0};

    /* Asked for by the user, so it stands in the log at the usual level. */
    for (int i = 0; i < COUNTERS; i++)
        buf_addf(&text, " %s=%" PRIuFAST64, counter_names[i],
                 atomic_load_explicit(&c->value[i], memory_order_relaxed));
    if (buf_failed(&text) == 0)
        log_msg(LOG_FS, LOG_WARN, "counters:%s", text.data);
}

void last_error_init(struct last_error *l)
{
    memset(l, 0, sizeof *l);
    pthread_mutex_init(&l->lock, NULL);
}

void last_error_destroy(struct last_error *l)
{
    pthread_mutex_destroy(&l->lock);
}

/* Keeps the line; true when it is to be logged, with how many were left out before. */
static bool keep_line(struct last_error *l, const char *line, uint64_t *repeated)
{
    struct timespec t;
    bool same, log;

    clock_gettime(CLOCK_MONOTONIC, &t);
    pthread_mutex_lock(&l->lock);
    same = strncmp(l->text, line, strlen(line)) == 0;
    log = !same || t.tv_sec - l->logged_s >= REPEAT_SECONDS;
    *repeated = log ? l->repeated : 0;
    l->repeated = log ? 0 : l->repeated + 1;
    if (log)
        l->logged_s = t.tv_sec;
    snprintf(l->text, sizeof l->text, "%s\n", line);
    pthread_mutex_unlock(&l->lock);
    return log;
}

void last_error_report(struct last_error *l, const struct err *e)
{
    char line[sizeof l->text - 1];
    uint64_t repeated;

    err_line(e, line, sizeof line);
    if (!keep_line(l, line, &repeated))
        return;
    if (repeated)
        log_msg(LOG_FS, LOG_WARN, "%" PRIu64 " repetitions of errors were left out",
                repeated);
    log_err(LOG_FS, e);
}

int last_error_text(struct last_error *l, struct buf *out)
{
    pthread_mutex_lock(&l->lock);
    buf_adds(out, l->text);
    pthread_mutex_unlock(&l->lock);
    return buf_failed(out);
}
