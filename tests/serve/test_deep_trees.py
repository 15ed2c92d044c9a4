"""Trees are served as deep as the limit says; a deeper one is a 400 that names it, by every door."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cellrt.errors import DefinitionError, RequestError
from cellrt.serve.arrays import from_lists
from cellrt.serve.forms import form_of
from cellrt.serve.server_settings import MOST_DEPTH, Limits
from tests.serve.helpers import Server

websocket = pytest.importorskip("websockets.sync.client")
tritongrpc = pytest.importorskip("tritonclient.grpc")
LIMITS = Limits(max_depth=MOST_DEPTH)


def text_of(depth: int, *, is_left: bool = True) -> str:
    """A tree of ones, in JSON; ``is_left``: whether it leans to the left."""
    return "[" * depth + "1" + ",1]" * depth if is_left else "[1," * depth + "1" + "]" * depth


def told(answer: str) -> object:
    """The sum of a tree's leaves, or why there is none."""
    given = json.loads(answer)
    return given["error"] if "error" in given else given["results"]["sum"]


def ask_v1(server: Server, text: str) -> object:
    return told(server.http.post("/v1/models/tree/infer", content=f'{{"request": {text}}}').text)


def ask_generate(server: Server, text: str) -> object:
    answer = server.post("/v2/models/tree/generate", {"request": text}).json()
    return answer.get("error") or answer["sum"]


def ask_websocket(server: Server, text: str) -> object:
    with websocket.connect(f"ws://{server.address}/v1/models/tree/session", proxy=None) as sock:
        sock.send(f'{{"request": {text}}}')
        return told(sock.recv(10))


def ask_grpc(server: Server, text: str) -> object:
    given = tritongrpc.InferInput("request", [1], "BYTES")
    given.set_data_from_numpy(np.array([text], object))
    with tritongrpc.InferenceServerClient(server.grpc_address) as client:
        try:
            return client.infer("tree", [given]).as_numpy("sum").item()
        except tritongrpc.InferenceServerException as error:
            return error.message()


@pytest.mark.parametrize("ask", [ask_v1, ask_generate, ask_websocket, ask_grpc])
def test_a_tree_may_be_as_deep_as_the_limit_and_no_deeper(
    language_server: Server, ask: Callable[[Server, str], object]
) -> None:
    for depth in (489, MOST_DEPTH):
        assert ask(language_server, text_of(depth)) == depth + 1
    assert ask(language_server, text_of(MOST_DEPTH, is_left=False)) == MOST_DEPTH + 1
    for depth in (MOST_DEPTH + 1, 100_000):
        assert f"nested more than {MOST_DEPTH} deep" in str(ask(language_server, text_of(depth)))


@pytest.mark.parametrize("part", ["parameters", "inputs"])
def test_whatever_is_deep_is_refused_by_the_protocol_too(language_server: Server, part: str) -> None:
    deep = "[" * (MOST_DEPTH + 100) + "]" * (MOST_DEPTH + 100)
    one = f'{{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": {deep if part == "inputs" else "[1, 2]"}}}'
    content = f'{{"inputs": [{one}], "parameters": {{"priority": {deep if part == "parameters" else 1}}}}}'
    answer = language_server.http.post("/v2/models/chain/infer", content=content)
    assert answer.status_code == 400 and f"nested more than {MOST_DEPTH} deep" in answer.json()["error"]


@pytest.mark.parametrize("example", [1, "a", [1], [0.5], {"a": 1}, torch.zeros(2)])
def test_what_is_deep_and_expected_to_be_flat_is_refused_by_name(example: object) -> None:
    deep = json.loads(text_of(900))
    with pytest.raises(RequestError, match="^x.*: expected") as caught:
        form_of(example, LIMITS).read(deep, "x")
    assert len(str(caught.value)) < 300


def test_a_form_may_be_found_from_an_example_as_deep(depth: int = 5000) -> None:
    tree: object = 1
    for _ in range(depth):
        tree = (tree, 1)
    form_of(tree, LIMITS)


def test_no_array_has_more_dimensions_than_numpy_has() -> None:
    with pytest.raises(RequestError, match="^x: expected lists nested at most 64 deep, got 65$"):
        from_lists(json.loads("[" * 65 + "1" + "]" * 65), torch.float32, "x")
    assert from_lists(json.loads("[" * 64 + "1" + "]" * 64), torch.float32, "x").ndim == 64


def test_a_limit_beyond_what_json_is_read_to_is_refused_at_the_start() -> None:
    with pytest.raises(DefinitionError, match=f"max_depth: expected at most {MOST_DEPTH}.*, got {MOST_DEPTH + 1}"):
        Limits(max_depth=MOST_DEPTH + 1)
