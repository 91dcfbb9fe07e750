#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Loading to a device beside other loaders: load_device.py [--device D] [--mib N] [--rounds N]

Wants torch and safetensors; fastsafetensors and Run:ai's streamer take part where they are
installed. Files are in the page cache, loaders take turns, every loader's tensors are held against
what was written first. $UNSHARD_LIBRARY names libunshard, $UNSHARD the command. Exit 77: torch has no such device.
"""
import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]
import mounted  # noqa: E402

WIDTH = 4096


def make_model(torch, mib):
    count = max(1, mib * 2**20 // (WIDTH * WIDTH * 2))
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    model = {f"layers.{i}.weight": random(WIDTH, WIDTH) for i in range(count)}
    model["norm.weight"] = random(WIDTH)
    return model


def write_columns(torch, model, folder):
    """Zarr arrays of four chunks, each with a quarter of the columns."""
    import json
    for key, value in model.items():
        array = folder / key
        array.mkdir(parents=True)
        parts = 4 if value.dim() == 2 else 1
        chunk = list(value.shape[:-1]) + [value.shape[-1] // parts]
        meta = {"zarr_format": 2, "shape": list(value.shape), "chunks": chunk,
                "dtype": "bfloat16", "compressor": None, "fill_value": None, "order": "C",
                "filters": None}
        (array / ".zarray").write_text(json.dumps(meta), encoding="utf-8")
        for i, part in enumerate(value.chunk(parts, dim=-1)):
            name = ".".join(["0"] * (value.dim() - 1) + [str(i)])
            (array / name).write_bytes(part.contiguous().view(torch.uint8).numpy().tobytes())


def by_unshard(source, device):
    import unshard

    def load():
        with unshard.open(source, index_memory=True) as c:
            return c.load_many(None, device=device, to="torch")
    return load


def by_safetensors(path, device):
    from safetensors.torch import load_file
    return lambda: load_file(path, device=device)


def by_fastsafetensors(path, device):
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load():
        loader = SafeTensorsFileLoader(SingleGroup(), device=device)
        loader.add_filenames({0: [path]})
        buffers = loader.copy_files_to_device()
        tensors = {key: buffers.get_tensor(key).clone() for key in loader.get_keys()}
        buffers.close()
        loader.close()
        return tensors
    return load


def by_runai(path, device):
    from runai_model_streamer import SafetensorsStreamer

    def load():
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(path)
            return {name: tensor.to(device, copy=True) for name, tensor in streamer.get_tensors()}
    return load


def by_torch_dcp(folder, model, device):
    """As a trainer starts again: the tensors are there, what was saved is read into them."""
    import torch
    import torch.distributed.checkpoint as dcp

    def load():
        tensors = {key: torch.empty_like(value, device=device) for key, value in model.items()}
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
        return tensors
    return load


def by_holder(source, device):
    """The next start of a server: what `unshard hold` keeps is mapped, nothing is read."""
    import unshard

    def load():
        with unshard.attach(source, device) as h:
            return {key: h.load(key, to="torch") for key in load.keys}
    with unshard.open(source, index_memory=True) as c:
        load.keys = c.keys()
    return load


def settle(torch, device):
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def holder(source, device):
    with tempfile.TemporaryDirectory() as run:
        os.environ["XDG_RUNTIME_DIR"] = run
        process = subprocess.Popen([mounted.unshard(), "hold", source, "--device", device, "--json"],
                                   stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()
            del os.environ["XDG_RUNTIME_DIR"]


def loaders(folder, model, device, stack):
    """(name, function that gives all tensors on the device): peers before ours, for each kind of files."""
    one, dcp, columns = (folder / name for name in ("one", "dcp", "columns"))
    path = str(one / "model.safetensors")
    out = [("safetensors, one file", by_safetensors(path, device))]
    for name, peer in (("fastsafetensors", by_fastsafetensors), ("Run:ai streamer", by_runai)):
        try:
            out.append((name + ", one file", peer(path, device)))
        except ImportError:
            print(name + " is not installed: without it")
    out += [("unshard, one file", by_unshard(one, device)),
            ("torch dcp.load, DCP of a 2x2 mesh", by_torch_dcp(dcp, model, device)),
            ("unshard, DCP of a 2x2 mesh", by_unshard(dcp, device)),
            ("unshard, four columns a tensor", by_unshard(columns, device))]
    if mounted.can_mount():
        mnt = stack.enter_context(mounted.mounted(dcp))
        out.append(("safetensors, that DCP in a mount", by_safetensors(str(mnt / "model.safetensors"), device)))
    else:
        print("nothing can be mounted: without a mount")
    if device.startswith("cuda"):
        stack.enter_context(holder(one, device))
        out.append(("unshard hold, the next start", by_holder(one, device)))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    import safetensors.torch
    import torch
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: torch has no CUDA device")
        return 77
    name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "the host"
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = pathlib.Path(temporary)
        model = make_model(torch, args.mib)
        size = sum(v.numel() * v.element_size() for v in model.values())
        (folder / "one").mkdir()
        safetensors.torch.save_file(model, folder / "one" / "model.safetensors")
        write_columns(torch, model, folder / "columns")
        subprocess.run([mounted.unshard(), "convert", folder / "one", folder / "dcp", "--to", "dcp", "--mesh", "2x2", "-q"], check=True)
        ways = loaders(folder, model, args.device, stack)
        took = {way: [] for way, _ in ways}
        print(f"{size / 2**20:.0f} MiB of BF16 to {name}, torch {torch.__version__}, "
              f"{time.strftime('%Y-%m-%d')}", flush=True)
        for turn in range(args.rounds + 1):
            for way, load in ways if turn % 2 == 0 else ways[::-1]:
                settle(torch, args.device)
                start = time.perf_counter()
                tensors = load()
                settle(torch, args.device)
                seconds = time.perf_counter() - start
                if turn == 0:  # the first is not measured, but looked at
                    for key, value in model.items():
                        assert torch.equal(tensors[key].cpu(), value), f"{way}: {key} differs"
                else:
                    took[way].append(seconds)
                del tensors
        for way, seconds in took.items():
            median, best = statistics.median(seconds), min(seconds)
            print(f"{way:36} {median * 1e3:8.1f} ms {size / median / 1e9:8.2f} GB/s  (best {size / best / 1e9:.2f})")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("UNSHARD_LIBRARY", str(ROOT / "build-test" / "lib" / "libunshard.so"))
    sys.exit(main())
