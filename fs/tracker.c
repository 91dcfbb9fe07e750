/* SPDX-License-Identifier: MIT */
/* fs/tracker.c - the files in which frameworks note their latest checkpoint. */
#include "fs/tree.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "index/formats/megatron/megatron_tracker.h"

/* Longer than any step's name; what is longer is no tracker. */
enum { TRACKER_MAX = 300 };

/* The text of a small file without the blanks round it; false: none, or not a line. */
static bool tracker_text(struct fs *fs, const char *dir, const char *name,
                         char text[TRACKER_MAX + 1])
{
    CLEANUP(source_putp) struct source *src = NULL;
    char path[PATH_MAX];
    struct err e = {0};
    size_t len;

    if (store_join(dir, name, path, sizeof path) < 0 ||
        fs->store->ops->open(fs->store, path, &src, &e) < 0)
        return false;
    if (src->size == 0 || src->size > TRACKER_MAX ||
        source_read(src, 0, (size_t)src->size, text, &e) < 0)
        return false;
    len = (size_t)src->size;
    while (len && isspace((unsigned char)text[len - 1]))
        len--;
    text[len] = '\0';
    memmove(text, text + strspn(text, " \t\r\n"),
            strlen(text + strspn(text, " \t\r\n")) + 1);
    return strlen(text) > 0 && !strchr(text, '\n');
}

/* Is it the name of a directory there? */
static char *step_named(struct fs *fs, const char *dir, const char *step)
{
    struct entry_stat st;
    char path[PATH_MAX];
    struct err e = {0};

    if (!store_name_is_safe(step, strlen(step)) || strchr(step, '/') ||
        store_join(dir, step, path, sizeof path) < 0 ||
        fs->store->ops->stat(fs->store, path, &st, &e) < 0 || st.kind != ENTRY_DIR)
        return NULL;
    return strdup(step);
}

static char *iteration(struct fs *fs, const char *dir, uint64_t number)
{
    char step[32];

    snprintf(step, sizeof step, "iter_%07" PRIu64, number);
    return step_named(fs, dir, step);
}

/* Megatron: a number, or the word "release"; verl: a number, and folders of its own. */
static char *numbered_step(struct fs *fs, const char *dir, const char *text)
{
    size_t digits = strspn(text, "0123456789");
    char *step, name[40];
    uint64_t number;

    if (strcmp(text, "release") == 0)
        return step_named(fs, dir, text);
    if (digits == 0 || digits > 18 || text[digits])
        return NULL;
    number = strtoull(text, NULL, 10);
    step = iteration(fs, dir, number);
    if (step)
        return step;
    snprintf(name, sizeof name, "global_step_%" PRIu64, number);
    return step_named(fs, dir, name);
}

char *tracker_target(struct fs *fs, const char *path)
{
    /*
     * DeepSpeed; NeMo AutoModel where it can make no link, or where a copy made it a file;
     * nanotron.
     */
    static const char *const by_name[] = {"latest", "latest_universal", "LATEST",
                                          "LATEST.txt", "latest.txt"};
    char text[TRACKER_MAX + 1];
    char *step = NULL;
    uint64_t number;

    /* Bridge trusts this one first. */
    if (megatron_tracked_step(fs->store, path, &number))
        step = iteration(fs, path, number);
    if (!step && tracker_text(fs, path, "latest_checkpointed_iteration.txt", text))
        step = numbered_step(fs, path, text);
    for (size_t i = 0; !step && i < ARRAY_SIZE(by_name); i++)
        if (tracker_text(fs, path, by_name[i], text))
            step = step_named(fs, path, text);
    return step;
}

char *tracker_of_generation(struct fs *fs, const struct generation *gen)
{
    CLEANUP_FREE char *step = tracker_target(fs, gen->path);

    return step && generation_hides(gen, step) ? NULL : steal(&step);
}
