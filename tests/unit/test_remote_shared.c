/* SPDX-License-Identifier: MIT */
/* tests/unit/test_remote_shared.c - what threads share: open files and decoded pieces. */
#include "remote_tmp.h"

#include <pthread.h>
#include <stdatomic.h>

#include "base/err.h"
#include "base/fsutil.h"
#include "remote/decoded.h"
#include "remote/open_files.h"
#include "remote/store.h"

enum { THREADS = 8 };

static struct store *store_of(const struct tmp *t)
{
    struct store *s = NULL;
    struct err e = {0};

    assert_ok(store_open_local(t->path, NULL, &s, &e), &e);
    return s;
}

static struct open_files *files_of(struct store *s, unsigned keep)
{
    struct open_files *f = NULL;
    struct err e = {0};

    assert_ok(open_files_new(s, keep, &f, &e), &e);
    return f;
}

static struct file_id id_of(struct store *s, const char *path)
{
    struct entry_stat st = {0};
    struct err e = {0};

    assert_ok(s->ops->stat(s, path, &st, &e), &e);
    return st.id;
}

static struct source *get_file(struct open_files *f, const char *path,
                               const struct file_id *id)
{
    struct source *src = NULL;
    struct err e = {0};

    assert_ok(open_files_get(f, path, id, &src, &e), &e);
    return src;
}

static void check_bytes(struct source *src, const char *text)
{
    char dst[64] = "";
    struct err e = {0};

    assert_true(src->size < sizeof dst);
    assert_ok(source_read(src, 0, src->size, dst, &e), &e);
    assert_string_equal(dst, text);
}

static void test_readers_share_one_open_file(void **state)
{
    struct store *s = store_of(*state);
    struct open_files *f = files_of(s, 4);
    struct source *a, *b;
    struct file_id id;
    unsigned before;

    tmp_file(*state, "x", "bytes");
    id = id_of(s, "x");
    before = tmp_open_fds();
    a = get_file(f, "x", &id);
    b = get_file(f, "x", &id);
    assert_ptr_equal(a, b);
    assert_int_equal(tmp_open_fds(), before + 1);
    check_bytes(a, "bytes");
    source_put(a);
    source_put(b);
    assert_int_equal(tmp_open_fds(), before + 1); /* kept for the next reader */
    open_files_free(f);
    assert_int_equal(tmp_open_fds(), before);
    store_close(s);
}

static void test_what_nobody_uses_is_closed(void **state)
{
    struct store *s = store_of(*state);
    struct open_files *f = files_of(s, 4);
    struct source *a;
    struct file_id id;
    unsigned before;

    tmp_file(*state, "x", "bytes");
    id = id_of(s, "x");
    before = tmp_open_fds();
    a = get_file(f, "x", &id);
    open_files_rest(f, 100, 10);
    open_files_rest(f, 200, 10); /* in use all the time */
    assert_int_equal(tmp_open_fds(), before + 1);
    source_put(a);
    open_files_rest(f, 300, 10); /* found idle */
    open_files_rest(f, 309, 10);
    assert_int_equal(tmp_open_fds(), before + 1);
    source_put(get_file(f, "x", &id)); /* used again: its time starts anew */
    open_files_rest(f, 312, 10);
    open_files_rest(f, 321, 10);
    assert_int_equal(tmp_open_fds(), before + 1);
    open_files_rest(f, 322, 10);
    assert_int_equal(tmp_open_fds(), before);
    a = get_file(f, "x", &id);
    check_bytes(a, "bytes");
    source_put(a);
    open_files_free(f);
    store_close(s);
}

static void test_a_replaced_file_is_two_files(void **state)
{
    const struct tmp *t = *state;
    struct store *s = store_of(t);
    struct open_files *f = files_of(s, 4);
    struct source *old, *new, *none = NULL;
    struct file_id old_id, new_id;
    struct err e = {0};

    tmp_file(t, "x", "old");
    old_id = id_of(s, "x");
    old = get_file(f, "x", &old_id);
    tmp_file(t, "y", "newer");
    assert_int_equal(rename(tmp_at(t, "y"), tmp_at(t, "x")), 0);
    assert_int_equal(open_files_get(f, "x", &old_id, &none, &e), -ESTALE);
    assert_has(e.text, "x: another file has this name now");
    assert_null(none);
    new_id = id_of(s, "x");
    new = get_file(f, "x", &new_id);
    check_bytes(new, "newer");
    check_bytes(old, "old");
    source_put(old);
    source_put(new);
    open_files_free(f);
    store_close(s);
}

static void test_a_rewritten_file_is_opened_anew(void **state)
{
    const struct tmp *t = *state;
    struct store *s = store_of(t);
    struct open_files *f = files_of(s, 4);
    struct source *old, *new, *none = NULL;
    struct file_id old_id, new_id;
    struct err e = {0};

    tmp_file(t, "x", "old");
    old_id = id_of(s, "x");
    old = get_file(f, "x", &old_id);
    tmp_file(t, "x", "newer"); /* same inode */
    assert_int_equal(open_files_get(f, "x", &old_id, &none, &e), -ESTALE);
    assert_string_equal(e.text, "x: the file changed: size 5, was 3");
    new_id = id_of(s, "x");
    new = get_file(f, "x", &new_id);
    assert_ptr_not_equal(old, new);
    check_bytes(new, "newer");
    source_put(old);
    source_put(new);
    open_files_free(f);
    store_close(s);
}

static void test_missing_and_strange_files(void **state)
{
    const struct tmp *t = *state;
    struct store *s = store_of(t);
    struct open_files *f = files_of(s, 4);
    struct source *src = NULL;
    const struct file_id unknown = {0};
    struct file_id id;
    struct err e = {0};

    tmp_file(t, "x", "old");
    id = id_of(s, "x");
    source_put(get_file(f, "x", &id));
    assert_int_equal(open_files_get(f, "x", &unknown, &src, &e), -ESTALE);
    assert_int_equal(unlink(tmp_at(t, "x")), 0);
    assert_int_equal(open_files_get(f, "x", &id, &src, &e), -ENOENT);
    assert_string_equal(e.text, "x: No such file or directory");
    tmp_dir(t, "x");
    assert_int_equal(open_files_get(f, "x", &id, &src, &e), -ESTALE);
    assert_string_equal(e.text, "x: is no regular file any more");
    assert_int_equal(open_files_get(f, "../x", &id, &src, &e), -EXDEV);
    assert_null(src);
    open_files_free(f);
    store_close(s);
}

static void test_only_so_many_stay_open_unused(void **state)
{
    enum { FILES = 6, KEEP = 2 };
    const struct tmp *t = *state;
    struct store *s = store_of(t);
    struct open_files *f = files_of(s, KEEP);
    struct source *src[FILES];
    struct file_id ids[FILES];
    unsigned before = tmp_open_fds();
    char name[16];

    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "f%d", i);
        tmp_file(t, name, name);
        ids[i] = id_of(s, name);
        src[i] = get_file(f, name, &ids[i]);
    }
    assert_int_equal(tmp_open_fds(), before + FILES); /* all in use: none is closed */
    for (int i = 1; i < FILES; i++)
        source_put(src[i]);
    tmp_file(t, "g", "g");
    ids[1] = id_of(s, "g");
    src[1] = get_file(f, "g", &ids[1]);
    assert_int_equal(tmp_open_fds(), before + KEEP + 2);
    src[2] = get_file(f, "f0", &ids[0]); /* the oldest, but in use */
    assert_ptr_equal(src[2], src[0]);
    src[5] = get_file(f, "f5", &ids[5]); /* the most recent ones were kept */
    src[4] = get_file(f, "f4", &ids[4]);
    assert_int_equal(tmp_open_fds(), before + KEEP + 2);
    check_bytes(src[5], "f5");
    source_put(src[0]);
    source_put(src[1]);
    source_put(src[2]);
    source_put(src[4]);
    source_put(src[5]);
    open_files_free(f);
    assert_int_equal(tmp_open_fds(), before);
    store_close(s);
}

struct file_job {
    struct open_files *f;
    const struct file_id *ids;
    unsigned seed;
    atomic_int *bad;
};

/* Opens files in some order, a thousand times, and checks that each is the right one. */
static void *open_and_check(void *user)
{
    struct file_job *job = user;

    for (int i = 0; i < 1000; i++) {
        unsigned n = (unsigned)rand_r(&job->seed) % 10;
        char name[16], dst[8] = "";
        struct source *src = NULL;
        struct err e = {0};

        snprintf(name, sizeof name, "f%u", n);
        if (open_files_get(job->f, name, &job->ids[n], &src, &e) < 0 ||
            source_read(src, 0, 2, dst, &e) < 0 || strcmp(dst, name) != 0)
            atomic_fetch_add(job->bad, 1);
        source_put(src);
    }
    return NULL;
}

static void test_threads_open_files(void **state)
{
    const struct tmp *t = *state;
    struct store *s = store_of(t);
    struct open_files *f = files_of(s, 3);
    unsigned before = tmp_open_fds();
    struct file_job jobs[THREADS];
    pthread_t threads[THREADS];
    struct file_id ids[10];
    atomic_int bad = 0;

    for (unsigned i = 0; i < 10; i++) {
        char name[16];

        snprintf(name, sizeof name, "f%u", i);
        tmp_file(t, name, name);
        ids[i] = id_of(s, name);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        jobs[i] = (struct file_job){.f = f, .ids = ids, .seed = i, .bad = &bad};
        assert_int_equal(pthread_create(&threads[i], NULL, open_and_check, &jobs[i]),
                         0);
    }
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(bad, 0);
    open_files_free(f);
    assert_int_equal(tmp_open_fds(), before);
    store_close(s);
}

/* A file that changes between the look at it and its opening. */
struct racing_store {
    struct store base;
    struct store *inner;
    const struct tmp *t;
};

static int racing_stat(struct store *s, const char *path, struct entry_stat *out,
                       struct err *e)
{
    struct racing_store *r = container_of(s, struct racing_store, base);

    return r->inner->ops->stat(r->inner, path, out, e);
}

static int racing_open(struct store *s, const char *path, struct source **out,
                       struct err *e)
{
    struct racing_store *r = container_of(s, struct racing_store, base);

    tmp_file(r->t, path, "changed");
    return r->inner->ops->open(r->inner, path, out, e);
}

static void test_a_change_before_the_opening_is_noticed(void **state)
{
    const struct tmp *t = *state;
    struct store *s = store_of(t);
    const struct store_ops ops = {.stat = racing_stat, .open = racing_open};
    struct racing_store racing = {.base.ops = &ops, .inner = s, .t = t};
    struct open_files *f = files_of(&racing.base, 4);
    unsigned before = tmp_open_fds();
    struct source *src = NULL;
    struct err e = {0};
    struct file_id id;

    tmp_file(t, "x", "old");
    id = id_of(s, "x");
    assert_int_equal(open_files_get(f, "x", &id, &src, &e), -ESTALE);
    assert_string_equal(e.text, "x: the file changed: size 7, was 3");
    assert_null(src);
    assert_int_equal(tmp_open_fds(), before);
    open_files_free(f);
    store_close(s);
}

/* A "codec": each byte of the input stands `times` times in the output. */
struct codec {
    unsigned times, delay_us;
    int fail;             /* negative errno, 0: none */
    int wait_for_askers;  /* so many must have asked before it goes on */
    bool wait_for_others; /* another must be under way, too */
    atomic_int asked, calls, under_way, most_under_way;
};

enum { PATIENCE_MS = 60000 }; /* what has not come by then never comes */

static void note_most(atomic_int *most, int now)
{
    int seen = atomic_load(most);

    while (now > seen && !atomic_compare_exchange_weak(most, &seen, now))
        ;
}

static int write_repeated(const struct codec *c, struct source *in, int fd,
                          uint64_t limit, uint64_t *size, struct err *e)
{
    char byte, part[4096];

    for (uint64_t i = 0; i < in->size; i++) {
        if (source_read(in, i, 1, &byte, e) < 0)
            return -e->code;
        memset(part, byte, sizeof part);
        for (unsigned left = c->times; left > 0;) {
            unsigned n = MIN(left, (unsigned)sizeof part);

            if (*size + n > limit)
                return err_set(e, EFBIG, "more than %" PRIu64 " bytes", limit);
            if (write_all(fd, part, n, e) < 0)
                return -e->code;
            *size += n;
            left -= n;
        }
    }
    return 0;
}

static int repeat(void *user, struct source *in, int fd, uint64_t limit, uint64_t *size,
                  struct err *e)
{
    struct codec *c = user;
    int rc;

    atomic_fetch_add(&c->calls, 1);
    note_most(&c->most_under_way, atomic_fetch_add(&c->under_way, 1) + 1);
    for (int ms = 0;
         ms < PATIENCE_MS && (c->asked < c->wait_for_askers ||
                              (c->wait_for_others && c->most_under_way < 2));
         ms++)
        usleep(1000);
    usleep(c->delay_us);
    *size = 0;
    rc = c->fail ? err_set(e, -c->fail, "broken on purpose")
                 : write_repeated(c, in, fd, limit, size, e);
    atomic_fetch_sub(&c->under_way, 1);
    return rc;
}

static struct decoded_cache *cache_of(const struct tmp *t, uint64_t budget)
{
    struct decoded_cache *c = NULL;
    struct err e = {0};

    assert_ok(decoded_new(tmp_at(t, "cache"), budget, &c, &e), &e);
    return c;
}

static struct source *memory(const char *text)
{
    struct source *s = NULL;
    struct err e = {0};

    assert_ok(source_from_memory(text, strlen(text), false, "shard", &s, &e), &e);
    return s;
}

/* The piece number `n`, decoded; NULL and the error in *e. */
static struct source *get_piece(struct decoded_cache *c, uint64_t n, const char *text,
                                struct codec *codec, struct err *e)
{
    const struct decoded_key key = {.dev = 1, .ino = 2, .off = n, .len = 3};
    CLEANUP(source_putp) struct source *in = memory(text);
    struct source *out = NULL;
    int rc;

    atomic_fetch_add(&codec->asked, 1);
    rc = decoded_get(c, &key, in, 0, repeat, codec, &out, e);
    assert_int_equal(rc, out ? 0 : -e->code);
    return out;
}

static void check_piece(struct source *s, char byte, size_t len)
{
    CLEANUP_FREE char *got = malloc(len + 1);
    CLEANUP_FREE char *want = malloc(len + 1);
    struct err e = {0};

    assert_non_null(s);
    assert_int_equal(s->size, len);
    memset(want, byte, len);
    assert_ok(source_read(s, 0, len, got, &e), &e);
    assert_memory_equal(got, want, len);
}

static void test_a_piece_is_decoded_once(void **state)
{
    struct decoded_cache *c = cache_of(*state, 1 << 20);
    struct codec codec = {.times = 5};
    struct err e = {0};
    struct source *a = get_piece(c, 1, "x", &codec, &e);
    struct source *b = get_piece(c, 1, "x", &codec, &e);
    struct source *other;

    check_piece(a, 'x', 5);
    assert_ptr_equal(a, b);
    assert_memory_equal(source_map(a), "xxxxx", 5);
    assert_int_equal(codec.calls, 1);
    other = get_piece(c, 2, "y", &codec, &e);
    check_piece(other, 'y', 5);
    assert_int_equal(codec.calls, 2);
    source_put(a);
    source_put(b);
    source_put(other);
    decoded_free(c);
}

static void test_every_part_of_the_key_counts(void **state)
{
    static const struct decoded_key keys[] = {
        {1, 2, 3, 4, 5, 6, 7, 8}, {9, 2, 3, 4, 5, 6, 7, 8}, {1, 9, 3, 4, 5, 6, 7, 8},
        {1, 2, 9, 4, 5, 6, 7, 8}, {1, 2, 3, 9, 5, 6, 7, 8}, {1, 2, 3, 4, 9, 6, 7, 8},
        {1, 2, 3, 4, 5, 9, 7, 8}, {1, 2, 3, 4, 5, 6, 9, 8}, {1, 2, 3, 4, 5, 6, 7, 9},
    };
    struct decoded_cache *c = cache_of(*state, 1 << 20);
    struct codec codec = {.times = 1};
    struct source *in = memory("x");
    struct err e = {0};

    for (size_t i = 0; i < 2 * ARRAY_SIZE(keys); i++) {
        CLEANUP(source_putp) struct source *out = NULL;

        assert_ok(decoded_get(c, &keys[i % ARRAY_SIZE(keys)], in, 0, repeat, &codec,
                              &out, &e),
                  &e);
    }
    assert_int_equal(codec.calls, ARRAY_SIZE(keys));
    source_put(in);
    decoded_free(c);
}

static void test_nothing_lies_in_the_directory(void **state)
{
    const struct tmp *t = *state;
    struct decoded_cache *c = cache_of(t, 1 << 20);
    struct codec codec = {.times = 5};
    struct err e = {0};
    struct source *s = get_piece(c, 1, "x", &codec, &e);
    struct stat st;

    assert_int_equal(rmdir(tmp_at(t, "cache")), 0); /* so it is empty */
    tmp_dir(t, "cache");
    for (int fd = 3; fd < 64; fd++)
        if (fstat(fd, &st) == 0 && st.st_ino == s->id.ino)
            assert_int_equal(st.st_mode & 07777, 0600);
    source_put(s);
    decoded_free(c);
}

static void test_the_least_recent_makes_room(void **state)
{
    /* Less than what is guessed at first, so that room is made once, for one piece. */
    enum { PIECE = 60000 };
    struct decoded_cache *c = cache_of(*state, 3 * PIECE);
    struct codec codec = {.times = PIECE};
    unsigned before = tmp_open_fds();
    struct err e = {0};

    source_put(get_piece(c, 1, "a", &codec, &e));
    source_put(get_piece(c, 2, "b", &codec, &e));
    source_put(get_piece(c, 1, "a", &codec, &e));
    source_put(get_piece(c, 3, "c", &codec, &e));
    assert_int_equal(tmp_open_fds(), before + 2);
    assert_int_equal(codec.calls, 3);
    source_put(get_piece(c, 1, "a", &codec, &e));
    source_put(get_piece(c, 3, "c", &codec, &e));
    assert_int_equal(codec.calls, 3);
    source_put(get_piece(c, 2, "b", &codec, &e));
    assert_int_equal(codec.calls, 4); /* b was older than a */
    decoded_free(c);
    assert_int_equal(tmp_open_fds(), before);
}

static void test_what_is_read_is_not_evicted(void **state)
{
    enum { PIECE = 100000 };
    struct decoded_cache *c = cache_of(*state, 250000);
    struct codec codec = {.times = PIECE};
    struct err e = {0};
    struct source *a = get_piece(c, 1, "a", &codec, &e);
    struct source *b = get_piece(c, 2, "b", &codec, &e);

    check_piece(a, 'a', PIECE);
    check_piece(b, 'b', PIECE);
    assert_null(get_piece(c, 3, "c", &codec, &e));
    assert_int_equal(e.code, ENOSPC);
    assert_has(e.text, "shard: ");
    assert_has(e.hint, "cache_size");
    check_piece(a, 'a', PIECE);
    source_put(a);
    a = get_piece(c, 3, "c", &codec, &e);
    check_piece(a, 'c', PIECE);
    source_put(a);
    source_put(b);
    decoded_free(c);
}

static void test_a_piece_beyond_the_budget(void **state)
{
    struct decoded_cache *c = cache_of(*state, 99999);
    struct decoded_cache *nothing = cache_of(*state, 0);
    struct codec codec = {.times = 100000};
    struct err e = {0};
    struct source *s;

    assert_null(get_piece(c, 1, "a", &codec, &e));
    assert_int_equal(e.code, ENOSPC);
    assert_null(get_piece(nothing, 1, "a", &codec, &e));
    assert_int_equal(e.code, ENOSPC);
    codec.times = 99999; /* exactly all of it */
    s = get_piece(c, 1, "a", &codec, &e);
    check_piece(s, 'a', 99999);
    source_put(s);
    decoded_free(c);
    decoded_free(nothing);
}

static void test_a_far_larger_piece_than_guessed(void **state)
{
    struct decoded_cache *c = cache_of(*state, 64 << 20);
    struct codec codec = {.times = 20 << 20};
    struct err e = {0};
    struct source *s = get_piece(c, 1, "a", &codec, &e);

    check_piece(s, 'a', 20 << 20);
    source_put(s);
    decoded_free(c);
}

static void test_a_piece_of_known_size_is_decoded_once(void **state)
{
    enum { LEN = 20 << 20 };
    const struct decoded_key key = {.dev = 1, .ino = 2, .len = 3};
    struct decoded_cache *c = cache_of(*state, LEN), *small = cache_of(*state, LEN - 1);
    CLEANUP(source_putp) struct source *in = memory("a"), *out = NULL;
    struct codec codec = {.times = LEN};
    struct err e = {0};

    assert_ok(decoded_get(c, &key, in, LEN, repeat, &codec, &out, &e), &e);
    check_piece(out, 'a', LEN);
    assert_int_equal(codec.calls, 1);
    source_put(steal(&out));
    assert_int_equal(decoded_get(small, &key, in, LEN, repeat, &codec, &out, &e),
                     -ENOSPC);
    assert_int_equal(codec.calls, 1); /* what cannot fit is not begun */
    decoded_free(c);
    decoded_free(small);
}

static void test_a_failure_is_not_kept(void **state)
{
    struct decoded_cache *c = cache_of(*state, 1 << 20);
    struct codec codec = {.times = 5, .fail = -EBADMSG};
    unsigned before = tmp_open_fds();
    struct err e = {0};
    struct source *s;

    assert_null(get_piece(c, 1, "x", &codec, &e));
    assert_int_equal(e.code, EBADMSG);
    assert_string_equal(e.text, "broken on purpose");
    assert_int_equal(tmp_open_fds(), before);
    codec.fail = 0;
    s = get_piece(c, 1, "x", &codec, &e);
    check_piece(s, 'x', 5);
    source_put(s);
    decoded_free(c);
}

static int lie(void *user, struct source *in, int fd, uint64_t limit, uint64_t *size,
               struct err *e)
{
    (void)in;
    (void)limit;
    *size = 4;
    return write_all(fd, "12345", *(const size_t *)user, e);
}

static void test_a_decoder_that_lies_about_its_size(void **state)
{
    static const size_t written[] = {0, 3, 5};
    struct decoded_cache *c = cache_of(*state, 1 << 20);
    const struct decoded_key key = {.ino = 1};
    struct source *in = memory("x"), *out = NULL;
    struct err e = {0};

    for (size_t i = 0; i < ARRAY_SIZE(written); i++) {
        size_t n = written[i];

        assert_int_equal(decoded_get(c, &key, in, 0, lie, &n, &out, &e), -EIO);
        assert_has(e.text, "shard: decoded to 4 bytes");
    }
    assert_null(out);
    source_put(in);
    decoded_free(c);
}

static void test_a_file_that_changes_while_it_is_decoded(void **state)
{
    const struct source_faults changed = {.stale = true};
    struct decoded_cache *c = cache_of(*state, 1 << 20);
    const struct decoded_key key = {.ino = 1};
    struct source *in = memory("x"), *faulty = NULL, *out = NULL;
    struct codec codec = {.times = 5};
    struct err e = {0};

    assert_ok(source_with_faults(in, &changed, &faulty, &e), &e);
    assert_int_equal(decoded_get(c, &key, faulty, 0, repeat, &codec, &out, &e),
                     -ESTALE);
    assert_null(out);
    /* And what came out is not kept for others. */
    assert_ok(decoded_get(c, &key, in, 0, repeat, &codec, &out, &e), &e);
    assert_int_equal(codec.calls, 2);
    source_put(out);
    source_put(faulty);
    source_put(in);
    decoded_free(c);
}

struct piece_job {
    struct decoded_cache *c;
    struct codec *codec;
    unsigned seed, pieces, rounds;
    atomic_int failed;
    atomic_int *bad;
};

/* Gets pieces in some order; piece n is the letter n, and 'n' thousand bytes longer. */
static void *decode_and_check(void *user)
{
    struct piece_job *job = user;

    for (unsigned i = 0; i < job->rounds; i++) {
        unsigned n = (unsigned)rand_r(&job->seed) % job->pieces;
        char text[2] = {(char)('a' + n), '\0'}, first = 0, last = 0;
        struct err e = {0};
        CLEANUP(source_putp)
        struct source *s = get_piece(job->c, n, text, job->codec, &e);

        if (!s) {
            atomic_fetch_add(&job->failed, 1);
            if (e.code != -job->codec->fail)
                atomic_fetch_add(job->bad, 1);
        } else if (s->size != job->codec->times ||
                   source_read(s, 0, 1, &first, &e) < 0 ||
                   source_read(s, s->size - 1, 1, &last, &e) < 0 || first != text[0] ||
                   last != text[0]) {
            atomic_fetch_add(job->bad, 1);
        }
    }
    return NULL;
}

/* Runs THREADS of them; how many gets failed. */
static int decode_in_threads(struct decoded_cache *c, struct codec *codec,
                             unsigned pieces, unsigned rounds)
{
    struct piece_job jobs[THREADS];
    pthread_t threads[THREADS];
    atomic_int bad = 0;
    int failed = 0;

    for (unsigned i = 0; i < THREADS; i++) {
        jobs[i] = (struct piece_job){.c = c,
                                     .codec = codec,
                                     .seed = i,
                                     .pieces = pieces,
                                     .rounds = rounds,
                                     .bad = &bad};
        assert_int_equal(pthread_create(&threads[i], NULL, decode_and_check, &jobs[i]),
                         0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        failed += jobs[i].failed;
    }
    assert_int_equal(bad, 0);
    return failed;
}

static void test_threads_wait_for_one_decoding(void **state)
{
    struct decoded_cache *c = cache_of(*state, 1 << 20);
    struct codec codec = {.times = 1000, .delay_us = 100000};

    assert_int_equal(decode_in_threads(c, &codec, 1, 1), 0);
    assert_int_equal(codec.calls, 1);
    decoded_free(c);
}

static void test_threads_share_a_failure(void **state)
{
    struct decoded_cache *c = cache_of(*state, 1 << 20);
    struct codec codec = {.times = 1000,
                          .delay_us = 300000,
                          .fail = -EBADMSG,
                          .wait_for_askers = THREADS};

    assert_int_equal(decode_in_threads(c, &codec, 1, 1), THREADS);
    assert_int_equal(codec.calls, 1);
    decoded_free(c);
}

static void test_different_pieces_are_decoded_at_once(void **state)
{
    struct decoded_cache *c = cache_of(*state, 64 << 20);
    struct codec codec = {.times = 1000, .delay_us = 50000, .wait_for_others = true};

    assert_int_equal(decode_in_threads(c, &codec, 8, 1), 0);
    assert_true(codec.most_under_way > 1);
    decoded_free(c);
}

/*
 * Room for eight pieces that are read and for decoding one: threads wait for each other
 * and evict each other's leavings, and no get fails.
 */
static void test_threads_within_a_tight_budget(void **state)
{
    enum { PIECE = 100000 };
    unsigned before = tmp_open_fds();
    struct decoded_cache *c = cache_of(*state, (THREADS + 3) * PIECE);
    struct codec codec = {.times = PIECE};

    assert_int_equal(decode_in_threads(c, &codec, 20, 200), 0);
    assert_true(tmp_open_fds() - before <= THREADS + 3);
    decoded_free(c);
    assert_int_equal(tmp_open_fds(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        tmp_test(test_readers_share_one_open_file),
        tmp_test(test_what_nobody_uses_is_closed),
        tmp_test(test_a_replaced_file_is_two_files),
        tmp_test(test_a_rewritten_file_is_opened_anew),
        tmp_test(test_missing_and_strange_files),
        tmp_test(test_only_so_many_stay_open_unused),
        tmp_test(test_threads_open_files),
        tmp_test(test_a_change_before_the_opening_is_noticed),
        tmp_test(test_a_piece_is_decoded_once),
        tmp_test(test_every_part_of_the_key_counts),
        tmp_test(test_nothing_lies_in_the_directory),
        tmp_test(test_the_least_recent_makes_room),
        tmp_test(test_what_is_read_is_not_evicted),
        tmp_test(test_a_piece_beyond_the_budget),
        tmp_test(test_a_far_larger_piece_than_guessed),
        tmp_test(test_a_piece_of_known_size_is_decoded_once),
        tmp_test(test_a_failure_is_not_kept),
        tmp_test(test_a_decoder_that_lies_about_its_size),
        tmp_test(test_a_file_that_changes_while_it_is_decoded),
        tmp_test(test_threads_wait_for_one_decoding),
        tmp_test(test_threads_share_a_failure),
        tmp_test(test_different_pieces_are_decoded_at_once),
        tmp_test(test_threads_within_a_tight_budget),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
