/* SPDX-License-Identifier: MIT */
/* tests/formats/edited.c - files of fixtures with bytes of their pickle changed. */
#include "edited.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/endian.h"
#include "base/json.h"
#include "tests/unit/unit.h"
#include "tests/unit/zip_build.h"

const char EDITED_WARNS[] = "a warning", EDITED_SOUND[] = "nothing";

/* The n-th place of `was`. */
static const char *find(const char *data, size_t len, const struct edit *x)
{
    const char *end = data + len, *found = NULL, *at = data;
    int count = 0;

    for (; (at = memmem(at, (size_t)(end - at), x->was, x->was_len)); at++) {
        found = at;
        if (count++ == x->n)
            return at;
    }
    if (!found || x->n != EDIT_LAST)
        fail_msg("\"%s\" is there %d times", x->was, count);
    return found;
}

static void edit(const char *data, size_t len, const struct edit *x, struct buf *out)
{
    const char *at = find(data, len, x);

    buf_add(out, data, (size_t)(at - data));
    buf_add(out, x->is, x->is_len);
    at += x->was_len;
    buf_add(out, at, (size_t)(data + len - at));
    assert_int_equal(buf_failed(out), 0);
}

static bool ends_with(const char *name, size_t len, const char *end)
{
    size_t n = strlen(end);

    return len >= n && memcmp(name + len - n, end, n) == 0;
}

/* The pickle of a file of torch.save; in a .pt2 what says of its weights, if it has that. */
static bool is_edited(const char *name, size_t len, const struct zip_member *m,
                      const struct edit *x)
{
    static const char *const ends[] = {"_weights_config.json", "/archive_format",
                                       "/byteorder"};

    if (ends_with(name, len, "/data.pkl"))
        return true;
    for (size_t i = 0; i < ARRAY_SIZE(ends); i++)
        if (ends_with(name, len, ends[i]))
            return memmem(m->data, m->len, x->was, x->was_len);
    return false;
}

/* One member, as the record `p` of the directory has it; its bytes are stored. */
static void copy_member(struct zip_builder *z, const struct buf *from,
                        const unsigned char *p, const struct edit *x)
{
    CLEANUP(buf_release) struct buf changed = {0};
    const unsigned char *local = (const void *)(from->data + get_le32(p + 42));
    size_t len = get_le16(p + 28);
    struct zip_member m = {.len = get_le32(p + 24)};
    char name[256];

    assert_int_equal(get_le16(p + 10), 0);
    assert_true(len < sizeof name);
    memcpy(name, p + 46, len);
    name[len] = '\0';
    m.name = name;
    m.data = local + 30 + get_le16(local + 26) + get_le16(local + 28);
    if (is_edited(name, len, &m, x)) {
        edit(m.data, m.len, x, &changed);
        m.data = changed.data;
        m.len = changed.len;
    }
    zb_add(z, &m);
}

static bool is_archive(const struct buf *b)
{
    return b->len > 22 && memcmp(b->data + b->len - 22, "PK\5\6", 4) == 0;
}

/* The same archive, with another pickle in it. */
static void edit_zip(const struct buf *from, const struct edit *x, struct buf *out)
{
    const unsigned char *p = (const void *)(from->data + from->len - 22);
    struct zip_builder z = {0};

    assert_int_equal(get_le32(p), 0x06054b50); /* the end record, no comment */
    for (p = (const void *)(from->data + get_le32(p + 16)); get_le32(p) == 0x02014b50;
         p += 46 + get_le16(p + 28) + get_le16(p + 30) + get_le16(p + 32))
        copy_member(&z, from, p, x);
    zb_finish(&z, false, false, "");
    buf_add(out, z.out.data, z.out.len);
    zb_release(&z);
}

static void put_edited(const struct made *m, const char *dir, const struct edited *c)
{
    CLEANUP(buf_release) struct buf bytes = {0}, changed = {0};
    CLEANUP(buf_release) struct buf from = {0};

    buf_addf(&from, "%s/%s", dir, c->file);
    read_file(from.data, &bytes);
    if (is_archive(&bytes))
        edit_zip(&bytes, &c->edit, &changed);
    else
        edit(bytes.data, bytes.len, &c->edit, &changed);
    made_file(m, c->as ? c->as : c->file, changed.data, changed.len);
}

/* All files below the folder `from`, below `to` ("": at the top), that are to be there. */
static void copy_dir(const struct made *m, const char *from, const char *to,
                     const struct edited *c)
{
    DIR *d = opendir(from);
    char path[PATH_MAX], name[PATH_MAX];

    assert_non_null(d);
    for (struct dirent *entry; (entry = readdir(d));) {
        struct stat st;

        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", from, entry->d_name);
        snprintf(name, sizeof name, "%s%s%s", to, to[0] ? "/" : "", entry->d_name);
        assert_int_equal(stat(path, &st), 0);
        if (S_ISDIR(st.st_mode))
            copy_dir(m, path, name, c);
        else if (!c->without || !strstr(name, c->without))
            made_copy(m, name, path);
    }
    closedir(d);
}

static void first_fault(const struct opened *o, struct buf *out)
{
    for (size_t i = 0; i < o->count; i++)
        if (o->t[i].fault) {
            buf_addf(out, "%s: %s", o->t[i].key, o->t[i].fault);
            return;
        }
}

/* What is said of a checkpoint, as far as the row asks. */
static void said(struct opened *o, const struct edited *c, struct buf *out)
{
    const struct tensor_info *t = NULL;

    if (o->info.error || !c->key) {
        buf_adds(out, o->info.error ? o->info.error : "(not refused)");
        return;
    }
    if (c->key == EDITED_WARNS || c->key == EDITED_SOUND) {
        all_warnings(o, out);
        first_fault(o, out);
        return;
    }
    for (size_t i = 0; i < o->count; i++)
        if (strcmp(o->t[i].key, c->key) == 0)
            t = &o->t[i];
    if (t && t->fault)
        buf_adds(out, t->fault);
    else {
        buf_adds(out, t ? "(no fault) " : "(no such tensor) ");
        first_fault(o, out);
        all_warnings(o, out);
    }
}

static bool as_told(const struct opened *o, const struct edited *c, const char *text)
{
    if (!c->key)
        return o->info.error && o->count == 0 && strstr(text, c->why);
    if (o->info.error)
        return false;
    if (c->key != EDITED_WARNS && c->key != EDITED_SOUND && text[0] == '(')
        return false; /* another tensor's fault */
    return c->key == EDITED_SOUND ? !*text : strstr(text, c->why) != NULL;
}

/* Tensors that the fixture has too, and that nothing is wrong with, have its bytes. */
static void check_bytes(struct opened *o, const char *dir)
{
    CLEANUP(json_freep) struct json *want = NULL;
    CLEANUP(buf_release) struct buf path = {0};

    buf_addf(&path, "%s.expected.json", dir);
    want = read_json(path.data);
    for (size_t i = 0; i < o->count; i++) {
        const struct json *one = json_get(json_get(want, "tensors"), o->t[i].key);

        if (one && !o->t[i].fault)
            check_tensor(o, &o->t[i], one);
    }
}

static bool check_one(const char *data, const struct edited *c, size_t i)
{
    CLEANUP(buf_release) struct buf text = {0};
    char dir[PATH_MAX];
    struct opened o;
    struct made m;
    bool good;

    snprintf(dir, sizeof dir, "%s/%s", data, c->fixture);
    made_begin(&m, c->fixture);
    copy_dir(&m, dir, "", c);
    put_edited(&m, dir, c);
    made_open(&m, &o);
    said(&o, c, &text);
    buf_addc(&text, '\0');
    assert_int_equal(buf_failed(&text), 0);
    good = as_told(&o, c, text.data);
    if (!good)
        print_message("# row %zu, %s/%s: it should say \"%s\" of %s; it says %s\n", i,
                      c->fixture, c->file, c->why, c->key ? c->key : "all", text.data);
    else if (!o.info.error)
        check_bytes(&o, dir);
    close_checkpoint(&o);
    made_end(&m);
    return good;
}

void check_edited(const char *data, const struct edited *table, size_t n)
{
    size_t failed = 0;

    for (size_t i = 0; i < n; i++)
        failed += !check_one(data, &table[i], i);
    if (failed > 0)
        fail_msg("%zu of %zu rows", failed, n);
}
