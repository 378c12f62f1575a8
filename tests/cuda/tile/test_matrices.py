"""Matrices of arrays: rows, lines, and several as one."""

import numpy as np
import pytest

from numbattn.cuda.tile import Alignment, copy_layout, heads_as_rows, lines_of, load, mma, rows_between, save
from tests.tools.launch import launch, poisoned

from .tiles import numbers


@pytest.mark.parametrize(("alignment", "columns"), [(0, 13), (16, 16)])
@pytest.mark.parametrize(("batch", "head", "first", "end"), [(0, 0, 0, 9), (1, 2, 3, 8), (1, 0, 8, 9), (0, 1, 4, 5)])
def test_rows_between(batch, head, first, end, alignment, columns):
    """Of any strides; nothing beyond them is read or written."""
    LAYOUT, ALIGNMENT = copy_layout(8, 16, 32, 4), Alignment(alignment)
    x = numbers((9, 2, 6, columns)).transpose(1, 2, 0, 3)[:, ::2]
    whole, y = poisoned((8, 16)), poisoned(x.shape)

    def kernel(x, whole, y, batch, head, first, end):
        tile = load(rows_between(x, batch, head, first, end, ALIGNMENT), LAYOUT, 0)
        save(whole, tile, 0)
        save(rows_between(y, batch, head, first, end, ALIGNMENT), tile, 0)

    launch(kernel, (1, 1, 1), 32, 0, x, whole, y, *map(np.int32, (batch, head, first, end)))
    wanted, written = np.zeros((8, 16), np.float32), np.full_like(y, np.nan)
    end = min(end, first + 8)
    wanted[: end - first, :columns] = written[batch, head, first:end] = x[batch, head, first:end]
    np.testing.assert_array_equal(whole, wanted)
    np.testing.assert_array_equal(y, written)


@pytest.mark.parametrize(("batch", "head", "line"), [(0, 0, 0), (1, 2, 3)])
def test_lines_of(batch, head, line):
    LAYOUT = copy_layout(2, 16, 32, 4)
    x, y = numbers((3, 2, 64)).swapaxes(0, 1), poisoned((2, 16))

    def kernel(x, y, batch, head, line):
        save(y, load(lines_of(x, batch, head, 16), LAYOUT, line), 0)

    launch(kernel, (1, 1, 1), 32, 0, x, y, *map(np.int32, (batch, head, line)))
    wanted = np.zeros(32, np.float32)
    found = x[batch, head, 16 * line :][:32]
    wanted[: len(found)] = found
    np.testing.assert_array_equal(y.ravel(), wanted)


@pytest.mark.parametrize("alignment", [0, 16])
@pytest.mark.parametrize(("heads", "queries", "fold"), [(4, 4, 4), (3, 3, 4), (16, 1, 1), (1, 11, 16)])
def test_heads_as_rows(heads, queries, fold, alignment):
    """Of any strides; rows that no matrix has are 0, and not written."""
    LAYOUT, ALIGNMENT = mma(16, 16, 32).folded(fold), Alignment(alignment)
    x = numbers((queries, 2 * heads, 16))[:, ::2].swapaxes(0, 1)
    whole, y = poisoned((16, 16)), poisoned((heads, queries + 2, 16))

    def kernel(x, whole, y):
        tile = load(heads_as_rows(x, ALIGNMENT, fold), LAYOUT, 0)
        save(whole, tile, 0)
        save(heads_as_rows(y[:, :queries], ALIGNMENT, fold), tile, 0)

    launch(kernel, (1, 1, 1), 32, 0, x, whole, y)
    wanted = np.zeros((16 // fold, fold, 16), np.float32)
    wanted[:heads, :queries] = x
    np.testing.assert_array_equal(whole, wanted.reshape(16, 16))
    np.testing.assert_array_equal(y[:, :queries], x)
    assert np.isnan(y[:, queries:]).all()


FAULTS = {
    ("cuda/tile/test_matrices.py", "cuda/tile/test_global_memory.py"): {
        'icmp_signed("<", row, self.rows)': 'icmp_signed("<=", row, self.rows)',
        'b.icmp_signed("<", head, self.heads), b': 'b.icmp_signed("<=", head, self.heads), b',
        'b.icmp_signed("<", query, self.rows))': 'b.icmp_signed("<=", query, self.rows))',
        "I32(log2(self.fold))": "I32(0)",
        "[b.mul(b.sext(head, I64), self.head_stride)]": "[b.mul(b.sext(head, I64), self.row_stride)]",
        "query < self.array.shape[1]": "query <= self.array.shape[1]",
        "b.sext(b.trunc(self.row_stride, I32), I64) if self.alignment else self.row_stride":
            "b.sext(b.trunc(self.row_stride, I32), I64)",
        "b.sub(end, first), cols": "end, cols",
        "(batch, head, first), strides": "(batch, head), strides",
        "b.udiv(elements, I32(cols)), I32(cols)": "elements, I32(cols)",
        "(batch, head), strides), size_of": "(head, batch), strides), size_of",
    },
}
