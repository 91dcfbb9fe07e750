/* SPDX-License-Identifier: MIT */
/* cli/cmd_ls.c - the tensors of a checkpoint, or the checkpoints of a tree. */
#include <errno.h>
#include <fnmatch.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "cli/cli.h"
#include "cli/origin.h"
#include "cli/table.h"
#include "index/formats/scan.h"
#include "index/names.h"
#include "remote/store.h"

enum {
    KEY_WIDTH_MAX = 72,
    ROW_MEMORY = 64 << 20,
    PLACE_WIDTH = 40, /* of names of a tree on a server, which is not listed twice */
};

enum { LS_KEY, LS_DTYPE, LS_SHAPE, LS_SIZE, LS_ROLE, LS_CHUNKS, LS_COLUMNS };
enum { LS_PLACE, LS_FORMAT, LS_STEP, LS_TENSORS, LS_BYTES, LS_PLACES };

struct ls {
    struct cli *c;
    struct reading *source;
    const char *pattern; /* NULL: all */
    int key_width, shape_width;
    size_t shown;
    uint64_t bytes;
    struct table table;                 /* for people */
    const struct checkpoint_info *info; /* whose tensors are listed */
    struct cli_origin origin;
};

/* `*` stands for dots too: people write "model.layers.0.*". */
static bool wanted(const struct ls *ls, const char *key)
{
    return !ls->pattern || fnmatch(ls->pattern, key, 0) == 0;
}

static int measure(void *user, const struct tensor_info *t)
{
    struct ls *ls = user;
    CLEANUP(buf_release) struct buf shape = {0};

    if (!wanted(ls, t->key))
        return 0;
    shape_format(&t->shape, &shape);
    ls->key_width =
        MIN(KEY_WIDTH_MAX, MAX(ls->key_width, out_width(t->key, t->key_len)));
    ls->shape_width = MIN(KEY_WIDTH_MAX, MAX(ls->shape_width, (int)shape.len));
    return 0;
}

static int text_row(void *user, const struct tensor_info *t)
{
    struct ls *ls = user;
    CLEANUP(buf_release) struct buf shape = {0};

    if (!wanted(ls, t->key))
        return 0;
    ls->shown++;
    shape_format(&t->shape, &shape);
    out_text(stdout, t->key, t->key_len, ls->key_width);
    printf("  %-7s  %-*s  %12" PRIu64, dtype_name(t->dtype), ls->shape_width,
           shape.data, t->bytes);
    if (ls->c->opt.long_rows)
        printf("  %-9s  %6" PRIu64, role_name(t->role), t->chunks);
    if (t->fault) {
        fputs("  damaged: ", stdout);
        out_text(stdout, t->fault, strlen(t->fault), 0);
    }
    putchar('\n');
    return ferror(stdout) ? -EIO : 0;
}

/* ---- tensors for people ---- */

static const struct column tensor_columns[LS_COLUMNS] = {
    [LS_KEY] = {"key", .cut = true},
    [LS_DTYPE] = {"dtype", .rank = 2, .style = STYLE_TYPE},
    [LS_SHAPE] = {"shape", .rank = 1},
    [LS_SIZE] = {"size", .rank = 3, .right = true, .style = STYLE_SIZE},
    [LS_ROLE] = {"role", .rank = 4, .style = STYLE_FAINT},
    [LS_CHUNKS] = {"chunks", .rank = 5, .right = true},
};

static int see_row(void *user, const struct tensor_info *t)
{
    struct ls *ls = user;
    const struct screen *s = &ls->c->screen;
    struct column *c = ls->table.column;
    CLEANUP(buf_release) struct buf shape = {0};
    const char *role = role_name(t->role);
    char size[16];

    if (!wanted(ls, t->key))
        return 0;
    if (shape_format(&t->shape, &shape) < 0)
        return err_nomem(&ls->c->err);
    out_size(t->bytes, size);
    column_see(s, &c[LS_KEY], t->key, t->key_len);
    column_see(s, &c[LS_DTYPE], dtype_name(t->dtype), strlen(dtype_name(t->dtype)));
    column_see(s, &c[LS_SHAPE], shape.data, shape.len);
    column_see(s, &c[LS_SIZE], size, strlen(size));
    column_see(s, &c[LS_ROLE], role, strlen(role));
    return 0;
}

static int show_row(void *user, const struct tensor_info *t)
{
    struct ls *ls = user;
    struct table *table = &ls->table;
    CLEANUP(buf_release) struct buf shape = {0};
    char size[16];

    if (!wanted(ls, t->key))
        return 0;
    if (shape_format(&t->shape, &shape) < 0)
        return err_nomem(&ls->c->err);
    ls->shown++;
    ls->bytes += t->bytes;
    table_cell(table, LS_KEY, t->key, t->key_len);
    table_cellf(table, LS_DTYPE, "%s", dtype_name(t->dtype));
    table_cell(table, LS_SHAPE, shape.data, shape.len);
    table_cellf(table, LS_SIZE, "%s", out_size(t->bytes, size));
    table_cellf(table, LS_ROLE, "%s", role_name(t->role));
    table_cellf(table, LS_CHUNKS, "%" PRIu64, t->chunks);
    table_row_end(table);
    if (t->fault)
        table_note(table, STYLE_BAD, "damaged:", t->fault);
    return ferror(stdout) ? -EIO : 0;
}

static int show_tensors(struct ls *ls, const struct checkpoint_info *info)
{
    struct catalog *cat = ls->source->catalog;
    struct column column[LS_COLUMNS];
    char size[16];
    bool any;
    int ret;

    memcpy(column, tensor_columns, sizeof column);
    ls->table =
        (struct table){.screen = &ls->c->screen, .column = column, .n = LS_COLUMNS};
    column[LS_ROLE].hidden = column[LS_CHUNKS].hidden = !ls->c->opt.long_rows;
    TRY(catalog_tensors(cat, info->id, 0, see_row, ls, &ls->c->err));
    any = column[LS_SHAPE].width > 0;
    table_fit(&ls->table);
    if (any && !ls->c->opt.quiet)
        table_head(&ls->table);
    ret = catalog_tensors(cat, info->id, 0, show_row, ls, &ls->c->err);
    if (ret == 0 && ls->shown && !ls->c->opt.quiet)
        printf("%zu tensor%s, %s\n", ls->shown, ls->shown == 1 ? "" : "s",
               out_size(ls->bytes, size));
    return ret;
}

/* ---- tensors for programs ---- */

static int json_row(void *user, const struct tensor_info *t)
{
    struct ls *ls = user;
    CLEANUP(buf_release) struct buf shape = {0};

    if (!wanted(ls, t->key))
        return 0;
    TRY(cli_origin_of(ls->c, ls->source, ls->info, t, &ls->origin));
    shape_format(&t->shape, &shape);
    fputs(ls->shown++ ? ",\n    {\"key\": " : "\n    {\"key\": ", stdout);
    out_json(stdout, t->key, t->key_len);
    printf(", \"dtype\": \"%s\", \"shape\": %s, \"bytes\": %" PRIu64
           ", \"role\": \"%s\", \"chunks\": %" PRIu64,
           dtype_name(t->dtype), shape.data, t->bytes, role_name(t->role), t->chunks);
    if (t->fault) {
        fputs(", \"fault\": ", stdout);
        out_json(stdout, t->fault, strlen(t->fault));
    }
    cli_origin_json(&ls->origin);
    putchar('}');
    return ferror(stdout) ? -EIO : 0;
}

static int list_tensors(struct ls *ls, const struct checkpoint_info *info)
{
    struct catalog *cat = ls->source->catalog;
    int ret;

    ls->info = info;

    if (ls->c->opt.json) {
        fputs("{\"schema\": 1, \"tensors\": [", stdout);
        ret = catalog_tensors(cat, info->id, 0, json_row, ls, &ls->c->err);
        fputs("\n]}\n", stdout);
    } else if (ls->c->screen.people) {
        ret = show_tensors(ls, info);
    } else {
        ret = catalog_tensors(cat, info->id, 0, measure, ls, &ls->c->err);
        if (ret == 0)
            ret = catalog_tensors(cat, info->id, 0, text_row, ls, &ls->c->err);
    }
    cli_origin_release(&ls->origin);
    if (ret < 0)
        return ret;
    if (ls->pattern && !ls->shown)
        return cli_no_match(ls->c, ls->source, info->id, ls->pattern);
    return STATUS_DONE;
}

/* ---- checkpoints of a tree ---- */

static void text_checkpoint(const char *place, const struct checkpoint_info *i)
{
    char size[16];

    out_text(stdout, *place ? place : ".", strlen(*place ? place : "."), 40);
    if (i->error) {
        fputs("  unreadable: ", stdout);
        out_text(stdout, i->error, strlen(i->error), 0);
        putchar('\n');
        return;
    }
    printf("  %-16s  ", i->format);
    if (i->has_step)
        printf("step %-9" PRId64, i->step);
    else
        printf("%-14s", "");
    printf("  %7" PRIu64 " tensors  %10s", i->tensors, out_size(i->bytes, size));
    if (i->faults)
        printf("  %" PRIu64 " damaged", i->faults);
    putchar('\n');
}

static void json_checkpoint(struct ls *ls, const char *place,
                            const struct checkpoint_info *i)
{
    fputs(ls->shown++ ? ",\n    {\"path\": " : "\n    {\"path\": ", stdout);
    out_json(stdout, place, strlen(place));
    if (i->error) {
        fputs(", \"error\": ", stdout);
        out_json(stdout, i->error, strlen(i->error));
    } else {
        printf(", \"format\": \"%s\", \"tensors\": %" PRIu64 ", \"bytes\": %" PRIu64
               ", \"faults\": %" PRIu64,
               i->format, i->tensors, i->bytes, i->faults);
        if (i->has_step)
            printf(", \"step\": %" PRId64, i->step);
    }
    putchar('}');
}

static const struct column place_columns[LS_PLACES] = {
    [LS_PLACE] = {"checkpoint", .cut = true},
    [LS_FORMAT] = {"format", .width = 16, .rank = 3, .style = STYLE_TYPE},
    [LS_STEP] = {"step", .width = 8, .rank = 1, .right = true},
    [LS_TENSORS] = {"tensors", .rank = 4, .right = true},
    [LS_BYTES] = {"size", .width = 8, .rank = 2, .right = true, .style = STYLE_SIZE},
};

static void show_checkpoint(struct ls *ls, const char *place,
                            const struct checkpoint_info *i)
{
    struct table *t = &ls->table;
    char size[16], why[64];

    table_cell(t, LS_PLACE, place, strlen(place));
    if (!i->error) {
        table_cellf(t, LS_FORMAT, "%s", i->format);
        if (i->has_step)
            table_cellf(t, LS_STEP, "%" PRId64, i->step);
        else
            table_cell(t, LS_STEP, "", 0);
        table_cellf(t, LS_TENSORS, "%" PRIu64, i->tensors);
        table_cellf(t, LS_BYTES, "%s", out_size(i->bytes, size));
    }
    table_row_end(t);
    if (i->error)
        table_note(t, STYLE_BAD, "unreadable:", i->error);
    snprintf(why, sizeof why, "%" PRIu64 " tensors", i->faults);
    if (i->faults)
        table_note(t, STYLE_BAD, "damaged:", why);
}

/* Where it lies, if it is wanted. */
static bool place_wanted(const struct ls *ls, const char *dir, const char *file,
                         char place[PATH_MAX])
{
    return store_join(dir, file ? file : "", place, PATH_MAX) == 0 &&
           (!ls->pattern || fnmatch(ls->pattern, place, 0) == 0);
}

static int see_place(void *user, const char *dir, const char *file,
                     const struct format_driver *d)
{
    struct ls *ls = user;
    char place[PATH_MAX];

    (void)d;
    if (place_wanted(ls, dir, file, place))
        column_see(&ls->c->screen, &ls->table.column[LS_PLACE], place, strlen(place));
    return 0;
}

static int one_checkpoint(void *user, const char *dir, const char *file,
                          const struct format_driver *d)
{
    struct ls *ls = user;
    CLEANUP(arena_freep) struct arena *a = arena_new(ROW_MEMORY);
    struct progress progress = {0};
    char place[PATH_MAX];
    struct checkpoint_info info;
    int ret;

    (void)d;
    if (!a)
        return err_nomem(&ls->c->err);
    if (!place_wanted(ls, dir, file, place))
        return 0;
    progress_begin(&progress, ls->c, "scan", place, 0);
    ret = scanner_get(ls->source->scanner, dir, file, a, &info, &ls->c->err);
    progress_end(&progress);
    if (ret < 0)
        return ret;
    if (ls->c->opt.json) {
        json_checkpoint(ls, place, &info);
        return 0;
    }
    ls->shown++;
    if (ls->c->screen.people)
        show_checkpoint(ls, *place ? place : ".", &info);
    else
        text_checkpoint(place, &info);
    fflush(stdout); /* a large tree is scanned while people read */
    return 0;
}

/* Local trees are gone through for the width of their names; servers are not asked twice. */
static int show_checkpoints(struct ls *ls)
{
    struct scanner *scanner = ls->source->scanner;
    struct column column[LS_PLACES];
    bool any;
    int ret = 0;

    memcpy(column, place_columns, sizeof column);
    ls->table =
        (struct table){.screen = &ls->c->screen, .column = column, .n = LS_PLACES};
    if (ls->source->store->remote)
        column[LS_PLACE].width = PLACE_WIDTH;
    else
        ret = scanner_walk(scanner, "", see_place, ls, &ls->c->err);
    any = column[LS_PLACE].width > 0;
    table_fit(&ls->table);
    if (ret == 0 && any && !ls->c->opt.quiet)
        table_head(&ls->table);
    return ret == 0 ? scanner_walk(scanner, "", one_checkpoint, ls, &ls->c->err) : ret;
}

static int list_checkpoints(struct ls *ls)
{
    int ret;

    if (ls->c->opt.json)
        fputs("{\"schema\": 1, \"checkpoints\": [", stdout);
    if (ls->c->screen.people && !ls->c->opt.json)
        ret = show_checkpoints(ls);
    else
        ret = scanner_walk(ls->source->scanner, "", one_checkpoint, ls, &ls->c->err);
    if (ls->c->opt.json)
        fputs("\n]}\n", stdout);
    if (ret < 0)
        return ret;
    if (ls->shown)
        return STATUS_DONE;
    if (!ls->pattern)
        return cli_no_checkpoint(ls->c, ls->source);
    err_set(&ls->c->err, ENOENT, "%s: no checkpoint of it matches %s", ls->source->name,
            ls->pattern);
    return err_hint(&ls->c->err, "`unshard ls %s` lists them", ls->source->name);
}

static int ls_source(struct cli *c, struct reading *s)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(ROW_MEMORY);
    struct ls ls = {.c = c, .source = s, .pattern = c->args > 1 ? c->arg[1] : NULL};
    struct checkpoint_info info;
    int ret = a ? cli_is_checkpoint(c, s) : err_nomem(&c->err);

    if (ret < 0)
        return ret;
    if (ret == 0)
        return list_checkpoints(&ls);
    ret = cli_checkpoint(c, s, a, &info);
    if (ret == -EBADMSG && s->below && !ls.pattern) { /* its line says why */
        c->err = (struct err){0};
        return list_checkpoints(&ls);
    }
    return ret < 0 ? ret : list_tensors(&ls, &info);
}

static int run(struct cli *c)
{
    CLEANUP(reading_close) struct reading s;
    int ret = cli_open(c, c->arg[0], &s);

    return ret < 0 ? ret : ls_source(c, &s);
}

const struct cli_command cmd_ls = {
    .name = "ls",
    .usage = "ls SOURCE [PATTERN] [-l] [--json]",
    .summary = "the tensors; of a tree its checkpoints",
    .min_args = 1,
    .max_args = 2,
    .takes = "l",
    .confined = true,
    .run = run,
};
