#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""xfstests' generic tests on a mount for writing.

    XFSTESTS=~/xfstests UNSHARD=build/cli/unshard tests/public/xfstests.py [generic/NNN ...] [--write]

As root. $XFSTESTS is a checkout of github.com/kdave/xfstests in which `make` was run. mount(8) has to find the file system, so a
helper /sbin/mount.fuse.unshardfs is made for the time of the run; users fsgqa, fsgqa2 and 123456-fsgqa should be there. Those that
are run are the tests of TESTS: of names, reads, writes, mappings, seeks, attributes and room, on two directories (TEST_DEV and
SCRATCH_DEV), without block devices. A test that passes is as on a disk. xfstests.expected lists the others: fail, notrun (xfstests
sees that something it needs is not there) or late. Left out is what takes minutes: 074, 089, 208, 323; and 003, which is about
atime options of the mount, where those of the source's count.
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
import expected  # noqa: E402
from mountlib import UNSHARD, fresh_directory, is_mounted, unmount_hard  # noqa: E402

HELPER = pathlib.Path("/sbin/mount.fuse.unshardfs")
SECONDS = 100
# What xfstests says is not the reason.
REASONS = {
    "generic/120": "asks for -o noatime, of this mount: the source's mount decides",
    "generic/394": "needs to raise a limit of the process (ulimit -f), which was not allowed where the list was written",
    "generic/452": "mounts a second time at the same place, which is refused",
    "generic/615": "took longer than 100 s on a busy machine",
}
TESTS = """
001 002 005 006 007 008 011 013 014 020 023 024 025 028 029 030 033 035 036 053 069 071 075 078 080 084 086 087 088 091 095 100 109
112 113 120 123 124 125 126 127 128 129 130 131 132 133 135 141 169 184 192 193 198 207 209 210 211 212 213 214 215 221 228 236 245 246
247 248 249 257 258 263 285 286 306 308 309 310 313 314 315 317 337 339 344 354 360 377 393 394 401 403 406 420 423 430 431 433 436 437
445 448 452 471 490 504 528 532 564 565 571 591 609 615 637 647 729
""".split()


def run_one(suite, name, env):
    """(result, why)"""
    with subprocess.Popen(["./check", "-fuse", name], cwd=suite, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True) as check:
        try:
            out = check.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            os.killpg(check.pid, signal.SIGKILL)
            return "late", f"takes longer than {SECONDS} s here"
    told = re.search(re.escape(name) + r"\s.*?\[not run\]\s*(.*)", out)
    if told:
        return "notrun", told[1][:100]
    if re.search(r"^Passed all 1 tests", out, re.M):
        return "pass", ""
    lines = [ln for ln in out.splitlines() if re.match(r"\s+[+-][^+-]", ln)]
    first = next((ln.strip() for ln in lines if ln.strip().startswith("+")), lines[0].strip() if lines else out.strip()[-100:])
    return "fail", re.sub(r"/\S*/", "", first)[:120]


def settle(t):
    """The server of a mount that was taken away may still be saving."""
    for point in (t + "/mnt", t + "/scratch-mnt"):
        for _ in range(4):
            if is_mounted(point):
                unmount_hard(point)
    time.sleep(0.1)
    for left in os.listdir(t + "/scratch"):  # what 339 leaves, ten thousand directories, takes the next test's time to remove
        shutil.rmtree(f"{t}/scratch/{left}", ignore_errors=True)


def main():
    suite = expected.place_of("XFSTESTS", "check", "ltp/fsx", "src/feature")
    if os.geteuid() != 0:
        print("1..0 # SKIP needs root")
        sys.exit(77)
    asked = [a for a in sys.argv[1:] if not a.startswith("-")]
    ran, results, reasons = [], {}, {}
    with fresh_directory() as t:
        for name in ("run", "mnt", "results", "scratch", "scratch-mnt"):
            os.mkdir(f"{t}/{name}")
        HELPER.write_text(f'#!/bin/sh\nexec env XDG_CACHE_HOME={t}/cache {UNSHARD} mount "$1" "$2" -o rw,allow_other\n', encoding="ascii")
        HELPER.chmod(0o755)
        os.mkdir(t + "/bin")  # xfstests wants df to say "fuse"
        pathlib.Path(t + "/bin/df").write_text("#!/bin/sh\n/bin/df \"$@\" | sed s/fuse.unshardfs/fuse/\n", encoding="ascii")
        pathlib.Path(t + "/bin/umount").write_text(  # by its source, too: umount(8) takes a directory for a mount point
            f'#!/bin/sh\nfor a; do shift; case "$a" in {t}/run) a={t}/mnt;; {t}/scratch) a={t}/scratch-mnt;; esac; set -- "$@" "$a"; done\n'
            'exec /bin/umount "$@"\n', encoding="ascii")
        for name in ("df", "umount"):
            os.chmod(f"{t}/bin/{name}", 0o755)
        env = {**os.environ, "FSTYP": "fuse", "FUSE_SUBTYP": ".unshardfs", "TEST_DEV": t + "/run", "TEST_DIR": t + "/mnt",
               "SCRATCH_DEV": t + "/scratch", "SCRATCH_MNT": t + "/scratch-mnt",
               "RESULT_BASE": t + "/results", "HOST_OPTIONS": "/dev/null", "LC_ALL": "C", "PATH": f"{t}/bin:{os.environ['PATH']}"}
        try:
            for name in asked or [f"generic/{number}" for number in TESTS]:
                result, reason = run_one(suite, name, env)
                if result != "pass":
                    results[name], reasons[name] = result, REASONS.get(name, reason)
                print(name, result, reason, flush=True)
                ran.append(name)
                settle(t)
        finally:
            HELPER.unlink()
            settle(t)
    expected.judge("xfstests", "xfstests' generic tests on a mount for writing", ran, results, reasons)


if __name__ == "__main__":
    main()
