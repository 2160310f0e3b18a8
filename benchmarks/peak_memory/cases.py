"""The cases of the memory benchmark: models x layouts x options, by fixed choice and by draw."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peak_memory.families import FAMILIES, SEQUENCE, config_of
from torchmuster.plan.job import Candidate, Recompute, Work
from torchmuster.train.strategies.sharding import ShardLayout

BENCHMARKS = Path(__file__).parents[1]  # where modules are imported from
# strategy, copies, shards
LAYOUTS = (
    ("single", 1, 1),
    ("ddp", 2, 1),
    ("ddp", 3, 1),
    ("ddp", 4, 1),
    ("fsdp", 1, 2),
    ("fsdp", 1, 3),
    ("fsdp", 1, 4),
    ("fsdp", 2, 2),
)
_DATASETS = {
    "bert": ("words", "language_model"),
    "vit": ("pictures", "cross_entropy"),
    "little_gpt": ("texts", "peak_memory.models:next_byte_loss"),
    "residual": ("pictures", "cross_entropy"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training to be foretold and measured."""

    family: str
    strategy: str
    copies: int
    shards: int
    number_type: str  # fp32; bf16, fp16: autocast; pure: all weights are bfloat16
    recompute: Recompute
    micro_batch_size: int
    accumulation: int
    optimizer: str
    clip: bool
    reshard: bool = True

    @property
    def ranks(self) -> int:
        """How many processes it takes."""
        return self.copies * self.shards

    @property
    def name(self) -> str:
        """One word for each choice; it identifies the case."""
        layout = f"{self.strategy}{self.copies}x{self.shards}" + ("" if self.reshard else "-whole")
        clip = "-clip" if self.clip else ""
        return (
            f"{self.family}/{layout}/{self.number_type}/recompute-{self.recompute}/"
            f"{self.micro_batch_size}x{self.accumulation}/{self.optimizer}{clip}"
        )

    @classmethod
    def named(cls, name: str) -> "Case":
        """Return the case that has this name."""
        family, layout, number_type, recompute, portions, optimizer = name.split("/")
        layout, _, whole = layout.partition("-")
        strategy = layout.rstrip("x0123456789")
        copies, shards = map(int, layout.removeprefix(strategy).split("x"))
        kind = recompute.removeprefix("recompute-")
        micro_batch_size, accumulation = map(int, portions.split("x"))
        optimizer, _, clip = optimizer.partition("-")
        case = cls(
            family=family,
            strategy=strategy,
            copies=copies,
            shards=shards,
            number_type=number_type,
            recompute=int(kind) if kind.isdecimal() else kind,  # type: ignore[arg-type]
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            optimizer=optimizer,
            clip=clip == "clip",
            reshard=whole != "whole",
        )
        if case.name != name:
            raise ValueError(f"no case has the name {name}")
        return case

    def work(self, folder: Path) -> Work:
        """Return what is trained; configurations of transformers are written below the folder."""
        config = config_of(self.family)
        common: dict[str, Any] = {
            "optimizer": self.optimizer,
            "clip_norm": 1.0 if self.clip else None,
            "torch_dtype": "bfloat16" if self.number_type == "pure" else "float32",
            "folder": str(BENCHMARKS),
        }
        if config is None:
            dataset, loss = _DATASETS[self.family]
            if dataset == "pictures" and self.number_type == "pure":
                dataset = "pictures_of_16_bits"
            return Work(
                build=f"peak_memory.models:{self.family}",
                dataset=f"peak_memory.models:{dataset}",
                loss=loss,
                **common,
            )
        place = folder / self.family
        place.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config, indent=1, sort_keys=True)
        if not (place / "config.json").is_file() or (place / "config.json").read_text() != text:
            (place / "config.json").write_text(text)
        return Work(model_name_or_path=str(place), sequence_length=SEQUENCE, **common)

    def candidate(self) -> Candidate:
        """Return how it is spread."""
        return Candidate(
            strategy=self.strategy,  # type: ignore[arg-type]
            layout=ShardLayout(copies=self.copies, shards=self.shards),
            reshard=self.reshard,
            precision="fp32" if self.number_type == "pure" else self.number_type,  # type: ignore[arg-type]
            recompute=self.recompute,
            micro_batch_size=self.micro_batch_size,
            accumulation=self.accumulation,
        )


def chosen() -> list[Case]:
    """Return the fixed cases: every family in every layout, twice, each with options of its own.

    Options are drawn with a seed that never changes.
    """
    drawing = random.Random(1)
    cases = []
    for family in FAMILIES:
        for layout in LAYOUTS:
            first = _with_options(family, layout, drawing)
            cases.append(first)
            while (second := _with_options(family, layout, drawing)).name == first.name:
                pass
            cases.append(second)
    drawing.shuffle(cases)  # so that the first ones are a fair sample of all
    return cases


def drawn(number: int, seed: int) -> list[Case]:
    """Draw so many cases, none of which is one of the fixed."""
    drawing = random.Random(seed)
    known = {case.name for case in chosen()}
    cases: dict[str, Case] = {}
    while len(cases) < number:
        case = _with_options(drawing.choice(FAMILIES), drawing.choice(LAYOUTS), drawing)
        if case.name not in known:
            cases[case.name] = case
    return list(cases.values())


def _with_options(family: str, layout: tuple[str, int, int], drawing: random.Random) -> Case:
    strategy, copies, shards = layout
    number_type = drawing.choice(("fp32", "bf16", "pure"))  # fp16 takes long on a CPU
    pictures = family in ("vit", "residual")
    return Case(
        family=family,
        strategy=strategy,
        copies=copies,
        shards=shards,
        number_type=number_type,
        recompute=drawing.choice(("none", "none", "full", "selective", 2)),
        micro_batch_size=drawing.choice((4, 6, 8, 12) if pictures else (1, 2, 3, 4)),
        accumulation=drawing.choice((1, 1, 2, 4)),
        optimizer=drawing.choice(("adamw", "adamw", "sgd")),
        clip=drawing.random() < 0.5,
        reshard=strategy != "fsdp" or copies > 1 or drawing.random() < 0.75,
    )
