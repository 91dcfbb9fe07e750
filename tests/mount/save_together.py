# SPDX-License-Identifier: MIT
"""Saving by several at once, and over what cannot be read or written: no byte is lost, and none is published that was not written."""
import ctypes
import errno
import os
import subprocess
import threading
import time

from mountlib import PATIENCE, Mount, Skip, fails, main, make_tensors, read_all, same, stored, tensor_bytes, wait_for, write_checkpoint, write_file

KEY = "big.weight"
BIG = 96 << 20


def big_checkpoint(t, size=BIG):
    data = tensor_bytes("big", size)
    write_checkpoint(t + "/run/step1", {KEY: ("U8", (size,), data), "small.weight": ("U8", (4,), b"abcd")})
    return data


def publish(m, path="step1"):
    fd = os.open(m / path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def all_at_once(count, work):
    """What work(i) raised, of threads that begin together."""
    barrier, wrong = threading.Barrier(count), []

    def run(i):
        barrier.wait()
        try:
            work(i)
        except Exception as e:  # pylint: disable=broad-exception-caught
            wrong.append(repr(e))
    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_each_writes_its_part_of_a_tensor(t):
    """Who opens it first copies what is there; who comes then must not copy it over what others have written since."""
    want = bytearray(big_checkpoint(t))
    count = 8
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        def work(i):
            fd = os.open(m / f"step1/raw/{KEY}", os.O_RDWR)
            same("size", os.fstat(fd).st_size, BIG)
            os.pwrite(fd, bytes([i]) * 4096, BIG - (i + 1) * 4096)  # where a copy comes last
            os.close(fd)
        same("wrong", all_at_once(count, work), [])
        for i in range(count):
            want[BIG - (i + 1) * 4096:BIG - i * 4096] = bytes([i]) * 4096
        publish(m)
    same("bytes", stored(t + "/run/step1")[KEY][2] == bytes(want), True)


def test_readers_see_it_whole(t):
    """While a file is copied to be written to, its name still shows all of it."""
    data, ended, seen, errors = tensor_bytes("big", BIG), threading.Event(), [], []
    write_checkpoint(t + "/run/step1", make_tensors(1))
    write_file(t + "/run/step1/table.bin", data)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        path = m / "step1/table.bin"

        def watch():
            while not ended.is_set():
                try:
                    size = os.stat(path).st_size
                    with open(path, "rb", buffering=0) as f:
                        f.seek(BIG - 4096)
                        seen.append((size, f.read(4096) == data[-4096:]))
                except OSError as e:
                    errors.append(e)
        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(4):  # a name is looked up again after 0.4 s: once in a while amid the copy
            with open(path, "r+b", buffering=0) as f:
                f.write(b"new")
            with open(path, "rb") as f:
                publish(m)
                same("size of an open file that was published", os.fstat(f.fileno()).st_size, BIG)
        ended.set()
        watcher.join()
    assert len(seen) > 1, seen
    same("seen", (set(seen), errors), ({(BIG, True)}, []))
    same("bytes", read_all(t + "/run/step1/table.bin") == b"new" + data[3:], True)


def patiently(call):
    """A directory that is published anew while its name is looked up is looked up again."""
    for _ in range(1000):
        try:
            return call()
        except OSError as e:
            if e.errno != errno.ESTALE:
                raise
    raise AssertionError("it changes at each look")


def test_logs_below_a_checkpoint_go_on(t):
    """Files in its directories come, grow and get other names while it is saved, time and again: all are there, and no save fails of them."""
    write_checkpoint(t + "/run/step1", make_tensors(1))
    key = next(iter(make_tensors(1)))
    os.makedirs(t + "/run/step1/logs/deep")
    made, failed, ended = [], [], threading.Event()
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        def save():
            try:
                for k in range(25):
                    fd = patiently(lambda: os.open(m / f"step1/tensors/{key}.npy", os.O_RDWR))
                    os.pwrite(fd, bytes([k]) * 4, os.fstat(fd).st_size - 4)
                    os.close(fd)
                    fd = patiently(lambda: os.open(m / "step1", os.O_RDONLY | os.O_DIRECTORY))
                    os.fsync(fd)
                    os.close(fd)
            except OSError as e:
                failed.append(e)
            finally:
                ended.set()

        saver = threading.Thread(target=save)
        saver.start()
        log = os.open(m / "step1/logs/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        while not ended.is_set():
            for where in ("logs", "logs/deep"):
                name = f"step1/{where}/{len(made)}"
                write_patiently(m / name, b"%d" % len(made))
                patiently(lambda: os.rename(m / name, m / (name + ".txt")))
                made.append(name + ".txt")
            os.write(log, b"%06d\n" % len(made))
        os.close(log)
        saver.join()
        same("saves that failed", failed, [])
    same("files", [read_all(f"{t}/run/{name}") for name in made], [b"%d" % i for i in range(len(made))])
    same("log", read_all(t + "/run/step1/logs/log"), b"".join(b"%06d\n" % i for i in range(2, len(made) + 1, 2)))
    same("tensor", stored(t + "/run/step1")[key][2][-4:], bytes([24]) * 4)


def write_patiently(path, data):
    fd = patiently(lambda: os.open(path, os.O_WRONLY | os.O_CREAT))
    os.write(fd, data)
    os.close(fd)


def test_names_are_listed_as_they_come_and_go(t):
    """By this mount, while others list the directory all the time: what they began to look at before counts no more."""
    os.makedirs(t + "/run/logs")
    for i in range(300):
        write_file(f"{t}/run/logs/{i}", b"")
    ended = threading.Event()
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        def watch():
            while not ended.is_set():
                os.listdir(m / "logs")
        watchers = [threading.Thread(target=watch) for _ in range(4)]
        for watcher in watchers:
            watcher.start()
        try:
            begun = time.monotonic()
            for i in range(100):
                if i >= 5 and time.monotonic() - begun > 40:  # a machine with much else to do
                    break
                with open(m / "logs/new", "w", encoding="utf-8") as f:
                    f.write("x")
                same(f"names with the new one, {i}", len(os.listdir(m / "logs")), 301)
                os.unlink(m / "logs/new")
                same(f"names without it, {i}", len(os.listdir(m / "logs")), 300)
        finally:
            ended.set()
            for watcher in watchers:
                watcher.join()


def test_what_cannot_be_read_is_not_half_replaced(t):
    """A tensor whose shard is short cannot be opened for writing to a part of it; others are saved all the same."""
    tensors = make_tensors(1)
    write_checkpoint(t + "/run/step1", tensors, shards=2)
    shard = t + "/run/step1/model-00002-of-00002.safetensors"
    with open(shard, "r+b") as f:
        f.truncate(os.path.getsize(shard) - 64)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        broken = [key for key in tensors if not_readable(m / f"step1/raw/{key}")]
        whole = [key for key in tensors if key not in broken]
        assert broken and whole, (broken, whole)
        fails("a part of it", errno.EIO, lambda: os.open(m / f"step1/raw/{broken[0]}", os.O_RDWR))
        write_file(m / "step1/notes.txt", b"saved")
        publish(m)
        same("side file", read_all(t + "/run/step1/notes.txt"), b"saved")
        same("another", read_all(m / f"step1/raw/{whole[0]}"), tensors[whole[0]][2])


def not_readable(path):
    try:
        read_all(path)
    except OSError:
        return True
    return False


def test_what_the_disk_refused_is_not_published(t):
    """A program that dies of ENOSPC closes its file: it may have its full length, and zeros where bytes should be."""
    if os.geteuid() != 0:
        raise Skip("needs root for a small disk")
    os.mkdir(t + "/run")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", t + "/run"], check=True)
    try:
        with Mount(t + "/run", t + "/mnt", "rw") as m:
            os.mkdir(m / "step1")
            fd = os.open(m / "step1/table.bin", os.O_RDWR | os.O_CREAT)
            os.pwrite(fd, b"end", (2 << 20) - 3)
            write_file(t + "/run/filler", bytes(3 << 20))
            fails("no room", errno.ENOSPC, lambda: [os.pwrite(fd, b"x" * (1 << 20), at << 20) for at in range(2)])
            os.close(fd)
            fails("published", errno.ENOSPC, lambda: publish(m))
            assert "table.bin: the disk did not take all of it" in m.messages(), m.messages()
            same("in the source", os.path.exists(t + "/run/step1"), False)
            os.unlink(t + "/run/filler")
            with open(m / "step1/table.bin", "r+b") as f:
                f.write(b"x" * (1 << 20))
                f.write(b"x" * ((1 << 20) - 3))
            publish(m)
        same("written again", read_all(t + "/run/step1/table.bin"), b"x" * ((2 << 20) - 3) + b"end")
    finally:
        subprocess.run(["umount", "-l", t + "/run"], check=True)


def test_a_file_is_not_cut_while_it_is_published(t):
    """truncate(2) of a staged file waits for the publication, and changes the next one."""
    big_checkpoint(t, 4096)
    data = tensor_bytes("new", BIG)
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        step = next((s for s in (f"step{i}" for i in range(2, 12)) if cut_while_it_is_published(t, m, s, data)), None)
        assert step, "each was published before it was seen"
        staged = os.open(m / f"{step}/notes.txt", os.O_PATH)
        publish(m, step)
        fails("by what it was", errno.ESTALE, lambda: os.truncate(f"/proc/self/fd/{staged}", 4))
        os.close(staged)
        same("afterwards", read_all(f"{t}/run/{step}/notes.txt"), b"")
    same("tensor", stored(f"{t}/run/{step}")["w"][2] == data, True)


def cut_while_it_is_published(t, m, step, data):
    """False: it was over before it was seen to have begun."""
    os.mkdir(m / step)
    write_file(m / f"{step}/notes.txt", b"all of it")
    os.mkdir(m / f"{step}/tensors")
    with open(m / f"{step}/tensors/w.npy", "wb") as f:
        f.write(npy(data))
    saver = threading.Thread(target=publish, args=(m, step))
    saver.start()
    while not writes_data(f"{t}/run/.unshard-staging-{step}/data") and saver.is_alive():
        time.sleep(0.0005)
    seen = saver.is_alive()
    os.truncate(m / f"{step}/notes.txt", 0)
    same("as it was written", read_all(f"{t}/run/{step}/notes.txt"), b"all of it")
    saver.join()
    return seen


def test_attributes_are_not_lost_while_it_is_published(t):
    """What is set on a staged file while its publication goes on is published, or the call fails."""
    sets = {"mode": (lambda path: os.chmod(f"{path}/notes.txt", 0o600),
                     lambda path: os.stat(f"{path}/notes.txt").st_mode & 0o777 == 0o600),
            "format": (lambda path: os.setxattr(path, "user.unshard.save", b"npz"), lambda path: os.path.exists(f"{path}/model.npz"))}
    data = tensor_bytes("new", BIG)
    os.mkdir(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for what, (change, is_set) in sets.items():
            assert any(set_while_it_is_published(t, m, f"{what} {i}", change, is_set, data) for i in range(10)), f"{what}: published before it was seen"


def set_while_it_is_published(t, m, step, change, is_set, data):
    """False: it was over before it was seen to have begun."""
    os.makedirs(m / f"{step}/tensors")
    write_file(m / f"{step}/notes.txt", b"all of it")
    with open(m / f"{step}/tensors/w.npy", "wb") as f:
        f.write(npy(data))
    saver = threading.Thread(target=publish, args=(m, step))
    saver.start()
    while not writes_data(f"{t}/run/.unshard-staging-{step}/data") and saver.is_alive():
        time.sleep(0.0005)
    seen = saver.is_alive()
    try:
        change(m / step)
        done = True
    except OSError as x:
        assert x.errno in (errno.EROFS, errno.ESTALE), x
        done = False
    saver.join()
    assert m.alive()
    same(f"{step}: set", is_set(f"{t}/run/{step}"), done)
    return seen


def npy(data):
    head = str({"descr": "|u1", "fortran_order": False, "shape": (len(data),)}).encode()
    head += b" " * (63 - (10 + len(head)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data


def writes_data(path):
    """Is a publication writing its files now?"""
    try:
        return bool(os.listdir(path))
    except FileNotFoundError:
        return False


def test_a_directory_moves_with_what_is_staged_below(t):
    """What is not published yet goes where its directory goes: it is published before."""
    os.makedirs(t + "/src/run")
    tensors = make_tensors(1)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        write_checkpoint(m / "run/step1", tensors)
        os.rename(m / "run", m / "moved")
        same("stored", stored(t + "/src/moved/step1"), tensors)
        write_checkpoint(m / "moved/step2", tensors)
        with open(m / "moved/step2/log.txt", "w"):
            fails("while a file is open", errno.EBUSY, lambda: os.rename(m / "moved", m / "run"))
        os.rename(m / "moved", m / "run")
        same("stored", stored(t + "/src/run/step2"), tensors)
        os.unlink(m / "run/step2/raw/model.layers.0.mlp.weight")  # hides a name, no more
        os.rename(m / "run", m / "moved")
        same("left", sorted(os.listdir(t + "/src/moved")), ["step1", "step2"])
        same("not hidden", "model.layers.0.mlp.weight" in os.listdir(m / "moved/step2/raw"), True)


def test_what_is_staged_is_exchanged(t):
    """renameat2(2) with RENAME_EXCHANGE: changes of either checkpoint go with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in "ab":
        write_checkpoint(f"{t}/src/{name}", {"w": ("U8", (4,), name.encode() * 4)}, shards=1)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        for name in "ab":
            with open(m / f"{name}/raw/w", "r+b") as f:
                f.write(name.upper().encode())
        same("exchange", libc.renameat2(-100, (m / "a").encode(), -100, (m / "b").encode(), 2), 0)
    same("a", stored(t + "/src/a")["w"][2], b"Bbbb")
    same("b", stored(t + "/src/b")["w"][2], b"Aaaa")


def test_no_directory_moves_over_what_is_staged(t):
    """rename(2) of a directory to the name of one that is not published: only where nothing is in that."""
    os.makedirs(t + "/src/plain")
    write_file(t + "/src/plain/notes.txt", b"notes")
    tensors = make_tensors(1)
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        write_checkpoint(m / "step1", tensors)
        os.mkdir(m / "empty")
        fails("over a checkpoint", errno.ENOTEMPTY, lambda: os.rename(m / "plain", m / "step1"))
        os.rename(m / "plain", m / "empty")
        same("moved", read_all(m / "empty/notes.txt"), b"notes")
        publish(m, "step1")
    same("stored", stored(t + "/src/step1"), tensors)


def test_names_come_while_their_directory_is_published(t):
    """Who waits for a publication to make a name goes on in what was published."""
    makes = {"a directory": lambda fd: os.mkdir("new", dir_fd=fd),
             "a file": lambda fd: os.close(os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=fd))}
    data = tensor_bytes("new", BIG)
    os.mkdir(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for what, make in makes.items():
            assert any(came_while_it_is_published(t, m, what, make, data) for _ in range(10)), f"{what}: published before it was seen"


def came_while_it_is_published(t, m, what, make, data):
    """False: it was over before it was seen to have begun."""
    os.makedirs(m / "step2/logs")
    os.mkdir(m / "step2/tensors")
    with open(m / "step2/tensors/w.npy", "wb") as f:
        f.write(npy(data))
    logs = os.open(m / "step2/logs", os.O_RDONLY | os.O_DIRECTORY)
    saver = threading.Thread(target=publish, args=(m, "step2"))
    saver.start()
    while not writes_data(t + "/run/.unshard-staging-step2/data") and saver.is_alive():
        time.sleep(0.0005)
    seen = saver.is_alive()
    make(logs)
    saver.join()
    assert m.alive(), what
    same(f"{what}: names", os.listdir(logs), ["new"])
    os.close(logs)
    os.setxattr(m.path, "user.unshard.publish", b"")
    same(f"{what}: stored", os.listdir(t + "/run/step2/logs"), ["new"])
    subprocess.run(["rm", "-r", m / "step2"], check=True)
    return seen


def test_a_working_directory_is_listed_while_it_is_published(t):
    """Who lists the directory above when the source has it just now takes nothing from who stands in it."""
    os.mkdir(t + "/run")
    with Mount(t + "/run", t + "/mnt", "rw") as m:
        for i in range(100):
            os.mkdir(m / f"step{i}")
            os.chdir(m / f"step{i}")
            try:
                write_file("notes.txt", b"all of it")
                saver = threading.Thread(target=publish, args=(m, f"step{i}"))
                saver.start()
                wait_for("publication", PATIENCE, lambda new=f"{t}/run/step{i}": os.path.exists(new), step=0)
                os.listdir(m.path)
                saver.join()
                same("working directory", os.getcwd(), m / f"step{i}")
                same("bytes", read_all("notes.txt"), b"all of it")
            finally:
                os.chdir("/")


main(globals())
