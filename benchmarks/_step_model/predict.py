"""What the model says of larger models on more GPUs: when graphs matter, and when collectives are exposed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from .step import EAGER, MODES, Gpu, Host, Link, compute_ms, exposed_ms, step_ms
from .workload import Workload

# Published shapes: "The Llama 3 Herd of Models" (arXiv 2407.21783), "Llama 2" (arXiv 2307.09288).
MODELS = {
    "8B": {"layers": 32, "hidden": 4096, "ffn": 14336, "key_value_share": 8 / 32, "vocabulary": 128256},
    "13B": {"layers": 40, "hidden": 5120, "ffn": 13824, "key_value_share": 1.0, "vocabulary": 32000},
    "70B": {"layers": 80, "hidden": 8192, "ffn": 28672, "key_value_share": 8 / 64, "vocabulary": 128256},
}
SEQUENCE = 4096
TOKENS = [2**power for power in range(7, 19)]  # of a rank's micro-batch, tried for thresholds
MATTERS = 1.05  # eager to the best with graphs, and a step to one whose collectives are all hidden


def model(name: str, *, ranks: int, tokens: int) -> Workload:
    """Return the work of one of ``MODELS``; attention spans ``SEQUENCE`` tokens, of which a rank may have a part."""
    return Workload(sequence=SEQUENCE, tokens=tokens, ranks=ranks, gated=True, tied=False, **MODELS[name])  # type: ignore[arg-type]


def predictions(
    gpus: Sequence[int], tokens: int, gpu: Gpu, link: Link, host: Host, *, memory_gb: float
) -> Iterator[dict[str, Any]]:
    """Yield the model's figures of each of ``MODELS`` on each number of GPUs.

    Args:
        gpus: Numbers of GPUs, all of which a model is sharded over.
        tokens: Tokens of a rank's only micro-batch.
        gpu, link, host: Fitted and assumed values.
        memory_gb: Of a GPU.

    Yields:
        Milliseconds of ``compute_ms``, ``exposed_ms`` of collectives, and a step by mode; ``fits``, whether weights,
        gradients and optimizer states leave a GPU memory; and the fewest tokens a micro-batch, of ``TOKENS``, from
        which on ``eager_suffices`` (within ``MATTERS`` of the best) and ``collectives_are_hidden`` (likewise, within
        what the best takes without them). None: not even with the most.
    """
    for name in MODELS:
        for ranks in gpus:
            work = model(name, ranks=ranks, tokens=tokens)
            steps = {mode: round(step_ms(work, mode, gpu, link, host), 1) for mode in MODES}
            yield {
                "model": name,
                "gpus": ranks,
                "tokens": tokens,
                "state_gb": round(work.state_gb, 1),
                "fits": work.state_gb < memory_gb,
                "compute_ms": round(compute_ms(work, gpu), 1),
                "exposed_ms": round(exposed_ms(work, gpu, link), 1),
                "step_ms": steps,
                "eager_suffices": _from(work, lambda each: _eager(each, gpu, link, host)),
                "collectives_are_hidden": _from(work, lambda each: _exposed(each, gpu, link, host)),
            }


def _from(work: Workload, ratio: Callable[[Workload], float]) -> int | None:
    """The fewest of ``TOKENS`` from which on ``ratio`` stays within ``MATTERS``."""
    found = None
    for tokens in reversed(TOKENS):
        if ratio(replace(work, tokens=tokens)) > MATTERS:
            break
        found = tokens
    return found


def _best(work: Workload, gpu: Gpu, link: Link, host: Host) -> float:
    return min(step_ms(work, mode, gpu, link, host) for mode in MODES if mode != EAGER)


def _eager(work: Workload, gpu: Gpu, link: Link, host: Host) -> float:
    return step_ms(work, EAGER, gpu, link, host) / _best(work, gpu, link, host)


def _exposed(work: Workload, gpu: Gpu, link: Link, host: Host) -> float:
    best = _best(work, gpu, link, host)
    return best / (best - exposed_ms(work, gpu, link))
