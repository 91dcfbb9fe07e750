/* SPDX-License-Identifier: MIT */
/* cli/table.c - which columns fit, and cells that stand below each other. */
#include "cli/table.h"

#include <stdarg.h>
#include <string.h>

enum {
    GAP = 2,
    CUT_MIN = 16, /* a name that is cut shorter tells nothing */
    CELL_MAX = 64,
    NOTE_INDENT = 4,
};

void column_see(const struct screen *s, struct column *c, const char *text, size_t len)
{
    c->width = MAX(c->width, screen_width(s, text, len));
}

/* A long name keeps two fifths of the line before others are shown beside it. */
static int least_width(const struct table *t, const struct column *c)
{
    return c->cut ? MIN(c->width, MAX((int)CUT_MIN, t->screen->columns * 2 / 5))
                  : c->width;
}

/* The least that all shown columns take. */
static int least_line(const struct table *t)
{
    int width = -GAP;

    for (size_t i = 0; i < t->n; i++)
        if (!t->column[i].hidden)
            width += least_width(t, &t->column[i]) + GAP;
    return width;
}

static bool hide_one(struct table *t)
{
    struct column *least = NULL;

    for (size_t i = 0; i < t->n; i++) {
        struct column *c = &t->column[i];

        if (!c->hidden && c->rank > 0 && (!least || c->rank > least->rank))
            least = c;
    }
    if (least)
        least->hidden = true;
    return least != NULL;
}

void table_fit(struct table *t)
{
    int over = -GAP - t->screen->columns;

    for (size_t i = 0; i < t->n; i++)
        t->column[i].width = MAX(t->column[i].width, (int)strlen(t->column[i].title));
    while (least_line(t) > t->screen->columns && hide_one(t))
        ;
    for (size_t i = 0; i < t->n; i++)
        if (!t->column[i].hidden)
            over += t->column[i].width + GAP;
    for (size_t i = t->n; over > 0 && i-- > 0;) {
        struct column *c = &t->column[i];
        int less = MIN(over, c->width - least_width(t, c));

        if (c->hidden)
            continue;
        c->width -= less;
        over -= less;
    }
}

static void put_spaces(int n)
{
    printf("%*s", n, "");
}

/* The room before a cell of this width, so that none stands behind the last one. */
static void pad_left(struct table *t, const struct column *c, int width)
{
    put_spaces(t->gap + (c->right ? MAX(c->width - width, 0) : 0));
    t->gap = GAP + (c->right ? 0 : MAX(c->width - width, 0));
}

static void put_cell(struct table *t, const struct column *c, enum style style,
                     const char *text, size_t len)
{
    int width = MIN(c->cut ? c->width : INT32_MAX, screen_width(t->screen, text, len));

    pad_left(t, c, width);
    screen_style(t->screen, stdout, style);
    if (c->cut)
        t->gap += width - screen_text_cut(t->screen, stdout, text, len, width);
    else
        screen_text(t->screen, stdout, text, len);
    if (style != STYLE_NONE)
        screen_style(t->screen, stdout, STYLE_NONE);
}

void table_head(struct table *t)
{
    for (size_t i = 0; i < t->n; i++)
        if (!t->column[i].hidden)
            put_cell(t, &t->column[i], STYLE_HEAD, t->column[i].title,
                     strlen(t->column[i].title));
    table_row_end(t);
}

void table_cell(struct table *t, size_t column, const char *text, size_t len)
{
    const struct column *c = &t->column[column];

    if (!c->hidden)
        put_cell(t, c, c->style, text, len);
}

void table_cellf(struct table *t, size_t column, const char *fmt, ...)
{
    char text[CELL_MAX];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    table_cell(t, column, text, strlen(text));
}

bool table_cell_begin(struct table *t, size_t column)
{
    const struct column *c = &t->column[column];

    if (!c->hidden)
        pad_left(t, c, c->width);
    return !c->hidden;
}

void table_row_end(struct table *t)
{
    putchar('\n');
    t->gap = 0;
}

void table_note(const struct table *t, enum style style, const char *word,
                const char *why)
{
    struct wrapping w = {.screen = t->screen, .indent = NOTE_INDENT, .at = NOTE_INDENT};

    put_spaces(NOTE_INDENT);
    screen_style(t->screen, stdout, style);
    wrap_words(&w, word, strlen(word));
    screen_style(t->screen, stdout, STYLE_NONE);
    w.space = true;
    wrap_words(&w, why, strlen(why));
    putchar('\n');
}
