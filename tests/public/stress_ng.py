#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""stress-ng's stressors of file systems on a mount for writing, in a directory that holds no checkpoint.

    UNSHARD=build/cli/unshard tests/public/stress_ng.py [STRESSOR ...] [--write]

As root, with stress-ng in PATH or named by $STRESS_NG (0.15.06, of Debian 12). Each stressor runs in two processes for SECONDS,
with --verify; afterwards the mount lives, nothing of it is left, and the checkpoint beside it reads as before. stress_ng.expected
lists those that do not pass, as they do on a disk: fail, or skip (it says itself that it cannot run here).
"""
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
import expected  # noqa: E402
from mountlib import Mount, fresh_directory, make_tensors, read_all, same, write_checkpoint  # noqa: E402

SECONDS = 5
# Beside the class "filesystem": those of other classes that read and write files below --temp-path. But for io-uring: its statx fails
# with ENOENT on ext4 too (0.15.06, Linux 6.18).
MORE = "aio aiol mmap msync readahead revio seek sendfile splice"
# Bounds on what one stressor takes of the disk.
OPTIONS = {"aiol": "--aiol-requests 16", "fallocate": "--fallocate-bytes 16m", "hdd": "--hdd-bytes 16m", "iomix": "--iomix-bytes 16m",
           "copy-file": "--copy-file-bytes 128m", "mmap": "--mmap-file --mmap-bytes 16m", "msync": "--msync-bytes 16m",
           "readahead": "--readahead-bytes 16m", "revio": "--revio-bytes 16m", "seek": "--seek-size 16m",
           "sync-file": "--sync-file-bytes 16m", "dirdeep": "--dirdeep-inodes 2000", "dirmany": "--dirmany-bytes 0",
           "splice": "--splice-bytes 1m", "sendfile": "--sendfile-size 1m"}

# Stressors of the class that are not run: why.
EXCLUDED = {
    "bind-mount": "mounts / over a directory; nothing of it is this file system's",
    "binderfs": "mounts binder's own file system",
    "eventfd": "has no file",
    "fanotify": "watches every mount of the machine",
    "getdent": "lists /, /proc, /sys and /dev, not --temp-path",
    "ioprio": "sets priorities of processes",
    "procfs": "reads /proc",
}
CODES = {0: "pass", 3: "skip", 4: "skip"}  # of stress-ng(1): 3 lacks a resource, 4 is not implemented


def program():
    path = os.environ.get("STRESS_NG") or shutil.which("stress-ng")
    if not path or not os.access(path, os.X_OK):
        print("1..0 # SKIP $STRESS_NG names no program, and none is in PATH")
        sys.exit(77)
    return os.path.abspath(path)


def stressors(stress):
    told = subprocess.run([stress, "--class", "filesystem?"], capture_output=True, text=True, check=False).stdout
    return sorted((set(told.partition(":")[2].split()) | set(MORE.split())) - set(EXCLUDED))


def why_of(text):
    for word in ("fail:", "error:", "info:"):
        for line in text.splitlines():
            told = re.search(rf"stress-ng: {word}\s+\[\d+\]\s+(.*)", line)
            if told and "dispatching hogs" not in told[1] and "setting to a" not in told[1]:
                return re.sub(r"/\S*/|\b\d{4,}\b", "", told[1])[:120]
    return ""


def run_one(stress, name, where):
    command = [stress, f"--{name}", "2", *OPTIONS.get(name, "").split(), "--temp-path", where, "--timeout", f"{SECONDS}s",
               "--verify", "--oomable", "--no-rand-seed"]
    try:
        done = subprocess.run(command, cwd=where, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                              timeout=180, check=False)
    except subprocess.TimeoutExpired:
        return "late", "does not end within 180 s"
    text = done.stdout + done.stderr
    result = CODES.get(done.returncode, "fail")
    if result == "pass" and re.search(r"(skipped|skipping).*stressor|stressor.*(skipped|skipping)", text):
        result = "skip"  # it ran none and says so with exit status 0
    return result, "" if result == "pass" else why_of(text)


def main():
    stress = program()
    if os.geteuid() != 0:
        print("1..0 # SKIP needs root")
        sys.exit(77)
    asked = [a for a in sys.argv[1:] if not a.startswith("-")]
    ran, results, reasons = [], {}, {}
    with fresh_directory() as t:
        tensors = make_tensors(1)
        write_checkpoint(t + "/run/step1", tensors)
        os.makedirs(t + "/run/work")
        with Mount(t + "/run", t + "/mnt", "rw,allow_other") as m:
            for name in asked or stressors(stress):
                result, reason = run_one(stress, name, m / "work")
                if result != "pass":
                    results[name], reasons[name] = result, reason
                ran.append(name)
                print(name, result, reason, flush=True)
                assert m.alive(), f"{name} ended the mount"
                left = os.listdir(m / "work")
                same(f"{name}: what the source has", sorted(os.listdir(t + "/run/work")), sorted(left))
                if result == "pass":
                    same(f"{name}: files that are left", left, [])
                for entry in left:
                    shutil.rmtree(m / f"work/{entry}", ignore_errors=True)
                for key, (_, _, data) in tensors.items():
                    same(f"after {name}: {key}", read_all(m / f"step1/raw/{key}"), data)
    expected.judge("stress_ng", f"stress-ng's stressors on storage names, {SECONDS} s each", ran, results, reasons)


if __name__ == "__main__":
    main()
