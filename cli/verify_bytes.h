/* SPDX-License-Identifier: MIT */
/* cli/verify_bytes.h - every byte of a tensor, read once for all that is asked of it. */
#ifndef UFS_CLI_VERIFY_BYTES_H
#define UFS_CLI_VERIFY_BYTES_H

#include "cli/cli.h"
#include "gpu/nonfinite.h"

struct archives;

struct tensor_check {
    struct reader *reader;
    const struct reader_env *env;
    struct archives *archives;
    enum dtype dtype; /* as shown */
    bool cast;        /* another is stored */
};

/* What was found in the bytes of a tensor. */
struct byte_findings {
    struct nonfinite nonfinite;
    uint64_t checksums, bad_checksums;
    char bad_checksum[1200]; /* the first that does not hold; empty: none */
};

/*
 * Reads all of the tensor: NaN and Inf are counted, its items are held against their
 * checksums and their copies, and what archives have of it is noted there. Bytes that are
 * wanted for several of these are read once where they stand one behind the other. A
 * negative errno is damage of the tensor; a checksum that does not hold is none.
 */
int verify_bytes(const struct tensor_check *t, struct byte_findings *out,
                 struct err *e);

#endif
