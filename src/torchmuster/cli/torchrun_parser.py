"""Parse a torchrun command line with torch's own parser, in a process of its own: ``python torchrun_parser.py ARGS``.

Prints JSON: the flags that were given, or set by ``PET_`` variables, the script and its arguments. The
command line of Muster never imports torch.
"""

import json
import os

from torch.distributed import run

SCRIPT = ("training_script", "training_script_args")


def main() -> None:
    """Print the parsed command line."""
    parser = run.get_args_parser()
    parser.prog = "torchrun"
    parsed = vars(parser.parse_args())
    # Without variables, the parser returns torch's own defaults.
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    usual = vars(run.get_args_parser().parse_args(["x.py"]))
    given = {}
    for name, value in parsed.items():
        if name not in SCRIPT and value != usual[name]:
            given[name] = value
    script = [parsed["training_script"], *parsed["training_script_args"]]
    print(json.dumps({"given": given, "script": script}))


if __name__ == "__main__":
    main()
