/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_origin.c - which trainer wrote a torch.save file, and when. */
#include "index/formats/torch/torch_origin.h"

#include <string.h>

#include "index/formats/torch/torch_walk.h"
#include "index/formats/torch/torch_zip.h"

/* The entry of a dict, or false. */
static bool entry(const struct pv *v, const char *key, struct pv *out)
{
    struct pv items;

    return torch_mapping(v, &items) && items.kind == PV_DICT &&
           pv_dict_get(&items, key, out);
}

static bool entry_at(const struct pv *v, const char *const *path, size_t n,
                     struct pv *out)
{
    *out = *v;
    for (size_t i = 0; i < n; i++) {
        struct pv inner = *out;

        if (!entry(&inner, path[i], out))
            return false;
    }
    return true;
}

#define ENTRY_AT(v, out, ...)                                                          \
    entry_at(v, (const char *const[]){__VA_ARGS__},                                    \
             sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *), out)

static bool take_count(const struct pv *v, int64_t *out)
{
    if (v->kind != PV_INT || v->i < 0)
        return false;
    *out = v->i;
    return true;
}

static void take_text(const struct pv *v, char *dst, size_t size)
{
    const char *text;
    size_t len;

    if (v->kind != PV_STR)
        return;
    text = pv_bytes(v, &len);
    len = MIN(len, size - 1);
    memcpy(dst, text, len);
    dst[len] = '\0';
}

static bool is_lightning(const struct pv *root, struct torch_origin *out)
{
    struct pv v;

    if (!entry(root, "pytorch-lightning_version", &v) || v.kind != PV_STR)
        return false;
    out->format = "lightning-ckpt";
    out->framework = "Lightning";
    take_text(&v, out->version, sizeof out->version);
    out->has_step = entry(root, "global_step", &v) && take_count(&v, &out->step);
    out->has_epoch = entry(root, "epoch", &v) && take_count(&v, &out->epoch);
    return true;
}

/* With save_weights_only there is neither a timestamp nor rng, but the version. */
static bool is_composer(const struct pv *root, struct torch_origin *out)
{
    struct pv when, v, version;
    bool has_version = ENTRY_AT(root, &version, "state", "metadata",
                                "composer_env_info", "composer_version");
    bool trains = ENTRY_AT(root, &when, "state", "timestamp", "Timestamp") &&
                  entry(root, "rng", &v);

    if (!trains && !has_version)
        return false;
    out->format = "composer";
    out->framework = "Composer";
    out->has_step = trains && entry(&when, "batch", &v) && take_count(&v, &out->step);
    out->has_epoch = trains && entry(&when, "epoch", &v) && take_count(&v, &out->epoch);
    if (has_version)
        take_text(&version, out->version, sizeof out->version);
    if (ENTRY_AT(root, &v, "state", "metadata", "world_size"))
        take_count(&v, &out->ranks);
    return true;
}

static bool is_torchtune(const struct pv *root, struct torch_origin *out)
{
    struct pv v;

    if (!entry(root, "epochs_run", &v) || !entry(root, "total_epochs", &v))
        return false;
    out->format = out->framework = "torchtune";
    out->has_step = entry(root, "steps_run", &v) && take_count(&v, &out->step);
    return true;
}

/* Where training scripts write the step that they saved after. */
static void find_step(const struct pv *root, struct torch_origin *out)
{
    static const char *const names[] = {"global_step", "step", "iteration", "iter",
                                        "iter_num"};
    struct pv v;

    for (size_t i = 0; i < ARRAY_SIZE(names) && !out->has_step; i++)
        out->has_step = entry(root, names[i], &v) && take_count(&v, &out->step);
}

void torch_origin(const struct torch_zip *zip, struct torch_origin *out)
{
    struct pv root = torch_zip_root(zip);

    *out = (struct torch_origin){0};
    if (!is_lightning(&root, out) && !is_composer(&root, out) &&
        !is_torchtune(&root, out))
        find_step(&root, out);
}
