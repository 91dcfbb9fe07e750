#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Random operations on a mount for writing, held against a model in memory; what differs is shrunk to few operations.

Storage names are the disk: after each operation source and mount hold what a dictionary says. View names are transactions:
what has not arrived is not seen, what is complete is seen at once and published in the end, and what is incomplete is gone on
with, after pauses, signals, kills and unmounts.

$MODEL_SEEDS is how many sequences are tried (from $MODEL_SEED on), $MODEL_STEPS how long each is, $MODEL_PAUSE the longest
pause in seconds. `model.py SEED STEPS` runs one of them and prints its operations.
"""
import contextlib
import errno
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import PATIENCE, UNSHARD, Mount, fails, main, make_tensors, npy_image, read_all, safetensors_image, same, stored, unmount_hard, \
    write_checkpoint, write_file  # noqa: E402

SEEDS = int(os.environ.get("MODEL_SEEDS", "3"))
FIRST = int(os.environ.get("MODEL_SEED", "1"))
STEPS = int(os.environ.get("MODEL_STEPS", "60"))
PAUSE = float(os.environ.get("MODEL_PAUSE", "1"))
SIDE = ["a.txt", "b.bin", "config.json", "model.safetensors.tmp", "optimizer.pt"]
NEW = ["step2", "step3"]
DESCR = {"F32": "<f4", "BF16": "<V2", "U8": "|u1"}
MODEL = "model.safetensors"


class Incoming:
    """A file of a transaction: the bytes that it shall have, and which of them have arrived."""

    def __init__(self, image, tensors):
        self.image, self.tensors = image, tensors  # {key: tensor} that it brings when it is complete
        self.arrived = [False] * len(image)

    def complete(self):
        return all(self.arrived)


class Checkpoint:
    """Side files, what is published, what is to be published, and what is on its way."""

    def __init__(self, side, tensors, sharded):
        self.side, self.sharded = dict(side), sharded  # sharded: in the format of save=
        self.stored = [dict(tensors)] if tensors else []  # what the source may hold: the last is what it will
        self.incoming = {}  # view path: Incoming
        self.removed = set()

    @property
    def tensors(self):
        return self.stored[-1] if self.stored else {}

    def becomes(self, tensors):
        self.stored = [*(self.stored or [{}]), dict(tensors)]

    def is_waiting(self):
        """Is a save complete that need not be published yet? Then its tensors have no names of their own."""
        return self.sharded and len(self.stored) > 1

    def settled(self):
        self.stored = self.stored[-1:]

    def unfinished(self):
        return bool(self.incoming or self.removed)


class World:
    """The mount, and what the source and the mount should hold."""

    def __init__(self, t):
        self.t, self.run = t, t + "/run"
        tensors = make_tensors(1, count=4, rows=16, cols=24)
        write_checkpoint(self.run + "/step1", tensors, shards=2)
        self.steps = {"step1": Checkpoint({"config.json": read_all(self.run + "/step1/config.json")}, tensors, False)}
        self.plain = {}
        self.m = None
        self.mount()

    def mount(self):
        self.m = Mount(self.run, self.t + "/mnt", "rw,save=dcp:ranks=2")
        self.m.__enter__()

    def path(self, *names):
        return os.path.join(self.m.path, *names)

    def end(self, how):
        """The mount ends: complete transactions are published unless it is killed, the others are kept."""
        for name in [n for n, c in self.steps.items() if how == "SIGKILL" and len(c.stored) > 1]:
            publish(self, name)  # what a kill leaves of a publication is save.py's
        left = any(c.unfinished() for c in self.steps.values())
        if how == "umount":
            done = subprocess.run([UNSHARD, "umount", self.m.path], capture_output=True, text=True, timeout=600, check=False)
            same("status of umount: " + done.stderr, done.returncode, int(left))
        else:
            self.m.process.send_signal(getattr(signal, how))
        self.m.process.wait(PATIENCE)
        self.m.log.close()
        unmount_hard(self.m.path)
        if how == "SIGKILL":
            self.forget_what_the_journal_has_not()
        else:
            for c in self.steps.values():
                c.settled()
        self.check_source()
        self.mount()

    def forget_what_the_journal_has_not(self):
        """A kill may take the last word of what arrived, never the truth: what doctor says is missing comes again."""
        said = subprocess.run([UNSHARD, "doctor", self.run], capture_output=True, text=True, timeout=600, check=False).stdout
        for name, c in self.steps.items():
            for path, f in c.incoming.items():
                line = next((x for x in said.splitlines() if path in x and name in x), None)
                for begin, end in re.findall(r"bytes (\d+) to (\d+)", line or ""):
                    f.arrived[int(begin):int(end) + 1] = [False] * (int(end) + 1 - int(begin))
                if line is None or "has not arrived" in line:
                    f.arrived = [False] * len(f.arrived)

    # ---- what it holds ----

    def check_source(self):
        shown = {n for n in os.listdir(self.run) if not n.startswith(".unshard-staging-")}
        same("names in the source", shown, {*self.steps, *self.plain})
        for name, data in self.plain.items():
            same(f"{name} in the source", read_all(f"{self.run}/{name}"), data)
        for name, c in self.steps.items():
            path = f"{self.run}/{name}"
            for n, data in c.side.items():
                same(f"{name}/{n} in the source", read_all(f"{path}/{n}"), data)
            if not c.sharded:
                got = stored(path)
                assert got in c.stored, f"{name}: the source has {sorted(got)}, which is no state that it may have"
                c.stored = c.stored[c.stored.index(got):]

    def check_published(self, name):
        """All that is complete is there, and nothing else."""
        c = self.steps[name]
        c.settled()
        if not c.sharded:
            same(f"{name}: tensors in the source", stored(f"{self.run}/{name}"), c.tensors)
        elif c.stored:
            listed = json.loads(subprocess.run([UNSHARD, "ls", f"{self.run}/{name}", "--json", "-o", "index=memory"], capture_output=True, check=True,
                                               timeout=600).stdout)["tensors"]
            same(f"{name}: keys in the source", sorted(x["key"] for x in listed), sorted(c.tensors))
            for key in sorted(c.tensors)[:2]:
                cat = subprocess.run([UNSHARD, "cat", f"{self.run}/{name}", key, "-o", "index=memory"], capture_output=True, check=True, timeout=600)
                same(f"{name}: {key} in the source", cat.stdout, c.tensors[key][2])

    def check_mount(self):
        same("names", set(os.listdir(self.m.path)), {*self.steps, *self.plain})
        for name, data in self.plain.items():
            same(name, read_all(self.path(name)), data)
        for name, c in self.steps.items():
            there = {n for n in os.listdir(f"{self.run}/{name}") if not n.startswith(".unshard-staging-")}
            same(f"{name}: names", set(os.listdir(self.path(name))), there)
            same(f"{name}: side files", there & set(SIDE), set(c.side))
            for n, data in c.side.items():
                same(f"size of {name}/{n}", os.stat(self.path(name, n)).st_size, len(data))
                same(f"{name}/{n}", read_all(self.path(name, n)), data)
            for key, (_, _, data) in c.tensors.items():
                if c.is_waiting():
                    self.check_waiting(name, c, key)
                elif key not in c.removed:
                    same(f"{name}/raw/{key}", read_all(self.path(name, "raw", key)), data)
            for key in c.removed:
                assert not os.path.exists(self.path(name, "tensors", key + ".npy")), f"{name}/tensors/{key}.npy is there"


    def check_waiting(self, name, c, key):
        """The tensor as it was or as it will be."""
        try:
            got = read_all(self.path(name, "raw", key))
        except FileNotFoundError:
            assert any(key not in state for state in c.stored), f"{name}/raw/{key} is not there"
            return
        assert got in [state[key][2] for state in c.stored if key in state], f"{name}/raw/{key} is of no state"


# ---- operations: each is (name, arguments...) and does nothing where it makes no sense ----

def some_bytes(seed, n):
    return random.Random(seed).randbytes(n)


def make(w, name):
    """A new directory, in which a save may come."""
    if name not in w.steps:
        os.mkdir(w.path(name))
        w.steps[name] = Checkpoint({}, {}, True)


def overwrite(w, name, side, seed, n, how):
    if name in w.steps:
        data = some_bytes(seed, n)
        if how == "rename":
            write_file(w.path(name, side), data)
        else:
            with open(w.path(name, side), "wb") as f:
                f.write(data)
        w.steps[name].side[side] = data


def pwrite(w, name, side, seed, at, n, how):
    if name not in w.steps or side not in w.steps[name].side:
        return
    c, data = w.steps[name], some_bytes(seed, n)
    old = c.side[side]
    if how == "mmap":
        at, data = min(at, len(old)), data[:max(0, len(old) - at)]
        if not data:
            return
    with open(w.path(name, side), "r+b", buffering=0) as f:
        if how == "mmap":
            with mmap.mmap(f.fileno(), len(old)) as view:
                view[at:at + len(data)] = data
                view.flush()
        else:
            os.pwrite(f.fileno(), data, at)
        if how == "fsync":
            os.fsync(f.fileno())
    new = bytearray(old) + bytes(max(0, at + len(data) - len(old)))
    new[at:at + len(data)] = data
    c.side[side] = bytes(new)


def truncate(w, name, side, n):
    if name in w.steps and side in w.steps[name].side:
        side_files = w.steps[name].side
        os.truncate(w.path(name, side), n)
        side_files[side] = (side_files[side] + bytes(max(0, n - len(side_files[side]))))[:n]


def rename(w, name, side, to):
    if name in w.steps and side in w.steps[name].side and side != to:
        os.rename(w.path(name, side), w.path(name, to))
        w.steps[name].side[to] = w.steps[name].side.pop(side)


def unlink(w, name, side):
    if name in w.steps and side in w.steps[name].side:
        os.unlink(w.path(name, side))
        del w.steps[name].side[side]


def rename_step(w, name, to):
    """With all that is on its way there; not onto what has something on its way."""
    if name not in w.steps or name == to:
        return
    if to in w.steps:
        fails(f"{name} onto {to}", errno.ENOTEMPTY, lambda: os.rename(w.path(name), w.path(to))) if w.steps[to].side or w.steps[to].unfinished() else None
        return
    os.rename(w.path(name), w.path(to))
    w.steps[to] = w.steps.pop(name)


def remove_step(w, name):
    """rm -r: refused while something is on its way there, after all that it could remove."""
    if name not in w.steps or name == "step1":
        return
    c = w.steps[name]
    if c.unfinished():
        fails(f"rmdir of {name}", errno.ENOTEMPTY, lambda: os.rmdir(w.path(name)))
        return
    shutil.rmtree(w.path(name))
    del w.steps[name]


def view_of(key, view):
    return f"raw/{key}" if view == "raw" else f"tree/{key.replace('.', '/')}.npy" if view == "tree" else f"tensors/{key}.npy"


def edit(w, name, which, view, seed, parts):
    """A tensor by one of its names, from nothing, in parts of which some may be left out."""
    if name not in w.steps or MODEL in w.steps[name].incoming or len(w.steps[name].tensors) < 2 or w.steps[name].is_waiting():
        return
    c = w.steps[name]
    key = sorted(c.tensors)[which % len(c.tensors)]
    path = view_of(key, view)
    if key in c.removed or any(key in f.tensors for p, f in c.incoming.items() if p != path):
        return
    dtype, shape, data = c.tensors[key]
    new = some_bytes(seed, len(data))
    image = new if view == "raw" else npy_image(DESCR[dtype], shape, new)
    c.incoming[path] = Incoming(image, {key: (dtype, shape, new)})
    send(w, name, path, parts, os.O_TRUNC)


def save(w, name, seed, parts):
    """All of the model at once."""
    if name not in w.steps or w.steps[name].unfinished() or (name == "step1" or not w.steps[name].sharded):
        return
    tensors = make_tensors(seed, count=3, rows=8, cols=16)
    w.steps[name].incoming[MODEL] = Incoming(safetensors_image(tensors), tensors)
    send(w, name, MODEL, parts, os.O_CREAT | os.O_TRUNC)


def go_on(w, name, parts):
    """With what is incomplete there."""
    if name in w.steps and w.steps[name].incoming:
        send(w, name, sorted(w.steps[name].incoming)[0], parts, 0)


def send(w, name, path, parts, flags):
    """Writes parts (of 8) of a file on its way, in this order; `all` is what is missing."""
    c = w.steps[name]
    f = c.incoming[path]
    size = len(f.image)
    fd = os.open(w.path(name, path), os.O_WRONLY | flags, 0o644)
    try:
        for part in parts if parts != "all" else range(8):
            begin, end = part * size // 8, (part + 1) * size // 8
            if parts != "all" or not all(f.arrived[begin:end]):
                os.pwrite(fd, f.image[begin:end], begin)
                f.arrived[begin:end] = [True] * (end - begin)
    finally:
        os.close(fd)
    if f.complete():
        del c.incoming[path]
        c.becomes(f.tensors if path == MODEL else {**c.tensors, **f.tensors})


def discard(w, name):
    """unlink of what is incomplete: the old tensor stays."""
    if name in w.steps and w.steps[name].incoming:
        path = sorted(w.steps[name].incoming)[0]
        os.unlink(w.path(name, path))
        del w.steps[name].incoming[path]


def remove_tensor(w, name, which):
    if name not in w.steps or MODEL in w.steps[name].incoming or w.steps[name].is_waiting():
        return
    c = w.steps[name]
    keys = sorted(k for k in c.tensors if k not in c.removed and not any(k in f.tensors for f in c.incoming.values()))
    if len(keys) > 2:
        os.unlink(w.path(name, "tensors", keys[which % len(keys)] + ".npy"))
        c.removed.add(keys[which % len(keys)])


def drop_removals(w, name):
    """rmdir of the view directory gives back what was removed and not published."""
    if name in w.steps and w.steps[name].removed and len(w.steps[name].removed) < len(w.steps[name].tensors):
        fails(f"rmdir of {name}/tensors", errno.ENOTEMPTY, lambda: os.rmdir(w.path(name, "tensors")))


def plain(w, file, seed, at, n):
    """A file beside the checkpoints."""
    old = w.plain.get(file, b"")
    with open(w.path(file), "r+b" if file in w.plain else "wb") as f:
        f.seek(at)
        f.write(some_bytes(seed, n))
    new = bytearray(old) + bytes(max(0, at + n - len(old)))
    new[at:at + n] = some_bytes(seed, n)
    w.plain[file] = bytes(new)


def publish(w, name):
    """fsync of the checkpoint's directory: EAGAIN if something is incomplete, and what is complete is there in any case."""
    if name not in w.steps:
        return
    c = w.steps[name]
    if c.removed:
        c.becomes({k: v for k, v in c.tensors.items() if k not in c.removed})
        c.removed = set()
    fd = os.open(w.path(name), os.O_RDONLY)
    try:
        if c.incoming:
            fails(f"fsync of {name}", errno.EAGAIN, lambda: os.fsync(fd))
        else:
            os.fsync(fd)
            w.check_published(name)
    finally:
        os.close(fd)


def wait(w, share):
    time.sleep(PAUSE * share)


def end(w, how):
    w.end(how)


def parts_by_chance(rnd):
    """All eight, in some order; or some of them."""
    order = rnd.sample(range(8), 8)
    return tuple(order if rnd.random() < 0.5 else order[:rnd.randrange(8)])


def generate(seed, steps):
    rnd = random.Random(f"model {seed}")

    def length():
        return rnd.choice((1, 100, 4096, 5000, 70000))

    ops = []
    for _ in range(steps):
        name, side, s = rnd.choice(["step1", *NEW]), rnd.choice(SIDE), rnd.randrange(1 << 30)
        view = rnd.choice(("raw", "tensors", "tree"))
        ops.append(rnd.choice([
            lambda: (make, rnd.choice(NEW)),
            lambda: (overwrite, name, side, s, rnd.choice((0, 1, 5000, 100000)), rnd.choice(("", "rename"))),
            lambda: (pwrite, name, side, s, rnd.randrange(80000), length(), rnd.choice(("", "fsync", "mmap"))),
            lambda: (truncate, name, side, rnd.choice((0, 1, 4095, 4096, 50000))),
            lambda: (rename, name, side, rnd.choice(SIDE)),
            lambda: (unlink, name, side),
            lambda: (rename_step, name, rnd.choice(["step1", *NEW])),
            lambda: (remove_step, name),
            lambda: (edit, name, rnd.randrange(4), view, s, parts_by_chance(rnd)),
            lambda: (edit, name, rnd.randrange(4), view, s, parts_by_chance(rnd)),
            lambda: (edit, "step1", rnd.randrange(4), view, s, parts_by_chance(rnd)),
            lambda: (save, rnd.choice(NEW), s, parts_by_chance(rnd)),
            lambda: (save, rnd.choice(NEW), s, parts_by_chance(rnd)),
            lambda: (go_on, name, rnd.choice(("all", parts_by_chance(rnd)))),
            lambda: (go_on, name, "all"),
            lambda: (discard, name),
            lambda: (remove_tensor, name, rnd.randrange(4)),
            lambda: (drop_removals, name),
            lambda: (plain, rnd.choice(("log.txt", "latest")), s, rnd.randrange(9000), length()),
            lambda: (publish, name),
            lambda: (wait, rnd.choice((0.1, 1))),
            lambda: (end, rnd.choice(("umount", "SIGTERM", "SIGKILL"))),
        ])())
    return ops + [(go_on, n, "all") for n in ("step1", *NEW) for _ in range(4)] + [(publish, n) for n in ("step1", *NEW)] + [(end, "umount")]


def show(op):
    return f"{op[0].__name__}{op[1:]!r}"


def run_ops(ops):
    """None, or (number of the operation, what went wrong)."""
    t = tempfile.mkdtemp(prefix="ufs-model-")
    w = World(t)
    try:
        for i, op in enumerate(ops):
            try:
                op[0](w, *op[1:])
                w.check_source()
                w.check_mount()
            except (AssertionError, OSError, KeyError, subprocess.SubprocessError) as e:
                return i, f"{show(op)}: {type(e).__name__}: {e}\n{messages(w)}"
        return None
    finally:
        w.m.process.kill()
        w.m.process.wait()
        unmount_hard(w.m.path)
        shutil.rmtree(t, ignore_errors=True)


def messages(w):
    with contextlib.suppress(OSError):
        return w.m.messages()[-3000:]
    return ""


def shrink(ops, seconds_left):
    """Fewer operations that still go wrong."""
    part = max(1, len(ops) // 2)
    while True:
        at = 0
        while at < len(ops) and seconds_left() > 0:
            fewer = ops[:at] + ops[at + part:]
            failed = run_ops(fewer)
            if failed:
                ops = fewer[:failed[0] + 1]
            else:
                at += part
        if part == 1 or seconds_left() <= 0:
            return ops
        part = max(1, part // 2)


def try_seed(seed, steps):
    ops = generate(seed, steps)
    failed = run_ops(ops)
    if not failed:
        return None
    until = time.monotonic() + 60
    few = shrink(ops[:failed[0] + 1], lambda: until - time.monotonic())
    again = run_ops(few) or failed
    return f"seed {seed} of {steps} steps, {len(few)} operations:\n" + "\n".join(map(show, few)) + f"\n{again[1]}"


def test_model(_):
    for seed in range(FIRST, FIRST + SEEDS):
        failed = try_seed(seed, STEPS)
        assert not failed, failed
        print(f"# seed {seed}: {STEPS} operations as the model", flush=True)


FOUND = {
    "a node's number went to another file while a staged one stood for it": [
        (overwrite, "step1", "b.bin", 1, 100000, ""), (publish, "step1"), (pwrite, "step1", "b.bin", 2, 75528, 1, "mmap"),
        (plain, "latest", 3, 1012, 100), (end, "umount")],
    "a published file came back under its name when the staged one was renamed": [
        (truncate, "step1", "config.json", 50000), (rename, "step1", "config.json", "b.bin"), (publish, "step1")],
    "half an edit over a kill, the rest afterwards": [
        (edit, "step1", 0, "tensors", 5, (1, 3, 5)), (wait, 1), (end, "SIGKILL"), (go_on, "step1", "all"), (publish, "step1")],
    "half a save over every end": [
        (make, "step2"), (save, "step2", 6, (7, 0)), (end, "SIGTERM"), (go_on, "step2", (3, 4)), (end, "umount"), (rename_step, "step2", "step3"),
        (go_on, "step3", "all"), (publish, "step3")],
}


def test_found(_):
    """What the model has found before, and what it is for."""
    for what, ops in FOUND.items():
        failed = run_ops(ops)
        assert not failed, f"{what}: {failed[1]}"


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        print("\n".join(map(show, generate(int(sys.argv[1]), int(sys.argv[2])))))
        print(try_seed(int(sys.argv[1]), int(sys.argv[2])) or "as the model")
    else:
        main({"test_found": test_found, "test_model": test_model}, 600 + 120 * SEEDS)
