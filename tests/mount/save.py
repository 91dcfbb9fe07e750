# SPDX-License-Identifier: MIT
"""Saving by writing into a mount: what programs write comes out of the source as whole checkpoints, or not at all."""
import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import time

from mountlib import UNSHARD, Mount, fails, is_mounted, main, make_tensors, read_all, safetensors_image, same, wait_for, write_checkpoint, write_file


def umount(m, ok=True):
    """`unshard umount`, which publishes; waits for the server's end."""
    done = subprocess.run([UNSHARD, "umount", m.path], capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == ok, done
    if ok:
        m.process.wait(20)
        same("exit", m.process.returncode, 0)
    return done.stderr


def stored(path):
    """{key: (dtype, shape, bytes)} of all safetensors files of a directory, read by a reader of its own."""
    tensors = {}
    for name in sorted(os.listdir(path)):
        if not name.endswith(".safetensors"):
            continue
        with open(f"{path}/{name}", "rb") as f:
            data = f.read()
        size = struct.unpack("<Q", data[:8])[0]
        for key, t in json.loads(data[8:8 + size]).items():
            if key != "__metadata__":
                a, b = t["data_offsets"]
                assert key not in tensors, f"{key} stands in two files"
                tensors[key] = (t["dtype"], tuple(t["shape"]), data[8 + size + a:8 + size + b])
    return tensors


def leftovers(path):
    return [n for n in os.listdir(path) if n.startswith(".unshard-staging")]


def test_a_new_checkpoint(t):
    os.makedirs(t + "/run")
    tensors = make_tensors(1)
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        os.mkdir(m / "step1")
        same("listed", os.listdir(m.path), ["step1"])
        with open(m / "step1/model.safetensors", "wb") as f:
            f.write(safetensors_image(tensors))
        with open(m / "step1/config.json", "w") as f:
            f.write("{}")
        same("staged names", sorted(os.listdir(m / "step1")), ["config.json", "model.safetensors"])
        same("staged bytes", read_all(m / "step1/model.safetensors"), safetensors_image(tensors))
        assert not os.path.exists(t + "/run/step1"), "nothing is published yet"
        umount(m)
    same("tensors", stored(t + "/run/step1"), tensors)
    same("names", sorted(os.listdir(t + "/run/step1")), ["config.json", "model.safetensors"])
    same("leftovers", leftovers(t + "/run"), [])


def test_nothing_is_written_without_rw(t):
    write_checkpoint(t + "/run/step1", make_tensors(1))
    with Mount(t + "/run", t + "/mnt") as m:
        fails("mkdir", errno.EROFS, lambda: os.mkdir(m / "step2"))
        fails("create", errno.EROFS, lambda: open(m / "step1/x", "w"))
        fails("write", errno.EROFS, lambda: open(m / "step1/model.safetensors", "r+b"))
        fails("unlink", errno.EROFS, lambda: os.unlink(m / "step1/config.json"))
        umount(m)


def test_killed_before_publication(t):
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step1")
        write_file(m / "step1/model.safetensors", safetensors_image(make_tensors(1)))
        m.process.send_signal(signal.SIGKILL)
        m.process.wait()
        m.process.returncode = 0
        same("no checkpoint", [n for n in os.listdir(t + "/run") if not n.startswith(".unshard-staging-")], [])
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        same("nothing shown", os.listdir(m.path), [])
        os.mkdir(m / "step1")  # takes the dead writer's place
        write_file(m / "step1/model.safetensors", safetensors_image(make_tensors(2)))
        umount(m)
    same("tensors", stored(t + "/run/step1"), make_tensors(2))
    same("leftovers", leftovers(t + "/run"), [])


def test_published_when_idle(t):
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step1")
        write_file(m / "step1/model.safetensors", safetensors_image(make_tensors(1)))
        took = wait_for("publication", 15, lambda: os.path.exists(t + "/run/step1"))
        assert took > 4, took
        wait_for("the views", 3, lambda: os.path.exists(m / "step1/tensors"))
        key, (_, _, data) = next(iter(make_tensors(1).items()))
        same("raw", read_all(m / f"step1/raw/{key}"), data)


def test_renaming_publishes(t):
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step1.tmp")
        write_file(m / "step1.tmp/model.safetensors", safetensors_image(make_tensors(1)))
        os.rename(m / "step1.tmp", m / "step1")
        same("tensors", stored(t + "/run/step1"), make_tensors(1))
        same("shown", os.listdir(m.path), ["step1"])
        assert os.path.exists(m / "step1/tensors"), os.listdir(m / "step1")


def test_an_unfinished_file_is_not_published(t):
    os.makedirs(t + "/run")
    image = safetensors_image(make_tensors(1))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step1")
        with open(m / "step1/model.safetensors", "wb") as f:
            f.write(image[:-1])
        fd = os.open(m / "step1", os.O_RDONLY)
        fails("fsync of the directory", errno.EINVAL, lambda: os.fsync(fd))
        os.close(fd)
        said = umount(m, ok=False)
        assert "model.safetensors" in said, said
        assert is_mounted(m.path)
        assert not os.path.exists(t + "/run/step1")
        with open(m / "step1/model.safetensors", "r+b") as f:
            f.seek(len(image) - 1)
            f.write(image[-1:])
        umount(m)
    same("tensors", stored(t + "/run/step1"), make_tensors(1))


def test_a_bad_header_is_told_at_once(t):
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step1")
        fd = os.open(m / "step1/model.safetensors", os.O_WRONLY | os.O_CREAT)
        fails("write", errno.EINVAL, lambda: os.write(fd, b"no safetensors file at all"))
        os.close(fd)
        os.unlink(m / "step1/model.safetensors")
        os.rmdir(m / "step1")
        umount(m)
    same("nothing", os.listdir(t + "/run"), [])


main(globals())
