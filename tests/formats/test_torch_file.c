/* SPDX-License-Identifier: MIT */
/* tests/formats/test_torch_file.c - files of torch.save, models of several, damaged ones. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/endian.h"
#include "base/err.h"
#include "fixture.h"
#include "index/formats/format.h"
#include "index/formats/torch/torch_file.h"

extern const struct format_driver format_torch_file;

/* ---- folders made for one test ---- */

struct folder {
    char dir[40];
};

static void make_folder(struct folder *f)
{
    strcpy(f->dir, "/tmp/test_torch_file.XXXXXX");
    assert_non_null(mkdtemp(f->dir));
}

static int unlink_one(const char *path, const struct stat *st, int flag,
                      struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

static void remove_folder(const struct folder *f)
{
    nftw(f->dir, unlink_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void write_file(const struct folder *f, const char *name, const void *data,
                       size_t len)
{
    char path[PATH_MAX];
    FILE *out;

    snprintf(path, sizeof path, "%s/%s", f->dir, name);
    out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, len, out), len);
    assert_int_equal(fclose(out), 0);
}

static void write_text(const struct folder *f, const char *name, const char *text)
{
    write_file(f, name, text, strlen(text));
}

/* DATA/FIXTURE_FILE, to be changed and written elsewhere. */
static void read_fixture(void **state, const char *name, struct buf *out)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", (const char *)*state, name);
    read_file(path, out);
}

static void copy_file(void **state, const char *from, const struct folder *f,
                      const char *to)
{
    CLEANUP(buf_release) struct buf bytes = {0};

    read_fixture(state, from, &bytes);
    write_file(f, to, bytes.data, bytes.len);
}

static void read_exactly(struct opened *o, const char *key, const void *want,
                         size_t len)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    struct err e = {0};

    assert_ok(read_tensor(&o->w, o->info.id, tensor(o, key), &bytes, &e), &e);
    assert_int_equal(bytes.len, len);
    assert_memory_equal(bytes.data, want, len);
}

/* The tensor is listed, says why, and cannot be read. */
static void check_fault(struct opened *o, const char *key, const char *why)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    const struct tensor_info *t = tensor(o, key);
    struct err e = {0};

    if (!t->fault)
        fail_msg("%s: no fault", key);
    assert_has(t->fault, why);
    assert_true(read_tensor(&o->w, o->info.id, t, &bytes, &e) < 0);
}

static void check_warning(struct opened *o, const char *want)
{
    CLEANUP(buf_release) struct buf text = {0};

    all_warnings(o, &text);
    assert_has(text.data, want);
}

/* ---- what the frameworks' reading does not tell ---- */

static void open_fixture(void **state, const char *name, struct opened *o)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", (const char *)*state, name);
    open_checkpoint(path, o);
}

static void test_wrappers(void **state)
{
    struct opened o;

    open_fixture(state, "wrapper", &o);
    assert_int_equal(tensor(&o, "model_state_dict.w")->wrapper,
                     strlen("model_state_dict."));
    assert_int_equal(tensor(&o, "model_state_dict.w")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "optimizer_state_dict.state.0.exp_avg")->role,
                     ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "epoch")->wrapper, 0);
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 17);
    assert_string_equal(o.info.topology, "{\"files\": 1}");
    close_checkpoint(&o);

    open_fixture(state, "composer_like", &o);
    assert_int_equal(tensor(&o, "state.model.w")->wrapper, strlen("state.model."));
    assert_int_equal(tensor(&o, "state.optimizers.Adam.state.w.exp_avg")->role,
                     ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "state.optimizers.Adam.state.w.exp_avg")->wrapper, 0);
    close_checkpoint(&o);
}

static void test_roles(void **state)
{
    struct opened o;
    struct folder f;

    open_fixture(state, "dtensor", &o);
    assert_int_equal(tensor(&o, "w._local_tensor")->role, ROLE_OTHER);
    assert_int_equal(tensor(&o, "plain")->role, ROLE_MODEL);
    check_warning(&o, "shards: model.pt holds 2 shards");
    close_checkpoint(&o);

    open_fixture(state, "module", &o);
    assert_int_equal(tensor(&o, "l.weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "seq.0.running_mean")->role, ROLE_MODEL);
    close_checkpoint(&o);

    /* As state_dict() has it: not the list in which an LSTM has its weights once more. */
    open_fixture(state, "module_lstm", &o);
    assert_int_equal(tensor(&o, "weight_ih_l0")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "_flat_weights.0")->role, ROLE_OTHER);
    close_checkpoint(&o);

    /* What optimizer.pt holds is of an optimizer, whatever its keys are. */
    make_folder(&f);
    copy_file(state, "lists/model.pt", &f, "optimizer.pt");
    open_checkpoint(f.dir, &o);
    assert_int_equal(tensor(&o, "1.a")->role, ROLE_OPTIMIZER);
    close_checkpoint(&o);
    remove_folder(&f);
}

/* Aliases are two tensors on the same bytes; a tied pair in one file too. */
static void test_plain_pieces(void **state)
{
    struct opened o;

    open_fixture(state, "pt_zip_views", &o);
    assert_int_equal(tensor(&o, "alias")->chunks, 1);
    assert_int_equal(tensor(&o, "expanded")->chunks, 1);
    close_checkpoint(&o);
    open_fixture(state, "hf_bin_single_tied", &o);
    assert_int_equal(o.info.tensors, 30);
    assert_int_equal(tensor(&o, "lm_head.weight")->role, ROLE_MODEL);
    close_checkpoint(&o);
}

/* ---- several files in one folder ---- */

static void test_many_files(void **state)
{
    CLEANUP(place_release) struct place place = {0};
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct folder f;
    struct world w;
    struct err e = {0};

    make_folder(&f);
    copy_file(state, "pt_torch231/model.pt", &f, "a.ckpt");
    copy_file(state, "pt_legacy_all/model.pth", &f, "b.pth.tar");
    copy_file(state, "pt_torch231/model.pt", &f, "notes.txt");
    assert_ok(world_open(f.dir, &w, &e), &e);
    assert_ok(w.store->ops->list(w.store, "", &l, &e), &e);
    assert_ok(place_of(l, NULL, &place, &e), &e);
    assert_int_equal(place.kind, PLACE_FILES);
    assert_int_equal(place.nfiles, 2);
    assert_string_equal(place.files[0].name, "a.ckpt");
    assert_string_equal(place.files[1].name, "b.pth.tar");
    world_close(&w);
    remove_folder(&f);
}

/* A safetensors file of one tensor, w. */
static void write_small(const struct folder *f, const char *name)
{
    static const char header[] = "{\"w\":{\"dtype\":\"U8\",\"shape\":[2],"
                                 "\"data_offsets\":[0,2]}}";
    unsigned char file[8 + sizeof header - 1 + 2] = {sizeof header - 1};

    memcpy(file + 8, header, sizeof header - 1);
    write_file(f, name, file, sizeof file);
}

/* The .bin files are a copy of what safetensors has, and stay side files. */
static void test_safetensors_wins(void **state)
{
    struct opened o;
    struct folder f;

    make_folder(&f);
    write_small(&f, "model.safetensors");
    copy_file(state, "pt_zip_module_state/pytorch_model.bin", &f, "pytorch_model.bin");
    write_text(&f, "pytorch_model.bin.index.json", "{\"weight_map\": {}}");
    open_checkpoint(f.dir, &o);
    assert_string_equal(o.info.format, "hf-safetensors");
    assert_int_equal(o.info.tensors, 1);
    close_checkpoint(&o);
    remove_folder(&f);
}

/* Both kinds of adapters beside both kinds of models are there, as role other. */
static void test_adapter_beside(void **state)
{
    static const char lora[] = "adapter_value_head/adapter_model.bin";
    static const char key[] =
        "adapter_model.bin:base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    struct opened o;
    struct folder f;

    make_folder(&f);
    copy_file(state, "hf_bin_single_tied/pytorch_model.bin", &f, "pytorch_model.bin");
    write_text(&f, "config.json", "{}");
    write_text(&f, "adapter_config.json", "{}");
    copy_file(state, lora, &f, "adapter_model.bin");
    open_checkpoint(f.dir, &o);
    assert_string_equal(o.info.format, "hf-bin");
    assert_false(o.info.adapter);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 4);
    assert_int_equal(tensor(&o, key)->role, ROLE_OTHER);
    assert_int_equal(o.info.warnings, 0);
    close_checkpoint(&o);

    write_small(&f, "adapter_model.safetensors");
    open_checkpoint(f.dir, &o); /* PEFT takes this one of two */
    assert_string_equal(o.info.format, "hf-bin");
    assert_int_equal(o.info.by_role[ROLE_OTHER], 1);
    assert_int_equal(tensor(&o, "w")->role, ROLE_OTHER);
    close_checkpoint(&o);
    write_text(&f, "adapter_model.safetensors", "damaged, surely");
    open_checkpoint(f.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 0);
    check_warning(&o, "damaged-file: ");
    close_checkpoint(&o);
    remove_folder(&f);

    make_folder(&f);
    write_small(&f, "model.safetensors");
    write_text(&f, "adapter_config.json", "{}");
    copy_file(state, lora, &f, "adapter_model.bin");
    open_checkpoint(f.dir, &o);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 1);
    assert_int_equal(tensor(&o, key)->role, ROLE_OTHER);
    close_checkpoint(&o);
    remove_folder(&f);
}

/* LLaMA-Factory cuts it off what its trainer saved. */
static void test_value_head(void **state)
{
    static const char head[] = "adapter_value_head/pytorch_model.bin";
    static const char lora[] = "adapter_value_head/adapter_model.bin";
    struct opened o;
    struct folder f;

    make_folder(&f);
    copy_file(state, lora, &f, "adapter_model.bin");
    write_text(&f, "adapter_config.json", "{}");
    copy_file(state, head, &f, "value_head.bin");
    open_checkpoint(f.dir, &o);
    assert_string_equal(o.info.format, "hf-peft");
    assert_int_equal(o.info.by_role[ROLE_MODEL], 4);
    assert_int_equal(tensor(&o, "value_head.bin:v_head.summary.bias")->role,
                     ROLE_OTHER);
    close_checkpoint(&o);
    write_small(&f, "value_head.safetensors");
    open_checkpoint(f.dir, &o);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 1);
    assert_int_equal(tensor(&o, "w")->role, ROLE_OTHER);
    close_checkpoint(&o);
    write_small(&f, "model.safetensors");
    open_checkpoint(f.dir, &o);
    assert_int_equal(tensor(&o, "w")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "value_head.safetensors/w")->role, ROLE_OTHER);
    close_checkpoint(&o);
    remove_folder(&f);
}

/* ms-swift trains it as a whole beside the language model's adapter. */
static void test_vision_tower(void **state)
{
    static const char lora[] = "adapter_value_head/adapter_model.bin";
    struct opened o;
    struct folder f;

    make_folder(&f);
    copy_file(state, lora, &f, "adapter_model.bin");
    write_text(&f, "adapter_config.json", "{}");
    write_small(&f, "vit.safetensors");
    open_checkpoint(f.dir, &o);
    assert_string_equal(o.info.format, "hf-peft");
    assert_int_equal(o.info.by_role[ROLE_MODEL], 4);
    assert_int_equal(tensor(&o, "w")->role, ROLE_OTHER);
    close_checkpoint(&o);
    remove_folder(&f);
}

/* ---- an index ---- */

static const char index_text[] =
    "{\"metadata\": {\"total_size\": 1},"
    " \"weight_map\": {\"a\": \"pytorch_model-00001-of-00003.bin\","
    "  \"b\": \"pytorch_model-00002-of-00003.bin\","
    "  \"c\": \"pytorch_model-00002-of-00003.bin\","
    "  \"d\": \"../pytorch_model.bin\", \"e\": \"gone.bin\"}}";

static void test_index(void **state)
{
    struct opened o;
    struct folder f;

    make_folder(&f);
    copy_file(state, "numbered/pytorch_model-00001-of-00002.bin", &f,
              "pytorch_model-00001-of-00003.bin");
    copy_file(state, "numbered/pytorch_model-00002-of-00002.bin", &f,
              "pytorch_model-00002-of-00003.bin");
    write_text(&f, "pytorch_model.bin.index.json", index_text);
    open_checkpoint(f.dir, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "hf-bin");
    assert_int_equal(o.info.tensors, 5);
    assert_int_equal(o.info.faults, 3);
    assert_null(tensor(&o, "a")->fault);
    assert_null(tensor(&o, "b")->fault);
    check_fault(&o, "c", "which does not hold it");
    assert_int_equal(tensor(&o, "c")->role, ROLE_OTHER);
    check_warning(&o,
                  "missing-tensor: pytorch_model.bin.index.json lists 1 tensors that "
                  "its files do not hold, as c");
    check_fault(&o, "d", "no plain file name");
    check_fault(&o, "e", "gone.bin is missing");
    check_warning(&o, "missing-file: gone.bin is missing");
    close_checkpoint(&o);

    /* The index chooses files, and loaders read them whole. */
    write_text(&f, "pytorch_model.bin.index.json",
               "{\"weight_map\": {\"b\": \"pytorch_model-00001-of-00003.bin\"}}");
    open_checkpoint(f.dir, &o);
    assert_int_equal(o.info.tensors, 2);
    assert_null(tensor(&o, "a")->fault);
    check_fault(&o, "b", "which does not hold it");
    check_warning(&o,
                  "missing-tensor: pytorch_model.bin.index.json lists 1 tensors that "
                  "its files do not hold, as b");
    check_warning(&o, "unlisted-tensor: pytorch_model.bin.index.json does not list 1 "
                      "tensors of the files that it names, as a");
    close_checkpoint(&o);

    write_text(&f, "pytorch_model.bin.index.json",
               "{\"weight_map\": {\"b\": \"model-00001-of-00002.safetensors\"}}");
    open_checkpoint(f.dir, &o);
    assert_has(o.info.error, "which is no .bin file");
    assert_int_equal(o.info.tensors, 0);
    close_checkpoint(&o);
    remove_folder(&f);
}

/* save_pretrained(variant="fp16", safe_serialization=False) of transformers 4. */
static void test_index_of_a_variant(void **state)
{
    struct opened o;
    struct folder f;

    make_folder(&f);
    copy_file(state, "numbered/pytorch_model-00001-of-00002.bin", &f,
              "pytorch_model.fp16-00001-of-00002.bin");
    write_text(&f, "pytorch_model.bin.index.fp16.json",
               "{\"weight_map\": {\"a\": \"pytorch_model.fp16-00001-of-00002.bin\","
               " \"b\": \"pytorch_model.fp16-00002-of-00002.bin\"}}");
    open_checkpoint(f.dir, &o);
    assert_string_equal(o.info.format, "hf-bin");
    assert_int_equal(o.info.tensors, 2);
    assert_null(tensor(&o, "a")->fault);
    check_fault(&o, "b", "pytorch_model.fp16-00002-of-00002.bin is missing");
    close_checkpoint(&o);

    /* The whole set without a variant is what loaders take when nobody names one. */
    copy_file(state, "numbered/pytorch_model-00002-of-00002.bin", &f,
              "pytorch_model-00001-of-00001.bin");
    write_text(&f, "pytorch_model.bin.index.json",
               "{\"weight_map\": {\"b\": \"pytorch_model-00001-of-00001.bin\"}}");
    open_checkpoint(f.dir, &o);
    assert_string_equal(o.info.metadata_file, "pytorch_model.bin.index.json");
    assert_int_equal(o.info.tensors, 1);
    assert_null(tensor(&o, "b")->fault);
    close_checkpoint(&o);
    remove_folder(&f);
}

static void test_damaged_shard(void **state)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    struct opened o;
    struct folder f;

    make_folder(&f);
    copy_file(state, "numbered/pytorch_model-00001-of-00002.bin", &f,
              "pytorch_model-00001-of-00002.bin");
    read_fixture(state, "numbered/pytorch_model-00001-of-00002.bin", &bytes);
    write_file(&f, "pytorch_model-00002-of-00002.bin", bytes.data, bytes.len / 2);
    write_text(&f, "pytorch_model.bin.index.json",
               "{\"weight_map\": {\"a\": \"pytorch_model-00001-of-00002.bin\","
               " \"b\": \"pytorch_model-00002-of-00002.bin\"}}");
    open_checkpoint(f.dir, &o);
    assert_null(o.info.error);
    assert_null(tensor(&o, "a")->fault);
    check_fault(&o, "b", "no end of central directory");
    check_warning(&o, "damaged-file: ");
    close_checkpoint(&o);
    remove_folder(&f);
}

/* Without an index nothing says which of two tensors of one key counts. */
static void test_numbered(void **state)
{
    struct opened o;
    struct folder f;

    make_folder(&f);
    copy_file(state, "numbered/pytorch_model-00001-of-00002.bin", &f,
              "pytorch_model-00001-of-00003.bin");
    copy_file(state, "numbered/pytorch_model-00001-of-00002.bin", &f,
              "pytorch_model-00002-of-00003.bin");
    open_checkpoint(f.dir, &o);
    assert_string_equal(o.info.format, "torch-file");
    assert_int_equal(o.info.tensors, 1);
    check_fault(&o, "a", "in several files");
    check_warning(&o, "missing-file: 1 of the 3 files");
    close_checkpoint(&o);
    remove_folder(&f);
}

/* ---- the legacy container ---- */

/* Pickles in protocol 2; `storages` are put behind as they are. */
static void legacy_file(struct buf *out, const char *object, size_t object_len,
                        const char *keys, const void *storages, size_t len)
{
    static const char head[] =
        "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
        "\x80\x02M\xe9\x03."
        "\x80\x02}X\x0d\0\0\0little_endian\x88s.";

    buf_add(out, head, sizeof head - 1);
    buf_add(out, object, object_len);
    buf_adds(out, keys);
    buf_add(out, storages, len);
    assert_int_equal(buf_failed(out), 0);
}

/*
 * {"v": a view of two elements from the third on of a storage of five floats}, as before
 * torch 1.0: the tensor counts from the view's first element.
 */
static const char view_object[] =
    "(dS'v'\nctorch._utils\n_rebuild_tensor\n"
    "((S'storage'\nctorch\nFloatStorage\nS'77'\nS'cpu'\nI5\n(S'88'\nI2\nI2\nttQ"
    "I0\n(I2\nt(I1\nttRs.";

static void test_legacy_view(void **state)
{
    static const float values[5] = {1, 2, 3, 4, 5};
    CLEANUP(buf_release) struct buf bytes = {0};
    unsigned char storage[8 + sizeof values] = {5};
    struct opened o;
    struct folder f;

    (void)state;
    make_folder(&f);
    memcpy(storage + 8, values, sizeof values);
    legacy_file(&bytes, view_object, sizeof view_object - 1, "(lS'77'\na.", storage,
                sizeof storage);
    write_file(&f, "old.pth", bytes.data, bytes.len);
    open_checkpoint(f.dir, &o);
    assert_null(o.info.error);
    read_exactly(&o, "v", values + 2, 2 * sizeof(float));
    close_checkpoint(&o);

    /* The count in front of the elements is not what the object says. */
    buf_clear(&bytes);
    storage[0] = 4;
    legacy_file(&bytes, view_object, sizeof view_object - 1, "(lS'77'\na.", storage,
                sizeof storage);
    write_file(&f, "old.pth", bytes.data, bytes.len);
    open_checkpoint(f.dir, &o);
    check_fault(&o, "v", "the file ends before its storage, or is damaged before it");
    close_checkpoint(&o);

    /* A storage that nobody uses has no size that anyone knows. */
    buf_clear(&bytes);
    legacy_file(&bytes, view_object, sizeof view_object - 1, "(lS'66'\naS'77'\na.",
                storage, sizeof storage);
    write_file(&f, "old.pth", bytes.data, bytes.len);
    open_checkpoint(f.dir, &o);
    assert_has(o.info.error, "a storage that no tensor uses");
    close_checkpoint(&o);
    remove_folder(&f);
}

/* torch takes the first view of a name for all of that name. */
static void test_legacy_views_of_one_name(void **state)
{
#define VIEW(key, first, name)                                                         \
    "S'" key "'\nctorch._utils\n_rebuild_tensor\n"                                     \
    "((S'storage'\nctorch\nFloatStorage\nS'77'\nS'cpu'\nI5\n(S'" name "'\nI" first     \
    "\nI2\nttQI0\n(I2\nt(I1\nttRs"
    static const char same[] = "(d" VIEW("v", "2", "88") VIEW("w", "2", "88") ".";
    static const char others[] = "(d" VIEW("v", "2", "88") VIEW("w", "1", "89") ".";
    static const char differ[] = "(d" VIEW("v", "2", "88") VIEW("w", "1", "88") ".";
    static const float values[5] = {1, 2, 3, 4, 5};
    const struct {
        const char *object;
        const char *error;
    } cases[] = {{same, NULL}, {others, NULL}, {differ, "two views of storages"}};
    unsigned char storage[8 + sizeof values] = {5};
    struct opened o;
    struct folder f;

    (void)state;
    make_folder(&f);
    memcpy(storage + 8, values, sizeof values);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf bytes = {0};

        legacy_file(&bytes, cases[i].object, strlen(cases[i].object), "(lS'77'\na.",
                    storage, sizeof storage);
        write_file(&f, "old.pth", bytes.data, bytes.len);
        open_checkpoint(f.dir, &o);
        if (cases[i].error)
            assert_has(o.info.error, cases[i].error);
        else
            read_exactly(&o, "w", values + (i == 0 ? 2 : 1), 2 * sizeof(float));
        close_checkpoint(&o);
    }
    remove_folder(&f);
}

/* What lies before the cut is whole, what lies behind is gone. */
static void test_legacy_cut(void **state)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    struct opened o;
    struct folder f;
    size_t good = 0;

    make_folder(&f);
    read_fixture(state, "pt_legacy_all/model.pth", &bytes);
    write_file(&f, "cut.pth", bytes.data, bytes.len - 100);
    open_checkpoint(f.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.tensors, 17);
    for (size_t i = 0; i < o.count; i++)
        good += o.t[i].fault == NULL;
    assert_in_range(good, 10, 16);
    assert_int_equal(o.info.faults, 17 - good);
    close_checkpoint(&o);
    remove_folder(&f);
}

static void test_refused(void **state)
{
    char tar[TORCH_HEAD] = "sys_info";
    struct opened o;
    struct folder f;

    (void)state;
    memcpy(tar + 257, "ustar", 6);
    make_folder(&f);
    write_file(&f, "ancient.pth", tar, sizeof tar);
    open_checkpoint(f.dir, &o);
    assert_has(o.info.error,
               "the tar format of PyTorch before 0.1.10 is not supported");
    close_checkpoint(&o);

    write_text(&f, "ancient.pth",
               "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
               "\x80\x02M\xea\x03.");
    open_checkpoint(f.dir, &o);
    assert_has(o.info.error, "protocol version 1002, only 1001 is supported");
    close_checkpoint(&o);
    remove_folder(&f);
}

/* ---- deflated storages ---- */

static void test_deflated_damage(void **state)
{
    CLEANUP(buf_release) struct buf bytes = {0}, got = {0};
    static const char name[] = "archive/data/0";
    struct opened o;
    struct folder f;
    struct err e = {0};
    char *at;

    make_folder(&f);
    read_fixture(state, "deflated/model.pt", &bytes);
    at = memmem(bytes.data, bytes.len, name, sizeof name - 1);
    assert_non_null(at);
    at[sizeof name - 1 + 20] ^= 1;
    write_file(&f, "model.pt", bytes.data, bytes.len);
    open_checkpoint(f.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 0); /* found when it is read */
    assert_int_equal(read_tensor(&o.w, o.info.id, tensor(&o, "model.a"), &got, &e),
                     -EBADMSG);
    assert_has(e.text, "deflated bytes");
    close_checkpoint(&o);
    remove_folder(&f);
}

/* ---- one file of a composite ---- */

static void report(struct world *w, const char *name, const struct torch_report *how,
                   struct opened *o)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct catalog_place where = {.path = "", .store = w->store};
    struct scan_context c = {.store = w->store, .dir = ""};
    const struct sink_checkpoint about = {.format = "test"};
    struct sink *sink;
    struct err e = {0};
    int64_t id;

    *o = (struct opened){0};
    assert_ok(w->store->ops->list(w->store, "", &l, &e), &e);
    c.listing = l;
    assert_ok(sink_begin(w->catalog, &where, &sink, &e), &e);
    assert_ok(sink_checkpoint(sink, &about, &e), &e);
    assert_ok(torch_file_report(&c, sink, name, how, &e), &e);
    assert_ok(sink_commit(sink, NULL, &id, &e), &e);
    assert_ok(catalog_checkpoint_by_id(w->catalog, id, w->arena, &o->info, &e), &e);
    o->w = *w;
    assert_ok(world_tensors(w, id, &o->t, &o->count, &e), &e);
}

static void test_report(void **state)
{
    static const char *const skip[] = {"opt", "dtypes", NULL};
    const struct torch_report whole = {.role = ROLE_OTHER};
    const struct torch_report part = {.prefix = "",
                                      .part = "optim",
                                      .role = -1,
                                      .entries = true,
                                      .object = "x/",
                                      .skip = skip};
    CLEANUP(buf_release) struct buf text = {0}, warnings = {0};
    struct opened o;
    struct world w;
    struct err e = {0};
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/pt_zip_all", (const char *)*state);
    assert_ok(world_open(path, &w, &e), &e);
    report(&w, "model.pt", &whole, &o);
    assert_int_equal(o.info.tensors, 22);
    assert_int_equal(tensor(&o, "model.pt:opt.state.0.exp_avg")->role, ROLE_OTHER);
    all_objects(&o, &text);
    assert_has(text.data, "model.pt={");
    assert_has(text.data, "\"exp_avg\":{\"$type\":\"tensor\",\"key\":"
                          "\"model.pt:opt.state.0.exp_avg\"}");
    assert_has(text.data, "\"epoch\":3");
    world_close(&w);

    assert_ok(world_open(path, &w, &e), &e);
    report(&w, "model.pt", &part, &o);
    assert_int_equal(tensor(&o, "empty")->role, ROLE_OPTIMIZER);
    for (size_t i = 0; i < o.count; i++)
        assert_int_not_equal(strncmp(o.t[i].key, "dtypes.", 7), 0);
    buf_clear(&text);
    all_objects(&o, &text);
    assert_string_equal(text.data, "x/epoch=3\nx/flag=true\nx/lrs=[0.1,0.2]\n"
                                   "x/name=\"run-1\"\nx/none=null\n");
    world_close(&w);

    /* What is missing is told, and no reason to end the scan. */
    assert_ok(world_open(path, &w, &e), &e);
    report(&w, "rng.pt", &whole, &o);
    assert_int_equal(o.info.tensors, 0);
    buf_clear(&text);
    all_objects(&o, &text);
    assert_string_equal(text.data,
                        "rng.pt={\"$type\":\"opaque\",\"class\":\"unreadable\","
                        "\"error\":\"rng.pt is missing\"}\n");
    all_warnings(&o, &warnings);
    assert_string_equal(warnings.data, "object: rng.pt: rng.pt is missing\n"
                                       "missing-file: rng.pt is missing\n");
    world_close(&w);
}

/* ---- bids ---- */

struct made {
    const char *name, *head;
    size_t len;
};

static struct listing *made_listing(const struct made *files, size_t n)
{
    struct listing *l = NULL;
    struct err e = {0};

    assert_ok(listing_new(NULL, "", &l, &e), &e);
    for (size_t i = 0; i < n; i++) {
        const struct entry_stat st = {.kind = ENTRY_FILE, .id = {.size = 1000}};

        assert_ok(listing_add(l, files[i].name, &st, files[i].head, files[i].len, &e),
                  &e);
    }
    listing_sort(l);
    return l;
}

static const char legacy_head[] =
    "\x80\x04\x95\x0d\0\0\0\0\0\0\0\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
static const char zip_head[] = "PK\3\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
                               "\x10\0\0\0archive/data.pkl";
static const char other_zip[] = "PK\3\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
                                "\x09\0\0\0setup.cfg";

static void test_bids(void **state)
{
    static const struct {
        const char *name, *head;
        size_t len;
        int file, dir; /* scores */
    } cases[] = {
        {"a.pt", zip_head, sizeof zip_head - 1, 50, 0},
        {"A.PTH", legacy_head, sizeof legacy_head - 1, 50, 0},
        {"run.pth.tar", zip_head, sizeof zip_head - 1, 50, 0},
        {"a.bin", zip_head, sizeof zip_head - 1, 50, 0},
        {"a.bin", other_zip, sizeof other_zip - 1, 0, 0},
        {"a.pt", other_zip, sizeof other_zip - 1, 20, 0},
        {"a.pt", "\x80\x02}q\0.", 6, 0, 0},
        {"latest_train_state.pt", zip_head, sizeof zip_head - 1, 0, 0},
        {"rng_state_0.pth", zip_head, sizeof zip_head - 1, 0, 0},
        {"schedulers.pt", zip_head, sizeof zip_head - 1, 50, 0},
        {"a.zip", zip_head, sizeof zip_head - 1, 0, 0},
        {".pt", zip_head, sizeof zip_head - 1, 0, 0},
        {"pytorch_model.bin", zip_head, sizeof zip_head - 1, 50, 58},
        {"pytorch_model.bin", "x", 1, 0, 25},
        {"pytorch_model.bin.index.json", "{\"weight_map\": {", 16, 0, 26},
        {"pytorch_model.bin.index.json", "{", 1, 0, 26},
        {"pytorch_model-00001-of-00001.bin", zip_head, sizeof zip_head - 1, 50, 53},
        {"pytorch_model-00001-of-00002.bin", zip_head, sizeof zip_head - 1, 50, 38},
        {"pytorch_model-00003-of-00002.bin", zip_head, sizeof zip_head - 1, 50, 0},
        {"model-00001-of-00002.bin", zip_head, sizeof zip_head - 1, 50, 0},
        {"adapter_model.bin", zip_head, sizeof zip_head - 1, 50, 0},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct made file = {cases[i].name, cases[i].head, cases[i].len};
        CLEANUP(listing_freep) struct listing *l = made_listing(&file, 1);
        struct bid file_bid = {0}, dir_bid = {0};

        format_torch_file.bid_file(l, cases[i].name, &file_bid);
        format_torch_file.bid(l, &dir_bid);
        if (file_bid.score != cases[i].file || dir_bid.score != cases[i].dir)
            fail_msg("case %zu, %s: %d and %d, not %d and %d (%s)", i, cases[i].name,
                     file_bid.score, dir_bid.score, cases[i].file, cases[i].dir,
                     dir_bid.reason);
    }
}

static void test_bids_of_an_index(void **state)
{
    static const struct {
        const char *head;
        int score;
    } cases[] = {
        {"{\"weight_map\": {\"a\": \"pytorch_model-00001-of-00002.bin\"}}", 78},
        {"{", 43}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct made files[] = {
            {"pytorch_model.bin.index.json", cases[i].head, strlen(cases[i].head)},
            {"pytorch_model-00001-of-00002.bin", zip_head, sizeof zip_head - 1},
        };
        CLEANUP(listing_freep) struct listing *l = made_listing(files, 2);
        struct bid bid = {0};

        format_torch_file.bid(l, &bid);
        assert_int_equal(bid.score, cases[i].score);
    }
}

static void test_bids_beside(void **state)
{
    static const struct made model = {"pytorch_model.bin", zip_head,
                                      sizeof zip_head - 1};
    static const struct {
        struct made other;
        int score;
    } cases[] = {
        {{"config.json", "{}", 2}, 73},
        {{"model.safetensors", "\x02\0\0\0\0\0\0\0{}", 10}, 15},
        {{"model.safetensors", "x", 1}, 58},             /* damaged */
        {{"model.safetensors.index.json", "{}", 2}, 58}, /* of files elsewhere */
        {{"readme.txt", "x", 1}, 58},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct made files[] = {model, cases[i].other};
        CLEANUP(listing_freep) struct listing *l = made_listing(files, 2);
        struct bid bid = {0};

        format_torch_file.bid(l, &bid);
        if (bid.score != cases[i].score)
            fail_msg("%s: %d, not %d", cases[i].other.name, bid.score, cases[i].score);
    }
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "wrappers", .test_func = test_wrappers},
        {.name = "roles", .test_func = test_roles},
        {.name = "plain pieces", .test_func = test_plain_pieces},
        {.name = "many files", .test_func = test_many_files},
        {.name = "safetensors wins", .test_func = test_safetensors_wins},
        {.name = "adapter beside a model", .test_func = test_adapter_beside},
        {.name = "value head", .test_func = test_value_head},
        {.name = "vision tower", .test_func = test_vision_tower},
        {.name = "index", .test_func = test_index},
        {.name = "index of a variant", .test_func = test_index_of_a_variant},
        {.name = "damaged shard", .test_func = test_damaged_shard},
        {.name = "numbered", .test_func = test_numbered},
        {.name = "legacy view", .test_func = test_legacy_view},
        {.name = "legacy views of one name",
         .test_func = test_legacy_views_of_one_name},
        {.name = "legacy file cut", .test_func = test_legacy_cut},
        {.name = "refused", .test_func = test_refused},
        {.name = "deflated and damaged", .test_func = test_deflated_damage},
        {.name = "one file of a composite", .test_func = test_report},
        {.name = "bids", .test_func = test_bids},
        {.name = "bids beside", .test_func = test_bids_beside},
        {.name = "bids of an index", .test_func = test_bids_of_an_index},
    };

    return run_with_fixtures("torch_file", argc, argv, others, ARRAY_SIZE(others));
}
