/* SPDX-License-Identifier: MIT */
/*
 * tests/bench/bench_server.c - a FUSE server that does nothing but answer: what any server reaches on this machine.
 *
 *   bench_server MOUNTPOINT ROW FILE:OFFSET:LENGTH...
 *
 * Its one file, MOUNTPOINT/bytes, is the ranges one after the other (ROW 0), or a row of ROW bytes of each by turns, as of
 * shards by columns; those have to be equally long. It is opened for direct I/O, and each read is answered straight from
 * mappings of the files, or from a buffer where a reply has too many pieces. No index, no plan, no checks: neither whether
 * the files are still those that were mapped, nor whether their pages are in memory. Ends when it is unmounted.
 */
#define FUSE_USE_VERSION 314
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/base.h"

enum { THE_FILE = 2, MAX_PIECES = 1000, BLOCK = 1 << 20 };

static const char NAME[] = "bytes";
static const double FOREVER = 86400;

struct range {
    char *bytes;
    uint64_t length;
};

static struct {
    struct range *ranges;
    unsigned count;
    uint64_t row, size;
} layout;

_Noreturn static void die(const char *what)
{
    fprintf(stderr, "bench_server: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* ---- where the bytes are ---- */

/* The piece that byte `at` of the file begins, `most` bytes at most. at < layout.size */
static struct iovec piece_at(uint64_t at, uint64_t most)
{
    uint64_t in_row, row;
    unsigned i = 0;

    if (layout.row) {
        row = at / (layout.row * layout.count);
        i = (unsigned)(at / layout.row % layout.count);
        in_row = at % layout.row;
        return (struct iovec){layout.ranges[i].bytes + row * layout.row + in_row,
                              MIN(most, layout.row - in_row)};
    }
    while (at >= layout.ranges[i].length)
        at -= layout.ranges[i++].length;
    return (struct iovec){layout.ranges[i].bytes + at,
                          MIN(most, layout.ranges[i].length - at)};
}

/* FILE:OFFSET:LENGTH */
static void add_range(char *text)
{
    struct range *r = &layout.ranges[layout.count++];
    char *length = strrchr(text, ':'), *offset;
    uint64_t at, page = (uint64_t)sysconf(_SC_PAGESIZE);
    struct stat st;
    int fd;

    errno = EINVAL;
    if (!length)
        die(text);
    *length = '\0';
    offset = strrchr(text, ':');
    if (!offset)
        die(text);
    *offset = '\0';
    at = strtoull(offset + 1, NULL, 10);
    r->length = strtoull(length + 1, NULL, 10);
    fd = open(text, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0)
        die(text);
    errno = ERANGE;
    if (r->length == 0 || at + r->length > (uint64_t)st.st_size ||
        (layout.row &&
         (r->length != layout.ranges[0].length || r->length % layout.row != 0)))
        die(text);
    r->bytes = mmap(NULL, r->length + at % page, PROT_READ, MAP_SHARED, fd,
                    (off_t)(at - at % page));
    if (r->bytes == MAP_FAILED)
        die(text);
    close(fd);
    r->bytes += at % page;
    layout.size += r->length;
}

/* ---- what the kernel asks ---- */

static struct stat attributes(fuse_ino_t node)
{
    if (node == FUSE_ROOT_ID)
        return (struct stat){.st_ino = node, .st_mode = S_IFDIR | 0555, .st_nlink = 2};
    return (struct stat){.st_ino = node,
                         .st_mode = S_IFREG | 0444,
                         .st_nlink = 1,
                         .st_size = (off_t)layout.size,
                         .st_blksize = BLOCK};
}

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct fuse_entry_param entry = {.ino = THE_FILE,
                                     .attr = attributes(THE_FILE),
                                     .attr_timeout = FOREVER,
                                     .entry_timeout = FOREVER};

    if (parent != FUSE_ROOT_ID || strcmp(name, NAME) != 0)
        fuse_reply_err(req, ENOENT);
    else
        fuse_reply_entry(req, &entry);
}

static void on_getattr(fuse_req_t req, fuse_ino_t node, struct fuse_file_info *file)
{
    struct stat st = attributes(node);

    (void)file;
    fuse_reply_attr(req, &st, FOREVER);
}

static void on_open(fuse_req_t req, fuse_ino_t node, struct fuse_file_info *file)
{
    (void)node;
    file->direct_io = 1;
    fuse_reply_open(req, file);
}

static void reply_copied(fuse_req_t req, uint64_t at, size_t size)
{
    static _Thread_local char *buffer;
    size_t done = 0;

    if (!buffer)
        buffer = malloc(BLOCK);
    if (!buffer || size > BLOCK) {
        fuse_reply_err(req, buffer ? EIO : ENOMEM);
        return;
    }
    while (done < size) {
        struct iovec piece = piece_at(at + done, size - done);

        memcpy(buffer + done, piece.iov_base, piece.iov_len);
        done += piece.iov_len;
    }
    fuse_reply_buf(req, buffer, size);
}

static void on_read(fuse_req_t req, fuse_ino_t node, size_t size, off_t offset,
                    struct fuse_file_info *file)
{
    struct iovec pieces[MAX_PIECES];
    uint64_t at = (uint64_t)offset;
    size_t done = 0;
    int count = 0;

    (void)node;
    (void)file;
    size = at < layout.size ? MIN(size, layout.size - at) : 0;
    if (layout.row && size / layout.row >= MAX_PIECES)
        count = MAX_PIECES;
    for (; done < size && count < MAX_PIECES; done += pieces[count++].iov_len)
        pieces[count] = piece_at(at + done, size - done);
    if (done < size)
        reply_copied(req, at, size);
    else
        fuse_reply_iov(req, pieces, count);
}

static int serve(char *program, const char *mountpoint)
{
    static const struct fuse_lowlevel_ops operations = {
        .lookup = on_lookup, .getattr = on_getattr, .open = on_open, .read = on_read};
    char *words[] = {program, NULL};
    struct fuse_args args = FUSE_ARGS_INIT(1, words);
    struct fuse_session *session =
        fuse_session_new(&args, &operations, sizeof operations, NULL);
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    int rc;

    if (!session || !config || fuse_session_mount(session, mountpoint) != 0)
        die(mountpoint);
    rc = fuse_session_loop_mt(session, config);
    fuse_session_unmount(session);
    fuse_session_destroy(session);
    fuse_loop_cfg_destroy(config);
    return rc != 0;
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: bench_server MOUNTPOINT ROW FILE:OFFSET:LENGTH...\n");
        return 2;
    }
    layout.row = strtoull(argv[2], NULL, 10);
    layout.ranges = calloc((size_t)argc, sizeof *layout.ranges);
    if (!layout.ranges)
        die("ranges");
    for (int i = 3; i < argc; i++)
        add_range(argv[i]);
    return serve(argv[0], argv[1]);
}
