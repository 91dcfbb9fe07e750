/* SPDX-License-Identifier: MIT */
/*
 * tests/formats/test_mapped.c - tensors of fixtures, cut, turned and taken apart by a map,
 * against the same done to their bytes: every encoding gives parts of its pieces right.
 */
#include "fixture.h"
#include "tests/unit/unit.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/guard.h"
#include "index/map/mapping.h"
#include "read_tensor.h"

enum { MAP_MAX = 64 << 20, UNSTACK_MOST = 8, FIXTURES_MAX = 400 };

/* How a tensor is taken apart: one result or several, named "KIND.ORD.INDEX". */
enum work {
    WORK_CUT,       /* all but the first of the last axis */
    WORK_TRANSPOSE, /* all axes reversed */
    WORK_SPLIT,     /* the first row, and all others */
    WORK_UNSTACK,   /* one a row */
    WORK_ALTERNATE, /* rows 0, 2, 4, ..., then 1, 3, 5, ... */
    WORK_KINDS,
};

static bool can_work(const struct tensor_info *t, enum work work)
{
    const struct shape *s = &t->shape;

    if (s->nd == 0 || dtype_bits(t->dtype) < 8 || t->fault)
        return false;
    for (uint32_t k = 0; k < s->nd; k++)
        if (s->dim[k] == 0)
            return false;
    switch (work) {
    case WORK_CUT:
        return s->dim[s->nd - 1] > 1;
    case WORK_TRANSPOSE:
        return s->nd > 1;
    case WORK_SPLIT:
        return s->dim[0] > 1;
    case WORK_UNSTACK:
        return s->nd > 1 && s->dim[0] <= UNSTACK_MOST;
    case WORK_ALTERNATE:
        return s->dim[0] % 2 == 0;
    case WORK_KINDS:
        break;
    }
    return false;
}

/* Patterns know no escape: a key with a brace is left alone, as is one that is no text. */
static bool can_name(const struct tensor_info *t)
{
    return t->key_len > 0 && strlen(t->key) == t->key_len && !strchr(t->key, '{');
}

/* The kind of work for this tensor in this round, or WORK_KINDS. */
static enum work work_of(const struct tensor_info *t, unsigned round)
{
    for (unsigned i = 0; can_name(t) && i < WORK_KINDS; i++) {
        enum work work = (enum work)((t->ord + round + i) % WORK_KINDS);

        if (can_work(t, work))
            return work;
    }
    return WORK_KINDS;
}

/* ---- the map ---- */

static void add_rule(struct buf *map, const struct tensor_info *t, enum work work)
{
    static const char *const ops[WORK_KINDS] = {
        [WORK_TRANSPOSE] = "{\"transpose\": []}",
        [WORK_UNSTACK] = "{\"unstack\": {\"as\": \"row\"}}",
        [WORK_ALTERNATE] = "{\"deinterleave\": {}}",
    };

    buf_adds(map, "{\"role\": \"any\", \"from\": ");
    buf_add_json(map, t->key, t->key_len);
    if (work == WORK_SPLIT) {
        buf_addf(map,
                 ", \"split\": {\"parts\": [{\"to\": \"2.%u.0\", \"rows\": 1},"
                 " {\"to\": \"2.%u.1\", \"rows\": \"dim - 1\"}]}}",
                 t->ord, t->ord);
        return;
    }
    if (work == WORK_CUT)
        buf_addf(map, ", \"ops\": [{\"cut\": {\"axis\": %u, \"from\": 1}}]",
                 t->shape.nd - 1);
    else
        buf_addf(map, ", \"ops\": [%s]", ops[work]);
    buf_addf(map, ", \"to\": \"%u.%u.%s\"}", work, t->ord,
             work == WORK_UNSTACK ? "{row}" : "0");
}

/* -1: there is nothing to map. */
static int write_map(const struct opened *o, unsigned round, char *path)
{
    CLEANUP(buf_release) struct buf map = {.max = MAP_MAX};
    size_t rules = 0;
    int fd;

    buf_adds(&map, "{\"unshard_map\": 1, \"other\": \"drop\", \"rules\": [");
    for (size_t i = 0; i < o->count; i++) {
        enum work work = work_of(&o->t[i], round);

        if (work == WORK_KINDS)
            continue;
        buf_adds(&map, rules++ ? ",\n" : "\n");
        add_rule(&map, &o->t[i], work);
    }
    buf_adds(&map, "]}");
    assert_int_equal(buf_failed(&map), 0);
    if (rules == 0)
        return -1;
    fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, map.data, map.len), map.len);
    close(fd);
    return 0;
}

/* ---- the same to bytes ---- */

/* An array of elements: shape, and where element (i, j, ...) lies among those of `data`. */
struct part {
    struct shape shape;
    uint64_t first, step[SHAPE_MAX_DIMS];
};

static struct part whole(const struct shape *s)
{
    struct part p = {.shape = *s};
    uint64_t unit = 1;

    for (uint32_t k = s->nd; k-- > 0;) {
        p.step[k] = unit;
        unit *= s->dim[k];
    }
    return p;
}

static void row_of(struct part *p, uint64_t row)
{
    p->first += row * p->step[0];
    p->shape.nd--;
    memmove(p->shape.dim, p->shape.dim + 1, p->shape.nd * sizeof p->shape.dim[0]);
    memmove(p->step, p->step + 1, p->shape.nd * sizeof p->step[0]);
}

static struct part result(const struct shape *s, enum work work, uint64_t index)
{
    struct part p = whole(s), old = p;

    switch (work) {
    case WORK_CUT:
        p.first = 1;
        p.shape.dim[s->nd - 1]--;
        break;
    case WORK_TRANSPOSE:
        for (uint32_t k = 0; k < s->nd; k++) {
            p.shape.dim[k] = old.shape.dim[s->nd - 1 - k];
            p.step[k] = old.step[s->nd - 1 - k];
        }
        break;
    case WORK_SPLIT:
        p.first = index * p.step[0];
        p.shape.dim[0] = index ? p.shape.dim[0] - 1 : 1;
        break;
    case WORK_UNSTACK:
        row_of(&p, index);
        break;
    case WORK_ALTERNATE: /* [2n, ...] as [2, n, ...], to be compared in that order */
    case WORK_KINDS:
        break;
    }
    return p;
}

/* The element of `data` that is the i-th of the part. */
static uint64_t element(const struct part *p, enum work work, uint64_t i)
{
    uint64_t at = p->first;

    for (uint32_t k = p->shape.nd; k-- > 0; i /= p->shape.dim[k]) {
        uint64_t index = i % p->shape.dim[k], half = p->shape.dim[0] / 2;

        if (work == WORK_ALTERNATE && k == 0)
            index = index % half * 2 + index / half;
        at += index * p->step[k];
    }
    return at;
}

static void check_part(const char *name, const struct shape *from,
                       const struct buf *data, const struct buf *got, enum work work,
                       uint64_t index, unsigned unit)
{
    struct part p = result(from, work, index);

    for (uint64_t i = 0; i < got->len / unit; i++)
        if (memcmp(got->data + i * unit, data->data + element(&p, work, i) * unit,
                   unit) != 0)
            fail_msg("%s: element %llu is not element %llu of the source", name,
                     (unsigned long long)i, (unsigned long long)element(&p, work, i));
}

static bool same_shape(const struct tensor_info *t, const struct part *p)
{
    return shape_equal(&t->shape, &p->shape);
}

/* ---- a fixture ---- */

struct mapped {
    struct opened plain;
    struct world w;
    struct mapping *m;
    struct tensor_info *t;
    size_t count;
    struct checkpoint_info info;
};

static void open_mapped(const char *path, const char *map, struct mapped *m)
{
    const struct mapping_choice choice = {.map = map};
    struct err e = {0};

    assert_ok(mapping_open(&choice, &m->m, &e), &e);
    assert_ok(world_open(path, &m->w, &e), &e);
    scanner_use(m->w.scanner, m->m);
    assert_ok(scanner_get(m->w.scanner, "", NULL, m->w.arena, &m->info, &e), &e);
    if (m->info.error)
        fail_msg("%s: %s", path, m->info.error);
    assert_ok(world_tensors(&m->w, m->info.id, &m->t, &m->count, &e), &e);
}

static const struct tensor_info *find(const struct mapped *m, const char *key)
{
    for (size_t i = 0; i < m->count; i++)
        if (strcmp(m->t[i].key, key) == 0)
            return &m->t[i];
    fail_msg("%s is not there", key);
    abort(); /* not reached; gcc does not know */
}

static void check_result(struct mapped *m, const struct tensor_info *from,
                         const struct buf *data, enum work work, uint64_t index)
{
    CLEANUP(buf_release) struct buf got = {.max = MAP_MAX};
    CLEANUP(buf_release) struct buf naive = {.max = MAP_MAX};
    struct part p = result(&from->shape, work, index);
    const struct tensor_info *t;
    char key[60], name[500];
    struct err e = {0};

    snprintf(key, sizeof key, "%u.%u.%llu", work, from->ord, (unsigned long long)index);
    snprintf(name, sizeof name, "%s of %s", key, from->key);
    t = find(m, key);
    if (t->fault || t->dtype != from->dtype || !same_shape(t, &p))
        fail_msg("%s: %s", name, t->fault ? t->fault : "another shape or type");
    if (read_tensor(&m->w, m->info.id, t, &got, &e) < 0)
        fail_msg("%s: %s", name, e.text);
    assert_int_equal(got.len, t->bytes);
    check_part(name, &from->shape, data, &got, work, index, dtype_unit(t->dtype));
    if (world_read(&m->w, m->info.id, t, &naive, &e) < 0)
        fail_msg("%s, naively: %s", name, e.text);
    check_part(name, &from->shape, data, &naive, work, index, dtype_unit(t->dtype));
}

static size_t check_tensor_mapped(struct mapped *m, const struct tensor_info *t,
                                  enum work work)
{
    CLEANUP(buf_release) struct buf data = {.max = MAP_MAX};
    uint64_t n = work == WORK_UNSTACK ? t->shape.dim[0] : work == WORK_SPLIT ? 2 : 1;
    struct err e = {0};

    if (read_tensor(&m->plain.w, m->plain.info.id, t, &data, &e) < 0)
        fail_msg("%s: %s", t->key, e.text);
    for (uint64_t i = 0; i < n; i++)
        check_result(m, t, &data, work, i);
    return (size_t)n;
}

/* All tensors of the fixture in one way each; another way in each round. */
static void check_round(const char *path, unsigned round)
{
    char map[] = "/tmp/unshardfs-map-XXXXXX";
    struct mapped m = {0};
    size_t results = 0;

    open_checkpoint(path, &m.plain);
    if (write_map(&m.plain, round, map) == 0) {
        open_mapped(path, map, &m);
        unlink(map);
        for (size_t i = 0; i < m.plain.count; i++) {
            enum work work = work_of(&m.plain.t[i], round);

            if (work != WORK_KINDS)
                results += check_tensor_mapped(&m, &m.plain.t[i], work);
            else if (m.plain.t[i].role != ROLE_MODEL)
                results++; /* "other" is about the model's */
        }
        assert_int_equal(results, m.count);
        world_close(&m.w);
        mapping_free(m.m);
    }
    close_checkpoint(&m.plain);
}

static void test_all_ways(void **state)
{
    for (unsigned round = 0; round < WORK_KINDS; round++)
        check_round(*state, round);
}

static char *joined(const char *a, const char *b)
{
    char *out;

    assert_true(asprintf(&out, "%s/%s", a, b) > 0);
    return out;
}

/* The given fixtures: DATA, then FORMAT/NAME each. */
int main(int argc, char **argv)
{
    static struct CMUnitTest tests[FIXTURES_MAX];
    size_t n = 0;

    if (argc < 3 || guard_install() < 0)
        return 2;
    for (int i = 2; i < argc && n < FIXTURES_MAX; i++)
        tests[n++] = (struct CMUnitTest){.name = argv[i],
                                         .test_func = test_all_ways,
                                         .initial_state = joined(argv[1], argv[i])};
    return _cmocka_run_group_tests("mapped", tests, n, NULL, NULL);
}
