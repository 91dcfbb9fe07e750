/* SPDX-License-Identifier: MIT */
/* tests/kernels/driver/standin.c - a libcuda.so.1 whose devices are the processor. */
#include "standin.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpu/core.h"
#include "gpu/driver.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    GRANULE = 2 << 20,
    ALIGN = 256,
    PINNED_ALIGN = 4096,
};

/* ---- what there is ---- */

enum range_kind { RANGE_DEVICE, RANGE_PINNED, RANGE_SHARED };

/* Memory, from `at` on. */
struct range {
    struct range *next;
    enum range_kind kind;
    uint64_t at, size;
};

enum op_kind { OP_COPY, OP_KERNEL, OP_EVENT };

/* Work of a stream that nobody has waited for. */
struct op {
    struct op *next;
    enum op_kind kind;
    uint64_t to, from, size; /* OP_COPY */
    uint64_t table, tiles;   /* OP_KERNEL */
    uint32_t boxes, lanes;   /* OP_KERNEL */
    struct event *event;     /* OP_EVENT */
};

struct stream {
    struct stream *next;
    struct op *first, **last;
};

struct event {
    struct stream *stream; /* of the last record */
    unsigned pending;      /* records that have not been done */
    bool freed;
};

/* Memory that is shared. */
struct block {
    int fd;
    size_t size;
    bool ours; /* made here, not handed over */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static struct stream *streams;
static uint64_t used; /* bytes of device memory */
static long live, misuses;
static _Thread_local int contexts;

EXPORT long standin_live(void);
EXPORT long standin_misuse(void);

long standin_live(void)
{
    return __atomic_load_n(&live, __ATOMIC_SEQ_CST);
}

long standin_misuse(void)
{
    return __atomic_load_n(&misuses, __ATOMIC_SEQ_CST);
}

static void alive(long n)
{
    __atomic_add_fetch(&live, n, __ATOMIC_SEQ_CST);
}

PRINTF(1, 2) static int misuse(const char *fmt, ...)
{
    va_list ap;

    __atomic_add_fetch(&misuses, 1, __ATOMIC_SEQ_CST);
    fputs("stand-in driver: ", stderr);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return INVALID_VALUE;
}

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);

    return text ? strtoull(text, NULL, 0) : otherwise;
}

/* ---- faults ---- */

/* Counts the calls that STANDIN_FAIL names. */
static bool is_the_one(const char *wanted, const char *name)
{
    static char last[64];
    static unsigned long count;
    size_t n = strcspn(wanted, ":");

    if (strncmp(last, wanted, sizeof last - 1) != 0) {
        snprintf(last, sizeof last, "%s", wanted);
        count = 0;
    }
    if (strncmp(wanted, "any", n) != 0 &&
        (strlen(name) != n || strncmp(wanted, name, n) != 0))
        return false;
    return ++count == strtoul(wanted + n + (wanted[n] == ':'), NULL, 10);
}

static int fault(const char *name)
{
    const char *wanted = getenv("STANDIN_FAIL");
    bool fails;

    if (!wanted)
        return OK;
    pthread_mutex_lock(&lock);
    fails = is_the_one(wanted, name);
    pthread_mutex_unlock(&lock);
    return fails ? OUT_OF_MEMORY : OK;
}

/* Calls that need a context begin so; FAULT: also those that need none. */
#define FAULT(name)                                                                    \
    do {                                                                               \
        if (fault(name))                                                               \
            return OUT_OF_MEMORY;                                                      \
    } while (0)
#define ENTER(name)                                                                    \
    do {                                                                               \
        if (!contexts) {                                                               \
            misuse("%s without a current context", name);                              \
            return INVALID_CONTEXT;                                                    \
        }                                                                              \
        FAULT(name);                                                                   \
    } while (0)

/* What frees never fails here, so that a test that makes calls fail may look for leaks. */
#define ENTER_FREE(name)                                                               \
    do {                                                                               \
        if (!contexts) {                                                               \
            misuse("%s without a current context", name);                              \
            return INVALID_CONTEXT;                                                    \
        }                                                                              \
    } while (0)

/* ---- memory ---- */

/* With the lock. */
static struct range *find_range(enum range_kind kind, uint64_t at, uint64_t size)
{
    struct range *r;

    for (r = ranges; r; r = r->next)
        if ((r->kind == kind || (kind == RANGE_DEVICE && r->kind == RANGE_SHARED)) &&
            at >= r->at && at - r->at <= r->size && size <= r->size - (at - r->at))
            return r;
    return NULL;
}

static int add_range(enum range_kind kind, uint64_t at, uint64_t size)
{
    struct range *r = malloc(sizeof *r);

    if (!r)
        return OUT_OF_MEMORY;
    *r = (struct range){ranges, kind, at, size};
    ranges = r;
    alive(1);
    return OK;
}

/* Takes out what begins at `at`; its size, or 0. */
static uint64_t drop_range(enum range_kind kind, uint64_t at)
{
    for (struct range **p = &ranges; *p; p = &(*p)->next) {
        struct range *r = *p;
        uint64_t size = r->size;

        if (r->kind != kind || r->at != at)
            continue;
        *p = r->next;
        free(r);
        alive(-1);
        return size;
    }
    return 0;
}

/* ---- work ---- */

/* All that a box touches must be the device's. */
static bool box_is_good(const struct core_box *b)
{
    uint64_t low = b->src, high = b->src, end = b->dst;
    uint32_t last = b->nd - 1;

    if (b->nd == 0 || b->nd > CORE_DIMS)
        return false;
    for (uint32_t k = 0; k <= last; k++) {
        uint64_t n = b->count[k] - 1;

        if (b->src_step[k] < 0)
            low += n * (uint64_t)b->src_step[k];
        else
            high += n * (uint64_t)b->src_step[k];
        end += n * b->dst_step[k];
    }
    high += (uint64_t)b->src_step[last];
    end += b->dst_step[last];
    return find_range(RANGE_DEVICE, low, high - low) &&
           find_range(RANGE_DEVICE, b->dst, end - b->dst) &&
           (!b->scale || find_range(RANGE_DEVICE, b->scale, sizeof(struct cast_scale)));
}

static void run_kernel(const struct op *op)
{
    const struct core_box *box = (const struct core_box *)(uintptr_t)op->table;

    if (!find_range(RANGE_DEVICE, op->table, op->boxes * sizeof *box)) {
        misuse("a kernel's table at %#" PRIx64 " is not in device memory", op->table);
        return;
    }
    for (uint32_t i = 0; i < op->boxes; i++) {
        if (!box_is_good(&box[i])) {
            misuse("box %u of a kernel leaves device memory", i);
            return;
        }
    }
    for (uint64_t tile = op->tiles; tile-- > 0;) {
        const struct core_box *b = &box[core_find(box, op->boxes, tile)];

        for (uint32_t lane = op->lanes; lane-- > 0;)
            core_tile(b, tile - b->first_tile, lane, op->lanes);
    }
}

static void run_op(const struct op *op)
{
    if (op->kind == OP_KERNEL) {
        run_kernel(op);
    } else if (op->kind == OP_EVENT) {
        op->event->pending--;
        if (op->event->freed && !op->event->pending)
            free(op->event);
    } else if (!find_range(RANGE_PINNED, op->from, op->size)) {
        misuse("a copy that is done later reads memory that is not pinned");
    } else if (!find_range(RANGE_DEVICE, op->to, op->size)) {
        misuse("a copy of %" PRIu64 " bytes to %#" PRIx64 ", not in device memory",
               op->size, op->to);
    } else {
        memcpy((void *)(uintptr_t)op->to, (const void *)(uintptr_t)op->from, op->size);
    }
}

/* Does the work of a stream up to the last record of an event (NULL: all). */
static void drain(struct stream *s, const struct event *until)
{
    while (s->first && (!until || until->pending)) {
        struct op *op = s->first;

        s->first = op->next;
        if (!s->first)
            s->last = &s->first;
        run_op(op);
        free(op);
    }
}

static int push(struct stream *s, const struct op *like)
{
    struct op *op = malloc(sizeof *op);

    if (!op)
        return OUT_OF_MEMORY;
    *op = *like;
    op->next = NULL;
    *s->last = op;
    s->last = &op->next;
    return OK;
}

/* Does work that has not been done touch this memory? */
static bool in_use(uint64_t at, uint64_t size)
{
    for (const struct stream *s = streams; s; s = s->next)
        for (const struct op *op = s->first; op; op = op->next)
            if (op->kind == OP_COPY && ((op->from >= at && op->from - at < size) ||
                                        (op->to >= at && op->to - at < size)))
                return true;
    return false;
}

/* ---- devices and contexts ---- */

#define DRIVER_API(symbol, ...)                                                        \
    EXPORT int symbol(__VA_ARGS__);                                                    \
    int symbol(__VA_ARGS__)

DRIVER_API(cuInit, unsigned flags)
{
    FAULT("cuInit");
    if (flags)
        return INVALID_VALUE;
    return setting("STANDIN_DEVICES", 1) ? OK : NO_DEVICE;
}

DRIVER_API(cuDriverGetVersion, int *version)
{
    FAULT("cuDriverGetVersion");
    *version = 13000;
    return OK;
}

DRIVER_API(cuGetErrorName, int result, const char **name)
{
    *name = result == OUT_OF_MEMORY    ? "CUDA_ERROR_OUT_OF_MEMORY"
            : result == NO_DEVICE      ? "CUDA_ERROR_NO_DEVICE"
            : result == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE"
                                       : "CUDA_ERROR_INVALID_VALUE";
    return OK;
}

DRIVER_API(cuDeviceGetCount, int *count)
{
    FAULT("cuDeviceGetCount");
    *count = (int)setting("STANDIN_DEVICES", 1);
    return OK;
}

DRIVER_API(cuDeviceGet, int *device, int ordinal)
{
    FAULT("cuDeviceGet");
    *device = ordinal;
    return ordinal >= 0 && (uint64_t)ordinal < setting("STANDIN_DEVICES", 1)
               ? OK
               : INVALID_DEVICE;
}

DRIVER_API(cuDeviceGetName, char *name, int size, int device)
{
    FAULT("cuDeviceGetName");
    snprintf(name, (size_t)size, "stand-in device %d", device);
    return OK;
}

DRIVER_API(cuDeviceGetUuid_v2, void *uuid, int device)
{
    FAULT("cuDeviceGetUuid_v2");
    memset(uuid, 0x5a, 16);
    ((unsigned char *)uuid)[15] = (unsigned char)device;
    return OK;
}

DRIVER_API(cuDeviceTotalMem_v2, size_t *bytes, int device)
{
    (void)device;
    FAULT("cuDeviceTotalMem_v2");
    *bytes = setting("STANDIN_MEMORY", 1 << 30);
    return OK;
}

DRIVER_API(cuDeviceGetAttribute, int *value, int attribute, int device)
{
    bool shares = !setting("STANDIN_NO_SHARING", 0);

    (void)device;
    FAULT("cuDeviceGetAttribute");
    *value = attribute == DRIVER_MULTIPROCESSORS    ? 2
             : attribute == DRIVER_CAPABILITY_MAJOR ? 9
             : attribute == DRIVER_VIRTUAL_MEMORY || attribute == DRIVER_POSIX_HANDLES
                 ? shares
                 : 0;
    return OK;
}

DRIVER_API(cuDevicePrimaryCtxRetain, void **context, int device)
{
    static int primary[8];

    FAULT("cuDevicePrimaryCtxRetain");
    *context = &primary[device & 7];
    alive(1);
    return OK;
}

DRIVER_API(cuDevicePrimaryCtxRelease_v2, int device)
{
    (void)device;
    alive(-1);
    return OK;
}

DRIVER_API(cuCtxPushCurrent_v2, void *context)
{
    FAULT("cuCtxPushCurrent_v2");
    if (!context)
        return misuse("no context is made current");
    contexts++;
    return OK;
}

DRIVER_API(cuCtxPopCurrent_v2, void **context)
{
    if (!contexts) {
        misuse("a context is popped that was not pushed");
        return INVALID_CONTEXT;
    }
    contexts--;
    *context = NULL;
    return OK;
}

DRIVER_API(cuCtxSynchronize, void)
{
    ENTER("cuCtxSynchronize");
    pthread_mutex_lock(&lock);
    for (struct stream *s = streams; s; s = s->next)
        drain(s, NULL);
    pthread_mutex_unlock(&lock);
    return OK;
}

DRIVER_API(cuModuleLoadData, void **module, const void *image)
{
    static int code;

    ENTER("cuModuleLoadData");
    if (!image)
        return INVALID_VALUE;
    *module = &code;
    alive(1);
    return OK;
}

DRIVER_API(cuModuleUnload, void *module)
{
    (void)module;
    alive(-1);
    return OK;
}

DRIVER_API(cuModuleGetFunction, void **function, void *module, const char *name)
{
    ENTER("cuModuleGetFunction");
    *function = module;
    return strcmp(name, "unshard_gather") == 0 ? OK : NOT_FOUND;
}

/* ---- memory ---- */

DRIVER_API(cuMemGetInfo_v2, size_t *left, size_t *total)
{
    ENTER("cuMemGetInfo_v2");
    *total = setting("STANDIN_MEMORY", 1 << 30);
    pthread_mutex_lock(&lock);
    *left = used < *total ? *total - used : 0;
    pthread_mutex_unlock(&lock);
    return OK;
}

static int new_memory(enum range_kind kind, uint64_t *at, size_t size, size_t align)
{
    uint64_t most = setting("STANDIN_MEMORY", 1 << 30);
    bool counts = kind == RANGE_DEVICE;
    void *p = NULL;
    int ret = OUT_OF_MEMORY;

    pthread_mutex_lock(&lock);
    if (size && (!counts || (size <= most && used <= most - size)) &&
        posix_memalign(&p, align, size) == 0) {
        memset(p, 0xcd, size);
        ret = add_range(kind, (uintptr_t)p, size);
        if (ret == OK)
            used += counts ? size : 0;
        else
            free(p);
    }
    pthread_mutex_unlock(&lock);
    *at = (uintptr_t)p;
    return ret;
}

static int free_memory(enum range_kind kind, uint64_t at)
{
    uint64_t size;

    pthread_mutex_lock(&lock);
    size = drop_range(kind, at);
    if (size && in_use(at, size))
        misuse("memory is freed that a copy is to use");
    used -= kind == RANGE_DEVICE ? size : 0;
    pthread_mutex_unlock(&lock);
    if (!size)
        return misuse("memory is freed that was not allocated");
    free((void *)(uintptr_t)at);
    return OK;
}

DRIVER_API(cuMemAlloc_v2, uint64_t *at, size_t size)
{
    ENTER("cuMemAlloc_v2");
    return new_memory(RANGE_DEVICE, at, size, ALIGN);
}

DRIVER_API(cuMemFree_v2, uint64_t at)
{
    ENTER_FREE("cuMemFree_v2");
    return free_memory(RANGE_DEVICE, at);
}

DRIVER_API(cuMemHostAlloc, void **p, size_t size, unsigned flags)
{
    uint64_t at;
    int ret;

    (void)flags;
    ENTER("cuMemHostAlloc");
    ret = new_memory(RANGE_PINNED, &at, size, PINNED_ALIGN);
    *p = (void *)(uintptr_t)at;
    return ret;
}

DRIVER_API(cuMemFreeHost, void *p)
{
    ENTER_FREE("cuMemFreeHost");
    return free_memory(RANGE_PINNED, (uintptr_t)p);
}

static int copy_now(uint64_t device, size_t size, void *to, const void *from)
{
    bool good;

    pthread_mutex_lock(&lock);
    good = find_range(RANGE_DEVICE, device, size) != NULL;
    if (good)
        memcpy(to, from, size);
    pthread_mutex_unlock(&lock);
    return good ? OK : misuse("a copy of %zu bytes leaves device memory", size);
}

DRIVER_API(cuMemcpyHtoD_v2, uint64_t to, const void *from, size_t size)
{
    ENTER("cuMemcpyHtoD_v2");
    return copy_now(to, size, (void *)(uintptr_t)to, from);
}

DRIVER_API(cuMemcpyDtoH_v2, void *to, uint64_t from, size_t size)
{
    ENTER("cuMemcpyDtoH_v2");
    return copy_now(from, size, to, (const void *)(uintptr_t)from);
}

/* ---- streams and events ---- */

DRIVER_API(cuStreamCreate, void **stream, unsigned flags)
{
    struct stream *s;

    (void)flags;
    ENTER("cuStreamCreate");
    s = calloc(1, sizeof *s);
    if (!s)
        return OUT_OF_MEMORY;
    s->last = &s->first;
    pthread_mutex_lock(&lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    alive(1);
    *stream = s;
    return OK;
}

DRIVER_API(cuStreamDestroy_v2, void *stream)
{
    struct stream *s = stream, **p;

    ENTER_FREE("cuStreamDestroy_v2");
    pthread_mutex_lock(&lock);
    drain(s, NULL);
    for (p = &streams; *p != s; p = &(*p)->next)
        ;
    *p = s->next;
    pthread_mutex_unlock(&lock);
    alive(-1);
    free(s);
    return OK;
}

/* Work that was not done when a context fails never is. */
static void discard(struct stream *s)
{
    while (s->first) {
        struct op *op = s->first;

        s->first = op->next;
        if (op->kind == OP_EVENT)
            run_op(op);
        free(op);
    }
    s->last = &s->first;
}

DRIVER_API(cuStreamSynchronize, void *stream)
{
    int ret;

    if (!contexts)
        return misuse("cuStreamSynchronize without a current context");
    ret = fault("cuStreamSynchronize");
    pthread_mutex_lock(&lock);
    if (stream && ret)
        discard(stream);
    else if (stream)
        drain(stream, NULL);
    pthread_mutex_unlock(&lock);
    return ret;
}

DRIVER_API(cuMemcpyHtoDAsync_v2, uint64_t to, const void *from, size_t size,
           void *stream)
{
    int ret;

    ENTER("cuMemcpyHtoDAsync_v2");
    pthread_mutex_lock(&lock);
    ret = push(
        stream,
        &(struct op){.kind = OP_COPY, .to = to, .from = (uintptr_t)from, .size = size});
    pthread_mutex_unlock(&lock);
    return ret;
}

DRIVER_API(cuLaunchKernel, void *function, unsigned grid_x, unsigned grid_y,
           unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
           unsigned shared, void *stream, void **argument, void **extra)
{
    struct op op = {.kind = OP_KERNEL, .lanes = block_x};
    int ret;

    (void)function;
    ENTER("cuLaunchKernel");
    if (!grid_x || grid_y != 1 || grid_z != 1 || block_x < 32 || block_x > 1024 ||
        block_x & (block_x - 1) || block_y != 1 || block_z != 1 || shared || extra)
        return misuse("a kernel is launched with a grid that it is not made for");
    memcpy(&op.table, argument[0], sizeof op.table);
    memcpy(&op.boxes, argument[1], sizeof op.boxes);
    memcpy(&op.tiles, argument[2], sizeof op.tiles);
    pthread_mutex_lock(&lock);
    ret = push(stream, &op);
    pthread_mutex_unlock(&lock);
    return ret;
}

DRIVER_API(cuEventCreate, void **event, unsigned flags)
{
    (void)flags;
    ENTER("cuEventCreate");
    *event = calloc(1, sizeof(struct event));
    if (!*event)
        return OUT_OF_MEMORY;
    alive(1);
    return OK;
}

DRIVER_API(cuEventDestroy_v2, void *event)
{
    struct event *v = event;

    ENTER_FREE("cuEventDestroy_v2");
    pthread_mutex_lock(&lock);
    v->freed = v->pending != 0;
    if (!v->freed)
        free(v);
    pthread_mutex_unlock(&lock);
    alive(-1);
    return OK;
}

DRIVER_API(cuEventRecord, void *event, void *stream)
{
    struct event *v = event;
    int ret;

    ENTER("cuEventRecord");
    pthread_mutex_lock(&lock);
    ret = push(stream, &(struct op){.kind = OP_EVENT, .event = v});
    if (ret == OK) {
        v->stream = stream;
        v->pending++;
    }
    pthread_mutex_unlock(&lock);
    return ret;
}

DRIVER_API(cuEventSynchronize, void *event)
{
    struct event *v = event;

    ENTER("cuEventSynchronize");
    pthread_mutex_lock(&lock);
    if (v->pending)
        drain(v->stream, v);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* ---- memory that is shared ---- */

DRIVER_API(cuMemGetAllocationGranularity, size_t *granule,
           const struct driver_allocation *kind, int option)
{
    (void)option;
    ENTER("cuMemGetAllocationGranularity");
    *granule = GRANULE;
    return kind->type == DRIVER_PINNED ? OK : INVALID_VALUE;
}

static int new_block(uint64_t *handle, int fd, size_t size, bool ours)
{
    struct block *b = fd < 0 ? NULL : malloc(sizeof *b);

    if (!b) {
        if (fd >= 0)
            close(fd);
        return OUT_OF_MEMORY;
    }
    *b = (struct block){fd, size, ours};
    *handle = (uintptr_t)b;
    alive(1);
    return OK;
}

DRIVER_API(cuMemCreate, uint64_t *handle, size_t size,
           const struct driver_allocation *kind, unsigned long long flags)
{
    uint64_t most = setting("STANDIN_MEMORY", 1 << 30);
    int fd, ret = OUT_OF_MEMORY;

    (void)flags;
    ENTER("cuMemCreate");
    if (size == 0 || size % GRANULE || kind->handle_types != DRIVER_DESCRIPTOR)
        return misuse("a block of %zu bytes, handles of kind %d", size,
                      kind->handle_types);
    pthread_mutex_lock(&lock);
    if (size <= most && used <= most - size) {
        fd = memfd_create("device memory", MFD_CLOEXEC);
        if (fd >= 0 && ftruncate(fd, (off_t)size) == 0)
            ret = new_block(handle, fd, size, true);
        used += ret == OK ? size : 0;
    }
    pthread_mutex_unlock(&lock);
    return ret;
}

DRIVER_API(cuMemRelease, uint64_t handle)
{
    struct block *b = (struct block *)(uintptr_t)handle;

    ENTER_FREE("cuMemRelease");
    pthread_mutex_lock(&lock);
    used -= b->ours ? b->size : 0;
    pthread_mutex_unlock(&lock);
    close(b->fd);
    free(b);
    alive(-1);
    return OK;
}

DRIVER_API(cuMemAddressReserve, uint64_t *at, size_t size, size_t align, uint64_t want,
           unsigned long long flags)
{
    void *p;

    (void)align, (void)want, (void)flags;
    ENTER("cuMemAddressReserve");
    p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *at = (uintptr_t)p;
    if (p == MAP_FAILED)
        return OUT_OF_MEMORY;
    alive(1);
    return OK;
}

DRIVER_API(cuMemAddressFree, uint64_t at, size_t size)
{
    ENTER_FREE("cuMemAddressFree");
    alive(-1);
    return munmap((void *)(uintptr_t)at, size) == 0 ? OK : INVALID_VALUE;
}

DRIVER_API(cuMemMap, uint64_t at, size_t size, size_t offset, uint64_t handle,
           unsigned long long flags)
{
    const struct block *b = (const struct block *)(uintptr_t)handle;

    (void)flags;
    ENTER("cuMemMap");
    if (offset || size > b->size)
        return misuse("%zu bytes of a block of %zu are mapped", size, b->size);
    if (mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, b->fd,
             0) == MAP_FAILED)
        return OUT_OF_MEMORY;
    return OK;
}

DRIVER_API(cuMemSetAccess, uint64_t at, size_t size, const struct driver_access *access,
           size_t count)
{
    int ret;

    ENTER("cuMemSetAccess");
    if (count != 1 || access->flags != DRIVER_READ_WRITE ||
        mprotect((void *)(uintptr_t)at, size, PROT_READ | PROT_WRITE) < 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    ret = add_range(RANGE_SHARED, at, size);
    pthread_mutex_unlock(&lock);
    return ret;
}

DRIVER_API(cuMemUnmap, uint64_t at, size_t size)
{
    ENTER_FREE("cuMemUnmap");
    pthread_mutex_lock(&lock);
    drop_range(RANGE_SHARED, at);
    pthread_mutex_unlock(&lock);
    return mmap((void *)(uintptr_t)at, size, PROT_NONE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED
               ? INVALID_VALUE
               : OK;
}

DRIVER_API(cuMemExportToShareableHandle, void *out, uint64_t handle, int kind,
           unsigned long long flags)
{
    int fd;

    (void)flags;
    ENTER("cuMemExportToShareableHandle");
    if (kind != DRIVER_DESCRIPTOR)
        return misuse("a handle of kind %d", kind);
    fd = fcntl(((const struct block *)(uintptr_t)handle)->fd, F_DUPFD_CLOEXEC, 0);
    memcpy(out, &fd, sizeof fd);
    return fd < 0 ? OUT_OF_MEMORY : OK;
}

DRIVER_API(cuMemImportFromShareableHandle, uint64_t *handle, void *descriptor, int kind)
{
    int fd = (int)(intptr_t)descriptor;
    struct stat st;

    ENTER("cuMemImportFromShareableHandle");
    if (kind != DRIVER_DESCRIPTOR || fstat(fd, &st) < 0)
        return INVALID_VALUE;
    return new_block(handle, fcntl(fd, F_DUPFD_CLOEXEC, 0), (size_t)st.st_size, false);
}
