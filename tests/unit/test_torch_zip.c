/* SPDX-License-Identifier: MIT */
/* tests/unit/test_torch_zip.c - torch.save files: tensors in them, and blobs in shards. */
#include "pickle_json.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <sys/stat.h>
#include <zstd.h>

#include "base/json.h"
#include "index/formats/torch/zip.h"
#include "remote/decoded.h"

#include "fail_alloc.h"
#include "zip_build.h"

static struct source *open_file(const char *name)
{
    struct source *s = NULL;
    struct err e = {0};
    char path[512];

    snprintf(path, sizeof path, "%s/torch_zip/%s", TEST_DATA, name);
    if (source_from_fd(open(path, O_RDONLY | O_CLOEXEC), name, &s, &e) < 0)
        fail_msg("%s", e.text);
    return s;
}

/* The real files, and what torch itself reads from them. */

static void apply_flags(unsigned char *p, const struct torch_tensor *t)
{
    unsigned part = dtype_component(t->dtype), unit = dtype_unit(t->dtype);

    for (unsigned i = 0; i < unit; i += part) {
        for (unsigned k = 0; (t->flags & CHUNK_SWAP) && k < part / 2; k++) {
            unsigned char c = p[i + k];

            p[i + k] = p[i + part - 1 - k];
            p[i + part - 1 - k] = c;
        }
        /* Floats: the sign bit is the top one. */
        if ((t->flags & CHUNK_NEG) != 0)
            p[i + part - 1] ^= 0x80;
        if ((t->flags & CHUNK_CONJ) != 0 && i > 0)
            p[i + part - 1] ^= 0x80;
    }
}

/* All elements in row-major order, one by one. */
static void gather(struct source *s, const struct torch_tensor *t, struct buf *out)
{
    unsigned unit = dtype_unit(t->dtype);
    uint64_t at[SHAPE_MAX_DIMS] = {0}, n;
    struct err e = {0};

    assert_int_equal(0, shape_elements(&t->shape, &n, &e));
    for (uint64_t i = 0; i < n; i++) {
        unsigned char element[16];
        uint64_t off = t->storage_offset;

        for (uint32_t k = 0; k < t->shape.nd; k++)
            off += at[k] * (uint64_t)t->stride[k];
        assert_true((off + 1) * unit <= t->data_len);
        if (source_read(s, t->data + off * unit, unit, element, &e) < 0)
            fail_msg("%s", e.text);
        apply_flags(element, t);
        buf_add(out, element, unit);
        for (uint32_t k = t->shape.nd; k-- > 0;) {
            if (++at[k] < t->shape.dim[k])
                break;
            at[k] = 0;
        }
    }
}

static void sha256(const struct buf *b, char hex[65])
{
    unsigned char digest[32];

    assert_int_equal(1, EVP_Digest(b->data ? b->data : "", b->len, digest, NULL,
                                   EVP_sha256(), NULL));
    for (int i = 0; i < 32; i++)
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}

struct fixture {
    struct source *src;
    const struct json *tensors;
    size_t found;
    char key[256];
};

static const char *check_tensor(void *user, const char *path, size_t path_len,
                                const struct torch_tensor *t)
{
    struct fixture *f = user;
    const struct json *want;
    const char *text = NULL;
    struct buf bytes = {0}, shape = {0};
    char hex[65];
    size_t k = 0;

    snprintf(f->key, sizeof f->key, "%.*s", (int)path_len, path);
    want = json_get(f->tensors, f->key);
    if (!want) /* parts of quantised and sparse tensors are not listed there */
        return NULL;
    assert_true(json_string(json_get(want, "dtype"), &text));
    assert_string_equal(text, dtype_name(t->dtype));
    for (const struct json *d = json_first(json_get(want, "shape")); d;
         d = json_next(d)) {
        uint64_t dim = UINT64_MAX;

        assert_true(json_u64(d, &dim) && k < t->shape.nd);
        assert_int_equal(dim, t->shape.dim[k++]);
    }
    assert_int_equal(k, t->shape.nd);
    gather(f->src, t, &bytes);
    sha256(&bytes, hex);
    assert_true(json_string(json_get(want, "sha256"), &text));
    if (strcmp(hex, text) != 0)
        fail_msg("%s: other bytes", f->key);
    f->found++;
    buf_release(&bytes);
    buf_release(&shape);
    return f->key;
}

static void check_fixture(const char *name, size_t listed)
{
    char file[64], expected[64];
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP(source_putp) struct source *s = NULL, *text = NULL;
    CLEANUP(torch_zip_freep) struct torch_zip *t = NULL;
    CLEANUP_FREE char *json = NULL;
    struct fixture f = {0};
    struct buf out = {0};
    struct err e = {0};
    struct pv root;

    snprintf(file, sizeof file, "%s.pt", name);
    snprintf(expected, sizeof expected, "%s.expected.json", name);
    s = open_file(file);
    text = open_file(expected);
    json = malloc(text->size);
    assert_int_equal(0, source_read(text, 0, text->size, json, &e));
    assert_int_equal(0, json_parse(json, text->size, NULL, &doc, &e));
    f.src = s;
    f.tensors = json_get(doc, "tensors");
    if (torch_zip_open(s, 0, s->size, &t, &e) < 0)
        fail_msg("%s: %s", name, e.text);
    root = torch_zip_root(t);
    assert_int_equal(0, object_to_json(t, &root, 0, check_tensor, &f, &out, &e));
    if (f.found != listed)
        fail_msg("%s: %zu tensors, not %zu", name, f.found, listed);
    buf_release(&out);
}

static void test_real_files(void **state)
{
    static const struct {
        const char *name;
        size_t tensors;
    } files[] = {
        {"align4096", 15},       {"all", 22},         {"bare_tensor", 1},
        {"big_endian", 6},       {"module_state", 9}, {"proto4", 22},
        {"quantized_sparse", 1}, {"repacked", 15},    {"torch231", 4},
        {"torchscript", 2},      {"views", 15},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(files); i++)
        check_fixture(files[i].name, files[i].tensors);
}

/* Tensors made up. */

struct spec {
    const char *call;                             /* default: _rebuild_tensor_v2 */
    const char *class;                            /* default: "torch\nFloatStorage" */
    const char *key;                              /* default: "0" */
    const char *numel, *offset, *sizes, *strides; /* opcodes */
    const char *more;                             /* opcodes behind the hooks */
};

/* The storage is data/0: 24 bytes. */
static void add_tensor(struct buf *b, const struct spec *s)
{
    const char *key = s->key ? s->key : "0";

    buf_addf(b, "ctorch._utils\n%s\n", s->call ? s->call : "_rebuild_tensor_v2");
    buf_addf(b, "((U\x07storagec%s\n", s->class ? s->class : "torch\nFloatStorage");
    buf_addf(b,
             "U%c%sU\x03"
             "cpu%stQ",
             (int)strlen(key), key, s->numel ? s->numel : "I6\n");
    buf_addf(b, "%s%s%s", s->offset ? s->offset : "I0\n",
             s->sizes ? s->sizes : "(I6\nt", s->strides ? s->strides : "(I1\nt");
    if (!s->call || strcmp(s->call, "_rebuild_tensor") != 0)
        buf_adds(b, "I00\nccollections\nOrderedDict\n(tR");
    buf_addf(b, "%stR", s->more ? s->more : "");
}

static const unsigned char storage[24] = {0,  1,  2,  3,  4,  5,  6,  7,
                                          8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23};

/* An archive around a pickle. */
static void wrap(const char *pickle, size_t len, const char *byteorder, bool deflate,
                 struct zip_builder *z)
{
    zb_add(z, &(struct zip_member){.name = "archive/data.pkl",
                                   .data = pickle,
                                   .len = len,
                                   .descriptor = true});
    if (byteorder)
        zb_add(z, &(struct zip_member){.name = "archive/byteorder",
                                       .data = byteorder,
                                       .len = strlen(byteorder)});
    zb_add(z, &(struct zip_member){.name = "archive/data/0",
                                   .data = storage,
                                   .len = sizeof storage,
                                   .deflate = deflate,
                                   .descriptor = true,
                                   .pad = 17});
    zb_add(z, &(struct zip_member){.name = "archive/version", .data = "3\n", .len = 2});
    zb_finish(z, true, false, "");
}

static int read_spec(const struct spec *s, const char *byteorder, bool deflate,
                     struct torch_tensor *out, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(torch_zip_freep) struct torch_zip *t = NULL;
    struct zip_builder z = {0};
    struct buf b = {0};
    struct pv root;
    int rc;

    add_tensor(&b, s);
    buf_adds(&b, ".");
    wrap(b.data, b.len, byteorder, deflate, &z);
    rc = source_from_memory(z.out.data, z.out.len, false, "t.pt", &src, e);
    if (rc == 0)
        rc = torch_zip_open(src, 0, z.out.len, &t, e);
    if (rc == 0) {
        root = torch_zip_root(t);
        rc = torch_zip_tensor(t, &root, out, e);
    }
    if (rc == 1)
        assert_memory_equal(storage, z.out.data + out->data, sizeof storage);
    buf_release(&b);
    zb_release(&z);
    return rc;
}

#define UNTYPED "torch.storage\nUntypedStorage"
#define V3 .call = "_rebuild_tensor_v3", .class = UNTYPED, .numel = "I24\n"

static void test_tensors(void **state)
{
    static const struct {
        struct spec spec;
        enum dtype dtype;
        uint32_t nd;
        uint64_t dim[3];
        int64_t stride[3];
        uint64_t offset;
        uint8_t flags;
    } cases[] = {
        {{0}, DTYPE_F32, 1, {6}, {1}, 0, 0},
        {{.call = "_rebuild_tensor"}, DTYPE_F32, 1, {6}, {1}, 0, 0},
        {{.sizes = "(t", .strides = "(t", .offset = "I5\n"},
         DTYPE_F32,
         0,
         {0},
         {0},
         5,
         0},
        {{.sizes = "(I2\nI3\nt", .strides = "(I1\nI2\nt"},
         DTYPE_F32,
         2,
         {2, 3},
         {1, 2},
         0,
         0},
        {{.sizes = "(I2\nt", .strides = "(I4\nt", .offset = "I1\n"},
         DTYPE_F32,
         1,
         {2},
         {4},
         1,
         0},
        {{.sizes = "(I9\nt", .strides = "(I0\nt"}, DTYPE_F32, 1, {9}, {0}, 0, 0},
        /* An empty slice may point past its storage; strides of size 1 mean nothing. */
        {{.sizes = "(I0\nI2\nt", .strides = "(I9\nI1\nt", .offset = "I14\n"},
         DTYPE_F32,
         2,
         {0, 2},
         {0, 1},
         0,
         0},
        {{.sizes = "(I1\nI6\nt", .strides = "(L9223372036854775807L\nI1\nt"},
         DTYPE_F32,
         2,
         {1, 6},
         {0, 1},
         0,
         0},
        {{.sizes = "ctorch\nSize\n((I6\nttR"}, DTYPE_F32, 1, {6}, {1}, 0, 0},
        {{.class = "torch\nDoubleStorage", .numel = "I3\n", .sizes = "(I3\nt"},
         DTYPE_F64,
         1,
         {3},
         {1},
         0,
         0},
        {{.class = "torch\nBoolStorage", .numel = "I24\n", .sizes = "(I24\nt"},
         DTYPE_BOOL,
         1,
         {24},
         {1},
         0,
         0},
        {{.class = "torch\nComplexFloatStorage",
          .numel = "I3\n",
          .sizes = "(I3\nt",
          .more = "}(U\x04"
                  "conjI01\nu"},
         DTYPE_C64,
         1,
         {3},
         {1},
         0,
         CHUNK_CONJ},
        {{.more = "}(U\x03negI01\nu"}, DTYPE_F32, 1, {6}, {1}, 0, CHUNK_NEG},
        {{V3, .sizes = "(I24\nt", .more = "ctorch\nfloat8_e4m3fn\n"},
         DTYPE_F8_E4M3,
         1,
         {24},
         {1},
         0,
         0},
        {{V3, .sizes = "(I12\nt", .more = "ctorch\nuint16\nN"},
         DTYPE_U16,
         1,
         {12},
         {1},
         0,
         0},
        /* Two elements a byte: torch's last dimension counts bytes. */
        {{V3, .sizes = "(I4\nI6\nt", .strides = "(I6\nI1\nt",
          .more = "ctorch\nfloat4_e2m1fn_x2\n"},
         DTYPE_F4,
         2,
         {4, 12},
         {6, 1},
         0,
         0},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct torch_tensor t = {0};
        struct err e = {0};

        if (read_spec(&cases[i].spec, NULL, false, &t, &e) != 1)
            fail_msg("case %zu: %s", i, e.text);
        assert_int_equal(cases[i].dtype, t.dtype);
        assert_int_equal(cases[i].nd, t.shape.nd);
        assert_int_equal(cases[i].offset, t.storage_offset);
        assert_int_equal(cases[i].flags, t.flags);
        assert_int_equal(sizeof storage, t.data_len);
        for (uint32_t k = 0; k < t.shape.nd; k++) {
            if (t.shape.dim[k] != cases[i].dim[k] || t.stride[k] != cases[i].stride[k])
                fail_msg("case %zu, dimension %u: %" PRIu64 " step %" PRId64, i, k,
                         t.shape.dim[k], t.stride[k]);
        }
    }
}

static void test_damaged_tensors(void **state)
{
    static const struct {
        struct spec spec;
        int rc;
        const char *why;
    } cases[] = {
        {{.numel = "I7\n"}, -EBADMSG, "28 bytes, the archive 24"},
        {{.numel = "I5\n"}, -EBADMSG, "20 bytes, the archive 24"},
        {{.numel = "I-6\n"}, -EBADMSG, "impossible size"},
        {{.numel = "L4611686018427387910L\n"}, -EBADMSG, "impossible size"},
        {{.offset = "I1\n"}, -EBADMSG, "past its storage"},
        {{.offset = "I-1\n"}, -EBADMSG, "offset that is no number"},
        {{.offset = "F0.0\n"}, -EBADMSG, "offset that is no number"},
        {{.offset = "L18446744073709551615L\n"}, -EBADMSG, "offset that is no number"},
        {{.offset = "L9223372036854775807L\n"}, -EBADMSG, "past its storage"},
        {{.sizes = "(I7\nt"}, -EBADMSG, "past its storage"},
        {{.sizes = "(I-1\nt"}, -EBADMSG, "no number"},
        {{.sizes = "(F6.0\nt"}, -EBADMSG, "no number"},
        {{.sizes = "(I01\nt"}, -EBADMSG, "no number"},
        {{.sizes = "I6\n"}, -EBADMSG, "no tuple"},
        {{.strides = "(I-1\nt"}, -EBADMSG, "no number"},
        {{.strides = "(I2\nt"}, -EBADMSG, "past its storage"},
        {{.strides = "(I1\nI1\nt"}, -EBADMSG, "different rank"},
        {{.strides = "(L4611686018427387904L\nt"}, -EBADMSG, "past its storage"},
        {{.sizes = "(L4294967296L\nL4294967296L\nt", .strides = "(I0\nI0\nt"},
         -EBADMSG,
         "2^63"},
        {{.class = "torch\nQInt8Storage"}, -EBADMSG, "unknown storage class"},
        {{.class = "os\nFloatStorage"}, -EBADMSG, "unknown storage class"},
        {{.class = "torch\nBoldStorage"}, -EBADMSG, "unknown storage class"},
        {{.class = "torch\nLongStorage",
          .numel = "I3\n",
          .sizes = "(I3\nt",
          .more = "}(U\x03negI01\nu"},
         -ENOTSUP,
         "negated"},
        {{.class = UNTYPED, .numel = "I24\n"}, -EBADMSG, "unknown element type"},
        {{V3, .more = "ctorch\nfloat3\n"}, -EBADMSG, "unknown element type"},
        {{V3, .sizes = "(t", .strides = "(t", .more = "ctorch\nfloat4_e2m1fn_x2\n"},
         -EBADMSG,
         "without a last dimension"},
        {{.call = "_rebuild_tensor_v3"}, -EBADMSG, "number of arguments"},
        {{.more = "NN"}, -EBADMSG, "number of arguments"},
        {{.key = "1"}, -EBADMSG, "not in the archive"},
        {{.key = "../version"}, -EBADMSG, "not in the archive"},
        {{.more = "}(U\x04"
                  "conjI01\nu"},
         -EBADMSG,
         "not complex"},
        {{.more = "}(U\x04zeroI01\nu"}, -ENOTSUP, "unknown kind"},
        {{.more = "}(U\x03negI00\nu"}, -ENOTSUP, "unknown kind"}, /* torch negates it */
        {{.more = "K\x01"}, -EBADMSG, "metadata that is no dict"},
        {{.call = "_rebuild_qtensor"}, -ENOTSUP, "no strided elements"},
        {{.call = "_rebuild_something"}, 0, ""},
    };
    struct torch_tensor t;
    struct err e = {0};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        int rc;

        e = (struct err){0};
        rc = read_spec(&cases[i].spec, NULL, false, &t, &e);
        if (rc != cases[i].rc || !strstr(e.text, cases[i].why))
            fail_msg("case %zu: %d \"%s\", not \"%s\"", i, rc, e.text, cases[i].why);
    }
    assert_int_equal(-ENOTSUP, read_spec(&(struct spec){0}, NULL, true, &t, &e));
    assert_int_equal(-EBADMSG, read_spec(&(struct spec){0}, "middle", false, &t, &e));
    assert_int_equal(1, read_spec(&(struct spec){0}, "little", false, &t, &e));
    assert_int_equal(0, t.flags);
    assert_int_equal(1, read_spec(&(struct spec){0}, "big", false, &t, &e));
    assert_int_equal(CHUNK_SWAP, t.flags);
    assert_int_equal(
        1, read_spec(&(struct spec){.class = "torch\nByteStorage", .numel = "I24\n"},
                     "big", false, &t, &e));
    assert_int_equal(0, t.flags);
}

/* Loads what `before` and `after` put round a plain tensor. */
static int read_wrapped(const char *before, const char *after)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(torch_zip_freep) struct torch_zip *t = NULL;
    struct zip_builder z = {0};
    struct buf b = {0};
    struct torch_tensor x;
    struct err e = {0};
    struct pv root;
    int rc;

    buf_adds(&b, before);
    add_tensor(&b, &(struct spec){0});
    buf_adds(&b, after);
    wrap(b.data, b.len, NULL, false, &z);
    assert_int_equal(0,
                     source_from_memory(z.out.data, z.out.len, false, "m", &src, &e));
    if (torch_zip_open(src, 0, z.out.len, &t, &e) < 0)
        fail_msg("%s", e.text);
    root = torch_zip_root(t);
    rc = torch_zip_tensor(t, &root, &x, &e);
    buf_release(&b);
    zb_release(&z);
    return rc;
}

static void test_wrapped_tensors(void **state)
{
    (void)state;
    assert_int_equal(1, read_wrapped("", "."));
    assert_int_equal(1,
                     read_wrapped("ctorch._utils\n_rebuild_parameter\n(", "I01\n}tR."));
    assert_int_equal(1, read_wrapped("ctorch._utils\n_rebuild_parameter_with_state\n(",
                                     "I01\n}}tR."));
    assert_int_equal(1, read_wrapped("ctorch.nn.parameter\nParameter\n(", "tR."));
    /* (function, type, arguments, state): the inner call stands apart. */
    assert_int_equal(1, read_wrapped("ctorch._tensor\n_rebuild_from_type_v2\n("
                                     "ctorch._utils\n_rebuild_parameter\ncx\nT\n(",
                                     "I01\n}t}tR."));
    /* Its names before torch 1.11 and 1.9; the function's arguments stand apart. */
    assert_int_equal(1, read_wrapped("ctorch._tensor\n_rebuild_from_type\n("
                                     "ctorch._utils\n_rebuild_parameter\ncx\nT\n(",
                                     "I01\n}t}tR."));
    assert_int_equal(1, read_wrapped("ctorch.tensor\n_rebuild_from_type\n("
                                     "ctorch._utils\n_rebuild_parameter\ncx\nT\n(",
                                     "I01\n}t}tR."));
    assert_int_equal(0, read_wrapped("ctorch._utils\n_rebuild_other\n(", "tR."));
    assert_int_equal(0, read_wrapped("(", "t."));
    /* A state on top could change the tensor: torch writes none. */
    assert_int_equal(-ENOTSUP, read_wrapped("", "}b."));
    assert_int_equal(0,
                     read_wrapped("ctorch._utils\n_rebuild_parameter\n(t0", "0(tR."));
}

/* A weight that is held by a class of this name, which says this type and size of it. */
static int read_held(const char *class, const char *dtype, const char *size)
{
    CLEANUP(buf_release) struct buf before = {0};

    buf_addf(&before,
             "ctorch._tensor\n_rebuild_from_type_v2\n("
             "ctorch._utils\n_rebuild_wrapper_subclass\nc%s\n"
             "(cx\nT\nctorch\n%s\n%s(I1\ntt}(U\x07_tensor",
             class, dtype, size);
    return read_wrapped(before.data, "utR.");
}

/* A class that only holds a weight is that weight, where both say the same of it. */
static void test_held_tensors(void **state)
{
    static const char holder[] =
        "torchao.float8.fsdp_utils\nWeightWithDynamicFloat8CastTensor";

    (void)state;
    assert_int_equal(1, read_held(holder, "float32", "(I6\nt"));
    assert_int_equal(-ENOTSUP, read_held(holder, "bfloat16", "(I6\nt"));
    assert_int_equal(-ENOTSUP, read_held(holder, "float32", "(I5\nt"));
    assert_int_equal(-ENOTSUP, read_held(holder, "float32", "(I6\nI1\nt"));
    assert_int_equal(-ENOTSUP,
                     read_held("torchao.float8\nOtherTensor", "float32", "(I6\nt"));
    assert_int_equal(-ENOTSUP, read_held("mine\nWeightWithDynamicFloat8CastTensor",
                                         "float32", "(I6\nt"));
}

static void test_not_an_archive(void **state)
{
    struct zip_builder z = {0};
    CLEANUP(source_putp) struct source *s = NULL;
    struct torch_zip *t = NULL;
    struct err e = {0};

    (void)state;
    zb_add(&z, &(struct zip_member){.name = "a/data.pkl", .data = "N.", .len = 2});
    zb_add(&z, &(struct zip_member){.name = "b/data.pkl", .data = "N.", .len = 2});
    zb_finish(&z, false, false, "");
    assert_int_equal(0, source_from_memory(z.out.data, z.out.len, false, "m", &s, &e));
    assert_int_equal(-EBADMSG, torch_zip_open(s, 0, z.out.len, &t, &e));
    assert_non_null(strstr(e.text, "no data.pkl, or several"));
    assert_int_equal(-EBADMSG, torch_zip_open(s, 1, z.out.len, &t, &e));
    assert_non_null(strstr(e.text, "a zip at bytes 1+"));
    assert_null(t);
    zb_release(&z);
}

/* Blobs in shards. */

struct shard {
    struct buf file;
    struct source *src;
    uint64_t off, len;
};

/* A shard with `gap` bytes before and 5 behind a blob whose pickle is that of the spec. */
static void shard_make(struct shard *s, const struct spec *spec, size_t gap, size_t pad,
                       bool zstd)
{
    struct zip_builder z = {0};
    struct buf b = {0};
    struct err e = {0};

    *s = (struct shard){.off = gap};
    add_tensor(&b, spec);
    buf_adds(&b, ".");
    if (pad > 0) {
        char *filler = calloc(1, pad);

        zb_add(&z, &(struct zip_member){
                       .name = "archive/data.pkl", .data = b.data, .len = b.len});
        zb_add(&z, &(struct zip_member){.name = "archive/data/0",
                                        .data = storage,
                                        .len = sizeof storage});
        zb_add(&z, &(struct zip_member){
                       .name = "archive/filler", .data = filler, .len = pad});
        zb_finish(&z, true, false, "");
        free(filler);
    } else {
        wrap(b.data, b.len, NULL, false, &z);
    }
    for (size_t i = 0; i < gap; i++)
        buf_addc(&s->file, 'g');
    if (zstd) {
        size_t cap = ZSTD_compressBound(z.out.len);

        s->len = ZSTD_compress(buf_grow(&s->file, cap), cap, z.out.data, z.out.len, 3);
        s->file.len = gap + s->len;
    } else {
        buf_add(&s->file, z.out.data, z.out.len);
        s->len = z.out.len;
    }
    buf_adds(&s->file, "after");
    assert_int_equal(
        0, source_from_memory(s->file.data, s->file.len, false, "shard", &s->src, &e));
    zb_release(&z);
    buf_release(&b);
}

static void shard_release(struct shard *s)
{
    source_put(s->src);
    buf_release(&s->file);
}

/* Resolves the blob as a chunk of this size; the tensor has nd dimensions. */
static int resolve(const struct shard *s, struct source *src, enum dtype dtype,
                   const struct chunk *box, uint32_t nd, struct decoded_cache *cache,
                   struct chunk_place *out, struct err *e)
{
    static const uint64_t start[4] = {0};
    struct shape units = {.nd = nd};
    struct chunk_tensor t = {.key = "w", .key_len = 1, .dtype = dtype, .units = &units};
    const struct chunk_codec *codec = cache ? &codec_torch_zip_zstd : &codec_torch_zip;
    struct chunk c = *box;

    for (uint32_t k = 0; k < nd; k++)
        units.dim[k] = 100;
    c.start = start;
    c.offset = s->off;
    c.length = s->len;
    c.encoding = (uint8_t)codec->encoding;
    return codec->resolve(src, &c, &t, cache, out, e);
}

static const struct spec transposed = {
    .sizes = "(I2\nI2\nt", .strides = "(I1\nI2\nt", .offset = "I1\n"};

static void test_resolve(void **state)
{
    static const uint64_t size[] = {2, 2};
    const struct chunk box = {.size = size};
    struct chunk_place at = {0};
    struct err e = {0};
    struct shard s;

    (void)state;
    shard_make(&s, &transposed, 1000, 0, false);
    if (resolve(&s, s.src, DTYPE_F32, &box, 2, NULL, &at, &e) < 0)
        fail_msg("%s", e.text);
    assert_ptr_equal(s.src, at.src);
    assert_memory_equal(storage + 4, s.file.data + at.base, 20);
    assert_int_equal(4, at.step[0]);
    assert_int_equal(8, at.step[1]);
    assert_int_equal(0, at.flags);
    source_put(at.src);
    shard_release(&s);
}

static void test_resolve_mismatches(void **state)
{
    static const uint64_t right[] = {2, 2}, wrong[] = {2, 3};
    const struct chunk box = {.size = right}, other = {.size = wrong};
    struct chunk_place at;
    struct err e = {0};
    struct shard s;

    (void)state;
    shard_make(&s, &transposed, 10, 0, false);
    assert_int_equal(-EBADMSG, resolve(&s, s.src, DTYPE_F64, &box, 2, NULL, &at, &e));
    assert_non_null(strstr(e.text, "stored as F32 where the metadata says F64"));
    assert_int_equal(-EBADMSG, resolve(&s, s.src, DTYPE_F32, &other, 2, NULL, &at, &e));
    assert_non_null(strstr(e.text, "shape [2, 2] where the metadata says [2, 3]"));
    assert_non_null(strstr(e.text, "shard, bytes 10+"));
    assert_non_null(strstr(e.text, "tensor w"));
    assert_int_equal(-EBADMSG, resolve(&s, s.src, DTYPE_F32, &box, 1, NULL, &at, &e));
    s.len += 6;
    assert_int_equal(-EBADMSG, resolve(&s, s.src, DTYPE_F32, &box, 2, NULL, &at, &e));
    s.len -= 7;
    assert_int_equal(-EBADMSG, resolve(&s, s.src, DTYPE_F32, &box, 2, NULL, &at, &e));
    shard_release(&s);
}

/* A chunk that is a flat range of the item, as flattened optimizer states are. */
static void test_resolve_ranges(void **state)
{
    static const uint64_t two[] = {2}, four[] = {2, 2}, none[] = {0};
    static const int64_t back[] = {-1}, wide[] = {3, 1}, far[] = {INT64_MAX};
    static const struct {
        struct chunk box;
        uint32_t nd;
        int rc;
        uint64_t first;  /* byte of the storage */
        int64_t step[2]; /* bytes */
    } cases[] = {
        {{.size = two, .first = 4}, 1, 0, 16, {4}},
        {{.size = four, .first = 2}, 2, 0, 8, {8, 4}},
        {{.size = two, .first = 5}, 1, -EBADMSG, 0, {0}},
        {{.size = two, .first = UINT64_MAX}, 1, -EBADMSG, 0, {0}},
        {{.size = two, .first = 1, .step = back}, 1, 0, 4, {-4}},
        {{.size = two, .first = 0, .step = back}, 1, -EBADMSG, 0, {0}},
        {{.size = four, .first = 1, .step = wide}, 2, 0, 4, {12, 4}},
        {{.size = four, .first = 2, .step = wide}, 2, -EBADMSG, 0, {0}},
        {{.size = two, .first = 1, .step = far}, 1, -EBADMSG, 0, {0}},
        {{.size = none, .first = 77}, 1, 0, 0, {0}},
    };
    struct shard flat;

    (void)state;
    shard_make(&flat, &(struct spec){0}, 3, 0, false);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct chunk_place at = {0};
        struct err e = {0};
        int rc = resolve(&flat, flat.src, DTYPE_F32, &cases[i].box, cases[i].nd, NULL,
                         &at, &e);

        if (rc != cases[i].rc)
            fail_msg("case %zu: %d %s", i, rc, e.text);
        if (rc < 0)
            continue;
        assert_memory_equal(storage + cases[i].first, flat.file.data + at.base, 4);
        for (uint32_t k = 0; k < cases[i].nd; k++)
            assert_int_equal(cases[i].step[k], at.step[k]);
        source_put(at.src);
    }
    shard_release(&flat);
}

/*
 * Boxes cut out of an item that is stored transposed: element (i, j) of its 2 x 2 is
 * storage[1 + i + 2 j].
 */
static void test_resolve_cuts(void **state)
{
    static const uint64_t column[] = {2, 1}, row[] = {1, 2}, two[] = {2}, four[] = {4},
                          none[] = {0};
    static const int64_t own[] = {2, 1}, up[] = {-2, 1}, down[] = {2}, odd[] = {3};
    static const struct {
        struct chunk box;
        uint32_t nd;
        int rc;
        uint64_t first;  /* byte of the storage */
        int64_t step[2]; /* bytes; of dimensions of more than 1 */
    } cases[] = {
        {{.size = column, .first = 1, .step = own}, 2, 0, 12, {4, 0}},
        {{.size = column, .first = 2, .step = up}, 2, 0, 8, {-4, 0}},
        {{.size = row, .first = 2, .step = own}, 2, 0, 8, {0, 8}},
        {{.size = two, .first = 2}, 1, 0, 8, {8}},
        {{.size = two, .first = 1, .step = down}, 1, 0, 12, {4}},
        {{.size = two, .first = 1}, 1, -ENOTSUP, 0, {0}}, /* over the end of a row */
        {{.size = two, .first = 0, .step = odd}, 1, -ENOTSUP, 0, {0}},
        {{.size = four}, 1, -EBADMSG, 0, {0}},
        {{.size = four, .first = 1}, 1, -EBADMSG, 0, {0}},
        {{.size = none, .first = 77}, 1, 0, 0, {0}},
    };
    struct shard s;

    (void)state;
    shard_make(&s, &transposed, 3, 0, false);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct chunk_place at = {0};
        struct err e = {0};
        int rc =
            resolve(&s, s.src, DTYPE_F32, &cases[i].box, cases[i].nd, NULL, &at, &e);

        if (rc != cases[i].rc)
            fail_msg("case %zu: %d %s", i, rc, e.text);
        if (rc < 0)
            continue;
        if (cases[i].box.size[0])
            assert_memory_equal(storage + cases[i].first, s.file.data + at.base, 4);
        for (uint32_t k = 0; k < cases[i].nd; k++)
            if (cases[i].box.size[k] > 1)
                assert_int_equal(cases[i].step[k], at.step[k]);
        source_put(at.src);
    }
    shard_release(&s);
}

/* A small blob costs one read, a large one its two ends. */
static void test_few_reads(void **state)
{
    static const uint64_t size[] = {6};
    static const struct {
        size_t pad;
        uint64_t reads;
    } cases[] = {{0, 1}, {60000, 1}, {70000, 2}, {5000000, 2}};
    const struct chunk box = {.size = size};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct shard s;

        shard_make(&s, &(struct spec){0}, 100, cases[i].pad, false);
        for (uint64_t n = 1; n <= cases[i].reads + 1; n++) {
            const struct source_faults faults = {.fail_at = n};
            struct source *counted = NULL;
            struct chunk_place at;
            struct err e = {0};
            int rc;

            assert_int_equal(0, source_with_faults(s.src, &faults, &counted, &e));
            rc = resolve(&s, counted, DTYPE_F32, &box, 1, NULL, &at, &e);
            if (rc != (n <= cases[i].reads ? -EIO : 0))
                fail_msg("%zu bytes, read %" PRIu64 ": %d %s", cases[i].pad, n, rc,
                         e.text);
            if (rc == 0)
                source_put(at.src);
            source_put(counted);
        }
        shard_release(&s);
    }
}

static void test_resolve_zstd(void **state)
{
    static const uint64_t size[] = {2, 2};
    const struct chunk box = {.size = size};
    struct decoded_cache *cache = NULL;
    struct chunk_place at = {0};
    struct err e = {0};
    unsigned char bytes[20];
    struct shard s;

    (void)state;
    if (decoded_new("/tmp", 64 << 20, &cache, &e) < 0)
        fail_msg("%s", e.text);
    shard_make(&s, &transposed, 77, 300000, true);
    assert_true(s.len < 10000);
    if (resolve(&s, s.src, DTYPE_F32, &box, 2, cache, &at, &e) < 0)
        fail_msg("%s", e.text);
    assert_true(at.src != s.src);
    assert_int_equal(0, source_read(at.src, at.base, sizeof bytes, bytes, &e));
    assert_memory_equal(storage + 4, bytes, sizeof bytes);
    assert_int_equal(4, at.step[0]);
    assert_int_equal(8, at.step[1]);
    source_put(at.src);
    shard_release(&s);
    decoded_free(cache);
}

/* Frames that are cut or followed by something. */
static void test_zstd_damage(void **state)
{
    static const uint64_t size[] = {2, 2};
    static const struct {
        int64_t longer;
        const char *why;
    } cases[] = {{-1, "cut"}, {-20, "cut"}, {5, "bytes after the frame"}};
    const struct chunk box = {.size = size};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct decoded_cache *cache = NULL;
        struct chunk_place at;
        struct err e = {0};
        struct shard s;

        assert_int_equal(0, decoded_new("/tmp", 64 << 20, &cache, &e));
        shard_make(&s, &transposed, 7, 300000, true);
        s.len += (uint64_t)cases[i].longer;
        if (resolve(&s, s.src, DTYPE_F32, &box, 2, cache, &at, &e) != -EBADMSG ||
            !strstr(e.text, cases[i].why))
            fail_msg("case %zu: %d %s", i, e.code, e.text);
        shard_release(&s);
        decoded_free(cache);
    }
}

/* A frame's header may ask for 128 MiB of what came before, and for no more. */
static void test_zstd_window(void **state)
{
    static const uint64_t size[] = {2, 2};
    const struct chunk box = {.size = size};

    (void)state;
    for (unsigned log = 27; log <= 28; log++) {
        const unsigned char head[] = {0x28, 0xb5, 0x2f,
                                      0xfd, 0,    (log - 10) << 3 & 0xff};
        struct decoded_cache *cache = NULL;
        struct chunk_place at;
        struct err e = {0};
        struct shard s;

        assert_int_equal(0, decoded_new("/tmp", 64 << 20, &cache, &e));
        shard_make(&s, &transposed, 7, 300000, true);
        memcpy(s.file.data + s.off, head, sizeof head);
        assert_int_equal(-EBADMSG,
                         resolve(&s, s.src, DTYPE_F32, &box, 2, cache, &at, &e));
        if ((strstr(e.text, "too much memory") != NULL) != (log == 28))
            fail_msg("2^%u: %s", log, e.text);
        shard_release(&s);
        decoded_free(cache);
    }
}

static void test_out_of_memory(void **state)
{
    static const uint64_t size[] = {2, 2};
    const struct chunk box = {.size = size};
    struct shard s;

    (void)state;
    shard_make(&s, &transposed, 100, 0, false);
    for (long n = 1; fail_alloc_next(&n);) {
        struct chunk_place at = {0};
        struct err e = {0};
        int rc = resolve(&s, s.src, DTYPE_F32, &box, 2, NULL, &at, &e);

        fail_alloc_end(&n, rc);
        source_put(at.src);
    }
    shard_release(&s);
}

/* The archive in memory, which is opened. */
static int open_bytes(const unsigned char *data, size_t len, struct err *e)
{
    CLEANUP(source_putp) struct source *s = NULL;
    CLEANUP(torch_zip_freep) struct torch_zip *t = NULL;
    int rc = source_from_memory(data, len, false, "t.pt", &s, e);

    return rc == 0 ? torch_zip_open(s, 0, len, &t, e) : rc;
}

/* Where the bytes of data.pkl start, and how many they are. */
static size_t pickle_of(struct source *s, uint64_t *at)
{
    CLEANUP(zip_freep) struct zip *zip = NULL;
    const struct zip_entry *entry;
    struct err e = {0};

    assert_int_equal(0, zip_open(s, 0, s->size, &zip, &e));
    entry = zip_find_suffix(zip, "/data.pkl");
    assert_int_equal(0, zip_data_offset(zip, entry, at, &e));
    return (size_t)entry->size;
}

/* As torch leaves them without save.compute_crc32. */
static void drop_checksums(struct source *s, unsigned char *data)
{
    CLEANUP(zip_freep) struct zip *zip = NULL;
    struct err e = {0};

    assert_int_equal(0, zip_open(s, 0, s->size, &zip, &e));
    for (size_t i = 0; i < zip_count(zip); i++)
        memset(data + zip_at(zip, i)->record + 16, 0, 4);
}

/* A bit of data.pkl is another shape, offset or name: its CRC-32 tells of each. */
static void test_changed_pickle(void **state)
{
    CLEANUP(source_putp) struct source *s = open_file("views.pt");
    CLEANUP_FREE unsigned char *data = malloc(s->size);
    struct err e = {0};
    uint64_t at = 0;
    size_t len = pickle_of(s, &at), known = 0;

    (void)state;
    assert_int_equal(0, source_read(s, 0, s->size, data, &e));
    for (size_t i = 0; i < len; i++) {
        struct err why = {0};

        data[at + i] ^= (unsigned char)(1 << i % 8);
        assert_int_equal(-EBADMSG, open_bytes(data, s->size, &why));
        assert_non_null(strstr(why.text, "/data.pkl at byte "));
        assert_non_null(strstr(why.text, "CRC-32"));
        data[at + i] ^= (unsigned char)(1 << i % 8);
    }
    assert_int_equal(0, open_bytes(data, s->size, &e));
    drop_checksums(s, data);
    assert_int_equal(0, open_bytes(data, s->size, &e));
    for (size_t i = 0; i < len; i++) {
        struct err why = {0};

        data[at + i] ^= 1;
        known += open_bytes(data, s->size, &why) == 0;
        data[at + i] ^= 1;
    }
    assert_true(known > 0); /* without checksums most of them make sense */
}

/* Where the data of an entry starts, or 0 when that is refused. */
static uint64_t start_of(const unsigned char *data, size_t len, size_t i)
{
    CLEANUP(source_putp) struct source *s = NULL;
    CLEANUP(zip_freep) struct zip *zip = NULL;
    struct err e = {0};
    uint64_t at;

    assert_int_equal(0, source_from_memory(data, len, false, "t.pt", &s, &e));
    assert_int_equal(0, zip_open(s, 0, len, &zip, &e));
    return zip_data_offset(zip, zip_at(zip, i), &at, &e) == 0 ? at : 0;
}

/* Each bit of the lengths in all local headers: the data is where it was, or nowhere. */
static void check_lengths(const char *name)
{
    CLEANUP(source_putp) struct source *s = open_file(name);
    CLEANUP(zip_freep) struct zip *zip = NULL;
    CLEANUP_FREE unsigned char *data = malloc(s->size);
    struct err e = {0};

    assert_int_equal(0, source_read(s, 0, s->size, data, &e));
    assert_int_equal(0, zip_open(s, 0, s->size, &zip, &e));
    for (size_t i = 0; i < zip_count(zip); i++) {
        uint64_t header = zip_at(zip, i)->header, at = start_of(data, s->size, i);

        assert_true(at > header || zip_at(zip, i)->method != 0);
        for (unsigned bit = 0; at && zip_at(zip, i)->size > 0 && bit < 32; bit++) {
            unsigned char *p = data + header + 26 + bit / 8;

            *p ^= (unsigned char)(1 << bit % 8);
            if (start_of(data, s->size, i))
                fail_msg("%s, entry %zu: bit %u of its lengths", name, i, bit);
            *p ^= (unsigned char)(1 << bit % 8);
        }
    }
}

static void test_changed_lengths(void **state)
{
    (void)state;
    check_lengths("views.pt");
    check_lengths("align4096.pt");
    check_lengths("repacked.pt"); /* no data descriptors, and no gaps */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_real_files),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_damaged_tensors),
        cmocka_unit_test(test_wrapped_tensors),
        cmocka_unit_test(test_held_tensors),
        cmocka_unit_test(test_changed_pickle),
        cmocka_unit_test(test_changed_lengths),
        cmocka_unit_test(test_not_an_archive),
        cmocka_unit_test(test_resolve),
        cmocka_unit_test(test_resolve_mismatches),
        cmocka_unit_test(test_resolve_ranges),
        cmocka_unit_test(test_resolve_cuts),
        cmocka_unit_test(test_few_reads),
        cmocka_unit_test(test_resolve_zstd),
        cmocka_unit_test(test_zstd_damage),
        cmocka_unit_test(test_zstd_window),
        cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
