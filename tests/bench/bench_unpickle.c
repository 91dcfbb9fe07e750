/* SPDX-License-Identifier: MIT */
/* tests/bench/bench_unpickle.c - times the unpickler on a .metadata (make_metadata.py). */
#include "index/formats/pickle/pickle.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/resource.h>
#include <time.h>

#include "base/err.h"
#include "remote/source.h"

struct counts {
    uint64_t sizes, chunks, keys, infos;
};

static int fold_size(void *user, const struct pv *object, uint64_t *record,
                     struct err *e)
{
    struct counts *c = user;
    struct pv args = pv_args(object);

    if (pv_count(&args) != 1)
        return err_set(e, EBADMSG, "torch.Size of %zu arguments", pv_count(&args));
    *record = c->sizes++;
    return 1;
}

/* Counts an object whose state is a dict with these members. */
static int count(const struct pv *object, const char *a, const char *b,
                 uint64_t *counter, uint64_t *record, struct err *e)
{
    struct pv state = pv_state(object), value;

    if (!pv_dict_get(&state, a, &value) || !pv_dict_get(&state, b, &value))
        return err_set(e, EBADMSG, "no %s or no %s", a, b);
    *record = (*counter)++;
    return 1;
}

static int fold_chunk(void *user, const struct pv *object, uint64_t *record,
                      struct err *e)
{
    struct counts *c = user;

    return count(object, "offsets", "sizes", &c->chunks, record, e);
}

static int fold_key(void *user, const struct pv *object, uint64_t *record,
                    struct err *e)
{
    struct counts *c = user;

    return count(object, "fqn", "index", &c->keys, record, e);
}

static int fold_info(void *user, const struct pv *object, uint64_t *record,
                     struct err *e)
{
    struct counts *c = user;

    return count(object, "relative_path", "length", &c->infos, record, e);
}

#define META "torch.distributed.checkpoint.metadata"

static const struct pickle_fold folds[] = {
    {"torch", "Size", true, fold_size},
    {META, "ChunkStorageMetadata", false, fold_chunk},
    {META, "MetadataIndex", false, fold_key},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo", false, fold_info},
};

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int run(const char *path, struct err *e)
{
    CLEANUP(source_putp) struct source *s = NULL;
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    struct counts c = {0};
    struct pickle_options o = {
        .fold = folds,
        .nfold = ARRAY_SIZE(folds),
        .user = &c,
        .limits = {.opcodes = 500000000},
    };
    struct rusage usage;
    double start = now(), seconds;
    uint64_t used;

    if (source_from_fd(open(path, O_RDONLY | O_CLOEXEC), path, &s, e) < 0 ||
        pickle_load(s, 0, s->size, &o, &p, &used, e) < 0)
        return -e->code;
    seconds = now() - start;
    getrusage(RUSAGE_SELF, &usage);
    printf("unshardfs: %" PRIu64
           " chunks in %.2f s, %.0f chunks/s, %.0f MB/s, peak %ld MiB "
           "(%" PRIu64 " shapes, %" PRIu64 " keys, %" PRIu64 " places)\n",
           c.chunks, seconds, (double)c.chunks / seconds, (double)used / seconds / 1e6,
           usage.ru_maxrss / 1024, c.sizes, c.keys, c.infos);
    return 0;
}

int main(int argc, char **argv)
{
    struct err e = {0};
    char line[2048];

    if (argc != 2) {
        fprintf(stderr, "usage: bench_unpickle METADATA\n");
        return 2;
    }
    if (run(argv[1], &e) < 0) {
        fprintf(stderr, "bench_unpickle: %s\n", err_line(&e, line, sizeof line));
        return 1;
    }
    return 0;
}
