/* SPDX-License-Identifier: MIT */
/* save/input.c - lists what is to be written, and keeps the tensors open that are read. */
#include "save/input.h"

#include <errno.h>
#include <fnmatch.h>
#include <pthread.h>
#include <string.h>
#include <xxhash.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/keyset.h"
#include "base/vec.h"
#include "index/names.h"

enum {
    INPUT_MEMORY = 2047 << 20,
    OPEN_TENSORS = 64, /* more than threads: neighbours in the list are read at once */
};

/* An open tensor, shared by all who read it now. */
struct opened {
    struct reader *reader;
    size_t tensor;
    unsigned users;
    uint64_t used; /* 0: the place is free */
};

struct save_input {
    struct reader_env env;
    int64_t checkpoint;
    struct save_choice choice;
    struct arena *arena;
    struct checkpoint_info info;
    struct layout_input in;
    struct layout_tensor *tensor;
    uint32_t *ord; /* of each tensor in the index */
    size_t cap, objects_cap;
    struct layout_object *object;
    struct err *e; /* of the call that lists */

    pthread_mutex_t lock; /* of what follows */
    struct opened open[OPEN_TENSORS];
    uint64_t clock;
};

/* ---- listing ---- */

static int grow(struct save_input *in, struct err *e)
{
    size_t cap = in->cap ? in->cap * 2 : 256;
    struct layout_tensor *tensor;
    uint32_t *ord;

    if (in->in.tensors < in->cap)
        return 0;
    tensor = reallocarray(in->tensor, cap, sizeof *tensor);
    if (tensor)
        in->tensor = tensor;
    ord = reallocarray(in->ord, cap, sizeof *ord);
    if (ord)
        in->ord = ord;
    if (!tensor || !ord)
        return err_nomem(e);
    in->cap = cap;
    return 0;
}

static bool is_wanted(const struct save_input *in, const struct tensor_info *t)
{
    return !in->choice.drop_roles[t->role] &&
           (!in->choice.only || fnmatch(in->choice.only, t->key, 0) == 0) &&
           (!in->choice.wanted || in->choice.wanted(in->choice.user, t));
}

int save_name_own(struct arena *a, struct layout_tensor *t)
{
    CLEANUP(buf_release) struct buf own = {0};

    if (name_without_modules(t->key + t->wrapper, t->key_len - t->wrapper, &own) < 0)
        return -ENOMEM;
    t->own = arena_memdup(a, own.data, own.len);
    t->own_len = own.len;
    return t->own ? 0 : -ENOMEM;
}

static int add_tensor(void *user, const struct tensor_info *t)
{
    struct save_input *in = user;
    struct layout_tensor *out;

    if (!is_wanted(in, t))
        return 0;
    if (t->fault && in->choice.leave_faults)
        return 0;
    if (t->fault) {
        err_set(in->e, EBADMSG, "tensor %s: %s", t->key, t->fault);
        return err_hint(in->e, "leave it out with --incomplete, --only or --drop");
    }
    TRY(grow(in, in->e));
    out = &in->tensor[in->in.tensors];
    *out = (struct layout_tensor){.key_len = t->key_len,
                                  .wrapper = t->wrapper,
                                  .role = t->role,
                                  .dtype = t->dtype,
                                  .shape = t->shape};
    out->key = arena_memdup(in->arena, t->key, t->key_len);
    if (t->part)
        out->part = arena_memdup(in->arena, t->part, strlen(t->part));
    if (!out->key || (t->part && !out->part) ||
        (t->modules && save_name_own(in->arena, out) < 0))
        return err_nomem(in->e);
    in->ord[in->in.tensors++] = t->ord;
    return 0;
}

static int add_object(void *user, const char *key, size_t key_len, const char *json,
                      size_t len)
{
    struct save_input *in = user;
    struct layout_object *o;

    if (!VEC_ROOM(in->object, in->in.objects, in->objects_cap))
        return err_nomem(in->e);
    o = &in->object[in->in.objects];
    *o = (struct layout_object){.key = arena_memdup(in->arena, key, key_len),
                                .key_len = key_len,
                                .json = arena_memdup(in->arena, json, len),
                                .json_len = len};
    if (!o->key || !o->json)
        return err_nomem(in->e);
    in->in.objects++;
    return 0;
}

/* Tensors of the index are in order of their file names; writers want that of keys. */
static int by_key(const void *a, const void *b, void *user)
{
    const struct layout_tensor *t = user, *x = &t[*(const size_t *)a],
                               *y = &t[*(const size_t *)b];
    int c = memcmp(x->key, y->key, MIN(x->key_len, y->key_len));

    return c ? c : (x->key_len > y->key_len) - (x->key_len < y->key_len);
}

static int sort_tensors(struct save_input *in, struct err *e)
{
    size_t n = in->in.tensors;
    CLEANUP_FREE size_t *order = calloc(n + 1, sizeof *order);
    struct layout_tensor *tensor = calloc(n + 1, sizeof *tensor);
    uint32_t *ord = calloc(n + 1, sizeof *ord);

    if (!order || !tensor || !ord) {
        free(tensor);
        free(ord);
        return err_nomem(e);
    }
    for (size_t i = 0; i < n; i++)
        order[i] = i;
    qsort_r(order, n, sizeof *order, by_key, in->tensor);
    for (size_t i = 0; i < n; i++) {
        tensor[i] = in->tensor[order[i]];
        ord[i] = in->ord[order[i]];
    }
    free(in->tensor);
    free(in->ord);
    in->tensor = tensor;
    in->ord = ord;
    return 0;
}

/*
 * The wrapper of the model's keys goes as in model.safetensors: where two names would
 * meet, none is dropped.
 */
static int settle_wrappers(struct save_input *in, struct err *e)
{
    CLEANUP(keyset_release) struct keyset seen = {0};
    bool meet = false;

    for (size_t i = 0; i < in->in.tensors; i++) {
        const struct layout_tensor *t = &in->tensor[i];
        const char *name;
        size_t len;
        int rc;

        if (t->role != ROLE_MODEL)
            continue;
        name = layout_own_name(t, &len);
        rc = keyset_add(&seen, name, len);
        if (rc < 0)
            return err_nomem(e);
        meet |= rc == 0;
    }
    for (size_t i = 0; meet && i < in->in.tensors; i++) {
        in->tensor[i].wrapper = 0;
        in->tensor[i].own = NULL;
    }
    return 0;
}

static int list_all(struct save_input *in, struct err *e)
{
    struct catalog *c = in->env.catalog;
    int ret = catalog_checkpoint_by_id(c, in->checkpoint, in->arena, &in->info, e);

    in->e = e;
    if (ret == 0)
        ret = catalog_tensors(c, in->checkpoint, 0, add_tensor, in, e);
    if (ret == 0 && !in->choice.drop_objects)
        ret = catalog_objects(c, in->checkpoint, add_object, in, e);
    if (ret == 0)
        ret = sort_tensors(in, e);
    if (ret == 0)
        ret = settle_wrappers(in, e);
    if (ret == 0 && in->in.tensors == 0 && !in->choice.wanted) {
        err_set(e, ENOENT, "no tensor is left to be written");
        ret = err_hint(e, "see what --only and --drop leave of `unshard ls`");
    }
    in->in.tensor = in->tensor;
    in->in.object = in->object;
    in->in.format = in->info.format;
    in->in.framework = in->info.framework;
    in->in.version = in->info.version;
    in->in.adapter = in->info.adapter;
    in->in.has_step = in->info.has_step;
    in->in.step = in->info.step;
    return ret;
}

int save_input_new(const struct reader_env *env, int64_t checkpoint,
                   const struct save_choice *choice, struct save_input **out,
                   struct err *e)
{
    struct save_input *in = calloc(1, sizeof *in);
    int ret;

    if (!in)
        return err_nomem(e);
    in->env = *env;
    in->checkpoint = checkpoint;
    in->choice = *choice;
    pthread_mutex_init(&in->lock, NULL);
    in->arena = arena_new(INPUT_MEMORY);
    ret = in->arena ? list_all(in, e) : err_nomem(e);
    if (ret < 0) {
        save_input_free(in);
        return ret;
    }
    *out = in;
    return 0;
}

void save_input_free(struct save_input *in)
{
    if (!in)
        return;
    for (size_t i = 0; i < OPEN_TENSORS; i++)
        reader_close(in->open[i].reader);
    free(in->tensor);
    free(in->ord);
    free(in->object);
    arena_free(in->arena);
    pthread_mutex_destroy(&in->lock);
    free(in);
}

const struct layout_input *save_input_of(const struct save_input *in)
{
    return &in->in;
}

uint32_t save_input_ord(const struct save_input *in, size_t i)
{
    return in->ord[i];
}

/* ---- reading ---- */

/* The open tensor with one more user; NULL: it is not open. */
static struct opened *find_open(struct save_input *in, size_t tensor)
{
    for (size_t i = 0; i < OPEN_TENSORS; i++) {
        struct opened *o = &in->open[i];

        if (o->used && o->tensor == tensor) {
            o->users++;
            o->used = ++in->clock;
            return o;
        }
    }
    return NULL;
}

/* Puts a reader where nobody reads; what was there longest is closed. NULL: all busy. */
static struct opened *keep_open(struct save_input *in, size_t tensor, struct reader *r)
{
    struct opened *place = NULL;

    for (size_t i = 0; i < OPEN_TENSORS; i++) {
        struct opened *o = &in->open[i];

        if (o->users == 0 && (!place || o->used < place->used))
            place = o;
    }
    if (!place)
        return NULL;
    reader_close(place->reader);
    *place =
        (struct opened){.reader = r, .tensor = tensor, .users = 1, .used = ++in->clock};
    return place;
}

static int read_alone(struct save_input *in, size_t tensor, uint64_t off, size_t len,
                      void *dst, struct err *e)
{
    CLEANUP(reader_closep) struct reader *r = NULL;
    struct opened *o;
    int ret =
        reader_open_tensor(&in->env, in->checkpoint, in->ord[tensor], false, &r, e);

    if (ret == 0)
        ret = reader_read(r, off, len, dst, e);
    if (ret < 0)
        return ret;
    pthread_mutex_lock(&in->lock);
    o = keep_open(in, tensor, r);
    if (o) {
        o->users--;
        r = NULL;
    }
    pthread_mutex_unlock(&in->lock);
    return 0;
}

static int read_tensor(void *user, size_t tensor, uint64_t off, size_t len, void *dst,
                       struct err *e)
{
    struct save_input *in = user;
    struct opened *o;
    int ret;

    pthread_mutex_lock(&in->lock);
    o = find_open(in, tensor);
    pthread_mutex_unlock(&in->lock);
    if (!o)
        return read_alone(in, tensor, off, len, dst, e);
    ret = reader_read(o->reader, off, len, dst, e);
    pthread_mutex_lock(&in->lock);
    o->users--;
    pthread_mutex_unlock(&in->lock);
    return ret;
}

struct save_source save_input_source(struct save_input *in)
{
    return (struct save_source){.read = read_tensor, .user = in};
}

/* ---- identity ---- */

static int hash_file(void *user, const struct catalog_file *f)
{
    const uint64_t v[] = {f->id.size, (uint64_t)f->id.mtime_ns, f->storage};

    XXH3_128bits_update(user, f->path, strlen(f->path) + 1);
    XXH3_128bits_update(user, v, sizeof v);
    return 0;
}

int save_input_identity(const struct save_input *in, struct buf *out, struct err *e)
{
    XXH3_state_t *x = XXH3_createState();
    XXH128_hash_t h;
    int ret;

    if (!x)
        return err_nomem(e);
    XXH3_128bits_reset(x);
    ret = catalog_files(in->env.catalog, in->checkpoint, hash_file, x, e);
    h = XXH3_128bits_digest(x);
    XXH3_freeState(x);
    if (ret < 0)
        return ret;
    buf_addf(out, "%s %016" PRIx64 "%016" PRIx64, in->info.format, h.high64, h.low64);
    return buf_failed(out) ? err_nomem(e) : 0;
}
