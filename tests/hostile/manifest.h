/* SPDX-License-Identifier: MIT */
/* tests/hostile/manifest.h - runs a test over each case of a manifest of hostile input. */
#ifndef UFS_TESTS_HOSTILE_MANIFEST_H
#define UFS_TESTS_HOSTILE_MANIFEST_H

/* One row of a manifest; a test's *state. */
struct row {
    const char *data;           /* the folder of all hostile input */
    const char *file, *verdict; /* relative to it; as the manifest says */
};

/*
 * A test program's main(): DATA is argv[1], the manifest DATA/KIND.json. Behind all cases
 * comes one that looks at what they did and needed together: no file PWNED, at most 64 MiB
 * resident. 2: there was nothing to test, or a file PWNED to begin with.
 */
int manifest_run(int argc, char **argv, const char *kind, void (*test)(void **state));

/* Processor time of this process so far; what a case may take: a second, 5 under a sanitizer. */
double cpu_seconds(void);
double cpu_allowed(void);

#endif
