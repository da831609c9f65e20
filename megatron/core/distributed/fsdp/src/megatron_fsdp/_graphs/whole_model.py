"""A model whose forward and backward passes run as one graph each, with their collectives inside."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron.core.transformer._cuda_graphs.engine.addresses import AddressGuard

from ..training_state import TrainingState
from .context import Context
from .pipelines import prepared_for_evaluation, release_all
from .recorded_units import RecordedUnits
from .unit import ADVICE, Direction
from .unit_plan import GroupGather


class WholeModel(RecordedUnits):
    """All units of a model, and what is outside of them.

    The graphs hold everything from the beginning of the backward pass to the last reduction. Parameters outside of
    units (of embedding, final norm and output layer) stay gathered for a whole step, so they are gathered before a
    replay.

    Attributes:
        replayed: Whether the last forward pass with gradients was a replay.
        on_forget: Called once when the graphs are freed, by those who own graphs beside them.
    """

    def __init__(self, context: Context, begin: Callable[[str], object]):
        super().__init__(context, context.units, begin, {})
        self._in_order = list(self._units.values())
        groups = self._fsdp.param_and_grad_buffer.parameter_groups
        self._outside = [bucket for bucket, group in enumerate(groups) if group.fsdp_unit_id is None]
        self._all_buckets = [*self._buckets, *self._outside]
        self._params_outside = [param for bucket in self._outside for param in groups[bucket].params]
        self._gathers: Sequence[GroupGather] = ()
        self._guard: AddressGuard | None = None
        self.replayed = False
        self.on_forget: list[Callable[[], None]] = []

    @contextmanager
    def _gathered_outside(self) -> Iterator[None]:
        plans = self._context.plans
        self._gathers = plans.gathers_of(self._outside, recorded=False)
        self.gather()
        yield
        release_all(self._fsdp)
        self._gathers = plans.gathers_of(self._outside, recorded=True)

    def _succeeded(self) -> None:
        self._context.registry.whole_model = self

    @contextmanager
    def running(self, phase: Direction) -> Iterator[None]:
        with super().running(phase):
            self.gather_first_unit(phase)
            yield

    def _end_backward(self) -> None:
        self._backward.finish_backward()

    def gather_first_unit(self, phase: Direction) -> None:
        """Start to gather the first unit of a phase ahead of its own hook: beside what runs before the unit.

        Its hook would gather the unit after it first.
        """
        backward = phase == "backward"
        self._fsdp.all_gather_and_wait_parameters_ready(
            self._in_order[-1 if backward else 0].params, prefetch=False, wait_bucket_ready=False, bwd=backward
        )

    def _note_addresses(self) -> None:
        super()._note_addresses()
        name, params = self._fsdp.param_to_name, self._params_outside
        self._guard = AddressGuard(lambda: params, lambda i: name[params[i]], ADVICE)

    def start_gather(self) -> None:
        """Start to gather the parameters outside of units, unless they are gathered."""
        self.gather_between_instances()
        for group in self._gathers:
            group.launch()

    def gather(self) -> None:
        """Gather the parameters outside of units, unless they are gathered, and wait for them."""
        self.start_gather()
        gathers = self._fsdp.all_gather_pipeline
        for bucket in self._outside:
            gathers.wait_bucket_ready(bucket, False)

    def before_eager_forward(self) -> None:
        self.replayed = False
        self.start_gather()

    def before_forward(self) -> None:
        self.gather_in_place()
        super().before_forward()
        self.replayed = True

    def gather_in_place(self) -> None:
        """Gather parameters outside of units to where they were at capture.

        Raises:
            MovedBufferError: one is elsewhere.
        """
        self.gather()
        if self._guard is not None:
            self._guard.check()

    def before_backward(self) -> None:
        self._backward.start(replayed=True)
        super().before_backward()

    def after_backward(self) -> None:
        """Note that all gradients have been reduced, if the hooks expect any."""
        if self._gradients.awaited:
            self._gradients.awaited.clear()
            for unit in self._in_order:
                unit.set_training_state(TrainingState.IDLE)

    def forget(self) -> None:
        """Free the other graphs: the model runs eagerly from now on."""
        for free in self.on_forget:
            free()
        self.on_forget.clear()
        if self._context.registry.whole_model is self:
            self._context.registry.whole_model = None
        self._context.plans.forget(self._outside)
        self._gathers = ()


class EvaluatedModel(RecordedUnits):
    """The ``PassOwner`` of the forward pass of a model in evaluation.

    Gradients and gathered parameters outside of units stay as they are: a backward pass that is still to come may read
    them.
    """

    _last = "forward"

    def __init__(self, context: Context, training: WholeModel, begin: Callable[[str], object]):
        super().__init__(context, context.units, begin, {})
        self._training = training

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keep the model ready for warm-up and capture. No unit is gathered at either end."""
        self._begin("before forward")
        with prepared_for_evaluation(self._fsdp):
            self._training.gather()
            yield

    @contextmanager
    def running(self, phase: Direction) -> Iterator[None]:
        with super().running(phase):
            self._training.gather_first_unit(phase)
            yield

    def _gradient_storages(self) -> None:
        """None: the optimizer's gradients stay where they are."""

    def _note_addresses(self) -> None:
        self._note_weights()

    def before_eager_forward(self) -> None:
        self._training.start_gather()

    def before_forward(self) -> None:
        self._training.gather_in_place()
        super().before_forward()

    def forget(self) -> None:
        """Nothing else knows of the graph."""
