"""What the flags of ``muster bench matmul``, ``precision`` and ``attention`` ask for, and what is shown."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.bench import attention, environment, matmul, precision
from torchmuster.bench.attention import AttentionAnswer, MeasuredAttention
from torchmuster.bench.matmul import MatmulAnswer, Product, squares
from torchmuster.bench.precision import PrecisionAnswer, PrecisionRun
from torchmuster.cli.main import main

TIMES = (0.01,) * 7


@pytest.fixture(autouse=True)
def here(own_machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of the test's own, on a machine that is not looked at for long."""
    monkeypatch.chdir(own_machine)
    monkeypatch.setattr(environment, "_LOOK_S", 0.001)
    return own_machine


Asked = Callable[[Any, Any], list[Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Let a bench get this answer, and keep what it was asked."""

    def answering(bench: Any, answer: Any) -> list[Any]:
        requests: list[Any] = []

        def measure(request: Any, **_: Any) -> Any:
            requests.append(request)
            return answer

        monkeypatch.setattr(bench, "measure_" + bench.__name__.rpartition(".")[2], measure)
        return requests

    return answering


def products(sizes: Sequence[int]) -> MatmulAnswer:
    return MatmulAnswer(
        device="cpu",
        device_name="cpu",
        threads=2,
        products=tuple(
            Product(shape=one, number_type="float32", on_cpu=True, call_s=TIMES, error=1e-7)
            for one in squares(tuple(sizes))
        ),
        missing_types={},
    )


def test_products_without_flags_go_up_to_what_takes_a_reasonable_time(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = asked(matmul, products((128,)))
    assert main(["bench", "matmul"]) == 0
    (request,) = requests
    assert [one.rows for one in request.shapes] == [128, 256, 512, 1024, 2048, 4096]
    assert request.longest_s == matmul.LONGEST_S
    assert "bench/matmul-" in capsys.readouterr().out


def test_sizes_that_were_asked_for_are_measured_however_long_they_take(asked: Asked) -> None:
    requests = asked(matmul, products((8192,)))
    assert main(["bench", "matmul", "--sizes", "8192", "64"]) == 0
    assert [one.rows for one in requests[0].shapes] == [64, 8192]
    assert requests[0].longest_s is None


def test_the_shapes_of_a_model_are_asked_for_by_its_name(asked: Asked) -> None:
    requests = asked(matmul, products((64,)))
    line = ["bench", "matmul", "--model", "./llama", "--set", "train.micro_batch_size=4"]
    assert main(line) == 0
    assert requests[0].work.model_name_or_path == "./llama"
    assert requests[0].micro_batch_size == 4


def test_sizes_and_a_model_do_not_go_together(
    capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    assert main(["bench", "matmul", "--sizes", "32", "--model", "gpt2"]) == 2
    assert capsys.readouterr().err == snapshot


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "²", "99999999"])
def test_what_is_no_size_is_refused_with_an_example(
    text: str, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "matmul", f"--sizes={text}"])
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert "argument --sizes" in complaint
    assert complaint == snapshot


def trainings() -> PrecisionAnswer:
    way = PrecisionRun(
        precision="fp32",
        step_s=TIMES,
        peak_bytes=1024,
        losses=(2.0, 1.0),
        held_loss=1.0,
        output_error=None,
        skipped=0,
    )
    return PrecisionAnswer(
        device="cpu",
        device_name="cpu",
        parameter_count=1000,
        ways=(way,),
        missing={},
        other_order_loss=1.0,
    )


def test_a_small_gpt_and_unstable_models_are_trained_without_a_model_of_ones_own(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = asked(precision, trainings())
    assert main(["bench", "precision", "--steps", "3"]) == 0
    assert (requests[0].work, requests[0].steps) == (precision.SMALL_GPT, 3)
    assert requests[0].study
    assert "train.precision: fp32" in capsys.readouterr().out


def test_a_training_of_ones_own_is_measured_alone(asked: Asked) -> None:
    requests = asked(precision, trainings())
    own = ["--set", "model.build=own:make", "--set", "data.dataset=own:data"]
    assert main(["bench", "precision", *own]) == 0
    assert requests[0].work.build == "own:make"
    assert not requests[0].study


def test_attention_is_asked_for_by_its_sizes(asked: Asked) -> None:
    one = MeasuredAttention(
        kind="sdpa", length=64, forward_s=TIMES, training_s=TIMES, training_bytes=64, error=1e-7
    )
    answer = AttentionAnswer(
        device="cpu",
        device_name="cpu",
        number_type="float32",
        threads=2,
        missing={},
        measured=(one,),
    )
    requests = asked(attention, answer)
    line = ["bench", "attention", "--heads", "4", "--type", "bfloat16", "--not-causal", "--quick"]
    assert main(line) == 0
    request = requests[0]
    assert (request.batch, request.heads, request.head_size) == (1, 4, 64)
    assert (request.number_type, request.causal) == ("bfloat16", False)
    assert request.lengths == attention.LENGTHS_QUICK
    assert "flex" not in request.kinds  # compiling is not quick
    assert main(["bench", "attention", "--lengths", "512"]) == 0
    assert requests[1].longest_s is None
    assert "flex" in requests[1].kinds
