/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_pickle.c - pickles that OLMo put into tensors of bytes, as objects. */
#include "index/formats/olmo/olmo_pickle.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/formats/format.h"
#include "index/formats/pickle/pickle.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/formats/torch/torch_zip.h"

enum {
    MAX_PICKLE = 64 << 20, /* names of the parameters of one group */
    MAX_JSON = 64 << 20,
    FIRST_ITEMS = 16,
};

int olmo_pickles_add(struct olmo_pickles *l, const struct olmo_pickle *p, struct err *e)
{
    if (!VEC_ROOM(l->item, l->count, l->cap))
        return err_nomem(e);
    l->item[l->count++] = *p;
    return 0;
}

void olmo_pickles_release(struct olmo_pickles *l)
{
    free(l->item);
    *l = (struct olmo_pickles){0};
}

/* What was read before must still be the same file. */
static int open_again(const struct scan_context *c, const struct safetensors_file *f,
                      struct source **out, struct err *e)
{
    char path[PATH_MAX];

    if (store_join(c->dir, f->name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", c->dir, f->name);
    if (c->store->ops->open(c->store, path, out, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    if (!file_id_equal(&(*out)->id, &f->id))
        return err_set(e, ESTALE, "%s was changed during the scan", path);
    return 0;
}

static int decode(const struct scan_context *c, const struct olmo_pickle *p,
                  struct buf *json, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(pickle_freep) struct pickle *pickle = NULL;
    uint64_t used = 0;
    struct pv root;

    if (p->length > MAX_PICKLE)
        return err_set(e, EFBIG, "a pickle of %" PRIu64 " bytes", p->length);
    TRY(open_again(c, p->file, &src, e));
    TRY(pickle_load(src, p->offset, p->length, NULL, &pickle, &used, e));
    if (used != p->length)
        return err_set(e, EBADMSG,
                       "the pickle ends after %" PRIu64 " of %" PRIu64 " bytes", used,
                       p->length);
    root = pickle_root(pickle);
    TRY(object_to_json(NULL, &root, p->length * 2 + 1000, NULL, NULL, json, e));
    return source_check(src, e);
}

static int add_unreadable(struct sink *sink, const struct buf *key,
                          const struct err *why, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {0};

    buf_adds(&json, "{\"$type\":\"opaque\",\"class\":\"unreadable\",\"error\":");
    buf_add_json(&json, why->text, strlen(why->text));
    buf_addc(&json, '}');
    if (buf_failed(&json) ||
        sink_warning(sink, "object", "%s: %s", key->data, why->text) < 0)
        return err_nomem(e);
    return sink_object(sink, key->data, key->len, json.data, json.len, e);
}

static int report_one(const struct scan_context *c, struct sink *sink, const char *part,
                      const struct olmo_pickle *p, struct err *e)
{
    uint64_t most = object_json_most(MIN(p->length, (uint64_t)MAX_PICKLE));
    CLEANUP(buf_release) struct buf key = {0}, json = {.max = MIN(most, MAX_JSON)};
    struct err why = {0};

    if (part)
        buf_addf(&key, "%s.", part);
    if (buf_adds(&key, p->key) < 0)
        return err_nomem(e);
    if (decode(c, p, &json, &why) == 0)
        return sink_object(sink, key.data, key.len, json.data, json.len, e);
    if (!safetensors_stops_scan(why.code))
        return add_unreadable(sink, &key, &why, e);
    return err_copy(e, &why);
}

int olmo_pickles_report(const struct scan_context *c, struct sink *sink,
                        const char *part, const struct olmo_pickles *l, struct err *e)
{
    for (size_t i = 0; i < l->count; i++)
        TRY(report_one(c, sink, part, &l->item[i], e));
    return 0;
}
