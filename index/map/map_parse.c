/* SPDX-License-Identifier: MIT */
/* index/map/map_parse.c - a map's JSON, checked as far as it can be without a tensor. */
#include "index/map/map_priv.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/json.h"

enum {
    MAP_BYTES = 16 << 20,
    MAP_MEMORY = 256 << 20,
    MAP_VERSION = 1,
};

struct parser {
    struct map *map;
    struct arena *arena;
    struct err *e;
};

static bool is_member(const char *key, const char *const *known)
{
    for (; *known; known++)
        if (strcmp(key, *known) == 0)
            return true;
    return false;
}

/* What a map has that we do not know may decide about bytes: it is refused. */
static int check_members(struct parser *p, const struct json *v, const char *what,
                         const char *const *known)
{
    if (json_kind(v) != JSON_OBJECT)
        return err_set(p->e, EINVAL, "%s is no object", what);
    for (const struct json *m = json_first(v); m; m = json_next(m))
        if (!is_member(json_key(m), known))
            return err_set(p->e, EINVAL, "%s: \"%.100s\" is not known", what,
                           json_key(m));
    return 0;
}

/* The text of a string or of a whole number: expressions may be either. NULL: absent. */
static int take_text(struct parser *p, const struct json *v, const char *what,
                     const char **out)
{
    const char *text;
    char digits[32];
    int64_t n;

    *out = NULL;
    if (!v)
        return 0;
    if (json_i64(v, &n)) {
        snprintf(digits, sizeof digits, "%" PRId64, n);
        text = digits;
    } else if (!json_string(v, &text)) {
        return err_set(p->e, EINVAL, "%s is neither text nor a whole number", what);
    }
    *out = arena_memdup(p->arena, text, strlen(text));
    return *out ? 0 : err_nomem(p->e);
}

static int take_expression(struct parser *p, const struct json *v, const char *what,
                           const char **out)
{
    int ret = take_text(p, v, what, out);

    if (ret == 0 && *out && strstr(*out, "config."))
        p->map->wants_config = true;
    return ret;
}

static int take_pattern(struct parser *p, const struct json *v, const char **out)
{
    int ret = take_text(p, v, "a pattern", out);

    if (ret == 0 && !*out)
        ret = err_set(p->e, EINVAL, "a pattern is missing");
    return ret == 0 ? pattern_check(*out, p->e) : ret;
}

static int take_template(struct parser *p, const struct json *v, const char **out)
{
    int ret = take_text(p, v, "\"to\"", out);

    return ret == 0 && *out ? template_check(*out, p->e) : ret;
}

static int take_axis(struct parser *p, const struct json *v, uint32_t *out)
{
    uint64_t n = 0;

    if (v && (!json_u64(v, &n) || n >= SHAPE_MAX_DIMS))
        return err_set(p->e, EINVAL, "\"axis\" is no number from 0 to %d",
                       SHAPE_MAX_DIMS - 1);
    *out = (uint32_t)n;
    return 0;
}

/* ---- operations on one tensor ---- */

static int take_order(struct parser *p, const struct json *v, struct map_op *out)
{
    uint64_t seen = 0, n;
    uint32_t *order;

    if (json_kind(v) != JSON_ARRAY || json_count(v) > SHAPE_MAX_DIMS)
        return err_set(p->e, EINVAL, "\"transpose\" is no list of axes");
    out->norder = (uint32_t)json_count(v);
    if (out->norder == 0)
        return 0; /* reversed */
    order = arena_array(p->arena, out->norder, sizeof *order);
    if (!order)
        return err_nomem(p->e);
    out->order = order;
    for (const struct json *m = json_first(v); m; m = json_next(m)) {
        if (!json_u64(m, &n) || n >= out->norder || seen & 1ull << n)
            return err_set(p->e, EINVAL, "\"transpose\" is no order of %u axes",
                           out->norder);
        seen |= 1ull << n;
        *order++ = (uint32_t)n;
    }
    return 0;
}

static int take_cut(struct parser *p, const struct json *v, struct map_op *out)
{
    static const char *const known[] = {"axis", "from", "to", NULL};
    int ret = check_members(p, v, "\"cut\"", known);

    if (ret == 0)
        ret = take_axis(p, json_get(v, "axis"), &out->axis);
    if (ret == 0)
        ret = take_expression(p, json_get(v, "from"), "\"from\"", &out->from);
    if (ret == 0)
        ret = take_expression(p, json_get(v, "to"), "\"to\"", &out->to);
    if (ret == 0 && !out->from && !out->to)
        ret = err_set(p->e, EINVAL, "\"cut\" says neither from where nor to where");
    return ret;
}

static int take_unstack(struct parser *p, const struct json *v, struct map_op *out)
{
    static const char *const known[] = {"axis", "as", NULL};
    int ret = check_members(p, v, "\"unstack\"", known);

    if (ret == 0)
        ret = take_axis(p, json_get(v, "axis"), &out->axis);
    if (ret == 0)
        ret = take_text(p, json_get(v, "as"), "\"as\"", &out->as);
    if (ret == 0 && (!out->as || !pattern_is_name(out->as)))
        ret = err_set(p->e, EINVAL, "\"unstack\" gives the index no name (\"as\")");
    return ret;
}

static int take_interleave(struct parser *p, const struct json *v, struct map_op *out)
{
    static const char *const known[] = {"axis", "groups", "block", NULL};
    int ret = check_members(p, v, "\"interleave\"", known);

    if (ret == 0)
        ret = take_axis(p, json_get(v, "axis"), &out->axis);
    if (ret == 0)
        ret = take_expression(p, json_get(v, "groups"), "\"groups\"", &out->groups);
    if (ret == 0)
        ret = take_expression(p, json_get(v, "block"), "\"block\"", &out->block);
    return ret;
}

static int take_name(struct parser *p, const struct json *v, const char **out)
{
    int ret = take_text(p, v, "a name", out);

    return ret == 0 && *out && !pattern_is_name(*out)
               ? err_set(p->e, EINVAL, "\"%s\" is no name", *out)
               : ret;
}

static int take_shift(struct parser *p, const struct json *v, struct map_op *out)
{
    static const char *const known[] = {"from", "by", "as", NULL};
    int ret = check_members(p, v, "\"shift\"", known);

    if (ret == 0)
        ret = take_name(p, json_get(v, "from"), &out->of);
    if (ret == 0)
        ret = take_name(p, json_get(v, "as"), &out->as);
    if (ret == 0)
        ret = take_expression(p, json_get(v, "by"), "\"by\"", &out->by);
    if (ret == 0 && (!out->of || !out->as || !out->by))
        ret = err_set(p->e, EINVAL, "\"shift\" wants \"from\", \"by\" and \"as\"");
    return ret;
}

static const struct op_syntax {
    const char *name;
    enum op_kind kind;
    int (*take)(struct parser *p, const struct json *v, struct map_op *out);
} op_syntax[] = {
    {"cut", OP_CUT, take_cut},
    {"unstack", OP_UNSTACK, take_unstack},
    {"transpose", OP_TRANSPOSE, take_order},
    {"deinterleave", OP_DEINTERLEAVE, take_interleave},
    {"interleave", OP_INTERLEAVE, take_interleave},
    {"shift", OP_SHIFT, take_shift},
};

/* {"cut": {...}}: an object with the one member that names the operation. */
static int take_op(struct parser *p, const struct json *v, struct map_op *out)
{
    const struct json *m = json_first(v);

    if (json_kind(v) != JSON_OBJECT || json_count(v) != 1)
        return err_set(p->e, EINVAL, "an operation is an object with one member");
    for (size_t i = 0; i < ARRAY_SIZE(op_syntax); i++) {
        if (strcmp(json_key(m), op_syntax[i].name) != 0)
            continue;
        out->kind = op_syntax[i].kind;
        return op_syntax[i].take(p, m, out);
    }
    err_set(p->e, EINVAL, "no operation is called \"%.100s\"", json_key(m));
    return err_hint(p->e,
                    "cut, unstack, transpose, deinterleave, interleave, shift are");
}

static int take_ops(struct parser *p, const struct json *v, struct map_rule *out)
{
    struct map_op *op;
    int ret = 0;

    if (!v)
        return 0;
    if (json_kind(v) != JSON_ARRAY)
        return err_set(p->e, EINVAL, "\"ops\" is no list");
    op = arena_array(p->arena, json_count(v) + 1, sizeof *op);
    if (!op)
        return err_nomem(p->e);
    out->op = op;
    for (const struct json *m = json_first(v); ret == 0 && m; m = json_next(m)) {
        ret = take_op(p, m, op++);
        out->nop++;
    }
    return ret;
}

/* ---- rules ---- */

/* "from": a pattern or a list of them. */
static int take_from(struct parser *p, const struct json *v, struct map_rule *out)
{
    bool list = json_kind(v) == JSON_ARRAY;
    const char **from;
    int ret = 0;

    if (list && json_count(v) == 0)
        return err_set(p->e, EINVAL, "\"from\" is empty");
    out->nfrom = list ? json_count(v) : 1;
    from = arena_array(p->arena, out->nfrom, sizeof *from);
    if (!from)
        return err_nomem(p->e);
    out->from = from;
    if (!list)
        return take_pattern(p, v, from);
    for (const struct json *m = json_first(v); ret == 0 && m; m = json_next(m))
        ret = take_pattern(p, m, from++);
    return ret;
}

static int take_part(struct parser *p, const struct json *v, enum rule_kind kind,
                     struct map_part *out)
{
    static const char *const split[] = {"to", "rows", NULL};
    static const char *const join[] = {"from", "rows", NULL};
    bool splits = kind == RULE_SPLIT;
    int ret = check_members(p, v, "a part", splits ? split : join);

    if (ret == 0)
        ret = take_expression(p, json_get(v, "rows"), "\"rows\"", &out->rows);
    if (ret == 0)
        ret = splits ? take_template(p, json_get(v, "to"), &out->key)
                     : take_pattern(p, json_get(v, "from"), &out->key);
    if (ret == 0 && !out->key)
        ret = err_set(p->e, EINVAL, "a part without \"to\"");
    return ret;
}

static int take_parts(struct parser *p, const struct json *v, struct map_rule *out)
{
    struct map_part *part;
    int ret = 0;

    if (!v || json_kind(v) != JSON_ARRAY || json_count(v) == 0)
        return err_set(p->e, EINVAL, "\"parts\" is no list, or an empty one");
    part = arena_array(p->arena, json_count(v), sizeof *part);
    if (!part)
        return err_nomem(p->e);
    out->part = part;
    for (const struct json *m = json_first(v); ret == 0 && m; m = json_next(m)) {
        ret = take_part(p, m, out->kind, part++);
        out->npart++;
    }
    return ret;
}

/* "split" and "join": {"axis": 0, "groups": ..., "parts": [...]}. */
static int take_shares(struct parser *p, const struct json *v, enum rule_kind kind,
                       struct map_rule *out)
{
    static const char *const known[] = {"axis", "groups", "parts", NULL};
    int ret = check_members(p, v, kind == RULE_SPLIT ? "\"split\"" : "\"join\"", known);

    out->kind = kind;
    if (ret == 0)
        ret = take_axis(p, json_get(v, "axis"), &out->axis);
    if (ret == 0)
        ret = take_expression(p, json_get(v, "groups"), "\"groups\"", &out->groups);
    if (ret == 0)
        ret = take_parts(p, json_get(v, "parts"), out);
    return ret;
}

static int take_stack(struct parser *p, const struct json *v, struct map_rule *out)
{
    static const char *const known[] = {"axis", "by", NULL};
    int ret = check_members(p, v, "\"stack\"", known);

    out->kind = RULE_STACK;
    if (ret == 0)
        ret = take_axis(p, json_get(v, "axis"), &out->axis);
    if (ret == 0)
        ret = take_text(p, json_get(v, "by"), "\"by\"", &out->by);
    if (ret == 0 && !out->by)
        ret = err_set(p->e, EINVAL, "\"stack\" does not say by which name");
    for (size_t i = 0; ret == 0 && i < out->nfrom; i++)
        if (!pattern_has(out->from[i], out->by, strlen(out->by)))
            ret = err_set(p->e, EINVAL, "\"%s\" has no {%s} to stack by", out->from[i],
                          out->by);
    return ret;
}

bool map_casts(enum dtype from, enum dtype to)
{
    static const bool is_float[DTYPE_COUNT] = {
        [DTYPE_F64] = true,  [DTYPE_F32] = true,     [DTYPE_F16] = true,
        [DTYPE_BF16] = true, [DTYPE_F8_E4M3] = true, [DTYPE_F8_E5M2] = true,
    };

    return from != to && is_float[from] && is_float[to];
}

static int take_cast(struct parser *p, const struct json *v, enum dtype *out)
{
    const char *name;

    if (!v)
        return 0;
    *out = json_string(v, &name) ? dtype_from_name(name) : DTYPE_NONE;
    if (*out != DTYPE_F64 && !map_casts(DTYPE_F64, *out)) {
        err_set(p->e, EINVAL, "\"cast\" names no floating-point type");
        return err_hint(p->e, "F64, F32, F16, BF16, F8_E4M3 or F8_E5M2");
    }
    return 0;
}

static int take_flag(struct parser *p, const struct json *v, const char *what,
                     bool *out)
{
    if (v && !json_bool(v, out))
        return err_set(p->e, EINVAL, "%s is neither true nor false", what);
    return 0;
}

static int take_role(struct parser *p, const struct json *v, unsigned *out)
{
    static const char *const names[] = {"model", "optimizer", "other"};
    const char *text = NULL;

    *out = 1u << ROLE_MODEL;
    if (!v)
        return 0;
    if (json_string(v, &text) && strcmp(text, "any") == 0) {
        *out = ~0u;
        return 0;
    }
    for (unsigned i = 0; text && i < ARRAY_SIZE(names); i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = 1u << i;
            return 0;
        }
    }
    return err_set(p->e, EINVAL, "\"role\" is none of model, optimizer, other, any");
}

/* What becomes of the tensors: exactly one of the members says it. */
static int take_result(struct parser *p, const struct json *v, struct map_rule *out)
{
    const struct json *to = json_get(v, "to"), *split = json_get(v, "split"),
                      *join = json_get(v, "join"), *stack = json_get(v, "stack");
    bool drop = false;
    int ret = take_flag(p, json_get(v, "drop"), "\"drop\"", &drop);

    if (ret == 0)
        ret = take_text(p, json_get(v, "refuse"), "\"refuse\"", &out->refuse);
    if (ret == 0)
        ret = take_template(p, to, &out->to);
    if (ret < 0)
        return ret;
    if (drop + !!out->refuse + !!split + !!join + !!stack > 1 ||
        !to != (drop || out->refuse || split))
        return err_set(p->e, EINVAL,
                       "a rule has one of \"to\", \"split\", \"drop\", \"refuse\", or "
                       "\"join\" or \"stack\" with \"to\"");
    out->kind = drop ? RULE_DROP : out->refuse ? RULE_REFUSE : RULE_TO;
    if (split)
        return take_shares(p, split, RULE_SPLIT, out);
    if (join)
        return take_shares(p, join, RULE_JOIN, out);
    return stack ? take_stack(p, stack, out) : 0;
}

/* ---- names: what a template asks for, each pattern and the operations must give ---- */

static bool gives(const struct map_rule *rule, const char *pattern, const char *name,
                  size_t len)
{
    if (rule->by && strlen(rule->by) == len && memcmp(rule->by, name, len) == 0)
        return false; /* it is an index in the result */
    for (size_t i = 0; i < rule->nop; i++) {
        const struct map_op *op = &rule->op[i];

        if (op->as && strlen(op->as) == len && memcmp(op->as, name, len) == 0 &&
            (op->kind == OP_UNSTACK || pattern_has(pattern, op->of, strlen(op->of))))
            return true;
    }
    return pattern_has(pattern, name, len);
}

static int check_names(struct parser *p, const struct map_rule *rule,
                       const char *pattern, const char *text)
{
    const char *at = text, *name;
    size_t len;

    while (at && pattern_next_name(&at, &name, &len))
        if (!gives(rule, pattern, name, len))
            return err_set(p->e, EINVAL, "\"%s\": nothing in \"%s\" gives {%.*s}", text,
                           pattern, (int)len, name);
    return 0;
}

/* Parts of one tensor are known by their names: all patterns have the same ones. */
static int check_join(struct parser *p, const struct map_rule *rule)
{
    int ret = check_names(p, rule, rule->part[0].key, rule->to);

    for (size_t i = 1; ret == 0 && i < rule->npart; i++) {
        ret = check_names(p, rule, rule->part[0].key, rule->part[i].key);
        if (ret == 0)
            ret = check_names(p, rule, rule->part[i].key, rule->part[0].key);
    }
    return ret;
}

static int check_rule(struct parser *p, const struct map_rule *rule)
{
    int ret = 0;

    if (rule->kind == RULE_JOIN)
        return check_join(p, rule);
    for (size_t i = 0; ret == 0 && i < rule->nfrom; i++) {
        ret = check_names(p, rule, rule->from[i], rule->to);
        for (size_t k = 0; ret == 0 && k < rule->npart; k++)
            ret = check_names(p, rule, rule->from[i], rule->part[k].key);
    }
    return ret;
}

static int take_choice(struct parser *p, const struct json *v, const char **out)
{
    const char *text;

    if (!json_string(v, &text))
        return err_set(p->e, EINVAL, "neither text nor a list of texts");
    *out = arena_memdup(p->arena, text, strlen(text));
    return *out ? 0 : err_nomem(p->e);
}

/* {"config.NAME": "text" or ["text", ...]}; null: no such text is fine too. */
static int take_texts(struct parser *p, const struct json *v, struct map_text *out)
{
    bool list = json_kind(v) == JSON_ARRAY;
    const char **choice;
    int ret = 0;

    out->name = arena_memdup(p->arena, json_key(v), strlen(json_key(v)));
    choice = arena_array(p->arena, (list ? json_count(v) : 1) + 1, sizeof *choice);
    if (!out->name || !choice)
        return err_nomem(p->e);
    out->choice = choice;
    for (const struct json *m = list ? json_first(v) : v; ret == 0 && m;
         m = list ? json_next(m) : NULL) {
        if (list && json_kind(m) == JSON_NULL)
            out->or_none = true;
        else
            ret = take_choice(p, m, &choice[out->nchoice++]);
    }
    p->map->wants_config |= strncmp(out->name, "config.", 7) == 0;
    return ret < 0 ? err_wrap(p->e, "%.100s", out->name) : 0;
}

/* An object of them. `source`: the checkpoint's own settings may be asked, too. */
static int take_all_texts(struct parser *p, const struct json *v, bool source,
                          const struct map_text **out, size_t *n)
{
    struct map_text *text;
    int ret = 0;

    if (!v)
        return 0;
    if (json_kind(v) != JSON_OBJECT)
        return err_set(p->e, EINVAL, "no object");
    text = arena_array(p->arena, json_count(v) + 1, sizeof *text);
    if (!text)
        return err_nomem(p->e);
    *out = text;
    *n = json_count(v);
    for (const struct json *m = json_first(v); ret == 0 && m; m = json_next(m), text++)
        if (strncmp(json_key(m), "config.", 7) != 0 &&
            !(source && strncmp(json_key(m), "source.", 7) == 0))
            ret =
                err_set(p->e, EINVAL, "\"%.100s\" is not of config.json", json_key(m));
        else
            ret = take_texts(p, m, text);
    return ret;
}

/* "when": an expression, or what texts config.json has. */
static int take_when(struct parser *p, const struct json *v, struct map_rule *out)
{
    if (!v || json_kind(v) != JSON_OBJECT)
        return take_expression(p, v, "\"when\"", &out->when);
    return take_all_texts(p, v, false, &out->text, &out->ntext) < 0
               ? err_wrap(p->e, "\"when\"")
               : 0;
}

static int take_rule(struct parser *p, const struct json *v, struct map_rule *out)
{
    static const char *const known[] = {"from", "ops",      "to",     "split", "drop",
                                        "join", "cast",     "role",   "stack", "when",
                                        "why",  "optional", "refuse", NULL};
    const struct json *from = json_get(v, "from");
    int ret = check_members(p, v, "a rule", known);

    if (ret == 0 && !from != !!json_get(v, "join"))
        ret = err_set(p->e, EINVAL,
                      from ? "a \"join\" has its patterns in its parts, not in \"from\""
                           : "\"from\" is missing");
    if (ret == 0 && from)
        ret = take_from(p, from, out);
    if (ret == 0)
        ret = take_ops(p, json_get(v, "ops"), out);
    if (ret == 0)
        ret = take_result(p, v, out);
    for (size_t i = 0; ret == 0 && i < out->nop; i++)
        if (out->op[i].kind == OP_UNSTACK &&
            (out->kind == RULE_JOIN || out->kind == RULE_STACK))
            ret = err_set(p->e, EINVAL, "\"unstack\" with \"join\" or \"stack\"");
    if (ret == 0)
        ret = take_cast(p, json_get(v, "cast"), &out->cast);
    if (ret == 0)
        ret = take_role(p, json_get(v, "role"), &out->roles);
    if (ret == 0)
        ret = take_flag(p, json_get(v, "optional"), "\"optional\"", &out->optional);
    if (ret == 0)
        ret = take_when(p, json_get(v, "when"), out);
    return ret == 0 ? check_rule(p, out) : ret;
}

static int take_rules(struct parser *p, const struct json *v)
{
    struct map_rule *rule;
    int ret = 0;

    if (!v || json_kind(v) != JSON_ARRAY)
        return err_set(p->e, EINVAL, "\"rules\" is no list");
    rule = arena_array(p->arena, json_count(v) + 1, sizeof *rule);
    if (!rule)
        return err_nomem(p->e);
    p->map->rule = rule;
    for (const struct json *m = json_first(v); m; m = json_next(m), rule++) {
        rule->number = (unsigned)++p->map->nrule;
        ret = take_rule(p, m, rule);
        if (ret < 0)
            return err_wrap(p->e, "rule %u", rule->number);
    }
    return 0;
}

/* ---- variables ---- */

static int take_choices(struct parser *p, const struct json *v,
                        struct map_variable *out)
{
    bool list = json_kind(v) == JSON_ARRAY;
    const char **choice;
    int ret = 0;

    out->nchoice = list ? json_count(v) : 1;
    if (out->nchoice == 0)
        return err_set(p->e, EINVAL, "no value");
    choice = arena_array(p->arena, out->nchoice + 1, sizeof *choice);
    if (!choice)
        return err_nomem(p->e);
    out->choice = choice;
    if (!list)
        return take_expression(p, v, "its value", choice);
    for (const struct json *m = json_first(v); ret == 0 && m; m = json_next(m))
        ret = take_expression(p, m, "its value", choice++);
    return ret;
}

static int take_variables(struct parser *p, const struct json *v)
{
    struct map_variable *variable;
    int ret = 0;

    if (!v)
        return 0;
    if (json_kind(v) != JSON_OBJECT)
        return err_set(p->e, EINVAL, "\"variables\" is no object");
    variable = arena_array(p->arena, json_count(v) + 1, sizeof *variable);
    if (!variable)
        return err_nomem(p->e);
    p->map->variable = variable;
    for (const struct json *m = json_first(v); m; m = json_next(m), variable++) {
        variable->name = arena_memdup(p->arena, json_key(m), strlen(json_key(m)));
        ret = variable->name ? take_choices(p, m, variable) : err_nomem(p->e);
        if (ret < 0)
            return err_wrap(p->e, "variable %.100s", json_key(m));
        p->map->nvariable++;
    }
    return 0;
}

/* ---- for which checkpoints it is ---- */

/* "models": {"config.model_type": [...]}, one place. */
static int take_models(struct parser *p, const struct json *v)
{
    size_t n = 0;
    int ret = take_all_texts(p, v, false, &p->map->models, &n);

    if (ret == 0 && v && n != 1)
        ret = err_set(p->e, EINVAL, "not one place of config.json");
    return ret < 0 ? err_wrap(p->e, "\"models\"") : 0;
}

static int take_refusal(struct parser *p, const struct json *v, struct map_refusal *out)
{
    static const char *const known[] = {"models", "when", "why", NULL};
    int ret = check_members(p, v, "an element", known);

    if (ret == 0)
        ret = take_all_texts(p, json_get(v, "models"), true, &out->text, &out->ntext);
    if (ret == 0)
        ret = take_expression(p, json_get(v, "when"), "\"when\"", &out->when);
    if (ret == 0)
        ret = take_text(p, json_get(v, "why"), "\"why\"", &out->why);
    if (ret == 0 && (!out->why || (!out->when && out->ntext == 0)))
        ret =
            err_set(p->e, EINVAL, "an element has \"why\", and \"models\" or \"when\"");
    return ret;
}

static int take_shape(struct parser *p, const struct json *v, struct map_shape *out)
{
    static const char *const known[] = {"of", "is", NULL};
    const struct json *is = json_get(v, "is");
    const char **dim;
    int ret = check_members(p, v, "an element", known);

    if (ret == 0)
        ret = take_pattern(p, json_get(v, "of"), &out->of);
    if (ret < 0)
        return ret;
    if (!is || json_kind(is) != JSON_ARRAY || json_count(is) > SHAPE_MAX_DIMS)
        return err_set(p->e, EINVAL, "\"is\" is no list of sizes");
    out->ndim = json_count(is);
    dim = arena_array(p->arena, out->ndim + 1, sizeof *dim);
    if (!dim)
        return err_nomem(p->e);
    out->dim = dim;
    for (const struct json *m = json_first(is); ret == 0 && m; m = json_next(m))
        ret = take_expression(p, m, "a size", dim++);
    return ret;
}

static int take_refusals(struct parser *p, const struct json *v)
{
    struct map_refusal *refusal;
    int ret = 0;

    if (!v)
        return 0;
    if (json_kind(v) != JSON_ARRAY)
        return err_set(p->e, EINVAL, "\"refuse\" is no list");
    refusal = arena_array(p->arena, json_count(v) + 1, sizeof *refusal);
    if (!refusal)
        return err_nomem(p->e);
    p->map->refusal = refusal;
    for (const struct json *m = json_first(v); ret == 0 && m; m = json_next(m)) {
        p->map->nrefusal++;
        ret = take_refusal(p, m, refusal++);
    }
    return ret < 0 ? err_wrap(p->e, "\"refuse\" %zu", p->map->nrefusal) : 0;
}

static int take_shapes(struct parser *p, const struct json *v)
{
    struct map_shape *shape;
    int ret = 0;

    if (!v)
        return 0;
    if (json_kind(v) != JSON_ARRAY)
        return err_set(p->e, EINVAL, "\"shapes\" is no list");
    shape = arena_array(p->arena, json_count(v) + 1, sizeof *shape);
    if (!shape)
        return err_nomem(p->e);
    p->map->shape = shape;
    for (const struct json *m = json_first(v); ret == 0 && m; m = json_next(m)) {
        p->map->nshape++;
        ret = take_shape(p, m, shape++);
    }
    return ret < 0 ? err_wrap(p->e, "\"shapes\" %zu", p->map->nshape) : 0;
}

/* ---- the map ---- */

static int take_other(struct parser *p, const struct json *v)
{
    static const char *const names[] = {
        [OTHER_KEEP] = "keep", [OTHER_DROP] = "drop", [OTHER_REFUSE] = "refuse"};
    const char *text;

    if (!v)
        return 0;
    for (unsigned i = 0; json_string(v, &text) && i < ARRAY_SIZE(names); i++) {
        if (strcmp(text, names[i]) == 0) {
            p->map->other = (enum map_other)i;
            return 0;
        }
    }
    return err_set(p->e, EINVAL, "\"other\" is none of keep, drop, refuse");
}

static int take_map(struct parser *p, const struct json *v)
{
    static const char *const known[] = {
        "unshard_map", "description", "models", "variables", "refuse",
        "shapes",      "rules",       "other",  "cast",      NULL};
    uint64_t version;
    int ret;

    if (!json_u64(json_get(v, "unshard_map"), &version)) {
        err_set(p->e, EINVAL, "no map: \"unshard_map\" gives no version");
        return err_hint(p->e, "a map begins {\"unshard_map\": 1, ...: unshard-maps(5)");
    }
    if (version != MAP_VERSION) {
        err_set(p->e, ENOTSUP, "version %" PRIu64 " of maps is not known", version);
        return err_hint(p->e, "this program reads version %d", MAP_VERSION);
    }
    ret = check_members(p, v, "the map", known);
    if (ret == 0)
        ret = take_variables(p, json_get(v, "variables"));
    if (ret == 0)
        ret = take_models(p, json_get(v, "models"));
    if (ret == 0)
        ret = take_refusals(p, json_get(v, "refuse"));
    if (ret == 0)
        ret = take_shapes(p, json_get(v, "shapes"));
    if (ret == 0)
        ret = take_rules(p, json_get(v, "rules"));
    if (ret == 0)
        ret = take_other(p, json_get(v, "other"));
    if (ret == 0)
        ret = take_cast(p, json_get(v, "cast"), &p->map->cast);
    return ret;
}

static int map_new(const char *name, struct map **out, struct err *e)
{
    struct map *m = calloc(1, sizeof *m);

    if (m)
        m->arena = arena_new(MAP_MEMORY);
    if (m && m->arena)
        m->name = arena_memdup(m->arena, name, strlen(name));
    if (!m || !m->name) {
        map_free(m);
        return err_nomem(e);
    }
    *out = m;
    return 0;
}

int map_parse(const char *name, const char *text, size_t len, struct map **out,
              struct err *e)
{
    static const struct json_limits limits = {.bytes = MAP_BYTES, .depth = 16};
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP(map_freep) struct map *m = NULL;
    struct parser p = {.e = e};
    int ret = json_parse(text, len, &limits, &doc, e);

    if (ret == 0)
        ret = map_new(name, &m, e);
    if (ret == 0) {
        p.map = m;
        p.arena = m->arena;
        ret = take_map(&p, doc);
    }
    if (ret < 0)
        return err_wrap(e, "map %s", name);
    *out = steal(&m);
    return 0;
}

int map_parse_cast(enum dtype to, struct map **out, struct err *e)
{
    int ret = map_new("dtype=", out, e);

    if (ret == 0)
        (*out)->cast = to;
    return ret;
}

void map_free(struct map *m)
{
    if (!m)
        return;
    arena_free(m->arena);
    free(m);
}

void map_freep(struct map **m)
{
    map_free(*m);
}

bool map_wants_config(const struct map *m)
{
    return m->wants_config;
}

bool map_has_cast(const struct map *m)
{
    for (size_t i = 0; i < m->nrule; i++)
        if (m->rule[i].cast)
            return true;
    return m->cast != DTYPE_NONE;
}
