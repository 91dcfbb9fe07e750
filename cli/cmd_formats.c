/* SPDX-License-Identifier: MIT */
/* cli/cmd_formats.c - the formats that this build reads and writes. */
#include <string.h>

#include "cli/cli.h"
#include "index/formats/format.h"
#include "index/map/map.h"

/* The names that -o map= knows. */
static void print_maps(bool json)
{
    for (size_t i = 0; map_shipped_name(i); i++)
        printf(json ? "%s\"%s\"" : "%s%s", i ? ", " : "", map_shipped_name(i));
}

/* The names that --to takes for it. */
static void print_writers(const struct format_driver *d, const char *mark)
{
    for (size_t i = 0; d->writers && d->writers[i]; i++)
        printf("%s%s%s%s", i ? ", " : "", mark, d->writers[i]->name, mark);
}

static void print_json(const struct format_driver *d)
{
    printf("\n    {\"name\": \"%s\", \"title\": \"%s\", \"write\": %s, \"to\": [",
           d->name, d->title, d->writers ? "true" : "false");
    print_writers(d, "\"");
    fputs("]}", stdout);
}

static void print_row(const struct format_driver *d, int width)
{
    printf("%-*s  %s", width, d->name, d->title);
    if (d->writers)
        fputs("; --to ", stdout);
    print_writers(d, "");
    putchar('\n');
}

static int run(struct cli *c)
{
    int width = 0;

    for (size_t i = 0; format_drivers[i]; i++)
        width = MAX(width, (int)strlen(format_drivers[i]->name));
    if (c->opt.json)
        fputs("{\"schema\": 1, \"formats\": [", stdout);
    for (size_t i = 0; format_drivers[i]; i++) {
        if (c->opt.json && i > 0)
            putchar(',');
        if (c->opt.json)
            print_json(format_drivers[i]);
        else
            print_row(format_drivers[i], width);
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
