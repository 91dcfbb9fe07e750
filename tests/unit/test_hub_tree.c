/* SPDX-License-Identifier: MIT */
/* tests/unit/test_hub_tree.c - names of repositories, pages of their trees. */
#include "unit.h"

#include <errno.h>

#include "base/base.h"
#include "base/err.h"
#include "remote/hub_tree.h"

static void test_names(void **state)
{
    static const struct {
        const char *url, *kind, *repo, *revision, *path;
    } good[] = {
        {"hf://org/repo", "models", "org/repo", "main", ""},
        {"hf://org/repo/", "models", "org/repo", "main", ""},
        {"hf://org/repo@v1.0", "models", "org/repo", "v1.0", ""},
        {"hf://org/repo@v1.0/a/b.bin/", "models", "org/repo", "v1.0", "a/b.bin"},
        {"hf://org/repo/a@b/c", "models", "org/repo", "main", "a@b/c"},
        {"hf://models/org/repo/x", "models", "org/repo", "main", "x"},
        {"hf://datasets/org/repo@x/d", "datasets", "org/repo", "x", "d"},
        {"hf://spaces/org/repo", "spaces", "org/repo", "main", ""},
        {"hf://gpt2", "models", "gpt2", "main", ""},
        {"hf://gpt2@abc/f", "models", "gpt2", "abc", "f"},
        {"hf://org/repo@refs/pr/12/d/e", "models", "org/repo", "refs/pr/12", "d/e"},
        {"hf://org/repo@refs/convert/parquet", "models", "org/repo",
         "refs/convert/parquet", ""},
        {"hf://org/repo@feature%2Fx/d", "models", "org/repo", "feature/x", "d"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(good); i++) {
        CLEANUP(hub_name_release) struct hub_name n = {0};
        struct err e = {0};

        assert_ok(hub_name_parse(good[i].url, &n, &e), &e);
        if (strcmp(n.kind, good[i].kind) || strcmp(n.repo, good[i].repo) ||
            strcmp(n.revision, good[i].revision) || strcmp(n.path, good[i].path))
            fail_msg("%s: %s, %s, %s, %s", good[i].url, n.kind, n.repo, n.revision,
                     n.path);
    }
}

static void test_bad_names(void **state)
{
    static const char *const bad[] = {
        "hf://",
        "hf:///",
        "hf://org/repo@",
        "hf://org/repo@/x",
        "hf://org/../x",
        "hf://.x/repo",
        "hf://org/re po",
        "hf://o?x/repo",
        "hf://org/repo/../x",
        "hf://org/r/a//b",
        "hf://org/r@%zz",
        "hf://org/r@%00",
        "org/repo",
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        CLEANUP(hub_name_release) struct hub_name n = {0};
        struct err e = {0};
        int rc = hub_name_parse(bad[i], &n, &e);

        if (rc != -EINVAL)
            fail_msg("%s: %d, %s in %s", bad[i], rc, n.path, n.repo);
        assert_has(e.hint, "hf://ORG/NAME");
    }
}

struct seen {
    struct buf text;
};

static int note(void *user, const struct hub_entry *entry, struct err *e)
{
    struct seen *s = user;

    (void)e;
    buf_addf(&s->text, "%s%s %ju %s\n", entry->name, entry->is_dir ? "/" : "",
             (uintmax_t)entry->size, entry->oid ? entry->oid : "-");
    return 0;
}

static void test_tree(void **state)
{
    static const char page[] =
        "[{\"type\":\"directory\",\"oid\":\"t1\",\"size\":0,\"path\":\"d/sub\"},"
        "{\"type\":\"file\",\"oid\":\"b1\",\"size\":554,\"path\":\"d/config.json\"},"
        "{\"type\":\"file\",\"oid\":\"b2\",\"size\":5000000000,\"path\":\"d/m.bin\","
        "\"lfs\":{\"oid\":\"sha\",\"size\":5000000000,\"pointerSize\":135},"
        "\"xetHash\":\"x\"},"
        "{\"type\":\"file\",\"size\":0,\"path\":\"d/\\u00e9 e\",\"lfs\":null}]";
    CLEANUP(buf_release) struct buf all = {0};
    struct seen s = {0};
    struct err e = {0};

    (void)state;
    assert_ok(hub_tree_read(page, strlen(page), "d", note, &s, &e), &e);
    assert_string_equal(s.text.data, "sub/ 0 t1\nconfig.json 554 b1\n"
                                     "m.bin 5000000000 sha\n\xc3\xa9 e 0 -\n");
    buf_clear(&s.text);
    assert_ok(hub_tree_read("[]", 2, "", note, &s, &e), &e);
    assert_int_equal(s.text.len, 0);
    buf_release(&s.text);
}

static void test_bad_trees(void **state)
{
    static const char *const bad[] = {
        "{}",
        "",
        "[1]",
        "[{\"type\":\"file\",\"size\":1}]",
        "[{\"type\":\"file\",\"size\":1,\"path\":\"other/a\"}]",
        "[{\"type\":\"file\",\"size\":1,\"path\":\"da\"}]",
        "[{\"type\":\"file\",\"size\":1,\"path\":\"d/\"}]",
        "[{\"type\":\"file\",\"size\":1,\"path\":\"d/..\"}]",
        "[{\"type\":\"file\",\"size\":1,\"path\":\"d/a/b\"}]",
        "[{\"type\":\"file\",\"size\":-1,\"path\":\"d/a\"}]",
        "[{\"type\":\"file\",\"path\":\"d/a\"}]",
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        struct seen s = {0};
        struct err e = {0};
        int rc = hub_tree_read(bad[i], strlen(bad[i]), "d", note, &s, &e);

        if (rc != -EBADMSG)
            fail_msg("%s: %d %s", bad[i], rc, s.text.data);
        buf_release(&s.text);
    }
}

static void test_links(void **state)
{
    static const struct {
        const char *link;
        int rc;
        const char *url;
    } links[] = {
        {NULL, 0, NULL},
        {"", 0, NULL},
        {"<http://h/a?cursor=x%3D>; rel=\"next\"", 1, "http://h/a?cursor=x%3D"},
        {"<http://h/p>;rel=\"prev\" , <http://h/n> ; a=\"b;,c\"; rel=next", 1,
         "http://h/n"},
        {"<http://h/p>; rel=\"prev\"", 0, NULL},
        {"<http://h/p>; rel=nextish", 0, NULL},
        {"http://h/p; rel=next", -EBADMSG, NULL},
        {"<http://h/p; rel=next", -EBADMSG, NULL},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(links); i++) {
        CLEANUP(buf_release) struct buf url = {0};
        struct err e = {0};
        int rc = hub_next_page(links[i].link, &url, &e);

        if (rc != links[i].rc || (rc == 1 && strcmp(url.data, links[i].url)))
            fail_msg("%s: %d %s", links[i].link, rc, url.data);
    }
    assert_true(hub_is_commit("0123456789abcdef0123456789abcdef01234567"));
    assert_false(hub_is_commit("0123456789abcdef0123456789abcdef0123456"));
    assert_false(hub_is_commit("../../../../../../../../../../../../../x"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names), cmocka_unit_test(test_bad_names),
        cmocka_unit_test(test_tree),  cmocka_unit_test(test_bad_trees),
        cmocka_unit_test(test_links),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
