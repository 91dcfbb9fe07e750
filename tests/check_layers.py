#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Prints every #include that points back: check_layers.py SOURCE_ROOT | --self-test.

base <- remote <- index <- {index/formats, gpu} <- {save, lib} <- fs <- cli; and each library is for the
one place that DESIGN gives it.
"""
import fnmatch
import pathlib
import re
import sys
import tempfile

RANK = {"base": 0, "remote": 1, "index": 2, "index/formats": 3, "gpu": 3, "save": 4, "lib": 4, "fs": 5, "cli": 6}
LIBRARIES = {  # header: the files that may include it
    "fuse*": "fs/*",
    "sqlite3*.h": "index/catalog*",
    "cjson/*": "base/json.c",
    "curl/*": "remote/http_wire*",
    "expat.h": "remote/xml.c",
    "yaml.h": "base/yaml_tree.c",
    "seccomp.h": "base/confine.c",
    "cuda*": "gpu/*",
    "dlfcn.h": "gpu/driver.c",
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def room_of(path):
    folder = str(pathlib.PurePosixPath(path).parent)
    while folder not in RANK and "/" in folder:
        folder = folder.rsplit("/", 1)[0]
    return folder if folder in RANK else None


def bad_include(path, quote, header):
    """Why this include must not be, or None."""
    for pattern, allowed in LIBRARIES.items():
        if fnmatch.fnmatch(header, pattern) and not fnmatch.fnmatch(path, allowed):
            return f"only {allowed} may"
    here, there = room_of(path), room_of(header)
    if quote == "<" or there is None or here == there:
        return None
    return None if RANK[there] < RANK[here] else f"{here} stands below or beside {there}"


def check(root):
    """All bad arrows below root, and how many files were read."""
    found, files = [], 0
    for path in sorted(p for room in ("base", "remote", "index", "gpu", "save", "lib", "fs", "cli")
                       for p in (root / room).rglob("*")):
        if path.suffix not in (".c", ".h", ".cu"):
            continue
        files += 1
        name = path.relative_to(root).as_posix()
        for quote, header in INCLUDE.findall(path.read_text(encoding="utf-8")):
            why = bad_include(name, quote, header)
            if why:
                found.append(f"{name} includes {header}: {why}")
    return found, files


def self_test():
    cases = {  # file: (text, is it bad)
        "base/a.c": ('#include "remote/x.h"\n', True),
        "base/json.c": ("#include <cjson/cJSON.h>\n", False),
        "base/other.c": ("#include <cjson/cJSON.h>\n", True),
        "remote/a.c": ('#include "base/x.h"\n#include <stdio.h>\n', False),
        "remote/b.c": ('  #  include "index/plan.h"\n', True),
        "index/a.h": ('#include "index/formats/format.h"\n', True),
        "index/b.c": ("#include <sqlite3.h>\n", True),
        "index/catalog_open.c": ("#include <sqlite3.h>\n", False),
        "index/formats/a.c": ('#include "gpu/core.h"\n', True),
        "index/formats/b.c": ('#include "index/plan.h"\n#include "remote/x.h"\n', False),
        "gpu/a.cu": ('#include "index/formats/format.h"\n', True),
        "gpu/b.c": ('#include "fs/fs.h"\n', True),
        "gpu/c.c": ("#include <fuse3/fuse_lowlevel.h>\n", True),
        "fs/a.c": ('#include "gpu/assemble.h"\n#include <fuse_lowlevel.h>\n', False),
        "fs/b.c": ('#include "cli/cli.h"\n', True),
        "cli/a.c": ('#include "fs/fs.h"\n#include "base/x.h"\n', False),
    }
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, (text, _) in cases.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        found = {line.split()[0] for line in check(root)[0]}
    wrong = [name for name, (_, bad) in cases.items() if bad != (name in found)]
    for name in wrong:
        print(f"self-test: wrong verdict on {name}")
    return 1 if wrong else 0


def main(args):
    if args == ["--self-test"]:
        return self_test()
    if len(args) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    found, files = check(pathlib.Path(args[0]))
    print("\n".join(found + [f"{files} files, {len(found)} arrows that point back"]))
    return 1 if found or files == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
