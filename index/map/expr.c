/* SPDX-License-Identifier: MIT */
/* index/map/expr.c - evaluates expressions with two stacks: no recursion on input. */
#include "index/map/expr.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "base/err.h"

enum { DEPTH = 64 }; /* values or operators that wait; people write three */

struct machine {
    const char *text, *at;
    expr_lookup *lookup;
    void *user;
    int64_t value[DEPTH];
    char op[DEPTH];
    unsigned values, ops;
};

static bool is_name(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '.';
}

static int malformed(const struct machine *m, struct err *e)
{
    return err_set(e, EINVAL, "\"%s\" is no expression, at \"%.20s\"", m->text, m->at);
}

static int precedence(char op)
{
    return op == '(' ? 0 : op == '+' || op == '-' ? 1 : 2;
}

static int out_of_range(const struct machine *m, struct err *e)
{
    return err_set(e, ERANGE, "\"%s\" passes 2^63", m->text);
}

static int divide(const struct machine *m, char op, int64_t a, int64_t b, int64_t *out,
                  struct err *e)
{
    if (b == 0)
        return err_set(e, ERANGE, "\"%s\" divides by 0", m->text);
    if (a == INT64_MIN && b == -1)
        return out_of_range(m, e);
    if (op == '/' && a % b != 0)
        return err_set(e, ERANGE, "\"%s\" leaves a rest: %" PRId64 " / %" PRId64,
                       m->text, a, b);
    *out = op == '/' ? a / b : a % b;
    return 0;
}

/* Takes the last operator and its two values off the stacks. */
static int reduce(struct machine *m, struct err *e)
{
    char op = m->op[--m->ops];
    int64_t a, b, *out;
    bool wide = false;

    if (m->values < 2)
        return malformed(m, e);
    b = m->value[--m->values];
    out = &m->value[m->values - 1];
    a = *out;
    if (op == '/' || op == '%')
        return divide(m, op, a, b, out, e);
    wide = op == '+'   ? __builtin_add_overflow(a, b, out)
           : op == '-' ? __builtin_sub_overflow(a, b, out)
                       : __builtin_mul_overflow(a, b, out);
    return wide ? out_of_range(m, e) : 0;
}

/* All waiting operators that bind at least as tightly. */
static int reduce_to(struct machine *m, int level, struct err *e)
{
    int ret = 0;

    while (ret == 0 && m->ops > 0 && precedence(m->op[m->ops - 1]) >= level)
        ret = reduce(m, e);
    return ret;
}

static int push_op(struct machine *m, char op, struct err *e)
{
    int ret = op == '(' ? 0 : reduce_to(m, precedence(op), e);

    if (ret < 0)
        return ret;
    if (m->ops == DEPTH)
        return err_set(e, EINVAL, "\"%.100s...\" is too deep", m->text);
    m->op[m->ops++] = op;
    return 0;
}

static int push_value(struct machine *m, int64_t v, struct err *e)
{
    if (m->values == DEPTH)
        return err_set(e, EINVAL, "\"%.100s...\" is too deep", m->text);
    m->value[m->values++] = v;
    return 0;
}

static int take_value(struct machine *m, struct err *e)
{
    const char *start = m->at;
    int64_t v;
    char *end;
    int ret;

    while (is_name(*m->at))
        m->at++;
    if (m->at == start)
        return malformed(m, e);
    if (!isdigit((unsigned char)*start)) {
        ret = m->lookup(m->user, start, (size_t)(m->at - start), &v, e);
        if (ret == -ENOENT && !e->code)
            return err_set(e, ENOENT, "%.*s has no value", (int)(m->at - start), start);
        return ret < 0 ? ret : push_value(m, v, e);
    }
    errno = 0;
    v = strtoll(start, &end, 10);
    if (end != m->at)
        return malformed(m, e);
    return errno ? out_of_range(m, e) : push_value(m, v, e);
}

static int close_bracket(struct machine *m, struct err *e)
{
    TRY(reduce_to(m, 1, e));
    if (m->ops == 0)
        return malformed(m, e);
    m->ops--;
    m->at++;
    return 0;
}

/* One step; `operand` says whether a value is due. 0 at the end of the text. */
static int step(struct machine *m, bool *operand, struct err *e)
{
    char c;
    int ret;

    while (*m->at == ' ')
        m->at++;
    c = *m->at;
    if (!c)
        return 0;
    if (*operand && c == '(') {
        m->at++;
        ret = push_op(m, c, e);
    } else if (*operand) {
        ret = take_value(m, e);
        *operand = false;
    } else if (c == ')') {
        ret = close_bracket(m, e);
    } else if (strchr("+-*/%", c)) {
        m->at++;
        ret = push_op(m, c, e);
        *operand = true;
    } else {
        ret = malformed(m, e);
    }
    return ret < 0 ? ret : 1;
}

int expr_eval(const char *text, expr_lookup *lookup, void *user, int64_t *out,
              struct err *e)
{
    struct machine m = {.text = text, .at = text, .lookup = lookup, .user = user};
    bool operand = true;
    int ret;

    while ((ret = step(&m, &operand, e)) == 1)
        continue;
    if (ret == 0)
        ret = reduce_to(&m, 1, e);
    if (ret < 0)
        return ret;
    if (operand || m.ops != 0 || m.values != 1)
        return malformed(&m, e);
    *out = m.value[0];
    return 0;
}
