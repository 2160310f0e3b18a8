"""The judges of the checks of GPUs: good facts are confirmed, each kind of bad facts is refuted."""

import copy
from typing import Any

import pytest

from torchmuster.selftest.check import Facts
from torchmuster.selftest.checks import devices

JUDGES = {check.id: check.judge for check in devices.CHECKS}
_A, _B = "GPU-0a000000-0000-0000-0000-000000000000", "GPU-0b000000-0000-0000-0000-000000000000"


def _ours(uuid: str, index: int) -> Facts:
    return {
        "uuid": uuid,
        "name": "NVIDIA H100",
        "memory_mib": 81559.0,
        "pci": f"00000000:{index + 7:02X}:00.0",
        "power_limit_w": 700.0,
        "index": index,
        "driver": "570.86.15",
    }


def _theirs(uuid: str, index: int) -> Facts:
    return {
        **_ours(uuid, index),
        "memory_mib": "81559",
        "power_limit_w": "700.00",
        "index": str(index),
    }


def _selected(kind: str, uuid: str, seen: list[Facts]) -> Facts:
    return {"kind": kind, "number": "0", "uuid": uuid, "pci": "0000:07:00.0", "seen": seen}


def _samples(*idle_s: float | None) -> list[Facts]:
    return [
        {"at_s": 100.0 + at, "idle_s": one, "gpu_percent": None, "process_percent": 100}
        for at, one in enumerate(idle_s)
    ]


def _round(**scraped: float) -> Facts:
    values = {"used_bytes": 1e9, "usable_bytes": 8e10, "temperature_c": 40.0, "energy_j": 1e6}
    return {
        "before": {_A: values},
        "scraped": {_A: {**values, **scraped}},
        "after": {_A: {**values, "energy_j": 1e6 + 50}},
    }


_REFUSED = {"got": [], "error": "DevicesBusy", "why": "claimed by a (pid 7, cat)", "user_id": 60000}
_GOT = {"got": [_B], "error": "", "why": "", "user_id": 60000}

# Two blocks that are alive at the same time in each pool; the third one takes the place of a freed one.
_HISTORY = [
    ["alloc", 1, 512, 0],
    ["alloc", 2, 30 << 20, 0],
    ["free_completed", 2, 30 << 20, 0],
    ["alloc", 2, 25 << 20, 0],
    ["free_completed", 9, 512, 0],  # allocated before the recording
]
_ALLOCATOR = {
    "expandable_segments": True,
    "reserved_before": 0,
    "max_reserved": 42 << 20,
    "history": _HISTORY,
}
_NOTE = {"name": "clock-unsynchronized", "status": "note", "what": "the clock"}
_FAILURE = {"name": "socket-interface", "status": "failure", "what": "cannot work"}
_CASES = [
    {"work": "killed", "expected": "killed-sigkill", "rules": ["killed-sigkill"], "error": "x"},
    {
        "work": "same-gpu",
        "expected": "duplicate-gpu",
        "rules": ["duplicate-gpu", "nccl-invalid-usage"],
        "error": "x",
    },
]

GOOD: dict[str, list[Facts]] = {
    "allocator": [_ALLOCATOR, {**_ALLOCATOR, "reserved_before": 2 << 20, "max_reserved": 44 << 20}],
    "doctor": [
        {"subjects": ["torch"], "findings": []},
        {"subjects": ["torch"], "findings": [_NOTE, {**_NOTE, "status": "warning"}]},
    ],
    "error-texts": [{"cases": _CASES}, {"cases": _CASES[:1]}],
    "inventory": [
        {
            "ours": [_ours(_A, 0), _ours(_B, 1)],
            "theirs": [_theirs(_A, 0), _theirs(_B, 1)],
            "links": [{"a": 0, "b": 1, "ours": "NV18", "theirs": "NV18"}],
        },
        {  # values that a GPU does not have
            "ours": [{**_ours(_A, 0), "power_limit_w": None}],
            "theirs": [{**_theirs(_A, 0), "power_limit_w": "[N/A]", "pci": "0000:07:00.0"}],
            "links": [],
        },
    ],
    "uuid-selection": [
        {"gpus": [_selected("cuda", _A, [{"uuid": _A.removeprefix("GPU-"), "pci": ""}])]},
        {
            "gpus": [
                _selected("rocm", "GPU-1234", [{"uuid": "3132", "pci": "00000000:07:00.0"}]),
                _selected("cuda", "MIG-1234", [{"uuid": "1234", "pci": ""}]),
            ]
        },
    ],
    "cuda-started": [{"before": False, "imported": False, "after": True}],
    "idle-process": [
        {"samples": _samples(None, 0.0, 0.0, 0.0)},
        {"samples": _samples(None, 1.0, 0.0, 1.0)},  # one sample of the driver came late
    ],
    "claims": [
        {"holder": 7, "same": _REFUSED, "other": _GOT, "second_user": True},
        {"holder": 7, "same": _REFUSED, "other": None, "second_user": False},
    ],
    "exporter": [
        {"rounds": [_round(energy_j=1e6 + 20)]},
        {"rounds": [_round(used_bytes=9e9), _round()]},  # it changed while it was read
    ],
}


def _with(facts: Facts, path: str, value: Any) -> Facts:
    """Return a copy of facts in which one value is another."""
    changed = copy.deepcopy(facts)
    *way, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    inner: Any = changed
    for part in way:
        inner = inner[part]
    inner[last] = value
    return changed


_WRONG_INVENTORY: list[tuple[str, Any]] = [
    ("ours/0/memory_mib", 40779.5),
    ("ours/0/memory_mib", None),
    ("ours/1/name", "NVIDIA A100"),
    ("ours/1/pci", "00000000:99:00.0"),
    ("ours/1/pci", None),
    ("ours/1/power_limit_w", 350.0),
    ("ours/0/index", 1),
    ("ours/0/driver", None),
    ("ours/0/uuid", "GPU-other"),
    ("ours", []),
    ("theirs", []),
    ("links/0/ours", "SYS"),
    ("links/0/ours", None),
]
_WRONG_ALLOCATOR: list[Facts] = [
    {"expandable_segments": False},
    {"expandable_segments": None},
    {"max_reserved": 30 << 20},
    {"max_reserved": 60 << 20},
    {"history": []},
    {"history": [], "max_reserved": 0},
]
BAD: list[tuple[str, Facts]] = [
    ("inventory", _with(GOOD["inventory"][0], path, value)) for path, value in _WRONG_INVENTORY
]
BAD += [("inventory", {"ours": [], "theirs": [], "links": []})]
BAD += [
    ("uuid-selection", _with(GOOD["uuid-selection"][0], "gpus/0/seen", seen))
    for seen in (
        [],
        [{"uuid": _B, "pci": "0000:07:00.0"}],
        [{"uuid": _A, "pci": ""}, {"uuid": _B, "pci": ""}],
    )
]
BAD += [
    ("uuid-selection", _with(GOOD["uuid-selection"][1], "gpus/0/seen/0/pci", pci))
    for pci in ("", "0000:08:00.0")
]
BAD += [("uuid-selection", {"gpus": []})]
BAD += [
    ("cuda-started", {**GOOD["cuda-started"][0], name: value})
    for name, value in (("before", True), ("imported", True), ("after", False))
]
BAD += [
    ("idle-process", {"samples": _samples(*idle)})
    for idle in ((None, 1.0, 2.0, 3.0), (None, None), (None,))
]
BAD += [
    ("claims", _with(GOOD["claims"][0], path, value))
    for path, value in [
        ("same", _GOT),
        ("same/error", "Impossible"),
        ("same/why", "a lock that cannot be opened: Permission denied"),
        ("same/why", "claimed by b (pid 77, cat)"),
        ("other", _REFUSED),
    ]
]
BAD += [
    ("exporter", {"rounds": [_round(**values)] * 3})
    for values in (
        {"used_bytes": 2e9},
        {"usable_bytes": 16e10},
        {"temperature_c": 50.0},
        {"energy_j": 1e6 + 100},
        {"energy_j": 1e6 - 100},
    )
]
BAD += [
    ("exporter", {"rounds": [{**_round(), "scraped": {}}]}),
    ("exporter", {"rounds": [{**_round(), "scraped": {_A: {}}}]}),
    ("exporter", {"rounds": [{"before": {}, "scraped": {}, "after": {}}]}),
]
BAD += [("allocator", {**_ALLOCATOR, **changed}) for changed in _WRONG_ALLOCATOR]
BAD += [
    ("doctor", {"subjects": ["torch"], "findings": [_NOTE, _FAILURE]}),
    ("doctor", {"subjects": [], "findings": []}),
    ("error-texts", {"cases": []}),
    ("error-texts", {"cases": [*_CASES, {**_CASES[0], "rules": []}]}),
    ("error-texts", {"cases": [{**_CASES[1], "rules": ["nccl-invalid-usage", "duplicate-gpu"]}]}),
]


@pytest.mark.parametrize(
    ("check", "facts"), [(check, facts) for check, many in GOOD.items() for facts in many]
)
def test_good_facts_are_confirmed(check: str, facts: Facts) -> None:
    found = JUDGES[check](facts)
    assert found.confirmed, found.says


@pytest.mark.parametrize(("check", "facts"), BAD)
def test_bad_facts_are_refuted(check: str, facts: Facts) -> None:
    found = JUDGES[check](facts)
    assert not found.confirmed, found.says
    assert found.says


def test_every_check_has_good_and_bad_facts() -> None:
    assert GOOD.keys() == {check for check, _ in BAD} == JUDGES.keys()


_TOPOLOGY = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV4\tSYS\t0-7\nGPU1\tNV4\t X \tPIX\t\n"


@pytest.mark.parametrize(
    ("text", "links"),
    [
        (_TOPOLOGY, {(0, 1): "NV4", (1, 0): "NV4"}),
        (_TOPOLOGY.replace("NV4", "???"), {}),
        ("", {}),
        ("Failed to query the topology\nGPU0\tNV4\n", {}),
        ("\tGPU0\tGPU1\nGPU0\nGPU1\tSYS\n", {(1, 0): "SYS"}),
    ],
)
def test_the_topology_of_nvidia_smi_is_parsed(text: str, links: dict[Any, str]) -> None:
    assert devices.parse_topology(text) == links


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:1B:00.0", (0, 0x1B, 0, 0)),
        ("0000:1b:00.0", (0, 0x1B, 0, 0)),
        ("", ()),
        ("none", ()),
    ],
)
def test_pci_addresses_are_compared_as_numbers(text: str, address: tuple[int, ...]) -> None:
    assert devices.pci_address(text) == address
