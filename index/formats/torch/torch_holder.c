/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_holder.c - tensors of a class that only holds another tensor. */
#include "index/formats/torch/torch_holder.h"

#include <string.h>

#include "base/base.h"

/* Of torchao, which was float8_experimental first; modules were moved, names were not. */
static const struct {
    const char *class, *attribute;
} holders[] = {
    {"WeightWithDynamicFloat8CastTensor", "_tensor"},
    {"WeightWithDelayedFloat8CastTensor", "_tensor"},
    {"WeightWithStaticFloat8CastTensor", "_tensor"},
    {"ScaledGroupedMMTensor", "_data"},
    {"TrainingWeightWrapperBaseTensor", "_data"},
    {"Float8TrainingWeightWrapperTensor", "_data"},
    {"MXFP8TrainingWeightWrapperTensor", "_data"},
    {"Int8MixedPrecisionTrainingLinearWeight", "_data"},
    {"BitNetTrainingLinearWeight", "_data"},
};

static const char *attribute_of(const struct pv *type)
{
    const char *module, *name;

    if (type->kind != PV_GLOBAL || !pv_global(type, &module, &name) ||
        (strncmp(module, "torchao.", 8) != 0 &&
         strncmp(module, "float8_experimental.", 20) != 0))
        return NULL;
    for (size_t i = 0; i < ARRAY_SIZE(holders); i++)
        if (strcmp(name, holders[i].class) == 0)
            return holders[i].attribute;
    return NULL;
}

bool torch_held(const struct pv *args, struct pv *held, struct pv *outer)
{
    struct pv function, type, state;
    const char *attribute;

    if (pv_count(args) != 4)
        return false;
    function = pv_at(args, 0);
    type = pv_at(args, 1);
    *outer = pv_at(args, 2);
    state = pv_at(args, 3);
    if (function.kind != PV_GLOBAL || state.kind != PV_DICT ||
        !pv_is(&function, "torch._utils", "_rebuild_wrapper_subclass") ||
        outer->kind != PV_TUPLE || pv_count(outer) < 3)
        return false;
    attribute = attribute_of(&type);
    return attribute && pv_dict_get(&state, attribute, held);
}
