/* SPDX-License-Identifier: MIT */
/* save/merge.c - one list of tensors out of files that came in and what is there. */
#include "save/merge.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/hf/safetensors_header.h"
#include "index/key_text.h"
#include "index/names.h"
#include "remote/source.h"
#include "save/cuts.h"
#include "save/input.h"

enum {
    MERGE_MEMORY = 2047 << 20,
    INDEX_MAX = 100 << 20, /* of a weight_map's text */
};

#define NOT_THERE SIZE_MAX

struct entry {
    struct layout_tensor t;
    bool old;       /* of the checkpoint that is there */
    bool dead;      /* replaced, or removed */
    bool faulty;    /* old, and cannot be read */
    uint32_t ord;   /* old: in the index; also of what was written over an old one: */
    bool over;      /* then that was */
    enum dtype was; /* of this dtype, */
    struct shape was_shape;
    bool was_faulty;
    size_t file;    /* else: of the spec, */
    uint64_t order; /* and when it was closed */
    struct incoming_data data;
};

/* What a text stands for. */
enum tag { TAG_KEY = 'k', TAG_MODEL = 'm', TAG_OPTIMIZER = 'o', TAG_FILE = 'f' };

struct name_slot {
    XXH128_hash_t hash;
    size_t entry; /* and one more; 0: free */
};

struct merge {
    struct merge_spec spec;
    struct arena *arena;
    struct entry *entry;
    size_t entries, cap;
    struct name_slot *slot; /* texts of all kinds */
    size_t slots, names;
    bool replaced[3]; /* roles of which a whole came */
    bool adapter, changes, base;
    bool meet; /* without their wrappers two keys are one: none is dropped */
    struct came {
        size_t tensors; /* in the file, one of safetensors */
        uint64_t size;
        bool pt;       /* its metadata say what transformers wants to see */
        bool verbatim; /* it can stand as it is */
    } * came;          /* of each file of the spec */
    bool *wanted;      /* old tensors by ord */
    size_t olds;
    struct checkpoint_info info;
    struct save_input *input; /* the old ones that stay */
    struct layout_input in;
    struct layout_tensor *tensor;
    size_t *from; /* of each tensor written: its entry, or that of the input */
    struct err *e;
};

/* ---- names ---- */

static XXH128_hash_t hash_of(enum tag tag, const char *text, size_t len)
{
    return XXH3_128bits_withSeed(text, len, (uint64_t)tag);
}

static struct name_slot *slot_at(const struct merge *m, XXH128_hash_t h)
{
    size_t i = h.low64 & (m->slots - 1);

    while (m->slot[i].entry && !XXH128_isEqual(m->slot[i].hash, h))
        i = (i + 1) & (m->slots - 1);
    return &m->slot[i];
}

static int names_grow(struct merge *m, struct err *e)
{
    struct name_slot *was = m->slot;
    size_t old = m->slots;

    m->slots = old ? 2 * old : 1024;
    m->slot = calloc(m->slots, sizeof *m->slot);
    if (!m->slot) {
        m->slot = was;
        m->slots = old;
        return err_nomem(e);
    }
    for (size_t i = 0; i < old; i++)
        if (was[i].entry)
            *slot_at(m, was[i].hash) = was[i];
    free(was);
    return 0;
}

static size_t name_find(const struct merge *m, enum tag tag, const char *text,
                        size_t len)
{
    const struct name_slot *s;

    if (!m->slots)
        return NOT_THERE;
    s = slot_at(m, hash_of(tag, text, len));
    return s->entry ? s->entry - 1 : NOT_THERE;
}

/* The first one to have a name keeps it. */
static int name_add(struct merge *m, enum tag tag, const char *text, size_t len,
                    size_t entry, struct err *e)
{
    XXH128_hash_t h = hash_of(tag, text, len);
    struct name_slot *s;

    if (2 * (m->names + 1) > m->slots && names_grow(m, e) < 0)
        return -e->code;
    s = slot_at(m, h);
    if (s->entry) {
        m->meet |= tag == TAG_MODEL && s->entry != entry + 1;
        return 0;
    }
    *s = (struct name_slot){.hash = h, .entry = entry + 1};
    m->names++;
    return 0;
}

static enum tag view_tag(enum role role)
{
    return role == ROLE_OPTIMIZER ? TAG_OPTIMIZER : TAG_MODEL;
}

/* All that this tensor is called: its key, in its view, its file in raw/. */
static int name_entry(struct merge *m, size_t i, struct err *e)
{
    CLEANUP(buf_release) struct buf file = {0};
    const struct layout_tensor *t = &m->entry[i].t;
    int ret = name_add(m, TAG_KEY, t->key, t->key_len, i, e);

    if (ret == 0 && t->role == ROLE_MODEL)
        ret =
            name_add(m, TAG_MODEL, t->key + t->wrapper, t->key_len - t->wrapper, i, e);
    if (ret == 0 && t->role == ROLE_OPTIMIZER)
        ret = name_add(m, TAG_OPTIMIZER, t->key, t->key_len, i, e);
    if (ret == 0 && name_of_key(t->key, t->key_len, "", &file) < 0)
        ret = err_nomem(e);
    return ret == 0 ? name_add(m, TAG_FILE, file.data, file.len, i, e) : ret;
}

static int entry_new(struct merge *m, const struct entry *x, size_t *out, struct err *e)
{
    struct entry *grown;

    if (m->entries == m->cap) {
        size_t cap = m->cap ? 2 * m->cap : 256;

        grown = reallocarray(m->entry, cap, sizeof *grown);
        if (!grown)
            return err_nomem(e);
        m->entry = grown;
        m->cap = cap;
    }
    grown = &m->entry[m->entries];
    *grown = *x;
    grown->t.key = arena_memdup(m->arena, x->t.key, x->t.key_len);
    if (!grown->t.key)
        return err_nomem(e);
    *out = m->entries++;
    return name_entry(m, *out, e);
}

/* ---- what is there ---- */

static int add_old(void *user, const struct tensor_info *t)
{
    struct merge *m = user;
    struct entry x = {.t = {.key = t->key,
                            .key_len = t->key_len,
                            .wrapper = t->wrapper,
                            .role = t->role,
                            .dtype = t->dtype,
                            .shape = t->shape},
                      .data = {.bytes = t->bytes},
                      .old = true,
                      .faulty = t->fault != NULL,
                      .ord = t->ord};
    size_t i;

    if (t->part)
        x.t.part = arena_memdup(m->arena, t->part, strlen(t->part));
    if (t->part && !x.t.part)
        return err_nomem(m->e);
    m->olds = MAX(m->olds, (size_t)t->ord + 1);
    return entry_new(m, &x, &i, m->e);
}

static int list_old(struct merge *m, struct err *e)
{
    struct catalog *c = m->spec.env->catalog;
    int ret;

    if (!m->spec.checkpoint)
        return 0;
    m->e = e;
    ret = catalog_checkpoint_by_id(c, m->spec.checkpoint, m->arena, &m->info, e);
    if (ret == 0)
        ret = catalog_tensors(c, m->spec.checkpoint, 0, add_old, m, e);
    m->adapter = m->info.adapter;
    for (size_t i = 0; m->meet && i < m->entries; i++)
        m->entry[i].t.wrapper = 0;
    return ret;
}

/*
 * The wrapper that all of the old model's keys have in common: new ones get it too.
 * Its length, with *text, or 0.
 */
static size_t common_wrapper(const struct merge *m, const char **text)
{
    size_t len = 0;

    for (size_t i = 0; i < m->entries && m->entry[i].old; i++) {
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

/* ---- files ---- */

static int bad_file(const struct merge_file *f, struct err *e)
{
    if (e->code != ENOMEM && e->code != EIO)
        e->code = EINVAL;
    return err_wrap(e, "%s", f->path);
}

static int open_file(const struct merge *m, size_t file, struct source **out,
                     struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    int fd = openat(m->spec.spool, f->spool, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);

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

/* Puts the tensor in the place of what has its key, unless that was closed later. */
static int put(struct merge *m, struct entry *x, struct err *e)
{
    size_t i = name_find(m, TAG_KEY, x->t.key, x->t.key_len), made;

    m->changes = true;
    if (i == NOT_THERE)
        return entry_new(m, x, &made, e);
    if (!m->entry[i].old && m->entry[i].order > x->order)
        return 0;
    x->t.key = m->entry[i].t.key;
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
    struct entry x = {.file = file, .order = f->order};
    const char *wrapper = NULL;
    bool whole = incoming_is_whole(f->path, &x.t.role);
    size_t i = name_find(m, view_tag(x.t.role), t->name, t->name_len);

    if (m->meet || i == NOT_THERE) /* whole keys too are understood (prefix=keep) */
        i = name_find(m, TAG_KEY, t->name, t->name_len);
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
    x.t.dtype = x.data.dtype = t->dtype;
    safetensors_shape(t, &x.t.shape);
    x.data.shape = x.t.shape;
    x.data.at = h->data + t->begin;
    x.data.bytes = t->end - t->begin;
    return put(m, &x, e);
}

static int take_safetensors(struct merge *m, size_t file, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    CLEANUP(source_putp) struct source *src = NULL;
    struct safetensors_header h;
    int ret = open_file(m, file, &src, e);

    if (ret == 0)
        ret = safetensors_read(src, 0, src->size, &h, e);
    if (ret < 0)
        return bad_file(f, e);
    m->came[file] = (struct came){.tensors = h.count,
                                  .size = src->size,
                                  .pt = h.format && strcmp(h.format, "pt") == 0};
    for (size_t i = 0; ret == 0 && i < h.count; i++)
        ret = put_named(m, file, &h, &h.tensor[i], e);
    safetensors_header_release(&h);
    return ret;
}

/* tensors/K.npy whose key without its first part is in model.safetensors: the same one. */
static size_t find_wrapped(struct merge *m, const char *key, size_t len,
                           const struct incoming_data *d)
{
    const char *dot = memchr(key, '.', len);
    size_t cut = dot ? (size_t)(dot - key) + 1 : 0, i;

    if (!cut || m->spec.checkpoint)
        return NOT_THERE;
    i = name_find(m, TAG_MODEL, key + cut, len - cut);
    if (i == NOT_THERE || m->entry[i].t.wrapper || m->entry[i].t.dtype != d->dtype ||
        !shape_equal(&m->entry[i].t.shape, &d->shape))
        return NOT_THERE;
    return i;
}

/* The whole key was not known until now. */
static int rename_wrapped(struct merge *m, size_t i, const char *key, size_t len,
                          struct err *e)
{
    struct layout_tensor *t = &m->entry[i].t;

    t->wrapper = len - t->key_len;
    t->key = arena_memdup(m->arena, key, len);
    t->key_len = len;
    return t->key ? name_entry(m, i, e) : err_nomem(e);
}

/* What .npy does not tell apart is as it was where the bytes agree. */
static void adopt_type(const struct entry *known, struct incoming_data *d)
{
    uint64_t bytes;
    struct err ignored = {0};

    if (known->t.dtype == d->dtype || dtype_npy(known->t.dtype) == NULL ||
        strcmp(dtype_npy(known->t.dtype), dtype_npy(d->dtype)) != 0)
        return;
    if (shape_bytes(&known->t.shape, known->t.dtype, &bytes, &ignored) == 0 &&
        bytes == d->bytes && dtype_bits(known->t.dtype) < 8) {
        d->dtype = known->t.dtype;
        d->shape = known->t.shape;
    }
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

    return name_find(m, TAG_FILE, name, strlen(name) - strlen(end));
}

static int take_npy(struct merge *m, size_t file, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(buf_release) struct buf key = {0};
    struct entry x = {.file = file, .order = f->order};
    enum dtype one_byte;
    size_t i =
        strncmp(f->path, "tree/", 5) == 0 ? NOT_THERE : find_file(m, f->path, ".npy");

    if (i != NOT_THERE)
        buf_add(&key, m->entry[i].t.key, m->entry[i].t.key_len);
    else if (incoming_key(f->path, &key, e) < 0)
        return bad_file(f, e);
    buf_addc(&key, '\0');
    if (buf_failed(&key))
        return err_nomem(e);
    x.t.key = key.data;
    x.t.key_len = key.len - 1;
    if (i == NOT_THERE)
        i = name_find(m, TAG_KEY, x.t.key, x.t.key_len);
    if (i != NOT_THERE && !m->entry[i].old && m->entry[i].order > f->order)
        return 0; /* a view of what came later */
    if (one_byte_type(m, f, i, &one_byte, e) < 0 || open_file(m, file, &src, e) < 0)
        return -e->code;
    if (incoming_npy(src, one_byte, &x.data, e) < 0) {
        if (!f->dtype)
            err_hint(e, "where it is |V1: setfattr -n user.unshard.dtype -v F8_E4M3 %s",
                     f->path);
        return bad_file(f, e);
    }
    if (i == NOT_THERE &&
        (i = find_wrapped(m, x.t.key, x.t.key_len, &x.data)) != NOT_THERE &&
        rename_wrapped(m, i, x.t.key, x.t.key_len, e) < 0)
        return -e->code;
    if (i != NOT_THERE)
        adopt_type(&m->entry[i], &x.data);
    x.t.dtype = x.data.dtype;
    x.t.shape = x.data.shape;
    x.t.role = role_of(NULL, x.t.key, x.t.key_len);
    return put(m, &x, e);
}

/* Bytes without a header: of a tensor that is known otherwise. */
static int take_raw(struct merge *m, size_t file, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    CLEANUP(source_putp) struct source *src = NULL;
    size_t i = find_file(m, f->path, "");
    struct entry x = {.file = file, .order = f->order};

    if (i == NOT_THERE) {
        err_set(e, EINVAL, "%s: no tensor of this name is there", f->path);
        return err_hint(e, "write tensors/NAME.npy, which has its dtype and shape");
    }
    if (!m->entry[i].old && m->entry[i].order > f->order)
        return 0;
    if (open_file(m, file, &src, e) < 0)
        return -e->code;
    if (src->size != m->entry[i].data.bytes)
        return err_set(e, EINVAL, "%s has %" PRIu64 " bytes, the tensor %" PRIu64,
                       f->path, src->size, m->entry[i].data.bytes);
    x.t = m->entry[i].t;
    x.data = (struct incoming_data){
        .dtype = x.t.dtype, .shape = x.t.shape, .bytes = src->size};
    return put(m, &x, e);
}

/* ---- sets that have to be complete ---- */

static bool has_file(const struct merge *m, const char *path)
{
    for (size_t i = 0; i < m->spec.files; i++)
        if (strcmp(m->spec.file[i].path, path) == 0)
            return true;
    return false;
}

static int missing(const char *by, const char *path, struct err *e)
{
    return err_set(e, EINVAL, "%s: %s is not there yet", by, path);
}

static int read_index(struct merge *m, size_t file, struct hf_index *out, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP_FREE char *text = NULL;

    if (open_file(m, file, &src, e) < 0)
        return -e->code;
    if (src->size > INDEX_MAX)
        return err_set(e, EINVAL, "%s: too large for an index", f->path);
    text = malloc((size_t)src->size + 1);
    if (!text)
        return err_nomem(e);
    if (source_read(src, 0, (size_t)src->size, text, e) < 0 ||
        hf_index_parse(text, (size_t)src->size, ".safetensors", out, e) < 0)
        return bad_file(f, e);
    return 0;
}

/* All files of "x-00001-of-00003": looked at once, by the first. */
static int check_set(const struct merge *m, const struct merge_file *f, struct err *e)
{
    unsigned number, of;
    size_t stem, digits;
    char path[4096];

    of = incoming_set(f->path, &number, &stem);
    if (of == 0)
        return 0;
    digits = strcspn(f->path + stem, "-");
    for (unsigned k = 1; k <= of; k++) {
        snprintf(path, sizeof path, "%.*s%0*u%s", (int)stem, f->path, (int)digits, k,
                 f->path + stem + digits);
        if (k != number && !has_file(m, path))
            return missing(f->path, path, e);
        if (k < number)
            return 0; /* the first one has looked */
    }
    return 0;
}

static int check_index(struct merge *m, size_t file, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    const char *slash = strrchr(f->path, '/');
    int dir = slash ? (int)(slash - f->path) + 1 : 0, ret = 0;
    struct hf_index x;
    char path[4096];

    if (read_index(m, file, &x, e) < 0)
        return -e->code;
    for (size_t i = 0; ret == 0 && i < x.nfiles; i++) {
        snprintf(path, sizeof path, "%.*s%s", dir, f->path, x.file[i].name);
        if (!has_file(m, path))
            ret = missing(f->path, path, e);
    }
    hf_index_release(&x);
    return ret;
}

/* ---- the merge ---- */

static enum incoming_kind kind_of(const struct merge *m, size_t i)
{
    return incoming_kind_beside(m->spec.file[i].path, m->base);
}

static void note_base(struct merge *m)
{
    enum role role;

    m->base = m->spec.checkpoint && !m->info.adapter;
    for (size_t i = 0; i < m->spec.files; i++) {
        const char *path = m->spec.file[i].path;

        m->base |= incoming_kind(path) == INCOMING_SAFETENSORS &&
                   incoming_is_whole(path, &role) && role == ROLE_MODEL &&
                   !incoming_is_adapter(path);
    }
}

static void note_whole(struct merge *m, size_t i)
{
    const char *path = m->spec.file[i].path;
    enum role role;

    if (kind_of(m, i) != INCOMING_SAFETENSORS || !incoming_is_whole(path, &role))
        return;
    m->replaced[role] = true;
    if (role == ROLE_MODEL)
        m->adapter = incoming_is_adapter(path);
}

static int take_kind(struct merge *m, enum incoming_kind kind,
                     int (*take)(struct merge *m, size_t file, struct err *e),
                     struct err *e)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < m->spec.files; i++)
        if (kind_of(m, i) == kind)
            ret = take(m, i, e);
    return ret;
}

static int check_files(struct merge *m, struct err *e)
{
    int ret;

    note_base(m);
    ret = take_kind(m, INCOMING_INDEX, check_index, e);
    for (size_t i = 0; ret == 0 && i < m->spec.files; i++) {
        if (kind_of(m, i) == INCOMING_SAFETENSORS)
            ret = check_set(m, &m->spec.file[i], e);
        note_whole(m, i);
    }
    return ret;
}

static int remove_named(struct merge *m)
{
    for (size_t k = 0; k < m->spec.removals; k++) {
        const char *name = m->spec.removed[k];
        size_t len = strlen(name), i;

        if (len <= 4)
            continue;
        i = name_find(m, TAG_FILE, name, len - 4);
        if (i != NOT_THERE && m->entry[i].old) {
            m->entry[i].dead = true;
            m->changes = true;
        }
    }
    return 0;
}

static bool is_dropped(const struct merge *m, const struct entry *x)
{
    return x->dead || m->spec.drop_roles[x->t.role] ||
           (x->old && m->replaced[x->t.role] && dtype_in_safetensors(x->t.dtype));
}

static bool is_wanted(void *user, const struct tensor_info *t)
{
    const struct merge *m = user;

    return t->ord < m->olds && m->wanted[t->ord];
}

/* The old tensors that stay, and all objects. */
static int open_old(struct merge *m, struct err *e)
{
    const struct save_choice choice = {
        .drop_objects = m->spec.drop_objects, .wanted = is_wanted, .user = m};

    if (!m->spec.checkpoint)
        return 0;
    m->wanted = calloc(m->olds + 1, sizeof *m->wanted);
    if (!m->wanted)
        return err_nomem(e);
    for (size_t i = 0; i < m->entries; i++)
        if (m->entry[i].old)
            m->wanted[m->entry[i].ord] = !is_dropped(m, &m->entry[i]);
    return save_input_new(m->spec.env, m->spec.checkpoint, &choice, &m->input, e);
}

static int by_key(const void *a, const void *b, void *user)
{
    const struct layout_tensor *t = user, *x = &t[*(const size_t *)a],
                               *y = &t[*(const size_t *)b];
    int c = memcmp(x->key, y->key, MIN(x->key_len, y->key_len));

    return c ? c : (x->key_len > y->key_len) - (x->key_len < y->key_len);
}

/* Numbers below m->entries are entries, those above are of the input. */
static size_t collect(struct merge *m, struct layout_tensor *tensor, size_t *from)
{
    const struct layout_input *old = m->input ? save_input_of(m->input) : NULL;
    size_t n = 0;

    for (size_t i = 0; i < m->entries; i++) {
        if (m->entry[i].old || is_dropped(m, &m->entry[i]))
            continue;
        tensor[n] = m->entry[i].t;
        from[n++] = i;
    }
    for (size_t i = 0; old && i < old->tensors; i++) {
        tensor[n] = old->tensor[i];
        from[n++] = m->entries + i;
    }
    return n;
}

static int settle(struct merge *m, struct err *e)
{
    const struct layout_input *old = m->input ? save_input_of(m->input) : NULL;
    size_t most = m->entries + (old ? old->tensors : 0) + 1, n;
    CLEANUP_FREE struct layout_tensor *tensor = calloc(most, sizeof *tensor);
    CLEANUP_FREE size_t *from = calloc(most, sizeof *from);
    CLEANUP_FREE size_t *order = calloc(most, sizeof *order);

    m->tensor = calloc(most, sizeof *m->tensor);
    m->from = calloc(most, sizeof *m->from);
    if (!tensor || !from || !order || !m->tensor || !m->from)
        return err_nomem(e);
    n = collect(m, tensor, from);
    if (n == 0 && m->spec.checkpoint)
        return err_set(e, EINVAL, "no tensor would be left");
    for (size_t i = 0; i < n; i++)
        order[i] = i;
    qsort_r(order, n, sizeof *order, by_key, tensor);
    for (size_t i = 0; i < n; i++) {
        m->tensor[i] = tensor[order[i]];
        m->from[i] = from[order[i]];
    }
    if (old)
        m->in = *old;
    m->in.tensor = m->tensor;
    m->in.tensors = n;
    m->in.adapter = m->adapter;
    if (!m->in.format)
        m->in.format = "";
    return 0;
}

static int merge_all(struct merge *m, struct err *e)
{
    int ret = list_old(m, e);

    if (ret == 0)
        ret = check_files(m, e);
    if (ret == 0)
        ret = take_kind(m, INCOMING_SAFETENSORS, take_safetensors, e);
    if (ret == 0)
        ret = take_kind(m, INCOMING_NPY, take_npy, e);
    if (ret == 0)
        ret = take_kind(m, INCOMING_RAW, take_raw, e);
    return ret == 0 ? remove_named(m) : ret;
}

/* Tensors that were there and have the same shape are to be cut as they were. */
static int keep_cuts(struct merge *m, struct err *e)
{
    struct cuts *cuts;

    if (!m->spec.checkpoint)
        return 0;
    if (cuts_new(m->spec.env, m->spec.checkpoint, m->arena, &cuts, e) < 0)
        return -e->code;
    for (size_t i = 0; i < m->in.tensors; i++) {
        const struct entry *x = m->from[i] < m->entries ? &m->entry[m->from[i]] : NULL;
        uint32_t ord = x ? x->ord : save_input_ord(m->input, m->from[i] - m->entries);

        /* Units are bytes where elements are less: such boxes are of that type only. */
        if (x && (!x->over || !shape_equal(&x->t.shape, &x->was_shape) ||
                  MIN(dtype_bits(x->t.dtype), 8u) != MIN(dtype_bits(x->was), 8u)))
            continue;
        if (cuts_of(cuts, ord, &m->tensor[i].cuts, e) < 0)
            return -e->code;
    }
    return 0;
}

int merge_settle(struct merge *m, struct err *e)
{
    if (open_old(m, e) < 0 || settle(m, e) < 0)
        return -e->code;
    return keep_cuts(m, e);
}

int merge_new(const struct merge_spec *spec, struct merge **out, struct err *e)
{
    struct merge *m = calloc(1, sizeof *m);
    int ret;

    if (!m)
        return err_nomem(e);
    m->spec = *spec;
    m->arena = arena_new(MERGE_MEMORY);
    m->came = calloc(spec->files + 1, sizeof *m->came);
    ret = m->arena && m->came ? merge_all(m, e) : err_nomem(e);
    if (ret < 0)
        merge_free(m);
    else
        *out = m;
    return ret;
}

void merge_free(struct merge *m)
{
    if (!m)
        return;
    save_input_free(m->input);
    free(m->entry);
    free(m->slot);
    free(m->came);
    free(m->wanted);
    free(m->tensor);
    free(m->from);
    arena_free(m->arena);
    free(m);
}

void merge_freep(struct merge **m)
{
    merge_free(*m);
}

bool merge_changes(const struct merge *m)
{
    return m->changes;
}

bool merge_has_base(const struct merge *m)
{
    return m->base;
}

/* ---- files that can stand as they are ---- */

/* A file of the model's one kind: "model.safetensors", or of the set "model-N-of-M". */
static bool is_model_file(const struct merge *m, size_t i)
{
    enum role role;

    return incoming_kind_beside(m->spec.file[i].path, m->base) ==
               INCOMING_SAFETENSORS &&
           incoming_is_whole(m->spec.file[i].path, &role) && role == ROLE_MODEL;
}

/* Does the index tell of each tensor, and of no other, the file that has it? */
static int index_fits(struct merge *m, size_t file, bool *out, struct err *e)
{
    struct hf_index x;

    if (read_index(m, file, &x, e) < 0)
        return -e->code;
    *out = x.count == m->entries;
    for (size_t i = 0; *out && i < x.count; i++) {
        const char *key = x.entry[i].key;
        size_t at = name_find(m, TAG_KEY, key, strlen(key));

        *out = at != NOT_THERE && strcmp(m->spec.file[m->entry[at].file].path,
                                         x.file[x.entry[i].file].name) == 0;
    }
    hf_index_release(&x);
    return 0;
}

/* Every tensor that counts is of a model's file, and every tensor of those counts. */
static bool all_count(const struct merge *m, uint64_t max, size_t *files)
{
    size_t tensors = 0;

    *files = 0;
    for (size_t i = 0; i < m->entries; i++)
        if (m->entry[i].dead || m->entry[i].t.role != ROLE_MODEL ||
            m->entry[i].t.wrapper || m->spec.drop_roles[ROLE_MODEL] ||
            !is_model_file(m, m->entry[i].file))
            return false;
    for (size_t i = 0; i < m->spec.files; i++) {
        if (!is_model_file(m, i))
            continue;
        if (!m->came[i].pt || m->came[i].size > max || m->came[i].tensors == 0)
            return false;
        tensors += m->came[i].tensors;
        ++*files;
    }
    return *files > 0 && tensors == m->entries;
}

int merge_verbatim(struct merge *m, uint64_t max, bool *out, struct err *e)
{
    size_t files, indexes = 0, index = 0, stem;
    unsigned number;

    *out = !m->spec.checkpoint && all_count(m, max, &files);
    for (size_t i = 0; *out && i < m->spec.files; i++) {
        if (incoming_kind(m->spec.file[i].path) == INCOMING_INDEX) {
            indexes++;
            index = i;
        }
        /* Numbered files are found by an index only, and one file needs none. */
        if (is_model_file(m, i) &&
            (incoming_set(m->spec.file[i].path, &number, &stem) == 0) != (files == 1))
            *out = false;
    }
    if (*out && indexes != (files == 1 ? 0u : 1u))
        *out = false;
    if (*out && files > 1 && index_fits(m, index, out, e) < 0)
        return -e->code;
    for (size_t i = 0; *out && i < m->spec.files; i++)
        m->came[i].verbatim = is_model_file(m, i) || (files > 1 && i == index);
    return 0;
}

bool merge_is_verbatim(const struct merge *m, size_t file)
{
    return m->came[file].verbatim;
}

static bool is_patch(const struct entry *x)
{
    return x->over && !x->was_faulty && x->t.dtype == x->was &&
           shape_equal(&x->t.shape, &x->was_shape);
}

int merge_patch(const struct merge *m, struct patch_change **out, size_t *count,
                struct err *e)
{
    CLEANUP_FREE struct patch_change *list = NULL;
    size_t n = 0;

    *out = NULL;
    *count = 0;
    if (!m->spec.checkpoint || m->adapter != m->info.adapter)
        return 0;
    list = calloc(m->entries + 1, sizeof *list);
    if (!list)
        return err_nomem(e);
    for (size_t i = 0; i < m->entries; i++) {
        const struct entry *x = &m->entry[i];

        if (is_dropped(m, x) || (!x->old && !is_patch(x)))
            return 0;
        if (!x->old)
            list[n++] = (struct patch_change){.ord = x->ord, .tensor = i};
    }
    *out = steal(&list);
    *count = n;
    return 0;
}

const struct layout_input *merge_input(const struct merge *m)
{
    return &m->in;
}

static int read_incoming(const struct merge *m, const struct entry *x, uint64_t off,
                         size_t len, void *dst, struct err *e)
{
    const struct merge_file *f = &m->spec.file[x->file];
    CLEANUP_FD int fd = openat(m->spec.spool, f->spool, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return err_set(e, errno, "%s: %s", f->path, strerror(errno));
    return incoming_read(fd, &x->data, off, len, dst, e) < 0
               ? err_wrap(e, "%s", f->path)
               : 0;
}

static int read_entry(void *user, size_t tensor, uint64_t off, size_t len, void *dst,
                      struct err *e)
{
    const struct merge *m = user;

    return read_incoming(m, &m->entry[tensor], off, len, dst, e);
}

struct save_source merge_incoming(struct merge *m)
{
    return (struct save_source){.read = read_entry, .user = m};
}

static int read_tensor(void *user, size_t tensor, uint64_t off, size_t len, void *dst,
                       struct err *e)
{
    struct merge *m = user;
    size_t from = m->from[tensor];
    struct save_source old;

    if (from < m->entries)
        return read_incoming(m, &m->entry[from], off, len, dst, e);
    old = save_input_source(m->input);
    return old.read(old.user, from - m->entries, off, len, dst, e);
}

struct save_source merge_source(struct merge *m)
{
    return (struct save_source){.read = read_tensor, .user = m};
}
