"""Where an engine's process listens: a name without a file, which is gone with it, or a socket's path."""

from __future__ import annotations

import os
import socket
import stat
import struct
import uuid
from contextlib import suppress

from cellrt.errors import DefinitionError, DeviceError

BACKLOG = 64
CREDENTIALS = struct.Struct("3i")


def new_address() -> str:
    """An address that nobody has: ``@`` and a name of Linux's abstract sockets."""
    return f"@cellrt-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def check_address(given: object) -> str:
    """Raises DefinitionError unless it is an address."""
    if isinstance(given, str) and len(given) > 1 and len(os.fsencode(given)) < 108 and "\0" not in given:
        return given
    raise DefinitionError(f"address: expected '@name' or a path of less than 108 bytes, got {given!r:.200}")


def listen(address: str) -> socket.socket:
    """A socket that listens there; of a file left by an engine that is gone it takes the place.

    Raises DefinitionError if another listens there, or the path cannot be used.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if not address.startswith("@"):
            _remove_stale(address)
        sock.bind(_name(address))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise DefinitionError(f"address {address!r}: {error}") from None
    sock.setblocking(False)
    return sock


def connect(address: str, timeout: float) -> socket.socket:
    """A connection to what listens there. Raises DeviceError if nothing does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout)
    try:
        sock.connect(_name(address))
    except OSError as error:
        sock.close()
        raise DeviceError(f"no engine's process takes clients at {address!r}: {error}") from None
    return sock


def is_ours(sock: socket.socket) -> bool:
    """Whether the process at the other end is of this one's user, or of root."""
    given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(given)[1] in (os.getuid(), 0)


def forget(address: str) -> None:
    """Removes a socket's file, if it has one."""
    if not address.startswith("@"):
        with suppress(OSError):
            os.unlink(address)


def _name(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _remove_stale(path: str) -> None:
    """Removes the file of a socket that nobody listens at."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)
