"""NumPy: whether torch and other compiled packages support the installed version."""

from collections.abc import Iterator, Sequence

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import installed
from torchmuster.diagnose.machine.installed import Package
from torchmuster.finding import Finding, Status

# The first release compiled for NumPy 2: github.com/numpy/numpy/issues/26191 and the release notes
# of each. Not all older releases declare that they need NumPy 1.
_FIRST_FOR_NUMPY_2 = {
    "torch": (2, 3),
    "pandas": (2, 2, 2),
    "scipy": (1, 13),
    "scikit-learn": (1, 4, 2),
    "matplotlib": (3, 8, 4),
    "pyarrow": (16,),
}
_SHOWN = 6


def _numpy(surroundings: Surroundings) -> Iterator[Finding]:
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
            why="torch works without it, but warns at each start; .numpy() and from_numpy() fail",
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
    """Return whether a package declares this NumPy too new; ignore requirements with markers."""
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
        what=f"NumPy {numpy.version} is incompatible with {names}, compiled for NumPy 1",
        why="“A module that was compiled using NumPy 1.x cannot be run in NumPy 2”"
        + ("; creating tensors from arrays fails: “Numpy is not available”" if torch else ""),
        fix=f'{surroundings.python} -m pip install "numpy<2"\n'
        f"or upgrade the packages: {surroundings.python} -m pip install --upgrade "
        + " ".join(one.name for one in old),
    )


def _unwanted(numpy: Package, bounded: Sequence[Package], surroundings: Surroundings) -> Finding:
    return Finding(
        name="numpy-too-new",
        status=Status.NOTE,  # many packages declare a cautious upper bound
        what=f"NumPy {numpy.version} is newer than {_listed(bounded)} allow"
        + ("s" if len(bounded) == 1 else ""),
        why="they declare support for older versions only; importing them may fail or warn",
        fix=f"{surroundings.python} -m pip install --upgrade "
        + " ".join(one.name for one in bounded[:_SHOWN]),
    )


def _listed(some: Sequence[Package]) -> str:
    names = [f"{one.name} {one.version}" for one in some[:_SHOWN]]
    return ", ".join(names) + (f" and {len(some) - _SHOWN} others" if len(some) > _SHOWN else "")


CHECKS = (
    Check(
        name="numpy",
        asks="Is the installed NumPy compatible with torch and other compiled packages?",
        run=_numpy,
    ),
)
