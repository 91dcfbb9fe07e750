/* SPDX-License-Identifier: MIT */
/* index/formats/step.c - a step, and a save that goes on, by a directory's name. */
#include "index/formats/step.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "remote/listing.h"

enum { MAX_DIGITS = 18 }; /* what an int64_t holds */

/* Does name[0..len) end in this word? */
static bool ends_in(const char *name, size_t len, const char *word)
{
    size_t n = strlen(word);

    return len >= n && strncasecmp(name + len - n, word, n) == 0 &&
           (len == n || !isalpha((unsigned char)name[len - n - 1]));
}

/* Does name[0..len) end in one of the words that stand before a step? */
static bool ends_in_word(const char *name, size_t len)
{
    static const char *const words[] = {"step",       "steps",     "iter", "iteration",
                                        "checkpoint", "globalstep" /* AReaL */};

    for (size_t i = 0; i < ARRAY_SIZE(words); i++)
        if (ends_in(name, len, words[i]))
            return true;
    return false;
}

/* What stands before the number at the end of name[0..len), without the dash; 0: nothing. */
static size_t before_number(const char *name, size_t len, size_t *number)
{
    size_t digits = len;

    while (digits > 0 && isdigit((unsigned char)name[digits - 1]))
        digits--;
    if (digits == len || len - digits > MAX_DIGITS)
        return 0;
    *number = digits;
    return digits > 0 && (name[digits - 1] == '-' || name[digits - 1] == '_')
               ? digits - 1
               : digits;
}

bool step_of_name(const char *name, int64_t *step)
{
    size_t number, len = before_number(name, strlen(name), &number);

    if (len == 0)
        return false;
    *step = strtoll(name + number, NULL, 10);
    return ends_in_word(name, len);
}

static const char ours[] = ".unshard-staging-";

bool step_is_ours(const struct listing *l)
{
    return strstr(listing_path(l), ours) || strstr(listing_name(l), ours);
}

bool step_is_temporary(const struct listing *l)
{
    static const char mark[] = ".orbax-checkpoint-tmp";
    static const char partial[] = ".partial_save"; /* Orbax's, before its finalize() */

    return strstr(listing_path(l), partial) || strstr(listing_name(l), partial) ||
           step_is_ours(l) || strstr(listing_path(l), mark) ||
           strstr(listing_name(l), mark) ||
           (strncmp(listing_name(l), "tmp_", 4) == 0 &&
            listing_find(l, "metadata.pkl"));
}
