# SPDX-License-Identifier: MIT
"""Llama as Meta's files mean it: their names, their cut into model-parallel files, and the rotation of neighbouring elements."""
import json

import torch
import torch.nn.functional as F

ROWS, COLUMNS = ("wq", "wk", "wv", "w1", "w3", "output"), ("wo", "w2", "tok_embeddings")


def weights(m):
    g = torch.Generator().manual_seed(9)

    def made(*shape):
        return 0.2 * torch.randn(*shape, generator=g)

    w = {"tok_embeddings.weight": made(m.vocab, m.hidden), "norm.weight": 1 + made(m.hidden), "output.weight": made(m.vocab, m.hidden)}
    for i in range(m.layers):
        p = f"layers.{i}."
        w |= {p + "attention.wq.weight": made(m.heads * m.head_dim, m.hidden), p + "attention.wk.weight": made(m.groups * m.head_dim, m.hidden),
              p + "attention.wv.weight": made(m.groups * m.head_dim, m.hidden), p + "attention.wo.weight": made(m.hidden, m.heads * m.head_dim),
              p + "feed_forward.w1.weight": made(m.ffn, m.hidden), p + "feed_forward.w2.weight": made(m.hidden, m.ffn),
              p + "feed_forward.w3.weight": made(m.ffn, m.hidden), p + "attention_norm.weight": 1 + made(m.hidden), p + "ffn_norm.weight": 1 + made(m.hidden)}
    return w


def save(path, m, w, ranks):
    """consolidated.NN.pth and params.json."""
    for r in range(ranks):
        def cut(key, t, rank=r):
            name = key.split(".")[-2]
            axis = 0 if name in ROWS else 1 if name in COLUMNS else None
            return t if axis is None else t.chunk(ranks, axis)[rank].clone()

        part = {k: cut(k, t) for k, t in w.items()}
        part["rope.freqs"] = 1 / 10000 ** (torch.arange(0, m.head_dim, 2).float() / m.head_dim)
        torch.save(part, path / f"consolidated.{r:02}.pth")
    (path / "params.json").write_text(json.dumps({"dim": m.hidden, "multiple_of": 4, "n_heads": m.heads, "n_kv_heads": m.groups, "n_layers": m.layers,
                                                  "norm_eps": 1e-6, "vocab_size": -1}), encoding="utf-8")


def rotate(x, angles):
    """Elements 2k and 2k + 1 are a complex number that is turned by the k-th angle."""
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def logits(m, w, ids):
    def norm(x, key):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[key]

    n = len(ids)
    angles = torch.outer(torch.arange(n).float(), 1 / 10000 ** (torch.arange(0, m.head_dim, 2).float() / m.head_dim))
    x = w["tok_embeddings.weight"][ids]
    for i in range(m.layers):
        p = f"layers.{i}."
        h = norm(x, p + "attention_norm.weight")
        q, k, v = ((h @ w[f"{p}attention.w{c}.weight"].T).reshape(n, -1, m.head_dim) for c in "qkv")
        q, k = rotate(q, angles), rotate(k, angles)
        k, v = (t.repeat_interleave(m.heads // m.groups, 1) for t in (k, v))
        a = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True)
        x = x + a.transpose(0, 1).reshape(n, -1) @ w[p + "attention.wo.weight"].T
        h = norm(x, p + "ffn_norm.weight")
        x = x + (F.silu(h @ w[p + "feed_forward.w1.weight"].T) * (h @ w[p + "feed_forward.w3.weight"].T)) @ w[p + "feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ w["output.weight"].T
