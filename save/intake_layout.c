/* SPDX-License-Identifier: MIT */
/* save/intake_layout.c - from the header of an incoming file to the places of its bytes. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <xxhash.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "base/pool.h"
#include "index/formats/format.h"
#include "index/formats/hf/safetensors_header.h"
#include "remote/source.h"
#include "save/box.h"
#include "save/intake_priv.h"
#include "save/merge.h"

enum {
    PLACE_MEMORY = 2047 << 20,
    LOSSES_SHOWN = 5,
};

/* Only while a header is laid out. */
struct laying {
    struct intake_file *f;
    struct placement *p;
    struct merge *merge;
    struct layout *layout;
    struct taken *
        *owner;       /* of each tensor of the merge's input; NULL: not of this file */
    uint32_t *staged; /* of each file of the layout: its number, UINT32_MAX: none */
};

/* ---- what is written ---- */

static int check_losses(const struct layout *l, const struct format_writer *w,
                        struct err *e)
{
    static const char *const name[] = {
        [LOSS_OBJECT] = "object", [LOSS_TENSOR] = "tensor", [LOSS_ROLE] = "role"};
    CLEANUP(buf_release) struct buf list = {.max = 800};
    size_t n = layout_losses(l);
    enum layout_loss kind;

    if (n == 0)
        return 0;
    for (size_t i = 0; i < MIN(n, (size_t)LOSSES_SHOWN); i++) {
        const char *what = layout_loss_at(l, i, &kind);

        buf_addf(&list, "%s%s %.100s", i ? ", " : "", name[kind], what);
    }
    err_set(e, EINVAL, "%s cannot hold %s%s", w->name, list.data ? list.data : "",
            n > LOSSES_SHOWN ? ", ..." : "");
    return err_hint(e, "leave them out: save=%s:drop=optimizer+other+objects", w->name);
}

int intake_lay_out(const struct intake_spec *spec, struct merge *m, struct layout **out,
                   struct err *e)
{
    int ret = merge_settle(m, e);

    if (ret == 0)
        ret = layout_new(out, e);
    if (ret == 0)
        ret = spec->writer->layout(merge_input(m), &spec->options, *out, e);
    if (ret == -ENOTSUP) {
        e->code = EINVAL;
        return -EINVAL;
    }
    return ret == 0 ? check_losses(*out, spec->writer, e) : ret;
}

/* The layout of the checkpoint as it would be if nothing else arrived. */
static int lay_out(struct laying *x, struct err *e)
{
    const struct intake_spec *spec = &x->f->intake->spec;
    const struct merge_file file = {.path = x->f->path, .intake = x->f};
    struct merge_spec ms = {.file = &file,
                            .files = 1,
                            .env = spec->env,
                            .checkpoint = spec->checkpoint,
                            .made_by = spec->made_by,
                            .drop_objects = spec->drop_objects,
                            .partial = true};

    memcpy(ms.drop_roles, spec->drop_roles, sizeof ms.drop_roles);
    memcpy(ms.sets, spec->sets, sizeof ms.sets);
    TRY(merge_new(&ms, &x->merge, e));
    return intake_lay_out(spec, x->merge, &x->layout, e);
}

/* ---- its tensors ---- */

static int take_header(struct laying *x, struct err *e)
{
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    CLEANUP(source_putp) struct source *src = NULL;
    struct placement *p = x->p;
    int ret = intake_source(x->f, &src, e);

    if (ret == 0)
        ret = safetensors_read(src, 0, src->size, &h, e);
    if (ret < 0)
        return ret;
    p->tensor = arena_array(p->arena, h.count + 1, sizeof *p->tensor);
    if (!p->tensor)
        return err_nomem(e);
    for (size_t i = 0; i < h.count; i++)
        if (h.tensor[i].end > h.tensor[i].begin)
            p->tensor[p->tensors++] =
                (struct taken){.begin = h.tensor[i].begin, .end = h.tensor[i].end};
    return 0;
}

static int find_tensor(const void *key, const void *element)
{
    const uint64_t at = *(const uint64_t *)key;
    const struct taken *t = element;

    return (at > t->begin) - (at < t->begin);
}

struct taken *placement_find(const struct placement *p, uint64_t at)
{
    return bsearch(&at, p->tensor, p->tensors, sizeof *p->tensor, find_tensor);
}

/* Counts of bytes along the last axis; what has no axis gets one. */
static const uint64_t *to_bytes(struct arena *a, const uint64_t *n, uint32_t nd,
                                unsigned unit)
{
    uint64_t *out = arena_array(a, nd + 1, sizeof *out);

    if (!out)
        return NULL;
    if (nd)
        memcpy(out, n, nd * sizeof *out);
    out[nd ? nd - 1 : 0] = nd ? out[nd - 1] * unit : unit;
    return out;
}

static int take_shape(struct laying *x, struct taken *t, const struct layout_tensor *of,
                      struct err *e)
{
    struct shape units;

    TRY(shape_units(&of->shape, of->dtype, &units, e));
    t->nd = MAX(units.nd, 1u);
    t->dim = to_bytes(x->p->arena, units.dim, units.nd, dtype_unit(of->dtype));
    return t->dim ? 0 : err_nomem(e);
}

static bool is_empty(const struct shape *s)
{
    for (uint32_t k = 0; k < s->nd; k++)
        if (s->dim[k] == 0)
            return true;
    return false;
}

/*
 * Which tensor of the incoming file each one of the input is, by its place: what has no
 * bytes is at the place of the next one.
 */
static int find_owners(struct laying *x, struct err *e)
{
    const struct layout_input *in = merge_input(x->merge);
    int ret = 0;

    x->owner = calloc(in->tensors + 1, sizeof *x->owner);
    if (!x->owner)
        return err_nomem(e);
    for (size_t i = 0; ret == 0 && i < in->tensors; i++) {
        size_t file;
        uint64_t at;

        if (is_empty(&in->tensor[i].shape) || !merge_origin(x->merge, i, &file, &at))
            continue;
        at -= x->f->data;
        x->owner[i] = placement_find(x->p, at);
        if (x->owner[i])
            ret = take_shape(x, x->owner[i], &in->tensor[i], e);
    }
    return ret;
}

/* ---- its places ---- */

static bool is_own(const struct laying *x, const struct layout_piece *p)
{
    return p->kind == LAYOUT_BOX && x->owner[p->tensor];
}

/* How many boxes of this incoming file it has; those of others are written at the end. */
static size_t own_boxes(const struct laying *x, const struct layout_file_info *f)
{
    size_t n = 0;

    for (size_t i = 0; f->codec == LAYOUT_PLAIN && i < f->pieces; i++)
        n += is_own(x, &f->piece[i]);
    return n;
}

static bool has_sums(const struct layout_file_info *f)
{
    for (size_t i = 0; i < f->pieces; i++)
        if (f->piece[i].kind == LAYOUT_CRC32)
            return true;
    return false;
}

static const char *staged_path(struct laying *x, const char *path, struct err *e)
{
    size_t room = strlen(x->f->dir) + strlen("/data/") + strlen(path) + 1;
    char *out = arena_alloc(x->p->arena, room);

    if (!out)
        err_nomem(e);
    else if (room > PATH_MAX)
        err_set(e, ENAMETOOLONG, "%s: too long a path", path);
    else
        snprintf(out, room, "%s/data/%s", x->f->dir, path);
    return out && room <= PATH_MAX ? out : NULL;
}

static int list_files(struct laying *x, struct err *e)
{
    size_t files = layout_files(x->layout);
    struct placement *p = x->p;
    struct layout_file_info f;

    x->staged = calloc(files + 1, sizeof *x->staged);
    p->staged = arena_array(p->arena, files + 1, sizeof *p->staged);
    if (!x->staged || !p->staged)
        return err_nomem(e);
    for (size_t i = 0; i < files; i++) {
        struct staged *s = &p->staged[p->files];

        layout_file_info(x->layout, i, &f);
        x->staged[i] = UINT32_MAX;
        s->boxes = own_boxes(x, &f);
        if (s->boxes == 0)
            continue;
        s->size = f.size;
        s->summed = has_sums(&f);
        s->path = staged_path(x, f.path, e);
        if (!s->path)
            return -e->code;
        x->staged[i] = (uint32_t)p->files++;
    }
    return 0;
}

static int add_place(struct laying *x, size_t file, const struct layout_piece *piece,
                     struct err *e)
{
    const struct layout_input *in = merge_input(x->merge);
    unsigned unit = dtype_unit(in->tensor[piece->tensor].dtype);
    struct taken *t = x->owner[piece->tensor];
    struct place *p = &t->place[t->places++];

    *p = (struct place){.staged = x->staged[file], .at = piece->at, .len = piece->len};
    p->start = to_bytes(x->p->arena, piece->start, piece->nd, piece->nd ? unit : 0);
    p->size = to_bytes(x->p->arena, piece->size, piece->nd, unit);
    return p->start && p->size ? 0 : err_nomem(e);
}

/* Without `add` it counts them, in taken.places. */
static int each_box(struct laying *x, bool add, struct err *e)
{
    struct layout_file_info f;

    for (size_t i = 0; i < layout_files(x->layout); i++) {
        layout_file_info(x->layout, i, &f);
        for (size_t k = 0; x->staged[i] != UINT32_MAX && k < f.pieces; k++) {
            const struct layout_piece *p = &f.piece[k];

            if (!is_own(x, p))
                continue;
            if (!add)
                x->owner[p->tensor]->places++;
            else if (add_place(x, i, p, e) < 0)
                return -ENOMEM;
        }
    }
    return 0;
}

static int by_first(const void *a, const void *b)
{
    const struct place *x = a, *y = b;

    if (x->first != y->first)
        return x->first < y->first ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* Does its shape have the bytes that it has in the file? */
static bool has_its_shape(const struct taken *t)
{
    uint64_t bytes = 1;

    for (uint32_t k = 0; k < t->nd; k++)
        if (mul_overflows(bytes, t->dim[k], &bytes))
            return false;
    return bytes == t->end - t->begin;
}

/*
 * Boxes of a tensor in the order in which it has them. What they do not cover exactly stays
 * in the plain file.
 */
static void sort_places(struct taken *t)
{
    struct shape shape = {.nd = t->nd};
    uint64_t reach = 0, bytes = 0;

    for (size_t i = 0; i < t->places; i++) {
        struct place *p = &t->place[i];
        const struct box b = {
            .units = &shape, .unit = 1, .start = p->start, .size = p->size};

        memcpy(shape.dim, t->dim, t->nd * sizeof *t->dim);
        box_span(&b, &p->first, &p->end);
        bytes += p->len;
    }
    if (bytes != t->end - t->begin || !has_its_shape(t))
        t->places = 0;
    if (t->places > 1)
        qsort(t->place, t->places, sizeof *t->place, by_first);
    for (size_t i = 0; i < t->places; i++)
        t->place[i].reach = reach = MAX(reach, t->place[i].end);
}

static bool is_box(const struct place *p, const struct layout_piece *piece,
                   unsigned unit)
{
    for (uint32_t k = 0; k < piece->nd; k++) {
        unsigned bytes = k == piece->nd - 1 ? unit : 1;

        if (p->start[k] != piece->start[k] * bytes ||
            p->size[k] != piece->size[k] * bytes)
            return false;
    }
    return p->at == piece->at && p->len == piece->len;
}

/* The first place whose span begins at `first` or behind. */
static size_t place_from(const struct taken *t, uint64_t first)
{
    size_t low = 0, high = t->places;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (t->place[mid].first < first)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

const struct place *placement_box(const struct taken *t,
                                  const struct layout_piece *piece, unsigned unit)
{
    uint64_t first = 0, step = 1;

    for (uint32_t k = piece->nd; k-- > 0; step *= t->dim[k])
        first += piece->start[k] * (k == piece->nd - 1 ? unit : 1) * step;
    for (size_t i = place_from(t, first); i < t->places && t->place[i].first == first;
         i++)
        if (is_box(&t->place[i], piece, unit))
            return &t->place[i];
    return NULL;
}

static int list_places(struct laying *x, struct err *e)
{
    struct placement *p = x->p;
    int ret = each_box(x, false, e);

    for (size_t i = 0; i < p->tensors; i++) {
        struct taken *t = &p->tensor[i];

        t->place = arena_array(p->arena, t->places + 1, sizeof *t->place);
        if (!t->place)
            return err_nomem(e);
        t->places = 0;
    }
    if (ret == 0)
        ret = each_box(x, true, e);
    for (size_t i = 0; ret == 0 && i < p->tensors; i++)
        sort_places(&p->tensor[i]);
    return ret;
}

/* ---- its staged files ---- */

/*
 * The journal of an interrupted save speaks of bytes by their place in the incoming file:
 * they are found again only if the layout is the same.
 */
static int digest(const struct intake_file *f, unsigned char out[16], struct err *e)
{
    const struct placement *p = &f->p;
    XXH3_state_t *x = XXH3_createState();
    XXH128_canonical_t h = {{0}};

    if (!x)
        return err_nomem(e);
    XXH3_128bits_reset(x);
    XXH3_128bits_update(x, &f->total, sizeof f->total);
    for (size_t i = 0; i < p->files; i++)
        XXH3_128bits_update(x, p->staged[i].path, strlen(p->staged[i].path) + 1);
    for (size_t i = 0; i < p->tensors; i++) {
        const struct taken *t = &p->tensor[i];

        XXH3_128bits_update(x, &t->begin, sizeof t->begin);
        for (size_t k = 0; k < t->places; k++) {
            const uint64_t v[] = {t->place[k].staged, t->place[k].at, t->place[k].len};

            XXH3_128bits_update(x, v, sizeof v);
            XXH3_128bits_update(x, t->place[k].start, t->nd * sizeof(uint64_t));
            XXH3_128bits_update(x, t->place[k].size, t->nd * sizeof(uint64_t));
        }
    }
    XXH128_canonicalFromHash(&h, XXH3_128bits_digest(x));
    XXH3_freeState(x);
    memcpy(out, h.digest, 16);
    return 0;
}

/* Room for the whole file, so that no write fails for lack of it. */
static int reserve(int fd, const struct staged *s, struct err *e)
{
    int rc;

    do
        rc = fallocate(fd, 0, 0, (off_t)s->size) < 0 ? errno : 0;
    while (rc == EINTR);
    if (rc == EOPNOTSUPP || rc == ENOSYS)
        rc = ftruncate(fd, (off_t)s->size) < 0 ? errno : 0;
    return rc ? err_set(e, rc, "reserve %" PRIu64 " bytes: %s", s->size, strerror(rc))
              : 0;
}

static int make_file(const struct intake_file *f, const struct staged *s, bool resumed,
                     struct err *e)
{
    int dir = f->intake->spec.dir, flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
    CLEANUP_FD int fd = -1;
    struct stat st;

    if (!resumed)
        TRY(intake_make_parents(dir, s->path, e));
    fd = openat(dir, s->path, flags | (resumed ? 0 : O_CREAT | O_EXCL), 0666);
    if (fd < 0)
        return err_set(e, resumed && errno == ENOENT ? ESTALE : errno, "%s: %s",
                       s->path, strerror(errno));
    if (!resumed)
        return reserve(fd, s, e);
    if (fstat(fd, &st) < 0 || (uint64_t)st.st_size < s->size)
        return err_set(e, ESTALE, "%s: it is too short", s->path);
    return 0;
}

static int make_nth(void *user, size_t i, struct err *e)
{
    struct laying *x = user;

    return make_file(x->f, &x->p->staged[i], false, e);
}

/* Where fallocate is not supported, bytes are counted. */
static int check_room(const struct intake_file *f, struct err *e)
{
    struct statvfs v;
    uint64_t need = 0;

    for (size_t i = 0; i < f->p.files; i++)
        need += f->p.staged[i].size;
    if (fstatvfs(f->intake->spec.dir, &v) < 0 ||
        need / v.f_frsize <= (uint64_t)v.f_bavail)
        return 0;
    err_set(e, ENOSPC, "%" PRIu64 " bytes are needed, %" PRIu64 " are free", need,
            (uint64_t)v.f_bavail * v.f_frsize);
    return err_hint(e, "make room on this disk, and write the file again");
}

static void mark_path(const struct intake_file *f, char dst[PATH_MAX])
{
    snprintf(dst, PATH_MAX, "%s/placed", f->dir);
}

static int resume(struct laying *x, struct err *e)
{
    const struct intake_file *f = x->f;
    unsigned char now[16], then[16];
    char path[PATH_MAX];
    CLEANUP_FD int fd = -1;

    mark_path(f, path);
    if (digest(f, now, e) < 0)
        return -ENOMEM;
    fd = openat(f->intake->spec.dir, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return err_set(e, ESTALE, "%s: its bytes were not placed", f->path);
    if (read_exact(fd, then, sizeof then, 0, e) < 0 ||
        memcmp(now, then, sizeof now) != 0)
        return err_set(e, ESTALE, "%s: its bytes were placed for another layout",
                       f->path);
    for (size_t i = 0; i < x->p->files; i++)
        TRY(make_file(f, &x->p->staged[i], true, e));
    return 0;
}

static int make_files(struct laying *x, struct err *e)
{
    struct intake_file *f = x->f;
    char path[PATH_MAX];
    int ret;

    snprintf(path, sizeof path, "%s/data", f->dir);
    ret = intake_remove_tree(f->intake->spec.dir, path, e);
    if (ret == 0)
        ret = check_room(f, e);
    if (ret == 0)
        ret = pool_each(f->intake->spec.pool, x->p->files, make_nth, x, e);
    if (ret < 0)
        intake_remove_tree(f->intake->spec.dir, path, &(struct err){0});
    return ret;
}

int placement_mark(struct intake_file *f, struct err *e)
{
    unsigned char now[16];
    char path[PATH_MAX];
    CLEANUP_FD int fd = -1;

    mark_path(f, path);
    if (digest(f, now, e) < 0)
        return -ENOMEM;
    fd = openat(f->intake->spec.dir, path,
                O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0)
        return err_set(e, errno, "%s: %s", path, strerror(errno));
    return write_all(fd, now, sizeof now, e);
}

/* ---- all of it ---- */

/*
 * A checkpoint that is there may have what no writer can make again, and still take other
 * bytes for its tensors. Of one file of a set that is not known yet.
 */
static bool may_patch(const struct laying *x)
{
    CLEANUP_FREE struct patch_change *change = NULL;
    struct err ignored = {0};
    unsigned number;
    size_t n;

    if (!x->f->intake->spec.checkpoint || !x->merge)
        return false;
    return incoming_set(x->f->path, &number, &n) > 0 ||
           (merge_patch(x->merge, &change, &n, &ignored) == 0 && change);
}

static int place_all(struct laying *x, struct err *e)
{
    int ret = take_header(x, e);

    if (ret < 0 || !x->f->intake->spec.writer)
        return ret;
    ret = lay_out(x, e);
    if (ret == -EINVAL && may_patch(x)) {
        *e = (struct err){0};
        return 0;
    }
    if (ret == 0)
        ret = find_owners(x, e);
    if (ret == 0)
        ret = list_files(x, e);
    return ret == 0 ? list_places(x, e) : ret;
}

int placement_new(struct intake_file *f, bool resumed, struct err *e)
{
    struct laying x = {.f = f, .p = &f->p};
    int ret;

    f->p = (struct placement){.arena = arena_new(PLACE_MEMORY)};
    ret = f->p.arena ? place_all(&x, e) : err_nomem(e);
    if (ret == 0)
        ret = resumed ? resume(&x, e) : make_files(&x, e);
    layout_free(x.layout);
    merge_free(x.merge);
    free(x.owner);
    free(x.staged);
    if (ret < 0)
        placement_release(f);
    return ret;
}

void placement_release(struct intake_file *f)
{
    for (size_t i = 0; i < f->p.files; i++)
        fds_drop(&f->intake->fds, &f->p.staged[i]);
    arena_free(f->p.arena);
    f->p = (struct placement){0};
    sums_release(&f->sums);
    sums_init(&f->sums);
    f->sums.joins = true;
}
