/* SPDX-License-Identifier: MIT */
/* index/names.c - keys, roles and the file names that keys get in the mount. */
#include "index/names.h"

#include "base/utf8.h"

#include <openssl/sha.h>

#include <string.h>

enum {
    HASH_DIGITS = 16,
    TAIL_BYTES = 1 + HASH_DIGITS, /* '~' and the digits */
    UNIT_BYTES = 4,               /* the longest character; an escape has 3 */
};

static const char leaf_suffix[] = ".npy";

/* A word of the role table; how much of a path's component must agree with it. */
struct role_word {
    const char *word;
    enum match { WHOLE, STEM, PREFIX } match;
    enum role role;
};

/*
 * Components of a part's path. STEM: the word, or the word and then something that is no
 * letter (random_states_0.pkl, scheduler.bin; but not training_args.bin). "model" may only
 * have an extension: OLMo's model_and_optim/ holds both, there the keys decide.
 */
static const struct role_word part_words[] = {
    {"model", WHOLE, ROLE_MODEL},         {"pytorch_model", PREFIX, ROLE_MODEL},
    {"consolidated", PREFIX, ROLE_MODEL}, {"weights", WHOLE, ROLE_MODEL},
    {"optim", PREFIX, ROLE_OPTIMIZER},    {"rng", STEM, ROLE_OTHER},
    {"random_states", STEM, ROLE_OTHER},  {"scheduler", STEM, ROLE_OTHER},
    {"scaler", STEM, ROLE_OTHER},         {"sampler", STEM, ROLE_OTHER},
    {"custom", STEM, ROLE_OTHER},         {"train", STEM, ROLE_OTHER},
    {"extra", STEM, ROLE_OTHER},
};

static const struct role_word key_words[] = {
    {"optim", WHOLE, ROLE_OPTIMIZER},
    {"optimizer", WHOLE, ROLE_OPTIMIZER},
    {"optimizers", WHOLE, ROLE_OPTIMIZER},
    {"optimizer_state", WHOLE, ROLE_OPTIMIZER},
    {"optimizer_states", WHOLE, ROLE_OPTIMIZER},
    {"last_optimizer_state", WHOLE, ROLE_OPTIMIZER},
    {"lr_scheduler", WHOLE, ROLE_OTHER},
    {"lr_schedulers", WHOLE, ROLE_OTHER},
    {"scheduler", WHOLE, ROLE_OTHER},
    {"rng", WHOLE, ROLE_OTHER},
    {"loops", WHOLE, ROLE_OTHER},
    {"callbacks", WHOLE, ROLE_OTHER},
    {"dataloader", WHOLE, ROLE_OTHER},
    {"train_state", WHOLE, ROLE_OTHER},
};

static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool equals(const char *s, size_t len, const char *word)
{
    return len == strlen(word) && memcmp(s, word, len) == 0;
}

static bool part_matches(const struct role_word *w, const char *s, size_t len)
{
    size_t n = strlen(w->word);

    if (len < n || memcmp(s, w->word, n) != 0)
        return false;
    if (len == n || w->match == PREFIX)
        return true;
    return w->match == STEM ? !is_letter(s[n]) : s[n] == '.';
}

/* The last component that says anything decides: model/optim.pt is optimizer. */
static bool role_of_part(const char *part, enum role *out)
{
    bool found = false;

    for (const char *s = part; *s;) {
        size_t len = strcspn(s, "/");

        for (size_t i = 0; i < ARRAY_SIZE(part_words); i++) {
            if (part_matches(&part_words[i], s, len)) {
                *out = part_words[i].role;
                found = true;
                break;
            }
        }
        s += len;
        s += strspn(s, "/");
    }
    return found;
}

enum role role_of(const char *part, const char *key, size_t key_len)
{
    enum role role = ROLE_MODEL;
    const char *word;
    size_t pos = 0, len;

    if (part && role_of_part(part, &role))
        return role;
    if (!key_part(key, key_len, &pos, &word, &len))
        return ROLE_MODEL;
    /* "app" is what torch's own examples put round model and optimizer, "dcp" AReaL. */
    if ((equals(word, len, "state") || equals(word, len, "app") ||
         equals(word, len, "dcp")) &&
        !key_part(key, key_len, &pos, &word, &len))
        return ROLE_MODEL;
    for (size_t i = 0; i < ARRAY_SIZE(key_words); i++)
        if (equals(word, len, key_words[i].word))
            return key_words[i].role;
    return ROLE_MODEL;
}

static bool is_module(const char *part, size_t len)
{
    static const char *const names[] = {"_orig_mod", "_checkpoint_wrapped_module",
                                        "_fsdp_wrapped_module", "module"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (equals(part, len, names[i]))
            return true;
    return false;
}

/* The next part that ends in a dot, with its length; 0: the last part is left. */
static size_t inner_part(const char *name, size_t len)
{
    const char *dot = len > 0 ? memchr(name, '.', len) : NULL;

    return dot ? (size_t)(dot - name) + 1 : 0;
}

bool name_has_modules(const char *name, size_t len)
{
    for (size_t n; (n = inner_part(name, len)) > 0; name += n, len -= n)
        if (is_module(name, n - 1))
            return true;
    return false;
}

int name_without_modules(const char *name, size_t len, struct buf *out)
{
    for (size_t n; (n = inner_part(name, len)) > 0; name += n, len -= n)
        if (!is_module(name, n - 1))
            buf_add(out, name, n);
    return buf_add(out, name, len);
}

const char *role_name(enum role r)
{
    switch (r) {
    case ROLE_MODEL:
        return "model";
    case ROLE_OPTIMIZER:
        return "optimizer";
    case ROLE_OTHER:
        break;
    }
    return "other";
}

/* The length of a character that a file name may hold as it is, else 0. */
static size_t plain_char(const char *s, size_t len, bool first)
{
    unsigned char c = (unsigned char)*s;

    if (c < 0x20 || c == 0x7f || c == '/' || c == '%' || (first && c == '.'))
        return 0;
    return utf8_char(s, len);
}

/* One character or one escaped byte of s into `out`; returns the bytes taken from s. */
static size_t encode_unit(const char *s, size_t len, bool escape, char *out,
                          size_t *used)
{
    static const char hex[] = "0123456789ABCDEF";
    size_t n = escape ? 0 : plain_char(s, len, false);

    if (n > 0) {
        memcpy(out, s, n);
        *used = n;
        return n;
    }
    out[0] = '%';
    out[1] = hex[(unsigned char)*s >> 4];
    out[2] = hex[(unsigned char)*s & 15];
    *used = 3;
    return 1;
}

struct encoded {
    char text[NAME_MAX_BYTES];
    size_t len;
    size_t
        cut; /* the longest prefix of whole characters that leaves room for the tail */
    bool whole; /* all of the key is in it */
};

/* How many bytes at the beginning are ASCII that a file name may hold as it is. */
static size_t plain_run(const char *s, size_t len)
{
    size_t n = 0;

    while (n < len && s[n] >= 0x20 && s[n] < 0x7f && s[n] != '/' && s[n] != '%')
        n++;
    return n;
}

/* Takes such a run, as far as there is room; most keys are one. */
static size_t encode_run(const char *s, size_t len, size_t room, struct encoded *out)
{
    size_t n = plain_run(s, MIN(len, room - out->len));

    memcpy(out->text + out->len, s, n);
    if (out->len <= room - TAIL_BYTES)
        out->cut = MIN(out->len + n, room - TAIL_BYTES);
    out->len += n;
    return n;
}

static void encode(const char *s, size_t len, size_t escape_at, size_t room,
                   struct encoded *out)
{
    size_t pos = 0;

    out->len = out->cut = 0;
    while (pos < len) {
        bool escape = pos == escape_at || (pos == 0 && *s == '.');
        size_t used, n, end = pos < escape_at ? MIN(len, escape_at) : len;
        char unit[UNIT_BYTES];

        if (!escape)
            pos += encode_run(s + pos, end - pos, room, out);
        if (pos == len)
            break;
        n = encode_unit(s + pos, len - pos, escape || pos == escape_at, unit, &used);
        if (used > room - out->len)
            break;
        memcpy(out->text + out->len, unit, used);
        out->len += used;
        pos += n;
        if (out->len <= room - TAIL_BYTES)
            out->cut = out->len;
    }
    out->whole = pos == len;
}

/*
 * Does a key that fits look like one that was cut? Then it gets a hash too: else somebody
 * could name a tensor as another one's cut name.
 */
static bool looks_cut(const struct encoded *n, size_t room)
{
    const char *tail = n->text + n->len - TAIL_BYTES;

    if (n->len <= room - UNIT_BYTES || *tail != '~')
        return false;
    for (size_t i = 1; i < TAIL_BYTES; i++)
        if (!memchr("0123456789abcdef", tail[i], 16))
            return false;
    return true;
}

static int add_cut(const struct encoded *n, const char *key, size_t len,
                   struct buf *out)
{
    unsigned char digest[SHA256_DIGEST_LENGTH];

    SHA256((const unsigned char *)key, len, digest);
    buf_add(out, n->text, n->cut);
    buf_addc(out, '~');
    for (size_t i = 0; i < HASH_DIGITS / 2; i++)
        buf_addf(out, "%02x", digest[i]);
    return buf_failed(out);
}

/* `escape_at`: a byte to escape although a name may hold it, or SIZE_MAX. */
static int add_name(const char *s, size_t len, size_t escape_at, const char *suffix,
                    struct buf *out)
{
    size_t room = NAME_MAX_BYTES - strlen(suffix);
    struct encoded n;

    if (len == 0) {
        buf_adds(out, "%empty");
        return buf_adds(out, suffix);
    }
    encode(s, len, escape_at, room, &n);
    if (n.whole && !looks_cut(&n, room))
        buf_add(out, n.text, n.len);
    else
        add_cut(&n, s, len, out);
    return buf_adds(out, suffix);
}

int name_of_key(const char *key, size_t len, const char *suffix, struct buf *out)
{
    return add_name(key, len, SIZE_MAX, suffix, out);
}

int name_of_part(const char *part, size_t len, bool leaf, struct buf *out)
{
    size_t n = sizeof leaf_suffix - 1, dot = SIZE_MAX;

    if (leaf)
        return add_name(part, len, SIZE_MAX, leaf_suffix, out);
    if (len >= n && memcmp(part + len - n, leaf_suffix, n) == 0)
        dot = len - n;
    return add_name(part, len, dot, "", out);
}

bool key_part(const char *key, size_t len, size_t *pos, const char **part,
              size_t *part_len)
{
    const char *dot;

    if (*pos > len)
        return false;
    *part = key + *pos;
    dot = memchr(*part, '.', len - *pos);
    *part_len = dot ? (size_t)(dot - *part) : len - *pos;
    *pos += *part_len + 1;
    return true;
}
