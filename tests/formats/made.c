/* SPDX-License-Identifier: MIT */
/* tests/formats/made.c - checkpoints that a test makes up, in a folder of its own. */
#include "made.h"

#include <errno.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>

#include "base/endian.h"
#include "base/err.h"
#include "tests/unit/unit.h"

void made_begin(struct made *m, const char *name)
{
    size_t len;

    strcpy(m->dir, "/tmp/made-XXXXXX");
    assert_non_null(mkdtemp(m->dir));
    len = strlen(m->dir);
    assert_true(strlen(name) < sizeof m->dir - len - 1);
    snprintf(m->dir + len, sizeof m->dir - len, "/%s", name);
    assert_int_equal(mkdir(m->dir, 0777), 0);
}

static int remove_one(const char *path, const struct stat *st, int flag,
                      struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

void made_end(const struct made *m)
{
    char top[sizeof m->dir];

    strcpy(top, m->dir);
    *strrchr(top, '/') = '\0';
    nftw(top, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

void made_file(const struct made *m, const char *path, const void *data, size_t len)
{
    char full[PATH_MAX];
    FILE *out;

    snprintf(full, sizeof full, "%s/%s", m->dir, path);
    for (char *s = full + strlen(m->dir) + 1; (s = strchr(s, '/')); *s++ = '/') {
        *s = '\0';
        if (mkdir(full, 0777) < 0)
            assert_int_equal(errno, EEXIST);
    }
    out = fopen(full, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, len, out), len);
    assert_int_equal(fclose(out), 0);
}

void made_text(const struct made *m, const char *path, const char *text)
{
    made_file(m, path, text, strlen(text));
}

void made_copy(const struct made *m, const char *path, const char *from)
{
    CLEANUP(buf_release) struct buf bytes = {0};

    read_file(from, &bytes);
    made_file(m, path, bytes.data, bytes.len);
}

void made_from(const struct made *m, const char *path, void *const *state,
               const char *name)
{
    char from[PATH_MAX];

    snprintf(from, sizeof from, "%s/%s", (const char *)*state, name);
    made_copy(m, path, from);
}

void made_safetensors(const struct made *m, const char *path, const char *header,
                      float start, size_t n)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    unsigned char len[8];

    put_le64(len, strlen(header));
    buf_add(&bytes, len, sizeof len);
    buf_adds(&bytes, header);
    for (size_t i = 0; i < n; i++) {
        float v = start + (float)i;

        buf_add(&bytes, &v, sizeof v);
    }
    assert_int_equal(buf_failed(&bytes), 0);
    made_file(m, path, bytes.data, bytes.len);
}

void made_open(const struct made *m, struct opened *o)
{
    open_checkpoint(m->dir, o);
}

void check_floats(struct opened *o, const char *key, const float *want, size_t n)
{
    CLEANUP(buf_release) struct buf bytes = {0}, naive = {0};
    const struct tensor_info *t = tensor(o, key);
    struct err e = {0};

    if (t->fault)
        fail_msg("%s: %s", key, t->fault);
    assert_ok(read_tensor(&o->w, o->info.id, t, &bytes, &e), &e);
    assert_ok(world_read(&o->w, o->info.id, t, &naive, &e), &e);
    assert_int_equal(bytes.len, n * sizeof *want);
    for (size_t i = 0; i < n; i++) {
        float got;

        memcpy(&got, bytes.data + i * sizeof got, sizeof got);
        if (got < want[i] || got > want[i])
            fail_msg("%s: element %zu is %g, not %g", key, i, (double)got,
                     (double)want[i]);
    }
    assert_memory_equal(naive.data, bytes.data, bytes.len);
}

void check_fault(struct opened *o, const char *key, const char *why)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    const struct tensor_info *t = tensor(o, key);
    struct err e = {0};

    if (!t->fault)
        fail_msg("%s: no fault, it should say %s", key, why);
    assert_has(t->fault, why);
    assert_true(read_tensor(&o->w, o->info.id, t, &bytes, &e) < 0);
}

void check_warnings(struct opened *o, const char *want)
{
    CLEANUP(buf_release) struct buf text = {0};

    all_warnings(o, &text);
    assert_string_equal(text.data, want);
}
