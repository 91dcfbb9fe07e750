/* SPDX-License-Identifier: MIT */
/* cli/screen.c - terminals: their width, their colours, and text that cannot harm them. */
#include "cli/screen.h"

#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/utf8.h"

enum {
    COLUMNS_USUAL = 80, /* where nobody says */
    COLUMNS_MIN = 20,   /* narrower ones are no terminals that a person reads */
    COLUMNS_MAX = 1000,
    ESCAPE_COLUMNS = 3, /* of "%1B" */
    ITEM_MAX = 24,      /* what is longer between commas is prose */
};

bool colour_choice_parse(const char *text, enum colour_choice *out)
{
    static const char *const name[] = {
        [COLOUR_AUTO] = "auto", [COLOUR_ALWAYS] = "always", [COLOUR_NEVER] = "never"};

    for (size_t i = 0; i < ARRAY_SIZE(name); i++)
        if (strcmp(text, name[i]) == 0) {
            *out = (enum colour_choice)i;
            return true;
        }
    return false;
}

/* The first of the three that is set decides, as in setlocale(3). */
static bool locale_is_utf8(void)
{
    static const char *const variable[] = {"LC_ALL", "LC_CTYPE", "LANG"};

    for (size_t i = 0; i < ARRAY_SIZE(variable); i++) {
        const char *value = getenv(variable[i]);

        if (value && *value)
            return strcasestr(value, "utf-8") || strcasestr(value, "utf8");
    }
    return false;
}

static int columns_of(int fd)
{
    const int ask[] = {fd, STDERR_FILENO,
                       STDIN_FILENO}; /* a pager has taken the first */
    const char *given = getenv("COLUMNS");
    struct winsize size;
    int columns = given ? atoi(given) : 0;

    for (size_t i = 0; columns <= 0 && i < ARRAY_SIZE(ask); i++)
        if (ioctl(ask[i], TIOCGWINSZ, &size) == 0)
            columns = size.ws_col;
    if (columns <= 0)
        return COLUMNS_USUAL;
    return MIN(MAX(columns, (int)COLUMNS_MIN), (int)COLUMNS_MAX);
}

void screen_open(struct screen *s, int fd, enum colour_choice choice)
{
    const char *term = getenv("TERM"), *plain = getenv("NO_COLOR");
    bool terminal = isatty(fd) && term && *term && strcmp(term, "dumb") != 0;

    *s = (struct screen){.people = terminal || choice == COLOUR_ALWAYS};
    if (!s->people)
        return;
    s->colour =
        choice == COLOUR_ALWAYS || (choice == COLOUR_AUTO && (!plain || !*plain));
    s->utf8 = locale_is_utf8();
    screen_resize(s, fd);
}

void screen_resize(struct screen *s, int fd)
{
    s->columns = columns_of(fd);
}

void screen_style(const struct screen *s, FILE *f, enum style style)
{
    static const char *const code[] = {
        [STYLE_NONE] = "\033[m",   [STYLE_HEAD] = "\033[1m",
        [STYLE_FAINT] = "\033[2m", [STYLE_TYPE] = "\033[36m",
        [STYLE_SIZE] = "\033[32m", [STYLE_GOOD] = "\033[32m",
        [STYLE_BAD] = "\033[31m",  [STYLE_WARNING] = "\033[33m",
    };

    if (s->colour)
        fputs(code[style], f);
}

/* ---- characters ---- */

struct range {
    uint32_t first, last;
};

static bool in_ranges(const struct range *range, size_t n, uint32_t c)
{
    for (size_t i = 0; i < n && range[i].first <= c; i++)
        if (c <= range[i].last)
            return true;
    return false;
}

/* Controls, and Unicode's format characters: they turn, join or hide what stands beside. */
static bool is_harmful(uint32_t c)
{
    static const struct range range[] = {
        {0, 0x1f},        {0x7f, 0x9f},       {0xad, 0xad},     {0x61c, 0x61c},
        {0x200b, 0x200f}, {0x2028, 0x202e},   {0x2060, 0x206f}, {0xfeff, 0xfeff},
        {0xfff9, 0xfffb}, {0xe0000, 0xe0fff},
    };

    return in_ranges(range, ARRAY_SIZE(range), c);
}

/* Marks that are set on the character before. */
static bool is_mark(uint32_t c)
{
    static const struct range range[] = {
        {0x300, 0x36f},   {0x1ab0, 0x1aff}, {0x1dc0, 0x1dff},
        {0x20d0, 0x20ff}, {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f},
    };

    return in_ranges(range, ARRAY_SIZE(range), c);
}

/* East Asian Width W and F (Unicode TR 11), by blocks. */
static bool is_wide(uint32_t c)
{
    static const struct range range[] = {
        {0x1100, 0x115f},   {0x2e80, 0x303e},   {0x3041, 0xa4cf},   {0xac00, 0xd7a3},
        {0xf900, 0xfaff},   {0xfe30, 0xfe6f},   {0xff00, 0xff60},   {0xffe0, 0xffe6},
        {0x1f300, 0x1f64f}, {0x1f900, 0x1f9ff}, {0x20000, 0x3fffd},
    };

    return in_ranges(range, ARRAY_SIZE(range), c);
}

/* Code point of a well-formed character of `len` bytes. */
static uint32_t decode(const unsigned char *p, size_t len)
{
    static const unsigned char first[] = {
        [1] = 0x7f, [2] = 0x1f, [3] = 0x0f, [4] = 0x07};
    uint32_t c = p[0] & first[len];

    for (size_t i = 1; i < len; i++)
        c = c << 6 | (p[i] & 0x3f);
    return c;
}

/* The next character of text: its bytes, and its columns. Escaped ones: 1 byte, 3 columns. */
struct glyph {
    size_t len;
    int columns;
    bool escaped;
};

static struct glyph next_glyph(const struct screen *s, const char *text, size_t len)
{
    size_t n = utf8_char(text, len);
    uint32_t c = n ? decode((const unsigned char *)text, n) : 0;

    if (n == 0 || is_harmful(c) || (n > 1 && !s->utf8))
        return (struct glyph){1, ESCAPE_COLUMNS, true};
    return (struct glyph){n, is_mark(c) ? 0 : is_wide(c) ? 2 : 1, false};
}

static void put_glyph(FILE *f, const char *text, struct glyph g)
{
    if (g.escaped)
        fprintf(f, "%%%02X", (unsigned char)*text);
    else
        fwrite(text, 1, g.len, f);
}

int screen_width(const struct screen *s, const char *text, size_t len)
{
    int width = 0;

    for (size_t i = 0; i < len;) {
        struct glyph g = next_glyph(s, text + i, len - i);

        width += g.columns;
        i += g.len;
    }
    return width;
}

int screen_text(const struct screen *s, FILE *f, const char *text, size_t len)
{
    int width = 0;

    for (size_t i = 0; i < len;) {
        struct glyph g = next_glyph(s, text + i, len - i);

        put_glyph(f, text + i, g);
        width += g.columns;
        i += g.len;
    }
    return width;
}

/* Bytes at the start of text that take no more than `width` columns. */
static size_t head_of(const struct screen *s, const char *text, size_t len, int width)
{
    size_t i = 0;

    while (i < len) {
        struct glyph g = next_glyph(s, text + i, len - i);

        if ((width -= g.columns) < 0)
            break;
        i += g.len;
    }
    return i;
}

int screen_text_cut(const struct screen *s, FILE *f, const char *text, size_t len,
                    int width)
{
    const char *gap = s->utf8 ? "…" : "..";
    int gap_width = s->utf8 ? 1 : 2, all = screen_width(s, text, len), skipped;
    size_t head, tail;

    if (all <= width)
        return screen_text(s, f, text, len);
    if (width <= gap_width)
        return screen_text(s, f, text, head_of(s, text, len, width));
    head = head_of(s, text, len, (width - gap_width) / 3);
    skipped = all - (width - gap_width - screen_width(s, text, head));
    /* The first character behind which what is left is short enough. */
    for (tail = head_of(s, text, len, skipped);
         tail < len && screen_width(s, text + tail, len - tail) > all - skipped;)
        tail += next_glyph(s, text + tail, len - tail).len;
    screen_text(s, f, text, head);
    fputs(gap, f);
    screen_text(s, f, text + tail, len - tail);
    return screen_width(s, text, head) + gap_width +
           screen_width(s, text + tail, len - tail);
}

/* ---- lines ---- */

static void next_line(struct wrapping *w)
{
    printf("\n%*s", w->indent, "");
    w->at = w->indent;
}

/* A word, cut where it is longer than a line. */
static void wrap_word(struct wrapping *w, const char *word, size_t len)
{
    const struct screen *s = w->screen;
    int space = w->space && w->at > w->indent;

    if (w->at + space + screen_width(s, word, len) > s->columns && w->at > w->indent)
        next_line(w);
    else if (space)
        putchar(' ');
    w->at += w->at > w->indent ? space : 0;
    while (len > 0) {
        size_t n = head_of(s, word, len, MAX(s->columns - w->at, (int)ESCAPE_COLUMNS));

        w->at += screen_text(s, stdout, word, n);
        word += n;
        len -= n;
        if (len > 0)
            next_line(w);
    }
}

static void wrap_prose(struct wrapping *w, const char *text, size_t len)
{
    while (len > 0) {
        const char *space = memchr(text, ' ', len);
        size_t n = space ? (size_t)(space - text) : len;

        wrap_word(w, text, n);
        w->space = space != NULL;
        text += n + w->space;
        len -= n + w->space;
    }
}

/* Short items of a list stay whole: "DP 4,", "45.8 KiB,". */
void wrap_words(struct wrapping *w, const char *text, size_t len)
{
    while (len > 0) {
        const char *comma = memmem(text, len, ", ", 2);
        size_t n = comma ? (size_t)(comma - text) + 1 : len;

        if (n <= ITEM_MAX)
            wrap_word(w, text, n);
        else
            wrap_prose(w, text, n);
        w->space = comma != NULL;
        text += n + w->space;
        len -= n + w->space;
    }
}
