/* SPDX-License-Identifier: MIT */
/* save/write.c - units of work: a window of one tensor, cut to the boxes of all files. */
#include "save/write.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/crc32.h"
#include "base/err.h"
#include "base/pool.h"
#include "save/box.h"
#include "save/files.h"
#include "save/gather.h"
#include "save/staging.h"
#include "save/sums.h"

enum {
    WINDOW = SAVE_WINDOW,
    BATCH = 4096,      /* units between two looks at durability: 2 GiB at most */
    MANY_FILES = 4096, /* from here on one syncfs costs less than an fsync a file */
    BUFFERS = 64,
    EARLY = 256 << 10, /* bytes that are worth a hint to the disk */
    TURNS = 64,        /* files have one of these locks each, by number */
};

/* One box of one file. */
struct place {
    uint32_t file;
    const struct layout_piece *piece;
};

/* A window of a tensor. */
struct unit {
    uint32_t tensor;
    uint64_t off, len;
};

struct stage_run {
    const struct save_run *run;
    unsigned stage;
    uint32_t *file; /* numbers of the files of this stage that are ours */
    size_t files;
    struct place *place; /* sorted by tensor, then as the files have them */
    size_t *first;       /* of each tensor in `place`, and one behind the last */
    struct unit *unit;
    size_t units;
    size_t base;  /* first unit of the batch that runs */
    bool named;   /* the names of its files are durable */
    bool *summed; /* of each file of the layout: has it checksums? */
    struct sums sums;
    /*
     * One thread at a time writes to a file: the kernel lets no more in, and would have the
     * others spin for it, where they can read and cut what comes next.
     */
    pthread_mutex_t turn[TURNS];
    pthread_mutex_t lock; /* of what follows, and of progress */
    void *buffer[BUFFERS];
    unsigned buffers;
};

/* ---- which files ---- */

static int add_size(void *user, uint32_t i, const struct layout_file_info *f)
{
    uint64_t *total = user;

    (void)i;
    *total += f->size;
    return 0;
}

uint64_t save_bytes(const struct save_run *r)
{
    uint64_t total = 0;

    for (unsigned s = 0; s <= save_last_stage(r->layout); s++)
        save_each_file(r, s, add_size, &total);
    return total;
}

/* ---- files ---- */

static int file_error(const struct layout_file_info *f, struct err *e)
{
    return err_set(e, errno, "%s: %s", f->path, strerror(errno));
}

static int make_parents(int dir, const char *path, struct err *e)
{
    char part[PATH_MAX];

    for (const char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        memcpy(part, path, (size_t)(slash - path));
        part[slash - path] = '\0';
        if (mkdirat(dir, part, 0777) < 0 && errno != EEXIST)
            return err_set(e, errno, "%s: %s", part, strerror(errno));
    }
    return 0;
}

static int open_file(const struct stage_run *s, const struct layout_file_info *f,
                     int flags, struct err *e)
{
    int fd = openat(s->run->dir, f->path, flags | O_CLOEXEC | O_NOFOLLOW, 0666);

    return fd < 0 ? file_error(f, e) : fd;
}

/*
 * After `ret`. A disk across a network may tell a lack of room, or that bytes are lost, at
 * close(2), and to nobody who opens the file later and calls fsync.
 */
static int close_file(int fd, const struct layout_file_info *f, int ret, struct err *e)
{
    return close(fd) < 0 && errno != EINTR && ret == 0 ? file_error(f, e) : ret;
}

static int write_at(int fd, const struct layout_file_info *f, const void *data,
                    uint64_t len, uint64_t at, struct err *e)
{
    const char *p = data;

    while (len > 0) {
        ssize_t n = pwrite(fd, p, (size_t)MIN(len, (uint64_t)1 << 30), (off_t)at);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return file_error(f, e);
        p += n;
        at += (uint64_t)n;
        len -= (uint64_t)n;
    }
    return 0;
}

/* The file in its full length, with all that is known of it before. */
static int begin_file(struct stage_run *s, const struct layout_file_info *f,
                      struct err *e)
{
    int ret = make_parents(s->run->dir, f->path, e), fd;

    if (ret < 0)
        return ret;
    fd = open_file(s, f, O_WRONLY | O_CREAT, e);
    if (fd < 0)
        return fd;
    if (f->codec == LAYOUT_PLAIN && ftruncate(fd, (off_t)f->size) < 0)
        ret = file_error(f, e);
    for (size_t i = 0; ret == 0 && f->codec == LAYOUT_PLAIN && i < f->pieces; i++)
        if (f->piece[i].kind == LAYOUT_LITERAL)
            ret = write_at(fd, f, f->piece[i].data, f->piece[i].len, f->piece[i].at, e);
    ret = close_file(fd, f, ret, e);
    return ret;
}

static int begin_nth(void *user, size_t n, struct err *e)
{
    struct stage_run *s = user;
    struct layout_file_info f;

    layout_file_info(s->run->layout, s->file[n], &f);
    return begin_file(s, &f, e);
}

/* ---- checksums: of what the file holds by now ---- */

static int range_crc(int fd, const struct layout_file_info *f, uint64_t from,
                     uint64_t len, uint32_t *out, struct err *e)
{
    enum { BLOCK = 1 << 20 };
    CLEANUP_FREE unsigned char *block = malloc(BLOCK);
    uint32_t crc = 0;

    if (!block)
        return err_nomem(e);
    while (len > 0) {
        size_t part = (size_t)MIN(len, (uint64_t)BLOCK);

        if (read_exact(fd, block, part, from, e) < 0)
            return err_wrap(e, "%s", f->path);
        crc = crc32_zip(crc, block, part);
        from += part;
        len -= part;
    }
    *out = crc;
    return 0;
}

static bool is_filled(const struct save_run *r, uint32_t file)
{
    return r->filled && r->filled->file[file];
}

/* A box that is written from its tensor now. */
static bool is_wanted(const struct save_run *r, uint32_t file,
                      const struct layout_file_info *f, size_t piece)
{
    const struct layout_piece *p = &f->piece[piece];

    return f->codec == LAYOUT_PLAIN && p->kind == LAYOUT_BOX &&
           !(is_filled(r, file) && r->filled->has(r->filled->user, file, p));
}

static bool sum_is_known(const struct stage_run *s, uint32_t file,
                         const struct layout_file_info *f, uint64_t from, uint64_t len,
                         uint32_t *crc)
{
    const struct save_filled *x = s->run->filled;

    return (is_filled(s->run, file) && x->sum(x->user, file, f, from, len, crc)) ||
           sums_find(&s->sums, file, f, from, len, crc);
}

/* What this run has written it knows; the rest is read. */
static int fill_sums(const struct stage_run *s, uint32_t file, int fd,
                     const struct layout_file_info *f, struct err *e)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < f->pieces; i++) {
        const struct layout_piece *p = &f->piece[i];
        unsigned char bytes[4];
        uint32_t crc = 0;

        if (p->kind != LAYOUT_CRC32)
            continue;
        if (!sum_is_known(s, file, f, p->from, p->sum, &crc))
            ret = range_crc(fd, f, p->from, p->sum, &crc, e);
        for (unsigned k = 0; k < 4; k++)
            bytes[k] = (unsigned char)(crc >> 8 * k);
        if (ret == 0)
            ret = write_at(fd, f, bytes, sizeof bytes, p->at, e);
    }
    return ret;
}

/* The last work on a file: checksums, and that the disk has it. */
static int end_nth(void *user, size_t n, struct err *e)
{
    struct stage_run *s = user;
    struct layout_file_info f;
    int fd, ret = 0;

    layout_file_info(s->run->layout, s->file[n], &f);
    fd = open_file(s, &f, O_RDWR, e);
    if (fd < 0)
        return fd;
    if (s->summed[s->file[n]])
        ret = fill_sums(s, s->file[n], fd, &f, e);
    if (ret == 0 && s->files < MANY_FILES && fsync(fd) < 0)
        ret = file_error(&f, e);
    ret = close_file(fd, &f, ret, e);
    return ret;
}

static int sync_nth(void *user, size_t n, struct err *e)
{
    struct stage_run *s = user;
    struct layout_file_info f;
    int fd, ret = 0;

    layout_file_info(s->run->layout, s->file[n], &f);
    fd = open_file(s, &f, O_RDWR, e);
    if (fd < 0)
        return fd;
    if (fdatasync(fd) < 0)
        ret = file_error(&f, e);
    ret = close_file(fd, &f, ret, e);
    return ret;
}

/* All that was written so far is on the disk. */
static int make_durable(struct stage_run *s, struct err *e)
{
    if (s->files < MANY_FILES)
        return pool_each(s->run->pool, s->files, sync_nth, s, e);
    return syncfs(s->run->dir) < 0 ? err_set(e, errno, "syncfs: %s", strerror(errno))
                                   : 0;
}

/* ---- buffers ---- */

static void *get_buffer(struct stage_run *s)
{
    void *b = NULL;

    pthread_mutex_lock(&s->lock);
    if (s->buffers > 0)
        b = s->buffer[--s->buffers];
    pthread_mutex_unlock(&s->lock);
    return b ? b : malloc(2 * (size_t)WINDOW);
}

static void put_buffer(struct stage_run *s, void *b)
{
    pthread_mutex_lock(&s->lock);
    if (s->buffers < BUFFERS)
        s->buffer[s->buffers++] = steal(&b);
    pthread_mutex_unlock(&s->lock);
    free(b);
}

static void report(struct stage_run *s, uint64_t bytes)
{
    if (!s->run->progress)
        return;
    pthread_mutex_lock(&s->lock);
    s->run->progress(s->run->user, bytes);
    pthread_mutex_unlock(&s->lock);
}

/* ---- units ---- */

static int tensor_units(const struct layout_tensor *t, struct shape *units,
                        unsigned *unit, struct err *e)
{
    *unit = dtype_unit(t->dtype);
    return shape_units(&t->shape, t->dtype, units, e);
}

/* Writes what the window has of one box. */
static int put_place(struct stage_run *s, const struct unit *u, const struct box *b,
                     const struct place *p, void *window, struct err *e)
{
    struct layout_file_info f;
    const void *bytes;
    uint64_t at, len;
    int fd, ret;

    box_overlap(b, u->off, u->len, &at, &len);
    if (len == 0)
        return 0;
    bytes = box_take(b, u->off, window, at, len, (char *)window + WINDOW);
    layout_file_info(s->run->layout, p->file, &f);
    fd = open_file(s, &f, O_WRONLY, e);
    if (fd < 0)
        return fd;
    pthread_mutex_lock(&s->turn[p->file % TURNS]);
    ret = write_at(fd, &f, bytes, len, p->piece->at + at, e);
    pthread_mutex_unlock(&s->turn[p->file % TURNS]);
    /* The disk begins now, not at the fsync; a hint that some file systems do not know. */
    if (ret == 0 && len >= EARLY)
        (void)sync_file_range(fd, (off_t)(p->piece->at + at), (off_t)len,
                              SYNC_FILE_RANGE_WRITE);
    ret = close_file(fd, &f, ret, e);
    if (ret == 0 && s->summed[p->file])
        sums_add(&s->sums, p->file, p->piece->at + at, bytes, len);
    report(s, len);
    return ret;
}

static int run_unit(void *user, size_t n, struct err *e)
{
    struct stage_run *s = user;
    const struct unit *u = &s->unit[s->base + n];
    const struct save_source *source = &s->run->source;
    void *window = get_buffer(s);
    struct shape units;
    unsigned unit;
    int ret = window ? 0 : err_nomem(e);

    if (ret == 0)
        ret = tensor_units(&s->run->input->tensor[u->tensor], &units, &unit, e);
    if (ret == 0)
        ret = source->read(source->user, u->tensor, u->off, (size_t)u->len, window, e);
    for (size_t i = s->first[u->tensor]; ret == 0 && i < s->first[u->tensor + 1]; i++) {
        const struct place *p = &s->place[i];
        const struct box b = {.units = &units,
                              .unit = unit,
                              .start = p->piece->start,
                              .size = p->piece->size};

        ret = put_place(s, u, &b, p, window, e);
    }
    if (window)
        put_buffer(s, window);
    return ret;
}

/* ---- files that are one compressed block ---- */

static int write_encoded(struct stage_run *s, const struct layout_file_info *f,
                         struct err *e)
{
    const struct gather g = {.input = s->run->input, .source = s->run->source};
    CLEANUP_FREE void *packed = NULL;
    size_t len;
    int ret = gather_encoded(&g, f, &packed, &len, e), fd;

    if (ret < 0)
        return ret;
    fd = open_file(s, f, O_WRONLY | O_TRUNC, e);
    if (fd < 0)
        return fd;
    ret = write_at(fd, f, packed, len, 0, e);
    ret = close_file(fd, f, ret, e);
    report(s, f->size);
    return ret;
}

static int encode_nth(void *user, size_t n, struct err *e)
{
    struct stage_run *s = user;
    struct layout_file_info f;

    layout_file_info(s->run->layout, s->file[n], &f);
    return f.codec == LAYOUT_PLAIN ? 0 : write_encoded(s, &f, e);
}

/* ---- the work of a stage ---- */

static int count_file(void *user, uint32_t i, const struct layout_file_info *f)
{
    struct stage_run *s = user;

    s->files++;
    for (size_t k = 0; k < f->pieces; k++)
        if (is_wanted(s->run, i, f, k))
            s->first[f->piece[k].tensor + 1]++;
    return 0;
}

struct filling {
    struct stage_run *s;
    size_t *next; /* place of each tensor's next box */
};

static int take_file(void *user, uint32_t i, const struct layout_file_info *f)
{
    struct filling *fill = user;
    struct stage_run *s = fill->s;

    s->file[s->files++] = i;
    for (size_t k = 0; k < f->pieces; k++)
        s->summed[i] |= f->piece[k].kind == LAYOUT_CRC32;
    for (size_t k = 0; k < f->pieces; k++)
        if (is_wanted(s->run, i, f, k))
            s->place[fill->next[f->piece[k].tensor]++] =
                (struct place){.file = i, .piece = &f->piece[k]};
    return 0;
}

/* The files and, for each tensor, its boxes in them. */
static int collect(struct stage_run *s, struct err *e)
{
    size_t tensors = s->run->input->tensors, files;
    struct filling fill = {.s = s};

    s->first = calloc(tensors + 2, sizeof *s->first);
    if (!s->first)
        return err_nomem(e);
    save_each_file(s->run, s->stage, count_file, s);
    files = s->files;
    for (size_t i = 0; i < tensors; i++)
        s->first[i + 1] += s->first[i];
    s->file = calloc(files + 1, sizeof *s->file);
    s->place = calloc(s->first[tensors] + 1, sizeof *s->place);
    s->summed = calloc(layout_files(s->run->layout) + 1, sizeof *s->summed);
    fill.next = calloc(tensors + 1, sizeof *fill.next);
    if (!s->file || !s->place || !s->summed || !fill.next) {
        free(fill.next);
        return err_nomem(e);
    }
    memcpy(fill.next, s->first, tensors * sizeof *fill.next);
    s->files = 0;
    save_each_file(s->run, s->stage, take_file, &fill);
    free(fill.next);
    return 0;
}

/* Bytes of the tensor that any of our boxes needs: from the first to the last. */
static void needed_span(const struct stage_run *s, size_t tensor,
                        const struct shape *units, unsigned unit, uint64_t *first,
                        uint64_t *end)
{
    *first = UINT64_MAX;
    *end = 0;
    for (size_t i = s->first[tensor]; i < s->first[tensor + 1]; i++) {
        const struct layout_piece *p = s->place[i].piece;
        const struct box b = {
            .units = units, .unit = unit, .start = p->start, .size = p->size};
        uint64_t from, to;

        box_span(&b, &from, &to);
        *first = MIN(*first, from);
        *end = MAX(*end, to);
    }
}

/* Counts (out NULL) or lists the windows of one tensor. */
static size_t windows_of(uint32_t tensor, uint64_t first, uint64_t end,
                         struct unit *out)
{
    size_t n = 0;

    for (; first < end; first += WINDOW, n++)
        if (out)
            out[n] = (struct unit){.tensor = tensor,
                                   .off = first,
                                   .len = MIN(end - first, (uint64_t)WINDOW)};
    return n;
}

/* All windows, in the order in which the files have their tensors. */
static int list_units(struct stage_run *s, struct err *e)
{
    size_t cap = 0;

    for (int pass = 0; pass < 2; pass++) {
        size_t n = 0;

        for (size_t t = 0; t < s->run->input->tensors; t++) {
            struct shape units;
            uint64_t first, end;
            unsigned unit;

            if (s->first[t] == s->first[t + 1])
                continue;
            TRY(tensor_units(&s->run->input->tensor[t], &units, &unit, e));
            needed_span(s, t, &units, unit, &first, &end);
            n += windows_of((uint32_t)t, first, end, s->unit ? s->unit + n : NULL);
        }
        cap = n;
        if (!s->unit && !(s->unit = calloc(cap + 1, sizeof *s->unit)))
            return err_nomem(e);
    }
    s->units = cap;
    return 0;
}

static int sync_directories(const struct save_run *r, struct err *e);

/*
 * The journal may say only what a disk has after a power loss: a file whose bytes are
 * durable and whose name is not would be made anew, empty, by the run that goes on.
 */
static int note(struct stage_run *s, bool done, struct err *e)
{
    uint64_t units = done ? s->units : s->base;

    if (!s->run->staging)
        return 0;
    if (!s->named && s->files < MANY_FILES)
        TRY(sync_directories(s->run, e));
    s->named = true;
    return staging_note(s->run->staging, s->stage, units, done, e);
}

static int run_units(struct stage_run *s, uint64_t from, struct err *e)
{
    int ret = 0;

    for (s->base = (size_t)MIN(from, (uint64_t)s->units); s->base < s->units;) {
        size_t n = MIN(s->units - s->base, (size_t)BATCH);

        ret = pool_each(s->run->pool, n, run_unit, s, e);
        if (ret < 0)
            return ret;
        s->base += n;
        if (s->base < s->units)
            ret = make_durable(s, e);
        if (ret == 0 && s->base < s->units)
            ret = note(s, false, e);
        if (ret < 0)
            return ret;
    }
    return 0;
}

static int run_stage(struct stage_run *s, struct err *e)
{
    struct pool *pool = s->run->pool;
    struct staging *staging = s->run->staging;
    bool done = false;
    uint64_t from = staging ? staging_progress(staging, s->stage, &done) : 0;
    int ret;

    if (done)
        return 0;
    ret = collect(s, e);
    if (ret == 0)
        ret = list_units(s, e);
    if (ret == 0)
        ret = pool_each(pool, s->files, begin_nth, s, e);
    if (ret == 0)
        ret = run_units(s, from, e);
    if (ret == 0)
        ret = pool_each(pool, s->files, encode_nth, s, e);
    sums_settle(&s->sums);
    if (ret == 0)
        ret = pool_each(pool, s->files, end_nth, s, e);
    if (ret == 0 && s->files >= MANY_FILES)
        ret = make_durable(s, e);
    return ret == 0 ? note(s, true, e) : ret;
}

static void stage_release(struct stage_run *s)
{
    while (s->buffers > 0)
        free(s->buffer[--s->buffers]);
    free(s->file);
    free(s->place);
    free(s->first);
    free(s->unit);
    free(s->summed);
    sums_release(&s->sums);
    for (unsigned i = 0; i < TURNS; i++)
        pthread_mutex_destroy(&s->turn[i]);
    pthread_mutex_destroy(&s->lock);
}

/* ---- all of it ---- */

struct room {
    const struct save_run *run;
    uint64_t need; /* bytes that the file system has to find */
};

/* What a run before this one has written has its room already. */
static int add_room(void *user, uint32_t i, const struct layout_file_info *f)
{
    struct room *room = user;
    uint64_t has = 0;
    struct stat st;

    (void)i;
    if (fstatat(room->run->dir, f->path, &st, AT_SYMLINK_NOFOLLOW) == 0)
        has = (uint64_t)st.st_blocks * 512;
    room->need += f->size - MIN(has, f->size);
    return 0;
}

static int check_room(const struct save_run *r, struct err *e)
{
    struct room room = {.run = r};
    struct statvfs v;
    uint64_t have;

    if (fstatvfs(r->dir, &v) < 0)
        return 0; /* then writing will tell */
    for (unsigned s = 0; s <= save_last_stage(r->layout); s++)
        save_each_file(r, s, add_room, &room);
    have = (uint64_t)v.f_bavail * v.f_frsize;
    if (room.need <= have)
        return 0;
    err_set(e, ENOSPC, "%" PRIu64 " bytes are needed, %" PRIu64 " are free", room.need,
            have);
    return err_hint(e, "save to another disk, or make room on this one");
}

static int make_directories(const struct save_run *r, struct err *e)
{
    int dir = r->dir;

    for (size_t i = 0; r->other_stages && i < layout_directories(r->layout); i++) {
        const char *path = layout_directory_at(r->layout, i);

        TRY(make_parents(dir, path, e));
        if (mkdirat(dir, path, 0777) < 0 && errno != EEXIST)
            return err_set(e, errno, "%s: %s", path, strerror(errno));
    }
    return 0;
}

static int sync_directory(int dir, const char *path, size_t len, struct err *e)
{
    char name[PATH_MAX] = ".";
    int fd, ret = 0;

    if (len > 0) {
        memcpy(name, path, len);
        name[len] = '\0';
    }
    fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) < 0)
        ret = err_set(e, errno, "fsync %s: %s", name, strerror(errno));
    if (fd >= 0)
        close(fd);
    return ret;
}

/*
 * Names are durable only when their directories are: those above each file, where they
 * are not those of the file before.
 */
static int sync_directories(const struct save_run *r, struct err *e)
{
    int dir = r->dir, ret = sync_directory(dir, "", 0, e);
    const char *before = "";
    struct layout_file_info f;

    for (size_t i = 0; ret == 0 && i < layout_files(r->layout); i++) {
        layout_file_info(r->layout, i, &f);
        if (!strchr(f.path, '/') || faccessat(dir, f.path, F_OK, 0) < 0)
            continue; /* of a later stage, or another part's */
        for (const char *slash = strchr(f.path, '/'); ret == 0 && slash;
             slash = strchr(slash + 1, '/')) {
            size_t len = (size_t)(slash - f.path);

            if (strncmp(before, f.path, len + 1) != 0)
                ret = sync_directory(dir, f.path, len, e);
        }
        before = f.path;
    }
    return ret;
}

/*
 * Before it is published: what journals say was written, by us, before, or by others, is
 * there. (A disk that lost its latest names would otherwise make a checkpoint with holes.)
 */
static int check_files(const struct save_run *r, struct err *e)
{
    struct layout_file_info f;
    struct stat st;

    for (size_t i = 0; i < layout_files(r->layout); i++) {
        layout_file_info(r->layout, i, &f);
        if (fstatat(r->dir, f.path, &st, AT_SYMLINK_NOFOLLOW) < 0)
            return file_error(&f, e);
        if (!S_ISREG(st.st_mode) ||
            (f.codec == LAYOUT_PLAIN ? (uint64_t)st.st_size != f.size
                                     : f.size > 0 && st.st_size == 0))
            return err_set(e, EIO, "%s: %" PRIu64 " bytes are staged, not %" PRIu64,
                           f.path, (uint64_t)st.st_size, f.size);
    }
    return 0;
}

int save_write(const struct save_run *r, struct err *e)
{
    unsigned last = save_last_stage(r->layout);
    bool done = false;
    int ret = 0;

    if (r->staging)
        staging_progress(r->staging, 0, &done);
    if (!done)
        TRY(check_room(r, e));
    for (unsigned stage = 0; ret == 0 && stage <= last; stage++) {
        struct stage_run s = {.run = r, .stage = stage};

        if (stage == 0 ? !r->first_stage : !r->other_stages)
            continue;
        pthread_mutex_init(&s.lock, NULL);
        for (unsigned i = 0; i < TURNS; i++)
            pthread_mutex_init(&s.turn[i], NULL);
        sums_init(&s.sums);
        ret = run_stage(&s, e);
        stage_release(&s);
    }
    if (ret == 0)
        ret = make_directories(r, e);
    if (ret == 0 && r->other_stages)
        ret = check_files(r, e);
    return ret == 0 ? sync_directories(r, e) : ret;
}
