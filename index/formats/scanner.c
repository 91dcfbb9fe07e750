/* SPDX-License-Identifier: MIT */
/* index/formats/scanner.c - the index of each place kept fresh, one scan at a time. */
#include "index/formats/scan.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/scan_priv.h"
#include "index/formats/scan_time.h"
#include "index/formats/stand_in.h"
#include "index/map/map.h"
#include "index/map/mapping.h"
#include "index/watched.h"

enum {
    BUCKETS = 1024,
    MILLION = 1000000,
    CHECK_MEMORY =
        1 << 29, /* rows of the files of one checkpoint, each some 300 bytes */
    CONFIG_MAX = 16 << 20, /* as hf_config_read */
    SWEEP_FROM = 256,      /* places that are known before old ones are forgotten */
    SET_NAMES = 1,         /* stands for those of a set, whose files are watched */
    TRIES = 3,             /* other processes may scan the same place meanwhile */
};

static const int64_t second = 1000000000;

/*
 * A look at all files is remembered for a second (CONTRACT.md, "Change"); where it takes
 * long, for twenty times as long, so that a slow disk is not kept busy by looking.
 */
static const int64_t check_factor = 20;
static const int64_t longest_memory = 10000000000;

/* A directory changed this lately may change again within one tick of its clock. */
static const int64_t racy = 2000000000;

/*
 * What is known of one place. All but the names is guarded by the scanner's lock; `sure`
 * is also read by the one who has made it busy.
 */
struct known {
    struct known *next;
    char *path, *file; /* file may be NULL */
    unsigned users;
    bool busy;    /* somebody looks at it now */
    bool suspect; /* somebody saw it change: the next get looks */
    bool sure;    /* a scan by this process: its failure was the checkpoint's fault */
    uint64_t flights; /* looks that have ended */
    int64_t id;       /* of the checkpoint, 0: none */
    int64_t until;    /* monotonic time up to which `id` stands without a look */
    int rc;           /* of the last look */
    struct err err;
};

/* What a look found. */
struct found {
    int64_t id, until;
    bool sure;
};

struct scanner {
    struct store *store;
    struct catalog *catalog;
    struct pool *pool;
    const struct mapping *mapping; /* or NULL */
    atomic_bool stop;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    /* guarded by lock */
    struct known *bucket[BUCKETS];
    size_t count, sweep_at;
};

int scanner_new(struct store *store, struct catalog *catalog, struct pool *pool,
                struct scanner **out, struct err *e)
{
    struct scanner *s = calloc(1, sizeof *s);

    if (!s)
        return err_nomem(e);
    s->store = store;
    s->catalog = catalog;
    s->pool = pool;
    s->sweep_at = SWEEP_FROM;
    pthread_mutex_init(&s->lock, NULL);
    interrupt_cond_init(&s->ended);
    *out = s;
    return 0;
}

void scanner_use(struct scanner *s, const struct mapping *m)
{
    s->mapping = m;
}

void scanner_stop(struct scanner *s)
{
    s->stop = true;
}

static void known_free(struct known *k)
{
    free(k->path);
    free(k->file);
    free(k);
}

void scanner_free(struct scanner *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct known *k = s->bucket[i], *next; k; k = next) {
            next = k->next;
            known_free(k);
        }
    }
    pthread_cond_destroy(&s->ended);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static int64_t clock_ns(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * second + t.tv_nsec;
}

/* A source that is one file: its directory and it are one place. */
static const char *file_of(const struct scanner *s, const char *path, const char *file)
{
    return !file && !path[0] ? s->store->file : file;
}

struct store *scanner_store(const struct scanner *s)
{
    return s->store;
}

struct catalog *scanner_catalog(const struct scanner *s)
{
    return s->catalog;
}

size_t scanner_places(struct scanner *s)
{
    size_t count;

    pthread_mutex_lock(&s->lock);
    count = s->count;
    pthread_mutex_unlock(&s->lock);
    return count;
}

/* ---- the table ---- */

static struct known **bucket_of(struct scanner *s, const char *path, const char *file)
{
    uint64_t hash = XXH3_64bits(path, strlen(path));

    if (file)
        hash = XXH3_64bits_withSeed(file, strlen(file), hash);
    return &s->bucket[hash % BUCKETS];
}

static bool is_place(const struct known *k, const char *path, const char *file)
{
    return strcmp(k->path, path) == 0 && !k->file == !file &&
           (!file || strcmp(k->file, file) == 0);
}

static struct known *find(struct scanner *s, const char *path, const char *file)
{
    struct known *k = *bucket_of(s, path, file);

    while (k && !is_place(k, path, file))
        k = k->next;
    return k;
}

/*
 * Forgets places whose next get looks in any case: checkpoints come and go as long as a
 * mount lives. At most as many are kept in vain as are in use. Call with the lock held.
 */
static void sweep(struct scanner *s)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC);

    for (size_t i = 0; i < BUCKETS; i++) {
        struct known **p = &s->bucket[i];

        while (*p) {
            struct known *k = *p;

            if (k->users > 0 || k->suspect || now < k->until) {
                p = &k->next;
                continue;
            }
            *p = k->next;
            known_free(k);
            s->count--;
        }
    }
    s->sweep_at = MAX(2 * s->count, (size_t)SWEEP_FROM);
}

/* Found or made; one more user. NULL: no memory. Call with the lock held. */
static struct known *use(struct scanner *s, const char *path, const char *file)
{
    struct known *k = find(s, path, file), **head = bucket_of(s, path, file);

    if (!k) {
        if (s->count >= s->sweep_at)
            sweep(s);
        k = calloc(1, sizeof *k);
        if (!k)
            return NULL;
        k->path = strdup(path);
        k->file = file ? strdup(file) : NULL;
        if (!k->path || (file && !k->file)) {
            known_free(k);
            return NULL;
        }
        k->next = *head;
        *head = k;
        s->count++;
    }
    k->users++;
    return k;
}

/* Places without a checkpoint are not kept. Call with the lock held. */
static void unuse(struct scanner *s, struct known *k)
{
    struct known **p = bucket_of(s, k->path, k->file);

    if (--k->users > 0 || k->id)
        return;
    while (*p != k)
        p = &(*p)->next;
    *p = k->next;
    known_free(k);
    s->count--;
}

/* ---- is the index still true? ---- */

/* Of what decides which files are a checkpoint: for one file only itself. */
static uint64_t names_hash(const struct listing *l, const char *file)
{
    const struct listing_entry *entry;

    if (!file)
        return watched_names(l, listing_count(l) ? 1 : 0);
    entry = listing_find(l, file);
    return entry ? (uint64_t)entry->st.kind * 2 + entry->st.is_link + 1 : 0;
}

/* The directory's identity, with no time when that cannot tell the next change. */
static int look_at_dir(struct scanner *s, const char *path, struct file_id *out,
                       struct err *e)
{
    struct entry_stat st;

    TRY(s->store->ops->stat(s->store, path, &st, e));
    if (st.kind != ENTRY_DIR)
        return err_set(e, ENOTDIR, "%s is no directory", path);
    *out = st.id;
    if (clock_ns(CLOCK_REALTIME) - MAX(out->mtime_ns, out->ctime_ns) < racy)
        out->mtime_ns = 0;
    return 0;
}

/* 1: the directory has the names that it had; 0: not. */
static int names_same(struct scanner *s, const struct checkpoint_info *info,
                      struct err *e)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct file_id id;

    if (info->file) /* other files come and go, its own is among the watched */
        return 1;
    if (look_at_dir(s, info->path, &id, e) < 0)
        return 0; /* the scan will tell */
    if (id.mtime_ns && file_id_equal(&id, &info->dir_id))
        return 1;
    if (s->store->ops->list(s->store, info->path, &l, e) < 0 ||
        names_hash(l, NULL) != info->names_hash)
        return 0;
    /* Where that cannot be written (a full disk) the next look lists once more. */
    if (!file_id_equal(&id, &info->dir_id))
        catalog_touch(s->catalog, info->id, &id, e);
    return 1;
}

/*
 * 1 when the index holds what is there, 0 when it must be scanned; *id is what the index
 * holds, 0: nothing. A failed scan is tried again by each new process (unless `sure`):
 * what failed may have been the disk's fault or the rights of who asked. One that met such
 * trouble and went on (sink_unsure) is tried again at every look.
 */
static int is_fresh(struct scanner *s, const struct known *k, bool sure, int64_t *id,
                    struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(CHECK_MEMORY);
    struct checkpoint_info info;
    int rc;

    if (!a)
        return err_nomem(e);
    *id = 0;
    rc = catalog_checkpoint(s->catalog, k->path, k->file, a, &info, e);
    if (rc == 0)
        *id = info.id;
    if (rc == -ENOENT || (rc == 0 && ((info.error && !sure) || info.names_hash == 0))) {
        *e = (struct err){0};
        return 0;
    }
    if (rc < 0)
        return rc;
    rc = names_same(s, &info, e);
    if (rc > 0)
        rc = scan_files_same(s->store, s->catalog, &info, a, e);
    if (rc == -ESTALE) /* replaced by another process meanwhile */
        rc = 0;
    if (rc >= 0)
        *e = (struct err){0};
    return rc;
}

/* 1 when the index has the directory with these names and its files are as they were. */
static int matches(struct scanner *s, const char *path, const struct listing *l,
                   int64_t *id, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(CHECK_MEMORY);
    struct checkpoint_info info;
    int rc = a ? catalog_checkpoint(s->catalog, path, NULL, a, &info, e) : err_nomem(e);

    *id = rc == 0 ? info.id : 0;
    if (rc == 0 && !info.error && info.names_hash &&
        info.names_hash == names_hash(l, NULL))
        rc = scan_files_same(s->store, s->catalog, &info, a, e);
    if (rc == -ENOENT || rc == -ESTALE) {
        *e = (struct err){0};
        return 0;
    }
    return rc;
}

/* How long a look that began at `start` and ends now is good for. */
static int64_t good_until(int64_t start)
{
    int64_t memory = (clock_ns(CLOCK_MONOTONIC) - start) * check_factor;

    return start + MIN(MAX(memory, second), longest_memory);
}

int scanner_knows(struct scanner *s, const char *path, const struct listing *l,
                  struct err *e)
{
    int64_t start = clock_ns(CLOCK_MONOTONIC), id;
    uint64_t flights;
    struct known *k;
    int rc;

    pthread_mutex_lock(&s->lock);
    k = use(s, path, NULL);
    if (!k) {
        pthread_mutex_unlock(&s->lock);
        return err_nomem(e);
    }
    flights = k->flights;
    pthread_mutex_unlock(&s->lock);
    rc = matches(s, path, l, &id, e);
    pthread_mutex_lock(&s->lock);
    /* No other look meanwhile, and no reason for one: the next get need not look again. */
    if (rc == 1 && !k->busy && !k->suspect && k->flights == flights) {
        k->id = id;
        k->until = good_until(start);
        k->rc = 0;
    }
    unuse(s, k);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

/* ---- scanning ---- */

/* There is no checkpoint (any more): the index forgets it. */
static int drop(struct scanner *s, const struct known *k, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(CHECK_MEMORY);
    struct checkpoint_info info;
    struct err ignored = {0};

    if (a && catalog_checkpoint(s->catalog, k->path, k->file, a, &info, &ignored) == 0)
        catalog_drop(s->catalog, info.id, &ignored);
    return err_set(e, ENOENT, "%s%s%s: no checkpoint there", k->path,
                   k->file && k->path[0] ? "/" : "", k->file ? k->file : "");
}

/* Errors that say nothing about the checkpoint: they are not kept in the index. */
static bool is_ours(int code)
{
    return code == ENOMEM || code == ENOSPC || code == EROFS || code == EDQUOT ||
           code == EMFILE || code == ENFILE || code == EINTR || code == ECANCELED ||
           code == EREMOTEIO || code == EPROTO;
}

static void log_scan(struct scanner *s, int64_t id, int64_t start)
{
    int64_t ms = (clock_ns(CLOCK_MONOTONIC) - start) / MILLION;
    CLEANUP(arena_freep) struct arena *a = arena_new(CHECK_MEMORY);
    struct checkpoint_info info;
    struct err ignored = {0};

    if (!log_enabled(LOG_FORMAT, LOG_INFO) || !a ||
        catalog_checkpoint_by_id(s->catalog, id, a, &info, &ignored) < 0)
        return;
    log_msg(LOG_FORMAT, LOG_INFO,
            "scan path=%s%s%s format=%s tensors=%" PRIu64 " chunks=%" PRIu64
            " faults=%" PRIu64 " ms=%" PRId64 "%s%s",
            info.path[0] ? info.path : ".", info.file ? "/" : "",
            info.file ? info.file : "", info.format, info.tensors, info.chunks,
            info.faults, ms, info.error ? " error=" : "", info.error ? info.error : "");
}

/* Errors of a checkpoint's content: as long as its files are the same, so are they. */
static bool is_damage(int code)
{
    return code == EBADMSG || code == ENOTSUP || code == EOVERFLOW || code == EFBIG ||
           code == E2BIG || code == EEXIST || code == ENAMETOOLONG;
}

/*
 * The filter of one scan. A map that takes numbers from the checkpoint's own config.json
 * gets its text; whether that can be read, the map finds out when it needs a number.
 */
static int make_filter(const struct scanner *s, struct listing *l,
                       struct sink_filter **out, struct err *e)
{
    CLEANUP_FREE char *config = NULL;
    struct err ignored = {0};
    size_t len = 0;

    if (!s->mapping)
        return 0;
    if (mapping_wants_config(s->mapping) && listing_find(l, "config.json"))
        listing_read(l, "config.json", CONFIG_MAX, &config, &len, &ignored);
    return mapping_filter(s->mapping, config, len, out, e);
}

/* The filter's source of numbers: a change of it changes shapes. */
static int watch_config(const struct scanner *s, struct listing *l, struct sink *sink,
                        struct err *e)
{
    if (!mapping_wants_config(s->mapping) || !listing_find(l, "config.json"))
        return 0;
    return sink_watch(sink, "config.json", e);
}

/*
 * An index whose files are not here (people copy it with the config of a model) would lead
 * loaders that look for it first to files that nobody has.
 */
static int hide_indexes(struct listing *l, const char *suffix, struct sink *sink,
                        struct err *e)
{
    struct hf_index_name x;
    size_t n = strlen(suffix);
    int rc = sink_enter(sink, "", e);

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *name = listing_at(l, i)->name;
        size_t len = strlen(name);

        if (len > n && strcmp(name + len - n, suffix) == 0)
            return rc;
    }
    for (size_t i = 0; rc == 0 && i < listing_count(l); i++)
        if (hf_index_name(listing_at(l, i)->name, suffix, &x))
            rc = sink_hide(sink, listing_at(l, i)->name, false, e);
    return rc;
}

/*
 * Drivers leave out what they cannot look into, as it may be anything: so it is told here.
 * Rights change with the file; what the disk refuses is tried again.
 */
static int tell_unread(const struct known *k, const struct listing *l,
                       struct sink *sink, struct err *e)
{
    const struct listing_trouble *t = listing_trouble(l);
    size_t skip = k->path[0] ? strlen(k->path) + 1 : 0;

    if (!t)
        return 0;
    if (listing_denied(t) && t->is_dir)
        return sink_warning(sink, "not-read",
                            "%s: what is in it is no part of what is shown",
                            t->err.text) < 0
                   ? err_nomem(e)
                   : 0;
    if (!listing_denied(t))
        sink_unsure(sink);
    TRY(sink_enter(sink, "", e));
    TRY(sink_watch(sink, t->path + skip, e));
    return sink_warning(sink, "damaged-file", "%s", t->err.text);
}

/*
 * Pointers and links in the place of files: where the scan failed because of one, that is the
 * reason.
 */
static int tell_stand_ins(const struct known *k, struct listing *l, struct sink *sink,
                          int rc, struct err *failed)
{
    const char *main = sink_told(sink)->metadata_file;
    const char *slash = main ? strrchr(main, '/') : NULL;
    struct err why = {0};

    if (sink_enter(sink, "", &why) == 0)
        stand_in_report(l, k->file, sink, &why);
    if (is_ours(why.code)) {
        *failed = why;
        return -why.code;
    }
    if (rc < 0 && main && stand_in_find(l, slash ? slash + 1 : main, &why) < 0) {
        *failed = why;
        failed->code = EBADMSG;
        return -EBADMSG;
    }
    return rc;
}

/* One try; -ESTALE before anything was kept when `again` is still possible. */
static int scan_listing(struct scanner *s, const struct known *k, struct listing *l,
                        const struct file_id *dir_id, bool again, bool guarded,
                        struct found *out, struct err *e)
{
    CLEANUP(place_release) struct place place = {0};
    CLEANUP(map_filter_freep) struct sink_filter *filter = NULL;
    struct catalog_place where = {.path = k->path,
                                  .file = k->file,
                                  .store = s->store,
                                  .dir_id = *dir_id,
                                  .names_hash = names_hash(l, k->file),
                                  .guarded = guarded,
                                  .seen = out->id};
    struct scan_context context = {
        .store = s->store, .pool = s->pool, .listing = l, .dir = k->path};
    int64_t start = clock_ns(CLOCK_MONOTONIC);
    unsigned troubles = source_troubles();
    struct scan_time time;
    struct err failed = {0};
    struct sink *sink;
    int rc;

    TRY(place_of(l, k->file, &place, e));
    if (place.trouble)
        *e = *place.trouble;
    if (place.kind != PLACE_CHECKPOINT)
        return place.trouble ? -e->code : drop(s, k, e);
    listing_skip_junk(l, !k->file);
    context.file = place.file;
    context.among = k->file != NULL;
    if (k->file && where.names_hash == 0)
        where.names_hash = SET_NAMES;
    TRY(make_filter(s, l, &filter, e));
    where.filter = filter;
    TRY(sink_begin(s->catalog, &where, &sink, e));
    scan_time_begin(&time, &s->stop);
    rc = watch_config(s, l, sink, &failed);
    if (rc == 0)
        rc = place.driver->scan(&context, sink, &failed);
    if (rc == 0)
        rc = tell_unread(k, l, sink, &failed);
    rc = tell_stand_ins(k, l, sink, rc, &failed);
    if (rc == 0 && !k->file)
        rc = hide_indexes(l, ".safetensors", sink, &failed);
    if (rc == 0 && !k->file)
        rc = hide_indexes(l, ".bin", sink, &failed);
    rc = scan_time_end(&time, rc, &failed);
    if (rc < 0 && (is_ours(failed.code) || (again && rc == -ESTALE))) {
        sink_abort(sink);
        *e = failed;
        return rc;
    }
    if (source_troubles() != troubles && !time.late)
        sink_unsure(sink);
    TRY(sink_commit(sink, rc < 0 ? &failed : NULL, &out->id, e));
    out->sure = rc == 0 || is_damage(failed.code) || time.late;
    log_scan(s, out->id, start);
    return 0;
}

static int scan_place(struct scanner *s, const struct known *k, bool guarded,
                      struct found *out, struct err *e)
{
    int rc = -ESTALE;

    for (int again = 1; again >= 0 && rc == -ESTALE; again--) {
        CLEANUP(listing_freep) struct listing *l = NULL;
        struct file_id dir_id;

        *e = (struct err){0};
        rc = look_at_dir(s, k->path, &dir_id, e);
        if (rc == 0)
            rc = s->store->ops->list(s->store, k->path, &l, e);
        if (rc == -ENOENT || rc == -ENOTDIR)
            return drop(s, k, e);
        if (rc == 0)
            rc = scan_listing(s, k, l, &dir_id, again, guarded, out, e);
    }
    return rc;
}

/* ---- one look, however many ask ---- */

/*
 * Of several processes that
 * scan a place at once the first one's rows stay, as it reads them already; the others
 * look again and find them. The last try replaces whatever is there.
 */
static int try_to_look(struct scanner *s, const struct known *k, struct found *out,
                       struct err *e)
{
    int rc = -EAGAIN;

    for (unsigned i = 0; i < TRIES && rc == -EAGAIN; i++) {
        int64_t start = clock_ns(CLOCK_MONOTONIC);
        bool sure = k->sure || i > 0;

        *e = (struct err){0};
        rc = is_fresh(s, k, sure, &out->id, e);
        out->until = good_until(start);
        out->sure = sure;
        if (rc != 0)
            return MIN(rc, 0);
        out->until = clock_ns(CLOCK_MONOTONIC) + second;
        rc = scan_place(s, k, i + 1 < TRIES, out, e);
    }
    return rc;
}

/* Without the lock; the caller has made the place busy. */
static int look(struct scanner *s, const struct known *k, struct found *out,
                struct err *e)
{
    struct scan_time time;
    int rc;

    scan_time_begin_long(&time, &s->stop);
    rc = interrupt_late() ? -ECANCELED : try_to_look(s, k, out, e);
    return scan_time_end(&time, rc, e);
}

/* Looks for all who wait. Call with the lock held. */
static void fly(struct scanner *s, struct known *k)
{
    struct found found = {0};
    struct err err = {0};
    int rc;

    k->busy = true;
    k->suspect = false;
    pthread_mutex_unlock(&s->lock);
    rc = look(s, k, &found, &err);
    pthread_mutex_lock(&s->lock);
    if (rc < 0)
        found = (struct found){0};
    k->busy = false;
    k->sure = found.sure;
    k->id = found.id;
    k->until = found.until;
    k->rc = rc;
    k->err = err;
    k->flights++;
    pthread_cond_broadcast(&s->ended);
}

/*
 * Who looked for all may have been interrupted, which is nothing to those who waited: they
 * look by themselves. Call with the lock held.
 */
static bool others_gave_up(const struct known *k)
{
    return k->rc == -EINTR && !interrupt_asked();
}

/* The id of the checkpoint, after a look where one is due. Call with the lock held. */
static int settle(struct scanner *s, struct known *k, int64_t *id, struct err *e)
{
    uint64_t flights;

    while (k->busy) {
        flights = k->flights;
        while (k->flights == flights)
            TRY(interrupt_wait(&s->ended, &s->lock, e));
        if (!others_gave_up(k)) {
            *id = k->id;
            if (k->rc < 0)
                *e = k->err;
            return k->rc;
        }
    }
    if (!k->id || k->suspect || clock_ns(CLOCK_MONOTONIC) >= k->until) {
        fly(s, k);
    } else {
        *id = k->id;
        return 0;
    }
    *id = k->id;
    if (k->rc < 0)
        *e = k->err;
    return k->rc;
}

int scanner_get(struct scanner *s, const char *path, const char *file, struct arena *a,
                struct checkpoint_info *out, struct err *e)
{
    struct known *k;
    int64_t id = 0;
    int rc;

    file = file_of(s, path, file);
    pthread_mutex_lock(&s->lock);
    k = use(s, path, file);
    rc = k ? -ESTALE : err_nomem(e);
    for (int i = 0; k && rc == -ESTALE && i < TRIES; i++) {
        *e = (struct err){0};
        rc = settle(s, k, &id, e);
        if (rc < 0)
            break;
        pthread_mutex_unlock(&s->lock);
        rc = catalog_checkpoint_by_id(s->catalog, id, a, out, e);
        pthread_mutex_lock(&s->lock);
        if (rc == -ESTALE && k->id == id)
            k->until = 0; /* another process has scanned it anew */
    }
    if (k)
        unuse(s, k);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

void scanner_suspect(struct scanner *s, const char *path, const char *file)
{
    struct known *k;

    pthread_mutex_lock(&s->lock);
    k = find(s, path, file_of(s, path, file));
    if (k)
        k->suspect = true;
    pthread_mutex_unlock(&s->lock);
}
