#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What reading from a server costs in requests and bytes, and the cache of blocks: its cap, its crashes, its damage."""
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

from mountlib import PATIENCE, UNSHARD, Mount, main, same, tensor_bytes, wait_for, write_checkpoint

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "remote"))

from fault_server import Server  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20


def taken(*paths):
    """Bytes on disk below these directories, as du counts."""
    total = 0
    for top in paths:
        for folder, _, names in os.walk(top):
            for name in [*names, "."]:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def make_model(path, tensors, size, shards=2):
    """{key: bytes} of U8 tensors in Hugging Face shards."""
    data = {f"model.layers.{i}.weight": tensor_bytes(f"{path} {i}", size) for i in range(tensors)}
    write_checkpoint(path, {k: ("U8", (size,), v) for k, v in data.items()}, shards=shards)
    return data


def warm(server, options):
    """Makes the index."""
    subprocess.run([UNSHARD, "ls", server.url + "/m/", "-o", options], check=True, stdout=subprocess.DEVNULL)
    server.forget()


def data_requests(server):
    return [r for r in server.log(r"\.(safetensors|distcp)$", "GET") if r["status"] == 206]


def moved(server):
    return sum(r["bytes"] for r in server.log())


def test_ten_times_the_cap(t):
    """The directory is looked at from outside, at every step."""
    model = make_model(t + "/src/m", 20, 4 * MIB)
    cap = 8 * MIB
    with Server(t + "/src") as server, Mount(server.url + "/m/", t + "/mnt", f"cache_dir={t}/cache,cache_size=8M") as m:
        largest = 0
        for key, want in model.items():
            with open(m / f"raw/{key}", "rb") as f:
                for at in range(0, len(want), MIB):
                    same(key, f.read(MIB) == want[at:at + MIB], True)
                    largest = max(largest, taken(t + "/cache/blocks"))
                    assert largest <= cap, f"{largest} bytes in {t}/cache/blocks, the cap is {cap}"
        assert sum(map(len, model.values())) == 10 * cap

        def half():
            """What was read is written behind it, which may take a slow disk its time."""
            nonlocal largest
            largest = max(largest, taken(t + "/cache/blocks"))
            assert largest <= cap, f"{largest} bytes in {t}/cache/blocks, the cap is {cap}"
            return largest > cap / 2
        wait_for("half of it", PATIENCE, half)
        assert largest > cap / 2, f"it never had more than {largest} of {cap} bytes"
        print(f"# {10 * cap} bytes read, cache_size={cap}: at most {largest} bytes in the cache's directory, as du counts")


def test_counters(t):
    model = make_model(t + "/src/m", 2, 2 * MIB)
    key, options = "model.layers.0.weight", f"cache_dir={t}/cache"
    with Server(t + "/src") as server:
        for round_ in range(2):
            with Mount(server.url + "/m/", f"{t}/mnt{round_}", options) as m:
                server.forget()
                server.fault("status", times=1 - round_, match="safetensors", status=503)
                for _ in range(2):
                    assert pathlib.Path(m / f"raw/{key}").read_bytes() == model[key]
                count = json.loads(pathlib.Path(m / ".unshard/counters.json").read_bytes())["remote"]
                same("retries", count["retries"], 1 - round_)
                # Both times its bytes were asked of the cache; once they were fetched, once they were on disk.
                assert count["bytes_from_memory"] >= 2 * MIB, count
                assert (count["bytes_from_disk"] >= 2 * MIB - 64 * KIB) == (round_ == 1), count
                assert (count["bytes_fetched"] >= 2 * MIB - 64 * KIB) == (round_ == 0), count
                if round_ == 0:
                    wait_for("they are kept", PATIENCE, lambda: json.loads(pathlib.Path(m / ".unshard/counters.json").read_bytes())
                             ["remote"]["bytes_kept"] >= 2 * MIB)
    model = make_model(t + "/src/n", 10, 4 * MIB)
    with Server(t + "/src") as server, Mount(server.url + "/n/", t + "/mnt-n", f"cache_dir={t}/small,cache_size=8M") as m:
        for key, want in model.items():
            assert pathlib.Path(m / f"raw/{key}").read_bytes() == want
        wait_for("blocks that had to go", PATIENCE, lambda: json.loads(pathlib.Path(m / ".unshard/counters.json").read_bytes())
                 ["remote"]["blocks_evicted"] > 0)


def test_a_size_is_the_same_for_all(t):
    """MB are of 1000 and MiB of 1024, for a mount as for a command: else each would set another limit."""
    make_model(t + "/src/m", 1, MIB)
    for i, (size, limit) in enumerate((("8MB", 8000000), ("8MiB", 8 * MIB), ("8M", 8 * MIB))):
        with Server(t + "/src") as server:
            options = f"cache_dir={t}/cache{i},cache_size={size}"
            with Mount(server.url + "/m/", f"{t}/mnt{i}", options):
                pass
            same(size + " of the mount", cache_limit(f"{t}/cache{i}"), limit)
            subprocess.run([UNSHARD, "ls", server.url + "/m/", "-o", options], check=True, capture_output=True)
            same(size + " of a command", cache_limit(f"{t}/cache{i}"), limit)


def cache_limit(directory):
    done = subprocess.run([UNSHARD, "cache", "limit", "--json", "-o", "cache_dir=" + directory], check=True, capture_output=True)
    return json.loads(done.stdout)["limit"]


def test_many_mounts_of_one_cache(t):
    """Three processes fill one directory; one of them is killed while it does, again and again."""
    model = make_model(t + "/src/m", 12, 2 * MIB)
    cap = 6 * MIB
    options = f"cache_dir={t}/cache,cache_size=6M"
    source = "import sys\nfor p in sys.argv[1:]:\n  open(p, 'rb').read()"
    with Server(t + "/src") as server, contextlib.ExitStack() as stack:
        mounts = [stack.enter_context(Mount(server.url + "/m/", f"{t}/mnt{i}", options)) for i in range(2)]
        for round_ in range(4):
            victim = Mount(server.url + "/m/", f"{t}/victim{round_}", options)
            with victim:
                readers = [subprocess.Popen([sys.executable, "-c", source, *(m / f"raw/{k}" for k in model)],
                                            stderr=subprocess.DEVNULL) for m in [*mounts, victim]]
                wait_for("something in the cache", PATIENCE, lambda: taken(t + "/cache/blocks") > MIB)
                victim.process.send_signal(signal.SIGKILL)
                victim.process.wait(PATIENCE)
                victim.process.returncode = 0
                while any(r.poll() is None for r in readers):
                    size = taken(t + "/cache/blocks")
                    assert size <= cap, f"{size} bytes, the cap is {cap}"
                same("readers of the other mounts", [r.returncode for r in readers[:2]], [0, 0])
        for m in mounts:
            for key, want in model.items():
                with open(m / f"raw/{key}", "rb") as f:
                    assert f.read() == want, key
        assert taken(t + "/cache/blocks") <= cap


def test_a_random_read_costs_one_small_range(t):
    model = make_model(t + "/src/m", 4, 8 * MIB)
    with Server(t + "/src") as server:
        warm(server, f"cache_dir={t}/cache")
        with Mount(server.url + "/m/", t + "/mnt", f"cache_dir={t}/cache") as m:
            chance, key = random.Random(5), "model.layers.2.weight"
            fd = os.open(m / f"raw/{key}", os.O_RDONLY)
            for _ in range(40):
                before = len(data_requests(server))
                at = chance.randrange(128 * KIB, 8 * MIB - 192 * KIB)
                same("bytes", os.pread(fd, 4 * KIB, at), model[key][at:at + 4 * KIB])
                new = data_requests(server)[before:]
                assert len(new) <= 1, new
                for r in new:
                    assert r["bytes"] <= 12 * KIB, r
                same("bytes again", os.pread(fd, 4 * KIB, at), model[key][at:at + 4 * KIB])
                same("requests of the second time", len(data_requests(server)) - before, len(new))
            os.close(fd)


def distributed(path, size, ranks):
    """A DCP checkpoint of three tensors over so many files."""
    os.makedirs(path)
    subprocess.run([sys.executable, str(ROOT / "bench/make_checkpoint.py"), "dcp", path, "--tensors", "3", "--bytes", str(size),
                    "--ranks", str(ranks)], check=True)


def test_one_tensor_moves_its_bytes(t):
    size = 12 * MIB  # less than may wait to be written: all of it is kept
    for name, make in {"hf": lambda p: make_model(p, 3, size), "dcp": lambda p: distributed(p, size, 16)}.items():
        make(f"{t}/{name}/m")
        with Server(f"{t}/{name}") as server:
            options = f"cache_dir={t}/cache-{name}"
            warm(server, options)
            key = "model.layers.1.weight"
            want = subprocess.run([UNSHARD, "cat", f"{t}/{name}/m", key], check=True, stdout=subprocess.PIPE).stdout
            same("size", len(want), size)
            with Mount(server.url + "/m/", t + "/mnt-" + name, options) as m:
                with open(m / f"raw/{key}", "rb") as f:
                    assert f.read() == want
                assert size - 128 * KIB <= moved(server) <= size + MIB, f"{name}: {moved(server)} bytes for {size}"
                few = len(data_requests(server))
                assert few <= size / MIB * 2 + 3 * 16, f"{name}: {few} requests"
                with open(m / f"raw/{key}", "rb") as f:
                    assert f.read() == want
                same("requests of the second time", len(data_requests(server)), few)
            with Mount(server.url + "/m/", t + "/mnt2-" + name, options) as m:
                with open(m / f"raw/{key}", "rb") as f:
                    assert f.read() == want
                assert moved(server) <= size + MIB, f"{name}: {moved(server) - size} bytes more in all"


def test_what_is_ahead_keeps_nobody_waiting(t):
    """The next shard's server says nothing: where its bytes lie is asked for behind the reader's back."""
    size, hung = 8 * MIB, 40
    distributed(t + "/src/m", size, 4)
    key, part = "model.layers.1.weight", size // 4
    want = subprocess.run([UNSHARD, "cat", t + "/src/m", key], check=True, stdout=subprocess.PIPE).stdout
    with Server(t + "/src") as server:
        warm(server, f"cache_dir={t}/cache")
        with Mount(server.url + "/m/", t + "/mnt", f"cache_dir={t}/cache") as m, open(m / f"raw/{key}", "rb", buffering=0) as f:
            server.fault("stall", times=-1, match="__1_0", seconds=hung)
            begin = time.monotonic()
            assert b"".join(f.read(part // 4) for _ in range(4)) == want[:part]
            took = time.monotonic() - begin
            wait_for("a request for what is ahead", PATIENCE, lambda: server.log("__1_0", "GET"))
            assert took < hung / 2, f"{took:.1f} s for what another server has"
            server.clear()
            assert f.read() == want[part:]


def test_damage_on_disk_is_not_served(t):
    model = make_model(t + "/src/m", 4, MIB)
    options = f"cache_dir={t}/cache"
    with Server(t + "/src") as server:
        with Mount(server.url + "/m/", t + "/mnt", options) as m:
            for key, want in model.items():
                assert pathlib.Path(m / f"raw/{key}").read_bytes() == want
        blocks = pathlib.Path(t, "cache/blocks/data")
        with open(blocks, "r+b") as f:
            for at in range(1000, blocks.stat().st_size, 16 * KIB):
                f.seek(at)
                f.write(b"damage")
        server.forget()
        with Mount(server.url + "/m/", t + "/mnt2", options) as m:
            for key, want in model.items():
                assert pathlib.Path(m / f"raw/{key}").read_bytes() == want, key
        again = sum(r["bytes"] for r in data_requests(server))
        assert MIB // 2 <= again <= 3 * MIB, again
        server.forget()
        with Mount(server.url + "/m/", t + "/mnt3", options) as m:
            for key, want in model.items():
                assert pathlib.Path(m / f"raw/{key}").read_bytes() == want, key
        same("it was mended", len(data_requests(server)), 0)


def test_another_object_is_another_one(t):
    """The same name and size, other bytes: what was kept of the old one is not taken for it."""
    old = make_model(t + "/src/m", 2, MIB)
    options = f"cache_dir={t}/cache"
    with Server(t + "/src") as server:
        for round_, model in enumerate((old, None)):
            if model is None:
                model = {k: tensor_bytes("new" + k, MIB) for k in old}
                write_checkpoint(t + "/src/m", {k: ("U8", (MIB,), v) for k, v in model.items()})
            with Mount(server.url + "/m/", f"{t}/mnt{round_}", options) as m:
                for key, want in model.items():
                    assert pathlib.Path(m / f"raw/{key}").read_bytes() == want, key


def test_from_memory_alone(t):
    model = make_model(t + "/src/m", 3, 3 * MIB)
    with Server(t + "/src") as server:
        with Mount(server.url + "/m/", t + "/mnt", f"cache_dir={t}/cache,cache_size=0") as m:
            for key, want in model.items():
                assert pathlib.Path(m / f"raw/{key}").read_bytes() == want
        assert not os.path.exists(t + "/cache/blocks")
        out = subprocess.run([UNSHARD, "cat", server.url + "/m/", key, "-o", f"cache_dir={t}/cache,cache_size=0"], check=True,
                             stdout=subprocess.PIPE).stdout
        same("cat", out == model[key], True)
        assert not os.path.exists(t + "/cache/blocks")
        # Without a directory that can be written all is as well.
        pathlib.Path(t, "file").write_text("")
        with Mount(server.url + "/m/", t + "/mnt2", f"cache_dir={t}/file") as m:
            assert pathlib.Path(m / f"raw/{key}").read_bytes() == model[key]


def test_the_cache_tells_what_it_has(t):
    make_model(t + "/src/m", 2, MIB)
    with Server(t + "/src") as server:
        options = ("-o", f"cache_dir={t}/cache")
        subprocess.run([UNSHARD, "cat", server.url + "/m/", "model.layers.0.weight", *options], check=True, stdout=subprocess.DEVNULL)
        facts = json.loads(subprocess.run([UNSHARD, "cache", "--json", *options], check=True, stdout=subprocess.PIPE).stdout)
        same("sources", len(facts["blocks"]["sources"]), 1)
        assert server.url in facts["blocks"]["sources"][0]["source"], facts
        assert MIB <= facts["blocks"]["sources"][0]["bytes"] <= MIB + 200 * KIB, facts
        assert MIB <= facts["blocks"]["bytes"] <= taken(t + "/cache/blocks"), facts
        subprocess.run([UNSHARD, "cache", "clear", *options], check=True, stdout=subprocess.DEVNULL)
        assert taken(t + "/cache/blocks") <= 64 * KIB


def test_a_file_of_the_source_is_read_ahead(t):
    """What is no checkpoint is shown as it is, and read in large ranges too."""
    os.makedirs(t + "/src/m")
    want = tensor_bytes("file", 12 * MIB)
    pathlib.Path(t, "src/m/notes.bin").write_bytes(want)
    with Server(t + "/src") as server, Mount(server.url + "/m/", t + "/mnt", f"cache_dir={t}/cache") as m:
        assert pathlib.Path(m / "notes.bin").read_bytes() == want
        requests = server.log("notes.bin$", "GET")
        assert sum(r["bytes"] for r in requests) <= 12 * MIB + 64 * KIB
        assert len(requests) <= 20, len(requests)


if __name__ == "__main__":
    main(globals())
