/* SPDX-License-Identifier: MIT */
/* tests/formats/test_torch_dcp.c - DCP checkpoints of torch itself, and damaged ones. */
#include "tests/unit/unit.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "edited.h"

extern const struct format_driver format_torch_dcp;

/* What torch's own reading does not tell. */
static void test_details(void **state)
{
    struct opened o;
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/dcp_fsdp2_adamw_2r", (const char *)*state);
    open_checkpoint(path, &o);
    assert_string_equal(
        o.info.topology,
        "{\"ranks\": 2, \"files\": 2, \"metadata_version\": \"1.0.0\"}");
    assert_false(o.info.has_step);
    assert_int_equal(tensor(&o, "model.emb.weight")->wrapper, strlen("model."));
    assert_int_equal(tensor(&o, "model.emb.weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "model.emb.weight")->chunks, 2);
    assert_int_equal(tensor(&o, "optim.state.emb.weight.exp_avg")->role,
                     ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "optim.state.emb.weight.exp_avg")->wrapper, 0);
    /* One row on two ranks: the second one's chunk is empty. */
    assert_int_equal(tensor(&o, "model.tiny")->chunks, 1);
    close_checkpoint(&o);

    snprintf(path, sizeof path, "%s/dcp_torch231_2r", (const char *)*state);
    open_checkpoint(path, &o);
    assert_string_equal(o.info.topology, "{\"ranks\": 2, \"files\": 2}");
    close_checkpoint(&o);

    snprintf(path, sizeof path, "%s/dcp_rank_local_3r", (const char *)*state);
    open_checkpoint(path, &o);
    assert_int_equal(tensor(&o, "w")->chunks, 3);
    assert_int_equal(tensor(&o, "r")->chunks, 1);
    close_checkpoint(&o);
}

/* Names of the directory that are not shown as side files. */
static int note_hidden(void *user, const char *name, bool part)
{
    struct buf *b = user;

    assert_false(part);
    buf_addf(b, "%s ", name);
    return 0;
}

static void copy_file(const char *from, const char *to)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    FILE *f = fopen(to, "wb");

    read_file(from, &bytes);
    assert_non_null(f);
    assert_int_equal(fwrite(bytes.data, 1, bytes.len, f), bytes.len);
    assert_int_equal(fclose(f), 0);
}

/* A copy of a fixture in a directory of its own, to do damage to. */
struct copied {
    char top[32]; /* made by mkdtemp() */
    char dir[64];
};

static void path_in(const struct copied *c, const char *name, char *dst, size_t size)
{
    assert_in_range(snprintf(dst, size, "%s/%s", c->dir, name), 1, size - 1);
}

static void copy_fixture(const char *data, const char *fixture, const char *name,
                         struct copied *c)
{
    char from[PATH_MAX], to[PATH_MAX], fixture_dir[PATH_MAX / 2];
    struct dirent **names = NULL;
    struct err e = {0};
    int n;

    strcpy(c->top, "/tmp/test_torch_dcp.XXXXXX");
    assert_non_null(mkdtemp(c->top));
    snprintf(c->dir, sizeof c->dir, "%s/%s", c->top, name);
    assert_ok(make_dirs(c->dir, 0700, &e), &e);
    snprintf(fixture_dir, sizeof fixture_dir, "%s/%s", data, fixture);
    n = scandir(fixture_dir, &names, NULL, alphasort);
    assert_true(n > 2);
    for (int i = 0; i < n; i++) {
        if (strcmp(names[i]->d_name, ".") != 0 && strcmp(names[i]->d_name, "..") != 0) {
            snprintf(from, sizeof from, "%s/%s", fixture_dir, names[i]->d_name);
            path_in(c, names[i]->d_name, to, sizeof to);
            copy_file(from, to);
        }
        free(names[i]);
    }
    free(names);
}

static void remove_copied(const struct copied *c)
{
    struct dirent **names = NULL;
    char path[PATH_MAX];
    int n = scandir(c->dir, &names, NULL, alphasort);

    for (int i = 0; i < n; i++) {
        path_in(c, names[i]->d_name, path, sizeof path);
        unlink(path);
        free(names[i]);
    }
    free(names);
    rmdir(c->dir);
    rmdir(c->top);
}

/* Replaces `was` by `is`, both of `len` bytes, everywhere in a file. */
static void patch(const struct copied *c, const char *name, const void *was,
                  const void *is, size_t len)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    char path[PATH_MAX], *at;
    size_t done = 0;
    FILE *f;

    path_in(c, name, path, sizeof path);
    read_file(path, &bytes);
    for (at = bytes.data;
         (at = memmem(at, (size_t)(bytes.data + bytes.len - at), was, len)); done++)
        memcpy(at, is, len);
    assert_true(done > 0);
    f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes.data, 1, bytes.len, f), bytes.len);
    assert_int_equal(fclose(f), 0);
}

static void drop(const struct copied *c, const char *name)
{
    char path[PATH_MAX];

    path_in(c, name, path, sizeof path);
    assert_int_equal(unlink(path), 0);
}

/* A directory that is written into again by fewer ranks, with a step in its name. */
static void test_stale_files(void **state)
{
    CLEANUP(buf_release) struct buf hidden = {0}, warnings = {0};
    char from[PATH_MAX], to[PATH_MAX];
    struct copied c;
    struct opened o;
    struct err e = {0};

    copy_fixture(*state, "dcp_minimal_handmade", "step-0042", &c);
    path_in(&c, "__0_0.distcp", from, sizeof from);
    path_in(&c, "__7_0.distcp", to, sizeof to);
    copy_file(from, to);
    path_in(&c, "config.json", to, sizeof to);
    copy_file(from, to);

    open_checkpoint(c.dir, &o);
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 42);
    assert_ok(catalog_hidden(o.w.catalog, o.info.id, note_hidden, &hidden, &e), &e);
    assert_has(hidden.data, ".metadata ");
    assert_has(hidden.data, "__0_0.distcp ");
    assert_has(hidden.data, "__7_0.distcp ");
    assert_null(strstr(hidden.data, "config.json"));
    all_warnings(&o, &warnings);
    assert_string_equal(
        warnings.data, "stale-file: 1 .distcp files belong to no tensor or object, the "
                       "first is __7_0.distcp\n");
    close_checkpoint(&o);
    remove_copied(&c);
}

/* A file that is lost: what lies in it cannot be read, all else can. */
static void test_lost_file(void **state)
{
    CLEANUP(buf_release) struct buf objects = {0}, warnings = {0};
    struct copied c;
    struct opened o;

    copy_fixture(*state, "dcp_rank_local_3r", "lost", &c);
    drop(&c, "__2_0.distcp");
    open_checkpoint(c.dir, &o);
    assert_has(tensor(&o, "w")->fault, "__2_0.distcp");
    assert_null(tensor(&o, "r")->fault);
    all_objects(&o, &objects);
    assert_has(objects.data, "\nn=4\n");
    assert_has(objects.data, "__2.metadata:n={\"$type\":\"opaque\","
                             "\"class\":\"unreadable\",\"error\":\"__2_0.distcp");
    all_warnings(&o, &warnings);
    assert_has(warnings.data, "object: __2.metadata:n: ");
    close_checkpoint(&o);
    remove_copied(&c);
}

/* Plain tensors and objects of a rank-local save may differ from rank to rank. */
static void test_ranks_differ(void **state)
{
    CLEANUP(buf_release) struct buf objects = {0}, bytes = {0};
    struct copied c;
    struct opened o;
    struct err e = {0};

    copy_fixture(*state, "dcp_rank_local_3r", "differ", &c);
    /* r is of 3 elements on all ranks: here of 2, says rank 1 (its blob does not). */
    patch(&c, "__1.metadata", "K\x03\x85", "K\x02\x85", 3);
    patch(&c, "__2_0.distcp", "\x80\x02K\x04.", "\x80\x02K\x05.", 5);
    open_checkpoint(c.dir, &o);
    assert_int_equal(o.count, 3);
    assert_int_equal(tensor(&o, "r")->shape.dim[0], 3);
    assert_ok(read_tensor(&o.w, o.info.id, tensor(&o, "r"), &bytes, &e), &e);
    assert_int_equal(tensor(&o, "__1.metadata:r")->shape.dim[0], 2);
    assert_int_equal(tensor(&o, "__1.metadata:r")->role, ROLE_OTHER);
    assert_int_equal(
        read_tensor(&o.w, o.info.id, tensor(&o, "__1.metadata:r"), &bytes, &e),
        -EBADMSG);
    assert_has(e.text, "stored with shape [3]");
    all_objects(&o, &objects);
    assert_has(objects.data, "n=4\n");
    assert_has(objects.data, "__2.metadata:n=");
    assert_null(strstr(objects.data, "__1.metadata:n"));
    close_checkpoint(&o);
    remove_copied(&c);
}

/* A rank's file of which all objects are the first rank's too is one of the checkpoint's. */
static void test_ranks_repeat(void **state)
{
    CLEANUP(buf_release) struct buf objects = {0}, warnings = {0};
    static const char *const copies[][2] = {{".metadata", "__0.metadata"},
                                            {".metadata", "__1.metadata"},
                                            {"__0_0.distcp", "__1_0.distcp"}};
    char from[PATH_MAX], to[PATH_MAX];
    struct copied c;
    struct opened o;

    copy_fixture(*state, "dcp_objects_only", "repeat", &c);
    for (size_t i = 0; i < ARRAY_SIZE(copies); i++) {
        path_in(&c, copies[i][0], from, sizeof from);
        path_in(&c, copies[i][1], to, sizeof to);
        copy_file(from, to);
    }
    drop(&c, ".metadata");
    patch(&c, "__1.metadata", "__0_0.distcp", "__1_0.distcp", 12);
    open_checkpoint(c.dir, &o);
    assert_int_equal(o.info.files, 4);
    all_objects(&o, &objects);
    assert_string_equal(objects.data, "name=\"run\"\nstep=7\n");
    all_warnings(&o, &warnings);
    assert_string_equal(warnings.data, "");
    close_checkpoint(&o);
    remove_copied(&c);
}

/* One byte of the safetensors image's header: all tensors in it go, with the reason. */
static void test_damaged_image(void **state)
{
    CLEANUP(buf_release) struct buf objects = {0};
    struct copied c;
    struct opened o;

    copy_fixture(*state, "dcp_safetensors_fmt", "damaged", &c);
    patch(&c, "__0_0.distcp", "\"F32\"", "\"F33\"", 5);
    open_checkpoint(c.dir, &o);
    assert_int_equal(o.info.faults, 3);
    assert_has(tensor(&o, "b")->fault, "safetensors image");
    all_objects(&o, &objects);
    assert_string_equal(objects.data, "n=5\n");
    close_checkpoint(&o);
    remove_copied(&c);
}

/* Bids, on listings that are made up. */

struct made_up {
    const char *name;
    const void *head;
    size_t len;
};

static struct bid bid_for(const struct made_up *files, size_t n)
{
    const struct entry_stat st = {.kind = ENTRY_FILE, .id = {.size = 1000}};
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct bid bid = {0};
    struct err e = {0};

    assert_ok(listing_new(NULL, "run/step-1", &l, &e), &e);
    for (size_t i = 0; i < n; i++)
        assert_ok(listing_add(l, files[i].name, &st, files[i].head, files[i].len, &e),
                  &e);
    listing_sort(l);
    format_torch_dcp.bid(l, &bid);
    return bid;
}

static const char head[] = "\x80\x04\x95\xf2\x03\0\0\0\0\0\0\x8c\x25"
                           "torch.distributed.checkpoint.metadata\x94\x8c\x08Metadata"
                           "\x94\x93\x94)\x81\x94";
static const char foreign[] = "\x80\x02"
                              "cmegatron.core.dist\nMCoreMetadata\n)\x81";

static void test_bids(void **state)
{
    static const struct {
        struct made_up files[3];
        int score;
        const char *reason;
    } cases[] = {
        {{{".metadata", head, sizeof head}, {"__0_0.distcp", NULL, 0}}, 80, "DCP"},
        {{{".metadata", head, sizeof head}}, 80, ""},
        {{{".metadata", head, sizeof head}, {"metadata.json", "{}", 2}},
         60,
         "metadata.json"},
        {{{".metadata", head, sizeof head}, {"common.pt", "PK", 2}}, 60, "common.pt"},
        {{{"__1.metadata", head, sizeof head}, {"__1_0.distcp", NULL, 0}},
         75,
         "__1.metadata"},
        {{{"__0_0.distcp", NULL, 0}, {"__1_0.distcp", NULL, 0}}, 0, ""},
        {{{".metadata.tmp", head, sizeof head}, {"__0_0.distcp", NULL, 0}}, 0, ""},
        {{{"__01.metadata", head, sizeof head}}, 0, ""},
        {{{"__0.metadata", "x", 1}, {"__0_0.distcp", NULL, 0}}, 0, ""},
        {{{".metadata", foreign, sizeof foreign}, {"__0_0.distcp", NULL, 0}},
         20,
         "megatron.core.dist.MCoreMetadata"},
        {{{".metadata", "", 0}, {"__0_0.distcp", NULL, 0}}, 20, "no pickled object"},
        {{{".metadata", "", 0}}, 0, ""},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        size_t n = 0;
        struct bid bid;

        while (n < 3 && cases[i].files[n].name)
            n++;
        bid = bid_for(cases[i].files, n);
        if (bid.score != cases[i].score)
            fail_msg("case %zu: %d, not %d (%s)", i, bid.score, cases[i].score,
                     bid.reason);
        assert_has(bid.reason, cases[i].reason);
    }
}

/* What an image inside a .distcp file says of a tensor, beside what the metadata says. */
static void test_images(void **state)
{
    static const struct edited rows[] = {
#define IMAGE "dcp_safetensors_fmt", "__0_0.distcp"
        {IMAGE, EDIT("\"w\":", "\"v\":"), "w",
         "the safetensors image has no tensor of this name", NULL, NULL},
        {IMAGE, EDIT("F32", "I32"), "w", "the safetensors image has it as I32", NULL,
         NULL},
        {IMAGE, EDIT("[5,7]", "[7,5]"), "w",
         "the safetensors image has it in another shape", NULL, NULL},
        {IMAGE, EDIT("[5,7]", "[5,8]"), "w", "safetensors image at byte ", NULL, NULL},
#undef IMAGE
    };

    check_edited(*state, rows, ARRAY_SIZE(rows));
}

/* What .metadata says of a tensor. All edits keep the length, which a frame counts. */
static void test_metadata(void **state)
{
    static const struct edited rows[] = {
#define LAYOUTS "dcp_layouts", ".metadata"
        {LAYOUTS, EDIT("TensorStorageMetadata", "tensorStorageMetadata"), "transposed",
         "its metadata is of class torch.distributed.checkpoint.metadata."
         "tensorStorageMetadata, neither a tensor nor an object",
         NULL, NULL},
        {LAYOUTS, EDIT("TensorProperties", "tensorProperties"), "transposed",
         "it has no TensorProperties", NULL, NULL},
        {LAYOUTS, EDIT("torch.strided", "torch.mkldnn_"), "transposed",
         "not a strided tensor", NULL, NULL},
        {LAYOUTS, EDIT("float32", "float31"), "transposed",
         "element type torch.float31 is not supported", NULL, NULL},
        {LAYOUTS,
         EDIT("K\13K\7\206\224\205\224R\224\214\6chunks",
              "NN\206N0\224\205\224R\224\214\6chunks"),
         "transposed", "its size is no list of at most 64 integers", NULL, NULL},
        {LAYOUTS, EDIT("ChunkStorageMetadata", "chunkStorageMetadata"), "transposed",
         "its chunks are no list of ChunkStorageMetadata", NULL, NULL},
        {LAYOUTS, EDIT("offsets\224h\42K\0K\0\206", "offsets\224h\42NN\206N0"),
         "transposed", "a chunk whose offsets or sizes are no lists of integers", NULL,
         NULL},
#undef LAYOUTS
    };

    check_edited(*state, rows, ARRAY_SIZE(rows));
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "details", .test_func = test_details},
        {.name = "stale files", .test_func = test_stale_files},
        {.name = "lost file", .test_func = test_lost_file},
        {.name = "ranks differ", .test_func = test_ranks_differ},
        {.name = "ranks repeat", .test_func = test_ranks_repeat},
        {.name = "damaged image", .test_func = test_damaged_image},
        {.name = "bids", .test_func = test_bids},
        cmocka_unit_test(test_images),
        cmocka_unit_test(test_metadata),
    };

    return run_with_fixtures("torch_dcp", argc, argv, others, ARRAY_SIZE(others));
}
