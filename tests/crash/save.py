#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Transactions of a mount whose server is killed, cut from power and denied room: the old checkpoint or the new one, whole,
once the next mount has been there; and what is not published is gone on with.

Programs pause between their calls, by chance: $CRASH_PAUSE is the longest, in seconds.
"""
import contextlib
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time

from crashlib import EIO, ENOSPC, POINTS, SEED, STATES, faulty, points, run, same_tree
from disk import Recording, SameInodes, tree
from mountlib import PATIENCE, UNSHARD, Mount, make_tensors, npy_image, read_all, safetensors_image, same, tensor_bytes, unmount_hard, wait_for, \
    write_checkpoint, write_file

LONG = POINTS == "all" or STATES >= 100
ALL_NEW = ["hf:max_shard_size=20KB", "dcp:ranks=3", "dcp-hf:ranks=2", "torch_dist:ranks=2", "zarr", "olmo:ranks=2", "olmo-step:ranks=2", "pt", "npz"]
NEW = ALL_NEW if LONG else ["hf", "dcp:ranks=2"]
EDIT = ["hf", "dcp", "dcp-hf", "torch_dist", "zarr", "pt", "npz"] if LONG else ["hf", "dcp"]
PAUSE = float(os.environ.get("CRASH_PAUSE", "0.2"))
PAUSES = random.Random(f"{SEED} pauses")
KEYS = list(make_tensors(1))
KEY, GONE = KEYS[0], KEYS[1]


def pause():
    time.sleep(PAUSES.choice((0, 0, 0.3, 1)) * PAUSE)


def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- what is done: each can be done again after whatever happened, and ends in a publication ----

def write_here_and_there(path, image):
    """Not in order, and by two handles."""
    a = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    b = os.open(path, os.O_WRONLY)
    middle = len(image) // 2
    os.pwrite(b, image[middle:], middle)
    pause()
    os.pwrite(a, image[:middle], 0)
    pause()
    os.close(a)
    os.close(b)
    pause()


def new_checkpoint(m, fmt):
    os.setxattr(m / "step2", "user.unshard.save", fmt.encode())
    write_here_and_there(m / "step2/model.safetensors", safetensors_image(make_tensors(2)))
    fsync(m / "step2")


def new_set(m, fmt):
    """A set over a checkpoint of more files: they go, and their index."""
    os.setxattr(m / "step1", "user.unshard.save", fmt.encode())
    tensors = make_tensors(2)
    for i in range(2):
        write_here_and_there(m / f"step1/model-{i + 1:05}-of-00002.safetensors", safetensors_image({k: tensors[k] for k in list(tensors)[i::2]}))
    fsync(m / "step1")


def edited(m, _):
    """One tensor: each is a transaction of its own."""
    write_here_and_there(m / f"step1/tensors/{KEY}.npy", npy_image("<f4", (64, 32), tensor_bytes("edited", len(make_tensors(1)[KEY][2]))))
    fsync(m / "step1")


def removed(m, _):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(m / f"step1/tensors/{GONE}.npy")
    fsync(m / "step1")


class Saving:
    """One script of writes, run again and again over the same source."""

    def __init__(self, t, name, script, fmt):
        self.t, self.name, self.script, self.fmt = t, f"{name} {fmt}", script, fmt
        self.place, self.base = t + "/run", t + "/base"
        self.rnd = random.Random(f"{SEED} {self.name}")
        shutil.rmtree(self.base, ignore_errors=True)
        os.makedirs(self.base)
        write_checkpoint(t + "/hf", make_tensors(1), shards=3)
        if script is new_checkpoint:
            os.mkdir(self.base + "/step2")
        elif script is new_set:
            shutil.copytree(t + "/hf", self.base + "/step1")
        else:
            to = fmt.split(":")[0]
            ranks = ["--ranks", "2"] if to.startswith("dcp") or to == "torch_dist" else []
            subprocess.run([UNSHARD, "convert", t + "/hf", self.base + "/step1", "--to", to, *ranks], check=True, timeout=600)
            write_file(self.base + "/step1/notes.txt", b"side file")
        write_file(self.base + "/latest.txt", b"1")
        self.old = tree(self.base)

    def clear(self):
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.base, self.place)

    def mount(self, boot="before", **what):
        return Mount(self.place, self.t + "/mnt", "rw", env=faulty(self.place, self.t + "/cache", boot=boot, **what))

    def record(self):
        self.clear()
        recording, log = SameInodes(self.place, self.t + "/keep"), self.t + "/log"
        for end in "", ".data":
            if os.path.exists(log + end):
                os.unlink(log + end)
        with self.mount(log=log) as m:
            self.script(m, self.fmt)
            told = sum(1 for _ in open(log))
        recording.load(log)
        recording.told = told
        self.new = tree(self.place)
        assert self.new != self.old
        same(f"{self.name}: leftovers", self.leftovers(), [])
        return recording

    def leftovers(self):
        return [n for n in os.listdir(self.place) if n.startswith(".unshard-staging-")]

    def is_new(self, what):
        """Is it the new one? If not it is the old one; what is staged is hidden."""
        got = {n: d for n, d in tree(self.place).items() if not n.startswith(".unshard-staging-")}
        if got == self.old:
            return False
        same_tree(f"{self.name}: {what}", got, self.new)
        return True

    def looked_at(self, what, boot="before"):
        """The next mount has been there: the journal has finished or undone what was begun. Is it the new one?"""
        with self.mount(boot) as m:
            for step in "step1", "step2":
                with contextlib.suppress(FileNotFoundError, BlockingIOError):
                    fsync(m / step)
        return self.is_new(what)

    def recovers(self, what, must=False, boot="before"):
        """Old or new after a look; the next mount saves the same, and leaves nothing else."""
        new = self.looked_at(what, boot)
        assert new or not must, f"{self.name}: {what}: it was told to be published"
        with self.mount(boot) as m:
            self.script(m, self.fmt)
        assert self.is_new(what + ", again"), f"{self.name}: {what}, again: nothing was saved"
        same(f"{self.name}: {what}: leftovers", self.leftovers(), [])
        return new


def each(t):
    for name, script, formats in (("new", new_checkpoint, NEW), ("set", new_set, ["hf"]), ("edit", edited, EDIT), ("remove", removed, EDIT)):
        for fmt in formats:
            shutil.rmtree(t + "/cache", ignore_errors=True)
            yield Saving(t, name, script, fmt)


def test_killed(t):
    for save in each(t):
        recording = save.record()
        count, tried, news = len(recording.ops), 0, 0
        for at in points(save.rnd, recording):
            save.clear()
            do = save.rnd.choice(("kill", "torn"))
            m = save.mount(at=at, do=do)
            m.__enter__()
            told = False
            try:
                save.script(m, save.fmt)
                told = True
            except OSError:
                m.process.wait(PATIENCE)
            m.process.kill()
            m.process.wait()
            m.log.close()
            unmount_hard(m.path)
            news += save.recovers(f"{do} at operation {at} of {count}", told)
            tried += 1
        print(f"# {save.name}: {count} operations, {tried} kills, {news} of them new, all old or new", flush=True)


def test_killed_again_while_it_recovers(t):
    """The mount that ends what a dead one began is killed as well."""
    for save in each(t):
        recording = save.record()
        rename = [op.index + 1 for op in recording.ops if op.kind == "R"]
        tried = 0
        for at in save.rnd.sample(rename, min(3, len(rename))):
            for second in range(1, 40, 1 if LONG else 7):
                save.clear()
                for point in (at, second):
                    m = save.mount(at=point, do="kill")
                    try:
                        m.__enter__()
                        for step in "step1", "step2":
                            if point == at:
                                save.script(m, save.fmt)
                            elif os.path.exists(m / step):
                                fsync(m / step)
                    except (OSError, AssertionError):
                        pass
                    m.process.kill()
                    m.process.wait()
                    m.log.close()
                    unmount_hard(m.path)
                save.recovers(f"killed at {at} of {len(recording.ops)}, and at {second} of the recovery")
                tried += 1
        print(f"# {save.name}: {tried} recoveries killed, all old or new", flush=True)


def test_without_power(t):
    for save in each(t):
        recording = save.record()
        count, news = len(recording.ops), 0
        states = 8 * STATES if LONG else STATES
        for i in range(states):
            after = recording.told if i == 0 else save.rnd.randint(1, count)
            recording.crash(after, save.rnd, save.place)
            news += save.recovers(f"power lost after operation {after} of {count} (state {i})", after >= recording.told, "after")
        print(f"# {save.name}: {count} operations, {states} states, {news} of them new, all whole", flush=True)


def test_continued_after_a_kill(t):
    """Half of what is written, a kill at any operation, the other half: what had arrived is not lost, what is told to be missing is all that is."""
    image = safetensors_image(make_tensors(2))
    half = len(image) // 2
    for fmt in NEW:
        save = Saving(t, "new", new_checkpoint, fmt)
        count, tried = len(save.record().ops), 0
        for at in sorted(save.rnd.sample(range(1, count), min(4 if not LONG else count - 1, count - 1))):
            save.clear()
            with contextlib.suppress(OSError):
                with save.mount(at=at, do="kill") as m:
                    m.process.returncode = 0
                    os.setxattr(m / "step2", "user.unshard.save", fmt.encode())
                    fd = os.open(m / "step2/model.safetensors", os.O_WRONLY | os.O_CREAT, 0o644)
                    os.write(fd, image[:half])
                    os.close(fd)
                    m.process.kill()
                    m.process.wait()
            unmount_hard(t + "/mnt")
            said = subprocess.run([UNSHARD, "doctor", save.place], capture_output=True, text=True, timeout=600, check=False).stdout
            missing = [(int(a), int(b) + 1) for a, b in re.findall(r"bytes (\d+) to (\d+) of", said)] or [(0, len(image))]
            assert any(a <= half < b for a, b in missing) or missing[-1][1] == len(image), (at, said)
            with save.mount() as m:
                os.setxattr(m / "step2", "user.unshard.save", fmt.encode())
                fd = os.open(m / "step2/model.safetensors", os.O_WRONLY | os.O_CREAT, 0o644)
                for a, b in missing:
                    os.pwrite(fd, image[a:b], a)
                os.close(fd)
                fsync(m / "step2")
            assert save.is_new(f"continued after a kill at {at} of {count}"), "nothing was saved"
            tried += 1
        print(f"# {fmt}: {tried} saves continued", flush=True)


def test_files_beside_without_power(t):
    """What fsync says of files and names outside of checkpoints holds, also by a descriptor for reading."""
    place, log, text = t + "/run", t + "/log", b"step2 " * 1000
    os.mkdir(place)
    write_file(place + "/latest.txt", b"step1")
    recording = Recording(place)
    with Mount(place, t + "/mnt", "rw", env=faulty(place, t + "/cache", log=log)) as m:
        with open(m / "latest.txt", "wb") as f:
            f.write(text)
        with open(m / "log.txt", "wb") as f:
            f.write(text)
        os.unlink(m / "latest.txt")
        os.rename(m / "log.txt", m / "latest.txt")
        with open(m / "log.txt", "wb") as f:
            f.write(text)
        for name, flags in (("log.txt", os.O_RDONLY), ("latest.txt", os.O_RDONLY), (".", os.O_RDONLY | os.O_DIRECTORY)):
            fd = os.open(m / name, flags)
            os.fsync(fd)
            os.close(fd)
        with open(log) as f:
            told = sum(1 for _ in f)
    recording.load(log)
    rnd = random.Random(SEED)
    for i in range(8 * STATES):
        recording.crash(told, rnd, place)
        same_tree(f"state {i}", tree(place), {"latest.txt": text, "log.txt": text})


def test_synchronous_writes_without_power(t):
    """What was written by O_DSYNC, O_SYNC or RWF_DSYNC is there, without an fsync."""
    place, log = t + "/run", t + "/log"
    os.mkdir(place)
    for name in "data", "all", "end", "once":
        write_file(f"{place}/{name}", b"old " * 1000)
    recording = Recording(place)
    with Mount(place, t + "/mnt", "rw", env=faulty(place, t + "/cache", log=log)) as m:
        for name, flags in ("data", os.O_DSYNC), ("all", os.O_SYNC), ("end", os.O_SYNC | os.O_APPEND):
            fd = os.open(m / name, os.O_WRONLY | flags)
            os.write(fd, b"new " * 1000)
            os.close(fd)
        fd = os.open(m / "once", os.O_WRONLY)
        os.pwritev(fd, [b"new " * 1000], 0, os.RWF_DSYNC)
        os.close(fd)
        with open(log) as f:
            told = sum(1 for _ in f)
    recording.load(log)
    rnd = random.Random(SEED)
    for i in range(8 * STATES):
        recording.crash(told, rnd, place)
        same_tree(f"state {i}", tree(place), {"data": b"new " * 1000, "all": b"new " * 1000, "end": b"old " * 1000 + b"new " * 1000, "once": b"new " * 1000})


def test_faults(t):
    """What fails is told, the old checkpoint stays, and the same mount saves it when the disk is well again."""
    for save in each(t):
        recording = save.record()
        count, tried = len(recording.ops), 0
        off = t + "/off"
        for code in ENOSPC, EIO:
            for at in points(save.rnd, recording, 2):
                save.clear()
                if os.path.exists(off):
                    os.unlink(off)
                what = f"{save.name}: error {code} from operation {at} of {count}"
                with save.mount(at=at, do=code, all=1, off=off) as m:
                    told = True
                    try:
                        save.script(m, save.fmt)
                    except OSError as e:
                        told = False
                        assert e.errno in (code, EIO, errno.EAGAIN, errno.EINPROGRESS), f"{what}: {e}"
                    write_file(off, b"")
                    if told:
                        assert save.is_new(what), f"{what}: was not told"
                    else:
                        try:
                            save.script(m, save.fmt)
                        except OSError as e:  # the step that had begun is taken for another's: both are kept
                            assert e.errno in (errno.ESTALE, errno.EAGAIN), f"{what}, then none: {e}"
                            told = None
                if told is None:
                    subprocess.run([UNSHARD, "doctor", "--discard", save.place], check=True, stdout=subprocess.DEVNULL)
                    with save.mount() as m:
                        save.script(m, save.fmt)
                if not told:
                    assert save.is_new(f"{what}, then none"), f"{what}, then none: not saved"
                same(f"{what}: leftovers", save.leftovers(), [])
                tried += 1
        print(f"# {save.name}: {count} operations, {tried} faults, all old or new", flush=True)


def test_a_failed_fsync_is_not_forgotten(t):
    """The kernel tells it once and takes the bytes for written. Whoever is told then that all is published has it on the disk."""
    for save in each(t):
        syncs = [op.index + 1 for op in save.record().ops if op.kind in "SY"]
        again = 0
        for at in syncs if LONG else save.rnd.sample(syncs, min(4, len(syncs))):
            save.clear()
            recording, log = SameInodes(save.place, t + "/keep"), t + "/log"
            for end in "", ".data":
                if os.path.exists(log + end):
                    os.unlink(log + end)
            told = 0
            with save.mount(at=at, do=EIO, log=log) as m:
                try:
                    save.script(m, save.fmt)
                    continue  # it was not asked for, or made good
                except OSError as e:
                    if e.filename:  # of open(2): nothing was taken
                        continue
                with contextlib.suppress(OSError):
                    fsync(m / ("step2" if save.script is new_checkpoint else "step1"))
                    told = sum(1 for _ in open(log))
            if told:
                recording.load(log)
                for i in range(STATES):
                    recording.crash(told, save.rnd, save.place)
                    what = f"fsync {at} failed, then it was told to be published: state {i}"
                    assert save.looked_at(what, "after"), f"{save.name}: {what}: it is not there"
                again += 1
        print(f"# {save.name}: {len(syncs)} fsyncs, {again} times a second one said that all is well", flush=True)


def stopped_or(m, done):
    """Waits until the server has stopped, or done() is true; which?"""
    stopped = []

    def look():
        pid, status = os.waitpid(m.process.pid, os.WNOHANG | os.WUNTRACED)
        stopped.extend([True] if pid and os.WIFSTOPPED(status) else [])
        return stopped or done()

    wait_for("the operation", PATIENCE, look, step=0.002)
    return bool(stopped)


def publish_with(save, m, change):
    """Publishes, with a change by others at the operation where it stops, or after it; the errors that were told."""
    errors = []

    def publish():
        try:
            save.script(m, save.fmt)
        except OSError as e:
            errors.append(e)

    thread = threading.Thread(target=publish)
    thread.start()
    stopped = stopped_or(m, lambda: not thread.is_alive())
    change()
    if stopped:
        m.process.send_signal(signal.SIGCONT)
    thread.join(PATIENCE)
    return errors


def test_changed_by_others(t):
    """Somebody writes into the directory of the checkpoint while it is saved: what they wrote stays, and the save is there or refused."""
    def name(path, how):
        """A side file; or, of the storage, the last file."""
        shards = [n for n in os.listdir(path) if n.endswith((".safetensors", ".distcp"))]
        return f"{path}/" + {"new file": "others.txt", "shard": max(shards)}.get(how, "config.json")

    def change(path, how):
        if how in ("new file", "replaced"):
            write_file(name(path, how), b"others")
        else:
            with open(name(path, how), "r+b") as f:
                f.seek(-6 if how == "shard" else 0, os.SEEK_END)
                f.write(b"others")

    def there(path, how):
        return read_all(name(path, how)).endswith(b"others")

    def value(path):
        return subprocess.run([UNSHARD, "cat", path, KEY, "-o", "index=memory"], capture_output=True, check=True, timeout=600).stdout

    for fmt in EDIT[:2]:
        save = Saving(t, "changed", changed_tensor, fmt)
        recording = save.record()
        data = make_tensors(1)[KEY][2]
        count, tried, kept = len(recording.ops), 0, 0
        for how in "new file", "appended", "replaced", "shard":
            for at in points(save.rnd, recording, 2):
                save.clear()
                what = f"{save.name}: {how} by others before operation {at} of {count}"
                with save.mount(at=at, do="stop") as m:
                    errors = publish_with(save, m, lambda how=how: change(save.place + "/step1", how))
                assert there(save.place + "/step1", how), f"{what}: it is lost ({errors})"
                assert value(save.place + "/step1") in (data, tensor_bytes("edited", len(data))), f"{what}: neither"
                if errors:
                    same(f"{what}: errno", errors[0].errno, errno.ESTALE)
                    same(f"{what}: how", how, "shard")
                else:
                    same(f"{what}: saved", value(save.place + "/step1") == tensor_bytes("edited", len(data)), True)
                kept += bool(errors)
                tried += 1
        print(f"# {save.name}: {count} operations, {tried} changes, {kept} of them instead of the save", flush=True)


def changed_tensor(m, _):
    with open(m / f"step1/raw/{KEY}", "r+b") as f:
        f.write(tensor_bytes("edited", len(make_tensors(1)[KEY][2])))
    fsync(m / "step1")


if __name__ == "__main__":
    run(globals())
