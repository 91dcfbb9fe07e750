/* SPDX-License-Identifier: MIT */
/* index/formats/scan.c - asks every driver what a directory or a file is. */
#include "index/formats/scan.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/vec.h"
#include "index/formats/step.h"

enum {
    FIRST_FILES = 8,
    MARKED_LEVELS = 2, /* epoch_E_step_S/model/consolidated */
    BY_NAME = 39,      /* bids up to this one saw nothing but a name */
};

void place_release(struct place *p)
{
    free(p->files);
    *p = (struct place){0};
}

bool place_is_apart(const char *name)
{
    return strcmp(name, "modelopt_state") == 0;
}

/* blobs/ of Hugging Face's cache: what snapshots/ has links to. */
static bool is_digest(const char *name)
{
    size_t len = strlen(name);

    return len >= 32 && strspn(name, "0123456789abcdef") == len;
}

/*
 * May a file of this name be a model although no driver knows its name? One without an
 * extension, and some that people give to weights. Others are not looked into, unless they
 * are asked for.
 */
static bool may_be_weights(const char *name)
{
    static const char *const odd[] = {".sft", ".tar", ".t7", ".weights", ".dat"};
    const char *dot = strrchr(name, '.');

    for (size_t i = 0; dot && i < ARRAY_SIZE(odd); i++)
        if (strcasecmp(dot, odd[i]) == 0)
            return true;
    return !dot && !is_digest(name);
}

/* The driver that knows the file's content, whatever it is called, or NULL. */
static const struct format_driver *content_of(struct listing *l, const char *name)
{
    const struct format_driver *best = NULL;
    int score = 0;

    for (const struct format_driver *const *d = format_drivers; *d; d++) {
        struct bid b = {0};

        if ((*d)->bid_content)
            (*d)->bid_content(l, name, &b);
        if (b.score > score) {
            score = b.score;
            best = *d;
        }
    }
    return best;
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
                                          bool *piece, int *best_score)
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
    *best_score = score;
    return best;
}

static int add_file(struct place *p, size_t *cap, const struct place_file *file,
                    struct err *e)
{
    if (!VEC_ROOM(p->files, p->nfiles, *cap))
        return err_nomem(e);
    p->files[p->nfiles++] = *file;
    return 0;
}

/* Sets of files in subdirectories, of one driver. */
struct finding {
    struct listing *l;
    const struct format_driver *driver;
    struct place *place;
    size_t cap;
    const char *only; /* NULL: all */
    struct err *e;
};

/* What has the name in the directory itself goes before a set. */
static int add_set(void *user, const struct format_set *set)
{
    struct finding *f = user;
    const struct place_file file = {
        .name = set->name, .driver = f->driver, .set_dir = set->dir, .st = set->st};

    if ((f->only && strcmp(f->only, set->name) != 0) || listing_find(f->l, set->name))
        return 0;
    return add_file(f->place, &f->cap, &file, f->e);
}

static int find_sets(struct finding *f)
{
    for (const struct format_driver *const *d = format_drivers; *d; d++) {
        f->driver = *d;
        if ((*d)->sets && (*d)->sets(f->l, add_set, f) < 0)
            return err_nomem(f->e);
    }
    return 0;
}

bool place_hides(const struct place *p, const char *dir)
{
    const struct format_driver *asked = NULL;

    for (size_t i = p->nfiles; i-- > 0 && p->files[i].set_dir;) {
        const struct format_driver *d = p->files[i].driver;

        if (d != asked && d->is_set_dir(dir))
            return true;
        asked = d;
    }
    return false;
}

static int find_files(struct listing *l, struct place *p, struct err *e)
{
    size_t cap = 0;
    bool piece;
    int score;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct place_file file = {.name = entry->name};

        if (entry->st.kind != ENTRY_FILE)
            continue;
        file.driver = winner(l, entry->name, &piece, &score);
        if (!file.driver && may_be_weights(entry->name))
            file.driver = content_of(l, entry->name);
        if (file.driver && !piece && add_file(p, &cap, &file, e) < 0)
            break;
    }
    if (!e->code)
        find_sets(&(struct finding){.l = l, .place = p, .cap = cap, .e = e});
    if (e->code)
        place_release(p);
    return -e->code;
}

static void set_one_file(struct place *p, const char *name,
                         const struct format_driver *d)
{
    place_release(p);
    p->kind = PLACE_CHECKPOINT;
    p->driver = d;
    p->file = name;
}

static int place_of_set(struct listing *l, const char *name, struct place *out,
                        struct err *e)
{
    if (find_sets(&(struct finding){.l = l, .place = out, .only = name, .e = e}) == 0 &&
        out->nfiles > 0)
        set_one_file(out, out->files[0].name, out->files[0].driver);
    return -e->code;
}

static int place_of_file(struct listing *l, const char *name, struct place *out,
                         struct err *e)
{
    const struct listing_entry *entry = listing_find(l, name);
    const struct format_driver *d, *known;
    bool piece; /* asked for by name it stands for all of them */
    int score;

    if (!entry)
        return place_of_set(l, name, out, e);
    if (entry->st.kind != ENTRY_FILE)
        return 0;
    d = winner(l, entry->name, &piece, &score);
    known = score <= BY_NAME ? content_of(l, entry->name) : NULL;
    if (known)
        d = known;
    if (d)
        set_one_file(out, entry->name, d);
    return 0;
}

/* What lies in a NAME of NeMo's and may be a checkpoint by itself. */
static bool is_nemo_part(const char *name)
{
    static const char *const parts[] = {"weights", "hf_weights", "hf_adapter"};

    for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
        if (strcmp(name, parts[i]) == 0)
            return true;
    return place_is_apart(name);
}

/* Of others nothing is asked for beside them: on a server each question takes a while. */
static bool is_nemo_dir(const struct listing *l)
{
    return is_nemo_part(listing_name(l)) || listing_find(l, "context") ||
           listing_find(l, "weights");
}

/*
 * NeMo puts the empty file NAME-unfinished beside the directory NAME while it saves or
 * removes it, one for a model and its average NAME-EMA. It saves over a NAME that is there:
 * the index is then of the old step, and shards are of both.
 */
static bool is_marked_beside(const struct listing *l)
{
    static const char average[] = "-EMA";
    const size_t end = sizeof average - 1;
    char dir[PATH_MAX], mark[PATH_MAX + 16], name[PATH_MAX];
    struct entry_stat st;

    snprintf(dir, sizeof dir, "%s", listing_path(l));
    if (!dir[0])
        return false;
    for (bool look = is_nemo_dir(l); look; look = dir[0] && is_nemo_part(name)) {
        char *slash = strrchr(dir, '/');
        size_t n = strlen(dir);

        n -= n >= end && memcmp(dir + n - end, average, end) == 0 ? end : 0;
        snprintf(mark, sizeof mark, "%.*s-unfinished", (int)n, dir);
        if (listing_look(l, mark, &st) && st.kind == ENTRY_FILE && st.id.size == 0)
            return true;
        snprintf(name, sizeof name, "%s", slash ? slash + 1 : dir);
        *(slash ? slash : dir) = '\0';
    }
    return false;
}

/*
 * A save that runs or was cut off: NeMo AutoModel's mark, which lies above the model and
 * the optimizer, NeMo's beside, or Orbax's name. What is complete in itself (shards without
 * an index, one array of zarr) may lack files, or chunks.
 */
static bool is_unfinished(const struct listing *l)
{
    return listing_marked(l, ".incomplete", MARKED_LEVELS) || is_marked_beside(l) ||
           step_is_temporary(l);
}

/* Shards of DCP, and nothing that says where in tensors they belong. */
static size_t shards_alone(const struct listing *l)
{
    size_t shards = 0;

    for (size_t i = 0; i < listing_count(l); i++) {
        const char *dot = strrchr(listing_at(l, i)->name, '.');

        if (dot && strcmp(dot, ".metadata") == 0)
            return 0;
        shards += dot && strcmp(dot, ".distcp") == 0;
    }
    return shards;
}

static void tell_unfinished(const struct listing *l, struct place *out)
{
    size_t shards = shards_alone(l);

    if (shards > 0)
        snprintf(out->unfinished, sizeof out->unfinished,
                 "%zu .distcp files, and no .metadata beside them: the save is not "
                 "finished, or .metadata was not copied along",
                 shards);
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
    int score;

    if (only)
        return place_of_file(l, only, out, e);
    out->driver = winner(l, NULL, &piece, &score);
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
        if (!step_is_ours(l))
            snprintf(out->unfinished, sizeof out->unfinished,
                     "it has the mark of a save that is not finished");
    } else if (out->kind == PLACE_PLAIN && !step_is_ours(l)) {
        tell_unfinished(l, out);
    }
    return 0;
}

int place_of(struct listing *l, const char *only, struct place *out, struct err *e)
{
    int rc;

    *out = (struct place){.kind = PLACE_PLAIN};
    listing_skip_junk(l, !only);
    rc = judge(l, only, out, e);
    listing_skip_junk(l, false);
    if (rc < 0)
        return rc;
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
