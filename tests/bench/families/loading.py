# SPDX-License-Identifier: MIT
"""Loading a model through a mount of its DCP checkpoint, beside the same loader on a plain local safetensors file.

A made-up Llama of about 1 GiB in bfloat16; each round has a fresh mount, whose `unshard mount` is not counted. Warm: both in the page
cache. Cold: the file's pages and the shards' are dropped before.
"""
import gc
import json
import os
import shutil

from suite.measure import MIB, Failed, interleave, ratio_row, timed
from suite.rows import LOWER, Row
from suite.workloads import data_files, drop_pages, same_bytes, workload

GOAL = 1.15
HIDDEN, INNER, WORDS, LAYERS = 2048, 5632, 32000, 8
EXPONENTS = bytes(b & 0x80 | 0x3d for b in range(256))


def llama_config(layers):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": WORDS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}


def llama_shapes(layers):
    shapes = {"lm_head.weight": (WORDS, HIDDEN), "model.embed_tokens.weight": (WORDS, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes.update({layer + f"self_attn.{p}_proj.weight": (HIDDEN, HIDDEN) for p in "qkvo"})
        shapes.update({layer + "mlp.gate_proj.weight": (INNER, HIDDEN), layer + "mlp.up_proj.weight": (INNER, HIDDEN), layer + "mlp.down_proj.weight": (HIDDEN, INNER),
                       layer + "input_layernorm.weight": (HIDDEN,), layer + "post_attention_layernorm.weight": (HIDDEN,)})
    return shapes


def write_llama(folder, layers):
    """A Hugging Face directory of config.json and one model.safetensors; the bytes of that."""
    header, at = {}, 0
    for name, shape in llama_shapes(layers).items():
        end = at + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name], at = {"dtype": "BF16", "shape": shape, "data_offsets": (at, end)}, end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config(layers)), encoding="utf-8")
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for done in range(0, at, 16 * MIB):
            data = bytearray(os.urandom(min(16 * MIB, at - done)))
            data[1::2] = data[1::2].translate(EXPONENTS)
            f.write(data)
    return 8 + len(text) + at


def sources(bench):
    """(plain folder, DCP folder, bytes): the same model."""
    plain, dcp = bench.work / "plain", bench.work / "dcp"
    size = write_llama(plain, max(1, bench.size(LAYERS)))
    bench.unshard("convert", plain, dcp, "--to", "dcp", "--ranks", "4")
    if not (dcp / "config.json").exists():
        shutil.copy(plain / "config.json", dcp)
    os.sync()
    bench.unshard("diff", plain, dcp)  # fails where anything differs
    return plain, dcp, size


# ---- the loaders: each leaves all of the model in memory of its own; what was only mapped is copied, as a move to a device would ----

def load_file(folder):
    import safetensors.torch
    return {name: t.clone() for name, t in safetensors.torch.load_file(folder / "model.safetensors").items()}


def from_pretrained(folder):
    import torch
    import transformers
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16, local_files_only=True)
    return [p.detach().clone() for p in model.parameters()]


def weight_iterator(folder):
    """What vLLM's safetensors_weights_iterator does, and its weight loaders after it."""
    import safetensors
    import torch
    model = {}
    with safetensors.safe_open(folder / "model.safetensors", "pt") as f:
        for name in f.keys():
            weight = f.get_tensor(name)
            model[name] = torch.empty_like(weight).copy_(weight)
    return model


def fast_safetensors(folder):
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup
    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: [str(folder / "model.safetensors")]})
    buffers = loader.copy_files_to_device()
    model = {name: buffers.get_tensor(name).clone() for name in loader.get_keys()}
    buffers.close()
    loader.close()
    return model


def runai_streamer(folder):
    from runai_model_streamer import SafetensorsStreamer
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(folder / "model.safetensors"))
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


LOADERS = (("safetensors.torch.load_file", load_file), ("transformers from_pretrained", from_pretrained), ("vLLM's loop: safe_open, get_tensor, copy_", weight_iterator),
           ("fastsafetensors, CPU", fast_safetensors), ("Run:ai model streamer, CPU", runai_streamer))


def loaded(loader, folder, server=None):
    """One load, timed; the model is freed after it."""
    gc.collect()
    kept = []
    sample = timed(lambda: kept.append(loader(folder)), server)
    kept.clear()
    return sample


def loader_row(bench, words, loader, plain, dcp, size, cold):
    def local():
        if cold:
            drop_pages(*data_files(plain))
        return loaded(loader, plain)

    def ours():
        if cold:
            drop_pages(*data_files(dcp))
        with bench.mount(dcp) as mount:
            return loaded(loader, mount / "", mount.server)

    samples = interleave({"local": local, "mount": ours}, bench.rounds, limit=45)
    return ratio_row(f"{words}, {'cold' if cold else 'warm'}", "a plain local safetensors file", samples["local"], samples["mount"], size, better=LOWER, goal=GOAL, rss=None)


def rows_of_loaders(bench, cold):
    if not bench.peers:
        for words, _ in LOADERS:
            yield Row(f"{words}, {'cold' if cold else 'warm'}", goal=GOAL, better=LOWER, note="the peers are not installed")
        return
    plain, dcp, size = sources(bench)
    with bench.mount(dcp) as mount:
        if not (mount / "config.json").exists() or not same_names(plain, mount / ""):
            raise Failed("the mount shows another model")
    for words, loader in LOADERS:
        try:
            yield loader_row(bench, words, loader, plain, dcp, size, cold)
        except Exception as e:  # a loader's own: the others go on
            yield Row(f"{words}, {'cold' if cold else 'warm'}", error=f"{type(e).__name__}: {e}")


def same_names(one, other):
    """Do both hold the same tensors under the same names?"""
    import safetensors
    import torch
    with safetensors.safe_open(one / "model.safetensors", "pt") as f, safetensors.safe_open(other / "model.safetensors", "pt") as g:
        return sorted(f.keys()) == sorted(g.keys()) and all(torch.equal(f.get_tensor(n), g.get_tensor(n)) for n in f.keys())


@workload("loading", limit=360, peers=True)
def load_warm(bench):
    """Loaders on a mounted DCP checkpoint, all in the page cache."""
    yield from rows_of_loaders(bench, cold=False)


@workload("loading", limit=360, peers=True)
def load_cold(bench):
    """Loaders on a mounted DCP checkpoint, from the disk."""
    yield from rows_of_loaders(bench, cold=True)


@workload("loading", limit=180, peers=True)
def load_stored(bench):
    """load_file of a mounted safetensors file that is served as it is stored; numpy's mapping of one tensor."""
    if not bench.peers:
        yield Row("load_file, a stored file", goal=GOAL, better=LOWER, note="the peers are not installed")
        return
    import numpy
    plain = bench.work / "plain"
    size = write_llama(plain, max(1, bench.size(LAYERS)))
    os.sync()

    def ours():
        with bench.mount(plain) as mount:
            return loaded(load_file, mount / "", mount.server)

    samples = interleave({"local": lambda: loaded(load_file, plain), "mount": ours}, bench.rounds)
    yield ratio_row("safetensors.torch.load_file, a stored file, warm", "a plain local safetensors file", samples["local"], samples["mount"], size, better=LOWER, goal=GOAL,
                    rss=None)
    name, local = "tensors/lm_head.weight.npy", bench.work / "one.npy"
    with bench.mount(plain) as mount:
        shutil.copyfile(mount / name, local)
        if not same_bytes(["cat", local], mount / name):
            raise Failed("a copy of the .npy differs")

    def mapped(path, server=None):
        return timed(lambda: numpy.array(numpy.load(path, mmap_mode="r")), server)

    def ours_mapped():
        with bench.mount(plain) as mount:
            return mapped(mount / name, mount.server)

    samples = interleave({"local": lambda: mapped(local), "mount": ours_mapped}, bench.rounds)
    yield ratio_row("numpy.load(mmap_mode), copied, first touch", "a local .npy", samples["local"], samples["mount"], local.stat().st_size, goal=0.2, lab=0.18)
