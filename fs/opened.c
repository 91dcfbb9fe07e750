/* SPDX-License-Identifier: MIT */
/* fs/opened.c - all that is open: freed at the end, when the kernel sends no release. */
#include "fs/opened.h"

#include "fs/fs.h"

void opened_init(struct opened_list *l)
{
    pthread_mutex_init(&l->lock, NULL);
    ring_init(&l->ring);
}

void opened_add(struct opened_list *l, struct opened *o)
{
    o->refs = 1;
    pthread_mutex_lock(&l->lock);
    ring_append(&l->ring, &o->ring);
    pthread_mutex_unlock(&l->lock);
}

void opened_get(struct opened *o)
{
    atomic_fetch_add(&o->refs, 1);
}

void opened_put(struct fs *fs, struct opened *o)
{
    if (atomic_fetch_sub(&o->refs, 1) == 1)
        o->free(fs, o);
}

void opened_end(struct fs *fs, struct opened *o)
{
    pthread_mutex_lock(&fs->opened.lock);
    ring_remove(&o->ring);
    pthread_mutex_unlock(&fs->opened.lock);
    opened_put(fs, o);
}

void opened_end_all(struct fs *fs)
{
    while (fs->opened.ring.next != &fs->opened.ring)
        opened_end(fs, container_of(fs->opened.ring.next, struct opened, ring));
    pthread_mutex_destroy(&fs->opened.lock);
}
