#!/usr/bin/env python3
"""Writes the made fixtures of tests/data/verl, with torch on several gloo ranks.

    make_verl.py FOLDER [NAME ...]

Each rank torch.saves a state dict of DTensors on meshes and placements that a training run rarely has all at once; the truth in
NAME.expected.json is the tensor that was distributed, and full_tensor() of the DTensor is held against it where torch can make it.
Needs torch 2.15 (shard_order).
"""
import hashlib
import json
import os
import shutil
import socket
import sys
import zipfile
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL", torch.uint8: "U8",
          torch.float64: "F64", torch.complex64: "C64"}


def numbered(shape, dtype=torch.float32, start=1):
    n = 1
    for d in shape:
        n *= d
    t = torch.arange(start, start + n)
    return (t % 2 == 0 if dtype == torch.bool else (t % 251).to(dtype)).reshape(shape)


def cut(rows, parts, at):
    """Rows of the piece number `at`, as torch.chunk has them."""
    size = -(-rows // parts)
    low = min(rows, size * at)
    return low, min(rows, low + size)


def by_hand(t, mesh, placements, order, spec_order=None):
    """A DTensor whose local part was cut along mesh axes in this order, told by strided placements or by spec_order."""
    at, local = mesh.get_coordinate(), t
    for axis in order:
        if isinstance(placements[axis], Replicate):
            continue
        low, high = cut(local.shape[placements[axis].dim], mesh.size(axis), at[axis])
        local = local.narrow(placements[axis].dim, low, high - low)
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(t.shape, t.stride(), t.dtype), **({"shard_order": spec_order} if spec_order else {}))
    return DTensor(local.contiguous(), spec, requires_grad=False)


def settle(state, done):
    """Collectives that still run give tensors that cannot be saved. Tied ones share their storage, as those of a module do."""
    for k, v in state.items():
        if isinstance(v, DTensor):
            if id(v) not in done:
                done[id(v)] = torch.empty_strided(v._local_tensor.shape, v._local_tensor.stride(), dtype=v.dtype).copy_(v.to_local()), v
            state[k] = DTensor(done[id(v)][0].detach(), v._spec, requires_grad=False)
        elif isinstance(v, dict):
            settle(v, done)


def dump(folder, rank, world, model, optim=None):
    settle(model, {})
    settle(optim or {}, {})
    torch.save(model, f"{folder}/model_world_size_{world}_rank_{rank}.pt")
    if optim:
        torch.save(optim, f"{folder}/optim_world_size_{world}_rank_{rank}.pt")


def deflate(path):
    with zipfile.ZipFile(path) as z:
        members = [(i.filename, z.read(i)) for i in z.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members:
            z.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)


def check(rank, truth, state):
    for name, d in state.items():
        if isinstance(d, DTensor) and d.device_mesh.get_coordinate() is not None:
            assert torch.equal(d.full_tensor(), truth[name]), name


def made_mesh_3x2(rank, world, folder):
    """Every pair of placements on 3 x 2 ranks, sizes that nothing divides, orders of cuts that are not from left to right."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    places = {"rr": (Replicate(), Replicate()), "r0": (Replicate(), Shard(0)), "0r": (Shard(0), Replicate()), "1r": (Shard(1), Replicate()),
              "01": (Shard(0), Shard(1)), "10": (Shard(1), Shard(0)), "00": (Shard(0), Shard(0)), "11": (Shard(1), Shard(1))}
    truth, state = {}, OrderedDict()
    for i, (name, p) in enumerate(places.items()):
        for shape in ((13, 7), (2, 5, 3)):
            key = f"p{name}.{'x'.join(map(str, shape))}"
            truth[key] = numbered(shape, start=1000 * i)
            state[key] = distribute_tensor(truth[key], mesh, p)
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        key = "dtype." + DTYPES[dtype]
        truth[key] = numbered((5, 3), dtype)
        state[key] = distribute_tensor(truth[key], mesh, (Shard(0), Shard(1)))
    truth["one"] = numbered((1,))
    state["one"] = distribute_tensor(truth["one"], mesh, (Shard(0), Shard(0)))
    truth["transposed"] = numbered((7, 5)).t()
    state["transposed"] = distribute_tensor(truth["transposed"], mesh, (Shard(0), Replicate()))
    sub = mesh["dp"]
    truth["submesh"] = numbered((10, 2))
    state["submesh"] = distribute_tensor(truth["submesh"], sub, (Shard(0),))
    check(rank, truth, state)
    # tensor parallelism first: told by a strided placement, or by an order
    for rows in (12, 13, 5, 1):
        truth[f"strided.{rows}"] = numbered((rows, 2))
        state[f"strided.{rows}"] = by_hand(truth[f"strided.{rows}"], mesh, (_StridedShard(0, split_factor=2), Shard(0)), (1, 0))
        truth[f"ordered.{rows}"] = numbered((rows, 2), start=500)
        state[f"ordered.{rows}"] = by_hand(truth[f"ordered.{rows}"], mesh, (Shard(0), Shard(0)), (1, 0), (ShardOrderEntry(0, (1, 0)),))
    assert torch.equal(state["strided.12"].full_tensor(), truth["strided.12"])
    for k in truth:
        if k.startswith("submesh"):
            assert state[k].device_mesh.ndim == 1
    dump(folder, rank, world, state)
    return {"": truth}, {}


def made_row_5(rank, world, folder):
    """Five ranks: fewer rows than ranks, none at all, a mesh of some ranks only; named parameters in two groups."""
    mesh = init_device_mesh("cpu", (5,), mesh_dim_names=("fsdp",))
    pair = DeviceMesh("cpu", [1, 3])
    truth = {"three": numbered((3, 4)), "eleven": numbered((11,)), "none": numbered((0, 3)), "scalar": torch.tensor(7.5), "columns": numbered((4, 9))}
    state = OrderedDict((k, distribute_tensor(v, mesh, [Shard(1) if k == "columns" else Replicate() if k == "scalar" else Shard(0)])) for k, v in truth.items())
    check(rank, truth, state)
    truth["pair"] = numbered((5, 2))
    at = pair.get_coordinate()
    low, high = cut(5, 2, at[0]) if at else (0, 0)
    spec = DTensorSpec(pair, (Shard(0),), TensorMeta(truth["pair"].shape, truth["pair"].stride(), torch.float32))
    state["pair"] = DTensor(truth["pair"][low:high].contiguous() if at else torch.empty(0), spec, requires_grad=False)
    truth["buffer"] = numbered((3,))
    state["buffer"] = truth["buffer"].clone()
    moments = {k: truth[k] * 2 for k in ("columns", "three")}
    optim = {"state": {i: {"step": torch.tensor(3.0), "exp_avg": distribute_tensor(v, mesh, state[k].placements)} for i, (k, v) in enumerate(moments.items())},
             "param_groups": [{"lr": 0.1, "params": [0], "param_names": ["columns"]}, {"lr": 0.2, "params": [1], "param_names": ["three"]}]}
    dump(folder, rank, world, state, optim)
    flat = {f"state.{k}.exp_avg": v for k, v in moments.items()} | {f"state.{k}.step": torch.tensor(3.0) for k in moments}
    return {"": truth, "optim": flat}, {"optim:index_to_name": {"0": "columns", "1": "three"}, "optim:param_groups": optim["param_groups"]}


def made_cube_2x2x2(rank, world, folder):
    """Replicas of shards of shards, tied weights, and an optimizer whose numbers are told by order alone."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ddp", "fsdp", "tp"))
    places = {"embed": (Replicate(), Shard(0), Replicate()), "up": (Replicate(), Shard(0), Shard(1)), "norm": (Replicate(), Shard(0), Replicate()),
              "all": (Shard(0), Shard(0), Shard(0))}
    truth = {"embed": numbered((17, 3)), "up": numbered((9, 5), start=100), "norm": numbered((1,), start=9), "all": numbered((19, 2))}
    state = OrderedDict((k, distribute_tensor(v, mesh, places[k])) for k, v in truth.items())
    check(rank, truth, state)
    truth["late"] = numbered((21, 2))       # fsdp cut what tp had cut, in each half of ddp
    state["late"] = by_hand(truth["late"], mesh, (Shard(0), _StridedShard(0, split_factor=2), Shard(0)), (0, 2, 1))
    truth["last"] = numbered((22, 2))       # and ddp after both
    state["last"] = by_hand(truth["last"], mesh, (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)), (2, 1, 0))
    truth["head"] = truth["embed"]
    state["head"] = state["embed"]
    state["inv_freq"] = truth["inv_freq"] = numbered((3,))
    names = ["embed", "up", "norm", "all", "late", "last"]
    moments = {k: truth[k] + 0.5 for k in names if k != "up"}       # up is frozen
    optim = {"state": {names.index(k): {"step": 4, "exp_avg": state[k] + 0.5 if k not in ("late", "last") else by_hand(
        v, mesh, state[k].placements, (0, 2, 1) if k == "late" else (2, 1, 0))} for k, v in moments.items()},
        "param_groups": [{"lr": 0.1, "params": list(range(6))}]}
    dump(folder, rank, world, state, optim)
    entries = [[names.index(k), {"step": 4, "exp_avg": {"$type": "tensor", "key": f"state.{k}.exp_avg"}}] for k in moments]
    return {"": truth, "optim": {f"state.{k}.exp_avg": v for k, v in moments.items()}}, {
        "optim:index_to_name": {str(i): k for i, k in enumerate(names)}, "optim:param_groups": optim["param_groups"],
        "optim:state": {"$type": "dict", "items": entries}}


def made_groups_2(rank, world, folder):
    """Two groups without names: numbers stay; a partial sum is refused; a buffer differs between ranks."""
    mesh = init_device_mesh("cpu", (2,))
    truth = {"weight": numbered((5, 3)), "bias": numbered((5,))}
    state = OrderedDict((k, distribute_tensor(v, mesh, [Shard(0)])) for k, v in truth.items())
    check(rank, truth, state)
    state["partial"] = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False)
    state["running_mean"] = numbered((4,), start=10 * rank)
    truth["running_mean"] = numbered((4,), start=0)
    optim = {"state": {i: {"step": torch.tensor(1.0), "momentum_buffer": distribute_tensor(truth[k] * 3, mesh, [Shard(0)])} for i, k in enumerate(("bias", "weight"))},
             "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]}
    dump(folder, rank, world, state, optim)
    return {"": truth, "optim": {f"state.{i}.{s}": v for i, k in enumerate(("bias", "weight")) for s, v in
                                 (("step", torch.tensor(1.0)), ("momentum_buffer", truth[k] * 3))}}, {}


def made_deflated_3(rank, world, folder):
    """Files that somebody has packed anew: deflated pieces."""
    mesh = init_device_mesh("cpu", (3,))
    truth = {"rows": numbered((40, 9)), "columns": numbered((9, 40)), "buffer": numbered((100,))}
    state = OrderedDict((k, truth[k] if k == "buffer" else distribute_tensor(truth[k], mesh, [Shard(int(k == "columns"))])) for k in truth)
    dump(folder, rank, world, state)
    deflate(f"{folder}/model_world_size_{world}_rank_{rank}.pt")
    return {"": truth}, {}


def made_bomb_1(rank, world, folder):
    """One tensor of many dimensions under many names, in a file of a few kilobytes."""
    dump(folder, rank, world, {"m": [torch.ones((1,) * 64)] * 400000})
    deflate(f"{folder}/model_world_size_{world}_rank_{rank}.pt")
    return {}, {}


def made_one_1(rank, world, folder):
    """One rank: nothing is distributed, and the optimizer's tensors are whole."""
    truth = {"embed": numbered((5, 3)), "norm": numbered((3,))}
    state = OrderedDict(truth, head=truth["embed"])
    optim = {"state": {i: {"exp_avg": truth[k] * 2} for i, k in enumerate(truth)}, "param_groups": [{"params": [0, 1]}]}
    dump(folder, rank, world, state, optim)
    return {"": dict(state), "optim": {f"state.{k}.exp_avg": v * 2 for k, v in truth.items()}}, {
        "optim:index_to_name": {"0": "embed", "1": "norm"}, "optim:param_groups": optim["param_groups"]}


def made_plain_2(rank, world, folder):
    """Plain tensors that differ between ranks, in a model without any distributed one: slices of which nothing tells the cut."""
    state = OrderedDict(weight=numbered((3, 4), start=1 + 12 * rank), norm=torch.ones(2))
    dump(folder, rank, world, state)
    return {r: {f"model_world_size_2_rank_{r}.pt:{k}": numbered((3, 4), start=1 + 12 * r) if k == "weight" else v for k, v in state.items()} for r in range(2)}, {}


def made_layout_2x2(rank, world, folder):
    """Meshes as torch 2.9 wrote them: one layout with a shape, a number or a tuple, nested where axes were flattened."""
    import torch.distributed._mesh_layout as module

    class Layout:
        def __init__(self, shape):
            self.shape = shape

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line, flat = init_device_mesh("cpu", (4,)), mesh._flatten("all")
    truth = {"two": numbered((5, 7)), "flat": numbered((9, 2)), "line": numbered((6,))}
    state = OrderedDict(two=distribute_tensor(truth["two"], mesh, (Shard(0), Shard(1))), flat=distribute_tensor(truth["flat"], flat, (Shard(0),)),
                        line=distribute_tensor(truth["line"], line, (Shard(0),)))
    check(rank, truth, state)
    settle(state, {})
    Layout.__module__, Layout.__qualname__ = module.__name__, "_MeshLayout"
    module._MeshLayout = Layout
    flat._root_mesh = None
    for m, shape in ((mesh, (2, 2)), (flat, ((2, 2),)), (line, 4)):
        m._layout = Layout(shape)
        m._flatten_mapping = {}
    torch.save(state, f"{folder}/model_world_size_{world}_rank_{rank}.pt")
    return {"": truth}, {}


WARNINGS = {"made_plain_2": 1}
CASES = {"made_bomb_1": 1, "made_deflated_3": 3, "made_layout_2x2": 4, "made_one_1": 1, "made_plain_2": 2, "made_mesh_3x2": 6, "made_row_5": 5, "made_cube_2x2x2": 8, "made_groups_2": 2}


def expected(folder, parts, objects):
    name = os.path.basename(folder)
    tensors = {}
    for part in parts.values():
        for key, t in part.items():
            data = t.detach().contiguous().reshape(-1)
            data = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
            tensors[key] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(data).hexdigest()}
    # what has damage is no fixture by itself: its test says more
    with open(folder + (".json" if name in ("made_bomb_1", "made_groups_2") else ".expected.json"), "w") as f:
        json.dump({"format": "verl-fsdp", "framework": "verl", "written_by": f"make_verl.py, torch {torch.__version__.split('+')[0]}", "tensors": tensors, "objects": objects,
                   "warnings": WARNINGS.get(name, 0)},
                  f, indent=1, sort_keys=True)
        f.write("\n")


def entry(rank, world, port, name, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    parts, objects = globals()[name](rank, world, folder)
    dist.barrier()
    if rank == 0:
        expected(folder, parts, objects)
    dist.destroy_process_group()


def main(root, names):
    for name in names or CASES:
        folder = os.path.join(root, name)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        mp.start_processes(entry, args=(CASES[name], port, name, folder), nprocs=CASES[name], start_method="fork")
        print(name)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
