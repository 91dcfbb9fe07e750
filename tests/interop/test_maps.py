# SPDX-License-Identifier: MIT
"""Checkpoints of Megatron Core and OLMo-core, mounted under transformers' names, answer as in their own framework."""
import importlib.util
import pathlib
import tempfile
import unittest

import safetensors.torch
import torch
import transformers

import llama_models
import megatron_models
import mounted
import olmo_models
import truth
from megatron_models import IDS, Model


def rope():
    return {"rope_type": "default", "rope_theta": 10000.0}


def hf_config(m, kind, **more):
    """The config.json of the same model in transformers."""
    config = kind(vocab_size=m.vocab, hidden_size=m.hidden, intermediate_size=m.ffn, num_hidden_layers=m.layers, num_attention_heads=m.heads,
                  num_key_value_heads=m.groups, head_dim=m.head_dim, rms_norm_eps=1e-6, tie_word_embeddings=m.tied, max_position_embeddings=64,
                  rope_parameters=rope(), use_cache=False, **more)
    config.dtype = "float32"
    return config


def load(path, kind):
    """The model and its logits. Nothing may be missing, left over or of another shape."""
    model, info = kind.from_pretrained(str(path), output_loading_info=True, attn_implementation="eager")
    wrong = {k: v for k, v in info.items() if v}
    assert not wrong, wrong
    with torch.no_grad():
        return model.eval()(IDS).logits


class Megatron(unittest.TestCase):
    def check(self, m, kind, config, tp=1, pp=1):
        config.architectures = [kind.__name__]
        with tempfile.TemporaryDirectory(prefix="unshardfs-map-") as scratch:
            saved, hf, out = (pathlib.Path(scratch) / n for n in ("saved", "hf", "logits.pt"))
            saved.mkdir()
            config.save_pretrained(hf)
            truth.run_ranks(tp * pp, megatron_models.save, str(saved), m, tp, pp)
            truth.run_ranks(1, megatron_models.answer, str(saved), m, str(out))
            with mounted.mounted(saved, "map=megatron-to-hf", f"hf={hf}") as mnt:
                ours = load(mnt, transformers.AutoModelForCausalLM)
            theirs = torch.load(out)
            self.assertGreater(theirs.std(), 0.1)  # not all the same
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    def test_llama(self):
        m = Model()
        self.check(m, transformers.LlamaForCausalLM, hf_config(m, transformers.LlamaConfig), tp=2, pp=2)

    def test_llama_tied_without_groups(self):
        m = Model(tied=True, groups=4, seed=1)
        self.check(m, transformers.LlamaForCausalLM, hf_config(m, transformers.LlamaConfig))

    def test_qwen2(self):
        m = Model(qkv_bias=True, tied=True, seed=2)
        self.check(m, transformers.Qwen2ForCausalLM, hf_config(m, transformers.Qwen2Config), tp=2)

    def test_qwen3(self):
        m = Model(qk_norm=True, head_dim=12, seed=3)
        self.check(m, transformers.Qwen3ForCausalLM, hf_config(m, transformers.Qwen3Config), pp=2)

    def moe(self, **kw):
        m = Model(qk_norm=True, experts=4, **kw)
        config = hf_config(m, transformers.Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=m.ffn, norm_topk_prob=True,
                           decoder_sparse_step=1)
        self.check(m, transformers.Qwen3MoeForCausalLM, config)

    def test_qwen3_moe(self):
        self.moe(seed=4)


    def test_qwen2_moe(self):
        m = Model(qkv_bias=True, experts=4, shared=20, shared_gate=True, seed=5)
        config = hf_config(m, transformers.Qwen2MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=m.ffn, norm_topk_prob=True,
                           shared_expert_intermediate_size=m.shared, decoder_sparse_step=1)
        self.check(m, transformers.Qwen2MoeForCausalLM, config, tp=2)

    def test_mixtral(self):
        m = Model(experts=4, seed=6)
        config = hf_config(m, transformers.MixtralConfig, num_local_experts=4, num_experts_per_tok=2)
        self.check(m, transformers.MixtralForCausalLM, config, pp=2)

    def deepseek(self, m):
        """Scores by a sigmoid are V3's."""
        kind = transformers.DeepseekV3Config if m.sigmoid else transformers.DeepseekV2Config
        return hf_config(m, kind, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=m.ffn, n_shared_experts=m.shared // m.ffn,
                         first_k_dense_replace=m.dense, q_lora_rank=m.q_rank or None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
                         **({"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True} if m.sigmoid else
                            {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0}))

    def test_deepseek_v3(self):
        m = Model(layers=3, groups=4, head_dim=4, mla=True, q_rank=12, qk_norm=True, experts=4, dense=1, shared=24, sigmoid=True, seed=7)
        self.check(m, transformers.DeepseekV3ForCausalLM, self.deepseek(m), tp=2)

    def test_deepseek_v2_lite(self):
        m = Model(layers=3, groups=4, head_dim=4, mla=True, qk_norm=True, experts=4, dense=1, shared=48, whole_softmax=True, seed=8)
        self.check(m, transformers.DeepseekV2ForCausalLM, self.deepseek(m))

    def test_further_tokens(self):
        """Layers that predict further tokens have the names that DeepSeek's and GLM's files have, behind those of the model."""
        m = Model(layers=2, groups=4, head_dim=4, mla=True, q_rank=12, qk_norm=True, experts=4, dense=1, shared=24, sigmoid=True, mtp=1, seed=10)
        with tempfile.TemporaryDirectory(prefix="unshardfs-map-") as scratch:
            saved, hf = (pathlib.Path(scratch) / n for n in ("saved", "hf"))
            saved.mkdir()
            self.deepseek(m).save_pretrained(hf)
            truth.run_ranks(1, megatron_models.save, str(saved), m, 1, 1)
            with mounted.mounted(saved, "map=megatron-to-hf", f"hf={hf}") as mnt, mounted.mounted(saved) as plain:
                ours = safetensors.torch.load((mnt / "model.safetensors").read_bytes())
                theirs = safetensors.torch.load((plain / "model.safetensors").read_bytes())
        self.assertEqual([k for k in ours if not k.startswith(("model.", "lm_head."))], [])
        layer = {k.removeprefix("model.layers.2."): v for k, v in ours.items() if k.startswith("model.layers.2.")}
        last = {k.removeprefix("model.layers.1.") for k in ours if k.startswith("model.layers.1.")}
        self.assertEqual(layer.keys(), last | {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"})
        for name, key in (("eh_proj.weight", "eh_proj.weight"), ("shared_head.norm.weight", "final_layernorm.weight"),
                          ("self_attn.kv_b_proj.weight", "transformer_layer.self_attention.linear_kv_up_proj.weight"),
                          ("mlp.gate.e_score_correction_bias", "transformer_layer.mlp.router.expert_bias")):
            torch.testing.assert_close(layer[name], theirs["mtp.layers.0." + key], rtol=0, atol=0)
        fc1 = theirs["mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight"]
        torch.testing.assert_close(layer["mlp.experts.3.up_proj.weight"], fc1[3, m.ffn:], rtol=0, atol=0)

    def test_glm4_moe(self):
        m = Model(layers=3, qkv_bias=True, qk_norm=True, experts=4, dense=1, shared=24, sigmoid=True, seed=9)
        config = hf_config(m, transformers.Glm4MoeConfig, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=m.ffn, n_shared_experts=1,
                           first_k_dense_replace=1, use_qk_norm=True, attention_bias=True, n_group=2, topk_group=1, routed_scaling_factor=2.5,
                           norm_topk_prob=True)
        config.rope_parameters["partial_rotary_factor"] = 1.0
        self.check(m, transformers.Glm4MoeForCausalLM, config)


class OlmoCore(unittest.TestCase):
    def check(self, kind, architecture, config=None, **kw):
        with tempfile.TemporaryDirectory(prefix="unshardfs-map-") as scratch:
            truth.run_ranks(1, olmo_models.save, scratch, IDS, kind, kw, config)
            want = torch.load(scratch + "/truth.pt")
            with mounted.mounted(scratch + "/saved", "map=olmo-to-hf", f"hf={scratch}/hf") as mnt:
                weights = safetensors.torch.load((mnt / "model.safetensors").read_bytes())
                ours = load(mnt, getattr(transformers, architecture))
            self.assertEqual(weights.keys(), want["export"].keys())
            self.assertEqual([k for k in weights if not torch.equal(weights[k], want["export"][k])], [])
            self.assertGreater(want["logits"].std(), 0.1)
            torch.testing.assert_close(ours, want["logits"], atol=1e-4, rtol=1e-4)

    def test_olmo2(self):
        self.check("olmo2_14M", "Olmo2ForCausalLM", n_kv_heads=2)

    def test_olmo3(self):
        self.check("olmo3_14M", "Olmo3ForCausalLM")

    # OLMo-core tells no config.json of these, which have their norms before attention and MLP, but exports them.
    def pre_norm(self, which, **more):
        return getattr(transformers, which + "Config")(
            vocab_size=67, hidden_size=32, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500000}, tie_word_embeddings=False, **more)

    def test_llama(self):
        self.check("llama_like", "LlamaForCausalLM", self.pre_norm("Llama"), d_model=32, n_heads=4, n_kv_heads=2)

    def test_qwen3(self):
        self.check("llama_like", "Qwen3ForCausalLM", self.pre_norm("Qwen3", head_dim=8), d_model=32, n_heads=4, n_kv_heads=2, qk_norm=True,
                   use_head_qk_norm=True)

    def test_gemma3_is_refused(self):
        config = transformers.Gemma3TextConfig(vocab_size=67, hidden_size=32, num_hidden_layers=3)
        with tempfile.TemporaryDirectory(prefix="unshardfs-map-") as scratch:
            truth.run_ranks(1, olmo_models.save, scratch, IDS, "llama_like", {"d_model": 32, "n_heads": 4}, config)
            done = mounted.run("info", scratch + "/saved", "-o", f"map=olmo-to-hf,hf={scratch}/hf", check=False)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn("there are no rules for models of type gemma3_text", done.stderr)


class Llama(unittest.TestCase):
    def check(self, m, ranks):
        w = llama_models.weights(m)
        with tempfile.TemporaryDirectory(prefix="unshardfs-map-") as scratch:
            saved = pathlib.Path(scratch) / "saved"
            saved.mkdir()
            llama_models.save(saved, m, w, ranks)
            hf_config(m, transformers.LlamaConfig).save_pretrained(scratch + "/hf")
            with mounted.mounted(saved, "map=llama-to-hf", f"hf={scratch}/hf") as mnt:
                ours = load(mnt, transformers.LlamaForCausalLM)
        torch.testing.assert_close(ours[0], llama_models.logits(m, w, IDS[0]), atol=1e-4, rtol=1e-4)

    def test_one_file(self):
        self.check(Model(groups=4), 1)

    def test_two_ranks_with_groups(self):
        self.check(Model(), 2)


for name, package in (("Megatron", "megatron"), ("OlmoCore", "olmo_core")):
    if not importlib.util.find_spec(package):
        globals()[name] = unittest.skip(package + " is not installed")(globals()[name])
