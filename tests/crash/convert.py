#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Conversions to each format are killed, cut from power and denied room: nothing by half, and it goes on afterwards."""
import os
import random
import shutil
import signal
import subprocess

from crashlib import EIO, ENOSPC, POINTS, SEED, STATES, faulty, points, run, same_tree
from disk import Recording, tree
from mountlib import UNSHARD, Skip, make_tensors, same, write_checkpoint, write_file

# How each format is written here: options of convert.
FORMATS = {
    "hf": ["--max-shard-size", "20KB"],
    "dcp": ["--ranks", "3"],
    "dcp-hf": ["--ranks", "2"],
    "torch_dist": ["--ranks", "2"],
    "zarr": [],
    "olmo": ["--ranks", "2"],
    "olmo-step": ["--ranks", "2"],
    "pt": [],
    "npz": [],
}


class Convert:
    """One conversion, run again and again into the same place."""

    def __init__(self, t, to):
        self.to, self.t = to, t
        self.source, self.cache, self.place = t + "/source", t + "/cache", t + "/" + to
        self.dest, self.log = self.place + "/new", f"{t}/{to}.log"
        self.rnd = random.Random(f"{SEED} {to}")

    def clear(self):
        shutil.rmtree(self.place, ignore_errors=True)
        os.mkdir(self.place)

    def run(self, **what):
        env = faulty(self.place, self.cache, **what)
        return subprocess.run([UNSHARD, "convert", self.source, self.dest, "--to", self.to, *FORMATS[self.to]],
                              capture_output=True, text=True, timeout=600, env=env)

    def record(self):
        """Runs it once: self.want is what comes out, self.recording how."""
        self.clear()
        recording = Recording(self.place)
        done = self.run(log=self.log)
        same(f"{self.to}: status", (done.returncode, done.stderr), (0, ""))
        recording.load(self.log)
        self.want = tree(self.dest)
        assert self.want, f"{self.to}: nothing was written"
        return recording

    def whole_or_absent(self, what):
        got = tree(self.dest)
        if got or os.path.exists(self.dest):
            same_tree(f"{self.to}: {what}: what is published", got, self.want)
            return True
        return False

    def recovers(self, what):
        """The same command again: a whole checkpoint, and nothing else is left."""
        published = self.whole_or_absent(what)
        done = self.run()
        if published:
            same(f"{self.to}: {what}, again: status", done.returncode, 2)
            assert "is there already" in done.stderr, done.stderr
        else:
            same(f"{self.to}: {what}, again: status", (done.returncode, done.stderr), (0, ""))
        assert self.whole_or_absent(what + ", again"), f"{self.to}: {what}: nothing is there"
        same(f"{self.to}: {what}, again: leftovers", os.listdir(self.place), ["new"])


def prepare(t):
    write_checkpoint(t + "/source", make_tensors(1), shards=2)
    write_file(t + "/source/notes.txt", b"side file " * 1000)


def test_convert_killed(t):
    prepare(t)
    for to in FORMATS:
        save = Convert(t, to)
        recording = save.record()
        count, tried = len(recording.ops), 0
        for at in points(save.rnd, recording):
            for do in ("kill", "torn") if POINTS == "all" else (save.rnd.choice(("kill", "torn")),):
                save.clear()
                done = save.run(at=at, do=do)
                if do == "kill":
                    same(f"{to}: killed at {at}", done.returncode, -signal.SIGKILL)
                save.recovers(f"{do} at operation {at} of {count}")
                tried += 1
        print(f"# {to}: {count} operations, {tried} kills, all whole", flush=True)


def test_convert_without_power(t):
    prepare(t)
    for to in FORMATS:
        save = Convert(t, to)
        recording = save.record()
        count = len(recording.ops)
        for i in range(STATES):
            after = count if i == 0 else save.rnd.randint(1, count)
            recording.crash(after, save.rnd, save.place)
            what = f"power lost after operation {after} of {count} (state {i})"
            if after == count:
                assert save.whole_or_absent(what), f"{to}: {what}: it was told to be done"
            save.recovers(what)
        print(f"# {to}: {count} operations, {STATES} states, all whole", flush=True)


def test_convert_faults(t):
    """No room, or a disk that fails: a status and words, nothing is published by half; afterwards it goes on."""
    prepare(t)
    for to in FORMATS:
        save = Convert(t, to)
        recording = save.record()
        count, tried = len(recording.ops), 0
        for code, status in (ENOSPC, 5), (EIO, 3), ("short", 0):
            for at in points(save.rnd, recording, 2):
                save.clear()
                done = save.run(at=at, do=code, **({} if code == "short" else {"all": 1}))
                what = f"{to}: fault {code} from operation {at} of {count}"
                if done.returncode == 0:  # what failed was to clean up behind it
                    assert save.whole_or_absent(what), what
                elif "the disk may not have it" in done.stderr:  # nor could it be taken back
                    assert save.whole_or_absent(what), what
                else:
                    same(what + ": status", (done.returncode, done.stderr.count("\n")), (status, 1))
                    assert not os.path.exists(save.dest), f"{what}: published, and {done.stderr}"
                save.recovers(what)
                tried += 1
        print(f"# {to}: {count} operations, {tried} faults, all whole", flush=True)


def test_convert_goes_on_in_the_room_of_one(t):
    """A disk that has room for one copy, not for two: what a killed run has written is not asked for again."""
    if os.geteuid() != 0:
        raise Skip("a small disk takes root")
    prepare(t)
    for to in "dcp", "pt", "npz":
        save = Convert(t, to)
        recording = save.record()
        writes = [op.index + 1 for op in recording.ops if op.kind == "W"]
        room = sum(len(data) for data in save.want.values()) * 3 // 2
        tried = 0
        for at in writes[:: max(1, len(writes) // 8)] + writes[-1:]:
            save.clear()
            if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "none", save.place],
                              capture_output=True).returncode:
                raise Skip("no tmpfs can be mounted")
            try:
                save.run(at=at, do="kill")
                save.recovers(f"killed at operation {at}, {room} bytes of room")
                tried += 1
            finally:
                subprocess.run(["umount", save.place], check=True)
        print(f"# {to}: {tried} kills on a disk of one and a half copies", flush=True)


if __name__ == "__main__":
    run(globals())
