"""Triton as a peer: the repository written for it, its models' answers, and the real server where it is installed."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import http_triton
from benchmarks.http_classifier import Classifier
from benchmarks.http_server import serving
from benchmarks.serve import check, requests_of

WAYS = ("whole", "steps")
BACKEND = "triton_python_backend_utils"


@pytest.fixture(params=WAYS)
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    http_triton.write_repository(tmp_path, request.param)
    return tmp_path


def test_a_configuration_is_one_that_triton_reads_and_names_what_requests_name(repository: Path) -> None:
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    text_format = pytest.importorskip("google.protobuf.text_format")
    (folder,) = repository.iterdir()
    found = text_format.Parse((folder / "config.pbtxt").read_text(), messages.ModelConfig())
    server = http_triton.server("whole")
    (sent,) = server.body([1, 2, 3])["inputs"]  # type: ignore[index]
    (declared,) = found.input
    assert found.name == folder.name == server.path.split("/")[3]
    assert (declared.name, messages.DataType.Name(declared.data_type)) == (sent["name"], f"TYPE_{sent['datatype']}")
    assert declared.allow_ragged_batch
    assert found.WhichOneof("scheduling_choice") in ("dynamic_batching", "sequence_batching")


def test_a_repository_has_the_references_weights_and_a_model(repository: Path) -> None:
    version = repository / http_triton.MODEL / "1"
    found, expected = torch.load(version / "weights.pt"), Classifier().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    classes = [
        node.name for node in ast.parse((version / "model.py").read_text()).body if isinstance(node, ast.ClassDef)
    ]
    assert classes == ["TritonPythonModel"]


class Request:
    """One request as Triton's Python backend hands it in."""

    def __init__(self, number: int, tokens: list[int]) -> None:
        self.number, self.tokens = number, np.array([tokens], np.int64)
        self.is_to_come_again = False

    def correlation_id(self) -> int:
        return self.number

    def set_release_flags(self, flags: int) -> None:
        self.is_to_come_again = True


@pytest.fixture
def model(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The model of a repository, with the few names of the backend that it uses."""
    backend = ModuleType(BACKEND)
    backend.get_input_tensor_by_name = lambda request, name: SimpleNamespace(as_numpy=lambda: request.tokens)  # type: ignore[attr-defined]
    backend.Tensor = lambda name, array: (name, array)  # type: ignore[attr-defined]
    backend.InferenceResponse = lambda tensors: dict(tensors)  # type: ignore[attr-defined]
    backend.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, BACKEND, backend)
    specification = importlib.util.spec_from_file_location("model", repository / http_triton.MODEL / "1" / "model.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    found = module.TritonPythonModel()
    found.initialize({})
    yield found


def test_a_model_answers_as_torch_does_while_requests_come_and_go(model: Any) -> None:
    tokens = requests_of(30)[:12]
    waiting = [Request(number, each) for number, each in enumerate(tokens)]
    found: dict[int, int] = {}
    batch: list[Request] = []
    for _ in range(200):
        batch += [waiting.pop(0)] if waiting else []
        if not batch:
            break
        for request, answer in zip(batch, model.execute(batch)):
            assert (answer is None) == request.is_to_come_again
            if answer is not None:
                assert answer["class"].shape == (1, 1)
                found[request.number] = answer["class"].item()
        batch = [request for request in batch if request.is_to_come_again]
        for request in batch:
            request.is_to_come_again = False
    assert [found[number] for number in range(12)] == Classifier().classes(tokens)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(http_triton.VARIABLE, raising=False)
    assert "names no virtual environment" in str(http_triton.missing())
    monkeypatch.setenv(http_triton.VARIABLE, str(tmp_path))
    assert f"{tmp_path} is no virtual environment" in str(http_triton.missing())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert "there is no" in str(http_triton.missing())
    assert "tritonserver" in str(http_triton.missing())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(http_triton.missing() is not None, reason=str(http_triton.missing()))
@pytest.mark.parametrize("way", WAYS)
def test_the_real_server_answers_as_torch_does_and_leaves_nothing(way: str) -> None:
    before = set(http_triton.SHARED_MEMORY.glob("cellrt_triton_*"))
    server = http_triton.server(way)
    with serving(server) as address:
        check(way, server, address, requests_of(100)[:64])
        assert server.counts is not None
        tasks, rows = server.counts(address)
        assert rows > tasks > 0
        assert set(http_triton.SHARED_MEMORY.glob("cellrt_triton_*")) > before
    assert set(http_triton.SHARED_MEMORY.glob("cellrt_triton_*")) == before
    with pytest.raises(OSError):
        server.counts(address)
