/* SPDX-License-Identifier: MIT */
/* remote/open_files.c - the shards that are open now, shared by all who read them. */
#include "remote/open_files.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/resource.h>

#include "base/err.h"
#include "remote/ring.h"
#include "remote/store.h"

enum {
    BUCKETS = 4096,
    /*
     * Up to so many are looked through at each new one; of more at every SELDOM-th, or
     * opening a tensor of 100,000 chunks takes a minute of looking.
     */
    FEW = 4096,
    SELDOM = 1024,
    /*
     * Shares of the files that this process may have open: of those that are kept for long,
     * and of those for one window, many of which may be read at the same time.
     */
    KEPT_SHARE = 4,
    WINDOW_SHARE = 32,
    /* A file is also a map, and of those the kernel gives a process 65,530. */
    KEPT_MAX = 16384,
};

struct open_file {
    struct ring lru;
    struct open_file *next; /* in its bucket */
    char *path;
    struct source *src;
    int64_t idle_since_ns; /* when it was first found unused since its last use, or 0 */
};

struct open_files {
    struct store *store;
    unsigned keep;
    size_t limit; /* how many files this process may have open */
    pthread_mutex_t lock;
    /* guarded by lock */
    struct ring lru; /* least recently used first */
    size_t count;
    size_t promised;    /* will be kept and may not be counted as open yet */
    unsigned untrimmed; /* times that trim() had better things to do */
    struct open_file *buckets[BUCKETS];
};

static size_t files_allowed(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return 256;
    return (size_t)MIN(limit.rlim_cur, (rlim_t)KEPT_MAX * KEPT_SHARE);
}

int open_files_new(struct store *store, unsigned keep, struct open_files **out,
                   struct err *e)
{
    struct open_files *f = calloc(1, sizeof *f);

    if (!f)
        return err_nomem(e);
    f->store = store;
    f->limit = files_allowed();
    f->keep = (unsigned)MIN((size_t)keep, f->limit / KEPT_SHARE);
    ring_init(&f->lru);
    pthread_mutex_init(&f->lock, NULL);
    *out = f;
    return 0;
}

static struct open_file *file_at(struct ring *r)
{
    return container_of(r, struct open_file, lru);
}

/* Closes entries that left the table, without the lock: unmapping takes its time. */
static void drop_all(struct ring *gone)
{
    while (gone->next != gone) {
        struct open_file *file = file_at(gone->next);

        ring_remove(&file->lru);
        source_put(file->src);
        free(file->path);
        free(file);
    }
}

void open_files_free(struct open_files *f)
{
    if (!f)
        return;
    drop_all(&f->lru);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

static struct open_file **bucket_of(struct open_files *f, const char *path)
{
    uint64_t h = 0xcbf29ce484222325; /* FNV-1a */

    for (; *path; path++)
        h = (h ^ (unsigned char)*path) * 0x100000001b3;
    return &f->buckets[(h ^ h >> 32) % BUCKETS];
}

/* Where the entry of that path is linked in, or the end of its bucket. Locked. */
static struct open_file **find_slot(struct open_files *f, const char *path)
{
    struct open_file **slot = bucket_of(f, path);

    while (*slot && strcmp((*slot)->path, path) != 0)
        slot = &(*slot)->next;
    return slot;
}

/* Locked. */
static void take_out(struct open_files *f, struct open_file **slot, struct ring *gone)
{
    struct open_file *file = *slot;

    *slot = file->next;
    f->count--;
    ring_remove(&file->lru);
    ring_append(gone, &file->lru);
}

/* The file that `expect` means, with a reference, or NULL; another one goes. Locked. */
static struct source *share(struct open_files *f, const char *path,
                            const struct file_id *expect, struct ring *gone)
{
    struct open_file **slot = find_slot(f, path), *file = *slot;

    if (!file)
        return NULL;
    if (!file_id_equal(&file->src->id, expect)) {
        take_out(f, slot, gone);
        return NULL;
    }
    ring_remove(&file->lru);
    ring_append(&f->lru, &file->lru);
    file->idle_since_ns = 0;
    return source_get(file->src);
}

/* Nobody but the table has it, and only the table can give it to others. Locked. */
static bool unused(const struct open_file *file)
{
    return atomic_load_explicit(&file->src->refs, memory_order_acquire) == 1;
}

/* Takes out what is unused beyond `keep`, the least recently used first. Locked. */
static void trim(struct open_files *f, size_t keep, struct ring *gone)
{
    size_t idle = 0;

    if (f->count <= keep || (keep > 0 && f->count > FEW && ++f->untrimmed < SELDOM))
        return;
    f->untrimmed = 0;
    for (struct ring *r = f->lru.next; r != &f->lru; r = r->next)
        idle += unused(file_at(r));
    for (struct ring *r = f->lru.next, *next; r != &f->lru && idle > keep; r = next) {
        next = r->next;
        if (!unused(file_at(r)))
            continue;
        take_out(f, find_slot(f, file_at(r)->path), gone);
        idle--;
    }
}

/* Locked. */
static size_t count_used(const struct open_files *f)
{
    size_t used = 0;

    for (struct ring *r = f->lru.next; r != &f->lru; r = r->next)
        used += !unused(file_at(r));
    return used;
}

bool open_files_promise(struct open_files *f, size_t n)
{
    size_t most = f->limit / KEPT_SHARE;
    bool granted;

    if (store_is_remote(f->store))
        return true;
    pthread_mutex_lock(&f->lock);
    granted =
        f->count + f->promised + n <= most || count_used(f) + f->promised + n <= most;
    if (granted)
        f->promised += n;
    pthread_mutex_unlock(&f->lock);
    return granted;
}

void open_files_promised(struct open_files *f, size_t n)
{
    if (store_is_remote(f->store))
        return;
    pthread_mutex_lock(&f->lock);
    f->promised -= n;
    pthread_mutex_unlock(&f->lock);
}

size_t open_files_at_once(const struct open_files *f)
{
    if (store_is_remote(f->store))
        return SIZE_MAX;
    return MAX(f->limit / WINDOW_SHARE, (size_t)1);
}

void open_files_rest(struct open_files *f, int64_t now_ns, int64_t idle_ns)
{
    struct ring gone;

    if (store_is_remote(f->store))
        return; /* what they know of their server would be asked for again */
    ring_init(&gone);
    pthread_mutex_lock(&f->lock);
    for (struct ring *r = f->lru.next, *next; r != &f->lru; r = next) {
        struct open_file *file = file_at(r);

        next = r->next;
        if (!unused(file))
            file->idle_since_ns = 0;
        else if (!file->idle_since_ns)
            file->idle_since_ns = now_ns;
        else if (now_ns - file->idle_since_ns >= idle_ns)
            take_out(f, find_slot(f, file->path), &gone);
    }
    pthread_mutex_unlock(&f->lock);
    drop_all(&gone);
}

/* Has this process too many files open? Then those that nobody uses are closed. */
static bool made_room(struct open_files *f, int rc, struct err *e)
{
    struct ring gone;

    if (rc != -EMFILE && rc != -ENFILE)
        return false;
    ring_init(&gone);
    pthread_mutex_lock(&f->lock);
    trim(f, 0, &gone);
    pthread_mutex_unlock(&f->lock);
    drop_all(&gone);
    *e = (struct err){0};
    return true;
}

/* 0 when the file on disk is the expected one. */
static int check_expected(struct open_files *f, const char *path,
                          const struct file_id *expect, struct err *e)
{
    struct entry_stat st;
    int rc = f->store->ops->stat(f->store, path, &st, e);

    if (made_room(f, rc, e))
        rc = f->store->ops->stat(f->store, path, &st, e);
    if (rc < 0)
        return rc;
    if (st.kind != ENTRY_FILE)
        return err_set(e, ESTALE, "%s: is no regular file any more", path);
    return file_id_equal(&st.id, expect) ? 0 : source_stale(path, expect, &st.id, e);
}

static int open_new(struct open_files *f, const char *path, struct source **out,
                    struct err *e)
{
    int rc = f->store->ops->open(f->store, path, out, e);

    return made_room(f, rc, e) ? f->store->ops->open(f->store, path, out, e) : rc;
}

static void free_entry(struct open_file **file)
{
    if (!*file)
        return;
    source_put((*file)->src);
    free((*file)->path);
    free(*file);
}

static int open_expected(struct open_files *f, const char *path,
                         const struct file_id *expect, struct open_file **out,
                         struct err *e)
{
    CLEANUP(free_entry) struct open_file *file = calloc(1, sizeof *file);

    if (!file || !(file->path = strdup(path)))
        return err_nomem(e);
    TRY(open_new(f, path, &file->src, e));
    if (!file_id_equal(&file->src->id, expect)) /* it changed in the last moment */
        return source_stale(path, expect, &file->src->id, e);
    ring_init(&file->lru);
    *out = steal(&file);
    return 0;
}

/* Adds a file just opened, unless another thread was first: then its file serves. */
static struct source *add(struct open_files *f, struct open_file *file,
                          struct ring *gone)
{
    struct source *src = share(f, file->path, &file->src->id, gone);
    struct open_file **slot = find_slot(f, file->path);

    if (src) {
        ring_append(gone, &file->lru);
        return src;
    }
    *slot = file;
    ring_append(&f->lru, &file->lru);
    f->count++;
    src = source_get(file->src);
    trim(f, f->keep, gone);
    return src;
}

int open_files_get(struct open_files *f, const char *path, const struct file_id *expect,
                   struct source **out, struct err *e)
{
    struct open_file *file = NULL;
    struct ring gone;
    int rc = check_expected(f, path, expect, e);

    if (rc < 0)
        return rc;
    ring_init(&gone);
    pthread_mutex_lock(&f->lock);
    *out = share(f, path, expect, &gone);
    pthread_mutex_unlock(&f->lock);
    if (!*out)
        rc = open_expected(f, path, expect, &file, e);
    if (file) {
        pthread_mutex_lock(&f->lock);
        *out = add(f, file, &gone);
        pthread_mutex_unlock(&f->lock);
    }
    drop_all(&gone);
    return rc;
}
