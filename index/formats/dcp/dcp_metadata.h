/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_metadata.h - the tables that one DCP .metadata pickle is folded into. */
#ifndef UFS_INDEX_FORMATS_DCP_METADATA_H
#define UFS_INDEX_FORMATS_DCP_METADATA_H

#include "base/base.h"
#include "index/dtype.h"
#include "index/formats/dcp/dcp_intern.h"

struct err;
struct source;

/*
 * Names and shapes of all metadata files of one checkpoint (rank-local saves have one a
 * rank), so that equal ones have equal numbers.
 */
struct dcp_names {
    struct intern keys;   /* fqn */
    struct intern paths;  /* relative_path */
    struct intern shapes; /* sizes and offsets: arrays of int64, negative ones too */
    struct intern words;  /* classes, dtypes and descriptors that we do not know */
};

void dcp_names_release(struct dcp_names *n);

/* In place of a shape's number. */
enum {
    DCP_NO_SHAPE = 0xffffffffu,  /* None, or left out: the offset of an object */
    DCP_BAD_SHAPE = 0xfffffffeu, /* no list of at most SHAPE_MAX_DIMS integers */
};

/* The dimensions of a shape, nd of them. */
const int64_t *dcp_shape(const struct dcp_names *n, uint32_t shape, uint32_t *nd);

/* Why an item of the metadata cannot be used. */
enum dcp_bad {
    DCP_GOOD = 0,
    DCP_BAD_CLASS,      /* neither tensor nor object: word */
    DCP_BAD_PROPERTIES, /* no TensorProperties */
    DCP_BAD_DTYPE,      /* word */
    DCP_BAD_LAYOUT,     /* not strided: word */
    DCP_BAD_SIZE,
    DCP_BAD_CHUNKS,
    DCP_BAD_INFO, /* no _StorageInfo */
    DCP_BAD_PATH,
    DCP_BAD_OFFSET,
    DCP_BAD_LENGTH,
    DCP_BAD_TRANSFORM, /* a descriptor that we do not know: word */
};

/* Where a blob lies (_StorageInfo). */
struct dcp_stored {
    uint64_t offset, length;
    uint32_t path;
    uint32_t word : 24;
    uint32_t bad : 7;
    uint32_t zstd : 1; /* transform_descriptors == ["stream.zstd/1"], else none */
};

/* A box of a tensor (ChunkStorageMetadata): two shapes. */
struct dcp_chunk {
    uint32_t start, size;
};

/* TensorStorageMetadata: its chunks are chunk[first .. first + count). */
struct dcp_tensor {
    uint32_t size; /* shape */
    uint32_t first, count;
    uint32_t word;
    uint8_t dtype, bad;
};

enum { DCP_OBJECT = 0xffffffffu };

/* One entry of state_dict_metadata. */
struct dcp_entry {
    uint32_t key;
    uint32_t tensor;  /* or DCP_OBJECT */
    uint32_t wrapper; /* bytes of the key that planner_data tells to be a wrapper */
    /*
     * The shape of the tensor that is stored flattened (Megatron Core 0.8 to 0.15, see
     * flat_boxes.h), DCP_BAD_SHAPE, or DCP_NO_SHAPE: it is stored as it is.
     */
    uint32_t whole;
};

/* One entry of storage_data; `start` DCP_NO_SHAPE: an object. */
struct dcp_index {
    uint32_t key, start;
    uint32_t stored;
};

/*
 * One metadata file. Entries are in the file's order, keys once. A later entry of
 * storage_data with the same key and offset has replaced the earlier one.
 */
struct dcp_metadata {
    struct dcp_names *names;
    struct dcp_entry *entry;
    struct dcp_tensor *tensor;
    struct dcp_chunk *chunk;
    struct dcp_stored *stored;
    struct dcp_index *index;
    uint32_t nentries, ntensors, nchunks, nstored, nindex;
    uint32_t *slot; /* index + 1 by key and start; open addressing */
    size_t nslots, nlinked;
    uint64_t skipped; /* entries whose key is of no use */
    char version[32]; /* Metadata.version, "" when it has none */
    bool olmo;        /* OLMo-core's own writer wrote it */
};

/*
 * Reads the whole source as one pickle of
 * torch.distributed.checkpoint.metadata.Metadata, as torch 2.3 to 2.15 write it, or of
 * Megatron Core's subclass of it. What is wrong with one tensor or blob is kept as
 * `bad` beside it; -EBADMSG when the pickle is damaged or no Metadata, or when it
 * claims more chunks than it has bytes (lists multiplied through the memo); -ENOTSUP
 * names a subclass of Metadata that some other trainer wrote.
 */
int dcp_metadata_load(struct source *s, struct dcp_names *names,
                      struct dcp_metadata **out, struct err *e);
void dcp_metadata_free(struct dcp_metadata *m);
void dcp_metadata_freep(struct dcp_metadata **m);

/* The blob of the key's chunk that starts at `start`; NULL: storage_data has none. */
const struct dcp_stored *dcp_stored_find(const struct dcp_metadata *m, uint32_t key,
                                         uint32_t start);

/*
 * Do these first bytes of a file begin a pickle whose first global is Metadata? `name`
 * gets "module.name" of that global, "" when there is none in sight.
 */
bool dcp_metadata_sniff(const void *head, size_t len, char *name, size_t size);

#endif
