"""Changes one place at a time in code that decides which versions are kept; prints changes that no test notices.

usage: python -m tools.mutants ROOM... [--sample N] [--seed N] [--minutes N]

A mutant is a module with one comparison, condition, number or statement changed. The room's tests of its lines run on
it, the quickest first, in a fork of the process that collected them, until one fails.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

#: The modules of each room, and its quick tests.
ROOMS = {
    "steps": (("steps", "scanning/steps"), ("ckstore/steps.py", "tests/test_steps.py", "tests/scanning/test_steps.py")),
    "naming": (
        ("commit/naming", "storage/version_names"),
        (
            "tests/storage/test_version_names.py",
            "tests/test_metrics.py",
            "tests/cli/test_log.py",
            "tests/cli/test_tag.py",
            "tests/cli/test_policy.py",
            "tests/test_arguments.py",
            "tests/writing/test_renamed_runs.py",
        ),
    ),
    "lineage": (("lineage/cost", "lineage/planner", "lineage/release", "lineage/search"), ("tests/lineage",)),
    "log": (
        ("storage/change_log", "storage/log_files"),
        (
            "ckstore/storage/change_log.py",
            "tests/storage/test_change_log.py",
            "tests/writing/test_renamed_runs.py",
            "tests/retention/test_undo.py",
        ),
    ),
    "retention": (
        ("retention/forget", "retention/retain", "retention/selection"),
        (
            "tests/retention/test_selection.py",
            "tests/retention/test_forget.py",
            "tests/retention/test_retain.py",
            "tests/retention/test_undo.py",
        ),
    ),
    "gc": (
        ("gc/collect", "gc/plan", "gc/reachability", "gc/repack"),
        (
            "tests/gc",
            "tests/test_segments.py",
            "tests/test_full_disk.py::test_packs_that_cannot_be_rewritten_stay",
            "tests/storage/remote/test_remote_gc.py::test_packs_that_an_encoding_left_are_predicted_without_a_plan",
        ),
    ),
    "recovery": (
        ("recovery/found_objects", "recovery/found_versions", "recovery/lost_packs", "recovery/recover"),
        (
            "tests/recovery",
            "tests/writing/test_going_back.py",
            "tests/writing/test_renamed_runs.py",
            "tests/storage/remote/test_remote_damage.py",
        ),
    ),
    "commit": (
        ("commit/change", "commit/dependents", "commit/going_back", "commit/in_full", "commit/join"),
        (
            "tests/writing/test_rebase.py",
            "tests/writing/test_going_back.py",
            "tests/writing/test_damaged_parents.py",
            "tests/writing/test_changes_by_others.py",
            "tests/integrations/test_staging.py",
            "tests/storage/remote/test_remote_damage.py",
            "tests/test_segments.py",
            "tests/recovery/test_recover.py::test_an_ingest_whose_packs_recover_found_first_succeeds",
            "tests/recovery/test_recover.py::test_a_version_that_recover_found_first_stays_in_its_place",
        ),
    ),
}

#: A test that waits for ever fails; output is of no interest.
OPTIONS = ("-qq", "-x", "-s", "-n", "0", "-p", "no:cacheprovider", "--timeout", "90", "-o", "session_timeout=86400")

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
        if isinstance(node, ast.ClassDef):
            for part in node.body:  # Values of a class were taken when it was made.
                if isinstance(part, ast.FunctionDef):
                    self.visit(part)
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


def span(source: str, line: int) -> range:
    """Return the lines that a test runs if it runs code of a line: its statement, or the function of a default.

    All code may use the constants of a module.
    """
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or line)]
    around.sort(key=lambda node: (node.lineno, -(node.end_lineno or line)))
    if not any(isinstance(node, ast.FunctionDef) for node in around):
        return range(len(source))
    inner = around[-1]
    body = getattr(inner, "body", None)
    if body is None or isinstance(inner, ast.FunctionDef):
        return range(inner.lineno, (inner.end_lineno or line) + 1)
    return range(inner.lineno, max(body[0].lineno, inner.lineno + 1))


def apply(path: Path, at: int) -> None:
    """Change a place of an imported module: the code and defaults of functions, and constants."""
    source, file = path.read_text(), str(path.absolute())
    before, after = changed(source, -1), changed(source, at)
    codes = {_key(code): code for code in _codes(compile(after, file, "exec"))}
    defaults = {_first(node): ast.unparse(node.args) for node in ast.walk(before) if isinstance(node, ast.FunctionDef)}
    other = {_first(node): node.args for node in ast.walk(after)
             if isinstance(node, ast.FunctionDef) and ast.unparse(node.args) != defaults[_first(node)]}  # fmt: skip
    for found in gc.get_objects():
        if type(found) is FunctionType and found.__code__.co_filename == file:
            first = found.__code__.co_firstlineno
            found.__code__ = codes.get(_key(found.__code__), found.__code__)
            if first in other:
                values = [_value(node, found.__globals__) for node in other[first].defaults]
                found.__defaults__ = tuple(values) or None
                named = zip(other[first].kwonlyargs, other[first].kw_defaults, strict=True)
                found.__kwdefaults__ = {one.arg: _value(node, found.__globals__) for one, node in named if node}
    for one, two in zip(before.body, after.body, strict=True):
        if isinstance(two, ast.Assign | ast.AnnAssign) and ast.dump(one) != ast.dump(two):
            _assign(two, file)


def _assign(statement: ast.Assign | ast.AnnAssign, file: str) -> None:
    """Change constants of a module, and of the modules that have imported them."""
    own = next(vars(module) for module in list(sys.modules.values()) if getattr(module, "__file__", None) == file)
    former = dict(own)
    exec(compile(ast.Module([statement], []), file, "exec"), own)
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for name in {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}:
        for imported, module in list(sys.modules.items()):
            if imported.startswith("ckstore.") and vars(module).get(name) is former[name]:
                setattr(module, name, own[name])


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "default", "eval"), names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _first(node: ast.FunctionDef) -> int:
    """Return the first line of a function, with its decorators."""
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


class _Test(NamedTuple):
    """The CPU seconds of a test, its place among the collected ones, and the lines that it runs, by file."""

    seconds: float
    number: int
    lines: dict[str, list[int]]


class _Mutants:
    """A plugin of pytest: runs mutants in place of the tests."""

    def __init__(self, room: str, sample: int, seed: int, minutes: float) -> None:
        self.room, self.sample, self.seed, self.minutes = room, sample, seed, minutes
        self.files = {str(REPOSITORY / "ckstore" / f"{name}.py"): f"ckstore/{name}.py" for name in ROOMS[room][0]}
        self.lines: dict[str, set[int]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Print the mutants that survive, and their number."""
        for name in ROOMS[self.room][0]:
            importlib.import_module(f"ckstore.{name.replace('/', '.')}")
        with tempfile.NamedTemporaryFile() as file:
            if _forked(lambda: self._record(session, Path(file.name)), 1000):
                raise SystemExit(f"tests of {self.room} fail without a change: {Path(file.name).read_text()}")
            tests = sorted(_Test(*test) for test in json.loads(Path(file.name).read_text()))
        sites = [(Path(file), at, line) for file in self.files.values()
                 for at, line in enumerate(places(Path(file).read_text()))]  # fmt: skip
        chosen = random.Random(self.seed).sample(sites, min(self.sample, len(sites)))
        survivors, tried, until = 0, 0, time.monotonic() + 60 * self.minutes
        for path, at, line in chosen:
            if time.monotonic() > until:
                break
            tried += 1
            lines = span(path.read_text(), line)
            due = [test for test in tests if any(line in lines for line in test.lines.get(str(path), ()))]
            if not due or not self._is_noticed(session, due, path, at):
                survivors += 1
                print(f"{path}:{line}", _shown(path.read_text(), at), "" if due else "(no test runs it)", flush=True)
        print(f"{self.room}: {tried - survivors} of {tried} mutants are noticed ({len(sites)} places)", flush=True)
        return True

    def _is_noticed(self, session: pytest.Session, due: Sequence[_Test], path: Path, at: int) -> bool:
        def run() -> int:
            gc.unfreeze()
            apply(path, at)
            return _run(session, [session.items[test.number] for test in due])

        return _forked(run, sum(test.seconds for test in due)) != 0

    def _record(self, session: pytest.Session, file: Path) -> int:
        """Run each test on unchanged code; write the lines that it runs."""
        tests = []
        for number, item in enumerate(session.items):
            self.lines = {}
            began = sum(os.times()[:4])
            threading.settrace(self._trace)
            sys.settrace(self._trace)
            failed = _run(session, [item])
            sys.settrace(None)
            if failed:
                file.write_text(item.nodeid)
                return 1
            lines = {path: sorted(found) for path, found in self.lines.items()}
            tests.append(_Test(sum(os.times()[:4]) - began, number, lines))
        file.write_text(json.dumps(tests))
        return 0

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        file = self.files.get(frame.f_code.co_filename)
        if file is None:
            return None
        self.lines.setdefault(file, set()).add(frame.f_lineno)
        return self._trace


def main() -> None:
    """Print the mutants that survive, and the score of each room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="+", choices=ROOMS)
    parser.add_argument("--sample", type=int, default=40, help="mutants of a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="time for a room, after which the rest is left out")
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    import torch  # noqa: F401

    for room in options.rooms:
        plugin = _Mutants(room, options.sample, options.seed, options.minutes)
        with tempfile.TemporaryDirectory() as scratch:
            arguments = [*OPTIONS, "--basetemp", f"{scratch}/tests", *ROOMS[room][1]]
            _forked(partial(pytest.main, arguments, [plugin]), 1e6, quiet=False)


def _shown(source: str, at: int) -> str:
    before, after = (ast.unparse(changed(source, number)).splitlines() for number in (-1, at))
    found = [f"{one.strip()}  ->  {two.strip()}" for one, two in zip(before, after, strict=False) if one != two]
    return " ".join(found[:1])


def _run(session: pytest.Session, items: Sequence[pytest.Item]) -> int:
    """Run tests until one fails; return whether one did."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return 1
    return 0


def _forked(run: Callable[[], int], seconds: float, *, quiet: bool = True) -> int:
    """Run a function that usually takes some CPU seconds in a fork; return its exit status."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            if quiet:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 1)
                os.dup2(null, 2)
            limit = int(5 * seconds + 20)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            code = run()
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, 9)  # Processes of tests, too.
    return status


if __name__ == "__main__":
    main()
