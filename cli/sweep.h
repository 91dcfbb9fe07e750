/* SPDX-License-Identifier: MIT */
/* cli/sweep.h - goes over many tensors in windows, on all cores, in bounded memory. */
#ifndef UFS_CLI_SWEEP_H
#define UFS_CLI_SWEEP_H

#include "cli/cli.h"

enum {
    SWEEP_WINDOW = 512 << 10, /* bytes that are read at a time */
    /* Items that are open at once, one after the other: number modulo this is a place. */
    SWEEP_OPEN = 128,
};

/* A piece of one item: storage units [first, first + units). */
struct sweep_piece {
    size_t item;
    uint64_t first, units;
};

/*
 * What is done with `items` items, whose numbers the callbacks get. open and piece run on
 * any thread, several at once, but open of an item before its pieces; the others run on the
 * caller's, in order of items and of pieces inside each. What goes wrong with an item is
 * the callbacks' to keep: the sweep goes on.
 */
struct sweep {
    struct pool *pool;
    struct progress *progress;
    size_t items;
    unsigned slots; /* pieces at a time: sweep_slots() */
    void *user;

    /* Makes an item ready and tells its storage units, and bytes of one (the largest). */
    void (*open)(void *user, size_t item, uint64_t *units, unsigned *unit);
    /* Works on a piece and leaves what it found in `slot`, of which there are `slots`. */
    void (*piece)(void *user, const struct sweep_piece *p, unsigned slot);
    /* Adds what is in the slot to the item. */
    void (*merge)(void *user, const struct sweep_piece *p, unsigned slot);
    /* All pieces are merged. */
    void (*close)(void *user, size_t item);
};

/* How many slots keep this pool busy. */
unsigned sweep_slots(const struct pool *pool);

int sweep_run(struct sweep *s, struct err *e);

#endif
