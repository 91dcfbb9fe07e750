# SPDX-License-Identifier: MIT
"""Small GPT models of megatron.core on the CPU: built, saved on several ranks, and run."""
import contextlib
import dataclasses

import torch

IDS = torch.arange(1, 12).reshape(1, -1)


@dataclasses.dataclass(frozen=True)
class Model:
    """What decides about names and shapes; HF's words."""
    layers: int = 2
    hidden: int = 32
    heads: int = 4
    groups: int = 2
    head_dim: int = 8
    ffn: int = 24
    vocab: int = 46
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    experts: int = 0
    grouped: bool = False
    dense: int = 0  # so many layers at the beginning have no experts
    shared: int = 0  # the width of what all tokens go through beside their experts
    shared_gate: bool = False
    sigmoid: bool = False  # scores by a sigmoid and with a bias, experts in two groups
    whole_softmax: bool = False  # scores are shares among all experts, not among those that are chosen
    mla: bool = False  # keys and values compressed to 16 numbers; head_dim 8 and 4 more for the position
    q_rank: int = 0  # and queries to so many; 0: as they are
    mtp: int = 0  # layers that predict further tokens
    seed: int = 0

    def padded(self, tp):
        return -(-self.vocab // (2 * tp)) * 2 * tp + 2 * tp  # more rows than the vocabulary has


def without_gpu():
    """megatron.core asks for a GPU's name and its random state in passing, also where all is on the CPU."""
    from megatron.core import tensor_parallel
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kw: None
    from megatron.core.transformer import multi_latent_attention
    if not isinstance(multi_latent_attention.TELinear, type):  # where transformer_engine is not installed
        multi_latent_attention.TELinear = type("TELinear", (), {})
    from megatron.core.transformer.moe import moe_utils
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 forgets it where transformer_engine is not installed
        moe_utils.te_general_gemm = None
    tracker = tensor_parallel.random.CudaRNGStatesTracker
    tracker.fork = lambda self, *args, **kw: contextlib.nullcontext()


class Attention(torch.nn.Module):
    """Causal attention for keys that are longer than values; megatron.core has it on a GPU alone."""

    def __init__(self, *args, softmax_scale, **kw):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q, k, v, mask, **kw):
        n = q.shape[0]
        scores = torch.einsum("sbhd,tbhd->bhst", q, k) * self.scale
        scores = scores.masked_fill(torch.triu(torch.ones(n, n, dtype=torch.bool), 1), float("-inf"))
        return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).reshape(n, q.shape[1], -1)


def moe_arguments(m):
    if not m.experts:
        return {}
    scores = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2, "moe_router_group_topk": 1,
              "moe_router_topk_scaling_factor": 2.5} if m.sigmoid else {}
    return {"num_moe_experts": m.experts, "moe_ffn_hidden_size": m.ffn, "moe_router_topk": 2, "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": m.whole_softmax,
            "moe_token_dispatcher_type": "allgather", "moe_grouped_gemm": m.grouped, "moe_shared_expert_intermediate_size": m.shared or None,
            "moe_shared_expert_gate": m.shared_gate, "moe_layer_freq": [0] * m.dense + [1] * (m.layers - m.dense) if m.dense else 1, **scores}


def layer_specs(m, config):
    """The layers, and those that predict further tokens (or None)."""
    from megatron.core.models.gpt import gpt_layer_specs
    if not (m.mla or m.dense or m.mtp):
        return gpt_layer_specs.get_gpt_layer_local_spec(num_experts=m.experts or None, moe_grouped_gemm=m.grouped, qk_layernorm=m.qk_norm,
                                                        normalization="RMSNorm"), None
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if m.mla:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = Attention
    return spec, gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if m.mtp else None


def build(m, tp=1, pp=1):
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    without_gpu()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    torch.manual_seed(1 + m.seed + 100 * torch.distributed.get_rank())
    mla = {"q_lora_rank": m.q_rank or None, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope",
           "rotary_base": 10000} if m.mla else {"num_query_groups": m.groups, "kv_channels": m.head_dim}
    config = (MLATransformerConfig if m.mla else TransformerConfig)(
        num_layers=m.layers, hidden_size=m.hidden, ffn_hidden_size=m.ffn, num_attention_heads=m.heads, mtp_num_layers=m.mtp or None,
        add_qkv_bias=m.qkv_bias, qk_layernorm=m.qk_norm, add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=1e-6,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, params_dtype=torch.float32, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0,
        init_method_std=0.3, bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, **mla, **moe_arguments(m))
    spec, mtp = layer_specs(m, config)
    model = GPTModel(config, spec, vocab_size=m.padded(2), max_sequence_length=64, share_embeddings_and_output_weights=m.tied,
                     pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
                     position_embedding_type="rope", rotary_base=10000, mtp_block_spec=mtp)
    with torch.no_grad():
        for name, p in model.named_parameters():  # norms and biases that do something
            if "layernorm" in name or name.endswith("bias"):
                p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
        for name, b in model.named_buffers():
            if name.endswith("expert_bias"):
                b.add_(0.2 * torch.randn(b.shape, generator=torch.Generator().manual_seed(len(name))))
    return model.eval()


def save(rank, world, path, m, tp, pp):
    """Each rank its part, as trainers do."""
    from megatron.core import dist_checkpointing
    model = build(m, tp, pp)
    dist_checkpointing.save(model.sharded_state_dict(prefix=""), path, ("torch_dist", 1))


def answer(rank, world, path, m, out):
    """Loads it by megatron.core itself, on one rank, and runs it."""
    from megatron.core import dist_checkpointing
    model = build(m)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(prefix=""), path))
    n = IDS.shape[1]
    with torch.no_grad():
        logits = model(IDS, torch.arange(n).reshape(1, -1), torch.triu(torch.ones(1, 1, n, n, dtype=torch.bool), 1))
    torch.save(logits[..., :m.vocab], out)
