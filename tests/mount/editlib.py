# SPDX-License-Identifier: MIT
"""What the tests of transactions share: view names of a mount for writing, what is staged, what is published.

$EDIT_PAUSES are the seconds a writer waits between its calls, one schedule each: longer than a mount gathers edits, and not.
"""
import json
import os
import struct
import subprocess
import time

from mountlib import PATIENCE, UNSHARD, is_mounted, same, tensor_bytes

PAUSES = [float(p) for p in os.environ.get("EDIT_PAUSES", "0 6").split()]
DESCR = {"F32": "<f4", "F16": "<f2", "BF16": "<V2", "U8": "|u1", "I64": "<i8", "F8_E4M3": "|V1"}


def npy_parts(descr, shape, data, fortran=False):
    """Header and data of a .npy file."""
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {tuple(shape)!r}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text, data


def npy_of(tensor):
    """The .npy file of (dtype, shape, bytes)."""
    dtype, shape, data = tensor
    return b"".join(npy_parts(DESCR[dtype], shape, data))


def changed(tensor, seed="changed"):
    """The same dtype and shape, other bytes."""
    dtype, shape, data = tensor
    return dtype, shape, tensor_bytes(seed, len(data))


def fsync(path):
    """fsync of a file or directory: publishes what is complete there."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write(path, data):
    """In place, from nothing."""
    with open(path, "wb") as f:
        f.write(data)


def go_on(path, data, at):
    """Opened without O_TRUNC."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, at)
    finally:
        os.close(fd)


def umount(m, status=0):
    """`unshard umount`, which unmounts in any case; what it said."""
    done = subprocess.run([UNSHARD, "umount", m.path], capture_output=True, text=True, timeout=600, check=False)
    same("status of unshard umount: " + done.stderr, done.returncode, status)
    assert not is_mounted(m.path), "it is still mounted"
    m.process.wait(PATIENCE)
    same("status of the server", m.process.returncode, 0)
    return done.stderr


def staging(path):
    """Staging directories anywhere below."""
    return sorted(os.path.join(folder, d) for folder, dirs, _ in os.walk(path) for d in dirs if d.startswith(".unshard-staging"))


def names(path):
    """All files and directories below, without staging."""
    found = []
    for folder, dirs, files in os.walk(path):
        dirs[:] = [d for d in dirs if not d.startswith(".unshard-staging")]
        found += [os.path.relpath(os.path.join(folder, n), path) for n in dirs + files]
    return sorted(found)


def run(*args, status=0):
    done = subprocess.run([UNSHARD, *map(str, args)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == status, done
    return done.stdout


def doctor(path, *options):
    """What `unshard doctor` says of a directory. Its status is about this machine, too."""
    done = subprocess.run([UNSHARD, "doctor", *options, path], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1), done
    return done.stdout


def tensors_of(path):
    """{key: (dtype, shape, bytes)} of a checkpoint on the disk, as the command reads it."""
    out = {}
    for t in json.loads(run("ls", path, "--json", "-o", "index=memory"))["tensors"]:
        done = subprocess.run([UNSHARD, "cat", path, t["key"], "-o", "index=memory"], capture_output=True, check=True, timeout=600)
        out[t["key"]] = (t["dtype"], tuple(t["shape"]), done.stdout)
    return out


def boxes_of(path):
    """{key: [(start, size, file)]}: how each tensor is cut, and where it lies; not at which byte."""
    out = {}
    for t in json.loads(run("ls", path, "--json", "-o", "index=memory"))["tensors"]:
        plan = json.loads(run("plan", path, t["key"], "--json", "-o", "index=memory"))
        out[t["key"]] = sorted((c["start"], c["size"], c["file"]) for c in plan["chunks"])
    return out


def objects_of(path):
    return json.loads(run("info", path, "--json", "-o", "index=memory")).get("objects")


def pause(seconds):
    if seconds:
        time.sleep(seconds)


def last_error(m, step):
    with open(m / f"{step}/.unshard/last-error", encoding="utf-8") as f:
        return f.read()
