"""Kill random hosts of trainings with hot spares, and compare each training with an undisturbed one.

    python tests/hosts/spare_kills.py --kills 100 --results build/spare-kills.jsonl

Each training has two hosts with a rank each and two spares; four times, at a random step, a random host that has a rank is killed, the head
included. Every training appends a line to the results, so that the script can be interrupted and started again.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from hosts.lab import Lab
from hosts.spare_training import Result, Training

HOSTS = ("node2", "node3", "node4", "node5")
SPARES = 2
STEPS = 24
KILLS = 4


def random_kills(chance: random.Random) -> list[tuple[int, int]]:
    """Return steps and node ranks: one kill in each part of the training."""
    part = (STEPS - 2) // KILLS
    return [
        (1 + part * number + chance.randrange(part), chance.randrange(len(HOSTS) - SPARES))
        for number in range(KILLS)
    ]


def undisturbed(lab: Lab, folder: Path) -> Result:
    """Return the result of a training in which nothing is killed."""
    training = Training(lab, folder, HOSTS, spares=SPARES, steps=STEPS)
    return training.run_to_the_end()


def one_training(lab: Lab, folder: Path, expected: Result, seed: int) -> dict[str, object]:
    """Train with random kills; return what happened."""
    kills = random_kills(random.Random(seed))
    training = Training(lab, folder, HOSTS, spares=SPARES, steps=STEPS)
    began_s = time.monotonic()
    found = training.run_to_the_end(kills, await_spare=False)
    return {
        "seed": seed,
        "kills": kills,
        "takeovers": [(one["host"], one["spare"]) for one in training.takeovers()],
        "equal": found == expected,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def main() -> None:
    """Kill until there are enough results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--results", type=Path, default=Path("build/spare-kills.jsonl"))
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.touch()
    folder = Path(tempfile.mkdtemp(prefix="spare-kills-"))
    with Lab(len(HOSTS) + 1) as lab:
        expected = undisturbed(lab, folder / "undisturbed")
        while True:
            lines = [json.loads(line) for line in options.results.read_text().splitlines()]
            done = sum(len(line["kills"]) for line in lines)
            equal = sum(len(line["kills"]) for line in lines if line["equal"])
            print(f"{done} kills in {len(lines)} trainings, {equal} bitwise equal", flush=True)
            if done >= options.kills:
                break
            seed = options.first_seed + len(lines)
            result = one_training(lab, folder / str(len(lines)), expected, seed)
            with options.results.open("a") as out:
                out.write(json.dumps(result) + "\n")
            shutil.rmtree(folder / str(len(lines)))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
