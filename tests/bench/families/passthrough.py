# SPDX-License-Identifier: MIT
"""-o materialize=SIZE, as root: tensors copied once into a file of the cache that the kernel then reads by itself."""
import mmap
import os

from families.reads import KEY, checked
from suite.measure import MIB, Failed, interleave, ratio_row, run, timed
from suite.rows import LOWER, Row
from suite.workloads import data_files, shards, workload

OPTION = ",materialize=8G:settled=0"  # the checkpoint was written just now


def why_not(bench, folder):
    """Why the rows are left out, or nothing."""
    if os.geteuid() != 0:
        return "it takes root"
    try:
        with bench.mount(folder, OPTION):
            return ""
    except Failed as e:
        return str(e)


def bare_write(bench, pieces):
    """What no copy can do without: the bytes of [(file, offset, bytes)] written from mappings to a new file beside the copies, its room set aside first."""
    out = os.open(bench.cache, os.O_RDWR | os.O_TMPFILE, 0o600)
    try:
        os.posix_fallocate(out, 0, sum(n for _, _, n in pieces))
        at = 0
        for file, offset, size in pieces:
            with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m, memoryview(m) as view:
                for step in range(0, size, MIB):
                    with view[offset + step:offset + min(step + MIB, size)] as piece:
                        at += os.pwrite(out, piece, at)
    finally:
        os.close(out)


@workload("passthrough", limit=240)
def materialized(bench):
    """What filling costs, and reads and mappings of what is filled, beside the same of the shards."""
    size = bench.size(1024 * MIB)
    for words, kind, options in (("contiguous", "hf", ()), ("dim-0", "dcp", ()), ("dim-1 rows of 4 KiB", "dcp", ("--row-bytes", 4096))):
        folder = bench.make(kind, "source", 1, size, *options)
        note = why_not(bench, folder)
        if note:
            yield Row(f"materialised, {words}", goal=0.95, note=note)
            continue

        def filled(folder=folder):
            with bench.mount(folder, OPTION) as mount:
                return timed(lambda: os.close(os.open(mount / "raw" / KEY, os.O_RDONLY)), mount.server)

        samples = interleave({"native": lambda: bench.read("read", shards(folder, size)), "fill": filled,
                              "write": lambda: timed(lambda: bare_write(bench, shards(folder, size)))}, bench.rounds)
        yield ratio_row(f"{words}: filling, at the first open", "one pread of the shards", samples["native"], samples["fill"], size, better=LOWER, goal=1.5)
        yield ratio_row(f"{words}: filling, at the first open", "a bare write of the same bytes", samples["write"], samples["fill"], size, better=LOWER)
        with bench.mount(folder, OPTION) as mount:
            file = checked(bench, mount, folder, size)
            samples = interleave({"cat": lambda: run(["cat", *data_files(folder)]), "mount": lambda: run(["cat", file], mount.server)}, bench.rounds)
            yield ratio_row(f"{words}: cat", "cat of the shards", samples["cat"], samples["mount"], size, goal=0.95, rss=None)
            for mode, way in (("read", "pread 1 MiB"), ("mapped", "mapped")):
                samples = interleave({"native": lambda: bench.read(mode, shards(folder, size)), "mount": lambda: bench.read(mode, [file], mount.server)}, bench.rounds)
                yield ratio_row(f"{words}: {way}", "the shards", samples["native"], samples["mount"], size, goal=0.95)
            for threads, readers in ((1, "1 reader"), (64, "64 readers")):
                how = {"block": 4096, "count": bench.size(1 << 17), "threads": threads}
                samples = interleave({"native": lambda: bench.read("random", shards(folder, size), **how),
                                      "mount": lambda: bench.read("random", [file], mount.server, **how)}, bench.rounds)
                yield ratio_row(f"{words}: random 4 KiB, {readers}", "the shards", samples["native"], samples["mount"], how["count"] * how["block"], goal=0.95)
