/* SPDX-License-Identifier: MIT */
/* cli/doctor_leftovers.c - staging directories that saves have left, and whose they are. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

#include "cli/doctor.h"
#include "save/staging.h"

enum { LINE_BYTES = 200 };

/* What the journals of one staging directory say. */
struct left {
    bool busy; /* somebody holds a lock on one */
    int journals;
    char line[LINE_BYTES + 1]; /* the first line of the last one */
    struct tm when;
};

static void read_journal(struct left *l, int dir, const char *name)
{
    CLEANUP_FD int fd =
        openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat st;
    ssize_t n;

    if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        return;
    l->journals++;
    localtime_r(&st.st_mtim.tv_sec, &l->when);
    n = pread(fd, l->line, LINE_BYTES, 0);
    l->line[n > 0 ? n : 0] = '\0';
    l->line[strcspn(l->line, "\n")] = '\0';
    if (flock(fd, LOCK_SH | LOCK_NB) < 0)
        l->busy = errno == EWOULDBLOCK;
}

static void tell_left(struct doctor *d, int at, const char *dir, const char *name)
{
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    DIR *stream = fd >= 0 ? fdopendir(fd) : NULL;
    struct left l = {0};
    char when[32] = "";

    if (fd >= 0 && !stream)
        close(fd);
    for (const struct dirent *e; stream && (e = readdir(stream));)
        if (strncmp(e->d_name, "journal.", 8) == 0)
            read_journal(&l, dirfd(stream), e->d_name);
    if (stream)
        closedir(stream);
    strftime(when, sizeof when, "%Y-%m-%d %H:%M", &l.when);
    if (l.busy)
        doctor_tell(d, DOCTOR_FINE, "saving", NULL, "%s/%s: being written now: %s", dir,
                    name, l.line);
    else if (l.journals)
        doctor_tell(d, DOCTOR_NOTE, "leftover",
                    "the same save takes it up; remove it where none will",
                    "%s/%s: nobody of this machine writes it, last %s: %s", dir, name,
                    when, l.line);
    else
        doctor_tell(d, DOCTOR_NOTE, "leftover", "remove it where no save will begin",
                    "%s/%s: without a journal", dir, name);
}

void doctor_leftovers(struct doctor *d, const char *dir)
{
    DIR *stream = opendir(dir);
    unsigned found = 0;

    if (!stream) {
        doctor_tell(d, DOCTOR_PROBLEM, "leftovers", NULL, "%s: %s", dir,
                    strerror(errno));
        return;
    }
    for (const struct dirent *e; (e = readdir(stream));)
        if (staging_is_named(e->d_name)) {
            tell_left(d, dirfd(stream), dir, e->d_name);
            found++;
        }
    closedir(stream);
    if (!found)
        doctor_tell(d, DOCTOR_FINE, "leftovers", NULL, "%s: no save has left anything",
                    dir);
}
