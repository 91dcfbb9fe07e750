/* SPDX-License-Identifier: MIT */
/* index/formats/unread.c - the table of kinds that no driver reads, and a look-up. */
#include "index/formats/unread.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/stand_in.h"
#include "remote/listing.h"

enum {
    HEAD = 264,  /* up to a tar's mark, the farthest of all */
    FILES = 512, /* of a directory that are looked into: whoever asks waits for it */
};

/* What tells a kind: the end of a name, bytes at a place, or both. */
struct mark {
    const char *suffix; /* NULL: any name */
    const char *bytes;  /* NULL: any */
    uint16_t at, len;
    bool is_dir;
    struct unread_kind kind;
};

#define BYTES(at_, text) .bytes = (text), .at = (at_), .len = sizeof(text) - 1

static const char by_h5py[] =
    "h5py reads its arrays; safetensors.numpy.save_file writes them into a file that is read";
static const char unpack[] = "unpack it beside, and name the directory";
static const char gguf_tools[] =
    "llama.cpp's convert_llama_ggml_to_gguf.py makes GGUF of it, which is read";
static const char pull[] = "git lfs pull";

/* The first that fits counts: what a name tells more exactly stands before its container. */
static const struct mark marks[] = {
    {.suffix = ".keras",
     BYTES(0, "PK\3\4"),
     .kind = {"an archive of Keras",
              "keras.saving.load_model reads it; safetensors.numpy.save_file({w.path: "
              "w.numpy() for w in model.weights}, ...) writes a file that is read"}},
    /* The HDF5 File Format Specification, version 3.0, "Disk Format: Level 0A". */
    {BYTES(0, "\x89HDF\r\n\x1a\n"),
     .kind = {"HDF5, as Keras and h5py write it", by_h5py}},
    /* tensorflow/python/saved_model/constants.py of TensorFlow 2.16. */
    {.suffix = "saved_model.pb",
     .kind = {"the graph of a TensorFlow SavedModel",
              "tf.train.load_checkpoint(\"variables/variables\") reads its arrays; "
              "safetensors.numpy.save_file writes a file that is read"}},
    {.suffix = ".data-00000-of-00001",
     .kind = {"a checkpoint of TensorFlow",
              "tf.train.load_checkpoint(PREFIX) reads its arrays; "
              "safetensors.numpy.save_file writes a file that is read"}},
    /* A ModelProto begins with its ir_version: onnx.proto of ONNX 1.16, field 1. */
    {.suffix = ".onnx",
     BYTES(0, "\x08"),
     .kind = {"a model of ONNX",
              "onnx.numpy_helper.to_array gives the initializers; "
              "safetensors.numpy.save_file writes a file that is read"}},
    {.suffix = ".pdparams",
     BYTES(0, "\x80"),
     .kind =
         {"a pickle of PaddlePaddle",
          "paddle.load(FILE, return_numpy=True) reads it; safetensors.numpy.save_file "
          "writes a file that is read"}},
    {.suffix = ".pdopt",
     BYTES(0, "\x80"),
     .kind =
         {"a pickle of PaddlePaddle",
          "paddle.load(FILE, return_numpy=True) reads it; safetensors.numpy.save_file "
          "writes a file that is read"}},
    /* _serialization.py of Equinox 0.13: np.save after np.save, no names. */
    {.suffix = ".eqx",
     .kind =
         {"a file of Equinox, which has arrays without names",
          "load it with equinox.tree_deserialise_leaves, and save the tree with Orbax"}},
    {.suffix = ".mlpackage",
     .is_dir = true,
     .kind = {"a model of Core ML",
              "it was made from another; that one's own checkpoint may be read"}},
    {.suffix = ".mlmodel",
     .kind = {"a model of Core ML",
              "it was made from another; that one's own checkpoint may be read"}},
    /* schema.fbs of TensorFlow Lite: file_identifier. */
    {BYTES(4, "TFL3"),
     .kind = {"a model of TensorFlow Lite",
              "it was made from another; that one's own checkpoint may be read"}},
    /* llama.cpp before GGUF: the four letters as a little-endian number. */
    {BYTES(0, "lmgg"), .kind = {"GGML, llama.cpp's format before GGUF", gguf_tools}},
    {BYTES(0, "fmgg"), .kind = {"GGML, llama.cpp's format before GGUF", gguf_tools}},
    {BYTES(0, "tjgg"), .kind = {"GGML, llama.cpp's format before GGUF", gguf_tools}},
    {BYTES(0, "version https://git-lfs.github.com/spec/v1\n"),
     .kind = {"a pointer of Git LFS, not the file itself", pull}},
    {BYTES(0, "\x1f\x8b"), .kind = {"compressed with gzip", unpack}},
    {BYTES(0, "\x28\xb5\x2f\xfd"), .kind = {"compressed with zstd", unpack}},
    {BYTES(0, "\xfd\x37zXZ\0"), .kind = {"compressed with xz", unpack}},
    {BYTES(0, "BZh"), .kind = {"compressed with bzip2", unpack}},
    {BYTES(0, "7z\xbc\xaf\x27\x1c"), .kind = {"an archive of 7-Zip", unpack}},
    {BYTES(257, "ustar"), .kind = {"an archive of tar", unpack}},
    {.suffix = ".zip", BYTES(0, "PK\3\4"), .kind = {"an archive of zip", unpack}},
    /* Protocols 2 to 5: Haiku, joblib, scikit-learn and one's own scripts write these. */
    {.suffix = ".pkl",
     BYTES(0, "\x80"),
     .kind =
         {"a pickle that torch.save did not write",
          "load it in Python if you trust it, and save its arrays with numpy.savez"}},
    {.suffix = ".pickle",
     BYTES(0, "\x80"),
     .kind =
         {"a pickle that torch.save did not write",
          "load it in Python if you trust it, and save its arrays with numpy.savez"}},
};

static bool ends_with(const char *name, const char *suffix)
{
    size_t n = strlen(name), s = strlen(suffix);

    return n >= s && memcmp(name + n - s, suffix, s) == 0;
}

static bool fits(const struct mark *m, const char *name, const char *head, size_t len)
{
    if (m->suffix && !ends_with(name, m->suffix))
        return false;
    return !m->bytes || ((size_t)m->at + m->len <= len &&
                         memcmp(head + m->at, m->bytes, m->len) == 0);
}

static const struct unread_kind *kind_of(struct listing *l,
                                         const struct listing_entry *entry)
{
    char head[HEAD];
    size_t len = 0;

    if (entry->st.kind == ENTRY_OTHER)
        return NULL;
    if (entry->st.kind == ENTRY_FILE &&
        listing_peek(l, entry->name, head, sizeof head, &len) < 0)
        return NULL;
    for (size_t i = 0; i < ARRAY_SIZE(marks); i++)
        if (marks[i].is_dir == (entry->st.kind == ENTRY_DIR) &&
            fits(&marks[i], entry->name, head, len))
            return &marks[i].kind;
    return NULL;
}

const struct unread_kind *unread_find(struct listing *l, const char *only,
                                      const char **name)
{
    for (size_t i = 0, files = 0; i < listing_count(l) && files < FILES; i++) {
        const struct listing_entry *entry = listing_at(l, i);
        const struct unread_kind *kind;

        if (only && strcmp(entry->name, only) != 0)
            continue;
        files += entry->st.kind == ENTRY_FILE;
        kind = kind_of(l, entry);
        if (kind) {
            *name = entry->name;
            return kind;
        }
    }
    return NULL;
}

int unread_tell(struct listing *l, const char *only, const char *source, struct err *e)
{
    const char *name;
    const struct unread_kind *kind;

    if (stand_in_find(l, only, e) < 0)
        return err_wrap(e, "%s: no checkpoint that a driver recognises", source);
    kind = unread_find(l, only, &name);
    if (!kind)
        return 0;
    err_set(e, ENOENT, "%s: no checkpoint that a driver recognises: %s is %s", source,
            name, kind->what);
    return err_hint(e, "%s", kind->then);
}
