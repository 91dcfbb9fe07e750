/* SPDX-License-Identifier: MIT */
/* save/txn_sets.c - what a transaction knows, in memory: notes, base, removals, files. */
#include <errno.h>
#include <string.h>

#include "base/vec.h"

#include "save/txn_priv.h"

/* ---- sorted sets ---- */

/* The place of the first item whose name is not less. */
static size_t names_place(const struct names *s, const char *name)
{
    size_t low = 0, high = s->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (strcmp(s->item[middle]->name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct named *names_find(const struct names *s, const char *name)
{
    size_t i = names_place(s, name);

    return i < s->count && strcmp(s->item[i]->name, name) == 0 ? s->item[i] : NULL;
}

int names_add(struct names *s, struct named *item)
{
    size_t i = names_place(s, item->name);

    if (i < s->count && strcmp(s->item[i]->name, item->name) == 0)
        return -EEXIST;
    if (!VEC_ROOM(s->item, s->count, s->cap))
        return -ENOMEM;
    memmove(s->item + i + 1, s->item + i, (s->count - i) * sizeof *s->item);
    s->item[i] = item;
    s->count++;
    return 0;
}

struct named *names_take(struct names *s, const char *name)
{
    size_t i = names_place(s, name);
    struct named *item;

    if (i == s->count || strcmp(s->item[i]->name, name) != 0)
        return NULL;
    item = s->item[i];
    s->count--;
    memmove(s->item + i, s->item + i + 1, (s->count - i) * sizeof *s->item);
    return item;
}

/* ---- changes ---- */

static void free_note(struct txn_note_item *n)
{
    if (n) {
        free(n->key.name);
        free(n->text);
        free(n);
    }
}

static void release_notes(struct names *notes)
{
    for (size_t i = 0; i < notes->count; i++)
        free_note(container_of(notes->item[i], struct txn_note_item, key));
    free(notes->item);
    *notes = (struct names){0};
}

int txn_set_note(struct names *notes, const char *word, const char *text)
{
    struct named *old = names_find(notes, word);
    struct txn_note_item *n;
    int ret;

    if (!text) {
        if (old)
            free_note(container_of(names_take(notes, word), struct txn_note_item, key));
        return 0;
    }
    if (old) {
        char *copy = strdup(text);

        n = container_of(old, struct txn_note_item, key);
        if (!copy)
            return -ENOMEM;
        free(n->text);
        n->text = copy;
        return 0;
    }
    n = calloc(1, sizeof *n);
    if (n) {
        n->key.name = strdup(word);
        n->text = strdup(text);
    }
    ret = n && n->key.name && n->text ? names_add(notes, &n->key) : -ENOMEM;
    if (ret < 0)
        free_note(n);
    return ret;
}

int txn_set_base(struct txn_journal *j, const char *path, const struct file_id *id)
{
    struct named *old = names_find(&j->base, path);
    struct txn_base_item *b;
    int ret;

    if (old) {
        container_of(old, struct txn_base_item, key)->id = *id;
        return 0;
    }
    b = calloc(1, sizeof *b);
    if (b)
        b->key.name = strdup(path);
    ret = b && b->key.name ? names_add(&j->base, &b->key) : -ENOMEM;
    if (ret < 0) {
        if (b)
            free(b->key.name);
        free(b);
        return ret;
    }
    b->id = *id;
    return 0;
}

int txn_set_gone(struct txn_journal *j, const char *path)
{
    struct named *item;
    int ret;

    if (names_find(&j->gone, path))
        return 0;
    item = calloc(1, sizeof *item);
    if (item)
        item->name = strdup(path);
    ret = item && item->name ? names_add(&j->gone, item) : -ENOMEM;
    if (ret < 0) {
        if (item)
            free(item->name);
        free(item);
    }
    return ret;
}

bool txn_unset_gone(struct txn_journal *j, const char *path)
{
    struct named *item = names_take(&j->gone, path);

    if (!item)
        return false;
    free(item->name);
    free(item);
    return true;
}

/* ---- files ---- */

static void file_free(struct txn_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    release_notes(&f->notes);
    ranges_release(&f->arrived);
    ranges_release(&f->synced);
    ranges_release(&f->told);
    ranges_release(&f->rewritten);
    ranges_release(&f->before);
    pthread_mutex_destroy(&f->sync);
    txn_unref(f->txn);
    free(f->key.name);
    free(f);
}

void txn_file_unref(struct txn_file *f)
{
    if (atomic_fetch_sub(&f->refs, 1) == 1)
        file_free(f);
}

static int append_id(struct txn_journal *j, struct txn_file *f)
{
    if (!VEC_ROOM(j->by_id, j->ids, j->id_cap))
        return -ENOMEM;
    j->by_id[j->ids++] = f;
    return 0;
}

static size_t id_place(const struct txn_journal *j, uint64_t id)
{
    size_t low = 0, high = j->ids;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (j->by_id[middle]->id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct txn_file *txn_journal_file(const struct txn_journal *j, uint64_t id)
{
    size_t i = id_place(j, id);

    return i < j->ids && j->by_id[i]->id == id ? j->by_id[i] : NULL;
}

/* Ids only grow. */
struct txn_file *txn_file_make(struct txn_journal *j, const char *path, uint64_t id)
{
    struct txn_file *f = calloc(1, sizeof *f);

    if (!f)
        return NULL;
    f->fd = -1;
    f->id = id;
    f->refs = 1;
    pthread_mutex_init(&f->sync, NULL);
    f->key.name = strdup(path);
    if (!f->key.name || append_id(j, f) < 0) {
        file_free(f);
        return NULL;
    }
    if (names_add(&j->files, &f->key) < 0) {
        j->ids--;
        file_free(f);
        return NULL;
    }
    f->listed = true;
    j->next_id = id + 1;
    return f;
}

void txn_file_unlist(struct txn_journal *j, struct txn_file *f)
{
    size_t i = id_place(j, f->id);

    if (i < j->ids && j->by_id[i] == f) {
        j->ids--;
        memmove(j->by_id + i, j->by_id + i + 1, (j->ids - i) * sizeof *j->by_id);
        names_take(&j->files, f->key.name);
        f->listed = false;
    }
}

/* The path must be free. */
int txn_file_relist(struct txn_journal *j, struct txn_file *f, const char *path)
{
    char *copy = strdup(path), *old = f->key.name;

    if (!copy)
        return -ENOMEM;
    names_take(&j->files, old);
    f->key.name = copy;
    names_add(&j->files, &f->key); /* in the room of the one taken */
    free(old);
    return 0;
}

void txn_journal_release(struct txn_journal *j)
{
    for (size_t i = 0; i < j->ids; i++)
        txn_file_unref(j->by_id[i]);
    for (size_t i = 0; i < j->base.count; i++) {
        free(j->base.item[i]->name);
        free(container_of(j->base.item[i], struct txn_base_item, key));
    }
    for (size_t i = 0; i < j->gone.count; i++) {
        free(j->gone.item[i]->name);
        free(j->gone.item[i]);
    }
    release_notes(&j->notes);
    free(j->base.item);
    free(j->gone.item);
    free(j->files.item);
    free(j->by_id);
    free(j->target);
    *j = (struct txn_journal){0};
}
