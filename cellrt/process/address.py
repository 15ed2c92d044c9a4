"""Addresses of engines' processes: an abstract socket name, which ends with its process, or a socket's path."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
import uuid
from contextlib import suppress

from cellrt.errors import DefinitionError, DeviceError

BACKLOG = 4096
RETRY_EVERY_S = 0.01
"""The seconds between two tries to connect to a full backlog."""
CREDENTIALS = struct.Struct("3i")


def new_address() -> str:
    """Return an unused address: ``@`` and a name of Linux's abstract sockets."""
    return f"@cellrt-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def check_address(given: object) -> str:
    """Return an address. Raise DefinitionError for an invalid one."""
    if isinstance(given, str) and len(given) > 1 and len(os.fsencode(given)) < 108 and "\0" not in given:
        return given
    raise DefinitionError(f"address: expected '@name' or a path of less than 108 bytes, got {given!r:.200}")


class Listener(socket.socket):
    """A socket that clients connect to. Its file, if it has one, is removed when it is closed."""

    _file: tuple[str, tuple[int, int]] | None = None

    def listen_at(self, address: str) -> None:
        """Bind the socket to an address. Raise OSError."""
        self.bind(_name(address))
        if not address.startswith("@"):
            self._file = address, _identity(address)
        self.listen(BACKLOG)

    def close(self) -> None:
        """Remove the file, unless it is a successor's, and close the socket.

        The file goes first, as no other process can take the address while this one listens.
        """
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None and _identity(file[0]) == file[1]:
                os.unlink(file[0])
        super().close()


def listen(address: str) -> Listener:
    """Return a socket that listens at an address, and replace a file left by an engine that is gone.

    Raise DefinitionError if another process listens there, or the path cannot be used.
    """
    sock = Listener(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if not address.startswith("@"):
            _remove_stale(address)
        sock.listen_at(address)
    except OSError as error:
        sock.close()
        raise DefinitionError(f"address {address!r}: {error}") from None
    sock.setblocking(False)
    return sock


def connect(address: str, timeout: float) -> socket.socket:
    """Return a connection to an address.

    Raise DeviceError if no process listens, or has no room for this many seconds.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end_s = time.monotonic() + timeout
    try:
        sock.settimeout(timeout)
        while True:
            try:
                sock.connect(_name(address))
                break
            except BlockingIOError:  # as many as the backlog holds have not been taken in
                if time.monotonic() >= end_s:
                    raise
                time.sleep(RETRY_EVERY_S)
    except OSError as error:
        sock.close()
        raise DeviceError(f"no engine's process takes clients at {address!r}: {error}") from None
    return sock


def is_ours(sock: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this one's user, or to root."""
    given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(given)[1] in (os.getuid(), 0)


def _name(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _remove_stale(path: str) -> None:
    """Remove the file of a socket at which no process listens."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)
