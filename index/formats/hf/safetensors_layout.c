/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_layout.c - which safetensors files of a directory are a model. */
#include "index/formats/hf/safetensors_layout.h"

#include <string.h>

#include "index/formats/hf/hf_index.h"
#include "remote/listing.h"

static const char suffix[] = ".safetensors";
static const char index_suffix[] = ".safetensors.index.json";

enum {
    MIN_DIGITS = 5, /* as all writers do, */
    MAX_DIGITS = 9, /* and what fits 32 bits */
    MAX_SETS = 8,   /* old and new saves, variants: further ones are side files */
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
    if (*len - start < MIN_DIGITS || *len - start > MAX_DIGITS ||
        (*len - start > MIN_DIGITS &&
         name[start] == '0')) /* one way to write a number */
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

    if (!safetensors_numbered(name, &n) || n.k == 0 ||
        !take_text(name, &n.stem_len, "-model") ||
        !take_number(name, &n.stem_len, &out->rank))
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

static bool set_single(const struct listing *l, const char *stem,
                       struct safetensors_layout *out)
{
    char name[64];

    stpcpy(stpcpy(name, stem), suffix);
    out->main = file_named(l, name);
    if (!out->main)
        return false;
    out->kind = SAFETENSORS_SINGLE;
    out->stem = out->main;
    out->stem_len = strlen(stem);
    return true;
}

static void set_index(const char *name, struct safetensors_layout *out)
{
    out->kind = SAFETENSORS_INDEXED;
    out->main = out->stem = name;
    out->stem_len = strlen(name) - strlen(index_suffix);
}

/* transformers and diffusers take the single file where both are there. */
static bool find_known(const struct listing *l, struct safetensors_layout *out)
{
    for (size_t i = 0; i < ARRAY_SIZE(stems); i++) {
        char name[64];
        const char *index;

        if (set_single(l, stems[i], out))
            return true;
        stpcpy(stpcpy(name, stems[i]), index_suffix);
        index = file_named(l, name);
        if (index) {
            set_index(index, out);
            return true;
        }
    }
    return false;
}

/* An index of another stem. */
static bool find_index(const struct listing *l, struct safetensors_layout *out)
{
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind == ENTRY_FILE && ends_with(entry->name, index_suffix)) {
            set_index(entry->name, out);
            return true;
        }
    }
    return false;
}

static bool is_stem(const char *name, size_t len, const char *stem)
{
    return len == strlen(stem) && memcmp(name, stem, len) == 0;
}

/* The better set: that of a known stem, then the one with all its files. */
static bool is_better(const struct safetensors_layout *a,
                      const struct safetensors_layout *b)
{
    for (size_t i = 0; i < ARRAY_SIZE(stems); i++) {
        bool x = is_stem(a->stem, a->stem_len, stems[i]);
        bool y = is_stem(b->stem, b->stem_len, stems[i]);

        if (x != y)
            return x;
    }
    return a->present == a->total && b->present != b->total;
}

/* The set of this file among those seen, or a new one; NULL when there are too many. */
static struct safetensors_layout *set_of(struct safetensors_layout *sets, size_t *count,
                                         const char *name,
                                         const struct safetensors_number *n)
{
    struct safetensors_number other;

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
                                               .total = n->n};
    return &sets[(*count)++];
}

static void find_numbered(const struct listing *l, struct safetensors_layout *out)
{
    struct safetensors_layout sets[MAX_SETS], *set;
    struct safetensors_number n;
    size_t count = 0;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind != ENTRY_FILE || !safetensors_numbered(entry->name, &n))
            continue;
        if (safetensors_is_piece(entry->name)) {
            *out = (struct safetensors_layout){.kind = SAFETENSORS_PIECES,
                                               .main = entry->name};
            return;
        }
        set = set_of(sets, &count, entry->name, &n);
        if (!set)
            continue;
        set->present++;
        set->from_zero |= n.k == 0;
        set->has_last |= n.k == n.n;
    }
    /* gpt-oss: 00000 to 0000N, which are N + 1. */
    for (size_t i = 0; i < count; i++)
        sets[i].total += sets[i].from_zero && sets[i].has_last;
    for (size_t i = 0; i < count; i++)
        if (out->kind == SAFETENSORS_NONE || is_better(&sets[i], out))
            *out = sets[i];
}

static bool is_known_stem(const char *name, size_t len)
{
    for (size_t i = 0; i < ARRAY_SIZE(stems); i++)
        if (is_stem(name, len, stems[i]))
            return true;
    return false;
}

/* Its files are STEM.VARIANT-0000K-of-0000N.safetensors; diffusers before 0.32 called
 * them STEM-0000K-of-0000N.VARIANT.safetensors, which have no stem here. */
static void set_variant(const struct listing *l, const char *index,
                        const struct hf_index_name *x, struct safetensors_layout *out)
{
    struct safetensors_number n;

    *out = (struct safetensors_layout){
        .kind = SAFETENSORS_INDEXED, .main = index, .stem = index};
    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;

        if (!safetensors_numbered(name, &n) ||
            n.stem_len != x->stem_len + 1 + x->variant_len ||
            memcmp(name, index, x->stem_len) != 0 || name[x->stem_len] != '.' ||
            memcmp(name + x->stem_len + 1, x->variant, x->variant_len) != 0)
            continue;
        out->stem = name;
        out->stem_len = n.stem_len;
        return;
    }
}

/* The index of a variant, where no numbered files of a known stem are the model. */
static void find_variant(const struct listing *l, struct safetensors_layout *out)
{
    bool known = false;

    if (out->kind == SAFETENSORS_PIECES || is_known_stem(out->stem, out->stem_len))
        return;
    for (size_t i = 0; i < listing_count(l) && !known; i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct hf_index_name x;

        if (entry->st.kind != ENTRY_FILE || !hf_index_name(entry->name, suffix, &x) ||
            !x.variant)
            continue;
        known = is_known_stem(entry->name, x.stem_len);
        if (known || out->kind != SAFETENSORS_INDEXED)
            set_variant(l, entry->name, &x, out);
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

void safetensors_layout(const struct listing *l, struct safetensors_layout *out)
{
    *out = (struct safetensors_layout){0};
    if (!find_known(l, out) && !find_index(l, out)) {
        find_numbered(l, out);
        find_variant(l, out);
    }
    if (out->kind == SAFETENSORS_INDEXED)
        out->present = count_files(l);
    if (out->kind == SAFETENSORS_NONE) {
        out->main = find_adapter(l);
        out->kind = out->main ? SAFETENSORS_ADAPTER : SAFETENSORS_NONE;
    } else {
        out->adapter = find_adapter(l);
    }
}
