/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_join_tensor.c - a tensor whose pieces are on tensor-parallel ranks. */
#include "index/formats/deepspeed/deepspeed_join.h"

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/ranks/rank_copies.h"

enum { CUT_MEMORY = 64 << 20 }; /* of one parameter's boxes, on all ranks */

int ds_join_begin(struct ds_join *j, struct err *e)
{
    j->arena = arena_new(CUT_MEMORY);
    j->local = j->arena ? arena_array(j->arena, j->s->tensor, sizeof *j->local) : NULL;
    j->runs = calloc(j->s->tensor, sizeof *j->runs);
    return j->local && j->runs ? 0 : err_nomem(e);
}

void ds_join_release(struct ds_join *j)
{
    for (uint32_t t = 0; j->runs && t < j->s->tensor; t++)
        ds_runs_release(&j->runs[t]);
    free(j->runs);
    arena_free(j->arena);
}

int ds_join_fault(struct ds_scan *s, const char *why, struct err *e)
{
    return sink_fault(s->sink, "%s", why) < 0 ? err_nomem(e) : 0;
}

/* ---- pieces to chunks ---- */

static const int64_t one_step[] = {1};

static struct chunk chunk_of(const struct ds_piece *piece, enum dtype dtype)
{
    return (struct chunk){.file = piece->file,
                          .flags = piece->flags,
                          .offset = piece->at,
                          .length = piece->count * dtype_unit(dtype),
                          .step = one_step};
}

static int add_piece(const struct ds_join *j, uint32_t t, size_t i, struct chunk *c,
                     struct err *e)
{
    const struct ds_piece *piece = &j->runs[t].piece[i];

    return rank_boxes_report_flat(j->s->sink, &j->cut.boxes[t].all, &j->cut.piece[t],
                                  piece->begin, piece->count, c, e);
}

static int add_pieces(const struct ds_join *j, uint32_t t, struct err *e)
{
    for (size_t i = 0; i < j->runs[t].count; i++) {
        struct chunk c = chunk_of(&j->runs[t].piece[i], j->dtype);

        TRY(add_piece(j, t, i, &c, e));
    }
    return 0;
}

/* Do all ranks have the same elements in their i-th pieces, as they are? */
static bool same_pieces(const struct ds_join *j)
{
    const struct ds_runs *first = &j->runs[0];

    for (uint32_t t = 0; t < j->s->tensor; t++) {
        if (j->runs[t].count != first->count)
            return false;
        for (size_t i = 0; i < first->count; i++) {
            const struct ds_piece *a = &first->piece[i], *b = &j->runs[t].piece[i];

            if (a->begin != b->begin || a->count != b->count || b->flags)
                return false;
        }
    }
    return true;
}

/* The i-th pieces of all ranks, of one encoding. */
static int add_copies(const struct ds_join *j, size_t i, enum chunk_encoding encoding,
                      struct err *e)
{
    CLEANUP(buf_release) struct buf list = {0};
    struct chunk c = chunk_of(&j->runs[0].piece[i], j->dtype);

    for (uint32_t t = 1; t < j->s->tensor; t++)
        rank_copies_add(&list, j->runs[t].piece[i].file, j->runs[t].piece[i].at);
    if (buf_failed(&list))
        return err_nomem(e);
    c.encoding = (uint8_t)encoding;
    c.param = arena_memdup(j->arena, list.data, list.len); /* until the tensor's end */
    if (!c.param)
        return err_nomem(e);
    c.param_len = (uint32_t)list.len;
    return add_piece(j, 0, i, &c, e);
}

static int add_all_copies(const struct ds_join *j, enum chunk_encoding encoding,
                          struct err *e)
{
    for (size_t i = 0; i < j->runs[0].count; i++)
        TRY(add_copies(j, i, encoding, e));
    return 0;
}

static int add_mean(const struct ds_join *j, struct err *e)
{
    if (!same_pieces(j) || !rank_sum_adds(j->dtype))
        return ds_join_fault(
            j->s,
            "it is the mean of what the ranks have, and those are cut in other "
            "places or are no plain floating point numbers",
            e);
    return add_all_copies(j, CHUNK_MEAN, e);
}

static const char *path_of(const struct ds_join *j, uint32_t file)
{
    for (uint32_t t = 0; t < j->s->tensor; t++) {
        const struct ds_part *p = &j->p[t];

        if (p->model.number == file)
            return p->model.path;
        for (uint32_t r = 0; p->rank && r < p->nranks; r++)
            if (p->rank[r].path && p->rank[r].file == file)
                return p->rank[r].path;
    }
    return NULL;
}

static struct ds_place place_of(const struct ds_join *j, uint32_t t)
{
    const struct ds_piece *piece = &j->runs[t].piece[0];

    return (struct ds_place){.path = path_of(j, piece->file),
                             .file = piece->file,
                             .at = piece->at,
                             .count = piece->count,
                             .dtype = j->dtype};
}

/*
 * Only its name says that it was cut: have the ranks other elements? Copies of a layer that
 * AutoTP left alone are alike.
 */
static int check_pieces(const struct ds_join *j, bool *others, struct err *e)
{
    *others = true;
    for (uint32_t t = 1; *others && j->runs[0].count > 0 && t < j->s->tensor; t++) {
        struct ds_place a = place_of(j, 0), b;
        int alike = 1;

        if (j->runs[t].count == 0)
            continue;
        b = place_of(j, t);
        if (a.path && b.path)
            alike = ds_probe_alike(j->s, &a, &b, (size_t)MIN(a.count, b.count), e);
        if (alike < 0)
            return alike;
        *others = !alike;
    }
    return 0;
}

static int add_chunks(const struct ds_join *j, struct err *e)
{
    bool others = true;

    if (!j->cut.why[0] && j->cut.by_name)
        TRY(check_pieces(j, &others, e));
    if (!others)
        return ds_join_fault(
            j->s,
            "AutoTP of DeepSpeed 0.18.9 to 0.19.5 does not note whether "
            "it was cut, and the ranks have much the same elements",
            e);
    if (j->cut.why[0])
        return ds_join_fault(j->s, j->cut.why, e);
    if (j->cut.kind == DS_CUT_MEAN)
        return add_mean(j, e);
    if (j->cut.kind == DS_CUT_SAME)
        return same_pieces(j) ? add_all_copies(j, CHUNK_COPIES, e)
                              : add_pieces(j, 0, e);
    for (uint32_t t = 0; t < j->s->tensor; t++)
        TRY(add_pieces(j, t, e));
    return 0;
}

/* ---- one tensor ---- */

const char ds_join_lacks[] = "a tensor-parallel rank lacks its piece";

int ds_join_report(struct ds_join *j, const char *name, size_t len, const char *lack,
                   struct sink_tensor *t, ds_join_runs_fn *fn, const void *what,
                   struct err *e)
{
    struct ds_scan *s = j->s;

    if (lack)
        j->cut = (struct ds_cut){.whole = j->local[0]};
    else if ((j->rule == RANK_UNKNOWN
                  ? ds_cut_find(&s->notes, j->arena, name, len, j->local, &j->cut, e)
                  : ds_cut_by_rule(&s->notes, j->arena, j->rule, j->local, &j->cut,
                                   e)) < 0)
        return -e->code;
    t->dtype = j->dtype;
    t->shape = &j->cut.whole;
    TRY(ds_begin(s, j->p->model.path, t, e));
    for (uint32_t r = 0; !lack && r < s->tensor; r++)
        TRY(fn(j, what, r, e));
    TRY(lack ? ds_join_fault(s, lack, e) : add_chunks(j, e));
    return sink_tensor_end(s->sink, e);
}
