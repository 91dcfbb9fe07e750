/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle_memo.c - the memo, which keeps only what is fetched again. */
#include "index/formats/pickle/pickle_priv.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"

/*
 * Picklers number memo entries in order, one opcode each, so an honest number is less
 * than the bytes before it: those are bits of an array that is never larger than an eighth
 * of the pickle. Others (any 32 bits) go to a hash table.
 */
enum {
    WORD = 64,
    RANK_WORDS = 8, /* words a rank entry */
    FIRST_SPARSE = 64,
    PV_UNSET = 255 /* kind of a slot that was not put yet */
};

static bool dense_has(const struct pidset *s, uint32_t id)
{
    return id / WORD < s->words && (s->bits[id / WORD] >> id % WORD & 1);
}

static int dense_add(struct pidset *s, uint32_t id, struct err *e)
{
    size_t word = id / WORD;

    if (word >= s->words) {
        size_t words = MAX(word + 1, s->words * 2);
        uint64_t *bits;

        words = (words + RANK_WORDS - 1) / RANK_WORDS * RANK_WORDS;
        bits = realloc(s->bits, words * sizeof *bits);
        if (!bits)
            return err_nomem(e);
        memset(bits + s->words, 0, (words - s->words) * sizeof *bits);
        s->bits = bits;
        s->words = words;
    }
    s->bits[word] |= UINT64_C(1) << id % WORD;
    return 1;
}

/* Position of `id` or of the empty place for it; the table is never full. */
static size_t sparse_find(const uint32_t *table, size_t cap, uint32_t id)
{
    size_t i = (id * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (cap - 1);

    while (table[i] && table[i] != id)
        i = (i + 1) & (cap - 1);
    return i;
}

static bool sparse_has(const struct pidset *s, uint32_t id)
{
    return s->sparse_used > 0 && s->sparse[sparse_find(s->sparse, s->sparse_cap, id)];
}

static int sparse_add(struct pidset *s, uint32_t id, struct err *e)
{
    if (s->sparse_used >= s->sparse_cap / 2) {
        size_t cap = MAX(s->sparse_cap * 2, (size_t)FIRST_SPARSE);
        uint32_t *table = calloc(cap, sizeof *table);

        if (!table)
            return err_nomem(e);
        for (size_t i = 0; i < s->sparse_cap; i++) {
            if (s->sparse[i])
                table[sparse_find(table, cap, s->sparse[i])] = s->sparse[i];
        }
        free(s->sparse);
        s->sparse = table;
        s->sparse_cap = cap;
    }
    s->sparse[sparse_find(s->sparse, s->sparse_cap, id)] = id;
    s->sparse_used++;
    return 1;
}

int pidset_add(struct pidset *s, uint32_t id, uint64_t at, struct err *e)
{
    if (dense_has(s, id) || sparse_has(s, id))
        return 0;
    if (id <= at) /* 0 is always here, so that it can mean "empty" there */
        return dense_add(s, id, e);
    return sparse_add(s, id, e);
}

void pidset_release(struct pidset *s)
{
    free(s->bits);
    free(s->sparse);
    free(s->rank);
    *s = (struct pidset){0};
}

int pmemo_freeze(struct pmemo *m, struct err *e)
{
    struct pidset *s = &m->fetched;
    size_t groups = s->words / RANK_WORDS;

    s->rank = malloc(MAX(groups, (size_t)1) * sizeof *s->rank);
    if (!s->rank)
        return err_nomem(e);
    for (size_t g = 0; g < groups; g++) {
        s->rank[g] = (uint32_t)s->ndense;
        for (size_t w = g * RANK_WORDS; w < (g + 1) * RANK_WORDS; w++)
            s->ndense += (size_t)__builtin_popcountll(s->bits[w]);
    }
    m->nslots = s->ndense + s->sparse_cap;
    m->slot = malloc(MAX(m->nslots, (size_t)1) * sizeof *m->slot);
    if (!m->slot)
        return err_nomem(e);
    for (size_t i = 0; i < m->nslots; i++)
        m->slot[i] = (struct pv){.kind = PV_UNSET};
    return 0;
}

static struct pv *slot_of(const struct pmemo *m, uint32_t id)
{
    const struct pidset *s = &m->fetched;
    size_t n, i;

    if (dense_has(s, id)) {
        n = s->rank[id / WORD / RANK_WORDS];
        for (size_t w = id / WORD / RANK_WORDS * RANK_WORDS; w < id / WORD; w++)
            n += (size_t)__builtin_popcountll(s->bits[w]);
        n += (size_t)__builtin_popcountll(s->bits[id / WORD] &
                                          ((UINT64_C(1) << id % WORD) - 1));
        return &m->slot[n];
    }
    if (s->sparse_used == 0)
        return NULL;
    i = sparse_find(s->sparse, s->sparse_cap, id);
    return s->sparse[i] ? &m->slot[s->ndense + i] : NULL;
}

int pmemo_put(struct pickle *p, struct pmemo *m, uint64_t id, uint64_t at, struct pv v,
              struct err *e)
{
    struct pv *slot, old;
    int added;

    if (id > UINT32_MAX)
        return err_set(e, EBADMSG, "memo entry %" PRIu64, id);
    added = pidset_add(&m->put, (uint32_t)id, at, e);
    if (added < 0)
        return added;
    m->count += (uint64_t)added;
    slot = slot_of(m, (uint32_t)id);
    if (!slot)
        return 0;
    old = *slot;
    *slot = pv_ref(v);
    if (old.kind != PV_UNSET)
        pv_unref(p, old);
    return 0;
}

bool pmemo_get(struct pickle *p, struct pmemo *m, uint64_t id, struct pv *out)
{
    struct pv *slot = id > UINT32_MAX ? NULL : slot_of(m, (uint32_t)id), v;

    if (!slot || slot->kind == PV_UNSET)
        return false;
    v = pv_norm(*slot);
    if (v.kind == PV_RECORD) { /* an object that was folded since: let its node go */
        pv_unref(p, *slot);
        *slot = v;
    }
    *out = pv_ref(v);
    return true;
}

void pmemo_release(struct pickle *p, struct pmemo *m)
{
    for (size_t i = 0; p && i < m->nslots; i++) {
        if (m->slot[i].kind != PV_UNSET)
            pv_unref(p, m->slot[i]);
    }
    free(m->slot);
    pidset_release(&m->fetched);
    pidset_release(&m->put);
    *m = (struct pmemo){0};
}
