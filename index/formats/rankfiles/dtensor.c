/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/dtensor.c - the box that a DTensor's placements give a rank. */
#include "index/formats/rankfiles/dist_priv.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"

/* Ranks of a mesh; keeps sums with it within 64 bits. */
static const uint64_t MAX_RANKS = UINT64_C(1) << 32;

/* A DTensorSpec that is read. */
struct spec {
    struct mesh_axis axis[MESH_MAX_AXES];
    uint32_t naxes;
    bool strided; /* some placement is */
    bool outside; /* the rank is not of the mesh */
    uint32_t order[MESH_MAX_AXES], norder;
};

/* ---- the mesh ---- */

/* The sizes of one axis of a layout multiply: a number, or a tuple of them. */
static bool axis_size(const struct pv *v, uint64_t *out)
{
    uint64_t part[MESH_MAX_AXES];
    uint32_t n;

    if (pv_u64(v, out))
        return true;
    if (!dist_numbers(v, part, MESH_MAX_AXES, &n))
        return false;
    *out = 1;
    for (uint32_t i = 0; i < n; i++)
        if (mul_overflows(*out, part[i], out))
            return false;
    return true;
}

/*
 * torch 2.9: a layout with a shape, an item an axis; 2.15: with axes, each of which has a
 * shape.
 */
static bool layout_sizes(const struct pv *layout, struct dist_mesh *out)
{
    struct pv axes, shape, item;
    bool nested = dist_member(layout, "axes", &axes);

    if (!nested && !dist_member(layout, "shape", &axes))
        return false;
    if (axes.kind == PV_INT) { /* one axis */
        out->naxes = 1;
        return axis_size(&axes, &out->size[0]);
    }
    if ((axes.kind != PV_TUPLE && axes.kind != PV_LIST) ||
        pv_count(&axes) > MESH_MAX_AXES)
        return false;
    out->naxes = (uint32_t)pv_count(&axes);
    for (uint32_t i = 0; i < out->naxes; i++) {
        item = pv_at(&axes, i);
        if (nested && !dist_member(&item, "shape", &shape))
            return false;
        if (!axis_size(nested ? &shape : &item, &out->size[i]))
            return false;
    }
    return true;
}

/* Until torch 2.8: the shape of the tensor of its ranks. */
static bool tensor_sizes(struct torch_zip *zip, const struct pv *ranks,
                         struct dist_mesh *out)
{
    struct torch_tensor x;
    struct err ignored = {0};

    if (torch_zip_tensor(zip, ranks, &x, &ignored) != 1 || x.shape.nd > MESH_MAX_AXES)
        return false;
    out->naxes = x.shape.nd;
    memcpy(out->size, x.shape.dim, x.shape.nd * sizeof *out->size);
    return true;
}

/* For people only: what is too long or no name is left out. */
static void mesh_names(const struct pv *mesh, struct dist_mesh *out)
{
    struct pv names, name;
    const char *text;
    size_t len;

    if (!dist_member(mesh, "_mesh_dim_names", &names) &&
        !dist_member(mesh, "mesh_dim_names", &names))
        return;
    if ((names.kind != PV_TUPLE && names.kind != PV_LIST) ||
        pv_count(&names) != out->naxes)
        return;
    for (uint32_t i = 0; i < out->naxes; i++) {
        name = pv_at(&names, i);
        if (name.kind != PV_STR)
            continue;
        text = pv_bytes(&name, &len);
        if (len < DIST_MAX_NAME)
            memcpy(out->name[i], text, len);
    }
}

static int read_sizes(const struct dist_call *c, const struct pv *mesh, struct err *e)
{
    struct dist_mesh *out = &c->out->mesh;
    struct pv v;
    bool known;

    if (dist_member(mesh, "_layout", &v))
        known = layout_sizes(&v, out);
    else
        known = (dist_member(mesh, "mesh", &v) || dist_member(mesh, "_mesh", &v)) &&
                tensor_sizes(c->zip, &v, out);
    if (!known) {
        out->naxes = 0;
        return err_set(e, ENOTSUP, "a device mesh of an unknown kind");
    }
    for (uint32_t i = 0; i < out->naxes; i++)
        if (out->size[i] == 0 || out->size[i] > MAX_RANKS)
            return err_set(e, EBADMSG,
                           "axis %" PRIu32 " of the device mesh has %" PRIu64 " ranks",
                           i, out->size[i]);
    mesh_names(mesh, out);
    return 0;
}

/*
 * The file's own coordinate: what place the rank has on this mesh its number does not
 * tell, for a tensor may lie on a part of the mesh alone.
 */
static int read_mesh(const struct dist_call *c, const struct pv *mesh, struct spec *s,
                     struct err *e)
{
    uint64_t at[MESH_MAX_AXES];
    struct pv v;
    uint32_t n = 0;

    if (!dist_instance(mesh, "DeviceMesh"))
        return err_set(e, ENOTSUP, "a distributed tensor on no device mesh");
    TRY(read_sizes(c, mesh, e));
    s->naxes = c->out->mesh.naxes;
    if (!dist_member(mesh, "_coordinate_on_dim", &v))
        return err_set(e, ENOTSUP, "a device mesh that does not tell the rank's place");
    s->outside = v.kind == PV_NONE;
    if (s->outside)
        return 0;
    if (!dist_numbers(&v, at, MESH_MAX_AXES, &n) || n != s->naxes)
        return err_set(e, EBADMSG, "a place in the device mesh of another rank");
    for (uint32_t i = 0; i < n; i++) {
        s->axis[i].size = c->out->mesh.size[i];
        s->axis[i].at = at[i];
    }
    return 0;
}

/* ---- placements ---- */

static int bad_placement(const struct pv *v, struct err *e)
{
    struct pv class = v->kind == PV_OBJECT ? pv_class(v) : *v;
    const char *module = "", *name = "nothing known";

    pv_global(&class, &module, &name);
    err_set(e, ENOTSUP, "its placement is %.100s", name);
    return err_hint(e, "Shard, _StridedShard and Replicate are supported");
}

static int read_placement(const struct pv *v, struct mesh_axis *out, struct err *e)
{
    bool strided = dist_instance(v, "_StridedShard");
    struct pv value;
    uint64_t dim;

    out->cut = MESH_REPLICATE;
    if (dist_instance(v, "Replicate"))
        return 0;
    if (!strided && !dist_instance(v, "Shard"))
        return bad_placement(v, e);
    out->cut = strided ? MESH_STRIDED : MESH_SHARD;
    if (!dist_member(v, "dim", &value) || !pv_u64(&value, &dim) ||
        dim >= SHAPE_MAX_DIMS)
        return err_set(e, EBADMSG, "a placement without a dimension");
    out->dim = (uint32_t)dim;
    if (strided && (!dist_member(v, "split_factor", &value) ||
                    !pv_u64(&value, &out->split) || out->split == 0))
        return err_set(e, EBADMSG, "a strided placement without a split factor");
    return 0;
}

static int read_placements(const struct pv *spec, struct spec *s, struct err *e)
{
    struct pv list, item;

    if (!dist_member(spec, "placements", &list) ||
        (list.kind != PV_TUPLE && list.kind != PV_LIST))
        return err_set(e, EBADMSG, "a distributed tensor without placements");
    if (pv_count(&list) != s->naxes)
        return err_set(e, EBADMSG, "%zu placements on a mesh of %" PRIu32 " axes",
                       pv_count(&list), s->naxes);
    for (uint32_t i = 0; i < s->naxes; i++) {
        item = pv_at(&list, i);
        TRY(read_placement(&item, &s->axis[i], e));
        s->strided |= s->axis[i].cut == MESH_STRIDED;
    }
    return 0;
}

/* ---- the order of cuts ---- */

/* One ShardOrderEntry: (dimension of the tensor, axes in the order of their cuts). */
static bool add_entry(const struct pv *entry, struct spec *s)
{
    struct pv args, value;
    uint64_t dim, axis[MESH_MAX_AXES];
    uint32_t n = 0;

    args = entry->kind == PV_OBJECT ? pv_args(entry) : *entry;
    if (args.kind != PV_TUPLE || pv_count(&args) != 2)
        return false;
    value = pv_at(&args, 0);
    if (!pv_u64(&value, &dim))
        return false;
    value = pv_at(&args, 1);
    if (!dist_numbers(&value, axis, MESH_MAX_AXES, &n))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        if (axis[i] >= s->naxes || s->axis[axis[i]].cut != MESH_SHARD ||
            s->axis[axis[i]].dim != dim || s->norder == MESH_MAX_AXES)
            return false;
        s->order[s->norder++] = (uint32_t)axis[i];
    }
    return true;
}

/* Is every axis that cuts in the order once? */
static bool is_whole_order(const struct spec *s)
{
    uint32_t seen = 0, cuts = 0;

    for (uint32_t i = 0; i < s->naxes; i++)
        if (s->axis[i].cut != MESH_REPLICATE)
            cuts |= UINT32_C(1) << i;
    for (uint32_t i = 0; i < s->norder; i++) {
        if (seen & UINT32_C(1) << s->order[i])
            return false;
        seen |= UINT32_C(1) << s->order[i];
    }
    return seen == cuts;
}

/* Late versions write the order down where no placement is strided. */
static int read_order(const struct pv *spec, struct spec *s, struct err *e)
{
    struct pv list, entry;

    if (!dist_member(spec, "shard_order", &list) || list.kind == PV_NONE)
        return mesh_cut_order(s->axis, s->naxes, s->order, &s->norder, e);
    if (s->strided) /* of a view: each rank has pieces from all over the dimension */
        return err_set(e, ENOTSUP, "a strided shard that does not tell an order");
    if (list.kind != PV_TUPLE && list.kind != PV_LIST)
        return err_set(e, EBADMSG, "an order of shards that is no list");
    for (size_t i = 0; i < pv_count(&list); i++) {
        entry = pv_at(&list, i);
        if (!add_entry(&entry, s))
            return err_set(e, EBADMSG, "an order of shards that is not of its mesh");
    }
    if (!is_whole_order(s))
        return err_set(e, EBADMSG, "an order of shards that is not of its placements");
    return 0;
}

/* ---- the piece ---- */

static bool same_numbers(const uint64_t *a, const uint64_t *b, uint32_t n)
{
    return n == 0 || memcmp(a, b, n * sizeof *a) == 0;
}

/* TensorMeta(size, strides, dtype), where it is there, says the same size again. */
static int check_meta(const struct dist_call *c, const struct pv *spec, struct err *e)
{
    uint64_t dim[SHAPE_MAX_DIMS];
    struct pv meta, args, size;
    uint32_t nd = 0;

    if (!dist_member(spec, "tensor_meta", &meta) || meta.kind != PV_OBJECT)
        return 0;
    args = pv_args(&meta);
    if (pv_count(&args) == 0)
        return 0;
    size = pv_at(&args, 0);
    if (!dist_numbers(&size, dim, SHAPE_MAX_DIMS, &nd) || nd != c->units.nd ||
        !same_numbers(dim, c->units.dim, nd))
        return err_set(e, EBADMSG, "its size is told twice, and not the same");
    return 0;
}

static int add_piece(const struct dist_call *c, const struct spec *s, struct err *e)
{
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS];
    struct torch_tensor x;
    struct shape units;
    struct pv local;

    TRY(mesh_cut_box(&c->units, s->axis, s->order, s->norder, start, size, e));
    if (!dist_attribute(&c->state, "_local_tensor", &local))
        return err_set(e, EBADMSG, "a distributed tensor without a local part");
    TRY(dist_local(c, &local, &x, &units, e));
    if (units.nd != c->units.nd || !same_numbers(units.dim, size, units.nd))
        return err_set(e, EBADMSG,
                       "its local part has another size than its placements give");
    return c->fn(c->user, &x, start, e);
}

int dtensor_read(struct dist_call *c, struct err *e)
{
    struct spec s = {0};
    struct pv spec, mesh;

    if (!dist_attribute(&c->state, "_spec", &spec) ||
        !dist_instance(&spec, "DTensorSpec") || !dist_member(&spec, "mesh", &mesh))
        return err_set(e, ENOTSUP, "a DTensor of an unknown kind");
    TRY(check_meta(c, &spec, e));
    TRY(read_mesh(c, &mesh, &s, e));
    if (s.outside)
        return 0;
    TRY(read_placements(&spec, &s, e));
    TRY(read_order(&spec, &s, e));
    return add_piece(c, &s, e);
}
