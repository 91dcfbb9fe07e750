/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/torch_checkpointing.c - Meta's torch_checkpointing: a file an item and rank. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/keyset.h"
#include "index/formats/format.h"
#include "index/formats/hf/safetensors_layout.h"
#include "index/formats/rankfiles/checkpointing_metadata.h"
#include "index/formats/rankfiles/optim_names.h"
#include "index/formats/rankfiles/rank_set.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_walk.h"
#include "index/names.h"
#include "remote/source.h"

enum {
    HEAD = 4096,          /* the first item's keys, or all where there is none */
    MAX_MEMORY = 1 << 30, /* of metadata and boxes */
    MAX_ITEM_NAME = 200,  /* of an item that only names of files tell */
};

static const char METADATA[] = "metadata.pkl";
static const char MODEL[] = "model";

/* ---- bids ---- */

static bool has(const char *head, size_t len, const char *text)
{
    return memmem(head, len, text, strlen(text)) != NULL;
}

/* Version and ranks stand at its end: seen where there are no items at all. */
static void checkpointing_bid(struct listing *l, struct bid *out)
{
    const struct listing_entry *entry = listing_find(l, METADATA);
    char head[HEAD];
    size_t got = 0;

    *out = (struct bid){0};
    if (!entry || entry->st.kind != ENTRY_FILE ||
        listing_peek(l, METADATA, head, sizeof head, &got) < 0 || got == 0 ||
        head[0] != '\x80' || !has(head, got, "metadata") ||
        !(has(head, got, "nested_path_to_metadata") ||
          has(head, got, "rank_to_layout_info") ||
          (has(head, got, "world_size") && has(head, got, "version"))))
        return;
    out->score = 93;
    snprintf(out->reason, sizeof out->reason, "%s of torch_checkpointing", METADATA);
}

/* ---- the scan ---- */

/* What the tensors of an item are. */
enum kind { KIND_MODEL, KIND_OPTIMIZER, KIND_OWN };

struct item {
    const char *key;
    const struct checkpointing_item *told; /* NULL: metadata.pkl does not have it */
    enum kind kind;
    struct rank_set *set;
    uint32_t *rank; /* arena; of each file of the set */
    size_t files;
    bool ordered; /* the order of its tensors is that of its state dict */
};

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct arena *arena;
    struct pickle *pickle;
    struct checkpointing_metadata metadata;
    struct item *item; /* malloc */
    size_t items;
    bool has_model; /* an item of that name is there */
    struct optim_names names;
};

static void scan_release(struct scan *s)
{
    for (size_t i = s->items; i-- > 0;)
        rank_set_free(s->item[i].set);
    optim_names_release(&s->names);
    free(s->item);
    pickle_free(s->pickle);
    arena_free(s->arena);
}

static int read_metadata(struct scan *s, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    char path[PATH_MAX];
    struct pv root;
    uint64_t used;

    TRY(sink_hide(s->sink, METADATA, true, e));
    if (store_join(s->c->dir, METADATA, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", s->c->dir);
    TRY(s->c->store->ops->open(s->c->store, path, &src, e));
    if (pickle_load(src, 0, src->size, NULL, &s->pickle, &used, e) < 0)
        return err_wrap(e, "%s", METADATA);
    root = pickle_root(s->pickle);
    if (checkpointing_metadata_read(&root, used, s->arena, &s->metadata, e) < 0)
        return err_wrap(e, "%s", METADATA);
    return source_check(src, e);
}

/* ---- items ---- */

/*
 * "model" is the model. Where no item has that name, the ones of which CONTRACT.md's words say
 * no other role are.
 */
static enum kind kind_of(const struct scan *s, const char *key)
{
    if (strcmp(key, MODEL) == 0)
        return KIND_MODEL;
    switch (role_of(key, key, strlen(key))) {
    case ROLE_OPTIMIZER:
        return KIND_OPTIMIZER;
    case ROLE_MODEL:
        return s->has_model ? KIND_OWN : KIND_MODEL;
    case ROLE_OTHER:
        break;
    }
    return KIND_OWN;
}

static struct item *item_of(struct scan *s, const char *key, size_t len)
{
    for (size_t i = 0; i < s->items; i++)
        if (strncmp(s->item[i].key, key, len) == 0 && s->item[i].key[len] == '\0')
            return &s->item[i];
    return NULL;
}

static int add_item(struct scan *s, const char *key, size_t len,
                    const struct checkpointing_item *told, struct err *e)
{
    struct item *grown = reallocarray(s->item, s->items + 1, sizeof *grown), *x;

    if (!grown)
        return err_nomem(e);
    s->item = grown;
    x = &s->item[s->items++];
    *x = (struct item){.told = told, .ordered = true};
    x->key = arena_memdup(s->arena, key, len);
    x->rank = arena_array(s->arena, (size_t)s->metadata.world + 1, sizeof *x->rank);
    return x->key && x->rank ? 0 : err_nomem(e);
}

/* "dataloader_12.pt", of a rank that there is; false: no file of a rank. */
struct file_name {
    size_t item_len;
    uint32_t rank;
    bool safetensors;
};

static bool file_name(const char *name, uint32_t world, struct file_name *out)
{
    const char *dot = strrchr(name, '.'), *p = dot;
    uint64_t rank = 0;

    if (!dot)
        return false;
    out->safetensors = strcmp(dot, ".safetensors") == 0;
    if (!out->safetensors && strcmp(dot, ".pt") != 0)
        return false;
    while (p > name && p[-1] >= '0' && p[-1] <= '9')
        p--;
    if (p == dot || dot - p > 6 || (*p == '0' && dot - p > 1) || p - name < 2 ||
        p[-1] != '_' || p - 1 - name > MAX_ITEM_NAME)
        return false;
    for (const char *d = p; d < dot; d++)
        rank = rank * 10 + (uint64_t)(*d - '0');
    out->rank = (uint32_t)rank;
    out->item_len = (size_t)(p - 1 - name);
    return rank < world;
}

/* Items that no item of metadata.pkl is, by the names that files have by default. */
static int find_untold(struct scan *s, struct err *e)
{
    CLEANUP(keyset_release) struct keyset seen = {0};
    struct file_name x;

    for (size_t i = 0; i < s->items; i++)
        if (keyset_add(&seen, s->item[i].key, strlen(s->item[i].key)) < 0)
            return err_nomem(e);
    for (size_t i = 0; i < listing_count(s->c->listing); i++) {
        const struct listing_entry *entry = listing_at(s->c->listing, i);
        int r;

        if (entry->st.kind != ENTRY_FILE ||
            !file_name(entry->name, s->metadata.world, &x))
            continue;
        r = keyset_add(&seen, entry->name, x.item_len);
        if (r < 0)
            return err_nomem(e);
        if (r > 0)
            TRY(add_item(s, entry->name, x.item_len, NULL, e));
    }
    return 0;
}

static int find_items(struct scan *s, struct err *e)
{
    const struct checkpointing_metadata *m = &s->metadata;

    for (size_t i = 0; i < m->items; i++)
        TRY(add_item(s, m->item[i].key, strlen(m->item[i].key), &m->item[i], e));
    TRY(find_untold(s, e));
    s->has_model = item_of(s, MODEL, strlen(MODEL));
    for (size_t i = 0; i < s->items; i++)
        s->item[i].kind = kind_of(s, s->item[i].key);
    return 0;
}

/* ---- one item's files ---- */

static int add_file(struct scan *s, struct item *x, const char *path, uint32_t rank,
                    bool safetensors, struct err *e)
{
    const char *slash = strchr(path, '/');
    char top[NAME_MAX_BYTES + 1];

    /* One folder a rank: machinery, not a directory of the user's. */
    if (slash && (size_t)(slash - path) < sizeof top) {
        snprintf(top, sizeof top, "%.*s", (int)(slash - path), path);
        if (listing_sub(s->c->listing, top))
            TRY(sink_part(s->sink, top, e));
    }
    x->rank[x->files++] = rank;
    x->ordered &= !safetensors;
    return safetensors ? rank_set_add_safetensors(x->set, path, e)
                       : rank_set_add(x->set, path, e);
}

/* Has the rank anything of the item, as metadata tell? */
static bool is_rank_of(const struct checkpointing_item *item, uint32_t rank)
{
    for (size_t i = 0; i < item->paths; i++)
        for (size_t k = 0; k < item->path[i].groups; k++)
            if (checkpointing_has_rank(item->path[i].group[k].ranks, rank))
                return true;
    return false;
}

/* A rank without a layout has ITEM_RANK.pt, or nothing of the item. */
static int add_told(struct scan *s, struct item *x, struct err *e)
{
    for (uint32_t i = 0; i < s->metadata.world; i++) {
        const struct checkpointing_file *f = &x->told->file[i];
        char name[NAME_MAX_BYTES + 1];
        const char *path = f->path;

        if (f->format == CHECKPOINTING_OTHER)
            continue;
        if (f->format == CHECKPOINTING_UNTOLD) {
            if ((size_t)snprintf(name, sizeof name, "%s_%" PRIu32 ".pt", x->key, i) >=
                sizeof name)
                return err_set(e, EBADMSG, "%s: an item of a long name", METADATA);
            if (!listing_find(s->c->listing, name) && !is_rank_of(x->told, i))
                continue;
            path = name;
        }
        TRY(add_file(s, x, path, i, f->format == CHECKPOINTING_SAFETENSORS, e));
    }
    return 0;
}

static int compare_files(const void *a, const void *b)
{
    const struct file_name *x = a, *y = b;

    return x->rank != y->rank ? (x->rank < y->rank ? -1 : 1)
                              : x->safetensors - y->safetensors;
}

static int add_untold(struct scan *s, struct item *x, struct err *e)
{
    CLEANUP_FREE struct file_name *found =
        calloc(listing_count(s->c->listing) + 1, sizeof *found);
    size_t n = 0, len = strlen(x->key);

    if (!found)
        return err_nomem(e);
    for (size_t i = 0; i < listing_count(s->c->listing); i++) {
        const struct listing_entry *entry = listing_at(s->c->listing, i);

        if (entry->st.kind == ENTRY_FILE &&
            file_name(entry->name, s->metadata.world, &found[n]) &&
            found[n].item_len == len && memcmp(entry->name, x->key, len) == 0)
            n++;
    }
    qsort(found, n, sizeof *found, compare_files);
    for (size_t i = 0; i < n; i++) {
        char name[MAX_ITEM_NAME + 32];

        /* One of each kind: which of them the rank saved last nothing tells. */
        if (i > 0 && found[i].rank == found[i - 1].rank)
            return err_set(e, ENOTSUP,
                           "%s_%" PRIu32 " is there as .pt and .safetensors", x->key,
                           found[i].rank);
        snprintf(name, sizeof name, "%s_%" PRIu32 "%s", x->key, found[i].rank,
                 found[i].safetensors ? ".safetensors" : ".pt");
        TRY(add_file(s, x, name, found[i].rank, found[i].safetensors, e));
    }
    return 0;
}

/* ---- one item's tensors ---- */

struct load {
    struct scan *s;
    struct item *x;
};

/* rank_set_how.rename: the item itself has no path, and optimizers' numbers get names. */
static int rename_path(void *user, const char *path, size_t len, struct buf *key)
{
    const struct load *l = user;

    if (len == 0)
        return buf_adds(key, l->x->key) < 0 ? -ENOMEM : 0;
    if (l->x->kind == KIND_OPTIMIZER)
        return optim_names_rename(&l->s->names, path, len, key);
    return buf_add(key, path, len) < 0 ? -ENOMEM : 0;
}

/* rank_set_how.place, of an item that is the model by its place alone */
static void place_by_key(void *user, const char *path, size_t len,
                         struct rank_set_place *out)
{
    const struct load *l = user;

    out->role = role_of(l->x->key, path, len);
}

/* What a rank's tensor is: 1 and its part, 0: nothing tells, negative: *why says it. */
static int part_of(const struct load *l, uint32_t file, const char *path, size_t len,
                   struct arena *a, struct checkpointing_part *out, struct err *why)
{
    const struct checkpointing_path *p =
        l->x->told ? checkpointing_find(l->x->told, path, len) : NULL;

    if (!a)
        return err_nomem(why);
    return p ? checkpointing_part(&l->s->metadata, p, l->x->rank[file], a, out, why)
             : 0;
}

/* rank_set_how.on_tensor */
static int place_tensor(void *user, uint32_t file, const struct torch_item *item,
                        struct err *e)
{
    const struct load *l = user;
    CLEANUP(arena_freep) struct arena *a = arena_new(MAX_MEMORY);
    struct rank_set *set = l->x->set;
    struct checkpointing_part part;
    struct rank_set_boxes boxes;
    struct err why = {0};
    int r = part_of(l, file, item->key, item->key_len, a, &part, &why);

    if (why.code == ENOMEM)
        return err_nomem(e);
    if (r < 0)
        return rank_set_fault(set, file, item->key, item->key_len, why.text, e);
    if (r == 0) {
        /* A rank that is not of the tensor's mesh has an empty part, and no metadata. */
        if (l->x->told && checkpointing_find(l->x->told, item->key, item->key_len))
            return 0;
        if (l->x->told && !item->value)
            return rank_set_fault(set, file, item->key, item->key_len,
                                  "metadata.pkl does not tell which part of a tensor "
                                  "it is",
                                  e);
        return rank_set_plain(set, file, item->key, item->key_len, item, e);
    }
    if (!item->tensor)
        return rank_set_fault(set, file, item->key, item->key_len, item->why, e);
    boxes = (struct rank_set_boxes){.path = item->key,
                                    .len = item->key_len,
                                    .dtype = part.dtype,
                                    .shape = &part.whole,
                                    .x = item->tensor,
                                    .boxes = &part.boxes,
                                    .exact = part.exact};
    return rank_set_boxes(set, file, &boxes, e);
}

/* rank_set_how.doubt: a DTensor and the metadata tell the same twice. */
static const char *doubt(void *user, uint32_t file, const struct rank_set_piece *p)
{
    const struct load *l = user;
    CLEANUP(arena_freep) struct arena *a = arena_new(MAX_MEMORY);
    struct checkpointing_part part;
    struct err why = {0};
    int r = part_of(l, file, p->path, p->len, a, &part, &why);
    uint32_t nd = p->shape->nd;

    if (r == 0)
        return NULL;
    if (r < 0)
        return "metadata.pkl tells of it what cannot be used";
    if (part.dtype != p->dtype || !shape_equal(&part.whole, p->shape) ||
        part.boxes.count != 1)
        return "metadata.pkl tells another shape or type";
    for (uint32_t k = 0; k < nd; k++)
        if (part.boxes.box[0].to[k] != p->start[k] ||
            part.boxes.box[0].size[k] != p->x->shape.dim[k])
            return "metadata.pkl tells another part of it for this rank";
    return NULL;
}

/* rank_set_how.on_read: what metadata.pkl has, some file should have. */
static int require_told(void *user, struct rank_set *set, struct err *e)
{
    const struct load *l = user;

    for (size_t i = 0; i < l->x->told->paths; i++)
        TRY(rank_set_require(set, l->x->told->path[i].path, l->x->told->path[i].len,
                             e));
    return 0;
}

/* rank_set_how.on_first of an optimizer */
static int find_names(void *user, const struct torch_file *f, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0}, json = {0};
    const struct load *l = user;
    struct scan *s = l->s;
    const struct item *model = item_of(s, MODEL, strlen(MODEL));
    struct pv root = torch_zip_root(f->zip);

    TRY(optim_names_find(&s->names, model && model->ordered ? model->set : NULL,
                         l->x->set, &root, e));
    if (s->names.count == 0)
        return 0;
    buf_addf(&key, "%s:index_to_name", l->x->key);
    if (buf_failed(&key) || optim_names_json(&s->names, &json) < 0)
        return err_nomem(e);
    return sink_object(s->sink, key.data, key.len, json.data, json.len, e);
}

/* Only files of tensors can be read: what JSON or raw bytes should hold is told. */
static int tell_other(struct scan *s, const struct item *x, struct err *e)
{
    static const struct shape none = {.nd = 1};

    for (size_t i = 0; x->told && i < x->told->paths; i++) {
        const struct checkpointing_path *p = &x->told->path[i];
        struct sink_tensor t = {.key = p->path,
                                .key_len = p->len,
                                .part = x->key,
                                .dtype = DTYPE_U8,
                                .shape = &none,
                                .role = ROLE_OTHER};

        if (p->twice && i > 0 && x->told->path[i - 1].twice)
            continue;
        TRY(sink_tensor_begin(s->sink, &t, e));
        if (sink_fault(s->sink, "item %s is in files of JSON or bytes", x->key) < 0)
            return err_nomem(e);
        TRY(sink_tensor_end(s->sink, e));
    }
    return 0;
}

/* What is wrong with the files of one item is no reason to hide the others. */
static int load_item(struct scan *s, struct item *x, const struct rank_set_how *how,
                     struct err *e)
{
    struct err why = {0};

    TRY(rank_set_new(s->c, s->sink, how, &x->set, e));
    TRY(x->told ? add_told(s, x, e) : add_untold(s, x, e));
    if (x->files == 0)
        return tell_other(s, x, e);
    if (!x->told && x->kind != KIND_OWN)
        rank_set_expect(x->set, s->metadata.world - x->files);
    if (rank_set_load(x->set, &why) == 0)
        return rank_set_report(x->set, e);
    if (x->kind == KIND_MODEL || !torch_file_is_damaged(why.code)) {
        return err_copy(e, &why);
    }
    return 0; /* each of its files was told */
}

static int report_item(struct scan *s, struct item *x, struct err *e)
{
    CLEANUP(buf_release) struct buf object = {0};
    struct load l = {s, x};
    bool model = strcmp(x->key, MODEL) == 0;
    struct rank_set_how how = {
        .part = model ? NULL : x->key,
        .role = x->kind == KIND_MODEL       ? ROLE_MODEL
                : x->kind == KIND_OPTIMIZER ? ROLE_OPTIMIZER
                                            : ROLE_OTHER,
        .optimizer = x->kind == KIND_OPTIMIZER,
        .own = x->kind == KIND_OWN,
        .rename = rename_path,
        .on_tensor = place_tensor,
        .doubt = x->told ? doubt : NULL,
        .on_read = x->told ? require_told : NULL,
        .on_first = x->kind == KIND_OPTIMIZER ? find_names : NULL,
        .place = x->kind == KIND_MODEL && !model ? place_by_key : NULL,
        .user = &l,
    };

    buf_addf(&object, "%s:", x->key);
    if (buf_failed(&object))
        return err_nomem(e);
    how.object = model ? NULL : object.data;
    if (x->kind == KIND_OPTIMIZER)
        optim_names_release(&s->names);
    return load_item(s, x, &how, e);
}

/* The model first: optimizers are named after it. */
static int report_items(struct scan *s, struct err *e)
{
    for (int kind = KIND_MODEL; kind <= KIND_OWN; kind++)
        for (size_t i = 0; i < s->items; i++)
            if ((int)s->item[i].kind == kind)
                TRY(report_item(s, &s->item[i], e));
    return 0;
}

/* ---- the checkpoint ---- */

/*
 * Its consolidation writes full tensors for Hugging Face beside the ranks' files, as
 * ITEM-0000K-of-0000N.safetensors and an index: shards win, verify compares.
 */
static int hide_copies(struct scan *s, struct err *e)
{
    struct listing *l = s->c->listing;
    struct safetensors_number number;

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;
        size_t len = strlen(name);

        if (len > 23 && strcmp(name + len - 23, ".safetensors.index.json") == 0) {
            TRY(sink_hide(s->sink, name, false, e));
        } else if (safetensors_is_named(l, name) &&
                   safetensors_numbered(name, &number) &&
                   item_of(s, name, number.stem_len) &&
                   sink_copy(s->sink, name, e) < 0) {
            return -e->code;
        }
    }
    return 0;
}

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    char path[PATH_MAX];
    struct sink_checkpoint about = {
        .format = "torch-checkpointing", .framework = "PyTorch", .metadata_file = path};

    if (store_join(s->c->dir, METADATA, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", s->c->dir);
    about.has_step = step_of_name(listing_name(s->c->listing), &about.step);
    if (s->metadata.world > 0) {
        buf_addf(&topology, "{\"ranks\": %" PRIu32 "}", s->metadata.world);
        if (buf_failed(&topology))
            return err_nomem(e);
        about.topology = topology.data;
    }
    return sink_checkpoint(s->sink, &about, e);
}

static int checkpointing_scan(const struct scan_context *c, struct sink *sink,
                              struct err *e)
{
    CLEANUP(scan_release)
    struct scan s = {.c = c, .sink = sink, .arena = arena_new(MAX_MEMORY)};

    /* First without what the file tells: also a scan that fails has a format. */
    if (!s.arena)
        return err_nomem(e);
    TRY(tell_checkpoint(&s, e));
    TRY(read_metadata(&s, e));
    TRY(tell_checkpoint(&s, e));
    TRY(find_items(&s, e));
    TRY(report_items(&s, e));
    return hide_copies(&s, e);
}

static const struct chunk_codec *const checkpointing_codecs[] = {&codec_zip_deflate,
                                                                 NULL};

const struct format_driver format_torch_checkpointing = {
    .name = "torch_checkpointing",
    .title = "torch_checkpointing: a torch.save or safetensors file an item and rank",
    .bid = checkpointing_bid,
    .scan = checkpointing_scan,
    .codecs = checkpointing_codecs,
};
