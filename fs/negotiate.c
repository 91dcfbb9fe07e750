/* SPDX-License-Identifier: MIT */
/* fs/negotiate.c - flags of the kernel's protocol that libfuse 3.14 does not know. */
#include "fs/negotiate.h"

#include <string.h>
#include <unistd.h>

enum {
    HEADER_IN = 40, /* struct fuse_in_header */
    OP_INIT = 26,
    STACK_DEPTH = 1, /* the file behind ours lies on a file system over none */
};

/* Kernel protocol 7.36: flags above 31 are in flags2 if this bit stands in flags. */
enum { INIT_EXT = 1 << 30 };
/* Flag 28 (7.33): the server takes set-id bits away, so no write has to ask for attributes first. */
enum { INIT_HANDLE_KILLPRIV_V2 = 1 << 28 };
/* Flag 36: files with FOPEN_DIRECT_IO can be mapped shared. */
enum { INIT2_DIRECT_IO_MMAP = 1 << 4 };
/* Flag 37 (7.40): opens may name a backing file. Needs max_stack_depth. */
enum { INIT2_PASSTHROUGH = 1 << 5 };

struct init_in {
    uint32_t major, minor, max_readahead, flags, flags2;
};

struct init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth, unused[6];
};

struct reply_head {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};

void negotiate_see(struct negotiation *n, const void *data, size_t len)
{
    const char *bytes = data;
    struct init_in in;
    uint32_t opcode;
    uint64_t unique;

    if (len < HEADER_IN + sizeof in)
        return;
    memcpy(&opcode, bytes + 4, sizeof opcode);
    if (opcode != OP_INIT)
        return;
    memcpy(&unique, bytes + 8, sizeof unique);
    memcpy(&in, bytes + HEADER_IN, sizeof in);
    n->offers_mmap = (in.flags & INIT_EXT) && (in.flags2 & INIT2_DIRECT_IO_MMAP);
    n->offers_killpriv = in.flags & INIT_HANDLE_KILLPRIV_V2;
    n->offers_passthrough = (in.flags & INIT_EXT) && (in.flags2 & INIT2_PASSTHROUGH);
    n->unique = unique;
}

bool negotiate_is_answer(const struct negotiation *n, const struct iovec *iov)
{
    struct reply_head head;

    memcpy(&head, iov[0].iov_base, sizeof head);
    return n->unique && head.unique == n->unique && !head.error;
}

void negotiate_accept(const struct negotiation *n, struct iovec *iov, int count,
                      struct negotiate_wants wants)
{
    struct init_out *out;

    if (count < 2 || iov[1].iov_len < sizeof *out)
        return;
    out = iov[1].iov_base;
    if (n->offers_killpriv)
        out->flags |= INIT_HANDLE_KILLPRIV_V2;
    if (n->offers_mmap) {
        out->flags |= INIT_EXT;
        out->flags2 |= INIT2_DIRECT_IO_MMAP;
    }
    if (n->offers_passthrough && wants.passthrough) {
        out->flags |= INIT_EXT;
        out->flags2 |= INIT2_PASSTHROUGH;
        out->max_stack_depth = STACK_DEPTH;
    }
}
