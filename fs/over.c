/* SPDX-License-Identifier: MIT */
/* fs/over.c - tensors that come to a directory of the source that is there and no checkpoint. */
#include "fs/over.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fsutil.h"
#include "fs/amend.h"
#include "fs/node.h"
#include "fs/plain.h"
#include "fs/save.h"
#include "fs/save_files.h"
#include "fs/stage_room.h"
#include "fs/staged.h"
#include "fs/tree.h"
#include "fs/write.h"
#include "save/incoming.h"
#include "save/staging.h"

static bool wants(const char *name)
{
    enum incoming_kind kind = incoming_kind(name);

    return kind == INCOMING_SAFETENSORS || kind == INCOMING_INDEX;
}

struct stage *over_at(struct fs *fs, const char *path)
{
    struct stage *s = stage_settled(fs, path);

    return s && s->over ? s : NULL;
}

bool over_takes(struct fs *fs, const struct node *dir, const char *name)
{
    const struct stage *s = over_at(fs, dir->path);

    return wants(name) || (s && staged_find(s->root, name));
}

bool over_takes_dir(struct fs *fs, struct node *dir, const char *name)
{
    const struct stage *s = over_at(fs, dir->path);
    struct err ignored = {0};
    struct shown *shown;
    bool empty = false;

    if (s && staged_find(s->root, name))
        return true;
    if (!save_files_is_view(name) || strcmp(name, ".unshard") == 0 ||
        tree_shown(fs, dir, true, &shown, &ignored) != 0)
        return false;
    empty = shown_is_empty(shown);
    shown_put(fs, shown);
    return empty;
}

static void see_tensors(void *user, struct staged *n)
{
    bool *any = user;

    *any |= n->kind == STAGED_DIR || (n->kind == STAGED_FILE && wants(n->name));
}

/* Are tensors on their way there? Else what is staged is files by themselves. */
static bool has_tensors(const struct stage *s)
{
    bool any = false;

    if (s)
        staged_each(s->root, see_tensors, &any);
    return any;
}

/* One without tensors (a trainer's arguments) is in no model's way. */
static bool is_in_the_way(const struct shown *shown, const struct shown_entry *x)
{
    return x && (x->kind == SHOWN_FILE_DIR ||
                 (x->whole && !(shown->slot && shown->slot->info.tensors == 0)));
}

/* Of several model files each is one by itself: another would be taken for all of them. */
static int check_alone(struct fs *fs, struct node *dir, struct err *e)
{
    struct shown *shown;
    bool files = false;
    int rc = tree_shown(fs, dir, true, &shown, e);

    if (rc != 0)
        return rc;
    for (size_t i = 0; i < shown_places(shown); i++)
        files |= is_in_the_way(shown, shown_at(shown, i));
    shown_put(fs, shown);
    if (!files)
        return 0;
    err_set(e, EROFS, "%s: files that are checkpoints by themselves lie there",
            dir->path);
    return err_hint(e, "save tensors in a directory of their own: mkdir DIR");
}

/* It is as the directory is. */
static int take_rights(struct fs *fs, struct stage *s, struct err *e)
{
    CLEANUP_FD int fd = stage_directory(fs, s->path, e);
    struct stat st, beside;

    if (fd < 0)
        return fd;
    if (fstat(fd, &st) < 0 || fstat(staging_spool(s->staging), &beside) < 0)
        return err_set(e, errno, "%s: %s", s->path, strerror(errno));
    if (st.st_dev != beside.st_dev || is_mount_root(fd, "")) {
        err_set(e, EROFS,
                "%s: a file system is mounted there: tensors cannot come by a "
                "rename",
                s->path);
        return err_hint(e, "save in a directory of it: mkdir DIR");
    }
    s->over = true;
    s->over_ino = st.st_ino;
    s->root->mode = st.st_mode & 07777;
    s->root->uid = st.st_uid;
    s->root->gid = st.st_gid;
    return 0;
}

int over_begin_file(struct fs *fs, struct node *dir, struct stage **out, struct err *e)
{
    int rc;

    *out = over_at(fs, dir->path);
    if (*out)
        return 0;
    if (fs->store->remote) {
        err_set(e, EROFS, "%s: tensors are saved in a directory of their own",
                dir->path);
        return err_hint(e, "make one, and write there: mkdir DIR");
    }
    if (stage_at(fs, dir->path)) {
        err_set(e, EBUSY, "%s: what was changed there is not published yet", dir->path);
        return err_hint(e, "try again when it is; sync DIR publishes it");
    }
    rc = stage_new(fs, dir->path, NULL, out, e);
    if (rc < 0)
        return rc;
    rc = take_rights(fs, *out, e);
    if (rc < 0)
        stage_end(fs, *out, false);
    return rc;
}

int over_begin(struct fs *fs, struct node *dir, struct stage **out, struct err *e)
{
    int rc = has_tensors(over_at(fs, dir->path)) ? 0 : check_alone(fs, dir, e);

    return rc == 0 ? over_begin_file(fs, dir, out, e) : rc;
}

/* What the source has under this name; ino 0: nothing. */
static struct file_id source_id(struct fs *fs, const struct stage *s, const char *name)
{
    struct err ignored = {0};
    CLEANUP_FD int dir = stage_directory(fs, s->path, &ignored);
    struct stat st;

    return dir >= 0 && fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0
               ? file_id_of(&st)
               : (struct file_id){0};
}

/* A name that the source has, and the stage has taken: it goes. */
static int unlink_source(struct fs *fs, const struct stage *s, const char *name,
                         uint64_t ino, struct err *e)
{
    CLEANUP_FD int dir = stage_directory(fs, s->path, e);
    struct stat st;

    if (dir < 0)
        return dir;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || st.st_ino != ino)
        return 0;
    if (unlinkat(dir, name, 0) < 0 && errno != ENOENT)
        return err_set(e, errno, "%s: %s", name, strerror(errno));
    amend_name(fs, s->path, name);
    return 0;
}

struct partner {
    uint64_t ino;
    struct staged *node;
};

static void see_partner(void *user, struct staged *n)
{
    struct partner *p = user;

    if (n->kind == STAGED_GONE && n->over.ino == p->ino)
        p->node = n;
}

/* A staged file goes, with the name under which the source has it. */
static int drop(struct fs *fs, struct staged *n, struct err *e)
{
    struct stage *s = n->stage;
    struct partner p = {0};
    struct stat st;
    int rc = 0;

    if (n->kind == STAGED_FILE && staged_stat(n, &st) == 0) {
        p.ino = st.st_ino;
        staged_each(s->root, see_partner, &p);
    }
    if (p.node)
        rc = unlink_source(fs, s, p.node->name, p.ino, e);
    if (rc < 0)
        return rc;
    if (p.node)
        staged_remove(fs, p.node);
    staged_remove(fs, n);
    return 0;
}

/* Before another file gets the name. */
static int make_room(struct fs *fs, struct stage *s, const char *name, struct err *e)
{
    struct staged *n = staged_find(s->root, name);
    int rc = 0;

    if (!n)
        return 0;
    if (n->kind != STAGED_GONE)
        return drop(fs, n, e);
    rc = unlink_source(fs, s, name, n->over.ino, e);
    if (rc == 0)
        staged_remove(fs, n);
    return rc;
}

int over_new_file(struct request *r, struct stage *s, const char *name,
                  struct staged **out, struct err *e)
{
    int rc = make_room(r->fs, s, name, e);

    if (rc == 0)
        rc = write_new_file(r, s->root, name, out, e);
    if (rc == 0)
        (*out)->over = source_id(r->fs, s, name);
    return rc;
}

static void end_if_empty(struct fs *fs, struct stage *s)
{
    if (s->root->count == 0)
        stage_end(fs, s, false);
}

int over_unlink(struct fs *fs, struct stage *s, const char *name, struct err *e)
{
    struct staged *n = staged_find(s->root, name);
    uint64_t below;
    int rc;

    if (!n)
        return STAGED_NONE;
    if (n->kind != STAGED_FILE)
        return n->kind == STAGED_DIR ? -EISDIR : -ENOENT;
    below = n->over.ino;
    rc = drop(fs, n, e);
    if (rc == 0 && below)
        rc = unlink_source(fs, s, name, below, e);
    if (rc == 0)
        end_if_empty(fs, s);
    return rc;
}

int over_rmdir(struct fs *fs, struct stage *s, const char *name)
{
    struct staged *n = staged_find(s->root, name);

    if (!n)
        return STAGED_NONE;
    if (n->kind == STAGED_GONE)
        return -ENOENT;
    if (n->kind != STAGED_DIR || n->count > 0)
        return n->kind != STAGED_DIR ? -ENOTDIR : -ENOTEMPTY;
    staged_remove(fs, n);
    end_if_empty(fs, s);
    return 0;
}

/* ---- names that change ---- */

/* From one name of the stage to another. */
static int rename_staged(struct request *r, struct stage *s, struct staged *n,
                         struct err *e)
{
    int rc;

    if (n->kind == STAGED_GONE)
        return -ENOENT;
    if (n->kind != STAGED_FILE || !wants(r->as) || n->over.ino)
        return -EXDEV; /* it is copied, then removed */
    if (staged_find(s->root, r->as) == n)
        return 0;
    rc = make_room(r->fs, s, r->as, e);
    if (rc == 0)
        rc = staged_rename(r->fs, n, s->root, r->as, e);
    if (rc == 0)
        n->over = source_id(r->fs, s, r->as);
    return rc;
}

/* Its bytes have a name in the spool; who has it open writes on. */
static int link_into_spool(struct fs *fs, const struct staged *n, const char *old,
                           struct stat *st, struct err *e)
{
    CLEANUP_FD int dir = stage_directory(fs, n->stage->path, e);
    char name[24];

    if (dir < 0)
        return dir;
    if (fstatat(dir, old, st, AT_SYMLINK_NOFOLLOW) < 0)
        return err_set(e, errno, "%s: %s", old, strerror(errno));
    if (!S_ISREG(st->st_mode))
        return -EXDEV;
    snprintf(name, sizeof name, "%" PRIu64, n->spool);
    if (linkat(dir, old, staging_spool(n->stage->staging), name, 0) < 0)
        return errno == EMLINK || errno == EPERM
                   ? -EXDEV
                   : err_set(e, errno, "%s: %s", old, strerror(errno));
    return 0;
}

/* Who has it open by its old name writes it on: what does not come of that lacks here. */
static void take_came(struct fs *fs, struct staged *n, const struct stat *st)
{
    struct came *c = paging_came(fs, st->st_dev, st->st_ino);

    if (c) {
        came_put(n->came);
        n->came = came_get(c);
    } else {
        n->came->prefix = (uint64_t)st->st_size;
    }
}

/* The file as it stands in the source, and its old name hidden until it is published. */
static int adopt(struct request *r, struct stage *s, struct staged *n, struct err *e)
{
    char path[PATH_MAX];
    struct staged *gone;
    struct stat st;
    fuse_ino_t ino;
    int rc = link_into_spool(r->fs, n, r->name, &st, e);

    if (rc < 0)
        return rc;
    n->mode = st.st_mode & 07777;
    n->uid = st.st_uid;
    n->gid = st.st_gid;
    take_came(r->fs, n, &st);
    n->order = ++s->closes;
    rc = stage_room_take(r->fs, n, (uint64_t)st.st_size, e);
    if (rc == 0)
        rc = staged_add(r->fs, s->root, r->name, STAGED_GONE, 0, &gone, e);
    if (rc == 0)
        gone->over = file_id_of(&st);
    ino = rc == 0 && store_join(s->path, r->name, path, sizeof path) == 0
              ? node_file_at(r->fs, path)
              : 0;
    if (ino) /* who has it open by its old name asks for its size */
        staged_cover(r->fs, n, ino);
    return rc;
}

static int rename_into(struct request *r, struct node *dir, struct err *e)
{
    struct stage *s;
    struct staged *n;
    int rc = over_begin(r->fs, dir, &s, e);

    if (rc < 0)
        return rc;
    rc = over_new_file(r, s, r->as, &n, e);
    if (rc == 0) {
        rc = adopt(r, s, n, e);
        if (rc < 0)
            staged_remove(r->fs, n);
    }
    if (rc < 0)
        end_if_empty(r->fs, s);
    return rc;
}

static bool is_taken(struct fs *fs, const struct node *dir, const char *name)
{
    char path[PATH_MAX];
    struct entry_stat st;
    struct err ignored = {0};
    const struct stage *s = over_at(fs, dir->path);
    const struct staged *n = s ? staged_find(s->root, name) : NULL;

    return n ? n->kind != STAGED_GONE
             : store_join(dir->path, name, path, sizeof path) == 0 &&
                   fs->store->ops->stat(fs->store, path, &st, &ignored) == 0;
}

/* A file by itself that is on its way is published first: then it is one of the source. */
static int settle_file(struct fs *fs, const struct node *dir, const char *name,
                       struct err *e)
{
    struct stage *s = over_at(fs, dir->path);
    const struct staged *n = s ? staged_find(s->root, name) : NULL;

    return n && n->kind == STAGED_FILE && !has_tensors(s) ? save_publish(fs, s, e) : 0;
}

int over_rename(struct request *r, struct node *from, struct node *to, struct err *e)
{
    struct stage *s;
    struct staged *n;
    char path[PATH_MAX];
    struct entry_stat st;
    int rc = settle_file(r->fs, from, r->name, e);

    if (rc == 0)
        rc = settle_file(r->fs, to, r->as, e);
    if (rc < 0)
        return rc;
    s = over_at(r->fs, from->path);
    n = s ? staged_find(s->root, r->name) : NULL;
    if (!n && !wants(r->as))
        return STAGED_NONE;
    if (!n && (store_join(from->path, r->name, path, sizeof path) < 0 ||
               r->fs->store->ops->stat(r->fs->store, path, &st, e) < 0 ||
               st.kind != ENTRY_FILE)) {
        *e = (struct err){0};
        return STAGED_NONE; /* as any name of the source */
    }
    if (r->flags & ~(unsigned)RENAME_NOREPLACE)
        return -EINVAL;
    if ((r->flags & RENAME_NOREPLACE) && is_taken(r->fs, to, r->as))
        return -EEXIST;
    /*
     * The kernel finds the directory of each name for itself: where one above it was
     * exchanged in between it has two numbers, and is to look again.
     */
    if (from != to && strcmp(from->path, to->path) == 0)
        return -ESTALE;
    if (from != to)
        return -EXDEV; /* it is copied, then removed */
    return n ? rename_staged(r, s, n, e) : rename_into(r, to, e);
}

/* ---- publication ---- */

static void see_written(void *user, struct staged *n)
{
    bool *any = user;

    *any |= n->kind == STAGED_FILE && n->came->writers > 0;
}

bool over_is_written(const struct stage *s)
{
    bool any = false;

    if (s->over)
        staged_each(s->root, see_written, &any);
    return any;
}
