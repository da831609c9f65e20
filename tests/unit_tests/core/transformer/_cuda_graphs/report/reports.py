"""Reports for the tests of the table and of the page."""

from megatron.core.transformer._cuda_graphs.report.record import (
    KINDS,
    BufferUse,
    CapturedPass,
    CaptureReport,
    EagerPart,
    HookRoute,
    LayerRecord,
    MemorySample,
    Pool,
    StaticInput,
)

MIB = 2**20


def counts(forward, backward, weight_gradients=0):
    return dict(zip(KINDS, (forward, backward, weight_gradients), strict=True))


def report(**changes):
    """Two chunks of two layers, those of the first chunk recorded together, two micro-batches in flight."""
    layers = [
        LayerRecord("layer 1 (Layer)", 0, 2, counts(2, 2), 0, 0.25, 0.5),
        LayerRecord("layer 2 (Layer)", 0, 2, counts(0, 0), 0, 0.25, 0.5),
        LayerRecord("layer 3 (Layer)", 1, 2, counts(2, 2), None, 0.125, 0.25),
        LayerRecord("layer 4 (Layer)", 1, 2, counts(2, 2), None, 0.125, 0.25),
    ]
    forward = [(chunk * 2 + layer, batch, "forward") for chunk in (0, 1) for batch in (0, 1) for layer in (0, 1)]
    backward = [(chunk * 2 + layer, batch, "backward") for batch in (0, 1) for chunk in (1, 0) for layer in (1, 0)]
    order = forward + backward
    fields = {
        "engine": "native",
        "whole_model": False,
        "graphs": counts(6, 6),
        "seconds": {"total": 3.0, "warm_up": 0.75, "capture": 1.5, "waiting": 0.5},
        "collectives": 3,
        "layers": layers,
        "order": order,
        "passes": [CapturedPass(*step, place / 10, 0.1) for place, step in enumerate(order)],
        "memory": [
            MemorySample(0.0, "start", 100 * MIB, 200 * MIB),
            MemorySample(1.0, "capture", 150 * MIB, 400 * MIB),
            MemorySample(2.0, "captured", 160 * MIB, 400 * MIB),
            MemorySample(3.0, "end", 120 * MIB, 300 * MIB),
        ],
        "pools": [Pool(12, 80 * MIB)],
        "static_inputs": [
            StaticInput("hidden_states", 4 * MIB, [BufferUse(0, 0, 0, 11)]),
            StaticInput("hidden_states", 4 * MIB, [BufferUse(2, 0, 4, 9), BufferUse(2, 1, 10, 13)]),
        ],
        "hooks": [HookRoute(layer, "", "gather", "forward_pre_hooks") for layer in range(4)]
        + [HookRoute(1, "mlp", "<count>", "recorded")],
        "eager": [
            EagerPart("embedding (Embedding)", "it is outside of layers"),
            EagerPart("final_norm (Norm)", "it is outside of layers"),
            EagerPart("evaluation", "it is FP8"),
        ],
    }
    return CaptureReport(**(fields | changes))
