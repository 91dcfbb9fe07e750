/* SPDX-License-Identifier: MIT */
/* save/save_format.c - the format in which a mount saves: the value of save=. */
#include "save/save_format.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "index/formats/hf/safetensors_write.h"

enum {
    TEXT_MAX = 200,
    MAX_RANKS = 1 << 20,
};

static int wrong(const char *what, const char *why, struct err *e)
{
    err_set(e, EINVAL, "save=: %s: %s", what, why);
    return err_hint(e, "as in save=hf:max_shard_size=5GB or save=dcp:ranks=8");
}

static bool take_number(const char **text, uint64_t max, uint64_t *out)
{
    char *end;

    errno = 0;
    *out = strtoull(*text, &end, 10);
    if (errno || end == *text || **text == '-' || *out == 0 || *out > max)
        return false;
    *text = end;
    return true;
}

/* "5GB" is decimal, "5G" and "5GiB" binary, as --max-shard-size has it. */
static bool take_size(const char *text, uint64_t *out)
{
    static const char units[] = "KMGT";
    const char *unit;
    uint64_t base;

    if (!take_number(&text, UINT64_MAX, out))
        return false;
    if (!*text)
        return true;
    unit = strchr(units, *text);
    base = strcmp(text + 1, "B") == 0 ? 1000 : 1024;
    if (!unit || (text[1] && base == 1024 && strcmp(text + 1, "iB") != 0))
        return false;
    for (const char *u = units; u <= unit; u++)
        if (__builtin_mul_overflow(*out, base, out))
            return false;
    return true;
}

static bool take_drop(char *list, struct save_format *out)
{
    static const char *const roles[] = {"model", "optimizer", "other"};
    char *word;

    while ((word = strsep(&list, "+"))) {
        unsigned i = 0;

        while (i < ARRAY_SIZE(roles) && strcmp(word, roles[i]) != 0)
            i++;
        if (i < ARRAY_SIZE(roles))
            out->drop_roles[i] = true;
        else if (strcmp(word, "objects") == 0)
            out->drop_objects = true;
        else
            return false;
    }
    return true;
}

static int take_option(char *word, struct save_format *out, struct err *e)
{
    char *value = strchr(word, '=');
    const char *text;
    uint64_t a, b;
    bool fine = false;

    if (!value)
        return wrong(word, "not an option", e);
    *value++ = '\0';
    text = value;
    if (strcmp(word, "ranks") == 0) {
        fine = take_number(&text, 1 << 20, &a) && !*text;
        out->options.ranks = (unsigned)a;
    } else if (strcmp(word, "mesh") == 0) {
        fine = take_number(&text, 1 << 20, &a) && *text++ == 'x' &&
               take_number(&text, 1 << 20, &b) && !*text;
        if (fine) {
            out->options.mesh[0] = (unsigned)a;
            out->options.mesh[1] = (unsigned)b;
        }
    } else if (strcmp(word, "max_shard_size") == 0) {
        fine = take_size(text, &out->options.max_shard_size);
    } else if (strcmp(word, "drop") == 0) {
        fine = take_drop(value, out);
    } else {
        return wrong(word, "not an option", e);
    }
    return fine ? 0 : wrong(word, "not a value of this option", e);
}

static int no_writer(const char *name, struct err *e)
{
    CLEANUP(buf_release) struct buf names = {0};
    const struct format_writer *w;

    for (size_t i = 0; (w = format_writer_at(i)); i++)
        buf_addf(&names, "%s%s", i ? ", " : "", w->name);
    err_set(e, EINVAL, "save=%s: not a writable format", name);
    return err_hint(e, "the writable formats are %s", names.data ? names.data : "none");
}

/*
 * What scans call the formats (`unshard info`) that can be changed in place. All take other
 * bytes for the tensors that they have: files are copied with these bytes in them, and stay
 * what they are in all else. A writer besides makes the same kind of checkpoint anew, for
 * the same framework: then tensors may be added and removed, and change shape and dtype.
 * (Composites and trainers' directories have more in them than a writer knows.) Formats in
 * which several ranks store the same tensor are not among them.
 */
static const struct {
    const char *format, *writer;
} kept[] = {
    {"hf-safetensors", "hf"},
    {"hf-peft", "hf"},
    {"torch-dcp", "dcp"},
    {"hf-dcp-sharded", "dcp-hf"},
    {"megatron-torch-dist", "torch_dist"},
    {"megatron-zarr", "zarr"},
    {"olmo-core-v0", "olmo"},
    {"olmo-core-v0-legacy", NULL},
    {"olmo-core-step", "olmo-step"},
    {"olmo-core-dcp", NULL},
    {"nemo-dist", NULL},
    {"torch-dcp-safetensors", NULL},
    {"torch-file", NULL},
    {"lightning-ckpt", NULL},
    {"hf-bin", NULL},
    {"npz", NULL},
    {"hf-trainer", NULL},
    {"lightning-dcp", NULL},
    {"lightning-fabric-dcp", NULL},
    {"accelerate-fsdp", NULL},
    {"composer", NULL},
    {"nemo", NULL},
};

bool save_format_changes(const char *format)
{
    for (size_t i = 0; format && i < ARRAY_SIZE(kept); i++)
        if (strcmp(kept[i].format, format) == 0)
            return true;
    return false;
}

const struct format_writer *save_format_of(const char *format)
{
    for (size_t i = 0; format && i < ARRAY_SIZE(kept); i++)
        if (kept[i].writer && strcmp(kept[i].format, format) == 0)
            return format_writer(kept[i].writer);
    return NULL;
}

int save_format_parse(const char *text, struct save_format *out, struct err *e)
{
    char copy[TEXT_MAX], *list = copy, *word;
    int ret = 0;

    *out = (struct save_format){0};
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy)
        return wrong("the value", "too long", e);
    word = strsep(&list, ":");
    out->writer = format_writer(word);
    if (!out->writer)
        return no_writer(word, e);
    while (ret == 0 && (word = strsep(&list, ":")))
        ret = take_option(word, out, e);
    return ret;
}

/* ---- of a checkpoint that is there, and what a format cannot hold ---- */

/* The bytes of the largest storage file: what the shards of a checkpoint are cut to. */
struct shards {
    uint64_t largest;
    size_t count;
};

static int see_shard(void *user, const struct catalog_file *f)
{
    struct shards *s = user;

    if (f->storage) {
        s->largest = MAX(s->largest, f->id.size);
        s->count++;
    }
    return 0;
}

/* How many ranks have written it: as the scan told, else one a file. */
static unsigned ranks_of(const struct checkpoint_info *info, size_t files)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    const char *text = info->topology;
    uint64_t ranks = files;
    struct err ignored = {0};

    if (text && json_parse(text, strlen(text), NULL, &doc, &ignored) == 0)
        json_u64(json_get(doc, "ranks"), &ranks);
    return ranks > 0 && ranks <= MAX_RANKS ? (unsigned)ranks : 1;
}

int save_format_own(struct catalog *catalog, const struct checkpoint_info *info,
                    struct save_format *out, struct err *e)
{
    struct shards shards = {0};

    *out = (struct save_format){.writer = save_format_of(info->format)};
    if (!out->writer)
        return 0; /* bytes of its tensors can be changed */
    TRY(catalog_files(catalog, info->id, see_shard, &shards, e));
    /* Objects of these are read out of config.json (tied weights), which stays. */
    out->drop_objects = strcmp(out->writer->name, "hf") == 0;
    if (strcmp(out->writer->name, "hf") == 0)
        out->options.max_shard_size = shards.count > 1 ? shards.largest : UINT64_MAX;
    else
        out->options.ranks = ranks_of(info, shards.count);
    return 0;
}
