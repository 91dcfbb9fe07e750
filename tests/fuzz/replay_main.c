/* SPDX-License-Identifier: MIT */
/* tests/fuzz/replay_main.c - runs a fuzz target over every file of the folders given. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { INPUT_MAX = 64 << 20 };

/* A block of just the file's size, so that sanitizers see a read behind its end. */
static int replay_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    long size = -1;
    int rc = -1;

    if (f && fseek(f, 0, SEEK_END) == 0)
        size = ftell(f);
    if (size >= 0 && size <= INPUT_MAX) {
        CLEANUP_FREE uint8_t *data = malloc((size_t)size ? (size_t)size : 1);

        rewind(f);
        if (data && fread(data, 1, (size_t)size, f) == (size_t)size) {
            LLVMFuzzerTestOneInput(data, (size_t)size); /* its faults are signals */
            rc = 0;
        }
    }
    if (f)
        fclose(f);
    if (rc < 0)
        fprintf(stderr, "%s: not replayed: %s\n", path, strerror(errno));
    return rc;
}

/* How many files were replayed, or -1. */
static int replay_folder(const char *folder)
{
    DIR *dir = opendir(folder);
    const struct dirent *entry;
    int count = 0;
    char path[4096];

    if (!dir) {
        fprintf(stderr, "%s: %s\n", folder, strerror(errno));
        return -1;
    }
    while (count >= 0 && (entry = readdir(dir)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        count = replay_file(path) < 0 ? -1 : count + 1;
    }
    closedir(dir);
    return count;
}

/* An empty folder fails: it would pass for ever without testing a thing. */
int main(int argc, char **argv)
{
    int total = 0;

    for (int i = 1; i < argc; i++) {
        int count = replay_folder(argv[i]);

        if (count <= 0) {
            fprintf(stderr, "%s: nothing to replay\n", argv[i]);
            return 1;
        }
        total += count;
    }
    printf("%d inputs replayed\n", total);
    return total > 0 ? 0 : 1;
}
