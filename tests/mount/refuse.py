# SPDX-License-Identifier: MIT
"""Nothing can be changed: every system call that would says EROFS, also when the kernel's own read-only flag is off."""
import ctypes
import errno
import os
import shutil
import subprocess

from mountlib import UNSHARD, Mount, Skip, fails, main, make_tensors, read_all, write_checkpoint, write_file

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)


def nodes(m, key):
    """One of each kind."""
    return {
        "directory": m.path,
        "side file": m / "config.json",
        "mirrored directory": m / "assets",
        "tensors/": m / "tensors",
        "raw/": m / "raw",
        "tree/": m / "tree",
        "npy": m / f"tensors/{key}.npy",
        "raw": m / f"raw/{key}",
        "model": m / "model.safetensors",
        "report": m / ".unshard/checkpoint.json",
        "counters": m / ".unshard/counters.json",
    }


def changes(path, other):
    """Calls that would change the node itself."""
    p = path.encode()
    yield "chmod", lambda: os.chmod(path, 0o777)
    yield "chown", lambda: os.chown(path, 1, 1)
    yield "utime", lambda: os.utime(path, (1, 1))
    yield "truncate", lambda: os.truncate(path, 0) if not os.path.isdir(path) else call("truncate", p, ctypes.c_long(0))
    yield "setxattr", lambda: os.setxattr(path, "user.unshard.x", b"1")
    yield "removexattr", lambda: os.removexattr(path, "user.unshard.key")
    yield "rename", lambda: os.rename(path, other)
    if os.path.isdir(path):
        yield "mkdir", lambda: os.mkdir(path + "/new")
        yield "mknod", lambda: os.mknod(path + "/new", 0o600)
        yield "fifo", lambda: os.mkfifo(path + "/new")
        yield "symlink", lambda: os.symlink("x", path + "/new")
        yield "create", lambda: os.open(path + "/new", os.O_CREAT | os.O_WRONLY, 0o600)
        yield "rmdir", lambda: os.rmdir(path)
    else:
        yield "write", lambda: os.open(path, os.O_WRONLY)
        yield "read and write", lambda: os.open(path, os.O_RDWR)
        yield "append", lambda: os.open(path, os.O_WRONLY | os.O_APPEND)
        yield "O_TRUNC", lambda: os.open(path, os.O_WRONLY | os.O_TRUNC)
        yield "unlink", lambda: os.unlink(path)
        yield "link", lambda: os.link(path, os.path.dirname(path) + "/new")


ALLOWED = {
    # What the kernel says of its own accord before anybody is asked.
    ("truncate", "dir"): errno.EISDIR,
}


def check(m, key):
    for what, path in nodes(m, key).items():
        for name, change in changes(path, m / "other"):
            want = errno.EROFS
            if name == "truncate" and os.path.isdir(path):
                want = errno.EISDIR
            if path == m.path and name in ("rename", "rmdir"):
                want = errno.EBUSY  # a mount point
            if path == m.path and name == "rename":
                continue
            fails(f"{name} of {what}", want, change)


def source(t):
    tensors = make_tensors(1)
    write_checkpoint(t + "/src", tensors)
    os.mkdir(t + "/src/assets")
    write_file(t + "/src/assets/a", b"a")
    return next(iter(tensors))


def test_all_changes_are_refused(t):
    key = source(t)
    with Mount(t + "/src", t + "/mnt") as m:
        check(m, key)
        assert m.alive()


def test_mount8_says_rw_of_all(t):
    """mount(8) puts rw in front where nobody said ro, and passes on what is for it alone: neither is a wish to save."""
    write_checkpoint(t + "/src", make_tensors("fstab", count=2))
    os.mkdir(t + "/mnt")
    os.symlink(os.path.abspath(shutil.which(UNSHARD)), t + "/mount.unshardfs")
    of_mount8 = "nofail,noatime,nodiratime,nosuid,nodev,user,exec,suid,dev"
    for options, writable in (("rw", False), ("rw," + of_mount8, False), ("ro," + of_mount8, False), ("rw,materialize=1M", False),
                              ("rw,nofail,save=hf", True), ("rw,stage_size=1G", True), ("rw,keep_files", True), ("rw,cache_dir=" + t + "/rw\\,save=x", False)):
        subprocess.run([t + "/mount.unshardfs", t + "/src", t + "/mnt", "-o", options], check=True)
        try:
            with open(t + "/mnt/notes.txt", "w"):
                pass
            wrote = True
        except OSError as e:
            assert e.errno == errno.EROFS, e
            wrote = False
        assert wrote == writable, options
        subprocess.run([UNSHARD, "umount", t + "/mnt"], check=True)
    done = subprocess.run([t + "/mount.unshardfs", t + "/src", t + "/mnt", "-o", "ro,save=hf"], capture_output=True, check=False)
    assert done.returncode == 1 and b"add rw" in done.stderr, done


def test_over_its_own_source_it_is_read_only(t):
    """What is saved goes to the source by its path, and that would be the mount itself."""
    write_checkpoint(t + "/src", make_tensors("over", count=2))
    os.symlink(t + "/src", t + "/link")
    os.makedirs(t + "/above/runs")
    os.rename(t + "/src", t + "/above/runs/src")
    os.symlink(t + "/above/runs/src", t + "/src")
    for source, over in ("/src", "/src"), ("/link", "/src"), ("/src", "/above/runs"), ("/link", "/above"):
        done = subprocess.run([UNSHARD, "mount", t + source, t + over, "-o", f"rw,cache_dir={t}/cache"], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode and "over its own source" in done.stderr, done
    with Mount(t + "/src", t + "/src") as m:
        assert os.listdir(m / "raw")
        os.statvfs(m.path)


def test_also_without_the_kernels_flag(t):
    if os.geteuid() != 0:
        raise Skip("needs root to remount")
    key = source(t)
    with Mount(t + "/src", t + "/mnt") as m:
        if subprocess.run(["mount", "-i", "-o", "remount,rw", m.path], capture_output=True).returncode:
            raise Skip("cannot remount")
        before = sorted(os.listdir(t + "/src"))
        check(m, key)
        assert before == sorted(os.listdir(t + "/src"))
        fd = os.open(m / f"raw/{key}", os.O_RDONLY)
        fails("fallocate", errno.EBADF, lambda: os.posix_fallocate(fd, 0, 10))
        os.fsync(fd)
        os.close(fd)
        assert read_all(m / "assets/a") == b"a"


if __name__ == "__main__":
    main(globals())
