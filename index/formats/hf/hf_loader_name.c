/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_loader_name.c - by which name libraries ask for a model's file. */
#include "index/formats/hf/hf_loader_name.h"

#include <string.h>

static bool begins(const char *name, const char *with)
{
    return strncmp(name, with, strlen(with)) == 0;
}

static const char diffusers_stem[] = "diffusion_pytorch_model";

const char *hf_loader_name(const char *name)
{
    static const char plain[] = "diffusion_pytorch_model.safetensors";
    static const char *const stand_for_it[] = {
        "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.bin",
        "diffusion_pytorch_model.bin.index.json"};
    static const char suffix[] = ".safetensors";
    size_t len = strlen(name), end = sizeof suffix - 1;
    bool diffusers = begins(name, diffusers_stem);

    for (size_t i = 0; i < ARRAY_SIZE(stand_for_it); i++)
        if (strcmp(name, stand_for_it[i]) == 0)
            return plain;
    if (strstr(name, "-of-"))
        return diffusers ? "" : NULL;
    if (len <= end || strcmp(name + len - end, suffix) != 0)
        return NULL;
    return diffusers || begins(name, "model.") ? name : NULL;
}

bool hf_is_weights(const char *name)
{
    return strstr(name, ".safetensors") || strstr(name, ".bin");
}
