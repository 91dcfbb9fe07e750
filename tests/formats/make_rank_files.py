#!/usr/bin/env python3
"""Writes the hand-made fixtures of tests/data/llama, neox, fairscale and nanotron, with numpy and no torch.

    make_rank_files.py FOLDER        FOLDER/llama/NAME, ...

Each is made from full tensors, which are cut as the parallel layers of its framework do; NAME.expected.json has the full tensors.
"""
import json
import os
import sys

import numpy as np

import make_megatron_legacy as base
from make_megatron_legacy import Tensor, columns, rows, save


class Fixture(base.Fixture):
    def __init__(self, folder, family, name, about):
        super().__init__(os.path.join(folder, family), name)
        self.about = about

    @staticmethod
    def told(array):  # that of base makes arrays without dimensions have one
        return dict(base.Fixture.told(array), shape=list(np.asarray(array).shape))

    def text(self, path, text):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)

    def rank_file(self, path, arrays, **more):
        state = {k: Tensor(np.ascontiguousarray(v)) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
        save(os.path.join(self.root, path), dict(state, **more))

    def done(self):
        with open(self.root + ".expected.json", "w") as f:
            json.dump(dict(self.about, written_by="tests/formats/make_rank_files.py", warnings=self.warnings, tensors=self.tensors,
                           inside_objects=self.raw, objects=self.objects), f, indent=1, sort_keys=True)
            f.write("\n")


# ---------------------------------------------------------------- Meta's Llama
LLAMA = {"format": "llama-consolidated", "framework": "Meta Llama"}


def llama(folder, name, ranks, cut, params=None, **more):
    """`cut`: name -> (array, "rows" | "columns" | "same" | "raw"); raw: each rank has its own, shown as it is."""
    f = Fixture(folder, "llama", name, LLAMA)
    state = [{} for _ in range(ranks)]
    for key, (shape, how) in cut.items():
        full = f.full(*shape)
        for r in range(ranks):
            state[r][key] = {"rows": lambda: rows(full, r, ranks), "columns": lambda: columns(full, r, ranks), "same": lambda: full,
                             "raw": lambda: full + r}[how]()
            if how == "raw":
                f.expect_raw(f"consolidated.{r:02d}.pth:{key}", full + r)
        if how != "raw":
            f.expect(key, full)
    for r in range(ranks):
        f.rank_file(f"consolidated.{r:02d}.pth", state[r], **more)
        for k, v in more.items():
            f.objects[f"consolidated.{r:02d}.pth:{k}"] = v
    if params:
        f.text("params.json", json.dumps(params))
    f.warnings = int(any(how == "raw" for _, how in cut.values()))
    f.done()


def llamas(folder):
    layer = {"layers.0.attention.wq.weight": ((12, 12), "rows"), "layers.0.attention.wo.weight": ((12, 12), "columns"),
             "layers.0.feed_forward.w2.weight": ((12, 18), "columns"), "layers.0.attention_norm.weight": ((12,), "same")}
    # Without params.json the width is that of the last norm.
    llama(folder, "hand_no_params_mp3", 3, dict(layer, **{"norm.weight": ((12,), "same"), "tok_embeddings.weight": ((15, 12), "rows")}))
    # One head for keys and two ranks: both have it, and nothing says so. A tower that no rule knows.
    llama(folder, "hand_raw_mp2", 2, dict(layer, **{"layers.0.attention.wk.weight": ((3, 12), "raw"), "vision_model.conv1.weight": ((4, 2), "raw"),
                                                    "tok_embeddings.weight": ((14, 12), "columns")}),
          {"dim": 12, "n_heads": 4, "n_kv_heads": 1, "n_layers": 1}, step=7)


# ---------------------------------------------------------------- GPT-NeoX and Megatron-DeepSpeed
NEOX = {"format": "neox-pipeline", "framework": "GPT-NeoX (DeepSpeed)"}
BLOOM = {"format": "neox-pipeline", "framework": "Megatron-DeepSpeed"}


def piece(how, full, r, n):
    """What rank r of n has; `full` of a sum is the list of what they have."""
    return {"rows": lambda: rows(full, r, n), "columns": lambda: columns(full, r, n), "same": lambda: full, "sum": lambda: full[r],
            "gated": lambda: np.concatenate([rows(h, r, n) for h in np.split(full, 2)]), "raw": lambda: full + r}[how]()


def added(parts):
    """As Python's sum() of torch tensors: from 0, one after the other, rounded to the type each time."""
    out = np.zeros_like(parts[0])
    for p in parts:
        out = (out.astype("<f8") + p.astype("<f8")).astype(p.dtype)
    return out


def neox_layer(f, number, ranks, cut, dtype="<f4"):
    state = [{} for _ in range(ranks)]
    for key, (shape, how) in cut.items():
        full = f.full(*shape, dtype=dtype)
        if how == "sum":
            full = [(f.full(*shape) / 7).astype(dtype) for _ in range(ranks)]
        for r in range(ranks):
            state[r][key] = piece(how, full, r, ranks)
        if how == "raw":
            f.warnings = 1
            for r in range(ranks):
                f.expect_raw(f"layer_{number:02d}-model_{r:02d}-model_states.pt:{key}", full + r)
        else:
            f.expect(f"layer_{number:02d}/{key}", added(full) if how == "sum" else full)
    for r in range(ranks):
        f.rank_file(f"layer_{number:02d}-model_{r:02d}-model_states.pt", state[r])


def neox_rank(f, rank, state):
    path = f"mp_rank_{rank:02d}_model_states.pt"
    save(f"{f.root}/{path}", state)
    f.objects[path] = state


def neoxes(folder):
    norm = {"input_layernorm.weight": ((12,), "same"), "input_layernorm.bias": ((12,), "same")}
    # Three ranks, summands of F32 and F16 that do not add up exactly.
    for name, dtype in (("hand_sum_f32_tp3", "<f4"), ("hand_sum_f16_tp3", "<f2")):
        f = Fixture(folder, "neox", name, NEOX)
        neox_layer(f, 2, 3, dict(norm, **{"attention.dense.weight": ((12, 12), "columns"), "attention.dense.bias": ((12,), "sum"),
                                          "mlp.dense_h_to_4h.weight": ((24, 12), "rows"), "mlp.dense_4h_to_h.weight": ((12, 24), "columns"),
                                          "mlp.dense_4h_to_h.bias": ((12,), "sum"), "attention.sinks": ((3,), "raw")}), dtype)
        f.done()
    # The Llama-like layers of 2024: a fused gate; 100 layers and more have three digits.
    f = Fixture(folder, "neox", "hand_gated_tp2", NEOX)
    neox_layer(f, 102, 2, {"attention.dense.weight": ((12, 12), "columns"), "attention.query_key_value.weight": ((36, 12), "rows"),
                           "mlp.linear1.weight": ((40, 12), "gated"), "mlp.linear1.bias": ((40,), "gated"), "mlp.linear2.weight": ((12, 20), "columns"),
                           "input_layernorm.scale": ((12,), "same")})
    neox_rank(f, 0, {"global_steps": 7, "mp_world_size": 2, "module": None, "args": {"num_layers": 1}})
    f.done()
    # Megatron-DeepSpeed: the same names of files, and biases of which each rank has a copy.
    f = Fixture(folder, "neox", "hand_bloom_tp2", BLOOM)
    neox_layer(f, 1, 2, {"word_embeddings.weight": ((14, 12), "rows"), "word_embeddings.norm.weight": ((12,), "same")})
    neox_layer(f, 3, 2, dict(norm, **{"self_attention.dense.weight": ((12, 12), "columns"), "self_attention.dense.bias": ((12,), "same"),
                                      "self_attention.query_key_value.bias": ((36,), "rows"), "mlp.dense_h_to_4h.weight": ((24, 12), "rows"),
                                      "mlp.dense_4h_to_h.weight": ((12, 24), "columns"), "mlp.dense_4h_to_h.bias": ((12,), "same")}))
    neox_layer(f, 5, 2, {"weight": ((12,), "same"), "bias": ((12,), "same")})
    f.done()
    # Layers of Transformer Engine (2024): each rank's row-parallel biases are shown as they are.
    f = Fixture(folder, "neox", "hand_te_tp2", NEOX)
    neox_layer(f, 2, 2, dict(norm, **{"attention.qkv.weight": ((36, 12), "rows"), "attention.qkv.bias": ((36,), "rows"),
                                      "attention.proj.weight": ((12, 12), "columns"), "attention.proj.bias": ((12,), "raw"),
                                      "mlp.layer_norm_weight": ((12,), "same"), "mlp.layer_norm_bias": ((12,), "same"),
                                      "mlp.fc1_weight": ((24, 12), "rows"), "mlp.fc1_bias": ((24,), "rows"),
                                      "mlp.fc2_weight": ((12, 24), "columns"), "mlp.fc2_bias": ((12,), "raw")}))
    f.done()
    # Dropless experts (2025), of which each rank has some; and files of DeepSpeed's MoE (2024), whose cut nothing tells.
    f = Fixture(folder, "neox", "hand_moe_tp2", NEOX)
    neox_layer(f, 2, 2, dict(norm, **{"attention.dense.weight": ((12, 12), "columns"), "mlp.router.layer.weight": ((4, 12), "same"),
                                      "mlp.experts.mlp.w1": ((32, 12), "rows"), "mlp.experts.mlp.w2": ((32, 12), "rows"),
                                      "mlp.experts.mlp.w3": ((32, 12), "rows")}))
    key = "sequential.3.mlp.deepspeed_moe.experts.deepspeed_experts.0.dense_h_to_4h.weight"
    for r in range(2):
        path, full = f"layer_0_expert_0_mp_rank_{r:02d}_model_states.pt", f.full(6, 4)
        f.rank_file(path, {key: full})
        f.expect_raw(f"{path}:{key}", full)
    f.warnings = 1
    f.done()
    # One rank: nothing is cut, whatever it is called.
    f = Fixture(folder, "neox", "hand_tp1", NEOX)
    neox_layer(f, 2, 1, dict(norm, **{"attention.dense.weight": ((12, 12), "same"), "attention.dense.bias": ((12,), "same"), "x.y": ((3, 2, 2), "same")}))
    f.done()
    # Without a pipeline the ranks' files have the module.
    f = Fixture(folder, "neox", "hand_module_tp2", NEOX)
    cut = {"sequential.0.word_embeddings.weight": ((14, 12), "rows"), "sequential.2.attention.dense.weight": ((12, 12), "columns"),
           "sequential.2.attention.dense.bias": ((12,), "sum"), "sequential.4.norm.weight": ((12,), "same")}
    state = [{} for _ in range(2)]
    for key, (shape, how) in cut.items():
        full = [f.full(*shape), f.full(*shape)] if how == "sum" else f.full(*shape)
        f.expect("module." + key, added(full) if how == "sum" else full)
        for r in range(2):
            state[r][key] = Tensor(np.ascontiguousarray(piece(how, full, r, 2)))
    for r in range(2):
        save(f"{f.root}/mp_rank_{r:02d}_model_states.pt", {"module": state[r], "global_steps": 9})
        f.objects[f"mp_rank_{r:02d}_model_states.pt:global_steps"] = 9
    f.text("configs/small.yml", "{}\n")
    f.done()


# ---------------------------------------------------------------- fairscale's flat shards
METASEQ = {"format": "metaseq-fsdp-flat", "framework": "metaseq (fairscale)"}
FAIRSEQ = {"format": "metaseq-fsdp-flat", "framework": "fairseq (fairscale)"}


def flat_parts(arrays, ranks):
    """The parts of the ranks and how much of each is padding."""
    flat = np.concatenate([a.reshape(-1) for a in arrays])
    n = -(-flat.size // ranks)
    parts = [flat[r * n:(r + 1) * n] for r in range(ranks)]
    return [np.concatenate([p, np.zeros(n - p.size, p.dtype)]) for p in parts], [n - p.size for p in parts]


STEP = Tensor(np.asarray(4.0, "<f4"), strides=())


class Shards:
    """The files of one model part: units of (path, {name: array})."""

    def __init__(self, f, ranks, name):
        self.f, self.name = f, name
        self.model = [{} for _ in range(ranks)]
        self.units = [[] for _ in range(ranks)]
        self.state = [{} for _ in range(ranks)]
        self.buffers = []

    def unit(self, path, members, own=False, aliases=(), states=("exp_avg",)):
        ranks, number = len(self.model), len(self.units[0])
        parts, padding = flat_parts(list(members.values()), ranks)
        for r in range(ranks):
            key = (path + "." if path else "") + "flat_param_0"
            part, pad = (np.concatenate([(a + r).reshape(-1) for a in members.values()]), 0) if own else (parts[r], padding[r])
            self.model[r][key] = Tensor(part)
            self.state[r][number] = dict({s: Tensor(part * (2 + i)) for i, s in enumerate(states)}, step=STEP)
            self.units[r].append({"fsdp_path": path, "no_broadcast_optim_state": own, "shared_param_info": list(aliases), "params": {"flat_param_0": {
                "names": list(members), "shapes": [a.shape for a in members.values()], "numels": [a.size for a in members.values()], "padding": pad}}})

    def done(self, **more):
        for r in range(len(self.model)):
            path, groups = self.name.format(r), [{"lr": 0.5, "params": list(range(len(self.units[r])))}]
            told = {k: {n: {"$type": "opaque", "class": "torch.Tensor", "dtype": "F32", "shape": list(t.array.shape)} for n, t in v.items()} for k, v in self.state[r].items()}
            save(f"{self.f.root}/{path}", dict({"model": self.model[r], "shard_metadata": {"param_metadata": self.units[r], "buffer_names": self.buffers},
                                                "last_optimizer_state": {"state": self.state[r], "param_groups": groups}}, **more))
            self.f.objects[path + ":last_optimizer_state"] = {"param_groups": groups, "state": {"$type": "dict", "items": [[k, v] for k, v in told.items()]}}
            for k, v in more.items():
                self.f.objects[f"{path}:{k}"] = v


def fairscales(folder):
    # Two model parts of three shards: real tensor parallelism, one shard of padding alone.
    f = Fixture(folder, "fairscale", "hand_mp2_3r", METASEQ)
    cut = {"": {"decoder.embed_tokens.weight": ((6, 2), "rows"), "decoder.odd.weight": ((1, 2), "raw")},
           "decoder.layers.0": {"self_attn.qkv_proj.weight": ((12, 2), "thirds"), "self_attn.qkv_proj.bias": ((12,), "thirds"), "fc1.bias": ((8,), "rows"),
                                "fc2.weight": ((2, 8), "columns"), "self_attn_layer_norm.weight": ((2,), "same")},
           "decoder.tiny": {"layer_norm.bias": ((1,), "same")}}
    parts = [Shards(f, 3, f"checkpoint_9-model_part-{m}-shard{{}}.pt") for m in range(2)]
    for path, members in cut.items():
        full = {k: f.full(*shape) for k, (shape, _) in members.items()}
        how = {k: h for k, (_, h) in members.items()}
        prefix = path + "." if path else ""
        for m, part in enumerate(parts):
            mine = {k: np.concatenate([rows(x, m, 2) for x in np.split(a, 3)]) if how[k] == "thirds" else piece(how[k], a, m, 2) for k, a in full.items()}
            part.unit(path, mine)
            for k, a in mine.items():
                f.expect_raw(f"model_part-{m}:model:{prefix}{k}", a)
                f.expect_raw(f"model_part-{m}:last_optimizer_state:{prefix}{k}.exp_avg", a * 2)
            f.expect_raw(f"model_part-{m}:last_optimizer_state:state.{len(part.units[0]) - 1}.step", np.asarray(4.0, "<f4"))
        for k, a in full.items():
            if how[k] != "raw":
                f.expect(prefix + k, a)
                f.expect(f"{prefix}{k}.exp_avg", a * 2)
    for part in parts:
        part.done()
    f.warnings = 1
    f.done()
    # fairseq's names; experts that are each rank's own; a second name; a buffer; something that nobody tells of.
    f = Fixture(folder, "fairscale", "hand_own_2r", FAIRSEQ)
    s = Shards(f, 2, "checkpoint_1_500-shard{}.pt")
    a, b, x = f.full(3, 5), f.full(2), f.full(2, 2)
    s.unit("encoder", {"a": a, "b": b}, aliases=[("encoder.a", "decoder.a")], states=("exp_avg", "exp_avg_sq"))
    s.unit("experts.0", {"w": x}, own=True)
    for k, v in (("encoder.a", a), ("encoder.b", b)):
        f.expect(k, v)
        f.expect(k + ".exp_avg", v * 2)
        f.expect(k + ".exp_avg_sq", v * 3)
    f.expect("decoder.a", a)
    f.expect("state.0.step", np.asarray(4.0, "<f4"))
    s.buffers = ["version", "absent"]
    for r in range(2):
        s.model[r]["version"] = Tensor(np.asarray([3.0], "<f4"))
        s.model[r]["stray"] = Tensor(np.asarray([r], "<f4"))
        f.expect_raw(f"checkpoint_1_500-shard{r}.pt:model.stray", np.asarray([r], "<f4"))
        f.expect_raw(f"checkpoint_1_500-shard{r}.pt:model.experts.0.w", x + r)
        f.expect(f"checkpoint_1_500-shard{r}.pt:last_optimizer_state.state.1.exp_avg", ((x + r) * 2).reshape(-1))
        f.expect(f"checkpoint_1_500-shard{r}.pt:last_optimizer_state.state.1.step", np.asarray(4.0, "<f4"))
    f.expect("version", np.asarray([3.0], "<f4"))
    s.done(optimizer_history=[{"num_updates": 500}])
    f.warnings = 2
    f.done()


# ---------------------------------------------------------------- nanotron
NANOTRON = {"format": "nanotron", "framework": "nanotron"}


def nano_file(f, folder, name, array, pairs=None, shape=None, version="1.5"):
    """A safetensors file with the one tensor "data"; `pairs`: of slices, as text."""
    array = np.ascontiguousarray(array)
    header = {"data": {"dtype": base.STORAGES[array.dtype.str][1], "shape": list(array.shape), "data_offsets": [0, array.nbytes]}}
    if pairs is not None:
        header["__metadata__"] = {"version": version, "unsharded_shape": shape, "local_global_slices_pairs": pairs}
    text = json.dumps(header).encode()
    path = os.path.join(f.root, "model", *folder.split("/"), f"model_{name}.safetensors")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text + array.tobytes())


def ranks_of(p, t, e=None):
    return f"_pp-rank-{p}-of-2_tp-rank-{t}-of-2" + (f"_exp-rank-{e}-of-2" if e is not None else "")


def nanotron_optimizer(f, p, t, e, state, more=None):
    """state: name -> {state: array}."""
    path = f"optimizer/optimizer_pp-{p}-of-2_tp-{t}-of-2_exp-{e}-of-2.pt"
    names = dict(enumerate(state))
    save(f"{f.root}/{path}", dict({"state": {i: {k: Tensor(np.ascontiguousarray(v)) for k, v in state[n].items()} for i, n in names.items()}, "names": names},
                                  **(more or {})))
    f.objects[path + ":names"] = {"$type": "dict", "items": [[i, n] for i, n in names.items()]}


def nanotrons(folder):
    f = Fixture(folder, "nanotron", "hand_tp2_pp2_ep2", NANOTRON)
    f.objects["checkpoint_metadata.json"] = meta = {"version": "1.5", "tp": 2, "dp": 1, "cp": 1, "metas": {"last_train_step": 4}}
    f.text("checkpoint_metadata.json", json.dumps(meta))
    # q and kv of one tensor: two pairs a file; dimensions at the end of a slice left out.
    qkv, norm, experts, tied, copied = f.full(12, 3), f.full(5), f.full(4, 3, 2), f.full(6, 2), f.full(4, 2)
    state = {(p, t, e): {} for p in range(2) for t in range(2) for e in range(2)}
    for t in range(2):
        local = np.concatenate([rows(qkv[:8], t, 2), rows(qkv[8:], t, 2)])
        pairs = f"0,4,None|None,None,None#{4 * t},{4 * t + 4},None|None,None,None;4,6,1#{8 + 2 * t},{10 + 2 * t},None"
        nano_file(f, "decoder/0/qkv", "weight" + ranks_of(0, t), local, pairs, "(np.int64(12), 3)")
        # A version of 2024 doubled the names.
        nano_file(f, "emb", "model_weight.safetensors" + ranks_of(0, t), rows(tied, t, 2), f"None,None,None#{3 * t},{3 * t + 3},None|0,None,1", "torch.Size([6, 2])")
        # Both tensor ranks have the same slice.
        nano_file(f, "decoder/0/kv", "weight" + ranks_of(0, t), copied, "None,None,None#None,None,None", "(4, 2)")
        for e in range(2):
            nano_file(f, "decoder/1/experts", "weight" + ranks_of(1, t, e), experts[2 * e:2 * e + 2, :, t:t + 1],
                      f"None,None,None|None,None,None|0,1,None#{2 * e},{2 * e + 2},None|None,None,None|{t},{t + 1},None", "(4, 3, 2)")
            state[1, t, e]["decoder.1.experts.weight"] = {"exp_avg": experts[2 * e:2 * e + 2, :, t:t + 1] * 2}
            # The tied one is the first stage's file, and also in the last stage's optimizer.
            state[1, t, e]["emb.weight"] = {"exp_avg": rows(tied, t, 2) * 2}
            state[0, t, e]["emb.weight"] = {"exp_avg": rows(tied, t, 2) * 2}
            state[0, t, e]["decoder.0.qkv.weight"] = {"exp_avg": local * 2}
            state[0, t, e]["decoder.0.norm.bias"] = {"exp_avg": norm * 2}
    nano_file(f, "decoder/0/norm", "bias", norm)
    for key, full in (("decoder.0.qkv.weight", qkv), ("decoder.0.norm.bias", norm), ("decoder.1.experts.weight", experts), ("emb.weight", tied)):
        f.expect(key, full)
        f.expect(key + ".exp_avg", full * 2)
    f.expect("decoder.0.kv.weight", copied)
    for (p, t, e), s in state.items():
        nanotron_optimizer(f, p, t, e, s,
                           {"gradient_accumulator": {"decoder.0.norm.bias": Tensor(norm * 3)}} if (p, e) == (0, 0) else
                           {"gradient_accumulator": {"nobody.knows": Tensor(norm)}} if (p, t, e) == (1, 1, 1) else {})
    f.expect("decoder.0.norm.bias.gradient_accumulator", norm * 3)
    f.expect("optimizer/optimizer_pp-1-of-2_tp-1-of-2_exp-1-of-2.pt:gradient_accumulator.nobody.knows", norm)
    f.warnings = 1
    f.done()


def main():
    folder = sys.argv[1]
    llamas(folder)
    neoxes(folder)
    fairscales(folder)
    nanotrons(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main()
