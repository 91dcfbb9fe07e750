#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Mounts with map=, hf= and dtype=: other names and shapes, another model's config and tokenizer beside them."""
import errno
import hashlib
import json
import os
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from mountlib import PATIENCE, Mount, fails, main, read_all, same, wait_for, write_checkpoint, write_file  # noqa: E402

ROWS, COLS = 6, 4


def floats(*values):
    return struct.pack(f"<{len(values)}f", *values)


QKV = floats(*range(ROWS * COLS))
NORM = floats(0.5, 1.0, -2.0)
TENSORS = {"h.0.qkv": ("F32", (ROWS, COLS), QKV), "norm": ("F32", (3,), NORM)}
MAP = {"unshard_map": 1, "rules": [
    {"from": "h.{n}.qkv", "split": {"axis": 0, "parts": [{"to": "m.{n}.q", "rows": "config.q"}, {"to": "m.{n}.kv", "rows": "dim - config.q"}]}},
    {"from": "norm", "to": "m.norm"}]}


def made(t, config=None, map_=None):
    """(checkpoint, map's file)"""
    write_checkpoint(t + "/ckpt", TENSORS)
    if config is not None:
        write_file(t + "/ckpt/config.json", json.dumps(config).encode())
    write_file(t + "/map.json", json.dumps(map_ or MAP).encode())
    return t + "/ckpt", t + "/map.json"


def hf_folder(t, q, name="hf"):
    """What a snapshot of a model holds, weights included."""
    path = f"{t}/{name}"
    os.makedirs(path + "/folder")
    for file, data in {"config.json": json.dumps({"q": q, "from": name}).encode(), "tokenizer.json": b"{}",
                       "model.safetensors": b"not ours", "model.safetensors.index.json": b"{}", "pytorch_model.bin": b"no",
                       "folder/inside": b"x"}.items():
        write_file(f"{path}/{file}", data)
    os.symlink("tokenizer.json", path + "/linked.json")
    return path


def model(path):
    """{key: (dtype, shape, bytes)} of a safetensors file."""
    data = read_all(path)
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], data[8 + size:][slice(*v["data_offsets"])]) for k, v in header.items()}


def mapped(q):
    cut = q * COLS * 4
    return {"m.0.q": ("F32", [q, COLS], QKV[:cut]), "m.0.kv": ("F32", [ROWS - q, COLS], QKV[cut:]), "m.norm": ("F32", [3], NORM)}


def test_map_with_the_checkpoints_config(t):
    ckpt, map_ = made(t, config={"q": 2})
    with Mount(ckpt, t + "/mnt", f"map={map_}") as m:
        same("model.safetensors", model(m / "model.safetensors"), mapped(2))
        same("raw", sorted(os.listdir(m / "raw")), ["m.0.kv", "m.0.q", "m.norm"])
        same("one of them", read_all(m / "raw/m.0.kv"), QKV[2 * COLS * 4:])
        same("config.json", json.loads(read_all(m / "config.json")), {"q": 2})


def is_mapped(path, q):
    """Who has it open while it changes is told that (ESTALE), and looks again."""
    try:
        return model(path) == mapped(q)
    except OSError as e:
        if e.errno != errno.ESTALE:
            raise
        return False


def test_a_changed_config_maps_anew(t):
    ckpt, map_ = made(t, config={"q": 2})
    with Mount(ckpt, t + "/mnt", f"map={map_}") as m:
        same("before", model(m / "model.safetensors"), mapped(2))
        write_file(ckpt + "/config.json", b'{"q": 4}')
        wait_for("the new shapes", PATIENCE, lambda: is_mapped(m / "model.safetensors", 4))
        write_file(ckpt + "/config.json", b'{"q": 7}')  # more than there are
        wait_for("the fault", PATIENCE, lambda: not os.path.exists(m / "model.safetensors"))
        same("error", "is" in read_all(m / ".unshard/checkpoint.json").decode(), True)


def test_hf_lays_files_over(t):
    ckpt, map_ = made(t, config={"q": 3, "own": True})
    hf = hf_folder(t, 2)
    write_file(ckpt + "/notes.txt", b"kept")
    for index in ("model.safetensors.index.json", "model.safetensors.index.fp16.json", "pytorch_model.bin.index.fp16.json"):
        write_file(f"{hf}/{index}", b"{}")
    with Mount(ckpt, t + "/mnt", f"map={map_},hf={hf}") as m:
        same("the numbers of hf=", model(m / "model.safetensors"), mapped(2))
        same("config.json", json.loads(read_all(m / "config.json")), {"q": 2, "from": "hf"})
        same("tokenizer.json", read_all(m / "tokenizer.json"), b"{}")
        same("through a link", read_all(m / "linked.json"), b"{}")
        same("the checkpoint's own", read_all(m / "notes.txt"), b"kept")
        same("top", set(os.listdir(m.path)), {".unshard", "config.json", "linked.json", "model.safetensors", "notes.txt", "raw",
                                              "tensors", "tokenizer.json", "tree"})
        fails("weights of hf=", errno.ENOENT, lambda: os.stat(m / "pytorch_model.bin"))
        same("size", os.stat(m / "config.json").st_size, os.stat(hf + "/config.json").st_size)


def test_hf_alone(t):
    """Without a map: config and tokenizer for tensors as they are."""
    ckpt, _ = made(t)
    with Mount(ckpt, t + "/mnt", f"hf={hf_folder(t, 1)}") as m:
        same("keys", set(model(m / "model.safetensors")), set(TENSORS))
        same("config.json", json.loads(read_all(m / "config.json"))["from"], "hf")


def test_another_map_is_another_index(t):
    """The cache has both, and neither is taken for the other."""
    ckpt, map_ = made(t, config={"q": 2})
    hf1, hf5 = hf_folder(t, 1, "hf1"), hf_folder(t, 5, "hf5")
    cache = t + "/cache"
    for options, want in ((f"map={map_},hf={hf1}", mapped(1)), (f"map={map_},hf={hf5}", mapped(5)), (f"map={map_}", mapped(2)),
                          (f"map={map_},hf={hf1}", mapped(1))):
        with Mount(ckpt, t + "/mnt", options + f",cache_dir={cache}") as m:
            same(options, model(m / "model.safetensors"), want)
    same("indexes", len([f for f in os.listdir(cache + "/index") if f.endswith(".sqlite")]), 3)
    with Mount(ckpt, t + "/mnt", f"cache_dir={cache}") as m:
        same("without", set(model(m / "model.safetensors")), set(TENSORS))


def test_dtype(t):
    ckpt, _ = made(t)
    with Mount(ckpt, t + "/mnt", "dtype=bf16") as m:
        got = model(m / "model.safetensors")
        same("norm", got["norm"], ("BF16", [3], b"".join(floats(v)[2:] for v in (0.5, 1.0, -2.0))))
        same("dtype", os.getxattr(m / "raw/norm", "user.unshard.dtype"), b"BF16")
        same("qkv", got["h.0.qkv"][2], b"".join(floats(v)[2:] for v in range(ROWS * COLS)))
        with open(m / "raw/h.0.qkv", "rb") as f:  # a window that begins within an element
            f.seek(3)
            same("window", f.read(6), got["h.0.qkv"][2][3:9])


def test_dtype_and_map(t):
    ckpt, map_ = made(t, config={"q": 2})
    with Mount(ckpt, t + "/mnt", f"map={map_},dtype=F64") as m:
        got = model(m / "model.safetensors")
        same("norm", got["m.norm"], ("F64", [3], struct.pack("<3d", 0.5, 1.0, -2.0)))
        same("kv", got["m.0.kv"], ("F64", [4, COLS], struct.pack("<16d", *range(8, 24))))


def test_torchtitan(t):
    """Its models under the names, and with the bytes, that its own adapter for transformers gives."""
    data = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "torch_dcp")
    names = sorted(f[:-len(".mapped.json")] for f in os.listdir(data) if f.endswith(".mapped.json"))
    assert len(names) >= 5, names
    for name in names:
        with open(f"{data}/{name}.mapped.json") as f:
            want = json.load(f)
        os.makedirs(f"{t}/{name}")
        write_file(f"{t}/{name}/config.json", json.dumps(want["config"]).encode())
        with Mount(f"{data}/{name}", t + "/mnt", f"map=torchtitan-to-hf,hf={t}/{name}") as m:
            got = {k: {"dtype": dtype, "shape": shape, "sha256": hashlib.sha256(b).hexdigest()}
                   for k, (dtype, shape, b) in model(m / "model.safetensors").items()}
            same(f"{name}: names", sorted(got), sorted(want["tensors"]))
            for key, told in want["tensors"].items():
                same(f"{name}: {key}", got[key], told)
            same(f"{name}: warnings", json.loads(read_all(m / ".unshard/checkpoint.json"))["warnings"], [])


if __name__ == "__main__":
    main(globals())
