# SPDX-License-Identifier: MIT
"""Curves of time and memory against size: what should be flat, and what may grow at most with the size."""
import os
import statistics
import time

from families.metadata import ENVIRONMENT, first_byte, wide_checkpoint
from suite.measure import MIB, interleave, median, memory, run, threads_cpu
from suite.rows import FLAT, Curve
from suite.workloads import shards, workload

KEY = "model.layers.0.weight"


def sizes(bench, last, *points):
    """The sizes of a curve; a quick run leaves the last out."""
    return points if bench.quick else (*points, last)


def best_of(work, times=3):
    return min(work().seconds for _ in range(times))


@workload("scaling", limit=240)
def by_chunks(bench):
    """Scan and warm open of a DCP .metadata by its number of chunks."""
    scan, again, peak, first = [], [], [], []
    for chunks in sizes(bench, 1_000_000, 1000, 10_000, 100_000):
        folder, per_tensor = bench.work / f"chunks-{chunks}", min(1000, chunks // 10)
        wide_checkpoint(folder, chunks, per_tensor)
        cold = []
        for _ in range(3):
            bench.forget_index()
            cold.append(bench.unshard("info", folder))
        scan.append((chunks, 1e3 * median(cold)))
        peak.append((chunks, max(s.rss for s in cold)))
        again.append((chunks, 1e3 * best_of(lambda: bench.unshard("info", folder))))
        first.append((chunks, statistics.median(first_byte(bench, folder, "model.layers.0.mlp.experts.0.weight") for _ in range(3))))
    yield Curve("Scan of a checkpoint", "chunks", "ms", {"empty index": scan, "warm index": again, "warm mount to first tensor": first})
    yield Curve("Memory of a scan", "chunks", "MiB", {"peak": peak})


@workload("scaling", limit=240)
def by_tensors(bench):
    """Scan, listing and the server's memory by the number of tensors."""
    scan, listing, long, resident, first = [], [], [], [], []
    for tensors in sizes(bench, 100_000, 100, 1000, 10_000):
        folder = bench.make("hf", f"tensors-{tensors}", tensors, 4096, "--sparse")
        bench.forget_index()
        scan.append((tensors, 1e3 * bench.unshard("info", folder).seconds))
        first.append((tensors, statistics.median(first_byte(bench, folder, KEY) for _ in range(3))))
        with bench.mount(folder) as mount:
            listing.append((tensors, 1e3 * run(["ls", "-U", mount / "raw"], env=ENVIRONMENT).seconds))
            long.append((tensors, 1e3 * run(["ls", "-l", mount / "raw"], env=ENVIRONMENT).seconds))
            resident.append((tensors, memory(mount.server, "VmRSS")))
    yield Curve("Many tensors", "tensors", "ms", {"scan": scan, "first ls": listing, "then ls -l": long, "warm mount to first tensor": first})
    yield Curve("Memory of the mount after ls -l", "tensors", "MiB", {"resident": resident})


def idle_cost(server):
    """Milliseconds of a core a second, over three seconds."""
    before = threads_cpu(server)
    time.sleep(3)
    return max(1e3 * (threads_cpu(server) - before) / 3, 0.001)


@workload("scaling", limit=400)
def by_checkpoints(bench):
    """Mount, ls and find of a tree by the number of checkpoints in it; its memory, and what it costs when nothing happens."""
    mounted, listing, found, resident, idle, later = [], [], [], [], [], []
    template = bench.make("hf", "template", 2, 4096)
    for count in sizes(bench, 10_000, 10, 100, 1000):
        tree = bench.work / f"tree-{count}"
        for i in range(count):
            (tree / f"step-{i}").mkdir(parents=True)
            os.link(template / "model.safetensors", tree / f"step-{i}" / "model.safetensors")
        with bench.mount(tree) as mount:
            mounted.append((count, 1e3 * mount.mounted_in))
            listing.append((count, 1e3 * run(["ls", "-U", mount.path], env=ENVIRONMENT).seconds))
            found.append((count, 1e3 * run(["find", mount.path, "-maxdepth", "2", "-name", "model.safetensors"], env=ENVIRONMENT).seconds))
            resident.append((count, memory(mount.server, "VmRSS")))
            idle.append((count, idle_cost(mount.server)))
            time.sleep(27)
            later.append((count, idle_cost(mount.server)))
    yield Curve("Many checkpoints under one mount", "checkpoints", "ms", {"unshard mount": mounted, "first ls": listing, "find -maxdepth 2": found})
    yield Curve("Memory of the mount after find", "checkpoints", "MiB", {"resident": resident})
    yield Curve("An idle mount", "checkpoints", "ms of a core a second", {"after find": idle, "half a minute later": later}, FLAT)


@workload("scaling", limit=180)
def by_open_files(bench):
    """Opening 1 to 1,000 tensors and reading 4 KiB of each, all kept open; the server's memory."""
    taken, resident = [], []
    folder = bench.make("dcp", "source", 1000, 4 * 4096)
    bench.unshard("info", folder)
    for count in (1, 10, 100, 1000):
        with bench.mount(folder) as mount:
            begin, files = time.monotonic(), []
            for i in range(count):
                files.append(os.open(mount / "raw" / f"model.layers.{i}.weight", os.O_RDONLY))
                os.pread(files[-1], 4096, 0)
            taken.append((count, 1e6 * (time.monotonic() - begin) / count))
            resident.append((count, memory(mount.server, "VmRSS")))
            for fd in files:
                os.close(fd)
    yield Curve("Open and read 4 KiB, all kept open", "open files", "µs each", {"open and read": taken}, FLAT)
    yield Curve("Memory of the mount", "open files", "MiB", {"resident": resident})


@workload("scaling", limit=180)
def by_readers(bench):
    """1 to 64 parallel readers: preads of 1 MiB, and of 4 KiB at random places; and one mapping that so many threads touch first."""
    size, count = bench.size(512 * MIB), bench.size(1 << 16)
    folder = bench.make("dcp", "source", 1, size)

    def first(mode, threads, **how):  # a file that was mapped, or read here and there, keeps its pages: a mount of its own
        with bench.mount(folder) as fresh:
            return bench.read(mode, [fresh / "raw" / KEY], fresh.server, threads=threads, **how)

    mapped = {"shards": [], "mount": []}
    lines = {"1 MiB, shards": [], "1 MiB, mount": [], "4 KiB random, shards": [], "4 KiB random, mount": []}
    with bench.mount(folder) as mount:
        file = mount / "raw" / KEY
        for readers in (1, 2, 4, 16, 64):
            ways = {"1 MiB, shards": lambda: bench.read("read", shards(folder, size), threads=readers),
                    "1 MiB, mount": lambda: bench.read("read", [file], mount.server, threads=readers),
                    "4 KiB random, shards": lambda: bench.read("random", shards(folder, size), threads=readers, block=4096, count=count),
                    "4 KiB random, mount": lambda: first("random", readers, block=4096, count=count)}
            for name, samples in interleave(ways, min(3, bench.rounds)).items():
                lines[name].append((readers, (size if name.startswith("1") else count * 4096) / MIB / median(samples)))
            ways = {"shards": lambda: bench.read("mapped", shards(folder, size), threads=readers), "mount": lambda: first("mapped", readers)}
            for name, samples in interleave(ways, min(3, bench.rounds)).items():
                mapped[name].append((readers, size / MIB / median(samples)))
    yield Curve("Parallel readers", "readers", "MiB/s", lines, "")
    yield Curve("Threads that touch a mapping first", "threads", "MiB/s", mapped, "")


def random_cost(bench, folder, key, count):
    """A random read of 4 KiB of warm shards: [µs, µs on a core of reader and server], where chunks are new to the program, and again."""
    passes = []
    for _ in range(3):
        with bench.mount(folder) as mount:  # the next program finds pages in memory
            file = mount / "raw" / key
            bench.read("read", [file], mount.server)
            passes.append(bench.passes("random", [file], mount.server, block=4096, count=count, passes=2))
    return [[1e6 * median(samples, kind) / count for kind in ("seconds", "cpu")] for samples in zip(*passes)]


@workload("scaling", limit=300)
def read_by_chunks(bench):
    """What a random read of 4 KiB costs by the chunks of its tensor, and by those of its checkpoint."""
    count, of_tensor, of_checkpoint = bench.size(1 << 15), [], []
    # Chunks stay longer than a read: one of many chunks costs what it has to put together, however many others there are.
    for chunks in sizes(bench, 65_536, 4, 64, 1024, 8192):
        folder = bench.make("dcp", f"chunks-{chunks}", 1, 1024 * MIB, "--flat", chunks, "--sparse")
        of_tensor.append((chunks, random_cost(bench, folder, KEY, count)))
    for tensors in sizes(bench, 20_000, 1, 20, 200, 2000):
        folder = bench.make("dcp", f"tensors-{tensors}", tensors, 16 * 1024, "--flat", 4)
        of_checkpoint.append((4 * tensors, random_cost(bench, folder, KEY, count)))
    # The first time most reads meet a chunk whose header has to be parsed, the more so the more there are: bounded by that one parse.
    for size, points in (("chunks of the tensor", of_tensor), ("chunks of the checkpoint", of_checkpoint)):
        for k, (when, shape) in enumerate((("the first time", ""), ("again", FLAT))):
            lines = {what: [(n, cost[k][w]) for n, cost in points] for w, what in enumerate(("wall", "on a core"))}
            yield Curve(f"A random read of 4 KiB, {when}", size, "µs", lines, shape)
