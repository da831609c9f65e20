"""Does TransformerEngine's attention take the same kernels under capture as eagerly?

    python benchmarks/attention_under_capture.py

Runs ``DotProductAttention`` (bf16, causal, 4 heads, batch 2) twice eagerly and once with the flag that
TransformerEngine sets while graphs are captured, and compares the output and the three input gradients bit for bit.
Where they differ, a graphed layer cannot have the bits of an eager one, whichever engine captures it. Needs a GPU and
TransformerEngine.
"""

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch import graph

torch.manual_seed(0)
for s in (32, 128, 512, 513, 1024, 2048):
    for d in (16, 64, 128):
        m = te.DotProductAttention(4, d, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal").cuda()
        q, k, v = (torch.randn(s, 2, 4, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = []
        for flag in (0, 0, 1):
            if flag:
                graph.set_capture_start()
            o = m(q, k, v)
            if flag:
                graph.set_capture_end()
            g = torch.autograd.grad(o.float().square().sum(), (q, k, v))
            out.append((o.detach(), *g))
        again = [torch.equal(a, b) for a, b in zip(out[0], out[1], strict=True)]
        captured = [torch.equal(a, b) for a, b in zip(out[0], out[2], strict=True)]
        print("DPA", s, d, "eager=eager", again, "eager=flag", captured)
