# SPDX-License-Identifier: MIT
"""Checkpoints as training code writes them today, for test_fresh.py: each runs on every rank."""
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from truth import values


class Net(nn.Module):
    """Odd sizes everywhere: nothing divides by 2 or 3; a one-element parameter, a 0-d and a plain buffer."""

    def __init__(self, dtype):
        super().__init__()
        self.emb = nn.Embedding(53, 37)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(37, 51), nn.GELU(), nn.Linear(51, 37)) for _ in range(2))
        self.tiny = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("steps_seen", torch.tensor(7))
        self.register_buffer("freqs", torch.linspace(0, 1, 11))
        self.to(dtype)

    def forward(self, x):
        h = self.emb(x)
        for layer in self.layers:
            h = h + layer(h)
        return h * self.tiny


def fsdp2_state(world, seed, dtype):
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(seed)
    model = Net(dtype)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(seed + 1)
    model(torch.randint(0, 53, (3, 5))).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optim": state, "step": 2, "lr_scheduler": {"last_epoch": 2, "base_lrs": [0.01]}}


def fsdp2(rank, world, path, seed=0, dtype=torch.float32, **writer):
    dcp.save(fsdp2_state(world, seed, dtype), storage_writer=FileSystemWriter(path, **writer))


def async_fsdp2(rank, world, path):
    state = fsdp2_state(world, 3, torch.bfloat16)
    dcp.async_save(state, storage_writer=FileSystemWriter(path), process_group=dist.new_group(backend="gloo")).result()


def zstd(rank, world, path):
    from torch.distributed.checkpoint._extension import ZStandard
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    state = {"w": distribute_tensor(values((337, 251), torch.float32, 1), mesh, [Shard(0)]), "z": torch.zeros(99999),
             "cols": distribute_tensor(values((64, 129), torch.bfloat16, 2), mesh, [Shard(1)]), "o": {"a": 1}}
    dcp.save(state, storage_writer=FileSystemWriter(path, _extensions=[ZStandard()]))


def unflattened(rank, world, path):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    state = {"a.b": distribute_tensor(values((7, 3), torch.float32, 1), mesh, [Shard(1)]), "obj": {"k": [1, 2]}, "x": torch.ones(2)}
    dcp.save(state, checkpoint_id=path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))


def uneven(rank, world, path):
    """torch.chunk on three ranks: short last shards, empty shards, fewer rows than ranks."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    shapes = [(1, 9), (2, 5), (4, 3), (7, 11), (100, 3), (3, 1, 2), (5,), (1,)]
    state = {f"d{dim}.{'x'.join(map(str, s))}": distribute_tensor(values(s, torch.float16, i), mesh, [Shard(dim)])
             for i, s in enumerate(shapes) for dim in range(len(s))}
    dcp.save({"model": state}, checkpoint_id=path)


def fsdp_tp(rank, world, path):
    """Tensor parallel below FSDP2: strided shards, boxes out of order."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(12, 26), nn.ReLU(), nn.Linear(26, 12), nn.LayerNorm(12))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 12)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=path)
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in weights.items()}
    if rank == 0:
        torch.save(whole, path + ".whole.pt")


def mesh(rank, world, path):
    """Boxes in two dimensions, replicas in one."""
    m = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    s0, s1, s2, r = Shard(0), Shard(1), Shard(2), Replicate()
    cases = {"blocks": ((37, 51), (s0, s1), torch.bfloat16), "crossed": ((37, 51), (s1, s0), torch.float32), "rep_rows": ((19, 7), (r, s0), torch.float16),
             "rows_rep": ((19, 7), (s0, r), torch.int32), "both_rows": ((23, 5), (s0, s0), torch.float32), "both_cols": ((5, 23), (s1, s1), torch.bfloat16),
             "deep": ((3, 5, 13), (s2, s0), torch.float32), "few": ((3, 1), (s0, s1), torch.int64), "none": ((0, 4), (s0, r), torch.float32),
             "bools": ((17,), (s0, r), torch.bool)}
    dcp.save({k: distribute_tensor(values(shape, dtype, i), m, list(p)) for i, (k, (shape, p, dtype)) in enumerate(cases.items())}, checkpoint_id=path)


def dtypes_state():
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.int16,
             torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64]
    name = [str(d).split(".")[1] for d in kinds]
    return {"matrix": {n: values((3, 5), d, i) for i, (n, d) in enumerate(zip(name, kinds))},
            "zero_d": {n: values((), d, 50 + i) for i, (n, d) in enumerate(zip(name, kinds))},
            "empty": {"e1": torch.empty(0), "e2": torch.empty(0, 7, dtype=torch.int32), "e3": torch.empty(4, 0, 2).bfloat16()},
            "layout": {"transposed": values((7, 11), seed=1).t(), "channels_last": values((2, 3, 4, 5), seed=2).to(memory_format=torch.channels_last),
                       "rows": values((40, 9), seed=3)[3:9], "columns": values((40, 9), seed=3)[:, 2:5], "conjugate": values((3, 4), torch.complex64, 4).conj()},
            "names": {"slash/key": torch.arange(2), "per%cent": torch.arange(3), ".dot": torch.arange(4), "two..dots": torch.arange(5),
                      "ключ": torch.arange(6), "x" * 300: torch.arange(7)}}


def objects_state():
    return {"model": {"w": values((3, 4))}, "i": 7, "neg": -3, "f": 0.1, "s": "héllo", "none": None, "yes": True,
            "args": {"lr": 1e-4, "betas": [0.9, 0.95]}, "list": [1, 2, 3], "mixed": [{"k": 1}, {"k": torch.arange(3)}]}


def single(rank, world, path, state):
    dcp.save(state, checkpoint_id=path, no_dist=world == 1)


def rank_local(rank, world, path):
    m = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dcp.save({"w": distribute_tensor(values((13, 5), torch.float32, 1), m, [Shard(0)]), "r": torch.arange(3), "n": 4},
             checkpoint_id=path, use_collectives=False)


def large(rank, world, path):
    """Tensors past the size of one request of the kernel, cut by rows and by columns."""
    m = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dcp.save({"rows": distribute_tensor(values((2051, 1024), torch.float32, 1), m, [Shard(0)]),
              "columns": distribute_tensor(values((1024, 2050), torch.float32, 2), m, [Shard(1)]),
              "short": distribute_tensor(values((65536, 26), torch.bfloat16, 3), m, [Shard(1)]),
              "whole": values((3000017,), torch.float32, 4)}, checkpoint_id=path)


def hugging_face(rank, world, path, files, consolidate):
    """torch's HuggingFaceStorageWriter: a shard file a rank, and whole files beside them where asked."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    m = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    s0, s1, r = Shard(0), Shard(1), Replicate()
    cases = {"layers.0.q.weight": ((37, 51), (s0, s1)), "layers.0.o.weight": ((51, 37), (s1, s0)), "norm.weight": ((37,), (r, r)),
             "embed.weight": ((53, 9), (s0, s0)), "layers.1.k.weight": ((1, 9), (s0, r)), "conv.weight": ((3, 5, 7), (r, Shard(2)))}
    state = {k: distribute_tensor(values(shape, torch.bfloat16, i), m, list(p)) for i, (k, (shape, p)) in enumerate(cases.items())}
    numbers = {k: 1 + i * files // len(cases) for i, k in enumerate(cases)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, fqn_to_index_mapping=numbers, save_distributed=True, enable_consolidation=consolidate))
