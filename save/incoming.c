/* SPDX-License-Identifier: MIT */
/* save/incoming.c - names and headers of files that were written into a mount. */
#include "save/incoming.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "base/endian.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "base/json.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/hf/safetensors_header.h"
#include "index/names.h"
#include "index/npy.h"
#include "remote/source.h"

static const char safetensors_end[] = ".safetensors";
static const char npy_end[] = ".npy";

static bool ends_in(const char *text, const char *end)
{
    size_t a = strlen(text), b = strlen(end);

    return a > b && memcmp(text + a - b, end, b) == 0;
}

/* The rest of the path when it lies in this directory, else NULL. */
static const char *below(const char *path, const char *dir)
{
    size_t n = strlen(dir);

    return strncmp(path, dir, n) == 0 && path[n] == '/' ? path + n + 1 : NULL;
}

enum incoming_kind incoming_kind(const char *path)
{
    const char *name = below(path, "optimizer");
    struct hf_index_name index;

    if (below(path, ".unshard"))
        return INCOMING_IGNORED;
    if (below(path, "raw"))
        return strchr(below(path, "raw"), '/') ? INCOMING_SIDE : INCOMING_RAW;
    if (below(path, "tensors"))
        return ends_in(path, npy_end) && !strchr(below(path, "tensors"), '/')
                   ? INCOMING_NPY
                   : INCOMING_SIDE;
    if (below(path, "tree"))
        return ends_in(path, npy_end) ? INCOMING_NPY : INCOMING_SIDE;
    name = name ? name : path;
    if (strchr(name, '/'))
        return INCOMING_SIDE;
    if (hf_index_name(name, safetensors_end, &index))
        return INCOMING_INDEX;
    return ends_in(name, safetensors_end) && name[0] != '.' ? INCOMING_SAFETENSORS
                                                            : INCOMING_SIDE;
}

bool incoming_is_adapter(const char *path)
{
    return strncmp(path, "adapter_model", strlen("adapter_model")) == 0;
}

enum incoming_kind incoming_kind_beside(const char *path, bool base)
{
    return base && incoming_is_adapter(path) ? INCOMING_SIDE : incoming_kind(path);
}

unsigned incoming_set(const char *path, unsigned *number, size_t *stem)
{
    size_t len = strlen(path), end = len;
    unsigned of;
    int n = 0;

    if (!ends_in(path, safetensors_end))
        return 0;
    for (unsigned dashes = 0; end > 0 && path[end - 1] != '/'; end--)
        if (path[end - 1] == '-' && ++dashes == 3)
            break;
    if (end == 0 || path[end - 1] != '-') { /* "model-1-of-2" has three of them */
        *stem = 0;
        return 0;
    }
    if (sscanf(path + end, "%5u-of-%5u.safetensors%n", number, &of, &n) != 2 ||
        (size_t)n != len - end || *number == 0 || *number > of)
        return 0;
    *stem = end;
    return of;
}

bool incoming_is_whole(const char *path, enum role *role)
{
    const char *name = below(path, "optimizer");
    unsigned number;
    size_t stem;
    bool set = incoming_set(path, &number, &stem) > 0;

    *role = name ? ROLE_OPTIMIZER : ROLE_MODEL;
    if (name)
        return strcmp(name, "optimizer.safetensors") == 0 ||
               (set && stem == strlen("optimizer/optimizer-") &&
                strncmp(name, "optimizer-", stem - strlen("optimizer/")) == 0);
    if (set)
        return (stem == 6 && strncmp(path, "model-", stem) == 0) ||
               (stem == 14 && strncmp(path, "adapter_model-", stem) == 0);
    return strcmp(path, "model.safetensors") == 0 ||
           strcmp(path, "adapter_model.safetensors") == 0;
}

/* ---- keys ---- */

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* A name of 255 bytes with '~' and 16 hex digits at its end has lost what stood there. */
static bool was_cut(const char *name, size_t len)
{
    if (len < 17 || name[len - 17] != '~' || len + strlen(npy_end) < NAME_MAX_BYTES - 8)
        return false;
    for (size_t i = len - 16; i < len; i++)
        if (!isxdigit((unsigned char)name[i]))
            return false;
    return true;
}

/* Takes %XX back (name_of_key): what is no such escape stands for itself. */
static int decode(const char *name, size_t len, struct buf *key, struct err *e)
{
    if (was_cut(name, len)) {
        err_set(e, EINVAL, "%.*s was cut: its key cannot be told", (int)len, name);
        return err_hint(e, "write it in a safetensors file, which has the whole key");
    }
    if (len == 6 && memcmp(name, "%empty", len) == 0)
        return 0;
    for (size_t i = 0; i < len; i++) {
        if (name[i] == '%' && i + 2 < len && hex_digit(name[i + 1]) >= 0 &&
            hex_digit(name[i + 2]) >= 0) {
            buf_addc(key, (char)(hex_digit(name[i + 1]) << 4 | hex_digit(name[i + 2])));
            i += 2;
        } else {
            buf_addc(key, name[i]);
        }
    }
    return buf_failed(key) ? err_nomem(e) : 0;
}

int incoming_key(const char *path, struct buf *key, struct err *e)
{
    const char *tree = below(path, "tree"),
               *name = tree ? tree : below(path, "tensors");
    size_t len;
    int ret = 0;

    for (; ret == 0 && name; name = name[len] ? name + len + 1 : NULL) {
        size_t n = len = strcspn(name, "/");

        if (!name[len])
            n -= strlen(npy_end);
        ret = decode(name, n, key, e);
        if (name[len])
            buf_addc(key, '.');
    }
    return ret == 0 && buf_failed(key) ? err_nomem(e) : ret;
}

/* ---- .npy ---- */

static int not_whole(struct err *e)
{
    e->code = EINVAL;
    return -EINVAL;
}

int incoming_npy(struct source *src, enum dtype one_byte, struct incoming_data *out,
                 struct err *e)
{
    CLEANUP_FREE char *head = NULL;
    struct npy_layout x;
    char first[NPY_PREFIX];
    size_t n = (size_t)MIN(src->size, (uint64_t)NPY_PREFIX);
    uint64_t size;

    if (source_read(src, 0, n, first, e) < 0 || npy_header_size(first, n, &size, e) < 0)
        return not_whole(e);
    if (size > src->size)
        return err_set(e, EINVAL, "it ends within its header");
    head = malloc((size_t)size);
    if (!head)
        return err_nomem(e);
    if (source_read(src, 0, (size_t)size, head, e) < 0 ||
        npy_parse_as(head, (size_t)size, one_byte, &x, e) < 0)
        return not_whole(e);
    if (x.bytes != src->size - x.header)
        return err_set(e, EINVAL,
                       "%" PRIu64 " bytes follow the header, its shape needs %" PRIu64,
                       src->size - x.header, x.bytes);
    *out = (struct incoming_data){.dtype = x.dtype,
                                  .shape = x.shape,
                                  .at = x.header,
                                  .bytes = x.bytes,
                                  .fortran = x.fortran && x.shape.nd > 1,
                                  .swap = x.swap};
    return 0;
}

/* ---- safetensors ---- */

/* The end of the last tensor: the bytes of data that the header speaks of. */
static int see_end(void *user, const char *key, size_t key_len,
                   const struct json *value, struct err *e)
{
    const struct json *offsets = json_get(value, "data_offsets");
    uint64_t *end = user, at;

    (void)key;
    (void)key_len;
    (void)e;
    if (offsets && json_count(offsets) == 2 &&
        json_u64(json_next(json_first(offsets)), &at))
        *end = MAX(*end, at);
    return 0;
}

int incoming_judge(int fd, uint64_t prefix, struct incoming_header *out, struct err *e)
{
    struct safetensors_header h;
    CLEANUP_FREE char *text = NULL;
    unsigned char head[SAFETENSORS_PREFIX + 1];
    uint64_t len, data = 0;

    if (prefix < sizeof head)
        return 0;
    TRY(read_exact(fd, head, sizeof head, 0, e));
    len = get_le64(head);
    if (len == 0) /* its place is kept until the data are there */
        return 0;
    if (len > SAFETENSORS_MAX_HEADER || head[SAFETENSORS_PREFIX] != '{')
        return err_set(e, EINVAL, "this is no header of a safetensors file");
    if (prefix < SAFETENSORS_PREFIX + len)
        return 0;
    text = malloc((size_t)len);
    if (!text)
        return err_nomem(e);
    TRY(read_exact(fd, text, (size_t)len, SAFETENSORS_PREFIX, e));
    if (json_each_member(text, (size_t)len, NULL, see_end, &data, e) < 0 ||
        safetensors_parse(text, (size_t)len, data, &h, e) < 0)
        return e->code == ENOMEM ? -ENOMEM : not_whole(e);
    *out = (struct incoming_header){.size = SAFETENSORS_PREFIX + len + data,
                                    .pt = safetensors_is_pt(&h)};
    safetensors_header_release(&h);
    return 1;
}

/* ---- elements ---- */

static void swap_bytes(unsigned char *p, size_t len, unsigned component)
{
    for (; len >= component; len -= component, p += component)
        for (unsigned a = 0, b = component - 1; a < b; a++, b--) {
            unsigned char t = p[a];

            p[a] = p[b];
            p[b] = t;
        }
}

/* Element number `i` of row-major order: its number in column-major order. */
static uint64_t column_major(const struct shape *s, uint64_t i)
{
    uint64_t at = 0, below_it = 1;

    for (uint32_t k = 0; k < s->nd; k++)
        below_it *= s->dim[k];
    for (uint32_t k = s->nd; k-- > 0;) {
        below_it /= s->dim[k];
        at += i % s->dim[k] * below_it;
        i /= s->dim[k];
    }
    return at;
}

static int read_columns(int fd, const struct incoming_data *d, uint64_t off, size_t len,
                        unsigned char *dst, struct err *e)
{
    unsigned unit = dtype_unit(d->dtype);
    size_t size = (size_t)(d->at + d->bytes);
    unsigned char *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);

    if (map == MAP_FAILED)
        return err_set(e, errno, "map the file: %s", strerror(errno));
    for (size_t i = 0; i < len; i += unit)
        memcpy(dst + i, map + d->at + column_major(&d->shape, (off + i) / unit) * unit,
               unit);
    munmap(map, size);
    return 0;
}

int incoming_read(int fd, const struct incoming_data *d, uint64_t off, size_t len,
                  void *dst, struct err *e)
{
    int ret = d->fortran ? read_columns(fd, d, off, len, dst, e)
                         : read_exact(fd, dst, len, d->at + off, e);

    if (ret == 0 && d->swap)
        swap_bytes(dst, len, dtype_component(d->dtype));
    return ret;
}
