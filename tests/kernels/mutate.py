#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Do the tests of gathers notice a broken program? mutate.py [NUMBER ...]

Breaks a copy of the tree in one place at a time, by the list below or those entries of it,
builds it and expects one of the tests to fail. Takes half an hour: no part of the test run. Ends
with how many breaks nobody noticed, and status 1 if there are any.
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = ["kernels/test_cast", "kernels/test_gather", "kernels/test_device"]
STANDIN = "tests/kernels/driver/libcuda.so.1"

BREAKS = [  # file, text that stands there once, what it becomes
    # index arithmetic and the kernel's body
    ("gpu/core.h", "from += i * (uint64_t)b->src_step[k];", "from += i * b->dst_step[k];"),
    ("gpu/core.h", "row = left;", "row = i;"),
    ("gpu/core.h", "if (box[middle].first_tile <= tile)", "if (box[middle].first_tile < tile)"),
    ("gpu/core.h", "s.end = s.end < b->run ? s.end : b->run;", ""),
    ("gpu/core.h", "end = end < b->rows ? end : b->rows;", ""),
    ("gpu/core.h",
     "row = tile * b->rows_per_tile + lane / side",
     "row = tile * b->rows_per_tile + lane % side"),
    ("gpu/core.h", "i + 3 * s->step < s->end", "i + 2 * s->step < s->end"),
    ("gpu/core.h", "if ((b->flags & CORE_CONJ) && (column & 1))", "if (b->flags & CORE_CONJ)"),
    ("gpu/core.h", "v = core_swapped(v, b->component);", "v = core_swapped(v, 8);"),
    ("gpu/core.h", "if (scale && i >= until)", "if (scale && i > until)"),
    ("gpu/core.h",
     "|= (uint64_t)((const core_u8 *)(uintptr_t)at)[i] << 8 * i",
     "|= (uint64_t)((const core_u8 *)(uintptr_t)at)[i] << 8 * (n - 1 - i)"),
    # casts and factors
    ("gpu/cast_core.h", "(rest == half && (q & 1)) ? 1u : 0u);\n}", "rest == half ? 1u : 0u);\n}"),
    ("gpu/cast_core.h", "(lost ? 1u : 0u);", "0u;"),
    ("gpu/cast_core.h", "return sign | (r < limit ? r : limit);", "return sign | r;"),
    ("gpu/cast_core.h",
     "uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16",
     "uint32_t rounded = (u + 0x8000u) >> 16"),
    ("gpu/cast_core.h", "quiet = u >> 16 | 0x40u;", "quiet = u >> 16;"),
    ("gpu/cast_core.h", "steps = t->dim - i;", "steps = t->dim;"),
    ("gpu/cast_core.h", "cast_divide(i + t->origin, t->block);", "cast_divide(i, t->block);"),
    ("gpu/cast_core.h", "*count = steps * t->stride - within;", "*count = steps * t->stride;"),
    ("gpu/cast.c",
     "uint32_t r = a < least ? small : normal;",
     "uint32_t r = a < least >> 1 ? small : normal;"),
    ("gpu/cast.c",
     "r = a >= 0x0f800000u ? a | CAST_F32_INFINITY : r;",
     "r = a > 0x0f800000u ? a | CAST_F32_INFINITY : r;"),
    ("gpu/cast.c", "bool odd = c->to != CAST_F32", "bool odd = c->to == CAST_F32"),
    ("gpu/cast.c",
     "        at += part;\n        n -= part;\n    }\n}\n\n/* ---- from",
     "        n -= part;\n    }\n}\n\n/* ---- from"),
    # boxes
    ("gpu/boxes.c", "src |= (uint64_t)b->src_step[k];", ""),
    ("gpu/boxes.c", "b->src += steps * (uint64_t)b->src_step[k];", ""),
    ("gpu/boxes.c", "b->dst += steps * b->dst_step[k];", "b->dst += steps;"),
    ("gpu/boxes.c", "below += (n - 1) * step;", "below += n * step;"),
    ("gpu/boxes.c", "n -= n % GRAIN;", "n -= 1;"),
    ("gpu/boxes.c", "w.box.dst += dst / from * to;", "w.box.dst += dst;"),
    ("gpu/boxes.c", "b.dst = op->dst / from * to;", "b.dst = op->dst;"),
    ("gpu/boxes.c",
     "        step *= b->count[k];\n    }\n}\n\nuint64_t box_direct",
     "    }\n}\n\nuint64_t box_direct"),
    # slots
    ("gpu/slots.c", "part->lines.length = grown;", ""),
    ("gpu/slots.c", "l->first - end >= JOIN_GAP", "l->first - end >= 1ull << 40"),
    ("gpu/slots.c", "b->used = part->at + grown;", ""),
    ("gpu/slots.c", "p->w->work[part->first].source != w->source", "false"),
    ("gpu/slots.c", "if (b->count && b->used + box_footprint(&l) > p->room)", "if (false)"),
    ("gpu/slots.c", "next + r->lines->length - first > SLOT_BOUNCE", "false"),
    # the pipeline
    ("gpu/device_load.c", "ret = DRIVER_CALL(&l->d->driver, e, event_wait, s->event);", "ret = 0;"),
    ("gpu/device_load.c",
     "int waited = DRIVER_CALL(&g->l->d->driver, &late, stream_wait, g->f->stream);",
     "int waited = 0;"),
    ("gpu/device_load.c", "s->busy = true;", "s->busy = false;"),
    ("gpu/device_load.c", "scale.value = *out + FACTORS_AT;", ""),
    ("gpu/device_load.c", "    return ret < 0 ? ret : check_all(job, n, e);", "    return ret;"),
    # what is checked before
    ("gpu/gather.c", "if (p->source >= m->r->sources)", "if (p->source > m->r->sources)"),
    ("gpu/gather.c", "if (ret == 0 && step != m->r->scale->count)", "if (false)"),
    ("gpu/gather.c", ".origin = m->start[k],", ".origin = 0,"),
    ("gpu/gather.c", "start[k] = from - m->start[k];", "start[k] = from;"),
    ("gpu/gather_host.c", "t->first = h->windows;", "t->first = 0;"),
    ("gpu/gather_host.c", "off / g->stored_unit);", "0);"),
]


def run(command, folder, limit):
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "takes too long"
    return None if done.returncode == 0 else f"status {done.returncode}"


def noticed(tree):
    """Which test failed and how; None: none did."""
    for test in TESTS:
        arguments = [STANDIN, "60"] if test.endswith("device") else []
        why = run([f"tests/{test}", *arguments], tree / "build", 120)
        if why:
            return f"{test}: {why}"
    return None


def copy_tree(tree):
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                           check=True)
    for name in names.stdout.splitlines():
        if name.startswith("tests/data/") or not (ROOT / name).is_file():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)


def build(tree):
    targets = ["tests/" + test for test in TESTS] + [STANDIN]
    return run(["ninja", "-C", "build", "-j2", *targets], tree, 900)


def main(arguments):
    numbers = [int(a) for a in arguments] or range(len(BREAKS))
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        copy_tree(tree)
        why = run(["meson", "setup", "build", "-Dcuda=disabled", "-Dtests=enabled",
                   "-Db_sanitize=address,undefined", "-Db_lundef=false",
                   "-Dc_args=-fno-sanitize-recover=undefined"], tree, 300)
        why = why or build(tree) or noticed(tree)
        if why:
            print(f"the tree as it is: {why}")
            return 1
        for number in numbers:
            name, old, new = BREAKS[number]
            path = tree / name
            text = path.read_text(encoding="utf-8")
            if text.count(old) != 1:
                print(f"{number}: {name} has {text.count(old)} times: {old}")
                return 1
            path.write_text(text.replace(old, new), encoding="utf-8")
            how = build(tree)
            how = f"does not build: {how}" if how else noticed(tree)
            survived += not how or how.startswith("does not build")
            line = old.strip().splitlines()[0]
            print(f"{number}: {how or 'SURVIVED'}: {name}: {line}", flush=True)
            path.write_text(text, encoding="utf-8")
    print(f"{survived} of {len(numbers)} breaks were not noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
