#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""An hour of ordinary work on three mounts, looked at from outside: nothing wrong, nothing that grows.

    soak.py [--minutes 60] [--reads 1000000] [--every SECONDS] [--seed N] [--json FILE]

Readers (processes) read at random places of random tensors and compare each byte with what the framework's own loader
gave (SHA-256 of the whole tensor first, its bytes from then on): of all fixtures of tests/data, and of a server on
loopback through a block cache with a cap far below what is read. Between, checkpoints are saved into a third mount,
published, read back and removed; the kernel's caches are dropped now and then (root), so that files are forgotten and
found again. Resident memory, descriptors, threads and the cache's size on disk are sampled. Passes when every byte was
right, the cache was never above its cap, and from the second third to the last nothing grew: medians within 5 % plus
2 MiB, 2 descriptors. $UNSHARD names the program.
"""
import argparse
import json
import multiprocessing
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "mount"), str(ROOT / "remote"), str(ROOT)]

import mountlib  # noqa: E402
from fault_server import Server  # noqa: E402
from remote_cache import make_model, taken  # noqa: E402

MIB = 1 << 20
CAP = 8 * MIB
READERS = 8
KEPT = 5  # saved checkpoints that are there at once


def fixture_files(mnt):
    """[(path of raw/KEY, SHA-256)] of the tensors of all fixtures below the mount."""
    files = []
    for expected in sorted((ROOT / "data").glob("*/*.expected.json")):
        name = expected.name.removesuffix(".expected.json")
        raw = pathlib.Path(mnt) / expected.parent.name / name / "raw"
        tensors = json.loads(expected.read_text(encoding="utf-8")).get("tensors", {})
        if raw.is_dir():
            for f in raw.iterdir():
                key = os.getxattr(f, "user.unshard.key").decode("utf-8", "surrogateescape")
                if key in tensors and tensors[key].get("sha256"):
                    files.append((str(f), tensors[key]["sha256"]))
    return files


class Reader:
    """Reads of one process; `wrong` holds what differed."""

    def __init__(self, files, seed):
        self.files, self.random, self.known, self.wrong, self.bytes = files, random.Random(seed), {}, [], 0

    def whole(self, path, want):
        data = self.known.get(path)
        if data is None:
            data = mountlib.read_all(path)
            if mountlib.sha256(data) != want:
                self.wrong.append(f"{path}: SHA-256 {mountlib.sha256(data)}, want {want}")
            if len(self.known) < 4000:
                self.known[path] = data
        return data

    def read_once(self):
        path, want = self.random.choice(self.files)
        data = self.whole(path, want)
        at = self.random.randrange(len(data) + 1)
        size = self.random.choice((1, 512, 4096, 65536, MIB))
        fd = os.open(path, os.O_RDONLY)
        try:
            got = os.pread(fd, size, at)
        finally:
            os.close(fd)
        self.bytes += len(got)
        if got != data[at:at + size]:
            self.wrong.append(f"{path}: {size} bytes at {at} differ")


def reader_process(files, seed, reads, deadline, out):
    """Spreads `reads` over the time that is left, so that an hour is an hour."""
    reader = Reader(files, seed)
    start, done = time.monotonic(), 0
    try:
        while done < reads and not reader.wrong:
            reader.read_once()
            done += 1
            ahead = start + (deadline - start) * done / reads - time.monotonic()
            if ahead > 0.01:
                time.sleep(ahead)
    except OSError as e:
        reader.wrong.append(str(e))
    out.put((done, reader.bytes, reader.wrong))


def save_one(mnt, number):
    """A checkpoint written, published, read back; an old one removed."""
    tensors = mountlib.make_tensors(number, count=12, rows=64 + number % 64, cols=128)
    top = f"{mnt}/step{number:06}"
    os.mkdir(top)
    with open(f"{top}/model.safetensors", "wb") as f:
        f.write(mountlib.safetensors_image(tensors))
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)
    for key, (_, _, data) in tensors.items():
        mountlib.same(f"{top} {key}", mountlib.read_all(f"{top}/raw/{key}"), data)
    if number >= KEPT:
        subprocess.run(["rm", "-r", f"{mnt}/step{number - KEPT:06}"], check=True)


def sample(mount):
    with open(f"/proc/{mount.process.pid}/status") as f:
        fields = dict(line.split(":", 1) for line in f)
    return {"rss": int(fields["RssAnon"].split()[0]) << 10, "threads": int(fields["Threads"]),
            "fds": len(os.listdir(f"/proc/{mount.process.pid}/fd"))}


def grown(samples):
    """{what: (median of the second third, median of the last)} of what grew beyond its slack."""
    third = len(samples) // 3
    result = {}
    for what, slack in {"rss": 2 * MIB, "fds": 2, "threads": 2}.items():
        middle = statistics.median(s[what] for s in samples[third:2 * third])
        last = statistics.median(s[what] for s in samples[2 * third:])
        if last > middle * 1.05 + slack:
            result[what] = (middle, last)
    return result


def drop_kernel_caches():
    if os.geteuid() == 0:
        with open("/proc/sys/vm/drop_caches", "w") as f:
            f.write("2")


def soak(t, args):
    model = make_model(f"{t}/remote/m", 20, 4 * MIB)
    os.makedirs(f"{t}/saves")
    deadline = time.monotonic() + args.minutes * 60
    samples = {"local": [], "remote": [], "saving": []}
    largest, saves, problems = 0, 0, []
    with Server(f"{t}/remote") as server, \
            mountlib.Mount(str(ROOT / "data"), f"{t}/local") as local, \
            mountlib.Mount(server.url + "/m/", f"{t}/far", f"cache_dir={t}/cache,cache_size={CAP >> 20}M") as far, \
            mountlib.Mount(f"{t}/saves", f"{t}/rw", "rw,save=dcp:ranks=3") as saving:
        near_files = fixture_files(local.path)
        far_files = [(f"{far.path}/raw/{k}", mountlib.sha256(v)) for k, v in model.items()]
        print(f"# {len(near_files)} tensors of fixtures, {len(far_files)} of a server; cap {CAP} bytes", flush=True)
        out = multiprocessing.Queue()
        processes = []
        for i in range(READERS):
            files = far_files if i % 4 == 3 else near_files
            processes.append(multiprocessing.Process(
                target=reader_process, args=(files, args.seed * 100 + i, args.reads // READERS, deadline, out)))
            processes[-1].start()
        while time.monotonic() < deadline and all(m.alive() for m in (local, far, saving)):
            try:
                save_one(saving.path, saves)
            except (OSError, AssertionError, subprocess.CalledProcessError) as e:
                problems.append(f"save {saves}: {e}")
                break
            saves += 1
            for name, mount in zip(samples, (local, far, saving)):
                samples[name].append(sample(mount))
            largest = max(largest, taken(f"{t}/cache/blocks"))
            if saves % 20 == 0:
                drop_kernel_caches()
            time.sleep(args.every)
        done = [out.get(timeout=600) for _ in processes]
        for p in processes:
            p.join()
        problems += [f"the mount {n} ended" for n, m in zip(samples, (local, far, saving)) if not m.alive()]
    reads, size = sum(d[0] for d in done), sum(d[1] for d in done)
    problems += [w for d in done for w in d[2]]
    if largest > CAP:
        problems.append(f"the cache had {largest} bytes, its cap is {CAP}")
    if reads < args.reads // READERS * READERS:
        problems.append(f"{reads} reads were made, {args.reads} were wanted")
    for name, s in samples.items():
        problems += [f"{name}: {what} grew from {a:.0f} to {b:.0f}" for what, (a, b) in grown(s).items()]
    return {"schema": 1, "reads": reads, "bytes": size, "saves": saves, "cache_cap": CAP, "cache_largest": largest,
            "samples": samples, "problems": problems}


def report(result):
    print(f"{result['reads']} random reads, {result['bytes'] >> 20} MiB, all compared; {result['saves']} saves; "
          f"cache at most {result['cache_largest']} of {result['cache_cap']} bytes")
    print(f"{'mount':<8} {'private MiB: first':>19} {'second third':>13} {'last third':>11} {'most':>6}   descriptors   threads")
    for name, s in result["samples"].items():
        third = len(s) // 3
        mib = [x["rss"] / MIB for x in s]
        print(f"{name:<8} {mib[0]:>19.1f} {statistics.median(mib[third:2 * third]):>13.1f} "
              f"{statistics.median(mib[2 * third:]):>11.1f} {max(mib):>6.1f}   "
              f"{s[0]['fds']:>3} to {max(x['fds'] for x in s):<3}    {s[0]['threads']:>3} to {max(x['threads'] for x in s)}")
    for problem in result["problems"]:
        print("not ok -", problem)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--reads", type=int, default=1_000_000)
    parser.add_argument("--every", type=float, default=5, help="seconds between saves")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write all samples there")
    args = parser.parse_args()
    if not os.path.exists("/dev/fuse"):
        print("skipped: no /dev/fuse")
        return 77
    with mountlib.fresh_directory() as t:
        result = soak(t, args)
    report(result)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
