/* SPDX-License-Identifier: MIT */
/* index/formats/step.c - a step, and a save that goes on, by a directory's name. */
#include "index/formats/step.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "remote/listing.h"

enum { MAX_DIGITS = 18 }; /* what an int64_t holds */

/* Does name[0..len) end in one of the words that stand before a step? */
static bool ends_in_word(const char *name, size_t len)
{
    static const char *const words[] = {"step", "steps", "iter", "iteration",
                                        "checkpoint"};

    for (size_t i = 0; i < ARRAY_SIZE(words); i++) {
        size_t n = strlen(words[i]);

        if (len >= n && strncasecmp(name + len - n, words[i], n) == 0 &&
            (len == n || !isalpha((unsigned char)name[len - n - 1])))
            return true;
    }
    return false;
}

bool step_of_name(const char *name, int64_t *step)
{
    size_t len = strlen(name), digits = len;

    while (digits > 0 && isdigit((unsigned char)name[digits - 1]))
        digits--;
    if (digits == len || len - digits > MAX_DIGITS)
        return false;
    *step = strtoll(name + digits, NULL, 10);
    if (digits > 0 && (name[digits - 1] == '-' || name[digits - 1] == '_'))
        digits--;
    return ends_in_word(name, digits);
}

bool step_is_temporary(const struct listing *l)
{
    static const char mark[] = ".orbax-checkpoint-tmp", ours[] = ".unshard-staging-";

    return strstr(listing_path(l), ours) || strstr(listing_name(l), ours) ||
           strstr(listing_path(l), mark) || strstr(listing_name(l), mark) ||
           (strncmp(listing_name(l), "tmp_", 4) == 0 &&
            listing_find(l, "metadata.pkl"));
}
