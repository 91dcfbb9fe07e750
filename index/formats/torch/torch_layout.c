/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_layout.c - Hugging Face's names for models in torch.save files. */
#include "index/formats/torch/torch_layout.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "index/formats/hf/hf_index.h"
#include "remote/listing.h"

enum { MAX_DIGITS = 9 };

static const char suffix[] = ".bin";

static const char *find_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE ? entry->name : NULL;
}

/* The digits before *end, which moves before them; 0: none, or too many. */
static uint32_t number_before(const char *name, size_t *end)
{
    size_t at = *end;
    uint32_t n = 0;

    while (at > 0 && isdigit((unsigned char)name[at - 1]))
        at--;
    if (*end - at > MAX_DIGITS)
        return 0;
    for (size_t i = at; i < *end; i++)
        n = n * 10 + (uint32_t)(name[i] - '0');
    *end = at;
    return n;
}

struct number {
    size_t stem_len;
    uint32_t k, n;
};

/* STEM-0000K-of-0000N.bin taken apart. */
static bool is_numbered(const char *name, struct number *out)
{
    size_t end = strlen(name), n = sizeof suffix - 1;

    if (end <= n || strcmp(name + end - n, suffix) != 0)
        return false;
    end -= n;
    out->n = number_before(name, &end);
    if (out->n == 0 || end < 4 || memcmp(name + end - 4, "-of-", 4) != 0)
        return false;
    end -= 4;
    out->k = number_before(name, &end);
    if (out->k == 0 || out->k > out->n || end < 2 || name[end - 1] != '-')
        return false;
    out->stem_len = end - 1;
    return true;
}

static bool is_model_stem(const char *name, size_t len)
{
    static const char *const stems[] = {"pytorch_model", "diffusion_pytorch_model"};

    for (size_t i = 0; i < ARRAY_SIZE(stems); i++)
        if (len == strlen(stems[i]) && memcmp(name, stems[i], len) == 0)
            return true;
    return false;
}

bool torch_layout_has(const struct torch_layout *x, const char *name)
{
    struct number n;

    return is_numbered(name, &n) && n.n == x->total && n.stem_len == x->stem_len &&
           memcmp(name, x->main, n.stem_len) == 0;
}

/* Where candidates are put. */
struct finding {
    const struct listing *l;
    struct torch_layout *out;
    size_t count, max;
};

static struct torch_layout *add(struct finding *f, const struct torch_layout *x)
{
    if (f->count == f->max)
        return NULL;
    f->out[f->count] = *x;
    return &f->out[f->count++];
}

/* The set that a numbered file is of, or a new one; NULL: there are too many. */
static struct torch_layout *set_of(struct finding *f, const char *name,
                                   const struct number *n)
{
    for (size_t i = 0; i < f->count; i++)
        if (f->out[i].kind == TORCH_LAYOUT_NUMBERED &&
            torch_layout_has(&f->out[i], name))
            return &f->out[i];
    return add(f, &(struct torch_layout){.kind = TORCH_LAYOUT_NUMBERED,
                                         .main = name,
                                         .stem_len = n->stem_len,
                                         .total = n->n,
                                         .rank = HF_RANK_NUMBERED_BIN});
}

/* Another count of files is another set. */
static void find_numbered(struct finding *f)
{
    struct number n;

    for (size_t i = 0; i < listing_count(f->l); i++) {
        const char *name = find_file(f->l, listing_at(f->l, i)->name);
        struct torch_layout *set;

        if (!name || !is_numbered(name, &n) || !is_model_stem(name, n.stem_len))
            continue;
        set = set_of(f, name, &n);
        if (set)
            set->present = MIN(set->present + 1, set->total);
    }
}

/* Their files are STEM.VARIANT-0000K-of-0000N.bin, and the index names them. */
static void find_variants(struct finding *f)
{
    for (size_t i = 0; i < listing_count(f->l); i++) {
        const char *name = find_file(f->l, listing_at(f->l, i)->name);
        struct hf_index_name x;

        if (name && hf_index_name(name, suffix, &x) && x.variant &&
            is_model_stem(name, x.stem_len))
            add(f, &(struct torch_layout){.kind = TORCH_LAYOUT_INDEXED,
                                          .main = name,
                                          .rank = HF_RANK_VARIANT_BIN});
    }
}

static uint32_t count_files(const struct listing *l)
{
    uint32_t n = 0;

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = find_file(l, listing_at(l, i)->name);
        size_t len = name ? strlen(name) : 0;

        n += len >= sizeof suffix &&
             strcmp(name + len - (sizeof suffix - 1), suffix) == 0;
    }
    return n;
}

static void find_known(struct finding *f)
{
    static const struct {
        const char *name;
        enum torch_layout_kind kind;
        enum hf_rank rank;
    } names[] = {
        {"pytorch_model.bin", TORCH_LAYOUT_SINGLE, HF_RANK_BIN},
        {"pytorch_model.bin.index.json", TORCH_LAYOUT_INDEXED, HF_RANK_BIN_INDEX},
        {"diffusion_pytorch_model.bin", TORCH_LAYOUT_SINGLE,
         HF_RANK_DIFFUSERS + HF_RANK_BIN},
        {"diffusion_pytorch_model.bin.index.json", TORCH_LAYOUT_INDEXED,
         HF_RANK_DIFFUSERS + HF_RANK_BIN_INDEX}};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        const char *main = find_file(f->l, names[i].name);

        if (main)
            add(f, &(struct torch_layout){
                       .kind = names[i].kind, .main = main, .rank = names[i].rank});
    }
}

/* trl saves a value head so, beside the adapter that was trained with it. */
static bool is_head(const struct listing *l, const struct torch_layout *x)
{
    return x->kind == TORCH_LAYOUT_SINGLE &&
           strcmp(x->main, "pytorch_model.bin") == 0 && !listing_find(l, "config.json");
}

static int by_rank(const void *a, const void *b)
{
    const struct torch_layout *x = a, *y = b;

    if (x->rank != y->rank)
        return (x->rank > y->rank) - (x->rank < y->rank);
    if ((x->present == x->total) != (y->present == y->total))
        return x->present == x->total ? -1 : 1;
    return strcmp(x->main, y->main);
}

size_t torch_layouts(const struct listing *l, struct torch_layout *out, size_t max)
{
    struct finding f = {.l = l, .out = out, .max = max};
    bool peft = find_file(l, "adapter_config.json");
    const char *adapter = peft ? find_file(l, "adapter_model.bin") : NULL;
    const char *better = peft ? find_file(l, "adapter_model.safetensors") : NULL;
    uint32_t files = count_files(l);

    find_known(&f);
    find_numbered(&f);
    find_variants(&f);
    for (size_t i = 0; i < f.count; i++) {
        if (out[i].kind == TORCH_LAYOUT_INDEXED)
            out[i].present = files;
        out[i].beside = better ? better : adapter;
    }
    if (adapter && !better && (f.count == 0 || is_head(l, &out[0]))) {
        out[0] = (struct torch_layout){.kind = TORCH_LAYOUT_ADAPTER,
                                       .main = adapter,
                                       .beside = f.count ? out[0].main : NULL};
        return 1;
    }
    if (f.count > 0)
        qsort(out, f.count, sizeof *out, by_rank);
    return f.count;
}
