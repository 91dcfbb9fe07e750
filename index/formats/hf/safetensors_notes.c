/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_notes.c - __metadata__ of a model that lies in several files. */
#include "index/formats/hf/safetensors_notes.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"

enum {
    MAX_BYTES = 4 << 20, /* it stands in the row that tells of the checkpoint */
};

static const char FORMAT[] = "format", USUAL[] = "pt";

static int compare(const void *a, const void *b)
{
    const struct safetensors_note *x = a, *y = b;
    int order = strcmp(x->name, y->name);

    return order ? order : strcmp(x->text, y->text);
}

/* All texts of all files, in order of their names. */
static int gather(const struct safetensors_files *f, struct safetensors_note **out,
                  size_t *count, struct err *e)
{
    size_t n = 0;

    for (size_t i = 0; i < f->count; i++)
        n += f->file[i].h.notes;
    *out = calloc(n + 1, sizeof **out);
    if (!*out)
        return err_nomem(e);
    *count = 0;
    for (size_t i = 0; i < f->count; i++)
        for (size_t k = 0; k < f->file[i].h.notes; k++)
            (*out)[(*count)++] = f->file[i].h.note[k];
    if (n > 0)
        qsort(*out, n, sizeof **out, compare);
    return 0;
}

static bool is_of_pieces(const char *name)
{
    return strcmp(name, "DCP_SHARDING_INFO") == 0 || strcmp(name, "DCP_VERSION") == 0;
}

static void put(struct buf *out, const char *name, const char *text)
{
    buf_addc(out, out->len > 0 ? ',' : '{');
    buf_add_json(out, name, strlen(name));
    buf_addc(out, ':');
    buf_add_json(out, text, strlen(text));
}

/* What is told once, or by all in one way. *format: what stands there, else NULL. */
static void put_agreed(struct buf *out, const struct safetensors_note *note,
                       size_t count, const char **format)
{
    *format = NULL;
    for (size_t i = 0, n; i < count; i += n) {
        for (n = 1; i + n < count && strcmp(note[i].name, note[i + n].name) == 0; n++)
            continue;
        if (is_of_pieces(note[i].name) ||
            strcmp(note[i].text, note[i + n - 1].text) != 0)
            continue;
        if (strcmp(note[i].name, FORMAT) == 0)
            *format = note[i].text;
        put(out, note[i].name, note[i].text);
    }
}

int safetensors_notes_join(const struct safetensors_files *f, struct buf *out,
                           struct err *e)
{
    CLEANUP(buf_release) struct buf all = {.max = MAX_BYTES};
    CLEANUP_FREE struct safetensors_note *note = NULL;
    const char *format;
    size_t count = 0, only = sizeof "{\"format\":\"pt\"" - 1;
    bool usual;

    TRY(gather(f, &note, &count, e));
    put_agreed(&all, note, count, &format);
    if (!format)
        put(&all, FORMAT, USUAL);
    if (buf_failed(&all) == -ENOMEM)
        return err_nomem(e);
    usual = !format || strcmp(format, USUAL) == 0;
    if (buf_failed(&all) || (usual && all.len == only)) {
        if (!usual)
            put(out, FORMAT, format);
        if (!usual)
            buf_addc(out, '}');
        return buf_failed(out) ? err_nomem(e) : buf_failed(&all) != 0;
    }
    buf_add(out, all.data, all.len);
    buf_addc(out, '}');
    return buf_failed(out) ? err_nomem(e) : 0;
}
