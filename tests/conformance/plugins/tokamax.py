"""tokamax' own test cases of attention, with numbattn as one of its implementations: a file of tests for pytest.

What is not there, and where tokamax then expects an exception: a dropout mask from outside, for numbattn draws its own;
logits in other dtypes than float32; sums without a denominator, since the largest score of a row is not kept. Of a
piece of a sequence (maximum, denominator) are (lse, 1), with which pieces are combined to the same.
"""

import functools

import jax.numpy as jnp
from absl import flags
from tokamax._src import quantization
from tokamax._src.ops import op
from tokamax._src.ops.attention import base, test_base

import numbattn as na
from numbattn.interop.jax import attention
from numbattn.masks import as_mask

flags.FLAGS.mark_as_parsed()  # else absl takes pytest's options for its own


class Numbattn(base.DotProductAttention[op.NullConfig, None]):
    @functools.wraps(base.DotProductAttention._fwd)  # whose annotations tokamax reads
    def _fwd(self, q, k, v, *, precision, logits_dtype, logits_scale, bias, logits_soft_cap, mask, dropout_mask,
             dropout_rate, paging_info, q_indices, k_indices, normalize_output, return_residuals, config):  # fmt: skip
        if logits_dtype != jnp.float32:
            raise NotImplementedError("logits in float32 alone")
        if dropout_mask is not None or dropout_rate or paging_info is not None:
            raise NotImplementedError("no dropout masks, and no pages")
        if not normalize_output and not return_residuals:
            raise NotImplementedError("no sums without a denominator")
        q, k, v = (quantization.as_array(x).swapaxes(-2, -3) for x in (q, k, v))
        mask = visible(mask, q.shape[-2] if q_indices is None else q_indices,
                       k.shape[-2] if k_indices is None else k_indices)  # fmt: skip
        score = [] if bias is None else [na.Bias(bias)]
        score += [] if logits_soft_cap is None else [na.Softcap(logits_soft_cap)]
        o, lse = attention(q, k, v, mask=mask, scale=float(logits_scale), score=score, return_lse=True)
        return o.swapaxes(-2, -3), (lse, jnp.ones_like(lse)) if return_residuals else None


def visible(mask, queries, keys):
    """A mask of tokamax: as intervals of keys, where it has them alone, and else element by element."""
    if not mask:
        return None
    if not isinstance(queries, int) or not isinstance(keys, int) or mask.q_start is not None or mask.q_end is not None:
        return mask.as_array(queries, keys)
    found = None if mask.bool_mask is None else as_mask(mask.bool_mask)
    if mask.k_start is not None or mask.k_end is not None:
        shape = jnp.broadcast_shapes(*(x.shape for x in (mask.k_start, mask.k_end) if x is not None), (queries,))
        first, end = (jnp.broadcast_to(given if given is not None else other, shape).astype(jnp.int32)
                      for given, other in ((mask.k_start, 0), (mask.k_end, keys)))  # fmt: skip
        intervals = na.Intervals(first, end)
        found = intervals if found is None else found & intervals
    if mask.is_causal:
        found = na.Causal(0) if found is None else found & na.Causal(0)
    return found


class NumbattnTest(test_base.AttentionTestBase):
    def __init__(self, *args):
        super().__init__(*args, attention_fn=Numbattn(), supports_dropout=False, supports_logits_dtype=False)

    def test_normalize_output(self):
        self.skipTest("sums without a denominator are not there")

    def test_padding_mask_with_nans(self):
        self.skipTest("NaN is hidden by Lengths alone, not by a boolean mask")
