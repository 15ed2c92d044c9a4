"""Projection to a vocabulary and sampling: the next token of a decoder with temperature, top-k and top-p.

A token is drawn by Gumbel's trick: the argmax of ``logit + temperature * noise``, with noise ``-log(-log(u))``. So a
temperature of 0 is greedy, and sampling needs no softmax and no second look at the logits. ``u`` is Philox-4x32-10, a
pure function of (seed, step, token): a request draws the same tokens whatever it is batched with, after a restart too.

Two ways, chosen by the caller:

- Neither ``top_k`` nor ``top_p``: as in ``project_argmax`` the logits are never written.
- Else the logits are written in float32 by the first launch, and in the second a program a row finds, by bisection, the
  least logit that is kept, then draws as above. For 512 rows and 50,000 tokens this writes 0.1 GB, and reads it back
  once for each step of the bisections (up to 32 for top-k and as many for top-p), mostly from the L2 cache.

The first way is never slower: it does the same product and noise without that traffic. Where the vocabulary is small (a
thousand tokens) both are bound by their two launches. (Reckoned from bytes, not measured.) With top-k and top-p off
both give the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.project_sample import reference
from cellrt.kernels.project_sample.draw import Draw
from cellrt.kernels.projection import Projection, check_projection, check_vector

__all__ = ["Draw", "Projection", "project_sample"]


def project_sample(h: ArenaRows, projection: Projection, draw: Draw, tokens: Tensor, stops: Tensor) -> None:
    """Writes a drawn token of each row to ``tokens``, and whether it is the stop token to ``stops``.

    ``h``, ``projection``, ``tokens`` and ``stops`` are as in ``project_argmax``; ``draw`` has one value a row (see
    ``Draw``). Rows of a negative index are left as they are. Raises ValueError.
    """
    check_projection(h, projection, tokens, stops)
    num_rows, device = len(h.rows), projection.weight.device
    check_vector("temperatures", draw.temperatures, (torch.float32,), num_rows, device)
    check_vector("seeds", draw.seeds, (torch.int64,), num_rows, device)
    check_vector("steps", draw.steps, (torch.int32,), num_rows, device)
    if draw.top_k is not None:
        check_vector("top_k", draw.top_k, (torch.int32,), num_rows, device)
    if draw.top_p is not None:
        check_vector("top_p", draw.top_p, (torch.float32,), num_rows, device)
    if uses_triton(projection.weight):
        from cellrt.kernels.project_sample import triton

        triton.project_sample(h, projection, draw, tokens, stops)
    else:
        reference.project_sample(h, projection, draw, tokens, stops)
