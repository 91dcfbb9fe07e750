/* SPDX-License-Identifier: MIT */
/* remote/mounted_on.c - has the file system that a directory lies on been unmounted? */
#include "remote/mounted_on.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

static const char table_path[] = "/proc/self/mountinfo";

/* 0: the kernel does not say (before 5.8). */
static uint64_t mount_of(int dir)
{
    struct statx st;

    return statx(dir, "", AT_EMPTY_PATH, STATX_MNT_ID, &st) == 0 &&
                   (st.stx_mask & STATX_MNT_ID)
               ? st.stx_mnt_id
               : 0;
}

/* The number of the mount below this one; false: the table has it not. */
static bool find(uint64_t id, uint64_t *parent)
{
    CLEANUP_FREE char *line = NULL;
    FILE *f = fopen(table_path, "re");
    uint64_t there = 0;
    size_t room = 0;

    if (!f)
        return true; /* nothing is known */
    while (there != id && getline(&line, &room, f) > 0)
        if (sscanf(line, "%" SCNu64 " %" SCNu64, &there, parent) != 2)
            there = 0;
    fclose(f);
    return there == id;
}

void mounted_on_init(struct mounted_on *m, int dir)
{
    *m = (struct mounted_on){.table = -1, .id = mount_of(dir)};
    if (m->id && find(m->id, &m->parent))
        m->table = open(table_path, O_RDONLY | O_CLOEXEC);
}

void mounted_on_release(struct mounted_on *m)
{
    if (m->table >= 0)
        close(m->table);
    m->table = -1;
}

bool mounted_on_changed(const struct mounted_on *m)
{
    struct pollfd p = {.fd = m->table, .events = POLLPRI};

    return m->table >= 0 && poll(&p, 1, 0) > 0 && (p.revents & (POLLPRI | POLLERR));
}

bool mounted_on_lasts(const struct mounted_on *m)
{
    uint64_t parent;

    return find(m->id, &parent);
}

bool mounted_on_move(struct mounted_on *m, int dir)
{
    uint64_t id = mount_of(dir);

    if (id == m->parent)
        return false;
    m->id = id;
    find(id, &m->parent);
    return true;
}
