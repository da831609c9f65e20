"""State that the runners of one recording share: the capture of their graphs, static memory, passes in flight."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..engine.memory import release_cached_memory
from ..engine.rng import GraphStates
from ..engine.slot import WarmupRecord
from ..replay_conditions import AttributeReads, ReplayConditions
from .arguments import CudagraphBufferMetadata, metas_of
from .buffers import StaticBuffers, StaticInput
from .parameter_guard import ParameterGuard
from .tensor_reuse_pool import TensorReusePool
from .turns import Turns


class Runner(Protocol):
    """The interface of a runner for its session."""

    module: torch.nn.Module
    function: Hashable
    backward_pass: int
    autocast: list[Any]  # in force when the runner was recorded

    @property
    def name(self) -> str:
        """What errors call it."""

    def begin_capture(self, session: "CaptureSession", warmup: WarmupRecord) -> None:
        """Prepare for ``warm_up`` and the capture; ``warmup`` is shared by passes of the same function."""

    def share_params(self, params: Sequence[torch.Tensor]) -> None:
        """Leave the gradients of ``params`` to autograd."""

    def warm_up(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run both passes, and return the parameters that got a gradient."""

    def create_fwd_graph(self, args: Any, kwargs: Any, outputs: Any = None, clone_inputs: bool = True) -> None:
        """Capture the forward pass."""

    def create_bwd_graph(self) -> None:
        """Capture the backward pass."""

    def release_escaping_gradients(self) -> None:
        """Release the memory of gradients that no graph reads."""

    def finish(self) -> None:
        """Prepare for replays."""


class CaptureSession:
    """A recorded step, the capture of its graphs, and their replays.

    Attributes:
        recording: Identifies this step in the metadata of tensors. Tensors may outlive it; they refer to this object
            and not to the session.
        buffers: Which graph uses which static tensor, during capture.
        turns: Which passes may be replayed next.
        capturing: The pass that is warmed up or captured now, for errors; None between passes.
    """

    def __init__(self) -> None:
        self.recording = object()
        self.buffers = StaticBuffers(TensorReusePool())
        self.turns = Turns()
        self.capturing: str | None = None
        self._static_inputs: dict[int, StaticInput] = {}
        self._users: dict[int, int] = {}
        self._read: set[int] = set()
        self._guards: dict[Hashable, ParameterGuard] = {}
        self._conditions: dict[Hashable, ReplayConditions] = {}
        self._rng_states: GraphStates | None = None
        self._checked = self._checked_with_grad = False

    # -------------------------------------------------------------------------------------------------- capture

    def capture(self, record: Sequence[tuple]) -> None:
        """Capture ``(runner, "fwd", args, kwargs, outputs)`` and ``(runner, "bwd")`` in their order.

        Raises:
            RuntimeError: a pass cannot be captured; ``capturing`` names it.
        """
        self.turns.take_order(record)
        runners: list[Runner] = [entry[0] for entry in record if entry[1] == "fwd"]
        one_for_each_function = {runner.function: runner for runner in runners}
        reads = AttributeReads()
        with reads.noted({runner.module for runner in runners}):
            self._capture(record)
        self.capturing = None
        self._users = self._users_of_tensors(record)
        for runner in runners:
            runner.finish()
        self._conditions = {
            function: ReplayConditions(
                [runner.module], reads, name=runner.name, parameters=False, autocast=runner.autocast
            )
            for function, runner in one_for_each_function.items()
        }
        self._rng_states = GraphStates()
        self._guards = {
            function: ParameterGuard(runner.name, runner.module) for function, runner in one_for_each_function.items()
        }

    def _capture(self, record: Sequence[tuple]) -> None:
        self._warm_up(record)
        release_cached_memory()
        last_backward: dict[Hashable, Runner] = {}
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
                last_backward[runner.function] = runner

    def _warm_up(self, record: Sequence[tuple]) -> None:
        """Run every function once for each kind of arguments, so that setup in a first call is not captured."""
        with_backward = {entry[0] for entry in record if entry[1] == "bwd"}
        trained: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        keys: dict[Runner, Hashable] = {}
        found: dict[Hashable, WarmupRecord] = {}
        for runner, kind, *arguments in record:
            if kind != "fwd":
                continue
            metas = metas_of(*arguments[:2])
            key = (runner.function, runner in with_backward, *((meta.shape, meta.dtype) for meta in metas))
            keys[runner] = key
            runner.begin_capture(self, found.setdefault(key, WarmupRecord()))
            if key not in trained:
                self.capturing = str(runner)
                trained[key] = runner.warm_up([meta.zeros_like() for meta in metas])
        self.capturing = None
        for runner, params in _shared_params({runner: trained[keys[runner]] for runner in with_backward}).items():
            runner.share_params(params)

    def _users_of_tensors(self, record: Sequence[tuple]) -> dict[int, int]:
        """Return for each tensor the set of runners that need its memory until their backward pass."""
        users: dict[int, int] = {}
        for runner, kind, *arguments in record:
            bit = self.turns.of(runner).bit
            for meta in metas_of(arguments[0], arguments[1]) + metas_of(arguments[2]) if kind == "fwd" else ():
                key = id(meta.cg_buffer_metadata)
                users[key] = users.get(key, 0) | bit
        return users

    def static_input(self, tensor: torch.Tensor, is_written: bool) -> StaticInput:
        """Return the ``StaticInput`` for ``tensor``, which graphs may share.

        Args:
            tensor: The static tensor.
            is_written: Whether the graph writes its inputs.
        """
        only_copied_to = self.buffers.holds_inputs_only(tensor)
        static = self._static_inputs.setdefault(tensor.data_ptr(), StaticInput(tensor.detach(), only_copied_to))
        static.only_copied_to &= not is_written
        return static

    def users_of(self, metadata: object) -> int:
        """The runners that need the value of a tensor with this ``cg_buffer_metadata`` until their backward pass."""
        return self._users.get(id(metadata), 0)

    def is_first_reader(self, metadata: CudagraphBufferMetadata) -> bool:
        """Whether no graph returns the tensor of ``metadata``, and this is the first call for it."""
        is_first = not metadata.is_cudagraph_output and id(metadata) not in self._read
        self._read.add(id(metadata))
        return is_first

    # --------------------------------------------------------------------------------------------------- replay

    def begin_step(self) -> None:
        """Begin a step: no pass is in flight, parameters may have moved, and static inputs may be stale."""
        self.turns.end_all()
        if self._rng_states is not None:
            self._rng_states.adopt()
        self._checked = self._checked_with_grad = False
        for static in self._static_inputs.values():
            static.forget()

    def check_parameters(self) -> None:
        """Compare the parameters of all modules with those at capture, once a step.

        Raises:
            RuntimeError: a parameter was moved, replaced, frozen or unfrozen since.
        """
        grad_enabled = torch.is_grad_enabled()
        if self._checked_with_grad or (self._checked and not grad_enabled):
            return
        for guard in self._guards.values():
            guard.check(grad_enabled)
        self._checked, self._checked_with_grad = True, grad_enabled

    def check_conditions(self, runner: Runner) -> None:
        """Make sure that the graphs of ``runner`` compute what its module would in training now.

        Raises:
            RuntimeError: something that they do not notice has changed since capture; names it.
        """
        conditions = self._conditions.get(runner.function)
        if conditions is not None and conditions.have_changed():
            raise RuntimeError(
                f"{conditions.changes()} (--cuda-graph-impl local). Change it back, or call delete_cuda_graphs(): the "
                "next step is recorded anew."
            )

    def has_parameters_of(self, function: Hashable) -> bool:
        """Whether the parameters of ``function`` are where they were at capture. Evaluation may swap them."""
        guard = self._guards.get(function)
        if guard is None:
            return False
        try:
            guard.check(False)
        except RuntimeError:
            return False
        return True


def _shared_params(trained: Mapping[Runner, Sequence[torch.Tensor]]) -> dict[Runner, list[torch.Tensor]]:
    """Return for each runner the ``trained`` parameters that it shares with another runner of the same backward pass.

    A layer that is called twice in a pass has two runners; layers may share weights.
    """
    users: defaultdict[tuple[int, torch.Tensor], list[Runner]] = defaultdict(list)
    for runner, params in trained.items():
        for param in params:
            users[runner.backward_pass, param].append(runner)
    shared: defaultdict[Runner, list[torch.Tensor]] = defaultdict(list)
    for (_, param), together in users.items():
        for runner in together if len(together) > 1 else ():
            shared[runner].append(param)
    return dict(shared)
