/* SPDX-License-Identifier: MIT */
/* tests/unit/remote_tmp.h - a directory of a test's own, and files and links in it. */
#ifndef UFS_TESTS_UNIT_REMOTE_TMP_H
#define UFS_TESTS_UNIT_REMOTE_TMP_H

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/base.h"

#include "unit.h"

/* Absolute and without links, so that paths can be compared. */
struct tmp {
    char path[200];
};

static inline int tmp_setup(void **state)
{
    struct tmp *t = calloc(1, sizeof *t);
    char name[] = "/tmp/unshardfs-test-XXXXXX";
    char *real = mkdtemp(name) ? realpath(name, NULL) : NULL;

    if (!t || !real || strlen(real) >= sizeof t->path)
        return -1;
    memcpy(t->path, real, strlen(real) + 1);
    free(real);
    *state = t;
    return 0;
}

static inline int tmp_remove_one(const char *path, const struct stat *st, int flag,
                                 struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

static inline int tmp_teardown(void **state)
{
    struct tmp *t = *state;
    int rc = nftw(t->path, tmp_remove_one, 16, FTW_DEPTH | FTW_PHYS);

    free(t);
    return rc;
}

/* The absolute path of something in it; one of eight buffers in turn. */
static inline const char *tmp_at(const struct tmp *t, const char *name)
{
    static char paths[8][PATH_MAX];
    static unsigned turn;
    char *path = paths[turn++ % 8];

    snprintf(path, PATH_MAX, "%s%s%s", t->path, name[0] ? "/" : "", name);
    return path;
}

/* Makes a directory, and those above it. */
static inline void tmp_dir(const struct tmp *t, const char *name)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s", tmp_at(t, name));
    for (char *p = path + strlen(t->path) + 1; *p; p++) {
        if (*p != '/')
            continue;
        *p = '\0';
        assert_true(mkdir(path, 0755) == 0 || errno == EEXIST);
        *p = '/';
    }
    assert_true(mkdir(path, 0755) == 0 || errno == EEXIST);
}

static inline void tmp_bytes(const struct tmp *t, const char *name, const void *data,
                             size_t len)
{
    int fd = open(tmp_at(t, name), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, len), len);
    assert_int_equal(close(fd), 0);
}

static inline void tmp_file(const struct tmp *t, const char *name, const char *text)
{
    tmp_bytes(t, name, text, strlen(text));
}

static inline void tmp_link(const struct tmp *t, const char *text, const char *name)
{
    assert_int_equal(symlink(text, tmp_at(t, name)), 0);
}

/* How many descriptors this process has open. */
static inline unsigned tmp_open_fds(void)
{
    unsigned n = 0;

    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

#define tmp_test(fn) cmocka_unit_test_setup_teardown(fn, tmp_setup, tmp_teardown)

#endif
