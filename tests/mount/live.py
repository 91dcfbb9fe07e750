# SPDX-License-Identifier: MIT
"""Nobody waits for what somebody else asked: a scan of one checkpoint stops no other request."""
import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from mountlib import PATIENCE, SANITIZED, Mount, main, make_tensors, read_all, same, safetensors_image, wait_for, write_checkpoint, write_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "remote"))

from fault_server import Server  # noqa: E402

COUNT = 200_000 if SANITIZED else 400_000  # takes seconds to scan
TELLS_SCANS = {**os.environ, "UNSHARD_LOG": "format:info"}
TRIES = 6  # at what must come while a scan goes on: a machine may be quick, and a test late


class TooSoon(Exception):
    """The scan was over before that was done which is to be done during it."""


def in_time(attempt):
    """attempt(part of the usual pauses), which may be too late for its scan now and then, not each time."""
    for i in range(TRIES):
        try:
            return attempt((1, 0.5, 0.25)[i % 3])
        except TooSoon as e:
            print(f"# once more: {e}")
    raise AssertionError("each scan was over too soon to prove anything")


def big_checkpoint(path, seed=0):
    os.makedirs(path)
    tensors = {f"k{seed}.{i:06}": ("U8", (1,), b"x") for i in range(COUNT)}
    write_file(path + "/model.safetensors", safetensors_image(tensors))


def slow_source(t):
    big_checkpoint(t + "/run/big")
    small = make_tensors(1)
    write_checkpoint(t + "/run/small", small)
    return small


def scanned(m):
    """The server says so at the end of a scan, before who asked for it gets an answer."""
    return "scan path=big" in m.messages()


def test_others_are_served_during_a_scan(t):
    small = slow_source(t)
    key = next(iter(small))
    rounds = 0
    for _ in range(TRIES):
        with Mount(t + "/run", t + "/mnt", env=TELLS_SCANS) as m:
            # Known before: two scans share the index, which takes one writer at a time.
            same("the other checkpoint", read_all(m / f"small/raw/{key}"), small[key][2])
            # More readers than the server has threads.
            readers = [subprocess.Popen(["ls", m / "big"], stdout=subprocess.DEVNULL) for _ in range(40)]
            while not scanned(m):
                same("root", sorted(os.listdir(m.path)), ["big", "small"])
                os.statvfs(m.path)
                same("the other checkpoint", read_all(m / f"small/raw/{key}"), small[key][2])
                rounds += not scanned(m)
                time.sleep(0.02)
            for p in readers:
                same("ls", p.wait(), 0)
        print(f"# the others were asked {rounds} times while it was scanned")
        if rounds > 1:
            return
    raise AssertionError("other requests wait for the scan")


def test_listing_the_root_scans_nothing(t):
    slow_source(t)
    for i in range(20):
        os.rename(t + "/run/big", t + f"/run/step{i:02}") if i == 0 else os.mkdir(t + f"/run/step{i:02}")
        if i:
            os.link(t + "/run/step00/model.safetensors", t + f"/run/step{i:02}/model.safetensors")
    with Mount(t + "/run", t + "/mnt") as m:
        subprocess.run(["ls", "-l", m.path], check=True, stdout=subprocess.DEVNULL)
        same("taken up", b'"generations": 0,' in read_all_counters(m), True)


def read_all_counters(m):
    return read_all(m / "small/.unshard/counters.json").replace(b'"generations": 1,', b'"generations": 0,')


def interrupted_ls(path, seconds):
    """How an ls ends that gets a signal after so long."""
    reader = subprocess.Popen(["ls", path], stdout=subprocess.DEVNULL)
    time.sleep(seconds)
    if reader.poll() is not None:
        raise TooSoon("the reader had its answer")
    reader.send_signal(signal.SIGINT)
    return reader.wait(PATIENCE)


def test_a_killed_reader_does_not_wait(t):
    slow_source(t)

    def attempt(part):
        with Mount(t + "/run", t + "/mnt", env=TELLS_SCANS) as m:
            code = interrupted_ls(m / "big", 0.4 * part)
            if scanned(m):
                raise TooSoon("it waited for the scan, or the scan was over")
            same("how it ended", code, -signal.SIGINT)
            os.listdir(m / "small")

    in_time(attempt)


def test_a_killed_reader_does_not_wait_for_another_scan(t):
    """Not even while the watcher scans a checkpoint that has changed."""
    slow_source(t)
    half = {f"k{i:06}": ("U8", (1,), b"x") for i in range(COUNT // 2)}
    os.makedirs(t + "/run/half")
    write_file(t + "/run/half/model.safetensors", safetensors_image(half))

    def attempt(part):
        with Mount(t + "/run", t + "/mnt", env=TELLS_SCANS) as m:
            os.listdir(m / "big")
            before = m.messages().count("scan path=big")
            os.utime(t + "/run/big/model.safetensors")
            time.sleep(0.6 + 0.2 * part)  # the watcher has seen it, and scans
            code = interrupted_ls(m / "half", 0.3 * part)
            if "scan path=half" in m.messages():
                raise TooSoon("it waited for its scan, or that was over")
            same("how it ended", code, -signal.SIGINT)
            if m.messages().count("scan path=big") > before:
                raise TooSoon("the watcher's scan was over")

    in_time(attempt)


def test_signals_do_not_end_a_request(t):
    """A program with a timer gets its answer, not EINTR."""
    slow_source(t)
    with Mount(t + "/run", t + "/mnt") as m:
        child = subprocess.run([sys.executable, "-c", f"""
import os, signal, time
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, True)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
start = time.monotonic()
os.stat({m / 'big/tensors'!r})
print(time.monotonic() - start)
signal.setitimer(signal.ITIMER_REAL, 0)
"""], capture_output=True, text=True, timeout=4 * PATIENCE)
        same("stat: " + child.stderr, child.returncode, 0)
        assert float(child.stdout) > 0.1, "the scan was over too soon to prove anything"


def test_ending_does_not_wait_for_a_scan(t):
    """It is given up, while files are read and while the index is written; the index is what it was, and serves the next mount."""
    small = slow_source(t)
    key = next(iter(small))
    cache = f"cache_dir={t}/cache"
    with Mount(t + "/run", t + "/warm", env=TELLS_SCANS) as m:
        start = time.monotonic()
        os.listdir(m / "big")
        whole = time.monotonic() - start
    with Mount(t + "/run", t + "/mnt", cache) as m:
        same("the other checkpoint", read_all(m / f"small/raw/{key}"), small[key][2])

    def ended(share):
        """Of a mount that is ended when so much of the scan is done: was it done in spite of that?"""
        with Mount(t + "/run", t + "/mnt", cache, env=TELLS_SCANS) as m:
            reader = subprocess.Popen(["ls", m / "big"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(share * whole)
            start = time.monotonic()
            m.process.send_signal(signal.SIGTERM)
            same("status", m.process.wait(4 * PATIENCE), 0)
            print(f"# a scan of {whole:.2f} s, ended after {share * whole:.2f} s: {time.monotonic() - start:.2f} s; whole: {scanned(m)}")
            reader.wait(PATIENCE)
        return scanned(m)

    def attempt(part):
        os.utime(t + "/run/big/model.safetensors")  # what a scan that was done has found is not believed
        if ended(0.1 * part):
            raise TooSoon("the end waited for the scan, or the scan was over")

    in_time(attempt)
    for share in (0.4, 0.6, 0.7, 0.8, 0.9):
        if ended(share):
            break
    with Mount(t + "/run", t + "/mnt", cache, env=TELLS_SCANS) as m:
        same("the other checkpoint", read_all(m / f"small/raw/{key}"), small[key][2])
        same("scans of it", "scan path=small" in m.messages(), False)  # the index has it still
        same("scanned in the end", len(os.listdir(m / "big/raw")), COUNT)


def test_a_scan_that_takes_too_long(t):
    """It is ended and told; the checkpoint beside it is served, and the next mount tries again."""
    tensors = make_tensors(1)
    key = next(iter(tensors))
    for name in ("late", "small"):
        write_checkpoint(f"{t}/src/run/{name}", tensors)
    env = {**TELLS_SCANS, "UNSHARD_SCAN_SECONDS": "10"}  # the other scan's, too: it takes a tenth of a second, mostly
    with Server(t + "/src") as server:
        server.fault("slow", times=-1, match="late/.*safetensors$", seconds=0.002)
        with Mount(server.url + "/run", t + "/mnt", f"cache_dir={t}/cache", env=env) as m:
            for _ in range(3):
                told = read_all(m / "late/.unshard/checkpoint.json")
                assert b"the scan took longer than 10 s" in told and b"UNSHARD_SCAN_SECONDS" in told, told[:1000]
                time.sleep(1.1)
            same("scans of it", m.messages().count("scan path=late"), 1)
            same("nothing is shown of it", os.path.exists(m / "late/raw"), False)
            same("the other checkpoint", read_all(m / f"small/raw/{key}"), tensors[key][2])
        server.clear()
        with Mount(server.url + "/run", t + "/mnt", f"cache_dir={t}/cache") as m:
            same("with more time", read_all(m / f"late/raw/{key}"), tensors[key][2])


def test_soak(t):
    """Many opens, reads, listings and forgets: no descriptors and no memory stay behind."""
    small = make_tensors(2, count=30)
    write_checkpoint(t + "/run/step1", small, shards=4)
    keys = list(small)

    def round_trip(m):
        for key in keys:
            same(key, read_all(m / f"step1/raw/{key}"), small[key][2])
            os.stat(m / f"step1/tensors/{key}.npy")
        os.listdir(m / "step1/tree/model/layers")
        read_all(m / "step1/.unshard/counters.json")
        read_all(m / "step1/config.json")
        read_all(m / "step1/model.safetensors")

    def descriptors(m):
        return len(os.listdir(f"/proc/{m.process.pid}/fd"))

    def drop_caches():
        with open("/proc/sys/vm/drop_caches", "w") as f:
            f.write("2")

    with Mount(t + "/run", t + "/mnt") as m:
        with concurrent.futures.ThreadPoolExecutor(16) as warm:  # every thread of the server has its buffers then
            for done in [warm.submit(round_trip, m) for _ in range(64)]:
                done.result()
        for _ in range(4):  # what stays behind does so each time; what an allocator takes for another thread does not
            fds, rss = descriptors(m), m.rss()
            for i in range(150):
                round_trip(m)
                if i % 50 == 49 and os.geteuid() == 0:
                    drop_caches()  # the kernel forgets, and we with it
            now, grown = descriptors(m), m.rss() - rss
            print(f"# descriptors {fds} then {now}, resident {rss >> 10} and {grown >> 10} more KiB")
            if now <= fds + 4 and (SANITIZED or grown < 8 << 20):
                return
        raise AssertionError(f"descriptors {fds} then {now}, {grown} bytes more")


if __name__ == "__main__":
    main(globals(), seconds=1200)  # a scan of 400,000 tensors takes 16 s on a machine with much else to do
