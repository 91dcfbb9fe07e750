/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_ranks.c - classic OLMo's types local and torch_legacy: a file a rank. */
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "index/formats/format.h"
#include "index/formats/olmo/olmo_local.h"
#include "index/formats/olmo/olmo_part.h"
#include "index/formats/olmo/olmo_train.h"
#include "index/formats/rankfiles/rank_set.h"
#include "index/formats/step.h"
#include "index/formats/torch/torch_walk.h"

enum {
    HEAD = 4096,
    MAX_METADATA = 1 << 16, /* one number */
    MAX_RANKS = 1 << 16,
};

static const char MODEL[] = "model";
static const char OPTIM[] = "optim";
static const char METADATA[] = "metadata.yaml";
static const char CONFIG[] = "config.yaml"; /* written last */

/* ---- names ---- */

/* N of rankN.pt, in its one spelling. */
static bool rank_of(const struct listing_entry *entry, uint32_t *rank)
{
    const char *digits = entry->name + 4;
    char *end;
    unsigned long n;

    if (entry->st.kind != ENTRY_FILE || strncmp(entry->name, "rank", 4) != 0 ||
        !isdigit((unsigned char)*digits) || (digits[0] == '0' && digits[1] != '.') ||
        strlen(digits) > 10)
        return false;
    n = strtoul(digits, &end, 10);
    *rank = (uint32_t)n;
    return strcmp(end, ".pt") == 0 && n < MAX_RANKS;
}

/* The ranks that have a file, in order: malloc, or NULL. */
static int find_ranks(const struct listing *l, uint32_t **out, uint32_t *n,
                      struct err *e)
{
    CLEANUP_FREE bool *has = calloc(MAX_RANKS, sizeof *has);
    uint32_t rank;

    *n = 0;
    if (!has)
        return err_nomem(e);
    for (size_t i = 0; l && i < listing_count(l); i++) {
        if (!rank_of(listing_at(l, i), &rank))
            continue;
        has[rank] = true;
        ++*n;
    }
    *out = calloc((size_t)*n + 1, sizeof **out);
    if (!*out)
        return err_nomem(e);
    for (uint32_t r = 0, at = 0; r < MAX_RANKS; r++)
        if (has[r])
            (*out)[at++] = r;
    return 0;
}

/* ---- bids ---- */

/* The beginning of some rank's file that torch.save wrote. */
static size_t head_of(struct listing *l, char head[HEAD])
{
    size_t got = 0;
    uint32_t rank;

    for (size_t i = 0; l && i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        enum torch_kind kind;

        if (!rank_of(entry, &rank) ||
            listing_peek(l, entry->name, head, HEAD, &got) < 0)
            continue;
        kind = torch_sniff(head, got);
        if (kind == TORCH_ZIP || kind == TORCH_LEGACY)
            return got;
    }
    return 0;
}

static bool has_file(const struct listing *l, const char *name)
{
    const struct listing_entry *entry = listing_find(l, name);

    return entry && entry->st.kind == ENTRY_FILE;
}

static bool is_local(struct listing *l)
{
    char head[HEAD];

    return has_file(l, METADATA) && head_of(listing_sub(l, MODEL), head) > 0;
}

static bool is_legacy(struct listing *l)
{
    char head[HEAD];
    size_t got = has_file(l, CONFIG) ? head_of(l, head) : 0;

    return got > 0 && memmem(head, got, "ShardedTensor", strlen("ShardedTensor"));
}

static void ranks_bid(struct listing *l, struct bid *out)
{
    *out = (struct bid){0};
    if (is_local(l)) {
        out->score = 85;
        snprintf(out->reason, sizeof out->reason,
                 "metadata.yaml and model/rankN.pt of OLMo's type local");
    } else if (is_legacy(l)) {
        out->score = 70;
        snprintf(out->reason, sizeof out->reason,
                 "rankN.pt with ShardedTensors, of OLMo's type torch_legacy");
    }
}

/* ---- the scan ---- */

struct scan {
    const struct scan_context *c;
    struct sink *sink;
    bool local;
    uint32_t *rank; /* of each file of the model, or of the whole rank */
    uint32_t files, world;
    struct olmo_train_told train;
};

/* Files of ranks below `dir` ("": the checkpoint's own), merged by `how`. */
static int load_set(struct scan *s, const char *dir, const struct rank_set_how *how,
                    const uint32_t *rank, uint32_t n, struct rank_set **out,
                    struct err *e)
{
    TRY(rank_set_new(s->c, s->sink, how, out, e));
    rank_set_expect(*out, s->world - n);
    for (uint32_t i = 0; i < n; i++) {
        char path[64];

        snprintf(path, sizeof path, "%s%srank%" PRIu32 ".pt", dir, *dir ? "/" : "",
                 rank[i]);
        TRY(rank_set_add(*out, path, e));
    }
    return rank_set_load(*out, e);
}

/* ---- type local ---- */

/* The number of metadata.yaml's line "world_size: N"; false: it tells none. */
static bool parse_world(const char *text, uint64_t *world)
{
    static const char key[] = "world_size:";

    for (const char *line = text; line; line = strchr(line, '\n')) {
        char *end;

        line += *line == '\n';
        if (strncmp(line, key, sizeof key - 1) != 0)
            continue;
        *world = strtoull(line + sizeof key - 1, &end, 10);
        return end != line + sizeof key - 1 && (*end == '\n' || *end == '\0');
    }
    return false;
}

static int find_world(struct scan *s, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    uint32_t least = s->files ? s->rank[s->files - 1] + 1 : 0;
    struct err why = {0};
    uint64_t world = 0;
    size_t len;

    s->world = least;
    TRY(sink_hide(s->sink, METADATA, true, e));
    if (listing_read(s->c->listing, METADATA, MAX_METADATA, &text, &len, &why) == 0 &&
        parse_world(text, &world) && world <= MAX_RANKS) {
        if (world < least)
            return err_set(e, ENOTSUP,
                           "%s tells of %" PRIu64 " ranks, and there is a file of rank "
                           "%" PRIu32,
                           METADATA, world, least - 1);
        s->world = (uint32_t)world;
        return 0;
    }
    return why.code == ENOMEM ||
                   sink_warning(s->sink, "damaged-file",
                                "%s does not tell how many ranks there are: %" PRIu32
                                " by the files",
                                METADATA, least) < 0
               ? err_nomem(e)
               : 0;
}

static int report_model(struct scan *s, struct olmo_local *local, struct err *e)
{
    CLEANUP(rank_set_freep) struct rank_set *set = NULL;
    struct rank_set_how how = {
        .role = ROLE_MODEL, .on_file = olmo_local_model, .user = local};

    olmo_local_files(local, &set, s->rank, s->files);
    TRY(load_set(s, MODEL, &how, s->rank, s->files, &set, e));
    return rank_set_report(set, e);
}

/* An optimizer that cannot be read is no reason to hide the model. */
static int report_optim(struct scan *s, struct olmo_local *local, struct err *e)
{
    CLEANUP(rank_set_freep) struct rank_set *set = NULL;
    CLEANUP_FREE uint32_t *rank = NULL;
    struct rank_set_how how = {.part = OPTIM,
                               .role = ROLE_OPTIMIZER,
                               .optimizer = true,
                               .object = "optim:",
                               .on_file = olmo_local_optim,
                               .on_tensor = olmo_local_state,
                               .rename = olmo_local_rename,
                               .user = local};
    struct err why = {0};
    uint32_t n;

    TRY(find_ranks(listing_sub(s->c->listing, OPTIM), &rank, &n, e));
    if (n == 0)
        return 0;
    if (rank[n - 1] >= s->world)
        return err_set(e, ENOTSUP, "%s/ has a file of rank %" PRIu32 ", of %" PRIu32,
                       OPTIM, rank[n - 1], s->world);
    olmo_local_files(local, &set, rank, n);
    TRY(olmo_part_add(s->sink, OPTIM, e));
    if (load_set(s, OPTIM, &how, rank, n, &set, &why) == 0)
        return rank_set_report(set, e);
    if (why.code == EBADMSG || why.code == ENOTSUP || why.code == EIO ||
        why.code == EFBIG)
        return 0; /* each of its files was told */
    return err_copy(e, &why);
}

static int scan_local(struct scan *s, struct err *e)
{
    CLEANUP(olmo_local_freep) struct olmo_local *local = NULL;

    TRY(find_ranks(listing_sub(s->c->listing, MODEL), &s->rank, &s->files, e));
    TRY(find_world(s, e));
    TRY(olmo_part_add(s->sink, MODEL, e));
    TRY(olmo_local_new(s->world, &local, e));
    TRY(report_model(s, local, e));
    TRY(report_optim(s, local, e));
    return olmo_train_report(s->c, s->sink, &s->train, e);
}

/* ---- type torch_legacy ---- */

/* The path without the entry of the outermost dict that it begins with; false: none. */
static bool strip(const char *path, size_t len, const char *entry, size_t *skip)
{
    *skip = strlen(entry) + 1;
    return len > *skip && strncmp(path, entry, *skip - 1) == 0 &&
           path[*skip - 1] == '.';
}

/* rank_set_how.place */
static void legacy_place(void *user UNUSED, const char *path, size_t len,
                         struct rank_set_place *out)
{
    size_t skip;

    if (!strip(path, len, OPTIM, &skip))
        return;
    out->part = OPTIM;
    out->role = ROLE_OPTIMIZER;
}

/* rank_set_how.rename */
static int legacy_rename(void *user UNUSED, const char *path, size_t len,
                         struct buf *key)
{
    size_t skip;

    if (!strip(path, len, OPTIM, &skip) && !strip(path, len, MODEL, &skip))
        skip = 0;
    return buf_add(key, path + skip, len - skip) < 0 ? -ENOMEM : 0;
}

/* rank_set_how.on_file: the trainer's step. */
static int legacy_step(void *user, uint32_t file UNUSED, struct torch_zip *zip,
                       struct err *e UNUSED)
{
    struct scan *s = user;
    struct pv root = torch_zip_root(zip), items, v;

    if (!s->train.has_step && torch_mapping(&root, &items) && items.kind == PV_DICT &&
        pv_dict_get(&items, "global_step", &v) && v.kind == PV_INT && v.i >= 0) {
        s->train.has_step = true;
        s->train.step = v.i;
    }
    return 0;
}

static int scan_legacy(struct scan *s, struct err *e)
{
    static const char *const merged[] = {MODEL, OPTIM, NULL};
    CLEANUP(rank_set_freep) struct rank_set *set = NULL;
    const struct rank_set_how how = {.role = ROLE_MODEL,
                                     .rename = legacy_rename,
                                     .merged = merged,
                                     .place = legacy_place,
                                     .on_file = legacy_step,
                                     .user = s};

    TRY(find_ranks(s->c->listing, &s->rank, &s->files, e));
    if (s->files == 0)
        return err_set(e, ESTALE, "no files of ranks any more");
    s->world = s->rank[s->files - 1] + 1;
    TRY(load_set(s, "", &how, s->rank, s->files, &set, e));
    return rank_set_report(set, e);
}

/* ---- the checkpoint ---- */

static int tell_checkpoint(const struct scan *s, struct err *e)
{
    char topology[64], path[PATH_MAX];
    struct sink_checkpoint about = {
        .format = s->local ? "olmo-local" : "olmo-torch-legacy",
        .framework = "OLMo",
        .topology = topology,
        .has_step = s->train.has_step,
        .step = s->train.step,
    };

    snprintf(topology, sizeof topology, "{\"ranks\": %" PRIu32 "}", s->world);
    if (store_join(s->c->dir, s->local ? METADATA : CONFIG, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", s->c->dir);
    about.metadata_file = path;
    if (step_of_name(listing_name(s->c->listing), &about.step))
        about.has_step = true;
    else
        about.step = s->train.step;
    return sink_checkpoint(s->sink, &about, e);
}

static int ranks_scan(const struct scan_context *c, struct sink *sink, struct err *e)
{
    struct scan s = {.c = c, .sink = sink, .local = is_local(c->listing)};
    struct err failed = {0};
    int rc = s.local ? scan_local(&s, &failed) : scan_legacy(&s, &failed);

    free(s.rank);
    /* Also a scan that fails has a format. */
    TRY(tell_checkpoint(&s, e));
    if (rc < 0)
        *e = failed;
    return rc;
}

static const struct chunk_codec *const ranks_codecs[] = {&codec_zip_deflate, NULL};

const struct format_driver format_olmo_ranks = {
    .name = "olmo_ranks",
    .title = "classic OLMo's sharded types local and torch_legacy: rankN.pt",
    .bid = ranks_bid,
    .scan = ranks_scan,
    .codecs = ranks_codecs,
};
