#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measures a mount against plain reads of the same bytes: bench.py [--unshard BIN] [--quick] [--write FILE]

read   warm 1 MiB reads of one tensor through the mount, beside reads of the same bytes of
       its shards (what `cat` does); interleaved rounds, medians. CPU is that of the reader
       and of the server together: on a busy machine it is the figure to trust.
scan   `unshard info` of a torch .metadata of a million chunks with an empty index, beside
       Python's own unpickling of the same file.
cat    the same tensors read by `dd bs=1M` from the mount, beside `cat` of all their shards:
       two programs as people run them, with all that they cost.
zarr   a zarr array of blosc-lz4 chunks (float32 weights) read by `dd bs=1M` from a fresh mount,
       beside the library alone: a C loop over the same files, as many threads as jobs=.
save   one safetensors file copied into a new directory of a mount and published (fsync of that
       directory), beside `cp --reflink=never` and fsync of the same file; interleaved rounds.
first  from `unshard mount` to the first byte of a tensor, with a warm index.
remote the same from a server that takes its time: bench_remote.py.

--write FILE replaces what stands below the line `<!-- measured -->` there. Needs Python 3.9
and, for zarr, cc and libblosc; the files take about 1 GiB, and must fit the page cache.
"""
import argparse
import datetime
import json
import mmap
import os
import pathlib
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20
MARK = "<!-- measured -->\n"


def generate(*args):
    subprocess.run([sys.executable, str(HERE / "make_checkpoint.py"), *map(str, args)], check=True)


def threads_cpu(pid):
    """Seconds on a core of all threads of a process; the scheduler counts in nanoseconds."""
    total = 0
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError):
            continue
    return total / 1e9


class Mount:
    def __init__(self, binary, source, cache, options=""):
        self.binary, self.path = binary, tempfile.mkdtemp(prefix="mnt-", dir=cache.parent)
        begin = time.monotonic()
        subprocess.run([binary, "mount", str(source), self.path, "-o", f"cache_dir={cache}{options}"], check=True)
        self.mounted_in = time.monotonic() - begin
        self.server = self.find_server()

    def find_server(self):
        for proc in pathlib.Path("/proc").iterdir():
            try:
                words = (proc / "cmdline").read_bytes().split(b"\0") if proc.name.isdigit() else []
            except OSError:
                continue
            if self.path.encode() in words and b"mount" in words:
                return int(proc.name)
        raise SystemExit("the server of the mount is not to be found")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run([self.binary, "umount", self.path], check=False)
        os.rmdir(self.path)


def read_all(files, buffer):
    """1 MiB preadv loops over [(file, offset, bytes)]."""
    for path, at, size in files:
        fd = os.open(path, os.O_RDONLY)
        end = at + size
        while at < end:
            with memoryview(buffer)[:min(MIB, end - at)] as part:
                n = os.preadv(fd, [part], at)
            if not n:
                raise SystemExit(f"{path}: ends before {end}")
            at += n
        os.close(fd)


def read_mapped(files, buffer):
    """Copies out of a shared mapping, window by window."""
    for path, at, size in files:
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m, memoryview(m) as view:
            for i in range(at, at + size, MIB):
                n = min(MIB, at + size - i)
                buffer[:n] = view[i:i + n]


def timed(read, files, buffer, server):
    """(seconds, CPU seconds of reader and server)"""
    cpu = time.process_time() + (threads_cpu(server) if server else 0)
    begin = time.monotonic()
    read(files, buffer)
    seconds = time.monotonic() - begin
    return seconds, time.process_time() + (threads_cpu(server) if server else 0) - cpu


def measure(read, ours, theirs, server, rounds):
    """Medians of both, of the ratio round by round; the first round only warms."""
    buffer, rows = mmap.mmap(-1, MIB), []  # page-aligned, as large allocations are
    for _ in range(rounds + 1):
        rows.append((timed(read, theirs, buffer, None), timed(read, ours, buffer, server)))
    rows = rows[1:]
    size = sum(s for _, _, s in ours) / MIB
    return {"native": size / statistics.median(n[0] for n, _ in rows), "mount": size / statistics.median(m[0] for _, m in rows),
            "ratio": statistics.median(n[0] / m[0] for n, m in rows), "best": min(n[0] for n, _ in rows) / min(m[0] for _, m in rows),
            "native_cpu": 1e6 * statistics.median(n[1] for n, _ in rows) / size, "mount_cpu": 1e6 * statistics.median(m[1] for _, m in rows) / size}


def shards(folder, size):
    """The shards' bytes that make a tensor: all of the data files, cut to its size."""
    out, left = [], size
    for f in sorted(p for p in folder.iterdir() if p.suffix in (".distcp", ".safetensors")):
        part = min(left, f.stat().st_size)
        out.append((f, f.stat().st_size - part if f.suffix == ".safetensors" else 0, part))
        left -= part
    return out


def mount_agrees(command, path):
    """Does the command print what the file holds? Streamed, as both are large."""
    with open(path, "rb") as f, subprocess.Popen(command, stdout=subprocess.PIPE) as p:
        while True:
            ours, theirs = f.read(MIB), p.stdout.read(MIB)
            if ours != theirs:
                return False
            if not ours:
                return p.wait() == 0


def bench_reads(binary, work, size, rounds):
    cases = [("one contiguous run", "hf", 0), ("cut by rows, 4 ranks", "dcp", 0), ("cut by columns, rows of 64 KiB", "dcp", 65536),
             ("cut by columns, rows of 4 KiB", "dcp", 4096), ("cut by columns, rows of 256 B", "dcp", 256)]
    lines = ["| tensor | way | native GB/s | mount GB/s | wall ratio, median (best) | native CPU µs/MiB | reader + server CPU µs/MiB |",
             "|---|---|---|---|---|---|---|"]
    for title, kind, row in cases:
        folder, cache = work / f"{kind}{row}", work / "cache"
        generate(kind, folder, "--tensors", 1, "--bytes", size, *(["--row-bytes", row] if row else []))
        os.sync()  # no writing back while we measure
        with Mount(binary, folder, cache) as m:
            file = pathlib.Path(m.path) / "raw" / "model.layers.0.weight"
            if file.stat().st_size != size:
                raise SystemExit(f"{file}: {file.stat().st_size} bytes, not {size}")
            if not mount_agrees([binary, "cat", str(folder), "model.layers.0.weight", "-o", f"cache_dir={cache}"], file):
                raise SystemExit(f"{title}: the mount and `unshard cat` differ")
            for way, read in (("read 1 MiB", read_all), ("mapped", read_mapped)) if not row else (("read 1 MiB", read_all),):
                r = measure(read, [(file, 0, size)], shards(folder, size), m.server, rounds)
                lines.append(f"| {title} | {way} | {r['native'] * MIB / 1e9:.2f} | {r['mount'] * MIB / 1e9:.2f} | {r['ratio']:.2f} ({r['best']:.2f}) | "
                             f"{r['native_cpu']:.0f} | {r['mount_cpu']:.0f} |")
                print(lines[-1], flush=True)
        shutil.rmtree(folder)
    return lines


def program(command, server):
    """(seconds, CPU seconds of the program and of the server)"""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    before, begin = threads_cpu(server) if server else 0, time.monotonic()
    subprocess.run([str(c) for c in command], stdout=subprocess.DEVNULL, check=True)
    seconds, now = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return seconds, cpu + (threads_cpu(server) - before if server else 0)


def bench_cat(binary, work, size, rounds):
    cases = [("one contiguous run", "hf", 0), ("cut by rows, 4 ranks", "dcp", 0), ("cut by columns, rows of 64 KiB", "dcp", 65536),
             ("cut by columns, rows of 4 KiB", "dcp", 4096)]
    lines = ["| tensor | cat GB/s | mount GB/s | wall ratio | cat CPU µs/MiB | reader + server CPU µs/MiB | CPU ratio |", "|---|---|---|---|---|---|---|"]
    for title, kind, row in cases:
        folder, rows = work / f"cat-{kind}{row}", []
        generate(kind, folder, "--tensors", 1, "--bytes", size, *(["--row-bytes", row] if row else []))
        os.sync()
        with Mount(binary, folder, work / "cache") as m:
            cat = ["cat", *(f for f, _, _ in shards(folder, size))]
            dd = ["dd", f"if={m.path}/raw/model.layers.0.weight", "of=/dev/null", "bs=1M", "status=none"]
            for _ in range(rounds + 1):
                rows.append((program(cat, None), program(dd, m.server)))
        shutil.rmtree(folder)
        mib, rows = size / MIB, rows[1:]
        times = [statistics.median(r[i][0] for r in rows) for i in (0, 1)]
        cpu = [statistics.median(r[i][1] for r in rows) for i in (0, 1)]
        lines.append(f"| {title} | {size / times[0] / 1e9:.2f} | {size / times[1] / 1e9:.2f} | {statistics.median(c[0] / d[0] for c, d in rows):.2f} | "
                     f"{1e6 * cpu[0] / mib:.0f} | {1e6 * cpu[1] / mib:.0f} | {cpu[1] / cpu[0]:.2f} |")
        print(lines[-1], flush=True)
    return lines


def bench_zarr(binary, work, mib, rounds):
    """Whole rows of the array in a chunk, and tiles of it; each round mounts anew, since what was decoded stays."""
    tool, cores = work / "bench_zarr", len(os.sched_getaffinity(0))
    subprocess.run(["cc", "-O2", "-D_GNU_SOURCE", "-I", str(HERE.parent.parent), "-o", str(tool), str(HERE / "bench_zarr.c"), "-lblosc", "-lpthread"], check=True)
    lines = ["| chunks of 4 MiB | threads | blosc alone GB/s | mount GB/s | wall ratio, median (best) | blosc CPU µs/MiB | reader + server CPU µs/MiB |",
             "|---|---|---|---|---|---|---|"]
    for title, shape in (("256 x 4096, whole rows", (mib * 64, 4096, 256, 4096)), ("1024 x 1024, tiles", (mib * 16, 16384, 1024, 1024))):
        folder, cache = work / "zarr", work / "zarr-cache"
        (folder / "w").mkdir(parents=True)
        shape = [str(n) for n in shape]
        subprocess.run([tool, "make", folder / "w", *shape], check=True)
        os.sync()
        for threads in sorted({1, cores}):
            rows = []
            for _ in range(rounds + 1):
                alone = program([tool, "decode", folder / "w", *shape, threads], None)
                with Mount(binary, folder, cache, f",jobs={threads}") as m:
                    rows.append((alone, program(["dd", f"if={m.path}/raw/w", "of=/dev/null", "bs=1M", "status=none"], m.server)))
            rows = rows[1:]
            times = [statistics.median(r[i][0] for r in rows) for i in (0, 1)]
            cpu = [1e6 * statistics.median(r[i][1] for r in rows) / mib for i in (0, 1)]
            best = min(r[0][0] for r in rows) / min(r[1][0] for r in rows)
            lines.append(f"| {title} | {threads} | {mib * MIB / times[0] / 1e9:.2f} | {mib * MIB / times[1] / 1e9:.2f} | "
                         f"{statistics.median(a[0] / m[0] for a, m in rows):.2f} ({best:.2f}) | {cpu[0]:.0f} | {cpu[1]:.0f} |")
            print(lines[-1], flush=True)
        shutil.rmtree(folder)
        shutil.rmtree(cache, ignore_errors=True)
    return lines


def child(command):
    """(seconds, peak RSS in MiB, output) of one process."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # our own peak counts in a child's
    begin = time.monotonic()
    p = subprocess.Popen(command, stdout=subprocess.PIPE)
    out = p.stdout.read().decode()
    _, status, usage = os.wait4(p.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: wait status {status}")
    return time.monotonic() - begin, usage.ru_maxrss / 1024, out


def bench_scan(binary, work, chunks, per_tensor):
    folder = work / "scan"
    folder.mkdir()
    metadata = folder / ".metadata"
    subprocess.run([sys.executable, str(HERE / "make_metadata.py"), str(metadata), str(chunks), str(per_tensor)], check=True)
    for rank in range(per_tensor):  # holes as long as the metadata says
        with open(folder / f"__{rank}_0.distcp", "wb") as f:
            f.truncate(chunks // per_tensor * 14680064 + 14681563)
    times = []
    for _ in range(3):
        shutil.rmtree(work / "scan-cache", ignore_errors=True)
        times.append(child([binary, "info", str(folder), "-o", f"cache_dir={work}/scan-cache"])[:2])
    seconds, peak = statistics.median(t[0] for t in times), max(t[1] for t in times)
    warm = statistics.median(child([binary, "info", str(folder), "-o", f"cache_dir={work}/scan-cache"])[0] for _ in range(5))
    python, python_peak, _ = child([sys.executable, str(HERE / "make_metadata.py"), "--load", str(metadata)])
    size = metadata.stat().st_size
    shutil.rmtree(folder)
    return ["| what | seconds | chunks/s | peak RSS MiB |", "|---|---|---|---|",
            f"| `unshard info`, empty index: {chunks} chunks, {size / MIB:.0f} MiB of .metadata | {seconds:.2f} | {chunks / seconds:.0f} | {peak:.0f} |",
            f"| `unshard info`, warm index | {warm:.3f} | | |",
            f"| Python's pickle.load of the same file | {python:.2f} | {chunks / python:.0f} | {python_peak:.0f} |"]


def bench_first(binary, work, tensors):
    lines = ["| checkpoint | cold index, `unshard info` s | `unshard mount` ms | first byte after it ms | whole ms |", "|---|---|---|---|---|"]
    for kind, size in (("hf", 10 << 20), ("dcp", 10 << 20)):
        folder, cache = work / f"first-{kind}", work / f"first-cache-{kind}"
        generate(kind, folder, "--tensors", tensors, "--bytes", size, "--sparse")
        cold = child([binary, "info", str(folder), "-o", f"cache_dir={cache}"])[0]
        rows = []
        for i in range(7):
            with Mount(binary, folder, cache) as m:
                begin = time.monotonic()
                with open(f"{m.path}/raw/model.layers.{(i * 7919) % tensors}.weight", "rb", buffering=0) as f:
                    f.read(4096)
                rows.append((m.mounted_in, time.monotonic() - begin))
        lines.append(f"| {kind}, {tensors} tensors, {tensors * size / 1e12:.2f} TB | {cold:.2f} | {1e3 * statistics.median(r[0] for r in rows):.0f} | "
                     f"{1e3 * statistics.median(r[1] for r in rows):.1f} | {1e3 * statistics.median(sum(r) for r in rows):.0f} |")
        shutil.rmtree(folder)
    return lines


def big_file(path, size, tensors=32):
    """A safetensors file of `tensors` F32 matrices, `size` bytes in all."""
    each = size // tensors // 4096 * 4096
    header = {f"layers.{i}.weight": {"dtype": "F32", "shape": [each // 4096, 1024], "data_offsets": [i * each, (i + 1) * each]}
              for i in range(tensors)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _ in range(tensors):
            f.write(os.urandom(each))
        os.fsync(f.fileno())


def copy_durably(source, target, *synced):
    """(seconds, CPU seconds of cp) of a copy that is on the disk at the end; a mount publishes at the fsync of a directory."""
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "--reflink=never", source, target], check=True)
    for path in synced:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - begin, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def peak_rss(pid):
    return next(int(line.split()[1]) / 1024 for line in open(f"/proc/{pid}/status") if line.startswith("VmHWM"))


def bench_save(binary, work, size, rounds):
    folder, file = work / "save", work / "save.safetensors"
    big_file(file, size)
    rows = {"cp and fsync": [], "hf": [], "dcp:ranks=8": [], "torch_dist:ranks=8": []}
    peak = dict.fromkeys(rows, 0)
    for i in range(rounds):
        for kind, times in rows.items():
            folder.mkdir()
            if kind == "cp and fsync":
                times.append(copy_durably(file, folder / "model.safetensors", folder / "model.safetensors", folder))
            else:
                with Mount(binary, folder, work / f"save-cache-{i}-{kind[:3]}", f",rw,save={kind}") as m:
                    os.mkdir(f"{m.path}/new")
                    cpu = threads_cpu(m.server)
                    seconds, own = copy_durably(file, f"{m.path}/new/model.safetensors", f"{m.path}/new")
                    assert os.path.isdir(folder / "new"), "it is not published"
                    times.append((seconds, own + threads_cpu(m.server) - cpu))
                    peak[kind] = max(peak[kind], peak_rss(m.server))
            shutil.rmtree(folder)
    floor = rows["cp and fsync"]
    lines = [f"{size / MIB:.0f} MiB in 32 tensors; medians of {rounds} rounds.", "",
             "| what | seconds, median (best) | speed against cp | CPU seconds | peak RSS MiB of the server |", "|---|---|---|---|---|"]
    for kind, times in rows.items():
        ratio = statistics.median(f[0] / t[0] for f, t in zip(floor, times))
        name = kind if times is floor else f"`save={kind}`, published"
        lines.append(f"| {name} | {statistics.median(t[0] for t in times):.2f} ({min(t[0] for t in times):.2f}) | {ratio:.2f} | "
                     f"{statistics.median(t[1] for t in times):.2f} | {peak[kind]:.0f} |")
    file.unlink()
    return lines


def machine(work):
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    memory = int(next(line.split()[1] for line in open("/proc/meminfo") if line.startswith("MemTotal"))) >> 20
    kind = subprocess.run(["df", "--output=fstype", str(work)], stdout=subprocess.PIPE, check=False).stdout.decode().split()[-1]
    return f"{os.cpu_count()} cores ({cpu}), {memory} GiB, Linux {platform.release()}, files on {kind}, Python {platform.python_version()}"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--unshard", default=str(HERE.parent.parent / "build-release/cli/unshard"))
    p.add_argument("--quick", action="store_true", help="small files, few rounds: only that it runs")
    p.add_argument("--write", metavar="FILE")
    p.add_argument("--only", choices=["read", "cat", "zarr", "scan", "save", "first", "remote"])
    a = p.parse_args()
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        print("/dev/fuse is not to be had: skipped")
        return 77
    binary, load = os.path.abspath(a.unshard), os.getloadavg()[0]
    parts = []
    with tempfile.TemporaryDirectory(prefix="unshardfs-bench-") as scratch:
        work = pathlib.Path(scratch)
        head = f"{datetime.date.today()}, {machine(work)}; load average {load:.1f} at the start."
        if a.only in (None, "read"):
            parts += ["## Warm reads", *bench_reads(binary, work, (8 if a.quick else 192) * MIB, 2 if a.quick else 9)]
        if a.only in (None, "cat"):
            parts += ["## Against cat", *bench_cat(binary, work, (8 if a.quick else 512) * MIB, 2 if a.quick else 7)]
        if a.only in (None, "zarr"):
            parts += ["## Compressed zarr chunks", *bench_zarr(binary, work, 64 if a.quick else 1024, 2 if a.quick else 7)]
        if a.only in (None, "scan"):
            parts += ["## A million chunks", *bench_scan(binary, work, 20000 if a.quick else 1000000, 100 if a.quick else 1000)]
        if a.only in (None, "save"):
            parts += ["## Saving through a mount", *bench_save(binary, work, (64 if a.quick else 2048) * MIB, 2 if a.quick else 3)]
        if a.only in (None, "first"):
            parts += ["## Mount to first byte", *bench_first(binary, work, 200 if a.quick else 20000)]
        if a.only in (None, "remote"):
            import bench_remote  # which imports this file
            parts += ["## From a server", *bench_remote.run(binary, work, (16 if a.quick else 1024) * MIB, 1 if a.quick else 5)]
    text = head + "\n\n" + "\n".join("\n" + line + "\n" if line.startswith("## ") else line for line in parts) + "\n"
    print(text)
    if a.write:
        page = pathlib.Path(a.write)
        before = page.read_text(encoding="utf-8").partition(MARK)[0]
        page.write_text(before + MARK + "\n" + text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
