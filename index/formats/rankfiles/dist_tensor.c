/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/dist_tensor.c - what DTensors and ShardedTensors have in common. */
#include "index/formats/rankfiles/dist_priv.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"

static bool is_distributed(const struct pv *class, const char *name)
{
    static const char package[] = "torch.distributed.";
    const char *module, *n;

    return class->kind == PV_GLOBAL && pv_global(class, &module, &n) &&
           strncmp(module, package, sizeof package - 1) == 0 && strcmp(n, name) == 0;
}

/* torch 2.5 moved DTensor to the package itself: "torch.distributed.tensor DTensor". */
bool dist_instance(const struct pv *v, const char *name)
{
    struct pv class;

    if (v->kind != PV_OBJECT)
        return false;
    class = pv_class(v);
    return is_distributed(&class, name);
}

bool dist_attribute(const struct pv *state, const char *name, struct pv *out)
{
    if (state->kind == PV_DICT)
        return pv_dict_get(state, name, out);
    if (state->kind != PV_TUPLE || pv_count(state) != 2)
        return false;
    for (size_t i = 2; i-- > 0;) {
        struct pv part = pv_at(state, i);

        if (part.kind == PV_DICT && pv_dict_get(&part, name, out))
            return true;
    }
    return false;
}

bool dist_member(const struct pv *object, const char *name, struct pv *out)
{
    struct pv state;

    if (object->kind != PV_OBJECT)
        return false;
    state = pv_state(object);
    return dist_attribute(&state, name, out);
}

bool dist_numbers(const struct pv *v, uint64_t *out, uint32_t max, uint32_t *n)
{
    struct pv list = *v;

    if (v->kind == PV_OBJECT && pv_is(v, "torch", "Size")) {
        struct pv args = pv_args(v);

        if (pv_count(&args) != 1)
            return false;
        list = pv_at(&args, 0);
    }
    if ((list.kind != PV_TUPLE && list.kind != PV_LIST) || pv_count(&list) > max)
        return false;
    *n = (uint32_t)pv_count(&list);
    for (uint32_t i = 0; i < *n; i++) {
        struct pv item = pv_at(&list, i);

        if (!pv_u64(&item, &out[i]))
            return false;
    }
    return true;
}

int dist_local(const struct dist_call *c, const struct pv *v, struct torch_tensor *out,
               struct shape *units, struct err *e)
{
    int rc = torch_zip_tensor(c->zip, v, out, e);

    if (rc < 0)
        return rc;
    if (rc == 0)
        return err_set(e, ENOTSUP, "its local part is no plain tensor");
    if (out->dtype != c->out->dtype)
        return err_set(e, EBADMSG, "its local part is %s, the whole %s",
                       dtype_name(out->dtype), dtype_name(c->out->dtype));
    return shape_units(&out->shape, out->dtype, units, e);
}

/* ---- which kind it is ---- */

enum kind { KIND_NONE, KIND_DTENSOR, KIND_SHARDED };

/* `call` is what rebuilds it; a parameter around it says nothing. */
static enum kind kind_of(const struct pv *v, struct pv *call)
{
    struct pv class, args, type;

    if (v->kind != PV_OBJECT)
        return KIND_NONE;
    class = pv_class(v);
    args = pv_args(v);
    if (class.kind != PV_GLOBAL ||
        !pv_is(&class, "torch._tensor", "_rebuild_from_type_v2") ||
        pv_count(&args) != 4)
        return KIND_NONE;
    *call = args;
    type = pv_at(&args, 1);
    if (is_distributed(&type, "DTensor"))
        return KIND_DTENSOR;
    return is_distributed(&type, "ShardedTensor") ? KIND_SHARDED : KIND_NONE;
}

bool dist_tensor_is(const struct pv *v)
{
    struct pv call;

    return kind_of(v, &call) != KIND_NONE;
}

/* (class, dtype, size, strides, storage offset, layout, device, requires_grad) */
static int read_whole(struct dist_call *c, struct err *e)
{
    struct pv dtype, size;
    struct shape *shape = &c->out->shape;
    uint64_t bytes;

    if (c->args.kind != PV_TUPLE || pv_count(&c->args) < 3)
        return err_set(e, EBADMSG, "a distributed tensor without a size");
    dtype = pv_at(&c->args, 1);
    size = pv_at(&c->args, 2);
    if (!dist_numbers(&size, shape->dim, SHAPE_MAX_DIMS, &shape->nd))
        return err_set(e, EBADMSG, "a distributed tensor of an impossible size");
    c->units = *shape;
    c->out->dtype = torch_dtype(&dtype);
    if (c->out->dtype == DTYPE_NONE)
        return err_set(e, ENOTSUP, "a distributed tensor of an unknown element type");
    /* torch counts pairs of these. */
    if (c->out->dtype == DTYPE_F4 &&
        (shape->nd == 0 ||
         mul_overflows(shape->dim[shape->nd - 1], 2, &shape->dim[shape->nd - 1]))) {
        c->out->dtype = DTYPE_NONE;
        return err_set(e, EBADMSG, "packed elements without a last dimension");
    }
    if (shape_bytes(shape, c->out->dtype, &bytes, e) == 0)
        return 0;
    c->out->dtype = DTYPE_NONE;
    return err_set(e, EBADMSG, "a distributed tensor of more than 2^63 bytes");
}

int dist_tensor_read(struct torch_zip *zip, const struct pv *v, struct dist_tensor *out,
                     dist_piece_fn *fn, void *user, struct err *e)
{
    struct dist_call c = {.zip = zip, .out = out, .fn = fn, .user = user};
    struct pv call, function;
    enum kind kind = kind_of(v, &call);
    int rc;

    *out = (struct dist_tensor){.dtype = DTYPE_NONE};
    if (kind == KIND_NONE)
        return 0;
    function = pv_at(&call, 0);
    if (function.kind != PV_GLOBAL ||
        !pv_is(&function, "torch._utils", "_rebuild_wrapper_subclass"))
        return err_set(e, ENOTSUP,
                       "a distributed tensor that is rebuilt in an unknown "
                       "way");
    c.args = pv_at(&call, 2);
    c.state = pv_at(&call, 3);
    rc = read_whole(&c, e);
    if (rc == 0)
        rc = kind == KIND_DTENSOR ? dtensor_read(&c, e) : sharded_tensor_read(&c, e);
    return rc < 0 ? rc : 1;
}
