/* SPDX-License-Identifier: MIT */
/* tests/hostile/test_hostile_pickle.c - pickles made to harm, each with its verdict: DATA. */
#include "tests/unit/pickle_json.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>

#include "base/json.h"
#include "tests/hostile/manifest.h"

#define OPAQUE "{\"$type\":\"opaque\",\"class\":"
#define INT(digits) "{\"$type\":\"int\",\"value\":\"" digits "\"}"
#define CUT(class) OPAQUE "\"" class "\",\"truncated\":true}"
#define SYSTEM OPAQUE "\"os.system\",\"value\":\"echo x > PWNED\"}"

/*
 * What each pickle that is read must give, NULL where we refuse what the manifest leaves
 * open. Of some the JSON is long: `start` says that only its start is here.
 */
static const struct {
    const char *file, *json;
    bool start;
} values[] = {
    {"alias_module", OPAQUE "\"torch._utils ._rebuild_tensor_v2\"}", false},
    {"build_slotstate",
     OPAQUE
     "\"numpy.prod\",\"state\":{\"$type\":\"tuple\",\"items\":[null,{\"a\":\"os\"}]}}",
     false},
    {"build_state",
     OPAQUE "\"logging.Handler\",\"state\":{\"__class__\":" OPAQUE
            "\"global\",\"value\":\"os.system\"}}}",
     false},
    {"cycle_dict", "{\"self\":" CUT("builtins.dict") "}", false},
    {"cycle_list", "[" CUT("builtins.list") "]", false},
    {"cycle_tuple", "[{\"$type\":\"tuple\",\"items\":[" CUT("builtins.list") "]}]",
     false},
    {"deep_dicts", "{\"$type\":\"dict\",\"items\":[[0,{\"$type\":\"dict\"", true},
    {"deep_lists", "[[[[[[[[[[", true},
    {"deep_marks", NULL, false},
    {"deep_tuple1", "{\"$type\":\"tuple\",\"items\":[{\"$type\":\"tuple\"", true},
    {"dotted_global",
     OPAQUE "\"torch.serialization.os.system\",\"value\":\"echo x > PWNED\"}", false},
    {"dup_wide", "{\"$type\":\"tuple\",\"items\":[null,null,", true},
    {"duplicate_keys", "{\"w\":2}", false},
    {"float_text", "{\"$type\":\"float\",\"value\":\"inf\"}", false},
    {"frame_in_p2", "[\"abc\"]", false},
    {"frame_nested", "[\"abc\"]", false},
    {"frame_short", "[\"abc\"]", false},
    {"global_crlf", OPAQUE "\"torch._utils\\r._rebuild_tensor_v2\\r\"}", false},
    {"inst", SYSTEM, false},
    {"int_overflow", INT("18446744073709551616"), false},
    {"laughs_dict", "{\"a\":{\"a\":{\"a\":", true},
    {"laughs_memo_list", "[[[[[[[[[[", true},
    {"laughs_tuple", "{\"$type\":\"tuple\",\"items\":[{\"$type\":\"tuple\"", true},
    {"lone_surrogate_key",
     "{\"$type\":\"dict\",\"items\":[[" OPAQUE
     "\"builtins.str\",\"surrogatepass\":\"7aCA\"},1]]}",
     false},
    {"long1_255",
     "{\"$type\":\"int\",\"value\":\"62871626394860568737604003361842584236", true},
    {"long_text_huge", NULL, false},
    {"memo_confusion", SYSTEM, false},
    {"memo_many", "[]", false},
    {"memo_max", "null", false},
    {"memo_sparse", "null", false},
    {"nested_reduce",
     OPAQUE "\"object\",\"function\":" OPAQUE "\"builtins.getattr\",\"args\":[" OPAQUE
            "\"builtins.__import__\",\"value\":\"os\"},\"system\"]},\"value\":"
            "\"echo x > PWNED\"}",
     false},
    {"newobj", OPAQUE "\"subprocess.Popen\",\"value\":\"echo x > PWNED\"}", false},
    {"newobj_ex",
     OPAQUE "\"subprocess.Popen\",\"args\":[\"true\"],\"kwargs\":{\"shell\":true}}",
     false},
    {"obj", SYSTEM, false},
    {"partial_chain",
     OPAQUE "\"object\",\"function\":" OPAQUE "\"functools.partial\",\"args\":[" OPAQUE
            "\"global\",\"value\":\"os.system\"},\"echo x > PWNED\"]}}",
     false},
    {"proto_255", NULL, false},
    {"proto_mid", "[1]", false},
    {"put_arg_confusion", OPAQUE "\"os.system\",\"value\":\"x\"}", false},
    {"reduce_builtin", OPAQUE "\"builtins.eval\",\"value\":\"open('PWNED','w')\"}",
     false},
    {"reduce_system_p0", SYSTEM, false},
    {"reduce_system_p1", SYSTEM, false},
    {"reduce_system_p2", SYSTEM, false},
    {"reduce_system_p3", SYSTEM, false},
    {"reduce_system_p4", SYSTEM, false},
    {"reduce_system_p5", SYSTEM, false},
    {"stack_wide", "null", false},
    {"trailing_garbage", "1", false},
    {"two_pickles", "1", false},
};

static int value_of(const char *file)
{
    char name[64];

    for (size_t i = 0; i < ARRAY_SIZE(values); i++) {
        snprintf(name, sizeof name, "pickle/%s.pkl", values[i].file);
        if (strcmp(name, file) == 0)
            return (int)i;
    }
    return -1;
}

static void check_json(const struct pickle *p, int which)
{
    CLEANUP_FREE char *json = pickle_json(p);
    const char *want = values[which].json;
    CLEANUP(json_freep) struct json *doc = NULL;
    const struct json_limits limits = {.bytes = 256 << 20, .depth = 256};
    struct err e = {0};
    struct pv root = pickle_root(p);

    if (values[which].start ? strncmp(json, want, strlen(want)) : strcmp(json, want))
        fail_msg("%.300s, not %s", json, want);
    if (strcmp(values[which].file, "dup_wide") == 0)
        assert_int_equal(80001, pv_count(&root));
    if (strcmp(values[which].file, "long1_255") == 0) /* all 614 digits */
        assert_int_equal(614, strlen(json) - strlen(INT("")));
    if (strlen(json) < 1 << 20) /* it can be read back */
        assert_ok(json_parse(json, strlen(json), &limits, &doc, &e), &e);
}

static void test_case(void **state)
{
    const struct row *row = *state;
    CLEANUP(source_putp) struct source *s = NULL;
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    double start = cpu_seconds();
    int which = value_of(row->file), rc;
    struct err e = {0};
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", row->data, row->file);
    assert_ok(source_from_fd(open(path, O_RDONLY | O_CLOEXEC), row->file, &s, &e), &e);
    rc = pickle_load(s, 0, s->size, NULL, &p, NULL, &e);
    if (strcmp(row->verdict, "reject") == 0 || (which >= 0 && !values[which].json)) {
        assert_int_equal(-EBADMSG, rc);
        assert_has(e.text, row->file); /* where, and at which byte */
        assert_has(e.text, ": pickle, byte ");
        assert_true(which < 0 || strcmp(row->verdict, "either") == 0);
    } else {
        assert_ok(rc, &e);
        assert_true(which >= 0); /* each verdict has its value above */
        check_json(p, which);
    }
    assert_true(cpu_seconds() - start < cpu_allowed());
    assert_int_equal(-1, access("PWNED", F_OK));
}

int main(int argc, char **argv)
{
    return manifest_run(argc, argv, "pickle", test_case);
}
