/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_config.c - what a model's config.json tells of its tensors. */
#include "index/formats/hf/hf_config.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/sink.h"
#include "remote/listing.h"
#include "remote/store.h"

enum { MAX_CONFIG = 1 << 24 /* the largest seen, with quantisation tables: 2 MB */ };

static const char head_key[] = "lm_head.weight";

static void take_values(const struct json *doc, struct hf_config *out)
{
    const char *version;

    json_bool(json_get(doc, "tie_word_embeddings"), &out->tied);
    json_u64(json_get(doc, "hidden_size"), &out->hidden_size);
    json_u64(json_get(doc, "vocab_size"), &out->vocab_size);
    if (json_string(json_get(doc, "transformers_version"), &version))
        snprintf(out->transformers, sizeof out->transformers, "%s", version);
}

int hf_config_read(struct listing *l, const char *dir, struct sink *sink,
                   struct hf_config *out, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    char path[PATH_MAX];
    size_t len;

    *out = (struct hf_config){0};
    if (!l || !listing_find(l, "config.json") ||
        store_join(dir, "config.json", path, sizeof path) < 0)
        return 0;
    TRY(sink_watch(sink, path, e));
    if (listing_read(l, "config.json", MAX_CONFIG, &text, &len, &why) == 0 &&
        json_parse(text, len, &json_python, &doc, &why) == 0)
        take_values(doc, out);
    if (!safetensors_stops_scan(why.code))
        return 0;
    *e = why;
    return err_wrap(e, "%s", path);
}

static bool key_is(const char *key, size_t len, const char *text)
{
    return len == strlen(text) && memcmp(key, text, len) == 0;
}

bool hf_is_head(const char *key, size_t len)
{
    return key_is(key, len, head_key);
}

bool hf_is_embedding(const char *key, size_t len)
{
    static const char *const keys[] = {
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "model.decoder.embed_tokens.weight",
        "transformer.word_embeddings.weight",
        "model.language_model.embed_tokens.weight",
    };

    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        if (key_is(key, len, keys[i]))
            return true;
    return false;
}

int hf_tell_tied(struct sink *sink, struct err *e)
{
    static const char value[] = "\"tied, not stored\"";

    return sink_object(sink, head_key, strlen(head_key), value, strlen(value), e);
}
