/* SPDX-License-Identifier: MIT */
/* tests/unit/test_object_json.c - known classes as JSON, opaque ones, limits, paths. */
#include "pickle_json.h"

#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <stdio.h>

#include "fail_alloc.h"

#define OPAQUE "{\"$type\":\"opaque\",\"class\":"
#define TUPLE(items) "{\"$type\":\"tuple\",\"items\":[" items "]}"
#define BYTES(base64) "{\"$type\":\"bytes\",\"value\":\"" base64 "\"}"

/* numpy.dtype('f4', False, True) with its state, little- or big-endian or without order. */
#define DTYPE_OF(code, order)                                                          \
    "cnumpy\ndtype\n(" code "I00\nI01\ntR(K\x03" order "NNNJ\xff\xff\xff\xff"          \
    "J\xff\xff\xff\xffK\x00tb"
#define LE "U\x01<"
#define SCALAR "cnumpy.core.multiarray\nscalar\n("
#define ARRAY                                                                          \
    "cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01"            \
    "btR"

struct json_case {
    const char *name, *data;
    size_t len;
    const char *json;
};

static void check_cases(const struct json_case *c, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        CLEANUP(pickle_freep) struct pickle *p = NULL;
        CLEANUP_FREE char *json = NULL;
        struct err e = {0};

        if (pickle_from(c[i].data, c[i].len, NULL, &p, NULL, &e) < 0)
            fail_msg("%s: %s", c[i].name, e.text);
        json = pickle_json(p);
        if (strcmp(json, c[i].json) != 0)
            fail_msg("%s: %s, not %s", c[i].name, json, c[i].json);
    }
}

static void test_collections(void **state)
{
    static const struct json_case cases[] = {
        {"OrderedDict", LIT("ccollections\nOrderedDict\n)R(U\x01zK\x01U\x01yK\x02u."),
         "{\"z\":1,\"y\":2}"},
        {"empty OrderedDict", LIT("ccollections\nOrderedDict\n)R."), "{}"},
        {"OrderedDict of other keys", LIT("ccollections\nOrderedDict\n)RK\x01K\x02s."),
         "{\"$type\":\"dict\",\"items\":[[1,2]]}"},
        {"OrderedDict with attributes",
         LIT("ccollections\nOrderedDict\n)RU\x01zK\x01s}U\x09_metadataNsb."),
         "{\"z\":1}"},
        {"OrderedDict with arguments",
         LIT("ccollections\nOrderedDict\n](K\x01K\x02"
             "e\x85R."),
         OPAQUE "\"collections.OrderedDict\",\"args\":[[1,2]]}"},
        {"Counter", LIT("ccollections\nCounter\n}U\x01zK\x02s\x85R."), "{\"z\":2}"},
        {"defaultdict",
         LIT("ccollections\ndefaultdict\nc__builtin__\nlist\n\x85RU\x01zNs."),
         "{\"z\":null}"},
        {"Size", LIT("ctorch\nSize\n(K\x02K\x03t\x85R."), TUPLE("2,3")},
        {"set",
         LIT("c__builtin__\nset\n](K\x01"
             "e\x85R."),
         "{\"$type\":\"set\",\"items\":[1]}"},
        {"frozenset",
         LIT("cbuiltins\nfrozenset\n](K\x01"
             "e\x85R."),
         "{\"$type\":\"set\",\"frozen\":true,\"items\":[1]}"},
    };

    (void)state;
    check_cases(cases, ARRAY_SIZE(cases));
}

static void test_bytes(void **state)
{
    static const struct json_case cases[] = {
        {"encode",
         LIT("c_codecs\nencode\n(V\xff"
             "a\x01\nU\x06latin1tR."),
         BYTES("/2EB")},
        {"encode to UTF-8 is not ours",
         LIT("c_codecs\nencode\n(U\x01"
             "aU\x05utf-8tR."),
         OPAQUE "\"_codecs.encode\",\"args\":[\"a\",\"utf-8\"]}"},
        {"encode past Latin-1", LIT("c_codecs\nencode\n(V\\u0100\nU\x06latin1tR."),
         OPAQUE "\"_codecs.encode\",\"args\":[\"\xc4\x80\",\"latin1\"]}"},
        {"bytes()", LIT("c__builtin__\nbytes\n)R."), BYTES("")},
        {"bytearray(bytes)", LIT("cbuiltins\nbytearray\nC\x02hi\x85R."), BYTES("aGk=")},
        {"bytearray(text)", LIT("c__builtin__\nbytearray\n(V\xfe\nU\x07latin-1tR."),
         BYTES("/g==")},
        {"base64 of three lengths",
         LIT("(C\x01"
             "aC\x02"
             "abC\x03"
             "abct."),
         TUPLE(BYTES("YQ==") "," BYTES("YWI=") "," BYTES("YWJj"))},
        {"BytesIO",
         LIT("c_io\nBytesIO\n)\x81(C\x01"
             "aK\x00Ntb."),
         OPAQUE "\"_io.BytesIO\",\"state\":" TUPLE(BYTES("YQ==") ",0,null") "}"},
    };

    (void)state;
    check_cases(cases, ARRAY_SIZE(cases));
}

static void test_numpy(void **state)
{
    static const struct json_case cases[] = {
        {"float32",
         LIT(SCALAR DTYPE_OF("U\x02"
                             "f4",
                             LE) "C\x04\x00\x00\xc0\x3ftR."),
         "1.5"},
        {"float32 of 0.1",
         LIT(SCALAR DTYPE_OF("U\x02"
                             "f4",
                             LE) "C\x04\xcd\xcc\xcc\x3dtR."),
         "0.10000000149011612"},
        {"float16",
         LIT(SCALAR DTYPE_OF("U\x02"
                             "f2",
                             LE) "C\x02\x00\xc0tR."),
         "-2.0"},
        {"float16 denormal",
         LIT(SCALAR DTYPE_OF("U\x02"
                             "f2",
                             LE) "C\x02\x01\x00tR."),
         "5.9604644775390625e-08"},
        {"float16 inf",
         LIT(SCALAR DTYPE_OF("U\x02"
                             "f2",
                             LE) "C\x02\x00\xfctR."),
         "{\"$type\":\"float\",\"value\":\"-inf\"}"},
        {"float64 big-endian",
         LIT(SCALAR DTYPE_OF("U\x02"
                             "f8",
                             "U\x01>") "C\x08\x3f\xf8\0\0\0\0\0\0tR."),
         "1.5"},
        {"int8", LIT(SCALAR DTYPE_OF("U\x02i1", "U\x01|") "C\x01\xfftR."), "-1"},
        {"uint8", LIT(SCALAR DTYPE_OF("U\x02u1", "U\x01|") "C\x01\xfftR."), "255"},
        {"int16 big-endian",
         LIT(SCALAR DTYPE_OF("U\x02i2", "U\x01>") "C\x02\xff\xfetR."), "-2"},
        {"int64", LIT(SCALAR DTYPE_OF("U\x02i8", LE) "C\x08\0\0\0\0\0\0\0\x80tR."),
         "{\"$type\":\"int\",\"value\":\"-9223372036854775808\"}"},
        {"uint64", LIT(SCALAR DTYPE_OF("U\x02u8", LE) "C\x08\0\0\0\0\0\0\0\x80tR."),
         "{\"$type\":\"int\",\"value\":\"9223372036854775808\"}"},
        {"bool",
         LIT(SCALAR DTYPE_OF("U\x02"
                             "b1",
                             "U\x01|") "C\x01\x01tR."),
         "true"},
        {"a scalar of a wrong length",
         LIT(SCALAR DTYPE_OF("U\x02i2", LE) "C\x01\x01tR."),
         OPAQUE "\"numpy.core.multiarray.scalar\",\"args\":[" OPAQUE
                "\"numpy.dtype\",\"value\":\"<i2\"}," BYTES("AQ==") "]}"},
        {"ndarray",
         LIT(ARRAY "(K\x01(K\x02K\x01t" DTYPE_OF("U\x02i2",
                                                 LE) "I00\nC\x04\x01\x00\x02\x00tb."),
         "{\"$type\":\"ndarray\",\"dtype\":\"<i2\",\"shape\":[2,1],\"data\":\"AQACAA==\"}"},
        {"ndarray in column order",
         LIT(ARRAY
             "(K\x01(K\x02t" DTYPE_OF("U\x02u1", "U\x01|") "I01\nC\x02\x01\x02tb."),
         "{\"$type\":\"ndarray\",\"dtype\":\"|u1\",\"shape\":[2],\"fortran_order\":true,"
         "\"data\":\"AQI=\"}"},
        {"ndarray of another size",
         LIT(ARRAY
             "(K\x01(K\x03t" DTYPE_OF("U\x02u1", "U\x01|") "I00\nC\x02\x01\x02tb."),
         OPAQUE
         "\"numpy._core.multiarray._reconstruct\",\"args\":[" OPAQUE
         "\"global\",\"value\":\"numpy.ndarray\"}," TUPLE("0") "," BYTES("Yg==") "],\"state\":" TUPLE(
             "1," TUPLE("3") "," OPAQUE
                             "\"numpy.dtype\",\"value\":\"|u1\"},false," BYTES(
                                 "AQI=")) "}"},
        {"_frombuffer",
         LIT("cnumpy._core.numeric\n_frombuffer\n(\x96\x02\0\0\0\0\0\0\0\x01\x02" DTYPE_OF(
             "U\x02u1", "U\x01|") "K\x02\x85U\x01"
                                  "CtR."),
         "{\"$type\":\"ndarray\",\"dtype\":\"|u1\",\"shape\":[2],\"data\":\"AQI=\"}"},
        {"dtype with fields",
         LIT("cnumpy\ndtype\n(U\x02V4I00\nI01\ntR(K\x03U\x01|NU\x01xU\x01yK\x04K\x01K\x00tb."),
         OPAQUE "\"numpy.dtype\",\"args\":[\"V4\",false,true],\"state\":" TUPLE(
             "3,\"|\",null,\"x\",\"y\",4,1,0") "}"},
    };

    (void)state;
    check_cases(cases, ARRAY_SIZE(cases));
}

static void test_opaque(void **state)
{
    static const struct json_case cases[] = {
        {"dtype of torch", LIT("ctorch\nfloat8_e4m3fn\n."),
         OPAQUE "\"torch.dtype\",\"value\":\"torch.float8_e4m3fn\"}"},
        {"device",
         LIT("ctorch\ndevice\nU\x03"
             "cpu\x85R."),
         OPAQUE "\"torch.device\",\"value\":\"cpu\"}"},
        {"device with a number",
         LIT("ctorch\ndevice\nU\x04"
             "cudaK\x01\x86R."),
         OPAQUE "\"torch.device\",\"value\":\"cuda:1\"}"},
        {"enum",
         LIT("cm\nRerunMode\nU\x08"
             "disabled\x85R."),
         OPAQUE "\"m.RerunMode\",\"value\":\"disabled\"}"},
        {"Namespace",
         LIT("ccopy_reg\n_reconstructor\n(cargparse\nNamespace\nc__builtin__\n"
             "object\nNtR}U\x02lrG\x3f\xf0\0\0\0\0\0\0sb."),
         OPAQUE "\"argparse.Namespace\",\"state\":{\"lr\":1.0}}"},
        {"a subclass of dict",
         LIT("ccopyreg\n_reconstructor\n(cm\nD\ncbuiltins\ndict\n}tR."),
         OPAQUE "\"m.D\",\"args\":[" OPAQUE
                "\"global\",\"value\":\"builtins.dict\"},{}]}"},
        {"range of Python 2", LIT("c__builtin__\nxrange\n(K\x00K\x04K\x01tR."),
         OPAQUE "\"builtins.range\",\"args\":[0,4,1]}"},
        {"a name with quotes", LIT("cm\"\\\nC\n)R."), OPAQUE "\"m\\\"\\\\.C\"}"},
    };

    (void)state;
    check_cases(cases, ARRAY_SIZE(cases));
}

/* A comma locale must not reach the output. */
static void test_floats(void **state)
{
    static const struct json_case cases[] = {
        {"0.1", LIT("F0.1\n."), "0.1"},
        {"1e22", LIT("F1e22\n."), "1e+22"},
        {"1e16", LIT("F1e16\n."), "1e+16"},
        {"2^53", LIT("F9007199254740993\n."), "9007199254740992.0"},
        {"17 digits", LIT("F0.30000000000000004\n."), "0.30000000000000004"},
        {"smallest", LIT("F5e-324\n."), "4.94065645841247e-324"},
        {"largest", LIT("F1.7976931348623157e308\n."), "1.7976931348623157e+308"},
    };

    (void)state;
    check_cases(cases, ARRAY_SIZE(cases));
    if (setlocale(LC_ALL, "de_DE.UTF-8"))
        check_cases(cases, ARRAY_SIZE(cases));
    setlocale(LC_ALL, "C");
}

static char *json_of(const char *data, size_t len, uint64_t budget)
{
    struct pickle *p = NULL;
    struct buf out = {0};
    struct err e = {0};
    struct pv root;

    assert_ok(pickle_from(data, len, NULL, &p, NULL, &e), &e);
    root = pickle_root(p);
    assert_ok(object_to_json(NULL, &root, budget, NULL, NULL, &out, &e), &e);
    pickle_free(p);
    return buf_steal(&out, NULL);
}

#define CUT(class) OPAQUE "\"" class "\",\"truncated\":true}"

static void test_limits(void **state)
{
    char *json = json_of(LIT("](K\x01K\x02K\x03"
                             "e."),
                         3);
    struct buf deep = {0};

    (void)state;
    assert_string_equal("[1,2," CUT("object") "]", json);
    free(json);
    json = json_of(LIT("}(U\x01"
                       "aK\x01U\x01"
                       "b]U\x01"
                       "cNu."),
                   2);
    assert_string_equal("{\"a\":1,\"b\":" CUT("builtins.list") "}", json);
    free(json);
    json = json_of(LIT("]q\x00(h\x00)e."), 0);
    assert_string_equal("[" CUT("builtins.list") "," TUPLE("") "]", json);
    free(json);
    json = json_of(LIT("cm\nC\n)\x81q\x00}U\x04selfh\x00sb."), 0);
    assert_string_equal(OPAQUE "\"m.C\",\"state\":{\"self\":" CUT("m.C") "}}", json);
    free(json);
    for (int i = 0; i < 61; i++)
        buf_adds(&deep, "]");
    for (int i = 0; i < 60; i++)
        buf_adds(&deep, "a");
    buf_adds(&deep, ".");
    json = json_of(deep.data, deep.len, 0);
    assert_int_equal(60 + strlen(CUT("builtins.list")) + 60, strlen(json));
    assert_has(json, "[[" CUT("builtins.list") "]]");
    free(json);
    buf_release(&deep);
}

/* A string shared many times costs what it writes. */
static void test_shared_text(void **state)
{
    struct buf b = {0};
    uint32_t len = 1 << 20;
    char *json;

    (void)state;
    buf_add(&b, LIT("](X"));
    buf_add(&b, &len, 4);
    memset(buf_grow(&b, len), 's', len);
    for (int i = 0; i < 1000; i++)
        buf_adds(&b, "2");
    buf_adds(&b, "e.");
    json = json_of(b.data, b.len, 10000); /* nine of 1025 each, then the rest */
    assert_true(strlen(json) < 11 << 20);
    assert_has(json, "\"truncated\":true}]");
    free(json);
    buf_release(&b);
}

static void test_too_large(void **state)
{
    struct buf b = {0}, out = {.max = 1000};
    struct pickle *p = NULL;
    struct err e = {0};
    struct pv root;

    (void)state;
    buf_adds(&b, "](");
    for (int i = 0; i < 1000; i++)
        buf_adds(&b, "N");
    buf_adds(&b, "e.");
    assert_ok(pickle_from(b.data, b.len, NULL, &p, NULL, &e), &e);
    root = pickle_root(p);
    assert_int_equal(-EFBIG, object_to_json(NULL, &root, 0, NULL, NULL, &out, &e));
    pickle_free(p);
    buf_release(&out);
    buf_release(&b);
}

/* Paths that tensors are reported under; a key of NULL leaves them opaque. */
static const char *note_path(void *user, const char *path, size_t path_len,
                             const struct torch_tensor *t)
{
    struct buf *paths = user;

    assert_int_equal(DTYPE_F32, t->dtype);
    buf_add(paths, path, path_len);
    buf_adds(paths, "\n");
    return path_len > 0 && path[path_len - 1] == '0' ? NULL : "KEY";
}

/* The tensors of a real file, whose paths are known. */
static void test_paths(void **state)
{
    char file[512];
    struct source *s = NULL;
    struct torch_zip *t = NULL;
    struct buf out = {0}, paths = {0};
    struct err e = {0};
    struct pv root;

    (void)state;
    snprintf(file, sizeof file, "%s/torch_zip/torchscript.pt", TEST_DATA);
    assert_ok(source_from_fd(open(file, O_RDONLY | O_CLOEXEC), "script", &s, &e), &e);
    assert_ok(torch_zip_open(s, 0, s->size, &t, &e), &e);
    root = torch_zip_root(t);
    assert_ok(object_to_json(t, &root, 0, note_path, &paths, &out, &e), &e);
    assert_string_equal("l.weight\nl.bias\n", paths.data);
    assert_has(out.data, "\"weight\":{\"$type\":\"tensor\",\"key\":\"KEY\"}");
    buf_clear(&out);
    assert_ok(object_to_json(t, &root, 0, NULL, NULL, &out, &e), &e);
    assert_has(out.data,
               "\"weight\":" OPAQUE "\"torch.Tensor\",\"dtype\":\"F32\",\"shape\":[");
    buf_release(&paths);
    buf_release(&out);
    torch_zip_free(t);
    source_put(s);
}

static void test_out_of_memory(void **state)
{
    static const char data[] = ARRAY
        "(K\x01(K\x02t" DTYPE_OF("U\x02u1", "U\x01|") "I00\nc_codecs\nencode\n(V\xff"
                                                      "a\nU\x06latin1tRtb.";
    struct pickle *p = NULL;
    struct err err = {0};
    struct pv root;

    (void)state;
    assert_ok(pickle_from(LIT(data), NULL, &p, NULL, &err), &err);
    root = pickle_root(p);
    for (long n = 1; fail_alloc_next(&n);) {
        struct buf out = {0};
        struct err e = {0};
        int rc = object_to_json(NULL, &root, 0, NULL, NULL, &out, &e);

        fail_alloc_end(&n, rc);
        buf_release(&out);
    }
    pickle_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collections), cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_numpy),       cmocka_unit_test(test_opaque),
        cmocka_unit_test(test_floats),      cmocka_unit_test(test_limits),
        cmocka_unit_test(test_shared_text), cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_paths),       cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
