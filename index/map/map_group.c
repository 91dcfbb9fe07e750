/* SPDX-License-Identifier: MIT */
/* index/map/map_group.c - several tensors brought together: "join" and "stack". */
#include "index/map/map_work.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/map/shares.h"

enum {
    GROUP_MEMORY = 2047 << 20, /* of the boxes of one result */
    NO_AXIS = SHAPE_MAX_DIMS,
};

static int by_name(const void *a, const void *b)
{
    const struct capture *x = a, *y = b;
    int c = memcmp(x->name, y->name, MIN(x->name_len, y->name_len));

    return c ? c : (x->name_len > y->name_len) - (x->name_len < y->name_len);
}

/*
 * What tells one result of a rule from another: part and captures, but for the name that
 * is stacked by. Patterns of a join may have their names in different orders.
 */
static int group_name(const struct taken *t, struct buf *out, struct err *e)
{
    const char *by = t->rule->by;
    struct captures sorted = t->captures;

    qsort(sorted.at, sorted.count, sizeof sorted.at[0], by_name);
    buf_addf(out, "%s%c", t->t.part ? t->t.part : "", '\0');
    for (unsigned i = 0; i < sorted.count; i++) {
        const struct capture *c = &sorted.at[i];

        if (by && strlen(by) == c->name_len && memcmp(by, c->name, c->name_len) == 0)
            continue;
        buf_addf(out, "%zu ", c->len);
        buf_add(out, c->text, c->len);
    }
    return buf_failed(out) ? err_nomem(e) : 0;
}

/* A tensor on its way into a group. */
struct member {
    const struct taken *taken;
    char *group; /* malloc */
    size_t group_len;
    uint64_t order; /* part of a join, index in a stack */
};

static int by_group(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    int c = memcmp(x->group, y->group, MIN(x->group_len, y->group_len));

    if (c == 0)
        c = (x->group_len > y->group_len) - (x->group_len < y->group_len);
    return c ? c : (x->order > y->order) - (x->order < y->order);
}

static bool same_group(const struct member *a, const struct member *b)
{
    return a->group_len == b->group_len &&
           memcmp(a->group, b->group, a->group_len) == 0;
}

static int make_member(const struct taken *t, struct member *out, struct err *e)
{
    CLEANUP(buf_release) struct buf name = {.max = 1 << 20};
    const char *by = t->rule->by;

    out->taken = t;
    out->order = t->part;
    if (t->rule->kind == RULE_STACK &&
        !capture_number(capture_find(&t->captures, by, strlen(by)), &out->order))
        return err_set(e, EINVAL, "{%s} is no number", by);
    TRY(group_name(t, &name, e));
    out->group = buf_steal(&name, &out->group_len);
    return out->group ? 0 : err_nomem(e);
}

/* The member's boxes, with the rule's operations done. */
static int load_member(const struct work *group, const struct member *m,
                       struct arena *a, struct work *out, struct err *e)
{
    int ret;

    *out = (struct work){.f = group->f, .sink = group->sink, .rule = group->rule};
    ret = work_load(a, m->taken, out, e);
    for (size_t i = 0; ret == 0 && i < out->rule->nop; i++)
        ret = work_op(out, &out->rule->op[i], e);
    return ret;
}

/* Do two members fit side by side along the axis (NO_AXIS: one behind the other)? */
static int check_fit(const struct work *a, const struct work *b, uint32_t axis,
                     struct err *e)
{
    bool fits = a->boxes.shape.nd == b->boxes.shape.nd;

    for (uint32_t k = 0; fits && k < a->boxes.shape.nd; k++)
        fits = k == axis || a->boxes.shape.dim[k] == b->boxes.shape.dim[k];
    if (!fits)
        return err_set(e, EINVAL, "%s and %s have shapes that do not fit together",
                       a->like->key, b->like->key);
    if (a->like->dtype != b->like->dtype)
        return err_set(e, EINVAL, "%s is %s and %s is %s", a->like->key,
                       dtype_name(a->like->dtype), b->like->key,
                       dtype_name(b->like->dtype));
    return 0;
}

/* Puts the member's rows to their places among `total` and adds its boxes. */
static int add_member(struct work *group, struct work *m, const struct share *share,
                      struct err *e)
{
    CLEANUP(piece_list_release) struct piece_list pieces = {0};
    uint32_t axis = group->rule->axis;
    uint64_t total = share->groups * share->group;
    int ret = shares_put(share, &pieces, e);

    if (ret == 0)
        ret = boxes_select(&m->boxes, axis, pieces.at, pieces.n, total, e);
    if (ret == 0)
        ret = boxes_append(&group->boxes, &m->boxes, e);
    return ret;
}

/* Rows of a part in each group. */
static int joined_rows(const struct work *m, const struct map_part *part,
                       uint64_t groups, uint64_t *out, struct err *e)
{
    uint64_t dim = m->boxes.shape.dim[m->rule->axis];
    int ret;

    if (groups == 0 || dim % groups != 0)
        return err_set(e, EINVAL, "%s: %" PRIu64 " elements are not %" PRIu64 " groups",
                       m->like->key, dim, groups);
    ret = work_count(m, m->rule->axis, part->rows, dim / groups, out, e);
    if (ret == 0 && *out != dim / groups)
        return err_set(e, EINVAL,
                       "%s has %" PRIu64 " elements a group, the map says %" PRIu64,
                       m->like->key, dim / groups, *out);
    return ret;
}

/* Every part once, in order. */
static int check_parts(const struct map_rule *rule, const struct member *m, size_t n,
                       struct err *e)
{
    for (size_t i = 0; i < rule->npart; i++) {
        if (i >= n || m[i].order > i)
            return err_set(e, EINVAL, "%s is there, and nothing for part %zu (%s)",
                           m[0].taken->t.key, i + 1, rule->part[i].key);
        if (m[i].order < i)
            return err_set(e, EINVAL, "%s and %s are both part %" PRIu64,
                           m[i - 1].taken->t.key, m[i].taken->t.key, m[i].order + 1);
    }
    return 0;
}

/* How the rows of all members share the axis. */
static int share_join(const struct work *group, struct work *member, size_t n,
                      struct share *share, struct err *e)
{
    const struct map_rule *rule = group->rule;
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < n; i++) {
        ret = work_axis(&member[i], rule->axis, e);
        if (ret == 0)
            ret = check_fit(&member[0], &member[i], rule->axis, e);
        if (ret == 0 && i == 0)
            ret = work_count(&member[0], rule->axis, rule->groups, 1, &share[0].groups,
                             e);
        if (ret == 0)
            ret = joined_rows(&member[i], &rule->part[i], share[0].groups,
                              &share[i].rows, e);
        if (ret == 0 && i > 0)
            share[i].at = share[i - 1].at + share[i - 1].rows;
    }
    for (size_t i = 0; ret == 0 && i < n; i++) {
        share[i].groups = share[0].groups;
        share[i].group = share[n - 1].at + share[n - 1].rows;
    }
    return ret;
}

/* A stack is a join of slices one element thick. */
static int share_stack(const struct work *group, struct work *member,
                       const struct member *m, size_t n, struct share *share,
                       struct err *e)
{
    uint32_t axis = group->rule->axis;
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < n; i++) {
        if (m[i].order != i)
            return err_set(e, EINVAL, "%s: there is no %zu before it",
                           m[i].taken->t.key, i);
        ret = check_fit(&member[0], &member[i], NO_AXIS, e);
        if (ret == 0 && axis > member[i].boxes.shape.nd)
            ret = err_set(e, EINVAL, "a tensor of %u axes cannot be stacked along %u",
                          member[i].boxes.shape.nd, axis);
        share[i] = (struct share){.groups = 1, .group = n, .at = i, .rows = 1};
    }
    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = boxes_insert_axis(&member[i].boxes, axis, e);
    return ret;
}

/* Brings the n members of one result together. */
static int put_group(struct work *group, const struct member *m, size_t n,
                     struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(GROUP_MEMORY);
    CLEANUP_FREE struct work *member = calloc(n, sizeof *member);
    CLEANUP_FREE struct share *share = calloc(n, sizeof *share);
    bool join = group->rule->kind == RULE_JOIN;
    int ret = a && member && share ? 0 : err_nomem(e);

    if (ret == 0 && join)
        ret = check_parts(group->rule, m, n, e);
    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = load_member(group, &m[i], a, &member[i], e);
    if (ret == 0)
        ret = join ? share_join(group, member, n, share, e)
                   : share_stack(group, member, m, n, share, e);
    if (ret < 0)
        return ret;
    group->like = member[0].like;
    group->captures = m[0].taken->captures;
    group->boxes = (struct boxes){.arena = a, .shape = member[0].boxes.shape};
    group->boxes.shape.dim[group->rule->axis] = share[0].groups * share[0].group;
    for (size_t i = 0; ret == 0 && i < n; i++) {
        if (member[i].fault && !group->fault) {
            group->fault = member[i].fault;
            group->fault_key = member[i].fault_key;
        }
        ret = add_member(group, &member[i], &share[i], e);
    }
    return ret == 0 ? work_put(group, group->rule->to, e) : ret;
}

static void members_free(struct member *m, size_t n)
{
    for (size_t i = 0; m && i < n; i++)
        free(m[i].group);
    free(m);
}

/* All results of one join or stack. */
int group_put_all(struct filter *f, struct sink *s, const struct map_rule *rule,
                  struct err *e)
{
    struct member *m = calloc(f->ntaken + 1, sizeof *m);
    size_t n = 0;
    int ret = m ? 0 : err_nomem(e);

    for (size_t i = 0; ret == 0 && i < f->ntaken; i++)
        if (f->taken[i].rule == rule)
            ret = make_member(&f->taken[i], &m[n++], e);
    if (ret == 0 && n > 1)
        qsort(m, n, sizeof *m, by_group);
    for (size_t i = 0, end; ret == 0 && i < n; i = end) {
        struct work group = {.f = f, .sink = s, .rule = rule};

        for (end = i + 1; end < n && same_group(&m[i], &m[end]);)
            end++;
        ret = put_group(&group, &m[i], end - i, e);
    }
    members_free(m, n);
    return ret;
}
