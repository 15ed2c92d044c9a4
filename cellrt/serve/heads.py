"""HTTP as uvicorn has it with httptools, but for heads without end: their parser would keep all that comes."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 1 << 20
"""Of a request's line and headers together; what a read brings behind them is counted too."""


class HttpProtocol(HttpToolsProtocol):
    """One connection; closed when a request's head is longer than ``MOST_HEAD_BYTES``."""

    _is_in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Takes in what came."""
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.send_400_response(f"At most {MOST_HEAD_BYTES} bytes of headers are taken.")
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The head is all there."""
        self._is_in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is all there: what comes next is another request's head."""
        self._is_in_head = True
        super().on_message_complete()
