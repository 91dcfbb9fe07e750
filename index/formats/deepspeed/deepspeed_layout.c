/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_layout.c - which elements of the flat groups are whose. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"
#include "remote/listing.h"

/*
 * Stages 1 and 2 lay a group's parameters one behind the other and cut that in
 * partitions of equal length, a rank each; the last ones lack the padding that made
 * them equal (until 0.3.12 they had it), which can be more than a partition is long.
 * Stage 3 cuts each parameter in equal parts, a rank each, and lays a rank's parts one
 * behind the other. Sources: DeepSpeed 0.19.8, utils/zero_to_fp32.py,
 * runtime/zero/stage_1_and_2.py, stage3.py.
 */

uint32_t ds_sets(const struct ds_part *p, uint32_t group)
{
    return (uint32_t)(p->nranks / p->count[group]);
}

/* ---- stages 1 and 2 ---- */

/* Elements that follow the i-th parameter of a group (parameter_alignment, 0.19). */
static int padding_of(const struct pv *paddings, uint32_t group, size_t i,
                      uint64_t *out, struct err *e)
{
    struct pv list, one;

    *out = 0;
    if (paddings->kind == PV_NONE)
        return 0;
    list = pv_at(paddings, group);
    one = pv_at(&list, i);
    return pv_u64(&one, out)
               ? 0
               : err_set(e, EBADMSG, "a padding of group %u is no count", group);
}

static int check_paddings(const struct ds_part *p, const struct pv *paddings,
                          struct err *e)
{
    if (paddings->kind != PV_LIST || pv_count(paddings) != p->ngroups)
        return err_set(e, EBADMSG, "param_alignment_paddings is not of %u groups",
                       p->ngroups);
    for (uint32_t g = 0; g < p->ngroups; g++) {
        struct pv list = pv_at(paddings, g);
        size_t n = p->first[g + 1] - p->first[g];

        if (list.kind != PV_LIST || pv_count(&list) != n)
            return err_set(e, EBADMSG,
                           "param_alignment_paddings of group %u is not of its %zu "
                           "parameters",
                           g, n);
    }
    return 0;
}

static int place_group(struct ds_part *p, const struct pv *paddings, uint32_t g,
                       struct err *e)
{
    uint64_t at = 0, padding;

    for (size_t i = p->first[g]; i < p->first[g + 1]; i++) {
        p->param[i].at = at;
        TRY(padding_of(paddings, g, i - p->first[g], &padding, e));
        if (add_overflows(at, p->param[i].elements, &at) ||
            add_overflows(at, padding, &at))
            return err_set(e, EBADMSG, "group %u has more than 2^64 elements", g);
    }
    p->length[g] = at;
    return 0;
}

/*
 * round_robin_gradients deals a group's parameters out, one to each partition in turn, and
 * lays those of a partition one behind the other. param_shapes has the order that came of
 * it; param_slice_mappings is reckoned from the one before, unless there are paddings
 * (DeepSpeed 0.19.8, stage_1_and_2.py, _round_robin_reorder and link_hp_params: a mistake
 * of theirs, as the notes then name other elements than the parameter's).
 */
static void place_dealt(struct ds_part *p, uint32_t g)
{
    size_t n = p->first[g + 1] - p->first[g];
    size_t hands = (size_t)MIN(p->count[g], (uint64_t)n);
    struct ds_param *param = p->param + p->first[g];
    uint64_t at = 0;

    for (size_t i = 0; i < n; i++) {
        size_t hand = i % hands, longer = n % hands;
        size_t k = hand * (n / hands) + MIN(hand, longer) + i / hands;

        param[k].dealt = at;
        at += param[k].elements; /* place_group() has added them up */
    }
}

static int place_groups(struct ds_scan *s, struct ds_part *p, const struct pv *dict,
                        struct err *e)
{
    struct pv paddings = {.kind = PV_NONE};

    if (p->nlists != p->ngroups)
        return err_set(e, EBADMSG, "%u groups of weights, param_shapes has %u",
                       p->ngroups, p->nlists);
    for (uint32_t g = 0; g < p->ngroups; g++)
        if (p->nranks % p->count[g] != 0)
            return err_set(e, EBADMSG,
                           "group %u is in %" PRIu64 " partitions, there are %u ranks",
                           g, p->count[g], p->nranks);
    for (size_t i = 0; i < p->nparams; i++)
        p->first[p->param[i].group + 1] = i + 1;
    for (uint32_t g = 0; g < p->ngroups; g++)
        p->first[g + 1] = MAX(p->first[g + 1], p->first[g]);
    if (ds_get_some(dict, "param_alignment_paddings", &paddings))
        TRY(check_paddings(p, &paddings, e));
    for (uint32_t g = 0; g < p->ngroups; g++) {
        TRY(place_group(p, &paddings, g, e));
        place_dealt(p, g);
    }
    return ds_experts_count(s, p, e);
}

/* ---- stage 3 ---- */

static uint64_t part_of(uint64_t elements, uint32_t ranks)
{
    return elements / ranks + (elements % ranks > 0);
}

static int place_parts(struct ds_part *p, struct err *e)
{
    uint64_t at = 0;

    for (size_t i = 0; i < p->nparams; i++) {
        p->param[i].at = at;
        if (add_overflows(at, part_of(p->param[i].elements, p->nranks), &at))
            return err_set(e, EBADMSG, "a rank has more than 2^64 elements");
    }
    return 0;
}

int ds_layout_begin(struct ds_scan *s, struct ds_part *p, const struct pv *dict,
                    struct err *e)
{
    p->length = arena_array(s->arena, MAX(p->ngroups, 1U), sizeof *p->length);
    p->begin = arena_array(s->arena, p->ngroups + 1ULL, sizeof *p->begin);
    p->first = arena_array(s->arena, p->ngroups + 1ULL, sizeof *p->first);
    if (!p->length || !p->begin || !p->first)
        return err_nomem(e);
    if (!p->has_shapes)
        return 0;
    return s->stage == 3 ? place_parts(p, e) : place_groups(s, p, dict, e);
}

/* ---- the ranks' own notes ---- */

/* Which elements of a group are on a rank. */
struct span {
    uint64_t begin, end;
};

static uint64_t length_at(const struct ds_part *p, uint32_t r, uint32_t g)
{
    return p->rank[r].flat[(size_t)g * p->nslots + DS_MASTER].count;
}

static struct span span_of(const struct ds_part *p, uint32_t r, uint32_t g)
{
    uint32_t sets = ds_sets(p, g);
    uint64_t k = r / sets, length = length_at(p, r % sets, g);
    struct span s = {.begin = UINT64_MAX, .end = UINT64_MAX};

    if (!mul_overflows(k, length, &s.begin) && k + 1 < p->count[g] &&
        add_overflows(s.begin, length, &s.end))
        s.end = UINT64_MAX;
    return s;
}

static struct span overlap(const struct ds_param *x, struct span s)
{
    return (struct span){.begin = MAX(x->at, s.begin),
                         .end = MIN(x->at + x->elements, s.end)};
}

/* The first parameter of a group that ends behind an element. */
static size_t first_behind(const struct ds_part *p, uint32_t g, uint64_t at)
{
    size_t lo = p->first[g], hi = p->first[g + 1];

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (p->param[mid].at + p->param[mid].elements > at)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

/* fragment_address(numel, start), a dataclass. */
static bool take_fragment(const struct pv *v, struct span *out)
{
    struct pv state = pv_state(v), numel, start;

    return v->kind == PV_OBJECT && state.kind == PV_DICT &&
           pv_dict_get(&state, "numel", &numel) &&
           pv_dict_get(&state, "start", &start) && pv_u64(&start, &out->begin) &&
           pv_u64(&numel, &out->end) && !add_overflows(out->begin, out->end, &out->end);
}

/* Whether a rank's notes of a group are reckoned from the order before it was dealt out. */
static bool is_dealt(const struct ds_part *p, uint32_t g, struct span rank,
                     const struct pv *items)
{
    size_t n = 0, want = 0;

    for (size_t i = p->first[g]; i < p->first[g + 1]; i++) {
        const struct ds_param *x = &p->param[i];

        want += x->elements > 0 && x->dealt < rank.end &&
                x->dealt + x->elements > rank.begin;
    }
    for (size_t i = 0; i < pv_count(items); i++) {
        struct pv key = pv_key_at(items, i), value = pv_value_at(items, i);
        const struct ds_param *x = NULL;
        struct span noted;
        const char *name;
        size_t len;

        if (key.kind == PV_STR) {
            name = pv_bytes(&key, &len);
            x = ds_param_find(p, name, len);
        }
        if (!x || x->group != g || !take_fragment(&value, &noted) ||
            noted.begin != MAX(x->dealt, rank.begin) - rank.begin ||
            noted.end != MIN(x->dealt + x->elements, rank.end) - rank.begin)
            return false;
        n += x->elements > 0;
    }
    return n == want;
}

/* Counts those that are not empty. */
static int compare_fragment(const struct ds_part *p, uint32_t g, struct span rank,
                            const struct pv *key, const struct pv *value, size_t *n,
                            struct err *e)
{
    const struct ds_param *x = NULL;
    struct span noted, want;
    char text[200] = "";
    const char *name;
    size_t len;

    if (key->kind == PV_STR) {
        name = pv_bytes(key, &len);
        x = ds_param_find(p, name, len);
        ds_text(name, len, text, sizeof text);
    }
    if (!x || x->group != g || !take_fragment(value, &noted))
        return err_set(e, EBADMSG,
                       "param_slice_mappings of group %u: \"%s\" is not in "
                       "its param_shapes",
                       g, text);
    *n += x->elements > 0;
    want = overlap(x, rank);
    if (noted.begin == want.begin - rank.begin && noted.end == want.end - rank.begin)
        return 0;
    if (want.begin >= want.end)
        return err_set(e, EBADMSG,
                       "param_slice_mappings: %s is not in this rank's partition",
                       text);
    return err_set(e, EBADMSG,
                   "param_slice_mappings: %s is noted at %" PRIu64 " to %" PRIu64
                   " of the partition, it lies at %" PRIu64 " to %" PRIu64,
                   text, noted.begin, noted.end, want.begin - rank.begin,
                   want.end - rank.begin);
}

static int compare_group(const struct ds_part *p, uint32_t r, uint32_t g,
                         const struct pv *items, struct err *e)
{
    struct span rank = span_of(p, r, g);
    size_t n = 0, want = 0;

    for (size_t i = first_behind(p, g, rank.begin);
         i < p->first[g + 1] && p->param[i].at < rank.end; i++)
        want += p->param[i].elements > 0;
    for (size_t i = 0; i < pv_count(items); i++) {
        struct pv key = pv_key_at(items, i), value = pv_value_at(items, i);

        TRY(compare_fragment(p, g, rank, &key, &value, &n, e));
    }
    return n == want ? 0
                     : err_set(e, EBADMSG,
                               "param_slice_mappings of group %u has %zu parameters, "
                               "%zu lie in the partition",
                               g, n, want);
}

/* The group whose parameter is the first in a rank's notes of one, or ngroups. */
static uint32_t group_noted(const struct ds_part *p, const struct pv *mapping)
{
    const struct ds_param *x;
    struct pv items, key;
    const char *name;
    size_t len;

    if (!torch_mapping(mapping, &items) || items.kind != PV_DICT ||
        pv_count(&items) == 0)
        return p->ngroups;
    key = pv_key_at(&items, 0);
    if (key.kind != PV_STR)
        return p->ngroups;
    name = pv_bytes(&key, &len);
    x = ds_param_find(p, name, len);
    return x ? x->group : p->ngroups;
}

int ds_layout_order(const struct ds_scan *s, const struct ds_part *p,
                    const struct pv *dict, const struct pv *counts, uint32_t *order,
                    struct err *e)
{
    bool *seen = arena_array(s->arena, MAX(p->ngroups, 1U), sizeof *seen);
    struct pv list = {.kind = PV_NONE};

    if (!seen)
        return err_nomem(e);
    if (ds_get(dict, "param_slice_mappings", &list) && list.kind != PV_LIST)
        list.kind = PV_NONE;
    for (uint32_t g = 0; g < p->ngroups; g++) {
        struct pv one = list.kind == PV_LIST ? pv_at(&list, g) : list;
        struct pv count = pv_at(counts, g);
        uint64_t n;

        order[g] = group_noted(p, &one);
        if (order[g] >= p->ngroups || seen[order[g]] || !pv_u64(&count, &n) ||
            n != p->count[order[g]]) {
            err_set(e, ENOTSUP,
                    "its groups are not those of the first rank in their order "
                    "(partition_count), and param_slice_mappings does not tell which "
                    "group %u is",
                    g);
            return err_hint(e, "without the optimizer's files the weights that the "
                               "model computed with are shown");
        }
        seen[order[g]] = true;
    }
    return 0;
}

int ds_layout_compare(const struct ds_scan *s, const struct ds_part *p, uint32_t r,
                      const uint32_t *order, const struct pv *dict, struct err *e)
{
    struct pv list, items;

    if (s->stage == 3 || !ds_get_some(dict, "param_slice_mappings", &list) ||
        list.kind != PV_LIST || pv_count(&list) != p->ngroups)
        return 0;
    for (uint32_t g = 0; g < p->ngroups; g++) {
        struct pv one = pv_at(&list, g);
        uint32_t group = order ? order[g] : g;

        /* Empty where the engine made no mapping (no fp32 copy that could be linked). */
        if (!torch_mapping(&one, &items) || items.kind != PV_DICT ||
            pv_count(&items) == 0)
            continue;
        if (!is_dealt(p, group, span_of(p, r, group), &items))
            TRY(compare_group(p, r, group, &items, e));
    }
    return 0;
}

/* ---- the whole ---- */

static int check_dtype(const struct ds_part *p, uint32_t r, uint32_t g, struct err *e)
{
    const struct ds_flat *first = &p->rank[0].flat[(size_t)g * p->nslots];
    const struct ds_flat *flat = &p->rank[r].flat[(size_t)g * p->nslots];

    if (first->dtype == flat->dtype)
        return 0;
    return err_set(e, EBADMSG, "%s: group %u is %s, on the first rank %s",
                   p->rank[r].path, g, dtype_name(flat->dtype),
                   dtype_name(first->dtype));
}

/*
 * All partitions of one set of ranks are equal, but that the last ones lack the padding: one
 * has some of its elements, those behind it none.
 */
static int check_lengths(const struct ds_part *p, uint32_t g, uint32_t set,
                         uint64_t *total, struct err *e)
{
    uint32_t sets = ds_sets(p, g), odd = set; /* the last that is not as long */
    uint64_t length = length_at(p, set, g);

    *total = 0;
    for (uint64_t k = 0; k < p->count[g]; k++) {
        uint32_t r = (uint32_t)(set + k * sets);
        uint64_t n = length_at(p, r, g);

        TRY(check_dtype(p, r, g, e));
        if (n > length)
            odd = r;
        if (n > length || (n > 0 && odd != set))
            return err_set(e, EBADMSG,
                           "%s: the partition of group %u has %" PRIu64
                           " elements, that of %s %" PRIu64,
                           p->rank[odd].path, g, length_at(p, odd, g),
                           p->rank[set].path, length);
        if (n < length)
            odd = r;
        if (add_overflows(*total, n, total))
            return err_set(e, EBADMSG, "group %u has more than 2^64 elements", g);
    }
    return 0;
}

/* Groups are padded to a multiple of two elements a rank, and not more. */
static int check_total(const struct ds_part *p, uint32_t g, uint64_t total,
                       struct err *e)
{
    uint64_t need = 0, unit = 2 * p->count[g], used = p->length[g];

    if (p->first[g + 1] > p->first[g]) {
        const struct ds_param *last = &p->param[p->first[g + 1] - 1];

        need = last->at + last->elements;
    }
    if (need <= total &&
        used / unit + (used % unit > 0) == total / unit + (total % unit > 0))
        return 0;
    return err_set(e, EBADMSG,
                   "group %u: its parameters need %" PRIu64 " elements, its partitions "
                   "have %" PRIu64,
                   g, used, total);
}

static int end_groups(const struct ds_part *p, struct err *e)
{
    uint64_t total;

    for (uint32_t g = 0; g < p->ngroups; g++)
        for (uint32_t set = 0; set < ds_sets(p, g); set++) {
            TRY(check_lengths(p, g, set, &total, e));
            TRY(check_total(p, g, total, e));
        }
    return 0;
}

static int end_parts(const struct ds_scan *s, const struct ds_part *p, struct err *e)
{
    const struct ds_param *last = p->nparams > 0 ? &p->param[p->nparams - 1] : NULL;
    uint64_t need = last ? last->at + part_of(last->elements, p->nranks) : 0, total = 0;

    for (uint32_t g = 0; g < p->ngroups; g++) {
        for (uint32_t r = 0; r < p->nranks; r++) {
            TRY(check_dtype(p, r, g, e));
            if (length_at(p, r, g) != length_at(p, 0, g))
                return err_set(e, EBADMSG,
                               "%s: sub-group %u has %" PRIu64
                               " elements, on the first rank %" PRIu64,
                               p->rank[r].path, g, length_at(p, r, g),
                               length_at(p, 0, g));
        }
        p->begin[g] = total;
        if (add_overflows(total, length_at(p, 0, g), &total))
            return err_set(e, EBADMSG, "a rank has more than 2^64 elements");
    }
    p->begin[p->ngroups] = total;
    if (total == need)
        return 0;
    /* Sub-groups that are swapped out are saved empty (0.19.8, save_checkpoint()). */
    if (total < need && listing_find(s->listing, "offloaded_tensors")) {
        err_set(
            e, ENOTSUP,
            "weights and states of an optimizer on NVMe (offloaded_tensors) are not "
            "supported");
        return err_hint(e, "load it with DeepSpeed, and save it with the optimizer on "
                           "the CPU");
    }
    return err_set(e, EBADMSG,
                   "the parameters need %" PRIu64 " elements of each rank, there are "
                   "%" PRIu64,
                   need, total);
}

int ds_layout_end(const struct ds_scan *s, const struct ds_part *p, struct err *e)
{
    return s->stage == 3 ? end_parts(s, p, e) : end_groups(p, e);
}
