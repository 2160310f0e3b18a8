"""The words of ``--hosts``: what is understood, and what never reaches ssh."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.errors import Impossible
from torchmuster.launch.job import Host, parse_hosts


def hosts(*words: str) -> list[tuple[str, int | None]]:
    return [(host.name, host.ranks) for host in parse_hosts(words)]


def test_names_counts_users_and_addresses() -> None:
    assert hosts("a,b:4,c") == [("a", None), ("b", 4), ("c", None)]
    assert hosts("a", "b:4, c ,", "") == [("a", None), ("b", 4), ("c", None)]
    assert hosts("ana@gpu-1.example.org:8") == [("ana@gpu-1.example.org", 8)]
    assert hosts("10.0.0.3:2,10.0.0.4") == [("10.0.0.3", 2), ("10.0.0.4", None)]
    assert hosts("my_host") == [("my_host", None)]


def test_ipv6_addresses_stand_in_brackets_which_ssh_does_not_know() -> None:
    written = "[fd00::1]:2,[fe80::1%eth0],root@[::1]:1"
    assert hosts(written) == [("fd00::1", 2), ("fe80::1%eth0", None), ("root@::1", 1)]
    assert ",".join(str(host) for host in parse_hosts([written])) == written


def test_order_is_kept_and_written_again_as_it_was() -> None:
    assert [str(host) for host in parse_hosts(["c,a:2,b"])] == ["c", "a:2", "b"]
    assert parse_hosts([]) == ()
    assert Host(name="a") == Host(name="a", ranks=None)


@pytest.mark.parametrize(
    "word",
    [
        "-oProxyCommand=touch /tmp/owned",
        "-oProxyCommand=x:2",
        "--",
        "-v",
        "a;reboot",
        "a b",
        "$(reboot)",
        "`id`",
        "a|b",
        "a&b",
        "a>b",
        "../a",
        "a/b",
        "a\nb",
        "a\x00",
        "@a",
        "a@b@c",
        "a@-oProxyCommand",
        "-a@b",
        "ä",
        "a:0",
        "a:-1",
        "a:4097",
        "a:x",
        "a:1:2",
        "fd00::1",
        "[fd00::1",
        "[not-hex]",
        "[::1]x",
        ":4",
        "a:²",
    ],
)
def test_what_is_not_a_host_is_refused_by_name(word: str) -> None:
    with pytest.raises(Impossible) as caught:
        parse_hosts([f"good,{word}"])
    assert repr(word.strip()) in caught.value.what
    assert caught.value.why
    assert caught.value.fix.startswith("--hosts a,b:4")


@given(st.text(max_size=30))
def test_nothing_that_ssh_or_a_shell_could_take_for_more_than_a_name_gets_through(
    text: str,
) -> None:
    try:
        found = parse_hosts([text])
    except Impossible:
        return
    for host in found:
        assert not host.name.startswith("-")
        assert host.name.isascii()
        assert not set(host.name) & set(" \t\r\n;|&$`'\"\\<>(){}*?!#~/=,")


def test_a_host_named_twice_is_refused_with_the_right_way_to_write_it() -> None:
    with pytest.raises(Impossible) as caught:
        parse_hosts(["a,b,a"])
    assert caught.value.what == "host 'a' is listed more than once"
    assert caught.value.fix == "--hosts a:2"
