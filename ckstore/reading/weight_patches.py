"""The elements of tensors that differ between two versions, by the tensors' names in the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import UsageError
from ckstore.formats.layout import Tensor
from ckstore.formats.paths import listed, path_to_text
from ckstore.reading.buffers import read_tensor
from ckstore.reading.checkout import staged
from ckstore.reading.stored_version import StoredVersion
from ckstore.storage.zstd import compress

if TYPE_CHECKING:
    import torch

#: Share of changed elements from which a patch has all of them: an index takes more bytes than most values.
_DENSE = 0.5

_LEVEL = 1

#: Name of a delta directory; engines apply deltas one by one, in the order of their numbers.
_NUMBERED = re.compile("weight_v([0-9]{6,})")

#: Key of a safetensors header that is no tensor's.
_METADATA = "__metadata__"


class WeightPatch(NamedTuple):
    """The changed elements of one tensor, as vLLM's `CheckpointWeightPatch` has them.

    Attributes
    ----------
    name
        Name of the tensor in the model.
    shape, dtype
        Of the whole tensor.
    values
        The changed elements; all elements in C order without `indices`.
    indices
        Their places in C order (int64); None for all.

    Examples
    --------
    >>> [(patch.name, patch.indices) for patch in store["gpt@200"].patches("gpt@100")]
    [('model/weight', None)]
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None


class Changed(NamedTuple):
    """A tensor with changed elements: its new ones and those of the base, as unsigned integers in C order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    after: npt.NDArray[Any]
    before: npt.NDArray[Any] | None


def changed_tensors(base: StoredVersion | None, version: StoredVersion) -> Iterator[Changed]:
    """Yield the tensors of a version that differ from the base's, without one all; those of equal objects are not read.

    Raise `UsageError` if it lacks a tensor of the base.
    """
    former, names = {} if base is None else _named(base), _named(version)
    if missing := [name for name in former if name not in names]:
        raise UsageError(f"Version {version.row.number} lacks {listed(missing)}; patches only change tensors.")
    for name, (file, tensor) in names.items():
        before = None
        if base is not None and (known := former.get(name)) is not None:
            if version.contents.identity(file, tensor) == base.contents.identity(*known):
                continue
            if (known[1].dtype, known[1].shape) == (tensor.dtype, tensor.shape):
                before = _bits(base, *known)
        after = _bits(version, file, tensor)
        if before is None or not np.array_equal(after, before):
            yield Changed(name, tensor.shape, tensor.dtype, after, before)


def _named(version: StoredVersion) -> dict[str, tuple[int, Tensor]]:
    """Return (file, tensor) by the name in its file, so that shards of a model are one."""
    found: dict[str, tuple[int, Tensor]] = {}
    for file, tensor in version.paths.values():
        name = tensor.path[0] if len(tensor.path) == 1 else path_to_text(tensor.path)
        if str(name) in found:
            raise UsageError(f"Version {version.row.number} has two tensors {name}; patches are for one model.")
        found[str(name)] = file, tensor
    return found


def _bits(version: StoredVersion, file: int, tensor: Tensor) -> npt.NDArray[Any]:
    return read_tensor(version, file, tensor, [range(size) for size in tensor.shape]).reshape(-1)


def patches(base: StoredVersion | None, version: StoredVersion) -> Iterator[WeightPatch]:
    """Yield the patches from a base to a version; see `Version.patches`."""
    import torch

    from ckstore.dtypes import torch_dtype

    for name, shape, dtype, after, before in changed_tensors(base, version):
        kind = torch_dtype(dtype)
        places = None if before is None else np.flatnonzero(after != before)
        if places is not None and places.size > _DENSE * after.size:
            places = None
        chosen = np.ascontiguousarray(after if places is None else after[places])
        carried = chosen.view("c16" if chosen.dtype.kind == "V" else f"i{chosen.itemsize}")
        values = torch.from_numpy(carried.copy()).view(kind)
        yield WeightPatch(name, shape, kind, values, None if places is None else torch.from_numpy(places))


def write_delta(base: StoredVersion, version: StoredVersion, target: Path, *, force: bool = False) -> int:
    """Write the patches as a directory that SGLang's `pull_weights` applies; return the bytes of its tensors.

    It is a Hugging Face directory: for each changed tensor a zstd frame of the number of changed bytes, their places
    (all u32) and the bytes; the metadata of the index names the versions and the encoding, that of the file has the
    BLAKE3 of each new tensor. The name of the target numbers the delta; under other names the versions are the steps.
    """
    numbers = _numbers(base, version, target)
    frames: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    for name, _, dtype, after, before in changed_tensors(base, version):
        if name == _METADATA:
            raise UsageError(f"No tensor of a safetensors file is named {name}: check the version out.")
        if before is None:
            raise UsageError(f"{name} is new or has another form; a delta only changes values: check the version out.")
        new, old = after.view(np.uint8), before.view(np.uint8)
        if new.size >> 32:
            raise UsageError(f"{name} has {new.size * ITEM_SIZES[dtype]} bytes, and a delta has places below 2^32.")
        places = np.flatnonzero(new != old).astype("<u4")
        data = np.uint32(places.size).astype("<u4").tobytes() + places.tobytes() + new[places].tobytes()
        frames[name], digests[name] = compress(data, _LEVEL), blake3(new).hexdigest()
    file = "model-00000-of-00001.safetensors"
    index = {
        "metadata": {
            "version": f"{numbers[1]:06d}", "base_version": f"{numbers[0]:06d}", "delta_encoding": "overwrite",
            "compression_format": "zstd", "checksum_format": "blake3",
        },
        "weight_map": dict.fromkeys(frames, file),
    }  # fmt: skip
    header: dict[str, Any] = {_METADATA: digests} if digests else {}
    position = 0
    for name, frame in frames.items():
        stop = position + len(frame)
        header[name] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with staged(target, force=force, directory=True, nbytes=position) as made:
        if frames:
            (made / file).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(frames.values()))
        (made / "model.safetensors.index.json").write_text(json.dumps(index))
    return position


def _numbers(base: StoredVersion, version: StoredVersion, target: Path) -> tuple[int, int]:
    """Return the numbers of the base and of the version for engines."""
    if named := _NUMBERED.fullmatch(target.name):
        number = int(named[1])
        if number == 0:
            raise UsageError(
                f"{target.name} is the checkpoint that engines start with; deltas begin at weight_v000001."
            )
        return number - 1, number
    first, second = (one.row.number if one.row.step is None else one.row.step for one in (base, version))
    return first, second
