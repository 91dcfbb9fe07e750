/* SPDX-License-Identifier: MIT */
/* remote/aws_config.c - the settings that AWS's tools share: ~/.aws/config, credentials. */
#include "remote/aws_config.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/fsutil.h"

enum {
    MAX_FILE = 1 << 20, /* real ones have a few kilobytes; one with 500 profiles, 100 */
    MAX_MEMORY = 8 << 20,
    MAX_SETTINGS = 10000, /* each new one is compared with all: 0.3 s at most */
};

struct setting {
    const char *section; /* "profile NAME" or "services NAME" */
    const char *key;     /* lower case; "s3.endpoint_url" when it was indented */
    const char *value;
    unsigned file; /* the how-manieth that was added */
};

struct aws_config {
    struct arena *arena;
    struct buf settings; /* struct setting */
    unsigned files;
};

struct aws_config *aws_config_new(void)
{
    struct aws_config *c = calloc(1, sizeof *c);

    if (!c)
        return NULL;
    c->arena = arena_new(MAX_MEMORY);
    c->settings.max = MAX_SETTINGS * sizeof(struct setting);
    if (!c->arena) {
        free(c);
        return NULL;
    }
    return c;
}

void aws_config_free(struct aws_config *c)
{
    if (!c)
        return;
    arena_free(c->arena);
    buf_release(&c->settings);
    free(c);
}

void aws_config_freep(struct aws_config **c)
{
    aws_config_free(*c);
    *c = NULL;
}

/* ---- looking up ---- */

static size_t count(const struct aws_config *c)
{
    return c->settings.len / sizeof(struct setting);
}

static struct setting *at(const struct aws_config *c, size_t i)
{
    return (struct setting *)(void *)c->settings.data + i;
}

/* NULL as section or key: any. */
static struct setting *find(const struct aws_config *c, const char *section,
                            const char *key)
{
    for (size_t i = 0; i < count(c); i++)
        if (strcmp(at(c, i)->section, section) == 0 &&
            (!key || strcmp(at(c, i)->key, key) == 0))
            return at(c, i);
    return NULL;
}

static struct setting *find_in(const struct aws_config *c, const char *kind,
                               const char *name, const char *key)
{
    CLEANUP(buf_release) struct buf section = {0};

    if (buf_addf(&section, "%s %s", kind, name) < 0)
        return NULL;
    return find(c, section.data, key);
}

const char *aws_config_get(const struct aws_config *c, const char *profile,
                           const char *key)
{
    const struct setting *s = find_in(c, "profile", profile, key);

    return s && s->value[0] ? s->value : NULL;
}

const char *aws_config_get_beside(const struct aws_config *c, const char *profile,
                                  const char *key, const char *beside)
{
    const struct setting *one = find_in(c, "profile", profile, beside);

    for (size_t i = 0; one && i < count(c); i++)
        if (at(c, i)->file == one->file &&
            strcmp(at(c, i)->section, one->section) == 0 &&
            strcmp(at(c, i)->key, key) == 0)
            return at(c, i)->value[0] ? at(c, i)->value : NULL;
    return NULL;
}

const char *aws_config_service_endpoint(const struct aws_config *c, const char *profile,
                                        const char *service)
{
    CLEANUP(buf_release) struct buf key = {0};
    const char *name = aws_config_get(c, profile, "services");
    const struct setting *s;

    if (!name || buf_addf(&key, "%s.endpoint_url", service) < 0)
        return NULL;
    s = find_in(c, "services", name, key.data);
    return s && s->value[0] ? s->value : NULL;
}

bool aws_config_has_profile(const struct aws_config *c, const char *profile)
{
    return find_in(c, "profile", profile, NULL);
}

/* ---- reading ---- */

/* What one file's lines are read with. */
struct reading {
    struct aws_config *config;
    enum aws_file kind;
    size_t line;
    const char *section; /* NULL: one that is not ours */
    bool option;         /* a setting stands above, in this section: */
    size_t indent;       /* blanks before it; what has more belongs to it */
    size_t current;      /* its number, where the section is ours */
    struct err *e;
};

struct span {
    const char *p;
    size_t len;
};

static struct span trim(struct span s)
{
    while (s.len && strchr(" \t\r", s.p[0])) {
        s.p++;
        s.len--;
    }
    while (s.len && strchr(" \t\r", s.p[s.len - 1]))
        s.len--;
    return s;
}

static int bad_line(const struct reading *r, const char *why)
{
    return err_set(r->e, EBADMSG, "line %zu: %s", r->line, why);
}

static int no_room(const struct reading *r)
{
    return err_set(r->e, EFBIG, "line %zu: more settings than such a file can have",
                   r->line);
}

/* "profile NAME" of `profile "NAME"` and the like; NULL for a section that is not ours. */
static int enter_section(struct reading *r, struct span name)
{
    static const char *const kinds[] = {"profile", "services"};
    CLEANUP(buf_release) struct buf text = {0};

    r->section = NULL;
    r->option = false;
    name = trim(name);
    if (r->kind == AWS_FILE_CREDENTIALS ||
        (name.len == 7 && memcmp(name.p, "default", 7) == 0))
        buf_addf(&text, "profile %.*s", (int)name.len, name.p);
    for (size_t i = 0; i < ARRAY_SIZE(kinds) && !text.len; i++) {
        size_t len = strlen(kinds[i]);
        struct span rest;

        if (name.len <= len || memcmp(name.p, kinds[i], len) != 0 ||
            !strchr(" \t", name.p[len]))
            continue;
        rest = trim((struct span){name.p + len, name.len - len});
        if (rest.len >= 2 && strchr("\"'", rest.p[0]) &&
            rest.p[rest.len - 1] == rest.p[0])
            rest = (struct span){rest.p + 1, rest.len - 2};
        buf_addf(&text, "%s %.*s", kinds[i], (int)rest.len, rest.p);
    }
    if (!text.len)
        return buf_failed(&text) ? err_nomem(r->e) : 0;
    r->section = arena_memdup(r->config->arena, text.data, text.len);
    return r->section ? 0 : no_room(r);
}

static int add_setting(struct reading *r, const char *key, struct span value)
{
    struct setting *known = find(r->config, r->section, key), s;

    if (known && known->file == r->config->files)
        return bad_line(r, "a setting for the second time in its section");
    s = (struct setting){.section = r->section,
                         .key = key,
                         .value = arena_memdup(r->config->arena, value.p, value.len),
                         .file = r->config->files};
    if (!s.value || buf_add(&r->config->settings, &s, sizeof s) < 0)
        return no_room(r);
    return 0;
}

/* The key in lower case, below `outer` when there is one. */
static const char *key_text(struct reading *r, const char *outer, struct span key)
{
    CLEANUP(buf_release) struct buf text = {0};

    if (outer)
        buf_addf(&text, "%s.", outer);
    for (size_t i = 0; i < key.len; i++)
        buf_addc(&text,
                 key.p[i] >= 'A' && key.p[i] <= 'Z' ? (char)(key.p[i] + 32) : key.p[i]);
    return buf_failed(&text) ? NULL
                             : arena_memdup(r->config->arena, text.data, text.len);
}

/* Where the key ends: at the first '=' or ':'; len when there is none. */
static size_t key_end(struct span line)
{
    size_t i = 0;

    while (i < line.len && line.p[i] != '=' && line.p[i] != ':')
        i++;
    return i;
}

static int setting_line(struct reading *r, const char *outer, struct span line)
{
    size_t end = key_end(line);
    struct span key = trim((struct span){line.p, end});
    const char *text;

    if (end == line.len || key.len == 0)
        return bad_line(r, "neither a section nor `key = value`");
    text = key_text(r, outer, key);
    if (!text)
        return no_room(r);
    return add_setting(r, text,
                       trim((struct span){line.p + end + 1, line.len - end - 1}));
}

/* Within a setting, or more of its value. */
static int indented_line(struct reading *r, struct span line)
{
    CLEANUP(buf_release) struct buf joined = {0};
    struct setting *outer = at(r->config, r->current);

    if (outer->value[0] == '\0')
        return setting_line(r, outer->key, line);
    if (buf_addf(&joined, "%s\n%.*s", outer->value, (int)line.len, line.p) < 0)
        return err_nomem(r->e);
    outer->value = arena_memdup(r->config->arena, joined.data, joined.len);
    return outer->value ? 0 : no_room(r);
}

static int section_line(struct reading *r, struct span line)
{
    const char *end = memchr(line.p, ']', line.len);

    if (!end)
        return bad_line(r, "a section without its ']'");
    return enter_section(r, (struct span){line.p + 1, (size_t)(end - line.p) - 1});
}

/* As Python's configparser: all of a section may be indented, and what belongs to a setting more. */
static int read_line(struct reading *r, struct span raw)
{
    struct span line = trim(raw);
    size_t indent = (size_t)(line.p - raw.p);
    int ret;

    if (line.len == 0 || line.p[0] == '#' || line.p[0] == ';')
        return 0;
    if (r->option && indent > r->indent)
        return r->section ? indented_line(r, line) : 0;
    r->indent = indent;
    if (line.p[0] == '[')
        return section_line(r, line);
    r->option = true;
    if (!r->section)
        return 0;
    ret = setting_line(r, NULL, line);
    r->current = count(r->config) - 1;
    return ret;
}

int aws_config_add(struct aws_config *c, enum aws_file kind, const char *text,
                   size_t len, struct err *e)
{
    struct reading r = {.config = c, .kind = kind, .e = e};

    if (len > MAX_FILE)
        return err_set(e, EFBIG, "%zu bytes, at most %d are read", len, MAX_FILE);
    if (memchr(text, '\0', len))
        return err_set(e, EBADMSG, "holds a NUL byte: no settings");
    c->files++;
    if (len >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) { /* Notepad's mark */
        text += 3;
        len -= 3;
    }
    for (size_t pos = 0; pos < len;) {
        const char *end = memchr(text + pos, '\n', len - pos);
        size_t n = end ? (size_t)(end - text) - pos : len - pos;
        int ret;

        r.line++;
        ret = read_line(&r, (struct span){text + pos, n});
        if (ret < 0)
            return ret;
        pos += n + 1;
    }
    return 0;
}

/* ---- the files ---- */

static int read_file(const char *path, struct buf *text, struct err *e)
{
    CLEANUP_FD int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    char *dst;

    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR
                   ? 0
                   : err_set(e, errno, "%s", strerror(errno));
    if (fstat(fd, &st) < 0)
        return err_set(e, errno, "%s", strerror(errno));
    if (!S_ISREG(st.st_mode))
        return 0; /* /dev/null is how one says: none */
    if (st.st_size > MAX_FILE)
        return err_set(e, EFBIG, "%jd bytes, at most %d are read", (intmax_t)st.st_size,
                       MAX_FILE);
    dst = buf_grow(text, (size_t)st.st_size);
    return dst ? read_exact(fd, dst, (size_t)st.st_size, 0, e) : err_nomem(e);
}

static int load_file(struct aws_config *c, enum aws_file kind, const char *variable,
                     const char *below_home, struct err *e)
{
    CLEANUP(buf_release) struct buf path = {0};
    CLEANUP(buf_release) struct buf text = {0};
    const char *given = getenv(variable), *home = getenv("HOME");
    int ret;

    if (given && given[0] == '~' && given[1] == '/' && home)
        buf_addf(&path, "%s%s", home, given + 1);
    else if (given && given[0])
        buf_adds(&path, given);
    else if (home && home[0])
        buf_addf(&path, "%s/%s", home, below_home);
    else
        return 0;
    if (buf_failed(&path))
        return err_nomem(e);
    ret = read_file(path.data, &text, e);
    if (ret == 0 && text.len)
        ret = aws_config_add(c, kind, text.data, text.len, e);
    if (text.data)
        explicit_bzero(text.data, text.len);
    return ret < 0 ? err_wrap(e, "%s", path.data) : 0;
}

int aws_config_load(struct aws_config **out, struct err *e)
{
    CLEANUP(aws_config_freep) struct aws_config *c = aws_config_new();
    int ret;

    if (!c)
        return err_nomem(e);
    ret = load_file(c, AWS_FILE_CREDENTIALS, "AWS_SHARED_CREDENTIALS_FILE",
                    ".aws/credentials", e);
    if (ret == 0)
        ret = load_file(c, AWS_FILE_CONFIG, "AWS_CONFIG_FILE", ".aws/config", e);
    if (ret == 0)
        *out = steal(&c);
    return ret;
}
