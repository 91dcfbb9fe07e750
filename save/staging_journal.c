/* SPDX-License-Identifier: MIT */
/* save/staging_journal.c - what is being saved, by whom, and how far it is. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "save/staging_priv.h"

enum { JOURNAL_MAX = 64 << 20 }; /* a line every few seconds of a save */

static const char journal_prefix[] = "journal.";

void staging_journal_name(unsigned part, unsigned parts, char dst[64])
{
    snprintf(dst, 64, "%s%u-of-%u", journal_prefix, part, parts);
}

/* "stage S units N [done]"; other lines are of no use to us. */
static void take_line(struct staging *s, const char *line)
{
    unsigned stage;
    uint64_t units;
    char word[8] = "";
    int n = sscanf(line, "stage %u units %" SCNu64 " %7s", &stage, &units, word);

    if (n < 2 || stage >= STAGING_STAGES)
        return;
    s->stage[stage].units = units;
    s->stage[stage].done = n == 3 && strcmp(word, "done") == 0;
}

/*
 * The journal's first line says what is being saved. A last line that was cut is none:
 * *whole are the bytes before it, 0 where not even the first line is there.
 */
int staging_journal_read(struct staging *s, int fd, uint64_t *whole, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {.max = JOURNAL_MAX};
    struct stat st;
    char *line, *end;
    void *dst;

    if (fstat(fd, &st) < 0)
        return staged_fail(e, "journal of", s->target);
    *whole = 0;
    if (st.st_size == 0)
        return 0;
    dst = st.st_size < JOURNAL_MAX ? buf_grow(&text, (size_t)st.st_size) : NULL;
    if (!dst)
        return err_set(e, EBADMSG, "%s/journal is no journal", s->path);
    if (read_exact(fd, dst, (size_t)st.st_size, 0, e) < 0)
        return err_wrap(e, "%s", s->path);
    buf_addc(&text, '\0');
    end = text.data ? strchr(text.data, '\n') : NULL;
    if (!end)
        return 0; /* it was cut before it said anything */
    *end = '\0';
    if (strcmp(text.data, s->what) != 0) {
        err_set(e, EINVAL, "%s/%s holds another save", s->parent, s->path);
        return err_hint(e, "finish that with its own command, or remove the directory");
    }
    for (line = end + 1; (end = strchr(line, '\n')); line = end + 1) {
        *end = '\0';
        take_line(s, line);
    }
    *whole = (uint64_t)(line - text.data);
    return 0;
}

int staging_journal_append(struct staging *s, const char *text, struct err *e)
{
    if (write_all(s->journal_fd, text, strlen(text), e) < 0)
        return err_wrap(e, "journal of %s", s->target);
    return fdatasync(s->journal_fd) < 0 ? staged_fail(e, "journal of", s->target) : 0;
}

int staging_journal_begin(struct staging *s, struct err *e)
{
    CLEANUP(buf_release) struct buf line = {0};

    if (ftruncate(s->journal_fd, 0) < 0)
        return staged_fail(e, "journal of", s->target);
    buf_adds(&line, s->what);
    buf_addc(&line, '\n');
    if (buf_failed(&line))
        return err_nomem(e);
    TRY(staging_journal_append(s, line.data, e));
    return fsync(s->fd) < 0 ? staged_fail(e, "fsync", s->path) : 0;
}

int staging_journal_open(struct staging *s, struct err *e)
{
    char name[64];
    uint64_t whole;

    staging_journal_name(s->part, s->parts, name);
    s->journal_fd =
        openat(s->fd, name, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (s->journal_fd < 0)
        return staged_fail(e, "journal of", s->target);
    if (flock(s->journal_fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK)
            return staged_fail(e, "lock the journal of", s->target);
        return err_set(e, EBUSY, "%s: another process is writing it", s->target);
    }
    TRY(staging_journal_read(s, s->journal_fd, &whole, e));
    if (whole == 0)
        return staging_journal_begin(s, e);
    /* What is noted next must not become the rest of a line that was cut. */
    return ftruncate(s->journal_fd, (off_t)whole) < 0
               ? staged_fail(e, "journal of", s->target)
               : 0;
}

uint64_t staging_progress(const struct staging *s, unsigned stage, bool *done)
{
    *done = stage < STAGING_STAGES && s->stage[stage].done;
    return stage < STAGING_STAGES ? s->stage[stage].units : 0;
}

int staging_note(struct staging *s, unsigned stage, uint64_t units, bool done,
                 struct err *e)
{
    char line[80];

    snprintf(line, sizeof line, "stage %u units %" PRIu64 "%s\n", stage, units,
             done ? " done" : "");
    return staging_journal_append(s, line, e);
}

/* ---- who writes ---- */

/*
 * "unshardfs mount-save HOST BOOT PID": who writes. Another host's lock may not be seen
 * from here (a network disk), so its directory is left alone.
 */
bool staging_writer_is_dead(const char *line)
{
    char host[HOST_NAME_MAX + 1] = "", boot[64], theirs[256], their_boot[64];
    int pid;

    if (sscanf(line, "unshardfs mount-save host %255s boot %63s pid %d", theirs,
               their_boot, &pid) != 3)
        return false;
    staged_boot(boot);
    gethostname(host, sizeof host - 1);
    if (strcmp(host, theirs) != 0)
        return false;
    return strcmp(boot, their_boot) != 0 || (kill(pid, 0) < 0 && errno == ESRCH);
}
