/* SPDX-License-Identifier: MIT */
/* cli/main.c - unshard: finds the sub-command, takes its options, prints its error. */
#include <errno.h>
#include <string.h>

#include "base/guard.h"
#include "base/log.h"
#include "cli/cli.h"
#include "cli/mount_helper.h"
#include "cli/options.h"
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
        "\nAll take -q, -v, --color WHEN and -o OPT,...; all that print a table take --json.\n"
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

/* Commands that are not built yet, and what they will be for. */
static const struct {
    const char *name, *what;
} later[] = {
    {"browse", "looking at a checkpoint in the terminal"},
    {"serve", "a checkpoint over HTTP, as web pages and files"},
    {"report", "a checkpoint described in one HTML file"},
    {"warm", "reading a mounted checkpoint ahead"},
    {"follow", "converting each new checkpoint of a run"},
    {"thin", "removing checkpoints that a run no longer needs"},
    {"map", "listing, showing and checking maps"},
};

static int unknown_command(struct cli *c, const char *name)
{
    struct suggestion s;

    for (size_t i = 0; i < ARRAY_SIZE(later); i++)
        if (!strcmp(later[i].name, name)) {
            err_set(&c->err, EINVAL, "%s: this version does not have it yet (%s)", name,
                    later[i].what);
            err_hint(&c->err, "`unshard --help` lists the commands that there are");
            return cli_fail(c, cli_usage(c));
        }
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
    int ret = options_take(c, cmd, argc, argv);

    if (ret == OPTIONS_HELP) {
        printf("unshard %s\n  %s\n\n", cmd->usage, cmd->summary);
        options_help(cmd);
        return STATUS_DONE;
    }
    if (ret == 0 && (c->args < cmd->min_args || c->args > cmd->max_args))
        ret = options_wrong(c, cmd, "wrong number of arguments");
    if (ret < 0)
        return cli_fail(c, ret);
    if (hide_secrets(c) < 0)
        return cli_fail(c, err_nomem(&c->err));
    if (c->opt.verbose)
        log_configure("info");
    screen_open(&c->screen, STDOUT_FILENO, c->opt.colour);
    if (cmd->confined)
        cli_confine(c);
    ret = finish_output(c, cmd->run(c));
    forget_secrets(c);
    return ret < 0 ? cli_fail(c, ret) : ret;
}

/* --complete [COMMAND [OPTION]]: what the shell may offer next, a word a line. */
static int complete(int words, char **word)
{
    const struct cli_command *cmd = words > 0 ? find_command(word[0]) : NULL;

    for (size_t i = 0; words == 0 && i < ARRAY_SIZE(commands); i++)
        puts(commands[i]->name);
    if (cmd && words == 1)
        options_list(cmd);
    else if (cmd)
        options_list_values(cmd, word[1]);
    return STATUS_DONE;
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
    if (!strcmp(argv[1], "--complete"))
        return complete(argc - 2, argv + 2);
    cmd = find_command(argv[1]);
    return cmd ? run_command(&c, cmd, argc - 1, argv + 1)
               : unknown_command(&c, argv[1]);
}
