"""What other tools say of the cases that ``plan_memory.py`` measured.

    python benchmarks/plan_peers.py --measured plan_memory.jsonl --out plan_peers.jsonl
    python benchmarks/plan_memory.py --out plan_memory.jsonl --peers plan_peers.jsonl --table

They are installed into an environment of their own, which is made once. It sees the packages of this one and gets only what
is missing, without what that depends on: the same torch answers everywhere.
Where GitHub cannot be reached, give all of them with ``--peer``, llm-analysis as a folder with that commit.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

PEERS = (
    "accelerate",
    # 0.2.2, the last release, refuses feed-forward networks that are no multiple of the width.
    "llm-analysis @ git+https://github.com/cli99/llm-analysis@d841e40aec8c84b9e76ba9cfbce67418adb172bd",
    "fire",
    "termcolor",
)


def environment(folder: Path, peers: list[str]) -> Path:
    """Return the Python of the peers' environment, made if it is not there."""
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        venv.create(folder, with_pip=True)
        theirs = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        # In the order of sys.path, what is installed there comes first.
        paths = [sysconfig.get_paths()["purelib"], str(Path(__file__).parents[1] / "src")]
        (Path(theirs) / "packages_of_ours.pth").write_text("\n".join(paths) + "\n")
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *peers], check=True)
        complete.touch()
    return python


def main() -> None:
    """Ask about every case that was measured and is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, required=True, help="what plan_memory.py wrote")
    parser.add_argument("--out", type=Path, default=Path("plan_peers.jsonl"))
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "muster-plan-memory"
    )
    parser.add_argument("--peer", action="append", help="what pip installs instead of the usual")
    options = parser.parse_args()
    python = environment(options.folder / "peers", options.peer or list(PEERS))
    done = set()
    if options.out.exists():
        done = {json.loads(line)["name"] for line in options.out.read_text().splitlines()}
    lines = [json.loads(line) for line in options.measured.read_text().splitlines()]
    cases = [line["case"] for line in lines if line["name"] not in done]
    with options.out.open("a", encoding="utf-8") as file:
        subprocess.run(
            [python, "-m", "peak_memory.peer_tools", str(options.folder.absolute() / "models")],
            input="".join(json.dumps(case) + "\n" for case in cases),
            stdout=file,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    print(f"{len(cases)} cases asked about; the answers are in {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
