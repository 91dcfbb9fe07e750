/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_train.c - train/rankN.pt: the state of OLMo's trainers, as objects. */
#include "index/formats/olmo/olmo_train.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/olmo/olmo_part.h"
#include "index/formats/torch/torch_file.h"

static const char TRAIN[] = "train";

/* N of rankN.pt. */
static bool rank_of(const char *name, uint64_t *rank)
{
    char *end;

    if (strncmp(name, "rank", 4) != 0 || !isdigit((unsigned char)name[4]) ||
        strlen(name) > 32)
        return false;
    *rank = strtoull(name + 4, &end, 10);
    return strcmp(end, ".pt") == 0 && *rank < UINT32_MAX;
}

static bool is_state(const struct listing_entry *entry, uint64_t *rank)
{
    return entry->st.kind == ENTRY_FILE && rank_of(entry->name, rank);
}

bool olmo_train_find(struct listing *l)
{
    const struct listing *train = listing_sub(l, TRAIN);
    uint64_t rank;

    for (size_t i = 0; train && i < listing_count(train); i++)
        if (is_state(listing_at(train, i), &rank))
            return true;
    return false;
}

/* The trainer's dict: {"global_step": ..., "world_size": ..., "rng": ...}. */
static void take_facts(const struct torch_file *f, struct olmo_train_told *told)
{
    struct pv root = torch_zip_root(f->zip), v;
    uint64_t n;

    if (root.kind != PV_DICT)
        return;
    if (pv_dict_get(&root, "world_size", &v) && pv_u64(&v, &n))
        told->ranks = MAX(told->ranks, n);
    if (!told->has_step && pv_dict_get(&root, "global_step", &v) && v.kind == PV_INT &&
        v.i >= 0) {
        told->has_step = true;
        told->step = v.i;
    }
}

static int warn(struct sink *sink, const char *name, const struct err *why,
                struct err *e)
{
    return sink_warning(sink, "object", "%s: %s", name, why->text) < 0 ? err_nomem(e)
                                                                       : 0;
}

/* What is wrong with one of them costs nobody a weight: a warning. */
static int report_file(const struct scan_context *c, struct sink *sink,
                       const char *name, struct olmo_train_told *told, struct err *e)
{
    static const struct torch_report how = {.role = ROLE_OTHER};
    CLEANUP(torch_file_close) struct torch_file f = {.path = name};
    struct err why = {0};

    if (torch_file_register(sink, &f, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", name) : -e->code;
    if (torch_file_load(c, &f, &why) == 0) {
        take_facts(&f, told);
        return torch_file_report_loaded(sink, &f, &how, e);
    }
    if (why.code != EBADMSG && why.code != ENOTSUP) {
        return err_copy(e, &why);
    }
    return warn(sink, name, &why, e);
}

int olmo_train_report(const struct scan_context *c, struct sink *sink,
                      struct olmo_train_told *told, struct err *e)
{
    struct listing *train = listing_sub(c->listing, TRAIN);
    uint64_t rank, files = 0;

    *told = (struct olmo_train_told){0};
    if (!olmo_train_find(c->listing))
        return 0;
    TRY(olmo_part_add(sink, TRAIN, e));
    for (size_t i = 0; i < listing_count(train); i++) {
        char path[NAME_MAX + sizeof TRAIN + 1];

        if (!is_state(listing_at(train, i), &rank))
            continue;
        snprintf(path, sizeof path, "%s/%s", TRAIN, listing_at(train, i)->name);
        TRY(report_file(c, sink, path, told, e));
        told->ranks = MAX(told->ranks, rank + 1);
        files++;
    }
    if (files < told->ranks &&
        sink_warning(sink, "missing-file",
                     "%s holds the state of %" PRIu64 " of %" PRIu64 " ranks", TRAIN,
                     files, told->ranks) < 0)
        return err_nomem(e);
    return 0;
}
