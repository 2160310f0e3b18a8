"""Each struck run beside the undisturbed one of its layout."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from stress.kill_matrix.events import Layout, Plan
from stress.kill_matrix.struck_run import Broken, Ended, struck, undisturbed
from stress.kill_matrix.table import Result


class Judge:
    """Has runs struck in a folder, and keeps what those that failed have left there."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        tell: Callable[[str], None],
        expected: Mapping[Layout, Ended] | None = None,
    ) -> None:
        self._folder = folder
        self._steps = steps
        self._tell = tell
        self._expected = dict(expected or {})

    def judge(self, plan: Plan) -> Result:
        """Strike a run as planned, and compare what it came to."""
        place = self._folder / f"run-{plan.number}"
        self._tell(str(plan))
        try:
            expected = self._undisturbed(plan.layout)
            found = struck(plan, self._steps, place, lambda text: self._tell(f"  {text}"))
            problem = difference(expected, found)
        except Broken as error:
            problem = str(error)
        if problem:
            self._tell(f"  FAILED: {problem}; see {place}")
        else:
            self._tell("  equal")
            shutil.rmtree(place)
        return Result(plan=plan, problem=problem)

    def _undisturbed(self, layout: Layout) -> Ended:
        if layout not in self._expected:
            place = self._folder / f"{layout}".replace(" ", "-")
            self._expected[layout] = undisturbed(layout, self._steps, place)
        return self._expected[layout]


def difference(expected: Ended, found: Ended) -> str:
    """Say what is not the same to the last bit; "" if everything is."""
    steps = [one for one in expected.losses if found.losses[one] != expected.losses[one]]
    if steps:
        return f"the losses differ from step {steps[0]} on, in {len(steps)} steps"
    if found.weights_sha256 != expected.weights_sha256:
        return "the losses are the same, but the weights are not"
    return ""
