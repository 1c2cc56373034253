"""What a process of an attack gives up before it begins: root's rights to write everywhere, or room on its disk."""

from __future__ import annotations

import ctypes
import os
import resource

_VERSION, _OVERRIDES = 0x20080522, 0b110  # capset(2): CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
_ROOM = 2048


def without_rights() -> None:
    """The permissions of folders bind, of root's too."""
    if os.geteuid():
        return
    header, data = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.capget(header, data)
    for place in range(3):  # effective, permitted, inheritable; the first 32 of each
        data[place] &= ~_OVERRIDES
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")


def without_room() -> None:
    """No file grows beyond a few lines, which what is said on stderr needs."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM, _ROOM))
