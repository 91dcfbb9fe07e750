/* SPDX-License-Identifier: MIT */
/* tests/bench/bench_intake.c - how fast a safetensors file becomes shards, beside a copy and its fsync. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "base/buf.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/pool.h"
#include "index/formats/format.h"
#include "save/intake.h"
#include "save/merge.h"
#include "save/staged.h"

/*
 * bench_intake DIR [MiB] [RUNS]: both read the same file, which is in memory, by blocks as a
 * mount gets them; runs alternate, medians are printed. DIR is on the disk to be measured.
 */
enum { BLOCK = 1 << 20, MAX_RUNS = 99, WRITERS = 2 };

static const struct way {
    const char *name, *to;
    struct layout_options options;
} ways[] = {
    {"hf", "hf", {.max_shard_size = 5000000000}},
    {"dcp:ranks=8", "dcp", {.ranks = 8}},
    {"torch_dist:ranks=8", "torch_dist", {.ranks = 8}},
    {"zarr", "zarr", {0}},
    {"zarr:ranks=8", "zarr", {.ranks = 8}},
    {"dcp-hf:ranks=8", "dcp-hf", {.ranks = 8}},
    {"dcp:mesh=2x4", "dcp", {.mesh = {2, 4}}},
};

static void die(const char *what, const struct err *e)
{
    fprintf(stderr, "bench_intake: %s: %s\n", what, e ? e->text : strerror(errno));
    exit(1);
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* ---- the file ---- */

/* Layers of a language model: most bytes in large matrices, and small tensors between. */
static void add_header(struct buf *h, uint64_t want, uint64_t *size)
{
    static const struct {
        const char *key;
        unsigned rows, columns;
    } t[] = {{"attn.qkv.weight", 6144, 4096},
             {"attn.out.weight", 4096, 4096},
             {"norm.weight", 4096, 1},
             {"mlp.up.weight", 11008, 4096},
             {"mlp.down.weight", 4096, 11008}};
    uint64_t at = 0;

    buf_addc(h, '{');
    for (unsigned layer = 0; at < want; layer++)
        for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
            uint64_t bytes = 2 * (uint64_t)t[i].rows * t[i].columns;

            buf_addf(h,
                     "%s\"layers.%u.%s\":{\"dtype\":\"BF16\",\"shape\":[%u,%u],"
                     "\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                     at ? "," : "", layer, t[i].key, t[i].rows, t[i].columns, at,
                     at + bytes);
            at += bytes;
        }
    buf_addc(h, '}');
    *size = at;
}

static uint64_t make_file(const char *path, uint64_t want)
{
    CLEANUP(buf_release) struct buf h = {0};
    CLEANUP_FD int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    CLEANUP_FREE char *block = malloc(BLOCK);
    unsigned char len[8];
    uint64_t size, x = 88172645463325252u;

    if (fd < 0 || !block)
        die(path, NULL);
    add_header(&h, want, &size);
    put_le64(len, h.len);
    if (write(fd, len, sizeof len) != sizeof len ||
        write(fd, h.data, h.len) != (ssize_t)h.len)
        die(path, NULL);
    for (uint64_t at = 0; at < size; at += BLOCK) {
        for (size_t i = 0; i < BLOCK; i += sizeof x) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            memcpy(block + i, &x, sizeof x);
        }
        if (write(fd, block, MIN((uint64_t)BLOCK, size - at)) < 0)
            die(path, NULL);
    }
    fsync(fd);
    return sizeof len + h.len + size;
}

/* ---- two ways to write it ---- */

static void copy_file(int from, int dir)
{
    CLEANUP_FD int fd = openat(dir, "copy", O_WRONLY | O_CREAT | O_EXCL, 0666);
    CLEANUP_FREE char *block = malloc(BLOCK);
    uint64_t at = 0;
    ssize_t n;

    if (fd < 0 || !block)
        die("copy", NULL);
    while ((n = pread(from, block, BLOCK, (off_t)at)) > 0) {
        if (write(fd, block, (size_t)n) != n)
            die("copy", NULL);
        at += (uint64_t)n;
    }
    if (fsync(fd) < 0)
        die("copy", NULL);
}

struct stream {
    int from;
    struct intake_file *to;
    uint64_t size;
    atomic_uint_fast64_t next;
};

/* As a mount: blocks in order, but for what its threads overtake. */
static void *write_stream(void *user)
{
    struct stream *s = user;
    char *block = malloc(BLOCK);
    struct err e = {0};
    uint64_t at;

    while ((at = atomic_fetch_add(&s->next, BLOCK)) < s->size) {
        ssize_t n = pread(s->from, block, BLOCK, (off_t)at);

        if (n <= 0)
            die("read", NULL);
        if (intake_write(s->to, block, (size_t)n, at, &e) < 0)
            die("write", &e);
    }
    free(block);
    return NULL;
}

static void write_all_of(struct intake_file *f, int from, uint64_t size)
{
    struct stream s = {.from = from, .to = f, .size = size};
    pthread_t t[WRITERS];

    for (int i = 0; i < WRITERS; i++)
        pthread_create(&t[i], NULL, write_stream, &s);
    for (int i = 0; i < WRITERS; i++)
        pthread_join(t[i], NULL);
}

static void take_in(const struct way *way, int from, uint64_t size, int dir)
{
    struct intake_spec spec = {
        .dir = dir, .writer = format_writer(way->to), .options = way->options};
    struct merge_file file = {
        .path = "model.safetensors",
    };
    const struct merge_spec ms = {.file = &file, .files = 1};
    struct intake_output out;
    struct intake *k;
    struct merge *m;
    struct err e = {0};

    if (pool_new(2, &spec.pool, &e) < 0 || intake_open(&spec, &k, &e) < 0 ||
        intake_get(k, file.path, &file.intake, &e) < 0)
        die("open", &e);
    write_all_of(file.intake, from, size);
    if (merge_new(&ms, &m, &e) < 0 || intake_finish(k, m, &out, &e) < 0)
        die("finish", &e);
    intake_output_release(&out);
    merge_free(m);
    intake_free(k);
    pool_free(spec.pool);
}

/* ---- runs: each in a process and a directory of its own ---- */

struct taken {
    double seconds;
    long kib; /* the most memory that the process had */
};

static struct taken run(const struct way *way, int from, uint64_t size, const char *dir)
{
    struct err e = {0};
    char path[4096];
    double begin;
    struct rusage usage;
    int status, fd;
    pid_t child;

    snprintf(path, sizeof path, "%s/run", dir);
    if (staged_remove_tree(AT_FDCWD, path, 0, &e) < 0 || mkdir(path, 0777) < 0)
        die(path, e.code ? &e : NULL);
    fd = open(path, O_RDONLY | O_DIRECTORY);
    sync();
    begin = now();
    child = fork();
    if (child == 0) {
        if (way)
            take_in(way, from, size, fd);
        else
            copy_file(from, fd);
        _exit(0);
    }
    if (child < 0 || wait4(child, &status, 0, &usage) < 0 || status != 0)
        die("run", NULL);
    begin = now() - begin;
    close(fd);
    return (struct taken){begin, usage.ru_maxrss};
}

static int by_number(const void *a, const void *b)
{
    const double *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

static void measure(const struct way *way, int from, uint64_t size, const char *dir,
                    int runs)
{
    double copy[MAX_RUNS], take[MAX_RUNS];
    long kib = 0;

    for (int i = 0; i < runs; i++) {
        struct taken t;

        copy[i] = run(NULL, from, size, dir).seconds;
        t = run(way, from, size, dir);
        take[i] = t.seconds;
        kib = MAX(kib, t.kib);
    }
    qsort(copy, (size_t)runs, sizeof *copy, by_number);
    qsort(take, (size_t)runs, sizeof *take, by_number);
    printf("%-20s copy %6.2f s, shards %6.2f s, ratio %.2f, %ld MiB\n", way->name,
           copy[runs / 2], take[runs / 2], copy[runs / 2] / take[runs / 2], kib / 1024);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    uint64_t size = (argc > 2 ? strtoull(argv[2], NULL, 10) : 2048) << 20;
    int runs = argc > 3 ? MIN(atoi(argv[3]), MAX_RUNS) : 5, from;
    struct err e = {0};
    char path[4096];

    if (argc < 2 || runs < 1) {
        fputs("bench_intake DIR [MiB] [RUNS] [FORMAT...]\n", stderr);
        return 2;
    }
    snprintf(path, sizeof path, "%s/source", argv[1]);
    size = make_file(path, size);
    from = open(path, O_RDONLY | O_CLOEXEC);
    for (size_t i = 0; i < ARRAY_SIZE(ways); i++) {
        bool wanted = argc <= 4;

        for (int k = 4; k < argc; k++)
            wanted |= strcmp(argv[k], ways[i].name) == 0;
        if (wanted)
            measure(&ways[i], from, size, argv[1], runs);
    }
    unlink(path);
    snprintf(path, sizeof path, "%s/run", argv[1]);
    staged_remove_tree(AT_FDCWD, path, 0, &e);
    return 0;
}
