"""Fits the model's values to measured runs by least squares of relative errors."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .runs import Run
from .step import ALL_LAYERS, EAGER, PER_LAYER, Gpu, Host, Link, compute_ms, step_ms

COLLECTIVES = ("AllGather", "ReduceScatter")
# Of a value against its start, e-fold, beside relative errors of runs: decides only what runs leave open.
PULL = 0.02


def least_squares(
    residuals: Callable[[np.ndarray], np.ndarray], start: Sequence[float], steps: int = 200
) -> np.ndarray:
    """Return positive values that make the sum of the squared ``residuals`` small (Levenberg-Marquardt, on logarithms).

    A weak pull towards ``start`` (``PULL``) decides what the residuals leave open.

    Args:
        residuals: Of values, shape (n,); returns shape (m,).
        start: Where to begin, n positive numbers.
        steps: Most steps to take.
    """
    origin = np.log(np.asarray(start, dtype=float))

    def errors(at: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(np.exp(at)), PULL * (at - origin)])

    place, damping = origin.copy(), 1e-2
    current = errors(place)
    for _ in range(steps):
        slopes = np.stack([(errors(place + shift) - current) / 1e-5 for shift in 1e-5 * np.eye(len(place))], axis=1)
        matrix = slopes.T @ slopes
        change = np.linalg.solve(matrix + damping * np.eye(len(place)), -slopes.T @ current)
        tried = errors(place + change)
        if tried @ tried < current @ current:
            place, current, damping = place + change, tried, damping / 3
            if np.abs(change).max() < 1e-7:
                break
        else:
            damping *= 4
    return np.exp(place)


def fit_gpu(runs: Sequence[Run]) -> Gpu:
    """Fit compute to that of profiled runs with graphs, in which collectives run beside it as in a fast step.

    Raises:
        ValueError: there are none.
    """
    measured = [
        (run.work, run.profile["compute_ms"]) for run in runs if run.mode != EAGER and run.profile.get("compute_ms")
    ]
    if not measured:
        raise ValueError("no run with graphs has a profile: run step_time.py without --no-profile")

    def residuals(values: np.ndarray) -> np.ndarray:
        gpu = Gpu(*values)
        return np.array([compute_ms(work, gpu) / ms - 1 for work, ms in measured])

    start = Gpu()
    return Gpu(*least_squares(residuals, [start.teraflops, start.layer_us, start.parameter_ps]).tolist())


def fit_link(runs: Sequence[Run], assumed: Link) -> Link:
    """Fit the link within a node to the median collective of profiled runs, which is a layer's.

    Raises:
        ValueError: no profile has collectives.
    """
    measured = [
        (run.work, run.profile["collectives"][name]["median_us"])
        for run in runs
        for name in COLLECTIVES
        if name in run.profile.get("collectives", {})
    ]
    if not measured:
        raise ValueError("no profile has collectives: run step_time.py without --no-profile")

    def link(values: np.ndarray) -> Link:
        return replace(assumed, gb_per_s=float(values[0]), start_us=float(values[1]))

    def residuals(values: np.ndarray) -> np.ndarray:
        tried = link(values)
        return np.array([tried.collective_us(work.layer_parameters, work.ranks) / us - 1 for work, us in measured])

    return link(least_squares(residuals, [assumed.gb_per_s, assumed.start_us]))


def fit_host(runs: Sequence[Run], gpu: Gpu, link: Link) -> Host:
    """Fit the host's costs to the step's times, and how slow each host is beside the first run's."""
    hosts = list(dict.fromkeys(run.host for run in runs))
    start = Host()

    def host(found: np.ndarray) -> Host:
        values = found.tolist()
        layer = dict(zip((EAGER, PER_LAYER, ALL_LAYERS), values[:3], strict=True))
        slowness = dict(zip(hosts, [1.0, *values[6:]], strict=True))
        return Host(layer, values[3], values[4], values[5], slowness)

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.array([error(run, gpu, link, host(values)) for run in runs])

    costs = [*start.layer.values(), start.outside, start.rest, start.rest_layer]
    return host(least_squares(residuals, costs + [1.0] * (len(hosts) - 1)))


def error(run: Run, gpu: Gpu, link: Link, host: Host) -> float:
    """By how much of its time the model's step is longer than ``run``'s."""
    return step_ms(run.work, run.mode, gpu, link, host, host.slowness[run.host]) / run.ms - 1
