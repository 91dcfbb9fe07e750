/* SPDX-License-Identifier: MIT */
/* gpu/driver.h - the functions of the CUDA driver that we call, found at run time. */
#ifndef UFS_GPU_DRIVER_H
#define UFS_GPU_DRIVER_H

#include "base/base.h"

struct err;

/*
 * Declared here as cuda.h of toolkit 13.0 has them, so that building takes no CUDA at all.
 * Names with _v2 are those that cuda.h's macros stand for. Results are CUresult; pointers
 * to opaque structs are void *, CUdeviceptr and CUmemGenericAllocationHandle uint64_t.
 */
struct driver_location {
    int type, id;
};

/* CUmemAllocationProp_v1. */
struct driver_allocation {
    int type, handle_types;
    struct driver_location location;
    void *windows;
    unsigned char flags[8];
};

/* CUmemAccessDesc_v1. */
struct driver_access {
    struct driver_location location;
    int flags;
};

enum {
    DRIVER_OUT_OF_MEMORY = 2,
    DRIVER_NOT_SUPPORTED = 801,
    DRIVER_MULTIPROCESSORS = 16, /* CU_DEVICE_ATTRIBUTE_... */
    DRIVER_PCI_BUS = 33,
    DRIVER_PCI_DEVICE = 34,
    DRIVER_PCI_DOMAIN = 50,
    DRIVER_CAPABILITY_MAJOR = 75,
    DRIVER_CAPABILITY_MINOR = 76,
    DRIVER_VIRTUAL_MEMORY = 102,
    DRIVER_POSIX_HANDLES = 103,
    DRIVER_PINNED = 1,       /* CU_MEM_ALLOCATION_TYPE_PINNED */
    DRIVER_ON_DEVICE = 1,    /* CU_MEM_LOCATION_TYPE_DEVICE */
    DRIVER_DESCRIPTOR = 1,   /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
    DRIVER_READ_WRITE = 3,   /* CU_MEM_ACCESS_FLAGS_PROT_READWRITE */
    DRIVER_NON_BLOCKING = 1, /* CU_STREAM_NON_BLOCKING */
    DRIVER_PORTABLE = 1,     /* CU_MEMHOSTALLOC_PORTABLE */
    DRIVER_NO_TIMING = 2,    /* CU_EVENT_DISABLE_TIMING */
};

/* X(name, symbol, parameters) */
#define DRIVER_FUNCTIONS(X)                                                            \
    X(init, "cuInit", (unsigned))                                                      \
    X(version, "cuDriverGetVersion", (int *))                                          \
    X(error_name, "cuGetErrorName", (int, const char **))                              \
    X(device_count, "cuDeviceGetCount", (int *))                                       \
    X(device_get, "cuDeviceGet", (int *, int))                                         \
    X(device_name, "cuDeviceGetName", (char *, int, int))                              \
    X(device_uuid, "cuDeviceGetUuid_v2", (void *, int))                                \
    X(device_memory, "cuDeviceTotalMem_v2", (size_t *, int))                           \
    X(device_attribute, "cuDeviceGetAttribute", (int *, int, int))                     \
    X(context_retain, "cuDevicePrimaryCtxRetain", (void **, int))                      \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (int))                          \
    X(context_push, "cuCtxPushCurrent_v2", (void *))                                   \
    X(context_pop, "cuCtxPopCurrent_v2", (void **))                                    \
    X(context_wait, "cuCtxSynchronize", (void))                                        \
    X(module_load, "cuModuleLoadData", (void **, const void *))                        \
    X(module_unload, "cuModuleUnload", (void *))                                       \
    X(module_function, "cuModuleGetFunction", (void **, void *, const char *))         \
    X(memory_info, "cuMemGetInfo_v2", (size_t *, size_t *))                            \
    X(memory_alloc, "cuMemAlloc_v2", (uint64_t *, size_t))                             \
    X(memory_free, "cuMemFree_v2", (uint64_t))                                         \
    X(pinned_alloc, "cuMemHostAlloc", (void **, size_t, unsigned))                     \
    X(pinned_free, "cuMemFreeHost", (void *))                                          \
    X(copy_in, "cuMemcpyHtoD_v2", (uint64_t, const void *, size_t))                    \
    X(copy_out, "cuMemcpyDtoH_v2", (void *, uint64_t, size_t))                         \
    X(copy_in_later, "cuMemcpyHtoDAsync_v2", (uint64_t, const void *, size_t, void *)) \
    X(stream_new, "cuStreamCreate", (void **, unsigned))                               \
    X(stream_free, "cuStreamDestroy_v2", (void *))                                     \
    X(stream_wait, "cuStreamSynchronize", (void *))                                    \
    X(event_new, "cuEventCreate", (void **, unsigned))                                 \
    X(event_free, "cuEventDestroy_v2", (void *))                                       \
    X(event_record, "cuEventRecord", (void *, void *))                                 \
    X(event_wait, "cuEventSynchronize", (void *))                                      \
    X(launch, "cuLaunchKernel",                                                        \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,   \
       void *, void **, void **))

/* Since CUDA 10.2; a driver without them has no memory to share. */
#define DRIVER_SHARING_FUNCTIONS(X)                                                    \
    X(granularity, "cuMemGetAllocationGranularity",                                    \
      (size_t *, const struct driver_allocation *, int))                               \
    X(block_new, "cuMemCreate",                                                        \
      (uint64_t *, size_t, const struct driver_allocation *, unsigned long long))      \
    X(block_free, "cuMemRelease", (uint64_t))                                          \
    X(range_new, "cuMemAddressReserve",                                                \
      (uint64_t *, size_t, size_t, uint64_t, unsigned long long))                      \
    X(range_free, "cuMemAddressFree", (uint64_t, size_t))                              \
    X(map, "cuMemMap", (uint64_t, size_t, size_t, uint64_t, unsigned long long))       \
    X(unmap, "cuMemUnmap", (uint64_t, size_t))                                         \
    X(set_access, "cuMemSetAccess",                                                    \
      (uint64_t, size_t, const struct driver_access *, size_t))                        \
    X(block_export, "cuMemExportToShareableHandle",                                    \
      (void *, uint64_t, int, unsigned long long))                                     \
    X(block_import, "cuMemImportFromShareableHandle", (uint64_t *, void *, int))

struct driver {
    void *library;
    bool shares; /* the second list is there */
#define X(name, symbol, parameters) int(*name) parameters;
    DRIVER_FUNCTIONS(X)
    DRIVER_SHARING_FUNCTIONS(X)
#undef X
};

/* `path` NULL: "libcuda.so.1". -ENODEV with the reason when there is none that we can use. */
int driver_open(const char *path, struct driver *out, struct err *e);
void driver_close(struct driver *d);

/* 0, or what a result means in words: -ENOMEM, -ENOTSUP, -EIO. `what` was called. */
int driver_result(const struct driver *d, int result, const char *what, struct err *e);

/* Calls, for example, DRIVER_CALL(d, e, copy_in, to, from, len). */
#define DRIVER_CALL(d, e, name, ...)                                                   \
    driver_result((d), (d)->name(__VA_ARGS__), driver_symbol_##name, (e))

#define X(name, symbol, parameters)                                                    \
    static const char driver_symbol_##name[] UNUSED = symbol;
DRIVER_FUNCTIONS(X)
DRIVER_SHARING_FUNCTIONS(X)
#undef X

#endif
