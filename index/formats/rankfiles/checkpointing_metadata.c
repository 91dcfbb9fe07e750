/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/checkpointing_metadata.c - who holds which boxes, as metadata.pkl tells. */
#include "index/formats/rankfiles/checkpointing_metadata.h"

#include <errno.h>
#include <math.h>
#include <search.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/json.h"
#include "base/keyset.h"
#include "index/formats/rankfiles/dist_tensor.h"
#include "index/formats/rankfiles/mesh_cut.h"
#include "index/formats/torch/torch_zip.h"

enum { MAX_PATH_TEXT = 64 << 10 };

/* A list of ranks that was read, by the identity of its node: many tensors share one. */
struct known_ranks {
    uintptr_t node;
    struct checkpointing_ranks ranks;
};

struct reader {
    struct arena *arena;
    uint64_t budget; /* entries that an honest file of this size can have */
    void *known;     /* tsearch: struct known_ranks */
};

static bool is_list(const struct pv *v)
{
    return v->kind == PV_LIST || v->kind == PV_TUPLE;
}

static bool get(const struct pv *dict, const char *key, struct pv *out)
{
    return dict->kind == PV_DICT && pv_dict_get(dict, key, out);
}

static bool get_list(const struct pv *dict, const char *key, struct pv *out)
{
    return get(dict, key, out) && is_list(out);
}

static int spend(struct reader *r, uint64_t entries, struct err *e)
{
    if (entries > r->budget)
        return err_set(e, EFBIG,
                       "too many entries for its size: references multiply them");
    r->budget -= entries;
    return 0;
}

/* ---- ranks ---- */

static int compare_known(const void *a, const void *b)
{
    const struct known_ranks *x = a, *y = b;

    return (x->node > y->node) - (x->node < y->node);
}

static int compare_ranks(const void *a, const void *b)
{
    const struct checkpointing_rank *x = a, *y = b;

    return (x->rank > y->rank) - (x->rank < y->rank);
}

static int fill_ranks(struct reader *r, const struct pv *list,
                      struct checkpointing_ranks *out, struct err *e)
{
    size_t n = pv_count(list);

    TRY(spend(r, n, e));
    out->rank = arena_array(r->arena, n + 1, sizeof *out->rank);
    if (!out->rank)
        return err_nomem(e);
    out->count = n;
    for (size_t i = 0; i < n; i++) {
        struct pv item = pv_at(list, i);
        uint64_t rank;

        if (!pv_u64(&item, &rank) || rank >= CHECKPOINTING_MAX_RANKS)
            return err_set(e, EBADMSG, "a list of ranks with something else in it");
        out->rank[i].rank = (uint32_t)rank;
        out->rank[i].at = (uint32_t)i;
    }
    if (n > 0)
        qsort(out->rank, n, sizeof *out->rank, compare_ranks);
    for (size_t i = 1; i < n; i++)
        if (out->rank[i - 1].rank == out->rank[i].rank)
            return err_set(e, EBADMSG, "rank %" PRIu32 " is twice in a list of ranks",
                           out->rank[i].rank);
    return 0;
}

static int read_ranks(struct reader *r, const struct pv *list,
                      const struct checkpointing_ranks **out, struct err *e)
{
    struct known_ranks want = {.node = pv_identity(list)}, *made;
    struct known_ranks *const *found = tfind(&want, &r->known, compare_known);

    if (found) {
        *out = &(*found)->ranks;
        return 0;
    }
    made = arena_alloc(r->arena, sizeof *made);
    if (!made)
        return err_nomem(e);
    made->node = want.node;
    TRY(fill_ranks(r, list, &made->ranks, e));
    if (!tsearch(made, &r->known, compare_known))
        return err_nomem(e);
    *out = &made->ranks;
    return 0;
}

static const struct checkpointing_rank *
find_rank(const struct checkpointing_ranks *ranks, uint32_t rank)
{
    const struct checkpointing_rank want = {.rank = rank};

    return ranks->count > 0
               ? bsearch(&want, ranks->rank, ranks->count, sizeof want, compare_ranks)
               : NULL;
}

bool checkpointing_has_rank(const struct checkpointing_ranks *ranks, uint32_t rank)
{
    return find_rank(ranks, rank) != NULL;
}

/* ---- paths ---- */

/* A key or position as Python's str() spells it; false for what is neither. */
static bool add_part(const struct json *v, struct buf *b)
{
    const char *text;
    double number;
    bool truth;

    if (json_string(v, &text))
        buf_adds(b, text);
    else if (json_bool(v, &truth))
        buf_adds(b, truth ? "True" : "False");
    else if (json_double(v, &number) && fabs(number) < 9e15 && number == trunc(number))
        buf_addf(b, "%.0f", number);
    else
        return false;
    return true;
}

/* "[\"layers\",0,\"weight\"]": "layers.0.weight", as its own reader joins them. */
static int read_path(struct reader *r, const struct pv *key,
                     struct checkpointing_path *out, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP(buf_release) struct buf b = {.max = MAX_PATH_TEXT};
    struct err why = {0};
    const char *text;
    size_t len;

    if (key->kind != PV_STR)
        return err_set(e, EBADMSG, "a path that is no text");
    text = pv_bytes(key, &len);
    if (json_parse(text, len, NULL, &doc, &why) < 0 || json_kind(doc) != JSON_ARRAY) {
        if (why.code == ENOMEM)
            return err_nomem(e);
        return err_set(e, EBADMSG, "path %.*s is no JSON list", (int)MIN(len, 100),
                       text);
    }
    for (const struct json *item = json_first(doc); item; item = json_next(item)) {
        if (item != json_first(doc))
            buf_addc(&b, '.');
        if (!add_part(item, &b))
            return err_set(e, EBADMSG, "path %.*s has more than keys and positions",
                           (int)MIN(len, 100), text);
    }
    if (b.failed == EFBIG)
        return err_set(e, EBADMSG, "a path of more than %d bytes", MAX_PATH_TEXT);
    if (buf_failed(&b))
        return err_nomem(e);
    out->path = arena_memdup(r->arena, b.data ? b.data : "", b.len);
    out->len = b.len;
    return out->path ? 0 : err_nomem(e);
}

static int read_group(struct reader *r, const struct pv *v,
                      struct checkpointing_group *out, struct err *e)
{
    struct pv ranks, data, mesh, list;

    if (!get(v, "sharding_metadata", &out->sharding) || !get_list(v, "ranks", &ranks))
        return err_set(e, EBADMSG, "metadata without its ranks");
    TRY(read_ranks(r, &ranks, &out->ranks, e));
    if (!get(&out->sharding, "data", &data) || !get(&data, "mesh_spec", &mesh) ||
        !get_list(&mesh, "mesh_data", &list))
        return 0; /* told where it is asked for */
    return read_ranks(r, &list, &out->mesh, e);
}

static int read_groups(struct reader *r, const struct pv *list,
                       struct checkpointing_path *out, struct err *e)
{
    if (!is_list(list))
        return err_set(e, EBADMSG, "metadata that are no list of groups");
    TRY(spend(r, pv_count(list), e));
    out->groups = pv_count(list);
    out->group = arena_array(r->arena, out->groups + 1, sizeof *out->group);
    if (!out->group)
        return err_nomem(e);
    for (size_t i = 0; i < out->groups; i++) {
        struct pv v = pv_at(list, i);

        if (read_group(r, &v, &out->group[i], e) < 0)
            return err_wrap(e, "%.200s", out->path);
    }
    return 0;
}

static int compare_paths(const void *a, const void *b)
{
    const struct checkpointing_path *x = a, *y = b;
    int r = memcmp(x->path, y->path, MIN(x->len, y->len));

    return r ? r : (x->len > y->len) - (x->len < y->len);
}

static int read_paths(struct reader *r, const struct pv *dict,
                      struct checkpointing_item *out, struct err *e)
{
    if (dict->kind != PV_DICT)
        return err_set(e, EBADMSG, "its paths are no dict");
    TRY(spend(r, pv_count(dict), e));
    out->paths = pv_count(dict);
    out->path = arena_array(r->arena, out->paths + 1, sizeof *out->path);
    if (!out->path)
        return err_nomem(e);
    for (size_t i = 0; i < out->paths; i++) {
        struct pv key = pv_key_at(dict, i), list = pv_value_at(dict, i);

        TRY(read_path(r, &key, &out->path[i], e));
        TRY(read_groups(r, &list, &out->path[i], e));
    }
    if (out->paths > 0)
        qsort(out->path, out->paths, sizeof *out->path, compare_paths);
    for (size_t i = 1; i < out->paths; i++)
        if (compare_paths(&out->path[i - 1], &out->path[i]) == 0)
            out->path[i - 1].twice = out->path[i].twice = true;
    return 0;
}

const struct checkpointing_path *
checkpointing_find(const struct checkpointing_item *item, const char *path, size_t len)
{
    const struct checkpointing_path want = {.path = path, .len = len};

    return item->paths > 0
               ? bsearch(&want, item->path, item->paths, sizeof want, compare_paths)
               : NULL;
}

/* ---- files ---- */

static enum checkpointing_format format_of(const struct pv *layout)
{
    struct pv format, type;

    if (!get(layout, "serialization_format", &format) || !get(&format, "type", &type))
        return CHECKPOINTING_OTHER;
    if (pv_str_is(&type, "TorchSerialization"))
        return CHECKPOINTING_TORCH;
    if (pv_str_is(&type, "SafetensorsSerialization"))
        return CHECKPOINTING_SAFETENSORS;
    return CHECKPOINTING_OTHER;
}

static int read_layout(struct reader *r, const struct pv *v,
                       struct checkpointing_file *out, struct err *e)
{
    struct pv path;
    const char *text;
    size_t len;

    if (v->kind == PV_NONE)
        return 0;
    if (!get(v, "file_path", &path) || path.kind != PV_STR)
        return err_set(e, EBADMSG, "a layout without a file");
    text = pv_bytes(&path, &len);
    if (len == 0 || memchr(text, '\0', len))
        return err_set(e, EBADMSG, "a layout whose file has no name");
    out->format = format_of(v);
    out->path = arena_memdup(r->arena, text, len);
    return out->path ? 0 : err_nomem(e);
}

/* Exactly one entry for each rank: its own reader refuses all else. */
static int read_files(struct reader *r, const struct pv *dict, uint32_t world,
                      struct checkpointing_item *out, struct err *e)
{
    if (dict->kind != PV_DICT || pv_count(dict) != world)
        return err_set(e, EBADMSG, "not each of %" PRIu32 " ranks has a layout", world);
    TRY(spend(r, world, e));
    out->file = arena_array(r->arena, (size_t)world + 1, sizeof *out->file);
    if (!out->file)
        return err_nomem(e);
    /* Keys of a dict differ, so that as many as ranks below it are all of them. */
    for (uint32_t i = 0; i < world; i++) {
        struct pv key = pv_key_at(dict, i), v = pv_value_at(dict, i);
        uint64_t rank;

        if (!pv_u64(&key, &rank) || rank >= world)
            return err_set(e, EBADMSG, "a layout of a rank that is not below %" PRIu32,
                           world);
        TRY(read_layout(r, &v, &out->file[rank], e));
    }
    return 0;
}

/* ---- items ---- */

static bool is_item_name(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        char c = text[i];

        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
              (c >= 'A' && c <= 'Z') || c == '-' || c == '_'))
            return false;
    }
    return len > 0;
}

static int read_item(struct reader *r, const struct pv *key, const struct pv *v,
                     uint32_t world, struct checkpointing_item *out, struct err *e)
{
    struct pv paths, files;
    const char *text;
    size_t len;

    if (key->kind != PV_STR)
        return err_set(e, EBADMSG, "an item whose name is no text");
    text = pv_bytes(key, &len);
    if (!is_item_name(text, len))
        return err_set(e, EBADMSG, "an item whose name is no part of a file's");
    out->key = arena_memdup(r->arena, text, len);
    if (!out->key)
        return err_nomem(e);
    if (!get(v, "nested_path_to_metadata", &paths) ||
        !get(v, "rank_to_layout_info", &files))
        return err_set(e, EBADMSG, "item %s without paths or layouts", out->key);
    if (read_files(r, &files, world, out, e) < 0 || read_paths(r, &paths, out, e) < 0)
        return err_wrap(e, "item %s", out->key);
    return 0;
}

/* No two ranks or items may have one file, as its own reader wants it. */
static int check_files(const struct checkpointing_metadata *m, struct err *e)
{
    CLEANUP(keyset_release) struct keyset seen = {0};

    for (size_t i = 0; i < m->items; i++) {
        for (uint32_t k = 0; k < m->world; k++) {
            const char *path = m->item[i].file[k].path;
            int r = path ? keyset_add(&seen, path, strlen(path)) : 1;

            if (r < 0)
                return err_nomem(e);
            if (r == 0)
                return err_set(e, EBADMSG, "two ranks or items have the file %.200s",
                               path);
        }
    }
    return 0;
}

static int read_all(struct reader *r, const struct pv *root,
                    struct checkpointing_metadata *out, struct err *e)
{
    struct pv items, version, v;
    uint64_t world;

    if (!get(root, "metadata", &items) || items.kind != PV_DICT ||
        !get(root, "world_size", &v) || !pv_u64(&v, &world))
        return err_set(e, EBADMSG, "it is no metadata of torch_checkpointing");
    if (!get(root, "version", &version) || !pv_str_is(&version, "2.0")) {
        err_set(e, ENOTSUP, "its version is not 2.0");
        return err_hint(e, "torch_checkpointing 0.1.1 writes 2.0: load it there, and "
                           "save it again");
    }
    if (world == 0 || world > CHECKPOINTING_MAX_RANKS)
        return err_set(e, world ? EFBIG : EBADMSG,
                       "%" PRIu64 " ranks: there may be up to %d", world,
                       CHECKPOINTING_MAX_RANKS);
    out->world = (uint32_t)world;
    out->items = pv_count(&items);
    out->item = arena_array(r->arena, out->items + 1, sizeof *out->item);
    if (!out->item)
        return err_nomem(e);
    for (size_t i = 0; i < out->items; i++) {
        struct pv key = pv_key_at(&items, i);

        v = pv_value_at(&items, i);
        TRY(read_item(r, &key, &v, out->world, &out->item[i], e));
    }
    return check_files(out, e);
}

static void keep_node(void *p)
{
    (void)p; /* in the arena */
}

int checkpointing_metadata_read(const struct pv *root, uint64_t len, struct arena *a,
                                struct checkpointing_metadata *out, struct err *e)
{
    struct reader r = {.arena = a, .budget = len};

    *out = (struct checkpointing_metadata){0};
    if (read_all(&r, root, out, e) < 0)
        *out = (struct checkpointing_metadata){0};
    out->len = out->boxes = len;
    tdestroy(r.known, keep_node);
    return -e->code;
}

/* ---- one rank's part ---- */

static bool get_numbers(const struct pv *dict, const char *key, uint64_t *out,
                        uint32_t max, uint32_t *n)
{
    struct pv list;

    return get(dict, key, &list) && dist_numbers(&list, out, max, n);
}

/* "torch.float32" */
static int read_dtype(const struct pv *data, enum dtype *out, struct err *e)
{
    static const char prefix[] = "torch.";
    const size_t skip = sizeof prefix - 1;
    char name[64] = "";
    struct pv v;
    const char *text;
    size_t len;

    *out = DTYPE_NONE;
    if (!get(data, "dtype", &v) || v.kind != PV_STR)
        return err_set(e, EBADMSG, "metadata without a type");
    text = pv_bytes(&v, &len);
    if (len > skip && len - skip < sizeof name && memcmp(text, prefix, skip) == 0) {
        memcpy(name, text + skip, len - skip);
        *out = torch_dtype_of_name(name);
    }
    if (*out == DTYPE_NONE)
        return err_set(e, ENOTSUP, "metadata tell an unknown type");
    if (dtype_bits(*out) % 8 != 0)
        return err_set(e, ENOTSUP, "its elements share bytes");
    return 0;
}

static int read_whole(const struct pv *data, struct checkpointing_part *out,
                      struct err *e)
{
    uint64_t bytes;

    if (!get_numbers(data, "global_shape", out->whole.dim, SHAPE_MAX_DIMS,
                     &out->whole.nd))
        return err_set(e, EBADMSG, "metadata without the shape of the whole");
    TRY(read_dtype(data, &out->dtype, e));
    return shape_bytes(&out->whole, out->dtype, &bytes, e);
}

/* `count` boxes of zeros. */
static int new_boxes(struct arena *a, size_t count, uint32_t nd, struct rank_boxes *out,
                     uint64_t **numbers, struct err *e)
{
    struct rank_box *box = arena_array(a, count + 1, sizeof *box);

    *numbers = arena_array(a, (count + 1) * 3, ((size_t)nd + 1) * sizeof **numbers);
    if (!box || !*numbers)
        return err_nomem(e);
    for (size_t i = 0; i < count; i++) {
        box[i].from = *numbers + i * 3 * nd;
        box[i].to = box[i].from + nd;
        box[i].size = box[i].to + nd;
    }
    *out = (struct rank_boxes){.nd = nd, .count = count, .box = box};
    return 0;
}

/* ---- DTensorShardingMetadata ---- */

static int read_placement(const struct pv *v, struct mesh_axis *out, struct err *e)
{
    struct pv type, value;
    uint64_t dim;

    if (!get(v, "type", &type))
        return err_set(e, EBADMSG, "a placement without a type");
    out->cut = MESH_REPLICATE;
    if (pv_str_is(&type, "Replicate"))
        return 0;
    if (pv_str_is(&type, "StridedShard"))
        out->cut = MESH_STRIDED;
    else if (pv_str_is(&type, "Shard"))
        out->cut = MESH_SHARD;
    else
        return err_set(e, ENOTSUP, "a placement of an unknown type");
    if (!get(v, "dim", &value) || !pv_u64(&value, &dim) || dim >= SHAPE_MAX_DIMS)
        return err_set(e, EBADMSG, "a placement without a dimension");
    out->dim = (uint32_t)dim;
    if (out->cut == MESH_STRIDED && (!get(v, "split_factor", &value) ||
                                     !pv_u64(&value, &out->split) || out->split == 0))
        return err_set(e, EBADMSG, "a strided placement without a split factor");
    return 0;
}

/* The rank's place on the mesh, whose ranks are listed row-major. */
static int read_mesh(const struct pv *data, const struct checkpointing_group *g,
                     uint32_t rank, struct mesh_axis *axis, uint32_t *naxes,
                     struct err *e)
{
    uint64_t size[MESH_MAX_AXES], all = 1, at;
    const struct checkpointing_rank *place;
    struct pv mesh;

    if (!g->mesh || !get(data, "mesh_spec", &mesh) ||
        !get_numbers(&mesh, "mesh_shape", size, MESH_MAX_AXES, naxes))
        return err_set(e, EBADMSG, "metadata without a device mesh");
    for (uint32_t i = 0; i < *naxes; i++)
        if (mul_overflows(all, size[i], &all))
            return err_set(e, EBADMSG, "a device mesh of more ranks than it lists");
    place = find_rank(g->mesh, rank);
    if (all != g->mesh->count || !place)
        return err_set(e, EBADMSG,
                       "a device mesh that lists other ranks than it has, or not "
                       "rank %" PRIu32,
                       rank);
    at = place->at;
    for (uint32_t i = *naxes; i-- > 0; at /= size[i]) {
        axis[i].size = size[i];
        axis[i].at = at % size[i];
    }
    return 0;
}

static int dtensor_part(const struct pv *data, const struct checkpointing_group *g,
                        uint32_t rank, struct arena *a, struct checkpointing_part *out,
                        struct err *e)
{
    struct mesh_axis axis[MESH_MAX_AXES] = {0};
    uint32_t naxes = 0, order[MESH_MAX_AXES], n = 0;
    uint64_t *box;
    struct pv list;

    TRY(read_mesh(data, g, rank, axis, &naxes, e));
    if (!get_list(data, "placements", &list) || pv_count(&list) != naxes)
        return err_set(e, EBADMSG, "not one placement for each axis of the mesh");
    for (uint32_t i = 0; i < naxes; i++) {
        struct pv v = pv_at(&list, i);

        TRY(read_placement(&v, &axis[i], e));
    }
    TRY(mesh_cut_order(axis, naxes, order, &n, e));
    TRY(new_boxes(a, 1, out->whole.nd, &out->boxes, &box, e));
    out->exact = true;
    return mesh_cut_box(&out->whole, axis, order, n, box + out->whole.nd,
                        box + 2 * (size_t)out->whole.nd, e);
}

/* ---- default_tensor_v1 ---- */

static int read_box(const struct checkpointing_part *p, const struct pv *from,
                    const struct pv *to, const struct pv *size, uint64_t *box,
                    struct err *e)
{
    const struct pv *lists[] = {from, to, size};
    uint32_t nd = p->whole.nd, n;

    for (size_t i = 0; i < ARRAY_SIZE(lists); i++) {
        uint64_t number[SHAPE_MAX_DIMS];

        if (!dist_numbers(lists[i], number, SHAPE_MAX_DIMS, &n) || n != nd)
            return err_set(e, EBADMSG, "a shard of other than %" PRIu32 " dimensions",
                           nd);
        if (nd > 0)
            memcpy(box + i * nd, number, nd * sizeof *number);
    }
    for (uint32_t k = 0; k < nd; k++)
        if (range_outside(box[nd + k], box[2 * (size_t)nd + k], p->whole.dim[k]))
            return err_set(e, EBADMSG, "a shard that is not within the whole");
    return 0;
}

static int shards_part(struct checkpointing_metadata *m, const struct pv *data,
                       uint32_t rank, struct arena *a, struct checkpointing_part *out,
                       struct err *e)
{
    struct pv to, from, size;
    uint64_t *box;
    size_t n;

    if (!get_list(data, "global_offsets", &to) ||
        !get_list(data, "local_offsets", &from) ||
        !get_list(data, "local_sizes", &size) || pv_count(&to) != pv_count(&from) ||
        pv_count(&to) != pv_count(&size))
        return err_set(e, EBADMSG, "metadata of shards that are not of one number");
    n = pv_count(&to);
    if (rank != m->rank)
        m->boxes = m->len;
    m->rank = rank;
    if (n > m->boxes)
        return err_set(e, EFBIG,
                       "too many shards for its size: references multiply them");
    m->boxes -= n;
    TRY(new_boxes(a, n, out->whole.nd, &out->boxes, &box, e));
    for (size_t i = 0; i < n; i++) {
        struct pv f = pv_at(&from, i), t = pv_at(&to, i), s = pv_at(&size, i);

        TRY(read_box(out, &f, &t, &s, box + i * 3 * out->whole.nd, e));
    }
    return 0;
}

int checkpointing_part(struct checkpointing_metadata *m,
                       const struct checkpointing_path *p, uint32_t rank,
                       struct arena *a, struct checkpointing_part *out, struct err *e)
{
    const struct checkpointing_group *g = NULL;
    struct pv type, data;

    *out = (struct checkpointing_part){.dtype = DTYPE_NONE};
    if (p->twice)
        return err_set(e, EBADMSG, "two paths of metadata.pkl give this name");
    for (size_t i = 0; i < p->groups; i++) {
        if (!find_rank(p->group[i].ranks, rank))
            continue;
        if (g)
            return err_set(e, EBADMSG, "rank %" PRIu32 " has two kinds of metadata",
                           rank);
        g = &p->group[i];
    }
    if (!g)
        return 0;
    if (!get(&g->sharding, "type", &type) || !get(&g->sharding, "data", &data))
        return err_set(e, EBADMSG, "metadata without a type or data");
    if (!pv_str_is(&type, "DTensorShardingMetadata") &&
        !pv_str_is(&type, "default_tensor_v1"))
        return err_set(e, ENOTSUP, "metadata of an unknown kind");
    TRY(read_whole(&data, out, e));
    if (pv_str_is(&type, "DTensorShardingMetadata")) {
        TRY(dtensor_part(&data, g, rank, a, out, e));
        return 1;
    }
    TRY(shards_part(m, &data, rank, a, out, e));
    return 1;
}
