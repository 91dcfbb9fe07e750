/* SPDX-License-Identifier: MIT */
/* index/view.c - makes the one safetensors file of a role: its header and its members. */
#include "index/view.h"

#include "base/arena.h"
#include "base/checked.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/keyset.h"
#include "base/utf8.h"
#include "base/vec.h"
#include "index/catalog_view.h"
#include "index/key_text.h"
#include "index/names.h"

#include <xxhash.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum {
    LENGTH_BYTES = 8,         /* u64 before the header's text */
    DATA_ALIGN = 64,          /* the data starts at a multiple of it */
    MEMBER_BLOCK = 60 * 1024, /* a block is closed before it passes VIEW_BLOCK */
    HEADER_LIMIT = 100000000, /* readers refuse a longer one */
};

static const char usual_metadata[] = "{\"format\":\"pt\"}";
static const char metadata_key[] = "__metadata__";

/* --- names: which leading bytes of the keys are dropped --- */

struct drop {
    bool by_wrapper; /* else the same number of bytes for all */
    bool modules;    /* and what wrappers of modules left in names */
    size_t bytes;
};

static size_t drop_of(const struct drop *d, const struct tensor_row *t)
{
    return d->by_wrapper ? t->info.wrapper : MIN(d->bytes, t->info.key_len);
}

/* The name in the view; `own` keeps it where it is not a part of the key. */
static int own_name(const struct drop *d, const struct tensor_row *t, struct buf *own,
                    const char **name, size_t *len)
{
    size_t drop = drop_of(d, t);

    *name = t->info.key + drop;
    *len = t->info.key_len - drop;
    if (!d->modules || !t->info.modules)
        return 0;
    buf_clear(own);
    if (name_without_modules(*name, *len, own) < 0)
        return -ENOMEM;
    *name = own->data;
    *len = own->len;
    return 0;
}

/* Is "model." (module., state_dict., app., dcp.) the start of every key? */
struct common {
    size_t wrapper; /* bytes that all keys begin with: it is looked for behind them */
    char start[32]; /* with them, and the dot */
    size_t len;
    bool any, differ;
};

/* What a trainer calls its object with both model and optimizer in it. */
static bool is_around_both(const char *key, size_t len)
{
    return len == 4 && (memcmp(key, "app.", len) == 0 || memcmp(key, "dcp.", len) == 0);
}

static int note_common(void *user, const struct tensor_row *t)
{
    static const char *const words[] = {"model.", "module.", "state_dict.", "app.",
                                        "dcp."};
    struct common *c = user;
    const struct tensor_info *info = &t->info;
    bool looked_for = !c->any && info->key_len > c->wrapper &&
                      (c->wrapper == 0 || is_around_both(info->key, c->wrapper));

    for (size_t i = 0; looked_for && !c->any && i < ARRAY_SIZE(words); i++) {
        size_t n = strlen(words[i]);

        c->len = c->wrapper + n;
        if (info->key_len > c->len &&
            memcmp(info->key + c->wrapper, words[i], n) == 0) {
            memcpy(c->start, info->key, c->len);
            c->any = true;
        }
    }
    c->differ =
        !c->any || info->key_len <= c->len || memcmp(info->key, c->start, c->len) != 0;
    return c->differ; /* one is enough */
}

/* Do two tensors have one name? */
struct meeting {
    const struct drop *drop;
    struct keyset names;
    struct buf own;
    int rc; /* -ENOMEM */
    bool meet;
};

static int note_name(void *user, const struct tensor_row *t)
{
    struct meeting *m = user;
    const char *name;
    size_t len;
    int rc = own_name(m->drop, t, &m->own, &name, &len);

    if (rc == 0)
        rc = keyset_add(&m->names, name, len);
    m->meet = rc == 0;
    m->rc = MIN(rc, 0);
    return rc <= 0;
}

/* What the rule of the prefix would drop; is it the same of all keys? */
static int wanted_drop(struct conn *n, int64_t checkpoint, enum view_prefix prefix,
                       struct drop *out, bool *same, struct err *e)
{
    struct view_order order = {.role = ROLE_MODEL};
    struct common common = {0};
    uint64_t wrapper = 0;
    bool modules = false;
    int rc = view_wrapper(n, checkpoint, ROLE_MODEL, &wrapper, same, &modules, e);

    *out = (struct drop){.by_wrapper = wrapper > 0, .modules = modules};
    if (rc < 0 || prefix != PREFIX_DROP || (wrapper > 0 && !*same))
        return rc;
    *same = true; /* or nothing is dropped */
    common.wrapper = wrapper;
    rc = view_tensors(n, checkpoint, &order, note_common, &common, e);
    if (rc >= 0 && common.any && !common.differ)
        *out = (struct drop){.bytes = common.len, .modules = modules};
    return MIN(rc, 0);
}

/* The same, unless names would meet. */
static int choose_drop(struct conn *n, int64_t checkpoint, enum view_kind kind,
                       enum view_prefix prefix, struct drop *out, struct err *e)
{
    struct view_order order = {.role = ROLE_MODEL};
    struct meeting m = {.drop = out};
    bool same;
    int rc;

    *out = (struct drop){0};
    if (kind != VIEW_MODEL || prefix == PREFIX_KEEP)
        return 0;
    rc = wanted_drop(n, checkpoint, prefix, out, &same, e);
    /* Keys differ; so they do without what all begin with. */
    if (rc < 0 || (!out->modules && (same || (!out->by_wrapper && out->bytes == 0))))
        return rc;
    rc = view_tensors(n, checkpoint, &order, note_name, &m, e);
    keyset_release(&m.names);
    buf_release(&m.own);
    if (m.rc < 0)
        return err_nomem(e);
    if (rc < 0 || !m.meet)
        return MIN(rc, 0);
    *out = (struct drop){0};
    return view_warning(n, checkpoint, "prefix-kept",
                        "without their prefix two tensors would have one name in"
                        " model.safetensors: names are kept in full",
                        e);
}

/* --- building --- */

struct build {
    struct conn *conn;
    const struct checkpoint_info *cp;
    struct drop drop;
    bool write; /* false: a source file is the view, only totals are needed */
    struct view_info v;
    char fault[400];
    uint64_t data;    /* bytes of tensors so far */
    uint64_t members; /* tensors so far */
    uint64_t left_out;
    char left_out_key[128];
    uint64_t hash; /* of the inodes and sizes of members, in order */
    uint64_t text; /* bytes of the header so far, with the length in front */
    struct buf header, member; /* the blocks being filled */
    struct buf own;            /* a name without wrappers of modules */
    uint32_t nheader, nmember;
    uint32_t last_ord;
    bool overflow;
    int rc; /* why the walk was stopped */
    struct err *e;
};

static void build_release(struct build *b)
{
    buf_release(&b->header);
    buf_release(&b->member);
    buf_release(&b->own);
}

/* A name that JSON can hold and no reader takes for something else. */
static bool name_fits(const char *name, size_t len)
{
    for (size_t i = 0, n; i < len; i += n) {
        n = utf8_char(name + i, len - i);
        if (n == 0)
            return false;
    }
    return len != strlen(metadata_key) || memcmp(name, metadata_key, len) != 0;
}

/* Writes full blocks of the header; what is left moves to the front. */
static int flush_header(struct build *b, bool all, struct err *e)
{
    size_t done = 0;
    int rc = buf_failed(&b->header) ? err_nomem(e) : 0;

    while (rc == 0 &&
           (b->header.len - done >= VIEW_BLOCK || (all && b->header.len > done))) {
        size_t len = MIN(b->header.len - done, (size_t)VIEW_BLOCK);

        if (b->text <= (uint64_t)HEADER_LIMIT + 2 * VIEW_BLOCK)
            rc = view_block_put(b->conn, VIEW_HEADERS, b->v.id, b->nheader++,
                                b->header.data + done, len, e);
        done += len;
    }
    if (rc == 0 && done > 0) {
        memmove(b->header.data, b->header.data + done, b->header.len - done);
        b->header.len -= done;
    }
    return rc;
}

static int add_header(struct build *b, const char *name, size_t len,
                      const struct tensor_info *t, struct err *e)
{
    size_t before = b->header.len;

    buf_addc(&b->header, ',');
    buf_add_json(&b->header, name, len);
    buf_addf(&b->header, ":{\"dtype\":\"%s\",\"shape\":[", dtype_name(t->dtype));
    for (uint32_t k = 0; k < t->shape.nd; k++)
        buf_addf(&b->header, "%s%" PRIu64, k ? "," : "", t->shape.dim[k]);
    buf_addf(&b->header, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", b->data,
             b->data + t->bytes);
    b->text += b->header.len - before;
    return flush_header(b, false, e);
}

static int add_member(struct build *b, const struct tensor_info *t, struct err *e)
{
    int rc = 0;

    if (t->bytes == 0)
        return 0;
    buf_add_varint(&b->member, t->bytes);
    buf_add_varint(&b->member, zigzag((int64_t)t->ord - b->last_ord));
    b->last_ord = t->ord;
    if (buf_failed(&b->member))
        return err_nomem(e);
    if (b->member.len >= MEMBER_BLOCK) {
        rc = view_block_put(b->conn, VIEW_MEMBERS, b->v.id, b->nmember++,
                            b->member.data, b->member.len, e);
        buf_clear(&b->member);
    }
    return rc;
}

static void leave_out(struct build *b, const struct tensor_info *t)
{
    if (b->left_out++ == 0)
        key_text(b->left_out_key, sizeof b->left_out_key, t->key, t->key_len);
}

static void note_fault(struct build *b, const struct tensor_info *t)
{
    char key[160];

    if (b->fault[0] || !t->fault)
        return;
    snprintf(b->fault, sizeof b->fault, "tensor %s: %.200s",
             key_text(key, sizeof key, t->key, t->key_len), t->fault);
}

/* Mode, time and inode come from the members, as a tensor's from its shards. */
static void note_member(struct build *b, const struct tensor_info *t)
{
    const uint64_t v[] = {t->ino, t->bytes};

    b->v.mode &= t->mode;
    b->v.mtime_ns = MAX(b->v.mtime_ns, t->mtime_ns);
    b->hash = XXH3_64bits_withSeed(v, sizeof v, b->hash);
    b->members++;
}

static int build_tensor(void *user, const struct tensor_row *row)
{
    struct build *b = user;
    const struct tensor_info *t = &row->info;
    const char *name;
    uint64_t end;
    size_t len;

    if (own_name(&b->drop, row, &b->own, &name, &len) < 0)
        return b->rc = err_nomem(b->e);
    if (!dtype_in_safetensors(t->dtype) || !name_fits(name, len)) {
        leave_out(b, t);
        return 0;
    }
    note_fault(b, t);
    note_member(b, t);
    if (add_overflows(b->data, t->bytes, &end) || end > INT64_MAX / 2) {
        b->overflow = true;
        return 0;
    }
    if (b->write)
        b->rc = add_header(b, name, len, t, b->e);
    if (b->write && b->rc == 0)
        b->rc = add_member(b, t, b->e);
    b->data = end;
    return b->rc;
}

/* Closes the header and pads it; then its length is known and goes to its start. */
static int finish_header(struct build *b, struct err *e)
{
    struct buf first = {.max = VIEW_BLOCK};
    uint64_t total;
    int rc;

    total = b->text + 1; /* the last brace */
    buf_addc(&b->header, '}');
    for (; total % DATA_ALIGN != 0; total++)
        buf_addc(&b->header, ' ');
    b->text = total;
    rc = flush_header(b, true, e);
    if (rc == 0)
        rc = view_block_get(b->conn, VIEW_HEADERS, b->v.id, 0, &first, e);
    if (rc == 1) {
        put_le64(first.data, total - LENGTH_BYTES);
        rc =
            view_block_put(b->conn, VIEW_HEADERS, b->v.id, 0, first.data, first.len, e);
    }
    buf_release(&first);
    if (rc == 0 && b->member.len > 0)
        rc = view_block_put(b->conn, VIEW_MEMBERS, b->v.id, b->nmember, b->member.data,
                            b->member.len, e);
    if (total - LENGTH_BYTES > HEADER_LIMIT && !b->fault[0])
        snprintf(b->fault, sizeof b->fault,
                 "its header would have %" PRIu64 " bytes, and readers take %d at most",
                 total - LENGTH_BYTES, HEADER_LIMIT);
    return rc;
}

static int warn_left_out(const struct build *b, struct err *e)
{
    char text[400];

    if (b->left_out == 0)
        return 0;
    snprintf(text, sizeof text,
             "%" PRIu64
             " tensors are not in %s, which cannot hold them (the first is %s)",
             b->left_out, b->v.name, b->left_out_key);
    return view_warning(b->conn, b->cp->id, "not-in-safetensors", text, e);
}

static const char *view_name(const struct checkpoint_info *cp, enum view_kind kind)
{
    if (kind == VIEW_OPTIMIZER)
        return "optimizer.safetensors";
    return cp->adapter ? "adapter_model.safetensors" : "model.safetensors";
}

/* As a tensor's: even, at least 2^32. */
static uint64_t view_inode(const struct build *b, enum view_prefix prefix)
{
    const uint64_t v[] = {b->hash,
                          b->v.kind,
                          prefix,
                          b->v.size,
                          b->drop.by_wrapper + 2u * b->drop.modules,
                          b->drop.bytes};
    const char *file = b->cp->file ? b->cp->file : "";
    uint64_t h = XXH3_64bits_withSeed(v, sizeof v,
                                      XXH3_64bits(b->cp->path, strlen(b->cp->path)));

    h = XXH3_64bits_withSeed(file, strlen(file), h) & INT64_MAX & ~(uint64_t)1;
    return h >> 32 ? h : h | (uint64_t)1 << 32;
}

/* Goes through the tensors, writing or only counting. */
static int walk_tensors(struct build *b, enum role role, struct err *e)
{
    const struct view_order order = {.role = role,
                                     .sorted = b->write,
                                     .by_wrapper = b->drop.by_wrapper,
                                     .modules = b->drop.modules,
                                     .drop = b->drop.bytes};
    int rc;

    b->e = e;
    b->v.mode = 0777;
    if (b->write) {
        buf_add(&b->header, "\0\0\0\0\0\0\0", LENGTH_BYTES); /* put in at the end */
        buf_addf(&b->header, "{\"%s\":", metadata_key);
        buf_adds(&b->header,
                 role == ROLE_MODEL && b->cp->header ? b->cp->header : usual_metadata);
        b->text = b->header.len;
    }
    rc = view_tensors(b->conn, b->cp->id, &order, build_tensor, b, e);
    if (rc == 0 && b->write)
        rc = finish_header(b, e);
    if (b->overflow && !b->fault[0])
        snprintf(b->fault, sizeof b->fault, "its tensors have more than 2^62 bytes");
    return rc;
}

static int build_rows(struct build *b, enum view_prefix prefix, enum role role,
                      struct err *e)
{
    bool renamed = b->drop.by_wrapper || b->drop.modules || b->drop.bytes > 0;
    uint32_t number = 0;
    uint64_t size = 0;
    int rc = 0;

    if (!renamed)
        rc = view_whole_file(b->conn, b->cp->id, role, b->cp->by_role[role], &number,
                             &size, e);
    if (rc == 1)
        b->v.whole_file = number;
    b->write = rc == 0 && b->cp->tensors > 0;
    if (rc >= 0)
        rc = walk_tensors(b, role, e);
    if (rc == 0 && b->v.whole_file >= 0 && b->members == 0)
        rc = view_file_attributes(b->conn, b->cp->id, number, &b->v, e);
    if (rc < 0)
        return rc;
    b->v.header = b->write ? b->text : 0;
    b->v.size = b->write ? b->text + b->data : size;
    b->v.ino = view_inode(b, prefix);
    b->v.fault = b->fault[0] ? b->fault : NULL;
    rc = warn_left_out(b, e);
    if (rc == 0 && b->members == 0)
        rc = view_blocks_delete(b->conn, b->v.id, e);
    return rc == 0 ? view_row_put(b->conn, b->cp->id, prefix, &b->v, b->members, e)
                   : rc;
}

bool view_is_possible(const struct checkpoint_info *cp, enum view_kind kind)
{
    if (kind == VIEW_OPTIMIZER)
        return cp->by_role[ROLE_OPTIMIZER] > 0;
    return cp->by_role[ROLE_MODEL] > 0 || (cp->tensors == 0 && !cp->error);
}

int view_build(struct conn *n, const struct checkpoint_info *cp, enum view_kind kind,
               enum view_prefix prefix, struct err *e)
{
    enum role role = kind == VIEW_MODEL ? ROLE_MODEL : ROLE_OPTIMIZER;
    CLEANUP(build_release) struct build b = {.conn = n, .cp = cp};
    int rc;

    if (!view_is_possible(cp, kind))
        return 0;
    b.v = (struct view_info){
        .kind = kind,
        .name = view_name(cp, kind),
        .whole_file = -1,
        .uid = cp->uid,
        .gid = cp->gid,
        .mtime_ns = INT64_MIN,
    };
    rc = choose_drop(n, cp->id, kind, prefix, &b.drop, e);
    if (rc == 0)
        rc = view_row_id(n, &b.v.id, e);
    return rc == 0 ? build_rows(&b, prefix, role, e) : rc;
}

/* --- reading --- */

/* Builds it unless another thread or process has done so meanwhile. */
static int build_now(struct conn *n, int64_t checkpoint, enum view_kind kind,
                     enum view_prefix prefix, struct arena *a, struct view_info *out,
                     struct err *e)
{
    struct checkpoint_info cp;
    int rc = conn_begin(n, true, e);

    if (rc == 0)
        rc = view_row_get(n, checkpoint, kind, prefix, a, out, e);
    if (rc != 0)
        return rc;
    rc = checkpoint_read(n, checkpoint, a, &cp, e);
    if (rc == 0)
        rc = view_build(n, &cp, kind, prefix, e);
    if (rc == 0)
        rc = view_row_get(n, checkpoint, kind, prefix, a, out, e);
    if (rc == 1) {
        rc = conn_commit(n, e);
        rc = rc == 0 ? 1 : rc;
    }
    return rc;
}

int view_get(struct catalog *c, int64_t checkpoint, enum view_kind kind,
             enum view_prefix prefix, struct arena *a, struct view_info *out,
             struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    struct checkpoint_info cp;
    int rc = conn_take(c, false, &n, e);

    if (rc == 0)
        rc = view_row_get(n, checkpoint, kind, prefix, a, out, e);
    if (rc == 0)
        rc = checkpoint_read(n, checkpoint, a, &cp, e);
    else if (rc < 0)
        return rc;
    if (rc == 0 && view_is_possible(&cp, kind)) {
        rc = build_now(n, checkpoint, kind, prefix, a, out, e);
        conn_rollback(n);
    }
    if (rc == 0 || (rc == 1 && out->size == 0))
        return err_set(e, ENOENT, "the checkpoint has no tensors for %s",
                       kind == VIEW_MODEL ? "a model" : "an optimizer");
    return rc == 1 ? 0 : rc;
}

int view_header(struct catalog *c, const struct view_info *v, uint64_t off, size_t len,
                void *dst, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    struct buf block = {.max = VIEW_BLOCK};
    size_t done = 0;
    int rc = range_outside(off, len, v->header)
                 ? err_set(e, EINVAL, "bytes behind the header of %s", v->name)
                 : conn_take(c, false, &n, e);

    while (rc == 0 && done < len) {
        uint64_t at = off + done;
        size_t skip = at % VIEW_BLOCK, count;

        rc = view_block_get(n, VIEW_HEADERS, v->id, (uint32_t)(at / VIEW_BLOCK), &block,
                            e);
        if (rc == 0)
            rc = view_missing(n, v->id, e);
        else if (rc == 1)
            rc = block.len > skip ? 0
                                  : conn_damaged(n, e, "a block of a header is short");
        count = rc == 0 ? MIN(len - done, block.len - skip) : 0;
        if (rc == 0)
            memcpy((char *)dst + done, block.data + skip, count);
        done += count;
    }
    buf_release(&block);
    return rc;
}

/* Members of all blocks, as they are decoded. */
struct members {
    struct view_member *member; /* malloc */
    size_t n, cap;
    uint64_t at;
    int64_t ord;
};

/* 1: taken; 0: the block is no list of members; -ENOMEM. */
static int take_member(struct members *m, const struct buf *block, size_t *pos)
{
    const unsigned char *data = (const unsigned char *)block->data;
    uint64_t bytes, delta;

    if (!VEC_ROOM(m->member, m->n, m->cap))
        return -ENOMEM;
    if (!varint_get(data, block->len, pos, &bytes) ||
        !varint_get(data, block->len, pos, &delta) ||
        delta > (uint64_t)UINT32_MAX * 2 || bytes == 0)
        return 0;
    m->ord += unzigzag(delta);
    if (m->ord < 0 || m->ord > UINT32_MAX)
        return 0;
    m->member[m->n++] = (struct view_member){m->at, bytes, (uint32_t)m->ord};
    return !add_overflows(m->at, bytes, &m->at) && m->at <= INT64_MAX;
}

static int read_members(struct conn *n, const struct view_info *v, struct members *m,
                        struct err *e)
{
    struct buf block = {.max = VIEW_BLOCK};
    int rc = 1;

    for (uint32_t i = 0; rc == 1; i++) {
        size_t pos = 0;

        rc = view_block_get(n, VIEW_MEMBERS, v->id, i, &block, e);
        while (rc == 1 && pos < block.len) {
            rc = take_member(m, &block, &pos);
            if (rc == -ENOMEM)
                err_nomem(e);
            else if (rc == 0)
                rc = conn_damaged(n, e, "members of a view are malformed");
        }
    }
    buf_release(&block);
    return rc;
}

int view_members(struct catalog *c, const struct view_info *v, struct view_member **out,
                 size_t *count, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    struct members m = {.at = v->header};
    int rc = 0;

    if (v->whole_file < 0)
        rc = conn_take(c, false, &n, e);
    if (n)
        rc = read_members(n, v, &m, e);
    if (rc == 0 && n && m.at != v->size && !v->fault)
        rc = view_missing(n, v->id, e);
    if (rc < 0) {
        free(m.member);
        return rc;
    }
    *out = m.member;
    *count = m.n;
    return 0;
}
