# SPDX-License-Identifier: MIT
"""Reading tensors through a mount beside reading the same bytes of the shards.

Each layout is read in two ways: by `cat`, as people do, whose floor is `cat` of the shards; and by preads of 1 MiB into one buffer
that stays in the processor's cache, whose floor is the same loop over the shards: that costs the kernel little more than the copy.
A bare server takes its turn where it can (bench_server.c): what a mount without privilege can reach differs from machine to machine.
"""
import os
import subprocess
import sys
import zipfile

from suite import measure
from suite.measure import MIB, Failed, interleave, ratio_row, run
from suite.workloads import HERE, data_files, drop_pages, same_bytes, shards, workload

KEY = "model.layers.0.weight"
SMALL = 8192  # bytes a write: such a file lies in small folios of the page cache, as most files of the lab did
FULL = 1024 * MIB


def cat_row(bench, name, mount, file, folder, size, goal, lab, bare=None, **fields):
    ways = {"cat": lambda: run(["cat", *data_files(folder)]), "mount": lambda: run(["cat", file], mount.server)}
    if bare:
        ways["bare"] = lambda: run(["cat", bare.path], bare.server)
    samples = interleave(ways, bench.rounds)
    return ratio_row(f"{name}: cat", "cat of the shards", samples["cat"], samples["mount"], size, samples.get("bare"), goal=goal, lab=lab, rss=None, **fields)


def loop_row(bench, name, mount, file, folder, size, goal, lab, bare, **fields):
    samples = interleave({"native": lambda: bench.read("read", shards(folder, size)), "mount": lambda: bench.read("read", [file], mount.server),
                          "bare": lambda: bench.read("read", [bare.path], bare.server)}, bench.rounds)
    return ratio_row(f"{name}: pread 1 MiB", "pread of the shards", samples["native"], samples["mount"], size, samples["bare"], goal=goal, lab=lab, **fields)


def mapped_rows(bench, name, file, folder, size, **fields):
    """Each round has a mount of its own: one in which somebody has mapped the file before keeps its pages (decision 020).
    The second pass is over the same mapping."""
    def ours():
        with bench.mount(folder) as mount:
            return bench.passes("mapped", [mount / file], mount.server, passes=2)

    def bare():
        with bench.bare(folder, size) as server:
            return bench.passes("mapped", [server.path], server.server, passes=2)

    samples = interleave({"native": lambda: bench.passes("mapped", shards(folder, size), passes=2), "mount": ours, "bare": bare}, bench.rounds)
    for i, (when, goal, lab) in enumerate((("first touch", 0.2, 0.18), ("again", 0.5, 0.4))):
        native, ours, bare = ([s[i] for s in samples[w]] for w in ("native", "mount", "bare"))
        yield ratio_row(f"{name}: mapped, {when}", "mapped shards", native, ours, size, bare, goal=goal, lab=lab, **fields)


def checked(bench, mount, folder, size):
    """The tensor's file, after it was compared with what `unshard cat` says."""
    file = mount / "raw" / KEY
    if file.stat().st_size != size:
        raise Failed(f"{file} has {file.stat().st_size} bytes, not {size}")
    if not same_bytes([bench.binary, "cat", folder, KEY, "-o", f"cache_dir={bench.cache}"], file):
        raise Failed("the mount and `unshard cat` differ")
    return file


def layout_rows(bench, name, kind, options, goal, lab, mapped=False, cpu_goal=None, row=0):
    """row: bytes of a row, of shards by columns."""
    size = bench.size(FULL)
    folder = bench.make(kind, "source", 1, size, *options, *(("--row-bytes", row) if row else ()))
    with bench.mount(folder) as mount, bench.bare(folder, size, row) as bare:
        file = checked(bench, mount, folder, size)
        yield cat_row(bench, name, mount, file, folder, size, goal, lab, bare, cpu_goal=cpu_goal)
        yield loop_row(bench, name, mount, file, folder, size, goal, lab, bare, cpu_goal=cpu_goal)
        if mapped:
            yield from mapped_rows(bench, name, file.relative_to(mount / ""), folder, size)


@workload("reads")
def contiguous(bench):
    """One contiguous tensor: cat, preads, mapped."""
    yield from layout_rows(bench, "contiguous", "hf", (), 0.6, 0.51, mapped=True, cpu_goal=1.5)


@workload("reads")
def contiguous_small_folios(bench):
    """The same in a file that was written in pieces of 8 KiB."""
    yield from layout_rows(bench, "contiguous, small folios", "hf", ("--piece", SMALL), 0.6, 0.51, mapped=True, cpu_goal=1.5)


@workload("reads")
def dim_0(bench):
    """Shards by rows, 4 ranks."""
    yield from layout_rows(bench, "dim-0 shards, 4 files", "dcp", (), 0.6, 0.49, mapped=True, cpu_goal=1.5)


@workload("reads")
def dim_0_small_folios(bench):
    """The same in files that were written in pieces of 8 KiB."""
    yield from layout_rows(bench, "dim-0, small folios", "dcp", ("--piece", SMALL), 0.6, 0.49, cpu_goal=1.5)


@workload("reads")
def flattened(bench):
    """A tensor of one dimension in 61 uneven ranges across 4 files."""
    yield from layout_rows(bench, "61 flattened ranges, 4 files", "dcp", ("--flat", 61), 0.6, 0.49, cpu_goal=1.5)


@workload("reads", limit=240)
def dim_1(bench):
    """Shards by columns, 4 ranks: rows of 64 KiB to 64 B."""
    for words, row, goal, lab in (("64 KiB", 65536, 0.55, 0.64), ("4 KiB", 4096, 0.55, 0.47), ("256 B", 256, 0.55, 0.53), ("128 B", 128, None, None),
                                  ("64 B", 64, 0.35, 0.29)):
        yield from layout_rows(bench, f"dim-1, rows of {words}", "dcp", (), goal, lab, row=row)


@workload("reads", limit=180)
def dim_1_small_folios(bench):
    """Rows of 64 KiB to 64 B in files that were written in pieces of 8 KiB."""
    for words, row, goal, lab in (("64 KiB", 65536, 0.55, 0.64), ("4 KiB", 4096, 0.55, 0.47), ("256 B", 256, 0.55, 0.53), ("64 B", 64, 0.35, 0.29)):
        yield from layout_rows(bench, f"dim-1, rows of {words}, small folios", "dcp", ("--piece", SMALL), goal, lab, row=row)


@workload("reads")
def whole_file(bench):
    """model.safetensors whole: made of a DCP mesh, and a file served as it is."""
    size = bench.size(FULL)
    for name, kind, options in (("model.safetensors of a 2x2 mesh", "dcp", ("--mesh", "2x2")), ("model.safetensors as stored", "hf", ())):
        folder = bench.make(kind, kind, 16, size // 16, *options)
        with bench.mount(folder) as mount:
            yield cat_row(bench, name, mount, mount / "model.safetensors", folder, size, 0.6, 0.49, cpu_goal=1.5)


@workload("reads")
def memory_copy(bench):
    """What a copy from memory to memory costs: no read can cost less."""
    source = bench.work / "any"
    with open(source, "wb") as f:
        f.truncate(bench.size(FULL))
    size = source.stat().st_size
    folder = bench.make("hf", "source", 1, size)
    samples = interleave({"copy": lambda: bench.read("copy", [source]), "native": lambda: bench.read("read", shards(folder, size))}, bench.rounds)
    yield ratio_row("native pread 1 MiB", "memcpy of anonymous memory", samples["copy"], samples["native"], size)


@workload("reads", limit=240)
def random_reads(bench):
    """Reads of 4 KiB at random places, by 1 and by 64 readers, of three programs one after another in a fresh mount; 1 MiB reads by 64."""
    size, count = bench.size(FULL), bench.size(1 << 17)
    for name, kind, options in (("contiguous", "hf", ()), ("dim-0", "dcp", ())):
        folder = bench.make(kind, kind, 1, size, *options)
        alone = None
        for threads in (1, 64):
            how = {"block": 4096, "count": count, "threads": threads}

            def programs():
                with bench.mount(folder) as mount:
                    return [bench.read("random", [mount / "raw" / KEY], mount.server, **how) for _ in range(3)]

            def bare():
                with bench.bare(folder, size) as server:
                    return bench.read("random", [server.path], server.server, **how)

            samples = interleave({"native": lambda: bench.read("random", shards(folder, size), **how), "mount": programs, "bare": bare}, bench.rounds)
            readers = f"{threads} reader" + "s" * (threads > 1)
            # The second opens it page-cached, as the first has read it here and there; the third finds those pages.
            for i, (program, lab) in enumerate((("", 0.15), (", second program", None), (", third program", 0.15))):
                yield ratio_row(f"{name}: random 4 KiB, {readers}{program}", "pread of the shards", samples["native"],
                                [s[i] for s in samples["mount"]], count * 4096, samples["bare"] if i == 0 else None, goal=0.25, lab=lab)
            first = [s[0] for s in samples["mount"]]
            if threads == 1:
                alone = first
            else:
                yield ratio_row(f"{name}: random 4 KiB, 64 readers against 1", "1 reader", alone, first, count * 4096, goal=1)
        with bench.mount(folder) as mount, bench.bare(folder, size) as server:
            file = checked(bench, mount, folder, size)
            samples = interleave({"native": lambda: bench.read("read", shards(folder, size), threads=64),
                                  "mount": lambda: bench.read("read", [file], mount.server, threads=64),
                                  "bare": lambda: bench.read("read", [server.path], server.server, threads=64)}, bench.rounds)
            yield ratio_row(f"{name}: pread 1 MiB, 64 readers", "64 readers of the shards", samples["native"], samples["mount"], size, samples["bare"])


@workload("reads", limit=240)
def cold(bench):
    """From the disk: the shards' pages dropped and the mount fresh before each round."""
    size = bench.size(512 * MIB)
    for name, kind, options, goal, lab in (("cold, contiguous", "hf", (), 0.9, 0.8), ("cold, dim-0", "dcp", (), 0.9, 0.8),
                                           ("cold, dim-1 rows of 4 KiB", "dcp", ("--row-bytes", 4096), 0.8, 0.75),
                                           ("cold, dim-1 rows of 256 B", "dcp", ("--row-bytes", 256), 0.8, 0.75)):
        folder = bench.make(kind, "source", 1, size, *options)

        def native(folder=folder):
            drop_pages(*data_files(folder))
            return run(["cat", *data_files(folder)])

        def ours(folder=folder):
            drop_pages(*data_files(folder))
            with bench.mount(folder) as mount:
                return run(["cat", mount / "raw" / KEY], mount.server)

        samples = interleave({"cat": native, "mount": ours}, bench.rounds)
        yield ratio_row(name, "cold cat of the shards", samples["cat"], samples["mount"], size, goal=goal, lab=lab, rss=None)


@workload("reads", limit=240)
def zarr_lz4(bench):
    """Chunks of blosc-lz4 float32 weights, beside c-blosc alone and tensorstore."""
    mib, tool = bench.size(1024), bench.tool("bench_zarr", "-lblosc")
    for words, shape in (("256 x 4096, whole rows", (mib * 64, 4096, 256, 4096)), ("1024 x 1024, tiles", (mib * 16, 16384, 1024, 1024))):
        folder = bench.work / "zarr" / words.split(",")[0].replace(" ", "")
        (folder / "w").mkdir(parents=True)
        measure.run([tool, "make", folder / "w", *shape])
        os.sync()

        def ours(threads, folder=folder):
            with bench.mount(folder, f",jobs={threads}") as mount:
                return run(["cat", mount / "raw/w"], mount.server)

        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            ways = {"blosc": lambda: run([tool, "decode", folder / "w", *shape, threads]), "mount": lambda: ours(threads)}
            samples = interleave(ways, bench.rounds)
            yield ratio_row(f"zarr lz4 {words}, {threads} thread{'s' * (threads > 1)}", "c-blosc alone, into one buffer", samples["blosc"], samples["mount"], mib * MIB, rss=None)
        if bench.peers:
            lines = measure.run_json([bench.peers, HERE / "peer.py", "tensorstore", folder / "w", bench.rounds])
            peer = [measure.Sample(line["seconds"], line["cpu"]) for line in lines]
            yield ratio_row(f"zarr lz4 {words}", "tensorstore reads it whole", peer, samples["mount"], mib * MIB, goal=1, rss=None)


INFLATE = """
import sys, zipfile
z = zipfile.ZipFile(sys.argv[1])
for name in z.namelist():
    with z.open(name) as f:
        while f.read(1 << 20): pass
"""


def deflated_copy(source, target):
    """A .pt with its members deflated; the data is float32 numbers of 16 bits, which deflate to about the half."""
    noise = bytearray(4 * MIB)
    noise[2::4], noise[3::4] = os.urandom(MIB), bytes(b & 3 | 60 for b in os.urandom(MIB))
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for info in old.infolist():
            data = old.read(info)
            if "/data/" in info.filename:
                data = (bytes(noise) * (len(data) // len(noise) + 1))[:len(data)]
            new.writestr(info.filename, data)


@workload("reads")
def deflated_pt(bench):
    """A .pt whose members are deflated, beside zlib's own pass over them."""
    size = bench.size(256 * MIB)
    folder, packed = bench.make("hf", "plain", 4, size // 4, "--sparse"), bench.work / "packed"
    bench.unshard("convert", folder, bench.work / "pt", "--to", "pt")
    packed.mkdir()
    deflated_copy(bench.work / "pt" / "pytorch_model.bin", packed / "model.pt")
    os.sync()

    def ours():
        with bench.mount(packed) as mount:
            return run(["cat", mount / "model.safetensors"], mount.server)

    samples = interleave({"zlib": lambda: run([sys.executable, "-c", INFLATE, packed / "model.pt"]), "mount": ours}, bench.rounds)
    yield ratio_row("deflated .pt, whole", "Python's zipfile, its CRC too", samples["zlib"], samples["mount"], size, rss=None)
