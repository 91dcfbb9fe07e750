#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""python/unshard, `unshard load` and the holder on a CUDA device, or on a stand-in for its driver (tests/kernels/driver)."""
import contextlib
import ctypes
import glob
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from clientlib import DATA, bits, cut, data_of, expected  # noqa: E402
import device_memory  # noqa: E402
import unshard  # noqa: E402
from unshard import _ffi  # noqa: E402
from client import fails, start  # noqa: E402
from commands import ROOM, SOURCE, USAGE, Cli  # noqa: E402
from mountlib import PATIENCE, Mount, Skip, main, make_tensors, same, sha256, wait_for, write_checkpoint  # noqa: E402

DCP = os.path.join(DATA, "torch_dcp", "dcp_fsdp2_adamw_2r")
KEY = "model.emb.weight"
MIB = 1 << 20
STANDIN = False


def standin_only():
    if not STANDIN:
        raise Skip("only a stand-in does that when asked")


def needs_fuse():
    if not os.access("/dev/fuse", os.W_OK):
        raise Skip("no /dev/fuse")


def device_data(c, array):
    """The bytes of an Array of a device, through the library."""
    out = ctypes.create_string_buffer(max(array.nbytes, 1))
    same("read", c._call("device_read", 0, out, array.address, array.nbytes, None), 0)
    return out.raw[:array.nbytes]


def test_every_tensor_of_fixtures(t):
    for name in ("torch_dcp/dcp_fsdp2_adamw_2r", "torch_dcp/dcp_layouts", "torch_dcp/dcp_zstd_2r", "torch_file/pt_zip_big_endian",
                 "safetensors/hf_safetensors_dtypes"):
        source = os.path.join(DATA, name)
        with start(t, source) as c:
            for key, want in expected(source).items():
                array = c.load(key, device="cuda:0", to="dlpack")
                same("device", (array.device, array.__dlpack_device__()), ("cuda:0", (2, 0)))
                same(f"{name} {key}", sha256(device_data(c, array)), want["sha256"])


def test_every_fixture(t):
    """What tests/data has in one checkpoint, in one load each."""
    count = 0
    for path in sorted(glob.glob(DATA + "/*/*.expected.json")):
        source = path[:-len(".expected.json")]
        if not os.path.exists(source):
            continue  # a part of a fixture
        try:
            c = start(t, source)
        except unshard.Error as e:
            assert "no checkpoint" in str(e), e  # a tree of several
            continue
        with c:
            want = {key: w["sha256"] for key, w in expected(source).items() if key in c and "sha256" in w and not c.info(key).fault}
            for key, array in c.load_many(list(want), device="cuda:0", to="dlpack").items():
                same(f"{source} {key}", sha256(held(array)), want[key])
            count += len(want)
    assert count > 6000, count


def test_parts_and_casts(t):
    with start(t) as c:
        shape = c.info(KEY).shape
        whole = data_of(c.load(KEY, to="dlpack"))
        share = c.load(KEY, tp=(1, 2, 1), device="cuda:0", to="dlpack")
        half = -(-shape[1] // 2)
        same("columns", device_data(c, share), cut(whole, 4, shape, [0, half], [shape[0], shape[1] - half]))
        for dtype in ("bf16", "f16", "f64", "f8_e4m3", "f8_e5m2"):
            same(dtype, device_data(c, c.load(KEY, dtype=dtype, device="cuda:0", to="dlpack")),
                 data_of(c.load(KEY, dtype=dtype, to="dlpack")))
        scale = ([0.5, 2.0, 0.25, 4.0] * shape[0], (1, 0))
        fails(unshard.Error, "", lambda: c.load(KEY, scale=scale, device="cuda:0", to="dlpack"))
        scale = (([0.5, 2.0, 0.25] * shape[0])[:shape[0]], (1, 0))
        same("scaled", device_data(c, c.load(KEY, scale=scale, device="cuda:0", to="dlpack")),
             data_of(c.load(KEY, scale=scale, to="dlpack")))


def test_auto_takes_the_device(t):
    with start(t) as c:
        same("device", c.load(KEY, device="auto", to="dlpack").device, "cuda:0")
        fails(unshard.Error, "", lambda: c.load(KEY, device="cuda:99", to="dlpack"))


def test_memory_is_given_back(t):
    """Arrays of a closed checkpoint stay; with the last one the device has all of its memory again."""
    free = None if STANDIN else device_memory.free_bytes()
    with start(t) as c:
        array = c.load(KEY, device="cuda:0", to="dlpack")
        many = c.load_many(device="cuda:0", to="dlpack")
    same("after close", held(array) == data_of(unshard.load(DCP, KEY, to="dlpack")), True)
    del array, many, c
    if STANDIN:
        library = ctypes.CDLL("libcuda.so.1")
        library.standin_live.restype = library.standin_misuse.restype = ctypes.c_long
        same("objects that live, misuse", (library.standin_live(), library.standin_misuse()), (0, 0))
    else:
        assert device_memory.free_bytes() >= free, (device_memory.free_bytes(), free)


def test_faults_of_the_driver(t):
    """Each call that fails is an error with words, and the next load is a good one."""
    standin_only()
    want = data_of(unshard.load(DCP, KEY, to="dlpack"))
    for call in ("cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuStreamSynchronize", "cuMemHostAlloc"):
        with start(t) as c:
            os.environ["STANDIN_FAIL"] = call + ":1"
            try:
                c.load(KEY, device="cuda:0", dtype="bf16", to="dlpack")
            except unshard.Error as e:
                assert "cu" in str(e) or "memory" in str(e), e
            finally:
                del os.environ["STANDIN_FAIL"]
            same(call, device_data(c, c.load(KEY, device="cuda:0", to="dlpack")), want)


def test_load_and_doctor(t):
    cli = Cli(t)
    got = cli.json("load", DCP, "--device", "cuda:0")
    same("load", (got["device"], got["tensors"], got["faults"]), ("cuda:0", len(expected(DCP)), 0))
    assert got["sent_bytes"] >= got["bytes"] and got["launches"] > 0, got
    same("auto", cli.run("load", DCP).stderr, "")
    gpu = [c for c in json.loads(cli.run("doctor", "--json", status=0 if os.access("/dev/fuse", os.W_OK) else 1).stdout)["checks"]
           if c["what"] == "gpu"]
    assert len(gpu) >= 2 and "CUDA " in gpu[0]["text"] and device_memory.name() in gpu[1]["text"], gpu
    cli.error("load", DCP, "--device", "cuda:99", status=SOURCE, words=["99"])


# ---- the holder ----

class Hold:
    """`unshard hold`, with a runtime directory and an environment of its own."""

    def __init__(self, t, source, *args, **env):
        self.dir = t + "/run"
        os.makedirs(self.dir, 0o700, exist_ok=True)
        os.environ["XDG_RUNTIME_DIR"] = self.dir  # for clients, which find it there
        self.env = {**os.environ, "XDG_CACHE_HOME": t + "/cache", **env}
        self.source, self.args = source, args

    def __enter__(self):
        self.process = subprocess.Popen([os.environ["UNSHARD"], "hold", self.source, "--json", *self.args], env=self.env,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError("the holder ended: " + self.process.stderr.read())
        self.socket = json.loads(line)["socket"]
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=PATIENCE)[1]
        del os.environ["XDG_RUNTIME_DIR"]
        if exc[0] is None:
            same("status, words", (self.process.returncode, said), (0, ""))
            same("socket", os.path.exists(self.socket), False)


def held(array):
    return device_memory.read(array.address, array.nbytes)


CLIENT = """if True:
    import hashlib, sys
    sys.path[:0] = {path!r}
    import device_memory, unshard
    h = unshard.attach({source!r})
    a = h.load({key!r}, to="dlpack")
    print(hashlib.sha256(device_memory.read(a.address, a.nbytes)).hexdigest(), flush=True)
    if {mark!r}:
        device_memory.fill(a.address, {mark!r}, a.nbytes)
    print("ready", flush=True)
    sys.stdin.readline()
    print(device_memory.read(a.address, 4).hex(), flush=True)
"""


def client(source, key=KEY, mark=0):
    code = CLIENT.format(path=sys.path[:8], source=source, key=key, mark=mark)
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_map_one_copy(t):
    want = expected(DCP)[KEY]["sha256"]
    with Hold(t, DCP):
        a = client(DCP)
        same("the first", (a.stdout.readline().strip(), a.stdout.readline().strip()), (want, "ready"))
        b = client(DCP, mark=0x5a)
        same("the second", (b.stdout.readline().strip(), b.stdout.readline().strip()), (want, "ready"))
        same("what one writes, the other sees", a.communicate("\n", timeout=PATIENCE)[0].strip(), "5a5a5a5a")
        same("status", (a.returncode, b.communicate("\n", timeout=PATIENCE)[0].strip(), b.returncode), (0, "5a5a5a5a", 0))
        c = client(DCP)  # the next start of a server
        same("still there, not loaded again", c.stdout.readline().strip() != want, True)
        same("the mark", c.communicate("\n", timeout=PATIENCE)[0].split()[-1], "5a5a5a5a")


def test_every_tensor_held(t):
    with Hold(t, DCP), unshard.attach(DCP) as h:
        arrays = {key: h.load(key, to="dlpack") for key in expected(DCP)}
        for key, want in expected(DCP).items():
            same(key, sha256(held(arrays[key])), want["sha256"])
            same("again", h.load(key, to="dlpack").address, arrays[key].address)
        spans = sorted((a.address, a.address + a.nbytes) for a in arrays.values())
        assert all(x[1] <= y[0] for x, y in zip(spans, spans[1:])), "they overlap"
        with start(t) as c:
            same("cast", held(h.load(KEY, dtype="bf16", to="dlpack")), data_of(c.load(KEY, dtype="bf16", to="dlpack")))
            shape = c.info(KEY).shape
            box = h.load(KEY, start=[1, 2], count=[3, 4], to="dlpack")
            same("box", held(box), cut(data_of(c.load(KEY, to="dlpack")), 4, shape, [1, 2], [3, 4]))
        e = fails(unshard.Error, "no tensor nothing", lambda: h.load("nothing"))
        same("errno", e.errno, 2)
        fails(unshard.Error, "elements", lambda: h.load(KEY, start=[0, 0], count=[1, 1 << 40]))


def big_checkpoint(t, count, size):
    tensors = {f"w{n}": ("U8", [size], bytes([n + 1]) * size) for n in range(count)}
    write_checkpoint(t + "/src", tensors)
    return t + "/src", tensors


def test_budget(t):
    """What clients map stays; the least recently used goes; over the budget is an error, not an eviction."""
    source, tensors = big_checkpoint(t, 6, 4 * MIB)
    with Hold(t, source, "--budget", "16M"):
        with unshard.attach(source) as h:
            arrays = [h.load(f"w{n}", to="dlpack") for n in range(4)]
            same("errno", fails(unshard.Error, "do not fit", lambda: h.load("w4")).errno, 28)
            same("all are still there", [held(a)[:2] for a in arrays], [bytes([n + 1]) * 2 for n in range(4)])
            device_memory.fill(arrays[1].address, 0x77, 4)
            device_memory.fill(arrays[2].address, 0x77, 4)
            h.load("w1", to="dlpack")  # used last
            del arrays

        def mapped(name):
            """As soon as the holder has seen the client before go."""
            found = []

            def tried():
                try:
                    with unshard.attach(source) as g:
                        found.append(held(g.load(name, to="dlpack"))[:2])
                except unshard.Error as e:
                    same("over the budget", e.errno, 28)
                return found
            wait_for("room for " + name, PATIENCE, tried)
            return found[0]
        same("w5 takes the place of w0", mapped("w5"), bytes([6, 6]))
        same("used last, and kept", mapped("w1"), b"ww")
        same("w4 takes the next", mapped("w4"), bytes([5, 5]))
        for n in (0, 3, 0, 3):
            same(f"w{n} is loaded again", mapped(f"w{n}"), bytes([n + 1]) * 2)
        same("w2 has gone meanwhile", mapped("w2"), bytes([3, 3]))


def test_a_checkpoint_that_changes(t):
    source, tensors = big_checkpoint(t, 2, MIB)
    with Hold(t, source), unshard.attach(source) as h:
        old = h.load("w0", to="dlpack")
        write_checkpoint(source, {k: (d, s, b[:1000] + b"!" + b[1001:]) for k, (d, s, b) in tensors.items()})
        wait_for("the new one", PATIENCE, lambda: held(h.load("w0", to="dlpack"))[1000] == ord("!"))
        same("who maps the old one keeps it", held(old), tensors["w0"][2])


def test_a_source_that_becomes_a_mount(t):
    """Nobody can tell whether what a mount shows is what was loaded: it is refused then too."""
    needs_fuse()
    source, tensors = big_checkpoint(t, 2, MIB)
    os.symlink(source, t + "/link")
    with Mount(source, t + "/mnt") as m, Hold(t, t + "/link") as holder, unshard.attach(holder.socket) as h:
        h.load("w0", to="dlpack")
        os.symlink(m.path, t + "/new")
        os.replace(t + "/new", t + "/link")
        write_checkpoint(source, {k: (d, s, b[::-1]) for k, (d, s, b) in tensors.items()})

        def refused():
            try:
                h.load("w0", to="dlpack")
            except unshard.Error as e:
                return "in a mount" in str(e)
            return False
        wait_for("the refusal", PATIENCE, refused)
        assert refused()


def test_a_holder_that_dies(t):
    source, tensors = big_checkpoint(t, 2, MIB)
    holder = Hold(t, source)
    with holder, unshard.attach(source) as h:
        a = h.load("w0", to="dlpack")
        holder.process.send_signal(signal.SIGKILL)
        holder.process.wait()
        same("what is mapped", held(a), tensors["w0"][2])
        fails(unshard.Error, "holder", lambda: h.load("w1"))
        fails(unshard.Error, "unshard hold", lambda: unshard.attach(source))
        same("left over", os.path.exists(holder.socket), True)
        with Hold(t, source) as next_one:
            same("the same place", next_one.socket, holder.socket)
            with unshard.attach(source) as g:
                same("held anew", held(g.load("w0", to="dlpack")), tensors["w0"][2])
        os.environ["XDG_RUNTIME_DIR"] = holder.dir
        holder.process.returncode = 0


def test_a_holder_without_descriptors(t):
    """Who asks while it has none left waits, and it does not: then it is served."""
    source, tensors = big_checkpoint(t, 1, MIB)
    with Hold(t, source) as holder:
        pid = holder.process.pid
        unshard.attach(source).close()  # all that is opened late is open
        room = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 8
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, room))
        folder, waiting = os.open(os.path.dirname(holder.socket), os.O_PATH), []
        for _ in range(20):
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].connect(f"/proc/self/fd/{folder}/{os.path.basename(holder.socket)}")  # the name itself may be too long
        os.close(folder)
        time.sleep(0.3)
        before = cpu_ticks(pid)
        time.sleep(1)
        assert cpu_ticks(pid) - before <= 10, "it asks and asks"
        for s in waiting:
            s.close()
        with unshard.attach(source) as h:
            same("w0", held(h.load("w0", to="dlpack")), tensors["w0"][2])


def cpu_ticks(pid):
    """Its processor time, in hundredths of a second."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def holders():
    """Process numbers of `unshard hold`."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                if f.read().split(b"\0")[:2] == [b"unshard", b"hold"]:
                    found.add(int(pid))
        except OSError:
            pass
    return found


@contextlib.contextmanager
def mount_with_holder(t, **env):
    """A mount with -o gpu=0, and the process number of its holder."""
    os.environ["XDG_RUNTIME_DIR"] = t + "/run"
    os.makedirs(t + "/run", 0o700, exist_ok=True)
    before = holders()
    try:
        with Mount(DCP, t + "/mnt", "gpu=0", env={**os.environ, **env}) as m:
            wait_for("a holder", PATIENCE, lambda: len(holders() - before) == 1 or env)
            yield m, holders() - before
    finally:
        del os.environ["XDG_RUNTIME_DIR"]
    same("holders after the mount", holders() - before, set())


def attached():
    """To the mount's holder, as soon as it listens."""
    found = []

    def tried():
        try:
            found.append(unshard.attach(DCP))
        except unshard.Error:
            return False
        return True
    wait_for("the holder", PATIENCE, tried)
    return found[0]


def test_a_mount_has_its_holder(t):
    needs_fuse()
    want = expected(DCP)[KEY]["sha256"]
    with mount_with_holder(t) as (m, (pid,)):
        with attached() as h:
            same("held", sha256(held(h.load(KEY, to="dlpack"))), want)
        os.kill(pid, signal.SIGKILL)
        with open(f"{m.path}/raw/{KEY}", "rb") as f:
            same("the mount without it", sha256(f.read()), want)
    with mount_with_holder(t) as (m, (pid,)):
        attached().close()
        m.process.kill()  # whose holder ends with it
        wait_for("the holder's end", PATIENCE, lambda: pid not in holders())
        m.process.wait()
        m.process.returncode = 0
    if not STANDIN:
        return
    with mount_with_holder(t, STANDIN_NO_SHARING="1") as (m, _):
        wait_for("why there is none", PATIENCE, lambda: "share" in m.messages())
        with open(f"{m.path}/raw/{KEY}", "rb") as f:
            same("the mount of one that cannot", sha256(f.read()), want)


def test_nonsense(t):
    with Hold(t, DCP) as holder:
        folder = os.open(os.path.dirname(holder.socket), os.O_PATH)  # its path may be longer than an address
        address = f"/proc/self/fd/{folder}/{os.path.basename(holder.socket)}"
        for words in (b"", b"x", b"\xff" * 32, b"\x00" * 31, (1 << 31).to_bytes(4, "little") + bytes(28),
                      bytes(4) + (65).to_bytes(4, "little") + bytes(24)):
            with socket.socket(socket.AF_UNIX) as s:
                s.settimeout(PATIENCE)
                s.connect(address)
                s.sendall(words)
                s.shutdown(socket.SHUT_WR)
                said = b"".join(iter(lambda: s.recv(4096), b""))
                same("only its greeting", (len(said), said[:8]), (24, b"UFSHOLD1"))
        os.close(folder)
        with unshard.attach(holder.socket) as h:
            rows = expected(DCP)[KEY]["shape"][0]
            for start, count in (([0], [rows]), ([0, 0, 0], [rows, 1, 1]), ([], [])):
                fails(unshard.Error, "dimensions", lambda s=start, n=count: h.load(KEY, start=s, count=n, to="dlpack"))
            fails(ValueError, "count", lambda: h.load(KEY, start=[0, 0], count=[rows], to="dlpack"))
            same("it goes on", sha256(held(h.load(KEY, to="dlpack"))), expected(DCP)[KEY]["sha256"])


def test_many_clients_at_once(t):
    source, tensors = big_checkpoint(t, 8, MIB)
    with Hold(t, source, "--budget", "32M"):
        clients = [client(source, f"w{n % 8}") for n in range(16)]
        for n, c in enumerate(clients):
            said = c.communicate("\n", timeout=600)[0].split()
            same(f"client {n}", (said[0], c.returncode), (sha256(tensors[f"w{n % 8}"][2]), 0))


def test_refusals(t):
    cli = Cli(t)
    run = {"XDG_RUNTIME_DIR": t}
    with Hold(t, DCP):
        cli.error("hold", DCP, status=SOURCE, words=["in use", "already"])
    cli.error("hold", DCP, "--device", "tpu", status=USAGE, words=["tpu"])
    cli.error("hold", DCP, "--budget", "much", status=USAGE, words=["much"])
    cli.error("hold", DCP, "--budget", "4T", status=ROOM, words=["budget", "free"])
    cli.error("hold", t + "/nowhere", status=SOURCE, words=["nowhere"])
    cli.error("hold", DCP, "--device", "98", status=SOURCE, words=["98"])
    if STANDIN:
        err = cli.run("hold", DCP, status=SOURCE, env={**run, "STANDIN_NO_SHARING": "1"}).stderr
        assert "cannot share" in err, err
    fails(unshard.Error, "unshard hold", lambda: unshard.attach(DCP))
    fails(ValueError, "none of a holder", lambda: unshard.attach(DCP, "cpu"))


if __name__ == "__main__":
    if device_memory.why_none():
        print("1..0 # SKIP no device:", device_memory.why_none())
        sys.exit(77)
    STANDIN = device_memory.is_standin()
    main(globals(), fuse=False)
