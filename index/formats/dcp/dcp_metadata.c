/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_metadata.c - folds a DCP .metadata pickle into compact tables. */
#include "index/formats/dcp/dcp_metadata.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <xxhash.h>

#include "base/err.h"
#include "index/formats/dcp/dcp_fold.h"
#include "index/formats/pickle/pickle.h"
#include "index/shape.h"
#include "remote/source.h"

/*
 * A chunk takes some 70 opcodes in the three tables of a .metadata, so a million of them
 * pass the unpickler's default; memory does not grow with opcodes, only time does.
 */
static const uint64_t MAX_OPCODES = 1000000000;

static const char METADATA_MODULE[] = "torch.distributed.checkpoint.metadata";
static const char OLD_MODULE[] =
    "torch.distributed._shard.checkpoint.metadata"; /* < 2.0 */
static const char MCORE_MODULE[] = "megatron.core.dist_checkpointing.strategies.torch";

void dcp_names_release(struct dcp_names *n)
{
    intern_release(&n->keys);
    intern_release(&n->paths);
    intern_release(&n->shapes);
    intern_release(&n->words);
}

const int64_t *dcp_shape(const struct dcp_names *n, uint32_t shape, uint32_t *nd)
{
    size_t len;
    const void *dims = intern_get(&n->shapes, shape, &len);

    *nd = (uint32_t)(len / sizeof(int64_t));
    return dims;
}

void dcp_metadata_free(struct dcp_metadata *m)
{
    if (!m)
        return;
    free(m->entry);
    free(m->tensor);
    free(m->chunk);
    free(m->stored);
    free(m->index);
    free(m->slot);
    free(m);
}

void dcp_metadata_freep(struct dcp_metadata **m)
{
    dcp_metadata_free(*m);
    *m = NULL;
}

/* Another one each run, so that no file can be made to fill one corner of the table. */
static uint64_t run_seed(void)
{
    const void *bytes = (const void *)getauxval(AT_RANDOM);
    uint64_t seed = 0;

    if (bytes)
        memcpy(&seed, bytes, sizeof seed);
    return seed;
}

/* The slot of this key and start, or the free one where it would go. */
static uint32_t *find_slot(const struct dcp_metadata *m, uint32_t key, uint32_t start)
{
    uint32_t pair[2] = {key, start};
    size_t mask = m->nslots - 1;
    size_t i = XXH3_64bits_withSeed(pair, sizeof pair, run_seed()) & mask;

    for (; m->slot[i]; i = (i + 1) & mask) {
        const struct dcp_index *have = &m->index[m->slot[i] - 1];

        if (have->key == key && have->start == start)
            break;
    }
    return &m->slot[i];
}

const struct dcp_stored *dcp_stored_find(const struct dcp_metadata *m, uint32_t key,
                                         uint32_t start)
{
    uint32_t slot = m->nslots ? *find_slot(m, key, start) : 0;

    return slot ? &m->stored[m->index[slot - 1].stored] : NULL;
}

/* Keeps at least half of the slots free. */
static int grow_slots(struct dcp_metadata *m, struct err *e)
{
    size_t n = m->nslots ? m->nslots * 2 : 64;
    uint32_t *old = m->slot;

    if (m->nlinked < m->nslots / 2)
        return 0;
    m->slot = calloc(n, sizeof *m->slot);
    if (!m->slot) {
        m->slot = old;
        return err_nomem(e);
    }
    for (size_t i = 0, had = m->nslots; (m->nslots = n) && i < had; i++) {
        const struct dcp_index *index = old[i] ? &m->index[old[i] - 1] : NULL;

        if (index)
            *find_slot(m, index->key, index->start) = old[i];
    }
    free(old);
    return 0;
}

/* A pair of storage_data: {MetadataIndex: _StorageInfo}. */
static int take_stored(struct dcp_loader *l, const struct pv *key,
                       const struct pv *value, struct err *e)
{
    struct dcp_metadata *m = l->m;
    uint32_t at, *slot;

    if (!dcp_folded(key, DCP_FOLD_INDEX, &at) || m->index[at].key == DCP_NO_KEY) {
        m->skipped++;
        return 0;
    }
    TRY(dcp_stored_of(l, value, &m->index[at].stored, e));
    TRY(grow_slots(m, e));
    slot = find_slot(m, m->index[at].key, m->index[at].start);
    m->nlinked += *slot == 0;
    *slot = at + 1;
    return 0;
}

/* Wrappers that savers put round a whole state dict (CONTRACT.md, "Names"; AReaL: "dcp"). */
static uint32_t wrapper_of(const struct pv *path, const char *key, size_t len)
{
    static const char *const known[] = {"model", "module", "state_dict", "app", "dcp"};
    struct pv first;

    if (path->kind != PV_TUPLE || pv_count(path) < 2)
        return 0;
    first = pv_at(path, 0);
    for (size_t i = 0; i < ARRAY_SIZE(known); i++) {
        size_t n = strlen(known[i]);

        if (pv_str_is(&first, known[i]))
            return len > n && memcmp(key, known[i], n) == 0 && key[n] == '.'
                       ? (uint32_t)n + 1
                       : 0;
    }
    return 0;
}

/* What is known of the key, which is numbered when it is new. */
static struct dcp_key *key_of(struct dcp_loader *l, const struct pv *v,
                              uint32_t *number, struct err *e)
{
    uint32_t room;
    struct dcp_key *key;

    if (dcp_key_of(l, v, number, e) < 0)
        return NULL;
    if (*number >= l->keys) {
        room = l->m->names->keys.count + l->m->names->keys.count / 2 + 64;
        key = reallocarray(l->key, room, sizeof *key);
        if (!key) {
            err_nomem(e);
            return NULL;
        }
        memset(key + l->keys, 0, (room - l->keys) * sizeof *key);
        l->key = key;
        l->keys = room;
    }
    return &l->key[*number];
}

/* A pair of planner_data: {fqn: path}; other planners' data is ignored. */
static int take_path(struct dcp_loader *l, const struct pv *fqn, const struct pv *path,
                     struct err *e)
{
    struct dcp_key *key;
    const char *text;
    uint32_t number;
    size_t len;

    if (fqn->kind != PV_STR)
        return 0;
    key = key_of(l, fqn, &number, e);
    if (!key)
        return -e->code;
    text = pv_bytes(fqn, &len);
    key->wrapper = wrapper_of(path, text, len);
    return 0;
}

/*
 * A pair of Megatron Core's mcore_data: {key: {}}, or the shape of the tensor of which the
 * key's is a reformulation. A shape that cannot be read makes the tensor unreadable.
 */
static int take_whole(struct dcp_loader *l, const struct pv *fqn, const struct pv *data,
                      struct err *e)
{
    struct dcp_key *key;
    struct pv shape;
    uint32_t number, whole = DCP_BAD_SHAPE;

    if (fqn->kind != PV_STR)
        return 0;
    key = key_of(l, fqn, &number, e);
    if (!key)
        return -e->code;
    if (data->kind == PV_DICT &&
        !pv_dict_get(data, "nd_reformulated_orig_global_shape", &shape))
        return 0;
    if (data->kind == PV_DICT)
        TRY(dcp_shape_of(l, &shape, &whole, e));
    key->whole = (whole == DCP_NO_SHAPE ? DCP_BAD_SHAPE : whole) + 1;
    return 0;
}

/* A pair of state_dict_metadata: {fqn: TensorStorageMetadata or BytesStorageMetadata}. */
static int take_entry(struct dcp_loader *l, const struct pv *fqn,
                      const struct pv *value, struct err *e)
{
    struct dcp_entry entry = {0};
    struct dcp_key *key;

    if (fqn->kind != PV_STR) {
        l->m->skipped++;
        return 0;
    }
    key = key_of(l, fqn, &entry.key, e);
    if (!key || dcp_tensor_of(l, value, &entry.tensor, e) < 0)
        return -e->code;
    if (key->entry > 0) {
        l->m->entry[key->entry - 1] = entry;
        return 0;
    }
    TRY(dcp_add_entry(l, &entry, e));
    key->entry = l->m->nentries;
    return 0;
}

/* The first dict that has such pairs is taken to be the one; the root tells in the end. */
static bool claim(uintptr_t *claimed, uintptr_t dict)
{
    if (!*claimed)
        *claimed = dict;
    return *claimed == dict;
}

/*
 * Takes the pairs of the three large dicts as they are read, so that no dict of a million
 * entries is ever built.
 */
static int fold_pair(void *user, uintptr_t dict, const struct pv *key,
                     const struct pv *value, struct err *e)
{
    struct dcp_loader *l = user;
    struct pv first;
    uint32_t row;
    int r;

    if (dcp_folded(key, DCP_FOLD_INDEX, &row)) {
        r = claim(&l->storage, dict) ? take_stored(l, key, value, e) : 1;
    } else if (key->kind != PV_STR) {
        r = 1;
    } else if (dcp_folded(value, DCP_FOLD_TENSOR, &row) || dcp_is_object(value)) {
        r = claim(&l->state_dict, dict) ? take_entry(l, key, value, e) : 1;
    } else if (value->kind == PV_TUPLE && pv_count(value) > 0) {
        first =
            pv_at(value, 0); /* a path, not the numbers of a plain tuple as a size */
        r = first.kind == PV_STR && claim(&l->planner, dict)
                ? take_path(l, key, value, e)
                : 1;
    } else {
        r = 1;
    }
    return r < 0 ? r : !r;
}

/*
 * Every chunk of an honest file takes more than one byte of it, so this keeps all later
 * work in proportion to the file, whatever its memo multiplies.
 */
static int check_budget(const struct dcp_loader *l, struct err *e)
{
    const struct dcp_metadata *m = l->m;
    uint64_t chunks = 0;

    for (uint32_t i = 0; i < m->nentries; i++)
        if (m->entry[i].tensor != DCP_OBJECT)
            chunks += m->tensor[m->entry[i].tensor].count;
    if (chunks > l->bytes)
        return err_set(e, EBADMSG, "%" PRIu64 " chunks in a file of %" PRIu64 " bytes",
                       chunks, l->bytes);
    return 0;
}

/* Pairs that were taken from a dict that turned out to be another one. */
static void forget_entries(struct dcp_loader *l)
{
    l->m->nentries = 0;
    for (uint32_t i = 0; i < l->keys; i++)
        l->key[i].entry = 0;
}

static void forget_paths(struct dcp_loader *l)
{
    for (uint32_t i = 0; i < l->keys; i++)
        l->key[i].wrapper = 0;
}

static void forget_stored(struct dcp_loader *l)
{
    memset(l->m->slot, 0, l->m->nslots * sizeof *l->m->slot);
    l->m->nlinked = 0;
}

/* Was a pair of that name taken from the same dict? Which of them came later is lost. */
static bool is_taken(const struct dcp_loader *l, const struct pv *fqn)
{
    const char *text;
    uint32_t number;
    size_t len;

    if (fqn->kind != PV_STR)
        return false;
    text = pv_bytes(fqn, &len);
    return intern_find(&l->m->names->keys, text, len, &number) && number < l->keys &&
           l->key[number].entry > 0;
}

typedef int take_pair(struct dcp_loader *l, const struct pv *key,
                      const struct pv *value, struct err *e);

/* Takes what is left in one of the three dicts: all of it, or what was no usual pair. */
static int take_dict(struct dcp_loader *l, const struct pv *dict, take_pair *take,
                     struct err *e)
{
    if (take == take_entry && l->state_dict != pv_identity(dict))
        forget_entries(l);
    if (take == take_path && l->planner != pv_identity(dict))
        forget_paths(l);
    if (take == take_stored && l->storage != pv_identity(dict) && l->m->nslots)
        forget_stored(l);
    for (size_t i = 0, n = dict->kind == PV_DICT ? pv_count(dict) : 0; i < n; i++) {
        struct pv key = pv_key_at(dict, i), value = pv_value_at(dict, i);

        if (take == take_entry && is_taken(l, &key))
            return err_set(e, EBADMSG, "a tensor's name twice");
        TRY(take(l, &key, &value, e));
    }
    return 0;
}

static void keep_version(struct dcp_metadata *m, const struct pv *state)
{
    struct pv version;
    const char *text;
    size_t len;

    if (!pv_dict_get(state, "version", &version) || version.kind != PV_STR)
        return;
    text = pv_bytes(&version, &len);
    if (len < sizeof m->version && !memchr(text, '\0', len))
        memcpy(m->version, text, len);
}

/* What stands in Metadata's place, in words. */
static int no_metadata(const struct pv *root, struct err *e)
{
    struct pv class = root->kind == PV_OBJECT ? pv_class(root) : *root;
    const char *module, *name;
    size_t len;

    if (!pv_global(&class, &module, &name))
        return err_set(e, EBADMSG, "not the pickle of a DCP Metadata object");
    len = strlen(name);
    if (len >= 8 && strcmp(name + len - 8, "Metadata") == 0) {
        err_set(e, ENOTSUP, "the pickle of a %s.%s, not of torch's own Metadata",
                module, name);
        return err_hint(e, "a trainer's own kind of checkpoint that is not known here");
    }
    return err_set(e, EBADMSG, "not the pickle of a DCP Metadata object but of %s.%s",
                   module, name);
}

/* MCoreMetadata of 0.15 has mcore_data as a member, before it was put on a Metadata. */
static bool is_metadata(const struct pv *root)
{
    return root->kind == PV_OBJECT && (pv_is(root, METADATA_MODULE, "Metadata") ||
                                       pv_is(root, OLD_MODULE, "Metadata") ||
                                       pv_is(root, MCORE_MODULE, "MCoreMetadata"));
}

static void tell_entries(struct dcp_loader *l)
{
    for (uint32_t i = 0; i < l->m->nentries; i++) {
        struct dcp_entry *entry = &l->m->entry[i];

        entry->wrapper = l->key[entry->key].wrapper;
        entry->whole = l->key[entry->key].whole - 1; /* 0: DCP_NO_SHAPE */
    }
}

static int walk_root(struct dcp_loader *l, const struct pv *root, struct err *e)
{
    struct pv state, entries, paths = {0}, stored = {0}, whole = {0};

    if (!is_metadata(root))
        return no_metadata(root, e);
    state = pv_state(root);
    if (state.kind != PV_DICT ||
        !pv_dict_get(&state, "state_dict_metadata", &entries) ||
        entries.kind != PV_DICT)
        return err_set(e, EBADMSG, "a Metadata object without state_dict_metadata");
    pv_dict_get(&state, "planner_data", &paths);
    pv_dict_get(&state, "storage_data", &stored);
    pv_dict_get(&state, "mcore_data", &whole);
    TRY(take_dict(l, &entries, take_entry, e));
    TRY(take_dict(l, &paths, take_path, e));
    TRY(take_dict(l, &stored, take_stored, e));
    TRY(take_dict(l, &whole, take_whole, e));
    TRY(check_budget(l, e));
    tell_entries(l);
    keep_version(l->m, &state);
    return 0;
}

static int load(struct dcp_loader *l, struct source *s, struct err *e)
{
    struct pickle_options options = {
        .fold = dcp_folds,
        .nfold = dcp_nfolds,
        .fold_pair = fold_pair,
        .user = l,
        .limits = {.opcodes = MAX_OPCODES},
    };
    CLEANUP(pickle_freep) struct pickle *p = NULL;
    uint64_t used;
    struct pv root;

    TRY(pickle_load(s, 0, s->size, &options, &p, &used, e));
    if (used != s->size)
        return err_set(e, EBADMSG, "%" PRIu64 " bytes behind the pickle's end",
                       s->size - used);
    root = pickle_root(p);
    return walk_root(l, &root, e);
}

int dcp_metadata_load(struct source *s, struct dcp_names *names,
                      struct dcp_metadata **out, struct err *e)
{
    CLEANUP(dcp_metadata_freep) struct dcp_metadata *m = calloc(1, sizeof *m);
    struct dcp_loader l = {.m = m, .bytes = s->size};
    int r;

    if (!m)
        return err_nomem(e);
    m->names = names;
    r = load(&l, s, e);
    free(l.key);
    if (r == 0)
        *out = steal(&m);
    return r;
}

/* Reading the first opcodes of a pickle, for dcp_metadata_sniff(). */
struct sniff {
    const unsigned char *at, *end;
    const char *text[2]; /* the last two strings or lines */
    size_t len[2];
};

static bool sniff_take(struct sniff *s, size_t n)
{
    if ((size_t)(s->end - s->at) < n)
        return false;
    s->text[0] = s->text[1];
    s->len[0] = s->len[1];
    s->text[1] = (const char *)s->at;
    s->len[1] = n;
    s->at += n;
    return true;
}

static bool sniff_skip(struct sniff *s, size_t n)
{
    if ((size_t)(s->end - s->at) < n)
        return false;
    s->at += n;
    return true;
}

static bool sniff_line(struct sniff *s)
{
    const unsigned char *nl = memchr(s->at, '\n', (size_t)(s->end - s->at));

    return nl && sniff_take(s, (size_t)(nl - s->at)) && sniff_skip(s, 1);
}

enum sniffed { SNIFF_NO, SNIFF_MORE, SNIFF_GLOBAL };

/* One opcode; only those that may stand before the first global of a pickle. */
static enum sniffed sniff_step(struct sniff *s)
{
    size_t n;

    if (s->at == s->end)
        return SNIFF_NO;
    switch (*s->at++) {
    case 0x95: /* FRAME */
        return sniff_skip(s, 8) ? SNIFF_MORE : SNIFF_NO;
    case 0x94: /* MEMOIZE */
        return SNIFF_MORE;
    case 'q': /* BINPUT */
        return sniff_skip(s, 1) ? SNIFF_MORE : SNIFF_NO;
    case 'r': /* LONG_BINPUT */
        return sniff_skip(s, 4) ? SNIFF_MORE : SNIFF_NO;
    case 0x8c: /* SHORT_BINUNICODE */
        if (s->at == s->end)
            return SNIFF_NO;
        n = *s->at++;
        return sniff_take(s, n) ? SNIFF_MORE : SNIFF_NO;
    case 'c': /* GLOBAL */
        return sniff_line(s) && sniff_line(s) ? SNIFF_GLOBAL : SNIFF_NO;
    case 0x93: /* STACK_GLOBAL */
        return s->text[0] ? SNIFF_GLOBAL : SNIFF_NO;
    default:
        return SNIFF_NO;
    }
}

/* The first global of the pickle. */
static bool is_sniffed(const struct sniff *s, const char *module, const char *name)
{
    return s->len[0] == strlen(module) && memcmp(s->text[0], module, s->len[0]) == 0 &&
           s->len[1] == strlen(name) && memcmp(s->text[1], name, s->len[1]) == 0;
}

bool dcp_metadata_sniff(const void *head, size_t len, char *name, size_t size)
{
    const unsigned char *bytes = head;
    struct sniff s = {.at = bytes + 2, .end = bytes + len};
    enum sniffed r = SNIFF_MORE;

    name[0] = '\0';
    if (len < 2 || bytes[0] != 0x80 || bytes[1] < 2 || bytes[1] > 5)
        return false;
    while (r == SNIFF_MORE)
        r = sniff_step(&s);
    if (r == SNIFF_NO)
        return false;
    snprintf(name, size, "%.*s.%.*s", (int)MIN(s.len[0], size), s.text[0],
             (int)MIN(s.len[1], size), s.text[1]);
    return is_sniffed(&s, METADATA_MODULE, "Metadata") ||
           is_sniffed(&s, OLD_MODULE, "Metadata");
}
