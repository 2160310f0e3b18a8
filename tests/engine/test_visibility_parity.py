"""CUDA_VISIBLE_DEVICES means to us what it means to torch."""

from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from device_strategies import gpu
from torchmuster.devices.visibility import visible

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GPUS = [gpu(index) for index in range(5)]
UUIDS = [one.uuid for one in GPUS]

_numbers = st.sampled_from(["0", "1", "2", "4", "5", "9", "-1", "-0", "+3", "01", " 2 ", "1gpu"])
_uuids = st.sampled_from([*UUIDS, *(one[:8] for one in UUIDS), "GPU-", "GPU-none", f" {UUIDS[0]}"])
_others = st.sampled_from(["", " ", "x", "NoDevFiles", "MIG", "1e2", "2.5", "0x1"])
_lists = st.one_of(
    st.lists(_numbers, max_size=6),
    st.lists(_uuids, max_size=6),
    st.lists(st.one_of(_numbers, _uuids, _others), max_size=6),
)


def torchs_reading(text: str) -> list[int]:
    """The ordinals that torch's own counting is based on."""
    from torch import cuda

    with mock.patch.dict("os.environ", {"CUDA_VISIBLE_DEVICES": text}):
        named = cuda._parse_visible_devices()
    ordinals: list[int] = []
    if named and isinstance(named[0], str):
        return list(cuda._transform_uuid_to_ordinals([str(one) for one in named], UUIDS))
    for number in map(int, named):
        if number >= len(UUIDS):
            break
        ordinals.append(number)
    return ordinals


@settings(max_examples=400, deadline=None)
@given(_lists.map(",".join))
@example("0,9,0")
@example("0,9,9")
@example(f"{UUIDS[0]},GPU-none,{UUIDS[0]}")
def test_a_value_shows_the_gpus_that_torch_shows(text: str) -> None:
    seen = visible(GPUS, {"CUDA_VISIBLE_DEVICES": text}).devices
    assert [one.index for one in seen] == torchs_reading(text)
