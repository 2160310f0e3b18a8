"""Join codes and certificates: what is written comes back, and what was changed opens nothing."""

import ssl
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.errors import Impossible
from torchmuster.launch.transports.join import certificate
from torchmuster.launch.transports.join import code as codes
from torchmuster.launch.transports.join.code import JoinCode

EXAMPLE = JoinCode(port=29400, addresses=("192.168.1.20",), secret=bytes(range(16)), pin=b"f" * 16)

some_codes = st.builds(
    JoinCode,
    port=st.integers(1, 65535),
    addresses=st.lists(st.ip_addresses().map(str), min_size=1, max_size=3).map(tuple),
    secret=st.binary(min_size=16, max_size=16),
    pin=st.binary(min_size=16, max_size=16),
)


@given(some_codes)
def test_what_is_written_comes_back(code: JoinCode) -> None:
    text = codes.encode_code(code)
    assert codes.decode_code(f" {text}\n") == code
    assert not text.startswith("-")  # it may be an argument of muster join


@given(some_codes, st.integers(1, 100))
def test_a_part_of_a_code_is_refused(code: JoinCode, length: int) -> None:
    text = codes.encode_code(code)
    with pytest.raises(Impossible, match="not a join code"):
        codes.decode_code(text[: min(length, len(text) - 2)])


@pytest.mark.parametrize(
    "text", ["", " ", "CODE", "é" * 80, "A" * 87, codes.encode_code(EXAMPLE) * 2]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(Impossible, match="not a join code"):
        codes.decode_code(text)


def test_nodes_that_share_a_text_know_secret_and_certificate_in_advance() -> None:
    keys = [codes.shared_key(text) for text in ("battery staple", "battery stable")]
    pins = [certificate.make_certificate(key.seed).pin for key in keys]
    assert pins == [certificate.pin_from_seed(key.seed) for key in keys]
    assert pins[0] != pins[1]
    assert keys[0].secret != keys[1].secret


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
