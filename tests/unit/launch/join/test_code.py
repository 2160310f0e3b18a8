"""Join codes: what is written comes back, and what was changed opens nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.errors import Impossible
from torchmuster.launch.transports.join import code as codes
from torchmuster.launch.transports.join.code import JoinCode

EXAMPLE = JoinCode(
    port=29400, addresses=("192.168.1.20",), secret=bytes(range(16)), fingerprint=b"f" * 16
)

some_codes = st.builds(
    JoinCode,
    port=st.integers(1, 65535),
    addresses=st.lists(st.ip_addresses().map(str), min_size=1, max_size=3).map(tuple),
    secret=st.binary(min_size=16, max_size=16),
    fingerprint=st.binary(min_size=16, max_size=16),
)


@given(some_codes)
def test_what_is_written_comes_back(code: JoinCode) -> None:
    text = codes.encode_code(code)
    assert codes.decode_code(f" {text}\n") == code
    assert not text.startswith("-")  # it is an argument of muster join


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


def test_the_secret_is_not_shown() -> None:
    assert "secret" not in repr(EXAMPLE)


def test_addresses_that_others_cannot_use_are_left_out() -> None:
    addresses = ["fe80::1%eth0", "127.0.0.1", "10.0.0.1", "fd00::1", "10.0.1.1", "10.0.2.1"]
    assert codes.addresses_for_code(addresses) == ("10.0.0.1", "fd00::1", "10.0.1.1")
    assert codes.addresses_for_code(["127.0.0.1"]) == ("127.0.0.1",)
