# SPDX-License-Identifier: MIT
"""What is gathered before it is asked for: the same bytes by reads of any length, and none of shards that have changed."""
import errno
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import zipfile
import zlib

from mountlib import PATIENCE, Mount, Skip, fails, main, read_all, same, wait_for

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench")
MIB = 1 << 20
RANKS, ROW, SIZE = 4, 256, 24 * MIB
KEY = "model.layers.0.weight"


def two_processors():
    if len(os.sched_getaffinity(0)) < 2:
        raise Skip("one processor: nothing is gathered early")


def column_shards(folder, row=ROW):
    """A tensor in columns, rows of `row` bytes by each rank. Its bytes, put together here."""
    subprocess.run([sys.executable, f"{BENCH}/make_checkpoint.py", "dcp", folder, "--tensors", "1", "--bytes", str(SIZE), "--ranks", str(RANKS),
                    "--row-bytes", str(row)], check=True)
    pieces = []
    for rank in range(RANKS):
        with zipfile.ZipFile(f"{folder}/__{rank}_0.distcp") as z:
            pieces.append(z.read("archive/data/0"))
    return b"".join(p[at:at + row] for at in range(0, SIZE // RANKS, row) for p in pieces)


def early(m):
    return json.loads(read_all(m / ".unshard/counters.json"))["replies_early"]


def read_in_order(path, lengths, at=0, within=0):
    """All from `at` on, by reads of those lengths by turns, to memory that begins `within` a page."""
    memory, got, n = mmap.mmap(-1, 4 * MIB), [], 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while True:
            part = memoryview(memory)[within:within + lengths[n % len(lengths)]]
            size = os.preadv(fd, [part], at)
            if not size:
                return b"".join(got)
            got.append(bytes(part[:size]))
            at, n = at + size, n + 1
    finally:
        os.close(fd)


def grows(m, what, look):
    """look() each time; within a while some of it was early. A processor that is late may keep one round of it from that."""
    def once():
        before = early(m)
        look()
        return early(m) > before

    wait_for(f"{what}: early pieces", PATIENCE, once)


def test_reads_in_order(t):
    two_processors()
    want = column_shards(t + "/src")
    with Mount(t + "/src", t + "/mnt") as m:
        path, header = m / f"raw/{KEY}", len(read_all(m / f"tensors/{KEY}.npy")) - SIZE
        for lengths in ((MIB,), (MIB - 16, 16), (512 << 10,), (700001,), (3 * MIB + 5,), (MIB, 4096, 300000, 1), (MIB, 2 * MIB - 1)):
            for within in (0, 16, 4095):
                words = f"reads of {lengths} to {within}"
                grows(m, words, lambda: same(words, read_in_order(path, lengths, 0, within) == want, True))
        same("from within", read_in_order(path, (MIB,), 1234567) == want[1234567:], True)
        same("npy", read_in_order(m / f"tensors/{KEY}.npy", (MIB,))[header:] == want, True)
        before = early(m)
        same("short reads", read_in_order(path, (100000,)) == want, True)
        same("early by short reads", early(m), before)


def test_rows_that_could_be_handed_over(t):
    two_processors()
    want = column_shards(t + "/src", 64 << 10)
    with Mount(t + "/src", t + "/mnt") as m:
        for lengths in ((MIB,), (MIB - 16, 16)):
            words = f"reads of {lengths}"
            grows(m, words, lambda: same(words, read_in_order(m / f"raw/{KEY}", lengths) == want, True))


def zarr_columns(folder, name, packed):
    """A float32 array of 8 MiB in four zarr chunks, a column each. Its bytes."""
    rows, width = 1024, 512 * 4
    chunks = [random.Random(f"{name} {k}").randbytes(rows * width) for k in range(4)]
    about = {"zarr_format": 2, "shape": [rows, 2048], "chunks": [rows, 512], "dtype": "<f4", "order": "C", "fill_value": None, "filters": None,
             "compressor": {"id": "zlib", "level": 1} if packed else None}
    os.makedirs(f"{folder}/{name}")
    for k, data in enumerate(chunks):
        with open(f"{folder}/{name}/0.{k}", "wb") as f:
            f.write(zlib.compress(data, 1) if packed else data)
    with open(f"{folder}/{name}/.zarray", "w", encoding="utf-8") as f:
        json.dump(about, f)
    return b"".join(c[at:at + width] for at in range(0, rows * width, width) for c in chunks)


def test_packed_chunks_beside_others(t):
    """Of a view's piece with a part in packed chunks nobody can tell later whether it is still right: it is read when it is asked for."""
    two_processors()
    plain, packed = (zarr_columns(t + "/src", n, n == "b") for n in "ab")
    with Mount(t + "/src", t + "/mnt") as m:
        path = m / "model.safetensors"
        header = os.path.getsize(path) - len(plain) - len(packed)
        whole = read_all(path)[:header] + plain + packed

        def look():
            fd = os.open(path, os.O_RDONLY)
            for at in range(MIB // 2, len(whole), MIB):  # half of one piece is plain, half packed
                before = early(m)
                same(f"byte {at}", os.pread(fd, MIB, at) == whole[at:at + MIB], True)
                if at + MIB > header + len(plain):
                    same(f"early at byte {at}", early(m) - before, 0)
            os.close(fd)

        for _ in range(5):
            grows(m, "the whole", look)


def test_where_it_is_not_worth_it(t):
    """What can be handed over straight from the shards is."""
    two_processors()
    subprocess.run([sys.executable, f"{BENCH}/make_checkpoint.py", "dcp", t + "/src", "--tensors", "1", "--bytes", str(SIZE)], check=True)
    with Mount(t + "/src", t + "/mnt") as m:
        whole = read_in_order(m / f"raw/{KEY}", (MIB,))
        same("again", read_in_order(m / f"raw/{KEY}", (100000,)) == whole, True)
        same("early", early(m), 0)


def test_reads_here_and_there_and_in_order(t):
    two_processors()
    want = column_shards(t + "/src")
    failed = []

    def walk(path, seed, whole):
        rnd = random.Random(seed)
        fd = os.open(path, os.O_RDONLY)
        for _ in range(25):
            at = rnd.choice((rnd.randrange(len(whole)), 0, len(whole) - rnd.randrange(3 * MIB)))
            for _ in range(rnd.randrange(1, 8)):
                n = rnd.choice((MIB, MIB, MIB - 16, 512 << 10, 16, 2 * MIB + 7))
                if os.pread(fd, n, at) != whole[at:at + n]:
                    failed.append(f"{path} {at}+{n}, seed {seed}")
                at += n
                if rnd.random() < 0.1:
                    at = max(0, at - rnd.randrange(2 * MIB))
        os.close(fd)

    with Mount(t + "/src", t + "/mnt") as m:
        npy = read_in_order(m / f"tensors/{KEY}.npy", (100000,))
        assert npy.endswith(want)
        for files in (1, 2, 6):
            threads = [threading.Thread(target=walk, args=(m / name, 10 * files + i, whole)) for i in range(files)
                       for name, whole in (("raw/" + KEY, want), (f"tensors/{KEY}.npy", npy))[i % 2:][:1]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            same("wrong reads", failed, [])


def test_one_file_by_many_threads(t):
    two_processors()
    want = column_shards(t + "/src")
    failed, lock, place = [], threading.Lock(), [0]

    def take(fd):
        while True:
            with lock:
                at = place[0]
                place[0] += MIB
            if at >= SIZE:
                return
            if os.pread(fd, MIB, at) != want[at:at + MIB]:
                failed.append(at)

    with Mount(t + "/src", t + "/mnt") as m:
        for count in (1, 2, 3, 8):
            fd = os.open(m / f"raw/{KEY}", os.O_RDONLY)
            place[0] = 0
            threads = [threading.Thread(target=take, args=(fd,)) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os.close(fd)
            same(f"wrong, by {count} threads", failed, [])


def test_a_view_of_several(t):
    """model.safetensors of a mesh: tensors one behind the other."""
    two_processors()
    subprocess.run([sys.executable, f"{BENCH}/make_checkpoint.py", "dcp", t + "/src", "--tensors", "5", "--bytes", str(5 * MIB), "--mesh", "2x2"], check=True)
    with Mount(t + "/src", t + "/mnt") as m:
        whole = read_in_order(m / "model.safetensors", (100000,))
        for i in range(5):
            assert read_in_order(m / f"raw/model.layers.{i}.weight", (100000,)) in whole
        for lengths in ((MIB,), (MIB - 16, 16), (600000,)):
            words = f"reads of {lengths}"
            grows(m, words, lambda: same(words, read_in_order(m / "model.safetensors", lengths) == whole, True))
    with Mount(t + "/src", t + "/mnt", "dtype=bf16") as m:
        whole = read_in_order(m / "model.safetensors", (100000,))
        grows(m, "cast", lambda: same("cast", read_in_order(m / "model.safetensors", (MIB,)) == whole, True))


def test_shards_that_change(t):
    """The next read fails, though its bytes stand in memory: as it does where nothing is early."""
    two_processors()
    want = column_shards(t + "/src")
    path = f"{t}/src/__2_0.distcp"
    with open(path, "rb") as f:
        image = f.read()
    parts = [want[at * MIB:(at + 1) * MIB] for at in range(4)]
    for change in ("in place", "cut"):
        with Mount(t + "/src", t + "/mnt") as m:
            fd = os.open(m / f"raw/{KEY}", os.O_RDONLY)
            grows(m, "the first part", lambda: same("the first part", [os.pread(fd, MIB, at * MIB) for at in range(4)] == parts, True))
            if change == "in place":
                with open(path, "r+b") as f:
                    f.seek(len(image) - 1)
                    f.write(image[-1:])
            else:
                os.truncate(path, len(image) // 2)
            fails(change, errno.ESTALE, lambda: os.pread(fd, MIB, 4 * MIB))
            os.close(fd)
        with open(path, "wb") as f:
            f.write(image)


def test_closed_and_unmounted_meanwhile(t):
    two_processors()
    want = column_shards(t + "/src")
    for _ in range(4):
        with Mount(t + "/src", t + "/mnt") as m:
            for n in range(30):
                fd = os.open(m / f"raw/{KEY}", os.O_RDONLY)
                at = n % 20 * MIB
                for k in range(3):
                    same("bytes", os.pread(fd, MIB, at + k * MIB) == want[at + k * MIB:at + (k + 1) * MIB], True)
                os.close(fd)
            fds = [os.open(m / f"raw/{KEY}", os.O_RDONLY) for _ in range(40)]  # more than have memory for it
            for at in range(0, 6 * MIB, MIB):
                for fd in fds:
                    same("bytes", os.pread(fd, MIB, at) == want[at:at + MIB], True)
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    main(globals())
