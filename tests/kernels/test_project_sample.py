"""Projection and sampling: noise against known answers, kernels against plain scores, draws against probabilities."""

import pytest
import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.project_argmax import project_argmax
from cellrt.kernels.project_sample import Draw, Projection, project_sample
from cellrt.kernels.project_sample.reference import gumbel, kept_tokens, philox, select_rows
from tests.kernels.ahead import compile_everywhere, needs_compiler, recorded_launches
from tests.kernels.projections import CAPACITY, UNTOUCHED, exact_logits, launch_arguments, outputs, some_rows

FILTERS = ["none", "k", "p", "kp"]


def some_draw(num_rows: int, vocabulary: int, filters: str, device: str) -> Draw:
    """Every fourth row greedy; among the limits some that keep all and some that keep one token."""
    temperatures = 2 * torch.rand(num_rows)
    temperatures[::4] = 0
    top_k = torch.randint(-1, vocabulary + 2, (num_rows,), dtype=torch.int32)
    top_p = 1.2 * torch.rand(num_rows) - 0.1
    return Draw(
        temperatures.to(device),
        torch.randint(-(2**63), 2**63 - 1, (num_rows,)).to(device),
        torch.randint(2**31 - 1, (num_rows,), dtype=torch.int32).to(device),
        top_k.to(device) if "k" in filters else None,
        top_p.to(device) if "p" in filters else None,
    )


def some_projection(sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[ArenaRows, Projection]:
    num_rows, hidden, vocabulary = sizes
    h = ArenaRows(torch.randn(CAPACITY, hidden).to(device, dtype), some_rows(num_rows, device))
    weight = (torch.randn(vocabulary, hidden) / hidden**0.5).to(device, dtype)
    return h, Projection(weight, torch.randn(vocabulary).to(device, dtype), vocabulary // 2, "ieee")


def check_draws(device: str, sizes: tuple[int, int, int], dtype: torch.dtype, filters: str) -> None:
    """Each row's token has the best score, to rounding, of those kept by its limits, to rounding."""
    torch.manual_seed(sizes[0])
    h, projection = some_projection(sizes, dtype, device)
    draw = some_draw(sizes[0], sizes[2], filters, device)
    tokens, stops = outputs(sizes[0], device)
    project_sample(h, projection, draw, tokens, stops)
    tokens, is_row = tokens.cpu(), h.rows.cpu() >= 0
    assert (tokens[~is_row] == UNTOUCHED).all() and stops.cpu()[~is_row].all()
    assert stops.cpu()[is_row].equal(tokens[is_row] == projection.stop_token)
    draw = Draw(*(None if values is None else values.cpu() for values in draw))
    logits = exact_logits(h, projection).float()
    scores = logits + draw.temperatures[:, None] * gumbel(draw.seeds, draw.steps, sizes[2])
    narrow, wide = (
        kept_tokens(logits, draw._replace(top_p=None if draw.top_p is None else draw.top_p + change))
        for change in (-1e-4, 1e-4)
    )
    best = scores.masked_fill(~narrow, -torch.inf).amax(dim=1)
    chosen = tokens.clamp(min=0)[:, None]
    assert (scores.gather(1, chosen)[:, 0] >= best - 1e-3)[is_row].all()
    assert wide.gather(1, chosen)[is_row].all()


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("sizes", [(1, 5, 3), (5, 40, 301)], ids=str)
def test_draws_are_the_best_of_the_kept(device: str, sizes: tuple[int, int, int], filters: str) -> None:
    check_draws(device, sizes, torch.float32, filters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_batch_of_half_types(device: str, dtype: torch.dtype) -> None:
    check_draws(device, (512, 16, 70), dtype, "none")


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_from_a_vocabulary_of_several_chunks(device: str, dtype: torch.dtype, filters: str) -> None:
    check_draws(device, (7, 40, 5001), dtype, filters)


@pytest.mark.parametrize("filters", FILTERS)
def test_draws_of_the_reference(filters: str) -> None:
    check_draws("cpu", (512, 16, 301), torch.float32, filters)


def test_limits_that_keep_all_change_nothing_and_those_that_keep_one_are_greedy(device: str) -> None:
    torch.manual_seed(0)
    h, projection = some_projection((6, 16, 150), torch.float32, device)
    draw = some_draw(6, 150, "none", device)
    free, every, one, warmest, greedy = (outputs(6, device) for _ in range(5))
    project_sample(h, projection, draw, *free)
    zeros, ones = torch.zeros(6, device=device), torch.ones(6, device=device)
    project_sample(h, projection, draw._replace(top_k=zeros.int(), top_p=ones), *every)
    project_sample(h, projection, draw._replace(top_k=ones.int()), *one)
    project_sample(h, projection, draw._replace(top_p=zeros), *warmest)
    project_argmax(h, projection, *greedy)
    assert free[0].equal(every[0])
    assert one[0].equal(greedy[0]) and warmest[0].equal(greedy[0])
    assert not free[0].equal(greedy[0])


def test_a_row_draws_the_same_token_in_any_batch(device: str) -> None:
    torch.manual_seed(1)
    h, projection = some_projection((70, 16, 150), torch.float32, device)
    draw = some_draw(70, 150, "none", device)
    together, alone = outputs(70, device), outputs(1, device)
    project_sample(h, projection, draw, *together)
    for row in (1, 42, 69):
        single = select_rows(draw, torch.tensor([row], device=device))
        project_sample(ArenaRows(h.values, h.rows[row : row + 1].clone()), projection, single, *alone)
        assert alone[0][0] == together[0][row]


@pytest.mark.parametrize(
    ("seed", "counter", "expected"),
    [
        (0, [0] * 4, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (-1, [0xFFFFFFFF] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x299F31D0A4093822,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_random_words_are_those_of_philox(seed: int, counter: list[int], expected: list[int]) -> None:
    words = philox(torch.tensor([seed]), *(torch.tensor([word]) for word in counter))
    assert [int(word) for word in words] == expected


def test_noise_has_the_distribution_of_gumbel() -> None:
    noise = gumbel(torch.arange(2000), torch.arange(2000), 500).flatten().double()
    for probability in (0.001, 0.1, 0.5, 0.9, 0.999, 0.99999):
        share = (noise < -torch.log(-torch.log(torch.tensor(probability, dtype=torch.float64)))).double().mean()
        assert abs(share - probability) < 5 * (probability * (1 - probability) / len(noise)) ** 0.5


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (3, None), (None, 0.8), (4, 0.9)])
def test_tokens_are_drawn_with_their_probabilities(top_k: int | None, top_p: float | None) -> None:
    num_rows, temperature = 20_000, 0.7
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, -3.0, 0.0])
    wanted = torch.softmax(logits / temperature, dim=0)
    if top_k is not None:
        wanted[wanted.argsort(descending=True)[top_k:]] = 0
    if top_p is not None:
        order = wanted.argsort(descending=True)
        sums = (wanted / wanted.sum())[order].cumsum(dim=0)
        wanted[order[int((sums < top_p).sum()) + 1 :]] = 0
    wanted /= wanted.sum()
    draw = Draw(
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), 1234),
        torch.arange(num_rows, dtype=torch.int32),
        None if top_k is None else torch.full((num_rows,), top_k, dtype=torch.int32),
        None if top_p is None else torch.full((num_rows,), top_p),
    )
    tokens, stops = outputs(num_rows, "cpu")
    h = ArenaRows(torch.zeros(1, 1), torch.zeros(num_rows, dtype=torch.int32))
    project_sample(h, Projection(torch.zeros(6, 1), logits), draw, tokens, stops)
    shares = torch.bincount(tokens, minlength=6) / num_rows
    assert ((shares - wanted).abs() <= 5 * (wanted * (1 - wanted) / num_rows) ** 0.5).all()


@pytest.mark.parametrize("name", ["temperatures", "seeds", "steps", "top_k", "top_p"])
def test_draws_of_another_length_are_refused(name: str) -> None:
    h, projection = some_projection((4, 8, 9), torch.float32, "cpu")
    draw = some_draw(4, 9, "kp", "cpu")
    with pytest.raises(ValueError, match=rf"{name} must be contiguous .* \[4\]"):
        project_sample(h, projection, draw._replace(**{name: getattr(draw, name)[:3]}), *outputs(4, "cpu"))


def check_compiled(num_rows: int, dtype: torch.dtype, precision: str, filters: str) -> None:
    from cellrt.kernels.project_sample import triton as kernel

    draw = some_draw(num_rows, 9, filters, "cpu")
    with recorded_launches() as launches:
        kernel.project_sample(*launch_arguments(num_rows, dtype, precision), draw, *outputs(num_rows, "cpu"))
    assert len(launches) == 2
    for compiled in compile_everywhere(launches):
        assert compiled.stack_bytes == 0, compiled.name


@needs_compiler
@pytest.mark.parametrize("filters", ["none", "kp"])
def test_full_batch_compiles_without_spills(filters: str) -> None:
    check_compiled(512, torch.bfloat16, "ieee", filters)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 32, 64, 512])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float32, "tf32x3"), (torch.float16, "ieee")],
)
@pytest.mark.parametrize("filters", ["none", "kp"])
def test_every_tile_compiles_without_spills(dtype: torch.dtype, precision: str, num_rows: int, filters: str) -> None:
    check_compiled(num_rows, dtype, precision, filters)
