/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_intake.c - any bytes as a safetensors file that is received, in any order of blocks. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "save/intake_priv.h"
#include "save/merge.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What a header announces takes room on the disk: no file may have more than this. */
enum { LARGEST = 1 << 20, INPUT_MAX = 1 << 16 };

static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

static char path[] = "/tmp/fuzz-intake-XXXXXX";

static void clean(void)
{
    struct err ignored = {0};

    intake_remove_tree(AT_FDCWD, path, &ignored);
}

static int staging(void)
{
    static int dir = -1;
    const struct rlimit limit = {LARGEST, LARGEST};

    if (dir >= 0)
        return dir;
    signal(SIGXFSZ, SIG_IGN);
    if (!mkdtemp(path) || setrlimit(RLIMIT_FSIZE, &limit) < 0)
        abort();
    dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    atexit(clean);
    return dir;
}

static bool may_fail(int rc)
{
    return rc == 0 || rc == -EINVAL || rc == -ENOSPC || rc == -EFBIG ||
           rc == -ENAMETOOLONG || rc == -ENOMEM || rc == -EDQUOT;
}

/* Blocks of 1 to 256 bytes, as the input says: from both ends. */
static bool write_blocks(struct intake_file *f, const uint8_t *data, size_t size)
{
    size_t low = 0, high = size;
    struct err e = {0};

    while (low < high) {
        size_t n = MIN((size_t)data[low] + 1, high - low);
        bool back = data[high - 1] & 1;
        size_t at = back ? high - n : low;
        int rc = intake_write(f, data + at, n, at, &e);

        require(may_fail(rc), "write", &e);
        if (rc < 0)
            return false;
        if (back)
            high -= n;
        else
            low += n;
    }
    return true;
}

static void check_bytes(struct intake_file *f, const uint8_t *data, size_t size)
{
    CLEANUP_FREE uint8_t *got = malloc(size + 1);
    struct err e = {0};
    ssize_t n = got ? intake_read(f, got, size + 1, 0, &e) : 0;

    require(n == (ssize_t)size && memcmp(got, data, size) == 0, "other bytes", &e);
}

static void finish(struct intake *k, struct intake_file *f)
{
    const struct merge_file file = {.path = intake_path(f), .intake = f};
    const struct merge_spec spec = {.file = &file, .files = 1};
    CLEANUP(merge_freep) struct merge *m = NULL;
    struct intake_output out = {0};
    struct err e = {0};
    int rc = merge_new(&spec, &m, &e);

    require(may_fail(rc), "merge", &e);
    if (rc == 0)
        rc = intake_finish(k, m, &out, &e);
    require(may_fail(rc), "finish", &e);
    intake_output_release(&out);
}

/* The first byte chooses the format, the rest is the file. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct intake_spec spec = {.dir = staging(), .options = {.ranks = 2}};
    struct intake_file *f;
    struct intake *k = NULL;
    struct err e = {0};
    size_t writers = 0;

    if (size < 1 || size > INPUT_MAX)
        return 0;
    while (format_writer_at(writers))
        writers++;
    spec.writer = format_writer_at(data[0] % writers);
    if (!strcmp(spec.writer->name, "hf") || !strcmp(spec.writer->name, "pt") ||
        !strcmp(spec.writer->name, "npz"))
        spec.options.ranks = 0;
    require(intake_open(&spec, &k, &e) == 0, "open", &e);
    require(intake_get(k, "model.safetensors", &f, &e) == 0, "get", &e);
    if (write_blocks(f, data + 1, size - 1)) {
        check_bytes(f, data + 1, size - 1);
        if (intake_complete(f))
            finish(k, f);
    }
    require(intake_remove(f, &e) == 0, "remove", &e);
    require(intake_remove_tree(spec.dir, "data", &e) == 0, "remove", &e);
    intake_free(k);
    return 0;
}
