/* SPDX-License-Identifier: MIT */
/* cli/doctor_leftovers.c - what is staged in a directory or for it, whose it is, and its end. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cli/doctor.h"
#include "save/txn.h"

enum { FILES_SHOWN = 20 };

struct looking {
    struct doctor *d;
    int dir;
    const char *path; /* of dir */
    const char *only; /* this staging directory; NULL: all that dir has */
    unsigned found;
};

static const char *name_of(const struct txn_listed *l)
{
    return l->target ? l->target : l->staging;
}

static void tell(const struct looking *k, const struct txn_listed *l,
                 enum doctor_state state, const char *what, const char *hint)
{
    char when[32] = "";
    struct tm tm;

    if (localtime_r(&l->when, &tm))
        strftime(when, sizeof when, "%Y-%m-%d %H:%M", &tm);
    doctor_tell(k->d, state, "staged", hint, "%s/%s: %s: %s, last written %s", k->path,
                name_of(l), what, l->writer ? l->writer : "no journal", when);
}

/* Which files, and which of their bytes are missing. */
static void tell_files(const struct looking *k, const struct txn_listed *l)
{
    for (size_t i = 0; i < MIN(l->files, (size_t)FILES_SHOWN); i++) {
        CLEANUP(buf_release) struct buf text = {.max = 4096};

        if (txn_describe_file(&l->file[i], &text) == 0)
            doctor_tell(k->d, DOCTOR_NOTE, "staged", NULL, "%s/%s/%.*s", k->path,
                        name_of(l), (int)(text.len - 1), text.data);
    }
    for (size_t i = 0; i < MIN(l->removals, (size_t)FILES_SHOWN); i++)
        doctor_tell(k->d, DOCTOR_NOTE, "staged", NULL,
                    "%s/%s/%s: removed, which is not published yet", k->path,
                    name_of(l), l->removed[i]);
    if (l->files > FILES_SHOWN || l->removals > FILES_SHOWN)
        doctor_tell(k->d, DOCTOR_NOTE, "staged", NULL,
                    "%s/%s: %zu files and %zu removals in all", k->path, name_of(l),
                    l->files, l->removals);
}

static void report(const struct looking *k, const struct txn_listed *l)
{
    static const char go_on[] =
        "mount it with -o rw and write what is missing, or: unshard "
        "doctor --discard PATH";

    switch (l->state) {
    case TXN_LIVE:
        tell(k, l, DOCTOR_FINE, "being written now", NULL);
        break;
    case TXN_STAGED:
        tell(k, l, DOCTOR_NOTE,
             l->target_gone ? "staged, and its directory is gone or renamed"
                            : "staged, not published",
             go_on);
        break;
    case TXN_STEP:
        tell(
            k, l, DOCTOR_NOTE, "its publication was interrupted",
            "mount it with -o rw, which ends it; or: unshard doctor --discard PATH, which "
            "ends it and discards what else is staged");
        break;
    case TXN_FOREIGN:
        tell(k, l, DOCTOR_NOTE, "staged elsewhere",
             "go on with it there, or remove that directory");
        break;
    case TXN_CONVERSION:
        tell(k, l, DOCTOR_NOTE, "a conversion that did not end",
             "the same command goes on with it; or: unshard doctor --discard PATH");
        break;
    case TXN_REST:
        tell(k, l, DOCTOR_NOTE, "the rest of a finished save",
             "the next save removes it; or: unshard doctor --discard PATH");
        break;
    case TXN_DAMAGED:
        tell(k, l, DOCTOR_PROBLEM, "its journal is damaged",
             "unshard doctor --discard PATH");
        break;
    }
    tell_files(k, l);
}

/* A step that has begun is ended first: files that it replaces may be in there. */
static void discard(const struct looking *k, const struct txn_listed *l)
{
    struct err e = {0};
    char line[1400];
    int ret = l->state == TXN_STEP && !l->target_gone
                  ? txn_recover(k->dir, l->staging, &e)
                  : 0;

    if (ret == -ESTALE) { /* it was undone: it is staged as before */
        e = (struct err){0};
        ret = 0;
    }
    if (ret >= 0)
        ret = txn_discard_staged(k->dir, l->staging, &e);
    if (ret == 0 || ret == -ENOENT)
        doctor_tell(k->d, DOCTOR_FINE, "discarded", NULL, "%s/%s: what was staged",
                    k->path, name_of(l));
    else
        doctor_tell(k->d, DOCTOR_PROBLEM, "staged", NULL, "%s/%s: not discarded: %s",
                    k->path, name_of(l), err_line(&e, line, sizeof line));
}

static int look(void *user, const struct txn_listed *l)
{
    struct looking *k = user;

    if (k->only && strcmp(k->only, l->staging) != 0)
        return 0;
    k->found++;
    if (k->d->c->opt.discard && l->state != TXN_LIVE && l->state != TXN_FOREIGN)
        discard(k, l);
    else
        report(k, l);
    return 0;
}

static void failed(struct doctor *d, const char *path, const char *why)
{
    doctor_tell(d, DOCTOR_PROBLEM, "leftovers", NULL, "%s: %s", path, why);
}

/* What is staged in the directory `dir`; `only` as in struct looking. */
static unsigned look_in(struct doctor *d, const char *dir, const char *only)
{
    CLEANUP_FD int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct looking k = {.d = d, .dir = fd, .path = dir, .only = only};
    struct err e = {0};
    char line[1400];

    if (fd < 0)
        failed(d, dir, strerror(errno));
    else if (txn_list(fd, look, &k, &e) < 0)
        failed(d, dir, err_line(&e, line, sizeof line));
    return fd < 0 || e.code ? k.found + 1 : k.found;
}

/* Of a checkpoint it is beside it: "a/b" has a staging directory in "a". */
static unsigned look_beside(struct doctor *d, const char *dir)
{
    char path[PATH_MAX], staging[NAME_MAX + 1];
    struct err none = {0};
    char *slash;

    if (!realpath(dir, path) || !(slash = strrchr(path, '/')) || !slash[1] ||
        publish_staging_name(slash + 1, staging, &none) < 0)
        return 0;
    *slash = '\0';
    return look_in(d, path[0] ? path : "/", staging);
}

void doctor_leftovers(struct doctor *d, const char *dir)
{
    unsigned found = look_in(d, dir, NULL) + look_beside(d, dir);

    if (!found)
        doctor_tell(d, DOCTOR_FINE, "leftovers", NULL, "%s: nothing is staged", dir);
}
