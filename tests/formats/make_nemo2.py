#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""make_nemo2.py OUT: what NeMo 2.7.3 saves of a GPT model on two gloo ranks, tensor-parallel (tests/data/nemo/real_nemo2_tp2).

Its own ModelCheckpoint, MegatronStrategy.save_checkpoint, MegatronCheckpointIO (fully parallel) and TrainerContext.io_dump write it; model and
distributed optimizer are Megatron Core's. The loop that trains is not run (it needs CUDA): the optimizer makes one step with made-up gradients.
Expected are the tensors that megatron.core.dist_checkpointing.load_plain_tensors gives.
Environment: Python 3.11, torch 2.6.0, lightning 2.4.0, megatron-core 0.15.3, nemo_toolkit 2.7.3 and nemo_run 0.6.0 with --no-deps, and of what they
import fiddle, hydra-core, transformers, rich, typer, catalogue, inquirerpy, toml, torchx; what has nothing to do with saving is a stand-in."""
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import shutil
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.utils.cpp_extension

OUT, WORLD, LAYERS, HIDDEN, STEP = Path(sys.argv[1]), 2, 1, 16, 7
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
UNRELATED = set("""wget modelopt wandb paramiko fabric invoke leptonai docker kubernetes sky cryptography multistorageclient nv_one_logger datasets sacrebleu
    lhotse braceexpand webdataset mlflow nvidia_resiliency_ext ijson h5py faiss tiktoken opencc rouge_score editdistance inflect boto3 botocore peft
    jiwer librosa soundfile onnx marshmallow numba text_unidecode""".split())


def anything(self, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kw: self


class StandIn(type):
    def __new__(cls, name, bases=(), space=None):
        return super().__new__(cls, name, bases, space or {"__init__": lambda self, *a, **k: None, "__getattr__": anything,
                                                           "__call__": lambda self, *a, **k: a[0] if a else None})

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, StandIn(name))
        return getattr(cls, name)

    def __or__(cls, other):
        return cls

    def __ror__(cls, other):
        return cls


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in UNRELATED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        class Module(types.ModuleType):
            __getattr__ = StandIn.__getattr__
        module = Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def without_gpu():
    """Megatron asks for a GPU in passing, and sorts an optimizer's parameters by the names of CUDA's types."""
    def no_compiler(*args, **kw):
        raise RuntimeError("no CUDA")
    torch.utils.cpp_extension.load_inline = no_compiler
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kw: None
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kw: self
    named = torch.Tensor.type

    def type_of(self, *args, **kw):
        r = named(self, *args, **kw)
        return r.replace("torch.", "torch.cuda.") if isinstance(r, str) and "cuda" not in r else r
    torch.Tensor.type = type_of


class OnCpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def build():
    """The model, wrapped as for training, and its optimizer after a step."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig
    parallel_state.initialize_model_parallel(WORLD)
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    torch.manual_seed(1 + dist.get_rank())
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=12, num_attention_heads=4, num_query_groups=2, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm", bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=WORLD, use_cpu_initialization=True, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False)
    model = GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=20, max_sequence_length=32, position_embedding_type="rope",
                     share_embeddings_and_output_weights=True).bfloat16()
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
                                                       clip_grad=0.0), [ddp])
    optimizer.zero_grad()
    for name, p in ddp.named_parameters():
        p.main_grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    optimizer.step()
    return model, optimizer


def trainer_of(model, optimizer):
    from lightning.pytorch.trainer.states import TrainerFn
    from megatron.core.distributed import DistributedDataParallelConfig
    from nemo import lightning as nl
    from nemo.collections.llm.gpt.model.base import GPTConfig, GPTModel
    from nemo.collections.llm.modelopt import model_utils
    from nemo.core.optim.mcore_optim import McoreDistributedOptimizer
    from nemo.lightning.megatron_parallel import MegatronParallel
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint
    strategy = nl.MegatronStrategy(tensor_model_parallel_size=WORLD, ckpt_async_save=False, ckpt_optim_fully_reshardable=True,
                                   ddp=DistributedDataParallelConfig(use_distributed_optimizer=True))
    saver = ModelCheckpoint(dirpath="checkpoints", filename="model--{step}", save_top_k=-1, monitor=None, every_n_train_steps=1,
                            save_optim_on_train_end=True)
    saver.async_save = False
    trainer = nl.Trainer(devices=1, num_nodes=1, accelerator="cpu", strategy=strategy, max_steps=9, logger=False, callbacks=[saver])
    module = GPTModel(GPTConfig(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4))
    module.module, module.configure_model, module.trainer = model, lambda: None, trainer
    wrapped = McoreDistributedOptimizer(optimizer)
    wrapped.state_dict = dict  # is asked for and thrown away
    module.optimizers = lambda use_pl_optimizer=False: wrapped

    class Chunks(list):
        vp_size = None
        sharded_state_dict = MegatronParallel.sharded_state_dict
        _module_sharded_state_dict = MegatronParallel._module_sharded_state_dict
    chunks = Chunks([module])
    chunks.trainer = trainer
    type(strategy).megatron_parallel = property(lambda self: chunks)
    type(strategy).lightning_module_state_dict = lambda self: {}
    strategy._lightning_module, strategy.optimizers, strategy.trainer = module, [wrapped], trainer
    model_utils.save_modelopt_state = lambda *args, **kw: None  # writes nothing of a model without it
    trainer.state.fn = TrainerFn.FITTING
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = STEP
    return trainer, saver


def told(tensor):
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "sha256": hashlib.sha256(raw).hexdigest()}


def inside(value, path):
    """The tensors in an object, by their paths."""
    if isinstance(value, torch.Tensor):
        return {path: told(value)}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {k: v for name, item in pairs for k, v in inside(item, f"{path}{name}" if path.endswith(":") else f"{path}.{name}").items()}


def plain(value, path):
    """An object as objects.json has it."""
    if isinstance(value, torch.Tensor):
        return {"$type": "tensor", "key": path}
    below = (lambda name: f"{path}{name}" if path.endswith(":") else f"{path}.{name}")
    if isinstance(value, dict):
        return {k: plain(v, below(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(v, below(i)) for i, v in enumerate(value)]
        return {"$type": "tuple", "items": items} if isinstance(value, tuple) else items
    return value


def run(rank, OUT):
    warnings.filterwarnings("ignore")
    without_gpu()
    np.product = np.prod  # as NumPy 1 has it
    import megatron.core.dist_checkpointing.serialization  # noqa: F401 looks whether some of them are there
    sys.meta_path.insert(0, StandIns())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29417", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD),
                      TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    with OnCpu():
        trainer, saver = trainer_of(*build())
        name = f"checkpoints/model--step={STEP}"
        saver._save_checkpoint(trainer, name + ".ckpt")
        dist.barrier()
        from megatron.core import dist_checkpointing as dc
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        meta, tensors = dc.load_tensors_metadata(name + "/weights"), dc.load_plain_tensors(name + "/weights")
    if rank == 0:
        assert not os.path.exists(name + "-unfinished")
        for path in Path(name, "context").iterdir():
            if path.suffix not in (".json", ".yaml"):  # an object named by a random number
                path.unlink()
        common = torch.load(name + "/weights/common.pt")
        states = [v.unique_key for v in dc.serialization.load_sharded_metadata(name + "/weights").values() if isinstance(v, ShardedObject)]  # each is None
        doc = {"format": "nemo-dist", "framework": "NeMo", "written_by": "nemo_toolkit 2.7.3, megatron-core 0.15.3, torch 2.6.0",
               "notes": "expected: megatron.core.dist_checkpointing.load_plain_tensors", "step": STEP,
               "objects": {"common.pt": plain(common, "common.pt:"), **dict.fromkeys(states)}, "inside_objects": inside(common, "common.pt:"),
               "tensors": {key: told(tensors[key].reshape(tuple(meta[key].global_shape))) for key in sorted(meta)}}
        shutil.rmtree(OUT / "real_nemo2_tp2", ignore_errors=True)
        shutil.move(name, OUT / "real_nemo2_tp2")
        (OUT / "real_nemo2_tp2.expected.json").write_text(json.dumps(doc, indent=1, sort_keys=True) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    OUT = OUT.resolve()
    mp.spawn(run, (OUT,), nprocs=WORLD)
