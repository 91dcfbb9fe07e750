#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""make_composer.py OUT: what Composer 0.32.1 saves besides its whole checkpoints (tests/data/dcp_trainers/composer_parts, composer_weights).

composer_parts: composer.checkpoint's functions on two gloo ranks, FSDP on a CPU. composer_weights: Trainer(save_weights_only=True).
Environment: torch 2.15.0, mosaicml 0.32.1 with --no-deps and what it imports; torchvision, databricks and mcli are stand-ins.
torch notes the path it writes to: run it where that path says nothing."""
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import shutil
import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

OUT, WORLD, STEPS = sys.argv[1], 2, 2
DTYPES = {torch.float32: "F32", torch.int64: "I64"}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("torchvision", "databricks", "mcli"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock()
        module.__path__, module.__name__, module.__spec__ = [], spec.name, spec
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, StandIns())
import composer  # noqa: E402
from composer.checkpoint import save  # noqa: E402
from composer.devices import DeviceCPU  # noqa: E402
from composer.models import ComposerClassifier  # noqa: E402
from composer.optim import DecoupledAdamW  # noqa: E402


def model():
    torch.manual_seed(1)
    return ComposerClassifier(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False)), num_classes=3)


def told(tensor):
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "sha256": hashlib.sha256(raw).hexdigest()}


def write(name, path, about, tensors, file=None):
    count = len(tensors["model"]), len(tensors["optim"]), 0
    expected = {"checkpoints": {path: {**about, "framework": "Composer", "version": composer.__version__, "roles": count}}, "format": "composer",
                "tensors": {f"{file or path}:{k}": told(v) for part in tensors.values() for k, v in part.items()},
                "written_by": f"mosaicml=={composer.__version__} torch=={torch.__version__.split('+', maxsplit=1)[0]}"}
    with open(f"{OUT}/{name}.expected.json", "w", encoding="utf-8") as f:
        f.write(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def whole(path):
    """As torch's loader gives it in one process."""
    reader = dcp.FileSystemReader(path)
    state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in reader.read_metadata().state_dict_metadata.items()
             if isinstance(m, TensorStorageMetadata)}
    dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    return state


def rank_of_parts(rank, path):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29577")
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    net = dist.fsdp.FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh)
    optimizer = DecoupledAdamW(net.parameters(), lr=0.01)
    for _ in range(STEPS):
        net((torch.randn(3, 5), torch.arange(3))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save.save_model_to_disk(net, path + "/model", sharded_checkpoint=True, overwrite=True)
    save.save_optim_to_disk(net, optimizer, path + "/optim", sharded_checkpoint=True, overwrite=True)
    save.save_composer_metadata_to_disk(path + "/composer_metadata.json", net, True, "fp32", DeviceCPU(), 1)
    dist.barrier()
    if rank == 0:
        parts = {part: whole(f"{path}/{part}") for part in ("model", "optim")}
        groups = {k: v for k, v in optimizer.state_dict()["param_groups"][0].items() if k != "params"}
        names = [n.replace("_fsdp_wrapped_module.", "") for n, _ in net.named_parameters()]
        groups = {**groups, "betas": {"$type": "tuple", "items": list(groups["betas"])}, "params": names}
        write("composer_parts", "ep0-ba2", {"format": "composer-dcp", "step": STEPS, "topology": {"ranks": WORLD, "epoch": 0, "model": "a DCP checkpoint"},
                                            "objects": {f"param_groups.0.{k}": v for k, v in groups.items()}}, parts)
    dist.barrier()


def weights(path):
    net = model()
    data = torch.utils.data.TensorDataset(torch.randn(12, 5), torch.arange(12) % 3)
    trainer = composer.Trainer(model=net, train_dataloader=torch.utils.data.DataLoader(data, batch_size=3), optimizers=DecoupledAdamW(net.parameters(), lr=0.01),
                               max_duration=f"{STEPS}ba", device="cpu", seed=1, run_name="tiny", progress_bar=False, save_folder=path, save_weights_only=True,
                               save_interval=f"{STEPS}ba", save_latest_filename=None)
    trainer.fit()
    write("composer_weights", "", {"format": "composer", "step": None, "topology": {"files": 1, "ranks": 1}, "objects": {"state": None}},
          {"model": {f"state.model.{k}": v for k, v in trainer.state.model.state_dict().items()}, "optim": {}}, f"ep0-ba{STEPS}-rank0.pt")


if __name__ == "__main__":
    for name in ("composer_parts", "composer_weights"):
        shutil.rmtree(f"{OUT}/{name}", ignore_errors=True)
    os.makedirs(f"{OUT}/composer_parts/ep0-ba2")
    torch.multiprocessing.start_processes(rank_of_parts, args=(f"{OUT}/composer_parts/ep0-ba2",), nprocs=WORLD, start_method="fork")
    weights(f"{OUT}/composer_weights")
