# SPDX-License-Identifier: MIT
"""What reads every byte once: verify --deep, stats, diff; beside cat of the same files, and beside scripts that do the same."""
import os

from suite.measure import MIB, Sample, interleave, ratio_row, run, run_json
from suite.rows import Row
from suite.workloads import HERE, data_files, workload

FULL = 1024 * MIB


def cat(*folders):
    return run(["cat", *(f for folder in folders for f in data_files(folder))])


def numpy_rows(bench, work, function, ours, size, *folders):
    """Beside one loop of numpy over safetensors files that does the same."""
    words = "numpy and safe_open"
    if not bench.peers:
        yield Row(work, words, note="the peers are not installed")
        return
    files = [f for folder in folders for f in data_files(folder)]
    lines = run_json([bench.peers, HERE / "peer.py", function, max(3, bench.rounds), *files])
    peer = [Sample(line["seconds"], line["cpu"], line["rss"]) for line in lines]
    yield ratio_row(work, words, peer, ours, size, rss=None)


@workload("passes", limit=240)
def stats_and_diff(bench):
    """stats of a checkpoint, diff of two that are the same in other formats."""
    size = bench.size(FULL)
    one, mesh = bench.make("hf", "one", 32, size // 32), bench.work / "mesh"
    bench.unshard("convert", one, mesh, "--to", "dcp", "--mesh", "2x2")
    os.sync()
    samples = interleave({"cat": lambda: cat(one), "ours": lambda: bench.unshard("stats", one)}, bench.rounds)
    yield ratio_row("stats", "cat of the file", samples["cat"], samples["ours"], size, goal=0.8, rss_goal=64)
    yield from numpy_rows(bench, "stats", "numpy_stats", samples["ours"], size, one)
    samples = interleave({"cat": lambda: cat(one, mesh), "ours": lambda: bench.unshard("diff", one, mesh)}, bench.rounds)
    yield ratio_row("diff, safetensors and DCP, the same", "cat of both", samples["cat"], samples["ours"], 2 * size, goal=0.8, rss_goal=64)


@workload("passes", limit=240)
def diff_of_others(bench):
    """diff of two checkpoints of which every element differs, beside numpy."""
    size = bench.size(FULL // 2)
    a, b = (bench.make("hf", name, 32, size // 32) for name in "ab")
    samples = interleave({"cat": lambda: cat(a, b), "ours": lambda: run(["sh", "-c", '"$@"; test $? -eq 1', "sh", bench.binary, "diff", a, b, "-o", f"cache_dir={bench.cache}"])},
                         bench.rounds)
    yield ratio_row("diff, every element differs", "cat of both", samples["cat"], samples["ours"], 2 * size, rss_goal=64)
    yield from numpy_rows(bench, "diff, every element differs", "numpy_diff", samples["ours"], 2 * size, a, b)


@workload("passes", limit=240)
def verify_deep(bench):
    """verify --deep of safetensors, DCP and .pt, beside cat and sha256sum."""
    size, pt = bench.size(FULL // 2), bench.work / "pt"
    hf, dcp = bench.make("hf", "hf", 32, size // 32), bench.make("dcp", "dcp", 32, size // 32, "--mesh", "2x2")
    bench.unshard("convert", hf, pt, "--to", "pt")
    os.sync()
    for words, folder in (("safetensors", hf), ("DCP 2x2 mesh", dcp), (".pt", pt)):
        samples = interleave({"cat": lambda: cat(folder), "sum": lambda: run(["sha256sum", *data_files(folder)]),
                              "ours": lambda: bench.unshard("verify", folder, "--deep")}, bench.rounds, limit=40)
        yield ratio_row(f"verify --deep, {words}", "cat of the files", samples["cat"], samples["ours"], size, goal=0.8, rss_goal=64)
        yield ratio_row(f"verify --deep, {words}", "sha256sum", samples["sum"], samples["ours"], size, rss=None)
