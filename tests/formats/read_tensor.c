/* SPDX-License-Identifier: MIT */
/* tests/formats/read_tensor.c - a tensor's bytes by the way that the mount takes. */
#include "read_tensor.h"

#include "base/err.h"
#include "gpu/reader.h"
#include "index/formats/format.h"
#include "remote/open_files.h"

enum { WINDOW = 4099 }; /* no multiple of any element or row */

static int read_windows(struct reader *r, struct buf *out, struct err *e)
{
    uint64_t size = reader_size(r);

    for (uint64_t off = 0; off < size; off += WINDOW) {
        size_t len = (size_t)MIN(size - off, (uint64_t)WINDOW);
        void *dst = buf_grow(out, len);

        if (!dst)
            return err_nomem(e);
        if (reader_read(r, off, len, dst, e) < 0)
            return -e->code;
    }
    return 0;
}

int read_tensor(struct world *w, int64_t checkpoint, const struct tensor_info *t,
                struct buf *out, struct err *e)
{
    struct reader_env env = {
        .catalog = w->catalog, .decoded = w->decoded, .codec = format_codec};
    CLEANUP(reader_closep) struct reader *r = NULL;
    int rc = open_files_new(w->store, 8, &env.files, e);

    if (rc == 0)
        rc = reader_open_tensor(&env, checkpoint, t->ord, false, &r, e);
    if (rc == 0)
        rc = read_windows(r, out, e);
    reader_close(steal(&r));
    open_files_free(env.files);
    return rc;
}
