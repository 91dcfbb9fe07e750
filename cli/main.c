/* SPDX-License-Identifier: MIT */
/* cli/main.c - unshard: finds the sub-command, takes its options, prints its error. */
#include <errno.h>
#include <getopt.h>
#include <string.h>

#include "base/guard.h"
#include "base/log.h"
#include "cli/cli.h"
#include "cli/mount_helper.h"
#include "cli/suggest.h"

static const struct cli_command *const commands[] = {
    &cmd_mount, &cmd_umount, &cmd_ls,       &cmd_info,    &cmd_cat,     &cmd_convert,
    &cmd_plan,  &cmd_verify, &cmd_probe,    &cmd_formats, &cmd_version, &cmd_stats,
    &cmd_diff,  &cmd_cache,  &cmd_manifest, &cmd_load,    &cmd_doctor,  &cmd_hold,
};

static void print_usage(FILE *f)
{
    fputs("unshard: training checkpoints as full tensors\n\n", f);
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
        fprintf(f, "  unshard %-46s %s\n", commands[i]->usage, commands[i]->summary);
    fputs(
        "\nAll take -q, -v and -o OPT,...; all that print a table take --json.\n"
        "Exit status: 0 done, 1 the answer is no, 2 wrong usage, 3 the source cannot be "
        "read,\n5 not enough space or rights, 128+N by signal N.\n",
        f);
}

static const struct cli_command *find_command(const char *name)
{
    if (!strcmp(name, "stop")) /* what users of other mounts type */
        name = "umount";
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
        if (!strcmp(commands[i]->name, name))
            return commands[i];
    return NULL;
}

static int unknown_command(struct cli *c, const char *name)
{
    struct suggestion s;

    suggest_begin(&s, name, strlen(name));
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
        suggest_try(&s, commands[i]->name, strlen(commands[i]->name));
    err_set(&c->err, EINVAL, "%s: no such command", name);
    if (suggest_found(&s))
        err_hint(&c->err, "is `unshard %s` meant?", suggest_found(&s));
    else
        err_hint(&c->err, "see `unshard --help`");
    return cli_fail(c, cli_usage(c));
}

enum {
    OPT_JSON = 256,
    OPT_DEEP,
    OPT_NPY,
    OPT_BINARY,
    OPT_TIME,
    OPT_DEVICE,
    OPT_BUDGET,
    OPT_CACHE_DIR,
    OPT_INDEX_MEMORY,
    OPT_RTOL,
    OPT_ATOL,
    OPT_VALUES,
    OPT_TO, /* from here on: of convert, as take_convert() knows them */
    OPT_RANKS,
    OPT_MESH,
    OPT_SHARD_SIZE,
    OPT_CODEC,
    OPT_ONLY,
    OPT_DROP,
    OPT_PART,
    OPT_FINISH,
    OPT_MAP,
    OPT_HF,
    OPT_DTYPE,
    OPT_JOBS,
};

static const struct option long_options[] = {
    {"json", no_argument, NULL, OPT_JSON},
    {"deep", no_argument, NULL, OPT_DEEP},
    {"npy", no_argument, NULL, OPT_NPY},
    {"binary", no_argument, NULL, OPT_BINARY},
    {"time", no_argument, NULL, OPT_TIME},
    {"budget", required_argument, NULL, OPT_BUDGET},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"cache-dir", required_argument, NULL, OPT_CACHE_DIR},
    {"index-memory", no_argument, NULL, OPT_INDEX_MEMORY},
    {"rtol", required_argument, NULL, OPT_RTOL},
    {"atol", required_argument, NULL, OPT_ATOL},
    {"values", no_argument, NULL, OPT_VALUES},
    {"to", required_argument, NULL, OPT_TO},
    {"ranks", required_argument, NULL, OPT_RANKS},
    {"mesh", required_argument, NULL, OPT_MESH},
    {"max-shard-size", required_argument, NULL, OPT_SHARD_SIZE},
    {"codec", required_argument, NULL, OPT_CODEC},
    {"only", required_argument, NULL, OPT_ONLY},
    {"drop", required_argument, NULL, OPT_DROP},
    {"part", required_argument, NULL, OPT_PART},
    {"finish", no_argument, NULL, OPT_FINISH},
    {"map", required_argument, NULL, OPT_MAP},
    {"hf", required_argument, NULL, OPT_HF},
    {"dtype", required_argument, NULL, OPT_DTYPE},
    {"jobs", required_argument, NULL, OPT_JOBS},
    {"long", no_argument, NULL, 'l'},
    {"foreground", no_argument, NULL, 'f'},
    {"quiet", no_argument, NULL, 'q'},
    {"verbose", no_argument, NULL, 'v'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static int wrong_option(struct cli *c, const struct cli_command *cmd, const char *what)
{
    err_set(&c->err, EINVAL, "%s: %s", cmd->name, what);
    err_hint(&c->err, "usage: unshard %s", cmd->usage);
    return cli_usage(c);
}

/* "--only", or "-l". */
static void option_name(int o, char out[32])
{
    snprintf(out, 32, "-%c", o < OPT_JSON ? o : '?');
    for (const struct option *l = long_options; o >= OPT_JSON && l->name; l++)
        if (l->val == o)
            snprintf(out, 32, "--%s", l->name);
}

/* An option of other commands. */
static int not_taken(struct cli *c, const struct cli_command *cmd, int o)
{
    char name[32];

    option_name(o, name);
    err_set(&c->err, EINVAL, "%s: takes no %s", cmd->name, name);
    if (cmd == &cmd_mount && o >= OPT_MAP)
        err_hint(&c->err, "for a mount it is -o %s=", name + 2);
    else
        err_hint(&c->err, "usage: unshard %s", cmd->usage);
    return cli_usage(c);
}

/* What getopt_long() stopped at: a word that is no option, or one without its value. */
static int no_option(struct cli *c, const struct cli_command *cmd, const char *word)
{
    size_t len = strcspn(word, "=");
    struct suggestion s;
    char name[32];

    if (optopt) { /* of a long one: it was known */
        option_name(optopt, name);
        err_set(&c->err, EINVAL, "%s %s: %s", cmd->name, name,
                optopt < OPT_JSON && optopt != 'o' ? "no such option"
                : word[len]                        ? "takes no value"
                                                   : "its value is missing");
        err_hint(&c->err, "usage: unshard %s", cmd->usage);
        return cli_usage(c);
    }
    suggest_begin(&s, word, len);
    for (const struct option *o = long_options; o->name; o++) {
        snprintf(name, sizeof name, "--%s", o->name);
        suggest_try(&s, name, strlen(name));
    }
    err_set(&c->err, EINVAL, "%s %s: no such option", cmd->name, word);
    if (suggest_found(&s))
        err_hint(&c->err, "is %s meant?", suggest_found(&s));
    else
        err_hint(&c->err, "usage: unshard %s", cmd->usage);
    return cli_usage(c);
}

static int no_cast(struct cli *c, const char *option, const char *type)
{
    err_set(&c->err, EINVAL, "%s%s: no type to cast to", option, type);
    err_hint(&c->err, "there are F64, F32, F16, BF16, F8_E4M3 and F8_E5M2");
    return cli_usage(c);
}

static int no_common_option(struct cli *c, const struct cli_command *cmd,
                            const char *option)
{
    err_set(&c->err, EINVAL, "%s -o %s: no such option, or no value of it", cmd->name,
            option);
    err_hint(&c->err, "without a mount there are cache_dir=DIR, cache_size=SIZE, "
                      "index=memory, jobs=N, follow_symlinks, map=, hf=, dtype=, "
                      "weights=master|module");
    return cli_usage(c);
}

/* -o of commands that do not mount: the same names, those that matter without a mount. */
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
        else if (!strncmp(o, "jobs=", 5) && atoi(o + 5) > 0)
            c->opt.jobs = (unsigned)atoi(o + 5);
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

static bool takes(const struct cli_command *cmd, char letter)
{
    return strchr(cmd->takes, letter) != NULL;
}

/* Options of diff that convert has as well. */
static bool is_diffs_too(int o)
{
    return o == OPT_ONLY || o == OPT_DROP || o >= OPT_MAP;
}

static int take_compare(struct cli *c, const struct cli_command *cmd, int o)
{
    struct compare_options *v = &c->opt.compare;

    if (!takes(cmd, 't'))
        return not_taken(c, cmd, o);
    if (o == OPT_VALUES)
        v->values = true;
    else
        *(o == OPT_RTOL ? &v->rtol : &v->atol) = optarg;
    return 0;
}

/* Options of convert; their values are judged where they are used. */
static int take_convert(struct cli *c, const struct cli_command *cmd, int o)
{
    struct convert_options *v = &c->opt.convert;
    const char **text[] = {
        [OPT_TO - OPT_TO] = &v->to,
        [OPT_RANKS - OPT_TO] = &v->ranks,
        [OPT_MESH - OPT_TO] = &v->mesh,
        [OPT_SHARD_SIZE - OPT_TO] = &v->max_shard_size,
        [OPT_CODEC - OPT_TO] = &v->codec,
        [OPT_ONLY - OPT_TO] = &v->only,
        [OPT_DROP - OPT_TO] = &v->drop,
        [OPT_PART - OPT_TO] = &v->part,
        [OPT_FINISH - OPT_TO] = NULL,
        [OPT_MAP - OPT_TO] = &c->opt.mapping.map,
        [OPT_HF - OPT_TO] = &c->opt.mapping.hf,
    };

    if (!takes(cmd, 'c') && !(takes(cmd, 't') && is_diffs_too(o)))
        return not_taken(c, cmd, o);
    if (o == OPT_FINISH)
        v->finish = true;
    else if (o == OPT_DTYPE)
        return mapping_dtype(optarg, &c->opt.mapping.dtype)
                   ? 0
                   : no_cast(c, "--dtype ", optarg);
    else if (o == OPT_JOBS)
        c->opt.jobs = (unsigned)MAX(atoi(optarg), 1);
    else
        *text[o - OPT_TO] = optarg;
    return 0;
}

/* `word`: where getopt_long() stands. */
static int one_option(struct cli *c, const struct cli_command *cmd, int o,
                      const char *word)
{
    struct cli_options *opt = &c->opt;

    switch (o) {
    case OPT_JSON:
        opt->json = true;
        return 0;
    case 'q':
        opt->quiet = true;
        return 0;
    case 'v':
        opt->verbose = true;
        return 0;
    case OPT_CACHE_DIR:
        opt->cache_dir = optarg;
        return 0;
    case OPT_INDEX_MEMORY:
        opt->index_memory = true;
        return 0;
    case 'o':
        if (!takes(cmd, 'f'))
            return common_options(c, cmd, optarg);
        if (opt->mount)
            return wrong_option(c, cmd, "give one -o with a comma list");
        opt->mount = optarg;
        return 0;
    case 'l':
        opt->long_rows = true;
        return takes(cmd, 'l') ? 0 : not_taken(c, cmd, o);
    case 'f':
        opt->foreground = true;
        return takes(cmd, 'f') ? 0 : not_taken(c, cmd, o);
    case OPT_DEEP:
        opt->deep = true;
        return takes(cmd, 'd') ? 0 : not_taken(c, cmd, o);
    case OPT_NPY:
        opt->npy = true;
        return takes(cmd, 'n') ? 0 : not_taken(c, cmd, o);
    case OPT_BINARY:
        opt->binary = true;
        return takes(cmd, 'b') ? 0 : not_taken(c, cmd, o);
    case OPT_TIME:
    case OPT_DEVICE:
        if (o == OPT_TIME)
            opt->time = true;
        else
            opt->device = optarg;
        return takes(cmd, 'g') ? 0 : not_taken(c, cmd, o);
    case OPT_BUDGET:
        opt->budget = optarg;
        return takes(cmd, 'h') ? 0 : not_taken(c, cmd, o);
    case OPT_RTOL:
    case OPT_ATOL:
    case OPT_VALUES:
        return take_compare(c, cmd, o);
    default:
        if (o >= OPT_TO)
            return take_convert(c, cmd, o);
        return no_option(c, cmd, word);
    }
}

/* What could not be written is the error, unless there was one before. */
static int finish_output(struct cli *c, int ret)
{
    int code;

    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return ret;
    code = errno ? errno : EIO; /* the rest was tried once more just now */
    if (ret < 0 && c->err.code)
        return ret;
    return err_set(&c->err, code, "standard output: %s", strerror(code));
}

static int hide_secrets(struct cli *c)
{
    for (int i = 0; i < (int)ARRAY_SIZE(c->secret) && i < c->args; i++) {
        char *shown = NULL;

        if (cli_hide(c->arg[i], &c->secret[i], &shown) < 0)
            return -ENOMEM;
        if (c->secret[i])
            c->arg[i] = shown;
    }
    return 0;
}

static void forget_secrets(struct cli *c)
{
    for (int i = 0; i < (int)ARRAY_SIZE(c->secret) && i < c->args; i++) {
        if (c->secret[i])
            free(c->arg[i]);
        free(c->secret[i]);
    }
}

static int run_command(struct cli *c, const struct cli_command *cmd, int argc,
                       char **argv)
{
    int o, ret = 0;

    opterr = 0;
    while (ret == 0 &&
           (o = getopt_long(argc, argv, "lfqvho:", long_options, NULL)) != -1) {
        if (o == 'h') {
            printf("unshard %s\n  %s\n", cmd->usage, cmd->summary);
            return STATUS_DONE;
        }
        ret = one_option(c, cmd, o, argv[optind - 1]);
    }
    if (ret < 0)
        return cli_fail(c, ret);
    c->arg = argv + optind;
    c->args = argc - optind;
    if (c->args < cmd->min_args || c->args > cmd->max_args)
        return cli_fail(c, wrong_option(c, cmd, "wrong number of arguments"));
    if (hide_secrets(c) < 0)
        return cli_fail(c, err_nomem(&c->err));
    if (c->opt.verbose)
        log_configure("info");
    if (cmd->confined)
        cli_confine(c);
    ret = finish_output(c, cmd->run(c));
    forget_secrets(c);
    return ret < 0 ? cli_fail(c, ret) : ret;
}

static void start_log(void)
{
    const char *spec = getenv("UNSHARD_LOG");

    if (spec && !log_configure(spec))
        log_msg(LOG_CLI, LOG_WARN, "UNSHARD_LOG=%s: not all of it is understood", spec);
}

int main(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/');
    struct cli c = {.program = slash ? slash + 1 : argv[0]};
    const struct cli_command *cmd;

    start_log();
    if (guard_install() < 0)
        return cli_fail(&c,
                        err_set(&c.err, errno, "cannot install the SIGBUS handler"));
    if (!strncmp(c.program, "mount.", 6))
        return mount_helper(&c, argc, argv);
    if (argc < 2) {
        print_usage(stderr);
        return STATUS_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") ||
        !strcmp(argv[1], "help")) {
        print_usage(stdout);
        return STATUS_DONE;
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V"))
        return run_command(&c, &cmd_version, argc - 1, argv + 1);
    cmd = find_command(argv[1]);
    return cmd ? run_command(&c, cmd, argc - 1, argv + 1)
               : unknown_command(&c, argv[1]);
}
