#!/usr/bin/env python3
"""Writes the hand-made fixtures of tests/data/megatron_legacy, with numpy and no torch.

    make_megatron_legacy.py FOLDER

Each is made from full tensors by the rules of Megatron-LM's parallel layers (what rank has which rows or columns), not by those of the
reader; NAME.expected.json has the full tensors. The files are what torch.save writes: a zip with data.pkl of protocol 2.
"""
import argparse
import collections
import hashlib
import io
import json
import os
import pickle
import sys
import types
import zipfile

import numpy as np

torch = types.ModuleType("torch")
torch._utils = types.ModuleType("torch._utils")
sys.modules.update({"torch": torch, "torch._utils": torch._utils})


def _rebuild_tensor_v2(*args):
    raise NotImplementedError


_rebuild_tensor_v2.__module__ = "torch._utils"
torch._utils._rebuild_tensor_v2 = _rebuild_tensor_v2
STORAGES = {"<f4": ("FloatStorage", "F32"), "<f2": ("HalfStorage", "F16"), "|u1": ("ByteStorage", "U8"), "<i8": ("LongStorage", "I64")}
for name, _ in STORAGES.values():
    setattr(torch, name, type(name, (), {"__module__": "torch"}))


class Storage:
    def __init__(self, array):
        self.array = array


class Tensor:
    """A view of a storage: (storage, offset, shape, strides) in elements."""

    def __init__(self, array, storage=None, offset=0, strides=None):
        self.array = array = np.asarray(array)
        self.storage = storage or Storage(np.ascontiguousarray(array).reshape(-1))
        self.offset = offset
        self.strides = strides if strides is not None else tuple(s // array.itemsize for s in np.ascontiguousarray(array).strides)

    def __reduce__(self):
        return _rebuild_tensor_v2, (self.storage, self.offset, self.array.shape, self.strides, False, collections.OrderedDict())


class Pickler(pickle.Pickler):
    def __init__(self, out):
        super().__init__(out, 2)
        self.storages = []

    def persistent_id(self, o):
        if not isinstance(o, Storage):
            return None
        if not any(o is s for s in self.storages):
            self.storages.append(o)
        key = [o is s for s in self.storages].index(True)
        return ("storage", getattr(torch, STORAGES[o.array.dtype.str][0]), str(key), "cpu", len(o.array))


def save(path, value):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    out = io.BytesIO()
    p = Pickler(out)
    p.dump(value)
    with zipfile.ZipFile(path, "w") as z:
        for name, data in [("data.pkl", out.getvalue()), ("byteorder", b"little"), ("version", b"3\n")] + [
                (f"data/{i}", s.array.tobytes()) for i, s in enumerate(p.storages)]:
            z.writestr(zipfile.ZipInfo("archive/" + name, (1980, 1, 1, 0, 0, 0)), data)


class Fixture:
    def __init__(self, folder, name):
        self.root, self.name, self.seed = os.path.join(folder, name), name, 0
        self.tensors, self.raw, self.objects, self.warnings = {}, {}, {}, 0

    def full(self, *shape, dtype="<f4"):
        self.seed += 1
        return np.random.RandomState(self.seed).randint(-1000, 1000, shape).astype(dtype)

    @staticmethod
    def told(array):
        array = np.ascontiguousarray(array)
        return {"dtype": STORAGES[array.dtype.str][1], "shape": list(array.shape), "sha256": hashlib.sha256(array.tobytes()).hexdigest()}

    def expect(self, key, array):
        self.tensors[key] = self.told(array)

    def expect_raw(self, key, array):
        self.raw[key] = self.told(array)

    def rank(self, dirname, args, version, models, more=None):
        state = {"args": argparse.Namespace(**args), "iteration": 7}
        if version is not None:
            state["checkpoint_version"] = version
        state.update(models)
        state.update(more or {})
        save(f"{self.root}/{dirname}/model_optim_rng.pt", state)
        path = f"{dirname}/model_optim_rng.pt:"
        self.objects[path + "args"] = {"$type": "opaque", "class": "argparse.Namespace", "state": args}
        self.objects[path + "iteration"] = 7
        if version is not None:
            self.objects[path + "checkpoint_version"] = version

    def done(self):
        with open(self.root + ".expected.json", "w") as f:
            json.dump({"format": "megatron-legacy", "framework": "Megatron-LM", "written_by": "tests/formats/make_megatron_legacy.py",
                       "warnings": self.warnings, "tensors": self.tensors, "inside_objects": self.raw, "objects": self.objects},
                      f, indent=1, sort_keys=True)
            f.write("\n")


def rows(a, i, n):
    return np.split(a, n, 0)[i]


def columns(a, i, n):
    return np.split(a, n, 1)[i]


def gated(w, v, i, n):
    return np.concatenate([rows(w, i, n), rows(v, i, n)])


def virtual(folder):
    """Two tensor ranks, two stages of two models each; untied head; layers 0-1, 2-3 | 4-5, 6-7 of stages 0 and 1 by turns."""
    f = Fixture(folder, "hand_virtual_tp2_pp2")
    T, P, V, H, L = 2, 2, 2, 4, 8
    args = {"tensor_model_parallel_size": T, "pipeline_model_parallel_size": P, "virtual_pipeline_model_parallel_size": V, "num_layers": L,
            "swiglu": True, "untie_embeddings_and_output_weights": True, "world_size": 8}
    emb, head, norm = f.full(10, H), f.full(10, H), f.full(H)
    f.expect("embedding.word_embeddings.weight", emb)
    f.expect("output_layer.weight", head)
    f.expect("decoder.final_layernorm.weight", norm)
    layers = []
    for i in range(L):
        w, v = f.full(6, H, dtype="<f2"), f.full(6, H, dtype="<f2")
        wb, vb = f.full(6), f.full(6)
        one = {"qkv": f.full(12, H), "qkvb": f.full(12), "proj": f.full(H, 6), "projb": f.full(H), "w": w, "v": v, "wb": wb, "vb": vb,
               "fc2": f.full(H, 6), "ln": f.full(H), "qln": f.full(3)}
        layers.append(one)
        p = f"decoder.layers.{i}."
        for name, a in [("self_attention.linear_qkv.weight", one["qkv"]), ("self_attention.linear_qkv.bias", one["qkvb"]),
                        ("self_attention.linear_qkv.layer_norm_weight", one["ln"]), ("self_attention.q_layernorm.weight", one["qln"]),
                        ("self_attention.linear_proj.weight", one["proj"]), ("self_attention.linear_proj.bias", one["projb"]),
                        ("mlp.linear_fc1.weight", np.concatenate([w, v])), ("mlp.linear_fc1.bias", np.concatenate([wb, vb])),
                        ("mlp.linear_fc2.weight", one["fc2"])]:
            f.expect(p + name, a)
    for p in range(P):
        for t in range(T):
            models = {}
            for v in range(V):
                m = collections.OrderedDict()
                if p == 0 and v == 0:
                    m["embedding.word_embeddings.weight"] = Tensor(rows(emb, t, T))
                for k in range(2):
                    x = layers[v * 4 + p * 2 + k]
                    pre = f"decoder.layers.{k}."
                    qkv = rows(x["qkv"], t, T)
                    # A view into a larger, transposed storage.
                    big = np.concatenate([np.full((4, 1), 99, "<f4"), qkv.T], axis=1)
                    m[pre + "self_attention.linear_qkv.weight"] = Tensor(qkv, Storage(big.reshape(-1)), 1, (1, big.shape[1]))
                    m[pre + "self_attention.linear_qkv.bias"] = Tensor(rows(x["qkvb"], t, T))
                    m[pre + "self_attention.linear_qkv.layer_norm_weight"] = Tensor(x["ln"])
                    m[pre + "self_attention.q_layernorm.weight"] = Tensor(x["qln"])
                    m[pre + "self_attention.linear_proj.weight"] = Tensor(columns(x["proj"], t, T))
                    m[pre + "self_attention.linear_proj.bias"] = Tensor(x["projb"])
                    m[pre + "mlp.linear_fc1.weight"] = Tensor(gated(x["w"], x["v"], t, T))
                    m[pre + "mlp.linear_fc1.bias"] = Tensor(gated(x["wb"], x["vb"], t, T))
                    m[pre + "mlp.linear_fc2.weight"] = Tensor(columns(x["fc2"], t, T))
                    m[pre + "mlp.linear_fc1._extra_state"] = None
                    m[pre + "mlp.linear_fc2._extra_state"] = io.BytesIO(b"amax") if t else None
                    if t:
                        f.objects[f"mp_rank_{t:02d}_{p:03d}/model_optim_rng.pt:model{v}.{pre}mlp.linear_fc2._extra_state"] = {
                            "$type": "opaque", "class": "_io.BytesIO",
                            "state": {"$type": "tuple", "items": [{"$type": "bytes", "value": "YW1heA=="}, 0, None]}}
                if p == P - 1 and v == V - 1:
                    m["decoder.final_layernorm.weight"] = Tensor(norm)
                    m["output_layer.weight"] = Tensor(rows(head, t, T))
                models[f"model{v}"] = m
            f.rank(f"mp_rank_{t:02d}_{p:03d}", args, 3.0, models)
    f.done()


def uneven(folder):
    """One tensor rank, three stages of 1, 3 and 2 layers; tied head; what no rule knows is whole with one tensor rank."""
    f = Fixture(folder, "hand_uneven_pp3")
    P, H = 3, 4
    args = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": P, "num_layers": 6, "swiglu": False,
            "untie_embeddings_and_output_weights": False}
    emb = f.full(10, H)
    f.expect("embedding.word_embeddings.weight", emb)
    done = 0
    for p, n in enumerate([1, 3, 2]):
        m = collections.OrderedDict()
        if p == 0:
            m["embedding.word_embeddings.weight"] = Tensor(emb)
        for k in range(n):
            a, b = f.full(5, H), f.full(7)
            m[f"decoder.layers.{k}.mlp.linear_fc1.weight"] = Tensor(a)
            m[f"decoder.layers.{k}.mixer.A_log"] = Tensor(b)
            f.expect(f"decoder.layers.{done + k}.mlp.linear_fc1.weight", a)
            f.expect(f"decoder.layers.{done + k}.mixer.A_log", b)
        done += n
        if p == P - 1:
            m["output_layer.weight"] = Tensor(emb)
        f.rank(f"mp_rank_00_{p:03d}", args, 3.0, {"model": m})
    f.done()


def experts(folder):
    """Two tensor ranks, two expert ranks of two experts each, single and grouped; the second number of a name is the expert rank."""
    f = Fixture(folder, "hand_experts_tp2_ep2")
    T, E, N, H = 2, 2, 4, 4
    args = {"tensor_model_parallel_size": T, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": E, "num_experts": N,
            "expert_tensor_parallel_size": T, "num_layers": 2, "swiglu": True, "untie_embeddings_and_output_weights": False}
    router, conv = f.full(N, H), f.full(6, H)
    f.expect("decoder.layers.0.mlp.router.weight", router)
    e0 = [(f.full(6, H), f.full(6, H), f.full(H, 6)) for _ in range(N)]
    e1 = [(f.full(6, H), f.full(6, H), f.full(H, 6)) for _ in range(N)]
    for i in range(N):
        w, v, fc2 = e0[i]
        f.expect(f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1.weight", np.concatenate([w, v]))
        f.expect(f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc2.weight", fc2)
        w, v, fc2 = e1[i]
        f.expect(f"decoder.layers.1.mlp.experts.linear_fc1.weight{i}", np.concatenate([w, v]))
        f.expect(f"decoder.layers.1.mlp.experts.linear_fc2.weight{i}", fc2)
    for e in range(E):
        for t in range(T):
            m = collections.OrderedDict()
            d = f"mp_rank_{t:02d}_{e:03d}"
            path = f"{d}/model_optim_rng.pt:"
            m["decoder.layers.0.mlp.router.weight"] = Tensor(router)
            # No rule says how this one is cut: each rank's part is shown, once of all expert ranks.
            m["decoder.layers.0.mixer.conv1d.weight"] = Tensor(rows(conv, t, T))
            if e == 0:
                f.expect_raw(path + "model.decoder.layers.0.mixer.conv1d.weight", rows(conv, t, T))
            state = np.arange(3, dtype="|u1") + t
            m["decoder.layers.0.mlp.linear_fc1._extra_state"] = Tensor(state)
            if e == 0:
                f.expect_raw(path + "model.decoder.layers.0.mlp.linear_fc1._extra_state", state)
            for k in range(N // E):
                i = e * (N // E) + k
                w, v, fc2 = e0[i]
                m[f"decoder.layers.0.mlp.experts.local_experts.{k}.linear_fc1.weight"] = Tensor(gated(w, v, t, T))
                m[f"decoder.layers.0.mlp.experts.local_experts.{k}.linear_fc2.weight"] = Tensor(columns(fc2, t, T))
                w, v, fc2 = e1[i]
                m[f"decoder.layers.1.mlp.experts.linear_fc1.weight{k}"] = Tensor(gated(w, v, t, T))
                m[f"decoder.layers.1.mlp.experts.linear_fc2.weight{k}"] = Tensor(columns(fc2, t, T))
            f.rank(d, args, 3.0, {"model": m})
    f.warnings = 1
    f.done()


def own_tensor(folder, name, T, X, E, more=None):
    """
    Experts on X tensor ranks of their own: rank r of a stage has tensor rank r % T and, of Megatron Core's order of ranks, the experts' r % X and
    expert rank r // X % E. Who is the first of either data parallel group saves (Megatron-LM's checkpointing.py).
    """
    f = Fixture(folder, name)
    N, H = 4, 4
    args = {"tensor_model_parallel_size": T, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": E, "num_experts": N,
            "expert_tensor_parallel_size": X, "num_layers": 1, "swiglu": True, "untie_embeddings_and_output_weights": True}
    args.update(more or {})
    qkv, router = f.full(24, H), f.full(N, H)
    experts = [(f.full(8, H), f.full(8, H), f.full(H, 8)) for _ in range(N)]
    shared = f.full(H, 8)
    p = "decoder.layers.0."
    f.expect(p + "self_attention.linear_qkv.weight", qkv)
    f.expect(p + "mlp.router.weight", router)
    f.expect(p + "mlp.shared_experts.linear_fc2.weight", shared)
    for i, (w, v, fc2) in enumerate(experts):
        f.expect(p + f"mlp.experts.local_experts.{i}.linear_fc1.weight", np.concatenate([w, v]))
        f.expect(p + f"mlp.experts.local_experts.{i}.linear_fc2.weight", fc2)
    for r in range(max(T, X * E)):
        t, x, e = r % T, r % X, r // X % E
        d = f"mp_rank_{t:02d}_{e:03d}"
        # What packs all experts of a rank in one tensor says neither which they are nor how they are cut.
        packed = np.arange(6, dtype="<f4") + 10 * r
        f.expect_raw(f"{d}/model_optim_rng.pt:model.{p}mlp.experts.weight1", packed)
        m = collections.OrderedDict([
            (p + "self_attention.linear_qkv.weight", Tensor(rows(qkv, t, T))),
            (p + "mlp.router.weight", Tensor(router)),
            (p + "mlp.shared_experts.linear_fc2.weight", Tensor(columns(shared, t, T))),
            (p + "mlp.experts.weight1", Tensor(packed))])
        for k in range(N // E):
            w, v, fc2 = experts[e * (N // E) + k]
            m[p + f"mlp.experts.local_experts.{k}.linear_fc1.weight"] = Tensor(gated(w, v, x, X))
            m[p + f"mlp.experts.local_experts.{k}.linear_fc2.weight"] = Tensor(columns(fc2, x, X))
        f.rank(d, args, 3.0, {"model": m})
    f.warnings = 1
    f.done()


def old(folder, name, version, T):
    """Versions 0 and 1.0: nested names, and other orders of the rows of query_key_value."""
    f = Fixture(folder, name)
    heads, d, H = 4, 3, 12
    args = {"tensor_model_parallel_size": T, "pipeline_model_parallel_size": 1, "num_layers": 1, "num_attention_heads": heads}
    emb, pos, dense, h4, fh = f.full(8, H), f.full(5, H), f.full(H, H), f.full(16, H), f.full(H, 16)
    qkv, bias = f.full(heads, 3, d, H), f.full(heads, 3, d)
    pre = "language_model.encoder.layers.0."
    for key, a in [("language_model.embedding.word_embeddings.weight", emb), ("language_model.embedding.position_embeddings.weight", pos),
                   (pre + "attention.query_key_value.weight", qkv.reshape(-1, H)), (pre + "attention.query_key_value.bias", bias.reshape(-1)),
                   (pre + "attention.dense.weight", dense), (pre + "mlp.dense_h_to_4h.weight", h4), (pre + "mlp.dense_4h_to_h.weight", fh)]:
        f.expect(key, a)
    for t in range(T):
        def stored(a):                             # of [heads, 3, d, ...], this rank's heads, in the order of that time
            a = rows(a, t, T)
            a = np.swapaxes(a, 0, 1) if version is None else np.swapaxes(a, 1, 2)
            return np.ascontiguousarray(a).reshape((-1,) + a.shape[3:])
        layer = collections.OrderedDict([
            ("layers.0.attention.query_key_value.weight", Tensor(stored(qkv))),
            ("layers.0.attention.query_key_value.bias", Tensor(stored(bias))),
            ("layers.0.attention.dense.weight", Tensor(columns(dense, t, T))),
            ("layers.0.mlp.dense_h_to_4h.weight", Tensor(rows(h4, t, T))),
            ("layers.0.mlp.dense_4h_to_h.weight", Tensor(columns(fh, t, T)))])
        f.rank(f"mp_rank_{t:02d}", args, version, {"model": {"language_model": {
            "embedding": {"word_embeddings": {"weight": Tensor(rows(emb, t, T))}, "position_embeddings": {"weight": Tensor(pos)}},
            "encoder": layer}}})
    f.done()


def gates(folder):
    """
    Which fc1 are gated args tell by many names, here by none that Megatron-LM has had from the start: a language model with a gate
    (quick_geglu) and norms as megatron/legacy names them, beside a vision model without.
    """
    f = Fixture(folder, "hand_gates_tp2")
    T, H = 2, 4
    args = {"tensor_model_parallel_size": T, "pipeline_model_parallel_size": 1, "num_layers": 1, "swiglu": False, "quick_geglu": True,
            "untie_embeddings_and_output_weights": True}
    w, v, wb, vb, fc2, norm, post = f.full(6, H), f.full(6, H), f.full(6), f.full(6), f.full(H, 6), f.full(H), f.full(H)
    g, gb, fh = f.full(16, H), f.full(16), f.full(H, 16)
    lm, vision = "language_model.encoder.layers.0.", "vision_model.decoder.layers.0."
    for key, a in [(lm + "input_norm.weight", norm), (lm + "post_attention_norm.weight", post),
                   (lm + "mlp.dense_h_to_4h.weight", np.concatenate([w, v])), (lm + "mlp.dense_h_to_4h.bias", np.concatenate([wb, vb])),
                   (lm + "mlp.dense_4h_to_h.weight", fc2), (vision + "mlp.linear_fc1.weight", g), (vision + "mlp.linear_fc1.bias", gb),
                   (vision + "mlp.linear_fc2.weight", fh)]:
        f.expect(key, a)
    for t in range(T):
        f.rank(f"mp_rank_{t:02d}", args, 3.0, {"model": collections.OrderedDict([
            (lm + "input_norm.weight", Tensor(norm)), (lm + "post_attention_norm.weight", Tensor(post)),
            (lm + "mlp.dense_h_to_4h.weight", Tensor(gated(w, v, t, T))), (lm + "mlp.dense_h_to_4h.bias", Tensor(gated(wb, vb, t, T))),
            (lm + "mlp.dense_4h_to_h.weight", Tensor(columns(fc2, t, T))),
            (vision + "mlp.linear_fc1.weight", Tensor(rows(g, t, T))), (vision + "mlp.linear_fc1.bias", Tensor(rows(gb, t, T))),
            (vision + "mlp.linear_fc2.weight", Tensor(columns(fh, t, T)))])})
    f.done()


def blocks(parts, i, n):
    """Mamba's fused rows: this rank's part of each block."""
    return np.concatenate([rows(a, i, n) for a in parts])


def sizes(folder):
    """
    What only sizes tell: fewer groups of queries than ranks (Megatron Core cuts their rows as any), MLA's down projections on each rank and
    cut, Mamba's mixer by its other tensors; beside layers that predict several tokens. A mixer that lacks a tensor stays as it is.
    """
    f = Fixture(folder, "hand_sizes_tp4")
    T, H = 4, 8
    args = {"tensor_model_parallel_size": T, "pipeline_model_parallel_size": 1, "num_layers": 3, "swiglu": True, "num_attention_heads": 4,
            "group_query_attention": True, "num_query_groups": 2, "kv_channels": 3, "q_lora_rank": 8, "kv_lora_rank": 4, "qk_pos_emb_head_dim": 4,
            "untie_embeddings_and_output_weights": True}
    inner, states, heads = 16, 8, 8
    whole = {"0.self_attention.linear_qkv.weight": ("rows", f.full((4 + 2 * 2) * 3, H)),
             "1.self_attention.linear_q_down_proj.weight": ("rows", f.full(8, H)),
             "1.self_attention.linear_kv_down_proj.weight": ("same", f.full(8, H)),
             "1.self_attention.kv_layernorm.weight": ("same", f.full(4)),
             "2.norm.weight": ("same", f.full(H)),
             "2.mixer.A_log": ("rows", f.full(heads)), "2.mixer.D": ("rows", f.full(heads)), "2.mixer.dt_bias": ("rows", f.full(heads)),
             "2.mixer.norm.weight": ("rows", f.full(inner)), "2.mixer.out_proj.weight": ("columns", f.full(H, inner)),
             "2.mixer.in_proj.weight": ("blocks", [f.full(n, H) for n in (inner, inner, states, states, heads)]),
             "2.mixer.conv1d.weight": ("blocks", [f.full(n, 1, 4, dtype="<f2") for n in (inner, states, states)]),
             "2.mixer.conv1d.bias": ("blocks", [f.full(n) for n in (inner, states, states)])}
    whole = {"decoder.layers." + k: v for k, v in whole.items()}
    mtp = {"enorm.weight": ("same", f.full(H)), "hnorm.weight": ("same", f.full(H)), "eh_proj.weight": ("rows", f.full(H, 2 * H)),
           "mtp_model_layer.self_attention.linear_proj.weight": ("columns", f.full(H, 12)), "final_layernorm.weight": ("same", f.full(H))}
    whole.update({"mtp.layers.0." + k: v for k, v in mtp.items()})
    cut = {"rows": rows, "columns": columns, "blocks": blocks, "same": lambda a, i, n: a}
    for key, (how, a) in whole.items():
        f.expect(key, np.concatenate(a) if how == "blocks" else a)
    alone = f.full(12)
    for t in range(T):
        d = f"mp_rank_{t:02d}"
        m = collections.OrderedDict((key, Tensor(cut[how](a, t, T))) for key, (how, a) in whole.items())
        m["decoder.layers.1.mixer.A_log"] = Tensor(rows(alone, t, T))
        f.expect_raw(f"{d}/model_optim_rng.pt:model.decoder.layers.1.mixer.A_log", rows(alone, t, T))
        f.rank(d, args, 3.0, {"model": m})
    f.warnings = 1
    f.done()


def main():
    folder = sys.argv[1]
    sizes(folder)
    virtual(folder)
    uneven(folder)
    experts(folder)
    own_tensor(folder, "hand_expert_tensor1_tp2_ep4", 2, 1, 4)
    own_tensor(folder, "hand_experts_packed_tp1_ep2", 1, 1, 2)
    own_tensor(folder, "hand_expert_tensor1_tp4_ep2", 4, 1, 2)
    own_tensor(folder, "hand_expert_tensor2_tp4_ep2", 4, 2, 2)
    gates(folder)
    old(folder, "hand_version0_tp1", None, 1)
    old(folder, "hand_version0_tp2", None, 2)
    old(folder, "hand_version1_tp2", 1.0, 2)


if __name__ == "__main__":
    main()
