/* SPDX-License-Identifier: MIT */
/* index/formats/scan.c - asks every driver what a directory or a file is. */
#include "index/formats/scan.h"

#include <string.h>

#include "base/err.h"

enum {
    FIRST_FILES = 8,
    MARKED_LEVELS = 2, /* epoch_E_step_S/model/consolidated */
};

void place_release(struct place *p)
{
    free(p->files);
    *p = (struct place){0};
}

static struct bid bid_of(const struct format_driver *d, struct listing *l,
                         const char *file)
{
    struct bid b = {0};

    if (!file)
        d->bid(l, &b);
    else if (d->bid_file)
        d->bid_file(l, file, &b);
    return b;
}

/* The driver that bids most for the directory (file NULL) or the file, or NULL. */
static const struct format_driver *winner(struct listing *l, const char *file,
                                          bool *piece)
{
    const struct format_driver *best = NULL;
    int score = 0;

    *piece = false;
    for (const struct format_driver *const *d = format_drivers; *d; d++) {
        struct bid b = bid_of(*d, l, file);

        if (b.score > score) {
            score = b.score;
            best = *d;
            *piece = b.piece;
        }
    }
    return best;
}

static int add_file(struct place *p, size_t *cap, const char *name,
                    const struct format_driver *d, struct err *e)
{
    if (p->nfiles == *cap) {
        size_t more = *cap ? *cap * 2 : FIRST_FILES;
        struct place_file *files = reallocarray(p->files, more, sizeof *files);

        if (!files)
            return err_nomem(e);
        p->files = files;
        *cap = more;
    }
    p->files[p->nfiles++] = (struct place_file){name, d};
    return 0;
}

static int find_files(struct listing *l, struct place *p, struct err *e)
{
    size_t cap = 0;
    bool piece;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        const struct format_driver *d;

        if (entry->st.kind != ENTRY_FILE)
            continue;
        d = winner(l, entry->name, &piece);
        if (d && !piece && add_file(p, &cap, entry->name, d, e) < 0) {
            place_release(p);
            return -e->code;
        }
    }
    return 0;
}

static void set_one_file(struct place *p, const char *name,
                         const struct format_driver *d)
{
    place_release(p);
    p->kind = PLACE_CHECKPOINT;
    p->driver = d;
    p->file = name;
}

static void place_of_file(struct listing *l, const char *name, struct place *out)
{
    const struct listing_entry *entry = listing_find(l, name);
    const struct format_driver *d;
    bool piece; /* asked for by name it stands for all of them */

    if (!entry || entry->st.kind != ENTRY_FILE)
        return;
    d = winner(l, entry->name, &piece);
    if (d)
        set_one_file(out, entry->name, d);
}

/*
 * NeMo AutoModel's mark of a save that runs or was cut off. It lies above the model and
 * the optimizer: what is complete in itself (shards without an index) may lack files.
 */
static bool is_unfinished(const struct listing *l)
{
    return listing_marked(l, ".incomplete", MARKED_LEVELS);
}

/* Among many files some are often other people's; one that was asked for is not. */
static const struct err *trouble_of(const struct listing *l, const char *only)
{
    const struct listing_trouble *t = listing_trouble(l);

    return t && (only || !listing_denied(t)) ? &t->err : NULL;
}

static int judge(struct listing *l, const char *only, struct place *out, struct err *e)
{
    bool piece;

    if (only) {
        place_of_file(l, only, out);
        return 0;
    }
    out->driver = winner(l, NULL, &piece);
    if (out->driver)
        out->kind = PLACE_CHECKPOINT;
    else if (find_files(l, out, e) < 0)
        return -e->code;
    else if (out->nfiles == 1)
        set_one_file(out, out->files[0].name, out->files[0].driver);
    else if (out->nfiles > 1)
        out->kind = PLACE_FILES;
    if (out->kind != PLACE_PLAIN && is_unfinished(l)) {
        place_release(out);
        out->kind = PLACE_PLAIN;
    }
    return 0;
}

int place_of(struct listing *l, const char *only, struct place *out, struct err *e)
{
    *out = (struct place){.kind = PLACE_PLAIN};
    if (judge(l, only, out, e) < 0)
        return -e->code;
    if (out->kind != PLACE_CHECKPOINT)
        out->trouble = trouble_of(l, only);
    return 0;
}

static void tell_bids(struct listing *l, const char *file,
                      void (*fn)(void *user, const struct format_driver *d,
                                 const char *file, const struct bid *b),
                      void *user)
{
    for (const struct format_driver *const *d = format_drivers; *d; d++) {
        struct bid b = bid_of(*d, l, file);

        if (b.score > 0)
            fn(user, *d, file, &b);
    }
}

void place_bids(struct listing *l,
                void (*fn)(void *user, const struct format_driver *d, const char *file,
                           const struct bid *b),
                void *user)
{
    tell_bids(l, NULL, fn, user);
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind == ENTRY_FILE)
            tell_bids(l, entry->name, fn, user);
    }
}
