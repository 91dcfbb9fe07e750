# SPDX-License-Identifier: MIT
"""Results of a suite of others, held against what is expected of it: SUITE.expected, one line a test.

    chmod/00.t      31/119   fifos, sockets and links are refused (EPERM)

A name, what it gave, and the reason where that is less than all. A test that gives anything else, more as well, is a
difference; so is one that is not in the list, or did not run.
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


def write(suite, head, results, reason):
    lines = []
    for name in sorted(results):
        lines.append(f"{name:<40} {results[name]:<10} {reason(name, results[name])}".rstrip())
    (HERE / f"{suite}.expected").write_text(f"# {head}\n" + "\n".join(lines) + "\n", encoding="utf-8")


def judge(suite, head, results, reason=lambda name, result: ""):
    """Prints differences and counts, and ends the program. With --write: writes the list."""
    if "--write" in sys.argv:
        write(suite, head, results, reason)
    want = read(suite)
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        want = {n: r for n, r in want.items() if n in results}  # some of it was asked for
    different = sorted(n for n in set(want) | set(results) if want.get(n) != results.get(n))
    for name in different:
        print(f"not ok - {name}: {results.get(name, 'did not run')}, expected {want.get(name, 'nothing: it is new')}")
    print(f"{suite}: {len(results)} tests, {len(results) - len(set(results) & set(different))} as expected, {len(different)} differ")
    sys.exit(bool(different))
