#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Files that are written by write(2) and through shared mappings, at the same moment and by turns: no byte of either is lost.

PLACES are all that can be both: a file beside checkpoints, one of a new checkpoint, and a side file and tensors of one
that is there.
"""
import errno
import mmap
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, SANITIZED, Mount, fails, main, safetensors_image, same, stored, tensor_bytes, wait_for, write_checkpoint, write_file  # noqa: E402

KEY, OTHER, PAGE, PAGES = "w", "v", 4096, 64
ROUNDS = 2 if SANITIZED or "UFS_YIELD_SEED" in os.environ else 12  # both make each request slow
WRITERS = 8  # half of them by write, the others by a mapping
WORD = 8
BLANK = bytes(PAGE * PAGES)


def publish(m):
    os.setxattr(m.path, "user.unshard.publish", b"")


def write_in(path, data):
    with open(path, "wb") as f:
        f.write(data)


def source(t):
    """A checkpoint with two tensors and a side file, and logs beside it."""
    write_checkpoint(t + "/run/step1", {key: ("F32", [PAGE // 4, PAGES], BLANK) for key in (KEY, OTHER)})
    write_file(t + "/run/step1/side.bin", BLANK)
    os.mkdir(t + "/run/logs")
    write_file(t + "/run/logs/old", BLANK)
    return Mount(t + "/run", t + "/mnt", "rw")


def places(m):
    """A path, and where the bytes of it begin that are written here."""
    os.mkdir(m / "step2")
    write_in(m / "logs/new", BLANK)
    write_in(m / "step2/model.safetensors", safetensors_image({"x": ("U8", [8], b"12345678")}))
    write_in(m / "step2/new.bin", BLANK)
    npy = os.stat(m / f"step1/tensors/{OTHER}.npy").st_size - len(BLANK)
    return {m / "logs/new": 0, m / "logs/old": 0, m / "step2/new.bin": 0, m / "step1/side.bin": 0, m / f"step1/raw/{KEY}": 0,
            m / f"step1/tensors/{OTHER}.npy": npy}


# ---- many at the same moment ----

def word(writer, turn, page):
    return (turn << 32 | page << 8 | writer + 1).to_bytes(WORD, "little")


def expected(turns):
    """turns: what each page was last written in, by writer."""
    out = bytearray(PAGE * PAGES)
    for page in range(PAGES):
        for writer in range(WRITERS):
            at = page * PAGE + writer * WORD
            out[at:at + WORD] = word(writer, turns, page)
    return bytes(out)


def by_write(fd, at, writer, turn):
    for page in range(PAGES):
        os.pwrite(fd, word(writer, turn, page), at + page * PAGE + writer * WORD)


def by_mapping(fd, at, writer, turn):
    with mmap.mmap(fd, at + PAGE * PAGES) as shared:
        for page in range(PAGES):
            where = at + page * PAGE + writer * WORD
            shared[where:where + WORD] = word(writer, turn, page)


def child(call):
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def together(calls):
    """Runs them in processes of their own, which begin at one moment."""
    ready, go = os.pipe(), os.pipe()

    def run(call):
        signal.alarm(4 * PATIENCE)
        os.write(ready[1], b"x")
        os.close(go[1])
        os.read(go[0], 1)
        call()

    children = [child(lambda call=call: run(call)) for call in calls]
    for _ in children:
        os.read(ready[0], 1)
    os.close(go[1])
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    for fd in (*ready, go[0]):
        os.close(fd)
    same("processes", codes, [0] * len(codes))


def lost(path, at, want):
    with open(path, "rb") as f:
        f.seek(at)
        got = f.read()
    return sum(got[i:i + WORD] != want[i:i + WORD] for i in range(0, len(want), WORD))


def rounds(path, at, flags, noise=None):
    """flags: with which who writes by write(2) opens it, and whether all of them do first."""
    for turn in range(1, ROUNDS + 1):
        with open(path, "r+b") as f:  # pages that nobody has, so that they are taken up anew
            f.seek(at)
            f.write(BLANK)
        fds = [os.open(path, flags if i % 2 == 0 else os.O_RDWR) for i in range(WRITERS)]
        calls = [lambda i=i: (by_write if i % 2 == 0 else by_mapping)(fds[i], at, i, turn) for i in range(WRITERS)]
        together(calls + ([noise] if noise else []))
        n = lost(path, at, expected(turn))
        for fd in fds:
            os.close(fd)
        same(f"{path}, round {turn}: words that are not what was written last", n, 0)


def published(t, m):
    publish(m)
    for name in (f"raw/{KEY}", f"raw/{OTHER}", "side.bin"):
        with open(m / f"step1/{name}", "rb") as f:
            same(f"{name}, published", f.read() == expected(ROUNDS), True)
    for name in ("logs/new", "logs/old", "step2/new.bin", "step1/side.bin"):
        with open(f"{t}/run/{name}", "rb") as f:
            same(f"{name} of the source", f.read() == expected(ROUNDS), True)


def test_the_same_page_both_ways(t):
    with source(t) as m:
        for path, at in places(m).items():
            rounds(path, at, os.O_RDWR)
        published(t, m)


def test_who_only_writes_and_who_maps(t):
    """O_WRONLY, opened before anybody could map it: such writes go around the kernel's pages."""
    with source(t) as m:
        for path, at in places(m).items():
            rounds(path, at, os.O_WRONLY)
        published(t, m)


def test_while_others_look(t):
    """stat(2), open(2) and reads of the same file, which have the kernel drop its pages."""
    with source(t) as m:
        for path, at in places(m).items():
            def look(path=path):
                for i in range(200):
                    os.stat(path)
                    fd = os.open(path, os.O_RDONLY)
                    os.pread(fd, PAGE, i % PAGES * PAGE)
                    os.close(fd)

            rounds(path, at, os.O_RDWR, look)
        published(t, m)


# ---- by turns ----

def test_by_turns(t):
    """What one writes after the other, each by a handle of its own; the first one opens it before it is changed."""
    with source(t) as m:
        for path, at in places(m).items():
            first = os.open(path, os.O_RDWR)
            with mmap.mmap(first, at + PAGE * PAGES) as shared:
                same("mapped", shared[at:at + 8], bytes(8))
                second = os.open(path, os.O_RDWR)
                os.pwrite(second, b"second", at + 100)
                same(f"{path}: mapped before it was written", shared[at + 100:at + 106], b"second")
                shared[at:at + 5] = b"first"
                same(f"{path}: written through the mapping", os.pread(second, 5, at), b"first")
                with mmap.mmap(second, at + PAGE * PAGES) as other:
                    same(f"{path}: mapped twice", (other[at:at + 5], other[at + 100:at + 106]), (b"first", b"second"))
                    other[at + 200:at + 205] = b"third"
                    same(f"{path}: through the other mapping", shared[at + 200:at + 205], b"third")
                    shared.flush()
                    other.flush()
            os.close(first)
            os.close(second)
            with open(path, "rb") as f:
                f.seek(at)
                page = f.read(PAGE)
            same(path, (page[:5], page[100:106], page[200:205]), (b"first", b"second", b"third"))


def test_under_its_old_name(t):
    """A file that is renamed while it is open, and opened under its new name: the kernel has it by two numbers."""
    with source(t) as m:
        first = os.open(m / "logs/old", os.O_RDWR)
        os.rename(m / "logs/old", m / "logs/log.1")
        second = os.open(m / "logs/log.1", os.O_RDWR)
        reader = os.open(m / "logs/log.1", os.O_RDONLY)
        with mmap.mmap(first, PAGE * PAGES) as shared, mmap.mmap(reader, PAGE * PAGES, prot=mmap.PROT_READ) as seen:
            for page in range(PAGES):
                at = page * PAGE
                same("mapped", (shared[at:at + 6], seen[at:at + 6]), (bytes(6), bytes(6)))
                os.pwrite(second, b"second", at)
                same(f"page {page}, by the old name", shared[at:at + 6], b"second")
                shared[at + 100:at + 105] = b"first"
                os.pwrite(first, b"third", at + 200)
                same(f"page {page}, by the new name", seen[at + 200:at + 205], b"third")
            shared.flush()
        for fd in (first, second, reader):
            os.close(fd)
        with open(t + "/run/logs/log.1", "rb") as f:
            for page in range(PAGES):
                got = f.read(PAGE)
                same(f"page {page}", (got[:6], got[100:105], got[200:205]), (b"second", b"first", b"third"))


def test_a_reader_from_before(t):
    """Of a view it keeps the bytes that it opened, and whoever writes maps what was written."""
    with source(t) as m:
        for name in (f"step1/raw/{KEY}", f"step1/raw/{OTHER}"):
            path = m / name
            reader = os.open(path, os.O_RDONLY)
            with mmap.mmap(reader, PAGE * PAGES, prot=mmap.PROT_READ) as old:
                same("the reader", old[:8], bytes(8))
                writer = os.open(path, os.O_RDWR)
                os.pwrite(writer, b"x" * PAGE, 0)
                same(f"{name}: the reader, when it was written", old[:8], bytes(8))
                same(f"{name}: read by the reader", os.pread(reader, 8, 0), bytes(8))
                with mmap.mmap(writer, PAGE * PAGES) as new:
                    same(f"{name}: another page", old[PAGE:PAGE + 8], bytes(8))
                    same(f"{name}: mapped by the writer", new[:8], b"x" * 8)
                    new[8:16] = b"mapped!!"
                os.close(writer)
                with open(path, "rb") as f:
                    same(name, f.read(24), b"x" * 8 + b"mapped!!" + b"x" * 8)
                same(f"{name}: the reader, at the end", old[:8], bytes(8))
            os.close(reader)
        publish(m)
    for key, (_, _, data) in stored(t + "/run/step1").items():
        same(f"{key} in the source", data[:24], b"x" * 8 + b"mapped!!" + b"x" * 8)


def test_a_mapping_to_read(t):
    """It shows what write(2) has written when that has returned, also where who writes does nothing else."""
    with source(t) as m:
        for path, at in places(m).items():
            writer, reader = os.open(path, os.O_WRONLY), os.open(path, os.O_RDONLY)
            with mmap.mmap(reader, at + PAGE * PAGES, prot=mmap.PROT_READ) as shared:
                for page in range(PAGES):
                    here = at + page * PAGE
                    same(f"{path}: before", shared[here:here + 4], bytes(4))
                    os.pwrite(writer, b"here", here)
                    same(f"{path}: page {page}", shared[here:here + 4], b"here")
            os.close(writer)
            os.close(reader)


def test_opened_by_its_descriptor(t):
    """/proc/self/fd names no path by which the kernel could come back: of a view it says so, and nothing has begun."""
    with source(t) as m:
        for name in (f"step1/raw/{KEY}", f"step1/tensors/{OTHER}.npy"):
            fd = os.open(m / name, os.O_RDONLY)
            old = os.pread(fd, 4 * PAGE, 0)
            for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
                fails(f"{name}, {flags}", errno.ESTALE, lambda fd=fd, flags=flags: os.open(f"/proc/self/fd/{fd}", flags))
            same(f"{name}, what is open", os.pread(fd, 4 * PAGE, 0), old)
            same(f"{name}, its size", os.fstat(fd).st_size, os.stat(m / name).st_size)
            with open(m / name, "rb") as f:
                same(f"{name}, opened by its name", f.read(4 * PAGE), old)
            os.close(fd)
        publish(m)
        fd = os.open(m / "step1/side.bin", os.O_RDONLY)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        os.pwrite(again, b"written", 0)
        os.close(again)
        with open(m / "step1/side.bin", "rb") as f:
            same("a storage file", (f.read(7), os.pread(fd, 7, 0)), (b"written", b"written"))
        os.close(fd)
    same("nothing is staged", [n for n in os.listdir(t + "/run") if "staging" in n], [])
    same("its tensors", {key: data for key, (_, _, data) in stored(t + "/run/step1").items()}, {KEY: BLANK, OTHER: BLANK})


def test_opened_just_after_a_change(t):
    """The kernel comes back by the path once: what it is told ESTALE for must be one thing of the two."""
    with source(t) as m:
        for name in (f"step1/raw/{KEY}", f"step1/tensors/{KEY}.npy"):
            for turn in range(8):
                with open(m / name, "rb") as f:
                    f.read(1)
                write_checkpoint(t + "/run/step1", {KEY: ("F32", [PAGE // 4, PAGES], tensor_bytes(turn, len(BLANK)))})
                fd = os.open(m / name, os.O_RDWR)
                whole = os.pread(fd, os.fstat(fd).st_size, 0)
                os.pwrite(fd, b"changed", len(whole) - 7)
                os.close(fd)
                same(f"{name}, {turn}", sum(whole), sum(whole[:-len(BLANK)]) + sum(tensor_bytes(turn, len(BLANK))))
                publish(m)
                with open(m / f"step1/raw/{KEY}", "rb") as f:
                    same(f"{name}, {turn}, published", f.read()[-len(BLANK):], tensor_bytes(turn, len(BLANK))[:-7] + b"changed")


def test_its_length_is_known_at_once(t):
    """Appends, cuts and what is put behind the end, by two handles and a mapping."""
    with source(t) as m:
        os.mkdir(m / "step2")
        for path in (m / "logs/grows", m / "step2/grows"):
            a = os.open(path, os.O_RDWR | os.O_CREAT)
            b = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.write(b, b"one")
            same(path, (os.fstat(a).st_size, os.pread(a, 9, 0)), (3, b"one"))
            os.pwrite(a, b"two", 3)
            os.write(b, b"three")
            same(path, (os.stat(path).st_size, os.pread(a, 99, 0)), (11, b"onetwothree"))
            with mmap.mmap(a, 11) as shared:
                shared[0:3] = b"ONE"
                os.write(b, b"four")
                same(path, os.pread(a, 99, 0), b"ONEtwothreefour")
            os.truncate(path, 5)
            same(path, (os.fstat(b).st_size, os.pread(a, 99, 0)), (5, b"ONEtw"))
            os.write(b, b"!")
            os.ftruncate(a, 8)
            same(path, os.pread(a, 99, 0), b"ONEtw!\0\0")
            os.close(a)
            os.close(b)
            wait_for("what was written", PATIENCE, lambda path=path: open(path, "rb").read() == b"ONEtw!\0\0")


if __name__ == "__main__":
    main(globals())
