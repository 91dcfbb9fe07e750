/* SPDX-License-Identifier: MIT */
/* lib/client.c - open, look, measure and load: what a program calls. */
#include "lib/client.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "gpu/device.h"
#include "gpu/gather.h"

int client_fail(const struct err *e, char *error)
{
    if (error)
        err_line(e, error, UNSHARD_ERROR);
    return e->code ? -e->code : -EIO;
}

const char *unshard_version(void)
{
    return UFS_VERSION;
}

/* ---- open and close ---- */

/* The fields that a caller of an older header does not have are 0. */
static int take_options(const struct unshard_options *from, struct origin_options *to,
                        struct err *e)
{
    struct unshard_options o = {0};

    if (from)
        memcpy(&o, from, MIN(from->size, sizeof o));
    *to = (struct origin_options){
        .cache_dir = o.cache_dir,
        .index_memory = o.index_memory,
        .follow_symlinks = o.follow_symlinks,
        .no_cache = o.no_cache,
        .cache_size = o.cache_size,
        .jobs = o.jobs,
        .mapping = {.map = o.map, .hf = o.hf, .module_weights = o.module_weights}};
    if (o.dtype && !mapping_dtype(o.dtype, &to->mapping.dtype))
        return err_set(e, EINVAL, "%s is no type to cast to", o.dtype);
    return 0;
}

int unshard_open(const char *source, const struct unshard_options *options,
                 struct unshard **out, char *error)
{
    struct origin_options o;
    struct unshard *u = NULL;
    struct err e = {0};
    int ret = take_options(options, &o, &e);

    *out = NULL;
    if (ret == 0 && !(u = calloc(1, sizeof *u)))
        ret = err_nomem(&e);
    if (ret == 0)
        ret = origin_open(source, &o, &u->origin, &e);
    if (ret < 0) {
        free(u);
        return client_fail(&e, error);
    }
    pthread_mutex_init(&u->lock, NULL);
    *out = u;
    return 0;
}

void unshard_close(struct unshard *u)
{
    if (!u)
        return;
    for (size_t i = 0; i < CLIENT_DEVICES; i++)
        device_close(u->device[i]);
    origin_close(u->origin);
    pthread_mutex_destroy(&u->lock);
    free(u);
}

/* ---- what there is ---- */

size_t unshard_count(const struct unshard *u)
{
    return u->origin->rows;
}

int unshard_tensor(const struct unshard *u, size_t number, struct unshard_tensor *out)
{
    const struct row *r;

    if (number >= u->origin->rows)
        return -ENOENT;
    r = &u->origin->row[number];
    *out = (struct unshard_tensor){.key = r->key,
                                   .key_len = r->key_len,
                                   .dtype = dtype_name(r->dtype),
                                   .role = r->role,
                                   .fault = r->fault,
                                   .nd = r->shape.nd,
                                   .shape = r->shape.dim,
                                   .bytes = r->bytes};
    return 0;
}

static int compare_key(const struct row *r, const char *key, size_t len)
{
    int order = memcmp(r->key, key, MIN(r->key_len, len));

    return order ? order : (r->key_len > len) - (r->key_len < len);
}

int unshard_find(const struct unshard *u, const char *key, size_t key_len,
                 size_t *number)
{
    size_t lo = 0, hi = u->origin->rows;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (compare_key(&u->origin->row[mid], key, key_len) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    *number = lo;
    return lo < u->origin->rows && !compare_key(&u->origin->row[lo], key, key_len)
               ? 0
               : -ENOENT;
}

/* ---- a part that is wanted ---- */

/* A part as this version knows it, in the words of gathers. */
struct wanted {
    const struct row *row;
    struct unshard_part part;
    enum dtype dtype;   /* of the result */
    struct shape shape; /* of the result, elements */
    uint64_t bytes;
    bool boxed;
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS]; /* units */
    struct gather_scale scale;
};

/* The box in storage units: types that pack elements have fewer along one dimension. */
static int take_box(struct wanted *w, struct err *e)
{
    const struct row *r = w->row;
    struct shape units;

    TRY(shape_units(&r->shape, r->dtype, &units, e));
    for (uint32_t k = 0; k < r->shape.nd; k++) {
        uint64_t first = w->part.start[k], count = w->part.count[k];
        bool packed = units.nd != r->shape.nd || units.dim[k] != r->shape.dim[k];

        if (range_outside(first, count, r->shape.dim[k]))
            return err_set(e, EINVAL,
                           "%s: dimension %u has %" PRIu64 " elements, %" PRIu64
                           " from %" PRIu64 " on are asked for",
                           r->key, k, r->shape.dim[k], count, first);
        if (packed && count != r->shape.dim[k])
            return err_set(e, EINVAL,
                           "%s: several elements of %s share a byte, dimension %u "
                           "cannot be cut",
                           r->key, dtype_name(r->dtype), k);
        w->start[k] = first;
        w->size[k] = packed && units.nd == r->shape.nd ? units.dim[k] : count;
        w->shape.dim[k] = count;
    }
    w->boxed = units.nd == r->shape.nd; /* else it is whole, and flat */
    return 0;
}

static int take_part(const struct unshard *u, const struct unshard_part *part,
                     struct wanted *w, struct err *e)
{
    int ret = 0;

    *w = (struct wanted){0};
    memcpy(&w->part, part, MIN(part->size, sizeof w->part));
    if (w->part.tensor >= u->origin->rows)
        return err_set(e, ENOENT, "there is no tensor %zu", w->part.tensor);
    w->row = &u->origin->row[w->part.tensor];
    if (w->row->fault)
        return err_set(e, EBADMSG, "%s: %s", w->row->key, w->row->fault);
    w->shape = w->row->shape;
    w->dtype = w->part.dtype ? dtype_from_name(w->part.dtype) : w->row->dtype;
    if (w->dtype == DTYPE_NONE)
        return err_set(e, EINVAL, "%s is no element type", w->part.dtype);
    if (!w->part.start != !w->part.count)
        return err_set(e, EINVAL, "%s: a box has start and count", w->row->key);
    if (w->part.scale && !w->part.scale_block && w->shape.nd)
        return err_set(e, EINVAL, "%s: factors need the lengths of their blocks",
                       w->row->key);
    if (w->part.start)
        ret = take_box(w, e);
    w->scale = (struct gather_scale){
        .value = w->part.scale, .count = w->part.scales, .block = w->part.scale_block};
    return ret < 0 ? ret : shape_bytes(&w->shape, w->dtype, &w->bytes, e);
}

int unshard_measure(const struct unshard *u, const struct unshard_part *part,
                    struct unshard_result *out, char *error)
{
    struct wanted w;
    struct err e = {0};

    if (take_part(u, part, &w, &e) < 0)
        return client_fail(&e, error);
    *out = (struct unshard_result){
        .dtype = dtype_name(w.dtype), .nd = w.shape.nd, .bytes = w.bytes};
    memcpy(out->shape, w.shape.dim, w.shape.nd * sizeof *w.shape.dim);
    return 0;
}

/* ---- loading ---- */

/* What is to be done, and the gathers that it needs. */
struct work {
    struct gather_job *job;
    struct gather **gather; /* one a job; owned */
    size_t n;
};

static void work_release(struct work *w)
{
    for (size_t i = 0; i < w->n; i++)
        gather_free(w->gather[i]);
    free(w->job);
    free(w->gather);
}

static int add_job(struct unshard *u, const struct unshard_part *part, struct work *to,
                   struct err *e)
{
    struct gather_part box;
    struct wanted w;
    int ret = take_part(u, part, &w, e);

    if (ret < 0)
        return ret;
    if (w.part.bytes != w.bytes)
        return err_set(e, EINVAL,
                       "%s: memory of %" PRIu64 " bytes, the result has %" PRIu64,
                       w.row->key, w.part.bytes, w.bytes);
    box = (struct gather_part){.start = w.boxed ? w.start : NULL,
                               .size = w.boxed ? w.size : NULL,
                               .dtype = w.part.dtype ? w.dtype : DTYPE_NONE,
                               .scale = w.part.scale ? &w.scale : NULL};
    TRY(u->origin->ops->gather(u->origin, w.row, &box, &to->gather[to->n], e));
    to->job[to->n] = (struct gather_job){to->gather[to->n], w.part.address};
    to->n++;
    if (gather_size(to->gather[to->n - 1]) == w.bytes)
        return 0;
    return err_set(e, EPROTO, "%s: its plan is one of %" PRIu64 " bytes", w.row->key,
                   gather_size(to->gather[to->n - 1]));
}

static void give_stats(const struct device_stats *from, struct unshard_stats *to)
{
    struct unshard_stats s = {.read_bytes = from->read_bytes,
                              .sent_bytes = from->sent_bytes,
                              .batches = from->batches,
                              .direct = from->direct,
                              .launches = from->launches};

    if (!to)
        return;
    s.size = MIN(to->size, sizeof s);
    memcpy(to, &s, s.size);
}

int client_device(struct unshard *u, int ordinal, struct device **out, struct err *e)
{
    const struct device_options o = {.ordinal = ordinal};
    int ret = 0;

    if (ordinal < 0 || ordinal >= CLIENT_DEVICES)
        return err_set(e, ENODEV, "there is no device %d", ordinal);
    pthread_mutex_lock(&u->lock);
    if (!u->device[ordinal])
        ret = device_open(&o, &u->device[ordinal], e);
    *out = u->device[ordinal];
    pthread_mutex_unlock(&u->lock);
    return ret;
}

static int run(struct unshard *u, const struct work *w, int ordinal,
               const struct gather_watch *watch, struct device_stats *stats,
               struct err *e)
{
    struct device *device;
    int ret;

    if (ordinal == UNSHARD_HOST)
        return gather_run_host(w->job, w->n, u->origin->pool, watch, e);
    ret = client_device(u, ordinal, &device, e);
    return ret < 0 ? ret : device_load(device, w->job, w->n, watch, stats, e);
}

int unshard_load(struct unshard *u, const struct unshard_part *part, size_t n,
                 int device, unshard_watch *watch, void *user,
                 struct unshard_stats *stats, char *error)
{
    CLEANUP(work_release)
    struct work w = {.job = calloc(n + 1, sizeof *w.job),
                     .gather = calloc(n + 1, sizeof *w.gather)};
    const struct gather_watch told = {.fn = watch, .user = user};
    struct device_stats did = {0};
    struct err e = {0};
    int ret = w.job && w.gather ? 0 : err_nomem(&e);

    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = add_job(u, &part[i], &w, &e);
    if (ret == 0)
        ret = run(u, &w, device, watch ? &told : NULL, &did, &e);
    if (ret < 0)
        return client_fail(&e, error);
    give_stats(&did, stats);
    return 0;
}

/* ---- memory of a device ---- */

int unshard_device_alloc(struct unshard *u, int device, uint64_t bytes,
                         uint64_t *address, char *error)
{
    struct device *d;
    struct err e = {0};
    int ret = client_device(u, device, &d, &e);

    if (ret == 0)
        ret = device_alloc(d, MAX(bytes, (uint64_t)1), address, &e);
    return ret < 0 ? client_fail(&e, error) : 0;
}

int unshard_device_free(struct unshard *u, int device, uint64_t address, char *error)
{
    struct device *d;
    struct err e = {0};
    int ret = client_device(u, device, &d, &e);

    if (ret == 0)
        ret = device_free(d, address, &e);
    return ret < 0 ? client_fail(&e, error) : 0;
}

int unshard_device_read(struct unshard *u, int device, void *to, uint64_t from,
                        uint64_t bytes, char *error)
{
    struct device *d;
    struct err e = {0};
    int ret = client_device(u, device, &d, &e);

    if (ret == 0)
        ret = device_copy_out(d, to, from, (size_t)bytes, &e);
    return ret < 0 ? client_fail(&e, error) : 0;
}
