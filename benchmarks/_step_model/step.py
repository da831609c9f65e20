"""The time of a step: what the GPU does, what the host does, and which of them waits for the other.

The host launches the passes ahead of the GPU, then reads the gradient norm, so that both are done; what it does around
the optimizer is not hidden. A step is thus ``max(host of the passes, GPU) + host of the rest``.
"""

from dataclasses import dataclass, field

from .workload import BYTES, Workload

EAGER, PER_LAYER, ALL_LAYERS, FULL_ITERATION = MODES = ("eager", "a graph per layer", "all layers", "full iteration")


@dataclass(frozen=True)
class Gpu:
    """What a GPU's compute takes, fitted.

    Attributes:
        teraflops: Rate of matrix products and attention, in 1e12 FLOPs a second.
        layer_us: Microseconds of a layer's passes that do not grow with its size.
        parameter_ps: Picoseconds for each parameter of the rank's shard: gradient norm, optimizer, copies.
    """

    teraflops: float = 500.0
    layer_us: float = 150.0
    parameter_ps: float = 15.0


@dataclass(frozen=True)
class Link:
    """What a collective over all ranks takes; a ring that passes each node once.

    Attributes:
        gb_per_s: What a GPU receives from its node's others, 1e9 bytes a second. Fitted.
        start_us: Microseconds before the first byte, between two GPUs. Fitted.
        gpus_a_node: GPUs that are linked so.
        network_gb_per_s: What a node receives from others. Assumed.
        hop_us: Microseconds for each further GPU of a ring within a node. Assumed.
        network_hop_us: Microseconds for each step of a ring from node to node. Assumed.
    """

    gb_per_s: float = 250.0
    start_us: float = 15.0
    gpus_a_node: int = 8
    network_gb_per_s: float = 320.0
    hop_us: float = 0.0
    network_hop_us: float = 0.0

    def collective_us(self, parameters: float, ranks: int) -> float:
        """Microseconds of an all-gather or reduce-scatter of ``parameters`` bf16 numbers over ``ranks`` ranks.

        Each rank receives all parts but its own, each node those of other nodes.
        """
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // self.gpus_a_node)
        kilobytes = parameters * BYTES / 1e3
        inside = kilobytes * (ranks - 1) / ranks / self.gb_per_s
        between = kilobytes * (nodes - 1) / nodes / self.network_gb_per_s
        # A ring of n ranks takes n - 1 steps; the start holds the first.
        hops = (ranks - 1 - nodes) * self.hop_us + (nodes - 1) * self.network_hop_us
        return self.start_us + hops + max(inside, between)


@dataclass(frozen=True)
class Host:
    """What the host takes, in milliseconds on the first measured host; fitted.

    Attributes:
        layer: For a layer's passes with a micro-batch, by mode.
        outside: For a micro-batch's passes outside its layers.
        rest: For the step outside its passes.
        rest_layer: The same, for each layer.
        slowness: Of the host, by the name of a file of results; 1 for the first.
    """

    layer: dict[str, float] = field(default_factory=lambda: {EAGER: 5.0, PER_LAYER: 1.0, ALL_LAYERS: 0.1})
    outside: float = 8.0
    rest: float = 4.0
    rest_layer: float = 0.1
    slowness: dict[str, float] = field(default_factory=dict)

    def passes_ms(self, work: Workload, mode: str) -> float:
        """Milliseconds for all passes of a step; nothing where one graph holds them."""
        if mode == FULL_ITERATION:
            return 0.0
        return work.micro_batches * (self.outside + work.layers * self.layer[mode])

    def rest_ms(self, work: Workload) -> float:
        """Milliseconds for the step outside its passes."""
        return self.rest + work.layers * self.rest_layer


def compute_ms(work: Workload, gpu: Gpu) -> float:
    """Milliseconds in which a step's compute keeps the GPU busy."""
    passes = work.layers * layer_us(work, gpu) + work.output_flops / gpu.teraflops / 1e6
    return work.micro_batches * passes / 1e3 + work.parameters / work.ranks * gpu.parameter_ps / 1e9


def layer_us(work: Workload, gpu: Gpu) -> float:
    """Microseconds of a layer's passes; a third of them forward."""
    return work.layer_flops / gpu.teraflops / 1e6 + gpu.layer_us


def exposed_ms(work: Workload, gpu: Gpu, link: Link) -> float:
    """Milliseconds of a step in which the GPU waits for collectives.

    One unit is gathered ahead. Nothing hides the gathering of the embedding and the first layer, and the reduction of
    the first layer and the embedding. In between a layer's forward pass hides the next one's gathering, its backward
    pass the gathering of one neighbor and the reduction of the other, which share the link.
    """
    layer, embedding = (
        link.collective_us(each, work.ranks) for each in (work.layer_parameters, work.embedding_parameters)
    )
    forward = layer_us(work, gpu) / 3
    output = work.output_flops / gpu.teraflops / 1e6
    inner = max(0.0, layer - forward) + max(0.0, 2 * layer - 2 * forward)
    gathered_output = 0.0 if work.tied else max(0.0, 2 * embedding - forward - output)
    total = 2 * (layer + embedding) + (work.layers - 1) * inner + max(0.0, layer - output) + gathered_output
    return work.micro_batches * total / 1e3


def step_ms(work: Workload, mode: str, gpu: Gpu, link: Link, host: Host, slowness: float = 1.0) -> float:
    """Milliseconds of a step."""
    on_gpu = compute_ms(work, gpu) + exposed_ms(work, gpu, link)
    return max(slowness * host.passes_ms(work, mode), on_gpu) + slowness * host.rest_ms(work)
