#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The benchmark suite: what a mount and the command cost beside the floor (the same bytes by cat, cp, pread) and beside peers.

    bench.py [--unshard BIN] [--only NAME,...] [--quick] [--json FILE] [--before FILE] [--write docs/benchmarks.md]

A workload (families/*.py) runs in a process of its own, with a time limit, and yields rows. Ways of doing the same are run by
turns; figures are medians of at least five rounds after one that warms, with the best beside. Processor time is that of the
reader and of the server together. Goals stand beside the workloads and the report judges by them. No figure is a test: the exit
status is 0 if every workload ran to its end, 1 if one did not, 77 without /dev/fuse.

Peers come from PyPI (requirements.txt) into build-bench/, or are taken from --venv DIR; without them their rows are left out.
"""
import argparse
import importlib
import json
import os
import pathlib
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import families
from suite import measure, mount, peers, report, rows
from suite.workloads import FAMILIES, HERE, REGISTRY, ROOT, Bench


def load_workloads():
    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module("families." + module.name)


# ---- one workload, in a process of its own ----

def work_here(name, settings):
    """Runs it in this process; a JSON line for each row, as soon as it is there."""
    w = REGISTRY[name]
    bench, load = Bench(**settings), os.getloadavg()[0]
    try:
        for item in w.function(bench):
            item.family, item.workload, item.load = item.family or w.family, w.name, load
            print(json.dumps(rows.to_json(item)), flush=True)
            load = os.getloadavg()[0]
    except Exception as e:  # whatever it is, the other workloads go on
        traceback.print_exc()
        words = str(e) if isinstance(e, measure.Failed) else f"{type(e).__name__}: {e}"
        print(json.dumps(rows.to_json(rows.Row(name, error=words, family=w.family, workload=w.name))), flush=True)


def end(process):
    """Its process group, which is itself and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def work_apart(w, settings, limit):
    """[row or curve] of a workload in a child; what it had yielded when it failed or ran out of time stays."""
    python = settings["peers"] if w.peers and settings["peers"] else sys.executable
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        p = subprocess.Popen([python, str(HERE / "bench.py"), "--work", w.name, "--settings", json.dumps(settings)],
                             stdout=out, stderr=said, start_new_session=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
        error = ""
        try:
            if p.wait(limit):
                said.seek(0)
                error = str(measure.failure([w.name], p.returncode, said.read()))
        except subprocess.TimeoutExpired:
            error = f"it took more than its limit of {limit:g} s"
        finally:
            end(p)
            left = mount.unmount_below(settings["work"])
        out.seek(0)
        items = [rows.from_json(json.loads(line)) for line in out.read().decode().splitlines() if line.startswith('{"kind"')]
    if left and not error:
        error = f"{left} mounts were left behind"
    if error:
        items.append(rows.Row(w.name, error=error, family=w.family, workload=w.name))
    return items


def remove(folder):
    """A server that was just unmounted may write to its cache yet: until nothing comes any more."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.1)


def run(chosen, settings, limit):
    items = []
    for i, w in enumerate(chosen, 1):
        print(f"[{i}/{len(chosen)}] {w.name}: {w.about}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        work = tempfile.mkdtemp(prefix="unshardfs-bench-")
        try:
            new = work_apart(w, {**settings, "work": work}, limit or w.limit)
        finally:
            remove(work)
        print(f"    {len(new)} rows in {time.monotonic() - begin:.1f} s" + "".join(f"\n    {r.work}: {r.verdict()}" for r in new if getattr(r, "error", "")),
              file=sys.stderr, flush=True)
        items += new
    return items


# ---- the command ----

def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--unshard", default=str(ROOT / "build-release/cli/unshard"), help="the binary to measure")
    p.add_argument("--only", default="", metavar="NAME,...", help="workloads or families; see --list")
    p.add_argument("--list", action="store_true", help="name the workloads")
    p.add_argument("--quick", action="store_true", help="an eighth of the sizes, two rounds: only that it runs")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--limit", type=float, help="seconds for each workload, instead of its own")
    p.add_argument("--json", metavar="FILE", help="write the rows there")
    p.add_argument("--write", metavar="PAGE", nargs="?", const=str(ROOT / "docs/benchmarks.md"), help="replace what stands below the page's mark, and its plots")
    p.add_argument("--before", metavar="FILE", help="what --json wrote of an earlier run: its figures stand beside the new ones, and what is not measured now is taken from it")
    p.add_argument("--venv", help="a Python environment that has the peers")
    p.add_argument("--no-peers", action="store_true")
    p.add_argument("--work", help=argparse.SUPPRESS)
    p.add_argument("--settings", help=argparse.SUPPRESS)
    return p, p.parse_args()


def choose(names):
    """The workloads named, in the report's order."""
    wanted = {n for n in names.split(",") if n}
    known = set(REGISTRY) | set(FAMILIES)
    if wanted - known:
        raise SystemExit(f"bench.py: no workload or family {', '.join(sorted(wanted - known))} (--list names them)")
    found = [w for w in REGISTRY.values() if not wanted or w.name in wanted or w.family in wanted]
    return sorted(found, key=lambda w: list(FAMILIES).index(w.family))


def main():
    parser, a = parse()
    load_workloads()
    if a.work:
        work_here(a.work, json.loads(a.settings))
        return 0
    if a.list:
        for w in choose(a.only):
            print(f"{w.family:12} {w.name:20} {w.about}")
        return 0
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        print("/dev/fuse is not to be had: skipped")
        return 77
    if not os.access(a.unshard, os.X_OK):
        parser.error(f"{a.unshard} is not there (./bootstrap build makes it, --unshard names another)")
    chosen = choose(a.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what unmounts
    python = None if a.no_peers else peers.find(a.venv)
    head = report.machine(tempfile.gettempdir(), os.path.abspath(a.unshard), peers.versions(python), a.quick)
    items = run(chosen, {"binary": os.path.abspath(a.unshard), "quick": a.quick, "rounds": a.rounds, "peers": python}, a.limit)
    if a.before:
        earlier = json.loads(pathlib.Path(a.before).read_text(encoding="utf-8"))
        items = rows.after([rows.from_json(r) for r in earlier["rows"]], items, {w.name for w in chosen})
        head += " Figures of before, and rows without one that were not measured again, are of: " + earlier["machine"]
    print(head + "\n" + report.terminal(items))
    if a.json:
        pathlib.Path(a.json).write_text(json.dumps({"machine": head, "rows": [rows.to_json(i) for i in items]}, indent=1), encoding="utf-8")
    if a.write:
        report.write(a.write, head, items)
    return 1 if any(isinstance(i, rows.Row) and i.error for i in items) else 0


if __name__ == "__main__":
    sys.exit(main())
