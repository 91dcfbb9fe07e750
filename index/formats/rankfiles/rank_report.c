/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/rank_report.c - full tensors out of the pieces of all ranks. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/vec.h"
#include "index/formats/rankfiles/rank_set_priv.h"

/* What is told at the end, with an example of each. */
struct oddity {
    uint64_t count;
    const struct rank_entry *first;
};

struct report {
    struct rank_set *s;
    bool sliced;                     /* plain tensors with dimensions are slices */
    const struct rank_piece **piece; /* those of one tensor, sorted */
    size_t cap;
    struct oddity slices, buffers, replicas;
};

static void note(struct oddity *o, const struct rank_entry *t)
{
    if (o->count++ == 0)
        o->first = t;
}

/* After sink_fault(), which fails only for lack of memory. */
static int faulted(int r, struct err *e)
{
    return r < 0 ? err_nomem(e) : 0;
}

/* ---- what plain tensors are ---- */

/* Of the same bytes in all files; `of` is -1 where nothing tells. */
static bool is_same_everywhere(const struct rank_set *s, const struct rank_entry *t)
{
    if (t->npieces != rank_set_world(s))
        return false;
    for (const struct rank_piece *p = t->piece; p; p = p->next)
        if (rank_piece_equal(t->piece, p) != 1)
            return false;
    return true;
}

/*
 * FSDP 1's LOCAL_STATE_DICT: the flattened parameter of a unit, with use_orig_params the
 * slices of it beside, under the parameters' names.
 */
static bool has_flat_param(const struct rank_set *s)
{
    static const char *const names[] = {"_flat_param", "flat_param"};

    for (const struct rank_entry *t = s->entry; t; t = t->next) {
        const char *dot = strrchr(t->path, '.');
        const char *last = dot ? dot + 1 : t->path;

        if (t->distributed &&
            (strcmp(last, names[0]) == 0 || strcmp(last, names[1]) == 0))
            return true;
    }
    return false;
}

/*
 * A model without any distributed parameter, of several ranks: whole where all of it is the
 * same in all files. One tensor that is the same proves nothing: slices of ones are.
 */
static bool is_sliced(const struct rank_set *s)
{
    if (rank_set_world(s) == 1)
        return false;
    if (s->how->optimizer)
        return true;
    if (s->distributed && !has_flat_param(s))
        return false;
    for (const struct rank_entry *t = s->entry; t; t = t->next)
        if (!t->distributed && !t->loose && !is_same_everywhere(s, t))
            return true;
    return false;
}

/* Is each rank's tensor shown as it is? */
static bool is_slice(const struct report *r, const struct rank_entry *t)
{
    if (t->distributed || (rank_set_world(r->s) == 1 && !r->s->how->own))
        return false;
    if (r->s->how->own)
        return true;
    if (t->loose || t->uneven || rank_set_is_flat(r->s))
        return true;
    return r->sliced && (t->nd > 0 || !r->s->how->optimizer);
}

/* ---- one tensor ---- */

static struct rank_set_place place_of(const struct report *r,
                                      const struct rank_entry *t)
{
    const struct rank_set_how *how = r->s->how;
    struct rank_set_place place = {.part = how->part, .role = how->role};

    if (how->place)
        how->place(how->user, t->path, t->len, &place);
    if (t->loose)
        place.role = ROLE_OTHER;
    return place;
}

static int begin(const struct report *r, const struct rank_entry *t, const char *key,
                 size_t len, struct err *e)
{
    const struct rank_set_place place = place_of(r, t);
    static const struct shape none = {.nd = 1};
    bool known = t->dtype != DTYPE_NONE;
    struct shape shape = {.nd = t->nd};
    struct sink_tensor out = {.key = key,
                              .key_len = len,
                              .part = place.part,
                              .dtype = known ? t->dtype : DTYPE_U8,
                              .shape = known ? &shape : &none,
                              .role = place.role};

    if (known)
        memcpy(shape.dim, t->dim, t->nd * sizeof *t->dim);
    return sink_tensor_begin(r->s->sink, &out, e);
}

/* The whole tensor lies in one place. */
static int add_whole(const struct report *r, const struct rank_piece *p,
                     const struct rank_set_place *place, const char *key, size_t len,
                     struct err *e)
{
    struct sink_tensor out = {
        .key = key, .key_len = len, .part = place->part, .role = place->role};
    struct torch_tensor x;

    rank_piece_open(p, &x);
    return torch_file_tensor(r->s->sink, &r->s->file[p->file].file, &x, &out, e);
}

/* Another tensor of that name is there already: it is told, and this one is not shown. */
static int doubled(const struct report *r, const char *key, int rc, struct err *e)
{
    if (rc != -EEXIST)
        return rc;
    *e = (struct err){0};
    return faulted(sink_warning(r->s->sink, "duplicate-key",
                                "%s: another tensor has that key; it is not shown",
                                key),
                   e);
}

static int add_faulty(const struct report *r, const struct rank_entry *t,
                      const char *key, size_t len, struct err *e)
{
    TRY(begin(r, t, key, len, e));
    if (sink_fault(r->s->sink, "%s", t->why) < 0)
        return err_nomem(e);
    return sink_tensor_end(r->s->sink, e);
}

/* ---- pieces ---- */

static int compare_numbers(const uint64_t *a, const uint64_t *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (a[i] != b[i])
            return a[i] < b[i] ? -1 : 1;
    return 0;
}

/* By box; of one box by file. */
static int compare_pieces(const void *a, const void *b)
{
    const struct rank_piece *x = *(const struct rank_piece *const *)a,
                            *y = *(const struct rank_piece *const *)b;
    int r = compare_numbers(x->number, y->number, 2 * (size_t)x->nd);

    return r ? r : (x->file > y->file) - (x->file < y->file);
}

static bool is_empty(const struct rank_piece *p)
{
    for (uint32_t k = 0; k < p->nd; k++)
        if (rank_piece_size(p)[k] == 0)
            return true;
    return false;
}

static int grow(struct report *r, size_t n, struct err *e)
{
    return VEC_ROOM_FOR(r->piece, n, r->cap) ? 0 : err_nomem(e);
}

/* Those that hold something, each box once; copies of a box are the same. */
static int sort_pieces(struct report *r, const struct rank_entry *t, size_t *n,
                       struct err *e)
{
    bool differ = false;
    size_t all = 0, kept = 0;

    TRY(grow(r, t->npieces, e));
    for (const struct rank_piece *p = t->piece; p; p = p->next)
        if (!is_empty(p))
            r->piece[all++] = p;
    if (all > 0)
        qsort(r->piece, all, sizeof *r->piece, compare_pieces);
    for (size_t i = 0; i < all; i++) {
        const struct rank_piece *p = r->piece[i];

        if (kept == 0 || compare_numbers(r->piece[kept - 1]->number, p->number,
                                         2 * (size_t)p->nd) != 0)
            r->piece[kept++] = p;
        else
            differ |= rank_piece_equal(r->piece[kept - 1], p) == 0;
    }
    if (differ)
        note(&r->replicas, t);
    *n = kept;
    return 0;
}

/* The elements that pieces hold, which do not overlap if all is well. */
static uint64_t elements(const struct rank_piece *const *piece, size_t n)
{
    uint64_t sum = 0, one;

    for (size_t i = 0; i < n; i++) {
        one = 1;
        for (uint32_t k = 0; k < piece[i]->nd; k++)
            one *= rank_piece_size(piece[i])[k]; /* below 2^63: it was read */
        if (add_overflows(sum, one, &sum))
            return UINT64_MAX;
    }
    return sum;
}

/* A hole has its reason when files are missing. */
static int tell_missing(const struct report *r, const struct rank_entry *t, size_t n,
                        struct err *e)
{
    const struct rank_set *s = r->s;
    const char *example = NULL;
    uint64_t lost = s->missing, whole = 1;

    for (size_t i = 0; i < s->nfiles; i++) {
        if (!s->file[i].why)
            continue;
        lost++;
        example = example ? example : s->file[i].path;
    }
    for (uint32_t k = 0; k < t->nd; k++)
        whole *= t->dim[k];
    if (lost == 0 || elements(r->piece, n) >= whole)
        return 0;
    return faulted(sink_fault(s->sink,
                              "parts of it are in %" PRIu64 " of %" PRIu64
                              " ranks' files that are missing or damaged%s%.200s",
                              lost, rank_set_world(s), example ? ", as " : "",
                              example ? example : ""),
                   e);
}

/* A deflated storage needs a parameter, which lasts as long as the set. */
static int add_one(const struct report *r, const struct rank_piece *p, struct err *e)
{
    struct rank_set *s = r->s;
    struct torch_tensor x;
    char *param = NULL;

    rank_piece_open(p, &x);
    if (x.packed) {
        param = arena_alloc(s->arena, TORCH_MAX_PARAM);
        if (!param)
            return err_nomem(e);
        torch_file_param(&x, param);
    }
    return torch_file_piece(s->sink, &s->file[p->file].file, &x, rank_piece_start(p),
                            param, e);
}

static int add_pieces(const struct report *r, const struct rank_entry *t, size_t n,
                      struct err *e)
{
    for (size_t i = 0; i < n; i++)
        TRY(add_one(r, r->piece[i], e));
    return tell_missing(r, t, n, e);
}

/* Is one piece all of it? */
static bool is_alone(const struct rank_entry *t, const struct rank_piece *p)
{
    return compare_numbers(rank_piece_size(p), t->dim, t->nd) == 0;
}

static int add_merged(struct report *r, const struct rank_entry *t, const char *key,
                      size_t len, struct err *e)
{
    const struct rank_set_place place = place_of(r, t);
    size_t n = 0;

    TRY(sort_pieces(r, t, &n, e));
    if (n == 1 && is_alone(t, r->piece[0]))
        return add_whole(r, r->piece[0], &place, key, len, e);
    TRY(begin(r, t, key, len, e));
    TRY(add_pieces(r, t, n, e));
    return sink_tensor_end(r->s->sink, e);
}

/* ---- plain tensors ---- */

static int add_slices(struct report *r, const struct rank_entry *t, struct err *e)
{
    const struct rank_set *s = r->s;
    struct rank_set_place place = place_of(r, t);
    CLEANUP(buf_release) struct buf key = {0};

    if (place.role != ROLE_OPTIMIZER)
        place.role = ROLE_OTHER;
    if (!t->loose && !s->how->own)
        note(&r->slices, t);
    for (const struct rank_piece *p = t->piece; p; p = p->next) {
        buf_clear(&key);
        buf_addf(&key, "%s:", s->file[p->file].path);
        buf_add(&key, t->path, t->len);
        if (buf_failed(&key))
            return err_nomem(e);
        TRY(doubled(r, key.data, add_whole(r, p, &place, key.data, key.len, e), e));
    }
    return 0;
}

/* The same on all ranks; where it is not, the first one is what torch.load of it gives. */
static int add_replicated(struct report *r, const struct rank_entry *t, const char *key,
                          size_t len, struct err *e)
{
    const struct rank_set_place place = place_of(r, t);

    for (const struct rank_piece *p = t->piece->next; p; p = p->next) {
        if (rank_piece_equal(t->piece, p) == 0) {
            note(&r->buffers, t);
            break;
        }
    }
    return add_whole(r, t->piece, &place, key, len, e);
}

/* ---- all tensors ---- */

static int report_tensor(struct report *r, const struct rank_entry *t, struct err *e)
{
    const struct rank_set_how *how = r->s->how;
    CLEANUP(buf_release) struct buf key = {0};
    int rc;

    if (!t->why && is_slice(r, t))
        return add_slices(r, t, e);
    if ((how->rename ? how->rename(how->user, t->path, t->len, &key)
                     : buf_add(&key, t->path, t->len)) < 0 ||
        buf_failed(&key))
        return err_nomem(e);
    if (!key.data)
        buf_adds(&key, "");
    if (t->why)
        rc = add_faulty(r, t, key.data, key.len, e);
    else if (t->distributed)
        rc = add_merged(r, t, key.data, key.len, e);
    else
        rc = add_replicated(r, t, key.data, key.len, e);
    return doubled(r, key.data, rc, e);
}

static int tell_oddities(const struct report *r, struct err *e)
{
    const struct rank_set *s = r->s;
    int rc = 0;

    if (r->slices.count > 0)
        rc = sink_warning(
            s->sink, s->how->optimizer ? "flat-optimizer" : "unknown-cut",
            "%" PRIu64 " tensors, as %s, are each rank's own slices, and nothing "
            "tells how they were cut%s: shown for each rank as FILE:PATH, as stored",
            r->slices.count, r->slices.first->path,
            rank_set_is_flat(s) ? " (FSDP 1's flattened parameters)" : "");
    if (rc == 0 && r->buffers.count > 0)
        rc = sink_warning(s->sink, "ranks-differ",
                          "%" PRIu64 " tensors that are not distributed, as %s, "
                          "differ between ranks: the first rank's are shown",
                          r->buffers.count, r->buffers.first->path);
    if (rc == 0 && r->replicas.count > 0)
        rc = sink_warning(s->sink, "replicas-differ",
                          "%" PRIu64 " tensors, as %s, have copies of parts that "
                          "differ: the first rank's are shown",
                          r->replicas.count, r->replicas.first->path);
    return faulted(rc, e);
}

int rank_set_report(struct rank_set *s, struct err *e)
{
    struct report r = {.s = s, .sliced = is_sliced(s)};
    int rc = 0;

    for (const struct rank_entry *t = s->entry; rc == 0 && t; t = t->next)
        rc = report_tensor(&r, t, e);
    free(r.piece);
    return rc < 0 ? rc : tell_oddities(&r, e);
}
