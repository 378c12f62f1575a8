"""Partial results of chunks, put together."""

import numpy as np
import pytest

from numbattn.cuda.kernels.any.combine import PARTS, THREADS, combine, row_threads
from numbattn.cuda.kernels.scores.score import Scores
from numbattn.cuda.kernels.scores.sink import SinkKind
from numbattn.cuda.kernels.shared.chunks import SIZES, chunks_between, first_key
from numbattn.cuda.kernels.shared.visibility import MaskArgs
from numbattn.cuda.tile import WARP
from tests.cuda.works import work
from tests.tools.launch import launch, poisoned

pytestmark = pytest.mark.usefixtures("world")
HEADS, QUERIES, COLS = 3, 2, 32
SCALE, KEPT = 0.5, 2  # what m is multiplied by, and o


def call(rng, chunks, threads, band, score=(), scores=(), shift=0):
    """o, lse, and both in float64, of one sequence with so many chunks; what does not count is NaN."""
    o = rng.standard_normal((1, HEADS, chunks + 1, QUERIES, COLS)).astype(np.float32)
    m = shift + rng.uniform(-3, 3, (1, HEADS, chunks + 1, QUERIES)).astype(np.float32)
    l = rng.uniform(1, 2, m.shape).astype(np.float32)
    first, end = chunks_between(max(band[0], 0), min(band[1] + QUERIES, band[3]))
    hidden = np.r_[:first, end : chunks + 1]
    o[:, :, hidden], m[:, :, hidden], l[:, :, hidden] = np.nan, np.nan, np.nan
    statistics = np.stack([m, l], -1)
    out, lse, low = poisoned((1, HEADS, QUERIES, COLS)), poisoned((1, HEADS, QUERIES)), poisoned((1, HEADS, QUERIES))
    source = combine(dtype="float32", out_dtypes=("float32",), head_dim_v=COLS, threads=threads, mask=(), score=score)
    blocks = -(-HEADS * QUERIES * threads // THREADS)
    mask = MaskArgs(*map(np.int32, band))
    launch(source.function, (blocks, 1, 1), source.threads, source.shared, o, statistics, out, (), lse, low, mask,
           scores, np.float32(SCALE), np.float32(KEPT))  # fmt: skip
    weights = 2.0 ** (SCALE * m[:, :, first:end].astype(np.float64))
    total = (weights * l[:, :, first:end]).sum(2)
    return out / KEPT, lse, (weights[..., None] * o[:, :, first:end]).sum(2), total


@pytest.mark.parametrize("threads", [WARP, THREADS])
@pytest.mark.parametrize("chunks", [1, PARTS, PARTS + 5, 2 * PARTS + 1])
def test_the_weighted_mean(rng, chunks, threads):
    keys = first_key(chunks)
    """Maxima may be far below what lies beyond the last chunk, 0."""
    o, lse, sums, total = call(rng, chunks, threads, (-keys, keys, QUERIES, keys), shift=-500)
    np.testing.assert_allclose(o, sums / total[..., None], atol=1e-5)
    np.testing.assert_allclose(lse, np.log(total), atol=1e-5)


def test_chunks_before_the_first_key_do_not_count(rng):
    """A window that begins in the third chunk; threads change nothing, to the bit."""
    chunks = PARTS + 5
    keys = first_key(chunks)
    found = [call(np.random.default_rng(0), chunks, threads, (2 * SIZES[0] + 7, keys, QUERIES, keys))
             for threads in (WARP, THREADS)]  # fmt: skip
    for o, lse, sums, total in found:
        np.testing.assert_allclose(o, sums / total[..., None], atol=1e-5)
        np.testing.assert_allclose(lse, np.log(total), atol=1e-5)
    (o, lse, *_), (other_o, other_lse, *_) = found
    np.testing.assert_array_equal(o, other_o)
    np.testing.assert_array_equal(lse, other_lse)


def test_nothing_is_seen(rng):
    o, lse, *_ = call(rng, 2, WARP, (-SIZES[0], SIZES[0], QUERIES, 0))
    assert (o == 0).all()
    assert (lse == -np.inf).all()


def test_a_sink(rng):
    logits = np.array([[0.5, -1.0, 2.0]], np.float32)
    scores = Scores(np.float32(1), np.float32(1), (), (logits,))
    o, lse, sums, total = call(rng, 2, WARP, (-SIZES[0], 2 * SIZES[0], QUERIES, 2 * SIZES[0]), (SinkKind(),), scores)
    total = total + np.exp(logits.astype(np.float64))[..., None]
    np.testing.assert_allclose(o, sums / total[..., None], atol=1e-5)
    np.testing.assert_allclose(lse, np.log(total), atol=1e-5)


@pytest.mark.parametrize(("batch", "keys", "threads"), [(1, 8192, THREADS), (64, 4096, WARP), (64, 131072, THREADS)])
def test_many_rows_of_few_chunks_have_a_warp_each(batch, keys, threads):
    """Others a block each."""
    (found,) = row_threads(work(batch=(batch, 8), group_size=4, seqlen_q=1, seqlen_k=keys))
    assert found.threads == threads


FAULTS = {
    "few and many": "few",
    "WARP if few and": "WARP if",
    "range(0, chunks, PARTS)": "range(0, chunks, 2 * PARTS)",
    "where(row_index(CHUNKS, chunk) < chunks, alpha_of(m, full(CHUNKS, top), scale_log2), 0)":
        "alpha_of(m, full(CHUNKS, top), scale_log2)",
    "row_max(where(col_index(MAXIMA, chunk) < chunks, x, NONE), top)": "row_max(x, top)",
    "factor * kept_scale)": "factor)",
    "        if batch < batches:\n": "        if True:\n",
    "first:end, query], ROWS_OF)": ":end, query], ROWS_OF)",
    "cuda/test_origin.py::test_goes_on[few queries]": {
        "top = maximum(top, m_before)": "pass",
        "total = total + weight": "pass",
        "o_line + o_before": "o_line + load(before[0][batch, head, query], O_LINE, 0)",
        "full(O_LINE, weight / kept_scale)": "full(O_LINE, weight)",
        "weight = l_before * alpha_of(m_before, top, scale_log2)": "weight = l_before",
    },
}
