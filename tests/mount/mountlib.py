# SPDX-License-Identifier: MIT
"""What the mount tests share: a mount with its own directories, checkpoints made by hand, a runner.

A test file defines functions test_*(t) and ends in main(globals()). `t` is a fresh directory's path. The program under
test is $UNSHARD. Without /dev/fuse the whole file is skipped (exit 77).
"""
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback

UNSHARD = os.environ.get("UNSHARD", "unshard")
# Seconds after which what has not come never comes: a machine with much else to do takes its time, and tests do not
# measure it. Less than the minute for which a look at a server counts.
PATIENCE = 50

os.umask(0o022)  # whatever the shell's is: some tests look in as another user
for name in [n for n in os.environ if n.lower() in ("http_proxy", "https_proxy", "all_proxy")]:
    del os.environ[name]  # the servers of tests are here


def is_sanitized():
    """Is the program built with an address or thread sanitizer? The environment does not tell: newer mesons set ASAN_OPTIONS always."""
    path = shutil.which(UNSHARD)
    with open(path or os.devnull, "rb") as f:
        program = f.read()
    return b"__asan_init" in program or b"__tsan_init" in program


SANITIZED = is_sanitized()  # slow, needs terabytes of addresses, and keeps what is freed


class Skip(Exception):
    pass


def is_mounted(path):
    with open("/proc/self/mountinfo") as f:
        return any(line.split()[4] == path and " - fuse.unshardfs " in line for line in f)


def wait_for(what, seconds, condition, step=0.02):
    """Waits until condition() is true and returns how long that took."""
    start = time.monotonic()
    while True:
        if condition():
            return time.monotonic() - start
        if time.monotonic() - start > seconds:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(step)


class Mount:
    """A mount in the foreground, so that its end and its messages can be seen."""

    def __init__(self, source, where, options="", wrapper=(), env=None):
        self.path = os.path.realpath(where)
        self.dir = tempfile.mkdtemp(prefix="ufs-", dir=os.path.dirname(self.path))
        os.chmod(self.dir, 0o777)
        self.log_path = os.path.join(self.dir, "log")
        self.source, self.options, self.wrapper = source, options, wrapper
        self.env = dict(os.environ if env is None else env)
        self.process = None

    def __enter__(self):
        os.makedirs(self.path, exist_ok=True)
        options = f"cache_dir={self.dir}/cache" + ("," + self.options if self.options else "")
        self.log = open(self.log_path, "w")
        self.process = subprocess.Popen([*self.wrapper, UNSHARD, "mount", self.source, self.path, "-o", options, "-f"],
                                        stdout=self.log, stderr=subprocess.STDOUT, env=self.env)
        wait_for("the mount", PATIENCE, lambda: is_mounted(self.path) or self.process.poll() is not None)
        if self.process.poll() is not None:
            raise AssertionError("mount ended: " + self.messages())
        os.stat(self.path)
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        unmount_hard(self.path)
        self.log.close()
        if exc[0] is not None:
            sys.stderr.write("--- messages of the mount\n" + self.messages() + "---\n")
        elif self.process.returncode not in (0, None):
            raise AssertionError(f"the mount ended with {self.process.returncode}: {self.messages()}")

    def messages(self):
        with open(self.log_path) as f:
            return f.read()

    def alive(self):
        return self.process.poll() is None

    def rss(self):
        with open(f"/proc/{self.process.pid}/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS:"))

    def __truediv__(self, name):
        return os.path.join(self.path, name)


def may_open(count):
    """That so many files may be open in a process of ours, and in those that it starts; skips where it cannot be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < count:
        raise Skip(f"{count} files may not be open here: ulimit -Hn is {hard}")
    if 0 <= soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def unmount_hard(path):
    for _ in range(8):
        if not is_mounted(path):
            return
        subprocess.run(["fusermount3", "-uz", path], stderr=subprocess.DEVNULL)


# ---- checkpoints ----

def tensor_bytes(seed, n):
    return random.Random(seed).randbytes(n)


SIZES = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8}


def safetensors_image(tensors):
    """tensors: {key: (dtype, shape, bytes)}, in this order."""
    header, at = {}, 0
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def npy_image(descr, shape, data):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape)!r}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def stored(path):
    """{key: (dtype, shape, bytes)} of all safetensors files of a directory, read by a reader of its own."""
    tensors = {}
    for name in sorted(os.listdir(path)):
        if not name.endswith(".safetensors"):
            continue
        with open(f"{path}/{name}", "rb") as f:
            data = f.read()
        size = struct.unpack("<Q", data[:8])[0]
        for key, t in json.loads(data[8:8 + size]).items():
            if key != "__metadata__":
                a, b = t["data_offsets"]
                assert key not in tensors, f"{key} stands in two files"
                tensors[key] = (t["dtype"], tuple(t["shape"]), data[8 + size + a:8 + size + b])
    return tensors


def write_file(path, data):
    """As savers do: beside it, then renamed over it."""
    temp = path + ".tmp-write"
    with open(temp, "wb") as f:
        f.write(data)
    os.rename(temp, path)


def make_tensors(seed, count=6, rows=64, cols=32):
    """{key: (dtype, shape, bytes)}: names of a small model."""
    tensors = {}
    for i in range(count):
        dtype = ("F32", "BF16", "U8")[i % 3]
        n = rows * cols * SIZES[dtype]
        tensors[f"model.layers.{i}.mlp.weight"] = (dtype, (rows, cols), tensor_bytes((seed, i).__repr__(), n))
    return tensors


def tiles_source(t, rows, cols, tile, shape, left_out=()):
    """An array of many tiles in one file (zarr 3, a shard), whose edges are cut: its bytes."""
    numbers, data, index = random.Random(3), bytearray(), b""
    whole = [bytearray(4 * shape[1]) for _ in range(shape[0])]
    for n in range(rows * cols):
        top, left = n // cols * tile[0], n % cols * tile[1]
        if n in left_out:
            index += b"\xff" * 16
            continue
        index += struct.pack("<QQ", len(data), 4 * tile[0] * tile[1])
        for y in range(top, top + tile[0]):
            row = numbers.randbytes(4 * tile[1])
            data += row
            if y < shape[0]:
                end = min(left + tile[1], shape[1])
                whole[y][4 * left:4 * end] = row[:4 * (end - left)]
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    shard = {"chunk_shape": list(tile), "codecs": [little], "index_codecs": [little], "index_location": "end"}
    about = {"zarr_format": 3, "node_type": "array", "shape": list(shape), "data_type": "float32", "fill_value": 0.0, "attributes": {},
             "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [rows * tile[0], cols * tile[1]]}},
             "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}, "codecs": [{"name": "sharding_indexed", "configuration": shard}]}
    os.makedirs(t + "/src/w/c/0")
    write_file(t + "/src/zarr.json", json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode())
    write_file(t + "/src/w/zarr.json", json.dumps(about).encode())
    write_file(t + "/src/w/c/0/0", bytes(data) + index)
    return b"".join(whole)


def write_checkpoint(path, tensors, shards=2, config=True):
    """A Hugging Face directory: numbered shards, their index, a config."""
    os.makedirs(path, exist_ok=True)
    keys, index = list(tensors), {}
    for s in range(shards):
        name = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        part = {k: tensors[k] for k in keys[s::shards]}
        write_file(os.path.join(path, name), safetensors_image(part))
        index.update({k: name for k in part})
    if config:
        write_file(os.path.join(path, "config.json"), b'{"model_type": "llama"}\n')
    total = sum(len(t[2]) for t in tensors.values())
    body = {"metadata": {"total_size": total}, "weight_map": index}
    write_file(os.path.join(path, "model.safetensors.index.json"), json.dumps(body).encode())


def read_all(path):
    with open(path, "rb") as f:
        return f.read()


def same(what, got, want):
    if got != want:
        if isinstance(got, bytes) and isinstance(want, bytes) and len(got) + len(want) > 200:
            at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
            raise AssertionError(f"{what}: {len(got)} bytes, want {len(want)}; they differ at byte {at}")
        raise AssertionError(f"{what}: got {brief(got)}, want {brief(want)}")


def brief(value, most=4000):
    """As repr(), of which a person still can read the ends."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def fails(what, code, call):
    """call() must fail with this errno."""
    try:
        call()
    except OSError as e:
        same(what + ": errno", errno_name(e.errno), errno_name(code))
        return
    raise AssertionError(f"{what}: succeeded, wanted {errno_name(code)}")


def errno_name(code):
    import errno

    return errno.errorcode.get(code, str(code))


def check_mount(mount, expected):
    """Every view of the mount holds what this expected file says (tests/check_mount.py); what it printed."""
    script = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "check_mount.py")
    done = subprocess.run([sys.executable, script, str(mount), str(expected)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sha256(data):
    return hashlib.sha256(data).hexdigest()


# ---- running ----

@contextlib.contextmanager
def fresh_directory():
    path = tempfile.mkdtemp(prefix="ufs-test-")
    os.chmod(path, 0o755)
    try:
        yield path
    finally:
        with open("/proc/self/mountinfo") as f:
            for line in f:
                point = line.split()[4]
                if point.startswith(path + "/"):
                    unmount_hard(point)
        shutil.rmtree(path, ignore_errors=True)


def run_one(name, test, seconds):
    def too_late(*_):
        raise AssertionError(f"took longer than {seconds} s")

    seconds *= 4 if SANITIZED else 1  # as meson test -t has it
    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(seconds)
    try:
        with fresh_directory() as path:
            test(path)
        print(f"ok - {name}", flush=True)
        return True
    except Skip as e:
        print(f"ok - {name} # SKIP {e}", flush=True)
        return True
    except BaseException:
        traceback.print_exc()
        print(f"not ok - {name}", flush=True)
        return False
    finally:
        signal.alarm(0)


def main(names, seconds=600, fuse=True):
    """All tests of a module, or those that are named; fuse: none can do without a mount."""
    if fuse and not os.access("/dev/fuse", os.F_OK):
        print("1..0 # SKIP no /dev/fuse")
        sys.exit(77)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # behind a shell's & programs would be born ignoring it
    tests = [(n, f) for n, f in names.items() if n.startswith("test_") and (len(sys.argv) < 2 or n in sys.argv[1:])]
    print(f"1..{len(tests)}")
    results = [run_one(n, f, seconds) for n, f in tests]
    sys.exit(0 if all(results) else 1)
