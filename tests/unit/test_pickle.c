/* SPDX-License-Identifier: MIT */
/* tests/unit/test_pickle.c - the unpickler: every opcode, every refusal, folds, limits. */
#include "pickle_json.h"

#include <errno.h>
#include <stdio.h>

#include "fail_alloc.h"

struct value_case {
    const char *name, *data;
    size_t len;
    const char *json;
};

static void check_values(const struct value_case *c, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        CLEANUP(pickle_freep) struct pickle *p = NULL;
        CLEANUP_FREE char *json = NULL;
        uint64_t used = 0;
        struct err e = {0};

        if (pickle_from(c[i].data, c[i].len, NULL, &p, &used, &e) < 0)
            fail_msg("%s: %s", c[i].name, e.text);
        json = pickle_json(p);
        if (strcmp(json, c[i].json) != 0)
            fail_msg("%s: %s, not %s", c[i].name, json, c[i].json);
        if (used != c[i].len)
            fail_msg("%s: used %" PRIu64 " of %zu", c[i].name, used, c[i].len);
    }
}

static void test_numbers(void **state)
{
    static const struct value_case cases[] = {
        {"NONE", LIT("N."), "null"},
        {"NEWTRUE", LIT("\x88."), "true"},
        {"NEWFALSE", LIT("\x89."), "false"},
        {"INT", LIT("I42\n."), "42"},
        {"INT negative", LIT("I-7\n."), "-7"},
        {"INT zero", LIT("I0\n."), "0"},
        {"INT true", LIT("I01\n."), "true"},
        {"INT false", LIT("I00\n."), "false"},
        {"INT largest exact", LIT("I9007199254740992\n."), "9007199254740992"},
        {"INT past exact", LIT("I9007199254740993\n."),
         "{\"$type\":\"int\",\"value\":\"9007199254740993\"}"},
        {"INT int64 max", LIT("I9223372036854775807\n."),
         "{\"$type\":\"int\",\"value\":\"9223372036854775807\"}"},
        {"INT int64 min", LIT("I-9223372036854775808\n."),
         "{\"$type\":\"int\",\"value\":\"-9223372036854775808\"}"},
        {"INT past 64 bits", LIT("I9223372036854775808\n."),
         "{\"$type\":\"int\",\"value\":\"9223372036854775808\"}"},
        {"LONG", LIT("L123L\n."), "123"},
        {"LONG without L", LIT("L-5\n."), "-5"},
        {"LONG 01 is no bool", LIT("L1L\n."), "1"},
        {"BININT", LIT("J\xff\xff\xff\xff."), "-1"},
        {"BININT max", LIT("J\xff\xff\xff\x7f."), "2147483647"},
        {"BININT1", LIT("K\xff."), "255"},
        {"BININT2", LIT("M\x34\x12."), "4660"},
        {"LONG1 empty", LIT("\x8a\x00."), "0"},
        {"LONG1 -1", LIT("\x8a\x01\xff."), "-1"},
        {"LONG1 -32768", LIT("\x8a\x02\x00\x80."), "-32768"},
        {"LONG1 2^31", LIT("\x8a\x05\x00\x00\x00\x80\x00."), "2147483648"},
        {"LONG1 sign bytes", LIT("\x8a\x09\x05\x00\x00\x00\x00\x00\x00\x00\x00."), "5"},
        {"LONG1 int64 min", LIT("\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80."),
         "{\"$type\":\"int\",\"value\":\"-9223372036854775808\"}"},
        {"LONG1 2^63", LIT("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00."),
         "{\"$type\":\"int\",\"value\":\"9223372036854775808\"}"},
        {"LONG1 legacy magic", LIT("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."),
         "{\"$type\":\"int\",\"value\":\"119547037146038801333356\"}"},
        {"LONG4 -2^64",
         LIT("\x8b\x09\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff."),
         "{\"$type\":\"int\",\"value\":\"-18446744073709551616\"}"},
        {"FLOAT", LIT("F1.5\n."), "1.5"},
        {"FLOAT whole", LIT("F3\n."), "3.0"},
        {"FLOAT tiny", LIT("F-2.5e-300\n."), "-2.5e-300"},
        {"FLOAT past range", LIT("F1e999\n."),
         "{\"$type\":\"float\",\"value\":\"inf\"}"},
        {"FLOAT -inf", LIT("F-inf\n."), "{\"$type\":\"float\",\"value\":\"-inf\"}"},
        {"FLOAT nan", LIT("Fnan\n."), "{\"$type\":\"float\",\"value\":\"nan\"}"},
        {"BINFLOAT", LIT("G\x3f\xb9\x99\x99\x99\x99\x99\x9a."), "0.1"},
        {"BINFLOAT -0", LIT("G\x80\x00\x00\x00\x00\x00\x00\x00."), "-0.0"},
    };

    (void)state;
    check_values(cases, ARRAY_SIZE(cases));
}

static void test_strings(void **state)
{
    static const struct value_case cases[] = {
        {"STRING", LIT("S'a\\x41\\n\\101\\'\\q'\n."), "\"aA\\nA'\\\\q\""},
        {"STRING double quotes", LIT("S\"it's\"\n."), "\"it's\""},
        {"STRING empty", LIT("S''\n."), "\"\""},
        {"STRING not UTF-8", LIT("S'\\xff\\376'\n."),
         "{\"$type\":\"bytes\",\"value\":\"//4=\"}"},
        {"BINSTRING",
         LIT("T\x03\x00\x00\x00"
             "abc."),
         "\"abc\""},
        {"SHORT_BINSTRING", LIT("U\x02\xc3\xa9."), "\"\xc3\xa9\""},
        {"SHORT_BINSTRING bytes", LIT("U\x02\xc3\x28."),
         "{\"$type\":\"bytes\",\"value\":\"wyg=\"}"},
        {"UNICODE", LIT("Va\\u00e9\\U0001f600\xe9\n."),
         "\"a\xc3\xa9\xf0\x9f\x98\x80\xc3\xa9\""},
        {"UNICODE pair of backslashes", LIT("V\\\\u0041\\\n."),
         "\"\\\\\\\\u0041\\\\\""},
        {"BINUNICODE", LIT("X\x02\x00\x00\x00hi."), "\"hi\""},
        {"SHORT_BINUNICODE with NUL",
         LIT("\x8c\x03"
             "a\0b."),
         "\"a\\u0000b\""},
        {"BINUNICODE8", LIT("\x8d\x01\0\0\0\0\0\0\0x."), "\"x\""},
        {"lone surrogate", LIT("\x8c\x03\xed\xa0\x80."),
         "{\"$type\":\"opaque\",\"class\":\"builtins.str\",\"surrogatepass\":\"7aCA\"}"},
        {"BINBYTES", LIT("B\x02\0\0\0\0\x01."),
         "{\"$type\":\"bytes\",\"value\":\"AAE=\"}"},
        {"SHORT_BINBYTES",
         LIT("C\x01"
             "a."),
         "{\"$type\":\"bytes\",\"value\":\"YQ==\"}"},
        {"BINBYTES8", LIT("\x8e\x03\0\0\0\0\0\0\0abc."),
         "{\"$type\":\"bytes\",\"value\":\"YWJj\"}"},
        {"BYTEARRAY8", LIT("\x96\0\0\0\0\0\0\0\0."),
         "{\"$type\":\"bytes\",\"value\":\"\"}"},
    };

    (void)state;
    check_values(cases, ARRAY_SIZE(cases));
}

static void test_containers(void **state)
{
    static const struct value_case cases[] = {
        {"EMPTY_LIST", LIT("]."), "[]"},
        {"APPEND",
         LIT("]K\x01"
             "aK\x02"
             "a."),
         "[1,2]"},
        {"APPENDS",
         LIT("](K\x01K\x02"
             "e."),
         "[1,2]"},
        {"APPENDS none", LIT("](e."), "[]"},
        {"LIST", LIT("(I1\nI2\nl."), "[1,2]"},
        {"EMPTY_TUPLE", LIT(")."), "{\"$type\":\"tuple\",\"items\":[]}"},
        {"TUPLE", LIT("(K\x01N\x88t."),
         "{\"$type\":\"tuple\",\"items\":[1,null,true]}"},
        {"TUPLE1", LIT("K\x01\x85."), "{\"$type\":\"tuple\",\"items\":[1]}"},
        {"TUPLE2", LIT("K\x01K\x02\x86."), "{\"$type\":\"tuple\",\"items\":[1,2]}"},
        {"TUPLE3", LIT("K\x01K\x02K\x03\x87."),
         "{\"$type\":\"tuple\",\"items\":[1,2,3]}"},
        {"EMPTY_DICT", LIT("}."), "{}"},
        {"SETITEM",
         LIT("}U\x01"
             "aK\x01s."),
         "{\"a\":1}"},
        {"SETITEMS",
         LIT("}(U\x01"
             "bK\x01U\x01"
             "aK\x02u."),
         "{\"b\":1,\"a\":2}"},
        {"DICT",
         LIT("(U\x01"
             "aK\x01"
             "d."),
         "{\"a\":1}"},
        {"dict of other keys", LIT("}(K\x05K\x01N\x88u."),
         "{\"$type\":\"dict\",\"items\":[[5,1],[null,true]]}"},
        {"$type is escaped", LIT("}(U\x05$typeK\x01U\x06$$typeK\x02U\x04typeK\x03u."),
         "{\"$$type\":1,\"$$$type\":2,\"type\":3}"},
        {"the last value of a key",
         LIT("}(U\x01"
             "aK\x01U\x01"
             "bK\x02U\x01"
             "aK\x03u."),
         "{\"a\":3,\"b\":2}"},
        {"1, 1.0 and True are one key",
         LIT("}(K\x01K\x01G\x3f\xf0\0\0\0\0\0\0K\x02\x88K\x03u."),
         "{\"$type\":\"dict\",\"items\":[[1,3]]}"},
        {"text and bytes are two",
         LIT("}(U\x01"
             "aK\x01"
             "C\x01"
             "aK\x02u."),
         "{\"$type\":\"dict\",\"items\":[[\"a\",1],[{\"$type\":\"bytes\",\"value\":"
         "\"YQ==\"},2]]}"},
        {"equal tuples", LIT("}(K\x01U\x01x\x86K\x01K\x01U\x01x\x86K\x02u."),
         "{\"$type\":\"dict\",\"items\":[[{\"$type\":\"tuple\",\"items\":[1,\"x\"]},2]]}"},
        {"equal nested tuples", LIT("}(K\x01\x85\x85K\x01K\x01\x85\x85K\x02u."),
         "{\"$type\":\"dict\",\"items\":[[{\"$type\":\"tuple\",\"items\":[{\"$type\":"
         "\"tuple\",\"items\":[1]}]},2]]}"},
        {"equal globals",
         LIT("}(ctorch\nint8\nK\x01"
             "ctorch\nint8\nK\x02u."),
         "{\"$type\":\"dict\",\"items\":[[{\"$type\":\"opaque\",\"class\":\"torch.dtype\","
         "\"value\":\"torch.int8\"},2]]}"},
        {"set", LIT("\x8f(K\x01K\x02K\x01\x90."),
         "{\"$type\":\"set\",\"items\":[1,2]}"},
        {"frozenset", LIT("(K\x01K\x01\x91."),
         "{\"$type\":\"set\",\"frozen\":true,\"items\":[1]}"},
        {"frozenset as key", LIT("}(K\x01\x91K\x02s."),
         "{\"$type\":\"dict\",\"items\":[[{\"$type\":\"set\",\"frozen\":true,\"items\":"
         "[1]},2]]}"},
    };

    (void)state;
    check_values(cases, ARRAY_SIZE(cases));
}

static void test_stack_and_memo(void **state)
{
    static const struct value_case cases[] = {
        {"POP",
         LIT("K\x01K\x02"
             "0."),
         "1"},
        {"POP takes a mark", LIT("K\x01(0."), "1"},
        {"POP_MARK",
         LIT("K\x01(K\x02K\x03"
             "1."),
         "1"},
        {"DUP",
         LIT("]2K\x01"
             "a0."),
         "[1]"},
        {"PUT and GET",
         LIT("]p7\n(g7\nK\x01"
             "a1."),
         "[1]"},
        {"BINPUT and BINGET",
         LIT("U\x01xq\x05"
             "0h\x05."),
         "\"x\""},
        {"LONG_BINPUT and LONG_BINGET",
         LIT("K\x01r\xff\xff\xff\xff"
             "0j\xff\xff\xff\xff."),
         "1"},
        {"MEMOIZE counts entries",
         LIT("K\x07q\x05K\x08\x94"
             "0h\x01."),
         "8"},
        {"MEMOIZE counts ids once",
         LIT("K\x07q\x09q\x09K\x08\x94"
             "0h\x01."),
         "8"},
        {"MEMOIZE over a PUT",
         LIT("K\x07q\x01K\x08\x94"
             "0h\x01."),
         "8"},
        {"an entry put again",
         LIT("K\x01q\x00"
             "0K\x02q\x00"
             "0h\x00."),
         "2"},
        {"an entry is shared",
         LIT("]q\x00h\x00K\x01"
             "a0."),
         "[1]"},
        {"many stack entries below", LIT("NNNK\x01."), "1"},
        {"PROTO 0 to 5", LIT("\x80\x00\x80\x05N."), "null"},
        {"FRAME", LIT("\x80\x04\x95\x02\0\0\0\0\0\0\0N."), "null"},
    };

    (void)state;
    check_values(cases, ARRAY_SIZE(cases));
}

#define OPAQUE "{\"$type\":\"opaque\",\"class\":"

static void test_objects(void **state)
{
    static const struct value_case cases[] = {
        {"GLOBAL", LIT("cos\nsystem\n."), OPAQUE "\"global\",\"value\":\"os.system\"}"},
        {"STACK_GLOBAL", LIT("\x8c\x02os\x8c\x06system\x93."),
         OPAQUE "\"global\",\"value\":\"os.system\"}"},
        {"REDUCE", LIT("cos\nsystem\n(U\x02ls\x88tR."),
         OPAQUE "\"os.system\",\"args\":[\"ls\",true]}"},
        {"one simple argument", LIT("cos\nsystem\nU\x02ls\x85R."),
         OPAQUE "\"os.system\",\"value\":\"ls\"}"},
        {"NEWOBJ", LIT("cm\nC\n)\x81."), OPAQUE "\"m.C\"}"},
        {"NEWOBJ_EX", LIT("cm\nC\nK\x01\x85}U\x01kK\x02s\x92."),
         OPAQUE "\"m.C\",\"args\":[1],\"kwargs\":{\"k\":2}}"},
        {"INST", LIT("(K\x01K\x02im\nC\n."), OPAQUE "\"m.C\",\"args\":[1,2]}"},
        {"OBJ",
         LIT("(cm\nC\nK\x01N"
             "o."),
         OPAQUE "\"m.C\",\"args\":[1,null]}"},
        {"OBJ without arguments", LIT("](cm\nC\noa."), "[" OPAQUE "\"m.C\"}]"},
        {"BUILD", LIT("cm\nC\n)\x81}U\x01xK\x01sb."),
         OPAQUE "\"m.C\",\"state\":{\"x\":1}}"},
        {"BUILD on a class",
         LIT("cm\nC\nN}\x86"
             "b."),
         OPAQUE "\"m.C\",\"state\":{\"$type\":\"tuple\",\"items\":[null,{}]}}"},
        {"APPEND and SETITEM on an object",
         LIT("cm\nC\n)RK\x01"
             "aU\x01kK\x02s."),
         OPAQUE "\"m.C\",\"list\":[1],\"dict\":{\"k\":2}}"},
        {"ADDITEMS on an object", LIT("cm\nC\n)R(K\x01\x90."),
         OPAQUE "\"m.C\",\"list\":[1]}"},
        {"a call of a call", LIT("cm\nf\nK\x01\x85RK\x02\x85R."),
         OPAQUE "\"object\",\"function\":" OPAQUE "\"m.f\",\"value\":1},\"value\":2}"},
        {"BINPERSID", LIT("K\x01Q."), OPAQUE "\"persistent_id\",\"value\":1}"},
        {"OrderedDict of pairs, as Python 2 writes it",
         LIT("ccollections\nOrderedDict\n(](](U\x01kK\x01"
             "eU\x01lK\x02\x86"
             "etR."),
         "{\"k\":1,\"l\":2}"},
        {"OrderedDict of pairs that gets another",
         LIT("ccollections\nOrderedDict\n](U\x01kK\x01\x86"
             "e\x85RU\x01lK\x02s}U\x01xK\x03sb."),
         "{\"k\":1,\"l\":2}"},
        {"OrderedDict of no pairs", LIT("ccollections\nOrderedDict\n]\x85R."), "{}"},
        {"OrderedDict of something else",
         LIT("ccollections\nOrderedDict\n](K\x01"
             "e\x85R."),
         OPAQUE "\"collections.OrderedDict\",\"args\":[[1]]}"},
        {"names are compared byte for byte", LIT("ccollections \nOrderedDict\n)R."),
         OPAQUE "\"collections .OrderedDict\"}"},
    };

    (void)state;
    check_values(cases, ARRAY_SIZE(cases));
}

static void test_refusals(void **state)
{
    static const struct {
        const char *data;
        size_t len, at;
        const char *why;
    } cases[] = {
        {LIT(""), 0, "ends in the middle"},
        {LIT("K"), 0, "ends in the middle"},
        {LIT("N"), 1, "ends in the middle"},
        {LIT("I42"), 0, "ends in the middle"},
        {LIT("\xfe."), 0, "opcode 0xfe"},
        {LIT("\x82\x01."), 0, "opcode 0x82"},
        {LIT("\x83\x01\x01."), 0, "opcode 0x83"},
        {LIT("\x84\x01\x01\x01\x01."), 0, "opcode 0x84"},
        {LIT("P1\n."), 0, "opcode 0x50"},
        {LIT("\x97."), 0, "opcode 0x97"},
        {LIT("N\x98."), 1, "opcode 0x98"},
        {LIT("\x80\x06N."), 0, "protocol 6"},
        {LIT("."), 0, "too few values"},
        {LIT("0."), 0, "too few values"},
        {LIT("2."), 0, "too few values"},
        {LIT("1."), 0, "without a mark"},
        {LIT("N(."), 2, "1 open marks"},
        {LIT("N\x86."), 1, "too few values"},
        {LIT("N(\x85."), 2, "too few values"},
        {LIT("q\x00."), 0, "too few values"},
        {LIT("h\x00."), 0, "entry 0 was never set"},
        {LIT("K\x01q\x00"
             "0h\x01."),
         5, "entry 1 was never set"},
        {LIT("g-1\n."), 0, "no number of 32 bits"},
        {LIT("Np4294967296\n."), 1, "no number of 32 bits"},
        {LIT("Ia\n."), 0, "no plain decimal"},
        {LIT("I\n."), 0, "no plain decimal"},
        {LIT("I010\n."), 0, "no plain decimal"},
        {LIT("I0x10\n."), 0, "no plain decimal"},
        {LIT("L-L\n."), 0, "no plain decimal"},
        {LIT("F1.5x\n."), 0, "float that is no number"},
        {LIT("F0x1p3\n."), 0, "float that is no number"},
        {LIT("F\n."), 0, "float that is no number"},
        {LIT("F1,5\n."), 0, "float that is no number"},
        {LIT("Finfinity\n."), 0, "float that is no number"},
        {LIT("S'a\n."), 0, "not quoted"},
        {LIT("Sa\n."), 0, "not quoted"},
        {LIT("S'\\xg1'\n."), 0, "bad escape"},
        {LIT("S'\\'\n."), 0, "bad escape"},
        {LIT("V\\u12\n."), 0, "bad escape"},
        {LIT("V\\U00110000\n."), 0, "bad escape"},
        {LIT("X\x02\0\0\0\xff\xfe."), 0, "not UTF-8"},
        {LIT("\x8c\x02\xc0\x80."), 0, "not UTF-8"},
        {LIT("X\xff\xff\xff\xff"
             "a."),
         0, "4294967295 bytes where 2 are left"},
        {LIT("T\xff\xff\xff\xff"
             "a."),
         0, "length of -1"},
        {LIT("\x8e\xff\xff\xff\xff\xff\xff\xff\xff."), 0, "where 1 are left"},
        {LIT("\x95\x02\0\0\0\0\0\0\0N"), 0, "2 bytes where 1 are left"},
        {LIT("K\x01K\x02"
             "a."),
         4, "takes no items"},
        {LIT("NK\x02"
             "a."),
         3, "takes no items"},
        {LIT("}(K\x01"
             "e."),
         4, "takes no items"},
        {LIT("]K\x01K\x02s."), 5, "takes no items"},
        {LIT("](K\x01\x90."), 4, "takes no items"},
        {LIT("}(K\x01u."), 4, "without a value"},
        {LIT("(K\x01"
             "d."),
         3, "without a value"},
        {LIT("}]K\x01s."), 4, "cannot be hashed"},
        {LIT("}]\x85K\x01s."), 5, "cannot be hashed"},
        {LIT("}\x96\0\0\0\0\0\0\0\0K\x01s."), 12, "cannot be hashed"},
        {LIT("\x8f(]\x90."), 3, "cannot be hashed"},
        {LIT("K\x01)R."), 3, "no class"},
        {LIT("c\xff\nC\n."), 0, "class name that is not UTF-8"},
        {LIT("cm\nC\xc0\x80\n."), 0, "class name that is not UTF-8"},
        {LIT("cm\nC\nN\x81."), 6, "no tuple"},
        {LIT("cm\nC\n)N\x92."), 7, "no tuple"},
        {LIT("(K\x01o."), 3, "no class"},
        {LIT("(o."), 1, "too few values"},
        {LIT("K\x01K\x02\x93."), 4, "is no string"},
        {LIT("\x8c\x01m\x8c\x02"
             "C\0\x93."),
         7, "holds NUL"},
        {LIT("K\x01}b."), 3, "is no object"},
        {LIT("cm\nC\n)R}b}b."), 10, "second state"},
        /* A tensor is made when it is called for, not when all was read. */
        {LIT("ctorch\nX\n(]q\x01tRh\x01K\x01"
             "a."),
         19, "items for what was used"},
        {LIT("ctorch.x\nX\n(((}q\x01tttRh\x01K\x01K\x02s."), 27,
         "items for what was used"},
        {LIT("ctorch.x\nX\n(cm\nC\n)Rq\x01tRh\x01K\x01K\x02s."), 29,
         "items for what was used"},
        {LIT("ctorch\nX\n)\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85\x85"
             "R."),
         26, "16 tuples in one another"},
        {LIT("cm\nC\n)R}q\x01"
             "bh\x01K\x01K\x02s."),
         17, "items for what was used"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(pickle_freep) struct pickle *p = NULL;
        struct err e = {0};
        char place[64];

        if (pickle_from(cases[i].data, cases[i].len, NULL, &p, NULL, &e) != -EBADMSG)
            fail_msg("case %zu (%s) gives %d", i, cases[i].why, e.code);
        snprintf(place, sizeof place, "test.pkl: pickle, byte %zu: ", cases[i].at);
        if (strncmp(e.text, place, strlen(place)) != 0 || !strstr(e.text, cases[i].why))
            fail_msg("case %zu: \"%s\", not \"%s...%s\"", i, e.text, place,
                     cases[i].why);
        assert_null(p);
    }
}

/* Accessors that the JSON does not show. */
static void test_accessors(void **state)
{
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    struct pv root, v, again;
    const char *module, *name;
    uint64_t u;
    struct err e = {0};

    (void)state;
    assert_int_equal(0, pickle_from(LIT("}(U\x01"
                                        "a]q\x00U\x01"
                                        "bh\x00U\x01"
                                        "cJ\xff\xff\xff\xffU\x01"
                                        "dcm\nC\n)RU\x01"
                                        "e\x88u."),
                                    NULL, &p, NULL, &e));
    root = pickle_root(p);
    assert_int_equal(PV_DICT, root.kind);
    assert_int_equal(5, pv_count(&root));
    assert_true(pv_dict_get(&root, "a", &v));
    assert_true(pv_dict_get(&root, "b", &again));
    assert_true(pv_identity(&v) != 0 && pv_identity(&v) == pv_identity(&again));
    assert_false(pv_dict_get(&root, "f", &again));
    assert_false(pv_dict_get(&v, "a", &again));
    assert_true(pv_dict_get(&root, "c", &v));
    assert_false(pv_u64(&v, &u));
    assert_int_equal(0, pv_identity(&v));
    assert_true(pv_dict_get(&root, "d", &v));
    assert_true(pv_is(&v, "m", "C"));
    assert_false(pv_is(&v, "m", "D"));
    assert_false(pv_global(&v, &module, &name));
    v = pv_class(&v);
    assert_true(pv_is(&v, "m", "C"));
    assert_true(pv_global(&v, &module, &name));
    assert_string_equal("m", module);
    assert_string_equal("C", name);
    assert_true(pv_dict_get(&root, "e", &v));
    assert_false(pv_u64(&v, &u));
}

static void test_ends_at_stop(void **state)
{
    static const char data[] = "xxK\x01.K\x02.";
    CLEANUP(source_putp) struct source *s = NULL;
    struct err e = {0};
    uint64_t used = 0;

    (void)state;
    assert_int_equal(0, source_from_memory(LIT(data), false, "m", &s, &e));
    for (int i = 0; i < 2; i++) {
        CLEANUP(pickle_freep) struct pickle *p = NULL;

        assert_int_equal(0, pickle_load(s, 2 + used, 6 - used, NULL, &p, &used, &e));
        assert_int_equal(3, used);
        assert_int_equal(i + 1, pickle_root(p).i);
    }
    assert_int_equal(-EBADMSG, pickle_load(s, 4, 5, NULL, NULL, &used, &e));
}

/* Folds: class "f.A" with its state, "f.B" without; records are numbered from 100. */
struct folded {
    unsigned calls;
    int result;
};

static int fold_any(void *user, const struct pv *object, uint64_t *record,
                    struct err *e)
{
    struct folded *f = user;

    assert_int_equal(PV_OBJECT, object->kind);
    if (f->result < 0)
        return err_set(e, -f->result, "a fold that refuses");
    *record = 100 + f->calls++;
    return f->result;
}

static int load_folded(const char *data, size_t len, struct folded *f,
                       struct pickle_limits limits, struct pickle **out, struct err *e)
{
    const struct pickle_fold fold[] = {
        {"f", "A", false, fold_any},
        {"f", "B", true, fold_any},
    };
    const struct pickle_options options = {
        .fold = fold,
        .nfold = ARRAY_SIZE(fold),
        .user = f,
        .limits = limits,
    };

    return pickle_from(data, len, &options, out, NULL, e);
}

#define RECORD(n) OPAQUE "\"record\",\"value\":" n "}"
#define A "cf\nA\n)\x81"
#define B "cf\nB\n)\x81"

static void test_folds(void **state)
{
    static const struct value_case cases[] = {
        {"after BUILD", LIT(A "}b."), RECORD("100")},
        {"not before BUILD", LIT(A "."), OPAQUE "\"f.A\"}"},
        {"without a state", LIT(B "."), RECORD("100")},
        {"other classes stay", LIT("cf\nC\n)\x81}b."), OPAQUE "\"f.C\",\"state\":{}}"},
        {"in the memo before",
         LIT("](" A "q\x01}bh\x01"
             "e."),
         "[" RECORD("100") "," RECORD("100") "]"},
        {"in a list before",
         LIT("]" A "q\x01"
             "ah\x01}b0."),
         "[" RECORD("100") "]"},
        {"in its own state", LIT(A "q\x01}U\x01sh\x01sb."), RECORD("100")},
        {"in a tuple and a dict before", LIT("(" A "q\x01\x85h\x01}bt."),
         "{\"$type\":\"tuple\",\"items\":[{\"$type\":\"tuple\",\"items\":[" RECORD(
             "100") "]}," RECORD("100") "]}"},
        {"as keys, by number", LIT("}(" B "K\x01" B "K\x02u."),
         "{\"$type\":\"dict\",\"items\":[[" RECORD("100") ",1],[" RECORD(
             "101") ",2]]}"},
        {"as the same key", LIT("}(" B "q\x00K\x01h\x00K\x02u."),
         "{\"$type\":\"dict\",\"items\":[[" RECORD("100") ",2]]}"},
        {"INST and OBJ", LIT("]((if\nB\n(cf\nB\noe."),
         "[" RECORD("100") "," RECORD("101") "]"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(pickle_freep) struct pickle *p = NULL;
        CLEANUP_FREE char *json = NULL;
        struct folded f = {.result = 1};
        struct err e = {0};

        if (load_folded(cases[i].data, cases[i].len, &f, (struct pickle_limits){0}, &p,
                        &e) < 0)
            fail_msg("%s: %s", cases[i].name, e.text);
        json = pickle_json(p);
        if (strcmp(json, cases[i].json) != 0)
            fail_msg("%s: %s, not %s", cases[i].name, json, cases[i].json);
    }
}

static void test_fold_decides(void **state)
{
    struct folded f = {.result = 0};
    struct pickle *p = NULL;
    struct err e = {0};
    char *json;

    (void)state;
    assert_int_equal(
        0, load_folded(LIT("]" B "a."), &f, (struct pickle_limits){0}, &p, &e));
    json = pickle_json(p);
    assert_string_equal("[" OPAQUE "\"f.B\"}]", json);
    assert_int_equal(1, f.calls);
    free(json);
    pickle_freep(&p);
    f.result = -EBADMSG;
    assert_int_equal(
        -EBADMSG, load_folded(LIT("]" B "a."), &f, (struct pickle_limits){0}, &p, &e));
    assert_string_equal("test.pkl: pickle, byte 7: a fold that refuses", e.text);
    assert_null(p);
    e = (struct err){0};
    f.result = 1;
    assert_int_equal(-EBADMSG, load_folded(LIT(B "K\x01"
                                                 "a."),
                                           &f, (struct pickle_limits){0}, &p, &e));
    assert_non_null(strstr(e.text, "takes no items"));
}

/* A fold has looked: what comes later would not be seen. */
static void test_folds_are_final(void **state)
{
    static const struct {
        const char *data;
        size_t len;
        const char *why;
    } cases[] = {
        {LIT(A "}b}b."), "a second state"},
        {LIT(B "}b."), "a second state"},
        {LIT("]" A "q\x01"
             "ah\x01}b}b."),
         "a second state"},
        {LIT(A "}U\x01l]q\x01sbh\x01K\x01"
               "a."),
         "items for what was used"},
        {LIT(A "}U\x01t]q\x01\x85sbh\x01K\x01"
               "a."),
         "items for what was used"},
        {LIT(A "N}U\x01l}q\x01s\x86"
               "bh\x01K\x01K\x02s."),
         NULL},
        {LIT(A "]q\x01\x85"
               "bh\x01K\x01"
               "a."),
         "items for what was used"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(pickle_freep) struct pickle *p = NULL;
        struct folded f = {.result = 1};
        struct err e = {0};
        int rc = load_folded(cases[i].data, cases[i].len, &f, (struct pickle_limits){0},
                             &p, &e);

        if (rc != (cases[i].why ? -EBADMSG : 0) ||
            (cases[i].why && !strstr(e.text, cases[i].why)))
            fail_msg("case %zu: %d, \"%s\"", i, rc, e.text);
    }
}

/* A dict whose pairs are folded, by number of dict. */
struct pair_user {
    uintptr_t dict[4];
    unsigned count;
};

static int fold_each(void *user, uintptr_t dict, const struct pv *key,
                     const struct pv *value, struct err *e)
{
    struct pair_user *u = user;

    (void)key;
    (void)value;
    (void)e;
    assert_true(u->count < ARRAY_SIZE(u->dict));
    u->dict[u->count++] = dict;
    return 1;
}

/* The numbers of dicts whose pairs were taken are not those of later ones. */
static void test_a_dict_that_is_gone(void **state)
{
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    struct pair_user u = {0};
    struct pv root;
    const struct pickle_options options = {.fold_pair = fold_each, .user = &u};
    struct err e = {0};

    (void)state;
    assert_ok(pickle_from(LIT("}K\x01K\x02s0}K\x03K\x04s."), &options, &p, NULL, &e),
              &e);
    root = pickle_root(p);
    assert_int_equal(2, u.count);
    assert_true(u.dict[0] != u.dict[1]);
    assert_true(u.dict[1] == pv_identity(&root));
}

/* Appends a pickle of n objects f.A with a dict as state, each also in the memo. */
static void add_objects(struct buf *b, unsigned n)
{
    buf_adds(b, "](");
    for (unsigned i = 0; i < n; i++) {
        buf_add(b, LIT("cf\nA\n)\x81r"));
        buf_add(b, &i, 4);
        buf_add(b, LIT("}(U\x01nM"));
        buf_add(b, &i, 2);
        buf_add(b, LIT("U\x01tK\x01K\x02\x86ub"));
    }
    buf_adds(b, "e.");
}

static void test_folded_objects_are_freed(void **state)
{
    struct buf b = {0};
    struct folded f = {.result = 1};
    struct pickle *p = NULL;
    struct err e = {0};
    struct pv root, v;

    (void)state;
    add_objects(&b, 50000);
    /* Alive at once: the list, and one object with class, arguments, state and parts. */
    assert_int_equal(
        0, load_folded(b.data, b.len, &f,
                       (struct pickle_limits){.nodes = 10, .bytes = 4 << 20}, &p, &e));
    root = pickle_root(p);
    assert_int_equal(50000, pv_count(&root));
    for (size_t i = 0; i < 50000; i++) {
        v = pv_at(&root, i);
        assert_int_equal(PV_RECORD, v.kind);
        assert_int_equal(100 + i, v.record);
    }
    pickle_freep(&p);
    f = (struct folded){.result = 0};
    assert_int_equal(
        -EBADMSG,
        load_folded(b.data, b.len, &f, (struct pickle_limits){.nodes = 10}, &p, &e));
    buf_release(&b);
}

/* What a key held before goes, and so does its second copy. */
static void test_replaced_values_are_freed(void **state)
{
    const struct pickle_options options = {.limits = {.nodes = 5}};
    struct buf b = {0};
    struct pickle *p = NULL;
    struct err e = {0};

    (void)state;
    buf_adds(&b, "}");
    for (int i = 0; i < 1000; i++)
        buf_adds(&b, "U\x01k]s");
    buf_adds(&b, ".");
    if (pickle_from(b.data, b.len, &options, &p, NULL, &e) < 0)
        fail_msg("%s", e.text);
    pickle_free(p);
    buf_release(&b);
}

static void test_limits(void **state)
{
    static const struct {
        const char *data;
        size_t len;
        struct pickle_limits enough, less;
        const char *why;
    } cases[] = {
        {LIT("NNN."), {.opcodes = 4}, {.opcodes = 3}, "more than 3 opcodes"},
        {LIT("ccollections\nOrderedDict\n](U\x01kN\x86"
             "U\x01lN\x86"
             "e\x85R."),
         {.opcodes = 15},
         {.opcodes = 14},
         "more than 14 opcodes"},
        {LIT("]]]."), {.nodes = 3}, {.nodes = 2}, "more than 2 objects"},
        {LIT("]0]0]0]."), {.nodes = 1}, {.nodes = 0}, NULL},
        {LIT("((1"
             "1N."),
         {.depth = 2},
         {.depth = 1},
         "nested 1 deep"},
        {LIT("\x8c\x05hello\x8c\x01x\x93."), {.name = 5}, {.name = 4}, "over 4 bytes"},
        {LIT("chello\nx\n."), {.name = 5}, {.name = 4}, "over 4 bytes"},
        {LIT("cx\nhello\n."), {.name = 5}, {.name = 4}, "over 4 bytes"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct pickle_options enough = {.limits = cases[i].enough};
        const struct pickle_options less = {.limits = cases[i].less};
        struct pickle *p = NULL;
        struct err e = {0};

        if (pickle_from(cases[i].data, cases[i].len, &enough, &p, NULL, &e) < 0)
            fail_msg("case %zu: %s", i, e.text);
        pickle_freep(&p);
        if (!cases[i].why)
            continue;
        if (pickle_from(cases[i].data, cases[i].len, &less, &p, NULL, &e) != -EBADMSG ||
            !strstr(e.text, cases[i].why))
            fail_msg("case %zu: \"%s\", not \"%s\"", i, e.text, cases[i].why);
    }
}

/* What is in force where nothing else is said: marks and names, at the limit and past it. */
static void test_default_limits(void **state)
{
    static const struct {
        const char *before, *repeated, *closed, *behind;
        int enough;
        const char *why;
    } cases[] = {
        {"", "(", "1", "N.", 1000, "nested 1000 deep"},
        {"c", "m", "", "\nx\n.", 64 << 10, "over 65536 bytes"},
        {"cm\n", "x", "", "\n.", 64 << 10, "over 65536 bytes"},
    };

    (void)state;
    for (size_t i = 0; i < 2 * ARRAY_SIZE(cases); i++) {
        int more = (int)(i % 2);
        CLEANUP(buf_release) struct buf b = {0};
        struct pickle *p = NULL;
        struct err e = {0};

        buf_adds(&b, cases[i / 2].before);
        for (int n = 0; n < cases[i / 2].enough + more; n++)
            buf_adds(&b, cases[i / 2].repeated);
        for (int n = 0; n < cases[i / 2].enough + more; n++)
            buf_adds(&b, cases[i / 2].closed);
        buf_adds(&b, cases[i / 2].behind);
        if (pickle_from(b.data, b.len, NULL, &p, NULL, &e) != (more ? -EBADMSG : 0) ||
            (more && !strstr(e.text, cases[i / 2].why)))
            fail_msg("case %zu: \"%s\"", i, e.text);
        pickle_free(p);
    }
}

/* Opcodes that let memory grow in each of its ways, until 1 MiB is passed. */
static void test_memory_limit(void **state)
{
    static const char *const repeated[] = {"N", "]", "}", "\x8c\x01x", "])\x85"};
    const struct pickle_options options = {.limits = {.bytes = 1 << 20}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(repeated); i++) {
        struct buf b = {0};
        struct pickle *p = NULL;
        struct err e = {0};

        for (size_t n = 0; n < 200000; n++)
            buf_adds(&b, repeated[i]);
        buf_adds(&b, ".");
        if (pickle_from(b.data, b.len, &options, &p, NULL, &e) != -EBADMSG)
            fail_msg("%s: %d", repeated[i], e.code);
        buf_release(&b);
    }
}

static void test_digits_limit(void **state)
{
    struct buf b = {0};
    struct pickle *p = NULL;
    struct err e = {0};
    char *json;

    (void)state;
    buf_adds(&b, "L-1");
    for (int i = 1; i < 4300; i++)
        buf_addc(&b, '0');
    buf_adds(&b, "L\n.");
    assert_int_equal(0, pickle_from(b.data, b.len, NULL, &p, NULL, &e));
    json = pickle_json(p);
    assert_int_equal(strlen("{\"$type\":\"int\",\"value\":\"\"}") + 4301, strlen(json));
    free(json);
    pickle_freep(&p);
    buf_clear(&b);
    buf_adds(&b, "L1");
    for (int i = 1; i < 4301; i++)
        buf_addc(&b, '0');
    buf_adds(&b, "L\n.");
    assert_int_equal(-EBADMSG, pickle_from(b.data, b.len, NULL, &p, NULL, &e));
    buf_clear(&b);
    buf_add(&b, LIT("\x8b\x00\x07\x00\x00")); /* 2^14336 - 1: 4316 digits */
    for (int i = 0; i < 1792; i++)
        buf_addc(&b, i == 1791 ? '\x7f' : '\xff');
    buf_adds(&b, ".");
    assert_int_equal(-EBADMSG, pickle_from(b.data, b.len, NULL, &p, NULL, &e));
    assert_non_null(strstr(e.text, "over 4300 digits"));
    buf_release(&b);
}

/* Many keys: what came last counts, wherever the index of the dict was grown. */
static void test_large_dict(void **state)
{
    enum { KEYS = 100000 };
    struct buf b = {0};
    struct pickle *p = NULL;
    struct err e = {0};
    struct pv root, v;

    (void)state;
    buf_adds(&b, "}(");
    for (unsigned round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < KEYS; i++) {
            char key[16];
            int n = snprintf(key, sizeof key, "%u", i);

            buf_addf(&b, "U%c%s", n, key);
            buf_add(&b, "J", 1);
            n = (int)(i + round * KEYS);
            buf_add(&b, &n, 4);
        }
    }
    buf_adds(&b, "u.");
    assert_int_equal(0, pickle_from(b.data, b.len, NULL, &p, NULL, &e));
    root = pickle_root(p);
    assert_int_equal(KEYS, pv_count(&root));
    for (uint32_t i = 0; i < KEYS; i++) {
        v = pv_value_at(&root, i);
        assert_int_equal(KEYS + i, v.i);
    }
    pickle_free(p);
    buf_release(&b);
}

/* Strings of all lengths, so that every kind of argument falls across a window's end. */
static void test_streams(void **state)
{
    enum { STRINGS = 60000, LONG = 3 << 20 };
    CLEANUP(source_putp) struct source *s = NULL, *faulty = NULL;
    struct source_faults faults = {.fail_from = 2 << 20, .code = EIO};
    struct buf b = {0};
    struct pickle *p = NULL;
    struct err e = {0};
    uint32_t len = LONG;
    struct pv root, v;
    const char *text;
    size_t n;

    (void)state;
    buf_adds(&b, "](");
    for (uint32_t i = 0; i < STRINGS; i++) {
        n = i % 200;
        buf_add(&b, LIT("X"));
        buf_add(&b, &(uint32_t){(uint32_t)n}, 4);
        memset(buf_grow(&b, n), 'a' + (int)(i % 26), n);
    }
    buf_add(&b, "X", 1);
    buf_add(&b, &len, 4);
    memset(buf_grow(&b, LONG), 'L', LONG);
    buf_add(&b, LIT("e."));
    assert_true(b.len > 8 << 20);
    assert_int_equal(0, source_from_memory(b.data, b.len, false, "m", &s, &e));
    assert_int_equal(0, pickle_load(s, 0, b.len, NULL, &p, NULL, &e));
    root = pickle_root(p);
    assert_int_equal(STRINGS + 1, pv_count(&root));
    for (uint32_t i = 0; i < STRINGS; i++) {
        v = pv_at(&root, i);
        text = pv_bytes(&v, &n);
        assert_int_equal(i % 200, n);
        /* One check each: six million would take their time. */
        while (n > 0 && text[n - 1] == 'a' + (int)(i % 26))
            n--;
        assert_int_equal(0, n);
    }
    v = pv_at(&root, STRINGS);
    text = pv_bytes(&v, &n);
    assert_int_equal(LONG, n);
    assert_true(text[0] == 'L' && text[LONG - 1] == 'L');
    pickle_freep(&p);
    assert_int_equal(0, source_with_faults(s, &faults, &faulty, &e));
    assert_int_equal(-EIO, pickle_load(faulty, 0, b.len, NULL, &p, NULL, &e));
    assert_null(p);
    buf_release(&b);
}

/* Built, dropped and freed without recursion. */
static void test_deep_graphs(void **state)
{
    enum { DEPTH = 300000 };
    struct buf b = {0};
    struct pickle *p = NULL;
    struct err e = {0};

    (void)state;
    for (int i = 0; i < DEPTH; i++)
        buf_adds(&b, "]");
    for (int i = 1; i < DEPTH; i++)
        buf_adds(&b, "a");
    buf_adds(&b, "0)");
    for (int i = 0; i < DEPTH; i++)
        buf_adds(&b, "\x85");
    buf_adds(&b, ".");
    assert_int_equal(0, pickle_from(b.data, b.len, NULL, &p, NULL, &e));
    assert_int_equal(PV_TUPLE, pickle_root(p).kind);
    pickle_free(p);
    buf_release(&b);
}

/* Nested tuples of two equal halves: 2^60 leaves, 60 nodes, twice as a key. */
static void test_key_bombs(void **state)
{
    struct buf b = {0};
    struct pickle *p = NULL;
    struct err e = {0};

    (void)state;
    buf_adds(&b, "}");
    for (int key = 0; key < 2; key++) {
        buf_add(&b, LIT("K\x01"));
        for (int i = 0; i < 60; i++)
            buf_adds(&b, "2\x86");
        buf_adds(&b, "Ns");
    }
    buf_adds(&b, ".");
    assert_int_equal(-EBADMSG, pickle_from(b.data, b.len, NULL, &p, NULL, &e));
    assert_non_null(strstr(e.text, "too many nested tuples"));
    buf_clear(&b);
    buf_adds(&b, "}");
    for (int key = 0; key < 2; key++) {
        buf_adds(&b, ")");
        for (int i = 0; i < 100; i++)
            buf_adds(&b, "\x85");
        buf_adds(&b, "Ns");
    }
    buf_adds(&b, ".");
    assert_int_equal(-EBADMSG, pickle_from(b.data, b.len, NULL, &p, NULL, &e));
    buf_release(&b);
}

static void test_out_of_memory(void **state)
{
    static const char data[] =
        "}(X\x03\0\0\0abcq\x01](K\x01K\x02"
        "ecf\nA\n)\x81q\x02}U\x01xh\x01sb"
        "\x8f(K\x01K\x02\x90S'x'\nVy\\u00e9\nNj\xff\xff\xff\xffu.";
    struct buf b = {0};

    (void)state;
    /* The last GET is of an entry far from others; it has to be put first. */
    buf_add(&b, LIT("Kar\xff\xff\xff\xff"
                    "0"));
    buf_add(&b, LIT(data));
    for (long n = 1; fail_alloc_next(&n);) {
        struct folded f = {.result = 1};
        struct pickle *p = NULL;
        struct err e = {0};
        int rc = load_folded(b.data, b.len, &f, (struct pickle_limits){0}, &p, &e);

        fail_alloc_end(&n, rc);
        pickle_free(p);
    }
    buf_release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_strings),
        cmocka_unit_test(test_containers),
        cmocka_unit_test(test_stack_and_memo),
        cmocka_unit_test(test_objects),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_accessors),
        cmocka_unit_test(test_ends_at_stop),
        cmocka_unit_test(test_folds),
        cmocka_unit_test(test_fold_decides),
        cmocka_unit_test(test_folds_are_final),
        cmocka_unit_test(test_a_dict_that_is_gone),
        cmocka_unit_test(test_folded_objects_are_freed),
        cmocka_unit_test(test_replaced_values_are_freed),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_default_limits),
        cmocka_unit_test(test_memory_limit),
        cmocka_unit_test(test_digits_limit),
        cmocka_unit_test(test_large_dict),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_deep_graphs),
        cmocka_unit_test(test_key_bombs),
        cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
