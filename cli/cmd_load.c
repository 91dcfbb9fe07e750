/* SPDX-License-Identifier: MIT */
/* cli/cmd_load.c - tensors into memory of the host or of a device, by the library; timed. */
#include <errno.h>
#include <fnmatch.h>
#include <string.h>

#include "base/vec.h"
#include "cli/cli.h"
#include "index/dtype.h"
#include "lib/unshard.h"

enum { GROUP_BYTES = 1 << 30, ALIGN = 256 };

/* What is loaded, into which memory. */
struct loading {
    struct cli *c;
    struct unshard *u;
    int device;
    struct unshard_part
        *part; /* of one group; addresses are offsets until it is loaded */
    size_t parts, cap;
    uint64_t group, room;    /* bytes of the group, and of the memory */
    uint64_t memory;         /* its address; 0: none yet */
    uint64_t tensors, bytes; /* done */
    uint64_t faults;
    double seconds;
    struct unshard_stats stats;
    struct progress progress;
    uint64_t shown; /* of this group */
};

/* An error of the library becomes the command's. */
static int failed(struct cli *c, int ret, const char *words)
{
    return err_set(&c->err, -ret, "%s", words);
}

static void device_name(int device, char dst[32])
{
    if (device == UNSHARD_HOST)
        snprintf(dst, 32, "cpu");
    else
        snprintf(dst, 32, "cuda:%d", device);
}

/* ---- which device ---- */

/* Says so when it is the host for want of a device. */
static void fall_back(struct loading *l)
{
    char words[UNSHARD_ERROR];
    uint64_t address;

    l->device = 0;
    if (unshard_device_alloc(l->u, 0, 1, &address, words) == 0) {
        unshard_device_free(l->u, 0, address, NULL);
        return;
    }
    l->device = UNSHARD_HOST;
    if (!l->c->opt.quiet)
        fprintf(stderr, "unshard: load: into memory of the host: %s\n", words);
}

static int choose_device(struct loading *l)
{
    const char *name = l->c->opt.device ? l->c->opt.device : "auto";
    int end = 0;

    if (!strcmp(name, "auto"))
        fall_back(l);
    else if (!strcmp(name, "cpu"))
        l->device = UNSHARD_HOST;
    else if (!strcmp(name, "cuda"))
        l->device = 0;
    else if (sscanf(name, "cuda:%2d%n", &l->device, &end) != 1 || name[end] ||
             l->device < 0) {
        err_set(&l->c->err, EINVAL, "load: there is no device \"%s\"", name);
        err_hint(&l->c->err, "they are cpu, cuda:N and auto");
        return cli_usage(l->c);
    }
    return 0;
}

/* ---- memory ---- */

static void give_memory_back(struct loading *l)
{
    if (!l->memory)
        return;
    if (l->device == UNSHARD_HOST)
        free((void *)(uintptr_t)l->memory);
    else
        unshard_device_free(l->u, l->device, l->memory, NULL);
    l->memory = 0;
}

static int take_memory(struct loading *l)
{
    char words[UNSHARD_ERROR];
    int ret;

    if (l->memory && l->room >= l->group)
        return 0;
    give_memory_back(l);
    l->room = MAX(l->group, (uint64_t)1);
    if (l->device == UNSHARD_HOST) {
        l->memory = (uintptr_t)malloc((size_t)l->room);
        return l->memory ? 0 : err_nomem(&l->c->err);
    }
    ret = unshard_device_alloc(l->u, l->device, l->room, &l->memory, words);
    return ret < 0 ? failed(l->c, ret, words) : 0;
}

/* ---- loading ---- */

static int show_progress(void *user, uint64_t done, uint64_t total)
{
    struct loading *l = user;

    (void)total;
    progress_add(&l->progress, done - l->shown);
    l->shown = done;
    return 0;
}

static void add_stats(struct loading *l, const struct unshard_stats *s)
{
    l->stats.read_bytes += s->read_bytes;
    l->stats.sent_bytes += s->sent_bytes;
    l->stats.batches += s->batches;
    l->stats.direct += s->direct;
    l->stats.launches += s->launches;
}

/* Loads the group that was collected. */
static int flush(struct loading *l)
{
    struct unshard_stats stats = {.size = sizeof stats};
    struct timespec from, to;
    char words[UNSHARD_ERROR];
    int ret = l->parts ? take_memory(l) : 0;

    if (ret < 0 || !l->parts)
        return ret;
    for (size_t i = 0; i < l->parts; i++)
        l->part[i].address += l->memory;
    l->shown = 0;
    clock_gettime(CLOCK_MONOTONIC, &from);
    ret = unshard_load(l->u, l->part, l->parts, l->device, show_progress, l, &stats,
                       words);
    clock_gettime(CLOCK_MONOTONIC, &to);
    if (ret < 0)
        return failed(l->c, ret, words);
    l->seconds +=
        (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
    add_stats(l, &stats);
    for (size_t i = 0; i < l->parts; i++)
        l->bytes += l->part[i].bytes;
    l->tensors += l->parts;
    l->parts = 0;
    l->group = 0;
    return 0;
}

static int add_part(struct loading *l, size_t number, const struct unshard_tensor *t)
{
    int ret = 0;

    if (l->group && l->group + t->bytes > GROUP_BYTES)
        ret = flush(l);
    if (ret == 0 && !VEC_ROOM(l->part, l->parts, l->cap))
        return err_nomem(&l->c->err);
    if (ret < 0)
        return ret;
    l->part[l->parts++] = (struct unshard_part){.size = sizeof *l->part,
                                                .tensor = number,
                                                .address = l->group,
                                                .bytes = t->bytes};
    l->group += (t->bytes + ALIGN - 1) / ALIGN * ALIGN;
    return 0;
}

/* A tensor that cannot be had is told, and the others are loaded. */
static void tell_fault(struct loading *l, const struct unshard_tensor *t)
{
    struct err e = {0};
    char line[1400];

    progress_hide(&l->progress);
    err_set(&e, EIO, "load: tensor %s: %s", t->key, t->fault);
    fprintf(stderr, "unshard: %s\n", err_line(&e, line, sizeof line));
    progress_show(&l->progress);
    l->faults++;
}

static bool wanted(const struct cli *c, const struct unshard_tensor *t)
{
    return c->args < 2 || strcmp(c->arg[1], t->key) == 0 ||
           fnmatch(c->arg[1], t->key, 0) == 0;
}

static int load_all(struct loading *l)
{
    struct unshard_tensor t;
    uint64_t total = 0;
    size_t found = 0;
    int ret = 0;

    for (size_t i = 0; unshard_tensor(l->u, i, &t) == 0; i++)
        if (wanted(l->c, &t)) {
            total += t.fault ? 0 : t.bytes;
            found++;
        }
    if (!found && l->c->args == 2) {
        err_set(&l->c->err, ENOENT, "%s: no tensor %s", l->c->arg[0], l->c->arg[1]);
        return err_hint(&l->c->err, "`unshard ls %s` lists them", l->c->arg[0]);
    }
    progress_begin(&l->progress, l->c, "load", NULL, total);
    for (size_t i = 0; ret == 0 && unshard_tensor(l->u, i, &t) == 0; i++) {
        if (!wanted(l->c, &t))
            continue;
        if (t.fault)
            tell_fault(l, &t);
        else
            ret = add_part(l, i, &t);
    }
    if (ret == 0)
        ret = flush(l);
    progress_end(&l->progress);
    return ret;
}

/* ---- the report ---- */

static void json_report(const struct loading *l, const char *device)
{
    printf("{\"schema\": 1, \"source\": ");
    out_json(stdout, l->c->arg[0], strlen(l->c->arg[0]));
    printf(", \"device\": \"%s\", \"tensors\": %" PRIu64 ", \"bytes\": %" PRIu64
           ", \"faults\": %" PRIu64 ", \"seconds\": %.6f",
           device, l->tensors, l->bytes, l->faults, l->seconds);
    if (l->device != UNSHARD_HOST)
        printf(", \"read_bytes\": %" PRIu64 ", \"sent_bytes\": %" PRIu64
               ", \"batches\": %" PRIu64 ", \"direct\": %" PRIu64
               ", \"launches\": %" PRIu64,
               l->stats.read_bytes, l->stats.sent_bytes, l->stats.batches,
               l->stats.direct, l->stats.launches);
    printf("}\n");
}

static void report(const struct loading *l)
{
    char device[32], size[16];

    device_name(l->device, device);
    if (l->c->opt.json) {
        json_report(l, device);
        return;
    }
    printf("%" PRIu64 " tensor%s, %s (%" PRIu64 " bytes) into %s", l->tensors,
           l->tensors == 1 ? "" : "s", out_size(l->bytes, size), l->bytes, device);
    if (l->c->opt.time)
        printf(" in %.3f s, %.2f GB/s", l->seconds,
               l->seconds > 0 ? (double)l->bytes / l->seconds / 1e9 : 0);
    putchar('\n');
}

/* ---- the command ---- */

static int open_source(struct cli *c, struct unshard **out)
{
    struct unshard_options options;
    char words[UNSHARD_ERROR];
    int ret;

    cli_library_options(c, &options);
    ret = unshard_open(c->secret[0] ? c->secret[0] : c->arg[0], &options, out, words);
    return ret < 0 ? failed(c, ret, words) : 0;
}

static int run(struct cli *c)
{
    struct loading l = {.c = c};
    int ret = open_source(c, &l.u);

    if (ret == 0)
        ret = choose_device(&l);
    if (ret == 0)
        ret = load_all(&l);
    if (ret == 0)
        report(&l);
    give_memory_back(&l);
    free(l.part);
    unshard_close(l.u);
    return ret < 0 ? ret : l.faults ? STATUS_SOURCE : STATUS_DONE;
}

const struct cli_command cmd_load = {
    .name = "load",
    .usage = "load SOURCE [PATTERN] --device D [--time]",
    .summary = "tensors into memory of the host (cpu) or a GPU (cuda:N)",
    .min_args = 1,
    .max_args = 2,
    .takes = "g",
    .run = run,
};
