/* SPDX-License-Identifier: MIT */
/* gpu/device_block.c - device memory that processes share, by descriptors. */
#include "gpu/device_priv.h"

#include <errno.h>

#include "base/checked.h"
#include "base/err.h"

enum { GRANULARITY_RECOMMENDED = 1 }; /* CU_MEM_ALLOC_GRANULARITY_RECOMMENDED */

static struct driver_allocation kind_of(const struct device *d)
{
    return (struct driver_allocation){
        .type = DRIVER_PINNED,
        .handle_types = DRIVER_DESCRIPTOR,
        .location = {.type = DRIVER_ON_DEVICE, .id = d->handle},
    };
}

/* With the context current, as all below. */
static int check_sharing(struct device *d, struct err *e)
{
    int memory = 0, descriptors = 0, ret;

    if (!d->driver.shares)
        return err_set(e, ENOTSUP, "the driver is too old to share memory");
    ret = DRIVER_CALL(&d->driver, e, device_attribute, &memory, DRIVER_VIRTUAL_MEMORY,
                      d->handle);
    if (ret == 0)
        ret = DRIVER_CALL(&d->driver, e, device_attribute, &descriptors,
                          DRIVER_POSIX_HANDLES, d->handle);
    if (ret == 0 && !(memory && descriptors))
        ret =
            err_set(e, ENOTSUP, "%s cannot share memory by descriptors", d->info.name);
    return ret;
}

/* Makes the block visible at an address of its own. */
static int map_block(struct device *d, struct device_block *b, struct err *e)
{
    const struct driver_access access = {
        .location = {.type = DRIVER_ON_DEVICE, .id = d->handle},
        .flags = DRIVER_READ_WRITE};
    int ret = DRIVER_CALL(&d->driver, e, range_new, &b->address, b->size, 0, 0, 0);

    if (ret < 0)
        return ret;
    ret = DRIVER_CALL(&d->driver, e, map, b->address, b->size, 0, b->handle, 0);
    if (ret == 0) {
        ret = DRIVER_CALL(&d->driver, e, set_access, b->address, b->size, &access, 1);
        if (ret == 0)
            return 0;
        d->driver.unmap(b->address, b->size);
    }
    d->driver.range_free(b->address, b->size);
    return ret;
}

static int whole_granules(struct device *d, uint64_t size, uint64_t *out, struct err *e)
{
    const struct driver_allocation kind = kind_of(d);
    size_t granule = 0;

    TRY(DRIVER_CALL(&d->driver, e, granularity, &granule, &kind,
                    GRANULARITY_RECOMMENDED));
    size = MAX(size, (uint64_t)1);
    if (granule == 0 || add_overflows(size, granule - 1, out))
        return err_set(e, ENOMEM, "%" PRIu64 " bytes of device memory", size);
    *out -= *out % granule;
    return 0;
}

static int new_block(struct device *d, uint64_t size, struct device_block *b,
                     struct err *e)
{
    const struct driver_allocation kind = kind_of(d);
    int ret = check_sharing(d, e);

    if (ret == 0)
        ret = whole_granules(d, size, &b->size, e);
    if (ret == 0)
        ret = DRIVER_CALL(&d->driver, e, block_new, &b->handle, b->size, &kind, 0);
    if (ret < 0)
        return ret;
    ret = map_block(d, b, e);
    if (ret < 0)
        d->driver.block_free(b->handle);
    return ret;
}

int device_block_new(struct device *d, uint64_t size, struct device_block *out,
                     struct err *e)
{
    int ret = device_enter(d, e);

    *out = (struct device_block){0};
    if (ret < 0)
        return ret;
    ret = new_block(d, size, out, e);
    device_leave(d);
    return ret < 0 ? err_wrap(e, "%" PRIu64 " bytes of shared device memory", size) : 0;
}

int device_block_export(struct device *d, const struct device_block *b, int *fd,
                        struct err *e)
{
    int ret = device_enter(d, e);

    if (ret < 0)
        return ret;
    ret = DRIVER_CALL(&d->driver, e, block_export, fd, b->handle, DRIVER_DESCRIPTOR, 0);
    device_leave(d);
    return ret;
}

static int import_block(struct device *d, int fd, struct device_block *b, struct err *e)
{
    int ret = check_sharing(d, e);

    if (ret == 0) /* the descriptor travels as the value of a pointer */
        ret = DRIVER_CALL(&d->driver, e, block_import, &b->handle,
                          (void *)(uintptr_t)fd, DRIVER_DESCRIPTOR);
    if (ret < 0)
        return ret;
    ret = map_block(d, b, e);
    if (ret < 0)
        d->driver.block_free(b->handle);
    return ret;
}

int device_block_import(struct device *d, int fd, uint64_t size,
                        struct device_block *out, struct err *e)
{
    int ret = device_enter(d, e);

    *out = (struct device_block){.size = size};
    if (ret < 0)
        return ret;
    ret = import_block(d, fd, out, e);
    device_leave(d);
    return ret < 0 ? err_wrap(e, "%" PRIu64 " bytes of shared device memory", size) : 0;
}

void device_block_release(struct device *d, struct device_block *b)
{
    struct err ignored = {0};

    if (!b->handle || device_enter(d, &ignored) < 0)
        return;
    d->driver.unmap(b->address, b->size);
    d->driver.range_free(b->address, b->size);
    d->driver.block_free(b->handle);
    device_leave(d);
    *b = (struct device_block){0};
}
