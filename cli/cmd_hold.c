/* SPDX-License-Identifier: MIT */
/* cli/cmd_hold.c - keeps tensors in device memory for other processes. */
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <string.h>
#include <sys/signalfd.h>

#include "base/buf.h"
#include "cli/cli.h"
#include "index/dtype.h"
#include "lib/hold.h"

static void tell_ready(void *user, const char *path)
{
    const struct cli *c = user;

    if (c->opt.json) {
        fputs("{\"schema\": 1, \"socket\": ", stdout);
        out_json(stdout, path, strlen(path));
        puts("}");
    } else {
        printf("holding %s: %s\n", c->arg[0], path);
    }
    fflush(stdout);
}

/* Read when a signal asks for the end. All threads of the holder inherit that it waits. */
static int end_signals(struct err *e)
{
    sigset_t set;
    int fd;

    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    if (pthread_sigmask(SIG_BLOCK, &set, NULL))
        return err_set(e, EINVAL, "signals cannot be set up");
    fd = signalfd(-1, &set, SFD_CLOEXEC);
    return fd < 0 ? err_set(e, errno, "signalfd: %s", strerror(errno)) : fd;
}

/* "N", "cuda:N" or nothing: 0. */
static int parse_device(struct cli *c, int *out)
{
    const char *text = c->opt.device ? c->opt.device : "0";
    int end = 0;

    if (!strncmp(text, "cuda:", 5))
        text += 5;
    if (sscanf(text, "%2d%n", out, &end) == 1 && !text[end] && *out >= 0)
        return 0;
    err_set(&c->err, EINVAL, "hold: there is no device \"%s\"", c->opt.device);
    err_hint(&c->err, "a number, as in --device 0");
    return cli_usage(c);
}

static int take_options(struct cli *c, struct unshard_options *u,
                        struct hold_options *h)
{
    const struct cli_options *o = &c->opt;

    cli_library_options(c, u);
    *h = (struct hold_options){.source = c->secret[0] ? c->secret[0] : c->arg[0],
                               .options = u};
    if (!o->budget || parse_bytes(o->budget, &h->budget))
        return parse_device(c, &h->device);
    err_set(&c->err, EINVAL, "hold: --budget %s is no number of bytes", o->budget);
    return cli_usage(c);
}

static int hold(struct cli *c, struct hold_table *t, int stop)
{
    CLEANUP(buf_release) struct buf path = {.max = PATH_MAX};
    int ret = hold_path(c->arg[0], hold_table_device(t)->uuid, &path, &c->err);

    if (ret == 0)
        ret = hold_serve(t, path.data, stop, tell_ready, c, &c->err);
    if (ret == -EADDRINUSE)
        err_hint(&c->err, "a holder of this source and device is there already");
    return ret;
}

static int run(struct cli *c)
{
    struct unshard_options options;
    struct hold_options o;
    struct hold_table *t = NULL;
    CLEANUP_FD int stop = -1;
    int ret = take_options(c, &options, &o);

    if (ret < 0)
        return ret;
    stop = end_signals(&c->err);
    if (stop < 0)
        return stop;
    ret = hold_table_new(&o, &t, &c->err);
    if (ret == 0)
        ret = hold(c, t, stop);
    if (ret == 0 || t)
        hold_table_free(t);
    return ret < 0 ? ret : STATUS_DONE;
}

const struct cli_command cmd_hold = {
    .name = "hold",
    .usage = "hold SOURCE --device N [--budget SIZE]",
    .summary = "keeps tensors in a GPU's memory for other processes",
    .min_args = 1,
    .max_args = 1,
    .takes = "gh",
    .run = run,
};
