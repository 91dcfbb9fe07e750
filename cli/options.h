/* SPDX-License-Identifier: MIT */
/* cli/options.h - the options of all sub-commands, in one table. */
#ifndef UFS_CLI_OPTIONS_H
#define UFS_CLI_OPTIONS_H

#include "cli/cli.h"

enum { OPTIONS_HELP = 1 };

/*
 * Takes the options of `cmd` out of argv into c->opt; c->arg and c->args are what is left.
 * OPTIONS_HELP: it was --help that was asked for. -EINVAL, marked as usage: one that is
 * not known, that is another command's, or whose value is wrong.
 */
int options_take(struct cli *c, const struct cli_command *cmd, int argc, char **argv);

/* Wrong usage of a command, with what is right as the hint. Returns -EINVAL. */
int options_wrong(struct cli *c, const struct cli_command *cmd, const char *what);

/* Tells the options of a command, a line each: its own, then those that all have. */
void options_help(const struct cli_command *cmd);

/*
 * For the shell's completion, a word a line: the options of a command; or, of its option
 * (as typed: "--to", "-o"), the values that can be listed.
 */
void options_list(const struct cli_command *cmd);
void options_list_values(const struct cli_command *cmd, const char *option);

#endif
