"""What is wrong with a folder that should hold a cell: every field of it is checked before anything is served."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from cellrt.cells import EmbeddingGRUDecoder
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell, load_cell
from cellrt.errors import DefinitionError
from tests.api.models import INTEGER, leaf
from tests.effort import examples

ATTRIBUTES = ["name", "carry", "finite", "max_batch", "min_batch", "batch_sizes", "priority", "identity"]


def spoil(folder: Path, name: str, content: bytes | None) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)


def with_changes(folder: Path, **changes: object) -> None:
    description = json.loads((folder / "cell.json").read_text())
    description.update(changes)
    (folder / "cell.json").write_text(json.dumps(description))


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no description": (lambda folder: spoil(folder, "cell.json", None), "has no readable cell.json"),
    "a damaged description": (lambda folder: spoil(folder, "cell.json", b"{"), "has no readable cell.json"),
    "another description": (lambda folder: spoil(folder, "cell.json", b"[]"), "has no readable cell.json"),
    "an older description": (
        lambda folder: spoil(folder, "cell.json", b'{"version": 1}'),
        "written in format 1; this version of cellrt reads 2",
    ),
    "a newer version": (lambda folder: with_changes(folder, version=3), "format 3; this version of cellrt reads 2"),
    "an unknown dtype": (
        lambda folder: with_changes(folder, outputs={"h": {"shape": [4], "dtype": "relu", "ragged": False}}),
        "has no cell that can be loaded",
    ),
    "no program": (
        lambda folder: spoil(folder, "program.pt2", None),
        "has no cell that can be loaded: FileNotFoundError",
    ),
    "a damaged program": (
        lambda folder: spoil(folder, "program.pt2", b"PK"),
        "program.pt2 is not the file that was saved",
    ),
    "no weights": (lambda folder: spoil(folder, "weights.safetensors", None), "has no cell that can be loaded"),
    "damaged weights": (
        lambda folder: spoil(folder, "weights.safetensors", b"12345678"),
        "is not the file that was saved",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_wrong_with_a_folder(name: str, tmp_path: Path) -> None:
    damage, message = SPOILED[name]
    leaf().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(DefinitionError, match=message):
        load_cell(tmp_path)


def sign(folder: Path, description: dict[str, Any]) -> None:
    """Writes a description with the digest that belongs to it, as a program that makes such files would."""
    description.pop("digest", None)
    digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    (folder / "cell.json").write_text(json.dumps({**description, "digest": digest}))


@pytest.fixture(scope="module")
def saved_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cell that has a value of every kind in its description."""
    folder = tmp_path_factory.mktemp("decoder")
    module = EmbeddingGRUDecoder(9, 4, 8, 1)
    specs = {"token": INTEGER, "h": (8,)}
    cell(module, specs, batch_sizes=[1, 2, 4], min_batch=2, finite="h", priority=3, name="decoder").save(folder)
    return folder


SPEC = {"shape": [8], "dtype": "float32", "ragged": False}
TOKEN = {"shape": [], "dtype": "int64", "ragged": False}
WRONG_FIELDS: list[tuple[str, Any, str]] = [
    *[("max_batch", value, "batch sizes from 1 to 65536") for value in (0, -1, 4.0, "4", True, 65_537, [4])],
    ("max_batch", 8, "max_batch=8 is not the largest"),
    ("min_batch", 5, "min_batch=5 is more than the 4 rows"),
    ("min_batch", None, "batch sizes from 1 to 65536, got None"),
    ("batch_sizes", [0, 4], "batch sizes from 1 to 65536, got 0"),
    ("batch_sizes", "124", "two lists"),
    ("batch_sizes", [1, 4], "its identity is"),
    ("name", "", "expected a name"),
    ("name", 3, "expected a name"),
    ("priority", 0.5, "expected an integer as priority"),
    ("priority", 1 << 31, "expected a priority from"),
    ("inputs", {}, "has no inputs"),
    ("inputs", {"h": SPEC, "token": TOKEN}, "."),
    ("inputs", {"until": TOKEN, "h": SPEC}, "'until' cannot be the name of an input"),
    ("inputs", {"token": TOKEN, "h": {**SPEC, "shape": [-8]}}, "extents of at least 1"),
    ("inputs", {"token": TOKEN, "h": {**SPEC, "shape": [8.0]}}, "expected a shape"),
    ("inputs", {"token": TOKEN, "h": {**SPEC, "shape": [9]}}, "carry 'h'"),
    ("inputs", {"token": TOKEN, "h": {**SPEC, "dtype": "complex64"}}, "expected a dtype of .*, got 'complex64'"),
    ("inputs", {"token": TOKEN, "h": {**SPEC, "ragged": 1}}, "expected shape, dtype and ragged"),
    ("inputs", {"token": TOKEN, "h": {**SPEC, "more": 1}}, "expected shape, dtype and ragged"),
    ("inputs", [["token", TOKEN]], "."),
    ("outputs", {"token": TOKEN, "stop": {**TOKEN, "dtype": "bool"}, "_h": SPEC}, "'_h' cannot be the name of an out"),
    ("outputs", {"token": TOKEN, "h": SPEC}, "."),
    ("outputs", {}, "."),
    ("carry", {"h": "token"}, r"expected float32\[8\], got int64\[\]"),
    ("carry", {"h": ["h"]}, "inputs are"),
    ("carry", {"token": "token"}, "its identity is"),
    ("carry", None, "a dict and two lists"),
    ("finite", ["token"], "is not a floating-point output"),
    ("finite", [{}], "is not a floating-point output"),
    ("finite", "h", "a dict and two lists"),
    ("definition", "0" * 64, "its identity is"),
    ("definition", "x", "64 hexadecimal digits"),
    ("identity", "0" * 64, "its identity is"),
    ("identity", None, "its identity is"),
    ("weights", [], "weights.safetensors has"),
    ("weights", ["weight_ih"] * 6, "weights.safetensors has"),
    ("sha256", {}, "expected checksums of"),
    ("sha256", {"program.pt2": "", "../weights.safetensors": ""}, "expected checksums of"),
    ("more", 1, "expected the fields"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG_FIELDS)
def test_a_field_that_cannot_be_is_refused(
    field: str, value: Any, message: str, saved_decoder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved_decoder, tmp_path / "copy")
    sign(folder, json.loads((folder / "cell.json").read_text()) | {field: value})
    with pytest.raises(DefinitionError, match=f"has no cell that can be loaded: .*{message}"):
        load_cell(folder)


def test_a_folder_cannot_have_the_identity_of_other_weights(tmp_path: Path) -> None:
    """Not even with every checksum put right: the identity is computed of what is loaded."""
    torch.manual_seed(0)
    for name in ("one", "other"):
        cell(nn.Linear(4, 4), {"input": (4,)}).save(tmp_path / name)
    one, other = (json.loads((tmp_path / name / "cell.json").read_text()) for name in ("one", "other"))
    sign(tmp_path / "other", other | {"identity": one["identity"], "definition": one["definition"]})
    with pytest.raises(DefinitionError, match="its identity is"):
        load_cell(tmp_path / "other")


NAMES = st.sampled_from(["h", "token", "", "float32"])


def test_a_program_that_does_not_fit_the_description_is_refused(saved_decoder: Path, tmp_path: Path) -> None:
    """It runs once on zeros, whatever its checksum says."""
    folder = shutil.copytree(saved_decoder, tmp_path / "copy")
    cell(lambda token, h: {"h": h, "token": token}, {"token": INTEGER, "h": (8,)}).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "program.pt2", folder)
    description = json.loads((folder / "cell.json").read_text())
    program = hashlib.sha256((folder / "program.pt2").read_bytes()).hexdigest()
    sign(folder, description | {"sha256": description["sha256"] | {"program.pt2": program}})
    with pytest.raises(DefinitionError, match="has no cell that can be loaded"):
        load_cell(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70_000) | st.floats() | NAMES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["h", "token", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)


def change(value: Any, draw: Any) -> Any:
    """A description with one change somewhere."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value))) if isinstance(value, dict) else draw(st.integers(0, len(value) - 1))
        changed = type(value)(value)
        how = draw(st.sampled_from(["inside", "inside", "inside", "remove", "reorder"]))
        if how == "inside":
            changed[key] = change(value[key], draw)
        elif how == "remove":
            del changed[key]
        else:
            order = draw(st.permutations(list(value)))
            return {key: value[key] for key in order} if isinstance(value, dict) else order
        return changed
    return draw(JSON)


def described(made: Cell) -> dict[str, Any]:
    """All that a description says of a cell."""
    ordered = {"inputs": list(made.inputs.items()), "outputs": list(made.outputs.items())}
    return {name: getattr(made, name) for name in ATTRIBUTES} | ordered


@pytest.fixture(scope="module")
def as_saved(saved_decoder: Path) -> dict[str, Any]:
    return described(load_cell(saved_decoder))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), is_signed=st.booleans())
def test_a_changed_description_is_the_same_cell_or_none(
    data: st.DataObject, is_signed: bool, saved_decoder: Path, as_saved: dict[str, Any]
) -> None:
    """Signed anew, it may say anew only how the cell is served, within the limits."""
    description = saved_decoder / "cell.json"
    saved = description.read_bytes()
    before = dict(as_saved)
    try:
        changed = change(json.loads(saved), data.draw)
        if is_signed and isinstance(changed, dict):
            sign(saved_decoder, changed)
        else:
            description.write_text(json.dumps(changed))
        after = described(load_cell(saved_decoder))
    except DefinitionError:
        return
    finally:
        description.write_bytes(saved)
    assert 1 <= after["min_batch"] <= after["max_batch"] and after["name"]
    for key in ("name", "min_batch", "priority") if is_signed else ():
        before[key] = after[key]
    assert after == before


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_of_a_description_are_the_same_cell_or_none(
    data: st.DataObject, saved_decoder: Path, as_saved: dict[str, Any]
) -> None:
    description = saved_decoder / "cell.json"
    saved = description.read_bytes()
    at = data.draw(st.integers(0, len(saved)))
    new = data.draw(st.binary(max_size=3))
    try:
        description.write_bytes(saved[:at] + new + saved[at + data.draw(st.integers(0, 3)) :])
        after = described(load_cell(saved_decoder))
    except DefinitionError:
        return
    finally:
        description.write_bytes(saved)
    assert after == as_saved


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="has no readable cell.json"):
        load_cell(tmp_path / "nowhere")
