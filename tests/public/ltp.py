#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""LTP's tests of system calls on files: on a mount for writing, on storage names, and on the disk below it; and its read_all over
every file of a mount for reading.

    LTP=~/ltp UNSHARD=build/cli/unshard tests/public/ltp.py [TEST ...] [--write]

As root. $LTP is a checkout of github.com/linux-test-project/ltp in which `make autotools && ./configure && make -C lib` was run,
and then `make -C testcases/kernel/DIR` for each of DIRS below. Each program runs in a plain directory of the mount and in one of
the disk. ltp.expected has what those gave that do not give the same in both: pass, fail, conf (it says itself that it cannot run
here), late.
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
    access chdir chmod chown copy_file_range creat faccessat faccessat2 fadvise fallocate fchdir fchmod fchmodat fchown fchownat fcntl
    fdatasync fgetxattr flock fstat fstatat fstatfs fsync ftruncate futimesat getcwd getdents getxattr inotify lchown link linkat
    listxattr llseek lseek lstat mincore mkdir mkdirat mknod mknodat mmap msync open openat openat2 pread preadv preadv2 pwrite pwritev
    pwritev2 read readahead readdir readlink readlinkat readv rename renameat renameat2 rmdir sendfile splice stat statfs statvfs statx
    symlink symlinkat sync_file_range truncate umask unlink unlinkat utime utimensat utimes write writev""".split()]

# Programs that are no tests of this mount: why.
EXCLUDED = {
    "read_all": "run by itself, on a mount for reading",
    "openfile": "opens files of the system, for load",
}
# What a program says of itself is not the reason.
REASONS = {
    **dict.fromkeys(("creat05", "fcntl12", "fcntl12_64"), "the server has no more files than a program may have, and needs two for each"),
    "readahead02": "FUSE's readahead(2) does not reach the source's file, which is read where the kernel reads by itself (passthrough)",
}
SECONDS = 240
CODES = {0: "pass", 32: "conf", 4: "pass"}  # 4: a warning alone


def programs(suite):
    found = {}
    for folder in DIRS:
        for path in sorted((suite / "testcases/kernel" / folder).glob("*")):
            if path.is_file() and os.access(path, os.X_OK) and not path.suffix and path.name not in EXCLUDED and not path.name.endswith("_child"):
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
                          errors="replace", env={**os.environ, "TMPDIR": where, "PATH": f"{path.parent}:{os.environ['PATH']}",
                                                 "LTP_TIMEOUT_MUL": "3", "LTP_COLORIZE_OUTPUT": "0"}) as done:
        try:
            text = done.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            end(done, where)
            return "late", f"took longer than {SECONDS} s"
    result = CODES.get(done.returncode, "fail")
    return result, "" if result == "pass" else why_of(text)


def run_in(path, where):
    for child in path.parent.glob(path.name + "_child"):  # what it copies from where it starts
        shutil.copy(child, where)
    result = run_one(path, where)
    for left in os.listdir(where):
        shutil.rmtree(f"{where}/{left}", ignore_errors=True)
    return result


def main():
    suite = pathlib.Path(expected.place_of("LTP", "testcases/kernel/fs/read_all/read_all"))
    if os.geteuid() != 0:
        print("1..0 # SKIP needs root")
        sys.exit(77)
    asked = [a for a in sys.argv[1:] if not a.startswith("-")]
    ran, results, reasons = [], {}, {}

    def note(name, result, on_disk):
        ran.append(name)
        if result[0] != on_disk[0]:
            results[name], reasons[name] = result[0], REASONS.get(name) or result[1] or f"on the disk: {on_disk[0]}: {on_disk[1]}"
        print(name, *result, "" if name not in results else f"(on the disk: {' '.join(on_disk)})", flush=True)

    with fresh_directory() as t:
        write_checkpoint(t + "/run/step1", make_tensors(1))
        if not asked or "read_all" in asked:
            with Mount(t + "/run", t + "/mnt") as m:
                note("read_all", run_one(suite / "testcases/kernel/fs/read_all/read_all", t, "-d", m.path, "-p", "-q", "-r", "8"), ("pass", ""))
        for name in ("run/work", "disk"):
            os.makedirs(f"{t}/{name}")
            os.chmod(f"{t}/{name}", 0o777)
        with Mount(t + "/run", t + "/mnt", "rw,allow_other") as m:
            for name, path in programs(suite).items():
                if asked and name not in asked:
                    continue
                note(name, run_in(path, m / "work"), run_in(path, t + "/disk"))
                assert m.alive(), f"{name} ended the mount"
    expected.judge("ltp", "LTP's programs on storage names", ran, results, reasons)


if __name__ == "__main__":
    main()
