#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measures reading from a server: 30 ms a request, 300 MB/s in all; a part of bench.py (--only remote).

speed     `dd bs=1M` of a tensor of 1 GiB from a fresh mount with a warm index, beside `curl --parallel` of the same bytes in
          ranges of 4 MiB on as many connections; interleaved, medians of the rounds.
requests  that the server saw for a random read of 4 KiB, for one tensor of a large checkpoint, and for the first byte with a
          warm and with a cold index; round trips are requests that do not overlap in time.
memory    private memory of the mount's process at its highest, beside the same read of local shards.
"""
import json
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request

import bench

CONNECTIONS, DELAY, RATE, RANGE = 16, 0.03, 300e6, 4 << 20
KEY = "model.layers.0.weight"
SERVER = bench.HERE.parent / "remote" / "fault_server.py"


class Server:
    """The tests' server in a process of its own."""

    def __init__(self, root, delay=DELAY, rate=RATE):
        self.process = subprocess.Popen([sys.executable, str(SERVER), str(root), "--delay", str(delay), "--rate", str(rate)],
                                        stdout=subprocess.PIPE, text=True)
        self.url = "http://127.0.0.1:" + self.process.stdout.readline().split()[1]
        self.seen = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def new(self):
        """The requests since the last time."""
        with urllib.request.urlopen(self.url + "/-/log") as f:
            log = json.load(f)
        new, self.seen = log[self.seen:], len(log)
        return new


def round_trips(requests):
    """How many of them had to wait for one before: the server notes a request when its delay is over."""
    trips, last = 0, None
    for at in sorted(r["at"] for r in requests):
        if last is None or at - last > DELAY * 0.9:
            trips, last = trips + 1, at
    return trips


def private_peak(server_pid, work):
    """Runs work() and returns its result and the largest RssAnon seen meanwhile, in MiB."""
    process, peak = work(), 0
    while process.poll() is None:
        for line in pathlib.Path(f"/proc/{server_pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                peak = max(peak, int(line.split()[1]))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{process.args}: {process.returncode}")
    return peak / 1024


def curl(work, url, shards):
    """All their bytes in ranges, as a config of curl, which takes hundreds of them."""
    config = work / "curl.config"
    with open(config, "w", encoding="utf-8") as f:
        for path, at, size in shards:
            for start in range(at, at + size, RANGE):
                last = min(start + RANGE, at + size) - 1
                f.write(f'url = "{url}/{path.name}"\nrange = "{start}-{last}"\noutput = "/dev/null"\n')
    return ["curl", "--silent", "--no-progress-meter", "--fail", "--parallel", "--parallel-immediate", "--parallel-max", str(CONNECTIONS), "--config", str(config)]


def dd(mount):
    return ["dd", f"if={mount.path}/raw/{KEY}", "of=/dev/null", "bs=1M", "status=none"]


def timed(command):
    begin = time.monotonic()
    subprocess.run(command, check=True)
    return time.monotonic() - begin


def empty_blocks(work):
    shutil.rmtree(work / "cache" / "blocks", ignore_errors=True)


def measure_speed(binary, work, server, name, size, rounds):
    """A row for each way: curl's seconds and ours round by round; the index is warm, the blocks are cold."""
    url, lines = f"{server.url}/{name}", []
    command = curl(work, url, bench.shards(work / name, size))
    ways = {"blocks kept on disk": "", "cache_size=0": ",cache_size=0"}
    rows = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, options in ways.items():
            floor = timed(command)
            empty_blocks(work)
            with bench.Mount(binary, url + "/", work / "cache", options) as m:
                rows[way].append((floor, timed(dd(m))))
    for way, times in rows.items():
        ours, floor = (statistics.median(t[i] for t in times[1:]) for i in (1, 0))
        ratio = statistics.median(f / o for f, o in times[1:])
        best = min(f for f, _ in times[1:]) / min(o for _, o in times[1:])
        lines.append(f"| {name}, {way} | {size / floor / 1e6:.0f} | {size / ours / 1e6:.0f} | {ratio:.2f} ({best:.2f}) |")
        print(lines[-1], flush=True)
    with bench.Mount(binary, url + "/", work / "cache", "") as m:
        warm = [timed(dd(m)) for _ in range(3)]
        lines.append(f"| {name}, a second time, from the blocks | | {size / statistics.median(warm) / 1e6:.0f} | |")
        print(lines[-1], flush=True)
    return lines


def data(requests):
    return [r for r in requests if r["status"] == 206]


def first_byte(binary, work, server, name, cold):
    """(round trips, requests, milliseconds) from `unshard mount` to the first byte of a tensor."""
    if cold:
        shutil.rmtree(work / "cache", ignore_errors=True)
    empty_blocks(work)
    server.new()
    with bench.Mount(binary, f"{server.url}/{name}/", work / "cache", "") as m:
        with open(f"{m.path}/raw/{KEY}", "rb", buffering=0) as f:
            begin = time.monotonic()
            f.read(4096)
            seconds = m.mounted_in + time.monotonic() - begin
        new = server.new()
    return round_trips(new), len(new), seconds * 1e3


def measure_requests(binary, work, server, name, size):
    lines = []
    for cold in (True, False):
        rows = [first_byte(binary, work, server, name, cold) for _ in range(5)]
        trips, requests, ms = (statistics.median(r[i] for r in rows) for i in range(3))
        lines.append(f"| {name}: mount to first byte, {'cold' if cold else 'warm'} index | {trips:.0f} round trips, {requests:.0f} requests, {ms:.0f} ms |")
    empty_blocks(work)
    with bench.Mount(binary, f"{server.url}/{name}/", work / "cache", "") as m:
        chance = random.Random(1)
        with open(f"{m.path}/raw/{KEY}", "rb", buffering=0) as f:
            f.read(1)
            server.new()
            for _ in range(50):
                f.seek(chance.randrange(1 << 20, size - (1 << 20)))
                f.read(4096)
        new = data(server.new())
        lines.append(f"| {name}: random reads of 4 KiB | {len(new) / 50:.2f} requests, {sum(r['bytes'] for r in new) / 50 / 1024:.1f} KiB each |")
    empty_blocks(work)
    with bench.Mount(binary, f"{server.url}/{name}/", work / "cache", "") as m:
        server.new()
        timed(dd(m))
        new = server.new()
        lines.append(f"| {name}: one tensor of {size >> 20} MiB | {sum(r['bytes'] for r in new) - size} bytes more, {len(data(new))} ranges |")
    print("\n".join(lines), flush=True)
    return lines


def measure_memory(binary, work, server, name):
    peaks = []
    for source, options in ((str(work / name), ""), (f"{server.url}/{name}/", ""), (f"{server.url}/{name}/", ",cache_size=0")):
        empty_blocks(work)
        with bench.Mount(binary, source, work / "cache", options) as m:
            peaks.append(private_peak(m.server, lambda: subprocess.Popen(dd(m))))
    lines = [f"| {name}: private memory of the mount, at most | local {peaks[0]:.0f} MiB, remote {peaks[1]:.0f} MiB, with cache_size=0 {peaks[2]:.0f} MiB |"]
    print(lines[0], flush=True)
    return lines


def run(binary, work, size, rounds):
    speeds = [f"| 1 GiB tensor; 30 ms a request, 300 MB/s, {CONNECTIONS} connections | curl MB/s | mount MB/s | ratio, median (best) |".replace("1 GiB", f"{size >> 20} MiB"),
              "|---|---|---|---|"]
    counts = ["| what | measured |", "|---|---|"]
    for name in ("hf", "dcp"):
        bench.generate(name, work / name, "--tensors", 2, "--bytes", size)
    with Server(work) as server:
        for name in ("hf", "dcp"):
            subprocess.run([binary, "ls", f"{server.url}/{name}/", "-o", f"cache_dir={work}/cache"], check=True, stdout=subprocess.DEVNULL)
            speeds += measure_speed(binary, work, server, name, size, rounds)
        for name in ("hf", "dcp"):
            counts += measure_requests(binary, work, server, name, size)
            counts += measure_memory(binary, work, server, name)
    return [*speeds, "", *counts]
