"""Triton's model that takes one step of each request of a batch and asks for the next. Runs in Triton's Python."""

from __future__ import annotations

from pathlib import Path

import torch
import triton_python_backend_utils as backend
from torch import nn

from benchmarks.http_classifier import HIDDEN, Classifier

MAX_LIVE = 1024


class TritonPythonModel:
    """The class that the Python backend looks for.

    States are rows of two tensors; a request under way has one of them.
    """

    def initialize(self, arguments):
        """Read the weights that lie beside this file."""
        torch.set_num_threads(1)
        self.model = Classifier()
        self.model.load_state_dict(torch.load(Path(__file__).with_name("weights.pt")))
        self.step = nn.LSTMCell(HIDDEN, HIDDEN)
        self.step.load_state_dict({name.removesuffix("_l0"): x for name, x in self.model.lstm.state_dict().items()})
        self.h, self.c = torch.zeros(MAX_LIVE, HIDDEN), torch.zeros(MAX_LIVE, HIDDEN)
        self.free = list(range(MAX_LIVE))
        self.live = {}  # by request: its row, and the tokens to come, last first

    @torch.inference_mode()
    def execute(self, requests):
        """Take one step; requests that have ended are answered, the others are handed back to be batched again."""
        under_way = [self._under_way(request) for request in requests]
        rows = torch.tensor([row for row, _ in under_way])
        tokens = self.model.embedding(torch.tensor([left.pop() for _, left in under_way]))
        h, c = self.step(tokens, (self.h[rows], self.c[rows]))
        self.h[rows], self.c[rows] = h, c
        ended = [k for k, (_, left) in enumerate(under_way) if not left]
        answers = [None] * len(requests)
        for k, found in zip(ended, self.model(h[ended]).reshape(-1, 1, 1).numpy()):
            answers[k] = backend.InferenceResponse([backend.Tensor("class", found)])
            self.free.append(self.live.pop(requests[k].correlation_id())[0])
        for request, answer in zip(requests, answers):
            if answer is None:
                request.set_release_flags(backend.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return answers

    def _under_way(self, request):
        found = self.live.get(request.correlation_id())
        if found is None:
            tokens = backend.get_input_tensor_by_name(request, "tokens").as_numpy()[0].tolist()
            found = self.live[request.correlation_id()] = self.free.pop(), tokens[::-1]
            self.h[found[0]] = self.c[found[0]] = 0
        return found
