#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Commands that read every byte of a checkpoint keep few of them: their memory does not grow with it."""
import json
import os
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import UNSHARD, Skip, main, same  # noqa: E402

LIMIT = 64 << 20
MIB = 1 << 20


def peak(t, *command, status=0):
    """Bytes that the process had in memory at its highest, pages of mapped files too."""
    env = {**os.environ, "XDG_CACHE_HOME": t + "/cache"}
    pid = os.posix_spawn(UNSHARD, [UNSHARD, *command], env,
                         file_actions=[(os.POSIX_SPAWN_OPEN, 1, t + "/out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)])
    _, ended, usage = os.wait4(pid, 0)
    same(f"status of {command[0]}", os.waitstatus_to_exitcode(ended), status)
    return usage.ru_maxrss * 1024


def large_checkpoint(path):
    """160 MiB, most of it holes: 5 tensors of 2048 x 4096."""
    size = 2048 * 4096 * 4
    header = {f"layers.{i}.weight": {"dtype": "F32", "shape": [2048, 4096], "data_offsets": [i * size, (i + 1) * size]} for i in range(5)}
    text = json.dumps(header).encode()
    os.makedirs(path)
    with open(f"{path}/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + 5 * size)


def holds(t, *command):
    used = peak(t, *command, "-o", "jobs=4")  # not as many as there are processors
    assert used <= LIMIT, f"unshard {' '.join(command)}: {used / MIB:.0f} MiB in memory, of 64"


def test_memory_of_whole_checkpoints(t):
    with open(UNSHARD, "rb") as f:
        if b"__asan_init" in f.read():
            raise Skip("a sanitizer keeps what was freed")
    large_checkpoint(t + "/hf")
    holds(t, "convert", t + "/hf", t + "/dcp", "--to", "dcp", "--mesh", "2x2", "-q")
    holds(t, "convert", t + "/dcp", t + "/back", "--to", "hf", "-q")
    for source in ("hf", "dcp"):
        holds(t, "stats", f"{t}/{source}")
        holds(t, "verify", "--deep", f"{t}/{source}")
        holds(t, "cat", f"{t}/{source}", "layers.1.weight")
    holds(t, "diff", t + "/dcp", t + "/back")


if __name__ == "__main__":
    main(globals())
