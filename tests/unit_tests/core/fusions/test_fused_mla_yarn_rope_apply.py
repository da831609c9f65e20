"""Test the fused rotary kernels of multi-latent attention: block sizes, and results in Triton's interpreter."""

import os
import subprocess
import sys
from textwrap import dedent

import pytest

from megatron.core.fusions.fused_mla_yarn_rope_apply import heads_per_program

ROTATE = dedent(
    """
    import sys
    import torch
    from megatron.core.fusions.fused_mla_yarn_rope_apply import fused_apply_mla_rope_for_kv, fused_apply_mla_rope_for_q

    heads, (tokens, plain, rotated) = int(sys.argv[1]), (3, 8, 16)
    cos, sin = torch.randn(2, tokens, 1, 1, rotated)
    one, two = slice(plain, None, 2), slice(plain + 1, None, 2)
    left, right = slice(plain, plain + rotated // 2), slice(plain + rotated // 2, None)

    def rotate(x):
        half = rotated // 2
        lefts = x[..., one] * cos[..., :half] - x[..., two] * sin[..., :half]
        rights = x[..., two] * cos[..., half:] + x[..., one] * sin[..., half:]
        return torch.cat([x[..., :plain], lefts, rights], -1)

    query = torch.randn(tokens, 1, heads, plain + rotated, requires_grad=True)
    grad = torch.randn_like(query)
    fused = fused_apply_mla_rope_for_q(query * 1, cos, sin, plain, rotated)
    expected = rotate(query)
    torch.testing.assert_close(fused, expected)
    (found,), (wanted,) = (torch.autograd.grad(each, query, grad.clone()) for each in (fused, expected))
    torch.testing.assert_close(found, wanted)

    both = torch.randn(tokens, 1, heads, 2 * plain, requires_grad=True)
    position = torch.randn(tokens, 1, 1, rotated, requires_grad=True)
    key, value = fused_apply_mla_rope_for_kv(both, position, cos, sin, rotated, plain, plain)
    unrotated = torch.cat([both[..., :plain], position.expand(-1, -1, heads, -1)], -1)
    wanted_key, wanted_value = rotate(unrotated), both[..., plain:]
    torch.testing.assert_close((key, value), (wanted_key, wanted_value))
    grads = torch.randn_like(key), torch.randn_like(value)
    found = torch.autograd.grad((key, value), (both, position), grads)
    wanted = torch.autograd.grad((wanted_key, wanted_value), (both, position), grads)
    torch.testing.assert_close(found, wanted)
    """
)


@pytest.mark.parametrize(("heads", "expected"), [(1, 1), (7, 1), (12, 4), (16, 16), (128, 16)])
def test_blocks_divide_the_heads(heads, expected):
    assert heads_per_program({"head_num": heads}) == expected


def test_kernels_rotate_every_head_once():
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ROTATE, "12"], env=interpreted, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
