/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_objects.c - non-tensor state of a DCP checkpoint, read in batches. */
#include "index/formats/dcp/dcp_scan.h"

#include <errno.h>
#include <string.h>
#include <zstd.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/keyset.h"
#include "base/pool.h"
#include "index/formats/dcp/torch_dcp.h"
#include "index/formats/torch/torch_zip.h"
#include "index/formats/zstd_fail.h"
#include "index/sink.h"
#include "remote/source.h"

enum {
    BATCH = 256,             /* objects in memory at once */
    WHOLE = 64 << 10,        /* blobs up to here are fetched in one read */
    MAX_DECODED = 256 << 20, /* of a zstd blob */
    MAX_JSON = 64 << 20,     /* of one object */
    MAX_TENSORS = 64 << 20,  /* memory for descriptions of tensors in one object */
    WINDOW_LOG_MAX = 27,     /* 128 MiB; ZStandard() of torch writes at most 23 */
};

/* A tensor inside an object. */
struct inner {
    struct inner *next;
    const char *key;
    size_t key_len;
    enum dtype dtype;
    uint8_t flags;
    uint32_t nd;
    uint64_t data, data_len, first; /* bytes in the file; units */
    uint64_t *dim;                  /* elements, then units: 2 * nd */
    int64_t *step;                  /* units */
};

/* One object that is read. */
struct job {
    struct dcp_scan *s;
    const struct dcp_ref *ref;
    const struct dcp_stored *stored; /* NULL: there is none */
    uint64_t base; /* what to add to offsets in the source for offsets in the file */
    bool decoded;  /* the source has no offsets in the file */
    bool plain;    /* a chunk that is looked into is of plain elements */
    bool rebuilt;  /* or by _rebuild_from_type(function, type, arguments, state) */
    bool opened;
    struct file_id id; /* of the file that was opened */
    struct buf json;
    struct arena *arena;
    struct keyset paths; /* of the tensors */
    struct inner *tensors, **last;
    struct err err;
};

static void job_release(struct job *j)
{
    buf_release(&j->json);
    keyset_release(&j->paths);
    arena_free(j->arena);
}

/* Reading: on the pool's threads, which touch nothing of the scan but to read it. */

/* "FILE:FQN.PATH", as tensors in files that are no part of a role are called. */
static char *inner_key(struct job *j, const char *path, size_t path_len, size_t *len)
{
    size_t file_len, fqn_len;
    const char *file = intern_get(&j->s->names.paths, j->stored->path, &file_len);
    const char *fqn = intern_get(&j->s->names.keys, j->ref->key, &fqn_len);
    struct buf b = {.max = 1 << 20};
    char *key = NULL;

    buf_adds(&b, j->s->prefix);
    buf_add(&b, file, file_len);
    buf_addc(&b, ':');
    buf_add(&b, fqn, fqn_len);
    if (path_len > 0) {
        buf_addc(&b, '.');
        buf_add(&b, path, path_len);
    }
    /* The key goes into JSON as a C string. */
    if (!buf_failed(&b) && !memchr(b.data, '\0', b.len)) {
        key = arena_memdup(j->arena, b.data, b.len);
        *len = b.len;
    }
    buf_release(&b);
    return key;
}

static bool copy_shape(struct arena *a, struct inner *t,
                       const struct torch_tensor *from)
{
    struct shape units;
    struct err e = {0};

    if (shape_units(&from->shape, from->dtype, &units, &e) < 0 ||
        units.nd != from->shape.nd)
        return false;
    t->nd = units.nd;
    t->dim = arena_array(a, 2 * (size_t)t->nd + 1, sizeof *t->dim);
    t->step = arena_array(a, (size_t)t->nd + 1, sizeof *t->step);
    if (!t->dim || !t->step)
        return false;
    memcpy(t->dim, from->shape.dim, t->nd * sizeof *t->dim);
    memcpy(t->dim + t->nd, units.dim, t->nd * sizeof *t->dim);
    memcpy(t->step, from->stride, t->nd * sizeof *t->step);
    return true;
}

/* object_tensor_fn: remembers the tensor and says under which key it will be there. */
static const char *take_tensor(void *user, const char *path, size_t path_len,
                               const struct torch_tensor *tensor)
{
    struct job *j = user;
    struct inner *t;

    if (j->rebuilt && path_len > 2 && memcmp(path, "3.", 2) == 0) {
        path += 2; /* attributes, as in files of torch.save */
        path_len -= 2;
    }
    if (j->decoded || tensor->packed) /* its bytes lie as they are in no file */
        return NULL;
    if (keyset_add(&j->paths, path, path_len) <= 0) /* the key is another tensor's */
        return NULL;
    t = arena_alloc(j->arena, sizeof *t);
    if (!t || !copy_shape(j->arena, t, tensor) ||
        !(t->key = inner_key(j, path, path_len, &t->key_len)))
        return NULL;
    t->dtype = tensor->dtype;
    t->flags = tensor->flags;
    t->data = j->base + tensor->data;
    t->data_len = tensor->data_len;
    t->first = tensor->storage_offset;
    *j->last = t;
    j->last = &t->next;
    return t->key;
}

/* Decodes the zstd frames in `data` into memory, as far as the limit. */
static int decode(const void *data, size_t len, struct buf *out, struct err *e)
{
    ZSTD_DCtx *ctx = ZSTD_createDCtx();
    ZSTD_inBuffer in = {data, len, 0};
    size_t left = 1, step = ZSTD_DStreamOutSize();
    unsigned frames = 0;

    if (!ctx)
        return err_nomem(e);
    ZSTD_DCtx_setParameter(ctx, ZSTD_d_windowLogMax, WINDOW_LOG_MAX);
    while (left > 0) {
        ZSTD_outBuffer piece = {buf_grow(out, step), step, 0};

        if (!piece.dst) {
            err_set(e, -buf_failed(out), "zstd: more than %d bytes come out",
                    MAX_DECODED);
            break;
        }
        left = ZSTD_decompressStream(ctx, &piece, &in);
        out->len -= step - piece.pos;
        if (ZSTD_isError(left)) {
            zstd_fail(left, e);
            break;
        }
        if (left > 0 && in.pos == in.size && piece.pos < piece.size) {
            err_set(e, EBADMSG, "zstd: the frame is cut short");
            break;
        }
        if (left == 0 &&
            zstd_goes_on((const char *)data + in.pos, in.size - in.pos, ++frames))
            left = 1;
    }
    ZSTD_freeDCtx(ctx);
    if (e->code == 0 && in.pos < in.size)
        err_set(e, EBADMSG, "zstd: %zu bytes behind the frame", in.size - in.pos);
    return -e->code;
}

/* A blob that is held in memory from here on. */
static int load_blob(struct job *j, struct source *file, struct source **out,
                     struct err *e)
{
    size_t len = (size_t)j->stored->length;
    CLEANUP_FREE char *blob = malloc(len + 1);
    struct buf plain = {.max = MAX_DECODED};

    if (!blob)
        return err_nomem(e);
    TRY(source_read(file, j->stored->offset, len, blob, e));
    if (!j->stored->zstd)
        return source_from_memory(steal(&blob), len, true, file->name, out, e);
    if (decode(blob, len, &plain, e) < 0) {
        buf_release(&plain);
        return -e->code;
    }
    len = plain.len;
    return source_from_memory(buf_steal(&plain, &len), len, true, file->name, out, e);
}

/* The source that has the archive, and where in it. */
static int open_blob(struct job *j, struct source *file, struct source **out,
                     uint64_t *off, uint64_t *len, struct err *e)
{
    const struct dcp_stored *stored = j->stored;

    if (range_outside(stored->offset, stored->length, file->size))
        return err_set(e, EBADMSG,
                       "%s: the object's bytes %" PRIu64 "+%" PRIu64
                       " are not in the file of %" PRIu64,
                       file->name, stored->offset, stored->length, file->size);
    if (stored->zstd && stored->length > MAX_DECODED)
        return err_set(e, EFBIG, "%s: an object of %" PRIu64 " bytes", file->name,
                       stored->length);
    j->decoded = stored->zstd;
    *off = stored->offset;
    *len = stored->length;
    if (!stored->zstd && stored->length > WHOLE) {
        *out = source_get(file);
        return 0;
    }
    j->base = stored->offset;
    TRY(load_blob(j, file, out, e));
    *off = 0;
    *len = (*out)->size;
    return 0;
}

/* What is damaged is found out when it is read. */
static bool is_plain(struct torch_zip *zip, const struct pv *root)
{
    struct torch_tensor x;
    struct err why = {0};
    int rc = torch_zip_tensor(zip, root, &x, &why);

    return rc > 0 || (rc < 0 && rc != -ENOTSUP);
}

static bool is_rebuilt(const struct pv *root)
{
    struct pv class;

    if (root->kind != PV_OBJECT)
        return false;
    class = pv_class(root);
    return torch_is_from_type(&class);
}

static int convert(struct job *j, struct source *src, uint64_t off, uint64_t len,
                   struct err *e)
{
    CLEANUP(torch_zip_freep) struct torch_zip *zip = NULL;
    struct pv root;

    TRY(torch_zip_open(src, off, len, &zip, e));
    root = torch_zip_root(zip);
    j->plain = j->ref->chunk && is_plain(zip, &root);
    j->rebuilt = j->ref->chunk && is_rebuilt(&root);
    if (!j->ref->chunk && j->s->how->unwrap && root.kind == PV_LIST &&
        pv_count(&root) == 1)
        root = pv_at(&root, 0);
    return object_to_json(zip, &root, 0, take_tensor, j, &j->json, e);
}

/* What is wrong with a blob's entry in storage_data, if anything is. */
static int check_stored(struct job *j, struct err *e)
{
    CLEANUP(buf_release) struct buf why = {0};
    const char *fault;

    if (!j->stored)
        return err_set(e, EBADMSG, "storage_data has no entry for it");
    fault = dcp_stored_fault(j->s, j->stored, &why);
    return fault ? err_set(e, EBADMSG, "%s", fault) : 0;
}

static int read_object(struct job *j, struct err *e)
{
    CLEANUP(source_putp) struct source *file = NULL, *src = NULL;
    uint64_t off = 0, len = 0;

    TRY(check_stored(j, e));
    if (j->s->file[j->stored->path].src)
        file = source_get(j->s->file[j->stored->path].src);
    else
        TRY(dcp_file_open(j->s, j->stored->path, &file, e));
    j->opened = true;
    j->id = file->id;
    j->arena = arena_new(MAX_TENSORS);
    if (!j->arena)
        return err_nomem(e);
    TRY(open_blob(j, file, &src, &off, &len, e));
    return convert(j, src, off, len, e);
}

/* An object that cannot be read is no reason to end the scan; no memory is. */
static int run_job(struct job *j, struct err *e)
{
    j->last = &j->tensors;
    j->json.max = MAX_JSON;
    if (read_object(j, &j->err) < 0 && j->err.code == ENOMEM)
        *e = j->err;
    return -e->code;
}

static int run_plain(void *user, size_t i, struct err *e)
{
    struct job *j = (struct job *)user + i;

    return j->stored && j->stored->zstd ? 0 : run_job(j, e);
}

struct opening {
    const struct dcp_scan *s;
    uint32_t path[BATCH];
    size_t n;
};

/* A file that cannot be opened is tried again by the objects in it, which tell why. */
static int open_one(void *user, size_t i, struct err *e)
{
    const struct opening *o = user;
    struct err ignored = {0};

    (void)e;
    dcp_file_open(o->s, o->path[i], &o->s->file[o->path[i]].src, &ignored);
    return 0;
}

/* Opens each file of the batch once. */
static int open_files(struct dcp_scan *s, const struct job *job, size_t n,
                      struct opening *o, struct err *e)
{
    *o = (struct opening){.s = s};
    for (size_t i = 0; i < n; i++) {
        const struct dcp_stored *stored = job[i].stored;

        if (!stored || stored->bad || s->file[stored->path].wanted)
            continue;
        s->file[stored->path].wanted = true;
        o->path[o->n++] = stored->path;
    }
    return pool_each(s->c->pool, o->n, open_one, o, e);
}

static void close_files(struct dcp_scan *s, const struct opening *o)
{
    for (size_t i = 0; i < o->n; i++) {
        source_putp(&s->file[o->path[i]].src);
        s->file[o->path[i]].wanted = false;
    }
}

/* Decoded blobs are large: one at a time. */
static int read_batch(struct dcp_scan *s, struct job *job, size_t n, struct err *e)
{
    struct opening opening;

    if (open_files(s, job, n, &opening, e) == 0 &&
        pool_each(s->c->pool, n, run_plain, job, e) == 0)
        for (size_t i = 0; i < n && e->code == 0; i++)
            if (job[i].stored && job[i].stored->zstd)
                run_job(&job[i], e);
    close_files(s, &opening);
    return -e->code;
}

/* Reporting: on the scan's own thread. */

static int report_inner(struct dcp_scan *s, const struct inner *t, uint32_t file,
                        struct err *e)
{
    uint64_t start[SHAPE_MAX_DIMS] = {0};
    struct shape shape = {.nd = t->nd};
    struct sink_tensor tensor = {.key = t->key,
                                 .key_len = t->key_len,
                                 .dtype = t->dtype,
                                 .shape = &shape,
                                 .role = ROLE_OTHER};
    struct chunk c = {.file = file,
                      .flags = t->flags,
                      .offset = t->data,
                      .length = t->data_len,
                      .start = start,
                      .size = t->dim + t->nd,
                      .first = t->first,
                      .step = t->step};
    int r;

    memcpy(shape.dim, t->dim, t->nd * sizeof *t->dim);
    r = sink_tensor_begin(s->sink, &tensor, e);
    if (r == -EEXIST) {
        *e = (struct err){0};
        return dcp_warned(
            sink_warning(s->sink, "duplicate-key", "%s: shown only once", t->key), e);
    }
    if (r < 0)
        return r;
    TRY(sink_chunk(s->sink, &c, e));
    return sink_tensor_end(s->sink, e);
}

/* Is the file that is watched, and of which chunks are read, the one that was looked into? */
static int check_same(const struct job *j, uint32_t number, struct err *e)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct file_id now;

    if (!sink_file_id(j->s->sink, number, &now) || file_id_equal(&now, &j->id))
        return 0;
    return err_set(e, ESTALE, "%s was changed during the scan",
                   dcp_path_text(j->s, j->stored->path, &b));
}

static int report_inners(struct dcp_scan *s, const struct job *j, struct err *e)
{
    const struct dcp_file *file;

    if (!j->stored || j->stored->bad)
        return 0;
    TRY(dcp_file_register(s, j->stored->path, &file, e));
    if (j->opened && file->safe)
        TRY(check_same(j, file->number, e));
    for (const struct inner *t = j->tensors; t && file->safe; t = t->next)
        TRY(report_inner(s, t, file->number, e));
    return 0;
}

/* What is shown in place of an object that cannot be read. */
static int write_unreadable(struct job *j, const char *key, size_t len, struct err *e)
{
    buf_release(&j->json);
    j->tensors = NULL; /* of an object that was read only in part */
    buf_adds(&j->json, "{\"$type\":\"opaque\",\"class\":\"unreadable\",\"error\":");
    buf_add_json(&j->json, j->err.text, strlen(j->err.text));
    buf_addc(&j->json, '}');
    if (buf_failed(&j->json))
        return err_nomem(e);
    return dcp_warned(sink_warning(j->s->sink, "object", "%.*s: %s", (int)MIN(len, 256),
                                   key, j->err.text),
                      e);
}

/*
 * The lowest rank's value of a key, to which those of other ranks are compared; what the
 * first chunk of a tensor was found to be.
 */
struct kept {
    bool any;
    uint32_t key;
    struct buf json;
    uint32_t entry; /* + 1 */
    bool shown;     /* as a tensor */
};

static bool is_repeated(const struct kept *k, const struct job *j)
{
    return k->any && k->key == j->ref->key && k->json.len == j->json.len &&
           memcmp(k->json.data, j->json.data, j->json.len) == 0;
}

/* Where a rank's value differs it is shown as "__3.metadata:KEY". */
static int object_key(const struct kept *k, const struct job *j, struct buf *out,
                      struct err *e)
{
    size_t len;
    const char *key = intern_get(&j->s->names.keys, j->ref->key, &len);

    buf_adds(out, j->s->how->object ? j->s->how->object : "");
    if (k->any && k->key == j->ref->key)
        buf_addf(out, "%s:", j->s->part[j->ref->part].name);
    buf_add(out, key, len);
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int keep(struct kept *k, const struct job *j, struct err *e)
{
    if (k->any && k->key == j->ref->key)
        return 0;
    buf_clear(&k->json);
    k->any = true;
    k->key = j->ref->key;
    return buf_add(&k->json, j->json.data, j->json.len) < 0 ? err_nomem(e) : 0;
}

static int report_object(struct job *j, struct kept *k, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};

    TRY(object_key(k, j, &key, e));
    if (j->err.code)
        TRY(write_unreadable(j, key.data, key.len, e));
    if (is_repeated(k, j)) { /* it has no tensors: they are called by their file */
        j->tensors = NULL;
        return report_inners(j->s, j, e);
    }
    if (j->s->how->on_object && !j->err.code)
        j->s->how->on_object(j->s->how->user, key.data, key.len, j->json.data,
                             j->json.len);
    TRY(sink_object(j->s->sink, key.data, key.len, j->json.data, j->json.len, e));
    TRY(report_inners(j->s, j, e));
    return j->s->rank_local ? keep(k, j, e) : 0;
}

/*
 * The first chunk tells what the tensor is. One that cannot be read makes it a tensor all
 * the same, whose fault is told there.
 */
static int report_piece(struct job *j, struct kept *k, struct err *e)
{
    struct dcp_scan *s = j->s;
    bool first = k->entry != j->ref->entry + 1, failed = j->err.code != 0;
    CLEANUP(buf_release) struct buf key = {0};

    if (first)
        k->shown = false;
    k->entry = j->ref->entry + 1;
    if (!k->shown && (failed || (first && j->plain))) {
        k->shown = true;
        return dcp_report_tensor(s, j->ref, 1, e);
    }
    if (failed || (k->shown && j->plain))
        return 0;
    if (first) {
        s->wrapped_key = s->wrapped++ ? s->wrapped_key : j->ref->key;
        TRY(object_key(k, j, &key, e));
        TRY(sink_object(s->sink, key.data, key.len, j->json.data, j->json.len, e));
    }
    return report_inners(s, j, e);
}

static const struct dcp_stored *stored_of(const struct dcp_scan *s,
                                          const struct dcp_ref *ref)
{
    const struct dcp_metadata *m = dcp_part_of(s, ref);

    return dcp_stored_find(m, ref->key,
                           ref->chunk ? m->chunk[ref->chunk - 1].start : DCP_NO_SHAPE);
}

static int run_batch(struct dcp_scan *s, struct job *job, const struct dcp_ref *ref,
                     size_t n, struct kept *k, struct err *e)
{
    for (size_t i = 0; i < n; i++)
        job[i] = (struct job){.s = s, .ref = &ref[i], .stored = stored_of(s, &ref[i])};
    if (read_batch(s, job, n, e) == 0)
        for (size_t i = 0; i < n && e->code == 0; i++)
            (ref[i].chunk ? report_piece : report_object)(&job[i], k, e);
    for (size_t i = 0; i < n; i++)
        job_release(&job[i]);
    return -e->code;
}

/* In the order of the files, so that a disk is read forward. */
static int compare_places(const void *a, const void *b, void *user)
{
    const struct dcp_scan *s = user;
    const struct dcp_ref *x = a, *y = b;
    const struct dcp_stored *p = stored_of(s, x), *q = stored_of(s, y);

    if (!p || !q)
        return p ? 1 : q ? -1 : 0;
    if (p->path != q->path)
        return p->path < q->path ? -1 : 1;
    return p->offset < q->offset ? -1 : p->offset > q->offset;
}

int dcp_report_objects(struct dcp_scan *s, struct err *e)
{
    CLEANUP_FREE struct job *job = calloc(BATCH, sizeof *job);
    struct kept kept = {0};

    if (!job)
        return err_nomem(e);
    if (!s->rank_local && s->nobjects > 0)
        qsort_r(s->object, s->nobjects, sizeof *s->object, compare_places, s);
    for (size_t i = 0; i < s->nobjects && e->code == 0; i += BATCH)
        run_batch(s, job, s->object + i, MIN(s->nobjects - i, (size_t)BATCH), &kept, e);
    for (size_t i = 0; i < s->npieces && e->code == 0; i += BATCH)
        run_batch(s, job, s->piece + i, MIN(s->npieces - i, (size_t)BATCH), &kept, e);
    buf_release(&kept.json);
    return -e->code;
}
