/* SPDX-License-Identifier: MIT */
/* tests/formats/edited.h - files of fixtures with bytes of their pickle changed. */
#ifndef UFS_TESTS_FORMATS_EDITED_H
#define UFS_TESTS_FORMATS_EDITED_H

#include "made.h"

enum { EDIT_LAST = -1 };

/* `is` instead of `was`, of any lengths, at the n-th place where that stands. */
struct edit {
    const char *was;
    size_t was_len;
    const char *is;
    size_t is_len;
    int n; /* from 0 on; EDIT_LAST */
};

/* Of two literals, which may have zeros in them; two empty ones: as it is. */
#define EDIT(was, is) EDIT_AT(was, is, 0)
#define EDIT_AT(was, is, n)                                                            \
    {                                                                                  \
        was, sizeof(was) - 1, is, sizeof(is) - 1, n                                    \
    }

/* A fixture with one file edited, and what is said of it. */
struct edited {
    const char *fixture, *file; /* DATA/fixture/file */
    struct edit edit; /* of its data.pkl where the file is one of torch.save, of what
                         says of the weights where it is one of torch.export */
    const char *key;  /* whose fault it is; NULL: the checkpoint is refused;
                                   EDITED_WARNS: there is a warning; EDITED_SOUND: nothing
                                   is said, and all bytes are those of the fixture */
    const char *why;
    const char *as;      /* not NULL: it is put there, and the file stays as it was */
    const char *without; /* not NULL: files with this in their path are lost */
};

extern const char EDITED_WARNS[], EDITED_SOUND[];

/*
 * Opens each of the table and prints all rows that are not as they should be, then fails.
 * Tensors that nothing is wrong with must have the bytes that FIXTURE.expected.json says.
 */
void check_edited(const char *data, const struct edited *table, size_t n);

#endif
