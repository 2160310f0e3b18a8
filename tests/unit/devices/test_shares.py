"""The shares of a host's users: who may write them, what they may be, and what they leave for a user."""

import os
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from device_strategies import gpu
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.devices.shares import (
    Shares,
    most_within_share,
    read_shares,
    share_left,
    shares_file,
)
from torchmuster.errors import Impossible, NotNow

GROUP = Shares(users={"eva": 4, "ben": 0}, default=2)
AS_ROOT = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can write shares"
)


def claimed(user: str, count: int, *, borrowed: int = 0) -> dict[str, Claim]:
    return {
        gpu(number).uuid: Claim(
            pid=1, user=user, command="train", since_unix_s=0.0, borrowed=number < borrowed
        )
        for number in range(count)
    }


def written(folder: Path, text: str) -> dict[str, str]:
    environment = {"TORCHMUSTER_CLAIMS_DIR": str(folder)}
    path = shares_file(environment)
    path.write_text(text)
    path.chmod(0o644)
    return environment


def test_without_a_file_there_is_no_limit(tmp_path: Path) -> None:
    found = read_shares({"TORCHMUSTER_CLAIMS_DIR": str(tmp_path)})
    assert (found.value, found.reason) == (None, "")
    assert share_left("eva", claimed("eva", 8), None) is None
    assert most_within_share(DeviceRequest(count=8), "eva", {}, None) is None


def test_the_usual_file_is_an_administrators() -> None:
    assert shares_file({}) == Path("/etc/torchmuster/shares.yaml")


@AS_ROOT
def test_shares_of_users_and_of_all_others(tmp_path: Path) -> None:
    shares = read_shares(written(tmp_path, "default: 2\nusers: {eva: 4, ben: 0}\n")).value
    assert shares == GROUP
    assert shares is not None
    assert [shares.of(user) for user in ("eva", "ben", "cem")] == [4, 0, 2]


@AS_ROOT
@pytest.mark.parametrize(
    "text",
    [
        "users: {eva: four}",
        "users: {eva: -1}",
        "users: {eva: true}",
        "default: 2.5",
        "share: 2",
        "users: [eva]",
        "- eva",
        "users: {eva: 4",
        "users: " + "[" * 5000,
        "users: {eva: 99999}",
        "#" + "x" * 70_000,
    ],
)
def test_a_file_of_root_that_cannot_be_parsed_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(Impossible) as caught:
        read_shares(written(tmp_path, text))
    assert str(tmp_path / "shares.yaml") in caught.value.what
    assert caught.value.fix


@AS_ROOT
def test_a_file_that_others_could_write_is_ignored(tmp_path: Path) -> None:
    environment = written(tmp_path, "default: 1\n")
    path = shares_file(environment)
    path.chmod(0o664)
    assert read_shares(environment).value is None
    assert str(path) in read_shares(environment).reason
    path.chmod(0o644)
    os.chown(path, 65534, 65534)
    assert read_shares(environment).value is None
    assert "65534" in read_shares(environment).reason
    path.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("default: 1\n")
    path.symlink_to(elsewhere)
    assert read_shares(environment).value is None
    path.unlink()
    os.mkfifo(path)
    assert read_shares(environment).value is None


def test_borrowed_gpus_do_not_count(snapshot: SnapshotAssertion) -> None:
    claims = claimed("eva", 5, borrowed=3)
    assert share_left("eva", claims, GROUP) == 2
    assert share_left("ben", claims, GROUP) == 0
    assert most_within_share(DeviceRequest(count=2), "eva", claims, GROUP) == 2
    assert most_within_share(DeviceRequest(), "eva", claims, GROUP) == 2  # all GPUs
    with pytest.raises(NotNow) as later:
        most_within_share(DeviceRequest(count=3), "eva", claims, GROUP)
    with pytest.raises(Impossible) as never:
        most_within_share(DeviceRequest(count=5), "eva", claims, GROUP)
    with pytest.raises(NotNow):
        most_within_share(DeviceRequest(), "cem", claimed("cem", 2), GROUP)
    assert [str(later.value), str(never.value)] == snapshot
