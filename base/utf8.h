/* SPDX-License-Identifier: MIT */
/* base/utf8.h - which bytes are well-formed UTF-8, and text made safe for a terminal. */
#ifndef UFS_BASE_UTF8_H
#define UFS_BASE_UTF8_H

#include "base/base.h"

/*
 * Length of the well-formed character (RFC 3629: no overlong form, no surrogate, nothing
 * past U+10FFFF) at the start of s[0..len), or 0 when there is none.
 */
size_t utf8_char(const void *s, size_t len);

/*
 * Copies text to dst on one line: control bytes (C0, DEL, C1), line and paragraph
 * separators and invalid UTF-8 become %XX. What does not fit is cut between characters;
 * always ends in NUL. Returns the length written.
 */
size_t text_escape(char *dst, size_t size, const char *text);

#endif
