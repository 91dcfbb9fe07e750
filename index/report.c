/* SPDX-License-Identifier: MIT */
/* index/report.c - checkpoint.json and objects.json, written as streams. */
#include "index/view.h"

#include "base/arena.h"
#include "base/err.h"
#include "base/json.h"
#include "index/names.h"

#include <errno.h>
#include <string.h>

enum {
    SCHEMA = 1, /* of checkpoint.json; raise it when a member changes meaning */
    OUT_BYTES = 64 << 10, /* written at once */
};

/* JSON on its way to a descriptor. The first error stops it. */
struct out {
    int fd, rc;
    bool comma; /* before the next member or element */
    struct buf buf;
    struct err *e;
};

static void out_flush(struct out *o, bool all)
{
    if (o->rc < 0 || (!all && o->buf.len < OUT_BYTES))
        return;
    if (buf_failed(&o->buf))
        o->rc = err_nomem(o->e);
    else
        o->rc = write_all(o->fd, o->buf.data, o->buf.len, o->e);
    buf_clear(&o->buf);
}

static void separate(struct out *o)
{
    if (o->comma)
        buf_addc(&o->buf, ',');
    o->comma = true;
    out_flush(o, false);
}

/* The name of a member; its value follows. */
static void out_name(struct out *o, const char *name)
{
    separate(o);
    buf_addf(&o->buf, "\"%s\":", name);
}

static void out_open(struct out *o, const char *name, char bracket)
{
    if (name)
        out_name(o, name);
    else
        separate(o);
    buf_addc(&o->buf, bracket);
    o->comma = false;
}

static void out_close(struct out *o, char bracket)
{
    buf_addc(&o->buf, bracket);
    o->comma = true;
}

static void out_number(struct out *o, const char *name, uint64_t v)
{
    out_name(o, name);
    buf_addf(&o->buf, "%" PRIu64, v);
}

static void out_text(struct out *o, const char *name, const char *text)
{
    out_name(o, name);
    if (text)
        buf_add_json(&o->buf, text, strlen(text));
    else
        buf_adds(&o->buf, "null");
}

static void out_optional(struct out *o, const char *name, const char *text)
{
    if (text)
        out_text(o, name, text);
}

static void out_about(struct out *o, const struct checkpoint_info *cp)
{
    out_number(o, "schema", SCHEMA);
    out_text(o, "path", cp->path);
    out_text(o, "file", cp->file);
    out_text(o, "format", cp->format[0] ? cp->format : NULL);
    out_text(o, "framework", cp->framework);
    out_text(o, "version", cp->version);
    out_name(o, "step");
    if (cp->has_step)
        buf_addf(&o->buf, "%" PRId64, cp->step);
    else
        buf_adds(&o->buf, "null");
    out_name(o, "topology");
    buf_adds(&o->buf, cp->topology ? cp->topology : "null");
    out_name(o, "adapter");
    buf_adds(&o->buf, cp->adapter ? "true" : "false");
    out_text(o, "error", cp->error);
}

static void out_counts(struct out *o, const struct checkpoint_info *cp)
{
    out_open(o, "counts", '{');
    out_number(o, "tensors", cp->tensors);
    out_number(o, "chunks", cp->chunks);
    out_number(o, "bytes", cp->bytes);
    out_number(o, "files", cp->files);
    out_number(o, "objects", cp->objects);
    out_number(o, "faults", cp->faults);
    out_number(o, "warnings", cp->warnings);
    out_open(o, "by_role", '{');
    for (unsigned r = ROLE_MODEL; r <= ROLE_OTHER; r++) {
        out_open(o, role_name((enum role)r), '{');
        out_number(o, "tensors", cp->by_role[r]);
        out_number(o, "bytes", cp->bytes_by_role[r]);
        out_close(o, '}');
    }
    out_close(o, '}');
    out_close(o, '}');
}

static int out_view(struct out *o, struct catalog *c, int64_t checkpoint,
                    enum view_kind kind)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct catalog_file f = {0};
    struct view_info v;
    int rc =
        a ? view_get(c, checkpoint, kind, PREFIX_AUTO, a, &v, o->e) : err_nomem(o->e);

    if (rc == -ENOENT)
        return 0;
    if (rc == 0 && v.whole_file >= 0)
        rc = catalog_file(c, checkpoint, (uint32_t)v.whole_file, a, &f, o->e);
    if (rc < 0)
        return rc;
    out_open(o, NULL, '{');
    out_text(o, "name", v.name);
    out_number(o, "size", v.size);
    out_text(o, "source_file", f.path);
    out_text(o, "fault", v.fault);
    out_close(o, '}');
    return 0;
}

static int out_warning(void *user, const char *code, const char *text)
{
    struct out *o = user;

    out_open(o, NULL, '{');
    out_text(o, "code", code);
    out_text(o, "text", text);
    out_close(o, '}');
    return o->rc;
}

static int out_file(void *user, const struct catalog_file *f)
{
    static const struct file_id none;
    struct out *o = user;

    out_open(o, NULL, '{');
    out_text(o, "path", f->path);
    out_number(o, "size", f->id.size);
    out_name(o, "missing");
    buf_adds(&o->buf, file_id_equal(&f->id, &none) ? "true" : "false");
    out_close(o, '}');
    return o->rc;
}

static int out_tensor(void *user, const struct tensor_info *t)
{
    struct out *o = user;

    out_open(o, NULL, '{');
    out_name(o, "key");
    buf_add_json(&o->buf, t->key, t->key_len);
    out_text(o, "name", t->name);
    out_text(o, "dtype", dtype_name(t->dtype));
    out_name(o, "shape");
    shape_format(&t->shape, &o->buf);
    out_text(o, "role", role_name(t->role));
    out_number(o, "bytes", t->bytes);
    out_number(o, "chunks", t->chunks);
    out_optional(o, "fault", t->fault);
    out_optional(o, "part", t->part);
    out_open(o, "origin", '{');
    if (t->first_file >= 0)
        out_number(o, "file", (uint64_t)t->first_file);
    if (t->rule > 0)
        out_number(o, "rule", t->rule - 1);
    out_close(o, '}');
    out_close(o, '}');
    return o->rc;
}

static int out_origin(void *user, const char *text, bool passed)
{
    struct out *o = user;

    out_open(o, NULL, '{');
    out_text(o, passed ? "passed_over" : "rule", text);
    out_close(o, '}');
    return o->rc;
}

static int see_loss(void *user, const char *code, const char *text)
{
    bool *lost = user;

    (void)text;
    *lost |= warning_is_loss(code);
    return 0;
}

static int out_complete(struct out *o, struct catalog *c,
                        const struct checkpoint_info *cp)
{
    bool lost = cp->faults > 0 || cp->error;
    int rc = catalog_warnings(c, cp->id, see_loss, &lost, o->e);

    out_name(o, "complete");
    buf_adds(&o->buf, lost ? "false" : "true");
    return rc;
}

/* The members that are lists, in turn. */
static int out_lists(struct out *o, struct catalog *c, int64_t checkpoint)
{
    int rc;

    out_open(o, "views", '[');
    rc = out_view(o, c, checkpoint, VIEW_MODEL);
    if (rc == 0)
        rc = out_view(o, c, checkpoint, VIEW_OPTIMIZER);
    out_close(o, ']');
    out_open(o, "warnings", '[');
    if (rc == 0)
        rc = catalog_warnings(c, checkpoint, out_warning, o, o->e);
    out_close(o, ']');
    out_open(o, "origins", '[');
    if (rc == 0)
        rc = catalog_origins(c, checkpoint, out_origin, o, o->e);
    out_close(o, ']');
    out_open(o, "files", '[');
    if (rc == 0)
        rc = catalog_files(c, checkpoint, out_file, o, o->e);
    out_close(o, ']');
    out_open(o, "tensors", '[');
    if (rc == 0)
        rc = catalog_tensors(c, checkpoint, 0, out_tensor, o, o->e);
    out_close(o, ']');
    return rc;
}

/* Writes what is left; the first error wins. */
static int out_end(struct out *o, int rc)
{
    buf_adds(&o->buf, "}\n");
    if (rc == 0)
        out_flush(o, true);
    buf_release(&o->buf);
    return rc == 0 ? o->rc : rc;
}

int report_checkpoint(struct catalog *c, int64_t checkpoint, int fd, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(16 << 20);
    struct out o = {.fd = fd, .e = e};
    struct checkpoint_info cp;
    int rc = a ? catalog_checkpoint_by_id(c, checkpoint, a, &cp, e) : err_nomem(e);

    if (rc < 0)
        return rc;
    buf_addc(&o.buf, '{');
    out_about(&o, &cp);
    out_counts(&o, &cp);
    rc = out_complete(&o, c, &cp);
    if (rc == 0)
        rc = out_lists(&o, c, checkpoint);
    return out_end(&o, rc);
}

static int out_object(void *user, const char *key, size_t key_len, const char *json,
                      size_t len)
{
    struct out *o = user;

    separate(o);
    buf_adds(&o->buf, "\n");
    buf_add_json(&o->buf, key, key_len);
    buf_addc(&o->buf, ':');
    buf_add(&o->buf, json, len);
    return o->rc;
}

int report_objects(struct catalog *c, int64_t checkpoint, int fd, struct err *e)
{
    struct out o = {.fd = fd, .e = e};
    int rc;

    buf_addc(&o.buf, '{');
    rc = catalog_objects(c, checkpoint, out_object, &o, e);
    return out_end(&o, rc);
}

/* ---- an index of the model's one file ---- */

struct mapped {
    struct out *o;
    const char *file;
};

static void out_mapped(const struct mapped *m, const char *name, size_t len)
{
    separate(m->o);
    buf_adds(&m->o->buf, "\n");
    buf_add_json(&m->o->buf, name, len);
    buf_adds(&m->o->buf, ":");
    buf_add_json(&m->o->buf, m->file, strlen(m->file));
}

static int map_tensor(void *user, const struct tensor_info *t)
{
    const struct mapped *m = user;

    if (t->role == ROLE_MODEL)
        out_mapped(m, t->key, t->key_len);
    return m->o->rc;
}

static int map_member(void *user, const char *key, size_t len,
                      const struct json *value UNUSED, struct err *e UNUSED)
{
    const struct mapped *m = user;

    if (strcmp(key, "__metadata__") != 0)
        out_mapped(m, key, len);
    return m->o->rc;
}

/* The names of a view are in its header; a file of the source has those of its tensors. */
static int map_view(struct catalog *c, int64_t checkpoint, const struct view_info *v,
                    const struct mapped *m, struct err *e)
{
    static const struct json_limits limits = {.nul_ok = true};
    CLEANUP_FREE char *text = NULL;
    int rc;

    if (v->whole_file >= 0)
        return catalog_tensors(c, checkpoint, 0, map_tensor, (void *)(uintptr_t)m, e);
    text = malloc(v->header + 1);
    if (!text)
        return err_nomem(e);
    rc = view_header(c, v, 0, v->header, text, e);
    if (rc < 0 || v->header <= sizeof(uint64_t))
        return rc;
    return json_each_member(text + sizeof(uint64_t), v->header - sizeof(uint64_t),
                            &limits, map_member, (void *)(uintptr_t)m, e);
}

int report_index(struct catalog *c, int64_t checkpoint, enum view_prefix prefix, int fd,
                 struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct out o = {.fd = fd, .e = e};
    struct view_info v;
    struct mapped m = {.o = &o};
    int rc = a ? view_get(c, checkpoint, VIEW_MODEL, prefix, a, &v, e) : err_nomem(e);

    if (rc < 0)
        return rc;
    m.file = v.name;
    buf_addf(&o.buf, "{\"metadata\":{\"total_size\":%" PRIu64 "},\"weight_map\":{",
             v.size - v.header);
    rc = map_view(c, checkpoint, &v, &m, e);
    buf_addc(&o.buf, '}');
    return out_end(&o, rc);
}
