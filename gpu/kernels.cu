/* SPDX-License-Identifier: MIT */
/* gpu/kernels.cu - the one kernel; made to a fatbin and embedded where nvcc is there. */
#include "gpu/core.h"

static __device__ void copy_box(struct core_box *to, const struct core_box *from)
{
    for (uint32_t i = threadIdx.x; i < sizeof *to / sizeof(uint64_t); i += blockDim.x)
        ((uint64_t *)to)[i] = ((const uint64_t *)from)[i];
}

/* A block does whole tiles: tile blockIdx.x, and every gridDim.x-th after it. */
extern "C" __global__ void __launch_bounds__(256, 2)
    unshard_gather(const struct core_box *__restrict__ box, uint32_t n, uint64_t tiles)
{
    __shared__ struct core_box here;
    uint32_t have = UINT32_MAX;

    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        uint32_t i = core_find(box, n, tile);

        if (i != have) { /* of all threads of the block, or of none */
            __syncthreads();
            copy_box(&here, &box[i]);
            __syncthreads();
            have = i;
        }
        core_tile(&here, tile - here.first_tile, threadIdx.x, blockDim.x);
    }
}
