/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_listed.c - tensorstore_index.json, which lists the arrays of a directory. */
#include "index/formats/zarr/zarr_listed.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"

/* eformer/serialization/serialization.py 0.0.101 writes this member first. */
bool zarr_is_listed(const char *head, size_t len)
{
    return memmem(head, len, "\"format\"", 8) &&
           memmem(head, len, "\"tensorstore\"", 13);
}

/* [{"path": "model/norm/scale", "shape": [6], "dtype": "float32"}, ...] */
static int each_of(const struct json *list, zarr_listed_fn *fn, void *user,
                   struct err *e)
{
    if (json_kind(list) != JSON_ARRAY)
        return err_set(e, EBADMSG, "arrays that are no list");
    for (const struct json *v = json_first(list); v; v = json_next(v)) {
        const char *path;

        if (!json_string(json_get(v, "path"), &path))
            return err_set(e, EBADMSG, "an array without a path");
        TRY(fn(user, path, e));
    }
    return 0;
}

int zarr_listed_each(const char *text, size_t len, zarr_listed_fn *fn, void *user,
                     struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    const struct json *prefixes, *arrays;

    TRY(json_parse(text, len, NULL, &doc, e));
    prefixes = json_get(doc, "prefixes");
    arrays = json_get(doc, "arrays");
    if (!prefixes && !arrays)
        return err_set(e, EBADMSG, "it lists no arrays");
    if (arrays)
        TRY(each_of(arrays, fn, user, e));
    if (prefixes && json_kind(prefixes) != JSON_OBJECT)
        return err_set(e, EBADMSG, "prefixes that are no object");
    for (const struct json *v = prefixes ? json_first(prefixes) : NULL; v;
         v = json_next(v))
        TRY(each_of(v, fn, user, e));
    return 0;
}
