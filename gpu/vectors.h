/* SPDX-License-Identifier: MIT */
/* gpu/vectors.h - code of their own for processors that have wide vectors. */
#ifndef UFS_GPU_VECTORS_H
#define UFS_GPU_VECTORS_H

/*
 * Processors of the last ten years have twice the lanes of what every x86-64 has, and the
 * minima and blends that loops over elements want: such loops are compiled for them too,
 * and chosen at run time. Not under the thread sanitizer: the choice is made before its
 * memory is there.
 */
#if defined(__x86_64__) && defined(__has_attribute) && !defined(__SANITIZE_THREAD__)
#if __has_attribute(target_clones)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef VECTORS
#define VECTORS
#endif

/*
 * The same with vectors of 512 bits besides. Not under the address sanitizer: what gcc 12's
 * runtime keeps of stacks is aligned for smaller ones. Not by clang, which until 16 gives
 * the chosen function another name than other files ask for.
 */
#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 12 &&                    \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define WIDE_VECTORS                                                                   \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE_VECTORS
#endif

#endif
