/* SPDX-License-Identifier: MIT */
/* fs/materialized.c - whole copies of tensors and views, for the kernel to read by itself. */
#include "fs/materialized.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/fsutil.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "fs/fill.h"
#include "fs/passthrough.h"
#include "fs/tree.h"
#include "index/catalog.h"
#include "remote/ring.h"

enum {
    BUCKETS = 4096,
    /*
     * A block of the disk. Measured, to open and read 4 KiB, 64 KiB: by the server 190 and
     * 310 us of CPU; to make a copy first 230 and 370; by a copy that is there 70 and 90.
     */
    COPY_MIN = 4096,
    /* The tree of a file's extents takes room on the disk too; short files have none. */
    EXTENTS_SHARE = 256,
    BLOCK = 4096,
    FILES_MIN = 16,
    FILES_SHARE = 4, /* of the descriptors that we may have */
    WAIT_NS = 50000000,
};

/* Which file: the catalog's number of a checkpoint stands for one scan for ever. */
struct materialized_key {
    int64_t checkpoint;
    enum inside kind;
    uint32_t index;
};

struct materialized_file {
    struct ring lru;
    struct materialized_file *next; /* in its bucket */
    struct materialized_key key;
    int fd;
    uint64_t size;   /* of the file */
    uint64_t charge; /* bytes of the disk that are set aside for it */
    uint64_t filled; /* from its start; by the filler */
    unsigned users;  /* handles, and who waits for it */
    bool filling;
    bool broken; /* a part cannot be read: the server's to tell. No file. */
    bool stale;  /* of a scan that is past */
};

struct materialized {
    struct fs *fs;
    uint64_t limit;
    size_t max_files;
    atomic_bool on, stop;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a fill ended, a file was given back */
    /* guarded by lock */
    struct ring lru; /* all copies, least recently used first */
    uint64_t used;
    size_t files;
    unsigned closing;
    struct materialized_file *bucket[BUCKETS];
};

int materialized_new(struct fs *fs, struct materialized **out, struct err *e)
{
    struct materialized *c = calloc(1, sizeof *c);
    pthread_condattr_t monotonic;
    struct rlimit files;

    if (!c)
        return err_nomem(e);
    c->fs = fs;
    c->limit = fs->options.materialize;
    c->max_files = FILES_MIN;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0)
        c->max_files = (size_t)MAX(files.rlim_cur / FILES_SHARE, (rlim_t)FILES_MIN);
    ring_init(&c->lru);
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *out = c;
    return 0;
}

static const char *try_it(struct fs *fs)
{
    CLEANUP_FD int fd = -1;
    int id;

    if (fs->counters.passthrough != counters_on)
        return "off: see passthrough";
    if (!fs->cache_dir)
        return "off: there is no cache directory";
    fd = unnamed_file(fs->cache_dir);
    id = fd < 0 ? 0 : passthrough_open(fs, fd);
    passthrough_close(fs, id);
    return id > 0 ? counters_on
                  : "off: the kernel cannot read files of cache_dir= by itself";
}

void materialized_begin(struct fs *fs)
{
    const char *state;

    if (!fs->materialized)
        return;
    state = try_it(fs);
    fs->counters.materialize = state;
    fs->materialized->on = state == counters_on;
    if (state != counters_on)
        log_msg(LOG_FS, LOG_WARN, "materialize= is %s", state);
}

void materialized_stop(struct materialized *c)
{
    if (c)
        c->stop = true;
}

void materialized_free(struct materialized *c)
{
    if (!c)
        return;
    while (c->lru.next != &c->lru) {
        struct materialized_file *copy =
            container_of(c->lru.next, struct materialized_file, lru);

        ring_remove(&copy->lru);
        if (copy->fd >= 0)
            close(copy->fd);
        free(copy);
    }
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* ---- the table; all with the lock held ---- */

static struct materialized_file **bucket_of(struct materialized *c,
                                            const struct materialized_key *key)
{
    uint64_t hash = (uint64_t)key->checkpoint << 40 ^ (uint64_t)key->kind << 32 ^
                    (uint64_t)key->index;

    return &c->bucket[(hash * 0x9e3779b97f4a7c15) >> 52];
}

static bool is_of(const struct materialized_file *copy,
                  const struct materialized_key *key)
{
    return copy->key.checkpoint == key->checkpoint && copy->key.kind == key->kind &&
           copy->key.index == key->index;
}

static struct materialized_file *find(struct materialized *c,
                                      const struct materialized_key *key)
{
    struct materialized_file *copy = *bucket_of(c, key);

    while (copy && (copy->stale || !is_of(copy, key)))
        copy = copy->next;
    return copy;
}

static void unlink_copy(struct materialized *c, struct materialized_file *copy)
{
    struct materialized_file **at = bucket_of(c, &copy->key);

    while (*at != copy)
        at = &(*at)->next;
    *at = copy->next;
    ring_remove(&copy->lru);
}

static void touch(struct materialized *c, struct materialized_file *copy)
{
    ring_remove(&copy->lru);
    ring_append(&c->lru, &copy->lru);
}

/*
 * A mapping outlives the handle that it was made by, and keeps the file's blocks: a lease
 * for writing is to be had of a file only that nobody but us has open or mapped.
 */
static bool is_idle(const struct materialized_file *copy)
{
    return copy->users == 0 &&
           (copy->fd < 0 || fcntl(copy->fd, F_SETLEASE, F_WRLCK) == 0);
}

static struct materialized_file *find_idle(struct materialized *c, bool stale_only)
{
    for (struct ring *r = c->lru.next; r != &c->lru; r = r->next) {
        struct materialized_file *copy = container_of(r, struct materialized_file, lru);

        if ((copy->stale || (!stale_only && copy->fd >= 0)) && is_idle(copy))
            return copy;
    }
    return NULL;
}

/* Its bytes count until they are gone. Unlocked meanwhile: gigabytes take a while. */
static void give_back(struct materialized *c, struct materialized_file *copy)
{
    int fd = copy->fd;

    copy->fd = -1;
    c->closing++;
    pthread_mutex_unlock(&c->lock);
    if (fd >= 0)
        close(fd);
    pthread_mutex_lock(&c->lock);
    c->closing--;
    c->files -= fd >= 0;
    c->used -= copy->charge;
    copy->charge = 0;
    c->fs->counters.materialized_bytes = c->used;
    pthread_cond_broadcast(&c->changed);
}

static void drop(struct materialized *c, struct materialized_file *copy)
{
    unlink_copy(c, copy);
    give_back(c, copy);
    free(copy);
}

/* Sets room aside; false: what is there is in use. */
static bool reserve(struct materialized *c, uint64_t charge)
{
    while (c->limit - c->used < charge || c->files >= c->max_files) {
        struct materialized_file *victim = find_idle(c, false);

        if (victim)
            drop(c, victim);
        else if (c->closing)
            pthread_cond_wait(&c->changed, &c->lock);
        else
            return false;
    }
    c->used += charge;
    c->files++;
    c->fs->counters.materialized_bytes = c->used;
    return true;
}

/* ---- making one ---- */

static uint64_t charge_of(uint64_t size)
{
    return (size + size / EXTENTS_SHARE + BLOCK - 1) / BLOCK * BLOCK;
}

/* A file with all of its room on the disk, so that filling it does not run out of it. */
static int make_file(const struct materialized *c, const struct materialized_file *copy,
                     struct err *e)
{
    CLEANUP_FD int fd = unnamed_file(c->fs->cache_dir);
    struct stat st;

    if (fd < 0)
        return err_set(e, -fd, "make a file in %s: %s", c->fs->cache_dir,
                       strerror(-fd));
    if ((fallocate(fd, 0, 0, (off_t)copy->size) < 0 && errno != EOPNOTSUPP) ||
        ftruncate(fd, (off_t)copy->size) < 0 || fstat(fd, &st) < 0)
        return err_set(e, errno, "%" PRIu64 " bytes in %s: %s", copy->size,
                       c->fs->cache_dir, strerror(errno));
    if ((uint64_t)st.st_blocks * 512 > copy->charge)
        return err_set(e, ENOSPC, "%" PRIu64 " bytes take %" PRIu64 " in %s",
                       copy->size, (uint64_t)st.st_blocks * 512, c->fs->cache_dir);
    return steal_fd(&fd);
}

/* A copy that has its file and no bytes yet; NULL: there is no room. Locked. */
static struct materialized_file *add(struct materialized *c,
                                     const struct materialized_key *key, uint64_t size,
                                     struct err *e)
{
    struct materialized_file *copy = calloc(1, sizeof *copy);

    if (!copy)
        return NULL;
    *copy = (struct materialized_file){
        .key = *key, .fd = -1, .size = size, .charge = charge_of(size)};
    ring_init(&copy->lru);
    if (!reserve(c, copy->charge)) {
        free(copy);
        return NULL;
    }
    pthread_mutex_unlock(&c->lock);
    copy->fd = make_file(c, copy, e);
    pthread_mutex_lock(&c->lock);
    if (copy->fd < 0) {
        c->files--;
        c->used -= copy->charge;
        c->fs->counters.materialized_bytes = c->used;
        pthread_cond_broadcast(&c->changed);
        free(copy);
        return NULL;
    }
    copy->next = *bucket_of(c, key);
    *bucket_of(c, key) = copy;
    ring_append(&c->lru, &copy->lru);
    return copy;
}

/* What became of a fill: 0, or what the opener is told. Locked. */
static int end_fill(struct materialized *c, struct materialized_file *copy, int rc,
                    struct err *e)
{
    char line[1400];

    copy->filling = false;
    pthread_cond_broadcast(&c->changed);
    if (rc == 0) {
        counter_add(&c->fs->counters, COUNT_MATERIALIZED, 1);
        return 0;
    }
    if (rc == -EINTR)
        return rc;
    if (rc == -ESTALE) {
        copy->stale = true;
        return rc;
    }
    /* The rest of it can still be read, and who reads the part is told what is wrong. */
    log_msg(LOG_FS, LOG_INFO, "not materialised: %s", err_line(e, line, sizeof line));
    *e = (struct err){0};
    copy->broken = rc != -ENOSPC;
    copy->stale = rc == -ENOSPC; /* others wrote there as well: another time */
    give_back(c, copy);
    return 0;
}

/* Locked, but not while filling. */
static int fill(struct materialized *c, struct materialized_file *copy,
                struct reader *reader, struct err *e)
{
    struct fill job = {.fs = c->fs,
                       .reader = reader,
                       .fd = copy->fd,
                       .size = copy->size,
                       .filled = copy->filled,
                       .stop = &c->stop};
    int rc;

    copy->filling = true;
    pthread_mutex_unlock(&c->lock);
    rc = fill_run(&job, e);
    pthread_mutex_lock(&c->lock);
    counter_add(&c->fs->counters, COUNT_BYTES_MATERIALIZED, job.filled - copy->filled);
    copy->filled = job.filled;
    return end_fill(c, copy, rc, e);
}

/* Locked, but not while waiting. -EINTR. */
static int wait_for(struct materialized *c, const struct materialized_file *copy)
{
    while (copy->filling) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        t.tv_nsec += WAIT_NS;
        t.tv_sec += t.tv_nsec / 1000000000;
        t.tv_nsec %= 1000000000;
        if (c->stop || interrupt_asked())
            return -EINTR;
        pthread_cond_timedwait(&c->changed, &c->lock, &t);
    }
    return 0;
}

/* With the lock and a use of the copy: until it is whole or cannot be. */
static int complete(struct materialized *c, struct materialized_file *copy,
                    struct reader *reader, struct err *e)
{
    int rc = 0;

    while (rc == 0 && !copy->broken && !copy->stale && copy->filled < copy->size)
        rc = copy->filling ? wait_for(c, copy) : fill(c, copy, reader, e);
    return rc;
}

/* ---- from outside ---- */

/* A file that was changed later than the others: its time. */
static int newest(void *user, const struct catalog_file *f)
{
    int64_t *ns = user;

    *ns = MAX(*ns, f->id.ctime_ns);
    return 0;
}

/* Nobody can be in the middle of a write any more. Objects are written at once. */
static bool is_settled(const struct fs *fs, struct generation *gen)
{
    int64_t changed = gen->changed_ns, settled = fs->options.settled;
    struct timespec now;
    struct err e = {0};

    if (fs->store->remote)
        return true;
    if (!changed && catalog_files(fs->catalog, gen->info.id, newest, &changed, &e) < 0)
        return false;
    gen->changed_ns = changed;
    clock_gettime(CLOCK_REALTIME, &now);
    return settled == 0 || now.tv_sec - settled > changed / 1000000000;
}

static bool is_worth_it(const struct materialized *c, uint64_t size)
{
    return size >= COPY_MIN && size <= c->limit && charge_of(size) <= c->limit;
}

/* Locked, but not while filling: *out is the copy once it is whole. */
static int get(struct materialized *c, struct materialized_file *copy,
               struct reader *reader, struct materialized_file **out, struct err *e)
{
    int rc;

    copy->users++;
    touch(c, copy);
    rc = complete(c, copy, reader, e);
    if (rc == 0 && copy->filled == copy->size && !copy->broken && !copy->stale)
        *out = copy;
    else
        copy->users--;
    return rc;
}

int materialized_get(struct materialized *c, const struct materialized_of *what,
                     bool may_fill, struct materialized_file **out, struct err *e)
{
    const struct materialized_key key = {what->gen->info.id, what->kind, what->index};
    uint64_t size = reader_size(what->reader);
    struct materialized_file *copy;
    int rc = 0;

    *out = NULL;
    if (!c || !c->on || !is_worth_it(c, size) || !is_settled(c->fs, what->gen))
        return 0;
    pthread_mutex_lock(&c->lock);
    copy = find(c, &key);
    if ((!copy || (!copy->broken && copy->filled < size)) && !may_fill)
        rc = FS_FILL;
    else if (!copy)
        copy = add(c, &key, size, e);
    if (rc == 0 && copy)
        rc = get(c, copy, what->reader, out, e);
    pthread_mutex_unlock(&c->lock);
    return rc;
}

int materialized_fd(const struct materialized_file *copy)
{
    return copy->fd;
}

void materialized_put(struct materialized *c, struct materialized_file *copy)
{
    if (!copy)
        return;
    pthread_mutex_lock(&c->lock);
    copy->users--;
    pthread_mutex_unlock(&c->lock);
}

void materialized_forget(struct materialized *c, int64_t checkpoint)
{
    if (!c)
        return;
    pthread_mutex_lock(&c->lock);
    for (struct ring *r = c->lru.next; r != &c->lru; r = r->next) {
        struct materialized_file *copy = container_of(r, struct materialized_file, lru);

        copy->stale |= copy->key.checkpoint == checkpoint;
    }
    pthread_mutex_unlock(&c->lock);
}

void materialized_tidy(struct materialized *c)
{
    struct materialized_file *copy;

    if (!c)
        return;
    pthread_mutex_lock(&c->lock);
    while ((copy = find_idle(c, true)))
        drop(c, copy);
    pthread_mutex_unlock(&c->lock);
}
