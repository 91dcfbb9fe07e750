#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A checkpoint is saved over while its directory cannot be listed: no file of it is lost with what was not seen.

The N-th readdir(3) below the source gives EIO, for each N of a publication. $UNSHARD is the program, $NTH the library made
of nth.c.
"""
import os
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import SANITIZED, Mount, Skip, main, make_tensors, read_all, same, stored, write_checkpoint, write_file  # noqa: E402

SIDES = [f"notes/{i}.txt" for i in range(6)] + [f"side-{i}.txt" for i in range(6)]


def save_over(t, n):
    """(calls before and after the publication, its errno or 0, what the checkpoint holds then)."""
    source, tell = f"{t}/{n}/src", f"{t}/{n}/tell"
    write_checkpoint(source + "/step1", make_tensors(1))
    os.mkdir(source + "/step1/notes")
    for name in SIDES:
        write_file(f"{source}/step1/{name}", name.encode())
    write_file(tell, bytes(16))

    def calls():
        return struct.unpack("<QQ", read_all(tell))[0]
    env = {**os.environ, "LD_PRELOAD": os.environ["NTH"], "UFS_NTH_KIND": "list", "UFS_NTH_ROOT": source, "UFS_NTH_AT": str(n),
           "UFS_NTH_TELL": tell, "UNSHARD_CONFINE": "0"}
    code = 0
    with Mount(source, f"{t}/{n}/mnt", "rw", env=env) as m:
        before = calls()
        try:
            write_file(m / "step1/side-0.txt", b"new")
            before = calls()
            fd = os.open(m / "step1", os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as e:
            code = e.errno
        after = calls()
        files = {name: read_all(f"{source}/step1/{name}") for name in SIDES if os.path.exists(f"{source}/step1/{name}")}
        same("tensors", stored(source + "/step1"), make_tensors(1))
    return before, after, code, files


def test_nothing_is_lost(t):
    if SANITIZED:
        raise Skip("a sanitizer stands where calls are to fail")
    before, after, code, files = save_over(t, 0)
    same("without a fault", (code, files.pop("side-0.txt")), (0, b"new"))
    same("others", files, {name: name.encode() for name in SIDES if name != "side-0.txt"})
    assert after > before, (before, after)
    failed = 0
    for n in range(before + 1, after + 1):
        _, _, code, files = save_over(t, n)
        failed += code != 0
        same(f"call {n}, errno {code}: changed", files.pop("side-0.txt") in (b"new", b"side-0.txt"), True)
        same(f"call {n}, errno {code}: others", files, {name: name.encode() for name in SIDES if name != "side-0.txt"})
    assert failed, "no call of these made the save fail"


main(globals(), seconds=1200)
