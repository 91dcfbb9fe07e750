/* SPDX-License-Identifier: MIT */
/* save/publish_redo.c - the journal of a step: as text, and back. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "base/err.h"
#include "save/lines.h"
#include "save/publish_priv.h"
#include "save/staged.h"

enum { MAX_STAGE = 255 };

static const char *const kind_names[] = {
    [PUBLISH_PUT] = "put", [PUBLISH_REMOVE] = "remove", [PUBLISH_HOLD] = "hold"};

void step_init(struct step *s)
{
    *s = (struct step){.target = -1, .staging = -1, .data = -1, .old = -1};
}

void step_release(struct step *s)
{
    const int fd[] = {s->target, s->staging, s->data, s->old};

    for (size_t i = 0; i < s->entries; i++)
        free(s->entry[i].path);
    for (size_t i = 0; i < s->dirs; i++)
        free(s->dir[i].path);
    for (size_t i = 0; i < ARRAY_SIZE(fd); i++)
        if (fd[i] >= 0)
            close(fd[i]);
    free(s->entry);
    free(s->dir);
    free(s->note);
    step_init(s);
}

/* Room for one more item. */
static int grow(void **items, size_t count, size_t *cap, size_t size)
{
    size_t more = *cap ? *cap * 2 : 32;
    void *grown;

    if (count < *cap)
        return 0;
    grown = reallocarray(*items, more, size);
    if (!grown)
        return -ENOMEM;
    *items = grown;
    *cap = more;
    return 0;
}

int step_add(struct step *s, const struct step_entry *entry, struct err *e)
{
    void *items = s->entry;

    if (!entry->path || grow(&items, s->entries, &s->entry_cap, sizeof *entry) < 0) {
        free(entry->path);
        return err_nomem(e);
    }
    s->entry = items;
    s->entry[s->entries++] = *entry;
    return 0;
}

int step_add_dir(struct step *s, const struct step_dir *dir, struct err *e)
{
    void *items = s->dir;

    if (!dir->path || grow(&items, s->dirs, &s->dir_cap, sizeof *dir) < 0) {
        free(dir->path);
        return err_nomem(e);
    }
    s->dir = items;
    s->dir[s->dirs++] = *dir;
    return 0;
}

static int by_path(const void *a, const void *b)
{
    const struct step_entry *x = a, *y = b;

    return strcmp(x->path, y->path);
}

static int by_stage(const void *a, const void *b)
{
    const struct step_entry *x = a, *y = b;

    if (x->stage != y->stage)
        return x->stage < y->stage ? -1 : 1;
    return strcmp(x->path, y->path);
}

static int dirs_by_path(const void *a, const void *b)
{
    const struct step_dir *x = a, *y = b;

    return strcmp(x->path, y->path);
}

int step_sort(struct step *s, struct err *e)
{
    size_t kept = 0;

    if (s->entries)
        qsort(s->entry, s->entries, sizeof *s->entry, by_path);
    for (size_t i = 1; i < s->entries; i++)
        if (strcmp(s->entry[i - 1].path, s->entry[i].path) == 0)
            return err_set(e, EINVAL, "%s is twice in one step", s->entry[i].path);
    if (s->entries)
        qsort(s->entry, s->entries, sizeof *s->entry, by_stage);
    if (s->dirs)
        qsort(s->dir, s->dirs, sizeof *s->dir, dirs_by_path);
    for (size_t i = 0; i < s->dirs; i++) /* each once */
        if (kept && strcmp(s->dir[kept - 1].path, s->dir[i].path) == 0)
            free(s->dir[i].path);
        else
            s->dir[kept++] = s->dir[i];
    s->dirs = kept;
    return 0;
}

/* ---- text ---- */

int step_text(const struct step *s, struct buf *out, struct err *e)
{
    size_t begin = lines_begin(out);

    buf_addf(out, "unshardfs step 1 target %" PRIu64, s->target_ino);
    lines_end(out, begin);
    if (s->note) {
        begin = lines_begin(out);
        buf_adds(out, "note");
        if (*s->note)
            lines_add_path(out, s->note);
        lines_end(out, begin);
    }
    for (size_t i = 0; i < s->dirs; i++) {
        const struct step_dir *d = &s->dir[i];

        begin = lines_begin(out);
        buf_addf(out, "dir %u %" PRIu32 " %" PRIu32 " %" PRIu32, (unsigned)d->there,
                 d->mode, d->uid, d->gid);
        lines_add_path(out, d->path);
        lines_end(out, begin);
    }
    for (size_t i = 0; i < s->entries; i++) {
        const struct step_entry *n = &s->entry[i];

        begin = lines_begin(out);
        buf_addf(out,
                 "%s %u %u %" PRIu64 " %" PRIu64 " %" PRId64 " %" PRIu64 " %" PRIu64,
                 kind_names[n->kind], n->stage, (unsigned)n->had, n->old.ino,
                 n->old.size, n->old.mtime_ns, n->ino, n->size);
        lines_add_path(out, n->path);
        lines_end(out, begin);
    }
    lines_add(out, "end");
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int no_journal(struct err *e)
{
    return err_set(e, EBADMSG, "the journal of the step is damaged");
}

/* A path of the journal: to be freed. */
static int read_path(char **line, char **out, struct err *e)
{
    bool nomem = false;
    char *path = lines_path(line, &nomem);

    if (nomem)
        return err_nomem(e);
    if (!path || *line || !publish_path_is_safe(path)) {
        free(path);
        return no_journal(e);
    }
    *out = path;
    return 0;
}

static int read_dir(struct step *s, char *line, struct err *e)
{
    uint64_t there, mode, uid, gid;
    struct step_dir d = {0};
    int ret;

    if (!lines_number(&line, &there) || !lines_number(&line, &mode) ||
        !lines_number(&line, &uid) || !lines_number(&line, &gid) || there > 1 ||
        mode > 07777 || uid > UINT32_MAX || gid > UINT32_MAX)
        return no_journal(e);
    d.there = there;
    d.mode = (uint32_t)mode;
    d.uid = (uint32_t)uid;
    d.gid = (uint32_t)gid;
    ret = read_path(&line, &d.path, e);
    return ret < 0 ? ret : step_add_dir(s, &d, e);
}

static int read_entry(struct step *s, enum publish_kind kind, char *line, struct err *e)
{
    struct step_entry n = {.kind = kind};
    uint64_t stage, had;
    int ret;

    if (!lines_number(&line, &stage) || !lines_number(&line, &had) ||
        !lines_number(&line, &n.old.ino) || !lines_number(&line, &n.old.size) ||
        !lines_signed(&line, &n.old.mtime_ns) || !lines_number(&line, &n.ino) ||
        !lines_number(&line, &n.size) || stage > MAX_STAGE || had > 1 ||
        (kind != PUBLISH_PUT && !had))
        return no_journal(e);
    n.stage = (unsigned)stage;
    n.had = had;
    ret = read_path(&line, &n.path, e);
    return ret < 0 ? ret : step_add(s, &n, e);
}

static int read_note(struct step *s, char *line, struct err *e)
{
    bool nomem = false, empty = !line;
    char *note = empty ? strdup("") : lines_path(&line, &nomem);

    if (!note)
        return nomem || empty ? err_nomem(e) : no_journal(e);
    if (s->note || line) {
        free(note);
        return no_journal(e);
    }
    s->note = note;
    return 0;
}

static int read_line(struct step *s, char *line, struct err *e)
{
    const char *word = lines_word(&line);

    if (!word)
        return no_journal(e);
    if (strcmp(word, "note") == 0)
        return read_note(s, line, e);
    if (strcmp(word, "dir") == 0)
        return read_dir(s, line, e);
    for (unsigned i = 0; i < ARRAY_SIZE(kind_names); i++)
        if (strcmp(word, kind_names[i]) == 0)
            return read_entry(s, (enum publish_kind)i, line, e);
    return no_journal(e);
}

/* Entries are written sorted: a number in old/ is a place in that order. */
static int check_sorted(struct step *s, struct err *e)
{
    for (size_t i = 1; i < s->entries; i++)
        if (by_stage(&s->entry[i - 1], &s->entry[i]) >= 0)
            return no_journal(e);
    for (size_t i = 1; i < s->dirs; i++)
        if (dirs_by_path(&s->dir[i - 1], &s->dir[i]) >= 0)
            return no_journal(e);
    return step_sort(s, e) < 0 ? no_journal(e) : 0;
}

int step_read(struct step *s, char *text, size_t len, struct err *e)
{
    static const char head[] = "unshardfs step 1 target ";
    struct lines l = {.text = text, .len = len};
    char *line = lines_next(&l), *ino = line ? line + sizeof head - 1 : NULL;

    if (!line || strncmp(line, head, sizeof head - 1) != 0 ||
        !lines_number(&ino, &s->target_ino) || ino)
        return no_journal(e);
    while ((line = lines_next(&l)) && strcmp(line, "end") != 0)
        TRY(read_line(s, line, e));
    if (!line || l.at != l.len)
        return no_journal(e);
    return check_sorted(s, e);
}

int step_load(struct step *s, int staging, const char *name, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {.max = STEP_TEXT_MAX};
    CLEANUP_FD int fd =
        openat(staging, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat st;
    char *dst;
    int ret;

    if (fd < 0 || fstat(fd, &st) < 0)
        return staged_fail(e, "open the journal of a step,", name);
    if (!S_ISREG(st.st_mode) || st.st_size >= STEP_TEXT_MAX)
        return no_journal(e);
    dst = buf_grow(&text, (size_t)st.st_size + 1);
    if (!dst)
        return err_nomem(e);
    ret = read_exact(fd, dst, (size_t)st.st_size, 0, e);
    return ret < 0 ? ret : step_read(s, dst, (size_t)st.st_size, e);
}
