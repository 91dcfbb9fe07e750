/* SPDX-License-Identifier: MIT */
/* cli/table.h - rows in columns that fit a terminal. */
#ifndef UFS_CLI_TABLE_H
#define UFS_CLI_TABLE_H

#include "cli/screen.h"

struct column {
    const char *title;
    int width; /* of its widest cell; table_fit() makes room for the title */
    int rank; /* where it is too narrow: 0 stays, of the others the highest goes first */
    bool right; /* numbers */
    bool cut;   /* may lose the middle of long cells */
    enum style style;
    bool hidden; /* table_fit() */
};

struct table {
    const struct screen *screen;
    struct column *column;
    size_t n;
    int gap; /* spaces that are due before the next cell of the row */
};

/* Widens the column to what this text takes. */
void column_see(const struct screen *s, struct column *c, const char *text, size_t len);

/* Chooses what is shown, and how wide, within the screen's columns. */
void table_fit(struct table *t);
void table_head(struct table *t);

/* Cells of a row, from the first column to the last; then its end. */
void table_cell(struct table *t, size_t column, const char *text, size_t len);
void table_cellf(struct table *t, size_t column, const char *fmt, ...) PRINTF(3, 4);
/* What draws by itself: space for a cell that it fills. False: it is not shown. */
bool table_cell_begin(struct table *t, size_t column);
void table_row_end(struct table *t);

/* Below a row, indented: a word in the style, and the reason, on as many lines as it takes. */
void table_note(const struct table *t, enum style style, const char *word,
                const char *why);

#endif
