"""What follows from a cause that is named needs no line of its own."""

from dataclasses import replace

from torchmuster.diagnose.group import without_consequences
from torchmuster.finding import Finding, Status


def finding(name: str, what: str = "") -> Finding:
    return Finding(name=name, status=Status.WARNING, what=what or name)


def test_a_slow_pair_of_ranks_is_told_by_its_slow_link() -> None:
    link, pair = finding("slow-link"), finding("slow-pair")
    assert without_consequences([pair, link]) == [link]
    assert without_consequences([pair]) == [pair]


def test_a_failed_rank_says_best_why_the_others_wait() -> None:
    failed, hangs = finding("rank-failed"), finding("collective-hangs")
    assert without_consequences([hangs, failed]) == [failed]


def test_a_cause_elsewhere_hides_nothing() -> None:
    used = replace(finding("slow-pair"), hosts=("node2",))
    elsewhere = replace(finding("slow-link", "slow"), hosts=("node20",))
    assert without_consequences([elsewhere, used]) == [elsewhere, used]
    there = replace(finding("slow-link", "slow"), hosts=("node1", "node2"))
    assert without_consequences([there, used]) == [there]
