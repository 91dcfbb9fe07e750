# SPDX-License-Identifier: MIT
"""Files that the kernel reads by itself: side files, and copies of tensors (materialize=). The same bytes as by the server."""
import errno
import glob
import hashlib
import itertools
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

from mountlib import (PATIENCE, UNSHARD, Mount, Skip, fails, main, read_all, safetensors_image, same, tensor_bytes, wait_for,
                      write_checkpoint, write_file)

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
sys.path.insert(0, str(ROOT / "remote"))

from fault_server import Server  # noqa: E402

MIB = 1 << 20
FIXTURES = ("torch_dcp/dcp_async_2r", "torch_dcp/dcp_mesh_2x2", "torch_dcp/dcp_zstd_2r", "hf_dcp/hfdcp_grid_4", "safetensors/hf_peft_lora",
            "hf_trainer/trainer_llama_adamw", "deepspeed/z3_fp16_w2", "lightning", "megatron", "zarr", "torch_file", "olmo_core",
            "safetensors/hf_single_bf16", "hf_trainer/trainer_gpt2_ddp2_bf16", "torchtune", "verl", "orbax")


def counters(m):
    (path, *_) = [*glob.glob(m.path + "/.unshard/counters.json"), *glob.glob(m.path + "/*/.unshard/counters.json")]
    return json.loads(read_all(path))


def needs(m, what="passthrough"):
    """Skips where the machine cannot do it: the mount says why."""
    state = counters(m)[what]
    if state != "on":
        raise Skip(f"{what} is {state}")


def not_stacked(m):
    """Skips where the source lies on a stacked file system (a container's): the kernel refuses its files, and the server reads them."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
        rows = [line.split() for line in f]
    real = os.path.realpath(m.source) + "/"
    above = [r for r in rows if real.startswith(r[4].rstrip("/") + "/")]
    kind = max(above, key=lambda r: len(r[4]))
    if kind[kind.index("-") + 1] == "overlay":
        raise Skip("the source lies on an overlay")


def mapped(path, flags=mmap.MAP_SHARED):
    with open(path, "rb") as f:
        with mmap.mmap(f.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as m:
            return m[:]


def copies_of(m):
    """Bytes of the disk that the server's unnamed files of at least 1 MiB take, seen from outside."""
    total = 0
    for fd in glob.glob(f"/proc/{m.process.pid}/fd/*"):
        try:
            if os.readlink(fd).startswith(m.dir + "/cache/#") and os.stat(fd).st_size >= MIB:
                total += os.stat(fd).st_blocks * 512
        except OSError:
            continue  # closed since
    return total


def large(t, count=3, size=4 * MIB):
    """A checkpoint of `count` tensors of `size` bytes, each in its own shard."""
    tensors = {f"model.t{i}": ("U8", (size,), tensor_bytes(f"{t}{i}", size)) for i in range(count)}
    write_checkpoint(t + "/src", tensors, shards=count)
    return tensors


# ---- side files ----

def test_side_files_are_read_by_the_kernel(t):
    large(t, 1)
    log = b"".join(b"line %d\n" % i for i in range(50000))
    with open(t + "/src/train.log", "wb") as f:
        f.write(log)
    with Mount(t + "/src", t + "/mnt") as m:
        needs(m)
        not_stacked(m)
        for path, want in (m / "train.log", log), (m / "config.json", read_all(t + "/src/config.json")):
            same("read", read_all(path), want)
            same("mapped", mapped(path), want)
            same("mapped for itself", mapped(path, mmap.MAP_PRIVATE), want)
        c = counters(m)
        same("bytes by the server", c["bytes_read"], 0)
        same("opens", c["opens_passthrough"], 6)


def whole(path):
    """None while what has that name changes."""
    try:
        return read_all(path)
    except OSError as e:
        assert e.errno in (errno.ESTALE, errno.ENOENT), e
        return None


def test_a_side_file_is_followed(t):
    large(t, 1)
    path = t + "/src/train.log"
    with open(path, "wb") as log, Mount(t + "/src", t + "/mnt") as m:
        needs(m)
        not_stacked(m)
        log.write(b"one\n")
        log.flush()
        wait_for("its first line", PATIENCE, lambda: os.stat(m / "train.log").st_size == 4)
        with open(m / "train.log", "rb", buffering=0) as f:
            same("first", f.read(100), b"one\n")
            log.write(b"two\n")
            log.flush()
            same("what came since", f.read(100), b"two\n")
            log.truncate(4)
            same("cut", os.pread(f.fileno(), 100, 0), b"one\n")
            write_file(path, b"another\n")
            same("its own bytes stay", os.pread(f.fileno(), 100, 0), b"one\n")
            wait_for("another file has the name", PATIENCE, lambda: whole(m / "train.log") == b"another\n")
            same("beside it", os.pread(f.fileno(), 100, 0), b"one\n")


def moved_by(pid):
    """How many bytes a process has read and written by system calls."""
    with open(f"/proc/{pid}/io") as f:
        return sum(int(line.split()[1]) for line in f if line.startswith(("rchar", "wchar")))


def test_a_mount_for_writing(t):
    """The kernel reads and writes storage files by itself: also while the server stands still. Views are the server's.

    Before write(2) it asks whether the file has capabilities, which go then; so the server may only be seen to write nothing.
    """
    large(t, 1)
    data = os.urandom(8 << 20)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        same("state", counters(m)["passthrough"], "on")
        fd = os.open(m / "config.json", os.O_RDWR)
        new = os.open(m / "new.bin", os.O_RDWR | os.O_CREAT)
        before = moved_by(m.process.pid)
        os.pwrite(new, data, 0)
        same("what the server moves", moved_by(m.process.pid) - before < 1 << 20, True)
        with mmap.mmap(fd, 20) as shared:
            m.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, m.process.pid, os.WSTOPPED)
            try:
                same("read", os.pread(fd, 100, 0), b'{"model_type": "llama"}\n')
                same("read back", os.pread(new, len(data), 0) == data, True)
                shared[:2] = b"{}"
                same("written", (read_all(t + "/src/config.json")[:2], read_all(t + "/src/new.bin") == data), (b"{}", True))
            finally:
                m.process.send_signal(signal.SIGCONT)
        os.close(fd)
        os.close(new)
        same("by the mount", read_all(m / "new.bin") == data, True)


# ---- copies ----

def by_all_ways(path):
    """What each way of reading gives; a file of no bytes cannot be mapped."""
    data = read_all(path)
    ways = [data]
    if data:
        ways += [mapped(path), mapped(path, mmap.MAP_PRIVATE)]
    with open(path, "rb") as f:
        rnd = random.Random(len(data))
        for _ in range(20):
            off, n = rnd.randrange(len(data) + 10), rnd.randrange(1, 70000)
            same(f"{path} {off}+{n}", os.pread(f.fileno(), n, off), data[off:off + n])
    return ways


def files_of(top):
    """Every tensor and view below a mount, by path."""
    out = []
    for folder, _, names in os.walk(top):
        if "/.unshard" not in folder and "/tree" not in folder:
            out += [os.path.relpath(f"{folder}/{n}", top) for n in names if n.endswith((".npy", ".safetensors")) or folder.endswith("/raw")]
    return sorted(out)


def some_fixtures():
    for name in FIXTURES:
        path = DATA / name
        if path.with_name(path.name + ".expected.json").exists():
            yield path
        else:
            yield next(p for p in sorted(path.iterdir()) if (path / (p.name + ".expected.json")).exists())


def compare_mounts(t, source, options=""):
    """How many files of the mount were materialised; all are what the server gives."""
    want = {}
    with Mount(str(source), t + "/plain", options) as m:
        for name in files_of(m.path):
            try:
                want[name] = read_all(m / name)
            except OSError as e:
                want[name] = e.errno
    with Mount(str(source), t + "/mnt", options + ",materialize=1G:settled=0" if options else "materialize=1G:settled=0") as m:
        needs(m, "materialize")
        same("names", files_of(m.path), sorted(want))
        for name, data in want.items():
            if isinstance(data, int):
                fails(name, data, lambda: read_all(m / name))
                continue
            for got in by_all_ways(m / name):
                same(f"{source}: {name}", got, data)
        return counters(m)["materialized"]


def test_fixtures(t):
    made = {source.name: compare_mounts(t, source) for source in some_fixtures()}
    assert sum(n > 0 for n in made.values()) >= 12, f"files of less than a page only: {made}"


def test_views_of_other_types_and_from_servers(t):
    source = DATA / "safetensors/hf_sharded_f32"
    assert compare_mounts(t, source, "dtype=bf16") > 0
    with Server(DATA) as server:
        assert compare_mounts(t, f"{server.url}/safetensors/hf_sharded_f32/") > 0


def test_attributes_stay(t):
    large(t, 2)
    want = {}
    for options in "", "materialize=1G:settled=0":
        with Mount(t + "/src", t + "/mnt", options) as m:
            for name in files_of(m.path):
                read_all(m / name)
                st = os.stat(m / name)
                want.setdefault(name, []).append((st.st_ino, st.st_size, st.st_mode, st.st_mtime_ns, st.st_blocks))
    for name, (plain, copied) in want.items():
        same(name, copied, plain)


def test_many_openers_of_one_file(t):
    tensors = large(t, 1, 16 * MIB)
    want, faults = tensors["model.t0"][2], []

    def opener():
        try:
            if mapped(m / "raw/model.t0") != want:
                faults.append("other bytes")
        except OSError as e:
            faults.append(e)

    with Mount(t + "/src", t + "/mnt", "materialize=1G:settled=0") as m:
        needs(m, "materialize")
        threads = [threading.Thread(target=opener) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        same("faults", faults, [])
        c = counters(m)
        same("made", (c["materialized"], c["bytes_materialized"], c["bytes_read"]), (1, 16 * MIB, 0))


def test_the_disk_is_bounded(t):
    """Also by files that are closed and still mapped: their blocks are not free."""
    tensors = large(t, 6, 4 * MIB)
    limit, highest = 9 * MIB, 0
    with Mount(t + "/src", t + "/mnt", f"materialize={limit}:settled=0") as m:
        needs(m, "materialize")
        with open(m / "raw/model.t0", "rb") as f:
            kept = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
        for key in list(tensors)[1:] * 2:
            same(key, mapped(m / f"raw/{key}"), tensors[key][2])
            highest = max(highest, copies_of(m))
            time.sleep(0.02)
        assert 4 * MIB <= highest <= limit, highest
        same("mapped all the while", kept[:], tensors["model.t0"][2])
        others = itertools.cycle(list(tensors)[1:])
        # They are given back for each other; the release of one may come after the next is opened.
        wait_for("copies", PATIENCE, lambda: mapped(m / f"raw/{next(others)}") and counters(m)["materialized"] > 6)
        made = counters(m)["materialized"]
        same("not made again", mapped(m / "raw/model.t0"), tensors["model.t0"][2])
        same("not made again", counters(m)["materialized"], made)
        kept.close()
        same("too large for it", read_all(m / "model.safetensors")[-100:], tensors["model.t5"][2][-100:])


def test_one_way_for_each_open_file(t):
    """Where there is no room the server reads; who opens the file beside that does not fail, and it can be mapped."""
    tensors = large(t, 2, 4 * MIB)
    a, b = (tensors[f"model.t{i}"][2] for i in (0, 1))
    with Mount(t + "/src", t + "/mnt", f"materialize={5 * MIB}:settled=0") as m:
        needs(m, "materialize")
        with open(m / "raw/model.t0", "rb") as held:
            with open(m / "raw/model.t1", "rb") as f, open(m / "raw/model.t1", "rb") as g:
                same("by the server", counters(m)["materialized"], 1)
                held.close()
                same("a second and third", (f.read(), mapped(m / "raw/model.t1"), g.read()), (b, b, b))
                with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as first:
                    same("mapped", (first[:], read_all(m / "raw/model.t1")), (b, b))
                same("still", counters(m)["materialized"], 1)
        def by_the_kernel():
            same("read again", mapped(m / "raw/model.t1"), b)
            return counters(m)["materialized"] > 1
        wait_for("by the kernel at last", PATIENCE, by_the_kernel, 0.1)
        same("made", counters(m)["materialized"], 2)
        same("the other again", read_all(m / "raw/model.t0"), a)


def test_a_shard_that_is_replaced(t):
    size = 2 * MIB
    with_byte = lambda n: {"model.a": ("U8", (size,), bytes([n]) * size)}  # noqa: E731
    write_checkpoint(t + "/src", with_byte(1), shards=1)
    with Mount(t + "/src", t + "/mnt", "materialize=1G:settled=0") as m:
        needs(m, "materialize")
        with open(m / "raw/model.a", "rb", buffering=0) as old:
            old.read(10)
            time.sleep(0.05)
            write_checkpoint(t + "/src", with_byte(2), shards=1)
            wait_for("the new one", PATIENCE, lambda: whole(m / "raw/model.a") == b"\2" * size, 0.1)
            same("the old handle", os.pread(old.fileno(), size, 0), b"\1" * size)
            assert counters(m)["materialized_bytes"] >= 2 * size
        wait_for("the old copy goes", PATIENCE, lambda: counters(m)["materialized_bytes"] < 2 * size, 0.1)


def test_a_write_that_is_under_way(t):
    """A mapped page gets its file's new times once, when it is first written to: what comes later must not be missed."""
    if not any(seen_under_way(t, settled) for settled in (2, 8, 32)):
        raise Skip("this machine takes more than 32 s for a mount and a look")


def seen_under_way(t, settled):
    """False: it took so long that the file was at rest before it was read."""
    size = 8 * MIB
    os.makedirs(t + "/src", exist_ok=True)
    write_file(t + "/src/model.safetensors", safetensors_image({"model.a": ("U8", (size,), bytes(size))}))
    with open(t + "/src/model.safetensors", "r+b") as f, mmap.mmap(f.fileno(), 0) as shard:
        head, begin = len(shard) - size, time.monotonic()
        shard[head:] = b"\1" * size  # from here on no page is clean
        with Mount(t + "/src", t + "/mnt", f"materialize=1G:settled={settled}") as m:
            needs(m, "materialize")
            same("first", read_all(m / "raw/model.a")[:9], b"\1" * 9)
            made = counters(m)["materialized"]
            if time.monotonic() - begin > settled:
                return False
            same("copies of what was just written", made, 0)
            before = os.stat(t + "/src/model.safetensors")
            shard[head:] = b"\2" * size
            after = os.stat(t + "/src/model.safetensors")
            if before.st_mtime_ns != after.st_mtime_ns:
                raise Skip("the kernel wrote the pages back meanwhile")

            def copied():
                same("read again", mapped(m / "raw/model.a"), b"\2" * size)
                return counters(m)["materialized"]
            wait_for("a copy once it is at rest", PATIENCE, copied, 0.2)
            same("copied", mapped(m / "raw/model.a"), b"\2" * size)
            same("made", counters(m)["materialized"], 1)
            return True


def test_never_a_mixture(t):
    """A shard that is written over in place, again and again, while it is opened and copies of it are made."""
    size = 8 * MIB
    image = lambda n: safetensors_image({"model.a": ("U8", (size,), bytes([n]) * size)})  # noqa: E731
    os.makedirs(t + "/src")
    write_file(t + "/src/model.safetensors", image(1))
    stop, wrong = threading.Event(), []

    def opener():
        while not stop.is_set():
            begin = time.monotonic()
            try:
                with open(m / "raw/model.a", "rb", buffering=0) as f:
                    f.read(size)
            except OSError as e:
                if e.errno not in (errno.ESTALE, errno.EIO, errno.ENOENT):
                    wrong.append(e)
            # While the server has it open for one it stays the server's: all have it closed for most of the time.
            stop.wait(random.random() * (0.2 + 8 * (time.monotonic() - begin)))

    with Mount(t + "/src", t + "/mnt", "materialize=1G:settled=1") as m:
        needs(m, "materialize")
        threads = [threading.Thread(target=opener) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for n in range(2, 6):
                with open(t + "/src/model.safetensors", "r+b") as f:
                    for at in range(0, size, MIB):
                        f.write(image(n)[at:at + MIB])
                        time.sleep(0.01)
                    made = counters(m)["materialized"]  # before the end: a copy may come at once where this thread is late
                    f.write(image(n)[size:])
                wait_for("a copy", PATIENCE, lambda: counters(m)["materialized"] > made, 0.1)
                same("all of the last", read_all(m / "raw/model.a"), bytes([n]) * size)
                same("all of the last, mapped", mapped(m / "raw/model.a"), bytes([n]) * size)
                same("wrong", wrong, [])
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_a_killed_server(t):
    """What was opened before stays whole, read or mapped; it is never zeros."""
    tensors = large(t, 1)
    want = tensors["model.t0"][2]
    with Mount(t + "/src", t + "/mnt", "materialize=1G:settled=0") as m:
        needs(m, "materialize")
        fd = os.open(m / "raw/model.t0", os.O_RDONLY)
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
            m.process.send_signal(signal.SIGKILL)
            m.process.wait()
            same("mapped", view[:], want)
            try:
                same("read", os.pread(fd, len(want), 0), want)
            except OSError as e:
                assert e.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO), e
        os.close(fd)
        m.process.returncode = 0  # as was wanted


# ---- long fills ----

def slow(t, server):
    tensors = large(t, 1, 32 * MIB)
    server.set("rate", 256 << 10)  # two minutes of it
    return tensors["model.t0"][2]


def opening(path):
    return subprocess.Popen([sys.executable, "-c", f"open({path!r}, 'rb')"], stderr=subprocess.PIPE)


def test_an_opener_that_is_killed(t):
    with Server(t) as server:
        want = slow(t, server)
        with Mount(server.url + "/src/", t + "/mnt", "materialize=1G:settled=0") as m:
            needs(m, "materialize")
            os.stat(m / "raw/model.t0")
            p = opening(m / "raw/model.t0")
            time.sleep(1.5)
            same("it waits", p.poll(), None)
            before = counters(m)["opens"]
            assert os.listdir(m / "raw") == ["model.t0"] and before >= 0  # others do not
            p.kill()
            wait_for("its end", PATIENCE, lambda: p.poll() is not None)
            same("copies that were there by then", counters(m)["materialized"], 0)
            server.set("rate", 0)
            same("the next one", mapped(m / "raw/model.t0"), want)
            same("made once", counters(m)["bytes_materialized"], len(want))


def test_a_fill_ends_with_the_mount(t):
    with Server(t) as server:
        slow(t, server)
        with Mount(server.url + "/src/", t + "/mnt", "materialize=1G:settled=0") as m:
            needs(m, "materialize")
            os.stat(m / "raw/model.t0")
            p = opening(m / "raw/model.t0")
            time.sleep(1.5)
            m.process.send_signal(signal.SIGTERM)
            wait_for("the end", PATIENCE, lambda: not m.alive())
            p.wait(PATIENCE)  # nobody answers it any more, or it was let in and cannot read


def test_a_shard_that_cannot_be_read(t):
    """The tensor's error is told by reads, as without a copy; its neighbours are whole."""
    tensors = large(t, 2)
    with Server(t) as server:
        with Mount(server.url + "/src/", t + "/mnt", "materialize=1G:settled=0,cache_size=0") as m:
            needs(m, "materialize")
            for name in "raw/model.t0", "raw/model.t1":
                os.stat(m / name)
            server.fault("status", times=1000, match="model-00001", status=403)
            fails("the one", errno.EACCES, lambda: read_all(m / "raw/model.t0"))
            same("the other", read_all(m / "raw/model.t1"), tensors["model.t1"][2])
            assert m.alive()


# ---- where it cannot be had ----

def test_without_rights(t):
    """A user namespace has all capabilities but those that count."""
    tensors = large(t, 1, MIB)
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise Skip("needs root and unshare")
    os.makedirs(t + "/mnt")
    os.makedirs(t + "/cache")
    script = (f"{UNSHARD} mount {t}/src {t}/mnt -o materialize=1G:settled=0,cache_dir={t}/cache && cat {t}/mnt/.unshard/counters.json && "
              f"cat {t}/mnt/config.json | wc -c && sha256sum < {t}/mnt/raw/model.t0; {UNSHARD} umount {t}/mnt")
    done = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False)
    if not done.stdout:
        raise Skip("no mount in a user namespace: " + done.stderr)
    state, size, digest = done.stdout.splitlines()
    same("state", json.loads(state)["passthrough"], "off: the server has no CAP_SYS_ADMIN in the initial user namespace")
    same("copies", json.loads(state)["materialize"], "off: see passthrough")
    same("side file", int(size), os.stat(t + "/src/config.json").st_size)
    same("bytes", digest.split()[0], hashlib.sha256(tensors["model.t0"][2]).hexdigest())


def test_over_an_overlay(t):
    """The kernel refuses files of stacked file systems behind ours: the server reads them."""
    tensors = large(t, 1, MIB)
    for name in "lower", "upper", "work", "merged":
        os.makedirs(f"{t}/{name}")
    shutil.copytree(t + "/src", t + "/lower/src")
    done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", f"lowerdir={t}/lower,upperdir={t}/upper,workdir={t}/work", t + "/merged"],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skip("no overlay: " + done.stderr)
    try:
        with Mount(t + "/merged/src", t + "/mnt", f"materialize=1G:settled=0,cache_dir={t}/merged/cache") as m:
            needs(m)
            same("side file", read_all(m / "config.json"), read_all(t + "/src/config.json"))
            same("tensor", mapped(m / "raw/model.t0"), tensors["model.t0"][2])
            c = counters(m)
            same("state", c["materialize"], "off: the kernel cannot read files of cache_dir= by itself")
            same("opens", c["opens_passthrough"], 0)
    finally:
        subprocess.run(["umount", "-l", t + "/merged"], check=False)


def test_a_full_disk(t):
    tensors = large(t, 1)
    os.makedirs(t + "/small")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "small", t + "/small"], check=False)
    if done.returncode:
        raise Skip("no tmpfs")
    try:
        with Mount(t + "/src", t + "/mnt", f"materialize=1G:settled=0,cache_dir={t}/small") as m:
            needs(m, "materialize")
            same("by the server", mapped(m / "raw/model.t0"), tensors["model.t0"][2])
            same("made", (counters(m)["materialized"], counters(m)["materialized_bytes"]), (0, 0))
    finally:
        subprocess.run(["umount", "-l", t + "/small"], check=False)


def test_refused_together(t):
    large(t, 1, MIB)
    os.makedirs(t + "/mnt")
    for options, word in (("rw,materialize=1G", "rw"), ("index=memory,materialize=1G:settled=0", "index=memory"), ("materialize=much", "bytes of disk"), ("materialize=1G:soon", "settled=SECONDS")):
        done = subprocess.run([UNSHARD, "mount", t + "/src", t + "/mnt", "-o", options], capture_output=True, text=True, check=False)
        same(options, done.returncode, 2)
        assert "materialize=" in done.stderr and word in done.stderr, done.stderr


if __name__ == "__main__":
    main(globals())
