"""Whether this host is a container, a virtual machine or WSL."""

import ipaddress
import re
from collections.abc import Iterator, Sequence

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network import interfaces as network
from torchmuster.launch.network.firewall import open_command

# Docker's default bridge network.
_DOCKERS_NETWORK = ipaddress.ip_network("172.17.0.0/16")
_BY_ENVIRONMENT = {
    "KUBERNETES_SERVICE_HOST": "a Kubernetes pod",
    "APPTAINER_CONTAINER": "an Apptainer container",
    "SINGULARITY_CONTAINER": "a Singularity container",
}
_BY_FILE = {
    "/.dockerenv": "a Docker container",
    "/run/.containerenv": "a Podman container",
}
_BY_WORD = {
    "docker": "a Docker container",
    "podman": "a Podman container",
    "kube": "a Kubernetes pod",
    "lxc": "an LXC container",
    "systemd-nspawn": "a systemd-nspawn container",
}
_HYPERVISORS = {
    "KVM": "KVM",
    "QEMU": "QEMU",
    "VMware": "VMware",
    "VirtualBox": "VirtualBox",
    "Amazon EC2": "Amazon EC2",
    "Google": "Google Compute Engine",
    "Microsoft Corporation Virtual Machine": "Hyper-V",
    "Xen": "Xen",
}
# The id of every WSL, as Microsoft documents it for Hyper-V firewall rules.
_WSL_CREATOR = "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"


def check_virtualisation(surroundings: Surroundings) -> Iterator[Finding]:
    """Detect a container, a virtual machine or WSL, and report network limits."""
    kernel = surroundings.text("/proc/sys/kernel/osrelease") or ""
    container, machine = _container(surroundings), _virtual_machine(surroundings)
    findings = [*_wsl(kernel, surroundings), *_own_network(container)]
    inside = " on ".join(one for one in (container, machine) if one)
    seen = f"in {inside}" if inside else "no container or virtual machine detected"
    yield from findings or [Finding(name="virtualisation", status=Status.OK, what=seen)]


def _container(surroundings: Surroundings) -> str:
    for variable, kind in _BY_ENVIRONMENT.items():
        if surroundings.environment.get(variable):
            return kind
    for file, kind in _BY_FILE.items():
        if surroundings.path(file).exists():
            return kind
    told = surroundings.text("/run/systemd/container") or ""
    told += surroundings.environment.get("container", "")
    told += surroundings.text("/proc/1/cgroup") or ""
    return next((kind for word, kind in _BY_WORD.items() if word in told), "")


def _virtual_machine(surroundings: Surroundings) -> str:
    maker = " ".join(
        (surroundings.text(f"/sys/class/dmi/id/{file}") or "").strip()
        for file in ("sys_vendor", "product_name")
    )
    if "hypervisor" not in (surroundings.text("/proc/cpuinfo") or "").split():
        # Only x86 has the hypervisor flag; elsewhere the DMI data may name it.
        return next((f"a virtual machine ({one})" for one in ("KVM", "QEMU") if one in maker), "")
    kind = next((name for word, name in _HYPERVISORS.items() if word in maker), "")
    return f"a virtual machine ({kind})" if kind else "a virtual machine"


def _own_network(container: str) -> Iterator[Finding]:
    addresses = [ipaddress.ip_address(one.address) for one in network.interface_candidates()]
    if not container.startswith("a Docker") or not addresses:
        return
    if all(one in _DOCKERS_NETWORK for one in addresses if one.version == 4):
        yield Finding(
            name="container-network",
            status=Status.NOTE,
            what=f"this container is on Docker's bridge network ({addresses[0]})",
            why="other hosts cannot reach it there; single-host runs work",
            fix="docker run --network=host …  # for a run over several hosts",
        )


def _wsl(kernel: str, surroundings: Surroundings) -> Iterator[Finding]:
    if "microsoft" not in kernel.lower():
        return
    if not re.search(r"WSL2|microsoft-standard", kernel):
        yield Finding(
            name="wsl1",
            status=Status.WARNING,
            what="this is WSL 1, which has no GPU support and no Linux kernel",
            why="CUDA, shared memory between processes and many network features need WSL 2",
            fix="wsl --set-version Ubuntu 2  # in PowerShell; wsl -l -v lists the names",
            evidence=kernel.strip(),
        )
        return
    mode = (surroundings.output(["wslinfo", "--networking-mode"]) or "").strip().lower()
    if mode == "mirrored":
        yield Finding(
            name="wsl2-mirrored",
            status=Status.NOTE,
            what="this is WSL 2 with mirrored networking",
            why="the Windows firewall and the Hyper-V firewall must both allow connections to it",
            fix="\n".join(["# in PowerShell as administrator:", *_wsl_rules()]),
        )
        return
    yield Finding(
        name="wsl2-nat",
        status=Status.NOTE,
        what="this is WSL 2 with NAT networking: other hosts cannot reach it",
        why="Windows hides it behind its own address (NAT); single-host runs work",
        fix="\n".join(
            [
                "# in %UserProfile%\\.wslconfig on Windows 11:",
                "[wsl2]",
                "networkingMode=mirrored",
                "# then in PowerShell as administrator:",
                "wsl --shutdown",
                *_wsl_rules(),
            ]
        ),
        evidence=f"wslinfo --networking-mode: {mode or 'unknown'}; {kernel.strip()}",
    )


def _wsl_rules() -> Sequence[str]:
    return (
        open_command("win32", USUAL_PORT),
        f'New-NetFirewallHyperVRule -Name torchmuster -DisplayName "torchmuster" -Direction Inbound '
        f"-VMCreatorId '{_WSL_CREATOR}' -Protocol TCP -LocalPorts {USUAL_PORT},32768-60999",
    )


CHECKS = (
    Check(
        name="virtualisation",
        asks="Is this a container, a virtual machine or WSL?",
        run=check_virtualisation,
        systems=("linux",),
    ),
)
