"""Hardware as it is written: counts, cluster files, what a check measured, this machine."""

import dataclasses
import json
import textwrap
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.devices.model import Device, DeviceKind, LinkKind, Node
from torchmuster.devices.model import Link as DeviceLink
from torchmuster.errors import ConfigError, Impossible
from torchmuster.plan.hardware import cluster_file, here
from torchmuster.plan.hardware import cluster_file as hardware_given
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.units import GiB


def parsed(text: str) -> Hardware:
    return hardware_given.parse_hardware(text)


@pytest.mark.parametrize(
    ("text", "words", "cards"),
    [
        ("H100", "1 x H100", 1),
        ("8xH100", "8 x H100", 8),
        ("2x8xA100-80GB", "2 machines with 8 x A100-80GB each", 16),
        ("3 x 4 x v100-32gb", "3 machines with 4 x V100-32GB each", 12),
        ("8x4090", "8 x RTX-4090", 8),
        ("16384xH100", "2048 machines with 8 x H100 each", 16384),
        ("12xH100", "2 machines with 6 x H100 each", 12),
        ("8xGH200", "8 machines with 1 x GH200 each", 8),
    ],
)
def test_counts_of_cards(text: str, words: str, cards: int) -> None:
    hardware = parsed(text)
    assert hardware_given.describe_hardware(hardware) == words
    assert hardware.cards == cards


def test_what_was_not_said_is_told(snapshot: SnapshotAssertion) -> None:
    for hardware in ("16384xH100", "8xGH200", "2xa100", "8xB200"):
        assert parsed(hardware).assumed == snapshot(name=hardware)
    assert parsed("8xH100").assumed == ()


def test_cards_without_a_network_of_their_own_share_the_machine_s() -> None:
    assert parsed("2x4xT4").between.bytes_s == pytest.approx(parsed("2x8xT4").between.bytes_s * 2)
    assert parsed("2x4xH100").between.bytes_s == parsed("2x8xH100").between.bytes_s


def test_no_cards_at_all_are_refused(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as caught:
        parsed("0xH100")
    assert caught.value == snapshot
    assert "8xH100" in caught.value.fix


def written(folder: Path, text: str) -> Hardware:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return parsed(str(path))


def test_a_cluster_file(tmp_path: Path) -> None:
    hardware = written(
        tmp_path,
        """
machines: 4
cards_per_machine: 8
card: H100
memory: 94GiB
host_memory: 2TiB
tflops: {bfloat16: 800}
links:
  within: {bandwidth: 400GB/s, latency_s: 3e-6}
  between: {bandwidth: 200Gbit/s}
price: 2.5
""",
    )
    assert hardware.cards == 32
    assert hardware.card.memory_bytes == 94 * GiB
    assert hardware.card.flops == {"float32": 67e12, "float16": 989.4e12, "bfloat16": 800e12}
    assert (hardware.within.bytes_s, hardware.within.latency_s) == (400e9, 3e-6)
    assert (hardware.between.bytes_s, hardware.between.latency_s) == (25e9, 4e-6)
    assert hardware.host_memory_bytes == 2048 * GiB
    assert hardware.price_per_card_hour == 2.5


def test_the_example_in_the_reader_s_own_words_can_be_read(tmp_path: Path) -> None:
    text = textwrap.dedent(
        (cluster_file.__doc__ or "").partition("::\n")[2].partition("Everything")[0]
    )
    lines = [line for line in text.splitlines() if not line.startswith("check:")]
    hardware = written(tmp_path, "\n".join(lines))
    assert hardware_given.describe_hardware(hardware) == "4 machines with 8 x H100 each"
    assert hardware.between.bytes_s == 50e9


def test_a_card_of_ones_own_in_a_cluster_file(tmp_path: Path) -> None:
    hardware = written(tmp_path, "card: Novelty 1\nmemory: 48GB\nbandwidth: 1.2TB/s\n")
    assert hardware.card.name == "Novelty 1"
    assert hardware.card.memory_bytes == 48 * 10**9
    assert hardware.card.bandwidth_bytes_s == 1.2e12
    assert hardware.card.flops == {}
    assert hardware.cards == 1


def test_all_mistakes_of_a_cluster_file_are_told_with_their_places(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ConfigError) as caught:
        written(
            tmp_path,
            "machnes: 4\ncards_per_machine: 0\ncard: H100\nmemory: 80\n"
            "links:\n  within: {bandwidth: fast}\n  betwen: {}\n",
        )
    found = [
        (one.where.rpartition("cluster.yaml")[2], one.what.split()[0])
        for one in caught.value.mistakes
    ]
    assert found == [
        (":1:1", "machnes"),
        (":2:20", "cards_per_machine"),
        (":4:9", "memory"),
        (":6:23", "links.within.bandwidth"),
        (":7:3", "links.betwen"),
    ]
    assert caught.value == snapshot


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [
        ("400Gb/s", 50e9),
        ("400 Gbit/s", 50e9),
        ("400Gbits/s", 50e9),
        ("50GB/s", 50e9),
        ("1.5GiB/s", 1.5 * GiB),
        (".5TB/s", 5e11),
    ],
)
def test_a_small_b_means_bits_and_a_large_one_bytes(
    tmp_path: Path, text: str, bytes_s: float
) -> None:
    found = written(tmp_path, f"card: H100\nlinks: {{between: {{bandwidth: {text}}}}}\n")
    assert found.between.bytes_s == bytes_s


def test_what_is_nothing_or_no_number_is_told_at_reading(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ConfigError) as caught:
        written(
            tmp_path,
            "card: H100\nmemory: 0GiB\nbandwidth: 0GB/s\ntflops: {bfloat16: 0}\nprice: .nan\n"
            "links: {within: {bandwidth: 0Gbit/s, latency_s: 0}, between: {bandwidth: 1.2.3GB/s}}\n",
        )
    assert [one.what.split()[0] for one in caught.value.mistakes] == [
        "memory",
        "bandwidth",
        "tflops.bfloat16",
        "price",
        "links.within.bandwidth",
        "links.between.bandwidth",
    ]
    assert caught.value == snapshot


def test_a_cluster_file_must_say_what_the_cards_are(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(ConfigError, match="mistake") as caught:
        written(tmp_path, "machines: 2\n")
    assert "card is missing" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, "card: Novelty 1\n")
    assert "Novelty 1" in caught.value.mistakes[0].what
    assert caught.value.mistakes[0].what == snapshot
    with pytest.raises(ConfigError, match="mistake") as caught:
        parsed(str(tmp_path / "absent.yaml"))
    assert "No such file" in str(caught.value)


def test_links_as_a_check_measured_them(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    def rank(number: int, host: str, *pairs: tuple[int, float]) -> dict[str, object]:
        seen = [{"peer": peer, "latency_s": 1e-5, "bytes_per_s": rate} for peer, rate in pairs]
        return {"rank": number, "host": host, "pairs": seen}

    check: dict[str, object] = {
        "links": [],
        "ranks": [
            rank(0, "a", (1, 90e9), (2, 10e9)),
            rank(1, "a", (0, 80e9)),
            rank(2, "b", (0, 8e9)),
        ],
    }
    (tmp_path / "check.json").write_text(json.dumps(check), encoding="utf-8")
    text = "machines: 2\ncards_per_machine: 2\ncheck: check.json\n"
    hardware = written(tmp_path, f"{text}card: T4\n")
    assert hardware.within.bytes_s == 80e9  # the slowest decides
    assert hardware.between.bytes_s == 4e9  # and two cards share it
    assert "measured by muster check" in hardware.between.source
    assert written(tmp_path, f"{text}card: Own\nmemory: 8GiB\n").between.bytes_s == 4e9
    assert written(tmp_path, f"{text}card: H100\n").between.bytes_s == 8e9  # each has its own
    check["links"] = [{"bytes_per_s": 6e9, "round_trip_s": 1e-4}]
    check["ranks"] = []
    (tmp_path / "check.json").write_text(json.dumps(check), encoding="utf-8")
    assert written(tmp_path, f"{text}card: H100\n").between.bytes_s == 3e9  # one of the machine's
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, "card: H100\ncheck: other.json\n")
    assert "other.json" in caught.value.mistakes[0].what
    assert caught.value == snapshot
    (tmp_path / "check.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, "card: H100\ncheck: check.json\n")
    assert caught.value == snapshot


CPU = Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="A processor", total_bytes=64 * GiB)


def node(*cards: Device, links: tuple[DeviceLink, ...] = ()) -> Node:
    return Node(hostname="m", taken_unix_s=0.0, accelerators=cards, cpu=CPU, links=links)


def card(index: int, name: str, gib: float) -> Device:
    return Device(
        kind=DeviceKind.CUDA,
        index=index,
        uuid=f"GPU-{index}",
        name=name,
        total_bytes=int(gib * GiB),
    )


def test_ranks_on_a_processor_share_its_cores_and_its_memory(snapshot: SnapshotAssertion) -> None:
    alone = here.hardware_here(node=node(), cores=8)
    four = here.hardware_here(node=node(), cores=8, ranks=4)
    assert (alone.cards, four.cards) == (1, 4)
    assert four.card.memory_bytes * 4 == alone.card.memory_bytes == 64 * GiB
    assert four.card.flops["float32"] * 4 == alone.card.flops["float32"]
    assert four.host_memory_bytes == 64 * GiB
    assert alone.assumed == ()
    assert four.assumed == snapshot
    assert "not measured" in four.card.source


def test_cards_of_this_machine_have_the_memory_that_their_driver_says() -> None:
    linked = DeviceLink(a="GPU-0", b="GPU-1", kind=LinkKind.NVLINK, lanes=12)
    pair = (card(0, "NVIDIA A100-SXM4-80GB", 79.1), card(1, "NVIDIA A100-SXM4-80GB", 79.1))
    hardware = here.hardware_here(node=node(*pair, links=(linked,)))
    assert (hardware.card.name, hardware.cards) == ("A100-80GB", 2)
    assert hardware.card.memory_bytes == int(79.1 * GiB)
    assert hardware.within.bytes_s == 300e9
    slow = dataclasses.replace(linked, kind=LinkKind.SYS)
    assert here.hardware_here(node=node(*pair, links=(slow,))).within.bytes_s == 16e9
    plain = (card(0, "NVIDIA L4", 22), card(1, "NVIDIA L4", 22))
    assert here.hardware_here(node=node(*plain, links=(slow,))).within.bytes_s == 32e9


def test_more_ranks_than_cards_are_refused() -> None:
    with pytest.raises(Impossible) as caught:
        here.hardware_here(node=node(card(0, "NVIDIA L4", 22)), ranks=2)
    assert caught.value.why == "it has 1 GPU"
