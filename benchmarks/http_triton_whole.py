"""Triton's model that takes whole requests: a batch of any lengths is padded and packed. Runs in Triton's Python."""

from __future__ import annotations

from pathlib import Path

import torch
import triton_python_backend_utils as backend

from benchmarks.http_classifier import Classifier


class TritonPythonModel:
    """The class that the Python backend looks for."""

    def initialize(self, arguments):
        """Read the weights that lie beside this file."""
        torch.set_num_threads(1)
        self.model = Classifier()
        self.model.load_state_dict(torch.load(Path(__file__).with_name("weights.pt")))

    def execute(self, requests):
        """Return the answers of a batch; tokens are int64 ``[1, steps]`` in each request, classes int64 ``[1, 1]``."""
        tokens = [backend.get_input_tensor_by_name(request, "tokens").as_numpy()[0] for request in requests]
        classes = torch.tensor(self.model.classes(tokens)).reshape(-1, 1, 1).numpy()
        return [backend.InferenceResponse([backend.Tensor("class", found)]) for found in classes]
