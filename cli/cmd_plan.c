/* SPDX-License-Identifier: MIT */
/* cli/cmd_plan.c - how a tensor is copied together, chunk by chunk. */
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/fsutil.h"
#include "cli/cli.h"
#include "cli/origin.h"
#include "gpu/plan_wire.h"
#include "gpu/tensor.h"
#include "index/plan.h"
#include "remote/source.h"
#include "remote/store.h"

enum { PLAN_MEMORY = 64 << 20 };

struct row {
    const struct chunk *chunk;
    struct chunk_place place;
    const char *path;
    uint32_t nd;
};

static void print_dims(const char *open, const uint64_t *v, uint32_t n,
                       const char *close)
{
    fputs(open, stdout);
    for (uint32_t i = 0; i < n; i++)
        printf("%s%" PRIu64, i ? ", " : "", v[i]);
    fputs(close, stdout);
}

static void print_steps(const int64_t *v, uint32_t n)
{
    putchar('[');
    for (uint32_t i = 0; i < n; i++)
        printf("%s%" PRId64, i ? ", " : "", v[i]);
    putchar(']');
}

static void text_row(const struct row *r)
{
    print_dims("  [", r->chunk->start, r->nd, "] + ");
    print_dims("[", r->chunk->size, r->nd, "]  from ");
    out_text(stdout, r->path, strlen(r->path), 0);
    printf(" byte %" PRIu64 ", steps ", r->place.base);
    print_steps(r->place.step, r->nd);
    if (r->chunk->encoding != CHUNK_PLAIN)
        printf(", item at %" PRIu64 "+%" PRIu64, r->chunk->offset, r->chunk->length);
    if (r->place.flags)
        printf(", work on elements:%s%s%s", r->place.flags & CHUNK_SWAP ? " swap" : "",
               r->place.flags & CHUNK_CONJ ? " conjugate" : "",
               r->place.flags & CHUNK_NEG ? " negate" : "");
    putchar('\n');
}

static void json_row(const struct row *r, bool first)
{
    fputs(first ? "\n    {\"start\": " : ",\n    {\"start\": ", stdout);
    print_dims("[", r->chunk->start, r->nd, "], \"size\": ");
    print_dims("[", r->chunk->size, r->nd, "], \"file\": ");
    out_json(stdout, r->path, strlen(r->path));
    printf(", \"byte\": %" PRIu64 ", \"steps\": ", r->place.base);
    print_steps(r->place.step, r->nd);
    printf(", \"item\": [%" PRIu64 ", %" PRIu64 "], \"encoding\": %u, \"flags\": %u}",
           r->chunk->offset, r->chunk->length, r->chunk->encoding, r->place.flags);
}

static int print_origin(struct cli *c, const struct tensor_info *t,
                        const struct cli_origin *origin)
{
    CLEANUP(buf_release) struct buf text = {0};

    if (cli_origin_text(origin, t, &text))
        return err_nomem(&c->err);
    fputs("  origin ", stdout);
    out_text(stdout, text.data, text.len, 0);
    putchar('\n');
    return 0;
}

static int print_plan(struct cli *c, struct reader *r, const struct tensor_info *t,
                      const struct cli_origin *origin)
{
    const struct plan *plan = reader_plan(r);
    CLEANUP(buf_release) struct buf shape = {0};
    struct chunk_room room;
    struct shape units;
    int ret = shape_units(&t->shape, t->stored, &units, &c->err);

    if (ret < 0 || (ret = shape_format(&t->shape, &shape)) < 0)
        return ret;
    if (c->opt.json) {
        fputs("{\"schema\": 1, \"key\": ", stdout);
        out_json(stdout, t->key, t->key_len);
        printf(
            ", \"dtype\": \"%s\", \"stored\": \"%s\", \"shape\": %s, \"bytes\": %" PRIu64,
            dtype_name(t->dtype), dtype_name(t->stored), shape.data, t->bytes);
        cli_origin_json(origin);
        fputs(", \"chunks\": [", stdout);
    } else {
        out_text(stdout, t->key, t->key_len, 0);
        printf("  %s %s, %" PRIu64 " bytes of %zu chunks", dtype_name(t->dtype),
               shape.data, t->bytes, plan_chunks(plan));
        if (t->stored != t->dtype)
            printf(", stored as %s", dtype_name(t->stored));
        putchar('\n');
        TRY(print_origin(c, t, origin));
    }
    room.list = NULL;
    for (size_t i = 0; i < plan_chunks(plan); i++) {
        struct row row = {.chunk = plan_chunk(plan, i, &room), .nd = units.nd};

        TRY(reader_place(r, i, &row.place, &row.path, &c->err));
        if (c->opt.json)
            json_row(&row, i == 0);
        else
            text_row(&row);
        source_put(row.place.src);
    }
    if (c->opt.json)
        fputs("\n]}\n", stdout);
    return STATUS_DONE;
}

/* Also of a tensor that cannot be read: why it is looked for there. */
static int tell_plan(struct cli *c, struct reading *s,
                     const struct checkpoint_info *info, const struct tensor_info *t)
{
    CLEANUP(reader_closep) struct reader *r = NULL;
    struct cli_origin origin = {0};
    int ret = cli_origin_of(c, s, info, t, &origin);

    if (ret == 0)
        ret = reader_open_tensor(&s->env, info->id, t->ord, false, &r, &c->err);
    if (ret == 0)
        ret = print_plan(c, r, t, &origin);
    else if (!c->opt.json && origin.rule.len)
        print_origin(c, t, &origin);
    cli_origin_release(&origin);
    return ret;
}

/* The directory that paths of the store's files are relative to. */
static int root_of(const struct store *s, struct buf *out)
{
    const char *slash = s->file ? strrchr(s->url, '/') : NULL;

    buf_add(out, s->url, slash ? (size_t)(slash - s->url) : strlen(s->url));
    return buf_adds(out, "");
}

/* gpu/plan_wire.h tells what it looks like. */
static int binary_plan(struct cli *c, struct reading *s, int64_t checkpoint,
                       uint32_t ord)
{
    CLEANUP(tensor_putp) struct tensor *t = NULL;
    CLEANUP(buf_release) struct buf root = {0}, out = {0};
    int ret = tensor_open(&s->env, checkpoint, ord, &t, &c->err);

    if (ret == 0 && root_of(s->store, &root) < 0)
        ret = err_nomem(&c->err);
    if (ret == 0)
        ret = wire_write(t, root.data, &out, &c->err);
    if (ret == 0 && (ret = write_all(STDOUT_FILENO, out.data, out.len, &c->err)) < 0)
        err_wrap(&c->err, "standard output");
    return ret;
}

static int plan_tensor(struct cli *c, struct reading *s)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(PLAN_MEMORY);
    struct checkpoint_info info;
    struct tensor_info t;
    int ret = a ? cli_tensor(c, s, c->arg[1], a, &info, &t) : err_nomem(&c->err);

    if (ret == 0 && c->opt.binary)
        return binary_plan(c, s, info.id, t.ord);
    return ret < 0 ? ret : tell_plan(c, s, &info, &t);
}

static int run(struct cli *c)
{
    CLEANUP(reading_close) struct reading s;
    int ret = cli_open(c, c->arg[0], &s);

    return ret < 0 ? ret : plan_tensor(c, &s);
}

const struct cli_command cmd_plan = {
    .name = "plan",
    .usage = "plan SOURCE KEY [--json | --binary]",
    .summary = "how a tensor is copied together",
    .min_args = 2,
    .max_args = 2,
    .takes = "b",
    .confined = true,
    .run = run,
};
