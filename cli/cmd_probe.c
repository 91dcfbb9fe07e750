/* SPDX-License-Identifier: MIT */
/* cli/cmd_probe.c - which driver bids what for a directory, and why. */
#include <string.h>

#include "cli/cli.h"
#include "index/formats/scan.h"
#include "index/formats/unread.h"
#include "remote/store.h"

struct probe {
    bool json;
    size_t shown;
};

static void print_bid(void *user, const struct format_driver *d, const char *file,
                      const struct bid *b)
{
    struct probe *p = user;

    if (p->json) {
        printf("%s\n    {\"driver\": \"%s\", \"file\": ", p->shown ? "," : "", d->name);
        if (file)
            out_json(stdout, file, strlen(file));
        else
            fputs("null", stdout);
        printf(", \"score\": %d, \"reason\": ", b->score);
        out_json(stdout, b->reason, strlen(b->reason));
        putchar('}');
    } else {
        printf("%-12s %3d  ", d->name, b->score);
        if (file) {
            out_text(stdout, file, strlen(file), 0);
            fputs(": ", stdout);
        }
        out_text(stdout, b->reason, strlen(b->reason), 0);
        putchar('\n');
    }
    p->shown++;
}

static void print_verdict(const struct place *place)
{
    switch (place->kind) {
    case PLACE_CHECKPOINT:
        printf("-> a checkpoint, read by %s\n", place->driver->name);
        break;
    case PLACE_FILES:
        printf("-> a directory with %zu files that are checkpoints by themselves\n",
               place->nfiles);
        break;
    case PLACE_PLAIN:
        puts("-> a plain directory");
        break;
    }
}

static void print_unread(struct listing *l, const char *only)
{
    const char *name;
    const struct unread_kind *kind = unread_find(l, only, &name);

    if (!kind)
        return;
    fputs("   ", stdout);
    out_text(stdout, name, strlen(name), 0);
    printf(" is %s, which is not read: %s\n", kind->what, kind->then);
}

static int run(struct cli *c)
{
    CLEANUP(reading_close) struct reading s;
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP(place_release) struct place place = {0};
    struct probe p = {.json = c->opt.json};
    int ret = cli_open(c, c->arg[0], &s);

    if (ret < 0)
        return ret;
    ret = s.store->ops->list(s.store, "", &l, &c->err);
    if (ret == 0)
        ret = place_of(l, s.store->file, &place, &c->err);
    if (ret < 0)
        return ret;
    if (p.json)
        fputs("{\"schema\": 1, \"bids\": [", stdout);
    place_bids(l, print_bid, &p);
    if (p.json)
        printf("\n], \"driver\": %s%s%s}\n", place.driver ? "\"" : "",
               place.driver ? place.driver->name : "null", place.driver ? "\"" : "");
    else
        print_verdict(&place);
    if (!p.json && place.kind == PLACE_PLAIN)
        print_unread(l, s.store->file);
    return STATUS_DONE;
}

const struct cli_command cmd_probe = {
    .name = "probe",
    .usage = "probe SOURCE [--json]",
    .summary = "which driver bids what, and why",
    .min_args = 1,
    .max_args = 1,
    .takes = "",
    .confined = true,
    .run = run,
};
