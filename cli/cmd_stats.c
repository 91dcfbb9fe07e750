/* SPDX-License-Identifier: MIT */
/* cli/cmd_stats.c - minimum, maximum, mean, deviation and a histogram of every tensor. */
#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <string.h>

#include "base/arena.h"
#include "base/pool.h"
#include "cli/cli.h"
#include "cli/sweep.h"
#include "cli/tensor_list.h"
#include "gpu/element_stats.h"
#include "index/names.h"

enum { KEY_WIDTH_MAX = 56, SHAPE_WIDTH_MAX = 24, INFO_MEMORY = 64 << 20 };

/* What is open of one tensor. */
struct item {
    struct reader *reader;
    struct element_decoder decoder;
    struct element_stats
        *stats;   /* NULL: its type is no number to us, or out of memory */
    char *damage; /* malloc; why it cannot be read */
};

struct slot {
    struct element_stats stats;
    struct err err;
};

struct stats {
    struct cli *c;
    struct cli_source *source;
    int64_t checkpoint;
    const char *pattern; /* NULL: all */
    struct tensor_list list;
    struct item *item; /* of the tensors that are open */
    struct slot *slot;
    struct element_stats total;
    struct progress progress;
    uint64_t damaged, shown;
    int key_width, shape_width;
    bool terminal, colour;
};

/* ---- the sweep ---- */

static void note_damage(struct item *it, const struct err *e)
{
    char line[1200];

    if (!it->damage)
        it->damage = strdup(err_line(e, line, sizeof line));
    if (!it->damage)
        it->damage = strdup("out of memory");
}

static void open_item(void *user, size_t i, uint64_t *units, unsigned *unit)
{
    struct stats *s = user;
    const struct listed_tensor *t = &s->list.row[i];
    struct item *it = &s->item[i % SWEEP_OPEN];
    struct err e = {0};

    *units = 0;
    *unit = dtype_unit(t->dtype);
    if (!element_decoder_init(&it->decoder, t->dtype))
        return;
    it->stats = malloc(sizeof *it->stats);
    if (!it->stats)
        err_nomem(&e);
    else
        element_stats_init(it->stats);
    if (!e.code)
        reader_open_tensor(&s->source->env, s->checkpoint, t->ord, false, &it->reader,
                           &e);
    if (e.code)
        note_damage(it, &e);
    else
        *units = t->bytes / *unit;
}

static void work_piece(void *user, const struct sweep_piece *p, unsigned slot)
{
    struct stats *s = user;
    struct slot *out = &s->slot[slot];
    const struct item *it = &s->item[p->item % SWEEP_OPEN];
    CLEANUP_FREE char *window = malloc(SWEEP_WINDOW);
    uint64_t at = p->first * it->decoder.unit, end = at + p->units * it->decoder.unit;

    element_stats_init(&out->stats);
    out->err = (struct err){0};
    if (!window)
        err_nomem(&out->err);
    reader_will_need(it->reader, end, reader_ahead(&s->source->env));
    while (!out->err.code && at < end) {
        size_t part = (size_t)MIN(end - at, (uint64_t)SWEEP_WINDOW);

        if (reader_read(it->reader, at, part, window, &out->err) == 0)
            element_stats_add(&out->stats, &it->decoder, window,
                              part / it->decoder.unit);
        at += part;
    }
}

static void merge_piece(void *user, const struct sweep_piece *p, unsigned slot)
{
    struct stats *s = user;
    struct item *it = &s->item[p->item % SWEEP_OPEN];

    if (s->slot[slot].err.code)
        note_damage(it, &s->slot[slot].err);
    else
        element_stats_merge(it->stats, &s->slot[slot].stats);
}

/* ---- rows ---- */

/* Eight heights for the histogram's bins; no bar where nothing is. */
static void print_sparkline(const struct element_stats *st)
{
    static const char *const bar[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    struct stats_histogram h;
    uint64_t most = 1;

    element_stats_histogram(st, &h);
    for (unsigned i = 0; i < h.n; i++)
        most = MAX(most, h.count[i]);
    for (unsigned i = 0; i < h.n; i++)
        fputs(bar[(unsigned)ceil(8.0 * (double)h.count[i] / (double)most)], stdout);
}

static void print_nonfinite(const struct stats *s, const struct element_stats *st)
{
    if (!st->nan && !st->inf)
        return;
    printf("  %s%" PRIu64 " NaN, %" PRIu64 " Inf%s", s->colour ? "\033[31m" : "",
           st->nan, st->inf, s->colour ? "\033[m" : "");
}

static void print_numbers(const struct stats *s, const struct element_stats *st)
{
    if (element_stats_finite(st) > 0)
        printf("  %11.4g  %11.4g  %11.4g  %11.4g", st->min, st->max, st->mean,
               element_stats_std(st));
    else
        printf("  %11s  %11s  %11s  %11s", "-", "-", "-", "-");
    printf("  %10" PRIu64, st->zero);
    if (s->terminal) {
        fputs("  ", stdout);
        print_sparkline(st);
    }
    print_nonfinite(s, st);
}

static void print_row(struct stats *s, const struct listed_tensor *t,
                      const struct item *it)
{
    progress_clear(&s->progress);
    out_text(stdout, t->key, t->key_len, s->key_width);
    printf("  %-7s  %-*s", dtype_name(t->dtype), s->shape_width, t->shape);
    if (it->damage) {
        fputs("  damaged: ", stdout);
        out_text(stdout, it->damage, strlen(it->damage), 0);
    } else if (!it->stats) {
        fputs("  (no numbers: how this type is packed is not settled)", stdout);
    } else {
        print_numbers(s, it->stats);
    }
    putchar('\n');
}

static void json_number(const char *name, double v)
{
    if (isfinite(v))
        printf(", \"%s\": %.17g", name, v);
    else
        printf(", \"%s\": \"%g\"", name, v);
}

static void json_histogram(const struct element_stats *st)
{
    struct stats_histogram h;

    element_stats_histogram(st, &h);
    printf(", \"histogram\": {\"from\": %.17g, \"width\": %.17g, \"counts\": [", h.from,
           h.width);
    for (unsigned i = 0; i < h.n; i++)
        printf("%s%" PRIu64, i ? ", " : "", h.count[i]);
    fputs("]}", stdout);
}

/* Members of an object that has some already. */
static void json_stats(const struct element_stats *st, enum dtype d)
{
    char low[40], high[40];

    printf(", \"numbers\": %" PRIu64 ", \"nan\": %" PRIu64 ", \"inf\": %" PRIu64
           ", \"zero\": %" PRIu64,
           st->numbers, st->nan, st->inf, st->zero);
    if (element_stats_finite(st) == 0)
        return;
    printf(", \"min\": %s, \"max\": %s", element_stats_end(st, d, false, low),
           element_stats_end(st, d, true, high));
    json_number("mean", st->mean);
    json_number("std", element_stats_std(st));
    json_histogram(st);
}

static void json_row(struct stats *s, const struct listed_tensor *t,
                     const struct item *it)
{
    fputs(s->shown++ ? ",\n    {\"key\": " : "\n    {\"key\": ", stdout);
    out_json(stdout, t->key, t->key_len);
    printf(", \"dtype\": \"%s\", \"shape\": %s, \"role\": \"%s\"", dtype_name(t->dtype),
           t->shape, role_name(t->role));
    if (it->damage) {
        fputs(", \"damage\": ", stdout);
        out_json(stdout, it->damage, strlen(it->damage));
    } else if (it->stats) {
        json_stats(it->stats, t->dtype);
    }
    putchar('}');
}

static void close_item(void *user, size_t i)
{
    struct stats *s = user;
    struct item *it = &s->item[i % SWEEP_OPEN];
    const struct listed_tensor *t = &s->list.row[i];

    if (s->c->opt.json)
        json_row(s, t, it);
    else
        print_row(s, t, it);
    s->damaged += it->damage != NULL;
    if (it->stats && !it->damage)
        element_stats_merge(&s->total, it->stats);
    reader_close(it->reader);
    free(it->stats);
    free(it->damage);
    *it = (struct item){0};
}

/* ---- the whole ---- */

static void print_head(struct stats *s)
{
    s->key_width = s->shape_width = 5;
    for (size_t i = 0; i < s->list.n; i++) {
        const struct listed_tensor *t = &s->list.row[i];

        s->key_width =
            MIN(KEY_WIDTH_MAX, MAX(s->key_width, out_width(t->key, t->key_len)));
        s->shape_width =
            MIN(SHAPE_WIDTH_MAX, MAX(s->shape_width, (int)strlen(t->shape)));
    }
    printf("%s%-*s  %-7s  %-*s  %11s  %11s  %11s  %11s  %10s%s%s\n",
           s->colour ? "\033[1m" : "", s->key_width, "key", "dtype", s->shape_width,
           "shape", "min", "max", "mean", "std", "zero",
           s->terminal ? "  histogram" : "", s->colour ? "\033[m" : "");
}

static void print_total(struct stats *s)
{
    char text[64], size[16];

    snprintf(text, sizeof text, "%zu tensors, %s", s->list.n,
             out_size(s->list.bytes, size));
    printf("%-*s", s->key_width + s->shape_width + 11, text);
    print_numbers(s, &s->total);
    putchar('\n');
}

static void print_end(struct stats *s)
{
    s->total.wide = false; /* of many types: as doubles */
    if (!s->c->opt.json) {
        if (!s->c->opt.quiet)
            print_total(s);
        return;
    }
    printf("\n], \"total\": {\"tensors\": %zu, \"bytes\": %" PRIu64
           ", \"damaged\": %" PRIu64,
           s->list.n, s->list.bytes, s->damaged);
    json_stats(&s->total, DTYPE_F64);
    fputs("}}\n", stdout);
}

static bool wanted(void *user, const struct tensor_info *t)
{
    struct stats *s = user;

    return !s->pattern || fnmatch(s->pattern, t->key, 0) == 0;
}

static int sweep_tensors(struct stats *s)
{
    struct sweep sweep = {.pool = s->source->pool,
                          .progress = &s->progress,
                          .items = s->list.n,
                          .slots = sweep_slots(s->source->pool),
                          .user = s,
                          .open = open_item,
                          .piece = work_piece,
                          .merge = merge_piece,
                          .close = close_item};
    int ret;

    s->item = calloc(SWEEP_OPEN, sizeof *s->item);
    s->slot = calloc(sweep.slots, sizeof *s->slot);
    if (!s->item || !s->slot)
        return err_nomem(&s->c->err);
    if (s->c->opt.json)
        fputs("{\"schema\": 1, \"tensors\": [", stdout);
    else
        print_head(s);
    progress_begin(&s->progress, s->c, s->list.bytes);
    ret = sweep_run(&sweep, &s->c->err);
    progress_end(&s->progress);
    if (ret == 0)
        print_end(s);
    return ret;
}

static int stats_of(struct stats *s)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    struct checkpoint_info info;
    struct err *e = &s->c->err;
    int ret = a ? cli_checkpoint(s->c, s->source, a, &info) : err_nomem(e);

    if (ret == 0)
        ret = tensor_list_load(s->c, s->source->catalog, info.id, wanted, s, &s->list);
    if (ret < 0)
        return ret;
    if (s->pattern && !s->list.n)
        return cli_no_match(s->c, s->source, info.id, s->pattern);
    s->checkpoint = info.id;
    ret = sweep_tensors(s);
    if (ret < 0 || !s->damaged)
        return ret;
    err_set(e, EBADMSG, "%s: %" PRIu64 " of %zu tensors cannot be read",
            s->source->name, s->damaged, s->list.n);
    return err_hint(e, "`unshard verify %s` tells why", s->source->name);
}

static int run(struct cli *c)
{
    CLEANUP(cli_close) struct cli_source source;
    struct stats s = {.c = c,
                      .source = &source,
                      .pattern = c->args > 1 ? c->arg[1] : NULL,
                      .terminal = out_terminal(false),
                      .colour = out_terminal(true)};
    int ret = cli_open(c, c->arg[0], &source);

    element_stats_init(&s.total);
    if (ret == 0)
        ret = stats_of(&s);
    tensor_list_release(&s.list);
    free(s.item);
    free(s.slot);
    return ret;
}

const struct cli_command cmd_stats = {
    .name = "stats",
    .usage = "stats SOURCE [PATTERN] [--json]",
    .summary = "min, max, mean, std, NaN, zeros, a histogram",
    .min_args = 1,
    .max_args = 2,
    .takes = "",
    .confined = true,
    .run = run,
};
