/* SPDX-License-Identifier: MIT */
/* tests/unit/test_integrity.c - one digest of Megatron's integrity.json is changed, and nothing else. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/megatron/megatron_integrity.h"

#define A "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
#define B "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
#define C "cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc"
#define SHA "{\"algorithm\": \"sha256\", \"files\": {"

/* Two files of one digest, names that end in others, blanks, a name that is a value. */
static void test_changes_one(void **state)
{
    static const struct {
        const char *text, *name, *want;
    } cases[] = {
        {SHA "\"x\": \"" A "\", \"y\": \"" A "\"}}", "y",
         SHA "\"x\": \"" A "\", \"y\": \"" C "\"}}"},
        {SHA "\"x__0\": \"" A "\", \"0\": \"" B "\"}}", "0",
         SHA "\"x__0\": \"" A "\", \"0\": \"" C "\"}}"},
        {SHA "\n  \"x\" \t:\n \"" A "\"\n}}", "x", SHA "\n  \"x\" \t:\n \"" C "\"\n}}"},
        {"{\"files\": {\"sha256\": \"" A "\"}, \"algorithm\": \"sha256\"}", "sha256",
         "{\"files\": {\"sha256\": \"" C "\"}, \"algorithm\": \"sha256\"}"},
        {SHA "\"x\": \"" A "\"}}", "z", SHA "\"x\": \"" A "\"}}"}, /* not among them */
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[400];
        struct err e = {0};

        strcpy(text, cases[i].text);
        if (megatron_integrity_set(text, strlen(text), cases[i].name, C, &e) < 0)
            fail_msg("case %zu: %s", i, e.text);
        assert_string_equal(cases[i].want, text);
    }
}

static void test_refuses(void **state)
{
    static const struct {
        const char *text;
        int code;
    } cases[] = {
        {"{\"algorithm\": \"md5\", \"files\": {\"x\": \"" A "\"}}", -ENOTSUP},
        {"{\"files\": {\"x\": \"" A "\"}}", -ENOTSUP},
        {SHA "\"x\": \"aa\"}}", -ENOTSUP},
        {SHA "\"x\": 1}}", -ENOTSUP},
        {SHA "\"\\u0078\": \"" A "\"}}", -ENOTSUP}, /* x, as Python never writes it */
        {SHA "\"x\": \"" A "\"}", -EBADMSG},
        {"", -EBADMSG},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[400];
        struct err e = {0};

        strcpy(text, cases[i].text);
        assert_int_equal(cases[i].code,
                         megatron_integrity_set(text, strlen(text), "x", C, &e));
        assert_string_equal(cases[i].text, text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_changes_one),
        cmocka_unit_test(test_refuses),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
