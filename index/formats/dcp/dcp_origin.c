/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_origin.c - which trainer saved a DCP checkpoint, and when. */
#include "index/formats/dcp/dcp_origin.h"

#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/names.h"

enum {
    SHORT = 64,      /* numbers and versions */
    LONG = 64 << 10, /* a whole dict: Composer's state.metadata takes about 2 KiB */
};

static void take_step(struct dcp_origin *o, const struct json *v)
{
    o->has_step = json_i64(v, &o->step);
}

static void take_epoch(struct dcp_origin *o, const struct json *v)
{
    o->has_epoch = json_i64(v, &o->epoch);
}

static void take_version(struct dcp_origin *o, const struct json *v)
{
    const char *text;

    if (json_string(v, &text))
        snprintf(o->version, sizeof o->version, "%s", text);
}

/* Before torch 2.4 a dict without tensors is one object (torch_dcp.md). */
static void take_timestamp(struct dcp_origin *o, const struct json *v)
{
    const struct json *when = json_get(v, "Timestamp");

    take_step(o, json_get(when, "batch"));
    take_epoch(o, json_get(when, "epoch"));
}

static void take_metadata(struct dcp_origin *o, const struct json *v)
{
    take_version(o, json_get(json_get(v, "composer_env_info"), "composer_version"));
}

static const struct mark {
    const char *key;
    bool prefix;
    const char *framework;
    void (*take)(struct dcp_origin *o, const struct json *v);
    size_t most; /* bytes of what it takes */
} marks[] = {
    {"train_state.step", false, "torchtitan", take_step, SHORT},
    {"train_state.ntokens_seen", false, "torchtitan", NULL, 0},
    {"train_state.global_avg_losses", false, "torchtitan", NULL, 0}, /* 2024 to 0.1 */
    {"dataloader.dp_rank_", true, "torchtitan", NULL, 0},
    /* prime-rl, whose folder step_5/trainer has no number. */
    {"app.progress.step", false, NULL, take_step, SHORT},
    {"state.timestamp.Timestamp.batch", false, "Composer", take_step, SHORT},
    {"state.timestamp.Timestamp.epoch", false, "Composer", take_epoch, SHORT},
    {"state.metadata.composer_env_info.composer_version", false, "Composer",
     take_version, SHORT},
    {"state.timestamp", false, "Composer", take_timestamp, LONG},
    {"state.metadata", false, "Composer", take_metadata, LONG},
    /* torch_dcp and fsdp_dtensor; "release" is a folder without a number. */
    {"checkpoint_version", false, "Megatron-LM", NULL, 0},
    {"iteration", false, NULL, take_step, SHORT},
};

static bool is_mark(const struct mark *m, const char *key, size_t len)
{
    size_t n = strlen(m->key);

    return (m->prefix ? len > n : len == n) && memcmp(key, m->key, n) == 0;
}

static void take(struct dcp_origin *o, const struct mark *m, const char *json,
                 size_t len)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err ignored = {0};

    if (m->take && len <= m->most && json_parse(json, len, NULL, &doc, &ignored) == 0)
        m->take(o, doc);
}

void dcp_origin_note(void *user, const char *key, size_t len, const char *json,
                     size_t json_len)
{
    struct dcp_origin *o = user;

    for (size_t i = 0; i < ARRAY_SIZE(marks); i++) {
        if (!is_mark(&marks[i], key, len))
            continue;
        if (marks[i].framework)
            o->framework = marks[i].framework;
        take(o, &marks[i], json, json_len);
        return;
    }
}

int dcp_origin_role(const char *key, size_t len)
{
    static const char rng[] = "rng_state.";

    return len > sizeof rng - 1 && memcmp(key, rng, sizeof rng - 1) == 0
               ? (int)ROLE_OTHER
               : -1;
}
