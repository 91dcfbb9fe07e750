/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_pattern.c - patterns on the names of parameters. */
#include "index/formats/deepspeed/deepspeed_pattern.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/key_text.h"

enum { MAX_LEN = 512 /* the longest that is known has some 90 */ };

enum atom { ATOM_CHAR, ATOM_ANY, ATOM_DIGIT };
enum times { ONCE, OPTIONAL, MANY /* or none */ };

struct ds_pattern_step {
    uint8_t atom, times;
    char c;
};

/* ---- taking apart ---- */

static int refuse(const char *text, size_t len, const char *what, struct err *e)
{
    char shown[120];

    key_text(shown, sizeof shown, text, len);
    return err_set(e, ENOTSUP, "the pattern \"%s\": %s is not supported", shown, what);
}

/* One character, "." or "\d"; NULL: good, else what it is. */
static const char *take_atom(const char **p, const char *end,
                             struct ds_pattern_step *out)
{
    char c = *(*p)++;

    *out = (struct ds_pattern_step){.atom = ATOM_CHAR, .c = c};
    if ((unsigned char)c < ' ' || (unsigned char)c > '~')
        return "a character that is not ASCII";
    if (c == '.')
        out->atom = ATOM_ANY;
    if (strchr("[](){}|^$+*?", c))
        return "what is no plain character, \".\" or \"\\d\"";
    if (c != '\\')
        return NULL;
    if (*p == end)
        return "a backslash at the end";
    out->c = c = *(*p)++;
    if (c == 'd')
        out->atom = ATOM_DIGIT;
    else if (isalnum((unsigned char)c) || (unsigned char)c < ' ' ||
             (unsigned char)c > '~')
        return "an escape other than \"\\d\"";
    return NULL;
}

/* How often; "x+" becomes x and x*. */
static const char *take_times(const char **p, const char *end,
                              struct ds_pattern_step *step, uint32_t *n)
{
    char c = *p < end ? **p : '\0';

    if (c != '+' && c != '*' && c != '?')
        return NULL;
    ++*p;
    if (c == '+') {
        step[1] = step[0];
        ++*n;
        step++;
    }
    step->times = c == '?' ? OPTIONAL : MANY;
    if (*p < end && strchr("+*?", **p))
        return "a repetition of a repetition";
    return NULL;
}

static int take_exact(struct arena *a, struct ds_pattern *p, struct err *e)
{
    char *name;

    p->exact = p->to_end;
    for (uint32_t i = 0; i < p->nsteps; i++)
        p->exact &= p->step[i].atom == ATOM_CHAR && p->step[i].times == ONCE;
    if (!p->exact)
        return 0;
    name = arena_alloc(a, (size_t)p->nsteps + 1);
    if (!name)
        return err_nomem(e);
    for (uint32_t i = 0; i < p->nsteps; i++)
        name[i] = p->step[i].c;
    name[p->nsteps] = '\0';
    p->name = name;
    return 0;
}

int ds_pattern_parse(struct arena *a, const char *text, size_t len,
                     struct ds_pattern *out, struct err *e)
{
    const char *p = text, *end = text + len, *what = NULL;

    *out = (struct ds_pattern){.text = text, .len = len};
    if (len > MAX_LEN)
        return refuse(text, len, "that length", e);
    out->step = arena_array(a, 2 * len + 1, sizeof *out->step);
    if (!out->step)
        return err_nomem(e);
    if (p < end && *p == '^')
        p++;
    while (p < end && !what) {
        if (*p == '$' && p + 1 == end) {
            out->to_end = true;
            break;
        }
        what = take_atom(&p, end, &out->step[out->nsteps]);
        if (!what)
            what = take_times(&p, end, &out->step[out->nsteps], &out->nsteps);
        out->nsteps++;
    }
    return what ? refuse(text, len, what, e) : take_exact(a, out, e);
}

/* ---- matching ---- */

static bool takes(const struct ds_pattern_step *s, char c)
{
    switch ((enum atom)s->atom) {
    case ATOM_ANY:
        return true;
    case ATOM_DIGIT:
        return c >= '0' && c <= '9';
    case ATOM_CHAR:
        break;
    }
    return c == s->c;
}

/* Steps that need not be taken are passed by. */
static void pass_by(const struct ds_pattern *p, bool *at)
{
    for (uint32_t i = 0; i < p->nsteps; i++)
        if (at[i] && p->step[i].times != ONCE)
            at[i + 1] = true;
}

/*
 * All places of the pattern that the name so far can have led to, at once: no way back is
 * ever needed, and the time is bounded by the product of the lengths.
 */
static bool run(const struct ds_pattern *p, const char *name, size_t len,
                uint64_t *effort)
{
    bool at[2][2 * MAX_LEN + 2] = {{true}};
    bool *now = at[0], *next = at[1];

    pass_by(p, now);
    for (size_t i = 0; i < len && (p->to_end || !now[p->nsteps]); i++) {
        bool any = false, *was = now;

        *effort += p->nsteps + 1;
        memset(next, 0, p->nsteps + 1);
        for (uint32_t k = 0; k < p->nsteps; k++) {
            if (!now[k] || !takes(&p->step[k], name[i]))
                continue;
            next[p->step[k].times == MANY ? k : k + 1] = true;
            any = true;
        }
        if (!any)
            return false;
        pass_by(p, next);
        now = next;
        next = was;
    }
    return now[p->nsteps];
}

bool ds_pattern_matches(struct ds_pattern *p, const char *name, size_t name_len,
                        uint64_t *effort)
{
    bool is = p->exact ? name_len == p->nsteps && memcmp(name, p->name, name_len) == 0
                       : run(p, name, name_len, effort);

    ++*effort;
    p->used |= is;
    return is;
}

/* ---- many of them ---- */

static int compare_text(const char *a, size_t na, const char *b, size_t nb)
{
    int order = memcmp(a, b, MIN(na, nb));

    return order ? order : (na > nb) - (na < nb);
}

static int compare(const void *a, const void *b)
{
    const struct ds_pattern *x = a, *y = b;

    if (x->exact != y->exact)
        return x->exact ? -1 : 1;
    return x->exact ? compare_text(x->name, x->nsteps, y->name, y->nsteps) : 0;
}

void ds_patterns_begin(struct ds_patterns *s)
{
    if (s->count > 0)
        qsort(s->pattern, s->count, sizeof *s->pattern, compare);
    for (s->exact = 0; s->exact < s->count && s->pattern[s->exact].exact;)
        s->exact++;
}

/* The first exact one that is not before the name. */
static size_t lower_bound(const struct ds_patterns *s, const char *name, size_t len)
{
    size_t lo = 0, hi = s->exact;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct ds_pattern *p = &s->pattern[mid];

        if (compare_text(p->name, p->nsteps, name, len) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

unsigned ds_patterns_find(struct ds_patterns *s, const char *name, size_t len,
                          uint64_t *effort, struct ds_pattern **first)
{
    unsigned found = 0;

    *first = NULL;
    for (size_t i = lower_bound(s, name, len); i < s->count && found < 2;) {
        struct ds_pattern *p = &s->pattern[i];
        bool is = ds_pattern_matches(p, name, len, effort);

        if (is && found++ == 0)
            *first = p;
        /* Exact ones of a name are neighbours; behind them come those that are not. */
        i = is || i >= s->exact ? i + 1 : s->exact;
    }
    return found;
}
