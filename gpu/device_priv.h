/* SPDX-License-Identifier: MIT */
/* gpu/device_priv.h - an open device as the files of it see it. */
#ifndef UFS_GPU_DEVICE_PRIV_H
#define UFS_GPU_DEVICE_PRIV_H

#include <pthread.h>

#include "gpu/device.h"
#include "gpu/driver.h"

/* Pinned memory of the host and as much of the device; the table of boxes is its end. */
struct device_slot {
    unsigned char *host;
    uint64_t device;
    void *event;     /* recorded behind the last work that uses the slot */
    bool busy;       /* such work is under way */
    uint64_t result; /* bytes of results that come of it */
};

/* What one thread of a load works with. */
struct feeder {
    struct feeder *next; /* idle ones */
    void *stream;
    struct device_slot slot[2];
    unsigned char *bounce;
};

struct device {
    struct driver driver;
    struct device_info info;
    int handle;
    void *context, *module, *function;
    unsigned threads;
    uint64_t room; /* bytes of a slot before the table */
    pthread_mutex_t lock;
    struct feeder *idle; /* guarded by lock */
};

enum { DEVICE_TABLE_BOXES = 2048 }; /* of a slot */

/* Makes the primary context current on this thread, and what was so before again. */
int device_enter(struct device *d, struct err *e);
void device_leave(struct device *d);

/* With the context current. NULL feeders are fine. */
int feeder_get(struct device *d, struct feeder **out, struct err *e);
void feeder_put(struct device *d, struct feeder *f); /* its work is done */
void feeder_free(struct device *d, struct feeder *f);

#endif
