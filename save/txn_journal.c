/* SPDX-License-Identifier: MIT */
/* save/txn_journal.c - what a transaction's journal says: from lines, and as lines. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "save/lines.h"
#include "save/txn_priv.h"

static const char first_line[] = "unshardfs transaction 1";

enum {
    WORD_MAX = 64,
    TEXT_MAX = 64 << 10, /* of a note */
};

/* ---- words ---- */

bool txn_path_is_safe(const char *path)
{
    return publish_path_is_safe(path);
}

static bool is_word(const char *word)
{
    size_t len = strspn(word, "abcdefghijklmnopqrstuvwxyz0123456789-.");

    return len > 0 && len < WORD_MAX && word[len] == '\0';
}

int txn_word_check(const char *word, struct err *e)
{
    return is_word(word) ? 0
                         : err_set(e, EINVAL, "\"%s\" is not a word for a note", word);
}

/* ---- writing lines ---- */

void txn_line_target(const struct txn_journal *j, struct buf *out)
{
    size_t begin = lines_begin(out);

    buf_addf(out, "target %" PRIu64, j->target_ino);
    lines_add_path(out, j->target);
    lines_end(out, begin);
}

/* A text may be empty: a '=' stands before it. */
static void add_text(const char *text, struct buf *out)
{
    buf_adds(out, " =");
    if (*text) {
        CLEANUP(buf_release) struct buf coded = {0};

        lines_add_path(&coded, text);
        if (buf_failed(&coded))
            out->failed = out->failed ? out->failed : coded.failed;
        else
            buf_adds(out, coded.data + 1);
    }
}

void txn_line_note(const char *word, const char *text, struct buf *out)
{
    size_t begin = lines_begin(out);

    buf_addf(out, "%s %s", text ? "note" : "unnote", word);
    if (text)
        add_text(text, out);
    lines_end(out, begin);
}

void txn_line_base(const char *path, const struct file_id *id, struct buf *out)
{
    size_t begin = lines_begin(out);

    buf_addf(out, "base %" PRIu64 " %" PRIu64 " %" PRId64 " %" PRId64, id->ino,
             id->size, id->mtime_ns, id->ctime_ns);
    lines_add_path(out, path);
    lines_end(out, begin);
}

void txn_line_path(const char *word, const char *path, struct buf *out)
{
    size_t begin = lines_begin(out);

    buf_adds(out, word);
    lines_add_path(out, path);
    lines_end(out, begin);
}

void txn_line_file(const struct txn_file *f, struct buf *out)
{
    size_t begin = lines_begin(out);

    buf_addf(out, "file %" PRIu64 " %u %u %u %u", f->id, (unsigned)f->uid,
             (unsigned)f->gid, (unsigned)f->mode, (unsigned)f->elsewhere);
    lines_add_path(out, f->key.name);
    lines_end(out, begin);
}

void txn_line_file_note(const struct txn_file *f, const char *word, const char *text,
                        struct buf *out)
{
    size_t begin = lines_begin(out);

    buf_addf(out, "%s %" PRIu64 " %s", text ? "file-note" : "file-unnote", f->id, word);
    if (text)
        add_text(text, out);
    lines_end(out, begin);
}

void txn_line_file_path(const struct txn_file *f, struct buf *out)
{
    size_t begin = lines_begin(out);

    buf_addf(out, "path %" PRIu64, f->id);
    lines_add_path(out, f->key.name);
    lines_end(out, begin);
}

void txn_line_numbers(const char *word, uint64_t id, const uint64_t *number,
                      size_t count, struct buf *out)
{
    size_t begin = lines_begin(out);

    buf_addf(out, "%s %" PRIu64, word, id);
    for (size_t i = 0; i < count; i++)
        buf_addf(out, " %" PRIu64, number[i]);
    lines_end(out, begin);
}

static void line_owner(const struct txn_owner *o, struct buf *out)
{
    size_t begin = lines_begin(out);

    buf_adds(out, "owner");
    add_text(o->host, out);
    add_text(o->boot, out);
    buf_addf(out, " %" PRIu64, o->pid);
    lines_end(out, begin);
}

static void line_ranges(const char *word, uint64_t id, const struct ranges *r,
                        struct buf *out)
{
    for (size_t i = 0; i < r->count; i++)
        txn_line_numbers(word, id, (uint64_t[]){r->range[i].from, r->range[i].to}, 2,
                         out);
}

int txn_line_got(struct txn_file *f, struct buf *out)
{
    struct range gap;

    for (size_t i = 0; i < f->arrived.count; i++) {
        const struct range *r = &f->arrived.range[i];

        for (uint64_t at = r->from; ranges_next_gap(&f->told, &at, r->to, &gap);)
            txn_line_numbers("got", f->id, (uint64_t[]){gap.from, gap.to}, 2, out);
    }
    if (ranges_copy(&f->told, &f->arrived) < 0)
        return -ENOMEM;
    f->dirty = false;
    return 0;
}

static void file_text(const struct txn_file *f, struct buf *out)
{
    txn_line_file(f, out);
    if (f->expected)
        txn_line_numbers("expect", f->id, &f->expected, 1, out);
    for (size_t i = 0; i < f->notes.count; i++) {
        const struct txn_note_item *n =
            container_of(f->notes.item[i], struct txn_note_item, key);

        txn_line_file_note(f, n->key.name, n->text, out);
    }
    line_ranges("got", f->id, &f->arrived, out);
    line_ranges("synced", f->id, &f->synced, out);
}

int txn_journal_text(const struct txn_journal *j, struct buf *out)
{
    lines_add(out, first_line);
    line_owner(&j->owner, out);
    if (j->target)
        txn_line_target(j, out);
    for (size_t i = 0; i < j->notes.count; i++) {
        const struct txn_note_item *n =
            container_of(j->notes.item[i], struct txn_note_item, key);

        txn_line_note(n->key.name, n->text, out);
    }
    for (size_t i = 0; i < j->base.count; i++)
        txn_line_base(j->base.item[i]->name,
                      &container_of(j->base.item[i], struct txn_base_item, key)->id,
                      out);
    for (size_t i = 0; i < j->gone.count; i++)
        txn_line_path("remove", j->gone.item[i]->name, out);
    for (size_t i = 0; i < j->ids; i++)
        file_text(j->by_id[i], out);
    return buf_failed(out) ? -ENOMEM : 0;
}

/* ---- reading lines ---- */

static int no_journal(const char *what, struct err *e)
{
    return err_set(e, EBADMSG, "the journal of the transaction is damaged: %s", what);
}

static int done(int ret, struct err *e)
{
    if (ret == -ENOMEM)
        return err_nomem(e);
    return ret < 0 ? no_journal("a name is there twice", e) : 0;
}

/* The last word of a line as a path that is safe. */
static int read_path(char **line, char **out, struct err *e)
{
    bool nomem = false;
    char *path = lines_path(line, &nomem);

    if (nomem)
        return err_nomem(e);
    if (!path || *line || !txn_path_is_safe(path)) {
        free(path);
        return no_journal("a path", e);
    }
    *out = path;
    return 0;
}

/* "=TEXT", encoded. */
static int read_text(char **line, size_t max, char **out, struct err *e)
{
    char *word = lines_word(line), *text;
    bool nomem = false, empty;

    if (!word || *word != '=')
        return no_journal("a text", e);
    word++;
    empty = *word == '\0';
    text = empty ? strdup("") : lines_path(&word, &nomem);
    if (!text)
        return nomem || empty ? err_nomem(e) : no_journal("a text", e);
    if (strlen(text) > max) {
        free(text);
        return no_journal("a text", e);
    }
    *out = text;
    return 0;
}

static int read_owner(struct txn_journal *j, char *line, struct err *e)
{
    CLEANUP_FREE char *host = NULL;
    CLEANUP_FREE char *boot = NULL;
    struct txn_owner *o = &j->owner;
    bool again = o->boot[0] != '\0';
    int ret = read_text(&line, sizeof o->host - 1, &host, e);

    if (ret == 0)
        ret = read_text(&line, sizeof o->boot - 1, &boot, e);
    if (ret < 0)
        return ret;
    if (!lines_number(&line, &o->pid) || line)
        return no_journal("an owner", e);
    /* Bytes that the last boot had, and its disk had not, are lost. */
    for (size_t i = 0; again && strcmp(o->boot, boot) != 0 && i < j->ids; i++)
        if (ranges_copy(&j->by_id[i]->arrived, &j->by_id[i]->synced) < 0)
            return err_nomem(e);
    snprintf(o->host, sizeof o->host, "%s", host);
    snprintf(o->boot, sizeof o->boot, "%s", boot);
    return 0;
}

static int read_target(struct txn_journal *j, char *line, struct err *e)
{
    bool nomem = false;
    char *name;

    if (!lines_number(&line, &j->target_ino))
        return no_journal("a target", e);
    name = lines_path(&line, &nomem);
    if (nomem)
        return err_nomem(e);
    if (!name || line || strchr(name, '/') || strcmp(name, "..") == 0 ||
        strlen(name) > NAME_MAX) {
        free(name);
        return no_journal("a target", e);
    }
    free(j->target);
    j->target = name;
    return 0;
}

static int read_note_of(struct names *notes, bool set, char *line, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    const char *word = lines_word(&line);
    int ret;

    if (!word || !is_word(word))
        return no_journal("a note", e);
    ret = set ? read_text(&line, TEXT_MAX, &text, e) : 0;
    if (ret < 0)
        return ret;
    return line ? no_journal("a note", e) : done(txn_set_note(notes, word, text), e);
}

static int read_note(struct txn_journal *j, char *line, struct err *e)
{
    return read_note_of(&j->notes, true, line, e);
}

static int read_unnote(struct txn_journal *j, char *line, struct err *e)
{
    return read_note_of(&j->notes, false, line, e);
}

static int read_base(struct txn_journal *j, char *line, struct err *e)
{
    CLEANUP_FREE char *path = NULL;
    struct file_id id = {0};
    int ret;

    if (!lines_number(&line, &id.ino) || !lines_number(&line, &id.size) ||
        !lines_signed(&line, &id.mtime_ns) || !lines_signed(&line, &id.ctime_ns))
        return no_journal("a file of the target", e);
    ret = read_path(&line, &path, e);
    return ret < 0 ? ret : done(txn_set_base(j, path, &id), e);
}

static int read_remove(struct txn_journal *j, char *line, struct err *e)
{
    CLEANUP_FREE char *path = NULL;
    int ret = read_path(&line, &path, e);

    return ret < 0 ? ret : done(txn_set_gone(j, path), e);
}

static int read_unremove(struct txn_journal *j, char *line, struct err *e)
{
    CLEANUP_FREE char *path = NULL;
    int ret = read_path(&line, &path, e);

    if (ret == 0)
        txn_unset_gone(j, path);
    return ret;
}

static int read_file(struct txn_journal *j, char *line, struct err *e)
{
    CLEANUP_FREE char *path = NULL;
    uint64_t id, uid, gid, mode, elsewhere;
    struct txn_file *f;

    if (!lines_number(&line, &id) || !lines_number(&line, &uid) ||
        !lines_number(&line, &gid) || !lines_number(&line, &mode) ||
        !lines_number(&line, &elsewhere) || id < j->next_id || id >= INT64_MAX ||
        uid > UINT32_MAX || gid > UINT32_MAX || mode > 07777 || elsewhere > 1)
        return no_journal("a file", e);
    TRY(read_path(&line, &path, e));
    if (names_find(&j->files, path))
        return no_journal("a file is there twice", e);
    f = txn_file_make(j, path, id);
    if (!f)
        return err_nomem(e);
    f->uid = (uid_t)uid;
    f->gid = (gid_t)gid;
    f->mode = (mode_t)mode;
    f->elsewhere = elsewhere;
    return 0;
}

/* The file of a line: its next number. */
static struct txn_file *read_id(const struct txn_journal *j, char **line)
{
    uint64_t id;

    return lines_number(line, &id) ? txn_journal_file(j, id) : NULL;
}

static int no_file(struct err *e)
{
    return no_journal("a file that it does not have", e);
}

static int read_own(struct txn_journal *j, char *line, struct err *e)
{
    struct txn_file *f = read_id(j, &line);
    uint64_t uid, gid, mode;

    if (!f)
        return no_file(e);
    if (!lines_number(&line, &uid) || !lines_number(&line, &gid) ||
        !lines_number(&line, &mode) || line || uid > UINT32_MAX || gid > UINT32_MAX ||
        mode > 07777)
        return no_journal("an owner of a file", e);
    f->uid = (uid_t)uid;
    f->gid = (gid_t)gid;
    f->mode = (mode_t)mode;
    return 0;
}

static int read_rename(struct txn_journal *j, char *line, struct err *e)
{
    CLEANUP_FREE char *path = NULL;
    struct txn_file *f = read_id(j, &line);

    if (!f)
        return no_file(e);
    TRY(read_path(&line, &path, e));
    if (names_find(&j->files, path))
        return no_journal("a file is there twice", e);
    return done(txn_file_relist(j, f, path), e);
}

static int read_drop(struct txn_journal *j, char *line, struct err *e)
{
    struct txn_file *f = read_id(j, &line);

    if (!f || line)
        return no_file(e);
    txn_file_unlist(j, f);
    txn_file_unref(f);
    return 0;
}

static int read_file_note(struct txn_journal *j, char *line, struct err *e)
{
    struct txn_file *f = read_id(j, &line);

    return f ? read_note_of(&f->notes, true, line, e) : no_file(e);
}

static int read_file_unnote(struct txn_journal *j, char *line, struct err *e)
{
    struct txn_file *f = read_id(j, &line);

    return f ? read_note_of(&f->notes, false, line, e) : no_file(e);
}

static int read_expect(struct txn_journal *j, char *line, struct err *e)
{
    struct txn_file *f = read_id(j, &line);
    uint64_t size;

    if (!f)
        return no_file(e);
    if (!lines_number(&line, &size) || line || size > INT64_MAX)
        return no_journal("a size", e);
    f->expected = size;
    return 0;
}

/* [from, to) of a line. */
static int read_range(char *line, struct range *out, struct err *e)
{
    if (!lines_number(&line, &out->from) || !lines_number(&line, &out->to) || line ||
        out->from >= out->to || out->to > INT64_MAX)
        return no_journal("a range", e);
    return 0;
}

static int read_got(struct txn_journal *j, char *line, struct err *e)
{
    struct txn_file *f = read_id(j, &line);
    struct range r;
    int ret = f ? read_range(line, &r, e) : no_file(e);

    return ret < 0 ? ret : done(ranges_add(&f->arrived, r.from, r.to), e);
}

static int read_synced(struct txn_journal *j, char *line, struct err *e)
{
    struct txn_file *f = read_id(j, &line);
    struct range r;
    int ret = f ? read_range(line, &r, e) : no_file(e);

    if (ret == 0)
        ret = done(ranges_add(&f->arrived, r.from, r.to), e);
    return ret < 0 ? ret : done(ranges_add(&f->synced, r.from, r.to), e);
}

static int read_unsynced(struct txn_journal *j, char *line, struct err *e)
{
    struct txn_file *f = read_id(j, &line);
    struct range r;
    int ret = f ? read_range(line, &r, e) : no_file(e);

    return ret < 0 ? ret : done(ranges_remove(&f->synced, r.from, r.to), e);
}

static int read_lost(struct txn_journal *j, char *line, struct err *e)
{
    struct txn_file *f = read_id(j, &line);
    struct range r;
    int ret = f ? read_range(line, &r, e) : no_file(e);

    if (ret == 0)
        ret = done(ranges_remove(&f->arrived, r.from, r.to), e);
    return ret < 0 ? ret : done(ranges_remove(&f->synced, r.from, r.to), e);
}

static int read_refused(struct txn_journal *j, char *line, struct err *e)
{
    struct txn_file *f = read_id(j, &line);

    if (!f || line)
        return no_file(e);
    return done(ranges_copy(&f->arrived, &f->synced), e);
}

static const struct {
    const char *word;
    int (*read)(struct txn_journal *j, char *line, struct err *e);
} readers[] = {
    {"got", read_got},
    {"synced", read_synced},
    {"unsynced", read_unsynced},
    {"lost", read_lost},
    {"refused", read_refused},
    {"file", read_file},
    {"drop", read_drop},
    {"path", read_rename},
    {"own", read_own},
    {"expect", read_expect},
    {"file-note", read_file_note},
    {"file-unnote", read_file_unnote},
    {"base", read_base},
    {"remove", read_remove},
    {"unremove", read_unremove},
    {"note", read_note},
    {"unnote", read_unnote},
    {"owner", read_owner},
    {"target", read_target},
};

static int read_line(struct txn_journal *j, char *line, struct err *e)
{
    const char *word = lines_word(&line);

    for (size_t i = 0; word && i < ARRAY_SIZE(readers); i++)
        if (strcmp(word, readers[i].word) == 0)
            return readers[i].read(j, line, e);
    return no_journal("a line of another version", e);
}

int txn_journal_read(struct txn_journal *j, char *text, size_t len, size_t *whole,
                     struct err *e)
{
    struct lines l = {.text = text, .len = len};
    const char *line = lines_next(&l);
    char *next;
    int ret = 0;

    if (!line || strcmp(line, first_line) != 0)
        return no_journal("its first line", e);
    while (ret == 0 && (next = lines_next(&l)))
        ret = read_line(j, next, e);
    *whole = l.at;
    if (ret == 0 && (!j->owner.boot[0] || !j->target))
        ret = no_journal("it does not say whose it is", e);
    for (size_t i = 0; ret == 0 && i < j->ids; i++)
        ret = done(ranges_copy(&j->by_id[i]->told, &j->by_id[i]->arrived), e);
    return ret;
}
