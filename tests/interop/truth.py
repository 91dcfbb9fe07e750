# SPDX-License-Identifier: MIT
"""What the frameworks themselves read from a checkpoint, and how a mount is held against it."""
import json
import mmap
import os
import pathlib
import socket
import sys
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
import safetensors
import safetensors.torch
import torch

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
          torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0", torch.float4_e2m1fn_x2: "F4", torch.int64: "I64", torch.int32: "I32",
          torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64", torch.complex128: "C128",
          torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"}
# CONTRACT.md, "role" and "Names", in words of their own.
OPTIMIZER = {"optim", "optimizer", "optimizers", "optimizer_state", "optimizer_states", "last_optimizer_state"}
OTHER = {"lr_scheduler", "lr_schedulers", "scheduler", "schedulers", "rng", "loops", "callbacks", "dataloader", "train_state"}
WRAPPERS = {"model", "module", "state_dict", "app", "dcp"}


def raw(t):
    """The tensor's bytes, little-endian and row-major."""
    t = t.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return t.view(torch.uint8).numpy().tobytes() if t.numel() else b""


def dcp_flat(path, reader=None):
    """Everything in a DCP checkpoint through torch's own loader, by flattened key."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    state = {}
    _load_state_dict(state, storage_reader=reader or FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return flatten_state_dict(state)[0]


def dcp_paths(path):
    """planner_data: {key: path in the state dict}, or None."""
    from torch.distributed.checkpoint import FileSystemReader
    return FileSystemReader(path).read_metadata().planner_data


def hf_writer_flat(path):
    """Files of torch's Hugging Face writer through its own reader."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    meta = HuggingFaceStorageReader(path).read_metadata()
    state = {k: torch.zeros(v.size, dtype=v.properties.dtype) for k, v in meta.state_dict_metadata.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    return state


def safetensors_flat(path):
    """All *.safetensors of a folder through safetensors itself."""
    out = {}
    for f in sorted(pathlib.Path(path).glob("*.safetensors")):
        out.update(safetensors.torch.load_file(f))
    return out


def torch_flat(path):
    """Files of torch.save through torch itself: ({key: tensor or object}, {key: path in the object})."""
    flat, paths = {}, {}
    for f in sorted(pathlib.Path(path).iterdir()):
        if f.suffix == ".json":
            continue
        with open(f, "rb") as h:
            script = h.read(2) == b"PK" and any(n.endswith("/constants.pkl") for n in zipfile.ZipFile(h).namelist())
        waiting = [((), torch.jit.load(f).state_dict() if script else torch.load(f, weights_only=False))]
        while waiting:
            at, value = waiting.pop()
            if isinstance(value, (dict, list, tuple)) and len(value):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                waiting += [((*at, str(k)), v) for k, v in items]
            else:
                flat[".".join(at)] = value
                paths[".".join(at)] = at
    return flat, paths


def role(key):
    parts = key.split(".")
    first = parts[1] if parts[0] in ("state", "app", "dcp") and len(parts) > 1 else parts[0]
    return "optimizer" if first in OPTIMIZER else "other" if first in OTHER else "model"


MODULES = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"}


def model_names(keys, paths):
    """{name in model.safetensors: key} of the model's keys; paths: planner_data or None.

    Where the saver put a wrapper before the model, what stands beside it is not the model's. Parts that wrappers of modules
    left inside names are dropped, unless two names would be the same.
    """
    mine = [k for k in keys if role(k) == "model"]
    inside = {k: (paths or {}).get(k, ())[1:] for k in mine if len((paths or {}).get(k, ())) > 1 and paths[k][0] in WRAPPERS}
    name = {k: ".".join(map(str, inside[k])) for k in inside} or {k: k for k in mine}
    if paths is not None:
        short = {k: ".".join(part for part in n.split(".") if part not in MODULES) for k, n in name.items()}
        if len(set(short.values())) == len(short):
            name = short
    if len(set(name.values())) < len(name):
        return {k: k for k in mine}
    return {n: k for k, n in name.items()}


def attribute(path, name):
    return os.getxattr(path, "user.unshard." + name).decode()


def by_key(folder):
    """{key: file} of a view."""
    return {attribute(f, "key"): f for f in sorted(pathlib.Path(folder).iterdir())}


def wrong_array(path, data, shape):
    """What numpy reads from a .npy in each of its ways, held against data; None when all is well."""
    for mode in (None, "r", "c"):
        if mode and not data:
            continue  # an empty file cannot be mapped, wherever it lies
        a = np.load(path, mmap_mode=mode)
        if a.shape != shape:
            return f"np.load(mmap_mode={mode}): shape {a.shape}, not {shape}"
        if a.tobytes() != data:
            return f"np.load(mmap_mode={mode}): other bytes"
    return None


def wrong_raw(path, data):
    if path.read_bytes() != data:
        return "raw/: other bytes"
    if data:
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as m:
            if m[:] != data:
                return "raw/, mapped shared: other bytes"
    return None


def at_path(value, path):
    """The first tensor that a dotted path leads to in containers, or None; keys of dicts are spelt by str()."""
    if not path:
        return value if isinstance(value, torch.Tensor) else None
    if isinstance(value, dict):
        items = value.items()
    else:
        items = enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, inner in items:
        if path == str(key) or path.startswith(f"{key}."):
            found = at_path(inner, path[len(str(key)) + 1:])
            if found is not None:
                return found
    return None


def wrong_tensors(step, flat):
    """[(key, what is wrong)] of tensors/ and raw/ of a mounted checkpoint."""
    want = {k: v for k, v in flat.items() if isinstance(v, torch.Tensor)}
    arrays, raws = by_key(step / "tensors"), by_key(step / "raw")
    for key in set(raws) - set(want):  # tensors inside objects are named FILE:PATH
        inner = at_path(flat, key.partition(":")[2])
        if inner is not None and attribute(raws[key], "role") == "other":
            want[key] = inner
    out = [(k, "not shown") for k in want if k not in arrays or k not in raws]
    out += [(k, "torch has no such tensor") for k in {*arrays, *raws} - set(want)]
    for k in sorted(set(want) & set(arrays) & set(raws)):
        data, shape = raw(want[k]), tuple(want[k].shape)
        told = attribute(raws[k], "dtype"), tuple(json.loads(attribute(raws[k], "shape")))
        if want[k].dtype is torch.float4_e2m1fn_x2:  # torch counts pairs
            shape_told = shape[:-1] + (2 * shape[-1],)
        else:
            shape_told = shape
        if told != (DTYPES[want[k].dtype], shape_told):
            out.append((k, f"told as {told}, is {want[k].dtype} {shape}"))
        out += [(k, w) for w in (wrong_array(arrays[k], data, shape), wrong_raw(raws[k], data)) if w]
    return out


def wrong_slices(f, name, t):
    """Slices of one tensor through safe_open, at both ends and across the middle."""
    s = f.get_slice(name)
    n = t.shape[0]
    for a, b in {(0, min(1, n)), (n // 3, n - n // 4), (max(0, n - 1), n)}:
        if raw(s[a:b]) != raw(t[a:b]):
            return f"get_slice [{a}:{b}]: other bytes"
    if t.dim() > 1 and raw(s[:, 1:t.shape[1] // 2 + 1]) != raw(t[:, 1:t.shape[1] // 2 + 1]):
        return "get_slice by column: other bytes"
    return None


def wrong_whole(file, want):
    """[(name, what is wrong)] of one safetensors file; want: {name: tensor}."""
    got = safetensors.torch.load_file(file)
    out = [(n, "not in the file") for n in want.keys() - got.keys()]
    out += [(n, "does not belong in the file") for n in got.keys() - want.keys()]
    with safetensors.safe_open(file, "pt") as f:
        for n in sorted(want.keys() & got.keys()):
            if got[n].dtype != want[n].dtype or got[n].shape != want[n].shape or raw(got[n]) != raw(want[n]):
                out.append((n, "load_file: differs"))
            elif want[n].dim() and want[n].dtype is not torch.float4_e2m1fn_x2:
                out += [(n, w) for w in [wrong_slices(f, n, want[n])] if w]
    return out


def wrong_checkpoint(step, flat, paths=None):
    """Everything that differs between a mounted checkpoint and what its framework loads."""
    step = pathlib.Path(step)
    tensors = {k: v for k, v in flat.items() if isinstance(v, torch.Tensor)}
    out = wrong_tensors(step, flat)
    fits = {k for k, v in tensors.items() if v.dtype is not torch.complex128}  # safetensors has no C128
    model = {n: tensors[k] for n, k in model_names(tensors, paths).items() if k in fits}
    if model:
        out += wrong_whole(step / "model.safetensors", model)
    elif (step / "model.safetensors").exists():
        out.append(("model.safetensors", "is there without a tensor of the model"))
    optimizer = {k: v for k, v in tensors.items() if role(k) == "optimizer" and k in fits}
    if optimizer:
        out += wrong_whole(step / "optimizer" / "optimizer.safetensors", optimizer)
    return out


def _rank(rank, world, port, fn, args):
    import torch.distributed as dist
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world),
                      LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        fn(rank, world, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(world, fn, *args):
    """fn(rank, world, *args) in as many real processes, joined by gloo on the loopback."""
    import torch.multiprocessing as mp
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # fork: the ranks inherit the imports, which take longer than all they do
    mp.start_processes(_rank, args=(world, port, fn, args), nprocs=world, join=True, start_method="fork")


def values(shape, dtype=torch.float32, seed=0):
    """The same bytes for the same arguments, and hardly any twice."""
    n = int(np.prod(shape))
    g = torch.Generator().manual_seed(1000 + seed)
    if dtype == torch.bool:
        return (torch.rand(n, generator=g) > 0.5).reshape(shape)
    if dtype.is_complex:
        return torch.complex(torch.randn(n, generator=g, dtype=torch.float64), torch.randn(n, generator=g, dtype=torch.float64)).to(dtype).reshape(shape)
    if dtype.is_floating_point:
        return torch.randn(n, generator=g).to(dtype).reshape(shape)
    return torch.randint(0, 120, (n,), generator=g, dtype=torch.int64).to(dtype).reshape(shape)
