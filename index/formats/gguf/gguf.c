/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf.c - GGUF models of llama.cpp: plain tensors and quantised blocks. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/gguf/gguf_header.h"
#include "index/formats/gguf/gguf_split.h"
#include "index/formats/gguf/gguf_types.h"

/* ---- bids ---- */

static bool has_magic(struct listing *l, const char *name)
{
    char head[GGUF_HEAD];
    size_t got = 0;

    return listing_peek(l, name, head, sizeof head, &got) == 0 && gguf_sniff(head, got);
}

static void gguf_bid(struct listing *l, struct bid *out)
{
    struct gguf_split s;
    uint32_t present;
    const char *first = gguf_split_only(l, &s, &present);

    *out = (struct bid){0};
    if (!first || s.n == 1 || !has_magic(l, first))
        return;
    out->score = present == s.n ? 60 : 45;
    snprintf(out->reason, sizeof out->reason,
             "%.80s and its set: %" PRIu32 " of %" PRIu32, first, present, s.n);
}

/* The first file of a set that is there stands for all of them. */
static bool is_later(const struct listing *l, const char *name)
{
    struct gguf_split s, other;

    if (!gguf_split_parse(name, &s))
        return false;
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (strcmp(entry->name, name) == 0)
            return false;
        if (entry->st.kind == ENTRY_FILE && gguf_split_parse(entry->name, &other) &&
            gguf_split_same(name, &s, entry->name, &other))
            return true;
    }
    return false;
}

static void gguf_bid_file(struct listing *l, const char *name, struct bid *out)
{
    *out = (struct bid){0};
    if (!gguf_is_named(name) || is_later(l, name))
        return;
    out->score = has_magic(l, name) ? 55 : 20;
    snprintf(out->reason, sizeof out->reason, "%s",
             out->score > 20 ? "GGUF by its first bytes"
                             : "*.gguf by its name, but it does not begin with GGUF");
}

static void gguf_bid_content(struct listing *l, const char *name, struct bid *out)
{
    *out = (struct bid){.score = has_magic(l, name) ? 55 : 0};
    if (out->score > 0)
        snprintf(out->reason, sizeof out->reason, "GGUF by its first bytes");
}

/* ---- tensors ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    struct gguf_header h; /* of the file that is read now */
    uint32_t file;
    bool report_values;
    /* Of the set. */
    uint64_t files, tensors, quantised;
    bool has_total;
    uint64_t total;
    bool has_first;     /* the file that tells of the set is there */
    uint64_t alignment; /* of that file */
    char architecture[64];
    uint32_t version;
    bool big_endian;
};

/* Where a tensor lies, when everything about it is known. */
struct lying {
    const struct gguf_tensor *t;
    const struct gguf_type *type; /* NULL: not known */
    uint64_t begin, len;
    bool known;
    const char *meets; /* name of another one that has bytes of it */
};

static bool has_whole_rows(const struct lying *l)
{
    uint64_t row = l->t->nd > 0 ? l->t->dim[0] : 1;

    return row % l->type->elements == 0;
}

/* Rows of whole blocks; false when they are not, or nothing can be that large. */
static bool find_bytes(const struct scan *s, struct lying *l)
{
    uint64_t blocks = 1;

    if (!has_whole_rows(l))
        return false;
    for (uint32_t i = 0; i < l->t->nd; i++) {
        uint64_t dim = l->t->dim[i];

        if (mul_overflows(blocks, i == 0 ? dim / l->type->elements : dim, &blocks))
            return false;
    }
    return !mul_overflows(blocks, l->type->bytes, &l->len) &&
           !add_overflows(s->h.data, l->t->offset, &l->begin);
}

static int by_begin(const void *a, const void *b)
{
    const struct lying *x = *(const struct lying *const *)a;
    const struct lying *y = *(const struct lying *const *)b;

    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->t > y->t) - (x->t < y->t);
}

/* ggml lays tensors side by side: those that share bytes are damaged, both of them. */
static int find_meeting(struct lying *l, size_t n, struct err *e)
{
    CLEANUP_FREE struct lying **order = calloc(n + 1, sizeof(struct lying *));
    struct lying *last = NULL; /* reaches furthest */
    size_t count = 0;

    if (!order)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++)
        if (l[i].known && l[i].len > 0 && l[i].begin <= UINT64_MAX - l[i].len)
            order[count++] = &l[i];
    qsort(order, count, sizeof(struct lying *), by_begin);
    for (size_t i = 0; i < count; i++) {
        if (last && order[i]->begin < last->begin + last->len) {
            order[i]->meets = last->t->name;
            last->meets = last->meets ? last->meets : order[i]->t->name;
        }
        if (!last || order[i]->begin + order[i]->len > last->begin + last->len)
            last = order[i];
    }
    return 0;
}

/* Row-major, the outermost dimension first; of quantised ones bytes of the blocks. */
static void shape_of(const struct lying *l, struct shape *logical, struct shape *stored)
{
    logical->nd = l->t->nd;
    for (uint32_t i = 0; i < logical->nd; i++)
        logical->dim[i] = l->t->dim[logical->nd - 1 - i];
    *stored = *logical;
    if (l->type->dtype == DTYPE_NONE)
        stored->dim[stored->nd - 1] = l->t->dim[0] / l->type->elements * l->type->bytes;
}

/* What says what the bytes of the blocks are. */
static int describe(const struct scan *s, const struct gguf_type *type,
                    const struct shape *logical, struct buf *out, struct err *e)
{
    buf_addf(out,
             "{\"gguf_type\": \"%s\", \"gguf_block_elements\": %u, "
             "\"gguf_block_bytes\": %u, \"gguf_shape\": \"",
             type->name, type->elements, type->bytes);
    shape_format(logical, out);
    buf_addf(out, "\"%s}", s->h.big_endian ? ", \"gguf_big_endian\": true" : "");
    return buf_failed(out) ? err_nomem(e) : 0;
}

/* Only its name is of use: empty bytes that cannot be read, and why. */
static int add_unknown(struct scan *s, const struct lying *l, struct err *e)
{
    static const struct shape none = {.nd = 1};
    const struct sink_tensor t = {.key = l->t->name,
                                  .key_len = l->t->name_len,
                                  .dtype = DTYPE_U8,
                                  .shape = &none,
                                  .role = -1};
    char why[96];
    int rc;

    TRY(sink_tensor_begin(s->sink, &t, e));
    if (!l->type)
        rc = sink_fault(s->sink, "%s", gguf_type_why(l->t->type, why, sizeof why));
    else if (has_whole_rows(l))
        rc = sink_fault(s->sink, "it would end past byte 2^64: offset %" PRIu64,
                        l->t->offset);
    else
        rc = sink_fault(s->sink, "its rows are no whole blocks of %u elements of %s",
                        l->type->elements, l->type->name);
    return rc < 0 ? err_nomem(e) : sink_tensor_end(s->sink, e);
}

static int add_known(struct scan *s, const struct lying *l, struct err *e)
{
    static const uint64_t zeros[SHAPE_MAX_DIMS];
    CLEANUP(buf_release) struct buf about = {0};
    bool plain = l->type->dtype != DTYPE_NONE;
    struct shape logical = {0}, stored;
    struct sink_tensor t = {.key = l->t->name,
                            .key_len = l->t->name_len,
                            .dtype = plain ? l->type->dtype : DTYPE_U8,
                            .shape = &stored,
                            .role = -1};
    struct chunk c = {
        .file = s->file, .offset = l->begin, .length = l->len, .start = zeros};

    shape_of(l, &logical, &stored);
    c.size = stored.dim;
    if (s->h.big_endian && plain && l->type->bytes > 1)
        c.flags = CHUNK_SWAP;
    if (!plain)
        TRY(describe(s, l->type, &logical, &about, e));
    t.attributes = about.data;
    s->quantised += !plain;
    TRY(sink_tensor_begin(s->sink, &t, e));
    if (l->meets &&
        sink_fault(s->sink, "its bytes are also those of %.200s", l->meets) < 0)
        return err_nomem(e);
    TRY(sink_chunk(s->sink, &c, e));
    return sink_tensor_end(s->sink, e);
}

static int add_tensor(struct scan *s, const struct lying *l, struct err *e)
{
    int rc = l->known ? add_known(s, l, e) : add_unknown(s, l, e);

    if (rc == -EEXIST)
        return err_set(e, EBADMSG, "tensor %.200s is there twice", l->t->name);
    return rc;
}

static int warn_unaligned(struct scan *s, const char *name, uint64_t n, struct err *e)
{
    if (n > 0 && sink_warning(s->sink, "unaligned",
                              "%s: %" PRIu64 " tensors do not begin at multiples of "
                              "%" PRIu64 " bytes: llama.cpp does not load it",
                              name, n, s->h.alignment) < 0)
        return err_nomem(e);
    if (s->h.odd_bools > 0 &&
        sink_warning(s->sink, "odd-boolean",
                     "%s: %" PRIu64 " booleans are neither 0 nor 1", name,
                     s->h.odd_bools) < 0)
        return err_nomem(e);
    return 0;
}

static int add_tensors(struct scan *s, const char *name, struct err *e)
{
    CLEANUP_FREE struct lying *l = calloc(s->h.count + 1, sizeof *l);
    uint64_t unaligned = 0;

    if (!l)
        return err_nomem(e);
    for (size_t i = 0; i < s->h.count; i++) {
        l[i].t = &s->h.tensor[i];
        l[i].type = gguf_type_of(l[i].t->type);
        l[i].known = l[i].type && find_bytes(s, &l[i]);
        unaligned += l[i].t->offset % s->h.alignment != 0;
    }
    TRY(find_meeting(l, s->h.count, e));
    for (size_t i = 0; i < s->h.count; i++)
        TRY(add_tensor(s, &l[i], e));
    s->tensors += s->h.count;
    return warn_unaligned(s, name, unaligned, e);
}

/* ---- files ---- */

static int on_value(void *user, const char *key, size_t len, const char *json,
                    size_t json_len, struct err *e)
{
    const struct scan *s = user;

    return s->report_values ? sink_object(s->sink, key, len, json, json_len, e) : 0;
}

static int open_file(struct scan *s, const char *name, struct source **out,
                     struct err *e)
{
    char path[PATH_MAX];
    struct file_id id;

    if (store_join(s->c->dir, name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", name);
    TRY(sink_file(s->sink, name, strlen(name), &s->file, e));
    if (!sink_file_id(s->sink, s->file, &id))
        return err_set(e, ESTALE, "%s is gone", name);
    TRY(s->c->store->ops->open(s->c->store, path, out, e));
    return file_id_equal(&(*out)->id, &id) ? 0
                                           : source_stale(path, &id, &(*out)->id, e);
}

static int read_file(struct scan *s, const char *name, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;

    TRY(open_file(s, name, &src, e));
    TRY(gguf_header_read(src, on_value, s, &s->h, e));
    if (s->files++ == 0) {
        memcpy(s->architecture, s->h.architecture, sizeof s->architecture);
        s->version = s->h.version;
        s->big_endian = s->h.big_endian;
        s->has_total = s->h.has_split_tensors;
        s->total = s->h.split_tensors;
    }
    return 0;
}

static int scan_one(struct scan *s, const char *name, struct err *e)
{
    s->report_values = true;
    TRY(read_file(s, name, e));
    TRY(add_tensors(s, name, e));
    if (s->h.has_split && s->h.split_count > 1 &&
        sink_warning(s->sink, "missing-file",
                     "%s says that it is file %" PRIu64 " of %" PRIu64
                     " of a model, by a name that does not tell the others",
                     name, s->h.split_no + 1, s->h.split_count) < 0)
        return err_nomem(e);
    return 0;
}

/* The name of a file and what it says itself must agree, or a file of another set is in
 * its place. */
static int check_split(const struct scan *s, const char *name,
                       const struct gguf_split *x, struct err *e)
{
    if (!s->h.has_split || (s->h.split_no == x->k - 1 && s->h.split_count == x->n))
        return 0;
    return err_set(e, EBADMSG,
                   "%s says that it is file %" PRIu64 " of %" PRIu64 " of a model",
                   name, s->h.split_no + 1, s->h.split_count);
}

/* Does the file end where its last tensor does, or with the zeros behind that? */
static bool ends_with_tensors(const struct scan *s, uint64_t size)
{
    uint64_t last = s->h.data;

    for (size_t i = 0; i < s->h.count; i++) {
        struct lying l = {.t = &s->h.tensor[i],
                          .type = gguf_type_of(s->h.tensor[i].type)};
        uint64_t end;

        if (!l.type || !find_bytes(s, &l) || add_overflows(l.begin, l.len, &end))
            return false;
        last = MAX(last, end);
    }
    return last <= size && (last == size || (last - s->h.data + s->h.alignment - 1) /
                                                    s->h.alignment * s->h.alignment ==
                                                size - s->h.data);
}

/*
 * gguf-py 0.19 tells an alignment of its own in the first file only, and lays the others out
 * by it all the same; llama-gguf-split lays those out by the default. Which it was tells the
 * file's length: only with one of the two it ends where its last tensor does.
 */
static int settle_alignment(struct scan *s, const char *name,
                            const struct gguf_split *x, struct err *e)
{
    uint64_t usual = s->h.alignment, data = s->h.data;
    struct file_id id;

    if (x->k == 1) {
        s->has_first = true;
        s->alignment = s->h.alignment;
    }
    if (x->k == 1 || s->h.has_alignment || (s->has_first && s->alignment == usual) ||
        !sink_file_id(s->sink, s->file, &id) || ends_with_tensors(s, id.size))
        return 0;
    if (s->has_first) {
        gguf_header_align(&s->h, s->alignment);
        if (s->h.data == data || ends_with_tensors(s, id.size))
            return 0;
    }
    return err_set(e, EBADMSG,
                   "%s does not tell its alignment, and by its length its tensors are "
                   "not aligned to %" PRIu64 " bytes%s",
                   name, usual,
                   s->has_first ? ", nor as the first file of the set says"
                                : "; the first file of the set, which tells it, is "
                                  "missing");
}

static int scan_split(struct scan *s, const char *name, const struct gguf_split *x,
                      struct err *e)
{
    int rc;

    s->report_values = s->files == 0; /* the others have split.* only */
    rc = read_file(s, name, e);
    if (rc == 0)
        rc = check_split(s, name, x, e);
    if (rc == 0)
        rc = settle_alignment(s, name, x, e);
    if (rc == 0)
        rc = add_tensors(s, name, e);
    gguf_header_release(&s->h);
    return rc;
}

static int warn_missing(struct scan *s, const char *first, const struct gguf_split *x,
                        struct err *e)
{
    int rc = 0;

    if (s->files < x->n)
        rc = sink_warning(s->sink, "missing-file",
                          "%" PRIu64 " of the %" PRIu32
                          " files that %s counts are missing%s",
                          x->n - s->files, x->n, first,
                          s->has_total ? "" : ", and with them their tensors");
    if (rc == 0 && s->has_total && s->total != s->tensors)
        rc = sink_warning(s->sink, "missing-tensors",
                          "%s says that the model has %" PRIu64
                          " tensors, the files that are there have %" PRIu64,
                          first, s->total, s->tensors);
    return rc < 0 ? err_nomem(e) : 0;
}

/* All files of the set of `first`, in order. */
static int scan_set(struct scan *s, const char *first, const struct gguf_split *x,
                    struct err *e)
{
    const struct listing *l = s->c->listing;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct gguf_split y;

        if (entry->st.kind != ENTRY_FILE || !gguf_split_parse(entry->name, &y) ||
            !gguf_split_same(first, x, entry->name, &y))
            continue;
        TRY(scan_split(s, entry->name, &y, e));
    }
    return warn_missing(s, first, x, e);
}

/* ---- the checkpoint ---- */

static int tell_checkpoint(const struct scan *s, const char *main, struct err *e)
{
    CLEANUP(buf_release) struct buf topology = {0};
    char path[PATH_MAX];
    struct sink_checkpoint out = {
        .format = "gguf", .framework = "GGML", .metadata_file = path};

    buf_addf(&topology, "{\"files\": %" PRIu64, MAX(s->files, UINT64_C(1)));
    if (s->version)
        buf_addf(&topology, ", \"gguf_version\": %" PRIu32, s->version);
    if (s->architecture[0]) {
        buf_adds(&topology, ", \"architecture\": ");
        buf_add_json(&topology, s->architecture, strlen(s->architecture));
    }
    if (s->quantised)
        buf_addf(&topology, ", \"quantised_tensors\": %" PRIu64, s->quantised);
    if (s->big_endian)
        buf_adds(&topology, ", \"byte_order\": \"big\"");
    buf_adds(&topology, "}");
    if (buf_failed(&topology))
        return err_nomem(e);
    out.topology = topology.data;
    if (store_join(s->c->dir, main, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", s->c->dir, main);
    return sink_checkpoint(s->sink, &out, e);
}

static int gguf_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct scan s = {.c = c, .sink = sink};
    struct gguf_split split = {0};
    uint32_t present;
    const char *first =
        c->file ? c->file : gguf_split_only(c->listing, &split, &present);
    int rc;

    if (!first)
        return err_set(e, ESTALE, "no set of GGUF files any more");
    /* First without what the file tells: also a scan that fails has a format. */
    TRY(tell_checkpoint(&s, first, e));
    if (gguf_split_parse(first, &split) && split.n > 1)
        rc = scan_set(&s, first, &split, e);
    else
        rc = scan_one(&s, first, e);
    gguf_header_release(&s.h);
    return rc < 0 ? rc : tell_checkpoint(&s, first, e);
}

const struct format_driver format_gguf = {
    .name = "gguf",
    .title = "GGUF: models of llama.cpp, one file or a split set",
    .bid = gguf_bid,
    .bid_file = gguf_bid_file,
    .bid_content = gguf_bid_content,
    .scan = gguf_scan,
};
