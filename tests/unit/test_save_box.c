/* SPDX-License-Identifier: MIT */
/* tests/unit/test_save_box.c - boxes cut out of windows, against a cut element by element. */
#include "save/box.h"

#include "tests/unit/unit.h"

enum { TENSOR_MAX = 4096, ROUNDS = 20000 };

/* xorshift: the same cases each time. */
static uint64_t next(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

/* The box's bytes in its own order, and for each where it stands in the tensor. */
static size_t naive(const struct box *b, const unsigned char *tensor,
                    unsigned char *out, uint64_t *where)
{
    uint64_t elements = 1;
    size_t n = 0;

    for (uint32_t k = 0; k < b->units->nd; k++)
        elements *= b->units->dim[k];
    for (uint64_t at = 0; at < elements; at++) {
        uint64_t rest = at;
        bool inside = true;

        for (uint32_t k = b->units->nd; k-- > 0;) {
            uint64_t i = rest % b->units->dim[k];

            rest /= b->units->dim[k];
            inside &= i >= b->start[k] && i < b->start[k] + b->size[k];
        }
        for (unsigned u = 0; inside && u < b->unit; u++) {
            where[n] = at * b->unit + u;
            out[n++] = tensor[at * b->unit + u];
        }
    }
    return n;
}

struct made_box {
    struct shape units;
    uint64_t start[6], size[6];
    struct box box;
    uint64_t bytes; /* of the tensor */
};

static void make_box(struct made_box *m, uint64_t *seed)
{
    static const unsigned unit[] = {1, 2, 4, 8, 16};
    uint64_t elements = 1;

    *m = (struct made_box){.units.nd = (uint32_t)(next(seed) % 6)};
    for (uint32_t k = 0; k < m->units.nd; k++) {
        uint64_t most = MAX((uint64_t)1, MIN((uint64_t)9, 256 / elements));
        uint64_t dim = next(seed) % 40 == 0 ? 0 : 1 + next(seed) % most;

        m->units.dim[k] = dim;
        m->start[k] = next(seed) % (dim + 1);
        m->size[k] = next(seed) % (dim - m->start[k] + 1);
        if (next(seed) % 3 == 0) {
            m->start[k] = 0;
            m->size[k] = dim;
        }
        elements *= MAX(dim, (uint64_t)1);
    }
    m->box = (struct box){.units = &m->units,
                          .unit = unit[next(seed) % ARRAY_SIZE(unit)],
                          .start = m->start,
                          .size = m->size};
    m->bytes = m->box.unit;
    for (uint32_t k = 0; k < m->units.nd; k++)
        m->bytes *= m->units.dim[k];
    assert_true(m->bytes <= TENSOR_MAX);
}

/* Windows of `step` bytes, one behind the other, give the box once, in order. */
static void check_windows(const struct made_box *m, const unsigned char *tensor,
                          const unsigned char *want, size_t len, uint64_t first,
                          uint64_t end, uint64_t step)
{
    unsigned char scratch[TENSOR_MAX], got[TENSOR_MAX];
    size_t done = 0;

    for (uint64_t off = first; off < end; off += step) {
        unsigned char window[TENSOR_MAX];
        uint64_t part = MIN(step, end - off), at, n;

        /* A copy of its own, so that a read outside is one of uninitialised memory. */
        memcpy(window, tensor + off, part);
        box_overlap(&m->box, off, part, &at, &n);
        if (n == 0)
            continue;
        assert_int_equal(at, done);
        memcpy(got + done, box_take(&m->box, off, window, at, n, scratch), n);
        done += n;
    }
    assert_int_equal(done, len);
    assert_memory_equal(got, want, len);
}

static void test_random(void **state)
{
    static unsigned char tensor[TENSOR_MAX], want[TENSOR_MAX];
    static uint64_t where[TENSOR_MAX];
    uint64_t seed = 88172645463325252u, nonempty = 0;

    (void)state;
    for (size_t i = 0; i < sizeof tensor; i++)
        tensor[i] = (unsigned char)(next(&seed) >> 11);
    for (int round = 0; round < ROUNDS; round++) {
        struct made_box m;
        uint64_t first, end, steps;
        size_t len;

        make_box(&m, &seed);
        len = naive(&m.box, tensor, want, where);
        box_span(&m.box, &first, &end);
        if (len == 0) {
            assert_int_equal(end, first);
            check_windows(&m, tensor, want, 0, 0, m.bytes, m.box.unit);
            continue;
        }
        nonempty++;
        assert_int_equal(first, where[0]);
        assert_int_equal(end, where[len - 1] + 1);
        steps = m.bytes / m.box.unit;
        check_windows(&m, tensor, want, len, first, end,
                      (1 + next(&seed) % steps) * m.box.unit);
        check_windows(&m, tensor, want, len, 0, m.bytes,
                      (1 + next(&seed) % steps) * m.box.unit);
    }
    assert_true(nonempty > ROUNDS / 4);
}

/* What lies together is not copied. */
static void test_in_place(void **state)
{
    static const uint64_t start[] = {2, 0}, size[] = {3, 8};
    const struct shape units = {.nd = 2, .dim = {10, 8}};
    const struct box b = {.units = &units, .unit = 4, .start = start, .size = size};
    unsigned char window[10 * 8 * 4];
    uint64_t at, len;

    (void)state;
    box_overlap(&b, 0, sizeof window, &at, &len);
    assert_int_equal(at, 0);
    assert_int_equal(len, 3 * 8 * 4);
    assert_ptr_equal(box_take(&b, 0, window, at, len, NULL), window + 2 * 8 * 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_in_place),
    };

    return cmocka_run_group_tests_name("save_box", tests, NULL, NULL);
}
