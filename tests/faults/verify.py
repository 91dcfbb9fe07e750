#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""`unshard verify` runs out of memory: that is told, and never that the checkpoint is damaged.

The N-th allocation fails, for some N. $UNSHARD is the program, $NTH the library made of nth.c.
"""
import os
import random
import struct
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import SANITIZED, UNSHARD, Skip, main, make_tensors, read_all, same, write_checkpoint, write_file  # noqa: E402

TRIES = 60


def verify(t, n):
    """(status, what it printed, how many allocations there were)"""
    write_file(t + "/tell", bytes(16))
    env = {**os.environ, "LD_PRELOAD": os.environ["NTH"], "UFS_NTH_KIND": "alloc", "UFS_NTH_ROOT": t + "/src", "UFS_NTH_AT": str(n),
           "UFS_NTH_TELL": t + "/tell", "UNSHARD_CONFINE": "0", "XDG_CACHE_HOME": t + "/cache"}
    done = subprocess.run([UNSHARD, "verify", "--deep", t + "/src", "-o", "jobs=2"], env=env, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr, struct.unpack("<QQ", read_all(t + "/tell"))[0]


def test_what_lacks_is_not_damage(t):
    if SANITIZED:
        raise Skip("a sanitizer stands where calls are to fail")
    write_checkpoint(t + "/src", make_tensors(1, count=12))
    verify(t, 0)  # the index is there from then on
    status, words, calls = verify(t, 0)
    same("without a fault: " + words, (status, "whole" in words), (0, True))
    told = 0
    for n in random.Random(1).sample(range(1, calls + 1), min(TRIES, calls)):
        status, words, _ = verify(t, n)
        assert status >= 0 and "damaged" not in words, f"call {n}, status {status}: {words}"
        assert status != 0 or "whole" in words, f"call {n}: {words}"
        told += status != 0
    assert told, "none of these calls made it fail"
    print(f"# {calls} calls, {TRIES} of them failed one at a time: {told} ended it, with words")


main(globals(), fuse=False)
