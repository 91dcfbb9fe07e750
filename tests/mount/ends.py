# SPDX-License-Identifier: MIT
"""How mounts begin and end: the background, errors that are told, signals, unmounting, users."""
import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback

import mountlib
from mountlib import (PATIENCE, UNSHARD, Mount, Skip, fails, is_mounted, main, make_tensors, npy_image, read_all, same, stored,
                      wait_for, write_checkpoint, write_file)


def run(*args, seconds=4 * PATIENCE, **more):
    return subprocess.run(args, capture_output=True, text=True, timeout=seconds, **more)


def mount_fails(what, words, *args, status=None):
    done = run(UNSHARD, "mount", *args)
    assert done.returncode != 0, what
    if status is not None:
        same(what + ": status", done.returncode, status)
    lines = done.stderr.strip().splitlines()
    assert any(words in line for line in lines), f"{what}: {done.stderr!r} does not say {words!r}"
    assert not is_mounted(os.path.realpath(args[1]))


def servers(path):
    """Processes whose command line names this mount point."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                words = f.read().split(b"\0")
        except OSError:
            continue
        if b"mount" in words and path.encode() in words:
            found.append(int(pid))
    return found


def setup(t):
    tensors = make_tensors(1)
    write_checkpoint(t + "/src", tensors)
    os.mkdir(t + "/mnt")
    return tensors


def test_background_and_umount_verb(t):
    tensors = setup(t)
    key = next(iter(tensors))
    done = run(UNSHARD, "mount", t + "/src", t + "/mnt", "-o", f"cache_dir={t}/cache")
    same("mount: " + done.stderr, (done.returncode, done.stdout, done.stderr), (0, "", ""))
    same("usable at once", run("mountpoint", "-q", t + "/mnt").returncode, 0)
    same("bytes", read_all(f"{t}/mnt/raw/{key}"), tensors[key][2])
    with open("/proc/self/mountinfo") as f:
        line = next(line for line in f if line.split()[4] == os.path.realpath(t) + "/mnt")
    assert f" - fuse.unshardfs {os.path.realpath(t)}/src ro," in line, line
    (server,) = servers(t + "/mnt")
    same("its directory", os.readlink(f"/proc/{server}/cwd"), "/")
    same("its input", os.readlink(f"/proc/{server}/fd/0"), "/dev/null")
    same("its session", os.getsid(server), server)
    done = run(UNSHARD, "umount", t + "/mnt")
    same("umount: " + done.stderr, done.returncode, 0)
    assert not is_mounted(os.path.realpath(t) + "/mnt")
    wait_for("the server's end", PATIENCE, lambda: not servers(t + "/mnt"))
    same("the log is private", os.stat(t + "/cache/unshardfs.log").st_mode & 0o777, 0o600)


def test_every_signal_ends_it(t):
    setup(t)
    for signo in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        with Mount(t + "/src", t + "/mnt") as m:
            os.listdir(m / "tensors")
            m.process.send_signal(signo)
            same(f"status after {signo}", m.process.wait(PATIENCE), 0)
            assert not is_mounted(m.path)


def test_a_signal_ends_it_while_files_are_open(t):
    tensors = setup(t)
    with Mount(t + "/src", t + "/mnt") as m:
        fd = os.open(m / f"raw/{next(iter(tensors))}", os.O_RDONLY)
        m.process.send_signal(signal.SIGTERM)
        same("status", m.process.wait(PATIENCE), 0)
        assert not is_mounted(m.path)
        os.close(fd)


def closed_unseen(m, count=150):
    """Files of a new checkpoint that are closed while the server stands still: it has yet to see their releases."""
    os.mkdir(m / "step2")
    files = [os.open(m / f"step2/{i}", os.O_RDWR | os.O_CREAT) for i in range(count)]
    for fd in files:
        os.write(fd, b"some text" * 600)
    kept, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    socket.send_fds(kept, [b"-"], files)  # on the way, a file is open, and its last end is no close(2), which would wait for an answer
    for fd in files:
        os.close(fd)
    m.process.send_signal(signal.SIGSTOP)
    kept.close()
    other.close()
    return {str(i): b"some text" * 600 for i in range(count)}


def is_saved(t, want):
    same("files", {n: read_all(f"{t}/run/step2/{n}") for n in os.listdir(t + "/run/step2")}, want)


def test_what_was_closed_before_a_signal_is_saved(t):
    os.mkdir(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        want = closed_unseen(m)
        m.process.send_signal(signal.SIGTERM)
        m.process.send_signal(signal.SIGCONT)
        m.process.wait(PATIENCE)
    is_saved(t, want)


def test_what_was_closed_before_umount_is_saved(t):
    """The kernel throws releases away that wait when a file system is unmounted."""
    if os.geteuid() != 0:
        raise Skip("needs root")
    os.mkdir(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        want = closed_unseen(m)
        same("umount2", ctypes.CDLL(None).umount2(os.fsencode(m.path), 0), 0)  # umount(8) would ask the server what it is
        m.process.send_signal(signal.SIGCONT)
        m.process.wait(PATIENCE)
    is_saved(t, want)


def test_counters_on_sigusr1(t):
    tensors = setup(t)
    with Mount(t + "/src", t + "/mnt") as m:
        read_all(m / f"raw/{next(iter(tensors))}")
        m.process.send_signal(signal.SIGUSR1)
        wait_for("counters in the log", PATIENCE, lambda: "bytes_read=" in m.messages())
        assert m.alive()


def test_busy_mounts_are_left(t):
    tensors = setup(t)
    with Mount(t + "/src", t + "/mnt") as m:
        fd = os.open(m / f"raw/{next(iter(tensors))}", os.O_RDONLY)
        done = run(UNSHARD, "umount", m.path)
        assert done.returncode != 0 and "fuser -vm" in done.stderr, done
        assert "in use by " in done.stderr and f"(pid {os.getpid()})" in done.stderr, done
        assert is_mounted(m.path)
        os.close(fd)
        stands = subprocess.Popen(["sleep", "100"], cwd=m / "raw")
        done = run(UNSHARD, "umount", m.path)
        assert done.returncode != 0 and f"in use by sleep (pid {stands.pid})" in done.stderr, done
        stands.kill()
        stands.wait()
        same("umount", run(UNSHARD, "umount", m.path + "/").returncode, 0)
        same("server", m.process.wait(PATIENCE), 0)


def image_of(m, where):
    """A file system in a file of the mount, mounted by a loop device: with something in it that is not written yet."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        raise Skip("no root, or no mkfs.ext4")
    with open(m / "images/ext", "wb") as f:
        f.truncate(8 << 20)
    run("mkfs.ext4", "-q", m / "images/ext", check=True)
    if run("mount", "-o", "loop", m / "images/ext", where).returncode:
        raise Skip("no loop device")
    with open(where + "/file", "wb") as f:
        f.write(b"last words" * 100000)


@contextlib.contextmanager
def with_images(t):
    """A mount for saving. Whatever comes of it, nothing of ours stays mounted: what hangs is cut off by the kernel."""
    for name in ("src/images/at", "beside"):
        os.makedirs(f"{t}/{name}")
    where = [t + "/mnt/images/at", t + "/beside"]
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        number = os.minor(os.stat(m.path).st_dev)
        try:
            yield m, where
        finally:
            if is_mounted(m.path) or m.alive():
                hangs = threading.Timer(2 * PATIENCE, lambda: write_all(f"/sys/fs/fuse/connections/{number}/abort", b"1"))
                hangs.start()
                for path in where:
                    run("umount", path, seconds=4 * PATIENCE)
                m.process.terminate()
                m.process.wait(4 * PATIENCE)
                hangs.cancel()
            run("umount", where[1])


def write_all(path, data):
    with contextlib.suppress(OSError), open(path, "wb") as f:
        f.write(data)


def ends(m, what):
    wait_for(what, PATIENCE, lambda: not m.alive())
    same("status", m.process.returncode, 0)
    assert not is_mounted(m.path)


def test_an_image_that_is_mounted_within(t):
    """It is unmounted with the mount, and has its last bytes to write into it: the server must not be who waits for that."""
    with with_images(t) as (m, (within, _)):
        image_of(m, within)
        done = run(UNSHARD, "umount", m.path)
        assert done.returncode != 0 and f"is mounted in it, at {within}" in done.stderr, done
        m.process.send_signal(signal.SIGTERM)
        ends(m, "the end of the server")
        assert f"{within}: the ext4 that is mounted there goes along" in m.messages(), m.messages()
        # The loop device of before may not be free yet, and a container need not have another.
        wait_for("a loop device", PATIENCE, lambda: run("mount", "-o", "loop", t + "/src/images/ext", t + "/beside").returncode == 0, 0.2)
        same("what it had to write", read_all(t + "/beside/file"), b"last words" * 100000)


def test_an_image_that_is_mounted_elsewhere(t):
    with with_images(t) as (m, (_, beside)):
        image_of(m, beside)
        done = run(UNSHARD, "umount", m.path)
        assert done.returncode != 0 and f"(an image at {m.path}/images/ext)" in done.stderr, done
        m.process.send_signal(signal.SIGTERM)
        ends(m, "the end of the server")
        same("umount", run("umount", beside).returncode, 0)


def test_an_image_within_that_is_in_use(t):
    """Then it stays until it is not: for the server there is nothing to wait for."""
    with with_images(t) as (m, (within, _)):
        image_of(m, within)
        stands = subprocess.Popen(["sleep", "100"], cwd=within)
        try:
            m.process.send_signal(signal.SIGTERM)
            ends(m, "the end of the server")
        finally:
            stands.kill()
            stands.wait(PATIENCE)


def test_busy_for_a_moment(t):
    """As by a program that just ends, or makes a mount namespace."""
    setup(t)
    with Mount(t + "/src", t + "/mnt") as m:
        for _ in range(10):  # a program that just ends may take its time on a machine with much else to do
            stands = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(0.3)"], cwd=m / "raw", stdout=subprocess.PIPE)
            stands.stdout.readline()
            done = run(UNSHARD, "umount", m.path)
            stands.wait()
            if done.returncode == 0:
                break
        same("umount: " + done.stderr, done.returncode, 0)
        same("server", m.process.wait(PATIENCE), 0)


def test_umount_of_what_is_not_ours(t):
    os.mkdir(t + "/plain")
    for path, words in ((t + "/plain", "no unshardfs"), ("/proc", "no unshardfs"), (t + "/none", "no unshardfs")):
        done = run(UNSHARD, "umount", path)
        assert done.returncode != 0 and words in done.stderr, (path, done)
    assert os.path.ismount("/proc")


def test_umount_of_another_users(t):
    """What fusermount3 has against it is told."""
    if os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("fusermount3"):
        raise Skip("needs root, setpriv and fusermount3")
    setup(t)
    with Mount(t + "/src", t + "/mnt") as m:
        done = run(*NOBODY, UNSHARD, "umount", m.path)
        assert done.returncode != 0 and f"unmount {m.path}: fusermount3: " in done.stderr, done
        assert is_mounted(m.path)


def test_errors_are_told_before_the_background(t):
    setup(t)
    write_file(t + "/file", b"")
    o = ("-o", f"cache_dir={t}/cache")
    mount_fails("no source", "/none", t + "/none", t + "/mnt", *o, status=3)
    mount_fails("no mount point", "mkdir", t + "/src", t + "/nomnt", *o)
    mount_fails("a file", "directory", t + "/src", t + "/file", *o)
    os.mkdir(t + "/src/inner")
    mount_fails("inside the source", "within the source", t + "/src", t + "/src/inner", *o)


def test_a_second_mount_is_refused(t):
    setup(t)
    with Mount(t + "/src", t + "/mnt") as m:
        done = run(UNSHARD, "mount", t + "/src", t + "/mnt", "-o", f"cache_dir={t}/cache")
        assert done.returncode != 0 and "already" in done.stderr, done
        os.symlink("mnt", t + "/link")
        done = run(UNSHARD, "mount", t + "/src", t + "/link", "-o", f"cache_dir={t}/cache")
        assert done.returncode != 0 and "already" in done.stderr, done
        os.mkdir(t + "/mnt2")
        with Mount(t + "/src", t + "/mnt2") as other:  # another place is fine
            same("two mounts of one source", sorted(os.listdir(other.path)), sorted(os.listdir(m.path)))


def test_over_the_source_itself(t):
    tensors = setup(t)
    key = next(iter(tensors))
    with Mount(t + "/src", t + "/src") as m:
        same("bytes", read_all(m / f"raw/{key}"), tensors[key][2])
        assert "model-00001-of-00002.safetensors" not in os.listdir(m.path)


def test_a_dead_server_and_its_mount_point(t):
    setup(t)
    with Mount(t + "/src", t + "/mnt") as m:
        m.process.kill()
        m.process.wait()
        fails("dead", errno.ENOTCONN, lambda: os.listdir(m.path))
        done = run(UNSHARD, "mount", t + "/src", t + "/mnt", "-o", f"cache_dir={t}/cache")
        assert done.returncode != 0 and "umount" in done.stderr, done
        same("umount", run(UNSHARD, "umount", t + "/mnt").returncode, 0)
        m.process.returncode = 0
    with Mount(t + "/src", t + "/mnt") as m:
        os.listdir(m.path)


SAME_PAGES = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
while True:
    if sys.argv[2] == "write":
        os.pwrite(fd, bytes(65536), 0)
    for page in range(16 if sys.argv[2] == "map" else 0):
        with mmap.mmap(fd, 4096, offset=page * 4096) as m:
            m[64:128] = b"m" * 64
"""


def is_stuck(pid):
    """Does a thread of it wait in the kernel, though all were stopped?"""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.03)
    stuck = False
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/stat", encoding="utf-8", errors="replace") as f:
            stuck |= f.read().rpartition(")")[2].split()[0] == "D"
    return stuck


def killed_while_stuck(m):
    for i in range(500):
        if is_stuck(m.process.pid):
            m.process.kill()
            return True
        os.kill(m.process.pid, signal.SIGCONT)
        time.sleep(0.001 * (i % 20))
    return False


def test_killed_while_a_page_is_waited_for(t):
    """A thread of the server that waits in the kernel for a page, which another has locked until it is filled, holds up nobody when the server is killed."""
    os.makedirs(t + "/src")
    write_file(t + "/src/log", bytes(16 * 4096))
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        if not os.path.exists(f"/sys/fs/fuse/connections/{os.minor(os.stat(m.path).st_dev)}"):
            raise Skip("no /sys/fs/fuse/connections")
        users = [subprocess.Popen([sys.executable, "-c", SAME_PAGES, m / "log", "write" if n % 2 else "map"], stderr=subprocess.DEVNULL)
                 for n in range(8)]
        try:
            if not killed_while_stuck(m):
                raise Skip("no thread of the server was seen to wait so")
            wait_for("all who use it", PATIENCE, lambda: all(u.poll() is not None for u in users))
            m.process.wait(PATIENCE)
            m.process.returncode = 0
        finally:
            if m.alive():
                run("umount", "-f", m.path)  # ends the connection, which nothing else does then
            for u in users:
                u.kill()


def test_odd_names(t):
    """Commas, backslashes and blanks in the paths."""
    tensors = make_tensors(2)
    src, mnt = t + "/so,ur\\ce one", t + "/m nt,\\x"
    write_checkpoint(src, tensors)
    key = next(iter(tensors))
    os.mkdir(mnt)
    done = run(UNSHARD, "mount", src, mnt)
    same("mount: " + done.stderr, done.returncode, 0)
    same("bytes", read_all(f"{mnt}/raw/{key}"), tensors[key][2])
    done = run(UNSHARD, "umount", mnt)
    same("umount: " + done.stderr, done.returncode, 0)


def test_inode_numbers_across_mounts(t):
    setup(t)
    write_checkpoint(t + "/src/sub", make_tensors(3))

    def numbers(m):
        found = {}
        for root, dirs, files in os.walk(m.path):
            for name in dirs + files:
                path = os.path.join(root, name)
                found[os.path.relpath(path, m.path)] = os.lstat(path).st_ino
                entry = {e.name: e.inode() for e in os.scandir(root)}
                same("d_ino of " + path, entry[name], os.lstat(path).st_ino)
        return found

    with Mount(t + "/src", t + "/mnt") as m:
        first = numbers(m)
    with Mount(t + "/src", t + "/mnt") as m:
        second = numbers(m)
    same("inode numbers", second, first)
    files = {k: v for k, v in first.items() if not k.startswith("tree/") and "/tree/" not in k}
    same("all different", len(set(files.values())), len(files))
    assert all(1 < v < 1 << 63 for v in first.values())


def test_cache_that_cannot_be_written(t):
    tensors = setup(t)
    key = next(iter(tensors))
    write_file(t + "/nodir", b"")
    done = run(UNSHARD, "mount", t + "/src", t + "/mnt", "-o", f"cache_dir={t}/nodir/cache")
    same("mount: " + done.stderr, done.returncode, 0)
    assert "memory" in done.stderr, done.stderr
    same("bytes", read_all(f"{t}/mnt/raw/{key}"), tensors[key][2])
    same("umount", run(UNSHARD, "umount", t + "/mnt").returncode, 0)


def test_index_in_memory(t):
    tensors = setup(t)
    key = next(iter(tensors))
    with Mount(t + "/src", t + "/mnt", "index=memory") as m:
        same("bytes", read_all(m / f"raw/{key}"), tensors[key][2])
        read_all(m / ".unshard/checkpoint.json")
        same("nothing written", os.path.exists(m.dir + "/cache"), False)


NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def with_public_device(t, test):
    """Where /dev/fuse is for root alone: again in a mount namespace whose /dev/fuse is for all, as on any desktop."""
    if os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("fusermount3"):
        raise Skip("needs root, setpriv and fusermount3")
    if os.stat("/dev/fuse").st_mode & 0o006 == 0o006:
        return False
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
        whole = any(line.split()[4] == "/" for line in f)
    if not whole:
        raise Skip("/ is no mount point, as in a chroot: nothing can be mounted there for this test alone")
    try:
        os.mknod(t + "/fuse", 0o666 | stat.S_IFCHR, os.makedev(10, 229))
        os.chmod(t + "/fuse", 0o666)
    except OSError as e:
        raise Skip(f"cannot make a device: {e}")
    script = f"mount --bind {t}/fuse /dev/fuse && exec {sys.executable} {os.path.abspath(__file__)} {test}"
    done = run("unshare", "-m", "--propagation", "private", "sh", "-c", script, seconds=100)
    if "SKIP" in done.stdout or done.returncode == 0 and f"ok - {test}" not in done.stdout:
        raise Skip("no mount namespace: " + done.stdout + done.stderr)
    same(done.stdout + done.stderr, done.returncode, 0)
    return True


def test_as_a_normal_user(t):
    if with_public_device(t, "test_as_a_normal_user"):
        return
    tensors = setup(t)
    key = next(iter(tensors))
    for name in ("mnt", "mine"):
        os.makedirs(f"{t}/{name}", exist_ok=True)
        os.chown(f"{t}/{name}", 65534, 65534)
    options = f"cache_dir={t}/mine/cache"
    done = run(*NOBODY, UNSHARD, "mount", t + "/src", t + "/mnt", "-o", options)
    same("mount: " + done.stderr, (done.returncode, done.stderr), (0, ""))
    done = run(*NOBODY, "cmp", f"{t}/mnt/raw/{key}", f"{t}/mnt/raw/{key}")
    same("read: " + done.stderr, done.returncode, 0)
    fails("root is another user", errno.EACCES, lambda: os.listdir(t + "/mnt"))
    done = run(*NOBODY, UNSHARD, "umount", t + "/mnt")
    same("umount: " + done.stderr, done.returncode, 0)
    assert not is_mounted(os.path.realpath(t) + "/mnt")
    # allow_other: only with a line in /etc/fuse.conf, which the message names.
    share = (*NOBODY, UNSHARD, "mount", t + "/src", t + "/mnt", "-o", options + ",allow_other")
    with open("/etc/fuse.conf") as f:
        allowed = any(line.strip() == "user_allow_other" for line in f)
    done = run(*share)
    if allowed:
        same("allow_other: " + done.stderr, done.returncode, 0)
        run(*NOBODY, UNSHARD, "umount", t + "/mnt")
    else:
        assert done.returncode != 0 and "user_allow_other" in done.stderr and "/etc/fuse.conf" in done.stderr, done
        assert not is_mounted(os.path.realpath(t) + "/mnt")


def test_a_normal_user_ends_it_by_signal(t):
    if with_public_device(t, "test_a_normal_user_ends_it_by_signal"):
        return
    setup(t)
    for name in ("mnt", "mine"):
        os.makedirs(f"{t}/{name}", exist_ok=True)
        os.chown(f"{t}/{name}", 65534, 65534)
    done = run(*NOBODY, UNSHARD, "mount", t + "/src", t + "/mnt", "-o", f"cache_dir={t}/mine/cache")
    same("mount: " + done.stderr, done.returncode, 0)
    (server,) = servers(t + "/mnt")
    os.kill(server, signal.SIGTERM)
    wait_for("the end", PATIENCE, lambda: not servers(t + "/mnt"))
    assert not is_mounted(os.path.realpath(t) + "/mnt")


def as_nobody(call):
    """In a process of that user."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    same("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)


def save_as_nobody(t, test, call):
    """call(directory) with a directory that is that user's own."""
    if with_public_device(t, test):
        return
    os.mkdir(t + "/own")
    os.chown(t + "/own", 65534, 65534)
    mountlib.UNSHARD = shutil.copy(UNSHARD, t)  # a clone below /root is root's alone
    try:
        as_nobody(lambda: call(t + "/own"))
    finally:
        mountlib.UNSHARD = UNSHARD


def publish(m):
    os.setxattr(m.path, "user.unshard.publish", b"")


def put_zeros(m, step, key):
    """One tensor of it is zero from now on, and nothing is left of how that was done."""
    with open(m / f"{step}/tensors/{key}.npy", "wb") as f:
        f.write(npy_image("<f4", (64, 32), bytes(64 * 32 * 4)))
    publish(m)
    same("bytes", stored(f"{m.source}/{step}")[key][2], bytes(64 * 32 * 4))
    same("names", os.listdir(m.source), [step])


def test_a_normal_user_saves(t):
    """What its modes allow: an edit asks for the directory and for each file that it replaces."""
    def save(own):
        write_checkpoint(own + "/run/step1", make_tensors(1))
        with Mount(own + "/run", own + "/mnt", "rw") as m:
            put_zeros(m, "step1", "model.layers.0.mlp.weight")
            shard = next(n for n in os.listdir(own + "/run/step1") if n.endswith(".safetensors"))
            for path, mode in (("", 0o555), (shard, 0o444)):
                before = stat.S_IMODE(os.stat(f"{own}/run/step1/{path}").st_mode)
                os.chmod(f"{own}/run/step1/{path}", mode)
                for key in make_tensors(1):
                    with contextlib.suppress(PermissionError):
                        put_zeros(m, "step1", key)
                        assert path, f"{key} is written in a directory that may not be"
                same(f"mode of {path or 'the directory'}", stat.S_IMODE(os.stat(f"{own}/run/step1/{path}").st_mode), mode)
                os.chmod(f"{own}/run/step1/{path}", before)

    save_as_nobody(t, "test_a_normal_user_saves", save)


def test_other_users_see_what_modes_allow(t):
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        raise Skip("needs root and setpriv")
    tensors = setup(t)
    keys = list(tensors)
    os.chmod(t + "/src/model-00001-of-00002.safetensors", 0o600)
    with Mount(t + "/src", t + "/mnt", "allow_other") as m:
        same("a private shard", run(*NOBODY, "cat", m / f"raw/{keys[0]}").returncode, 1)
        same("a public shard", run(*NOBODY, "cmp", m / f"raw/{keys[1]}", m / f"raw/{keys[1]}").returncode, 0)
        same("the file of both", run(*NOBODY, "cat", m / "model.safetensors").returncode, 1)
        for report in ("checkpoint.json", "objects.json"):
            same("what is told of both", run(*NOBODY, "cat", m / f".unshard/{report}").returncode, 1)
    with Mount(t + "/src", t + "/mnt") as m:
        same("without allow_other", run(*NOBODY, "ls", m.path).returncode, 2)


def test_a_late_server_leaves_the_next_mount_alone(t):
    """The kernel gives the device number of a mount that is gone to the next one: it must not be unmounted for it."""
    if os.geteuid() != 0:
        raise Skip("unmounting past a stopped server takes root")
    tensors = setup(t)
    key = next(iter(tensors))
    options = ["-o", f"cache_dir={t}/cache"]

    def mounted():
        """The device and the server of a new one."""
        before = servers(t + "/mnt")
        same("mount", run(UNSHARD, "mount", t + "/src", t + "/mnt", *options).returncode, 0)
        (server,) = [pid for pid in servers(t + "/mnt") if pid not in before]
        return os.stat(t + "/mnt").st_dev, server

    device, late = mounted()
    os.kill(late, signal.SIGSTOP)
    try:
        # umount(8) would ask the stopped server about its path.
        same("unmounted", ctypes.CDLL(None).umount2((t + "/mnt").encode(), 2), 0)
        if mounted()[0] != device:
            raise Skip("another mount of this machine has got the number in between")
    finally:
        os.kill(late, signal.SIGCONT)
    wait_for("the end of the first server", PATIENCE, lambda: late not in servers(t + "/mnt"))
    assert is_mounted(os.path.realpath(t + "/mnt"))
    same("bytes", read_all(f"{t}/mnt/raw/{key}"), tensors[key][2])
    same("umount", run(UNSHARD, "umount", t + "/mnt").returncode, 0)


def test_tells_systemd(t):
    """READY=1 when the mount can be used and not before, STOPPING=1 at its end (sd_notify(3))."""
    setup(t)
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(t + "/notify")
    manager.settimeout(PATIENCE)
    with Mount(t + "/src", t + "/mnt", env={**os.environ, "NOTIFY_SOCKET": t + "/notify"}) as m:
        same("first", manager.recv(4096), b"READY=1")
        assert is_mounted(m.path)
    same("second", manager.recv(4096), b"STOPPING=1")


if __name__ == "__main__":
    main(globals())
