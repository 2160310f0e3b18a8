"""The certificate of one run: its own each time, on disk for a moment only, known by fingerprint."""

import builtins
import ssl
import tempfile
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.launch.transports.join import certificate


def test_each_run_has_a_certificate_of_its_own() -> None:
    assert certificate.make_certificate().fingerprint != certificate.make_certificate().fingerprint


def test_nodes_that_share_a_seed_know_the_certificate_in_advance() -> None:
    seeds = [bytes([number]) * certificate.SEED_BYTES for number in (1, 2)]
    made = [certificate.make_certificate(seed).fingerprint for seed in seeds]
    assert made == [certificate.fingerprint_from(seed) for seed in seeds]
    assert made[0] != made[1]


def test_the_key_is_on_disk_for_a_moment_for_its_owner_alone_and_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[tuple[int, bytes]] = []

    real = ssl.SSLContext.load_cert_chain

    def look_and_load(self: ssl.SSLContext, path: str, password: bytes) -> None:
        seen.append((Path(path).stat().st_mode & 0o777, Path(path).read_bytes()))
        real(self, path, password=password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", look_and_load)
    certificate.make_certificate()
    ((mode, content),) = seen
    assert mode == 0o600
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in content
    assert list(tmp_path.iterdir()) == []


def test_both_sides_speak_tls_1_3_only() -> None:
    assert certificate.make_certificate().context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert certificate.client_context().minimum_version is ssl.TLSVersion.TLSv1_3


def test_only_the_certificate_with_the_fingerprint_is_known() -> None:
    der = b"a certificate"
    assert certificate.is_known(der, certificate.fingerprint_of(der))
    assert not certificate.is_known(b"another", certificate.fingerprint_of(der))
    assert not certificate.is_known(None, certificate.fingerprint_of(der))


def test_without_cryptography_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "cryptography":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Impossible) as caught:
        certificate.make_certificate()
    assert caught.value.what == snapshot
    assert caught.value.fix == "pip install cryptography"
