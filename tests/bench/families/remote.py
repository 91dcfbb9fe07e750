# SPDX-License-Identifier: MIT
"""Reading from a server: 30 ms a request, 300 MB/s in all; the floor is `curl --parallel` of the same bytes on as many connections."""
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request

from suite import measure
from suite.measure import MIB, Failed, interleave, ratio_row, run
from suite.rows import LOWER, Row
from suite.workloads import HERE, shards, workload

CONNECTIONS, DELAY, RATE, RANGE = 16, 0.03, 300e6, 4 * MIB
KEY = "model.layers.0.weight"
SERVER = HERE.parent / "remote" / "fault_server.py"
KINDS = ("hf", "dcp")


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


def curl(bench, url, ranges):
    """All their bytes in ranges of 4 MiB, as a config of curl, which takes hundreds of them."""
    config = bench.work / "curl.config"
    with open(config, "w", encoding="utf-8") as f:
        for path, at, size in ranges:
            for start in range(at, at + size, RANGE):
                last = min(start + RANGE, at + size) - 1
                f.write(f'url = "{url}/{path.name}"\nrange = "{start}-{last}"\noutput = "/dev/null"\n')
    return ["curl", "--silent", "--no-progress-meter", "--fail", "--parallel", "--parallel-immediate", "--parallel-max", CONNECTIONS, "--config", config]


def dd(mount):
    return ["dd", f"if={mount.path}/raw/{KEY}", "of=/dev/null", "bs=1M", "status=none"]


def empty_blocks(bench):
    shutil.rmtree(bench.cache / "blocks", ignore_errors=True)


def served(bench, size):
    """Both checkpoints, of two tensors each, below the folder that is served."""
    for name in KINDS:
        bench.make(name, name, 2, size)
    return Server(bench.work)


def read_fresh(bench, source, options):
    empty_blocks(bench)
    with bench.mount(source, options) as mount:
        return run(dd(mount), mount.server)


@workload("remote", limit=300)
def remote_speed(bench):
    """One tensor from a fresh mount with a warm index, without blocks on disk and with; and again from the blocks."""
    size = bench.size(1024 * MIB)
    with served(bench, size) as server:
        for name in KINDS:
            url = f"{server.url}/{name}"
            bench.unshard("ls", url + "/")
            command = curl(bench, url, shards(bench.work / name, size))
            samples = interleave({"curl": lambda: run(command), "memory": lambda: read_fresh(bench, url + "/", ",cache_size=0"),
                                  "disk": lambda: read_fresh(bench, url + "/", "")}, bench.rounds)
            for way, words in (("memory", "cache_size=0"), ("disk", "blocks kept on disk")):
                yield ratio_row(f"remote {name}, {words}", "curl --parallel", samples["curl"], samples[way], size, goal=0.9, rss=None)
            with bench.mount(url + "/") as mount:
                again = interleave({"local": lambda: run(["cat", *(p for p, _, _ in shards(bench.work / name, size))]),
                                    "mount": lambda: run(dd(mount), mount.server)}, bench.rounds)
            yield ratio_row(f"remote {name}, again from the blocks", "cat of the same bytes", again["local"], again["mount"], size, rss=None)


def data(requests):
    return [r for r in requests if r["status"] == 206]


@contextlib.contextmanager
def as_store(server):
    """The server is where s3:// leads, and nobody asks for keys."""
    before = dict(os.environ)
    os.environ.update(AWS_ENDPOINT_URL=server.url, AWS_CONFIG_FILE="/dev/null", AWS_SHARED_CREDENTIALS_FILE="/dev/null", AWS_EC2_METADATA_DISABLED="true")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def first_byte(bench, server, source, at):
    """(round trips, requests, milliseconds) from `unshard mount` to the first byte of a tensor, and of the
    bytes at `at` where its index is there: such as were not asked for before."""
    if not at:
        bench.forget_index()
        empty_blocks(bench)
    server.new()
    with bench.mount(source) as mount:
        begin = time.monotonic()
        with open(mount / "raw" / KEY, "rb", buffering=0) as f:
            os.pread(f.fileno(), 4096, at)
            seconds = mount.mounted_in + time.monotonic() - begin
        new = server.new()
    if not data(new):
        raise RuntimeError(f"{source}: what is at {at} was there already")
    return round_trips(new), len(new), seconds * 1e3


def first_byte_rows(bench, server, words, source):
    for cold, goal in ((True, 6), (False, 2)):
        taken = [first_byte(bench, server, source, 0 if cold else (8 + 16 * i) << 20) for i in range(bench.rounds)]
        trips, requests, ms = (statistics.median(t[i] for t in taken) for i in range(3))
        yield Row(f"{words}: mount to first byte, {'cold' if cold else 'warm'} index", f"{DELAY * 1e3:.0f} ms a request", trips, unit="round trips",
                  better=LOWER, goal=goal, ours=f"{requests:.0f} requests, {ms:.0f} ms", rounds=bench.rounds)


def random_requests(bench, server, name, size, count=50):
    """(requests, KiB) a random read of 4 KiB."""
    empty_blocks(bench)
    with bench.mount(f"{server.url}/{name}/") as mount, open(mount / "raw" / KEY, "rb", buffering=0) as f:
        chance = random.Random(1)
        f.read(1)
        server.new()
        for _ in range(count):
            f.seek(chance.randrange(1 << 20, size - (1 << 20)))
            f.read(4096)
        new = data(server.new())
    return len(new) / count, sum(r["bytes"] for r in new) / count / 1024


def private_peak(mount):
    """The largest RssAnon of the server while a tensor is read, in MiB."""
    with subprocess.Popen(dd(mount)) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, measure.memory(mount.server, "RssAnon"))
            time.sleep(0.02)
    if process.returncode:
        raise Failed(f"dd: {process.returncode}")
    return peak


@workload("remote", limit=240)
def remote_requests(bench):
    """Round trips to the first byte, requests of a small read, bytes moved for a tensor, private memory."""
    size = bench.size(256 * MIB)
    with served(bench, size) as server:
        for name in KINDS:
            url = f"{server.url}/{name}/"
            bench.unshard("ls", url)
            yield from first_byte_rows(bench, server, f"remote {name}", url)
            requests, kib = random_requests(bench, server, name, size)
            yield Row(f"remote {name}: a random read of 4 KiB", "one small range", requests, unit="requests", better=LOWER, ours=f"{kib:.1f} KiB each")
            empty_blocks(bench)
            with bench.mount(url) as mount:
                server.new()
                run(dd(mount))
                new = server.new()
            more = sum(r["bytes"] for r in new) - size
            yield Row(f"remote {name}: bytes beyond the tensor's own", f"{size // MIB} MiB", more / MIB, unit="MiB", better=LOWER, goal=1, ours=f"{len(data(new))} ranges")
            for words, source, options in (("local", bench.work / name, ""), ("remote", url, ""), ("remote, cache_size=0", url, ",cache_size=0")):
                empty_blocks(bench)
                with bench.mount(source, options) as mount:
                    yield Row(f"{name}, {words}: private memory", "", private_peak(mount), unit="MiB", better=LOWER)
        with as_store(server):
            for name in KINDS:
                yield from first_byte_rows(bench, server, f"remote {name}, a bucket", f"s3://{name}")
