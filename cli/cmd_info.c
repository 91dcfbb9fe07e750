/* SPDX-License-Identifier: MIT */
/* cli/cmd_info.c - what a checkpoint is: format, step, topology, totals, warnings. */
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "cli/cli.h"
#include "index/names.h"
#include "remote/store.h"

enum { INFO_MEMORY = 64 << 20, HIDDEN_MAX = 1 << 20 };

static void field(const char *name, const char *value)
{
    if (!value)
        return;
    printf("%-12s ", name);
    out_text(stdout, value, strlen(value), 0);
    putchar('\n');
}

static int print_warning(void *user, const char *code, const char *text)
{
    (void)user;
    printf("%-12s %s: ", "warning", code);
    out_text(stdout, text, strlen(text), 0);
    putchar('\n');
    return 0;
}

static int print_fault(void *user, const struct tensor_info *t)
{
    (void)user;
    if (!t->fault)
        return 0;
    printf("%-12s ", "damaged");
    out_text(stdout, t->key, t->key_len, 0);
    fputs(": ", stdout);
    out_text(stdout, t->fault, strlen(t->fault), 0);
    putchar('\n');
    return 0;
}

struct side {
    struct listing *listing;
    bool *hidden; /* one an entry */
};

/* Entries are sorted by name. */
static int hide(void *user, const char *name, bool part)
{
    struct side *s = user;
    size_t lo = 0, hi = listing_count(s->listing);

    (void)part;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int order = strcmp(listing_at(s->listing, mid)->name, name);

        if (order == 0)
            s->hidden[mid] = true;
        if (order < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return 0;
}

/* Files of the directory that the mount shows as they are. */
static int print_side_files(struct cli *c, struct cli_source *s,
                            const struct checkpoint_info *info)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct side side;
    int ret = s->store->ops->list(s->store, info->path, &l, &c->err);

    if (ret < 0)
        return ret;
    CLEANUP_FREE bool *hidden = calloc(listing_count(l) + 1, sizeof *hidden);
    if (!hidden)
        return err_nomem(&c->err);
    side = (struct side){.listing = l, .hidden = hidden};
    ret = catalog_hidden(s->catalog, info->id, hide, &side, &c->err);
    for (size_t i = 0; ret == 0 && i < listing_count(l); i++) {
        const struct listing_entry *e = listing_at(l, i);

        if (!hidden[i] && e->st.kind == ENTRY_FILE &&
            !(info->file && !strcmp(info->file, e->name)))
            field("side file", e->name);
    }
    return ret;
}

static void print_totals(const struct checkpoint_info *i)
{
    char size[16];

    printf("%-12s %" PRIu64 " in %" PRIu64 " chunks of %" PRIu64 " files, %s (%" PRIu64
           " bytes)\n",
           "tensors", i->tensors, i->chunks, i->files, out_size(i->bytes, size),
           i->bytes);
    for (int r = 0; r < 3; r++)
        if (i->by_role[r])
            printf("  %-10s %" PRIu64 ", %s\n", role_name((enum role)r), i->by_role[r],
                   out_size(i->bytes_by_role[r], size));
    printf("%-12s %" PRIu64 "\n", "objects", i->objects);
    if (i->faults)
        printf("%-12s %" PRIu64 " tensors\n", "damaged", i->faults);
}

static int print_info(struct cli *c, struct cli_source *s,
                      const struct checkpoint_info *i)
{
    int ret;

    field("source", s->name);
    field("format", i->format);
    field("framework", i->framework);
    field("version", i->version);
    if (i->has_step)
        printf("%-12s %" PRId64 "\n", "step", i->step);
    field("topology", i->topology);
    print_totals(i);
    ret = print_side_files(c, s, i);
    if (ret == 0)
        ret = catalog_warnings(s->catalog, i->id, print_warning, NULL, &c->err);
    if (ret == 0 && i->faults)
        ret = catalog_tensors(s->catalog, i->id, 0, print_fault, NULL, &c->err);
    return ret;
}

static int info_source(struct cli *c, struct cli_source *s)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    struct checkpoint_info info;
    int ret = a ? cli_checkpoint(c, s, a, &info) : err_nomem(&c->err);

    if (ret < 0)
        return ret;
    if (!c->opt.json)
        return print_info(c, s, &info);
    return report_checkpoint(s->catalog, info.id, STDOUT_FILENO, &c->err);
}

static int run(struct cli *c)
{
    CLEANUP(cli_close) struct cli_source s;
    int ret = cli_open(c, c->arg[0], &s);

    return ret < 0 ? ret : info_source(c, &s);
}

const struct cli_command cmd_info = {
    .name = "info",
    .usage = "info SOURCE [--json]",
    .summary = "format, framework, step, topology, totals, warnings",
    .min_args = 1,
    .max_args = 1,
    .takes = "",
    .run = run,
};
