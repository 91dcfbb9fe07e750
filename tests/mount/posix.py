#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What programs expect of any file system, where a mount is written: owners, groups, bits of modes, times, kinds in listings.

PLACES are a directory that passes through to the source, and a new one that is staged.
"""
import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, Mount, Skip, fails, main, make_tensors, npy_image, read_all, safetensors_image, same, stored, wait_for, write_checkpoint, write_file  # noqa: E402

ALICE, BOB, TEAM = 1101, 1102, 1103
KEY = "model.layers.0.mlp.weight"
LINES = 500
WRITES = 200
IO_SETUP, IO_DESTROY, IO_GETEVENTS, IO_SUBMIT = 206, 207, 208, 209  # of x86_64


def as_user(uid, call, gid=None, groups=()):
    """Runs call() in a process of this user; its error is raised here."""
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            os.setgroups(list(groups))
            os.setgid(gid or uid)
            os.setuid(uid)
            call()
        except OSError as e:
            code = e.errno
        except BaseException:
            code = 255
        os.write(ends[1], bytes([code]))
        os._exit(0)
    os.close(ends[1])
    code = os.read(ends[0], 1)[0]
    os.close(ends[0])
    os.waitpid(child, 0)
    if code:
        raise OSError(code, os.strerror(code))


def write(path, data=b"x", flags=os.O_WRONLY | os.O_CREAT, mode=0o666):
    fd = os.open(path, flags, mode)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def rights(path):
    st = os.lstat(path)
    return f"{stat.S_IMODE(st.st_mode):o} {st.st_uid} {st.st_gid}"


def publish(m):
    os.setxattr(m.path, "user.unshard.publish", b"")


def shared_run(t):
    """A run that several users save into, as root mounts it."""
    if os.geteuid() != 0:
        raise Skip("needs root for other users")
    os.umask(0o022)
    os.chmod(t, 0o755)
    write_checkpoint(t + "/run/step1", make_tensors(1))
    os.mkdir(t + "/run/logs")
    os.chmod(t + "/run", 0o777)
    return Mount(t + "/run", t + "/mnt", "rw,allow_other")


def places(m):
    os.mkdir(m / "step2")
    return [m / "logs", m / "step2"]


def test_a_sticky_directory(t):
    """In a directory as /tmp is one, only its owner removes or renames a file."""
    with shared_run(t) as m:
        for place in places(m):
            os.chmod(place, 0o1777)
            same("mode", rights(place), "1777 0 0")
            as_user(ALICE, lambda: write(place + "/notes"))
            fails("unlink", errno.EPERM, lambda: as_user(BOB, lambda: os.unlink(place + "/notes")))
            fails("rename", errno.EPERM, lambda: as_user(BOB, lambda: os.rename(place + "/notes", place + "/mine")))
            as_user(ALICE, lambda: os.unlink(place + "/notes"))


def test_a_new_owner(t):
    """Whose a file is counts at once, for those too who only name it: listings say it as of a moment before."""
    with shared_run(t) as m:
        for place in places(m):
            write(place + "/notes")
            os.listdir(place)
            os.chown(place + "/notes", ALICE, -1)
            fails("chmod", errno.EPERM, lambda: as_user(BOB, lambda: os.chmod(place + "/notes", 0o600)))
            as_user(ALICE, lambda: os.chmod(place + "/notes", 0o600))
            same("mode", rights(place + "/notes"), f"600 {ALICE} 0")


def test_the_group_of_a_directory(t):
    """Where a directory has S_ISGID, what is made in it gets its group, and directories the bit; also when it is published."""
    with shared_run(t) as m:
        for place in places(m):
            os.chown(place, ALICE, TEAM)
            os.chmod(place, 0o2775)
            as_user(ALICE, lambda: write(place + "/notes"), groups=[TEAM])
            as_user(ALICE, lambda: os.mkdir(place + "/sub"), groups=[TEAM])
            as_user(ALICE, lambda: write(place + "/sub/notes"), groups=[TEAM])
            same("file", rights(place + "/notes"), f"644 {ALICE} {TEAM}")
            same("directory", rights(place + "/sub"), f"2755 {ALICE} {TEAM}")
            same("file below", rights(place + "/sub/notes"), f"644 {ALICE} {TEAM}")
        publish(m)
        for place in (t + "/run/logs", t + "/run/step2", m / "logs", m / "step2"):
            same(place, rights(place), f"2775 {ALICE} {TEAM}")
            same("file", rights(place + "/notes"), f"644 {ALICE} {TEAM}")
            same("directory", rights(place + "/sub"), f"2755 {ALICE} {TEAM}")
            same("file below", rights(place + "/sub/notes"), f"644 {ALICE} {TEAM}")


def test_a_new_checkpoint_in_a_directory_of_a_group(t):
    with shared_run(t) as m:
        os.chown(m / "logs", 0, TEAM)
        os.chmod(m / "logs", 0o2777)
        as_user(ALICE, lambda: os.mkdir(m / "logs/step9"))
        as_user(ALICE, lambda: write(m / "logs/step9/model.safetensors", safetensors_image(make_tensors(9))))
        publish(m)
    same("directory", rights(t + "/run/logs/step9"), f"2755 {ALICE} {TEAM}")
    same("storage", {rights(f"{t}/run/logs/step9/{n}") for n in os.listdir(t + "/run/logs/step9")}, {f"644 {ALICE} {TEAM}"})


def test_whose_tensors_they_are(t):
    """Who may write a checkpoint's directory and files writes its tensors, and nobody else; a copy that is being written is no more open."""
    run = shared_run(t)
    for name in ("", *os.listdir(t + "/run/step1")):
        os.chown(f"{t}/run/step1/{name}", ALICE, TEAM)
        os.chmod(f"{t}/run/step1/{name}", 0o640 if name else 0o755)
    image = npy_image("<f4", (64, 32), bytes(64 * 32 * 4))
    with run as m:
        for name in (f"tensors/{KEY}.npy", f"raw/{KEY}"):
            same(name, rights(m / f"step1/{name}"), f"640 {ALICE} {TEAM}")
            fails("another's", errno.EACCES, lambda: as_user(BOB, lambda: write(m / f"step1/{name}", flags=os.O_WRONLY)))
        as_user(ALICE, lambda: write(m / f"step1/tensors/{KEY}.npy", image[:100], os.O_WRONLY | os.O_TRUNC))
        fails("staged, of another", errno.EACCES, lambda: as_user(BOB, lambda: os.open(m / f"step1/tensors/{KEY}.npy", os.O_WRONLY)))
        as_user(ALICE, lambda: write(m / f"step1/tensors/{KEY}.npy", image, os.O_WRONLY))
        publish(m)
        same("bytes", stored(t + "/run/step1")[KEY][2], bytes(64 * 32 * 4))
    same("rights", {rights(f"{t}/run/step1/{n}") for n in os.listdir(t + "/run/step1")}, {f"640 {ALICE} {TEAM}"})


def test_a_second_name(t):
    """A hard link is the same file: whoever makes it, its owner stays, also when both are published."""
    with shared_run(t) as m:
        os.mkdir(m / "step2")
        os.chmod(m / "step2", 0o777)
        write(m / "step2/model.safetensors", safetensors_image(make_tensors(2)))
        as_user(ALICE, lambda: write(m / "step2/notes", mode=0o600))
        os.link(m / "step2/notes", m / "step2/other")
        same("staged", [rights(m / "step2/" + n) for n in ("notes", "other")], [f"600 {ALICE} {ALICE}"] * 2)
        publish(m)
        same("published", [rights(t + "/run/step2/" + n) for n in ("notes", "other")], [f"600 {ALICE} {ALICE}"] * 2)


def alternate(path, fds, sizes):
    """Writes by turns: what the file is to have."""
    want = b""
    for i, size in enumerate(sizes):
        for fd in fds:
            data = (b"%d %d\n" % (i, fd)).ljust(size, b".")
            same(f"{path}: written", os.write(fd, data), len(data))
            want += data
    return want


def test_who_appends_beside_others(t):
    """O_APPEND is the end of the file, also where others move that: in the source, by another mount, by another name."""
    sizes = [4, 40, 4, 3000000, 7, 5000, 1]
    os.makedirs(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m, Mount(t + "/run", t + "/other", "rw") as other:
        for where in (t + "/run/log", other / "log", m / "log.1"):
            write_file(t + "/run/log", b"first\n")
            fds = [os.open(m / "log", os.O_RDWR | os.O_APPEND)]
            if where == m / "log.1":
                os.rename(m / "log", m / "log.1")
            fds.append(os.open(where, os.O_WRONLY | os.O_APPEND))
            want = alternate(where, fds, sizes)
            path = where.replace(m.path, t + "/run").replace(other.path, t + "/run")
            same(where, read_all(path), b"first\n" + want)
            same(f"{where}: read", os.pread(fds[0], len(want) + 9, 0), b"first\n" + want)
            os.write(fds[0], b"one")
            os.truncate(path, 2)
            os.write(fds[0], b"two")
            os.write(fds[0], b"three")
            same(f"{where}: cut", read_all(path), b"fitwothree")
            for fd in fds:
                os.close(fd)


def append_asynchronously(fd, data):
    """By io_submit(2): of a long write the kernel sends the parts at once."""
    context, buffer, event = ctypes.c_ulong(), ctypes.create_string_buffer(data, len(data)), ctypes.create_string_buffer(32)
    libc = ctypes.CDLL(None, use_errno=True)
    control = ctypes.create_string_buffer(struct.pack("<QIIHhIQQqQII", 0, 0, 0, 1, 0, fd, ctypes.addressof(buffer), len(data), 0, 0, 0, 0))
    if os.uname().machine != "x86_64" or libc.syscall(IO_SETUP, 1, ctypes.byref(context)) != 0:
        raise Skip("no asynchronous writes")
    same("submitted", libc.syscall(IO_SUBMIT, context, 1, ctypes.byref(ctypes.c_void_p(ctypes.addressof(control)))), 1)
    same("ended", libc.syscall(IO_GETEVENTS, context, 1, 1, event, None), 1)
    libc.syscall(IO_DESTROY, context)
    return struct.unpack("<QQqq", event.raw)[2]


def test_a_long_append_comes_in_parts(t):
    """All at once and in any order: each goes where it belongs."""
    os.makedirs(t + "/run")
    write_file(t + "/run/log", b"")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        fd, want = os.open(m / "log", os.O_RDWR | os.O_APPEND), b""
        for i in range(8):
            data = os.urandom(7000000 + i)
            same("written", append_asynchronously(fd, data), len(data))
            want += data + b"%d" % os.write(fd, b"1")
        os.close(fd)
    same("log", read_all(t + "/run/log"), want)


def test_who_appends_at_the_same_moment(t):
    os.makedirs(t + "/run")
    write_file(t + "/run/log", b"")
    with Mount(t + "/run", t + "/mnt", "rw") as m, Mount(t + "/run", t + "/other", "rw") as other:
        children, first = [], os.open(m / "log", os.O_WRONLY | os.O_APPEND)
        os.rename(m / "log", m / "log.1")
        os.rename(t + "/run/log.1", t + "/run/log")  # the kernel has it by two numbers now
        for path in (None, t + "/run/log", other / "log", m / "log"):
            child = os.fork()
            if child == 0:
                fd = os.open(path, os.O_WRONLY | os.O_APPEND) if path else first
                for i in range(LINES):
                    os.write(fd, b"%d %d\n" % (len(children), i))
                os._exit(0)
            children.append(child)
        same("who wrote", [os.waitpid(child, 0)[1] for child in children], [0] * 4)
    lines = read_all(t + "/run/log").split(b"\n")
    same("lines", (len(lines), set(lines) ^ {b"", *(b"%d %d" % (n, i) for n in range(4) for i in range(LINES))}), (4 * LINES + 1, set()))


def test_the_bits_that_give_rights(t):
    """Set-user-ID and set-group-ID go when another than root writes or cuts the file, and with its owner."""
    def cut(path):
        os.truncate(path, 0)

    def change_group(path):
        os.chown(path, -1, TEAM)

    def write_over(path):
        write(path, flags=os.O_WRONLY)

    def write_cut(path):
        write(path, flags=os.O_WRONLY | os.O_TRUNC)

    def write_open(path):
        """By a file that was opened before it got the bits."""
        os.write(opened, b"x")

    def give_room(path):
        os.posix_fallocate(opened, 0, 100)

    with shared_run(t) as m:
        for place in places(m):
            path = place + "/tool"
            write(path, b"#!/bin/sh\n")
            opened = os.open(path, os.O_RDWR)
            for change in (write_over, write_open, cut, write_cut, give_room, change_group, write_open):
                os.chown(path, ALICE, ALICE)
                os.chmod(path, 0o6777)
                same("before", rights(path), f"6777 {ALICE} {ALICE}")
                as_user(ALICE, lambda: change(path), groups=[TEAM])
                same(f"{change.__name__}, {path}", rights(path).split()[0], "777")
            os.close(opened)
            os.chown(path, BOB, BOB)
            os.chmod(path, 0o6755)
            write(path, flags=os.O_WRONLY)
            same("written by root", rights(path), f"6755 {BOB} {BOB}")
            os.chown(path, ALICE, ALICE)
            same("given away", rights(path), f"755 {ALICE} {ALICE}")
            os.chmod(path, 0o4755)
        publish(m)
    same("published", rights(t + "/run/step2/tool"), f"4755 {ALICE} {ALICE}")


def test_a_file_of_another_with_such_bits(t):
    """Who may write it, and does not own it, writes it: the bits go then, as on the disk. S_ISGID of a file without S_IXGRP stays for its group."""
    def written(path, mode, groups):
        write(path)
        os.chown(path, ALICE, TEAM)
        os.chmod(path, mode)
        as_user(BOB, lambda: write(path, flags=os.O_WRONLY), groups=groups)
        return rights(path)

    with shared_run(t) as m:
        for place in places(m):
            for mode in (0o4777, 0o2777, 0o2767, 0o6766, 0o666):
                for groups in ([], [TEAM]):
                    same(f"{mode:o} {groups}", written(place + "/tool", mode, groups), written(t + "/tool", mode, groups))


def test_a_chown_that_names_nobody(t):
    """It sets the time of the change all the same, and clears the bits."""
    with shared_run(t) as m:
        for place in places(m):
            for name in ("tool", "dir", "link"):
                path = f"{place}/{name}"
                {"tool": write, "dir": os.mkdir, "link": lambda p: os.symlink("tool", p)}[name](path)
                old = os.lstat(path).st_ctime_ns
                time.sleep(0.02)
                os.chown(path, -1, -1, follow_symlinks=False)
                assert os.lstat(path).st_ctime_ns > old, path
            os.chmod(place + "/tool", 0o4755)
            os.chown(place + "/tool", -1, -1)
            same("mode", rights(place + "/tool"), "755 0 0")


def test_a_directory_that_may_be_listed_only(t):
    """To open and list a directory needs the right to read it, and no right to search it; what is open stays so."""
    with shared_run(t) as m:
        for place in places(m):
            os.mkdir(place + "/sub")
            write(place + "/sub/notes")
            os.chown(place + "/sub", ALICE, ALICE)
            os.chmod(place + "/sub", 0o400)

            def look():
                fd = os.open(place + "/sub", os.O_RDONLY | os.O_DIRECTORY)
                same("names", os.listdir(fd), ["notes"])
                fails("search", errno.EACCES, lambda: os.stat(place + "/sub/notes"))
                os.chmod(place + "/sub", 0)
                same("names", os.listdir(fd), ["notes"])

            as_user(ALICE, look)
            fails("of another", errno.EACCES, lambda: as_user(BOB, lambda: os.listdir(place + "/sub")))


def test_a_rename_that_leaves_a_device(t):
    """RENAME_WHITEOUT makes a device, of which there are none."""
    with shared_run(t) as m:
        for place in places(m):
            write(place + "/notes")
            moved = ctypes.CDLL(None, use_errno=True).renameat2(-100, f"{place}/notes".encode(), -100, f"{place}/other".encode(), 4)
            same("rename", (moved, errno.errorcode[ctypes.get_errno()]), (-1, "EINVAL"))
            same("names", os.listdir(place), ["notes"])


def test_a_write_is_one_request(t):
    """Or none where the kernel writes by itself: it asks for no attribute before each one."""
    def counter(name):
        return json.loads(read_all(m / "step1/.unshard/counters.json"))[name]

    write_checkpoint(t + "/run/step1", make_tensors(1))
    with Mount(t + "/run", t + "/mnt", "rw,save=hf") as m:
        os.mkdir(m / "step2")
        by_kernel = counter("passthrough") == "on"
        for path, most in ((m / "step1/notes.bin", WRITES // 2 if by_kernel else WRITES * 3 // 2), (m / "step2/model.safetensors", WRITES * 3 // 2)):
            image = safetensors_image({"w": ("U8", (WRITES << 12,), bytes(WRITES << 12))})
            fd = os.open(path, os.O_RDWR | os.O_CREAT)  # O_WRONLY would go around the kernel's pages
            before = counter("requests")
            for at in range(0, len(image), 4096):
                os.pwrite(fd, image[at:at + 4096], at)
            made = counter("requests") - before
            os.close(fd)
            assert made < most, f"{path}: {made} requests for {WRITES} writes"


def test_owners_are_published(t):
    """Each file and directory has the owner that stat(2) told before."""
    with shared_run(t) as m:
        os.mkdir(m / "step2")
        os.chmod(m / "step2", 0o777)
        write(m / "step2/model.safetensors", safetensors_image(make_tensors(2)))
        as_user(ALICE, lambda: os.mkdir(m / "step2/eval"))
        as_user(ALICE, lambda: write(m / "step2/eval/scores", mode=0o600))
        as_user(BOB, lambda: write(m / "step2/notes"))
        os.chown(m / "step2/notes", BOB, TEAM)
        os.chmod(t + "/run/step1", 0o777)
        as_user(BOB, lambda: write(m / "step1/notes"))
        publish(m)
        same("file", rights(t + "/run/step2/notes"), f"644 {BOB} {TEAM}")
        same("directory", rights(t + "/run/step2/eval"), f"755 {ALICE} {ALICE}")
        same("file below", rights(t + "/run/step2/eval/scores"), f"600 {ALICE} {ALICE}")
        same("of a checkpoint that was there", rights(t + "/run/step1/notes"), f"644 {BOB} {BOB}")
        as_user(ALICE, lambda: write(m / "step2/eval/more"))


def test_a_checkpoint_keeps_its_owner(t):
    """Whoever changes it, its files do not become the server's."""
    with shared_run(t) as m:
        for name in ("", *os.listdir(t + "/run/step1")):
            os.chown(f"{t}/run/step1/{name}", ALICE, TEAM)
        tensors = make_tensors(1)
        dtype, shape, data = tensors[KEY]
        as_user(ALICE, lambda: write(m / "step1/tensors/model.extra.npy", npy_image("<f4", shape, data)), groups=[TEAM])
        publish(m)
        same("stored", stored(t + "/run/step1"), {**tensors, "model.extra": (dtype, shape, data)})
        same("owners", {rights(f"{t}/run/step1/{n}").split()[1] for n in os.listdir(t + "/run/step1")}, {str(ALICE)})


def test_a_side_file_that_is_written_keeps_its_rights(t):
    with shared_run(t) as m:
        os.chown(t + "/run/step1/config.json", ALICE, TEAM)
        os.chmod(t + "/run/step1/config.json", 0o660)
        wait_for("its rights", PATIENCE, lambda: rights(m / "step1/config.json") == f"660 {ALICE} {TEAM}")
        with open(m / "step1/config.json", "r+b") as f:
            f.write(b'{"model_type": "gemma"}\n')
        same("staged", rights(m / "step1/config.json"), f"660 {ALICE} {TEAM}")
        publish(m)
        same("published", rights(t + "/run/step1/config.json"), f"660 {ALICE} {TEAM}")
        same("bytes", read_all(t + "/run/step1/config.json"), b'{"model_type": "gemma"}\n')


def test_times_move(t):
    """The time of change moves with mode, owner and name; names that come and go move their directory's times."""
    def times(path):
        st = os.stat(path)
        return st.st_mtime_ns, st.st_ctime_ns

    def newer(what, path, how, fields):
        before = times(path)
        time.sleep(0.02)
        path = how() or path
        after = times(path)
        same(f"{what} of {path}", tuple(a > b for a, b in zip(after, before)), fields)

    write_checkpoint(t + "/run/step1", make_tensors(1))
    os.mkdir(t + "/run/logs")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for place in places(m):
            a, b = place + "/a", place + "/b"
            write(a)
            newer("chmod", a, lambda: os.chmod(a, 0o600), (False, True))
            newer("utime", a, lambda: os.utime(a, (5, 5)), (False, True))
            same("the time of access", os.stat(a).st_atime, 5)
            newer("rename", a, lambda: os.rename(a, b) or b, (False, True))
            newer("chmod", place, lambda: os.chmod(place, 0o700), (False, True))
            newer("rename in it", place, lambda: os.rename(b, a), (True, True))
            newer("unlink in it", place, lambda: os.unlink(a), (True, True))
            newer("create in it", place, lambda: write(a), (True, True))


def test_a_link_to_a_step(t):
    """`ln -sfn step2 latest`, links to nothing and to files: as on a disk. What leads out of the source is refused."""
    write_checkpoint(t + "/run/step1", make_tensors(1))
    write_checkpoint(t + "/run/step2", make_tensors(2))
    os.makedirs(t + "/run/logs/old")
    os.mkdir(t + "/outside")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.symlink("step1", m / "latest")
        same("text", os.readlink(m / "latest"), "step1")
        same("in the source", os.readlink(t + "/run/latest"), "step1")
        same("bytes", read_all(m / f"latest/raw/{KEY}"), make_tensors(1)[KEY][2])
        subprocess.run(["ln", "-sfn", "step2", m / "latest"], check=True)
        os.utime(m / "latest", (7, 7), follow_symlinks=False)
        same("time of the link", os.lstat(t + "/run/latest").st_mtime, 7)
        same("another", read_all(m / f"latest/raw/{KEY}"), make_tensors(2)[KEY][2])
        os.symlink("../../step1", m / "logs/old/from")
        same("from below", os.path.realpath(m / "logs/old/from"), os.path.realpath(m / "step1"))
        for what, text in {"an absolute path": t + "/run/step1", "out of the source": "../outside"}.items():
            fails(what, errno.EPERM, lambda text=text: os.symlink(text, m / "wrong"))
        os.symlink("../step2", m / "step1/other")
        os.symlink("step9", m / "later")
        os.symlink("step1/config.json", m / "config.json")
        same("a file", read_all(m / "config.json"), read_all(t + "/run/step1/config.json"))
        fails("nothing yet", errno.ENOENT, lambda: os.stat(m / "later"))
        os.rename(m / "step2", m / "step9")
        same("and then", read_all(m / f"later/raw/{KEY}"), make_tensors(2)[KEY][2])
        fails("of a name that is there", errno.EEXIST, lambda: os.symlink("step1", m / "step9"))
        os.unlink(m / "latest")
        same("what is left", sorted(os.listdir(t + "/run")), ["config.json", "later", "logs", "step1", "step9"])
    with Mount(t + "/run", t + "/mnt", "rw,follow_symlinks") as m:
        fails("out of the source, also where links are followed", errno.EPERM, lambda: os.symlink("../outside", m / "wrong"))


def test_an_unlinked_file(t):
    """tmpfile(3) and the like: open, unlink, then write, and ask how long it is."""
    write_checkpoint(t + "/run/step1", make_tensors(1))
    os.mkdir(t + "/run/logs")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for place in [*places(m), m / "step1"]:
            fd = os.open(place + "/temporary", os.O_RDWR | os.O_CREAT)
            os.unlink(place + "/temporary")
            os.write(fd, b"abcde")
            same(f"{place}: written", (os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_END), os.fstat(fd).st_nlink), (5, 5, 0))
            os.posix_fallocate(fd, 0, 8192)
            same(f"{place}: allocated", os.fstat(fd).st_size, 8192)
            os.ftruncate(fd, 3)
            same(f"{place}: cut", (os.fstat(fd).st_size, os.pread(fd, 10, 0)), (3, b"abc"))
            os.fchmod(fd, 0o640)
            same(f"{place}: mode", os.fstat(fd).st_mode & 0o777, 0o640)
            os.close(fd)


def test_a_file_that_is_too_long(t):
    os.mkdir(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.mkdir(m / "step2")
        for path in (m / "log", m / "step2/log"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT)
            try:
                os.ftruncate(fd, (1 << 62))
            except OSError as e:
                assert e.errno in (errno.EFBIG, errno.EINVAL, errno.ENOSPC), e  # as the disk has it
            os.close(fd)


def test_kinds_in_listings(t):
    """readdir(3) tells what is a directory, and the numbers that stat(2) tells: find(1) goes by it."""
    write_checkpoint(t + "/run/step1", make_tensors(1))
    os.mkdir(t + "/run/logs")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        os.makedirs(m / "step2/eval/all")
        write(m / "step2/eval/all/scores")
        os.mkdir(m / "step1/eval")
        write(m / "step1/notes")
        for where in ("", "step1", "step2", "step2/eval", "logs"):
            with os.scandir(m / where) as entries:
                for e in entries:
                    st = os.lstat(e.path)
                    same(f"kind of {e.path}", e.is_dir(follow_symlinks=False), stat.S_ISDIR(st.st_mode))
                    same(f"number of {e.path}", e.inode(), st.st_ino)
        found = subprocess.run(["find", m.path, "-path", "*/eval/*"], capture_output=True, text=True, check=True).stdout.split()
        same("find", sorted(found), [m / "step2/eval/all", m / "step2/eval/all/scores"])


def test_two_disks(t):
    """Where one is mounted in the other, errors are those of a disk, and numbers of listings those of stat(2), and no two the same."""
    if os.geteuid() != 0:
        raise Skip("needs root for a disk of its own")
    os.makedirs(t + "/run/other")
    subprocess.run(["mount", "-t", "tmpfs", "none", t + "/run/other"], check=True)
    try:
        for folder in ("/run", "/run/other"):
            os.mkdir(t + folder + "/sub")
            write(t + folder + "/log")
        with Mount(t + "/run", t + "/mnt", "rw") as m:
            for name, call in ("rename", os.rename), ("link", os.link):
                fails(name, errno.EXDEV, lambda call=call: call(m / "log", m / "other/log2"))
                fails(name + " back", errno.EXDEV, lambda call=call: call(m / "other/log", m / "log2"))
            with os.scandir(m / "other") as entries:
                for e in entries:
                    same(f"number of {e.path}", e.inode(), os.lstat(e.path).st_ino)
            names = ["", "log", "sub", "other", "other/log", "other/sub"]
            same("numbers", len({os.lstat(m / name).st_ino for name in names}), len(names))
    finally:
        subprocess.run(["umount", t + "/run/other"], check=True)


if __name__ == "__main__":
    main(globals())
