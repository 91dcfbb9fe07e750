/* SPDX-License-Identifier: MIT */
/* index/formats/nanotron/nanotron_names.c - what nanotron's file names and headers say. */
#include "index/formats/nanotron/nanotron_names.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/cover.h"

enum {
    MAX_RANK = 1 << 20,
    MAX_PAIRS = 1 << 16, /* real files have 3: q, k and v */
};

/* ---- names of files ---- */

static bool take_text(const char **p, const char *end, const char *text)
{
    size_t n = strlen(text);

    if ((size_t)(end - *p) < n || memcmp(*p, text, n) != 0)
        return false;
    *p += n;
    return true;
}

static bool take_rank(const char **p, const char *end, uint32_t *out)
{
    const char *start = *p;

    for (*out = 0; *p < end && isdigit((unsigned char)**p) && *out < MAX_RANK; (*p)++)
        *out = *out * 10 + (uint32_t)(**p - '0');
    return *p > start && *out < MAX_RANK;
}

/* PREFIX "0-of-2", where it stands here. */
static bool take_axis(const char **p, const char *end, const char *prefix,
                      struct nano_rank *out)
{
    const char *start = *p;

    *out = (struct nano_rank){0};
    if (take_text(p, end, prefix) && take_rank(p, end, &out->at) &&
        take_text(p, end, "-of-") && take_rank(p, end, &out->of) && out->at < out->of) {
        out->is = true;
        return true;
    }
    *out = (struct nano_rank){0};
    *p = start;
    return false;
}

/* All that the text has, and nothing behind it. */
static bool take_weight_ranks(const char *p, const char *end, struct nano_ranks *out)
{
    *out = (struct nano_ranks){0};
    return take_axis(&p, end, "_pp-rank-", &out->pp) &&
           take_axis(&p, end, "_tp-rank-", &out->tp) &&
           (take_axis(&p, end, "_exp-rank-", &out->ep) || true) && p == end;
}

/* The last "_pp-rank-" of the text, or its end. */
static const char *find_ranks(const char *p, const char *end)
{
    static const char mark[] = "_pp-rank-";
    const char *found = end;

    while ((p = memmem(p, (size_t)(end - p), mark, sizeof mark - 1)))
        found = p++;
    return found;
}

bool nano_weight_name(const char *name, struct nano_weight_name *out)
{
    static const char suffix[] = ".safetensors";
    const char *p = name, *end = name + strlen(name), *ranks;
    size_t n = sizeof suffix - 1;

    *out = (struct nano_weight_name){0};
    if ((size_t)(end - p) < n || memcmp(end - n, suffix, n) != 0)
        return false;
    end -= n;
    if (!take_text(&p, end, "model_"))
        return false;
    ranks = find_ranks(p, end);
    if (ranks < end && !take_weight_ranks(ranks, end, &out->rank))
        return false;
    /* The doubled form: "model_NAME.safetensors" where the name should be. */
    if ((size_t)(ranks - p) > n + 6 && memcmp(ranks - n, suffix, n) == 0 &&
        take_text(&p, ranks, "model_"))
        ranks -= n;
    out->start = (size_t)(p - name);
    out->len = (size_t)(ranks - p);
    return out->len > 0;
}

bool nano_optimizer_name(const char *name, struct nano_ranks *out)
{
    const char *p = name, *end = name + strlen(name);

    *out = (struct nano_ranks){0};
    if (end - p < 3 || strcmp(end - 3, ".pt") != 0)
        return false;
    end -= 3;
    if (!take_text(&p, end, "optimizer") || !take_axis(&p, end, "_pp-", &out->pp))
        return false;
    take_axis(&p, end, "_dp-", &out->dp);
    if (!take_axis(&p, end, "_tp-", &out->tp))
        return false;
    take_axis(&p, end, "_exp-", &out->ep);
    return p == end;
}

uint32_t nano_version(const char *text)
{
    const char *p = text, *end = text + strlen(text);
    uint32_t major, minor;

    if (!take_rank(&p, end, &major) || !take_text(&p, end, ".") ||
        !take_rank(&p, end, &minor) || major > 999 || minor > 999 ||
        (p < end && *p != '.'))
        return 0;
    return major * 1000 + minor;
}

/* ---- shapes ---- */

static void skip_blanks(const char **p)
{
    while (**p == ' ')
        (*p)++;
}

static bool take_number(const char **p, uint64_t *out)
{
    const char *start = *p;

    for (*out = 0; isdigit((unsigned char)**p); (*p)++)
        if (mul_overflows(*out, 10, out) ||
            add_overflows(*out, (uint64_t)(**p - '0'), out))
            return false;
    return *p > start && *out <= INT64_MAX;
}

/* "60" or "np.int64(60)". */
static bool take_dim(const char **p, uint64_t *out)
{
    static const char *const casts[] = {"np.int64(", "np.int32(", "numpy.int64("};

    for (size_t i = 0; i < ARRAY_SIZE(casts); i++)
        if (strncmp(*p, casts[i], strlen(casts[i])) == 0) {
            *p += strlen(casts[i]);
            return take_number(p, out) && *(*p)++ == ')';
        }
    return take_number(p, out);
}

bool nano_shape(const char *text, struct shape *out)
{
    static const char size[] = "torch.Size([";
    bool is_size = strncmp(text, size, sizeof size - 1) == 0;
    const char *p = text + (is_size ? sizeof size - 1 : 1);
    char close = is_size ? ']' : ')';

    *out = (struct shape){0};
    if (!is_size && text[0] != '(')
        return false;
    for (skip_blanks(&p); *p != close; skip_blanks(&p)) {
        if (out->nd == SHAPE_MAX_DIMS || !take_dim(&p, &out->dim[out->nd++]))
            return false;
        skip_blanks(&p);
        if (*p != ',' && *p != close)
            return false;
        p += *p == ',';
    }
    p += is_size && p[1] == ')' ? 2 : 1;
    return *p == '\0';
}

/* ---- slices ---- */

struct reader {
    const char *p;
    uint64_t *number; /* the next three rows of nd */
    const struct shape *local, *whole;
};

/* "None" or a number; false: neither. */
static bool take_bound(const char **p, uint64_t none, uint64_t *out)
{
    if (strncmp(*p, "None", 4) == 0) {
        *p += 4;
        *out = none;
        return true;
    }
    return take_number(p, out);
}

/* "start,stop,step" of a dimension of that size. */
static int take_slice(const char **p, uint64_t dim, uint64_t *start, uint64_t *len,
                      struct err *e)
{
    uint64_t stop, step;

    if (!take_bound(p, 0, start) || *(*p)++ != ',' || !take_bound(p, dim, &stop) ||
        *(*p)++ != ',' || !take_bound(p, 1, &step))
        return err_set(e, EBADMSG, "a slice is no start,stop,step");
    if (step != 1)
        return err_set(e, ENOTSUP, "slices with steps over 1 are not supported");
    if (*start > stop || stop > dim)
        return err_set(e, EBADMSG,
                       "slice %" PRIu64 ":%" PRIu64 " of a dimension of %" PRIu64,
                       *start, stop, dim);
    *len = stop - *start;
    return 0;
}

/* One slice a dimension; those that are not there take all of it. */
static int take_slices(const char **p, const struct shape *shape, char end,
                       uint64_t *start, uint64_t *len, struct err *e)
{
    uint32_t k = 0;

    for (; k < shape->nd; k++) {
        if (k > 0 && **p != '|')
            break;
        *p += k > 0;
        TRY(take_slice(p, shape->dim[k], &start[k], &len[k], e));
    }
    for (; k < shape->nd; k++) {
        start[k] = 0;
        len[k] = shape->dim[k];
    }
    if (**p != end && !(end == ';' && **p == '\0'))
        return err_set(e, EBADMSG, "more slices than dimensions, or none");
    return 0;
}

static int take_pair(struct reader *r, struct err *e)
{
    uint64_t len[SHAPE_MAX_DIMS];
    uint32_t nd = r->whole->nd;
    uint64_t *from = r->number, *to = from + nd, *size = to + nd;

    TRY(take_slices(&r->p, r->local, '#', from, size, e));
    r->p++;
    TRY(take_slices(&r->p, r->whole, ';', to, len, e));
    if (memcmp(size, len, nd * sizeof *len) != 0)
        return err_set(e, EBADMSG, "a local and a global slice of different sizes");
    r->number = size + nd;
    return 0;
}

static size_t count_pairs(const char *text)
{
    size_t n = 1;

    for (; *text; text++)
        n += *text == ';';
    return n;
}

/* A rank's piece goes into the whole once, all of it, or its slices are not what cut it. */
static int check_local(const struct rank_boxes *b, const struct shape *local,
                       struct arena *a, struct err *e)
{
    struct chunk *chunk = arena_array(a, b->count, sizeof *chunk);
    const struct chunk **list = arena_array(a, b->count, sizeof *list);
    struct err ignored = {0};
    uint64_t elements, n;
    size_t count = 0;

    if (!chunk || !list)
        return err_nomem(e);
    for (size_t i = 0; i < b->count; i++) {
        struct shape size = {.nd = b->nd};

        memcpy(size.dim, b->box[i].size, b->nd * sizeof *size.dim);
        chunk[i] = (struct chunk){.start = b->box[i].from, .size = b->box[i].size};
        if (shape_elements(&size, &n, &ignored) < 0 || n > 0)
            list[count++] = &chunk[i];
    }
    if (shape_elements(local, &elements, e) < 0 ||
        (elements > 0 && cover_check(local, list, count, e) < 0))
        return err_wrap(e, "the local slices of local_global_slices_pairs");
    return 0;
}

int nano_slices(const char *text, const struct shape *local, const struct shape *whole,
                struct arena *a, struct rank_boxes *out, struct err *e)
{
    size_t n = count_pairs(text), nd = whole->nd;
    struct rank_box *box;
    struct reader r = {.p = text, .local = local, .whole = whole};

    if (local->nd != nd || nd == 0)
        return err_set(e, EBADMSG, "slices of %u dimensions in a tensor of %zu",
                       local->nd, nd);
    if (n > MAX_PAIRS)
        return err_set(e, EBADMSG, "%zu pairs of slices", n);
    box = arena_array(a, n, sizeof *box);
    r.number = arena_array(a, n * 3 * nd, sizeof *r.number);
    if (!box || !r.number)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++) {
        box[i] = (struct rank_box){r.number, r.number + nd, r.number + 2 * nd};
        if (take_pair(&r, e) < 0)
            return err_wrap(e, "pair %zu of local_global_slices_pairs", i);
        r.p += i + 1 < n;
    }
    *out = (struct rank_boxes){.nd = (uint32_t)nd, .count = n, .box = box};
    return check_local(out, local, a, e);
}
