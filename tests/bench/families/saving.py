# SPDX-License-Identifier: MIT
"""Writing a checkpoint into a mount, to where it is on the disk and published."""
import os
import shutil

from suite.measure import MIB, Failed, Sample, interleave, memory, ratio_row, run
from suite.workloads import workload


def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def copied(source, target, server, *synced):
    """A copy that is on the disk at the end; a mount publishes at the fsync of a directory."""
    sample = run(["sh", "-c", 'cp --reflink=never "$0" "$1" && shift && sync "$@"', source, target, *synced], server)
    return Sample(sample.seconds, sample.cpu, memory(server, "VmHWM") if server else sample.rss)


@workload("saving", limit=240)
def save(bench):
    """One safetensors file copied into a new directory of a mount and published, beside cp and fsync."""
    size = bench.size(1024 * MIB)
    source, folder = bench.make("hf", "source", 32, size // 32) / "model.safetensors", bench.work / "target"

    def native():
        folder.mkdir()
        sample = copied(source, folder / "model.safetensors", None, folder / "model.safetensors", folder)
        shutil.rmtree(folder)
        return sample

    def ours(kind):
        folder.mkdir()
        with bench.mount(folder, f",rw,save={kind}") as mount:
            os.mkdir(mount / "new")
            sample = copied(source, mount / "new/model.safetensors", mount.server, mount / "new")
            if not (folder / "new").is_dir():
                raise Failed(f"save={kind}: it is not published")
        shutil.rmtree(folder)
        return sample

    goal = 0.95 if os.geteuid() == 0 else 0.6
    kinds = ("hf", "dcp:ranks=8", "torch_dist:ranks=8")
    samples = interleave({"cp": native, **{k: lambda k=k: ours(k) for k in kinds}}, bench.rounds, limit=180)
    for kind in kinds:
        yield ratio_row(f"save={kind}, published", "cp and fsync", samples["cp"], samples[kind], size, goal=goal, lab=0.3, rss_goal=64)
