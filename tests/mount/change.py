# SPDX-License-Identifier: MIT
"""What changes in the source shows within a second; open handles keep their bytes or fail, and never give a mix."""
import contextlib
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time

from mountlib import PATIENCE, SANITIZED, Mount, fails, main, make_tensors, read_all, same, tensor_bytes, wait_for, write_checkpoint, write_file

def rewrite(path, seed, shards=2, **more):
    tensors = make_tensors(seed, **more)
    write_checkpoint(path, tensors, shards=shards)
    return tensors


def readable(path, want):
    try:
        return read_all(path) == want
    except OSError:
        return False


def tells(path, words):
    try:
        return words in read_all(path)
    except OSError as e:
        assert e.errno in (errno.ESTALE, errno.ENOENT), e
        return False


def names_in(path):
    """Sorted; None while the directory is being replaced under the listing (ESTALE)."""
    try:
        return sorted(os.listdir(path))
    except OSError as e:
        assert e.errno in (errno.ESTALE, errno.ENOENT), e
        return None


def size_of(path):
    """None while there is none: the checkpoint changes."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_size


def test_new_checkpoints_appear(t):
    rewrite(t + "/run/step1", 1)
    fastest = PATIENCE
    with Mount(t + "/run", t + "/mnt") as m:
        same("at first", os.listdir(m.path), ["step1"])
        for i in range(2, 40):
            if i > 5 and fastest < 1.5:  # a machine with much else to do is late now and then, not always
                break
            fails("not yet", errno.ENOENT, lambda: os.stat(m / f"step{i}"))
            tensors = rewrite(t + f"/run/.step{i}-tmp", i)
            os.rename(t + f"/run/.step{i}-tmp", t + f"/run/step{i}")
            key = next(iter(tensors))
            took = wait_for("the new step", PATIENCE, lambda: readable(m / f"step{i}/raw/{key}", tensors[key][2]))
            print(f"# step{i} after {took:.2f} s")
            fastest = min(fastest, took)
            assert f"step{i}" in os.listdir(m.path)
    assert SANITIZED or fastest < 1.5, f"{fastest:.2f} s, and the promise is a second"


def test_a_directory_becomes_a_checkpoint(t):
    os.makedirs(t + "/run/step1")
    write_file(t + "/run/step1/notes.txt", b"n")
    with Mount(t + "/run", t + "/mnt") as m:
        same("plain", os.listdir(m / "step1"), ["notes.txt"])
        fails("no tensors", errno.ENOENT, lambda: os.listdir(m / "step1/tensors"))
        tensors = rewrite(t + "/run/step1", 1)
        key = next(iter(tensors))
        wait_for("the checkpoint", PATIENCE, lambda: readable(m / f"step1/raw/{key}", tensors[key][2]))
        wait_for("storage is hidden", PATIENCE, lambda: names_in(m / "step1") ==
                 [".unshard", "config.json", "model.safetensors", "notes.txt", "raw", "tensors", "tree"])


def test_changed_checkpoint_shows_new_bytes(t):
    """New files renamed over the old ones; whoever had it open keeps the old bytes."""
    old = rewrite(t + "/run/step1", "v1")
    key = next(iter(old))
    with Mount(t + "/run", t + "/mnt") as m:
        for version in range(2, 6):
            path = m / f"step1/raw/{key}"
            fd = os.open(path, os.O_RDONLY)
            same("before", os.pread(fd, 1 << 20, 0), old[key][2])
            os.listdir(m / "step1/tensors")
            ino = os.stat(path).st_ino
            new = rewrite(t + "/run/step1", f"v{version}")
            took = wait_for("new bytes", PATIENCE, lambda: readable(path, new[key][2]))
            print(f"# version {version} after {took:.2f} s")
            assert os.stat(path).st_ino != ino, "another content, another inode number"
            try:
                same("old handle", os.pread(fd, 1 << 20, 0), old[key][2])
            except OSError as e:
                assert e.errno in (errno.ESTALE, errno.EIO), e
            os.close(fd)
            old = new


def test_a_side_file_that_is_replaced_is_opened_at_once(t):
    """While the kernel still has the name of the old one; so is one that was removed."""
    write_checkpoint(t + "/src", make_tensors(1))
    os.mkdir(t + "/src/logs")
    for where in "notes.txt", "logs/notes.txt":
        write_file(f"{t}/src/{where}", b"first")
    with Mount(t + "/src", t + "/mnt") as m:
        for where in "notes.txt", "logs/notes.txt":
            for i in range(50):
                os.stat(m / where)
                write_file(f"{t}/src/{where}", b"%d" % i)
                same(where, read_all(m / where), b"%d" % i)
            os.unlink(f"{t}/src/{where}")
            fails(f"{where} that was removed", errno.ENOENT, lambda p=m / where: open(p, "rb"))


def test_who_reads_goes_on_while_names_come_and_go(t):
    """Logs and steps that a trainer puts beside its model are no reason to end a loader, nor a mapping, which would be SIGBUS."""
    tensors = rewrite(t + "/src/run", 1)
    key = next(iter(tensors))
    with Mount(t + "/src", t + "/mnt") as m, open(m / "run/model.safetensors", "rb", 0) as model, open(m / f"run/raw/{key}", "rb", 0) as raw:
        want = model.read()
        with mmap.mmap(model.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for name in ("log.txt", "events", "trainer_state.json"):
                fails(name, errno.ENOENT, lambda name=name: os.stat(m / f"run/{name}"))
                write_file(t + "/src/run/" + name, b"1")
                wait_for("the new name", PATIENCE, lambda name=name: readable(m / f"run/{name}", b"1"))
                same("through a handle", os.pread(raw.fileno(), len(tensors[key][2]) + 1, 0), tensors[key][2])
                mapped.madvise(mmap.MADV_DONTNEED)
                same("through a mapping", mapped[:], want)
            os.unlink(t + "/src/run/log.txt")
            wait_for("the name to go", PATIENCE, lambda: not os.path.exists(m / "run/log.txt"))
            os.posix_fadvise(model.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            same("through a handle", os.pread(model.fileno(), len(want) + 1, 0), want)
            same("once more", mapped[:], want)


def test_other_tensors_and_sizes_after_a_change(t):
    rewrite(t + "/run/step1", "v1", count=4)
    with Mount(t + "/run", t + "/mnt") as m:
        before = sorted(os.listdir(m / "step1/raw"))
        sizes = os.stat(m / "step1/model.safetensors").st_size
        fails("not there yet", errno.ENOENT, lambda: os.stat(m / "step1/generation_config.json"))
        fails("nor this", errno.ENOENT, lambda: os.stat(m / "step1/raw/model.layers.7.mlp.weight"))
        write_file(t + "/run/step1/generation_config.json", b"{}")
        wait_for("a new side file", PATIENCE, lambda: readable(m / "step1/generation_config.json", b"{}"))
        new = rewrite(t + "/run/step1", "v2", shards=3, count=9, rows=16)
        wait_for("new names", PATIENCE, lambda: names_in(m / "step1/raw") == sorted(new) != before)
        wait_for("new size", PATIENCE, lambda: size_of(m / "step1/model.safetensors") not in (None, sizes))
        for key, (_, _, data) in new.items():
            same(key, read_all(m / f"step1/raw/{key}"), data)


def test_rewritten_in_place(t):
    """The same file, other bytes: the old handle fails, it never gives both."""
    size = 1 << 20
    old = {"w": ("U8", (size,), tensor_bytes("a", size))}
    write_checkpoint(t + "/src", old, shards=1)
    shard = t + "/src/model-00001-of-00001.safetensors"
    with Mount(t + "/src", t + "/mnt") as m:
        fd = os.open(m / "raw/w", os.O_RDONLY)
        same("before", os.pread(fd, 4096, 0), old["w"][2][:4096])
        new = tensor_bytes("b", size)
        at = os.stat(shard).st_size - size
        time.sleep(0.02)  # another tick of the file's clock
        with open(shard, "r+b") as f:
            f.seek(at)
            f.write(new)
        fails("old handle", errno.ESTALE, lambda: os.pread(fd, 4096, 8192))
        os.close(fd)
        wait_for("new bytes", PATIENCE, lambda: readable(m / "raw/w", new))


def test_a_handle_opened_at_once_after_a_change(t):
    """Opening looks at the shards themselves: no second during which old bytes come."""
    with_versions = [rewrite(t + "/src", "v0")]
    key = next(iter(with_versions[0]))
    with Mount(t + "/src", t + "/mnt") as m:
        for i in range(1, 12):
            new = rewrite(t + "/src", f"v{i}")
            same(f"version {i}", read_all(m / f"raw/{key}"), new[key][2])
            time.sleep(0.13 * (i % 3))


def test_removed_checkpoint_is_gone(t):
    tensors = rewrite(t + "/run/step1", 1)
    key = next(iter(tensors))
    with Mount(t + "/run", t + "/mnt") as m:
        fd = os.open(m / f"step1/raw/{key}", os.O_RDONLY)
        same("before", os.pread(fd, 100, 0), tensors[key][2][:100])
        shutil.rmtree(t + "/run/step1")
        wait_for("gone", PATIENCE, lambda: not os.path.exists(m / "step1") and os.listdir(m.path) == [])
        same("who has it open keeps it", os.pread(fd, 1 << 20, 0), tensors[key][2])
        os.close(fd)
        wait_for("also the name inside", PATIENCE, lambda: not os.path.exists(m / f"step1/raw/{key}"))


def test_a_removed_checkpoint_gives_its_room_back(t):
    """Trainers keep the last few checkpoints: what a mount has read of the others must not fill the disk."""
    tensors = make_tensors(1)
    write_checkpoint(t + "/run/step1", tensors)
    write_checkpoint(t + "/run/step2", tensors)

    def held(m):
        links = []
        for name in os.listdir(f"/proc/{m.process.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed since
                links.append(os.readlink(f"/proc/{m.process.pid}/fd/{name}"))
        with open(f"/proc/{m.process.pid}/maps") as f:
            mapped = [line.split(maxsplit=5)[-1].strip() for line in f if "(deleted)" in line]
        return [p for p in [*links, *mapped] if p.startswith(t + "/run/") and p.endswith("(deleted)")]

    with Mount(t + "/run", t + "/mnt") as m:
        for key, (_, _, data) in tensors.items():
            same(key, read_all(m / f"step1/raw/{key}"), data)
        key = next(iter(tensors))
        with open(m / f"step1/raw/{key}", "rb") as f:
            shutil.rmtree(t + "/run/step1")
            assert held(m), "nothing is open that could be given back"
            wait_for("all but the file in use closed", PATIENCE, lambda: len({p for p in held(m)}) == 1)
            same("the handle's bytes", f.read(), tensors[key][2])
        wait_for("all closed", PATIENCE, lambda: not held(m))


def test_exchanged_directories(t):
    one, two = rewrite(t + "/run/a", "one"), rewrite(t + "/run/b", "two")
    key = next(iter(one))
    with Mount(t + "/run", t + "/mnt") as m:
        same("a", read_all(m / f"a/raw/{key}"), one[key][2])
        same("b", read_all(m / f"b/raw/{key}"), two[key][2])
        os.rename(t + "/run/a", t + "/run/c")
        os.rename(t + "/run/b", t + "/run/a")
        os.rename(t + "/run/c", t + "/run/b")
        wait_for("a is b", PATIENCE, lambda: readable(m / f"a/raw/{key}", two[key][2]))
        wait_for("b is a", PATIENCE, lambda: readable(m / f"b/raw/{key}", one[key][2]))


def test_what_the_mount_says_is_there_throughout(t):
    """counters.json and last-error are the mount's: a checkpoint that changes at each look takes none of it away."""
    write_checkpoint(t + "/src", make_tensors(0))
    stop = threading.Event()

    def changer(shard):
        """Another shard at each look, and readers that find it out."""
        while not stop.is_set():
            write_file(shard, read_all(shard))
            try:
                read_all(m / "model.safetensors")
            except OSError as e:
                assert e.errno in (errno.ESTALE, errno.EIO), e

    with Mount(t + "/src", t + "/mnt") as m:
        json.loads(read_all(m / ".unshard/counters.json"))
        before, begun = json.loads(read_all(m / ".unshard/counters.json"))["generations"], time.monotonic()
        threads = [threading.Thread(target=changer, args=(f"{t}/src/model-0000{n}-of-00002.safetensors",)) for n in (1, 2)]
        for thread in threads:
            thread.start()
        try:
            looks, made = 0, 0
            while looks < 1000 or made <= 5:  # less than that proves nothing
                assert looks < 1000 or time.monotonic() - begun < 4 * PATIENCE, f"{looks} looks, {made} generations"
                made = json.loads(read_all(m / ".unshard/counters.json"))["generations"] - before
                read_all(m / ".unshard/last-error")
                looks += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_truncated_shard(t):
    """Cut while it is open, mapped and read: EIO, and the server lives."""
    size = 3 << 20
    tensors = {"w": ("U8", (size,), tensor_bytes("a", size)), "v": ("U8", (size,), tensor_bytes("v", size))}
    write_checkpoint(t + "/src", tensors, shards=2)
    shard = t + "/src/model-00001-of-00002.safetensors"
    with Mount(t + "/src", t + "/mnt") as m:
        fd = os.open(m / "raw/w", os.O_RDONLY)
        mapped = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        same("before", mapped[:4096], tensors["w"][2][:4096])
        os.truncate(shard, 1 << 20)
        for off in (0, 1 << 20, 2 << 20, size - 10):
            try:
                got = os.pread(fd, 1 << 20, off)
            except OSError as e:
                assert e.errno in (errno.EIO, errno.ESTALE), e
            else:
                raise AssertionError(f"read {len(got)} bytes of a file that was cut")
        # Touching the lost part of the mapping kills the process that does it, not the server.
        child = subprocess.run([sys.executable, "-c", f"""
import mmap, os
fd = os.open({m / 'raw/w'!r}, os.O_RDONLY)
""" + "os.close(fd)"], capture_output=True)
        assert child.returncode != 0, "opening a tensor in a cut shard must fail"
        assert m.alive()
        same("the other shard", read_all(m / "raw/v"), tensors["v"][2])
        mapped.close()
        os.close(fd)
        assert m.alive()


def test_a_mapping_of_a_cut_shard_does_not_stop_the_server(t):
    size = 8 << 20
    tensors = {"w": ("U8", (size,), tensor_bytes("a", size))}
    write_checkpoint(t + "/src", tensors, shards=1)
    with Mount(t + "/src", t + "/mnt") as m:
        reader = subprocess.Popen([sys.executable, "-c", f"""
import mmap, os, sys
fd = os.open({m / 'raw/w'!r}, os.O_RDONLY)
mapped = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
mapped[0]
print("ready", flush=True)
sys.stdin.read(1)
mapped[:]
"""], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        reader.stdout.readline()
        os.truncate(t + "/src/model-00001-of-00001.safetensors", 1 << 20)
        reader.stdin.write(b"x")
        reader.stdin.close()
        assert reader.wait(PATIENCE) < 0, "the reader of a lost page gets SIGBUS"
        assert m.alive()
        os.listdir(m.path)


def test_deleted_shard(t):
    tensors = make_tensors("d", count=4)
    write_checkpoint(t + "/src", tensors, shards=2)
    keys = list(tensors)
    with Mount(t + "/src", t + "/mnt") as m:
        for key in keys:
            same(key, read_all(m / f"raw/{key}"), tensors[key][2])
        fd = os.open(m / f"raw/{keys[1]}", os.O_RDONLY)
        os.unlink(t + "/src/model-00002-of-00002.safetensors")
        same("an open handle", os.pread(fd, 1 << 20, 0), tensors[keys[1]][2])
        os.close(fd)
        try:
            read_all(m / f"raw/{keys[1]}")
        except OSError as e:
            assert e.errno in (errno.EIO, errno.ENOENT, errno.ESTALE), e
        else:
            raise AssertionError("a tensor whose shard is gone was read")
        wait_for("the others", PATIENCE, lambda: readable(m / f"raw/{keys[0]}", tensors[keys[0]][2]))
        wait_for("the fault is told", PATIENCE, lambda: tells(m / ".unshard/checkpoint.json", b"model-00002-of-00002"))


def test_never_a_mix_while_it_is_rewritten(t):
    """Readers beside a writer: what is read as a whole is of one version, or an error."""
    versions = [make_tensors(("mix", i), count=2, rows=2048) for i in range(2)]
    write_checkpoint(t + "/src", versions[0], shards=1)
    keys, stop, rewrites, seen = list(versions[0]), threading.Event(), [], [0, 0]

    def writer():
        # More and more slowly until each version was read as a whole: readers may be slower than this.
        while not stop.wait(0.01 if min(seen) else min(0.01 + len(rewrites) / 1000, 2)):
            rewrites.append(0)
            write_checkpoint(t + "/src", versions[len(rewrites) % 2], shards=1)

    with Mount(t + "/src", t + "/mnt") as m:
        thread = threading.Thread(target=writer)
        thread.start()
        wrong, failed, turn = [], 0, 0
        try:
            begin = time.monotonic()
            while turn < 200 or min(seen) == 0 or len(rewrites) < 50:
                assert time.monotonic() - begin < 4 * PATIENCE, (seen, len(rewrites))
                turn += 1
                key = keys[turn % 2]
                try:
                    data = read_all(m / f"raw/{key}")
                except OSError as e:
                    assert e.errno in (errno.ESTALE, errno.EIO, errno.ENOENT), e
                    failed += 1
                    continue
                which = [v[key][2] for v in versions]
                if data in which:
                    seen[which.index(data)] += 1
                else:
                    wrong.append((turn, key))
        finally:
            stop.set()
            thread.join()
        same("mixed reads", wrong, [])
        print(f"# whole reads of each version: {seen}, {failed} refused, {len(rewrites)} rewrites")


def bytes_or_error(path):
    try:
        return read_all(path)
    except OSError as e:
        return e.errno


def test_with_the_working_directory_inside(t):
    old = rewrite(t + "/src", "v1")
    key = next(iter(old))
    with Mount(t + "/src", t + "/mnt") as m:
        here = os.getcwd()
        os.chdir(m / "raw")
        try:
            same("before", read_all(key), old[key][2])
            new = rewrite(t + "/src", "v2")
            wait_for("the old bytes are gone", PATIENCE, lambda: bytes_or_error(key) != old[key][2])
            for _ in range(20):
                assert bytes_or_error(key) in (new[key][2], errno.ESTALE, errno.ENOENT), "bytes of neither, or the old ones again"
        finally:
            os.chdir(here)
        same("by its path", read_all(m / f"raw/{key}"), new[key][2])


def test_idle_and_back(t):
    """A checkpoint that nobody used for long is not watched: its next use looks by itself."""
    old = rewrite(t + "/src", "v1")
    key = next(iter(old))
    with Mount(t + "/src", t + "/mnt") as m:
        same("before", read_all(m / f"raw/{key}"), old[key][2])
        fails("absent", errno.ENOENT, lambda: os.stat(m / "tokenizer.json"))
        time.sleep(23)
        new = rewrite(t + "/src", "v2")
        write_file(t + "/src/tokenizer.json", b"{}")
        wait_for("new bytes", PATIENCE, lambda: readable(m / f"raw/{key}", new[key][2]))
        wait_for("the name", PATIENCE, lambda: readable(m / "tokenizer.json", b"{}"))


def test_many_idle_and_back(t):
    """Of many checkpoints each is watched for a shorter time; what is cached of it is not believed after."""
    old = [rewrite(t + f"/src/step{i:03}", i, shards=1, count=1) for i in range(300)]
    key = next(iter(old[0]))
    with Mount(t + "/src", t + "/mnt") as m:
        for i, tensors in enumerate(old):
            same(f"step {i}", read_all(m / f"step{i:03}/raw/{key}"), tensors[key][2])
        time.sleep(6)
        for i in range(0, 300, 50):
            new = rewrite(t + f"/src/step{i:03}", f"v2 {i}", shards=1, count=1)
            wait_for(f"new bytes of step {i}", PATIENCE, lambda: readable(m / f"step{i:03}/raw/{key}", new[key][2]))
        same("another", read_all(m / f"step001/raw/{key}"), old[1][key][2])


if __name__ == "__main__":
    main(globals())
