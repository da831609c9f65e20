"""A training step's work: parameters, FLOPs and bytes, counted from a model's shape."""

from dataclasses import dataclass

BYTES = 2  # of a weight or a gradient that is communicated: bf16
STATE_BYTES = 18  # of a parameter: bf16 weight; fp32 weight, gradient and two moments


@dataclass(frozen=True)
class Workload:
    """A dense transformer, what a rank trains it on in a step, and over how many ranks it is sharded.

    Attributes:
        layers: Transformer layers, each a unit of Megatron-FSDP.
        hidden: Hidden size.
        sequence: Tokens that attend to each other.
        tokens: Tokens of a micro-batch on a rank.
        micro_batches: Micro-batches of a rank's step.
        ranks: Ranks that parameters are sharded over.
        ffn: Size of the MLP; by default ``4 * hidden``.
        gated: Whether the MLP has a third matrix, its gate.
        key_value_share: Heads of keys and values for each head of queries.
        vocabulary: Rows of the embedding.
        tied: Whether the output layer has the embedding's weights.
    """

    layers: int
    hidden: int
    sequence: int
    tokens: int
    micro_batches: int = 1
    ranks: int = 2
    ffn: int = 0
    gated: bool = False
    key_value_share: float = 1.0
    vocabulary: int = 32000
    tied: bool = True

    @property
    def layer_parameters(self) -> float:
        """Weights of a layer's matrices; biases and norms are left out."""
        ffn = self.ffn or 4 * self.hidden
        attention = self.hidden**2 * (2 + 2 * self.key_value_share)
        return attention + (3 if self.gated else 2) * self.hidden * ffn

    @property
    def embedding_parameters(self) -> float:
        """Weights of the embedding, which are as many as the output layer's."""
        return float(self.vocabulary * self.hidden)

    @property
    def parameters(self) -> float:
        """All weights."""
        return self.layers * self.layer_parameters + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def layer_flops(self) -> float:
        """FLOPs of a layer's forward and backward pass for a micro-batch: 6 for each weight and token, and attention.

        Scores and their product with the values take 4 FLOPs for each element of hidden states and pair of tokens
        forward and twice that backward; a causal mask halves the pairs.
        """
        return self.tokens * 6 * (self.layer_parameters + self.hidden * self.sequence)

    @property
    def output_flops(self) -> float:
        """FLOPs of the output layer's passes for a micro-batch."""
        return self.tokens * 6 * self.embedding_parameters

    @property
    def state_gb(self) -> float:
        """Gigabytes of weights, gradients and optimizer states on a rank, without activations."""
        return STATE_BYTES * self.parameters / self.ranks / 1e9
