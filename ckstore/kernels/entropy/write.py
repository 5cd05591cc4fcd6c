"""Write symbols and raw bits into four streams, which items use in turn: `write.c`."""

from __future__ import annotations

from ckstore.kernels.native import Array, check, function

_write_streams = function("write_streams", "pippi")


def write_streams(directory: int, number: int, encoder: int, buffer: Array, room: int) -> None:
    """Write the groups that have symbols, stream j into `buffer` (uint8) from byte j * room on.

    `directory` and `encoder` are addresses; `ends` of the directory is filled.
    """
    check(_write_streams(directory, number, encoder, id(buffer), room))
