/* SPDX-License-Identifier: MIT */
/*
 * tests/bench/bench_device.c - what loading to a device costs, as parts of what its link and
 * the page cache could do: bench_device DRIVER|real [MIB [THREADS]]. Wall time, median of
 * several rounds; every case is first held against the CPU's bytes. 77: there is no device.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/err.h"
#include "base/pool.h"
#include "gpu/device_priv.h"
#include "index/chunk.h"
#include "remote/source.h"

enum { SHARDS = 4, ROUNDS = 7, CHECK = 8 << 20, PART = 4 << 20, SKIPPED = 77 };

struct bench {
    struct device *d;
    uint64_t size; /* bytes of the shards of a case together */
    unsigned threads;
    double link, cache; /* GB/s that can be had */
};

/* A matrix whose columns lie in four shards, or one of one shard (rows of 0 bytes). */
struct kind {
    const char *name;
    enum dtype stored, dtype;
    uint64_t row; /* stored bytes of a row of a shard */
    uint8_t flags;
    bool transposed;
    uint64_t block; /* of factors, both ways; 0: none */
    double goal;    /* of the link; 0: only told */
};

static const struct kind kinds[] = {
    {"contiguous", DTYPE_U8, DTYPE_U8, 0, 0, false, 0, 0.95},
    {"columns, rows of 16 bytes", DTYPE_BF16, DTYPE_BF16, 16, 0, false, 0, 0},
    {"columns, rows of 64 bytes", DTYPE_BF16, DTYPE_BF16, 64, 0, false, 0, 0.93},
    {"columns, rows of 510 bytes", DTYPE_BF16, DTYPE_BF16, 510, 0, false, 0, 0.93},
    {"columns, rows of 4 KiB", DTYPE_BF16, DTYPE_BF16, 4096, 0, false, 0, 0.93},
    {"columns, rows of 64 KiB", DTYPE_BF16, DTYPE_BF16, 65536, 0, false, 0, 0.93},
    {"columns, bytes swapped", DTYPE_F16, DTYPE_F16, 4096, CHUNK_SWAP, false, 0, 0},
    {"columns, F32 to BF16", DTYPE_F32, DTYPE_BF16, 4096, 0, false, 0, 0},
    {"columns, BF16 to F32", DTYPE_BF16, DTYPE_F32, 4096, 0, false, 0, 0},
    {"F8_E4M3 to BF16, tiles of 128", DTYPE_F8_E4M3, DTYPE_BF16, 4096, 0, false, 128,
     0},
    {"columns stored transposed", DTYPE_BF16, DTYPE_BF16, 4096, 0, true, 0, 0},
};

static void must(int ret, const struct err *e)
{
    if (ret < 0) {
        fprintf(stderr, "bench_device: %s\n", e->text);
        exit(1);
    }
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    const double *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

/* ---- sources ---- */

/* Reading costs nothing and gives nothing: what is left is the way to the device. */
static int nothing_read(struct source *s, uint64_t off, size_t len, void *dst,
                        struct err *e)
{
    (void)s, (void)off, (void)len, (void)dst, (void)e;
    return 0;
}

static void nothing_close(struct source *s)
{
    free(s);
}

static const struct source_ops nothing = {
    .name = "nothing", .read = nothing_read, .close = nothing_close};

static struct source *open_nothing(uint64_t size)
{
    struct source *s = calloc(1, sizeof *s);
    struct err e = {0};

    if (!s)
        exit(1);
    must(source_init(s, &nothing, "nothing", size, &e), &e);
    return s;
}

static unsigned char *random_bytes(uint64_t size)
{
    unsigned char *p = malloc(size);
    uint64_t v = 88172645463325252u;

    if (!p)
        exit(1);
    for (uint64_t i = 0; i + 8 <= size; i += 8) {
        v ^= v << 13;
        v ^= v >> 7;
        v ^= v << 17;
        memcpy(p + i, &v, 8);
    }
    return p;
}

static struct source *open_memory(uint64_t size)
{
    struct source *s;
    struct err e = {0};

    must(source_from_memory(random_bytes(size), size, true, "memory", &s, &e), &e);
    return s;
}

/* A file that nobody sees, in the page cache. */
static struct source *open_file(uint64_t size)
{
    const char *folder = getenv("TMPDIR");
    int fd = open(folder ? folder : "/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    unsigned char *bytes = random_bytes(PART);
    struct source *s;
    struct err e = {0};

    if (fd < 0) {
        perror("bench_device: a temporary file");
        exit(1);
    }
    for (uint64_t done = 0; done < size; done += PART)
        must(write_all(fd, bytes, MIN(size - done, (uint64_t)PART), &e), &e);
    free(bytes);
    must(source_from_fd(fd, "file", &s, &e), &e);
    return s;
}

/* ---- one case ---- */

static struct gather *make(const struct kind *k, uint64_t size,
                           struct source *(*open_one)(uint64_t size))
{
    uint64_t unit = dtype_unit(k->stored), shards = k->row ? SHARDS : 1;
    uint64_t row = k->row ? k->row : size, columns = row / unit;
    uint64_t rows = size / shards / row, start[SHARDS][2] = {{0}};
    const uint64_t box[2] = {rows, columns}, block[2] = {k->block, k->block};
    const struct shape shape = {.nd = 2, .dim = {rows, columns * shards}};
    const int64_t step[2] = {k->transposed ? (int64_t)unit : (int64_t)row,
                             k->transposed ? (int64_t)(rows * unit) : (int64_t)unit};
    struct gather_piece piece[SHARDS];
    struct source *source[SHARDS];
    struct gather_scale scale = {.block = block};
    float *factor = NULL;
    struct gather *g;
    struct err e = {0};

    for (unsigned i = 0; i < shards; i++) {
        start[i][1] = i * columns;
        source[i] = open_one(rows * row);
        piece[i] = (struct gather_piece){.start = start[i],
                                         .size = box,
                                         .step = step,
                                         .source = i,
                                         .flags = k->flags};
    }
    if (k->block) {
        scale.count =
            ((rows - 1) / k->block + 1) * ((columns * shards - 1) / k->block + 1);
        factor = malloc(scale.count * sizeof *factor);
        for (size_t i = 0; factor && i < scale.count; i++)
            factor[i] = 1.0f + (float)(i % 7);
        scale.value = factor;
    }
    must(gather_new(&(struct gather_request){.shape = &shape,
                                             .stored = k->stored,
                                             .dtype = k->dtype,
                                             .piece = piece,
                                             .pieces = shards,
                                             .source = source,
                                             .sources = shards,
                                             .scale = k->block ? &scale : NULL},
                    &g, &e),
         &e);
    for (unsigned i = 0; i < shards; i++)
        source_put(source[i]);
    free(factor);
    return g;
}

static void check(const struct bench *b, const struct kind *k)
{
    struct gather *g = make(k, CHECK, open_memory);
    unsigned char *want = malloc(gather_size(g)), *got = malloc(gather_size(g));
    struct gather_job host = {g, (uintptr_t)want}, job = {.gather = g};
    struct err e = {0};

    must(gather_run_host(&host, 1, NULL, NULL, &e), &e);
    must(device_alloc(b->d, gather_size(g), &job.address, &e), &e);
    must(device_load(b->d, &job, 1, NULL, NULL, &e), &e);
    must(device_copy_out(b->d, got, job.address, gather_size(g), &e), &e);
    must(device_free(b->d, job.address, &e), &e);
    if (memcmp(got, want, gather_size(g)) != 0) {
        printf("%-32s WRONG BYTES\n", k->name);
        exit(1);
    }
    gather_free(g);
    free(want);
    free(got);
}

/* GB/s of stored bytes. */
static double rate(const struct bench *b, const struct gather *g, uint64_t bytes)
{
    struct gather_job job = {.gather = g};
    double took[ROUNDS];
    struct err e = {0};

    must(device_alloc(b->d, gather_size(g), &job.address, &e), &e);
    must(device_load(b->d, &job, 1, NULL, NULL, &e),
         &e); /* slots are made, files read */
    for (int i = 0; i < ROUNDS; i++) {
        double start = now();

        must(device_load(b->d, &job, 1, NULL, NULL, &e), &e);
        took[i] = now() - start;
    }
    must(device_free(b->d, job.address, &e), &e);
    qsort(took, ROUNDS, sizeof *took, by_value);
    return (double)bytes / took[ROUNDS / 2] / 1e9;
}

static void print_line(const char *name, double got, double most, double goal)
{
    printf("%-32s %8.2f GB/s   %5.2f", name, got, got / most);
    if (goal > 0)
        printf("   goal %.2f: %s", goal,
               got >= goal * most ? "reached" : "NOT REACHED");
    putchar('\n');
    fflush(stdout);
}

/* ---- what could be had ---- */

/* Large copies from pinned memory, nothing else. */
static double link_rate(const struct bench *b)
{
    const struct driver *v = &b->d->driver;
    const uint64_t size = 64 << 20;
    void *host, *stream;
    uint64_t device;
    double took[ROUNDS];
    struct err e = {0};

    must(device_enter(b->d, &e), &e);
    must(DRIVER_CALL(v, &e, pinned_alloc, &host, size, DRIVER_PORTABLE), &e);
    must(DRIVER_CALL(v, &e, memory_alloc, &device, size), &e);
    must(DRIVER_CALL(v, &e, stream_new, &stream, DRIVER_NON_BLOCKING), &e);
    memset(host, 1, size);
    for (int i = 0; i < ROUNDS; i++) {
        double start = now();

        for (int k = 0; k < 8; k++)
            must(DRIVER_CALL(v, &e, copy_in_later, device, host, size, stream), &e);
        must(DRIVER_CALL(v, &e, stream_wait, stream), &e);
        took[i] = (now() - start) / 8;
    }
    v->stream_free(stream);
    v->memory_free(device);
    v->pinned_free(host);
    device_leave(b->d);
    qsort(took, ROUNDS, sizeof *took, by_value);
    return (double)size / took[ROUNDS / 2] / 1e9;
}

struct cache_read {
    struct source *source;
    uint64_t parts;
    unsigned threads;
    unsigned char *
        *buffer; /* one a thread: new memory would cost more than the reading */
};

/* What one of the threads reads. */
static int read_parts(void *user, size_t thread, struct err *e)
{
    struct cache_read *c = user;
    int ret = 0;

    for (uint64_t i = thread; ret == 0 && i < c->parts; i += c->threads)
        ret = source_read(c->source, i * PART, PART, c->buffer[thread], e);
    return ret;
}

/* Reads of a file in the page cache, by as many threads as feed the device. */
static double cache_rate(const struct bench *b)
{
    struct cache_read c = {.source = open_file(b->size),
                           .parts = b->size / PART,
                           .threads = b->threads,
                           .buffer = calloc(b->threads, sizeof(unsigned char *))};
    struct pool *pool;
    double took[ROUNDS];
    struct err e = {0};

    for (unsigned i = 0; c.buffer && i < b->threads; i++)
        c.buffer[i] = random_bytes(PART);
    must(pool_new(b->threads, &pool, &e), &e);
    for (int i = 0; i < ROUNDS; i++) {
        double start = now();

        must(pool_each(pool, b->threads, read_parts, &c, &e), &e);
        took[i] = now() - start;
    }
    pool_free(pool);
    source_put(c.source);
    for (unsigned i = 0; i < b->threads; i++)
        free(c.buffer[i]);
    free(c.buffer);
    qsort(took, ROUNDS, sizeof *took, by_value);
    return (double)b->size / took[ROUNDS / 2] / 1e9;
}

/* ---- the tables ---- */

static void print_device(const struct bench *b)
{
    const struct device_info *i = device_info_of(b->d);
    char date[32];
    time_t t = time(NULL);

    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&t));
    printf("%s, compute capability %d.%d, %d multiprocessors, driver %d.%d, "
           "PCIe generation %d x%d of %d x%d, %s\n",
           i->name, i->major, i->minor, i->multiprocessors, i->driver / 1000,
           i->driver % 1000 / 10, i->link_generation, i->link_width,
           i->link_generation_max, i->link_width_max, date);
    printf("cases of %" PRIu64 " MiB, %u threads\n", b->size >> 20, b->threads);
}

static void table(const struct bench *b, struct source *(*open_one)(uint64_t size),
                  double most, double goal)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        struct gather *g = make(&kinds[i], b->size, open_one);

        print_line(kinds[i].name, rate(b, g, b->size), most,
                   goal > 0 && kinds[i].goal > 0 ? goal : kinds[i].goal);
        gather_free(g);
    }
}

int main(int argc, char **argv)
{
    struct bench b = {.size = (uint64_t)512 << 20};
    struct err e = {0};
    const char *driver = argc > 1 && strcmp(argv[1], "real") != 0 ? argv[1] : NULL;

    if (argc > 2)
        b.size = MAX(strtoull(argv[2], NULL, 10) << 20, (uint64_t)PART);
    if (argc > 3)
        b.threads = (unsigned)strtoul(argv[3], NULL, 10);
    if (device_open(&(struct device_options){.driver = driver, .threads = b.threads},
                    &b.d, &e) < 0) {
        printf("skipped: %s\n", e.text);
        return SKIPPED;
    }
    b.threads = b.d->threads;
    print_device(&b);
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        check(&b, &kinds[i]);
    printf("every case gives the CPU's bytes\n");
    b.link = link_rate(&b);
    b.cache = cache_rate(&b);
    printf("the link alone, pinned: %.2f GB/s; the page cache alone: %.2f GB/s\n",
           b.link, b.cache);
    printf("\n-- to the device, from slots that are full: of the link\n");
    table(&b, open_nothing, b.link, 0);
    printf(
        "\n-- from files in the page cache: of the smaller of link and page cache\n");
    table(&b, open_file, MIN(b.link, b.cache), 0.8);
    device_close(b.d);
    return 0;
}
