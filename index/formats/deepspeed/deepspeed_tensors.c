/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_tensors.c - parameters and states out of the flat groups. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/formats/flat_boxes.h"

void ds_shape_of(const struct ds_param *x, struct shape *out)
{
    out->nd = x->nd;
    memcpy(out->dim, x->dim, x->nd * sizeof *x->dim);
}

/* After sink_fault(), which fails only for lack of memory. */
static int faulted(int r, struct err *e)
{
    return r < 0 ? err_nomem(e) : 0;
}

int ds_add_piece(struct ds_scan *s, const struct shape *shape, enum dtype dtype,
                 const struct ds_piece *piece, struct err *e)
{
    unsigned unit = dtype_unit(dtype);
    struct flat_boxes boxes;
    struct flat_box box;
    struct chunk c = {.file = piece->file, .flags = piece->flags};

    if (!flat_boxes_begin(&boxes, shape, piece->begin, piece->begin + piece->count))
        return faulted(sink_fault(s->sink, "a piece is not within the tensor"), e);
    c.start = box.start;
    c.size = box.size;
    while (flat_boxes_next(&boxes, &box)) {
        c.length = unit;
        for (uint32_t k = 0; k < shape->nd; k++)
            c.length *= box.size[k];
        if (mul_overflows(box.first, unit, &c.offset) ||
            add_overflows(c.offset, piece->at, &c.offset))
            return faulted(sink_fault(s->sink, "a piece lies beyond all files"), e);
        TRY(sink_chunk(s->sink, &c, e));
    }
    return 0;
}

int ds_begin(struct ds_scan *s, const char *file, const struct sink_tensor *t,
             struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    struct sink_tensor other = *t;
    int rc = sink_tensor_begin(s->sink, t, e);

    if (rc != -EEXIST)
        return rc;
    *e = (struct err){0};
    buf_addf(&key, "%s:", file);
    buf_add(&key, t->key, t->key_len);
    if (buf_failed(&key))
        return err_nomem(e);
    other.key = key.data;
    other.key_len = key.len;
    other.role = ROLE_OTHER;
    return sink_tensor_begin(s->sink, &other, e);
}

/* ---- pieces ---- */

/* One parameter (on one set of ranks) in one slot: its weights, or a state. */
struct job {
    struct ds_scan *s;
    const struct ds_part *p;
    const struct ds_param *x;
    uint32_t slot, set;
    uint64_t shift; /* elements of the tensor that are other sets' */
    struct shape shape;
    enum dtype dtype;
    struct ds_runs *runs; /* collects pieces; NULL: they are reported */
};

static const struct ds_flat *flat_of(const struct job *j, uint32_t r, uint32_t g)
{
    return &j->p->rank[r].flat[(size_t)g * j->p->nslots + j->slot];
}

static const char *slot_name(const struct job *j)
{
    return j->slot == DS_MASTER ? "weights" : j->p->slot[j->slot];
}

/* Elements [at, at + count) of a rank's group are `begin`... of the parameter. */
static int add_run(const struct job *j, uint32_t r, uint32_t g, uint64_t at,
                   uint64_t begin, uint64_t count, struct err *e)
{
    const struct ds_flat *flat = flat_of(j, r, g);
    struct ds_piece piece = {.file = j->p->rank[r].file,
                             .begin = j->shift + begin,
                             .count = count,
                             .flags = flat->flags};

    if (flat->kind != DS_FLAT_VECTOR)
        return faulted(sink_fault(j->s->sink, "%s: group %u has no %s%s",
                                  j->p->rank[r].path, g,
                                  flat->kind == DS_FLAT_PACKED ? "uncompressed " : "",
                                  slot_name(j)),
                       e);
    if (flat->dtype != j->dtype || range_outside(at, count, flat->count))
        return faulted(sink_fault(j->s->sink,
                                  "%s: %s of group %u is %" PRIu64
                                  " elements of %s, which is too "
                                  "short or another type",
                                  j->p->rank[r].path, slot_name(j), g, flat->count,
                                  dtype_name((enum dtype)flat->dtype)),
                       e);
    if (mul_overflows(at, dtype_unit(j->dtype), &piece.at) ||
        add_overflows(piece.at, flat->at, &piece.at))
        return faulted(sink_fault(j->s->sink, "a piece lies beyond all files"), e);
    if (j->runs)
        return ds_runs_add(j->runs, &piece, e);
    return ds_add_piece(j->s, &j->shape, j->dtype, &piece, e);
}

/* Stages 1 and 2: one range of the group, over the ranks whose partitions it crosses. */
static int add_range(const struct job *j, struct err *e)
{
    uint32_t g = j->x->group, sets = ds_sets(j->p, g);
    uint64_t length = j->p->rank[j->set].flat[(size_t)g * j->p->nslots].count;
    uint64_t begin = 0;

    while (begin < j->x->elements) {
        uint64_t at = j->x->at + begin, k = j->p->count[g] > 1 ? at / length : 0;
        uint64_t n = j->x->elements - begin;

        if (j->p->count[g] > 1)
            n = MIN(n, length - at % length);
        TRY(add_run(j, (uint32_t)(j->set + k * sets), g, at - k * length, begin, n, e));
        begin += n;
    }
    return 0;
}

/* The sub-group that an element of a rank lies in. */
static uint32_t group_at(const struct ds_part *p, uint64_t at)
{
    uint32_t lo = 0, hi = p->ngroups;

    while (lo + 1 < hi) {
        uint32_t mid = lo + (hi - lo) / 2;

        if (p->begin[mid] <= at)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* Stage 3: the same elements on each rank, which may cross sub-groups. */
static int add_part(const struct job *j, uint32_t r, uint64_t begin, uint64_t count,
                    struct err *e)
{
    uint64_t at = j->x->at;

    while (count > 0) {
        uint32_t g = group_at(j->p, at);
        uint64_t n = MIN(count, j->p->begin[g + 1] - at);

        if (n == 0)
            return faulted(sink_fault(j->s->sink, "it is in no sub-group"), e);
        TRY(add_run(j, r, g, at - j->p->begin[g], begin, n, e));
        at += n;
        begin += n;
        count -= n;
    }
    return 0;
}

static int add_parts(const struct job *j, struct err *e)
{
    uint64_t n = j->x->elements, part = n / j->p->nranks + (n % j->p->nranks > 0);

    for (uint32_t r = 0; r < j->p->nranks && r * part < n; r++)
        TRY(add_part(j, r, r * part, MIN(part, n - r * part), e));
    return 0;
}

/* AutoEP: the experts of each set of ranks, one behind the other. */
static int add_sets(const struct job *j, struct err *e)
{
    struct job one = *j;

    for (one.set = 0; one.set < j->x->joined; one.set++) {
        one.shift = one.set * j->x->elements; /* ds_autoep_join() has multiplied them */
        TRY(add_range(&one, e));
    }
    return 0;
}

static int add_all(const struct job *j, struct err *e)
{
    if (j->x->joined > 0)
        return add_sets(j, e);
    return j->s->stage == 3 ? add_parts(j, e) : add_range(j, e);
}

/* The sizes of the tensor that is shown. */
static void whole_shape(const struct ds_param *x, struct shape *out)
{
    ds_shape_of(x, out);
    if (x->joined > 0)
        out->dim[0] *= x->joined;
}

/* Where the parameter begins: the group that tells what states it has. */
static const struct ds_flat *first_flat(const struct job *j)
{
    if (j->s->stage != 3)
        return flat_of(j, j->set, j->x->group);
    return j->p->ngroups > 0 ? flat_of(j, 0, group_at(j->p, j->x->at)) : NULL;
}

/* ---- pieces for others ---- */

int ds_runs_add(struct ds_runs *r, const struct ds_piece *piece, struct err *e)
{
    if (!VEC_ROOM(r->piece, r->count, r->cap))
        return err_nomem(e);
    r->piece[r->count++] = *piece;
    return 0;
}

void ds_runs_release(struct ds_runs *r)
{
    free(r->piece);
    *r = (struct ds_runs){0};
}

const struct ds_flat *ds_first_flat(struct ds_scan *s, const struct ds_part *p,
                                    const struct ds_param *x, uint32_t slot)
{
    const struct job j = {.s = s, .p = p, .x = x, .slot = slot};

    return first_flat(&j);
}

int ds_runs_collect(struct ds_scan *s, const struct ds_part *p,
                    const struct ds_param *x, uint32_t slot, enum dtype dtype,
                    struct ds_runs *out, struct err *e)
{
    struct job j = {.s = s, .p = p, .x = x, .slot = slot, .dtype = dtype, .runs = out};

    ds_shape_of(x, &j.shape);
    return add_all(&j, e);
}

/* ---- the weights ---- */

static int report_named(struct ds_scan *s, const struct ds_part *p,
                        const struct ds_param *x, uint32_t set, const char *name,
                        size_t len, struct err *e)
{
    struct job j = {.s = s, .p = p, .x = x, .slot = DS_MASTER, .set = set};
    const struct ds_flat *first = p->lost ? NULL : first_flat(&j);
    struct sink_tensor t = {.key = name,
                            .key_len = len,
                            .part = s->how->part,
                            .role = s->how->weights,
                            .shape = &j.shape};

    whole_shape(x, &j.shape);
    t.dtype = j.dtype = first ? (enum dtype)first->dtype : DTYPE_F32;
    TRY(ds_begin(s, p->model.path, &t, e));
    if (p->lost && sink_fault(s->sink, "%s", p->lost) < 0)
        return err_nomem(e);
    if (!p->lost)
        TRY(add_all(&j, e));
    return sink_tensor_end(s->sink, e);
}

/* Stages of a pipeline that are tied have copies of one parameter. */
static int note_copy(struct ds_scan *s, const struct ds_part *p, struct ds_param *x,
                     struct err *e)
{
    const struct ds_param *first = NULL;
    char text[200];

    x->elsewhere = true;
    for (const struct ds_part *q = s->part; q < p && !first; q++)
        first = ds_param_find(q, x->name, x->len);
    if (first && first->nd == x->nd &&
        memcmp(first->dim, x->dim, x->nd * sizeof *x->dim) == 0)
        return 0;
    return err_set(e, EBADMSG, "%s: %s has another shape on another rank",
                   p->model.path, ds_text(x->name, x->len, text, sizeof text));
}

static int report_master(struct ds_scan *s, const struct ds_part *p, struct ds_param *x,
                         uint32_t set, struct err *e)
{
    CLEANUP(buf_release) struct buf name = {0};
    int seen;

    TRY(ds_expert_name(p, x, set, &name, e));
    seen = ds_see(s, name.data ? name.data : "", name.len, e);
    if (seen < 0)
        return seen;
    if (seen == 0)
        return p->lost ? 0 : note_copy(s, p, x, e);
    return report_named(s, p, x, set, name.data ? name.data : "", name.len, e);
}

int ds_report_alias(struct ds_scan *s, const struct ds_part *p,
                    const struct ds_param *x, const char *name, size_t len,
                    struct err *e)
{
    int seen = ds_see(s, name, len, e);

    return seen <= 0 ? seen : report_named(s, p, x, 0, name, len, e);
}

static uint32_t sets_of(const struct ds_scan *s, const struct ds_part *p,
                        const struct ds_param *x)
{
    return s->stage == 3 || x->joined > 0 || p->lost ? 1 : ds_sets(p, x->group);
}

int ds_report_masters(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    for (size_t i = 0; i < p->nparams; i++)
        for (uint32_t set = 0; set < sets_of(s, p, &p->param[i]); set++)
            TRY(report_master(s, p, &p->param[i], set, e));
    return 0;
}

/* ---- states ---- */

/* "step": one number for the whole group, the same on all ranks. */
static int add_scalar(struct job *j, const struct ds_flat *flat, uint32_t file,
                      struct sink_tensor *t, struct err *e)
{
    static const struct shape scalar = {.nd = 0};
    const struct ds_piece piece = {
        .file = file, .at = flat->at, .count = 1, .flags = flat->flags};

    t->shape = &scalar;
    TRY(ds_begin(j->s, j->p->rank[j->set].path, t, e));
    TRY(ds_add_piece(j->s, &scalar, t->dtype, &piece, e));
    return sink_tensor_end(j->s->sink, e);
}

static int report_state(struct job *j, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    const struct ds_flat *first = first_flat(j);
    struct sink_tensor t = {.part = j->s->how->part, .role = ROLE_OPTIMIZER};

    if (!first || (first->kind != DS_FLAT_VECTOR && first->kind != DS_FLAT_SCALAR))
        return 0;
    buf_clear(&j->s->key);
    TRY(ds_expert_name(j->p, j->x, j->set, &key, e));
    buf_adds(&j->s->key, "optimizer.state.");
    buf_add(&j->s->key, key.data, key.len);
    buf_addf(&j->s->key, ".%s", j->p->slot[j->slot]);
    if (buf_failed(&j->s->key))
        return err_nomem(e);
    t.key = j->s->key.data;
    t.key_len = j->s->key.len;
    t.dtype = j->dtype = (enum dtype)first->dtype;
    t.shape = &j->shape;
    if (first->kind == DS_FLAT_SCALAR)
        return add_scalar(j, first, j->p->rank[j->set].file, &t, e);
    TRY(ds_begin(j->s, j->p->rank[j->set].path, &t, e));
    TRY(add_all(j, e));
    return sink_tensor_end(j->s->sink, e);
}

static int report_states_of(struct ds_scan *s, struct ds_part *p,
                            const struct ds_param *x, uint32_t set, struct err *e)
{
    struct job j = {.s = s, .p = p, .x = x, .set = set};

    whole_shape(x, &j.shape);
    for (j.slot = DS_MASTER + 1; j.slot < p->nslots; j.slot++)
        TRY(report_state(&j, e));
    return 0;
}

int ds_report_states(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    for (size_t i = 0; i < p->nparams; i++)
        for (uint32_t set = 0;
             !p->param[i].elsewhere && set < sets_of(s, p, &p->param[i]); set++)
            TRY(report_states_of(s, p, &p->param[i], set, e));
    return 0;
}
