"""The parsers of foreign bytes: for each a function that may raise only the errors named here, and inputs to begin with."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchmuster.errors import MusterError

Parse = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """A parser; ``opened`` prepares it once and yields the function that gets each input."""

    opened: Callable[[], contextlib.AbstractContextManager[Parse]]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...] = ()


def plain(parse: Parse) -> Callable[[], contextlib.AbstractContextManager[Parse]]:
    return lambda: contextlib.nullcontext(parse)


def text_of(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


# ---- between hosts


def protocol_messages(data: bytes) -> None:
    from torchmuster.launch import protocol

    for decode in (protocol.decode_to_agent, protocol.decode_from_agent):
        with contextlib.suppress(protocol.UnreadableMessage):
            protocol.to_line(decode(data))


def protocol_lines(data: bytes) -> None:
    from torchmuster.launch import protocol

    with contextlib.suppress(protocol.UnreadableMessage):
        for line in data.splitlines(keepends=True):
            protocol.decode_from_agent(protocol.from_line(line))


def handshake(data: bytes) -> None:
    """Read frames as the host reads those of a machine that has not joined yet, and the other way round."""
    from torchmuster.launch import protocol
    from torchmuster.launch.transports.join import messages, stream

    async def receive() -> None:
        for decode in (messages.decode_join, messages.decode_answer):
            reader = asyncio.StreamReader()
            reader.feed_data(data)
            reader.feed_eof()
            connection = stream.Stream(reader, writer=None)  # type: ignore[arg-type]
            connection.abort = lambda why: None  # type: ignore[method-assign]  # there is no socket
            with contextlib.suppress(protocol.UnreadableMessage):
                while await connection.receive(4096, decode) is not None:
                    pass

    asyncio.run(receive())


def join_code(data: bytes) -> None:
    from torchmuster.launch.transports.join.code import decode_code

    decode_code(text_of(data))


# ---- files


FILES = ("run.json", "job.json", "events.jsonl")
METRICS = ("steps.jsonl", "saves.jsonl", "ranks/a/from-0.json", "sinks/mlflow.json")


@contextlib.contextmanager
def run_folder() -> Iterator[Parse]:
    """Write the bytes to each file of a run folder in turn, and read it as the commands do."""
    from torchmuster.launch.history import node_records, run_state
    from torchmuster.launch.history.failure_report import failure_report_of
    from torchmuster.monitor.collecting.run_metrics import RunMetrics
    from torchmuster.runfolder import create_run_folder, run_name

    with tempfile.TemporaryDirectory() as folder:
        run = create_run_folder(Path(folder), "fuzzed")
        files = [*FILES, *(f"metrics/{name}" for name in METRICS), "hang/0/rank-0.flight.json"]
        for name in files:
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        turn = 0

        def read(data: bytes) -> None:
            nonlocal turn
            turn += 1
            path = run.path / files[turn % len(files)]
            path.write_bytes(data)
            run_name(run)
            run_state.read_state(run)
            [*RunMetrics(run, "job").samples(2e9)]
            node_records.read_node_ranks(run, 2e9)
            failure_report_of(run).record.timeline()

        yield read


@contextlib.contextmanager
def settings_file() -> Iterator[Parse]:
    from torchmuster.config.resolve import resolve_settings

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"

        def read(data: bytes) -> None:
            path.write_bytes(data)
            resolve_settings(file=path)

        yield read


def json_lines(data: bytes) -> None:
    from torchmuster.launch.history import run_state
    from torchmuster.untrusted import json_objects

    for line in json_objects(data):
        run_state.event_of(line)
        json.dumps(line).encode()


def manifest(data: bytes) -> None:
    from torchmuster.checkpoints.manifest import ForeignVersion, Manifest, UnreadableManifest

    with contextlib.suppress(UnreadableManifest, ForeignVersion):
        Manifest.from_json(data).to_json()


@contextlib.contextmanager
def checkpoint_of_a_script() -> Iterator[Parse]:
    """Write the bytes to each file of other libraries' checkpoints in turn, and look for what is missing."""
    from torchmuster.checkpoints import foreign

    names = ("a.pt", "a.safetensors", "x.index.json", "trainer_state.json", ".metadata", "latest")
    libraries = (
        "torch.save",
        "transformers",
        "accelerate",
        "deepspeed",
        "torch.distributed.checkpoint",
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "__0_0.distcp").write_bytes(b"1")
        turn = 0

        def read(data: bytes) -> None:
            nonlocal turn
            turn += 1
            path = Path(folder) / names[turn % len(names)]
            path.write_bytes(data)
            foreign.condition_of(str(path), "torch.save")
            for library in libraries:
                foreign.condition_of(folder, library)
            path.unlink()

        yield read


@contextlib.contextmanager
def model_folder() -> Iterator[Parse]:
    """Write the bytes to each JSON file of a model in turn, and read it as a training and the planner do."""
    from torchmuster.checkpoints import model_class
    from torchmuster.train.models.hugging_face import find_model

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "config.json", Path(folder) / "model.safetensors.index.json"]
        for path in files:
            path.write_text("{}")
        (Path(folder) / "model.safetensors").write_bytes(b"x")
        turn = 0

        def read(data: bytes) -> None:
            nonlocal turn
            turn += 1
            before = files[turn % 2].read_bytes()
            files[turn % 2].write_bytes(data)
            try:
                model_class.class_in_folder(Path(folder))
                find_model(folder)
            finally:
                files[turn % 2].write_bytes(before)

        yield read


@contextlib.contextmanager
def data_lines() -> Iterator[Parse]:
    """Look for the bad lines of a file of JSON lines."""
    from torchmuster.train.data.text import bad_lines

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"

        def read(data: bytes) -> None:
            path.write_bytes(data)
            bad_lines(path, is_json=True)

        yield read


def flight_record(data: bytes) -> None:
    from torchmuster.launch.hangs import flight_recorder

    dump = flight_recorder.read_flight_record(data)
    flight_recorder.analyse_flight_records({0: dump, 1: {}, 2: dump})


# ---- output of programs


def program_output(data: bytes) -> None:
    from torchmuster.diagnose.hang.rank_stacks import parse_dump

    parse_dump(data)


def log_lines(data: bytes) -> None:
    from torchmuster.known_errors.explain import explain_text
    from torchmuster.redaction import harmless, printable_line, redact_text

    text = text_of(data)
    for line in text.split("\n"):
        shown = printable_line(line, colour=True)
        assert not set(shown) & set("\x07\x08\x9b\x7f\u202e")
    assert "\x1b" not in harmless(text)
    redact_text(text)
    explain_text(text)


HEARTBEAT = b'{"rank":0,"pid":1,"beat":1,"moves":1,"step":3}'
TARGETS: dict[str, Target] = {
    "protocol-messages": Target(
        plain(protocol_messages), (b'{"type":"Hello"}', b'{"type":"Stop","why":"x"}')
    ),
    "protocol-lines": Target(plain(protocol_lines), (b'+{"type":\n="x"}\n', b"=\n=\n")),
    "join-handshake": Target(
        plain(handshake), (b"\x00\x00\x00\x02{}", b'\x00\x00\x00\x0f{"type":"Join"}')
    ),
    "join-code": Target(plain(join_code), (b"ABCD-EFGH-IJKL", b"7" * 80), (MusterError,)),
    "run-folder": Target(
        run_folder,
        (
            b'{"id":"a","name":"b"}',
            b'{"phase":"running","since_unix_s":1,"started_unix_s":1,"headline":"x","killed_ranks":[1]}',
            b'{"at_unix_s":1,"event":"restart","headline":"x"}\n{"at_unix_s":2,"event":"running"}\n',
            b'{"step":1,"loss":1.0,"at_unix_s":1,"stall_s":1,"path":"x","library":"torch.save"}\n',
            b'{"host":"a","attempt":0,"at_unix_s":2000000000,"ranks":[' + HEARTBEAT + b"]}",
        ),
    ),
    "json-lines": Target(
        plain(json_lines), (b'{"at_unix_s":1,"event":"x"}\n', b'{"a":"\\ud800"}\n', b"[" * 99)
    ),
    "checkpoint-manifest": Target(
        plain(manifest),
        (
            b'{"format":1,"step":1,"files":{}}',
            b'{"format":99}',
            b'{"format":2,"step":-1,"files":{"../x":{}}}',
        ),
    ),
    "settings-yaml": Target(
        settings_file,
        (
            b"train: {steps: 1}\n",
            b"a: &x [*x]\n",
            b"model:\n  build: 'm:f'\n",
            b"? !!python/object:os.system\n: 1\n",
        ),
        (MusterError,),
    ),
    "log-lines": Target(
        plain(log_lines),
        (
            b'Traceback (most recent call last):\n  File "a.py", line 1\nRuntimeError: CUDA out of memory\n',
            b"\x1b[31mred\x1b[0m \x1b]0;title\x07 password=hunter2 --token abc\n",
            b"[rank1]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error\n",
        ),
    ),
    "program-output": Target(
        plain(program_output),
        (
            b'[{"pid":1,"thread_id":1,"thread_name":"MainThread","os_thread_id":1,"active":true,'
            b'"frames":[{"name":"f","filename":"a.py","line":1,"short_filename":"a.py"}]}]',
            b"\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV12\t0-31\nGPU1\tNV12\t X \t0-31\n",
            b"00000000:3B:00.0",
        ),
    ),
    "flight-record": Target(
        plain(flight_record),
        (
            b'{"version":"2.10","pg_config":{"0":{"name":"0","desc":"default_pg","ranks":"[0, 1, 2]"}},'
            b'"entries":[{"process_group":["0","default_pg"],"collective_seq_id":1,"p2p_seq_id":0,'
            b'"profiling_name":"gloo:all_reduce","input_sizes":[[2]],"input_dtypes":["Float"],'
            b'"state":"scheduled","is_p2p":false,"frames":[]}]}',
        ),
    ),
    "checkpoint-of-a-script": Target(
        checkpoint_of_a_script,
        (
            b'{"metadata":{},"weight_map":{"a":"a.safetensors"}}',
            b'{"global_step":1,"max_steps":2}',
            b"\x02\0\0\0\0\0\0\0{}",
            b"PK\x03\x04" + bytes(26) + b"PK\x05\x06" + bytes(18),
            b"\x80\x04\x95\x10\0\0\0\0\0\0\0}\x94\x8c\x0drelative_path\x94\x8c\x08a.distcp\x94\x8c\x06offset\x94K\0\x8c\x06length\x94K\x01.",
        ),
    ),
    "model-folder": Target(
        model_folder,
        (
            b'{"model_type":"llama","architectures":["LlamaForCausalLM"],"dtype":"bfloat16"}',
            b'{"metadata":{"total_size":1},"weight_map":{"a":"model.safetensors"}}',
        ),
        (MusterError,),
    ),
    "data-lines": Target(
        data_lines,
        (b'{"text":"a"}\n{"text":"b"}\n', b'"a"\n\n[1]\n', b"\xff\n"),
        (MusterError,),
    ),
}
