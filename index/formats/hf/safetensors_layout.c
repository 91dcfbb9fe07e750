/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_layout.c - which safetensors files of a directory are a model. */
#include "index/formats/hf/safetensors_layout.h"

#include <stdlib.h>
#include <string.h>

#include "base/keyset.h"
#include "index/formats/hf/hf_index.h"
#include "remote/listing.h"

static const char suffix[] = ".safetensors";
static const char index_suffix[] = ".safetensors.index.json";

enum {
    MAX_DIGITS = 9,  /* what fits 32 bits; nearly all writers use five */
    RANK_DIGITS = 5, /* of torch's writer, at least */
    MAX_SETS = 8,    /* old and new saves, variants: further ones are side files */
};

/* The names that loaders look for, in their order. */
static const char *const stems[] = {"model", "diffusion_pytorch_model"};

static bool ends_with(const char *name, const char *end)
{
    size_t len = strlen(name), n = strlen(end);

    return len > n && strcmp(name + len - n, end) == 0;
}

static const char *file_named(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE ? entry->name : NULL;
}

bool safetensors_is_named(const struct listing *l, const char *name)
{
    return ends_with(name, suffix) && file_named(l, name);
}

/* The digits that end at name[*len]; moves *len before them. */
static bool take_number(const char *name, size_t *len, uint32_t *out)
{
    size_t start = *len;
    uint32_t value = 0;

    while (start > 0 && name[start - 1] >= '0' && name[start - 1] <= '9')
        start--;
    if (*len == start || *len - start > MAX_DIGITS)
        return false;
    for (size_t i = start; i < *len; i++)
        value = value * 10 + (uint32_t)(name[i] - '0');
    *len = start;
    *out = value;
    return true;
}

/* Does name[0..*len) end in this text? Moves *len before it. */
static bool take_text(const char *name, size_t *len, const char *text)
{
    size_t n = strlen(text);

    if (*len < n || memcmp(name + *len - n, text, n) != 0)
        return false;
    *len -= n;
    return true;
}

bool safetensors_numbered(const char *name, struct safetensors_number *out)
{
    size_t len = strlen(name);

    if (!take_text(name, &len, suffix) || !take_number(name, &len, &out->n) ||
        !take_text(name, &len, "-of-") || !take_number(name, &len, &out->k) ||
        !take_text(name, &len, "-"))
        return false;
    out->stem_len = len;
    return out->k <= out->n;
}

bool safetensors_has_stem(const char *name, const char *stem, size_t stem_len,
                          struct safetensors_number *out)
{
    return safetensors_numbered(name, out) && out->stem_len == stem_len &&
           memcmp(name, stem, stem_len) == 0;
}

bool safetensors_piece(const char *name, struct safetensors_piece *out)
{
    struct safetensors_number n;
    size_t end;

    if (!safetensors_numbered(name, &n) || n.k == 0 ||
        !take_text(name, &n.stem_len, "-model"))
        return false;
    end = n.stem_len;
    if (!take_number(name, &n.stem_len, &out->rank) || end - n.stem_len < RANK_DIGITS)
        return false;
    out->k = n.k;
    out->n = n.n;
    return n.stem_len == strlen("shard-") && memcmp(name, "shard-", n.stem_len) == 0;
}

bool safetensors_is_piece(const char *name)
{
    struct safetensors_piece p;

    return safetensors_piece(name, &p);
}

/* Where candidates are put. */
struct finding {
    const struct listing *l;
    struct safetensors_layout *out;
    size_t count, max;
};

static struct safetensors_layout *add(struct finding *f,
                                      const struct safetensors_layout *x)
{
    if (f->count == f->max)
        return NULL;
    f->out[f->count] = *x;
    return &f->out[f->count++];
}

static void add_single(struct finding *f, const char *stem, enum hf_rank rank)
{
    char name[64];
    const char *main;

    stpcpy(stpcpy(name, stem), suffix);
    main = file_named(f->l, name);
    if (main)
        add(f, &(struct safetensors_layout){.kind = SAFETENSORS_SINGLE,
                                            .main = main,
                                            .stem = main,
                                            .stem_len = strlen(stem),
                                            .rank = rank});
}

static void add_index(struct finding *f, const char *name, enum hf_rank rank)
{
    add(f, &(struct safetensors_layout){.kind = SAFETENSORS_INDEXED,
                                        .main = name,
                                        .stem = name,
                                        .stem_len = strlen(name) - strlen(index_suffix),
                                        .rank = rank});
}

static bool is_stem(const char *name, size_t len, const char *stem)
{
    return len == strlen(stem) && memcmp(name, stem, len) == 0;
}

static bool is_known_stem(const char *name, size_t len)
{
    for (size_t i = 0; i < ARRAY_SIZE(stems); i++)
        if (is_stem(name, len, stems[i]))
            return true;
    return false;
}

/* transformers and diffusers take the single file where both are there. */
static void find_known(struct finding *f)
{
    for (size_t i = 0; i < ARRAY_SIZE(stems); i++) {
        enum hf_rank base = i == 0 ? 0 : HF_RANK_DIFFUSERS;
        char name[64];
        const char *index;

        add_single(f, stems[i], base + HF_RANK_SAFETENSORS);
        stpcpy(stpcpy(name, stems[i]), index_suffix);
        index = file_named(f->l, name);
        if (index)
            add_index(f, index, base + HF_RANK_SAFETENSORS_INDEX);
    }
}

/* Indexes of other stems. */
static void find_index(struct finding *f)
{
    for (size_t i = 0; i < listing_count(f->l); i++) {
        const struct listing_entry *entry = listing_at(f->l, i);
        size_t len = strlen(entry->name), end = strlen(index_suffix);

        if (entry->st.kind == ENTRY_FILE && ends_with(entry->name, index_suffix) &&
            !is_known_stem(entry->name, len - end))
            add_index(f, entry->name, HF_RANK_OTHER_INDEX);
    }
}

/* The set of this file among those seen, or a new one; NULL when there are too many. */
static struct safetensors_layout *set_of(struct safetensors_layout *sets, size_t *count,
                                         const char *name,
                                         const struct safetensors_number *n)
{
    struct safetensors_number other;
    bool known = is_known_stem(name, n->stem_len);

    for (size_t i = 0; i < *count; i++)
        if (sets[i].n == n->n &&
            safetensors_has_stem(name, sets[i].stem, sets[i].stem_len, &other))
            return &sets[i];
    if (*count == MAX_SETS)
        return NULL;
    sets[*count] = (struct safetensors_layout){.kind = SAFETENSORS_NUMBERED,
                                               .main = name,
                                               .stem = name,
                                               .stem_len = n->stem_len,
                                               .n = n->n,
                                               .total = n->n,
                                               .rank = known ? HF_RANK_NUMBERED
                                                             : HF_RANK_NUMBERED_OTHER};
    return &sets[(*count)++];
}

/* A number that is written in two ways is one of them twice. */
static bool is_first(struct keyset *seen, const struct safetensors_layout *sets,
                     const struct safetensors_layout *set, uint32_t k)
{
    const uint64_t pair[] = {(uint64_t)(set - sets), k};

    return keyset_add(seen, pair, sizeof pair) != 0;
}

static void find_numbered(struct finding *f)
{
    CLEANUP(keyset_release) struct keyset seen = {0};
    struct safetensors_layout sets[MAX_SETS], *set;
    struct safetensors_number n;
    size_t count = 0;

    for (size_t i = 0; i < listing_count(f->l); i++) {
        const struct listing_entry *entry = listing_at(f->l, i);

        if (entry->st.kind != ENTRY_FILE || !safetensors_numbered(entry->name, &n))
            continue;
        if (safetensors_is_piece(entry->name)) {
            if (f->count == 0)
                add(f, &(struct safetensors_layout){.kind = SAFETENSORS_PIECES,
                                                    .main = entry->name});
            return;
        }
        set = set_of(sets, &count, entry->name, &n);
        if (!set)
            continue;
        set->files++;
        set->present += is_first(&seen, sets, set, n.k);
        set->from_zero |= n.k == 0;
        set->has_last |= n.k == n.n;
    }
    for (size_t i = 0; i < count; i++) {
        /* gpt-oss: 00000 to 0000N, which are N + 1. */
        sets[i].total += sets[i].from_zero && sets[i].has_last;
        add(f, &sets[i]);
    }
}

/* Its files are STEM.VARIANT-0000K-of-0000N.safetensors; diffusers before 0.32 called
 * them STEM-0000K-of-0000N.VARIANT.safetensors, which have no stem here. */
static void add_variant(struct finding *f, const char *index,
                        const struct hf_index_name *x)
{
    bool known = is_known_stem(index, x->stem_len);
    struct safetensors_layout v = {.kind = SAFETENSORS_INDEXED,
                                   .main = index,
                                   .stem = index,
                                   .rank =
                                       known ? HF_RANK_VARIANT : HF_RANK_OTHER_VARIANT};
    struct safetensors_number n;

    for (size_t i = 0; i < listing_count(f->l); i++) {
        const char *name = listing_at(f->l, i)->name;

        if (!safetensors_numbered(name, &n) ||
            n.stem_len != x->stem_len + 1 + x->variant_len ||
            memcmp(name, index, x->stem_len) != 0 || name[x->stem_len] != '.' ||
            memcmp(name + x->stem_len + 1, x->variant, x->variant_len) != 0)
            continue;
        v.stem = name;
        v.stem_len = n.stem_len;
        break;
    }
    add(f, &v);
}

static void find_variants(struct finding *f)
{
    for (size_t i = 0; i < listing_count(f->l); i++) {
        const struct listing_entry *entry = listing_at(f->l, i);
        struct hf_index_name x;

        if (entry->st.kind == ENTRY_FILE && hf_index_name(entry->name, suffix, &x) &&
            x.variant)
            add_variant(f, entry->name, &x);
    }
}

static const char *find_adapter(const struct listing *l)
{
    const char *name = file_named(l, "adapter_model.safetensors");

    return name && file_named(l, "adapter_config.json") ? name : NULL;
}

static uint32_t count_files(const struct listing *l)
{
    uint32_t n = 0;

    for (size_t i = 0; i < listing_count(l); i++)
        n += safetensors_is_named(l, listing_at(l, i)->name);
    return n;
}

static int by_rank(const void *a, const void *b)
{
    const struct safetensors_layout *x = a, *y = b;

    if (x->rank != y->rank)
        return (x->rank > y->rank) - (x->rank < y->rank);
    /* Of sets of one rank the whole ones, then by name. */
    if ((x->present == x->total) != (y->present == y->total))
        return x->present == x->total ? -1 : 1;
    return strcmp(x->main, y->main);
}

size_t safetensors_layouts(const struct listing *l, struct safetensors_layout *out,
                           size_t max)
{
    struct finding f = {.l = l, .out = out, .max = max};
    const char *adapter = find_adapter(l);
    uint32_t files = count_files(l);

    find_known(&f);
    find_index(&f);
    find_numbered(&f);
    if (f.count == 0 || out[0].kind != SAFETENSORS_PIECES)
        find_variants(&f);
    for (size_t i = 0; i < f.count; i++) {
        if (out[i].kind == SAFETENSORS_INDEXED)
            out[i].present = files;
        out[i].adapter = adapter;
    }
    if (f.count == 0 && adapter)
        add(&f,
            &(struct safetensors_layout){.kind = SAFETENSORS_ADAPTER, .main = adapter});
    if (f.count > 0)
        qsort(out, f.count, sizeof *out, by_rank);
    return f.count;
}
