/* SPDX-License-Identifier: MIT */
/* fs/uring_priv.h - what the files of fs/uring share. */
#ifndef UFS_FS_URING_PRIV_H
#define UFS_FS_URING_PRIV_H

#include <pthread.h>
#include <stdatomic.h>

#include "fs/request.h"
#include "fs/ring.h"
#include "fs/uring.h"

enum {
    ENTRIES =
        32, /* of a queue: so many of its requests can wait, for a scan or a disk */
    WORKERS = 10,
    MESSAGE_MAX = 32 << 10, /* names and attributes; nothing is written */
    STRIDE_MORE = MESSAGE_MAX + (8 << 10),
    OP_READ = 15,
    PROCESSORS_MAX = 8192,
};

/* include/uapi/linux/fuse.h: enum fuse_uring_cmd. */
enum { COMMAND_REGISTER = 1, COMMAND_COMMIT_AND_FETCH = 2 };

/* struct fuse_in_header, struct fuse_out_header, struct fuse_uring_req_header. */
struct in_head {
    uint32_t len, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid, padding;
};
struct out_head {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};
struct entry_head {
    union {
        struct in_head in;
        struct out_head out;
        char bytes[128];
    };
    char op_in[128];
    uint64_t flags, commit;
    uint32_t payload, padding;
    uint64_t reserved;
};

struct entry {
    struct queue *queue;
    struct entry *next;          /* on the list of work, or of answers */
    atomic_uint_fast64_t unique; /* of the request; 0: it is answered */
    uint64_t commit;
    struct iovec iov[2]; /* head and payload, for the kernel */
    struct entry_head *head;
    char *payload, *message; /* the message as /dev/fuse would have given it */
    size_t len;              /* of the message */
    bool is_read, deferred;
    struct request request; /* of a deferred one */
};

struct queue {
    struct uring *uring;
    unsigned index;
    pthread_t thread;
    bool started;
    struct uring_ring ring;
    int event;
    uint64_t events;
    unsigned registered; /* entries that the kernel took */
    char *memory;
    struct entry entry[ENTRIES];
    pthread_mutex_t lock;
    struct entry *answered; /* by other threads; guarded by lock */
};

enum state { MADE, REGISTER, GIVEN_UP };

struct uring {
    struct fs *fs;
    size_t payload_max, stride;
    unsigned nqueues;
    struct queue *queue;
    atomic_bool on, takes, stop;
    atomic_uint busy; /* threads that are in a handler */

    pthread_mutex_t lock;
    pthread_cond_t more, changed;
    /* guarded by lock */
    struct entry *work, **work_tail;
    enum state state;
    unsigned ready, failed; /* queues that came as far as `state` asks */
    int error;              /* of one that failed */
    bool workers_end;
    pthread_t worker[WORKERS];
    unsigned workers;
};

/* ---- what this machine has: fs/uring_machine.c ---- */

/* Why there can be no rings here, as the counters say it; NULL: nothing is known against it. */
const char *uring_lacks(void);
extern const char uring_off_kernel[], uring_off_memory[];

/* As the kernel counts them; 0: not to be found out. */
unsigned uring_processors(void);

/* ---- requests and answers: fs/uring_request.c ---- */

/* This thread is q's from now on. */
void uring_own(struct queue *q);

/* The kernel gave this entry back with a request: answers it, or leaves it to a worker. */
void uring_take(struct entry *t);
/* The entry's answer to the kernel; on the queue's own thread. */
void uring_give_back(struct entry *t);
/* On a worker, whose `message` has MESSAGE_MAX bytes. */
void uring_work(struct entry *t, char *message);

#endif
