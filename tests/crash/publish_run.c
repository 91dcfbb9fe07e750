/* SPDX-License-Identifier: MIT */
/* tests/crash/publish_run.c - one transaction, run again and again by publish.py until its step is done. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/err.h"
#include "save/txn.h"

/*
 *   publish_run TOP step PUT=STAGE=PATH=TEXT REMOVE=STAGE=PATH HOLD=STAGE=PATH ...
 *       receives DONE whole and some of REST, and publishes the files: DONE ends with that
 *   publish_run TOP finish
 *       receives what is missing of REST, and publishes it as the file "rest"
 *   publish_run TOP look
 *       prints what is staged, and whether its bytes are those that were written
 *
 * Each line of output is true when it is printed. TOP/run is the target.
 */

static const char done_path[] = "tensors/done.npy", rest_path[] = "tensors/rest.npy";

enum { DONE_SIZE = 5000, REST_SIZE = 9000, REST_FIRST = 4000, MAX_FILES = 32 };

static void say(const char *text)
{
    puts(text);
    fflush(stdout);
}

static int give_up(const char *what, const struct err *e)
{
    fprintf(stderr, "%s: %s (%s)\n", what, e->text, e->hint);
    return e->code == EINPROGRESS ? 4
           : e->code == ESTALE    ? 5
           : e->code == ENOENT    ? 6
                                  : 3;
}

static char byte_at(const char *path, uint64_t at)
{
    return (char)(path[8] + 'A' + at * 31 + at / 251);
}

/* Receives what is missing of [0, end), in pieces, the last one first. */
static int receive(struct txn_file *f, const char *path, uint64_t end, struct err *e)
{
    enum { PIECE = 700 };
    uint64_t at = (end - 1) / PIECE * PIECE;
    int fd = txn_file_fd(f, e);

    if (fd < 0)
        return fd;
    for (;; at -= PIECE) {
        uint64_t len = MIN(end - at, (uint64_t)PIECE);
        char bytes[PIECE];

        if (!txn_has(f, at, len)) {
            int ret = txn_writes(f, at, len, e);
            ssize_t n;

            for (uint64_t i = 0; i < len; i++)
                bytes[i] = byte_at(path, at + i);
            n = ret == 0 ? pwrite(fd, bytes, len, (off_t)at) : -1;
            if (ret == 0 && n != (ssize_t)len)
                ret = err_set(e, n < 0 ? errno : EIO, "write %s", path);
            if (ret < 0)
                return ret;
            ret = txn_wrote(f, at, len, e);
            if (ret < 0)
                return ret;
        }
        if (at == 0)
            return 0;
    }
}

static struct txn_file *file_of(struct txn *t, const char *path, struct err *e)
{
    const struct txn_new what = {
        .path = path, .uid = geteuid(), .gid = getegid(), .mode = 0644};
    struct txn_file *f = txn_find(t, path);

    if (f || txn_new(t, &what, &f, e) == 0)
        return f;
    return NULL;
}

/* ---- a step ---- */

static int stage_file(struct txn *t, const char *path, const char *text, struct err *e)
{
    char part[200];
    int data = txn_data_dir(t), fd;
    ssize_t n;

    for (const char *s = strchr(path, '/'); s; s = strchr(s + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(s - path), path);
        if (mkdirat(data, part, 0755) < 0 && errno != EEXIST)
            return err_set(e, errno, "mkdir %s", part);
    }
    fd = openat(data, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0)
        return err_set(e, errno, "make %s", path);
    n = write(fd, text, strlen(text));
    if (n != (ssize_t)strlen(text))
        err_set(e, n < 0 ? errno : EIO, "write %s", path);
    close(fd);
    return n == (ssize_t)strlen(text) ? 0 : -EIO;
}

/* "PUT=STAGE=PATH=TEXT": *f is what the step has, *text the bytes of a new file. */
static bool take_arg(char *arg, struct publish_file *f, const char **text)
{
    const char *kind = strsep(&arg, "="), *stage = strsep(&arg, "=");

    f->path = strsep(&arg, "=");
    *text = arg;
    if (!stage || !f->path)
        return false;
    f->kind = strcmp(kind, "PUT") == 0      ? PUBLISH_PUT
              : strcmp(kind, "REMOVE") == 0 ? PUBLISH_REMOVE
                                            : PUBLISH_HOLD;
    f->stage = (unsigned)(*stage - '0');
    f->uid = geteuid();
    f->gid = getegid();
    f->mode = 0644;
    return true;
}

/* Times of change are those of a copy when publish.py has made a state of the disk. */
static int remember(struct txn *t, int run, const char *path, struct err *e)
{
    struct file_id id;
    int ret = publish_identity(run, path, &id, e);

    id.ctime_ns = 0;
    return ret < 0 ? ret : txn_base_add(t, path, &id, e);
}

static int make_step(struct txn *t, const char *const *text, int count,
                     const struct publish_file *file, struct err *e)
{
    int ret = txn_clear_data(t, e);

    for (int i = 0; ret == 0 && i < count; i++)
        if (file[i].kind == PUBLISH_PUT)
            ret = stage_file(t, file[i].path, text[i], e);
    return ret;
}

static int remember_all(struct txn *t, int run, char **args, int count,
                        struct publish_file *file, const char **text, struct err *e)
{
    int ret = 0;

    for (int i = 0; ret == 0 && i < count; i++)
        ret = take_arg(args[i], &file[i], &text[i])
                  ? remember(t, run, file[i].path, e)
                  : err_set(e, EINVAL, "argument %d", i);
    if (ret == 0)
        say("begun");
    return ret;
}

static int publish_step(struct txn *t, int run, char **args, int count, struct err *e)
{
    struct txn_file *done = file_of(t, done_path, e), *rest = file_of(t, rest_path, e);
    struct publish_file file[MAX_FILES] = {0};
    const char *text[MAX_FILES];
    struct publish_spec spec = {.uid = geteuid(), .gid = getegid()};
    int ret = done && rest ? txn_note(t, "both", "", e) : -1;

    if (ret == 0)
        ret = remember_all(t, run, args, count, file, text, e);
    if (ret == 0)
        ret = txn_expect(done, DONE_SIZE, e);
    if (ret == 0)
        ret = txn_expect(rest, REST_SIZE, e);
    if (ret == 0)
        ret = txn_remove(t, "raw/gone", e);
    if (ret == 0)
        ret = receive(rest, rest_path, REST_FIRST, e);
    if (ret == 0)
        ret = receive(done, done_path, DONE_SIZE, e);
    if (ret == 0)
        ret = txn_sync(t, e);
    if (ret == 0) {
        say("synced");
        ret = make_step(t, text, count, file, e);
    }
    if (ret == 0)
        ret = txn_publish(t, file, (size_t)count, &spec, &done, 1, true, e);
    if (ret == 0)
        say("published");
    txn_file_put(done);
    txn_file_put(rest);
    return ret;
}

/* DONE was staged and is not now: the step is done. */
static bool is_published(struct txn *t)
{
    CLEANUP_FREE char *both = txn_noted(t, "both");
    struct txn_file *done = txn_find(t, done_path);
    bool is = both && !done;

    txn_file_put(done);
    return is;
}

static int finish(struct txn *t, int run, struct err *e)
{
    struct txn_file *rest = txn_find(t, rest_path);
    struct publish_file file = {.kind = PUBLISH_PUT,
                                .path = "rest",
                                .uid = geteuid(),
                                .gid = getegid(),
                                .mode = 0644};
    struct publish_spec spec = {.uid = geteuid(), .gid = getegid()};
    int ret = rest ? receive(rest, rest_path, REST_SIZE, e)
                   : err_set(e, ENOENT, "nothing is staged");

    if (ret == 0)
        ret = txn_clear_data(t, e);
    if (ret == 0)
        ret = stage_file(t, "rest", "rest", e);
    if (ret == 0)
        ret = remember(t, run, "rest", e);
    if (ret == 0)
        ret = txn_publish(t, &file, 1, &spec, &rest, 1, false, e);
    txn_file_put(rest);
    return ret;
}

/* ---- what is staged ---- */

static int look_at(void *user, struct txn_file *f)
{
    CLEANUP_FREE char *path = txn_file_path(f);
    struct err *e = user;
    int fd = txn_file_fd(f, e);
    struct ranges missing = {0};
    uint64_t size = txn_expected(f);
    bool right = fd >= 0;

    if (txn_missing(f, size, &missing) < 0)
        return err_nomem(e);
    for (uint64_t at = 0; right && at < size; at++) {
        char c = 0;

        if (txn_has(f, at, 1))
            right = pread(fd, &c, 1, (off_t)at) == 1 && c == byte_at(path, at);
    }
    printf("%s", path);
    for (size_t i = 0; i < missing.count; i++)
        printf(" %" PRIu64 "-%" PRIu64, missing.range[i].from, missing.range[i].to);
    printf("%s\n", right ? "" : " WRONG");
    ranges_release(&missing);
    return 0;
}

static int look(struct txn *t, struct err *e)
{
    struct err wrong = {0};
    int ret = txn_each(t, look_at, &wrong, e);

    if (txn_is_removed(t, "raw/gone"))
        say("raw/gone");
    return ret;
}

int main(int argc, char **argv)
{
    const char *what = argc > 2 ? argv[2] : "";
    int top = argc > 2 ? open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    int run = openat(top, "run", O_RDONLY | O_DIRECTORY | O_CLOEXEC), ret;
    const struct publish_place at = {.dir = top, .name = "run", .path = "run"};
    struct err e = {0}, closing = {0};
    struct txn *t;

    if (run < 0 || argc - 3 > MAX_FILES)
        return 2;
    ret = txn_open(&at, strcmp(what, "step") == 0 ? TXN_ANY : TXN_EXISTING, &t, &e);
    if (ret < 0)
        return give_up("open", &e);
    if (strcmp(what, "step") == 0 && is_published(t))
        say("published");
    else if (strcmp(what, "step") == 0)
        ret = publish_step(t, run, argv + 3, argc - 3, &e);
    else if (strcmp(what, "finish") == 0)
        ret = finish(t, run, &e);
    else
        ret = look(t, &e);
    if (txn_close(t, &closing) < 0 && ret == 0)
        return give_up("close", &closing);
    close(run);
    close(top);
    return ret < 0 ? give_up(what, &e) : 0;
}
