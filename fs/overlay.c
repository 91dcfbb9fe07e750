/* SPDX-License-Identifier: MIT */
/* fs/overlay.c - reads the directory of hf= once, when the mount begins. */
#include "fs/overlay.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "fs/side.h"
#include "index/formats/hf/hf_index.h"
#include "index/map/mapping.h"

struct overlay {
    struct store *store;
    struct listing *listing; /* holds the names */
    struct overlay_file *file;
    size_t count;
};

/* Tensors come from the checkpoint; another model's must not stand beside them. */
static bool is_weights(const char *name)
{
    static const char *const ends[] = {
        ".safetensors", ".bin",     ".pt",   ".pth",  ".ckpt",
        ".h5",          ".msgpack", ".gguf", ".onnx", ".npz",
    };
    struct hf_index_name index;
    size_t len = strlen(name);

    if (hf_index_name(name, ".safetensors", &index) ||
        hf_index_name(name, ".bin", &index))
        return true;
    for (size_t i = 0; i < ARRAY_SIZE(ends); i++) {
        size_t n = strlen(ends[i]);

        if (len >= n && strcmp(name + len - n, ends[i]) == 0)
            return true;
    }
    return false;
}

static int list_files(struct overlay *o, struct err *e)
{
    TRY(o->store->ops->list(o->store, "", &o->listing, e));
    o->file = calloc(listing_count(o->listing) + 1, sizeof *o->file);
    if (!o->file)
        return err_nomem(e);
    for (size_t i = 0; i < listing_count(o->listing); i++) {
        const struct listing_entry *entry = listing_at(o->listing, i);

        if (entry->st.kind == ENTRY_FILE && !is_weights(entry->name))
            o->file[o->count++] =
                (struct overlay_file){.name = entry->name, .st = entry->st};
    }
    return 0;
}

int overlay_open(const char *named, struct overlay **out, struct err *e)
{
    const struct store_options anywhere = {.follow_symlinks = true};
    struct overlay *o = calloc(1, sizeof *o);
    char dir[PATH_MAX];
    int rc = o ? mapping_hf_dir(named, dir, e) : err_nomem(e);

    if (rc == 0)
        rc = store_open_local(dir, &anywhere, &o->store, e);
    if (rc == 0 && o->store->file)
        rc = err_set(e, ENOTDIR, "%s is no directory", dir);
    if (rc == 0)
        rc = list_files(o, e);
    if (rc < 0) {
        overlay_free(o);
        return err_wrap(e, "hf=");
    }
    *out = o;
    return 0;
}

void overlay_free(struct overlay *o)
{
    if (!o)
        return;
    free(o->file);
    listing_free(o->listing);
    store_close(o->store);
    free(o);
}

size_t overlay_count(const struct overlay *o)
{
    return o ? o->count : 0;
}

const struct overlay_file *overlay_at(const struct overlay *o, size_t i)
{
    return &o->file[i];
}

struct store *overlay_store(const struct overlay *o)
{
    return o->store;
}

int overlay_open_file(const struct overlay *o, size_t i, struct side **out,
                      struct err *e)
{
    const struct overlay_file *f = &o->file[i];

    return side_open(o->store, f->name, f->st.id.dev, f->st.id.ino, out, e);
}
