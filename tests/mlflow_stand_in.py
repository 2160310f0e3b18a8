"""A stand-in for MLflow's server: the few requests of its REST interface that a run needs, kept in memory."""

import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Kept:
    """What was sent to it."""

    address: str = ""
    experiments: dict[str, str] = field(default_factory=dict)  # name to id
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    statuses: list[str] = field(default_factory=list)

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return what a metric of the only run was at each step, in the order in which it came."""
        (run,) = self.runs.values()
        return [
            (int(one.get("step", 0)), float(one["value"]))
            for one in run["metrics"]
            if one["key"] == name
        ]


class _Refused(Exception):
    pass


def _answer(kept: Kept, what: str, asked: dict[str, Any]) -> dict[str, Any]:
    match what:
        case "experiments/get-by-name":
            name = asked["experiment_name"]
            if name not in kept.experiments:
                raise _Refused("RESOURCE_DOES_NOT_EXIST")
            return {"experiment": _experiment(kept.experiments[name], name)}
        case "experiments/create":
            kept.experiments[asked["name"]] = str(len(kept.experiments) + 1)
            return {"experiment_id": kept.experiments[asked["name"]]}
        case "runs/create":
            identity = f"{len(kept.runs) + 1:032x}"
            kept.runs[identity] = {
                "name": asked["run_name"],
                "experiment": asked["experiment_id"],
                "tags": {one["key"]: one["value"] for one in asked.get("tags", [])},
                "params": {},
                "metrics": [],
            }
            return {"run": _run(kept, identity)}
        case "runs/search":
            tag = re.fullmatch(r"tags\.`(.+)` = '(.+)'", asked["filter"])
            assert tag is not None, asked
            found = [
                identity
                for identity, run in kept.runs.items()
                if run["tags"].get(tag[1]) == tag[2]
                and run["experiment"] in asked["experiment_ids"]
            ]
            return {"runs": [_run(kept, one) for one in found]}
        case "runs/get":
            return {"run": _run(kept, asked["run_id"])}
        case "runs/log-batch":
            run = kept.runs[asked["run_id"]]
            assert len(asked.get("metrics", [])) <= 1000
            # MLflow's database has each (name, step, time, value) once.
            run["metrics"] += [one for one in asked.get("metrics", []) if one not in run["metrics"]]
            for one in asked.get("params", []):
                assert run["params"].setdefault(one["key"], one["value"]) == one["value"]
            return {}
        case "runs/update":
            kept.statuses.append(asked["status"])
            return {"run_info": _run(kept, asked["run_id"])["info"]}
    raise _Refused("ENDPOINT_NOT_FOUND")


def _experiment(identity: str, name: str) -> dict[str, Any]:
    return {"experiment_id": identity, "name": name, "lifecycle_stage": "active"}


def _run(kept: Kept, identity: str) -> dict[str, Any]:
    run = kept.runs[identity]
    info = {
        "run_id": identity,
        "run_uuid": identity,
        "run_name": run["name"],
        "experiment_id": run["experiment"],
        "status": "RUNNING",
        "start_time": 1,
        "lifecycle_stage": "active",
    }
    return {"info": info, "data": {}}


@contextmanager
def mlflow_server(port: int = 0) -> Iterator[Kept]:
    """Answer on a free port, or on the one that a server had before."""
    kept = Kept()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            asked: dict[str, Any] = dict(urllib.parse.parse_qsl(query))
            if length := int(self.headers.get("Content-Length") or 0):
                asked |= json.loads(self.rfile.read(length))
            try:
                code, told = 200, _answer(kept, path.partition("/mlflow/")[2], asked)
            except _Refused as error:
                code, told = 404, {"error_code": str(error), "message": str(error)}
            content = json.dumps(told).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.do_GET()

        def do_PATCH(self) -> None:
            self.do_GET()

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    kept.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def closed_port() -> str:
    """Return an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"
