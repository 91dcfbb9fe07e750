/* SPDX-License-Identifier: MIT */
/* index/formats/torch/pt_write.c - the writer of plain state dicts, a torch.save file a role. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/object_value.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_zip_write.h"
#include "index/layout.h"

struct pt_set {
    const struct layout_input *in;
    struct layout *out;
    size_t *chosen; /* of the input, those of one role */
    size_t count;
};

/* The model's own names; all else is called as the mount calls it. */
static size_t dropped(const struct layout_tensor *t)
{
    return t->role == ROLE_MODEL ? t->wrapper : 0;
}

static bool fits(const struct layout_tensor *t)
{
    struct shape units;

    return torch_shape(t->dtype, &t->shape, &units) &&
           object_text_is_utf8(t->key, t->key_len);
}

/* Tensors of the role; those of role other belong to no file that a loader looks for. */
static int choose(struct pt_set *s, enum role role, struct err *e)
{
    s->count = 0;
    for (size_t i = 0; i < s->in->tensors; i++) {
        const struct layout_tensor *t = &s->in->tensor[i];

        if (t->role == role && fits(t))
            s->chosen[s->count++] = i;
        else if (t->role == role &&
                 layout_loss(s->out, LOSS_TENSOR, t->key, t->key_len, e) < 0)
            return -e->code;
    }
    return 0;
}

static int tell_losses(struct pt_set *s, struct err *e)
{
    size_t others = 0;
    char what[80];
    int n;

    for (size_t i = 0; i < s->in->tensors; i++)
        others += s->in->tensor[i].role == ROLE_OTHER;
    n = snprintf(what, sizeof what, "other (%zu tensors)", others);
    if (others)
        TRY(layout_loss(s->out, LOSS_ROLE, what, (size_t)n, e));
    for (size_t i = 0; i < s->in->objects; i++)
        TRY(layout_loss(s->out, LOSS_OBJECT, s->in->object[i].key,
                        s->in->object[i].key_len, e));
    return 0;
}

/* {key: tensor} */
static int put_pickle(const struct pt_set *s, struct zip_write *z, struct err *e)
{
    static const char name[] = "archive/data.pkl";
    struct pickler p = {0};
    int ret = 0;

    pickle_begin(&p);
    pickle_dict(&p);
    pickle_mark(&p);
    for (size_t i = 0; ret == 0 && i < s->count; i++) {
        const struct layout_tensor *t = &s->in->tensor[s->chosen[i]];
        struct shape units;
        char key[24];

        ret = shape_units(&t->shape, t->dtype, &units, e);
        snprintf(key, sizeof key, "%zu", i);
        pickle_text(&p, t->key + dropped(t), t->key_len - dropped(t));
        if (ret == 0)
            torch_pickle_tensor(&p, t->dtype, &units, key);
    }
    pickle_set(&p);
    pickle_end(&p);
    if (ret == 0 && buf_failed(&p.out))
        ret = err_set(e, -buf_failed(&p.out), "a pickle of more than 1 GiB");
    if (ret == 0)
        ret = zip_write_literal(z, name, strlen(name), p.out.data, p.out.len, e);
    pickle_release(&p);
    return ret;
}

static int put_tensor(const struct pt_set *s, struct zip_write *z, size_t i,
                      struct err *e)
{
    const struct layout_tensor *t = &s->in->tensor[s->chosen[i]];
    uint64_t bytes;
    char name[48];
    int n = snprintf(name, sizeof name, "archive/data/%zu", i);

    TRY(shape_bytes(&t->shape, t->dtype, &bytes, e));
    TRY(zip_write_open(z, name, (size_t)n, bytes, e));
    return layout_box(z->file, s->in, s->chosen[i], NULL, NULL, e);
}

static int put_file(const struct pt_set *s, const char *name, struct err *e)
{
    struct zip_write z = {0};
    struct layout_file *f;
    uint64_t len;
    int ret;

    if (s->count == 0)
        return 0;
    TRY(layout_file_new(s->out, name, 0, &f, e));
    zip_write_begin(&z, f, TORCH_ALIGN);
    ret = put_pickle(s, &z, e);
    if (ret == 0)
        ret = torch_zip_marks(&z, true, e);
    for (size_t i = 0; ret == 0 && i < s->count; i++)
        ret = put_tensor(s, &z, i, e);
    if (ret == 0)
        ret = torch_zip_version(&z, e);
    if (ret == 0)
        ret = zip_write_end(&z, &len, e);
    zip_write_release(&z);
    return ret < 0 ? err_wrap(e, "%s", name) : 0;
}

static int layout_pt(const struct layout_input *in, const struct layout_options *o,
                     struct layout *out, struct err *e)
{
    struct pt_set s = {.in = in, .out = out};
    int ret;

    if (o->ranks > 1 || o->mesh[0] || o->max_shard_size || o->codec) {
        err_set(
            e, EINVAL,
            "pt: one file of whole tensors is written, without ranks, sizes or codec");
        return err_hint(e, "leave --ranks, --mesh, --max-shard-size and --codec out");
    }
    s.chosen = arena_array(layout_arena(out), in->tensors + 1, sizeof *s.chosen);
    if (!s.chosen)
        return err_nomem(e);
    ret = tell_losses(&s, e);
    if (ret == 0)
        ret = choose(&s, ROLE_MODEL, e);
    if (ret == 0)
        ret = put_file(&s, in->adapter ? "adapter_model.bin" : "pytorch_model.bin", e);
    if (ret == 0)
        ret = choose(&s, ROLE_OPTIMIZER, e);
    return ret == 0 ? put_file(&s, "optimizer.pt", e) : ret;
}

const struct format_writer writer_pt = {
    .name = "pt",
    .title = "PyTorch torch.save: pytorch_model.bin, optimizer.pt",
    .layout = layout_pt,
};
