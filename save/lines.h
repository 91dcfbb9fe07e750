/* SPDX-License-Identifier: MIT */
/* save/lines.h - journals as lines of text, each with its checksum. */
#ifndef UFS_SAVE_LINES_H
#define UFS_SAVE_LINES_H

#include "base/base.h"
#include "base/buf.h"

/*
 * "0123456789abcdef TEXT\n": the digits are the XXH3 of TEXT, which has no control bytes.
 * A power loss may leave any part of what was appended last; the first line that is not
 * whole ends a journal.
 */

/* lines_begin(), any number of buf_add…(), lines_end(). */
size_t lines_begin(struct buf *b);
void lines_end(struct buf *b, size_t begin);

/* One line at once. */
void lines_add(struct buf *b, const char *text);

/* " PATH", percent-encoded. */
void lines_add_path(struct buf *b, const char *path);

/* What is left to read: text[at..len) */
struct lines {
    char *text; /* is changed */
    size_t at, len;
};

/* The text of the next line, ended by NUL; or NULL: no whole line follows (at < len: damage). */
char *lines_next(struct lines *l);

/*
 * The next word of a line, and *line behind it; NULL: there is none. Words are separated
 * by one space each.
 */
char *lines_word(char **line);

/* The same as a decimal number, which must be one from its first to its last byte. */
bool lines_number(char **line, uint64_t *out);
bool lines_signed(char **line, int64_t *out);

/* The same decoded, on the heap; NULL: none, or no memory (*nomem). */
char *lines_path(char **line, bool *nomem);

#endif
