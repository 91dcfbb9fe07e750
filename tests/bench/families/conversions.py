# SPDX-License-Identifier: MIT
"""Whole checkpoints from one format to another, beside cp of the same bytes and beside other converters.

What cp and we write is on the disk at the end; peers write to the page cache, unless the row says otherwise, and their time begins
when they are imported: both in their favour.
"""
import os
import shutil

from suite.measure import MIB, Sample, interleave, ratio_row, run, run_json
from suite.rows import Row
from suite.workloads import HERE, workload

FULL = 512 * MIB


def gone(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy(bench, source):
    target = bench.work / "copy"
    sample = run(["sh", "-c", 'cp -r --reflink=never "$0" "$1" && sync -f "$1"', source, target])
    gone(target)
    return sample


def convert(bench, source, *options):
    target = bench.work / "converted"
    sample = bench.unshard("convert", source, target, *options)
    gone(target)
    return sample


def peer(bench, name, source, *arguments, synced=False):
    """One round of a peer in a process of its own, so that its memory is its own too. synced: until the disk has it, as it has ours."""
    target = bench.work / "peers"
    line = run_json([bench.peers, HERE / "peer.py", name, source, target, *arguments])[-1]
    disk = run(["sync", "-f", target]).seconds if synced else 0
    gone(target)
    return Sample(line["seconds"] + disk, line["cpu"], line["rss"])


def peer_rows(bench, work, peers, source, options):
    """Rows of the command against each (name in peer.py, words, goal[, until the disk has it])."""
    if not bench.peers:
        for _, words, goal, *_ in peers:
            yield Row(work, words, goal=goal, note="the peers are not installed")
        return
    ways = {"ours": lambda: convert(bench, source, *options),
            **{words: lambda name=name, synced=synced: peer(bench, name, source, synced=any(synced)) for name, words, _, *synced in peers}}
    samples = interleave(ways, bench.rounds, warm=False, limit=100)
    for _, words, goal, *_ in peers:
        resident = max(s.rss for s in samples[words])
        yield ratio_row(work, f"{words}: {resident:.0f} MiB", samples[words], samples["ours"], bench.size(FULL), goal=goal, rss_goal=64)


@workload("conversions", limit=240)
def convert_and_back(bench):
    """A DCP 2x2 mesh to one safetensors file, and back, beside cp."""
    size = bench.size(FULL)
    mesh, one = bench.make("dcp", "mesh", 32, size // 32, "--mesh", "2x2"), bench.work / "one"
    bench.unshard("convert", mesh, one, "--to", "hf")
    os.sync()
    for words, source, options in (("DCP 2x2 mesh → one safetensors", mesh, ("--to", "hf")), ("safetensors → DCP 2x2 mesh", one, ("--to", "dcp", "--mesh", "2x2")),
                                   ("DCP 2x2 mesh → .pt", mesh, ("--to", "pt"))):
        samples = interleave({"cp": lambda: copy(bench, source), "ours": lambda: convert(bench, source, *options)}, bench.rounds, limit=90)
        yield ratio_row(words, "cp, on the disk", samples["cp"], samples["ours"], size, goal=0.9, rss_goal=64)


@workload("conversions", limit=400)
def convert_peers_dcp(bench):
    """The same beside torch's dcp_to_torch_save and OLMo-core's unshard."""
    mesh = bench.make("dcp", "mesh", 32, bench.size(FULL) // 32, "--mesh", "2x2")
    words = "torch dcp_to_torch_save"
    yield from peer_rows(bench, "DCP 2x2 mesh → .pt", (("dcp_to_torch", words, 7), ("dcp_to_torch", words + ", on the disk as ours", 7, True),
                                                       ("olmo_unshard", "OLMo-core unshard_checkpoint", None)),
                         mesh, ("--to", "pt"))


@workload("conversions", limit=300)
def convert_peers_hf(bench):
    """DCP's sharded safetensors to one file, beside torch's consolidation."""
    mesh, sharded = bench.make("dcp", "mesh", 32, bench.size(FULL) // 32, "--mesh", "2x2"), bench.work / "sharded"
    bench.unshard("convert", mesh, sharded, "--to", "dcp-hf", "--mesh", "2x2")
    os.sync()
    words = "torch consolidate_safetensors_files"
    yield from peer_rows(bench, "DCP safetensors shards → one", (("consolidate", words, 5), ("consolidate", words + ", on the disk as ours", None, True)),
                         sharded, ("--to", "hf"))


@workload("conversions", limit=300)
def convert_peers_zero(bench):
    """A DeepSpeed ZeRO-2 checkpoint of 4 ranks to one file, beside its zero_to_fp32."""
    source, words = bench.work / "zero" / "global_step1", "DeepSpeed zero_to_fp32"
    if not bench.peers:
        yield Row("ZeRO-2, 4 ranks → .pt", words, note="the peers are not installed")
        return
    run([bench.peers, HERE / "peer.py", "make_zero", source, bench.size(FULL)])
    os.sync()
    yield from peer_rows(bench, "ZeRO-2, 4 ranks → .pt", (("zero_to_fp32", words, None),), source,
                         ("--to", "pt", "--only", "layers.*", "--drop", "optimizer,objects"))
