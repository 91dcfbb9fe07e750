/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_adapter.c - has an adapter all layers that were trained? */
#include "index/formats/nemo/nemo_adapter.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/formats/key_list.h"
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

/* As the model has them, sorted. */
static int list_names(const struct safetensors_header *h, struct key_list *names,
                      struct err *e)
{
    const struct key before = {wrapper, strlen(wrapper)};

    for (size_t i = 0; i < h->count; i++) {
        const struct safetensors_tensor *t = &h->tensor[i];
        const struct key full = {t->name, t->name_len};
        size_t drop = key_starts_with(&full, &before) ? before.len : 0;

        TRY(key_list_add(names, t->name + drop, t->name_len - drop, e));
    }
    key_list_sort(names);
    return 0;
}

static int compare_layers(struct sink *sink, const struct safetensors_header *h,
                          const struct optim_sizes *known, struct err *e)
{
    CLEANUP(key_list_release) struct key_list names = {0};
    struct key k, layer, all, last = {0}, first = {0};
    size_t count = 0;
    char text[200];

    TRY(list_names(h, &names, e));
    for (size_t i = 0; (k.name = optim_sizes_name(known, i, &k.len)); i++) {
        layer.name = all.name = k.name;
        if (!layer_name(k.name, k.len, &layer.len, &all.len) ||
            !key_list_has_start(&names, &all) || key_list_has_start(&names, &layer))
            continue;
        first = first.name ? first : k;
        count += !last.name || key_compare(&last, &layer) != 0;
        last = layer;
    }
    if (count == 0)
        return 0;
    key_text(text, sizeof text, first.name, first.len);
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
    return err_copy(e, &why);
}
