#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""pjdfstest on a mount for writing: on storage names, which are the disk.

    PJDFSTEST=~/pjdfstest UNSHARD=build/cli/unshard tests/public/pjdfstest.py [TEST ...] [--write]

As root, on a Linux. $PJDFSTEST is a checkout of github.com/pjd/pjdfstest in which `autoreconf -ifs && ./configure && make` was
run. pjdfstest.expected has the assertions that hold, of all, for each file.
"""
import os
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
import expected  # noqa: E402
from mountlib import Mount, fresh_directory, make_tensors, write_checkpoint  # noqa: E402

NOT_MADE = {"mkfifo": "ENOTSUP", "mknod": "ENOTSUP", "bind": "ENOTSUP", "symlink": "EPERM"}  # docs/semantics.md, "What there is not"
TRIED = re.compile(r"^not ok \d+ - tried '(?:-\S+ \S+ )*(\w+)[^']*', expected (\S+), got (\S+)", re.M)


def run_one(path, where):
    """The assertions that hold, and how many there are, "31/119"; and why the others do not."""
    done = subprocess.run(["sh", str(path)], cwd=where, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False,
                          env={**os.environ, "LC_ALL": "C"})
    plan = re.search(r"^1\.\.(\d+)", done.stdout, re.M)
    refused, other = set(), set()
    for call, want, got in TRIED.findall(done.stdout):
        if got in (NOT_MADE.get(call), {"ENOTSUP": "EOPNOTSUPP"}.get(NOT_MADE.get(call))):
            refused.add(call)
        elif got != "ENOENT" or not refused:  # else: what was not made is not there
            other.add(f"{call} gives {got}, not {want}")
    why = [f"refused: {', '.join(sorted(refused))}"] if refused else []
    return f"{len(re.findall(r'^ok ', done.stdout, re.M))}/{plan[1] if plan else '?'}", "; ".join(why + sorted(other)[:4])


def main():
    suite = pathlib.Path(expected.place_of("PJDFSTEST", "pjdfstest", "tests/misc.sh")) / "tests"
    if os.geteuid() != 0:
        print("1..0 # SKIP needs root")
        sys.exit(77)
    asked = [a for a in sys.argv[1:] if not a.startswith("-")]
    tests = sorted(str(p.relative_to(suite)) for p in suite.glob("*/*.t"))
    results, reasons = {}, {}
    with fresh_directory() as t:
        write_checkpoint(t + "/run/step1", make_tensors(1))
        os.makedirs(t + "/run/work")
        with Mount(t + "/run", t + "/mnt", "rw,allow_other") as m:
            for name in asked or tests:
                results[name], reasons[name] = run_one(suite / name, m / "work")
                print(f"{name} {results[name]} {reasons[name]}", flush=True)
    expected.judge("pjdfstest", "pjdfstest in a directory of a mount for saving: assertions that hold, of all", results,
                   lambda name, _: reasons[name])


if __name__ == "__main__":
    main()
