/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_entry.c - values of a file that are shown as they are. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

enum { MAX_JSON = 64 << 20 }; /* of one object */

struct entry_walk {
    struct ds_scan *s;
    struct ds_entry *x;
    struct buf text;
};

/* Left out? Adds nothing to the set, so that the object can ask again. */
static bool is_taken(const struct ds_entry *x, const char *path, size_t len)
{
    return x->taken && keyset_has(x->taken, path, len);
}

static int set_key(struct buf *out, const struct ds_entry *x, const char *path,
                   size_t len)
{
    buf_clear(out);
    buf_adds(out, x->prefix);
    buf_add(out, path, len);
    return buf_failed(out);
}

/* A tensor of which only the name is known: shown as empty bytes that cannot be read. */
static int add_damaged(struct ds_scan *s, const struct ds_entry *x,
                       struct sink_tensor *t, const char *why, struct err *e)
{
    static const struct shape none = {.nd = 1};

    t->dtype = DTYPE_U8;
    t->shape = &none;
    TRY(ds_begin(s, x->f->path, t, e));
    if (sink_fault(s->sink, "%s", why) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

/* torch_item_fn */
static int add_item(void *user, const struct torch_item *item, struct err *e)
{
    struct entry_walk *w = user;
    struct sink_tensor t = {.part = w->s->how->part, .role = w->x->role};

    if (is_taken(w->x, item->key, item->key_len))
        return 0;
    if (set_key(&w->text, w->x, item->key, item->key_len) < 0)
        return err_nomem(e);
    t.key = w->text.data ? w->text.data : "";
    t.key_len = w->text.len;
    w->x->tensors++;
    if (!item->tensor)
        return add_damaged(w->s, w->x, &t, item->why, e);
    return torch_file_tensor(w->s->sink, w->x->f, item->tensor, &t, e);
}

int ds_entry_tensors(struct ds_scan *s, struct ds_entry *x, struct pv v, struct err *e)
{
    struct entry_walk own = {.s = s, .x = x};
    struct torch_walk w = {.zip = x->f->zip,
                           .fn = add_item,
                           .user = &own,
                           .key = {.max = TORCH_MAX_PATH},
                           .path = {.max = TORCH_MAX_PATH}};
    int rc;

    buf_adds(&w.key, x->path);
    buf_adds(&w.path, x->path);
    rc = torch_walk_value(&w, v, e);
    torch_walk_release(&w);
    buf_release(&own.text);
    return rc < 0 ? err_wrap(e, "%s", x->f->path) : 0;
}

/* object_tensor_fn: tensors that have NAMEs are opaque here. */
static const char *key_of(void *user, const char *path, size_t len,
                          const struct torch_tensor *tensor)
{
    struct entry_walk *w = user;
    struct buf full = {.max = TORCH_MAX_PATH};
    const char *key = NULL;

    (void)tensor;
    buf_adds(&full, w->x->path);
    if (len > 0)
        torch_path_add(&full, path, len);
    if (!buf_failed(&full) && full.data && !is_taken(w->x, full.data, full.len) &&
        set_key(&w->text, w->x, full.data, full.len) == 0)
        key = w->text.data;
    buf_release(&full);
    return key;
}

int ds_entry_object(struct ds_scan *s, struct ds_entry *x, const char *key,
                    const struct pv *v, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {.max = MAX_JSON}, name = {0};
    struct entry_walk own = {.s = s, .x = x};
    struct err why = {0};
    int rc;

    buf_adds(&name, s->how->object ? s->how->object : "");
    buf_adds(&name, key);
    if (buf_failed(&name))
        return err_nomem(e);
    rc = object_to_json(x->f->zip, v, 0, key_of, &own, &json, &why);
    buf_release(&own.text);
    if (rc == 0)
        return sink_object(s->sink, name.data, name.len, json.data, json.len, e);
    if (rc == -ENOMEM)
        return err_nomem(e);
    return sink_warning(s->sink, "object", "%s: %s", name.data, why.text) < 0
               ? err_nomem(e)
               : 0;
}
