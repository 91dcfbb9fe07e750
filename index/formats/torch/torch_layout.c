/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_layout.c - Hugging Face's names for models in torch.save files. */
#include "index/formats/torch/torch_layout.h"

#include <ctype.h>
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

/* The first set of numbered files; another count of files is another set. */
static void find_numbered(const struct listing *l, struct torch_layout *out)
{
    struct number n;

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = find_file(l, listing_at(l, i)->name);

        if (!name || !is_numbered(name, &n) || !is_model_stem(name, n.stem_len))
            continue;
        if (!out->main)
            *out = (struct torch_layout){.kind = TORCH_LAYOUT_NUMBERED,
                                         .main = name,
                                         .stem_len = n.stem_len,
                                         .total = n.n};
        out->present += torch_layout_has(out, name);
    }
}

/* The first variant's. Its files are STEM.VARIANT-0000K-of-0000N.bin, and it names them. */
static void find_variant(const struct listing *l, struct torch_layout *out)
{
    for (size_t i = 0; i < listing_count(l) && !out->main; i++) {
        const char *name = find_file(l, listing_at(l, i)->name);
        struct hf_index_name x;

        if (name && hf_index_name(name, suffix, &x) && x.variant &&
            is_model_stem(name, x.stem_len))
            *out = (struct torch_layout){.kind = TORCH_LAYOUT_INDEXED, .main = name};
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

/* trl saves a value head so, beside the adapter that was trained with it. */
static bool is_head(const struct listing *l, const struct torch_layout *x)
{
    return x->kind == TORCH_LAYOUT_SINGLE &&
           strcmp(x->main, "pytorch_model.bin") == 0 && !listing_find(l, "config.json");
}

void torch_layout(const struct listing *l, struct torch_layout *out)
{
    static const struct {
        const char *name;
        enum torch_layout_kind kind;
    } names[] = {{"pytorch_model.bin", TORCH_LAYOUT_SINGLE},
                 {"pytorch_model.bin.index.json", TORCH_LAYOUT_INDEXED},
                 {"diffusion_pytorch_model.bin", TORCH_LAYOUT_SINGLE},
                 {"diffusion_pytorch_model.bin.index.json", TORCH_LAYOUT_INDEXED}};
    bool peft = find_file(l, "adapter_config.json");
    const char *adapter = peft ? find_file(l, "adapter_model.bin") : NULL;
    const char *better = peft ? find_file(l, "adapter_model.safetensors") : NULL;

    *out = (struct torch_layout){.kind = TORCH_LAYOUT_NONE};
    for (size_t i = 0; i < ARRAY_SIZE(names) && !out->main; i++) {
        out->main = find_file(l, names[i].name);
        out->kind = out->main ? names[i].kind : TORCH_LAYOUT_NONE;
    }
    if (!out->main)
        find_numbered(l, out);
    if (!out->main)
        find_variant(l, out);
    if (out->kind == TORCH_LAYOUT_INDEXED)
        out->present = count_files(l);
    if (adapter && !better && (!out->main || is_head(l, out)))
        *out = (struct torch_layout){
            .kind = TORCH_LAYOUT_ADAPTER, .main = adapter, .beside = out->main};
    else if (out->main)
        out->beside = better ? better : adapter;
}
