/* SPDX-License-Identifier: MIT */
/* lib/hold_table.c - which parts of tensors lie where in device memory, and what may go. */
#include "lib/hold.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/vec.h"
#include "lib/client.h"

enum {
    BLOCK_BYTES = 256 << 20,   /* small tensors share blocks of this size */
    RESERVE_BYTES = 512 << 20, /* of the device, for others */
    ALIGN = 256,
};

/*
 * Device memory that goes as a whole, to clients and away. Its entries lie one behind the
 * other; nothing in it is ever freed by itself.
 */
struct hold_block {
    struct hold_block *next;
    struct device_block memory;
    uint64_t number, used;
    unsigned refs; /* clients that map it, and loads into it */
    uint64_t last; /* the tick of its last use */
};

/* The checkpoint as it was at one time. */
struct edition {
    struct unshard *u;
    unsigned refs;
};

enum entry_state { ENTRY_LOADING, ENTRY_READY };

struct entry {
    struct entry *next;
    enum entry_state state;
    struct hold_block *block;
    uint64_t offset;
    struct unshard_result result;
    struct edition *edition;
    size_t tensor;
    bool boxed;
    uint64_t start[UNSHARD_DIMENSIONS], count[UNSHARD_DIMENSIONS];
};

struct hold_table {
    struct hold_options options;
    struct device *device;
    uint64_t budget;
    pthread_mutex_t lock; /* for all below */
    pthread_cond_t changed;
    struct edition *edition; /* the newest */
    struct hold_block *blocks;
    struct entry *entries;
    uint64_t held, ticks, numbers; /* held: bytes of all blocks */
};

const struct device_info *hold_table_device(const struct hold_table *t)
{
    return device_info_of(t->device);
}

uint64_t hold_block_number(const struct hold_block *b)
{
    return b->number;
}

uint64_t hold_block_size(const struct hold_block *b)
{
    return b->memory.size;
}

/* ---- editions ---- */

static void edition_put(struct edition *x)
{
    if (!x || --x->refs)
        return;
    unshard_close(x->u);
    free(x);
}

static int edition_open(const struct hold_options *o, struct edition **out,
                        struct err *e)
{
    char words[UNSHARD_ERROR];
    struct edition *x = calloc(1, sizeof *x);
    int ret;

    if (!x)
        return err_nomem(e);
    ret = unshard_open(o->source, o->options, &x->u, words);
    if (ret < 0) {
        free(x);
        return err_set(e, -ret, "%s", words);
    }
    if (!x->u->origin->ops->current) { /* whether it is still that, nobody can tell */
        unshard_close(x->u);
        free(x);
        err_set(e, ENOTSUP, "%s is in a mount", o->source);
        return err_hint(e, "hold what it is a mount of");
    }
    x->refs = 1;
    *out = x;
    return 0;
}

/* With the lock held. */
static void drop_entries(struct hold_table *t, const struct hold_block *of,
                         const struct edition *other_than)
{
    for (struct entry **at = &t->entries; *at;) {
        struct entry *n = *at;

        if (n->state == ENTRY_LOADING ||
            (of ? n->block != of : n->edition == other_than)) {
            at = &n->next;
            continue;
        }
        *at = n->next;
        edition_put(n->edition);
        free(n);
    }
}

/*
 * The checkpoint as it is now, with a reference: when another stands there than was opened,
 * what was loaded of that one is given to nobody any more.
 */
static int newest_edition(struct hold_table *t, struct edition **out, struct err *e)
{
    struct edition *x, *fresh = NULL;
    int ret;

    pthread_mutex_lock(&t->lock);
    x = t->edition;
    x->refs++;
    pthread_mutex_unlock(&t->lock);
    ret = x->u->origin->ops->current(x->u->origin, e);
    if (ret == -ESTALE) {
        *e = (struct err){0};
        ret = edition_open(&t->options, &fresh, e);
    }
    pthread_mutex_lock(&t->lock);
    if (fresh && t->edition == x) {
        edition_put(t->edition);
        t->edition = fresh;
        fresh = NULL;
        drop_entries(t, NULL, t->edition);
    }
    edition_put(fresh); /* another thread was faster */
    edition_put(x);
    *out = t->edition;
    t->edition->refs += ret == 0;
    pthread_mutex_unlock(&t->lock);
    return ret;
}

/* ---- blocks ---- */

static void free_block(struct hold_table *t, struct hold_block *b)
{
    struct hold_block **at = &t->blocks;

    while (*at != b)
        at = &(*at)->next;
    *at = b->next;
    drop_entries(t, b, NULL);
    t->held -= b->memory.size;
    device_block_release(t->device, &b->memory);
    free(b);
}

/* Frees the block that nobody uses for the longest time; false: all are in use. */
static bool evict_one(struct hold_table *t)
{
    struct hold_block *oldest = NULL;

    for (struct hold_block *b = t->blocks; b; b = b->next)
        if (!b->refs && (!oldest || b->last < oldest->last))
            oldest = b;
    if (oldest)
        free_block(t, oldest);
    return oldest;
}

static int new_block(struct hold_table *t, uint64_t size, struct hold_block **out,
                     struct err *e)
{
    struct hold_block *b;
    int ret = 0;

    while (size > t->budget || t->held > t->budget - size)
        if (!evict_one(t))
            return err_set(e, ENOSPC,
                           "%" PRIu64 " bytes do not fit: %" PRIu64 " of %" PRIu64
                           " are held and in use",
                           size, t->held, t->budget);
    b = calloc(1, sizeof *b);
    if (!b)
        return err_nomem(e);
    do /* others may have filled the device meanwhile */
        ret = device_block_new(t->device, size, &b->memory, e);
    while (ret == -ENOMEM && evict_one(t));
    if (ret < 0) {
        free(b);
        return ret;
    }
    b->number = ++t->numbers;
    b->next = t->blocks;
    t->blocks = b;
    t->held += b->memory.size;
    *out = b;
    return 0;
}

/* Room for a result, in a block that has it, or in a new one. */
static int find_room(struct hold_table *t, uint64_t bytes, struct hold_block **out,
                     struct err *e)
{
    uint64_t shared = MIN((uint64_t)BLOCK_BYTES, t->budget / 8);

    for (struct hold_block *b = t->blocks; b; b = b->next)
        if (b->memory.size - b->used >= bytes) {
            *out = b;
            return 0;
        }
    return new_block(t, MAX(bytes, shared), out, e);
}

/* ---- entries ---- */

static bool is_same(const struct entry *n, const struct edition *x,
                    const struct unshard_part *p, const struct unshard_result *r)
{
    size_t box = sizeof *n->start * r->nd;

    return n->edition == x && n->tensor == p->tensor &&
           !strcmp(n->result.dtype, r->dtype) && n->boxed == !!p->start &&
           (!n->boxed ||
            (!memcmp(n->start, p->start, box) && !memcmp(n->count, p->count, box)));
}

static struct entry *find_entry(struct hold_table *t, const struct edition *x,
                                const struct unshard_part *p,
                                const struct unshard_result *r)
{
    struct entry *n = t->entries;

    while (n && !is_same(n, x, p, r))
        n = n->next;
    return n;
}

/* An entry that is about to be loaded, in its block, which is kept meanwhile. */
static int add_entry(struct hold_table *t, struct edition *x,
                     const struct unshard_part *p, const struct unshard_result *r,
                     struct entry **out, struct err *e)
{
    struct entry *n = calloc(1, sizeof *n);
    int ret = n ? find_room(t, r->bytes, &n->block, e) : err_nomem(e);

    if (ret < 0) {
        free(n);
        return ret;
    }
    n->result = *r;
    n->tensor = p->tensor;
    n->boxed = p->start;
    if (n->boxed) {
        memcpy(n->start, p->start, r->nd * sizeof *n->start);
        memcpy(n->count, p->count, r->nd * sizeof *n->count);
    }
    n->edition = x;
    x->refs++;
    n->offset = n->block->used;
    n->block->used += MIN((r->bytes + ALIGN - 1) / ALIGN * ALIGN,
                          n->block->memory.size - n->block->used);
    n->block->refs++;
    n->next = t->entries;
    t->entries = n;
    *out = n;
    return 0;
}

static void remove_entry(struct hold_table *t, struct entry *n)
{
    struct entry **at = &t->entries;

    while (*at != n)
        at = &(*at)->next;
    *at = n->next;
    edition_put(n->edition);
    free(n);
}

/* Fills the entry, without the lock. */
static int load_entry(struct hold_table *t, const struct entry *n,
                      const struct unshard_part *part, struct err *e)
{
    struct unshard_part p = *part;
    char words[UNSHARD_ERROR];
    int ret;

    p.address = n->block->memory.address + n->offset;
    p.bytes = n->result.bytes;
    ret =
        unshard_load(n->edition->u, &p, 1, t->options.device, NULL, NULL, NULL, words);
    return ret < 0 ? err_set(e, -ret, "%s", words) : 0;
}

/* ---- clients ---- */

static int note_block(struct hold_client *c, struct hold_block *b, bool *first,
                      struct err *e)
{
    for (size_t i = 0; i < c->n; i++)
        if (c->block[i] == b) {
            *first = false;
            return 0;
        }
    if (!VEC_ROOM(c->block, c->n, c->cap))
        return err_nomem(e);
    c->block[c->n++] = b;
    b->refs++;
    *first = true;
    return 0;
}

/* The entry, once it is there. With the lock held; it is let go of meanwhile. */
static int settle(struct hold_table *t, struct edition *x, const struct unshard_part *p,
                  const struct unshard_result *r, struct entry **out, struct err *e)
{
    struct entry *n;
    int ret;

    while ((n = find_entry(t, x, p, r)) && n->state == ENTRY_LOADING)
        pthread_cond_wait(&t->changed, &t->lock);
    *out = n;
    if (n)
        return 0;
    TRY(add_entry(t, x, p, r, &n, e));
    pthread_mutex_unlock(&t->lock);
    ret = load_entry(t, n, p, e);
    pthread_mutex_lock(&t->lock);
    n->block->refs--;
    n->state = ENTRY_READY;
    pthread_cond_broadcast(&t->changed);
    if (ret < 0)
        remove_entry(t, n);
    *out = n;
    return ret;
}

static int get_from(struct hold_table *t, struct hold_client *c, struct edition *x,
                    const struct unshard_part *part, struct hold_place *out,
                    struct err *e)
{
    char words[UNSHARD_ERROR];
    struct entry *n;
    int ret = unshard_measure(x->u, part, &out->result, words);

    if (ret < 0)
        return err_set(e, -ret, "%s", words);
    pthread_mutex_lock(&t->lock);
    ret = settle(t, x, part, &out->result, &n, e);
    if (ret == 0)
        ret = note_block(c, n->block, &out->first, e);
    if (ret == 0) {
        out->block = n->block;
        out->offset = n->offset;
        n->block->last = ++t->ticks;
    }
    pthread_mutex_unlock(&t->lock);
    return ret;
}

/* Of a box in fewer dimensions the others would be taken for empty. */
static int check_box(const struct edition *x, const struct unshard_part *p, uint32_t nd,
                     struct err *e)
{
    struct unshard_tensor t = {0};

    if (!p->start || unshard_tensor(x->u, p->tensor, &t) < 0 || t.nd == nd)
        return 0;
    return err_set(e, EINVAL, "%s: a box of %u dimensions, the tensor has %u", t.key,
                   nd, t.nd);
}

int hold_table_get(struct hold_table *t, struct hold_client *c, const char *key,
                   size_t key_len, const struct unshard_part *part, uint32_t nd,
                   struct hold_place *out, struct err *e)
{
    struct unshard_part p = *part;
    struct edition *x;
    int ret = newest_edition(t, &x, e);

    if (ret < 0)
        return ret;
    *out = (struct hold_place){0};
    if (unshard_find(x->u, key, key_len, &p.tensor) < 0)
        ret = err_set(e, ENOENT, "%s: no tensor %.*s", t->options.source, (int)key_len,
                      key);
    else
        ret = check_box(x, &p, nd, e);
    if (ret == 0)
        ret = get_from(t, c, x, &p, out, e);
    pthread_mutex_lock(&t->lock);
    edition_put(x);
    pthread_mutex_unlock(&t->lock);
    return ret;
}

int hold_table_export(struct hold_table *t, const struct hold_block *b, int *fd,
                      struct err *e)
{
    return device_block_export(t->device, &b->memory, fd, e);
}

void hold_client_release(struct hold_table *t, struct hold_client *c)
{
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < c->n; i++)
        c->block[i]->refs--;
    pthread_mutex_unlock(&t->lock);
    free(c->block);
    *c = (struct hold_client){0};
}

/* ---- the whole ---- */

static int take_budget(struct hold_table *t, struct err *e)
{
    uint64_t room, total, most;

    TRY(device_memory(t->device, &room, &total, e));
    most = room > 2 * (uint64_t)RESERVE_BYTES ? room - RESERVE_BYTES : room / 2;
    if (t->options.budget > most) {
        err_set(e, ENOSPC,
                "a budget of %" PRIu64 " bytes: the device has %" PRIu64
                " free, and some are for others",
                t->options.budget, room);
        return err_hint(e, "%" PRIu64 " at most", most);
    }
    t->budget = t->options.budget ? t->options.budget : most;
    return 0;
}

/* Can its memory be shared at all? Better told now than to the first client. */
static int try_block(struct hold_table *t, struct err *e)
{
    struct device_block b;
    int ret = device_block_new(t->device, 1, &b, e);

    if (ret == 0)
        device_block_release(t->device, &b);
    return ret;
}

int hold_table_new(const struct hold_options *o, struct hold_table **out, struct err *e)
{
    const struct device_options device = {.ordinal = o->device};
    struct hold_table *t = calloc(1, sizeof *t);
    int ret;

    if (!t)
        return err_nomem(e);
    t->options = *o;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->changed, NULL);
    ret = edition_open(o, &t->edition, e);
    if (ret == 0)
        ret = device_open(&device, &t->device, e);
    if (ret == 0)
        ret = take_budget(t, e);
    if (ret == 0)
        ret = try_block(t, e);
    if (ret < 0)
        hold_table_free(t);
    else
        *out = t;
    return ret;
}

void hold_table_free(struct hold_table *t)
{
    if (!t)
        return;
    while (t->blocks)
        free_block(t, t->blocks);
    device_close(t->device);
    edition_put(t->edition);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t);
}
