/* SPDX-License-Identifier: MIT */
/* tests/bench/bench_zarr.c - writes a zarr array of blosc-lz4 chunks, and decodes it by the library alone. */
#include <blosc.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/base.h"

enum {
    NOISE = 16 << 20, /* floats, read from another place for each chunk */
    LEVEL = 5,        /* numcodecs' default, with the byte shuffle */
};

struct array {
    const char *dir;
    unsigned long rows, columns, chunk_rows, chunk_columns;
};

static size_t chunk_bytes(const struct array *a)
{
    return a->chunk_rows * a->chunk_columns * sizeof(float);
}

static void die(const char *what)
{
    perror(what);
    exit(1);
}

/* ---- writing ---- */

/* Numbers as weights have them: normal, of mean 0. */
static float *make_noise(void)
{
    float *noise = malloc(NOISE * sizeof *noise);
    uint64_t x = 88172645463325252u;

    if (!noise)
        die("noise");
    for (size_t i = 0; i < NOISE; i++) {
        double sum = -6;

        for (int k = 0; k < 12; k++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            sum += (double)(x >> 11) / 9007199254740992.0;
        }
        noise[i] = (float)(sum * 0.02);
    }
    return noise;
}

static void write_file(const char *path, const void *data, size_t len)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

    if (fd < 0 || write(fd, data, len) != (ssize_t)len || close(fd) < 0)
        die(path);
}

static void write_metadata(const struct array *a)
{
    char path[4096], text[512];
    int len = snprintf(
        text, sizeof text,
        "{\"zarr_format\": 2, \"shape\": [%lu, %lu], \"chunks\": [%lu, %lu], "
        "\"dtype\": \"<f4\", \"order\": \"C\", \"filters\": null, "
        "\"fill_value\": 0.0, \"compressor\": {\"id\": \"blosc\", "
        "\"cname\": \"lz4\", \"clevel\": %d, \"shuffle\": 1, \"blocksize\": 0}}",
        a->rows, a->columns, a->chunk_rows, a->chunk_columns, LEVEL);

    snprintf(path, sizeof path, "%s/.zarray", a->dir);
    write_file(path, text, (size_t)len);
}

static int make(const struct array *a)
{
    size_t bytes = chunk_bytes(a), n = bytes / sizeof(float), number = 0;
    void *packed = malloc(bytes + BLOSC_MAX_OVERHEAD);
    float *noise = make_noise();
    char path[4096];

    if (!packed || n > NOISE / 2)
        die("a chunk");
    write_metadata(a);
    for (unsigned long i = 0; i < a->rows / a->chunk_rows; i++)
        for (unsigned long k = 0; k < a->columns / a->chunk_columns; k++) {
            const float *from = noise + (number++ * 7919) % (NOISE - n);
            int len =
                blosc_compress_ctx(LEVEL, BLOSC_SHUFFLE, sizeof *from, bytes, from,
                                   packed, bytes + BLOSC_MAX_OVERHEAD, "lz4", 0, 1);

            if (len <= 0)
                die("blosc");
            snprintf(path, sizeof path, "%s/%lu.%lu", a->dir, i, k);
            write_file(path, packed, (size_t)len);
        }
    free(noise);
    free(packed);
    return 0;
}

/* ---- the library alone ---- */

struct work {
    const struct array *a;
    atomic_ulong next;
    atomic_ulong sum; /* so that nothing is optimised away */
};

static size_t read_file(const char *path, void *dst, size_t max)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t len = 0;
    ssize_t n;

    if (fd < 0)
        die(path);
    while ((n = read(fd, (char *)dst + len, max - len)) > 0)
        len += (size_t)n;
    close(fd);
    return len;
}

static void *decode_some(void *user)
{
    struct work *w = user;
    const struct array *a = w->a;
    unsigned long across = a->columns / a->chunk_columns;
    unsigned long total = a->rows / a->chunk_rows * across, i;
    size_t bytes = chunk_bytes(a);
    unsigned char *packed = malloc(bytes + BLOSC_MAX_OVERHEAD), *plain = malloc(bytes);
    char path[4096];

    while ((i = atomic_fetch_add(&w->next, 1)) < total) {
        size_t len;

        snprintf(path, sizeof path, "%s/%lu.%lu", a->dir, i / across, i % across);
        len = read_file(path, packed, bytes + BLOSC_MAX_OVERHEAD);
        if (len < BLOSC_MIN_HEADER_LENGTH ||
            blosc_decompress_ctx(packed, plain, bytes, 1) != (int)bytes)
            die("decompress");
        atomic_fetch_add(&w->sum, plain[bytes / 2]);
    }
    free(packed);
    free(plain);
    return NULL;
}

static int decode(const struct array *a, unsigned threads)
{
    struct work w = {.a = a};
    pthread_t thread[64];

    threads = MIN(threads, (unsigned)ARRAY_SIZE(thread));
    for (unsigned i = 1; i < threads; i++)
        if (pthread_create(&thread[i], NULL, decode_some, &w) != 0)
            die("thread");
    decode_some(&w);
    for (unsigned i = 1; i < threads; i++)
        pthread_join(thread[i], NULL);
    printf("%lu\n", atomic_load(&w.sum));
    return 0;
}

int main(int argc, char **argv)
{
    struct array a;

    if (argc != 7 && argc != 8) {
        fprintf(stderr, "usage: bench_zarr make|decode DIR ROWS COLUMNS CHUNK_ROWS "
                        "CHUNK_COLUMNS [THREADS]\n");
        return 2;
    }
    a = (struct array){argv[2], strtoul(argv[3], NULL, 10), strtoul(argv[4], NULL, 10),
                       strtoul(argv[5], NULL, 10), strtoul(argv[6], NULL, 10)};
    if (strcmp(argv[1], "make") == 0)
        return make(&a);
    return decode(&a, argc == 8 ? (unsigned)strtoul(argv[7], NULL, 10) : 1);
}
