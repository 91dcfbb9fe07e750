# SPDX-License-Identifier: MIT
"""Large directories of a mount for saving: what one name costs does not grow with how many there are, and no name is ever shown that is not there."""
import errno
import fcntl
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, Mount, fails, main, make_tensors, may_open, read_all, safetensors_image, same, wait_for, write_checkpoint, \
    write_file  # noqa: E402

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
DIR_FILES = 6  # that the server may have open for each new directory
FEW, MANY = 100, 500  # of fewer than 64 names all are looked at each time
TORCH = (DATA / "torch_file/pt_torch231/model.pt").read_bytes()
DCP = DATA / "torch_dcp/dcp_fsdp2_adamw_2r"


def put(path, data=b"x"):
    with open(path, "wb") as f:
        f.write(data)


def fill(path, count, name="log.{:05}"):
    """So many files that are of no checkpoint: their names."""
    os.makedirs(path, exist_ok=True)
    names = [name.format(i) for i in range(count)]
    for n in names:
        put(f"{path}/{n}")
    return names


def fill_dirs(path, count):
    names = [f"dir.{i:05}" for i in range(count)]
    for n in names:
        os.makedirs(f"{path}/{n}")
    return names


def listed(m):
    """How many names of directories the server has looked at so far."""
    return json.loads(read_all(m / "keep/.unshard/counters.json"))["names_listed"]


def reads_of(m):
    """How often the server has read a file of the source, or a request."""
    with open(f"/proc/{m.process.pid}/io") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("syscr:"))


def shows(m, path, want):
    same(f"listing of {path}", sorted(os.listdir(m / path)), sorted(want))


class Cost:
    """Of n calls: the names that were looked at. All of n names each time would be n * n / 2 and more; beside that the server looks at all again after 0.4 s."""

    def __init__(self, m, what, n, count=listed):
        self.m, self.what, self.n, self.count = m, what, n, count

    def __enter__(self):
        self.before, self.begun = self.count(self.m), time.monotonic()

    def __exit__(self, *exc):
        if exc[0] is None:
            spent, most = self.count(self.m) - self.before, self.n * self.n // 8 + self.n * looks(self.begun)
            print(f"# {self.what}: {spent} of at most {most}")
            assert spent < most, f"{self.what}: {spent} for {self.n}"


def looks(begun):
    """So many times a directory may have been looked at since, because it was time."""
    return int((time.monotonic() - begun) / 0.35)


def source(t):
    write_checkpoint(t + "/src/keep", make_tensors(1))
    return t + "/src"


# ---- what it costs ----

def test_one_name_costs_the_same_among_many(t):
    names = fill_dirs(source(t) + "/dirs", MANY)
    os.makedirs(t + "/src/files")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        with Cost(m, "files are made", MANY):
            files = fill(m / "files", MANY)
        with Cost(m, "get other names", MANY):
            for n in files:
                os.rename(m / f"files/{n}", m / f"files/{n}.old")
        with Cost(m, "are written over", MANY):
            for n in files:
                put(m / f"files/{n}.new")
                os.replace(m / f"files/{n}.new", m / f"files/{n}.old")
        with Cost(m, "are written to", MANY):
            for n in files:
                put(m / f"files/{n}.old", b"other")
        shows(m, "files", [n + ".old" for n in files])
        with Cost(m, "go", MANY):
            shutil.rmtree(m / "files")
        with Cost(m, "directories get other names", MANY):
            for n in names:
                os.rename(m / f"dirs/{n}", m / f"dirs/{n}.old")
        with Cost(m, "directories go", MANY):
            subprocess.run(["rm", "-r", m / "dirs"], check=True)
        shows(m, "", ["keep"])
    same("in the source", sorted(os.listdir(t + "/src")), ["keep"])


def test_links_and_a_checkpoint_beside_many(t):
    """Steps of a run, saved one after the other and removed."""
    fill_dirs(source(t) + "/run", MANY)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        steps = [f"run/step{i}" for i in range(20)]
        before, begun = listed(m), time.monotonic()
        for s in steps:
            write_checkpoint(m / f"{s}.tmp", make_tensors(2, count=1), shards=1)
            os.rename(m / f"{s}.tmp", m / s)
            assert os.path.exists(m / f"{s}/tensors"), f"{s} is no checkpoint"
        for s in steps:
            shutil.rmtree(m / s)
            assert not os.path.exists(m / s) and not os.path.exists(f"{t}/src/{s}")
        spent = listed(m) - before
        most = MANY * (15 + looks(begun))  # all of them at each rename and rmdir: 40 times and more
        print(f"# 20 saves and removals among {MANY}: {spent} of at most {most}")
        assert spent < most, spent
        shows(m, "run", os.listdir(t + "/src/run"))


def test_directories_are_made(t):
    """Each is a stage, and a stage looks beside it for what mounts that died have left."""
    source(t)
    os.makedirs(t + "/src/new")
    may_open(500 * DIR_FILES)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        with Cost(m, "directories are made", 500, reads_of):
            for i in range(500):
                os.mkdir(m / f"new/x{i:05}")
        same("listed", len(os.listdir(m / "new")), 500)
        with Cost(m, "they go", 500, reads_of):
            for i in range(500):
                os.rmdir(m / f"new/x{i:05}")
        same("nothing is left", (os.listdir(m / "new"), os.listdir(t + "/src/new")), ([], []))


# ---- what is shown ----

def test_each_change_shows_at_once(t):
    names = fill(source(t) + "/run", FEW)
    fill_dirs(t + "/src/run", FEW)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        want = set(os.listdir(t + "/src/run"))
        shows(m, "run", want)
        for i, n in enumerate(names[:40]):
            new = f"new.{i}"
            fails("not yet", errno.ENOENT, lambda x=new: os.stat(m / f"run/{x}"))
            put(m / f"run/{new}", b"new")
            same("bytes", read_all(m / f"run/{new}"), b"new")
            shows(m, "run", want | {new})
            os.unlink(m / f"run/{n}")
            fails("it is gone", errno.ENOENT, lambda x=n: os.stat(m / f"run/{x}"))
            shows(m, "run", want - {n} | {new})
            os.rename(m / f"run/{new}", m / f"run/{n}")  # and back, as another file
            fails("it has another name", errno.ENOENT, lambda x=new: os.stat(m / f"run/{x}"))
            same("bytes by its new name", read_all(m / f"run/{n}"), b"new")
            shows(m, "run", want)
        for n in names[40:60]:  # a file in the place of a directory, and the other way round
            d = n.replace("log", "dir")
            os.rmdir(m / f"run/{d}")
            os.rename(m / f"run/{n}", m / f"run/{d}")
            assert os.path.isfile(m / f"run/{d}"), d
            fails("a file", errno.ENOTDIR, lambda x=d: os.listdir(m / f"run/{x}"))
            want.remove(n)
            shows(m, "run", want)
        os.rename(m / "run/log.00070", m / "run/log.00071")  # over another
        want.remove("log.00070")
        shows(m, "run", want)
        shows(m, "run", os.listdir(t + "/src/run"))


def test_a_listing_while_names_go(t):
    """A directory that is open keeps its places: no name is left out, and none comes twice."""
    names = fill(source(t) + "/run", MANY)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        seen = []
        with os.scandir(m / "run") as entries:
            for i, entry in enumerate(entries):
                if entry.name.startswith("log"):  # others were there when the page was made
                    seen.append(entry.name)
                    os.unlink(entry.path)
                if i % 3 == 0:
                    put(m / f"run/more.{i:05}")
                    os.unlink(m / f"run/more.{i:05}")
        same("each once", sorted(seen), names)
        shows(m, "run", [])
        same("in the source", os.listdir(t + "/src/run"), [])


def test_changes_on_the_disk_show_while_others_are_made(t):
    """What the mount was told of puts off no look at what it was not."""
    names = fill(source(t) + "/run", FEW)
    stop = threading.Event()

    def busy(m):
        i = 0
        while not stop.is_set():
            put(m / f"run/mine.{i % 50}")
            os.unlink(m / f"run/mine.{i % 50}")
            i += 1

    with Mount(t + "/src", t + "/mnt", "rw") as m:
        thread = threading.Thread(target=busy, args=(m,))
        thread.start()
        try:
            for i in range(4):
                put(f"{t}/src/run/theirs.{i}", b"theirs")
                took = wait_for("a new file", PATIENCE, lambda x=i: os.path.exists(m / f"run/theirs.{x}"))
                same("bytes", read_all(m / f"run/theirs.{i}"), b"theirs")
                os.unlink(f"{t}/src/run/{names[i]}")
                took = max(took, wait_for("one that goes", PATIENCE, lambda x=i: names[x] not in os.listdir(m / "run")))
                fails("it is gone", errno.ENOENT, lambda x=i: os.stat(m / f"run/{names[x]}"))
                print(f"# after {took:.2f} s")
        finally:
            stop.set()
            thread.join()
        # What was changed through the mount, and behind it: the disk is right.
        put(m / "run/both", b"mine")
        os.unlink(t + "/src/run/both")
        wait_for("it is gone", PATIENCE, lambda: "both" not in os.listdir(m / "run"))
        os.unlink(m / f"run/{names[20]}")
        put(t + f"/src/run/{names[20]}", b"again")
        wait_for("it is back", PATIENCE, lambda: names[20] in os.listdir(m / "run"))
        same("bytes", read_all(m / f"run/{names[20]}"), b"again")


def test_a_checkpoint_that_comes_and_goes(t):
    """By the name of one file, among many that are none of its: at once, through the mount. What is listed is the disk."""
    fill(source(t) + "/pt", FEW)
    fill(t + "/src/dcp", FEW)
    for path in DCP.iterdir():
        if path.name != ".metadata":
            shutil.copy(path, t + "/src/dcp")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        assert not os.path.exists(m / "pt/tensors"), "none yet"
        put(m / "pt/model.tmp", TORCH)
        os.rename(m / "pt/model.tmp", m / "pt/model.pt")
        assert os.listdir(m / "pt/tensors"), "a file has made it one"
        shows(m, "pt", os.listdir(t + "/src/pt"))
        put(m / "dcp/metadata.tmp", (DCP / ".metadata").read_bytes())
        os.rename(m / "dcp/metadata.tmp", m / "dcp/.metadata")
        assert os.listdir(m / "dcp/tensors"), "a file has made it one"
        shows(m, "dcp", os.listdir(t + "/src/dcp"))
        shutil.rmtree(m / "pt")
        assert not os.path.exists(t + "/src/pt")
        os.rename(t + "/src/dcp/.metadata", t + "/src/dcp/metadata.tmp")
        wait_for("it is none any more", PATIENCE, lambda: not os.path.exists(m / "dcp/tensors"))
        os.rename(m / "dcp/metadata.tmp", m / "dcp/.metadata")
        assert os.listdir(m / "dcp/tensors"), "again"


def test_parts_that_come_one_by_one(t):
    """Shards, and their index at the end, behind the mount and through it: then it is a checkpoint."""
    write_checkpoint(t + "/whole", make_tensors(3))
    for where in t + "/src", t + "/mnt":
        shutil.rmtree(t + "/src", ignore_errors=True)
        fill(source(t) + "/run", FEW)
        with Mount(t + "/src", t + "/mnt", "rw") as m:
            for n in sorted(os.listdir(t + "/whole")):
                put(m / "run/more")
                shutil.copy(f"{t}/whole/{n}", where + "/run")
                os.unlink(m / "run/more")
            wait_for("the checkpoint", PATIENCE, lambda: os.path.exists(m / "run/tensors"))
            shows(m, "run", os.listdir(t + "/src/run"))


def test_names_of_ours(t):
    """A tracker's `latest` by its name, a directory called as a view is."""
    fill_dirs(source(t) + "/run", FEW)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        assert not os.path.lexists(m / "run/latest"), "no tracker"
        put(m / "run/tracker.tmp", b"7")
        os.rename(m / "run/tracker.tmp", m / "run/latest_checkpointed_iteration.txt")
        os.rename(m / "run/dir.00000", m / "run/iter_0000007")
        same("a tracker", os.readlink(m / "run/.unshard/latest"), "../iter_0000007")
        os.rename(m / "run/iter_0000007", m / "run/dir.00000")
        assert not os.path.lexists(m / "run/.unshard/latest"), "its step has another name"
        os.rename(m / "run/dir.00001", m / "run/tensors")
        put(m / "run/tensors/a.npy", b"no array")
        same("a directory as any", read_all(m / "run/tensors/a.npy"), b"no array")
        os.unlink(m / "run/tensors/a.npy")
        os.rmdir(m / "run/tensors")
        shows(m, "run", os.listdir(t + "/src/run"))


def test_many_who_change_one_directory(t):
    """Each sees his own changes, whatever others do; in the end all is as on the disk."""
    fill(source(t) + "/run", FEW)
    faults = []

    def work(m, number):
        try:
            dice = random.Random(number)
            mine = set()
            for i in range(60):
                name = f"run/w{number}.{dice.randrange(8)}"
                other = f"run/w{number}.{dice.randrange(8)}"
                if name not in mine:
                    put(m / name, name.encode())
                    mine.add(name)
                elif i % 3:
                    os.unlink(m / name)
                    mine.remove(name)
                else:
                    os.rename(m / name, m / other)
                    mine = mine - {name} | {other}
                there = {f"run/{n}" for n in os.listdir(m / "run") if n.startswith(f"w{number}.")}
                assert there == mine, f"{sorted(there)}, and made were {sorted(mine)}"
                for n in (name, other):
                    assert os.path.exists(m / n) == (n in mine), n
        except Exception as e:
            faults.append(repr(e))

    with Mount(t + "/src", t + "/mnt", "rw") as m:
        threads = [threading.Thread(target=work, args=(m, i)) for i in range(6)]
        for x in threads:
            x.start()
        for x in threads:
            x.join()
        same("faults", faults, [])
        shows(m, "run", os.listdir(t + "/src/run"))
        for n in os.listdir(t + "/src/run"):
            same(f"{n} in the source", read_all(f"{t}/src/run/{n}"), read_all(m / f"run/{n}"))


def test_nothing_is_told_by_numbers_of_others(t):
    """A step that goes has its number in the kernel given to a file: the kernel is not told to forget names in that."""
    source(t)
    os.makedirs(t + "/src/logs")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        for i in range(12):
            os.mkdir(m / f"step{i}.part")
            write_file(m / f"step{i}.part/model.safetensors", safetensors_image(make_tensors(i)))
            os.rename(m / f"step{i}.part", m / f"step{i}")
            read_all(m / f"step{i}/model.safetensors")
        for i in range(12):
            shutil.rmtree(m / f"step{i}")
            fill(m / "logs", 5, f"{i}.{{}}")
        time.sleep(2)  # each is told twice, by looks of the server
        same("messages", m.messages(), "")


def is_locked(path):
    """Does somebody save what was written in a mount of it that has gone?"""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def unmounted_while_it_saves(t, m, count):
    """Was the server seen at that? A machine with much else to do may look too late, or have a quick disk."""
    os.mkdir(m / "new")
    for i in range(count):
        os.mkdir(m / f"new/x{i:05}")
    subprocess.run(["fusermount3", "-u", m.path], check=True)  # as umount(8), for every user
    locked = []
    wait_for("the server", PATIENCE, lambda: locked.append(is_locked(t + "/src")) or locked[-1] or not m.alive(), 0.001)
    return locked[-1]


def test_what_is_removed_after_umount_stays_away(t):
    """umount(8) waits for nothing: the server of that mount still saves when the next one begins, which must show it to who removes it."""
    source(t)
    for count in (600, 600, 600, 1200, 1200, 2400, 2400, 4800):
        may_open(count * DIR_FILES)
        with Mount(t + "/src", t + "/mnt", "rw") as m:
            if unmounted_while_it_saves(t, m, count):
                with Mount(t + "/src", t + "/mnt", "rw") as second:
                    same("it is there", len(os.listdir(second / "new")), count)
                    shutil.rmtree(second / "new")
                    same("the server that was first", m.process.wait(PATIENCE), 0)
                    same("in the source", os.listdir(t + "/src"), ["keep"])
                    shows(second, "", ["keep"])
                return
        shutil.rmtree(t + "/src/new")
    raise AssertionError("no server had the source locked while it saved")


if __name__ == "__main__":
    main(globals())
