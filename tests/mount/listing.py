# SPDX-License-Identifier: MIT
"""A checkpoint of 100,000 tensors: listings come in pages, and the server's memory stays flat."""
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import time

from mountlib import PATIENCE, SANITIZED, Mount, main, read_all, same, safetensors_image, wait_for, write_file

libc = ctypes.CDLL(None, use_errno=True)
GETDENTS64 = 217 if platform.machine() == "x86_64" else 61
COUNT = 100_000
MAX_GROWTH = 64 << 20
# The ls of coreutils 9.4 lists the extended attributes of each file, which no kernel remembers: a request a file.
with open(shutil.which("ls"), "rb") as program:
    LS_LISTS_XATTRS = b"listxattr" in program.read()


def source(t):
    os.mkdir(t + "/src")
    tensors = {f"model.layers.{i // 100:04}.experts.{i % 100:02}.w": ("U8", (1,), bytes((i % 251,))) for i in range(COUNT)}
    write_file(t + "/src/model.safetensors", safetensors_image(tensors))
    return tensors


def timed(what, *args):
    start = time.monotonic()
    done = subprocess.run(args, stdout=subprocess.PIPE, check=True)
    print(f"# {what}: {time.monotonic() - start:.2f} s")
    return done.stdout


def requests(m):
    with open(m / ".unshard/counters.json", "rb") as f:
        return json.load(f)["requests"]


def requests_again(m):
    """How many the kernel makes for directories that were listed before."""
    before = requests(m)
    for view in ("raw", "tensors"):
        timed(f"ls -l {view} again", "ls", "-l", m / view)
        timed(f"find {view} -size", "find", m / view, "-size", "-2c")
    return requests(m) - before


def test_a_hundred_thousand_tensors(t):
    tensors = source(t)
    with Mount(t + "/src", t + "/mnt") as m:
        start = time.monotonic()
        os.listdir(m.path)
        print(f"# first ls, with the scan: {time.monotonic() - start:.2f} s")
        before = m.rss()
        for view, suffix in (("raw", ""), ("tensors", ".npy")):
            names = timed(f"ls -U {view}", "ls", "-U", m / view).decode().split()
            same(f"names in {view}", len(names), COUNT)
            same(f"the names of {view}", set(names), {k + suffix for k in tensors})
            for what in ("first", "second"):
                lines = timed(f"ls -l {view}, {what}", "ls", "-l", m / view).splitlines()
                same(f"lines of ls -l {view}", len(lines), COUNT + 1)
        found = timed("find tree", "find", m / "tree", "-type", "f").splitlines()
        same("files in tree/", len(found), COUNT)
        found = timed("find raw -size", "find", m / "raw", "-type", "f", "-size", "-2c").splitlines()
        same("found by size", len(found), COUNT)
        again = min(requests_again(m) for _ in range(3))  # a kernel may drop its caches
        assert again < COUNT // 100 + 2 * COUNT * LS_LISTS_XATTRS, f"{again} requests for what the kernel has"
        info = json.loads(timed("cat checkpoint.json", "cat", m / ".unshard/checkpoint.json"))
        same("counted", info["counts"]["tensors"], COUNT)
        growth = m.rss() - before
        print(f"# resident: {before >> 20} MiB, and {growth >> 20} MiB more after all listings")
        if not SANITIZED:
            assert growth < MAX_GROWTH, growth
        for i in (0, 1, COUNT // 2, COUNT - 1):
            key = list(tensors)[i]
            with open(m / f"raw/{key}", "rb") as f:
                same(key, f.read(), tensors[key][2])


def requests_of(t, command):
    """How often the kernel asks a fresh mount."""
    with Mount(t + "/src", t + "/mnt") as m:
        os.listdir(m.path)
        timed(" ".join(command[:2]), *command)
        return requests(m)


def test_attributes_come_with_the_listing(t):
    """Programs that ask for the attributes of all files do not make a request for each."""
    os.mkdir(t + "/src")
    tensors = {f"model.layers.{i:05}.w": ("U8", (1,), b"x") for i in range(10_000)}
    write_file(t + "/src/model.safetensors", safetensors_image(tensors))
    for command, more in ((["ls", "-l"], []), (["find"], ["-size", "+1M"]), (["du", "-a"], [])):
        # The fewest of three: the kernel may have dropped its caches meanwhile.
        requests = min(requests_of(t, [*command, t + "/mnt/raw", *more]) for _ in range(3))
        limit = 500 + len(tensors) * (LS_LISTS_XATTRS and command[0] == "ls")
        assert requests < limit, f"{command}: {requests} requests for {len(tensors)} files"


def test_node_ids_differ_below(t):
    """The kernel finds an inode by the low bits of its number: the same directory of many checkpoints must not be one chain."""
    write_file(t + "/model.safetensors", safetensors_image({"w": ("U8", (1,), b"x")}))
    for i in range(200):
        os.makedirs(f"{t}/src/step{i}")
        os.link(t + "/model.safetensors", f"{t}/src/step{i}/model.safetensors")
    with Mount(t + "/src", t + "/mnt", "debug") as m:
        for i in range(200):
            same(f"step{i}", os.listdir(m / f"step{i}/tensors"), ["w.npy"])
        ids = {int(id) for id in re.findall(r"opcode: OPENDIR \(\d+\), nodeid: (\d+)", m.messages())}
    same("directories", len(ids), 200)
    low = {id % 65536 for id in ids}
    assert len(low) > 190, f"200 directories, but {len(low)} numbers in their low 16 bits"


def test_positions_are_stable(t):
    """seekdir(3) to where telldir(3) was, in every kind of directory."""
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    for f in (libc.readdir, libc.telldir, libc.closedir):
        f.argtypes = [ctypes.c_void_p]
    libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]

    def name(entry):
        return ctypes.string_at(entry + 19)  # struct dirent of x86-64 and arm64: ino, off, reclen, type, name

    os.mkdir(t + "/src")
    tensors = {f"a{i % 7}.b{i:03}": ("U8", (1,), b"x") for i in range(500)}
    write_file(t + "/src/model.safetensors", safetensors_image(tensors))
    for i in range(300):
        write_file(f"{t}/src/side{i:03}.txt", b"")
    with Mount(t + "/src", t + "/mnt") as m:
        for path in (m.path, m / "raw", m / "tensors", m / "tree/a3", m / ".unshard"):
            d = libc.opendir(path.encode())
            seen = []
            while True:
                at = libc.telldir(d)
                entry = libc.readdir(d)
                if not entry:
                    break
                seen.append((at, name(entry)))
            names = [n for _, n in seen]
            same(f"{path}: names once", len(set(names)), len(names))
            assert b"." in names and b".." in names
            same(f"{path}: names", sorted(n.decode() for n in names if n not in (b".", b"..")), sorted(os.listdir(path)))
            for at, want in seen[:: max(1, len(seen) // 40)][::-1]:
                libc.seekdir(d, at)
                same(f"{path} at {at}", name(libc.readdir(d)), want)
            libc.closedir(d)


def break_off(folder, pages):
    """A listing of which so many pages are asked for, by a program that wants attributes too."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    buffer = ctypes.create_string_buffer(32 << 10)
    for _ in range(pages):
        got = libc.syscall(GETDENTS64, fd, buffer, len(buffer))
        assert got > 0, f"getdents64: {got}"
        at = 0
        while at + int.from_bytes(buffer.raw[at + 16:at + 18], "little") < got:
            at += int.from_bytes(buffer.raw[at + 16:at + 18], "little")
        os.stat(ctypes.string_at(ctypes.addressof(buffer) + at + 19), dir_fd=fd)  # the last entry
    os.close(fd)


def test_listings_that_are_broken_off(t):
    """A page may be made that nobody asks for: neither it stays behind nor the checkpoint that it is of."""
    os.mkdir(t + "/src")
    shard = t + "/src/model.safetensors"
    with Mount(t + "/src", t + "/mnt", "debug") as m:
        for number in range(12):
            tensors = {f"layer.{i:04}.{number % 2}.weight": ("U8", (1,), b"x") for i in range(2000)}
            write_file(shard, safetensors_image(tensors))
            wait_for("the new names", PATIENCE, lambda: os.path.exists(m / f"raw/layer.0000.{number % 2}.weight"))
            for view in ("raw", "tensors", "tree/layer"):
                for pages in (1, 2, 3):
                    break_off(m / view, pages)
        same("all of it", sorted(os.listdir(m / "raw")), sorted(tensors))
        for _ in range(4):  # what stays behind does so each time; what an allocator takes for another thread does not
            before = m.rss()
            for _ in range(1000):
                break_off(m / "raw", 3)
            growth = m.rss() - before
            print(f"# resident: {growth >> 10} KiB more after 1,000 listings")
            if SANITIZED or growth < 8 << 20:
                break
        else:
            raise AssertionError(f"{growth} bytes more, each time")
        ids = {int(id) for id in re.findall(r"opcode: OPENDIR \(\d+\), nodeid: (\d+)", m.messages())}
    slots = {id >> 40 for id in ids if id >> 63}
    assert len(slots) < 6, f"12 checkpoints after each other have {len(slots)} places: none is free again"


if __name__ == "__main__":
    main(globals(), seconds=1200)
