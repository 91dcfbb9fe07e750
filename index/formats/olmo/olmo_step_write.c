/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_step_write.c - the writer of OLMo-core's stepN/ (1.0 to 3.0). */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/dcp/dcp_write.h"
#include "index/formats/olmo/olmo_core.h"
#include "index/formats/torch/torch_object_write.h"
#include "index/layout.h"

/*
 * The keys of model_and_optim/ (olmo_core/train/train_module, 3.0.0): "model." and the
 * model's own name, "optim." and what torch's flattened optimizer state has. Tensors are
 * those of the input, in its order, under these keys.
 */
struct step_writing {
    const struct layout_input *in;
    struct layout *out;
    struct layout_input state; /* of model_and_optim/ */
    struct torch_objects objects;
    bool first; /* train/rank0.pt is written */
};

/* ---- keys ---- */

static const char model[] = "model.";

static int name_model(struct step_writing *w, struct layout_tensor *t, struct err *e)
{
    const char *own = t->key + t->wrapper;
    size_t own_len = t->key_len - t->wrapper, len = own_len + sizeof model - 1;
    char *key = arena_alloc(layout_arena(w->out), len + 1);

    if (!key)
        return err_nomem(e);
    memcpy(key, model, sizeof model - 1);
    memcpy(key + sizeof model - 1, own, own_len);
    t->key = key;
    t->key_len = len;
    t->wrapper = sizeof model - 1;
    return 0;
}

/* OLMo-core's own keys stay: one of its train modules has no prefixes. */
static int name_tensors(struct step_writing *w, struct err *e)
{
    bool own = w->in->format && strcmp(w->in->format, "olmo-core-step") == 0;
    struct layout_tensor *t =
        arena_array(layout_arena(w->out), w->in->tensors + 1, sizeof *t);

    if (!t)
        return err_nomem(e);
    if (w->in->tensors)
        memcpy(t, w->in->tensor, w->in->tensors * sizeof *t);
    for (size_t i = 0; i < w->in->tensors; i++)
        if (t[i].role == ROLE_MODEL && !own)
            TRY(name_model(w, &t[i], e));
    w->state.tensor = t;
    return 0;
}

/* ---- train/ ---- */

/* "train/rank3.pt": the state of a rank's trainer, as our reader names it. */
static bool is_trainer(const struct layout_object *o)
{
    char name[64], same[64];
    unsigned rank;

    if (o->key_len >= sizeof name)
        return false;
    memcpy(name, o->key, o->key_len);
    name[o->key_len] = '\0';
    if (sscanf(name, "train/rank%9u.pt", &rank) != 1)
        return false;
    snprintf(same, sizeof same, "train/rank%u.pt", rank);
    return strcmp(name, same) == 0;
}

static int put_trainer(struct step_writing *w, const struct layout_object *o,
                       struct err *e)
{
    struct torch_object x;
    char path[64];
    int rc = torch_object_make(&w->objects, o, false, &x, e);

    if (rc > 0) {
        snprintf(path, sizeof path, "%.*s", (int)o->key_len, o->key);
        torch_object_take(&x);
        rc = torch_object_file(&x, w->out, path, e);
        w->first |= strcmp(path, "train/rank0.pt") == 0;
    } else if (rc == 0) {
        rc = layout_loss(w->out, LOSS_OBJECT, o->key, o->key_len, e);
    }
    torch_object_release(&x);
    return rc;
}

/* The trainer finds a step by rank 0's state: that of nothing but the step, if need be. */
static int put_first_trainer(struct step_writing *w, struct err *e)
{
    static const char key[] = "train/rank0.pt";
    char json[64] = "{}";
    struct layout_object o = {.key = key, .key_len = sizeof key - 1, .json = json};

    if (w->in->has_step)
        snprintf(json, sizeof json, "{\"global_step\": %" PRId64 "}", w->in->step);
    o.json_len = strlen(json);
    return put_trainer(w, &o, e);
}

static int put_train(struct step_writing *w, struct err *e)
{
    struct layout_object *rest =
        arena_array(layout_arena(w->out), w->in->objects + 1, sizeof *rest);

    if (!rest)
        return err_nomem(e);
    w->state.object = rest;
    w->state.objects = 0;
    for (size_t i = 0; i < w->in->objects; i++) {
        const struct layout_object *o = &w->in->object[i];

        if (!is_trainer(o))
            rest[w->state.objects++] = *o;
        else
            TRY(put_trainer(w, o, e));
    }
    return w->first ? 0 : put_first_trainer(w, e);
}

/* ---- the mark ---- */

/* Written last; the version is that of the code whose layout this is. */
static int put_mark(struct step_writing *w, struct err *e)
{
    bool own = w->in->format && strcmp(w->in->format, "olmo-core-step") == 0;
    CLEANUP(buf_release) struct buf text = {0};
    const char *version = own && w->in->version ? w->in->version : "3.0.0";
    struct layout_file *f;

    buf_adds(&text, "{\"ephemeral\": false, \"version\": ");
    buf_add_json(&text, version, strlen(version));
    buf_adds(&text, "}");
    if (buf_failed(&text))
        return err_nomem(e);
    TRY(layout_file_new(w->out, ".metadata.json", 2, &f, e));
    return layout_bytes(f, text.data, text.len, e);
}

/* ---- all of it ---- */

static int layout_step(const struct layout_input *in, const struct layout_options *o,
                       struct layout *out, struct err *e)
{
    struct step_writing w = {.in = in, .out = out, .state = *in};
    struct dcp_write_how how = {.dir = "model_and_optim", .role_of = olmo_core_role};
    int ret;

    if (o->max_shard_size || o->codec)
        return err_set(
            e, EINVAL,
            "olmo-step: a file a rank is written, plain: no shard size, no codec");
    ret = torch_objects_new(in, layout_arena(out), &w.objects, e);
    if (ret == 0)
        ret = name_tensors(&w, e);
    if (ret == 0)
        ret = put_train(&w, e);
    how.known = in->tensor;
    how.skip = w.objects.taken;
    if (ret == 0)
        ret = dcp_write(&w.state, o, &how, out, e);
    return ret == 0 ? put_mark(&w, e) : ret;
}

const struct format_writer writer_olmo_step = {
    .name = "olmo-step",
    .title = "OLMo-core's step folder: model_and_optim/, train/",
    .layout = layout_step,
    .wraps = true,
};
