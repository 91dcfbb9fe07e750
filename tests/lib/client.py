#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""python/unshard on checkpoints: what it loads, what it refuses, and what it leaves alone in its process."""
import os
import shutil
import subprocess
import sys
import threading
import warnings

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from clientlib import DATA, bits, cut, data_of, expected  # noqa: E402
import unshard  # noqa: E402
from mountlib import PATIENCE, main, make_tensors, same, sha256, tiles_source, wait_for, write_checkpoint  # noqa: E402
from fault_server import Server  # noqa: E402

DCP = os.path.join(DATA, "torch_dcp", "dcp_fsdp2_adamw_2r")
FIXTURES = ["torch_dcp/dcp_fsdp2_adamw_2r", "torch_dcp/dcp_layouts", "torch_dcp/dcp_mesh_2x2", "torch_dcp/dcp_zstd_2r",
            "safetensors/hf_safetensors_dtypes", "torch_file/pt_zip_big_endian", "torch_file/deflated", "nemo/nemo_plain",
            "zarr/zarr2_arrays", "gguf/gguf_plain"]


def start(t, source=DCP, **options):
    return unshard.open(source, cache_dir=t + "/cache", **options)


def fails(kind, words, fn):
    try:
        fn()
    except kind as e:
        for word in [words] if isinstance(words, str) else words:
            assert word in str(e), f"{e!r} does not say {word!r}"
        return e
    raise AssertionError(f"no {kind.__name__}")


def test_every_tensor_of_fixtures(t):
    count = 0
    for name in FIXTURES:
        source = os.path.join(DATA, name)
        with start(t, source) as c:
            want = expected(source)
            same(name, sorted(c.keys()), sorted(want))
            for key, w in want.items():
                info = c.info(key)
                same(key, (info.dtype, list(info.shape)), (w["dtype"], w["shape"]))
                same(f"{name} {key}", sha256(data_of(c.load(key, to="dlpack"))), w["sha256"])
                count += 1
    assert count > 150, count


def test_boxes(t):
    """Of everything: the middle of each dimension, one row, each rank's share of each dimension, nothing."""
    for name in ("torch_dcp/dcp_fsdp2_adamw_2r", "torch_dcp/dcp_layouts", "torch_dcp/dcp_zstd_2r", "torch_file/pt_zip_big_endian"):
        with start(t, os.path.join(DATA, name)) as c:
            for key in c.keys():
                check_boxes(c, key)


def test_boxes_of_many_chunks(t):
    want = tiles_source(t, 40, 60, (3, 5), (118, 298), left_out=range(100, 2400, 171))
    with start(t, t + "/src") as c:
        same("whole", data_of(c.load("w", to="dlpack")), want)
        check_boxes(c, "w")


def check_boxes(c, key):
    info = c.info(key)
    whole, unit, shape = data_of(c.load(key, to="dlpack")), bits(info.dtype) // 8, info.shape
    for dim, n in enumerate(shape):
        for first, end in {(n // 3, n - n // 3), (0, 1), (n, n)}:
            index = tuple(slice(None) if k != dim else slice(first, end) for k in range(len(shape)))
            begin = [first if k == dim else 0 for k in range(len(shape))]
            count = [max(min(end, n) - first, 0) if k == dim else shape[k] for k in range(len(shape))]
            got = c.load(key, slice=index, to="dlpack")
            same("shape", list(got.shape), count)
            same(f"{key} {index}", data_of(got), cut(whole, unit, shape, begin, count))
        for rank in range(3):
            each = -(-n // 3)
            begin = [min(rank * each, n) if k == dim else 0 for k in range(len(shape))]
            count = [min(each, n - begin[k]) if k == dim else shape[k] for k in range(len(shape))]
            got = c.load(key, tp=(rank, 3, dim - len(shape)), to="dlpack")
            same(f"{key} rank {rank} of dimension {dim}", data_of(got), cut(whole, unit, shape, begin, count))


def test_indices(t):
    with start(t) as c:
        key = "model.emb.weight"
        shape = c.info(key).shape
        whole = data_of(c.load(key, to="dlpack"))
        one = c.load(key, slice=(-1, Ellipsis), to="dlpack")
        same("an integer takes its dimension away", (one.shape, data_of(one)), (shape[1:], whole[-4 * shape[1]:]))
        same("a number", data_of(c.load(key, slice=(2, 3), to="dlpack")), whole[4 * (2 * shape[1] + 3):][:4])
        fails(IndexError, "step", lambda: c.load(key, slice=slice(0, 4, 2)))
        fails(IndexError, "3 indices", lambda: c.load(key, slice=(0, 0, 0)))
        fails(IndexError, "index 9999", lambda: c.load(key, slice=9999))
        fails(ValueError, "tp=(3, 3, 0)", lambda: c.load(key, tp=(3, 3, 0)))
        fails(ValueError, "not both", lambda: c.load(key, slice=0, tp=(0, 1, 0)))


def test_casts(t):
    """The same as `unshard cat -o dtype=` gives."""
    with start(t) as c:
        for spelling, name in (("bf16", "BF16"), ("float16", "F16"), ("F64", "F64"), ("f8_e4m3", "F8_E4M3")):
            want = subprocess.run([os.environ["UNSHARD"], "cat", DCP, "model.emb.weight", "-o", f"dtype={name}"], check=True,
                                  stdout=subprocess.PIPE, env={**os.environ, "XDG_CACHE_HOME": t + "/c"}).stdout
            got = c.load("model.emb.weight", dtype=spelling, to="dlpack")
            same(spelling, (got.dtype, data_of(got)), (name, want))
        fails(ValueError, "int3", lambda: c.load("model.emb.weight", dtype="int3"))
        fails(unshard.Error, "I32", lambda: c.load("model.emb.weight", dtype="int32", to="dlpack"))


def test_scales(t):
    """A factor for all, one a row, one a tile of 2 x 3."""
    import array
    with start(t) as c:
        key = "model.emb.weight"
        rows, columns = c.info(key).shape
        plain = array.array("f", data_of(c.load(key, to="dlpack")))
        for block, grid in (((0, 0), (1, 1)), ((1, 0), (rows, 1)), ((2, 3), (-(-rows // 2), -(-columns // 3)))):
            values = [2.0 ** (n % 5 - 2) for n in range(grid[0] * grid[1])]
            got = array.array("f", data_of(c.load(key, scale=(values, block), to="dlpack")))
            want = array.array("f", (plain[r * columns + k] * values[(r // block[0] if block[0] else 0) * grid[1]
                                                                     + (k // block[1] if block[1] else 0)]
                                     for r in range(rows) for k in range(columns)))
            same(f"blocks of {block}", got.tobytes(), want.tobytes())
        fails(unshard.Error, "", lambda: c.load(key, scale=([1.0, 2.0], (0, 0)), to="dlpack"))
        for block in ((), (0,), (0, 0, 0)):
            fails(ValueError, "one a dimension", lambda block=block: c.load(key, scale=([1.0], block), to="dlpack"))


def test_many(t):
    seen = []
    with start(t) as c:
        model = c.load_many(to="dlpack", progress=lambda done, total: seen.append((done, total)))
        same("the model", sorted(model), sorted(k for k in c if c.info(k).role == "model"))
        for key, array in model.items():
            same(key, data_of(array), data_of(c.load(key, to="dlpack")))
        total = sum(a.nbytes for a in model.values())
        same("progress", seen[-1], (total, total))
        some = c.load_many("model.emb.*", to="dlpack", tp={"model.emb.weight": (1, 2, 0)}, dtype="bf16")
        same("one rank's", some["model.emb.weight"].shape[0], c.info("model.emb.weight").shape[0] // 2)
        same("cast", some["model.emb.weight"].dtype, "BF16")
        fails(KeyError, "nothing.*", lambda: c.load_many("nothing.*"))

        def stop(done, total):
            raise KeyboardInterrupt("enough")
        fails(KeyboardInterrupt, "enough", lambda: c.load_many(to="dlpack", progress=stop))


def test_errors(t):
    fails(unshard.Error, "nowhere", lambda: start(t, t + "/nowhere"))
    os.makedirs(t + "/empty")
    fails(unshard.Error, "no checkpoint", lambda: start(t, t + "/empty"))
    fails(unshard.Error, "no-such-map", lambda: start(t, map="no-such-map"))
    fails(TypeError, "colour", lambda: start(t, colour=1))
    c = start(t)
    fails(KeyError, "nothing", lambda: c.load("nothing"))
    fails(ValueError, "device 'tpu'", lambda: c.load("model.emb.weight", device="tpu"))
    fails(ValueError, "to='jax'", lambda: c.load("model.emb.weight", to="jax"))
    e = fails(unshard.Error, "libcuda.so.1", lambda: c.load("model.emb.weight", device="cuda:0", to="dlpack")) \
        if not os.path.exists("/dev/nvidiactl") else None
    same("errno", e and e.errno, e and 19)
    c.close()
    fails(ValueError, "closed", lambda: c.load("model.emb.weight"))


def test_auto_says_when_it_falls_back(t):
    if os.path.exists("/dev/nvidiactl"):
        return
    with start(t) as c, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        same("device", c.load("model.emb.weight", device="auto", to="dlpack").device, "cpu")
        assert len(seen) == 1 and "to the host" in str(seen[0].message) and "libcuda" in str(seen[0].message), seen


def test_a_damaged_tensor(t):
    """It is told, and refused; the others are there."""
    tensors = make_tensors(5)
    write_checkpoint(t + "/src", tensors)
    shard = t + "/src/model-00002-of-00002.safetensors"
    with open(shard, "r+b") as f:
        f.truncate(os.path.getsize(shard) - 8)
    with start(t, t + "/src") as c:
        bad = [k for k in c if c.info(k).fault]
        assert 0 < len(bad) < len(tensors), bad
        fails(unshard.Error, bad[0], lambda: c.load(bad[0], to="dlpack"))
        good = next(k for k in c if not c.info(k).fault)
        same("another", data_of(c.load(good, to="dlpack")), tensors[good][2])


def test_a_shard_that_changes(t):
    """Never a mixture: what was opened is refused once a shard is another."""
    write_checkpoint(t + "/src", make_tensors(3))
    with start(t, t + "/src") as c:
        key = c.keys()[0]
        shard = next(os.path.join(t, "src", n) for n in sorted(os.listdir(t + "/src")) if n.endswith(".safetensors"))
        key = next(k for k in c if k in open_text(shard))
        c.load(key, to="dlpack")
        shutil.copy(shard, shard + ".new")
        os.rename(shard + ".new", shard)
        os.utime(shard, (1, 1))
        fails(unshard.Error, os.path.basename(shard), lambda: c.load(key, to="dlpack"))


def open_text(path):
    with open(path, "rb") as f:
        return f.read(4096).decode("latin-1")


def test_from_a_web_server(t):
    """Only the ranges of what is asked for are fetched; connections and threads end with it."""
    with Server(os.path.dirname(DCP)) as s:
        before = len(os.listdir("/proc/self/task"))
        with start(t, f"{s.url}/dcp_fsdp2_adamw_2r") as c:
            for key, want in expected(DCP).items():
                same(key, sha256(data_of(c.load(key, to="dlpack"))), want["sha256"])
            same("rows", data_of(c.load("model.emb.weight", slice=slice(1, 3), to="dlpack")),
                 data_of(unshard.load(DCP, "model.emb.weight", slice=slice(1, 3), to="dlpack")))
        del c
        wait_for("threads end", PATIENCE, lambda: len(os.listdir("/proc/self/task")) <= before + 1)  # the server's may come


def test_what_a_server_sent_is_kept(t):
    """In the cache that mounts and commands have, so that nothing is fetched twice; or, if told so, not on disk."""
    def load_all(s, **options):
        with unshard.open(f"{s.url}/dcp_fsdp2_adamw_2r", **options) as c:
            for key, want in expected(DCP).items():
                same(key, sha256(data_of(c.load(key, to="dlpack"))), want["sha256"])
        return len(s.log(r"\.distcp$", "GET"))

    with Server(os.path.dirname(DCP)) as s:
        assert load_all(s, cache_dir=t + "/cache") > 0
        s.forget()
        same("asked again", load_all(s, cache_dir=t + "/cache"), 0)
        assert load_all(s, cache_dir=t + "/none", cache_size=0) > 0
        same("index, blocks", [os.path.exists(f"{t}/none/{name}") for name in ("index", "blocks")], [True, False])
        load_all(s, cache_dir=t + "/memory", index_memory=True)
        same("nothing is written", os.path.exists(t + "/memory"), False)


def test_a_guest_of_a_server(t):
    """Threads that fetch and keep take no signal of the program's, and are gone in the end."""
    code = f"""if True:
        import os, signal, sys, threading
        threading.Thread(target=str).start()  # as below
        sys.path[:0] = {sys.path[:8]!r}
        import unshard
        unshard.version()
        def status(task):
            with open(f"/proc/self/task/{{task}}/status") as f:
                return dict(line.split(":", 1) for line in f)
        def state():
            own = status(os.getpid())
            return own["SigCgt"], own["SigIgn"], own["SigBlk"], os.listdir("/proc/self/task")
        before = state()
        with unshard.open(sys.argv[1], cache_dir={t + "/cache"!r}) as c:
            c.load_many(to="dlpack")
            tasks = set(os.listdir("/proc/self/task")) - {{str(os.getpid())}}
            blocked = [int(status(task)["SigBlk"], 16) >> (signal.SIGUSR1 - 1) & 1 for task in tasks]
            assert blocked and all(blocked), blocked
        del c
        assert before == state(), (before, state())
        """
    with Server(os.path.dirname(DCP)) as s:
        done = subprocess.run([sys.executable, "-c", code, f"{s.url}/dcp_fsdp2_adamw_2r"], capture_output=True, text=True, timeout=600)
    same("status, words", (done.returncode, done.stdout, done.stderr), (0, "", ""))


def test_threads(t):
    with start(t) as c:
        want = {k: data_of(c.load(k, to="dlpack")) for k in c}
        wrong = []

        def work(keys):
            for key in keys:
                if data_of(c.load(key, to="dlpack")) != want[key]:
                    wrong.append(key)
        threads = [threading.Thread(target=work, args=(list(want)[n::2] * 3,)) for n in range(2)] * 1
        threads += [threading.Thread(target=work, args=(list(want),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        same("wrong", wrong, [])


def test_memory_outlives_its_checkpoint(t):
    c = start(t)
    array = c.load("model.emb.weight", to="dlpack")
    capsule = array.__dlpack__()
    want = data_of(array)
    same("device", array.__dlpack_device__(), (1, 0))
    c.close()
    del c
    same("after close", data_of(array), want)
    del capsule  # that nobody took
    same("after the capsule", data_of(array), want)


def test_a_guest_in_its_process(t):
    """No thread, descriptor, handler of signals or word is left; a fork is refused."""
    code = f"""if True:
        import os, sys, threading
        threading.Thread(target=str).start()  # the first one of a process lets libc handle a signal of its own
        sys.path[:0] = {sys.path[:8]!r}
        import unshard
        unshard.version()
        def state():
            with open("/proc/self/status") as f:
                status = dict(line.split(":", 1) for line in f)
            return status["SigCgt"], status["SigIgn"], status["SigBlk"], len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        before = state()
        with unshard.open({DCP!r}, cache_dir={t + "/cache"!r}) as c:
            c.load_many(to="dlpack")
            try:
                unshard.open("/nowhere")
            except unshard.Error:
                pass
            pid = os.fork()
            if pid == 0:
                try:
                    c.load("model.emb.weight")
                except RuntimeError as e:
                    os._exit("fork" in str(e) and 7)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            c.load("model.emb.weight", to="dlpack")
        del c
        after = state()
        assert before == after, (before, after)
        """
    # Python 3.12 warns of every fork() with threads.
    done = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", code], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "UNSHARD_LOG": "debug"})
    same("status, words", (done.returncode, done.stdout, done.stderr), (0, "", ""))


def test_the_library_exports_nothing_else(t):
    names = subprocess.run(["nm", "-D", "--defined-only", os.environ["UNSHARD_LIBRARY"]], capture_output=True, text=True,
                           check=True).stdout.split("\n")
    symbols = {line.split()[-1].split("@")[0] for line in names if line and " A " not in line}
    assert len(symbols) == 15 and all(s.startswith("unshard_") for s in symbols), symbols


if __name__ == "__main__":
    main(globals())
