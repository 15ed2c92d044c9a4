"""Chat templates: what transformers renders, and nothing that a hostile one tries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cellrt.errors import RequestError
from cellrt.language import chat_template
from cellrt.language.chat_template import ChatTemplate
from tests.language import tiny
from tests.waiting import is_running, until

pytest.importorskip("jinja2")
SAID = [{"role": "user", "content": "a <b> é"}]


@contextmanager
def made(source: str) -> Iterator[ChatTemplate]:
    rendering = ChatTemplate(source, {"bos_token": "<s>"})
    try:
        yield rendering
    finally:
        rendering.close()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (tiny.TEMPLATE, "<|start|>user: a <b> é<|end|>\n<|start|>assistant:"),
        ("{{ bos_token }}{{ messages | length }}", "<s>1"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a <b> é"}'),
        ("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}", "x\n"),
        ("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}", "user"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{{ thinking }}{{ add_generation_prompt }}", "noTrue"),
    ],
)
def test_a_template_is_rendered_as_transformers_does(source: str, expected: str) -> None:
    with made(source) as rendering:
        assert rendering.render(SAID, thinking="no", messages=[], self=1) == expected


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('no systems') }}", "no systems"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError|unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError|unsafe"),
        ("{% include '/etc/passwd' %}", "TypeError|no loader"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
        ("{% for m in", "TemplateSyntaxError"),
        ("{{ 'x' * 100000000 }}", "16777216 characters|memory"),
        ("{{ ('x' * 1000000000) | length }}", "memory"),
    ],
)
def test_a_hostile_template_is_a_clear_error(source: str, said: str) -> None:
    with made(source) as rendering, pytest.raises(RequestError, match=said):
        rendering.render(SAID)


def test_a_template_that_loops_for_ever_is_stopped_and_the_next_text_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.5)
    loop = "{% if thinking %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}x"
    with made(loop) as rendering:
        with pytest.raises(RequestError, match="more than 0.5 s"):
            rendering.render(SAID, thinking=True)
        assert rendering.render(SAID) == "x"


def test_a_template_s_process_ends_with_it() -> None:
    rendering = ChatTemplate("x")
    rendering.render(SAID)
    assert rendering._process is not None
    pid = rendering._process.process.pid
    del rendering
    until(lambda: not is_running(pid), "the process has ended")


def test_what_json_cannot_hold_is_refused() -> None:
    with made("x") as rendering:
        with pytest.raises(RequestError, match="JSON"):
            rendering.render([{"role": object()}])
        assert rendering.render(SAID) == "x"
