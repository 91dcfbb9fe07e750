# SPDX-License-Identifier: MIT
"""Frameworks save into a mount for writing: the source is what the same run leaves in a plain directory.

Each save runs twice at one path, first in a plain directory, then in a mount over it, with pauses in the middle ($DISK_PAUSES,
seconds). Names, bytes, modes and links are compared (mount/storagelib.py). What a framework makes up anew each time is compared
after loading: the identity of a save in `.metadata`, and in which order torch's Hugging Face writer has the tensors of whole files.
"""
import importlib.util
import os
import pathlib
import pickle
import shutil
import sys
import tempfile
import time
import unittest

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mounted
import truth

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "mount"))
from storagelib import names_below, snapshot  # noqa: E402

PAUSES = [float(p) for p in os.environ.get("DISK_PAUSES", "0 1.5").split()]


def metadata_of(path):
    """What a loader takes of a `.metadata`: all but the identity of the save."""
    meta = pickle.loads(pathlib.Path(path).read_bytes())
    meta.storage_meta = None
    return repr((meta.state_dict_metadata, sorted(meta.storage_data.items(), key=repr) if meta.storage_data else None, meta.planner_data))


def loaded(path):
    """An object of torch.save, to be compared."""
    return repr(torch.load(path, weights_only=False, map_location="cpu"))


def tensors_of(path):
    return sorted((k, str(t.dtype), tuple(t.shape), truth.raw(t)) for k, t in safetensors.torch.load_file(path).items())


def differing(got, want, got_at, want_at, any_order=False):
    """What differs between two directories, as they were snapshot."""
    loads = {".metadata": metadata_of, **dict.fromkeys((".pt", ".pth", ".bin", ".pkl", ".ckpt"), loaded), **({".safetensors": tensors_of} if any_order else {})}
    out = [f"missing: {n}" for n in want.keys() - got.keys()] + [f"extra: {n}" for n in got.keys() - want.keys()]
    for name in sorted(want.keys() & got.keys()):
        a, b = got[name], want[name]
        if (a.kind, a.mode, a.owner, a.linked) != (b.kind, b.mode, b.owner, b.linked):
            out.append(f"{name}: {a}, not {b}")
        elif a.data != b.data:
            how = next((load for end, load in loads.items() if name.endswith(end)), None)
            if not how or how(got_at / name) != how(want_at / name):
                out.append(f"{name}: {a.data}, not {b.data}")
    return out


class Save(unittest.TestCase):
    maxDiff = 3000

    def setUp(self):
        self.top = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-disk-"))
        self.addCleanup(shutil.rmtree, self.top, ignore_errors=True)
        self.at = self.top / "at"

    def in_both(self, save, any_order=False):
        """save(path, pause) in a plain directory and in a mount."""
        self.at.mkdir()
        save(str(self.at), 0)
        plain = self.top / "plain"
        self.at.rename(plain)
        want = snapshot(plain)
        self.assertTrue(want)
        for pause in PAUSES:
            source = self.top / f"source-{pause}"
            source.mkdir()
            self.at.mkdir()
            mounted.run("mount", source, self.at, "-o", f"rw,cache_dir={self.top}/cache")
            try:
                save(str(self.at), pause)
                self.assertEqual(names_below(self.at), names_below(source), "the mount lists other names than the disk has")
                self.assertEqual(differing(snapshot(self.at), want, self.at, plain, any_order), [], f"in the mount, pause {pause}")
            finally:
                done = mounted.run("umount", self.at, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(differing(snapshot(source), want, source, plain, any_order), [], f"pause {pause}")
            self.at.rmdir()
        return plain


# ---- torch.distributed.checkpoint ----

def sharded(world, seed=0):
    mesh = init_device_mesh("cpu", (world,))
    state = {f"l{i}.w": distribute_tensor(truth.values((65, 32), torch.float32, seed * 100 + i), mesh, [Shard(i % 2)]) for i in range(4)}
    return {"model": {**state, "b": truth.values((7,), torch.bfloat16, seed)}, "step": seed}


def straggler(writer, rank, world, pause):
    """The last rank begins to write late."""
    class Late(writer):
        def write_data(self, plan, planner):
            if rank == world - 1:
                time.sleep(pause)
            return super().write_data(plan, planner)

        def finish(self, metadata, results):
            time.sleep(pause)
            return super().finish(metadata, results)
    return Late


def save_dcp(rank, world, path, pause, writer, **options):
    for step, seed in (("step1", 1), ("step2", 2), ("step1", 3)):  # and once over what is there
        state = sharded(world, seed)
        if writer is HuggingFaceStorageWriter:
            state = {k: v for k, v in state["model"].items() if k != "b"}
        dcp.save(state, storage_writer=straggler(writer, rank, world, pause if step == "step1" else 0)(path=f"{path}/{step}", **options))


def no_overwrite(rank, world, path, pause):
    """overwrite=False is refused where a save is."""
    dcp.save(sharded(world), storage_writer=FileSystemWriter(f"{path}/step", overwrite=False))
    time.sleep(pause)
    try:
        dcp.save(sharded(world, 1), storage_writer=FileSystemWriter(f"{path}/step", overwrite=False))
    except BaseException:
        return
    raise AssertionError("it wrote over a save that it should have seen")


def save_async(rank, world, path, pause):
    future = dcp.async_save(sharded(world), storage_writer=straggler(FileSystemWriter, rank, world, pause)(path + "/step"),
                            process_group=dist.new_group(backend="gloo"))
    future.result()


class Torch(Save):
    def ranks(self, world, fn, *args, **options):
        self.in_both(lambda path, pause: truth.run_ranks(world, lambda rank, size: fn(rank, size, path, pause, *args, **options)))

    def test_two_ranks(self):
        self.ranks(2, save_dcp, FileSystemWriter)

    def test_three_ranks(self):
        self.ranks(3, save_dcp, FileSystemWriter, thread_count=2)

    def test_a_file_per_item(self):
        self.ranks(2, save_dcp, FileSystemWriter, single_file_per_rank=False)

    def test_async(self):
        self.ranks(2, save_async)

    def test_no_overwrite(self):
        self.ranks(2, no_overwrite)

    def test_hugging_face_writer(self):
        self.ranks(2, save_dcp, HuggingFaceStorageWriter, save_distributed=True)

    def test_hugging_face_writer_consolidates(self):
        self.ranks(2, save_dcp, HuggingFaceStorageWriter, save_distributed=True, enable_consolidation=True)

    def test_hugging_face_writer_whole(self):
        def save(path, pause):
            time.sleep(pause)
            dcp.save({f"w{i}": truth.values((9, 5), seed=i) for i in range(4)}, no_dist=True,
                     storage_writer=HuggingFaceStorageWriter(path + "/step", fqn_to_index_mapping={f"w{i}": 1 + i % 2 for i in range(4)}))
        self.in_both(save, any_order=True)


# ---- transformers, accelerate ----

def tiny():
    import transformers
    transformers.set_seed(7)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                                                  num_key_value_heads=2, vocab_size=100))


class Transformers(Save):
    def test_fewer_shards(self):
        def save(path, pause):
            model = tiny()
            for size in ("60KB", "150KB", "10MB", "100KB"):
                model.save_pretrained(path + "/model", max_shard_size=size)
                time.sleep(pause)
                model.save_pretrained(path + "/variant", max_shard_size=size, variant="fp16")
        plain = self.in_both(save)
        self.assertTrue(list((plain / "model").glob("model-*-of-*.safetensors")))

    def test_each_file_late(self):
        def save(path, pause):
            real = safetensors.torch.save_file

            def late(*args, **kw):
                real(*args, **kw)
                time.sleep(pause)
            from transformers import modeling_utils
            kept = modeling_utils.safe_save_file
            modeling_utils.safe_save_file = late
            try:
                tiny().save_pretrained(path + "/model", max_shard_size="150KB")
            finally:
                modeling_utils.safe_save_file = kept
        self.in_both(save)

    @unittest.skipUnless(importlib.util.find_spec("accelerate"), "no accelerate here")
    def test_accelerate(self):
        def save(path, pause):
            import accelerate
            from accelerate.utils import ProjectConfiguration, set_seed
            set_seed(7)
            run = accelerate.Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=path, automatic_checkpoint_naming=True, total_limit=2))
            model = torch.nn.Linear(8, 4)
            optimizer = torch.optim.AdamW(model.parameters())
            data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8)), batch_size=4)
            model, optimizer, data = run.prepare(model, optimizer, data)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            run.register_for_checkpointing(scheduler)
            for _ in range(4):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                scheduler.step()
                run.save_state()
                time.sleep(pause)
            run.free_memory()
        self.in_both(save)


# ---- Megatron Core ----

def save_megatron(rank, world, path, pause, asynchronous):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    for step in ("iter_0000001", "iter_0000002"):
        if rank == 0:
            os.makedirs(f"{path}/{step}", exist_ok=True)
        dist.barrier()
        state = {k: ShardedTensor.from_rank_offsets(k, truth.values((10, 7), torch.float32, 10 * rank + i), (0, rank, world)) for i, k in enumerate("abc")}
        if rank == world - 1:
            time.sleep(pause)
        request = dist_checkpointing.save({**state, "iteration": 1}, f"{path}/{step}", TorchDistSaveShardedStrategy("torch_dist", 1),
                                          async_sharded_save=asynchronous)
        if request:
            from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
            queue = AsyncCallsQueue()
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
            queue.close()
        if rank == 0:
            with open(path + "/latest_checkpointed_iteration.txt", "w") as f:
                f.write(step)


@unittest.skipUnless(importlib.util.find_spec("megatron"), "no megatron-core here")
class Megatron(Save):
    def ranks(self, asynchronous):
        import megatron_models
        megatron_models.without_gpu()
        self.in_both(lambda path, pause: truth.run_ranks(2, lambda rank, size: save_megatron(rank, size, path, pause, asynchronous)))

    def test_torch_dist(self):
        self.ranks(False)

    def test_torch_dist_async(self):
        self.ranks(True)


if __name__ == "__main__":
    unittest.main()
