/* SPDX-License-Identifier: MIT */
/* tests/unit/test_block_cache.c - the block cache over a source that counts what it is asked. */
#include "remote_tmp.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "base/err.h"
#include "base/interrupt.h"
#include "remote/block_cache.h"
#include "remote/source.h"

enum { KIB = 1 << 10, MIB = 1 << 20, THREADS = 8, PATIENCE_MS = 60000 };

/* ---- a server that is none ---- */

struct server {
    uint64_t content; /* which bytes it has */
    unsigned delay_ms;
    unsigned together;                /* it answers none before so many came at once */
    atomic_uint requests, busy, most; /* ranges asked for; at once */
    atomic_uint_least64_t bytes, largest;
    atomic_int fail; /* so many requests fail, from now on */
    atomic_bool hang;
};

struct served {
    struct source base;
    struct server *server;
};

static unsigned char byte_at(uint64_t content, uint64_t off)
{
    uint64_t x = (content + 1) * 0x9e3779b97f4a7c15 + off / 8;

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return (unsigned char)(x >> off % 8 * 8);
}

static void note_most(struct server *v, unsigned busy)
{
    unsigned most = atomic_load(&v->most);

    while (busy > most && !atomic_compare_exchange_weak(&v->most, &most, busy))
        ;
}

static void pause_ms(unsigned ms)
{
    const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};

    nanosleep(&t, NULL);
}

static int served_read_many(struct source *s, const struct source_range *r, size_t n,
                            struct err *e)
{
    struct server *v = container_of(s, struct served, base)->server;
    unsigned asked = (unsigned)n;

    atomic_fetch_add(&v->requests, asked);
    note_most(v, atomic_fetch_add(&v->busy, asked) + asked);
    pause_ms(v->delay_ms);
    for (int ms = 0; ms < PATIENCE_MS && atomic_load(&v->most) < v->together; ms++)
        pause_ms(1);
    while (atomic_load(&v->hang))
        pause_ms(1);
    atomic_fetch_sub(&v->busy, asked);
    if (atomic_load(&v->fail) > 0) {
        atomic_fetch_sub(&v->fail, 1);
        return err_set(e, EREMOTEIO, "%s: no answer", s->name);
    }
    for (size_t i = 0; i < n; i++) {
        atomic_fetch_add(&v->bytes, r[i].len);
        if (r[i].len > atomic_load(&v->largest))
            atomic_store(&v->largest, r[i].len);
        for (size_t k = 0; k < r[i].len; k++)
            ((unsigned char *)r[i].dst)[k] = byte_at(v->content, r[i].off + k);
    }
    return 0;
}

static int served_read(struct source *s, uint64_t off, size_t len, void *dst,
                       struct err *e)
{
    return served_read_many(
        s, &(struct source_range){.off = off, .len = len, .dst = dst}, 1, e);
}

static void served_close(struct source *s)
{
    free(container_of(s, struct served, base));
}

static const struct source_ops served_ops = {
    .name = "served",
    .read = served_read,
    .read_many = served_read_many,
    .close = served_close,
};

static struct source *over(struct block_cache *c, struct server *v, uint64_t size,
                           const char *version)
{
    struct served *s = calloc(1, sizeof *s);
    struct object_id id = {
        .store = "test:store", .path = "a/b", .version = version, .size = size};
    struct source *out = NULL;
    struct err e = {0};

    assert_non_null(s);
    assert_ok(source_init(&s->base, &served_ops, "a/b", size, &e), &e);
    s->server = v;
    assert_ok(block_cache_over(c, &s->base, &id, &out, &e), &e);
    assert_int_equal(out->size, size);
    return out;
}

static struct block_cache *cache_of(const struct tmp *t, uint64_t limit, size_t memory)
{
    const struct block_cache_options o = {
        .dir = t ? t->path : NULL, .limit = limit, .memory = memory};
    struct block_cache *c = NULL;
    struct err e = {0};

    assert_ok(block_cache_new(&o, &c, &e), &e);
    return c;
}

static void check(const struct server *v, uint64_t off, size_t len,
                  const unsigned char *got)
{
    for (size_t i = 0; i < len; i++)
        if (got[i] != byte_at(v->content, off + i))
            fail_msg("byte %" PRIu64 " is %02x, not %02x", off + i, got[i],
                     byte_at(v->content, off + i));
}

static void read_at(struct source *s, const struct server *v, uint64_t off, size_t len)
{
    unsigned char *dst = malloc(len + 1);
    struct err e = {0};

    assert_non_null(dst);
    dst[len] = 0x5a;
    assert_ok(source_read(s, off, len, dst, &e), &e);
    check(v, off, len, dst);
    assert_int_equal(dst[len], 0x5a);
    free(dst);
}

static void end(struct block_cache *c)
{
    block_cache_stop(c);
    block_cache_free(c);
}

/* ---- what is fetched ---- */

static void test_a_small_read_costs_a_small_range(void **state)
{
    struct server v = {0};
    struct block_cache *c = cache_of(NULL, 0, 0);
    struct source *s = over(c, &v, 100 * MIB, "v1");

    (void)state;
    for (unsigned i = 1; i <= 20; i++) {
        read_at(s, &v, i * 4 * MIB + 3, 4 * KIB);
        assert_int_equal(atomic_load(&v.requests), i);
    }
    assert_int_equal(atomic_load(&v.bytes), 20 * 8 * KIB);
    assert_int_equal(atomic_load(&v.largest), 8 * KIB);
    for (unsigned i = 1; i <= 20; i++)
        read_at(s, &v, i * 4 * MIB + 5, 100);
    assert_int_equal(atomic_load(&v.requests), 20); /* from memory */
    source_put(s);
    end(c);
}

static void test_a_range_moves_no_more_than_its_ends(void **state)
{
    struct server v = {0};
    struct block_cache *c = cache_of(NULL, 0, 0);
    struct source *s = over(c, &v, 100 * MIB, "v1");
    const uint64_t off = 7 * MIB + 1000, len = 23 * MIB + 77;

    (void)state;
    for (uint64_t at = 0; at < len; at += MIB) {
        source_will_need(s, off + at, MIN(len - at, (uint64_t)16 * MIB));
        read_at(s, &v, off + at, (size_t)MIN(len - at, (uint64_t)MIB));
    }
    assert_in_range(atomic_load(&v.bytes), len, len + 8 * KIB);
    assert_in_range(atomic_load(&v.requests), 6, 30);
    source_put(s);
    end(c);
}

static void test_headers_take_few_requests(void **state)
{
    struct server v = {0};
    struct block_cache *c = cache_of(NULL, 0, 0);
    struct source *s = over(c, &v, 100 * MIB, "v1");

    (void)state;
    read_at(s, &v, 0, 8); /* as safetensors is read */
    read_at(s, &v, 8, 50 * KIB);
    assert_int_equal(atomic_load(&v.requests), 1);
    read_at(s, &v, 100 * MIB - 22, 22); /* as a zip is read */
    read_at(s, &v, 100 * MIB - 40 * KIB, 30 * KIB);
    read_at(s, &v, 100 * MIB - 100, 100);
    assert_int_equal(atomic_load(&v.requests), 2);
    for (unsigned at = 0; at < 4 * MIB; at += 16 * KIB) /* as a parser reads */
        read_at(s, &v, 10 * MIB + at, 16 * KIB);
    assert_in_range(atomic_load(&v.requests), 3, 2 + 14);
    source_put(s);
    end(c);
}

static void test_an_object_shorter_than_a_sector(void **state)
{
    static const uint64_t sizes[] = {1, 4095, 4096, 4097, 65536, 65537, 200001};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        struct server v = {.content = i};
        struct block_cache *c = cache_of(NULL, 0, 0);
        struct source *s = over(c, &v, sizes[i], "v1");
        struct err e = {0};
        char byte;

        read_at(s, &v, 0, (size_t)sizes[i]);
        read_at(s, &v, sizes[i] - 1, 1);
        read_at(s, &v, sizes[i], 0);
        assert_int_equal(source_read(s, sizes[i], 1, &byte, &e), -EBADMSG);
        source_will_need(s, 0, UINT64_MAX);
        assert_int_equal(atomic_load(&v.bytes), sizes[i]);
        source_put(s);
        end(c);
    }
}

/* ---- several readers ---- */

struct reader {
    struct source *s;
    struct server *v;
    uint64_t off;
    size_t len;
};

static void *read_thread(void *user)
{
    const struct reader *r = user;

    read_at(r->s, r->v, r->off, r->len);
    return NULL;
}

static void test_readers_of_the_same_bytes_make_one_request(void **state)
{
    struct server v = {.delay_ms = 100};
    struct block_cache *c = cache_of(NULL, 0, 0);
    struct source *s[2] = {over(c, &v, 64 * MIB, "v1"), over(c, &v, 64 * MIB, "v1")};
    struct reader r[THREADS];
    pthread_t t[THREADS];

    (void)state;
    for (unsigned i = 0; i < THREADS; i++) {
        r[i] = (struct reader){
            .s = s[i % 2], .v = &v, .off = 8 * MIB + i * 1000, .len = 128 * KIB};
        assert_int_equal(pthread_create(&t[i], NULL, read_thread, &r[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    /* Who comes first takes its range, the others what is not in it. */
    assert_in_range(atomic_load(&v.requests), 1, 5);
    assert_in_range(atomic_load(&v.bytes), 128 * KIB, 128 * KIB + 16 * KIB);
    source_put(s[0]);
    source_put(s[1]);
    end(c);
}

static void test_what_is_fetched_ahead_is_not_fetched_again(void **state)
{
    struct server v = {.together = 4}; /* side by side */
    struct block_cache *c = cache_of(NULL, 0, 0);
    struct source *s = over(c, &v, 100 * MIB, "v1");

    (void)state;
    assert_false(source_resident(s, 10 * MIB, 1));
    source_will_need(s, 10 * MIB, 16 * MIB);
    assert_true(source_resident(s, 10 * MIB, 16 * MIB));
    assert_false(source_resident(s, 10 * MIB, 16 * MIB + 1));
    source_will_need(s, 9 * MIB, 17 * MIB);
    read_at(s, &v, 9 * MIB, 17 * MIB);
    assert_int_equal(atomic_load(&v.bytes), 17 * MIB);
    assert_in_range(atomic_load(&v.most), 4, 16);
    source_put(s);
    end(c);
}

static void test_many_ranges_are_fetched_side_by_side(void **state)
{
    struct server v = {.together = 5};
    struct block_cache *c = cache_of(NULL, 0, 0);
    struct source *s = over(c, &v, 100 * MIB, "v1");
    struct source_range r[10];
    struct err e = {0};

    (void)state;
    for (unsigned i = 0; i < 10; i++)
        r[i] = (struct source_range){
            .off = i * 5 * MIB + 123, .len = 100 * KIB, .dst = malloc(100 * KIB)};
    assert_ok(source_read_many(s, r, 10, &e), &e);
    assert_int_equal(atomic_load(&v.requests), 10);
    assert_in_range(atomic_load(&v.most), 5, 10);
    for (unsigned i = 0; i < 10; i++) {
        check(&v, r[i].off, r[i].len, r[i].dst);
        free(r[i].dst);
    }
    source_put(s);
    end(c);
}

static void test_a_failure_is_told_and_not_kept(void **state)
{
    struct server v = {.fail = 1};
    struct block_cache *c = cache_of(*state, BLOCK_DISK_MIN, 0);
    struct source *s = over(c, &v, 100 * MIB, "v1");
    struct err e = {0};
    char dst[100];

    assert_int_equal(source_read(s, 5 * MIB, 100, dst, &e), -EREMOTEIO);
    assert_has(e.text, "no answer");
    read_at(s, &v, 5 * MIB, 100);
    /* Ahead of its reader: the reader's own try counts. */
    v.delay_ms = 30;
    atomic_store(&v.fail, 1);
    source_will_need(s, 20 * MIB, 512 * KIB);
    read_at(s, &v, 20 * MIB, 512 * KIB);
    assert_int_equal(atomic_load(&v.fail), 0);
    source_put(s);
    end(c);
}

static bool asked_now(struct interrupt *i)
{
    (void)i;
    return true;
}

static void *hung_thread(void *user)
{
    return read_thread(user);
}

static void test_a_wait_for_others_can_be_interrupted(void **state)
{
    struct server v = {0};
    struct block_cache *c = cache_of(NULL, 0, 0);
    struct source *s = over(c, &v, 100 * MIB, "v1");
    struct reader r = {.s = s, .v = &v, .off = 9 * MIB, .len = 1000};
    struct interrupt i = {.asked = asked_now};
    struct err e = {0};
    pthread_t t;
    char dst[10];

    (void)state;
    atomic_store(&v.hang, true);
    assert_int_equal(pthread_create(&t, NULL, hung_thread, &r), 0);
    while (atomic_load(&v.busy) == 0)
        pause_ms(1);
    interrupt_set(&i);
    assert_int_equal(source_read(s, 9 * MIB + 10, 10, dst, &e), -EINTR);
    interrupt_set(NULL);
    atomic_store(&v.hang, false);
    pthread_join(t, NULL);
    read_at(s, &v, 9 * MIB, 4 * KIB);
    assert_int_equal(atomic_load(&v.requests), 1);
    source_put(s);
    end(c);
}

static void test_memory_stays_within_its_bound(void **state)
{
    struct server v = {0};
    struct block_cache *c = cache_of(NULL, 0, 8 * MIB);
    struct source *s = over(c, &v, 100 * MIB, "v1");

    (void)state;
    for (uint64_t at = 0; at < 60 * MIB; at += MIB) {
        source_will_need(s, at, 32 * MIB); /* more than there is room for */
        read_at(s, &v, at, MIB);
        assert_in_range(block_cache_counts(c).memory, 0, 8 * MIB);
    }
    for (uint64_t at = 0; at < 60 * MIB; at += 10 * KIB) {
        read_at(s, &v, at, 100);
        assert_in_range(block_cache_counts(c).memory, 0, 8 * MIB);
    }
    source_put(s);
    end(c);
}

static void test_what_had_no_room_is_fetched_when_there_is(void **state)
{
    struct server v = {0};
    struct block_cache *c = cache_of(NULL, 0, 12 * MIB);
    struct source *s = over(c, &v, 100 * MIB, "v1");

    (void)state;
    source_will_need(s, 0, 48 * MIB); /* asked for once; three parts fit */
    assert_false(source_resident(s, 12 * MIB, 1));
    for (uint64_t at = 0; at < 48 * MIB; at += 128 * KIB)
        read_at(s, &v, at, 128 * KIB);
    assert_int_equal(atomic_load(&v.bytes), 48 * MIB);
    assert_in_range(atomic_load(&v.requests), 12, 30); /* of 384 reads */
    source_put(s);
    end(c);
}

/* ---- the disk ---- */

static void test_the_next_process_reads_from_disk(void **state)
{
    /* Less than may wait to be written: all of it is kept. */
    struct server v = {0};
    struct block_cache *c = cache_of(*state, 64 * MIB, 0);
    struct source *s = over(c, &v, 12 * MIB + 77, "v1");

    read_at(s, &v, 0, 12 * MIB + 77);
    source_put(s);
    end(c);
    assert_int_equal(atomic_load(&v.bytes), 12 * MIB + 77);
    c = cache_of(*state, BLOCK_DISK_AS_IS, 0);
    s = over(c, &v, 12 * MIB + 77, "v1");
    for (uint64_t at = 0; at < 12 * MIB; at += MIB / 2)
        read_at(s, &v, at + 13, MIB / 2 + 60);
    assert_int_equal(atomic_load(&v.bytes), 12 * MIB + 77);
    assert_int_equal(block_cache_counts(c).from_disk, 12 * MIB + 77);
    assert_int_equal(block_cache_counts(c).fetched, 0);
    source_put(s);
    /* Another version is another object. */
    v.content = 9;
    s = over(c, &v, 12 * MIB + 77, "v2");
    read_at(s, &v, 3 * MIB, 1000);
    source_put(s);
    /* What has no version and no date is not known again. */
    s = over(c, &v, 12 * MIB + 77, "");
    read_at(s, &v, 3 * MIB, 1000);
    source_put(s);
    v.content = 10;
    s = over(c, &v, 12 * MIB + 77, "");
    read_at(s, &v, 3 * MIB, 1000);
    source_put(s);
    end(c);
}

static void test_a_damaged_block_is_fetched_again(void **state)
{
    struct server v = {0};
    struct block_cache *c = cache_of(*state, 64 * MIB, 0);
    struct source *s = over(c, &v, 2 * MIB, "v1");
    const char *path = tmp_at(*state, "blocks/data");
    uint64_t before;
    struct stat st;
    int fd;

    read_at(s, &v, 0, 2 * MIB);
    source_put(s);
    end(c);
    before = atomic_load(&v.bytes);
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    for (off_t at = 100; at < st.st_size; at += 3 * BLOCK_SECTOR)
        assert_int_equal(pwrite(fd, "damage", 6, at), 6);
    close(fd);
    for (int again = 0; again < 2; again++) {
        c = cache_of(*state, BLOCK_DISK_AS_IS, 0);
        s = over(c, &v, 2 * MIB, "v1");
        read_at(s, &v, 0, 2 * MIB);
        if (again)
            assert_int_equal(block_cache_counts(c).damaged, 0); /* mended */
        else
            assert_in_range(block_cache_counts(c).damaged, 2 * MIB / BLOCK_SECTOR / 3,
                            2 * MIB / BLOCK_SECTOR / 3 + 33);
        source_put(s);
        end(c);
    }
    assert_in_range(atomic_load(&v.bytes) - before, 2 * MIB / 3,
                    2 * MIB / 3 + 33 * 4096);
}

static void test_without_a_directory_to_write_in(void **state)
{
    const struct block_cache_options o = {.dir = "/proc/nothing"};
    struct block_cache *c = NULL;
    struct server v = {0};
    struct err e = {0};
    struct source *s;

    (void)state;
    assert_ok(block_cache_new(&o, &c, &e), &e);
    s = over(c, &v, MIB, "v1");
    read_at(s, &v, 0, MIB);
    source_put(s);
    end(c);
}

/* ---- all of it at once ---- */

struct torture {
    struct block_cache *c;
    struct server v[3];
    unsigned seed;
};

static void *torture_thread(void *user)
{
    static atomic_uint serial;
    struct torture *t = user;
    unsigned x = atomic_fetch_add(&serial, 1) * 7919 + 1;

    for (int i = 0; i < 150; i++) {
        unsigned which = (x = x * 1103515245 + 12345) >> 8 & 1;
        struct source *s = over(t->c, &t->v[which], 3 * MIB + 5, which ? "a" : "b");

        for (int k = 0; k < 4; k++) {
            uint64_t off = (x = x * 1103515245 + 12345) % (3 * MIB);
            size_t len = (x = x * 1103515245 + 12345) >> 4 & 0xfff;

            len = k == 3 ? len * 40 : len;
            len = (size_t)MIN(len, 3 * MIB + 5 - off);
            if (x & 1)
                source_will_need(s, off, len * 8);
            read_at(s, &t->v[which], off, len);
        }
        source_put(s);
    }
    return NULL;
}

static void test_all_at_once(void **state)
{
    struct torture t = {.c = cache_of(*state, BLOCK_DISK_MIN, 2 * MIB),
                        .v = {{.content = 1}, {.content = 2}}};
    pthread_t thread[THREADS];

    for (unsigned i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, torture_thread, &t), 0);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    assert_in_range(block_cache_counts(t.c).memory, 0, 2 * MIB);
    assert_true(block_cache_counts(t.c).from_disk > 0);
    end(t.c);
}

static void test_it_ends_while_it_fetches_ahead(void **state)
{
    struct server v = {.delay_ms = 20};
    struct block_cache *c = cache_of(*state, BLOCK_DISK_MIN, 0);
    struct source *s = over(c, &v, 1000 * MIB, "v1");

    for (unsigned i = 0; i < 40; i++)
        source_will_need(s, i * 20 * MIB, MIB);
    source_put(s); /* what is ahead holds it */
    block_cache_stop(c);
    assert_in_range(atomic_load(&v.requests), 0, 40 * 2);
    block_cache_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_small_read_costs_a_small_range),
        cmocka_unit_test(test_a_range_moves_no_more_than_its_ends),
        cmocka_unit_test(test_headers_take_few_requests),
        cmocka_unit_test(test_an_object_shorter_than_a_sector),
        cmocka_unit_test(test_readers_of_the_same_bytes_make_one_request),
        cmocka_unit_test(test_what_is_fetched_ahead_is_not_fetched_again),
        cmocka_unit_test(test_many_ranges_are_fetched_side_by_side),
        tmp_test(test_a_failure_is_told_and_not_kept),
        cmocka_unit_test(test_a_wait_for_others_can_be_interrupted),
        cmocka_unit_test(test_memory_stays_within_its_bound),
        cmocka_unit_test(test_what_had_no_room_is_fetched_when_there_is),
        tmp_test(test_the_next_process_reads_from_disk),
        tmp_test(test_a_damaged_block_is_fetched_again),
        cmocka_unit_test(test_without_a_directory_to_write_in),
        tmp_test(test_all_at_once),
        tmp_test(test_it_ends_while_it_fetches_ahead),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
