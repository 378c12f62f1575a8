"""ONNX' operator Attention, opset 23 to 25, on numbattn: a node and its inputs -> its first three outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx

import numbattn as na


class Inputs(NamedTuple):
    """In the order in which a node names them; those without a name are not given."""

    Q: Any
    K: Any
    V: Any
    attn_mask: Any = None
    past_key: Any = None
    past_value: Any = None
    nonpad_kv_seqlen: Any = None  # keys that there are, of each element of the batch


def attention(node: Any, arrays: Any) -> tuple[Any, Any, Any]:
    """Y, present_key, present_value; arrays: an iterator of NumPy's or CuPy's."""
    given = Inputs(*(next(arrays) if name else None for name in node.input))
    attributes = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
    heads = [attributes.get(f"{name}_num_heads", 0) for name in ("q", "kv", "kv")]
    q, k, v = (x if x.ndim == 4 else split(x, h) for x, h in zip(given[:3], heads))
    offset = 0  # of the key that query 0 stands for
    if given.past_key is not None:
        offset = given.past_key.shape[2]
        k, v = np.concatenate([given.past_key, k], 2), np.concatenate([given.past_value, v], 2)
    sizes = q.shape[2], k.shape[2]
    masks, scores = [], []
    if (lengths := given.nonpad_kv_seqlen) is not None:
        lengths = lengths.reshape(-1, 1).astype(np.int32)
        masks.append(na.Lengths(keys=lengths))
        offset = offset or lengths - sizes[0]
    if attributes.get("is_causal"):
        masks.append(na.Causal(offset))
    window = [None if (n := attributes.get(f"{side}_window_size", -1)) < 0 else n for side in ("left", "right")]
    if window != [None, None]:
        masks.append(na.Window(*window, offset))
    if cap := attributes.get("softcap"):
        scores.append(na.Softcap(cap))
    if given.attn_mask is not None:
        visible, bias = taken_apart(given.attn_mask, sizes)
        masks.append(visible)
        scores += [] if bias is None else [na.Bias(bias)]
    mask = None
    for one in masks:
        mask = one if mask is None else mask & one
    o = na.attention(q, k, v, mask=mask, score=scores or None, scale=attributes.get("scale"))
    return o if given.Q.ndim == 4 else o.swapaxes(1, 2).reshape(*given.Q.shape[:2], -1), k, v


def split(x: Any, heads: int) -> Any:
    """(batch, seqlen, heads * head_dim) as (batch, heads, seqlen, head_dim)."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def taken_apart(mask: Any, sizes: tuple[int, int]) -> tuple[Any, Any]:
    """Who is visible, and the bias of those, if it is more than that; keys beyond the mask are not visible."""
    shape = (*np.broadcast_shapes((*mask.shape[:-1], 1), (sizes[0], 1))[:-1], sizes[1])
    whole = np.full_like(mask, False if mask.dtype == bool else -np.inf, shape=shape)  # not `full`: CuPy's fails
    whole[..., : mask.shape[-1]] = mask
    if mask.dtype == bool:
        return whole, None
    visible = whole > -np.inf
    return visible, np.where(visible, whole, 0).astype(np.promote_types(mask.dtype, np.float32))
