"""Sending and receiving of packets with the interpreter's lock (GIL) held.

Python releases the lock around each system call. Where another thread of the process is busy in Python, the caller then
waits up to a switch interval (5 ms) until it has the lock again, for a call that takes a few microseconds and cannot
block. ``ctypes.PyDLL`` calls without releasing it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket

_libc = ctypes.PyDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    """The C type ``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Header(ctypes.Structure):
    """The C type ``struct msghdr``."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_uint32),
        ("vectors", ctypes.POINTER(_Vector)),
        ("num_vectors", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Control(ctypes.Structure):
    """The C type ``struct cmsghdr``; its data lie behind it."""

    _fields_ = (("size", ctypes.c_size_t), ("level", ctypes.c_int), ("type", ctypes.c_int))


_send = _libc.send
_send.argtypes, _send.restype = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_ssize_t
_recvmsg = _libc.recvmsg
_recvmsg.argtypes, _recvmsg.restype = (ctypes.c_int, ctypes.POINTER(_Header), ctypes.c_int), ctypes.c_ssize_t

_SEND_FLAGS = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
_RECEIVE_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_FD_BYTES = ctypes.sizeof(ctypes.c_int)


def send(fd: int, packet: bytes) -> None:
    """Send a packet to a socket. Raise OSError: BlockingIOError if the other end does not read."""
    while _send(fd, packet, len(packet), _SEND_FLAGS) < 0:
        _raise_unless_interrupted()


class Receiver:
    """A receiver of packets of at most this many bytes and descriptors; for one thread at a time."""

    def __init__(self, num_bytes: int, num_fds: int) -> None:
        self._packet = bytearray(num_bytes)
        self._control = bytearray(socket.CMSG_SPACE(num_fds * _FD_BYTES))
        self._vector = _Vector(_address_of(self._packet), num_bytes)
        self._header = _Header(vectors=ctypes.pointer(self._vector), num_vectors=1, control=_address_of(self._control))

    def receive(self, fd: int) -> tuple[bytes, list[int]] | None:
        """Return the next packet of a socket and the descriptors that came with it; None if there is none now.

        The packet is empty at the end of the connection. Raise OSError.
        """
        header = self._header
        header.control_size = len(self._control)
        while (size := _recvmsg(fd, header, _RECEIVE_FLAGS)) < 0:
            if ctypes.get_errno() == errno.EAGAIN:
                return None
            _raise_unless_interrupted()
        fds = self._fds(header.control_size) if header.control_size else []
        return bytes(memoryview(self._packet)[:size]), fds

    def _fds(self, control_size: int) -> list[int]:
        """Return the descriptors in this many bytes of control messages."""
        fds, at = list[int](), 0
        while at + ctypes.sizeof(_Control) <= control_size:
            message = _Control.from_buffer_copy(self._control, at)
            if message.level == socket.SOL_SOCKET and message.type == socket.SCM_RIGHTS:
                data = self._control[at + socket.CMSG_LEN(0) : at + message.size]
                fds += memoryview(data).cast("i").tolist()
            at += socket.CMSG_SPACE(message.size - socket.CMSG_LEN(0))
        return fds


def _address_of(memory: bytearray) -> int:
    """Return the address of memory, which must not be resized."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _raise_unless_interrupted() -> None:
    """Raise the OSError of the call that failed, unless a signal interrupted it."""
    number = ctypes.get_errno()
    if number != errno.EINTR:
        raise OSError(number, os.strerror(number))
