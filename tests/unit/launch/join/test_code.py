"""Join codes: what is written comes back, and what was mistyped is found out."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.launch.transports.join import code as codes
from torchmuster.launch.transports.join.code import JoinCode

EXAMPLE = JoinCode(
    place=3, port=29400, addresses=("192.168.1.20",), token=bytes(range(16)), fingerprint=b"f" * 16
)

some_codes = st.builds(
    JoinCode,
    place=st.integers(0, codes.MOST_PLACES - 1),
    port=st.integers(1, 65535),
    addresses=st.lists(st.ip_addresses().map(str), min_size=1, max_size=3).map(tuple),
    token=st.binary(min_size=16, max_size=16),
    fingerprint=st.binary(min_size=16, max_size=16),
)


@given(some_codes)
def test_what_is_written_comes_back(code: JoinCode) -> None:
    assert codes.decode_code(codes.encode_code(code)) == code
    assert codes.decode_code(codes.encode_code(code.short())) == code.short()


@given(some_codes, st.randoms(use_true_random=False))
def test_case_blanks_and_dashes_do_not_matter(code: JoinCode, chance: random.Random) -> None:
    letters = codes.encode_code(code).replace("-", "")
    sloppy = "".join(
        (chance.choice([letter.lower(), letter]) + chance.choice(["", "", " ", "-", "\n", "—"]))
        for letter in letters
    )
    assert codes.decode_code(sloppy) == code


def test_letters_that_look_like_digits_are_read_as_digits() -> None:
    text = codes.encode_code(EXAMPLE)
    assert "0" in text
    assert "1" in text
    assert codes.decode_code(text.replace("0", "O").replace("1", "l")) == EXAMPLE
    assert codes.decode_code(text.replace("0", "o").replace("1", "I")) == EXAMPLE


@given(some_codes, st.data())
def test_a_wrong_letter_is_found_wherever_it_is(code: JoinCode, data: st.DataObject) -> None:
    letters = list(codes.encode_code(code).replace("-", ""))
    place = data.draw(st.integers(0, len(letters) - 1))
    wrong = data.draw(st.sampled_from("0123456789ABCDEFGHJKMNPQRSTVWXYZ"))
    if letters[place] == wrong:
        return
    letters[place] = wrong
    with pytest.raises(Impossible, match=r"typing error|incomplete"):
        codes.decode_code("".join(letters))


@given(some_codes, st.data())
def test_two_letters_that_changed_places_are_found(code: JoinCode, data: st.DataObject) -> None:
    letters = list(codes.encode_code(code).replace("-", ""))
    place = data.draw(st.integers(0, len(letters) - 2))
    first, second = letters[place : place + 2]
    if first == second:
        return
    letters[place : place + 2] = second, first
    with pytest.raises(Impossible, match=r"typing error|incomplete"):
        codes.decode_code("".join(letters))


@given(some_codes, st.data())
def test_a_part_of_a_code_is_called_cut_off(code: JoinCode, data: st.DataObject) -> None:
    text = codes.encode_code(code)
    part = text[: data.draw(st.integers(1, len(text) - 2))]
    with pytest.raises(Impossible, match="incomplete") as caught:
        codes.decode_code(part)
    assert "nothing was sent" in caught.value.why
    assert "paste the whole code" in caught.value.fix


def test_a_code_that_was_pasted_twice_is_refused() -> None:
    with pytest.raises(Impossible, match="typing error"):
        codes.decode_code(codes.encode_code(EXAMPLE) * 2)


@given(st.text())
def test_no_text_is_worse_than_a_refusal(text: str) -> None:
    with pytest.raises(Impossible):
        codes.decode_code(text)


def test_a_letter_that_no_code_has_is_named(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as caught:
        codes.decode_code(codes.encode_code(EXAMPLE)[:-1] + "$")
    assert caught.value.why.startswith("'$' ")
    assert str(caught.value) == snapshot


def test_no_code_at_all_says_what_to_paste() -> None:
    with pytest.raises(Impossible, match="the join code is empty"):
        codes.decode_code("  - ")


def test_a_code_of_a_newer_version_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "VERSION", 2)
    newer = codes.encode_code(EXAMPLE)
    monkeypatch.undo()
    with pytest.raises(Impossible, match=r"version 2, .* version 1"):
        codes.decode_code(newer)


def test_the_token_is_never_shown() -> None:
    assert "token" not in repr(EXAMPLE)
    assert repr(EXAMPLE.token)[2:-1] not in repr(EXAMPLE)


def test_lengths_that_people_have_to_paste() -> None:
    assert len(codes.encode_code(EXAMPLE)) <= 80
    assert len(codes.encode_code(EXAMPLE.short())) <= 70


def test_a_code_has_room_for_three_addresses() -> None:
    with pytest.raises(ValueError, match="at most 3 addresses"):
        codes.encode_code(
            JoinCode(
                place=1, port=1, addresses=("::1",) * 4, token=b"t" * 16, fingerprint=b"f" * 16
            )
        )
