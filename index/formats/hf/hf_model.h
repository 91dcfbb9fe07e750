/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_model.h - a Hugging Face model as the model of a larger checkpoint. */
#ifndef UFS_INDEX_FORMATS_HF_MODEL_H
#define UFS_INDEX_FORMATS_HF_MODEL_H

#include "base/base.h"

struct err;
struct listing;
struct scan_context;
struct sink;

struct hf_model {
    const struct format_driver *driver; /* that reads it; NULL: there is no model */
    const char *main; /* its file, or its index; borrowed from the listing */
    bool adapter;     /* of PEFT, without its base model */
};

/*
 * The model in the directory itself, in safetensors or in torch.save files, single,
 * indexed, numbered or an adapter: what its own driver would take if nothing else stood
 * there. For bids, too.
 */
bool hf_model_find(struct listing *l, struct hf_model *out);

/*
 * Reports it with all that belongs to it: `sink_checkpoint` comes from its driver, and is
 * to be said again by the caller. Errors are those of the driver's scan().
 */
int hf_model_report(const struct hf_model *m, const struct scan_context *c,
                    struct sink *sink, struct err *e);

/*
 * An adapter beside a model of other files: its tensors are of role other, the part is
 * its name, and the file stays visible.
 */
int hf_adapter_report(const struct hf_model *m, const struct scan_context *c,
                      struct sink *sink, struct err *e);

/*
 * The same for a file that stands beside the model: an adapter, or what was trained with an
 * adapter that is the model. One that is damaged is told, and no error.
 */
int hf_beside_report(const char *name, const struct scan_context *c, struct sink *sink,
                     struct err *e);

/* Is it the name of a safetensors file that is read beside a model: never the model itself? */
bool hf_is_beside(const char *name);

/*
 * What was trained beside a model or an adapter and has a file of its own, where there is one:
 * LLaMA-Factory's value head; beside an adapter ms-swift's vision tower (vit.safetensors).
 */
int hf_trained_beside_report(const struct scan_context *c, struct sink *sink,
                             struct err *e);

#endif
