/* SPDX-License-Identifier: MIT */
/* gpu/device.c - opens a CUDA device and tells what it is; memory and plain copies. */
#include "gpu/device_priv.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/thread.h"
#include "gpu/boxes.h"
#include "gpu/slots.h"

/*
 * As measured (docs/benchmarks.md): eight threads copy about as fast as a link of PCIe 5 takes
 * it, and slots of 4 MiB stay in the processor's caches where those of 8 do not.
 */
enum {
    THREADS = 8,
    THREADS_MAX = 64,
    SLOT = 4 << 20,
    SLOT_MIN = 64 << 10,
    SLOT_ALIGN = 256,
};
static const uint64_t SLOT_MAX = 1ull << 30;

#ifdef UFS_HAVE_FATBIN
extern const unsigned char unshard_fatbin[];
static const char no_code[] = "no code that was built in runs on it";
#else
/* A driver takes this for a program that it cannot compile. */
static const char unshard_fatbin[] = "// built without nvcc\n";
static const char no_code[] =
    "this program was built without nvcc, so without device code";
#endif

/* ---- what it is ---- */

/* One line of a file of the kernel; false: it is not there. */
static bool read_line(const char *path, char *line, size_t size)
{
    CLEANUP_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, line, size - 1);

    if (n < 0)
        return false;
    line[n] = '\0';
    return true;
}

static bool read_link_file(const struct device_info *i, const char *name, char line[64])
{
    char path[128];

    snprintf(path, sizeof path, "/sys/bus/pci/devices/%04x:%02x:%02x.0/%s",
             (unsigned)i->pci_domain, (unsigned)i->pci_bus, (unsigned)i->pci_device,
             name);
    return read_line(path, line, 64);
}

/* "32.0 GT/s PCIe" is generation 5. 0: not told. */
static int link_generation(const struct device_info *i, const char *name)
{
    static const double rate[] = {2.5, 5, 8, 16, 32, 64, 128};
    char line[64];
    double value = read_link_file(i, name, line) ? strtod(line, NULL) : 0;

    for (size_t k = 0; k < ARRAY_SIZE(rate); k++)
        if (value >= rate[k] * 0.99 && value <= rate[k] * 1.01)
            return (int)k + 1;
    return 0;
}

static int link_width(const struct device_info *i, const char *name)
{
    char line[64];
    long width = read_link_file(i, name, line) ? strtol(line, NULL, 10) : 0;

    return width > 0 && width <= 64 ? (int)width : 0;
}

static void find_link(struct device_info *i)
{
    i->link_generation = link_generation(i, "current_link_speed");
    i->link_generation_max = link_generation(i, "max_link_speed");
    i->link_width = link_width(i, "current_link_width");
    i->link_width_max = link_width(i, "max_link_width");
}

static int find_attributes(const struct driver *d, int device, struct device_info *i,
                           struct err *e)
{
    const struct {
        int number, *out;
    } want[] = {
        {DRIVER_MULTIPROCESSORS, &i->multiprocessors},
        {DRIVER_CAPABILITY_MAJOR, &i->major},
        {DRIVER_CAPABILITY_MINOR, &i->minor},
        {DRIVER_PCI_DOMAIN, &i->pci_domain},
        {DRIVER_PCI_BUS, &i->pci_bus},
        {DRIVER_PCI_DEVICE, &i->pci_device},
    };
    int ret = 0;

    for (size_t k = 0; ret == 0 && k < ARRAY_SIZE(want); k++)
        ret = DRIVER_CALL(d, e, device_attribute, want[k].out, want[k].number, device);
    return ret;
}

/* The driver's own words for a number that is none are few. */
static int check_ordinal(const struct driver *d, int ordinal, struct err *e)
{
    int count = 0, ret = DRIVER_CALL(d, e, device_count, &count);

    if (ret < 0 || (ordinal >= 0 && ordinal < count))
        return ret;
    err_set(e, ENODEV, "the driver shows %d device%s, counted from 0", count,
            count == 1 ? "" : "s");
    return err_hint(e, "CUDA_VISIBLE_DEVICES says which, if it is set");
}

/* Any failure here means that there is no device to be had. */
static int find_device(const struct driver *d, int ordinal, int *device,
                       struct device_info *i, struct err *e)
{
    size_t memory = 0;
    int ret = check_ordinal(d, ordinal, e);

    *i = (struct device_info){0};
    if (ret == 0)
        ret = DRIVER_CALL(d, e, device_get, device, ordinal);
    if (ret == 0)
        ret = DRIVER_CALL(d, e, version, &i->driver);
    if (ret == 0)
        ret = DRIVER_CALL(d, e, device_name, i->name, sizeof i->name - 1, *device);
    if (ret == 0)
        ret = DRIVER_CALL(d, e, device_uuid, i->uuid, *device);
    if (ret == 0)
        ret = DRIVER_CALL(d, e, device_memory, &memory, *device);
    if (ret == 0)
        ret = find_attributes(d, *device, i, e);
    if (ret < 0) {
        e->code = ENODEV;
        return err_wrap(e, "CUDA device %d", ordinal);
    }
    i->memory = memory;
    find_link(i);
    return 0;
}

int device_describe(const char *driver, int ordinal, struct device_info *out,
                    struct err *e)
{
    CLEANUP(driver_close) struct driver d = {0};
    int device, ret = driver_open(driver, &d, e);

    return ret < 0 ? ret : find_device(&d, ordinal, &device, out, e);
}

int device_count(const char *driver, int *out, struct err *e)
{
    CLEANUP(driver_close) struct driver d = {0};
    int ret = driver_open(driver, &d, e);

    *out = 0;
    if (ret == 0)
        ret = DRIVER_CALL(&d, e, device_count, out);
    if (ret < 0) {
        e->code = ENODEV;
        *out = 0;
    }
    return ret < 0 ? -ENODEV : 0;
}

const struct device_info *device_info_of(const struct device *d)
{
    return &d->info;
}

/* ---- opening ---- */

int device_enter(struct device *d, struct err *e)
{
    return DRIVER_CALL(&d->driver, e, context_push, d->context);
}

void device_leave(struct device *d)
{
    void *before;

    d->driver.context_pop(&before);
}

static int load_code(struct device *d, struct err *e)
{
    int ret = device_enter(d, e);

    if (ret < 0)
        return ret;
    ret = DRIVER_CALL(&d->driver, e, module_load, &d->module, unshard_fatbin);
    if (ret == 0)
        ret = DRIVER_CALL(&d->driver, e, module_function, &d->function, d->module,
                          "unshard_gather");
    else
        d->module = NULL;
    device_leave(d);
    return ret < 0 ? err_wrap(e, "%s", no_code) : 0;
}

static int open_device(struct device *d, const struct device_options *o, struct err *e)
{
    int ret = driver_open(o->driver, &d->driver, e);

    if (ret == 0)
        ret = find_device(&d->driver, o->ordinal, &d->handle, &d->info, e);
    if (ret < 0)
        return ret;
    ret = DRIVER_CALL(&d->driver, e, context_retain, &d->context, d->handle);
    if (ret < 0)
        d->context = NULL;
    else
        ret = load_code(d, e);
    if (ret == 0)
        return 0;
    if (ret != -ENOMEM)
        e->code = ENODEV;
    return err_wrap(e, "CUDA device %d, %s of compute capability %d.%d", o->ordinal,
                    d->info.name, d->info.major, d->info.minor);
}

int device_open(const struct device_options *o, struct device **out, struct err *e)
{
    CLEANUP(device_closep) struct device *d = calloc(1, sizeof *d);
    uint64_t slot = o->slot_bytes ? o->slot_bytes : SLOT;
    int ret;

    if (!d)
        return err_nomem(e);
    pthread_mutex_init(&d->lock, NULL);
    slot = MIN(MAX(slot, (uint64_t)SLOT_MIN), SLOT_MAX);
    d->room = (slot + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
    d->threads = o->threads ? MIN(o->threads, (unsigned)THREADS_MAX)
                            : MIN(thread_processors(), (unsigned)THREADS);
    ret = open_device(d, o, e);
    if (ret == 0)
        *out = steal(&d);
    return ret;
}

static void free_idle(struct device *d)
{
    while (d->idle) {
        struct feeder *f = d->idle;

        d->idle = f->next;
        feeder_free(d, f);
    }
}

void device_close(struct device *d)
{
    struct err ignored = {0};

    if (!d)
        return;
    if (d->context && device_enter(d, &ignored) == 0) {
        free_idle(d);
        if (d->module)
            d->driver.module_unload(d->module);
        device_leave(d);
    }
    if (d->context)
        d->driver.context_release(d->handle);
    driver_close(&d->driver);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

void device_closep(struct device **d)
{
    device_close(*d);
}

/* ---- feeders ---- */

static int slot_init(struct device *d, struct device_slot *s, struct err *e)
{
    size_t size = d->room + DEVICE_TABLE_BOXES * sizeof(struct core_box);
    void *host = NULL;
    int ret = DRIVER_CALL(&d->driver, e, pinned_alloc, &host, size, DRIVER_PORTABLE);

    if (ret == 0)
        s->host = host;
    if (ret == 0)
        ret = DRIVER_CALL(&d->driver, e, memory_alloc, &s->device, size);
    if (ret == 0)
        ret = DRIVER_CALL(&d->driver, e, event_new, &s->event, DRIVER_NO_TIMING);
    return ret;
}

static void slot_release(struct device *d, struct device_slot *s)
{
    if (s->event)
        d->driver.event_free(s->event);
    if (s->device)
        d->driver.memory_free(s->device);
    if (s->host)
        d->driver.pinned_free(s->host);
}

void feeder_free(struct device *d, struct feeder *f)
{
    if (!f)
        return;
    for (size_t i = 0; i < ARRAY_SIZE(f->slot); i++)
        slot_release(d, &f->slot[i]);
    if (f->stream)
        d->driver.stream_free(f->stream);
    free(f->bounce);
    free(f);
}

static int feeder_new(struct device *d, struct feeder **out, struct err *e)
{
    struct feeder *f = calloc(1, sizeof *f);
    int ret;

    if (!f || !(f->bounce = malloc(SLOT_BOUNCE))) {
        free(f);
        return err_nomem(e);
    }
    ret = DRIVER_CALL(&d->driver, e, stream_new, &f->stream, DRIVER_NON_BLOCKING);
    for (size_t i = 0; ret == 0 && i < ARRAY_SIZE(f->slot); i++)
        ret = slot_init(d, &f->slot[i], e);
    if (ret < 0)
        feeder_free(d, f);
    else
        *out = f;
    return ret;
}

int feeder_get(struct device *d, struct feeder **out, struct err *e)
{
    struct feeder *f;

    pthread_mutex_lock(&d->lock);
    f = d->idle;
    if (f)
        d->idle = f->next;
    pthread_mutex_unlock(&d->lock);
    if (!f)
        return feeder_new(d, out, e);
    f->next = NULL;
    *out = f;
    return 0;
}

void feeder_put(struct device *d, struct feeder *f)
{
    pthread_mutex_lock(&d->lock);
    f->next = d->idle;
    d->idle = f;
    pthread_mutex_unlock(&d->lock);
}

/* ---- memory ---- */

int device_memory(struct device *d, uint64_t *free_bytes, uint64_t *total,
                  struct err *e)
{
    size_t left = 0, all = 0;
    int ret = device_enter(d, e);

    if (ret < 0)
        return ret;
    ret = DRIVER_CALL(&d->driver, e, memory_info, &left, &all);
    device_leave(d);
    *free_bytes = left;
    *total = all;
    return ret;
}

int device_alloc(struct device *d, uint64_t size, uint64_t *address, struct err *e)
{
    int ret = device_enter(d, e);

    if (ret < 0)
        return ret;
    ret = DRIVER_CALL(&d->driver, e, memory_alloc, address, size ? size : 1);
    device_leave(d);
    return ret < 0 ? err_wrap(e, "%" PRIu64 " bytes of device memory", size) : 0;
}

int device_free(struct device *d, uint64_t address, struct err *e)
{
    int ret = device_enter(d, e);

    if (ret < 0)
        return ret;
    ret = DRIVER_CALL(&d->driver, e, memory_free, address);
    device_leave(d);
    return ret;
}

int device_copy_in(struct device *d, uint64_t to, const void *from, size_t len,
                   struct err *e)
{
    int ret = device_enter(d, e);

    if (ret < 0)
        return ret;
    ret = len ? DRIVER_CALL(&d->driver, e, copy_in, to, from, len) : 0;
    /* From memory that is not pinned it may return before the device has all of it. */
    if (ret == 0)
        ret = DRIVER_CALL(&d->driver, e, stream_wait, NULL);
    device_leave(d);
    return ret;
}

int device_copy_out(struct device *d, void *to, uint64_t from, size_t len,
                    struct err *e)
{
    int ret = device_enter(d, e);

    if (ret < 0)
        return ret;
    ret = len ? DRIVER_CALL(&d->driver, e, copy_out, to, from, len) : 0;
    device_leave(d);
    return ret;
}
