"""Where two runs of a training first differ."""

from typing import Any

type Sums = dict[str, tuple[float, float]]  # of a gradient and of its absolute values, by the parameter's name
type Run = tuple[list[float], list[float], list[Sums]]  # of each step the loss, the gradient norm, the gradients


def first_difference(one: Run, other: Run) -> dict[str, Any] | None:
    """Return the first step that differs, with losses, norms and the names of gradients that do; None if none does."""
    for step, ((loss, norm, sums), (loss_of_other, norm_of_other, sums_of_other)) in enumerate(
        zip(zip(*one, strict=True), zip(*other, strict=True), strict=True)
    ):
        names = [name for name in sums if sums[name] != sums_of_other.get(name)]
        losses, norms = (loss, loss_of_other), (norm, norm_of_other)
        if names or losses[0] != losses[1] or norms[0] != norms[1]:
            return {"step": step, "losses": losses, "norms": norms, "gradients": names}
    return None
