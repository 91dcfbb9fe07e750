#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""`unshard load` and `unshard doctor`."""
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from clientlib import expected  # noqa: E402
from commands import DCP, NO, SOURCE, USAGE, Cli  # noqa: E402
from mountlib import main, make_tensors, same, write_checkpoint  # noqa: E402

GPU = os.path.exists("/dev/nvidiactl")


def test_load_into_the_host(t):
    cli, total = Cli(t), len(expected(DCP))
    out = cli.run("load", DCP, "--device", "cpu", "--time").stdout
    assert re.fullmatch(rf"{total} tensors, \S+ \S+ \(\d+ bytes\) into cpu in \d+\.\d{{3}} s, \d+\.\d\d GB/s\n", out), out
    got = cli.json("load", DCP, "model.emb.*", "--device", "cpu")
    same("one", (got["device"], got["tensors"], got["faults"]), ("cpu", 1, 0))
    listed = next(r for r in cli.json("ls", DCP)["tensors"] if r["key"] == "model.emb.weight")
    same("its bytes", got["bytes"], listed["bytes"])
    half = cli.json("load", DCP, "model.emb.*", "--device", "cpu", "-o", "dtype=bf16")
    same("cast", 2 * half["bytes"], got["bytes"])


def test_load_without_a_device(t):
    if GPU:
        return
    cli = Cli(t)
    done = cli.run("load", DCP)
    assert done.stdout.endswith("into cpu\n") and "libcuda.so.1" in done.stderr and len(done.stderr.splitlines()) == 1, done
    same("quiet", cli.run("load", DCP, "-q").stderr, "")
    cli.error("load", DCP, "--device", "cuda:0", status=SOURCE, words=["libcuda.so.1", "CPU"])


def test_load_refusals(t):
    cli = Cli(t)
    cli.error("load", DCP, "--device", "tpu", status=USAGE, words=["tpu", "cuda:N"])
    cli.error("load", DCP, "--device", "cuda:1x", status=USAGE, words=["cuda:1x"])
    cli.error("load", DCP, "nothing.*", "--device", "cpu", status=SOURCE, words=["no tensor nothing.*"])
    cli.error("load", t + "/nowhere", "--device", "cpu", status=SOURCE, words=["nowhere"])
    cli.error("ls", DCP, "--device", "cpu", status=USAGE, words=["takes no --device"])
    cli.error("cat", DCP, "x", "--time", status=USAGE, words=["takes no --time"])


def test_load_around_a_damaged_tensor(t):
    tensors = make_tensors(5)
    write_checkpoint(t + "/src", tensors)
    shard = t + "/src/model-00002-of-00002.safetensors"
    with open(shard, "r+b") as f:
        f.truncate(os.path.getsize(shard) - 8)
    done = Cli(t).run("load", t + "/src", "--device", "cpu", "--json", status=SOURCE)
    got = json.loads(done.stdout)
    bad = [r for r in Cli(t).json("ls", t + "/src")["tensors"] if r.get("fault")]
    same("tensors", (got["faults"], got["tensors"]), (len(bad), len(tensors) - len(bad)))
    assert bad and len(done.stderr.splitlines()) == len(bad), done.stderr
    assert all(line.startswith("unshard: load: tensor ") for line in done.stderr.splitlines()), done.stderr


def checks(cli, *args, **more):
    return cli.json("doctor", *args, **more)["checks"]


def find(found, what):
    return [c for c in found if c["what"] == what]


def test_doctor(t):
    cli = Cli(t)
    fuse = os.access("/dev/fuse", os.R_OK | os.W_OK)
    found = checks(cli, status=0 if fuse else NO)
    same("fuse", find(found, "fuse")[0]["state"], "ok" if fuse else "problem")
    assert t + "/cache/unshardfs" in find(found, "cache")[0]["text"], found
    assert find(found, "limits") and find(found, "machine"), found
    if not GPU:
        same("gpu", [c["state"] for c in find(found, "gpu")], ["note"])
        assert "libcuda.so.1" in find(found, "gpu")[0]["text"], found
    out = cli.run("doctor", status=0 if fuse else NO).stdout
    assert all(re.match(r"(ok|note|problem) +\w+ +\S", line) for line in out.splitlines()), out


def test_doctor_of_leftovers(t):
    cli = Cli(t)
    os.mkdir(t + "/run")
    same("nothing", [c["state"] for c in find(checks(cli, t + "/run"), "leftovers")], ["ok"])
    os.makedirs(t + "/run/.unshard-staging-step5/data")
    with open(t + "/run/.unshard-staging-step5/journal.1-of-1", "w") as f:
        f.write("unshardfs mount-save host elsewhere boot 1 pid 7\n")
        f.flush()
        left = find(checks(cli, t + "/run"), "staged")
        same("found", [c["state"] for c in left], ["note"])
        assert "host elsewhere" in left[0]["text"] and ".unshard-staging-step5" in left[0]["text"], left
        cli.run("doctor", "--discard", t + "/run", status=NO)
        import fcntl
        fcntl.flock(f, fcntl.LOCK_EX)
        same("being written", [c["state"] for c in find(checks(cli, t + "/run"), "staged")], ["ok"])
        f.truncate(0)
        f.write("unshardfs 1 dcp\n")
        f.flush()
        cli.run("doctor", "--discard", t + "/run")
        assert os.path.exists(t + "/run/.unshard-staging-step5"), "a live conversion was discarded"
    cli.run("doctor", "--discard", t + "/run")
    same("discarded", os.listdir(t + "/run"), [])
    same("no directory", find(checks(cli, t + "/gone", status=NO), "leftovers")[0]["state"], "problem")
    cli.run("doctor", "--discard", status=2)


if __name__ == "__main__":
    main(globals())
