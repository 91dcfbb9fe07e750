/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/torch_dcp.h - a DCP directory reported as a part of a composite checkpoint. */
#ifndef UFS_INDEX_FORMATS_TORCH_DCP_H
#define UFS_INDEX_FORMATS_TORCH_DCP_H

#include <limits.h>

#include "base/base.h"
#include "index/sink.h"

struct err;
struct listing;
struct scan_context;

/* For bids: `name` is ".metadata" or the first "__R.metadata"; borrowed from the listing. */
struct dcp_found {
    const char *name;
    char class[128]; /* the first class of its pickle, "" when none is in sight */
};

/* Is there a metadata file that begins as torch's Metadata? *out tells also if not. */
bool dcp_find(struct listing *l, struct dcp_found *out);

/* How a DCP directory is shown. All zero but `role`: it is the whole checkpoint. */
struct dcp_how {
    const char *dir;    /* relative to the checkpoint's directory; NULL or "": itself */
    const char *part;   /* sink_tensor.part of all tensors, or NULL */
    int role;           /* enum role of all tensors, or -1: by part and key */
    bool no_wrapper;    /* whatever planner_data says, keys are the module's own */
    const char *object; /* before the keys of objects, or NULL */
    bool unwrap;        /* objects were saved as lists of one: that one is shown */
    /* Optional, in place of `role`: enum role, or -1. */
    int (*role_of)(const char *key, size_t len);
    /* Optional: sees each tensor before it is reported, on the scan's thread. */
    void (*on_tensor)(void *user, const char *key, size_t len,
                      const struct shape *shape);
    /* Optional: sees each object as it is reported, on the scan's thread. */
    void (*on_object)(void *user, const char *key, size_t len, const char *json,
                      size_t json_len);
    void *user;
};

/* What the metadata told. */
struct dcp_told {
    const char *format; /* "torch-dcp", "torch-dcp-ranklocal", ...; static */
    bool olmo;          /* written by OLMo-core's own writer */
    uint64_t ranks, files;
    char version[32];        /* of the metadata, or "" */
    char metadata[PATH_MAX]; /* its first file, relative to the store */
};

/*
 * Reports all tensors, objects and oddities of the directory, hides its files, and does
 * not declare it a part (sink_part). `told` is filled in as far as it got, also where the
 * metadata cannot be read: -ENOENT when there is none (any more), -EBADMSG or -ENOTSUP
 * when it is of no use; nothing was reported then but hidden names.
 */
int dcp_report(const struct scan_context *c, struct sink *sink,
               const struct dcp_how *how, struct dcp_told *told, struct err *e);

#endif
