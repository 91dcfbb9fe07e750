/* SPDX-License-Identifier: MIT */
/* gpu/reader.c - the bytes of one file of the mount, whatever it is made of. */
#include "gpu/reader.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/pool.h"
#include "gpu/tensor.h"
#include "index/npy.h"
#include "remote/decoded.h"
#include "remote/open_files.h"
#include "remote/source.h"

/* Tensors of a view that stay open: readers go through it in order, a few at once. */
enum { VIEW_KEEP = 32, AHEAD_SHARE = 4 /* of the room for decoded pieces */ };

struct kept {
    uint32_t ord;
    uint64_t used; /* clock of the last use; 0: free */
    struct tensor *tensor;
};

struct reader_kind {
    /* [off, off + len) lies within the size, len > 0. */
    int (*read)(struct reader *r, uint64_t off, size_t len, void *dst, struct err *e);
    int (*map)(struct reader *r, uint64_t off, size_t len, struct reader_iov *v,
               struct err *e);
    void (*will_need)(struct reader *r, uint64_t off, uint64_t len);
    /* Both NULL: it never gathers. */
    bool (*gathers)(struct reader *r, uint64_t off, size_t len);
    int (*unchanged)(struct reader *r, uint64_t off, size_t len, struct err *e);
};

struct reader {
    const struct reader_kind *kind;
    uint64_t size;

    /* a tensor: its .npy header (empty for raw) and itself */
    struct buf header;
    struct tensor *tensor;

    /* a view */
    struct reader_env env;
    int64_t checkpoint;
    struct view_info view;
    struct view_member *member;
    size_t nmember;
    pthread_mutex_t lock;
    uint64_t clock;              /* guarded by lock */
    struct kept kept[VIEW_KEEP]; /* guarded by lock */

    /* a source */
    struct source *src;
};

static int reader_new(const struct reader_kind *kind, struct reader **out,
                      struct err *e)
{
    struct reader *r = calloc(1, sizeof *r);

    if (!r)
        return err_nomem(e);
    r->kind = kind;
    pthread_mutex_init(&r->lock, NULL);
    *out = r;
    return 0;
}

void reader_close(struct reader *r)
{
    if (!r)
        return;
    for (size_t i = 0; i < VIEW_KEEP; i++)
        tensor_put(r->kept[i].tensor);
    tensor_put(r->tensor);
    source_put(r->src);
    buf_release(&r->header);
    free(r->member);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

void reader_closep(struct reader **r)
{
    reader_close(*r);
}

uint64_t reader_size(const struct reader *r)
{
    return r->size;
}

static int outside(uint64_t off, size_t len, uint64_t size, struct err *e)
{
    return err_set(e, EINVAL,
                   "bytes %" PRIu64 "+%zu are not within the %" PRIu64
                   " bytes of the file",
                   off, len, size);
}

int reader_read(struct reader *r, uint64_t off, size_t len, void *dst, struct err *e)
{
    if (off > r->size || len > r->size - off)
        return outside(off, len, r->size, e);
    return len ? r->kind->read(r, off, len, dst, e) : 0;
}

int reader_map(struct reader *r, uint64_t off, size_t len, struct reader_iov *v,
               struct err *e)
{
    int ret;

    v->count = 0;
    v->nheld = 0;
    v->warm = false;
    if (off > r->size || len > r->size - off)
        return outside(off, len, r->size, e);
    ret = len ? r->kind->map(r, off, len, v, e) : 1;
    if (ret != 1)
        reader_unmap(v);
    return ret;
}

void reader_unmap(struct reader_iov *v)
{
    for (unsigned i = 0; i < v->nheld; i++)
        source_put(v->held[i]);
    v->nheld = 0;
    v->count = 0;
}

void reader_will_need(struct reader *r, uint64_t off, uint64_t len)
{
    if (off < r->size)
        r->kind->will_need(r, off, MIN(len, r->size - off));
}

bool reader_gathers(struct reader *r, uint64_t off, size_t len)
{
    return r->kind->gathers && off < r->size && len <= r->size - off &&
           r->kind->gathers(r, off, len);
}

int reader_unchanged(struct reader *r, uint64_t off, size_t len, struct err *e)
{
    if (off > r->size || len > r->size - off)
        return outside(off, len, r->size, e);
    return len ? r->kind->unchanged(r, off, len, e) : 0;
}

uint64_t reader_ahead(const struct reader_env *env)
{
    return env->ahead ? env->ahead : READER_AHEAD;
}

const struct plan *reader_plan(const struct reader *r)
{
    return r->tensor ? tensor_plan(r->tensor) : NULL;
}

int reader_place(struct reader *r, size_t i, struct chunk_place *out, const char **path,
                 struct err *e)
{
    return tensor_place(r->tensor, i, out, path, e);
}

int reader_verify(struct reader *r, size_t i, struct chunk_look *look, struct err *e)
{
    return tensor_verify(r->tensor, i, look, e);
}

int reader_compare(struct reader *r, size_t i, struct err *e)
{
    return tensor_compare(r->tensor, i, e);
}

/* ---- a tensor, with or without its .npy header ---- */

static int npy_read(struct reader *r, uint64_t off, size_t len, void *dst,
                    struct err *e)
{
    size_t head = off < r->header.len ? MIN(len, r->header.len - (size_t)off) : 0;

    if (head)
        memcpy(dst, r->header.data + off, head);
    if (head == len)
        return 0;
    return tensor_read(r->tensor, off + head - r->header.len, len - head,
                       (char *)dst + head, e);
}

static int npy_map(struct reader *r, uint64_t off, size_t len, struct reader_iov *v,
                   struct err *e)
{
    size_t head = off < r->header.len ? MIN(len, r->header.len - (size_t)off) : 0;

    if (head && !iov_add(v, r->header.data + off, head, NULL))
        return 0;
    if (head == len)
        return 1;
    return tensor_map(r->tensor, off + head - r->header.len, len - head, v, e);
}

static void npy_will_need(struct reader *r, uint64_t off, uint64_t len)
{
    uint64_t head = off < r->header.len ? MIN(len, r->header.len - off) : 0;

    if (head < len)
        tensor_will_need(r->tensor, off + head - r->header.len, len - head);
}

static bool npy_gathers(struct reader *r, uint64_t off, size_t len)
{
    size_t head = off < r->header.len ? MIN(len, r->header.len - (size_t)off) : 0;

    return head < len &&
           tensor_gathers(r->tensor, off + head - r->header.len, len - head);
}

static int npy_unchanged(struct reader *r, uint64_t off, size_t len, struct err *e)
{
    size_t head = off < r->header.len ? MIN(len, r->header.len - (size_t)off) : 0;

    if (head == len)
        return 0;
    return tensor_unchanged(r->tensor, off + head - r->header.len, len - head, e);
}

static const struct reader_kind kind_tensor = {
    .read = npy_read,
    .map = npy_map,
    .will_need = npy_will_need,
    .gathers = npy_gathers,
    .unchanged = npy_unchanged,
};

int reader_open_tensor(const struct reader_env *env, int64_t checkpoint, uint32_t ord,
                       bool npy, struct reader **out, struct err *e)
{
    CLEANUP(reader_closep) struct reader *r = NULL;
    const struct tensor_info *info;
    int ret = reader_new(&kind_tensor, &r, e);

    if (ret == 0)
        ret = tensor_open(env, checkpoint, ord, &r->tensor, e);
    if (ret < 0)
        return ret;
    info = tensor_info_of(r->tensor);
    if (npy && (ret = npy_header(info->dtype, &info->shape, &r->header, e)) < 0)
        return ret;
    r->size = r->header.len + tensor_size(r->tensor);
    *out = steal(&r);
    return 0;
}

/* ---- a role's safetensors file ---- */

/* The open tensor, when it is kept; the caller gets a reference. */
static struct tensor *kept_find(struct reader *r, uint32_t ord)
{
    struct tensor *found = NULL;

    pthread_mutex_lock(&r->lock);
    for (size_t i = 0; !found && i < VIEW_KEEP; i++) {
        if (r->kept[i].tensor && r->kept[i].ord == ord) {
            r->kept[i].used = ++r->clock;
            found = tensor_get(r->kept[i].tensor);
        }
    }
    pthread_mutex_unlock(&r->lock);
    return found;
}

/* Keeps another reference to t in the place that was not used for longest. */
static void kept_add(struct reader *r, uint32_t ord, struct tensor *t)
{
    struct tensor *old;
    size_t at = 0;

    pthread_mutex_lock(&r->lock);
    for (size_t i = 1; i < VIEW_KEEP; i++)
        if (r->kept[i].used < r->kept[at].used)
            at = i;
    old = r->kept[at].tensor;
    r->kept[at] =
        (struct kept){.ord = ord, .used = ++r->clock, .tensor = tensor_get(t)};
    pthread_mutex_unlock(&r->lock);
    tensor_put(old);
}

static int member_tensor(struct reader *r, const struct view_member *m,
                         struct tensor **out, struct err *e)
{
    *out = kept_find(r, m->ord);
    if (*out)
        return 0;
    TRY(tensor_open(&r->env, r->checkpoint, m->ord, out, e));
    if (tensor_size(*out) != m->bytes) {
        tensor_put(*out);
        return err_set(e, EBADMSG, "the index disagrees with itself about tensor %u",
                       m->ord);
    }
    kept_add(r, m->ord, *out);
    return 0;
}

/* The member that holds byte `off` of the file; off is past the header. */
static const struct view_member *member_at(const struct reader *r, uint64_t off)
{
    size_t lo = 0, hi = r->nmember;

    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        if (r->member[mid].at <= off)
            lo = mid;
        else
            hi = mid;
    }
    return &r->member[lo];
}

/* A part of a range of the file: bytes [at, at + len) of a tensor, `done` behind its start. */
struct view_part {
    struct tensor *tensor;
    uint64_t at;
    size_t len, done;
};

/* fn of each part of [off, off + len) from `done` on, while it gives 1; what it gave last. */
typedef int view_part_fn(void *user, const struct view_part *p, struct err *e);

static int view_parts(struct reader *r, uint64_t off, size_t len, size_t done,
                      view_part_fn *fn, void *user, struct err *e)
{
    int ret = 1;

    while (ret == 1 && done < len) {
        const struct view_member *m = member_at(r, off + done);
        uint64_t at = off + done - m->at;
        size_t part = (size_t)MIN(len - done, m->bytes - at);
        CLEANUP(tensor_putp) struct tensor *t = NULL;

        ret = member_tensor(r, m, &t, e);
        if (ret == 0)
            ret = fn(user, &(struct view_part){t, at, part, done}, e);
        done += part;
    }
    return ret < 0 ? err_wrap(e, "%s", r->view.name) : ret;
}

/* Of [off, off + len), what lies in the header. */
static size_t view_head(const struct reader *r, uint64_t off, size_t len)
{
    return off < r->view.header ? (size_t)MIN(len, r->view.header - off) : 0;
}

static int read_part(void *user, const struct view_part *p, struct err *e)
{
    int ret = tensor_read(p->tensor, p->at, p->len, (char *)user + p->done, e);

    return ret < 0 ? ret : 1;
}

static int view_read(struct reader *r, uint64_t off, size_t len, void *dst,
                     struct err *e)
{
    size_t head = view_head(r, off, len);
    int ret = head ? view_header(r->env.catalog, &r->view, off, head, dst, e) : 0;

    if (ret < 0)
        return err_wrap(e, "%s", r->view.name);
    ret = view_parts(r, off, len, head, read_part, dst, e);
    return ret < 0 ? ret : 0;
}

struct mapping {
    struct reader_iov *v;
    size_t len;
};

static int map_part(void *user, const struct view_part *p, struct err *e)
{
    const struct mapping *m = user;
    int ret = tensor_map(p->tensor, p->at, p->len, m->v, e);

    /* Of what comes behind nothing is known. */
    m->v->warm = m->v->warm && p->done + p->len == m->len;
    return ret;
}

static int view_map(struct reader *r, uint64_t off, size_t len, struct reader_iov *v,
                    struct err *e)
{
    struct mapping m = {v, len};

    if (off < r->view.header)
        return 0; /* the header lies in the index, not in memory */
    return view_parts(r, off, len, 0, map_part, &m, e);
}

static int vouch_part(void *user, const struct view_part *p, struct err *e)
{
    bool *gathers = user;

    (void)e;
    *gathers = *gathers || tensor_gathers(p->tensor, p->at, p->len);
    return tensor_vouches(p->tensor);
}

/* Of all must be told later whether it is unchanged; where some of it gathers, all is copied. */
static bool view_gathers(struct reader *r, uint64_t off, size_t len)
{
    struct err ignored = {0};
    bool gathers = false;

    return view_parts(r, off, len, view_head(r, off, len), vouch_part, &gathers,
                      &ignored) == 1 &&
           gathers;
}

static int check_part(void *user, const struct view_part *p, struct err *e)
{
    int ret = tensor_unchanged(p->tensor, p->at, p->len, e);

    (void)user;
    return ret < 0 ? ret : 1;
}

static int view_unchanged(struct reader *r, uint64_t off, size_t len, struct err *e)
{
    int ret = view_parts(r, off, len, view_head(r, off, len), check_part, NULL, e);

    return ret < 0 ? ret : 0;
}

/*
 * Members behind m that are packed whole: as many as there are threads are decoded side by
 * side while their reader is still in front of them.
 */
static void decode_members(struct reader *r, const struct view_member *m)
{
    const struct view_member *end = r->member + r->nmember;
    uint64_t room = r->env.decoded ? decoded_budget(r->env.decoded) / AHEAD_SHARE : 0;
    unsigned threads = r->env.pool ? pool_threads(r->env.pool) : 0;
    struct err ignored = {0};

    for (m++; threads > 0 && m < end && m->bytes <= room; threads--, m++) {
        CLEANUP(tensor_putp) struct tensor *t = NULL;

        if (member_tensor(r, m, &t, &ignored) < 0 || !tensor_decode_ahead(t))
            return;
        room -= m->bytes;
    }
}

static void view_will_need(struct reader *r, uint64_t off, uint64_t len)
{
    const struct view_member *packed = NULL;
    uint64_t end = off + len;
    struct err ignored = {0};

    off = MAX(off, r->view.header);
    /* Tensors that are not open yet: the next one only, opening costs too. */
    for (int opened = 0; off < end && r->nmember && opened < 2;) {
        const struct view_member *m = member_at(r, off);
        uint64_t part = MIN(end, m->at + m->bytes) - off;
        CLEANUP(tensor_putp) struct tensor *t = kept_find(r, m->ord);

        if (!t) {
            opened++;
            if (member_tensor(r, m, &t, &ignored) < 0)
                return;
        }
        tensor_will_need(t, off - m->at, part);
        off += part;
        /* Who has read half of one goes on to the next, more likely than not. */
        packed = off - m->at >= m->bytes / 2 && tensor_decode_ahead(t) ? m : NULL;
    }
    if (packed)
        decode_members(r, packed);
}

static const struct reader_kind kind_view = {
    .read = view_read,
    .map = view_map,
    .will_need = view_will_need,
    .gathers = view_gathers,
    .unchanged = view_unchanged,
};

/* Members must fill the file behind the header, each starting where the last one ends. */
static int check_members(const struct reader *r, struct err *e)
{
    uint64_t at = r->view.header;

    for (size_t i = 0; i < r->nmember; i++) {
        if (r->member[i].at != at || !r->member[i].bytes ||
            __builtin_add_overflow(at, r->member[i].bytes, &at))
            return err_set(e, EBADMSG, "the index disagrees with itself about %s",
                           r->view.name);
    }
    if (at != r->view.size)
        return err_set(e, EBADMSG,
                       "the index disagrees with itself about the size of %s",
                       r->view.name);
    return 0;
}

/* A view that is a file of the source. */
static int open_whole_file(const struct reader_env *env, int64_t checkpoint,
                           const struct view_info *view, struct reader **out,
                           struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct catalog_file file;
    struct source *src;
    int ret;

    if (!a)
        return err_nomem(e);
    ret =
        catalog_file(env->catalog, checkpoint, (uint32_t)view->whole_file, a, &file, e);
    if (ret == 0)
        ret = open_files_get(env->files, file.path, &file.id, &src, e);
    return ret < 0 ? ret : reader_open_source(src, out, e);
}

struct check_files {
    struct open_files *files;
    struct err *e;
};

static int check_file(void *user, const struct catalog_file *f)
{
    struct check_files *c = user;
    struct source *src;
    int ret;

    if (!f->storage)
        return 0;
    ret = open_files_get(c->files, f->path, &f->id, &src, c->e);
    if (ret == 0)
        source_put(src);
    return ret;
}

int reader_open_view(const struct reader_env *env, int64_t checkpoint,
                     const struct view_info *view, struct reader **out, struct err *e)
{
    CLEANUP(reader_closep) struct reader *r = NULL;
    struct check_files check = {.files = env->files, .e = e};
    int ret;

    if (view->fault)
        return err_set(e, EBADMSG, "%s: %s", view->name, view->fault);
    if (view->whole_file >= 0)
        return open_whole_file(env, checkpoint, view, out, e);
    ret = reader_new(&kind_view, &r, e);
    if (ret == 0)
        ret = catalog_files(env->catalog, checkpoint, check_file, &check, e);
    if (ret < 0)
        return ret;
    r->env = *env;
    r->checkpoint = checkpoint;
    r->view = *view;
    r->view.name = view->kind == VIEW_MODEL ? "the model view" : "the optimizer view";
    r->view.fault = NULL;
    r->size = view->size;
    ret = view_members(env->catalog, view, &r->member, &r->nmember, e);
    if (ret == 0)
        ret = check_members(r, e);
    if (ret < 0)
        return ret;
    *out = steal(&r);
    return 0;
}

/* ---- a source as it is ---- */

static int plain_read(struct reader *r, uint64_t off, size_t len, void *dst,
                      struct err *e)
{
    int ret = source_check(r->src, e);

    if (ret == 0)
        ret = source_read(r->src, off, len, dst, e);
    if (ret == 0)
        ret = source_check(r->src, e);
    return ret;
}

static int plain_map(struct reader *r, uint64_t off, size_t len, struct reader_iov *v,
                     struct err *e)
{
    const char *map = source_map(r->src);

    TRY(source_check(r->src, e));
    if (!map || !source_resident(r->src, off, len))
        return 0;
    return iov_add(v, map + off, len, r->src) ? 1 : 0;
}

static void plain_will_need(struct reader *r, uint64_t off, uint64_t len)
{
    if (!source_resident(r->src, off, (size_t)len))
        source_will_need(r->src, off, len);
}

static const struct reader_kind kind_source = {
    .read = plain_read,
    .map = plain_map,
    .will_need = plain_will_need,
};

int reader_open_source(struct source *src, struct reader **out, struct err *e)
{
    int ret = reader_new(&kind_source, out, e);

    if (ret < 0) {
        source_put(src);
        return ret;
    }
    (*out)->src = src;
    (*out)->size = src->size;
    return 0;
}
