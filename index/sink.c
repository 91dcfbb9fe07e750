/* SPDX-License-Identifier: MIT */
/* index/sink.c - a running scan: its files, objects and warnings, its begin and end. */
#include "index/sink_priv.h"

#include "base/err.h"
#include "base/interrupt.h"
#include "index/catalog.h"
#include "index/catalog_open.h"
#include "index/catalog_stage.h"
#include "index/catalog_write.h"
#include "index/key_text.h"
#include "remote/source.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_WARNINGS = 1000, /* who has more does not read them */
    MAX_RULES = 1000,    /* some for each part of a checkpoint */
    MAX_SMALL = 256,     /* who copied pointers copied many */
};

static void sink_free(struct sink *s)
{
    if (!s)
        return;
    tensor_release(&s->t);
    buf_release(&s->pieces);
    buf_release(&s->rule);
    keyset_release(&s->keys);
    keyset_release(&s->passed);
    sink_files_release(&s->files);
    stage_close(s->stage);
    for (size_t i = 0; i < ARRAY_SIZE(s->about_text); i++)
        free(s->about_text[i]);
    free(s->base);
    free(s->path);
    free(s->file);
    free(s);
}

int sink_begin(struct catalog *c, const struct catalog_place *place, struct sink **out,
               struct err *e)
{
    struct sink *s = calloc(1, sizeof *s);
    int rc;

    if (!s)
        return err_nomem(e);
    s->catalog = c;
    s->dir_id = place->dir_id;
    s->names_hash = place->names_hash;
    s->guarded = place->guarded;
    s->seen = place->seen;
    s->filter = place->filter;
    s->max_tensors = SINK_MAX_TENSORS;
    s->max_chunks = SINK_MAX_CHUNKS;
    s->max_keys = SINK_MAX_KEYS;
    s->path = strdup(place->path);
    s->file = place->file ? strdup(place->file) : NULL;
    rc = s->path && (s->file || !place->file) ? 0 : err_nomem(e);
    if (rc == 0)
        rc = stage_open(catalog_in_memory(c), &s->stage, e);
    if (rc == 0)
        rc = sink_files_init(&s->files, place->store, s->stage, e);
    if (rc < 0) {
        sink_free(s);
        return rc;
    }
    *out = s;
    return 0;
}

void sink_abort(struct sink *s)
{
    sink_free(s);
}

int sink_checkpoint(struct sink *s, const struct sink_checkpoint *c, struct err *e)
{
    const char *const given[] = {c->format,   c->framework,     c->version,
                                 c->topology, c->metadata_file, c->header,
                                 c->settings};
    const struct sink_checkpoint told = *c;
    char *copy[ARRAY_SIZE(s->about_text)] = {0};
    bool failed = false;

    for (size_t i = 0; i < ARRAY_SIZE(given); i++) {
        copy[i] = given[i] ? strdup(given[i]) : NULL;
        failed |= given[i] && !copy[i];
    }
    /* Only now: what is given may be what was told before. */
    for (size_t i = 0; i < ARRAY_SIZE(given); i++) {
        free(s->about_text[i]);
        s->about_text[i] = copy[i];
    }
    s->about = told;
    s->about.format = s->about_text[0];
    s->about.framework = s->about_text[1];
    s->about.version = s->about_text[2];
    s->about.topology = s->about_text[3];
    s->about.metadata_file = s->about_text[4];
    s->about.settings = s->about_text[6];
    /* What is said of the stored tensors may not hold of those that a map makes. */
    s->about.header = s->filter ? NULL : s->about_text[5];
    return failed ? err_nomem(e) : 0;
}

const struct sink_checkpoint *sink_told(const struct sink *s)
{
    return &s->about;
}

int sink_enter(struct sink *s, const char *dir, struct err *e)
{
    char *base = dir[0] ? strdup(dir) : NULL;

    if (dir[0] && !base)
        return err_nomem(e);
    free(s->base);
    s->base = base;
    return 0;
}

/* --- files and names --- */

/* A name as the checkpoint's directory has it, and the path in the store. */
struct place {
    char name[PATH_MAX], path[PATH_MAX];
};

static int find_place(const struct sink *s, const char *name, size_t len,
                      struct place *out, struct err *e)
{
    char own[PATH_MAX];

    TRY(interrupt_check_late(e));
    if (!store_name_is_safe(name, len) || len >= sizeof own) {
        key_text(own, 200, name, len);
        return err_set(e, EBADMSG, "file name \"%s\" is not safe", own);
    }
    memcpy(own, name, len);
    own[len] = '\0';
    if (store_join(s->base ? s->base : "", own, out->name, sizeof out->name) < 0 ||
        store_join(s->path, out->name, out->path, sizeof out->path) < 0)
        return err_set(e, EBADMSG, "file name \"%.100s...\" is too long", own);
    return 0;
}

static int hide(struct sink *s, const struct place *p, bool part, struct err *e)
{
    return stage_hidden(s->stage, p->name, strlen(p->name), part, e);
}

int sink_file(struct sink *s, const char *path, size_t len, uint32_t *number,
              struct err *e)
{
    struct place p;
    bool known;
    int rc = find_place(s, path, len, &p, e);

    if (rc == 0)
        rc = sink_files_add(&s->files, p.path, true, number, &known, e);
    if (rc == 0 && !known && !strchr(p.name, '/'))
        rc = hide(s, &p, false, e);
    return rc;
}

int sink_file_shown(struct sink *s, const char *path, size_t len, uint32_t *number,
                    struct err *e)
{
    struct place p;
    bool known;
    int rc = find_place(s, path, len, &p, e);

    return rc < 0 ? rc : sink_files_add(&s->files, p.path, true, number, &known, e);
}

int sink_watch(struct sink *s, const char *name, struct err *e)
{
    struct place p;
    uint32_t number;
    bool known;
    int rc = find_place(s, name, strlen(name), &p, e);

    return rc < 0 ? rc : sink_files_add(&s->files, p.path, false, &number, &known, e);
}

bool sink_file_id(const struct sink *s, uint32_t number, struct file_id *out)
{
    struct err e = {0};

    if (number >= s->files.count || s->files.file[number].problem != 0)
        return false;
    if (stage_file_id(s->stage, number, out, &e) == 0)
        return true;
    source_note_trouble(-EIO); /* of our own table: the file may well be there */
    return false;
}

int sink_hide(struct sink *s, const char *name, bool watch, struct err *e)
{
    struct place p;
    uint32_t number;
    bool known;
    int rc = find_place(s, name, strlen(name), &p, e);

    if (rc == 0)
        rc = hide(s, &p, false, e);
    if (rc == 0 && watch)
        rc = sink_files_add(&s->files, p.path, false, &number, &known, e);
    return rc;
}

int sink_copy(struct sink *s, const char *path, struct err *e)
{
    struct place p;
    uint32_t number;
    bool known;
    int rc = sink_hide(s, path, true, e);

    if (rc == 0)
        rc = find_place(s, path, strlen(path), &p, e);
    if (rc == 0)
        rc = sink_files_add(&s->files, p.path, false, &number, &known, e);
    if (rc == 0)
        s->files.file[number].copy = true;
    return rc;
}

int sink_part(struct sink *s, const char *dir, struct err *e)
{
    struct place p;
    uint32_t number;
    bool known;
    int rc = find_place(s, dir, strlen(dir), &p, e);

    if (rc == 0)
        rc = hide(s, &p, true, e);
    return rc < 0 ? rc : sink_files_add(&s->files, p.path, false, &number, &known, e);
}

int sink_whole_file(struct sink *s, uint32_t file, struct err *e)
{
    if (file >= s->files.count)
        return err_set(e, EINVAL, "file %u of %u", file, s->files.count);
    s->files.file[file].whole = true;
    return 0;
}

struct small {
    struct buf names; /* each with a NUL */
    size_t count, skip;
    uint64_t min, max;
    const struct sink *sink;
};

static int note_small(void *user, const struct cell *file, struct err *e)
{
    struct small *f = user;
    const struct cell *path = &file[STAGED_FILE_PATH];
    uint64_t size = file[STAGED_FILE_SIZE].num;

    if (file[STAGED_FILE_DIR].num || size < f->min || size > f->max ||
        path->len <= f->skip || f->count == MAX_SMALL ||
        !f->sink->files.file[file[STAGED_FILE_NUMBER].num].storage)
        return 0;
    f->count++;
    buf_add(&f->names, path->data + f->skip, path->len - f->skip);
    return buf_addc(&f->names, '\0') < 0 ? err_nomem(e) : 0;
}

int sink_small_files(struct sink *s, uint64_t min, uint64_t max,
                     int (*fn)(void *user, const char *name, struct err *e), void *user,
                     struct err *e)
{
    CLEANUP(buf_release) struct buf names = {0};
    struct small f = {.skip = s->path[0] ? strlen(s->path) + 1 : 0,
                      .min = min,
                      .max = max,
                      .sink = s};
    int rc = stage_files(s->stage, note_small, &f, e);

    names = f.names;
    for (size_t at = 0; rc == 0 && at < names.len; at += strlen(names.data + at) + 1)
        rc = fn(user, names.data + at, e);
    return rc;
}

/* --- objects and warnings --- */

int sink_object(struct sink *s, const char *key, size_t key_len, const char *json,
                size_t len, struct err *e)
{
    TRY(interrupt_check_late(e));
    return stage_object(s->stage, key, key_len, json, len, e);
}

int sink_warning(struct sink *s, const char *code, const char *fmt, ...)
{
    char text[1024];
    struct err e = {0};
    va_list args;

    if (s->warnings >= MAX_WARNINGS) {
        s->dropped_warnings++;
        return 0;
    }
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    s->warnings++;
    s->tells_loss |= warning_is_loss(code);
    return stage_warning(s->stage, code, text, &e);
}

/* A text again has the number that it has. */
static uint32_t find_rule(const struct sink *s, const char *text)
{
    uint32_t number;

    for (size_t at = 0; at < s->rule.len;) {
        size_t len = strlen(s->rule.data + at + sizeof number);

        memcpy(&number, s->rule.data + at, sizeof number);
        if (strcmp(s->rule.data + at + sizeof number, text) == 0)
            return number;
        at += sizeof number + len + 1;
    }
    return 0;
}

int sink_rule(struct sink *s, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(s->rule_text, sizeof s->rule_text, fmt, args);
    va_end(args);
    s->rule_waits = true;
    return 0;
}

/* The number of the rule that holds now: it gets one with its first tensor. */
int sink_rule_settle(struct sink *s, struct err *e)
{
    if (!s->rule_waits)
        return 0;
    s->rule_waits = false;
    s->rule_now = find_rule(s, s->rule_text);
    if (s->rule_now || s->rules == MAX_RULES)
        return 0;
    s->rule_now = ++s->rules;
    buf_add(&s->rule, &s->rule_now, sizeof s->rule_now);
    buf_add(&s->rule, s->rule_text, strlen(s->rule_text) + 1);
    return buf_failed(&s->rule) ? err_nomem(e)
                                : stage_origin(s->stage, s->rule_text, false, e);
}

void sink_rule_end(struct sink *s)
{
    s->rule_now = 0;
    s->rule_waits = false;
}

int sink_passed_over(struct sink *s, const char *fmt, ...)
{
    char text[1000];
    struct err e = {0};
    va_list args;

    if (s->rules == MAX_RULES)
        return 0;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    s->rules++;
    return stage_origin(s->stage, text, true, &e);
}

/* --- the end --- */

static void file_use(const void *user, uint32_t number, struct stage_use *out)
{
    const struct sink *s = user;
    const struct sink_file *f = &s->files.file[number];

    *out = (struct stage_use){.storage = f->storage,
                              .copy = f->copy && !f->storage,
                              .whole = f->whole && f->problem == 0,
                              .tensors = f->tensors};
}

/* The metadata file decides about owner and group; without one the first shard does. */
static int find_owner(struct sink *s, struct stage_rights *owner, struct err *e)
{
    const char *path = s->about.metadata_file;
    uint32_t number;
    bool known;

    if (path && path[0] && strlen(path) < PATH_MAX) {
        TRY(sink_files_add(&s->files, path, false, &number, &known, e));
        *owner = s->files.file[number].rights;
    }
    return owner->any ? 0 : sink_files_first(&s->files, owner, e);
}

/*
 * A storage file that is not there makes the checkpoint incomplete also where it held objects
 * only: where neither a tensor's fault nor the driver says so, it is told here.
 */
static int warn_missing(struct sink *s, struct err *e)
{
    size_t skip = strlen(s->path);

    for (uint32_t i = 0; i < s->files.count && !s->tells_loss; i++) {
        const struct sink_file *f = &s->files.file[i];
        char name[400];

        if (!f->storage || f->problem != ENOENT)
            continue;
        TRY(sink_files_name(&s->files, i, skip, name, sizeof name, e));
        if (sink_warning(s, "missing-file", "%s is missing", name) < 0)
            return err_nomem(e);
    }
    return 0;
}

/* One tensor without elements is what somebody saved; a model of such is none. */
static int warn_empty(struct sink *s, struct err *e)
{
    if (s->model < 2 || s->model_empty < s->model)
        return 0;
    if (sink_warning(s, "lost-elements",
                     "none of the model's %" PRIu64
                     " tensors has elements: DeepSpeed's "
                     "ZeRO-3 leaves such a file, and the model in its global_stepN",
                     s->model) < 0)
        return err_nomem(e);
    return 0;
}

static int warn_dropped(struct sink *s, struct err *e)
{
    char text[100];

    if (s->dropped_warnings == 0)
        return 0;
    snprintf(text, sizeof text, "%" PRIu64 " more warnings are not shown",
             s->dropped_warnings);
    return stage_warning(s->stage, "more-warnings", text, e);
}

void sink_unsure(struct sink *s)
{
    s->names_hash = 0;
}

static int commit(struct sink *s, const char *error, int64_t *id, struct err *e)
{
    struct stage_result r = {
        .path = s->path,
        .file = s->file,
        .about = &s->about,
        .error = error,
        .dir_id = s->dir_id,
        .names_hash = s->names_hash,
        .many_parts = s->many_parts,
        .guarded = s->guarded,
        .seen = s->seen,
        .file_use = file_use,
        .user = s,
    };
    int rc = find_owner(s, &r.owner, e);

    r.files = s->files.count;
    for (uint32_t i = 0; i < s->files.count; i++)
        if (s->files.file[i].storage)
            rights_add(&r.all, &s->files.file[i].rights);
    if (rc == 0 && !error)
        rc = warn_missing(s, e);
    if (rc == 0 && !error)
        rc = warn_empty(s, e);
    if (rc == 0)
        rc = warn_dropped(s, e);
    /* Settling needs memory of its own. */
    keyset_release(&s->keys);
    keyset_release(&s->passed);
    tensor_release(&s->t);
    s->t = (struct open_tensor){0};
    return rc == 0 ? stage_commit(s->stage, s->catalog, &r, id, e) : rc;
}

/* What the filter has kept comes back, in place of what it took. */
static int finish_filter(struct sink *s, struct err *failed)
{
    struct sink_filter *f = s->filter;
    struct keyset taken = s->keys;

    s->filter = NULL;
    s->keys = s->passed;
    s->passed = taken;
    if (sink_rule(s, "made by the map, of the tensors that its rules name") < 0)
        return err_nomem(failed);
    return f->finish(f, s, failed);
}

/*
 * What a filter finds wrong is the checkpoint's failure. What we lack, or that nobody waits
 * any more, says nothing about it.
 */
static bool is_ours(int code)
{
    return code == ENOSPC || source_is_trouble(-code);
}

int sink_commit(struct sink *s, const struct err *failed, int64_t *id, struct err *e)
{
    struct err unmapped = {0};
    char error[1400];
    int rc;

    if (s->filter && !failed && finish_filter(s, &unmapped) < 0) {
        if (is_ours(unmapped.code)) {
            *e = unmapped;
            sink_free(s);
            return -e->code;
        }
        failed = &unmapped;
    }
    if (failed)
        err_line(failed, error, sizeof error);
    rc = commit(s, failed ? error : NULL, id, e);
    if (rc < 0)
        err_wrap(e, "%s%s%s", s->path, s->file ? "/" : "", s->file ? s->file : "");
    sink_free(s);
    return rc;
}
