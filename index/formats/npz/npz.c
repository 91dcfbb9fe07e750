/* SPDX-License-Identifier: MIT */
/* index/formats/npz/npz.c - NumPy's .npy and .npz files, each a checkpoint by itself. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/endian.h"
#include "base/err.h"
#include "base/utf8.h"
#include "index/formats/format.h"
#include "index/formats/npz/npz_member.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/zip.h"

static const char NPY[] = ".npy", NPZ[] = ".npz", EQX[] = ".eqx";

static bool has_suffix(const char *name, size_t len, const char *suffix)
{
    size_t n = strlen(suffix);

    return len > n && strncasecmp(name + len - n, suffix, n) == 0;
}

/* ---- bids ---- */

/* Two files of arrays are two checkpoints: no directory is one. */
static void npz_bid(struct listing *l, struct bid *out)
{
    (void)l;
    *out = (struct bid){0};
}

static void npz_bid_file(struct listing *l, const char *name, struct bid *out)
{
    size_t len = strlen(name), got = 0;
    char head[6];

    *out = (struct bid){0};
    if (!has_suffix(name, len, NPY) && !has_suffix(name, len, NPZ))
        return;
    if (listing_peek(l, name, head, sizeof head, &got) < 0)
        return;
    if (has_suffix(name, len, NPY) && got == 6 && memcmp(head, "\x93NUMPY", 6) == 0) {
        out->score = 50;
        snprintf(out->reason, sizeof out->reason, "an array of numpy.save");
    } else if (has_suffix(name, len, NPZ) && got >= 4 &&
               (memcmp(head, "PK\3\4", 4) == 0 || memcmp(head, "PK\5\6", 4) == 0)) {
        out->score = 50;
        snprintf(out->reason, sizeof out->reason, "a zip archive called .npz");
    }
}

enum { ZIP_HEADER = 30, HEAD = 512 };

/* By its first bytes: 'y' an array, 'z' an archive whose first member is one, 0: neither. */
static char kind_of(struct listing *l, const char *name)
{
    char head[HEAD];
    size_t got = 0, len;

    if (listing_peek(l, name, head, sizeof head, &got) < 0)
        return 0;
    if (got >= 6 && memcmp(head, "\x93NUMPY", 6) == 0)
        return 'y';
    if (got < ZIP_HEADER || memcmp(head, "PK\3\4", 4) != 0)
        return 0;
    len = get_le16(head + 26);
    return len <= got - ZIP_HEADER && has_suffix(head + ZIP_HEADER, len, NPY) ? 'z' : 0;
}

static void npz_bid_content(struct listing *l, const char *name, struct bid *out)
{
    *out = (struct bid){0};
    if (has_suffix(name, strlen(name),
                   EQX)) /* arrays without names, one after another */
        return;
    out->score = kind_of(l, name) ? 50 : 0;
    if (out->score > 0)
        snprintf(out->reason, sizeof out->reason, "arrays of numpy by its first bytes");
}

/* ---- arrays ---- */

struct npz_scan {
    struct sink *sink;
    struct source *src;
    uint32_t file;
};

/* The elements as a chunk of the tensor that was begun. */
static int put_chunk(const struct npz_scan *x, const struct npz_array *a, struct err *e)
{
    static const uint64_t zeros[SHAPE_MAX_DIMS];
    int64_t step[SHAPE_MAX_DIMS];
    const struct chunk c = {
        .file = x->file,
        .encoding = a->packed ? CHUNK_ZIP_DEFLATE : CHUNK_PLAIN,
        .flags = a->npy.swap ? CHUNK_SWAP : 0,
        .offset = a->offset,
        .length = a->length,
        .start = zeros,
        .size = a->npy.shape.dim,
        .step = a->npy.fortran && a->npy.shape.nd > 1 ? step : NULL,
    };

    npy_steps(&a->npy, step);
    return sink_chunk(x->sink, &c, e);
}

static int report_array(const struct npz_scan *x, const char *key, size_t key_len,
                        const struct npz_array *a, struct err *e)
{
    char codec_key[64];
    struct sink_tensor t = {
        .key = key,
        .key_len = key_len,
        .dtype = a->npy.dtype,
        .shape = &a->npy.shape,
        .role = -1,
        .codec_key = a->packed ? codec_key : NULL,
    };

    snprintf(codec_key, sizeof codec_key, "%" PRIu64 " %08" PRIx32 " %" PRIu64,
             a->plain, a->crc, a->npy.header);
    TRY(sink_tensor_begin(x->sink, &t, e));
    TRY(put_chunk(x, a, e));
    TRY(sink_tensor_end(x->sink, e));
    if (a->trailing == 0)
        return 0;
    return sink_warning(x->sink, "trailing-bytes",
                        "%.*s: %" PRIu64 " bytes behind the array are not read",
                        (int)MIN(key_len, (size_t)200), key, a->trailing) < 0
               ? err_nomem(e)
               : 0;
}

/* A member that is no array that can be read: listed, so that nobody takes it for absent. */
static int report_broken(const struct npz_scan *x, const char *key, size_t key_len,
                         const struct err *why, struct err *e)
{
    const struct shape none = {.nd = 1};
    const struct sink_tensor t = {
        .key = key,
        .key_len = key_len,
        .dtype = DTYPE_U8,
        .shape = &none,
        .role = -1,
    };

    TRY(sink_tensor_begin(x->sink, &t, e));
    if (sink_fault(x->sink, "%s", why->text) < 0)
        return err_nomem(e);
    return sink_tensor_end(x->sink, e);
}

/* Objects, text, dates: what they are is told, their bytes are not shown. */
static int report_foreign(const struct npz_scan *x, const char *key, size_t key_len,
                          const struct err *why, struct err *e)
{
    CLEANUP(buf_release) struct buf json = {0};

    buf_adds(&json, "{\"$type\":\"opaque\",\"class\":\"numpy.ndarray\",\"error\":");
    buf_add_json(&json, why->text, strlen(why->text));
    buf_addc(&json, '}');
    if (buf_failed(&json) ||
        sink_warning(x->sink, "not-a-tensor", "%.*s: %s",
                     (int)MIN(key_len, (size_t)200), key, why->text) < 0)
        return err_nomem(e);
    return sink_object(x->sink, key, key_len, json.data, json.len, e);
}

/* ---- files ---- */

/* A name without its extension; all of it where there is none. */
static size_t stem_len(const char *name)
{
    const char *dot = strrchr(name, '.');

    return dot && dot != name ? (size_t)(dot - name) : strlen(name);
}

static int scan_npy(const struct npz_scan *x, const char *name, struct err *e)
{
    struct npz_array a;

    if (npy_file_read(x->src, &a, e) < 0)
        return err_wrap(e, "%s", name);
    return report_array(x, name, stem_len(name), &a, e);
}

/* numpy.load takes the member KEY where there is one beside KEY.npy. */
static int check_alone(const struct zip *z, const char *name, size_t len, struct err *e)
{
    CLEANUP_FREE char *key = strndup(name, len);

    if (!key)
        return err_nomem(e);
    if (!zip_find(z, key))
        return 0;
    return err_set(e, EBADMSG,
                   "the archive has %.200s and %.200s: two arrays of a name", key,
                   name);
}

static int scan_member(const struct npz_scan *x, struct zip *z,
                       const struct zip_entry *entry, struct err *e)
{
    size_t len = strlen(entry->name);
    struct npz_array a;
    struct err why = {0};
    int rc;

    /* The array of the name "" is called ".npy" by numpy. */
    if (!has_suffix(entry->name, len, NPY) && strcmp(entry->name, NPY) != 0) {
        if (len > 0 && entry->name[len - 1] == '/' && entry->size == 0)
            return 0; /* zip(1) writes directories too */
        rc = sink_warning(x->sink, "odd-member",
                          "%.200s in the archive is no .npy file", entry->name);
        return rc < 0 ? err_nomem(e) : 0;
    }
    len -= strlen(NPY);
    rc = check_alone(z, entry->name, len, &why);
    if (rc == 0)
        rc = npz_member_read(x->src, z, entry, &a, &why);
    if (rc == 0)
        return report_array(x, entry->name, len, &a, e);
    if (rc == -ENOTSUP)
        return report_foreign(x, entry->name, len, &why, e);
    if (rc == -EBADMSG || rc == -EFBIG)
        return report_broken(x, entry->name, len, &why, e);
    *e = why;
    return err_wrap(e, "%s", entry->name);
}

static int scan_npz(const struct npz_scan *x, const char *name, struct err *e)
{
    CLEANUP(zip_freep) struct zip *z = NULL;

    if (zip_open(x->src, 0, x->src->size, &z, e) < 0)
        return err_wrap(e, "%s", name);
    for (size_t i = 0; i < zip_count(z); i++)
        if (scan_member(x, z, zip_at(z, i), e) < 0)
            return err_wrap(e, "%s", name);
    return 0;
}

static int tell_checkpoint(const struct scan_context *c, struct sink *sink,
                           bool archive, struct err *e)
{
    char path[PATH_MAX], stem[NAME_MAX + 1];
    struct sink_checkpoint about = {
        .format = archive ? "npz" : "npy",
        .framework = "NumPy",
        .topology = "{\"files\": 1}",
        .metadata_file = path,
    };

    if (store_join(c->dir, c->file, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", c->dir, c->file);
    snprintf(stem, sizeof stem, "%.*s", (int)stem_len(c->file), c->file);
    about.has_step = step_of_name(stem, &about.step);
    return sink_checkpoint(sink, &about, e);
}

/* Registers and opens the file; it must still be the one that is registered. */
static int open_file(const struct scan_context *c, struct npz_scan *x, struct err *e)
{
    struct file_id id;
    char path[PATH_MAX];

    TRY(sink_file(x->sink, c->file, strlen(c->file), &x->file, e));
    if (store_join(c->dir, c->file, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", c->dir, c->file);
    if (!sink_file_id(x->sink, x->file, &id))
        return err_set(e, ESTALE, "%s is gone", c->file);
    if (c->store->ops->open(c->store, path, &x->src, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    if (!file_id_equal(&x->src->id, &id))
        return err_set(e, ESTALE, "%s was changed during the scan", path);
    return 0;
}

static int npz_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct npz_scan x = {.sink = sink};
    CLEANUP(source_putp) struct source *src = NULL;
    bool archive;
    int rc;

    if (!c->file)
        return err_set(e, ESTALE, "no single .npy or .npz file any more");
    archive = has_suffix(c->file, strlen(c->file), NPZ) ||
              (!has_suffix(c->file, strlen(c->file), NPY) &&
               kind_of(c->listing, c->file) == 'z');
    TRY(tell_checkpoint(c, sink, archive, e));
    rc = open_file(c, &x, e);
    src = x.src;
    if (rc < 0)
        return rc;
    rc = archive ? scan_npz(&x, c->file, e) : scan_npy(&x, c->file, e);
    return rc < 0 ? rc : source_check(src, e);
}

static const struct chunk_codec *const npz_codecs[] = {&codec_zip_deflate, NULL};

static const struct format_writer *const npz_writers[] = {&writer_npz, NULL};

const struct format_driver format_npz = {
    .name = "npz",
    .title = "NumPy: .npy and .npz files",
    .bid = npz_bid,
    .bid_file = npz_bid_file,
    .bid_content = npz_bid_content,
    .scan = npz_scan,
    .codecs = npz_codecs,
    .writers = npz_writers,
};
