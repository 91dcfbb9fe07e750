#!/usr/bin/env python3
"""Writes the fixtures of tests/data/torch_checkpointing, with torch_checkpointing on several gloo ranks.

    make_torch_checkpointing.py FOLDER [NAME ...]

The truth in NAME.expected.json is what its own CheckpointManager loads, in one process, into empty full tensors; where the tensors were whole before they
were distributed, those are held against it. Written with torch_checkpointing 0.1.1 and torch 2.15. Metadata are gathered on a GPU in that version; here the
same objects are gathered by gloo.
"""
import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import socket
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_checkpointing as tc
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo, SafetensorsSerialization, TorchSerialization
from torch_checkpointing.default_metadata import DefaultShardingMetadata
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from make_verl import DTYPES, by_hand, numbered, settle

PLAIN = LocalFileSystemStorageConfig(use_direct_io=False)
SAFE = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())


def gather(self, data, process_group=None):
    out = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(out, pickle.loads(pickle.dumps(data)), group=process_group)
    return dict(enumerate(out))


DefaultMetadataManager._all_gather_pickled_data = gather


def item(layout=None, reshard=True):
    return tc.ItemSpec(layout=layout, resharder=DefaultResharder() if reshard else None, required=False)


def save(folder, items, payload):
    config = tc.CheckpointManager.Config.with_sync_save()
    config = dataclasses.replace(config, items=items, default=item(reshard=False), storage_config=PLAIN)
    manager = config.build()
    manager.save(folder, payload)
    manager.close()


def load(folder, items, empty):
    """What one process gets: full tensors, with the names that they have in files."""
    config = dataclasses.replace(tc.CheckpointManager.Config.with_sync_save(), items={k: items[k] for k in empty}, default=None, storage_config=PLAIN)
    manager = config.build()
    got = manager.load(folder, into=empty, strict=True)
    manager.close()
    return got


def flatten(value, path=()):
    if isinstance(value, torch.Tensor):
        yield ".".join(map(str, path)), value
    for k, v in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ():
        yield from flatten(v, path + (k,))


def empty_like(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {k: empty_like(v) for k, v in value.items()}
    return [empty_like(v) for v in value] if isinstance(value, (list, tuple)) else value


def spread(truth, mesh, placements):
    """Each tensor distributed as its name says; without placements as it is."""
    if isinstance(truth, dict):
        return type(truth)((k, spread(v, mesh, placements[k] if isinstance(placements, dict) else placements)) for k, v in truth.items())
    if isinstance(truth, (list, tuple)):
        return [spread(v, mesh, placements) for v in truth]
    return distribute_tensor(truth, mesh, placements) if placements is not None and isinstance(truth, torch.Tensor) else truth


def made_mesh_2x2(folder):
    """A model of safetensors files cut by one and two axes, nested, with plain tensors; an optimizer of torch files; a rank's own state."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    places = {"embed": (Replicate(), Shard(0)), "layers": (Shard(0), Shard(1)), "norm": (Shard(0), Replicate()), "both": (Shard(0), Shard(0)), "all": (Replicate(), Replicate()),
              "count": None, "head": (Shard(1), Shard(0)), "half": (Shard(0), Replicate())}
    truth = {"embed": numbered((9, 3)), "layers": [{"w": numbered((5, 7), start=7)}, {"w": numbered((2, 3, 5), start=9)}], "norm": numbered((3,), start=90), "both": numbered((11, 2)),
             "all": numbered((4,), torch.float64), "count": torch.tensor(12), "head": numbered((3, 9), torch.bfloat16), "half": numbered((1, 6), torch.float16)}
    model = spread(truth, mesh, places)
    names = ["embed", "layers.0.w"]
    moments = {"embed": truth["embed"] * 2, "layers.0.w": truth["layers"][0]["w"] + 1}
    optim = {"state": {i: {"step": torch.tensor(3.0), "exp_avg": distribute_tensor(moments[k], mesh, places[k.split(".")[0]])} for i, k in enumerate(names)},
             "param_groups": [{"lr": 0.125, "params": [0, 1], "param_names": names}]}
    settle(optim, {})
    rank = dist.get_rank()
    items = {"model": item(SAFE), "optimizer": item(), "config": item(LayoutInfo("config_{rank}.json", JsonSerialization()), False)}
    payload = {"model": model, "optimizer": optim, "config": {"steps": 7}, "dataloader": {"seen": 10 * rank, "at": numbered((3,), torch.int64, start=rank)}}
    save(folder, items, payload)
    return items, {"model": truth, "optimizer": {"state": {i: {"step": torch.tensor(3.0), "exp_avg": moments[k]} for i, k in enumerate(names)}, "param_groups": optim["param_groups"]}}, {
        f"state.{i}.": f"state.{k}." for i, k in enumerate(names)}, {
        f"dataloader_{r}.pt:at": numbered((3,), torch.int64, start=r) for r in range(4)}, {
        **{f"dataloader_{r}.pt:seen": 10 * r for r in range(4)}, "optimizer:index_to_name": {str(i): k for i, k in enumerate(names)},
        "optimizer:param_groups": optim["param_groups"]}


def made_row_3(folder):
    """Three ranks, files of torch: fewer rows than ranks, none at all, a mesh of some ranks, values that are no tensors."""
    mesh, pair = init_device_mesh("cpu", (3,)), DeviceMesh("cpu", [0, 2])
    places = {"two": [Shard(0)], "ten": [Shard(0)], "none": [Shard(0)], "columns": [Shard(1)], "one": [Replicate()], "buffer": None}
    truth = {"two": numbered((2, 4)), "ten": numbered((10,)), "none": numbered((0, 3)), "columns": numbered((2, 7), torch.int64), "one": torch.tensor(7.5), "buffer": numbered((5,))}
    model = spread(truth, mesh, places)
    truth["pair"] = numbered((5, 2), start=50)
    if dist.get_rank() != 1:
        model["pair"] = distribute_tensor(truth["pair"], pair, [Shard(0)])
    settle(model, {})
    model["note"] = "kept"
    items = {"model": item()}
    save(folder, items, {"model": model})
    return items, {"model": truth}, {}, {}, {"note": "kept"}


def made_strided_2x2(folder):
    """Tensor parallelism first, then FSDP: strided shards; one folder a rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    truth = {f"strided.{rows}": numbered((rows, 2)) for rows in (12, 13, 5, 1)}
    truth["columns"] = numbered((3, 10), torch.bfloat16)
    model = {k: by_hand(v, mesh, (_StridedShard(int(k == "columns"), split_factor=2), Shard(int(k == "columns"))), (1, 0)) for k, v in truth.items()}
    items = {"model": item(LayoutInfo("rank_{rank}/model.safetensors", SafetensorsSerialization({"kind": "made"})))}
    save(folder, items, {"model": model})
    return items, {"model": truth}, {}, {}, {}


def made_one_1(folder):
    """One process, nothing distributed; a second copy of the model as an item of another name."""
    truth = {"embed": numbered((5, 3)), "norm": numbered((3,), torch.bool)}
    items = {"model": item(SAFE), "ema": item(LayoutInfo("ema_{rank}.safetensors", SafetensorsSerialization())), "loss": item()}
    ema = {k: v + 1 if k == "embed" else v for k, v in truth.items()}
    save(folder, items, {"model": dict(truth), "ema": ema, "loss": torch.tensor(0.25)})
    return items, {"model": truth, "ema": ema}, {}, {"loss": torch.tensor(0.25)}, {}


def made_plain_2(folder):
    """No item has a resharder: nothing tells how the files of ranks belong together, but for DTensors themselves."""
    mesh = init_device_mesh("cpu", (2,))
    truth = {"weight": numbered((5, 3)), "buffer": numbered((3,))}
    model = spread(truth, mesh, {"weight": [Shard(0)], "buffer": None})
    settle(model, {})
    items = {"model": item(reshard=False), "other": item(LayoutInfo("other_{rank}.safetensors", SafetensorsSerialization()), False), "unused": item()}
    rank = dist.get_rank()
    save(folder, items, {"model": model, "other": {"x": numbered((4,), start=10 * rank)}})
    return {}, {}, {}, {**truth, **{f"other_{r}.safetensors:x": numbered((4,), start=10 * r) for r in range(2)}}, {}


class Cut(torch.Tensor):
    """A local tensor that tells which shards of a whole it holds."""


class Cutter(DefaultResharder):
    def extract_sharding_metadata(self, item_key, item_value):
        return {(k,): DefaultShardingMetadata.from_tensor(v) for k, v in item_value.items()}


def made_cuts_2(folder):
    """The second kind of metadata: each rank's tensor has several boxes of the whole."""
    truth = {"fused": numbered((8, 3)), "rows": numbered((5,), torch.int64)}
    rank, model = dist.get_rank(), {}
    boxes = {"fused": [((2 * rank, 0), (0, 0), (2, 3)), ((4 + 2 * rank, 0), (2, 0), (2, 3))], "rows": [((3 * rank,), (0,), (3 - rank,))]}
    for k, v in truth.items():
        local = torch.cat([v[tuple(slice(o, o + n) for o, n in zip(g, size))] for g, _, size in boxes[k]]).as_subclass(Cut)
        local.global_shape = tuple(v.shape)
        local.global_offsets, local.local_offsets, local.local_sizes = (tuple(b[i] for b in boxes[k]) for i in range(3))
        model[k] = local
    items = {"model": tc.ItemSpec(layout=SAFE, resharder=Cutter())}
    save(folder, items, {"model": model})
    return {}, {}, {}, truth, {}


WARNINGS: dict[str, int] = {}
CASES = {"made_mesh_2x2": 4, "made_row_3": 3, "made_strided_2x2": 4, "made_one_1": 1, "made_plain_2": 2, "made_cuts_2": 2}


def entry_of(t):
    data = t.detach().contiguous().reshape(-1)
    data = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "sha256": hashlib.sha256(data).hexdigest()}


def expected(folder, items, truth, renames, extra, objects):
    tensors = {k: entry_of(v) for k, v in extra.items()}
    for name, value in truth.items():
        got = dict(flatten(load(folder, items, {name: empty_like(value)})[name]))
        want = dict(flatten(value))
        assert got.keys() == want.keys()
        for k, v in got.items():
            assert torch.equal(v, want[k]), k
            for was, now in renames.items() if name == "optimizer" else ():
                k = now + k[len(was):] if k.startswith(was) else k
            tensors[k if k not in tensors else f"{name}/{k}"] = entry_of(v)
    with open(folder + ".expected.json", "w") as f:
        json.dump({"format": "torch-checkpointing", "framework": "PyTorch", "written_by": f"make_torch_checkpointing.py, torch_checkpointing {tc.__version__}, torch "
                   + torch.__version__.split("+")[0], "tensors": tensors, "objects": objects, "warnings": WARNINGS.get(os.path.basename(folder), 0)}, f, indent=1, sort_keys=True)
        f.write("\n")


def entry(rank, world, port, name, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    result = globals()[name](folder)
    dist.barrier()
    dist.destroy_process_group()
    for k in ("RANK", "WORLD_SIZE"):
        del os.environ[k]
    if rank == 0:
        expected(folder, *result)


def main(root, names):
    for name in names or CASES:
        folder = os.path.join(root, name)
        shutil.rmtree(folder, ignore_errors=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        mp.start_processes(entry, args=(CASES[name], port, name, folder), nprocs=CASES[name], start_method="fork")
        print(name)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
