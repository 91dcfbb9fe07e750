/* SPDX-License-Identifier: MIT */
/* cli/cmd_stats.c - minimum, maximum, mean, deviation and a histogram of every tensor. */
#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "base/arena.h"
#include "base/pool.h"
#include "cli/cli.h"
#include "cli/sweep.h"
#include "cli/table.h"
#include "cli/tensor_list.h"
#include "gpu/element_counts.h"
#include "index/names.h"

enum {
    KEY_WIDTH_MAX = 56,
    SHAPE_WIDTH_MAX = 24,
    INFO_MEMORY = 64 << 20,
    TABLES_KEPT = 32,
    COUNTED_MIN = 16 << 10, /* elements that are worth a look at 65536 counts */
    NUMBER_WIDTH = 9,       /* "-1.23e-05" */
    NARROW = 100,           /* columns of a terminal below which */
    NARROW_BARS = 12,       /* a histogram is drawn with so many bars */
};

enum {
    STATS_KEY,
    STATS_DTYPE,
    STATS_SHAPE,
    STATS_MIN,
    STATS_MAX,
    STATS_MEAN,
    STATS_STD,
    STATS_ZERO,
    STATS_HISTOGRAM,
    STATS_COLUMNS
};

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

/* Tables that no thread uses now: as many as there were threads at once. */
struct tables {
    pthread_mutex_t lock;
    struct element_counts *table[TABLES_KEPT]; /* guarded by lock */
    unsigned n;                                /* guarded by lock */
};

struct stats {
    struct cli *c;
    struct reading *source;
    int64_t checkpoint;
    const char *pattern; /* NULL: all */
    struct tensor_list list;
    struct item *item; /* of the tensors that are open */
    struct slot *slot;
    struct tables tables;
    struct element_stats total;
    struct progress progress;
    uint64_t damaged, shown;
    int key_width, shape_width;
    struct column column[STATS_COLUMNS]; /* for people */
    struct table table;
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

static struct element_counts *get_table(struct tables *t)
{
    struct element_counts *table = NULL;

    pthread_mutex_lock(&t->lock);
    if (t->n > 0)
        table = t->table[--t->n];
    pthread_mutex_unlock(&t->lock);
    return table ? table : element_counts_new();
}

/* An empty one, or NULL. */
static void put_table(struct tables *t, struct element_counts *table)
{
    pthread_mutex_lock(&t->lock);
    if (table && t->n < TABLES_KEPT)
        t->table[t->n++] = steal(&table);
    pthread_mutex_unlock(&t->lock);
    element_counts_free(table);
}

static int read_piece(const struct stats *s, const struct item *it,
                      const struct sweep_piece *p, struct element_counts *counts,
                      struct slot *out)
{
    CLEANUP_FREE char *window = malloc(SWEEP_WINDOW);
    uint64_t at = p->first * it->decoder.unit, end = at + p->units * it->decoder.unit;

    if (!window)
        return err_nomem(&out->err);
    reader_will_need(it->reader, end, reader_ahead(&s->source->env));
    for (size_t part; at < end; at += part) {
        part = (size_t)MIN(end - at, (uint64_t)SWEEP_WINDOW);
        TRY(reader_read(it->reader, at, part, window, &out->err));
        if (counts)
            element_counts_add(counts, &it->decoder, window, part / it->decoder.unit);
        else
            element_stats_add(&out->stats, &it->decoder, window,
                              part / it->decoder.unit);
    }
    return 0;
}

static void work_piece(void *user, const struct sweep_piece *p, unsigned slot)
{
    struct stats *s = user;
    struct slot *out = &s->slot[slot];
    const struct item *it = &s->item[p->item % SWEEP_OPEN];
    struct element_counts *counts = NULL;

    element_stats_init(&out->stats);
    out->err = (struct err){0};
    if (element_is_counted(&it->decoder) && p->units >= COUNTED_MIN &&
        !(counts = get_table(&s->tables))) {
        err_nomem(&out->err);
        return;
    }
    read_piece(s, it, p, counts, out);
    if (counts) /* after an error, too: it is empty then */
        element_counts_take(counts, &it->decoder, &out->stats);
    put_table(&s->tables, counts);
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

/* ---- rows for people ---- */

/* What is left out of a narrow terminal goes from the highest rank down. */
static const struct column columns[STATS_COLUMNS] = {
    [STATS_KEY] = {"key", .cut = true},
    [STATS_DTYPE] = {"dtype", .rank = 7, .style = STYLE_TYPE},
    [STATS_SHAPE] = {"shape", .rank = 8},
    [STATS_MIN] = {"min", .width = NUMBER_WIDTH, .rank = 3, .right = true},
    [STATS_MAX] = {"max", .width = NUMBER_WIDTH, .rank = 2, .right = true},
    [STATS_MEAN] = {"mean", .width = NUMBER_WIDTH, .rank = 5, .right = true},
    [STATS_STD] = {"std", .width = NUMBER_WIDTH, .rank = 4, .right = true},
    [STATS_ZERO] = {"zero", .width = 5, .rank = 6, .right = true, .style = STYLE_FAINT},
    [STATS_HISTOGRAM] = {"histogram", .width = STATS_BINS_MAX, .rank = 1},
};

/* Eight heights (ASCII: four) for the histogram's bins; no bar where nothing is. */
static void draw_histogram(const struct stats *s, const struct element_stats *st)
{
    static const char *const block[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    static const char *const ascii[] = {" ", ".", ":", "+", "#"};
    const struct screen *screen = &s->c->screen;
    const char *const *bar = screen->utf8 ? block : ascii;
    double heights = screen->utf8 ? 8 : 4;
    struct stats_histogram h;
    uint64_t most = 1;

    element_stats_histogram(st, &h);
    if (h.n > (unsigned)s->column[STATS_HISTOGRAM].width) { /* each two bins are one */
        for (unsigned i = 0; i < h.n; i++)
            h.count[i / 2] = (i % 2 ? h.count[i / 2] : 0) + h.count[i];
        h.n = (h.n + 1) / 2;
    }
    for (unsigned i = 0; i < h.n; i++)
        most = MAX(most, h.count[i]);
    screen_style(screen, stdout, STYLE_GOOD);
    for (unsigned i = 0; i < h.n; i++)
        fputs(bar[(unsigned)ceil(heights * (double)h.count[i] / (double)most)], stdout);
    screen_style(screen, stdout, STYLE_NONE);
}

static void show_zeros(struct table *t, const struct element_stats *st)
{
    double part = st->numbers ? 100.0 * (double)st->zero / (double)st->numbers : 0;

    if (!st->zero)
        table_cellf(t, STATS_ZERO, "0");
    else if (part < 0.1)
        table_cellf(t, STATS_ZERO, "<0.1%%");
    else
        table_cellf(t, STATS_ZERO, "%.*f%%", part < 10 ? 1 : 0, part);
}

static void show_numbers(struct stats *s, const struct element_stats *st)
{
    struct table *t = &s->table;
    bool any = element_stats_finite(st) > 0;
    const double number[] = {st->min, st->max, st->mean, element_stats_std(st)};

    for (size_t i = 0; i < ARRAY_SIZE(number); i++)
        if (any)
            table_cellf(t, STATS_MIN + i, "%.3g", number[i]);
        else
            table_cell(t, STATS_MIN + i, "-", 1);
    show_zeros(t, st);
    if (any && table_cell_begin(t, STATS_HISTOGRAM))
        draw_histogram(s, st);
}

static void show_nonfinite(const struct stats *s, const struct element_stats *st)
{
    char text[64];

    snprintf(text, sizeof text, "%" PRIu64 " NaN, %" PRIu64 " Inf", st->nan, st->inf);
    if (st->nan || st->inf)
        table_note(&s->table, STYLE_BAD, "not finite:", text);
}

static void show_row(struct stats *s, const struct listed_tensor *t,
                     const struct item *it)
{
    table_cell(&s->table, STATS_KEY, t->key, t->key_len);
    table_cellf(&s->table, STATS_DTYPE, "%s", dtype_name(t->dtype));
    table_cell(&s->table, STATS_SHAPE, t->shape, strlen(t->shape));
    if (it->stats && !it->damage)
        show_numbers(s, it->stats);
    table_row_end(&s->table);
    if (it->damage)
        table_note(&s->table, STYLE_BAD, "damaged:", it->damage);
    else if (!it->stats)
        table_note(&s->table, STYLE_WARNING,
                   "no numbers:", "how this type is packed is not settled");
    else
        show_nonfinite(s, it->stats);
}

/* "30 tensors, 140 KiB" */
static void name_total(const struct stats *s, char text[64])
{
    char size[16];

    snprintf(text, 64, "%zu tensor%s, %s", s->list.n, s->list.n == 1 ? "" : "s",
             out_size(s->list.bytes, size));
}

static void show_head(struct stats *s)
{
    const struct screen *screen = &s->c->screen;
    char total[64];

    memcpy(s->column, columns, sizeof columns);
    s->table =
        (struct table){.screen = screen, .column = s->column, .n = STATS_COLUMNS};
    if (screen->columns < NARROW)
        s->column[STATS_HISTOGRAM].width = NARROW_BARS;
    for (size_t i = 0; i < s->list.n; i++) {
        const struct listed_tensor *t = &s->list.row[i];
        const char *dtype = dtype_name(t->dtype);

        column_see(screen, &s->column[STATS_KEY], t->key, t->key_len);
        column_see(screen, &s->column[STATS_DTYPE], dtype, strlen(dtype));
        column_see(screen, &s->column[STATS_SHAPE], t->shape, strlen(t->shape));
    }
    name_total(s, total);
    column_see(screen, &s->column[STATS_KEY], total, strlen(total));
    table_fit(&s->table);
    if (!s->c->opt.quiet)
        table_head(&s->table);
}

static void show_total(struct stats *s)
{
    char text[64];

    name_total(s, text);
    table_cell(&s->table, STATS_KEY, text, strlen(text));
    table_cell(&s->table, STATS_DTYPE, "", 0);
    table_cell(&s->table, STATS_SHAPE, "", 0);
    show_numbers(s, &s->total);
    table_row_end(&s->table);
    show_nonfinite(s, &s->total);
}

/* ---- rows for programs ---- */

static void print_numbers(const struct element_stats *st)
{
    if (element_stats_finite(st) > 0)
        printf("  %11.4g  %11.4g  %11.4g  %11.4g", st->min, st->max, st->mean,
               element_stats_std(st));
    else
        printf("  %11s  %11s  %11s  %11s", "-", "-", "-", "-");
    printf("  %10" PRIu64, st->zero);
    if (st->nan || st->inf)
        printf("  %" PRIu64 " NaN, %" PRIu64 " Inf", st->nan, st->inf);
}

static void print_row(struct stats *s, const struct listed_tensor *t,
                      const struct item *it)
{
    out_text(stdout, t->key, t->key_len, s->key_width);
    printf("  %-7s  %-*s", dtype_name(t->dtype), s->shape_width, t->shape);
    if (it->damage) {
        fputs("  damaged: ", stdout);
        out_text(stdout, it->damage, strlen(it->damage), 0);
    } else if (!it->stats) {
        fputs("  (no numbers: how this type is packed is not settled)", stdout);
    } else {
        print_numbers(it->stats);
    }
    putchar('\n');
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
    out_json_number("mean", st->mean);
    out_json_number("std", element_stats_std(st));
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

    progress_hide(&s->progress);
    if (s->c->opt.json)
        json_row(s, t, it);
    else if (s->c->screen.people)
        show_row(s, t, it);
    else
        print_row(s, t, it);
    progress_show(&s->progress);
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
    printf("%-*s  %-7s  %-*s  %11s  %11s  %11s  %11s  %10s\n", s->key_width, "key",
           "dtype", s->shape_width, "shape", "min", "max", "mean", "std", "zero");
}

static void print_total(struct stats *s)
{
    char text[64], size[16];

    snprintf(text, sizeof text, "%zu tensors, %s", s->list.n,
             out_size(s->list.bytes, size));
    printf("%-*s", s->key_width + s->shape_width + 11, text);
    print_numbers(&s->total);
    putchar('\n');
}

static void print_end(struct stats *s)
{
    s->total.wide = false; /* of many types: as doubles */
    if (!s->c->opt.json) {
        if (s->c->opt.quiet)
            return;
        if (s->c->screen.people)
            show_total(s);
        else
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
    else if (s->c->screen.people)
        show_head(s);
    else
        print_head(s);
    progress_begin(&s->progress, s->c, "stats", NULL, s->list.bytes);
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
    CLEANUP(reading_close) struct reading source;
    struct stats s = {
        .c = c, .source = &source, .pattern = c->args > 1 ? c->arg[1] : NULL};
    int ret = cli_open(c, c->arg[0], &source);

    pthread_mutex_init(&s.tables.lock, NULL);
    element_stats_init(&s.total);
    if (ret == 0)
        ret = stats_of(&s);
    while (s.tables.n > 0)
        element_counts_free(s.tables.table[--s.tables.n]);
    pthread_mutex_destroy(&s.tables.lock);
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
