/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_optim.c - where each rank's flat groups and states lie. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

enum {
    MAX_RANKS = 100000, /* more than any cluster has */
    MAX_GROUPS = 1 << 20,
    MAX_STAGE = 3
};

static const char outer[] = "optimizer_state_dict";

/* One optimizer file while its graph is open. */
struct optim {
    struct ds_scan *s;
    struct ds_part *p;
    uint32_t r;
    const struct torch_file *f;
    struct pv dict; /* optimizer_state_dict */
    const char *masters, *base;
    uint32_t *order;     /* the first rank's group of each one here; NULL: the same */
    struct keyset taken; /* paths of the tensors that are some parameter's */
};

/* ---- tensors ---- */

static bool is_row(const struct torch_tensor *x)
{
    return x->shape.nd == 1 && (x->stride[0] == 1 || x->shape.dim[0] <= 1);
}

/* A tensor of one dimension, or of none; anything else is DS_FLAT_NONE. */
static int flat_of(const struct optim *o, const struct pv *v, struct ds_flat *out,
                   struct err *why)
{
    struct torch_tensor x;
    int rc = torch_zip_tensor(o->f->zip, v, &x, why);

    *out = (struct ds_flat){.kind = DS_FLAT_NONE};
    if (rc <= 0)
        return rc;
    if ((!is_row(&x) && x.shape.nd > 0) || dtype_bits(x.dtype) % 8 != 0)
        return 0;
    *out = (struct ds_flat){
        .at = x.data + x.storage_offset * dtype_unit(x.dtype),
        .count = x.shape.nd > 0 ? x.shape.dim[0] : 1,
        .kind = x.packed         ? DS_FLAT_PACKED
                : x.shape.nd > 0 ? DS_FLAT_VECTOR
                                 : DS_FLAT_SCALAR,
        .dtype = (uint8_t)x.dtype,
        .flags = x.flags,
    };
    return 1;
}

static int take_path(struct optim *o, const char *path, struct err *e)
{
    return keyset_add(&o->taken, path, strlen(path)) < 0 ? err_nomem(e) : 0;
}

/* `g`: a group as this rank numbers it. */
static struct ds_flat *flat_at(const struct optim *o, uint32_t g, uint32_t slot)
{
    size_t first = o->order ? o->order[g] : g;

    return &o->p->rank[o->r].flat[first * o->p->nslots + slot];
}

/* ---- the weights ---- */

static int find_masters(const struct optim *o, struct pv *out, struct err *e)
{
    struct pv old;

    if (ds_get(&o->dict, o->masters, out) &&
        (out->kind == PV_LIST || out->kind == PV_TUPLE))
        return 0;
    if (ds_get(&o->dict, "local_sub_partitions_of_fp32_groups", &old)) {
        err_set(
            e, ENOTSUP,
            "%s: ZeRO 1 in sub-partitions (DeepSpeed until 0.3.16) is not supported",
            o->f->path);
        return err_hint(e, "flat partitions of stages 1, 2 and 3 are");
    }
    return err_set(e, EBADMSG, "%s: %s has no %s", o->f->path, outer, o->masters);
}

static int take_masters(struct optim *o, struct err *e)
{
    struct pv groups;
    char path[128];

    TRY(find_masters(o, &groups, e));
    if (pv_count(&groups) != o->p->ngroups)
        return err_set(e, EBADMSG, "%s has %zu groups, the first rank has %u",
                       o->f->path, pv_count(&groups), o->p->ngroups);
    for (uint32_t g = 0; g < o->p->ngroups; g++) {
        struct pv v = pv_at(&groups, g);
        struct ds_flat *flat = flat_at(o, g, DS_MASTER);
        struct err why = {0};

        if (flat_of(o, &v, flat, &why) < 0)
            return err_set(e, EBADMSG, "%s: group %u: %s", o->f->path, g, why.text);
        if (flat->kind != DS_FLAT_VECTOR)
            return err_set(e, EBADMSG, "%s: group %u is no %stensor of one dimension",
                           o->f->path, g,
                           flat->kind == DS_FLAT_PACKED ? "uncompressed " : "");
        snprintf(path, sizeof path, "%s.%s.%u", outer, o->masters, g);
        TRY(take_path(o, path, e));
    }
    return 0;
}

/* ---- states ---- */

static uint32_t slot_of(const struct ds_part *p, const char *name, size_t len)
{
    for (uint32_t i = DS_MASTER + 1; i < p->nslots; i++)
        if (strlen(p->slot[i]) == len && memcmp(p->slot[i], name, len) == 0)
            return i;
    return DS_MASTER;
}

/* Elements that DeepSpeed took off the end of this rank's weights; its states keep them. */
static bool padding_of(const struct optim *o, uint32_t g, uint64_t *out)
{
    struct pv list, one;

    if (!ds_get(&o->dict, "group_paddings", &list) || list.kind != PV_LIST ||
        g >= pv_count(&list))
        return false;
    one = pv_at(&list, g);
    return pv_u64(&one, out);
}

/* Has a state an element for each of the rank's weights? */
static bool is_of_weights(const struct optim *o, uint32_t g, const struct ds_flat *flat)
{
    const struct ds_flat *master = flat_at(o, g, DS_MASTER);
    size_t first = o->order ? o->order[g] : g;
    uint64_t padding, over;

    if (flat->kind != DS_FLAT_VECTOR || flat->count == master->count)
        return true;
    if (o->s->stage == 3 || flat->count < master->count)
        return false;
    if (!padding_of(o, g, &padding))
        return flat->count - master->count < 2 * o->p->count[first];
    if (padding <= flat->count)
        return flat->count - padding == master->count;
    /* group[:length - padding], of which Python counts a negative end from behind. */
    over = padding - flat->count;
    return master->count == (over < flat->count ? flat->count - over : 0);
}

/* One state of a group: "exp_avg". `prefix` is the group's path. */
static int take_state(struct optim *o, uint32_t g, const char *prefix,
                      const struct pv *key, const struct pv *value, struct err *e)
{
    CLEANUP(buf_release) struct buf path = {.max = TORCH_MAX_PATH};
    struct err why = {0};
    struct ds_flat flat;
    const char *name;
    uint32_t slot;
    size_t len;

    if (key->kind != PV_STR)
        return 0;
    name = pv_bytes(key, &len);
    slot = slot_of(o->p, name, len);
    if (slot == DS_MASTER || flat_of(o, value, &flat, &why) <= 0)
        return why.code == ENOMEM ? err_nomem(e) : 0;
    if (o->p->table[slot] && flat.kind == DS_FLAT_VECTOR)
        return 0;
    if (flat.count > flat_at(o, g, DS_MASTER)->count && !is_of_weights(o, g, &flat))
        return 0;
    *flat_at(o, g, slot) = flat;
    if (flat.kind == DS_FLAT_PACKED)
        return 0;
    buf_addf(&path, "%s.%s", prefix, o->p->slot[slot]);
    if (buf_failed(&path))
        return err_nomem(e);
    return take_path(o, path.data, e);
}

static int take_group(struct optim *o, uint32_t g, const char *prefix,
                      const struct pv *state, struct err *e)
{
    struct pv items;

    if (!torch_mapping(state, &items) || items.kind != PV_DICT)
        return 0;
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv key = pv_key_at(&items, i), value = pv_value_at(&items, i);

        TRY(take_state(o, g, prefix, &key, &value, e));
    }
    return 0;
}

/*
 * Calls fn for the state of each group: {"state": {g: {...}}}, or a list of them, which
 * "elastic" saves have.
 */
static int each_state(struct optim *o,
                      int (*fn)(struct optim *o, uint32_t g, const char *prefix,
                                const struct pv *state, struct err *e),
                      struct err *e)
{
    struct pv base, states, items, key, value;
    char prefix[128];
    bool list;
    uint64_t g;

    if (!ds_get(&o->dict, o->base, &base))
        return 0;
    list = base.kind == PV_LIST;
    items = base;
    if (!list && (!ds_get(&base, "state", &states) || !torch_mapping(&states, &items) ||
                  items.kind != PV_DICT))
        return 0;
    for (size_t i = 0; i < pv_count(&items); i++) {
        key =
            list ? (struct pv){.kind = PV_INT, .i = (int64_t)i} : pv_key_at(&items, i);
        value = list ? pv_at(&items, i) : pv_value_at(&items, i);
        if (!pv_u64(&key, &g) || g >= o->p->ngroups)
            continue;
        snprintf(prefix, sizeof prefix, "%s.%s%s.%" PRIu64, outer, o->base,
                 list ? "" : ".state", g);
        TRY(fn(o, (uint32_t)g, prefix, &value, e));
    }
    return 0;
}

/* The first rank tells which states there are. */
static int name_states(struct optim *o, uint32_t g, const char *prefix,
                       const struct pv *state, struct err *e)
{
    struct ds_part *p = o->p;
    struct err why = {0};
    struct ds_flat flat;
    struct pv items;

    (void)prefix;
    if (!torch_mapping(state, &items) || items.kind != PV_DICT)
        return 0;
    p->stated[g] = pv_count(&items) > 0;
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv key = pv_key_at(&items, i), value = pv_value_at(&items, i);
        const char *name;
        size_t len;

        if (key.kind != PV_STR || flat_of(o, &value, &flat, &why) <= 0)
            continue;
        name = pv_bytes(&key, &len);
        if (len == 0 || memchr(name, '\0', len) || slot_of(p, name, len) != DS_MASTER ||
            p->nslots == DS_MAX_STATES)
            continue;
        p->slot[p->nslots] = arena_memdup(o->s->arena, name, len);
        if (!p->slot[p->nslots++])
            return err_nomem(e);
    }
    return 0;
}

/*
 * Muon of stages 1 and 2 keeps the momentum of each parameter that a partition has any
 * element of, whole, one behind the other (0.19.8, stage_1_and_2.py,
 * _muon_momentum_buffer()); with an optimizer on the CPU that of the partition's elements.
 */
static bool is_muon(const struct optim *o, uint32_t g)
{
    struct pv base, groups, group, flag, offload, device;

    if (o->s->stage == 3 || o->p->count[g] == 1 || !ds_get(&o->dict, o->base, &base) ||
        !ds_get(&base, "param_groups", &groups) || groups.kind != PV_LIST ||
        g >= pv_count(&groups))
        return false;
    group = pv_at(&groups, g);
    if (!ds_get(&group, "use_muon", &flag) || flag.kind != PV_BOOL || !flag.b)
        return false;
    return !ds_zero_option(&o->p->root, "offload_optimizer", &offload) ||
           !ds_get_some(&offload, "device", &device) || device.kind != PV_STR ||
           !pv_str_is(&device, "cpu");
}

/*
 * Quantised states come with tables ("qmap1", "absmax1" of bitsandbytes), which have another
 * length: none of their elements is a parameter's. A name that is one in any group is one
 * in all, as a table may be as long as a group by chance.
 */
static int find_tables(struct optim *o, uint32_t g, const char *prefix UNUSED,
                       const struct pv *state, struct err *e)
{
    struct err why = {0};
    struct ds_flat flat;
    struct pv items;

    if (!torch_mapping(state, &items) || items.kind != PV_DICT)
        return 0;
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv key = pv_key_at(&items, i), value = pv_value_at(&items, i);
        const char *name;
        uint32_t slot;
        size_t len;

        if (key.kind != PV_STR)
            continue;
        name = pv_bytes(&key, &len);
        slot = slot_of(o->p, name, len);
        if (slot == DS_MASTER || flat_of(o, &value, &flat, &why) <= 0)
            continue;
        o->p->table[slot] = o->p->table[slot] || !is_of_weights(o, g, &flat) ||
                            (flat.kind == DS_FLAT_VECTOR && is_muon(o, g));
    }
    return why.code == ENOMEM ? err_nomem(e) : 0;
}

/* ---- what the first rank tells of all ---- */

static int take_stage(struct optim *o, uint64_t *stage, struct err *e)
{
    struct pv v;

    *stage = 1; /* BF16_Optimizer writes none; its layout is that of stage 1 */
    if (!ds_get(&o->dict, "zero_stage", &v))
        return 0;
    if (!ds_number(&v, stage))
        return err_set(e, EBADMSG, "%s: zero_stage is no number", o->f->path);
    if (*stage >= 1 && *stage <= MAX_STAGE)
        return 0;
    err_set(e, ENOTSUP, "%s: ZeRO stage %" PRIu64 " is not supported", o->f->path,
            *stage);
    return err_hint(e, "1, 2 and 3 are");
}

static int refuse_groups(const struct optim *o, struct err *e)
{
    struct pv v;

    if (!ds_get_some(&o->dict, "ds_zero_partition_groups", &v))
        return 0;
    err_set(e, ENOTSUP,
            "%s: groups that are partitioned over different ranks (AutoEP) "
            "are not supported",
            o->f->path);
    return err_hint(e, "convert it with DeepSpeed's ds_to_universal.py");
}

/* partition_count: a number, or a list of one a group. */
static int take_counts(struct optim *o, struct err *e)
{
    struct ds_part *p = o->p;
    uint64_t most = 0;
    char last[32] = "", lost[96] = "";
    struct pv v;
    bool list;

    p->count = arena_array(o->s->arena, MAX(p->ngroups, 1U), sizeof *p->count);
    if (!p->count)
        return err_nomem(e);
    if (!ds_get(&o->dict, "partition_count", &v))
        return err_set(e, EBADMSG, "%s: %s has no partition_count", o->f->path, outer);
    list = v.kind == PV_LIST || v.kind == PV_TUPLE;
    if (list && pv_count(&v) != p->ngroups)
        return err_set(e, EBADMSG, "%s: partition_count is of %zu groups, not %u",
                       o->f->path, pv_count(&v), p->ngroups);
    for (uint32_t g = 0; g < p->ngroups || (g == 0 && !list); g++) {
        struct pv one = list ? pv_at(&v, g) : v;
        uint64_t n;

        if (!pv_u64(&one, &n) || n == 0)
            return err_set(e, EBADMSG, "%s: partition_count is no count", o->f->path);
        most = MAX(most, n);
        if (g < p->ngroups)
            p->count[g] = n;
    }
    if (most == p->nranks || (list && p->ngroups == 0))
        return 0;
    p->incomplete = most > p->nranks;
    if (most > p->nranks + UINT64_C(1))
        snprintf(last, sizeof last, " to %" PRIu64, most - 1);
    if (p->incomplete)
        snprintf(lost, sizeof lost, "; rank %u%s of mp_rank_%02u is missing", p->nranks,
                 last, p->mp);
    err_set(e, EBADMSG,
            "partition_count says %" PRIu64
            " files of optimizer states, there are %u%s",
            most, p->nranks, lost);
    return err_hint(e, "a rank did not save, or files of an older save are there");
}

/* Does partition_count, where it is a list, say of each group what the first rank's says? */
static int compare_counts(const struct optim *o, struct pv *list, bool *same,
                          struct err *e)
{
    const struct ds_part *p = o->p;
    uint64_t n;

    *same = true;
    if (!ds_get(&o->dict, "partition_count", list) ||
        (list->kind != PV_LIST && list->kind != PV_TUPLE))
        return 0;
    if (pv_count(list) != p->ngroups)
        return err_set(e, EBADMSG, "%s: partition_count is of %zu groups, not %u",
                       o->f->path, pv_count(list), p->ngroups);
    for (uint32_t g = 0; g < p->ngroups; g++) {
        struct pv one = pv_at(list, g);

        if (!pv_u64(&one, &n))
            return err_set(e, EBADMSG, "%s: partition_count is no count", o->f->path);
        *same = *same && n == p->count[g];
    }
    return 0;
}

/*
 * Where layers of experts have several ep_size, DeepSpeed makes their groups in the order of
 * a set of texts, which Python shuffles in each process (DeepSpeed 0.19.8, moe/utils.py).
 * Groups of different ep_size are in different numbers of partitions.
 */
static int take_order(struct optim *o, struct err *e)
{
    struct pv list;
    bool same;

    if (!o->p->has_shapes) /* then nothing is taken from the groups */
        return 0;
    TRY(compare_counts(o, &list, &same, e));
    if (same)
        return 0;
    o->order = arena_array(o->s->arena, o->p->ngroups, sizeof *o->order);
    if (!o->order)
        return err_nomem(e);
    if (ds_layout_order(o->s, o->p, &o->dict, &list, o->order, e) < 0)
        return err_wrap(e, "%s", o->f->path);
    return 0;
}

static int first_rank(struct optim *o, struct err *e)
{
    struct ds_part *p = o->p;
    struct pv groups;

    TRY(find_masters(o, &groups, e));
    if (pv_count(&groups) > MAX_GROUPS)
        return err_set(e, EBADMSG, "%s: %zu groups", o->f->path, pv_count(&groups));
    p->ngroups = (uint32_t)pv_count(&groups);
    p->nslots = DS_MASTER + 1;
    p->stated = arena_array(o->s->arena, MAX(p->ngroups, 1U), sizeof *p->stated);
    if (!p->stated)
        return err_nomem(e);
    TRY(refuse_groups(o, e));
    TRY(take_counts(o, e));
    TRY(each_state(o, name_states, e));
    return 0;
}

/* ---- what is no parameter's ---- */

static int report_others(struct optim *o, struct err *e)
{
    CLEANUP(buf_release) struct buf prefix = {0};
    struct ds_entry x = {.f = o->f, .path = "", .role = ROLE_OTHER, .taken = &o->taken};

    buf_addf(&prefix, "%s:", o->f->path);
    if (buf_failed(&prefix))
        return err_nomem(e);
    x.prefix = prefix.data;
    TRY(ds_entry_tensors(o->s, &x, torch_zip_root(o->f->zip), e));
    if (x.tensors > 0 &&
        sink_warning(o->s->sink, "flat-state",
                     "%s: %" PRIu64 " tensors are of no parameter, their keys are "
                     "FILE:PATH",
                     o->f->path, x.tensors) < 0)
        return err_nomem(e);
    return 0;
}

static int add_object(struct optim *o, const char *at, const char *name,
                      const struct pv *v, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0}, path = {0}, prefix = {0};
    struct ds_entry x = {.f = o->f, .role = ROLE_OTHER, .taken = &o->taken};

    buf_addf(&key, "optimizer.%s", name);
    buf_addf(&path, "%s.%s", at, name);
    buf_addf(&prefix, "%s:", o->f->path);
    if (buf_failed(&key) || buf_failed(&path) || buf_failed(&prefix))
        return err_nomem(e);
    x.path = path.data;
    x.prefix = prefix.data;
    return ds_entry_object(o->s, &x, key.data, v, e);
}

static void write_name(const struct pv *key, char *dst, size_t size)
{
    size_t len;
    const char *text = pv_bytes(key, &len);

    ds_text(text, len, dst, size);
}

/* Does the state of a group hold anything but tensors? DeepSpeed's own Adam counts steps so. */
static bool group_has_values(const struct optim *o, const struct pv *group)
{
    struct torch_tensor x;
    struct err ignored = {0};
    struct pv items;

    if (!torch_mapping(group, &items))
        return true;
    for (size_t i = 0; items.kind == PV_DICT && i < pv_count(&items); i++) {
        struct pv value = pv_value_at(&items, i);

        if (torch_zip_tensor(o->f->zip, &value, &x, &ignored) == 0)
            return true;
    }
    return false;
}

/* The same for all groups, in a dict or a list. */
static bool has_values(const struct optim *o, const struct pv *states)
{
    bool list = states->kind == PV_LIST;
    struct pv groups = *states;

    if (!list && !torch_mapping(states, &groups))
        return true;
    for (size_t g = 0; groups.kind != PV_NONE && g < pv_count(&groups); g++) {
        struct pv group = list ? pv_at(&groups, g) : pv_value_at(&groups, g);

        if (group_has_values(o, &group))
            return true;
    }
    return false;
}

/* The base optimizer's "state" is what tensors are of, unless it holds other values too. */
static int base_objects(struct optim *o, const struct pv *base, struct err *e)
{
    CLEANUP(buf_release) struct buf at = {0};
    struct pv items;

    buf_addf(&at, "%s.%s", outer, o->base);
    if (buf_failed(&at))
        return err_nomem(e);
    if (!torch_mapping(base, &items) || items.kind != PV_DICT)
        return has_values(o, base) ? add_object(o, outer, o->base, base, e) : 0;
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv key = pv_key_at(&items, i), value = pv_value_at(&items, i);
        char name[200];

        if (key.kind != PV_STR || (pv_str_is(&key, "state") && !has_values(o, &value)))
            continue;
        write_name(&key, name, sizeof name);
        TRY(add_object(o, at.data, name, &value, e));
    }
    return 0;
}

/* All but what only says where tensors lie; the first rank's stands for all. */
static int report_objects(struct optim *o, struct err *e)
{
    static const char mappings[] = "param_slice_mappings";
    struct pv items;

    if (!torch_mapping(&o->dict, &items) || items.kind != PV_DICT)
        return 0;
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv key = pv_key_at(&items, i), value = pv_value_at(&items, i);
        char name[200];
        int rc;

        if (key.kind != PV_STR || pv_str_is(&key, o->masters) ||
            pv_str_is(&key, mappings))
            continue;
        write_name(&key, name, sizeof name);
        rc = pv_str_is(&key, o->base) ? base_objects(o, &value, e)
                                      : add_object(o, outer, name, &value, e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- one file ---- */

static void set_stage(struct optim *o, uint64_t stage)
{
    o->masters = stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
    o->base = stage == 3 ? outer : "base_optimizer_state";
}

static int same_stage(struct optim *o, uint64_t stage, struct err *e)
{
    if (o->r == 0 && o->p == o->s->part)
        o->s->stage = (int)stage;
    if ((int)stage == o->s->stage)
        return 0;
    return err_set(e, EBADMSG, "%s is of ZeRO stage %" PRIu64 ", others are of %d",
                   o->f->path, stage, o->s->stage);
}

static int read_dict(struct optim *o, struct err *e)
{
    struct pv root = torch_zip_root(o->f->zip);
    uint64_t stage;

    if (!ds_get_some(&root, outer, &o->dict))
        return err_set(e, EBADMSG, "%s has no %s", o->f->path, outer);
    TRY(take_stage(o, &stage, e));
    TRY(same_stage(o, stage, e));
    set_stage(o, stage);
    return o->r == 0 ? first_rank(o, e) : take_order(o, e);
}

static int read_rank(struct optim *o, struct err *e)
{
    struct ds_rank *rank = &o->p->rank[o->r];
    uint64_t n;

    TRY(read_dict(o, e));
    if (mul_overflows(o->p->ngroups, o->p->nslots, &n))
        return err_set(e, EBADMSG, "%s: too many groups", o->f->path);
    rank->path = o->f->path;
    rank->file = o->f->number;
    rank->flat = arena_array(o->s->arena, MAX(n, UINT64_C(1)), sizeof *rank->flat);
    if (!rank->flat)
        return err_nomem(e);
    TRY(take_masters(o, e));
    if (o->r == 0)
        TRY(each_state(o, find_tables, e));
    TRY(each_state(o, take_group, e));
    return report_others(o, e);
}

static int read_open(struct optim *o, struct err *e)
{
    struct ds_part *p = o->p;

    TRY(read_rank(o, e));
    if (o->r == 0 && p == o->s->part)
        TRY(report_objects(o, e));
    if (o->r == 0 && ds_layout_begin(o->s, p, &o->dict, e) < 0)
        return err_wrap(e, "%s", o->f->path);
    if (p->has_shapes && ds_layout_compare(o->s, p, o->r, o->order, &o->dict, e) < 0)
        return err_wrap(e, "%s", o->f->path);
    return 0;
}

struct reading {
    struct ds_scan *s;
    struct ds_part *p;
};

/* ds_file_fn */
static int read_file(void *user, size_t i, const struct torch_file *f, struct err *e)
{
    struct reading *x = user;
    struct optim o = {.s = x->s, .p = x->p, .r = (uint32_t)i, .f = f};
    int rc = read_open(&o, e);

    keyset_release(&o.taken);
    return rc;
}

int ds_optim_read(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    struct reading x = {s, p};

    if (p->nranks > MAX_RANKS)
        return err_set(e, EBADMSG, "%u ranks", p->nranks);
    p->rank = arena_array(s->arena, MAX(p->nranks, 1U), sizeof *p->rank);
    if (!p->rank)
        return err_nomem(e);
    for (uint32_t i = 0; i < p->nranks; i++)
        if (p->optim[i].dp != i) {
            p->incomplete = true;
            return err_set(e, EBADMSG,
                           "rank %u of the optimizer's files is missing (mp_rank_%02u)",
                           i, p->mp);
        }
    TRY(ds_notes_read(s, p, e));
    TRY(ds_each_file(s, p->optim, p->nranks, read_file, &x, e));
    return p->nranks > 0 && p->has_shapes ? ds_layout_end(s, p, e) : 0;
}
