# SPDX-License-Identifier: MIT
"""Models that are saved into a directory that is there, with others at work in it, and what lies in it that is no plain file."""
import errno
import os
import shutil
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, Mount, Skip, fails, main, make_tensors, read_all, same, write_checkpoint, write_file  # noqa: E402
from save_over import image, save_file  # noqa: E402
from save_whole import fsync  # noqa: E402

SET = "rw,save=dcp:ranks=2"  # several files: the directory is exchanged


def test_directories_come_and_go_while_others_are_published(t):
    """Who makes a stage waits for who publishes one, and never the other way round as well."""
    names = [f"run{i}" for i in range(4)]
    for name in names:
        os.makedirs(f"{t}/src/{name}")
    rounds, errors = {}, []

    def save(m, name, end):
        try:
            while time.monotonic() < end:
                save_file(m / name + "/model.safetensors", image(1))
                fsync(m / name)
                shutil.rmtree(m / name)
                os.mkdir(m / name)
                fsync(m / name)
                rounds[name] = rounds.get(name, 0) + 1
        except OSError as e:
            errors.append(f"{name}: {e}")

    with Mount(t + "/src", t + "/mnt", "rw") as m:
        threads = [threading.Thread(target=save, args=(m, name, time.monotonic() + 4), daemon=True) for name in names]
        for x in threads:
            x.start()
        for x in threads:
            x.join(PATIENCE)
        stuck = any(x.is_alive() for x in threads)
        if stuck:
            m.process.kill()  # else this waits as well
        assert not stuck, "they wait for each other"
        same("errors", errors, [])
        assert len(rounds) == len(names), rounds


def test_what_is_mounted_below_is_not_emptied(t):
    """A volume for logs in the directory: with the directory that was there it would go."""
    os.makedirs(t + "/src/run/logs")
    os.makedirs(t + "/volume")
    write_file(t + "/volume/events", b"of the volume")
    if subprocess.run(["mount", "--bind", t + "/volume", t + "/src/run/logs"], stderr=subprocess.DEVNULL, check=False).returncode:
        raise Skip("no right to mount")
    try:
        with Mount(t + "/src", t + "/mnt", SET) as m:
            write_checkpoint(m / "run", make_tensors(1))
            fails("a set", errno.EROFS, lambda: fsync(m / "run"))
            assert "logs: a file system is mounted there" in m.messages(), m.messages()
        same("the volume", read_all(t + "/volume/events"), b"of the volume")
        same("shown there", read_all(t + "/src/run/logs/events"), b"of the volume")
    finally:
        subprocess.run(["umount", "-l", t + "/src/run/logs"], check=False)


def test_the_root_of_a_file_system_is_refused(t):
    """What is staged beside it lies on another one: told when the name is made, not when all is written."""
    os.makedirs(t + "/src")
    if subprocess.run(["mount", "-t", "tmpfs", "none", t + "/src"], stderr=subprocess.DEVNULL, check=False).returncode:
        raise Skip("no right to mount")
    try:
        with Mount(t + "/src", t + "/mnt", "rw") as m:
            fails("a copy", errno.EROFS, lambda: open(m / "model.safetensors", "wb"))
            fails("a saver", errno.EROFS, lambda: save_file(m / "model.safetensors", image(1)))
            os.mkdir(m / "run")
            save_file(m / "run/model.safetensors", image(1))
            fsync(m / "run")
        same("a directory of it", read_all(t + "/src/run/model.safetensors"), image(1))
    finally:
        subprocess.run(["umount", "-l", t + "/src"], check=False)


def test_a_directory_stays_whose_it_is(t):
    """Owner, group, bits, attributes and ACLs of the directory that is exchanged, and of those in it."""
    def acl(*entries):
        return b"\2\0\0\0" + b"".join(tag.to_bytes(2, "little") + bits.to_bytes(2, "little") + who.to_bytes(4, "little") for tag, bits, who in entries)

    everybody = 0xffffffff
    own = acl((1, 7, everybody), (2, 7, 4321), (4, 5, everybody), (16, 7, everybody), (32, 5, everybody))
    given = acl((1, 7, everybody), (4, 0, everybody), (32, 0, everybody))
    os.makedirs(t + "/src/run/logs/old")
    dirs = [t + "/src/run", t + "/src/run/logs", t + "/src/run/logs/old"]
    try:
        os.setxattr(t + "/src", "system.posix_acl_default", given)  # for what is made beside it, not for what was there
        for path in dirs[:2]:
            os.setxattr(path, "system.posix_acl_access", own)
            os.setxattr(path, "system.posix_acl_default", own)
            os.setxattr(path, "user.mine", path.encode())
    except OSError as e:
        raise Skip(f"no ACLs here: {e}") from e
    if os.geteuid() == 0:
        for i, path in enumerate(dirs):
            os.chown(path, 1000 + i, 2000 + i)
    for path, mode in zip(dirs, (0o3775, 0o2575, 0o711)):
        os.chmod(path, mode)
    os.mkfifo(t + "/src/run/fifo")
    os.symlink("nowhere", t + "/src/run/logs/link")

    def look():
        return [(os.stat(p).st_mode, os.stat(p).st_uid, os.stat(p).st_gid, sorted((n, os.getxattr(p, n)) for n in os.listxattr(p))) for p in dirs]

    before, inode = look(), os.stat(dirs[0]).st_ino
    with Mount(t + "/src", t + "/mnt", SET) as m:
        write_checkpoint(m / "run", make_tensors(1))
        fsync(m / "run")
    assert os.stat(dirs[0]).st_ino != inode, "it was not exchanged"
    same("directories", look(), before)
    same("what lies in it", sorted(os.listdir(dirs[0])), [".metadata", "__0_0.distcp", "__1_0.distcp", "config.json", "fifo", "logs"])
    same("the link", os.readlink(dirs[1] + "/link"), "nowhere")


def test_what_others_bring_is_not_removed(t):
    """rm -r is nearly through when somebody writes there, in the source: rmdir(2) finds that, as in any directory."""
    for where in ("new", "logs/new"):
        write_checkpoint(t + "/src/step1", make_tensors(1))
        os.makedirs(t + "/src/step1/logs")
        write_file(t + "/src/step1/logs/old", b"old")
        with Mount(t + "/src", t + "/mnt", "rw") as m:
            for path, dirs, names in os.walk(m / "step1", topdown=False):
                for name in names:
                    os.unlink(os.path.join(path, name))
                for name in dirs:
                    os.rmdir(os.path.join(path, name))
            write_file(t + "/src/step1/" + where, b"others")
            fails(where, errno.ENOTEMPTY, lambda: os.rmdir(m / "step1"))
            same(where, read_all(t + "/src/step1/" + where), b"others")
            os.unlink(t + "/src/step1/" + where)
            os.rmdir(m / "step1")
        same("it is gone", os.listdir(t + "/src"), [])


def test_a_file_that_others_have_made_just_now_is_opened(t):
    """It was looked for in vain a moment ago: who opens it without O_EXCL gets it, whoever came first."""
    os.makedirs(t + "/src/run")
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        for i in range(50):
            name = f"run/log{i}"
            assert not os.path.exists(m / name)
            write_file(t + "/src/" + name, b"theirs ")
            with open(m / name, "ab") as f:
                f.write(b"ours")
            same(name, read_all(t + "/src/" + name), b"theirs ours")
            fails("alone", errno.EEXIST, lambda path=m / name: os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))


if __name__ == "__main__":
    main(globals())
