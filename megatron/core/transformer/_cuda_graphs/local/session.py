"""What the runners of one recording share: the capture of their graphs, static memory, passes in flight."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ..attribute_reads import AttributeReads
from ..engine.memory import release_cached_memory, reuse_across_streams
from ..engine.rng import GraphStates
from ..engine.slot import WarmupRecord
from .arguments import metadata_of
from .capture import RecordedCall
from .guards import FunctionGuard
from .memory import StaticBuffers
from .turns import Turns


class CaptureSession:
    """What the runners of one recorded step share: the capture of their graphs, and the state of their replays.

    Attributes:
        recording: Identifies this step in the metadata of tensors. Tensors may outlive it; they refer to this object
            and not to the session.
        buffers: Static tensors, and during capture which graph uses which.
        turns: Which runners are between their forward and their backward pass, and which pass may come next.
        guards: By function: what compares its module with what it was at capture.
        capturing: The pass that is warmed up or captured now, for errors; None between passes.
    """

    def __init__(self) -> None:
        self.recording = object()
        self.buffers = StaticBuffers()
        self.turns = Turns()
        self.guards: dict[Hashable, FunctionGuard] = {}
        self.capturing: str | None = None
        self._rng_states: GraphStates | None = None

    def capture(self, record: Sequence[tuple]) -> None:
        """Capture ``(runner, "fwd", args, kwargs, outputs)`` and ``(runner, "bwd")`` in their order.

        Raises:
            RuntimeError: a pass cannot be captured; ``capturing`` names it.
        """
        runners = [entry[0] for entry in record if entry[1] == "fwd"]
        reads = AttributeReads()
        with reads.noted({runner.module for runner in runners}), reuse_across_streams():
            self._warm_up(record)
            release_cached_memory()
            self._capture_passes(record)
        self.capturing = None
        for runner in runners:
            for meta in (*runner.call.inputs, *runner.call.outputs):
                metadata_of(meta).users |= runner.turn.bit
        functions = {runner.function: runner.call for runner in runners}
        self.guards = {
            function: FunctionGuard(call.name, call.module, reads, call.autocast)
            for function, call in functions.items()
        }
        for runner in runners:
            runner.finish()
        self._rng_states = GraphStates()

    def _warm_up(self, record: Sequence[tuple]) -> None:
        """Run every function once for each kind of arguments, so that setup in a first call is not captured."""
        alike: defaultdict[Hashable, list[Any]] = defaultdict(list)
        for runner, kind, *_ in record:
            if kind == "fwd":
                kinds = ((meta.shape, meta.dtype) for meta in runner.call.metas)
                alike[runner.function, runner.bwd_graph_recorded, *kinds].append(runner)
        users: defaultdict[tuple[int, torch.Tensor], list[RecordedCall]] = defaultdict(list)
        for runners in alike.values():
            warmup = WarmupRecord()
            for runner in runners:
                runner.begin_capture(self, warmup)
            first = runners[0]
            self.capturing = str(first)
            trained = first.call.warm_up([meta.zeros_like() for meta in first.call.metas], first.num_warmup_steps)
            for runner in runners:
                for param in trained if runner.bwd_graph_recorded else ():
                    users[runner.backward_pass, param].append(runner.call)
        # A layer that is called twice in a pass has two runners; layers may share weights.
        for (_, param), together in users.items():
            for call in together if len(together) > 1 else ():
                call.shared_params += (param,)
        self.capturing = None

    def _capture_passes(self, record: Sequence[tuple]) -> None:
        last_backward: dict[Hashable, RecordedCall] = {}
        for runner, kind, *arguments in record:
            if kind == "fwd":
                self.capturing = str(runner)
                runner.create_fwd_graph(*arguments)
            else:
                self.capturing = f"the backward pass of {runner}"
                runner.create_bwd_graph()
                previous = last_backward.get(runner.function)
                if previous is not None:
                    previous.release_escaping_gradients()
                last_backward[runner.function] = runner.call

    def begin_step(self) -> None:
        """Begin a step: static inputs may be stale, and no backward pass is to come."""
        self.turns.in_flight = 0
        self.buffers.forget_values()

    def follow_rng_tracker(self) -> None:
        """Let graphs draw from what Megatron's RNG tracker has now. It is called before each replay."""
        if self._rng_states is not None:
            self._rng_states.adopt()
