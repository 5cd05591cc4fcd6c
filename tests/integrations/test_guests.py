"""No integration needs its library before it is used."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import ckstore.integrations

GUESTS = (
    "accelerate",
    "flax",
    "jax",
    "lightning",
    "lightning_fabric",
    "mlflow",
    "orbax",
    "pytorch_lightning",
    "torch",
    "transformers",
)


def test_integrations_are_imported_without_their_libraries(tmp_path: Path) -> None:
    """But those of torch.distributed.checkpoint and vLLM, whose classes derive from theirs."""
    names = {module.name for module in pkgutil.iter_modules(ckstore.integrations.__path__)}
    modules = [f"ckstore.integrations.{name}" for name in sorted(names - {"dcp", "vllm"})]
    assert len(modules) > 4
    code = (
        f"import importlib, sys\nfor guest in {GUESTS}: sys.modules[guest] = None\n"
        f"for module in {modules}: importlib.import_module(module)\n"
        "import ckstore\nfrom ckstore.integrations.lightning import StoreIO\n"
        "from ckstore.integrations.transformers import StoreCallback\n"
        f"store = ckstore.init({str(tmp_path / 'store')!r})\nprint(StoreIO(store, 'a'), StoreCallback(store, 'a'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
