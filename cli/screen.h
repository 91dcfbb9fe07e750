/* SPDX-License-Identifier: MIT */
/* cli/screen.h - what a terminal can show, and text that is safe and fits there. */
#ifndef UFS_CLI_SCREEN_H
#define UFS_CLI_SCREEN_H

#include <stdio.h>

#include "base/base.h"

/* --color */
enum colour_choice {
    COLOUR_AUTO,   /* on a terminal, unless NO_COLOR is set or TERM is dumb */
    COLOUR_ALWAYS, /* as on a terminal, into a pipe too: for `less -R` */
    COLOUR_NEVER
};

/* Where a stream leads. All zero: a file or a pipe, which programs read. */
struct screen {
    bool people; /* rows are fitted to `columns`, sizes are short, there is a head */
    bool colour;
    bool utf8; /* by LC_ALL, LC_CTYPE or LANG; else what we draw is ASCII */
    int columns;
};

/* "auto", "always", "never" */
bool colour_choice_parse(const char *text, enum colour_choice *out);

/* Of STDOUT_FILENO or STDERR_FILENO. COLUMNS goes before what the terminal says. */
void screen_open(struct screen *s, int fd, enum colour_choice choice);
/* Looks again how wide it is. */
void screen_resize(struct screen *s, int fd);

enum style {
    STYLE_NONE,
    STYLE_HEAD,
    STYLE_FAINT,
    STYLE_TYPE,
    STYLE_SIZE,
    STYLE_GOOD,
    STYLE_WARNING,
    STYLE_BAD
};
/* Starts a style (STYLE_NONE: ends them), where there are colours. */
void screen_style(const struct screen *s, FILE *f, enum style style);

/*
 * Prints strangers' text: control characters, those that turn or join text invisibly,
 * invalid UTF-8 and (where the locale is not UTF-8) all that is not ASCII become %XX.
 * Returns the columns that it takes.
 */
int screen_text(const struct screen *s, FILE *f, const char *text, size_t len);
/* The same columns, nothing printed. */
int screen_width(const struct screen *s, const char *text, size_t len);

/*
 * At most `width` columns: what is too long loses its middle, as names differ at their ends.
 */
int screen_text_cut(const struct screen *s, FILE *f, const char *text, size_t len,
                    int width);

/* Text that is broken between items of a list, between words, or in a word longer than a line. */
struct wrapping {
    const struct screen *screen;
    int indent; /* of all lines but the first */
    int at;     /* column that the next character goes to */
    bool space; /* one is due before the next word, if that stays on the line */
};
void wrap_words(struct wrapping *w, const char *text, size_t len);

#endif
