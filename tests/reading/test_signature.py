"""Signatures of versions: readers that name a key write nothing that was not signed with it."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import ckstore
from ckstore.cli import program
from ckstore.commit.naming import set_metrics
from ckstore.errors import IntegrityError
from ckstore.reading.stored_version import ChangedVersionError, StoredVersion
from ckstore.runtime.provenance import SIGNATURE
from tests.checkpoints import write_safetensors

signing = pytest.importorskip("model_signing.signing")
verifying = pytest.importorskip("model_signing.verifying")

from cryptography import x509  # noqa: E402
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402

pytestmark = pytest.mark.encoded

PEM = serialization.Encoding.PEM


def private(path: Path, key: Any = None) -> Any:
    """Write a private key, by default of P-256, and, next to it, the public one."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, plain))
    public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)
    return key


def certificate(name: str, key: Any, issuer: str, issuer_key: Any, *, is_authority: bool) -> bytes:
    """Return a certificate of a key."""
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(1))
        .not_valid_after(now + timedelta(1))
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(
            x509.KeyUsage(not is_authority, False, False, False, False, is_authority, False, False, False), True
        )
        .sign(issuer_key, hashes.SHA256())
    )
    return made.public_bytes(PEM)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ckstore.Store]:
    """A store with two versions of a directory, and the keys `own` and `other`."""
    monkeypatch.chdir(tmp_path)
    for name in ("own", "other"):
        private(Path(f"{name}.pem"))
    with ckstore.open("store", create=True) as made:
        Path("model").mkdir()
        for step in (1, 2):
            write_safetensors(Path("model/model.safetensors"), {"w": ("float32", (5,), np.full(5, step, np.float32))})
            Path("model/config.json").write_text("{}")
            made.ingest("model", run="policy", step=step)
        yield made


def test_only_what_the_named_key_signed_is_written(store: ckstore.Store) -> None:
    version = store["policy@1"]
    for key in ("own.pub", "other.pub"):
        with pytest.raises(ckstore.IntegrityError, match="is not signed"):
            version.checkout("out", signed_by=key)
    store.sign("policy@1", "own.pem")
    signed = store["policy@1"]
    assert SIGNATURE not in signed.metrics
    with pytest.raises(ckstore.IntegrityError, match=r"not signed by other\.pub"):
        signed.checkout("out", signed_by="other.pub")
    assert not Path("out").exists()
    signed.checkout("out", signed_by="own.pub")
    assert (Path("out") / "config.json").exists()
    with pytest.raises(ckstore.UsageError, match="files, not tensors"):
        signed.checkout("out.npz", signed_by="own.pub")
    # Verify reports the other version, which is not signed.
    (problem,) = store.verify(signed_by="own.pub").problems
    assert problem == "Version 2 is not signed; sign it with `ckstore metric --sign`."


def test_a_follower_waits_for_a_signature(store: ckstore.Store) -> None:
    def followed() -> ckstore.Followed:
        (found,) = store.follow("policy", "local", once=True, signed_by="own.pub")
        return found

    for key in (None, "other.pem"):
        if key is not None:
            store.sign("policy", key)
        with pytest.raises(ckstore.IntegrityError, match="not signed"):
            followed()
        assert not any(Path("local").iterdir())
    store.sign("policy", "own.pem")
    assert followed().version.step == 2
    # A version that another follower wrote is not used, either.
    store.sign("policy", "other.pem")
    with pytest.raises(ckstore.IntegrityError, match="not signed by"):
        followed()


@pytest.mark.parametrize("change", ["digest", "name", "further", "twice", "fewer", "link", "other version", "garbage"])
def test_other_files_than_the_signed_ones_are_refused(store: ckstore.Store, change: str) -> None:
    for step in (1, 2):
        store.sign(f"policy@{step}", "own.pem")
    version = store["policy@2"]
    stored = version._stored
    # The layout and the files agree, as those of a hostile store do.
    assert stored.contents is not None
    document, row = stored.document, stored.row
    first, second = document.files
    files = {
        "digest": (replace(first, blake3=second.blake3), second),
        "name": (replace(first, path="run.py"), second),
        "further": (first, second, replace(first, path="run.py")),
        "twice": (replace(second, path=first.path), first, second),
        "fewer": (first,),
    }.get(change, document.files)
    signature = {
        "other version": store["policy@1"]._stored.row.metrics[SIGNATURE],
        "garbage": {"dsseEnvelope": {"payload": "e30="}},
    }.get(change, row.metrics[SIGNATURE])
    links = (("run.py", "config.json"),) if change == "link" else ()
    vars(stored)["document"] = replace(document, files=files, links=links)
    stored.row = dataclasses.replace(row, metrics={SIGNATURE: signature})
    with pytest.raises(ckstore.IntegrityError):
        version.require_signed("own.pub")


def test_the_package_reads_signatures_and_the_store_reads_its(store: ckstore.Store) -> None:
    """A signature goes with a restored directory; one of a directory, of SHA-256, goes with its version."""
    store.sign("policy", "own.pem")
    version = store["policy"]
    version.checkout("out")
    Path("model.sig").write_text(json.dumps(version._stored.row.metrics[SIGNATURE]))
    config = verifying.Config().use_elliptic_key_verifier(public_key="own.pub")
    config.verify(Path("out"), "model.sig")
    signing.Config().use_elliptic_key_signer(private_key="other.pem").sign(Path("out"), "other.sig")
    set_metrics(store._repository, version._stored.row, {SIGNATURE: json.loads(Path("other.sig").read_text())}, ())
    store["policy"].require_signed("other.pub")
    with pytest.raises(ckstore.IntegrityError):
        store["policy"].require_signed("own.pub")


def test_a_digest_that_the_package_signed_is_bound_to_the_one_that_a_checkout_compares(store: ckstore.Store) -> None:
    """Other bytes may come after the check; they are not those of the version's BLAKE3, either."""
    store["policy"].checkout("out")
    signing.Config().use_elliptic_key_signer(private_key="own.pem").sign(Path("out"), "own.sig")
    row = store["policy"]._stored.row
    set_metrics(store._repository, row, {SIGNATURE: json.loads(Path("own.sig").read_text())}, ())
    version = store["policy"]
    document = version._stored.document
    first, second = document.files
    vars(version._stored)["document"] = replace(document, files=(replace(first, blake3=second.blake3), second))
    with pytest.raises(IntegrityError, match="differs from the original"):
        version.require_signed("own.pub")


@pytest.fixture
def hostile(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> ckstore.Store:
    """The store with two signed versions, and with other bytes than the digests of `config.json`."""
    for step in (1, 2):
        store.sign(f"policy@{step}", "own.pem")
    (followed,) = store.follow("policy@1", "local", once=True, signed_by="own.pub")
    assert followed.bytes_written > 0
    honest = StoredVersion.skeleton

    def skeleton(version: StoredVersion, file: int) -> bytes:
        data = honest(version, file)
        return b"[]" if data == b"{}" else data

    monkeypatch.setattr(StoredVersion, "skeleton", skeleton)
    return store


@pytest.mark.parametrize("directory", ["local", "fresh"])
def test_a_followed_directory_never_holds_other_bytes_than_the_signed_ones(
    hostile: ckstore.Store, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if directory == "local":
        (Path("local") / "config.json").write_text("{}")  # Its time is another one: the update writes it again.
    seen = []
    replaced = Path.replace

    def replace_(self: Path, target: Path) -> Path:
        seen.append(Path(target).name)
        return replaced(self, target)

    monkeypatch.setattr(Path, "replace", replace_)
    with pytest.raises(IntegrityError, match=r"config\.json .* differs from the original"):
        list(hostile.follow("policy", directory, once=True, signed_by="own.pub"))
    assert "config.json" not in seen
    left = {path.name: path for path in Path(directory).iterdir() if not path.name.startswith(".ckstore")}
    assert left.keys() <= {"config.json", "model.safetensors"}
    assert (left["config.json"].read_text() == "{}") if directory == "local" else "config.json" not in left


def test_a_stream_gets_no_byte_before_the_comparison(hostile: ckstore.Store) -> None:
    out = io.BytesIO()
    with pytest.raises(IntegrityError, match="differs from the original"):
        hostile["policy"].write(out, include=["config.json"], signed_by="own.pub")
    assert not out.getvalue()
    hostile["policy"].write(out, include=["model.safetensors"], signed_by="own.pub")
    assert out.getvalue() == Path("model/model.safetensors").read_bytes()


def test_links_that_appear_after_the_check_are_refused(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that another process wrote during a read has the links of the one before."""
    stored = store["policy"]._stored
    row, document = stored.row, replace(stored.document, links=(("run.py", "config.json"),))
    monkeypatch.setattr(
        type(store._catalog), "version", lambda *_: dataclasses.replace(row, pack="0" * len(row.pack or ""))
    )
    monkeypatch.setattr(type(store._repository.resolver), "document", lambda *_: document)
    with pytest.raises(ChangedVersionError):
        stored._follow(row)


def test_certificates_of_an_authority(store: ckstore.Store) -> None:
    for name in ("root", "stranger"):
        key = private(Path(f"{name}.pem"))
        Path(f"{name}.crt").write_bytes(certificate(name, key, name, key, is_authority=True))
        own = private(Path("leaf.pem"))
        if name == "root":
            with Path("leaf.pem").open("ab") as file:
                file.write(certificate("leaf", own, name, key, is_authority=False))
            store.sign("policy", "leaf.pem")
    store["policy"].require_signed("root.crt")
    with pytest.raises(ckstore.IntegrityError):
        store["policy"].require_signed("stranger.crt")


@pytest.mark.parametrize("key", ["missing.pem", "own.pub", "config", "rsa.pem", "ed25519.pem"])
def test_keys_that_cannot_sign_are_refused(store: ckstore.Store, key: str) -> None:
    Path("config").write_text("{}")
    private(Path("rsa.pem"), rsa.generate_private_key(65537, 2048))
    private(Path("ed25519.pem"), ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(ckstore.UsageError, match=key):
        store.sign("policy", key)
    if key.startswith(("rsa", "ed")):
        with pytest.raises(ckstore.UsageError, match="neither a public key nor a certificate to check with; give one"):
            store["policy"].require_signed(Path(key).with_suffix(".pub"))


def test_the_command_line_signs_and_refuses(store: ckstore.Store, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> int:
        return program.run(["--store", "store", *arguments])

    assert run("metric", "policy", "--sign", "own.pem") == 0
    assert capsys.readouterr().err.endswith("\nVersion 2 is signed.\n")
    store.set_metrics("policy", {"kl": 1})
    assert run("metric", "policy", "--sign", "own.pem") == 0
    assert capsys.readouterr().err.endswith("Version 2 is signed.\n")
    assert run("metric", "policy", "loss=1", "--sign", "missing.pem") == 2
    assert "loss" not in store["policy"].metrics
    for key, code in (("own.pub", 0), ("other.pub", 4)):
        shutil.rmtree("out", ignore_errors=True)
        assert run("checkout", "policy", "-o", "out", "--signed-by", key) == code
        assert Path("out").exists() == (not code)
        assert run("verify", "policy", "--signed-by", key) == code
        assert run("follow", "policy", f"local-{key}", "--once", "--signed-by", key) == code
        assert run("checkout", "policy", "-o", "-", "--include", "*.json", "--signed-by", key) == code
    assert run("checkout", "2..2", "-o", "several") == 0
    for key, code in (("own.pub", 0), ("other.pub", 4)):  # Of files that are there already.
        assert run("checkout", "2..2", "-o", "several", "--signed-by", key) == code
