#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""LTP's tests of system calls on files, on a mount for saving; and its read_all over every file of a mount for reading.

    LTP=~/ltp UNSHARD=build/cli/unshard tests/public/ltp.py [TEST ...] [--write]

As root. $LTP is a checkout of github.com/linux-test-project/ltp in which `make autotools && ./configure && make -C lib` was run,
and then `make -C testcases/kernel/DIR` for each of DIRS below. Files of tests lie in a directory that passes through to the
source. ltp.expected has what each program gave: pass, fail, conf (it says itself that it cannot run here).
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
import expected  # noqa: E402
from mountlib import Mount, fresh_directory, make_tensors, write_checkpoint  # noqa: E402

DIRS = ["fs/read_all", "fs/ftest", "fs/inode", "fs/fsx-linux", "fs/lftest", "fs/openfile"] + ["syscalls/" + d for d in """
    access copy_file_range creat faccessat fadvise fallocate fdatasync fgetxattr flock fstat fstatfs fsync ftruncate getdents getxattr
    listxattr llseek lseek lstat mincore mkdir mmap open openat pread preadv preadv2 pwrite read readahead readdir readlink readv rename
    rmdir sendfile splice stat statfs statx truncate unlink write writev""".split()]

# Programs that are no tests of this mount: why.
EXCLUDED = {
    "read_all": "run by itself, on a mount for reading",
    "openfile": "opens files of the system, for load",
}
SECONDS = 240
CODES = {0: "pass", 32: "conf", 4: "pass"}  # 4: a warning alone


def programs(suite):
    found = {}
    for folder in DIRS:
        for path in sorted((suite / "testcases/kernel" / folder).glob("*")):
            if path.is_file() and os.access(path, os.X_OK) and not path.suffix and path.name not in EXCLUDED and path.name != "Makefile":
                found[path.name] = path
    return found


def why_of(text):
    """The first line that says so."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", ln) for ln in text.splitlines()]
    for word in ("TFAIL", "TBROK", "TCONF"):
        for line in lines:
            if word in line:
                return re.sub(r"/\S*/", "", line.partition(word)[2].lstrip(" :"))[:110]
    return ""


def end(test, where):
    """It takes away what it mounted, when it is asked to. What stays mounted on a file of ours would hold up our own server's end for ever."""
    test.send_signal(signal.SIGINT)
    try:
        test.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        test.kill()
        test.communicate()
    with open("/proc/self/mountinfo", encoding="utf-8") as f:
        points = [line.split()[4] for line in f]
    for point in reversed(points):
        if point.startswith(where + "/"):
            subprocess.run(["umount", "-l", point], check=False)


def run_one(path, where, *args):
    with subprocess.Popen([str(path), *args], cwd=where, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", env={**os.environ, "TMPDIR": where, "LTP_TIMEOUT_MUL": "3", "LTP_COLORIZE_OUTPUT": "0"}) as done:
        try:
            text = done.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            end(done, where)
            return "late", f"took longer than {SECONDS} s"
    result = CODES.get(done.returncode, "fail")
    return result, "" if result == "pass" else why_of(text)


def main():
    suite = pathlib.Path(expected.place_of("LTP", "testcases/kernel/fs/read_all/read_all"))
    if os.geteuid() != 0:
        print("1..0 # SKIP needs root")
        sys.exit(77)
    asked = [a for a in sys.argv[1:] if not a.startswith("-")]
    results, reasons = {}, {}

    def note(name, result):
        results[name], reasons[name] = result
        print(name, *result, flush=True)

    with fresh_directory() as t:
        write_checkpoint(t + "/run/step1", make_tensors(1))
        if not asked or "read_all" in asked:
            with Mount(t + "/run", t + "/mnt") as m:
                note("read_all", run_one(suite / "testcases/kernel/fs/read_all/read_all", t, "-d", m.path, "-p", "-q", "-r", "8"))
        os.makedirs(t + "/run/work")
        os.chmod(t + "/run/work", 0o777)
        with Mount(t + "/run", t + "/mnt", "rw,allow_other") as m:
            for name, path in programs(suite).items():
                if asked and name not in asked:
                    continue
                note(name, run_one(path, m / "work"))
                for left in os.listdir(m / "work"):
                    shutil.rmtree(m / f"work/{left}", ignore_errors=True)
                assert m.alive(), f"{name} ended the mount"
    expected.judge("ltp", "LTP's programs in a directory of a mount for saving", results, lambda name, _: reasons[name])


if __name__ == "__main__":
    main()
