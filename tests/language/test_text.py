"""Text of tokens that come one by one: whole characters, and all of them; stop strings wherever tokens end."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cellrt.errors import DefinitionError, RequestError
from cellrt.language.language import Language
from cellrt.language.stop import MOST_STOPS, StopStrings
from cellrt.language.text import LONG, MOST_HELD, REPLACEMENT, Detokenizer, Tokenizer
from tests.language import tiny

pytest.importorskip("tokenizers")
TOKENS = st.lists(st.integers(0, tiny.vocabulary() + 9), max_size=60)
"""A model may have more tokens than its tokenizer knows."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.tokenizer_json())


def tokens_of(tokenizer: Tokenizer, content: bytes) -> list[int]:
    """The tokens of single bytes."""
    return [tokenizer._tokenizer.token_to_id(letter_of(value)) for value in content]


def letter_of(value: int) -> str:
    """A byte as byte-level tokenizers write it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(value) if value in printable else chr(256 + [n for n in range(256) if n not in printable].index(value))


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.end()]


@given(tokens=TOKENS)
@example(tokens=[226] * 100)
def test_pieces_are_the_whole_text(tokenizer: Tokenizer, tokens: list[int]) -> None:
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("values", [b"\xef\xbf\xbd", b"\xf0\x9f\x98\x80", b"\xe2", b"\xe2\x82", b"\xf0\x9f\x98\xe2a"])
def test_bytes_that_are_held_for_long_are_the_whole_text(tokenizer: Tokenizer, values: bytes) -> None:
    tokens = tokens_of(tokenizer, values * MOST_HELD)
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@given(text=st.text(max_size=40))
def test_no_piece_of_a_text_has_a_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    made = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(made) == text
    assert not any(REPLACEMENT in piece for piece in made) or REPLACEMENT in text


def test_one_text_is_one_stop_string_and_not_its_letters() -> None:
    stops = StopStrings("end")
    assert stops.feed("a deed, the end of it") == "a deed, the "
    assert stops.is_stopped


def test_a_tokenizer_that_gives_up_fails_its_text_alone() -> None:
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Made

    made = Made(models.BPE({"a": 0, "b": 1}, []))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer = Tokenizer(made.to_str().encode())
    with pytest.raises(RequestError, match="text: the tokenizer gives up: .*retry-limit"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("aab") == [0, 0, 1]
    unknown = Tokenizer(Made(models.WordLevel({"a": 0}, unk_token="?")).to_str().encode())
    with pytest.raises(RequestError, match="text: the tokenizer gives up: .*WordLevel"):
        unknown.encode("b")


def test_a_text_that_no_context_holds_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    language = Language("m", "decoder", tiny.vocabulary(), 20_000, tokenizer_json=tiny.tokenizer_json())
    most = 20_000 * language.tokenizer.longest
    assert LONG < most < 1 << 21
    assert len(language.tokens_of("a" * most)) == most
    monkeypatch.setattr(Tokenizer, "encode", None)
    with pytest.raises(RequestError, match=f"prompt: {most + 1} characters; a context of 20000 tokens takes {most}"):
        language.tokens_of("a" * (most + 1))
    with pytest.raises(RequestError, match="prompt: 20001 tokens; model 'm' has a context of 20000"):
        language.tokens_of([object()] * 20_001)  # type: ignore[list-item]


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b", "é\ud83d"])
def test_half_of_a_surrogate_pair_is_no_text(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="text: expected whole characters, got"):
        tokenizer.encode(text)


def test_a_character_of_several_tokens_comes_with_the_last(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, "€a".encode())
    assert pieces(tokenizer, tokens) == ["", "", "€", "a", ""]


def test_a_part_of_a_character_has_a_name_of_its_own(tokenizer: Tokenizer) -> None:
    names = [tokenizer.name_of(token) for token in tokens_of(tokenizer, "€a".encode())]
    assert len(set(names)) == 4 and names[3] == ("a", True) and not any(is_text for _, is_text in names[:3])
    assert tokenizer.name_of(9999) == ("token_id:9999", False)


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    made = pieces(tokenizer, tokenizer.encode("<|start|>hello<|end|>"))
    assert "".join(made) == "hello"


def test_spaces_between_words_stay_where_a_decoder_writes_them() -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    library = Library(models.WordLevel({"▁good": 0, "▁day": 1, ".": 2}, unk_token="."))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made = pieces(Tokenizer(library.to_str().encode()), [0, 1, 2, 1])
    assert made[:4] == ["good", " day", ".", " day"]


def test_what_is_no_tokenizer_is_a_clear_error() -> None:
    with pytest.raises(DefinitionError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(b"{}")


def test_a_tokenizer_that_would_cut_texts_does_not() -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_buffer(tiny.tokenizer_json())
    library.enable_truncation(3)
    library.enable_padding(length=8)
    assert len(Tokenizer(library.to_str().encode()).encode("good day")) == 8


def expected(text: str, stops: list[str]) -> str:
    """A plain reference: the first character with which a stop string is complete decides."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


FEW = st.text("ab", max_size=4)


@given(parts=st.lists(FEW, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_a_text_is_cut_where_a_stop_string_is_first_complete(parts: list[str], stops: list[str]) -> None:
    cutter = StopStrings(stops)
    shown = "".join(map(cutter.feed, parts)) + cutter.end()
    text = "".join(parts)
    assert shown == expected(text, stops)
    assert cutter.is_stopped == any(stop in text for stop in stops)


@given(parts=st.lists(FEW, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_only_what_may_begin_a_stop_string_is_held_back(parts: list[str], stops: list[str]) -> None:
    cutter, shown, text = StopStrings(stops), "", ""
    for part in parts:
        shown, text = shown + cutter.feed(part), text + part
        if cutter.is_stopped:
            break
        held = text[len(shown) :]
        begins = [text[place:] for place in range(len(text)) if any(stop.startswith(text[place:]) for stop in stops)]
        assert held == max(begins, key=len, default="")


@pytest.mark.parametrize("stops", [[""], ["a"] * (MOST_STOPS + 1), ["a" * 1000], [3]])
def test_what_is_no_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError, match="stop: expected"):
        StopStrings(stops)
