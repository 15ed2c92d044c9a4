"""What holds for every test of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from cellrt.engine.engine import Engine
from tests.engine.helpers import SMALL


@pytest.fixture(autouse=True)
def validated_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first session on, an engine with small tables looks at all of them whenever it has nothing to do."""
    open_session = Engine.session

    def session(engine: Engine, *arguments: Any, **options: Any) -> Any:
        if len(engine._processor.tables.requests) <= SMALL.max_requests:
            engine._manager._debug = True
        return open_session(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "session", session)
