/* SPDX-License-Identifier: MIT */
/* cli/cmd_cat.c - one tensor to standard output. */
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/fsutil.h"
#include "cli/cli.h"

enum { CAT_MEMORY = 64 << 20, CAT_WINDOW = 4 << 20 };

static int copy_out(struct cli *c, struct reader *r, uint64_t ahead)
{
    CLEANUP_FREE char *window = malloc(CAT_WINDOW);
    uint64_t size = reader_size(r);
    struct progress p = {0};
    int ret = window ? 0 : err_nomem(&c->err);

    progress_begin(&p, c, "cat", c->arg[1], size);
    for (uint64_t at = 0; ret == 0 && at < size;) {
        size_t part = (size_t)MIN(size - at, (uint64_t)CAT_WINDOW);

        reader_will_need(r, at + part, ahead);
        ret = reader_read(r, at, part, window, &c->err);
        if (ret == 0 && (ret = write_all(STDOUT_FILENO, window, part, &c->err)) < 0)
            err_wrap(&c->err, "standard output");
        at += part;
        progress_add(&p, part);
    }
    progress_end(&p);
    return ret;
}

static int cat_tensor(struct cli *c, struct reading *s)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(CAT_MEMORY);
    CLEANUP(reader_closep) struct reader *r = NULL;
    struct checkpoint_info info;
    struct tensor_info t;
    int ret = a ? cli_tensor(c, s, c->arg[1], a, &info, &t) : err_nomem(&c->err);

    if (ret == 0 &&
        (ret = reader_open_tensor(&s->env, info.id, t.ord, c->opt.npy, &r, &c->err)) <
            0 &&
        !c->err.hint[0])
        err_hint(&c->err, "`unshard verify %s` lists all that is damaged", s->name);
    return ret < 0 ? ret : copy_out(c, r, reader_ahead(&s->env));
}

static int run(struct cli *c)
{
    CLEANUP(reading_close) struct reading s;
    int ret = cli_open(c, c->arg[0], &s);

    return ret < 0 ? ret : cat_tensor(c, &s);
}

const struct cli_command cmd_cat = {
    .name = "cat",
    .usage = "cat SOURCE KEY [--npy]",
    .summary = "one tensor to stdout, as raw bytes or as .npy",
    .min_args = 2,
    .max_args = 2,
    .takes = "n",
    .confined = true,
    .run = run,
};
