/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_facts.c - what a Megatron checkpoint tells of the job's layout. */
#include "index/formats/megatron/megatron.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/sink.h"

enum { MAX_DIGITS = 18 };

/* ---- names of cells ---- */

/* Numbers with dots between, up to `end`; false when it is anything else. */
static bool take_numbers(const char **p, const char *end, uint64_t *out, size_t *n)
{
    *n = 0;
    for (;;) {
        const char *start = *p;
        uint64_t v = 0;

        while (*p < end && isdigit((unsigned char)**p) && *p - start < MAX_DIGITS)
            v = v * 10 + (uint64_t)(*(*p)++ - '0');
        if (*p == start || *n == MEGATRON_MAX_GRID)
            return false;
        out[(*n)++] = v;
        if (*p == end || **p != '.')
            return true;
        (*p)++;
    }
}

bool megatron_cell(const char *name, size_t len, struct megatron_cell *out)
{
    static const char mark[] = "shard_";
    const char *slash = memrchr(name, '/', len), *end = name + len, *p;
    size_t sizes;

    *out = (struct megatron_cell){0};
    if (!slash || slash == name || (size_t)(end - slash) <= sizeof mark ||
        memcmp(slash + 1, mark, sizeof mark - 1) != 0)
        return false;
    out->key = (size_t)(slash - name);
    p = slash + sizeof mark;
    if (!take_numbers(&p, end, out->offset, &out->n) || p == end || *p++ != '_' ||
        !take_numbers(&p, end, out->size, &sizes) || p != end)
        return false;
    return sizes == out->n || (sizes + 1 == out->n && sizes > 0);
}

static void learn(uint64_t *fact, uint64_t value)
{
    if (*fact == 0)
        *fact = value;
}

/*
 * Random states have a cell for each pipeline and tensor rank (and data-parallel one, where
 * those differ), the state of the rerun machine one for each rank.
 */
void megatron_learn_cell(struct megatron_facts *f, const char *name, size_t len)
{
    struct megatron_cell cell;

    if (!megatron_cell(name, len, &cell))
        return;
    if (cell.key == 9 && memcmp(name, "rng_state", 9) == 0 && cell.n >= 2) {
        learn(&f->pipeline, cell.size[0]);
        learn(&f->tensor, cell.size[1]);
    } else if (cell.key == 25 && memcmp(name, "rerun_state_machine_state", 25) == 0) {
        learn(&f->world, cell.size[0]);
    }
}

/* ---- the common state ---- */

static const struct setting {
    const char *name;
    size_t offset;
} settings[] = {
    {"tensor_model_parallel_size", offsetof(struct megatron_facts, tensor)},
    {"pipeline_model_parallel_size", offsetof(struct megatron_facts, pipeline)},
    {"expert_model_parallel_size", offsetof(struct megatron_facts, expert)},
    {"context_parallel_size", offsetof(struct megatron_facts, context)},
    {"virtual_pipeline_model_parallel_size",
     offsetof(struct megatron_facts, virtual_pipeline)},
    {"data_parallel_size", offsetof(struct megatron_facts, data)},
    {"world_size", offsetof(struct megatron_facts, world)},
};

static uint64_t *fact_of(struct megatron_facts *f, const struct setting *s)
{
    return (uint64_t *)(void *)((char *)f + s->offset);
}

/* Longer than any real one, or empty: then it is not told. */
static void keep_model(const struct buf *model, char *dst, size_t size)
{
    if (!buf_failed(model) && strcmp(model->data, "{}") != 0)
        snprintf(dst, size, "%s", model->data);
}

/* argparse.Namespace, which is an opaque object there. */
static void learn_args(struct megatron_facts *f, const struct json *args)
{
    const struct json *state = json_get(args, "state");
    uint64_t v;
    CLEANUP(buf_release) struct buf model = {.max = sizeof f->model - 1};

    f->has_args = true;
    megatron_model_terms(state, &model);
    keep_model(&model, f->model, sizeof f->model);
    for (size_t i = 0; i < ARRAY_SIZE(settings); i++)
        if (json_u64(json_get(state, settings[i].name), &v))
            learn(fact_of(f, &settings[i]), v);
}

void megatron_learn_common(struct megatron_facts *f, const char *json, size_t len)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    const struct json *args, *content;
    struct err ignored = {0};
    const char *text;

    if (json_parse(json, len, &(struct json_limits){.depth = 512}, &doc, &ignored) < 0)
        return;
    args = json_get(doc, "args");
    content = json_get(doc, "content_metadata");
    if (args && json_kind(args) == JSON_OBJECT)
        learn_args(f, args);
    f->has_iteration = (json_i64(json_get(doc, "iteration"), &f->iteration) ||
                        json_i64(json_get(doc, "global_step"), &f->iteration)) &&
                       f->iteration >= 0;
    if (json_string(json_get(content, "distrib_optim_sharding_type"), &text))
        snprintf(f->optimizer, sizeof f->optimizer, "%s", text);
}

/* ---- run_config.yaml ---- */

/* "  NAME: VALUE" as PyYAML writes a member of a section. */
static void learn_line(struct megatron_facts *f, const char *line, size_t len,
                       struct buf *model)
{
    const char *colon = memchr(line, ':', len);
    size_t digits = 0, name;

    if (!colon || colon < line + 3 || memcmp(line, "  ", 2) != 0 || line[2] == ' ')
        return;
    name = (size_t)(colon - line) - 2;
    len -= name + 3;
    if (len > 1 && colon[1] == ' ')
        megatron_model_setting(line + 2, name, colon + 2, len - 1, model);
    while (digits < len - MIN(len, (size_t)1) && digits < MAX_DIGITS &&
           isdigit((unsigned char)colon[2 + digits]))
        digits++;
    if (digits == 0 || colon[1] != ' ' || digits + 1 != len)
        return;
    for (size_t i = 0; i < ARRAY_SIZE(settings); i++)
        if (strlen(settings[i].name) == name &&
            memcmp(line + 2, settings[i].name, name) == 0)
            learn(fact_of(f, &settings[i]), strtoull(colon + 2, NULL, 10));
}

/* Only what stands in `model:`: other sections have settings of the same names. */
void megatron_learn_config(struct megatron_facts *f, const char *text, size_t len)
{
    static const char section[] = "model:";
    CLEANUP(buf_release) struct buf model = {.max = sizeof f->settings - 1};
    bool inside = false;

    f->has_config = true;
    buf_addc(&model, '{');
    for (const char *line = text, *end = text + len, *next; line < end; line = next) {
        const char *nl = memchr(line, '\n', (size_t)(end - line));
        size_t n = (size_t)((nl ? nl : end) - line);

        next = nl ? nl + 1 : end;
        if (n > 0 && line[0] != ' ' && line[0] != '#')
            inside = n >= sizeof section - 1 &&
                     memcmp(line, section, sizeof section - 1) == 0;
        else if (inside)
            learn_line(f, line, n, &model);
    }
    buf_addc(&model, '}');
    keep_model(&model, f->settings, sizeof f->settings);
}

/* ---- the topology ---- */

static void add_fact(struct buf *out, const char *name, uint64_t value)
{
    if (value > 0)
        buf_addf(out, ", \"%s\": %" PRIu64, name, value);
}

/* Data-parallel ranks, where the others are told. */
static uint64_t data_parallel(const struct megatron_facts *f)
{
    uint64_t rest = f->world;
    const uint64_t others[] = {f->tensor, f->pipeline, f->context ? f->context : 1};

    if (f->data > 0)
        return f->data;
    for (size_t i = 0; i < ARRAY_SIZE(others); i++) {
        if (others[i] == 0 || rest % others[i] != 0)
            return 0;
        rest /= others[i];
    }
    return rest;
}

void megatron_topology(const struct megatron_facts *f, struct buf *out)
{
    add_fact(out, "world_size", f->world);
    add_fact(out, "tensor_parallel", f->tensor);
    add_fact(out, "pipeline_parallel", f->pipeline);
    add_fact(out, "virtual_pipeline", f->virtual_pipeline);
    add_fact(out, "context_parallel", f->context);
    add_fact(out, "expert_parallel", f->expert);
    add_fact(out, "data_parallel", data_parallel(f));
    if (f->optimizer[0]) {
        buf_adds(out, ", \"optimizer_sharding\": ");
        buf_add_json(out, f->optimizer, strlen(f->optimizer));
    }
    if (f->model[0])
        buf_addf(out, ", \"model\": %s", f->model);
}

const char *megatron_settings(const struct megatron_facts *f)
{
    return f->settings[0] ? f->settings : f->model[0] ? f->model : NULL;
}

/* ---- roles ---- */

/* Several optimizers may stand behind each other: "chained_1.optimizer.state..." */
int megatron_role(const char *key, size_t len)
{
    static const char chained[] = "chained_", optimizer[] = "optimizer.";
    size_t at = 0;

    if (len > sizeof chained && memcmp(key, chained, sizeof chained - 1) == 0) {
        at = sizeof chained - 1;
        while (at < len && isdigit((unsigned char)key[at]))
            at++;
        at += at < len && key[at] == '.';
    }
    return len - at > sizeof optimizer - 1 &&
                   memcmp(key + at, optimizer, sizeof optimizer - 1) == 0
               ? (int)ROLE_OPTIMIZER
               : -1;
}
