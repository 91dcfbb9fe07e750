# SPDX-License-Identifier: MIT
"""The server is killed or ended while programs write storage names: what they wrote is on the disk, and the next mount goes on."""
import contextlib
import errno
import os
import random
import signal
import subprocess
import time

from storage_writers import WRITERS, older_model
from storagelib import COUNT, Batch, Case, Writer, differences, fixtures, lay, put_tree, sample, short, snapshot
from mountlib import PATIENCE, SANITIZED, UNSHARD, Mount, main, same, unmount_hard


class Stop(Exception):
    """The writer ends here, as one that is killed."""


class EndsAt:
    """At one of its steps the server ends; then the writer stops, or goes on in another mount."""

    def __init__(self, step, end=None):
        self.step, self.end = step, end

    def wait(self, step, _):
        if step == self.step:
            if not self.end:
                raise Stop
            self.end()

    @staticmethod
    def environment():
        return {}


def run_until(write, path, pace, source=None):
    w = Writer(path, pace, source)
    with contextlib.suppress(Stop):
        write(w)
    return w


def end_server(m, how):
    """SIGTERM detaches and ends with 0; SIGKILL leaves a dead mount, which is taken away."""
    m.process.send_signal(how)
    status = m.process.wait(PATIENCE)
    m.log.close()
    unmount_hard(m.path)
    if how == signal.SIGTERM:
        same("status of a server that was asked to end", status, 0)


def case_trees(t, case):
    base = t + "/base/run"
    os.makedirs(base)
    if case.older:
        case.older(base)
    for what in "plain", "src":
        os.makedirs(f"{t}/{what}")
        subprocess.run(["cp", "-a", base, f"{t}/{what}"], check=True)
    time.sleep(0.1)


def no_times(tree):
    """A program that is stopped between two changes leaves times that say nothing."""
    return {n: e._replace(times=0) for n, e in tree.items()}


def killed_and_stopped(t, case, how):
    """The server and the writer end at one of its steps: what it did until then is there, and nothing else."""
    case_trees(t, case)
    steps = run_until(case.write, t + "/base/run", None).steps
    at = case.rnd.randint(1, steps)
    run_until(case.write, t + "/plain/run", EndsAt(at))
    with Mount(t + "/src", t + "/mnt", "rw") as m:
        run_until(case.write, m.path + "/run", EndsAt(at), t + "/src/run")
        end_server(m, how)
        m.process.returncode = 0
    found = differences(no_times(snapshot(t + "/src")), no_times(snapshot(t + "/plain")))
    assert not found, f"{case.name}, {how.name} at step {at} of {steps}: {found[:6]}"


def killed_and_gone_on(t, case, how):
    """The writer goes on in the next mount, which finds nothing to repair."""
    case_trees(t, case)
    steps = run_until(case.write, t + "/base/run", None).steps
    run_until(case.write, t + "/plain/run", None)
    ends = sorted(case.rnd.sample(range(1, steps + 1), min(3, steps)))
    mounts = [Mount(t + "/src", t + "/mnt", "rw").__enter__()]

    class Again(EndsAt):
        def wait(self, step, w):
            if step in ends:
                end_server(mounts[-1], how)
                mounts.append(Mount(t + "/src", t + "/mnt", "rw").__enter__())

    try:
        run_until(case.write, t + "/mnt/run", Again(0), t + "/src/run")
        done = subprocess.run([UNSHARD, "umount", t + "/mnt"], capture_output=True, text=True, timeout=600, check=False)
        same(f"{case.name}: unshard umount", (done.returncode, done.stderr), (0, ""))
    finally:
        mounts[-1].__exit__(None, None, None)
    found = differences(no_times(snapshot(t + "/src")), no_times(snapshot(t + "/plain")))
    assert not found, f"{case.name}, {how.name} at steps {ends} of {steps}: {found[:6]}"


def hand_copies(how):
    for path in fixtures():
        for order in ("random", "framework"):
            for older in (None, lambda run, p=path: lay(p, run + "/step")):
                def write(w, path=path, order=order):
                    put_tree(w, path, "step", order, how, random.Random(path))
                yield Case(f"{short(path)} {order} {how}{' over' if older else ''}", write, older)


CLOSED = ["fewer_shards", "late_index", "accelerate", "lightning copy", "lightning link", "verl", "olmo", "nemo", "trainer_rotation"]


def each_end(t, cases, run):
    tried = 0
    for case in cases:
        for how in (signal.SIGKILL, signal.SIGTERM):
            place = f"{t}/{tried}"
            os.mkdir(place)
            run(place, case, how)
            tried += 1
    print(f"# {tried} ends of servers, all as on a plain disk", flush=True)


def test_killed_in_the_middle_of_a_file(t):
    """A file is open, half of it was written with write(2): that half is there."""
    each_end(t, sample(hand_copies("halves"), 4 if SANITIZED else 8), killed_and_stopped)


def test_killed_between_files(t):
    each_end(t, sample(hand_copies("rename"), 4 if SANITIZED else 8), killed_and_stopped)


def test_writers_go_on_in_the_next_mount(t):
    cases = [Case(n, WRITERS[n], older_model if n == "late_index" else None) for n in CLOSED]
    each_end(t, cases[:3] if SANITIZED else cases, killed_and_gone_on)


def test_open_handles_when_the_server_ends(t):
    """They fail, or the kernel goes on by itself: what was told to be written is there."""
    os.makedirs(t + "/src/step")
    for how in (signal.SIGTERM, signal.SIGKILL):
        with Mount(t + "/src", t + "/mnt", "rw") as m:
            fd, want = os.open(m / f"step/{how.name}.pt", os.O_RDWR | os.O_CREAT), b"before"
            os.write(fd, want)
            m.process.send_signal(how)
            m.process.wait(PATIENCE)
            m.process.returncode = 0
            try:
                os.write(fd, b"after")
                want += b"after"
            except OSError as e:
                same("errno", errno.errorcode[e.errno], "ENOTCONN")
            with contextlib.suppress(OSError):
                os.close(fd)
        with open(f"{t}/src/step/{how.name}.pt", "rb") as f:
            same("bytes", f.read(), want)


def test_the_check_itself(t):
    """Two plain directories, of which one writer stops earlier: that is found."""
    case = Case("fewer_shards", WRITERS["fewer_shards"])
    case_trees(t, case)
    run_until(case.write, t + "/plain/run", EndsAt(5))
    run_until(case.write, t + "/src/run", EndsAt(4))
    assert differences(snapshot(t + "/src"), snapshot(t + "/plain")), "no difference was found"
    os.mkdir(t + "/batch")
    same("and none where there is none", Batch(t + "/batch", [case], 0, mount=False).run().failures, [])


if __name__ == "__main__":
    main(globals(), 100000 if COUNT else 600)
