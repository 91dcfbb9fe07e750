/* SPDX-License-Identifier: MIT */
/* index/formats/stand_in.c - what stands in a file's place: pointers, links, texts of links. */
#include "index/formats/stand_in.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/hf/choose.h"
#include "index/sink.h"
#include "remote/listing.h"
#include "remote/source.h"

enum {
    /* Specification of Git LFS: a pointer is less than 1024 bytes, and has these at least. */
    POINTER_MIN = 100,
    POINTER_MAX = 1023,
    LINK_MAX = 512, /* longer ones are no links that people make */
    LOOKS = 4096,   /* of one directory: whoever asks waits for it */
};

static const char pointer[] = "version https://git-lfs.github.com/spec/v1\n";

static const char *suffix_of(const char *name)
{
    const char *slash = strrchr(name, '/'), *dot = strrchr(slash ? slash : name, '.');

    return dot ? dot : "";
}

static bool is_weights(const char *name)
{
    static const char *const suffixes[] = {
        ".safetensors", ".bin", ".pt",      ".pth", ".ckpt", ".gguf",
        ".distcp",      ".npz", ".msgpack", ".npy", ".sft",  ".metadata"};

    for (size_t i = 0; i < ARRAY_SIZE(suffixes); i++)
        if (strcmp(suffix_of(name), suffixes[i]) == 0)
            return true;
    return false;
}

static bool is_pointer(const char *text, size_t len)
{
    return len >= sizeof pointer - 1 && memcmp(text, pointer, sizeof pointer - 1) == 0;
}

static int say_pointer(const char *name, struct err *why)
{
    err_set(why, ENOENT, "%s is a pointer of Git LFS, not the file itself", name);
    return err_hint(why, "git lfs pull gets it");
}

/* A path and nothing else, to a file of the same kind. */
static bool is_text_of_link(const char *name, const char *text, size_t len)
{
    char path[LINK_MAX + 1];

    if (len == 0 || len > LINK_MAX || !memchr(text, '/', len))
        return false;
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)text[i] < ' ' || text[i] == 127 || strchr("{}\"<>", text[i]))
            return false;
    memcpy(path, text, len);
    path[len] = '\0';
    return suffix_of(name)[0] && strcmp(suffix_of(path), suffix_of(name)) == 0;
}

static int say_text(const char *name, const char *text, size_t len, struct err *why)
{
    err_set(why, ENOENT, "%s holds the text of a link, %.*s, in place of the file",
            name, (int)len, text);
    return err_hint(why,
                    "git writes it so where core.symlinks is false: make it a link; "
                    "one that leads out of the source needs -o follow_symlinks");
}

static bool is_link_to_nothing(struct listing *l, const char *name, struct err *why)
{
    CLEANUP(source_putp) struct source *src = NULL;
    int rc = listing_open_link(l, name, &src, why);

    if (rc == -ENOENT)
        err_set(why, ENOENT, "%s is a link to a file that is not there", name);
    return rc == -ENOENT || rc == -EXDEV;
}

bool stand_in_is(struct listing *l, const struct listing_entry *entry, struct err *why)
{
    char text[POINTER_MAX];
    uint64_t size = entry->st.id.size;
    size_t len = 0;

    if (entry->st.kind == ENTRY_OTHER && entry->st.is_link)
        return is_link_to_nothing(l, entry->name, why);
    if (entry->st.kind != ENTRY_FILE || size > POINTER_MAX ||
        listing_peek(l, entry->name, text, sizeof text, &len) < 0 || len != size)
        return false;
    if (is_pointer(text, len))
        return say_pointer(entry->name, why) < 0;
    return is_text_of_link(entry->name, text, len) &&
           say_text(entry->name, text, len, why) < 0;
}

int stand_in_find(struct listing *l, const char *only, struct err *e)
{
    struct err why = {0};

    for (size_t i = 0; i < MIN(listing_count(l), (size_t)LOOKS); i++) {
        const struct listing_entry *entry = listing_at(l, i);

        if ((only ? strcmp(entry->name, only) == 0 : is_weights(entry->name)) &&
            stand_in_is(l, entry, &why)) {
            *e = why;
            return -ENOENT;
        }
    }
    return 0;
}

/* By its name, the same model once more: of another library, or in another form. */
static bool is_other_form(const char *name)
{
    static const struct {
        const char *stem, *suffix;
    } forms[] = {
        {"model", ".safetensors"},
        {"model", ".bin"},
        {"pytorch_model", ".bin"},
        {"pytorch_model", ".safetensors"},
        {"consolidated", ".safetensors"},
        {"consolidated", ".pth"},
        {"tf_model", ".h5"},
        {"flax_model", ".msgpack"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(forms); i++)
        if (strncmp(name, forms[i].stem, strlen(forms[i].stem)) == 0 &&
            strcmp(suffix_of(name), forms[i].suffix) == 0)
            return true;
    return false;
}

/* Nothing is lost with it where the model was found whole: then it is none of its files. */
static bool is_spare(struct listing *l, const struct listing_entry *entry)
{
    return entry->st.kind == ENTRY_FILE && is_other_form(entry->name) &&
           hf_choice_look(l) == HF_WHOLE;
}

/* A link is no loss by itself: where the model lacks its file, the driver says so. */
static int warn(struct sink *sink, const struct listing_entry *entry,
                const struct err *why, struct err *e)
{
    char line[1400];

    if (sink_warning(sink, entry->st.is_link ? "link" : "missing-file", "%s",
                     err_line(why, line, sizeof line)) < 0)
        return err_nomem(e);
    return 0;
}

static int pass(struct sink *sink, const struct err *why, struct err *e)
{
    return sink_passed_over(sink, "%s; the model is whole without it", why->text) < 0
               ? err_nomem(e)
               : 0;
}

struct below {
    struct listing *l;
    struct sink *sink;
};

/* A storage file in a directory of its own. */
static int see_storage(void *user, const char *name, struct err *e)
{
    const struct below *b = user;
    const char *slash = strrchr(name, '/');
    char dir[PATH_MAX];
    struct listing *l;
    const struct listing_entry *entry;
    struct err why = {0};

    if (!slash || slash - name >= (ptrdiff_t)sizeof dir)
        return 0;
    memcpy(dir, name, (size_t)(slash - name));
    dir[slash - name] = '\0';
    l = listing_below(b->l, dir);
    entry = l ? listing_find(l, slash + 1) : NULL;
    if (!entry || entry->st.kind != ENTRY_FILE || !stand_in_is(l, entry, &why))
        return 0;
    err_wrap(&why, "%s", dir);
    return warn(b->sink, entry, &why, e);
}

int stand_in_report(struct listing *l, const char *only, struct sink *sink,
                    struct err *e)
{
    struct below below = {l, sink};

    for (size_t i = 0; i < MIN(listing_count(l), (size_t)LOOKS); i++) {
        const struct listing_entry *entry = listing_at(l, i);
        struct err why = {0};
        int rc;

        if (only && strcmp(entry->name, only) != 0)
            continue;
        if (!stand_in_is(l, entry, &why))
            continue;
        rc = !only && is_spare(l, entry) ? pass(sink, &why, e)
                                         : warn(sink, entry, &why, e);
        if (rc < 0)
            return rc;
    }
    return only ? 0 : sink_small_files(sink, POINTER_MIN, 200, see_storage, &below, e);
}
