/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_objects.c - counters, configuration and the user's state. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

/* What tells of tensors, and is shown as these. */
static const char *const of_tensors[] = {"module",
                                         "buffer_names",
                                         "param_shapes",
                                         "frozen_param_shapes",
                                         "frozen_param_fragments",
                                         "optimizer",
                                         NULL};

/* What DeepSpeed writes on each rank (0.19.8, _common_checkpoint_state()). */
static const char *const own[] = {"module",
                                  "buffer_names",
                                  "param_shapes",
                                  "frozen_param_shapes",
                                  "frozen_param_fragments",
                                  "optimizer",
                                  "shared_params",
                                  "lr_scheduler",
                                  "data_sampler",
                                  "random_ltd",
                                  "skipped_steps",
                                  "global_steps",
                                  "global_samples",
                                  "dp_world_size",
                                  "mp_world_size",
                                  "checkpoint_parallel_dimensions",
                                  "ds_config",
                                  "ds_version",
                                  "num_experts",
                                  "ds_autoep_layers",
                                  "autoep_layers",
                                  "universal_checkpoint_info",
                                  NULL};

static int report(struct ds_scan *s, const struct torch_file *f,
                  const char *const *skip, const char *object, struct err *e)
{
    const struct torch_report how = {
        .part = s->how->part,
        .role = ROLE_OTHER,
        .entries = true,
        .object = object,
        .skip = skip,
    };

    return torch_file_report_loaded(s->sink, f, &how, e);
}

/*
 * Stage 0 keeps the optimizer here, that of each stage of a pipeline in its own file
 * (0.17.6, engine.py, _save_checkpoint()), by the numbers of its parameters: which are whose
 * is written nowhere.
 */
static int report_optimizer(struct ds_scan *s, const struct ds_part *p, struct err *e)
{
    CLEANUP(buf_release) struct buf prefix = {0}, key = {0};
    struct ds_entry x = {.f = &p->model, .path = "optimizer", .role = ROLE_OPTIMIZER};
    struct pv v, ignored;

    if (!ds_get_some(&p->root, "optimizer", &v))
        return 0;
    buf_adds(&prefix, "");
    if (p != s->part)
        buf_addf(&prefix, "%s:", p->model.path);
    buf_addf(&key, "%soptimizer", buf_failed(&prefix) ? "" : prefix.data);
    if (buf_failed(&prefix) || buf_failed(&key))
        return err_nomem(e);
    x.prefix = prefix.data;
    TRY(ds_entry_tensors(s, &x, v, e));
    TRY(ds_entry_object(s, &x, key.data, &v, e));
    if ((ds_get(&v, "fp32_groups", &ignored) ||
         ds_get(&v, "fp32_groups_flat", &ignored)) &&
        sink_warning(s->sink, "unnamed-masters",
                     "the fp32 masters of stage 0 are %s.fp32_groups…: no file "
                     "tells their names; NAME is what the model computed with",
                     key.data) < 0)
        return err_nomem(e);
    return 0;
}

int ds_model_objects(struct ds_scan *s, const struct ds_part *p, struct err *e)
{
    int rc = p == s->part ? report(s, &p->model, of_tensors, s->how->object, e)
                          : ds_rank_objects(s, &p->model, e);

    return rc < 0 ? rc : report_optimizer(s, p, e);
}

int ds_rank_objects(struct ds_scan *s, const struct torch_file *f, struct err *e)
{
    CLEANUP(buf_release) struct buf prefix = {0};

    buf_addf(&prefix, "%s%s:", s->how->object ? s->how->object : "", f->path);
    if (buf_failed(&prefix))
        return err_nomem(e);
    return report(s, f, own, prefix.data, e);
}
