#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Adds up what `meson test` ran: count_results.py MESON_LOGS

A test that speaks TAP counts as many as it ran, any other as one. A test that failed
without a failing line (a crash, a time-out) adds one. The last line is
`N passed, N failed, N skipped`; exit 1 when something failed or nothing passed.
"""
import collections
import json
import pathlib
import re
import sys

GOOD = {"OK": "passed", "EXPECTEDFAIL": "passed", "SKIP": "skipped"}
PLAN = re.compile(r"^1\.\.\d+", re.M)
LINE = re.compile(r"^(not )?ok\b[^#\n]*(#\s*(?:skip|todo)\b)?", re.M | re.I)


def subtests(text):
    """What the lines of a TAP output say; nothing when it is none."""
    out = collections.Counter()
    if PLAN.search(text):
        for bad, directive in LINE.findall(text):
            out["skipped" if directive else "failed" if bad else "passed"] += 1
    return out


def count(log):
    total, bad = collections.Counter(), []
    for line in log.read_text(encoding="utf-8").splitlines():
        test = json.loads(line)
        verdict = GOOD.get(test["result"], "failed")
        mine = subtests(test.get("stdout") or "") or collections.Counter({verdict: 1})
        if verdict == "failed":
            mine["failed"] = max(mine["failed"], 1)
            bad.append(f"{test['name']}: {test['result']}")
        total += mine
    return total, bad


def self_test():
    assert subtests("1..3\nok 1 - a\nnot ok 2 - b\nok 3 - c # SKIP why\n") == {"passed": 1, "failed": 1, "skipped": 1}
    assert subtests("ok 1 - a\n") == {}, "without a plan it is no TAP"
    assert subtests("ok 1\nok 2 # skip\n1..2\n") == {"passed": 1, "skipped": 1}


def main(args):
    if args == ["--self-test"]:
        return self_test()
    if len(args) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    total, bad = count(pathlib.Path(args[0]) / "testlog.json")
    for line in bad:
        print("failed:", line)
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
