/* SPDX-License-Identifier: MIT */
/* index/cover.c - proves that boxes neither overlap nor leave a hole. */
#include "index/cover.h"

#include <errno.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/vec.h"

/*
 * Overlap: a group of boxes is cut along a dimension wherever no box crosses, and each
 * part again along another dimension, as with a paper cutter, until the parts are single
 * boxes. Grids, shards of rows or columns and shards of shards all fall apart so. What
 * no cut separates (a pinwheel, or boxes that do overlap) is compared in pairs, those
 * that meet in the dimension where fewest do.
 *
 * Hole: without an overlap the volumes add up to the tensor's exactly when nothing is
 * missing. Else the first slice (of the first dimension) whose cross-sections do not add
 * up holds the first hole; then the first row of that slice, and so on.
 */
enum {
    /*
     * Work that is granted whatever the number of boxes: visits of a box by a cut or
     * comparisons of two, 0.1 to 0.3 s.
     */
    BUDGET_FIXED = 16 << 20,
    /* And for each box; regular layouts of 8 dimensions need fewer. */
    BUDGET_EACH = 16,
};

/* Box i in one dimension: [lo, hi). */
struct edge {
    uint64_t lo, hi;
    size_t i;
};

/* Boxes edge[from..to) are still together after a cut along `dim`. */
struct group {
    size_t from, to;
    uint32_t dim;
};

struct cover {
    const struct shape *units;
    const struct chunk *const *box;
    struct edge *edge; /* each box once; the boxes of a group are neighbours */
    struct group *todo;
    size_t ntodo, cap;
    uint64_t budget;
};

int box_format(const struct chunk *c, uint32_t nd, struct buf *out)
{
    struct shape start = {.nd = nd}, size = {.nd = nd};

    for (uint32_t k = 0; k < nd; k++) {
        start.dim[k] = c->start[k];
        size.dim[k] = c->size[k];
    }
    shape_format(&start, out);
    buf_addc(out, '+');
    return shape_format(&size, out);
}

static int overlap_err(const struct cover *v, size_t i, size_t j, struct err *e)
{
    struct buf text = {.max = 8192};

    if (i > j) {
        size_t swap = i;

        i = j;
        j = swap;
    }
    box_format(v->box[i], v->units->nd, &text);
    buf_adds(&text, " and ");
    if (box_format(v->box[j], v->units->nd, &text) < 0)
        err_set(e, EBADMSG, "chunks %zu and %zu overlap", i, j);
    else
        err_set(e, EBADMSG, "chunks at %s overlap", text.data);
    buf_release(&text);
    return -EBADMSG;
}

/* Takes `work` out of the budget. */
static int spend(struct cover *v, uint64_t work, struct err *e)
{
    if (work > v->budget)
        return err_set(e, EBADMSG,
                       "chunks lie too irregularly to be checked for overlap");
    v->budget -= work;
    return 0;
}

static int by_lo(const void *a, const void *b)
{
    const struct edge *x = a, *y = b;

    if (x->lo != y->lo)
        return x->lo < y->lo ? -1 : 1;
    return x->i < y->i ? -1 : x->i > y->i;
}

/* Sorts the group by where its boxes start in dimension d. */
static void sort_group(const struct cover *v, const struct group *g, uint32_t d)
{
    bool sorted = true;

    for (size_t x = g->from; x < g->to; x++) {
        const struct chunk *c = v->box[v->edge[x].i];

        v->edge[x].lo = c->start[d];
        v->edge[x].hi = c->start[d] + c->size[d];
        if (x > g->from && v->edge[x].lo < v->edge[x - 1].lo)
            sorted = false;
    }
    if (!sorted)
        qsort(v->edge + g->from, g->to - g->from, sizeof *v->edge, by_lo);
}

static int push_group(struct cover *v, size_t from, size_t to, uint32_t dim,
                      struct err *e)
{
    if (to - from < 2)
        return 0;
    if (!VEC_ROOM(v->todo, v->ntodo, v->cap))
        return err_nomem(e);
    v->todo[v->ntodo++] = (struct group){from, to, dim};
    return 0;
}

/* Groups come off the stack in the order of the tensor: the first overlap is named. */
static void reverse_groups(struct cover *v, size_t from)
{
    for (size_t to = v->ntodo; from + 1 < to; from++) {
        struct group swap = v->todo[from];

        v->todo[from] = v->todo[--to];
        v->todo[to] = swap;
    }
}

/* Cuts the sorted group wherever no box crosses; *parts: how many there are then. */
static int cut_group(struct cover *v, const struct group *g, uint32_t d, size_t *parts,
                     struct err *e)
{
    uint64_t reach = v->edge[g->from].hi;
    size_t from = g->from, pushed = v->ntodo;
    int ret = 0;

    *parts = 1;
    for (size_t x = g->from + 1; x < g->to && ret == 0; x++) {
        if (v->edge[x].lo >= reach) {
            ret = push_group(v, from, x, d, e);
            from = x;
            ++*parts;
        }
        reach = MAX(reach, v->edge[x].hi);
    }
    if (ret == 0 && *parts > 1)
        ret = push_group(v, from, g->to, d, e);
    reverse_groups(v, pushed);
    return ret;
}

/* In the sorted group: pairs that meet in the dimension it is sorted by. */
static uint64_t count_pairs(const struct cover *v, const struct group *g)
{
    uint64_t pairs = 0;

    for (size_t x = g->from; x < g->to; x++) {
        size_t low = x + 1, high = g->to; /* first that starts at or behind our end */

        while (low < high) {
            size_t mid = low + (high - low) / 2;

            if (v->edge[mid].lo < v->edge[x].hi)
                low = mid + 1;
            else
                high = mid;
        }
        pairs += low - x - 1;
    }
    return pairs;
}

static bool boxes_overlap(const struct chunk *a, const struct chunk *b, uint32_t nd)
{
    for (uint32_t k = 0; k < nd; k++) {
        if (a->start[k] >= b->start[k] + b->size[k] ||
            b->start[k] >= a->start[k] + a->size[k])
            return false;
    }
    return true;
}

static int compare_pairs(struct cover *v, const struct group *g, struct err *e)
{
    for (size_t x = g->from; x < g->to; x++) {
        for (size_t y = x + 1; y < g->to && v->edge[y].lo < v->edge[x].hi; y++) {
            size_t i = v->edge[x].i, j = v->edge[y].i;

            if (boxes_overlap(v->box[i], v->box[j], v->units->nd))
                return overlap_err(v, i, j, e);
            if (spend(v, 1, e) < 0)
                return -EBADMSG;
        }
    }
    return 0;
}

/* Compares the boxes of a group that no cut separates. */
static int sweep_group(struct cover *v, const struct group *g, struct err *e)
{
    uint64_t fewest = UINT64_MAX;
    uint32_t best = 0;

    if (!v->units->nd)
        return overlap_err(v, v->edge[g->from].i, v->edge[g->from + 1].i, e);
    for (uint32_t d = 0; d < v->units->nd; d++) {
        uint64_t pairs;

        sort_group(v, g, d);
        pairs = count_pairs(v, g);
        if (pairs < fewest) {
            fewest = pairs;
            best = d;
        }
    }
    sort_group(v, g, best);
    return compare_pairs(v, g, e);
}

/* A group that came from a cut along g.dim cannot be cut there again before another is. */
static int split_group(struct cover *v, const struct group *g, struct err *e)
{
    uint32_t nd = v->units->nd;

    for (uint32_t k = 1; k <= nd; k++) {
        uint32_t d = (uint32_t)(((uint64_t)g->dim + k) % nd);
        size_t parts;
        int ret = spend(v, g->to - g->from, e);

        if (ret < 0)
            return ret;
        sort_group(v, g, d);
        ret = cut_group(v, g, d, &parts, e);
        if (ret < 0 || parts > 1)
            return ret;
    }
    return sweep_group(v, g, e);
}

static int check_overlap(struct cover *v, size_t n, struct err *e)
{
    int ret = push_group(v, 0, n, v->units->nd - 1, e);

    while (ret == 0 && v->ntodo) {
        struct group g = v->todo[--v->ntodo];

        ret = split_group(v, &g, e);
    }
    return ret;
}

/* Where the sum of cross-sections changes along a dimension. */
struct step {
    uint64_t at;
    uint64_t area; /* wraps: what ends is negative */
};

static int by_at(const void *a, const void *b)
{
    const struct step *x = a, *y = b;

    return x->at < y->at ? -1 : x->at > y->at;
}

/*
 * The first index in dimension d at which the m boxes edge[0..m) do not fill `area`, the
 * elements of one slice. It exists.
 */
static uint64_t find_gap(const struct cover *v, size_t m, uint32_t d, uint64_t area,
                         struct step *step)
{
    uint64_t sum = 0, at = 0;

    for (size_t x = 0; x < m; x++) {
        const struct chunk *c = v->box[v->edge[x].i];
        uint64_t slice = 1;

        for (uint32_t k = d + 1; k < v->units->nd; k++)
            slice *= c->size[k];
        step[2 * x] = (struct step){c->start[d], slice};
        step[2 * x + 1] = (struct step){c->start[d] + c->size[d], -slice};
    }
    qsort(step, 2 * m, sizeof *step, by_at);
    for (size_t x = 0; x < 2 * m;) {
        if (step[x].at > at && sum != area)
            return at;
        at = step[x].at;
        for (; x < 2 * m && step[x].at == at; x++)
            sum += step[x].area;
    }
    return at;
}

/* Keeps those of the first m boxes that hold index `at` in dimension d. */
static size_t keep_slice(struct cover *v, size_t m, uint32_t d, uint64_t at)
{
    size_t kept = 0;

    for (size_t x = 0; x < m; x++) {
        const struct chunk *c = v->box[v->edge[x].i];

        if (c->start[d] <= at && at - c->start[d] < c->size[d])
            v->edge[kept++].i = v->edge[x].i;
    }
    return kept;
}

/* Names the first element that no box holds; no two overlap and there is one. */
static int hole_err(struct cover *v, size_t n, struct err *e)
{
    CLEANUP_FREE struct step *step = reallocarray(NULL, n + 1, 2 * sizeof *step);
    struct shape hole = {.nd = v->units->nd};
    struct buf text = {.max = 4096};

    if (!step)
        return err_nomem(e);
    for (uint32_t d = 0; d < hole.nd; d++) {
        uint64_t area = 1;

        for (uint32_t k = d + 1; k < hole.nd; k++)
            area *= v->units->dim[k];
        hole.dim[d] = find_gap(v, n, d, area, step);
        n = keep_slice(v, n, d, hole.dim[d]);
    }
    if (shape_format(&hole, &text) < 0)
        err_nomem(e);
    else
        err_set(e, EBADMSG, "hole at %s: no chunk holds it", text.data);
    buf_release(&text);
    return -e->code;
}

/* Do the boxes' volumes add up to the tensor's? More than that cannot be: no overlap. */
static bool volumes_fill(const struct cover *v, size_t n)
{
    uint64_t total = 1, sum = 0;

    for (uint32_t k = 0; k < v->units->nd; k++)
        total *= v->units->dim[k];
    for (size_t i = 0; i < n; i++) {
        uint64_t volume = 1;

        for (uint32_t k = 0; k < v->units->nd; k++)
            volume *= v->box[i]->size[k];
        sum += volume;
    }
    return sum == total;
}

int cover_check(const struct shape *units, const struct chunk *const *box, size_t n,
                struct err *e)
{
    struct cover v = {.units = units, .box = box};
    int ret;

    v.budget = BUDGET_FIXED + (uint64_t)BUDGET_EACH * n;
    v.edge = reallocarray(NULL, n + 1, sizeof *v.edge);
    if (!v.edge)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++)
        v.edge[i].i = i;
    ret = check_overlap(&v, n, e);
    if (ret == 0 && !volumes_fill(&v, n))
        ret = hole_err(&v, n, e);
    free(v.todo);
    free(v.edge);
    return ret;
}
