"""Beam search as a cell, against hypotheses extended one at a time and against all sequences there are."""

import pytest
import torch
from torch import nn

from cellrt.cells import AttentionGRUDecoder, BeamEnd, BeamStart, BeamStep, EmbeddingGRUDecoder, EmbeddingLSTMDecoder
from cellrt.cells.beam import best_of
from cellrt.definition.define import cell, load_cell
from cellrt.definition.spec import rows
from cellrt.errors import DefinitionError
from tests.cells.attention_oracle import ragged_of
from tests.cells.gated import assert_close
from tests.oracles.beam import all_sequences, search

HIDDEN, START, END = 4, 0, 1
INPUTS = {"token": rows(dtype=torch.int64), "h": rows(HIDDEN)}


class Scorer(nn.Module):
    """A small network whose next token depends on all tokens before."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_tokens, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, num_tokens)
        nn.init.normal_(self.out.weight, std=2.0)

    def forward(self, token, h):
        h = torch.tanh(2 * self.mix(h) + self.table(token))
        return {"logits": self.out(h), "h": h}

    def advance_one(self, token, h):
        scored = self(torch.tensor([token]), h[None])
        return scored["logits"][0], scored["h"][0]


def make_step(scorer, **options):
    return BeamStep(scorer, INPUTS, **{"beams": 3, "end_token": END, "max_steps": 6} | options)


def run(step, *states, until_stop=True):
    """Searches the rows of ``states`` ``[rows, *shape]`` together, each until it stops; returns each row's last."""
    count = len(states[0])
    token, score = (row.expand(count, -1) for row in (step.start_token(START), step.start_score()))
    current = {"token": token, "score": score, "length": torch.zeros_like(token)}
    current["tokens"] = torch.zeros(count, step.beams, step.max_steps, dtype=torch.int64)
    current |= BeamStart(step.states, step.beams)(*states)
    last: dict[int, dict[str, torch.Tensor]] = {}
    for _ in range(step.max_steps):
        outputs = step(*current.values())
        for row in range(count):
            if row not in last or not (until_stop and last[row]["stop"]):
                last[row] = {name: value[row] for name, value in outputs.items()}
        current = {name: outputs[name] for name in current}
    return {name: torch.stack([last[row][name] for row in range(count)]) for name in last[0]}


def best(step, *states, until_stop=True):
    last = run(step, *states, until_stop=until_stop)
    return BeamEnd(step.best, END, step.length_penalty)(last["tokens"], last["score"], last["length"])


def sequences(found, row):
    return [tuple(tokens[:length]) for tokens, length in zip(found.tokens[row].tolist(), found.length[row].tolist())]


@pytest.fixture(autouse=True, params=[True, False], ids=["inference", "gradients"])
def mode(request):
    torch.manual_seed(0)
    with torch.inference_mode(request.param):
        yield


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("beams", [1, 2, 3, 8])
def test_the_search_is_the_naive_one(beams, length_penalty):
    scorer = Scorer(7)
    step = make_step(scorer, beams=beams, best=beams, length_penalty=length_penalty)
    h = torch.randn(12, HIDDEN)
    found = best(step, h)
    for row in range(12):
        expected = search(scorer.advance_one, h[row], START, END, beams, 6, length_penalty)
        assert sequences(found, row) == [each.tokens for each in expected]
        divisors = [((5 + len(each.tokens)) / 6) ** length_penalty for each in expected]
        scores = [each.score / divisor for each, divisor in zip(expected, divisors)]
        assert_close(found.score[row], torch.tensor(scores))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_with_enough_beams_the_best_of_all_sequences_are_found(length_penalty):
    scorer = Scorer(3)
    step = make_step(scorer, beams=40, best=5, max_steps=4, length_penalty=length_penalty)
    h = torch.randn(4, HIDDEN)
    found = best(step, h)
    for row in range(4):
        every = all_sequences(scorer.advance_one, h[row], START, END, 3, 4, length_penalty)
        assert len(every) < 40
        assert sequences(found, row) == [tokens for tokens, _ in every[:5]]
        assert_close(found.score[row], torch.tensor([value for _, value in every[:5]]))


@pytest.mark.parametrize("decoder", [EmbeddingGRUDecoder, EmbeddingLSTMDecoder])
def test_one_beam_is_greedy(decoder):
    module = decoder(9, 5, HIDDEN, END)
    names = ["h", "c"] if decoder is EmbeddingLSTMDecoder else ["h"]
    inputs = {"token": INPUTS["token"], **{name: (HIDDEN,) for name in names}}
    step = BeamStep(module, inputs, beams=1, end_token=END, max_steps=8)
    states = [torch.randn(20, HIDDEN) * 3 for _ in names]
    found = best(step, *states)
    for row in range(20):
        current, token, tokens = [value[row : row + 1] for value in states], torch.tensor([START]), []
        while len(tokens) < 8 and END not in tokens:
            after = module(token, *current)
            token, current = after["token"], [after[name] for name in names]
            tokens.append(int(token))
        assert sequences(found, row) == [tuple(tokens)]


@pytest.mark.parametrize("length_penalty", [0.0, 0.7])
@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_stopping_early_changes_nothing(wanted, length_penalty):
    step = make_step(Scorer(5), beams=4, best=wanted, max_steps=12, length_penalty=length_penalty)
    h = torch.randn(40, HIDDEN) * 2
    stopped, whole = best(step, h), best(step, h, until_stop=False)
    assert run(step, h)["length"].amax() <= 12
    assert bool(run(step, h)["stop"].any())
    for early, late in zip(stopped, whole):
        assert torch.equal(early, late)


def test_of_equal_hypotheses_the_lower_comes_first():
    step = make_step(lambda token, h: {"logits": torch.zeros(len(token), 5), "h": h}, max_steps=2, best=3)
    found = best(step, torch.zeros(2, HIDDEN))
    # All tokens are as likely, so sequences that end at once are the best; of the rest the first in order.
    assert sequences(found, 0) == sequences(found, 1) == [(1,), (0, 0), (0, 1)]


@pytest.mark.parametrize("columns", [3, 4, 5, 30])
def test_best_of_is_a_stable_sort(columns):
    values = torch.randint(-2, 3, (50, columns)).float()
    values[::2] += torch.rand(25, columns)
    highest, indices = best_of(values, 3)
    expected = values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(highest, expected.values[:, :3])
    assert torch.equal(indices, expected.indices[:, :3])


def test_missing_sequences_have_no_probability():
    step = make_step(lambda token, h: {"logits": torch.zeros(len(token), 2), "h": h}, beams=4, best=4, max_steps=2)
    found = best(step, torch.zeros(1, HIDDEN))
    assert sequences(found, 0) == [(1,), (0, 0), (0, 1), ()]
    assert_close(found.score[0].exp(), torch.tensor([0.5, 0.25, 0.25, 0.0]))
    assert found.tokens[0].tolist() == [[1, 1], [0, 0], [0, 1], [1, 1]]


def test_company_does_not_matter():
    step = make_step(Scorer(7), best=3)
    h = torch.randn(9, HIDDEN)
    order = torch.randperm(9)
    together = best(step, h)
    alone = [best(step, h[row : row + 1]) for row in range(9)]
    for k, value in enumerate(together):
        assert_close(best(step, h[order])[k], value[order])
        assert_close(torch.cat([found[k] for found in alone]), value)


def test_constants_reach_every_beam():
    def scorer(token, h, bias):
        return {"logits": bias + h.repeat(1, 2), "h": h}

    inputs = {**INPUTS, "bias": rows(2 * HIDDEN)}
    step = BeamStep(scorer, inputs, beams=2, end_token=END, max_steps=1, best=2, constants=["bias"])
    bias = torch.randn(3, 2 * HIDDEN)
    start = [step.start_token(START).expand(3, -1), step.start_score().expand(3, -1)]
    zeros = [torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2, 1, dtype=torch.int64)]
    found = step(*start, *zeros, torch.zeros(3, 2, HIDDEN), bias)
    assert torch.equal(found["token"], bias.topk(2).indices)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True], indirect=True)
def test_a_search_with_attention_can_be_saved(tmp_path):
    decoder = AttentionGRUDecoder(7, 3, HIDDEN, END)
    step = BeamStep(decoder, decoder.input_specs(), beams=3, end_token=END, max_steps=5)
    made = cell(step, step.input_specs())
    made.save(tmp_path)
    loaded = load_cell(tmp_path)
    for counts in ([4, 1, 2], [5]):
        memory = ragged_of([torch.randn(count, HIDDEN) for count in counts])
        inputs = [*made.example_inputs(len(counts))[:4], torch.randn(len(counts), 3, HIDDEN), memory]
        for here, there in zip(made.run(*inputs), loaded.run(*inputs), strict=True):
            assert_close(here.double(), there.double())


def test_what_does_not_fit_is_refused():
    for options in ({"best": 4}, {"best": 0}, {"max_steps": 0}, {"length_penalty": -1.0}, {"constants": ["x"]}):
        with pytest.raises(DefinitionError, match="BeamStep"):
            make_step(Scorer(3), **options)
    with pytest.raises(DefinitionError, match="must have 'token'"):
        BeamStep(Scorer(3), {"h": (4,)}, beams=2, end_token=END, max_steps=2)
    with pytest.raises(DefinitionError, match="none of"):
        BeamStep(Scorer(3), {**INPUTS, "score": (4,)}, beams=2, end_token=END, max_steps=2)
