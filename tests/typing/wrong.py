"""What a type checker refuses: each line with E: says what. Not run."""

import numpy as np
from numpy.typing import NDArray

import numbattn as na


def model(q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
    na.attention([1.0], [1.0], [1.0])  # E: type-var
    na.attention(q, k, v, mask="causal")  # E: arg-type
    na.attention(q, k, v, mask=[[True]])  # E: arg-type
    na.attention(q, k, v, mask=na.Causal)  # E: arg-type
    na.attention(q, k, v, causal="yes")  # E: arg-type
    na.attention(q, k, v, scale="0.1")  # E: arg-type
    na.attention(q, k, v, dropout=0.1)  # E: arg-type
    na.attention(q, k, v, True)  # E: call-arg
    na.attention(q, k, v, softmax_scale=0.1)  # E: call-arg
    na.Lengths(keys="three")  # E: arg-type
    na.Lengths(keys=3.5)  # E: arg-type
    na.Causal(offset="last")  # E: arg-type
    na.Window(3)  # E: call-arg
    na.Segments("three")  # E: arg-type
    na.Prefix(1.5)  # E: arg-type
    na.First(None)  # E: arg-type
    na.Intervals([0])  # E: call-arg
    na.pack(3)  # E: arg-type
    na.Tail(3)  # E: arg-type
    na.Sink("1")  # E: arg-type
    na.KVCache.zeros(1, 8, 100, 64)  # E: call-arg
    na.attention_vjp(q, na.KVCache(k, v, k))  # E: type-var
    na.unpack(q, 0.5)  # E: arg-type
    na.Window(1.5, 0)  # E: arg-type
    na.Dense([[True]])  # E: arg-type
    na.Bits.pack("bits")  # E: arg-type
    na.Bits.tree("tree")  # E: arg-type
    na.BlockSparse.strided((4, 4), stride="2")  # E: arg-type
    na.BlockSparse(np.ones((2, 2), bool), 64)  # E: arg-type
    na.Dropout("0.5", 1)  # E: arg-type
    na.Dropout(0.5)  # E: call-arg
    na.dropout_mask(0.5, (3, 4))  # E: arg-type
    na.Causal() & 3  # E: operator
    na.Causal().dense(3.0, 4)  # E: arg-type
    o, saved = na.attention_forward(q, k, v)
    na.attention_backward(o, (o, saved))  # E: arg-type
    na.attention_backward([1.0], saved)  # E: arg-type
    na.attention_backward(o, saved, deterministic="banana")  # E: arg-type
    o, backprop = na.attention_vjp(q, k, v)
    backprop(3.0)  # E: arg-type
    dq, dk = backprop(o)  # E: misc
    print(saved.weights)  # E: attr-defined
    na.Causal().offset = 3  # E: misc
