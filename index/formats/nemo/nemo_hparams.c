/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_hparams.c - the model's configuration in a training checkpoint's pickle. */
#include "index/formats/nemo/nemo_hparams.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/pickle/pickle.h"
#include "index/formats/torch/torch_walk.h"

/* The entry of an instance's state; containers and nodes of OmegaConf keep all in a dict. */
static bool take_state(const struct pv *v, const char *entry, struct pv *out)
{
    struct pv state = pv_state(v);

    return state.kind == PV_DICT && pv_dict_get(&state, entry, out);
}

static bool is_node(const struct pv *v)
{
    /* omegaconf/nodes.py, 2.0 to 2.3 */
    static const char *const names[] = {"AnyNode",     "StringNode", "IntegerNode",
                                        "BooleanNode", "FloatNode",  "EnumNode",
                                        "PathNode",    "BytesNode"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (pv_is(v, "omegaconf.nodes", names[i]))
            return true;
    return false;
}

/* A plain dict, a DictConfig or Lightning's AttributeDict: its items. */
static bool take_mapping(const struct pv *v, struct pv *items)
{
    static const char *const modules[] = {"pytorch_lightning.utilities.parsing",
                                          "lightning_fabric.utilities.data",
                                          "lightning.fabric.utilities.data"};

    if (torch_mapping(v, items))
        return items->kind == PV_DICT;
    if (v->kind != PV_OBJECT)
        return false;
    if (pv_is(v, "omegaconf.dictconfig", "DictConfig"))
        return take_state(v, "_content", items) && items->kind == PV_DICT;
    for (size_t i = 0; i < ARRAY_SIZE(modules); i++) {
        if (pv_is(v, modules[i], "AttributeDict")) {
            *items = pv_dict_items(v);
            return items->kind == PV_DICT;
        }
    }
    return false;
}

static void write_scalar(struct pv v, struct buf *out)
{
    const char *text = "?";
    size_t len = 1;

    if (v.kind == PV_OBJECT && is_node(&v) && !take_state(&v, "_val", &v))
        v = (struct pv){.kind = PV_LIST};
    if (v.kind == PV_NONE) {
        buf_adds(out, "null");
    } else if (v.kind == PV_BOOL) {
        buf_adds(out, v.b ? "true" : "false");
    } else if (v.kind == PV_INT) {
        buf_addf(out, "%" PRId64, v.i);
    } else {
        if (v.kind == PV_STR)
            text = pv_bytes(&v, &len);
        buf_add_json(out, text, len);
    }
}

static void begin_member(struct buf *out, const struct pv *key, bool first)
{
    size_t len;
    const char *text = pv_bytes(key, &len);

    buf_adds(out, first ? "" : ", ");
    buf_add_json(out, text, len);
    buf_adds(out, ": ");
}

static void write_flat(const struct pv *items, struct buf *out)
{
    bool first = true;

    buf_addc(out, '{');
    for (size_t i = 0; i < pv_count(items); i++) {
        struct pv key = pv_key_at(items, i);

        if (key.kind != PV_STR)
            continue;
        begin_member(out, &key, first);
        write_scalar(pv_value_at(items, i), out);
        first = false;
    }
    buf_addc(out, '}');
}

/* Two levels are all that is asked for: nothing goes as deep as the file does. */
static void write_config(const struct pv *items, struct buf *out)
{
    bool first = true;

    buf_addc(out, '{');
    for (size_t i = 0; i < pv_count(items); i++) {
        struct pv key = pv_key_at(items, i), value = pv_value_at(items, i), below;

        if (key.kind != PV_STR)
            continue;
        begin_member(out, &key, first);
        first = false;
        if ((pv_str_is(&key, "encoder") || pv_str_is(&key, "decoder")) &&
            take_mapping(&value, &below))
            write_flat(&below, out);
        else
            write_scalar(value, out);
    }
    buf_addc(out, '}');
}

int nemo_hparams_json(const struct pv *root, struct buf *out, struct err *e)
{
    struct pv items, value, config, inner;

    if (!torch_mapping(root, &items) || items.kind != PV_DICT ||
        !pv_dict_get(&items, "hyper_parameters", &value) ||
        !take_mapping(&value, &config))
        return err_set(e, ENOENT, "it has no hyper_parameters that are a dict");
    if (pv_dict_get(&config, "cfg", &value) && take_mapping(&value, &inner))
        config = inner;
    write_config(&config, out);
    return buf_failed(out) ? err_nomem(e) : 0;
}
