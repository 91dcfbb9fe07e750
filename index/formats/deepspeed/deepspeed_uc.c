/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_uc.c - the patterns of universal_checkpoint_info. */
#include "index/formats/deepspeed/deepspeed_cut.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/deepspeed/deepspeed_scan.h"
#include "index/formats/torch/torch_walk.h"

enum {
    MAX_PATTERNS = 1 << 18, /* AutoTP has one a parameter */
    MAX_OPEN = 1024,        /* of a kind, that are tried on each name */
    AFFINE_VERSION = 1,     /* of affine_map that is known */
};

/* Adds one pattern and what is noted beside it. */
static int add(struct ds_notes *n, enum ds_note kind, const struct pv *text,
               const struct pv *value, struct err *e)
{
    struct ds_patterns *s = &n->kind[kind];
    const char *name;
    size_t len;

    if (text->kind != PV_STR)
        return err_set(e, EBADMSG, "a pattern is no text");
    name = pv_bytes(text, &len);
    TRY(ds_pattern_parse(n->arena, name, len, &s->pattern[s->count], e));
    n->value[kind][s->count] = *value;
    s->pattern[s->count].number = (uint32_t)s->count;
    s->count++;
    return 0;
}

static int make_room(struct ds_notes *n, enum ds_note kind, size_t count, struct err *e)
{
    if (count > MAX_PATTERNS)
        return err_set(e, EBADMSG, "%zu patterns", count);
    n->kind[kind].pattern =
        arena_array(n->arena, MAX(count, (size_t)1), sizeof *n->kind[kind].pattern);
    n->value[kind] =
        arena_array(n->arena, MAX(count, (size_t)1), sizeof *n->value[kind]);
    return n->kind[kind].pattern && n->value[kind] ? 0 : err_nomem(e);
}

static int finish(struct ds_notes *n, enum ds_note kind, struct err *e)
{
    struct ds_patterns *s = &n->kind[kind];

    ds_patterns_begin(s);
    if (s->count - s->exact > MAX_OPEN)
        return err_set(e, ENOTSUP, "%zu patterns of a kind that each match many names",
                       s->count - s->exact);
    return 0;
}

static bool is_list(const struct pv *v)
{
    return v->kind == PV_LIST || v->kind == PV_TUPLE;
}

/* A list of patterns; *told: it is there. */
static int take_list(struct ds_notes *n, const struct pv *info, const char *key,
                     enum ds_note kind, bool *told, struct err *e)
{
    static const struct pv none = {.kind = PV_NONE};
    struct pv list;

    *told = ds_get_some(info, key, &list);
    if (!*told)
        return 0;
    if (!is_list(&list))
        return err_set(e, EBADMSG, "%s is no list", key);
    TRY(make_room(n, kind, pv_count(&list), e));
    for (size_t i = 0; i < pv_count(&list); i++) {
        struct pv text = pv_at(&list, i);

        if (add(n, kind, &text, &none, e) < 0)
            return err_wrap(e, "%s", key);
    }
    return finish(n, kind, e);
}

/* A dict {pattern: what is noted}. */
static int take_dict(struct ds_notes *n, const struct pv *dict, enum ds_note kind,
                     struct err *e)
{
    struct pv items;

    if (!torch_mapping(dict, &items) || items.kind != PV_DICT)
        return err_set(e, EBADMSG, "it is no dict");
    TRY(make_room(n, kind, pv_count(&items), e));
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv text = pv_key_at(&items, i), value = pv_value_at(&items, i);

        TRY(add(n, kind, &text, &value, e));
    }
    return finish(n, kind, e);
}

/* [{"patterns": [...], "shape": ..., "partition_dim": ...}] */
static int take_subs(struct ds_notes *n, const struct pv *info, struct err *e)
{
    struct pv list, patterns;
    size_t count = 0;

    if (!ds_get_some(info, "parameter_with_sub_params", &list))
        return 0;
    if (!is_list(&list))
        return err_set(e, EBADMSG, "parameter_with_sub_params is no list");
    for (size_t i = 0; i < pv_count(&list) && count <= MAX_PATTERNS; i++) {
        struct pv one = pv_at(&list, i);

        if (!ds_get(&one, "patterns", &patterns) || !is_list(&patterns))
            return err_set(e, EBADMSG, "parameter_with_sub_params has no patterns");
        count += pv_count(&patterns);
    }
    TRY(make_room(n, DS_NOTE_SUBS, count, e));
    for (size_t i = 0; i < pv_count(&list); i++) {
        struct pv one = pv_at(&list, i);

        for (size_t k = 0;
             ds_get(&one, "patterns", &patterns) && k < pv_count(&patterns); k++) {
            struct pv text = pv_at(&patterns, k);

            TRY(add(n, DS_NOTE_SUBS, &text, &one, e));
        }
    }
    return finish(n, DS_NOTE_SUBS, e);
}

static int take_affine(struct ds_notes *n, const struct pv *info, bool *told,
                       struct err *e)
{
    struct pv map, v;
    uint64_t version;

    *told = ds_get_some(info, "affine_map", &map);
    if (!*told)
        return 0;
    if (ds_get(&map, "version", &v) &&
        (!pv_u64(&v, &version) || version > AFFINE_VERSION))
        return err_set(e, ENOTSUP, "affine_map is of a version that is not known");
    if (!ds_get_some(&map, "params", &v))
        return err_set(e, EBADMSG, "affine_map has no params");
    return take_dict(n, &v, DS_NOTE_AFFINE, e) < 0 ? err_wrap(e, "affine_map") : 0;
}

static void take_numbers(struct ds_notes *n, const struct pv *info)
{
    struct pv v;

    if (ds_get(info, "universal_checkpoint_version", &v))
        n->version = v.kind == PV_FLOAT ? v.f : v.kind == PV_INT ? (double)v.i : 0;
    n->has_vocabulary =
        ds_get(info, "original_vocab_size", &v) && pv_u64(&v, &n->vocabulary);
    if (!ds_get_some(info, "sub_param_shard_widths", &n->widths))
        n->widths.kind = PV_NONE;
}

/*
 * AutoTP's, which have a pattern a parameter, of before it noted what cannot be joined
 * (0.19.6). Megatron-DeepSpeed's notes have the size of the vocabulary with its padding.
 */
static bool is_partial(const struct ds_notes *n, const struct pv *info)
{
    struct pv ignored;
    size_t all = 0;

    if (ds_get_some(info, "autotp_unsupported_parameter_patterns", &ignored) ||
        ds_get_some(info, "affine_map", &ignored) ||
        ds_get_some(info, "padded_vocab_size", &ignored) ||
        ds_get_some(info, "parameter_to_average_patterns", &ignored) ||
        ds_get_some(info, "pipeline_replicated_parameter_patterns", &ignored))
        return false;
    for (unsigned k = 0; k < DS_NOTES; k++) {
        if (n->kind[k].exact != n->kind[k].count)
            return false;
        all += n->kind[k].count;
    }
    return all > 0;
}

/* AutoTP replaces no norms: where they are noted, all is that it left alone. */
static bool notes_norms(const struct ds_notes *n)
{
    const struct ds_patterns *same = &n->kind[DS_NOTE_SAME];

    for (size_t i = 0; i < same->count; i++)
        if (memmem(same->pattern[i].text, same->pattern[i].len, "norm", 4))
            return true;
    return false;
}

static int take(struct ds_notes *n, const struct pv *info, bool *told, struct err *e)
{
    bool same, mean, columns, affine, ignored;
    struct pv v;

    take_numbers(n, info);
    if (take_list(n, info, "tp_replicated_parameter_patterns", DS_NOTE_SAME, &same, e) <
            0 ||
        take_list(n, info, "parameter_to_average_patterns", DS_NOTE_MEAN, &mean, e) <
            0 ||
        take_list(n, info, "parameter_with_row_parallelism_patterns", DS_NOTE_COLUMNS,
                  &columns, e) < 0 ||
        take_list(n, info, "vocabulary_parameter_patterns", DS_NOTE_VOCABULARY,
                  &ignored, e) < 0 ||
        take_list(n, info, "parameter_with_2_sub_params_cat_dim_0", DS_NOTE_HALVES,
                  &ignored, e) < 0 ||
        take_subs(n, info, e) < 0 || take_affine(n, info, &affine, e) < 0)
        return -e->code;
    if (ds_get_some(info, "autotp_unsupported_parameter_patterns", &v) &&
        take_dict(n, &v, DS_NOTE_UNSUPPORTED, e) < 0)
        return err_wrap(e, "autotp_unsupported_parameter_patterns");
    /* What no pattern names is joined by rows: that holds only where the lists are made. */
    *told = affine || (columns && (same || mean));
    n->partial = is_partial(n, info);
    n->left = n->partial && notes_norms(n);
    return 0;
}

int ds_notes_take(struct arena *a, const struct pv *root, uint32_t ranks,
                  struct ds_notes *out, struct err *e)
{
    struct pv info;
    bool told = false;

    *out = (struct ds_notes){.arena = a, .ranks = ranks};
    if (!ds_get_some(root, "universal_checkpoint_info", &info))
        return 0;
    if (take(out, &info, &told, e) < 0)
        return err_wrap(e, "universal_checkpoint_info");
    return told;
}

const struct ds_pattern *ds_notes_unused(const struct ds_notes *n)
{
    static const enum ds_note kinds[] = {DS_NOTE_SAME,    DS_NOTE_MEAN,
                                         DS_NOTE_HALVES,  DS_NOTE_SUBS,
                                         DS_NOTE_COLUMNS, DS_NOTE_VOCABULARY};

    for (size_t k = 0; k < ARRAY_SIZE(kinds); k++)
        for (size_t i = 0; i < n->kind[kinds[k]].count; i++)
            if (!n->kind[kinds[k]].pattern[i].used)
                return &n->kind[kinds[k]].pattern[i];
    return NULL;
}
