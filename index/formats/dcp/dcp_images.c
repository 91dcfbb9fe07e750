/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_images.c - safetensors images inside .distcp files. */
#include "index/formats/dcp/dcp_scan.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/hf/safetensors_header.h"
#include "remote/source.h"

struct dcp_image {
    bool found; /* false: what lies there is no safetensors image */
    uint64_t offset;
    struct safetensors_header header;
    struct err damage; /* code 0: sound */
};

void dcp_image_free(struct dcp_image *image)
{
    if (!image)
        return;
    if (image->found && !image->damage.code)
        safetensors_header_release(&image->header);
    free(image);
}

static void read_header(struct dcp_image *image, struct source *src)
{
    unsigned char head[16];
    struct err e = {0};

    if (src->size < sizeof head || image->offset > src->size - sizeof head ||
        source_read(src, image->offset, sizeof head, head, &e) < 0)
        return;
    if (memcmp(head, "PK\3\4", 4) == 0 ||
        !safetensors_magic(head, sizeof head, src->size - image->offset))
        return;
    image->found = true;
    safetensors_read(src, image->offset, src->size - image->offset, &image->header,
                     &image->damage);
}

/* What lies at the offset where the first chunk of the file says that a tensor is. */
static int look(struct dcp_scan *s, const struct dcp_stored *stored, struct err *e)
{
    struct dcp_image *image = calloc(1, sizeof *image);
    CLEANUP(source_putp) struct source *src = NULL;
    struct err ignored = {0};

    if (!image)
        return err_nomem(e);
    s->file[stored->path].image = image;
    image->offset = stored->offset;
    if (dcp_file_open(s, stored->path, &src, &ignored) == 0)
        read_header(image, src);
    if (image->damage.code == ENOMEM)
        return err_nomem(e);
    s->images += image->found;
    return 0;
}

/* Of one dtype and shape they have as many bytes: the image's header says no other count. */
static int compare(const struct safetensors_tensor *t,
                   const struct dcp_image_want *want, struct err *e)
{
    struct shape shape, units;

    if (!t)
        return err_set(e, EBADMSG, "the safetensors image has no tensor of this name");
    safetensors_shape(t, &shape);
    TRY(shape_units(&shape, t->dtype, &units, e));
    if (t->dtype != want->dtype)
        return err_set(e, EBADMSG, "the safetensors image has it as %s",
                       dtype_name(t->dtype));
    if (!shape_equal(&units, want->box))
        return err_set(e, EBADMSG, "the safetensors image has it in another shape");
    return 0;
}

int dcp_image_find(struct dcp_scan *s, const struct dcp_stored *stored,
                   const struct dcp_image_want *want, uint64_t *offset, struct err *e)
{
    const struct safetensors_tensor *t;
    const struct dcp_image *image;

    if (!s->file[stored->path].image)
        TRY(look(s, stored, e));
    image = s->file[stored->path].image;
    if (!image->found || image->offset != stored->offset)
        return 0;
    if (image->damage.code) {
        *e = image->damage;
        return err_wrap(e, "safetensors image at byte %" PRIu64, image->offset);
    }
    t = safetensors_find(&image->header, want->key, want->key_len);
    TRY(compare(t, want, e));
    *offset = image->offset + image->header.data + t->begin;
    return 1;
}
