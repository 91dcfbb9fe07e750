/* SPDX-License-Identifier: MIT */
/* save/merge.c - one list of tensors out of files that came in and what is there. */
#include "save/merge.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/hf/safetensors_write.h"
#include "index/key_text.h"
#include "save/cuts.h"
#include "save/input.h"
#include "save/intake.h"
#include "save/merge_priv.h"

enum { MERGE_MEMORY = 2047 << 20 };

/* ---- what is there ---- */

/* As it came, where the writer put the wrapper on: without. */
static void unwrap(const struct merge *m, struct layout_tensor *t)
{
    if (!m->spec.made_by)
        return;
    if (m->spec.made_by->wraps) {
        t->key += t->wrapper;
        t->key_len -= t->wrapper;
    }
    t->wrapper = 0;
    t->own = NULL;
}

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
    if ((t->part && !x.t.part) || (t->modules && save_name_own(m->arena, &x.t) < 0))
        return err_nomem(m->e);
    unwrap(m, &x.t);
    m->olds = MAX(m->olds, (size_t)t->ord + 1);
    return merge_entry(m, &x, &i, m->e);
}

static int list_old(struct merge *m, struct err *e)
{
    struct catalog *c;
    int ret;

    if (!m->spec.checkpoint)
        return 0;
    c = m->spec.env->catalog;
    m->e = e;
    ret = catalog_checkpoint_by_id(c, m->spec.checkpoint, m->arena, &m->info, e);
    if (ret == 0)
        ret = catalog_tensors(c, m->spec.checkpoint, 0, add_old, m, e);
    m->adapter = m->info.adapter;
    m->there = m->entries;
    for (size_t i = 0; m->meet && i < m->entries; i++) {
        m->entry[i].t.wrapper = 0;
        m->entry[i].t.own = NULL;
    }
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
    for (size_t i = 0; i < m->spec.files; i++)
        TRY(merge_name(m, TAG_PATH, m->spec.file[i].path, strlen(m->spec.file[i].path),
                       i, e));
    ret = m->spec.partial ? 0 : take_kind(m, INCOMING_INDEX, merge_check_index, e);
    for (size_t i = 0; ret == 0 && i < m->spec.files; i++) {
        if (kind_of(m, i) == INCOMING_SAFETENSORS && !m->spec.partial)
            ret = merge_check_set(m, &m->spec.file[i], e);
        note_whole(m, i);
    }
    return ret;
}

static void remove_named(struct merge *m)
{
    for (size_t k = 0; k < m->spec.removals; k++) {
        const char *name = m->spec.removed[k];
        size_t len = strlen(name), i;

        if (len <= 4)
            continue;
        i = merge_find(m, TAG_FILE, name, len - 4);
        if (i == NOT_THERE || !m->entry[i].old)
            continue;
        m->entry[i].dead = true;
        m->changes = true;
    }
}

static bool is_dropped(const struct merge *m, const struct entry *x)
{
    return x->dead || m->spec.drop_roles[x->t.role] ||
           (x->old && m->replaced[x->t.role] && safetensors_takes(&x->t, x->t.wrapper));
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

/* What belongs to no batch first, then by batch, as all schedules have them. */
static int by_batch(const struct layout_batch *x, const struct layout_batch *y)
{
    if (!x || !y || x->number == y->number)
        return (x > y) - (x < y);
    return x->number < y->number ? -1 : 1;
}

static int by_key(const void *a, const void *b, void *user)
{
    const struct layout_tensor *t = user, *x = &t[*(const size_t *)a],
                               *y = &t[*(const size_t *)b];
    int c = by_batch(x->batch, y->batch);

    if (c == 0)
        c = memcmp(x->key, y->key, MIN(x->key_len, y->key_len));
    return c ? c : (x->key_len > y->key_len) - (x->key_len < y->key_len);
}

/*
 * A set is laid out by itself, so that its bytes go to their places as they arrive. Not where
 * tensors of its role come by themselves: then all of the role are laid out together, whatever
 * came first.
 */
static void note_loose(struct merge *m)
{
    for (size_t i = 0; i < m->entries && merge_is_new(m); i++) {
        const struct entry *x = &m->entry[i];

        m->loose[x->t.role] |= !x->old && !x->t.batch && !is_dropped(m, x);
    }
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
        if (m->loose[tensor[n].role])
            tensor[n].batch = NULL;
        from[n++] = i;
    }
    for (size_t i = 0; old && i < old->tensors; i++) {
        tensor[n] = old->tensor[i];
        unwrap(m, &tensor[n]);
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
    note_loose(m);
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
    if (!m->in.format || m->spec.made_by)
        m->in.format = "";
    return 0;
}

static int merge_all(struct merge *m, struct err *e)
{
    int ret = list_old(m, e);

    if (ret == 0)
        ret = check_files(m, e);
    if (ret == 0)
        ret = take_kind(m, INCOMING_SAFETENSORS, merge_take_safetensors, e);
    if (ret == 0 && !m->spec.checkpoint)
        ret = take_kind(m, INCOMING_NPY, merge_note_npy, e);
    if (ret == 0)
        ret = take_kind(m, INCOMING_NPY, merge_take_npy, e);
    if (ret == 0)
        ret = take_kind(m, INCOMING_RAW, merge_take_raw, e);
    if (ret == 0)
        remove_named(m);
    return ret;
}

/* Tensors that were there and have the same shape are to be cut as they were. */
static int keep_cuts(struct merge *m, struct err *e)
{
    struct cuts *cuts;

    if (!m->spec.checkpoint)
        return 0;
    TRY(cuts_new(m->spec.env, m->spec.checkpoint, m->arena, &cuts, e));
    for (size_t i = 0; i < m->in.tensors; i++) {
        const struct entry *x = m->from[i] < m->entries ? &m->entry[m->from[i]] : NULL;
        uint32_t ord = x ? x->ord : save_input_ord(m->input, m->from[i] - m->entries);

        if (m->spec.made_by &&
            (x || !m->spec.sets[m->tensor[i].role] || m->loose[m->tensor[i].role]))
            continue;
        /* Units are bytes where elements are less: such boxes are of that type only. */
        if (x && (!x->over || !shape_equal(&x->t.shape, &x->was_shape) ||
                  MIN(dtype_bits(x->t.dtype), 8u) != MIN(dtype_bits(x->was), 8u)))
            continue;
        TRY(cuts_of(cuts, ord, &m->tensor[i].cuts, e));
    }
    return 0;
}

int merge_settle(struct merge *m, struct err *e)
{
    TRY(open_old(m, e));
    TRY(settle(m, e));
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
    m->batch = calloc(spec->files + 1, sizeof *m->batch);
    ret = m->arena && m->batch ? merge_all(m, e) : err_nomem(e);
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
    keyset_release(&m->whole);
    free(m->slot);
    free(m->batch);
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

bool merge_origin(const struct merge *m, size_t tensor, size_t *file, uint64_t *at)
{
    const struct entry *x =
        m->from[tensor] < m->entries ? &m->entry[m->from[tensor]] : NULL;

    if (!x)
        return false;
    *file = x->file;
    *at = x->data.at;
    return true;
}

const struct merge_spec *merge_spec_of(const struct merge *m)
{
    return &m->spec;
}

static int read_incoming(const struct merge *m, const struct entry *x, uint64_t off,
                         size_t len, void *dst, struct err *e)
{
    const struct merge_file *f = &m->spec.file[x->file];
    CLEANUP_FD int fd = -1;

    if (f->intake)
        return intake_read_exact(f->intake, dst, len, x->data.at + off, e);
    fd = openat(m->spec.spool, f->spool, O_RDONLY | O_CLOEXEC);
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
