"""One look at this machine: every accelerator, the CPU, who uses what, what looks wrong."""

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torchmuster.devices import activity, processes
from torchmuster.devices.model import Node
from torchmuster.devices.readers import amd, apple, cpu, intel, nvml, nvml_events
from torchmuster.devices.symptoms import symptoms


def take() -> Node:
    """Read everything that can be read without torch. Changes nothing, keeps nothing."""
    nvidia = nvml.read()
    accelerators = list(nvidia.devices)
    findings = list(nvidia.findings)
    for reader in (amd, intel):
        devices, problems = reader.read()
        accelerators += devices
        findings += problems
    accelerators += apple.read()
    node = Node(
        hostname=platform.node() or "this machine",
        taken_unix_s=time.time(),
        accelerators=processes.identify(accelerators),
        cpu=cpu.read(),
        links=nvidia.links,
        driver_version=nvidia.driver_version,
        cuda_version=nvidia.cuda_version,
        findings=tuple(findings),
    )
    return dataclasses.replace(node, findings=(*node.findings, *symptoms(node)))


def take_with_history(environment: Mapping[str, str] | None = None) -> Node:
    """Look, and remember what was seen, so that the next look knows who has been idle since."""
    node = take()
    path = activity.record_path(os.environ if environment is None else environment, node.hostname)
    if path is None:
        return node
    record = activity.load(path)
    node, fresh = activity.update(record, node)
    if record or fresh:
        activity.save(path, fresh)
    return node


@contextmanager
def listening() -> Iterator[Callable[[], Node]]:
    """Give what takes looks, each with the critical errors that drivers reported since this began."""
    with nvml_events.XidErrors() as errors:

        def look() -> Node:
            node = take()
            return dataclasses.replace(node, accelerators=errors.added_to(node.accelerators))

        yield look
