/* SPDX-License-Identifier: MIT */
/* save/upload_journal.c - journals of uploads as text, and back. */
#include "save/upload_journal.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "remote/http.h"
#include "remote/store.h"

void upload_journal_release(struct upload_journal *j)
{
    for (size_t i = 0; i < j->uploads; i++) {
        free(j->upload[i].path);
        free(j->upload[i].id);
    }
    free(j->upload);
    free(j->what);
    free(j->last);
    *j = (struct upload_journal){0};
}

/* ---- uploads ---- */

static int by_path(const void *a, const void *b)
{
    const struct upload_id *x = a, *y = b;

    return strcmp(x->path, y->path);
}

static struct upload_id *find(const struct upload_journal *j, const char *path)
{
    CLEANUP_FREE char *text = strdup(path);
    const struct upload_id want = {.path = text};

    return text && j->uploads
               ? bsearch(&want, j->upload, j->uploads, sizeof want, by_path)
               : NULL;
}

const char *upload_journal_find(const struct upload_journal *j, const char *path)
{
    const struct upload_id *u = find(j, path);

    return u ? u->id : NULL;
}

int upload_journal_add(struct upload_journal *j, const char *path, const char *id,
                       struct err *e)
{
    struct upload_id u = {.path = strdup(path), .id = strdup(id)};

    if (j->uploads == j->cap) {
        size_t cap = j->cap ? j->cap * 2 : 64;
        struct upload_id *grown = reallocarray(j->upload, cap, sizeof *grown);

        if (grown) {
            j->upload = grown;
            j->cap = cap;
        }
    }
    if (!u.path || !u.id || j->uploads == j->cap) {
        free(u.path);
        free(u.id);
        return err_nomem(e);
    }
    j->upload[j->uploads++] = u;
    return 0;
}

void upload_journal_sort(struct upload_journal *j)
{
    if (j->uploads)
        qsort(j->upload, j->uploads, sizeof *j->upload, by_path);
}

int upload_journal_set(struct upload_journal *j, const char *path, const char *id,
                       struct err *e)
{
    struct upload_id *u = find(j, path);
    char *text;
    int ret;

    if (u) {
        text = strdup(id);
        if (!text)
            return err_nomem(e);
        free(u->id);
        u->id = text;
        return 0;
    }
    ret = upload_journal_add(j, path, id, e);
    upload_journal_sort(j);
    return ret;
}

/* ---- text ---- */

static int no_journal(struct err *e)
{
    return err_set(e, EBADMSG, "no journal of an upload");
}

static int read_path(const char *text, struct buf *path, struct err *e)
{
    if (http_decode(text, strlen(text), path) < 0 || !path->data ||
        !store_name_is_safe(path->data, path->len))
        return no_journal(e);
    return 0;
}

/* "PATH ID" */
static int read_upload(struct upload_journal *j, char *text, struct err *e)
{
    CLEANUP(buf_release) struct buf path = {0};
    char *space = strchr(text, ' ');

    if (!space || !space[1] || strchr(space + 1, ' '))
        return no_journal(e);
    *space = '\0';
    TRY(read_path(text, &path, e));
    return upload_journal_add(j, path.data, space + 1, e);
}

static int read_last(struct upload_journal *j, const char *text, struct err *e)
{
    CLEANUP(buf_release) struct buf path = {0};

    if (j->last)
        return no_journal(e);
    TRY(read_path(text, &path, e));
    j->last = buf_steal(&path, NULL);
    return j->last ? 0 : err_nomem(e);
}

static int read_line(struct upload_journal *j, char *line, struct err *e)
{
    if (strcmp(line, "done") == 0)
        j->done = true;
    else if (strncmp(line, "publishing ", 11) == 0)
        return read_last(j, line + 11, e);
    else if (strncmp(line, "upload ", 7) == 0)
        return read_upload(j, line + 7, e);
    else
        return no_journal(e);
    return 0;
}

/* Two uploads of one file are a mistake that nothing good comes of. */
static int check_once(const struct upload_journal *j, struct err *e)
{
    for (size_t i = 1; i < j->uploads; i++)
        if (strcmp(j->upload[i - 1].path, j->upload[i].path) == 0)
            return err_set(e, EBADMSG, "a journal with two uploads of %s",
                           j->upload[i].path);
    return 0;
}

int upload_journal_read(struct upload_journal *j, const char *text, size_t len,
                        struct err *e)
{
    CLEANUP_FREE char *copy = len < SIZE_MAX ? malloc(len + 1) : NULL;
    char *line = copy, *end;
    int ret = 0;

    if (!copy)
        return err_nomem(e);
    memcpy(copy, text, len); /* which nothing ends */
    copy[len] = '\0';
    /* An object is written whole: a line that is cut is none of ours. */
    if (strlen(copy) != len || len == 0 || copy[len - 1] != '\n')
        return no_journal(e);
    for (unsigned n = 0; ret == 0 && (end = strchr(line, '\n')); line = end + 1, n++) {
        *end = '\0';
        if (n > 0) {
            ret = read_line(j, line, e);
        } else if (!j->what) {
            j->what = strdup(line);
            ret = j->what ? 0 : err_nomem(e);
        }
    }
    upload_journal_sort(j);
    return ret == 0 ? check_once(j, e) : ret;
}

int upload_journal_text(const struct upload_journal *j, struct buf *out, struct err *e)
{
    buf_addf(out, "%s\n", j->what);
    for (size_t i = 0; i < j->uploads; i++) {
        buf_adds(out, "upload ");
        http_encode(j->upload[i].path, true, out);
        buf_addf(out, " %s\n", j->upload[i].id);
    }
    if (j->done)
        buf_adds(out, "done\n");
    if (j->last) {
        buf_adds(out, "publishing ");
        http_encode(j->last, true, out);
        buf_addc(out, '\n');
    }
    return buf_failed(out) ? err_nomem(e) : 0;
}
