/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_dcp_tensors.c - reports the tensors that shards are joined to. */
#include "index/formats/hf/hf_dcp_priv.h"

#include <errno.h>
#include <string.h>

#include "index/key_text.h"

/* After sink_fault(), which fails only for lack of memory. */
static int faulty(int r, struct err *e)
{
    return r < 0 ? err_nomem(e) : 0;
}

/* Units of 4-bit elements are pairs; nothing else is packed (hf_join_pieces). */
static void shape_of(const struct hf_tensor *t, struct shape *out)
{
    *out = t->units;
    if (t->dtype == DTYPE_F4 && out->nd > 0)
        out->dim[out->nd - 1] *= 2;
}

static bool is_empty(const struct shape *units)
{
    for (uint32_t d = 0; d < units->nd; d++)
        if (units->dim[d] == 0)
            return true;
    return false;
}

static int report_piece(struct hf_scan *s, const struct hf_piece *p, struct err *e)
{
    const struct safetensors_file *f = &s->file.file[p->file];
    struct shape units;
    struct chunk c = {.file = f->number,
                      .offset = f->h.data + p->t->begin,
                      .length = p->t->end - p->t->begin,
                      .start = p->start,
                      .size = units.dim};

    hf_piece_units(p->t, &units);
    return is_empty(&units) ? 0 : sink_chunk(s->sink, &c, e);
}

/* What is wrong with the tensor as far as this driver knows; the sink finds overlaps. */
static int report_fault(struct hf_scan *s, const struct hf_tensor *t, struct err *e)
{
    uint32_t rank = hf_without(s, t);
    struct sink *sink = s->sink;

    if (t->fault && t->count > 0)
        return faulty(sink_fault(sink, "%s: %s",
                                 s->file.file[s->piece[t->first].file].name, t->fault),
                      e);
    if (t->named)
        return faulty(sink_fault(sink,
                                 "no shard has it, but the optimizer or the list of "
                                 "names in .hf_metadata does"),
                      e);
    if (t->count == 0)
        return faulty(sink_fault(sink,
                                 "no shard has it, but it is among the full files%s%s",
                                 s->full_dir[0] ? " in " : "", s->full_dir),
                      e);
    if (!t->full && rank > 0)
        return faulty(sink_fault(sink,
                                 "pieces are missing; rank %u has no file of model "
                                 "file %u",
                                 rank, t->k),
                      e);
    if (t->full && !hf_trusted(s, t))
        return faulty(sink_fault(sink, "its size is not sure, since files are lost: %s",
                                 s->proof.why),
                      e);
    return 0; /* a hole of unknown reason is the sink's to describe */
}

static int report_tensor(struct hf_scan *s, const struct hf_tensor *t, struct err *e)
{
    const struct safetensors_tensor *name = hf_name_of(s, t);
    struct shape shape;
    struct sink_tensor out = {
        .key = name->name,
        .key_len = name->name_len,
        .part = s->how->part,
        .wrapper = s->how->wrapper ? s->how->wrapper(name->name, name->name_len) : 0,
        .modules = true,
        .dtype = t->dtype,
        .shape = &shape,
        .role = s->how->role};

    shape_of(t, &shape);
    TRY(sink_tensor_begin(s->sink, &out, e));
    TRY(report_fault(s, t, e));
    for (size_t i = 0; i < t->count && !t->fault; i++)
        TRY(report_piece(s, &s->piece[t->first + i], e));
    return sink_tensor_end(s->sink, e);
}

/* A copy of another shape, where no pieces are missing: it is older, or of another model. */
static int warn_of_copy(struct hf_scan *s, struct err *e)
{
    const struct safetensors_tensor *first = NULL;
    size_t count = 0;
    char key[200];

    for (size_t i = 0; i < s->ntensors; i++) {
        const struct hf_tensor *t = &s->tensor[i];

        if (!t->copy || t->count == 0 || t->fault || hf_same_as_copy(t))
            continue;
        first = first ? first : t->copy;
        count++;
    }
    if (!first)
        return 0;
    key_text(key, sizeof key, first->name, first->name_len);
    if (sink_warning(s->sink, "copy-differs",
                     "%zu tensors have another shape in the full files, as %s", count,
                     key) < 0)
        return err_nomem(e);
    return 0;
}

static int tell_tied(struct hf_scan *s, struct err *e)
{
    bool head = false, embedding = false;

    for (size_t i = 0; s->config.tied && i < s->ntensors; i++) {
        const struct safetensors_tensor *t = hf_name_of(s, &s->tensor[i]);

        head |= hf_is_head(t->name, t->name_len);
        embedding |= hf_is_embedding(t->name, t->name_len);
    }
    return embedding && !head ? hf_tell_tied(s->sink, e) : 0;
}

int hf_report_tensors(struct hf_scan *s, struct err *e)
{
    for (size_t i = 0; i < s->ntensors; i++)
        TRY(report_tensor(s, &s->tensor[i], e));
    TRY(warn_of_copy(s, e));
    return tell_tied(s, e);
}
