"""llama.cpp as a peer of the language models' benchmark: a file of a model's weights, and its server by ``xllamacpp``.

A prompt is given as tokens. The words of the file's vocabulary are made up, as llama.cpp must be able to write tokens.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lm_peers import Asked, Made
from benchmarks.workloads import Seconds
from cellrt.cells.llama import Llama
from cellrt.cells.llama_weights import GGUF, their_name

WORD = re.compile(r"w(\d+)")
NORMAL, BYTE, UNKNOWN, CONTROL = 1, 6, 2, 3
"""Kinds of tokens, as llama.cpp has them."""


def halves_to_neighbours(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rows of a query's or key's projection in llama.cpp's order, in which neighbours make a rotary pair."""
    neighbours: torch.Tensor = weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return neighbours


def write_gguf(model: Llama, path: Path) -> None:
    """Write a model's weights, float32, and made-up words, in llama.cpp's format."""
    import gguf

    sizes, writer = model.sizes, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_layer_norm_rms_eps(sizes.epsilon)
    writer.add_rope_freq_base(sizes.rotary_base)
    writer.add_rope_dimension_count(sizes.attention.size)
    writer.add_vocab_size(sizes.vocabulary)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    words += [f"w{number}" for number in range(len(words), sizes.vocabulary)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * sizes.vocabulary)
    writer.add_token_types(kinds + [NORMAL] * (sizes.vocabulary - len(kinds)))
    for name, value in model.state_dict().items():
        part = name.rpartition(".")[0]
        if sizes.is_tied and part == "head":
            continue
        weight = value.float()
        if part.endswith((".query", ".key")):
            weight = halves_to_neighbours(weight, sizes.attention.size)
        writer.add_tensor(their_name(name, GGUF), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp's server, in this process, with one thread that computes; a client's thread for each request.

    Args:
        path: of the weights.
        slots: requests that share a batch at most.
        longest: rows that a request may come to.
    """

    def __init__(self, path: Path, slots: int, longest: int) -> None:
        xllamacpp = importlib.import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.n_ctx = slots, slots * longest
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.n_gpu_layers, params.warmup, params.cont_batching = 0, False, True
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def complete(self, asked: Asked) -> Made:
        """Return the tokens that are made-up words, as nearly all are, with the time when all were there.

        Raise RuntimeError where llama.cpp made another number of tokens.
        """
        how = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False, "stream": False}
        answer: Any = self._server.handle_completions({"prompt": asked.prompt, "n_predict": asked.steps} | how)
        if not isinstance(answer, dict) or answer.get("usage", {}).get("completion_tokens") != asked.steps:
            raise RuntimeError(f"llama.cpp was to make {asked.steps} tokens, and answered {answer!r:.400}")
        made = Made()
        for number in WORD.findall(answer["choices"][0]["text"]):
            made.note(int(number))
        return made

    def serve(self, requests: Sequence[Asked], arrivals: Seconds) -> tuple[Seconds, float]:
        """Return the latency of each request, in seconds, and how long it all took. Raise RuntimeError where one has no
        answer within five minutes."""
        ends, errors = np.full(len(requests), np.nan), list[Exception]()
        start = time.perf_counter()

        def ask(k: int) -> None:
            try:
                self.complete(requests[k])
                ends[k] = time.perf_counter() - start
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(k,), daemon=True) for k in range(len(requests))]
        for thread, arrival_s in zip(threads, arrivals.tolist()):
            time.sleep(max(0.0, start + arrival_s - time.perf_counter()))
            thread.start()
        give_up = time.perf_counter() + 300
        for thread in threads:
            thread.join(max(0.0, give_up - time.perf_counter()))
        if errors or np.isnan(ends).any():
            raise RuntimeError("llama.cpp did not answer all") from (errors[0] if errors else None)
        return ends - arrivals, float(ends.max())

    def close(self) -> None:
        """End the server."""
        del self._server
