"""SmolLM2-135M-Instruct in the engine against ``transformers``, in float32: greedy tokens of 50 prompts."""

from __future__ import annotations

import pytest
import torch

from cellrt.cells.language_models import language_model, layered_language_model
from cellrt.cells.llama_weights import llama_from_gguf
from cellrt.unfolders.completion import complete
from tests.cells.smollm import smollm
from tests.engine.helpers import close_and_check, small_engine

STEPS, WAIT_S = 20, 300.0
TOO_CLOSE = 1e-3
"""Two best logits that are closer may change places by rounding; what follows such a place is another text."""
MOST_TOO_CLOSE = 5
"""Texts of the 50."""
BEGINNINGS = (
    "The capital of {} is",
    "Once upon a time in {}, there lived",
    "def visit_{}(n):\n    ",
    "<|im_start|>user\nTell me about {} in one sentence.<|im_end|>\n<|im_start|>assistant\n",
    "Q: How many people live in {}?\nA:",
    "{}",
    "My journey to {} began early in the morning, when the fog still lay over the harbour, the ships were asleep, "
    "and nobody but the baker was awake. I packed bread, cheese, a map and",
    "1. {}\n2.",
    "In the year 1900, {} had",
    "The best food in {}, everyone agrees, is",
)
PLACES = ("France", "Japan", "Brazil", "Egypt", "Norway")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    path = smollm()
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = [text.format(place) for text in BEGINNINGS for place in PLACES]
    return [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]


@pytest.fixture(scope="module")
def model():
    return llama_from_gguf(smollm())


@pytest.fixture(scope="module")
def alone(model, prompts):
    """Each prompt's tokens and logprobs, one request after the other."""
    return serve(model, prompts, one_by_one=True)


def serve(model, prompts, *, make=language_model, one_by_one=False, page_bytes=1 << 28, workers=1, **limits):
    """The results of all prompts; not one by one, the second half comes while the first is being served."""
    cell = make(model, end_token=-1, **limits)
    engine = small_engine(workers, page_bytes=page_bytes, arena_bytes=1 << 28)
    try:
        engine.register(complete("lm", cell, max_tokens=STEPS), warm_up=False)
        if one_by_one:
            return [engine.submit("lm", prompt).result(WAIT_S) for prompt in prompts]
        half = len(prompts) // 2
        futures = [engine.submit("lm", prompt) for prompt in prompts[:half]]
        futures[0].result(WAIT_S)
        futures += [engine.submit("lm", prompt) for prompt in prompts[half:]]
        return [future.result(WAIT_S) for future in futures]
    finally:
        close_and_check(engine)


@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(prompts, alone):
    """Wherever the two best logits differ by more than 1e-3; where they do not is printed (``pytest -s``)."""
    path = smollm()
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    reference = load(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    too_close = []
    for k, (prompt, result) in enumerate(zip(prompts, alone)):
        tokens = result["token"]
        logits = reference(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        close = (best.values[:, 0] - best.values[:, 1] <= TOO_CLOSE).nonzero().flatten().tolist()
        sure = close[0] if close else STEPS
        too_close += [(k, sure)] if close else []
        assert tokens[:sure].tolist() == best.indices[:sure, 0].tolist(), f"prompt {k}"
        logprobs = logits.log_softmax(1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(result["logprob"], logprobs, atol=1e-3, rtol=1e-4)
    print(f"prompts with two best logits within {TOO_CLOSE}, and the step: {too_close}")
    assert len(prompts) == 50
    assert len(too_close) <= MOST_TOO_CLOSE


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"max_batch_rows": 16, "max_batch": 16},
        {"page_size": 4, "page_bytes": 1},  # 64 pages, so 256 tokens, for texts of 22 to 75
        {"make": layered_language_model},
    ],
    ids=["among arrivals", "in pieces", "suspended", "30 layers as cells"],
)
def test_tokens_and_logprobs_have_the_same_bits_in_any_company(model, prompts, alone, how):
    for result, wanted in zip(serve(model, prompts, **how), alone):
        assert result["token"].tolist() == wanted["token"].tolist()
        assert torch.equal(result["logprob"], wanted["logprob"])
