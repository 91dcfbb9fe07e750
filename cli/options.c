/* SPDX-License-Identifier: MIT */
/* cli/options.c - names, takers and values of options; what is refused, and why. */
#include "cli/options.h"

#include <errno.h>
#include <getopt.h>
#include <stddef.h>
#include <string.h>

#include "cli/mount_options.h"
#include "cli/suggest.h"
#include "index/formats/format.h"

static bool takes(const struct cli_command *cmd, char letter)
{
    return strchr(cmd->takes, letter) != NULL;
}

/* ---- options with values that are judged here ---- */

static const char *const cast_types[] = {"F64",  "F32",     "F16",
                                         "BF16", "F8_E4M3", "F8_E5M2"};

static int no_cast(struct cli *c, const char *option, const char *type)
{
    err_set(&c->err, EINVAL, "%s%s: no type to cast to", option, type);
    err_hint(&c->err, "there are F64, F32, F16, BF16, F8_E4M3 and F8_E5M2");
    return cli_usage(c);
}

static int take_dtype(struct cli *c, const struct cli_command *cmd, const char *value)
{
    (void)cmd;
    return mapping_dtype(value, &c->opt.mapping.dtype) ? 0
                                                       : no_cast(c, "--dtype ", value);
}

static int take_jobs(struct cli *c, const struct cli_command *cmd, const char *value)
{
    (void)cmd;
    if (parse_jobs(value, &c->opt.jobs))
        return 0;
    err_set(&c->err, EINVAL, "--jobs %s: no value of this option", value);
    err_hint(&c->err, "a number of threads, 1 to 1024");
    return cli_usage(c);
}

static int take_colour(struct cli *c, const struct cli_command *cmd, const char *value)
{
    (void)cmd;
    if (colour_choice_parse(value, &c->opt.colour))
        return 0;
    err_set(&c->err, EINVAL, "--color %s: no value of this option", value);
    err_hint(&c->err, "there are auto, always and never");
    return cli_usage(c);
}

/* ---- -o ---- */

/* The same names as a mount's: those that matter without one. */
static const char *const common_names[] = {
    "cache_dir=", "cache_size=", "index=memory", "jobs=",    "follow_symlinks",
    "map=",       "hf=",         "dtype=",       "weights=",
};

static int no_common_option(struct cli *c, const struct cli_command *cmd,
                            const char *option)
{
    if (mount_option_later(option, &c->err))
        return cli_usage(c);
    err_set(&c->err, EINVAL, "%s -o %s: no such option, or no value of it", cmd->name,
            option);
    err_hint(&c->err, "without a mount there are cache_dir=DIR, cache_size=SIZE, "
                      "index=memory, jobs=N, follow_symlinks, map=, hf=, dtype=, "
                      "weights=master|module");
    return cli_usage(c);
}

static int common_options(struct cli *c, const struct cli_command *cmd, char *text)
{
    for (char *o; (o = option_next(&text));) {
        if (!strncmp(o, "cache_dir=", 10))
            c->opt.cache_dir = o + 10;
        else if (!strncmp(o, "cache_size=", 11) &&
                 parse_bytes(o + 11, &c->opt.cache_size))
            c->opt.no_cache = c->opt.cache_size == 0;
        else if (!strcmp(o, "index=memory"))
            c->opt.index_memory = true;
        else if (!strcmp(o, "follow_symlinks"))
            c->opt.follow_symlinks = true;
        else if (!strncmp(o, "jobs=", 5) && parse_jobs(o + 5, &c->opt.jobs))
            continue;
        else if (!strncmp(o, "map=", 4) && o[4])
            c->opt.mapping.map = o + 4;
        else if (!strncmp(o, "hf=", 3) && o[3])
            c->opt.mapping.hf = o + 3;
        else if (!strcmp(o, "weights=module") || !strcmp(o, "weights=master"))
            c->opt.mapping.module_weights = strcmp(o + 8, "module") == 0;
        else if (strncmp(o, "dtype=", 6) != 0)
            return no_common_option(c, cmd, o);
        else if (!mapping_dtype(o + 6, &c->opt.mapping.dtype))
            return no_cast(c, "-o dtype=", o + 6);
    }
    return 0;
}

static int take_o(struct cli *c, const struct cli_command *cmd, char *value)
{
    if (!takes(cmd, 'f'))
        return common_options(c, cmd, value);
    if (c->opt.mount)
        return options_wrong(c, cmd, "give one -o with a comma list");
    c->opt.mount = value;
    return 0;
}

/* ---- the table ---- */

struct option_row {
    const char *name;   /* of --name, or NULL */
    char letter;        /* of -l, or 0 */
    const char *takers; /* letters of cli_command.takes; NULL: all commands have it */
    const char *of;     /* what its value is called; NULL: it has none */
    const char *words;  /* for --help */
    bool value;
    size_t place; /* in struct cli_options: of a flag, or of the value's text */
    int (*take)(struct cli *c, const struct cli_command *cmd, const char *value);
};

#define FLAG(member) .place = offsetof(struct cli_options, member)
#define TEXT(member) .value = true, .place = offsetof(struct cli_options, member)
#define TAKE(function) .value = true, .take = function

static const struct option_row rows[] = {
    {"json", .words = "for programs", .takers = NULL, FLAG(json)},
    {"color", .of = "WHEN", .words = "colours: auto, always or never", .takers = NULL,
     TAKE(take_colour)},
    {"quiet", 'q', .words = "only what was asked for, and errors", .takers = NULL,
     FLAG(quiet)},
    {"verbose", 'v', .words = "more of what is going on", .takers = NULL,
     FLAG(verbose)},
    {"cache-dir", .of = "DIR", .words = "where the index lies", .takers = NULL,
     TEXT(cache_dir)},
    {"index-memory", .words = "write no index to disk", .takers = NULL,
     FLAG(index_memory)},
    {"long", 'l', .words = "role and chunks as well", .takers = "l", FLAG(long_rows)},
    {"foreground", 'f', .words = "stay, and end by ^C", .takers = "f",
     FLAG(foreground)},
    {"deep", .words = "read every byte", .takers = "d", FLAG(deep)},
    {"npy", .words = "with the header of a .npy file", .takers = "n", FLAG(npy)},
    {"binary", .words = "as bytes", .takers = "b", FLAG(binary)},
    {"time", .words = "seconds and rate", .takers = "g", FLAG(time)},
    {"discard", .words = "remove what dead saves have staged there", .takers = "x",
     FLAG(discard)},
    {"device", .of = "D", .words = "cpu, cuda:N or auto", .takers = "g", TEXT(device)},
    {"budget", .of = "SIZE", .words = "of the device's memory, at most", .takers = "h",
     TEXT(budget)},
    {"rtol", .of = "R", .words = "equal within R times what B has", .takers = "t",
     TEXT(compare.rtol)},
    {"atol", .of = "A", .words = "equal within A", .takers = "t", TEXT(compare.atol)},
    {"values", .words = "compare values, not bits", .takers = "t",
     FLAG(compare.values)},
    {"to", .of = "FORMAT", .words = "which one (`unshard formats`)", .takers = "c",
     TEXT(convert.to)},
    {"ranks", .of = "N", .words = "cut for so many ranks", .takers = "c",
     TEXT(convert.ranks)},
    {"mesh", .of = "AxB", .words = "ranks along dim 0 and dim 1", .takers = "c",
     TEXT(convert.mesh)},
    {"max-shard-size", .of = "SIZE", .words = "of a file, at most: 5GB, 500M",
     .takers = "c", TEXT(convert.max_shard_size)},
    {"codec", .of = "NAME", .words = "of zarr: none or blosc-lz4", .takers = "c",
     TEXT(convert.codec)},
    {"only", .of = "PATTERN", .words = "tensors that match", .takers = "ct",
     TEXT(convert.only)},
    {"drop", .of = "LIST", .words = "of model, optimizer, other, objects",
     .takers = "ct", TEXT(convert.drop)},
    {"part", .of = "I/N", .words = "write this part of N, each by its own process",
     .takers = "c", TEXT(convert.part)},
    {"finish", .words = "publish what all parts have written", .takers = "c",
     FLAG(convert.finish)},
    {"incomplete", .words = "also a source of which something is missing",
     .takers = "c", FLAG(convert.incomplete)},
    {"map", .of = "FILE", .words = "other names and shapes: unshard-maps(5)",
     .takers = "ct", TEXT(mapping.map)},
    {"hf", .of = "DIR", .words = "the model's config and tokenizer", .takers = "ct",
     TEXT(mapping.hf)},
    {"dtype", .of = "TYPE",
     .words = "cast the model to F64, F32, F16, BF16, F8_E4M3 or F8_E5M2",
     .takers = "ct", TAKE(take_dtype)},
    {"jobs", .of = "N", .words = "threads", .takers = "ct", TAKE(take_jobs)},
};

/* Of capabilities that are not built yet, and what they will be for. */
static const struct {
    const char *name, *what;
} later[] = {
    {"dequant", "weights of a quantised model as numbers"},
    {"lora", "an adapter added to the model"},
    {"mean", "the mean of several checkpoints"},
    {"fill", "missing tensors from a base model"},
    {"quant", "weights stored quantised"},
    {"keep", "tensors left as they are when others are quantised"},
    {"parts", "a conversion planned for several processes"},
    {"write-plan", "a conversion planned for several processes"},
    {"plan", "a conversion planned for several processes"},
    {"status", "how far a conversion is"},
    {"slurm", "a conversion as a job of Slurm"},
    {"like", "a checkpoint compared with its base model"},
};

enum { ROW_BASE = 256 }; /* what getopt_long() returns of rows without a letter */

static const char letters[] = "lfqvho:";

static void long_options(struct option out[ARRAY_SIZE(rows) + 2])
{
    size_t n = ARRAY_SIZE(rows);

    for (size_t i = 0; i < n; i++)
        out[i] = (struct option){rows[i].name,
                                 rows[i].value ? required_argument : no_argument, NULL,
                                 rows[i].letter ? rows[i].letter : ROW_BASE + (int)i};
    out[n] = (struct option){"help", no_argument, NULL, 'h'};
    out[n + 1] = (struct option){0};
}

static const struct option_row *row_of(int o)
{
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        if (o == ROW_BASE + (int)i || (rows[i].letter && o == rows[i].letter))
            return &rows[i];
    return NULL;
}

static bool is_taken(const struct cli_command *cmd, const struct option_row *row)
{
    return !row->takers || cmd->takes[strcspn(cmd->takes, row->takers)];
}

/* ---- what is refused ---- */

int options_wrong(struct cli *c, const struct cli_command *cmd, const char *what)
{
    err_set(&c->err, EINVAL, "%s: %s", cmd->name, what);
    err_hint(&c->err, "usage: unshard %s", cmd->usage);
    return cli_usage(c);
}

/* "--only", or "-l". */
static void option_name(int o, char out[32])
{
    const struct option_row *row = o < ROW_BASE ? NULL : row_of(o);

    if (row)
        snprintf(out, 32, "--%s", row->name);
    else
        snprintf(out, 32, "-%c", o);
}

/* An option of other commands. */
static int not_taken(struct cli *c, const struct cli_command *cmd, int o)
{
    static const char *const of_mounts[] = {"map", "hf", "dtype", "jobs"};
    char name[32];

    option_name(o, name);
    err_set(&c->err, EINVAL, "%s: takes no %s", cmd->name, name);
    err_hint(&c->err, "usage: unshard %s", cmd->usage);
    for (size_t i = 0; cmd == &cmd_mount && i < ARRAY_SIZE(of_mounts); i++)
        if (strcmp(name + 2, of_mounts[i]) == 0)
            err_hint(&c->err, "for a mount it is -o %s=", of_mounts[i]);
    return cli_usage(c);
}

/* What getopt_long() stopped at: a word that is no option, or one without its value. */
static int no_option(struct cli *c, const struct cli_command *cmd, const char *word)
{
    const struct option_row *row = optopt ? row_of(optopt) : NULL;
    size_t len = strcspn(word, "=");
    struct suggestion s;
    char name[32];

    if (optopt) { /* of a long one: it was known */
        option_name(optopt, name);
        if (row && word[1] == '-')
            snprintf(name, sizeof name, "--%s", row->name);
        err_set(&c->err, EINVAL, "%s %s: %s", cmd->name, name,
                !row && optopt != 'o' ? "no such option"
                : word[len]           ? "takes no value"
                                      : "its value is missing");
        err_hint(&c->err, "usage: unshard %s", cmd->usage);
        return cli_usage(c);
    }
    for (size_t i = 0; len > 2 && i < ARRAY_SIZE(later); i++)
        if (strlen(later[i].name) == len - 2 &&
            memcmp(word + 2, later[i].name, len - 2) == 0) {
            option_not_built("--", later[i].name, later[i].what, &c->err);
            return cli_usage(c);
        }
    suggest_begin(&s, word, len);
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        snprintf(name, sizeof name, "--%s", rows[i].name);
        suggest_try(&s, name, strlen(name));
    }
    err_set(&c->err, EINVAL, "%s %s: no such option", cmd->name, word);
    if (suggest_found(&s))
        err_hint(&c->err, "is %s meant?", suggest_found(&s));
    else
        err_hint(&c->err, "usage: unshard %s", cmd->usage);
    return cli_usage(c);
}

/* ---- taking ---- */

/* `word`: where getopt_long() stands. */
static int take_one(struct cli *c, const struct cli_command *cmd, int o,
                    const char *word)
{
    const struct option_row *row = row_of(o);
    char *place = (char *)&c->opt;

    if (o == 'o')
        return take_o(c, cmd, optarg);
    if (!row)
        return no_option(c, cmd, word);
    if (!is_taken(cmd, row))
        return not_taken(c, cmd, o);
    if (row->take)
        return row->take(c, cmd, optarg);
    if (row->value)
        memcpy(place + row->place, &optarg, sizeof optarg);
    else
        *(bool *)(place + row->place) = true;
    return 0;
}

int options_take(struct cli *c, const struct cli_command *cmd, int argc, char **argv)
{
    struct option known[ARRAY_SIZE(rows) + 2];
    int o, ret = 0;

    long_options(known);
    opterr = 0;
    while (ret == 0 && (o = getopt_long(argc, argv, letters, known, NULL)) != -1) {
        if (o == 'h')
            return OPTIONS_HELP;
        ret = take_one(c, cmd, o, argv[optind - 1]);
    }
    c->arg = argv + optind;
    c->args = argc - optind;
    return ret;
}

/* ---- help ---- */

static void help_row(const struct option_row *row)
{
    char name[40];

    snprintf(name, sizeof name, "--%s%s%s", row->name, row->of ? " " : "",
             row->of ? row->of : "");
    printf("  %s%c%s %-22s %s\n", row->letter ? "-" : " ",
           row->letter ? row->letter : ' ', row->letter ? "," : " ", name, row->words);
}

void options_help(const struct cli_command *cmd)
{
    for (unsigned common = 0; common < 2; common++)
        for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
            if (!rows[i].takers == (common != 0) && is_taken(cmd, &rows[i]))
                help_row(&rows[i]);
    printf("  -o OPT,...                 %s\n",
           takes(cmd, 'f') ? "mount.unshardfs(8) has them"
                           : "cache_dir=DIR, map=FILE, and others: unshard(1)");
}

/* ---- completion ---- */

void options_list(const struct cli_command *cmd)
{
    puts("-o");
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        if (!is_taken(cmd, &rows[i]))
            continue;
        if (rows[i].letter)
            printf("-%c\n", rows[i].letter);
        printf("--%s\n", rows[i].name);
    }
}

static void list_words(const char *const *word, size_t n)
{
    for (size_t i = 0; i < n; i++)
        puts(word[i]);
}

void options_list_values(const struct cli_command *cmd, const char *option)
{
    static const char *const colours[] = {"auto", "always", "never"};
    const struct format_writer *w;
    const char *name;

    if (strcmp(option, "--color") == 0)
        list_words(colours, ARRAY_SIZE(colours));
    else if (strcmp(option, "--dtype") == 0)
        list_words(cast_types, ARRAY_SIZE(cast_types));
    else if (strcmp(option, "--to") == 0)
        for (size_t i = 0; (w = format_writer_at(i)); i++)
            puts(w->name);
    else if (strcmp(option, "-o") == 0 && !takes(cmd, 'f'))
        list_words(common_names, ARRAY_SIZE(common_names));
    else if (strcmp(option, "-o") == 0)
        for (size_t i = 0; (name = mount_option_name(i)); i++)
            puts(name);
}
