/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_adapter.c - has an adapter all layers that were trained? */
#include "index/formats/nemo/nemo_adapter.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/formats/layer_name.h"
#include "index/formats/optim_sizes.h"
#include "index/key_text.h"
#include "index/sink.h"
#include "remote/source.h"

/*
 * Rank 0 writes the adapter. Before 0.6 it had only the layers of its own stage of a
 * pipeline, while the optimizer's state is of all of them.
 */

static const char wrapper[] = "base_model.model.";

struct name {
    const char *text;
    size_t len;
};

static int compare(const void *a, const void *b)
{
    const struct name *x = a, *y = b;
    int order = memcmp(x->text, y->text, MIN(x->len, y->len));

    return order ? order : (x->len > y->len) - (x->len < y->len);
}

/* Is there one that starts with these bytes? */
static bool has_start(const struct name *names, size_t count, const char *text,
                      size_t len)
{
    const struct name start = {text, len};
    size_t low = 0, high = count;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (compare(&names[mid], &start) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low < count && names[low].len >= len &&
           memcmp(names[low].text, text, len) == 0;
}

/* In order of the bytes, as the model has them; malloc'd. */
static struct name *list_names(const struct safetensors_header *h)
{
    struct name *names = calloc(h->count + 1, sizeof *names);
    size_t drop = strlen(wrapper);

    for (size_t i = 0; names && i < h->count; i++) {
        const struct safetensors_tensor *t = &h->tensor[i];
        bool has = t->name_len > drop && memcmp(t->name, wrapper, drop) == 0;

        names[i] =
            (struct name){t->name + (has ? drop : 0), t->name_len - (has ? drop : 0)};
    }
    if (names)
        qsort(names, h->count, sizeof *names, compare);
    return names;
}

static int compare_layers(struct sink *sink, const struct safetensors_header *h,
                          const struct optim_sizes *known, struct err *e)
{
    CLEANUP_FREE struct name *names = list_names(h);
    size_t len, layer, all, count = 0;
    struct name last = {0}, first = {0};
    const char *name;
    char text[200];

    if (!names)
        return err_nomem(e);
    for (size_t i = 0; (name = optim_sizes_name(known, i, &len)); i++) {
        struct name now = {.text = name};

        if (!layer_name(name, len, &layer, &all) ||
            !has_start(names, h->count, name, all) ||
            has_start(names, h->count, name, layer))
            continue;
        now.len = layer;
        first = first.text ? first : (struct name){name, len};
        count += !last.text || compare(&last, &now) != 0;
        last = now;
    }
    if (count == 0)
        return 0;
    key_text(text, sizeof text, first.text, first.len);
    if (sink_warning(sink, "missing-layers",
                     "the adapter has nothing of %zu layers that the optimizer has the "
                     "state of, as %s: before 0.6 only the first stage of a pipeline "
                     "was saved",
                     count, text) < 0)
        return err_nomem(e);
    return 0;
}

int nemo_adapter_check(const struct scan_context *c, struct sink *sink,
                       const char *path, const struct optim_sizes *known, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    struct err why = {0};
    char full[PATH_MAX];

    if (store_join(c->dir, path, full, sizeof full) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", path);
    if (c->store->ops->open(c->store, full, &src, &why) == 0 &&
        safetensors_read(src, 0, src->size, &h, &why) == 0)
        return compare_layers(sink, &h, known, e);
    if (!safetensors_stops_scan(why.code))
        return 0;
    *e = why;
    return -e->code;
}
