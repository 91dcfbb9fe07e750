#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""unshard convert as scripts see it: options, statuses, one-line errors; killed and run again; shared by parts."""
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from commands import DATA, DCP, DONE, ROOM, SOURCE, USAGE, Cli, main, same, sha256  # noqa: E402
from mountlib import UNSHARD  # noqa: E402

HF = os.path.join(DATA, "safetensors", "hf_sharded_f32")
FORMATS = ["hf", "dcp", "dcp-hf", "pt", "npz"]


def tree(path):
    """{name: hash} of all files below."""
    found = {}
    for root, _, files in os.walk(path):
        for f in files:
            full = os.path.join(root, f)
            with open(full, "rb") as data:
                found[os.path.relpath(full, path)] = sha256(data.read())
    assert found, f"{path} is empty"
    return found


def big_source(path, tensors=24, mib=8):
    """One safetensors file of `tensors` tensors of `mib` MiB, and side files."""
    os.makedirs(path)
    header, at = {}, 0
    for i in range(tensors):
        header[f"layers.{i}.weight"] = {"dtype": "U8", "shape": [mib * 1024 + i, 1024], "data_offsets": [at, at + (mib * 1024 + i) * 1024]}
        at += (mib * 1024 + i) * 1024
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    rnd = random.Random(1)
    with open(path + "/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for i in range(tensors):
            f.write(rnd.randbytes((mib * 1024 + i) * 1024))
    with open(path + "/notes.bin", "wb") as f:
        f.write(rnd.randbytes(3 << 20))
    return path


def staging(dest):
    return os.path.join(os.path.dirname(dest), ".unshard-staging-" + os.path.basename(dest))


def test_formats(t):
    """Each format is whole, twice the same bytes, and has the side files."""
    cli = Cli(t)
    for to in FORMATS:
        cli.run("convert", HF, f"{t}/{to}", "--to", to)
        cli.run("verify", f"{t}/{to}", "--deep")
        cli.run("convert", HF, f"{t}/{to}2", "--to", to)
        same(f"{to} twice", tree(f"{t}/{to}"), tree(f"{t}/{to}2"))
        same("config.json", tree(f"{t}/{to}")["config.json"], tree(HF)["config.json"])
        same("staging", os.path.exists(staging(f"{t}/{to}")), False)
    same("what lies there", sorted(os.listdir(f"{t}/dcp")),
         sorted([".metadata", "__0_0.distcp", *(f for f in os.listdir(HF) if "model" not in f)]))


def test_a_save_that_is_not_done_is_not_listed(t):
    cli = Cli(t)
    os.makedirs(t + "/run/.unshard-staging-new")
    shutil.copytree(DCP, t + "/run/.unshard-staging-new/data")
    shutil.copytree(DCP, t + "/run/old")
    same("stands for the run", "tensors" in cli.json("ls", t + "/run"), True)
    shutil.copytree(DCP, t + "/run/older")
    same("listed", [c["path"] for c in cli.json("ls", t + "/run")["checkpoints"]], ["old", "older"])
    same("verified", [line.split(":")[0] for line in cli.run("verify", t + "/run").stdout.splitlines()], ["old", "older"])


def test_pickles_of_olmo_stay_in_one_piece(t):
    """They are objects too, which only what lies in one piece can be."""
    cli = Cli(t)
    source = DATA + "/olmo_v0/v00-may7-model-optim-w1"
    cli.run("convert", source, t + "/new", "--to", "olmo", "--ranks", "8")
    cli.run("diff", source, t + "/new")


def test_a_tensor_without_a_name(t):
    cli = Cli(t)
    source = DATA + "/torch_file/pt_zip_bare_tensor"
    for to in ("npz", "hf", "dcp", "pt"):
        cli.run("convert", source, f"{t}/{to}", "--to", to, "--drop", "objects")
        same(to, cli.run("diff", source, f"{t}/{to}", "--drop", "objects").stdout, "1 tensors identical\n")


def test_ranks(t):
    cli = Cli(t)
    cli.run("convert", DCP, t + "/r5", "--to", "dcp", "--ranks", "5")
    same("files", sum(f.endswith(".distcp") for f in os.listdir(t + "/r5")), 5)
    same("ranks", cli.json("info", t + "/r5")["topology"]["ranks"], 5)
    cli.run("convert", t + "/r5", t + "/mesh", "--to", "dcp", "--mesh", "3x2")
    same("ranks of the mesh", cli.json("info", t + "/mesh")["topology"]["ranks"], 6)
    cli.run("convert", t + "/mesh", t + "/r5again", "--to", "dcp", "--ranks", "5")
    same("there and back", tree(t + "/r5again"), tree(t + "/r5"))
    cli.run("convert", HF, t + "/shards", "--to", "hf", "--max-shard-size", "40K")
    assert sum(f.endswith(".safetensors") for f in os.listdir(t + "/shards")) > 2
    cli.run("convert", t + "/shards", t + "/sharded", "--to", "dcp-hf", "--ranks", "4", "--max-shard-size", "40KB")
    cli.run("convert", t + "/sharded", t + "/one", "--to", "hf")
    cli.run("convert", HF, t + "/direct", "--to", "hf")
    same("one file", tree(t + "/one")["model.safetensors"], tree(t + "/direct")["model.safetensors"])


def test_jobs(t):
    cli = Cli(t)
    for jobs in "1", "7":
        cli.run("convert", DCP, t + "/" + jobs, "--to", "dcp", "--ranks", "3", "--jobs", jobs)
    same("any number of threads", tree(t + "/1"), tree(t + "/7"))


def test_choice(t):
    """--only, --drop, --dtype, and what is refused without them."""
    cli = Cli(t)
    cli.error("convert", DCP, t + "/a", "--to", "hf", status=USAGE, words=["hf cannot hold", "optimizer", "--drop"])
    same("nothing was made", os.listdir(t), [n for n in os.listdir(t) if n == "cache"])
    cli.run("convert", DCP, t + "/a", "--to", "hf", "--drop", "optimizer,objects")
    roles = {x["role"] for x in cli.json("ls", t + "/a")["tensors"]}
    same("roles", roles, {"model"})
    cli.run("convert", DCP, t + "/b", "--to", "dcp", "--only", "model.emb.*", "--drop", "objects")
    same("keys", [x["key"] for x in cli.json("ls", t + "/b")["tensors"]], ["model.emb.weight"])
    cli.error("convert", DCP, t + "/c", "--to", "dcp", "--only", "nothing*", status=SOURCE, words=["no tensor is left"])
    cli.run("convert", HF, t + "/d", "--to", "dcp", "--dtype", "bf16")
    same("dtypes", {x["dtype"] for x in cli.json("ls", t + "/d")["tensors"]}, {"BF16"})


def test_usage(t):
    cli = Cli(t)
    for words, args in {
        "--to": [],
        "no format that is written": ["--to", "word"],
        "--ranks": ["--to", "dcp", "--ranks", "0"],
        "ranks along": ["--to", "dcp", "--mesh", "3"],
        "--mesh=3x": ["--to", "dcp", "--mesh", "3x"],
        "are not written": ["--to", "dcp", "--mesh", "1000x1000"],
        "--max-shard-size": ["--to", "hf", "--max-shard-size", "lots"],
        "no shard size": ["--to", "dcp", "--max-shard-size", "5GB"],
        "whole tensors": ["--to", "pt", "--ranks", "4"],
        "--drop=nonsense": ["--to", "hf", "--drop", "nonsense"],
        "I/N": ["--to", "hf", "--part", "3/2"],
        "--part=0/2": ["--to", "hf", "--part", "0/2"],
        "either a part": ["--to", "hf", "--part", "1/2", "--finish"],
    }.items():
        cli.error("convert", HF, t + "/x", *args, status=USAGE, words=[words])
    cli.error("convert", t + "/none", t + "/x", "--to", "hf", status=SOURCE, words=["none"])
    same("nothing was made", [n for n in os.listdir(t) if n != "cache"], [])


def test_destination(t):
    cli = Cli(t)
    os.mkdir(t + "/full")
    open(t + "/full/theirs", "w").close()
    cli.error("convert", HF, t + "/full", "--to", "hf", status=USAGE, words=["is there already"])
    same("theirs", os.listdir(t + "/full"), ["theirs"])
    open(t + "/file", "w").close()
    cli.error("convert", HF, t + "/file", "--to", "hf", status=USAGE, words=["as a file"])
    os.mkdir(t + "/empty")
    cli.run("convert", HF, t + "/empty", "--to", "hf")
    assert os.path.exists(t + "/empty/model.safetensors")
    cli.error("convert", HF, t + "/none/x", "--to", "hf", status=SOURCE, words=["none"])


def test_faulty_source(t):
    """A tensor that cannot be read stops it before anything is made."""
    shutil.copytree(DCP, t + "/src")
    os.unlink(t + "/src/__1_0.distcp")
    cli = Cli(t)
    cli.error("convert", "-q", t + "/src", t + "/x", "--to", "dcp", status=SOURCE, words=["__1_0.distcp is missing", "--incomplete"])
    same("nothing was made", sorted(os.listdir(t)), ["cache", "src"])


def kill_at(cli, seconds, args):
    """Starts it and kills it after so long; was it still running?"""
    env = {**os.environ, "XDG_CACHE_HOME": cli.cache}
    p = subprocess.Popen([UNSHARD, *args], env=env, stderr=subprocess.DEVNULL)
    try:
        p.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        p.send_signal(signal.SIGKILL)
        p.wait()
        return True


def test_killed(t):
    """kill -9 at many moments, then the same command: the same bytes, and DEST is there whole or not at all."""
    cli, src, dest = Cli(t), big_source(t + "/src"), t + "/dest"
    for to, more in ("dcp", ["--ranks", "3"]), ("pt", []):
        args = ["convert", src, dest, "--to", to, *more, "--jobs", "2"]
        start = time.monotonic()
        cli.run("convert", src, t + "/want", "--to", to, *more)
        whole, want, killed = time.monotonic() - start, tree(t + "/want"), 0
        for i in range(40):
            if i >= 8 and killed >= 4:
                break
            if i >= 8:  # the first one took longer than they do
                whole /= 1.2
            shutil.rmtree(dest, ignore_errors=True)
            for k in range(1 + i % 3):
                if kill_at(cli, whole * (i % 8 + 1) * (k + 1) / 12, args):
                    killed += 1
                    if os.path.exists(dest):
                        same("published whole", tree(dest), want)
                        break
                else:
                    break
            if not os.path.exists(dest):
                cli.run(*args)
            same(f"{to} after a kill", tree(dest), want)
        assert killed >= 4, f"only {killed} kills came in time"
        shutil.rmtree(dest)
        shutil.rmtree(t + "/want")


def test_half_side_file(t):
    """A side file that a kill left half-written is written anew."""
    cli, dest = Cli(t), t + "/dest"
    os.makedirs(staging(dest) + "/data")
    with open(staging(dest) + "/data/config.json", "w") as f:
        f.write("{")
    cli.run("convert", HF, dest, "--to", "hf")
    same("config.json", tree(dest)["config.json"], tree(HF)["config.json"])


def test_other_save_staged(t):
    """What is staged there is of another source or of other options: refused, and left alone."""
    cli, src, dest = Cli(t), big_source(t + "/src"), t + "/dest"
    args = ["convert", src, dest, "--to", "dcp", "--ranks", "3"]
    wait = 0.002
    while not os.path.exists(staging(dest) + "/data/__0_0.distcp"):
        shutil.rmtree(dest, ignore_errors=True)
        shutil.rmtree(staging(dest), ignore_errors=True)
        kill_at(cli, wait, args)
        wait *= 1.3
        if os.path.exists(dest):
            wait = 0.002
    before = sorted(os.listdir(staging(dest)))
    cli.error("convert", src, dest, "--to", "dcp", "--ranks", "4", status=USAGE, words=["holds another save"])
    cli.error("convert", HF, dest, "--to", "dcp", "--ranks", "3", status=USAGE, words=["holds another save"])
    same("what is staged", sorted(os.listdir(staging(dest))), before)
    os.utime(src + "/model.safetensors", ns=(1, 1))
    cli.error(*args, status=USAGE, words=["holds another save"])


def test_two_processes(t):
    """Of two that write the same one is refused, or comes when all is done; the result is whole."""
    cli, src, dest = Cli(t), big_source(t + "/src"), t + "/dest"
    args = [UNSHARD, "convert", src, dest, "--to", "dcp", "--ranks", "3"]
    env = {**os.environ, "XDG_CACHE_HOME": cli.cache}
    both = [subprocess.Popen(args, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [p.communicate(timeout=600)[1] for p in both]
    same("statuses", sorted(p.returncode for p in both), [DONE, USAGE])
    assert any("another process" in e or "is there already" in e for e in errors), errors
    cli.run("convert", src, t + "/want", "--to", "dcp", "--ranks", "3")
    same("the files", tree(dest), tree(t + "/want"))


def test_parts(t):
    """Parts in any order, at once, killed and run again; --finish makes what one run makes."""
    cli, src, dest = Cli(t), big_source(t + "/src"), t + "/dest"
    for to, more in ("dcp", ["--ranks", "5"]), ("hf", ["--max-shard-size", "20M"]):
        args = ["convert", src, dest, "--to", to, *more]
        cli.run("convert", src, t + "/want", "--to", to, *more)
        cli.error(*args, "--finish", status=USAGE, words=["nothing to finish"])
        cli.run(*args, "--part", "2/3")
        cli.error(*args, "--finish", status=USAGE, words=["part 1 of 3 has not begun"])
        kill_at(cli, 0.03, [*args, "--part", "3/3"])
        both = [threading.Thread(target=cli.run, args=(*args, "--part", f"{i}/3")) for i in (1, 3)]
        [x.start() for x in both]
        [x.join() for x in both]
        same("not published", os.path.exists(dest), False)
        cli.run(*args, "--part", "1/3")  # again: nothing to do
        cli.run(*args, "--finish")
        same(f"{to} in parts", tree(dest), tree(t + "/want"))
        cli.error(*args, "--finish", status=USAGE, words=["is there already"])
        shutil.rmtree(dest)
        shutil.rmtree(t + "/want")


def test_no_room(t):
    """Told before anything is written."""
    if os.geteuid() != 0:
        return
    src, small = big_source(t + "/src", tensors=4), t + "/small"
    os.mkdir(small)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", small], capture_output=True).returncode:
        return
    try:
        cli = Cli(t)
        cli.error("convert", src, small + "/x", "--to", "hf", status=ROOM, words=["are needed", "are free"])
        same("nothing is published", os.path.exists(small + "/x"), False)
    finally:
        subprocess.run(["umount", small], check=True)


if __name__ == "__main__":
    main(globals())
