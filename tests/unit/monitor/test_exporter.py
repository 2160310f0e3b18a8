"""The exporter serves this host; other addresses need mutual TLS or an explicit word; a hung driver costs one thread."""

import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from torchmuster.devices.model import Node
from torchmuster.devices.snapshot import take_snapshot
from torchmuster.errors import Impossible
from torchmuster.monitor import catalogue
from torchmuster.monitor.collecting import collector
from torchmuster.monitor.collecting.collector import Collector
from torchmuster.monitor.exporter import Tls, serve_metrics
from torchmuster.monitor.metric import Sample

SAMPLES = [Sample(catalogue.RUN_RESTARTS, ("llm", "r1"), 2.0)]


def _read(url: str, context: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(url, timeout=GIVE_UP_S, context=context) as response:
        return str(response.read().decode())


def test_it_serves_this_host() -> None:
    with serve_metrics(lambda: SAMPLES) as port:
        text = _read(f"http://127.0.0.1:{port}/metrics")
    assert 'muster_run_restarts_total{job="llm",run="r1"} 2.0' in text


def test_other_addresses_need_authentication_or_an_explicit_word() -> None:
    with (
        pytest.raises(Impossible, match="without authentication"),
        serve_metrics(lambda: SAMPLES, address="0.0.0.0"),
    ):
        pass
    with serve_metrics(lambda: SAMPLES, address="0.0.0.0", no_auth=True) as port:
        assert "muster_run_restarts" in _read(f"http://127.0.0.1:{port}/metrics")


def test_mutual_tls_refuses_clients_without_a_certificate(tmp_path: Path) -> None:
    pem = tmp_path / "node.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext"]
    command += ["subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    pem.write_text((tmp_path / "cert.pem").read_text() + (tmp_path / "key.pem").read_text())
    tls = Tls(certificate=pem, client_ca=tmp_path / "cert.pem")
    with serve_metrics(lambda: SAMPLES, tls=tls) as port:
        address = f"https://127.0.0.1:{port}/metrics"
        trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with pytest.raises((urllib.error.URLError, OSError)):
            _read(address, trusting)
        trusting.load_cert_chain(pem)
        assert "muster_run_restarts" in _read(address, trusting)


# prometheus_client leaves its socket open if it cannot read a certificate.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_taken_port_and_a_missing_certificate_are_named(tmp_path: Path) -> None:
    tls = Tls(certificate=tmp_path / "a", client_ca=tmp_path / "b")
    with (
        serve_metrics(lambda: SAMPLES) as port,
        pytest.raises(Impossible, match=f"127.0.0.1:{port}"),
        serve_metrics(lambda: SAMPLES, port=port),
    ):
        pass
    with (
        pytest.raises(Impossible, match="cannot serve metrics on"),
        serve_metrics(lambda: SAMPLES, tls=tls),
    ):
        pass


def test_a_hung_driver_costs_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_WAIT_S", 0.01)
    responds = threading.Event()

    def look() -> Node:
        responds.wait()
        return take_snapshot()

    requests = Collector(tmp_path, look)
    before = threading.active_count()
    stuck = threading.Thread(target=requests.samples)
    stuck.start()
    with ThreadPoolExecutor(20) as pool:
        results = [pool.submit(requests.samples) for _ in range(100)]
    refused = [one for one in results if isinstance(one.exception(), TimeoutError)]
    assert len(refused) == 100
    assert threading.active_count() == before + 1
    responds.set()
    stuck.join()
