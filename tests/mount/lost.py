#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What a mount loses: its readers, its server, the disk of its source, shards under who reads them, the disk of its cache."""
import errno
import mmap
import os
import pathlib
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time

from mountlib import PATIENCE, UNSHARD, Mount, Skip, main, make_tensors, read_all, same, tensor_bytes, wait_for, write_checkpoint

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "remote"))

from fault_server import Server  # noqa: E402

MIB = 1 << 20
SERVER_THREADS = 16  # that answer and fetch; they begin as they are needed, and stay
CONTROL = "/sys/fs/fuse/connections"
GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
CHANGED = {errno.ESTALE, errno.EIO, errno.ENOENT}

READ = """
import os, random, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size
print("ready", flush=True)
while True:
    os.pread(fd, 300000, random.randrange(size))
"""
TOUCH = """
import mmap, os, random, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
print("ready", flush=True)
while True:
    m = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    m.madvise(mmap.MADV_RANDOM)
    for _ in range(50):
        m[random.randrange(len(m))]
    m.close()
"""

COPY_MAPPED = """
import mmap, sys
with open(sys.argv[1], "rb") as f:
    mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[:]
"""


def program(text, path):
    p = subprocess.Popen([sys.executable, "-S", "-c", text, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    p.stdout.readline()
    return p


def requests(m):
    """How many the kernel waits for, or holds back for the server. Where it does not say: as if none."""
    if os.geteuid() == 0 and not os.listdir(CONTROL):
        subprocess.run(["mount", "-t", "fusectl", "none", CONTROL], check=False)
    try:
        with open(f"{CONTROL}/{os.minor(os.stat(m.path).st_dev)}/waiting") as f:
            return int(f.read())
    except FileNotFoundError:
        return 0


def held(m):
    """Descriptors, threads and mappings of the source's files that the server has."""
    of = f"/proc/{m.process.pid}"
    with open(of + "/maps") as f:
        files = sum(os.path.realpath(m.source) + "/" in line for line in f)
    return len(os.listdir(of + "/fd")), len(os.listdir(of + "/task")), files


def one_tensor(t, seed, size=8 * MIB, shards=1):
    tensors = {"w": ("U8", (size,), tensor_bytes(seed, size))}
    write_checkpoint(t + "/src", tensors, shards=shards)
    return tensors["w"][2]


# ---- readers ----

def test_readers_that_are_killed(t):
    """In the middle of a read and of a page fault; nothing of them stays in the server or the kernel."""
    data = one_tensor(t, 1)
    with Mount(t + "/src", t + "/mnt") as m:
        same("bytes", read_all(m / "raw/w"), data)
        chance = random.Random(3)
        readers = [program(READ if i % 2 else TOUCH, m / "raw/w") for i in range(8)]
        before = held(m)
        for i in range(40):
            time.sleep(chance.random() * 0.03)
            victim = readers.pop(0)
            victim.kill()
            same("killed", victim.wait(PATIENCE), -signal.SIGKILL)
            readers.append(program(READ if i % 2 else TOUCH, m / "raw/w"))
        wait_for(f"descriptors as at first, {before[0]}", PATIENCE, lambda: held(m)[0] <= before[0] + 2)
        for p in readers:
            p.kill()
            p.wait(PATIENCE)
        wait_for("no request is left", PATIENCE, lambda: requests(m) == 0)
        wait_for("no file is left open", PATIENCE, lambda: held(m)[2] == 0)
        assert held(m)[1] < before[1] + SERVER_THREADS, (before, held(m))  # some may have begun since; none for each of 48 readers
        same("bytes, afterwards", read_all(m / "raw/w"), data)


def test_readers_of_a_server_that_stands_still(t):
    """What it has not begun ends with who asked, at once; it goes on where it was."""
    data = one_tensor(t, 1)
    with Mount(t + "/src", t + "/mnt") as m:
        readers = [program(text, m / "raw/w") for text in (READ, TOUCH) * 4]
        m.process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)  # each of them waits for an answer by now
        for p in readers:
            p.kill()
        m.process.send_signal(signal.SIGCONT)
        for p in readers:
            same("killed", p.wait(PATIENCE), -signal.SIGKILL)
        wait_for("no request is left", PATIENCE, lambda: requests(m) == 0)
        same("bytes", read_all(m / "raw/w"), data)


# ---- the server ----

def test_the_server_is_killed_while_it_is_read(t):
    """Readers end with an error, those of mappings with a signal; the same place takes the next mount."""
    data = one_tensor(t, 1)
    with Mount(t + "/src", t + "/mnt") as m:
        readers = [program(text, m / "raw/w") for text in (READ, TOUCH) * 3]
        fd = os.open(m / "raw/w", os.O_RDONLY)
        mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        same("mapped", mapped[:100], data[:100])
        m.process.kill()
        m.process.wait()
        m.process.returncode = 0
        for p in readers:
            code = p.wait(PATIENCE)
            assert code in (1, -signal.SIGBUS), code
        try:  # what the kernel has of a mapped file is right
            same("pread", os.pread(fd, 10, MIB), data[MIB:MIB + 10])
        except OSError as e:
            assert e.errno in GONE, e
        mapped.close()
        os.close(fd)
        again = subprocess.run([UNSHARD, "mount", t + "/src", t + "/mnt"], capture_output=True, text=True, timeout=PATIENCE)
        assert again.returncode != 0 and "unshard umount" in again.stderr, again
        same("umount", subprocess.run([UNSHARD, "umount", t + "/mnt"], timeout=PATIENCE).returncode, 0)
    with Mount(t + "/src", t + "/mnt", f"cache_dir={m.dir}/cache") as m:  # the index of the one that was killed
        same("bytes", read_all(m / "raw/w"), data)


# ---- shards ----

def test_shards_that_change_while_they_are_read(t):
    """Cut and renamed over, in turn: one version, or an error. The server lives."""
    size = 2 * MIB
    versions = [tensor_bytes(f"version {i}", size) for i in range(2)]
    write_checkpoint(t + "/src", {"w": ("U8", (size,), versions[0])}, shards=1)
    shard = t + "/src/model-00001-of-00001.safetensors"
    head = os.stat(shard).st_size - size
    stop, turns, whole = threading.Event(), [], [0, 0]

    def change():
        # More and more slowly until each version was read as a whole: readers may be slower than this.
        while not stop.wait(0.03 if min(whole) else min(0.03 + len(turns) / 500, 2)):
            turns.append(0)
            data = versions[len(turns) % 2]
            if len(turns) % 3 == 0:
                os.truncate(shard, head + size // 2)
                time.sleep(0.01)
            write_checkpoint(t + "/src", {"w": ("U8", (size,), data)}, shards=1)

    with Mount(t + "/src", t + "/mnt") as m:
        thread = threading.Thread(target=change)
        thread.start()
        failed, codes, begin = 0, set(), time.monotonic()
        try:
            while len(turns) < 100 or min(whole) == 0 or failed == 0:
                assert time.monotonic() - begin < 4 * PATIENCE, (len(turns), whole, failed)
                try:
                    data = read_all(m / "raw/w")
                except OSError as e:
                    assert e.errno in CHANGED, e
                    failed += 1
                    continue
                assert data in versions, "a mixture, or bytes that never were there"
                whole[versions.index(data)] += 1
                p = subprocess.run([sys.executable, "-S", "-c", COPY_MAPPED, m / "raw/w"], stderr=subprocess.DEVNULL, timeout=PATIENCE)
                codes.add(p.returncode)
        finally:
            stop.set()
            thread.join()
        assert codes <= {0, 1, -signal.SIGBUS}, codes
        assert m.alive()
        print(f"# {len(turns)} changes; whole reads of each version {whole}, {failed} refused; mappers ended with {sorted(codes)}")
        write_checkpoint(t + "/src", {"w": ("U8", (size,), versions[0])}, shards=1)

        def right():
            try:
                return read_all(m / "raw/w") == versions[0]
            except OSError:
                return False
        wait_for("the last version", PATIENCE, right)


def test_a_shard_that_is_rewritten_while_it_is_read(t):
    """In place, piece after piece: a handle of before gives old bytes, or an error; never one of the new ones."""
    size, piece = 4 * MIB, 64 << 10
    old = one_tensor(t, 1, size)
    shard = t + "/src/model-00001-of-00001.safetensors"
    head = os.stat(shard).st_size - size
    time.sleep(0.1)  # another tick of the file's clock
    with Mount(t + "/src", t + "/mnt") as m:
        fd = os.open(m / "raw/w", os.O_RDONLY)
        begun, codes, right = threading.Event(), set(), 0

        def rewrite():
            with open(shard, "r+b", buffering=0) as f:
                for at in range(0, size, piece):
                    begun.wait(PATIENCE)
                    os.pwrite(f.fileno(), bytes(piece), head + at)
                    time.sleep(0.002)
        thread = threading.Thread(target=rewrite)
        thread.start()
        chance = random.Random(1)
        while thread.is_alive():
            at = chance.randrange(size - piece)
            try:
                same(f"bytes at {at}", os.pread(fd, piece, at), old[at:at + piece])
                right += 1
            except OSError as e:
                codes.add(e.errno)
            if right > 20:
                begun.set()
        codes.add(code_of(fd, lambda f: os.pread(f, piece, 0)))  # no reader may have had a turn before it was all over
        os.close(fd)
        assert codes <= {errno.ESTALE, errno.EIO}, codes

        def rewritten():
            try:
                return read_all(m / "raw/w") == bytes(size)
            except OSError:
                return False
        wait_for("the new bytes", PATIENCE, rewritten)


# ---- disks ----

def tmpfs(path, size):
    if os.geteuid() != 0:
        raise Skip("needs root for a disk of its own")
    os.makedirs(path, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], check=True)


def code_of(path, call=read_all):
    try:
        call(path)
        return 0
    except OSError as e:
        return e.errno


def names_in(path):
    """None while it cannot be listed."""
    try:
        return os.listdir(path)
    except OSError:
        return None


def unmounted(path, *how):
    return subprocess.run(["umount", *how, path], capture_output=True, text=True).returncode == 0


def test_the_source_is_unmounted(t):
    """Behind the server's back (umount -l): EIO, not what is gone; what is mounted there again is the source from then on."""
    for options in "", "rw":
        tmpfs(t + "/src", "8m")
        try:
            tensors = {f"step{i}": make_tensors(i) for i in range(3)}
            key = next(iter(tensors["step0"]))
            for name in "step0", "step1":
                write_checkpoint(f"{t}/src/{name}", tensors[name])
            with Mount(t + "/src", t + "/mnt", options) as m:
                for name in "step0", "step1":
                    same(name, read_all(m / f"{name}/raw/{key}"), tensors[name][key][2])
                with open(m / f"step0/raw/{key}", "rb", buffering=0) as f:
                    same("the disk cannot be unmounted but by force", unmounted(t + "/src"), False)
                    assert unmounted(t + "/src", "-l")
                    wait_for("nothing is read", PATIENCE, lambda: code_of(m / f"step1/raw/{key}") == errno.EIO)
                    for path in f"step0/raw/{key}", "step0/config.json", "step1/model.safetensors":
                        same(path, code_of(m / path), errno.EIO)
                    try:
                        same("what was open", f.read(), tensors["step0"][key][2])
                    except OSError as e:
                        assert e.errno in CHANGED, e
                assert "was unmounted" in m.messages(), m.messages()
                if options:
                    assert code_of(m / "new", lambda p: os.mkdir(p)) == errno.EIO, "something is made where the disk was"
                same("left below", os.listdir(t + "/src"), [])
                tmpfs(t + "/src", "8m")
                write_checkpoint(t + "/src/step1", tensors["step2"])
                wait_for("the new disk", PATIENCE, lambda: code_of(m / f"step1/raw/{key}") == 0 and names_in(m.path) == ["step1"])
                same("its bytes", read_all(m / f"step1/raw/{key}"), tensors["step2"][key][2])
        finally:
            unmounted(t + "/src", "-l")


def empty_index(cache):
    index, = (os.path.join(d, f) for d, _, files in os.walk(cache) for f in files if f.endswith(".sqlite"))
    db = sqlite3.connect(index, timeout=PATIENCE)
    with db:
        for table in ("checkpoint", "tensor", "tensor_name", "view", "view_header", "view_member", "hidden"):
            db.execute(f"DELETE FROM {table}")
    db.close()


def test_rows_of_the_index_go(t):
    """Another process scanned the checkpoint anew, or the index left its disk: whoever opens then is served, the first time."""
    tensors = make_tensors(1, count=40)
    write_checkpoint(t + "/src/step1", tensors)
    with Mount(t + "/src", t + "/mnt", f"cache_dir={t}/cache") as m:
        keys = iter(tensors)
        calls = {"open": read_all, "stat": lambda path: os.stat(path).st_size, "list": lambda path: os.listdir(os.path.dirname(path)),
                 "getxattr": lambda path: os.getxattr(path, "user.unshard.dtype")}
        for name, call in calls.items():
            for view, form in (("raw", "{}"), ("tensors", "{}.npy")):
                path = os.path.join(m / f"step1/{view}", form.format(next(keys)))
                want = call(path)
                same(f"known before {name}", read_all(m / f"step1/raw/{next(iter(tensors))}"), tensors[next(iter(tensors))][2])
                empty_index(t + "/cache")
                path = path if name == "list" else os.path.join(m / f"step1/{view}", form.format(next(keys)))
                got = call(path)
                same(f"{name} in {view}", sorted(got) if name == "list" else type(got), sorted(want) if name == "list" else type(want))


def test_rows_of_the_index_go_under_many_readers(t):
    """While one of them has it looked at again, which takes its time, no other is sent back to what was there before."""
    tensors = {f"model.{i:05}.w": ("U8", (1,), b"%c" % (i % 251)) for i in range(20_000)}
    write_checkpoint(t + "/src/step1", tensors, shards=1)
    keys, wrong = iter(tensors), []
    with Mount(t + "/src", t + "/mnt", f"cache_dir={t}/cache") as m:
        def reader(barrier, mine):
            barrier.wait()
            for key in mine:
                try:
                    same(key, read_all(m / f"step1/raw/{key}"), tensors[key][2])
                except (OSError, AssertionError) as e:
                    wrong.append(e)

        for _ in range(4):
            some = next(keys)
            same(some, read_all(m / f"step1/raw/{some}"), tensors[some][2])
            barrier = threading.Barrier(17)
            threads = [threading.Thread(target=reader, args=(barrier, [next(keys) for _ in range(20)])) for _ in range(16)]
            for thread in threads:
                thread.start()
            empty_index(t + "/cache")
            barrier.wait()
            for thread in threads:
                thread.join()
            same("refused", wrong, [])


def test_a_cache_disk_that_is_full(t):
    """Of a local source: the index finds no room, goes on in memory, and says so."""
    tmpfs(t + "/small", "1m")
    try:
        steps = {f"step{i:02}": make_tensors(i, count=400, rows=4, cols=4) for i in range(12)}
        for name, tensors in steps.items():
            write_checkpoint(f"{t}/src/{name}", tensors)
        with Mount(t + "/src", t + "/mnt", f"cache_dir={t}/small/cache") as m:
            for _ in range(2):
                for name, tensors in steps.items():
                    for key in list(tensors)[::37]:
                        same(f"{name} {key}", read_all(m / f"{name}/raw/{key}"), tensors[key][2])
            same("free", os.statvfs(t + "/small").f_bavail < 100, True)
            assert "No space" in m.messages() or "disk is full" in m.messages(), m.messages()
    finally:
        unmounted(t + "/small", "-l")


def test_a_cache_disk_that_is_full_under_a_server(t):
    """Of a server: blocks that find no room are fetched again."""
    tmpfs(t + "/small", "2m")
    try:
        tensors = make_tensors(3, count=12, rows=512, cols=512)
        write_checkpoint(t + "/src/step1", tensors)
        with Server(t + "/src") as server, Mount(server.url, t + "/mnt", f"cache_dir={t}/small/cache") as m:
            for _ in range(2):
                for key, (_, _, data) in tensors.items():
                    same(key, read_all(m / f"step1/raw/{key}"), data)
            assert m.alive()
    finally:
        unmounted(t + "/small", "-l")


if __name__ == "__main__":
    main(globals())
