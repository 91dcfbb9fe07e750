/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_blosc.c - a frame of c-blosc 1, looked over before the library sees it. */
#include <blosc.h>
#include <errno.h>
#include <limits.h>

#include "base/endian.h"
#include "base/err.h"
#include "index/formats/zarr/zarr_decode.h"

/* The 16 bytes in front of a frame (c-blosc 1.21, README_CHUNK_FORMAT). */
enum {
    HEADER = 16,
    FLAG_STORED = 2,
    CODEC_SHIFT = 5,
};

struct frame {
    unsigned version, codec_version, flags, typesize;
    uint32_t nbytes, blocksize, cbytes;
};

static struct frame read_header(const unsigned char *p)
{
    return (struct frame){
        .version = p[0],
        .codec_version = p[1],
        .flags = p[2],
        .typesize = p[3],
        .nbytes = get_le32(p + 4),
        .blocksize = get_le32(p + 8),
        .cbytes = get_le32(p + 12),
    };
}

static int refuse(const char *what, uint64_t value, struct err *e)
{
    return err_set(e, EBADMSG, "blosc: impossible %s %" PRIu64, what, value);
}

/* The library trusts the length in the frame: it is never told the real one. */
static int check_header(const struct frame *f, size_t len,
                        const struct zarr_output *out, struct err *e)
{
    if (f->version != BLOSC_VERSION_FORMAT)
        return refuse("version", f->version, e);
    if (f->cbytes != len)
        return err_set(e, EBADMSG,
                       "blosc: the frame says %" PRIu32 " bytes, %zu are stored",
                       f->cbytes, len);
    if (f->nbytes > INT_MAX - HEADER || (out->fixed && f->nbytes != out->cap))
        return err_set(e, EBADMSG,
                       "blosc: the frame holds %" PRIu32 " bytes, the chunk has %zu",
                       f->nbytes, out->max);
    if (f->typesize == 0)
        return refuse("typesize", f->typesize, e);
    if (f->nbytes > 0 && (f->blocksize == 0 || f->blocksize > f->nbytes))
        return refuse("blocksize", f->blocksize, e);
    if (f->flags & FLAG_STORED && f->cbytes != f->nbytes + HEADER)
        return refuse("length of stored bytes", f->cbytes, e);
    return 0;
}

static int check_codec(const struct frame *f, struct err *e)
{
    const char *name;

    if (f->flags & FLAG_STORED)
        return 0;
    if (f->codec_version != 1)
        return refuse("version of the codec", f->codec_version, e);
    if (blosc_compcode_to_compname((int)(f->flags >> CODEC_SHIFT), &name) < 0)
        return err_set(e, EBADMSG, "blosc: codec %u is not known",
                       f->flags >> CODEC_SHIFT);
    return 0;
}

/* Where the blocks start must be within the frame, behind these starts. */
static int check_starts(const struct frame *f, const unsigned char *p, struct err *e)
{
    uint64_t blocks, behind;

    if (f->flags & FLAG_STORED || f->nbytes == 0)
        return 0;
    blocks = f->nbytes / f->blocksize + (f->nbytes % f->blocksize != 0);
    behind = HEADER + 4 * blocks;
    if (behind > f->cbytes)
        return refuse("number of blocks", blocks, e);
    for (uint64_t i = 0; i < blocks; i++) {
        uint32_t start = get_le32(p + HEADER + 4 * i);

        if (start < behind || start >= f->cbytes)
            return refuse("start of a block", start, e);
    }
    return 0;
}

int zarr_blosc(const struct zarr_input *in, struct zarr_output *out, struct err *e)
{
    struct frame f;
    int rc;

    if (in->len < HEADER)
        return err_set(e, EBADMSG, "%zu bytes are no blosc frame", in->len);
    f = read_header(in->data);
    TRY(check_header(&f, in->len, out, e));
    TRY(check_codec(&f, e));
    TRY(check_starts(&f, in->data, e));
    TRY(zarr_output_room(out, f.nbytes, e));
    rc = blosc_decompress_ctx(in->data, out->data, f.nbytes, 1);
    if (rc < 0 || (uint32_t)rc != f.nbytes)
        return err_set(e, EBADMSG, "damaged blosc data");
    out->len = f.nbytes;
    return 0;
}
