"""Reading CoNLL-U."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.errors import RequestError
from cellrt.unfolders.conllu import parse_conllu

SENTENCE = """# sent_id = 1
# text = Vámonos al mar
1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tVamos\tir\tVERB\t_\tMood=Imp\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\tCase=Acc\t1\tobj\t_\t_
3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_
3\ta\ta\tADP\t_\t_\t5\tcase\t_\t_
4\tel\tel\tDET\t_\t_\t5\tdet\t_\t_
4.1\tancho\t_\tADJ\t_\t_\t_\t_\t5:amod\t_
5\tmar\tmar\tNOUN\t_\t_\t1\tobl\t_\t_

"""


def line(number: object, head: object, form: str = "a") -> str:
    return f"{number}\t{form}\t_\t_\t_\t_\t{head}\tdep\t_\t_\n"


@pytest.mark.parametrize("text", [SENTENCE, SENTENCE.strip(), SENTENCE.replace("\n", "\r\n"), "\n" + SENTENCE + "\n"])
def test_words_and_heads_are_read_and_the_rest_is_not(text):
    sentence = parse_conllu(text)
    assert sentence.forms == ["Vamos", "nos", "a", "el", "mar"]
    assert sentence.heads == [0, 1, 5, 5, 1]
    assert sentence.relations == ["root", "obj", "case", "det", "obl"]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(0, 29))
def test_what_is_written_is_read(heads, root):
    heads = [min(head, len(heads)) for head in heads]
    heads[root % len(heads)] = 0
    sentence = parse_conllu("".join(line(k, head, f"w{k} x") for k, head in enumerate(heads, 1)))
    assert sentence.heads == heads
    assert sentence.forms == [f"w{k} x" for k in range(1, len(heads) + 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a sentence with at least one word, found none"),
        ("# text = none\n", "expected a sentence with at least one word, found none"),
        (line(1, 0) + "2 a\n", "line 2: expected 10 columns between tabs, found 1"),
        (line(1, 0) + line(3, 1), "line 2, column ID: expected 2, found '3'"),
        (line("one", 0), "line 1, column ID: expected 1, found 'one'"),
        (line(1, 0, ""), "line 1, column FORM: expected a word, found ''"),
        (line(1, "_"), "line 1, column HEAD: expected the number of a word, or 0, found '_'"),
        (line(1, -1), "line 1, column HEAD: expected the number of a word, or 0, found '-1'"),
        ("# a\n" + line(1, 0) + line(2, 3), "line 3, column HEAD: expected a number from 0 to 2, found '3'"),
        (line(1, 2) + line(2, 1), "line 2: expected a word with HEAD 0 by the end of the sentence, found none"),
        (line(1, 0) + line(2, 0), "line 2, column HEAD: expected one root, which is on line 1, found '0'"),
        (line(1, 0) + "\n" + line(1, 0, "b"), "line 3: expected the end after one sentence, found '1\\tb"),
    ],
)
def test_a_mistake_is_named_with_line_and_column(text, message):
    with pytest.raises(RequestError) as raised:
        parse_conllu(text)
    assert str(raised.value).startswith(message)


def test_only_text_is_read():
    with pytest.raises(RequestError, match="expected a string of CoNLL-U, got list"):
        parse_conllu([])
