# SPDX-License-Identifier: MIT
"""Edits of single tensors by view names: a transaction each, complete or not, published in one step or kept."""
import contextlib
import errno
import mmap
import os
import pwd
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

from editlib import PAUSES, changed, doctor, fsync, go_on, last_error, npy_of, npy_parts, names, pause, run, staging, tensors_of, umount, write
from mountlib import (PATIENCE, UNSHARD, Mount, Skip, fails, is_mounted, main, make_tensors, npy_image, read_all, same, stored, tensor_bytes, unmount_hard,
                      wait_for, write_checkpoint, write_file)

TENSORS = make_tensors(1)
KEYS = list(TENSORS)
A, B, C = KEYS[0], KEYS[1], KEYS[2]  # F32, BF16, U8


def source(t):
    write_checkpoint(t + "/run/step", TENSORS)
    write_file(t + "/run/step/notes.txt", b"notes")
    return t + "/run"


def mount(t, options="rw", where="/mnt"):
    return Mount(t + "/run", t + where, options)


def tree_of(key):
    return "tree/" + key.replace(".", "/") + ".npy"


def replaced(key, tensor):
    return {**TENSORS, key: tensor}


def half(path, image):
    """The first half, by a program that then closes."""
    with open(path, "wb") as f:
        f.write(image[:len(image) // 2])
    return len(image) // 2


# ---- complete edits ----

WAYS = {
    "npy": (f"tensors/{A}.npy", lambda path, new: write(path, npy_of(new))),
    "npy, by a temporary name": (f"tensors/{A}.npy", lambda path, new: write_file(path, npy_of(new))),
    "npy, data first": (f"tensors/{A}.npy", lambda path, new: by_parts(path, npy_of(new))),
    "npy, by a mapping": (f"tensors/{A}.npy", lambda path, new: by_mapping(path, npy_of(new))),
    "tree": (tree_of(A), lambda path, new: write(path, npy_of(new))),
    "tree, by a temporary name": (tree_of(A), lambda path, new: write_file(path, npy_of(new))),
    "raw": (f"raw/{A}", lambda path, new: write(path, new[2])),
    "raw, in place": (f"raw/{A}", lambda path, new: go_on(path, new[2], 0)),
    "raw, some bytes": (f"raw/{A}", lambda path, new: go_on(path, new[2][100:200], 100)),
    "npy, some bytes": (f"tensors/{A}.npy", lambda path, new: go_on(path, new[2][100:200], len(npy_of(new)) - len(new[2]) + 100)),
}


def by_parts(path, image):
    fd = os.open(path, os.O_RDWR | os.O_TRUNC)
    other = os.open(path, os.O_WRONLY)
    for i, at in enumerate(sorted(range(0, len(image), 1000), reverse=True)):
        os.pwrite((fd, other)[i % 2], image[at:at + 1000], at)
    os.close(fd)
    os.close(other)


def by_mapping(path, image):
    fd = os.open(path, os.O_RDWR | os.O_TRUNC)
    os.ftruncate(fd, len(image))
    with mmap.mmap(fd, len(image)) as m:
        os.close(fd)
        m[:] = image
        m.flush()


def expected(how, new):
    old = TENSORS[A][2]
    return replaced(A, (*new[:2], old[:100] + new[2][100:200] + old[200:]) if "some bytes" in how else new)


PUBLISH = {
    "fsync of the view directory": lambda m, path: fsync(os.path.join(m.path, "step", path.partition("/")[0])),
    "fsync of the checkpoint": lambda m, path: fsync(m / "step"),
    "rename of the checkpoint": lambda m, path: (os.rename(m / "step", m / "other"), os.rename(m / "other", m / "step")),
    "open of a report": lambda m, path: read_all(m / "step/.unshard/checkpoint.json"),
    "open of the objects": lambda m, path: read_all(m / "step/.unshard/objects.json"),
    "waiting": lambda m, path: None,
    "unmount": lambda m, path: umount(m),
    "SIGTERM": lambda m, path: (m.process.send_signal(signal.SIGTERM), m.process.wait(PATIENCE)),
}


def test_each_way_to_write_and_to_publish(t):
    for i, (how, (path, do)) in enumerate(WAYS.items()):
        for j, (by, publish) in enumerate(PUBLISH.items()):
            if (i + j) % 4 and i and j:  # each with each of the first, and a quarter of the others
                continue
            shutil.rmtree(t + "/run", ignore_errors=True)
            source(t)
            new = changed(TENSORS[A], how)
            with mount(t) as m:
                do(os.path.join(m.path, "step", path), new)
                publish(m, path)
                if by == "waiting":
                    wait_for("publication", PATIENCE, lambda: stored(t + "/run/step") == expected(how, new) and not staging(t + "/run"))
                same(f"{how}, {by}", stored(t + "/run/step"), expected(how, new))
                if is_mounted(m.path):
                    want = expected(how, new)[A]
                    same("raw", read_all(m / f"step/raw/{A}"), want[2])
                    same("tensors", read_all(m / f"step/tensors/{A}.npy"), read_all(os.path.join(m.path, "step", tree_of(A))))
                    same("tensors", read_all(m / f"step/tensors/{A}.npy")[-len(want[2]):], want[2])
            same("names", names(t + "/run/step"), ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                                  "model.safetensors.index.json", "notes.txt"])
            same("staging", staging(t + "/run"), [])


def test_a_whole_view_shows_what_is_complete(t):
    """open of a view of the whole checkpoint publishes first; here of DCP, which has a made-up model.safetensors."""
    write_checkpoint(t + "/hf", TENSORS)
    os.mkdir(t + "/run")
    run("convert", t + "/hf", t + "/run/step", "--to", "dcp", "--ranks", "2")
    new = changed(TENSORS[A])
    with mount(t) as m:
        read_all(m / "step/model.safetensors")
        write(m / f"step/tensors/{A}.npy", npy_of(new))
        assert new[2] in read_all(m / "step/model.safetensors"), "the view has the old bytes"
        same("published", tensors_of(t + "/run/step"), replaced(A, new))
        umount(m)
    same("shards", len([n for n in os.listdir(t + "/run/step") if n.endswith(".distcp")]), 2)


def test_shapes_and_dtypes_change(t):
    """Another shape, another dtype, a new key, BF16 by <V2, one byte floats by the attribute, a big-endian one, Fortran order, no dimension."""
    cases = {
        A: (npy_image("<f4", (3, 5), tensor_bytes("a", 60)), None, ("F32", (3, 5), tensor_bytes("a", 60))),
        B: (npy_image("<i8", (4,), tensor_bytes("b", 32)), None, ("I64", (4,), tensor_bytes("b", 32))),
        "new.bf16": (npy_image("<V2", (3,), b"abcdef"), None, ("BF16", (3,), b"abcdef")),
        "new.f8": (npy_image("|V1", (4,), b"abcd"), b"F8_E5M2", ("F8_E5M2", (4,), b"abcd")),
        "new/slash": (npy_image("<f2", (2,), b"abcd"), None, ("F16", (2,), b"abcd")),
        "new.big": (npy_image(">i4", (2,), b"\0\0\0\1\0\0\0\2"), None, ("I32", (2,), b"\1\0\0\0\2\0\0\0")),
        "new.scalar": (npy_image("<f4", (), b"abcd"), None, ("F32", (), b"abcd")),
        "new.fortran": (b"".join(npy_parts("<i2", (2, 2), b"\1\0\2\0\3\0\4\0", True)), None, ("I16", (2, 2), b"\1\0\3\0\2\0\4\0")),
        "new.empty": (npy_image("<f4", (0, 3), b""), None, ("F32", (0, 3), b"")),
    }
    for seconds in PAUSES:
        shutil.rmtree(t + "/run", ignore_errors=True)
        source(t)
        with mount(t) as m:
            for i, (key, (image, dtype, _)) in enumerate(cases.items()):
                path = m / f"step/tensors/{key.replace('/', '%2F')}.npy"
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                if dtype:
                    os.setxattr(fd, "user.unshard.dtype", dtype)
                os.write(fd, image)
                os.close(fd)
                pause(seconds if i % 4 == 0 else 0)
            fsync(m / "step/tensors")
            umount(m)
        want = {**TENSORS, **{key: tensor for key, (_, _, tensor) in cases.items()}}
        same(f"pause {seconds}", stored(t + "/run/step"), want)


def test_one_byte_elements_need_a_dtype(t):
    source(t)
    with mount(t) as m:
        path = m / "step/tensors/new.npy"
        with contextlib.suppress(OSError):
            write(path, npy_image("|V1", (4,), b"abcd"))
        fails("fsync", errno.EINVAL, lambda: fsync(m / "step/tensors"))
        assert "new.npy" in last_error(m, "step"), last_error(m, "step")
        os.setxattr(path, "user.unshard.dtype", b"F8_E4M3")
        fsync(m / "step/tensors")
        umount(m)
    same("stored", stored(t + "/run/step"), {**TENSORS, "new": ("F8_E4M3", (4,), b"abcd")})


def test_many_edits_in_any_order(t):
    """All tensors, by names of two views, by turns and with pauses: the same for every schedule."""
    for seconds in PAUSES:
        for seed in range(3):
            shutil.rmtree(t + "/run", ignore_errors=True)
            source(t)
            rnd = random.Random(seed)
            edits = [(key, view) for key in KEYS for view in ("tensors", "raw")]
            rnd.shuffle(edits)
            want = dict(TENSORS)
            with mount(t) as m:
                for i, (key, view) in enumerate(edits):
                    want[key] = changed(TENSORS[key], f"{seed} {key} {view}")
                    path = f"step/raw/{key}" if view == "raw" else f"step/tensors/{key}.npy"
                    write(m / path, want[key][2] if view == "raw" else npy_of(want[key]))
                    pause(seconds if i == 5 else 0)
                fsync(m / "step")
                umount(m)
            same(f"pause {seconds}, seed {seed}", stored(t + "/run/step"), want)


def test_each_view_after_each_other(t):
    """All of it by one name, then a few bytes by another: those begin with what is complete, so nothing of either is lost."""
    views = {"raw": f"raw/{A}", "tensors": f"tensors/{A}.npy", "tree": tree_of(A)}
    for first, second in ((a, b) for a in views for b in views):
        shutil.rmtree(t + "/run", ignore_errors=True)
        source(t)
        new = changed(TENSORS[A], first + second)
        with mount(t) as m:
            write(os.path.join(m.path, "step", views[first]), new[2] if first == "raw" else npy_of(new))
            path = os.path.join(m.path, "step", views[second])
            go_on(path, b"patched!", os.stat(path).st_size - 8)
            fsync(m / "step")
            umount(m)
        same(f"{first}, then {second}", stored(t + "/run/step"), replaced(A, (*new[:2], new[2][:-8] + b"patched!")))


def test_options_that_change_what_is_shown(t):
    """What is changed in showing is not written back; storage is the disk all the same."""
    tensors = {A: TENSORS[A]}
    write_checkpoint(t + "/run/step", tensors)
    for option in ("dtype=BF16", "prefix=drop"):
        with mount(t, "rw," + option) as m:
            fails(option, errno.EROFS, lambda: open(m / f"step/tensors/{A}.npy", "r+b"))
            fails(option, errno.EROFS, lambda: write(m / "step/tensors/new.npy", npy_of(TENSORS[A])))
            write(m / "step/notes.txt", option.encode())
            umount(m)
        same("notes", read_all(t + "/run/step/notes.txt"), option.encode())
    same("nothing has changed", stored(t + "/run/step"), tensors)


def test_every_format_keeps_its_format(t):
    """Whatever save= says; save_formats.py changes a tensor of every format."""
    write_checkpoint(t + "/hf", TENSORS)
    os.mkdir(t + "/run")
    for to in ("dcp", "torch_dist", "zarr", "pt"):
        run("convert", t + "/hf", t + f"/run/{to}", "--to", to)
    before = {to: names(t + f"/run/{to}") for to in os.listdir(t + "/run")}
    new = changed(TENSORS[A])
    with mount(t, "rw,save=hf") as m:
        for to in before:
            write(m / f"{to}/tensors/{A}.npy", npy_of(new))
        umount(m)
    for to, old in before.items():
        same(f"{to}: names", names(t + f"/run/{to}"), old)
        same(to, tensors_of(t + f"/run/{to}"), replaced(A, new))


# ---- names ----

def test_temporary_names(t):
    """A name in a view directory that is no view name is a file of its own until it gets one."""
    source(t)
    new = changed(TENSORS[A])
    with mount(t) as m:
        for name in (f"tensors/{A}.npy.tmp", "tensors/.tmp-1234", "tensors/x", os.path.dirname(tree_of(A)) + "/part.tmp"):
            path = os.path.join(m.path, "step", name)
            write(path, npy_of(new)[:100])
            same("read back", read_all(path), npy_of(new)[:100])
            assert os.path.basename(name) in os.listdir(os.path.dirname(path)), "it is not listed"
            os.unlink(path)
            fails("unlinked", errno.ENOENT, lambda path=path: os.stat(path))
        same("nothing is changed", stored(t + "/run/step"), TENSORS)
        temp = m / "step/tensors/.a.tmp"
        write(temp, npy_of(new)[:100])
        go_on(temp, npy_of(new)[100:], 100)
        os.rename(temp, m / f"step/tensors/{A}.npy")
        fsync(m / "step/tensors")
        same("renamed onto its name", stored(t + "/run/step"), replaced(A, new))
        umount(m)
    same("staging", staging(t + "/run"), [])


def test_renames_of_views(t):
    source(t)
    with mount(t) as m:
        fails("out of the view", errno.EXDEV, lambda: os.rename(m / f"step/tensors/{A}.npy", m / "step/a.npy"))
        fails("out of the checkpoint", errno.EXDEV, lambda: os.rename(m / f"step/raw/{A}", m / "a"))
        fails("a directory of views", errno.EXDEV, lambda: os.rename(m / "step/tensors", m / "tensors"))
        umount(m)
    same("as it was", stored(t + "/run/step"), TENSORS)


def test_a_file_is_moved_onto_a_view(t):
    """A storage file that gets a view name: it is copied, or the program does it (EXDEV)."""
    source(t)
    new = changed(TENSORS[A])
    write_file(t + "/run/a.npy", npy_of(new))
    with mount(t) as m:
        shutil.move(m / "a.npy", m / f"step/tensors/{A}.npy")
        umount(m)
    same("stored", stored(t + "/run/step"), replaced(A, new))
    assert not os.path.exists(t + "/run/a.npy")


def test_raw_needs_its_tensor(t):
    source(t)
    with mount(t) as m:
        fails("a new key by raw/", errno.ENOENT, lambda: os.stat(m / "step/raw/new"))
        fd = os.open(m / f"step/raw/{A}", os.O_WRONLY | os.O_TRUNC)
        os.write(fd, b"too short")
        os.close(fd)
        fails("it is shorter than its tensor", errno.EAGAIN, lambda: fsync(m / "step/raw"))
        os.unlink(m / f"step/raw/{A}")
        umount(m)
    same("as it was", stored(t + "/run/step"), TENSORS)


# ---- removals ----

def test_removal(t):
    """unlink removes at fsync; until then it is kept, over a remount too."""
    for view, path in (("tensors", f"tensors/{C}.npy"), ("tree", tree_of(C)), ("raw", f"raw/{C}")):
        for at in (view, ""):
            shutil.rmtree(t + "/run", ignore_errors=True)
            source(t)
            with mount(t) as m:
                os.unlink(os.path.join(m.path, "step", path))
                fails("its name", errno.ENOENT, lambda path=path: os.stat(os.path.join(m.path, "step", path)))
                time.sleep(0.5)
                same("nothing is removed yet", stored(t + "/run/step"), TENSORS)
                umount(m, 1)
            same("nor by an unmount", stored(t + "/run/step"), TENSORS)
            assert staging(t + "/run"), "the removal was not kept"
            with mount(t) as m:
                fsync(os.path.join(m.path, "step", at))
                same(f"{view}, fsync of {at or 'the checkpoint'}", stored(t + "/run/step"), {k: v for k, v in TENSORS.items() if k != C})
                umount(m)
            same("staging", staging(t + "/run"), [])


def test_removals_are_dropped(t):
    """rmdir of a view directory drops them, and changes nothing else."""
    source(t)
    with mount(t) as m:
        shutil.rmtree(m / "step/tensors")
        same("they are back", sorted(os.listdir(m / "step/tensors")), sorted(k + ".npy" for k in KEYS))
        subprocess.run(["rm", "-r", m / "step/raw"], check=True)
        same("they are back", sorted(os.listdir(m / "step/raw")), sorted(KEYS))
        umount(m)
    same("as it was", stored(t + "/run/step"), TENSORS)
    same("staging", staging(t + "/run"), [])


def test_written_again_after_a_removal(t):
    source(t)
    new = changed(TENSORS[A])
    with mount(t) as m:
        os.unlink(m / f"step/tensors/{A}.npy")
        write(m / f"step/tensors/{A}.npy", npy_of(new))
        fsync(m / "step/tensors")
        umount(m)
    same("stored", stored(t + "/run/step"), replaced(A, new))


def test_a_checkpoint_is_removed_as_on_a_disk(t):
    """rm -r sees no views; afterwards nothing is left, and a new one of that name may come."""
    source(t)
    with mount(t) as m:
        listing = sorted(os.listdir(m / "step"))
        same("no view is listed", [n for n in listing if n in ("tensors", "tree", "raw", "optimizer", ".unshard", "model.safetensors")], [])
        subprocess.run(["rm", "-r", m / "step"], check=True)
        same("nothing", os.listdir(t + "/run"), [])
        umount(m)


# ---- incomplete ones ----

def test_an_incomplete_edit(t):
    """It is kept, shown by nobody, reported with what is missing; it is continued, and published then."""
    for seconds in PAUSES:
        shutil.rmtree(t + "/run", ignore_errors=True)
        source(t)
        new = changed(TENSORS[A])
        image, path = npy_of(new), f"step/tensors/{A}.npy"
        with mount(t) as m:
            at = half(m / path, image)
            pause(seconds)
            same("readers have the old bytes", read_all(m / f"step/raw/{A}"), TENSORS[A][2])
            fails("fsync of the view directory", errno.EAGAIN, lambda: fsync(m / "step/tensors"))
            said = last_error(m, "step")
            assert f"tensors/{A}.npy" in said and str(at) in said, said
            same("nothing is published", stored(t + "/run/step"), TENSORS)
            fsync(m / "step/notes.txt")
            said = umount(m, 1)
            assert f"tensors/{A}.npy" in said, said
        assert staging(t + "/run"), "it was not kept"
        same("nor by an unmount", stored(t + "/run/step"), TENSORS)
        said = doctor(t + "/run")
        assert f"tensors/{A}.npy" in said and str(at) in said and "step" in said, said
        with mount(t) as m:
            pause(seconds)
            go_on(m / path, image[at:], at)
            fsync(m / "step/tensors")
            same("continued", stored(t + "/run/step"), replaced(A, new))
            umount(m)
        same("staging", staging(t + "/run"), [])
        assert "/step" not in doctor(t + "/run"), "something is said to be left"


def test_what_the_writer_sees_meanwhile(t):
    """While the name is open for writing its own bytes are read; the source and other names have the old ones."""
    source(t)
    new = changed(TENSORS[A])
    image = npy_of(new)
    with mount(t) as m:
        fd = os.open(m / f"step/tensors/{A}.npy", os.O_RDWR | os.O_TRUNC)
        os.write(fd, image[:1000])
        same("read back", os.pread(fd, 5000, 0), image[:1000])
        same("by its name", read_all(m / f"step/tensors/{A}.npy"), image[:1000])
        same("size", os.stat(m / f"step/tensors/{A}.npy").st_size, 1000)
        same("the source", stored(t + "/run/step"), TENSORS)
        os.write(fd, image[1000:])
        same("all", os.pread(fd, len(image), 0), image)
        os.close(fd)
        same("afterwards", read_all(m / f"step/raw/{A}"), new[2])
        umount(m)


def test_a_reader_from_before(t):
    """A handle keeps the old bytes, or fails: never a mix."""
    source(t)
    new = changed(TENSORS[A])
    with mount(t) as m:
        with open(m / f"step/raw/{A}", "rb", buffering=0) as f:
            same("before", f.read(100), TENSORS[A][2][:100])
            write(m / f"step/raw/{A}", new[2])
            fsync(m / "step")
            try:
                same("the rest", f.read(), TENSORS[A][2][100:])
            except OSError as e:
                assert e.errno in (errno.ESTALE, errno.EIO), e
        umount(m)


def test_incomplete_ones_are_discarded(t):
    """By unlink of the name, or by doctor; the old tensor stays."""
    source(t)
    image = npy_of(changed(TENSORS[A]))
    with mount(t) as m:
        half(m / f"step/tensors/{A}.npy", image)
        os.unlink(m / f"step/tensors/{A}.npy")
        same("the old one", read_all(m / f"step/tensors/{A}.npy")[-len(TENSORS[A][2]):], TENSORS[A][2])
        fsync(m / "step/tensors")
        umount(m)
    same("as it was", stored(t + "/run/step"), TENSORS)
    same("staging", staging(t + "/run"), [])
    with mount(t) as m:
        half(m / f"step/tensors/{A}.npy", image)
        umount(m, 1)
    doctor(t + "/run", "--discard")
    same("as it was", stored(t + "/run/step"), TENSORS)
    same("staging", staging(t + "/run"), [])
    with mount(t) as m:
        umount(m)


def test_doctor_leaves_what_is_in_use(t):
    """A living writer's transaction is not discarded."""
    source(t)
    image = npy_of(changed(TENSORS[A]))
    with mount(t) as m:
        at = half(m / f"step/tensors/{A}.npy", image)
        subprocess.run([UNSHARD, "doctor", "--discard", t + "/run"], capture_output=True, timeout=600, check=False)
        go_on(m / f"step/tensors/{A}.npy", image[at:], at)
        fsync(m / "step")
        umount(m)
    same("stored", stored(t + "/run/step"), replaced(A, changed(TENSORS[A])))


HOLES = """
import mmap, os, sys
path, how, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
image = sys.stdin.buffer.read()
fd = os.open(path, os.O_RDWR | os.O_TRUNC)
os.ftruncate(fd, size)
os.pwrite(fd, image[:200], 0)
os.pwrite(fd, image[-100:], size - 100)
if how == "fsync":
    os.fsync(fd)
elif how == "ftruncate":
    os.ftruncate(fd, size)
elif how == "msync":
    with mmap.mmap(fd, size) as m:
        m.flush()
os._exit(0)
"""


def test_holes(t):
    """They are bytes that did not arrive, unless a later ftruncate, fsync or msync of the file says that they are zeros."""
    dtype, shape, data = TENSORS[A]
    zeros = bytes(72) + bytes(len(data) - 172) + b"z" * 100
    image = npy_of((dtype, shape, zeros))
    for how, complete in (("none", False), ("fsync", True), ("ftruncate", True), ("msync", True)):
        shutil.rmtree(t + "/run", ignore_errors=True)
        source(t)
        with mount(t) as m:
            subprocess.run([sys.executable, "-S", "-c", HOLES, m / f"step/tensors/{A}.npy", how, str(len(image))], input=image, check=True, timeout=PATIENCE)
            if complete:
                fsync(m / "step/tensors")
            else:
                fails("fsync of the directory", errno.EAGAIN, lambda: fsync(m / "step/tensors"))
            umount(m, 0 if complete else 1)
        same(how, stored(t + "/run/step"), replaced(A, (dtype, shape, zeros)) if complete else TENSORS)


KILLED = """
import os, signal, sys
path, end, parts = sys.argv[1], sys.argv[2], [int(n) for n in sys.argv[3:]]
image = sys.stdin.buffer.read()
fd = os.open(path, os.O_RDWR | os.O_CREAT)
for begin, stop in zip(parts[::2], parts[1::2]):
    os.pwrite(fd, image[begin:stop], begin)
os.kill(os.getpid(), getattr(signal, end))
"""


LOOK = """
import os, sys
while True:
    try:
        os.stat(sys.argv[1] + "/nothing")
        os.statvfs(sys.argv[1])
    except OSError as e:
        if e.errno not in (2, 116):
            break
"""


def test_closed_just_now(t):
    """The kernel tells of the end of a handle after close(2) has returned: what comes then, among requests of others, counts it as closed."""
    source(t)
    want = dict(TENSORS)
    with mount(t) as m:
        others = [subprocess.Popen([sys.executable, "-S", "-c", LOOK, m.path], stderr=subprocess.DEVNULL) for _ in range(4)]
        try:
            for i in range(60):
                key = KEYS[i % len(KEYS)]
                want[key] = changed(TENSORS[key], i)
                write(m / f"step/tensors/{key}.npy", npy_of(want[key]))
                fsync(m / "step")
        finally:
            for p in others:
                p.kill()
                p.wait()
        same("stored", stored(t + "/run/step"), want)
        umount(m)


def test_killed_writers(t):
    """What a signal ended is complete if all of its bytes arrived, and not if not: nothing else counts."""
    source(t)
    new = changed(TENSORS[A])
    image = npy_of(new)
    with mount(t) as m:
        path = m / f"step/tensors/{A}.npy"
        os.truncate(path, 0)
        for end, parts in (("SIGKILL", (0, 500)), ("SIGTERM", (700, len(image)))):
            subprocess.run([sys.executable, "-S", "-c", KILLED, path, end, *map(str, parts)], input=image, timeout=PATIENCE, check=False)
            fails("not complete", errno.EAGAIN, lambda: fsync(m / "step/tensors"))
            assert "500" in last_error(m, "step"), last_error(m, "step")
        subprocess.run([sys.executable, "-S", "-c", KILLED, path, "SIGKILL", "500", "700"], input=image, timeout=PATIENCE, check=False)
        fsync(m / "step/tensors")
        umount(m)
    same("stored", stored(t + "/run/step"), replaced(A, new))


def end_server(m, how):
    m.process.send_signal(how)
    m.process.wait(PATIENCE)
    m.process.returncode = 0
    unmount_hard(m.path)


def test_the_server_is_killed(t):
    """SIGKILL and SIGTERM keep it; the next mount goes on with what doctor says is missing, which after SIGTERM is no more than that."""
    for how in (signal.SIGKILL, signal.SIGTERM):
        shutil.rmtree(t + "/run", ignore_errors=True)
        source(t)
        new, other = changed(TENSORS[A]), changed(TENSORS[B])
        image = npy_of(new)
        with mount(t) as m:
            at = half(m / f"step/tensors/{A}.npy", image)
            os.unlink(m / f"step/tensors/{C}.npy")
            end_server(m, how)
        same("nothing is published", stored(t + "/run/step"), TENSORS)
        assert staging(t + "/run"), f"{how}: it was not kept"
        said = doctor(t + "/run")
        assert f"tensors/{A}.npy" in said, said
        missing = [(int(x), int(y) + 1) for x, y in re.findall(r"bytes (\d+) to (\d+) of", said)]
        assert missing and missing[0][0] <= at and missing[-1][1] == len(image), said
        assert how == signal.SIGKILL or missing == [(at, len(image))], said
        with mount(t) as m:
            write(m / f"step/tensors/{B}.npy", npy_of(other))
            fails("incomplete", errno.EAGAIN, lambda: fsync(m / "step/tensors"))
            for begin, end in missing:
                go_on(m / f"step/tensors/{A}.npy", image[begin:end], begin)
            fsync(m / "step/tensors")
            umount(m)
        same(how.name, stored(t + "/run/step"), {k: {A: new, B: other}.get(k, v) for k, v in TENSORS.items() if k != C})
        same("staging", staging(t + "/run"), [])


def test_complete_ones_are_published_by_a_signal(t):
    """SIGTERM publishes what is complete beside what is not."""
    source(t)
    os.rename(t + "/run/step", t + "/run/step1")
    write_checkpoint(t + "/run/step2", TENSORS)
    new = changed(TENSORS[A])
    with mount(t) as m:
        write(m / f"step1/tensors/{A}.npy", npy_of(new))
        half(m / f"step2/tensors/{A}.npy", npy_of(new))
        m.process.send_signal(signal.SIGTERM)
        m.process.wait(PATIENCE)
    same("complete", stored(t + "/run/step1"), replaced(A, new))
    same("incomplete", stored(t + "/run/step2"), TENSORS)
    assert staging(t + "/run"), "it was not kept"


# ---- the directory it is in ----

def test_its_directory_is_renamed_and_removed(t):
    source(t)
    write_checkpoint(t + "/run/other", TENSORS)
    new = changed(TENSORS[A])
    image = npy_of(new)
    with mount(t) as m:
        os.mkdir(m / "empty")
        at = half(m / f"step/tensors/{A}.npy", image)
        os.rename(m / "step", m / "moved")
        fails("the old name", errno.ENOENT, lambda: os.stat(m / "step"))
        fails("rename onto it", errno.ENOTEMPTY, lambda: os.rename(m / "empty", m / "moved"))
        for name in os.listdir(m / "moved"):
            os.rename(m / f"moved/{name}", m / f"empty/{name}")
        fails("rmdir", errno.ENOTEMPTY, lambda: os.rmdir(m / "moved"))
        for name in os.listdir(m / "empty"):
            os.rename(m / f"empty/{name}", m / f"moved/{name}")
        umount(m, 1)
    with mount(t) as m:
        go_on(m / f"moved/tensors/{A}.npy", image[at:], at)
        fsync(m / "moved")
        umount(m)
    same("continued where it is now", stored(t + "/run/moved"), replaced(A, new))
    same("staging", staging(t + "/run"), [])


def test_publication_leaves_others_alone(t):
    """Open files beside it, directories that are open, working directories and later writes: nothing is exchanged."""
    source(t)
    os.makedirs(t + "/run/step/logs")
    write_file(t + "/run/step/logs/train.log", b"")
    inode = os.stat(t + "/run/step").st_ino
    with mount(t) as m:
        with open(m / "step/logs/train.log", "ab", buffering=0) as log, open(m / "step/notes.txt", "r+b", buffering=0) as notes:
            folder = os.open(m / "step", os.O_RDONLY)
            os.chdir(m / "step/logs")
            try:
                for i in range(3):
                    log.write(b"before\n")
                    write(m / f"step/raw/{KEYS[i]}", changed(TENSORS[KEYS[i]])[2])
                    fsync(m / "step")
                    log.write(b"after\n")
                    notes.write(b"%d" % i)
                    same("the open directory", sorted(os.listdir(folder)), sorted(os.listdir(t + "/run/step")))
                    same("the working directory", os.listdir("."), ["train.log"])
                    write_file("new.txt", b"here")
                    os.unlink("new.txt")
            finally:
                os.chdir("/")
                os.close(folder)
        umount(m)
    same("log", read_all(t + "/run/step/logs/train.log"), b"before\nafter\n" * 3)
    same("notes", read_all(t + "/run/step/notes.txt"), b"012es")
    same("the same directory", os.stat(t + "/run/step").st_ino, inode)
    same("stored", stored(t + "/run/step"), {k: changed(v) if k in KEYS[:3] else v for k, v in TENSORS.items()})


def test_an_open_shard_keeps_its_inode(t):
    source(t)
    shard = next(n for n in os.listdir(t + "/run/step") if A.encode() in read_all(t + "/run/step/" + n) and n.endswith(".safetensors"))
    with mount(t) as m:
        with open(m / f"step/{shard}", "r+b", buffering=0) as f:
            before = os.fstat(f.fileno())
            write(m / f"step/raw/{A}", changed(TENSORS[A])[2])
            fsync(m / "step")
            same("inode", os.fstat(f.fileno()).st_ino, before.st_ino)
            f.write(b"later")
            f.seek(0)
            same("its own bytes", f.read(5), b"later")
        umount(m)
    same("stored", stored(t + "/run/step"), replaced(A, changed(TENSORS[A])))


# ---- others ----

def test_a_shard_that_others_changed(t):
    """ESTALE: theirs stays, and the transaction too."""
    source(t)
    shard = next(n for n in os.listdir(t + "/run/step") if A.encode() in read_all(t + "/run/step/" + n) and n.endswith(".safetensors"))
    new = changed(TENSORS[A])
    for by in ("the source", "the mount"):
        shutil.rmtree(t + "/run", ignore_errors=True)
        source(t)
        with mount(t) as m:
            fd = os.open(m / f"step/raw/{A}", os.O_RDWR)
            os.pwrite(fd, new[2], 0)
            at = (t + "/run" if by == "the source" else m.path) + f"/step/{shard}"
            with open(at, "r+b") as f:
                f.seek(-4, os.SEEK_END)
                f.write(b"them")
            os.close(fd)
            fails(f"changed by {by}", errno.ESTALE, lambda: fsync(m / "step"))
            same("theirs", read_all(t + f"/run/step/{shard}")[-4:], b"them")
            assert shard in last_error(m, "step"), last_error(m, "step")
            umount(m, 1)
        assert staging(t + "/run"), "it was not kept"
        doctor(t + "/run", "--discard")
        same("theirs", read_all(t + f"/run/step/{shard}")[-4:], b"them")


def test_another_mounts_transaction(t):
    source(t)
    new = changed(TENSORS[A])
    image = npy_of(new)
    with mount(t) as a, mount(t, where="/mnt2") as b:
        at = half(a / f"step/tensors/{A}.npy", image)
        fails("the other mount", errno.EBUSY, lambda: write(b / f"step/tensors/{B}.npy", npy_of(TENSORS[B])))
        write_file(b / "step/notes.txt", b"storage names are the disk")
        same("seen", read_all(a / "step/notes.txt"), b"storage names are the disk")
        umount(a, 1)
        go_on(b / f"step/tensors/{A}.npy", image[at:], at)
        fsync(b / "step")
        umount(b)
    same("stored", stored(t + "/run/step"), replaced(A, new))


def test_several_handles_are_one_transaction(t):
    source(t)
    new = changed(TENSORS[A])
    image, wrong = npy_of(new), []
    with mount(t) as m:
        path = m / f"step/tensors/{A}.npy"
        os.truncate(path, 0)

        def part(i):
            try:
                fd = os.open(path, os.O_WRONLY)
                for at in range(i * 100, len(image), 800):
                    os.pwrite(fd, image[at:at + 100], at)
                os.close(fd)
            except OSError as e:
                wrong.append(e)
        threads = [threading.Thread(target=part, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fsync(m / "step")
        umount(m)
    same("errors", wrong, [])
    same("stored", stored(t + "/run/step"), replaced(A, new))


# ---- rights ----

def as_user(user, call):
    """call() in a child of another user: its errno, 0 for none."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            call()
            os._exit(0)
        except OSError as e:
            os._exit(e.errno)
        except BaseException:
            os._exit(255)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_rights(t):
    """It takes what the directory and each file that is replaced ask for; files keep whose they are."""
    if os.geteuid() != 0:
        raise Skip("takes root")
    user = pwd.getpwnam("nobody")
    os.chmod(t, 0o755)
    source(t)
    new = changed(TENSORS[A])
    step = t + "/run/step"

    def edit():
        write(m / f"step/tensors/{A}.npy", npy_of(new))
        fsync(m / "step")

    with mount(t, "rw,allow_other") as m:
        same("nothing is theirs", as_user(user, edit), errno.EACCES)
        os.chmod(step, 0o777)
        same("the files are not", as_user(user, edit), errno.EACCES)
        same("as it was", stored(step), TENSORS)
        for name in os.listdir(step):
            os.chown(f"{step}/{name}", user.pw_uid, user.pw_gid)
            os.chmod(f"{step}/{name}", 0o640)
        os.chmod(step, 0o755)
        same("the directory is not", as_user(user, edit), errno.EACCES)
        os.chmod(step, 0o777)
        wait_for("all of it is theirs", PATIENCE, lambda: as_user(user, edit) == 0)
        umount(m)
    same("stored", stored(step), replaced(A, new))
    for name in os.listdir(step):
        st = os.stat(f"{step}/{name}")
        same(name, (st.st_uid, st.st_gid, oct(st.st_mode & 0o7777)), (user.pw_uid, user.pw_gid, "0o640"))


# ---- errors are told where they are seen ----

def test_errors(t):
    source(t)
    with mount(t) as m:
        fd = os.open(m / "step/tensors/new.npy", os.O_WRONLY | os.O_CREAT)
        try:
            os.write(fd, b"no array at all, and more of it than any magic number has")
            raise AssertionError("it was taken")
        except OSError as e:
            same("a bad header", errno.errorcode[e.errno], "EINVAL")
        with contextlib.suppress(OSError):
            os.close(fd)
        os.unlink(m / "step/tensors/new.npy")
        fails("what .npy cannot hold", errno.EINVAL, lambda: write(m / "step/tensors/new.npy", npy_image("|O", (2,), bytes(16))))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(m / "step/tensors/new.npy")
        umount(m)
    same("as it was", stored(t + "/run/step"), TENSORS)
    same("staging", staging(t + "/run"), [])


def test_no_views_no_edits(t):
    """Without its completing file a directory has no views: their names are the disk's."""
    os.makedirs(t + "/run/step")
    write_file(t + "/run/step/__0_0.distcp", b"x" * 100)
    with mount(t) as m:
        fails("tensors", errno.ENOENT, lambda: os.stat(m / "step/tensors"))
        os.mkdir(m / "step/tensors")
        write(m / "step/tensors/a.npy", npy_of(TENSORS[A]))
        umount(m)
    same("as on a disk", read_all(t + "/run/step/tensors/a.npy"), npy_of(TENSORS[A]))


def test_the_root_is_the_checkpoint(t):
    """Its staging lies inside it, and is not listed."""
    write_checkpoint(t + "/run", TENSORS)
    new = changed(TENSORS[A])
    image = npy_of(new)
    with mount(t) as m:
        at = half(m / f"tensors/{A}.npy", image)
        same("staging is inside", [os.path.dirname(s) for s in staging(t + "/run")], [t + "/run"])
        assert not [n for n in os.listdir(m.path) if n.startswith(".unshard")], os.listdir(m.path)
        umount(m, 1)
    with mount(t) as m:
        go_on(m / f"tensors/{A}.npy", image[at:], at)
        fsync(m.path)
        umount(m)
    same("stored", stored(t + "/run"), replaced(A, new))
    same("staging", staging(t + "/run"), [])


def test_foreign_staging_is_left(t):
    """Of another machine: neither taken up nor removed; doctor names it."""
    source(t)
    image = npy_of(changed(TENSORS[A]))
    with mount(t) as m:
        half(m / f"step/tensors/{A}.npy", image)
        umount(m, 1)
    place = staging(t + "/run")[0]
    journals = [os.path.join(f, n) for f, _, ns in os.walk(place) for n in ns if "journal" in n]
    assert journals, os.listdir(place)
    host = os.uname().nodename
    for path in journals:
        data = read_all(path)
        assert host.encode() in data, f"{path} does not name this machine"
        with open(path, "wb") as f:
            f.write(data.replace(host.encode(), b"x" * len(host)))
    before = {n: read_all(n) for n in journals}
    with mount(t) as m:
        fails("an edit", errno.EBUSY, lambda: write(m / f"step/tensors/{B}.npy", npy_of(TENSORS[B])))
        umount(m)
    same("it is as it was", {n: read_all(n) for n in journals}, before)
    said = doctor(t + "/run")
    assert "/step" in said or os.path.basename(place) in said, said


def test_descriptors_do_not_leak(t):
    source(t)
    with mount(t) as m:
        def descriptors():
            return len(os.listdir(f"/proc/{m.process.pid}/fd"))
        for i in range(40):
            write(m / f"step/tensors/{A}.npy", npy_of(changed(TENSORS[A], i)))
            fsync(m / "step")
            if i == 10:
                before = descriptors()
        wait_for("descriptors", PATIENCE, lambda: descriptors() <= before + 4)
        umount(m)


if __name__ == "__main__":
    main(globals())
