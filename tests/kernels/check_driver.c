/* SPDX-License-Identifier: MIT */
/* tests/kernels/check_driver.c - what gpu/driver.h says of the driver, against cuda.h. */
#include "gpu/driver.h"

#include <cuda.h>

#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)
#define SAME_FIELD(ours, our_field, theirs, their_field)                               \
    _Static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field),         \
                   #their_field)

SAME(DRIVER_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(DRIVER_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(DRIVER_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(DRIVER_PCI_BUS, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
SAME(DRIVER_PCI_DEVICE, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
SAME(DRIVER_PCI_DOMAIN, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
SAME(DRIVER_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(DRIVER_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(DRIVER_VIRTUAL_MEMORY, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(DRIVER_POSIX_HANDLES,
     CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(DRIVER_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(DRIVER_ON_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(DRIVER_DESCRIPTOR, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(DRIVER_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(DRIVER_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(DRIVER_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
SAME(DRIVER_NO_TIMING, CU_EVENT_DISABLE_TIMING);

SAME(sizeof(CUresult), sizeof(int));
SAME(sizeof(CUdevice), sizeof(int));
SAME(sizeof(CUuuid), 16);
SAME(sizeof(CUdeviceptr), sizeof(uint64_t));
SAME(sizeof(CUmemGenericAllocationHandle), sizeof(uint64_t));
SAME(sizeof(struct driver_allocation), sizeof(CUmemAllocationProp));
SAME_FIELD(struct driver_allocation, handle_types, CUmemAllocationProp,
           requestedHandleTypes);
SAME_FIELD(struct driver_allocation, location, CUmemAllocationProp, location);
SAME_FIELD(struct driver_allocation, windows, CUmemAllocationProp, win32HandleMetaData);
SAME_FIELD(struct driver_allocation, flags, CUmemAllocationProp, allocFlags);
SAME(sizeof(struct driver_access), sizeof(CUmemAccessDesc));
SAME_FIELD(struct driver_access, flags, CUmemAccessDesc, flags);
SAME(sizeof(struct driver_location), sizeof(CUmemLocation));
SAME_FIELD(struct driver_location, id, CUmemLocation, id);
