# SPDX-License-Identifier: MIT
"""What a workload is: a function that yields rows, with a name, a family and a time limit; and what it is given."""
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import typing

from suite import measure
from suite.mount import BareServer, Mount

HERE = pathlib.Path(__file__).resolve().parent.parent
ROOT = HERE.parent.parent

FAMILIES = {  # in the report's order
    "reads": "Reads",
    "metadata": "Names and metadata",
    "saving": "Saving through the mount",
    "conversions": "Conversions",
    "passes": "One pass over every byte",
    "loading": "Loading a model",
    "passthrough": "Materialised files and passthrough (root)",
    "remote": "From a server",
    "scaling": "Against size",
}


@dataclasses.dataclass
class Workload:
    name: str
    family: str
    function: typing.Callable
    limit: int  # seconds
    peers: bool  # runs by the peers' Python where that is there

    @property
    def about(self):
        return (self.function.__doc__ or "").strip().splitlines()[0]


REGISTRY = {}


def workload(family, limit=120, peers=False):
    """Registers a generator of rows and curves under its function's name. `limit` is in seconds, of a full run."""
    def register(function):
        name = function.__name__.replace("_", "-")
        REGISTRY[name] = Workload(name, family, function, limit, peers)
        return function
    return register


class Bench:
    """What a workload is given: the binary, a folder of its own, sizes, tools and the peers' Python."""

    def __init__(self, binary, work, quick=False, rounds=5, peers=None):
        self.binary, self.work, self.quick, self.peers = str(binary), pathlib.Path(work), quick, peers
        self.rounds = 2 if quick else rounds
        self.cache = self.work / "cache"

    def size(self, full):
        """Bytes or counts; an eighth of them for a smoke run."""
        return full // 8 if self.quick else full

    def mount(self, source, options=""):
        return Mount(self.binary, source, self.cache, options)

    def bare(self, folder, size, row=0):
        """A server that only answers, over the bytes of `shards`: what any FUSE server reaches. row: bytes of a row, of shards by columns."""
        flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], stdout=subprocess.PIPE, check=False).stdout.decode().split()
        return BareServer(self.tool("bench_server", *flags), self.work, columns(folder, size) if row else shards(folder, size), row)

    def make(self, kind, name, tensors, size, *options):
        """A checkpoint of make_checkpoint.py, on the disk when this returns. size: bytes a tensor."""
        folder = self.work / name
        measure.run([sys.executable, HERE / "make_checkpoint.py", kind, folder, "--tensors", tensors, "--bytes", size, *options])
        os.sync()  # nothing is written back while we measure
        return folder

    def unshard(self, *arguments):
        """Runs the command to its end."""
        return measure.run([self.binary, *arguments, "-o", f"cache_dir={self.cache}"])

    def forget_index(self):
        shutil.rmtree(self.cache, ignore_errors=True)

    def tool(self, name, *libraries):
        """A C program beside this suite, built when it is first asked for."""
        path = self.work / name
        if not path.exists():
            compiler = shutil.which(os.environ.get("CC", "cc"))
            if not compiler:
                raise measure.Failed("no C compiler")
            subprocess.run([compiler, "-O2", "-D_GNU_SOURCE", "-I", ROOT, "-o", path, HERE / f"{name}.c", *libraries, "-lpthread"],
                           check=True, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(self.work)})
        return path

    def read(self, mode, ranges, server=None, **options):
        """One pass of bench_reader over [(file, offset, bytes)] or files: a Sample of what is within the program."""
        return self.passes(mode, ranges, server, **options)[0]

    def passes(self, mode, ranges, server=None, **options):
        words = [w for k, v in options.items() for w in (f"--{k}", v)]
        if server:
            words += ["--server", server]
        files = [":".join(map(str, r)) if isinstance(r, tuple) else r for r in ranges]
        lines = measure.run_json([self.tool("bench_reader"), mode, *words, *files])
        return [measure.Sample(line["seconds"], line["cpu"]) for line in lines]


def drop_pages(*files):
    """Their bytes leave the page cache, if nobody maps them."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def data_files(folder):
    return sorted(p for p in pathlib.Path(folder).iterdir() if p.suffix in (".distcp", ".safetensors", ".pt", ".bin"))


def shards(folder, size):
    """The bytes of the shards that make `size` bytes of tensors: [(file, offset, bytes)]; headers count where files are smaller."""
    out, left = [], size
    for f in data_files(folder):
        part = min(left, f.stat().st_size)
        out.append((f, f.stat().st_size - part, part))
        left -= part
    return out


def columns(folder, size):
    """Equal parts at the end of each file, `size` bytes together."""
    files = data_files(folder)
    part = size // len(files)
    return [(f, f.stat().st_size - part, part) for f in files]


def same_bytes(command, path):
    """Does the command print what the file holds? Streamed, as both are large."""
    with open(path, "rb") as f, subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE) as p:
        while True:
            ours, theirs = f.read(measure.MIB), p.stdout.read(measure.MIB)
            if ours != theirs:
                p.kill()
                return False
            if not ours:
                return p.wait() == 0
