"""``muster kubernetes apply``, ``status``, ``logs`` and ``stop``: jobs in a cluster."""

import argparse
import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from torchmuster import finding
from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode, Impossible, MusterError, NotNow
from torchmuster.redaction import printable
from torchmuster.units import format_seconds, plural

if TYPE_CHECKING:
    from torchmuster.launch.schedulers.kubernetes.cluster import Cluster
    from torchmuster.launch.schedulers.kubernetes.cluster_jobs import ClusterJob
    from torchmuster.launch.schedulers.kubernetes.job_status import JobStatus, PodState
    from torchmuster.launch.schedulers.kubernetes.manifests import Document

# Rows of healthy pods are left out above this number of pods.
_ROWS = 64
_POLL_S = 2.0
_SILENT_S = 10.0


def add_context_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--context``, for commands that send requests to a cluster."""
    parser.add_argument(
        "--context",
        metavar="NAME",
        help="context of the kubeconfig file (default: the current one)",
    )


def add_actions(parts: Any) -> None:
    """Add ``status``, ``logs`` and ``stop``."""
    status = parsers.add_action(
        parts,
        "status",
        "show the pods of a job, and what is wrong with them",
        examples=["muster kubernetes status train", "muster kubernetes status train --json"],
    )
    _add_name(status)
    status.add_argument(
        "--all", action="store_true", help=f"show all pods, also if there are more than {_ROWS}"
    )
    parsers.add_json_flag(status)
    status.set_defaults(run=_status)

    logs = parsers.add_action(
        parts,
        "logs",
        "print the output of a pod",
        more="The launcher, which prints the output of all ranks, is in the pod of node 0.",
        examples=["muster kubernetes logs train --follow", "muster kubernetes logs train --node 3"],
    )
    _add_name(logs)
    logs.add_argument(
        "--node", type=_node, default=0, metavar="N", help="node rank of the pod (default: 0)"
    )
    logs.add_argument(
        "--follow", action="store_true", help="continue with new output, until the job is over"
    )
    logs.set_defaults(run=_logs)

    stop = parsers.add_action(
        parts,
        "stop",
        "suspend a job: its pods save and exit",
        more="The same apply command resumes it.",
        examples=["muster kubernetes stop train", "muster kubernetes stop train --delete"],
    )
    _add_name(stop)
    stop.add_argument(
        "--delete", action="store_true", help="delete the job, its pods, its Service and its Secret"
    )
    stop.set_defaults(run=_stop)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the job")
    parser.add_argument(
        "--namespace", help="namespace of the job (default: that of the context, or: default)"
    )
    add_context_flag(parser)


def _node(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a node rank; write a number from 0")
    return int(text)


def _connect(options: argparse.Namespace) -> "Cluster":
    from torchmuster.launch.schedulers.kubernetes.cluster import connect_cluster

    return connect_cluster(options.context, options.namespace, output.say)


def apply_manifests(options: argparse.Namespace, manifests: "Sequence[Document]") -> int:
    """Create the objects of a job in the cluster, and print what was done."""
    from torchmuster.launch.schedulers.kubernetes.cluster_jobs import apply_job

    name = manifests[-1]["metadata"]["name"]
    command = "muster " + printable([*options.words, "--", *options.command])
    with _connect(options) as cluster:
        for named, outcome in apply_job(cluster, manifests, command):
            output.print_text(f"{named} {outcome}")
    output.say(f"muster: to see its pods:      {cluster.muster('status', name)}")
    output.say(f"muster: to follow its output: {cluster.muster('logs', name, '--follow')}")
    output.say(f"muster: to save and stop it:  {cluster.muster('stop', name)}")
    return ExitCode.GOOD


# ---- status


def _status(options: argparse.Namespace) -> int:
    with _connect(options) as cluster:
        status = _read_status(cluster, options.name)
    if options.json:
        output.print_json(_as_json(status, cluster.namespace))
        return finding.exit_code(status.findings)
    phases = ", ".join(f"{count:,} {phase}" for phase, count in status.phases.items())
    output.print_text(f"{status.job.named} in {cluster.namespace}: {status.state}; pods: {phases}")
    shown = [one for one in status.pods if options.all or not one.is_healthy]
    if len(status.pods) <= _ROWS:
        shown = list(status.pods)
    _print_rows(shown)
    if len(shown) < len(status.pods):
        hidden = plural(len(status.pods) - len(shown), "healthy pod")
        output.print_text(f"… {hidden}: {cluster.muster('status', options.name, '--all')}")
    if status.findings:
        output.print_text(finding.render(status.findings, width=output.width()))
    return finding.exit_code(status.findings)


def _read_status(cluster: "Cluster", name: str) -> "JobStatus":
    from torchmuster.launch.schedulers.kubernetes import cluster_jobs
    from torchmuster.launch.schedulers.kubernetes.job_status import job_status

    job = cluster_jobs.find_job(cluster, name)
    pods = cluster_jobs.pods_of(cluster, job)
    events = cluster_jobs.warnings_in(cluster)
    if events is None:
        output.say("muster: no permission to list events, which say why pods do not start")
    return job_status(job, pods, events or [], now=datetime.now(UTC), cluster=cluster)


def _print_rows(pods: "Sequence[PodState]") -> None:
    if not pods:
        return
    rows = [("node", "pod", "phase", "ready", "restarts", "host", "age", "reason")]
    rows += [_cells(one) for one in pods]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        output.print_text("  ".join(cells).rstrip())


def _cells(pod: "PodState") -> tuple[str, str, str, str, str, str, str, str]:
    from torchmuster.launch.schedulers.kubernetes.job_status import EXIT_CODES_OF_PODS

    if not pod.pod:
        return str(pod.node), "-", "missing", "-", "-", "-", "-", ""
    meaning = "" if pod.exit_code is None else EXIT_CODES_OF_PODS.get(pod.exit_code, "")
    return (
        str(pod.node),
        pod.pod,
        pod.phase,
        "yes" if pod.ready else "no",
        str(pod.restarts + pod.replacements),
        pod.host or "-",
        "-" if pod.age_s is None else format_seconds(pod.age_s),
        f"{pod.reason}: {meaning}"
        if pod.reason.startswith("exit code") and meaning
        else pod.reason,
    )


def _as_json(status: "JobStatus", namespace: str) -> dict[str, object]:
    return {
        "name": status.job.name,
        "kind": status.job.resource.kind,
        "namespace": namespace,
        "state": status.state,
        "reason": status.job.reason,
        "nodes": status.job.nodes,
        "command": status.job.command or None,
        "pods": [one.as_json() for one in status.pods],
        "findings": [one.as_json() for one in status.findings],
    }


# ---- logs


def _logs(options: argparse.Namespace) -> int:
    from torchmuster.launch.schedulers.kubernetes.cluster_jobs import find_job

    with _connect(options) as cluster:
        job = find_job(cluster, options.name)
        if options.node >= job.nodes:
            raise Impossible(
                f"{job.named} has no node {options.node}",
                why=f"its node ranks are 0 to {job.nodes - 1}"
                if job.nodes > 1
                else "it has one node",
                fix=cluster.muster("logs", job.name, f"--node {job.nodes - 1}"),
            )
        if options.follow:
            return _follow(cluster, options)
        pod = _newest_pod(cluster, job, options.node)
        if pod is None:
            raise NotNow(
                f"node {options.node} of {job.named} has no pod",
                why=f"the job is {job.state}",
                fix=cluster.muster("status", job.name),
            )
        _print_log(cluster, options, pod["metadata"]["name"])
    return ExitCode.GOOD


def _newest_pod(cluster: "Cluster", job: "ClusterJob", node: int) -> "Document | None":
    from torchmuster.launch.schedulers.kubernetes.cluster_jobs import pods_of
    from torchmuster.launch.schedulers.kubernetes.job_status import newest_pods

    pods = newest_pods(pods_of(cluster, job)).get(node)
    return pods[-1] if pods else None


def _print_log(cluster: "Cluster", options: argparse.Namespace, pod: str) -> None:
    from urllib3.exceptions import HTTPError

    from torchmuster.launch.schedulers.kubernetes.cluster import POD, Refused
    from torchmuster.launch.schedulers.kubernetes.job_status import CONTAINER

    try:
        answer = cluster.open_log(pod, CONTAINER)
    except Refused as refused:
        if refused.status != 400:
            raise cluster.error(refused, "get", POD, pod) from None
        raise NotNow(
            f"pod {pod} has not started",
            why=refused.message,
            fix=cluster.muster("status", options.name),
        ) from None
    try:
        for line in _lines(answer):
            output.print_text(line)
    except HTTPError as error:
        raise MusterError(
            f"the connection broke while reading the log of pod {pod}",
            why=str(error),
            fix="run the same command again",
        ) from None


def _lines(answer: Any) -> Iterator[str]:
    """Yield the lines of a log as they arrive."""
    rest = b""
    for piece in answer.stream(65536, decode_content=True):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _follow(cluster: "Cluster", options: argparse.Namespace) -> int:
    """Print the output of a node's pod, and of the pods that replace it, until the job is over."""
    from torchmuster.launch.schedulers.kubernetes.cluster_jobs import find_job

    followed: set[str] = set()  # pods that have exited
    last = _LastLine()
    said = ""
    while True:
        job = find_job(cluster, options.name)
        pod = _newest_pod(cluster, job, options.node)
        name = str(pod["metadata"]["name"]) if pod else ""
        if name and name not in followed:
            if last.pod != name:
                last = _LastLine(
                    pod=name,
                    notice=f"muster: node {options.node} continues in pod {name}" * bool(followed),
                )
            if waiting := _follow_pod(cluster, last):
                text = f"muster: pod {name} has not started: {waiting}"
            elif _has_exited(cluster, job, options.node, name):
                followed.add(name)
                continue
            else:  # API servers end long connections
                text = f"muster: the connection to pod {name} broke; connecting again"
        elif job.state != "active":
            output.say(f"muster: {job.named}: {job.state}{f': {job.reason}' if job.reason else ''}")
            return ExitCode.FAILED if job.state == "failed" else ExitCode.GOOD
        else:
            text = f"muster: node {options.node} has no running pod; waiting for the next one"
        if text != said:
            output.say(text)
            said = text
        time.sleep(_POLL_S)


@dataclass
class _LastLine:
    """How far the output of a pod has been printed."""

    pod: str = ""
    time: str = ""
    notice: str = ""  # to print before its first line

    def is_new(self, moment: str) -> bool:
        """Return whether a line of this time has not been printed; a new connection repeats a second."""
        return _padded(moment) > _padded(self.time)


def _padded(moment: str) -> str:
    """Return an RFC 3339 time with nine digits of its second, so that the order is that of the texts."""
    seconds, _, digits = moment.rstrip("Z").partition(".")
    return f"{seconds}.{digits:0<9}"


def _has_exited(cluster: "Cluster", job: "ClusterJob", node: int, name: str) -> bool:
    pod = _newest_pod(cluster, job, node)
    if pod is None or pod["metadata"]["name"] != name:
        return True
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _follow_pod(cluster: "Cluster", last: _LastLine) -> str:
    """Print a pod's new output until it exits or the connection ends; return why it has none yet."""
    from torchmuster.launch.schedulers.kubernetes.cluster import POD, Refused
    from torchmuster.launch.schedulers.kubernetes.job_status import CONTAINER

    try:
        answer = cluster.open_log(last.pod, CONTAINER, follow=True, since=last.time)
    except Refused as refused:
        if refused.status in (400, 404):  # it waits to start, or is gone
            return refused.message
        raise cluster.error(refused, "get", POD, last.pod) from None
    if last.notice:
        output.say(last.notice)
        last.notice = ""
    arrived: queue.Queue[str | None] = queue.Queue(maxsize=1000)

    def read() -> None:
        # The connection breaks when the pod's host is lost.
        with contextlib.suppress(Exception):
            for line in _lines(answer):
                arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    silent = False
    while True:
        try:
            line = arrived.get(timeout=_SILENT_S)
        except queue.Empty:
            if not silent:
                output.say(
                    f"muster: pod {last.pod} has printed nothing for {_SILENT_S:.0f} s; Ctrl-C ends this command"
                )
            silent = True
            continue
        if line is None:
            return ""
        silent = False
        moment, _, text = line.partition(" ")
        if last.is_new(moment):
            last.time = moment
            output.print_text(text)


# ---- stop


def _stop(options: argparse.Namespace) -> int:
    from torchmuster.launch.schedulers.kubernetes.cluster_jobs import (
        delete_job,
        find_job,
        suspend_job,
    )

    with _connect(options) as cluster:
        job = find_job(cluster, options.name)
        if options.delete:
            for named in delete_job(cluster, job):
                output.print_text(f"{named} deleted")
            return ExitCode.GOOD
        if job.state in ("finished", "failed", "deleting", "stopped"):
            output.say(f"muster: {job.named} is not running: {job.state}")
        else:
            suspend_job(cluster, job)
            output.print_text(f"{job.named} stopped")
            output.say("muster: its pods get SIGTERM, save a checkpoint and exit")
            if not job.keeps_runs:
                output.say(
                    "muster: warning: it has no --volume, so its run folder ends with its pods; only checkpoints "
                    "in object storage remain"
                )
            output.say(f"muster: to see its pods: {cluster.muster('status', job.name)}")
    if job.state != "deleting":
        output.say(f"muster: to delete it:    {cluster.muster('stop', job.name, '--delete')}")
    if job.command and job.state not in ("finished", "failed", "deleting"):
        output.say(f"muster: to resume it:    {job.command}")
    return ExitCode.GOOD
