"""A text longer than a ready-made encoder has positions for is the request's error, which names the limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cellrt.cells.transformer_stack import (
    StackSizes,
    TransformerStack,
    encoder_decoder_cells,
    sentence_encoder,
)
from cellrt.errors import DefinitionError, RequestError
from cellrt.unfolders.attention import embed, transduce
from tests.engine.helpers import close_and_check, small_engine

POSITIONS = 6
SIZES = StackSizes(vocabulary=9, positions=POSITIONS, hidden=8, inner=8, layers=1, heads=2)


def models() -> list[Any]:
    torch.manual_seed(0)
    encoder, decoder = TransformerStack(SIZES), TransformerStack(SIZES, is_decoder=True)
    cells = encoder_decoder_cells(encoder, decoder, nn.Linear(8, 9), end_token=0, page_size=2)
    return [embed("m", sentence_encoder(encoder)), transduce("m", cells, start=1, max_steps=2)]


@pytest.mark.parametrize("number", range(2))
def test_a_text_longer_than_the_positions_is_refused_as_a_request(number: int) -> None:
    engine = small_engine()
    try:
        engine.register(models()[number], warm_up=False)
        with pytest.raises(RequestError, match=f"a sequence of {POSITIONS + 1} rows; its module has positions for 6"):
            engine.submit("m", torch.ones(POSITIONS + 1, dtype=torch.int64))
        assert engine.submit("m", torch.ones(POSITIONS, dtype=torch.int64)).result(timeout=60)
    finally:
        close_and_check(engine)


def test_more_steps_than_positions_are_refused_where_the_model_is_made() -> None:
    encoder, decoder = TransformerStack(SIZES), TransformerStack(SIZES, is_decoder=True)
    cells = encoder_decoder_cells(encoder, decoder, nn.Linear(8, 9), end_token=0, page_size=2)
    with pytest.raises(DefinitionError, match="model 'm': max_steps=7; the decoder has positions for 6"):
        transduce("m", cells, start=1, max_steps=7)
