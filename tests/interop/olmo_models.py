# SPDX-License-Identifier: MIT
"""Small transformers of OLMo-core on the CPU: built, saved and run by OLMo-core, exported by its own rules."""
import importlib.machinery
import sys
import types

import torch


def without_network():
    """olmo_core.io wants cached_path for files of the net, of which there are none here; it brings clients of every cloud."""
    class Stub(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"recoverable_errors": ()})

    for name in ("cached_path", "cached_path.schemes"):
        stub = sys.modules.setdefault(name, Stub(name))
        stub.__path__, stub.__spec__ = [], importlib.machinery.ModuleSpec(name, None)


def build(kind, **kw):
    without_network()
    from olmo_core.nn.attention import AttentionBackendName
    from olmo_core.nn.transformer import TransformerConfig
    config = getattr(TransformerConfig, kind)(vocab_size=67, n_layers=3, attn_backend=AttentionBackendName.torch, **kw)
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"), max_seq_len=64)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return model.eval()


def save(rank, world, path, ids, kind, kw, config=None):
    """PATH/saved in OLMo-core's format, PATH/hf/config.json (config or its own), PATH/truth.pt: its logits and its own export."""
    torch.manual_seed(3)
    model = build(kind, **kw)
    from olmo_core.distributed.checkpoint import save_model_and_optim_state
    from olmo_core.nn.hf import convert_state_to_hf, get_hf_config
    save_model_and_optim_state(path + "/saved", model)
    config = config or get_hf_config(model)
    config.use_cache = False
    config.save_pretrained(path + "/hf")
    with torch.no_grad():
        logits = model(ids)
    torch.save({"logits": logits, "export": convert_state_to_hf(config, model.state_dict())}, path + "/truth.pt")
