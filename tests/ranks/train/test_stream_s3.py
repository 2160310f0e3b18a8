"""Files in object storage: a real server of the S3 kind on this machine, read by two ranks."""

import gzip
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from rank_group import RunRanks
from rank_programs import streaming
from rank_programs.streaming import together

pytestmark = [pytest.mark.ranks, pytest.mark.integrations, pytest.mark.nightly]

KEY, SECRET = "made-up-key", "made-up-secret"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A bucket with 60 records in three files; yields what fsspec needs to know of it."""
    boto3 = pytest.importorskip("boto3")
    moto_server = pytest.importorskip("moto.server")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="texts")
        lines = [json.dumps(one).encode() + b"\n" for one in range(60)]
        for name, content in {
            "a.jsonl": b"".join(lines[:25]),
            "b.jsonl": b"".join(lines[25:40]),
            "c.jsonl.gz": gzip.compress(b"".join(lines[40:])),
            "other.csv": b"1,2",
        }.items():
            client.put_object(Bucket="texts", Key=f"part/{name}", Body=content)
        client.close()
        yield {
            "key": KEY,
            "secret": SECRET,
            "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
        }
    finally:
        server.stop()


def test_two_ranks_read_a_bucket_each_record_once(
    run_ranks: RunRanks, bucket: dict[str, Any]
) -> None:
    missing = ["s3://texts/none/*.jsonl", "s3://no-bucket/a.jsonl"]
    answers = run_ranks(streaming.read_s3, 2, "s3://texts/part/*.jsonl*", bucket, missing)
    without_worker, with_worker = (
        together([read[place] for read, _ in answers]) for place in range(2)
    )
    assert sorted(itertools.chain(*without_worker)) == list(range(60))
    assert with_worker == without_worker
    for _, said in answers:
        assert [one.splitlines()[0] for one in said] == [
            f"no files at {place}" for place in missing
        ]
        assert SECRET not in "".join(said)
