#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Random operations on a mount that is written to, held against a model in memory; what differs is shrunk to few operations.

$MODEL_SEEDS is how many sequences are tried (from $MODEL_SEED on), $MODEL_STEPS how long each is. `model.py SEED STEPS` runs
one of them and prints its operations.
"""
import errno
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mount"))
from mountlib import Mount, fails, main, make_tensors, npy_image, read_all, safetensors_image, same, stored, unmount_hard, \
    write_checkpoint, write_file  # noqa: E402

SEEDS = int(os.environ.get("MODEL_SEEDS", "3"))
FIRST = int(os.environ.get("MODEL_SEED", "1"))
STEPS = int(os.environ.get("MODEL_STEPS", "60"))
SIDE = ["a.txt", "b.bin", "config.json"]
NEW = ["step2", "step3"]
DESCR = {"F32": "<f4", "BF16": "<V2", "U8": "|u1"}


class Checkpoint:
    """Side files and tensors {key: (dtype, shape, bytes)}."""

    def __init__(self, side, tensors):
        self.side, self.tensors = dict(side), dict(tensors)


class Stage:
    """What was written since the last publication, by name."""

    def __init__(self, old):
        self.side = dict(old.side) if old else {}
        self.raw, self.npy = {}, {}  # bytes of a name that was written; None: it was removed
        self.tensors = dict(old.tensors) if old else {}  # what publication will make of it
        self.by_npy = set()  # keys that were written in tensors/ last
        self.hold = None


class World:
    """The mount, and what the source and the mount should hold."""

    def __init__(self, t):
        self.t, self.run = t, t + "/run"
        tensors = make_tensors(1, count=4, rows=16, cols=24)
        write_checkpoint(self.run + "/step1", tensors, shards=2)
        self.source = {"step1": Checkpoint({"config.json": read_all(self.run + "/step1/config.json")}, tensors)}
        self.stages = {}
        self.plain = {}
        self.m = None
        self.mount()

    def mount(self):
        self.m = Mount(self.run, self.t + "/mnt", "rw")
        self.m.__enter__()

    def path(self, *names):
        return os.path.join(self.m.path, *names)

    def stage(self, name):
        """The stage of a checkpoint; a file of it stays open for writing, so that nothing is published by itself."""
        if name not in self.stages:
            s = self.stages[name] = Stage(self.source.get(name))
            s.hold = os.open(self.path(name, "hold"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            s.side["hold"] = b""
        return self.stages[name]

    def release(self):
        for s in self.stages.values():
            os.close(s.hold)
        names, self.stages = self.stages, {}
        return names

    def publish(self, umount):
        names = self.release()
        if umount:
            self.m.process.send_signal(signal.SIGTERM) if not names else os.setxattr(self.m.path, "user.unshard.publish", b"")
            self.m.__exit__(None, None, None)
        else:
            for name in names:
                fd = os.open(self.path(name), os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
        for name, s in names.items():
            self.source[name] = Checkpoint(s.side, s.tensors)
        self.check_source()
        if umount:
            self.mount()

    def crash(self):
        self.m.process.send_signal(signal.SIGKILL)
        self.m.process.wait()
        self.m.log.close()
        for s in self.stages.values():
            try:
                os.close(s.hold)
            except OSError:
                pass
        unmount_hard(self.m.path)
        self.stages = {}
        self.check_source()
        self.mount()

    # ---- what it holds ----

    def check_source(self):
        shown = {n for n in os.listdir(self.run) if not n.startswith(".unshard-staging-")}
        same("names in the source", shown, {*self.source, *self.plain})
        for name, c in self.source.items():
            path = f"{self.run}/{name}"
            same(f"{name}: tensors in the source", stored(path), c.tensors)
            side = [n for n in os.listdir(path) if "safetensors" not in n and not n.startswith(".unshard-staging-")]
            same(f"{name}: side files in the source", sorted(side), sorted(c.side))
            for n in side:
                same(f"{name}/{n} in the source", read_all(f"{path}/{n}"), c.side[n])
        for name, data in self.plain.items():
            same(f"{name} in the source", read_all(f"{self.run}/{name}"), data)

    def check_mount(self):
        same("names", {n for n in os.listdir(self.m.path) if n != ".unshard"}, {*self.source, *self.stages, *self.plain})
        for name, data in self.plain.items():
            same(name, read_all(self.path(name)), data)
        for name in {*self.source, *self.stages}:
            self.check_checkpoint(name)

    def check_checkpoint(self, name):
        old, s = self.source.get(name), self.stages.get(name)
        side = s.side if s else old.side
        shown = {n for n in os.listdir(self.path(name)) if n in SIDE or n == "hold"}
        same(f"{name}: side files", shown, set(side))
        for n, data in side.items():
            same(f"size of {name}/{n}", os.stat(self.path(name, n)).st_size, len(data))
            same(f"{name}/{n}", read_all(self.path(name, n)), data)
        if not old:
            return
        for key, (dtype, shape, data) in old.tensors.items():
            raw = s.raw.get(key, data) if s else data
            same(f"{name}/raw/{key}", read_all(self.path(name, "raw", key)), raw)
            if s and key in s.npy and s.npy[key] is None:
                assert not os.path.exists(self.path(name, "tensors", key + ".npy")), f"{name}/tensors/{key}.npy is there"
            elif s and key in s.npy:
                same(f"{name}/tensors/{key}.npy", read_all(self.path(name, "tensors", key + ".npy")), s.npy[key])


# ---- operations: each is (name, arguments...) and does nothing where it makes no sense ----

def some_bytes(seed, n):
    return random.Random(seed).randbytes(n)


def there(w, name):
    return name in w.source or name in w.stages


def make(w, name, seed):
    if there(w, name):
        return
    os.mkdir(w.path(name))
    s = w.stage(name)
    s.tensors = make_tensors(seed, count=3, rows=8, cols=16)
    write_file(w.path(name, "model.safetensors"), safetensors_image(s.tensors))


def overwrite(w, name, side, seed, n):
    if there(w, name):
        s = w.stage(name)
        with open(w.path(name, side), "wb") as f:
            f.write(some_bytes(seed, n))
        s.side[side] = some_bytes(seed, n)


def pwrite(w, name, side, seed, at, n, how):
    if not there(w, name) or side not in w.stage(name).side:
        return
    s, data = w.stage(name), some_bytes(seed, n)
    old = s.side[side]
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
    s.side[side] = bytes(new)


def truncate(w, name, side, n):
    if there(w, name) and side in w.stage(name).side:
        s = w.stage(name)
        with open(w.path(name, side), "r+b") as f:
            f.truncate(n)
        s.side[side] = (s.side[side] + bytes(max(0, n - len(s.side[side]))))[:n]


def rename(w, name, side, to):
    """mv: what is published is copied."""
    if there(w, name) and side in w.stage(name).side and side != to:
        s = w.stage(name)
        shutil.move(w.path(name, side), w.path(name, to))
        s.side[to] = s.side.pop(side)


def unlink(w, name, side):
    if there(w, name) and side in w.stage(name).side:
        os.unlink(w.path(name, side))
        del w.stage(name).side[side]


def tensor_of(w, name, which):
    """The stage, and key, dtype, shape and bytes of one of its tensors that was not removed; or None."""
    if name not in w.source:
        return None
    s, old = w.stage(name), w.source[name].tensors
    key = sorted(old)[which % len(old)]
    return None if s.npy.get(key, b"") is None else (s, key, *old[key])


def raw(w, name, which, seed, at, n):
    found = tensor_of(w, name, which)
    if not found:
        return
    s, key, dtype, shape, data = found
    at = min(at, len(data) - 1)
    new = some_bytes(seed, min(n, len(data) - at))
    if key in s.by_npy:
        fails(f"raw/{key}, of which tensors/ has newer bytes", errno.EBUSY, lambda: open(w.path(name, "raw", key), "r+b"))
        return
    with open(w.path(name, "raw", key), "r+b") as f:
        f.seek(at)
        f.write(new)
    was = s.raw.get(key, data)
    s.raw[key] = was[:at] + new + was[at + len(new):]
    s.tensors[key] = (dtype, shape, s.raw[key])


def npy(w, name, which, seed):
    found = tensor_of(w, name, which)
    if not found:
        return
    s, key, dtype, shape, data = found
    new = some_bytes(seed, len(data))
    s.npy[key] = npy_image(DESCR[dtype], shape, new)
    write_file(w.path(name, "tensors", key + ".npy"), s.npy[key])
    s.tensors[key] = (dtype, shape, new)
    s.by_npy.add(key)


def npy_part(w, name, which, seed, at, n):
    """A part of tensors/KEY.npy, of which raw/ may have newer bytes."""
    found = tensor_of(w, name, which)
    if not found:
        return
    s, key, dtype, shape, data = found
    path = w.path(name, "tensors", key + ".npy")
    if key in s.raw and key not in s.by_npy:
        fails(f"{path}, of which raw/ has newer bytes", errno.EBUSY, lambda: open(path, "r+b"))
        return
    was = s.npy.get(key) or read_all(path)
    begin = len(was) - len(data)
    at = min(at, len(data) - 1)
    new = some_bytes(seed, min(n, len(data) - at))
    with open(path, "r+b") as f:
        f.seek(begin + at)
        f.write(new)
    s.npy[key] = was[:begin + at] + new + was[begin + at + len(new):]
    s.tensors[key] = (dtype, shape, s.npy[key][begin:])
    s.by_npy.add(key)


def raw_whole(w, name, which, seed):
    """The last close counts."""
    found = tensor_of(w, name, which)
    if not found:
        return
    s, key, dtype, shape, data = found
    s.raw[key] = some_bytes(seed, len(data))
    with open(w.path(name, "raw", key), "wb") as f:
        f.write(s.raw[key])
    s.tensors[key] = (dtype, shape, s.raw[key])
    s.by_npy.discard(key)


def remove_tensor(w, name, which):
    if name not in w.source or len(w.stage(name).tensors) < 2:
        return
    s, old = w.stage(name), w.source[name].tensors
    key = sorted(old)[which % len(old)]
    if key in s.npy or key in s.raw:
        return
    os.unlink(w.path(name, "tensors", key + ".npy"))
    s.npy[key] = None
    del s.tensors[key]


def model(w, name, seed):
    """All of the model at once; only where nothing else of it is staged."""
    if name not in w.source or w.stage(name).npy or w.stage(name).raw or not os.path.exists(w.path(name, "model.safetensors")):
        return
    s = w.stage(name)
    s.tensors = make_tensors(seed, count=4, rows=8, cols=16)
    with open(w.path(name, "model.safetensors"), "wb") as f:
        f.write(safetensors_image(s.tensors))
    w.publish(False)


def plain(w, file, seed, at, n):
    """A file beside the checkpoints is the source's own."""
    old = w.plain.get(file, b"")
    with open(w.path(file), "r+b" if file in w.plain else "wb") as f:
        f.seek(at)
        f.write(some_bytes(seed, n))
    new = bytearray(old) + bytes(max(0, at + n - len(old)))
    new[at:at + n] = some_bytes(seed, n)
    w.plain[file] = bytes(new)


def publish(w, umount):
    w.publish(umount)


def crash(w):
    w.crash()


def generate(seed, steps):
    rnd = random.Random(f"model {seed}")

    def length():
        return rnd.choice((1, 100, 4096, 5000, 70000))

    ops = []
    for _ in range(steps):
        name, side, s = rnd.choice(["step1", *NEW]), rnd.choice(SIDE), rnd.randrange(1 << 30)
        ops.append(rnd.choice([
            lambda: (make, rnd.choice(NEW), s),
            lambda: (overwrite, name, side, s, rnd.choice((0, 1, 5000, 100000))),
            lambda: (pwrite, name, side, s, rnd.randrange(80000), length(), rnd.choice(("", "fsync", "mmap"))),
            lambda: (pwrite, name, side, s, rnd.randrange(5000), length(), rnd.choice(("", "fsync", "mmap"))),
            lambda: (truncate, name, side, rnd.choice((0, 1, 4095, 4096, 50000))),
            lambda: (rename, name, side, rnd.choice(SIDE)),
            lambda: (unlink, name, side),
            lambda: (raw, name, rnd.randrange(4), s, rnd.randrange(1500), length()),
            lambda: (raw, name, rnd.randrange(4), s, rnd.randrange(1500), length()),
            lambda: (npy, name, rnd.randrange(4), s),
            lambda: (npy_part, name, rnd.randrange(4), s, rnd.randrange(1500), length()),
            lambda: (raw_whole, name, rnd.randrange(4), s),
            lambda: (remove_tensor, name, rnd.randrange(4)),
            lambda: (model, name, s),
            lambda: (plain, rnd.choice(("log.txt", "latest")), s, rnd.randrange(9000), length()),
            lambda: (publish, rnd.random() < 0.3),
            lambda: (crash,),
        ])())
    return ops + [(publish, True)]


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
                w.check_mount()
            except (AssertionError, OSError, KeyError) as e:
                return i, f"{show(op)}: {type(e).__name__}: {e}\n{w.m.messages()}"
        return None
    finally:
        w.m.process.kill()
        w.m.process.wait()
        unmount_hard(w.m.path)
        shutil.rmtree(t, ignore_errors=True)


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
    import time

    ops = generate(seed, steps)
    failed = run_ops(ops)
    if not failed:
        return None
    end = time.monotonic() + 60
    few = shrink(ops[:failed[0] + 1], lambda: end - time.monotonic())
    again = run_ops(few) or failed
    return f"seed {seed} of {steps} steps, {len(few)} operations:\n" + "\n".join(map(show, few)) + f"\n{again[1]}"


def test_model(_):
    for seed in range(FIRST, FIRST + SEEDS):
        failed = try_seed(seed, STEPS)
        assert not failed, failed
        print(f"# seed {seed}: {STEPS} operations as the model", flush=True)


FOUND = {
    "a node's number went to another file while a staged one stood for it": [
        (overwrite, "step1", "b.bin", 1, 100000), (publish, False), (pwrite, "step1", "b.bin", 2, 75528, 1, "mmap"),
        (plain, "latest", 3, 1012, 100), (publish, True)],
    "a published file came back under its name when the staged one was renamed": [
        (truncate, "step1", "config.json", 50000), (rename, "step1", "config.json", "b.bin"), (publish, False)],
}


def test_found(_):
    """What the model has found before."""
    for what, ops in FOUND.items():
        failed = run_ops(ops)
        assert not failed, f"{what}: {failed[1]}"


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        print("\n".join(map(show, generate(int(sys.argv[1]), int(sys.argv[2])))))
        print(try_seed(int(sys.argv[1]), int(sys.argv[2])) or "as the model")
    else:
        main({"test_found": test_found, "test_model": test_model}, 600 + 120 * SEEDS)
