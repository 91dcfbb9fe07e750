# SPDX-License-Identifier: MIT
"""Saving by writing into a mount: what programs write comes out of the source as whole checkpoints, or not at all."""
import contextlib
import errno
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

from mountlib import IDLE, PATIENCE, UNSHARD, Mount, Skip, fails, is_mounted, main, make_tensors, npy_image, read_all, safetensors_image, same, stored, tensor_bytes, wait_for, write_checkpoint, write_file


def umount(m, ok=True):
    """`unshard umount`, which publishes; waits for the server's end."""
    done = subprocess.run([UNSHARD, "umount", m.path], capture_output=True, text=True, timeout=600)
    assert (done.returncode == 0) == ok, done
    if ok:
        m.process.wait(PATIENCE)
        same("exit", m.process.returncode, 0)
    return done.stderr


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


def test_a_variant_is_saved(t):
    """save_pretrained(variant="fp16"): its index is one, and is gone where the shards are others."""
    os.makedirs(t + "/run")
    tensors = make_tensors(1)
    parts = {f"model.fp16-{i + 1:05}-of-00002.safetensors": {k: tensors[k] for k in list(tensors)[i::2]} for i in range(2)}
    index = json.dumps({"weight_map": {k: name for name, part in parts.items() for k in part}})
    for step, form in (("a", "hf"), ("b", "dcp:ranks=2")):
        with Mount(t + "/run", f"{t}/mnt-{step}", "rw,save=" + form) as m:
            os.mkdir(m / step)
            for name, part in parts.items():
                with open(m / f"{step}/{name}", "wb") as f:
                    f.write(safetensors_image(part))
            with open(m / f"{step}/model.safetensors.index.fp16.json", "w") as f:
                f.write(index)
            umount(m)
        with Mount(f"{t}/run/{step}", f"{t}/mnt-{step}2") as m:
            for key, (_, _, data) in tensors.items():
                assert read_all(m / f"raw/{key}") == data, (form, key)
        assert "model.safetensors.index.fp16.json" not in os.listdir(f"{t}/run/{step}")


def test_how_far_a_publication_is(t):
    """What `unshard umount` shows while it waits: bytes done and all, by an attribute of the root."""
    os.makedirs(t + "/run")
    size = 96 << 20
    with Mount(t + "/run", t + "/mnt", "rw,save=dcp:ranks=2") as m:
        for _ in range(8):  # a disk may be quick, and this program late
            os.mkdir(m / "step1")
            with open(m / "step1/model.safetensors", "wb") as f:
                f.write(safetensors_image({"w": ("U8", (size // 4096, 4096), bytes(size))}))
            fails("before", errno.ENODATA, lambda: os.getxattr(m.path, "user.unshard.publishing"))
            saving = threading.Thread(target=os.setxattr, args=(m.path, "user.unshard.publish", b""))
            saving.start()
            seen = []
            while saving.is_alive():
                with contextlib.suppress(OSError):
                    seen.append([int(word) for word in os.getxattr(m.path, "user.unshard.publishing").split()])
            saving.join()
            if seen:
                break
            shutil.rmtree(m / "step1")
        assert seen, "nobody told how far it was"
        totals, done = {total for _, total in seen}, [d for d, _ in seen]
        assert len(totals) == 1 and size <= max(totals) < size + (1 << 16), totals
        same("it goes up, and not past all", (done, max(done) <= max(totals)), (sorted(done), True))
        fails("after", errno.ENODATA, lambda: os.getxattr(m.path, "user.unshard.publishing"))
        umount(m)
    same("published", os.listdir(t + "/run"), ["step1"])


def test_a_large_file_is_changed_after_it_began_to_go_to_the_disk(t):
    """Written over, cut and written on: what the disk was told to begin with early is not what it ends with."""
    os.makedirs(t + "/run")
    size = 40 << 20
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    image = struct.pack("<Q", len(header)) + header + tensor_bytes("large", size)
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        os.mkdir(m / "step1")
        fd = os.open(m / "step1/model.safetensors", os.O_RDWR | os.O_CREAT)
        for at in range(0, len(image), 1 << 20):
            os.pwrite(fd, image[at:at + (1 << 20)] if at < 24 << 20 else bytes(1 << 20), at)
        os.pwrite(fd, bytes(9 << 20), 11 << 20)
        os.ftruncate(fd, 13 << 20)
        for at in range(11 << 20, len(image), 1 << 20):
            os.pwrite(fd, image[at:at + (1 << 20)], at)
        os.ftruncate(fd, len(image))
        os.close(fd)
        same("staged bytes", read_all(m / "step1/model.safetensors") == image, True)
        umount(m)
    same("published bytes", read_all(t + "/run/step1/model.safetensors") == image, True)


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
    with Mount(t + "/run", t + "/mnt", "rw", idle=None) as m:
        begin = time.monotonic()
        os.mkdir(m / "step1")
        write_file(m / "step1/model.safetensors", safetensors_image(make_tensors(1)))
        wait_for("publication", PATIENCE, lambda: os.path.exists(t + "/run/step1"))
        assert time.monotonic() - begin > 4, "it was still being written"
        wait_for("the views", PATIENCE, lambda: os.path.exists(m / "step1/tensors"))
        key, (_, _, data) = next(iter(make_tensors(1).items()))
        same("raw", read_all(m / f"step1/raw/{key}"), data)


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


def test_a_file_that_was_closed_just_now(t):
    """The kernel tells of a close after it: a signal that comes then, among requests of others, finds no file open for writing."""
    os.makedirs(t + "/run")
    for i in range(10):
        with Mount(t + "/run", t + "/mnt", "rw") as m:
            others = [subprocess.Popen([sys.executable, "-S", "-c", LOOK, m.path], stderr=subprocess.DEVNULL) for _ in range(6)]
            try:
                os.mkdir(m / f"step{i}")
                with open(m / f"step{i}/model.safetensors", "wb") as f:
                    f.write(safetensors_image(make_tensors(i)))
                m.process.send_signal(signal.SIGTERM)
                same("status", m.process.wait(PATIENCE), 0)
            finally:
                for p in others:
                    p.kill()
                    p.wait()
            same(f"step{i}: " + m.messages(), sorted(os.listdir(t + "/run")), sorted(f"step{n}" for n in range(i + 1)))
        same("tensors", stored(f"{t}/run/step{i}"), make_tensors(i))


def test_the_working_directory_is_published(t):
    """A trainer that stands in the directory that it saves, and saves twice."""
    os.makedirs(t + "/run")
    first, second = make_tensors(1), make_tensors(2)
    with Mount(t + "/run", t + "/mnt", "rw", idle=IDLE) as m:
        os.mkdir(m / "step1")
        fd = os.open(m / "step1", os.O_RDONLY | os.O_DIRECTORY)
        os.chdir(m / "step1")
        try:
            for tensors in (first, second):
                write_file("model.safetensors", safetensors_image(tensors))
                wait_for("publication", PATIENCE, lambda new=tensors: os.path.exists(t + "/run/step1") and stored(t + "/run/step1") == new)
                # The source has it a moment before the mount has taken it for what is there.
                wait_for("one directory", PATIENCE, lambda: os.path.samestat(os.stat("."), os.stat(m / "step1")))
                same("listed from outside", os.listdir(m.path), ["step1"])
                same("working directory", os.getcwd(), m / "step1")
                wait_for("the views", PATIENCE, lambda: "tensors" in os.listdir(fd))
                # Until then it is the file as it was written, and then a view of the same tensors.
                wait_for("the same bytes", PATIENCE, lambda: read_all("model.safetensors") == read_all(m / "step1/model.safetensors"))
            os.mkdir("sub")
            with open(os.open("config.json", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "w") as f:
                f.write("{}")
            same("shown at once", read_all(m / "step1/config.json"), b"{}")
        finally:
            os.chdir("/")
            os.close(fd)
        umount(m)
    same("tensors", stored(t + "/run/step1"), second)
    same("names", sorted(os.listdir(t + "/run/step1")), ["config.json", "model.safetensors", "sub"])


def test_a_directory_below_is_published(t):
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw", idle=IDLE) as m:
        os.makedirs(m / "step1/logs/deep")
        write_file(m / "step1/model.safetensors", safetensors_image(make_tensors(1)))
        os.chdir(m / "step1/logs/deep")
        try:
            write_file("first", b"1")
            wait_for("publication", PATIENCE, lambda: os.path.exists(t + "/run/step1/logs/deep/first"))
            same("from outside", os.listdir(m / "step1/logs/deep"), ["first"])
            same("working directory", os.getcwd(), m / "step1/logs/deep")
            write_file("second", b"2")
            same("above", sorted(os.listdir("../..")), sorted(os.listdir(m / "step1")))
        finally:
            os.chdir("/")
        umount(m)
    same("names", sorted(os.listdir(t + "/run/step1/logs/deep")), ["first", "second"])


def test_the_working_directory_is_renamed(t):
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step1.tmp")
        os.chdir(m / "step1.tmp")
        try:
            write_file("model.safetensors", safetensors_image(make_tensors(1)))
            os.rename("../step1.tmp", "../step1")
            same("listed from outside", os.listdir(m.path), ["step1"])
            assert "tensors" in os.listdir(m / "step1"), os.listdir(m / "step1")
            same("working directory", os.getcwd(), m / "step1")
            write_file("note.txt", b"saved")
        finally:
            os.chdir("/")
        umount(m)
    same("tensors", stored(t + "/run/step1"), make_tensors(1))
    same("note", read_all(t + "/run/step1/note.txt"), b"saved")


def test_renaming_publishes(t):
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step1.tmp")
        write_file(m / "step1.tmp/model.safetensors", safetensors_image(make_tensors(1)))
        os.rename(m / "step1.tmp", m / "step1")
        same("tensors", stored(t + "/run/step1"), make_tensors(1))
        same("shown", os.listdir(m.path), ["step1"])
        assert os.path.exists(m / "step1/tensors"), os.listdir(m / "step1")


def test_a_stored_file_is_truncated(t):
    """truncate(2) by path is what O_TRUNC is; a part that is kept is the bytes that were there."""
    tensors = make_tensors(1)
    key = next(iter(tensors))
    write_checkpoint(t + "/run/step1", tensors)
    write_file(t + "/run/step1/notes.txt", b"twelve bytes")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.truncate(m / "step1/notes.txt", 6)
        same("shown", read_all(m / "step1/notes.txt"), b"twelve")
        os.truncate(m / f"step1/raw/{key}", 0)
        same("size", os.stat(m / f"step1/raw/{key}").st_size, 0)
        same("source", read_all(t + "/run/step1/notes.txt"), b"twelve bytes")
        new = bytes(reversed(tensors[key][2]))
        with open(m / f"step1/raw/{key}", "r+b") as f:
            f.write(new)
        umount(m)
    tensors[key] = (*tensors[key][:2], new)
    same("tensors", stored(t + "/run/step1"), tensors)
    same("notes", read_all(t + "/run/step1/notes.txt"), b"twelve")


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


WRITE_PARTS = """
import os, signal, sys
path, end, at = sys.argv[1], sys.argv[2], [int(n) for n in sys.argv[3:]]
image = sys.stdin.buffer.read()
fd = os.open(path, os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, len(image))
for begin, stop in zip(at[::2], at[1::2]):
    os.pwrite(fd, image[begin:stop], begin)
if end == "parent":
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
elif end != "exit":
    os.kill(os.getpid(), getattr(signal, end))
os._exit(0)
"""


def test_what_a_killed_program_left_is_not_published(t):
    """It had given its file the full length first, and where it was not to come the bytes are zeros."""
    tensors = make_tensors(1)
    write_checkpoint(t + "/run/step1", tensors)
    before = {n: read_all(f"{t}/run/step1/{n}") for n in os.listdir(t + "/run/step1")}
    image = safetensors_image(make_tensors(2))
    (key, (dtype, shape, data)), (other, _) = [(k, v) for k, v in tensors.items() if v[0] == "F32"][:2]
    npy = npy_image("<f4", shape, bytes(reversed(data)))
    a, b = len(npy) // 3, len(npy) // 2

    def write(path, data, end, *at):
        subprocess.run([sys.executable, "-S", "-c", WRITE_PARTS, path, end, *map(str, at)], input=data, timeout=PATIENCE, check=False)

    with Mount(t + "/run", t + "/mnt", "rw") as m:
        path = str(m / f"step1/tensors/{key}.npy")
        for end in ("SIGKILL", "SIGTERM"):
            write(path, npy, end, 0, a, b, len(npy))
            said = umount(m, ok=False)
            assert f"tensors/{key}.npy" in said and f"byte {a}" in said and "write it anew" in said, said
            same("the source", {n: read_all(f"{t}/run/step1/{n}") for n in before}, before)
        os.mkdir(m / "step2")
        write(str(m / "step2/model.safetensors.tmp"), image, "SIGKILL", 0, len(image) - 1)
        os.rename(m / "step2/model.safetensors.tmp", m / "step2/model.safetensors")
        assert "step2: model.safetensors" in umount(m, ok=False)
        write(str(m / "step2/model.safetensors"), image, "exit", 0, len(image))
        write(path, npy, "exit", 0, len(npy))
        write(str(m / f"step1/tensors/{other}.npy"), npy, "parent", b, len(npy), 0, b)  # a child of it ends so, and all came
        write(str(m / "step1/log.bin"), b"x" * 100, "SIGKILL", 0, 10)  # no tensor: as it was left
        umount(m)
    same("new", stored(t + "/run/step2"), make_tensors(2))
    tensors[key] = tensors[other] = (dtype, shape, bytes(reversed(data)))
    same("changed", stored(t + "/run/step1"), tensors)
    same("a log", read_all(t + "/run/step1/log.bin"), b"x" * 10 + bytes(90))


def test_a_killed_program_that_had_written_all(t):
    os.makedirs(t + "/run")
    image = safetensors_image(make_tensors(1))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step1")
        subprocess.run([sys.executable, "-S", "-c", WRITE_PARTS, m / "step1/model.safetensors", "SIGKILL", "0", "100", "100", str(len(image))], input=image, timeout=PATIENCE, check=False)
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


def published(m):
    """Publishes what is staged, as umount does."""
    os.setxattr(m.path, "user.unshard.publish", b"")


def test_one_tensor_of_a_checkpoint_that_is_there(t):
    tensors = make_tensors(1)
    write_checkpoint(t + "/run/step1", tensors)
    write_file(t + "/run/step1/notes.txt", b"n")
    os.mkdir(t + "/run/step1/logs")
    write_file(t + "/run/step1/logs/a", b"log")
    before = os.stat(t + "/run/step1/notes.txt").st_ino
    key, (dtype, shape, data) = next(iter(tensors.items()))
    new = bytes(reversed(data))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        same("before", read_all(m / f"step1/raw/{key}"), data)
        with open(m / f"step1/tensors/{key}.npy", "wb") as f:
            f.write(npy_image("<f4", shape, new))
        same("what was written is read", read_all(m / f"step1/tensors/{key}.npy"), npy_image("<f4", shape, new))
        same("the source is as it was", stored(t + "/run/step1"), tensors)
        same("names", len(os.listdir(m / "step1/tensors")), len(tensors))
        published(m)
        want = dict(tensors)
        want[key] = (dtype, shape, new)
        same("tensors", stored(t + "/run/step1"), want)
        same("through the mount", read_all(m / f"step1/raw/{key}"), new)
        same("a side file is the same file", os.stat(t + "/run/step1/notes.txt").st_ino, before)
        same("side directory", read_all(t + "/run/step1/logs/a"), b"log")
        # another shape and dtype, by raw bytes and by a new key
        with open(m / f"step1/raw/{key}", "r+b") as f:
            f.seek(4)
            f.write(b"ABCD")
        with open(m / "step1/tensors/extra%2Fkey.npy", "wb") as f:
            f.write(npy_image("<V2", (3,), b"abcdef"))
        umount(m)
    want[key] = (dtype, shape, new[:4] + b"ABCD" + new[8:])
    want["extra/key"] = ("BF16", (3,), b"abcdef")
    same("tensors", stored(t + "/run/step1"), want)
    same("index", sorted(json.load(open(t + "/run/step1/model.safetensors.index.json"))["weight_map"]), sorted(want))
    same("leftovers", leftovers(t + "/run"), [])


def pt_image(tensors):
    """As save_pretrained has it: its metadata say that it is PyTorch's."""
    image = safetensors_image(tensors)
    size = struct.unpack("<Q", image[:8])[0]
    header = json.dumps({"__metadata__": {"format": "pt"}, **json.loads(image[8:8 + size])}).encode()
    return struct.pack("<Q", len(header)) + header + image[8 + size:]


def test_what_is_already_as_it_is_stored_is_not_copied(t):
    os.makedirs(t + "/run")
    tensors = make_tensors(1)
    keys = sorted(tensors)
    parts = {f"model-{i + 1:05}-of-00002.safetensors": {k: tensors[k] for k in keys[i::2]} for i in range(2)}
    index = json.dumps({"metadata": {}, "weight_map": {k: n for n, p in parts.items() for k in p}}, indent=1).encode()
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for step in "one", "set", "wrong", "later", "plain":
            os.mkdir(m / step)
        for step in "one", "later":
            write_file(m / f"{step}/model.safetensors", pt_image(tensors))
        write_file(m / "plain/model.safetensors", safetensors_image(tensors))
        for step in "set", "wrong":
            for name, part in parts.items():
                write_file(m / f"{step}/{name}", pt_image(part))
        write_file(m / "set/model.safetensors.index.json", index)
        write_file(m / "wrong/model.safetensors.index.json", index.replace(b"-00001-of", b"-0000X-of").replace(b"-00002-of", b"-00001-of").replace(
            b"-0000X-of", b"-00002-of"))
        os.mkdir(m / "later/tensors")
        dtype, shape, data = tensors[keys[0]]
        write_file(m / f"later/tensors/{keys[0]}.npy", npy_image("<f4", shape, bytes(reversed(data))))
        spool = {os.stat(f"{t}/run/.unshard-staging-{s}/in/{n}").st_ino for s in ("one", "set") for n in os.listdir(f"{t}/run/.unshard-staging-{s}/in")}
        umount(m)
    for step in "one", "set", "wrong", "plain":
        same(step, stored(f"{t}/run/{step}"), tensors)
    same("one file", read_all(t + "/run/one/model.safetensors"), pt_image(tensors))
    same("the set", {n: read_all(f"{t}/run/set/{n}") for n in sorted(os.listdir(t + "/run/set"))},
         {**{n: pt_image(p) for n, p in parts.items()}, "model.safetensors.index.json": index})
    kept = {os.stat(f"{t}/run/{s}/{n}").st_ino for s in ("one", "set") for n in os.listdir(f"{t}/run/{s}")}
    same("the same files", kept <= spool, True)
    same("later", stored(t + "/run/later"), {**tensors, keys[0]: (dtype, shape, bytes(reversed(data)))})
    same("a wrong index is not kept", os.listdir(t + "/run/wrong"), ["model.safetensors"])
    same("no format was told", b'"format":"pt"' in read_all(t + "/run/plain/model.safetensors")[:200], True)


def test_a_whole_role_is_replaced(t):
    write_checkpoint(t + "/run/step1", make_tensors(1))
    other = make_tensors(2, count=3)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        with open(m / "step1/model.safetensors", "wb") as f:
            f.write(safetensors_image(other))
        umount(m)
    same("tensors", stored(t + "/run/step1"), other)


def test_other_files_merge(t):
    tensors = make_tensors(1)
    write_checkpoint(t + "/run/step1", tensors, shards=1)
    key = list(tensors)[1]
    more = {key: ("U8", (2,), b"xy"), "new.key": ("F32", (), b"abcd")}
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        write_file(m / "step1/more.safetensors", safetensors_image(more))
        fd = os.open(m / "step1", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        same("tensors", stored(t + "/run/step1"), {**tensors, **more})
        same("new", read_all(m / "step1/raw/new.key"), b"abcd")


def test_a_tensor_is_removed(t):
    tensors = make_tensors(1)
    write_checkpoint(t + "/run/step1", tensors)
    key = list(tensors)[2]
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.unlink(m / f"step1/tensors/{key}.npy")
        assert not os.path.exists(m / f"step1/tensors/{key}.npy")
        same("listed", sorted(os.listdir(m / "step1/tensors")), sorted(f"{k}.npy" for k in tensors if k != key))
        os.unlink(m / "step1/config.json")
        umount(m)
    del tensors[key]
    same("tensors", stored(t + "/run/step1"), tensors)
    assert not os.path.exists(t + "/run/step1/config.json")


def test_side_files_leave_the_shards_alone(t):
    write_checkpoint(t + "/run/step1", make_tensors(1))
    shards = {n: os.stat(f"{t}/run/step1/{n}").st_ino for n in os.listdir(t + "/run/step1") if n.endswith(".safetensors")}
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        write_file(m / "step1/config.json", b"[1]")
        os.mkdir(m / "step1/more")
        write_file(m / "step1/more/a", b"a")
        with open(m / "step1/notes.txt", "a") as f:
            f.write("one")
        umount(m)
    same("config", read_all(t + "/run/step1/config.json"), b"[1]")
    same("more", read_all(t + "/run/step1/more/a"), b"a")
    same("notes", read_all(t + "/run/step1/notes.txt"), b"one")
    same("the same files", {n: os.stat(f"{t}/run/step1/{n}").st_ino for n in shards}, shards)


def test_a_side_file_that_others_write_too(t):
    """A log of the trainer's: what was appended here to what it had is not put over what it has by now."""
    write_checkpoint(t + "/run/step1", make_tensors(1))
    for name in ("train.log", "config.json"):
        write_file(f"{t}/run/step1/{name}", b"one\n")
    with Mount(t + "/run", t + "/mnt", "rw") as m, open(t + "/run/step1/train.log", "ab", buffering=0) as log:
        with open(m / "step1/train.log", "ab") as f:
            f.write(b"ours\n")
        log.write(b"theirs\n")
        fails("publication", errno.EINVAL, lambda: published(m))
        assert "train.log: it was changed by another writer" in m.messages(), m.messages()
        same("theirs", read_all(t + "/run/step1/train.log"), b"one\ntheirs\n")
        same("ours is kept", read_all(m / "step1/train.log"), b"one\nours\n")
        write_file(m / "step1/train.log", b"all of it anew\n")
        published(m)
        same("all of it anew", read_all(t + "/run/step1/train.log"), b"all of it anew\n")
    ino = os.stat(t + "/run/step1/train.log").st_ino
    with Mount(t + "/run", t + "/mnt", "rw") as m, open(t + "/run/step1/train.log", "ab", buffering=0) as log:
        with open(m / "step1/train.log", "r+b"), open(m / "step1/config.json", "r+b"), open(m / "step1/other.json", "wb") as f:
            os.rename(m / "step1/config.json", m / "step1/old.json")
            f.write(b"{}")
        log.write(b"theirs\n")
        published(m)
        log.write(b"later\n")
    same("opened, and not written", read_all(t + "/run/step1/train.log"), b"all of it anew\ntheirs\nlater\n")
    same("it is the same file", os.stat(t + "/run/step1/train.log").st_ino, ino)
    same("the others", [read_all(f"{t}/run/step1/{n}.json") for n in ("old", "other")], [b"one\n", b"{}"])
    assert not os.path.exists(t + "/run/step1/config.json")


def test_another_checkpoint_gets_the_name(t):
    """What had it before was read just now; from then on the name is the other one's."""
    first, second, third = make_tensors(1), make_tensors(2, count=3), make_tensors(3, count=5, rows=8)

    def reads(tensors, where):
        same("names", sorted(os.listdir(where + "/raw")), sorted(tensors))
        for key, (_, _, data) in tensors.items():
            same(f"{where}: {key}", read_all(f"{where}/raw/{key}"), data)

    write_checkpoint(t + "/run/step1", first)
    write_checkpoint(t + "/run/other/step1", third)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        reads(first, m / "step1")
        os.rename(m / "step1", m / "old1")
        os.mkdir(m / "step1")
        with open(m / "step1/model.safetensors", "wb") as f:
            f.write(safetensors_image(second))
        published(m)
        reads(second, m / "step1")
        os.rename(m / "step1", m / "old2")
        os.rename(m / "other/step1", m / "step1")
        reads(third, m / "step1")
        os.makedirs(m / "a/step1")
        with open(m / "a/step1/model.safetensors", "wb") as f:
            f.write(safetensors_image(first))
        os.makedirs(m / "b/step1")
        with open(m / "b/step1/model.safetensors", "wb") as f:
            f.write(safetensors_image(second))
        published(m)
        reads(first, m / "a/step1")
        os.rename(m / "a", m / "c")
        os.rename(m / "b", m / "a")
        reads(second, m / "a/step1")


def test_an_overlay(t):
    """Directories of a lower layer go nowhere: that is said, mv copies, and all else is as on any disk."""
    tensors, log = make_tensors(1), "run/log"
    write_checkpoint(t + "/lower/step1", tensors)
    os.makedirs(t + "/lower/logs")
    for name in "upper", "work", "run":
        os.mkdir(f"{t}/{name}")
    done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", f"lowerdir={t}/lower,upperdir={t}/upper,workdir={t}/work", t + "/run"],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Skip("no overlay: " + done.stderr)
    try:
        with Mount(t + "/run", t + "/mnt", "rw") as m:
            fails("rename", errno.EXDEV, lambda: os.rename(m / "logs", m / "old"))
            with open(m / "log", "wb") as f:
                f.write(b"a line\n")
            same("a file", read_all(f"{t}/{log}"), b"a line\n")
            with open(m / "step1/notes", "wb") as f:
                f.write(b"notes")
            fails("publication", errno.EIO, lambda: published(m))
            assert "cannot be exchanged there" in m.messages(), m.messages()
            os.unlink(m / "step1/notes")
            fails("removal", errno.EROFS, lambda: shutil.rmtree(m / "step1"))
            os.mkdir(m / "step2")
            with open(m / "step2/model.safetensors", "wb") as f:
                f.write(safetensors_image(tensors))
        for step in "step1", "step2":
            same(step, stored(f"{t}/run/{step}"), tensors)
    finally:
        subprocess.run(["umount", "-l", t + "/run"], check=True)


def test_names_of_staging_directories_are_ours(t):
    os.makedirs(t + "/run")
    write_checkpoint(t + "/run/step1", make_tensors(1))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step2")
        for place in ("", "step1/", "step2/"):
            write_file(m / "log", b"text")
            for what, call in (("mkdir", os.mkdir), ("create", lambda path: open(path, "w")), ("rename", lambda path: os.rename(m / "log", path))):
                fails(f"{what} in {place}", errno.EACCES, lambda call=call, place=place: call(m / f"{place}.unshard-staging-x"))
        os.rmdir(m / "step2")


def test_two_writers(t):
    write_checkpoint(t + "/run/step1", make_tensors(1))
    with Mount(t + "/run", t + "/mnt", "rw") as a, Mount(t + "/run", t + "/mnt2", "rw") as b:
        write_file(a / "step1/notes.txt", b"a")
        fails("the second", errno.EBUSY, lambda: open(b / "step1/notes.txt", "wb"))
        umount(a)
        write_file(b / "step1/other.txt", b"b")
        umount(b)
    same("both", [read_all(t + "/run/step1/notes.txt"), read_all(t + "/run/step1/other.txt")], [b"a", b"b"])


def test_a_checkpoint_is_copied(t):
    tensors = make_tensors(1)
    write_checkpoint(t + "/run/step1", tensors)
    for command in ("cp -r", "cp -a", "rsync -a"):
        if not shutil.which(command.split()[0]):
            continue
        with Mount(t + "/run", t + "/mnt", "rw") as m:
            subprocess.run([*command.split(), m / "step1/" if "rsync" in command else m / "step1", m / "step2"], check=True)
            umount(m)
        same(command, stored(t + "/run/step2"), tensors)
        same("names", sorted(os.listdir(t + "/run/step2")), ["config.json", "model.safetensors"])
        shutil.rmtree(t + "/run/step2")


def test_written_out_of_order(t):
    os.makedirs(t + "/run")
    image = safetensors_image(make_tensors(1, rows=512))
    write_file(t + "/image", image)
    blocks = -(-len(image) // 65536)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step1")
        for i in sorted(range(blocks), key=lambda i: (i * 7) % blocks):
            subprocess.run(["dd", f"if={t}/image", f"of={m / 'step1/model.safetensors'}", "bs=64K", "count=1",
                            f"skip={i}", f"seek={i}", "conv=notrunc", "status=none"], check=True)
        umount(m)
    same("tensors", stored(t + "/run/step1"), make_tensors(1, rows=512))


def test_its_header_comes_last(t):
    """Its place is kept by zeros, or seen so in a page of a mapping, which the kernel sends when it likes."""
    tensors, path = make_tensors(1), "step1/model.safetensors"
    image = safetensors_image(tensors)
    data = 8 + struct.unpack("<Q", image[:8])[0]

    def by_write(fd):
        os.pwrite(fd, bytes(data) + image[data:], 0)

    def by_mapping(fd):
        os.ftruncate(fd, len(image))
        with mmap.mmap(fd, len(image)) as shared:
            shared[data:] = image[data:]
            shared.flush()

    def half_by_mapping(fd):
        os.ftruncate(fd, len(image))
        with mmap.mmap(fd, len(image)) as shared:
            shared[:] = image[:12] + bytes(data - 12) + image[data:]
            shared.flush()

    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for how in by_write, by_mapping, half_by_mapping:
            os.mkdir(m / "step1")
            fd = os.open(m / path, os.O_RDWR | os.O_CREAT)
            how(fd)
            os.close(fd)
            fails(f"{how.__name__}: publication without a header", errno.EINVAL, lambda: published(m))
            fd = os.open(m / path, os.O_WRONLY)
            os.pwrite(fd, image[:data], 0)
            os.close(fd)
            published(m)
            same(how.__name__, stored(t + "/run/step1"), tensors)
            shutil.rmtree(m / "step1")


def test_a_checkpoint_is_removed(t):
    tensors = make_tensors(1)
    for step in (1, 2):
        write_checkpoint(f"{t}/run/step{step}", tensors)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        fails("a full one", errno.ENOTEMPTY, lambda: os.rmdir(m / "step1"))
        fails("a view", errno.ENOTEMPTY, lambda: os.rmdir(m / "step1/tensors"))
        subprocess.run(["rm", "-r", m / "step1"], check=True)
        same("the source", os.listdir(t + "/run"), ["step2"])
        same("the mount", os.listdir(m.path), ["step2"])
        os.unlink(m / "step2/model.safetensors")
        os.unlink(m / f"step2/raw/{list(tensors)[0]}")
        assert not os.path.exists(m / "step2/model.safetensors"), "it is hidden"
        umount(m)
    same("nothing else", stored(t + "/run/step2"), tensors)


def test_a_checkpoint_with_directories_is_removed(t):
    """What programs put beside tensors, and one that has no tensors at all."""
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw", idle=IDLE) as m:
        for name, tensors in (("step1", make_tensors(1)), ("step2", {})):
            os.makedirs(m / f"{name}/logs/deep")
            write_file(m / f"{name}/logs/deep/log", b"text")
            if tensors:
                write_file(m / f"{name}/model.safetensors", safetensors_image(tensors))
            wait_for("publication", PATIENCE, lambda n=name: os.path.exists(f"{t}/run/{n}/logs/deep/log"))
            if tensors:
                wait_for("the views", PATIENCE, lambda n=name: os.path.exists(m / f"{n}/tensors"))
            fails("a directory that holds something", errno.ENOTEMPTY, lambda n=name: os.rmdir(m / f"{n}/logs"))
            shutil.rmtree(m / name)
            assert not os.path.exists(f"{t}/run/{name}")
        same("listed", os.listdir(m.path), [])


def test_an_empty_directory_of_a_checkpoint_is_removed(t):
    write_checkpoint(t + "/run/step1", make_tensors(1))
    os.makedirs(t + "/run/step1/logs/deep")
    os.makedirs(t + "/run/step1/kept")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.rmdir(m / "step1/logs/deep")
        os.rmdir(m / "step1/logs")
        assert not os.path.exists(m / "step1/logs")
        umount(m)
    same("names", [n for n in sorted(os.listdir(t + "/run/step1")) if not n.endswith((".json", ".safetensors"))], ["kept"])
    same("tensors", stored(t + "/run/step1"), make_tensors(1))


def test_an_unlinked_file_has_no_link(t):
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step1")
        with open(m / "step1/a", "w+b", buffering=0) as gone, open(m / "step1/b", "w+b", buffering=0) as stays:
            gone.write(b"bytes")
            same("links", os.fstat(gone.fileno()).st_nlink, 1)
            os.rename(m / "step1/b", m / "step1/a")
            same("links of what was renamed over", os.fstat(gone.fileno()).st_nlink, 0)
            same("its bytes", os.pread(gone.fileno(), 10, 0), b"bytes")
            same("links of the other", os.fstat(stays.fileno()).st_nlink, 1)
            os.unlink(m / "step1/a")
            same("links of what was unlinked", os.fstat(stays.fileno()).st_nlink, 0)


def test_a_listing_begins_again(t):
    """rewinddir(3): names that came since are listed; in a new directory, in a checkpoint and beside it."""
    write_checkpoint(t + "/run/step1", make_tensors(1))
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step2")
        for path in (m / "step2", m / "step1", m.path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                before = os.listdir(fd)
                write_file(f"{path}/note.txt", b"x")
                same("names", sorted(os.listdir(fd)), sorted([*before, "note.txt"]))  # of the same open directory
                os.unlink(f"{path}/note.txt")
                same("names again", sorted(os.listdir(fd)), sorted(before))
            finally:
                os.close(fd)


def test_an_interrupted_removal_removes_nothing(t):
    tensors = make_tensors(1)
    write_checkpoint(t + "/run/step1", tensors)
    names = sorted(os.listdir(t + "/run/step1"))
    with Mount(t + "/run", t + "/mnt", "rw", idle=IDLE) as m:
        shown = sorted(os.listdir(m / "step1"))
        for at, part in enumerate([[], ["config.json", "model.safetensors", "raw"], ["config.json", "model.safetensors", "raw", "tensors"]]):
            for name in [".unshard", *part]:  # as rm -r goes
                subprocess.run(["rm", "-r", m / f"step1/{name}"], check=True)
            if at == 0:
                wait_for("what was hidden", PATIENCE, lambda: os.path.exists(m / "step1/.unshard/checkpoint.json"))
            else:
                published(m)
            same("shown", sorted(os.listdir(m / "step1")), shown)
            same("tensors, shown", sorted(os.listdir(m / "step1/tensors")), sorted(f"{k}.npy" for k in tensors))
            same("the source", sorted(os.listdir(t + "/run/step1")), names)
        same("staging", leftovers(t + "/run"), [])
        write_file(m / "step1/notes.txt", b"n")
        subprocess.run(["rm", "-r", m / "step1/.unshard", m / "step1/config.json"], check=True)
        published(m)  # what was written is there, and nothing is gone
        same("the source", sorted(os.listdir(t + "/run/step1")), sorted([*names, "notes.txt"]))
        subprocess.run(["rm", "-r", m / "step1"], check=True)
        same("all of it", os.listdir(t + "/run"), [])


def test_a_removed_directory_that_shows_again_is_not_dead(t):
    """Somebody has it open: the kernel still has the directory that was removed, and must not show that one again."""
    tensors = make_tensors(1)
    write_checkpoint(t + "/run/step1", tensors)
    os.mkdir(t + "/run/step1/logs")
    with Mount(t + "/run", t + "/mnt", "rw", idle=IDLE) as m:
        names = ("tensors", "tree/model/layers", "tree/model", "tree", "raw", "logs")
        shown = {name: sorted(os.listdir(m / f"step1/{name}")) for name in names}
        open_before = [os.open(m / f"step1/{name}", os.O_RDONLY) for name in names]
        try:
            subprocess.run(["rm", "-r", *[m / f"step1/{name}" for name in (".unshard", "tensors", "tree", "raw", "logs")]], check=True)
            same("hidden", sorted(os.listdir(m / "step1")), ["config.json", "model.safetensors"])
            wait_for("what was hidden", PATIENCE, lambda: os.path.exists(m / "step1/tensors"))
            same("shown again", {name: sorted(os.listdir(m / f"step1/{name}")) for name in names}, shown)
            write_file(m / "step1/logs/a.txt", b"a")
            same("written", read_all(t + "/run/step1/logs/a.txt"), b"a")
            key = next(iter(tensors))
            same("bytes", read_all(m / f"step1/raw/{key}"), tensors[key][2])
        finally:
            for fd in open_before:
                os.close(fd)


def test_all_tensors_but_not_the_checkpoint(t):
    tensors = make_tensors(1)
    write_checkpoint(t + "/run/step1", tensors)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for key in tensors:
            os.unlink(m / f"step1/tensors/{key}.npy")
        assert "no tensor would be left" in umount(m, ok=False)
        m.process.send_signal(signal.SIGTERM)
        m.process.wait(PATIENCE)
    same("nothing was removed", stored(t + "/run/step1"), tensors)


def test_the_source_itself_is_the_checkpoint(t):
    tensors = make_tensors(1)
    write_checkpoint(t + "/step1", tensors)
    key, (dtype, shape, data) = next(iter(tensors.items()))
    with Mount(t + "/step1", t + "/mnt", "rw") as m:
        for i in range(2):
            new = tensors[key][2][::-1][:-1] + bytes([i])
            with open(m / f"tensors/{key}.npy", "wb") as f:
                f.write(npy_image("<f4", shape, new))
            published(m)
            tensors[key] = (dtype, shape, new)
            same("stored", stored(t + "/step1"), tensors)
            same("shown", read_all(m / f"raw/{key}"), new)
        umount(m)
    same("beside it", leftovers(t), [])


def test_files_that_are_no_checkpoint(t):
    write_checkpoint(t + "/run/step1", make_tensors(1))
    os.mkdir(t + "/run/logs")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        with open(m / "latest", "w") as f:
            f.write("step1")
        same("at once", read_all(t + "/run/latest"), b"step1")
        with open(m / "latest", "w") as f:
            f.write("step")
        with open(m / "latest", "a") as f:
            f.write("1")
        same("rewritten", read_all(t + "/run/latest"), b"step1")
        os.rename(m / "latest", m / "logs/last")
        same("moved", read_all(m / "logs/last"), b"step1")
        os.truncate(m / "logs/last", 2)
        same("cut", read_all(t + "/run/logs/last"), b"st")
        os.utime(m / "logs/last", (1, 2))
        same("time", os.stat(t + "/run/logs/last").st_mtime, 2)
        os.unlink(m / "logs/last")
        os.rmdir(m / "logs")
        os.rename(m / "step1", m / "step2")
        same("renamed", sorted(os.listdir(t + "/run")), ["step2"])
        assert os.path.exists(m / "step2/tensors")
        with open(m / "model.safetensors", "w"):
            same("tensors wait", [n for n in os.listdir(t + "/run") if not n.startswith(".unshard")], ["step2"])
        os.unlink(m / "model.safetensors")
        shutil.move(m / "step2", m / "step3")
        umount(m)
    same("tensors", stored(t + "/run/step3"), make_tensors(1))


def test_what_is_changed_in_showing_is_not_written_back(t):
    tensors = {key: of for key, of in make_tensors(1).items() if of[0] == "F32"}  # dtype= refuses packed ones
    write_checkpoint(t + "/run/step1", tensors)
    for option in ("dtype=BF16", "prefix=drop"):
        with Mount(t + "/run", t + "/mnt", "rw," + option) as m:
            key = list(tensors)[0]
            for path in (f"tensors/{key}.npy", "notes.txt"):
                fails(option, errno.EROFS, lambda: open(os.path.join(m / "step1", path), "wb"))
            assert "not written back" in m.messages()
            umount(m)
    same("nothing has changed", stored(t + "/run/step1"), tensors)


def test_an_adapter_stays_beside_its_model(t):
    os.makedirs(t + "/run")
    adapter = safetensors_image({"base.lora_A.weight": ("F32", (1,), b"abcd")})
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for name in ("both", "adapter"):
            os.mkdir(m / name)
            write_file(m / f"{name}/adapter_model.safetensors", adapter)
            write_file(m / f"{name}/adapter_config.json", b"{}")
        write_file(m / "both/model.safetensors", safetensors_image(make_tensors(1)))
        umount(m)
    same("as it was", read_all(t + "/run/both/adapter_model.safetensors"), adapter)
    same("alone", list(stored(t + "/run/adapter")), ["base.lora_A.weight"])
    same("its name", sorted(os.listdir(t + "/run/adapter")), ["adapter_config.json", "adapter_model.safetensors"])


main(globals())
