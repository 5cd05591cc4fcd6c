"""vLLM's workers read the changed elements of a version from a store: a backend of its weight transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import ckstore
from ckstore.errors import NotFoundError

if TYPE_CHECKING:
    from ckstore import Store, Version


@dataclass
class StoreInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where versions are: directory or URL of the `store`; `version` is the one that the model was loaded from."""

    store: str
    version: str | None = None


@dataclass
class StoreUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The name of a version, such as `policy@1200`, the name of its run or its id."""

    version: str


class StoreWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Updates the model of a worker to a version: the backend `ckstore` of vLLM's `WeightTransferConfig`.

    An update applies the elements that differ from the version before. The first one loads all weights, unless the init
    info names the version that the model was loaded from; so does one after a failure, or where vLLM cannot apply
    patches: elements are not numbers or of other types than floats, most of a tensor changes, or the model has loaders
    that compute.

    vLLM finds the backend with ckstore installed. A trainer publishes with `Store.publish`, and posts `{"store": …}` to
    `/init_weight_transfer_engine`, then after each save `{"version": …}` to `/update_weights`.
    """

    init_info_cls = StoreInitInfo
    update_info_cls = StoreUpdateInfo
    supports_draft_weight_update = False

    _store: Store | None = None
    _present: str | None = None

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        """Open the store for reading."""
        self.shutdown()
        self._store = ckstore.open(init_info.store, "r")
        self._present = None if init_info.version is None else self._store[init_info.version].id

    def start_weight_update(self) -> None:
        """Do nothing: patches are applied in place."""

    def finish_weight_update(self) -> None:
        """Do nothing: patches are applied in place."""

    def receive_weights(self, update_info: StoreUpdateInfo) -> None:
        """Bring the model to a version."""
        if self._store is None:
            raise RuntimeError("Initialize the transfer with a store first.")
        version = self._store[update_info.version]
        patches = self._patches(version)
        self._present = None  # The model may be a mixture until all are applied.
        if patches is None or not self._applied(patches):
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(
                    (patch.name, patch.values.view(patch.shape).to(self.device)) for patch in version.patches()
                )
            finally:  # Else loaders stay wrapped, and the next reload wraps them again.
                finalize_layerwise_reload(self.model, self.model_config)
        self._present = version.id

    def _applied(self, patches: list[CheckpointWeightPatch]) -> bool:
        """Apply patches; return whether the loaders of the model could."""
        try:
            if patches:
                load_checkpoint_weight_patches(self.model, patches, validate_unique_indices=False)
        except NotImplementedError:
            return False
        return True

    def _patches(self, version: Version) -> list[CheckpointWeightPatch] | None:
        """Return the patches of the present version; None if vLLM cannot apply them alone."""
        if self._store is None or self._present is None:
            return None
        try:
            found = list(version.patches(self._store[self._present]))
        except NotFoundError:  # It was forgotten since.
            return None
        # vLLM marks elements that stay with NaN.
        if any(
            patch.indices is None or not patch.dtype.is_floating_point or bool(patch.values.isnan().any())
            for patch in found
        ):
            return None
        places = {patch.name: patch.indices for patch in found if patch.indices is not None}
        return [
            CheckpointWeightPatch(
                patch.name, patch.shape, patch.dtype, patch.values.to(self.device), places[patch.name].to(self.device)
            )
            for patch in found
        ]

    def shutdown(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()
        self._store = self._present = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> NoReturn:
        """Raise: a trainer publishes versions instead."""
        raise NotImplementedError("Trainers publish versions with ckstore's Store.publish.")


def register() -> None:
    """Register the backend `ckstore`; vLLM calls this in each of its processes."""
    WeightTransferEngineFactory.register_engine("ckstore", StoreWeightTransferEngine)
