# SPDX-License-Identifier: MIT
"""Writers that must leave the same through a mount as on a plain disk: names, bytes, modes, links, times that were set.

A case is a writer with what was there before it. It runs twice, in a plain directory and in an rw mount of an identical
source, the second time with pauses. What it saw (listings, errors, exit codes) and what it left must be equal.

$DISK_CASES is how many cases a walk takes (a sample of its own seed by default, `all` for every one), $DISK_SEED another
sample, $DISK_ONLY the name of one case, $DISK_PAUSES the pauses in seconds. $SLOW is the library of slow.c.
"""
import collections
import concurrent.futures
import errno
import hashlib
import json
import math
import mmap
import os
import random
import shutil
import stat
import struct
import subprocess
import time

from mountlib import PATIENCE, UNSHARD, Mount, brief, is_mounted, read_all

DATA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data")
SLOW = os.environ.get("SLOW")
PAUSES = [float(p) for p in os.environ.get("DISK_PAUSES", "0 3").split()]
COUNT = os.environ.get("DISK_CASES")
SEED = os.environ.get("DISK_SEED", "1")
ONLY = os.environ.get("DISK_ONLY")
STOPS = 3  # pauses in one case


# ---- what a tree is ----

Entry = collections.namedtuple("Entry", "kind mode owner data linked times")


def digest(fd):
    with open(fd, "rb") as f:
        data = f.read()
    return (len(data), hashlib.sha256(data).hexdigest())


def snapshot(root):
    """{path: Entry} of all below root; paths may be longer than the kernel takes."""
    found, inodes = {}, collections.defaultdict(list)
    for folder, dirs, files, fd in os.fwalk(root):
        for name in dirs + files:
            st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            kind, data = stat.S_IFMT(st.st_mode), None
            if kind == stat.S_IFLNK:
                data = os.readlink(name, dir_fd=fd)
            elif kind == stat.S_IFREG:
                data = digest(os.open(name, os.O_RDONLY, dir_fd=fd))
            short = os.path.relpath(os.path.join(folder, name), root)
            if kind != stat.S_IFDIR and st.st_nlink > 1:
                inodes[st.st_dev, st.st_ino].append(short)
            found[short] = [kind, oct(st.st_mode & 0o7777), (st.st_uid, st.st_gid), data, (), st.st_mtime_ns]
    for names in inodes.values():
        for name in names:
            found[name][4] = tuple(sorted(names))
    return {name: Entry(*e) for name, e in found.items()}


def names_below(root):
    return sorted(os.path.relpath(os.path.join(folder, n), root) for folder, dirs, files, _ in os.fwalk(root) for n in dirs + files)


def differences(got, want, got_from=0, want_from=0):
    """What differs between two snapshots, in words. A time from before a run was set or left alone: it is equal in both."""
    out = [f"missing: {n}" for n in sorted(want.keys() - got.keys())] + [f"extra: {n}" for n in sorted(got.keys() - want.keys())]
    for name in sorted(want.keys() & got.keys()):
        a, b = got[name], want[name]
        for field in ("kind", "mode", "owner", "data", "linked"):
            if getattr(a, field) != getattr(b, field):
                out.append(f"{name}: {field} {brief(getattr(a, field), 120)}, not {brief(getattr(b, field), 120)}")
        set_before = b.times < want_from or want_from == 0
        if (a.times != b.times) if set_before else a.times < got_from:
            out.append(f"{name}: mtime {a.times / 1e9:.6f}, not {b.times / 1e9:.6f}")
    return out


# ---- one run of a case ----

class Differs(Exception):
    pass


class Writer:
    """What a case's function gets: a directory to write in, and steps between which it may be paused."""

    def __init__(self, path, pace=None, source=None):
        self.path, self.pace, self.source = path, pace, source
        self.steps, self.seen, self.views = 0, [], None
        self.slow_log = None

    def __truediv__(self, name):
        return os.path.join(self.path, name)

    def step(self):
        """Between two calls of a program: here it may be slow."""
        self.steps += 1
        if self.source:
            self.look()
        if self.pace:
            self.pace.wait(self.steps, self)

    def look(self):
        """The mount lists what the disk has, at any moment; handles of views have their old bytes or an error."""
        shown, there = names_below(self.path), names_below(self.source)
        if shown != there:
            raise Differs(f"step {self.steps}: the mount lists {brief(sorted(set(shown) - set(there)), 300)} more and "
                          f"{brief(sorted(set(there) - set(shown)), 300)} less than the disk")
        if self.views:
            self.views.check(f"step {self.steps}")

    def note(self, *what):
        self.seen.append(what)

    def attempt(self, what, call):
        """An operation that may fail, in both runs alike; was it done?"""
        try:
            self.note(what, call())
            return True
        except OSError as e:
            self.note(what, errno.errorcode[e.errno])
            return False

    def call(self, *command, cwd=None):
        """A program, paused by slow.c where that is built."""
        env = dict(os.environ)
        if SLOW:
            env["LD_PRELOAD"] = SLOW
            env.update(self.pace.environment() if self.pace else {"SLOW_LOG": self.slow_log} if self.slow_log else {})
        command = [str(c) for c in command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, cwd=cwd or self.path, check=False)
        self.note(command[0], done.returncode, done.stderr.replace(self.path, ""))


class Pace:
    """Where a case is paused: a few of its steps, by chance."""

    def __init__(self, seconds, steps, changes, rnd):
        self.seconds = seconds
        self.at = set(rnd.sample(range(1, steps + 1), min(STOPS, steps)))
        self.every = max(1, math.ceil(changes / STOPS))

    def wait(self, step, _):
        if self.seconds and step in self.at:
            time.sleep(self.seconds)

    def environment(self):
        return {"SLOW_WRITE_MS": str(int(self.seconds * 1000)), "SLOW_EVERY": str(self.every), "SLOW_MOST": str(STOPS)} if self.seconds else {}


class Views:
    """A reader that has views of a checkpoint open before something writes over it."""

    def __init__(self, mounted, source):
        self.open, self.maps = [], []
        for folder, dirs, _ in os.walk(source):
            at = os.path.join(mounted, os.path.relpath(folder, source))
            if not {"tensors", "raw", "model.safetensors"} & set(os.listdir(folder)) and os.path.isdir(at + "/tensors"):
                for name in sorted(os.listdir(at + "/tensors"))[:3]:
                    self.add(f"{at}/tensors/{name}")
                if os.path.exists(at + "/model.safetensors"):
                    self.add(at + "/model.safetensors")

    def add(self, path):
        try:
            old = read_all(path)
        except OSError:  # a broken tensor
            return
        fd = os.open(path, os.O_RDONLY)
        self.open.append((path, fd, old))
        if old:
            self.maps.append(mmap.mmap(fd, len(old), prot=mmap.PROT_READ))

    def check(self, when):
        for path, fd, old in self.open:
            try:
                if os.pread(fd, len(old) + 1, 0) != old:
                    raise Differs(f"{when}: an open handle of {path} has other bytes than before")
            except OSError as e:
                if e.errno not in (errno.ESTALE, errno.EIO):
                    raise

    def close(self):
        for m in self.maps:
            m.close()
        for _, fd, _ in self.open:
            os.close(fd)


class Case:
    """write(w) is the writer; older(path) makes what was there before; reader: somebody has its views open meanwhile."""

    def __init__(self, name, write, older=None, reader=False):
        self.name, self.write, self.older, self.reader = name, write, older, reader
        self.rnd = random.Random(f"{SEED} {name}")


# ---- many cases, side by side in one mount ----

class Batch:
    """Runs cases in plain directories and in a mount; .failures are (name, what differs)."""

    def __init__(self, t, cases, pause, mount=True, options="rw", env=None):
        self.t, self.cases, self.pause, self.mounts, self.options, self.env = t, cases, pause, mount, options, env
        self.failures, self.read, self.folder = [], 0, {c.name: f"{i:03}" for i, c in enumerate(cases)}
        assert len(self.folder) == len(cases), "two cases have one name"
        self.made = {}

    def at(self, what, case):
        return os.path.join(self.t, what, self.folder[case.name], "run")

    def prepare(self, case):
        base = self.at("base", case)
        os.makedirs(base)
        if case.older:
            case.older(base)
        for what in "plain", "src":
            os.makedirs(os.path.dirname(self.at(what, case)))
            subprocess.run(["cp", "-a", base, self.at(what, case)], check=True)

    def plain(self, case):
        """The run on the disk, which says how it should be."""
        w = Writer(self.at("plain", case))
        w.slow_log = f"{self.t}/changes-{self.folder[case.name]}"
        begin = time.time_ns() - 50_000_000
        case.write(w)
        changes = os.path.getsize(w.slow_log) if os.path.exists(w.slow_log) else 0
        self.made[case.name] = (w, changes, snapshot(w.path), begin)

    def again(self, case, mnt):
        """The run through the mount, with pauses."""
        w, changes, want, want_from = self.made[case.name]
        path, source = os.path.join(mnt, self.folder[case.name], "run"), self.at("src", case)
        pace = Pace(self.pause, w.steps, changes, case.rnd)
        got_from = time.time_ns() - 50_000_000
        other = Writer(path, pace, source if self.mounts else None)
        if case.reader and self.mounts:
            other.views = Views(path, source)
            self.read += bool(other.views.open)
        try:
            case.write(other)
            other.look() if self.mounts else None
        finally:
            other.views.close() if other.views else None
        if other.seen != w.seen:
            at = next((i for i, (a, b) in enumerate(zip(other.seen, w.seen)) if a != b), min(len(other.seen), len(w.seen)))
            raise Differs(f"it saw {brief(other.seen[at:at + 2], 600)}, on a disk {brief(w.seen[at:at + 2], 600)}")
        self.compare(snapshot(path), want, got_from, want_from, "through the mount: ")
        self.compare(snapshot(source), want, got_from, want_from, "")
        self.compare(snapshot(path), snapshot(source), 0, 0, "the mount and its source: ")
        return got_from

    @staticmethod
    def compare(got, want, got_from, want_from, what):
        found = differences(got, want, got_from, want_from)
        if found:
            raise Differs(what + "; ".join(found[:8]) + (f"; and {len(found) - 8} more" if len(found) > 8 else ""))

    def each(self, do, cases):
        """Does it for all cases side by side; the results of those that did not fail."""
        out = {}
        with concurrent.futures.ThreadPoolExecutor(max(1, len(cases))) as pool:
            running = {pool.submit(do, c): c for c in cases}
            for done in concurrent.futures.as_completed(running):
                case = running[done]
                try:
                    out[case.name] = done.result()
                except Exception as e:  # whatever a writer's libraries raise
                    self.failures.append((case.name, f"{type(e).__name__}: {e}"))
        return out

    def run(self):
        for case in self.cases:
            self.prepare(case)
        os.makedirs(self.t + "/src", exist_ok=True)
        time.sleep(0.1)  # what was there before is older than the runs
        for case in self.cases:
            self.plain(case)
        if not self.mounts:
            self.each(lambda c: self.again(c, self.t + "/src"), self.cases)
            return self
        with Mount(self.t + "/src", self.t + "/mnt", self.options, env=self.env) as m:
            begun = self.each(lambda c: self.again(c, m.path), self.cases)
            if not m.alive():
                raise AssertionError(f"the server ended with {m.process.returncode}; failures before:\n" + "\n".join(map(str, self.failures)))
            self.unmount(m)
        for case in self.cases:
            if case.name in begun:
                _, _, want, want_from = self.made[case.name]
                found = differences(snapshot(self.at("src", case)), want, begun[case.name], want_from)
                if found:
                    self.failures.append((case.name, "after the unmount: " + "; ".join(found[:8])))
        return self

    def unmount(self, m):
        done = subprocess.run([UNSHARD, "umount", m.path], capture_output=True, text=True, timeout=600, check=False)
        if done.returncode or is_mounted(m.path):
            self.failures.append(("unmount", f"unshard umount: {done.returncode}, {done.stderr}"))
        else:
            m.process.wait(PATIENCE)
        left = [n for n in names_below(self.t + "/src") if ".unshard" in n]
        if left:
            self.failures.append(("unmount", f"left in the source: {left[:5]}"))


def check(t, cases, pauses=None, chunk=48, **how):
    """Runs all of these cases with each pause; counts, and one error that names all that failed."""
    if ONLY:
        cases = [c for c in cases if c.name == ONLY]
    failed, ran, read = [], 0, 0
    for pause in PAUSES if pauses is None else pauses:
        for at in range(0, len(cases), chunk):
            place = f"{t}/{pause}-{at}"
            os.mkdir(place)
            batch = Batch(place, cases[at:at + chunk], pause, **how).run()
            failed += [f"pause {pause}: {name}: {what}" for name, what in sorted(batch.failures)]
            ran, read = ran + len(batch.cases), read + batch.read
            shutil.rmtree(place, ignore_errors=True)
    print(f"# {ran} runs of {len(cases)} cases, {read} with views open, {len(failed)} differ from a plain disk", flush=True)
    assert not failed, "\n".join(failed)
    return ran, read


def sample(cases, count):
    """As many of them as are asked for, by chance and always the same."""
    cases = list(cases)
    n = len(cases) if COUNT == "all" or ONLY else int(COUNT or count)
    return random.Random(SEED).sample(cases, min(n, len(cases)))


# ---- fixtures ----

VIEWS = {"tensors", "tree", "raw"}  # a file below such a directory of a whole checkpoint is an edit


def fixtures(hostile=False):
    """Paths of all of tests/data: directories, and files that are a checkpoint; but for those that have a name of a view."""
    for family in sorted(os.listdir(DATA)):
        for name in sorted(os.listdir(f"{DATA}/{family}")):
            path = f"{DATA}/{family}/{name}"
            if os.path.isdir(path) and VIEWS & set(os.listdir(path)):
                continue
            if not name.endswith((".expected.json", ".mapped.json")) and (family != "hostile" or (hostile and os.path.isdir(f"{DATA}/{family}/{name}"))):
                yield path


def short(path):
    return os.path.relpath(path, DATA).replace("/", "-")


def files_of(path):
    """{relative path: the file}; a file is one by its own name."""
    if os.path.isfile(path):
        return {os.path.basename(path): path}
    return {os.path.relpath(os.path.join(f, n), path): os.path.join(f, n) for f, _, names in os.walk(path) for n in sorted(names)}


def fixture(family, name):
    return f"{DATA}/{family}/{name}"


def lay(path, where):
    """A copy of a fixture as `where`, writable, with its times."""
    if os.path.isfile(path):
        os.makedirs(where)
        shutil.copy2(path, where)
    else:
        shutil.copytree(path, where, symlinks=True)
    subprocess.run(["chmod", "-R", "u+w", where], check=True)


def other_bytes(where):
    """Every tensor of every safetensors file and every DCP shard gets other bytes: an older save of the same model."""
    for name, path in files_of(where).items():
        if name.endswith(".safetensors"):
            with open(path, "r+b") as f:
                head = f.read(8)
                size = int.from_bytes(head, "little")
                if len(head) < 8 or 8 + size > os.path.getsize(path):
                    continue  # a hostile one
                f.seek(8 + size)
                data = f.read()
                f.seek(8 + size)
                f.write(bytes(b ^ 1 for b in data))
    return where


def tensors_in(path):
    """{key: (dtype, shape, bytes)} as the command reads it."""
    done = subprocess.run([UNSHARD, "ls", path, "--json", "-o", "index=memory"], capture_output=True, text=True, check=True, timeout=600)
    return {t["key"]: (t["dtype"], t["shape"],
                       subprocess.run([UNSHARD, "cat", path, t["key"]], capture_output=True, check=True, timeout=600).stdout)
            for t in json.loads(done.stdout)["tensors"]}


# ---- writers ----

def put(w, path, data, how="create"):
    """One file, as programs write it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if how == "rename":
        with open(path + ".tmp", "wb") as f:
            f.write(data)
        w.step()
        os.rename(path + ".tmp", path)
    elif how == "halves":
        with open(path, "wb", buffering=0) as f:
            f.write(data[:len(data) // 2])
            w.step()
            f.write(data[len(data) // 2:])
    elif how == "synced":
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, data)
        w.step()
        os.fsync(fd)
        os.close(fd)
    else:
        with open(path, "wb") as f:
            f.write(data)
    w.step()


# In which order the frameworks write: what begins so, among the files of one checkpoint.
FRAMEWORK = ["config.json", "generation_config", "common.pt", "context/", "params.json", "model_states", "mp_rank_", "model/", "model", "pytorch_model-",
             "pytorch_model", "adapter", "consolidated", "layer_", "__", "tokenizer", "optim", ".metadata", "metadata.json", "meta.pt", "scheduler", "rng",
             "random", "trainer_state"]


def by_framework(file):
    name = file[0]
    if "index.json" in name:
        return (len(FRAMEWORK), name)
    return (next((i for i, word in enumerate(FRAMEWORK) if ("/" + name).find("/" + word) >= 0), len(FRAMEWORK) + 1), name)


def put_tree(w, fixture_path, where, order, how, rnd):
    """A checkpoint, file by file."""
    files = sorted(files_of(fixture_path).items())
    if order == "framework":
        files.sort(key=by_framework)
    elif order == "reversed":
        files.reverse()
    elif order == "random":
        rnd.shuffle(files)
    for name, path in files:
        put(w, w / f"{where}/{name}", read_all(path), how)
