/* SPDX-License-Identifier: MIT */
/* fs/xattr.c - user.unshard.* of tensor files and checkpoints. */
#include "fs/xattr.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/json.h"
#include "fs/bucket.h"
#include "fs/lookup.h"
#include "fs/plans.h"
#include "fs/disk_view.h"
#include "fs/edit.h"
#include "index/names.h"

enum {
    TENSOR_MEMORY = 16 << 20,
    VALUE_MAX = 64 << 10, /* XATTR_SIZE_MAX and XATTR_LIST_MAX of the kernel */
};

#define PREFIX "user.unshard."

/* Where attributes go: the value of the one asked for, or the names of all. */
struct xattrs {
    const struct request *r;
    const char *want; /* NULL: list */
    bool found;
    struct buf out;
};

static void give(struct xattrs *x, const char *name, const char *value, size_t len)
{
    if (!x->want) {
        buf_adds(&x->out, PREFIX);
        buf_add(&x->out, name, strlen(name) + 1);
    } else if (!x->found && strcmp(x->want, name) == 0) {
        x->found = true;
        buf_add(&x->out, value, len);
    }
}

static void give_text(struct xattrs *x, const char *name, const char *value)
{
    give(x, name, value, strlen(value));
}

static void give_buf(struct xattrs *x, const char *name, struct buf *value)
{
    if (buf_failed(value) == 0)
        give(x, name, value->data ? value->data : "", value->len);
    buf_release(value);
}

/* A word for sh. */
static void quote(const char *text, size_t len, struct buf *out)
{
    buf_addc(out, '\'');
    for (size_t i = 0; i < len; i++) {
        if (text[i] == '\'')
            buf_adds(out, "'\\''");
        else
            buf_addc(out, text[i]);
    }
    buf_addc(out, '\'');
}

/* The command that prints the plan of a tensor: for people, where nobody listens. */
static void give_command(struct xattrs *x, const struct generation *gen,
                         const struct tensor_info *t)
{
    struct buf line = {.max = VALUE_MAX}, place = {.max = VALUE_MAX};
    const struct store *store = x->r->fs->store;

    buf_adds(&place, store->url);
    if (gen->path[0])
        buf_addf(&place, "/%s", gen->path);
    if (gen->file)
        buf_addf(&place, "/%s", gen->file);
    buf_adds(&line, "unshard plan ");
    if (place.data)
        quote(place.data, place.len, &line);
    buf_addc(&line, ' ');
    quote(t->key, t->key_len, &line);
    buf_release(&place);
    give_buf(x, "plan", &line);
}

/* Where a program asks for the plan of a tensor (gpu/plan_service.h). */
static void give_plan(struct xattrs *x, const struct generation *gen,
                      const struct tensor_info *t)
{
    CLEANUP(buf_release) struct buf where = {.max = VALUE_MAX};
    const struct plans *plans = x->r->fs->plans;

    if (!plans) {
        give_command(x, gen, t);
        return;
    }
    buf_addf(&where, "unix:%s %" PRId64 ".%" PRIu32, plans_path(plans), gen->info.id,
             t->ord);
    give_buf(x, "plan", &where);
}

/* What a format has more to say: the members of a JSON object, as text. */
static void give_more(struct xattrs *x, const struct tensor_info *t)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err e = {0};

    if (!t->attributes ||
        json_parse(t->attributes, strlen(t->attributes), NULL, &doc, &e) < 0)
        return;
    for (const struct json *m = json_first(doc); m; m = json_next(m)) {
        char number[32];
        const char *text;
        uint64_t value;
        bool flag;

        if (json_string(m, &text)) {
            give_text(x, json_key(m), text);
        } else if (json_u64(m, &value)) {
            snprintf(number, sizeof number, "%" PRIu64, value);
            give_text(x, json_key(m), number);
        } else if (json_bool(m, &flag)) {
            give_text(x, json_key(m), flag ? "true" : "false");
        }
    }
}

static void give_tensor(struct xattrs *x, const struct generation *gen,
                        const struct tensor_info *t)
{
    struct buf shape = {.max = VALUE_MAX};
    char chunks[32];

    snprintf(chunks, sizeof chunks, "%" PRIu64, t->chunks);
    shape_format(&t->shape, &shape);
    give(x, "key", t->key, t->key_len);
    give_text(x, "dtype", dtype_name(t->dtype));
    give_buf(x, "shape", &shape);
    give_text(x, "role", role_name(t->role));
    give_text(x, "chunks", chunks);
    give_plan(x, gen, t);
    if (t->fault)
        give_text(x, "fault", t->fault);
    give_more(x, t);
}

static void give_checkpoint(struct xattrs *x, const struct generation *gen)
{
    char step[32];

    if (gen->info.format)
        give_text(x, "format", gen->info.format);
    if (gen->info.has_step) {
        snprintf(step, sizeof step, "%" PRId64, gen->info.step);
        give_text(x, "step", step);
    }
}

static int collect_inside(struct xattrs *x, struct err *e)
{
    const struct request *r = x->r;
    CLEANUP(arena_freep) struct arena *a = NULL;
    struct tensor_info t;
    struct generation *gen;
    int rc = 0;

    if (ino_kind(r->ino) != INSIDE_NPY && ino_kind(r->ino) != INSIDE_BARE)
        return 0;
    gen = generation_of_ino(r->fs, r->ino);
    if (!gen)
        return -ESTALE;
    a = arena_new(TENSOR_MEMORY);
    rc = a ? catalog_tensor(r->fs->catalog, gen->info.id, ino_index(r->ino), a, &t, e)
           : err_nomem(e);
    if (rc == 0)
        give_tensor(x, gen, &t);
    generation_unref(r->fs, gen, 1);
    return rc;
}

/*
 * A directory. Asking for our attributes by name may scan it, as a person does; listing
 * names never does, since ls(1) lists those of everything it shows.
 */
static int collect_outside(struct xattrs *x, struct err *e)
{
    const struct request *r = x->r;
    struct node *n = node_of_ino(r->fs, r->ino);
    struct snapshot *snapshot;
    struct generation *gen;
    int rc;

    if (!n)
        return -ESTALE;
    if (n->kind != NODE_DIR && n->kind != NODE_FILE_DIR)
        return 0;
    if (!x->want) {
        gen = node_generation(r->fs, n);
        if (gen)
            give_checkpoint(x, gen);
        generation_unref(r->fs, gen, 1);
        return 0;
    }
    if (strcmp(x->want, "format") != 0 && strcmp(x->want, "step") != 0)
        return 0;
    rc = tree_snapshot(r->fs, n, r->may_block, &snapshot, e);
    if (rc != 0)
        return rc;
    if (snapshot->gen)
        give_checkpoint(x, snapshot->gen);
    snapshot_put(r->fs, snapshot);
    return 0;
}

/* A directory of the source, in a mount for writing. */
static int collect_disk(struct xattrs *x, struct err *e)
{
    const struct request *r = x->r;
    struct disk_node *dir = disk_pin(r->fs, r->ino);
    struct generation *gen = NULL;
    int rc = 0;

    if (dir && S_ISDIR(dir->type) && x->want &&
        (strcmp(x->want, "format") == 0 || strcmp(x->want, "step") == 0))
        rc = disk_generation(r->fs, dir, r->may_block, &gen, e);
    disk_unpin(r->fs, dir);
    if (rc == 0 && gen)
        give_checkpoint(x, gen);
    generation_unref(r->fs, gen, 1);
    return rc == -ENOENT ? 0 : rc;
}

/* The same to an object store. */
static int collect_bucket(struct xattrs *x, struct err *e)
{
    const struct request *r = x->r;
    struct bucket_node *dir = bucket_pin(r->fs, r->ino);
    struct generation *gen = NULL;
    int rc = 0;

    if (dir && S_ISDIR(dir->type) && x->want &&
        (strcmp(x->want, "format") == 0 || strcmp(x->want, "step") == 0))
        rc = bucket_generation(r->fs, dir, r->may_block, &gen, e);
    bucket_unpin(r->fs, dir);
    if (rc == 0 && gen)
        give_checkpoint(x, gen);
    generation_unref(r->fs, gen, 1);
    return rc == -ENOENT ? 0 : rc;
}

static int collect(struct xattrs *x, struct err *e)
{
    if (ino_is_inside(x->r->ino))
        return collect_inside(x, e);
    if (x->r->fs->bucket)
        return collect_bucket(x, e);
    return x->r->fs->disk ? collect_disk(x, e) : collect_outside(x, e);
}

/* Size 0 asks how much room it takes. */
static int reply(const struct request *r, const struct buf *out, struct err *e)
{
    if (buf_failed(out) < 0)
        return err_set(e, -buf_failed(out), "attribute: %s", strerror(out->failed));
    if (r->size == 0)
        fuse_reply_xattr(r->req, out->len);
    else if (out->len > r->size)
        return -ERANGE;
    else
        fuse_reply_buf(r->req, out->data, out->len);
    return 0;
}

/*
 * Access lists and labels that a mount never has. ls(1) asks for two of each file, and
 * when told that there are none of the kind it does not ask for the others'.
 */
static bool is_foreign(const char *name)
{
    return strncmp(name, "security.", strlen("security.")) == 0 ||
           strncmp(name, "system.", strlen("system.")) == 0;
}

/* A mount for writing: why something could not be published; how far it is. */
static int add_publishing(const struct request *r, struct buf *out)
{
    struct counters *c = &r->fs->counters;
    uint64_t total = atomic_load(&c->saving_total);

    if (strcmp(r->name, PUBLISH_ATTRIBUTE) == 0)
        return last_error_text(&r->fs->last_error, out);
    if (strcmp(r->name, PUBLISHING_ATTRIBUTE) != 0 || !total)
        return -ENODATA;
    return buf_addf(out, "%" PRIu64 " %" PRIu64, (uint64_t)atomic_load(&c->saving_done),
                    total);
}

static int collect_writable(struct request *r, struct xattrs *x, struct err *e)
{
    int rc = edit_getxattr(r, &x->out, e);

    if (rc == EDIT_NONE &&
        strncmp(r->name, PUBLISH_ATTRIBUTE, strlen(PUBLISH_ATTRIBUTE)) == 0)
        rc = add_publishing(r, &x->out);
    if (rc == EDIT_NONE)
        return collect(x, e);
    x->found = rc == 0;
    return rc;
}

int getxattr_run(struct request *r, struct err *e)
{
    struct xattrs x = {.r = r, .out = {.max = VALUE_MAX}};
    int rc;

    if (is_foreign(r->name))
        return -EOPNOTSUPP;
    if (strncmp(r->name, PREFIX, strlen(PREFIX)) != 0)
        return -ENODATA;
    x.want = r->name + strlen(PREFIX);
    rc = r->fs->disk ? collect_writable(r, &x, e) : collect(&x, e);
    if (rc == 0)
        rc = x.found ? reply(r, &x.out, e) : -ENODATA;
    buf_release(&x.out);
    return rc;
}

int listxattr_run(struct request *r, struct err *e)
{
    struct xattrs x = {.r = r, .out = {.max = VALUE_MAX}};
    int rc = collect(&x, e);

    if (rc == 0)
        rc = reply(r, &x.out, e);
    buf_release(&x.out);
    return rc;
}
