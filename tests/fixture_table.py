#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Mounts each fixture of tests/data and holds every view against what the framework read.

    fixture_table.py [--json] [NAME ...]      all fixtures without a NAME

`bytes` are those of raw/ that were read and hashed; each tensor is read again as .npy, in
tree/ and in its role's safetensors file (check_mount.py). Closes on `N passed, N failed`.
"""
import contextlib
import io
import json
import pathlib
import sys

import check_mount
import mounted


def bytes_below(mnt):
    return sum(f.stat().st_size for raw in pathlib.Path(mnt).rglob("raw") for f in raw.rglob("*") if f.is_file())


def check(source, expected):
    """(tensors expected, bytes read, [what is wrong])"""
    tensors = sum(len(json.loads(e.read_text(encoding="utf-8"))["tensors"]) for e in expected)
    said = io.StringIO()
    try:
        with mounted.mounted(source) as mnt:
            with contextlib.redirect_stdout(said):
                status = check_mount.main(str(mnt), [str(e) for e in expected])
            size = bytes_below(mnt)
    except (AssertionError, OSError) as e:
        return tensors, 0, [str(e)]
    return tensors, size, said.getvalue().splitlines() if status else []


def main(args):
    as_json = "--json" in args
    names = [a for a in args if a != "--json"]
    rows, failed = [], 0
    if not as_json:
        print(f"{'fixture':<36} {'tensors':>8} {'bytes':>12}  result")
    for name, source, expected in mounted.fixtures():
        if names and name not in names:
            continue
        tensors, size, wrong = check(source, expected)
        failed += bool(wrong)
        rows.append({"fixture": name, "tensors": tensors, "bytes": size, "wrong": wrong})
        if not as_json:
            print(f"{name:<36} {tensors:>8} {size:>12}  {'WRONG' if wrong else 'same'}", flush=True)
            for line in wrong[:20]:
                print("   ", line)
    if as_json:
        json.dump({"schema": 1, "fixtures": rows}, sys.stdout, indent=1)
        print()
    else:
        print(f"{sum(r['tensors'] for r in rows)} tensors, {sum(r['bytes'] for r in rows)} bytes")
        print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    if not mounted.can_mount():
        print("/dev/fuse is not to be had: skipped")
        sys.exit(77)
    sys.exit(main(sys.argv[1:]))
