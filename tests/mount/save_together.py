# SPDX-License-Identifier: MIT
"""Several at once: writers of one tensor, logs beside a save, listings; and tensors that cannot be read."""
import errno
import os
import threading
import time

from mountlib import Mount, fails, main, make_tensors, read_all, same, stored, tensor_bytes, write_checkpoint, write_file

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
                    fd = os.open(m / f"step1/tensors/{key}.npy", os.O_RDWR)
                    os.pwrite(fd, bytes([k]) * 4, os.fstat(fd).st_size - 4)
                    os.close(fd)
                    fd = os.open(m / "step1", os.O_RDONLY | os.O_DIRECTORY)
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
                write_beside(m / name, b"%d" % len(made))
                os.rename(m / name, m / (name + ".txt"))
                made.append(name + ".txt")
            os.write(log, b"%06d\n" % len(made))
        os.close(log)
        saver.join()
        same("saves that failed", failed, [])
    same("files", [read_all(f"{t}/run/{name}") for name in made], [b"%d" % i for i in range(len(made))])
    same("log", read_all(t + "/run/step1/logs/log"), b"".join(b"%06d\n" % i for i in range(2, len(made) + 1, 2)))
    same("tensor", stored(t + "/run/step1")[key][2][-4:], bytes([24]) * 4)


def write_beside(path, data):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
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


main(globals())
