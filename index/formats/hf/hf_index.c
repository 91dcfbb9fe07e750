/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_index.c - the index of a sharded model: which file holds which tensor. */
#include "index/formats/hf/hf_index.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/json.h"
#include "remote/store.h"

enum {
    /* Text, two pointers an entry and one a file: the tree of the JSON needs more. */
    MEMORY_FACTOR = 8,
    MEMORY_FLOOR = 1 << 16,
};

/* Kinds of files that hold weights: an index of one kind never names another. */
static const char *const kinds[] = {".safetensors", ".bin",    ".pt", ".pth",
                                    ".ckpt",        ".pkl",    ".h5", ".gguf",
                                    ".npz",         ".msgpack"};

void hf_index_release(struct hf_index *x)
{
    arena_free(x->arena);
    *x = (struct hf_index){0};
}

static bool ends_with(const char *name, const char *suffix)
{
    size_t len = strlen(name), n = strlen(suffix);

    return len > n && strcmp(name + len - n, suffix) == 0;
}

bool hf_index_name(const char *name, const char *suffix, struct hf_index_name *out)
{
    static const char middle[] = ".index.", end[] = ".json";
    const char *at = strstr(name, suffix), *rest, *dot;
    size_t n = strlen(suffix), m = strlen(middle);

    while (at && strncmp(at + n, middle, m) != 0) /* in the stem */
        at = strstr(at + 1, suffix);
    if (!at || at == name)
        return false;
    rest = at + n + m;
    dot = strchr(rest, '.');
    *out = (struct hf_index_name){.stem_len = (size_t)(at - name)};
    if (strcmp(rest, end + 1) == 0)
        return true;
    if (!dot || dot == rest || strcmp(dot, end) != 0)
        return false;
    out->variant = rest;
    out->variant_len = (size_t)(dot - rest);
    return true;
}

static bool is_other_kind(const char *name, const char *suffix)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        if (ends_with(name, kinds[i]) && strcmp(kinds[i], suffix) != 0)
            return true;
    return false;
}

/* What the index says of one tensor, before files have numbers. */
struct raw_entry {
    const char *key, *file; /* file NULL: the name holds NUL */
};

static int compare_files(const void *a, const void *b)
{
    const struct raw_entry *x = a, *y = b;

    if (!x->file || !y->file)
        return !x->file - !y->file;
    return strcmp(x->file, y->file);
}

static int compare_keys(const void *a, const void *b)
{
    const struct hf_index_entry *x = a, *y = b;

    return strcmp(x->key, y->key);
}

static const char *file_fault(const char *name, const char *suffix)
{
    if (!name)
        return "the index gives a file name that holds NUL";
    if (!store_name_is_safe(name, strlen(name)) || strchr(name, '/'))
        return "the index gives a name that is no plain file name";
    if (!ends_with(name, suffix))
        return "the index names a file of another kind";
    return NULL;
}

static int read_map(const struct json *map, const char *suffix, struct raw_entry *raw,
                    struct err *e)
{
    for (const struct json *v = json_first(map); v; v = json_next(v), raw++) {
        if (json_kind(v) != JSON_STRING)
            return err_set(e, EBADMSG, "weight_map: the file of \"%.200s\" is no text",
                           json_key(v));
        *raw = (struct raw_entry){.key = json_key(v)};
        if (json_string(v, &raw->file) && is_other_kind(raw->file, suffix))
            return err_set(
                e, EBADMSG,
                "weight_map: \"%.200s\" is in \"%.200s\", which is no %s file",
                raw->key, raw->file, suffix);
    }
    return 0;
}

/* Numbers the files and copies all texts: those of `raw` go with the JSON. */
static int build(struct hf_index *x, struct raw_entry *raw, const char *suffix,
                 struct err *e)
{
    if (x->count > 0)
        qsort(raw, x->count, sizeof *raw, compare_files);
    for (size_t i = 0; i < x->count; i++) {
        const char *key = arena_memdup(x->arena, raw[i].key, strlen(raw[i].key));

        if (i == 0 || compare_files(&raw[i - 1], &raw[i]) != 0) {
            const char *name = raw[i].file ? raw[i].file : "";

            x->file[x->nfiles++] = (struct hf_index_file){
                .name = arena_memdup(x->arena, name, strlen(name)),
                .fault = file_fault(raw[i].file, suffix),
            };
        }
        if (!key || !x->file[x->nfiles - 1].name)
            return err_nomem(e);
        x->entry[i] = (struct hf_index_entry){key, (uint32_t)(x->nfiles - 1)};
    }
    if (x->count > 0)
        qsort(x->entry, x->count, sizeof *x->entry, compare_keys);
    return 0;
}

static int index_of_map(const struct json *map, size_t text_len, const char *suffix,
                        struct hf_index *out, struct err *e)
{
    CLEANUP(hf_index_release) struct hf_index x = {.count = json_count(map)};
    CLEANUP_FREE struct raw_entry *raw = calloc(x.count + 1, sizeof *raw);

    x.arena = arena_new(MEMORY_FLOOR + text_len * MEMORY_FACTOR);
    if (!raw || !x.arena)
        return err_nomem(e);
    x.entry = arena_array(x.arena, x.count, sizeof *x.entry);
    x.file = arena_array(x.arena, x.count, sizeof *x.file);
    if (!x.entry || !x.file)
        return err_nomem(e);
    TRY(read_map(map, suffix, raw, e));
    TRY(build(&x, raw, suffix, e));
    *out = x;
    x = (struct hf_index){0};
    return 0;
}

int hf_index_parse(const char *text, size_t len, const char *suffix,
                   struct hf_index *out, struct err *e)
{
    static const struct json_limits limits = {.nul_ok = true, .python = true};
    CLEANUP(json_freep) struct json *doc = NULL;
    const struct json *map;

    TRY(json_parse(text, len, &limits, &doc, e));
    if (json_kind(doc) != JSON_OBJECT)
        return err_set(e, EBADMSG, "the index is no JSON object");
    map = json_get(doc, "weight_map");
    if (!map || json_kind(map) != JSON_OBJECT)
        return err_set(e, EBADMSG,
                       map ? "weight_map is no object" : "it has no weight_map");
    return index_of_map(map, len, suffix, out, e);
}

ptrdiff_t hf_index_find(const struct hf_index *x, const char *key, size_t len)
{
    size_t low = 0, high = x->count;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        const char *other = x->entry[mid].key;
        int order = strncmp(other, key, len); /* no key of an index holds NUL */

        if (order == 0 && other[len] == '\0' && !memchr(key, '\0', len))
            return (ptrdiff_t)mid;
        if (order < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return -1;
}
