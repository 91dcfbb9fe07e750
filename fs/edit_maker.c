/* SPDX-License-Identifier: MIT */
/* fs/edit_maker.c - a process that copies a tree into a directory that it has just made. */
#include <stdio.h>
#include <string.h>

#include "fs/edit_priv.h"

/* A copy goes on from a file to the next one at once; who has paused for so long reads. */
#define COPIES_ON_NS INT64_C(4000000000)

/*
 * cp -r makes the names of a new directory with O_EXCL, and mkdir(2), as it knows that they are
 * not there. What is complete of its copy is published meanwhile, and has views then: to the
 * copying process these would be in the way.
 */

/* The process of a thread; 0: it is gone, or of another pid namespace. */
static pid_t process_of(pid_t tid)
{
    char path[64], line[256];
    int tgid = 0;
    FILE *f;

    if (tid <= 0)
        return 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)tid);
    f = fopen(path, "re");
    while (f && !tgid && fgets(line, sizeof line, f))
        if (sscanf(line, "Tgid: %d", &tgid) != 1)
            tgid = 0;
    if (f)
        fclose(f);
    return tgid;
}

void edit_made(struct request *r, struct disk_node *dir)
{
    struct target *t = target_get(r->fs, dir, true);
    pid_t maker = process_of(fuse_req_ctx(r->req)->pid);

    if (!t)
        return;
    edits_lock(r->fs);
    t->maker = maker;
    t->closed_ns = now_ns();
    edits_unlock(r->fs);
    target_put(r->fs, t);
}

/* With the lock. */
static bool was_written(const struct target *t, const char *path)
{
    for (size_t i = 0; i < t->nwritten; i++)
        if (strcmp(t->written[i], path) == 0)
            return true;
    return false;
}

void edit_wrote(struct fs *fs, struct target *t, const char *path)
{
    char *copy = strdup(path);

    edits_lock(fs);
    if (copy && t->maker && !was_written(t, path)) {
        if (t->nwritten == t->written_cap) {
            size_t cap = t->written_cap ? 2 * t->written_cap : 32;
            char **grown = reallocarray(t->written, cap, sizeof *grown);

            if (grown) {
                t->written = grown;
                t->written_cap = cap;
            }
        }
        if (t->nwritten < t->written_cap)
            t->written[t->nwritten++] = steal(&copy);
    }
    edits_unlock(fs);
    free(copy);
}

bool edit_is_maker(struct request *r, struct disk_node *dir)
{
    struct target *t = target_get(r->fs, dir, false);
    pid_t maker = 0;

    if (t) {
        edits_lock(r->fs);
        maker = t->maker;
        edits_unlock(r->fs);
    }
    target_put(r->fs, t);
    return maker && process_of(fuse_req_ctx(r->req)->pid) == maker;
}

bool edit_is_absent(struct request *r, struct disk_node *dir, const char *path)
{
    struct target *t = target_get(r->fs, dir, false);
    bool absent = false, paused = false;

    if (t) {
        edits_lock(r->fs);
        absent = t->maker && !was_written(t, path);
        paused = now_ns() - t->closed_ns > COPIES_ON_NS;
        edits_unlock(r->fs);
    }
    absent = absent && edit_is_maker(r, dir);
    if (absent && paused)
        edit_settle_maker(r->fs, t);
    target_put(r->fs, t);
    return absent && !paused;
}

void edit_maker_release(struct target *t)
{
    for (size_t i = 0; i < t->nwritten; i++)
        free(t->written[i]);
    free(t->written);
    t->written = NULL;
    t->nwritten = t->written_cap = 0;
    t->maker = 0;
}

void edit_settle_maker(struct fs *fs, struct target *t)
{
    edits_lock(fs);
    edit_maker_release(t);
    edits_unlock(fs);
}

void edit_maker_read(struct request *r, struct disk_node *dir)
{
    struct target *t = target_get(r->fs, dir, false);
    pid_t maker;

    if (!t)
        return;
    edits_lock(r->fs);
    maker = t->maker;
    edits_unlock(r->fs);
    if (maker && process_of(fuse_req_ctx(r->req)->pid) == maker)
        edit_settle_maker(r->fs, t);
    target_put(r->fs, t);
}
