/* SPDX-License-Identifier: MIT */
/* save/intake_finish.c - the layout of the whole checkpoint, and the staged files that fit it. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "save/intake_priv.h"
#include "save/merge.h"
#include "save/write.h"

enum { OUTPUT_MEMORY = 2047 << 20 };

static const char data_dir[] = "data";

struct finish {
    struct intake *k;
    struct merge *merge;
    struct layout *layout;
    int dir; /* data/ of the staging directory */
    bool *filled;
    struct kept { /* of each file of the layout that is filled: */
        struct intake_file *f;
        uint32_t staged;
    } * kept;
};

/* ---- which staged files fit ---- */

/* The tensor of an incoming file that this box is of; NULL: it is of none of ours. */
static const struct taken *owner_of(const struct finish *x,
                                    const struct layout_piece *piece,
                                    struct intake_file **f)
{
    const struct merge_spec *spec = merge_spec_of(x->merge);
    uint64_t at;
    size_t file;

    if (!merge_origin(x->merge, piece->tensor, &file, &at))
        return NULL;
    *f = spec->file[file].intake;
    if (!*f || (*f)->intake != x->k || !(*f)->known || at < (*f)->data)
        return NULL;
    return placement_find(&(*f)->p, at - (*f)->data);
}

/* Is the tensor of the layout the one that arrived, axis by axis? */
static bool is_alike(const struct taken *t, const struct shape *units, unsigned unit)
{
    uint32_t nd = MAX(units->nd, 1u);

    for (uint32_t k = 0; k < nd && t->nd == nd; k++)
        if (t->dim[k] != (units->nd ? units->dim[k] : 1) * (k == nd - 1 ? unit : 1))
            return false;
    return t->nd == nd;
}

/* The place of the box, if it is at the same byte of a staged file. */
static const struct place *find_place(const struct finish *x,
                                      const struct layout_piece *piece,
                                      struct intake_file **f)
{
    const struct layout_tensor *t = &merge_input(x->merge)->tensor[piece->tensor];
    const struct taken *own = owner_of(x, piece, f);
    unsigned unit = dtype_unit(t->dtype);
    struct err ignored = {0};
    struct shape units;

    if (!own || shape_units(&t->shape, t->dtype, &units, &ignored) < 0 ||
        !is_alike(own, &units, unit))
        return NULL;
    return placement_box(own, piece, unit);
}

/* All that a staged file has is where this file has it. Boxes of others are yet to come. */
static bool fits(const struct finish *x, const struct layout_file_info *l,
                 struct kept *out)
{
    size_t boxes = 0;

    *out = (struct kept){0};
    for (size_t i = 0; i < l->pieces; i++) {
        const struct place *p;
        struct intake_file *f;

        if (l->piece[i].kind != LAYOUT_BOX || !(p = find_place(x, &l->piece[i], &f)))
            continue;
        if (!out->f)
            *out = (struct kept){.f = f, .staged = p->staged};
        boxes += out->f == f && out->staged == p->staged;
    }
    return boxes > 0 && out->f->p.staged[out->staged].boxes == boxes;
}

static bool has_box(void *user, uint32_t file, const struct layout_piece *box)
{
    const struct finish *x = user;
    const struct kept *kept = &x->kept[file];
    struct intake_file *f;
    const struct place *p = find_place(x, box, &f);

    return p && kept->f == f && kept->staged == p->staged;
}

/* ---- putting them into data/ ---- */

/*
 * A second name, so that what was received stays where it is if anything fails. File systems
 * without hard links get a copy, as of all files that do not fit.
 */
static bool link_staged(const struct finish *x, const struct staged *s,
                        const char *path)
{
    struct err ignored = {0};

    return intake_make_parents(x->dir, path, &ignored) == 0 &&
           linkat(x->k->spec.dir, s->path, x->dir, path, 0) == 0;
}

static int keep_file(struct finish *x, size_t i, struct err *e)
{
    struct layout_file_info f;
    struct kept *kept = &x->kept[i];

    layout_file_info(x->layout, i, &f);
    if (unlinkat(x->dir, f.path, 0) < 0 && errno != ENOENT && errno != ENOTDIR)
        return err_set(e, errno, "%s: %s", f.path, strerror(errno));
    if (f.codec != LAYOUT_PLAIN || !fits(x, &f, kept))
        return 0;
    x->filled[i] = link_staged(x, &kept->f->p.staged[kept->staged], f.path);
    return 0;
}

static int keep_files(struct finish *x, struct err *e)
{
    size_t n = layout_files(x->layout);
    int ret = 0;

    x->filled = calloc(n + 1, sizeof *x->filled);
    x->kept = calloc(n + 1, sizeof *x->kept);
    if (!x->filled || !x->kept)
        return err_nomem(e);
    for (size_t i = 0; i < x->k->files; i++)
        sums_settle(&x->k->file[i]->sums);
    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = keep_file(x, i, e);
    return ret;
}

/* ---- the run ---- */

static bool find_sum(void *user, uint32_t file, const struct layout_file_info *f,
                     uint64_t from, uint64_t len, uint32_t *crc)
{
    const struct finish *x = user;
    const struct kept *kept = &x->kept[file];

    return !atomic_load(&kept->f->p.staged[kept->staged].unsummed) &&
           sums_find(&kept->f->sums, kept->staged, f, from, len, crc);
}

static int open_data(struct finish *x, struct err *e)
{
    if (mkdirat(x->k->spec.dir, data_dir, 0700) < 0 && errno != EEXIST)
        return err_set(e, errno, "%s: %s", data_dir, strerror(errno));
    x->dir = openat(x->k->spec.dir, data_dir,
                    O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return x->dir < 0 ? err_set(e, errno, "%s: %s", data_dir, strerror(errno)) : 0;
}

static int write_files(struct finish *x, struct err *e)
{
    const struct save_filled filled = {
        .file = x->filled, .has = has_box, .sum = find_sum, .user = x};
    const struct save_run run = {.layout = x->layout,
                                 .input = merge_input(x->merge),
                                 .source = merge_source(x->merge),
                                 .dir = x->dir,
                                 .pool = x->k->spec.pool,
                                 .part = 1,
                                 .parts = 1,
                                 .first_stage = true,
                                 .other_stages = true,
                                 .filled = &filled};

    return save_write(&run, e);
}

static int check_lost(const struct intake *k, struct err *e)
{
    int lost = atomic_load(&k->fds.lost);

    return lost ? err_set(e, lost, "bytes were lost: %s", strerror(lost)) : 0;
}

/* ---- what is to be published ---- */

static int by_stage(const void *a, const void *b)
{
    const struct intake_staged *x = a, *y = b;

    if (x->stage != y->stage)
        return x->stage < y->stage ? -1 : 1;
    return strcmp(x->path, y->path);
}

static int list_output(const struct finish *x, struct intake_output *out, struct err *e)
{
    size_t files = layout_files(x->layout), dirs = layout_directories(x->layout);
    struct arena *a = arena_new(OUTPUT_MEMORY);
    struct layout_file_info f;

    *out = (struct intake_output){.memory = a, .count = files, .directories = dirs};
    out->file = a ? arena_array(a, files + 1, sizeof *out->file) : NULL;
    out->directory = a ? arena_array(a, dirs + 1, sizeof *out->directory) : NULL;
    if (!out->file || !out->directory)
        return err_nomem(e);
    for (size_t i = 0; i < files; i++) {
        layout_file_info(x->layout, i, &f);
        out->file[i] =
            (struct intake_staged){.path = arena_memdup(a, f.path, strlen(f.path)),
                                   .stage = f.stage,
                                   .kept = x->filled[i]};
        if (!out->file[i].path)
            return err_nomem(e);
    }
    for (size_t i = 0; i < dirs; i++) {
        const char *path = layout_directory_at(x->layout, i);

        out->directory[i] = arena_memdup(a, path, strlen(path));
        if (!out->directory[i])
            return err_nomem(e);
    }
    if (files > 1)
        qsort(out->file, files, sizeof *out->file, by_stage);
    return 0;
}

int intake_finish(struct intake *k, struct merge *m, struct intake_output *out,
                  struct err *e)
{
    struct finish x = {.k = k, .merge = m, .dir = -1};
    int ret = check_lost(k, e);

    *out = (struct intake_output){0};
    if (ret == 0)
        ret = intake_lay_out(&k->spec, x.merge, &x.layout, e);
    if (ret == 0)
        ret = open_data(&x, e);
    if (ret == 0)
        ret = keep_files(&x, e);
    if (ret == 0)
        ret = write_files(&x, e);
    if (ret == 0)
        ret = list_output(&x, out, e);
    if (ret < 0)
        intake_output_release(out);
    cleanup_fd(&x.dir);
    layout_free(x.layout);
    free(x.filled);
    free(x.kept);
    return ret;
}

void intake_output_release(struct intake_output *out)
{
    arena_free(out->memory);
    *out = (struct intake_output){0};
}
