# SPDX-License-Identifier: MIT
"""Requests by io_uring (-o io_uring): the same bytes and the same errors as by /dev/fuse. Root's: only root can tell the kernel to offer it."""
import atexit
import concurrent.futures
import errno
import fcntl
import glob
import json
import mmap
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

from mountlib import (PATIENCE, UNSHARD, Mount, Skip, fails, is_mounted, main, make_tensors, read_all, same, tensor_bytes,
                      wait_for, write_checkpoint)

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
MIB = 1 << 20
PARAMETER = "/sys/module/fuse/parameters/enable_uring"
FIXTURES = ("torch_dcp/dcp_async_2r", "torch_dcp/dcp_mesh_2x2", "torch_dcp/dcp_zstd_2r", "safetensors/hf_peft_lora", "deepspeed/z3_fp16_w2",
            "megatron", "zarr", "torch_file", "safetensors/hf_single_bf16")


def parameter():
    try:
        return read_all(PARAMETER).decode().strip()
    except OSError:
        return None


def set_parameter(value):
    with open(PARAMETER, "w") as f:
        f.write(value)


def counters(m):
    (path, *_) = [*glob.glob(m.path + "/.unshard/counters.json"), *glob.glob(m.path + "/*/.unshard/counters.json")]
    return json.loads(read_all(path))


def needs(m):
    state = counters(m)["io_uring"]
    if state != "on":
        raise Skip(f"io_uring is {state}")


def prepare():
    """Has the kernel offer it while this runs, one of us at a time; where that cannot be, each mount says why."""
    if os.path.exists(PARAMETER):
        held = os.open(PARAMETER, os.O_RDONLY)  # until this ends
        fcntl.flock(held, fcntl.LOCK_EX)
    before = parameter()
    if before == "N" and os.access(PARAMETER, os.W_OK) and os.geteuid() == 0:
        atexit.register(set_parameter, before)
        set_parameter("Y")


def shards(t, size, count=1):
    """A checkpoint of `count` tensors of `size` bytes, each in a shard of its own: {name: bytes}."""
    tensors = {f"model.t{i}": ("U8", (size,), tensor_bytes(f"uring{i}", size)) for i in range(count)}
    write_checkpoint(t + "/src", tensors, shards=count)
    return {name: data for name, (_, _, data) in tensors.items()}


def files_below(path):
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            if not os.path.islink(full) and "/.unshard" not in full:
                yield os.path.relpath(full, path)


# ---- bytes ----

def test_every_byte_of_fixtures(t):
    for name in FIXTURES:
        if not (DATA / name).exists():
            continue
        with Mount(str(DATA / name), t + "/ring", "io_uring") as ring, Mount(str(DATA / name), t + "/dev") as dev:
            needs(ring)
            same("by /dev/fuse", counters(dev)["io_uring"], "off")
            names = sorted(files_below(ring.path))
            same(f"{name}: files", names, sorted(files_below(dev.path)))
            assert names
            for file in names:
                try:
                    want = read_all(dev / file)
                except OSError as e:
                    fails(f"{name}: {file}", e.errno, lambda path=ring / file: read_all(path))
                    continue
                same(f"{name}: {file}", read_all(ring / file), want)
                same(f"{name}: {file}: size", os.stat(ring / file).st_size, len(want))


def test_reads_of_all_lengths_and_places(t):
    """One large tensor in long runs, one in short rows, and a header in front: at the edges, across them, and behind the end."""
    (data,) = shards(t, 5 * MIB + 77).values()
    rnd = random.Random(1)
    with Mount(t + "/src", t + "/mnt", "io_uring") as m:
        needs(m)
        with open(m / "raw/model.t0", "rb", buffering=0) as f:
            places = [(0, 1), (0, 4096), (1, MIB), (4095, 2), (0, 2 * MIB), (len(data) - 1, 1), (len(data) - 5, 4096), (len(data), 10), (MIB - 1, MIB + 2)]
            places += [(rnd.randrange(len(data)), rnd.randrange(1, 3 * MIB)) for _ in range(60)]
            for at, n in places:
                same(f"{at}+{n}", os.pread(f.fileno(), n, at), data[at:at + n])
        same("mapped by the server's counters", counters(m)["replies_mapped"] > 0, True)


def test_64_readers(t):
    data = shards(t, 8 * MIB, 4)
    with Mount(t + "/src", t + "/mnt", "io_uring") as m:
        needs(m)

        def reader(n):
            rnd, name = random.Random(n), f"model.t{n % 4}"
            with open(m / f"raw/{name}", "rb", buffering=0) as f:
                for _ in range(400):
                    size = rnd.choice((1, 4096, 4096, 4096, 65536, MIB))
                    at = rnd.randrange(len(data[name]) - size)
                    if os.pread(f.fileno(), size, at) != data[name][at:at + size]:
                        return f"{name}: {at}+{size}"
            return None

        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            same("wrong", [w for w in pool.map(reader, range(64)) if w], [])


def test_mapped(t):
    (data,) = shards(t, 3 * MIB + 5).values()
    with Mount(t + "/src", t + "/mnt", "io_uring") as m:
        needs(m)
        for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
            with open(m / "raw/model.t0", "rb") as f, mmap.mmap(f.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped:
                same("mapped", mapped[:], data)


def test_cold_shards(t):
    """What is not in memory is read by threads that may wait."""
    (data,) = shards(t, 16 * MIB).values()
    with Mount(t + "/src", t + "/mnt", "io_uring") as m:
        needs(m)
        for round_ in range(3):
            for path in glob.glob(t + "/src/*.safetensors"):
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
            same(f"round {round_}", read_all(m / "raw/model.t0"), data)


def test_saves_are_seen(t):
    """A checkpoint that is replaced under the mount: notifications still reach the kernel."""
    os.makedirs(t + "/src")
    for seed in range(3):
        tensors = make_tensors(seed)
        write_checkpoint(t + "/src/new", tensors)
        if seed:
            os.rename(t + "/src/run", t + f"/src/old{seed}")
            shutil.rmtree(t + f"/src/old{seed}")
        os.rename(t + "/src/new", t + "/src/run")
        if seed == 0:
            m = Mount(t + "/src", t + "/mnt", "io_uring").__enter__()
            try:
                needs(m)
            except Skip:
                m.__exit__(None, None, None)
                raise
        want = tensors["model.layers.0.mlp.weight"][2]

        def seen(path=m / "run/raw/model.layers.0.mlp.weight", want=want):
            try:
                return read_all(path) == want
            except OSError:
                return False

        wait_for("the new bytes", PATIENCE, seen)
    m.__exit__(None, None, None)


# ---- errors ----

def test_a_broken_tensor(t):
    shards(t, MIB)
    path = t + "/src/model-00001-of-00001.safetensors"
    image = read_all(path)
    with open(path, "wb") as f:
        f.write(image[:-10])
    with Mount(t + "/src", t + "/mnt", "io_uring") as m:
        needs(m)
        for _ in range(3):
            fails("read", errno.EIO, lambda: read_all(m / "raw/model.t0"))
        fails("a name", errno.ENOENT, lambda: os.stat(m / "raw/model.t9"))
        fails("written", errno.EROFS, lambda: open(m / "raw/new", "w"))


def test_a_shard_that_is_cut_while_it_is_read(t):
    """EIO (or ESTALE), or the bytes as they were: never others, never a part."""
    for round_ in range(4):
        os.makedirs(t + f"/{round_}")
        (data,) = shards(t + f"/{round_}", 8 * MIB).values()
        path = glob.glob(t + f"/{round_}/src/*.safetensors")[0]
        with Mount(t + f"/{round_}/src", t + "/mnt", "io_uring") as m:
            needs(m)
            wrong, errors, go_on = [], [], [True]

            def reader(n, m=m, data=data, wrong=wrong, errors=errors, go_on=go_on):
                rnd = random.Random(n)
                with open(m / "raw/model.t0", "rb", buffering=0) as f:
                    while go_on[0]:
                        size = rnd.choice((4096, 65536, MIB))
                        at = rnd.randrange(len(data) - size)
                        try:
                            got = os.pread(f.fileno(), size, at)
                            if got != data[at:at + len(got)]:
                                wrong.append((at, size))
                            if len(got) < size:  # the kernel cut it in two, of which the second failed
                                errors.append(errno.EIO)
                        except OSError as e:
                            errors.append(e.errno)

            threads = [threading.Thread(target=reader, args=(n,)) for n in range(6)]
            for x in threads:
                x.start()
            time.sleep(0.2)
            os.truncate(path, os.path.getsize(path) // 2 - 100)
            try:
                wait_for("errors", PATIENCE, lambda: len(errors) > 20)
            finally:
                go_on[0] = False
                for x in threads:
                    x.join()
            same("wrong bytes", wrong, [])
            same("errors", set(errors) <= {errno.EIO, errno.ESTALE}, True)
            same("alive", m.alive(), True)


# ---- what ends ----

def busy_readers(m, name, count=8):
    """Programs that read for ever, and ask the server each time: O_DIRECT is never served from the kernel's pages."""
    text = "import os, sys, random\nfd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)\nn = os.fstat(fd).st_size\nwhile True: os.pread(fd, 4096, random.randrange(n - 4096))"
    return [subprocess.Popen([sys.executable, "-c", text, m / name], stderr=subprocess.DEVNULL) for _ in range(count)]


def end_all(processes):
    for p in processes:
        p.kill()
    for p in processes:
        p.wait()


def test_sigterm_while_busy(t):
    shards(t, 4 * MIB)
    for _ in range(5):
        with Mount(t + "/src", t + "/mnt", "io_uring") as m:
            needs(m)
            readers = busy_readers(m, "raw/model.t0")
            time.sleep(0.3)
            m.process.send_signal(signal.SIGTERM)
            same("status", m.process.wait(PATIENCE), 0)
            end_all(readers)
            same("mounted", is_mounted(m.path), False)


def test_unmount_while_busy(t):
    shards(t, 4 * MIB)
    for _ in range(5):
        with Mount(t + "/src", t + "/mnt", "io_uring") as m:
            needs(m)
            readers = busy_readers(m, "raw/model.t0")
            time.sleep(0.3)
            subprocess.run(["umount", "-f", "-l", m.path], check=True)
            end_all(readers)
            same("status", m.process.wait(PATIENCE), 0)


def test_the_server_is_killed(t):
    shards(t, 4 * MIB)
    for _ in range(5):
        m, readers = Mount(t + "/src", t + "/mnt", "io_uring").__enter__(), []
        try:
            needs(m)
            readers = busy_readers(m, "raw/model.t0")
            time.sleep(0.3)
            m.process.kill()
            m.process.wait(PATIENCE)
            wait_for("the readers' end", PATIENCE, lambda: all(p.poll() is not None for p in readers))
        finally:
            end_all(readers)
            m.process.kill()
            m.process.wait()
            subprocess.run(["fusermount3", "-uz", m.path], check=False)
        same("mounted", is_mounted(m.path), False)


def test_readers_are_killed(t):
    (data,) = shards(t, 4 * MIB).values()
    with Mount(t + "/src", t + "/mnt", "io_uring") as m:
        needs(m)
        for _ in range(5):
            readers = busy_readers(m, "raw/model.t0", 12)
            time.sleep(0.2)
            end_all(readers)
        same("bytes", read_all(m / "raw/model.t0"), data)


def test_in_the_background(t):
    (data,) = shards(t, MIB).values()
    where = t + "/mnt"
    os.makedirs(where)
    subprocess.run([UNSHARD, "mount", t + "/src", where, "-o", f"cache_dir={t}/cache,io_uring"], check=True, timeout=PATIENCE)
    try:
        state = json.loads(read_all(where + "/.unshard/counters.json"))["io_uring"]
        same("bytes", read_all(where + "/raw/model.t0"), data)
    finally:
        subprocess.run([UNSHARD, "umount", where], check=True, timeout=PATIENCE)
    same("mounted", is_mounted(where), False)
    if state != "on":
        raise Skip(f"io_uring is {state}")


# ---- where it cannot be had ----

def test_the_mount_goes_on_without(t):
    (data,) = shards(t, MIB).values()
    before = parameter()
    if before != "Y" or os.geteuid() != 0:
        raise Skip("the kernel does not offer it")
    set_parameter("N")
    try:
        with Mount(t + "/src", t + "/mnt", "io_uring") as m:
            state = counters(m)["io_uring"]
            same("why", "echo Y > /sys/module/fuse/parameters/enable_uring" in state and state.startswith("off: "), True)
            same("said once", m.messages().count("echo Y >"), 1)
            same("bytes", read_all(m / "raw/model.t0"), data)
        doctor = subprocess.run([UNSHARD, "doctor"], capture_output=True, text=True, check=False).stdout
        same("doctor", "enable_uring" in doctor, True)
    finally:
        set_parameter(before)


def test_the_parameter_goes_while_it_is_mounted(t):
    """The kernel keeps to what it said; a mount after it has none."""
    (data,) = shards(t, MIB).values()
    with Mount(t + "/src", t + "/mnt", "io_uring") as m:
        needs(m)
        before = parameter()
        try:
            set_parameter("N")
        except OSError as e:
            raise Skip(f"{PARAMETER}: {e}") from e
        try:
            same("bytes", read_all(m / "raw/model.t0"), data)
        finally:
            set_parameter(before)


def test_not_with_rw(t):
    shards(t, 4096)
    os.makedirs(t + "/mnt")
    p = subprocess.run([UNSHARD, "mount", t + "/src", t + "/mnt", "-o", "rw,io_uring"], capture_output=True, text=True, check=False)
    same("status", p.returncode != 0, True)
    same("words", "-o io_uring: not with rw" in p.stderr, True)


if __name__ == "__main__":
    prepare()
    main(globals())
