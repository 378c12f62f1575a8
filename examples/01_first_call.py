"""Attention of three random arrays, its gradients, and how far both are from the plain formula in float64."""

import numpy as np

import numbattn as na
from numbattn import reference

rng = np.random.default_rng(0)
q, k, v, do = rng.standard_normal((4, 2, 8, 500, 64), dtype=np.float32)  # each (batch, heads, sequence, features)

o = na.attention(q, k, v, causal=True)
o, backprop = na.attention_vjp(q, k, v, causal=True)  # the same o, and a function that returns the gradients
dq, dk, dv = backprop(do)

exact_o, _ = reference.attention_forward(q, k, v, causal=True)
exact = exact_o, *reference.attention_backward(do, q, k, v, causal=True)
for name, x, y in zip(("o", "dq", "dk", "dv"), (o, dq, dk, dv), exact):
    print(f"{name:2} {x.shape} {x.dtype}, largest difference from float64: {abs(x - y).max():.1e}")
