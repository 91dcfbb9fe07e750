/* SPDX-License-Identifier: MIT */
/* remote/ring.h - a doubly linked list without memory of its own. */
#ifndef UFS_REMOTE_RING_H
#define UFS_REMOTE_RING_H

/* Members embed one; the list is one too, between its last and its first member. */
struct ring {
    struct ring *next, *prev;
};

static inline void ring_init(struct ring *r)
{
    r->next = r->prev = r;
}

/* Puts `item` at the end of `list`. */
static inline void ring_append(struct ring *list, struct ring *item)
{
    item->prev = list->prev;
    item->next = list;
    list->prev->next = item;
    list->prev = item;
}

/* Takes it out; it is a list of its own then. */
static inline void ring_remove(struct ring *item)
{
    item->prev->next = item->next;
    item->next->prev = item->prev;
    ring_init(item);
}

#endif
