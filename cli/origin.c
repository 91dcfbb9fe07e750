/* SPDX-License-Identifier: MIT */
/* cli/origin.c - where a tensor comes from, and what of a checkpoint is missing. */
#include "cli/origin.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "cli/cli.h"

enum { ORIGIN_MEMORY = 1 << 20 };

int cli_origin_of(struct cli *c, struct reading *s, const struct checkpoint_info *info,
                  const struct tensor_info *t, struct cli_origin *out)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(ORIGIN_MEMORY);
    struct catalog_file file = {0};
    const char *rule = NULL;
    int ret = a ? 0 : err_nomem(&c->err);

    buf_clear(&out->file);
    buf_clear(&out->rule);
    if (ret == 0 && t->first_file >= 0)
        ret = catalog_file(s->catalog, info->id, (uint32_t)t->first_file, a, &file,
                           &c->err);
    if (ret == 0)
        ret = catalog_rule(s->catalog, info->id, t, a, &rule, &c->err);
    if (ret < 0)
        return ret;
    if (file.path)
        buf_adds(&out->file, file.path);
    if (rule)
        buf_adds(&out->rule, rule);
    else
        buf_addf(&out->rule, "format %s%s%s", info->format,
                 info->metadata_file ? ", by " : "",
                 info->metadata_file ? info->metadata_file : "");
    return buf_failed(&out->file) || buf_failed(&out->rule) ? err_nomem(&c->err) : 0;
}

int cli_origin_text(const struct cli_origin *o, const struct tensor_info *t,
                    struct buf *out)
{
    if (o->file.len)
        buf_add(out, o->file.data, o->file.len);
    else
        buf_adds(out, "no file");
    if (t->chunks > 1)
        buf_addf(out, ", the first of %" PRIu64 " chunks", t->chunks);
    buf_addf(out, ": %s", o->rule.data ? o->rule.data : "");
    return buf_failed(out);
}

void cli_origin_json(const struct cli_origin *o)
{
    fputs(", \"origin\": {\"file\": ", stdout);
    if (o->file.len)
        out_json(stdout, o->file.data, o->file.len);
    else
        fputs("null", stdout);
    fputs(", \"rule\": ", stdout);
    out_json(stdout, o->rule.data, o->rule.len);
    putchar('}');
}

void cli_origin_release(struct cli_origin *o)
{
    buf_release(&o->file);
    buf_release(&o->rule);
}

/* ---- what is missing ---- */

struct loss {
    struct buf *first;
    uint64_t count;
};

static int see_warning(void *user, const char *code, const char *text)
{
    struct loss *l = user;

    if (warning_is_loss(code) && l->count++ == 0)
        buf_adds(l->first, text);
    return 0;
}

int cli_origin_losses(struct cli *c, struct reading *s, int64_t checkpoint,
                      uint64_t *count, struct buf *first)
{
    struct loss l = {.first = first};
    int ret = catalog_warnings(s->catalog, checkpoint, see_warning, &l, &c->err);

    *count = l.count;
    return ret == 0 && buf_failed(first) ? err_nomem(&c->err) : ret;
}
