/* SPDX-License-Identifier: MIT */
/* cli/cmd_formats.c - the formats that this build reads and writes. */
#include "cli/cli.h"
#include "index/formats/format.h"
#include "index/map/map.h"

/* The names that -o map= knows. */
static void print_maps(bool json)
{
    for (size_t i = 0; map_shipped_name(i); i++)
        printf(json ? "%s\"%s\"" : "%s%s", i ? ", " : "", map_shipped_name(i));
}

static int run(struct cli *c)
{
    if (c->opt.json)
        fputs("{\"schema\": 1, \"formats\": [", stdout);
    for (size_t i = 0; format_drivers[i]; i++) {
        const struct format_driver *d = format_drivers[i];
        const char *can = d->writers ? "read, write" : "read";

        if (c->opt.json)
            printf("%s\n    {\"name\": \"%s\", \"title\": \"%s\", \"write\": %s}",
                   i ? "," : "", d->name, d->title, d->writers ? "true" : "false");
        else
            printf("%-14s %-12s %s\n", d->name, can, d->title);
    }
    fputs(c->opt.json ? "\n], \"maps\": [" : "\nmaps (-o map=NAME): ", stdout);
    print_maps(c->opt.json);
    fputs(c->opt.json ? "]}\n" : "\n", stdout);
    return STATUS_DONE;
}

const struct cli_command cmd_formats = {
    .name = "formats",
    .usage = "formats [--json]",
    .summary = "what can be read and written",
    .min_args = 0,
    .max_args = 0,
    .takes = "",
    .run = run,
};
