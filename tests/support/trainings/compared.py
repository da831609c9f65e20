"""What the results of ``compare_runs.py`` say."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.support.trainings.launch import name_of


class Trained(dict[str, dict[str, Any]]):
    """The result of each case by its name; a case is trained when its result is first looked up.

    Args:
        cases: What tests may look up.
        compare_runs: The fixture of that name.
        common: What all cases have.
        options: Further arguments of ``compare_runs``.
        ranks: Processes.
    """

    def __init__(
        self,
        cases: Iterable[Mapping[str, Any]],
        compare_runs: Callable[..., list[dict[str, Any]]],
        common: Mapping[str, Any],
        *options: str,
        ranks: int = 2,
    ) -> None:
        super().__init__()
        self._cases = {name_of(case): {**common, **case} for case in cases}
        self._train = lambda case: compare_runs([case], *options, ranks=ranks)

    def __missing__(self, name: str) -> dict[str, Any]:
        (self[name],) = self._train(self._cases[name])
        return self[name]


def assert_as_eager(result: dict[str, Any]) -> None:
    """Nothing failed, and nothing differs from eager training."""
    assert not result["error"], result["error"]
    assert not result["differences"], result["differences"]


def assert_went_on_eagerly(result: dict[str, Any]) -> None:
    """After its failed capture the model was trained on without graphs."""
    assert_as_eager(result)
    assert (result["graphs"], result["replays"]) == (0, 0)


def assert_differs_from(result: dict[str, Any], step: int) -> None:
    """The loss of ``step`` is the first that differs from eager training, on some rank."""
    differences = result["differences"]
    assert any(f"losses[{step}]" in line for line in differences), differences
    assert not any(f"losses[{step - 1}]" in line for line in differences), differences
