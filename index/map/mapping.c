/* SPDX-License-Identifier: MIT */
/* index/map/mapping.c - loads a map and the config.json that it takes numbers from. */
#include "index/map/mapping.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/err.h"
#include "base/fsutil.h"
#include "index/map/map.h"
#include "index/map/map_priv.h"

enum { FILE_MAX = 16 << 20, REVISION_MAX = 256 };

struct mapping {
    struct map *map;
    struct buf config; /* empty: the checkpoint's own */
    uint64_t hash[2];  /* of all that decides about the result */
};

bool mapping_dtype(const char *name, enum dtype *out)
{
    char upper[16] = "";

    for (size_t i = 0; name[i]; i++) {
        if (i == sizeof upper - 1)
            return false;
        upper[i] = (char)toupper((unsigned char)name[i]);
    }
    *out = dtype_from_name(upper);
    return *out == DTYPE_F64 || map_casts(DTYPE_F64, *out);
}

static int read_file(int fd, struct buf *out, struct err *e)
{
    struct stat st;
    void *dst;

    if (fstat(fd, &st) < 0)
        return err_set(e, errno, "%s", strerror(errno));
    if (!S_ISREG(st.st_mode))
        return err_set(e, EINVAL, "no regular file");
    if (st.st_size > FILE_MAX)
        return err_set(e, EFBIG, "over %d MiB", FILE_MAX >> 20);
    dst = buf_grow(out, (size_t)st.st_size);
    return dst ? read_exact(fd, dst, (size_t)st.st_size, 0, e) : err_nomem(e);
}

static int read_path(const char *path, struct buf *out, struct err *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), ret;

    if (fd < 0)
        return err_set(e, errno, "%s: %s", path, strerror(errno));
    ret = read_file(fd, out, e);
    close(fd);
    return ret < 0 ? err_wrap(e, "%s", path) : 0;
}

static int no_such_map(const char *name, struct err *e)
{
    char names[200] = "";
    size_t len = 0;

    for (size_t i = 0; map_shipped_name(i) && len < sizeof names; i++)
        len += (size_t)snprintf(names + len, sizeof names - len, "%s%s", i ? ", " : "",
                                map_shipped_name(i));
    err_set(e, ENOENT, "map %s: there is no such file, and no map of that name", name);
    return err_hint(e, "shipped are %s", names);
}

/* The text of the map: shipped ones go by names without a slash or a dot. */
static int map_text(const char *name, struct buf *out, struct err *e)
{
    const char *shipped = map_shipped(name);

    if (shipped)
        return buf_adds(out, shipped) < 0 ? err_nomem(e) : 0;
    if (read_path(name, out, e) == 0)
        return 0;
    return e->code == ENOENT ? no_such_map(name, e) : -e->code;
}

static int load_map(const struct mapping_choice *choice, struct mapping *m,
                    struct buf *text, struct err *e)
{
    int ret;

    if (!choice->map) {
        ret = map_parse_cast(choice->dtype, &m->map, e);
        if (ret == 0)
            m->map->module_weights = choice->module_weights;
        return ret;
    }
    ret = map_text(choice->map, text, e);
    if (ret == 0)
        ret =
            map_parse(choice->map, text->data ? text->data : "", text->len, &m->map, e);
    if (ret == 0 && choice->dtype)
        m->map->cast = choice->dtype;
    if (ret == 0)
        m->map->module_weights = choice->module_weights;
    return ret;
}

/* The revision of refs/main, or "" */
static void read_ref(const char *dir, char rev[REVISION_MAX])
{
    CLEANUP(buf_release) struct buf text = {.max = REVISION_MAX - 1};
    char path[PATH_MAX];
    struct err ignored = {0};

    rev[0] = '\0';
    if (snprintf(path, sizeof path, "%s/refs/main", dir) >= (int)sizeof path ||
        read_path(path, &text, &ignored) < 0 || !text.len)
        return;
    snprintf(rev, REVISION_MAX, "%.*s", (int)strcspn(text.data, " \r\n/"), text.data);
}

/* How many snapshots there are, and the last one's name. */
static unsigned count_snapshots(const char *dir, char name[REVISION_MAX])
{
    DIR *d = opendir(dir);
    unsigned n = 0;

    for (struct dirent *f; d && (f = readdir(d));)
        if (f->d_name[0] != '.' && strlen(f->d_name) < REVISION_MAX && ++n)
            memcpy(name, f->d_name, strlen(f->d_name) + 1);
    if (d)
        closedir(d);
    return n;
}

int mapping_hf_dir(const char *dir, char out[PATH_MAX], struct err *e)
{
    char snapshots[PATH_MAX - REVISION_MAX - 1], rev[REVISION_MAX];
    unsigned n;

    if (snprintf(snapshots, sizeof snapshots, "%s/snapshots", dir) >=
        (int)sizeof snapshots)
        return err_set(e, ENAMETOOLONG, "hf=%.100s...", dir);
    snprintf(out, PATH_MAX, "%s", dir);
    if (access(snapshots, F_OK) < 0)
        return 0;
    read_ref(dir, rev);
    snprintf(out, PATH_MAX, "%s/%s", snapshots, rev);
    if (rev[0] && access(out, F_OK) == 0)
        return 0;
    n = count_snapshots(snapshots, rev);
    if (n == 0)
        return err_set(e, ENOENT, "hf=%s: it has no snapshot", dir);
    if (n > 1) {
        err_set(e, EINVAL,
                "hf=%s: it has %u snapshots, and refs/main names none of them", dir, n);
        return err_hint(e, "name one: %s/REVISION", snapshots);
    }
    snprintf(out, PATH_MAX, "%s/%s", snapshots, rev);
    return 0;
}

static int load_config(const char *named, struct buf *out, struct err *e)
{
    char path[PATH_MAX], dir[PATH_MAX];

    TRY(mapping_hf_dir(named, dir, e));
    if (snprintf(path, sizeof path, "%s/config.json", dir) >= (int)sizeof path)
        return err_set(e, ENAMETOOLONG, "hf=%.100s...", dir);
    if (read_path(path, out, e) == 0)
        return 0;
    if (e->code != ENOENT || access(dir, F_OK) < 0)
        return err_wrap(e, "hf=");
    *e = (struct err){0}; /* a tokenizer alone is worth laying over as well */
    return 0;
}

static void hash_all(const struct mapping_choice *choice, const struct buf *text,
                     struct mapping *m)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(
        text->data, text->len, choice->dtype * 2u + choice->module_weights);

    h = XXH3_128bits_withSeed(m->config.data, m->config.len, h.low64 ^ h.high64);
    m->hash[0] = h.high64;
    m->hash[1] = h.low64;
}

int mapping_open(const struct mapping_choice *choice, struct mapping **out,
                 struct err *e)
{
    CLEANUP(buf_release) struct buf text = {.max = FILE_MAX};
    struct mapping *m;
    int ret;

    *out = NULL;
    if (!choice->map && !choice->dtype && !choice->module_weights)
        return 0;
    m = calloc(1, sizeof *m);
    if (!m)
        return err_nomem(e);
    m->config.max = FILE_MAX;
    ret = load_map(choice, m, &text, e);
    if (ret == 0 && choice->hf && m->map->wants_config)
        ret = load_config(choice->hf, &m->config, e);
    if (ret < 0) {
        mapping_free(m);
        return ret;
    }
    hash_all(choice, &text, m);
    *out = m;
    return 0;
}

void mapping_free(struct mapping *m)
{
    if (!m)
        return;
    map_free(m->map);
    buf_release(&m->config);
    free(m);
}

int mapping_identity(const struct mapping *m, const char *source, struct buf *out,
                     struct err *e)
{
    buf_adds(out, source);
    if (m)
        buf_addf(out, "\nmap %016" PRIx64 "%016" PRIx64, m->hash[0], m->hash[1]);
    return buf_failed(out) ? err_nomem(e) : 0;
}

bool mapping_wants_config(const struct mapping *m)
{
    return m && ((m->map->wants_config && m->config.len == 0) || map_has_cast(m->map));
}

int mapping_filter(const struct mapping *m, const char *config, size_t config_len,
                   struct sink_filter **out, struct err *e)
{
    const struct buf *laid_over = m->config.len > 0 ? &m->config : NULL;
    bool wanted = m->map->wants_config;
    int ret = map_filter_new(m->map,
                             laid_over ? laid_over->data
                             : wanted  ? config
                                       : NULL,
                             laid_over ? laid_over->len : config_len, out, e);

    if (ret == 0)
        map_filter_own_config(*out, config, config_len);
    return ret;
}
