/* SPDX-License-Identifier: MIT */
/* cli/tensor_list.h - the tensors of a checkpoint as a table in memory. */
#ifndef UFS_CLI_TENSOR_LIST_H
#define UFS_CLI_TENSOR_LIST_H

#include "cli/cli.h"

struct listed_tensor {
    const char *key; /* NUL-terminated, may hold NUL inside */
    size_t key_len;
    size_t wrapper;  /* leading bytes that its name in model.safetensors is without */
    const char *own; /* that name, where it is not just the rest of the key; or NULL */
    size_t own_len;
    uint32_t ord;
    enum dtype dtype;
    enum role role;
    uint64_t bytes;
    const char *shape; /* as JSON */
    const char *fault; /* or NULL */
};

/* Starts empty ({0}); texts live until tensor_list_release(). */
struct tensor_list {
    struct arena *texts;
    struct listed_tensor *row; /* in byte order of file names */
    size_t n, cap;
    uint64_t bytes;
};

/* Those for which keep() is true (NULL: all). */
int tensor_list_load(struct cli *c, struct catalog *catalog, int64_t checkpoint,
                     bool (*keep)(void *user, const struct tensor_info *t), void *user,
                     struct tensor_list *out);
void tensor_list_release(struct tensor_list *l);

#endif
