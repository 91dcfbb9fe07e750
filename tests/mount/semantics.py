#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""docs/semantics.md, held against mounts: what calls answer, each that changes something on each kind
of node; and every test that the page names is there.

    UNSHARD=build/cli/unshard tests/mount/semantics.py --write     writes the three tables anew (as root)
"""
import ctypes
import errno
import fcntl
import mmap
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import (UNSHARD, Mount, Skip, errno_name, fails, fresh_directory, main, make_tensors, read_all,  # noqa: E402
                      safetensors_image, same, stored, write_checkpoint, write_file)

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "semantics.md"
KEY = "model.layers.0.mlp.weight"
libc = ctypes.CDLL(None, use_errno=True)

FIXTURE = ROOT / "tests/data/torch_dcp/dcp_fsdp2_adamw_2r"  # it stores no safetensors file: model.safetensors is a view
FIXTURE_KEY = "model.emb.weight"

# The columns: a name of the table, and a path in the mount.
NODES = {
    "directory": "logs",
    "its file": "logs/loss.txt",
    "checkpoint": "step1",
    "side file": "step1/config.json",
    "`tensors/`": "step1/tensors",
    "`KEY.npy`": f"step1/tensors/{FIXTURE_KEY}.npy",
    "`raw/KEY`": f"step1/raw/{FIXTURE_KEY}",
    "`model.safetensors`": "step1/model.safetensors",
    "`.unshard/`": "step1/.unshard",
    "report": "step1/.unshard/checkpoint.json",
}


def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)


def opened(path, flags, then):
    fd = os.open(path, flags, 0o600)
    try:
        then(fd)
    finally:
        os.close(fd)


def beside(path):
    """A file of the mounted run that is in no table."""
    return (path.partition("/mnt/")[0] + "/mnt/logs/other.txt").encode()


def bind(path):
    with socket.socket(socket.AF_UNIX) as s:
        os.chdir(os.path.dirname(path))  # names of sockets are short
        try:
            s.bind(os.path.basename(path))
        finally:
            os.chdir("/")


def nothing(_):
    pass


def map_shared(fd):
    mmap.mmap(fd, 1, mmap.MAP_SHARED, mmap.PROT_WRITE | mmap.PROT_READ).close()


# (operation, on directories "d", files "f", the call). `p` is the node, `n` a name beside or in it that is free.
CALLS = [
    ("open for writing", "f", lambda p, n: opened(p, os.O_WRONLY, nothing)),
    ("open, O_APPEND", "f", lambda p, n: opened(p, os.O_WRONLY | os.O_APPEND, nothing)),
    ("open, O_TRUNC", "f", lambda p, n: opened(p, os.O_WRONLY | os.O_TRUNC, nothing)),
    ("pwrite of one byte", "f", lambda p, n: opened(p, os.O_RDWR, lambda fd: os.pwrite(fd, b"x", os.stat(p).st_size - 1))),
    ("pwrite behind the end", "f", lambda p, n: opened(p, os.O_RDWR, lambda fd: os.pwrite(fd, b"x", os.stat(p).st_size))),
    ("shared mapping for writing", "f", lambda p, n: opened(p, os.O_RDWR, map_shared)),
    ("truncate to nothing", "f", lambda p, n: os.truncate(p, 0)),
    ("fallocate", "f", lambda p, n: opened(p, os.O_RDWR, lambda fd: call("fallocate", fd, 0, ctypes.c_long(0), ctypes.c_long(1 << 20)))),
    ("fallocate, a hole", "f", lambda p, n: opened(p, os.O_RDWR, lambda fd: call("fallocate", fd, 3, ctypes.c_long(0), ctypes.c_long(4096)))),
    ("unlink", "f", lambda p, n: os.unlink(p)),
    ("link", "f", lambda p, n: os.link(p, n)),
    ("rename beside", "df", lambda p, n: os.rename(p, p + ".fresh")),
    ("rename, RENAME_EXCHANGE", "df", lambda p, n: call("renameat2", -100, p.encode(), -100, beside(p), 2)),
    ("chmod", "df", lambda p, n: os.chmod(p, 0o640)),
    ("chown", "df", lambda p, n: os.chown(p, 1, 1)),
    ("utimensat", "df", lambda p, n: os.utime(p, (1, 1))),
    ("setxattr of others", "df", lambda p, n: os.setxattr(p, "user.other", b"1")),
    ("removexattr", "df", lambda p, n: os.removexattr(p, "user.other")),
    ("create a file in it", "d", lambda p, n: opened(n, os.O_WRONLY | os.O_CREAT | os.O_EXCL, nothing)),
    ("open, O_TMPFILE", "d", lambda p, n: opened(p, os.O_WRONLY | os.O_TMPFILE, nothing)),
    ("mkdir in it", "d", lambda p, n: os.mkdir(n)),
    ("symlink in it", "d", lambda p, n: os.symlink("x", n)),
    ("symlink in it to a directory", "d", lambda p, n: os.symlink("../step1", n)),
    ("mknod, a fifo in it", "d", lambda p, n: os.mkfifo(n)),
    ("bind a socket in it", "d", lambda p, n: bind(n)),
    ("rmdir", "d", lambda p, n: os.rmdir(p)),
    ("ioctl, FS_IOC_SETFLAGS", "df", lambda p, n: opened(p, os.O_RDONLY, lambda fd: fcntl.ioctl(fd, 0x40086602, b"\0" * 8))),
]


def answer(how):
    """What a call gave, in a word or two."""
    try:
        return str(how())
    except OSError as e:
        return errno_name(e.errno)


def seek(path, whence, at=0):
    fd = os.open(path, os.O_RDONLY)
    try:
        return "the end" if os.lseek(fd, at, whence) == os.stat(path).st_size else os.lseek(fd, at, whence)
    finally:
        os.close(fd)


def read_at(path, at, size=16):
    fd = os.open(path, os.O_RDONLY)
    try:
        return f"{len(os.pread(fd, size, at))} bytes"
    finally:
        os.close(fd)


def locked(path):
    with open(path, "rb") as a, open(path, "rb") as b:
        fcntl.flock(a, fcntl.LOCK_EX)
        try:
            fcntl.flock(b, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "waits for the other"
    return "granted twice"


def length(path, size):
    return f"{len(read_all(path)) - size} bytes more than `st_size`"


# What reading calls answer: (operation, the call on a tensor's file p and the mount's root m).
READS = [
    ("open of a nonexistent name", lambda p, m: os.open(p + "x", os.O_RDONLY)),
    ("open of a name of 256 bytes", lambda p, m: os.open(m + "/" + "x" * 256, os.O_RDONLY)),
    ("open of a path through a file", lambda p, m: os.open(p + "/x", os.O_RDONLY)),
    ("open of a file, O_DIRECTORY", lambda p, m: os.open(p, os.O_RDONLY | os.O_DIRECTORY)),
    ("read of a directory", lambda p, m: opened(m, os.O_RDONLY, lambda fd: os.read(fd, 1))),
    ("read to the end", lambda p, m: length(p, os.stat(p).st_size)),
    ("pread at the end", lambda p, m: read_at(p, os.stat(p).st_size)),
    ("pread over the end", lambda p, m: read_at(p, os.stat(p).st_size - 4)),
    ("lseek, SEEK_DATA at 100", lambda p, m: seek(p, os.SEEK_DATA, 100)),
    ("lseek, SEEK_HOLE at 100", lambda p, m: seek(p, os.SEEK_HOLE, 100)),
    ("getxattr of a nonexistent name", lambda p, m: os.getxattr(p, "user.unshard.none")),
    ("getxattr into 1 byte", lambda p, m: call("getxattr", p.encode(), b"user.unshard.dtype", ctypes.create_string_buffer(1), 1)),
    ("readlink of a file", lambda p, m: os.readlink(p)),
    ("execve of a file", lambda p, m: os.execv(p, [p])),
    ("flock, a second LOCK_EX", lambda p, m: locked(p)),
    ("access, W_OK", lambda p, m: call("access", p.encode(), os.W_OK)),
    ("ioctl, FS_IOC_GETFLAGS", lambda p, m: opened(p, os.O_RDONLY, lambda fd: fcntl.ioctl(fd, 0x80086601, b"\0" * 8))),
    ("copy_file_range out of it", lambda p, m: f"{copied(p, m)} bytes"),
    ("name_to_handle_at", lambda p, m: call("name_to_handle_at", -100, p.encode(), (ctypes.c_uint * 40)(128), ctypes.byref(ctypes.c_int()), 0) or "a handle"),
]


def copied(path, root):
    with open(path, "rb") as a, open(root + "-copy", "wb") as b:
        return os.copy_file_range(a.fileno(), b.fileno(), 100)


def read_rows(t):
    source(t)
    with Mount(t + "/run", t + "/mnt") as m:
        for name, how in READS:
            yield f"| {name} | {answer(lambda: how(m / NODES['`raw/KEY`'], m.path))} |"


def source(t):
    shutil.rmtree(t + "/run", ignore_errors=True)
    shutil.copytree(FIXTURE, t + "/run/step1", copy_function=shutil.copyfile)
    write_file(t + "/run/step1/config.json", b"{}\n")
    os.mkdir(t + "/run/logs")
    write_file(t + "/run/logs/loss.txt", b"0.1\n" * 2000)
    write_file(t + "/run/logs/other.txt", b"x")


def tree(path):
    """All names below, their bytes and modes."""
    found = {}
    for root, dirs, files in os.walk(path):
        for name in dirs + files:
            at = os.path.join(root, name)
            st = os.lstat(at)
            found[os.path.relpath(at, path)] = (st.st_mode, st.st_mtime_ns, read_all(at) if name in files else None)
    return found


def attempt(m, how, path, is_dir):
    node = os.path.join(m.path, path)
    try:
        how(node, node + "/fresh" if is_dir else node + ".fresh")
        return "done"
    except OSError as e:
        return errno_name(e.errno)


class Mounts:
    """A mount that is made anew, over a source that is too, once something in it was changed."""

    def __init__(self, t, options):
        self.t, self.options, self.mount = t, options, None

    def fresh(self):
        if not self.mount:
            source(self.t)
            self.mount = Mount(self.t + "/run", self.t + "/mnt", self.options).__enter__()
        return self.mount

    def end(self):
        if self.mount:
            self.mount.__exit__(None, None, None)
            self.mount = None


def rows(t, options):
    """The lines of one table."""
    mounts = Mounts(t, options)
    try:
        for name, kinds, how in CALLS:
            cells = []
            for path in NODES.values():
                m = mounts.fresh()
                is_dir = os.path.isdir(m / path)
                if ("d" if is_dir else "f") not in kinds:
                    cells.append("")
                    continue
                cells.append(attempt(m, how, path, is_dir))
                if cells[-1] == "done":
                    mounts.end()
            yield f"| {name} | " + " | ".join(cells) + " |"
    finally:
        mounts.end()


def head(title):
    return f"| {title} | " + " | ".join(NODES) + " |\n|---" * 1 + "|---" * len(NODES) + "|\n"


HEADS = {"": head("for reading"), "rw": head("`-o rw`")}


READ_HEAD = "| for reading | answer |\n|---|---|\n"


def written(text, title):
    return text.partition(title)[2].partition("\n\n")[0].splitlines()


def compare(got_rows, title):
    for got, want in zip(got_rows, written(PAGE.read_text(encoding="utf-8"), title), strict=True):
        same("row of the page", got, want)


def test_changes_in_a_mount_for_reading(t):
    """Also nothing of the source has changed, the times of its files included."""
    source(t)
    before = tree(t + "/run")
    mounts = Mounts(t, "")
    mounts.mount = Mount(t + "/run", t + "/mnt").__enter__()
    try:
        for _, kinds, how in CALLS:
            for path in NODES.values():
                is_dir = os.path.isdir(mounts.mount / path)
                if ("d" if is_dir else "f") in kinds:
                    assert attempt(mounts.mount, how, path, is_dir) != "done", (how, path)
    finally:
        mounts.end()
    same("the source", tree(t + "/run"), before)
    compare(rows(t, ""), HEADS[""])


def test_changes_in_a_mount_for_saving(t):
    if os.geteuid() != 0:
        raise Skip("the page has what root is answered: others get EACCES where nobody may write")
    compare(rows(t, "rw"), HEADS["rw"])


def test_what_reading_answers(t):
    compare(read_rows(t), READ_HEAD)


def test_the_longest_names(t):
    """Staging lies beside a new directory, under a name that is made of its own."""
    source(t)
    tensors = make_tensors(2)
    names = ["x" * 255, "x" * 254 + "y", "z" * 238, "z" * 239]
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        fails("mkdir of 256 bytes", errno.ENAMETOOLONG, lambda: os.mkdir(m / ("x" * 256)))
        for name in names:  # all are staged at once
            os.mkdir(m / name)
            write_file(m / f"{name}/model.safetensors", safetensors_image(tensors))
        os.setxattr(m.path, "user.unshard.publish", b"")
    for name in names:
        same(name, stored(f"{t}/run/{name}"), tensors)
    same("what is left", [n for n in os.listdir(t + "/run") if n.startswith(".unshard-staging")], [])


def test_a_full_disk_under_a_save(t):
    """ENOSPC at the call that needs the room; the checkpoint stays; with room again the same mount saves."""
    if os.geteuid() != 0:
        raise Skip("needs root for a small disk")
    os.mkdir(t + "/disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", t + "/disk"], check=True)
    try:
        tensors = make_tensors(1)
        write_checkpoint(t + "/disk/step1", tensors)
        with Mount(t + "/disk", t + "/mnt", "rw") as m:
            def too_much():
                with open(m / "step1/big.bin", "wb") as f:
                    f.write(bytes(2 << 20))
            fails("2 MiB on a disk of 1", errno.ENOSPC, too_much)
            os.unlink(m / "step1/big.bin")
            same("what was there", read_all(m / f"step1/raw/{KEY}"), tensors[KEY][2])
            with open(m / f"step1/raw/{KEY}", "r+b") as f:
                f.write(b"\0" * 8)
            os.setxattr(m.path, "user.unshard.publish", b"")
        tensors[KEY] = (*tensors[KEY][:2], b"\0" * 8 + tensors[KEY][2][8:])
        same("stored", stored(t + "/disk/step1"), tensors)
    finally:
        subprocess.run(["umount", "-l", t + "/disk"], check=True)


def test_a_mount_may_stage_so_much(t):
    """stage_size=: EDQUOT at the call that would take more; what is published or removed counts no more, and storage never does."""
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw,save=hf,stage_size=3M") as m:
        os.mkdir(m / "step1")

        def put(size, until=None):
            with open(m / "step1/model.safetensors", "wb", buffering=0) as f:
                image = safetensors_image({KEY: ("U8", (size,), bytes(size))})[:until]
                for at in range(0, len(image), 1 << 16):
                    f.write(image[at:at + (1 << 16)])
        write_file(m / "step1/side.bin", bytes(5 << 20))
        fails("too much", errno.EDQUOT, lambda: put(4 << 20))
        assert "3145728" in m.messages(), m.messages()
        os.unlink(m / "step1/model.safetensors")
        for _ in range(4):
            put(2 << 20, 1 << 20)
            os.unlink(m / "step1/model.safetensors")
        for _ in range(3):
            put(2 << 20)
            fd = os.open(m / "step1", os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        same("published", sorted(os.listdir(t + "/run/step1")), ["model.safetensors", "side.bin"])
    same("nothing is staged without rw", subprocess.run([UNSHARD, "mount", t + "/run", t + "/mnt", "-o", "stage_size=3M"],
                                                        capture_output=True).returncode != 0, True)


def test_set_uid_goes_with_the_first_byte(t):
    """Of who is not root; as write(2) has it."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        raise Skip("needs root and setpriv")
    os.makedirs(t + "/run/logs")
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-S", "-c"]
    change = {"write": "os.pwrite(fd, b'y', 0)", "write behind the end": "os.pwrite(fd, b'y', 5000)", "truncate": "os.ftruncate(fd, 3)",
              "longer": "os.ftruncate(fd, 9000)", "fallocate": "os.posix_fallocate(fd, 0, 8192)",
              "O_TRUNC": "os.open(path, os.O_WRONLY | os.O_TRUNC)"}
    with Mount(t + "/run", t + "/mnt", "rw,allow_other") as m:
        os.mkdir(m / "step1")
        for where in "step1/tool", "logs/tool":
            path = m / where
            real = f"{t}/run/{where}"
            with open(path, "wb") as f:
                f.write(b"x" * 100)
            for what, how in change.items():
                for mode in 0o4777, 0o6777:
                    os.chmod(path, mode)
                    subprocess.run([*nobody, f"import os; path = {path!r}; fd = os.open(path, os.O_RDWR); {how}"], check=True)
                    same(f"{where}: {what}, from {mode:o}", oct(os.stat(real).st_mode & 0o7777), oct(0o777))
            os.chmod(path, 0o6777)
            with open(path, "r+b") as f:
                f.write(b"z")
            same(f"{where}: by root", oct(os.stat(real).st_mode & 0o7777), oct(0o6777))
            os.chown(path, 1, 1)
            same(f"{where}: another owner", oct(os.stat(real).st_mode & 0o7777), oct(0o777))


def test_every_test_that_the_page_names_is_there(t):
    named = re.findall(r"`([\w/]+\.(?:py|c))(?:::(\w+))?`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 40, named
    for path, test in named:
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert not test or re.search(rf"\b{test}\(", text), f"tests/{path} has no {test}"


def write():
    text = PAGE.read_text(encoding="utf-8")
    for title, make in ((READ_HEAD, read_rows), (HEADS[""], lambda t: rows(t, "")), (HEADS["rw"], lambda t: rows(t, "rw"))):
        before, _, rest = text.partition(title)
        with fresh_directory() as t:
            text = before + title + "\n".join(make(t)) + "\n" + rest[rest.index("\n\n") + 1:]
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    else:
        main(globals(), 300)
