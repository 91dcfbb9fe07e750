/* SPDX-License-Identifier: MIT */
/* gpu/device.h - a CUDA device: its memory, and tensors gathered into it. */
#ifndef UFS_GPU_DEVICE_H
#define UFS_GPU_DEVICE_H

#include "base/base.h"
#include "gpu/gather.h"

struct device;
struct err;

/*
 * The driver (libcuda.so.1) is opened at run time, by nobody but this. It works in the
 * device's primary context, which torch and others use too, pushed and popped in each
 * call: none is left current. Never before a fork() whose child goes on with CUDA.
 */
struct device_options {
    const char *driver; /* NULL: "libcuda.so.1" */
    int ordinal;        /* as CUDA_VISIBLE_DEVICES leaves them */
    unsigned
        threads; /* each reads, and has a stream with two slots; 0: one a processor,
                         8 at most */
    uint64_t slot_bytes; /* 0: 4 MiB, of pinned and of device memory, each slot */
};

/*
 * -ENODEV, with the reason in words: no driver, no such device, one that is older than
 * every code that was built in, or none was built in (no nvcc then). The CPU can do it.
 */
int device_open(const struct device_options *o, struct device **out, struct err *e);
void device_close(struct device *d); /* NULL is fine; its memory must be free by then */
void device_closep(struct device **d);

/* How many devices there are; 0 and the reason in e when there is no driver. */
int device_count(const char *driver, int *out, struct err *e);

struct device_info {
    char name[128];
    unsigned char uuid[16];
    int driver;                        /* 13000: CUDA 13.0 */
    int major, minor, multiprocessors; /* compute capability */
    uint64_t memory;                   /* bytes */
    int pci_domain, pci_bus, pci_device;
    int link_generation, link_width; /* PCIe, as the kernel says now; 0: not known */
    int link_generation_max, link_width_max;
};

/*
 * What device it is, also where no code of ours would run on it: `driver` and `ordinal`
 * as in device_options. -ENODEV as device_open.
 */
int device_describe(const char *driver, int ordinal, struct device_info *out,
                    struct err *e);
const struct device_info *device_info_of(const struct device *d);

/* Free and total bytes of the device's memory now. */
int device_memory(struct device *d, uint64_t *free_bytes, uint64_t *total,
                  struct err *e);

/* Memory of the device, aligned to 256 bytes; -ENOMEM. */
int device_alloc(struct device *d, uint64_t size, uint64_t *address, struct err *e);
int device_free(struct device *d, uint64_t address, struct err *e);

/* Copies between memory of the host (pinned or not) and the device; done on return. */
int device_copy_in(struct device *d, uint64_t to, const void *from, size_t len,
                   struct err *e);
int device_copy_out(struct device *d, void *to, uint64_t from, size_t len,
                    struct err *e);

/* What a device_load() did. */
struct device_stats {
    uint64_t read_bytes; /* from the sources */
    uint64_t sent_bytes; /* to the device */
    uint64_t batches;    /* slots that were filled */
    uint64_t direct;     /* copies straight to their place */
    uint64_t launches;   /* of the kernel */
};

/*
 * Gathers all jobs into memory of the device, whoever allocated it (any context's: it is
 * addressed as is), in one pipeline. Blocks; on return, with or without an error, all work
 * is complete and no transfer is under way, so that the memory may be used or freed at
 * once. On an error it holds anything. Sources are checked to be what they were before and
 * after (-ESTALE). `watch` and `stats` may be NULL. Any thread; of several at once each has
 * slots of its own.
 */
int device_load(struct device *d, const struct gather_job *job, size_t n,
                const struct gather_watch *watch, struct device_stats *stats,
                struct err *e);

/*
 * Memory that processes share: a block is allocated in granules of the device (2 MiB),
 * goes to others as a descriptor (SCM_RIGHTS), and lives until the last of them has let
 * it go. -ENOTSUP, with the reason, where the device or driver cannot.
 */
struct device_block {
    uint64_t address; /* as this process sees it */
    uint64_t size;    /* whole granules */
    uint64_t handle;  /* the driver's */
};
int device_block_new(struct device *d, uint64_t size, struct device_block *out,
                     struct err *e);
int device_block_export(struct device *d, const struct device_block *b, int *fd,
                        struct err *e); /* the caller's to close */
/* `size` as the block that was exported has it; the descriptor stays the caller's. */
int device_block_import(struct device *d, int fd, uint64_t size,
                        struct device_block *out, struct err *e);
void device_block_release(struct device *d, struct device_block *b);

#endif
