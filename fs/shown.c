/* SPDX-License-Identifier: MIT */
/* fs/shown.c - a snapshot of what a directory shows, and what changed in it since. */
#include "fs/shown.h"

#include <search.h>
#include <string.h>

#include "remote/listing.h"

/* What a name stood for at one moment. Others may hold it: it goes with the snapshot. */
struct shown_change {
    struct shown_change *next;
    uint64_t turn;
    bool gone;
    struct shown_entry entry;
};

struct shown_name {
    const char *name;
    struct shown_change *now;
    char text[]; /* of the name */
};

struct shown *shown_make(void)
{
    struct shown *s = calloc(1, sizeof *s);

    if (!s)
        return NULL;
    s->refs = 1;
    pthread_mutex_init(&s->lock, NULL);
    return s;
}

struct shown *shown_get(struct shown *s)
{
    atomic_fetch_add(&s->refs, 1);
    return s;
}

static void keep_name(void *name)
{
    (void)name; /* the list has them */
}

void shown_put(struct fs *fs, struct shown *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) > 1)
        return;
    tdestroy(s->by_name, keep_name);
    for (size_t i = 0; i < s->nchanged; i++)
        free(s->changed[i]);
    free(s->changed);
    for (struct shown_change *c = s->states, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    pthread_mutex_destroy(&s->lock);
    slot_unref(fs, s->slot, 1);
    listing_free(s->listing);
    free(s->latest);
    free(s->entry);
    free(s);
}

static int by_name(const void *a, const void *b)
{
    const struct shown_entry *left = a, *right = b;

    return strcmp(left->name, right->name);
}

/* What the look found. */
static const struct shown_entry *find_made(const struct shown *s, const char *name)
{
    const struct shown_entry key = {.name = name};

    return s->count ? bsearch(&key, s->entry, s->count, sizeof key, by_name) : NULL;
}

/* ---- names that changed; with the lock ---- */

static int by_text(const void *a, const void *b)
{
    const struct shown_name *left = a, *right = b;

    return strcmp(left->name, right->name);
}

static struct shown_name *name_new(const char *name)
{
    size_t len = strlen(name);
    struct shown_name *n = malloc(sizeof *n + len + 1);

    if (!n)
        return NULL;
    n->name = memcpy(n->text, name, len + 1);
    n->now = NULL;
    return n;
}

static bool make_room(struct shown *s)
{
    size_t cap = s->changed_cap ? 2 * s->changed_cap : 16;
    struct shown_name **grown;

    if (s->nchanged < s->changed_cap)
        return true;
    grown = reallocarray(s->changed, cap, sizeof *grown);
    if (!grown)
        return false;
    s->changed = grown;
    s->changed_cap = cap;
    return true;
}

static struct shown_name *name_find(const struct shown *s, const char *name)
{
    const struct shown_name key = {.name = name};
    struct shown_name **found = tfind(&key, &s->by_name, by_text);

    return found ? *found : NULL;
}

/* NULL: no memory. */
static struct shown_name *name_add(struct shown *s, const char *name)
{
    struct shown_name *n = make_room(s) ? name_new(name) : NULL;

    if (n && !tsearch(n, &s->by_name, by_text)) {
        free(n);
        n = NULL;
    }
    if (n)
        s->changed[s->nchanged++] = n;
    return n;
}

static const struct shown_entry *entry_of(const struct shown_name *n)
{
    return n->now->gone ? NULL : &n->now->entry;
}

/*
 * Names that a format looks for may make the directory another thing; so may what was more
 * than a file or a directory.
 */
static bool can_amend(const struct shown *s, const char *name)
{
    const struct shown_entry *was = find_made(s, name);

    return s->amends && !s->lost && !listing_was_asked(s->listing, name) &&
           (!was || ((was->kind == SHOWN_DIR || was->kind == SHOWN_FILE) &&
                     !was->part && !was->whole));
}

/* ---- all of it ---- */

const struct shown_entry *shown_find(struct shown *s, const char *name)
{
    const struct shown_name *n = NULL;
    const struct shown_entry *entry = NULL;

    if (s->nchanged > 0) {
        pthread_mutex_lock(&s->lock);
        n = name_find(s, name);
        entry = n ? entry_of(n) : NULL;
        pthread_mutex_unlock(&s->lock);
    }
    return n ? entry : find_made(s, name);
}

size_t shown_places(struct shown *s)
{
    return s->count + s->nchanged;
}

const struct shown_entry *shown_at(struct shown *s, size_t i)
{
    const struct shown_entry *entry;

    if (i < s->count)
        return s->nchanged > 0 ? shown_find(s, s->entry[i].name) : &s->entry[i];
    pthread_mutex_lock(&s->lock);
    entry = i - s->count < s->nchanged ? entry_of(s->changed[i - s->count]) : NULL;
    pthread_mutex_unlock(&s->lock);
    /* What the look had found stands in its own place. */
    return entry && !find_made(s, entry->name) ? entry : NULL;
}

bool shown_is_empty(struct shown *s)
{
    for (size_t i = 0; i < shown_places(s); i++)
        if (shown_at(s, i))
            return false;
    return true;
}

/* With the lock; false: no memory. */
static bool change(struct shown *s, const char *name, const struct shown_entry *now,
                   uint64_t turn)
{
    struct shown_name *n = name_find(s, name);
    struct shown_change *c;

    if (n && n->now->turn > turn)
        return true;
    c = calloc(1, sizeof *c);
    if (!c)
        return false;
    if (!n && !(n = name_add(s, name))) {
        free(c);
        return false;
    }
    c->turn = turn;
    c->gone = !now;
    if (now)
        c->entry = *now;
    c->entry.name = n->name;
    c->next = s->states;
    s->states = c;
    n->now = c;
    return true;
}

void shown_change(struct shown *s, const char *name, const struct shown_entry *now,
                  uint64_t turn)
{
    pthread_mutex_lock(&s->lock);
    if (!change(s, name, now, turn))
        s->lost = true;
    if (s->made && !can_amend(s, name))
        s->until_ns = 0;
    pthread_mutex_unlock(&s->lock);
}

void shown_made(struct shown *s, int64_t until_ns)
{
    pthread_mutex_lock(&s->lock);
    s->until_ns = s->lost ? 0 : until_ns;
    for (size_t i = 0; i < s->nchanged; i++)
        if (!can_amend(s, s->changed[i]->name))
            s->until_ns = 0;
    s->made = true;
    pthread_mutex_unlock(&s->lock);
}
