/* SPDX-License-Identifier: MIT */
/* cli/cmd_ls.c - the tensors of a checkpoint, or the checkpoints of a tree. */
#include <errno.h>
#include <fnmatch.h>
#include <string.h>

#include "base/arena.h"
#include "cli/cli.h"
#include "index/formats/scan.h"
#include "index/names.h"
#include "remote/store.h"

enum { KEY_WIDTH_MAX = 72, ROW_MEMORY = 64 << 20 };

struct ls {
    struct cli *c;
    struct cli_source *source;
    const char *pattern; /* NULL: all */
    int key_width, shape_width;
    size_t shown;
    int ret;
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

static int json_row(void *user, const struct tensor_info *t)
{
    struct ls *ls = user;
    CLEANUP(buf_release) struct buf shape = {0};

    if (!wanted(ls, t->key))
        return 0;
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
    putchar('}');
    return ferror(stdout) ? -EIO : 0;
}

static int list_tensors(struct ls *ls, const struct checkpoint_info *info)
{
    struct catalog *cat = ls->source->catalog;
    int ret;

    if (ls->c->opt.json) {
        fputs("{\"schema\": 1, \"tensors\": [", stdout);
        ret = catalog_tensors(cat, info->id, 0, json_row, ls, &ls->c->err);
        fputs("\n]}\n", stdout);
    } else {
        ret = catalog_tensors(cat, info->id, 0, measure, ls, &ls->c->err);
        if (ret == 0)
            ret = catalog_tensors(cat, info->id, 0, text_row, ls, &ls->c->err);
    }
    if (ret < 0)
        return ret;
    if (ls->pattern && !ls->shown)
        return cli_no_match(ls->c, ls->source, info->id, ls->pattern);
    return STATUS_DONE;
}

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

static int one_checkpoint(void *user, const char *dir, const char *file,
                          const struct format_driver *d)
{
    struct ls *ls = user;
    CLEANUP(arena_freep) struct arena *a = arena_new(ROW_MEMORY);
    char place[4096];
    struct checkpoint_info info;
    int ret;

    (void)d;
    if (!a)
        return err_nomem(&ls->c->err);
    ret = store_join(dir, file ? file : "", place, sizeof place);
    if (ret < 0 || (ls->pattern && fnmatch(ls->pattern, place, 0) != 0))
        return 0;
    ret = scanner_get(ls->source->scanner, dir, file, a, &info, &ls->c->err);
    if (ret < 0)
        return ret;
    if (ls->c->opt.json) {
        json_checkpoint(ls, place, &info);
    } else {
        ls->shown++;
        text_checkpoint(place, &info);
        fflush(stdout); /* a large tree is scanned while people read */
    }
    return 0;
}

static int list_checkpoints(struct ls *ls)
{
    int ret;

    if (ls->c->opt.json)
        fputs("{\"schema\": 1, \"checkpoints\": [", stdout);
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

static int ls_source(struct cli *c, struct cli_source *s)
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
    return ret < 0 ? ret : list_tensors(&ls, &info);
}

static int run(struct cli *c)
{
    CLEANUP(cli_close) struct cli_source s;
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
