"""What is known of one capture, as data: what the table, the JSON file and the page show."""

from collections.abc import Sequence
from dataclasses import dataclass, field

FORWARD, BACKWARD, WEIGHT_GRADIENTS = KINDS = ("forward", "backward", "weight_gradients")


@dataclass(frozen=True)
class MemorySample:
    """What the allocator said at one moment.

    Attributes:
        time: Seconds since the capture began.
        phase: ``start``, ``warm-up``, ``capture``, ``captured`` or ``end``.
        allocated: Bytes of tensors.
        reserved: Bytes that were taken from the device.
    """

    time: float
    phase: str
    allocated: int
    reserved: int


@dataclass(frozen=True)
class CapturedPass:
    """One pass while it was captured.

    Attributes:
        layer: The layer's index in ``CaptureReport.layers``; None for the whole model.
        micro_batch: Counted from 0.
        kind: ``forward`` or ``backward``.
        start: Seconds since the capture began.
        seconds: How long the host took.
    """

    layer: int | None
    micro_batch: int
    kind: str
    start: float
    seconds: float


@dataclass
class LayerRecord:
    """The graphs of a layer.

    Attributes:
        name: The layer's name, as errors give it.
        chunk: The index of its model chunk.
        micro_batches: For how many micro-batches it has graphs.
        graphs: The number of its graphs by kind. None where the engine does not show them. Of layers in
            one graph the first has all of them.
        recorded_with: The index of the first layer of those in one graph; None if it has graphs of its own.
        warm_up_seconds: What the host took for its passes in warm-up.
        capture_seconds: The same while they were captured.
    """

    name: str
    chunk: int
    micro_batches: int
    graphs: dict[str, int | None]
    recorded_with: int | None = None
    warm_up_seconds: float = 0.0
    capture_seconds: float = 0.0


@dataclass(frozen=True)
class BufferUse:
    """One use of a static input.

    Attributes:
        micro_batch: Counted from 0.
        first: The index in the order of passes of the forward pass.
        last: The index of the last pass that reads it.
    """

    layer: int
    micro_batch: int
    first: int
    last: int


@dataclass
class StaticInput:
    """Memory that graphs read an input from."""

    name: str
    bytes: int
    uses: list[BufferUse] = field(default_factory=list)


@dataclass(frozen=True)
class HookRoute:
    """Where a hook went.

    Attributes:
        layer: The index of the layer that it is on or in.
        module: The path of its module in the layer; empty for the layer.
        route: ``forward_pre_hooks``, ``forward_hooks``, ``backward_pre_hooks`` or ``backward_hooks`` if it runs outside
            of the graph, as capture-time hook of this kind; ``withheld`` if it does not run at capture; ``recorded`` if
            the graph holds what it does.
    """

    layer: int
    module: str
    hook: str
    route: str


@dataclass(frozen=True)
class EagerPart:
    """Something that has no graphs.

    Attributes:
        why: The reason, and what would change it.
    """

    what: str
    why: str


@dataclass(frozen=True)
class Pool:
    """A memory pool of graphs.

    Attributes:
        bytes: The size of its segments.
    """

    graphs: int
    bytes: int


@dataclass
class CaptureReport:
    """All that is known of one capture.

    Attributes:
        engine: ``native`` or ``transformer_engine``.
        whole_model: Whether the graphs hold all of the model.
        graphs: The number of all graphs by kind; None where the engine does not show them.
        seconds: Host seconds: ``total``, ``warm_up``, ``capture``, and ``waiting`` for other ranks, which is in none
            of these two.
        collectives: How many more graphs hold collectives of Megatron-FSDP alone.
        layers: Each layer that has graphs; none if the whole model is captured.
        order: All passes, by their layer (None for the whole model), micro-batch and kind, as in training.
        passes: The passes that were captured, with their times; empty if the engine runs no hooks at capture.
        memory: In the order of time.
        pools: The memory of graphs; empty where the engine does not show it.
    """

    engine: str
    whole_model: bool
    graphs: dict[str, int | None]
    seconds: dict[str, float]
    collectives: int = 0
    layers: Sequence[LayerRecord] = ()
    order: Sequence[tuple[int | None, int, str]] = ()
    passes: Sequence[CapturedPass] = ()
    memory: Sequence[MemorySample] = ()
    pools: Sequence[Pool] = ()
    static_inputs: Sequence[StaticInput] = ()
    hooks: Sequence[HookRoute] = ()
    eager: Sequence[EagerPart] = ()


def total(counts: Sequence[dict[str, int | None]]) -> dict[str, int | None]:
    """Add numbers by kind; None if one is unknown."""
    sums: dict[str, int | None] = {}
    for kind in KINDS:
        known = [count for count in (each[kind] for each in counts) if count is not None]
        sums[kind] = sum(known) if len(known) == len(counts) else None
    return sums
