"""Which NVIDIA driver serves which CUDA, and which GPUs a CUDA can make code for: sourced facts."""

from torchmuster.diagnose.machine.installed import release

# CUDA's major version -> the oldest driver that serves it (Linux, Windows). From the release notes of
# the CUDA toolkit, table "Minimum Required Driver Version for CUDA Minor Version Compatibility"
# (docs.nvidia.com/cuda/cuda-toolkit-release-notes).
_LEAST_DRIVERS = {
    11: ("450.80.02", "452.39"),
    12: ("525.60.13", "528.33"),
    13: ("580", "580"),
}
# CUDA's major version -> the lowest compute capability that it still has a compiler for. From the
# same notes: CUDA 12 dropped Kepler, CUDA 13 dropped Maxwell, Pascal and Volta.
_LOWEST_CAPABILITY = {11: (3, 5), 12: (5, 0), 13: (7, 5)}
# Compute capability (major) -> the first CUDA that has a compiler for it: Hopper, Blackwell. A GPU
# runs code of its own major version, so a higher minor one needs nothing newer.
_FIRST_CUDA = {9: (11, 8), 10: (12, 8), 12: (12, 8)}


def least_driver(cuda: str, system: str) -> str | None:
    """Return the oldest driver that serves a CUDA version; None if it is not known."""
    known = _LEAST_DRIVERS.get(release(cuda)[0]) if release(cuda) else None
    return known and known[system == "win32"]


def driver_serves(cuda: str, *, driver: str | None, serves: str | None) -> bool | None:
    """Say whether a driver is new enough for a CUDA version; None if that is not known.

    ``serves`` is the newest CUDA that the driver says to serve. It decides, because beside a
    compatibility package an old driver serves more than its own version tells.
    """
    wanted = release(cuda)
    if not wanted:
        return None
    if serves and release(serves):
        return release(serves)[0] >= wanted[0]
    least = least_driver(cuda, "linux")
    return release(driver) >= release(least) if driver and least else None


def why_no_code_for(capability: tuple[int, int], cuda: str) -> str:
    """Say why a build for this CUDA cannot have code for a GPU; nothing if it can."""
    name = f"{capability[0]}.{capability[1]}"
    wanted = release(cuda)[:2]
    lowest = _LOWEST_CAPABILITY.get(wanted[0]) if wanted else None
    first = _FIRST_CUDA.get(capability[0])
    if lowest and capability < lowest:
        return (
            f"its compute capability is {name}, and CUDA {cuda} makes code for "
            f"{lowest[0]}.{lowest[1]} and newer only"
        )
    if first and wanted < first:
        return (
            f"its compute capability is {name}, for which there is code since CUDA "
            f"{first[0]}.{first[1]}; this torch is built with {cuda}"
        )
    return ""
