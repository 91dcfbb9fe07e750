/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_file.h - torch.save files of a checkpoint, reported whole or in part. */
#ifndef UFS_INDEX_FORMATS_TORCH_FILE_H
#define UFS_INDEX_FORMATS_TORCH_FILE_H

#include "base/base.h"
#include "index/formats/torch/torch_zip.h"
#include "index/sink.h"

struct buf;
struct err;
struct scan_context;
struct source;

/* One torch.save file, zip or legacy. `struct torch_file f = {.path = ...};` is closed. */
struct torch_file {
    const char *path;  /* relative to the checkpoint's directory; borrowed */
    bool shown;        /* it stays visible in the mount */
    uint32_t number;   /* of sink_file() */
    struct file_id id; /* when it was registered */
    struct source *src;
    struct torch_zip *zip; /* its object graph; storages may be deflated */
};

/*
 * Registers the file with the sink: on the scan's thread. -ENOENT when it is missing (it
 * is registered all the same), -EBADMSG when its name is not safe.
 */
int torch_file_register(struct sink *sink, struct torch_file *f, struct err *e);

/*
 * Reads the graph of a registered file; any thread. -EBADMSG when it is damaged, -ENOTSUP
 * when it is no torch.save file or one of before 2017, -ESTALE when it has changed.
 */
int torch_file_load(const struct scan_context *c, struct torch_file *f, struct err *e);

/*
 * Is the error of one of these one of a file's content? That is told with its tensors, and the
 * others go on; any other (no memory, no descriptors, changed meanwhile, stopped) says nothing
 * of the file, and ends the scan.
 */
bool torch_file_is_damaged(int code);

/* Frees graph and source; number and path stay. */
void torch_file_close(struct torch_file *f);

/*
 * Adds the whole of tensor `x` as one chunk of the tensor that was begun at the sink: the
 * box that starts at `start` (NULL: at 0). Only where no storage can be deflated: those
 * need torch_file_tensor().
 */
int torch_file_chunk(struct sink *sink, const struct torch_file *f,
                     const struct torch_tensor *x, const uint64_t *start,
                     struct err *e);

/*
 * The same where storages can be deflated: `param` is what torch_file_param() wrote, and
 * lasts until the tensor's end. NULL: it is not.
 */
int torch_file_piece(struct sink *sink, const struct torch_file *f,
                     const struct torch_tensor *x, const uint64_t *start,
                     const char *param, struct err *e);

/* What the codec has to know of a deflated storage (struct chunk). */
enum { TORCH_MAX_PARAM = 64 };
void torch_file_param(const struct torch_tensor *x, char param[TORCH_MAX_PARAM]);

/*
 * Reports a tensor of a loaded file: `t` says key, part, role and wrapper; dtype, shape
 * and codec_key are filled in. -EEXIST when that key is there already.
 */
int torch_file_tensor(struct sink *sink, const struct torch_file *f,
                      const struct torch_tensor *x, struct sink_tensor *t,
                      struct err *e);

/* How the content of one file is shown. All zero but `role`: as CONTRACT.md wants it for
 * files that are no part of role model or optimizer. */
struct torch_report {
    /*
     * Before the path of each tensor in its object. NULL: "FILE:", FILE being the path
     * of the file; "": nothing, for files that are a part of role model or optimizer.
     */
    const char *prefix;
    bool prefix_is_wrapper; /* model.safetensors leaves it out (sink_tensor.wrapper) */
    const char *part;       /* sink_tensor.part, or NULL */
    int role; /* of all tensors: enum role; -1: by part and path in the object */
    /*
     * false: everything that is no tensor is one object, called `object` (NULL: the path
     * of the file). true: one for each entry of the outermost dict (or list) that
     * holds anything but tensors, called by the entry's name with `object` (NULL: "")
     * before it.
     */
    bool entries;
    const char *object;
    /* Entries of the outermost dict that the caller reports himself; needs `entries`. */
    const char *const *skip; /* NULL-terminated, or NULL */
    const char *only;        /* NULL, or the one entry that is reported; the same */
    /* Is this entry of the outermost dict reported? NULL: all are; the same. */
    bool (*wants_entry)(void *user, const struct pv *key);
    /* Entries model, module, state_dict, model_state_dict, state.model are wrappers. */
    bool wrappers;
    bool shown; /* the file stays visible: torch_file.shown of torch_file_report() */
    /* Is the tensor of this key (without the prefix) reported? NULL: all are. */
    bool (*wants)(void *user, const char *key, size_t len);
    /*
     * Instead: the caller reports all tensors himself, also those that are merged out of
     * shards (dist_tensor.h), and only objects are reported. Appends the key that the
     * tensor of this path has; 0, or -ENOMEM.
     */
    int (*elsewhere)(void *user, const char *path, size_t len, struct buf *key);
    /* Optional: sees what torch_file_report() has loaded, before it is reported. */
    void (*loaded)(void *user, const struct torch_zip *zip);
    void *user;
    /*
     * What is wrong with the file as a whole is returned. Otherwise it is shown as an
     * unreadable object and a warning, and only errors of the index are returned.
     */
    bool strict;
};

/*
 * Registers, loads, reports and closes the file at `path`, relative to the checkpoint's
 * directory. Tensors that are damaged are listed with a fault. Shards of tensors (DTensor,
 * ShardedTensor) are opaque objects, what they hold is role other.
 */
int torch_file_report(const struct scan_context *c, struct sink *sink, const char *path,
                      const struct torch_report *how, struct err *e);

/* The same for a file that is loaded, which stays open. Always strict. */
int torch_file_report_loaded(struct sink *sink, const struct torch_file *f,
                             const struct torch_report *how, struct err *e);

/*
 * CHUNK_ZIP_DEFLATE: the tensor's codec_key is "BYTES CRC" of the plain bytes, or "BYTES
 * CRC SKIP" where SKIP of them stand before the first element (an .npy header).
 */
extern const struct chunk_codec codec_zip_deflate;

/* What a file is by its first bytes. */
enum torch_kind {
    TORCH_NOT,
    TORCH_ZIP, /* a zip whose first entry is one that torch.save or torch.jit writes */
    TORCH_MAYBE,  /* some other zip: repacked ones may have any order */
    TORCH_LEGACY, /* the five pickles of before 1.6 */
    TORCH_TAR     /* from before 2017: refused */
};
enum { TORCH_HEAD = 512 }; /* bytes that torch_sniff() wants to see */
enum torch_kind torch_sniff(const void *head, size_t len);

extern const struct format_writer writer_pt; /* pt_write.c */

#endif
