/* SPDX-License-Identifier: MIT */
/* save/merge_take.c - the tensors of files that came, each in the place of what had its key. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "index/formats/hf/safetensors_header.h"
#include "index/names.h"
#include "remote/source.h"
#include "save/intake.h"
#include "save/merge_priv.h"

/*
 * The wrapper that all of the old model's keys have in common: new ones get it too. (What
 * is written over an old tensor keeps its key.) Its length, with *text, or 0.
 */
static size_t common_wrapper(const struct merge *m, const char **text)
{
    size_t len = 0;

    for (size_t i = 0; i < m->there; i++) {
        const struct layout_tensor *t = &m->entry[i].t;

        if (t->role != ROLE_MODEL)
            continue;
        if (t->wrapper == 0 ||
            (len && (t->wrapper != len || memcmp(t->key, *text, len) != 0)))
            return 0;
        len = t->wrapper;
        *text = t->key;
    }
    return len;
}

static enum tag view_tag(enum role role)
{
    return role == ROLE_OPTIMIZER ? TAG_OPTIMIZER : TAG_MODEL;
}

int merge_bad_file(const struct merge_file *f, struct err *e)
{
    if (e->code != ENOMEM && e->code != EIO)
        e->code = EINVAL;
    return err_wrap(e, "%s", f->path);
}

int merge_open(const struct merge *m, size_t file, struct source **out, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    int fd;

    if (f->intake)
        return intake_source(f->intake, out, e);
    fd = openat(m->spec.spool, f->spool, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(e, errno, "%s: %s", f->path, strerror(errno));
    return source_from_fd(fd, f->path, out, e);
}

/* What stood in the checkpoint under its key, by what has it until now. */
static void note_old(struct entry *x, const struct entry *before)
{
    x->over = before->old || before->over;
    x->ord = before->ord;
    x->was = before->old ? before->t.dtype : before->was;
    x->was_shape = before->old ? before->t.shape : before->was_shape;
    x->was_faulty = before->old ? before->faulty : before->was_faulty;
}

/* Has the tensor come with a file that was closed later? */
static bool came_later(const struct merge *m, size_t i, size_t file)
{
    return !m->entry[i].old && m->entry[i].file > file;
}

/* Puts the tensor in the place of what has its key, unless that was closed later. */
static int put(struct merge *m, struct entry *x, struct err *e)
{
    size_t i = merge_find(m, TAG_KEY, x->t.key, x->t.key_len), made;

    m->changes = true;
    if (i == NOT_THERE)
        return merge_entry(m, x, &made, e);
    if (!m->entry[i].old && m->entry[i].file == x->file)
        return err_set(e, EINVAL, "%s: it has tensor %s twice",
                       m->spec.file[x->file].path, m->entry[i].t.key);
    if (came_later(m, i, x->file))
        return 0;
    x->t.key = m->entry[i].t.key;
    x->t.key_len = m->entry[i].t.key_len;
    x->t.wrapper = m->entry[i].t.wrapper;
    x->t.part = m->entry[i].t.part;
    x->t.role = m->entry[i].t.role;
    note_old(x, &m->entry[i]);
    m->entry[i] = *x;
    return 0;
}

static int put_named(struct merge *m, size_t file, const struct safetensors_header *h,
                     const struct safetensors_tensor *t, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    CLEANUP(buf_release) struct buf key = {0};
    struct entry x = {.file = file};
    const char *wrapper = NULL;
    bool whole = incoming_is_whole(f->path, &x.t.role);
    size_t i = merge_find(m, view_tag(x.t.role), t->name, t->name_len);

    if (m->meet || i == NOT_THERE) /* whole keys too are understood (prefix=keep) */
        i = merge_find(m, TAG_KEY, t->name, t->name_len);
    if (i != NOT_THERE) {
        buf_add(&key, m->entry[i].t.key, m->entry[i].t.key_len);
    } else {
        x.t.wrapper = x.t.role == ROLE_MODEL ? common_wrapper(m, &wrapper) : 0;
        if (x.t.wrapper &&
            (t->name_len < x.t.wrapper || memcmp(t->name, wrapper, x.t.wrapper) != 0))
            buf_add(&key, wrapper, x.t.wrapper);
        buf_add(&key, t->name, t->name_len);
        if (!whole && x.t.role == ROLE_MODEL)
            x.t.role = role_of(NULL, t->name, t->name_len);
    }
    if (buf_failed(&key))
        return err_nomem(e);
    x.t.key = key.data ? key.data : "";
    x.t.key_len = key.len;
    x.t.batch = f->intake ? &m->batch[file] : NULL;
    x.t.batch_at = t->begin;
    x.t.dtype = x.data.dtype = t->dtype;
    safetensors_shape(t, &x.t.shape);
    x.data.shape = x.t.shape;
    x.data.at = h->data + t->begin;
    x.data.bytes = t->end - t->begin;
    return put(m, &x, e);
}

/* Its tensors are laid out by themselves; the numbers of model and optimizer files differ. */
static int begin_batch(struct merge *m, size_t file, struct source *src,
                       const struct safetensors_header *h, struct err *e)
{
    const char *path = m->spec.file[file].path;
    struct layout_batch *b = &m->batch[file];
    enum role role = ROLE_MODEL;
    unsigned number = 1;
    size_t stem;
    char *text;

    (void)incoming_is_whole(path, &role);
    if (incoming_set(path, &number, &stem) == 0)
        number = 1;
    *b = (struct layout_batch){.number = 2 * (number - 1) + (role == ROLE_OPTIMIZER),
                               .tensors = h->count};
    if (!safetensors_is_pt(h))
        return 0;
    text = arena_alloc(m->arena, (size_t)h->data);
    if (!text)
        return err_nomem(e);
    b->header = text;
    b->header_len = (size_t)h->data;
    return source_read(src, 0, b->header_len, text, e);
}

int merge_take_safetensors(struct merge *m, size_t file, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    CLEANUP(source_putp) struct source *src = NULL;
    struct safetensors_header h;
    int ret = merge_open(m, file, &src, e);

    if (ret == 0)
        ret = safetensors_read(src, 0, src->size, &h, e);
    if (ret < 0)
        return merge_bad_file(f, e);
    if (f->intake)
        ret = begin_batch(m, file, src, &h, e);
    for (size_t i = 0; ret == 0 && i < h.count; i++)
        ret = put_named(m, file, &h, &h.tensor[i], e);
    safetensors_header_release(&h);
    return ret;
}

/*
 * A tensor of model.safetensors whose whole key is not known yet: it is called so behind
 * `cut`. What has a .npy of its own under that name is another one (DeepSpeed's NAME, of
 * which module.NAME is the 16-bit copy).
 */
static size_t find_behind(const struct merge *m, const char *key, size_t len,
                          size_t cut)
{
    size_t i = cut && !keyset_has(&m->whole, key + cut, len - cut)
                   ? merge_find(m, TAG_MODEL, key + cut, len - cut)
                   : NOT_THERE;

    return i == NOT_THERE || m->entry[i].t.wrapper ? NOT_THERE : i;
}

/*
 * What tensors/K.npy of the model may be: its key without its wrapper is in
 * model.safetensors. Wrappers are the first part of a key; Composer's are two.
 */
static size_t find_wrapped(const struct merge *m, const char *key, size_t len)
{
    static const char two[] = "state.model.";
    const char *dot = memchr(key, '.', len);
    size_t i;

    if (m->spec.checkpoint || role_of(NULL, key, len) != ROLE_MODEL)
        return NOT_THERE;
    i = find_behind(m, key, len, dot ? (size_t)(dot - key) + 1 : 0);
    return i == NOT_THERE && strncmp(key, two, sizeof two - 1) == 0
               ? find_behind(m, key, len, sizeof two - 1)
               : i;
}

/* The whole key was not known until now. */
static int rename_wrapped(struct merge *m, size_t i, const char *key, size_t len,
                          struct err *e)
{
    struct layout_tensor *t = &m->entry[i].t;

    t->wrapper = len - t->key_len;
    t->key = arena_memdup(m->arena, key, len);
    t->key_len = len;
    return t->key ? merge_name_entry(m, i, e) : err_nomem(e);
}

/* So many elements of a packed type lie in these bytes, along the last dimension. */
static int unpack(const struct merge_file *f, enum dtype type, struct layout_tensor *t,
                  struct err *e)
{
    uint64_t *last = t->shape.nd ? &t->shape.dim[t->shape.nd - 1] : NULL, bits;

    if (!last || __builtin_mul_overflow(*last, 8, &bits) || bits % dtype_bits(type))
        return err_set(e, EINVAL, "%s: its rows are no whole elements of %s", f->path,
                       f->dtype);
    *last = bits / dtype_bits(type);
    t->dtype = type;
    return 0;
}

/*
 * |u1 is U8, and also what is packed into bytes: as was said, else as it was where the bytes
 * have the same shape. (How they lie in the file does not depend on it.)
 */
static int packed_type(const struct merge_file *f, const struct layout_tensor *known,
                       struct layout_tensor *t, struct err *e)
{
    enum dtype type = f->dtype ? dtype_from_name(f->dtype)
                      : known  ? known->dtype
                               : DTYPE_NONE;
    struct err ignored = {0};
    struct shape units;

    if (t->dtype != DTYPE_U8 || type == DTYPE_NONE || dtype_bits(type) >= 8)
        return 0;
    if (known && known->dtype == type &&
        shape_units(&known->shape, type, &units, &ignored) == 0 &&
        shape_equal(&units, &t->shape)) {
        t->dtype = type;
        t->shape = known->shape;
        return 0;
    }
    return f->dtype ? unpack(f, type, t, e) : 0;
}

/* Which type |V1 is: what was said, else what it was. */
static int one_byte_type(const struct merge *m, const struct merge_file *f, size_t i,
                         enum dtype *out, struct err *e)
{
    *out = DTYPE_NONE;
    if (f->dtype) {
        *out = dtype_from_name(f->dtype);
        if (*out == DTYPE_NONE)
            return err_set(e, EINVAL, "%s: user.unshard.dtype is %s, which is no dtype",
                           f->path, f->dtype);
        if (strcmp(dtype_npy(*out), "|V1") != 0)
            *out = DTYPE_NONE;
    } else if (i != NOT_THERE && strcmp(dtype_npy(m->entry[i].t.dtype), "|V1") == 0) {
        *out = m->entry[i].t.dtype;
    }
    return 0;
}

static size_t find_file(const struct merge *m, const char *path, const char *end)
{
    const char *name = strrchr(path, '/') + 1;

    return merge_find(m, TAG_FILE, name, strlen(name) - strlen(end));
}

/* What the file holds; .npy does not tell all types apart, and `known` is what it may be. */
static int read_npy(const struct merge *m, size_t known, struct entry *x, struct err *e)
{
    const struct merge_file *f = &m->spec.file[x->file];
    CLEANUP(source_putp) struct source *src = NULL;
    enum dtype one_byte;

    TRY(one_byte_type(m, f, known, &one_byte, e));
    TRY(merge_open(m, x->file, &src, e));
    if (incoming_npy(src, one_byte, &x->data, e) < 0) {
        if (!f->dtype)
            err_hint(e, "where it is |V1: setfattr -n user.unshard.dtype -v F8_E4M3 %s",
                     f->path);
        return merge_bad_file(f, e);
    }
    x->t.dtype = x->data.dtype;
    x->t.shape = x->data.shape;
    return packed_type(f, known != NOT_THERE ? &m->entry[known].t : NULL, &x->t, e);
}

static bool is_alike(const struct layout_tensor *a, const struct layout_tensor *b)
{
    return a->dtype == b->dtype && shape_equal(&a->shape, &b->shape);
}

/* A tensor of a key that is not there: new, or one of model.safetensors by its whole key. */
static int read_new_npy(struct merge *m, struct entry *x, struct err *e)
{
    size_t i = find_wrapped(m, x->t.key, x->t.key_len);

    TRY(read_npy(m, i, x, e));
    if (i == NOT_THERE)
        return 0;
    return is_alike(&m->entry[i].t, &x->t)
               ? rename_wrapped(m, i, x->t.key, x->t.key_len, e)
               : read_npy(m, NOT_THERE, x, e);
}

/* The key that the name says, and *i, what has that name. */
static int npy_key(const struct merge *m, const struct merge_file *f, size_t *i,
                   struct buf *key, struct err *e)
{
    *i = strncmp(f->path, "tree/", 5) == 0
             ? merge_find(m, TAG_TREE, f->path + 5, strlen(f->path) - 9)
             : find_file(m, f->path, ".npy");
    if (*i == NOT_THERE)
        return incoming_key(f->path, key, e) < 0 ? merge_bad_file(f, e) : 0;
    buf_add(key, m->entry[*i].t.key, m->entry[*i].t.key_len);
    return buf_failed(key) ? err_nomem(e) : 0;
}

int merge_note_npy(struct merge *m, size_t file, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    size_t i;

    TRY(npy_key(m, &m->spec.file[file], &i, &key, e));
    return keyset_add(&m->whole, key.data ? key.data : "", key.len) < 0 ? err_nomem(e)
                                                                        : 0;
}

int merge_take_npy(struct merge *m, size_t file, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    CLEANUP(buf_release) struct buf key = {0};
    struct entry x = {.file = file};
    size_t i;
    int ret = npy_key(m, f, &i, &key, e);

    if (ret < 0)
        return ret;
    buf_addc(&key, '\0');
    if (buf_failed(&key))
        return err_nomem(e);
    x.t.key = key.data;
    x.t.key_len = key.len - 1;
    if (i == NOT_THERE)
        i = merge_find(m, TAG_KEY, x.t.key, x.t.key_len);
    if (i != NOT_THERE && came_later(m, i, file))
        return 0; /* a view of what came later */
    ret = i != NOT_THERE ? read_npy(m, i, &x, e) : read_new_npy(m, &x, e);
    if (ret < 0)
        return ret;
    x.t.role = role_of(NULL, x.t.key, x.t.key_len);
    return put(m, &x, e);
}

/* Bytes without a header: of a tensor that is known otherwise. */
int merge_take_raw(struct merge *m, size_t file, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    CLEANUP(source_putp) struct source *src = NULL;
    size_t i = find_file(m, f->path, "");
    struct entry x = {.file = file};

    if (i == NOT_THERE) {
        err_set(e, EINVAL, "%s: no tensor of this name is there", f->path);
        return err_hint(e, "write tensors/NAME.npy, which has its dtype and shape");
    }
    if (came_later(m, i, file))
        return 0;
    TRY(merge_open(m, file, &src, e));
    if (src->size != m->entry[i].data.bytes)
        return err_set(e, EINVAL, "%s has %" PRIu64 " bytes, the tensor %" PRIu64,
                       f->path, src->size, m->entry[i].data.bytes);
    x.t = m->entry[i].t;
    x.t.batch = NULL;
    x.data = (struct incoming_data){
        .dtype = x.t.dtype, .shape = x.t.shape, .bytes = src->size};
    return put(m, &x, e);
}
