# SPDX-License-Identifier: MIT
"""What a suite of others gives on a mount and on the disk below it: SUITE.expected lists the tests where these differ.

    chmod/00.t      89/119   refused: bind, mkfifo, mknod

A name, what it gave on the mount, and why that is not what the disk gives. Any other difference is a failure; so is a test of the
list that gives what the disk gives.
"""
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent


def place_of(variable, *needed):
    """The suite's folder, from the environment; ends the program as skipped when it is not there."""
    path = os.environ.get(variable)
    missing = [n for n in needed if not path or not os.path.exists(os.path.join(path, n))]
    if not path or missing:
        print(f"1..0 # SKIP ${variable} is not set" if not path else f"1..0 # SKIP {path} has no {missing[0]}: build the suite there")
        sys.exit(77)
    return os.path.abspath(path)


def read(suite):
    """{test: result} of the list in the tree."""
    found, path = {}, HERE / f"{suite}.expected"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line and not line.startswith("#"):
            name, result = line.split(None, 2)[:2]
            found[name] = result
    return found


def write(suite, head, results, reasons):
    lines = [f"{name:<30} {results[name]:<10} {reasons[name]}".rstrip() for name in sorted(results)]
    (HERE / f"{suite}.expected").write_text(f"# {head}\n" + "".join(line + "\n" for line in lines), encoding="utf-8")


def judge(suite, head, ran, results, reasons):
    """ran: the tests; results, reasons: of those that differ from the disk. Prints and ends the program; --write: writes the list."""
    if "--write" in sys.argv:
        write(suite, head, results, reasons)
    want = {n: r for n, r in read(suite).items() if n in ran}
    different = sorted(n for n in set(want) | set(results) if want.get(n) != results.get(n))
    for name in different:
        print(f"not ok - {name}: {results.get(name, 'as on the disk')}, expected {want.get(name, 'what the disk gives')} {reasons.get(name, '')}")
    print(f"{suite}: {len(ran)} tests, {len(ran) - len(results)} as on the disk, {len(results)} not, {len(different)} of these not as expected")
    sys.exit(bool(different))
