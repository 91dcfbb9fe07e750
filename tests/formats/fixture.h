/* SPDX-License-Identifier: MIT */
/* tests/formats/fixture.h - a checkpoint as the index has it, against NAME.expected.json. */
#ifndef UFS_TESTS_FORMATS_FIXTURE_H
#define UFS_TESTS_FORMATS_FIXTURE_H

#include "base/buf.h"
#include "read_tensor.h"

struct CMUnitTest;
struct format_driver;
struct json;

/* A checkpoint that is open and scanned. */
struct opened {
    struct world w;
    struct checkpoint_info info;
    struct tensor_info *t;
    size_t count;
};

/* These fail the test when something is wrong. */
void open_checkpoint(const char *path, struct opened *o);
void close_checkpoint(struct opened *o);
const struct tensor_info *tensor(const struct opened *o, const char *key);

void read_file(const char *path, struct buf *out);
struct json *read_json(const char *path);

/* Equal but for the order of members; integers exactly. */
bool same_json(const struct json *a, const struct json *b);

/*
 * A test of cmocka whose state is FOLDER/NAME: everything that NAME.expected.json says:
 * format and framework ("PyTorch" when it says nothing); each tensor's dtype, shape and
 * bytes, the latter by the mount's way and by the naive one, and no other tensor (those of
 * "inside_objects" are of role other); objects as JSON; the number of warnings (0).
 */
void test_fixture(void **state);

/* dtype, shape and bytes as `want` says, the latter by the mount's way and the naive one. */
void check_tensor(struct opened *o, const struct tensor_info *t,
                  const struct json *want);

/*
 * Every tensor without a fault has dtype, shape and bytes as `tensors` of this expected file
 * says for its key.
 */
void check_readable(struct opened *o, const char *expected);

/* The same by FOLDER/NAME.expected.json, of which the folder is a test's state. */
void check_readable_of(struct opened *o, void *const *state, const char *name);

/* What the driver bids for a folder of the disk. */
int folder_score(const struct format_driver *driver, const char *dir);

/* All objects ("KEY=JSON"), or all warnings ("CODE: TEXT"), as lines of text. */
void all_objects(struct opened *o, struct buf *out);
void all_warnings(struct opened *o, struct buf *out);

/* Runs the fixtures of argv[1], each as the test `fixture`, and `others`, whose state it is. */
int run_with(const char *name, int argc, char **argv, void (*fixture)(void **state),
             const struct CMUnitTest *others, size_t n);

/* Runs the fixtures of argv[1] and `others`, whose state it is. */
int run_with_fixtures(const char *name, int argc, char **argv,
                      const struct CMUnitTest *others, size_t n);

#endif
