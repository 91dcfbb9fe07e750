/* SPDX-License-Identifier: MIT */
/* cli/diff_report.c - rows of `unshard diff`. */
#include "cli/diff_report.h"

#include <string.h>

static const char *const state_word[PAIR_STATES] = {
    [PAIR_IDENTICAL] = "identical", [PAIR_EQUAL] = "equal",
    [PAIR_DIFFERS] = "differs",     [PAIR_ONLY_A] = "only-a",
    [PAIR_ONLY_B] = "only-b",       [PAIR_DTYPE] = "dtype",
    [PAIR_SHAPE] = "shape",         [PAIR_DAMAGED] = "damaged",
};

/* Flat index of an element as one along each dimension of the shape's text. */
static void print_index(const char *shape, uint64_t index)
{
    uint64_t dim[SHAPE_MAX_DIMS], at[SHAPE_MAX_DIMS];
    unsigned n = 0;

    for (const char *p = strpbrk(shape, "0123456789"); p && n < SHAPE_MAX_DIMS;
         p = strpbrk(p, "0123456789")) {
        char *end;

        dim[n++] = strtoull(p, &end, 10);
        p = end;
    }
    for (unsigned k = n; k-- > 0; index /= MAX(dim[k], 1u))
        at[k] = index % MAX(dim[k], 1u);
    putchar('[');
    for (unsigned k = 0; k < n; k++)
        printf("%s%" PRIu64, k ? ", " : "", at[k]);
    putchar(']');
}

/* The first element that decided, as both sides have it. */
static void first_values(const struct pair_result *p, char a[96], char b[96])
{
    const struct element_diff *d = p->diff;
    unsigned k = p->pair->a->dtype == DTYPE_F4 ? (unsigned)(d->first % 2) : 0;

    element_text(p->pair->a->dtype, d->first_a, k, a);
    element_text(p->pair->b->dtype, d->first_b, k, b);
}

static bool is_bytes(const struct listed_tensor *t)
{
    struct element_decoder d;

    return !element_decoder_init(&d, t->dtype);
}

/* ---- for people ---- */

static void text_numbers(const struct pair_result *p)
{
    const struct element_diff *d = p->diff;
    bool differs = p->state == PAIR_DIFFERS;
    const char *what = is_bytes(p->pair->a) ? "bytes" : "elements";
    char a[96], b[96];

    printf(": %" PRIu64 " of %" PRIu64 " %s", differs ? d->outside : d->differing,
           d->elements, what);
    if (differs && d->outside != d->differing)
        printf(" beyond the tolerance (%" PRIu64 " differ)", d->differing);
    printf(", max abs %.4g, rel %.4g", d->max_abs, d->max_rel);
    if (d->nonfinite)
        printf(", %" PRIu64 " NaN or Inf against another value", d->nonfinite);
    if (d->first == UINT64_MAX)
        return;
    fputs(", first at ", stdout);
    if (is_bytes(p->pair->a))
        printf("byte %" PRIu64, d->first);
    else
        print_index(p->pair->a->shape, d->first);
    first_values(p, a, b);
    printf(": %s, %s", a, b);
    if (strcmp(a, b) == 0)
        fputs(" in other bits", stdout);
}

/* Eleven characters, and a colour for those who have one: red what is there and differs. */
static void text_state(const struct diff_report *r, const char *word, bool red)
{
    screen_style(r->screen, stdout, red ? STYLE_BAD : STYLE_WARNING);
    printf("%-11s", word);
    screen_style(r->screen, stdout, STYLE_NONE);
    fputs("  ", stdout);
}

static void text_pair(const struct diff_report *r, const struct pair_result *p)
{
    static const char *const word[PAIR_STATES] = {
        [PAIR_IDENTICAL] = "identical", [PAIR_EQUAL] = "equal",
        [PAIR_DIFFERS] = "differs",     [PAIR_ONLY_A] = "only in A",
        [PAIR_ONLY_B] = "only in B",    [PAIR_DTYPE] = "other type",
        [PAIR_SHAPE] = "other shape",   [PAIR_DAMAGED] = "damaged",
    };
    const struct listed_tensor *a = p->pair->a, *b = p->pair->b;
    const struct listed_tensor *one = a ? a : b;

    text_state(r, word[p->state], p->state == PAIR_DIFFERS || p->state == PAIR_DAMAGED);
    if (a && b)
        out_text(stdout, p->pair->name, p->pair->name_len, 0);
    else
        out_text(stdout, one->key, one->key_len, 0);
    printf("  %s", dtype_name(one->dtype));
    if (a && b && a->dtype != b->dtype)
        printf(" / %s", dtype_name(b->dtype));
    printf(" %s", one->shape);
    if (p->state == PAIR_SHAPE)
        printf(" / %s", b->shape);
    if (p->diff)
        text_numbers(p);
    if (p->damage) {
        fputs(": ", stdout);
        out_text(stdout, p->damage, strlen(p->damage), 0);
    }
    putchar('\n');
}

/* ---- as JSON ---- */

static void json_text(const char *name, const char *text, size_t len)
{
    printf(", \"%s\": ", name);
    out_json(stdout, text, len);
}

static void json_side(const char *side, const struct listed_tensor *t)
{
    char name[16];

    if (!t)
        return;
    snprintf(name, sizeof name, "key_%s", side);
    json_text(name, t->key, t->key_len);
    printf(", \"dtype_%s\": \"%s\", \"shape_%s\": %s", side, dtype_name(t->dtype), side,
           t->shape);
}

static void json_numbers(const struct pair_result *p)
{
    const struct element_diff *d = p->diff;
    char a[96], b[96];

    printf(", \"elements\": %" PRIu64 ", \"differing\": %" PRIu64
           ", \"outside\": %" PRIu64 ", \"nonfinite\": %" PRIu64,
           d->elements, d->differing, d->outside, d->nonfinite);
    out_json_number("max_abs", d->max_abs);
    out_json_number("max_rel", d->max_rel);
    if (d->first == UINT64_MAX)
        return;
    printf(", \"first\": %" PRIu64, d->first);
    if (!is_bytes(p->pair->a)) {
        fputs(", \"first_at\": ", stdout);
        print_index(p->pair->a->shape, d->first);
    }
    first_values(p, a, b);
    json_text("value_a", a, strlen(a));
    json_text("value_b", b, strlen(b));
}

static void json_pair(struct diff_report *r, const struct pair_result *p)
{
    printf("%s\n    {\"state\": \"%s\"", r->shown++ ? "," : "", state_word[p->state]);
    json_text("name", p->pair->name, p->pair->name_len);
    json_side("a", p->pair->a);
    json_side("b", p->pair->b);
    if (p->diff)
        json_numbers(p);
    if (p->damage)
        json_text("damage", p->damage, strlen(p->damage));
    putchar('}');
}

/* ---- the report ---- */

void report_begin(const struct diff_report *r, const char *a, const char *b)
{
    if (!r->json)
        return;
    fputs("{\"schema\": 1, \"a\": ", stdout);
    out_json(stdout, a, strlen(a));
    fputs(", \"b\": ", stdout);
    out_json(stdout, b, strlen(b));
    fputs(", \"tensors\": [", stdout);
}

void report_pair(struct diff_report *r, const struct pair_result *p)
{
    r->pairs[p->state]++;
    if (p->state == PAIR_IDENTICAL)
        return;
    if (r->json)
        json_pair(r, p);
    else if (p->state != PAIR_EQUAL || r->verbose)
        text_pair(r, p);
}

void report_objects_begin(struct diff_report *r)
{
    if (r->json)
        fputs("\n], \"objects\": [", stdout);
    r->shown = 0;
}

void report_object(struct diff_report *r, enum object_state state, const char *key,
                   size_t key_len)
{
    static const char *const json[OBJECT_STATES] = {"only-a", "only-b", "differs"};
    static const char *const text[OBJECT_STATES] = {"only in A", "only in B",
                                                    "differs"};

    if (r->json) {
        printf("%s\n    {\"state\": \"%s\"", r->shown++ ? "," : "", json[state]);
        json_text("key", key, key_len);
        putchar('}');
        return;
    }
    text_state(r, text[state], state == OBJECT_DIFFERS);
    fputs("object ", stdout);
    out_text(stdout, key, key_len, 0);
    putchar('\n');
}

static void json_end(const struct diff_report *r)
{
    fputs("\n], \"totals\": {", stdout);
    for (int i = 0; i < PAIR_STATES; i++)
        printf("%s\"%s\": %" PRIu64, i ? ", " : "", state_word[i], r->pairs[i]);
    if (r->with_objects)
        printf(", \"objects-equal\": %" PRIu64 ", \"objects-only-a\": %" PRIu64
               ", \"objects-only-b\": %" PRIu64 ", \"objects-differ\": %" PRIu64,
               r->objects.equal, r->objects.other[OBJECT_ONLY_A],
               r->objects.other[OBJECT_ONLY_B], r->objects.other[OBJECT_DIFFERS]);
    fputs("}}\n", stdout);
}

/* "2 differ, 1 only in A": those that are not 0. */
static void text_counts(const uint64_t *count, const char *const *word, int n)
{
    for (int i = 0; i < n; i++)
        if (word[i] && count[i])
            printf(", %" PRIu64 " %s", count[i], word[i]);
}

static void text_end(const struct diff_report *r)
{
    static const char *const pairs[PAIR_STATES] = {
        [PAIR_DIFFERS] = "differ",         [PAIR_ONLY_A] = "only in A",
        [PAIR_ONLY_B] = "only in B",       [PAIR_DTYPE] = "of another type",
        [PAIR_SHAPE] = "of another shape", [PAIR_DAMAGED] = "damaged",
    };
    static const char *const objects[OBJECT_STATES] = {"only in A", "only in B",
                                                       "differ"};

    printf("%" PRIu64 " tensors identical", r->pairs[PAIR_IDENTICAL]);
    if (r->pairs[PAIR_EQUAL])
        printf(", %" PRIu64 " equal %s", r->pairs[PAIR_EQUAL],
               r->tolerance ? "within the tolerance" : "by value");
    text_counts(r->pairs, pairs, PAIR_STATES);
    if (r->with_objects) {
        printf("; %" PRIu64 " objects equal", r->objects.equal);
        text_counts(r->objects.other, objects, OBJECT_STATES);
    }
    putchar('\n');
}

void report_end(const struct diff_report *r)
{
    if (r->json)
        json_end(r);
    else if (!r->quiet)
        text_end(r);
}

bool report_differs(const struct diff_report *r)
{
    bool differs = false;

    for (int i = PAIR_EQUAL + 1; i < PAIR_STATES; i++)
        differs |= r->pairs[i] != 0;
    for (int i = 0; i < OBJECT_STATES; i++)
        differs |= r->objects.other[i] != 0;
    return differs;
}
