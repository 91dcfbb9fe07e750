#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Who reads local files gives up the calls that this does not need: the command, and root's mount for reading."""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, UNSHARD, Mount, Skip, is_mounted, main, make_tensors, read_all, same, wait_for, write_checkpoint  # noqa: E402


def status(pid):
    """(filters of seccomp, no new privileges) of a process, as the kernel says."""
    with open(f"/proc/{pid}/status") as f:
        words = dict(line.split(":", 1) for line in f)
    return int(words["Seccomp"]), int(words["NoNewPrivs"])


def what_is_there(env=None):
    done = subprocess.run([UNSHARD, "doctor", "--json"], capture_output=True, check=False, env=env)
    checks = json.loads(done.stdout)["checks"]
    return next(c for c in checks if c["what"] == "confine")


def needs_it():
    if what_is_there()["state"] != "ok":
        raise Skip(what_is_there()["text"])


def blocked_cat(t, env=None):
    """`unshard cat` that waits for somebody to read what it writes."""
    write_checkpoint(t + "/src", make_tensors(1, count=1, rows=4096, cols=64))
    return subprocess.Popen([UNSHARD, "cat", t + "/src", "model.layers.0.mlp.weight", "--cache-dir", t + "/cache"],
                            stdout=subprocess.PIPE, env=env)


def test_the_command(t):
    needs_it()
    with blocked_cat(t) as cat:
        first = cat.stdout.read(1)
        same("status", status(cat.pid), (2, 1))
        same("bytes", first + cat.stdout.read(), make_tensors(1, count=1, rows=4096, cols=64)["model.layers.0.mlp.weight"][2])
    same("exit", cat.returncode, 0)


def test_a_scan_that_outgrows_its_memory(t):
    """100,000 tensors: sqlite goes on in a temporary file, for which there is room in the cache alone."""
    needs_it()
    tensors = {f"model.layers.{i}." + "experts.mlp.projection" * 8 + ".weight": ("U8", (1,), b"x") for i in range(100_000)}
    write_checkpoint(t + "/src", tensors)
    env = {**os.environ, "TMPDIR": t}
    env.pop("SQLITE_TMPDIR", None)
    done = subprocess.run([UNSHARD, "info", "--json", t + "/src", "--cache-dir", t + "/cache"], capture_output=True, check=False, env=env)
    same("what it says", done.stderr, b"")
    same("tensors", len(json.loads(done.stdout)["tensors"]), len(tensors))


def test_the_command_unless_told(t):
    off = {**os.environ, "UNSHARD_CONFINE": "0"}
    with blocked_cat(t, off) as cat:
        cat.stdout.read(1)
        same("status", status(cat.pid)[0], 0)
        cat.stdout.read()
    same("doctor", what_is_there(off)["text"], "off: UNSHARD_CONFINE=0")


def test_a_mount_for_reading(t):
    needs_it()
    if os.geteuid() != 0:
        raise Skip("a mount of root's")
    tensors = make_tensors(2)
    write_checkpoint(t + "/src/step1", tensors)
    with Mount(t + "/src", t + "/mnt") as m:
        wait_for("the filter", PATIENCE, lambda: status(m.process.pid) == (2, 1))
        for tid in os.listdir(f"/proc/{m.process.pid}/task"):
            same(f"thread {tid}", status(tid), (2, 1))
        for key, (_, _, data) in tensors.items():
            same(key, read_all(m / f"step1/raw/{key}"), data)
        write_checkpoint(t + "/src/step2", tensors)  # threads that start now, scans, and the watch
        wait_for("a new checkpoint", PATIENCE, lambda: os.path.exists(m / "step2/model.safetensors"))
        subprocess.run([UNSHARD, "umount", m.path], check=True)
        same("gone", is_mounted(m.path), False)
        m.process.wait(PATIENCE)


def test_a_mount_ends_by_signal(t):
    needs_it()
    write_checkpoint(t + "/src", make_tensors(3))
    with Mount(t + "/src", t + "/mnt") as m:
        os.listdir(m.path)
        m.process.terminate()
        same("exit", m.process.wait(PATIENCE), 0)
        same("gone", is_mounted(m.path), False)


def test_a_mount_that_saves_is_not(t):
    write_checkpoint(t + "/src", make_tensors(4))
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        os.listdir(m.path)
        same("filters", status(m.process.pid)[0], 0)


main(globals())
