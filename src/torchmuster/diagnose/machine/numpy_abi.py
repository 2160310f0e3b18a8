"""NumPy: whether torch and the other compiled packages can work with the one that is installed."""

from collections.abc import Iterator, Sequence

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import installed
from torchmuster.diagnose.machine.installed import Package
from torchmuster.finding import Finding, Status

# The first release that is compiled for NumPy 2: github.com/numpy/numpy/issues/26191 and the release
# notes of each. Older ones do not all say that they need NumPy 1.
_FIRST_FOR_NUMPY_2 = {
    "torch": (2, 3),
    "pandas": (2, 2, 2),
    "scipy": (1, 13),
    "scikit-learn": (1, 4, 2),
    "matplotlib": (3, 8, 4),
    "pyarrow": (16,),
}
_SHOWN = 6


def _numpy_abi_numpy(surroundings: Surroundings) -> Iterator[Finding]:
    found = installed.packages(surroundings)
    numpy = installed.first_installed("numpy", found)
    if numpy is None:
        if installed.copies("numpy", surroundings):
            yield Finding(name="numpy", status=Status.OK, what="NumPy without metadata")
            return
        yield Finding(
            name="numpy-missing",
            status=Status.NOTE,
            what="NumPy is not installed",
            why="torch works without it, but says so at each start; .numpy() and from_numpy() fail",
            fix=f"{surroundings.python} -m pip install numpy",
        )
        return
    taken = [one for one in found if one is installed.first_installed(one.name, found)]
    old = [one for one in taken if _made_for_one(one)] if numpy.release >= (2,) else []
    if old:
        yield _mismatch(numpy, old, surroundings)
        return
    bounded = [one for one in taken if _refuses(one, numpy)]
    if bounded:
        yield _unwanted(numpy, bounded, surroundings)
        return
    yield Finding(name="numpy", status=Status.OK, what=f"NumPy {numpy.version}")


def _made_for_one(one: Package) -> bool:
    since = _FIRST_FOR_NUMPY_2.get(one.name)
    return since is not None and one.release < since


def _refuses(one: Package, numpy: Package) -> bool:
    """Say whether a package states that this NumPy is too new; where it depends, it does not count."""
    return any(
        need.name == "numpy" and not need.marker and need.below and numpy.release >= need.below
        for need in one.requirements()
    )


def _mismatch(numpy: Package, old: Sequence[Package], surroundings: Surroundings) -> Finding:
    torch = any(one.name == "torch" for one in old)
    names = _listed(old)
    return Finding(
        name="numpy-abi",
        status=Status.FAILURE if torch else Status.WARNING,
        what=f"NumPy {numpy.version} does not fit to {names}, compiled for NumPy 1",
        why="“A module that was compiled using NumPy 1.x cannot be run in NumPy 2”"
        + ("; tensors cannot be made from arrays: “Numpy is not available”" if torch else ""),
        fix=f'{surroundings.python} -m pip install "numpy<2"\n'
        f"or newer ones: {surroundings.python} -m pip install --upgrade "
        + " ".join(one.name for one in old),
    )


def _unwanted(numpy: Package, bounded: Sequence[Package], surroundings: Surroundings) -> Finding:
    return Finding(
        name="numpy-too-new",
        status=Status.NOTE,  # many state a bound to be on the safe side, and work beyond it
        what=f"NumPy {numpy.version} is newer than {_listed(bounded)} allow"
        + ("s" if len(bounded) == 1 else ""),
        why="they state an older one as what they work with; importing them may fail or warn",
        fix=f"{surroundings.python} -m pip install --upgrade "
        + " ".join(one.name for one in bounded[:_SHOWN]),
    )


def _listed(some: Sequence[Package]) -> str:
    names = [f"{one.name} {one.version}" for one in some[:_SHOWN]]
    return ", ".join(names) + (f" and {len(some) - _SHOWN} others" if len(some) > _SHOWN else "")


CHECKS = (
    Check(
        name="numpy",
        asks="Does the installed NumPy fit to torch and to what else is compiled for it?",
        run=_numpy_abi_numpy,
    ),
)
