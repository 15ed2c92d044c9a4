"""The usual servers of an LSTM: whole-request batching, in several strengths.

Every peer is a server with one LSTM layer: ``submit(x [n, input])`` gives a future of the last hidden state
``[hidden]``. They differ in what they batch and how they fill it up:

==================== ====================================================================================
one at a time        ``nn.LSTM``, no batching
padded               ``nn.LSTM``, a batch in order of arrival, padded to its longest sentence
bucketed             ``nn.LSTM``, only sentences of similar length together, buckets in turn
packed               ``nn.LSTM`` on a packed sequence: in order of arrival, no padding computed
onnxruntime padded   as padded, with onnxruntime's LSTM
onnxruntime bucketed as bucketed, with onnxruntime's LSTM
==================== ====================================================================================

Padded batches are small: with sentences of very different lengths, a large one is mostly padding. Buckets
have the paper's width of 10; a batch is padded to its longest sentence, which is never more than the
bucket's upper end that the paper pads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from benchmarks.server import Backlog, BatchServer, Buckets, InOrder, Runner, Waiting

BUCKET_WIDTH = 10


def make_peer(name: str, lstm: nn.LSTM, **options: Any) -> BatchServer:
    """Return the server of that name; ``options`` go to ``BatchServer``.

    Raise KeyError for another name, ValueError for another LSTM than a plain one.
    """
    make_runner, max_batch, is_bucketed = PEERS[name]
    _check_lstm(lstm)
    backlog: Backlog[Waiting] = Buckets(BUCKET_WIDTH) if is_bucketed else InOrder()
    return BatchServer(partial(make_runner, lstm), backlog=backlog, **{"max_batch": max_batch, **options})


def one_at_a_time(lstm: nn.LSTM, threads: int) -> Runner:
    """``nn.LSTM`` on one sentence after another."""
    return lambda sentences: enumerate(lstm(x)[1][0][0] for x in sentences)


def padded(lstm: nn.LSTM, threads: int) -> Runner:
    """``nn.LSTM`` on sentences padded to the longest."""

    def run(sentences: Sequence[Tensor]) -> Iterable[tuple[int, Tensor]]:
        outputs: Tensor = lstm(pad_sequence(list(sentences)))[0]
        last = torch.tensor([len(x) - 1 for x in sentences])
        return enumerate(outputs[last, torch.arange(len(sentences))].unbind())

    return run


def packed(lstm: nn.LSTM, threads: int) -> Runner:
    """``nn.LSTM`` on packed sequences: no step past a sentence's end."""

    def run(sentences: Sequence[Tensor]) -> Iterable[tuple[int, Tensor]]:
        last: Tensor = lstm(pack_sequence(list(sentences), enforce_sorted=False))[1][0]
        return enumerate(last[0].unbind())

    return run


def onnx_padded(lstm: nn.LSTM, threads: int) -> Runner:
    """onnxruntime's LSTM on sentences padded to the longest."""
    session = new_session(lstm_to_onnx(lstm), threads)

    def run(sentences: Sequence[Tensor]) -> Iterable[tuple[int, Tensor]]:
        feeds = {
            "x": pad_sequence(list(sentences)).numpy(),
            "lengths": np.array([len(x) for x in sentences], dtype=np.int32),
        }
        return enumerate(torch.from_numpy(session.run(None, feeds)[0])[0].unbind())

    return run


PEERS: dict[str, tuple[Callable[[nn.LSTM, int], Runner], int, bool]] = {
    "one at a time": (one_at_a_time, 1, False),
    "padded": (padded, 16, False),
    "bucketed": (padded, 512, True),
    "packed": (packed, 512, False),
    "onnxruntime padded": (onnx_padded, 16, False),
    "onnxruntime bucketed": (onnx_padded, 512, True),
}
"""The peers by name: what a worker runs its batches with, the largest batch, and whether there are buckets."""


def lstm_to_onnx(lstm: nn.LSTM) -> bytes:
    """Return the ONNX model of a one-layer LSTM.

    Inputs ``x [steps, batch, input]`` and ``lengths [batch]`` (int32), output ``h [1, batch, hidden]``.

    ``h`` is the state after each row's own length. torch keeps its gates in the order input, forget, cell,
    output; ONNX wants input, output, forget, cell.
    """
    from onnx import TensorProto, helper, numpy_helper  # a bare machine runs the other peers without it

    def reorder(parameter: Tensor) -> Tensor:
        i, f, c, o = parameter.detach().chunk(4)
        return torch.cat([i, o, f, c])

    parameters = {name.removesuffix("_l0"): reorder(value) for name, value in lstm.named_parameters()}
    biases = torch.cat([parameters["bias_ih"], parameters["bias_hh"]])
    weights = {"W": parameters["weight_ih"], "R": parameters["weight_hh"], "B": biases}
    node = helper.make_node("LSTM", ["x", "W", "R", "B", "lengths"], ["", "h"], hidden_size=lstm.hidden_size)
    real = TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "lstm",
        inputs=[
            helper.make_tensor_value_info("x", real, ["steps", "batch", lstm.input_size]),
            helper.make_tensor_value_info("lengths", TensorProto.INT32, ["batch"]),
        ],
        outputs=[helper.make_tensor_value_info("h", real, [1, "batch", lstm.hidden_size])],
        initializer=[numpy_helper.from_array(value[None].numpy(), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    serialized: bytes = model.SerializeToString()
    return serialized


def _check_lstm(lstm: nn.LSTM) -> None:
    plain = lstm.num_layers == 1 and not lstm.bidirectional and lstm.bias and lstm.proj_size == 0
    if not plain or lstm.batch_first:
        raise ValueError(f"a peer serves one plain LSTM layer with biases, steps first; this is {lstm}")


def new_session(model: bytes, threads: int) -> Any:
    """Return an onnxruntime session that computes with ``threads`` threads, the calling one among them."""
    import onnxruntime  # a bare machine runs the other peers without it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
