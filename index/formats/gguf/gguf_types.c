/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf_types.c - the element types of ggml: names and sizes. */
#include "index/formats/gguf/gguf_types.h"

#include <stdio.h>

/* Numbers and sizes as in ggml.h and gguf-py 0.19.0 (constants.py). */
static const struct gguf_type types[] = {
    [0] = {"F32", DTYPE_F32, 1, 4},          [1] = {"F16", DTYPE_F16, 1, 2},
    [2] = {"Q4_0", DTYPE_NONE, 32, 18},      [3] = {"Q4_1", DTYPE_NONE, 32, 20},
    [6] = {"Q5_0", DTYPE_NONE, 32, 22},      [7] = {"Q5_1", DTYPE_NONE, 32, 24},
    [8] = {"Q8_0", DTYPE_NONE, 32, 34},      [10] = {"Q2_K", DTYPE_NONE, 256, 84},
    [11] = {"Q3_K", DTYPE_NONE, 256, 110},   [12] = {"Q4_K", DTYPE_NONE, 256, 144},
    [13] = {"Q5_K", DTYPE_NONE, 256, 176},   [14] = {"Q6_K", DTYPE_NONE, 256, 210},
    [15] = {"Q8_K", DTYPE_NONE, 256, 292},   [16] = {"IQ2_XXS", DTYPE_NONE, 256, 66},
    [17] = {"IQ2_XS", DTYPE_NONE, 256, 74},  [18] = {"IQ3_XXS", DTYPE_NONE, 256, 98},
    [19] = {"IQ1_S", DTYPE_NONE, 256, 50},   [20] = {"IQ4_NL", DTYPE_NONE, 32, 18},
    [21] = {"IQ3_S", DTYPE_NONE, 256, 110},  [22] = {"IQ2_S", DTYPE_NONE, 256, 82},
    [23] = {"IQ4_XS", DTYPE_NONE, 256, 136}, [24] = {"I8", DTYPE_I8, 1, 1},
    [25] = {"I16", DTYPE_I16, 1, 2},         [26] = {"I32", DTYPE_I32, 1, 4},
    [27] = {"I64", DTYPE_I64, 1, 8},         [28] = {"F64", DTYPE_F64, 1, 8},
    [29] = {"IQ1_M", DTYPE_NONE, 256, 56},   [30] = {"BF16", DTYPE_BF16, 1, 2},
    [34] = {"TQ1_0", DTYPE_NONE, 256, 54},   [35] = {"TQ2_0", DTYPE_NONE, 256, 66},
    [39] = {"MXFP4", DTYPE_NONE, 32, 17},    [40] = {"NVFP4", DTYPE_NONE, 64, 36},
    [41] = {"Q1_0", DTYPE_NONE, 128, 18},
};

/*
 * Taken back, or only ever used in memory. Q8_1 has two sizes: 36 bytes in ggml, 40 in
 * gguf-py.
 */
static const char *const gone[] = {
    [4] = "Q4_2",        [5] = "Q4_3",        [9] = "Q8_1",
    [31] = "Q4_0_4_4",   [32] = "Q4_0_4_8",   [33] = "Q4_0_8_8",
    [36] = "IQ4_NL_4_4", [37] = "IQ4_NL_4_8", [38] = "IQ4_NL_8_8",
};

const struct gguf_type *gguf_type_of(uint32_t number)
{
    if (number >= ARRAY_SIZE(types) || !types[number].name)
        return NULL;
    return &types[number];
}

enum { Q2_0 = 42 };

const char *gguf_type_why(uint32_t number, char *dst, size_t size)
{
    if (number == Q2_0)
        snprintf(
            dst, size,
            "ggml's type Q2_0 is 18 bytes for 64 elements, in forks 34 for 128, and "
            "the file does not say which");
    else if (number < ARRAY_SIZE(gone) && gone[number])
        snprintf(dst, size, "ggml's type %s is in no file that ggml reads now",
                 gone[number]);
    else
        snprintf(dst, size, "ggml's type %" PRIu32 " is not known", number);
    return dst;
}
