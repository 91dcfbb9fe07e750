/* SPDX-License-Identifier: MIT */
/* index/formats/format.h - what a checkpoint format has to bring: a driver. */
#ifndef UFS_INDEX_FORMATS_FORMAT_H
#define UFS_INDEX_FORMATS_FORMAT_H

#include "base/base.h"
#include "index/chunk.h"
#include "index/sink.h"
#include "remote/listing.h"
#include "remote/store.h"

struct err;
struct pool;

/* A driver's answer to "is this yours?". */
struct bid {
    /*
     * 0: no. By what was verified: a name pattern 10 to 30, a name and a magic number 40
     * to 60, a parsed marker file 70 to 90, a composite that claims parts 95.
     */
    int score;
    char reason[160]; /* in words, for `unshard probe` */
};

/* What a scan may use. Everything is borrowed. */
struct scan_context {
    struct store *store;
    struct pool *pool;       /* may be NULL */
    struct listing *listing; /* of the checkpoint's directory, or of the file's */
    const char *dir;         /* the directory, relative to the store */
    const char *file;        /* NULL, or the one file of it that is the checkpoint */
};

/*
 * A format. bid() is a pure function of the listing (names, sizes, first bytes of files,
 * sub-listings), cheap, and never fails: what it cannot read is no reason to bid. scan()
 * reports tensors, chunks and objects to the sink; it reads headers only. It returns an
 * error when nothing of the checkpoint can be trusted (the checkpoint is then shown with
 * the reason in checkpoint.json), and goes on with sink_fault or sink_warning otherwise.
 */
struct format_driver {
    const char *name;  /* also the fixture folder and the page docs/formats/NAME.md */
    const char *title; /* for `unshard formats` */
    void (*bid)(struct listing *l, struct bid *out);
    /* Optional: is this single file by itself a checkpoint? Same scores. */
    void (*bid_file)(struct listing *l, const char *name, struct bid *out);
    int (*scan)(const struct scan_context *c, struct sink *sink, struct err *e);
    /* Encodings of this format's chunks, NULL-terminated, or NULL. */
    const struct chunk_codec *const *codecs;
    const struct store_writer *writer; /* NULL: read-only format */
};

/* All drivers, NULL-terminated; made from the list in index/formats/meson.build. */
extern const struct format_driver *const format_drivers[];

/* The codec of an encoding, or NULL. */
const struct chunk_codec *format_codec(enum chunk_encoding encoding);

#endif
