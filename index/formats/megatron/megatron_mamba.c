/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_mamba.c - how tensor ranks have cut Mamba's mixer. */
#include "index/formats/megatron/megatron_mamba.h"

#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "index/formats/ranks/rank_tensors.h"

/*
 * Rows of in_proj are those of z, x, B, C and dt, of conv1d those of x, B and C
 * (megatron/core/ssm/mamba_mixer.py of 0.8 to 0.19): a rank has its heads of each.
 */
struct mixer {
    uint64_t inner;  /* of z and of x */
    uint64_t states; /* of B and of C: groups by states of each */
    uint64_t heads;  /* of dt */
};

static const char MIXER[] = ".mixer.";

/* The length of the name up to the mixer's own names; 0: it is no mixer's. */
static size_t mixer_end(const struct rank_tensor *x)
{
    const char *at = memmem(x->name, x->len, MIXER, sizeof MIXER - 1);

    return at ? (size_t)(at - x->name) + sizeof MIXER - 1 : 0;
}

static const struct rank_tensor *sibling(const struct rank_tensors *model,
                                         const struct rank_tensor *x, size_t len,
                                         const char *name)
{
    CLEANUP(buf_release) struct buf key = {0};

    buf_add(&key, x->name, len);
    buf_adds(&key, name);
    return buf_failed(&key) ? NULL : rank_tensors_find(model, key.data, key.len);
}

static bool learn_mixer(const struct rank_tensors *model, const struct rank_tensor *x,
                        size_t len, struct mixer *out)
{
    const struct rank_tensor *in = sibling(model, x, len, "in_proj.weight"),
                             *back = sibling(model, x, len, "out_proj.weight"),
                             *log = sibling(model, x, len, "A_log"),
                             *conv = sibling(model, x, len, "conv1d.weight");
    uint64_t all;

    if (!conv) /* 0.19: a parameter of the mixer itself */
        conv = sibling(model, x, len, "conv1d_weight");
    if (!in || !back || !log || !conv || in->nd != 2 || back->nd != 2 || log->nd != 1 ||
        conv->nd < 2 || conv->dim[0] <= back->dim[1] ||
        (conv->dim[0] - back->dim[1]) % 2 != 0)
        return false;
    *out = (struct mixer){.inner = back->dim[1],
                          .states = (conv->dim[0] - back->dim[1]) / 2,
                          .heads = log->dim[0]};
    return !add_overflows(out->inner, conv->dim[0], &all) &&
           !add_overflows(all, out->heads, &all) && all == in->dim[0] &&
           out->heads > 0 && out->inner % out->heads == 0;
}

enum mamba_cut megatron_mamba_cut(const struct rank_tensors *model,
                                  const struct rank_tensor *x,
                                  struct mamba_blocks *blocks)
{
    size_t len = mixer_end(x), n = x->len - len;
    const char *name = x->name + len;
    struct mixer m;

    if (len == 0 || x->nd == 0 || !learn_mixer(model, x, len, &m))
        return MAMBA_NONE;
#define IS(text) (n == sizeof(text) - 1 && memcmp(name, text, n) == 0)
    if (IS("in_proj.weight")) {
        *blocks =
            (struct mamba_blocks){5, {m.inner, m.inner, m.states, m.states, m.heads}};
        return MAMBA_BLOCKS;
    }
    if ((IS("conv1d.weight") || IS("conv1d.bias") || IS("conv1d_weight") ||
         IS("conv1d_bias")) &&
        x->dim[0] == m.inner + 2 * m.states) {
        *blocks = (struct mamba_blocks){3, {m.inner, m.states, m.states}};
        return MAMBA_BLOCKS;
    }
    if (IS("out_proj.weight"))
        return MAMBA_COLUMNS;
    if ((IS("A_log") || IS("dt_bias") || IS("D")) && x->dim[0] == m.heads)
        return MAMBA_ROWS;
    if ((IS("norm.weight") || IS("D")) && x->dim[0] == m.inner)
        return MAMBA_ROWS;
#undef IS
    return MAMBA_NONE;
}
