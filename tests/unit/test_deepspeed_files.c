/* SPDX-License-Identifier: MIT */
/* tests/unit/test_deepspeed_files.c - DeepSpeed's file names, and which files belong together. */
#include "tests/unit/unit.h"

#include <errno.h>

#include "base/err.h"
#include "index/formats/deepspeed/deepspeed.h"
#include "index/formats/deepspeed/deepspeed_files.h"
#include "index/formats/format.h"
#include "remote/listing.h"

extern const struct format_driver format_deepspeed;

static const struct {
    const char *name;
    enum ds_kind kind;
    uint32_t mp, dp, layer, expert;
} names[] = {
    {"mp_rank_00_model_states.pt", DS_MODEL, 0, 0, 0, 0},
    {"mp_rank_07_model_states.pt", DS_MODEL, 7, 0, 0, 0},
    {"zero_pp_rank_0_mp_rank_00_model_states.pt", DS_MODEL, 0, 0, 0, 0},
    {"zero_pp_rank_12_mp_rank_03_model_states.pt", DS_MODEL, 3, 12, 0, 0},
    {"zero_pp_rank_10_mp_rank_00_optim_states.pt", DS_OPTIM, 0, 10, 0, 0},
    {"bf16_zero_pp_rank_9_mp_rank_01_optim_states.pt", DS_OPTIM, 1, 9, 0, 0},
    {"fp16_zero_pp_rank_2_mp_rank_00_optim_states.pt", DS_OPTIM, 0, 2, 0, 0},
    {"zero_pp_rank_1_mp_rank_00optim_states.pt", DS_OPTIM, 0, 1, 0, 0},
    {"expert_5_mp_rank_00_model_states.pt", DS_EXPERT, 0, 0, 0, 5},
    {"layer_3_expert_12_mp_rank_01_model_states.pt", DS_EXPERT, 1, 0, 3, 12},
    {"expp_rank_2_mp_rank_00_optim_states.pt", DS_EXPERT_OPTIM, 0, 2, 0, 0},
    {"layer_04-model_states.pt", DS_LAYER, 0, 0, 4, 0},
    {"layer_33-model_01-model_states.pt", DS_LAYER, 1, 0, 33, 0},
    {"mp_rank_01_model_states.pt-0.1", DS_MODEL, 1, 0, 0, 0},
    {"bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt-1.2", DS_OPTIM, 0, 3, 0, 0},
    {"layer_1_expert_2_mp_rank_00_model_states.pt-0.1", DS_EXPERT, 0, 0, 1, 2},
    {"layer_04-model_states.pt-0.1", DS_LAYER, 0, 0, 4, 0},
    {"mp_rank_00_model_states.pt-1.1", DS_NOT, 0, 0, 0, 0},
    {"mp_rank_00_model_states.pt-0.0", DS_NOT, 0, 0, 0, 0},
    {"mp_rank_00_model_states.pt-0", DS_NOT, 0, 0, 0, 0},
    {"mp_rank_00_model_states.pt-0.1.bak", DS_NOT, 0, 0, 0, 0},
    {"mp_rank_00_model_states.pt.bak", DS_NOT, 0, 0, 0, 0},
    {"mp_rank_model_states.pt", DS_NOT, 0, 0, 0, 0},
    {"mp_rank_123456789_model_states.pt", DS_NOT, 0, 0, 0, 0},
    {"bf16_zero_pp_rank_0_mp_rank_00_model_states.pt", DS_NOT, 0, 0, 0, 0},
    {"zero_pp_rank_-1_mp_rank_00_optim_states.pt", DS_NOT, 0, 0, 0, 0},
    {"layer_4_model_states.pt", DS_NOT, 0, 0, 0, 0},
    {"latest", DS_NOT, 0, 0, 0, 0},
    {"", DS_NOT, 0, 0, 0, 0},
};

static void test_names(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        struct ds_file f;
        bool known = ds_file_parse(names[i].name, &f);

        if (known != (names[i].kind != DS_NOT) || f.kind != names[i].kind)
            fail_msg("%s is of kind %d, not %d", names[i].name, (int)f.kind,
                     (int)names[i].kind);
        if (!known)
            continue;
        assert_int_equal(f.mp, names[i].mp);
        assert_int_equal(f.dp, names[i].dp);
        assert_int_equal(f.layer, names[i].layer);
        assert_int_equal(f.expert, names[i].expert);
    }
}

static struct listing *listing_of(const char *const *list, size_t n)
{
    static const char zip[] = "PK\x03\x04";
    const struct entry_stat st = {.kind = ENTRY_FILE, .id = {.size = 100}};
    struct listing *l;
    struct err e = {0};

    assert_ok(listing_new(NULL, "run/global_step5", &l, &e), &e);
    for (size_t i = 0; i < n; i++)
        assert_ok(listing_add(l, list[i], &st, zip, sizeof zip - 1, &e), &e);
    listing_sort(l);
    return l;
}

static void test_order_of_ranks(void **state)
{
    static const char *const list[] = {
        "zero_pp_rank_10_mp_rank_00_optim_states.pt",
        "zero_pp_rank_9_mp_rank_00_optim_states.pt",
        "zero_pp_rank_2_mp_rank_01_optim_states.pt",
        "mp_rank_00_model_states.pt",
        "layer_norm-thing_states.pt",
        "zero_to_fp32.py",
    };
    CLEANUP(listing_freep) struct listing *l = listing_of(list, ARRAY_SIZE(list));
    struct ds_files f;
    struct err e = {0};

    (void)state;
    assert_ok(ds_files_list(l, &f, &e), &e);
    assert_int_equal(f.count, 4);
    assert_int_equal(ds_files_of(&f, DS_MODEL), 1);
    assert_int_equal(ds_files_of(&f, DS_OPTIM), 3);
    assert_int_equal(ds_files_of(&f, DS_LAYER), 0);
    assert_int_equal(ds_files_at(&f, DS_OPTIM, 0)->dp, 9);
    assert_int_equal(ds_files_at(&f, DS_OPTIM, 1)->dp, 10);
    assert_int_equal(ds_files_at(&f, DS_OPTIM, 2)->mp, 1);
    assert_int_equal(f.unknown, 1);
    assert_string_equal(f.first_unknown, "layer_norm-thing_states.pt");
    ds_files_release(&f);
}

/* FastFileWriter: two writers, each of which wrote the model states. */
static void test_several_writers(void **state)
{
    static const char *const list[] = {
        "mp_rank_00_model_states.pt-0.2",
        "mp_rank_00_model_states.pt-1.2",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt-0.2",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt-1.2",
    };
    CLEANUP(listing_freep) struct listing *l = listing_of(list, ARRAY_SIZE(list));
    struct ds_files f;
    struct err e = {0};

    (void)state;
    assert_ok(ds_files_list(l, &f, &e), &e);
    assert_int_equal(ds_files_of(&f, DS_MODEL), 1);
    assert_string_equal(ds_files_at(&f, DS_MODEL, 0)->name, list[0]);
    assert_int_equal(ds_files_at(&f, DS_MODEL, 0)->writers, 2);
    assert_int_equal(ds_files_of(&f, DS_OPTIM), 2);
    assert_int_equal(f.copies, 1);
    assert_string_equal(f.copy[0], list[1]);
    ds_files_release(&f);
}

/* Of another save: with a plain name, or of another number of writers. */
static void test_writers_of_two_saves(void **state)
{
    static const char *const lists[][2] = {
        {"mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt-0.1"},
        {"mp_rank_00_model_states.pt-0.1", "mp_rank_00_model_states.pt-1.2"},
        {"mp_rank_00_model_states.pt-0.1", "mp_rank_00_model_states.pt-0.2"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(lists); i++) {
        CLEANUP(listing_freep) struct listing *l = listing_of(lists[i], 2);
        struct ds_files f;
        struct err e = {0};

        assert_int_equal(ds_files_list(l, &f, &e), -EBADMSG);
        assert_non_null(strstr(e.text, "are of the same rank"));
        ds_files_release(&f);
    }
}

static void test_same_rank_twice(void **state)
{
    static const char *const list[] = {
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    };
    CLEANUP(listing_freep) struct listing *l = listing_of(list, ARRAY_SIZE(list));
    struct ds_files f;
    struct err e = {0};

    (void)state;
    assert_int_equal(ds_files_list(l, &f, &e), -EBADMSG);
    assert_string_equal(e.text, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt and "
                                "zero_pp_rank_0_mp_rank_00_optim_states.pt are of the "
                                "same rank");
    ds_files_release(&f);
}

static int bid_for(const char *const *list, size_t n)
{
    CLEANUP(listing_freep) struct listing *l = listing_of(list, n);
    struct bid bid;

    format_deepspeed.bid(l, &bid);
    return bid.score;
}

static void test_bids(void **state)
{
    static const char *const zero[] = {"mp_rank_00_model_states.pt",
                                       "zero_pp_rank_0_mp_rank_00_optim_states.pt"};
    static const char *const pipeline[] = {"layer_00-model_states.pt",
                                           "mp_rank_00_model_states.pt"};
    static const char *const root[] = {"latest", "zero_to_fp32.py",
                                       "pytorch_model.bin"};

    (void)state;
    assert_int_equal(bid_for(zero, 2), 80);
    assert_int_equal(bid_for(zero + 1, 1), 60);
    assert_int_equal(bid_for(pipeline, 2), 70);
    assert_int_equal(bid_for(root, 3), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_order_of_ranks),
        cmocka_unit_test(test_several_writers),
        cmocka_unit_test(test_writers_of_two_saves),
        cmocka_unit_test(test_same_rank_twice),
        cmocka_unit_test(test_bids),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
