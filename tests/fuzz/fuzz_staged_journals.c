/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_staged_journals.c - journals of transactions and steps: what is read is written the same. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "save/lines.h"
#include "save/publish_priv.h"
#include "save/txn_priv.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

/* Each line of the input with the sum that it needs to be believed. */
static void with_sums(const unsigned char *data, size_t size, struct buf *out)
{
    for (size_t at = 0; at < size;) {
        const unsigned char *end = memchr(data + at, '\n', size - at);
        size_t len = end ? (size_t)(end - data) - at : size - at;
        size_t begin = lines_begin(out);

        buf_add(out, data + at, len);
        lines_end(out, begin);
        at += len + 1;
    }
}

static void check_ranges(const struct ranges *r)
{
    for (size_t i = 0; i < r->count; i++)
        require(r->range[i].from < r->range[i].to && r->range[i].to <= INT64_MAX &&
                    (i == 0 || r->range[i - 1].to < r->range[i].from),
                "ranges that are no set");
}

static void check_file(const struct txn_journal *j, const struct txn_file *f)
{
    require(txn_path_is_safe(f->key.name), "a path that is not safe");
    require(names_find(&j->files, f->key.name) == &f->key, "a file that is not found");
    check_ranges(&f->arrived);
    check_ranges(&f->synced);
    for (size_t i = 0; i < f->synced.count; i++)
        require(
            ranges_hold(&f->arrived, f->synced.range[i].from, f->synced.range[i].to),
            "synced bytes that have not arrived");
}

static bool read_txn(struct txn_journal *j, const char *text, size_t len)
{
    CLEANUP_FREE char *copy = malloc(len + 1);
    struct err e = {0};
    size_t whole = 0;

    j->next_id = 1;
    if (!copy)
        abort();
    memcpy(copy, text, len);
    if (txn_journal_read(j, copy, len, &whole, &e) < 0)
        return false;
    require(whole <= len, "more than there was");
    return true;
}

static void check_txn(const char *text, size_t len)
{
    struct txn_journal a = {0}, b = {0};
    struct buf first = {0}, second = {0};

    if (read_txn(&a, text, len)) {
        require(a.files.count == a.ids, "files without a name");
        for (size_t i = 0; i < a.ids; i++)
            check_file(&a, a.by_id[i]);
        require(txn_journal_text(&a, &first) == 0, "no text");
        require(read_txn(&b, first.data, first.len), "what was written is refused");
        require(txn_journal_text(&b, &second) == 0, "no text");
        require(first.len == second.len && !memcmp(first.data, second.data, first.len),
                "read and written it is another one");
    }
    buf_release(&first);
    buf_release(&second);
    txn_journal_release(&a);
    txn_journal_release(&b);
}

static bool read_step(struct step *s, const char *text, size_t len)
{
    CLEANUP_FREE char *copy = malloc(len + 1);
    struct err e = {0};

    step_init(s);
    if (!copy)
        abort();
    memcpy(copy, text, len);
    return step_read(s, copy, len, &e) == 0;
}

static void check_step(const char *text, size_t len)
{
    struct buf first = {0}, second = {0};
    struct err e = {0};
    struct step a, b;

    step_init(&b);
    if (read_step(&a, text, len)) {
        const struct step_entry *only = step_exchanged(&a);

        require(!only || (only->had && only->kind == PUBLISH_PUT), "what is exchanged");
        for (size_t i = 0; i < a.entries; i++)
            require(publish_path_is_safe(a.entry[i].path), "a path that is not safe");
        for (size_t i = 0; i < a.dirs; i++)
            require(publish_path_is_safe(a.dir[i].path), "a path that is not safe");
        require(step_text(&a, &first, &e) == 0, "no text");
        require(read_step(&b, first.data, first.len), "what was written is refused");
        require(step_text(&b, &second, &e) == 0, "no text");
        require(first.len == second.len && !memcmp(first.data, second.data, first.len),
                "read and written it is another one");
    }
    buf_release(&first);
    buf_release(&second);
    step_release(&a);
    step_release(&b);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    struct buf summed = {0};

    check_txn((const char *)data, size);
    check_step((const char *)data, size);
    with_sums(data, size, &summed);
    if (!buf_failed(&summed) && summed.len) {
        check_txn(summed.data, summed.len);
        check_step(summed.data, summed.len);
    }
    buf_release(&summed);
    return 0;
}
