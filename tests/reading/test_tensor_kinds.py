"""Sparse, nested and quantised tensors, and tensors around others, come back as they were; lies about them do not."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.errors import UsageError
from ckstore.formats.layout import Unknown
from ckstore.policy import Policy, Retention

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|nested|quantized|Nested).*"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Mode(enum.Enum):
    """A setting of a tensor."""

    ROWS = 1


@dataclasses.dataclass
class Setting:
    """Settings of a tensor."""

    eps: float
    mode: Mode


class Scaled(torch.Tensor):
    """Integers and their scale, as quantisation libraries have it."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, mode: Mode) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, mode: Mode) -> None:
        self.codes, self.scale, self.mode = codes, scale, mode

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.mode

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


def scaled() -> Scaled:
    return Scaled(torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.tensor([0.5, 2.0]), Mode.ROWS)


DENSE = torch.tensor([[0.0, 1.5, 0.0, 0.0], [0.0] * 4, [2.0, 0.0, 0.0, -3.0], [0.0, 0.0, 0.5, 0.0]])
NESTED = [torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(4, 3)]
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "coo": DENSE.to_sparse,
    "coo with repeated indices": lambda: torch.sparse_coo_tensor([[1, 0, 1]], [1.0, 2.0, 3.0], (2,)),
    "hybrid coo": lambda: DENSE.to_sparse(1),
    "csr": DENSE.to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((2, 2)),
    "empty coo": lambda: torch.zeros(2, 3).to_sparse(),
    "parameter of coo": lambda: torch.nn.Parameter(DENSE.to_sparse()),
    "nested": lambda: torch.nested.nested_tensor(NESTED),
    "jagged": lambda: torch.nested.nested_tensor(NESTED, layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(DENSE, 0.1, 3, torch.quint8),
    "quantised to 32 bits": lambda: torch.quantize_per_tensor(DENSE.T, 0.1, 0, torch.qint32),
    "quantised by rows": lambda: torch.quantize_per_channel(
        DENSE, torch.rand(4, dtype=torch.float64), torch.arange(4), 0, torch.qint8
    ),
    "quantised by rows with zeros between integers": lambda: torch.quantize_per_channel(
        DENSE, torch.rand(4), torch.rand(4), 0, torch.quint8
    ),
}


def parts_of(tensor: torch.Tensor) -> list[Any]:
    """Return all that makes a tensor, as plain values."""
    head: list[Any] = [type(tensor), tensor.layout, tensor.dtype, tensor.requires_grad]
    if tensor.is_nested:
        return [*head, *(part.tolist() for part in tensor.detach().unbind())]
    if tensor.is_quantized:
        by_rows = tensor.qscheme() != torch.per_tensor_affine
        scales = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()) if by_rows else ()
        place = tensor.q_per_channel_axis() if by_rows else (tensor.q_scale(), tensor.q_zero_point())
        return [
            *head,
            place,
            tensor.qscheme(),
            tensor.stride(),
            tensor.int_repr().tolist(),
            *(scale.tolist() for scale in scales),
        ]
    if tensor.layout == torch.sparse_coo:
        inner = [tensor.is_coalesced(), tensor._indices().tolist(), tensor._values().tolist()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        inner = [tensor.crow_indices().tolist(), tensor.col_indices().tolist(), tensor.values().tolist()]
    else:
        inner = [tensor.ccol_indices().tolist(), tensor.row_indices().tolist(), tensor.values().tolist()]
    return [*head, tensor.shape, *inner]


def stored(directory: Path, value: Any, **options: Any) -> ckstore.Version:
    store = ckstore.open(directory / "store", create=True)
    return store[store.ingest(value, **options).version]


@pytest.mark.parametrize("is_file", [True, False])
def test_torchs_own_kinds_come_back(tmp_path: Path, is_file: bool) -> None:
    values = {name: make() for name, make in KINDS.items()}
    torch.save(values, tmp_path / "a.pt")
    version = stored(tmp_path, tmp_path / "a.pt" if is_file else values, run="a", step=1)
    version.checkout(tmp_path / "b.pt")
    for found in (version.state_dict(), torch.load(tmp_path / "b.pt", weights_only=False)):
        assert {name: parts_of(found[name]) for name in found} == {name: parts_of(values[name]) for name in values}


def test_a_shared_tensor_stays_one(tmp_path: Path) -> None:
    value = DENSE.to_sparse()
    found = stored(tmp_path, {"a": value, "b": [value]}, run="a", step=1).state_dict()
    assert found["a"] is found["b"][0]


def test_quantised_tensors_share_their_memory(tmp_path: Path) -> None:
    whole = KINDS["quantised"]()
    found = stored(tmp_path, {"a": whole, "b": whole[1:]}, run="a", step=1).state_dict()
    found["a"].copy_(torch.ones(4, 4))
    assert torch.equal(found["b"].int_repr(), found["a"][1:].int_repr())


@pytest.mark.parametrize("is_file", [True, False])
def test_a_tensor_around_others_is_stored_by_them(tmp_path: Path, is_file: bool) -> None:
    source: Any = {"w": scaled()}
    if is_file:
        torch.save(source, tmp_path / "a.pt")
        source = tmp_path / "a.pt"
        version = stored(tmp_path, source, run="a", step=1)
    else:
        version = stored(tmp_path, source, run="a", step=1, on_unknown="pickle")
    assert set(version) == {"w/codes", "w/scale"}
    assert version["w/codes"][1].tolist() == [3, 4, 5]
    assert version.state_dict()["w"].name == "torch._tensor._rebuild_from_type_v2"
    found = version.state_dict(allow=[Scaled, Mode])["w"]
    assert type(found) is Scaled
    assert (found.shape, found.dtype, found.mode) == ((2, 3), torch.float32, Mode.ROWS)
    assert torch.equal(found.codes, scaled().codes)
    with torch.serialization.safe_globals([Scaled, Mode]):
        assert type(version.state_dict()["w"]) is Scaled
    version.checkout(tmp_path / "b.pt")
    assert torch.equal(torch.load(tmp_path / "b.pt", weights_only=False)["w"].scale, scaled().scale)


def test_objects_of_registered_classes_are_stored(tmp_path: Path) -> None:
    value = {"w": scaled(), "how": Setting(0.5, Mode.ROWS)}
    with pytest.raises(UsageError, match=r"Mode at w/mode"):
        stored(tmp_path, value, run="a", step=1)
    with torch.serialization.safe_globals([Scaled, Mode, Setting]):
        version = stored(tmp_path, value, run="a", step=1)
        version.checkout(tmp_path / "a.pt")
        for found in (version.state_dict(), torch.load(tmp_path / "a.pt", weights_only=True)):
            assert (found["how"], found["w"].mode) == (Setting(0.5, Mode.ROWS), Mode.ROWS)
            assert torch.equal(found["w"].codes, scaled().codes)
    assert isinstance(version.state_dict()["how"], Unknown)
    assert version.state_dict(allow=[Mode, Setting])["how"] == value["how"]


def test_an_incomplete_tensor_around_others_is_not_made(tmp_path: Path) -> None:
    with ckstore.open(tmp_path / "store", create=True) as store:
        store.set_policy(Policy(retention=Retention(drop=["w/scale"], whole_last=1)), "a")
        for step in range(2):
            store.ingest({"w": scaled(), "step": torch.tensor(step)}, run="a", step=step, on_unknown="pickle")
        store.retain("a")
        with pytest.raises(UsageError, match=r"No \S+Scaled can be made"):
            store["a@0"].state_dict(allow=[Scaled, Mode])
        with torch.serialization.safe_globals([Scaled, Mode]):
            assert isinstance(store["a@0"].state_dict()["w"], Unknown)


class Lie:
    """Pickles as a call of torch's own function with any arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def lies() -> dict[str, Lie]:
    sparse, nested = torch._utils._rebuild_sparse_tensor, torch._utils._rebuild_nested_tensor  # type: ignore[attr-defined]
    jagged = torch.nested._internal.nested_tensor._rebuild_njt
    typed = torch._tensor._rebuild_from_type_v2
    wrapper = torch._utils._rebuild_wrapper_subclass  # type: ignore[attr-defined]
    one, ints = torch.ones(1), torch.tensor
    endless = ints([0]).expand(2**60)
    whole = {"lengths": None, "_ragged_idx": 1, "_metadata_cache": {}, "requires_grad": False}
    rows = (torch.per_channel_affine, torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), 0)
    bytes_of = torch.ones(3, dtype=torch.int8).untyped_storage()
    codes = torch.storage.TypedStorage(wrap_storage=bytes_of, dtype=torch.qint8, _internal=True)
    plain = (torch.float32, (2,), (1,), 0, torch.strided, torch.device("cpu"), False)
    return {
        "an index beyond the shape": Lie(sparse, torch.sparse_coo, (ints([[7]]), one, (2,), False)),
        "a negative index": Lie(sparse, torch.sparse_coo, (ints([[-1]]), one, (2,), False)),
        "a repeated index, called unique": Lie(sparse, torch.sparse_coo, (ints([[0, 0]]), torch.ones(2), (2,), True)),
        "a shape beyond 64 bits": Lie(sparse, torch.sparse_coo, (ints([[0]] * 2), one, (2**62, 2**62), False)),
        "a column beyond the shape": Lie(sparse, torch.sparse_csr, (ints([0, 1]), ints([9]), one, (1, 2))),
        "rows beyond the values": Lie(sparse, torch.sparse_csr, (ints([0, 5]), ints([0]), one, (1, 2))),
        "a layout that is none": Lie(sparse, "sparse_csr", (ints([0, 1]), ints([0]), one, (1, 2))),
        "indices without end": Lie(sparse, torch.sparse_coo, (endless[None], one.expand(2**60), (2,), False)),
        "columns without end": Lie(sparse, torch.sparse_csr, (ints([0, 2**60]), endless, one.expand(2**60), (1, 2))),
        "a size beyond the buffer": Lie(nested, one, ints([[2]]), ints([[1]]), ints([0])),
        "a stride beyond the buffer": Lie(nested, torch.ones(2), ints([[2]]), ints([[2**62]]), ints([0])),
        "a negative offset": Lie(nested, one, ints([[1]]), ints([[1]]), ints([-1])),
        "offsets of other dtypes": Lie(nested, one, ints([[1]]), ints([[1]]), ints([0.0])),
        "sizes of another rank": Lie(nested, one, ints([1]), ints([1]), ints([0])),
        "sizes without end": Lie(nested, one, endless[:, None], endless[:, None], endless),
        "sizes of many axes": Lie(nested, one, *[torch.ones(1, 65, dtype=torch.int64)] * 2, ints([0])),
        "offsets without end": Lie(jagged, {"values": one, "offsets": endless, **whole}),
        "offsets between integers": Lie(jagged, {"values": one, "offsets": ints([0.0, 1.0]), **whole}),
        "offsets beyond the values": Lie(jagged, {"values": one, "offsets": ints([0, 9]), **whole}),
        "offsets that fall": Lie(jagged, {"values": one, "offsets": ints([1, 0]), **whole}),
        "lengths beyond the values": Lie(
            jagged, {"values": one, "offsets": ints([0, 1]), **whole, "lengths": ints([9])}
        ),
        "a jagged axis beyond the values": Lie(
            jagged, {"values": one, "offsets": ints([0, 1]), **whole, "_ragged_idx": 9}
        ),
        "scales for other rows": Lie(torch._utils._rebuild_qtensor, codes, 0, (3,), (1,), rows, False, {}),
        "zeros between integers": Lie(
            torch._utils._rebuild_qtensor, codes, 0, (1,), (1,), (*rows[:2], torch.zeros(1), 0), False, {}
        ),
        "a scale of text": Lie(torch._utils._rebuild_qtensor, codes, 0, (3,), (1,), (*rows[:1], "a", 0), False, {}),
        "a class that is no tensor": Lie(typed, wrapper, Mode, (Mode, *plain), {}),
        "two classes": Lie(typed, wrapper, Scaled, (torch.Tensor, *plain), {}),
        "a shape that is text": Lie(typed, wrapper, Scaled, (Scaled, torch.float32, ("a",), *plain[2:]), {}),
        "another function": Lie(typed, print, torch.Tensor, ("called",), {}),
        "a parameter of text": Lie(torch._utils._rebuild_parameter, "a", True, {}),  # type: ignore[attr-defined]
    }


def test_lies_stay_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = lies()
    torch.save({**told, "plain": torch.ones(2)}, tmp_path / "a.pt")
    version = stored(tmp_path, tmp_path / "a.pt", run="a", step=1)
    found = version.state_dict()
    with torch.serialization.safe_globals([Scaled, Mode]):
        registered = version.state_dict()
    assert [lie for lie in told if not (type(found[lie]) is type(registered[lie]) is Unknown)] == []
    assert not capsys.readouterr().out
