"""A plugin of pytest for the test_flash_attn.py of FlashAttention 2, in which its package is numbattn's interop.torch.

What had to be bent: weights after dropout come normalised, so that the tests need not do it; slopes of Alibi that
differ between packed sequences are a Score; a cache with padding on the left is plain arrays, with Intervals as a mask.

Left out are rotary embeddings, which numbattn does not do, and tests of functions inside of FlashAttention.
"""

import os
import random
from itertools import pairwise

import torch
from torch.nn.functional import pad

import numbattn as na
from numbattn.interop.torch import attention
from numbattn.interop.torch.arrays import array_of, on_device, tensor_of

from .one_gpu import arrays_in, module

DROPOUT_SEED = 7
INSIDE = "paged_kv_num_splits", "generator_arg"  # of tests of what is inside
ONE_VALUE = "rotary_fraction", "rotary_interleaved", "num_splits"  # of parameters: no rotary embedding, any split
FEW = 4  # values of any other one, drawn at random: half a million tests would be made, of which few are run


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    score = parts(softcap, None if alibi_slopes is None else na.Alibi(alibi_slopes, gradient=False))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"mask": band(causal, window_size), "scale": softmax_scale, "score": score, "dropout": drops(dropout_p)}
    o, lse = attention(q, k, v, **options, deterministic=deterministic, return_lse=True)
    o = o.transpose(1, 2)
    return (o, lse, signed(q, k, options) if dropout_p else None) if return_attn_probs else o


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):  # fmt: skip
    local = band(causal, window_size)
    if block_table is not None:
        return paged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, local, softmax_scale, block_table)
    segments = na.Segments(cu_seqlens_q, cu_seqlens_k)
    slopes = None if alibi_slopes is None else of_sequences(alibi_slopes, cu_seqlens_q, cu_seqlens_k, len(q))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    options = {"mask": segments if local is None else segments & local, "scale": softmax_scale,
               "score": parts(softcap, slopes), "dropout": drops(dropout_p)}  # fmt: skip
    o, lse = attention(q, k, v, **options, deterministic=deterministic, return_lse=True)
    o = o.transpose(0, 1)
    if not return_attn_probs:
        return o
    return o, lse, unpacked(signed(q, k, options), cu_seqlens_q, cu_seqlens_k) if dropout_p else None


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
                            alibi_slopes=None, num_splits=0):  # fmt: skip
    q = q.transpose(1, 2)
    if block_table is not None:
        longest = cache_seqlens.max() + (0 if k is None else k.shape[1])
        if longest > block_table.shape[1] * k_cache.shape[1]:
            raise RuntimeError("more tokens than block_table has pages for")  # numbattn asks for it of the caller
    with on_device(q):
        lengths = array_of(cache_seqlens.clone())
        cache = na.KVCache(*(array_of(x.transpose(1, 2)) for x in (k_cache, v_cache)), lengths,
                           None if block_table is None else array_of(block_table))  # fmt: skip
        if k is not None:
            cache.append(*(array_of(x.transpose(1, 2)) for x in (k, v)))
        offset = None if cache_leftpad is None else (lengths - q.shape[2])[:, None]
        mask, keys = band(causal, window_size, offset), (cache,)
        if cache_leftpad is not None:
            first, end = (x[:, None, None].repeat(q.shape[2], 2) for x in (array_of(cache_leftpad), lengths))
            seen = na.Intervals(first, end)
            mask, keys = seen if mask is None else seen & mask, (cache.k, cache.v)
        slopes = None if alibi_slopes is None else na.Alibi(array_of(alibi_slopes), gradient=False, offset=offset)
        o = na.attention(array_of(q), *keys, mask=mask, scale=softmax_scale, score=parts(softcap, slopes))
        return tensor_of(o).transpose(1, 2)


def paged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, local, scale, block_table):
    """Packed queries with keys in pages."""
    with on_device(q):
        keys = (array_of(x.detach().transpose(1, 2)) for x in (k, v))
        cache = na.KVCache(*keys, array_of(cu_seqlens_k.diff()), array_of(block_table))
        mask = na.Segments(array_of(cu_seqlens_q), max_queries=int(max_seqlen_q))
        mask = mask if local is None else mask & local
        o = na.attention(array_of(q.detach().transpose(0, 1)), cache, mask=mask, scale=scale)
        return tensor_of(o).transpose(0, 1)


def band(causal, window_size, offset=None):
    """The mask of a window; -1 is no limit."""
    left, right = (None if int(x) < 0 else int(x) for x in window_size)
    right = 0 if causal else right
    return None if left is None and right is None else na.Window(left, right, offset)


def parts(softcap, slopes):
    return [*([na.Softcap(softcap)] if softcap else []), *([] if slopes is None else [slopes])]


def drops(p):
    return na.Dropout(p, seed=DROPOUT_SEED) if p else None


def of_sequences(slopes, cu_seqlens_q, cu_seqlens_k, total):
    """Alibi with slopes of its own for each packed sequence, (sequences, heads)."""
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    of_query = torch.repeat_interleave(lengths_q.long(), output_size=total)
    shift = cu_seqlens_k[:-1] + lengths_k - cu_seqlens_q[:-1] - lengths_q
    return na.Score(lean, arrays=[slopes[of_query].contiguous(), shift[of_query].contiguous()])


def lean(s, batch, head, i, j, slopes, shift):
    return s - slopes[i, head] * abs(i + shift[i] - j)


def signed(q, k, options):
    """Weights, those that dropout hides with a minus."""
    with on_device(q):
        given = {**options, "mask": arrays_in(options["mask"]), "score": [arrays_in(x) for x in options["score"]]}
        given.pop("dropout")
        weights = tensor_of(na.attention_weights(*(array_of(x.detach()) for x in (q, k)), **given))
    kept = torch.from_numpy(na.dropout_mask(options["dropout"], tuple(weights.shape))).to(weights.device)
    return torch.where(kept, weights, -weights)


def unpacked(weights, *offsets):
    """(heads, queries, keys) -> (sequences, heads, queries, keys of one)."""
    pieces = [weights[:, q0:q1, k0:k1] for (q0, q1), (k0, k1) in zip(*map(pairwise, map(torch.Tensor.tolist, offsets)))]
    longest = [max(x.shape[axis] for x in pieces) for axis in (1, 2)]
    return torch.stack([pad(x, (0, longest[1] - x.shape[2], 0, longest[0] - x.shape[1])) for x in pieces])


def of_packed(function, whole):
    """The same function of q, k and v in one tensor, or of k and v in one."""

    def packed(*arguments, **options):
        if whole:
            qkv, *rest = arguments
            return function(*qkv.unbind(-3), *rest, **options)
        q, kv, *rest = arguments
        return function(q, *kv.unbind(-3), *rest, **options)

    return packed


def qkvpacked_varlen(qkv, cu_seqlens, max_seqlen, *rest, **options):
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest, **options)


FUNCTIONS = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_kvpacked_func": of_packed(flash_attn_func, whole=False),
    "flash_attn_qkvpacked_func": of_packed(flash_attn_func, whole=True),
    "flash_attn_varlen_func": flash_attn_varlen_func,
    "flash_attn_varlen_kvpacked_func": of_packed(flash_attn_varlen_func, whole=False),
    "flash_attn_varlen_qkvpacked_func": qkvpacked_varlen,
    "flash_attn_with_kvcache": flash_attn_with_kvcache,
}


checkout = os.path.join(os.environ["NUMBATTN_CHECKOUTS"], "flash-attention", "flash_attn")
module("flash_attn", __path__=[checkout], **FUNCTIONS)  # whose bert_padding is taken as it is
module("flash_attn.flash_attn_interface", _get_block_size_n=None, USE_TRITON_ROCM=False)
module("flash_attn.layers")
module("flash_attn.layers.rotary", apply_rotary_emb=None)


def pytest_generate_tests(metafunc):
    for mark in metafunc.definition.iter_markers("parametrize"):
        name, values = mark.args
        count = 1 if name in ONE_VALUE else min(FEW, len(values))
        draw = random.Random(f"{metafunc.function.__name__} {name}")
        values[:] = values[:1] if count == 1 else draw.sample(values, count)


def pytest_itemcollected(item):
    item.module.normalize_flash_attn_S = lambda weights, *_, **__: weights


def pytest_collection_modifyitems(config, items):
    left_out = {x for x in items if any(name in x.name for name in INSIDE)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [x for x in items if x not in left_out]
