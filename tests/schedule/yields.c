/* SPDX-License-Identifier: MIT */
/* tests/schedule/yields.c - gives way, by a seed, wherever threads of a program meet. */

/*
 * Loaded before libc (LD_PRELOAD). At each lock, unlock, wait, wake-up and start of a thread,
 * and at each request that is taken from or answered to a descriptor, a thread goes on at
 * once, yields, or sleeps. Which of them it does is a phase of some points, drawn by the seed
 * and by the number of the thread: so one thread is slow for a while and the others overtake
 * it. Waits on conditions also end with nothing to end them, as POSIX lets them.
 *
 *   UFS_YIELD_SEED=N     what is drawn; the decisions of a thread are the same each time, how
 *                        they fall together is not. Without it nothing is done
 *   UFS_YIELD_TELL=FILE  32 bytes, counted up by all processes: points met, yields, sleeps,
 *                        empty wake-ups
 *
 * Only calls out of the program itself and of libfuse are points. A thread sleeps for a
 * quarter of its life at most, so that no deadline is missed by what is done here.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum phase { GO, YIELD, SLEEP };
enum { MAX_PARTS = 16, FREE_NS = 20 * 1000 * 1000 };

static struct told {
    atomic_uint_fast64_t points, yields, sleeps, empty;
} untold;

static struct {
    atomic_bool is_on;
    uint64_t seed;
    atomic_uint threads;
    struct told *told;
    unsigned nparts;
    struct {
        uintptr_t from, to;
    } part[MAX_PARTS]; /* the code whose calls are points */
} all = {.told = &untold};

static _Thread_local struct {
    uint64_t draw;
    int64_t began, slept;
    enum phase phase;
    unsigned left; /* points until the next phase */
    bool is_inside;
} own;

#define REAL(name) ((typeof(&name))next(#name))
#define CALLER ((uintptr_t)__builtin_return_address(0))

/* The name's newest version: dlsym() alone finds the oldest, whose conditions are others. */
static void *next(const char *name)
{
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.3.2", "GLIBC_2.17"};
    void *found = NULL;

    for (unsigned i = 0; !found && i < sizeof versions / sizeof *versions; i++)
        found = dlvsym(RTLD_NEXT, name, versions[i]);
    return found ? found : dlsym(RTLD_NEXT, name);
}

/* ---- what was asked for ---- */

static int add_parts(struct dl_phdr_info *info, size_t size, void *user)
{
    (void)size;
    (void)user;
    if (*info->dlpi_name && !strstr(info->dlpi_name, "libfuse3") &&
        !strstr(info->dlpi_name, "libunshard"))
        return 0;
    for (int i = 0; i < info->dlpi_phnum && all.nparts < MAX_PARTS; i++) {
        const ElfW(Phdr) *h = &info->dlpi_phdr[i];

        if (h->p_type != PT_LOAD || !(h->p_flags & PF_X))
            continue;
        all.part[all.nparts].from = info->dlpi_addr + h->p_vaddr;
        all.part[all.nparts].to = info->dlpi_addr + h->p_vaddr + h->p_memsz;
        all.nparts++;
    }
    return 0;
}

static void open_told(const char *path)
{
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *map = MAP_FAILED;

    if (fd >= 0) {
        map = mmap(NULL, sizeof *all.told, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
    }
    if (map != MAP_FAILED)
        all.told = map;
}

__attribute__((constructor)) static void begin(void)
{
    const char *seed = getenv("UFS_YIELD_SEED"), *tell = getenv("UFS_YIELD_TELL");

    if (!seed)
        return;
    all.seed = strtoull(seed, NULL, 10);
    open_told(tell);
    dl_iterate_phdr(add_parts, NULL);
    atomic_store(&all.is_on, true);
}

/* ---- a point ---- */

static int64_t now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* splitmix64 */
static uint64_t draw(void)
{
    uint64_t z = own.draw += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static void next_phase(void)
{
    static const enum phase phases[] = {GO,    GO,    YIELD, YIELD,
                                        YIELD, SLEEP, SLEEP, SLEEP};

    if (!own.began) {
        own.began = now();
        own.draw =
            all.seed * UINT64_C(0xd1342543de82ef95) + atomic_fetch_add(&all.threads, 1);
    }
    own.phase = phases[draw() % 8];
    own.left = 1 + (unsigned)(draw() % (own.phase == SLEEP ? 20 : 200));
}

static void sleep_some(void)
{
    uint64_t d = draw();
    int64_t ns = d % 64 == 0 ? 5 * 1000 * 1000 : (int64_t)(d % 400) * 1000,
            from = now();
    struct timespec t = {.tv_nsec = ns};

    if (own.slept > FREE_NS + (from - own.began) / 4) {
        own.left = 0;
        return;
    }
    nanosleep(&t, NULL);
    own.slept += now() - from;
    atomic_fetch_add(&all.told->sleeps, 1);
}

static bool is_point(uintptr_t caller)
{
    if (!atomic_load_explicit(&all.is_on, memory_order_relaxed) || own.is_inside)
        return false;
    for (unsigned i = 0; i < all.nparts; i++)
        if (caller >= all.part[i].from && caller < all.part[i].to)
            return true;
    return false;
}

static void point(uintptr_t caller)
{
    int code = errno;

    if (!is_point(caller))
        return;
    own.is_inside = true;
    atomic_fetch_add_explicit(&all.told->points, 1, memory_order_relaxed);
    if (own.left == 0)
        next_phase();
    own.left--;
    if (own.phase == YIELD) {
        sched_yield();
        atomic_fetch_add_explicit(&all.told->yields, 1, memory_order_relaxed);
    } else if (own.phase == SLEEP) {
        sleep_some();
    }
    own.is_inside = false;
    errno = code;
}

/* Shall this wait end with nothing to end it? */
static bool is_empty(uintptr_t caller)
{
    bool yes = is_point(caller) && draw() % 16 == 0;

    if (yes)
        atomic_fetch_add(&all.told->empty, 1);
    return yes;
}

/* ---- locks and conditions ---- */

int pthread_mutex_lock(pthread_mutex_t *m)
{
    static typeof(&pthread_mutex_lock) real;

    if (!real)
        real = REAL(pthread_mutex_lock);
    point(CALLER);
    return real(m);
}

int pthread_mutex_unlock(pthread_mutex_t *m)
{
    static typeof(&pthread_mutex_unlock) real;
    int rc;

    if (!real)
        real = REAL(pthread_mutex_unlock);
    rc = real(m);
    point(CALLER);
    return rc;
}

/* The lock is given away and taken again, as by a wait that ends at once. */
static void let_go(pthread_mutex_t *m)
{
    pthread_mutex_unlock(m);
    sched_yield();
    pthread_mutex_lock(m);
}

int pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m)
{
    static typeof(&pthread_cond_wait) real;
    int rc = 0;

    if (!real)
        real = REAL(pthread_cond_wait);
    if (is_empty(CALLER))
        let_go(m);
    else
        rc = real(c, m);
    return rc;
}

int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m,
                           const struct timespec *t)
{
    static typeof(&pthread_cond_timedwait) real;
    int rc = 0;

    if (!real)
        real = REAL(pthread_cond_timedwait);
    if (is_empty(CALLER))
        let_go(m);
    else
        rc = real(c, m, t);
    return rc;
}

int pthread_cond_signal(pthread_cond_t *c)
{
    static typeof(&pthread_cond_signal) real;
    int rc;

    if (!real)
        real = REAL(pthread_cond_signal);
    point(CALLER);
    rc = real(c);
    point(CALLER);
    return rc;
}

int pthread_cond_broadcast(pthread_cond_t *c)
{
    static typeof(&pthread_cond_broadcast) real;
    int rc;

    if (!real)
        real = REAL(pthread_cond_broadcast);
    point(CALLER);
    rc = real(c);
    point(CALLER);
    return rc;
}

int sem_post(sem_t *s)
{
    static typeof(&sem_post) real;
    int rc;

    if (!real)
        real = REAL(sem_post);
    point(CALLER);
    rc = real(s);
    point(CALLER);
    return rc;
}

/* ---- threads ---- */

struct start {
    void *(*fn)(void *);
    void *user;
};

static void *started(void *arg)
{
    struct start s = *(struct start *)arg;

    free(arg);
    next_phase();
    if (draw() % 2)
        sleep_some();
    return s.fn(s.user);
}

int pthread_create(pthread_t *out, const pthread_attr_t *attr, void *(*fn)(void *),
                   void *user)
{
    static typeof(&pthread_create) real;
    struct start *s = is_point(CALLER) ? malloc(sizeof *s) : NULL;
    int rc;

    if (!real)
        real = REAL(pthread_create);
    if (!s)
        return real(out, attr, fn, user);
    *s = (struct start){fn, user};
    rc = real(out, attr, started, s);
    if (rc != 0)
        free(s);
    point(CALLER);
    return rc;
}

/* ---- requests ---- */

ssize_t read(int fd, void *to, size_t size)
{
    static typeof(&read) real;
    ssize_t n;

    if (!real)
        real = REAL(read);
    n = real(fd, to, size);
    point(CALLER);
    return n;
}

ssize_t writev(int fd, const struct iovec *v, int count)
{
    static typeof(&writev) real;
    ssize_t n;

    if (!real)
        real = REAL(writev);
    n = real(fd, v, count);
    point(CALLER);
    return n;
}

ssize_t splice(int in, off64_t *in_off, int out, off64_t *out_off, size_t size,
               unsigned flags)
{
    static typeof(&splice) real;
    ssize_t n;

    if (!real)
        real = REAL(splice);
    n = real(in, in_off, out, out_off, size, flags);
    point(CALLER);
    return n;
}
