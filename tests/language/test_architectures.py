"""Each architecture says what it says in ``transformers``."""

import pytest
import torch

import cellrt
from cellrt.language.checkpoints import read_checkpoint
from tests.language.small_models import MODELS, VOCABULARY, saved

PROMPTS = [[1, 7, 9, 3, 3, 11, 50], [5], [30, 31, 8, 8], list(range(3, 43)), [58, 4]]
STEPS = 12
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Of log-probabilities, as a part of the largest logit; and of the numbers of an embedding of length 1."""
DECODERS = [name for name, (kind, _) in MODELS.items() if "LM" in kind]
ENCODER_DECODERS = [name for name in MODELS if name.startswith("T5")]


def each(names, halves):
    """All in float32, and some in 16 bits: what these have in common is the same code."""
    some = [(name, dtype) for name in halves for dtype in (torch.bfloat16, torch.float16)]
    return [(name, torch.float32) for name in names] + some


@pytest.fixture(scope="module")
def engine():
    with cellrt.Engine(page_bytes=1 << 22, workers=1) as engine:
        yield engine


def answers(engine, checkpoint, name, requests):
    engine.register(checkpoint.make(name))
    futures = [engine.submit(name, request) for request in requests]
    return [future.result(timeout=60) for future in futures]


def check_tokens(made, logits, end, dtype):
    """That tokens are the likeliest of these logits ``[steps, vocabulary]``, and their log-probabilities right."""
    expected = logits.float().log_softmax(1)
    tokens, tolerance = made["token"], TOLERANCES[dtype] * float(logits.abs().max())
    chosen = expected[torch.arange(len(tokens)), tokens]
    assert (expected.max(1).values - chosen).abs().max() <= tolerance
    torch.testing.assert_close(made["logprob"], chosen, atol=tolerance, rtol=0)
    if dtype is torch.float32:
        assert tokens.tolist() == expected.argmax(1).tolist()
    assert (len(tokens) == STEPS) or int(tokens[-1]) == end
    assert end not in tokens[:-1].tolist()


@pytest.mark.parametrize(("name", "dtype"), each(DECODERS, halves=("Qwen 3", "GPT-2", "Mamba 2")))
@torch.inference_mode()
def test_a_decoder_goes_on_as_in_transformers(name, dtype, engine, tmp_path):
    reference = saved(name, tmp_path).to(dtype)
    checkpoint = read_checkpoint(tmp_path, dtype=dtype)
    assert (checkpoint.kind, checkpoint.architecture, checkpoint.vocabulary) == ("decoder", MODELS[name][0], VOCABULARY)
    assert checkpoint.num_bytes == dtype.itemsize * sum(weight.numel() for weight in reference.parameters())
    requests = [{"prompt": torch.tensor(prompt), "max_tokens": STEPS} for prompt in PROMPTS]
    for prompt, made in zip(PROMPTS, answers(engine, checkpoint, f"{name} {dtype}", requests)):
        read = prompt + made["token"][:-1].tolist()
        logits = reference(torch.tensor([read])).logits[0, len(prompt) - 1 :]
        check_tokens(made, logits, checkpoint.end_tokens[0], dtype)


@pytest.mark.parametrize(("name", "dtype"), each(ENCODER_DECODERS, halves=("T5",)))
@torch.inference_mode()
def test_an_encoder_decoder_answers_as_in_transformers(name, dtype, engine, tmp_path):
    reference = saved(name, tmp_path).to(dtype)
    checkpoint = read_checkpoint(tmp_path, dtype=dtype)
    assert (checkpoint.kind, checkpoint.start_token, checkpoint.end_tokens) == ("encoder-decoder", 0, (2,))
    requests = [{"source": torch.tensor(prompt), "max_steps": STEPS} for prompt in PROMPTS]
    for prompt, made in zip(PROMPTS, answers(engine, checkpoint, f"{name} {dtype}", requests)):
        read = torch.tensor([[0, *made["token"][:-1].tolist()]])
        logits = reference(input_ids=torch.tensor([prompt]), decoder_input_ids=read).logits[0]
        check_tokens(made, logits, 2, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@torch.inference_mode()
def test_an_encoder_embeds_as_in_transformers(dtype, engine, tmp_path):
    reference = saved("BERT", tmp_path).to(dtype)
    checkpoint = read_checkpoint(tmp_path, dtype=dtype)
    assert (checkpoint.kind, checkpoint.context, checkpoint.end_tokens) == ("encoder", 128, (2,))
    requests = [torch.tensor(prompt) for prompt in PROMPTS]
    for prompt, made in zip(PROMPTS, answers(engine, checkpoint, f"BERT {dtype}", requests)):
        rows = reference(torch.tensor([prompt])).last_hidden_state[0].float()
        expected = torch.nn.functional.normalize(rows.mean(0), dim=0)
        torch.testing.assert_close(made["embedding"].float(), expected, atol=TOLERANCES[dtype], rtol=0)
