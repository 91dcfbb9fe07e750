#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Mount tests under schedules that seldom come by themselves: yields.c gives way, by a seed, wherever threads of the program meet.

    YIELDS=build/tests/schedule/libyields.so UNSHARD=build/cli/unshard tests/schedule/run.py [SUITE[.TEST] ...]

SUITE is a file of tests/mount. Each is run once with each seed of $SCHEDULE_SEEDS ("1-40", "7,9"); a test that fails is named with its
seed, and so it is run again. Without suites: FEW, those tests in which most threads meet. A run in which nothing gave way has failed.
"""
import os
import pathlib
import shlex
import struct
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
MOUNT = HERE.parent / "mount"
SECONDS = 900
COUNTS = struct.Struct("=4Q")
FEW = ["save_together.test_logs_below_a_checkpoint_go_on", "edits.test_several_handles_are_one_transaction", "edits.test_publication_leaves_others_alone",
       "storage.test_any_operations", "change.test_exchanged_directories",
       "change.test_never_a_mix_while_it_is_rewritten", "passthrough.test_many_openers_of_one_file",
       "ends.test_a_signal_ends_it_while_files_are_open", "early.test_reads_here_and_there_and_in_order", "early.test_closed_and_unmounted_meanwhile"]


def seeds(text):
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def by_suite(words):
    """{suite: [tests]}; no tests: all."""
    asked = {}
    for word in words:
        suite, _, test = word.partition(".")
        if not (MOUNT / f"{suite}.py").exists():
            sys.exit(f"{word}: there is no tests/mount/{suite}.py")
        asked.setdefault(suite, []).extend([test] if test else [])
    return asked


def wrapper(where):
    """A program that is $UNSHARD with yields.c before libc."""
    path = pathlib.Path(where) / "unshard"
    path.write_text(f"#!/bin/sh\nLD_PRELOAD={shlex.quote(os.path.abspath(os.environ['YIELDS']))} "
                    f"exec {shlex.quote(os.path.abspath(os.environ['UNSHARD']))} \"$@\"\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def run_one(program, suite, tests, seed, told):
    """(status, what it said)"""
    env = {**os.environ, "UNSHARD": program, "UFS_YIELD_SEED": str(seed), "UFS_YIELD_TELL": told}
    done = subprocess.run([sys.executable, str(MOUNT / f"{suite}.py"), *tests], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", timeout=SECONDS, check=False)
    return done.returncode, done.stdout


def main():
    if not os.access("/dev/fuse", os.F_OK):
        print("1..0 # SKIP no /dev/fuse")
        sys.exit(77)
    asked = by_suite(sys.argv[1:] or FEW)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="ufs-schedule-") as t:
        os.chmod(t, 0o755)
        program, told = wrapper(t), t + "/told"
        for seed in seeds(os.environ.get("SCHEDULE_SEEDS", "1-2")):
            for suite, tests in asked.items():
                pathlib.Path(told).write_bytes(bytes(COUNTS.size))
                os.chmod(told, 0o666)  # mounts of other users tell too
                status, said = run_one(program, suite, tests, seed, told)
                points, yields, sleeps, empty = COUNTS.unpack(pathlib.Path(told).read_bytes())
                wrong = [ln for ln in said.splitlines() if ln.startswith("not ok")]
                ran = said.count("\nok - ") + len(wrong)
                if status == 0 and (ran < max(1, len(tests)) or yields + sleeps == 0):
                    status, wrong = 1, [f"not ok - {ran} tests ran, and threads gave way {yields + sleeps} times"]
                print(f"{'not ok' if status else 'ok'} - {suite}, seed {seed}: {ran} tests; {points} points, {yields} yields, "
                      f"{sleeps} sleeps, {empty} empty wake-ups", flush=True)
                if status:
                    failed += 1
                    print(said, *wrong, sep="\n", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
