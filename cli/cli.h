/* SPDX-License-Identifier: MIT */
/* cli/cli.h - what the sub-commands share: options, an open source, output. */
#ifndef UFS_CLI_CLI_H
#define UFS_CLI_CLI_H

#include <stdio.h>

#include "base/base.h"
#include "base/err.h"
#include "cli/progress.h"
#include "cli/screen.h"
#include "index/catalog.h"
#include "index/map/mapping.h"
#include "index/view.h"
#include "lib/reading.h"

struct arena;
struct buf;

/* CONTRACT.md, "The command". */
enum cli_status {
    STATUS_DONE = 0,
    STATUS_NO = 1,     /* the answer is no: damage, differences */
    STATUS_USAGE = 2,  /* wrong usage, or a capability that is not built yet */
    STATUS_SOURCE = 3, /* the source, or a tensor asked for, cannot be read */
    STATUS_ROOM = 5    /* not enough space or rights */
};

/* What convert takes beside the common options. */
struct convert_options {
    const char *to, *only, *drop, *mesh, *part, *max_shard_size, *ranks, *codec;
    bool finish, incomplete;
};

/* What diff takes beside --only and --drop, which are convert's too. */
struct compare_options {
    const char *rtol, *atol;
    bool values;
};

struct cli_options {
    bool json, quiet, verbose;
    enum colour_choice colour;
    bool long_rows;     /* -l */
    bool deep;          /* --deep */
    bool npy;           /* --npy */
    bool binary;        /* --binary */
    bool time;          /* --time */
    bool discard;       /* --discard */
    const char *device; /* --device */
    const char *budget; /* --budget */
    bool foreground;    /* -f */
    bool index_memory, follow_symlinks;
    const char *cache_dir;
    uint64_t cache_size;           /* bytes; 0: as mount has it */
    bool no_cache;                 /* cache_size=0 */
    unsigned jobs;                 /* 0: one a core */
    struct mapping_choice mapping; /* map=, hf=, dtype= */
    struct convert_options convert;
    struct compare_options compare;
    char *mount; /* -o text of mount, not yet taken apart */
};

struct cli {
    const char *program; /* argv[0]'s last part */
    struct cli_options opt;
    char **arg; /* what stands behind the sub-command's options; URLs without secrets */
    int args;
    char *secret[2];      /* NULL, or that argument as it was given */
    struct screen screen; /* standard output */
    struct err err;
    bool usage; /* the error is the caller's, or of something not built yet: status 2 */
};

struct cli_command {
    const char *name, *usage, *summary;
    int min_args, max_args;
    /*
     * Options it takes beside --json, --color, -q, -v and -o: letters of "ldnfc" (long rows,
     * deep, npy, foreground, those of convert), "b": binary, "g": device and time, "h":
     * budget, "t": those of diff, "x": discard.
     */
    const char *takes;
    /* It only reads: where its sources are local, all that it cannot need is taken from it. */
    bool confined;
    /* Returns a cli_status, or a negative errno with the words in c->err. */
    int (*run)(struct cli *c);
};

extern const struct cli_command cmd_mount, cmd_umount, cmd_ls, cmd_info, cmd_cat,
    cmd_verify, cmd_plan, cmd_probe, cmd_formats, cmd_version, cmd_convert, cmd_stats,
    cmd_diff, cmd_cache, cmd_manifest, cmd_load, cmd_doctor, cmd_hold;

/* A number with an optional K, M, G, T (powers of 1024) or KB, MB, ... (of 1000). */
bool parse_bytes(const char *text, uint64_t *out);
/* A number of threads, 1 to 1024. */
bool parse_jobs(const char *text, unsigned *out);

/*
 * An argument that is a URL with a password or a query: other users of the machine shall
 * not read it (ps, /proc). Overwrites it there and gives a copy to open and, in *shown, one
 * to show, both malloc'd; NULL in *secret: there is nothing to hide.
 */
int cli_hide(char *arg, char **secret, char **shown);

/*
 * Before any thread starts, where no argument is a URL: from here on what is read cannot make
 * the process run a program, reach a network or write but to its cache (base/confine.h).
 */
void cli_confine(const struct cli *c);

/* Opens a local path or a URL: one of c->arg. Closed by reading_close(). */
int cli_open(struct cli *c, const char *name, struct reading *out);

/* The same options for commands that open their source by libunshard. Strings are the command's. */
struct unshard_options;
void cli_library_options(const struct cli *c, struct unshard_options *out);

/*
 * The source's own checkpoint, scanned or from the index. A tree gives -ENOENT with the
 * checkpoints that it holds in the message; a failed scan -EBADMSG.
 */
int cli_checkpoint(struct cli *c, struct reading *s, struct arena *a,
                   struct checkpoint_info *out);

/* -ENOENT: nothing in the source is a checkpoint; says why where it can be seen. */
int cli_no_checkpoint(struct cli *c, struct reading *s);

/* -ENOENT: no key of a checkpoint matches; says which may have been meant. */
int cli_no_match(struct cli *c, struct reading *s, int64_t checkpoint,
                 const char *pattern);

/* One tensor of it by its full key; -ENOENT says which may have been meant. */
int cli_tensor(struct cli *c, struct reading *s, const char *key, struct arena *a,
               struct checkpoint_info *info, struct tensor_info *out);

/*
 * Calls fn for each file that a mount shows beside the checkpoint's tensors: its name, and
 * its path in the store; those of parts where no name is in their way. Stops at and
 * returns what is not 0.
 */
typedef int side_file_fn(void *user, const char *name, const char *path);
int cli_side_files(struct cli *c, struct reading *s, const struct checkpoint_info *info,
                   side_file_fn *fn, void *user);

/* 1 when the source is one checkpoint, 0 when it is a tree; negative errno. */
int cli_is_checkpoint(struct cli *c, struct reading *s);

/* Marks the error in c->err as wrong usage. Returns -EINVAL. */
int cli_usage(struct cli *c);

/* Prints the error as the contract wants it and gives the status for it. */
int cli_fail(struct cli *c, int ret);

/* Text with control bytes and invalid UTF-8 as %XX, padded to `width` characters. */
void out_text(FILE *f, const char *text, size_t len, int width);
/* Display width of the same. */
int out_width(const char *text, size_t len);
void out_json(FILE *f, const char *text, size_t len);
/* A member behind others, on stdout; what is not finite as text: JSON has no NaN. */
void out_json_number(const char *name, double v);
/* "1.4 GiB". Valid until the next call on this buffer of 16. */
const char *out_size(uint64_t bytes, char dst[16]);

/* "a,b=c" cut in place at the next comma ("\," is a comma of the value). */
char *option_next(char **text);

#endif
