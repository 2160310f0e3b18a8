"""A real etcd on a host of the lab, with the v2 interface that torch's ``etcd-v2`` backend speaks."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hosts.host import Host, HostProcess
from hosts.namespaces import await_true

_ASK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1])"


@dataclass(frozen=True, kw_only=True)
class Etcd:
    """An etcd that is serving."""

    host: Host
    port: int
    process: HostProcess

    @property
    def endpoint(self) -> str:
        return f"{self.host.address}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.endpoint}"


@contextmanager
def etcd_on(host: Host, port: int = 2379) -> Iterator[Etcd]:
    """Run etcd on this host, at its address, until the end of the block; the data are not kept."""
    url, peers = f"http://{host.address}:{port}", f"http://{host.address}:{port + 1}"
    command = ["etcd", "--name", host.name, "--enable-v2=true", "--unsafe-no-fsync"]
    command += ["--data-dir", str(host.folder / f"etcd-{port}")]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"{host.name}={peers}"]
    log = host.folder / f"etcd-{port}.log"
    with log.open("w") as told:
        process = host.popen(
            command, stdin=subprocess.DEVNULL, stdout=told, stderr=subprocess.STDOUT
        )
    try:
        await_true("etcd listens", lambda: host.listens_at(port) or process.poll() is not None)
        healthy = host.run([sys.executable, "-I", "-S", "-c", _ASK, f"{url}/health"])
        if healthy.returncode != 0:
            raise RuntimeError(f"etcd did not start: {log.read_text()[-2000:]}")
        yield Etcd(host=host, port=port, process=process)
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
