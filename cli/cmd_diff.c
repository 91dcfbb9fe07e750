/* SPDX-License-Identifier: MIT */
/* cli/cmd_diff.c - are two checkpoints, of any formats, the same; and if not, where? */
#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <string.h>

#include "base/arena.h"
#include "base/pool.h"
#include "cli/cli.h"
#include "cli/diff_pairs.h"
#include "cli/diff_report.h"
#include "cli/sweep.h"
#include "cli/tensor_list.h"
#include "gpu/element_diff.h"

enum { INFO_MEMORY = 64 << 20 };

struct side {
    struct reading source;
    int64_t checkpoint;
    struct tensor_list list;
};

/* A pair that is compared, while it is open. */
struct item {
    enum pair_state state; /* PAIR_IDENTICAL: its bytes decide */
    struct reader *reader[2];
    struct element_pair elements;
    struct element_diff diff;
    char *damage; /* malloc; why one of them cannot be read */
};

struct slot {
    struct element_diff diff;
    struct err err;
    int where; /* side that the error is of */
};

struct diff {
    struct cli *c;
    struct side side[2];
    struct element_rule rule;
    bool drop[3], drop_objects; /* by role */
    struct tensor_pair *pair;
    struct item *item; /* of the pairs that are open */
    size_t n;
    struct slot *slot;
    struct progress progress;
    struct diff_report report;
};

/* ---- options ---- */

static int wrong(struct cli *c, const char *option, const char *value, const char *hint)
{
    err_set(&c->err, EINVAL, "%s=%.200s: no value of this option", option, value);
    err_hint(&c->err, "%s", hint);
    return cli_usage(c);
}

static int take_number(struct cli *c, const char *option, const char *text, double *out)
{
    char *end;

    if (!text)
        return 0;
    *out = strtod(text, &end);
    if (end == text || *end || !(*out >= 0) || isinf(*out))
        return wrong(c, option, text, "a number, not negative");
    return 0;
}

static int take_drop(struct diff *d)
{
    static const char *const words[] = {"model", "optimizer", "other", "objects"};
    const char *text = d->c->opt.convert.drop;
    char list[200];
    char *rest = list, *word;

    if (!text)
        return 0;
    if (snprintf(list, sizeof list, "%s", text) >= (int)sizeof list)
        return wrong(d->c, "--drop", text, "a list of roles");
    while ((word = strsep(&rest, ",+"))) {
        unsigned i = 0;

        while (i < ARRAY_SIZE(words) && strcmp(word, words[i]) != 0)
            i++;
        if (i == ARRAY_SIZE(words))
            return wrong(d->c, "--drop", word, "model, optimizer, other, objects");
        if (i < ARRAY_SIZE(d->drop))
            d->drop[i] = true;
        else
            d->drop_objects = true;
    }
    return 0;
}

static int take_options(struct diff *d)
{
    const struct compare_options *o = &d->c->opt.compare;
    int ret = take_number(d->c, "--rtol", o->rtol, &d->rule.rtol);

    if (ret == 0)
        ret = take_number(d->c, "--atol", o->atol, &d->rule.atol);
    d->rule.tolerance = o->rtol || o->atol;
    d->rule.values = o->values;
    d->report = (struct diff_report){.json = d->c->opt.json,
                                     .quiet = d->c->opt.quiet,
                                     .verbose = d->c->opt.verbose,
                                     .screen = &d->c->screen,
                                     .tolerance = d->rule.tolerance};
    return ret == 0 ? take_drop(d) : ret;
}

/* ---- the sweep ---- */

static void note_damage(struct item *it, int where, const struct err *e)
{
    char line[1200], text[1240];

    if (it->damage)
        return;
    snprintf(text, sizeof text, "in %c: %s", 'A' + where,
             err_line(e, line, sizeof line));
    it->damage = strdup(text);
    it->state = PAIR_DAMAGED;
}

/* What the scan found wrong: nothing else is certain of such a tensor. */
static void note_fault(struct item *it, const struct tensor_pair *p)
{
    const struct listed_tensor *t[2] = {p->a, p->b};
    struct err e = {0};

    for (int k = 0; k < 2; k++) {
        if (!t[k]->fault)
            continue;
        err_set(&e, EBADMSG, "%s", t[k]->fault);
        note_damage(it, k, &e);
    }
}

/* What needs no byte to be told. */
static enum pair_state state_of(const struct tensor_pair *p, bool comparable)
{
    if (!p->b)
        return PAIR_ONLY_A;
    if (!p->a)
        return PAIR_ONLY_B;
    if (strcmp(p->a->shape, p->b->shape) != 0)
        return PAIR_SHAPE;
    return comparable ? PAIR_IDENTICAL : PAIR_DTYPE;
}

static void open_item(void *user, size_t i, uint64_t *units, unsigned *unit)
{
    struct diff *d = user;
    const struct tensor_pair *p = &d->pair[i];
    const struct listed_tensor *t[2] = {p->a, p->b};
    struct item *it = &d->item[i % SWEEP_OPEN];
    bool comparable = false;

    *units = 0;
    *unit = 1;
    if (p->a && p->b && (d->rule.values || p->a->dtype == p->b->dtype))
        comparable =
            element_pair_init(&it->elements, &d->rule, p->a->dtype, p->b->dtype);
    element_diff_init(&it->diff);
    it->state = state_of(p, comparable);
    if (p->a && p->b)
        note_fault(it, p);
    for (int k = 0; k < 2 && it->state == PAIR_IDENTICAL; k++) {
        struct side *s = &d->side[k];
        struct err e = {0};

        if (reader_open_tensor(&s->source.env, s->checkpoint, t[k]->ord, false,
                               &it->reader[k], &e) < 0)
            note_damage(it, k, &e);
    }
    if (it->state != PAIR_IDENTICAL)
        return;
    *unit = MAX(it->elements.a.unit, it->elements.b.unit);
    *units = p->a->bytes / it->elements.a.unit;
}

static void work_piece(void *user, const struct sweep_piece *p, unsigned slot)
{
    struct diff *d = user;
    struct slot *out = &d->slot[slot];
    const struct item *it = &d->item[p->item % SWEEP_OPEN];
    const unsigned unit[2] = {it->elements.a.unit, it->elements.b.unit};
    uint64_t step = SWEEP_WINDOW / MAX(unit[0], unit[1]);
    CLEANUP_FREE char *window = malloc((size_t)2 * SWEEP_WINDOW);

    element_diff_init(&out->diff);
    out->err = (struct err){0};
    if (!window)
        err_nomem(&out->err);
    for (int k = 0; k < 2; k++)
        reader_will_need(it->reader[k], (p->first + p->units) * unit[k],
                         reader_ahead(&d->side[k].source.env));
    for (uint64_t at = 0; !out->err.code && at < p->units; at += step) {
        size_t n = (size_t)MIN(step, p->units - at);

        for (int k = 0; k < 2 && !out->err.code; k++) {
            out->where = k;
            reader_read(it->reader[k], (p->first + at) * unit[k], n * unit[k],
                        window + k * SWEEP_WINDOW, &out->err);
        }
        if (!out->err.code)
            element_diff_add(&out->diff, &it->elements, window, window + SWEEP_WINDOW,
                             p->first + at, n);
    }
}

static void merge_piece(void *user, const struct sweep_piece *p, unsigned slot)
{
    struct diff *d = user;
    struct slot *s = &d->slot[slot];
    struct item *it = &d->item[p->item % SWEEP_OPEN];

    if (s->err.code)
        note_damage(it, s->where, &s->err);
    else
        element_diff_merge(&it->diff, &s->diff);
}

static void close_item(void *user, size_t i)
{
    struct diff *d = user;
    struct item *it = &d->item[i % SWEEP_OPEN];
    struct pair_result r = {.state = it->state, .pair = &d->pair[i]};

    if (it->state == PAIR_DAMAGED) {
        r.damage = it->damage ? it->damage : "out of memory";
    } else if (it->state == PAIR_IDENTICAL) {
        if (it->diff.outside > 0)
            r.state = PAIR_DIFFERS;
        else if (it->diff.differing > 0 || !it->elements.same_type)
            r.state = PAIR_EQUAL;
        r.diff = &it->diff;
    }
    progress_hide(&d->progress);
    report_pair(&d->report, &r);
    progress_show(&d->progress);
    reader_close(it->reader[0]);
    reader_close(it->reader[1]);
    free(it->damage);
    *it = (struct item){0};
}

static uint64_t bytes_to_read(const struct diff *d)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < d->n; i++)
        if (d->pair[i].a && d->pair[i].b)
            bytes += MAX(d->pair[i].a->bytes, d->pair[i].b->bytes);
    return bytes;
}

static int sweep_pairs(struct diff *d)
{
    struct pool *pool = d->side[0].source.pool;
    struct sweep sweep = {.pool = pool,
                          .progress = &d->progress,
                          .items = d->n,
                          .slots = sweep_slots(pool),
                          .user = d,
                          .open = open_item,
                          .piece = work_piece,
                          .merge = merge_piece,
                          .close = close_item};
    int ret;

    d->item = calloc(SWEEP_OPEN, sizeof *d->item);
    d->slot = calloc(sweep.slots, sizeof *d->slot);
    if (!d->item || !d->slot)
        return err_nomem(&d->c->err);
    progress_begin(&d->progress, d->c, "diff", NULL, bytes_to_read(d));
    ret = sweep_run(&sweep, &d->c->err);
    progress_end(&d->progress);
    return ret;
}

/* ---- the whole ---- */

static bool wanted(void *user, const struct tensor_info *t)
{
    const struct diff *d = user;

    return !d->drop[t->role];
}

/* Patterns are of the names that both have, or of the full keys of either. */
static bool matches(const struct tensor_pair *p, const char *pattern)
{
    return fnmatch(pattern, p->name, 0) == 0 ||
           (p->a && fnmatch(pattern, p->a->key, 0) == 0) ||
           (p->b && fnmatch(pattern, p->b->key, 0) == 0);
}

/* --only: of the pairs, so that one name chooses on both sides. */
static int keep_matching(struct diff *d, const char *only)
{
    size_t kept = 0;

    for (size_t i = 0; i < d->n; i++)
        if (matches(&d->pair[i], only))
            d->pair[kept++] = d->pair[i];
    d->n = kept;
    if (kept > 0)
        return 0;
    err_set(&d->c->err, ENOENT, "--only %s: no tensor of either matches", only);
    return err_hint(&d->c->err, "`unshard ls %s` lists all", d->c->arg[0]);
}

static int open_side(struct diff *d, int k)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    struct side *s = &d->side[k];
    struct checkpoint_info info;
    int ret = a ? cli_open(d->c, d->c->arg[k], &s->source) : err_nomem(&d->c->err);

    if (ret == 0)
        ret = cli_checkpoint(d->c, &s->source, a, &info);
    if (ret < 0)
        return ret;
    s->checkpoint = info.id;
    return tensor_list_load(d->c, s->source.catalog, info.id, wanted, d, &s->list);
}

static void tell_object(void *user, enum object_state state, const char *key,
                        size_t key_len)
{
    report_object(user, state, key, key_len);
}

static int compare_all(struct diff *d)
{
    struct side *a = &d->side[0], *b = &d->side[1];
    struct err *e = &d->c->err;
    int ret = pair_tensors(&a->list, &b->list, &d->pair, &d->n, e);

    if (ret == 0 && d->c->opt.convert.only)
        ret = keep_matching(d, d->c->opt.convert.only);
    if (ret < 0)
        return ret;
    report_begin(&d->report, d->c->arg[0], d->c->arg[1]);
    ret = sweep_pairs(d);
    report_objects_begin(&d->report);
    d->report.with_objects = !d->drop_objects && !d->c->opt.convert.only;
    if (ret == 0 && d->report.with_objects)
        ret =
            diff_objects(a->source.catalog, a->checkpoint, b->source.catalog,
                         b->checkpoint, tell_object, &d->report, &d->report.objects, e);
    if (ret == 0)
        report_end(&d->report);
    return ret;
}

static int diff_sources(struct diff *d)
{
    struct err *e = &d->c->err;
    uint64_t damaged;
    int ret = open_side(d, 0);

    if (ret == 0)
        ret = open_side(d, 1);
    if (ret == 0)
        ret = compare_all(d);
    damaged = d->report.pairs[PAIR_DAMAGED];
    if (ret < 0 || !damaged)
        return ret < 0 ? ret : report_differs(&d->report) ? STATUS_NO : STATUS_DONE;
    err_set(e, EBADMSG, "%" PRIu64 " tensors cannot be read, and were not compared",
            damaged);
    return err_hint(e, "`unshard verify` tells why");
}

static int run(struct cli *c)
{
    struct diff d = {.c = c};
    int ret = take_options(&d);

    if (ret == 0)
        ret = diff_sources(&d);
    for (int k = 0; k < 2; k++) {
        tensor_list_release(&d.side[k].list);
        reading_close(&d.side[k].source);
    }
    free(d.pair);
    free(d.item);
    free(d.slot);
    return ret;
}

const struct cli_command cmd_diff = {
    .name = "diff",
    .usage = "diff A B [--rtol R --atol A] [options]",
    .summary = "two checkpoints of any formats: what differs",
    .min_args = 2,
    .max_args = 2,
    .takes = "t",
    .confined = true,
    .run = run,
};
