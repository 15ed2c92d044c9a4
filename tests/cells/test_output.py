"""Projection, greedy choice and sampling: against torch, and against the distribution that they promise."""

import pytest
import torch
from torch import nn

from cellrt.cells import Argmax, Projection, ProjectionArgmax, Sample
from cellrt.cells.output import uniform
from cellrt.errors import DefinitionError
from tests.cells.gated import assert_close, normal


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_projection_and_its_best_token_equal_torch(dtype, bias):
    reference = nn.Linear(20, 37, bias=bias).to(dtype)
    for rows in (1, 3, 50, 130):
        h = normal(rows, 20).to(dtype)
        logits = Projection.from_torch(reference)(h).logits
        assert_close(logits, reference(h), 1e-5 if dtype is torch.float32 else 2e-2)
        choice = ProjectionArgmax.from_torch(reference, end_token=4)(h)
        assert torch.equal(choice.token, Argmax()(logits).token)
        assert torch.equal(choice.stop, choice.token == 4)


def draw(sample: Sample, logits: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens for the seeds 0, 1, ... at steps 0, 1, 2, 0, ..."""
    seed = torch.arange(count)
    return sample(logits.expand(count, -1), seed, seed % 3).token


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 2.0, "top_k": 6, "top_p": 0.7}]
)
def test_tokens_have_the_right_frequencies(options):
    logits = torch.linspace(-2, 1.5, 9)[torch.randperm(9, generator=torch.Generator().manual_seed(1))]
    expected = reference_probabilities(logits, **options)
    count = 30_000
    found = torch.bincount(draw(Sample(**options), logits, count), minlength=9).double()
    assert (found[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((found - count * expected) ** 2 / (count * expected))[kept].sum()
    assert chi_square < 35  # of at most 8 degrees of freedom: once in 40,000 at random


def reference_probabilities(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """One token after the other, from the most likely on."""
    order = sorted(range(len(logits)), key=lambda token: -float(logits[token]))
    order = order[: top_k or None]
    weights = {token: torch.exp(logits[token].double() / temperature) for token in order}
    total, reached = sum(weights.values()), 0.0
    result = torch.zeros(len(logits), dtype=torch.float64)
    for token in order:
        if reached < top_p * total:
            result[token] = weights[token]
        reached += weights[token]
    return result / result.sum()


def test_a_token_depends_on_its_own_row_alone():
    sample, logits = Sample(top_k=20, top_p=0.9), normal(40, 100)
    seed, step = torch.randint(-(2**63), 2**63 - 1, (40,)), torch.randint(1000, (40,))
    together = sample(logits, seed, step).token
    assert torch.equal(together, sample(logits, seed, step).token)
    order = torch.randperm(40)
    assert torch.equal(sample(logits[order], seed[order], step[order]).token, together[order])
    for row in range(40):
        one = slice(row, row + 1)
        assert torch.equal(sample(logits[one], seed[one], step[one]).token, together[one])


def test_the_hash_is_that_of_splitmix64():
    assert splitmix64(1234567 + GOLDEN) == 6457827717110365317  # the published first number for this seed
    for seed, step in ((0, 0), (1, 0), (0, 1), (2**63 - 1, 7), (-5, 2**40)):
        bits = splitmix64(splitmix64(seed + GOLDEN) + step * GOLDEN + GOLDEN)
        actual = uniform(torch.tensor([seed]), torch.tensor([step]))
        assert actual.item() == ((bits >> 16) + 0.5) / 2**48


GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """The mixing function, in unsigned integers of any size."""
    wrap = (1 << 64) - 1
    state &= wrap
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & wrap
    state = (state ^ state >> 27) * 0x94D049BB133111EB & wrap
    return state ^ state >> 31


def test_seeds_and_steps_give_unrelated_numbers():
    grid = torch.cartesian_prod(torch.arange(200), torch.arange(200))
    numbers = uniform(grid[:, 0], grid[:, 1]).view(200, 200)
    assert abs(numbers.mean() - 0.5) < 0.01
    for shifted in (numbers.roll(1, 0), numbers.roll(1, 1), numbers.roll((1, -1), (0, 1))):
        assert abs(torch.corrcoef(torch.stack([numbers.flatten(), shifted.flatten()]))[0, 1]) < 0.03


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": "1"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(DefinitionError, match="expected temperature"):
        Sample(**options)


def test_the_first_of_the_highest_is_chosen_wherever_it_is():
    """Also behind the columns that are searched together, and in those that fill no vector."""
    module = ProjectionArgmax(3, 1301)
    torch.nn.init.zeros_(module.weight)
    h = torch.randn(2, 3)
    for equals in ([700, 1290], [511, 512], [1300], [0, 1300], range(1301)):
        with torch.no_grad():
            module.bias.fill_(-5.0)[list(equals)] = -1.0
        with torch.inference_mode():
            assert module(h).token.tolist() == [min(equals)] * 2
    with torch.no_grad():
        module.bias.fill_(-torch.inf)
    with torch.inference_mode():
        assert module(h).token.tolist() == [0, 0]


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_no_temperature_and_no_logit_is_too_small_or_large(options) -> None:
    sample = Sample(temperature=1e-30, **options)
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1e38, -3e38, 3e38], [-torch.inf, 0.0, -torch.inf]])
    chosen = sample(logits, torch.arange(3), torch.zeros(3, dtype=torch.int64))
    assert chosen.token.tolist() == [1, 2, 1]
