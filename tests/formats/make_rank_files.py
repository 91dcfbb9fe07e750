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


def main():
    folder = sys.argv[1]
    llamas(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main()
