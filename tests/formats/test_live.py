"""State dicts in memory: described like files, and loaded by torch from the file that they would be."""

from __future__ import annotations

import cProfile
import io
import subprocess
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import CkstoreError, InputError, UsageError
from ckstore.formats.paths import path_to_text
from ckstore.formats.torch.live_state import StateDictSource, describe_state_dict
from tests.equality import assert_same
from tests.formats.reading import assert_comes_back, in_memory, split_skeleton
from tests.formats.test_torch_files import DTYPES, UNTYPED, random_bits


def loaded(value: Any, *, weights_only: bool = True) -> Any:
    source = StateDictSource(value)
    data = source.pread(0, source.size)
    assert b"".join(source.pread(at, min(7, source.size - at)) for at in range(0, source.size, 7)) == data
    layout = assert_comes_back(data)
    assert layout == source.layout
    assert split_skeleton(in_memory(data), layout) == split_skeleton(source, layout)
    assert len(source.skeleton) == source.size - sum(checked.stop - checked.start for checked in layout.checked)
    return torch.load(io.BytesIO(data), weights_only=weights_only)


def test_torch_tensors() -> None:
    flat = torch.randn(48)
    value = {
        "dtypes": [random_bits(dtype, 2, 3) for dtype in DTYPES + UNTYPED],
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "scalar": torch.tensor(1.5),
        "fortran": torch.randn(3, 4).t(),
        "tied": (flat, flat.view(6, 8), flat[5:7]),
        "state": {0: {"exp_avg": torch.zeros(2)}, 1: {"step": 3}},
    }
    assert_same(loaded(value), value)


def test_views_are_cut_down_to_their_elements() -> None:
    big = torch.randn(100_000)
    source = StateDictSource({"a": big[10:20], "b": torch.randn(300, 300)[::3, ::3]})
    assert [extent.shape for extent in source.layout.extents] == [(10,), (100, 100)]
    assert source.size < 50_000
    got = loaded({"a": big[10:20], "x": big[30:35]})
    assert torch.equal(got["a"], big[10:20])
    assert torch.equal(got["x"], big[30:35])


def test_expanded_conjugated_and_other_dtypes_of_one_memory() -> None:
    raw = torch.arange(16, dtype=torch.uint8)
    value = {
        "expanded": torch.tensor([1.0, 2.0]).view(2, 1).expand(2, 3),
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "bytes": raw,
        "words": raw.view(torch.int32),
        "same_size": [raw, raw.view(torch.int8)],
    }
    got = loaded(value)
    assert torch.equal(got["expanded"], value["expanded"])
    assert got["conj"].item() == 1 - 2j
    assert got["neg"].item() == -2
    for name in ("bytes", "words"):
        assert torch.equal(got[name], value[name])


def test_parameters_and_containers() -> None:
    model = torch.nn.Linear(2, 2)
    value = OrderedDict(model=model.state_dict(), own=model.weight, size=torch.Size([1, 2]))
    got = loaded(value)
    assert type(got) is type(got["model"]) is OrderedDict
    assert got["model"]._metadata == value["model"]._metadata
    assert torch.equal(got["model"]["weight"], model.weight)
    assert got["own"].data_ptr() == got["model"]["weight"].data_ptr()
    assert type(got["size"]) is torch.Size
    assert got["size"] == (1, 2)
    unsafe = loaded({"d": defaultdict(list), "f": frozenset({1})}, weights_only=False)
    assert type(unsafe["d"]) is defaultdict
    assert unsafe["f"] == frozenset({1})


def test_arrays() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    value = {
        "c": array,
        "again": array,
        "f": np.asfortranarray(array),
        "reversed": array[::-1],
        "big": array.astype(">f8"),
        "zero_d": np.array(3, dtype=np.int16),
        "empty": np.zeros((0, 2), np.int8),
    }
    got = loaded(value)
    for name in ("c", "again", "f", "reversed", "big", "zero_d", "empty"):
        np.testing.assert_array_equal(got[name].numpy(), value[name])
    assert got["c"].data_ptr() == got["again"].data_ptr()


def test_extents_have_the_paths_of_the_tree() -> None:
    layout = StateDictSource({"a.b": torch.ones(1), "a": {"b": torch.ones(1), 0: torch.ones(1)}}).layout
    assert [path_to_text(extent.path) for extent in layout.extents] == ["a.b", "a/b", "a/[0]"]
    assert StateDictSource(torch.ones(1)).layout.tensors[0].path == ("tensor",)


@pytest.mark.parametrize(
    "value",
    [
        deque([torch.ones(1), 2, torch.zeros(2)], maxlen=7),
        deque([(torch.ones(1), torch.zeros(2)), ("a", torch.ones(3))]),
        Namespace(a=torch.ones(1), b=[torch.zeros(2)], state=torch.ones(3)),
        Counter({"a": torch.ones(1)}),
        {None: 5, "None": torch.ones(1), 2.5: torch.zeros(2), "2.5": torch.ones(3)},
        {(1, 2): torch.ones(1), "key": torch.zeros(2), torch.float32: torch.ones(3), 1j: torch.ones(4)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_have_the_order_and_paths_of_the_file(value: Any) -> None:
    source = StateDictSource({"x": value, "y": torch.ones(4)})
    layout = assert_comes_back(source.pread(0, source.size))
    assert (layout.tensors, layout.extents) == (source.layout.tensors, source.layout.extents)


def test_facts() -> None:
    assert StateDictSource({"epoch": 2, "step": 3}).layout.facts == {"step": 3, "epoch": 2}

    assert StateDictSource({"step": np.int32(3), "epoch": np.float32(2)}).layout.facts == {"step": 3, "epoch": 2}


class Text(str):
    __slots__ = ()


def attributes(value: Any) -> Any:
    made = OrderedDict(a=1)
    made.extra = value  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, object()]}, r"builtins\.object at a/\[1\]"),
        ({"a": torch.nn.Linear(1, 1)}, "Linear at a"),
        (object(), "at its top"),
        ({"a": Counter({object(): 1})}, "key of type object at a"),
        ({"a": Text("x")}, "Text at a"),
        ({"a": Text}, "class .*Text at a"),
        ({"a": defaultdict(lambda: 1)}, "defaultdict at a calls"),
        ({"a": {"b": deque([1, Namespace(c=Text("x"))])}}, r"Text at a/b/\[1\]/c"),
        ({"a": {object(): 1}}, "key of type object at a"),
        ({2**62: 1}, "key of type int"),
        ({"a": torch.eye(2).to_mkldnn()}, "tensor at a"),
        ({"a": torch.ones(1, device="meta")}, "meta device"),
        ({"a": np.array([None])}, "array at a"),
        ({"a": np.ma.array([1.0])}, "array at a"),
        ({"a": np.dtype(object)}, "ObjectDType at a"),
        ({"a": attributes(torch.ones(1))}, "attributes of the dictionary at a hold tensors"),
        ({"a": 2**3000}, "integer at a"),
    ],
)
def test_unsupported_values_are_named(value: Any, place: str) -> None:
    with pytest.raises(UsageError, match=place):
        describe_state_dict(value)


def test_cycles_end() -> None:
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    with pytest.raises(UsageError, match="holds itself or nests too deeply at self"):
        describe_state_dict(cycle)


def test_reading_follows_the_memory() -> None:
    tensor = torch.zeros(3)
    state = describe_state_dict({"a": tensor})
    tensor += 1
    assert bytes(state.view(0, 0, 12)) == torch.ones(3).numpy().tobytes()


def test_formats_import_neither_torch_nor_kernels_nor_zarr() -> None:
    code = (
        "import sys, ckstore.formats, ckstore.formats.torch.live_state, ckstore.formats.flat_writers; "
        "assert not {'torch', 'ckstore.kernels', 'zarr', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("nbytes", [0, 400])
def test_tensors_whose_memory_was_freed_are_named(nbytes: int) -> None:
    freed = torch.arange(1000.0)[10:]
    freed.untyped_storage().resize_(nbytes)
    state = {"model": {"kept": torch.ones(3), "freed": freed}}
    with pytest.raises(UsageError, match=rf"model/freed has {nbytes} of its 4,000 bytes: its memory was freed or cut"):
        StateDictSource(state)
    freed.untyped_storage().resize_(4000)  # As FSDP does to gather them again.


def test_storages_can_be_resized_after_they_were_read(tmp_path: Path) -> None:
    """As FSDP does in each step."""
    values = torch.arange(3000.0)
    state: dict[str, torch.Tensor] = {
        "small": torch.ones(3), "large": torch.ones(3000), "half": torch.ones(70).bfloat16(), "none": torch.ones(0),
        "parameter": torch.nn.Parameter(torch.ones(40)), "tied": values, "part": values[9:],
        "turned": torch.ones(30, 40).T, "gaps": torch.ones(300, 20)[:, ::2], "flags": torch.ones(80) > 0,
        "negative": torch._neg_view(torch.ones(50)),
        "conjugated": torch.ones(50, dtype=torch.complex64).conj(), "scalar": torch.tensor(1.0),
    }  # fmt: skip
    with ckstore.init(tmp_path / "store") as store, store.saver(run="saved") as saver:
        store.ingest(state, run="live")
        saver.save(state, step=0)
        assert store["live"].compare(state)
    for tensor in state.values():
        tensor.detach().untyped_storage().resize_(0)


@pytest.mark.parametrize("how", ["freed", "replaced"])
@pytest.mark.parametrize("elements", [1, 3, 16, 17, 5000])
@pytest.mark.parametrize("kind", ["alone", "part", "gaps"])
def test_memory_that_was_freed_is_not_read(kind: str, elements: int, how: str) -> None:
    values = torch.ones(2, 2 * elements)
    tensor = {"alone": values, "part": values[1], "gaps": values[:, ::2]}[kind]
    state = describe_state_dict({"a": tensor, "b": torch.ones(2)})
    if how == "freed":
        values.untyped_storage().resize_(0)
    else:
        tensor.data = torch.zeros(1)
    if (kind, how) == ("gaps", "replaced"):  # A tensor with gaps is detached, and holds its memory.
        assert bytes(state.view(0, 0, 4)) == np.ones(1, np.float32).tobytes()
        return
    for read in (
        state.check_unchanged,
        lambda: state.view(0, 0, 4),
        lambda: state.memories[0].copy_into(np.empty(4 * tensor.numel(), np.uint8)),
    ):
        with pytest.raises(InputError, match=r"ensor.* changed while it was read"):
            read()


class _Frees:
    """An object that frees a tensor's memory when it is pickled, or adds a key to its dictionary."""

    def __init__(self, does: Any) -> None:
        self.does = does

    def __reduce__(self) -> Any:
        self.does()
        return int, ()


def test_objects_that_change_the_state_while_it_is_described() -> None:
    tensor = torch.ones(5000)
    state: dict[str, Any] = {"a": tensor, "b": _Frees(lambda: tensor.untyped_storage().resize_(0))}
    with pytest.raises(InputError, match="The tensor at a changed while it was read"):
        describe_state_dict(state, "pickle")
    state = {"a": torch.ones(3), "b": _Frees(lambda: state.update(c=1)), "d": 4}
    assert list(describe_state_dict(state, "pickle").tree) == ["a", "b", "d"]


def test_equal_states_have_equal_bytes() -> None:
    """However their tensors are described, and whichever sizes are one object."""
    shape = (2, 3)
    plain = {"a": torch.ones(shape), "b": torch.zeros(shape), "c": torch.ones(1), "d": torch.ones(70, 1), "e": 1}
    with torch.inference_mode():
        other = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in plain.items()}
    assert other["a"].is_inference()
    sources = [StateDictSource(plain), StateDictSource(other)]
    assert len({source.pread(0, source.size) for source in sources}) == 1


@pytest.mark.parametrize("tensor", [torch.ones([1] * 65), torch.ones([1] * 64 + [99]), torch.ones([1] * 64 + [9])])
def test_tensors_of_too_many_axes_are_named(tensor: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="The tensor at a/b has 65 axes, which cannot be stored"):
        StateDictSource({"a": {"b": tensor}})
    assert loaded({"b": tensor[0]})["b"].shape == tensor.shape[1:]


@pytest.mark.parametrize(
    "expanded",
    [
        torch.ones(1).expand(1 << 40), torch.ones(1).expand(1 << 62),
        torch.arange(8.0).reshape(8, 1).expand(8, 1 << 38),
        torch.arange(8.0).as_strided((1 << 20, 4, 1 << 20), (0, 1, 0)), torch.arange(9.0).as_strided((5, 5), (1, 1)),
    ],
    ids=lambda tensor: str(tuple(tensor.shape)),
)  # fmt: skip
def test_expanded_tensors_take_what_they_were_expanded_from(expanded: torch.Tensor) -> None:
    got = loaded({"x": expanded})["x"]
    assert (got.shape, got.stride()) == (expanded.shape, expanded.stride())
    corner = tuple(slice(4) for _ in expanded.shape)
    assert torch.equal(got[corner], expanded[corner])
    assert StateDictSource({"x": expanded}).size < 3000


def test_a_broadcast_array_that_does_not_fit_is_told() -> None:
    array = np.broadcast_to(np.float32(1), (1 << 60,))
    with pytest.raises(CkstoreError, match=r"takes 4,611,686,018,427,387,904 bytes in one piece, more than fit"):
        StateDictSource({"x": array}).pread(1 << 40, 8)


def test_views_of_several_item_sizes_make_one_extent_for_each_size() -> None:
    base = torch.randn(1000)
    value = {str(number): (base, base.view(torch.int16))[number % 2] for number in range(40)}
    source = StateDictSource(value)
    assert sorted(extent.nbytes for extent in source.layout.extents) == [4000, 4000]
    got = loaded(value)
    assert all(torch.equal(got[name], tensor) for name, tensor in value.items())
    assert len({tensor.data_ptr() for tensor in got.values()}) == 2


def test_many_views_of_one_storage_take_as_long_as_there_are_views() -> None:
    """Counted in calls of functions, which no other load of the machine changes."""

    def calls(count: int) -> int:
        base = torch.randn(5000)
        profile = cProfile.Profile()
        profile.runcall(StateDictSource, {f"v{number}": base[number : number + 10] for number in range(count)})
        return sum(entry.callcount for entry in profile.getstats())

    few, many = calls(500), calls(4000)
    assert many < 8.5 * few
