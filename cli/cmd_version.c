/* SPDX-License-Identifier: MIT */
/* cli/cmd_version.c - which version this is, and of which libraries. */
#include <zstd.h>

#include "cli/cli.h"
#include "fs/mount.h"

static int run(struct cli *c)
{
    const char *format = c->opt.json
                             ? "{\"schema\": 1, \"version\": \"%s\", \"libfuse\": "
                               "\"%s\", \"sqlite\": \"%s\", \"zstd\": \"%s\"}\n"
                             : "unshard %s (libfuse %s, sqlite %s, zstd %s)\n";

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    printf(format, UFS_VERSION, fs_fuse_version(), catalog_sqlite_version(),
           ZSTD_versionString());
#pragma GCC diagnostic pop
    return STATUS_DONE;
}

const struct cli_command cmd_version = {
    .name = "version",
    .usage = "version [--json]",
    .summary = "this version and its libraries",
    .min_args = 0,
    .max_args = 0,
    .takes = "",
    .run = run,
};
