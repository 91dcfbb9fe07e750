/* SPDX-License-Identifier: MIT */
/* tests/unit/test_remote_local.c - the local store: paths, links, kinds, listings. */
#include "remote_tmp.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#include "base/err.h"
#include "remote/store.h"

static struct store *store_at(const struct tmp *t, const char *name)
{
    struct store *s = NULL;
    struct err e = {0};

    assert_ok(store_open_local(tmp_at(t, name), NULL, &s, &e), &e);
    return s;
}

/* What open() says, 0 when the bytes are `text`. */
static int opens_as(struct store *s, const char *path, const char *text)
{
    CLEANUP(source_putp) struct source *src = NULL;
    struct err e = {0};
    char dst[64] = "";
    int rc = s->ops->open(s, path, &src, &e);

    if (rc < 0)
        return rc;
    assert_true(src->size < sizeof dst);
    assert_ok(source_read(src, 0, src->size, dst, &e), &e);
    if (strcmp(dst, text) != 0)
        fail_msg("%s: \"%s\", not \"%s\"", path, dst, text);
    return 0;
}

static struct entry_stat stat_of(struct store *s, const char *path)
{
    struct entry_stat st = {0};
    struct err e = {0};

    assert_ok(s->ops->stat(s, path, &st, &e), &e);
    return st;
}

static void check_kind(struct store *s, const char *path, enum entry_kind kind,
                       bool is_link)
{
    struct entry_stat st = stat_of(s, path);

    if (st.kind != kind || st.is_link != is_link)
        fail_msg("%s: kind %d link %d, not %d %d", path, st.kind, st.is_link, kind,
                 is_link);
}

static int link_text(struct store *s, const char *path, char dst[PATH_MAX])
{
    struct err e = {0};

    dst[0] = '\0';
    return s->ops->readlink(s, path, dst, PATH_MAX, &e);
}

static void test_names_that_are_safe(void **state)
{
    static const struct {
        const char *name;
        size_t len; /* 0: all of it */
        bool safe;
    } cases[] = {
        {"a", 0, true},       {"a/b.bin", 0, true}, {"..a/b..", 0, true},
        {"...", 0, true},     {".hidden", 0, true}, {"\xff\x01", 0, true},
        {"", 0, false},       {"/", 0, false},      {"/a", 0, false},
        {"a/", 0, false},     {"a//b", 0, false},   {".", 0, false},
        {"..", 0, false},     {"./a", 0, false},    {"a/.", 0, false},
        {"a/../b", 0, false}, {"../a", 0, false},   {"a/..", 0, false},
        {"a\\b", 0, false},   {"a\0b", 3, false},   {"a\0", 2, false},
        {"abc/..", 3, true},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        size_t len = cases[i].len ? cases[i].len : strlen(cases[i].name);

        if (store_name_is_safe(cases[i].name, len) != cases[i].safe)
            fail_msg("\"%s\" (%zu) must be %s", cases[i].name, len,
                     cases[i].safe ? "safe" : "refused");
    }
}

static void test_names_that_are_too_long(void **state)
{
    char name[PATH_MAX + 1], dst[PATH_MAX + 10];

    (void)state;
    memset(name, 'a', sizeof name);
    assert_true(store_name_is_safe(name, PATH_MAX - 1));
    assert_false(store_name_is_safe(name, PATH_MAX));
    name[PATH_MAX - 3] = '\0';
    assert_int_equal(store_join("b", name, dst, sizeof dst), 0);
    name[PATH_MAX - 3] = 'a';
    name[PATH_MAX - 2] = '\0';
    assert_int_equal(store_join("b", name, dst, sizeof dst), -ENAMETOOLONG);
}

static void test_paths_are_joined(void **state)
{
    char dst[8];

    (void)state;
    assert_int_equal(store_join("a", "b", dst, sizeof dst), 0);
    assert_string_equal(dst, "a/b");
    assert_int_equal(store_join("", "b", dst, sizeof dst), 0);
    assert_string_equal(dst, "b");
    assert_int_equal(store_join("a", "", dst, sizeof dst), 0);
    assert_string_equal(dst, "a");
    assert_int_equal(store_join("", "", dst, sizeof dst), 0);
    assert_string_equal(dst, "");
    assert_int_equal(store_join("abc", "def", dst, sizeof dst), 0);
    assert_int_equal(store_join("abcd", "def", dst, sizeof dst), -ENAMETOOLONG);
}

static void test_a_directory_is_named_and_known(void **state)
{
    const struct tmp *t = *state;
    char want[400], slash[400];
    struct store *s;
    struct err e = {0};
    struct stat st;

    tmp_dir(t, "run");
    assert_int_equal(stat(tmp_at(t, "run"), &st), 0);
    s = store_at(t, "run");
    assert_string_equal(s->url, tmp_at(t, "run"));
    assert_null(s->file);
    snprintf(want, sizeof want, "local:%ju:%ju:%s/run", (uintmax_t)st.st_dev,
             (uintmax_t)st.st_ino, t->path);
    assert_string_equal(s->identity, want);
    store_close(s);

    tmp_link(t, "run", "alias");
    snprintf(slash, sizeof slash, "%s/alias/", t->path);
    assert_ok(store_open_local(slash, NULL, &s, &e), &e);
    assert_string_equal(s->identity, want); /* however it is spelled */
    store_close(s);
}

static void test_files_are_read(void **state)
{
    const struct tmp *t = *state;
    struct store *s;
    struct entry_stat st;
    struct stat real;

    tmp_dir(t, "a/b");
    tmp_file(t, "a/b/x", "bytes");
    assert_int_equal(chmod(tmp_at(t, "a/b/x"), 0640), 0);
    s = store_at(t, "");
    assert_int_equal(opens_as(s, "a/b/x", "bytes"), 0);
    st = stat_of(s, "a/b/x");
    assert_int_equal(stat(tmp_at(t, "a/b/x"), &real), 0);
    assert_int_equal(st.kind, ENTRY_FILE);
    assert_int_equal(st.mode, 0640);
    assert_int_equal(st.uid, real.st_uid);
    assert_int_equal(st.id.ino, real.st_ino);
    assert_int_equal(st.id.size, 5);
    assert_int_equal(st.id.mtime_ns,
                     real.st_mtim.tv_sec * 1000000000 + real.st_mtim.tv_nsec);
    check_kind(s, "", ENTRY_DIR, false);
    check_kind(s, "a", ENTRY_DIR, false);
    store_close(s);
}

static void test_an_open_file_blocks_again(void **state)
{
    const struct tmp *t = *state;
    struct source *src = NULL;
    struct err e = {0};
    struct store *s;

    tmp_file(t, "x", "bytes");
    s = store_at(t, "");
    assert_ok(s->ops->open(s, "x", &src, &e), &e);
    for (int fd = 3; fd < 64; fd++) {
        struct stat st;

        if (fstat(fd, &st) == 0 && st.st_ino == src->id.ino)
            assert_int_equal(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    }
    source_put(src);
    store_close(s);
}

static void test_climbing_paths_are_refused(void **state)
{
    static const char *const paths[] = {"../secret", "a/../../secret", "a/..", "..",
                                        "/etc/passwd"};
    const struct tmp *t = *state;
    const struct store_options follow = {.follow_symlinks = true};
    struct err e = {0};
    struct store *stores[2] = {NULL};

    tmp_dir(t, "root/a");
    tmp_file(t, "secret", "no");
    stores[0] = store_at(t, "root");
    assert_ok(store_open_local(tmp_at(t, "root"), &follow, &stores[1], &e), &e);
    for (size_t n = 0; n < 2; n++) {
        for (size_t i = 0; i < ARRAY_SIZE(paths); i++) {
            struct entry_stat st;

            assert_int_equal(opens_as(stores[n], paths[i], "no"), -EXDEV);
            assert_int_equal(stores[n]->ops->stat(stores[n], paths[i], &st, &e),
                             -EXDEV);
        }
        store_close(stores[n]);
    }
}

static void test_links_within_are_followed(void **state)
{
    const struct tmp *t = *state;
    struct store *s;
    char abs[400];

    tmp_dir(t, "root/a/b");
    tmp_file(t, "root/a/b/x", "bytes");
    tmp_link(t, "a/b/x", "root/file");
    tmp_link(t, "../a/b/x", "root/a/up");
    tmp_link(t, "a/b", "root/dir");
    tmp_link(t, "file", "root/chain");
    snprintf(abs, sizeof abs, "%s/root/a", t->path);
    tmp_link(t, abs, "root/abs");
    tmp_link(t, "abs/b/../b/x", "root/through");
    s = store_at(t, "root");
    check_kind(s, "file", ENTRY_FILE, true);
    check_kind(s, "chain", ENTRY_FILE, true);
    check_kind(s, "dir", ENTRY_DIR, true);
    check_kind(s, "abs", ENTRY_DIR, true);
    check_kind(s, "abs/b", ENTRY_DIR, false);
    check_kind(s, "abs/up", ENTRY_FILE, true);
    check_kind(s, "through", ENTRY_FILE, true);
    assert_int_equal(opens_as(s, "file", "bytes"), 0);
    assert_int_equal(opens_as(s, "chain", "bytes"), 0);
    assert_int_equal(opens_as(s, "a/up", "bytes"), 0);
    assert_int_equal(opens_as(s, "dir/x", "bytes"), 0);
    assert_int_equal(opens_as(s, "abs/b/x", "bytes"), 0);
    assert_int_equal(opens_as(s, "abs/up", "bytes"), 0);
    assert_int_equal(opens_as(s, "through", "bytes"), 0);
    store_close(s);
}

static void test_absolute_links_may_use_the_users_spelling(void **state)
{
    const struct tmp *t = *state;
    struct store *s;
    char abs[400];

    tmp_dir(t, "disk/run/step1");
    tmp_link(t, "disk", "data");
    snprintf(abs, sizeof abs, "%s/data/run/step1", t->path);
    tmp_link(t, abs, "disk/run/latest");
    s = store_at(t, "data/run");
    check_kind(s, "latest", ENTRY_DIR, true);
    store_close(s);
    s = store_at(t, "disk/run"); /* that is not how this one was named */
    check_kind(s, "latest", ENTRY_OTHER, true);
    store_close(s);
}

static void make_bad_links(const struct tmp *t)
{
    char abs[400];

    tmp_dir(t, "root/dir");
    tmp_dir(t, "rootless");
    tmp_file(t, "secret", "no");
    tmp_link(t, "../secret", "root/escape");
    tmp_link(t, "dir/../../secret", "root/escape2");
    tmp_link(t, "..", "root/parent");
    snprintf(abs, sizeof abs, "%s/secret", t->path);
    tmp_link(t, abs, "root/absolute");
    snprintf(abs, sizeof abs, "%s/rootless", t->path); /* "root" is but a prefix */
    tmp_link(t, abs, "root/beside");
    snprintf(abs, sizeof abs, "%s/root/../secret", t->path);
    tmp_link(t, abs, "root/climbing");
    tmp_link(t, "loop", "root/loop");
    tmp_link(t, "nothing", "root/dangling");
    snprintf(abs, sizeof abs, "%s/root/absloop", t->path);
    tmp_link(t, abs, "root/absloop");
}

static void test_links_out_lead_nowhere(void **state)
{
    static const struct {
        const char *path;
        int rc;
    } cases[] = {
        {"escape", -EXDEV},        {"escape2", -EXDEV},  {"absolute", -EXDEV},
        {"beside", -EXDEV},        {"climbing", -EXDEV}, {"parent", -EXDEV},
        {"parent/secret", -EXDEV}, {"loop", -ELOOP},     {"absloop", -ELOOP},
        {"dangling", -ENOENT},
    };
    struct err e = {0};
    struct source *src = NULL;
    struct store *s;

    make_bad_links(*state);
    s = store_at(*state, "root");
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        int rc = opens_as(s, cases[i].path, "no");

        if (rc != cases[i].rc)
            fail_msg("%s: %d, not %d", cases[i].path, rc, cases[i].rc);
        if (!strchr(cases[i].path, '/'))
            check_kind(s, cases[i].path, ENTRY_OTHER, true);
    }
    assert_int_equal(s->ops->open(s, "escape", &src, &e), -EXDEV);
    assert_string_equal(e.text, "escape: leads out of the source");
    assert_has(e.hint, "follow_symlinks");
    store_close(s);
}

static void test_follow_symlinks_lets_links_out(void **state)
{
    const struct store_options follow = {.follow_symlinks = true};
    const struct tmp *t = *state;
    struct err e = {0};
    struct store *s = NULL;
    char text[PATH_MAX];

    make_bad_links(t);
    assert_ok(store_open_local(tmp_at(t, "root"), &follow, &s, &e), &e);
    assert_int_equal(opens_as(s, "escape", "no"), 0);
    assert_int_equal(opens_as(s, "absolute", "no"), 0);
    assert_int_equal(opens_as(s, "parent/secret", "no"), 0);
    check_kind(s, "escape", ENTRY_FILE, true);
    check_kind(s, "parent", ENTRY_DIR, true);
    check_kind(s, "dangling", ENTRY_OTHER, true);
    assert_int_equal(link_text(s, "parent", text), -EXDEV);
    store_close(s);
}

/* Whoever hangs here is ended by SIGALRM. */
static void test_fifos_sockets_and_devices_are_never_opened(void **state)
{
    const struct tmp *t = *state;
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    CLEANUP_FD int sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct source *src = NULL;
    struct err e = {0};
    struct store *s = NULL;

    assert_int_equal(mkfifo(tmp_at(t, "fifo"), 0600), 0);
    snprintf(addr.sun_path, sizeof addr.sun_path, "%.90s/sock", t->path);
    assert_int_equal(bind(sock, (struct sockaddr *)&addr, sizeof addr), 0);
    tmp_link(t, "fifo", "link");
    alarm(10);
    assert_int_equal(store_open_local(tmp_at(t, "fifo"), NULL, &s, &e), -EINVAL);
    assert_has(e.text, "/fifo: is a fifo, not a directory or regular file");
    assert_int_equal(store_open_local("/dev/null", NULL, &s, &e), -EINVAL);
    assert_string_equal(e.text,
                        "/dev/null: is a device, not a directory or regular file");
    s = store_at(t, "");
    assert_int_equal(s->ops->open(s, "fifo", &src, &e), -EINVAL);
    assert_string_equal(e.text, "fifo: is a fifo, not a regular file");
    assert_int_equal(s->ops->open(s, "link", &src, &e), -EINVAL);
    assert_int_equal(s->ops->open(s, "sock", &src, &e), -EINVAL);
    assert_string_equal(e.text, "sock: is a socket, not a regular file");
    assert_int_equal(s->ops->open(s, "", &src, &e), -EINVAL);
    assert_has(e.text, ": is a directory, not a regular file");
    check_kind(s, "fifo", ENTRY_OTHER, false);
    check_kind(s, "link", ENTRY_OTHER, true);
    check_kind(s, "sock", ENTRY_OTHER, false);
    assert_ok(s->ops->list(s, "", &l, &e), &e);
    assert_int_equal(listing_count(l), 3);
    alarm(0);
    store_close(s);
}

static void make_hf_cache(const struct tmp *t)
{
    tmp_dir(t, "hub/models--o--n/blobs");
    tmp_dir(t, "hub/models--o--n/snapshots/rev/sub");
    tmp_dir(t, "hub/models--o--n/refs");
    tmp_dir(t, "hub/models--o--other/blobs");
    tmp_file(t, "hub/models--o--n/blobs/abc", "weights");
    tmp_file(t, "hub/models--o--other/blobs/def", "no");
    tmp_link(t, "../../blobs/abc", "hub/models--o--n/snapshots/rev/model.safetensors");
    tmp_link(t, "../../../blobs/abc", "hub/models--o--n/snapshots/rev/sub/deep");
    tmp_link(t, "../../../models--o--other/blobs/def",
             "hub/models--o--n/snapshots/rev/out");
    tmp_link(t, "../../refs", "hub/models--o--n/snapshots/rev/refs");
    tmp_link(t, "rev", "hub/models--o--n/snapshots/main");
    tmp_dir(t, "hub/models--o--n/snapshots/rev2");
    tmp_link(t, "../rev2", "hub/models--o--n/snapshots/rev/beside");
    tmp_link(t, "../snapshots/rev/sub", "hub/models--o--n/refs/back");
}

static void test_a_hugging_face_snapshot_reads_its_blobs(void **state)
{
    const struct tmp *t = *state;
    char text[PATH_MAX];
    struct store *s;

    make_hf_cache(t);
    s = store_at(t, "hub/models--o--n/snapshots/rev");
    assert_int_equal(opens_as(s, "model.safetensors", "weights"), 0);
    assert_int_equal(opens_as(s, "sub/deep", "weights"), 0);
    assert_int_equal(opens_as(s, "out", "no"), -EXDEV);
    assert_int_equal(opens_as(s, "../../blobs/abc", "weights"), -EXDEV);
    check_kind(s, "model.safetensors", ENTRY_FILE, true);
    check_kind(s, "out", ENTRY_OTHER, true);
    check_kind(s, "refs", ENTRY_DIR, true);
    assert_int_equal(link_text(s, "refs", text), -EXDEV); /* in the anchor, no more */
    assert_int_equal(link_text(s, "beside", text), -EXDEV);
    assert_int_equal(link_text(s, "refs/back", text), -EXDEV);
    store_close(s);

    s = store_at(t, "hub/models--o--n/snapshots/rev/sub");
    assert_int_equal(opens_as(s, "deep", "weights"), 0);
    store_close(s);
}

static void test_a_hugging_face_cache_opens_at_every_level(void **state)
{
    const struct tmp *t = *state;
    char text[PATH_MAX];
    struct store *s;

    make_hf_cache(t);
    s = store_at(t, "hub/models--o--n");
    assert_int_equal(opens_as(s, "snapshots/rev/model.safetensors", "weights"), 0);
    assert_int_equal(opens_as(s, "snapshots/rev/out", "no"), -EXDEV);
    assert_int_equal(link_text(s, "snapshots/main", text), 0);
    assert_string_equal(text, "rev");
    assert_int_equal(link_text(s, "snapshots/main/refs", text), 0);
    assert_string_equal(text, "../../refs");
    store_close(s);

    s = store_at(t, "hub");
    assert_int_equal(opens_as(s, "models--o--n/snapshots/rev/out", "no"), 0);
    store_close(s);

    s = store_at(t, "hub/models--o--n/snapshots"); /* all of them */
    assert_int_equal(opens_as(s, "rev/model.safetensors", "weights"), 0);
    assert_int_equal(opens_as(s, "rev/out", "no"), -EXDEV);
    store_close(s);
}

static void test_a_single_file_is_a_source(void **state)
{
    const struct tmp *t = *state;
    struct store *s;
    struct err e = {0};
    char want[400];

    tmp_dir(t, "run");
    tmp_file(t, "run/model.gguf", "weights");
    tmp_link(t, "run/model.gguf", "link");
    s = store_at(t, "run/model.gguf");
    assert_string_equal(s->file, "model.gguf");
    assert_string_equal(s->url, tmp_at(t, "run/model.gguf"));
    snprintf(want, sizeof want, ":%s/run/model.gguf", t->path);
    assert_has(s->identity, want);
    assert_int_equal(opens_as(s, s->file, "weights"), 0);
    store_close(s);

    s = store_at(t, "link"); /* within its directory: the name that was given */
    assert_string_equal(s->file, "link");
    assert_int_equal(opens_as(s, s->file, "weights"), 0);
    store_close(s);

    assert_int_equal(chdir(tmp_at(t, "run")), 0);
    assert_ok(store_open_local("model.gguf", NULL, &s, &e), &e);
    assert_string_equal(s->url, tmp_at(t, "run/model.gguf"));
    assert_int_equal(chdir("/"), 0);
    assert_int_equal(opens_as(s, s->file, "weights"), 0);
    store_close(s);
}

static void test_a_single_file_behind_links(void **state)
{
    const struct tmp *t = *state;
    struct store *s;

    make_hf_cache(t);
    s = store_at(t, "hub/models--o--n/snapshots/rev/model.safetensors");
    assert_string_equal(s->file, "model.safetensors");
    assert_int_equal(opens_as(s, s->file, "weights"), 0);
    store_close(s);

    /* Leaves its directory, but was named outright: its target is the source. */
    s = store_at(t, "hub/models--o--n/snapshots/rev/out");
    assert_string_equal(s->file, "def");
    assert_string_equal(s->url, tmp_at(t, "hub/models--o--other/blobs/def"));
    assert_int_equal(opens_as(s, s->file, "no"), 0);
    store_close(s);
}

static void test_what_is_not_there(void **state)
{
    const struct tmp *t = *state;
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct entry_stat st;
    struct err e = {0};
    struct store *s = NULL;
    char want[400];

    assert_int_equal(store_open_local(tmp_at(t, "gone"), NULL, &s, &e), -ENOENT);
    snprintf(want, sizeof want, "%s/gone: No such file or directory", t->path);
    assert_string_equal(e.text, want);
    assert_null(s);
    assert_int_equal(store_open_local("", NULL, &s, &e), -ENOENT);
    tmp_file(t, "x", "bytes");
    s = store_at(t, "");
    assert_int_equal(s->ops->stat(s, "gone", &st, &e), -ENOENT);
    assert_string_equal(e.text, "gone: No such file or directory");
    assert_int_equal(s->ops->list(s, "gone", &l, &e), -ENOENT);
    assert_int_equal(s->ops->list(s, "x", &l, &e), -ENOTDIR);
    assert_string_equal(e.text, "x: Not a directory");
    assert_int_equal(opens_as(s, "x/y", ""), -ENOTDIR);
    store_close(s);
}

static void test_links_to_directories_have_equal_text(void **state)
{
    const struct tmp *t = *state;
    static const struct {
        const char *path, *text;
        int rc;
    } cases[] = {
        {"latest", "step1", 0},  /* the raw text where it is plain */
        {"newest", "latest", 0}, /* also when it names another link */
        {"a/up", "../step1", 0},
        {"a/deep", "b/c", 0},
        {"a/b/abs", "../../step1", 0},
        {"abs", "step1", 0},
        {"a/top", "..", 0},
        {"a/self", ".", 0},
        {"latest/in", "../a/b", 0}, /* seen from where the link really lies */
        {"file", "", -ENOTDIR},
        {"step1", "", -EINVAL},
        {"out", "", -EXDEV},
        {"loop", "", -ELOOP},
        {"dangling", "", -ENOENT},
    };
    struct store *s;
    char abs[400];

    tmp_dir(t, "root/step1");
    tmp_dir(t, "root/a/b/c");
    tmp_dir(t, "outside");
    tmp_file(t, "root/x", "bytes");
    tmp_link(t, "step1", "root/latest");
    tmp_link(t, "latest", "root/newest");
    tmp_link(t, "../step1", "root/a/up");
    tmp_link(t, "b/c", "root/a/deep");
    snprintf(abs, sizeof abs, "%s/root/step1/", t->path);
    tmp_link(t, abs, "root/abs");
    tmp_link(t, abs, "root/a/b/abs");
    tmp_link(t, "..", "root/a/top");
    tmp_link(t, "../a", "root/a/self");
    tmp_link(t, "../a/b", "root/step1/in");
    tmp_link(t, "x", "root/file");
    tmp_link(t, "../outside", "root/out");
    tmp_link(t, "loop", "root/loop");
    tmp_link(t, "gone", "root/dangling");
    s = store_at(t, "root");
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[PATH_MAX];
        int rc = link_text(s, cases[i].path, text);

        if (rc != cases[i].rc || strcmp(text, cases[i].text) != 0)
            fail_msg("%s: %d \"%s\", not %d \"%s\"", cases[i].path, rc, text,
                     cases[i].rc, cases[i].text);
    }
    store_close(s);
}

static void test_a_link_text_is_never_cut(void **state)
{
    const struct tmp *t = *state;
    struct err e = {0};
    struct store *s;
    char text[8];

    tmp_dir(t, "step100");
    tmp_link(t, "step100", "latest");
    s = store_at(t, "");
    assert_int_equal(s->ops->readlink(s, "latest", text, 7, &e), -ENAMETOOLONG);
    assert_int_equal(s->ops->readlink(s, "latest", text, 8, &e), 0);
    assert_string_equal(text, "step100");
    store_close(s);
}

static void test_a_listing_is_sorted_and_complete(void **state)
{
    static const char *const want[] = {"\x01", ".dot",   "10",      "9",
                                       "Z",    "a\nb",   "a b",     "broken",
                                       "dir",  "to_dir", "to_file", "\xff"};
    const struct tmp *t = *state;
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct err e = {0};
    struct store *s;

    tmp_dir(t, "d/dir");
    tmp_link(t, "gone", "d/broken");
    tmp_link(t, "dir", "d/to_dir");
    tmp_link(t, "9", "d/to_file");
    for (size_t i = 0; i < ARRAY_SIZE(want); i++) {
        char path[64];

        snprintf(path, sizeof path, "d/%s", want[i]);
        if (access(tmp_at(t, path), F_OK) < 0 && strcmp(want[i], "broken") != 0)
            tmp_file(t, path, "12");
    }
    s = store_at(t, "");
    assert_ok(s->ops->list(s, "d", &l, &e), &e);
    assert_string_equal(listing_path(l), "d");
    assert_string_equal(listing_name(l), "d");
    assert_int_equal(listing_count(l), ARRAY_SIZE(want));
    for (size_t i = 0; i < ARRAY_SIZE(want); i++)
        assert_string_equal(listing_at(l, i)->name, want[i]);
    assert_int_equal(listing_find(l, "dir")->st.kind, ENTRY_DIR);
    assert_int_equal(listing_find(l, "to_dir")->st.kind, ENTRY_DIR);
    assert_true(listing_find(l, "to_dir")->st.is_link);
    assert_int_equal(listing_find(l, "to_file")->st.kind, ENTRY_FILE);
    assert_int_equal(listing_find(l, "to_file")->st.id.size, 2);
    assert_int_equal(listing_find(l, "broken")->st.kind, ENTRY_OTHER);
    assert_int_equal(listing_find(l, "9")->st.id.size, 2);
    store_close(s);
}

static void test_the_root_is_called_as_its_directory(void **state)
{
    const struct tmp *t = *state;
    struct listing *l = NULL;
    struct err e = {0};
    struct store *s;

    tmp_dir(t, "step100");
    tmp_file(t, "step100/x", "");
    s = store_at(t, "step100");
    assert_ok(s->ops->list(s, "", &l, &e), &e);
    assert_string_equal(listing_path(l), "");
    assert_string_equal(listing_name(l), "step100");
    listing_freep(&l);
    store_close(s);
    s = store_at(t, "step100/x");
    assert_ok(s->ops->list(s, "", &l, &e), &e);
    assert_string_equal(listing_name(l), "step100");
    listing_freep(&l);
    store_close(s);
}

static void test_a_listing_reads_its_files(void **state)
{
    const struct tmp *t = *state;
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP_FREE char *data = NULL;
    CLEANUP_FREE char *big = malloc(10000);
    char dst[6000] = "";
    struct err e = {0};
    struct store *s;
    size_t got = 0, len = 0;

    for (size_t i = 0; i < 10000; i++)
        big[i] = (char)('a' + i % 23);
    tmp_dir(t, "d/sub/deeper");
    tmp_bytes(t, "d/big", big, 10000);
    tmp_file(t, "d/sub/deeper/small", "hello");
    s = store_at(t, "");
    assert_ok(s->ops->list(s, "d", &l, &e), &e);
    assert_int_equal(listing_peek(l, "big", dst, 8, &got), 0);
    assert_int_equal(got, 8);
    assert_memory_equal(dst, big, 8);
    assert_int_equal(listing_peek(l, "big", dst, sizeof dst, &got), 0);
    assert_int_equal(got, sizeof dst);
    assert_memory_equal(dst, big, sizeof dst);
    assert_int_equal(listing_read(l, "big", 9999, &data, &len, &e), -EFBIG);
    assert_ok(listing_read(l, "big", 10000, &data, &len, &e), &e);
    assert_int_equal(len, 10000);
    assert_memory_equal(data, big, 10000);
    assert_int_equal(data[10000], '\0');
    assert_int_equal(listing_peek(l, "sub", dst, 8, &got), -EISDIR);
    assert_int_equal(listing_peek(l, "gone", dst, 8, &got), -ENOENT);
    assert_null(listing_sub(l, "big"));
    assert_null(listing_sub(l, "gone"));

    struct listing *deeper = listing_sub(listing_sub(l, "sub"), "deeper");

    assert_non_null(deeper);
    assert_ptr_equal(listing_sub(listing_sub(l, "sub"), "deeper"), deeper);
    assert_string_equal(listing_path(deeper), "d/sub/deeper");
    assert_string_equal(listing_name(deeper), "deeper");
    assert_int_equal(listing_peek(deeper, "small", dst, 100, &got), 0);
    assert_int_equal(got, 5);
    store_close(s);
}

static void test_a_file_newer_than_its_listing_is_not_read(void **state)
{
    const struct tmp *t = *state;
    CLEANUP(listing_freep) struct listing *l = NULL;
    char *data = NULL, dst[8] = "";
    size_t len = 0, got = 0;
    struct err e = {0};
    struct store *s;

    tmp_file(t, "x", "old");
    tmp_file(t, "y", "old");
    s = store_at(t, "");
    assert_ok(s->ops->list(s, "", &l, &e), &e);
    assert_int_equal(listing_peek(l, "y", dst, 3, &got), 0);
    usleep(20000);
    tmp_file(t, "x", "new");
    tmp_file(t, "y", "new");
    assert_int_equal(listing_read(l, "x", 100, &data, &len, &e), -ESTALE);
    assert_has(e.text, "x: the file changed: mtime");
    assert_int_equal(listing_peek(l, "x", dst, 3, &got), -ESTALE);
    assert_null(data);
    assert_int_equal(listing_peek(l, "y", dst, 3, &got), 0); /* kept from before */
    assert_memory_equal(dst, "old", 3);
    store_close(s);
}

/* Root may read everything, so it is somebody else who tries. */
static int list_as_nobody(const struct tmp *t)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct err e = {0};
    struct store *s = NULL;

    if (geteuid() == 0 && (setgid(65534) < 0 || setuid(65534) < 0))
        return 77;
    if (store_open_local(t->path, NULL, &s, &e) < 0)
        return 1;
    if (s->ops->list(s, "", &l, &e) < 0 || listing_count(l) != 3)
        return 2;
    if (listing_sub(l, "closed") || !listing_sub(l, "open"))
        return 3;
    if (s->ops->list(s, "closed", &(struct listing *){NULL}, &e) != -EACCES ||
        strcmp(e.text, "closed: Permission denied") != 0)
        return 4;
    if (s->ops->list(s, "unsearchable", &(struct listing *){NULL}, &e) != -EACCES ||
        !strstr(e.text, "unsearchable: "))
        return 5;
    store_close(s);
    return 0;
}

static void test_a_closed_directory_hides_only_itself(void **state)
{
    const struct tmp *t = *state;
    int status;
    pid_t pid;

    tmp_dir(t, "closed");
    tmp_dir(t, "open");
    tmp_dir(t, "unsearchable");
    tmp_file(t, "unsearchable/x", "");
    assert_int_equal(chmod(t->path, 0755), 0);
    assert_int_equal(chmod(tmp_at(t, "open"), 0755), 0); /* whatever the umask is */
    assert_int_equal(chmod(tmp_at(t, "closed"), 0), 0);
    assert_int_equal(chmod(tmp_at(t, "unsearchable"), 0444), 0);
    pid = fork();
    if (pid == 0)
        _exit(list_as_nobody(t));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(chmod(tmp_at(t, "closed"), 0755), 0);
    assert_int_equal(chmod(tmp_at(t, "unsearchable"), 0755), 0);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        leave_out("only root can be another user");
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_many_entries_are_listed_quickly(void **state)
{
    enum { COUNT = 20000 }; /* making more of them takes longer than listing */
    const struct tmp *t = *state;
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct timespec from, to;
    struct err e = {0};
    struct store *s;
    char name[32];

    for (int i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "chunk-%d", i);
        assert_int_equal(mknod(tmp_at(t, name), S_IFREG | 0644, 0), 0);
    }
    s = store_at(t, "");
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    assert_ok(s->ops->list(s, "", &l, &e), &e);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    assert_int_equal(listing_count(l), COUNT);
    for (int i = 0; i < COUNT; i += 997) {
        snprintf(name, sizeof name, "chunk-%d", i);
        assert_non_null(listing_find(l, name));
    }
    /* Takes 0.05 s (0.25 s for 100,000); what is quadratic takes longer than this. Of the
       processor: others may have it meanwhile. */
    assert_true(to.tv_sec - from.tv_sec < 2);
    store_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names_that_are_safe),
        cmocka_unit_test(test_names_that_are_too_long),
        cmocka_unit_test(test_paths_are_joined),
        tmp_test(test_a_directory_is_named_and_known),
        tmp_test(test_files_are_read),
        tmp_test(test_an_open_file_blocks_again),
        tmp_test(test_climbing_paths_are_refused),
        tmp_test(test_links_within_are_followed),
        tmp_test(test_absolute_links_may_use_the_users_spelling),
        tmp_test(test_links_out_lead_nowhere),
        tmp_test(test_follow_symlinks_lets_links_out),
        tmp_test(test_fifos_sockets_and_devices_are_never_opened),
        tmp_test(test_a_hugging_face_snapshot_reads_its_blobs),
        tmp_test(test_a_hugging_face_cache_opens_at_every_level),
        tmp_test(test_a_single_file_is_a_source),
        tmp_test(test_a_single_file_behind_links),
        tmp_test(test_what_is_not_there),
        tmp_test(test_links_to_directories_have_equal_text),
        tmp_test(test_a_link_text_is_never_cut),
        tmp_test(test_a_listing_is_sorted_and_complete),
        tmp_test(test_the_root_is_called_as_its_directory),
        tmp_test(test_a_listing_reads_its_files),
        tmp_test(test_a_file_newer_than_its_listing_is_not_read),
        tmp_test(test_a_closed_directory_hides_only_itself),
        tmp_test(test_many_entries_are_listed_quickly),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
