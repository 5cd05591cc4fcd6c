"""The weight transfer of vLLM, against its documented interface: vLLM itself is not installed."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import ckstore


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None


@dataclass
class Info(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC):
    """The base class of vLLM 0.25 and later, as its pages describe it."""

    init_info_cls: type[Any]
    update_info_cls: type[Any]

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.model_config = vllm_config.model_config

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class Factory:
    engines: ClassVar[dict[str, type[WeightTransferEngine]]] = {}

    @classmethod
    def register_engine(cls, name: str, engine: type[WeightTransferEngine]) -> None:
        if name in cls.engines:
            raise ValueError(name)
        cls.engines[name] = engine


class Model(torch.nn.Module):
    """Two weights that the checkpoint has under other names, and how they were loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(300, 100, dtype=torch.bfloat16), requires_grad=False)
        self.b = torch.nn.Parameter(torch.zeros(7, dtype=torch.bfloat16), requires_grad=False)
        self.c = torch.nn.Parameter(torch.zeros(9, dtype=torch.int32), requires_grad=False)
        self.told: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.told.append("loaded")
        for name, tensor in weights:
            getattr(self, name.removeprefix("model.")).copy_(tensor)
        return set()


def load_patches(model: Model, patches: Iterable[CheckpointWeightPatch], **_: Any) -> None:
    for patch in patches:
        assert patch.indices is not None
        assert patch.dtype.is_floating_point
        assert not patch.values.isnan().any()
        flat = getattr(model, patch.name.removeprefix("model.")).view(-1)
        assert tuple(patch.shape) == tuple(getattr(model, patch.name.removeprefix("model.")).shape)
        flat[patch.indices] = patch.values
        model.told.append(f"{patch.name} {patch.indices.numel()}")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    modules: dict[str, dict[str, Any]] = {
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferInitInfo": Info,
            "WeightTransferUpdateInfo": Info,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Factory},
        "vllm.model_executor.model_loader.checkpoint_weight_patch": {
            "CheckpointWeightPatch": CheckpointWeightPatch,
            "load_checkpoint_weight_patches": load_patches,
        },
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: model.told.append("begun"),
            "finalize_layerwise_reload": lambda model, config: model.told.append("ended"),
        },
    }
    for name, contents in modules.items():
        for above in [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]:
            monkeypatch.setitem(sys.modules, above, ModuleType(above))
        vars(sys.modules[name]).update(contents)
    monkeypatch.delitem(sys.modules, "ckstore.integrations.vllm", raising=False)
    monkeypatch.setattr(Factory, "engines", {})
    importlib.import_module("ckstore.integrations.vllm").register()

    class VllmConfig:
        model_config = None

    made = Factory.engines["ckstore"](None, VllmConfig(), torch.device("cpu"), Model())
    yield made
    made.shutdown()


def test_workers_apply_the_elements_that_changed(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    weights = {
        "model.a": torch.randn(300, 100, generator=generator).bfloat16(),
        "model.b": torch.randn(7, generator=generator).bfloat16(),
        "model.c": torch.arange(9, dtype=torch.int32),
    }
    Path("like").mkdir()
    for number, name in enumerate(weights):
        save_file({name: weights[name]}, f"like/model-{number}.safetensors")

    def update(name: str) -> list[str]:
        engine.start_weight_update()
        engine.update_weights({"version": name})
        engine.finish_weight_update()
        told, engine.model.told = engine.model.told, []
        for key, value in weights.items():
            held = getattr(engine.model, key.removeprefix("model."))
            assert torch.equal(held.view(torch.uint8), value.view(torch.uint8))
        return list(told)

    with ckstore.open("store", create=True) as store, store.publish("policy", like="like") as publisher:

        def publish(step: int) -> str:
            publisher.save(weights, step=step).result()
            return f"policy@{step}"

        with pytest.raises(RuntimeError, match="Initialize"):
            engine.update_weights({"version": "policy"})
        publish(0)
        engine.init_transfer_engine(engine.init_info_cls(store="store"))
        assert update("policy@0") == ["begun", "loaded", "ended"]
        weights["model.a"][3, ::10] += 1
        assert update(publish(1)) == ["model.a 10"]
        assert update("policy") == []
        # NaN marks elements that stay.
        weights["model.a"][0, 0] = float("nan")
        assert update(publish(2)) == ["begun", "loaded", "ended"]
        # Most elements change.
        weights["model.b"] += 1
        assert update(publish(3)) == ["begun", "loaded", "ended"]
        # Elements are no floats.
        weights["model.c"][4] += 1
        assert update(publish(4)) == ["begun", "loaded", "ended"]
        # A loader computes: vLLM refuses a patch that it has begun to apply.
        weights["model.a"][5, 5] += 1

        def refuse(model: Model, patches: list[CheckpointWeightPatch], **_: Any) -> None:
            load_patches(model, [patch._replace(values=patch.values + 1) for patch in patches])
            raise NotImplementedError

        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["ckstore.integrations.vllm"], "load_checkpoint_weight_patches", refuse)
            assert update(publish(5)) == ["model.a 1", "begun", "loaded", "ended"]
        weights["model.b"][0] += 1
        publish(6)
        store.forget("policy@5")
        assert update("policy@6") == ["begun", "loaded", "ended"]
        # A failure leaves a mixture.
        weights["model.b"][0] += 1
        publish(7)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["ckstore.integrations.vllm"], "load_checkpoint_weight_patches", None)
            with pytest.raises(TypeError):
                engine.update_weights({"version": "policy@7"})
        assert update("policy@7") == ["begun", "loaded", "ended"]
        with monkeypatch.context() as patch:
            patch.setattr(Model, "load_weights", None)
            engine.init_transfer_engine(engine.init_info_cls(store="store"))
            with pytest.raises(TypeError):
                engine.update_weights({"version": "policy@7"})
        assert update("policy@7") == ["begun", "ended", "begun", "loaded", "ended"]
        # The model was loaded from a followed directory.
        weights["model.b"][0] += 1
        publish(8)
        engine.init_transfer_engine(engine.init_info_cls(store="store", version="policy@7"))
        assert update("policy") == ["model.b 1"]
