"""State dicts in memory as inputs of an ingest: the files that they would be, without writing them."""

from __future__ import annotations

from typing import Any

from ckstore.formats.torch.state_dict import OnUnknown, StateDictSource
from ckstore.scanning.scanned import ScannedFile, ScannedVersion

#: Name of the file of a state dict.
FILE_NAME = "state_dict.pt"


class LiveSource(StateDictSource):
    """A state dict that an ingest reads like an open file; digests detect changes between two reads."""

    def close(self) -> None:
        """Do nothing: the tensors are the caller's."""


def scan_state_dict(state_dict: Any, on_unknown: OnUnknown = "raise") -> ScannedVersion:
    """Describe a state dict as a version of one torch file.

    Parameters
    ----------
    state_dict
        Nested dictionaries, lists, tuples and sets of torch tensors (on any device), NumPy arrays, plain values and
        objects of well-known types. Keys keep their types; tensors that share memory stay tied.
    on_unknown
        `pickle` keeps any other object as the bytes of its pickle.

    Raises
    ------
    UsageError
        It holds anything else; names the place.
    """
    source = LiveSource(state_dict, on_unknown)
    return ScannedVersion([ScannedFile(FILE_NAME, source, source.layout)])
