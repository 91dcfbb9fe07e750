/* SPDX-License-Identifier: MIT */
/* index/map/map_filter.c - takes a scan's tensors aside and gives the mapped ones back. */
#include "index/map/map_work.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/json.h"
#include "base/keyset.h"
#include "base/vec.h"
#include "index/key_text.h"
#include "index/map/map_check.h"
#include "index/map/scope.h"

enum {
    TAKEN_MEMORY = 2047 << 20, /* of a scan: packed chunks and names */
    WORK_MEMORY = 2047 << 20,  /* of one tensor's boxes */
};

/* ---- taking ---- */

/*
 * DeepSpeed's module.NAME is the copy of NAME that the model computed with; the length of
 * that prefix, or 0.
 */
static size_t module_prefix(const struct sink_taken *t)
{
    static const char prefix[] = "module.";
    size_t n = sizeof prefix - 1;

    return t->role == ROLE_OTHER && t->key_len > n && memcmp(t->key, prefix, n) == 0
               ? n
               : 0;
}

/* Which rule and pattern; false: none. The key is tried without its wrapper first. */
static bool find_rule(const struct filter *f, const struct sink_taken *t,
                      const char *key, size_t len, struct taken *out)
{
    for (size_t r = 0; r < f->map->nrule; r++) {
        const struct map_rule *rule = &f->map->rule[r];
        bool join = rule->kind == RULE_JOIN;

        if (f->off[r] || !(rule->roles & 1u << t->role))
            continue;
        for (size_t i = 0; i < (join ? rule->npart : rule->nfrom); i++) {
            if (!pattern_match(join ? rule->part[i].key : rule->from[i], key, len,
                               &out->captures))
                continue;
            out->rule = rule;
            out->part = i;
            return true;
        }
    }
    return false;
}

/* A copy that lasts as long as the filter. */
static int keep_taken(struct filter *f, const struct sink_taken *t,
                      struct sink_taken *out, struct err *e)
{
    struct shape *shape = arena_alloc(f->arena, sizeof *shape);
    struct {
        const char **text;
        size_t len;
    } texts[] = {
        {&out->key, t->key_len},
        {&out->part, t->part ? strlen(t->part) : 0},
        {&out->codec_key, t->codec_key_len},
        {&out->attributes, t->attributes ? strlen(t->attributes) : 0},
        {&out->fault, t->fault ? strlen(t->fault) : 0},
        {&out->pieces, t->pieces_len},
    };

    if (!shape)
        return err_nomem(e);
    *out = *t;
    *shape = *t->shape;
    out->shape = shape;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        if (!*texts[i].text)
            continue;
        *texts[i].text = arena_memdup(f->arena, *texts[i].text, texts[i].len);
        if (!*texts[i].text)
            return err_nomem(e);
    }
    return 0;
}

static int add_taken(struct filter *f, const struct sink_taken *t, struct taken **out,
                     struct err *e)
{
    if (!VEC_ROOM(f->taken, f->ntaken, f->cap))
        return err_nomem(e);
    *out = &f->taken[f->ntaken];
    **out = (struct taken){0};
    TRY(keep_taken(f, t, &(*out)->t, e));
    f->ntaken++;
    return 0;
}

static void note_left(struct filter *f, const struct sink_taken *t)
{
    if (f->left < ARRAY_SIZE(f->left_name))
        key_text(f->left_name[f->left], sizeof f->left_name[0], t->key, t->key_len);
    f->left++;
}

/*
 * How much of the key, from `at` on, is a module that held the model when it was saved:
 * NeMo's trainers (module.decoder..., model.decoder...) and Megatron-FSDP leave it in the
 * names, and nothing in the files tells it from the model's own.
 */
static size_t holder_prefix(const struct sink_taken *t, size_t at)
{
    static const char *const names[] = {"module.", "model."};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        size_t n = strlen(names[i]);

        if (t->key_len - at > n && memcmp(t->key + at, names[i], n) == 0)
            return n;
    }
    return 0;
}

/*
 * Finds the rule of a tensor, which may see it without its wrapper; counts what is left.
 * `skip` is how much of the key the rule did not see.
 */
static bool match(struct filter *f, const struct sink_taken *t, struct taken *out,
                  size_t *skip)
{
    const struct map *m = f->map;

    *skip = t->wrapper;
    if (*skip && find_rule(f, t, t->key + *skip, t->key_len - *skip, out))
        return true;
    *skip = 0;
    if (find_rule(f, t, t->key, t->key_len, out))
        return true;
    for (size_t n = t->role == ROLE_MODEL ? holder_prefix(t, 0) : 0; n > 0;
         n = holder_prefix(t, *skip)) {
        *skip += n;
        if (find_rule(f, t, t->key + *skip, t->key_len - *skip, out))
            return true;
    }
    *skip = 0;
    if (t->role == ROLE_MODEL && m->nrule > 0)
        note_left(f, t);
    return false;
}

/* Is it left out? */
static bool is_dropped(const struct filter *f, const struct sink_taken *t,
                       const struct map_rule *rule)
{
    return rule ? rule->kind == RULE_DROP
                : t->role == ROLE_MODEL && f->map->nrule > 0 &&
                      f->map->other == OTHER_DROP;
}

/* Which tensor is the model's is known when all are: see settle_weights(). */
static bool has_copy_perhaps(const struct filter *f, const struct sink_taken *t)
{
    return f->map->module_weights && dtype_bits(t->dtype) >= 8 &&
           (t->role == ROLE_MODEL || module_prefix(t) > 0);
}

/* 1: it is ours; 0: it stays as it is. */
static int take(struct sink_filter *base, const struct sink_taken *t, struct err *e)
{
    struct filter *f = container_of(base, struct filter, base);
    struct taken found = {0}, *kept = NULL;
    size_t skip;
    bool ruled;
    int ret;

    if (f->casts && t->role == ROLE_MODEL && quantised_note(&f->quantised, t) < 0)
        return err_nomem(e);
    if (has_copy_perhaps(f, t)) {
        ret = add_taken(f, t, &kept, e);
        return ret < 0 ? ret : 1;
    }
    ruled = match(f, t, &found, &skip);
    if (ruled)
        f->used[found.rule->number]++;
    if (is_dropped(f, t, ruled ? found.rule : NULL))
        return 1;
    if (!ruled && !(t->role == ROLE_MODEL && map_casts(t->dtype, f->map->cast)))
        return 0;
    TRY(add_taken(f, t, &kept, e));
    if (ruled) /* once more: captures point into the kept key */
        find_rule(f, &kept->t, kept->t.key + skip, kept->t.key_len - skip, kept);
    return 1;
}

/* ---- the 16-bit copy as the model (weights=module) ---- */

/* Keys of the pairs: NAME, and module.NAME without its prefix. */
static int collect_names(const struct filter *f, struct keyset *masters,
                         struct keyset *copies)
{
    for (size_t i = 0; i < f->ntaken; i++) {
        const struct sink_taken *t = &f->taken[i].t;
        size_t prefix = module_prefix(t);

        if ((prefix && keyset_add(copies, t->key + prefix, t->key_len - prefix) < 0) ||
            (t->role == ROLE_MODEL && keyset_add(masters, t->key, t->key_len) < 0))
            return -ENOMEM;
    }
    return 0;
}

/* A pair changes roles; the copy is called in the model as its master was. */
static void settle_pair(struct sink_taken *t, const struct keyset *masters,
                        const struct keyset *copies)
{
    size_t prefix = module_prefix(t);

    if (prefix && keyset_has(masters, t->key + prefix, t->key_len - prefix)) {
        t->role = ROLE_MODEL;
        t->wrapper = prefix;
    } else if (t->role == ROLE_MODEL && keyset_has(copies, t->key, t->key_len)) {
        t->role = ROLE_OTHER;
        t->wrapper = 0;
    }
}

/* Roles are settled, and only now rules are looked for. */
static int settle_weights(struct filter *f, struct err *e)
{
    CLEANUP(keyset_release) struct keyset masters = {0}, copies = {0};
    size_t kept = 0;

    if (!f->map->module_weights)
        return 0;
    if (collect_names(f, &masters, &copies) < 0)
        return err_nomem(e);
    for (size_t i = 0; i < f->ntaken; i++) {
        struct taken *t = &f->taken[i];
        size_t skip;

        settle_pair(&t->t, &masters, &copies);
        if (!t->rule && match(f, &t->t, t, &skip))
            f->used[t->rule->number]++;
        if (!is_dropped(f, &t->t, t->rule))
            f->taken[kept++] = *t;
    }
    f->ntaken = kept;
    return 0;
}

/* ---- the end of a scan ---- */

static void count_bytes(struct filter *f, const struct sink_taken *t)
{
    struct err ignored = {0};
    uint64_t bytes;

    if (shape_bytes(t->shape, t->dtype, &bytes, &ignored) == 0 &&
        add_overflows(f->bytes, bytes, &f->bytes))
        f->bytes = UINT64_MAX;
}

static int put_taken(struct filter *f, struct sink *s, const struct taken *t,
                     struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(WORK_MEMORY);
    struct work w = {.f = f, .sink = s, .rule = t->rule};
    int ret;

    if (t->rule && t->rule->kind == RULE_REFUSE)
        return err_set(e, EINVAL, "%s", t->rule->refuse);
    ret = a ? work_load(a, t, &w, e) : err_nomem(e);
    if (ret < 0)
        return ret;
    count_bytes(f, &t->t);
    return t->rule ? work_run(&w, e) : work_put(&w, NULL, e); /* NULL: only a cast */
}

static int finish_rules(struct filter *f, struct sink *s, struct err *e)
{
    for (size_t i = 0; i < f->ntaken; i++) {
        const struct taken *t = &f->taken[i];

        if (t->rule && (t->rule->kind == RULE_JOIN || t->rule->kind == RULE_STACK))
            continue;
        if (put_taken(f, s, t, e) < 0) {
            err_wrap(e, "tensor %s", t->t.key);
            return t->rule ? err_wrap(e, "rule %u", t->rule->number) : -e->code;
        }
    }
    for (size_t i = 0; i < f->map->nrule; i++) {
        const struct map_rule *rule = &f->map->rule[i];

        if ((rule->kind == RULE_JOIN || rule->kind == RULE_STACK) &&
            group_put_all(f, s, rule, e) < 0)
            return err_wrap(e, "rule %u", rule->number);
    }
    return 0;
}

/* Rules without a tensor and tensors without a rule are worth a word. */
static int tell_unused(struct filter *f, struct sink *s, struct err *e)
{
    const struct map *m = f->map;
    size_t used = 0;

    for (size_t i = 0; i < m->nrule; i++)
        used += f->used[m->rule[i].number] > 0;
    if (f->left > 0 && m->other == OTHER_REFUSE)
        return err_set(e, EINVAL, "no rule names %zu tensor%s of the model (%s%s)",
                       f->left, f->left == 1 ? "" : "s", f->left_name[0],
                       f->left == 1 ? "" : ", ...");
    if (m->nrule > 0 && used == 0)
        return sink_warning(s, "map-unused",
                            "map %s names no tensor of this checkpoint", m->name);
    for (size_t i = 0; i < m->nrule; i++)
        if (!f->used[m->rule[i].number] && !m->rule[i].optional &&
            m->rule[i].kind != RULE_REFUSE && !f->off[i])
            sink_warning(s, "map-rule-unused",
                         "map %s: rule %u (%s) names no tensor of this checkpoint",
                         m->name, m->rule[i].number,
                         m->rule[i].nfrom ? m->rule[i].from[0]
                                          : m->rule[i].part[0].key);
    if (f->left == 0)
        return 0;
    return sink_warning(
        s, "map-left",
        "map %s: no rule names %zu tensor%s of the model, %s: %s%s%s%s%s", m->name,
        f->left, f->left == 1 ? "" : "s",
        m->other == OTHER_DROP ? "left out" : "kept as they are", f->left_name[0],
        f->left > 1 ? ", " : "", f->left > 1 ? f->left_name[1] : "",
        f->left > 2 ? ", " : "", f->left > 2 ? f->left_name[2] : "");
}

/* What the scan has told of the checkpoint as a whole. */
static int take_source(struct filter *f, const struct sink *s, struct err *e)
{
    const struct sink_checkpoint *told = sink_told(s);

    if (!told->settings)
        return 0;
    return json_parse(told->settings, strlen(told->settings), NULL, &f->source, e);
}

/* Codes are no numbers: cast without their scales they would be wrong weights. */
static int refuse_quantised(const struct filter *f, struct err *e)
{
    err_set(e, EINVAL,
            "dtype=: the model is quantised (%s), and codes are not numbers to cast",
            f->quantised.found);
    return err_hint(e, "leave dtype= out; dequant= is for this, and this version does "
                       "not have it yet");
}

static int finish(struct sink_filter *base, struct sink *s, struct err *e)
{
    struct filter *f = container_of(base, struct filter, base);
    int ret = take_source(f, s, e);

    if (ret == 0 && f->quantised.found[0])
        return refuse_quantised(f, e);
    if (ret == 0)
        ret = map_check_model(f, e);
    if (ret == 0)
        ret = settle_weights(f, e);
    if (ret == 0)
        ret = finish_rules(f, s, e);
    if (ret == 0)
        ret = tell_unused(f, s, e);
    if (ret == 0)
        return 0;
    if ((e->code == EINVAL || e->code == E2BIG) && !e->hint[0])
        err_hint(e, "the map is not for this model: see unshard-maps(5)");
    return err_wrap(e, "map %s", f->map->name);
}

/* Which rules are of other models. What has no value is of none. */
static int look_when(struct filter *f, struct err *e)
{
    for (size_t i = 0; i < f->map->nrule; i++) {
        struct scope s = {.map = f->map, .config = f->config};
        struct err why = {0};
        uint64_t n;
        int ret = scope_count(&s, f->map->rule[i].when, 1, &n, &why);

        if (ret < 0 && ret != -ENOENT) {
            *e = why;
            return err_wrap(e, "rule %u: \"when\"", f->map->rule[i].number);
        }
        f->off[i] = ret < 0 || n == 0;
        for (size_t k = 0; k < f->map->rule[i].ntext; k++)
            if (!scope_has_text(&s, &f->map->rule[i].text[k]))
                f->off[i] = true;
    }
    return 0;
}

int map_filter_new(const struct map *m, const char *config, size_t config_len,
                   struct sink_filter **out, struct err *e)
{
    static const struct json_limits limits = {.bytes = 16 << 20, .python = true};
    struct filter *f = calloc(1, sizeof *f);
    int ret = 0;

    if (f) {
        f->arena = arena_new(TAKEN_MEMORY);
        f->map = m;
        f->casts = map_has_cast(m);
        f->used = calloc(m->nrule + 2, sizeof *f->used);
        f->off = calloc(m->nrule + 1, sizeof *f->off);
    }
    if (!f || !f->arena || !f->used || !f->off)
        ret = err_nomem(e);
    else if (config && json_parse(config, config_len, &limits, &f->config, e) < 0)
        ret = err_wrap(e, "config.json");
    if (ret == 0)
        ret = look_when(f, e);
    if (ret < 0) {
        map_filter_free(f ? &f->base : NULL);
        return ret;
    }
    f->base = (struct sink_filter){.take = take, .finish = finish};
    *out = &f->base;
    return 0;
}

void map_filter_own_config(struct sink_filter *base, const char *text, size_t len)
{
    struct filter *f = container_of(base, struct filter, base);
    CLEANUP(json_freep) struct json *config = NULL;
    struct err ignored = {0};

    if (f->casts && text && json_parse(text, len, &json_python, &config, &ignored) == 0)
        quantised_note_config(&f->quantised, config);
}

void map_filter_free(struct sink_filter *base)
{
    struct filter *f = base ? container_of(base, struct filter, base) : NULL;

    if (!f)
        return;
    json_free(f->config);
    json_free(f->source);
    quantised_release(&f->quantised);
    arena_free(f->arena);
    free(f->taken);
    free(f->used);
    free(f->off);
    free(f);
}

void map_filter_freep(struct sink_filter **f)
{
    map_filter_free(*f);
}
