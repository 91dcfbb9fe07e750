/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_scan.c - a DCP directory: its metadata loaded, its content reported. */
#include "index/formats/dcp/dcp_scan.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/vec.h"
#include "index/formats/dcp/dcp_experts.h"
#include "index/formats/dcp/torch_dcp.h"
#include "index/sink.h"
#include "remote/source.h"

/* Names. */

/* A decimal number without leading zeros at *p, which moves behind it. */
static bool take_number(const char **p, uint64_t *out)
{
    const char *start = *p;

    *out = 0;
    while (isdigit((unsigned char)**p) && *p - start < 18)
        *out = *out * 10 + (uint64_t)(*(*p)++ - '0');
    return *p > start && (*start != '0' || *p == start + 1);
}

/* "__3.metadata" */
static bool is_rank_metadata(const char *name, uint64_t *rank)
{
    if (strncmp(name, "__", 2) != 0)
        return false;
    name += 2;
    return take_number(&name, rank) && strcmp(name, ".metadata") == 0;
}

/* "__3_0.distcp": only a convention, used to count ranks. */
static bool is_rank_file(const char *name, uint64_t *rank)
{
    uint64_t n;

    if (strncmp(name, "__", 2) != 0)
        return false;
    name += 2;
    return take_number(&name, rank) && *name++ == '_' && take_number(&name, &n) &&
           strcmp(name, ".distcp") == 0;
}

static bool is_distcp(const char *name)
{
    size_t len = strlen(name);

    return len > 7 && strcmp(name + len - 7, ".distcp") == 0;
}

static bool is_file(const struct listing_entry *entry)
{
    return entry && entry->st.kind == ENTRY_FILE;
}

/* The first file whose name fits. */
static const char *find_name(const struct listing *l, bool (*fits)(const char *name))
{
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (is_file(entry) && fits(entry->name))
            return entry->name;
    }
    return NULL;
}

static bool fits_rank_metadata(const char *name)
{
    uint64_t rank;

    return is_rank_metadata(name, &rank);
}

const char *dcp_metadata_name(const struct listing *l)
{
    return is_file(listing_find(l, ".metadata")) ? ".metadata"
                                                 : find_name(l, fits_rank_metadata);
}

bool dcp_has_distcp(const struct listing *l)
{
    return find_name(l, is_distcp);
}

/* Files. */

const char *dcp_path_text(const struct dcp_scan *s, uint32_t path, struct buf *b)
{
    size_t len;
    const char *text = intern_get(&s->names.paths, path, &len);

    buf_add_json(b, text, MIN(len, (size_t)256));
    return buf_failed(b) ? "" : b->data;
}

/* A name in our directory as the sink wants it: relative to the checkpoint's. */
static const char *sink_name(struct dcp_scan *s, const char *name, size_t len,
                             struct err *e)
{
    buf_clear(&s->text);
    buf_adds(&s->text, s->prefix);
    buf_add(&s->text, name, len);
    if (!buf_failed(&s->text))
        return s->text.data;
    err_nomem(e);
    return NULL;
}

int dcp_file_register(struct dcp_scan *s, uint32_t path, const struct dcp_file **out,
                      struct err *e)
{
    struct dcp_file *file = &s->file[path];
    const char *text;
    size_t len;

    *out = file;
    if (file->registered)
        return 0;
    text = intern_get(&s->names.paths, path, &len);
    file->safe = store_name_is_safe(text, len);
    if (file->safe) {
        text = sink_name(s, text, len, e);
        if (!text || sink_file(s->sink, text, s->text.len, &file->number, e) < 0)
            return -e->code;
    }
    file->registered = true;
    return 0;
}

/* `name` in our directory. */
static int open_in_dir(const struct dcp_scan *s, const char *name, struct source **out,
                       struct err *e)
{
    char path[PATH_MAX];

    if (store_join(s->c->dir, name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", s->c->dir, name);
    return s->c->store->ops->open(s->c->store, path, out, e);
}

int dcp_file_open(const struct dcp_scan *s, uint32_t path, struct source **out,
                  struct err *e)
{
    CLEANUP(buf_release) struct buf b = {0};
    CLEANUP_FREE char *name = NULL;
    size_t len;
    const char *text = intern_get(&s->names.paths, path, &len);

    if (!store_name_is_safe(text, len))
        return err_set(e, EBADMSG, "file name %s leads out of the checkpoint",
                       dcp_path_text(s, path, &b));
    name = strndup(text, len);
    return name ? open_in_dir(s, name, out, e) : err_nomem(e);
}

const char *dcp_stored_fault(const struct dcp_scan *s, const struct dcp_stored *stored,
                             struct buf *b)
{
    const char *text;
    size_t len;

    switch (stored->bad) {
    case DCP_GOOD:
        return NULL;
    case DCP_BAD_PATH:
        return "its relative_path is no string";
    case DCP_BAD_OFFSET:
        return "its offset in the file is no integer from 0 on";
    case DCP_BAD_LENGTH:
        return "its length in the file is no integer from 0 on";
    case DCP_BAD_TRANSFORM:
        text = intern_get(&s->names.words, stored->word, &len);
        buf_adds(b, "it was transformed by ");
        buf_add_json(b, text, MIN(len, (size_t)256));
        buf_adds(b, ", which is not supported");
        return buf_failed(b) ? "it was transformed in an unknown way" : b->data;
    default:
        return "its entry in storage_data is no _StorageInfo";
    }
}

/* Loading. */

static int load_part(struct dcp_scan *s, const char *name, uint64_t rank, struct err *e)
{
    struct dcp_part *part = reallocarray(s->part, s->nparts + 1, sizeof *part);
    CLEANUP(source_putp) struct source *src = NULL;

    if (!part)
        return err_nomem(e);
    s->part = part;
    part += s->nparts;
    *part = (struct dcp_part){.rank = rank};
    snprintf(part->name, sizeof part->name, "%s", name);
    if (open_in_dir(s, name, &src, e) < 0 ||
        dcp_metadata_load(src, &s->names, &part->m, e) < 0)
        return err_wrap(e, "%s%s", s->prefix, name);
    s->nparts++;
    return 0;
}

static int compare_parts(const void *a, const void *b)
{
    const struct dcp_part *x = a, *y = b;

    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

static int load_ranks(struct dcp_scan *s, struct err *e)
{
    struct listing *l = s->c->listing;
    uint64_t rank;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (is_file(entry) && is_rank_metadata(entry->name, &rank))
            TRY(load_part(s, entry->name, rank, e));
    }
    if (s->nparts == 0)
        return err_set(e, ENOENT, "neither .metadata nor __R.metadata");
    qsort(s->part, s->nparts, sizeof *s->part, compare_parts);
    return 0;
}

static int load(struct dcp_scan *s, struct err *e)
{
    TRY(s->rank_local ? load_ranks(s, e) : load_part(s, ".metadata", 0, e));
    s->file = calloc((size_t)s->names.paths.count + 1, sizeof *s->file);
    return s->file ? 0 : err_nomem(e);
}

/* Tensors and objects. */

static int add_object(struct dcp_scan *s, const struct dcp_ref *ref, struct err *e)
{
    if (!VEC_ROOM(s->object, s->nobjects, s->object_cap))
        return err_nomem(e);
    s->object[s->nobjects++] = *ref;
    return 0;
}

/* All entries of one key; the tensors among them are reported, the objects collected. */
static int report_key(struct dcp_scan *s, struct dcp_ref *ref, size_t n, struct err *e)
{
    size_t tensors = 0;

    for (size_t i = 0; i < n; i++) {
        if (dcp_entry_of(s, &ref[i])->tensor != DCP_OBJECT)
            ref[tensors++] = ref[i];
        else
            TRY(add_object(s, &ref[i], e));
    }
    return tensors ? dcp_report_tensor(s, ref, tensors, e) : 0;
}

static int report_whole(struct dcp_scan *s, struct err *e)
{
    const struct dcp_metadata *m = s->part[0].m;

    dcp_find_wraps(s);
    for (uint32_t i = 0; i < m->nentries; i++) {
        struct dcp_ref ref = {.key = m->entry[i].key, .entry = i};
        int r = dcp_look_into(s, &ref, e);

        if (r == 0)
            r = report_key(s, &ref, 1, e);
        if (r < 0)
            return r;
    }
    return 0;
}

/* By key, then rank. */
static int compare_refs(const void *a, const void *b)
{
    const struct dcp_ref *x = a, *y = b;

    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return x->part < y->part ? -1 : x->part > y->part;
}

static struct dcp_ref *all_refs(const struct dcp_scan *s, size_t *n)
{
    struct dcp_ref *ref;
    size_t count = 0;

    for (uint32_t p = 0; p < s->nparts; p++)
        count += s->part[p].m->nentries;
    ref = reallocarray(NULL, count + 1, sizeof *ref);
    *n = 0;
    for (uint32_t p = 0; ref && p < s->nparts; p++)
        for (uint32_t i = 0; i < s->part[p].m->nentries; i++)
            ref[(*n)++] = (struct dcp_ref){s->part[p].m->entry[i].key, p, i, 0};
    if (ref)
        qsort(ref, *n, sizeof *ref, compare_refs);
    return ref;
}

static int report_ranks(struct dcp_scan *s, struct err *e)
{
    size_t n = 0, end;
    CLEANUP_FREE struct dcp_ref *ref = all_refs(s, &n);

    if (!ref)
        return err_nomem(e);
    for (size_t i = 0; i < n; i = end) {
        for (end = i + 1; end < n && ref[end].key == ref[i].key;)
            end++;
        TRY(report_key(s, ref + i, end - i, e));
    }
    return 0;
}

/* The checkpoint as a whole. */

/* Ranks by the names of the files that hold something, and how many files. */
static void count_files(const struct dcp_scan *s, uint64_t *ranks, uint64_t *files)
{
    uint64_t rank;

    *ranks = *files = 0;
    for (uint32_t i = 0; i < s->names.paths.count; i++) {
        size_t len;
        const char *text = intern_get(&s->names.paths, i, &len);
        char name[64];

        if (!s->file[i].registered || !s->file[i].safe)
            continue;
        (*files)++;
        if (len >= sizeof name)
            continue;
        memcpy(name, text, len);
        name[len] = '\0';
        if (is_rank_file(name, &rank))
            *ranks = MAX(*ranks, rank + 1);
    }
}

/* As far as it is known by now. */
static void tell(const struct dcp_scan *s, struct dcp_told *told)
{
    const struct dcp_part *last = s->nparts ? &s->part[s->nparts - 1] : NULL;

    told->olmo = last && last->m->olmo;
    told->format = told->olmo      ? "olmo-core-dcp"
                   : s->rank_local ? "torch-dcp-ranklocal"
                   : s->images     ? "torch-dcp-safetensors"
                   : s->zstd       ? "torch-dcp-zstd"
                                   : "torch-dcp";
    if (!last)
        return;
    count_files(s, &told->ranks, &told->files);
    if (s->rank_local)
        told->ranks = last->rank + 1;
    snprintf(told->version, sizeof told->version, "%s", s->part[0].m->version);
}

/* `watch`: it decides about the content. */
static int hide(struct dcp_scan *s, const char *name, bool watch, struct err *e)
{
    name = sink_name(s, name, strlen(name), e);
    return name ? sink_hide(s->sink, name, watch, e) : -e->code;
}

static int hide_one_metadata(struct dcp_scan *s, const char *name, struct err *e)
{
    uint64_t rank;

    return hide(s, name,
                s->rank_local ? is_rank_metadata(name, &rank)
                              : strcmp(name, ".metadata") == 0,
                e);
}

/* The metadata files; before they are read, so that a failed scan is redone in time. */
static int hide_metadata(struct dcp_scan *s, struct err *e)
{
    const struct listing *l = s->c->listing;
    uint64_t rank;

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;

        if (is_file(listing_at(l, i)) &&
            (strcmp(name, ".metadata") == 0 || strcmp(name, ".metadata.tmp") == 0 ||
             is_rank_metadata(name, &rank)))
            TRY(hide_one_metadata(s, name, e));
    }
    return 0;
}

/* Is it one of the files that chunks or objects lie in? */
static bool is_used(const struct dcp_scan *s, const char *name)
{
    uint32_t path;

    return intern_find(&s->names.paths, name, strlen(name), &path) &&
           s->file[path].registered;
}

/*
 * .distcp files that nothing refers to are left over from an earlier save by more ranks
 * into the same directory. Empty ones are those of writers that had nothing to write:
 * OLMo-core makes a file for each of its threads.
 */
static int hide_stale(struct dcp_scan *s, struct err *e)
{
    const struct listing *l = s->c->listing;
    const char *first = NULL;
    uint64_t stale = 0;

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;

        if (!is_file(listing_at(l, i)) || !is_distcp(name) || is_used(s, name))
            continue;
        TRY(hide(s, name, false, e));
        if (listing_at(l, i)->st.id.size == 0)
            continue;
        first = first ? first : name;
        stale++;
    }
    if (stale == 0)
        return 0;
    return dcp_warned(sink_warning(s->sink, "stale-file",
                                   "%" PRIu64 " .distcp files belong to no tensor or "
                                   "object, the first is %s%s",
                                   stale, s->prefix, first),
                      e);
}

/* 0, or what sink_warning() gave. */
static int report_experts(struct dcp_scan *s)
{
    struct dcp_experts x = {0};
    size_t len;

    for (uint32_t i = 0; i < s->names.keys.count; i++) {
        const char *key = intern_get(&s->names.keys, i, &len);

        dcp_experts_note(&x, key, len);
    }
    if (x.biases == 0 || x.biases >= x.weights)
        return 0;
    return sink_warning(
        s->sink, "lost-biases",
        "%" PRIu64 " experts have weights and %" PRIu64
        " have biases: Megatron-FSDP saved those of several ranks under "
        "the same names, and which of them is there, or rows of which, "
        "nothing tells",
        x.weights, x.biases);
}

static int report_oddities(struct dcp_scan *s, struct err *e)
{
    uint64_t skipped = 0;
    int r = 0;

    for (uint32_t p = 0; p < s->nparts; p++)
        skipped += s->part[p].m->skipped;
    if (s->replicas > 0)
        r = sink_warning(s->sink, "rank-local-replica",
                         "%" PRIu64
                         " chunks were saved by several ranks, which may have "
                         "had different values: the lowest rank's are shown",
                         s->replicas);
    if (r == 0 && s->wrapped > 0) {
        size_t len;
        const char *key = intern_get(&s->names.keys, s->wrapped_key, &len);

        r = sink_warning(
            s->sink, "own-class",
            "%" PRIu64 " tensors, as %.*s, are of a class of their own "
            "(quantised, for instance), which alone can compute their "
            "elements: shown are the tensors that it holds, as FILE:KEY.NAME",
            s->wrapped, (int)MIN(len, 256), key);
    }
    if (r == 0)
        r = report_experts(s);
    if (r == 0 && skipped > 0)
        r = sink_warning(s->sink, "odd-entry",
                         "%" PRIu64 " entries of the metadata have no usable name",
                         skipped);
    return dcp_warned(r, e);
}

static int report(struct dcp_scan *s, struct err *e)
{
    dcp_find_wrapper(s);
    TRY(s->rank_local ? report_ranks(s, e) : report_whole(s, e));
    TRY(dcp_report_objects(s, e));
    TRY(hide_stale(s, e));
    return report_oddities(s, e);
}

static int scan(struct dcp_scan *s, struct dcp_told *told, struct err *e)
{
    const char *first = dcp_metadata_name(s->c->listing);

    s->rank_local = !first || strcmp(first, ".metadata") != 0;
    tell(s, told);
    if (first &&
        store_join(s->c->dir, first, told->metadata, sizeof told->metadata) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", first);
    /* Hidden and watched before they are read: a failed scan is redone in time. */
    TRY(hide_metadata(s, e));
    TRY(load(s, e));
    TRY(report(s, e));
    tell(s, told);
    return 0;
}

static void scan_release(struct dcp_scan *s)
{
    for (uint32_t i = 0; s->file && i < s->names.paths.count; i++)
        dcp_image_free(s->file[i].image);
    for (uint32_t p = 0; p < s->nparts; p++)
        dcp_metadata_free(s->part[p].m);
    dcp_names_release(&s->names);
    buf_release(&s->text);
    free(s->part);
    free(s->file);
    free(s->box);
    free(s->object);
    free(s->piece);
}

/* The context of a directory below the checkpoint's; `path` holds its name. */
static int context_of(const struct scan_context *c, const char *dir,
                      struct scan_context *out, char path[PATH_MAX], struct err *e)
{
    *out = *c;
    if (store_join(c->dir, dir, path, PATH_MAX) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", c->dir, dir);
    out->dir = path;
    out->listing = listing_below(c->listing, dir);
    return out->listing ? 0 : err_set(e, ENOENT, "there is no directory %s", path);
}

int dcp_report(const struct scan_context *c, struct sink *sink,
               const struct dcp_how *how, struct dcp_told *told, struct err *e)
{
    struct dcp_scan s = {.c = c, .sink = sink, .how = how, .prefix = ""};
    struct scan_context below;
    char path[PATH_MAX], prefix[PATH_MAX];
    int r = 0;

    *told = (struct dcp_told){.format = "torch-dcp"};
    if (how->dir && how->dir[0]) {
        r = context_of(c, how->dir, &below, path, e);
        snprintf(prefix, sizeof prefix, "%s/", how->dir);
        s.c = &below;
        s.prefix = prefix;
    }
    if (r == 0)
        r = scan(&s, told, e);
    scan_release(&s);
    return r;
}
