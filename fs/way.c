/* SPDX-License-Identifier: MIT */
/* fs/way.c - the way in which each open inode is read. */
#include "fs/way.h"

#include "fs/fs.h"
#include "fs/passthrough.h"

void ways_init(struct ways *w)
{
    pthread_mutex_init(&w->lock, NULL);
}

void ways_destroy(struct ways *w)
{
    pthread_mutex_destroy(&w->lock);
}

/* Where the inode is linked in, or the end of its bucket. Locked. */
static struct way **find(struct ways *w, uint64_t ino, uint64_t generation)
{
    uint64_t hash = (ino ^ ino >> 32) * 0x9e3779b97f4a7c15;
    struct way **at = &w->bucket[(hash >> 32) % WAY_BUCKETS];

    while (*at && ((*at)->ino != ino || (*at)->generation != generation))
        at = &(*at)->next;
    return at;
}

bool way_is_server(struct fs *fs, uint64_t ino, uint64_t generation)
{
    const struct way *way;
    bool is;

    pthread_mutex_lock(&fs->ways.lock);
    way = *find(&fs->ways, ino, generation);
    is = way && !way->backing;
    pthread_mutex_unlock(&fs->ways.lock);
    return is;
}

/* The first handle. Locked: registering waits for nothing. */
static struct way *way_new(struct fs *fs, uint64_t ino, uint64_t generation, int fd)
{
    struct way *way = calloc(1, sizeof *way);

    if (!way)
        return NULL;
    way->ino = ino;
    way->generation = generation;
    way->backing = passthrough_open(fs, fd);
    *find(&fs->ways, ino, generation) = way;
    return way;
}

struct way *way_open(struct fs *fs, uint64_t ino, uint64_t generation, int fd)
{
    struct way *way;

    pthread_mutex_lock(&fs->ways.lock);
    way = *find(&fs->ways, ino, generation);
    if (!way)
        way = way_new(fs, ino, generation, fd);
    if (way)
        way->handles++;
    pthread_mutex_unlock(&fs->ways.lock);
    return way;
}

void way_close(struct fs *fs, struct way *way)
{
    if (!way)
        return;
    pthread_mutex_lock(&fs->ways.lock);
    if (--way->handles > 0) {
        way = NULL;
    } else {
        *find(&fs->ways, way->ino, way->generation) = way->next;
        passthrough_close(fs, way->backing);
    }
    pthread_mutex_unlock(&fs->ways.lock);
    free(way);
}
