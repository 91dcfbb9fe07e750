/* SPDX-License-Identifier: MIT */
/* index/layout.c - collects the files of a checkpoint that is to be written. */
#include "index/layout.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/keyset.h"
#include "index/key_text.h"
#include "remote/store.h"

enum {
    LAYOUT_MEMORY = 2047 << 20,
    ZARR_LIKE_FILES = 50000000, /* a file a chunk: more than anyone can keep */
};

struct layout_file {
    struct layout *layout;
    const char *path;
    unsigned stage;
    uint64_t size;
    enum layout_codec codec;
    unsigned type_size;
    struct layout_piece *piece;
    size_t pieces, cap;
};

struct loss {
    enum layout_loss kind;
    const char *what;
};

struct layout {
    struct arena *arena;
    struct keyset paths;
    struct layout_file **file;
    size_t files, files_cap;
    const char **directory;
    size_t directories, directories_cap;
    struct loss *loss;
    size_t losses, losses_cap;
};

int layout_new(struct layout **out, struct err *e)
{
    struct layout *l = calloc(1, sizeof *l);

    if (l)
        l->arena = arena_new(LAYOUT_MEMORY);
    if (!l || !l->arena) {
        free(l);
        return err_nomem(e);
    }
    *out = l;
    return 0;
}

void layout_free(struct layout *l)
{
    if (!l)
        return;
    keyset_release(&l->paths);
    arena_free(l->arena);
    free(l->file);
    free(l->directory);
    free(l->loss);
    free(l);
}

void layout_freep(struct layout **l)
{
    layout_free(*l);
}

struct arena *layout_arena(struct layout *l)
{
    return l->arena;
}

/* Room for one more element of `size` bytes behind `count`. */
static void *room(void *array, size_t count, size_t *cap, size_t size, struct err *e)
{
    void *grown;

    if (count < *cap)
        return array;
    grown = reallocarray(array, *cap ? *cap * 2 : 16, size);
    if (!grown) {
        err_nomem(e);
        return NULL;
    }
    *cap = *cap ? *cap * 2 : 16;
    return grown;
}

/* ---- files ---- */

static int check_path(struct layout *l, const char *path, struct err *e)
{
    size_t len = strlen(path);
    char text[300];
    int rc;

    if (!store_name_is_safe(path, len))
        return err_set(e, EINVAL, "\"%s\" is no name for a file",
                       key_text(text, sizeof text, path, len));
    rc = keyset_add(&l->paths, path, len);
    if (rc < 0)
        return err_nomem(e);
    return rc ? 0 : err_set(e, EEXIST, "%s: two files of one name", path);
}

int layout_file_new(struct layout *l, const char *path, unsigned stage,
                    struct layout_file **out, struct err *e)
{
    struct layout_file *f, **grown;

    TRY(check_path(l, path, e));
    if (l->files == ZARR_LIKE_FILES)
        return err_set(e, E2BIG, "more than %d files", ZARR_LIKE_FILES);
    grown = room(l->file, l->files, &l->files_cap, sizeof *grown, e);
    f = arena_alloc(l->arena, sizeof *f);
    if (grown)
        l->file = grown;
    if (!f || !grown)
        return err_nomem(e);
    f->layout = l;
    f->stage = stage;
    f->path = arena_memdup(l->arena, path, strlen(path));
    if (!f->path)
        return err_nomem(e);
    l->file[l->files++] = f;
    *out = f;
    return 0;
}

uint64_t layout_file_at(const struct layout_file *f)
{
    return f->size;
}

/* Arrays in the arena: what they outgrow stays there. */
static int add_piece(struct layout_file *f, const struct layout_piece *p, struct err *e)
{
    if (f->pieces == f->cap) {
        size_t cap = f->cap ? f->cap * 2 : 4;
        struct layout_piece *grown = arena_array(f->layout->arena, cap, sizeof *grown);

        if (!grown)
            return err_nomem(e);
        if (f->pieces)
            memcpy(grown, f->piece, f->pieces * sizeof *grown);
        f->piece = grown;
        f->cap = cap;
    }
    f->piece[f->pieces] = *p;
    f->piece[f->pieces].at = f->size;
    if (add_overflows(f->size, p->len, &f->size) || f->size > INT64_MAX)
        return err_set(e, EFBIG, "%s: over 2^63 bytes", f->path);
    f->pieces++;
    return 0;
}

int layout_bytes(struct layout_file *f, const void *data, size_t len, struct err *e)
{
    struct layout_piece p = {.kind = LAYOUT_LITERAL, .len = len};

    if (len == 0)
        return 0;
    p.data = arena_memdup(f->layout->arena, data, len);
    return p.data ? add_piece(f, &p, e) : err_nomem(e);
}

int layout_pad(struct layout_file *f, uint64_t to, struct err *e)
{
    const struct layout_piece p = {.kind = LAYOUT_ZERO, .len = to - f->size};

    assert(to >= f->size);
    return p.len ? add_piece(f, &p, e) : 0;
}

/* Does the box lie in the tensor? Its bytes. */
static int check_box(const struct shape *units, unsigned unit, const uint64_t *start,
                     const uint64_t *size, uint64_t *bytes, struct err *e)
{
    *bytes = unit;
    for (uint32_t k = 0; k < units->nd; k++) {
        if (range_outside(start[k], size[k], units->dim[k]))
            return err_set(e, EINVAL,
                           "a box of %" PRIu64 "+%" PRIu64 " along axis %u of %" PRIu64,
                           start[k], size[k], k, units->dim[k]);
        if (mul_overflows(*bytes, size[k], bytes))
            return err_set(e, EOVERFLOW, "a box of more than 2^64 bytes");
    }
    return 0;
}

int layout_box(struct layout_file *f, const struct layout_input *in, size_t tensor,
               const uint64_t *start, const uint64_t *size, struct err *e)
{
    static const uint64_t zeros[SHAPE_MAX_DIMS];
    const struct layout_tensor *t = &in->tensor[tensor];
    struct layout_piece p = {.kind = LAYOUT_BOX, .tensor = (uint32_t)tensor};
    struct shape units;
    uint64_t *box;
    int rc;

    if (tensor >= in->tensors || tensor > UINT32_MAX)
        return err_set(e, EINVAL, "tensor %zu of %zu", tensor, in->tensors);
    rc = shape_units(&t->shape, t->dtype, &units, e);
    if (rc == 0)
        rc = check_box(&units, dtype_unit(t->dtype), start ? start : zeros,
                       size ? size : units.dim, &p.len, e);
    if (rc < 0)
        return rc;
    box = arena_array(f->layout->arena, 2 * (size_t)units.nd + 1, sizeof *box);
    if (!box)
        return err_nomem(e);
    memcpy(box, start ? start : zeros, units.nd * sizeof *box);
    memcpy(box + units.nd, size ? size : units.dim, units.nd * sizeof *box);
    p.nd = units.nd;
    p.start = box;
    p.size = box + units.nd;
    return p.len ? add_piece(f, &p, e) : 0;
}

int layout_crc32(struct layout_file *f, uint64_t from, uint64_t len, struct err *e)
{
    const struct layout_piece p = {
        .kind = LAYOUT_CRC32, .len = 4, .from = from, .sum = len};

    return add_piece(f, &p, e);
}

int layout_encode(struct layout_file *f, enum layout_codec codec, unsigned type_size,
                  struct err *e)
{
    /* Blosc's own limit: a block's length is an int, with some bytes of its own. */
    if (codec != LAYOUT_PLAIN && f->size > INT32_MAX - 64)
        return err_set(e, EFBIG, "%s: %" PRIu64 " bytes are too many for one block",
                       f->path, f->size);
    f->codec = codec;
    f->type_size = type_size;
    return 0;
}

int layout_directory(struct layout *l, const char *path, struct err *e)
{
    const char **grown;

    if (!store_name_is_safe(path, strlen(path)))
        return err_set(e, EINVAL, "\"%.200s\" is no name for a directory", path);
    grown = room(l->directory, l->directories, &l->directories_cap, sizeof *grown, e);
    if (!grown)
        return -ENOMEM;
    l->directory = grown;
    grown[l->directories] = arena_memdup(l->arena, path, strlen(path));
    if (!grown[l->directories])
        return err_nomem(e);
    l->directories++;
    return 0;
}

int layout_loss(struct layout *l, enum layout_loss kind, const char *what, size_t len,
                struct err *e)
{
    struct loss *grown = room(l->loss, l->losses, &l->losses_cap, sizeof *grown, e);

    if (!grown)
        return -ENOMEM;
    l->loss = grown;
    grown[l->losses] =
        (struct loss){.kind = kind, .what = arena_memdup(l->arena, what, len)};
    if (!grown[l->losses].what)
        return err_nomem(e);
    l->losses++;
    return 0;
}

/* ---- for the engine ---- */

size_t layout_files(const struct layout *l)
{
    return l->files;
}

void layout_file_info(const struct layout *l, size_t i, struct layout_file_info *out)
{
    const struct layout_file *f = l->file[i];

    *out = (struct layout_file_info){.path = f->path,
                                     .stage = f->stage,
                                     .size = f->size,
                                     .codec = f->codec,
                                     .type_size = f->type_size,
                                     .piece = f->piece,
                                     .pieces = f->pieces};
}

size_t layout_directories(const struct layout *l)
{
    return l->directories;
}

const char *layout_directory_at(const struct layout *l, size_t i)
{
    return l->directory[i];
}

size_t layout_losses(const struct layout *l)
{
    return l->losses;
}

const char *layout_loss_at(const struct layout *l, size_t i, enum layout_loss *kind)
{
    *kind = l->loss[i].kind;
    return l->loss[i].what;
}

static void hash_piece(XXH3_state_t *x, const struct layout_piece *p)
{
    const uint64_t v[] = {p->kind, p->at, p->len, p->tensor, p->from, p->sum};

    XXH3_128bits_update(x, v, sizeof v);
    if (p->kind == LAYOUT_LITERAL)
        XXH3_128bits_update(x, p->data, (size_t)p->len);
    if (p->kind == LAYOUT_BOX) /* start and size lie behind each other */
        XXH3_128bits_update(x, p->start, 2 * p->nd * sizeof *p->start);
}

int layout_digest(const struct layout *l, uint64_t out[2], struct err *e)
{
    XXH3_state_t *x = XXH3_createState();
    XXH128_hash_t h;

    if (!x)
        return err_nomem(e);
    XXH3_128bits_reset(x);
    for (size_t i = 0; i < l->files; i++) {
        const struct layout_file *f = l->file[i];
        const uint64_t v[] = {f->stage, f->size, f->codec, f->type_size, f->pieces};

        XXH3_128bits_update(x, f->path, strlen(f->path) + 1);
        XXH3_128bits_update(x, v, sizeof v);
        for (size_t k = 0; k < f->pieces; k++)
            hash_piece(x, &f->piece[k]);
    }
    h = XXH3_128bits_digest(x);
    XXH3_freeState(x);
    out[0] = h.high64;
    out[1] = h.low64;
    return 0;
}
