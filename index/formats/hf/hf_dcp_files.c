/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_dcp_files.c - the shards of torch's HuggingFaceStorageWriter as pieces. */
#include "index/formats/hf/hf_dcp_priv.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/json.h"
#include "index/formats/hf/safetensors_layout.h"

enum { MAX_INDEX = 100000000 };

static const char version[] = "1.0"; /* the only one there is: torch 2.8 to 2.15 */

/* ---- which files ---- */

/* "DIR/NAME", or NAME alone, in the arena. */
static const char *join(struct hf_scan *s, const char *dir, const char *name)
{
    char path[PATH_MAX];

    if (store_join(dir, name, path, sizeof path) < 0)
        return NULL;
    return arena_memdup(s->arena, path, strlen(path));
}

/* A file on its way into the order of model file and rank. */
struct named {
    const char *name;
    struct hf_shard shard;
};

static int compare_shards(const void *a, const void *b)
{
    const struct hf_shard *x = &((const struct named *)a)->shard;
    const struct hf_shard *y = &((const struct named *)b)->shard;

    if (x->k != y->k)
        return x->k < y->k ? -1 : 1;
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return x->n < y->n ? -1 : x->n > y->n;
}

/* All shards of the directory, sorted; malloc'd. */
static struct named *list_shards(const struct hf_scan *s, size_t *count)
{
    struct named *all = calloc(listing_count(s->pieces) + 1, sizeof *all);

    *count = 0;
    for (size_t i = 0; all && i < listing_count(s->pieces); i++) {
        const struct listing_entry *entry = listing_at(s->pieces, i);
        struct safetensors_piece p;

        if (entry->st.kind == ENTRY_FILE && safetensors_piece(entry->name, &p))
            all[(*count)++] = (struct named){
                .name = entry->name, .shard = {.rank = p.rank, .k = p.k, .n = p.n}};
    }
    if (all)
        qsort(all, *count, sizeof *all, compare_shards);
    return all;
}

/* Shards of one model file lie together, in order of the rank. */
static uint32_t rank_without(const struct hf_scan *s, size_t first, size_t end)
{
    uint32_t next = 1;

    for (size_t i = first; i < end && s->shard[i].rank <= next; i++)
        next = MAX(next, s->shard[i].rank + 1);
    return next <= s->max_rank ? next : 0;
}

static void find_gaps(struct hf_scan *s)
{
    for (size_t i = 0, end; i < s->file.count; i = end) {
        uint32_t rank;

        for (end = i + 1; end < s->file.count && s->shard[end].k == s->shard[i].k;)
            end++;
        rank = rank_without(s, i, end);
        for (size_t k = i; k < end; k++)
            s->shard[k].without = rank;
    }
}

static int name_shards(struct hf_scan *s, struct err *e)
{
    size_t count;
    CLEANUP_FREE struct named *all = list_shards(s, &count);

    if (!all || safetensors_files_new(&s->file, count, e) < 0)
        return err_nomem(e);
    s->shard = calloc(count + 1, sizeof *s->shard);
    if (!s->shard)
        return err_nomem(e);
    for (size_t i = 0; i < count; i++) {
        s->shard[i] = all[i].shard;
        s->max_rank = MAX(s->max_rank, all[i].shard.rank);
        s->max_n = MAX(s->max_n, all[i].shard.n);
        s->file.file[i].name = join(s, s->pieces_dir, all[i].name);
        if (!s->file.file[i].name)
            return err_set(e, ENAMETOOLONG, "%s: the path is too long", all[i].name);
    }
    find_gaps(s);
    return 0;
}

/* ---- their headers ---- */

/* What the header tells of where its tensors belong. */
static const char *shard_fault(const struct safetensors_file *f)
{
    if (!f->read)
        return NULL; /* it has no tensors that we know of */
    if (!f->h.dcp_sharding)
        return "its header has no DCP_SHARDING_INFO";
    if (f->h.dcp_version && strcmp(f->h.dcp_version, version) != 0)
        return "its DCP_VERSION is another one than 1.0, the only one supported";
    return NULL;
}

int hf_compare_names(const struct safetensors_tensor *a,
                     const struct safetensors_tensor *b)
{
    int order = memcmp(a->name, b->name, MIN(a->name_len, b->name_len));

    return order ? order : (a->name_len > b->name_len) - (a->name_len < b->name_len);
}

static int compare_pieces(const void *a, const void *b)
{
    const struct hf_piece *x = a, *y = b;

    return hf_compare_names(x->t, y->t);
}

/* The pieces of one file while its DCP_SHARDING_INFO is read. */
struct placing {
    struct hf_scan *s;
    struct hf_piece *piece; /* in order of the name */
    size_t count;
    uint64_t unknown; /* names that are no tensor of the file */
};

static bool take_offsets(struct hf_scan *s, struct hf_piece *p, const struct json *v,
                         struct err *e)
{
    const struct json *list = json_get(v, "saved_offsets");
    uint64_t *start;

    if (!list || json_kind(list) != JSON_ARRAY || json_count(list) != p->t->nd)
        return true; /* stays without a place */
    start = arena_array(s->arena, (size_t)p->t->nd + 1, sizeof *start);
    if (!start) {
        err_nomem(e);
        return false;
    }
    p->start = start;
    for (v = json_first(list); v; v = json_next(v))
        if (!json_u64(v, start++))
            p->start = NULL;
    return true;
}

static int place_piece(void *user, const char *key, size_t key_len,
                       const struct json *value, struct err *e)
{
    struct placing *p = user;
    const struct safetensors_tensor name = {.name = key, .name_len = key_len};
    const struct hf_piece wanted = {.t = &name};
    struct hf_piece *found =
        bsearch(&wanted, p->piece, p->count, sizeof *p->piece, compare_pieces);

    if (!found)
        p->unknown++;
    else if (!take_offsets(p->s, found, value, e))
        return -e->code;
    return 0;
}

/* An inner text that cannot be read leaves all pieces of the file without a place. */
static int place_pieces(struct hf_scan *s, uint32_t file, struct hf_piece *piece,
                        size_t count, struct err *e)
{
    const struct safetensors_file *f = &s->file.file[file];
    const char *text = f->h.dcp_sharding;
    struct placing p = {.s = s, .piece = piece, .count = count};
    struct err why = {0};

    if (json_each_member(text, strlen(text), NULL, place_piece, &p, &why) < 0) {
        if (why.code == ENOMEM)
            return err_nomem(e);
        s->shard[file].fault = "its DCP_SHARDING_INFO is no JSON";
        for (size_t i = 0; i < count; i++)
            piece[i].start = NULL;
    }
    s->shard[file].damaged = p.unknown > 0;
    if (p.unknown > 0 && sink_warning(s->sink, "odd-entry",
                                      "%s: DCP_SHARDING_INFO names %" PRIu64
                                      " tensors that the file does not hold",
                                      f->name, p.unknown) < 0)
        return err_nomem(e);
    return 0;
}

static int take_file(struct hf_scan *s, uint32_t file, struct err *e)
{
    const struct safetensors_file *f = &s->file.file[file];
    struct hf_piece *piece = s->piece + s->npieces;

    s->shard[file].damaged = !f->read;
    s->shard[file].fault = shard_fault(f);
    for (size_t i = 0; i < f->h.count; i++)
        piece[i] = (struct hf_piece){.t = &f->h.tensor[i], .file = file};
    s->npieces += f->h.count;
    if (f->h.count == 0 || s->shard[file].fault)
        return 0;
    qsort(piece, f->h.count, sizeof *piece, compare_pieces);
    return place_pieces(s, file, piece, f->h.count, e);
}

/* A file that cannot be read is told; what it held is a hole, or missing. */
static int tell_damaged(struct hf_scan *s, const struct safetensors_files *f,
                        const char *code, struct err *e)
{
    for (size_t i = 0; i < f->count; i++)
        if (!f->file[i].read && !f->file[i].missing &&
            sink_warning(s->sink, code, "%s", f->file[i].err.text) < 0)
            return err_nomem(e);
    return 0;
}

/* Nobody knows which tensors of its model file a damaged shard had pieces of. */
static void find_doubtful(struct hf_scan *s)
{
    for (size_t i = 0, end; i < s->file.count; i = end) {
        bool damaged = false;

        for (end = i; end < s->file.count && s->shard[end].k == s->shard[i].k; end++)
            damaged |= s->shard[end].damaged;
        for (size_t k = i; k < end; k++)
            s->shard[k].doubtful = damaged;
    }
}

/* With none that can be read there is nothing to show. */
static int check_any(const struct hf_scan *s, struct err *e)
{
    for (size_t i = 0; i < s->file.count; i++)
        if (s->file.file[i].read)
            return 0;
    if (s->file.count > 0 && s->file.file[0].err.code) {
        return err_copy(e, &s->file.file[0].err);
    }
    return err_set(e, ESTALE, "no shards of HuggingFaceStorageWriter any more");
}

int hf_read_shards(struct hf_scan *s, struct err *e)
{
    size_t count = 0;

    TRY(name_shards(s, e));
    TRY(safetensors_files_read(s->c, s->sink, &s->file, e));
    TRY(check_any(s, e));
    TRY(tell_damaged(s, &s->file, "damaged-file", e));
    for (size_t i = 0; i < s->file.count; i++)
        count += s->file.file[i].h.count;
    s->piece = calloc(count + 1, sizeof *s->piece);
    if (!s->piece)
        return err_nomem(e);
    for (size_t i = 0; i < s->file.count; i++)
        TRY(take_file(s, (uint32_t)i, e));
    find_doubtful(s);
    return 0;
}

/* ---- the full files ---- */

static bool ends_with(const char *name, const char *end)
{
    size_t len = strlen(name), n = strlen(end);

    return len > n && strcmp(name + len - n, end) == 0;
}

/* Readers take all of them: none stays visible beside the model that is shown. */
static bool is_copy(const struct listing_entry *entry)
{
    struct safetensors_piece p;

    return entry->st.kind == ENTRY_FILE && ends_with(entry->name, ".safetensors") &&
           !safetensors_piece(entry->name, &p) &&
           strcmp(entry->name, "adapter_model.safetensors") != 0;
}

/* The names of all tensors that were saved; of a second index only a warning is left. */
static int read_index(struct hf_scan *s, const char *name, struct err *e)
{
    const char *path = join(s, s->full_dir, name);
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len;

    if (!path || sink_hide(s->sink, path, true, e) < 0)
        return path ? -e->code : err_nomem(e);
    if (s->index.arena)
        err_set(&why, EBADMSG, "a second index");
    else if (listing_read(s->full, name, MAX_INDEX, &text, &len, &why) == 0)
        hf_index_parse(text, len, ".safetensors", &s->index, &why);
    if (!why.code)
        return 0;
    if (safetensors_stops_scan(why.code)) {
        return err_copy(e, &why);
    }
    if (sink_warning(s->sink, "damaged-copy", "%s: %s", path, why.text) < 0)
        return err_nomem(e);
    return 0;
}

static int name_copies(struct hf_scan *s, struct err *e)
{
    size_t count = 0;

    TRY(safetensors_files_new(&s->copy, listing_count(s->full), e));
    for (size_t i = 0; i < listing_count(s->full); i++) {
        const struct listing_entry *entry = listing_at(s->full, i);

        if (entry->st.kind == ENTRY_FILE &&
            ends_with(entry->name, ".safetensors.index.json"))
            TRY(read_index(s, entry->name, e));
        if (!is_copy(entry))
            continue;
        s->copy.file[count].copy = true;
        s->copy.file[count].name = join(s, s->full_dir, entry->name);
        if (!s->copy.file[count++].name)
            return err_nomem(e);
    }
    s->copy.count = count;
    return 0;
}

int hf_read_copies(struct hf_scan *s, struct err *e)
{
    if (!s->full)
        return 0;
    TRY(name_copies(s, e));
    TRY(safetensors_files_read(s->c, s->sink, &s->copy, e));
    return tell_damaged(s, &s->copy, "damaged-copy", e);
}
