#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""fsx, fsstress and fio --verify on what a mount takes: storage files in a checkpoint and beside it, raw/KEY, a new directory.

$FSX and $FSSTRESS name xfstests' programs (ltp/fsx, ltp/fsstress), $FIO fio (found in PATH otherwise); one that is not there is
skipped by name. $UNSHARD is the program under test, $ROUNDS the operations of each run (2000), $SEED what is added to their seeds (0).

    FSX=~/xfstests/ltp/fsx FSSTRESS=~/xfstests/ltp/fsstress UNSHARD=build/cli/unshard tests/public/writers.py
"""
import os
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from storagelib import differences, snapshot  # noqa: E402
from mountlib import Mount, Skip, main, make_tensors, read_all, same, stored, write_checkpoint  # noqa: E402

ROUNDS = os.environ.get("ROUNDS", "2000")
SEED = int(os.environ.get("SEED", "0"))
KEY = "model.layers.0.mlp.weight"


def program(name):
    path = os.environ.get(name.upper()) or shutil.which(name)
    if not path or not os.access(path, os.X_OK):
        raise Skip(f"${name.upper()} names no program")
    return os.path.abspath(path)


def run(t, *command):
    done = subprocess.run(command, cwd=t, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def source(t):
    write_checkpoint(t + "/run/step1", make_tensors(1, rows=256, cols=512))


def publish(m):
    fd = os.open(m / "step1", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def fsx(t, path, seed, *more):
    out = run(t, program("fsx"), "-q", "-N", ROUNDS, "-S", str(SEED + seed), "-P", t, *more, path)
    assert "All" in out, out


def test_fsx_on_a_side_file(t):
    program("fsx")
    source(t)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for seed, more in enumerate(([], ["-c", "20"], ["-R", "-W"], ["-f"]), 1):
            fsx(t, m / f"step1/fsx{seed}", seed, *more)
        want = {n: read_all(m / f"step1/{n}") for n in ("fsx1", "fsx2", "fsx3", "fsx4")}
    for name, data in want.items():
        same(f"{name} in the source", read_all(f"{t}/run/step1/{name}"), data)


def test_fsx_on_a_file_beside(t):
    program("fsx")
    source(t)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        fsx(t, m / "log", 7)
        want = read_all(m / "log")
    same("log", read_all(t + "/run/log"), want)


def test_fio_on_a_tensor(t):
    fio = program("fio")
    source(t)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        size = os.stat(m / f"step1/raw/{KEY}").st_size
        run(t, fio, "--name=raw", f"--filename={m.path}/step1/raw/{KEY}", "--rw=randwrite", "--bs=4k", f"--size={size}",
            "--ioengine=psync", f"--randseed={SEED + 1}", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--fallocate=none",
            "--allow_file_create=0")
        want = read_all(m / f"step1/raw/{KEY}")
        publish(m)
        same("raw, published", read_all(m / f"step1/raw/{KEY}"), want)
    got, old = stored(t + "/run/step1"), make_tensors(1, rows=256, cols=512)
    same("stored", got.pop(KEY)[2], want)
    old.pop(KEY)
    same("the others", got, old)


def test_fio_on_a_side_file(t):
    fio = program("fio")
    source(t)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        run(t, fio, "--name=side", f"--filename={m.path}/step1/side.bin", "--rw=randrw", "--bsrange=512-64k", "--size=8m", "--numjobs=2",
            "--offset_increment=8m", "--ioengine=psync", f"--randseed={SEED + 1}", "--verify=crc32c", "--verify_fatal=1", "--fsync=64")
        want = read_all(m / "step1/side.bin")
    same("in the source", read_all(t + "/run/step1/side.bin"), want)


def test_fsstress_in_a_new_directory(t):
    """Names and bytes at random, by two processes: what the mount shows is what the disk has, links included."""
    fsstress = program("fsstress")
    source(t)
    kinds = ("creat", "write", "truncate", "rename", "unlink", "mkdir", "rmdir", "fsync", "read", "stat", "getdents", "mwrite", "mread", "link", "symlink")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step2")
        shutil.copy(t + "/run/step1/config.json", m / "step2/config.json")
        run(t, fsstress, "-d", m / "step2", "-n", str(int(ROUNDS) // 4), "-p", "2", "-s", str(SEED + 5), "-z",
            *(x for k in kinds for x in ("-f", f"{k}={12 if k == 'creat' else 4}")))
        want = snapshot(m / "step2")
        assert len(want) > 5, f"it made only {sorted(want)}"
        same("in the source", differences(snapshot(t + "/run/step2"), want), [])
    same("in the source, afterwards", differences(snapshot(t + "/run/step2"), want), [])


if __name__ == "__main__":
    main(globals(), 1800)
