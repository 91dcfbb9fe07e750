#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Saves through a mount whose server is killed, cut from power and denied room: the old checkpoint or the new one, whole,
and the next writer goes on where nobody is any more."""
import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading

from crashlib import EIO, ENOSPC, POINTS, SEED, STATES, faulty, points, run, same_tree
from disk import Recording, tree
from mountlib import PATIENCE, UNSHARD, Mount, fails, make_tensors, read_all, safetensors_image, same, tensor_bytes, unmount_hard, \
    wait_for, write_checkpoint, write_file

QUICK_NEW, QUICK_EDIT, QUICK_REMOVE, BESIDE = ["hf"], ["dcp"], ["hf"], ["hf", "dcp:ranks=2"]
ALL_NEW = ["hf:max_shard_size=20KB", "dcp:ranks=3", "dcp-hf:ranks=2", "torch_dist:ranks=2", "zarr", "olmo:ranks=2", "olmo-step:ranks=2",
           "pt", "npz"]
ALL_EDIT = ["hf", "dcp", "dcp-hf"]
LONG = POINTS == "all" or STATES >= 100


def new_checkpoint(m, fmt):
    """What `save_pretrained` does, more or less."""
    new_files(m, fmt)
    with open(m / "step2/notes.txt", "wb") as f:
        f.write(b"side file " * 1000)
        os.fsync(f.fileno())


def new_files(m, fmt="hf"):
    os.makedirs(m / "step2", exist_ok=True)
    os.setxattr(m / "step2", "user.unshard.save", fmt.encode())
    write_file(m / "step2/model.safetensors", safetensors_image(make_tensors(2)))


def edited_checkpoint(m, _):
    """One tensor by its bytes, one file beside them changed, one new and one gone."""
    key, (_, _, data) = next(iter(make_tensors(1).items()))
    with open(m / f"step1/raw/{key}", "r+b") as f:
        f.write(tensor_bytes("edited", len(data)))
    write_file(m / "step1/config.json", b'{"model_type": "other"}\n')
    os.makedirs(m / "step1/logs", exist_ok=True)
    write_file(m / "step1/logs/a", b"log " * 3000)
    if os.path.exists(m / "step1/notes.txt"):
        os.unlink(m / "step1/notes.txt")


def model_beside(m, _):
    """Into a directory of logs and steps, as a trainer's model comes; save= says whether it is one file or a set."""
    write_file(m / "step1/model.safetensors", safetensors_image(make_tensors(2)))


def removed_checkpoint(m, _):
    for root, dirs, files in os.walk(m / "step1", topdown=False):
        for name in files:
            os.unlink(os.path.join(root, name))
        for name in dirs:
            os.rmdir(os.path.join(root, name))
    if os.path.exists(m / "step1"):
        os.rmdir(m / "step1")


class Saving:
    """One script of writes, run again and again over the same source."""

    def __init__(self, t, name, script, fmt):
        self.t, self.name, self.script, self.fmt = t, f"{name} {fmt}", script, fmt
        self.place, self.base = t + "/run", t + "/base"
        self.options = "rw,save=" + fmt if script is model_beside else "rw"
        self.rnd = random.Random(f"{SEED} {self.name}")
        shutil.rmtree(self.base, ignore_errors=True)
        os.makedirs(self.base)
        write_checkpoint(t + "/hf", make_tensors(1))
        if script is model_beside:
            write_checkpoint(self.base + "/step1/checkpoint-1", make_tensors(1))
            os.makedirs(self.base + "/step1/logs")
            write_file(self.base + "/step1/logs/events", b"log " * 3000)
            write_file(self.base + "/step1/config.json", b'{"model_type": "llama"}\n')
        elif script is not new_checkpoint:
            to = fmt.split(":")[0]
            ranks = ["--ranks", "2"] if to.startswith("dcp") else []
            subprocess.run([UNSHARD, "convert", t + "/hf", self.base + "/step1", "--to", to, *ranks], check=True, timeout=600)
            write_file(self.base + "/step1/notes.txt", b"side file")
        write_file(self.base + "/latest.txt", b"1")
        self.old = tree(self.base)
        data = next(iter(make_tensors(1).values()))[2]
        self.old_tensor, self.new_tensor = data, tensor_bytes("edited", len(data))

    def clear(self):
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.base, self.place)

    def mount(self, **what):
        return Mount(self.place, self.t + "/mnt", self.options, env=faulty(self.place, self.t + "/cache", **what))

    def publish(self, m):
        self.script(m, self.fmt)
        os.setxattr(m.path, "user.unshard.publish", b"")

    def record(self):
        self.clear()
        recording, log = Recording(self.place), self.t + "/log"
        for end in "", ".data":
            if os.path.exists(log + end):
                os.unlink(log + end)
        with self.mount(log=log) as m:
            self.publish(m)
            told = sum(1 for _ in open(log))
        recording.load(log)
        recording.told = told
        self.new = tree(self.place)
        assert self.new != self.old
        return recording

    def is_new(self, what):
        """Is it the new one? If not it is the old one; what is staged is hidden, and a name that a saver gives first says nothing."""
        got = {n: d for n, d in tree(self.place).items() if not n.startswith(".unshard-staging-") and not n.endswith(".tmp-write")}
        if got == self.old:
            return False
        same_tree(f"{self.name}: {what}", got, self.new)
        return True

    def recovers(self, what):
        """The next mount saves the same, and leaves nothing else."""
        there = self.is_new(what)
        with self.mount() as m:
            if there and self.script is not edited_checkpoint:
                os.mkdir(m / "step3")  # any save finds what the dead one left
                os.rmdir(m / "step3")
            else:
                self.publish(m)
        assert self.is_new(what + ", again"), f"{self.name}: {what}, again: nothing was saved"
        same(f"{self.name}: {what}: leftovers", [n for n in os.listdir(self.place) if n.startswith(".unshard-staging-")], [])


def each(t):
    for name, script, formats in (("new", new_checkpoint, ALL_NEW if LONG else QUICK_NEW),
                                  ("edit", edited_checkpoint, ALL_EDIT if LONG else QUICK_EDIT),
                                  ("remove", removed_checkpoint, ALL_EDIT if LONG else QUICK_REMOVE),
                                  ("beside", model_beside, BESIDE)):
        for fmt in formats:
            shutil.rmtree(t + "/cache", ignore_errors=True)
            yield Saving(t, name, script, fmt)


def test_killed(t):
    for save in each(t):
        recording = save.record()
        count, tried = len(recording.ops), 0
        for at in points(save.rnd, recording):
            save.clear()
            do = save.rnd.choice(("kill", "torn"))
            m = save.mount(at=at, do=do)
            m.__enter__()
            try:
                save.publish(m)
            except OSError:
                m.process.wait(PATIENCE)
            m.process.kill()
            m.process.wait()
            m.log.close()
            unmount_hard(m.path)
            save.recovers(f"{do} at operation {at} of {count}")
            tried += 1
        print(f"# {save.name}: {count} operations, {tried} kills, all old or new", flush=True)


def test_without_power(t):
    for save in each(t):
        recording = save.record()
        count, news = len(recording.ops), 0
        for i in range(8 * STATES):
            after = recording.told if i == 0 else save.rnd.randint(1, count)
            recording.crash(after, save.rnd, save.place)
            what = f"power lost after operation {after} of {count} (state {i})"
            new = save.is_new(what)
            assert new or after < recording.told, f"{save.name}: {what}: it was told to be published"
            news += new
            if i < STATES // 3:
                save.recovers(what)
        print(f"# {save.name}: {count} operations, {8 * STATES} states, {news} of them new, all whole", flush=True)


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
    """What was written by O_DSYNC or O_SYNC is there, without an fsync."""
    place, log = t + "/run", t + "/log"
    os.mkdir(place)
    for name in "data", "all", "end":
        write_file(f"{place}/{name}", b"old " * 1000)
    recording = Recording(place)
    with Mount(place, t + "/mnt", "rw", env=faulty(place, t + "/cache", log=log)) as m:
        for name, flags in ("data", os.O_DSYNC), ("all", os.O_SYNC), ("end", os.O_SYNC | os.O_APPEND):
            fd = os.open(m / name, os.O_WRONLY | flags)
            os.write(fd, b"new " * 1000)
            os.close(fd)
        with open(log) as f:
            told = sum(1 for _ in f)
    recording.load(log)
    rnd = random.Random(SEED)
    for i in range(8 * STATES):
        recording.crash(told, rnd, place)
        same_tree(f"state {i}", tree(place), {"data": b"new " * 1000, "all": b"new " * 1000, "end": b"old " * 1000 + b"new " * 1000})


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
                    try:
                        save.publish(m)
                        assert save.is_new(what), f"{what}: was not told"
                    except OSError as e:
                        assert e.errno in (code, EIO), f"{what}: {e}"
                        if save.is_new(what):
                            assert "the disk may not have it" in m.messages() or save.script is removed_checkpoint, \
                                f"{what}: {e}, but it is there"
                    write_file(off, b"")
                    if not save.is_new(what):
                        save.publish(m)
                        assert save.is_new(what), f"{what}, then none: not saved"
                shutil.rmtree(save.place + "/.unshard-staging-step2", ignore_errors=True)
                tried += 1
        print(f"# {save.name}: {count} operations, {tried} faults, all old or new", flush=True)


def test_a_failed_fsync_is_not_forgotten(t):
    """The kernel tells it once and takes the bytes for written: what they are in is not published until it comes anew."""
    save = Saving(t, "new", new_checkpoint, "hf")
    syncs = [op.index + 1 for op in save.record().ops if op.kind == "S"]
    for at in range(syncs[2] + 1, syncs[4]):
        save.clear()
        with save.mount(at=at, do=EIO) as m:
            try:
                new_files(m)
            except OSError:
                continue
            done = []
            try:
                fd = os.open(m / "step2/notes.txt", os.O_WRONLY | os.O_CREAT)
                done.append("open")
                os.write(fd, b"side file")
                done.append("write")
                os.fsync(fd)
                done.append("fsync")
            except OSError as e:
                same("error", e.errno, EIO)
            if done:
                os.close(fd)
            if done != ["open", "write"]:
                continue  # it was another operation
            for _ in range(2):
                fails("publication", EIO, lambda: os.setxattr(m.path, "user.unshard.publish", b""))
            assert "step2/notes.txt" in m.messages() or "notes.txt: the disk" in m.messages(), m.messages()
            save.publish(m)
        assert save.is_new("written anew"), "not saved"
        return
    raise AssertionError(f"none of the operations was the program's fsync")


def with_a_side_file(m, fmt="hf"):
    new_files(m, fmt)
    write_file(m / "step2/notes.txt", b"side file " * 1000)


def test_a_failed_fsync_of_the_publication_is_not_forgotten(t):
    """The next one would be told that all is well, and the disk may have nothing of it."""
    save = Saving(t, "new", with_a_side_file, "hf")
    ops = save.record().ops
    spool = {id(op.node) for op in ops if op.kind == "C" and op.names[0].isdigit()}
    at = [op.index + 1 for op in ops if op.kind == "S" and id(op.node) in spool]
    assert len(at) == 1, at
    save.clear()
    with save.mount(at=at[0], do=EIO) as m:
        with_a_side_file(m)
        for _ in range(2):
            fails("publication", EIO, lambda: os.setxattr(m.path, "user.unshard.publish", b""))
        assert "notes.txt: the disk did not take all of it" in m.messages(), m.messages()
        assert not save.is_new("not published"), "it is there"
        save.publish(m)
    assert save.is_new("written anew"), "not saved"


def test_what_the_disk_refused_is_not_read_for_others(t):
    """Nobody had called fsync: what is read for shards may be what stood there before."""
    save = Saving(t, "new", new_files, "dcp")
    at = [op.index + 1 for op in save.record().ops if op.kind == "E"]
    assert len(at) == 1, at
    save.clear()
    with save.mount(at=at[0], do=EIO) as m:
        new_files(m, "dcp")
        for _ in range(2):
            fails("publication", EIO, lambda: os.setxattr(m.path, "user.unshard.publish", b""))
        assert "model.safetensors: the disk did not take all of it" in m.messages(), m.messages()
        assert not save.is_new("not published"), "it is there"
        save.publish(m)
    assert save.is_new("written anew"), "not saved"


def synced_edit(m, _, sync=os.fsync):
    """All bytes of a tensor, in place, and fsync."""
    key, (_, _, data) = next(iter(make_tensors(1).items()))
    with open(m / f"step1/raw/{key}", "r+b", buffering=0) as f:
        f.write(tensor_bytes("edited", len(data)))
        if sync:
            sync(f.fileno())


def test_written_anew_in_place(t):
    """What the disk may have lost is there again when all of it was written again, also without O_TRUNC."""
    save = Saving(t, "edit", synced_edit, "hf")
    for at in [op.index + 1 for op in save.record().ops if op.kind == "S"]:
        save.clear()
        with save.mount(at=at, do=EIO) as m:
            done = []
            with contextlib.suppress(OSError):
                synced_edit(m, None, lambda fd, done=done: (done.append("written"), os.fsync(fd), done.append("fsync")))
            if done != ["written"]:
                continue  # it was another operation
            fails("publication", EIO, lambda: os.setxattr(m.path, "user.unshard.publish", b""))
            save.publish(m)
        assert save.is_new("written anew"), "not saved"
        return
    raise AssertionError("none of the operations was the program's fsync")


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
            save.publish(m)
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
    """Somebody writes into the directory of the checkpoint while it is saved: the save or what they wrote, never neither."""
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

    for fmt in ALL_EDIT if LONG else QUICK_EDIT:
        save = Saving(t, "changed", changed_tensor, fmt)
        recording = save.record()
        count, tried, kept = len(recording.ops), 0, 0
        for how in "new file", "appended", "replaced", "shard":
            for at in points(save.rnd, recording, 2):
                save.clear()
                what = f"{save.name}: {how} by others before operation {at} of {count}"
                with save.mount(at=at, do="stop") as m:
                    errors = publish_with(save, m, lambda how=how: change(save.place + "/step1", how))
                assert there(save.place + "/step1", how), f"{what}: it is lost ({errors})"
                got = stored(save, save.place + "/step1")
                assert got in (save.old_tensor, save.new_tensor), f"{what}: neither"
                # What was refused once may still be saved when the mount ends.
                assert errors or got == save.new_tensor, f"{what}: not saved, and not told"
                kept += bool(errors)
                tried += 1
        print(f"# {save.name}: {count} operations, {tried} changes, {kept} of them instead of the save", flush=True)


def test_others_beside_a_model(t):
    """Somebody works in the directory while a model comes to it: what is theirs stays, and nothing is written over."""
    def name(path, how):
        return path + {"new file": "/logs/others.txt", "replaced": "/config.json", "same name": "/model.safetensors"}.get(how, "/logs/events")

    def change(path, how):
        if how == "appended":
            with open(path + "/logs/events", "ab") as f:
                f.write(b"others")
        else:
            write_file(save.place + "/theirs", theirs)
            os.rename(save.place + "/theirs", name(path, how))

    def there(path, how):
        return read_all(name(path, how)).endswith(theirs)

    for fmt in BESIDE:
        save = Saving(t, "others", model_beside, fmt)
        recording = save.record()
        count, tried, kept = len(recording.ops), 0, 0
        ours = read_all(save.place + "/step1/model.safetensors") if fmt == "hf" else b""
        for how in "new file", "appended", "replaced", "same name":
            theirs = safetensors_image(make_tensors(3)) if how == "same name" else b"others"
            for at in points(save.rnd, recording, 2):
                save.clear()
                what = f"{save.name}: {how} by others before operation {at} of {count}"
                with save.mount(at=at, do="stop") as m:
                    errors = publish_with(save, m, lambda how=how: change(save.place + "/step1", how))
                    is_ours = ours and how == "same name" and read_all(save.place + "/step1/model.safetensors") == ours
                # Theirs came before its name was given here, and is written over as by rename(2).
                assert there(save.place + "/step1", how) or (is_ours and not errors), f"{what}: it is lost ({errors})"
                kept += bool(errors)
                tried += 1
        print(f"# {save.name}: {count} operations, {tried} changes, {kept} of them instead of the save", flush=True)


def changed_tensor(m, _):
    key, (_, _, data) = next(iter(make_tensors(1).items()))
    with open(m / f"step1/raw/{key}", "r+b") as f:
        f.write(tensor_bytes("edited", len(data)))


def stored(save, path):
    key = next(iter(make_tensors(1)))
    return subprocess.run([UNSHARD, "cat", path, key], capture_output=True, check=True, timeout=600,
                          env={**os.environ, "XDG_CACHE_HOME": save.t + "/cat"}).stdout


if __name__ == "__main__":
    run(globals())
