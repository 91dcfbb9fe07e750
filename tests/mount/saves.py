# SPDX-License-Identifier: MIT
"""Saves by view names where save=FORMAT holds: however a file's bytes arrive, the same checkpoint comes of them, or none.

$SAVE_FORMATS names formats (all of them else), $SAVE_SEEDS how many random schedules of each.
"""
import concurrent.futures
import contextlib
import errno
import json
import mmap
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys

from editlib import PAUSES, boxes_of, changed, doctor, fsync, go_on, last_error, names, npy_of, objects_of, pause, run, staging, tensors_of, umount, write
from mountlib import PATIENCE, SANITIZED, UNSHARD, Mount, Skip, brief, fails, main, make_tensors, read_all, safetensors_image, same, stored, tensor_bytes, unmount_hard, \
    wait_for, write_checkpoint, write_file

FORMATS = os.environ.get("SAVE_FORMATS", "hf hf:max_shard_size=8KB dcp:ranks=3 dcp:mesh=2x2 dcp-hf:ranks=2 torch_dist:ranks=3 zarr:ranks=2 olmo:ranks=2 "
                         "olmo-step:ranks=2 pt npz").split()
SEEDS = int(os.environ.get("SAVE_SEEDS", "1"))


def model(seed=1):
    """What every format stores: several dtypes, a single row, a single element, one that does not divide."""
    tensors = make_tensors(seed, count=5, rows=31, cols=24)
    tensors["model.embed.weight"] = ("F16", (257, 8), tensor_bytes(("embed", seed).__repr__(), 257 * 16))
    tensors["model.norm.bias"] = ("F32", (1, 7), tensor_bytes(("norm", seed).__repr__(), 28))
    tensors["model.count"] = ("I64", (1,), tensor_bytes(("count", seed).__repr__(), 8))
    return tensors


TENSORS = model()
IMAGE = safetensors_image(TENSORS)
OPTIMIZER = {f"optimizer.state.{i}.exp_avg": ("F32", (4, 3), tensor_bytes(i, 48)) for i in range(3)}
MORE = {"model.more.weight": ("F32", (33, 5), tensor_bytes("more", 33 * 20)), "model.more.count": ("I64", (1,), b"12345678")}
HEADER = 8 + struct.unpack("<Q", IMAGE[:8])[0]


# ---- ways of a file into the mount: each writes IMAGE as `path`; `wait` is where the writer may be slow ----

def blocks(size, rnd=None, begin=0):
    at = list(range(begin, size, 3001))
    if rnd:
        rnd.shuffle(at)
    return at


def in_order(path, wait, rnd):
    with open(path, "wb", buffering=0) as f:
        for i, at in enumerate(blocks(len(IMAGE))):
            f.write(IMAGE[at:at + 3001])
            wait(i == 3)


def backwards(path, wait, rnd):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for i, at in enumerate(reversed(blocks(len(IMAGE)))):
        os.pwrite(fd, IMAGE[at:at + 3001], at)
        wait(i == 3)
    os.close(fd)


def by_chance(path, wait, rnd):
    """Any order, overlapping, by several handles, closed and opened again."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
    handles = [os.open(path, os.O_RDWR) for _ in range(3)]
    for i, at in enumerate(blocks(len(IMAGE), rnd)):
        n = rnd.randrange(3)
        begin = max(0, at - rnd.randrange(500))
        os.pwrite(handles[n], IMAGE[begin:at + 3001], begin)
        if rnd.random() < 0.2:
            os.close(handles[n])
            handles[n] = os.open(path, os.O_RDWR)
        wait(i in (2, 5))
    for fd in handles:
        os.close(fd)


def data_first(path, wait, rnd):
    """The header last, over a hole."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.ftruncate(fd, len(IMAGE))
    for at in blocks(len(IMAGE), rnd, HEADER):
        os.pwrite(fd, IMAGE[at:at + 3001], at)
    wait(True)
    os.pwrite(fd, IMAGE[:HEADER], 0)
    os.close(fd)


def written_over(path, wait, rnd):
    """Other bytes first, then the right ones: the last count."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.pwrite(fd, IMAGE[:HEADER] + bytes(b ^ 0xff for b in IMAGE[HEADER:]), 0)
    wait(True)
    for at in blocks(len(IMAGE), rnd, HEADER):
        os.pwrite(fd, IMAGE[at:at + 3001], at)
    same("read back", os.pread(fd, len(IMAGE), 0), IMAGE)
    os.close(fd)


def mapped(path, wait, rnd):
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.ftruncate(fd, len(IMAGE))
    with mmap.mmap(fd, len(IMAGE)) as m:
        os.close(fd)
        m[:5000] = IMAGE[:5000]
        wait(True)
        m[5000:] = IMAGE[5000:]
        m.flush()


def renamed(path, wait, rnd):
    """As savers do: a file of another name, of the disk, that gets this one."""
    with open(path + ".tmp", "wb") as f:
        f.write(IMAGE)
    wait(True)
    os.rename(path + ".tmp", path)


def copied(path, wait, rnd):
    write_file(path.rpartition("/")[0] + "-image", IMAGE)
    subprocess.run(["cp", path.rpartition("/")[0] + "-image", path], check=True)
    os.unlink(path.rpartition("/")[0] + "-image")


SAVER = """
import os, signal, sys
image = sys.stdin.buffer.read()
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
begin = int(sys.argv[2])
os.pwrite(fd, image[begin:int(sys.argv[3])], begin)
os.kill(os.getpid(), signal.SIGKILL)
"""


def by_killed_programs(path, wait, rnd):
    """Each is killed after its part; the parts are all there at the end."""
    cuts = sorted(rnd.sample(range(1, len(IMAGE)), 3))
    parts = list(zip([0, *cuts], [*cuts, len(IMAGE)]))
    rnd.shuffle(parts)
    for i, (begin, end) in enumerate(parts):
        subprocess.run([sys.executable, "-S", "-c", SAVER, path, str(begin), str(end)], input=IMAGE, timeout=PATIENCE, check=False)
        wait(i == 1)


def one_file(way):
    return lambda step, wait, rnd: way(step + "/model.safetensors", wait, rnd)


def numbered(step, wait, rnd, order, index):
    """A set: its files in some order, several open at once, the index before, after or not at all."""
    keys = list(TENSORS)
    files = {f"model-{i + 1:05}-of-00003.safetensors": {k: TENSORS[k] for k in keys[i::3]} for i in range(3)}
    text = json.dumps({"metadata": {}, "weight_map": {k: n for n, part in files.items() for k in part}})
    todo = list(files)
    if order == "reversed":
        todo.reverse()
    if index == "first":
        write(step + "/model.safetensors.index.json", text.encode())
    if order == "together":
        handles = {n: open(f"{step}/{n}", "wb", buffering=0) for n in todo}
        images = {n: safetensors_image(files[n]) for n in todo}
        for at in range(0, max(map(len, images.values())), 3001):
            for n in todo:
                handles[n].write(images[n][at:at + 3001])
            wait(at == 3001)
        for n in rnd.sample(todo, 3):
            handles[n].close()
            wait(n == todo[0])
    else:
        for i, n in enumerate(todo):
            write(f"{step}/{n}", safetensors_image(files[n]))
            wait(i < 2)
    if index == "last":
        write(step + "/model.safetensors.index.json", text.encode())


def by_arrays(step, wait, rnd):
    os.makedirs(step + "/tensors")
    for i, key in enumerate(rnd.sample(list(TENSORS), len(TENSORS))):
        write(f"{step}/tensors/{key}.npy", npy_of(TENSORS[key]))
        wait(i == 4)


def by_tree(step, wait, rnd):
    for i, key in enumerate(rnd.sample(list(TENSORS), len(TENSORS))):
        path = f"{step}/tree/{key.replace('.', '/')}.npy"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, npy_of(TENSORS[key]))
        wait(i == 4)


def by_arrays_and_file(step, wait, rnd):
    """Some keys by their arrays, then all by the file: a set replaces its role."""
    os.makedirs(step + "/tensors")
    for key in list(TENSORS)[:3]:
        write(f"{step}/tensors/{key}.npy", npy_of(TENSORS[key]))
    wait(True)
    in_order(step + "/model.safetensors", wait, rnd)


WAYS = {f.__name__: one_file(f) for f in (in_order, backwards, by_chance, data_first, written_over, mapped, renamed, copied, by_killed_programs)}
WAYS.update({f"set {order}, index {index}": lambda s, w, r, o=order, x=index: numbered(s, w, r, o, x)
             for order, index in (("sorted", "last"), ("reversed", "none"), ("together", "first"), ("together", "last"))})
# arrays that arrive one by one make a checkpoint of the first, which the others join: hf may cut them into other files
ARRAYS = {f.__name__: f for f in (by_arrays, by_tree, by_arrays_and_file)}


def described(step):
    """What must be equal for every schedule: files, tensors, boxes, objects."""
    boxes = boxes_of(step)
    return {"names": names(step), "tensors": tensors_of(step), "boxes": boxes, "objects": objects_of(step),
            "cuts": {key: [(start, size) for start, size, _ in cut] for key, cut in boxes.items()}}


def all_schedules(t, fmt):
    """Every way, without pauses and with them, side by side in one mount."""
    os.makedirs(t + "/run")
    jobs = [(name, way, seconds, seed) for name, way in {**WAYS, **ARRAYS}.items() for seconds in PAUSES for seed in range(SEEDS)]
    with Mount(t + "/run", t + "/mnt", "rw,save=" + fmt) as m:
        def save(job):
            name, way, seconds, seed = job
            step = m / f"{jobs.index(job):03}"
            os.mkdir(step)
            way(step, lambda now: pause(seconds if now else 0), random.Random(f"{name} {seed}"))
            if seed == 0:
                fsync(step)
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            for job, done in [(job, pool.submit(save, job)) for job in jobs]:
                try:
                    done.result()
                except Exception as e:
                    raise AssertionError(f"{fmt}: {job[0]}, pause {job[2]}, seed {job[3]}: {e!r}") from e
        umount(m)
    same(f"{fmt}: staging", staging(t + "/run"), [])
    first, kinds, failed = described(t + "/run/000"), {}, []
    for i, (name, _, seconds, seed) in enumerate(jobs):
        got, what = described(f"{t}/run/{i:03}"), f"{fmt}: {name}, pause {seconds}, seed {seed}"
        # Of other files that arrive other files may be made; of a set or a single one the tensors are cut alike.
        kind = name if name in ARRAYS else "set" if name.startswith("set") else ""
        want = kinds.setdefault(kind, got)
        if not name.startswith("by_") and got["cuts"] != first["cuts"]:
            failed.append(f"{what}: cut in other ways than one file")
        failed += [f"{what}: other {field}: {brief(got[field], 300)}, not {brief(want[field], 300)}" for field in want if got[field] != want[field]]
        if got["tensors"] != TENSORS and got["tensors"] != {"model." + k: v for k, v in TENSORS.items()}:  # as olmo-step keeps a model
            failed.append(f"{what}: the tensors are not those that were written")
    assert not failed, "\n".join(failed)
    print(f"# {fmt}: {len(jobs)} saves alike: {', '.join(first['names'])[:120]}", flush=True)


def test_every_schedule(t):
    for i, fmt in enumerate(FORMATS[:3] if SANITIZED else FORMATS):
        all_schedules(f"{t}/{i}", fmt)


# ---- what a save replaces ----

def dcp_source(t, to="dcp", objects=True):
    write_checkpoint(t + "/hf", TENSORS)
    os.makedirs(t + "/run", exist_ok=True)
    run("convert", t + "/hf", t + "/run/step", "--to", to, *(["--ranks", "2"] if to in ("dcp", "torch_dist") else []))


def test_an_existing_checkpoint_keeps_its_format(t):
    for to in ("dcp", "torch_dist", "zarr", "pt"):
        shutil.rmtree(t, ignore_errors=True)
        os.mkdir(t)
        dcp_source(t, to)
        before = names(t + "/run/step")
        new = model(2)
        with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
            write(m / "step/model.safetensors", safetensors_image(new))
            fsync(m / "step")
            umount(m)
        same(f"{to}: names", names(t + "/run/step"), before)
        same(to, tensors_of(t + "/run/step"), new)


def test_a_set_replaces_its_role(t):
    """Keys that it has not are gone, and the files and index of the set before."""
    for seconds in PAUSES:
        shutil.rmtree(t + "/run", ignore_errors=True)
        write_checkpoint(t + "/run/step", TENSORS, shards=4)
        write_file(t + "/run/step/notes.txt", b"notes")
        new = dict(list(model(2).items())[:3])
        with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
            for i, key in enumerate(new):
                write(m / f"step/model-{i + 1:05}-of-00003.safetensors", safetensors_image({key: new[key]}))
                if i < 2:
                    same("the old one is there", tensors_of(t + "/run/step"), TENSORS)
                pause(seconds)
            fsync(m / "step")
            umount(m)
        same("model", tensors_of(t + "/run/step"), new)
        left = names(t + "/run/step")
        assert "notes.txt" in left and "config.json" in left, left
        assert not [n for n in left if "of-00004" in n], left
        index = t + "/run/step/model.safetensors.index.json"
        if os.path.exists(index):
            same("what the index names", set(json.loads(read_all(index))["weight_map"].values()), {n for n in left if n.endswith(".safetensors")})


def test_other_roles_stay(t):
    optimizer = {"optimizer.state.exp_avg": ("F32", (3,), tensor_bytes("o", 12))}
    write_checkpoint(t + "/hf", {**TENSORS, **optimizer})
    os.mkdir(t + "/run")
    run("convert", t + "/hf", t + "/run/step", "--to", "dcp", "--ranks", "2")
    new = dict(list(model(2).items())[:3])
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        write(m / "step/model.safetensors", safetensors_image(new))
        fsync(m / "step")
        umount(m)
    same("tensors", tensors_of(t + "/run/step"), {**new, **optimizer})


def test_arrays_merge(t):
    dcp_source(t)
    new = changed(TENSORS["model.norm.bias"])
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        write(m / "step/tensors/model.norm.bias.npy", npy_of(new))
        write(m / "step/tensors/more.npy", npy_of(("F32", (2,), b"abcdefgh")))
        umount(m)
    same("tensors", tensors_of(t + "/run/step"), {**TENSORS, "model.norm.bias": new, "more": ("F32", (2,), b"abcdefgh")})


def test_optimizer_and_adapter(t):
    adapter = {"base_model.model.q.lora_A.weight": ("F32", (2, 3), tensor_bytes("a", 24))}
    for fmt in ("dcp:mesh=2x2", "dcp:ranks=2"):
        for first in ("model", "optimizer"):
            shutil.rmtree(t + "/run", ignore_errors=True)
            os.makedirs(t + "/run")
            with Mount(t + "/run", t + "/mnt", "rw,save=" + fmt) as m:
                os.mkdir(m / "step")
                os.mkdir(m / "peft")
                for what in sorted(("model", "optimizer"), key=lambda w, f=first: w != f):
                    if what == "model":
                        write(m / "step/model.safetensors", IMAGE)
                    else:
                        os.makedirs(m / "step/optimizer", exist_ok=True)
                        write(m / "step/optimizer/optimizer.safetensors", safetensors_image(OPTIMIZER))
                write(m / "peft/adapter_model.safetensors", safetensors_image(adapter))
                write(m / "peft/adapter_config.json", b"{}")
                umount(m)
            with Mount(t + "/run", t + "/mnt") as m:
                for key, (_, _, data) in TENSORS.items():
                    same(key, read_all(m / f"step/raw/{key}"), data)
                got = read_all(m / "step/optimizer/optimizer.safetensors")
                for key, (_, _, data) in OPTIMIZER.items():
                    assert data in got, f"{fmt}: {key}"
                for key, (_, _, data) in adapter.items():
                    same(key, read_all(m / f"peft/raw/{key}"), data)
            same("staging", staging(t + "/run"), [])


def put_part(step, part):
    if part == "model":
        write(step + "/model.safetensors", IMAGE)
    elif part == "optimizer":
        os.makedirs(step + "/optimizer", exist_ok=True)
        write(step + "/optimizer/optimizer.safetensors", safetensors_image(OPTIMIZER))
    else:
        os.makedirs(step + "/tensors", exist_ok=True)
        for key, tensor in MORE.items():
            write(f"{step}/tensors/{key}.npy", npy_of(tensor))


def parts_apart(t, fmt):
    """What differs between parts that come together and with pauses, in either order."""
    one_role = fmt.partition(":")[0] in ("hf", "dcp-hf", "npz", "olmo")
    orders = [("model", "arrays")] if one_role else [("model", "arrays"), ("model", "optimizer"), ("optimizer", "model")]
    jobs = [(parts, seconds) for parts in orders for seconds in PAUSES]
    first, failed = {}, []
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,save=" + fmt) as m:
        def save(i):
            step, (parts, seconds) = m / str(i), jobs[i]
            os.mkdir(step)
            for k, part in enumerate(parts):
                pause(seconds if k else 0)
                put_part(step, part)
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(save, range(len(jobs))))
        umount(m)
    for i, (parts, seconds) in enumerate(jobs):
        got = described(f"{t}/run/{i}")
        want = first.setdefault("".join(sorted(parts)), got)
        failed += [f"{fmt}: {parts}, pause {seconds}: {field}: {brief(got[field])}, not {brief(want[field])}" for field in want if got[field] != want[field]]
    return failed


def test_parts_that_come_apart(t):
    """What is published of the first part is what the second one joins: as if both had come together."""
    formats = FORMATS[:3] if SANITIZED else FORMATS
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        failed = sum(pool.map(parts_apart, [f"{t}/{i}" for i in range(len(formats))], formats), [])
    assert not failed, "\n".join(failed)


def test_the_program_that_saves_reads_its_views(t):
    """It made the directory itself, and syncs nothing."""
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp") as m:
        os.mkdir(m / "step")
        write(m / "step/model.safetensors", IMAGE)
        key = next(iter(TENSORS))
        wait_for("a view of what was saved", PATIENCE, lambda: os.path.exists(m / f"step/raw/{key}"))
        same("view", read_all(m / f"step/raw/{key}"), TENSORS[key][2])
        same("report", json.loads(read_all(m / "step/.unshard/checkpoint.json"))["format"], "torch-dcp")
        umount(m)


def test_stored_names_are_read_and_removed_as_on_a_disk(t):
    """Only writing one is a transaction."""
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/model.safetensors", IMAGE)
    write_file(t + "/run/step/config.json", b"{}")
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp") as m:
        same("read", read_all(m / "step/model.safetensors"), IMAGE)
        os.rename(m / "step/model.safetensors", m / "step/kept.safetensors")
        same("renamed", names(t + "/run/step"), ["config.json", "kept.safetensors"])
        os.rename(m / "step/kept.safetensors", m / "step/model.safetensors")
        new = model(2)
        write(m / "step/model.safetensors", safetensors_image(new))
        fsync(m / "step")
        same("an existing checkpoint keeps its format", stored(t + "/run/step"), new)
        os.unlink(m / "step/model.safetensors")
        same("removed", names(t + "/run/step"), ["config.json"])
        umount(m)


def test_open_files_stay(t):
    """Storage files that are open while a set replaces them keep their inode, bytes and later writes."""
    write_checkpoint(t + "/run/step", TENSORS, shards=2)
    old = "model-00001-of-00002.safetensors"
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        with open(m / f"step/{old}", "rb", buffering=0) as shard, open(m / "step/train.log", "ab", buffering=0) as log:
            data = read_all(t + f"/run/step/{old}")
            log.write(b"before\n")
            write(m / "step/model.safetensors", safetensors_image(model(2)))
            fsync(m / "step")
            log.write(b"after\n")
            same("its bytes", shard.read(), data)
            assert not os.path.exists(t + f"/run/step/{old}") or read_all(t + f"/run/step/{old}") != data, "it was not replaced"
        umount(m)
    same("log", read_all(t + "/run/step/train.log"), b"before\nafter\n")
    same("tensors", tensors_of(t + "/run/step"), model(2))


# ---- where save= holds ----

def test_the_attribute_of_a_directory(t):
    """It holds there only, goes along with a rename, and ends with the mount."""
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for name in "with", "without":
            os.mkdir(m / name)
        os.setxattr(m / "with", "user.unshard.save", b"dcp:ranks=2")
        same("it is told", os.getxattr(m / "with", "user.unshard.save"), b"dcp:ranks=2")
        fails("no format", errno.EINVAL, lambda: os.setxattr(m / "with", "user.unshard.save", b"nothing"))
        os.rename(m / "with", m / "renamed")
        for name in "renamed", "without":
            write(m / f"{name}/model.safetensors", IMAGE)
        umount(m)
    same("sharded", names(t + "/run/renamed"), [".metadata", "__0_0.distcp", "__1_0.distcp"])
    same("as on a disk", read_all(t + "/run/without/model.safetensors"), IMAGE)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        fails("another mount", errno.ENODATA, lambda: os.getxattr(m / "renamed", "user.unshard.save"))
        umount(m)


def test_renaming_publishes(t):
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp:ranks=2") as m:
        os.mkdir(m / "step.tmp")
        write(m / "step.tmp/model.safetensors", IMAGE)
        write(m / "step.tmp/config.json", b"{}")
        os.rename(m / "step.tmp", m / "step")
        same("names", names(t + "/run"), ["step", "step/.metadata", "step/__0_0.distcp", "step/__1_0.distcp", "step/config.json"])
        same("tensors", tensors_of(t + "/run/step"), TENSORS)
        umount(m)


def test_side_files_are_the_disks(t):
    """Before, between and after: they are there at once."""
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp") as m:
        os.mkdir(m / "step")
        write(m / "step/config.json", b"{}")
        same("at once", read_all(t + "/run/step/config.json"), b"{}")
        with open(m / "step/model.safetensors", "wb", buffering=0) as f:
            f.write(IMAGE[:5000])
            write(m / "step/training_args.bin", b"args")
            same("at once", read_all(t + "/run/step/training_args.bin"), b"args")
            same("listed", sorted(os.listdir(m / "step")), sorted(n for n in os.listdir(t + "/run/step") if not n.startswith(".unshard")))
            f.write(IMAGE[5000:])
        write(m / "step/trainer_state.json", b"{}")
        umount(m)
    same("names", names(t + "/run/step"), [".metadata", "__0_0.distcp", "config.json", "trainer_state.json", "training_args.bin"])


def test_copies_of_a_read_only_mount(t):
    """cp -r: all views, each key by several names; .unshard/ is ignored."""
    write_checkpoint(t + "/src/a", TENSORS)
    write_file(t + "/src/a/notes.txt", b"notes")
    for fmt in ("hf", "dcp:ranks=2", "zarr"):
        shutil.rmtree(t + "/run", ignore_errors=True)
        os.makedirs(t + "/run")
        with Mount(t + "/src", t + "/ro") as ro, Mount(t + "/run", t + "/mnt", "rw,save=" + fmt) as m:
            subprocess.run(["cp", "-r", ro / "a", m / "copy"], check=True)
            fsync(m / "copy")
            umount(m)
        same(fmt, tensors_of(t + "/run/copy"), TENSORS)
        left = names(t + "/run/copy")
        same("side files", [n for n in left if n in ("config.json", "notes.txt")], ["config.json", "notes.txt"])
        same("no views", [n for n in left if n.split("/")[0] in (".unshard", "tree", "raw", "tensors", "optimizer")], [])


# ---- incomplete ----

def test_an_incomplete_save(t):
    """Reported with what is missing, kept by unmounts, kills and signals, continued with any save of the same mount option."""
    for end in ("unmount", "SIGTERM", "SIGKILL"):
        for seconds in PAUSES:
            shutil.rmtree(t + "/run", ignore_errors=True)
            os.makedirs(t + "/run")
            path = "step/model.safetensors"
            half = len(IMAGE) // 2
            with Mount(t + "/run", t + "/mnt", "rw,save=dcp:ranks=2") as m:
                os.mkdir(m / "step")
                write(m / path, IMAGE[:half])
                pause(seconds)
                fails("fsync of the directory", errno.EAGAIN, lambda: fsync(m / "step"))
                said = last_error(m, "step")
                assert "model.safetensors" in said and str(half) in said, said
                same("not published", names(t + "/run"), ["step"])
                if end == "unmount":
                    assert "model.safetensors" in umount(m, 1)
                else:
                    m.process.send_signal(getattr(signal, end))
                    m.process.wait(PATIENCE)
                    m.process.returncode = 0
                    unmount_hard(m.path)
            said = doctor(t + "/run")
            missing = [(int(x), int(y) + 1) for x, y in re.findall(r"bytes (\d+) to (\d+) of", said)]
            assert "model.safetensors" in said and missing and missing[0][0] <= half, said
            assert end == "SIGKILL" or missing == [(half, len(IMAGE))], said  # a kill may take the journal's last word
            with Mount(t + "/run", t + "/mnt", "rw,save=dcp:ranks=2") as m:
                pause(seconds)
                for begin, stop in missing:
                    go_on(m / path, IMAGE[begin:stop], begin)
                fsync(m / "step")
                umount(m)
            same(f"{end}: continued", tensors_of(t + "/run/step"), TENSORS)
            same("names", names(t + "/run/step"), [".metadata", "__0_0.distcp", "__1_0.distcp"])
            same("staging", staging(t + "/run"), [])


def test_a_set_without_one_of_its_files(t):
    keys = list(TENSORS)
    parts = [{k: TENSORS[k] for k in keys[i::3]} for i in range(3)]
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        os.mkdir(m / "step")
        for i in (0, 2):
            write(m / f"step/model-{i + 1:05}-of-00003.safetensors", safetensors_image(parts[i]))
        fails("fsync", errno.EAGAIN, lambda: fsync(m / "step"))
        assert "model-00002-of-00003" in last_error(m, "step"), last_error(m, "step")
        umount(m, 1)
    same("nothing is published", names(t + "/run/step"), [])
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        write(m / "step/model-00002-of-00003.safetensors", safetensors_image(parts[1]))
        umount(m)
    same("continued", tensors_of(t + "/run/step"), TENSORS)
    same("staging", staging(t + "/run"), [])


def test_an_incomplete_save_is_discarded(t):
    for how in ("unlink", "doctor"):
        shutil.rmtree(t + "/run", ignore_errors=True)
        write_checkpoint(t + "/run/step", TENSORS)
        with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
            write(m / "step/model.safetensors", safetensors_image(model(2))[:5000])
            if how == "unlink":
                os.unlink(m / "step/model.safetensors")
                fsync(m / "step")
            umount(m, int(how == "doctor"))
        if how == "doctor":
            doctor(t + "/run", "--discard")
        same("staging", staging(t + "/run"), [])
        same("the old one", stored(t + "/run/step"), TENSORS)


def test_its_directory(t):
    """With save=, fsync of the checkpoint's directory says EAGAIN too; rename takes it along, rmdir is refused."""
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        for name in "step", "empty":
            os.mkdir(m / name)
        write(m / "step/model.safetensors", IMAGE[:5000])
        fails("rmdir", errno.ENOTEMPTY, lambda: os.rmdir(m / "step"))
        fails("rename onto it", errno.ENOTEMPTY, lambda: os.rename(m / "empty", m / "step"))
        os.rename(m / "step", m / "moved")
        go_on(m / "moved/model.safetensors", IMAGE[5000:], 5000)
        fsync(m / "moved")
        umount(m)
    same("tensors", stored(t + "/run/moved"), TENSORS)
    same("names", sorted(os.listdir(t + "/run")), ["empty", "moved"])


def test_an_index_that_differs(t):
    """Before publication the save is incomplete; after it that is reported, and what is published stays."""
    index = json.dumps({"weight_map": {k: "model.safetensors" for k in [*TENSORS, "one.more"]}}).encode()
    right = json.dumps({"weight_map": {k: "model.safetensors" for k in TENSORS}}).encode()
    name = "step/model.safetensors.index.json"
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp") as m:
        os.mkdir(m / "step")
        write(m / name, index)
        write(m / "step/model.safetensors", IMAGE)
        fails("before", errno.EAGAIN, lambda: fsync(m / "step"))
        assert "one.more" in last_error(m, "step"), last_error(m, "step")
        same("not published", names(t + "/run/step"), [])
        write(m / name, right)
        fsync(m / "step")
        same("published", tensors_of(t + "/run/step"), TENSORS)
        with contextlib.suppress(OSError):
            write(m / name, index)
        with contextlib.suppress(OSError):
            fsync(m / "step")
        assert "one.more" in last_error(m, "step"), last_error(m, "step")
        same("what is published stays", tensors_of(t + "/run/step"), TENSORS)
        m.process.send_signal(signal.SIGTERM)
        m.process.wait(PATIENCE)
    same("the index is not stored", names(t + "/run/step"), [".metadata", "__0_0.distcp"])


# ---- errors ----

def image_with(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_bad_headers(t):
    one = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    bad = {
        "no header": b"no safetensors file at all, whatever its name says",
        "too long": struct.pack("<Q", 1 << 60) + b"{}",
        "no json": image_with(b"[1, 2"),
        "a key twice": image_with(b"{" + one + b"," + one + b"}", b"abcd"),
        "overlapping": image_with({k: {"dtype": "F32", "shape": [1], "data_offsets": [n, n + 4]} for k, n in (("a", 0), ("b", 2))}, bytes(6)),
        "shape": image_with({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
    }
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp") as m:
        for name, image in bad.items():
            os.mkdir(m / "step")
            fd = os.open(m / "step/model.safetensors", os.O_WRONLY | os.O_CREAT)
            fails(name, errno.EINVAL, lambda image=image: os.write(fd, image))
            with contextlib.suppress(OSError):
                os.close(fd)
            assert "model.safetensors" in last_error(m, "step"), (name, last_error(m, "step"))
            os.unlink(m / "step/model.safetensors")
            os.rmdir(m / "step")
        umount(m)
    same("nothing", names(t + "/run") + staging(t + "/run"), [])


def test_no_room(t):
    """Room for all of it is asked for once the header is known: that write fails, and nothing is left half."""
    if os.geteuid() != 0:
        raise Skip("a small disk takes root")
    os.mkdir(t + "/run")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", t + "/run"], capture_output=True, check=False).returncode:
        raise Skip("no tmpfs can be mounted")
    try:
        image = safetensors_image({"big": ("U8", (8 << 20,), bytes(8 << 20))})
        with Mount(t + "/run", t + "/mnt", "rw,save=dcp:ranks=2") as m:
            os.mkdir(m / "step")
            fd = os.open(m / "step/model.safetensors", os.O_WRONLY | os.O_CREAT)
            fails("the header", errno.ENOSPC, lambda: os.write(fd, image[:4096]))
            with contextlib.suppress(OSError):
                os.close(fd)
            os.unlink(m / "step/model.safetensors")
            write(m / "step/model.safetensors", IMAGE)
            fsync(m / "step")
            umount(m)
        same("what fits is saved", tensors_of(t + "/run/step"), TENSORS)
        same("staging", staging(t + "/run"), [])
    finally:
        unmount_hard(t + "/mnt")
        subprocess.run(["umount", "-l", t + "/run"], check=True)


def test_what_a_format_cannot_store(t):
    """Refused, unless drop= names it; what is omitted is listed."""
    tensors = {**TENSORS, "codes": ("F8_E4M3", (4,), b"abcd")}
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,save=npz") as m:
        os.mkdir(m / "step")
        try:
            write(m / "step/model.safetensors", safetensors_image(tensors))
            fsync(m / "step")
            raise Skip("npz stores it")
        except OSError as e:
            same("errno", errno.errorcode[e.errno], "EINVAL")
        assert "codes" in last_error(m, "step"), last_error(m, "step")
        os.unlink(m / "step/model.safetensors")
        umount(m)
    same("nothing", names(t + "/run"), ["step"])


def test_another_mount_on_the_same_target(t):
    os.makedirs(t + "/run/step")
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as a, Mount(t + "/run", t + "/mnt2", "rw,save=hf") as b:
        write(a / "step/model.safetensors", IMAGE[:5000])
        fails("the other", errno.EBUSY, lambda: open(b / "step/model.safetensors", "wb"))
        write_file(b / "step/config.json", b"{}")
        go_on(a / "step/model.safetensors", IMAGE[5000:], 5000)
        fsync(a / "step")
        umount(a)
        write(b / "step/model.safetensors", safetensors_image(model(2)))
        umount(b)
    same("both, one after the other", stored(t + "/run/step"), model(2))


def test_a_reader_meanwhile(t):
    """Old bytes until all have arrived; the writer reads its own back."""
    dcp_source(t)
    new = model(2)
    image = safetensors_image(new)
    key = next(iter(TENSORS))
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        fd = os.open(m / "step/model.safetensors", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.write(fd, image[:9000])
        same("raw", read_all(m / f"step/raw/{key}"), TENSORS[key][2])
        same("read back", os.pread(fd, 20000, 0), image[:9000])
        same("and a part of it", os.pread(fd, 100, 5000), image[5000:5100])
        os.write(fd, image[9000:])
        os.close(fd)
        wait_for("publication", PATIENCE, lambda: read_all(m / f"step/raw/{key}") == new[key][2])
        umount(m)
    same("tensors", tensors_of(t + "/run/step"), new)


def test_an_option_that_is_wrong(t):
    os.makedirs(t + "/run")
    for fmt in ("nothing", "dcp:ranks=0", "hf:ranks=x"):
        done = subprocess.run([UNSHARD, "mount", t + "/run", t + "/mnt", "-o", f"rw,save={fmt}"], capture_output=True, text=True, check=False)
        assert done.returncode in (1, 2), done
        same("one line", done.stderr.count("\n"), 1)


if __name__ == "__main__":
    main(globals(), 1200)
