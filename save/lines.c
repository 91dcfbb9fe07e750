/* SPDX-License-Identifier: MIT */
/* save/lines.c - lines with checksums. */
#include "save/lines.h"

#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "remote/http.h"

enum { SUM_DIGITS = 16 };

static void write_sum(const char *text, size_t len, char dst[SUM_DIGITS])
{
    static const char digits[] = "0123456789abcdef";
    uint64_t sum = XXH3_64bits(text, len);

    for (unsigned i = SUM_DIGITS; i-- > 0; sum >>= 4)
        dst[i] = digits[sum & 15];
}

size_t lines_begin(struct buf *b)
{
    size_t begin = b->len;

    buf_adds(b, "0000000000000000 ");
    return begin;
}

void lines_end(struct buf *b, size_t begin)
{
    size_t text = begin + SUM_DIGITS + 1;

    if (buf_failed(b))
        return;
    write_sum(b->data + text, b->len - text, b->data + begin);
    buf_addc(b, '\n');
}

void lines_add(struct buf *b, const char *text)
{
    size_t begin = lines_begin(b);

    buf_adds(b, text);
    lines_end(b, begin);
}

void lines_add_path(struct buf *b, const char *path)
{
    buf_addc(b, ' ');
    http_encode(path, true, b);
}

char *lines_next(struct lines *l)
{
    char *line = l->text + l->at, sum[SUM_DIGITS];
    size_t left = l->len - l->at;
    char *end = left ? memchr(line, '\n', left) : NULL, *text = line + SUM_DIGITS + 1;

    if (!end || end < text || text[-1] != ' ' ||
        memchr(line, '\0', (size_t)(end - line)))
        return NULL;
    write_sum(text, (size_t)(end - text), sum);
    if (memcmp(sum, line, SUM_DIGITS) != 0)
        return NULL;
    *end = '\0';
    l->at += (size_t)(end - line) + 1;
    return text;
}

char *lines_word(char **line)
{
    char *word = *line, *space;

    if (!word || !*word)
        return NULL;
    space = strchr(word, ' ');
    if (space)
        *space = '\0';
    *line = space ? space + 1 : NULL;
    return *word ? word : NULL;
}

bool lines_number(char **line, uint64_t *out)
{
    const char *word = lines_word(line);
    char *end;

    if (!word || *word < '0' || *word > '9')
        return false;
    errno = 0;
    *out = strtoull(word, &end, 10);
    return errno == 0 && *end == '\0';
}

bool lines_signed(char **line, int64_t *out)
{
    const char *word = lines_word(line);
    char *end;

    if (!word || ((*word < '0' || *word > '9') && *word != '-'))
        return false;
    errno = 0;
    *out = strtoll(word, &end, 10);
    return errno == 0 && *end == '\0' && end[-1] != '-';
}

char *lines_path(char **line, bool *nomem)
{
    CLEANUP(buf_release) struct buf path = {0};
    const char *word = lines_word(line);

    if (!word || http_decode(word, strlen(word), &path) < 0 || path.len == 0) {
        *nomem |= path.failed == ENOMEM;
        return NULL;
    }
    return buf_steal(&path, NULL);
}
