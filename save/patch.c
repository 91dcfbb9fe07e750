/* SPDX-License-Identifier: MIT */
/* save/patch.c - which files hold the tensors that changed, and where. */
#include "save/patch.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/pool.h"
#include "base/vec.h"
#include "remote/open_files.h"
#include "remote/source.h"
#include "save/patch_priv.h"

enum { PATCH_MEMORY = 1 << 30, COMPARE_BLOCK = 512 << 10 };

static int cannot(struct err *e, const struct tensor_info *t, const char *why)
{
    return err_set(e, ENOTSUP, "tensor %s: %s", t->key, why);
}

/* ---- what differs ---- */

/* 1: some byte differs; 0: none does. */
static int differs(const struct patch *p, struct reader *r,
                   const struct patch_change *c, struct err *e)
{
    const struct save_source *s = &p->spec.source;
    CLEANUP_FREE char *block = malloc(2 * (size_t)COMPARE_BLOCK);
    uint64_t size = reader_size(r);

    if (!block)
        return err_nomem(e);
    for (uint64_t at = 0; at < size; at += COMPARE_BLOCK) {
        size_t n = (size_t)MIN(size - at, (uint64_t)COMPARE_BLOCK);

        TRY(reader_read(r, at, n, block, e));
        TRY(s->read(s->user, c->tensor, at, n, block + COMPARE_BLOCK, e));
        if (memcmp(block, block + COMPARE_BLOCK, n) != 0)
            return 1;
    }
    return 0;
}

/* The reader of a tensor as it is; they are many, so that none is kept. */
static int open_old(const struct patch *p, const struct patch_tensor *t,
                    struct reader **out, struct err *e)
{
    return reader_open_tensor(p->spec.env, p->spec.checkpoint, t->change.ord, false,
                              out, e);
}

static int look_at(void *user, size_t i, struct err *e)
{
    struct patch *p = user;
    struct patch_tensor *t = &p->tensor[i];
    CLEANUP(reader_closep) struct reader *r = NULL;
    int rc;

    t->change = p->spec.change[i];
    TRY(open_old(p, t, &r, e));
    rc = differs(p, r, &t->change, e);
    t->differs = rc > 0;
    return MIN(rc, 0);
}

static int keep_changed(struct patch *p, struct err *e)
{
    size_t n = 0;

    p->tensor = calloc(p->spec.changes + 1, sizeof *p->tensor);
    if (!p->tensor)
        return err_nomem(e);
    TRY(pool_each(p->spec.env->pool, p->spec.changes, look_at, p, e));
    for (size_t i = 0; i < p->spec.changes; i++)
        if (p->tensor[i].differs)
            p->tensor[n++] = p->tensor[i];
    p->tensors = n;
    return 0;
}

/* ---- files ---- */

/* The path in the checkpoint; NULL: it lies elsewhere. */
static const char *inside(const struct patch *p, const char *path)
{
    size_t n = strlen(p->dir);

    if (n == 0)
        return path;
    return strncmp(path, p->dir, n) == 0 && path[n] == '/' ? path + n + 1 : NULL;
}

/* By directories only, which the copy will have too. */
static bool is_reached(const struct patch *p, const char *path)
{
    char part[PATH_MAX];
    struct stat st;

    for (const char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        memcpy(part, path, (size_t)(slash - path));
        part[slash - path] = '\0';
        if (fstatat(p->spec.old, part, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
            !S_ISDIR(st.st_mode))
            return false;
    }
    return true;
}

static int file_new(struct patch *p, const struct tensor_info *t, uint32_t number,
                    struct err *e)
{
    struct patch_file *f;
    struct catalog_file info;
    const char *path;

    if (!VEC_ROOM(p->file, p->files, p->files_cap))
        return err_nomem(e);
    TRY(catalog_file(p->spec.env->catalog, p->spec.checkpoint, number, p->arena, &info,
                     e));
    path = inside(p, info.path);
    if (!path)
        return cannot(e, t, "its bytes lie outside of the checkpoint");
    f = &p->file[p->files];
    *f = (struct patch_file){.number = number, .path = path, .id = info.id, .fd = -1};
    if (!is_reached(p, path))
        return cannot(e, t, "its file is reached by a linked directory");
    if (fstatat(p->spec.old, path, &f->st, 0) < 0)
        return err_set(e, errno, "%s: %s", path, strerror(errno));
    TRY(open_files_get(p->spec.env->files, info.path, &info.id, &f->src, e));
    p->files++;
    return 0;
}

/* Few files as a rule: those of the tensors that changed. */
static int file_of(struct patch *p, const struct tensor_info *t, uint32_t number,
                   uint32_t *out, struct err *e)
{
    for (size_t i = p->files; i-- > 0;) {
        if (p->file[i].number == number) {
            *out = (uint32_t)i;
            return 0;
        }
    }
    *out = (uint32_t)p->files;
    return file_new(p, t, number, e);
}

/* ---- chunks ---- */

static uint64_t distance(int64_t step)
{
    return step < 0 ? (uint64_t)-step : (uint64_t)step;
}

/*
 * Has every element bytes of its own? Not so in expanded tensors and windows that slide.
 * Said when each step, from small to large, passes over all that the smaller ones reach.
 */
static bool is_injective(const struct plan_op *op)
{
    uint64_t reach = op->run;
    bool used[SHAPE_MAX_DIMS + 1] = {false};

    for (uint32_t n = 0; n < op->nloops; n++) {
        uint32_t least = op->nloops;
        uint64_t step;

        for (uint32_t i = 0; i < op->nloops; i++)
            if (!used[i] &&
                (least == op->nloops ||
                 distance(op->loop[i].src_step) < distance(op->loop[least].src_step)))
                least = i;
        used[least] = true;
        step = distance(op->loop[least].src_step);
        if (op->loop[least].count > 1 && step < reach)
            return false;
        reach += (op->loop[least].count - 1) * step;
    }
    return true;
}

/* The bytes that an op touches; true: all between the first and the last. */
static bool extent(const struct plan_op *op, uint64_t *from, uint64_t *to)
{
    uint64_t low = op->src, high = op->src + op->run, bytes = op->run;

    for (uint32_t i = 0; i < op->nloops; i++) {
        const struct plan_loop *l = &op->loop[i];
        uint64_t span = (l->count - 1) * distance(l->src_step);

        low -= l->src_step < 0 ? span : 0;
        high += l->src_step < 0 ? 0 : span;
        bytes *= l->count;
    }
    *from = low;
    *to = high;
    return bytes == high - low;
}

/* The bytes of the tensor from the first that an op has to the last. */
static void tensor_extent(struct patch_piece *x)
{
    x->first = x->op.dst;
    x->after = x->op.dst + x->op.run;
    for (uint32_t i = 0; i < x->op.nloops; i++)
        x->after += (x->op.loop[i].count - 1) * x->op.loop[i].dst_step;
}

static int add_range(struct patch *p, const struct patch_range *r, struct err *e)
{
    if (!VEC_ROOM(p->range, p->ranges, p->ranges_cap))
        return err_nomem(e);
    p->range[p->ranges++] = *r;
    return 0;
}

/* A chunk of a tensor that changed: in plain bytes of a file, and where in it. */
static int take_chunk(struct patch *p, struct reader *reader,
                      const struct tensor_info *t, size_t i, struct patch_piece *out,
                      struct err *e)
{
    const struct plan *plan = reader_plan(reader);
    struct chunk_room room = {0};
    const struct chunk *c = plan_chunk(plan, i, &room);
    struct patch_range r = {.ord = t->ord};
    struct chunk_place place = {0};
    const struct patch_file *f;
    const char *path;
    int ret;

    if (c->encoding != CHUNK_PLAIN && c->encoding != CHUNK_TORCH_ZIP &&
        c->encoding != CHUNK_SAFETENSORS)
        return cannot(e, t, "it is stored compressed, several times or not at all");
    TRY(file_of(p, t, c->file, &out->file, e));
    TRY(reader_place(reader, i, &place, &path, e));
    f = &p->file[out->file];
    if (place.decoded || place.src->size != f->id.size ||
        !file_id_equal(&place.src->id, &f->id))
        ret = cannot(e, t, "its bytes lie in an archive");
    else
        ret = plan_lower(plan, c, &place, dtype_component(t->dtype), p->arena, &out->op,
                         e);
    source_put(place.src);
    if (ret == 0 && !is_injective(&out->op))
        ret = cannot(e, t, "several of its elements are stored as one");
    if (ret < 0)
        return ret;
    tensor_extent(out);
    r.file = out->file;
    r.whole = extent(&out->op, &r.from, &r.to);
    if (c->encoding == CHUNK_TORCH_ZIP) {
        r.item = c->offset;
        r.item_len = c->length;
    }
    return add_range(p, &r, e);
}

static int take_tensor(struct patch *p, struct patch_tensor *t, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(PATCH_MEMORY);
    CLEANUP(reader_closep) struct reader *r = NULL;
    struct tensor_info info;

    if (!a)
        return err_nomem(e);
    TRY(catalog_tensor(p->spec.env->catalog, p->spec.checkpoint, t->change.ord, a,
                       &info, e));
    TRY(open_old(p, t, &r, e));
    if (info.stored != info.dtype)
        return cannot(e, &info, "it is shown in another type than it is stored in");
    t->bytes = info.bytes;
    t->pieces = plan_chunks(reader_plan(r));
    t->piece = arena_array(p->arena, t->pieces + 1, sizeof *t->piece);
    if (!t->piece)
        return err_nomem(e);
    for (size_t i = 0; i < t->pieces; i++)
        TRY(take_chunk(p, r, &info, i, &t->piece[i], e));
    return 0;
}

/* ---- whose bytes they are ---- */

static int by_place(const void *a, const void *b)
{
    const struct patch_range *x = a, *y = b;

    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    return x->from < y->from ? -1 : x->from > y->from;
}

static int shared(const struct patch *p, uint32_t file, struct err *e)
{
    return err_set(e, ENOTSUP, "%s: tensors that changed share bytes with others",
                   p->file[file].path);
}

/* Ranges are in order: none begins before another ends. */
static int check_own(const struct patch *p, struct err *e)
{
    for (size_t i = 0; i < p->ranges; i++) {
        struct patch_range *r = &p->range[i];
        uint64_t reach = i == 0 || r->file != r[-1].file ? 0 : r[-1].reach;

        if (r->from < reach)
            return shared(p, r->file, e);
        r->reach = MAX(r->to, reach);
    }
    return 0;
}

/* Does a chunk of another tensor lie in what is written? */
static bool touches(const struct patch *p, const struct chunk *c, uint32_t *file)
{
    size_t f = 0, low = 0, high = p->ranges;
    uint64_t to = c->offset + c->length;

    while (f < p->files && p->file[f].number != c->file)
        f++;
    if (f == p->files || c->length == 0 || c->encoding == CHUNK_FILL)
        return false;
    *file = (uint32_t)f;
    while (low < high) { /* the ranges that begin before the chunk ends */
        size_t mid = low + (high - low) / 2;
        const struct patch_range *r = &p->range[mid];

        if (r->file < f || (r->file == f && r->from < to))
            low = mid + 1;
        else
            high = mid;
    }
    return low > 0 && p->range[low - 1].file == f &&
           p->range[low - 1].reach > c->offset;
}

struct others {
    struct patch *p;
    bool *changed; /* by ord */
    size_t cap;
    struct err *e;
};

static int check_other(void *user, const struct tensor_info *t)
{
    const struct others *o = user;
    const struct patch *p = o->p;
    CLEANUP(arena_freep) struct arena *a = NULL;
    const struct chunk *c;
    uint32_t file;
    size_t n;

    if (t->fault || (t->ord < o->cap && o->changed[t->ord]))
        return 0;
    a = arena_new(PATCH_MEMORY);
    if (!a)
        return err_nomem(o->e);
    TRY(catalog_chunks(p->spec.env->catalog, p->spec.checkpoint, t, a, &c, &n, o->e));
    for (size_t i = 0; i < n; i++)
        if (touches(p, &c[i], &file))
            return shared(p, file, o->e);
    return 0;
}

/* Views of one storage, and tied weights: to change one would change the others. */
static int check_shared(struct patch *p, struct err *e)
{
    struct others o = {.p = p, .e = e};
    CLEANUP_FREE bool *changed = NULL;

    if (p->ranges > 0) /* else there is no array */
        qsort(p->range, p->ranges, sizeof *p->range, by_place);
    for (size_t i = 0; i < p->tensors; i++)
        o.cap = MAX(o.cap, (size_t)p->tensor[i].change.ord + 1);
    changed = o.changed = calloc(o.cap + 1, sizeof *changed);
    if (!changed)
        return err_nomem(e);
    for (size_t i = 0; i < p->tensors; i++)
        changed[p->tensor[i].change.ord] = true;
    TRY(check_own(p, e));
    return p->ranges ? catalog_tensors(p->spec.env->catalog, p->spec.checkpoint, 0,
                                       check_other, &o, e)
                     : 0;
}

/* ---- all of it ---- */

struct copies {
    char *path; /* of a file that holds the tensors once more; NULL: none does */
    bool failed;
};

static int see_copy(void *user, const struct catalog_file *f)
{
    struct copies *c = user;

    if (!f->copy)
        return 0;
    c->path = strdup(f->path);
    c->failed = !c->path;
    return 1;
}

/* A full copy beside the shards would go on saying what was there before. */
static int check_copies(const struct patch *p, struct err *e)
{
    struct copies c = {0};
    int ret = catalog_files(p->spec.env->catalog, p->spec.checkpoint, see_copy, &c, e);

    if (ret > 0)
        ret = c.failed
                  ? err_nomem(e)
                  : err_set(e, ENOTSUP, "%s holds the same tensors once more", c.path);
    free(c.path);
    return ret;
}

static int find_all(struct patch *p, struct err *e)
{
    struct checkpoint_info info;

    TRY(catalog_checkpoint_by_id(p->spec.env->catalog, p->spec.checkpoint, p->arena,
                                 &info, e));
    p->dir = info.path;
    if (info.file)
        return err_set(e, ENOTSUP, "%s: a single file", info.path);
    TRY(keep_changed(p, e));
    if (p->tensors > 0)
        TRY(check_copies(p, e));
    for (size_t i = 0; i < p->tensors; i++)
        TRY(take_tensor(p, &p->tensor[i], e));
    return check_shared(p, e);
}

int patch_new(const struct patch_spec *spec, struct patch **out, struct err *e)
{
    CLEANUP(patch_freep) struct patch *p = calloc(1, sizeof *p);

    if (!p)
        return err_nomem(e);
    p->spec = *spec;
    p->out = -1;
    p->arena = arena_new(PATCH_MEMORY);
    if (!p->arena)
        return err_nomem(e);
    TRY(find_all(p, e));
    *out = steal(&p);
    return 0;
}

void patch_free(struct patch *p)
{
    if (!p)
        return;
    for (size_t i = 0; i < p->files; i++) {
        source_put(p->file[i].src);
        if (p->file[i].fd >= 0)
            close(p->file[i].fd);
    }
    free(p->tensor);
    free(p->file);
    free(p->range);
    arena_free(p->arena);
    free(p);
}

void patch_freep(struct patch **p)
{
    patch_free(*p);
}
