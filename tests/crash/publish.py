#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Steps of publication, without a mount: killed at any operation, cut from power, denied room and disks.

The target has the old or the new files afterwards, never a mix; what was reported as synced is staged or published. Not
even before anybody goes on with the step does a reader of the plain disk find old and new files as one whole checkpoint.
"""
import json
import os
import random
import select
import shutil
import signal
import subprocess

from crashlib import EIO, ENOSPC, POINTS, SEED, STATES, faulty, run, same_tree
from disk import Recording, change_data, change_names, data_kept, names_kept, tree
from mountlib import UNSHARD, same

PROGRAM = os.environ["PUBLISH_RUN"]
EINVAL = 22
BOOTS = "boot-before", "boot-after"


def text(version, name):
    return f"{version} {name} ".encode() * 40


def index(version, names):
    return json.dumps({"version": version, "files": names}).encode().replace(b"=", b"")


def versions(t, names):
    """Versions of these files, or None where one is missing."""
    return [t[n].split()[0].decode() for n in names] if all(n in t for n in names) else None


def by_index(t, name):
    """What a loader that believes an index reads."""
    if name not in t:
        return None
    found = json.loads(t[name])
    got = versions(t, found["files"])
    return got and [*got, found["version"]]


def by_numbers(t):
    """What a loader without an index reads: the numbered files, if all are there."""
    for count in 2, 3:
        got = versions(t, [f"model-{i}-of-{count}" for i in range(1, count + 1)])
        if got:
            return got
    return None


class Scenario:
    """What is there, what the step does, and what a reader finds."""

    def __init__(self, old, step, read, always=False):
        self.old = {"notes.txt": b"notes", **old}
        self.step, self.read, self.always = step, read, always
        self.new = dict(self.old)
        for kind, _, path, data in step:
            if kind == "PUT":
                self.new[path] = data
            elif kind == "REMOVE":
                del self.new[path]

    def args(self):
        return ["=".join((kind, str(stage), path, data.decode())) for kind, stage, path, data in self.step]


def put(stage, path, data):
    return "PUT", stage, path, data


def gone(stage, path):
    return "REMOVE", stage, path, b""


def hold(stage, path):
    return "HOLD", stage, path, b""


OLD3, NEW2 = [f"model-{i}-of-3" for i in (1, 2, 3)], [f"model-{i}-of-2" for i in (1, 2)]
SCENARIOS = {
    # One file: one rename, so that it is always there.
    "single": Scenario({"model": text("old", "model")}, [put(0, "model", text("new", "model"))],
                       lambda t: versions(t, ["model"]), True),
    # Shards, and metadata that names them.
    "dcp": Scenario({"s0": text("old", "s0"), "s1": text("old", "s1"), ".metadata": index("old", ["s0", "s1"])},
                    [put(0, "s0", text("new", "s0")), put(0, "s1", text("new", "s1")),
                     put(1, ".metadata", index("new", ["s0", "s1"]))],
                    lambda t: by_index(t, ".metadata")),
    # The metadata stays as it is: it says nothing of bytes.
    "held": Scenario({"s0": text("old", "s0"), "s1": text("old", "s1"), ".metadata": text("any", "m")},
                     [put(0, "s0", text("new", "s0")), put(0, "s1", text("new", "s1")), hold(1, ".metadata")],
                     lambda t: versions(t, ["s0", "s1"]) if ".metadata" in t else None),
    # A new shard, and metadata that names it: every moment shows the one or the other.
    "added": Scenario({"s0": text("old", "s0"), ".metadata": index("old", ["s0"])},
                      [put(0, "s1", text("new", "s1")), put(1, ".metadata", index("new", ["s1"]))],
                      lambda t: by_index(t, ".metadata"), True),
    # A set takes the place of one with more files.
    "fewer": Scenario({**{n: text("old", n) for n in OLD3}, "index": index("old", OLD3)},
                      [*(gone(0, n) for n in OLD3), *(put(0, n, text("new", n)) for n in NEW2),
                       put(1, "index", index("new", NEW2))],
                      lambda t: by_index(t, "index") or (None if "index" in t else by_numbers(t))),
    # A set of the same names, without an index.
    "numbered": Scenario({n: text("old", n) for n in NEW2}, [put(0, n, text("new", n)) for n in NEW2], by_numbers),
    # Directories come and go.
    "parts": Scenario({"model/a/b": text("old", "b"), "model/c": text("old", "c"), "mark": index("old", ["model/a/b"])},
                      [gone(0, "model/a/b"), gone(0, "model/c"), put(0, "optim/x/y", text("new", "y")),
                       put(0, "optim/z", text("new", "z")), put(2, "mark", index("new", ["optim/x/y", "optim/z"]))],
                      lambda t: by_index(t, "mark")),
    # Each in a directory of its own, which the disk may keep or lose by itself.
    "apart": Scenario({"p/s0": text("old", "s0"), "q/s1": text("old", "s1"), "mark": index("old", ["p/s0", "q/s1"])},
                      [put(0, "p/s0", text("new", "s0")), put(0, "q/s1", text("new", "s1")),
                       put(1, "mark", index("new", ["p/s0", "q/s1"]))],
                      lambda t: by_index(t, "mark")),
    # Into a directory without a checkpoint.
    "first": Scenario({}, [put(0, "s0", text("new", "s0")), put(1, ".metadata", index("new", ["s0"]))],
                      lambda t: by_index(t, ".metadata")),
    # Keys are removed.
    "removed": Scenario({"s0": text("old", "s0"), "s1": text("old", "s1"), ".metadata": index("old", ["s0", "s1"])},
                        [gone(0, "s1"), gone(1, ".metadata"), gone(0, "s0")], lambda t: by_index(t, ".metadata")),
}


class Disk(Recording):
    """States of the disk in which files and the target that were there before are the same inodes."""

    def __init__(self, root, keep):
        super().__init__(root)
        self.kept = {}
        shutil.rmtree(keep, ignore_errors=True)
        os.mkdir(keep)
        for path, _, files in os.walk(root):
            for name in files:
                node = self.first[os.lstat(os.path.join(path, name)).st_ino]
                self.kept[id(node)] = os.path.join(keep, str(len(self.kept)))
                os.link(os.path.join(path, name), self.kept[id(node)])

    def crash(self, count, rnd, path):
        self._reset()
        ops = self.ops[:count]
        for op in names_kept(ops, rnd):
            change_names(op)
        for op in data_kept(ops, rnd):
            change_data(op)
        self._write(self.top, path, {})

    def _write(self, node, path, made):
        for name in os.listdir(path):
            at = os.path.join(path, name)
            if not os.path.isdir(at):
                os.unlink(at)
            elif name not in node.entries or node.entries[name].entries is None:
                shutil.rmtree(at)
        for name, child in node.entries.items():
            at = os.path.join(path, name)
            if child.entries is not None:
                os.makedirs(at, exist_ok=True)
                os.chmod(at, 0o755)  # as a staging directory must be
                self._write(child, at, made)
            elif id(child) in self.kept or id(child) in made:
                os.link(self.kept.get(id(child)) or made[id(child)], at)
            else:
                made[id(child)] = at
                with open(at, "wb") as f:
                    f.write(child.data)


class Walk:
    """One scenario, run again and again in the same directory."""

    def __init__(self, t, name):
        self.name, self.s = name, SCENARIOS[name]
        self.place, self.cache, self.log = f"{t}/{name}", t + "/cache", f"{t}/{name}.log"
        self.keep = f"{t}/{name}.keep"
        self.rnd = random.Random(f"{SEED} {name}")
        self.outcomes = {"old": 0, "new": 0}
        self.spoilt = False

    def clear(self):
        shutil.rmtree(self.place, ignore_errors=True)
        os.makedirs(self.place + "/run")
        for path, data in self.s.old.items():
            at = f"{self.place}/run/{path}"
            os.makedirs(os.path.dirname(at), exist_ok=True)
            with open(at, "wb") as f:
                f.write(data)
        self.notes = os.lstat(self.place + "/run/notes.txt").st_ino

    def call(self, what, boot=0, **faults):
        env = faulty(self.place, self.cache, boot=BOOTS[boot], **faults)
        args = self.s.args() if what == "step" else []
        return subprocess.run([PROGRAM, self.place, what, *args], capture_output=True, text=True, timeout=60, env=env)

    def record(self):
        self.clear()
        for end in "", ".data":
            if os.path.exists(self.log + end):
                os.unlink(self.log + end)
        disk = Disk(self.place, self.keep)
        done = self.call("step", log=self.log)
        same(f"{self.name}: status", (done.returncode, done.stderr), (0, ""))
        disk.load(self.log)
        self.target(f"{self.name}: recorded", "new")
        self.count = len(disk.ops)
        return disk

    def files(self):
        """The files of the target."""
        return {n: d for n, d in tree(self.place + "/run").items() if d is not None}

    def target(self, what, *allowed):
        """The target is what it may be; which one that is."""
        got = self.files()
        for name in allowed:
            if got == (self.s.old if name == "old" else self.s.new):
                break
        else:
            same_tree(what, got, self.s.new if "new" in allowed else self.s.old)
        same(what + ": another file", os.lstat(self.place + "/run/notes.txt").st_ino, self.notes)
        if self.spoilt:  # a directory that could not be removed is no harm
            return name
        empty = [d for d, below, files in os.walk(self.place + "/run") if not below and not files]
        same(what + ": empty directories", empty, [])
        return name

    def not_mixed(self, what, power=False):
        """As a reader of the plain disk sees it, which knows nothing of a step that has begun."""
        files = self.files()
        got = self.s.read(files)
        marks = {".metadata", "index", "mark"} & set(files)
        assert got or power or not marks, f"{what}: {marks} without what it completes"
        assert got is None or len(set(got)) == 1, f"{what}: {got} are one whole checkpoint"
        assert got or not self.s.always, f"{what}: no checkpoint is there"

    def staged(self, what, boot, synced):
        """What is staged after recovery: {name: missing ranges}."""
        done = self.call("look", boot)
        assert done.returncode in (0, 6), f"{what}: look: {done.returncode} {done.stderr}"
        assert "WRONG" not in done.stdout, f"{what}: wrong bytes: {done.stdout}"
        found = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
        state = self.target(f"{what}, recovered", "old", "new")
        if state == "old" and synced:
            same(f"{what}: staged", found, {"tensors/done.npy": [], "tensors/rest.npy": ["4000-9000"], "raw/gone": []})
        if state == "new" and self.s.old != self.s.new:
            same(f"{what}: still staged", found, {"tensors/rest.npy": ["4000-9000"]})
        return state

    def recovers(self, what, boot, synced, published):
        self.not_mixed(what, boot == 1)
        state = self.staged(what, boot, synced)
        self.outcomes[state] += 1
        assert state == "new" or not published, f"{what}: it was reported as published"
        done = self.call("step", boot)
        same(f"{what}: again", (done.returncode, done.stderr), (0, ""))
        self.target(f"{what}, again", "new")
        done = self.call("finish", boot)
        same(f"{what}: finish", (done.returncode, done.stderr), (0, ""))
        same_tree(f"{what}: at the end", self.files(), {**self.s.new, "rest": b"rest"})
        same(f"{what}: leftovers", os.listdir(self.place), ["run"])


def sample(walk, share=1):
    numbers = range(1, walk.count + 1)
    return numbers if POINTS == "all" else sorted(walk.rnd.sample(numbers, min(walk.count, 2 * int(POINTS) // share)))


def test_publish_killed(t):
    for name in SCENARIOS:
        walk = Walk(t, name)
        walk.record()
        tried = 0
        for at in sample(walk):
            for do in ("kill", "torn"):
                walk.clear()
                done = walk.call("step", at=at, do=do)
                what = f"{name}: {do} at operation {at} of {walk.count}"
                if do == "kill":
                    same(what, done.returncode, -signal.SIGKILL)
                walk.recovers(what, 0, "synced" in done.stdout, "published" in done.stdout)
                tried += 1
        print(f"# {name}: {walk.count} operations, {tried} kills: {walk.outcomes}", flush=True)


def test_recovery_killed(t):
    """What goes on after a kill is killed itself."""
    for name in SCENARIOS:
        walk = Walk(t, name)
        walk.record()
        tried = 0
        for at in sample(walk, 2):
            for again in ([1, 2, 3, 5, 8, 13, 21] if POINTS == "all" else [walk.rnd.randint(1, 20)]):
                walk.clear()
                done = walk.call("step", at=at, do="kill")
                walk.not_mixed(f"{name}: killed at {at}")
                walk.call("look", at=again, do="kill")
                what = f"{name}: killed at operation {at} of {walk.count}, recovery at {again}"
                walk.recovers(what, 0, "synced" in done.stdout, "published" in done.stdout)
                tried += 1
        print(f"# {name}: {tried} pairs of kills: {walk.outcomes}", flush=True)


def test_publish_without_power(t):
    for name in SCENARIOS:
        walk = Walk(t, name)
        walk.record()
        said = reported(walk)
        disk = walk.record()  # of the directory in which the states are made
        for i in range(STATES):
            after = walk.count if i == 0 else walk.rnd.randint(1, walk.count)
            disk.crash(after, walk.rnd, walk.place)
            what = f"{name}: power lost after operation {after} of {walk.count} (state {i})"
            walk.recovers(what, 1, after >= said["synced"], after >= said["published"])
        print(f"# {name}: {walk.count} operations, {STATES} states: {walk.outcomes}", flush=True)


def reported(walk):
    """After how many operations each line is printed."""
    said = {}
    low = 1
    for word in "synced", "published":
        high = walk.count + 1
        while low < high:
            middle = (low + high) // 2
            walk.clear()
            if word in walk.call("step", at=middle, do="kill").stdout:
                high = middle
            else:
                low = middle + 1
        said[word] = low - 1
    return said


def test_publish_faults(t):
    """No room, or a disk that fails once or for good: words, and the old or the new files, now or with the next step."""
    for name in SCENARIOS:
        walk = Walk(t, name)
        walk.record()
        walk.spoilt = True
        tried, in_progress = 0, 0
        for code in ENOSPC, EIO, EINVAL:  # EINVAL: as of a disk that cannot exchange files, or refuse to replace them
            for once in (True,) if code == EINVAL else (False, True):
                for at in sample(walk, 2):
                    walk.clear()
                    done = walk.call("step", at=at, do=code, **({} if once else {"all": 1}))
                    what = f"{name}: fault {code} {'at' if once else 'from'} operation {at} of {walk.count}"
                    fault_is_told(walk, what, done)
                    in_progress += done.returncode == 4
                    walk.recovers(what, 0, False, "published" in done.stdout)
                    tried += 1
        print(f"# {name}: {tried} faults, {in_progress} steps were in progress: {walk.outcomes}", flush=True)


def fault_is_told(walk, what, done):
    if done.returncode == 0:  # what failed was to clean up, or is made up for
        walk.target(what, "new")
        return
    assert done.returncode in (3, 4, 6) and done.stderr.count("\n") == 1, f"{what}: {done.returncode} {done.stderr}"
    assert done.returncode != 5, f"{what}: {done.stderr}"
    walk.not_mixed(what)
    if done.returncode != 4 and "published" not in done.stdout:
        walk.target(what + ": it has failed", "old")


def replace_it(walk, name):
    """As another program does it: a new file takes the name."""
    path = f"{walk.place}/run/{name}"
    with open(path + ".theirs", "wb") as f:
        f.write(b"theirs")
    os.rename(path + ".theirs", path)


def write_in_place(walk, name):
    with open(f"{walk.place}/run/{name}", "wb") as f:
        f.write(b"theirs")


def remove_it(walk, name):
    os.unlink(f"{walk.place}/run/{name}")


def test_changed_meanwhile(t):
    """Between any two operations another program changes a file: it has it afterwards, and all others are old, or all new."""
    for name, path in ("single", "model"), ("dcp", "s0"), ("held", "s1"), ("fewer", "model-1-of-2"), ("added", ".metadata"):
        walk = Walk(t, name)
        walk.record()
        tried = {0: 0, 5: 0}
        for change in replace_it, write_in_place, remove_it:
            for at in sample(walk):
                walk.clear()
                env = faulty(walk.place, walk.cache, at=at, do="stop")
                with subprocess.Popen([PROGRAM, walk.place, "step", *walk.s.args()], env=env, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE) as live:
                    os.waitpid(live.pid, os.WUNTRACED)
                    begun = select.select([live.stdout], [], [], 0)[0]
                    begun = begun and (change is not remove_it or os.path.exists(f"{walk.place}/run/{path}"))
                    if begun:
                        change(walk, path)
                    live.send_signal(signal.SIGCONT)
                    _, err = live.communicate(timeout=60)
                what = f"{name}: {change.__name__} before operation {at} of {walk.count}"
                assert live.returncode in tried, f"{what}: {live.returncode} {err}"
                if not begun:  # what is there at the beginning is what it replaces
                    continue
                tried[live.returncode] += 1
                got = walk.files()
                same(f"{what}: theirs", got.pop(path, None), None if change is remove_it else b"theirs")
                want = dict(walk.s.old if live.returncode else walk.s.new)
                want.pop(path, None)
                same_tree(f"{what}, {live.returncode}", got, want)
                if live.returncode:
                    assert "was changed by another writer" in err, err
                    assert "tensors/done.npy" in walk.call("look").stdout, f"{what}: it is not kept"
        print(f"# {name}: {walk.count} operations, {tried[5]} steps refused or undone, {tried[0]} done before", flush=True)


def doctor(path, *args):
    """[(state, what, text)] of what `unshard doctor` says of one path, and its status."""
    done = subprocess.run([UNSHARD, "doctor", "--json", *args, path], capture_output=True, text=True, timeout=60)
    found = [(c["state"], c["what"], c["text"]) for c in json.loads(done.stdout)["checks"]]
    return [c for c in found if c[1] in ("staged", "discarded", "leftovers")], done.returncode


def test_doctor(t):
    """What is staged is told with its missing bytes; a live process keeps it; what is dead can be discarded."""
    walk = Walk(t, "dcp")
    walk.record()
    run_dir = walk.place + "/run"
    env = faulty(walk.place, walk.cache, at=walk.count // 2, do="stop")
    walk.clear()
    with subprocess.Popen([PROGRAM, walk.place, "step", *walk.s.args()], env=env, stdout=subprocess.PIPE) as live:
        same("said", live.stdout.readline() + live.stdout.readline(), b"begun\nsynced\n")
        found, _ = doctor(run_dir)
        same("live", [c[0] for c in found], ["ok"] + ["note"] * 3)
        assert "being written now" in found[0][2] and f"process {live.pid}" in found[0][2], found
        doctor(run_dir, "--discard")
        assert os.path.exists(walk.place + "/.unshard-staging-run"), "what a process is writing was discarded"
        live.kill()
    found, _ = doctor(walk.place)
    texts = [c[2] for c in found]
    assert "staged, not published" in texts[0], texts
    assert any("tensors/rest.npy: bytes 4000 to 8999 of 9000 are missing" in s for s in texts), texts
    assert any("tensors/done.npy: all 5000 bytes have arrived" in s for s in texts), texts
    assert any("raw/gone: removed" in s for s in texts), texts
    found, status = doctor(run_dir, "--discard")
    same("discarded", ([c[:2] for c in found], status), ([("ok", "discarded")], 0))
    same("what is left", os.listdir(walk.place), ["run"])
    walk.target("discarded", "old")
    steps = 0
    for at in range(walk.count // 2, walk.count + 1):
        walk.clear()
        walk.call("step", at=at, do="kill")
        if not os.path.exists(walk.place + "/.unshard-staging-run/redo"):
            continue
        found, _ = doctor(run_dir)
        assert "its publication was interrupted" in found[0][2], found
        said = subprocess.run([UNSHARD, "verify", run_dir], capture_output=True, text=True, timeout=60).stderr
        assert "a publication into it was interrupted" in said, said
        doctor(run_dir, "--discard")
        walk.target(f"discarded at {at}", "new")
        same("what is left", os.listdir(walk.place), ["run"])
        steps += 1
    assert steps > 5, steps
    print(f"# {steps} steps were ended by doctor --discard", flush=True)


if __name__ == "__main__":
    run(globals())
