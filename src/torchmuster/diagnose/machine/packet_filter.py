"""What the kernel's packet filter does with a new connection from another machine.

The rules of iptables (``iptables -S``) and of nftables (``nft -j list ruleset``) are read into the same
words and followed as the kernel would. Where a rule depends on what is not known here (who calls, chance),
it is taken to let in and not to close: a firewall that is only half understood is not complained of.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ACCEPT, DROP, REJECT, RETURN = "accept", "drop", "reject", "return"
_CLOSES = (DROP, REJECT)
_DEEPEST = 20


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule: whom it concerns, and what is done with them.

    ``ports`` None means all. ``certain`` is False if it also depends on something that is not known here.
    """

    target: str
    text: str
    ports: tuple[tuple[int, int], ...] | None = None
    concerns_new: bool = True
    certain: bool = True
    goes_for_good: bool = False

    def concerns(self, port: int) -> bool:
        """Say whether a new connection to a port may be meant."""
        meant = self.ports is None or any(first <= port <= last for first, last in self.ports)
        return meant and self.concerns_new


@dataclass(kw_only=True)
class Table:
    """Chains of rules that know each other; ``entries`` are those that packets enter by, with policies."""

    name: str
    chains: dict[str, list[Rule]] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Closed:
    """What keeps others from a port: where, how (drop or reject), and the rule that does it."""

    table: str
    chain: str
    verdict: str
    rule: str


def closed(tables: Sequence[Table], port: int) -> Closed | None:
    """Return what keeps others from a port; None if nothing does."""
    for table in tables:
        for entry, policy in table.entries.items():
            verdict, rule = _follow(table.chains, entry, port, 0) or (policy, f"policy {policy}")
            if verdict in _CLOSES:
                return Closed(table=table.name, chain=entry, verdict=verdict, rule=rule)
    return None


def _follow(
    chains: Mapping[str, Sequence[Rule]], chain: str, port: int, depth: int
) -> tuple[str, str] | None:
    """Return the verdict on a new connection and the rule that spoke it; None if none did."""
    doubtful = False  # whether the kernel may have left the chain before this rule
    for rule in chains.get(chain, ()) if depth < _DEEPEST else ():
        if not rule.concerns(port):
            continue
        found: tuple[str, str] | None = (rule.target, rule.text)
        if rule.target in chains:
            found = _follow(chains, rule.target, port, depth + 1)
        elif rule.target not in (ACCEPT, RETURN, *_CLOSES):
            continue  # it only counts or writes to a log
        leaves = rule.target == RETURN or rule.goes_for_good
        if found and (found[0] == ACCEPT or (found[0] in _CLOSES and rule.certain)):
            return None if doubtful and found[0] != ACCEPT else found
        if leaves and rule.certain:
            return None
        doubtful |= leaves
    return None


# ---- iptables

_KNOWN = {"-A", "-m", "-p", "-i", "-j", "-g", "--dport", "--dports", "--ctstate", "--state"}
_KNOWN |= {"--comment", "--reject-with", "--tcp-flags", "--dst-type", "--ctstatus"}
_NEW_CONNECTION = ["--tcp-flags", "FIN,SYN,RST,ACK", "SYN"]
_LAST_PORT = 65535
_TARGETS = {"ACCEPT": ACCEPT, "DROP": DROP, "REJECT": REJECT, "RETURN": RETURN}


def from_iptables(listing: str) -> Table:
    """Read what ``iptables -S`` prints."""
    table = Table(name="ip filter")
    for line in listing.splitlines():
        words = shlex.split(line)
        if words[:2] == ["-P", "INPUT"]:
            table.entries["INPUT"] = _TARGETS.get(words[2], ACCEPT)
        elif words[:1] == ["-A"] and len(words) > 1:
            table.chains.setdefault(words[1], []).append(_iptables_rule(words, line))
        elif words[:1] == ["-N"] and len(words) > 1:
            table.chains.setdefault(words[1], [])
    return table


def _iptables_rule(words: Sequence[str], line: str) -> Rule:
    options: dict[str, str] = {}
    negated = set()
    for before, option, value in zip(["", *words], words, [*words[1:], ""], strict=False):
        if option.startswith("-"):
            options[option] = value
            negated |= {option} if before == "!" else set()
    listed = options.get("--dport", options.get("--dports"))
    ports = None if listed is None else list(_ranges(listed))
    if ports is not None and negated & {"--dport", "--dports"}:
        ports = list(_others(ports))
    from_elsewhere = "-i" in negated and options["-i"] == "lo"
    odd = negated - {"--dport", "--dports"} - ({"-i"} if from_elsewhere else set())
    flags = words.index("--tcp-flags") if "--tcp-flags" in words else None
    odd |= {"--tcp-flags"} if flags and list(words[flags : flags + 3]) != _NEW_CONNECTION else set()
    target = options.get("-j", options.get("-g", ""))
    return Rule(
        target=_TARGETS.get(target, target),
        text=line,
        ports=None if ports is None else tuple(ports),
        concerns_new=bool(odd) or from_elsewhere or _may_be_new(options),
        certain=set(options) <= _KNOWN and not odd,
        goes_for_good="-g" in options,
    )


def _may_be_new(options: Mapping[str, str]) -> bool:
    """Say whether a rule may be about a new TCP connection from another machine to this one."""
    states = options.get("--ctstate", options.get("--state", "NEW")).split(",")
    return (
        "NEW" in states
        and options.get("-p", "tcp") in ("tcp", "all", "6")
        and options.get("-i") != "lo"
        and options.get("--dst-type", "LOCAL") == "LOCAL"
        and "--ctstatus" not in options  # of connections that are passed on to containers
    )


def _ranges(listed: str) -> Iterator[tuple[int, int]]:
    for part in listed.split(","):
        first, _, last = part.partition(":")
        if first.isdecimal():
            yield int(first), int(last or first)


def _others(ports: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Return the ranges between these."""
    free = 0
    for first, last in sorted(ports):
        if first > free:
            yield free, first - 1
        free = max(free, last + 1)
    if free <= _LAST_PORT:
        yield free, _LAST_PORT


# ---- nftables


def from_nftables(listing: str) -> list[Table]:
    """Read what ``nft -j list ruleset`` prints."""
    try:
        items = json.loads(listing)["nftables"]
    except (ValueError, KeyError, TypeError):
        return []
    tables: dict[str, Table] = {}
    for item in items:
        (kind, content), *_ = item.items() if item else [("", {})]
        if kind not in ("chain", "rule") or content.get("family") not in ("ip", "inet"):
            continue
        name = f"{content['family']} {content['table']}"
        table = tables.setdefault(name, Table(name=name))
        if kind == "rule":
            table.chains.setdefault(content["chain"], []).append(_nftables_rule(content))
            continue
        table.chains.setdefault(content["name"], [])
        if content.get("hook") == "input" and content.get("type") == "filter":
            table.entries[content["name"]] = content.get("policy", ACCEPT)
    return list(tables.values())


def _nftables_rule(content: Mapping[str, Any]) -> Rule:
    rule: dict[str, Any] = {"target": "", "certain": True, "concerns_new": True, "ports": None}
    shown = []
    for part in content.get("expr", ()):
        (kind, value), *_ = part.items()
        if kind == "match":
            shown.append(_nftables_match(value, rule))
        elif kind in (ACCEPT, DROP, REJECT, RETURN):
            rule["target"] = kind
        elif kind in ("jump", "goto"):
            rule["target"], rule["goes_for_good"] = value["target"], kind == "goto"
        elif kind not in ("counter", "log"):
            rule["certain"] = False
    text = f"{content['chain']}: {' '.join([*shown, rule['target']])}"
    return Rule(**rule, text=text)


def _nftables_match(match: Mapping[str, Any], rule: dict[str, Any]) -> str:
    """Note what a match means for a new TCP connection, and return it as text."""
    left, right = match["left"], match["right"]
    ((kind, about),) = left.items() if isinstance(left, dict) else [("", {})]
    about = about if isinstance(about, dict) else {}
    what = about.get("field") or about.get("key") or kind
    values = [str(one) for one in _values(right)]
    plain = match.get("op") in ("==", "in")
    if what == "dport" and about.get("protocol") in ("tcp", "th") and plain:
        rule["ports"] = tuple(_port_pairs(right))
    elif what == "dport" and about.get("protocol") == "udp":
        rule["concerns_new"] = False
    elif what == "state" and plain:
        rule["concerns_new"] &= "new" in values
    elif what == "status":  # of connections that are passed on to containers
        rule["concerns_new"] = False
    elif what in ("l4proto", "protocol", "nexthdr") and plain:
        rule["concerns_new"] &= "tcp" in values
    elif what in ("iifname", "iif") and (plain or values == ["lo"]):
        rule["concerns_new"] &= values != ["lo"] or not plain
    else:
        rule["certain"] = False
    return f"{what} {','.join(values)}"


def _values(right: Any) -> list[Any]:
    if isinstance(right, dict) and "set" in right:
        right = right["set"]
    return right if isinstance(right, list) else [right]


def _port_pairs(right: Any) -> Iterator[tuple[int, int]]:
    for one in _values(right):
        if isinstance(one, dict) and "range" in one:
            first, last = one["range"]
            yield int(first), int(last)
        elif re.fullmatch(r"\d+", str(one)):
            yield int(one), int(one)
