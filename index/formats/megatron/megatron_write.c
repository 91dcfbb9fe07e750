/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_write.c - the common state and metadata.json, as written. */
#include "index/formats/megatron/megatron_write.h"

#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/megatron/megatron.h"

static bool is_key(const struct layout_object *o, const char *key)
{
    return o->key_len == strlen(key) && memcmp(o->key, key, o->key_len) == 0;
}

/* ---- names ---- */

static int name_tensors(const struct layout_input *in, struct mega_writing *w,
                        struct err *e)
{
    struct layout_tensor *t =
        arena_array(layout_arena(w->out), in->tensors + 1, sizeof *t);

    if (!t)
        return err_nomem(e);
    for (size_t i = 0; i < in->tensors; i++) {
        t[i] = in->tensor[i];
        if (t[i].role != ROLE_MODEL)
            continue;
        t[i].key += t[i].wrapper;
        t[i].key_len -= t[i].wrapper;
        t[i].wrapper = 0;
    }
    w->in.tensor = t;
    return 0;
}

/* ---- objects ---- */

/* 1: written, 0: it cannot be rebuilt. */
static int put_file(struct mega_writing *w, const struct layout_object *o,
                    const char *path, struct err *e)
{
    struct torch_object x;
    int rc = torch_object_make(&w->objects, o, false, &x, e);

    if (rc > 0) {
        torch_object_take(&x);
        rc = torch_object_file(&x, w->out, path, e) < 0 ? -e->code : 1;
    }
    torch_object_release(&x);
    return rc;
}

/* 1: it can be rebuilt, and its tensors are taken. */
static int take_cell(struct mega_writing *w, const struct layout_object *o,
                     struct err *e)
{
    struct megatron_cell cell;
    struct torch_object x;
    int rc;

    if (!megatron_cell(o->key, o->key_len, &cell) || cell.size[cell.n - 1] == 0)
        return 0;
    rc = torch_object_make(&w->objects, o, true, &x, e);
    if (rc > 0) {
        torch_object_take(&x);
        w->cell[w->cells++] = *o;
    }
    torch_object_release(&x);
    return rc;
}

/*
 * From 0.19 on the common state is a sharded object; all versions take a common.pt, and
 * rather than that one.
 */
static int put_object(struct mega_writing *w, const struct layout_object *o,
                      bool *common, struct err *e)
{
    int rc;

    if (!*common && (is_key(o, "common.pt") || is_key(o, "common_state/shard_0_1"))) {
        rc = put_file(w, o, "common.pt", e);
        *common |= rc > 0;
    } else if (is_key(o, "train_state.pt")) {
        rc = put_file(w, o, "train_state.pt", e);
    } else {
        rc = take_cell(w, o, e);
    }
    if (rc == 0)
        rc = layout_loss(w->out, LOSS_OBJECT, o->key, o->key_len, e);
    return rc < 0 ? rc : 0;
}

/* What load() cannot do without, whatever stands in it. */
static int put_empty_common(struct mega_writing *w, struct err *e)
{
    char json[64] = "{}";
    struct layout_object o = {.key = "common.pt", .key_len = 9, .json = json};
    int rc;

    if (w->in.has_step)
        snprintf(json, sizeof json, "{\"iteration\": %" PRId64 "}", w->in.step);
    o.json_len = strlen(json);
    rc = put_file(w, &o, "common.pt", e);
    return rc < 0 ? rc : 0;
}

static int put_objects(const struct layout_input *in, struct mega_writing *w,
                       struct err *e)
{
    bool common = false;

    w->cell = arena_array(layout_arena(w->out), in->objects + 1, sizeof *w->cell);
    if (!w->cell)
        return err_nomem(e);
    for (size_t i = 0; i < in->objects; i++)
        TRY(put_object(w, &in->object[i], &common, e));
    return common ? 0 : put_empty_common(w, e);
}

int mega_write_begin(const struct layout_input *in, struct layout *out,
                     struct mega_writing *w, struct err *e)
{
    *w = (struct mega_writing){.in = *in, .out = out};
    TRY(torch_objects_new(in, layout_arena(out), &w->objects, e));
    TRY(put_objects(in, w, e));
    TRY(name_tensors(in, w, e));
    w->in.object = w->cell;
    w->in.objects = w->cells;
    return 0;
}

/* All four fields: versions to 0.18 want the common backend's, later ones pass over it. */
int mega_write_end(struct mega_writing *w, const char *backend, struct err *e)
{
    struct layout_file *f;
    char text[160];
    int n = snprintf(text, sizeof text,
                     "{\"sharded_backend\": \"%s\", \"sharded_backend_version\": 1, "
                     "\"common_backend\": \"torch\", \"common_backend_version\": 1}",
                     backend);

    TRY(layout_file_new(w->out, "metadata.json", 2, &f, e));
    return layout_bytes(f, text, (size_t)n, e);
}
