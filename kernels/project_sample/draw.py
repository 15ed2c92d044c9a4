"""How each row's token is drawn."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Draw(NamedTuple):
    """One value a row, on the weight's device.

    ``temperatures`` float32, 0 or above (0 takes the most likely token); ``seeds`` int64, one a request; ``steps``
    int32, how many tokens the request has drawn. ``top_k`` int32 keeps the k most likely tokens (0 or below keeps
    all). ``top_p`` float32 keeps, of these, the fewest most likely ones whose probabilities at that temperature sum
    to at least p (1 or above keeps all, 0 or below one). Tokens as likely as the last one kept are kept as well.
    """

    temperatures: Tensor
    seeds: Tensor
    steps: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
