# SPDX-License-Identifier: MIT
"""Every way into a mount, to every format that is written: loaded by the frameworks' own loaders, and equal by `unshard diff`.

The last part changes one tensor of a checkpoint that is there: all else that its framework loads is as it was.
"""
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist

import mounted
import olmo_models
import truth

T = truth.values
TENSORS = {
    "model.embed_tokens.weight": T((96, 32), torch.bfloat16, 1),
    "model.layers.0.self_attn.q_proj.weight": T((33, 32), torch.float32, 2),
    "model.layers.0.mlp.up_proj.weight": T((70, 32), torch.float16, 3),
    "model.layers.0.input_layernorm.weight": T((32,), torch.float32, 4),
    "model.layers.1.mlp.experts.weight": T((4, 10, 6), torch.bfloat16, 5),
    "model.norm.weight": T((7,), torch.float32, 6),
}


# ---- ways in: each writes TENSORS into a directory of the mount ----

def by_save_file(step):
    step.mkdir()
    safetensors.torch.save_file(TENSORS, step / "model.safetensors", {"format": "pt"})


def by_cp(step):
    with tempfile.TemporaryDirectory() as scratch:
        safetensors.torch.save_file(TENSORS, scratch + "/model.safetensors")
        step.mkdir()
        subprocess.run(["cp", scratch + "/model.safetensors", step], check=True)


def by_rename_of_a_set(step):
    """As save_pretrained writes: numbered files and an index; then the finished directory gets its name."""
    temp = step.with_name(step.name + ".tmp")
    temp.mkdir()
    weight_map, keys = {}, sorted(TENSORS)
    for i in range(3):
        name = f"model-{i + 1:05}-of-00003.safetensors"
        safetensors.torch.save_file({k: TENSORS[k] for k in keys[i::3]}, temp / name, {"format": "pt"})
        weight_map.update({k: name for k in keys[i::3]})
    (temp / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    os.rename(temp, step)


def by_numpy(step):
    (step / "tensors").mkdir(parents=True)
    for i, (key, t) in enumerate(TENSORS.items()):
        flat = t.contiguous()
        array = flat.view(torch.uint16).numpy().view("V2") if t.dtype is torch.bfloat16 else flat.numpy()
        if i % 2:
            np.save(step / f"tensors/{key}.npy", array)
        else:
            mapped = np.lib.format.open_memmap(step / f"tensors/{key}.npy", "w+", array.dtype, array.shape)
            mapped[...] = array
            mapped.flush()


def by_copy_of_a_checkpoint(step):
    """cp -r out of another mount, of another format."""
    with tempfile.TemporaryDirectory() as scratch:
        safetensors.torch.save_file(TENSORS, scratch + "/model.safetensors")
        os.mkdir(scratch + "/run")
        mounted.run("convert", scratch + "/model.safetensors", scratch + "/run/dcp", "--to", "dcp", "--mesh", "2x2")
        with mounted.mounted(scratch + "/run") as other:
            subprocess.run(["cp", "-r", other / "dcp", step], check=True)


WAYS_IN = [by_save_file, by_cp, by_rename_of_a_set, by_numpy, by_copy_of_a_checkpoint]


# ---- ways out: each loads a directory with the format's own framework ----

def load_hf(path):
    return truth.safetensors_flat(path)


def load_dcp(path):
    return truth.dcp_flat(str(path))


def load_dcp_hf(path):
    return truth.hf_writer_flat(str(path))


def megatron_load(rank, world, path, out):
    """By dist_checkpointing.load: rows cut over the ranks where they can be, else the same on each."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    state, cut = {}, {}
    for key, t in TENSORS.items():
        cut[key] = t.shape[0] % world == 0
        mine = torch.zeros_like(t[:t.shape[0] // world] if cut[key] else t)
        state[key] = ShardedTensor.from_rank_offsets(key, mine, *([(0, rank, world)] if cut[key] else []), replica_id=0 if cut[key] else rank)
    state = dist_checkpointing.load(state, path)
    for key in TENSORS:
        if cut[key]:
            parts = [torch.zeros_like(state[key].view(torch.uint8)) for _ in range(world)]
            dist.all_gather(parts, state[key].view(torch.uint8).contiguous())
            state[key] = torch.cat(parts).view(state[key].dtype)
    if rank == 0:
        torch.save(state, out)


def load_torch_dist(path):
    with tempfile.TemporaryDirectory() as scratch:
        truth.run_ranks(2, megatron_load, str(path), scratch + "/out.pt")
        return {k: t for k, t in torch.load(scratch + "/out.pt", weights_only=False).items() if k in TENSORS}


def olmo_unshard(path, out):
    olmo_models.without_network()
    sys.modules["cached_path"].cached_path = lambda name, **kw: pathlib.Path(name)  # local files are what they are
    from olmo_core.distributed.checkpoint import unshard_checkpoint
    unshard_checkpoint(path, out, optim=False, quiet=True)


def load_olmo_step(path):
    with tempfile.TemporaryDirectory() as scratch:
        olmo_unshard(str(path / "model_and_optim"), scratch)
        return torch.load(scratch + "/model.pt")


def load_pt(path):
    return torch.load(path / "pytorch_model.bin", weights_only=True)


def load_npz(path):
    with np.load(path / "tensors.npz") as z:
        return {k: torch.from_numpy(z[k].view(np.uint16)).view(torch.bfloat16) if z[k].dtype.kind == "V" else torch.from_numpy(z[k]) for k in z.files}


def load_zarr(path):
    """By tensorstore, and by zarr-python where that knows the type: the arrays of Megatron's layout, one a folder."""
    import tensorstore
    import zarr
    state = {}
    for meta in sorted(m for m in path.glob("*/.zarray") if m.stat().st_size):  # those of locks (NAME.sync) are empty
        folder = str(meta.parent)
        array = tensorstore.open({"driver": "zarr", "kvstore": {"driver": "file", "path": folder}}, open=True).result().read().result()
        if json.loads(meta.read_text())["dtype"] != "bfloat16":
            assert zarr.open_array(folder, mode="r", zarr_format=2)[...].tobytes() == array.tobytes(), folder
        state[meta.parent.name] = array
    return state


def as_torch(array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def load_megatron_zarr(path):
    return {k: as_torch(a) for k, a in load_zarr(path).items()}


WAYS_OUT = {
    "hf": load_hf, "hf:max_shard_size=8KiB": load_hf, "dcp:ranks=3": load_dcp, "dcp:mesh=2x3": load_dcp, "dcp-hf:ranks=4": load_dcp_hf,
    "torch_dist:ranks=3": load_torch_dist, "zarr:ranks=3": load_megatron_zarr, "olmo-step:ranks=2": load_olmo_step, "pt": load_pt, "npz": load_npz,
}


def bytes_of(state):
    return {k: (str(t.dtype), tuple(t.shape), truth.raw(t)) for k, t in state.items() if isinstance(t, torch.Tensor)}


class Matrix(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-matrix-"))
        self.addCleanup(shutil.rmtree, self.dir)
        safetensors.torch.save_file(TENSORS, self.dir / "truth.safetensors")

    def all_ways_into(self, save):
        source = self.dir / "source"
        source.mkdir()
        with mounted.mounted(source, "rw", "save=" + save) as mnt:
            for way in WAYS_IN:
                way(mnt / way.__name__)
        for way in WAYS_IN:
            there = source / way.__name__
            with self.subTest(save=save, way=way.__name__):
                self.assertEqual(bytes_of(WAYS_OUT[save](there)), bytes_of(TENSORS))
                # torch_dist and olmo-step have objects besides, which their loaders cannot do without
                said = mounted.run("diff", self.dir / "truth.safetensors", there, check=False)
                self.assertIn(f"{len(TENSORS)} tensors identical", said.stdout)
                self.assertEqual(mounted.run("diff", source / WAYS_IN[0].__name__, there).returncode, 0)

    def test_hf(self):
        self.all_ways_into("hf")

    def test_hf_sharded(self):
        self.all_ways_into("hf:max_shard_size=8KiB")

    def test_dcp(self):
        self.all_ways_into("dcp:ranks=3")

    def test_dcp_mesh(self):
        self.all_ways_into("dcp:mesh=2x3")

    def test_dcp_hf(self):
        self.all_ways_into("dcp-hf:ranks=4")

    def test_torch_dist_by_megatron(self):
        self.all_ways_into("torch_dist:ranks=3")

    def test_zarr(self):
        self.all_ways_into("zarr:ranks=3")

    def test_olmo_step_by_olmo_core(self):
        self.all_ways_into("olmo-step:ranks=2")

    def test_pt(self):
        self.all_ways_into("pt")

    def test_npz(self):
        self.all_ways_into("npz")


# ---- changing what is there ----

DATA = mounted.DATA


def everything_of_dcp(path):
    """Tensors, objects, and which box lies where: all that torch's metadata say."""
    from torch.distributed.checkpoint import FileSystemReader
    meta = FileSystemReader(path).read_metadata()
    where = {(i.fqn, tuple(i.offset or ()), i.index): (s.relative_path, s.offset, s.length) for i, s in meta.storage_data.items()}
    boxes = {k: sorted((tuple(c.offsets), tuple(c.sizes)) for c in getattr(m, "chunks", []) if 0 not in c.sizes) for k, m in meta.state_dict_metadata.items()}
    return {**truth.dcp_flat(str(path)), "(where)": where, "(boxes)": boxes, "(planner_data)": meta.planner_data}


def everything_of_olmo_step(path):
    return {**everything_of_dcp(path / "model_and_optim"), "(train)": repr(torch.load(path / "train/rank0.pt", weights_only=False))}


def everything_of_torch_dist(path):
    common = path / "common.pt"
    return {**everything_of_dcp(path), "(common)": repr(torch.load(common, weights_only=False)) if common.exists() else None}


# fixture: how its framework loads everything
EDITS = {
    "torch_dcp/dcp_fsdp2_adamw_3r_bf16": everything_of_dcp,
    "torch_dcp/dcp_mesh_2x2": everything_of_dcp,
    "torch_dcp/dcp_torch231_2r": everything_of_dcp,
    "olmo_core/step9": everything_of_olmo_step,
    "megatron/mcore019_torch_dist_tp2_pp2": everything_of_torch_dist,
    "megatron/mcore018_torch_dist_commonpt": everything_of_torch_dist,
    "megatron/mcore05_zarr_tp2_pp2_flat": load_megatron_zarr,
    "hf_dcp/hfdcp_fsdp2_3r": truth.hf_writer_flat,
    "safetensors/hf_sharded_f32": truth.safetensors_flat,
    "safetensors/hf_peft_lora": truth.safetensors_flat,
    "torch_file/hf_bin_sharded": lambda path: truth.torch_flat(path)[0],
    "torch_file/pt_legacy_proto4": lambda path: truth.torch_flat(path)[0],
}


def comparable(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), truth.raw(value)
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items()}
    return [comparable(v) for v in value] if isinstance(value, list) else repr(value)


def differing(a, b):
    """{key: both values} where two dicts differ, one level down too."""
    out = {}
    for k in a.keys() | b.keys():
        x, y = a.get(k), b.get(k)
        if x != y:
            out[k] = differing(x, y) if isinstance(x, dict) and isinstance(y, dict) else (x, y)
    return out


class Edit(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="unshardfs-edit-"))
        self.addCleanup(shutil.rmtree, self.dir)

    def test_one_tensor_and_nothing_else(self):
        for fixture, load in EDITS.items():
            with self.subTest(fixture=fixture):
                step = self.dir / fixture.replace("/", "-") / "step"
                shutil.copytree(DATA / fixture, step)
                before = comparable(load(step))
                with mounted.mounted(step.parent, "rw") as mnt:
                    # one that the framework has under its own name, the largest
                    names = [n for n in os.listdir(mnt / "step/raw") if isinstance(before.get(n), tuple) and before[n][2]]
                    name = max(names, key=lambda n: (len(before[n][2]), n))
                    new = bytes(b ^ 1 for b in before[name][2])
                    array = np.load(mnt / f"step/tensors/{name}.npy")
                    np.save(mnt / f"step/tensors/{name}.npy", np.frombuffer(new, array.dtype).reshape(array.shape))
                after = comparable(load(step))
                self.assertEqual(after.pop(name), (*before.pop(name)[:2], new))
                self.assertEqual(differing(after, before), {})

    def test_one_comes_and_one_is_resized(self):
        """A new tensor, and another shape for one: the others keep bytes, boxes and objects, as the framework reads them."""
        for fixture in "torch_dcp/dcp_fsdp2_adamw_3r_bf16", "torch_dcp/dcp_mesh_2x2", "olmo_core/step9", "megatron/mcore018_torch_dist_commonpt":
            with self.subTest(fixture=fixture):
                step = self.dir / fixture.replace("/", "-") / "step"
                shutil.copytree(DATA / fixture, step)
                before = comparable(EDITS[fixture](step))
                with mounted.mounted(step.parent, "rw") as mnt:
                    told = {n: os.getxattr(mnt / f"step/raw/{n}", "user.unshard.role") for n in os.listdir(mnt / "step/raw")}
                    resized = max(n for n, role in told.items() if role == b"model" and isinstance(before.get(n), tuple))
                    new = resized + "_new"
                    np.save(mnt / f"step/tensors/{resized}.npy", np.arange(35, dtype=np.float32).reshape(7, 5))
                    np.save(mnt / f"step/tensors/{new}.npy", np.arange(12, dtype=np.int64).reshape(3, 4))
                after = comparable(EDITS[fixture](step))
                self.assertEqual(after.pop(resized), ("torch.float32", (7, 5), np.arange(35, dtype=np.float32).tobytes()))
                self.assertEqual(after.pop(new), ("torch.int64", (3, 4), np.arange(12, dtype=np.int64).tobytes()))
                before.pop(resized)
                for state in before, after:
                    for key in resized, new:
                        state["(boxes)"].pop(key, None)
                    state.pop("(where)")  # other files of the same ranks
                    # where a key stands in a nested dict is told as the writer does it: of a model and an optimizer as torch
                    self.assertTrue(fixture != "torch_dcp/dcp_fsdp2_adamw_3r_bf16" or state["(planner_data)"])
                    if fixture != "torch_dcp/dcp_fsdp2_adamw_3r_bf16":
                        state.pop("(planner_data)")
                    else:
                        for key in resized, new:
                            state["(planner_data)"].pop(key, None)
                self.assertEqual(differing(after, before), {})
