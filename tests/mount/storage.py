# SPDX-License-Identifier: MIT
"""An rw mount is the disk: whatever copies checkpoints into it, in any order and with any pauses, leaves what it leaves on a disk."""
import errno
import os
import random
import shutil
import subprocess
import tempfile
import time

import storagelib
from storagelib import COUNT, DATA, SLOW, Batch, Case, check, differences, files_of, fixture, fixtures, lay, other_bytes, put, put_tree, sample, short, snapshot
from mountlib import SANITIZED, Skip, fails, main, read_all, same

ORDERS = ["sorted", "reversed", "random", "framework"]
HOW = ["create", "rename", "halves", "synced"]
OVER = ["new", "same", "other", "read"]


# ---- copying a fixture, by several programs ----

def by_hand(path, order, how):
    def write(w):
        put_tree(w, path, "step", order, how, random.Random(f"{storagelib.SEED} {path} {order}"))
    return f"{order}-{how}", write


def contents(path):
    """The arguments for cp, rsync and tar: what is copied into the new directory."""
    return (path, ".") if os.path.isdir(path) else os.path.split(path)


def by_cp(path, *options):
    def write(w):
        folder, name = contents(path)
        os.makedirs(w / "step", exist_ok=True)
        w.call("cp", *options, os.path.join(folder, name), w / "step")
    return "cp" + "".join(options), write


def by_rsync(path, *options):
    def write(w):
        folder, name = contents(path)
        os.makedirs(w / "step", exist_ok=True)
        w.call("rsync", *options, os.path.join(folder, name if name != "." else ""), w / "step/")
    return "rsync" + "".join(options), write


def by_tar(path, *options):
    def write(w):
        folder, name = contents(path)
        os.makedirs(w / "step", exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(["tar", "cf", scratch + "/tar", "-C", folder, name], check=True)
            w.call("tar", "xf", scratch + "/tar", "-C", w / "step", *options)
    return "tar" + "".join(options), write


def ways(path):
    """(name, writer) of all ways to copy a fixture."""
    for order in ORDERS:
        for how in HOW:
            yield by_hand(path, order, how)
    for options in (["-r"], ["-a"], ["-r", "--remove-destination"]):
        yield by_cp(path, *options)
    for options in (["-r"], ["-a"], ["-a", "--inplace"], ["-a", "--delete"], ["-r", "--inplace", "--no-whole-file"], ["-r", "--delay-updates"]):
        yield by_rsync(path, *options)
    for options in ([], ["--overwrite"], ["--unlink-first"]):
        yield by_tar(path, *options)


def older_save(path, over, family):
    """What lies in the directory before: nothing, another save of the same, or another fixture of its family."""
    if over == "new":
        return None
    if over == "other":
        others = [p for p in family if p != path] or [path]
        path = random.Random(f"{storagelib.SEED} {path}").choice(others)

    def older(run):
        other_bytes(lay_at(path, run + "/step"))
        with open(run + "/step/old.txt", "w") as f:
            f.write("a side file of the older save")
    return older


def lay_at(path, where):
    lay(path, where)
    return where


def copies(hostile):
    paths = list(fixtures(hostile))
    for path in paths:
        family = [p for p in paths if os.path.dirname(p) == os.path.dirname(path) and os.path.isdir(p) == os.path.isdir(path)]
        for over in OVER:
            for name, write in ways(path):
                if name.startswith("rsync") and not shutil.which("rsync"):
                    continue
                yield Case(f"{short(path)} {name} {over}", write, older_save(path, over, family), reader=over == "read")


def test_copies_of_fixtures(t):
    """Every fixture by every way, new, over an older save and under a reader's eyes: here a sample of them."""
    cases = sample(copies(bool(COUNT)), 12 if SANITIZED else 40)
    _, read = check(t, cases)
    assert COUNT or storagelib.ONLY or read > 2, "no reader had a view"


# ---- removing and moving ----

def removal(path, how):
    def older(run):
        lay(path, run + "/step")
        lay(path, run + "/kept")

    def by_rm(w):
        w.call("rm", "-r", w / "step")

    def by_rmtree(w):
        shutil.rmtree(w / "step")
        w.step()

    def one_by_one(w):
        names = sorted(files_of(w / "step"))
        random.Random(path).shuffle(names)
        for name in names:
            os.unlink(w / f"step/{name}")
            w.step()

    def all_but_one(w):
        names = sorted(files_of(w / "step"))
        for name in names[1:]:
            os.unlink(w / f"step/{name}")
            w.step()

    def moved(w):
        w.call("mv", w / "step", w / "moved")
        w.call("mv", w / "kept", w / "step")

    def moved_file_by_file(w):
        for name in sorted(files_of(w / "step")):
            os.makedirs(os.path.dirname(w / f"moved/{name}"), exist_ok=True)
            os.rename(w / f"step/{name}", w / f"moved/{name}")
            w.step()

    def exchanged(w):
        """A new save beside the old one, which then takes its name: step.tmp, step -> step.old, step.tmp -> step."""
        put_tree(w, path, "step.tmp", "random", "create", random.Random(path))
        os.rename(w / "step", w / "step.old")
        w.step()
        os.rename(w / "step.tmp", w / "step")
        w.step()
        shutil.rmtree(w / "step.old")
        w.step()

    def linked(w):
        """A snapshot by hard links, as `cp -al` makes it, and a change of one of its files by another name."""
        w.call("cp", "-al", w / "step", w / "snapshot")
        name = sorted(files_of(w / "step"))[0]
        with open(w / f"step/{name}", "ab") as f:
            f.write(b"more")
        w.step()

    ways = {f.__name__: f for f in (by_rm, by_rmtree, one_by_one, all_but_one, moved, moved_file_by_file, exchanged, linked)}
    return ways[how], older


REMOVALS = ["by_rm", "by_rmtree", "one_by_one", "all_but_one", "moved", "moved_file_by_file", "exchanged", "linked"]


def removals(hostile):
    for path in fixtures(hostile):
        for how in REMOVALS:
            for reader in (False, True):
                write, older = removal(path, how)
                yield Case(f"{short(path)} {how}{' read' if reader else ''}", write, older, reader)


def test_removing_and_moving(t):
    check(t, sample(removals(bool(COUNT)), 8 if SANITIZED else 24))


# ---- anything at all, by chance ----

NAMES = ["config.json", "a.bin", "latest", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
         "__0_0.distcp", ".metadata", "pytorch_model.bin", "optimizer.pt", "w", "step-1", "model.safetensors.tmp"]


def any_operations(seed, count):
    """Operations on names that a checkpoint has, and on a real one."""
    def write(w):
        rnd = random.Random(f"{storagelib.SEED} {seed}")
        folders = ["", "step/", "step/sub/", "new/"]

        def some():
            return w / (rnd.choice(folders) + rnd.choice(NAMES))

        def data():
            return rnd.randbytes(rnd.choice((0, 1, 100, 5000, 140000)))

        def change(path, flags, what):
            fd = os.open(path, flags, 0o640)
            try:
                return what(fd)
            finally:
                os.close(fd)

        def write_at(path, bytes_, at):
            return change(path, os.O_RDWR | os.O_CREAT, lambda fd: os.pwrite(fd, bytes_, at))

        def append(path, bytes_):
            return change(path, os.O_WRONLY | os.O_APPEND, lambda fd: os.write(fd, bytes_))

        def read(path):
            return change(path, os.O_RDONLY, lambda fd: os.pread(fd, 1000, 0))

        operations = [
            lambda: ("create", os.open, some(), os.O_WRONLY | os.O_CREAT | os.O_EXCL),
            lambda: ("write", lambda p, b: change(p, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, lambda fd: os.write(fd, b)), some(), data()),
            lambda: ("pwrite", write_at, some(), data(), rnd.choice((0, 10, 4096, 70000))),
            lambda: ("append", append, some(), data()),
            lambda: ("read", read, some()),
            lambda: ("truncate", os.truncate, some(), rnd.choice((0, 1, 5000))),
            lambda: ("unlink", os.unlink, some()),
            lambda: ("rename", os.rename, some(), some()),
            lambda: ("rename a directory", os.rename, w / rnd.choice(folders), w / rnd.choice(folders)),
            lambda: ("mkdir", os.mkdir, w / rnd.choice(folders[1:])),
            lambda: ("rmdir", os.rmdir, w / rnd.choice(folders[1:])),
            lambda: ("link", os.link, some(), some()),
            lambda: ("symlink", os.symlink, rnd.choice(NAMES), some()),
            lambda: ("readlink", os.readlink, some()),
            lambda: ("chmod", os.chmod, some(), rnd.choice((0o600, 0o644, 0o444))),
            lambda: ("utime", lambda p, s: os.utime(p, (s, s)), some(), rnd.randrange(1, 1 << 30)),
            lambda: ("listdir", lambda p: sorted(os.listdir(p)), w / rnd.choice(folders)),
            lambda: ("stat", lambda p: (os.stat(p).st_size, os.stat(p).st_mode, os.stat(p).st_nlink), some()),
        ]
        for _ in range(count):
            name, call, *args = rnd.choice(operations)()
            if name == "stat" and os.path.isdir(args[0]):
                continue  # the size of a directory is its disk's
            fd = None

            def run():
                nonlocal fd
                fd = call(*args)
                return None if name == "create" else fd
            w.attempt(name + " " + " ".join(str(a).replace(w.path, "") for a in args if not isinstance(a, bytes)), run)
            if name == "create" and fd is not None:
                os.close(fd)
            w.step()

    def older(run):
        lay(fixture("safetensors", "hf_sharded_f32") if seed % 2 else fixture("torch_dcp", "dcp_mesh_2x2"), run + "/step")
    return Case(f"operations {seed}", write, older, reader=seed % 3 == 0)


def test_any_operations(t):
    count = 100000 if COUNT == "all" else int(COUNT or (8 if SANITIZED else 24))
    check(t, [any_operations(seed, 60) for seed in range(count)])


# ---- one by one ----

def test_writes_are_seen_at_once(t):
    """Before any close or fsync, in both directions; sizes, times and blocks are the disk's."""
    first, second = (f"step/model-0000{i}-of-00003.safetensors" for i in (1, 2))

    def write(w):
        there = w.source or w.path
        fd = os.open(w / first, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.write(fd, b"a" * 10000)
        same("its bytes", read_all(f"{there}/{first}"), b"a" * 10000)
        os.pwrite(fd, b"b", 20000)
        same("its size", os.stat(f"{there}/{first}").st_size, 20001)
        os.close(fd)
        with open(there + "/step/other", "wb") as f:
            f.write(b"by others")
        same("what others write", read_all(w / "step/other"), b"by others")
        with open(there + "/step/other", "ab") as f:
            f.write(b", and more")
        same("and what they append", read_all(w / "step/other"), b"by others, and more")
        os.unlink(there + "/step/other")
        fails("what they removed", errno.ENOENT, lambda: os.stat(w / "step/other"))
        os.unlink(w / second)
        fails("what we removed", errno.ENOENT, lambda: os.stat(f"{there}/{second}"))
        os.sync()
        for name in (first, "step/config.json", "step"):
            a, b = os.stat(w / name), os.stat(f"{there}/{name}")
            for field in ("st_mode", "st_uid", "st_gid", "st_nlink", "st_size", "st_mtime_ns", "st_ctime_ns", "st_blocks"):
                same(f"{name}: {field}", getattr(a, field), getattr(b, field))

    check(t, [Case("at once", write, lambda run: lay(fixture("safetensors", "hf_sharded_f32"), run + "/step"))], pauses=[0])


# ---- is what checks them worth anything? ----

def test_the_check_itself(t):
    """Plain directories against each other: no difference is found where there is none."""
    cases = sample(copies(False), 12) + sample(removals(False), 12) + [any_operations(seed, 60) for seed in range(8)]
    check(t, cases, pauses=[0.01], mount=False)


def test_the_check_finds_what_differs(t):
    def made(run):
        lay(fixture("safetensors", "hf_sharded_f32"), run + "/step")
        os.symlink("config.json", run + "/step/link")
        os.link(run + "/step/config.json", run + "/step/hard")
        os.utime(run + "/step/config.json", (1, 1))

    def changed(name, change):
        a, b = f"{t}/{name}/a", f"{t}/{name}/b"
        made(a)
        subprocess.run(["cp", "-a", a, b], check=True)
        change(b + "/step")
        return differences(snapshot(b), snapshot(a))

    def flip(path):
        st = os.stat(path)
        with open(path, "r+b") as f:
            byte = f.read(1)
            f.seek(0)
            f.write(bytes([byte[0] ^ 1]))
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))

    same("nothing", changed("same", lambda p: None), [])
    for name, change in {
        "a byte": lambda p: flip(p + "/model-00001-of-00003.safetensors"),
        "a name": lambda p: os.rename(p + "/config.json", p + "/config.jso"),
        "one more": lambda p: os.mkdir(p + "/empty"),
        "one less": lambda p: os.unlink(p + "/link"),
        "mode": lambda p: os.chmod(p + "/model-00001-of-00003.safetensors", 0o600),
        "another target": lambda p: (os.unlink(p + "/link"), os.symlink("./config.json", p + "/link")),
        "a copy for a link": lambda p: (os.unlink(p + "/hard"), shutil.copy2(p + "/config.json", p + "/hard")),
        "a file for a symlink": lambda p: (os.unlink(p + "/link"), shutil.copy2(p + "/config.json", p + "/link")),
        "mtime": lambda p: os.utime(p + "/config.json", (2, 2)),
    }.items():
        assert changed(name.replace(" ", "-"), change), f"{name}: no difference was found"


def test_the_check_finds_a_lazy_writer(t):
    """One that leaves the last file out the second time, and one that sees something else."""
    runs = []

    def forgets(w):
        runs.append(w)
        for i in range(2 - len(runs) // 2):
            put(w, w / f"step/{i}", b"x")

    def sees(w):
        w.note(time.time_ns())

    for write in forgets, sees:
        runs.clear()
        os.mkdir(f"{t}/{write.__name__}")
        batch = Batch(f"{t}/{write.__name__}", [Case("one", write)], 0, mount=False).run()
        same(write.__name__, [name for name, _ in batch.failures], ["one"])


if __name__ == "__main__":
    if not SLOW:
        print("# slow.c is not built in: programs are not paused")
    assert os.path.isdir(DATA) and Skip
    main(globals(), 100000 if COUNT else 600)
