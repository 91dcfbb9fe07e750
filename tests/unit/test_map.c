/* SPDX-License-Identifier: MIT */
/* tests/unit/test_map.c - maps: what is refused, and what rules make of tensors. */
#include "catalog_fixture.h"
#include "fail_alloc.h"

#include "index/map/map.h"

enum { FILE_BYTES = 1 << 20, MEMORY = 16 << 20 };

/* JSON with ' for ", which C would want escaped. */
static char *json_text(const char *text)
{
    char *out = text ? strdup(text) : NULL;

    for (char *p = out; p && *p; p++)
        if (*p == '\'')
            *p = '"';
    return out;
}

static int parse(const char *text, struct map **out, struct err *e)
{
    char *json = json_text(text);
    int ret;

    *e = (struct err){0};
    ret = map_parse("m", json, strlen(json), out, e);
    free(json);
    return ret;
}

/* ---- parsing ---- */

#define RULES(rules) "{'unshard_map': 1, 'rules': [" rules "]}"
#define VARIABLES(variables)                                                           \
    "{'unshard_map': 1, 'variables': " variables ", 'rules': []}"

static const struct {
    const char *text;
    int code;
    const char *words;
} refused[] = {
    {"", EBADMSG, "map m: "},
    {"[]", EINVAL, "\"unshard_map\" gives no version"},
    {"{'rules': []}", EINVAL, "\"unshard_map\" gives no version"},
    {"{'unshard_map': 'x', 'rules': []}", EINVAL, "gives no version"},
    {"{'unshard_map': 2, 'rules': []}", ENOTSUP, "version 2 of maps is not known"},
    {"{'unshard_map': 1}", EINVAL, "\"rules\" is no list"},
    {"{'unshard_map': 1, 'rules': {}}", EINVAL, "\"rules\" is no list"},
    {"{'unshard_map': 1, 'rules': [], 'x': 1}", EINVAL, "the map: \"x\" is not known"},
    {"{'unshard_map': 1, 'rules': [], 'other': 'x'}", EINVAL,
     "\"other\" is none of keep, drop, refuse"},
    {"{'unshard_map': 1, 'rules': [], 'other': 1}", EINVAL, "\"other\" is none of"},
    {"{'unshard_map': 1, 'rules': [], 'cast': 'I32'}", EINVAL,
     "\"cast\" names no floating-point type"},
    {"{'unshard_map': 1, 'rules': [], 'cast': 16}", EINVAL, "\"cast\" names no"},
    {VARIABLES("[]"), EINVAL, "\"variables\" is no object"},
    {VARIABLES("{'a': []}"), EINVAL, "variable a: no value"},
    {VARIABLES("{'a': true}"), EINVAL,
     "variable a: its value is neither text nor a whole number"},
    {VARIABLES("{'a': ['1', null]}"), EINVAL, "neither text nor a whole number"},
    {RULES("1"), EINVAL, "rule 1: a rule is no object"},
    {RULES("{'from': 'a', 'to': 'b'}, {'from': 'a', 'to': 'b', 'x': 1}"), EINVAL,
     "rule 2: a rule: \"x\" is not known"},
    {RULES("{'to': 'b'}"), EINVAL, "\"from\" is missing"},
    {RULES("{'from': 'a'}"), EINVAL, "a rule has one of \"to\""},
    {RULES("{'from': 'a', 'to': 'b', 'drop': true}"), EINVAL, "a rule has one of"},
    {RULES("{'from': 'a', 'drop': false}"), EINVAL, "a rule has one of"},
    {RULES("{'from': 'a', 'to': 'b', 'refuse': 'w'}"), EINVAL, "a rule has one of"},
    {RULES("{'from': 'a', 'drop': true, 'refuse': 'w'}"), EINVAL, "a rule has one of"},
    {RULES("{'from': 'a', 'refuse': []}"), EINVAL, "\"refuse\" is neither text"},
    {RULES("{'from': 'a', 'drop': 'yes'}"), EINVAL, "\"drop\" is neither true nor"},
    {RULES("{'from': 'a', 'to': 'b', 'split': {'parts': [{'to': 'c'}]}}"), EINVAL,
     "a rule has one of"},
    {RULES("{'from': 'a', 'stack': {'by': 'n'}}"), EINVAL, "a rule has one of"},
    {RULES("{'from': 'a', 'to': 'b', 'join': {'parts': [{'from': 'c'}]}}"), EINVAL,
     "a \"join\" has its patterns in its parts, not in \"from\""},
    {RULES("{'to': 'b', 'join': {'parts': [{'from': 'c'}]}, 'drop': true}"), EINVAL,
     "a rule has one of"},
    {RULES("{'from': [], 'to': 'b'}"), EINVAL, "\"from\" is empty"},
    {RULES("{'from': [true], 'to': 'b'}"), EINVAL, "a pattern is neither text nor"},
    {RULES("{'from': 'a{', 'to': 'b'}"), EINVAL, "a { without its }"},
    {RULES("{'from': 'a', 'to': 'b{'}"), EINVAL, "a { without its }"},
    {RULES("{'from': 'a', 'to': ''}"), EINVAL, "an empty name"},
    {RULES("{'from': 'a', 'to': []}"), EINVAL, "\"to\" is neither text nor"},
    {RULES("{'from': 'a.{n}', 'to': '{m}'}"), EINVAL,
     "\"{m}\": nothing in \"a.{n}\" gives {m}"},
    {RULES("{'from': ['a.{n}', 'a'], 'to': '{n}'}"), EINVAL,
     "\"{n}\": nothing in \"a\" gives {n}"},
    {RULES("{'from': 'a', 'split': {'parts': [{'to': '{n}'}]}}"), EINVAL,
     "nothing in \"a\" gives {n}"},
    {RULES("{'from': 'a.{n}', 'stack': {'by': 'n'}, 'to': 'b.{n}'}"), EINVAL,
     "nothing in \"a.{n}\" gives {n}"},
    {RULES("{'from': 'a', 'to': 'b', 'role': 'x'}"), EINVAL,
     "\"role\" is none of model, optimizer, other, any"},
    {RULES("{'from': 'a', 'to': 'b', 'role': 1}"), EINVAL, "\"role\" is none of"},
    {RULES("{'from': 'a', 'to': 'b', 'optional': 1}"), EINVAL,
     "\"optional\" is neither true nor false"},
    {RULES("{'from': 'a', 'to': 'b', 'cast': 'X'}"), EINVAL, "\"cast\" names no"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': {}}"), EINVAL, "\"ops\" is no list"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [1]}"), EINVAL,
     "an operation is an object with one member"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{}]}"), EINVAL, "with one member"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'turn': 1}]}"), EINVAL,
     "no operation is called \"turn\""},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': 1}]}"), EINVAL,
     "\"cut\" is no object"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 1, 'x': 1}}]}"), EINVAL,
     "\"cut\": \"x\" is not known"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {}}]}"), EINVAL,
     "\"cut\" says neither from where nor to where"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'axis': -1, 'to': 1}}]}"), EINVAL,
     "\"axis\" is no number from 0 to"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'axis': '0', 'to': 1}}]}"),
     EINVAL, "\"axis\" is no number"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 1.5}}]}"), EINVAL,
     "\"to\" is neither text nor a whole number"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'unstack': {'axis': 0}}]}"), EINVAL,
     "\"unstack\" gives the index no name"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'unstack': {'as': 'a b'}}]}"), EINVAL,
     "\"unstack\" gives the index no name"},
    {RULES(
         "{'from': 'a.{n}', 'to': 'b', 'ops': [{'shift': {'from': 'n', 'as': 'm'}}]}"),
     EINVAL, "\"shift\" wants \"from\", \"by\" and \"as\""},
    {RULES("{'from': 'a.{n}', 'to': 'b', 'ops': [{'shift': {'by': 1, 'as': 'm'}}]}"),
     EINVAL, "\"shift\" wants"},
    {RULES("{'from': 'a.{n}', 'to': 'b', 'ops': [{'shift': {'by': 1, 'from': 'n'}}]}"),
     EINVAL, "\"shift\" wants"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'shift': {'by': 1, 'from': 'n',"
           " 'as': '1'}}]}"),
     EINVAL, "\"1\" is no name"},
    {RULES("{'from': 'a', 'to': 'b.{m}', 'ops': [{'shift': {'by': 1, 'from': 'n',"
           " 'as': 'm'}}]}"),
     EINVAL, "nothing in \"a\" gives {m}"},
    {RULES("{'from': 'a', 'to': 'b', 'when': true}"), EINVAL,
     "\"when\" is neither text nor a whole number"},
    {RULES("{'from': 'a', 'to': 'b', 'when': {'x': 'y'}}"), EINVAL,
     "\"when\": \"x\" is not of config.json"},
    {RULES("{'from': 'a', 'to': 'b', 'when': {'config.x': 1}}"), EINVAL,
     "\"when\": config.x: neither text nor a list of texts"},
    {RULES("{'from': 'a', 'to': 'b', 'when': {'config.x': ['y', 1]}}"), EINVAL,
     "\"when\": config.x: neither"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'transpose': 1}]}"), EINVAL,
     "\"transpose\" is no list of axes"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'transpose': [0, 0]}]}"), EINVAL,
     "\"transpose\" is no order of 2 axes"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'transpose': [1, 2]}]}"), EINVAL,
     "\"transpose\" is no order of 2 axes"},
    {RULES("{'from': 'a', 'to': 'b', 'ops': [{'interleave': {'x': 1}}]}"), EINVAL,
     "\"interleave\": \"x\" is not known"},
    {RULES("{'from': 'a', 'split': {'axis': 0}}"), EINVAL,
     "\"parts\" is no list, or an empty one"},
    {RULES("{'from': 'a', 'split': {'parts': []}}"), EINVAL, "\"parts\" is no list"},
    {"{'unshard_map': 1, 'rules': [], 'models': {'config.a': 'x', 'config.b': 'y'}}",
     EINVAL, "\"models\": not one place of config.json"},
    {"{'unshard_map': 1, 'rules': [], 'models': {'source.a': 'x'}}", EINVAL,
     "\"source.a\" is not of config.json"},
    {"{'unshard_map': 1, 'rules': [], 'models': 3}", EINVAL, "\"models\": no object"},
    {"{'unshard_map': 1, 'rules': [], 'refuse': {}}", EINVAL, "\"refuse\" is no list"},
    {"{'unshard_map': 1, 'rules': [], 'refuse': [{'when': 'a'}]}", EINVAL,
     "\"refuse\" 1: an element has \"why\""},
    {"{'unshard_map': 1, 'rules': [], 'refuse': [{'why': 'a'}]}", EINVAL,
     "\"refuse\" 1: an element has \"why\""},
    {"{'unshard_map': 1, 'rules': [], 'shapes': {}}", EINVAL, "\"shapes\" is no list"},
    {"{'unshard_map': 1, 'rules': [], 'shapes': [{'of': 'a'}]}", EINVAL,
     "\"shapes\" 1: \"is\" is no list of sizes"},
    {"{'unshard_map': 1, 'rules': [], 'shapes': [{'is': [1]}]}", EINVAL,
     "\"shapes\" 1: a pattern is missing"},
    {RULES("{'from': 'a', 'split': {'parts': [{'rows': 1}]}}"), EINVAL,
     "a part without \"to\""},
    {RULES("{'from': 'a', 'split': {'parts': [{'from': 'b'}]}}"), EINVAL,
     "a part: \"from\" is not known"},
    {RULES("{'to': 'a', 'join': {'parts': [{'rows': 1}]}}"), EINVAL,
     "a pattern is missing"},
    {RULES("{'to': 'a', 'join': {'parts': [{'from': 'x.{n}'}, {'from': 'y'}]}}"),
     EINVAL, "\"x.{n}\": nothing in \"y\" gives {n}"},
    {RULES("{'to': 'a', 'join': {'parts': [{'from': 'x'}, {'from': 'y.{n}'}]}}"),
     EINVAL, "\"y.{n}\": nothing in \"x\" gives {n}"},
    {RULES("{'to': 'a', 'ops': [{'unstack': {'as': 'n'}}],"
           " 'join': {'parts': [{'from': 'x'}]}}"),
     EINVAL, "\"unstack\" with \"join\" or \"stack\""},
    {RULES("{'from': 'a.{n}', 'to': 'b', 'stack': {'axis': 0}}"), EINVAL,
     "\"stack\" does not say by which name"},
    {RULES("{'from': 'a.{n}', 'to': 'b', 'stack': {'by': 'm'}}"), EINVAL,
     "\"a.{n}\" has no {m} to stack by"},
};

static void test_parse_errors(void **state UNUSED)
{
    for (size_t i = 0; i < ARRAY_SIZE(refused); i++) {
        struct map *m = NULL;
        struct err e;
        int ret = parse(refused[i].text, &m, &e);

        if (ret != -refused[i].code)
            fail_msg("%s: %d, %s", refused[i].text, ret, e.text);
        if (!strstr(e.text, refused[i].words))
            fail_msg("%s: no \"%s\" in \"%s\"", refused[i].text, refused[i].words,
                     e.text);
        assert_null(m);
    }
}

static void test_hints(void **state UNUSED)
{
    struct map *m;
    struct err e;

    parse("{'unshard_map': 2, 'rules': []}", &m, &e);
    assert_string_equal(e.hint, "this program reads version 1");
    parse(RULES("{'from': 'a', 'to': 'b', 'ops': [{'turn': 1}]}"), &m, &e);
    assert_has(e.hint, "deinterleave");
    parse("{'unshard_map': 1, 'rules': [], 'cast': 'I32'}", &m, &e);
    assert_has(e.hint, "BF16");
}

static void test_shipped(void **state UNUSED)
{
    size_t n = 0;

    for (; map_shipped_name(n); n++) {
        const char *text = map_shipped(map_shipped_name(n));
        CLEANUP(map_freep) struct map *m = NULL;
        struct err e = {0};

        assert_non_null(text);
        assert_ok(map_parse(map_shipped_name(n), text, strlen(text), &m, &e), &e);
    }
    assert_true(n >= 2);
    assert_null(map_shipped("no-such-map"));
}

static void test_wants_config(void **state UNUSED)
{
    CLEANUP(map_freep) struct map *with = NULL;
    CLEANUP(map_freep) struct map *without = NULL;
    struct err e;

    assert_ok(parse(VARIABLES("{'a': 'config.b'}"), &with, &e), &e);
    assert_ok(parse(VARIABLES("{'a': 'b'}"), &without, &e), &e);
    assert_true(map_wants_config(with));
    assert_false(map_wants_config(without));
}

/* ---- running ---- */

/*
 * A checkpoint of tensors "KEY[DIMS]TYPE", whose elements lie one after another in a.bin.
 * TYPE: none (F32), or its name behind a colon; then '!': it has a fault.
 */
struct run {
    struct fake_store store;
    struct catalog *c;
    struct arena *a;
    struct buf out; /* the tensors that come of it, a line each */
    struct buf warnings;
    const char *error;
    struct err e;
};

static void report_one(struct sink *s, const char *text, uint64_t *at, uint32_t file)
{
    static const uint64_t zero[SHAPE_MAX_DIMS];
    char key[100], dims[100] = "", type[20] = "F32", *rest = dims, *dim;
    struct shape shape = {0};
    struct sink_tensor t = {.key = key, .shape = &shape, .role = -1};
    struct chunk c = {.file = file, .start = zero, .size = shape.dim};
    uint64_t volume = 1;
    struct err e = {0};

    sscanf(text, "%99[^[][%99[0-9,]", key, dims);
    if (strstr(text, "]:"))
        sscanf(strstr(text, "]:") + 2, "%19[A-Z0-9_]", type);
    while ((dim = strsep(&rest, ",")) && *dim)
        volume *= shape.dim[shape.nd++] = strtoull(dim, NULL, 10);
    t.key_len = strlen(key);
    t.dtype = dtype_from_name(type);
    c.offset = *at;
    c.length = (volume * dtype_bits(t.dtype) + 7) / 8;
    *at += c.length;
    assert_ok(sink_tensor_begin(s, &t, &e), &e);
    if (strchr(text, '!'))
        assert_ok(sink_fault(s, "broken"), &e);
    if (dtype_bits(t.dtype) >= 8)
        assert_ok(sink_chunk(s, &c, &e), &e);
    assert_ok(sink_tensor_end(s, &e), &e);
}

/* The tensors of a blank-separated list. */
static void report_all(struct sink *s, const char *list)
{
    uint32_t file = scan_file(s, "a.bin");
    char *copy = strdup(list), *rest = copy, *one;
    uint64_t at = 0;

    while ((one = strsep(&rest, " ")))
        report_one(s, one, &at, file);
    free(copy);
}

/* Numbers of elements of a.bin, runs of them as FIRST-LAST. */
static void add_numbers(struct buf *out, const uint64_t *n, size_t count)
{
    for (size_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && n[end] == n[end - 1] + 1;)
            end++;
        buf_addf(out, i ? " %llu" : "%llu", (unsigned long long)n[i]);
        if (end > i + 1)
            buf_addf(out, "-%llu", (unsigned long long)n[end - 1]);
    }
}

static void expand(const struct tensor_info *t, const struct chunk *c, uint64_t *value)
{
    uint64_t n = 1, unit = dtype_unit(t->stored);
    int64_t step[SHAPE_MAX_DIMS];
    struct err e = {0};

    for (uint32_t k = 0; k < t->shape.nd; k++)
        n *= c->size[k];
    assert_ok(chunk_steps(c, t->shape.nd, c->length / unit, step, &e), &e);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t left = i, dst = 0, src = c->first, below = 1;

        for (uint32_t k = t->shape.nd; k-- > 0; left /= c->size[k]) {
            dst += (c->start[k] + left % c->size[k]) * below;
            below *= t->shape.dim[k];
            src += left % c->size[k] * (uint64_t)step[k];
        }
        value[dst] = c->offset / unit + src;
    }
}

static void describe(struct run *r, int64_t id, const struct tensor_info *t)
{
    const struct chunk *chunk;
    uint64_t *value, bytes;
    size_t n;

    buf_addf(&r->out, "%s%s%s ", r->out.len ? "\n" : "", t->key, dtype_name(t->dtype));
    if (t->stored != t->dtype)
        buf_addf(&r->out, "<%s ", dtype_name(t->stored));
    shape_format(&t->shape, &r->out);
    if (t->fault) {
        buf_addf(&r->out, " !%s", t->fault);
        return;
    }
    buf_adds(&r->out, " = ");
    assert_ok(shape_bytes(&t->shape, t->stored, &bytes, &r->e), &r->e);
    value = arena_array(r->a, bytes + 1, sizeof *value);
    assert_ok(catalog_chunks(r->c, id, t, r->a, &chunk, &n, &r->e), &r->e);
    for (size_t i = 0; i < n; i++)
        expand(t, &chunk[i], value);
    add_numbers(&r->out, value, bytes / dtype_unit(t->stored));
}

static int add_warning(void *user, const char *code, const char *text)
{
    struct run *r = user;

    return buf_addf(&r->warnings, "%s%s: %s", r->warnings.len ? "\n" : "", code, text);
}

static void look(struct run *r)
{
    struct checkpoint_info cp;

    assert_ok(catalog_checkpoint(r->c, "run", NULL, r->a, &cp, &r->e), &r->e);
    r->error = cp.error;
    for (uint32_t ord = 0; !cp.error && ord < cp.tensors; ord++) {
        struct tensor_info t;

        assert_ok(catalog_tensor(r->c, cp.id, ord, r->a, &t, &r->e), &r->e);
        describe(r, cp.id, &t);
    }
    catalog_warnings(r->c, cp.id, add_warning, r, &r->e);
    buf_addc(&r->out, '\0');
    buf_addc(&r->warnings, '\0');
}

static void run(struct run *r, const char *map, const char *config, const char *tensors)
{
    static const struct sink_checkpoint about = {
        .format = "test", .settings = "{\"m\": {\"n\": 1, \"t\": \"u\"}}"};
    struct catalog_place place = {.path = "run", .store = &r->store.store};
    CLEANUP(map_freep) struct map *m = NULL;
    CLEANUP(map_filter_freep) struct sink_filter *f = NULL;
    char *text = json_text(config);
    struct sink *s;
    int64_t id;

    *r = (struct run){.store = fake_new(), .a = arena_new(MEMORY)};
    fake_add(&r->store, "run/a.bin", FILE_BYTES);
    r->c = index_open(NULL, "test");
    assert_ok(parse(map, &m, &r->e), &r->e);
    assert_ok(map_filter_new(m, text, text ? strlen(text) : 0, &f, &r->e), &r->e);
    free(text);
    place.filter = f;
    assert_ok(sink_begin(r->c, &place, &s, &r->e), &r->e);
    assert_ok(sink_checkpoint(s, &about, &r->e), &r->e);
    report_all(s, tensors);
    assert_ok(sink_commit(s, NULL, &id, &r->e), &r->e);
    look(r);
}

static void run_end(struct run *r)
{
    catalog_close(r->c);
    arena_free(r->a);
    buf_release(&r->out);
    buf_release(&r->warnings);
}

struct run_case {
    const char *what, *map, *config, *tensors;
    const char *want;  /* the tensors that come of it; NULL: `error` has this in it */
    const char *error; /* or what warnings must say; NULL: none */
};

#define SHIFT "{'shift': {'from': 'n', 'by': 'config.x', 'as': 'm'}}"
#define WHEN(when)                                                                     \
    "{'from': 'a', 'to': 'b', 'when': " when ", 'optional': true},"                    \
    " {'from': 'a', 'to': 'c', 'optional': true}"

static const struct run_case cases[] = {
    {"a name", RULES("{'from': 'a.{n}', 'to': 'b.{n}.w'}"), NULL, "a.x[2] a.y[3]",
     "b.x.wF32 [2] = 0-1\nb.y.wF32 [3] = 2-4", NULL},
    {"the first rule that fits",
     RULES("{'from': 'a.b', 'to': 'first'}, {'from': 'a.{n}', 'to': 'second.{n}'}"),
     NULL, "a.b[2] a.c[2]", "firstF32 [2] = 0-1\nsecond.cF32 [2] = 2-3", NULL},
    {"kept as they are", RULES("{'from': 'a', 'to': 'b'}"), NULL, "a[2] c[3]",
     "bF32 [2] = 0-1\ncF32 [3] = 2-4",
     "map-left: map m: no rule names 1 tensor of the model, kept as they are: c"},
    {"left out",
     "{'unshard_map': 1, 'other': 'drop', 'rules': [{'from': 'a', 'to': 'b'}]}", NULL,
     "a[2] c[3] d[1] e[1] f[1]", "bF32 [2] = 0-1",
     "map-left: map m: no rule names 4 tensors of the model, left out: c, d, e"},
    {"refused",
     "{'unshard_map': 1, 'other': 'refuse', 'rules': [{'from': 'a', 'to': 'b'}]}", NULL,
     "a[2] c[3]", NULL, "map m: no rule names 1 tensor of the model (c)"},
    {"refused, and nothing fits",
     "{'unshard_map': 1, 'other': 'refuse', 'rules': [{'from': 'a', 'to': 'b'}]}", NULL,
     "c[3] d[1]", NULL, "no rule names 2 tensors of the model (c, ...)"},
    {"unused", RULES("{'from': 'a', 'to': 'b'}, {'from': 'x', 'to': 'y'}"), NULL,
     "a[2]", "bF32 [2] = 0-1",
     "map-rule-unused: map m: rule 2 (x) names no tensor of this checkpoint"},
    {"unused and optional",
     RULES("{'from': 'a', 'to': 'b'}, {'from': 'x', 'to': 'y', 'optional': true}"),
     NULL, "a[2]", "bF32 [2] = 0-1", NULL},
    {"nothing fits", RULES("{'from': 'x', 'to': 'y'}"), NULL, "a[2]", "aF32 [2] = 0-1",
     "map-unused: map m names no tensor of this checkpoint"},
    {"drop", RULES("{'from': 'a.{x...}', 'drop': true}"), NULL, "a.b.c[2] b[1]",
     "bF32 [1] = 2", "map-left: "},
    {"refuse",
     RULES("{'from': 'a.{x}', 'refuse': 'no such'}, {'from': 'b', 'to': 'c'}"), NULL,
     "b[1] a.b[2]", NULL, "map m: rule 1: tensor a.b: no such"},
    {"nothing to refuse",
     RULES("{'from': 'a', 'refuse': 'x'}, {'from': 'b', 'to': 'c'}"), NULL, "b[1]",
     "cF32 [1] = 0", NULL},
    {"cut",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'axis': 1, 'from': 1,"
           " 'to': 'dim - 1'}}]}"),
     NULL, "a[2,4]", "bF32 [2, 2] = 1-2 5-6", NULL},
    {"cut to nothing", RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 0}}]}"),
     NULL, "a[2,4]", "bF32 [0, 4] = ", NULL},
    {"cut too far", RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 5}}]}"),
     NULL, "a[4]", NULL, "map m: rule 1: tensor a: a cut from 0 to 5 of an axis of 4"},
    {"cut backwards",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'from': 3, 'to': 2}}]}"), NULL,
     "a[4]", NULL, "a cut from 3 to 2 of an axis of 4"},
    {"a negative number",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 'dim - 5'}}]}"), NULL,
     "a[4]", NULL, "\"dim - 5\" is -1"},
    {"no such axis",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'axis': 2, 'to': 1}}]}"), NULL,
     "a[4,5]", NULL, "tensor a: the tensor has no axis 2, its shape is [4, 5]"},
    {"unstack",
     RULES("{'from': 's', 'to': 'h.{n}', 'ops': [{'unstack': {'axis': 1,"
           " 'as': 'n'}}]}"),
     NULL, "s[2,3]", "h.0F32 [2] = 0 3\nh.1F32 [2] = 1 4\nh.2F32 [2] = 2 5", NULL},
    {"unstacked already",
     RULES(
         "{'from': ['s', 's.{n}'], 'to': 'h.{n}', 'ops': [{'unstack': {'as': 'n'}}]}"),
     NULL, "s.7[3]", "h.7F32 [3] = 0-2", NULL},
    {"unstack twice",
     RULES("{'from': 's', 'to': '{l}.{e}', 'ops': [{'unstack': {'as': 'l'}},"
           " {'unstack': {'as': 'e'}}]}"),
     NULL, "s[2,2,2]",
     "0.0F32 [2] = 0-1\n0.1F32 [2] = 2-3\n1.0F32 [2] = 4-5\n1.1F32 [2] = 6-7", NULL},
    {"a shift", RULES("{'from': 'a.{n}', 'to': 'b.{m}', 'ops': [" SHIFT "]}"),
     "{'x': 10}", "a.2[3]", "b.12F32 [3] = 0-2", NULL},
    {"a shift of another pattern's name",
     RULES("{'from': ['s', 'a.{m}', 'a.{n}.w'], 'to': 'b.{m}',"
           " 'ops': [" SHIFT ", {'unstack': {'as': 'm'}}]}"),
     "{'x': 10}", "s[2] a.3[2] a.4.w[2]",
     "b.0F32 [] = 0\nb.1F32 [] = 1\nb.14F32 [2] = 4-5\nb.3F32 [2] = 2-3", NULL},
    {"a shift of what is no number",
     RULES("{'from': 'a.{n}', 'to': 'b.{m}', 'ops': [" SHIFT "]}"), "{'x': 10}",
     "a.02[3]", NULL, "\"shift\": {n} is \"02\", which is no number"},
    {"a shift too far", RULES("{'from': 'a.{n}', 'to': 'b.{m}', 'ops': [" SHIFT "]}"),
     "{'x': 10}", "a.18446744073709551610[3]", NULL, "\"shift\": {m} passes 2^64"},
    {"a shift by what nobody knows",
     RULES("{'from': 'a.{n}', 'to': 'b.{m}', 'ops': [" SHIFT "]}"), "{}", "a.2[3]",
     NULL, "config.json has no x"},
    {"unstack any number of nothing",
     RULES("{'from': 's', 'to': 'h.{n}', 'ops': [{'unstack': {'as': 'n'}}]}"), NULL,
     "s[1099511627776,0]", NULL,
     "tensor s: \"unstack\" of an axis of 1099511627776: more than 65536 tensors"},
    {"unstack too much together",
     RULES("{'from': '{m}', 'to': '{m}.{n}', 'ops': [{'unstack': {'as': 'n'}}]}"), NULL,
     "a[0,40000] b[40000,0] c[40000,0]", NULL,
     "tensor c: \"unstack\" of an axis of 40000: more than 65536 tensors"},
    {"unstack twice too much",
     RULES("{'from': 's', 'to': '{l}.{e}', 'ops': [{'unstack': {'as': 'l'}},"
           " {'unstack': {'as': 'e'}}]}"),
     NULL, "s[2,40000,0]", NULL, "\"unstack\" of an axis of 40000"},
    {"transpose", RULES("{'from': 'a', 'to': 'b', 'ops': [{'transpose': []}]}"), NULL,
     "a[2,3]", "bF32 [3, 2] = 0 3 1 4 2 5", NULL},
    {"an order of axes",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'transpose': [1, 2, 0]}]}"), NULL,
     "a[2,2,2]", "bF32 [2, 2, 2] = 0 4 1 5 2 6 3 7", NULL},
    {"an order of other axes",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'transpose': [1, 0]}]}"), NULL, "a[2]",
     NULL, "\"transpose\" of 2 axes, the tensor has 1"},
    {"split", RULES("{'from': 'a', 'split': {'parts': [{'to': 'x'}, {'to': 'y'}]}}"),
     NULL, "a[4,2]", "xF32 [2, 2] = 0-3\nyF32 [2, 2] = 4-7", NULL},
    {"split in groups",
     RULES("{'from': '{n}.qkv', 'split': {'groups': 2, 'parts': [{'to': '{n}.q',"
           " 'rows': 2}, {'to': '{n}.k', 'rows': 1}, {'to': '{n}.v', 'rows': 1}]}}"),
     NULL, "5.qkv[8]", "5.kF32 [2] = 2 6\n5.qF32 [4] = 0-1 4-5\n5.vF32 [2] = 3 7",
     NULL},
    {"split with a rest",
     RULES("{'from': 'a', 'split': {'parts': [{'to': 'x'}, {'to': 'y'}]}}"), NULL,
     "a[3]", NULL, "3 elements are not 2 equal parts"},
    {"split in groups with a rest",
     RULES("{'from': 'a', 'split': {'groups': 2, 'parts': [{'to': 'x'}]}}"), NULL,
     "a[3]", NULL, "3 elements are not 2 groups"},
    {"split in no groups",
     RULES("{'from': 'a', 'split': {'groups': 0, 'parts': [{'to': 'x'}]}}"), NULL,
     "a[3]", NULL, "3 elements are not 0 groups"},
    {"split with too few rows",
     RULES("{'from': 'a', 'split': {'parts': [{'to': 'x', 'rows': 1}]}}"), NULL, "a[3]",
     NULL, "the parts are 1 elements of groups of 3"},
    {"split with too many rows",
     RULES("{'from': 'a', 'split': {'parts': [{'to': 'x', 'rows': 2},"
           " {'to': 'y', 'rows': 2}]}}"),
     NULL, "a[3]", NULL, "the parts are more than groups of 3"},
    {"split with far too many rows",
     RULES("{'from': 'a', 'split': {'parts': [{'to': 'x', 'rows': 4}]}}"), NULL, "a[3]",
     NULL, "part 1 has 4 elements of groups of 3"},
    {"split in any number of groups of nothing",
     RULES(
         "{'from': 'a', 'split': {'groups': 1000000000000000, 'parts': [{'to': 'x'}]}}"),
     NULL, "a[0]", "xF32 [0] = ", NULL},
    {"split in too many groups",
     RULES("{'from': 'a', 'split': {'groups': 'dim', 'parts': [{'to': 'x'}]}}"), NULL,
     "a[262145]:U8", NULL, "more than 262144 pieces of an axis"},
    {"join of any number of groups of nothing",
     RULES("{'to': 'c', 'join': {'groups': 1000000000000000, 'parts': [{'from': 'a'},"
           " {'from': 'b'}]}}"),
     NULL, "a[0] b[0]", "cF32 [0] = ", NULL},
    {"deinterleave",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'deinterleave': {'block': 2}}]}"), NULL,
     "a[8]", "bF32 [8] = 0-1 4-5 2-3 6-7", NULL},
    {"interleave in groups",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'interleave': {'groups': 2}}]}"), NULL,
     "a[8]", "bF32 [8] = 0 2 1 3-4 6 5 7", NULL},
    {"deinterleave what does not divide",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'deinterleave': {'block': 3}}]}"), NULL,
     "a[8]", NULL, "8 elements are not 1 groups of pairs of blocks of 3"},
    {"join",
     RULES("{'to': '{n}.qkv', 'join': {'groups': 2, 'parts': [{'from': 'q.{n}',"
           " 'rows': 2}, {'from': 'k.{n}'}]}}"),
     NULL, "k.0[2] q.0[4] q.1[4] k.1[2]",
     "0.qkvF32 [6] = 2-3 0 4-5 1\n1.qkvF32 [6] = 6-7 10 8-9 11", NULL},
    {"join with names in another order",
     RULES("{'to': '{a}.{b}', 'join': {'parts': [{'from': 'x.{a}.{b}'},"
           " {'from': 'y.{b}.{a}'}]}}"),
     NULL, "x.1.2[1] y.2.1[1]", "1.2F32 [2] = 0-1", NULL},
    {"join after operations",
     RULES("{'to': 'c', 'ops': [{'transpose': []}], 'join': {'axis': 1, 'parts':"
           " [{'from': 'a'}, {'from': 'b'}]}}"),
     NULL, "a[2,2] b[1,2]", "cF32 [2, 3] = 0 2 4 1 3 5", NULL},
    {"join without a part",
     RULES("{'to': 'c', 'join': {'parts': [{'from': 'a'}, {'from': 'b'}]}}"), NULL,
     "b[2]", NULL, "rule 1: b is there, and nothing for part 1 (a)"},
    {"join with a part missing behind",
     RULES("{'to': 'c', 'join': {'parts': [{'from': 'a'}, {'from': 'b'}]}}"), NULL,
     "a[2]", NULL, "a is there, and nothing for part 2 (b)"},
    {"join of other rows",
     RULES("{'to': 'c', 'join': {'parts': [{'from': 'a', 'rows': 3}, {'from': 'b'}]}}"),
     NULL, "a[2] b[2]", NULL, "a has 2 elements a group, the map says 3"},
    {"join of what has no groups",
     RULES(
         "{'to': 'c', 'join': {'groups': 2, 'parts': [{'from': 'a'}, {'from': 'b'}]}}"),
     NULL, "a[2] b[3]", NULL, "b: 3 elements are not 2 groups"},
    {"join of other shapes",
     RULES("{'to': 'c', 'join': {'parts': [{'from': 'a'}, {'from': 'b'}]}}"), NULL,
     "a[2,3] b[2,4]", NULL, "a and b have shapes that do not fit together"},
    {"join of other types",
     RULES("{'to': 'c', 'join': {'parts': [{'from': 'a'}, {'from': 'b'}]}}"), NULL,
     "a[2] b[2]:F16", NULL, "a is F32 and b is F16"},
    {"join without an axis",
     RULES("{'to': 'c', 'join': {'axis': 1, 'parts': [{'from': 'a'}]}}"), NULL, "a[2]",
     NULL, "the tensor has no axis 1"},
    {"stack", RULES("{'from': 'h.{n}.w', 'to': 'w', 'stack': {'axis': 1, 'by': 'n'}}"),
     NULL, "h.1.w[2] h.0.w[2] h.2.w[2]", "wF32 [2, 3] = 2 0 4 3 1 5", NULL},
    {"more than one stack",
     RULES("{'from': '{a}.{n}', 'to': '{a}', 'stack': {'by': 'n'}}"), NULL,
     "x.0[1] y.0[1] y.1[1] x.1[1]", "xF32 [2, 1] = 0 3\nyF32 [2, 1] = 1-2", NULL},
    {"ten layers", RULES("{'from': 'h.{n}', 'to': 'w', 'stack': {'by': 'n'}}"), NULL,
     "h.0[] h.1[] h.10[] h.2[] h.3[] h.4[] h.5[] h.6[] h.7[] h.8[] h.9[]",
     "wF32 [11] = 0-1 3-10 2", NULL},
    {"stack with a gap", RULES("{'from': 'h.{n}', 'to': 'w', 'stack': {'by': 'n'}}"),
     NULL, "h.0[2] h.2[2]", NULL, "h.2: there is no 1 before it"},
    {"stack by a word", RULES("{'from': 'h.{n}', 'to': 'w', 'stack': {'by': 'n'}}"),
     NULL, "h.a[2]", NULL, "{n} is no number"},
    {"stack of other shapes",
     RULES("{'from': 'h.{n}', 'to': 'w', 'stack': {'by': 'n'}}"), NULL, "h.0[2] h.1[3]",
     NULL, "h.0 and h.1 have shapes that do not fit together"},
    {"stack along no axis",
     RULES("{'from': 'h.{n}', 'to': 'w', 'stack': {'axis': 2, 'by': 'n'}}"), NULL,
     "h.0[2]", NULL, "a tensor of 1 axes cannot be stacked along 2"},
    {"keys that meet", RULES("{'from': 'a.{n}', 'to': 'b'}"), NULL, "a.1[2] a.2[2]",
     NULL, "key b is there twice"},
    {"a key that is there already", RULES("{'from': 'a', 'to': 'b'}"), NULL,
     "a[2] b[3]", NULL, "key b is there twice"},
    {"keys that change places",
     RULES("{'from': 'a', 'to': 'b'}, {'from': 'b', 'to': 'a'}"), NULL, "a[2] b[3]",
     "aF32 [3] = 2-4\nbF32 [2] = 0-1", NULL},
    {"cast", RULES("{'from': 'a', 'to': 'b', 'cast': 'BF16'}"), NULL, "a[2]",
     "bBF16 <F32 [2] = 0-1", NULL},
    {"cast of all", "{'unshard_map': 1, 'cast': 'F16', 'rules': []}", NULL,
     "a[2] i[2]:I32 h[2]:F16 optimizer.m[2]",
     "aF16 <F32 [2] = 0-1\nhF16 [2] = 8-9\niI32 [2] = 2-3\noptimizer.mF32 [2] = 5-6",
     NULL},
    {"only of the model", RULES("{'from': '{a...}', 'to': 'x.{a}'}"), NULL,
     "a[1] optimizer.a[1]", "optimizer.aF32 [1] = 1\nx.aF32 [1] = 0", NULL},
    {"of the optimizer",
     RULES("{'from': 'optimizer.{a}', 'to': '{a}', 'role': 'optimizer'}"), NULL,
     "optimizer.a[1]", "aF32 [1] = 0", NULL},
    {"of any role", RULES("{'from': '{a...}', 'to': 'x.{a}', 'role': 'any'}"), NULL,
     "a[1] optimizer.a[1]", "x.aF32 [1] = 0\nx.optimizer.aF32 [1] = 1", NULL},
    {"a fault travels",
     RULES("{'from': 'a', 'split': {'parts': [{'to': 'x'},"
           " {'to': 'y'}]}}"),
     NULL, "a[2]!",
     "xF32 [1] !a of the source: broken\nyF32 [1] !a of the source: broken", NULL},
    {"a fault of a part travels",
     RULES("{'to': 'c', 'join': {'parts': [{'from': 'a'}, {'from': 'b'}]}}"), NULL,
     "a[2] b[2]!", "cF32 [4] !b of the source: broken", NULL},
    {"packed elements", RULES("{'from': 'a', 'to': 'b'}"), NULL, "a[4]:F4", NULL,
     "tensor a: elements of F4 are packed: only \"drop\" takes them"},
    {"packed elements dropped", RULES("{'from': 'a', 'drop': true}"), NULL, "a[4]:F4",
     "", NULL},
    {"a number of config.json",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 'config.x.y'}}]}"),
     "{'x': {'y': 2}}", "a[4]", "bF32 [2] = 0-1", NULL},
    {"a flag of config.json",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 'config.x + 1'}}]}"),
     "{'x': true}", "a[4]", "bF32 [2] = 0-1", NULL},
    {"no config.json",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 'config.x'}}]}"), NULL,
     "a[4]", NULL, "config.x: there is no config.json (give one with -o hf=DIR)"},
    {"no such number in config.json",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 'config.x.z'}}]}"),
     "{'x': {'y': 2}}", "a[4]", NULL, "config.json has no x.z"},
    {"text in config.json",
     RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 'config.x'}}]}"),
     "{'x': '2'}", "a[4]", NULL, "config.json: x is no whole number"},
    {"a captured number",
     RULES("{'from': 'a.{n}', 'to': 'b', 'ops': [{'cut': {'to': 'n'}}]}"), NULL,
     "a.3[4]", "bF32 [3] = 0-2", NULL},
    {"no such name", RULES("{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 'n'}}]}"),
     NULL, "a[4]", NULL, "n has no value"},
    {"when there is a number", RULES(WHEN("'config.x'")), "{'x': 2}", "a[1]",
     "bF32 [1] = 0", NULL},
    {"when it is 0", RULES(WHEN("'config.x - 2'")), "{'x': 2}", "a[1]", "cF32 [1] = 0",
     NULL},
    {"when there is none", RULES(WHEN("'config.x'")), "{'y': 2}", "a[1]",
     "cF32 [1] = 0", NULL},
    {"when there is no config.json", RULES(WHEN("'config.x'")), NULL, "a[1]",
     "cF32 [1] = 0", NULL},
    {"when there is the text", RULES(WHEN("{'config.x.y': 'one'}")),
     "{'x': {'y': 'one'}}", "a[1]", "bF32 [1] = 0", NULL},
    {"when there is one of the texts", RULES(WHEN("{'config.x': ['two', 'one']}")),
     "{'x': 'one'}", "a[1]", "bF32 [1] = 0", NULL},
    {"when there is another text", RULES(WHEN("{'config.x': ['two', 'one']}")),
     "{'x': 'o'}", "a[1]", "cF32 [1] = 0", NULL},
    {"when it is no text", RULES(WHEN("{'config.x': '1'}")), "{'x': 1}", "a[1]",
     "cF32 [1] = 0", NULL},
    {"when one of two is another",
     RULES(WHEN("{'config.x': 'one', 'config.y': 'two'}")), "{'x': 'one'}", "a[1]",
     "cF32 [1] = 0", NULL},
    {"a rule of other models that names nothing",
     RULES("{'from': 'z', 'to': 'y', 'when': 'config.x'}, {'from': 'a', 'to': 'b'}"),
     "{}", "a[1]", "bF32 [1] = 0", NULL},
};

static void check_case(const struct run_case *c)
{
    struct run r;
    const char *said;

    run(&r, c->map, c->config, c->tensors);
    if (c->want && (r.error || strcmp(r.out.data, c->want) != 0))
        fail_msg("%s: \"%s\", not \"%s\"; %s", c->what, r.out.data, c->want,
                 r.error ? r.error : "");
    if (!c->want && !r.error)
        fail_msg("%s: no error, but \"%s\"", c->what, r.out.data);
    said = r.error ? r.error : r.warnings.data;
    if (c->error ? !strstr(said, c->error) : *said)
        fail_msg("%s: \"%s\", not \"%s\"", c->what, said, c->error ? c->error : "");
    run_end(&r);
}

static void test_rules(void **state UNUSED)
{
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        check_case(&cases[i]);
}

static void check_shipped(const char *name, const char *config, const char *from,
                          const char *to)
{
    CLEANUP_FREE char *map = strdup(map_shipped(name));
    struct run r;

    for (char *p = map; (p = strchr(p, '\''));) /* which run() takes for " */
        *p = ' ';
    run(&r, map, config, from);
    assert_null(r.error);
    assert_string_equal(r.out.data, to);
    run_end(&r);
}

/* Halves of fc1 that are tensors of their own, and experts of merged rank files. */
static void test_megatron_names(void **state UNUSED)
{
    static const char config[] = "{'num_attention_heads': 2, 'vocab_size': 3,"
                                 " 'num_hidden_layers': 9}";
    static const struct {
        const char *from, *to;
    } t[] = {
        {"module.decoder.layers.1.mlp.linear_fc1.weight_w[2,3]",
         "model.layers.1.mlp.gate_proj.weightF32 [2, 3] = 0-5"},
        {"decoder.layers.mlp.linear_fc1.bias_v[1,3]",
         "model.layers.0.mlp.up_proj.biasF32 [3] = 0-2"},
        {"decoder.layers.0.mlp.experts.linear_fc1.weight7_v[2,2]",
         "model.layers.0.mlp.experts.7.up_proj.weightF32 [2, 2] = 0-3"},
        {"decoder.layers.0.mlp.experts.local_experts.5.linear_fc1.weight[4,1]",
         "model.layers.0.mlp.experts.5.gate_proj.weightF32 [2, 1] = 0-1\n"
         "model.layers.0.mlp.experts.5.up_proj.weightF32 [2, 1] = 2-3"},
        {"decoder.layers.2.mlp.experts.linear_fc2.weight3[2,1]",
         "model.layers.2.mlp.experts.3.down_proj.weightF32 [2, 1] = 0-1"},
        {"decoder.layers.mlp.shared_experts.linear_fc1.weight[1,2,1]",
         "model.layers.0.mlp.shared_experts.gate_proj.weightF32 [1, 1] = 0\n"
         "model.layers.0.mlp.shared_experts.up_proj.weightF32 [1, 1] = 1"},
        {"decoder.layers.4.self_attention.linear_kv_up_proj.layer_norm_weight[2]",
         "model.layers.4.self_attn.kv_a_layernorm.weightF32 [2] = 0-1"},
        {"mtp.layers.0.mtp_model_layer.mlp.router.expert_bias[2]",
         "model.layers.9.mlp.gate.e_score_correction_biasF32 [2] = 0-1"},
        {"mtp.layers.1.final_layernorm.weight[2]",
         "model.layers.10.shared_head.norm.weightF32 [2] = 0-1"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++)
        check_shipped("megatron-to-hf", config, t[i].from, t[i].to);
}

/* Gemma's norm in front of the MLP has not the name that it has in Llama. */
static void test_gemma_norms(void **state UNUSED)
{
    static const char gemma[] = "{'model_type': 'gemma2', 'num_hidden_layers': 9}";
    static const struct {
        const char *map, *config, *from, *to;
    } t[] = {
        {"megatron-to-hf", gemma,
         "decoder.layers.1.mlp.linear_fc1.layer_norm_weight[2]",
         "model.layers.1.pre_feedforward_layernorm.weightF32 [2] = 0-1"},
        {"megatron-to-hf", gemma,
         "decoder.layers.self_attention.linear_proj.post_layernorm.weight[1,2]",
         "model.layers.0.post_attention_layernorm.weightF32 [2] = 0-1"},
        {"megatron-to-hf", gemma,
         "decoder.layers.1.mlp.linear_fc2.post_layernorm.weight[2]",
         "model.layers.1.post_feedforward_layernorm.weightF32 [2] = 0-1"},
        {"megatron-to-hf", "{'model_type': 'llama', 'num_hidden_layers': 9}",
         "decoder.layers.1.mlp.linear_fc1.layer_norm_weight[2]",
         "model.layers.1.post_attention_layernorm.weightF32 [2] = 0-1"},
        {"hf-to-megatron", gemma, "model.layers.1.pre_feedforward_layernorm.weight[2]",
         "decoder.layers.1.mlp.linear_fc1.layer_norm_weightF32 [2] = 0-1"},
        {"hf-to-megatron", gemma, "model.layers.1.post_attention_layernorm.weight[2]",
         "decoder.layers.1.self_attention.linear_proj.post_layernorm.weightF32 [2] = "
         "0-1"},
        {"hf-to-megatron", gemma, "model.layers.1.post_feedforward_layernorm.weight[2]",
         "decoder.layers.1.mlp.linear_fc2.post_layernorm.weightF32 [2] = 0-1"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++)
        check_shipped(t[i].map, t[i].config, t[i].from, t[i].to);
}

/* As torchtitan 0.2 called them; those of 0.3 are among the fixtures. */
static void test_torchtitan_names(void **state UNUSED)
{
    static const char llama[] = "{'model_type': 'llama', 'num_attention_heads': 1}";
    static const char deepseek[] =
        "{'model_type': 'deepseek_v3', 'num_hidden_layers': 3}";
    static const struct {
        const char *config, *from, *to;
    } t[] = {
        {llama, "layers.0.attention.wk.weight[4,1]",
         "model.layers.0.self_attn.k_proj.weightF32 [4, 1] = 0 2 1 3"},
        {llama, "output.weight[2,1]", "lm_head.weightF32 [2, 1] = 0-1"},
        {"{'model_type': 'qwen3'}", "layers.0.attention.wk.weight[4,1]",
         "model.layers.0.self_attn.k_proj.weightF32 [4, 1] = 0-3"},
        {"{'model_type': 'qwen3', 'tie_word_embeddings': true}", "output.weight[2,1]",
         ""},
        {"{'model_type': 'llama', 'tie_word_embeddings': true}", "output.weight[2,1]",
         "lm_head.weightF32 [2, 1] = 0-1"},
        {deepseek, "layers.2.moe.experts.w2[2,1,2]",
         "model.layers.2.mlp.experts.0.down_proj.weightF32 [1, 2] = 0-1\n"
         "model.layers.2.mlp.experts.1.down_proj.weightF32 [1, 2] = 2-3"},
        {deepseek, "layers.2.moe.expert_bias[2]",
         "model.layers.2.mlp.gate.e_score_correction_biasF32 [2] = 0-1"},
        {deepseek, "mtp_layers.1.hnorm.weight[2]",
         "model.layers.4.hnorm.weightF32 [2] = 0-1"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++)
        check_shipped("torchtitan-to-hf", t[i].config, t[i].from, t[i].to);
}

/* Which norm is which tells model_type, or OLMo-core's own config.json. */
static void test_olmo_norms(void **state UNUSED)
{
    static const char attention[] = "blocks.1.attention_norm.weight[2]";
    static const char before[] = "model.layers.1.input_layernorm.weightF32 [2] = 0-1";
    static const char after[] =
        "model.layers.1.post_attention_layernorm.weightF32 [2] = 0-1";
    static const struct {
        const char *config, *from, *to;
    } t[] = {
        {"{'model_type': 'llama'}", attention, before},
        {"{'model_type': 'olmo2'}", attention, after},
        {"{'model': {'block': {'name': 'default'}}}", attention, before},
        {"{'model': {'block': {'name': 'reordered_norm'}}}", attention, after},
        {NULL, attention, after},
        {"{'model': {'block': {'name': 'default'}}}",
         "blocks.1.feed_forward_norm.weight[2]", after},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++)
        check_shipped("olmo-to-hf", t[i].config, t[i].from, t[i].to);
}

/* ---- for which models ---- */

#define RULE_A "'rules': [{'from': 'a', 'to': 'b'}]}"
#define MODELS(list) "{'unshard_map': 1, 'models': {'config.t': " list "}, " RULE_A
#define REFUSE(list) "{'unshard_map': 1, 'refuse': [" list "], " RULE_A
#define SHAPES(list) "{'unshard_map': 1, 'shapes': [" list "], " RULE_A

static void test_models(void **state UNUSED)
{
    static const struct run_case t[] = {
        {"one of them", MODELS("['x', 'y']"), "{'t': 'y'}", "a[1]", "bF32 [1] = 0",
         NULL},
        {"another one", MODELS("['x', 'y']"), "{'t': 'z'}", "a[1]", NULL,
         "map m: there are no rules for models of type z (supported are x, y)"},
        {"config.json does not tell", MODELS("['x']"), "{'t': 1}", "a[1]", NULL,
         "config.json has no t, which says what model it is (supported are x)"},
        {"no config.json", MODELS("'x'"), NULL, "a[1]", NULL,
         "there is none (give one with -o hf=DIR)"},
        {"none is fine", MODELS("['x', null]"), NULL, "a[1]", "bF32 [1] = 0", NULL},
        {"another one where none is fine", MODELS("['x', null]"), "{'t': 'z'}", "a[1]",
         NULL, "no rules for models of type z"},
        {"a number that is not 0", REFUSE("{'when': 'config.n - 3', 'why': 'W'}"),
         "{'n': 2}", "a[1]", NULL, "map m: W"},
        {"a number that is 0", REFUSE("{'when': 'config.n - 3', 'why': 'W'}"),
         "{'n': 3}", "a[1]", "bF32 [1] = 0", NULL},
        {"no number", REFUSE("{'when': 'config.n - 3', 'why': 'W'}"), "{}", "a[1]",
         "bF32 [1] = 0", NULL},
        {"a text", REFUSE("{'models': {'config.t': 'x'}, 'why': 'W'}"), "{'t': 'x'}",
         "a[1]", NULL, "W"},
        {"another text", REFUSE("{'models': {'config.t': 'x'}, 'when': 1, 'why': 'W'}"),
         "{'t': 'y'}", "a[1]", "bF32 [1] = 0", NULL},
        {"what the checkpoint tells", REFUSE("{'when': 'source.m.n', 'why': 'W'}"),
         NULL, "a[1]", NULL, "map m: W"},
        {"what it does not tell", REFUSE("{'when': 'source.m.x', 'why': 'W'}"), NULL,
         "a[1]", "bF32 [1] = 0", NULL},
        {"a text of it", REFUSE("{'models': {'source.m.t': ['u']}, 'why': 'W'}"), NULL,
         "a[1]", NULL, "W"},
        {"the shape", SHAPES("{'of': 'b', 'is': ['config.n', 2]}"), "{'n': 3}",
         "a[3,2]", "bF32 [3, 2] = 0-5", NULL},
        {"another shape", SHAPES("{'of': '{x}', 'is': ['config.n']}"), "{'n': 3}",
         "a[2]", NULL,
         "rule 1: tensor a: b would have the shape [2], by config.json it is [3]"},
        {"fewer axes", SHAPES("{'of': 'b', 'is': ['config.n']}"), "{'n': 3}", "a[3,2]",
         NULL, "b would have the shape [3, 2], by config.json it is [3]"},
        {"more axes", SHAPES("{'of': 'b', 'is': ['config.n', 'config.n']}"), "{'n': 3}",
         "a[3]", NULL, "would have the shape [3], by config.json it is [3, 3]"},
        {"a size that is not told", SHAPES("{'of': 'b', 'is': ['config.x', 2]}"), "{}",
         "a[7,2]", "bF32 [7, 2] = 0-13", NULL},
        {"the shape of another", SHAPES("{'of': 'c', 'is': [9]}"), NULL, "a[2]",
         "bF32 [2] = 0-1", NULL},
    };
    static const struct run_case shipped[] = {
        {"a family without rules", NULL, "{'model_type': 'nemotron'}",
         "decoder.layers.mlp.linear_fc1.weight[2,4,4]", NULL,
         "there are no rules for models of type nemotron (supported are llama, "},
        {"an MLP without a gate", NULL,
         "{'model_type': 'llama', 'num_hidden_layers': 2, 'hidden_size': 4,"
         " 'intermediate_size': 4}",
         "decoder.layers.mlp.linear_fc1.weight[2,4,4]", NULL,
         "gate_proj.weight would have the shape [2, 4], by config.json it is [4, 4]"},
        {"norms of queries and keys", NULL, "{'model_type': 'llama'}",
         "decoder.layers.0.self_attention.q_layernorm.weight[4]", NULL,
         "models of this model_type have no norms of queries and keys"},
        {"biases", NULL, "{'model_type': 'qwen3', 'attention_bias': false}",
         "decoder.layers.0.self_attention.linear_qkv.bias[4]", NULL,
         "by config.json there are no biases in attention"},
        {"what no rule names", NULL, "{'model_type': 'llama'}",
         "decoder.final_layernorm.weight[4] decoder.layers.0.self_attention.sink[2]",
         NULL, "no rule names 1 tensor of the model"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++)
        check_case(&t[i]);
    for (size_t i = 0; i < ARRAY_SIZE(shipped); i++) {
        CLEANUP_FREE char *map = strdup(map_shipped("megatron-to-hf"));
        struct run_case c = shipped[i];

        for (char *p = map; (p = strchr(p, '\''));)
            *p = ' ';
        c.map = map;
        check_case(&c);
    }
}

/* ---- codes of quantised weights are not cast ---- */

#define CAST "{'unshard_map': 1, 'cast': 'BF16', 'rules': []}"
#define QUANTISED "dtype=: the model is quantised ("

static void test_quantised(void **state UNUSED)
{
    static const struct run_case t[] = {
        {"GPTQ, AWQ", CAST, NULL, "a.qweight[2,2]:I32 a.scales[2]", NULL,
         QUANTISED "a.qweight)"},
        {"block-scaled FP8", CAST, NULL, "a.weight[2]:F8_E4M3 a.weight_scale_inv[1]",
         NULL, QUANTISED "a.weight_scale_inv)"},
        {"FP8, and scales of another name", CAST, NULL,
         "a.weight[2]:F8_E4M3 a.scale[1]", NULL, QUANTISED},
        {"the scales first", CAST, NULL, "a.w_scale[1] a.weight[2]:F8_E4M3", NULL,
         QUANTISED},
        {"below the weight", CAST, NULL, "a.weight.d[2,2]:I8 a.weight.scales[1]", NULL,
         QUANTISED},
        {"MXFP4", CAST, NULL, "a.down_proj_blocks[2]:U8 a.down_proj_scales[2]:U8", NULL,
         QUANTISED},
        {"bitsandbytes", CAST, NULL, "a.weight.quant_state.bitsandbytes__nf4[4]:U8",
         NULL, QUANTISED},
        {"LLM.int8", CAST, NULL, "a.weight[2,2]:I8", NULL, QUANTISED},
        {"a type of codes", CAST, NULL, "a.x[4]:F4", NULL, QUANTISED},
        {"by a rule", RULES("{'from': 'a.w', 'to': 'b', 'cast': 'F32'}"), NULL,
         "a.w[2]:F8_E4M3 a.w_scale[1]", NULL, QUANTISED},
        {"FP8 without scales", CAST, NULL, "a.weight[2]:F8_E4M3 b.scale[1]:BF16",
         "a.weightBF16 <F8_E4M3 [2] = 0-1\nb.scaleBF16 [1] = 1", NULL},
        {"counters and tables", CAST, NULL,
         "a.num_batches_tracked[]:I64 a.weight[1]:BF16 a.logit_scale[]:BF16",
         "a.logit_scaleBF16 [] = 5\na.num_batches_trackedI64 [] = 0\n"
         "a.weightBF16 [1] = 4",
         NULL},
        {"not the model's", CAST, NULL, "optimizer.a.qweight[2]:I32 a[1]:BF16",
         "aBF16 [1] = 4\noptimizer.a.qweightI32 [2] = 0-1", NULL},
        {"nothing is cast", RULES("{'from': 'a.qweight', 'to': 'b'}"), NULL,
         "a.qweight[2]:I32", "bI32 [2] = 0-1", NULL},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++)
        check_case(&t[i]);
}

/* ---- variables ---- */

#define CUT_TO_N "'rules': [{'from': 'a', 'to': 'b', 'ops': [{'cut': {'to': 'n'}}]}]}"

static void test_variables(void **state UNUSED)
{
    static const struct run_case t[] = {
        {"a number", "{'unshard_map': 1, 'variables': {'n': 2}, " CUT_TO_N, NULL,
         "a[4]", "bF32 [2] = 0-1", NULL},
        {"of another",
         "{'unshard_map': 1, 'variables': {'m': 1, 'n': 'm + m'}, " CUT_TO_N, NULL,
         "a[4]", "bF32 [2] = 0-1", NULL},
        {"the first that is there",
         "{'unshard_map': 1, 'variables': {'n': ['config.x', 'config.y', 4]}, " CUT_TO_N,
         "{'x': null, 'y': 3}", "a[4]", "bF32 [3] = 0-2", NULL},
        {"the last resort",
         "{'unshard_map': 1, 'variables': {'n': ['config.x', 1]}, " CUT_TO_N, NULL,
         "a[4]", "bF32 [1] = 0", NULL},
        {"a choice that is wrong stops",
         "{'unshard_map': 1, 'variables': {'n': ['3 / 2', 1]}, " CUT_TO_N, NULL, "a[4]",
         NULL, "n: \"3 / 2\" leaves a rest: 3 / 2"},
        {"none is there",
         "{'unshard_map': 1, 'variables': {'n': ['config.x', 'config.y']}, " CUT_TO_N,
         "{}", "a[4]", NULL, "n: config.json has no y"},
        {"of itself", "{'unshard_map': 1, 'variables': {'n': 'n'}, " CUT_TO_N, NULL,
         "a[4]", NULL, "variable n is made of itself"},
        {"a circle",
         "{'unshard_map': 1, 'variables': {'m': ['n + 1', 1], 'n': 'm'}, " CUT_TO_N,
         NULL, "a[4]", NULL, "is made of itself"},
        {"of too many",
         "{'unshard_map': 1, 'variables': {"
         "'x': 1, 'w': 'x+x+x+x+x+x+x+x', 'v': 'w+w+w+w+w+w+w+w',"
         " 'u': 'v+v+v+v+v+v+v+v', 't': 'u+u+u+u+u+u+u+u', 'n': 't+t+t+t+t+t+t+t'},"
         " " CUT_TO_N,
         NULL, "a[4]", NULL, "is made of more than 10000 others"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++)
        check_case(&t[i]);
}

/* ---- what a driver says besides ---- */

/* A wrapper of keys is not in the way of rules, and gone where one applies. */
static void test_wrapper(void **state UNUSED)
{
    static const char *const keys[] = {"model.a", "model.model.b", "model.c"};
    CLEANUP(map_freep) struct map *m = NULL;
    CLEANUP(map_filter_freep) struct sink_filter *f = NULL;
    CLEANUP(catalog_closep) struct catalog *c = index_open(NULL, "test");
    CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);
    struct fake_store store = fake_new();
    struct catalog_place place = {.path = "run", .store = &store.store};
    struct err e;
    struct sink *s;
    uint32_t file;
    int64_t id;

    fake_add(&store, "run/a.bin", FILE_BYTES);
    assert_ok(parse(RULES("{'from': 'a', 'to': 'x.a'},"
                          "{'from': 'model.{n}', 'to': 'y.{n}'}"),
                    &m, &e),
              &e);
    assert_ok(map_filter_new(m, NULL, 0, &f, &e), &e);
    place.filter = f;
    assert_ok(sink_begin(c, &place, &s, &e), &e);
    file = scan_file(s, "a.bin");
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        const struct shape shape = {1, {1}};
        struct sink_tensor t = f32(keys[i], &shape);

        t.wrapper = 6;
        assert_ok(sink_tensor_plain(s, &t, file, 4 * i, &e), &e);
    }
    assert_ok(sink_commit(s, NULL, &id, &e), &e);
    assert_int_equal(get_key(c, id, "x.a", a).wrapper, 0);
    get_key(c, id, "y.b", a);
    get_key(c, id, "y.c", a); /* "c" has no rule, the whole key has */
}

/* Modules that held the model when it was saved, which no driver tells from its own. */
static void test_holders(void **state UNUSED)
{
    static const struct {
        const char *key;
        enum role role;
    } tensors[] = {{"module.a", ROLE_MODEL},        {"model.module.b", ROLE_MODEL},
                   {"module.module.c", ROLE_MODEL}, {"module.d", ROLE_OTHER},
                   {"modules.e", ROLE_MODEL},       {"x.module.f", ROLE_MODEL}};
    CLEANUP(map_freep) struct map *m = NULL;
    CLEANUP(map_filter_freep) struct sink_filter *f = NULL;
    CLEANUP(catalog_closep) struct catalog *c = index_open(NULL, "test");
    CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);
    struct fake_store store = fake_new();
    struct catalog_place place = {.path = "run", .store = &store.store};
    struct err e;
    struct sink *s;
    uint32_t file;
    int64_t id;

    fake_add(&store, "run/a.bin", FILE_BYTES);
    assert_ok(parse(RULES("{'from': '{n}', 'to': 'y.{n}', 'role': 'any'}"), &m, &e),
              &e);
    assert_ok(map_filter_new(m, NULL, 0, &f, &e), &e);
    place.filter = f;
    assert_ok(sink_begin(c, &place, &s, &e), &e);
    file = scan_file(s, "a.bin");
    for (size_t i = 0; i < ARRAY_SIZE(tensors); i++) {
        const struct shape shape = {1, {1}};
        struct sink_tensor t = f32(tensors[i].key, &shape);

        t.role = tensors[i].role;
        assert_ok(sink_tensor_plain(s, &t, file, 4 * i, &e), &e);
    }
    assert_ok(sink_commit(s, NULL, &id, &e), &e);
    get_key(c, id, "y.a", a);
    get_key(c, id, "y.b", a);
    get_key(c, id, "y.c", a);
    get_key(c, id, "module.d", a);
    get_key(c, id, "modules.e", a);
    get_key(c, id, "x.module.f", a);
}

/* What a codec has to know goes with each chunk. */
static void test_codec_keys(void **state UNUSED)
{
    static const uint64_t zero[1], size[1] = {2};
    CLEANUP(map_freep) struct map *m = NULL;
    CLEANUP(map_filter_freep) struct sink_filter *f = NULL;
    CLEANUP(catalog_closep) struct catalog *c = index_open(NULL, "test");
    CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);
    struct fake_store store = fake_new();
    struct catalog_place place = {.path = "run", .store = &store.store};
    const struct shape shape = {1, {2}};
    struct sink_tensor t[] = {f32("a", &shape), f32("b", &shape)};
    struct tensor_info got;
    const struct chunk *chunk;
    struct sink *s;
    struct err e;
    int64_t id;
    size_t n;

    fake_add(&store, "run/a.bin", FILE_BYTES);
    assert_ok(parse(RULES("{'to': 'c', 'join': {'parts': [{'from': 'a'},"
                          " {'from': 'b'}]}}"),
                    &m, &e),
              &e);
    assert_ok(map_filter_new(m, NULL, 0, &f, &e), &e);
    place.filter = f;
    assert_ok(sink_begin(c, &place, &s, &e), &e);
    t[1].codec_key = "inner";
    for (size_t i = 0; i < 2; i++) {
        const struct chunk in = {.file = scan_file(s, "a.bin"),
                                 .encoding = CHUNK_SAFETENSORS,
                                 .offset = 100 * i,
                                 .length = 100,
                                 .start = zero,
                                 .size = size};

        assert_ok(sink_tensor_begin(s, &t[i], &e), &e);
        assert_ok(sink_chunk(s, &in, &e), &e);
        assert_ok(sink_tensor_end(s, &e), &e);
    }
    assert_ok(sink_commit(s, NULL, &id, &e), &e);
    got = get_key(c, id, "c", a);
    assert_null(got.fault);
    assert_ok(catalog_chunks(c, id, &got, a, &chunk, &n, &e), &e);
    assert_int_equal(n, 2);
    assert_int_equal(chunk[0].param_len, 1);
    assert_memory_equal(chunk[0].param, "a", 1);
    assert_int_equal(chunk[1].param_len, 5);
    assert_memory_equal(chunk[1].param, "inner", 5);
    assert_int_equal(chunk[1].whole_nd, 1);
    assert_int_equal(chunk[1].whole[0], 2);
}

static void test_config_is_checked(void **state UNUSED)
{
    CLEANUP(map_freep) struct map *m = NULL;
    struct sink_filter *f = NULL;
    struct err e;

    assert_ok(parse(RULES(""), &m, &e), &e);
    assert_int_equal(map_filter_new(m, "{", 1, &f, &e), -EBADMSG);
    assert_has(e.text, "config.json: ");
    assert_null(f);
}

static void test_when_is_checked(void **state UNUSED)
{
    static const char config[] = "{\"x\": 3}";
    CLEANUP(map_freep) struct map *m = NULL;
    struct sink_filter *f = NULL;
    struct err e;

    assert_ok(parse(RULES(WHEN("'config.x / 2'")), &m, &e), &e);
    assert_true(map_wants_config(m));
    assert_int_equal(map_filter_new(m, config, strlen(config), &f, &e), -ERANGE);
    assert_has(e.text, "rule 1: \"when\": \"config.x / 2\" leaves a rest");
    assert_null(f);
}

static void test_cast_only(void **state UNUSED)
{
    CLEANUP(map_freep) struct map *m = NULL;
    struct err e = {0};

    assert_ok(map_parse_cast(DTYPE_BF16, &m, &e), &e);
    assert_false(map_wants_config(m));
}

/* ---- out of memory ---- */

void *__real_reallocarray(void *old, size_t count, size_t size);
void *__wrap_reallocarray(void *old, size_t count, size_t size);

void *__wrap_reallocarray(void *old, size_t count, size_t size)
{
    return fail_alloc_now() ? NULL : __real_reallocarray(old, count, size);
}

static int small_run(struct catalog *c, struct fake_store *store, struct err *e)
{
    static const char map[] =
        "{'unshard_map': 1, 'variables': {'n': ['config.n', 2]}, 'rules': ["
        "{'from': 'a', 'ops': [{'deinterleave': {}}],"
        " 'split': {'groups': 'n', 'parts': [{'to': 'x'}, {'to': 'y'}]}},"
        "{'from': 'h.{n}', 'to': 'h', 'stack': {'by': 'n'}}]}";
    CLEANUP(map_freep) struct map *m = NULL;
    CLEANUP(map_filter_freep) struct sink_filter *f = NULL;
    struct catalog_place place = {.path = "run", .store = &store->store};
    const struct shape shape = {1, {4}};
    static const char *const keys[] = {"a", "h.0", "h.1"};
    char json[sizeof map];
    struct sink *s = NULL;
    uint32_t file;
    int64_t id;
    int ret;

    for (size_t i = 0; i < sizeof map; i++)
        json[i] = map[i] == '\'' ? '"' : map[i];
    ret = map_parse("m", json, strlen(json), &m, e);
    if (ret == 0)
        ret = map_filter_new(m, "{\"n\": 2}", 8, &f, e);
    place.filter = f;
    if (ret == 0)
        ret = sink_begin(c, &place, &s, e);
    if (ret < 0)
        return ret;
    ret = sink_file(s, "a.bin", 5, &file, e);
    for (size_t i = 0; ret == 0 && i < ARRAY_SIZE(keys); i++) {
        const struct sink_tensor t = f32(keys[i], &shape);

        ret = sink_tensor_plain(s, &t, file, 16 * i, e);
    }
    if (ret == 0)
        return sink_commit(s, NULL, &id, e);
    sink_abort(s);
    return ret;
}

static void test_out_of_memory(void **state UNUSED)
{
    struct fake_store store = fake_new();
    struct catalog *c = index_open(NULL, "test");

    fake_add(&store, "run/a.bin", FILE_BYTES);
    fail_alloc_hook_cjson();
    for (long n = 1; fail_alloc_next(&n);) {
        struct err e = {0};

        fail_alloc_end(&n, small_run(c, &store, &e));
    }
    catalog_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parse_errors),
        cmocka_unit_test(test_hints),
        cmocka_unit_test(test_shipped),
        cmocka_unit_test(test_megatron_names),
        cmocka_unit_test(test_gemma_norms),
        cmocka_unit_test(test_torchtitan_names),
        cmocka_unit_test(test_olmo_norms),
        cmocka_unit_test(test_wants_config),
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_quantised),
        cmocka_unit_test(test_variables),
        cmocka_unit_test(test_wrapper),
        cmocka_unit_test(test_holders),
        cmocka_unit_test(test_codec_keys),
        cmocka_unit_test(test_config_is_checked),
        cmocka_unit_test(test_when_is_checked),
        cmocka_unit_test(test_cast_only),
        cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests_name("map", tests, NULL, NULL);
}
