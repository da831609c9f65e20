"""Fused rotary kernels for multi-latent attention with fixed block sizes.

megatron-core autotunes the number of heads per program (``BLOCK_H``). The choice varies between runs, and results
depend on it in three ways:

- The query kernels rotate in place. In a program with several warps, one warp can overwrite an element before another
  has read it.
- Masks count heads from the start of a block. If the block size does not divide the number of heads, the last block
  also rotates heads of the next token.
- ``BLOCK_H`` determines the order in which gradients of the shared key positions are summed over heads.
"""

from typing import Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

MAX_BLOCK_H = 16


def heads_per_program(arguments: dict[str, Any]) -> int:
    """Return the largest power of two, at most ``MAX_BLOCK_H``, that divides the kernel's number of heads."""
    heads: int = arguments["head_num"]
    return min(heads & -heads, MAX_BLOCK_H)


def with_fixed_blocks(autotuned: Any, **launch_options: int) -> Any:
    """Return a launcher of an autotuned Triton kernel that skips autotuning and uses ``heads_per_program`` heads.

    Args:
        autotuned: The result of ``triton.autotune``.
        launch_options: Constant launch options, for example ``num_warps``.
    """
    if not _upstream.HAVE_TRITON:
        return autotuned
    options = {name: lambda _, value=value: value for name, value in launch_options.items()}
    return _upstream.triton.heuristics({"BLOCK_H": heads_per_program, **options})(autotuned.fn)


# A single warp reads all elements of its heads before it writes any.
rotary_fwd_q_kernel = with_fixed_blocks(_upstream.rotary_fwd_q_kernel, num_warps=1)
rotary_bwd_q_kernel = with_fixed_blocks(_upstream.rotary_bwd_q_kernel, num_warps=1)
rotary_fwd_kv_kernel = with_fixed_blocks(_upstream.rotary_fwd_kv_kernel)
rotary_bwd_kv_kernel = with_fixed_blocks(_upstream.rotary_bwd_kv_kernel)
