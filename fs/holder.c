/* SPDX-License-Identifier: MIT */
/* fs/holder.c - starts and ends the holder of a mount. */
#include "fs/holder.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/err.h"
#include "fs/fs.h"
#include "index/dtype.h"
#include "remote/store.h"

enum { HOLDER_ARGS = 12 };

struct words {
    const char *word[HOLDER_ARGS];
    size_t n;
};

static void add(struct words *w, const char *option, const char *value)
{
    w->word[w->n++] = option;
    if (value)
        w->word[w->n++] = value;
}

/* What the mount was told and a holder of the same tensors must be told too. */
static int add_options(struct words *w, const struct fs *fs, struct buf *text)
{
    const struct mount_options *o = &fs->options;

    buf_adds(text, o->mapping.module_weights ? "weights=module" : "weights=master");
    if (o->mapping.map)
        buf_addf(text, ",map=%s", o->mapping.map);
    if (o->mapping.hf)
        buf_addf(text, ",hf=%s", o->mapping.hf);
    if (o->mapping.dtype != DTYPE_NONE)
        buf_addf(text, ",dtype=%s", dtype_name(o->mapping.dtype));
    if (o->follow_symlinks)
        buf_adds(text, ",follow_symlinks");
    if (buf_failed(text))
        return -1;
    add(w, "-o", text->data);
    if (o->memory_index)
        add(w, "--index-memory", NULL);
    else if (fs->cache_dir)
        add(w, "--cache-dir", fs->cache_dir);
    return 0;
}

/* Arguments can be seen by everyone. */
static bool has_secrets(const char *source)
{
    return strncmp(source, "http", 4) == 0 && store_is_url(source) &&
           strpbrk(source, "@?");
}

/* Between fork and exec: nothing that another thread may have been in the middle of. */
static void become_holder(const struct words *w, pid_t server, int log_fd)
{
    sigset_t none;

    sigemptyset(&none);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != server) /* it has ended before that took hold */
        _exit(1);
    dup2(log_fd, 2);
    dup2(log_fd, 1);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execv("/proc/self/exe", (char *const *)(uintptr_t)w->word);
    _exit(1);
}

int holder_start(const struct fs *fs, int log_fd, pid_t *out, struct err *e)
{
    const struct mount_options *o = &fs->options;
    CLEANUP(buf_release) struct buf text = {0};
    struct words w = {.n = 0};
    char device[16];
    pid_t server = getpid(), pid;

    *out = 0;
    if (has_secrets(o->source)) {
        err_set(e, ENOTSUP,
                "gpu=: the holder's arguments would show the URL's secrets");
        return err_hint(e, "give them by the environment, unshard-credentials(7)");
    }
    snprintf(device, sizeof device, "%u", o->gpu - 1);
    add(&w, "unshard", "hold");
    add(&w, "--device", device);
    if (add_options(&w, fs, &text) < 0)
        return err_nomem(e);
    add(&w, "--", o->source);
    pid = fork();
    if (pid == 0)
        become_holder(&w, server, log_fd);
    if (pid < 0)
        return err_set(e, errno, "start a holder: %s", strerror(errno));
    *out = pid;
    return 0;
}

void holder_stop(pid_t holder)
{
    if (holder <= 0)
        return;
    kill(holder, SIGTERM);
    while (waitpid(holder, NULL, 0) < 0 && errno == EINTR)
        ;
}
