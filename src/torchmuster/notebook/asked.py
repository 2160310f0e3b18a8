"""What ranks were asked for."""

from dataclasses import dataclass

from torchmuster.launch.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Ranks as for ``muster run``, or with guests as for ``muster host``; the command is added later."""

    spec: JobSpec
    guests: int = 0

    @property
    def many(self) -> bool:
        """Whether ranks are on other machines as well."""
        return bool(self.guests or self.spec.hosts)
