"""What a type checker accepts, and the types that it finds. Not run."""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import numbattn as na

Floats = NDArray[np.float32]
Booleans = NDArray[np.bool_]


def model(q: Floats, k: Floats, v: Floats, do: Floats, visible: Booleans, lengths: NDArray[np.int64]) -> Floats:
    assert_type(na.attention(q, k, v), Floats)
    o, saved = na.attention_forward(q, k, v, causal=True, scale=0.1, dropout=na.Dropout(0.1, seed=1), out=do)
    assert_type(o, Floats)
    assert_type(saved, na.Saved[Floats])
    assert_type(saved.lse, Floats)
    assert_type(saved.o, Floats)
    assert_type(na.attention_backward(do, saved, dlse=saved.lse, deterministic=True), na.Gradients[Floats])
    o, backprop = na.attention_vjp(q, k, v, mask=visible)
    assert_type(backprop(do), na.Gradients[Floats])
    dq, dk, dv = backprop(do.astype(np.float64), dlse=saved.lse, deterministic=True)
    assert_type(dq, Floats)
    o, backprop = na.attention_vjp(q, k, v, score=[na.Bias(q), na.Softcap(3.0), na.Sink(0.0)])
    na.attention(q, k, v, score=[na.Alibi([0.5, 1]), na.RelativeBias([[0.5, 1.0, 2.0]]), na.Sink(1)])
    assert_type(backprop(do).score, tuple[Floats | None, ...])
    assert_type(na.Saved.of(q, k, v, o, saved.lse, mask=na.Causal()), na.Saved[Floats])
    o, to, saved, tsaved = na.attention_forward_jvp(q, k, v, q, None, v, score=na.Alibi([0.5, 1]), tscore=[None])
    assert_type(tsaved, na.SavedTangents[Floats])
    assert_type(tsaved.tlse, Floats)
    grads, tgrads = na.attention_backward_jvp(do, saved, tsaved, tdo=to, dlse=saved.lse, tdlse=tsaved.tlse)
    assert_type(tgrads, na.Gradients[Floats])
    grads, backprop2 = na.attention_backward_vjp(do, saved, dlse=saved.lse)
    second = backprop2(dq, None, None, ddscore=[None])
    assert_type(second, na.SecondGradients[Floats])
    gq, gk, gv, gdo = second
    assert_type(gdo, Floats)
    assert_type(backprop.vjp(do)[0], na.Gradients[Floats])
    assert_type(na.attention_jvp(q, k, v, None, k, None, causal=True), tuple[Floats, Floats])
    assert_type(na.attention_laplacian(q, k, v, q, k, None, lv=v), tuple[Floats, Floats, Floats])
    assert_type(na.attention_weights(q, k, mask=na.Window(3, None)), Floats)
    mask = na.Causal(0) & na.Lengths(keys=lengths, queries=[3, 4]) & visible
    assert_type(mask, na.Mask)
    packed, offsets = na.pack([q, k])
    assert_type(packed, Floats)
    assert_type(na.unpack(packed, offsets), list[Floats])
    assert_type(na.unpack(packed, [0, 3]), list[Floats])
    assert_type(na.Segments(offsets) & na.Prefix(lengths, offset=3), na.Mask)
    assert_type(na.Causal() & (na.Window(3, 0) | na.First(4) | na.First(n=lengths)), na.Mask)
    na.attention(q, k, v, mask=na.Segments([0, 3], keys=offsets) & na.Intervals(first=lengths, end=[3, 4]))
    assert_type(na.Causal() & visible, na.Mask)
    assert_type(mask.dense(3, 4), Booleans)
    assert_type(na.Bits.pack(visible), na.Bits)
    assert_type(na.Bits.tree([-1, 0, 0]), na.Bits)
    assert_type(na.BlockSparse.butterfly((1, 1, 64, 64), block_size=(16, 16)), na.BlockSparse)
    assert_type(na.dropout_mask(na.Dropout(0.5, 1), (3, 4)), Booleans)
    na.attention(q, k, v, mask=na.Dense(visible), scale=np.float32(2).item())
    cache = na.KVCache.zeros(2, 8, 100, 64, like=q, page_size=16, dtype=np.int8)
    cache.append(k, v, segments=[0, 3, 4])
    cache.keep([[0, -1], [0, 1]], nodes=2)
    assert_type(na.attention(q, cache, mask=na.Tail(na.Bits.tree([-1, 0])), out=do), Floats)
    assert_type(na.attention_forward(q, na.KVCache(k, v, lengths))[1], na.Saved[Floats])
    bits: NDArray[np.generic] = q.astype(ml_dtypes.bfloat16)
    na.attention(bits, bits, bits)
    return o
