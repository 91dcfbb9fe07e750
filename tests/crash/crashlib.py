# SPDX-License-Identifier: MIT
"""What the crash tests share: a program under faults.c, which operations to spoil, whole trees.

$FAULTS is the library of faults.c. What is tried is a sample with a fixed seed; CRASH_POINTS=all tries every operation,
CRASH_STATES=N takes N states of the disk instead of a few, CRASH_SEED=S another sample.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import main, same  # noqa: E402

FAULTS = os.environ["FAULTS"]
POINTS = os.environ.get("CRASH_POINTS", "4")
STATES = int(os.environ.get("CRASH_STATES", "6"))
SEED = os.environ.get("CRASH_SEED", "1")
ENOSPC, EIO = 28, 5


def faulty(root, cache, **what):
    """The environment of a program that is watched and spoilt: at=N, do=ACTION, log=FILE, all=1, off=FILE."""
    env = {**os.environ, "XDG_CACHE_HOME": cache, "LD_PRELOAD": FAULTS, "UFS_FAULT_ROOT": root}
    if "verify_asan_link_order" not in env.get("ASAN_OPTIONS", ""):
        env["ASAN_OPTIONS"] = env.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    for name, value in what.items():
        env["UFS_FAULT_" + name.upper()] = str(value)
    return env


def same_tree(what, got, want):
    same(what + ": names", sorted(got), sorted(want))
    for name, data in want.items():
        same(f"{what}: {name}", got[name], data)


def points(rnd, recording, share=1):
    """Numbers of operations to spoil: those round the rename that publishes, and some of the others."""
    ops = recording.ops
    if POINTS == "all":
        return range(1, len(ops) + 1)
    count = max(2, int(POINTS) // share)
    half = count // 2
    rename = max(op.index for op in ops if op.kind == "R") + 1
    first = max(1, rename - (half - 1) // 2)
    near = range(first, min(first + half, len(ops) + 1))
    return sorted({*near, *rnd.sample(range(1, len(ops) + 1), count - half)})


def run(tests):
    main(tests, 1200 if POINTS != "all" and STATES < 100 else 1000000)
