"""Changes one place at a time in code that decides which versions are kept; prints changes that no test notices.

usage: python -m tools.mutants ROOM... [--sample N] [--seed N] [--minutes N]

A mutant is a module with one comparison, condition, number or statement changed. A room's tests run on each in a
process that is forked after the imports of libraries, until one fails.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]

#: The modules of each room, and its quick tests.
ROOMS = {
    "steps": (("steps", "scanning/steps"), ("tests/test_steps.py", "tests/scanning/test_steps.py")),
    "naming": (
        ("commit/naming", "storage/version_names"),
        (
            "tests/storage/test_version_names.py",
            "tests/test_metrics.py",
            "tests/cli/test_tag.py",
            "tests/cli/test_policy.py",
        ),
    ),
    "lineage": (("lineage/cost", "lineage/planner", "lineage/release", "lineage/search"), ("tests/lineage",)),
    "log": (("storage/change_log", "storage/log_files"), ("tests/storage/test_change_log.py",)),
    "retention": (
        ("retention/forget", "retention/retain", "retention/selection"),
        ("tests/retention/test_selection.py", "tests/retention/test_forget.py", "tests/retention/test_retain.py"),
    ),
    "gc": (("gc/collect", "gc/plan", "gc/reachability", "gc/repack"), ("tests/gc",)),
    "recovery": (
        ("recovery/found_objects", "recovery/found_versions", "recovery/lost_packs", "recovery/recover"),
        ("tests/recovery",),
    ),
    "commit": (
        ("commit/change", "commit/dependents", "commit/going_back", "commit/in_full", "commit/join"),
        (
            "tests/writing/test_rebase.py",
            "tests/writing/test_going_back.py",
            "tests/writing/test_dedupe.py",
            "tests/test_segments.py",
        ),
    ),
}

_OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


class _Change(ast.NodeTransformer):
    """Numbers the places that can be changed, in order, and changes the one with number `at`."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.places: list[int] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.arg) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "dataclass"):
            return node  # Neither a type nor the form of a class changes a result.
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return node  # An assertion.
        if isinstance(node, ast.AnnAssign):
            node.value = node.value and self.visit(node.value)  # type: ignore[assignment]
            return node
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return node
        changed = self._changed(node)
        if changed is not None:
            self.places.append(getattr(node, "lineno", 0))
            if len(self.places) == self.at + 1:
                return ast.copy_location(changed, node)
        return self.generic_visit(node)

    def _changed(self, node: ast.AST) -> ast.AST | None:
        other: Any
        match node:
            case ast.Compare(left, [first, *rest], comparators) if type(first) in _OTHER:
                other = _OTHER[type(first)]
                return ast.Compare(left, [other(), *rest], comparators)
            case ast.BoolOp(op, values):
                other = _OTHER[type(op)]
                return ast.BoolOp(other(), values)
            case ast.UnaryOp(ast.Not(), operand):
                return operand
            case ast.BinOp(left, op, right) if type(op) in _OTHER:
                other = _OTHER[type(op)]
                return ast.BinOp(left, other(), right)
            case ast.Constant(bool(value)):
                return ast.Constant(not value)
            case ast.Constant(int(value)):
                return ast.Constant(value + 1)
            case ast.Expr(ast.Call()) | ast.AugAssign():
                return ast.Pass()
            case ast.Continue():
                return ast.Break()
            case ast.IfExp(test, body, orelse):
                return ast.IfExp(test, orelse, body)
        return None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a changed tree."""

    def __init__(self, name: str, tree: ast.Module, path: Path) -> None:
        self.name, self.tree, self.path = name, tree, path

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=str(self.path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self.path)
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def places(source: str) -> list[int]:
    """Return the line of each place that can be changed."""
    change = _Change()
    change.visit(ast.parse(source))
    return change.places


def changed(source: str, at: int) -> ast.Module:
    """Return a module with the place of a number changed."""
    tree = _Change(at).visit(ast.parse(source))
    assert isinstance(tree, ast.Module)
    return ast.fix_missing_locations(tree)


def main() -> None:
    """Print the mutants that survive, and the score of each room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="+", choices=ROOMS)
    parser.add_argument("--sample", type=int, default=40, help="mutants of a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="time for a room, after which the rest is left out")
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    import numpy  # noqa: F401, ICN001
    import pytest  # noqa: F401
    import torch  # noqa: F401

    for room in options.rooms:
        modules, tests = ROOMS[room]
        whole, took = _run(tests, None, None)
        if whole:
            raise SystemExit(f"tests of {room} fail without a change")
        sites = [site for module in modules for site in _sites(module)]
        chosen = random.Random(options.seed).sample(sites, min(options.sample, len(sites)))
        survivors, tried, until = [], 0, time.monotonic() + 60 * options.minutes
        for path, at, line in chosen:
            if time.monotonic() > until:
                break
            tried += 1
            if not _run(tests, path, at, 5 * took + 10)[0]:
                survivors.append(f"{path}:{line}")
                before = ast.unparse(changed(path.read_text(), -1)).splitlines()
                after = ast.unparse(changed(path.read_text(), at)).splitlines()
                found = [f"  {one.strip()}  ->  {two.strip()}" for one, two in zip(before, after, strict=False)
                         if one != two]  # fmt: skip
                print(survivors[-1], *found[:1], flush=True)
        print(f"{room}: {tried - len(survivors)} of {tried} mutants are noticed ({len(sites)} places)", flush=True)


def _sites(module: str) -> Iterator[tuple[Path, int, int]]:
    path = Path("ckstore", f"{module}.py")
    for at, line in enumerate(places(path.read_text())):
        yield path, at, line


def _run(tests: Sequence[str], path: Path | None, at: int | None, limit: float = 0) -> tuple[int, float]:
    """Run tests on a mutant; return the exit code and the CPU seconds."""
    started = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
            if path is not None and at is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
                name = ".".join(path.with_suffix("").parts)
                sys.meta_path.insert(0, _Finder(name, changed(path.read_text(), at), path.absolute()))
            sys.dont_write_bytecode = True
            import pytest

            with tempfile.TemporaryDirectory() as scratch:
                own = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--basetemp", f"{scratch}/tests"]
                code = int(pytest.main([*own, *tests]))
        finally:
            os._exit(code)
    until = time.monotonic() + 900
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        os.killpg(child, 9)
        _, status = os.waitpid(child, 0)
    return status, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - started


if __name__ == "__main__":
    main()
