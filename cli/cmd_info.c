/* SPDX-License-Identifier: MIT */
/* cli/cmd_info.c - what a checkpoint is: format, step, topology, totals, warnings. */
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/json.h"
#include "cli/cli.h"
#include "cli/origin.h"
#include "index/fault_groups.h"
#include "index/names.h"
#include "remote/store.h"

enum {
    INFO_MEMORY = 64 << 20,
    INDENT = 13, /* of values, behind their names */
};

/* A line of programs' output; for people broken between words, with its name in front. */
static void field(const struct cli *c, const char *name, enum style style,
                  const char *value)
{
    const struct screen *s = &c->screen;
    struct wrapping w = {.screen = s, .indent = INDENT, .at = INDENT};

    if (!value)
        return;
    screen_style(s, stdout, style);
    printf("%-*s", INDENT - 1, name);
    screen_style(s, stdout, STYLE_NONE);
    putchar(' ');
    if (s->people)
        wrap_words(&w, value, strlen(value));
    else
        out_text(stdout, value, strlen(value), 0);
    putchar('\n');
}

/* Out of memory is told at the end, by what was being put together. */
static int field_of(struct cli *c, const char *name, enum style style,
                    const struct buf *value)
{
    if (buf_failed(value))
        return err_nomem(&c->err);
    field(c, name, style, value->data ? value->data : "");
    return 0;
}

enum {
    WARNING_KINDS = 64,
    WARNINGS_SHOWN = 3, /* of each kind; all of them with -v */
};

struct warnings {
    struct cli *c;
    size_t n;
    struct {
        char code[40];
        uint64_t count;
    } kind[WARNING_KINDS];
};

/* How many of this kind there were before; what passes the table is shown. */
static uint64_t count_warning(struct warnings *w, const char *code)
{
    size_t i = 0;

    while (i < w->n && strcmp(w->kind[i].code, code) != 0)
        i++;
    if (i == WARNING_KINDS || strlen(code) >= sizeof w->kind[i].code)
        return 0;
    if (i == w->n)
        memcpy(w->kind[w->n++].code, code, strlen(code) + 1);
    return w->kind[i].count++;
}

static int print_warning(void *user, const char *code, const char *text)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct warnings *w = user;

    if (count_warning(w, code) >= WARNINGS_SHOWN && !w->c->opt.verbose)
        return 0;
    buf_addf(&b, "%s: %s", code, text);
    return field_of(w->c, "warning", STYLE_WARNING, &b);
}

static int print_warnings(struct cli *c, struct reading *s,
                          const struct checkpoint_info *i)
{
    struct warnings w = {.c = c};
    int ret = catalog_warnings(s->catalog, i->id, print_warning, &w, &c->err);

    for (size_t k = 0; ret == 0 && k < w.n && !c->opt.verbose; k++) {
        CLEANUP(buf_release) struct buf b = {0};

        if (w.kind[k].count <= WARNINGS_SHOWN)
            continue;
        buf_addf(&b, "%s: %" PRIu64 " more (-v gives all)", w.kind[k].code,
                 w.kind[k].count - WARNINGS_SHOWN);
        ret = field_of(c, "warning", STYLE_WARNING, &b);
    }
    return ret;
}

static int print_fault(void *user, const struct tensor_info *t)
{
    CLEANUP(buf_release) struct buf b = {0};
    char zero[] = "%00";

    if (!t->fault)
        return 0;
    for (size_t i = 0; i < t->key_len; i++)
        buf_add(&b, t->key[i] ? &t->key[i] : zero, t->key[i] ? 1 : sizeof zero - 1);
    buf_addf(&b, ": %s", t->fault);
    return field_of(user, "damaged", STYLE_BAD, &b);
}

static int group_fault(void *user, const struct tensor_info *t)
{
    return t->fault ? fault_groups_add(user, t->key, t->key_len, t->fault) : 0;
}

/* A line for each cause; all tensors with -v. */
static int print_faults(struct cli *c, struct reading *s,
                        const struct checkpoint_info *i)
{
    CLEANUP(fault_groups_release) struct fault_groups groups = {0};
    char line[2048];
    int ret;

    if (!i->faults)
        return 0;
    if (c->opt.verbose)
        return catalog_tensors(s->catalog, i->id, 0, print_fault, c, &c->err);
    ret = catalog_tensors(s->catalog, i->id, 0, group_fault, &groups, &c->err);
    if (ret == -ENOMEM)
        return err_nomem(&c->err);
    for (size_t k = 0; ret == 0 && k < groups.n; k++)
        field(c, "damaged", STYLE_BAD,
              fault_group_line(&groups.at[k], line, sizeof line));
    return ret;
}

/* Programs get a line each, people a list. */
struct sides {
    struct cli *c;
    struct buf list;
};

static int print_side(void *user, const char *name, const char *path)
{
    struct sides *s = user;

    (void)path;
    if (!s->c->screen.people)
        field(s->c, "side file", STYLE_HEAD, name);
    else
        buf_addf(&s->list, "%s%s", s->list.len ? ", " : "", name);
    return 0;
}

static int print_sides(struct cli *c, struct reading *s,
                       const struct checkpoint_info *i)
{
    struct sides sides = {.c = c};
    int ret = cli_side_files(c, s, i, print_side, &sides);

    if (ret == 0 && sides.list.len)
        ret = field_of(c, "side files", STYLE_HEAD, &sides.list);
    buf_release(&sides.list);
    return ret;
}

/* ---- what a person wants to know first ---- */

/* "Megatron Core 0.12, step 100" */
static int print_checkpoint(struct cli *c, const struct checkpoint_info *i)
{
    CLEANUP(buf_release) struct buf b = {0};

    buf_adds(&b, i->framework ? i->framework : i->format);
    if (i->version)
        buf_addf(&b, " %s", i->version);
    if (i->has_step)
        buf_addf(&b, ", step %" PRId64, i->step);
    return field_of(c, "checkpoint", STYLE_HEAD, &b);
}

/* How the job was cut, by the letters that everybody writes. */
static const struct short_name {
    const char *member, *letters;
} short_names[] = {
    {"tensor_parallel", "TP"},    {"pipeline_parallel", "PP"},
    {"virtual_pipeline", "VPP"},  {"context_parallel", "CP"},
    {"expert_parallel", "EP"},    {"expert_tensor_parallel", "ETP"},
    {"data_parallel", "DP"},      {"zero_stage", "ZeRO"},
    {"world_size", "world size"},
};

static bool is_short(const char *member)
{
    for (size_t k = 0; k < ARRAY_SIZE(short_names); k++)
        if (strcmp(short_names[k].member, member) == 0)
            return true;
    return false;
}

static void add_value(struct buf *b, const struct json *v)
{
    const char *text;
    double number;
    int64_t whole;
    bool flag, first = true;

    if (json_string(v, &text)) {
        buf_adds(b, text);
    } else if (json_i64(v, &whole)) {
        buf_addf(b, "%" PRId64, whole);
    } else if (json_double(v, &number)) {
        buf_addf(b, "%.9g", number);
    } else if (json_bool(v, &flag)) {
        buf_adds(b, flag ? "yes" : "no");
    } else { /* a list of numbers, a mesh: two deep at most */
        buf_adds(b, "[");
        for (const struct json *m = json_first(v); m; m = json_next(m), first = false) {
            if (!first)
                buf_adds(b, ", ");
            if (json_kind(v) == JSON_OBJECT)
                buf_addf(b, "%s ", json_key(m));
            if (json_kind(m) == JSON_ARRAY || json_kind(m) == JSON_OBJECT)
                buf_addf(b, "%zu of them", json_count(m));
            else
                add_value(b, m);
        }
        buf_adds(b, "]");
    }
}

static void add_member(struct buf *b, const char *name, const struct json *v)
{
    if (b->len)
        buf_adds(b, ", ");
    for (const char *p = name; *p; p++)
        buf_addc(b, *p == '_' ? ' ' : *p);
    buf_adds(b, " ");
    add_value(b, v);
}

static int print_members(struct cli *c, const char *title, const struct json *v)
{
    CLEANUP(buf_release) struct buf b = {0};

    for (size_t k = 0; k < ARRAY_SIZE(short_names); k++) {
        const struct json *m = json_get(v, short_names[k].member);

        if (m)
            add_member(&b, short_names[k].letters, m);
    }
    for (const struct json *m = json_first(v); m; m = json_next(m))
        if (!is_short(json_key(m)) && strcmp(json_key(m), "model") != 0)
            add_member(&b, json_key(m), m);
    return field_of(c, title, STYLE_HEAD, &b);
}

/* The model's own settings; for programs in lines of about 100 characters. */
static int print_settings(struct cli *c, const struct json *model)
{
    enum { WIDTH = 100 };
    CLEANUP(buf_release) struct buf b = {0};
    const char *title = "model";
    int at = INDENT;

    for (const struct json *m = json_first(model); m; m = json_next(m)) {
        int len = (int)strlen(json_key(m)) + 12;

        if (!c->screen.people && at + len > WIDTH) {
            if (field_of(c, title, STYLE_HEAD, &b) < 0)
                return -ENOMEM;
            buf_clear(&b);
            title = "";
            at = INDENT;
        }
        buf_addf(&b, "%s%s ", at > INDENT ? ", " : "", json_key(m));
        add_value(&b, m);
        at += len;
    }
    return field_of(c, title, STYLE_HEAD, &b);
}

static int print_topology(struct cli *c, const struct checkpoint_info *i)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    const struct json *model;
    struct err ignored = {0};
    int ret = 0;

    if (!i->topology ||
        json_parse(i->topology, strlen(i->topology), NULL, &doc, &ignored) < 0)
        return 0;
    if (json_first(doc))
        ret = print_members(c, "topology", doc);
    model = json_get(doc, "model");
    if (ret == 0 && model && json_kind(model) == JSON_OBJECT)
        ret = print_settings(c, model);
    return ret;
}

/* "7,248,023,552" */
static void add_count(struct buf *b, uint64_t n)
{
    char digits[32];
    int len = snprintf(digits, sizeof digits, "%" PRIu64, n);

    for (int k = 0; k < len; k++)
        buf_addf(b, "%c%s", digits[k],
                 (len - k - 1) % 3 == 0 && k + 1 < len ? "," : "");
}

struct types {
    enum role role;
    uint64_t elements; /* of the role */
    struct buf list;
};

static int add_type(void *user, const struct type_total *t)
{
    struct types *s = user;

    if (t->role != s->role)
        return 0;
    s->elements += t->elements;
    buf_addf(&s->list, "%s%s ", s->list.len ? ", " : "", dtype_name(t->dtype));
    add_count(&s->list, t->elements);
    return 0;
}

/* Parameters of the model by element type; numbers of all else. */
static int print_role(struct cli *c, struct reading *s, const struct checkpoint_info *i,
                      enum role role)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct types types = {.role = role};
    char size[16];
    int ret;

    if (!i->by_role[role])
        return 0;
    ret = catalog_types(s->catalog, i->id, add_type, &types, &c->err);
    add_count(&b, types.elements);
    buf_addf(&b, " in %" PRIu64 " tensors, %s: ", i->by_role[role],
             out_size(i->bytes_by_role[role], size));
    if (types.list.len)
        buf_add(&b, types.list.data, types.list.len);
    buf_release(&types.list);
    if (ret == 0)
        ret = field_of(c, role == ROLE_MODEL ? "parameters" : role_name(role),
                       STYLE_HEAD, &b);
    return ret;
}

static int count_storage(void *user, const struct catalog_file *f)
{
    uint64_t *n = user;

    *n += f->storage;
    return 0;
}

static int print_complete(struct cli *c, struct reading *s,
                          const struct checkpoint_info *i)
{
    CLEANUP(buf_release) struct buf b = {0}, first = {0};
    uint64_t losses;

    TRY(cli_origin_losses(c, s, i->id, &losses, &first));
    if (!i->faults && !losses)
        buf_adds(&b, "yes");
    else
        buf_adds(&b, "no: ");
    if (i->faults)
        buf_addf(&b, "%" PRIu64 " of %" PRIu64 " tensors cannot be read", i->faults,
                 i->tensors);
    else if (losses)
        buf_adds(&b, first.data);
    if (!i->faults && losses > 1)
        buf_addf(&b, ", and %" PRIu64 " more warnings", losses - 1);
    return field_of(c, "complete", i->faults || losses ? STYLE_BAD : STYLE_GOOD, &b);
}

/* ---- where the model comes from ---- */

struct origins {
    struct cli *c;
    struct reading *source;
    const struct checkpoint_info *info;
    struct cli_origin of; /* of one tensor */
    bool any_passed;
    bool tell_passed; /* now: what was passed over, else the rules */
};

static int see_passed(void *user, const char *text, bool passed)
{
    struct origins *o = user;

    (void)text;
    o->any_passed |= passed;
    return 0;
}

static int print_origin(void *user, const char *text, bool passed)
{
    struct origins *o = user;

    if (passed == o->tell_passed && (o->any_passed || o->c->opt.verbose))
        field(o->c, passed ? "passed over" : "origin", STYLE_HEAD, text);
    return 0;
}

static int print_tensor_origin(void *user, const struct tensor_info *t)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct origins *o = user;

    TRY(cli_origin_of(o->c, o->source, o->info, t, &o->of));
    buf_add(&b, t->key, t->key_len);
    buf_addf(&b, " %s ", dtype_name(t->dtype));
    shape_format(&t->shape, &b);
    buf_adds(&b, ": ");
    cli_origin_text(&o->of, t, &b);
    return field_of(o->c, "tensor", STYLE_HEAD, &b);
}

static int print_origins(struct cli *c, struct reading *s,
                         const struct checkpoint_info *i)
{
    struct origins o = {.c = c, .source = s, .info = i};
    int ret = catalog_origins(s->catalog, i->id, see_passed, &o, &c->err);

    if (ret == 0)
        ret = catalog_origins(s->catalog, i->id, print_origin, &o, &c->err);
    o.tell_passed = true;
    if (ret == 0)
        ret = catalog_origins(s->catalog, i->id, print_origin, &o, &c->err);
    if (ret == 0 && c->opt.verbose)
        ret = catalog_tensors(s->catalog, i->id, 0, print_tensor_origin, &o, &c->err);
    cli_origin_release(&o.of);
    return ret;
}

static int print_totals(struct cli *c, struct reading *s,
                        const struct checkpoint_info *i)
{
    CLEANUP(buf_release) struct buf b = {0};
    uint64_t files = 0;
    char size[16];
    int ret = catalog_files(s->catalog, i->id, count_storage, &files, &c->err);

    for (enum role r = ROLE_MODEL; ret == 0 && r <= ROLE_OTHER; r++)
        ret = print_role(c, s, i, r);
    if (ret < 0)
        return ret;
    buf_addf(&b,
             "%s (%" PRIu64 " bytes): %" PRIu64 " tensors in %" PRIu64
             " chunks of %" PRIu64 " files, %" PRIu64 " objects",
             out_size(i->bytes, size), i->bytes, i->tensors, i->chunks, files,
             i->objects);
    ret = field_of(c, "size", STYLE_HEAD, &b);
    return ret == 0 ? print_complete(c, s, i) : ret;
}

static int print_info(struct cli *c, struct reading *s, const struct checkpoint_info *i)
{
    int ret;

    field(c, "source", STYLE_HEAD, s->name);
    ret = print_checkpoint(c, i);
    if (ret == 0)
        ret = print_topology(c, i);
    if (ret == 0)
        ret = print_totals(c, s, i);
    if (ret < 0)
        return ret;
    field(c, "format", STYLE_HEAD, i->format);
    ret = print_sides(c, s, i);
    if (ret == 0)
        ret = print_origins(c, s, i);
    if (ret == 0)
        ret = print_warnings(c, s, i);
    return ret == 0 ? print_faults(c, s, i) : ret;
}

static int info_source(struct cli *c, struct reading *s)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    struct checkpoint_info info;
    int ret = a ? cli_checkpoint(c, s, a, &info) : err_nomem(&c->err);

    if (ret < 0)
        return ret;
    if (!c->opt.json)
        return print_info(c, s, &info);
    return report_checkpoint(s->catalog, info.id, STDOUT_FILENO, &c->err);
}

static int run(struct cli *c)
{
    CLEANUP(reading_close) struct reading s;
    int ret = cli_open(c, c->arg[0], &s);

    return ret < 0 ? ret : info_source(c, &s);
}

const struct cli_command cmd_info = {
    .name = "info",
    .usage = "info SOURCE [-v] [--json]",
    .summary = "format, framework, step, topology, totals, warnings",
    .min_args = 1,
    .max_args = 1,
    .takes = "",
    .confined = true,
    .run = run,
};
