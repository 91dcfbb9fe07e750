/* SPDX-License-Identifier: MIT */
/* index/formats/jax_role.c - roles of tensors by the names that JAX programs give them. */
#include "index/formats/jax_role.h"

#include <string.h>

#include "index/names.h"

enum { BEGIN = 256 }; /* bytes of a key that hold the parts which decide */

/* Does the dotted key begin with this part? */
static bool begins(const char *key, size_t len, const char *word)
{
    size_t n = strlen(word);

    return len >= n && memcmp(key, word, n) == 0 && (len == n || key[n] == '.');
}

enum role jax_role(const char *part, const char *key, size_t len)
{
    static const char state[] = "state.";
    char dotted[BEGIN];
    size_t n = MIN(len, sizeof dotted), skip;

    for (size_t i = 0; i < n; i++)
        dotted[i] = (char)(key[i] == '/' ? '.' : key[i]);
    skip = begins(dotted, n, "state") && n >= sizeof state - 1 ? sizeof state - 1 : 0;
    if (begins(dotted + skip, n - skip, "opt_state"))
        return ROLE_OPTIMIZER;
    if (begins(dotted + skip, n - skip, "training_key"))
        return ROLE_OTHER;
    return role_of(part, dotted, n);
}
