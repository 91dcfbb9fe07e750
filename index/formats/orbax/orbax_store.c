/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_store.c - zarr arrays by name: values of an OCDBT store, or directories. */
#include "index/formats/orbax/orbax_store.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/formats/orbax/ocdbt.h"
#include "index/formats/orbax/ocdbt_node.h"
#include "index/formats/orbax/orbax_dirs.h"
#include "index/formats/orbax/orbax_files.h"
#include "index/formats/orbax/orbax_number.h"
#include "index/formats/zarr/zarr_array.h"
#include "index/formats/zarr/zarr_dir.h"
#include "index/formats/format.h"
#include "index/sink.h"
#include "remote/listing.h"
#include "remote/source.h"

enum {
    MAX_MANIFEST = 16 << 20, /* real ones have some hundred bytes */
    MAX_MEMORY = 1 << 30,    /* names of arrays */
    NUMBER_DIGITS = 16,      /* of manifest.0123456789abcdef */
};

static const char MANIFEST[] = "manifest.ocdbt";
static const char NUMBERED[] = "manifest.";

struct array {
    struct orbax_array shown;
    size_t metadata;   /* OCDBT: number of the value */
    struct listing *l; /* directories */
};

struct orbax_store {
    struct orbax_files *files;
    struct ocdbt *ocdbt; /* NULL: directories */
    struct arena *names;
    struct array *array; /* sorted by name */
    size_t count, cap;
};

void orbax_store_free(struct orbax_store *s)
{
    if (!s)
        return;
    ocdbt_free(s->ocdbt);
    arena_freep(&s->names);
    free(s->array);
    free(s);
}

void orbax_store_freep(struct orbax_store **s)
{
    orbax_store_free(*s);
}

bool orbax_store_is_ocdbt(const struct orbax_store *s)
{
    return s->ocdbt != NULL;
}

size_t orbax_store_count(const struct orbax_store *s)
{
    return s->count;
}

const struct orbax_array *orbax_store_at(const struct orbax_store *s, size_t i)
{
    return &s->array[i].shown;
}

/* ---- finding arrays ---- */

static struct array *add_array(struct orbax_store *s, const char *name, size_t len,
                               struct err *e)
{
    struct array *a;

    if (!VEC_ROOM(s->array, s->count, s->cap)) {
        err_nomem(e);
        return NULL;
    }
    a = &s->array[s->count];
    *a = (struct array){
        .shown = {.name = arena_memdup(s->names, name, len), .len = len}};
    if (!a->shown.name) {
        err_nomem(e);
        return NULL;
    }
    s->count++;
    return a;
}

static int on_directory(void *user, const char *path, struct listing *l, bool zarr3,
                        struct err *e)
{
    struct array *a = add_array(user, path, strlen(path), e);

    if (!a)
        return -e->code;
    a->l = l;
    a->shown.zarr3 = zarr3;
    return 0;
}

/* Does the key end in "/NAME", or is it NAME? *len: what stands before. */
static bool is_metadata(const struct ocdbt_value *v, const char *name, size_t *len)
{
    size_t n = strlen(name);

    if (v->key_len < n || memcmp(v->key + v->key_len - n, name, n) != 0)
        return false;
    *len = v->key_len - n;
    if (*len > 0 && v->key[*len - 1] != '/')
        return false;
    *len -= *len > 0;
    return true;
}

static int find_in_ocdbt(struct orbax_store *s, struct err *e)
{
    for (size_t i = 0; i < ocdbt_count(s->ocdbt); i++) {
        const struct ocdbt_value *v = ocdbt_at(s->ocdbt, i);
        bool zarr3 = false;
        struct array *a;
        size_t len;

        if (!is_metadata(v, ".zarray", &len) &&
            !(zarr3 = is_metadata(v, "zarr.json", &len)))
            continue;
        a = add_array(s, v->key, len, e);
        if (!a)
            return -e->code;
        a->metadata = i;
        a->shown.zarr3 = zarr3;
    }
    return 0;
}

static int compare_names(const char *a, size_t a_len, const char *b, size_t b_len)
{
    int order = memcmp(a, b, MIN(a_len, b_len));

    return order ? order : (a_len > b_len) - (a_len < b_len);
}

static int compare_arrays(const void *a, const void *b)
{
    const struct orbax_array *x = a, *y = b;
    int order = compare_names(x->name, x->len, y->name, y->len);

    /* Both kinds at one place: .zarray first, whatever the order was. */
    return order ? order : x->zarr3 - y->zarr3;
}

_Static_assert(offsetof(struct array, shown) == 0, "compare_arrays() sees it");

bool orbax_store_find(const struct orbax_store *s, const char *name, size_t len,
                      size_t *i)
{
    size_t low = 0, high = s->count;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        const struct orbax_array *a = &s->array[mid].shown;

        if (compare_names(a->name, a->len, name, len) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    *i = low;
    return low < s->count && s->array[low].shown.len == len &&
           memcmp(s->array[low].shown.name, name, len) == 0;
}

/* ---- opening ---- */

bool orbax_has_ocdbt(const struct listing *l)
{
    const struct listing_entry *entry = listing_find(l, MANIFEST);

    return entry && entry->st.kind == ENTRY_FILE;
}

static bool is_numbered(const char *name)
{
    size_t n = strlen(NUMBERED);

    if (strncmp(name, NUMBERED, n) != 0 || strlen(name) != n + NUMBER_DIGITS)
        return false;
    for (const char *p = name + n; *p; p++)
        if (!isdigit((unsigned char)*p) && (*p < 'a' || *p > 'f'))
            return false;
    return true;
}

/* The newest one: names have all digits, so their order is that of the numbers. */
static const char *newest_numbered(const struct listing *l)
{
    const char *found = NULL;

    for (size_t i = 0; i < listing_count(l); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if (entry->st.kind == ENTRY_FILE && is_numbered(entry->name))
            found = entry->name;
    }
    return found;
}

static int read_manifest(struct orbax_store *s, struct listing *l, const char *name,
                         struct ocdbt_manifest *out, struct err *e)
{
    CLEANUP_FREE char *data = NULL;
    uint32_t number;
    size_t len;

    if (orbax_files_add(s->files, name, strlen(name), &number, e) < 0 ||
        listing_read(l, name, MAX_MANIFEST, &data, &len, e) < 0 ||
        ocdbt_manifest_parse(s->names, data, len, out, e) < 0)
        return err_wrap(e, "%s", name);
    return 0;
}

/* The one file, or the newest of many that have the number of the version in the name. */
static int find_manifest(struct orbax_store *s, struct listing *l,
                         struct ocdbt_manifest *out, struct err *e)
{
    unsigned char uuid[OCDBT_UUID];
    const char *name;

    if (read_manifest(s, l, MANIFEST, out, e) < 0 || !out->numbered)
        return -e->code;
    memcpy(uuid, out->uuid, sizeof uuid);
    name = newest_numbered(l);
    if (!name) {
        *out = (struct ocdbt_manifest){.empty = true};
        return 0;
    }
    TRY(read_manifest(s, l, name, out, e));
    if (out->numbered || memcmp(uuid, out->uuid, sizeof uuid) != 0 ||
        out->generation != strtoull(name + strlen(NUMBERED), NULL, 16))
        return err_set(e, EBADMSG, "%s is of another store than %s", name, MANIFEST);
    return 0;
}

static int open_ocdbt(struct orbax_store *s, struct listing *l, struct err *e)
{
    const struct ocdbt_io io = {
        .file = orbax_files_add, .read = orbax_files_read, .user = s->files};
    struct ocdbt_manifest manifest;

    TRY(find_manifest(s, l, &manifest, e));
    TRY(ocdbt_open(&manifest, &io, &s->ocdbt, e));
    return find_in_ocdbt(s, e);
}

int orbax_store_open(struct orbax_files *files, struct listing *l,
                     struct orbax_store **out, struct err *e)
{
    CLEANUP(orbax_store_freep) struct orbax_store *s = calloc(1, sizeof *s);

    if (!s || !(s->names = arena_new(MAX_MEMORY)))
        return err_nomem(e);
    s->files = files;
    TRY(orbax_has_ocdbt(l) ? open_ocdbt(s, l, e)
                           : orbax_dirs_each(l, on_directory, s, e));
    if (s->count > 0)
        qsort(s->array, s->count, sizeof *s->array, compare_arrays);
    *out = steal(&s);
    return 0;
}

/* ---- one array ---- */

/* The whole of a value, NUL behind; the caller frees it. -EFBIG. */
static int read_value(const struct orbax_store *s, const struct ocdbt_value *v,
                      size_t max, char **out, size_t *len, struct err *e)
{
    uint64_t size = v->literal ? v->literal_len : v->length;
    CLEANUP_FREE char *text = NULL;

    if (size > max)
        return err_set(e, EFBIG, "%" PRIu64 " bytes, at most %zu are read", size, max);
    text = malloc((size_t)size + 1);
    if (!text)
        return err_nomem(e);
    if (v->literal)
        memcpy(text, v->literal, (size_t)size);
    else
        TRY(orbax_files_read(s->files, v->file, v->offset, (size_t)size, text, e));
    text[size] = '\0';
    *len = (size_t)size;
    *out = steal(&text);
    return 0;
}

static const char *metadata_name(const struct array *a)
{
    return a->shown.zarr3 ? "zarr.json" : ".zarray";
}

/* The text of the array's metadata, and the file that it is in. */
static int read_metadata(const struct orbax_store *s, const struct array *a,
                         char **text, size_t *len, uint32_t *file, struct err *e)
{
    CLEANUP(buf_release) struct buf path = {0};

    if (s->ocdbt) {
        const struct ocdbt_value *v = ocdbt_at(s->ocdbt, a->metadata);

        *file = v->file;
        return read_value(s, v, ZARR_MAX_JSON, text, len, e);
    }
    buf_addf(&path, "%s%s%s", a->shown.name, a->shown.len > 0 ? "/" : "",
             metadata_name(a));
    if (buf_failed(&path))
        return err_nomem(e);
    TRY(orbax_files_add(s->files, path.data, path.len, file, e));
    return listing_read(a->l, metadata_name(a), ZARR_MAX_JSON, text, len, e);
}

/* Errors that say something about the array are its fault, not the scan's. */
static bool is_fault(const struct err *e)
{
    return e->code == EBADMSG || e->code == EFBIG || e->code == ENOENT ||
           e->code == EIO;
}

/* 1: an array, also one that is broken; 0: a group. */
static int load_array(const struct orbax_store *s, const struct array *a,
                      struct zarr_array *out, uint32_t *file, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len = 0;
    int rc;

    if (read_metadata(s, a, &text, &len, file, &why) < 0) {
        *e = why;
        if (!is_fault(&why))
            return -e->code;
        zarr_array_broken(out, "its metadata: %s", why.text);
        return 1;
    }
    if (a->shown.zarr3 && orbax_is_group(text, len))
        return 0;
    rc = a->shown.zarr3 ? zarr_parse_v3(text, len, out, e)
                        : zarr_parse_v2(text, len, out, e);
    return rc < 0 ? rc : 1;
}

/* All values below the array's name. */
static int push_values(const struct orbax_store *s, const struct array *a,
                       struct zarr_chunks *chunks, struct err *e)
{
    CLEANUP(buf_release) struct buf prefix = {0};

    buf_add(&prefix, a->shown.name, a->shown.len);
    if (a->shown.len > 0)
        buf_addc(&prefix, '/');
    if (buf_adds(&prefix, "") < 0)
        return err_nomem(e);
    for (size_t i = ocdbt_lower_bound(s->ocdbt, prefix.data, prefix.len);
         i < ocdbt_count(s->ocdbt); i++) {
        const struct ocdbt_value *v = ocdbt_at(s->ocdbt, i);
        const struct zarr_value value = {
            .kind = v->literal ? ZARR_LITERAL : ZARR_STORED,
            .file = v->file,
            .offset = v->offset,
            .length = v->length,
            .data = v->literal,
            .data_len = v->literal_len,
        };

        if (v->key_len < prefix.len || memcmp(v->key, prefix.data, prefix.len) != 0)
            break;
        TRY(zarr_chunks_add(chunks, v->key + prefix.len, v->key_len - prefix.len,
                            &value, e));
    }
    return 0;
}

static int report_value(struct orbax_store *s, const struct array *a,
                        const struct sink_tensor *about, bool all_chunks, struct err *e)
{
    CLEANUP(zarr_chunks_freep) struct zarr_chunks *chunks = NULL;
    struct zarr_how how = {
        .read = orbax_files_read, .user = s->files, .all_chunks_needed = all_chunks};
    struct zarr_array z;
    int rc = load_array(s, a, &z, &how.file, e);

    if (rc <= 0)
        return rc;
    TRY(zarr_chunks_new(&z, &chunks, e));
    if (!z.why[0])
        TRY(push_values(s, a, chunks, e));
    return zarr_report(&z, chunks, about, &how, s->files->sink, e);
}

static int report_directory(struct orbax_store *s, const struct array *a,
                            const struct sink_tensor *about, bool all_chunks,
                            struct err *e)
{
    char path[PATH_MAX];
    const struct zarr_dir dir = {
        .store = s->files->c->store,
        .root = s->files->c->dir,
        .path = path,
        .metadata = metadata_name(a),
        .all_chunks_needed = all_chunks,
    };
    struct zarr_array z;

    if (store_join(s->files->dir, a->shown.name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", a->shown.name);
    return zarr_dir_report(&dir, about, s->files->sink, &z, e);
}

int orbax_store_report(struct orbax_store *s, size_t i, const struct sink_tensor *about,
                       bool all_chunks, struct err *e)
{
    const struct array *a = &s->array[i];

    return s->ocdbt ? report_value(s, a, about, all_chunks, e)
                    : report_directory(s, a, about, all_chunks, e);
}

/* ---- numbers ---- */

/* The value of the key; NULL: there is none. */
static int open_value(const struct orbax_store *s, const struct buf *key,
                      struct source **out, struct err *e)
{
    size_t i = ocdbt_lower_bound(s->ocdbt, key->data, key->len);
    const struct ocdbt_value *v;
    struct source *file;

    if (i == ocdbt_count(s->ocdbt))
        return 0;
    v = ocdbt_at(s->ocdbt, i);
    if (v->key_len != key->len || memcmp(v->key, key->data, key->len) != 0)
        return 0;
    if (v->literal)
        return source_from_memory(v->literal, v->literal_len, false, v->key, out, e);
    TRY(orbax_files_source(s->files, v->file, &file, e));
    return source_window(file, v->offset, v->length, out, e);
}

/* The stored bytes of the only chunk of an array without dimensions; NULL: none. */
static int open_number(const struct orbax_store *s, const struct array *a,
                       const struct zarr_array *z, struct source **out, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    const char *chunk = z->key_prefix ? "c" : "0";
    struct source *file;
    uint32_t number;

    buf_add(&key, a->shown.name, a->shown.len);
    buf_addf(&key, "%s%s", a->shown.len > 0 ? "/" : "", chunk);
    if (buf_failed(&key))
        return err_nomem(e);
    if (s->ocdbt)
        return open_value(s, &key, out, e);
    if (!listing_find(a->l, chunk))
        return 0;
    TRY(orbax_files_add(s->files, key.data, key.len, &number, e));
    TRY(orbax_files_source(s->files, number, &file, e));
    *out = source_get(file);
    return 0;
}

int orbax_store_number(struct orbax_store *s, size_t i, struct buf *out, struct err *e)
{
    CLEANUP(source_putp) struct source *stored = NULL;
    struct zarr_array z;
    uint32_t file;
    int rc = load_array(s, &s->array[i], &z, &file, e);

    if (rc <= 0)
        return rc;
    if (!orbax_is_number(&z))
        return 0;
    TRY(open_number(s, &s->array[i], &z, &stored, e));
    if (!stored)
        return 0; /* the tensor will tell */
    rc = orbax_number(&z, stored, out, e);
    return rc < 0 ? rc : 1;
}
