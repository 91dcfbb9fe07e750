# SPDX-License-Identifier: MIT
"""Names what reads checkpoints here: readers.py ROOT HEADER DEPFILE.

Writes UFS_READERS, a hash of all sources that decide what an index says of a checkpoint,
so that one made by other sources, of the same version number too, is not believed.
"""
import hashlib
import os
import sys

ROOMS = ("base", "remote", "index", "maps")
ENDINGS = (".c", ".h", ".h.in", ".sql", ".json", ".build")


def sources(root):
    """All files that count, relative to the root, in one order everywhere."""
    found = []
    for room in ROOMS:
        for folder, _, names in os.walk(os.path.join(root, room)):
            found += [os.path.relpath(os.path.join(folder, name), root) for name in names if name.endswith(ENDINGS)]
    return sorted(found)


def main(root, header, depfile):
    files = sources(root)
    whole = hashlib.sha256()
    for name in files:
        with open(os.path.join(root, name), "rb") as f:
            whole.update(f"{name}\0{hashlib.sha256(f.read()).hexdigest()}\n".encode())
    with open(header, "w", encoding="ascii") as f:
        f.write(f'#define UFS_READERS "{whole.hexdigest()[:16]}"\n')
    with open(depfile, "w", encoding="utf-8") as f:
        paths = (os.path.join(root, name).replace(" ", "\\ ") for name in files)
        f.write(f"{header}: {' '.join(paths)}\n")


main(*sys.argv[1:])
