"""Checkpoints with weights of int8 say what ``transformers`` says with weights that are rounded so."""

import pytest
import torch
from torch import nn

import cellrt
from cellrt.cells.attention import Linear
from cellrt.cells.int8 import Int8Linear
from cellrt.errors import DefinitionError
from cellrt.language.checkpoints import read_checkpoint
from tests.language.small_models import saved
from tests.language.test_architectures import PROMPTS, STEPS, answers, check_tokens


@pytest.fixture(scope="module")
def engine():
    with cellrt.Engine(page_bytes=1 << 22, workers=1) as engine:
        yield engine


def rounded(weight):
    """Each output's weights as the 255 multiples of a factor."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (weight / scale).round() * scale


def round_all(model):
    """Round the weights of a model's linear layers; its head is one of them, its embedding is not."""
    with torch.no_grad():
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.weight.copy_(rounded(part.weight))
            elif type(part).__name__ == "Conv1D":
                part.weight.copy_(rounded(part.weight.t()).t())


@pytest.mark.parametrize("name", ["Qwen 3", "GPT-2", "Mamba 2"])
@torch.inference_mode()
def test_a_decoder_says_what_it_says_with_rounded_weights(name, engine, tmp_path):
    reference = saved(name, tmp_path)
    checkpoint = read_checkpoint(tmp_path, dtype=torch.int8)
    assert checkpoint.num_bytes < read_checkpoint(tmp_path).num_bytes
    round_all(reference)
    requests = [{"prompt": torch.tensor(prompt), "max_tokens": STEPS} for prompt in PROMPTS]
    for prompt, made in zip(PROMPTS, answers(engine, checkpoint, name, requests)):
        read = prompt + made["token"][:-1].tolist()
        logits = reference(torch.tensor([read])).logits[0, len(prompt) - 1 :]
        check_tokens(made, logits, checkpoint.end_tokens[0], torch.float32)


@torch.inference_mode()
def test_an_encoder_decoder_says_what_it_says_with_rounded_weights(engine, tmp_path):
    reference = saved("T5", tmp_path)
    round_all(reference)
    requests = [{"source": torch.tensor(prompt), "max_steps": STEPS} for prompt in PROMPTS]
    checkpoint = read_checkpoint(tmp_path, dtype=torch.int8)
    for prompt, made in zip(PROMPTS, answers(engine, checkpoint, "T5", requests)):
        read = torch.tensor([[0, *made["token"][:-1].tolist()]])
        logits = reference(input_ids=torch.tensor([prompt]), decoder_input_ids=read).logits[0]
        check_tokens(made, logits, 2, torch.float32)


@torch.inference_mode()
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(7, 3, True), (64, 64, False), (130, 200, True)])
def test_a_layer_has_the_bits_of_its_widened_weights_in_any_company(inputs, outputs, bias):
    torch.manual_seed(0)
    own = Linear(inputs, outputs, bias).eval()
    with torch.no_grad():
        own.weight[1] = 0.0
    narrow = Int8Linear.of(own)
    torch.testing.assert_close(narrow.weight, own.weight, atol=float(own.weight.abs().max()) / 250, rtol=0)
    own.weight = nn.Parameter(narrow.weight.clone())
    x = torch.randn(203, inputs)
    together = narrow(x)
    assert torch.equal(together, own(x))
    assert all(torch.equal(narrow(x[k : k + 3]), together[k : k + 3]) for k in (0, 50, 200))
    with torch.inference_mode(False), torch.enable_grad():
        torch.testing.assert_close(narrow(x.clone()), together)


def test_weights_that_are_not_finite_are_refused():
    own = Linear(3, 2)
    with torch.no_grad():
        own.weight[0, 0] = float("nan")
    with pytest.raises(DefinitionError, match="finite"):
        Int8Linear.of(own)
