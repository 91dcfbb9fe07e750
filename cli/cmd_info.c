/* SPDX-License-Identifier: MIT */
/* cli/cmd_info.c - what a checkpoint is: format, step, topology, totals, warnings. */
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/json.h"
#include "cli/cli.h"
#include "index/names.h"
#include "remote/store.h"

enum { INFO_MEMORY = 64 << 20, HIDDEN_MAX = 1 << 20 };

static void field(const char *name, const char *value)
{
    if (!value)
        return;
    printf("%-12s ", name);
    out_text(stdout, value, strlen(value), 0);
    putchar('\n');
}

static int print_warning(void *user, const char *code, const char *text)
{
    (void)user;
    printf("%-12s %s: ", "warning", code);
    out_text(stdout, text, strlen(text), 0);
    putchar('\n');
    return 0;
}

static int print_fault(void *user, const struct tensor_info *t)
{
    (void)user;
    if (!t->fault)
        return 0;
    printf("%-12s ", "damaged");
    out_text(stdout, t->key, t->key_len, 0);
    fputs(": ", stdout);
    out_text(stdout, t->fault, strlen(t->fault), 0);
    putchar('\n');
    return 0;
}

static int print_side(void *user, const char *name, const char *path)
{
    (void)user;
    (void)path;
    field("side file", name);
    return 0;
}

/* ---- what a person wants to know first ---- */

/* "Megatron Core 0.12, step 100" */
static void print_checkpoint(const struct checkpoint_info *i)
{
    const char *who = i->framework ? i->framework : i->format;

    printf("%-12s ", "checkpoint");
    out_text(stdout, who, strlen(who), 0);
    if (i->version) {
        putchar(' ');
        out_text(stdout, i->version, strlen(i->version), 0);
    }
    if (i->has_step)
        printf(", step %" PRId64, i->step);
    putchar('\n');
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

static void print_value(const struct json *v)
{
    const char *text;
    double number;
    int64_t whole;
    bool flag, first = true;

    if (json_string(v, &text)) {
        out_text(stdout, text, strlen(text), 0);
    } else if (json_i64(v, &whole)) {
        printf("%" PRId64, whole);
    } else if (json_double(v, &number)) {
        printf("%.9g", number);
    } else if (json_bool(v, &flag)) {
        fputs(flag ? "yes" : "no", stdout);
    } else { /* a list of numbers, a mesh: two deep at most */
        putchar('[');
        for (const struct json *m = json_first(v); m; m = json_next(m), first = false) {
            if (!first)
                fputs(", ", stdout);
            if (json_kind(v) == JSON_OBJECT)
                printf("%s ", json_key(m));
            if (json_kind(m) == JSON_ARRAY || json_kind(m) == JSON_OBJECT)
                printf("%zu of them", json_count(m));
            else
                print_value(m);
        }
        putchar(']');
    }
}

static void print_member(const char *name, const struct json *v, bool *first)
{
    if (!*first)
        fputs(", ", stdout);
    for (const char *p = name; *p; p++)
        putchar(*p == '_' ? ' ' : *p);
    putchar(' ');
    print_value(v);
    *first = false;
}

static void print_members(const char *title, const struct json *v)
{
    bool first = true;

    printf("%-12s ", title);
    for (size_t k = 0; k < ARRAY_SIZE(short_names); k++) {
        const struct json *m = json_get(v, short_names[k].member);

        if (m)
            print_member(short_names[k].letters, m, &first);
    }
    for (const struct json *m = json_first(v); m; m = json_next(m))
        if (!is_short(json_key(m)) && strcmp(json_key(m), "model") != 0)
            print_member(json_key(m), m, &first);
    putchar('\n');
}

/* The model's own settings, one after the other in lines of a terminal's width. */
static void print_settings(const struct json *model)
{
    enum { WIDTH = 100, INDENT = 13 };
    int at = INDENT;

    printf("%-12s ", "model");
    for (const struct json *m = json_first(model); m; m = json_next(m)) {
        int len = (int)strlen(json_key(m)) + 12;

        if (at + len > WIDTH) {
            printf("\n%-*s", INDENT, "");
            at = INDENT;
        }
        printf("%s%s ", at > INDENT ? ", " : "", json_key(m));
        print_value(m);
        at += len;
    }
    putchar('\n');
}

static void print_topology(const struct checkpoint_info *i)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err ignored = {0};

    if (!i->topology ||
        json_parse(i->topology, strlen(i->topology), NULL, &doc, &ignored) < 0)
        return;
    if (json_first(doc))
        print_members("topology", doc);
    if (json_get(doc, "model") && json_kind(json_get(doc, "model")) == JSON_OBJECT)
        print_settings(json_get(doc, "model"));
}

/* "7,248,023,552" */
static void print_count(uint64_t n)
{
    char digits[32];
    int len = snprintf(digits, sizeof digits, "%" PRIu64, n);

    for (int k = 0; k < len; k++) {
        putchar(digits[k]);
        if ((len - k - 1) % 3 == 0 && k + 1 < len)
            putchar(',');
    }
}

struct types {
    enum role role;
    uint64_t elements; /* of the role */
    bool printing, first;
};

static int add_type(void *user, const struct type_total *t)
{
    struct types *s = user;

    if (t->role != s->role)
        return 0;
    if (!s->printing) {
        s->elements += t->elements;
        return 0;
    }
    printf("%s%s ", s->first ? "" : ", ", dtype_name(t->dtype));
    print_count(t->elements);
    s->first = false;
    return 0;
}

/* Parameters of the model by element type; numbers of all else. */
static int print_role(struct cli *c, struct cli_source *s,
                      const struct checkpoint_info *i, enum role role)
{
    struct types types = {.role = role};
    char size[16];
    int ret;

    if (!i->by_role[role])
        return 0;
    ret = catalog_types(s->catalog, i->id, add_type, &types, &c->err);
    if (ret < 0)
        return ret;
    printf("%-12s ", role == ROLE_MODEL ? "parameters" : role_name(role));
    print_count(types.elements);
    printf(" in %" PRIu64 " tensors, %s: ", i->by_role[role],
           out_size(i->bytes_by_role[role], size));
    types.printing = types.first = true;
    ret = catalog_types(s->catalog, i->id, add_type, &types, &c->err);
    putchar('\n');
    return ret;
}

static int count_storage(void *user, const struct catalog_file *f)
{
    uint64_t *n = user;

    *n += f->storage;
    return 0;
}

static int print_totals(struct cli *c, struct cli_source *s,
                        const struct checkpoint_info *i)
{
    uint64_t files = 0;
    char size[16];
    int ret = catalog_files(s->catalog, i->id, count_storage, &files, &c->err);

    for (enum role r = ROLE_MODEL; ret == 0 && r <= ROLE_OTHER; r++)
        ret = print_role(c, s, i, r);
    if (ret < 0)
        return ret;
    printf("%-12s %s (%" PRIu64 " bytes): %" PRIu64 " tensors in %" PRIu64
           " chunks of %" PRIu64 " files, %" PRIu64 " objects\n",
           "size", out_size(i->bytes, size), i->bytes, i->tensors, i->chunks, files,
           i->objects);
    if (i->faults)
        printf("%-12s no: %" PRIu64 " of %" PRIu64 " tensors cannot be read\n",
               "complete", i->faults, i->tensors);
    else
        printf("%-12s yes\n", "complete");
    return 0;
}

static int print_info(struct cli *c, struct cli_source *s,
                      const struct checkpoint_info *i)
{
    int ret;

    field("source", s->name);
    print_checkpoint(i);
    print_topology(i);
    ret = print_totals(c, s, i);
    field("format", i->format);
    if (ret == 0)
        ret = cli_side_files(c, s, i, print_side, NULL);
    if (ret == 0)
        ret = catalog_warnings(s->catalog, i->id, print_warning, NULL, &c->err);
    if (ret == 0 && i->faults)
        ret = catalog_tensors(s->catalog, i->id, 0, print_fault, NULL, &c->err);
    return ret;
}

static int info_source(struct cli *c, struct cli_source *s)
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
    CLEANUP(cli_close) struct cli_source s;
    int ret = cli_open(c, c->arg[0], &s);

    return ret < 0 ? ret : info_source(c, &s);
}

const struct cli_command cmd_info = {
    .name = "info",
    .usage = "info SOURCE [--json]",
    .summary = "format, framework, step, topology, totals, warnings",
    .min_args = 1,
    .max_args = 1,
    .takes = "",
    .confined = true,
    .run = run,
};
