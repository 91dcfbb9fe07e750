/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_paths.c - paths in the nested state dict, told from dotted keys. */
#include <string.h>

#include "base/err.h"
#include "base/keyset.h"
#include "index/formats/dcp/dcp_write.h"
#include "index/formats/pickle/pickle_write.h"

/*
 * DCP flattens a nested state dict to dotted keys and keeps the paths in planner_data, for
 * those who want it nested again (dcp_to_torch_save). Here only keys are known. What they
 * tell, as torch's own state dicts have it (torch/distributed/checkpoint/state_dict.py):
 *
 *     model.layers.0.weight                   (model, layers.0.weight): a wrapper
 *     optim.state.layers.0.weight.exp_avg     (optim, state, layers.0.weight, exp_avg)
 *     optim.param_groups.0.lr                 (optim, param_groups, 0, lr)
 *     optim.param_groups.layers.0.weight.lr   (optim, param_groups.layers.0.weight.lr), and
 *                                             all else of optim so: it was saved flat
 *     lr_scheduler.last_epoch                 (lr_scheduler, last_epoch)
 *
 * and everything else is one part. Where this would make one key a dict and a value, all
 * are one part.
 */
struct dcp_paths {
    struct keyset names; /* of the model's tensors */
    bool flat;           /* nothing is nested */
    bool flat_optimizer;
};

enum { MAX_PARTS = 8 };

/* A key cut at dots: ends of parts, and which part is an index of a list. */
struct cut {
    size_t end[MAX_PARTS];
    unsigned parts;
    int index; /* the part that is a number; -1: none */
};

static const char param_groups[] = ".param_groups.", state[] = ".state.";

static const char *find(const char *key, size_t len, const char *what)
{
    return memmem(key, len, what, strlen(what));
}

static void add_part(struct cut *c, size_t end)
{
    if (c->parts < MAX_PARTS)
        c->end[c->parts++] = end;
}

/* Digits that Python's str() of an int gives, up to the next dot. */
static size_t list_index(const char *text, size_t len)
{
    size_t n = 0;

    while (n < len && text[n] >= '0' && text[n] <= '9')
        n++;
    return n > 0 && n < 6 && n < len && text[n] == '.' && (text[0] != '0' || n == 1)
               ? n
               : 0;
}

/* X.param_groups.0.lr; -1: it is none. */
static bool cut_group(const char *key, size_t len, struct cut *c)
{
    const char *at = find(key, len, param_groups);
    size_t head, digits;

    if (!at || memchr(key, '.', (size_t)(at - key)))
        return false;
    head = (size_t)(at - key) + strlen(param_groups);
    digits = list_index(key + head, len - head);
    if (!digits)
        return false;
    add_part(c, (size_t)(at - key));
    add_part(c, head - 1);
    c->index = (int)c->parts;
    add_part(c, head + digits);
    add_part(c, len);
    return true;
}

/* X.state.NAME.S, where NAME is the model's. */
static bool cut_state(const struct dcp_paths *p, const char *key, size_t len,
                      struct cut *c)
{
    const char *at = find(key, len, state), *dot = memrchr(key, '.', len);
    size_t head;

    if (!at || memchr(key, '.', (size_t)(at - key)))
        return false;
    head = (size_t)(at - key) + strlen(state);
    if (dot <= key + head ||
        !keyset_has(&p->names, key + head, (size_t)(dot - key) - head))
        return false;
    add_part(c, (size_t)(at - key));
    add_part(c, head - 1);
    add_part(c, (size_t)(dot - key));
    add_part(c, len);
    return true;
}

static void cut_key(const struct dcp_paths *p, const char *key, size_t len,
                    size_t wrapper, bool model, struct cut *c)
{
    const char *dot = memchr(key, '.', len);

    *c = (struct cut){.index = -1};
    if (!p->flat && wrapper > 1 && wrapper < len && key[wrapper - 1] == '.')
        add_part(c, wrapper - 1);
    if (!p->flat && !model && !wrapper) {
        if (!p->flat_optimizer && (cut_group(key, len, c) || cut_state(p, key, len, c)))
            return;
        if (dot && dot > key && dot < key + len - 1)
            add_part(c, (size_t)(dot - key));
    }
    add_part(c, len);
}

static void cut_tensor(const struct dcp_paths *p, const struct layout_tensor *t,
                       struct cut *c)
{
    cut_key(p, t->key, t->key_len, t->wrapper, t->role == ROLE_MODEL, c);
}

/* ---- conflicts ---- */

/* Could a part's own path be another one's value? Then that key is among all keys. */
static bool meets(const struct keyset *keys, const char *key, const struct cut *c)
{
    for (unsigned i = 0; i + 1 < c->parts; i++)
        if (keyset_has(keys, key, c->end[i]))
            return true;
    return false;
}

static int add_keys(const struct dcp_writing *w, struct dcp_paths *p,
                    struct keyset *keys)
{
    for (size_t i = 0; i < w->cut.count; i++) {
        const struct layout_tensor *t = &w->in->tensor[w->cut.chosen[i]];

        if (keyset_add(keys, t->key, t->key_len) < 0)
            return -1;
        if (t->role == ROLE_MODEL &&
            keyset_add(&p->names, t->key + t->wrapper, t->key_len - t->wrapper) < 0)
            return -1;
    }
    for (size_t i = 0; i < w->objects; i++) {
        const struct layout_object *o = &w->in->object[w->object[i]];
        const char *at = find(o->key, o->key_len, param_groups);
        size_t head = at ? (size_t)(at - o->key) + strlen(param_groups) : 0;

        if (keyset_add(keys, o->key, o->key_len) < 0)
            return -1;
        if (at && !list_index(o->key + head, o->key_len - head))
            p->flat_optimizer = true;
    }
    return 0;
}

static bool any_meets(const struct dcp_writing *w, const struct dcp_paths *p,
                      const struct keyset *keys)
{
    struct cut c;

    for (size_t i = 0; i < w->cut.count; i++) {
        const struct layout_tensor *t = &w->in->tensor[w->cut.chosen[i]];

        cut_tensor(p, t, &c);
        if (meets(keys, t->key, &c))
            return true;
    }
    for (size_t i = 0; i < w->objects; i++) {
        const struct layout_object *o = &w->in->object[w->object[i]];

        cut_key(p, o->key, o->key_len, 0, false, &c);
        if (meets(keys, o->key, &c))
            return true;
    }
    return false;
}

int dcp_paths_new(const struct dcp_writing *w, struct dcp_paths **out, struct err *e)
{
    CLEANUP(keyset_release) struct keyset keys = {0};
    struct dcp_paths *p = calloc(1, sizeof *p);

    if (!p)
        return err_nomem(e);
    *out = p;
    if (add_keys(w, p, &keys) < 0)
        return err_nomem(e);
    p->flat = any_meets(w, p, &keys);
    return 0;
}

void dcp_paths_free(struct dcp_paths *p)
{
    if (!p)
        return;
    keyset_release(&p->names);
    free(p);
}

/* ---- as a tuple ---- */

static void put_path(struct pickler *p, const char *key, const struct cut *c)
{
    size_t at = 0;

    pickle_mark(p);
    for (unsigned i = 0; i < c->parts; i++) {
        if ((int)i == c->index)
            pickle_int(p, strtol(key + at, NULL, 10));
        else
            pickle_text(p, key + at, c->end[i] - at);
        at = c->end[i] + 1;
    }
    pickle_tuple(p);
}

void dcp_path_tensor(const struct dcp_writing *w, const struct layout_tensor *t,
                     struct pickler *p)
{
    struct cut c;

    cut_tensor(w->paths, t, &c);
    put_path(p, t->key, &c);
}

void dcp_path_object(const struct dcp_writing *w, const struct layout_object *o,
                     struct pickler *p)
{
    struct cut c;

    cut_key(w->paths, o->key, o->key_len, 0, false, &c);
    put_path(p, o->key, &c);
}
