"""transformers, asked for the same texts: continuous batching, and padded batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cellrt.cells.llama import Llama
from cellrt.cells.llama_weights import TRANSFORMERS, their_name

PADDING = 0


class Asked(NamedTuple):
    """A prompt, and how many tokens to make."""

    prompt: list[int]
    steps: int


@dataclass
class Made:
    """An answer: its tokens and when each came, in seconds of ``time.perf_counter``."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def note(self, token: int) -> None:
        """Note a token that has just come."""
        self.tokens.append(token)
        self.times.append(time.perf_counter())


def make_reference(model: Llama) -> Any:
    """``LlamaForCausalLM`` with a model's weights, for inference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = model.sizes
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        rms_norm_eps=sizes.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rotary_base},
        tie_word_embeddings=sizes.is_tied,
        max_position_embeddings=8192,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=PADDING,
    )
    reference = LlamaForCausalLM(config).eval()
    state = {their_name(name, TRANSFORMERS): value for name, value in model.state_dict().items()}
    if sizes.is_tied:
        state.pop("lm_head.weight", None)
    missing, unexpected = reference.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"transformers has other weights: {missing}, {unexpected}")
    return reference


class Continuous:
    """Continuous batching, as ``generate_batch`` does it, with a manager that stays."""

    def __init__(self, reference: Any, max_tokens: int, num_blocks: int = 256, max_batch_tokens: int = 256) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1)
        names = {field.name for field in fields(ContinuousBatchingConfig)}
        page_size = {"page_size" if "page_size" in names else "block_size": 32}  # before 5.18
        batching = ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, **page_size)
        self._manager = reference.init_continuous_batching(
            generation_config=config, continuous_batching_config=batching
        )
        self._manager.start()

    def serve(self, requests: Sequence[Asked]) -> list[Made]:
        """Add all at once, each with its own number of tokens; when each came is its own record."""
        add = self._manager.add_request
        names = [add(each.prompt, max_new_tokens=each.steps, record_timestamps=True) for each in requests]
        found: dict[str, Any] = {}
        while len(found) < len(names):
            result = self._manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("transformers' continuous batching gave no answer within a minute")
            found[result.request_id] = result
        return [Made(list(found[name].generated_tokens), list(found[name].timestamps)) for name in names]

    def close(self) -> None:
        """End its thread."""
        self._manager.stop(block=True)


@torch.inference_mode()
def padded(reference: Any, requests: Sequence[Asked]) -> list[Made]:
    """In one batch, padded on the left; it goes on until the longest answer is complete."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    times: list[float] = []

    class Clock(StoppingCriteria):  # type: ignore[misc]
        """Notes when each step is done."""

        def __call__(self, input_ids: Tensor, scores: Tensor, **others: Any) -> Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    width = max(len(each.prompt) for each in requests)
    tokens = torch.tensor([[PADDING] * (width - len(each.prompt)) + each.prompt for each in requests])
    lengths = torch.tensor([len(each.prompt) for each in requests])
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    made = reference.generate(
        tokens.to(reference.device),
        attention_mask=mask.to(reference.device),
        max_new_tokens=max(each.steps for each in requests),
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([Clock()]),
    )[:, width:]
    return [Made(row[: each.steps].tolist(), times[: each.steps]) for row, each in zip(made, requests)]
