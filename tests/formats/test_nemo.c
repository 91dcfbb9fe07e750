/* SPDX-License-Identifier: MIT */
/* tests/formats/test_nemo.c - .nemo archives: fixtures, other checkpoints packed, damage. */
#include "made.h"

#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "tests/unit/tar_build.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_nemo;

static const char config[] = "target: tiny\nnemo_version: '1.23.0'  # as NeMo has it\n";

/* ---- archives of what lies in tests/data ---- */

/* nftw has no argument of ours. */
static struct {
    struct buf *tar;
    size_t skip;
    const char *prefix;
} packing;

static int pack_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    char name[PATH_MAX];

    (void)st;
    (void)ftw;
    if (flag != FTW_F)
        return 0;
    snprintf(name, sizeof name, "%s%s", packing.prefix, path + packing.skip);
    if (strlen(name) >= 100) /* folders of zarr arrays have long names */
        tb_add(packing.tar, "././@LongLink", 'L', name, strlen(name) + 1);
    read_file(path, &bytes);
    tb_add(packing.tar, name, '0', bytes.data, bytes.len);
    return 0;
}

/* All files below `from` as members below `prefix`. */
static void pack(const char *from, const char *prefix, struct buf *tar)
{
    packing.tar = tar;
    packing.skip = strlen(from);
    packing.prefix = prefix;
    tb_text(tar, "./model_config.yaml", config);
    assert_int_equal(nftw(from, pack_one, 16, FTW_PHYS), 0);
    tb_end(tar);
}

static void beside(void **state, const char *rest, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/../%s", (const char *)*state, rest);
}

static void check_packed(const struct buf *archive, const char *expected, bool gz)
{
    CLEANUP(json_freep) struct json *want = read_json(expected);
    struct made m;
    struct opened o;

    made_begin(&m, "packed");
    made_file(&m, "x.nemo", archive->data, archive->len);
    made_open(&m, &o);
    if (o.info.error)
        fail_msg("%s", o.info.error);
    assert_string_equal(o.info.format, "nemo-dist");
    assert_string_equal(o.info.version, "1.23.0");
    assert_has(o.info.topology,
               gz ? "{\"archive\": \"tar.gz\"" : "{\"archive\": \"tar\"");
    assert_int_equal(o.info.faults, 0);
    assert_true(json_count(json_get(want, "tensors")) >= 6);
    for (const struct json *v = json_first(json_get(want, "tensors")); v;
         v = json_next(v))
        check_tensor(&o, tensor(&o, json_key(v)), v);
    close_checkpoint(&o);
    made_end(&m);
}

/* Distributed checkpoints of Megatron Core in an archive are read by their own drivers. */
static void test_megatron(void **state)
{
    static const char *const names[] = {"mcore012_zarr_tp2_dp2_flat",
                                        "mcore018_torch_dist_commonpt"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        CLEANUP(buf_release) struct buf tar = {0}, gz = {0};
        char path[PATH_MAX], rest[128];

        snprintf(rest, sizeof rest, "megatron/%s", names[i]);
        beside(state, rest, path);
        pack(path, "./model_weights", &tar);
        tb_gzip(tar.data, tar.len, 6, &gz);
        snprintf(rest, sizeof rest, "megatron/%s.expected.json", names[i]);
        beside(state, rest, path);
        check_packed(&tar, path, false);
        check_packed(&gz, path, true);
    }
}

/* ---- other layouts ---- */

/* The bytes of a member of a fixture's archive. */
static void take_member(void **state, const char *fixture, const char *member,
                        struct buf *out)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(store_closep) struct store *s = NULL;
    char path[PATH_MAX], name[128];
    struct err e = {0};
    void *dst;

    snprintf(path, sizeof path, "%s/%s", (const char *)*state, fixture);
    snprintf(name, sizeof name, "tiny.nemo/%s", member);
    assert_ok(store_open_local(path, NULL, &s, &e), &e);
    assert_ok(s->ops->open(s, name, &src, &e), &e);
    dst = buf_grow(out, (size_t)src->size);
    assert_non_null(dst);
    assert_ok(source_read(src, 0, (size_t)src->size, dst, &e), &e);
}

static void take_weights(void **state, struct buf *out)
{
    take_member(state, "nemo_plain", "model_weights.ckpt", out);
}

/* An archive that was unpacked; the same tensors. */
static void test_unpacked(void **state)
{
    CLEANUP(buf_release) struct buf weights = {0};
    struct made m;
    struct opened o;
    char path[PATH_MAX];

    take_weights(state, &weights);
    made_begin(&m, "unpacked");
    made_text(&m, "model_config.yaml", config);
    made_file(&m, "model_weights.ckpt", weights.data, weights.len);
    made_open(&m, &o);
    assert_string_equal(o.info.format, "nemo");
    assert_string_equal(o.info.topology, "{\"archive\": null}");
    snprintf(path, sizeof path, "%s/nemo_plain.expected.json", (const char *)*state);
    assert_int_equal(o.count, 3);
    check_readable(&o, path);
    close_checkpoint(&o);
    made_end(&m);
}

/* NeMo 2: context/ beside weights/. */
static void test_nemo2(void **state)
{
    struct made m;
    struct opened o;
    char path[PATH_MAX];

    made_begin(&m, "step=10");
    made_text(&m, "context/model.yaml", "x: 1\n");
    for (int i = 0; i < 2; i++) {
        static const char *const names[] = {"model_weights/.metadata",
                                            "model_weights/__0_0.distcp"};
        CLEANUP(buf_release) struct buf bytes = {0};

        take_member(state, "nemo_dist", names[i], &bytes);
        made_file(&m, names[i] + strlen("model_"), bytes.data, bytes.len);
    }
    made_open(&m, &o);
    assert_string_equal(o.info.format, "nemo-dist");
    snprintf(path, sizeof path, "%s/nemo_dist.expected.json", (const char *)*state);
    assert_int_equal(o.count, 2);
    check_readable(&o, path);
    close_checkpoint(&o);
    made_end(&m);
}

/* Ranks are not merged: FILE:PATH and role other; a single one is the model. */
static void test_ranks(void **state)
{
    CLEANUP(buf_release) struct buf weights = {0}, tar = {0};
    struct made m;
    struct opened o;

    take_weights(state, &weights);
    for (int n = 1; n <= 2; n++) {
        buf_clear(&tar);
        tb_add(&tar, "./mp_rank_00/model_weights.ckpt", '0', weights.data, weights.len);
        if (n == 2)
            tb_add(&tar, "./mp_rank_01/model_weights.ckpt", '0', weights.data,
                   weights.len);
        tb_end(&tar);
        made_begin(&m, "ranks");
        made_file(&m, "x.nemo", tar.data, tar.len);
        made_open(&m, &o);
        if (o.info.error)
            fail_msg("%s", o.info.error);
        assert_int_equal(o.count, n == 1 ? 3 : 6);
        assert_int_equal(
            tensor(&o, n == 1 ? "step" : "mp_rank_01/model_weights.ckpt:step")->role,
            n == 1 ? ROLE_MODEL : ROLE_OTHER);
        check_warnings(&o, n == 1
                               ? ""
                               : "not-merged: the files of 2 model parallel ranks are "
                                 "shown as they are: their tensors are pieces of the "
                                 "model's\n");
        close_checkpoint(&o);
        made_end(&m);
    }
}

static void test_oddities(void **state)
{
    CLEANUP(buf_release) struct buf weights = {0}, tar = {0};
    struct made m;
    struct opened o;

    take_weights(state, &weights);
    tb_text(&tar, "model_weights.ckpt", "not the last one");
    tb_add(&tar, "model_weights.ckpt", '0', weights.data, weights.len);
    made_begin(&m, "odd");
    made_file(&m, "x.nemo", tar.data, tar.len);
    made_open(&m, &o);
    assert_int_equal(o.count, 3);
    check_warnings(&o,
                   "truncated-archive: x.nemo does not end as tar ends archives: what "
                   "came behind may be lost\nduplicate-member: x.nemo has 1 "
                   "members more than once: the last ones are shown\n");
    close_checkpoint(&o);
    made_end(&m);

    buf_clear(&tar);
    tb_text(&tar, "model_weights/x", "y");
    tb_end(&tar);
    made_begin(&m, "unknown");
    made_file(&m, "x.nemo", tar.data, tar.len);
    made_open(&m, &o);
    assert_non_null(o.info.error);
    assert_has(o.info.error, "model_weights/ holds no checkpoint that is known");
    close_checkpoint(&o);
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        cmocka_unit_test(test_megatron), cmocka_unit_test(test_unpacked),
        cmocka_unit_test(test_nemo2),    cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_oddities),
    };

    return run_with_fixtures("nemo", argc, argv, others, ARRAY_SIZE(others));
}
