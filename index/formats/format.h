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
struct layout;
struct layout_input;
struct layout_options;
struct pool;

/* A driver's answer to "is this yours?". */
struct bid {
    /*
     * 0: no. By what was verified: a name pattern 10 to 30, a name and a magic number 40
     * to 60, a parsed marker file 70 to 90, a composite that claims parts 95.
     */
    int score;
    char reason[160]; /* in words, for `unshard probe` */
    /*
     * Of one file: it belongs to a checkpoint that another file of the directory stands for
     * (a shard, the first of which is that file), and is none by itself.
     */
    bool piece;
};

/* What a scan may use. Everything is borrowed. */
struct scan_context {
    struct store *store;
    struct pool *pool;       /* may be NULL */
    struct listing *listing; /* of the checkpoint's directory, or of the file's */
    const char *dir;         /* the directory, relative to the store */
    const char *file;        /* NULL, or the one file of it that is the checkpoint */
    bool among;              /* file: beside others that are checkpoints as well */
};

/*
 * A checkpoint of which each of several subdirectories has a file of the same name, as the
 * ranks of NeMo 1 save. It stands in their directory under that name. All is the listing's.
 */
struct format_set {
    const char *name;     /* of the files */
    const char *dir;      /* the first subdirectory that has one */
    struct entry_stat st; /* of that file */
};
typedef int format_set_fn(void *user, const struct format_set *set);

/*
 * How a format is written: by the name that --to and save= take. layout() fills an empty
 * layout (index/layout.h) from what is to be written; it does no input or output. What the
 * format cannot hold (a dtype, a role, objects) it reports by layout_loss(); what makes no
 * sense (a mesh for a format without ranks) is -EINVAL, and -ENOTSUP what cannot be written
 * at all, by name.
 */
struct format_writer {
    const char *name, *title; /* "dcp", "PyTorch DCP" */
    bool wraps;               /* it puts a wrapper before the model's names */
    int (*layout)(const struct layout_input *in, const struct layout_options *o,
                  struct layout *out, struct err *e);
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
    /* Optional: the same by its content alone, where no driver knows its name. */
    void (*bid_content)(struct listing *l, const char *name, struct bid *out);
    /*
     * Optional: calls fn for each checkpoint that is a set of files in subdirectories, until
     * it returns other than 0; that, or -ENOMEM. Where there are some, subdirectories of
     * which is_set_dir() is true hold nothing else, and are not shown beside them. scan()
     * gets the name as its `file`.
     */
    int (*sets)(struct listing *l, format_set_fn *fn, void *user);
    bool (*is_set_dir)(const char *name);
    int (*scan)(const struct scan_context *c, struct sink *sink, struct err *e);
    /* Encodings of this format's chunks, NULL-terminated, or NULL. */
    const struct chunk_codec *const *codecs;
    const struct format_writer *const
        *writers; /* NULL-terminated, or NULL: read-only */
};

/* All drivers, NULL-terminated; made from the list in index/formats/meson.build. */
extern const struct format_driver *const format_drivers[];

/* The writer of this name, or NULL; the i-th of all, or NULL behind the last. */
const struct format_writer *format_writer(const char *name);
const struct format_writer *format_writer_at(size_t i);

/* The codec of an encoding, or NULL. */
const struct chunk_codec *format_codec(enum chunk_encoding encoding);

#endif
