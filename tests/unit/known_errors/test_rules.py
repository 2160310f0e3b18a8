"""The rules themselves: whole, findable, and with texts that can be filled in."""

import re
import string

from torchmuster.known_errors.rule import Role, Rule, all_rules, expression, in_small_letters

GIVEN = {"host"}


def every(rule: Rule) -> list[str]:
    return [*rule.patterns, *rule.unless, *rule.details]


def test_a_rule_is_whole() -> None:
    for rule in all_rules():
        assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)+|segfault", rule.name)
        assert rule.patterns, rule.name
        assert rule.what, rule.name
        assert "\n" not in rule.what
        assert rule.confirm, rule.name
        assert rule.fix, rule.name
        assert not rule.what.endswith(".")


def test_no_pattern_finds_itself_in_nothing() -> None:
    for rule in all_rules():
        for pattern in every(rule):
            assert not expression(pattern).search(""), pattern
            assert not expression(pattern).search("step 7 loss 0.5\nsaved checkpoint-7 in 3 s\n"), (
                pattern
            )


def test_what_is_to_be_filled_in_can_be_found() -> None:
    for rule in all_rules():
        found = GIVEN.union(
            *(expression(one).groupindex for one in (*rule.patterns, *rule.details))
        )
        wanted = set(re.findall(r"\{([a-z]+)\}", rule.what + rule.why + rule.confirm + rule.fix))
        assert wanted <= found, rule.name
        assert found - GIVEN <= wanted, rule.name


def test_what_a_group_takes_is_plain() -> None:
    """It ends in commands that people copy."""
    for rule in all_rules():
        for pattern in (*rule.patterns, *rule.details):
            for taken in re.findall(r"\(\?P<\w+>((?:[^()]|\([^()]*\))*)\)", pattern):
                outside_of_sets = re.sub(r"\[[^\]]+\]|\\.", "", taken)
                assert "." not in outside_of_sets, pattern
                assert "[^" not in taken, pattern
                assert not {"$", ";", "`", "&", "'"} & set(
                    "".join(re.findall(r"\[([^\]]+)\]", taken))
                )


def test_every_role_is_used() -> None:
    assert {role for rule in all_rules() for role in [rule.role]} == set(Role)


def test_small_letters_keep_their_places() -> None:
    text = string.printable + "ÄİßΣ"
    assert len(in_small_letters(text)) == len(text)
    assert in_small_letters("NCCL WARN") == "nccl warn"


def test_a_pattern_is_not_particular_about_case_and_space() -> None:
    found = expression(r"Port (?P<port>\d+) is\S? taken")
    for text in ("port 5 is taken", "PORT  5\n   IS, taken"):
        match = found.search(in_small_letters(text))
        assert match
        assert match["port"] == "5"
    assert expression(r"a ?b").search("ab")
    assert expression("begin…end").search("begin\nand so on\nend")
    assert not expression("begin…end").search(f"begin{'x' * 500}end")
