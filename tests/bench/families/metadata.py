# SPDX-License-Identifier: MIT
"""Listing many names, scanning many chunks, and the time from a mount to the first byte."""
import contextlib
import os
import shutil
import statistics
import sys
import time

from suite.measure import interleave, memory, ratio_row, run, run_json
from suite.rows import LOWER, Row
from suite.workloads import HERE, workload

ENVIRONMENT = {**os.environ, "LC_ALL": "C"}


def native_tree(folder, tensors, size):
    """As many files of the same names and sizes on the disk; of holes."""
    folder.mkdir()
    for i in range(tensors):
        fd = os.open(folder / f"model.layers.{i}.weight", os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(fd, size)
        os.close(fd)


class Ext4:
    """A tree of files as an ext4 file system in one file, which is mounted anew for each look: no name of it is in memory, but its blocks are."""

    def __init__(self, bench, tensors, size):
        self.image, self.mountpoint = bench.work / "ext4", bench.work / "fresh"
        self.mountpoint.mkdir()
        with open(self.image, "wb") as f:
            f.truncate(tensors * 1024 + (64 << 20))
        run(["mkfs.ext4", "-q", "-N", 2 * tensors, self.image])
        with self.mounted("loop"):
            native_tree(self.mountpoint / "native", tensors, size)

    @staticmethod
    def why_not():
        """Why there is none on this machine."""
        if os.geteuid():
            return "not root"
        if not shutil.which("mkfs.ext4"):
            return "no mkfs.ext4"
        return None if os.path.exists("/dev/loop-control") else "no loop devices"

    @contextlib.contextmanager
    def mounted(self, options):
        run(["mount", "-o", options, self.image, self.mountpoint])
        try:
            yield
        finally:
            run(["umount", self.mountpoint])

    def first(self, command):
        with self.mounted("loop,ro"):
            return run(command(self.mountpoint / "native"), env=ENVIRONMENT)


@workload("metadata", limit=300)
def names(bench):
    """ls -l and find over 100,000 tensors, beside the same names on the disk, cached and in a fresh mount of ext4; the first time in a fresh mount, and again."""
    tensors = bench.size(100_000)
    folder = bench.make("hf", "source", tensors, 4096, "--sparse")
    native_tree(bench.work / "native", tensors, 4096)
    bench.unshard("info", folder)  # the index is warm
    commands = (("ls -l", lambda where: ["ls", "-l", where]), ("find -size", lambda where: ["find", where, "-size", "+1k"]))

    def first(command):
        with bench.mount(folder) as mount:
            return run(command(mount / "raw"), mount.server, env=ENVIRONMENT)

    ext4 = None if Ext4.why_not() else Ext4(bench, tensors, 4096)
    for words, command in commands:
        ways = {"native": lambda: run(command(bench.work / "native"), env=ENVIRONMENT), "mount": lambda: first(command)}
        if ext4:
            ways["ext4"] = lambda: ext4.first(command)
        samples = interleave(ways, bench.rounds, limit=60)
        if ext4:
            yield ratio_row(f"{words}, {tensors:,} tensors, fresh mount", "the same in a fresh mount of ext4 (loop)", samples["ext4"], samples["mount"],
                            better=LOWER, goal=1.2, rss=None)
        yield ratio_row(f"{words}, {tensors:,} tensors, fresh mount", "the same on the disk, cached", samples["native"], samples["mount"], better=LOWER,
                        goal=1.2, rss=None)
    # The lab's figures are of names that had been listed: its `find` came after two `ls` and two `ls -l` of the same mount.
    with bench.mount(folder) as mount:
        for words, command in commands:
            ways = {"native": lambda: run(command(bench.work / "native"), env=ENVIRONMENT),
                    "mount": lambda: run(command(mount / "raw"), mount.server, env=ENVIRONMENT)}
            samples = interleave(ways, bench.rounds, limit=60)
            yield ratio_row(f"{words}, {tensors:,} tensors, again", "the same on the disk, cached", samples["native"], samples["mount"], better=LOWER,
                            goal=1.2, lab=1.4, rss=memory(mount.server, "VmHWM"))


def first_byte(bench, folder, key):
    """Milliseconds from the start of `unshard mount` to 4 KiB of a tensor."""
    begin = time.monotonic()
    with bench.mount(folder) as mount:
        begin += time.monotonic() - begin - mount.mounted_in  # not what it takes to find the server
        with open(mount / "raw" / key, "rb", buffering=0) as f:
            f.read(4096)
        return 1e3 * (time.monotonic() - begin)


def first_byte_row(bench, words, folder, keys):
    taken = [first_byte(bench, folder, key) for key in keys]
    return Row(f"{words}: warm mount to the first tensor", "", statistics.median(taken), min(taken), "ms", better=LOWER, goal=50, rounds=len(taken))


def wide_checkpoint(folder, chunks, per_tensor):
    """A .metadata of many chunks; the data files are holes, but for the first tensor's items."""
    import make_checkpoint
    import make_metadata
    folder.mkdir()
    run([sys.executable, HERE / "make_metadata.py", folder / ".metadata", chunks, per_tensor])
    for rank in range(per_tensor):
        with open(folder / f"__{rank}_0.distcp", "wb") as f:
            make_checkpoint.write_blob(f, (512, 7168), True, make_checkpoint.CHUNK)
            f.truncate(chunks // per_tensor * make_metadata.BLOB)


@workload("metadata", limit=300)
def million_chunks(bench):
    """A DCP .metadata of 1,000,000 chunks: scanned, opened again, mounted; beside Python's unpickling."""
    chunks, per_tensor = bench.size(1_000_000), bench.size(1000)
    folder = bench.work / "source"
    wide_checkpoint(folder, chunks, per_tensor)

    def cold():
        bench.forget_index()
        return bench.unshard("info", folder)

    python = run_json([sys.executable, HERE / "peer.py", "unpickle", folder / ".metadata"])[0]
    samples = interleave({"cold": cold, "warm": lambda: bench.unshard("info", folder)}, bench.rounds)
    seconds = statistics.median(s.seconds for s in samples["cold"])
    yield Row(f"scan of {chunks:,} chunks, empty index", f"Python's pickle.load: {python['rss']:.0f} MiB", chunks / seconds, chunks / min(s.seconds for s in samples["cold"]),
              "chunks/s", goal=200_000, theirs=f"{python['seconds']:.2f} s", ours=f"{seconds:.2f} s", rss=max(s.rss for s in samples["cold"]), rss_goal=256,
              rounds=bench.rounds)
    warm = [1e3 * s.seconds for s in samples["warm"]]
    yield Row(f"`unshard info` of {chunks:,} chunks, warm index", "", statistics.median(warm), min(warm), "ms", better=LOWER, rounds=len(warm),
              rss=max(s.rss for s in samples["warm"]))
    yield first_byte_row(bench, f"{chunks:,} chunks", folder, ["model.layers.0.mlp.experts.0.weight"] * max(5, bench.rounds))


@workload("metadata")
def first_tensor(bench):
    """20,000 tensors of 10 MiB: from the mount to the first byte of one."""
    tensors = bench.size(20_000)
    for kind in ("hf", "dcp"):
        folder = bench.make(kind, kind, tensors, 10 << 20, "--sparse")
        bench.unshard("info", folder)
        yield first_byte_row(bench, f"{kind}, {tensors:,} tensors", folder, [f"model.layers.{(i * 7919) % tensors}.weight" for i in range(max(5, bench.rounds))])


SCANS = (("verl", "64 ranks' files of DTensors", 102_400), ("universal", "DeepSpeed universal, a file a tensor", 40_000),
         ("gguf", "GGUF, half as many words again", 100_000), ("flax", "Flax msgpack, a chunk an array", 100_000), ("zarr", "80 zarr arrays, a file a chunk", 100_000),
         ("nemo", "the same as a .nemo", 100_000), ("nemo-gz", "the same, packed by gzip", 100_000))


@workload("metadata", limit=420)
def scans(bench):
    """`unshard info` with an empty index of checkpoints of many small pieces, a kind after the other."""
    for kind, words, count in SCANS:
        folder = bench.work / kind
        chunks = run_json([sys.executable, HERE / "make_scans.py", kind, folder, bench.size(count)])[0]["chunks"]
        os.sync()
        samples = []
        for _ in range(bench.rounds + 1):
            bench.forget_index()
            samples.append(bench.unshard("info", folder))
        shutil.rmtree(folder)
        seconds = [s.seconds for s in samples[1:]]  # the first one warms
        yield Row(f"scan of {chunks:,} chunks: {words}", "", chunks / statistics.median(seconds), chunks / min(seconds), "chunks/s", goal=200_000,
                  ours=f"{statistics.median(seconds):.2f} s", rss=max(s.rss for s in samples), rss_goal=256, rounds=len(seconds))
