/* SPDX-License-Identifier: MIT */
/*
 * tests/bench/bench_reader.c - reads ranges of files in the ways that loaders do, and prints what it took.
 *
 *   bench_reader MODE [--threads N] [--block BYTES] [--count N] [--passes N] [--server PID] FILE[:OFFSET:LENGTH]...
 *
 * read     pread of BLOCK bytes after the other into one buffer a thread; N threads share the ranges evenly
 * random   COUNT preads of BLOCK bytes at random multiples of BLOCK, by each thread its part of them
 * mapped   copies out of a private mapping, as loaders do, block by block
 * copy     copies as many bytes of anonymous memory: what a byte costs that is in memory already
 *
 * One JSON line a pass: {"seconds", "cpu", "bytes"}; cpu is seconds on a core of this process and,
 * with --server, of all threads of that one. A second pass reads again what stays open and mapped.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

enum { MAX_THREADS = 256 };

enum mode { MODE_READ, MODE_RANDOM, MODE_MAPPED, MODE_COPY };

struct range {
    const char *path;
    int fd;
    uint64_t offset, length;
    unsigned char *map; /* of the whole file; NULL unless mapped */
    uint64_t mapped;
};

struct job {
    enum mode mode;
    unsigned threads, passes, count, nranges;
    uint64_t block, total;
    pid_t server;
    struct range *ranges;
};

struct share { /* what one thread does */
    const struct job *job;
    unsigned index;
    uint64_t bytes;
};

_Noreturn static void die(const char *what)
{
    fprintf(stderr, "bench_reader: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* ---- time ---- */

static double clock_seconds(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Of all its threads; the scheduler counts in nanoseconds. 0 for no server. */
static double server_seconds(pid_t pid)
{
    char path[64];
    double total = 0;
    DIR *tasks;

    if (pid <= 0)
        return 0;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    tasks = opendir(path);
    if (!tasks)
        die(path);
    for (struct dirent *d; (d = readdir(tasks));) {
        char stat[384];
        unsigned long long ns = 0;
        FILE *f;

        if (d->d_name[0] == '.')
            continue;
        snprintf(stat, sizeof stat, "%s/%s/schedstat", path, d->d_name);
        f = fopen(stat, "re");
        if (f && fscanf(f, "%llu", &ns) == 1)
            total += (double)ns / 1e9;
        if (f)
            fclose(f);
    }
    closedir(tasks);
    return total;
}

/* ---- the ways of reading ---- */

static void read_at(int fd, void *buffer, uint64_t length, uint64_t offset,
                    const char *path)
{
    while (length) {
        ssize_t n = pread(fd, buffer, length, (off_t)offset);

        if (n <= 0)
            die(path);
        length -= (uint64_t)n;
        offset += (uint64_t)n;
    }
}

/* Bytes [from, to) of all ranges laid end to end, one block after the other. */
static void read_span(const struct job *j, uint64_t from, uint64_t to,
                      unsigned char *buffer)
{
    for (unsigned i = 0; i < j->nranges && from < to; i++) {
        const struct range *r = &j->ranges[i];

        while (from < MIN(to, r->length)) {
            uint64_t n = MIN(j->block, MIN(to, r->length) - from);

            if (j->mode == MODE_READ)
                read_at(r->fd, buffer, n, r->offset + from, r->path);
            else
                memcpy(buffer, r->map + r->offset + from, n);
            from += n;
        }
        from -= MIN(from, r->length);
        to -= MIN(to, r->length);
    }
}

static uint64_t next_random(uint64_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x;
}

static void read_random(const struct job *j, unsigned count, uint64_t seed,
                        unsigned char *buffer)
{
    for (unsigned k = 0; k < count; k++) {
        uint64_t at = next_random(&seed) % (j->total / j->block) * j->block;
        unsigned i = 0;

        while (at >= j->ranges[i].length)
            at -= j->ranges[i++].length;
        at = MIN(at, j->ranges[i].length - MIN(j->block, j->ranges[i].length));
        read_at(j->ranges[i].fd, buffer, MIN(j->block, j->ranges[i].length),
                j->ranges[i].offset + at, j->ranges[i].path);
    }
}

static void *run_share(void *user)
{
    struct share *s = user;
    const struct job *j = s->job;
    unsigned char *buffer = NULL;

    if (posix_memalign((void **)&buffer, 4096, j->block) != 0)
        die("a buffer");
    if (j->mode == MODE_RANDOM) {
        unsigned count = j->count / j->threads;

        read_random(j, count, 88172645463325252u + s->index * 7919u, buffer);
        s->bytes = count * j->block;
    } else {
        uint64_t each = j->total / j->threads;
        uint64_t from = each * s->index;
        uint64_t to = s->index + 1 == j->threads ? j->total : from + each;

        read_span(j, from, to, buffer);
        s->bytes = to - from;
    }
    free(buffer);
    return NULL;
}

static void run_pass(const struct job *j)
{
    struct share shares[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    double cpu = server_seconds(j->server) + clock_seconds(CLOCK_PROCESS_CPUTIME_ID);
    double begin = clock_seconds(CLOCK_MONOTONIC), seconds;
    uint64_t bytes = 0;

    for (unsigned i = 0; i < j->threads; i++) {
        shares[i] = (struct share){.job = j, .index = i};
        if (i > 0 && pthread_create(&threads[i], NULL, run_share, &shares[i]) != 0)
            die("a thread");
    }
    run_share(&shares[0]);
    bytes = shares[0].bytes;
    for (unsigned i = 1; i < j->threads; i++) {
        pthread_join(threads[i], NULL);
        bytes += shares[i].bytes;
    }
    seconds = clock_seconds(CLOCK_MONOTONIC) - begin;
    cpu = server_seconds(j->server) + clock_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    printf("{\"seconds\": %.9f, \"cpu\": %.9f, \"bytes\": %llu}\n", seconds, cpu,
           (unsigned long long)bytes);
}

/* ---- the command line ---- */

/* FILE or FILE:OFFSET:LENGTH; the text is cut at the colons. */
static void open_range(struct job *j, struct range *r, char *text)
{
    char *colon = strchr(text, ':');
    struct stat st;

    if (colon) {
        char *end;

        *colon = '\0';
        r->offset = strtoull(colon + 1, &end, 10);
        r->length = *end == ':' ? strtoull(end + 1, NULL, 10) : 0;
    }
    r->path = text;
    r->fd = open(text, O_RDONLY | O_CLOEXEC);
    if (r->fd < 0 || fstat(r->fd, &st) < 0)
        die(text);
    if (!colon)
        r->length = (uint64_t)st.st_size;
    r->mapped = (uint64_t)st.st_size;
    if (r->offset + r->length > r->mapped) {
        errno = ERANGE;
        die(text);
    }
    if (j->mode == MODE_MAPPED && r->mapped) {
        r->map = mmap(NULL, r->mapped, PROT_READ, MAP_PRIVATE, r->fd, 0);
        if (r->map == MAP_FAILED)
            die(text);
    }
    j->total += r->length;
}

/* The same many bytes in memory, each page its own. */
static void become_memory(struct job *j)
{
    struct range *r = &j->ranges[0];

    r->map = mmap(NULL, j->total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                  -1, 0);
    if (r->map == MAP_FAILED)
        die("memory");
    memset(r->map, 1, j->total);
    *r = (struct range){.path = "memory", .fd = -1, .length = j->total, .map = r->map};
    j->nranges = 1;
}

static int parse_mode(const char *text, enum mode *mode)
{
    static const char *const names[] = {"read", "random", "mapped", "copy"};

    for (unsigned i = 0; i < ARRAY_SIZE(names); i++)
        if (strcmp(text, names[i]) == 0) {
            *mode = (enum mode)i;
            return 0;
        }
    return -EINVAL;
}

static void set_option(struct job *j, const char *name, const char *value)
{
    unsigned long long n = strtoull(value, NULL, 10);

    if (strcmp(name, "--threads") == 0)
        j->threads = (unsigned)MAX(1u, MIN(n, (unsigned long long)MAX_THREADS));
    else if (strcmp(name, "--block") == 0)
        j->block = MAX(1u, n);
    else if (strcmp(name, "--count") == 0)
        j->count = (unsigned)n;
    else if (strcmp(name, "--passes") == 0)
        j->passes = (unsigned)n;
    else if (strcmp(name, "--server") == 0)
        j->server = (pid_t)n;
    else {
        errno = EINVAL;
        die(name);
    }
}

int main(int argc, char **argv)
{
    struct job j = {.threads = 1, .passes = 1, .count = 1024, .block = 1u << 20};
    int i = 2;

    if (argc < 3 || parse_mode(argv[1], &j.mode) < 0) {
        fprintf(stderr, "usage: bench_reader read|random|mapped|copy [--threads N] "
                        "[--block BYTES] [--count N] [--passes N] [--server PID] "
                        "FILE[:OFFSET:LENGTH]...\n");
        return 2;
    }
    for (; i + 1 < argc && strncmp(argv[i], "--", 2) == 0; i += 2)
        set_option(&j, argv[i], argv[i + 1]);
    j.ranges = calloc((size_t)(argc - i) + 1, sizeof *j.ranges);
    if (!j.ranges)
        die("ranges");
    for (; i < argc; i++)
        open_range(&j, &j.ranges[j.nranges++], argv[i]);
    if (j.mode == MODE_RANDOM && j.total < j.block) {
        errno = ERANGE;
        die("less than a block");
    }
    if (j.mode == MODE_COPY)
        become_memory(&j);
    for (unsigned pass = 0; pass < j.passes; pass++)
        run_pass(&j);
    free(j.ranges);
    return 0;
}
