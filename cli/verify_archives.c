/* SPDX-License-Identifier: MIT */
/* cli/verify_archives.c - records of zip archives, of what was read and of the rest. */
#include "cli/verify_archives.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/crc32.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/pool.h"
#include "base/vec.h"
#include "index/formats/torch/zip.h"
#include "remote/open_files.h"
#include "remote/source.h"
#include "save/sums.h"

enum {
    MEMORY = 256 << 20, /* names of files */
    WINDOW = 256 << 10, /* stays in the processor's cache */
    FIRST = 4,          /* bytes that tell an archive */
    METHOD_STORED = 0,  /* inflating checks the others */
};

#define SIGNATURE_LOCAL UINT32_C(0x04034b50)

struct archive {
    uint32_t number;
    bool is_zip;
    const char *path;
    struct file_id id;
    uint64_t records, bad; /* as struct archive_finding */
    char *first;           /* malloc */
};

struct archives {
    struct reading *s;
    struct arena *arena;
    struct archive *file; /* all files of the checkpoint, by number; malloc */
    size_t count, cap;
    struct sums sums; /* of what was noted */
};

void archives_free(struct archives *a)
{
    if (!a)
        return;
    for (size_t i = 0; i < a->count; i++)
        free(a->file[i].first);
    sums_release(&a->sums);
    arena_free(a->arena);
    free(a->file);
    free(a);
}

void archives_freep(struct archives **a)
{
    archives_free(*a);
}

/* ---- which files ---- */

static int note_file(void *user, const struct catalog_file *f)
{
    static const struct file_id missing;
    struct archives *a = user;
    struct archive *x;

    if (file_id_equal(&f->id, &missing) || f->copy)
        return 0;
    if (!VEC_ROOM(a->file, a->count, a->cap))
        return -ENOMEM;
    x = &a->file[a->count];
    *x = (struct archive){.number = f->number, .id = f->id};
    x->path = arena_memdup(a->arena, f->path, strlen(f->path));
    return x->path ? (a->count++, 0) : -ENOMEM;
}

static char *words_of(const struct err *e)
{
    char line[1400];

    return strdup(err_line(e, line, sizeof line));
}

/*
 * A file that cannot be opened is told of with its tensors; one whose first bytes cannot be
 * read may be an archive.
 */
static int sniff(void *user, size_t i, struct err *e)
{
    struct archives *a = user;
    struct archive *x = &a->file[i];
    CLEANUP(source_putp) struct source *src = NULL;
    unsigned char first[FIRST];
    struct err why = {0};

    if (open_files_get(a->s->files, x->path, &x->id, &src, &why) < 0 ||
        src->size <= FIRST)
        return 0;
    if (source_read(src, 0, FIRST, first, &why) < 0) {
        x->bad = 1;
        x->first = words_of(&why);
        return x->first ? 0 : err_nomem(e);
    }
    x->is_zip = get_le32(first) == SIGNATURE_LOCAL;
    return 0;
}

int archives_new(struct reading *s, int64_t checkpoint, struct archives **out,
                 struct err *e)
{
    CLEANUP(archives_freep) struct archives *a = calloc(1, sizeof *a);
    size_t kept = 0;
    int ret;

    if (!a)
        return err_nomem(e);
    a->s = s;
    sums_init(&a->sums);
    a->arena = arena_new(MEMORY);
    ret = a->arena ? catalog_files(s->catalog, checkpoint, note_file, a, e) : -ENOMEM;
    if (ret == -ENOMEM && !e->code)
        return err_nomem(e);
    if (ret == 0)
        ret = pool_each(s->pool, a->count, sniff, a, e);
    for (size_t i = 0; i < a->count; i++)
        if (a->file[i].is_zip || a->file[i].bad)
            a->file[kept++] = a->file[i];
    a->count = kept;
    if (ret == 0)
        *out = steal(&a);
    return ret;
}

bool archives_have(const struct archives *a, uint32_t file)
{
    size_t low = 0, high = a->count;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (a->file[mid].number < file)
            low = mid + 1;
        else
            high = mid;
    }
    return low < a->count && a->file[low].number == file;
}

void archives_note(struct archives *a, uint32_t file, uint64_t off, uint64_t len,
                   uint32_t crc)
{
    sums_add_crc(&a->sums, file, off, len, crc);
}

/* ---- the records of one ---- */

struct outcome {
    bool checked;
    char *why; /* malloc; NULL: it holds */
};

struct records {
    const struct archives *a;
    const struct archive *x;
    struct source *src;
    struct zip *zip;
    struct outcome *outcome; /* of each entry; malloc */
};

static void records_release(struct records *r)
{
    for (size_t i = 0; r->outcome && i < zip_count(r->zip); i++)
        free(r->outcome[i].why);
    free(r->outcome);
    zip_free(r->zip);
    source_put(r->src);
}

static int read_on(struct source *src, uint64_t off, uint64_t len, uint32_t *crc,
                   struct err *e)
{
    CLEANUP_FREE unsigned char *data = malloc((size_t)MIN(len, (uint64_t)WINDOW));

    if (!data)
        return err_nomem(e);
    for (uint64_t at = 0; at < len; at += WINDOW) {
        size_t n = (size_t)MIN(len - at, (uint64_t)WINDOW);

        TRY(source_read(src, off + at, n, data, e));
        *crc = crc32_zip(*crc, data, n);
    }
    return 0;
}

/* Of bytes [off, off + len): what was noted of them, and what lies between that. */
static int crc_of(const struct records *r, uint64_t off, uint64_t len, uint32_t *crc,
                  struct err *e)
{
    uint64_t at = off, end = off + len;
    int ret = 0;

    *crc = 0;
    while (ret == 0 && at < end) {
        const struct sums_piece *p = sums_from(&r->a->sums, r->x->number, at);
        uint64_t next = p && p->at < end && p->len <= end - p->at ? p->at : end;

        ret = next > at ? read_on(r->src, at, next - at, crc, e) : 0;
        if (next < end)
            sums_append(crc, p->crc, p->len);
        at = next < end ? next + p->len : end;
    }
    return ret;
}

static int check_record(void *user, size_t i, struct err *e)
{
    const struct records *r = user;
    const struct zip_entry *entry = zip_at(r->zip, i);
    struct err why = {0};
    uint32_t crc;
    uint64_t off;

    if (entry->method != METHOD_STORED || entry->size == 0)
        return 0;
    r->outcome[i].checked = true;
    if (zip_data_offset(r->zip, entry, &off, &why) == 0 &&
        crc_of(r, off, entry->size, &crc, &why) == 0 &&
        zip_check_crc(r->zip, entry, off, crc, &why) == 0)
        return 0;
    r->outcome[i].why = words_of(&why);
    return r->outcome[i].why ? 0 : err_nomem(e);
}

static int check_records(struct records *r, struct err *e)
{
    r->outcome = calloc(zip_count(r->zip) + 1, sizeof *r->outcome);
    if (!r->outcome)
        return err_nomem(e);
    TRY(source_check(r->src, e));
    TRY(pool_each(r->a->s->pool, zip_count(r->zip), check_record, r, e));
    return source_check(r->src, e); /* what changed meanwhile is nobody's */
}

/* 0: it is no archive as a whole; it has items that are, or the scan told what is wrong. */
static int open_records(struct records *r, struct err *e)
{
    TRY(open_files_get(r->a->s->files, r->x->path, &r->x->id, &r->src, e));
    if (zip_open(r->src, 0, r->src->size, &r->zip, e) == 0)
        return 1;
    if (e->code != EBADMSG)
        return -e->code;
    *e = (struct err){0};
    return 0;
}

static int check_archive(void *user, size_t i, struct err *e)
{
    struct archives *a = user;
    struct archive *x = &a->file[i];
    CLEANUP(records_release) struct records r = {.a = a, .x = x};
    struct err why = {0};

    if (!x->is_zip)
        return 0;
    if (open_records(&r, &why) == 1)
        check_records(&r, &why);
    if (why.code) { /* all of it cannot be checked */
        x->bad = 1;
        x->first = words_of(&why);
        return x->first ? 0 : err_nomem(e);
    }
    for (size_t k = 0; r.zip && k < zip_count(r.zip); k++) {
        x->records += r.outcome[k].checked;
        if (r.outcome[k].why && x->bad++ == 0)
            x->first = steal(&r.outcome[k].why);
    }
    return 0;
}

int archives_check(struct archives *a, archive_fn *tell, void *user, struct err *e)
{
    int ret;

    sums_settle(&a->sums);
    ret = pool_each(a->s->pool, a->count, check_archive, a, e);
    for (size_t i = 0; ret == 0 && i < a->count; i++) {
        const struct archive *x = &a->file[i];

        if (x->records || x->bad)
            tell(user, &(struct archive_finding){x->records, x->bad, x->first});
    }
    return ret;
}
