/* SPDX-License-Identifier: MIT */
/* fs/ring.c - one io_uring of the kernel, held to commands of /dev/fuse. */
#include "fs/ring.h"

#include <errno.h>
#include <linux/io_uring.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/err.h"

enum { COMMAND_BYTES = 128 };

/* In the command area of a submission: struct fuse_uring_cmd_req (Linux 6.14). */
struct command {
    uint64_t flags, commit;
    uint16_t queue;
    uint8_t padding[6];
};

static int setup(unsigned entries, struct io_uring_params *p)
{
    /* One thread submits and takes: completions wait for it to ask (Linux 6.1). */
    *p = (struct io_uring_params){
        .flags = IORING_SETUP_SQE128 | IORING_SETUP_R_DISABLED |
                 IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
    long fd = syscall(SYS_io_uring_setup, entries, p);

    return fd < 0 ? -errno : (int)fd;
}

int ring_try(void)
{
    struct io_uring_params p;
    int fd = setup(1, &p);

    if (fd < 0)
        return -fd;
    close(fd);
    return 0;
}

static int map_queues(struct uring_ring *r, const struct io_uring_params *p)
{
    size_t sq = p->sq_off.array + p->sq_entries * sizeof(unsigned);
    size_t cq = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    unsigned *array;
    char *at;

    r->queues_size = MAX(sq, cq);
    r->sqes_size = (size_t)p->sq_entries * COMMAND_BYTES;
    at = mmap(NULL, r->queues_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
              r->fd, IORING_OFF_SQ_RING);
    if (at == MAP_FAILED)
        return -errno;
    r->queues = at;
    r->sqes = mmap(NULL, r->sqes_size, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_SQES);
    if (r->sqes == MAP_FAILED) {
        r->sqes = NULL;
        return -errno;
    }
    r->sq_tail = (unsigned *)(void *)(at + p->sq_off.tail);
    r->cq_head = (unsigned *)(void *)(at + p->cq_off.head);
    r->cq_tail = (unsigned *)(void *)(at + p->cq_off.tail);
    r->cqes = (struct io_uring_cqe *)(void *)(at + p->cq_off.cqes);
    r->sq_mask = p->sq_entries - 1;
    r->cq_mask = p->cq_entries - 1;
    array = (unsigned *)(void *)(at + p->sq_off.array);
    for (unsigned i = 0; i < p->sq_entries; i++)
        array[i] = i;
    return 0;
}

static int enroll(const struct uring_ring *r, unsigned what, const void *arg,
                  unsigned count)
{
    return syscall(SYS_io_uring_register, r->fd, what, arg, count) < 0 ? -errno : 0;
}

static int restrict_and_enable(const struct uring_ring *r, const int fds[RING_FILES])
{
    const struct io_uring_restriction only[] = {
        {.opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_URING_CMD},
        {.opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_READ},
        {.opcode = IORING_RESTRICTION_SQE_FLAGS_REQUIRED,
         .sqe_flags = IOSQE_FIXED_FILE},
    };
    int rc = enroll(r, IORING_REGISTER_FILES, fds, RING_FILES);

    if (rc == 0)
        rc = enroll(r, IORING_REGISTER_RESTRICTIONS, only, ARRAY_SIZE(only));
    return rc == 0 ? enroll(r, IORING_REGISTER_ENABLE_RINGS, NULL, 0) : rc;
}

int ring_open(struct uring_ring *r, unsigned entries, const int fds[RING_FILES],
              struct err *e)
{
    struct io_uring_params p;
    int rc;

    *r = (struct uring_ring){.fd = setup(entries, &p)};
    rc = r->fd < 0 ? r->fd : map_queues(r, &p);
    if (rc == 0)
        rc = restrict_and_enable(r, fds);
    if (rc < 0) {
        ring_close(r);
        return err_set(e, -rc, "io_uring: %s", strerror(-rc));
    }
    return 0;
}

void ring_close(struct uring_ring *r)
{
    if (r->sqes)
        munmap(r->sqes, r->sqes_size);
    if (r->queues)
        munmap(r->queues, r->queues_size);
    if (r->fd >= 0)
        close(r->fd);
    *r = (struct uring_ring){.fd = -1};
}

/* Never full: no more are under way than the ring was opened for. */
static struct io_uring_sqe *next_sqe(struct uring_ring *r)
{
    char *sqe = (char *)r->sqes + (size_t)(r->tail++ & r->sq_mask) * COMMAND_BYTES;

    memset(sqe, 0, COMMAND_BYTES);
    return (struct io_uring_sqe *)(void *)sqe;
}

void ring_command(struct uring_ring *r, uint32_t command, const struct iovec *iov,
                  uint16_t queue, uint64_t commit, uint64_t tag)
{
    const struct command c = {.commit = commit, .queue = queue};
    struct io_uring_sqe *sqe = next_sqe(r);

    sqe->opcode = IORING_OP_URING_CMD;
    sqe->flags = IOSQE_FIXED_FILE;
    sqe->fd = RING_FUSE;
    sqe->cmd_op = command;
    sqe->user_data = tag;
    if (iov) {
        sqe->addr = (uintptr_t)iov;
        sqe->len = 2;
    }
    memcpy(sqe->cmd, &c, sizeof c);
}

void ring_read(struct uring_ring *r, uint64_t *into, uint64_t tag)
{
    struct io_uring_sqe *sqe = next_sqe(r);

    sqe->opcode = IORING_OP_READ;
    sqe->flags = IOSQE_FIXED_FILE;
    sqe->fd = RING_EVENT;
    sqe->addr = (uintptr_t)into;
    sqe->len = sizeof *into;
    sqe->user_data = tag;
}

int ring_wait(struct uring_ring *r, unsigned wait)
{
    long n;

    __atomic_store_n(r->sq_tail, r->tail, __ATOMIC_RELEASE);
    n = syscall(SYS_io_uring_enter, r->fd, r->tail - r->submitted, wait,
                IORING_ENTER_GETEVENTS, NULL, 0);
    if (n < 0)
        return errno == EINTR || errno == EAGAIN || errno == EBUSY ? 0 : -errno;
    r->submitted += (unsigned)n;
    return 0;
}

bool ring_next(struct uring_ring *r, uint64_t *tag, int32_t *result)
{
    unsigned head = *r->cq_head;
    const struct io_uring_cqe *c = &r->cqes[head & r->cq_mask];

    if (head == __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE))
        return false;
    *tag = c->user_data;
    *result = c->res;
    __atomic_store_n(r->cq_head, head + 1, __ATOMIC_RELEASE);
    return true;
}
