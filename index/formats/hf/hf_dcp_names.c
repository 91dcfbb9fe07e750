/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_dcp_names.c - names that others know and no shard has: is one lost? */
#include "index/formats/hf/hf_dcp_priv.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/json.h"
#include "index/formats/key_list.h"
#include "index/formats/layer_name.h"
#include "index/key_text.h"

/*
 * Where a rank has whole tensors (a stage of a pipeline, an expert, plain data parallelism)
 * a lost file leaves no hole: its tensors are not there, and that is all. Two others know
 * their names: the optimizer, which has the framework's own, and NeMo's list of names,
 * which has those of the files, but also some that were never saved.
 */

enum { MAX_MAPPING = 1 << 26 };

static const char mapping_name[] = "fqn_to_file_index_mapping.json";

struct names {
    struct hf_scan *s;
    struct key_list held;   /* in shards or full files; also without a wrapper */
    struct key_list known;  /* to the optimizer */
    struct key_list list;   /* NeMo's, that no shard has */
    struct key_list kinds;  /* "model.layers.": those of which shards have layers, */
    struct key_list shared; /* and names that the optimizer knows, too */
    bool elsewhere; /* is any held in a layer of which the optimizer knows nothing? */
    bool loose;     /* or outside of layers, and not known? */
};

static bool layer_of(const struct key *key, struct key *layer, struct key *all)
{
    layer->name = all->name = key->name;
    return layer_name(key->name, key->len, &layer->len, &all->len);
}

/* "lm_head.weight", also of a model within another. */
static bool is_head(const char *name, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if ((i == 0 || name[i - 1] == '.') && hf_is_head(name + i, len - i))
            return true;
    return false;
}

/* ---- what is known ---- */

/*
 * The name without what a saver or a module around the model (Megatron-FSDP's "module.")
 * put before it: the mapping has one of the spellings, or both. 0: there is no other.
 */
static size_t other_spelling(const struct hf_scan *s,
                             const struct safetensors_tensor *t)
{
    static const char holder[] = "module.";
    size_t n = sizeof holder - 1;
    size_t wrapper = s->how->wrapper ? s->how->wrapper(t->name, t->name_len) : 0;

    if (wrapper)
        return wrapper;
    return t->name_len > n && memcmp(t->name, holder, n) == 0 ? n : 0;
}

static int list_held(struct names *n, struct err *e)
{
    const struct hf_scan *s = n->s;

    for (size_t i = 0; i < s->ntensors; i++) {
        const struct safetensors_tensor *t = hf_name_of(s, &s->tensor[i]);
        size_t wrapper = other_spelling(s, t);

        TRY(key_list_add(&n->held, t->name, t->name_len, e));
        if (wrapper)
            TRY(key_list_add(&n->held, t->name + wrapper, t->name_len - wrapper, e));
    }
    key_list_sort(&n->held);
    return 0;
}

static int list_known(struct names *n, struct err *e)
{
    const struct hf_dcp_how *how = n->s->how;
    const char *name;
    size_t len;

    for (size_t i = 0; how->name && (name = how->name(how->user, i, &len)); i++)
        TRY(key_list_add(&n->known, name, len, e));
    key_list_sort(&n->known);
    return 0;
}

static int take_name(void *user, const char *key, size_t key_len,
                     const struct json *value UNUSED, struct err *e)
{
    struct names *n = user;
    const struct key k = {key, key_len};
    const char *kept;

    if (key_list_has(&n->held, &k) || (is_head(key, key_len) && n->s->config.tied))
        return 0;
    kept = arena_memdup(n->s->arena, key, key_len);
    return kept ? key_list_add(&n->list, kept, key_len, e) : err_nomem(e);
}

static int list_mapping(struct names *n, struct err *e)
{
    struct listing *l = listing_sub(n->s->top, hf_metadata_dir);
    struct err why = {0};
    CLEANUP_FREE char *text = NULL;
    size_t len;

    if (!l || !listing_find(l, mapping_name))
        return 0;
    if (listing_read(l, mapping_name, MAX_MAPPING, &text, &len, &why) < 0 ||
        json_each_member(text, len, NULL, take_name, n, &why) < 0) {
        if (safetensors_stops_scan(why.code)) {
            return err_copy(e, &why);
        }
        n->list.count = 0;
        if (sink_warning(n->s->sink, "damaged-file", "%s: %s", mapping_name, why.text) <
            0)
            return err_nomem(e);
    }
    key_list_sort(&n->list);
    return 0;
}

/* ---- what follows from it ---- */

/* Of what kinds are the layers? Runs of one kind are kept once. */
static int add_kind(struct key_list *kinds, const struct key *all, struct err *e)
{
    if (kinds->count > 0 && key_compare(&kinds->at[kinds->count - 1], all) == 0)
        return 0;
    return key_list_add(kinds, all->name, all->len, e);
}

/* Models with an adapter have other names in files: where these lie tells what is sure. */
static int find_kinds(struct names *n, struct err *e)
{
    struct key layer, all;

    for (size_t i = 0; i < n->held.count; i++) {
        const struct key *k = &n->held.at[i];
        bool known = key_list_has(&n->known, k), in_layer = layer_of(k, &layer, &all);

        if (in_layer && (add_kind(&n->kinds, &all, e) < 0 ||
                         (known && add_kind(&n->shared, &all, e) < 0)))
            return -e->code;
        n->loose |= !known && !in_layer;
        n->elsewhere |= !known && in_layer && !key_list_has_start(&n->known, &layer);
    }
    key_list_sort(&n->kinds);
    key_list_sort(&n->shared);
    return 0;
}

/* Do shards have a name of the layer that the optimizer does not know? */
static bool has_unknown(const struct names *n, const struct key *layer)
{
    for (size_t i = key_list_from(&n->held, layer);
         i < n->held.count && key_starts_with(&n->held.at[i], layer); i++)
        if (!key_list_has(&n->known, &n->held.at[i]))
            return true;
    return false;
}

/*
 * All that shards have of its layer goes by the optimizer's names, so this would too. Of a
 * layer that no shard has anything of, others of its kind speak.
 */
static bool layer_tells(const struct names *n, const struct key *layer,
                        const struct key *all)
{
    if (key_list_has_start(&n->held, layer))
        return !has_unknown(n, layer);
    return !n->elsewhere && key_list_has(&n->shared, all);
}

/* The optimizer has a state of these, so that they were there when it was saved. */
static int find_unsaved(struct names *n, struct key_list *lost, struct err *e)
{
    struct key last = {0}, layer, all;
    bool tells = false, in_layer;

    for (size_t i = 0; i < n->known.count; i++) {
        const struct key *k = &n->known.at[i];

        if (key_list_has(&n->held, k))
            continue;
        if (is_head(k->name, k->len))
            continue; /* tied ones are not stored, and not all saves tell of it */
        in_layer = layer_of(k, &layer, &all);
        if (in_layer && (!last.name || key_compare(&layer, &last) != 0)) {
            tells = layer_tells(n, &layer, &all);
            last = layer;
        }
        if ((in_layer ? tells : !n->loose) || key_list_has(&n->list, k))
            TRY(key_list_add(lost, k->name, k->len, e));
    }
    return 0;
}

/* It proves nothing by itself, see above. */
static int add_heads(const struct names *n, struct key_list *lost, struct err *e)
{
    for (size_t i = 0; i < n->known.count && !n->s->config.tied; i++) {
        const struct key *k = &n->known.at[i];

        if (is_head(k->name, k->len) && !key_list_has(&n->held, k))
            TRY(key_list_add(lost, k->name, k->len, e));
    }
    return 0;
}

/* Whole layers that only the list has, where shards have others of their kind. */
static int find_unlisted(struct names *n, struct key_list *lost, struct err *e)
{
    struct key layer, all;

    for (size_t i = 0; i < n->list.count; i++) {
        const struct key *k = &n->list.at[i];

        if (layer_of(k, &layer, &all) && key_list_has(&n->kinds, &all) &&
            !key_list_has_start(&n->held, &layer))
            TRY(key_list_add(lost, k->name, k->len, e));
    }
    return 0;
}

/* Listed as tensors of which nothing is known but the name. */
static int add_lost(struct hf_scan *s, const struct key_list *lost, struct err *e)
{
    struct safetensors_tensor *name = arena_array(s->arena, lost->count, sizeof *name);
    struct hf_tensor *all =
        reallocarray(s->tensor, s->ntensors + lost->count, sizeof *all);

    s->tensor = all ? all : s->tensor;
    if (!name || !all)
        return err_nomem(e);
    for (size_t i = 0; i < lost->count; i++) {
        name[i] = (struct safetensors_tensor){.name = lost->at[i].name,
                                              .name_len = lost->at[i].len};
        s->tensor[s->ntensors++] = (struct hf_tensor){.copy = &name[i],
                                                      .dtype = DTYPE_U8,
                                                      .units = {.nd = 1},
                                                      .axis = -2,
                                                      .named = true};
    }
    return 0;
}

static int compare_tensors(const void *a, const void *b, void *s)
{
    return hf_compare_names(hf_name_of(s, a), hf_name_of(s, b));
}

/* The optimizer's names of a layer are not those of files, if the list has others of it. */
static void drop_renamed(const struct names *n, struct key_list *lost)
{
    struct key layer, all;
    size_t count = 0;

    for (size_t i = 0; i < lost->count; i++)
        if (key_list_has(&n->list, &lost->at[i]) ||
            !layer_of(&lost->at[i], &layer, &all) ||
            !key_list_has_start(&n->list, &layer))
            lost->at[count++] = lost->at[i];
    lost->count = count;
}

/* Names in the list alone prove nothing, but where some are lost these are, too. */
static int add_all(struct names *n, struct key_list *lost, struct err *e)
{
    struct hf_scan *s = n->s;

    drop_renamed(n, lost);
    TRY(add_heads(n, lost, e));
    for (size_t i = 0; i < n->list.count; i++)
        TRY(key_list_add(lost, n->list.at[i].name, n->list.at[i].len, e));
    key_list_sort(lost);
    if (lost->count == 0)
        return 0;
    TRY(add_lost(s, lost, e));
    qsort_r(s->tensor, s->ntensors, sizeof *s->tensor, compare_tensors, s);
    return 0;
}

static int tell_unsaved(const struct names *n, struct err *e)
{
    char first[200];

    if (n->list.count == 0)
        return 0;
    key_text(first, sizeof first, n->list.at[0].name, n->list.at[0].len);
    if (sink_warning(n->s->sink, "unsaved-name",
                     "%s names %zu tensors that no shard has, as %s", mapping_name,
                     n->list.count, first) < 0)
        return err_nomem(e);
    return 0;
}

static void tell_lost(struct hf_scan *s, const struct key_list *lost)
{
    char first[200];

    key_text(first, sizeof first, lost->at[0].name, lost->at[0].len);
    hf_lose(&s->proof, 0, "no shard has %s, of which the optimizer or %s knows", first,
            mapping_name);
}

static int find_lost(struct names *n, struct key_list *lost, struct err *e)
{
    TRY(list_held(n, e));
    TRY(list_known(n, e));
    TRY(list_mapping(n, e));
    TRY(find_kinds(n, e));
    TRY(find_unsaved(n, lost, e));
    TRY(find_unlisted(n, lost, e));
    if (lost->count > 0)
        tell_lost(n->s, lost);
    return n->s->proof.lost ? add_all(n, lost, e) : tell_unsaved(n, e);
}

int hf_check_names(struct hf_scan *s, struct err *e)
{
    struct names n = {.s = s};
    struct key_list lost = {0};
    int r = find_lost(&n, &lost, e);

    key_list_release(&n.held);
    key_list_release(&n.known);
    key_list_release(&n.list);
    key_list_release(&n.kinds);
    key_list_release(&n.shared);
    key_list_release(&lost);
    return r;
}
