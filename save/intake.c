/* SPDX-License-Identifier: MIT */
/* save/intake.c - the set of incoming files: their names, directories and lives. */
#include "save/intake.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "base/dir.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "base/vec.h"
#include "save/incoming.h"
#include "save/intake_priv.h"
#include "save/staged.h"

static const char root[] = "intake";

int intake_remove_tree(int dir, const char *path, struct err *e)
{
    return staged_remove_tree(dir, path, 0, e);
}

int intake_make_parents(int dir, const char *path, struct err *e)
{
    char part[PATH_MAX];

    for (const char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        memcpy(part, path, (size_t)(slash - path));
        part[slash - path] = '\0';
        if (mkdirat(dir, part, 0700) < 0 && errno != EEXIST)
            return err_set(e, errno, "%s: %s", part, strerror(errno));
    }
    return 0;
}

/* ---- names of directories ---- */

/* A path as one name: '/' is %2F. */
static int encode(const char *path, struct buf *out, struct err *e)
{
    buf_addf(out, "%s/", root);
    for (const char *p = path; *p; p++) {
        if (*p == '/' || *p == '%')
            buf_addf(out, "%%%02X", (unsigned char)*p);
        else
            buf_addc(out, *p);
    }
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int decode(const char *name, struct buf *out, struct err *e)
{
    for (const char *p = name; *p; p++) {
        if (strncmp(p, "%2F", 3) == 0 || strncmp(p, "%25", 3) == 0) {
            buf_addc(out, p[2] == 'F' ? '/' : '%');
            p += 2;
        } else {
            buf_addc(out, *p);
        }
    }
    return buf_failed(out) ? err_nomem(e) : 0;
}

/* ---- one file ---- */

static void file_free(struct intake_file *f)
{
    placement_release(f);
    fds_drop(&f->intake->fds, &f->plain);
    sums_release(&f->sums);
    ranges_release(&f->received);
    ranges_release(&f->claimed);
    pthread_rwlock_destroy(&f->lock);
    pthread_mutex_destroy(&f->mutex);
    free((char *)(uintptr_t)f->plain.path);
    free(f->path);
    free(f->dir);
    free(f);
}

static int name_file(struct intake_file *f, const char *path, struct err *e)
{
    CLEANUP(buf_release) struct buf dir = {0};
    char *plain;

    if (encode(path, &dir, e) < 0)
        return -ENOMEM;
    if (dir.len - sizeof root > NAME_MAX)
        return err_set(e, ENAMETOOLONG, "%s: too long a name", path);
    f->path = strdup(path);
    f->dir = strdup(dir.data);
    if (!f->path || !f->dir || asprintf(&plain, "%s/plain", dir.data) < 0)
        return err_nomem(e);
    f->plain.path = plain;
    return 0;
}

/* The directory and the plain file, where they are not there yet. */
static int make_plain(struct intake_file *f, struct err *e)
{
    int dir = f->intake->spec.dir, fd;

    TRY(intake_make_parents(dir, f->plain.path, e));
    fd = openat(dir, f->plain.path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0)
        return err_set(e, errno, "%s: %s", f->plain.path, strerror(errno));
    close(fd);
    return 0;
}

static int file_new(struct intake *k, const char *path, struct intake_file **out,
                    struct err *e)
{
    struct intake_file *f = calloc(1, sizeof *f);
    int ret;

    if (!f)
        return err_nomem(e);
    f->intake = k;
    pthread_rwlock_init(&f->lock, NULL);
    pthread_mutex_init(&f->mutex, NULL);
    sums_init(&f->sums);
    f->sums.joins = true;
    ret = name_file(f, path, e);
    if (ret == 0)
        ret = make_plain(f, e);
    if (ret < 0)
        file_free(f);
    else
        *out = f;
    return ret;
}

/* ---- the set ---- */

/* With the lock: where a path is, or would be. */
static size_t find(const struct intake *k, const char *path)
{
    size_t low = 0, high = k->files;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (strcmp(k->file[mid]->path, path) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static bool is_at(const struct intake *k, size_t i, const char *path)
{
    return i < k->files && strcmp(k->file[i]->path, path) == 0;
}

/* With the lock. */
static int add(struct intake *k, const char *path, struct intake_file **out,
               struct err *e)
{
    size_t i = find(k, path);

    if (!VEC_ROOM(k->file, k->files, k->cap))
        return err_nomem(e);
    TRY(file_new(k, path, out, e));
    memmove(k->file + i + 1, k->file + i,
            (k->files - i) * sizeof(struct intake_file *));
    k->file[i] = *out;
    k->files++;
    return 0;
}

int intake_get(struct intake *k, const char *path, struct intake_file **out,
               struct err *e)
{
    enum role role;
    size_t i;
    int ret = 0;

    if (incoming_kind(path) != INCOMING_SAFETENSORS || !incoming_is_whole(path, &role))
        return err_set(e, EINVAL, "%s: not the file of a model or an optimizer", path);
    pthread_mutex_lock(&k->lock);
    i = find(k, path);
    if (is_at(k, i, path))
        *out = k->file[i];
    else
        ret = add(k, path, out, e);
    pthread_mutex_unlock(&k->lock);
    return ret;
}

struct intake_file *intake_find(struct intake *k, const char *path)
{
    struct intake_file *f = NULL;
    size_t i;

    pthread_mutex_lock(&k->lock);
    i = find(k, path);
    if (is_at(k, i, path))
        f = k->file[i];
    pthread_mutex_unlock(&k->lock);
    return f;
}

size_t intake_count(const struct intake *k)
{
    return k->files;
}

struct intake_file *intake_at(const struct intake *k, size_t i)
{
    return k->file[i];
}

const char *intake_path(const struct intake_file *f)
{
    return f->path;
}

int intake_remove(struct intake_file *f, struct err *e)
{
    struct intake *k = f->intake;
    size_t i;
    int ret;

    pthread_mutex_lock(&k->lock);
    i = find(k, f->path);
    memmove(k->file + i, k->file + i + 1,
            (k->files - i - 1) * sizeof(struct intake_file *));
    k->files--;
    pthread_mutex_unlock(&k->lock);
    ret = intake_remove_tree(k->spec.dir, f->dir, e);
    file_free(f);
    return ret;
}

/* ---- open and close ---- */

static int take_up(struct intake *k, const char *name, struct err *e)
{
    CLEANUP(buf_release) struct buf path = {0};
    struct intake_file *f;

    if (decode(name, &path, e) < 0)
        return -ENOMEM;
    return intake_get(k, path.data ? path.data : "", &f, e);
}

static int take_up_all(struct intake *k, struct err *e)
{
    int fd = openat(k->spec.dir, root, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    const char *name;
    int ret = 0, more = 0;
    DIR *dir;

    if (fd < 0)
        return errno == ENOENT ? 0 : err_set(e, errno, "%s: %s", root, strerror(errno));
    dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return err_nomem(e);
    }
    while (ret == 0 && (more = dir_next(dir, &name)) > 0)
        ret = take_up(k, name, e);
    closedir(dir);
    return ret == 0 && more < 0 ? err_set(e, -more, "%s: %s", root, strerror(-more))
                                : ret;
}

int intake_open(const struct intake_spec *spec, struct intake **out, struct err *e)
{
    struct intake *k = calloc(1, sizeof *k);
    int ret;

    if (!k)
        return err_nomem(e);
    k->spec = *spec;
    pthread_mutex_init(&k->lock, NULL);
    fds_init(&k->fds);
    ret = take_up_all(k, e);
    if (ret < 0)
        intake_free(k);
    else
        *out = k;
    return ret;
}

void intake_free(struct intake *k)
{
    if (!k)
        return;
    for (size_t i = 0; i < k->files; i++)
        file_free(k->file[i]);
    fds_release(&k->fds);
    pthread_mutex_destroy(&k->lock);
    free(k->file);
    free(k);
}
