#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measures files that the kernel reads by itself (materialize=) against reads of the shards: bench_passthrough.py [--unshard BIN] [--json]

read, mapped  a materialised tensor beside the same bytes of its shards, interleaved rounds,
              medians; CPU is that of the reader and of the server together
fill          the first open, which makes the copy, in reads of the same bytes of the shards
small         what opening and reading a small tensor costs by each way: at the first
              open, and at any later one

Needs root, Linux 6.9 and room for twice --bytes on the disk of TMPDIR.
"""
import argparse
import json
import mmap
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from bench import MIB, Mount, generate, measure, read_all, read_mapped, shards, threads_cpu, timed

CASES = [("one contiguous run", "hf", 0), ("cut by rows, 4 ranks", "dcp", 0), ("cut by columns, rows of 4 KiB", "dcp", 4096)]


def state(mount):
    return json.loads((pathlib.Path(mount.path) / ".unshard/counters.json").read_text())


def bench_fill(binary, folder, cache, size, rounds):
    """Of the first open of a tensor: (seconds, CPU seconds), each divided by a read of its shards."""
    wall, cpu, per_mib = [], [], []
    buffer = mmap.mmap(-1, MIB)
    for _ in range(rounds + 1):
        native = timed(read_all, shards(folder, size), buffer, None)
        with Mount(binary, folder, cache, f",materialize={2 * size}:settled=0") as m:
            file = f"{m.path}/raw/model.layers.0.weight"
            os.stat(file)
            fill = timed(lambda *_: os.close(os.open(file, os.O_RDONLY)), None, None, m.server)
            if state(m)["bytes_materialized"] != size:
                raise SystemExit(f"not materialised: {state(m)}")
        wall.append(fill[0] / native[0])
        cpu.append(fill[1] / native[1])
        per_mib.append(1e6 * fill[1] / (size / MIB))
    return {"fill_in_reads": statistics.median(wall[1:]), "fill_cpu_in_reads": statistics.median(cpu[1:]),
            "fill_cpu": statistics.median(per_mib[1:])}


def bench_large(binary, work, size, rounds):
    for title, kind, row in CASES:
        folder, cache = work / f"{kind}{row}", work / "cache"
        generate(kind, folder, "--tensors", 1, "--bytes", size, *(["--row-bytes", row] if row else []))
        os.sync()
        out = {"tensor": title} | bench_fill(binary, folder, cache, size, rounds)
        with Mount(binary, folder, cache, f",materialize={2 * size}:settled=0") as m:
            file = pathlib.Path(m.path) / "raw" / "model.layers.0.weight"
            for way, read in ("read", read_all), ("mapped", read_mapped):
                out[way] = measure(read, [(file, 0, size)], shards(folder, size), m.server, rounds)
        shutil.rmtree(folder)
        yield out


def each(paths, way, server):
    """Microseconds of CPU and of the clock a file to open it and to read or map all of it."""
    cpu, begin = time.process_time() + threads_cpu(server), time.monotonic()
    for path in paths:
        with open(path, "rb", buffering=0) as f:
            if way == "read":
                while f.read(MIB):
                    pass
            else:
                with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
                    m[:]
    wall = time.monotonic() - begin
    return [1e6 * x / len(paths) for x in (time.process_time() + threads_cpu(server) - cpu, wall)]


def bench_small(binary, work, kib):
    folder, cache, n = work / f"small{kib}", work / "cache", 200
    generate("dcp", folder, "--tensors", n, "--bytes", kib << 10)
    os.sync()
    out = {"kib": kib}
    for name, options in ("server", ""), ("materialize", ",materialize=1G:settled=0"):
        for way in "read", "mapped":
            with Mount(binary, folder, cache, options) as m:
                paths = [f"{m.path}/raw/{f}" for f in os.listdir(m.path + "/raw")]
                for path in paths:
                    os.stat(path)
                out[f"{name}_{way}_first"] = each(paths, way, m.server)
                out[f"{name}_{way}_later"] = each(paths, way, m.server)
    shutil.rmtree(folder)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unshard", default="build/cli/unshard")
    parser.add_argument("--bytes", type=int, default=256 * MIB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--small", action="store_true", help="small tensors too")
    args = parser.parse_args()
    binary = str(pathlib.Path(args.unshard).resolve())
    work = pathlib.Path(tempfile.mkdtemp(prefix="ufs-bench-"))
    result = {"load": os.getloadavg()[0], "large": [], "small": []}
    try:
        for r in bench_large(binary, work, args.bytes, args.rounds):
            result["large"].append(r)
            if not args.json:
                ways = "; ".join(f"{w} {r[w]['ratio']:.2f} of native (best {r[w]['best']:.2f}), CPU {r[w]['mount_cpu']:.0f} for {r[w]['native_cpu']:.0f} us/MiB"
                                 for w in ("read", "mapped"))
                print(f"{r['tensor']}: {ways}; fill {r['fill_in_reads']:.2f} reads, CPU {r['fill_cpu_in_reads']:.2f} reads ({r['fill_cpu']:.0f} us/MiB)", flush=True)
        for kib in (4, 16, 64, 256, 1024) if args.small else ():
            result["small"].append(bench_small(binary, work, kib))
            if not args.json:
                print({k: v if isinstance(v, int) else [round(x) for x in v] for k, v in result["small"][-1].items()}, flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    result["load_after"] = os.getloadavg()[0]
    print(json.dumps(result) if args.json else f"load average {result['load']:.1f} to {result['load_after']:.1f}")


if __name__ == "__main__":
    main()
