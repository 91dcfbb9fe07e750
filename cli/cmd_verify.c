/* SPDX-License-Identifier: MIT */
/* cli/cmd_verify.c - is everything there, and does every byte hold what it promises? */
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/pool.h"
#include "cli/cli.h"
#include "cli/verify_archives.h"
#include "cli/verify_bytes.h"
#include "cli/verify_copy.h"
#include "index/fault_groups.h"
#include "index/formats/scan.h"
#include "index/plan.h"
#include "remote/source.h"
#include "remote/store.h"

enum {
    VERIFY_MEMORY = 64 << 20,
    BATCH = 256, /* tensors whose results are kept until they are printed */
};

/* What was found about one tensor. */
struct finding {
    uint32_t ord;
    enum dtype dtype;
    bool cast; /* another type is stored */
    char *key; /* malloc */
    size_t key_len;
    uint64_t bytes;
    char damage[1200]; /* empty: none */
    struct byte_findings found;
};

struct verify {
    struct cli *c;
    struct reading *source;
    struct progress progress;
    int64_t checkpoint;
    struct archives *archives; /* of the checkpoint; NULL: not every byte is read */
    struct finding batch[BATCH];
    size_t n;
    struct fault_groups faults, notes; /* of the checkpoint, not yet printed */
    uint64_t tensors, bytes, damaged, nonfinite;
    uint64_t lost; /* files and parts that are missing, beside the tensors */
    uint64_t checksums, bad_checksums; /* of items */
    uint64_t all_damaged, all_lost, shown, checkpoints;
    char first_bad[1200]; /* a checksum of an item that does not hold */
};

static void describe(struct finding *f, const struct err *e)
{
    if (!f->damage[0])
        err_line(e, f->damage, sizeof f->damage);
}

/* Where every chunk lies: reads the headers of its items, no tensor data. */
static int check_places(struct reader *r, struct err *e)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < plan_chunks(reader_plan(r)); i++) {
        struct chunk_place place = {0};
        const char *path;

        ret = reader_place(r, i, &place, &path, e);
        source_put(place.src);
    }
    return ret;
}

static int check_bytes(const struct verify *v, struct reader *r, struct finding *f,
                       struct err *e)
{
    const struct tensor_check check = {.reader = r,
                                       .env = &v->source->env,
                                       .archives = v->archives,
                                       .dtype = f->dtype,
                                       .cast = f->cast};

    return verify_bytes(&check, &f->found, e);
}

/* What this process lacks says nothing of the checkpoint. */
static bool is_ours(int code)
{
    return code == ENOMEM || code == EMFILE || code == ENFILE;
}

static int check_tensor(void *user, size_t i, struct err *e)
{
    struct verify *v = user;
    struct finding *f = &v->batch[i];
    CLEANUP(reader_closep) struct reader *r = NULL;
    struct err why = {0};

    if (!f->damage[0] && /* else the scan knew */
        (reader_open_tensor(&v->source->env, v->checkpoint, f->ord, false, &r, &why) <
             0 ||
         (v->archives ? check_bytes(v, r, f, &why) : check_places(r, &why)) < 0)) {
        if (is_ours(why.code)) {
            *e = why;
            return -why.code;
        }
        describe(f, &why);
    }
    progress_add(&v->progress, f->bytes);
    return 0;
}

/* "damaged  ", "note     " */
static void print_verdict(const struct verify *v, const char *word)
{
    bool bad = strcmp(word, "damaged") == 0;

    screen_style(&v->c->screen, stdout, bad ? STYLE_BAD : STYLE_WARNING);
    printf("%-7s", word);
    screen_style(&v->c->screen, stdout, STYLE_NONE);
    fputs("  ", stdout);
}

static void print_finding(struct verify *v, const char *place, const struct finding *f)
{
    bool nonfinite = f->found.nonfinite.nan || f->found.nonfinite.inf;

    if (!f->damage[0] && !nonfinite)
        return;
    if (v->c->opt.json) {
        printf("%s\n    {\"checkpoint\": ", v->shown++ ? "," : "");
        out_json(stdout, place, strlen(place));
        fputs(", \"key\": ", stdout);
        out_json(stdout, f->key, f->key_len);
        if (f->damage[0]) {
            fputs(", \"damage\": ", stdout);
            out_json(stdout, f->damage, strlen(f->damage));
        }
        if (nonfinite)
            printf(", \"nan\": %" PRIu64 ", \"inf\": %" PRIu64, f->found.nonfinite.nan,
                   f->found.nonfinite.inf);
        putchar('}');
        return;
    }
    progress_hide(&v->progress);
    print_verdict(v, f->damage[0] ? "damaged" : "note");
    out_text(stdout, f->key, f->key_len, 0);
    if (f->damage[0]) {
        fputs(": ", stdout);
        out_text(stdout, f->damage, strlen(f->damage), 0);
        putchar('\n');
    } else {
        printf(": %" PRIu64 " NaN, %" PRIu64 " Inf\n", f->found.nonfinite.nan,
               f->found.nonfinite.inf);
    }
    progress_show(&v->progress);
}

/* A line for each cause, when all tensors have been looked at: the words of a finding. */
static int group_finding(struct verify *v, const struct finding *f)
{
    const struct nonfinite *n = &f->found.nonfinite;
    char text[80];
    int ret = 0;

    if (f->damage[0])
        ret = fault_groups_add(&v->faults, f->key, f->key_len, f->damage);
    else if (n->nan || n->inf) {
        snprintf(text, sizeof text, "%" PRIu64 " NaN, %" PRIu64 " Inf", n->nan, n->inf);
        ret = fault_groups_add(&v->notes, f->key, f->key_len, text);
    }
    return ret < 0 ? err_nomem(&v->c->err) : 0;
}

static void print_groups(struct verify *v, struct fault_groups *g, const char *word)
{
    char line[2048];

    progress_hide(&v->progress);
    for (size_t i = 0; i < g->n; i++) {
        print_verdict(v, word);
        fault_group_line(&g->at[i], line, sizeof line);
        out_text(stdout, line, strlen(line), 0);
        putchar('\n');
    }
    progress_show(&v->progress);
    fault_groups_release(g);
}

static int tell_finding(struct verify *v, const char *place, const struct finding *f)
{
    if (!v->c->opt.json && !v->c->opt.verbose)
        return group_finding(v, f);
    print_finding(v, place, f);
    return 0;
}

static int run_batch(struct verify *v, const char *place)
{
    int ret = pool_each(v->source->pool, v->n, check_tensor, v, &v->c->err);

    for (size_t i = 0; i < v->n; i++) {
        struct finding *f = &v->batch[i];

        if (ret == 0)
            ret = tell_finding(v, place, f);
        v->tensors++;
        v->bytes += f->bytes;
        v->damaged += f->damage[0] != 0;
        v->nonfinite += f->found.nonfinite.nan + f->found.nonfinite.inf != 0;
        v->checksums += f->found.checksums;
        v->bad_checksums += f->found.bad_checksums;
        if (!v->first_bad[0])
            memcpy(v->first_bad, f->found.bad_checksum, sizeof v->first_bad);
        free(f->key);
    }
    v->n = 0;
    return ret;
}

static int note_tensor(void *user, const struct tensor_info *t)
{
    struct verify *v = user;
    struct finding *f = &v->batch[v->n];

    *f = (struct finding){.ord = t->ord,
                          .dtype = t->dtype,
                          .cast = t->dtype != t->stored,
                          .key = malloc(t->key_len + 1),
                          .key_len = t->key_len,
                          .bytes = t->bytes};
    if (!f->key)
        return err_nomem(&v->c->err);
    memcpy(f->key, t->key, t->key_len + 1);
    if (t->fault)
        snprintf(f->damage, sizeof f->damage, "%s", t->fault);
    v->n++;
    return v->n == BATCH; /* full: run it, then go on from the next */
}

static int verify_tensors(struct verify *v, const char *place)
{
    uint32_t from = 0;
    int ret;

    do {
        ret = catalog_tensors(v->source->catalog, v->checkpoint, from, note_tensor, v,
                              &v->c->err);
        if (ret < 0)
            return ret;
        if (v->n)
            from = v->batch[v->n - 1].ord + 1;
        TRY(run_batch(v, place));
    } while (ret == 1);
    print_groups(v, &v->faults, "damaged");
    print_groups(v, &v->notes, "note");
    return 0;
}

/*
 * Writers may leave the CRC out (torch: save.compute_crc32=False): then none of them holds.
 * Some that hold and some that do not are damage.
 */
static void judge_checksums(struct verify *v, uint64_t checksums, uint64_t bad,
                            const char *first)
{
    if (!bad)
        return;
    if (bad == checksums && bad > 1) {
        if (v->c->opt.json)
            return;
        progress_hide(&v->progress);
        print_verdict(v, "note");
        printf("none of %" PRIu64 " CRCs holds: the writer left them out\n", bad);
        progress_show(&v->progress);
        return;
    }
    v->damaged += bad;
    if (v->c->opt.json) {
        printf("%s\n    {\"damage\": ", v->shown++ ? "," : "");
        out_json(stdout, first, strlen(first));
        printf(", \"checksums\": %" PRIu64 "}", bad);
    } else {
        progress_hide(&v->progress);
        print_verdict(v, "damaged");
        if (checksums)
            printf("%" PRIu64 " of %" PRIu64 " CRCs do not hold, first: ", bad,
                   checksums);
        out_text(stdout, first, strlen(first), 0);
        putchar('\n');
        progress_show(&v->progress);
    }
}

static void tell_archive(void *user, const struct archive_finding *f)
{
    judge_checksums(user, f->records, f->bad, f->first);
}

/* A copy that differs: the shards are what is shown. */
static void tell_copy(void *user, const char *key, size_t key_len, const char *why)
{
    struct verify *v = user;

    v->damaged++;
    if (v->c->opt.json) {
        printf("%s\n    {\"key\": ", v->shown++ ? "," : "");
        out_json(stdout, key, key_len);
        fputs(", \"damage\": ", stdout);
        out_json(stdout, why, strlen(why));
        putchar('}');
        return;
    }
    progress_hide(&v->progress);
    print_verdict(v, "damaged");
    out_text(stdout, key, key_len, 0);
    fputs(": ", stdout);
    out_text(stdout, why, strlen(why), 0);
    putchar('\n');
    progress_show(&v->progress);
}

/* What the scan found wrong that belongs to no tensor: a part or a file that is lost. */
static int tell_loss(void *user, const char *code, const char *text)
{
    struct verify *v = user;
    bool broken;

    if (!warning_is_loss(code))
        return 0;
    broken = strncmp(code, "damaged-", 8) == 0;
    *(broken ? &v->damaged : &v->lost) += 1;
    if (v->c->opt.json) {
        printf("%s\n    {\"warning\": ", v->shown++ ? "," : "");
        out_json(stdout, code, strlen(code));
        fputs(", \"damage\": ", stdout);
        out_json(stdout, text, strlen(text));
        putchar('}');
        return 0;
    }
    progress_hide(&v->progress);
    print_verdict(v, broken ? "damaged" : "lost");
    printf("%s: ", code);
    out_text(stdout, text, strlen(text), 0);
    putchar('\n');
    progress_show(&v->progress);
    return 0;
}

static int check_copies(struct verify *v)
{
    struct copy_totals t;
    int ret = verify_copies(v->c, v->source, v->checkpoint, tell_copy, v, &t);

    if (ret == 0 && t.tensors > 0 && !v->c->opt.json && !v->c->opt.quiet) {
        progress_hide(&v->progress);
        print_verdict(v, "note");
        printf("full copies of %" PRIu64 " tensors: %" PRIu64 " compared, %" PRIu64
               " differ, %" PRIu64 " are of another type\n",
               t.tensors, t.compared, t.differ, t.other);
        progress_show(&v->progress);
    }
    return ret;
}

static void print_total(struct verify *v, const char *place)
{
    char size[16];

    if (v->c->opt.json || v->c->opt.quiet)
        return;
    out_text(stdout, *place ? place : v->source->name,
             strlen(*place ? place : v->source->name), 0);
    printf(": %" PRIu64 " tensors, %s, %s: ", v->tensors, out_size(v->bytes, size),
           v->c->opt.deep ? "every byte read" : "headers read");
    screen_style(&v->c->screen, stdout, v->damaged || v->lost ? STYLE_BAD : STYLE_GOOD);
    if (v->damaged)
        printf("%" PRIu64 " damaged", v->damaged);
    if (v->lost)
        printf("%s%" PRIu64 " lost", v->damaged ? ", " : "", v->lost);
    if (!v->damaged && !v->lost)
        fputs("whole", stdout);
    screen_style(&v->c->screen, stdout, STYLE_NONE);
    putchar('\n');
}

static int print_unreadable(struct verify *v, const char *place, const char *why)
{
    v->all_damaged++;
    if (v->c->opt.json) {
        printf("%s\n    {\"checkpoint\": ", v->shown++ ? "," : "");
        out_json(stdout, place, strlen(place));
        fputs(", \"damage\": ", stdout);
        out_json(stdout, why, strlen(why));
        putchar('}');
    } else {
        out_text(stdout, *place ? place : v->source->name,
                 strlen(*place ? place : v->source->name), 0);
        fputs(": unreadable: ", stdout);
        out_text(stdout, why, strlen(why), 0);
        putchar('\n');
    }
    return 0;
}

static int verify_one(void *user, const char *dir, const char *file,
                      const struct format_driver *d)
{
    struct verify *v = user;
    CLEANUP(arena_freep) struct arena *a = arena_new(VERIFY_MEMORY);
    CLEANUP(archives_freep) struct archives *archives = NULL;
    struct checkpoint_info info;
    char place[4096];
    int ret;

    (void)d;
    v->checkpoints++;
    if (!a)
        return err_nomem(&v->c->err);
    ret = store_join(dir, file ? file : "", place, sizeof place);
    if (ret == 0)
        ret = scanner_get(v->source->scanner, dir, file, a, &info, &v->c->err);
    if (ret < 0)
        return ret;
    if (info.error)
        return print_unreadable(v, place, info.error);
    v->checkpoint = info.id;
    v->tensors = v->bytes = v->damaged = v->lost = 0;
    v->checksums = v->bad_checksums = 0;
    v->first_bad[0] = '\0';
    progress_begin(&v->progress, v->c, "verify", *place ? place : NULL, info.bytes);
    if (v->c->opt.deep)
        ret = archives_new(v->source, v->checkpoint, &archives, &v->c->err);
    v->archives = archives;
    if (ret == 0)
        ret = verify_tensors(v, place);
    if (ret == 0)
        ret = catalog_warnings(v->source->catalog, v->checkpoint, tell_loss, v,
                               &v->c->err);
    if (ret == 0)
        ret = check_copies(v);
    if (ret == 0 && v->archives)
        ret = archives_check(v->archives, tell_archive, v, &v->c->err);
    progress_end(&v->progress);
    if (ret < 0)
        return ret;
    judge_checksums(v, v->checksums, v->bad_checksums, v->first_bad);
    print_total(v, place);
    v->all_damaged += v->damaged;
    v->all_lost += v->lost;
    return 0;
}

static int tell_unfinished(void *user, const char *dir, const char *why)
{
    struct verify *v = user;

    if (!*dir) /* the source itself: there is nothing to be verified */
        return 0;
    v->checkpoints++;
    return print_unreadable(v, dir, why);
}

static int verify_source(struct verify *v)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP(place_release) struct place place = {0};
    struct store *store = v->source->store;
    int ret = store->ops->list(store, "", &l, &v->c->err);

    if (ret == 0)
        ret = place_of(l, store->file, &place, &v->c->err);
    if (ret < 0)
        return ret;
    if (place.kind == PLACE_CHECKPOINT && store->file)
        return verify_one(v, "", place.file, place.driver);
    return scanner_walk_all(v->source->scanner, "", verify_one, tell_unfinished, v,
                            &v->c->err);
}

static int run(struct cli *c)
{
    CLEANUP(reading_close) struct reading s;
    CLEANUP_FREE struct verify *v = calloc(1, sizeof *v);
    int ret = cli_open(c, c->arg[0], &s);

    if (ret < 0 || !v)
        return ret < 0 ? ret : err_nomem(&c->err);
    v->c = c;
    v->source = &s;
    if (c->opt.json)
        fputs("{\"schema\": 1, \"findings\": [", stdout);
    ret = verify_source(v);
    if (c->opt.json)
        printf("\n], \"damaged\": %" PRIu64 ", \"lost\": %" PRIu64 "}\n",
               v->all_damaged, v->all_lost);
    if (ret == 0 && !v->checkpoints)
        ret = cli_no_checkpoint(c, &s);
    if (ret < 0)
        return ret;
    return v->all_damaged || v->all_lost ? STATUS_NO : STATUS_DONE;
}

const struct cli_command cmd_verify = {
    .name = "verify",
    .usage = "verify SOURCE [--deep] [-v] [--json]",
    .summary = "holes, overlaps, short files; deep: every byte",
    .min_args = 1,
    .max_args = 1,
    .takes = "d",
    .confined = true,
    .run = run,
};
