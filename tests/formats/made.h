/* SPDX-License-Identifier: MIT */
/* tests/formats/made.h - checkpoints that a test makes up, in a folder of its own. */
#ifndef UFS_TESTS_FORMATS_MADE_H
#define UFS_TESTS_FORMATS_MADE_H

#include "fixture.h"

struct CMUnitTest;

struct made {
    char dir[64];
};

/* /tmp/made-XXXXXX/NAME: the name of a checkpoint's folder can matter. */
void made_begin(struct made *m, const char *name);
void made_end(const struct made *m);

/* Files below, in directories that are made as well. */
void made_file(const struct made *m, const char *path, const void *data, size_t len);
void made_text(const struct made *m, const char *path, const char *text);
void made_copy(const struct made *m, const char *path, const char *from);

/* The same from below the folder of fixtures, which is a test's state. */
void made_from(const struct made *m, const char *path, void *const *state,
               const char *name);

/* A safetensors file: its header as JSON, and `n` floats start, start + 1, ... */
void made_safetensors(const struct made *m, const char *path, const char *header,
                      float start, size_t n);

void made_open(const struct made *m, struct opened *o);

/* The tensor holds exactly these floats. */
void check_floats(struct opened *o, const char *key, const float *want, size_t n);

/* The tensor is listed, says why, and cannot be read. */
void check_fault(struct opened *o, const char *key, const char *why);

/* All warnings, as lines. */
void check_warnings(struct opened *o, const char *want);

#endif
