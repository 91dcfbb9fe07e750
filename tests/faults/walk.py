#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A mount that is read from, with the N-th allocation, read, write, open, mapping, thread, fork or packet failing.

One session: mount, list, attributes, every tensor in each of its views, random reads, the whole model.safetensors, end.
It is run once with nothing failing, to count the calls of a kind, and then once for each N of a sample (FAULT_POINTS=8 of
each kind, by FAULT_SEED) or for all of them (FAULT_POINTS=all), FAULT_JOBS at a time. After each: what was read is right or
failed with an errno of the list; the same session over again, in the same mount, is right in all (what failed was not
remembered); the server has no more files open or mapped, and no more threads, than one that met no fault (nothing leaks);
the mount ends in order; the index passes sqlite's check, and a mount with that index gives the right bytes. `walk.py KIND N`
is one N of one kind, with the mount's messages and the stack of the call that failed.

$UNSHARD is the program, $NTH the library made of nth.c.
"""
import collections
import concurrent.futures
import contextlib
import errno
import json
import mmap
import os
import random
import re
import select
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "mount"), os.path.join(HERE, "..", "remote")]
from fault_server import Server  # noqa: E402
from mountlib import SANITIZED, UNSHARD, fresh_directory, is_mounted, main, make_tensors, read_all, same, unmount_hard, wait_for, write_checkpoint  # noqa: E402

NTH = os.environ["NTH"]
POINTS = os.environ.get("FAULT_POINTS", "8")
SEED = int(os.environ.get("FAULT_SEED", "1"))
JOBS = int(os.environ.get("FAULT_JOBS", "1"))
TENSORS = make_tensors(5, count=4, rows=96, cols=64)
# What a caller may be told. The kernel gives ENOMEM and EMFILE on as they are; the reason stands in the log.
TOLD = {errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC, errno.ESTALE}
QUIET_RUNS = 2  # without a fault, to see what a server holds
# Sessions differ in their number of calls, by who came when: all have been taken when so many in a row met no N-th call.
UNMET = 16
# How many there are is a matter of who came when: files of one connection to the index (the database, its log, the log's
# index).
VARYING = {"open file of the cache": 3}
# What nth.c calls libfuse's threads, and what those of libfuse 3.17 call themselves.
WORKERS = (b"libfuse\n", b"fuse_worker\n")
HANGS_SECONDS = 600  # by then a server that does not answer is killed
AGAIN_SECONDS = 60  # until what failed once is right again: the index looks anew after a second
# `last`: so many of the last calls are in every sample: a mount ends without memory as well.
Kind = collections.namedtuple("Kind", "root passing last form", defaults=("source", True, 0, "hf"))
KINDS = {
    "alloc": Kind(last=10),
    "read": Kind("source"),
    "read-index": Kind("cache"),
    "write": Kind("cache"),
    "open": Kind("source"),
    "open-index": Kind("cache"),
    "map": Kind("source"),
    "bus": Kind("source", passing=False),  # the mapping stays as it is: its tensors give EIO until the file is opened anew
    "thread": Kind(),
    "fork": Kind(),
    "net": Kind(),
    **{f"{name}-{form}": Kind(form=form) for form in ("dcp", "zarr", "pt") for name in ("alloc", "read")},
}


class Wrong(AssertionError):
    pass


class Holds(Wrong):
    """More than a server without a fault was seen to."""


# ---- the mount ----

class Session:
    """A mount whose N-th call fails."""

    def __init__(self, t, kind, n, source):
        self.t, self.kind, self.source = t, KINDS[kind], source
        self.path, self.cache, self.tell, self.log = t + "/mnt", t + "/cache", t + "/tell", t + "/log"
        os.makedirs(self.path, exist_ok=True)
        shutil.rmtree(self.cache, ignore_errors=True)
        os.mkdir(self.cache, 0o700)
        with open(self.tell, "wb") as f:
            f.write(bytes(16))
        self.env = {**os.environ, "LD_PRELOAD": NTH, "UFS_NTH_KIND": kind.split("-")[0], "UFS_NTH_AT": str(n),
                    "UFS_NTH_TELL": self.tell, "UNSHARD_HTTP_TRIES": "2", "UNSHARD_ALLOW_HTTP": "1",
                    "UFS_NTH_ROOT": self.cache if self.kind.root == "cache" else t + "/src"}
        self.background = kind == "fork"
        self.process, self.is_late = None, False

    def begin(self):
        """True: it is there. Else it said why not, and ended in order."""
        command = [UNSHARD, "mount", self.source, self.path, "-o", f"cache_dir={self.cache},jobs=2"]
        with open(self.log, "w") as log:
            if self.background:
                code = subprocess.run(command, env=self.env, stdout=log, stderr=log, timeout=600).returncode
                self.process = None
                return self.judge(code) if code else True
            self.process = subprocess.Popen([*command, "-f"], env=self.env, stdout=log, stderr=log)
        wait_for("the mount", 120, lambda: is_mounted(self.path) or self.process.poll() is not None, step=0.003)
        try:
            os.stat(self.path)  # answered once all of its threads are there
            there = is_mounted(self.path)  # or it was the directory below that answered
        except OSError:
            there = False
        if not there and self.process.poll() is None and not ends(self.process.pid, 120):
            raise Wrong("it neither answers nor ends")
        code = self.process.poll()
        return True if code is None else self.judge(code)

    def judge(self, code):
        words = self.messages()
        if code < 0 or code not in (1, 3, 5) or "unshard: " not in words:
            raise Wrong(f"mount ended with {code}: {words!r}")
        return False

    def messages(self):
        with open(self.log) as f:
            return f.read()

    def told(self):
        with open(self.tell, "rb") as f:
            return struct.unpack("<QQ", f.read(16))

    def held(self):
        """What the server has by now: open files by what they are, mapped files of ours, threads."""
        if self.process is None:
            return collections.Counter()
        of = f"/proc/{self.process.pid}"
        has = collections.Counter()
        for thread in os.listdir(of + "/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended since
                has["thread of ours"] += read_all(f"{of}/task/{thread}/comm") not in WORKERS
        for fd in os.listdir(of + "/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed since
                has["open " + self.kind_of(os.readlink(f"{of}/fd/{fd}"))] += 1
        with open(of + "/maps") as f:
            for path in {line.split(maxsplit=5)[-1].strip() for line in f if self.t in line}:
                has["mapped " + self.kind_of(path)] += 1
        return has

    def kind_of(self, path):
        if path.startswith(self.cache):
            return "file of the cache" + (", unnamed" if path.endswith("(deleted)") else "")
        return re.sub(r":?\[?\d+\]?", "", path.replace(self.t, ""))

    def end(self):
        """In order, and within a time."""
        if self.process is None:
            subprocess.run([UNSHARD, "umount", self.path], timeout=600, check=True)
            return
        if self.process.poll() is not None:
            raise Wrong(f"the mount died with {self.process.returncode}: {self.messages()}")
        self.process.terminate()
        if not ends(self.process.pid, 120):
            raise Wrong("the mount does not end")
        same("exit", self.process.wait(), 0)
        same("unmounted", is_mounted(self.path), False)

    def late(self):
        """Who waits for an answer gets an error then."""
        self.is_late = True
        if self.process:
            self.process.kill()

    def kill(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        unmount_hard(self.path)


def ends(pid, seconds):
    """Does it, within that time? A child of ours: nobody else has its number. (wait(2) has no time.)"""
    fd = os.pidfd_open(pid)
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


# ---- what is read of it ----

def steps(path):
    """(name, what is to come out, how to get it): as programs read."""
    keys = list(TENSORS)
    yield "list", sorted(keys), lambda: sorted(os.listdir(path + "/raw"))
    yield "root", True, lambda: {"model.safetensors", "config.json", "tensors"} <= names_in(path)
    yield "side file", b'{"model_type": "llama"}\n', lambda: whole(path + "/config.json")
    for key in keys:
        dtype, shape, data = TENSORS[key]
        yield f"size of {key}", len(data), lambda k=key: size_of(f"{path}/raw/{k}")
        yield f"dtype of {key}", dtype, lambda k=key: dtype_of(f"{path}/raw/{k}")
        yield key, data, lambda k=key: whole(f"{path}/raw/{k}")
    chance = random.Random(7)
    for key in keys[:2]:
        data = TENSORS[key][2]
        at = chance.randrange(len(data) - 5000)
        yield f"{key} at {at}", data[at:at + 4999], lambda k=key, a=at: part(f"{path}/raw/{k}", a, 4999)
    data = TENSORS[keys[3]][2]
    yield "mapped", data[-100:], lambda: mapped(f"{path}/raw/{keys[3]}")
    yield "model.safetensors", IMAGE, lambda: tensors_of(whole(path + "/model.safetensors"))


def names_in(path):
    """Of a checkpoint that could not be read there is the reason alone."""
    names = set(os.listdir(path))
    why = "tensors" in names or json.loads(whole(path + "/.unshard/checkpoint.json"))["error"]
    if why is not True:
        raise OSError(errno.EIO, why)
    return names


def size_of(path):
    """A tensor whose shard could not be read is listed, without bytes; to open it is an error."""
    size = os.stat(path).st_size
    if size == 0:
        whole(path)
        size = os.stat(path).st_size  # it has come back meanwhile
    return size


def dtype_of(path):
    size_of(path)
    return os.getxattr(path, "user.unshard.dtype").decode()


def whole(path):
    with open(path, "rb", buffering=0) as f:
        return b"".join(iter(lambda: f.read(1 << 17), b""))


def part(path, at, n):
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, n, at)
    finally:
        os.close(fd)


def mapped(path):
    """By a process of its own: a page that cannot be had is a signal."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            with open(path, "rb", buffering=0) as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as data:
                tail = data[:][-100:]  # every page of it
            os.write(into, tail)
        except OSError as e:
            code = e.errno
        finally:
            os._exit(code)
    os.close(into)
    with open(out, "rb") as f:
        data = f.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == -signal.SIGBUS:
        raise OSError(errno.EIO, "SIGBUS")
    if code:
        raise OSError(code if code > 0 else errno.EINVAL, f"a program that maps it: {code}")
    return data


def tensors_of(image):
    """{key: bytes}; a file that is cut or is none is wrong bytes, not an error."""
    size = struct.unpack("<Q", image[:8])[0]
    return {k: image[8 + size + v["data_offsets"][0]:8 + size + v["data_offsets"][1]]
            for k, v in json.loads(image[8:8 + size]).items() if k != "__metadata__"}


IMAGE = {k: v[2] for k, v in TENSORS.items()}


def run_steps(path, faults):
    """The errnos that came. One that is none of `faults`, or wrong bytes, is Wrong."""
    failed = set()
    for name, want, get in steps(path):
        try:
            got = get()
        except OSError as e:
            if not faults or e.errno not in TOLD:
                raise Wrong(f"{name}: {errno.errorcode.get(e.errno, e.errno)}: {e.strerror}") from e
            failed.add(errno.errorcode[e.errno])
            continue
        if got != want:
            raise Wrong(f"{name}: other bytes than stand there")
    return failed


def until_right(path):
    start = time.monotonic()
    while True:
        try:
            return run_steps(path, faults=False)
        except Wrong as e:
            if "other bytes" in str(e) or time.monotonic() - start > AGAIN_SECONDS:
                raise Wrong(f"after the fault: {e}") from e
        time.sleep(0.1)


# ---- one N ----

def check_index(s):
    for root, _, files in os.walk(s.cache):
        for name in files:
            if not name.endswith(".sqlite"):
                continue
            db = sqlite3.connect(os.path.join(root, name))
            same(f"check of {name}", db.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
            db.close()


def mount_again(s):
    s.env = {k: v for k, v in s.env.items() if k != "LD_PRELOAD"}
    s.background = False
    if not s.begin():
        raise Wrong("the next mount: " + s.messages())
    run_steps(s.path, faults=False)
    s.end()


def check_held(s, usual):
    """What it shows no more it may keep for a moment."""
    start = time.monotonic()
    while True:
        more = {k: n for k, n in s.held().items() if n > usual[k] + VARYING.get(k, 0)}
        if not more:
            return
        if time.monotonic() - start > AGAIN_SECONDS:
            raise Holds(f"the server holds {more}, one without a fault {dict(usual)}")
        time.sleep(0.1)


def one(t, kind, n, source, usual=None):
    """
    (outcome, calls, what the server held): `unmet` where there is no N-th call any more. `usual` is what a server without
    faults holds.
    """
    s = Session(t, kind, n, source)
    held = collections.Counter()
    late = threading.Timer(HANGS_SECONDS, s.late)
    late.start()
    try:
        if not s.begin():
            outcome = "not mounted"
            same("mounted", is_mounted(s.path), False)
        else:
            failed = run_steps(s.path, faults=True)
            if s.kind.passing:
                until_right(s.path)
                held = s.held()
                if usual:
                    check_held(s, usual)
            s.end()
            outcome = "+".join(sorted(failed)) or "no error"
        calls, met = s.told()
        check_index(s)
        if met:
            mount_again(s)
        return (outcome if met or n == 0 else "unmet"), calls, held
    except Exception as e:
        what = "the server hung" if s.is_late else e
        raise (Holds if isinstance(e, Holds) else Wrong)(f"{kind} {n}: {what}\n--- messages\n{s.messages()}") from e
    finally:
        late.cancel()
        s.kill()


def chosen(kind, calls):
    """Numbers of calls: a sample; or all, until there are no more. send() it what came of those before."""
    if POINTS != "all":
        numbers = random.Random(SEED).sample(range(1, calls + 1), min(int(POINTS), calls))
        yield sorted({*numbers, *range(max(1, calls - KINDS[kind].last + 1), calls + 1)})
        return
    met = yield random.Random(SEED).sample(range(1, calls + 1), calls)  # what is wrong shows early
    while met:
        met = yield range(calls + 1, calls + UNMET + 1)
        calls += UNMET


@contextlib.contextmanager
def source_of(t, kind):
    write_checkpoint(t + ("/src" if KINDS[kind].form == "hf" else "/hf"), TENSORS)
    if not os.path.exists(t + "/src"):
        subprocess.run([UNSHARD, "convert", t + "/hf", t + "/src", "--to", KINDS[kind].form], check=True, timeout=600)
    if kind != "net":
        yield t + "/src"
        return
    with Server(t + "/src") as server:
        yield server.url


def unless_usual(t, kind, n, source, usual):
    """one(); of what it holds more than was usual so far, servers without a fault may hold as much on a machine with much else to do."""
    for _ in range(QUIET_RUNS):
        try:
            return one(t, kind, n, source, usual)
        except Holds:
            for _ in range(QUIET_RUNS):
                usual |= one(t, kind, 0, source)[2]
    return one(t, kind, n, source, usual)


def tries(t, kind, numbers, usual):
    """[(outcome, or None and what is wrong)] of each."""
    outcomes = []
    with source_of(t, kind) as source:
        for n in numbers:
            try:
                outcomes.append((unless_usual(t, kind, n, source, usual)[0], ""))
            except Wrong as e:
                outcomes.append((None, str(e)))
                print(f"# {e}", flush=True)
            if len(outcomes) % 250 == 0:
                counts = collections.Counter(outcome or "wrong" for outcome, _ in outcomes)
                print(f"# {kind}: {len(outcomes)} of {len(numbers)}: {dict(counts)}", flush=True)
    return outcomes


def side_by_side(t, kind, numbers, usual):
    """The same, JOBS at a time, each in a directory of its own."""
    if JOBS == 1:
        return tries(t, kind, numbers, usual)
    with concurrent.futures.ProcessPoolExecutor(JOBS) as pool:
        parts = [pool.submit(tries, os.path.join(t, str(i)), kind, numbers[i::JOBS], usual) for i in range(JOBS)]
        return [outcome for part in parts for outcome in part.result()]


def walk(t, kind):
    usual = collections.Counter()
    with source_of(t, kind) as source:
        for _ in range(QUIET_RUNS):
            outcome, calls, held = one(t, kind, 0, source)
            same("without a fault", outcome, "no error")
            usual |= held
    assert calls > 0, f"{kind}: nothing is counted"
    seen, wrong, more = collections.Counter(), [], chosen(kind, calls)
    numbers = next(more)
    while numbers:
        outcomes = side_by_side(t, kind, numbers, usual)
        wrong += [words for outcome, words in outcomes if outcome is None]
        counts = collections.Counter(outcome for outcome, _ in outcomes if outcome)
        seen += counts
        try:
            numbers = more.send(sum(counts.values()) > counts["unmet"])
        except StopIteration:
            break
    unmet = seen.pop("unmet", 0)
    print(f"# {kind}: {calls} calls, {sum(seen.values()) + len(wrong)} failed one at a time ({unmet} were not met): {dict(seen)}",
          flush=True)
    assert not wrong, f"{kind}: {len(wrong)} wrong, the first: {wrong[0]}"
    assert seen, f"{kind}: no fault was met"


def only(kind, n):
    os.environ["UFS_NTH_WHERE"] = "1"
    with fresh_directory() as t, source_of(t, kind) as source:
        print(kind, n, *one(t, kind, n, source))


if __name__ == "__main__":
    if SANITIZED:
        print("1..0 # SKIP a sanitizer stands where calls are to fail")
        sys.exit(77)
    if len(sys.argv) == 3 and sys.argv[1] in KINDS:
        only(sys.argv[1], int(sys.argv[2]))
    else:
        main({f"test_{k}": lambda t, k=k: walk(t, k) for k in KINDS}, seconds=86400 if POINTS == "all" else 3600)
