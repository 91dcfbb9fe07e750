/* SPDX-License-Identifier: MIT */
/* tests/unit/test_remote_web.c - URLs, dates, listing pages, manifests, lists of objects. */
#include "unit.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "base/err.h"
#include "remote/http.h"
#include "remote/manifest.h"
#include "remote/objects_priv.h"
#include "remote/store.h"
#include "remote/web.h"
#include "remote_tmp.h"

/* ---- text ---- */

static void shows(const char *url, const char *shown)
{
    struct buf out = {0};

    assert_int_equal(http_url_shown(url, &out), 0);
    assert_string_equal(out.data, shown);
    buf_release(&out);
}

static void urls_are_shown_without_secrets(void **state)
{
    (void)state;
    shows("https://host/run", "https://host/run");
    shows("https://user:pa@ss@host:8080/run?sig=x#y", "https://host:8080/run");
    shows("https://host?sig=x", "https://host");
    shows("https://host/a@b", "https://host/a@b");
    shows("s3://bucket/key?versionId=1", "s3://bucket/key");
    shows("hf://gpt2@main", "hf://gpt2@main");
    shows("hf://user:token@gpt2@main", "hf://main");
    shows("no url", "no url");
}

static void names_of_stores_are_told_from_paths(void **state)
{
    char *shown = store_name_shown("/a?b@c");

    (void)state;
    assert_true(store_is_url("https://x"));
    assert_true(store_is_url("anything://x"));
    assert_false(store_is_url("/a/b://c"));
    assert_false(store_is_url("://x"));
    assert_false(store_is_url("a:b"));
    assert_string_equal(shown, "/a?b@c");
    free(shown);
}

static void encodes(const char *text, bool slash, const char *encoded)
{
    struct buf out = {0}, back = {0};

    assert_int_equal(http_encode(text, slash, &out), 0);
    assert_string_equal(out.data, encoded);
    assert_int_equal(http_decode(out.data, out.len, &back), 0);
    assert_string_equal(back.data, text);
    buf_release(&out);
    buf_release(&back);
}

static void names_are_encoded_and_decoded(void **state)
{
    struct buf out = {0};

    (void)state;
    encodes("a/b-c.d_e~f", true, "a/b-c.d_e~f");
    encodes("a/b", false, "a%2Fb");
    encodes("a b+c%d?e#f:g", true, "a%20b%2Bc%25d%3Fe%23f%3Ag");
    encodes("\xff\xc3\xa4", true, "%FF%C3%A4");
    assert_int_equal(http_decode("%c3%A4", 6, &out), 0);
    assert_string_equal(out.data, "\xc3\xa4");
    assert_int_equal(http_decode("%0", 2, &out), -EINVAL);
    assert_int_equal(http_decode("%zz", 3, &out), -EINVAL);
    assert_int_equal(http_decode("%00", 3, &out), -EINVAL);
    assert_int_equal(http_decode("a\0b", 3, &out), -EINVAL);
    buf_release(&out);
}

static void dates_are_read(void **state)
{
    (void)state;
    assert_int_equal(http_date("Sun, 06 Nov 1994 08:49:37 GMT"), 784111777);
    assert_int_equal(http_date("Sunday, 06-Nov-94 08:49:37 GMT"), 784111777);
    assert_int_equal(http_date("Sun Nov  6 08:49:37 1994"), 784111777);
    assert_int_equal(http_date("Saturday, 21-Nov-26 23:28:08 GMT"), 1795303688);
    assert_int_equal(http_date("2026-11-21T23:28:08.000Z"), 1795303688);
    assert_int_equal(http_date("1970-01-02T00:00:00Z"), 86400);
    assert_int_equal(http_date("1970-01-02T02:00:00+02:00"), 86400);
    assert_int_equal(http_date("1970-01-01T16:30:00.25-0730"), 86400);
    assert_int_equal(http_date("1970-01-02T02:00:00+02"), 86400);
    assert_int_equal(http_date("1970-01-02T00:00:00+25:00"), 0);
    assert_int_equal(http_date("1970-01-02T00:00:00+x"), 0);
    assert_int_equal(http_date("1970-01-02T00:00:00+02:x"), 0);
    assert_int_equal(http_date("Sun, 06 Nov"), 0);
    assert_int_equal(http_date("Sun, 06 Nox 1994 08:49:37 GMT"), 0);
    assert_int_equal(http_date("Sun, 06 ovD 1994 08:49:37 GMT"), 0);
    assert_int_equal(http_date("2026-13-21T23:28:08Z"), 0);
    assert_int_equal(http_date(""), 0);
}

static void options_come_from_the_environment(void **state)
{
    struct http_options o;
    struct err e = {0};

    (void)state;
    assert_ok(http_options_get(&o, &e), &e);
    assert_int_equal(o.deadline_s, 60);
    assert_int_equal(o.tries, 6);
    setenv("UNSHARD_HTTP_DEADLINE", "7", 1);
    assert_ok(http_options_get(&o, &e), &e);
    assert_int_equal(o.deadline_s, 7);
    setenv("UNSHARD_HTTP_DEADLINE", "7s", 1);
    assert_int_equal(http_options_get(&o, &e), -EINVAL);
    assert_has(e.text, "UNSHARD_HTTP_DEADLINE=7s");
    setenv("UNSHARD_HTTP_DEADLINE", "0", 1);
    assert_int_equal(http_options_get(&o, &e), -EINVAL);
    unsetenv("UNSHARD_HTTP_DEADLINE");
}

/* ---- pages ---- */

static int add_link(void *user, const char *name, bool is_dir)
{
    return buf_addf(user, "%s%s|", name, is_dir ? "/" : "");
}

static void page_gives(const char *html, const char *names)
{
    struct buf out = {0};
    char *exact = malloc(strlen(html) + 1); /* so that a read beyond its end is seen */

    memcpy(exact, html, strlen(html));
    exact = realloc(exact, strlen(html) ? strlen(html) : 1);
    assert_int_equal(page_links(exact, strlen(html), "/data/run/", add_link, &out), 0);
    assert_string_equal(out.data ? out.data : "", names);
    buf_release(&out);
    free(exact);
}

static void pages_of_known_servers_are_read(void **state)
{
    (void)state;
    page_gives("<a href=\"a.bin\">a.bin</a> <a href='sub/'>", "a.bin|sub/|");
    /* Apache: orders of the same page, the parent */
    page_gives("<A HREF=\"?C=N;O=D\">Name</A><a href=\"/data/\">Parent</a>"
               "<img src=\"/icons/x.gif\"><a href=\"x%20y.bin\">",
               "x y.bin|");
    /* absolute paths, as some servers write them */
    page_gives(
        "<a href=\"/data/run/k\"><a href=\"/data/other\"><a href=\"/data/run/\">",
        "k|");
    page_gives("<a href=./a:b><a href=a:b><a href=https://else/where>", "a:b|");
    page_gives("<a href = \"a&amp;b\"><a href=\"q?x=1\"><a href=\"f#top\">",
               "a&b|q|f|");
    page_gives("<a href=\"./a&#43;b\"><a href=\"a&#x2B;c\"><a href=\"&#228;&#x20ac;"
               "&#x1F600;\"><a href=\"x&apos;y\">",
               "a+b|a+c|\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80|x'y|");
    page_gives("<a href=\"a&#0;b\"><a href=\"d&#xd800;\"><a href=\"e&#1114112;\">"
               "<a href=\"&#\"><a href=\"c&#4\">",
               "a&|d&|e&|&|c&|");
    page_gives("<a href=\"../\"><a href=\"..\"><a href=\".\"><a href=\"\">", "");
    page_gives("<a href=\"a%2Fb\"><a href=\"%00\"><a href=\"%\"><a href=\"c/d\">", "");
    page_gives("", "");
    page_gives("=", "");
    page_gives("href=", "");
    page_gives("href=\"open", "");
    page_gives("href=x", "x|");
}

/* ---- manifests ---- */

static struct manifest *manifest_of(const char *text)
{
    struct manifest *m = NULL;
    struct err e = {0};

    assert_ok(manifest_parse(text, strlen(text), &m, &e), &e);
    return m;
}

static int add_entry(void *user, const char *name, bool is_dir, uint64_t size)
{
    return is_dir ? buf_addf(user, "%s/|", name)
                  : buf_addf(user, "%s=%" PRIu64 "|", name, size);
}

static void lists(const struct manifest *m, const char *path, const char *entries)
{
    struct buf out = {0};

    assert_int_equal(manifest_list(m, path, add_entry, &out), 0);
    assert_string_equal(out.data ? out.data : "", entries);
    buf_release(&out);
}

static void manifests_are_directories(void **state)
{
    struct manifest *m = manifest_of(
        "{\"unshard_manifest\": 1, \"files\": {\"run/b\": 2, \"run/a%20c\": 1, \"run-2/x\": 3,"
        "\"run/sub/deep/y\": 4, \"run/sub.z\": 5, \"top\": 6, \"run/sub/w\": 7}}");

    (void)state;
    lists(m, "", "run/|run-2/|top=6|");
    lists(m, "run", "a c=1|b=2|sub/|sub.z=5|");
    lists(m, "run/sub", "deep/|w=7|");
    lists(m, "run-2", "x=3|");
    assert_int_equal(manifest_list(m, "ru", add_entry, NULL), -ENOENT);
    assert_int_equal(manifest_list(m, "run/b", add_entry, NULL), -ENOENT);
    assert_int_equal(manifest_list(m, "zz", add_entry, NULL), -ENOENT);
    manifest_put(m);
    m = manifest_of("{\"files\": {}}");
    lists(m, "", "");
    manifest_put(m);
}

static void refused(const char *text, const char *word)
{
    struct manifest *m = NULL;
    struct err e = {0};

    assert_int_equal(manifest_parse(text, strlen(text), &m, &e), -EBADMSG);
    assert_has(e.text, word);
}

static void manifests_that_climb_or_lie_are_refused(void **state)
{
    char name[NAME_MAX + 2] = {0}, text[2 * NAME_MAX];

    (void)state;
    memset(name, 'n', sizeof name - 1);
    snprintf(text, sizeof text, "{\"files\": {\"a/%s/b\": 1}}", name);
    refused(text, "no path below");
    refused("{\"files\": {\"../x\": 1}}", "no path below");
    refused("{\"files\": {\"a/%2e%2e/x\": 1}}", "no path below");
    refused("{\"files\": {\"/etc/passwd\": 1}}", "no path below");
    refused("{\"files\": {\"a%00b\": 1}}", "no path below");
    refused("{\"files\": {\"a//b\": 1}}", "no path below");
    refused("{\"files\": {\"\": 1}}", "no path below");
    refused("{\"files\": {\"a\": -1}}", "no size");
    refused("{\"files\": {\"a\": \"1\"}}", "no size");
    refused("{\"files\": [1]}", "no object");
    refused("{}", "");
    refused("[]", "");
}

static void a_manifest_is_made_and_read_back(void **state)
{
    struct tmp *t = *state;
    struct store *s = NULL;
    struct buf text = {0};
    struct manifest *m;
    struct err e = {0};
    uint64_t files, others;

    tmp_bytes(t, "a b%", "12345", 5);
    tmp_dir(t, "sub");
    tmp_bytes(t, "sub/\xff", "1", 1);
    tmp_bytes(t, MANIFEST_NAME, "old", 3);
    assert_int_equal(mkfifo(tmp_at(t, "fifo"), 0600), 0);
    assert_ok(store_open_local(t->path, NULL, &s, &e), &e);
    assert_ok(manifest_make(s, &text, &files, &others, &e), &e);
    assert_int_equal(files, 2);
    assert_int_equal(others, 1);
    m = manifest_of(text.data);
    lists(m, "", "a b%=5|sub/|");
    lists(m, "sub", "\xff=1|");
    manifest_put(m);
    buf_release(&text);
    store_close(s);
}

/* ---- lists of objects ---- */

static struct object_list *list_of(const struct object_entry *entry, size_t n)
{
    struct object_list *l = NULL;
    struct err e = {0};

    assert_ok(object_list_new("run", 7, &l, &e), &e);
    for (size_t i = 0; i < n; i++)
        assert_ok(object_list_add(l, &entry[i], &e), &e);
    object_list_finish(l);
    return l;
}

static void a_prefix_goes_before_an_object_of_its_name(void **state)
{
    const struct object_entry entries[] = {
        {.name = "b", .size = 1},      {.name = "a", .size = 2},
        {.name = "a", .is_dir = true}, {.name = "..", .size = 3},
        {.name = "x/y", .size = 4},    {.name = "", .size = 5},
    };
    struct object_list *l = list_of(entries, ARRAY_SIZE(entries));

    (void)state;
    assert_int_equal(l->count, 2);
    assert_int_equal(l->left_out, 4);
    assert_int_equal(object_list_find(l, "a")->st.kind, ENTRY_DIR);
    assert_int_equal(object_list_find(l, "b")->st.id.size, 1);
    assert_null(object_list_find(l, ".."));
    object_list_put(l);
}

static struct file_id id_of(const char *etag, const char *version, uint64_t size)
{
    const struct object_entry entry = {
        .name = "o", .size = size, .modified = 99, .etag = etag, .version = version};
    struct object_list *l = list_of(&entry, 1);
    struct file_id id = l->object[0].st.id;

    object_list_put(l);
    return id;
}

static void objects_are_known_by_their_tags(void **state)
{
    struct file_id a = id_of("\"1\"", NULL, 5), same = id_of("\"1\"", NULL, 5);
    struct file_id tag = id_of("\"2\"", NULL, 5), size = id_of("\"1\"", NULL, 6);
    struct file_id version = id_of("\"1\"", "v", 5);

    (void)state;
    assert_true(file_id_equal(&a, &same));
    assert_false(file_id_equal(&a, &tag));
    assert_false(file_id_equal(&a, &size));
    assert_false(file_id_equal(&a, &version));
    assert_int_equal(a.mtime_ns, 99000000000);
    assert_true(a.ctime_ns > 0 &&
                a.ctime_ns < 1ll << 60); /* long ago: no race with now */
}

static void directories_are_known_by_the_names_in_them(void **state)
{
    const struct object_entry one = {.name = "a", .size = 1},
                              other = {.name = "b", .size = 1},
                              bigger = {.name = "a", .size = 2};
    struct object_list *l[] = {list_of(&one, 1), list_of(&other, 1),
                               list_of(&bigger, 1)};
    struct entry_stat st[3];

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        object_dir_stat(l[i], &st[i]);
        object_list_put(l[i]);
    }
    assert_int_equal(st[0].kind, ENTRY_DIR);
    assert_false(file_id_equal(&st[0].id, &st[1].id));
    assert_true(file_id_equal(&st[0].id, &st[2].id));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(urls_are_shown_without_secrets),
        cmocka_unit_test(names_of_stores_are_told_from_paths),
        cmocka_unit_test(names_are_encoded_and_decoded),
        cmocka_unit_test(dates_are_read),
        cmocka_unit_test(options_come_from_the_environment),
        cmocka_unit_test(pages_of_known_servers_are_read),
        cmocka_unit_test(manifests_are_directories),
        cmocka_unit_test(manifests_that_climb_or_lie_are_refused),
        cmocka_unit_test_setup_teardown(a_manifest_is_made_and_read_back, tmp_setup,
                                        tmp_teardown),
        cmocka_unit_test(a_prefix_goes_before_an_object_of_its_name),
        cmocka_unit_test(objects_are_known_by_their_tags),
        cmocka_unit_test(directories_are_known_by_the_names_in_them),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
