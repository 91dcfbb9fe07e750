/* SPDX-License-Identifier: MIT */
/* index/formats/nanotron/nanotron_weights.c - the files of model/, put together to parameters. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/keyset.h"
#include "base/pool.h"
#include "base/vec.h"
#include "index/formats/format.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/formats/hf/safetensors_header.h"
#include "index/formats/nanotron/nanotron_priv.h"
#include "remote/source.h"

enum {
    MAX_DEPTH = 64, /* of directories; real ones: 10 */
    MAX_FILES = 4000000,
    MAX_WHY = 400,
};

static const char MODEL[] = "model";

/* ---- finding ---- */

/* A file without ranks stands before those with them. */
static int compare_ranks(const struct nano_ranks *x, const struct nano_ranks *y)
{
    if (x->tp.is != y->tp.is)
        return x->tp.is ? 1 : -1;
    if (x->tp.at != y->tp.at)
        return x->tp.at < y->tp.at ? -1 : 1;
    if (x->ep.at != y->ep.at)
        return x->ep.at < y->ep.at ? -1 : 1;
    return x->pp.at < y->pp.at ? -1 : x->pp.at > y->pp.at;
}

static int compare_names(const char *a, size_t a_len, const char *b, size_t b_len)
{
    int r = memcmp(a, b, MIN(a_len, b_len));

    return r ? r : (a_len > b_len) - (a_len < b_len);
}

static int compare_files(const void *a, const void *b)
{
    const struct nano_file *x = a, *y = b;
    int r = compare_names(x->name, x->len, y->name, y->len);

    return r ? r : compare_ranks(&x->rank, &y->rank);
}

void nano_learn_ranks(struct nano *n, const struct nano_ranks *rank)
{
    n->pp = MAX(n->pp, (uint64_t)rank->pp.of);
    n->tp = MAX(n->tp, (uint64_t)rank->tp.of);
    n->dp = MAX(n->dp, (uint64_t)rank->dp.of);
    n->ep = MAX(n->ep, (uint64_t)rank->ep.of);
}

/* "model/decoder/0/attn" and "weight": "decoder.0.attn.weight". */
static int make_name(struct nano *n, const char *dir, const char *last, size_t len,
                     struct nano_file *out, struct err *e)
{
    const char *rest = dir + sizeof MODEL - 1; /* "" or "/decoder/0/attn" */
    size_t skip = *rest == '/', dirs = strlen(rest) - skip;
    char *name = arena_alloc(n->arena, dirs + len + 2);

    if (!name)
        return err_nomem(e);
    memcpy(name, rest + skip, dirs);
    for (size_t i = 0; i < dirs; i++)
        if (name[i] == '/')
            name[i] = '.';
    if (dirs > 0)
        name[dirs++] = '.';
    memcpy(name + dirs, last, len);
    out->name = name;
    out->len = dirs + len;
    return 0;
}

static int add_file(struct nano *n, const char *dir, const char *name, struct err *e)
{
    struct nano_weight_name parsed;
    struct nano_file f = {0};
    char path[PATH_MAX];

    if (!nano_weight_name(name, &parsed))
        return 0;
    if (n->files == MAX_FILES)
        return err_set(e, EFBIG, "more than %d files of parameters", MAX_FILES);
    if (!VEC_ROOM(n->file, n->files, n->file_cap))
        return err_nomem(e);
    if (store_join(dir, name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir, name);
    f.rank = parsed.rank;
    f.path = arena_memdup(n->arena, path, strlen(path));
    if (!f.path)
        return err_nomem(e);
    TRY(make_name(n, dir, name + parsed.start, parsed.len, &f, e));
    nano_learn_ranks(n, &f.rank);
    n->file[n->files++] = f;
    return 0;
}

/* Directories still to be looked into. */
struct todo {
    char **dir; /* malloc */
    size_t count, cap;
};

static void todo_release(struct todo *t)
{
    for (size_t i = 0; i < t->count; i++)
        free(t->dir[i]);
    free(t->dir);
}

static int push(struct todo *t, const char *dir, const char *name, struct err *e)
{
    char path[PATH_MAX];

    if (store_join(dir, name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir, name);
    if (!VEC_ROOM(t->dir, t->count, t->cap))
        return err_nomem(e);
    t->dir[t->count] = strdup(path);
    return t->dir[t->count] ? (t->count++, 0) : err_nomem(e);
}

static unsigned depth_of(const char *dir)
{
    unsigned n = 0;

    for (; *dir; dir++)
        n += *dir == '/';
    return n;
}

static int look_into(struct nano *n, const char *dir, struct todo *todo, struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct store *store = n->c->store;
    char path[PATH_MAX];

    if (store_join(n->c->dir, dir, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", dir);
    TRY(sink_watch(n->sink, dir, e));
    TRY(store->ops->list(store, path, &l, e));
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        int r = 0;

        if (entry->st.kind == ENTRY_FILE)
            r = add_file(n, dir, entry->name, e);
        else if (entry->st.kind == ENTRY_DIR && !entry->st.is_link &&
                 depth_of(dir) < MAX_DEPTH)
            r = push(todo, dir, entry->name, e);
        if (r < 0)
            return r;
    }
    return 0;
}

static int find_files(struct nano *n, struct err *e)
{
    CLEANUP(todo_release) struct todo todo = {0};
    int r = push(&todo, "", MODEL, e);

    while (r == 0 && todo.count > 0) {
        CLEANUP_FREE char *dir = todo.dir[--todo.count];

        r = look_into(n, dir, &todo, e);
    }
    if (r < 0)
        return r;
    if (n->files == 0)
        return err_set(e, EBADMSG, "model/ holds no parameters");
    qsort(n->file, n->files, sizeof *n->file, compare_files);
    return 0;
}

/* ---- files of another save ---- */

static bool same_number(const struct nano_rank *a, const struct nano_rank *b)
{
    return !a->is || !b->is || a->of == b->of;
}

bool nano_same_save(const struct nano *n, const struct nano_ranks *rank)
{
    return !n->cut || (same_number(&n->cut->rank.pp, &rank->pp) &&
                       same_number(&n->cut->rank.tp, &rank->tp));
}

/*
 * A save writes over what is there, and the numbers of ranks are in the names: files of an
 * older one by other numbers stay. Both have the same slices, and neither is told to be the
 * checkpoint (checkpoint_metadata.json has no number of stages).
 */
static int check_saves(struct nano *n, struct err *e)
{
    const struct nano_file *experts = NULL;

    for (size_t i = 0; i < n->files; i++) {
        const struct nano_file *f = &n->file[i];

        if (!f->rank.tp.is)
            continue;
        n->cut = n->cut ? n->cut : f;
        experts = experts || !f->rank.ep.is ? experts : f;
        if (nano_same_save(n, &f->rank) &&
            (!experts || same_number(&experts->rank.ep, &f->rank.ep)))
            continue;
        err_set(e, ENOTSUP,
                "%s and %s are of saves by other numbers of ranks: which one is the "
                "checkpoint is not told",
                nano_same_save(n, &f->rank) ? experts->path : n->cut->path, f->path);
        return err_hint(e, "move the files of the older save away");
    }
    return 0;
}

/* ---- reading ---- */

static int copy_text(char **out, const char *text, struct err *e)
{
    *out = text ? strdup(text) : NULL;
    return text && !*out ? err_nomem(e) : 0;
}

static int take_header(struct nano_file *f, const struct safetensors_header *h,
                       struct err *e)
{
    const struct safetensors_tensor *t = safetensors_find(h, "data", 4);

    if (!t)
        return err_set(e, EBADMSG, "it holds no tensor \"data\"");
    f->dim = malloc((t->nd + 1) * sizeof *f->dim);
    if (!f->dim)
        return err_nomem(e);
    if (t->nd > 0)
        memcpy(f->dim, t->dim, t->nd * sizeof *f->dim);
    f->nd = t->nd;
    f->dtype = t->dtype;
    f->offset = h->data + t->begin;
    f->bytes = t->end - t->begin;
    TRY(copy_text(&f->version, h->nanotron_version, e));
    TRY(copy_text(&f->whole, h->nanotron_shape, e));
    return copy_text(&f->slices, h->nanotron_slices, e);
}

static int read_header(struct nano *n, struct nano_file *f, struct err *e)
{
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    CLEANUP(source_putp) struct source *src = NULL;
    char path[PATH_MAX];

    if (store_join(n->c->dir, f->path, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", f->path);
    if (n->c->store->ops->open(n->c->store, path, &src, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    if (!file_id_equal(&src->id, &f->id))
        return err_set(e, ESTALE, "%s was changed during the scan", path);
    if (safetensors_read(src, 0, src->size, &h, e) < 0 || take_header(f, &h, e) < 0)
        return err_wrap(e, "%s", path);
    return source_check(src, e);
}

/* pool_fn */
static int read_nth(void *user, size_t i, struct err *e)
{
    struct nano *n = user;
    struct nano_file *f = &n->file[i];
    struct err why = {0};

    if (f->missing || read_header(n, f, &why) == 0)
        return 0;
    if (safetensors_stops_scan(why.code)) {
        return err_copy(e, &why);
    }
    f->why = strndup(why.text, MAX_WHY);
    return f->why ? 0 : err_nomem(e);
}

static int read_files(struct nano *n, struct err *e)
{
    for (size_t i = 0; i < n->files; i++) {
        struct nano_file *f = &n->file[i];

        TRY(sink_file(n->sink, f->path, strlen(f->path), &f->number, e));
        f->missing = !sink_file_id(n->sink, f->number, &f->id);
    }
    return pool_each(n->c->pool, n->files, read_nth, n, e);
}

/* ---- parameters ---- */

static int group(struct nano *n, struct err *e)
{
    n->weight = calloc(n->files, sizeof *n->weight);
    if (!n->weight)
        return err_nomem(e);
    for (size_t i = 0; i < n->files; i++) {
        struct nano_file *f = &n->file[i];
        struct nano_weight *w = n->weights ? &n->weight[n->weights - 1] : NULL;

        if (!w || compare_names(w->name, w->len, f->name, f->len) != 0) {
            w = &n->weight[n->weights++];
            *w = (struct nano_weight){.name = f->name, .len = f->len, .file = f};
        }
        w->files++;
    }
    return 0;
}

static int compare_weights(const void *a, const void *b)
{
    const struct nano_weight *x = a, *y = b;

    return compare_names(x->name, x->len, y->name, y->len);
}

void nano_file_shape(const struct nano_file *f, struct shape *out)
{
    out->nd = f->nd;
    if (f->nd > 0)
        memcpy(out->dim, f->dim, f->nd * sizeof *f->dim);
}

const struct nano_weight *nano_weight_find(const struct nano *n, const char *name,
                                           size_t len)
{
    const struct nano_weight key = {.name = name, .len = len};

    return n->weights
               ? bsearch(&key, n->weight, n->weights, sizeof key, compare_weights)
               : NULL;
}

const struct nano_file *nano_weight_of(const struct nano_weight *w,
                                       const struct nano_ranks *rank)
{
    const struct nano_file *found = NULL;

    if (w->whole)
        return &w->file[0];
    for (size_t i = 0; i < w->files; i++) {
        const struct nano_ranks *r = &w->file[i].rank;

        if (r->tp.at != rank->tp.at || (r->ep.is && r->ep.at != rank->ep.at))
            continue;
        /* Tied parameters are in the files of one stage, and in optimizers of others. */
        if (!found || r->pp.at == rank->pp.at)
            found = &w->file[i];
    }
    return found;
}

/* What is wrong with a file, as words; false: nothing. */
static bool find_lack(const struct nano_file *f, char *why, size_t size)
{
    uint32_t version = f->version ? nano_version(f->version) : 0;

    if (f->missing)
        snprintf(why, size, "%s is missing", f->path);
    else if (f->why)
        snprintf(why, size, "%s", f->why);
    else if (!f->rank.tp.is)
        return false;
    else if (!f->whole || !f->slices || !f->version)
        snprintf(why, size,
                 "%s does not say which slice it is: versions before 1.2 are not "
                 "supported",
                 f->path);
    else if (version < NANO_OLDEST || version > NANO_NEWEST)
        snprintf(why, size, "%s is of version %.40s: 1.2 to 1.5 are supported", f->path,
                 f->version);
    else
        return false;
    return true;
}

/* The shape of the whole, as every file must tell it. */
static int learn_shape(struct nano *n, struct nano_weight *w, const struct nano_file *f,
                       char *why, size_t size, struct err *e)
{
    struct shape shape;

    nano_file_shape(f, &shape);
    if (f->rank.tp.is && !nano_shape(f->whole, &shape)) {
        snprintf(why, size, "%s: unsharded_shape \"%.100s\" is no shape", f->path,
                 f->whole);
        return 0;
    }
    if (!w->shaped) {
        w->shape = arena_alloc(n->arena, sizeof *w->shape);
        if (!w->shape)
            return err_nomem(e);
        *w->shape = shape;
        w->dtype = f->dtype;
        w->shaped = true;
    } else if (!shape_equal(&shape, w->shape) || f->dtype != w->dtype) {
        snprintf(why, size, "%s tells of another shape or type than %s", f->path,
                 w->file[0].path);
    }
    return 0;
}

static int place(struct nano *n, struct nano_weight *w, struct nano_file *f, char *why,
                 size_t size, struct err *e)
{
    struct shape local;
    struct err bad = {0};
    int r;

    nano_file_shape(f, &local);
    TRY(learn_shape(n, w, f, why, size, e));
    if (why[0])
        return 0;
    r = f->rank.tp.is
            ? nano_slices(f->slices, &local, w->shape, n->arena, &f->boxes, &bad)
            : rank_boxes_all(n->arena, &local, &f->boxes, &bad);
    if (r < 0 && bad.code != ENOMEM) {
        snprintf(why, size, "%.200s: %.300s", f->path, bad.text);
        return 0;
    }
    if (r < 0)
        return err_nomem(e);
    f->placed = true;
    return 0;
}

/* Begins a slice of `b` before the same one of `a`, in any dimension? */
static bool begins_before(const struct nano_file *a, const struct nano_file *b)
{
    for (size_t i = 0; i < MIN(a->boxes.count, b->boxes.count); i++)
        for (uint32_t k = 0; k < a->boxes.nd && k < b->boxes.nd; k++)
            if (b->boxes.box[i].to[k] < a->boxes.box[i].to[k])
                return true;
    return false;
}

/*
 * nanotron cuts in the order of the ranks (parallel/sharded_parameters.py of 1.2 to 1.5): of
 * two neighbours the later one has the later slices. Where the files say otherwise they were
 * exchanged: weights go where their own slices say, but which rank's optimizer is about which
 * slice is not to be told any more.
 */
static bool is_jumbled(const struct nano_weight *w)
{
    const struct nano_file *first = NULL, *last = NULL; /* of a tensor rank */

    for (size_t i = 0; i < w->files; i++) {
        const struct nano_file *f = &w->file[i];

        if (!f->placed || !f->rank.tp.is)
            continue;
        if (first && first->rank.tp.at == f->rank.tp.at) {
            if (last->rank.ep.at < f->rank.ep.at && begins_before(last, f))
                return true;
        } else {
            if (first && first->rank.ep.at == f->rank.ep.at && begins_before(first, f))
                return true;
            first = f;
        }
        last = f;
    }
    return false;
}

/* Puts every file at its place; *why: the first thing that is wrong. */
static int place_files(struct nano *n, struct nano_weight *w, char *why, size_t size,
                       struct err *e)
{
    for (size_t i = 0; i < w->files; i++) {
        char text[MAX_WHY + 200] = "";

        if (!find_lack(&w->file[i], text, sizeof text))
            TRY(place(n, w, &w->file[i], text, sizeof text, e));
        if (!why[0])
            snprintf(why, size, "%s", text);
    }
    w->whole = !w->file[0].rank.tp.is;
    w->jumbled = is_jumbled(w);
    if (w->whole && w->files > 1 && !why[0])
        snprintf(why, size, "%s holds all of it, and %s a piece", w->file[0].path,
                 w->file[1].path);
    return 0;
}

/* ---- reporting ---- */

int nano_boxes_key(const struct rank_boxes *b, struct buf *out, struct err *e)
{
    buf_clear(out);
    for (size_t i = 0; i < b->count; i++) {
        buf_add(out, b->box[i].to, b->nd * sizeof(uint64_t));
        buf_add(out, b->box[i].size, b->nd * sizeof(uint64_t));
    }
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int report_file(struct nano *n, const struct nano_file *f, struct err *e)
{
    int64_t step[SHAPE_MAX_DIMS];
    struct chunk c = {
        .file = f->number, .offset = f->offset, .length = f->bytes, .step = step};
    uint64_t row = 1;

    for (uint32_t k = f->nd; k-- > 0; row *= f->dim[k])
        step[k] = (int64_t)row;
    return rank_boxes_report(n->sink, &f->boxes, &c, e);
}

/* A rank of which there is no file at all: for the words of a hole. */
static bool find_absent(const struct nano_weight *w, char *why, size_t size)
{
    const struct nano_ranks *r = &w->file[0].rank;
    uint32_t tps = r->tp.of, eps = r->ep.is ? r->ep.of : 1;

    if (!r->tp.is || (uint64_t)tps * eps > w->files * (uint64_t)16)
        return false;
    for (uint32_t t = 0; t < tps; t++)
        for (uint32_t p = 0; p < eps; p++) {
            struct nano_ranks want = {.tp = {.at = t}, .ep = {.at = p}};

            if (nano_weight_of(w, &want))
                continue;
            snprintf(why, size,
                     "there is no file of tensor rank %" PRIu32 " of %" PRIu32
                     ", expert rank %" PRIu32 " of %" PRIu32,
                     t, tps, p, eps);
            return true;
        }
    return false;
}

/* Copies (ranks that have the same slice) are left out. */
static int report_files(struct nano *n, const struct nano_weight *w, struct err *e)
{
    CLEANUP(keyset_release) struct keyset seen = {0};
    CLEANUP(buf_release) struct buf key = {0};

    for (size_t i = 0; i < w->files; i++) {
        int r;

        TRY(nano_boxes_key(&w->file[i].boxes, &key, e));
        r = keyset_add(&seen, key.len ? key.data : "", key.len);
        if (r < 0)
            return err_nomem(e);
        if (r > 0)
            TRY(report_file(n, &w->file[i], e));
    }
    return 0;
}

static int report_weight(struct nano *n, struct nano_weight *w, struct err *e)
{
    static const struct shape none = {.nd = 1};
    char why[MAX_WHY + 200] = "";
    struct sink_tensor t = {.key = w->name, .key_len = w->len, .role = ROLE_MODEL};

    TRY(place_files(n, w, why, sizeof why, e));
    t.dtype = w->shaped ? w->dtype : DTYPE_U8;
    t.shape = w->shaped ? w->shape : &none;
    if (!why[0])
        find_absent(w, why, sizeof why);
    if (!why[0] && dtype_bits(t.dtype) % 8 != 0 && !w->whole)
        snprintf(why, sizeof why, "slices of elements that share bytes");
    if (!why[0] && w->whole)
        return sink_tensor_plain(n->sink, &t, w->file[0].number, w->file[0].offset, e);
    TRY(sink_tensor_begin(n->sink, &t, e));
    if (why[0] && sink_fault(n->sink, "%s", why) < 0)
        return err_nomem(e);
    if (!why[0])
        TRY(report_files(n, w, e));
    return sink_tensor_end(n->sink, e);
}

int nano_weights_report(struct nano *n, struct err *e)
{
    TRY(find_files(n, e));
    TRY(check_saves(n, e));
    TRY(read_files(n, e));
    TRY(group(n, e));
    for (size_t i = 0; i < n->weights; i++)
        TRY(report_weight(n, &n->weight[i], e));
    return 0;
}

void nano_weights_release(struct nano *n)
{
    for (size_t i = 0; i < n->files; i++) {
        free(n->file[i].dim);
        free(n->file[i].version);
        free(n->file[i].whole);
        free(n->file[i].slices);
        free(n->file[i].why);
    }
    free(n->file);
    free(n->weight);
}
