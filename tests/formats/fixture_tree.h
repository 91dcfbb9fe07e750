/* SPDX-License-Identifier: MIT */
/* tests/formats/fixture_tree.h - a source of several checkpoints against NAME.expected.json. */
#ifndef UFS_TESTS_FORMATS_FIXTURE_TREE_H
#define UFS_TESTS_FORMATS_FIXTURE_TREE_H

/*
 * A test of cmocka whose state is FOLDER/NAME. Of NAME.expected.json: `tensors`, whose keys
 * are KEY or PATH:KEY as tests/check_mount.py reads them, each found in one checkpoint and
 * no other tensor there; `checkpoints`, by the path of each in the source: format,
 * framework, version, step, topology, roles (tensors of model, optimizer, other), warnings
 * (0), and objects, where null stands for any value.
 */
void test_fixture_tree(void **state);

#endif
