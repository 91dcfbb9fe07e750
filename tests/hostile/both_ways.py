#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Every case of tests/data/hostile as users meet it: `unshard verify --deep`, and a mount from which all is read.

Each manifest says what a case must come to (`verdict`): reject, nothing of it is shown; tensor, what is bad is named and
fails, all else can be read; accept, opaque, escape, all can be read; either. Both are held to an address space and a time.
"""
import errno
import json
import os
import subprocess
import sys

DATA = os.path.join(os.environ["TEST_DATA"], "hostile")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import SANITIZED, UNSHARD, Mount, main, same  # noqa: E402

MEMORY = 1 << 30  # address space of a command,
MOUNT_MEMORY = 4 << 30  # and of a mount, which has a stack and a heap for each thread
JOBS = "jobs=4"  # a thread has a stack and a heap: else it would depend on the number of processors
RESIDENT = 128 << 20  # of a mount behind all cases of a kind
SECONDS = 120
WHOLE, DAMAGED, UNREADABLE = 0, 1, 3
# Statuses of `verify --deep` that a verdict allows. What is no checkpoint by itself cannot be read as one.
STATUSES = {"accept": {WHOLE}, "opaque": {WHOLE, DAMAGED, UNREADABLE}, "escape": {WHOLE, DAMAGED}, "tensor": {DAMAGED},
            "reject": {DAMAGED, UNREADABLE}, "either": {WHOLE, DAMAGED, UNREADABLE}}
# An index that lists nothing beside file 1 of 2: what is there is read, and the second file is missing.
INCOMPLETE = {"hf_index/unlisted_tensor"}
KINDS = sorted(n[:-5] for n in os.listdir(DATA) if n.endswith(".json"))
# An opaque object may be all that was needed (os.system for the Metadata): then nothing is shown. A pickle by itself is a
# side file. dcp/name_escape has three tensors without data beside the names that it is about.
# A marker file of the manifest stands for its directory.
MARKERS = (".metadata", "metadata.json", ".zarray", ".zgroup", ".zmetadata", "zarr.json", "model.safetensors.index.json", "latest")


def cases(kind):
    """[(name below DATA/KIND, verdict)]."""
    with open(f"{DATA}/{kind}.json") as f:
        rows = json.load(f)
    found = []
    for row in rows:
        path = row["file"].rstrip("/")
        if os.path.basename(path) in MARKERS:
            path = os.path.dirname(path)
        found.append((path.removeprefix(kind + "/"), row["verdict"]))
    assert len(found) > 0, kind
    return found


def verify(path, cache):
    limits = [] if SANITIZED else ["prlimit", f"--as={MEMORY}"]
    done = subprocess.run([*limits, UNSHARD, "verify", "--deep", path, "--cache-dir", cache, "-o", JOBS], capture_output=True,
                          timeout=SECONDS, check=False)
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


def read_each(folder):
    """(how many files of a folder can be read, how many cannot)."""
    good = bad = 0
    for name in os.listdir(folder):
        try:
            with open(os.path.join(folder, name), "rb", buffering=0) as f:
                while f.read(1 << 17):
                    pass
            good += 1
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            bad += 1
    return good, bad


def judge(what, path, verdict):
    """What a mount shows of a case is what the verdict says."""
    raw = next((r for r, names, _ in os.walk(path) if "raw" in names), path) + "/raw"
    good, bad = read_each(raw) if os.path.isdir(raw) else (0, 0)
    if verdict == "reject":
        same(f"{what}: tensors that can be read", good, 0)
    elif verdict == "tensor":
        assert bad > 0, f"{what}: {good} tensors can be read, all"
    elif verdict == "accept" and not what.startswith("pickle/"):
        assert os.path.isdir(raw), f"{what}: no checkpoint"
        same(f"{what}: tensors that cannot be read", bad, 0)


def mounted(t, source):
    return Mount(source, t + "/mnt", JOBS, wrapper=() if SANITIZED else ("prlimit", f"--as={MOUNT_MEMORY}"))


def by_mount(t, kind):
    if kind == "zarr":  # all of them together would be one group
        for case, verdict in cases(kind):
            with mounted(t, f"{DATA}/{kind}/{case}") as m:
                judge(f"{kind}/{case}", m.path, verdict)
        return
    with mounted(t, f"{DATA}/{kind}") as m:
        for case, verdict in cases(kind):
            judge(f"{kind}/{case}", m / case, verdict)
        assert m.alive(), "the mount has ended"
        assert SANITIZED or m.rss() < RESIDENT, f"{m.rss()} bytes resident"


def by_command(t, kind):
    wrong = []
    for case, verdict in cases(kind):
        status, words = verify(f"{DATA}/{kind}/{case}", t + "/cache")
        if status not in STATUSES["opaque" if kind == "pickle" else "tensor" if f"{kind}/{case}" in INCOMPLETE else verdict]:
            wrong.append(f"{kind}/{case}: {verdict}, verify --deep gives {status}: {words}")
    assert not wrong, "\n".join(wrong)
    print(f"# {kind}: {len(cases(kind))} cases", flush=True)


if __name__ == "__main__":
    tests = {}
    for name in KINDS:
        tests[f"test_verify_{name}"] = lambda t, k=name: by_command(t, k)
        tests[f"test_mount_{name}"] = lambda t, k=name: by_mount(t, k)
    main(tests, seconds=1200)
