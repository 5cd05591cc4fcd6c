"""State dicts in memory as what an ingest reads: the file that they would be, without writing it."""

from __future__ import annotations

from typing import Any

from ckstore.formats.torch.state_dict import StateDictSource
from ckstore.scanning.scanned import ScannedFile, ScannedVersion

#: Name of the file that a state dict becomes.
FILE_NAME = "state_dict.pt"


class LiveSource(StateDictSource):
    """A state dict that an ingest reads like an open file; what changes between two reads, digests find out."""

    def close(self) -> None:
        """Nothing is open: the tensors are the caller's."""


def scan_state_dict(state_dict: Any) -> ScannedVersion:
    """Describe a state dict as a version of one torch file.

    Parameters
    ----------
    state_dict
        Nested dictionaries, lists, tuples and sets of torch tensors (on any device), NumPy arrays and plain values.
        Keys keep their types; tensors that share memory stay tied.

    Raises
    ------
    UsageError
        It holds anything else; names the place.
    """
    source = LiveSource(state_dict)
    return ScannedVersion([ScannedFile(FILE_NAME, source, source.layout)])
