/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_sniff.c - which container of torch.save a file's first bytes begin. */
#include <string.h>

#include "base/endian.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_legacy.h"

enum { LOCAL_HEADER = 30, TAR_MAGIC = 257 };

static bool is_one_of(const char *s, size_t len, const char *const *words, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strlen(words[i]) == len && memcmp(s, words[i], len) == 0)
            return true;
    return false;
}

static bool begins_with(const char *s, size_t len, const char *const *words, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strlen(words[i]) <= len && memcmp(s, words[i], strlen(words[i])) == 0)
            return true;
    return false;
}

/* "archive/data.pkl" and the other names below the root folder. */
static bool is_entry(const char *name, size_t len)
{
    static const char *const files[] = {"data.pkl",      "version",
                                        "byteorder",     ".format_version",
                                        "constants.pkl", ".storage_alignment",
                                        "attributes.pkl"};
    static const char *const folders[] = {"data/",  "code/",  "constants/",
                                          ".data/", "extra/", "tensors/"};
    const char *slash = memchr(name, '/', len);
    size_t rest;

    if (!slash || slash == name)
        return false;
    rest = len - (size_t)(slash + 1 - name);
    return is_one_of(slash + 1, rest, files, ARRAY_SIZE(files)) ||
           begins_with(slash + 1, rest, folders, ARRAY_SIZE(folders));
}

static enum torch_kind sniff_zip(const char *head, size_t len)
{
    size_t name;

    if (len < LOCAL_HEADER)
        return TORCH_MAYBE;
    name = MIN((size_t)get_le16(head + 26), len - LOCAL_HEADER);
    return is_entry(head + LOCAL_HEADER, name) ? TORCH_ZIP : TORCH_MAYBE;
}

/* A tar archive whose first member is one of the four that torch wrote. */
static bool is_tar(const char *head, size_t len)
{
    static const char *const members[] = {"sys_info", "pickle", "storages", "tensors"};

    return len >= TAR_MAGIC + 5 && memcmp(head + TAR_MAGIC, "ustar", 5) == 0 &&
           is_one_of(head, strnlen(head, len), members, ARRAY_SIZE(members));
}

enum torch_kind torch_sniff(const void *head, size_t len)
{
    if (len >= 4 && memcmp(head, "PK\3\4", 4) == 0)
        return sniff_zip(head, len);
    if (torch_legacy_magic(head, len))
        return TORCH_LEGACY;
    return is_tar(head, len) ? TORCH_TAR : TORCH_NOT;
}
