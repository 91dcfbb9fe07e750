/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/verl_files.c - which files of a directory are verl's, of which run. */
#include "index/formats/rankfiles/verl_files.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/name_take.h"
#include "remote/listing.h"

enum { MAX_RANKS = 1000000 }; /* numbers in names that are believed */

/* ---- names ---- */

static bool take_number(const char **p, uint32_t *out)
{
    const char *start = *p;

    *out = 0;
    while (isdigit((unsigned char)**p) && *out < MAX_RANKS)
        *out = *out * 10 + (uint32_t)(*(*p)++ - '0');
    /* One spelling only, so that no two files are of one rank. */
    return *p > start && (*start != '0' || *p == start + 1);
}

bool verl_name(const char *name, struct verl_name *out)
{
    static const char *const kinds[] = {"model", "optim", "extra_state"};

    for (int k = 0; k < VERL_KINDS; k++) {
        const char *p = name;

        out->kind = (enum verl_kind)k;
        if (name_take(&p, kinds[k]) && name_take(&p, "_world_size_") &&
            take_number(&p, &out->world) && name_take(&p, "_rank_") &&
            take_number(&p, &out->rank) && strcmp(p, ".pt") == 0)
            return out->rank < out->world;
    }
    return false;
}

static bool is_file(const struct listing_entry *entry, struct verl_name *out)
{
    return entry->st.kind == ENTRY_FILE && verl_name(entry->name, out);
}

/* ---- which world size ---- */

/* A save of one world size, and the time of its newest file of the model (else of any). */
struct save {
    uint32_t world;
    bool model;
    int64_t mtime;
};

enum { MAX_SAVES = 64 }; /* nobody resumes more often without cleaning up */

static struct save *save_of(struct save *save, size_t *n, uint32_t world)
{
    for (size_t i = 0; i < *n; i++)
        if (save[i].world == world)
            return &save[i];
    if (*n == MAX_SAVES)
        return NULL;
    save[*n] = (struct save){.world = world, .mtime = INT64_MIN};
    return &save[(*n)++];
}

static int find_saves(const struct listing *l, struct save *save, size_t *n,
                      struct err *e)
{
    struct verl_name name;

    *n = 0;
    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct save *s;
        bool model;

        if (!is_file(entry, &name))
            continue;
        s = save_of(save, n, name.world);
        if (!s)
            return err_set(e, ENOTSUP, "files of more than %d world sizes", MAX_SAVES);
        model = name.kind == VERL_MODEL;
        if (model > s->model || (model == s->model && entry->st.id.mtime_ns > s->mtime))
            s->mtime = entry->st.id.mtime_ns;
        s->model |= model;
    }
    return *n > 0 ? 0 : err_set(e, ESTALE, "no files of ranks any more");
}

static int newest(const struct save *save, size_t n, uint32_t *world, struct err *e)
{
    const struct save *best = &save[0];
    bool tie = false;

    for (size_t i = 1; i < n; i++) {
        if (save[i].model == best->model && save[i].mtime == best->mtime) {
            tie = true;
        } else if (save[i].model > best->model ||
                   (save[i].model == best->model && save[i].mtime > best->mtime)) {
            best = &save[i];
            tie = false;
        }
    }
    *world = best->world;
    if (!tie)
        return 0;
    err_set(e, ENOTSUP,
            "files of several world sizes, as %" PRIu32 " and %" PRIu32
            ", of one time: which ones are the checkpoint is not told",
            save[0].world, save[1].world);
    return err_hint(e, "move those of the older save away");
}

static int choose(const struct listing *l, uint64_t told, uint32_t *world,
                  struct err *e)
{
    struct save save[MAX_SAVES];
    size_t n;

    TRY(find_saves(l, save, &n, e));
    for (size_t i = 0; i < n; i++) {
        if (save[i].world == told) {
            *world = save[i].world;
            return 0;
        }
    }
    return newest(save, n, world, e);
}

/* ---- the files ---- */

static int compare_ranks(const void *a, const void *b)
{
    const struct verl_file *x = a, *y = b;

    return (x->rank > y->rank) - (x->rank < y->rank);
}

static int allocate(const struct listing *l, struct verl_files *f)
{
    uint32_t count[VERL_KINDS] = {0};
    struct verl_name name;
    size_t stale = 0;

    for (size_t i = 0; i < listing_count(l); i++) {
        if (!is_file(listing_at(l, i), &name))
            continue;
        if (name.world == f->world)
            count[name.kind]++;
        else
            stale++;
    }
    f->stale = calloc(stale + 1, sizeof *f->stale);
    if (!f->stale)
        return -ENOMEM;
    for (int k = 0; k < VERL_KINDS; k++) {
        f->file[k] = calloc((size_t)count[k] + 1, sizeof *f->file[k]);
        if (!f->file[k])
            return -ENOMEM;
    }
    return 0;
}

static void sort_in(const struct listing *l, struct verl_files *f)
{
    struct verl_name name;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (!is_file(entry, &name))
            continue;
        if (name.world == f->world) {
            f->file[name.kind][f->count[name.kind]++] =
                (struct verl_file){entry->name, name.rank};
        } else {
            f->stale[f->nstale++] = entry->name;
            f->stale_world = name.world;
        }
    }
    for (int k = 0; k < VERL_KINDS; k++)
        if (f->count[k] > 0)
            qsort(f->file[k], f->count[k], sizeof *f->file[k], compare_ranks);
}

int verl_files_find(const struct listing *l, uint64_t told, struct verl_files *out,
                    struct err *e)
{
    *out = (struct verl_files){0};
    TRY(choose(l, told, &out->world, e));
    if (allocate(l, out) < 0) {
        verl_files_release(out);
        return err_nomem(e);
    }
    sort_in(l, out);
    return 0;
}

void verl_files_release(struct verl_files *f)
{
    for (int k = 0; k < VERL_KINDS; k++)
        free(f->file[k]);
    free(f->stale);
    *f = (struct verl_files){0};
}
