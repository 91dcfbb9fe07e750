/* SPDX-License-Identifier: MIT */
/* index/formats/fairscale/fairscale_part.c - what the shards of a model part hold, under its keys. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/keyset.h"
#include "index/formats/fairscale/fairscale_priv.h"

static const char OPTIMIZER[] = "last_optimizer_state";

/* ---- keys ---- */

/*
 * One part: NAME, and NAME.STATE of the part last_optimizer_state. Of several, each is
 * shown as it is, "model_part-1:model:NAME", beside the whole.
 */
struct key {
    struct buf text;
    struct sink_tensor t;
};

static void key_release(struct key *k)
{
    buf_release(&k->text);
}

static int key_set(struct key *k, const struct fairscale *f,
                   const struct model_part *part, bool optimizer, const char *name,
                   size_t len, const char *state, struct err *e)
{
    buf_clear(&k->text);
    if (f->parts > 1)
        buf_addf(&k->text, "model_part-%" PRIu32 ":%s:", part->number,
                 optimizer ? OPTIMIZER : "model");
    buf_add(&k->text, name, len);
    if (state)
        buf_addf(&k->text, ".%s", state);
    if (buf_failed(&k->text))
        return err_nomem(e);
    k->t = (struct sink_tensor){
        .key = k->text.data,
        .key_len = k->text.len,
        .part = f->parts == 1 && optimizer ? OPTIMIZER : NULL,
        .role = f->parts > 1 ? ROLE_OTHER
                : optimizer  ? ROLE_OPTIMIZER
                             : ROLE_MODEL,
    };
    return 0;
}

/* Two of one name: the first one stands. */
static int once(int r, struct err *e)
{
    if (r != -EEXIST)
        return r;
    *e = (struct err){0};
    return 0;
}

/* ---- the model ---- */

/* Each rank has an expert of its own: all of them, as the files have them. */
static int report_own(struct fairscale *f, struct model_part *part, size_t p,
                      struct err *e)
{
    const struct flat_param *param = &part->meta.param[p];
    CLEANUP(buf_release) struct buf key = {0};

    f->own += param->members;
    for (uint32_t s = 0; s < part->shards; s++) {
        struct flat_tensor flat;

        flat_tensor_own(part, p, s, &flat);
        for (size_t i = 0; i < param->members; i++) {
            const struct flat_member *m = &param->member[i];
            struct sink_tensor t = {.role = ROLE_OTHER};

            buf_clear(&key);
            buf_addf(&key, "%s:model.", part->file[s].file.path);
            buf_add(&key, m->name, m->len);
            if (buf_failed(&key))
                return err_nomem(e);
            t.key = key.data;
            t.key_len = key.len;
            TRY(flat_member_report(f->sink, &flat, m, &t, e));
        }
    }
    return 0;
}

static int report_param(struct fairscale *f, struct model_part *part, size_t p,
                        struct err *e)
{
    const struct flat_param *param = &part->meta.param[p];
    CLEANUP(key_release) struct key k = {0};
    struct flat_tensor flat;

    if (param->own && part->shards > 1)
        return report_own(f, part, p, e);
    flat_tensor_find(part, p, false, param->key, param->key_len, &flat);
    for (size_t i = 0; i < param->members; i++) {
        const struct flat_member *m = &param->member[i];

        TRY(key_set(&k, f, part, false, m->name, m->len, NULL, e));
        TRY(once(flat_member_report(f->sink, &flat, m, &k.t, e), e));
    }
    return 0;
}

/* A tensor that every rank has whole; none of them: nothing is reported. */
static int report_same(struct fairscale *f, struct model_part *part, const char *stored,
                       size_t stored_len, const char *name, size_t len, struct err *e)
{
    struct rank_part *same = calloc(part->shards, sizeof *same);
    CLEANUP(key_release) struct key k = {0};
    bool any = false;
    int r = same ? 0 : err_nomem(e);

    for (uint32_t s = 0; r == 0 && s < part->shards; s++) {
        same[s] = rank_file_part(&part->file[s], stored, stored_len);
        any |= same[s].x != NULL;
    }
    if (r == 0 && any)
        r = key_set(&k, f, part, false, name, len, NULL, e);
    if (r == 0 && any)
        r = once(rank_merge(f->sink, RANK_SAME, same, part->shards, &k.t, e), e);
    free(same);
    return r;
}

/* The second name of a parameter (or buffer): the same bytes. */
static int report_alias(struct fairscale *f, struct model_part *part,
                        const struct flat_alias *x, struct err *e)
{
    const struct flat_member *m =
        fairscale_member(&part->meta, x->stored, x->stored_len);
    CLEANUP(key_release) struct key k = {0};
    const struct flat_param *param;
    struct flat_tensor flat;

    if (!m)
        return report_same(f, part, x->stored, x->stored_len, x->alias, x->alias_len,
                           e);
    param = &part->meta.param[m->param];
    if (param->own && part->shards > 1)
        return 0; /* told with those of the ranks */
    flat_tensor_find(part, m->param, false, param->key, param->key_len, &flat);
    TRY(key_set(&k, f, part, false, x->alias, x->alias_len, NULL, e));
    return once(flat_member_report(f->sink, &flat, m, &k.t, e), e);
}

/* Names of the model's entries that shard_metadata tells of. */
static int known_names(const struct fairscale_metadata *m, struct keyset *out,
                       struct err *e)
{
    for (size_t p = 0; p < m->params; p++)
        if (keyset_add(out, m->param[p].key, m->param[p].key_len) < 0)
            return err_nomem(e);
    for (size_t i = 0; i < m->buffers; i++)
        if (keyset_add(out, m->buffer[i].name, m->buffer[i].len) < 0)
            return err_nomem(e);
    return 0;
}

static int report_raw(struct fairscale *f, const struct rank_file *file,
                      const char *entry, const struct rank_tensor *x, enum role role,
                      struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    const struct rank_part one = {.file = &file->file, .x = x};
    struct sink_tensor t = {.role = role};

    buf_addf(&key, "%s:%s.", file->file.path, entry);
    buf_add(&key, x->name, x->len);
    if (buf_failed(&key))
        return err_nomem(e);
    t.key = key.data;
    t.key_len = key.len;
    f->raw++;
    return rank_report_alone(f->sink, &one, &t, e);
}

/* What shard_metadata does not tell of. */
static int report_others(struct fairscale *f, struct model_part *part, struct err *e)
{
    CLEANUP(keyset_release) struct keyset known = {0};

    TRY(known_names(&part->meta, &known, e));
    for (uint32_t s = 0; s < part->shards; s++) {
        const struct rank_tensors *t = &part->file[s].tensors;

        for (size_t i = 0; i < t->count; i++)
            if (!keyset_has(&known, t->tensor[i].name, t->tensor[i].len))
                TRY(report_raw(f, &part->file[s], "model", &t->tensor[i], ROLE_OTHER,
                               e));
    }
    return 0;
}

static int report_model(struct fairscale *f, struct model_part *part, struct err *e)
{
    const struct fairscale_metadata *m = &part->meta;

    for (size_t p = 0; p < m->params; p++)
        TRY(report_param(f, part, p, e));
    for (size_t i = 0; i < m->aliases; i++)
        TRY(report_alias(f, part, &m->alias[i], e));
    for (size_t i = 0; i < m->buffers; i++)
        TRY(report_same(f, part, m->buffer[i].name, m->buffer[i].len, m->buffer[i].name,
                        m->buffer[i].len, e));
    return report_others(f, part, e);
}

/* ---- the optimizer ---- */

bool fairscale_state_name(const struct rank_tensor *x, uint64_t *number,
                          const char **rest)
{
    static const char prefix[] = "state.";
    size_t n = sizeof prefix - 1, at = n;

    if (x->len <= n || memcmp(x->name, prefix, n) != 0)
        return false;
    for (*number = 0; at < x->len && isdigit((unsigned char)x->name[at]) && at < n + 9;)
        *number = *number * 10 + (uint64_t)(x->name[at++] - '0');
    if (at == n || at + 1 >= x->len || x->name[at] != '.')
        return false;
    *rest = x->name + at + 1;
    return true;
}

/* As long as the flat parameter of its number, on every rank that has it; one does. */
static bool is_flat_state(const struct model_part *part, size_t p,
                          const struct rank_tensor *x)
{
    const struct flat_param *param = &part->meta.param[p];
    bool any = false;

    for (uint32_t s = 0; s < part->shards; s++) {
        const struct rank_tensor *w =
            rank_tensors_find(&part->file[s].tensors, param->key, param->key_len);
        const struct rank_tensor *y =
            rank_tensors_find(&part->shard[s].optim, x->name, x->len);

        if (y && !y->why && (!w || w->nd != 1 || y->nd != 1 || w->dim[0] != y->dim[0]))
            return false;
        any |= y && !y->why;
    }
    return any;
}

static int report_flat_state(struct fairscale *f, struct model_part *part, size_t p,
                             const struct rank_tensor *x, const char *state,
                             struct err *e)
{
    const struct flat_param *param = &part->meta.param[p];
    CLEANUP(key_release) struct key k = {0};
    struct flat_tensor flat;

    flat_tensor_find(part, p, true, x->name, x->len, &flat);
    for (size_t i = 0; i < param->members; i++) {
        const struct flat_member *m = &param->member[i];

        TRY(key_set(&k, f, part, true, m->name, m->len, state, e));
        TRY(once(flat_member_report(f->sink, &flat, m, &k.t, e), e));
    }
    return 0;
}

/* A number of a flat parameter ("step"), which stands for all of its members. */
static int report_scalar(struct fairscale *f, struct model_part *part,
                         const struct rank_tensor *x, struct err *e)
{
    struct rank_part *same = calloc(part->shards, sizeof *same);
    CLEANUP(key_release) struct key k = {0};
    int r = same ? 0 : err_nomem(e);

    for (uint32_t s = 0; r == 0 && s < part->shards; s++) {
        same[s] = (struct rank_part){
            .file = &part->file[s].file,
            .x = rank_tensors_find(&part->shard[s].optim, x->name, x->len),
            .why = "it does not have it"};
    }
    if (r == 0)
        r = key_set(&k, f, part, true, x->name, x->len, NULL, e);
    if (r == 0)
        r = once(rank_merge(f->sink, RANK_SAME, same, part->shards, &k.t, e), e);
    free(same);
    return r;
}

/* Has an earlier shard a state of that name? */
static bool seen(const struct model_part *part, uint32_t before,
                 const struct rank_tensor *x)
{
    for (uint32_t s = 0; s < before; s++)
        if (rank_tensors_find(&part->shard[s].optim, x->name, x->len))
            return true;
    return false;
}

static int report_state(struct fairscale *f, struct model_part *part, uint32_t s,
                        const struct rank_tensor *x, struct err *e)
{
    const char *state;
    uint64_t p;

    if (part->named && fairscale_state_name(x, &p, &state) && p < part->meta.params &&
        !(part->meta.param[p].own && part->shards > 1)) {
        if (seen(part, s, x))
            return 0;
        if (is_flat_state(part, p, x))
            return report_flat_state(f, part, p, x, state, e);
        if (x->nd == 0 && !x->why)
            return report_scalar(f, part, x, e);
    }
    return report_raw(f, &part->file[s], OPTIMIZER, x, ROLE_OPTIMIZER, e);
}

/*
 * The optimizer's number i is the i-th parameter where there are states of all numbers from
 * 0 to the last parameter, and of no other.
 */
static void find_names(struct model_part *part)
{
    size_t n = part->meta.params, count = 0;
    bool *found = calloc(n + 1, sizeof *found);
    const char *rest;
    uint64_t p;

    part->named = found;
    for (uint32_t s = 0; found && s < part->shards; s++) {
        const struct rank_tensors *t = &part->shard[s].optim;

        for (size_t i = 0; i < t->count; i++) {
            if (!fairscale_state_name(&t->tensor[i], &p, &rest))
                continue;
            if (p >= n) {
                part->named = false;
            } else if (!found[p]) {
                found[p] = true;
                count++;
            }
        }
    }
    part->named = part->named && count == n;
    free(found);
}

int fairscale_report_part(struct fairscale *f, struct model_part *part, struct err *e)
{
    find_names(part);
    TRY(report_model(f, part, e));
    for (uint32_t s = 0; s < part->shards; s++) {
        const struct rank_tensors *t = &part->shard[s].optim;

        for (size_t i = 0; i < t->count; i++)
            TRY(report_state(f, part, s, &t->tensor[i], e));
    }
    return 0;
}
