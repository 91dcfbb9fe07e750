/* SPDX-License-Identifier: MIT */
/* lib/plan_ask.c - the client's side of the plan service. */
#include "lib/plan_ask.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/xattr.h>

#include "base/endian.h"
#include "base/err.h"
#include "base/local_socket.h"
#include "gpu/plan_service.h"

enum { PATIENCE_SECONDS = 60, VALUE_MAX = 4096, WORDS_MAX = 1000 };

/* The value of user.unshard.plan: "unix:PATH CHECKPOINT.TENSOR"; the path is cut out of it. */
static char *read_value(const char *path, char value[VALUE_MAX + 1],
                        int64_t *checkpoint, uint32_t *ord)
{
    ssize_t n = getxattr(path, "user.unshard.plan", value, VALUE_MAX);
    char *space;

    if (n <= 5 || memcmp(value, "unix:", 5) != 0)
        return NULL;
    value[n] = '\0';
    space = strrchr(value, ' ');
    if (!space || sscanf(space, " %" SCNd64 ".%" SCNu32, checkpoint, ord) != 2)
        return NULL;
    *space = '\0';
    return value + 5;
}

/* What the server says is wrong. */
static int refused(uint32_t code, const char *data, size_t len, struct err *e)
{
    return err_set(e, code && code < 4096 ? (int)code : EIO, "%.*s",
                   (int)MIN(len, (size_t)WORDS_MAX), data);
}

static int exchange(int fd, int64_t checkpoint, uint32_t ord, struct arena *a,
                    struct plan_wire *out, struct err *e)
{
    unsigned char ask[PLAN_ASK_BYTES] = PLAN_ASK_MAGIC, head[PLAN_REPLY_BYTES];
    CLEANUP_FREE char *data = NULL;
    uint64_t len;

    put_le64(ask + 8, (uint64_t)checkpoint);
    put_le32(ask + 16, ord);
    if (local_send(fd, ask, sizeof ask, -1) < 0 ||
        local_receive(fd, head, sizeof head, NULL) < 0)
        return err_set(e, ENOTTY, "the server of the mount does not answer");
    len = get_le64(head + 8);
    if (len > WIRE_MAX)
        return err_set(e, EBADMSG, "the server of the mount answers with too much");
    data = malloc((size_t)len + 1);
    if (!data)
        return err_nomem(e);
    if (local_receive(fd, data, (size_t)len, NULL) < 0)
        return err_set(e, ENOTTY, "the server of the mount does not answer");
    if (get_le32(head))
        return refused(get_le32(head), data, (size_t)len, e);
    return wire_parse(a, data, (size_t)len, out, e);
}

int plan_ask(const char *path, struct arena *a, struct plan_wire *out, struct err *e)
{
    char value[VALUE_MAX + 1];
    int64_t checkpoint;
    uint32_t ord;
    const char *address = read_value(path, value, &checkpoint, &ord);
    CLEANUP_FD int fd = -1;

    if (!address)
        return err_set(e, ENOTTY, "%s: no plan service", path);
    if (local_connect(address, PATIENCE_SECONDS, &fd, e) < 0)
        return err_set(e, ENOTTY, "%s: the plan service cannot be reached", path);
    return exchange(fd, checkpoint, ord, a, out, e);
}
