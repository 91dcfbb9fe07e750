/* SPDX-License-Identifier: MIT */
/* fs/came.h - which bytes of a file that is written have come, and which were refused. */
#ifndef UFS_FS_CAME_H
#define UFS_FS_CAME_H

#include "base/base.h"

/* `lost`, beside errno: a signal ended the writer, and not all may have come. */
enum { CAME_WRITER_KILLED = 1 << 16 };

/*
 * Of one file, whatever its names are: all of them in a stage, and that of the source by which
 * it is still open (fs/over.h). With the lock of stages.
 */
struct came {
    unsigned refs;
    unsigned writers; /* handles that write it as a file of the source itself */
    uint64_t prefix;  /* bytes from the start that were written without a hole */
    bool copied;      /* since it was made of what it covers nothing was written */
    int lost;         /* errno of bytes that the disk refused, or CAME_WRITER_KILLED */
    uint64_t lost_from, lost_to; /* which: until they, or all, are written anew */
};

struct came *came_new(void); /* NULL: no memory */
struct came *came_get(struct came *c);
void came_put(struct came *c); /* NULL is fine */

/* The disk did not take bytes [from, to), of a file of so many bytes (0, UINT64_MAX: who
 * knows which). */
void came_lose(struct came *c, int code, uint64_t from, uint64_t to, uint64_t size);
void came_wrote(struct came *c, uint64_t from, uint64_t to);
void came_cut(struct came *c, uint64_t size);

#endif
