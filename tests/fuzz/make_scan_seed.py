# SPDX-License-Identifier: MIT
"""Writes a directory as a seed of fuzz_scan: make_scan_seed.py DIR OUTPUT (memory_store.h)."""
import os
import sys


def records(root):
    for where, dirs, files in os.walk(root):
        dirs.sort()
        for name in sorted(files):
            path = os.path.join(where, name)
            with open(path, "rb") as f:
                data = f.read()
            shown = os.path.relpath(path, root).encode()
            if len(shown) > 255 or len(data) >= 1 << 24:
                sys.exit(f"{path}: too long")
            yield bytes([len(shown)]) + len(data).to_bytes(3, "little") + shown + data


with open(sys.argv[2], "wb") as out:
    out.writelines(records(sys.argv[1]))
