# SPDX-License-Identifier: MIT
"""Runs the libFuzzer targets one after the other and keeps count: run.py BUILD [TARGET ...]

BUILD is a directory made as docs/fuzzing.md says. Each target gets --seconds of processor
time (not of the clock) at nice 19. What it learns is kept in --work between runs; at its end
the inputs that reach something new are merged into tests/fuzz/corpus/TARGET, up to 100 KiB,
and the run is added to the table of docs/fuzzing.md. --rounds goes over all of them again.
A find is left in --work/finds and ends the run of that target only.
"""
import argparse
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
LEDGER = os.path.join(ROOT, "docs", "fuzzing.md")
CORPUS_MAX = 100 << 10

# What strangers' bytes meet first comes first.
EXPOSED = ["pickle", "zip", "safetensors", "torch_file", "torch_zip", "dcp_metadata",
           "codecs", "zarr", "scan", "http_answer", "tar", "gguf", "json", "npy", "npz",
           "ocdbt", "xml", "s3_list", "catalog", "flax", "dist_tensor", "object_pickle"]


def names(build):
    found = [n[5:] for n in os.listdir(os.path.join(build, "tests", "fuzz"))
             if n.startswith("fuzz_") and "." not in n]
    first = [n for n in EXPOSED if n in found]
    return first + sorted(set(found) - set(first))


# ---- the ledger ----

ROW = re.compile(r"^\| (\w+) \| ([\d.]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$")


def read_ledger():
    with open(LEDGER, encoding="utf-8") as f:
        lines = f.read().split("\n")
    rows = {}
    for line in lines:
        m = ROW.match(line)
        if m:
            rows[m[1]] = [float(m[2]), *map(int, m.groups()[2:])]
    return lines, rows


def write_ledger(target, seconds, executions, coverage, finds):
    """Adds a run: minutes, executions and finds add up, coverage is the latest."""
    lock = os.open(HERE, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    lines, rows = read_ledger()
    row = rows.setdefault(target, [0.0, 0, 0, 0, 0])
    corpus = os.path.join(HERE, "corpus", target)
    row[0] += seconds / 60
    row[1] += executions
    row[2] = max(row[2], coverage)
    row[3] = len(os.listdir(corpus))
    row[4] += finds
    table = [f"| {t} | {r[0]:.1f} | {r[1]} | {r[2]} | {r[3]} | {r[4]} |"
             for t, r in sorted(rows.items())]
    head = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    rest = [line for line in lines[head + 1:] if not ROW.match(line)]
    with open(LEDGER, "w", encoding="utf-8") as f:
        f.write("\n".join(lines[:head + 1] + table + rest))
    os.close(lock)


# ---- one target ----

def cpu_seconds(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as f:
            fields = f.read().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(process, seconds):
    """The processor time that it took; asks it to end after `seconds` of that."""
    used, asked = 0.0, False
    while process.poll() is None:
        used = cpu_seconds(process.pid) or used
        if used >= seconds and not asked:
            process.send_signal(signal.SIGUSR1)  # libFuzzer: end in order
            asked = True
        elif used >= seconds + 60:
            process.kill()
        time.sleep(0.2)
    return used


def fuzz(program, target, seconds, work, timeout):
    mine = os.path.join(work, "corpus", target)
    finds = os.path.join(work, "finds", target)
    os.makedirs(mine, exist_ok=True)
    os.makedirs(finds, exist_ok=True)
    before = set(os.listdir(finds))
    env = dict(os.environ, ASAN_OPTIONS="detect_leaks=1:allocator_may_return_null=1",
               UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["nice", "-n", "19", program, mine, os.path.join(HERE, "corpus", target),
             f"-artifact_prefix={finds}/", "-print_final_stats=1", "-reload=0",
             "-rss_limit_mb=1024", f"-timeout={timeout}", f"-report_slow_units={timeout}",
             "-max_len=65536", "-verbosity=1"],
            stdout=subprocess.DEVNULL, stderr=log, env=env, start_new_session=True)
        used = watch(process, seconds)
        log.seek(0)
        text = log.read().decode("utf-8", "replace")
    executions = re.findall(r"stat::number_of_executed_units: (\d+)", text)
    executions = executions or re.findall(r"^#(\d+)\t", text, re.M)
    coverage = re.findall(r" ft: (\d+) ", text)
    new = sorted(set(os.listdir(finds)) - before)
    if new or not executions:
        with open(os.path.join(work, "finds", target + ".log"), "w",
                  encoding="utf-8") as f:
            f.write(text)
    return (used, int(executions[-1]) if executions else 0,
            int(coverage[-1]) if coverage else 0, new)


def merge(program, target, work):
    """Inputs that reach what those in the tree do not, the shortest first, while there is room."""
    kept = os.path.join(HERE, "corpus", target)
    with tempfile.TemporaryDirectory() as fresh:
        for name in os.listdir(kept):
            shutil.copy(os.path.join(kept, name), fresh)
        known = set(os.listdir(fresh))
        subprocess.run(["nice", "-n", "19", program, "-merge=1", "-rss_limit_mb=1024",
                        fresh, os.path.join(work, "corpus", target)],
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        room = CORPUS_MAX - sum(os.path.getsize(os.path.join(kept, n)) for n in known)
        added = sorted((os.path.getsize(os.path.join(fresh, n)), n)
                       for n in set(os.listdir(fresh)) - known)
        for size, name in added:
            room -= size
            if room < 0:
                break
            shutil.copy(os.path.join(fresh, name), kept)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    p.add_argument("build")
    p.add_argument("target", nargs="*")
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--work", default=os.path.expanduser("~/.cache/unshardfs-fuzz"))
    p.add_argument("--timeout", type=int, default=60,
                   help="seconds of the clock for one input: more on a machine that is busy")
    p.add_argument("--no-merge", action="store_true", help="leave tests/fuzz/corpus as it is")
    o = p.parse_intermixed_args()
    total = 0
    for _ in range(o.rounds):
        for target in o.target or names(o.build):
            program = os.path.join(o.build, "tests", "fuzz", "fuzz_" + target)
            used, executions, coverage, found = fuzz(program, target, o.seconds, o.work,
                                                  o.timeout)
            if not o.no_merge:
                merge(program, target, o.work)
            write_ledger(target, used, executions, coverage, len(found))
            print(f"{target}: {used:.0f} s, {executions} executions, ft {coverage}",
                  *(f"FOUND {n}" for n in found), flush=True)
            total += len(found)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
