/* SPDX-License-Identifier: MIT */
/* tests/hostile/test_special.c - links, fifos, devices, sparse files: SCRIPT CONTROL. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "base/arena.h"
#include "base/err.h"
#include "tests/formats/world.h"

struct setup {
    const char *script, *control;
    char dir[64];
};

static int run_script(const struct setup *s)
{
    pid_t pid = fork();
    int status;

    if (pid == 0) {
        execl("/bin/sh", "sh", s->script, s->dir, s->control, (char *)NULL);
        _exit(127);
    }
    return pid > 0 && waitpid(pid, &status, 0) == pid ? status : -1;
}

static int make(void **state)
{
    struct setup *s = *state;

    snprintf(s->dir, sizeof s->dir, "/tmp/unshardfs-hostile-XXXXXX");
    return mkdtemp(s->dir) ? run_script(s) : -1;
}

static int remove_one(const char *path, const struct stat *st, int flag,
                      struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

static int clean(void **state)
{
    struct setup *s = *state;

    return nftw(s->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* The control's tensor, found and read. */
static void check_good(struct world *w, const char *dir, const char *file)
{
    static const float want[6] = {0, 1, 2, 3, 4, 5};
    CLEANUP(buf_release) struct buf bytes = {0};
    struct checkpoint_info info;
    struct tensor_info *t;
    struct err e = {0};
    size_t count;

    assert_ok(scanner_get(w->scanner, dir, file, w->arena, &info, &e), &e);
    if (info.error)
        fail_msg("%s: %s", dir, info.error);
    assert_ok(world_tensors(w, info.id, &t, &count, &e), &e);
    assert_int_equal(count, 1);
    assert_string_equal(t->key, "a");
    assert_ok(world_read(w, info.id, t, &bytes, &e), &e);
    assert_int_equal(bytes.len, sizeof want);
    assert_memory_equal(bytes.data, want, sizeof want);
}

/* What the walk must find, as DIR or DIR:FILE; bad: its scan fails. */
static const struct {
    const char *place;
    bool bad;
} places[] = {
    {"dangling", false},
    {"deep/", false}, /* and 64 more */
    {"deep", false},
    {"dirname", false},
    {"escape", false},
    {"fifo", false},
    {"hardlink:again.safetensors", false},
    {"hardlink:ok.safetensors", false},
    {"loop", false},
    {"names:new\nline.safetensors", false},
    {"names:nnn", false}, /* and 240 more */
    {"names:ok.safetensors", false},
    {"names:\xff\xfe.safetensors", false},
    {"perm:ok.safetensors", false},
    {"perm:secret.safetensors", true},
    {"sock", false},
    {"sparse:big.safetensors", true},
    {"sparse:ok.safetensors", false},
    {"zero", false},
};

struct found {
    struct world *w;
    bool seen[ARRAY_SIZE(places)];
};

static bool is_place(const char *got, const char *place)
{
    size_t len = strlen(place);

    if (strcmp(place, "names:nnn") == 0 || place[len - 1] == '/')
        return strncmp(got, place, len) == 0 && strlen(got) > 60;
    return strcmp(got, place) == 0;
}

static int see(void *user, const char *dir, const char *file,
               const struct format_driver *d)
{
    struct found *f = user;
    char got[PATH_MAX];
    struct checkpoint_info info;
    struct err e = {0};
    size_t i = 0;

    assert_string_equal(d->name, "safetensors");
    snprintf(got, sizeof got, "%s%s%s", dir, file ? ":" : "", file ? file : "");
    while (i < ARRAY_SIZE(places) && !is_place(got, places[i].place))
        i++;
    if (i == ARRAY_SIZE(places))
        fail_msg("%s should not be found", got);
    assert_false(f->seen[i]);
    f->seen[i] = true;
    if (places[i].bad && (geteuid() != 0 || strncmp(got, "perm", 4) != 0)) {
        assert_ok(scanner_get(f->w->scanner, dir, file, f->w->arena, &info, &e), &e);
        assert_non_null(info.error);
        assert_int_equal(info.tensors, 0);
        print_message("# %s: %s\n", got, info.error);
    } else {
        check_good(f->w, dir, file);
    }
    return 0;
}

static void test_tree_of_special_files(void **state)
{
    const struct setup *s = *state;
    CLEANUP(world_close) struct world w = {0};
    struct found f = {.w = &w};
    struct timespec t0, t1;
    struct err e = {0};

    assert_ok(world_open(s->dir, &w, &e), &e);
    clock_gettime(CLOCK_MONOTONIC, &t0);
    assert_ok(scanner_walk(w.scanner, "", see, &f, &e), &e);
    clock_gettime(CLOCK_MONOTONIC, &t1);
    for (size_t i = 0; i < ARRAY_SIZE(places); i++)
        if (!f.seen[i])
            fail_msg("%s was not found", places[i].place);
    assert_true(t1.tv_sec - t0.tv_sec < 60); /* a fifo that is opened would hang */
}

/* What the names of the tree promise and what lies behind them are two things. */
static void test_nothing_special_is_opened(void **state)
{
    static const char *const names[] = {
        "loop/a.safetensors",        "loop/b",
        "escape/passwd.safetensors", "dangling/x.safetensors",
        "fifo/model.safetensors",    "dirname/model.safetensors",
        "zero/zero.safetensors",     "zero/null.safetensors",
    };
    const struct setup *s = *state;
    CLEANUP(world_close) struct world w = {0};
    struct err e = {0};

    assert_ok(world_open(s->dir, &w, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        struct checkpoint_info info;
        struct source *src = NULL;
        char dir[64];
        const char *file = strrchr(names[i], '/') + 1;

        snprintf(dir, sizeof dir, "%.*s", (int)(file - names[i] - 1), names[i]);
        if (scanner_get(w.scanner, dir, file, w.arena, &info, &e) != -ENOENT)
            fail_msg("%s: a checkpoint", names[i]);
        if (w.store->ops->open(w.store, names[i], &src, &e) == 0)
            fail_msg("%s: was opened", names[i]);
    }
}

int main(int argc, char **argv)
{
    struct setup s = {.script = argc > 1 ? argv[1] : "",
                      .control = argc > 2 ? argv[2] : ""};
    struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate_setup_teardown(test_tree_of_special_files, make,
                                                 clean, &s),
        cmocka_unit_test_prestate_setup_teardown(test_nothing_special_is_opened, make,
                                                 clean, &s),
    };

    return cmocka_run_group_tests_name("special", tests, NULL, NULL);
}
