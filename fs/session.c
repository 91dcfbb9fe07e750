/* SPDX-License-Identifier: MIT */
/* fs/session.c - mounting: the background, the kernel's first request, signals, the end. */
#include "fs/fs.h"

#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "base/confine.h"
#include "base/guard.h"
#include "base/log.h"
#include "fs/bucket.h"
#include "fs/materialized.h"
#include "fs/edit.h"
#include "fs/holder.h"
#include "fs/queue.h"
#include "fs/mounts.h"
#include "fs/negotiate.h"
#include "fs/plans.h"
#include "fs/notify.h"
#include "fs/ops.h"
#include "fs/passthrough.h"
#include "fs/watch.h"

enum {
    THREADS = 10,
    WRITING = 64,       /* an fsync waits for closes, a close for an upload */
    LOG_KEPT = 8 << 20, /* a longer log is put aside when a mount begins */
    POKE_NS = 20000000,
    END_SECONDS = 5, /* a disk may hang: do not wait for it */
};

/* The server of one mount. fs is what requests get as their user data. */
struct session {
    struct fs *fs;
    const struct mount_options *options;
    const char *mountpoint;
    uint64_t
        device;     /* the mount's; the kernel gives the number to the next one again */
    int connection; /* /dev/fuse, as libfuse has it */
    int ready_fd;   /* to the process that waits for the mount; -1: foreground */
    int log_fd;     /* where the log goes once nobody waits; -1: nowhere */

    struct negotiation negotiation; /* the kernel's INIT request, until it is */
    atomic_bool answered;
    atomic_bool leaving; /* the server unmounts it */

    pthread_t main, signals, deadline;
    atomic_bool ended;
    atomic_bool has_deadline;
    pthread_mutex_t lock;
    pthread_cond_t in_time;
    bool is_in_time; /* guarded by lock: the deadline means nothing any more */
};

/* ---- the kernel's first request ---- */

/* Tells who waits that the mount can be used, and lets go of the terminal. */
static bool become_ready(struct session *s)
{
    const struct err fine = {0};
    int null;
    bool told;

    notify_manager("READY=1");
    if (s->ready_fd < 0)
        return true;
    null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null >= 0) {
        dup2(null, 0);
        dup2(null, 1);
        dup2(null, 2);
        close(null);
    }
    log_to(s->log_fd >= 0 ? s->log_fd : 2);
    told = write(s->ready_fd, &fine, sizeof fine) == sizeof fine;
    close(s->ready_fd);
    s->ready_fd = -1;
    return told;
}

static ssize_t io_read(int fd, void *data, size_t len, void *user)
{
    struct session *s = ((struct fs *)user)->owner;
    ssize_t n = read(fd, data, len);

    if (n > 0 && !s->answered)
        negotiate_see(&s->negotiation, data, (size_t)n);
    /* Unmounted by ourselves: libfuse takes that for the end, and the other for a fault. */
    if (n < 0 && errno == ECONNABORTED && s->leaving)
        errno = ENODEV;
    return n;
}

/* libfuse 3.14 does not know some flags of the answer to the kernel's first request. */
static ssize_t io_writev(int fd, struct iovec *iov, int count, void *user)
{
    struct session *s = ((struct fs *)user)->owner;
    const struct negotiation *offer = &s->negotiation;
    struct negotiate_wants wants = {0};
    ssize_t n;

    if (s->answered || !negotiate_is_answer(offer, iov))
        return writev(fd, iov, count);
    wants.passthrough = passthrough_wanted(s->fs);
    s->fs->can_mix_direct = offer->offers_mmap;
    negotiate_accept(offer, iov, count, wants);
    n = writev(fd, iov, count);
    if (n >= 0) {
        s->answered = true;
        mounts_read_ahead(s->device);
        passthrough_begin(s->fs, offer->offers_passthrough);
        materialized_begin(s->fs);
        if (!become_ready(s)) /* nobody waits any more: ^C */
            kill(getpid(), SIGTERM);
    }
    return n;
}

/* ---- signals ---- */

static void on_poke(int signo)
{
    (void)signo;
}

static void server_signals(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGINT);
    sigaddset(set, SIGHUP);
    sigaddset(set, SIGUSR1);
}

/* Before any thread starts: all inherit that these go to the one that waits for them. */
static int prepare_signals(struct err *e)
{
    struct sigaction poke = {.sa_handler = on_poke}; /* no SA_RESTART: waits end */
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigset_t set;
    int rc = guard_install();

    server_signals(&set);
    if (rc < 0 || pthread_sigmask(SIG_BLOCK, &set, NULL) ||
        sigaction(SIGUSR2, &poke, NULL) < 0 || sigaction(SIGPIPE, &ignore, NULL) < 0)
        return err_set(e, EINVAL, "signals cannot be set up");
    return 0;
}

/*
 * Nothing more comes from the kernel, and what waits for us there gets an error. Our own
 * threads may still write to the connection: its descriptor is replaced, not closed, lest the
 * number becomes another file's under their hands. A pipe that nobody reads also tells libfuse
 * that there is nothing left to unmount.
 */
static void drop_connection(const struct session *s)
{
    int ends[2];

    if (pipe2(ends, O_CLOEXEC) < 0)
        return;
    close(ends[0]);
    dup3(ends[1], s->connection, O_CLOEXEC);
    close(ends[1]);
}

static bool connection_is_dead(const struct session *s)
{
    struct pollfd p = {.fd = s->connection};

    return poll(&p, 1, 0) != 0 && (p.revents & (POLLERR | POLLNVAL));
}

/*
 * Unmounts what we mounted, if it still is: once it is not, the connection is dead, and
 * the mount that stands there now, maybe with the same device number, is another's. What is
 * mounted within ours goes with it, and must not wait for us to take what it writes.
 */
static void detach(struct session *s)
{
    if (!s->device || connection_is_dead(s))
        return;
    s->leaving = true;
    if (mounts_are_below(s->mountpoint, false))
        drop_connection(s);
    mounts_detach(s->mountpoint, s->device);
}

/* What is mounted within, on an image in a file of ours: it has time to write its last. */
static void detach_below(const struct session *s)
{
    if (mounts_are_below(s->mountpoint, true) && !mounts_detach_below(s->mountpoint))
        log_msg(LOG_FS, LOG_WARN,
                "%s: what is mounted in it is not unmounted yet; what that has still "
                "to write is lost",
                s->mountpoint);
}

static void prepare_deadline(struct session *s)
{
    pthread_condattr_t monotonic;

    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&s->in_time, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/*
 * Ends the process whatever its threads do. Nothing is lost: a scan that is cut off
 * leaves the index as it was before.
 */
static void *end_late(void *user)
{
    struct session *s = user;
    struct timespec until;
    bool in_time;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += END_SECONDS;
    pthread_mutex_lock(&s->lock);
    while (!s->is_in_time && pthread_cond_timedwait(&s->in_time, &s->lock, &until) == 0)
        continue;
    in_time = s->is_in_time;
    pthread_mutex_unlock(&s->lock);
    if (in_time)
        return NULL;
    detach(s);
    _exit(0);
}

static void set_deadline(struct session *s)
{
    if (!atomic_exchange(&s->has_deadline, true) &&
        pthread_create(&s->deadline, NULL, end_late, s) != 0)
        s->has_deadline = false; /* then it ends when it ends */
}

static void clear_deadline(struct session *s)
{
    if (!s->has_deadline)
        return;
    pthread_mutex_lock(&s->lock);
    s->is_in_time = true;
    pthread_cond_signal(&s->in_time);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->deadline, NULL);
}

/* Makes the loop end: its thread may be between looking at the flag and waiting. */
static void end_loop(struct session *s)
{
    const struct timespec wait = {.tv_nsec = POKE_NS};

    fuse_session_exit(s->fs->session);
    while (!s->ended) {
        pthread_kill(s->main, SIGUSR2);
        nanosleep(&wait, NULL);
    }
}

/* Nobody waits any more for what comes of it: a scan leaves the index as it was before. */
static void stop_reading(struct fs *fs)
{
    store_stop(fs->store);
    scanner_stop(fs->scanner);
}

/* Pages of mappings come to the server before it ends. */
static void write_back(const struct session *s)
{
    CLEANUP_FD int fd = open(s->mountpoint, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd >= 0)
        syncfs(fd);
}

static void *signal_thread(void *user)
{
    struct session *s = user;
    sigset_t set;
    int signo;

    server_signals(&set);
    while (!s->ended) {
        if (sigwait(&set, &signo) != 0)
            continue;
        if (signo == SIGUSR1) {
            counters_log(&s->fs->counters);
        } else if (!s->ended) {
            if (!fs_writable(s->fs)) { /* else what is complete is published first */
                set_deadline(s);
                stop_reading(s->fs);
            } else {
                detach_below(s);
                write_back(s);
                detach(s);
            }
            end_loop(s);
        }
    }
    return NULL;
}

/* ---- the session ---- */

/* An option's value: libfuse cuts its list at commas. */
static void add_value(struct buf *out, const char *value)
{
    for (; *value; value++) {
        if (*value == ',' || *value == '\\')
            buf_addc(out, '\\');
        buf_addc(out, *value);
    }
}

static int session_args(const struct session *s, struct fuse_args *args, struct err *e)
{
    CLEANUP(buf_release) struct buf list = {0};
    int rc;

    buf_addf(&list, "%s,default_permissions,subtype=" MOUNT_SUBTYPE ",fsname=",
             s->options->rw ? "rw" : "ro");
    add_value(&list, s->fs->store->url);
    if (s->options->allow_other)
        buf_adds(&list, ",allow_other");
    rc = buf_failed(&list);
    if (rc == 0 &&
        (fuse_opt_add_arg(args, MOUNT_SUBTYPE) < 0 ||
         fuse_opt_add_arg(args, "-o") < 0 || fuse_opt_add_arg(args, list.data) < 0 ||
         (s->options->debug && fuse_opt_add_arg(args, "-d") < 0)))
        rc = -ENOMEM;
    return rc < 0 ? err_nomem(e) : 0;
}

static int session_mount(struct session *s, struct err *e)
{
    static const struct fuse_custom_io io = {.read = io_read, .writev = io_writev};
    struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
    struct fs *fs = s->fs;
    int rc = session_args(s, &args, e);

    if (rc == 0) {
        const struct fuse_lowlevel_ops *ops = fs->disk     ? &disk_operations
                                              : fs->bucket ? &bucket_operations
                                                           : &fs_operations;

        fs->session = fuse_session_new(&args, ops, sizeof *ops, fs);
        if (!fs->session)
            rc = err_set(e, EINVAL, "libfuse refused the options");
    }
    fuse_opt_free_args(&args);
    if (rc < 0)
        return rc;
#ifdef UFS_HAVE_SYNC_INIT
    fuse_session_set_sync_init(fs->session, false);
#endif
    if (fuse_session_mount(fs->session, s->mountpoint) != 0)
        return err_set(e, EPERM, "mount at %s failed", s->mountpoint);
    s->device = mounts_ours(s->mountpoint);
    s->connection = fuse_session_fd(fs->session);
    rc = fuse_session_custom_io(fs->session, &io, s->connection);
    return rc ? err_set(e, EIO, "libfuse: custom input and output: %d", rc) : 0;
}

/* Programs then read the files. */
static void serve_plans(struct fs *fs)
{
    struct err e = {0};
    char line[1400];

    if (plans_new(fs, &fs->plans, &e) < 0)
        log_msg(LOG_FS, LOG_INFO, "no plan service: %s",
                err_line(&e, line, sizeof line));
}

static int session_threads(struct session *s, struct err *e)
{
    int rc = queue_new(s->fs, &s->fs->queue, e);

    if (rc == 0 && s->fs->materialized)
        rc = queue_new_fills(s->fs, &s->fs->fills, e);
    if (rc == 0) /* it looks after both queues */
        rc = watch_new(s->fs, &s->fs->watch, e);
    if (rc == 0 && s->fs->disk)
        rc = edits_start(s->fs, e);
    if (rc < 0)
        return rc;
    serve_plans(s->fs);
    s->main = pthread_self();
    rc = pthread_create(&s->signals, NULL, signal_thread, s);
    return rc ? err_set(e, rc, "start a thread: %s", strerror(rc)) : 0;
}

/*
 * A mount that reads local files needs no calls for more, once all of its sockets are there.
 * Root's only: others' ends by fusermount3, a program (decision 025). Threads that start
 * later have it too.
 */
static void confine_server(const struct fs *fs)
{
    if (geteuid() == 0 && !fs->options.rw && !fs->store->remote &&
        !confine(CONFINE_CALLS, NULL))
        log_msg(LOG_FS, LOG_INFO, "not confined: `unshard doctor` says why");
}

/* What is complete is published, though umount(8) promises nothing. */
static void publish_the_rest(struct fs *fs)
{
    struct err e = {0};

    edits_stop(fs);
    bucket_mount_end(fs);
    if (fs->disk && edit_publish_all(fs, &e) < 0)
        log_err(LOG_FS, &e);
}

/*
 * libfuse cancels its threads at the end, for which glibc loads a library; where there is
 * no memory for that it aborts. backtrace(3) has it loaded now.
 */
static void load_unwinder(void)
{
    void *frame[1];

    (void)backtrace(frame, 1);
}

/* Serves until the file system was unmounted or a signal came. */
static int session_loop(struct session *s, struct err *e)
{
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    int rc;

    if (!config)
        return err_nomem(e);
    load_unwinder();
    fuse_loop_cfg_set_clone_fd(config, 0);
    fuse_loop_cfg_set_max_threads(config, fs_writable(s->fs) ? WRITING : THREADS);
    fuse_loop_cfg_set_idle_threads(config, THREADS);
    rc = fuse_session_loop_mt(s->fs->session, config);
    fuse_loop_cfg_destroy(config);
    publish_the_rest(s->fs);
    stop_reading(s->fs);
    s->ended = true;
    set_deadline(s);
    pthread_kill(s->signals, SIGTERM); /* it waits for one */
    pthread_join(s->signals, NULL);
    return rc < 0 ? err_set(e, -rc, "the connection to the kernel: %s", strerror(-rc))
                  : 0;
}

static void cut_connection(struct session *s)
{
    detach(s);
    drop_connection(s);
}

static int session_serve(struct session *s, struct err *e)
{
    int rc;

    rc = session_mount(s, e);
    if (rc == 0)
        rc = session_threads(s, e);
    if (rc == 0)
        confine_server(s->fs);
    if (rc == 0)
        rc = session_loop(s, e);
    notify_manager("STOPPING=1");
    if (s->device)
        cut_connection(s);
    plans_free(s->fs->plans);
    s->fs->plans = NULL;
    watch_stop(s->fs->watch);
    queue_free(s->fs->queue);
    s->fs->queue = NULL;
    materialized_stop(s->fs->materialized);
    queue_free(s->fs->fills);
    s->fs->fills = NULL;
    if (s->fs->session) {
        fuse_session_unmount(s->fs->session);
        fuse_session_destroy(s->fs->session);
    }
    clear_deadline(s);
    return rc;
}

/* ---- the process ---- */

/* The log of mounts in the background. */
static int open_log(const struct fs *fs)
{
    char path[PATH_MAX], old[PATH_MAX];
    struct stat st;

    if (!fs->cache_dir ||
        snprintf(path, sizeof path, "%s/unshardfs.log", fs->cache_dir) >= PATH_MAX ||
        snprintf(old, sizeof old, "%s/unshardfs.log.1", fs->cache_dir) >= PATH_MAX)
        return -1;
    if (lstat(path, &st) == 0 && st.st_size > LOG_KEPT)
        rename(path, old);
    return open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
}

/* Where paths still mean what they meant to who gave them, before the mount is there. */
static int start_holder(const struct session *s, pid_t *out, struct err *e)
{
    CLEANUP_FD int nowhere = -1;
    int log_fd = s->ready_fd < 0 ? 2 : s->log_fd;

    if (!s->options->gpu)
        return 0;
    if (log_fd < 0)
        log_fd = nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    return holder_start(s->fs, log_fd, out, e);
}

static int serve(struct session *s, struct err *e)
{
    CLEANUP(fs_closep) struct fs *fs = NULL;
    pid_t holder = 0;
    int rc = prepare_signals(e);

    prepare_deadline(s);
    if (s->options->rw)
        umask(0); /* new files have the mode that their makers ask for */
    if (rc == 0)
        rc = fs_open(s->options, &fs, e);
    if (rc < 0)
        return rc;
    fs->owner = s;
    s->fs = fs;
    if (s->ready_fd >= 0)
        s->log_fd = open_log(fs);
    rc = start_holder(s, &holder, e);
    if (rc == 0 && s->ready_fd >= 0 && chdir("/") < 0)
        rc = err_set(e, errno, "/: %s", strerror(errno));
    if (rc == 0)
        rc = session_serve(s, e);
    holder_stop(holder);
    return rc;
}

/* The background process: what goes wrong before the mount is told to who waits. */
static void serve_in_background(struct session *s)
{
    struct err e = {0};
    int rc;

    setsid();
    rc = serve(s, &e);
    if (rc < 0 && s->ready_fd >= 0) {
        if (write(s->ready_fd, &e, sizeof e) != sizeof e)
            _exit(1);
    } else if (rc < 0) {
        log_err(LOG_FS, &e);
    }
    exit(rc < 0);
}

/* Waits until the mount can be used or cannot be had. */
static int wait_ready(int fd, struct err *e)
{
    struct err told;
    size_t got = 0;

    while (got < sizeof told) {
        ssize_t n = read(fd, (char *)&told + got, sizeof told - got);

        if (n > 0)
            got += (size_t)n;
        else if (n == 0 || errno != EINTR)
            return err_set(e, EIO, "the server ended before the mount was ready");
    }
    *e = told;
    return -told.code;
}

static int mount_in_background(struct session *s, struct err *e)
{
    int ends[2], rc;
    pid_t pid;

    if (pipe2(ends, O_CLOEXEC) < 0)
        return err_set(e, errno, "pipe: %s", strerror(errno));
    fflush(NULL); /* or both processes would write what is in the buffers */
    pid = fork();
    if (pid == 0) {
        close(ends[0]);
        s->ready_fd = ends[1];
        serve_in_background(s);
    }
    close(ends[1]);
    rc = pid < 0 ? err_set(e, errno, "fork: %s", strerror(errno))
                 : wait_ready(ends[0], e);
    close(ends[0]);
    return rc;
}

int fs_mount(const struct mount_options *options, struct err *e)
{
    char path[PATH_MAX];
    struct session s = {
        .options = options, .mountpoint = path, .ready_fd = -1, .log_fd = -1};

    TRY(mounts_check(options->source, options->mountpoint, options->rw,
                     options->allow_other, path, e));
    return options->foreground || options->debug ? serve(&s, e)
                                                 : mount_in_background(&s, e);
}
