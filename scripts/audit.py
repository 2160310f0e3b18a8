"""Look for known vulnerabilities of the pinned dependencies with pip-audit, in an environment of its own.

Exit code 1 if there is one. If the database does not know or does not answer for any of the dependencies, as without
access to the internet, say that nothing was audited.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "audit"


def main() -> int:
    """Install pip-audit, run it and report."""
    python = PLACE / "bin" / "python"
    uv = str(ROOT / "scripts" / "uv")
    subprocess.run([uv, "venv", "--clear", str(PLACE)], check=True)
    subprocess.run([uv, "pip", "install", "--python", str(python), "pip-audit"], check=True)
    words = [
        "-r",
        str(ROOT / ".ci" / "constraints.txt"),
        "--no-deps",
        "--disable-pip",
        "-f",
        "json",
    ]
    done = subprocess.run([str(python), "-m", "pip_audit", *words], capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"nothing was audited: pip-audit failed\n{done.stderr[-1000:]}")
        return 0 if "ConnectionError" in done.stderr else 1
    audited = [one for one in found if "skip_reason" not in one]
    bad = [one for one in audited if one["vulns"]]
    for one in bad:
        print(f"{one['name']} {one['version']}: {', '.join(vuln['id'] for vuln in one['vulns'])}")
    if not audited:
        print(f"nothing was audited: the database answers for none of {len(found)} dependencies")
        return 0
    print(f"{len(audited)} of {len(found)} dependencies audited, {len(bad)} vulnerable")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
