# SPDX-License-Identifier: MIT
"""Writing a checkpoint into a mount, to where it is on the disk and published."""
import os
import pathlib
import shutil

from suite.measure import MIB, Failed, Sample, interleave, memory, ratio_row, run
from suite.mount import Mount
from suite.workloads import workload


def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def copied(source, target, server, *synced, as_user=()):
    """A copy that is on the disk at the end; a mount publishes at the fsync of a directory."""
    sample = run([*as_user, "sh", "-c", 'cp --reflink=never "$0" "$1" && shift && sync "$@"', source, target, *synced], server)
    return Sample(sample.seconds, sample.cpu, memory(server, "VmHWM") if server else sample.rss)


def removed(folder, sample):
    shutil.rmtree(folder)
    return sample


@workload("saving", limit=600)
def save(bench):
    """One safetensors file copied into a new directory of a mount and published, beside cp and fsync."""
    size = bench.size(2048 * MIB)
    source, folder = bench.make("hf", "source", 32, size // 32) / "model.safetensors", bench.work / "target"

    def native():
        folder.mkdir()
        return removed(folder, copied(source, folder / "model.safetensors", None, folder / "model.safetensors", folder))

    def ours(kind):
        folder.mkdir()
        with bench.mount(folder, f",rw,save={kind}") as mount:
            os.mkdir(mount / "new")
            sample = copied(source, mount / "new/model.safetensors", mount.server, mount / "new")
            if not (folder / "new").is_dir():
                raise Failed(f"save={kind}: it is not published")
        return removed(folder, sample)

    kinds = ("hf", "dcp:ranks=8", "torch_dist:ranks=8", "zarr")
    samples = interleave({"cp": native, **{k: lambda k=k: ours(k) for k in kinds}}, bench.rounds, limit=500)
    for kind in kinds:
        yield ratio_row(f"save={kind}, published", "cp and fsync", samples["cp"], samples[kind], size, goal=0.9, lab=0.3, rss_goal=64)


def mounters(folder):
    """{words: (goal, command that mounts as this user)} of the users that we can be."""
    if os.geteuid() != 0:
        return {"without root": (0.6, ())}
    if not shutil.which("setpriv") or os.stat("/dev/fuse").st_mode & 0o6 != 0o6:
        return {"as root": (0.9, ())}
    os.chmod(folder, 0o755)
    return {"as root": (0.9, ()), "without root": (0.6, ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"))}


@workload("saving", limit=400)
def storage(bench):
    """A file that a program writes under its own name: the disk's, which the mount only passes on."""
    size = bench.size(2048 * MIB)
    source, folder = bench.make("hf", "source", 32, size // 32) / "model.safetensors", bench.work / "target"
    users = mounters(bench.work)

    def write(into, server=None, as_user=()):
        return copied(source, into / "new.bin", server, into / "new.bin", into, as_user=as_user)

    def native():
        folder.mkdir()
        return removed(folder, write(folder))

    def ours(as_user):
        folder.mkdir()
        cache = bench.cache.with_name("cache-of-nobody") if as_user else bench.cache
        if as_user:
            cache.mkdir(exist_ok=True)
            for path in (folder, cache):
                os.chown(path, 65534, 65534)
        with Mount(bench.binary, folder, cache, ",rw", as_user) as mount:
            sample = write(pathlib.Path(mount.path), mount.server, as_user)
        return removed(folder, sample)

    samples = interleave({"cp": native, **{words: lambda u=u: ours(u) for words, (_, u) in users.items()}}, bench.rounds, limit=300)
    for words, (goal, _) in users.items():
        yield ratio_row(f"a storage name, {words}", "cp and fsync", samples["cp"], samples[words], size, goal=goal, rss_goal=64)
