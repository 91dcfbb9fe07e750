#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""pjdfstest on a mount for writing, on storage names, and on the disk below it.

    PJDFSTEST=~/pjdfstest UNSHARD=build/cli/unshard tests/public/pjdfstest.py [TEST ...] [--write]

As root, on a Linux. $PJDFSTEST is a checkout of github.com/pjd/pjdfstest in which `autoreconf -ifs && ./configure && make` was
run. Each file of tests runs in a plain directory of the mount, in a checkpoint's, and in a directory of the disk.
pjdfstest.expected lists the files where not the same assertions hold. Where a file tries its calls on each kind of file in a loop,
that is done without fifos, devices and sockets, which a mount refuses to make: so what it does with the other kinds is seen.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
import expected  # noqa: E402
from mountlib import Mount, fresh_directory, make_tensors, write_checkpoint  # noqa: E402

REFUSED = {"mkfifo": "EOPNOTSUPP", "mknod": "EOPNOTSUPP", "bind": "EOPNOTSUPP", "symlink": "EPERM"}  # docs/semantics.md, "What is missing"
TRIED = re.compile(r"^not ok (\d+) - tried '(?:-\S+ \S+ )*(\w+)[^']*', expected (\S+), got (\S+)", re.M)


def run_one(path, where):
    """({number: why} of the assertions that do not hold, how many there are)"""
    done = subprocess.run(["sh", str(path)], cwd=where, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False,
                          env={**os.environ, "LC_ALL": "C"})
    failed = {n: ("test", "0", "1") for n in re.findall(r"^not ok (\d+)", done.stdout, re.M)}
    failed.update((n, rest) for n, *rest in TRIED.findall(done.stdout))
    return failed, len(re.findall(r"^(?:not )?ok \d+", done.stdout, re.M))


def why(failed):
    """What is refused, or what else is not as on the disk: no more than what was refused is not there, where something was."""
    refused = {call for call, _, got in failed if REFUSED.get(call) == got}
    other = {f"{call} gives {got}, not {want}" for call, want, got in failed if not refused or got not in ("ENOENT", REFUSED.get(call))}
    return "; ".join([f"refused: {', '.join(sorted(refused))}"] * bool(refused) + sorted(other)[:4])


def compare(path, places, disk):
    """(result, reason) of the first place that differs from the disk, or None."""
    on_disk, count = run_one(path, disk)
    for place in places:
        failed, ran = run_one(path, place)
        if set(failed) != set(on_disk) or ran != count:
            return f"{ran - len(failed)}/{ran - len(on_disk)}", why([v for n, v in failed.items() if n not in on_disk])
    return None


def copy_suite(suite, to):
    """Without the kinds that are refused, in its loops; and with what it asks of the disk's kind of file system asked of the mount."""
    shutil.copytree(suite / "tests", to / "tests")
    os.symlink(suite / "pjdfstest", to / "pjdfstest")
    kind = subprocess.run(["df", "--output=fstype", to], capture_output=True, text=True, check=True).stdout.split()[1]
    with open(to / "tests/conf", "a", encoding="utf-8") as f:
        f.write(f"\nfs={kind.upper()}\n")
    for path in (to / "tests").glob("*/*.t"):
        path.write_text(re.sub(r"(?m)^(\s*for type\d? in .*) fifo block char socket", r"\1", path.read_text(encoding="utf-8")), encoding="utf-8")
    return to / "tests"


def main():
    suite = pathlib.Path(expected.place_of("PJDFSTEST", "pjdfstest", "tests/misc.sh"))
    if os.geteuid() != 0:
        print("1..0 # SKIP needs root")
        sys.exit(77)
    asked = [a for a in sys.argv[1:] if not a.startswith("-")]
    results, reasons = {}, {}
    with fresh_directory() as t:
        suite = copy_suite(suite, pathlib.Path(t) / "suite")
        tests = asked or sorted(str(p.relative_to(suite)) for p in suite.glob("*/*.t"))
        write_checkpoint(t + "/run/step1", make_tensors(1))
        os.makedirs(t + "/run/work")
        os.makedirs(t + "/disk")
        with Mount(t + "/run", t + "/mnt", "rw,allow_other") as m:
            for name in tests:
                told = compare(suite / name, [m / "work", m / "step1"], t + "/disk")
                if told:
                    results[name], reasons[name] = told
                print(name, *told or ["as on the disk"], flush=True)
    expected.judge("pjdfstest", "pjdfstest on storage names: assertions that hold, of those that hold on the disk", tests, results, reasons)


if __name__ == "__main__":
    main()
