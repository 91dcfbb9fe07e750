/* SPDX-License-Identifier: MIT */
/* save/merge_sets.c - sets of files that have to be complete, and files that can stand as they are. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/hf/hf_index.h"
#include "remote/source.h"
#include "save/merge_priv.h"

enum { INDEX_MAX = 100 << 20 /* of a weight_map's text */ };

/* ---- sets that have to be complete ---- */

static bool has_file(const struct merge *m, const char *path)
{
    return merge_find(m, TAG_PATH, path, strlen(path)) != NOT_THERE;
}

static int missing(const char *by, const char *path, struct err *e)
{
    return err_set(e, EINVAL, "%s: %s is not there yet", by, path);
}

static int read_index(struct merge *m, size_t file, struct hf_index *out, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP_FREE char *text = NULL;

    TRY(merge_open(m, file, &src, e));
    if (src->size > INDEX_MAX)
        return err_set(e, EINVAL, "%s: too large for an index", f->path);
    text = malloc((size_t)src->size + 1);
    if (!text)
        return err_nomem(e);
    if (source_read(src, 0, (size_t)src->size, text, e) < 0 ||
        hf_index_parse(text, (size_t)src->size, ".safetensors", out, e) < 0)
        return merge_bad_file(f, e);
    return 0;
}

/* All files of "x-00001-of-00003": looked at once, by the first. */
int merge_check_set(const struct merge *m, const struct merge_file *f, struct err *e)
{
    unsigned number, of;
    size_t stem, digits;
    char path[4096];

    of = incoming_set(f->path, &number, &stem);
    if (of == 0)
        return 0;
    digits = strcspn(f->path + stem, "-");
    for (unsigned k = 1; k <= of; k++) {
        snprintf(path, sizeof path, "%.*s%0*u%s", (int)stem, f->path, (int)digits, k,
                 f->path + stem + digits);
        if (k != number && !has_file(m, path))
            return missing(f->path, path, e);
        if (k < number)
            return 0; /* the first one has looked */
    }
    return 0;
}

int merge_check_index(struct merge *m, size_t file, struct err *e)
{
    const struct merge_file *f = &m->spec.file[file];
    const char *slash = strrchr(f->path, '/');
    int dir = slash ? (int)(slash - f->path) + 1 : 0, ret = 0;
    struct hf_index x;
    char path[4096];

    TRY(read_index(m, file, &x, e));
    for (size_t i = 0; ret == 0 && i < x.nfiles; i++) {
        snprintf(path, sizeof path, "%.*s%s", dir, f->path, x.file[i].name);
        if (!has_file(m, path))
            ret = missing(f->path, path, e);
    }
    hf_index_release(&x);
    return ret;
}

int merge_check_keys(struct merge *m, size_t file, struct err *e)
{
    static const enum tag tags[] = {TAG_MODEL, TAG_OPTIMIZER, TAG_KEY};
    struct hf_index x;
    int ret = read_index(m, file, &x, e);

    if (ret < 0)
        return ret;
    for (size_t i = 0; ret == 0 && i < x.count; i++) {
        const char *key = x.entry[i].key;
        bool found = false;

        for (size_t k = 0; k < ARRAY_SIZE(tags); k++)
            found |= merge_find(m, tags[k], key, strlen(key)) != NOT_THERE;
        if (!found)
            ret = err_set(e, EINVAL, "%s lists %s, which has not arrived",
                          m->spec.file[file].path, key);
    }
    hf_index_release(&x);
    return ret;
}
