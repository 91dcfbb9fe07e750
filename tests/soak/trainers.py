#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What trainers do to one mount at once, its server killed between, held against what each file must have.

    trainers.py [--minutes 10] [--seed N]

Six processes in a mount for saving: one saves steps of safetensors, beside their name and renamed, links `latest` to them and
removes old ones; one the same with files of torch's DCP, and saves over a checkpoint that is there (save=); one writes by write(2) and one
through mappings to the same pages of a file; one makes, fills, renames and removes directories without tensors; one reads tensors
of steps that are there. Every 8 to 30 s the server is killed (-9), asked to end, or unmounted, and mounted again: what was written to
storage names must be there then, what was under way as a transaction is as before or as after. At the end all is compared
through the mount, and in the source by plain reading. As root. $UNSHARD names the program, $KEEP where what is left of a failed run
is to be copied.
"""
import argparse
import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "mount"))

from mountlib import PATIENCE, Mount, fresh_directory, is_mounted, make_tensors, read_all, same, safetensors_image, sha256, stored, \
    unmount_hard, wait_for, write_checkpoint  # noqa: E402

DCP = ROOT / "data/torch_dcp/dcp_fsdp2_adamw_3r_bf16"
STEPS, KEPT, PAGES = 1 << 16, 3, 48
LATELY = 100  # steps before these are gone
ABSENT, BUILT, THERE, REMOVED = range(4)  # what a step is, as its saver knows it


class Shared:
    """What all processes see."""

    def __init__(self, t):
        self.t, self.mnt, self.run = t, t + "/mnt", t + "/run"
        self.stop, self.down, self.turn = (multiprocessing.Value(c, 0) for c in (ctypes.c_int,) * 3)
        self.parked = multiprocessing.Semaphore(0)
        self.steps = [multiprocessing.Array(ctypes.c_int, STEPS, lock=False) for _ in range(2)]
        # of each page: what was tried, and what is known to be there, by write(2) and through mappings
        self.tried, self.known = (multiprocessing.Array(ctypes.c_uint64, 2 * PAGES, lock=False) for _ in range(2))
        self.counts = multiprocessing.Array(ctypes.c_int64, 16)


def tensors_of(n):
    return make_tensors(("step", n), count=6, rows=256, cols=64)


def in_image(image):
    size, = struct.unpack_from("<Q", image)
    header = json.loads(image[8:8 + size])
    return {key: (t["dtype"], tuple(t["shape"]), image[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]])
            for key, t in header.items() if key != "__metadata__"}


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def put(path, data, flags=os.O_CREAT | os.O_TRUNC, durable=True):
    fd = os.open(path, os.O_WRONLY | flags, 0o644)
    try:
        for at in range(0, len(data), 100_000):
            os.write(fd, data[at:at + 100_000])
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


class Worker:
    """Does turn() until it is told to end. A failure is one unless the server was ended; settle() then says what is there."""

    def __init__(self, shared, number, seed):
        self.s, self.number, self.random, self.mnt, self.src = shared, number, random.Random(seed), shared.mnt, shared.run

    def count(self, n=1):
        with self.s.counts.get_lock():
            self.s.counts[self.number] += n

    def park(self):
        turn = self.s.turn.value
        self.s.parked.release()
        while self.s.turn.value == turn:
            time.sleep(0.005)
        if not self.s.stop.value:
            self.settle()

    def work(self):
        while True:
            while not self.s.down.value:
                try:
                    self.turn()
                except OSError:
                    end = time.monotonic() + PATIENCE
                    while not self.s.down.value:
                        if time.monotonic() > end:
                            raise
                        time.sleep(0.01)
                else:
                    self.count()
            self.park()
            if self.s.stop.value:
                self.final()
                return

    def settle(self):
        pass

    def final(self):
        self.settle()


class Saver(Worker):
    """Steps, each whole or not there; the last KEPT of them stay."""
    kind, name = 0, "step-"

    def __init__(self, *a):
        super().__init__(*a)
        self.n, self.latest = 0, {None}

    def make(self, where, n):
        image = safetensors_image(tensors_of(n))
        put(where + "/model.safetensors.part", image)
        os.rename(where + "/model.safetensors.part", where + "/model.safetensors")
        put(where + "/config.json", json.dumps({"model_type": "llama", "step": n}).encode(), durable=False)

    def holds(self, where, n):
        same(where, stored(where), tensors_of(n))
        same(where + "/config.json", json.loads(read_all(where + "/config.json"))["step"], n)

    def shows(self, n):
        key, (_, _, data) = self.random.choice(sorted(tensors_of(n).items()))
        same(f"{self.name}{n}/raw/{key}", read_all(f"{self.mnt}/{self.name}{n}/raw/{key}"), data)
        got = in_image(read_all(f"{self.mnt}/{self.name}{n}/model.safetensors"))
        same(f"{self.name}{n}/model.safetensors", got, tensors_of(n))

    def turn(self):
        states, n = self.s.steps[self.kind], self.n
        temp = f"{self.mnt}/{self.name}{n}.tmp"
        self.n += 1
        states[n] = BUILT
        os.mkdir(temp)
        self.make(temp, n)
        os.rename(temp, f"{self.mnt}/{self.name}{n}")
        states[n] = THERE
        if self.random.random() < 0.5:
            sync(self.mnt)
        self.point_at(n)
        for old in [i for i in range(max(0, n - LATELY), n) if states[i] in (THERE, REMOVED)][:-KEPT]:
            states[old] = REMOVED
            shutil.rmtree(f"{self.mnt}/{self.name}{old}")
            states[old] = ABSENT

    def point_at(self, n):
        old = set(self.latest)
        self.latest = {*old, f"{self.name}{n}"}
        if os.path.lexists(self.mnt + "/latest.tmp"):
            os.unlink(self.mnt + "/latest.tmp")
        os.symlink(f"{self.name}{n}", self.mnt + "/latest.tmp")
        os.rename(self.mnt + "/latest.tmp", self.mnt + "/latest")
        self.latest = {f"{self.name}{n}"}

    def settle(self):
        """In the source, which nobody else changes: the mount shows it within a second."""
        states = self.s.steps[self.kind]
        for n in range(max(0, self.n - LATELY), self.n):
            path = f"{self.src}/{self.name}{n}"
            if states[n] == REMOVED:  # a part of it may be gone, as on a disk
                shutil.rmtree(f"{self.mnt}/{self.name}{n}", ignore_errors=True)
            if states[n] == THERE or os.path.exists(path) and states[n] != ABSENT:
                self.holds(path, n)
                self.shows(n)
                states[n] = THERE
            else:
                same(f"{path} is there", os.path.exists(path), False)
                states[n] = ABSENT
            if os.path.exists(f"{self.mnt}/{self.name}{n}.tmp"):  # what there is of it
                shutil.rmtree(f"{self.mnt}/{self.name}{n}.tmp")
        if self.kind == 0:
            link = os.readlink(self.src + "/latest") if os.path.lexists(self.src + "/latest") else None
            assert link in self.latest, f"latest: {link}, want one of {self.latest}"
            same("latest in the mount", os.readlink(self.mnt + "/latest") if os.path.lexists(self.mnt + "/latest") else None, link)
            self.latest = {link}


class DcpSaver(Saver):
    """The files of a DCP, .metadata last; and a checkpoint that is there, replaced as a whole."""
    kind, name = 1, "dcp-"

    def __init__(self, *a):
        super().__init__(*a)
        self.wanted = {k: v["sha256"] for k, v in json.loads(read_all(f"{DCP}.expected.json"))["tensors"].items()}
        self.files = sorted(f.name for f in DCP.iterdir() if f.is_file() and f.name != ".metadata")
        self.base, self.trying = 0, 0

    def make(self, where, n):
        for name in self.files:
            put(f"{where}/{name}", read_all(DCP / name))
        put(where + "/step.txt", str(n).encode())
        put(where + "/.metadata.tmp", read_all(DCP / ".metadata"))
        os.rename(where + "/.metadata.tmp", where + "/.metadata")
        sync(where)

    def holds(self, where, n):
        for name in [*self.files, ".metadata"]:
            same(f"{where}/{name}", read_all(f"{where}/{name}"), read_all(DCP / name))
        same(where + "/step.txt", read_all(where + "/step.txt"), str(n).encode())

    def shows(self, n):
        where = f"{self.mnt}/{self.name}{n}/raw"
        name = self.random.choice(sorted(os.listdir(where)))
        key = os.getxattr(f"{where}/{name}", "user.unshard.key").decode()
        same(f"{where}/{name}", sha256(read_all(f"{where}/{name}")), self.wanted[key])

    def point_at(self, n):
        self.trying = self.base + 1
        os.setxattr(self.mnt + "/base", "user.unshard.save", b"hf")
        image = safetensors_image(make_tensors(("base", self.trying)))
        put(self.mnt + "/base/model.safetensors.part", image, durable=False)
        os.rename(self.mnt + "/base/model.safetensors.part", self.mnt + "/base/model.safetensors")
        sync(self.mnt + "/base")
        self.base = self.trying

    def settle(self):
        super().settle()
        with contextlib.suppress(BlockingIOError):  # the journal ends what was begun; what is incomplete stays so
            sync(self.mnt + "/base")
        got = stored(self.src + "/base")
        found = [v for v in range(self.base, self.trying + 1) if got == make_tensors(("base", v))]
        assert found, f"base is not version {self.base} or {self.trying}"
        self.base = self.trying = found[0]
        for key, (_, _, data) in got.items():
            same(f"base/raw/{key}", read_all(f"{self.mnt}/base/raw/{key}"), data)

    def final(self):
        self.settle()
        self.point_at(None)


class Words(Worker):
    """A word in each page of a file that somebody else writes to, too."""
    side, flags, paths = 0, os.O_WRONLY, ("mixed.bin",)

    def turn(self):
        page = self.random.randrange(PAGES)
        i = self.side * PAGES + page
        fd = os.open(self.mnt + "/beside/mixed.bin", self.flags)
        try:
            for _ in range(self.random.randrange(1, 30)):
                self.s.tried[i] += 1
                self.one(fd, page, i)
                if self.random.random() < 0.1:
                    os.fsync(fd)
        finally:
            os.close(fd)

    def one(self, fd, page, i):
        os.pwrite(fd, struct.pack("<Q", self.s.tried[i]) * 8, page * 4096 + 64)
        self.s.known[i] = self.s.tried[i]

    def settle(self):
        for where in (self.src, self.mnt):
            data = read_all(where + "/beside/mixed.bin")
            same("length of mixed.bin", len(data), PAGES * 4096)
            for page in range(PAGES):
                i = self.side * PAGES + page
                words = struct.unpack_from("<8Q", data, page * 4096 + 64 + 64 * self.side)
                assert all(self.s.known[i] <= w <= self.s.tried[i] for w in words), \
                    f"{where}: page {page} of mixed.bin, side {self.side}: {words}, known {self.s.known[i]}, tried {self.s.tried[i]}"
                if where == self.mnt:
                    same("words", len(set(words)) == 1 or self.s.known[i] != self.s.tried[i], True)
        for page in range(PAGES):
            i = self.side * PAGES + page
            self.s.known[i] = min(struct.unpack_from("<8Q", data, page * 4096 + 64 + 64 * self.side))


class MappedWords(Words):
    """In a process for each turn: a mapping without its server is SIGBUS."""
    side, flags = 1, os.O_RDWR

    def turn(self):
        pid = os.fork()
        if pid == 0:
            try:
                super().turn()
                os._exit(0)
            except OSError:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        if status != 0:
            raise OSError(5, f"who maps ended with {status}")

    def one(self, fd, page, i):
        with mmap.mmap(fd, 4096, offset=page * 4096) as m:
            m[128:192] = struct.pack("<Q", self.s.tried[i]) * 8
            m.flush()
        self.s.known[i] = self.s.tried[i]


class Directories(Worker):
    """Directories without tensors; `self.model` is {directory: [is it durable, {file: bytes, None: unknown}]}."""

    def __init__(self, *a):
        super().__init__(*a)
        self.model, self.either = {}, None

    def path(self, *names):
        return os.path.join(self.mnt, "beside", *names)

    def turn(self):
        d = f"d{self.random.randrange(8)}"
        if d not in self.model:
            self.either = (d, "made")
            os.mkdir(self.path(d))
            self.model[d] = [False, {}]
        else:
            self.random.choice([self.write, self.write, self.append, self.replace, self.fsync, self.rename, self.remove])(d)
        self.either = None

    def write(self, d):
        name, data = f"f{self.random.randrange(6)}", self.random.randbytes(self.random.randrange(40_000))
        files = self.model[d][1]
        files[name] = None
        put(self.path(d, name), data, durable=self.random.random() < 0.3)
        files[name] = data

    def append(self, d):
        files = self.model[d][1]
        for name in sorted(files)[:2]:
            more, old = self.random.randbytes(500), files[name]
            files[name] = None
            put(self.path(d, name), more, flags=os.O_APPEND, durable=False)
            files[name] = old + more

    def replace(self, d):
        files, data = self.model[d][1], self.random.randbytes(self.random.randrange(9000))
        files["part"] = None
        put(self.path(d, "part"), data)
        files["r"] = None
        os.rename(self.path(d, "part"), self.path(d, "r"))
        del files["part"]
        files["r"] = data

    def fsync(self, d):
        sync(self.path(d))
        self.model[d][0] = True

    def rename(self, d):
        to = f"d{self.random.randrange(8, 16)}"
        if to in self.model:
            return self.remove(to)
        self.either = (d, to)
        os.rename(self.path(d), self.path(to))
        self.model[to] = [True, self.model.pop(d)[1]]
        return None

    def remove(self, d):
        self.either = (d, "removed")
        self.model[d] = [False, {name: None for name in self.model[d][1]}]
        shutil.rmtree(self.path(d))
        del self.model[d]

    def settle(self):
        d, what = self.either or (None, None)
        if what == "made":
            self.model[d] = [False, {}]
        elif what and what != "removed" and not os.path.exists(f"{self.src}/beside/{d}"):  # if it is nowhere it was not durable
            self.model[what] = self.model.pop(d)
        self.either = None
        for where in (self.src + "/beside", self.mnt + "/beside"):
            for d, (durable, files) in list(self.model.items()):
                if not os.path.isdir(f"{where}/{d}"):
                    assert not durable, f"{where}/{d} is not there"
                    del self.model[d]
                else:
                    self.compare(f"{where}/{d}", files)
        names = {n for n in os.listdir(self.src + "/beside") if not n.startswith(".unshard-staging-")}
        same("names beside", names, {"mixed.bin", *self.model})
        same("names beside, in the mount", set(os.listdir(self.mnt + "/beside")), names)
        for d, (_, files) in self.model.items():
            self.model[d] = [True, {n: read_all(self.path(d, n)) for n in files if os.path.exists(self.path(d, n))}]

    def compare(self, where, files):
        got = {n: read_all(f"{where}/{n}") for n in os.listdir(where)}
        for n, data in files.items():
            if data is not None:
                assert n in got, f"{where}/{n} is not there"
                same(f"{where}/{n}", got[n], data)
        assert set(got) <= set(files), f"{where} has {sorted(got)}, want {sorted(files)}"


class Reader(Worker):
    """A step that was there before and after is read, and right."""

    def __init__(self, *a):
        super().__init__(*a)
        self.savers = [Saver(*a), DcpSaver(*a)]

    def turn(self):
        kind = self.random.randrange(2)
        there = [n for n in range(STEPS) if self.s.steps[kind][n] == THERE]
        if not there:
            time.sleep(0.01)
            return
        n = self.random.choice(there)
        try:
            self.savers[kind].shows(n)
        except (OSError, IndexError):
            if self.s.steps[kind][n] == THERE:
                raise


KINDS = [Saver, DcpSaver, Words, MappedWords, Directories, Reader]


def process(shared, number, seed, wrong):
    try:
        KINDS[number](shared, number, seed).work()
    except BaseException:
        wrong.put(f"{KINDS[number].__name__}: {traceback.format_exc()}")
        shared.stop.value = 1


class Rounds:
    def __init__(self, t, shared, workers, chance):
        self.t, self.s, self.workers, self.random = t, shared, workers, chance
        self.ends = {}
        self.mount()

    def mount(self):
        self.m = Mount(self.s.run, self.s.mnt, "rw")
        self.m.__enter__()

    def wait_parked(self):
        for w in self.workers:
            end = time.monotonic() + 4 * PATIENCE
            while not self.s.parked.acquire(timeout=1):
                assert all(x.is_alive() for x in self.workers), "a worker has ended"
                assert time.monotonic() < end, f"{w.name} does not stop"

    def end(self, how):
        self.ends[how] = self.ends.get(how, 0) + 1
        if how in ("killed", "asked to end"):
            self.m.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
            self.s.down.value = 1
            self.wait_parked()
        else:
            self.s.down.value = 1
            self.wait_parked()
            subprocess.run(["umount", self.m.path], check=True)
        if how != "unmounted":
            self.m.process.wait(4 * PATIENCE)
        if how == "killed":
            unmount_hard(self.m.path)
        else:
            wait_for("its mount to be gone", PATIENCE, lambda: not is_mounted(self.m.path))
        old = self.m
        self.mount()  # after umount(8) the old one may still save: the new one waits for it
        old.process.wait(4 * PATIENCE)
        assert how == "killed" or old.process.returncode == 0, f"{how}: {old.process.returncode}: {old.messages()}"
        self.s.down.value = 0
        self.s.turn.value += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    wrong = multiprocessing.Queue()
    with fresh_directory() as t:
        shared = Shared(t)
        write_checkpoint(t + "/run/base", make_tensors(("base", 0)))
        os.mkdir(shared.mnt)  # nothing is made in it while nothing is mounted there
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", shared.mnt], check=True)
        os.mkdir(t + "/run/beside")
        put(t + "/run/beside/mixed.bin", bytes(PAGES * 4096))
        workers = []
        r = Rounds(t, shared, workers, random.Random(args.seed))
        for i, kind in enumerate(KINDS):
            workers.append(multiprocessing.Process(target=process, args=(shared, i, args.seed * 100 + i, wrong), name=kind.__name__))
            workers[-1].start()
        said, end, failed = [], time.monotonic() + 60 * args.minutes, None
        try:
            while time.monotonic() < end and not shared.stop.value:
                until = time.monotonic() + r.random.uniform(8, 30)
                while time.monotonic() < until and not shared.stop.value:
                    time.sleep(0.05)
                if not shared.stop.value:
                    r.end(r.random.choice(["killed", "killed", "killed", "asked to end", "unmounted"]))
                    print(f"{sum(r.ends.values())} {r.ends}, turns {dict(zip((k.__name__ for k in KINDS), shared.counts))}", flush=True)
            if not shared.stop.value:
                shared.down.value = 1
                r.wait_parked()
                shared.stop.value = 1
                shared.turn.value += 1
                for w in workers:
                    w.join(300)
        except BaseException:
            failed = traceback.format_exc()
        time.sleep(0.5)
        while not wrong.empty():
            said.append(wrong.get())
        for w in workers:
            if w.is_alive():
                w.kill()
        if failed:
            said.append(failed)
        if said:
            said.append("--- messages of the mount\n" + r.m.messages())
            keep = os.environ.get("KEEP")
            print(*said, sep="\n", flush=True)
            if keep:
                r.m.process.kill()
                r.m.process.wait()
                r.m.process.returncode = 0
                unmount_hard(r.m.path)
                shutil.copytree(t, keep, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("cache"))
        else:
            for where in (shared.mnt, shared.mnt + "/beside"):  # who stages something takes away what killed ones have left there
                os.mkdir(where + "/last")
                os.rmdir(where + "/last")
            subprocess.run(["umount", r.m.path], check=True)
            r.m.process.wait(PATIENCE)
            said += final(shared)
        r.m.__exit__(None, None, None)
        subprocess.run(["umount", shared.mnt], check=True)
    print(*said, sep="\n")
    print(f"{'not ok' if said else 'ok'} - ends {r.ends}, turns {dict(zip((k.__name__ for k in KINDS), shared.counts))}")
    sys.exit(bool(said))


def final(shared):
    """Unmounted: in the source, by plain reading; nothing of ours is left in it."""
    said, savers = [], [Saver(shared, 0, 0), DcpSaver(shared, 1, 0)]
    for kind, saver in enumerate(savers):
        there = {f"{saver.name}{n}" for n in range(STEPS) if shared.steps[kind][n] == THERE}
        got = {n for n in os.listdir(shared.run) if n.startswith(saver.name)}
        if got != there:
            said.append(f"steps in the source: {got}, want {there}")
        for name in there & got:
            saver.holds(f"{shared.run}/{name}", int(name.removeprefix(saver.name)))
    left = [str(p) for p in pathlib.Path(shared.run).rglob(".unshard-staging-*")]
    return said + ([f"left in the source: {left}"] if left else [])


if __name__ == "__main__":
    main()
