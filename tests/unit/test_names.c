/* SPDX-License-Identifier: MIT */
/* tests/unit/test_names.c - roles, file names of keys, dotted parts. */
#include "index/names.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

static void assert_text(const struct buf *b, const char *want)
{
    assert_int_equal(buf_failed(b), 0);
    assert_string_equal(b->data, want);
    assert_int_equal(b->len, strlen(want));
}

static const struct {
    const char *key;
    size_t len;
    const char *name;
} plain_names[] = {
#define ROW(key, name)                                                                 \
    {                                                                                  \
        key, sizeof(key) - 1, name                                                     \
    }
    ROW("model.layers.0.weight", "model.layers.0.weight"),
    ROW("", "%empty"),
    ROW("%empty", "%25empty"),
    ROW("a/b", "a%2Fb"),
    ROW("a%2Fb", "a%252Fb"),
    ROW("/etc/passwd", "%2Fetc%2Fpasswd"),
    ROW(".", "%2E"),
    ROW("..", "%2E."),
    ROW("../../x", "%2E.%2F..%2Fx"),
    ROW(".unshardfs", "%2Eunshardfs"),
    ROW("a..b", "a..b"),
    ROW("a.", "a."),
    ROW("a\\b", "a\\b"),
    ROW("a\nb", "a%0Ab"),
    ROW("a\t\x1b[31mb", "a%09%1B[31mb"),
    ROW("a\x7f"
        "b",
        "a%7Fb"),
    ROW("a\0b", "a%00b"),
    ROW("\0", "%00"),
    ROW(" ", " "),
    ROW("-rf", "-rf"),
    ROW("*?[x]", "*?[x]"),
    ROW("\xc3\xa9", "\xc3\xa9"),
    ROW("e\xcc\x81", "e\xcc\x81"),
    ROW("\xf0\x9f\x92\xa5", "\xf0\x9f\x92\xa5"),
    ROW("\xff\xfe", "%FF%FE"),
    ROW("a\xc3", "a%C3"),
    ROW("\xc0\xaf", "%C0%AF"),
    ROW("\xed\xa0\x80", "%ED%A0%80"),
    ROW("~0123456789abcdef", "~0123456789abcdef"),
#undef ROW
};

static void test_plain_names(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(plain_names); i++) {
        CLEANUP(buf_release) struct buf raw = {0}, npy = {0};
        char want[NAME_MAX_BYTES + 1];

        name_of_key(plain_names[i].key, plain_names[i].len, "", &raw);
        assert_text(&raw, plain_names[i].name);
        name_of_key(plain_names[i].key, plain_names[i].len, ".npy", &npy);
        snprintf(want, sizeof want, "%s.npy", plain_names[i].name);
        assert_text(&npy, want);
    }
}

static void assert_named(const char *key, size_t len, const char *suffix, size_t kept,
                         const char *tail)
{
    CLEANUP(buf_release) struct buf b = {0};

    name_of_key(key, len, suffix, &b);
    assert_int_equal(buf_failed(&b), 0);
    assert_int_equal(b.len, kept + strlen(tail));
    assert_memory_equal(b.data, key, kept);
    assert_string_equal(b.data + kept, tail);
}

/* The digits are `printf %s KEY | sha256sum | cut -c1-16`. */
static void test_long_names_are_cut(void **state)
{
    char n[5000], e[260], m[260];

    (void)state;
    memset(n, 'n', sizeof n);
    assert_named(n, 255, "", 255, "");
    assert_named(n, 256, "", 238, "~342aaaf5a0fcb18c");
    assert_named(n, 251, ".npy", 251, ".npy");
    assert_named(n, 252, ".npy", 234, "~e4bd1aa0a8ed282e.npy");
    assert_named(n, 300, "", 238, "~230b077491957fb4");
    assert_named(n, 5000, ".npy", 234, "~91c45f5cbab5caa1.npy");
    for (size_t i = 0; i < sizeof e; i += 2)
        memcpy(e + i, "\xc3\xa9", 2);
    assert_named(e, sizeof e, "", 238, "~0e4534362fc1bd4a");
    memcpy(m, "x", 1); /* one byte before: now the cut would split a character */
    memcpy(m + 1, e, sizeof m - 1);
    m[259] = 'x';
    assert_named(m, sizeof m, "", 237, "~0415353e7ae42ac4");
}

static void test_escapes_are_not_split(void **state)
{
    CLEANUP(buf_release) struct buf b = {0};
    char slashes[200];

    (void)state;
    memset(slashes, '/', sizeof slashes);
    name_of_key(slashes, sizeof slashes, "", &b);
    assert_int_equal(buf_failed(&b), 0);
    assert_int_equal(b.len, 79 * 3 + 17); /* 79 escapes fit in 238 */
    assert_string_equal(b.data + 78 * 3, "%2F~a9edaa36c97b0b82");
}

/* A key that spells the name of another, cut one: it gets a name of its own. */
static void test_cut_name_cannot_be_taken(void **state)
{
    static const char *const suffixes[] = {"", ".npy"};
    char n[300];

    (void)state;
    memset(n, 'n', sizeof n);
    for (size_t i = 0; i < ARRAY_SIZE(suffixes); i++) {
        CLEANUP(buf_release) struct buf first = {0}, second = {0};

        name_of_key(n, sizeof n, suffixes[i], &first);
        name_of_key(first.data, first.len - strlen(suffixes[i]), suffixes[i], &second);
        assert_int_equal(second.len, 255);
        assert_string_not_equal(first.data, second.data);
    }
}

static void test_parts(void **state)
{
    static const struct {
        const char *part, *dir, *leaf;
    } rows[] = {
        {"weight", "weight", "weight.npy"}, {"", "%empty", "%empty.npy"},
        {"a.npy", "a%2Enpy", "a.npy.npy"},  {"a%2Enpy", "a%252Enpy", "a%252Enpy.npy"},
        {".npy", "%2Enpy", "%2Enpy.npy"},   {"a.npyx", "a.npyx", "a.npyx.npy"},
        {"npy", "npy", "npy.npy"},          {"x/y", "x%2Fy", "x%2Fy.npy"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        CLEANUP(buf_release) struct buf dir = {0}, leaf = {0}, key = {0};
        size_t len = strlen(rows[i].part);

        buf_addf(&key, "%s.more", rows[i].part); /* a part ends by its length */
        name_of_part(key.data, len, false, &dir);
        assert_text(&dir, rows[i].dir);
        name_of_part(key.data, len, true, &leaf);
        assert_text(&leaf, rows[i].leaf);
    }
}

static void assert_split(const char *key, size_t len, const char *joined)
{
    CLEANUP(buf_release) struct buf b = {0};
    const char *part;
    size_t pos = 0, n;

    while (key_part(key, len, &pos, &part, &n)) {
        buf_addc(&b, '[');
        buf_add(&b, part, n);
        buf_addc(&b, ']');
    }
    assert_text(&b, joined);
    assert_false(key_part(key, len, &pos, &part, &n));
}

static void test_key_part(void **state)
{
    (void)state;
    assert_split("a.bc.d", 6, "[a][bc][d]");
    assert_split("", 0, "[]");
    assert_split(".", 1, "[][]");
    assert_split("a..b", 4, "[a][][b]");
    assert_split("a.", 2, "[a][]");
    assert_split("abc.d", 3, "[abc]"); /* len counts */
}

static void test_roles(void **state)
{
    static const struct {
        const char *part, *key;
        enum role role;
    } rows[] = {
        {NULL, "model.layers.0.weight", ROLE_MODEL},
        {NULL, "", ROLE_MODEL},
        {NULL, "optim.state.x.exp_avg", ROLE_OPTIMIZER},
        {NULL, "optimizer", ROLE_OPTIMIZER},
        {NULL, "optimizers.0.x", ROLE_OPTIMIZER},
        {NULL, "optimizer_state.0", ROLE_OPTIMIZER},
        {NULL, "optimizer_states.0", ROLE_OPTIMIZER},
        {NULL, "last_optimizer_state.x", ROLE_OPTIMIZER},
        {NULL, "optimizing.x", ROLE_MODEL},
        {NULL, "model.optimizer.x", ROLE_MODEL},
        {NULL, "state.optimizers.Adam.x", ROLE_OPTIMIZER},
        {NULL, "state.model.x", ROLE_MODEL},
        {NULL, "state", ROLE_MODEL},
        {NULL, "state.rng", ROLE_OTHER},
        {NULL, "app.optim.state.x", ROLE_OPTIMIZER},
        {NULL, "app.model.x", ROLE_MODEL},
        {NULL, "dcp.optim.state.x", ROLE_OPTIMIZER},
        {NULL, "dcp.model.x", ROLE_MODEL},
        {NULL, "lr_scheduler.x", ROLE_OTHER},
        {NULL, "lr_schedulers.0", ROLE_OTHER},
        {NULL, "scheduler.x", ROLE_OTHER},
        {NULL, "rng.0", ROLE_OTHER},
        {NULL, "loops.x", ROLE_OTHER},
        {NULL, "callbacks.x", ROLE_OTHER},
        {NULL, "dataloader.x", ROLE_OTHER},
        {NULL, "train_state.x", ROLE_OTHER},
        {"model", "optim.x", ROLE_MODEL},
        {"pytorch_model.bin", "optim.x", ROLE_MODEL},
        {"pytorch_model_fsdp_0", "rng", ROLE_MODEL},
        {"consolidated.00.pth", "rng", ROLE_MODEL},
        {"weights", "optim.x", ROLE_MODEL},
        {"optim", "model.x", ROLE_OPTIMIZER},
        {"optimizer.bin", "model.x", ROLE_OPTIMIZER},
        {"optimizer_0", "x", ROLE_OPTIMIZER},
        {"random_states_0.pkl", "model.x", ROLE_OTHER},
        {"rng_state_0.pth", "x", ROLE_OTHER},
        {"scheduler.bin", "x", ROLE_OTHER},
        {"scaler.pt", "x", ROLE_OTHER},
        {"sampler_1.bin", "x", ROLE_OTHER},
        {"custom_checkpoint_0.pkl", "x", ROLE_OTHER},
        {"train/rank0.pt", "x", ROLE_OTHER},
        {"extra_state", "x", ROLE_OTHER},
        {"model/optim.pt", "x", ROLE_OPTIMIZER},
        {"policy/weights", "optim.x", ROLE_MODEL},
        {"model_and_optim", "optim.x", ROLE_OPTIMIZER},
        {"model_and_optim", "model.x", ROLE_MODEL},
        {"training_args.bin", "x", ROLE_MODEL},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        enum role got = role_of(rows[i].part, rows[i].key, strlen(rows[i].key));

        if (got != rows[i].role)
            fail_msg("part %s key %s: %s, not %s", rows[i].part ? rows[i].part : "-",
                     rows[i].key, role_name(got), role_name(rows[i].role));
    }
    assert_string_equal(role_name(ROLE_MODEL), "model");
    assert_string_equal(role_name(ROLE_OPTIMIZER), "optimizer");
    assert_string_equal(role_name(ROLE_OTHER), "other");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_names),
        cmocka_unit_test(test_long_names_are_cut),
        cmocka_unit_test(test_escapes_are_not_split),
        cmocka_unit_test(test_cut_name_cannot_be_taken),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_key_part),
        cmocka_unit_test(test_roles),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
