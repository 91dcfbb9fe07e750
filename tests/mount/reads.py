# SPDX-License-Identifier: MIT
"""Bytes come out the same by every way of reading: random pieces, mappings, O_DIRECT, sendfile, many at once."""
import errno
import json
import mmap
import os
import pickle
import random
import subprocess
import sys
import threading
import zipfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench"))
import make_checkpoint as made
import make_metadata as torch_like
from mountlib import PATIENCE, Mount, Skip, fails, main, make_tensors, read_all, safetensors_image, same, tensor_bytes, tiles_source, wait_for, write_checkpoint, write_file

BIG = 5 * (1 << 20) + 1234


def source(t):
    tensors = make_tensors(1, count=3)
    tensors["model.big"] = ("U8", (BIG,), tensor_bytes("big", BIG))
    tensors["model.empty"] = ("F32", (0, 7), b"")
    tensors["model.scalar"] = ("F32", (), b"\x01\x02\x03\x04")
    write_checkpoint(t + "/src", tensors, shards=3)
    return tensors


def views_of_big(m):
    """Path and the whole of each view that holds the big tensor, read in one go."""
    for path in (m / "raw/model.big", m / "tensors/model.big.npy", m / "tree/model/big.npy", m / "model.safetensors"):
        yield path, read_all(path)


def counter(m, name):
    return json.loads(read_all(m / ".unshard/counters.json"))[name]


def test_random_pieces(t):
    tensors = source(t)
    rnd = random.Random(7)
    with Mount(t + "/src", t + "/mnt") as m:
        for path, whole in views_of_big(m):
            assert tensors["model.big"][2] in whole
            fd = os.open(path, os.O_RDONLY)
            for _ in range(400):
                off = rnd.choice((rnd.randrange(len(whole) + 100), rnd.randrange(300), len(whole) - rnd.randrange(300)))
                n = rnd.choice((0, 1, 7, 4095, 4096, 65537, 1 << 20, (1 << 21) + 5))
                same(f"{path} {off}+{n}", os.pread(fd, n, off), whole[off : off + n])
            os.close(fd)
        same("empty", read_all(m / "raw/model.empty"), b"")
        same("scalar", read_all(m / "raw/model.scalar"), b"\x01\x02\x03\x04")


def test_mappings(t):
    source(t)
    with Mount(t + "/src", t + "/mnt") as m:
        for path, whole in views_of_big(m):
            with open(path, "rb") as f:
                for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
                    try:
                        with mmap.mmap(f.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped:
                            same(f"{path} mapped", mapped[:], whole)
                    except OSError as e:
                        # Kernels before 6.6 cannot map direct I/O files shared.
                        assert flags == mmap.MAP_SHARED and e.errno == 19 and kernel() < (6, 6), (path, flags, e)
                same("read beside a mapping", os.pread(f.fileno(), 5000, 100), whole[100:5100])


def kernel():
    return tuple(int(x) for x in os.uname().release.split(".")[:2])


def test_mapped_files_are_asked_for_in_large_pieces(t):
    source(t)
    with Mount(t + "/src", t + "/mnt") as m:
        device = os.stat(m.path).st_dev
        setting = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        if not os.access(setting, os.W_OK):
            raise Skip("needs root and a writable /sys")
        wait_for("read_ahead_kb of 1024", PATIENCE, lambda: read_all(setting) == b"1024\n")
        for path, whole in views_of_big(m):
            reads = counter(m, "reads")
            with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                same(f"{path} mapped", mapped[:], whole)
            # 5 MiB are 40 requests of the kernel's own 128 KiB.
            assert counter(m, "reads") - reads <= 16, (path, counter(m, "reads") - reads)


def mapped(path, flags):
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as m:
        return m[:]


def is_now(path, want):
    """Whole and mapped; not while it changes."""
    try:
        return mapped(path, mmap.MAP_PRIVATE) == want
    except OSError as e:
        assert e.errno in (errno.ESTALE, errno.ENOENT), e
        return False


def test_mapped_again(t):
    source(t)
    if kernel() < (6, 6):
        raise Skip("the kernel cannot map direct I/O files shared")
    with Mount(t + "/src", t + "/mnt") as m:
        for path, whole in views_of_big(m):
            before = counter(m, "reads")
            same(path, read_all(path), whole)
            by_reads = counter(m, "reads") - before
            same(f"{path}: read again, not mapped yet", read_all(path), whole)
            same("reads", counter(m, "reads") - before, 2 * by_reads)
            same(f"{path} mapped", mapped(path, mmap.MAP_PRIVATE), whole)
            same(f"{path} mapped by the next", mapped(path, mmap.MAP_SHARED), whole)
            for _ in range(8):  # others may have the kernel drop what it has of files that nobody has open
                looking, before = -counter(m, "reads") + counter(m, "reads"), counter(m, "reads")
                for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
                    same(f"{path} mapped again", mapped(path, flags), whole)
                same(f"{path} read beside", read_all(path), whole)
                reads = counter(m, "reads") - before
                if reads == looking:
                    break
            same("reads, beside those of the counters", reads, looking)


def test_mapped_and_changed(t):
    old, new = ({"w": ("U8", (BIG,), tensor_bytes(seed, BIG))} for seed in ("old", "new"))
    write_checkpoint(t + "/src", old, shards=1)
    with Mount(t + "/src", t + "/mnt") as m:
        path = m / "raw/w"
        for _ in range(3):
            same("mapped", mapped(path, mmap.MAP_PRIVATE), old["w"][2])
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as kept:
            same("kept", kept[:], old["w"][2])
            write_checkpoint(t + "/new", new, shards=1)
            for name in os.listdir(t + "/new"):
                os.rename(f"{t}/new/{name}", f"{t}/src/{name}")
            wait_for("the new tensor", PATIENCE, lambda: is_now(path, new["w"][2]))
            same("the old one, as it was mapped", kept[:], old["w"][2])
        for _ in range(3):
            same("mapped", mapped(path, mmap.MAP_PRIVATE), new["w"][2])


def here_and_there(path, whole, seed, count=600):
    rnd = random.Random(seed)
    fd = os.open(path, os.O_RDONLY)
    for _ in range(count):
        off, n = rnd.randrange(len(whole)), rnd.choice((1, 64, 4096, 9000))
        same(f"{path} {off}+{n}", os.pread(fd, n, off), whole[off : off + n])
    os.close(fd)


def test_read_here_and_there_again(t):
    """Who opens a file next finds in memory what the last one has read here and there."""
    source(t)
    with Mount(t + "/src", t + "/mnt") as m:
        for path, whole in views_of_big(m):
            looking, before = -counter(m, "reads") + counter(m, "reads"), counter(m, "reads")
            here_and_there(path, whole, 1, 100)
            here_and_there(path, whole, 1, 100)
            # tree/ shows the file of tensors/ once more.
            few = 0 if path == m / "tree/model/big.npy" else 200
            same("reads: a hundred are no habit", counter(m, "reads") - before - looking, few)
            for _ in range(2):
                here_and_there(path, whole, 2)
            before = counter(m, "reads")
            here_and_there(path, whole, 2)
            same("reads, beside those of the counters", counter(m, "reads") - before, looking)
            here_and_there(path, whole, 3)
            same("whole", read_all(path), whole)
            same("mapped", mapped(path, mmap.MAP_PRIVATE), whole)
            here_and_there(path, whole, 4)


def test_read_here_and_there_and_changed(t):
    old, new = ({"w": ("U8", (BIG,), tensor_bytes(seed, BIG))} for seed in ("old", "new"))
    write_checkpoint(t + "/src", old, shards=1)
    with Mount(t + "/src", t + "/mnt") as m:
        path = m / "raw/w"
        for seed in (1, 1, 1):
            here_and_there(path, old["w"][2], seed)
        held = os.open(path, os.O_RDONLY)
        write_checkpoint(t + "/new", new, shards=1)
        for name in os.listdir(t + "/new"):
            os.rename(f"{t}/new/{name}", f"{t}/src/{name}")
        wait_for("the new tensor", PATIENCE, lambda: is_now(path, new["w"][2]))
        rnd = random.Random(1)
        for _ in range(600):  # the old bytes, or none
            off = rnd.randrange(BIG)
            try:
                same(f"held {off}", os.pread(held, 4096, off), old["w"][2][off : off + 4096])
            except OSError as e:
                assert e.errno == errno.ESTALE, e
        os.close(held)
        for seed in (1, 1, 1):
            here_and_there(path, new["w"][2], seed)


def test_o_direct(t):
    source(t)
    with Mount(t + "/src", t + "/mnt") as m:
        for path, whole in views_of_big(m):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            got = b""
            page = mmap.mmap(-1, 1 << 20)
            while True:
                n = os.preadv(fd, [page], len(got))
                if n == 0:
                    break
                got += page[:n]
            os.close(fd)
            same(f"{path} O_DIRECT", got, whole)


def test_sendfile_and_copies(t):
    source(t)
    with Mount(t + "/src", t + "/mnt") as m:
        for path, whole in views_of_big(m):
            with open(path, "rb") as f, open(t + "/copy", "wb") as out:
                off = 0
                while off < len(whole):
                    n = os.sendfile(out.fileno(), f.fileno(), off, len(whole))
                    assert n > 0
                    off += n
            same(f"{path} sendfile", read_all(t + "/copy"), whole)
            subprocess.run(["cp", "-f", path, t + "/copy2"], check=True)
            same(f"{path} cp", read_all(t + "/copy2"), whole)
        same("cat", subprocess.run(["cat", m / "raw/model.big"], capture_output=True, check=True).stdout, read_all(m / "raw/model.big"))
        with open(m / "raw/model.big", "rb") as f:
            same("seek to the end", f.seek(0, 2), BIG)
            f.seek(-10, 2)
            same("from the end", f.read(), read_all(m / "raw/model.big")[-10:])


def test_thirty_two_readers(t):
    source(t)
    faults = []
    with Mount(t + "/src", t + "/mnt") as m:
        wholes = dict(views_of_big(m))

        def reader(seed):
            rnd = random.Random(seed)
            try:
                for _ in range(60):
                    path = rnd.choice(list(wholes))
                    fd = os.open(path, os.O_RDONLY)
                    off, n = rnd.randrange(BIG), rnd.choice((1, 4096, 300000, 1 << 20))
                    if os.pread(fd, n, off) != wholes[path][off : off + n]:
                        faults.append((path, off, n))
                    os.close(fd)
            except OSError as e:
                faults.append(e)

        threads = [threading.Thread(target=reader, args=(i,)) for i in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        same("faults", faults, [])
        assert m.alive()


def test_sixty_four_readers_of_pages(t):
    """Warm, and again with the shards dropped from memory between them."""
    tensors = source(t)
    whole, faults = tensors["model.big"][2], []
    with Mount(t + "/src", t + "/mnt") as m:
        fd = os.open(m / "raw/model.big", os.O_RDONLY)

        def reader(seed):
            rnd = random.Random(seed)
            for _ in range(100):
                off, n = rnd.randrange(BIG), rnd.choice((1, 64, 4096, 8192))
                try:
                    if os.pread(fd, n, off) != whole[off : off + n]:
                        faults.append((off, n))
                except OSError as e:
                    faults.append((off, n, e))

        for drop in (False, True):
            reader(0)
            threads = [threading.Thread(target=reader, args=(i,)) for i in range(1, 65)]
            for thread in threads:
                thread.start()
            for name in os.listdir(t + "/src") if drop else ():
                with open(f"{t}/src/{name}", "rb") as f:
                    os.fsync(f.fileno())
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for thread in threads:
                thread.join()
            same("faults", faults, [])
        os.close(fd)
        assert m.alive()


def test_growing_side_file(t):
    source(t)
    with open(t + "/src/train.log", "wb") as log, Mount(t + "/src", t + "/mnt") as m:
        log.write(b"one\n")
        log.flush()
        wait_for("its first line", PATIENCE, lambda: os.stat(m / "train.log").st_size == 4)
        with open(m / "train.log", "rb", buffering=0) as f:
            same("first", f.read(100), b"one\n")
            log.write(b"two\n")
            log.flush()
            wait_for("what came since", PATIENCE, lambda: os.fstat(f.fileno()).st_size == 8)
            same("what came since", f.read(100), b"two\n")
            same("end", f.read(100), b"")


def npy(n, seed):
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({n},), }}"
    head = head.ljust(117) + "\n"
    data = (bytes([seed]) * 999 + b"\n") * (n // 1000)
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode(), data


def test_open_files_do_not_hold_the_cache(t):
    """Decoded copies stay for one read: more files can be open than the cache has room for."""
    want = {}
    os.makedirs(t + "/src")
    with zipfile.ZipFile(t + "/src/arrays.npz", "w", zipfile.ZIP_DEFLATED) as z:
        for i in range(6):
            head, want[f"a{i}"] = npy(40000, i)
            z.writestr(f"a{i}.npy", head + want[f"a{i}"])
    with Mount(t + "/src", t + "/mnt", "cache_size=100K") as m:
        opened = {key: open(m / f"raw/{key}", "rb", buffering=0) for key in want}
        for key, f in opened.items():
            same(key, f.read(50000), want[key])
        for f in opened.values():
            f.close()


def packed_source(t, count):
    """An .npz of deflated arrays: {key: bytes}."""
    want = {}
    os.makedirs(t + "/src")
    with zipfile.ZipFile(t + "/src/arrays.npz", "w", zipfile.ZIP_DEFLATED) as z:
        for i in range(count):
            head, want[f"a{i}"] = npy(500_000 + 1000 * i, i)
            z.writestr(f"a{i}.npy", head + want[f"a{i}"])
    return want


def test_packed_tensors_one_after_the_other(t):
    """Who reads a view in order has the next packed tensors decoded before he comes to them: the same bytes."""
    want = packed_source(t, 9)
    with Mount(t + "/src", t + "/mnt", "jobs=3") as m:
        with open(m / "model.safetensors", "rb", buffering=0) as f:
            got = b"".join(iter(lambda: f.read(50_000), b""))
        same("the view", got[-sum(map(len, want.values())):], b"".join(want.values()))


def test_a_damaged_packed_tensor_behind_whole_ones(t):
    """What fails ahead of its reader fails for who reads it, and for nobody else."""
    want = packed_source(t, 6)
    with open(t + "/src/arrays.npz", "r+b") as f:
        data = f.read()
        with zipfile.ZipFile(t + "/src/arrays.npz") as z:
            crc = z.getinfo("a3.npy").CRC.to_bytes(4, "little")
        assert data.count(crc) == 2
        f.seek(0)
        f.write(data.replace(crc, bytes([crc[0] ^ 1]) + crc[1:]))
    with Mount(t + "/src", t + "/mnt", "jobs=3") as m:
        size, whole = os.stat(m / "model.safetensors").st_size, b"".join(want.values())
        damaged = size - sum(len(want[f"a{i}"]) for i in (3, 4, 5))
        with open(m / "model.safetensors", "rb", buffering=0) as f:
            got = b"".join(f.read(min(50_000, damaged - at)) for at in range(0, damaged, 50_000))
            same("before it", got[-sum(len(want[f"a{i}"]) for i in (0, 1, 2)):], whole[:-(size - damaged)])
            for _ in range(2):
                fails("in it", errno.EIO, lambda: os.pread(f.fileno(), 1000, damaged))
            same("behind it", os.pread(f.fileno(), len(want["a4"]), damaged + len(want["a3"])), want["a4"])


def test_many_tiles(t):
    """Thousands of chunks, which stay packed in memory: whole, in pieces, and by columns."""
    width = 298
    want = tiles_source(t, 40, 60, (3, 5), (118, width), left_out=range(100, 2400, 171))
    rnd = random.Random(5)
    with Mount(t + "/src", t + "/mnt") as m:
        assert int(os.getxattr(m / "raw/w", "user.unshard.chunks")) >= 2000
        same("whole", read_all(m / "raw/w"), want)
        with open(m / "raw/w", "rb", buffering=0) as f:
            for _ in range(300):
                at, n = rnd.randrange(len(want)), rnd.randrange(1, 9000)
                same(f"{at}+{n}", os.pread(f.fileno(), n, at), want[at:at + n])
            for column in range(0, 4 * width, 64):
                for row in range(0, len(want), 4 * width * 7):
                    same(f"column {column}", os.pread(f.fileno(), 64, row + column), want[row + column:row + column + 64])


def bricks_source(path, rows, columns, files):
    """A DCP tensor of F32, each two of its rows cut at another column, the pieces in `files` files by turns. Its bytes."""
    os.makedirs(path)
    want, boxes, storage = bytearray(4 * rows * columns), [], {}
    out = [open(f"{path}/__{i}_0.distcp", "w+b") for i in range(files)]
    for n, (row, cut, right) in enumerate((2 * r, 1 + r % (columns - 1), right) for r in range(rows // 2) for right in (False, True)):
        f, start, size = out[n % files], torch_like.Size((row, cut if right else 0)), torch_like.Size((2, columns - cut if right else cut))
        at, length = made.write_blob(f, size, False, made.CHUNK)
        f.seek(at)
        image = f.read()
        data = image.index(b"archive/data/0") - 30
        data += 30 + 14 + int.from_bytes(image[data + 28:data + 30], "little")
        for k in range(2):
            to = 4 * ((row + k) * columns + start[1])
            want[to:to + 4 * size[1]] = image[data + k * 4 * size[1]:data + (k + 1) * 4 * size[1]]
        boxes.append(torch_like.make(torch_like.Chunk, offsets=start, sizes=size))
        index = torch_like.make(torch_like.Index, fqn="w", index=n, offset=start)
        storage[index] = torch_like.make(torch_like.StorageInfo, relative_path=f"__{n % files}_0.distcp", offset=at, length=length)
    for f in out:
        f.close()
    properties = torch_like.Properties()
    properties.state = (torch_like.float32, torch_like.layout(), False, torch_like.MemFormat(0), False)
    meta = {"w": torch_like.make(torch_like.TensorStorage, properties=properties, size=torch_like.Size((rows, columns)), chunks=boxes)}
    whole = torch_like.make(torch_like.Metadata, state_dict_metadata=meta, planner_data={"w": ("w",)}, storage_data=storage, version="1.0.0",
                            storage_meta=torch_like.make(torch_like.StorageMeta, checkpoint_id="/c", save_id="1", load_id=None, modules=[]))
    write_file(f"{path}/.metadata", pickle.dumps(whole, protocol=4))
    return bytes(want)


def test_many_bricks(t):
    """Thousands of chunks of a few files that are no grid."""
    want = bricks_source(t + "/src", 1200, 11, 3)
    with Mount(t + "/src", t + "/mnt") as m:
        same("chunks", int(os.getxattr(m / "raw/w", "user.unshard.chunks")), 1200)
        same("whole", read_all(m / "raw/w") == want, True)


def test_a_faulty_tensor_and_its_neighbours(t):
    tensors = make_tensors(9, count=4)
    write_checkpoint(t + "/src", tensors, shards=2)
    os.unlink(t + "/src/model-00002-of-00002.safetensors")
    keys = list(tensors)
    with Mount(t + "/src", t + "/mnt") as m:
        for i, key in enumerate(keys):
            path = m / ("raw/" + key)
            if not os.path.exists(path):
                # The reader may not know shape and dtype of what is missing; it must say so.
                assert "missing" in read_all(m / ".unshard/checkpoint.json").decode()
            elif i % 2 == 0:
                same(key, read_all(path), tensors[key][2])
            else:
                fails(key, 5, lambda: os.open(path, os.O_RDONLY))
                assert os.getxattr(path, "user.unshard.fault")


if __name__ == "__main__":
    main(globals())
