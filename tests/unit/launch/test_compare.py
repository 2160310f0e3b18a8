"""What is said where machines differ."""

from typing import Any

import pytest

from torchmuster import __version__
from torchmuster.finding import Finding, Status
from torchmuster.launch import compare, wire
from torchmuster.launch.compare import Described
from torchmuster.launch.spec import JobSpec

SPEC = JobSpec(name="job", command=("train.py", "--epochs", "3"), folder="/home/ana/project")


def fingerprint(
    script: str = "s", code: str = "c", files: int = 7, packages: str = "p"
) -> wire.Fingerprint:
    return wire.Fingerprint(
        script_sha256=script, code_sha256=code, code_files=files, packages_sha256=packages
    )


def node(
    name: str,
    fingerprint: wire.Fingerprint | None = None,
    offset_s: float | None = 0.0,
    **fields: Any,
) -> Described:
    known: dict[str, Any] = {
        "host": name,
        "user": "ana",
        "pid": 1,
        "system": "linux",
        "machine": "x86_64",
        "python": "3.11.7",
        "torch": "2.13.0+cu126",
        "torchmuster": __version__,
        "cores": 8,
        "clock_unix_s": 0.0,
        "addresses": (),
    }
    return Described(
        name=name,
        record=wire.NodeRecord(**{**known, **fields}),
        clock_offset_s=offset_s,
        fingerprint=fingerprint,
    )


def only(*nodes: Described, spec: JobSpec = SPEC, **more: Any) -> Finding:
    (finding,) = compare.all_nodes(nodes, spec, **more)
    return finding


def test_machines_that_are_alike() -> None:
    alike = fingerprint()
    nodes = [node("a", alike), node("b", alike, user="root", host="other", cores=96)]
    assert compare.all_nodes(nodes, SPEC) == []
    assert compare.all_nodes([node("a"), node("b", python="3.11.2", offset_s=4.9)], SPEC) == []
    assert compare.all_nodes([], SPEC) == []


def test_different_operating_systems_are_refused_with_the_ways_out() -> None:
    finding = only(node("a"), node("b", system="win32"), node("c"))
    assert finding.status is Status.FAILURE
    assert finding.name == "mixed-operating-systems"
    assert finding.what == (
        "the machines have different operating systems: Linux on a and c; Windows on b"
    )
    assert finding.why == (
        "gloo cannot connect ranks on different systems, and NCCL exists on Linux only"
    )
    assert finding.fix.splitlines() == [
        "run all of them on Linux (on Windows inside WSL2)",
        "or use only the machines of one kind: a and c",
    ]


def test_no_torch_is_refused_with_the_line_that_installs_the_same_one() -> None:
    finding = only(node("a"), node("b", torch=None))
    assert finding.status is Status.FAILURE
    assert finding.what == "torch is not installed on b"
    assert finding.fix == "python -m pip install torch==2.13.0  # on b"


def test_no_torch_anywhere() -> None:
    finding = only(node("a", torch=None), node("b", torch=None))
    assert finding.what == "torch is not installed on a and b"
    assert finding.fix == "python -m pip install torch  # on a and b"


def test_another_release_of_torch_is_refused() -> None:
    finding = only(node("a"), node("b", torch="2.8.0+cpu"), node("c", torch="2.8.0+cu126"))
    assert finding.status is Status.FAILURE
    assert finding.what == "torch differs: 2.13.0 on a; 2.8.0 on b and c"
    assert finding.fix == "python -m pip install torch==2.13.0  # on b and c"


def test_another_build_of_torch_is_a_warning() -> None:
    finding = only(node("a"), node("b", torch="2.13.0+cpu"))
    assert finding.status is Status.WARNING
    assert finding.what == "the builds of torch differ: 2.13.0+cu126 on a; 2.13.0+cpu on b"
    assert finding.why == (
        "the same release, built for different hardware; a +cpu build does not use GPUs"
    )


def test_another_python_is_a_warning() -> None:
    finding = only(node("a"), node("b", python="3.12.1"))
    assert finding.status is Status.WARNING
    assert finding.what == "Python differs: 3.11 on a; 3.12 on b"


def test_another_kind_of_processor_is_a_warning() -> None:
    finding = only(node("a"), node("b", machine="aarch64"), node("c", machine="arm64"))
    assert finding.status is Status.WARNING
    assert finding.what == "the processors are of different kinds: x86_64 on a; arm64 on b and c"
    assert compare.all_nodes([node("a"), node("b", machine="AMD64")], SPEC) == []


def test_another_torchmuster_is_a_warning() -> None:
    finding = only(node("a"), node("b", torchmuster="9.9.9"))
    assert finding.status is Status.WARNING
    assert finding.what == f"torchmuster differs: {__version__} on a; 9.9.9 on b"
    assert finding.fix == f"python -m pip install torchmuster=={__version__}  # on b"


def test_another_protocol_is_refused() -> None:
    trouble = compare.other_protocol(
        "b", wire.Hello(protocol=99, record=node("b", torchmuster="9.9.9").record)
    )
    assert trouble.what == f"torchmuster on b speaks protocol 99, here it is {wire.PROTOCOL}"
    assert trouble.why == f"b has version 9.9.9, this machine {__version__}"
    assert trouble.fix == f"python -m pip install torchmuster=={__version__}  # on b"
    assert trouble.exit_code == 2
    assert b'"exit_code":2' in wire.encode(wire.Refused(trouble=trouble))


def test_clocks_are_only_noted() -> None:
    finding = only(
        node("a", offset_s=10.0), node("b", offset_s=70.2), node("c", offset_s=-7190.0), node("d")
    )
    assert finding.status is Status.NOTE
    assert finding.what == (
        "clocks differ from that of a: b is 1 min ahead, c is 2 h behind and d is 10 s behind"
    )
    assert finding.why.startswith(
        "this does not harm a run of muster, but the times in logs differ"
    )


def test_a_clock_that_was_not_read_is_not_compared() -> None:
    nodes = [node("a", offset_s=None), node("b", offset_s=100.0)]
    assert compare.all_nodes(nodes, SPEC) == []
    assert compare.all_nodes(nodes[::-1], SPEC) == []


def test_a_script_that_is_missing_is_copied() -> None:
    finding = only(node("a", fingerprint()), node("b", fingerprint(script="", code="x")))
    assert finding.status is Status.FAILURE
    assert finding.name == "script-missing"
    assert finding.what == "train.py is not on b"
    assert finding.why == "every machine runs its own copy, in /home/ana/project"
    assert finding.fix == "rsync -ac /home/ana/project/ b:/home/ana/project/  # on a"


def test_a_script_that_is_nowhere() -> None:
    missing = fingerprint(script="", code="")
    finding = only(node("a", missing), node("b", missing))
    assert finding.what == "train.py is not on a and b"
    assert finding.fix == "check the path, or start it from the folder that has it"


def test_a_module_that_is_nowhere_is_left_to_python() -> None:
    module = JobSpec(name="job", command=("pkg.train",), module=True, folder="/home/ana/project")
    missing = fingerprint(script="", code="")
    assert compare.all_nodes([node("a", missing), node("b", missing)], module) == []
    finding = only(node("a", fingerprint()), node("b", missing), spec=module)
    assert finding.what == "module pkg.train is not on b"
    assert finding.fix == "rsync -ac /home/ana/project/ b:/home/ana/project/  # on a"


def test_another_script_is_refused_and_told_once() -> None:
    finding = only(node("a", fingerprint()), node("ana@b", fingerprint(script="x", code="y")))
    assert finding.status is Status.FAILURE
    assert finding.name == "script-differs"
    assert finding.what == "train.py is not the same on ana@b as on a"
    assert finding.fix == "rsync -ac /home/ana/project/ ana@b:/home/ana/project/  # on a"


def test_other_code_beside_the_script_is_refused() -> None:
    spec = JobSpec(name="job", command=("scripts/my train.py",), folder="/home/ana/a project")
    finding = only(node("a", fingerprint()), node("b", fingerprint(code="x", files=9)), spec=spec)
    assert finding.status is Status.FAILURE
    assert finding.name == "code-differs"
    assert finding.what == "the code beside scripts/my train.py is not the same on b as on a"
    assert finding.why == (
        "Python files in /home/ana/a project/scripts differ: 7 files on a, 9 files on b"
    )
    assert finding.fix == (
        "rsync -ac '/home/ana/a project/scripts/' 'b:/home/ana/a project/scripts/'  # on a"
    )


def test_code_that_was_too_much_to_look_at_is_not_compared() -> None:
    nodes = [node("a", fingerprint()), node("b", fingerprint(code=""))]
    assert compare.all_nodes(nodes, SPEC) == []
    assert compare.all_nodes(nodes[::-1], SPEC) == []


def test_windows_has_no_rsync() -> None:
    spec = JobSpec(name="job", command=("train.py",), folder=r"C:\work")
    nodes = [node("a", fingerprint(), system="win32"), node("b", fingerprint("x"), system="win32")]
    assert only(*nodes, spec=spec).fix == r"copy C:\work from a to b"


def test_other_packages_are_a_warning_with_the_first_differences() -> None:
    nodes = [node("a", fingerprint()), node("b", fingerprint(packages="x"))]
    assert only(*nodes).why == ""
    packages = {
        0: {"numpy": "2.1.0", "psutil": "7.0", "torch": "2.13.0", "zstd": "1"},
        1: {"numpy": "1.26.4", "psutil": "7.0", "torch": "2.12.0", "extra": "3"},
    }
    finding = only(*nodes, packages=packages)
    assert finding.status is Status.WARNING
    assert finding.name == "packages-differ"
    assert finding.what == "the installed packages on b are not those on a"
    assert finding.why == "a / b: extra none / 3, numpy 2.1.0 / 1.26.4, zstd 1 / none"
    assert finding.fix.splitlines() == [
        "pip freeze > requirements.txt  # on a, and then on the others:",
        "pip install -r requirements.txt",
    ]


def test_many_different_packages_are_told_briefly() -> None:
    packages: dict[int, dict[str, str]] = {0: {f"p{n}": "1" for n in range(9)}, 1: {}}
    finding = only(
        node("a", fingerprint()), node("b", fingerprint(packages="x")), packages=packages
    )
    assert finding.why == (
        "a / b: p0 1 / none, p1 1 / none, p2 1 / none, p3 1 / none, p4 1 / none, and 4 more"
    )


def test_packages_are_those_of_the_machine_and_not_of_another_of_its_name() -> None:
    nodes = [node("a", fingerprint()), node("b"), node("vm", fingerprint())]
    nodes += [node("vm", fingerprint(packages="x"))]
    packages = {0: {"numpy": "2"}, 3: {"numpy": "1"}}
    assert only(*nodes, packages=packages).why == "a / vm: numpy 2 / 1"


def test_packages_that_differ_only_in_torch_need_no_finding_of_their_own() -> None:
    nodes = [node("a", fingerprint())]
    nodes += [node(name, fingerprint(packages="x"), torch="2.13.0+cpu") for name in ("b", "c")]
    packages = {0: {"torch": "2.13.0+cu126"}, 1: {"torch": "2.13.0+cpu"}}
    assert only(*nodes, packages=packages).name == "torch-build"


def test_few_machines_are_asked_for_their_packages() -> None:
    kinds = ["p", "p", "x", "p", "x", "y"]
    nodes = [node(f"n{n}", fingerprint(packages=kind)) for n, kind in enumerate(kinds)]
    assert compare.ask_for_packages(nodes) == [0, 2, 5]
    assert compare.ask_for_packages(nodes[:2]) == []
    many = [node(f"n{n}", fingerprint(packages=str(n))) for n in range(1000)]
    assert compare.ask_for_packages(many) == [0, 1, 2, 3]
    assert compare.ask_for_packages([node("a"), node("b")]) == []


@pytest.mark.timeout(120)
def test_ten_thousand_machines_that_all_differ_are_told_briefly() -> None:
    nodes = [node("head", fingerprint())]
    nodes += [
        node(
            f"n{n}",
            fingerprint(script=f"s{n % 3}", code=f"c{n}", packages=f"p{n}"),
            offset_s=float(n),
            torch=None if n % 5 == 0 else f"2.{n % 9}.0",
            python=f"3.{n % 50}.0",
            system="win32" if n % 7 == 0 else "linux",
        )
        for n in range(9_999)
    ]
    findings = compare.all_nodes(nodes, SPEC)
    assert len(findings) == 7
    assert max(len(one.what) + len(one.why) + len(one.fix) for one in findings) < 800
    by_name = {one.name: one for one in findings}
    assert by_name["script-differs"].what == (
        "train.py is not the same on n0, n1, n2 and 9,996 others as on head"
    )
    assert by_name["script-differs"].fix.splitlines()[2:] == [
        "rsync -ac /home/ana/project/ n2:/home/ana/project/",
        "# and so for 9,996 others",
    ]
    assert by_name["python-version"].what.endswith("; others on 9,199 more")


def test_one_difference_of_many_machines_is_one_finding() -> None:
    nodes = [node("a", fingerprint())]
    nodes += [node(f"n{n}", fingerprint(code="x")) for n in range(9_999)]
    assert only(*nodes).what == (
        "the code beside train.py is not the same on n0, n1, n2 and 9,996 others as on a"
    )
