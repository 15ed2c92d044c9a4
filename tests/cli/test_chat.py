"""``cellrt chat``: what is typed is answered, and the model knows what was said before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cellrt.cli import app
from cellrt.language import model as models
from cellrt.language.served import served
from tests.language import tiny

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


def talk(monkeypatch: pytest.MonkeyPatch, typed: str, *options: str, **fields: Any) -> str:
    monkeypatch.setattr(models, "load_checkpoint", lambda *_: served(tiny.checkpoint(**fields)))
    result = CliRunner().invoke(app, ["chat", "some", "--max-tokens", "8", *options], input=typed)
    assert result.exit_code == 0, result.output
    return result.output


def shown(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def test_what_is_typed_is_answered_knowing_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    output = talk(monkeypatch, "hello\n\nand now\n", "--system", "be brief")
    with models.LanguageModel(served(tiny.checkpoint()), workers=1) as model:
        said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        first = model.chat(said, max_tokens=8).text
        said += [{"role": "assistant", "content": first}, {"role": "user", "content": "and now"}]
        second = model.chat(said, max_tokens=8).text
    assert output == f"{shown(first)}\n{shown(second)}\n"


def test_a_model_without_a_template_goes_on_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    output = talk(monkeypatch, "hello\n", chat_template=None)
    with models.LanguageModel(served(tiny.checkpoint()), workers=1) as model:
        told = "The checkpoint has no chat template, so the model goes on with your text.\n"
        assert output == f"{told}{shown(model.generate('hello', max_tokens=8).text)}\n"


def test_a_model_computes_in_the_dtype_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def load(path: str, name: str | None, dtype: object) -> Any:
        seen.append(dtype)
        return served(tiny.checkpoint())

    monkeypatch.setattr(models, "load_checkpoint", load)
    for options in ([], ["--dtype", "float16"], ["--dtype", "int8"]):
        assert CliRunner().invoke(app, ["chat", "some", *options], input="").exit_code == 0
    assert seen == [None, torch.float16, torch.int8]


def test_what_is_no_checkpoint_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["chat", str(tmp_path / "none")])
    assert result.exit_code == 1 and "Traceback" not in result.output
