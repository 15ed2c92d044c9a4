"""What is told of logits, by kernel and reference."""

from __future__ import annotations

import pytest
import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.score_tokens import reference, score_tokens
from tests.kernels.ahead import compile_everywhere, needs_compiler, recorded_launches

END = 2


def arenas(count: int, tokens: int, dtype: torch.dtype, device: str) -> tuple[ArenaRows, ...]:
    """Where tokens, stops, logits and log-probabilities go: backwards, and the second row nowhere."""
    rows = torch.arange(count - 1, -1, -1, device=device)
    rows[1:2] = -1
    kinds = ((torch.int64, ()), (torch.bool, ()), (dtype, (tokens,)), (torch.float32, ()))
    return tuple(ArenaRows(torch.full((count, *size), 9, dtype=kind, device=device), rows) for kind, size in kinds)


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize("tokens", [3, 7, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_token_is_told_with_its_scores(
    device: str, tokens: int, dtype: torch.dtype, is_reference: bool
) -> None:
    run = reference.score_tokens if is_reference else score_tokens
    torch.manual_seed(tokens)
    logits = torch.randn(5, tokens, device=device).to(dtype)
    logits[3] = 1.0  # all alike: the lowest
    logits[4, END] = 30.0
    token, stop, copies, logprob = arenas(5, tokens, dtype, device)
    run(logits, token, stop, END, copies, logprob)
    wide = logits.float()
    best = wide.argmax(1)
    best[3] = 0
    expected = torch.log_softmax(wide, 1).gather(1, best[:, None])[:, 0]
    for row, at in enumerate(token.rows.tolist()):
        if at >= 0:
            assert (token.values[at], stop.values[at]) == (best[row], best[row] == END)
            assert torch.equal(copies.values[at], logits[row])
            torch.testing.assert_close(logprob.values[at], expected[row], rtol=1e-5, atol=1e-5)
    assert token.values[3] == 9 and (copies.values[3] == 9).all() and logprob.values[3] == 9


@pytest.mark.parametrize("is_reference", [False, True])
def test_a_token_that_was_drawn_is_scored(device: str, is_reference: bool) -> None:
    run = reference.score_tokens if is_reference else score_tokens
    logits = torch.randn(6, 7, device=device)
    token, _, _, logprob = arenas(6, 7, torch.float32, device)
    token.values.copy_(torch.tensor([5, 0, 6, 1, 3, 3]))
    span = torch.tensor([2, 4], device=device)
    run(
        logits, *(ArenaRows(*each[:2], 6, span) for each in (token,)), None, END, None, ArenaRows(*logprob[:2], 6, span)
    )
    for row, at in enumerate(token.rows[2:].tolist()):
        expected = torch.log_softmax(logits[row], 0)[token.values[at]]
        torch.testing.assert_close(logprob.values[at], expected, rtol=1e-5, atol=1e-5)
    assert (logprob.values[4:] == 9).all()


def test_other_logits_are_refused() -> None:
    token, stop, copies, logprob = arenas(3, 7, torch.float32, "cpu")
    with pytest.raises(ValueError, match="logits must be contiguous, a row for each of 3"):
        score_tokens(torch.zeros(2, 7), token, stop)
    with pytest.raises(ValueError, match="copies must be rows of 6"):
        score_tokens(torch.zeros(3, 6), token, stop, END, copies, logprob)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_compiles_everywhere_and_spills_nothing(dtype: torch.dtype) -> None:
    from cellrt.kernels.score_tokens import triton

    with recorded_launches() as launches:
        for tokens in (7, 50_000):
            token, stop, copies, logprob = arenas(4, tokens, dtype, "cpu")
            triton.score_tokens(torch.zeros(4, tokens, dtype=dtype), token, stop, END, copies, logprob)
            triton.score_tokens(torch.zeros(4, tokens, dtype=dtype), token, None, END, None, logprob)
    for compiled in compile_everywhere(launches):
        assert compiled.stack_bytes == 0
