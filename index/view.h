/* SPDX-License-Identifier: MIT */
/* index/view.h - a virtual file: literal bytes and windows of tensors. */
#ifndef UFS_INDEX_VIEW_H
#define UFS_INDEX_VIEW_H

#include "base/base.h"
#include "base/buf.h"
#include "index/catalog.h"

struct arena;
struct err;

enum view_kind { VIEW_MODEL, VIEW_OPTIMIZER };
enum view_prefix { PREFIX_AUTO, PREFIX_KEEP, PREFIX_DROP };

/*
 * The one safetensors file of a role. Its header is made when the checkpoint is scanned
 * (PREFIX_AUTO) or first asked for, and kept in the index; order and padding as CONTRACT.md,
 * "Bytes", says.
 */
struct view_info {
    int64_t id;
    enum view_kind kind;
    const char *name;   /* "model.safetensors", "adapter_model.safetensors", ... */
    uint64_t size;      /* of the whole file */
    uint64_t header;    /* literal bytes at its start; tensors follow back to back */
    int64_t whole_file; /* number of the source file that it is, byte for byte, or -1 */
    const char *fault;  /* why open gives EIO (a broken tensor in it), or NULL */
    uint64_t ino;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    int64_t mtime_ns;
};

/*
 * May there be such a file? The role has tensors; or the checkpoint is one safetensors file
 * without any, which is the model's file as it is (it loads as {}).
 */
bool view_is_possible(const struct checkpoint_info *cp, enum view_kind kind);

/* -ENOENT when there is none. */
int view_get(struct catalog *c, int64_t checkpoint, enum view_kind kind,
             enum view_prefix prefix, struct arena *a, struct view_info *out,
             struct err *e);

/* Bytes of the literal header. */
int view_header(struct catalog *c, const struct view_info *v, uint64_t off, size_t len,
                void *dst, struct err *e);

/* Where each tensor lies in the file: sorted by `at`, bytes > 0 only, back to back. */
struct view_member {
    uint64_t at, bytes;
    uint32_t ord;
};
int view_members(struct catalog *c, const struct view_info *v, struct view_member **out,
                 size_t *n, struct err *e);

/*
 * .unshard/checkpoint.json and .unshard/objects.json, written to a descriptor as a stream
 * (memory does not grow with the checkpoint). The first is also `unshard info --json`.
 */
int report_checkpoint(struct catalog *c, int64_t checkpoint, int fd, struct err *e);
int report_objects(struct catalog *c, int64_t checkpoint, int fd, struct err *e);

/*
 * An index of the model's one file, as save_pretrained writes it of several: loaders that take
 * all *.safetensors drop those that it does not name.
 */
int report_index(struct catalog *c, int64_t checkpoint, enum view_prefix prefix, int fd,
                 struct err *e);

#endif
