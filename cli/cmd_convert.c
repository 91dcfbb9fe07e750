/* SPDX-License-Identifier: MIT */
/* cli/cmd_convert.c - `unshard convert`: any format that is read to any that is written. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/keyset.h"
#include "base/log.h"
#include "cli/cli.h"
#include "cli/origin.h"
#include "fs/overlay.h"
#include "index/formats/format.h"
#include "index/layout.h"
#include "remote/source.h"
#include "remote/store.h"
#include "save/input.h"
#include "save/target.h"
#include "save/write.h"

enum { INFO_MEMORY = 64 << 20, LOSSES_SHOWN = 5 };

struct convert {
    struct cli *c;
    struct reading *source;
    const struct format_writer *writer;
    struct layout_options options;
    struct save_choice choice;
    unsigned part, parts;
    struct save_input *input;
    struct layout *layout;
    struct save_target *target;
    struct keyset given; /* names of side files that were copied */
    struct progress progress;
};

/* ---- options ---- */

static int wrong(struct cli *c, const char *fmt, const char *value, const char *hint)
{
    char text[300];

    snprintf(text, sizeof text, "%s=%s: no value of this option", fmt, value);
    err_set(&c->err, EINVAL, "%s", text);
    err_hint(&c->err, "%s", hint);
    return cli_usage(c);
}

static int no_writer(struct cli *c)
{
    CLEANUP(buf_release) struct buf names = {0};
    const struct format_writer *w;

    for (size_t i = 0; (w = format_writer_at(i)); i++)
        buf_addf(&names, "%s%s", i ? ", " : "", w->name);
    if (c->opt.convert.to)
        err_set(&c->err, EINVAL, "--to %s: no format that is written",
                c->opt.convert.to);
    else
        err_set(&c->err, EINVAL, "convert: --to is missing");
    err_hint(&c->err, "there are %s", names.data ? names.data : "none");
    return cli_usage(c);
}

static bool take_unsigned(const char *text, unsigned *out, const char **end)
{
    char *stop;
    unsigned long v;

    errno = 0;
    v = strtoul(text, &stop, 10);
    if (stop == text || *text == '-' || errno || v == 0 || v > 1u << 20)
        return false;
    *out = (unsigned)v;
    *end = stop;
    return true;
}

static int take_layout_options(struct convert *v)
{
    const struct convert_options *o = &v->c->opt.convert;
    const char *end = "";

    if (o->ranks && (!take_unsigned(o->ranks, &v->options.ranks, &end) || *end))
        return wrong(v->c, "--ranks", o->ranks, "a number of ranks");
    if (o->mesh && (!take_unsigned(o->mesh, &v->options.mesh[0], &end) || *end != 'x' ||
                    !take_unsigned(end + 1, &v->options.mesh[1], &end) || *end))
        return wrong(v->c, "--mesh", o->mesh, "ranks along dim 0 and dim 1, as 4x2");
    if (o->max_shard_size &&
        !parse_bytes(o->max_shard_size, &v->options.max_shard_size))
        return wrong(v->c, "--max-shard-size", o->max_shard_size,
                     "bytes, or a number with KB, MB, GB (1000) or K, M, G (1024)");
    v->options.codec = o->codec;
    return 0;
}

/* --drop optimizer,other,objects */
static int take_drop(struct convert *v)
{
    static const char *const words[] = {"model", "optimizer", "other", "objects"};
    char list[200];
    char *text = list, *word;

    v->choice.only = v->c->opt.convert.only;
    v->choice.leave_faults = v->c->opt.convert.incomplete;
    if (!v->c->opt.convert.drop)
        return 0;
    if (snprintf(list, sizeof list, "%s", v->c->opt.convert.drop) >= (int)sizeof list)
        return wrong(v->c, "--drop", v->c->opt.convert.drop, "a list of roles");
    while ((word = strsep(&text, ",+"))) {
        unsigned i = 0;

        while (i < ARRAY_SIZE(words) && strcmp(word, words[i]) != 0)
            i++;
        if (i == ARRAY_SIZE(words))
            return wrong(v->c, "--drop", word, "model, optimizer, other, objects");
        if (i == ARRAY_SIZE(words) - 1)
            v->choice.drop_objects = true;
        else
            v->choice.drop_roles[i] = true;
    }
    return 0;
}

static int take_part(struct convert *v)
{
    const char *text = v->c->opt.convert.part, *end;

    v->part = v->parts = 1;
    if (!text)
        return 0;
    if (v->c->opt.convert.finish)
        return wrong(v->c, "--part", text, "either a part, or --finish");
    if (!take_unsigned(text, &v->part, &end) || *end != '/' ||
        !take_unsigned(end + 1, &v->parts, &end) || *end || v->part > v->parts)
        return wrong(v->c, "--part", text, "I/N with I from 1 to N");
    return 0;
}

static int take_options(struct convert *v)
{
    int ret;

    v->writer = v->c->opt.convert.to ? format_writer(v->c->opt.convert.to) : NULL;
    if (!v->writer)
        return no_writer(v->c);
    ret = take_layout_options(v);
    if (ret == 0)
        ret = take_drop(v);
    return ret == 0 ? take_part(v) : ret;
}

/* ---- what is lost ---- */

static int refuse_losses(struct convert *v)
{
    static const char *const name[] = {
        [LOSS_OBJECT] = "object", [LOSS_TENSOR] = "tensor", [LOSS_ROLE] = "role"};
    CLEANUP(buf_release) struct buf list = {.max = 4096};
    size_t n = layout_losses(v->layout);
    enum layout_loss kind;

    if (n == 0)
        return 0;
    for (size_t i = 0; i < MIN(n, (size_t)LOSSES_SHOWN); i++) {
        const char *what = layout_loss_at(v->layout, i, &kind);

        buf_addf(&list, "%s%s %.200s", i ? ", " : "", name[kind], what);
    }
    err_set(&v->c->err, ENOTSUP, "%s cannot hold %s%s", v->writer->name,
            list.data ? list.data : "", n > LOSSES_SHOWN ? ", ..." : "");
    err_hint(&v->c->err, "leave them out: --drop optimizer,other,objects, or --only");
    return cli_usage(v->c);
}

/* ---- the journal's first line ---- */

/* All that decides about the bytes, and the version of who writes them. */
static int describe(const struct convert *v, struct buf *out)
{
    CLEANUP(buf_release) struct buf source = {0};
    uint64_t digest[2];
    struct err *e = &v->c->err;

    TRY(layout_digest(v->layout, digest, e));
    TRY(save_input_identity(v->input, &source, e));
    TRY(mapping_identity(v->source->mapping, "", &source, e));
    for (size_t i = 0; i < source.len; i++)
        if (source.data[i] == '\n')
            source.data[i] = ' ';
    buf_addf(out,
             "unshardfs " UFS_VERSION " %s %016" PRIx64 "%016" PRIx64
             " windows of %d from %s",
             v->writer->name, digest[0], digest[1], SAVE_WINDOW, source.data);
    return buf_failed(out) ? err_nomem(e) : 0;
}

/* ---- side files ---- */

/* Does the layout make something of this name, or below it? */
static bool is_written(const struct convert *v, const char *name)
{
    size_t len = strlen(name);
    struct layout_file_info f;

    for (size_t i = 0; i < layout_files(v->layout); i++) {
        layout_file_info(v->layout, i, &f);
        if (strncmp(f.path, name, len) == 0 &&
            (f.path[len] == '\0' || f.path[len] == '/'))
            return true;
    }
    for (size_t i = 0; i < layout_directories(v->layout); i++) {
        const char *path = layout_directory_at(v->layout, i);

        if (strncmp(path, name, len) == 0 && (path[len] == '\0' || path[len] == '/'))
            return true;
    }
    return false;
}

/* What the layout writes goes first: then nothing is copied. Each name is written once. */
static int copy_file(struct convert *v, struct store *store, const char *path,
                     const char *name)
{
    CLEANUP(source_putp) struct source *src = NULL;
    struct err *e = &v->c->err;
    int ret;

    if (is_written(v, name))
        return 0;
    ret = keyset_add(&v->given, name, strlen(name));
    if (ret != 1)
        return ret < 0 ? err_nomem(e) : 0;
    TRY(store->ops->open(store, path, &src, e));
    return v->target->ops->side(v->target, name, src, e);
}

static int copy_side(void *user, const char *name, const char *path)
{
    struct convert *v = user;

    return copy_file(v, v->source->store, path, name);
}

static int copy_overlay(struct convert *v, const char *dir)
{
    struct overlay *o;
    int ret = overlay_open(dir, &o, &v->c->err);

    if (ret < 0)
        return ret;
    for (size_t i = 0; ret == 0 && i < overlay_count(o); i++) {
        const char *name = overlay_at(o, i)->name;

        ret = copy_file(v, overlay_store(o), name, name);
    }
    overlay_free(o);
    return ret;
}

/*
 * What stands beside the tensors in a mount goes along: config, tokenizer, notes. What --hf
 * lays over goes before the source's own, as there.
 */
static int copy_sides(struct convert *v, const struct checkpoint_info *info)
{
    int ret = 0;

    if (v->c->opt.mapping.hf)
        ret = copy_overlay(v, v->c->opt.mapping.hf);
    return ret == 0 ? cli_side_files(v->c, v->source, info, copy_side, v) : ret;
}

static int see_safetensors(void *user, const char *name, const char *path)
{
    static const char end[] = ".safetensors";
    struct convert *v = user;
    size_t len = strlen(name), n = sizeof end - 1;

    (void)path;
    v->options.index |= len > n && strcmp(name + len - n, end) == 0;
    return 0;
}

/*
 * Loaders that take all *.safetensors drop those that the index does not name: where others
 * go along beside the model's, there is one.
 */
static int look_at_sides(struct convert *v, const struct checkpoint_info *info)
{
    return cli_side_files(v->c, v->source, info, see_safetensors, v);
}

/* ---- the run ---- */

static void add_progress(void *user, uint64_t bytes)
{
    struct convert *v = user;

    progress_add(&v->progress, bytes);
}

static int write_files(struct convert *v, const struct checkpoint_info *info)
{
    bool whole = v->parts == 1, finish = v->c->opt.convert.finish;
    const struct save_run run = {
        .layout = v->layout,
        .input = save_input_of(v->input),
        .source = save_input_source(v->input),
        .pool = v->source->pool,
        .part = v->part,
        .parts = v->parts,
        .first_stage = !finish,
        .other_stages = whole || finish,
        .progress = add_progress,
        .user = v,
    };
    int ret;

    progress_begin(&v->progress, v->c, "convert", NULL, save_bytes(&run));
    ret = v->target->ops->write(v->target, &run, &v->c->err);
    if (ret == 0 && run.other_stages)
        ret = copy_sides(v, info);
    if (ret == 0 && run.other_stages)
        ret = v->target->ops->publish(v->target, &v->c->err);
    progress_end(&v->progress);
    return ret;
}

/* What is wrong with where it goes, or with what is there, is the caller's mistake. */
static int open_target(struct convert *v)
{
    CLEANUP(buf_release) struct buf what = {0};
    struct staging_claim claim = {.target = v->c->arg[1],
                                  .part = v->part,
                                  .parts = v->parts,
                                  .finish = v->c->opt.convert.finish};
    int ret = describe(v, &what);

    if (ret < 0)
        return ret;
    claim.what = what.data;
    ret = save_target_open(&claim, &v->target, &v->c->err);
    if (ret == -EEXIST || ret == -EINVAL || ret == -EBUSY || ret == -ENOTSUP)
        cli_usage(v->c);
    return ret;
}

/* ---- what the source says of itself ---- */

static int print_warning(void *user, const char *code, const char *text)
{
    const struct convert *v = user;

    if (v->c->opt.quiet)
        return 0;
    fprintf(stderr, "unshard: warning: %s: ", code);
    out_text(stderr, text, strlen(text), 0);
    fputc('\n', stderr);
    return 0;
}

/* What is written of a checkpoint that is not complete looks complete. */
static int refuse_incomplete(struct convert *v, const struct checkpoint_info *info)
{
    CLEANUP(buf_release) struct buf first = {0};
    uint64_t losses;
    int ret = cli_origin_losses(v->c, v->source, info->id, &losses, &first);

    if (ret < 0 || !losses || v->c->opt.convert.incomplete)
        return ret;
    err_set(&v->c->err, EBADMSG, "%s: not complete: %s", v->source->name, first.data);
    return err_hint(&v->c->err, "--incomplete writes what is there");
}

static int look_at_source(struct convert *v, const struct checkpoint_info *info)
{
    int ret =
        catalog_warnings(v->source->catalog, info->id, print_warning, v, &v->c->err);

    return ret == 0 ? refuse_incomplete(v, info) : ret;
}

static int convert_checkpoint(struct convert *v)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    struct checkpoint_info info;
    struct err *e = &v->c->err;
    int ret = a ? cli_checkpoint(v->c, v->source, a, &info) : err_nomem(e);

    if (ret == 0)
        ret = look_at_source(v, &info);
    if (ret == 0)
        ret = look_at_sides(v, &info);
    if (ret == 0)
        ret = save_input_new(&v->source->env, info.id, &v->choice, &v->input, e);
    if (ret == 0)
        ret = layout_new(&v->layout, e);
    if (ret == 0) {
        ret = v->writer->layout(save_input_of(v->input), &v->options, v->layout, e);
        if (ret == -EINVAL || ret == -ENOTSUP)
            cli_usage(v->c);
    }
    if (ret == 0)
        ret = refuse_losses(v);
    if (ret == 0)
        ret = open_target(v);
    return ret == 0 ? write_files(v, &info) : ret;
}

static int run(struct cli *c)
{
    CLEANUP(reading_close) struct reading s = {0};
    struct convert v = {.c = c, .source = &s};
    int ret = take_options(&v);

    if (ret == 0)
        ret = cli_open(c, c->arg[0], &s);
    if (ret == 0)
        ret = convert_checkpoint(&v);
    save_target_close(v.target);
    keyset_release(&v.given);
    layout_free(v.layout);
    save_input_free(v.input);
    return ret;
}

const struct cli_command cmd_convert = {
    .name = "convert",
    .usage = "convert SOURCE DEST --to FORMAT [options]",
    .summary = "writes a checkpoint in another format or topology",
    .min_args = 2,
    .max_args = 2,
    .takes = "c",
    .run = run,
};
