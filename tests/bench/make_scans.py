#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes checkpoints of many small pieces, one a kind that is scanned in a way of its own; without torch.

    make_scans.py KIND DIR COUNT      prints how many chunks there are

verl: 64 ranks' files of DTensors. universal: DeepSpeed's universal checkpoint, a file a tensor and state. gguf: tensors, and
half as many words again in the tokenizer's list. flax: a msgpack of arrays. nemo, nemo-gz: a .nemo archive of zarr arrays, a
member a chunk. zarr: the same arrays as a directory. Tensors have few bytes, or are holes: a scan reads what stands around them.
"""
import io
import json
import os
import pickle
import struct
import sys
import tarfile
import zipfile

import make_metadata as torch_like

RANKS, ARRAYS = 64, 80
define = torch_like.define
OrderedDict = define("collections", "OrderedDict")
Storage = define("torch", "FloatStorage")


def function(module, name):
    """A global that is called when it is unpickled."""
    made = define(module, name)
    return lambda *arguments: Call(made, arguments)


class Call:
    def __init__(self, made, arguments):
        self.reduced = made, arguments

    def __reduce__(self):
        return self.reduced


class Stored:
    """A storage: pickled as torch.save does, as a persistent id."""

    def __init__(self, key, elements):
        self.id = "storage", Storage, str(key), "cpu", elements


class Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return obj.id if isinstance(obj, Stored) else None


ordered_dict = function("collections", "OrderedDict")
rebuild_tensor = function("torch._utils", "_rebuild_tensor_v2")
device = function("torch", "device")
tensor_meta = function("torch.distributed.tensor._dtensor_spec", "TensorMeta")
from_type = function("torch._tensor", "_rebuild_from_type_v2")
Wrapper = define("torch._utils", "_rebuild_wrapper_subclass")
DTensor = define("torch.distributed.tensor", "DTensor")
Spec = define("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
Mesh = define("torch.distributed.device_mesh", "DeviceMesh")
MeshLayout = define("torch.distributed._mesh_layout", "_MeshLayout")
FlatLayout = define("torch.distributed._mesh_layout", "_FlatLayout")
Shard = define("torch.distributed.tensor.placement_types", "Shard")


def plain_tensor(key, shape):
    rows, columns = shape
    return rebuild_tensor(Stored(key, rows * columns), 0, shape, (columns, 1), False, ordered_dict())


def save(path, graph, storages, size):
    """As torch.save: a stored zip of the pickle and of so many storages of `size` bytes each."""
    data, stem = io.BytesIO(), os.path.basename(path)[:-len(".pt")]
    Pickler(data, protocol=2).dump(graph)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
        for name, content in [("data.pkl", data.getvalue()), ("byteorder", b"little"), *((f"data/{i}", bytes(size)) for i in range(storages)), ("version", b"3\n")]:
            z.writestr(zipfile.ZipInfo(f"{stem}/{name}"), content)


def write_verl(folder, count):
    tensors, local, whole = count // RANKS, (1, 8), torch_like.Size((RANKS, 8))
    make, float32, layout, cpu = torch_like.make, torch_like.float32, torch_like.layout(), device("cpu")
    for rank in range(RANKS):
        mesh = make(Mesh, _device_type="cpu", _layout=make(MeshLayout, axes=(make(FlatLayout, shape=RANKS, stride=1),)), _mesh_dim_names=("fsdp",),
                    _root_mesh=None, _thread_id=None, _rank=rank, _coordinate_on_dim=[rank], _hash=rank)
        model = {}
        for i in range(tensors):
            spec = make(Spec, mesh=mesh, placements=(make(Shard, dim=0),), tensor_meta=tensor_meta(whole, (8, 1), float32), shard_order=None)
            model[f"model.layers.{i}.mlp.weight"] = from_type(Wrapper, DTensor, (DTensor, float32, whole, (8, 1), 0, layout, cpu, False),
                                                              {"_local_tensor": plain_tensor(i, local), "_spec": spec})
        save(f"{folder}/model_world_size_{RANKS}_rank_{rank}.pt", model, tensors, 32)
    return tensors * RANKS


def write_universal(folder, count):
    states = ("fp32", "exp_avg", "exp_avg_sq", "step")
    for i in range(count // len(states)):
        directory = f"{folder}/zero/model.layers.{i}.mlp.weight"
        os.makedirs(directory)
        for state in states:
            path = f"{directory}/{state}.pt"
            if i == 0:
                save(path, {"param": plain_tensor(0, (4, 8)), "cat_dim": 0}, 1, 128)
                continue
            with open(f"{folder}/zero/model.layers.0.mlp.weight/{state}.pt", "rb") as f, open(path, "wb") as out:
                out.write(f.read())
    save(f"{folder}/mp_rank_00_model_states.pt", {"module": ordered_dict(), "param_shapes": [], "ds_version": "0.19.8"}, 0, 0)
    return count // len(states) * len(states)


def write_gguf(folder, count):
    def text(s):
        return struct.pack("<Q", len(s)) + s.encode()

    words = [f"word{i}" for i in range(count * 3 // 2)]
    entries = [text("general.architecture") + struct.pack("<I", 8) + text("llama"),
               text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(words)) + b"".join(map(text, words))]
    with open(f"{folder}/model.gguf", "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, count, len(entries)) + b"".join(entries))
        for i in range(count):
            f.write(text(f"blk.{i}.ffn_up.weight") + struct.pack("<IQQIQ", 2, 8, 4, 0, 128 * i))
        f.truncate((f.tell() + 31) // 32 * 32 + 128 * count)
    return count


def write_flax(folder, count):
    def text(s):
        return (bytes([0xa0 | len(s)]) if len(s) < 32 else struct.pack(">BB", 0xd9, len(s))) + s.encode()

    inner = b"\x93\x92\x04\x08" + text("float32") + struct.pack(">BB", 0xc4, 128) + bytes(128)
    array = struct.pack(">BHb", 0xc8, len(inner), 1) + inner
    with open(f"{folder}/flax_model.msgpack", "wb") as f:
        f.write(b"\x81" + text("params") + struct.pack(">BI", 0xdf, count))
        for i in range(count):
            f.write(text(f"layer_{i}") + b"\x81" + text("kernel") + array)
    return count


def zarr_members(count):
    """(name, bytes) of ARRAYS arrays of one-dimensional chunks."""
    each = count // ARRAYS
    about = json.dumps({"zarr_format": 2, "shape": [each * 8], "chunks": [8], "dtype": "<f4", "compressor": None, "fill_value": None, "filters": None,
                        "order": "C", "dimension_separator": "."}).encode()
    for a in range(ARRAYS):
        yield f"model.layers.{a}.weight/.zarray", about
        for i in range(each):
            yield f"model.layers.{a}.weight/{i}", bytes(32)


def write_zarr(folder, count):
    for name, data in zarr_members(count):
        path = os.path.join(folder, name)
        if name.endswith(".zarray"):
            os.makedirs(os.path.dirname(path))
        with open(path, "wb") as f:
            f.write(data)
    return count // ARRAYS * ARRAYS


def write_nemo(folder, count, mode="w"):
    options = {"compresslevel": 1} if mode == "w:gz" else {}
    with tarfile.open(f"{folder}/model.nemo", mode, **options) as tar:
        for name, data in (("model_config.yaml", b"name: scan\n"), *((f"model_weights/{n}", d) for n, d in zarr_members(count))):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return count // ARRAYS * ARRAYS


KINDS = {"verl": write_verl, "universal": write_universal, "gguf": write_gguf, "flax": write_flax, "zarr": write_zarr, "nemo": write_nemo,
         "nemo-gz": lambda folder, count: write_nemo(folder, count, "w:gz")}


def main(kind, folder, count):
    os.makedirs(folder, exist_ok=True)
    print(json.dumps({"chunks": KINDS[kind](folder, int(count))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
