/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_model.c - a Hugging Face model as the model of a larger checkpoint. */
#include "index/formats/hf/hf_model.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/hf/choose.h"
#include "index/formats/hf/safetensors_dir.h"
#include "index/formats/torch/torch_file.h"
#include "remote/listing.h"

extern const struct format_driver format_safetensors, format_torch_file;

static void take_safetensors(struct listing *l, struct hf_model *out)
{
    const struct safetensors_layout *x = &hf_choose(l)->safetensors;

    *out =
        (struct hf_model){&format_safetensors, x->main, x->kind == SAFETENSORS_ADAPTER};
}

static void take_torch(struct listing *l, struct hf_model *out)
{
    const struct torch_layout *x = &hf_choose(l)->torch;

    *out =
        (struct hf_model){&format_torch_file, x->main, x->kind == TORCH_LAYOUT_ADAPTER};
}

/* The drivers know best which of two kinds of files transformers would load. */
bool hf_model_find(struct listing *l, struct hf_model *out)
{
    struct bid safetensors = {0}, torch = {0};

    *out = (struct hf_model){0};
    format_safetensors.bid(l, &safetensors);
    format_torch_file.bid(l, &torch);
    if (safetensors.score == 0 && torch.score == 0)
        return false;
    if (safetensors.score >= torch.score)
        take_safetensors(l, out);
    else
        take_torch(l, out);
    return true;
}

int hf_model_report(const struct hf_model *m, const struct scan_context *c,
                    struct sink *sink, struct err *e)
{
    return m->driver->scan(c, sink, e);
}

int hf_adapter_report(const struct hf_model *m, const struct scan_context *c,
                      struct sink *sink, struct err *e)
{
    const struct safetensors_how how = {
        .dir = "", .name = m->main, .part = m->main, .role = ROLE_OTHER, .shown = true};
    const struct torch_report torch = {.role = ROLE_OTHER, .shown = true};
    struct safetensors_told told;

    if (m->driver == &format_safetensors)
        return safetensors_dir_report(c, sink, &how, &told, e);
    return torch_file_report(c, sink, m->main, &torch, e);
}

int hf_beside_report(const char *name, const struct scan_context *c, struct sink *sink,
                     struct err *e)
{
    const struct hf_model m = {.driver = strstr(name, ".safetensors")
                                             ? &format_safetensors
                                             : &format_torch_file,
                               .main = name,
                               .adapter = true};
    struct err why = {0};

    if (hf_adapter_report(&m, c, sink, &why) == 0)
        return 0;
    if (why.code == EBADMSG || why.code == ENOTSUP || why.code == ENOENT)
        return sink_warning(sink, "damaged-file", "%s", why.text) < 0 ? err_nomem(e)
                                                                      : 0;
    return err_copy(e, &why);
}

static bool is_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

static const char *const heads[] = {"value_head.safetensors", "value_head.bin"};
static const char vit[] = "vit.safetensors";

bool hf_is_beside(const char *name)
{
    return strcmp(name, heads[0]) == 0 || strcmp(name, vit) == 0 ||
           strcmp(name, "adapter_model.safetensors") == 0;
}

int hf_trained_beside_report(const struct scan_context *c, struct sink *sink,
                             struct err *e)
{
    size_t i = 0;

    while (i < ARRAY_SIZE(heads) && !is_file(c->listing, heads[i]))
        i++;
    if (i < ARRAY_SIZE(heads))
        TRY(hf_beside_report(heads[i], c, sink, e));
    if (!is_file(c->listing, vit) || !is_file(c->listing, "adapter_config.json"))
        return 0;
    return hf_beside_report(vit, c, sink, e);
}
