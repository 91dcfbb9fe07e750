/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_hub_tree.c - any text as a page of a tree, a header Link and a name. */
#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "remote/hub_tree.h"
#include "remote/store.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int check_entry(void *user, const struct hub_entry *entry, struct err *e)
{
    (void)user;
    (void)e;
    if (strchr(entry->name, '/') ||
        !store_name_is_safe(entry->name, strlen(entry->name)))
        abort();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP(hub_name_release) struct hub_name name = {0};
    CLEANUP(buf_release) struct buf next = {0};
    CLEANUP_FREE char *text = malloc(size + 1);
    struct err e = {0};
    int rc;

    if (!text)
        return 0;
    if (size > 0)
        memcpy(text, data, size);
    text[size] = '\0';
    rc = hub_tree_read(text, size, "", check_entry, NULL, &e);
    if (rc != 0 && rc != -EBADMSG)
        abort();
    rc = hub_tree_read(text, size, "d", check_entry, NULL, &e);
    if (rc != 0 && rc != -EBADMSG)
        abort();
    rc = hub_next_page(text, &next, &e);
    if (rc > 1 || (rc == 1 && !next.data))
        abort();
    rc = hub_name_parse(text, &name, &e);
    if (rc == 0 && name.path[0] && !store_name_is_safe(name.path, strlen(name.path)))
        abort();
    return 0;
}
