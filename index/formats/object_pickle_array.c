/* SPDX-License-Identifier: MIT */
/* index/formats/object_pickle_array.c - NumPy arrays of objects.json as pickles again. */
#include <string.h>

#include "base/json.h"
#include "index/formats/object_pickle.h"

/* dtype(code, align, copy), then (version, byte order, ..., itemsize, alignment, flags). */
static bool put_dtype(struct pickler *p, const char *type)
{
    static const char orders[] = "<>|", kinds[] = "biufc";
    const char order[] = {*type, '\0'};

    if (strlen(type) < 3 || strlen(type) > 4 || !strchr(orders, type[0]) ||
        !strchr(kinds, type[1]) || strspn(type + 2, "12468") != strlen(type + 2))
        return false;
    pickle_global(p, "numpy", "dtype");
    pickle_mark(p);
    pickle_string(p, type + 1);
    pickle_bool(p, false);
    pickle_bool(p, true);
    pickle_tuple(p);
    pickle_reduce(p);
    pickle_mark(p);
    pickle_int(p, 3);
    pickle_string(p, order);
    for (int i = 0; i < 3; i++)
        pickle_none(p);
    pickle_int(p, -1);
    pickle_int(p, -1);
    pickle_int(p, 0);
    pickle_tuple(p);
    pickle_build(p);
    return true;
}

static bool put_shape(struct pickler *p, const struct json *shape)
{
    uint64_t n;

    if (!shape || json_kind(shape) != JSON_ARRAY)
        return false;
    pickle_mark(p);
    for (const struct json *dim = json_first(shape); dim; dim = json_next(dim)) {
        if (!json_u64(dim, &n) || n > INT64_MAX)
            return false;
        pickle_int(p, (int64_t)n);
    }
    pickle_tuple(p);
    return true;
}

static void put_empty(struct pickler *p)
{
    pickle_global(p, "numpy._core.multiarray", "_reconstruct");
    pickle_mark(p);
    pickle_global(p, "numpy", "ndarray");
    pickle_mark(p);
    pickle_int(p, 0);
    pickle_tuple(p);
    pickle_bytes(p, "b", 1);
    pickle_tuple(p);
    pickle_reduce(p);
}

/* As NumPy 2 spells it; 1.26 knows that name of the module too. */
bool object_pickle_array(struct pickler *p, const struct json *v)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    const char *type, *data;
    bool fortran = false;

    if (!json_string(json_get(v, "dtype"), &type) ||
        !json_string(json_get(v, "data"), &data) || !object_base64(data, &bytes) ||
        buf_failed(&bytes))
        return false;
    json_bool(json_get(v, "fortran_order"), &fortran);
    put_empty(p);
    pickle_mark(p);
    pickle_int(p, 1);
    if (!put_shape(p, json_get(v, "shape")) || !put_dtype(p, type))
        return false;
    pickle_bool(p, fortran);
    pickle_bytes(p, bytes.data, bytes.len);
    pickle_tuple(p);
    pickle_build(p);
    return true;
}
