/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_megatron.c - texts of a Megatron checkpoint: names, settings. */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/megatron/megatron.h"
#include "index/formats/megatron/megatron_rules.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try_cell(const char *name, size_t len)
{
    struct megatron_cell c;
    struct megatron_facts facts = {0};

    megatron_learn_cell(&facts, name, len);
    if (!megatron_cell(name, len, &c))
        return;
    assert(c.key > 0 && c.key < len && c.n > 0 && c.n <= MEGATRON_MAX_GRID);
    assert(name[c.key] == '/');
}

static void check_number(const struct megatron_number *n, size_t len)
{
    assert(n->len <= 9 && n->at + n->len <= len);
}

static void try_name(const char *text, size_t len)
{
    struct megatron_name n;

    megatron_name(text, len, &n);
    check_number(&n.layer, len);
    check_number(&n.expert, len);
}

/* The topology is JSON, whatever the settings are. */
static void try_settings(const char *text, size_t len)
{
    CLEANUP(buf_release) struct buf out = {0};
    struct megatron_facts facts = {0};

    megatron_learn_common(&facts, text, len);
    megatron_learn_config(&facts, text, len);
    megatron_topology(&facts, &out);
    assert(!facts.has_iteration || facts.iteration >= 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;

    try_cell(text, size);
    try_name(text, size);
    try_settings(text, size);
    megatron_role(text, size);
    return 0;
}
