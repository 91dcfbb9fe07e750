# SPDX-License-Identifier: MIT
"""How things are measured: interleaved rounds, medians, processor time of reader and server."""
import dataclasses
import json
import os
import pathlib
import resource
import statistics
import subprocess
import time
import typing

from suite import rows

MIB = 1 << 20


@dataclasses.dataclass
class Sample:
    seconds: float
    cpu: typing.Optional[float] = None  # seconds on a core: the process, and the server where one has part in it
    rss: typing.Optional[float] = None  # MiB


class Failed(Exception):
    """A workload can't go on; its row says why."""


def failure(command, status, error):
    """What a program said last."""
    lines = error.decode(errors="replace").strip().splitlines()
    return Failed(": ".join([pathlib.Path(str(command[0])).name, f"status {status}", *lines[-1:]])[:300])


def threads_cpu(pid):
    """Seconds on a core of all threads of a process; the scheduler counts in nanoseconds. 0 for no process."""
    total = 0
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir() if pid else ():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError):
            continue
    return total / 1e9


def memory(pid, field):
    """A field of /proc/PID/status in MiB: VmHWM is the peak, VmRSS what is resident now, RssAnon the private part of it."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise Failed(f"process {pid} has no {field}")


def run(command, server=None, stdout=subprocess.DEVNULL, **options):
    """A whole program, from its start to its end. Its peak counts our own as well: the caller stays small."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, begin = threads_cpu(server), time.monotonic()
    with subprocess.Popen([str(c) for c in command], stdout=stdout, stderr=subprocess.PIPE, **options) as p:
        error = p.stderr.read()
        _, status, used = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - begin
    if p.returncode:
        raise failure(command, p.returncode, error)
    return Sample(seconds, used.ru_utime + used.ru_stime + threads_cpu(server) - before, used.ru_maxrss / 1024)


def run_json(command, **options):
    """The JSON lines that a program prints."""
    p = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False, **options)
    if p.returncode:
        raise failure(command, p.returncode, p.stderr)
    return [json.loads(line) for line in p.stdout.decode().splitlines() if line.startswith("{")]


def timed(work, server=None):
    """What a Python function takes: for calls that are long beside Python itself."""
    cpu = threads_cpu(server) + time.process_time()
    used, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    work()
    seconds, now = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    children = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Sample(seconds, threads_cpu(server) + time.process_time() - cpu + children)


def interleave(ways, rounds, warm=True, limit=None):
    """{name: [Sample]} of functions that are called by turns, every other round backwards; the first round only warms.

    After `limit` seconds no new round begins, once there are three.
    """
    samples, begin = {name: [] for name in ways}, time.monotonic()
    for i in range(rounds + warm):
        if limit and i - warm >= 3 and time.monotonic() - begin > limit:
            break
        for name in (list(ways) if i % 2 == 0 else reversed(list(ways))):
            sample = ways[name]()
            if i or not warm:
                samples[name].append(sample)
    return samples


def median(samples, field="seconds"):
    return statistics.median(getattr(s, field) for s in samples)


def per_mib(samples, size):
    """µs on a core for a MiB, or None where it was not counted."""
    if any(s.cpu is None for s in samples):
        return None
    return 1e6 * median(samples, "cpu") / (size / MIB)


def speed(samples, size):
    return f"{size / median(samples) / 1e9:.2f} GB/s"


def duration(samples):
    seconds = median(samples)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def ratio_row(work, against, floor, ours, size=None, bare=None, **fields):
    """A row of floor / ours (how fast we are beside it), medians of the rounds; with better="lower" ours / floor.
    bare: samples of a bare server in the same rounds, where higher is better."""
    if bare:
        fields["bare"] = statistics.median(f.seconds / b.seconds for f, b in zip(floor, bare))
    lower = fields.get("better") == rows.LOWER
    pairs = [(o.seconds, f.seconds) if lower else (f.seconds, o.seconds) for f, o in zip(floor, ours)]
    best = (min(f.seconds for f in floor), min(o.seconds for o in ours))
    cpu = (per_mib(floor, size), per_mib(ours, size)) if size else None
    resident = [o.rss for o in ours if o.rss is not None]
    fields.setdefault("rss", max(resident) if resident else None)
    return rows.Row(work, against, statistics.median(a / b for a, b in pairs), best[1] / best[0] if lower else best[0] / best[1],
                    theirs=speed(floor, size) if size else duration(floor), ours=speed(ours, size) if size else duration(ours),
                    cpu=cpu if cpu and None not in cpu else None, rounds=len(ours), **fields)
