/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_scan.h - one scan of a DCP checkpoint: what its files share. */
#ifndef UFS_INDEX_FORMATS_DCP_SCAN_H
#define UFS_INDEX_FORMATS_DCP_SCAN_H

#include "base/base.h"
#include "base/buf.h"
#include "base/err.h"
#include "index/formats/dcp/dcp_metadata.h"
#include "index/formats/format.h"
#include "index/shape.h"

struct dcp_how;
struct dcp_image;
struct source;

/* A metadata file: .metadata, or one rank's of a rank-local save. */
struct dcp_part {
    uint64_t rank;
    char name[32]; /* "__3.metadata" */
    struct dcp_metadata *m;
};

/* A chunk of a tensor, with the part (rank) whose file says so. */
struct dcp_box {
    struct dcp_chunk chunk;
    uint32_t part;
};

/* A relative_path. */
struct dcp_file {
    bool registered, safe;
    uint32_t number;         /* of sink_file(), when safe */
    struct dcp_image *image; /* NULL: not looked for */
    uint32_t image_key;      /* of the tensor that was last found in it, + 1 */
    struct source *src;      /* while objects are read from it, else NULL */
    bool wanted;             /* objects are about to be read from it */
};

/* An entry of one part. */
struct dcp_ref {
    uint32_t key, part, entry;
    uint32_t chunk; /* of a tensor that is looked into: its number + 1; else 0 */
};

struct dcp_scan {
    const struct scan_context *c; /* of the DCP directory */
    struct sink *sink;
    const struct dcp_how *how;
    const char *prefix; /* of the directory in the checkpoint: "" or "optim/" */
    struct dcp_names names;
    struct dcp_part *part; /* by rank */
    uint32_t nparts;
    bool rank_local;
    struct dcp_file *file; /* by number of the path */
    bool zstd;             /* compressed blobs met */
    uint32_t images;       /* safetensors images met */
    uint64_t replicas;     /* boxes that several ranks stored */
    struct buf text;       /* scratch for messages */
    struct dcp_box *box;   /* scratch: the chunks of one tensor */
    size_t box_cap;
    struct dcp_ref *object; /* entries that are objects, in order of key and rank */
    size_t nobjects, object_cap;
    struct dcp_ref *piece; /* chunks that are looked into, those of a tensor together */
    size_t npieces, piece_cap;
    bool wraps;       /* some tensor cannot be plain elements */
    bool has_wrapper; /* of the model: what is beside it is not the model */
    uint64_t wrapped; /* tensors of a class of their own, and the first one's key */
    uint32_t wrapped_key;
};

static inline const struct dcp_metadata *dcp_part_of(const struct dcp_scan *s,
                                                     const struct dcp_ref *ref)
{
    return s->part[ref->part].m;
}

static inline const struct dcp_entry *dcp_entry_of(const struct dcp_scan *s,
                                                   const struct dcp_ref *ref)
{
    return &dcp_part_of(s, ref)->entry[ref->entry];
}

/* After sink_warning(), which fails only for lack of memory. */
static inline int dcp_warned(int r, struct err *e)
{
    return r < 0 ? err_nomem(e) : 0;
}

/* ".metadata", else the first "__R.metadata" of a directory; NULL: there is none. */
const char *dcp_metadata_name(const struct listing *l);

/* Are there any .distcp files? */
bool dcp_has_distcp(const struct listing *l);

/* Registers the file with the sink when that was not done. */
int dcp_file_register(struct dcp_scan *s, uint32_t path, const struct dcp_file **out,
                      struct err *e);

/* Opens the file; -EBADMSG when its name leads out of the directory. */
int dcp_file_open(const struct dcp_scan *s, uint32_t path, struct source **out,
                  struct err *e);

/* The path as JSON text in `b` (it may hold anything), for messages. */
const char *dcp_path_text(const struct dcp_scan *s, uint32_t path, struct buf *b);

/* Reports one tensor; `ref` has the entries of the ranks that have it, lowest first. */
int dcp_report_tensor(struct dcp_scan *s, const struct dcp_ref *ref, size_t n,
                      struct err *e);

/* Why what is stored cannot be used, or NULL. */
const char *dcp_stored_fault(const struct dcp_scan *s, const struct dcp_stored *stored,
                             struct buf *b);

/* Reads all of s->object and reports them, and the tensors inside; then s->piece. */
int dcp_report_objects(struct dcp_scan *s, struct err *e);

/*
 * Tensors of a class of their own (torchao's quantised weights and states): the metadata
 * tells type and size of what they stand for, the item holds other tensors. Where an item
 * is shorter than its elements would be, s->wraps is set: all of s->part[0] is looked at.
 */
void dcp_find_wraps(struct dcp_scan *s);

/* Is the model in a wrapper that planner_data tells? Sets s->has_wrapper. */
void dcp_find_wrapper(struct dcp_scan *s);

/*
 * Has the tensor to be looked into before it is reported? 1: its chunks were added to
 * s->piece; 0: no, it is of plain elements as far as the metadata can tell. -ENOMEM.
 */
int dcp_look_into(struct dcp_scan *s, const struct dcp_ref *ref, struct err *e);

/*
 * A safetensors file inside a .distcp: FileSystemWriter(serialization_format=SAFETENSORS)
 * puts one behind the objects, for all tensors of the file, and gives each tensor the
 * image's own offset and the length of its bytes.
 */

/*
 * Is there an image at the chunk's offset? Reads the file the first time: 1, and where the
 * tensor of this key lies, when its shape (in units) and dtype are as the chunk says; 0
 * when there is none (a zip, or a file that cannot be read: that is found out later).
 * -EBADMSG when there is one that is damaged or holds something else.
 */
struct dcp_image_want {
    const char *key;
    size_t key_len;
    enum dtype dtype;
    const struct shape *box; /* units */
};
int dcp_image_find(struct dcp_scan *s, const struct dcp_stored *stored,
                   const struct dcp_image_want *want, uint64_t *offset, struct err *e);
void dcp_image_free(struct dcp_image *image);

#endif
