"""Runs the documentation: its commands and examples, its links, and its statements about the public API.

A page's ```` ```console ```` and ```` ```python ```` blocks run one after the other in one directory of
their own. In console blocks, lines after ``$ `` are commands and the others their output; output is compared
with numbers and ids made equal, and ``...`` on a line of its own matches any lines. Python blocks share
one namespace; those with prompts are doctests, and one that begins with a comment that is a file's name becomes that
file. Blocks of any other kind are only shown.

The BLAKE3 of a checkout is compared with those of the file that was written and, of the example run, of the file that
went in. Training is the same bit for bit on one kind of processor and not on another, whose vector instructions sum in
another order: so the digests that the pages show are compared letter by letter where the processor trains the files
that they were written with, and elsewhere are held to be one for each version, the same on all pages.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

import ckstore
from ckstore import errors
from ckstore.cli.verb import EXIT_CODES
from tests.forked import run_forked, server_of
from tests.object_store import object_store

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXECUTED = ("console", "python")

#: Imports of pages whose first block is a script that trains: they run as programs of their own.
GUEST = re.compile(
    r"^(?:import|from) (accelerate|jax|lightning|transformers|ckstore\.integrations\.torch)\b", re.MULTILINE
)

#: Their scripts take long: they are killed and run again where `CKSTORE_GUESTS` is set.
SLOW_GUESTS = ("lightning", "transformers")

#: The page whose commands start real processes: most verbs.
WHOLE = "tutorial.md"
#: In blocks of other pages whose commands do: a signal ends a program.
SIGNALLED = "\n> kill $"

#: Pages whose stores are in a bucket.
SERVED = ("bucket.md", "push-and-pull.md")

#: Code that kills a script when its second version is committed.
KILLED = """
import os, signal
from ckstore import Store
stored = []
def ingest(*given, ingest=Store.ingest, **named):
    stored.append(ingest(*given, **named))
    if len(stored) == 2: os.kill(os.getpid(), signal.SIGKILL)
    return stored[-1]
Store.ingest = ingest
"""

#: Parts that differ from one run or machine to the next: ids, times, numbers with their units, plurals.
VARIABLE = re.compile(r"\b[0-9a-f]{12,64}\b|[-+]?\d[\d,.:]*(?:e-?\d+)?(?: ?(?:B|kB|MB|GB|TB|s)\b)?|(?<=\w)s\b")

#: A checkout's line about a file that is the original: name of the version, file, BLAKE3.
DIGEST = re.compile(r"^(\S+) \(version \d+\) -> (\S+) .*\bblake3 ([0-9a-f]{64})\b", re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the (Language, text) of the blocks of a page that are run."""
    return [(kind, text) for kind, text in BLOCK.findall(page.read_text()) if kind in EXECUTED]


def is_program(page: Path) -> bool:
    """Return whether the first block of a page is a script that trains, and imports a guest for it."""
    kind, text = blocks(page)[0]
    return kind == "python" and GUEST.search(text) is not None


PROGRAMS = [page for page in PAGES if blocks(page) and is_program(page)]


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def alike(text: str) -> str:
    return " ".join(VARIABLE.sub("#", text).split())


def agrees(shown: str, printed: str) -> bool:
    """Return whether output matches a page, except for variable parts."""
    parts = [re.escape(alike(part)) for part in re.split(r"(?m)^\.\.\.$", shown)]
    return re.fullmatch(r"\s*" + r".*".join(parts) + r"\s*", alike(printed), re.DOTALL) is not None


def commands(block: str) -> list[tuple[str, str]]:
    """Return (command, output) pairs of a console block; lines that begin with ``> `` continue the command."""
    found: list[tuple[list[str], list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif line.startswith("> ") and not found[-1][1]:
            found[-1][0].append(line[2:])
        else:
            found[-1][1].append(line)
    return [("\n".join(command), "\n".join(shown)) for command, shown in found]


def digest_of(path: Path) -> str:
    return blake3(path.read_bytes()).hexdigest()


def documented() -> list[tuple[str, str]]:
    """Return the (Name of a version, BLAKE3) of every checkout that the pages show."""
    return [(version, digest) for page in PAGES for version, _, digest in DIGEST.findall(page.read_text())]


def originals(gpt_run: list[Path]) -> dict[str, str]:
    """Return the BLAKE3 of the files of the example run, by name of the version."""
    return {f"gpt@{int(path.stem.removeprefix('step'))}": digest_of(path) for path in gpt_run}


def check_digests(shown: str, printed: str, place: Path, went_in: dict[str, str]) -> None:
    """Check that a checkout prints the BLAKE3 of its output, which is the input's, and that the page shows it."""
    for version, path, digest in DIGEST.findall(printed):
        assert digest == digest_of(place / path)
        assert digest == went_in.get(version, digest)
    if went_in.items() & set(documented()):
        if re.search(r"(?m)^\.\.\.$", shown):  # Some are left out.
            assert {found[2] for found in DIGEST.findall(shown)} <= {found[2] for found in DIGEST.findall(printed)}
            return
        assert [found[2] for found in DIGEST.findall(shown)] == [found[2] for found in DIGEST.findall(printed)]


def run_console(block: str, place: Path, went_in: dict[str, str], beginning: str = "torch") -> None:
    """Run commands; those of a `beginning` in `tests.forked.BEGINNINGS` are forked from a process that has it."""
    environment = {name: value for name, value in os.environ.items() if name != "CKSTORE"}
    programs = [str(Path(sys.executable).parent), environment["PATH"]]
    if beginning:
        forked = str(server_of(beginning).programs)
        programs.insert(0, forked)
        environment["PYTHON_EXEC"] = f"{forked}/python"  # The interpreter that `torchrun` starts.
    environment |= {"PATH": os.pathsep.join(programs), "PYTHONWARNINGS": "error", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    run_commands(block, place, went_in, environment)


def run_commands(block: str, place: Path, went_in: dict[str, str], environment: dict[str, str]) -> None:
    for command, shown in commands(block):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=place, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert agrees(shown, done.stdout), f"$ {command}\nshown:\n{shown}\nprinted:\n{done.stdout}"
        check_digests(shown, done.stdout, place, went_in)


def run_python(block: str, namespace: dict[str, Any], page: Path) -> None:
    if not block.startswith(">>> "):
        exec(compile(block, name(page), "exec"), namespace)
        return
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(block, namespace, name(page), name(page), 0)
    printed: list[str] = []
    # A copy of the namespace would lose the block's definitions.
    test.globs = namespace
    failed = doctest.DocTestRunner(optionflags=flags).run(test, out=printed.append, clear_globs=False).failed
    assert not failed, "".join(printed)


@pytest.fixture(scope="session")
def tutorial_store(gpt_run: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tutorial's store: a tiny run with a tag."""
    place = tmp_path_factory.mktemp("tutorial")
    (place / "runs").mkdir()
    (place / "runs" / "gpt").symlink_to(gpt_run[0].parent)
    with contextlib.chdir(place), ckstore.init(".ckstore") as store:
        for path in gpt_run:
            store.ingest(Path("runs", "gpt", path.name), run="gpt", hot=0)
        store.tag("gpt@100", "best")
    return place / ".ckstore"


@pytest.fixture
def server_settings(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment variables of an object store."""
    with object_store() as server:
        yield {**server.anywhere, "CKSTORE_CACHE": str(tmp_path / "cache")}


def begin(page: Path, place: Path, gpt_run: list[Path], request: pytest.FixtureRequest) -> None:
    """Put the initial files of a page into its directory."""
    (place / "runs").mkdir()
    (place / "runs" / "gpt").symlink_to(gpt_run[0].parent)
    (place / "tools").mkdir()
    # The script of this name acts like this once its environment exists.
    train = f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} -m tools.runs "$@"\n'
    (place / "tools" / "train").write_text(train)
    (place / "tools" / "train").chmod(0o755)
    if page.name in SERVED:
        for variable, value in request.getfixturevalue("server_settings").items():
            request.getfixturevalue("monkeypatch").setenv(variable, value)
    if page.parent == DOCS / "how-to":
        made = request.getfixturevalue("tutorial_store")
        shutil.copytree(made, place / ".ckstore")


@pytest.mark.local  # Pages show stores in directories, but for those in `SERVED`, which have a server of their own.
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page not in PROGRAMS], ids=name)
def test_pages_show_the_actual_output(
    page: Path, gpt_run: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    begin(page, tmp_path, gpt_run, request)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKSTORE", raising=False)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    went_in = originals(gpt_run)
    for kind, text in blocks(page):
        for library in re.findall(r"^import (h5py)$", text, re.MULTILINE):
            pytest.importorskip(library)
        script = re.match(r"# (\w+\.py)\n", text)
        if kind == "console":
            is_real = page.name == WHOLE or SIGNALLED in text
            run_console(text, tmp_path, went_in, "" if is_real else "torch")
        elif script:
            (tmp_path / script[1]).write_text(text)
        else:
            run_python(text, namespace, page)


def test_the_pages_show_one_digest_for_each_version():
    shown = set(documented())
    assert shown
    assert len(shown) == len({version for version, _ in shown}) == len({digest for _, digest in shown})


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that headings of a page get."""
    text = BLOCK.sub("", page.read_text())
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower().replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), f"{name(page)} links to {target}"
        assert not anchor or anchor in anchors(found), f"{name(page)} links to {target}: no such heading"


def test_every_page_can_be_reached_from_the_readme():
    seen: set[Path] = set()
    left = [REPOSITORY / "README.md"]
    while left:
        page = left.pop()
        if page in seen:
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", page.read_text())
        left += [(page.parent / link).resolve() for link in links if not link.startswith("https://")]
    assert set(PAGES) <= seen


def test_the_training_loop_resumes_where_it_was_killed(tmp_path: Path):
    script = next(text for kind, text in blocks(DOCS / "how-to" / "training-loop.md") if kind == "python")
    killed = (
        "import os, signal\nfrom ckstore import Store\n"
        "def ingest(*given, ingest=Store.ingest, **named):\n"
        "    if ingest(*given, **named).version.step == 20: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Store.ingest = ingest\n"
    )
    (tmp_path / "train.py").write_text(killed + script)
    assert run_forked("torch", Path("train.py"), {}, cwd=tmp_path) == [(-9, "")]
    (tmp_path / "train.py").write_text(script + "\nprint('from', first)\n")
    for first in (21, 31):
        assert run_forked("torch", Path("train.py"), {}, cwd=tmp_path) == [(0, f"from {first}\n")]
    with ckstore.open(tmp_path / "checkpoints", "r") as store:
        assert store.run("linear").steps == [10, 20, 30]


def run_program(beginning: str, script: str, place: Path) -> int:
    place.mkdir(exist_ok=True)
    (place / "train.py").write_text(script)
    [(code, printed)] = run_forked(beginning, Path("train.py"), {}, cwd=place)
    assert code in (0, -9), printed
    return code


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("page", PROGRAMS, ids=name)
def test_a_training_that_was_killed_ends_with_the_weights_of_one_that_was_not(page: Path, tmp_path: Path):
    (_, script), *others = blocks(page)
    guest = GUEST.findall(script)[0].rpartition(".")[2]
    if importlib.util.find_spec(guest) is None:
        pytest.skip(f"{guest} is not installed: `pip install --group frameworks`")
    place, whole = tmp_path / "run", tmp_path / "whole"
    beginning = "jax" if guest == "jax" else "torch"
    assert run_program(beginning, script, place) == 0
    for kind, text in others:
        if kind == "console":
            run_console(text, place, {}, beginning)
        else:
            assert run_program(beginning, text, place) == 0
    if guest in SLOW_GUESTS and not os.environ.get("CKSTORE_GUESTS"):
        return
    place.rename(whole)  # Some checkpoints hold paths.
    assert run_program(beginning, KILLED + script, place) == -9
    assert run_program(beginning, script, place) == 0
    with ckstore.open(whole / "checkpoints", "r") as one, ckstore.open(place / "checkpoints", "r") as other:
        (run,) = {row.run for row in other._catalog.versions()}
        assert other.run(run).steps == one.run(run).steps
        expected, found = one.run(run).latest, other.run(run).latest
        assert list(found) == list(expected)
        for path in expected:
            assert found[path][...].tobytes() == expected[path][...].tobytes(), path


def test_the_reference_of_errors_is_complete():
    text = (DOCS / "reference" / "errors.md").read_text()
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.CkstoreError):
            assert re.search(rf"\| `{kind.__name__}` \| `{kind.kind}` \| {kind.exit_code} \|", text), kind
    for code, meaning in EXIT_CODES.items():
        assert f"\n* {code}: {meaning}\n" in text


def _public() -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions, and the methods of those that users call."""
    for name in ckstore.__all__:
        found = getattr(ckstore, name)
        if isinstance(found, type) and issubclass(found, BaseException):
            continue
        yield name, found
        if name in {"Store", "Version", "Run", "LazyTensor", "Table", "Saver"}:
            methods = {key: value for key, value in vars(found).items() if not key.startswith("_")}
            yield from ((f"{name}.{key}", value) for key, value in methods.items() if inspect.isfunction(value))


def test_every_public_name_has_an_example():
    """The examples run as doctests, in the store of conftest.py."""
    assert [name for name, value in _public() if ">>>" not in (inspect.getdoc(value) or "")] == []


def test_the_figures_of_the_readme_are_one_block():
    text = (REPOSITORY / "README.md").read_text()
    assert re.search(r"<!-- figures -->\n.*`tools/bench/.*<!-- /figures -->", text, re.DOTALL)
