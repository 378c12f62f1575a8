"""Every error a user can make: the call, what is raised, and what it says. Nothing is computed before."""

import types
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import numbattn as na
from numbattn.base.checks import needed


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def strided(shape, strides, dtype=np.float32):
    return np.lib.stride_tricks.as_strided(zeros(1000, dtype=dtype), shape, strides)


BF16, X, GAUSSIAN = zeros(15, 8, dtype=ml_dtypes.bfloat16), zeros(5, 3), na.points.Gaussian(1.0)
Q, K, V = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 3)
O, LSE = zeros(2, 4, 5, 3), zeros(2, 4, 5)
FUNCTIONS = na.attention, na.attention_forward, na.attention_vjp


class CupyLike:
    """Looks like a CuPy array from outside."""

    shape, strides, ndim, dtype = Q.shape, Q.strides, 4, Q.dtype


class Tensor:
    """As of torch: its dtype is no dtype of NumPy."""

    shape, dtype = Q.shape, types.SimpleNamespace(name="bool")


class Series:
    """As of pandas: an array of NumPy's inside, and its dtype."""

    shape, dtype, ndim = (7,), np.dtype(bool), 1

    def __array__(self, dtype=None, copy=None):
        return np.ones(7, bool)


class Array:
    """As of jax: shape and dtype as NumPy's, integers."""

    shape, dtype, ndim = (2, 1), np.dtype(int), 2

    def __array__(self, dtype=None, copy=None):
        return np.ones((2, 1), int)


CupyLike.__module__, Tensor.__module__, Series.__module__, Array.__module__ = "cupy", "torch", "pandas", "jaxlib"

# ----------------------------------------------------------------------------------------------------- q, k and v
NO_ARRAYS = {
    "list": ([[1.0]], "got list, expected a numpy.ndarray or a cupy.ndarray"),
    "number": (3.0, "got 3.0, expected a numpy.ndarray"),
    "None": (None, "got None, expected a numpy.ndarray"),
    "text": ("q", "got 'q', expected a numpy.ndarray"),
    "masked": (np.ma.array(Q), r"got numpy.ma.\w*\.?MaskedArray, expected a numpy.ndarray"),
    "matrix": (zeros(5, 8).view(np.matrix), "got numpy.matrix, expected a numpy.ndarray"),
    "torch": (Tensor(), "got torch.Tensor of .*, expected a numpy.* attention of those is in numbattn.interop.torch$"),
    "pandas": (Series(), "got pandas.Series, expected a numpy.ndarray or a cupy.ndarray$"),
    "jax": (Array(), "got jaxlib.Array of int64, expected a numpy.* attention of those is in numbattn.interop.jax$"),
    "scalar": (np.float32(1), "got numpy.float32, expected a numpy.ndarray"),
    "cupy": (CupyLike(), "arrays of NumPy and CuPy do not mix: .* is a cupy.ndarray"),
}
DTYPES = {
    "int": (int, "int64", "float32"), "bool": (bool, "bool", "float32"), "complex": (complex, "complex128", None),
    "object": (object, "object", None), "big-endian": (">f4", ">f4", "float32"), "text": ("U3", "<U3", None),
    "big-endian half": (">f2", ">f2", "float16"), "longdouble": (np.longdouble, "float128|longdouble", "float64"),
    "float8": (ml_dtypes.float8_e4m3fn, "float8_e4m3fn", None), "dates": ("M8[s]", "datetime64", None),
}  # fmt: skip
SHAPES = [
    ((zeros(8), K, V), ValueError, r"q: got the shape \(8,\), expected \(..., sequence, features\)"),
    ((zeros(), K, V), ValueError, r"q: got the shape \(\), expected \(..., sequence, features\)"),
    ((Q, zeros(7), V), ValueError, r"k: got the shape \(7,\)"),
    ((Q, K, zeros(7)), ValueError, r"v: got the shape \(7,\)"),
    ((Q, K.astype(np.float64), V), TypeError, r"k: got float64, expected float32, the dtype of q"),
    ((Q, K, V.astype(ml_dtypes.bfloat16)), TypeError, r"v: got bfloat16, expected float32, the dtype of q"),
    ((Q.astype(np.float16), K, V), TypeError, r"k: got float32, expected float16, the dtype of q"),
    ((Q, zeros(2, 2, 7, 9), V), ValueError, r"k: got head_dim 9, expected 8, the head_dim of q"),
    ((Q, K, zeros(2, 2, 6, 3)), ValueError, r"v: got 6 rows, expected 7, one for each row of k"),
    ((Q, zeros(2, 3, 7, 8), zeros(2, 3, 7, 3)), ValueError, r"q: got 4 heads, expected a multiple of 3, the heads"),
    ((Q, zeros(2, 8, 7, 8), zeros(2, 8, 7, 3)), ValueError, r"q: got 4 heads, expected a multiple of 8"),
    ((Q, K, zeros(2, 4, 7, 3)), ValueError, r"v: got 4 heads, expected 2, as many as k"),
    ((Q, zeros(2, 0, 7, 8), zeros(2, 0, 7, 3)), ValueError, r"q: got 4 heads, expected a multiple of 0"),
    ((Q, zeros(3, 2, 7, 8), zeros(3, 2, 7, 3)), ValueError, r"batch axes of q \(2,\), k \(3,\) and v \(3,\) do not"),
    ((Q, zeros(2, 5, 8), zeros(1, 2, 7, 3)), ValueError, r"v: got 7 rows, expected 5"),
    ((zeros(*[1] * 31, 5, 8), K, V), ValueError, r"q: got 33 axes, at most 32"),
    ((Q, zeros(*[1] * 60, 7, 8), V), ValueError, r"k: got 62 axes, at most 32"),
    ((Q, K, V.astype(">f4")), TypeError, r"v: got >f4, allowed .*; pass v.astype\(np.float32\)"),
]  # fmt: skip

# -------------------------------------------------------------------------------------------------------- options
NUMBERS = {  # no numbers, whatever they are for
    "text": ("0.1", "got '0.1', expected a number"),
    "bytes": (b"1", "got b'1', expected a number"),
    "list": ([0.1], "got list, expected a number"),
    "array": (np.ones(2), "got numpy.ndarray of float64, expected a number"),
    "complex": (1j, "got complex, expected a number"),
    "bool": (True, "got True, expected a number"),
    "object": (object(), "got object, expected a number"),
}
OPTIONS = [
    ({"scale": 0}, ValueError, r"scale: got 0, allowed finite and > 0"),
    ({"scale": -1.0}, ValueError, r"scale: got -1.0, allowed finite and > 0"),
    ({"scale": float("inf")}, ValueError, r"scale: got inf, allowed finite and > 0"),
    ({"scale": float("nan")}, ValueError, r"scale: got nan, allowed finite and > 0"),
    ({"scale": 1e300}, ValueError, r"scale: got 1e\+300, allowed finite and > 0, 1e-38 to 2e\+38 for float32"),
    ({"scale": 1e-50}, ValueError, r"scale: got 1e-50, allowed finite and > 0"),
    ({"scale": 10**400}, ValueError, r"scale: got 10+, allowed are floats"),
    ({"causal": 1}, TypeError, r"causal: got 1, expected True or False"),
    ({"causal": "yes"}, TypeError, r"causal: got 'yes', expected True or False"),
    ({"causal": None}, TypeError, r"causal: got None, expected True or False"),
    ({"causal": np.array([True])}, TypeError, r"causal: got numpy.ndarray of bool, expected True or False"),
    ({"causal": na.Causal()}, TypeError, r"causal: got Causal\(\), expected True or False"),
    ({"dropout": 0.1}, TypeError, r"dropout: got 0.1, expected a numbattn.Dropout\(p, seed\)"),
    ({"dropout": True}, TypeError, r"dropout: got True, expected a numbattn.Dropout\(p, seed\)"),
    ({"dropout": na.Dropout}, TypeError, r"dropout: got the class Dropout, expected a numbattn.Dropout\(p, seed\)"),
    ({"dropout": (0.1, 1)}, TypeError, r"dropout: got tuple, expected a numbattn.Dropout"),
    ({"softmax_scale": 1}, TypeError, r"attention\w*: got softmax_scale, expected scale$"),
    ({"mask": "causal"}, TypeError, r"mask: got 'causal', expected a numbattn mask or a boolean array .*True ="),
    ({"mask": True}, TypeError, r"mask: got True, expected a numbattn mask or a boolean array"),
    ({"mask": na.Causal}, TypeError, r"mask: got the class Causal, expected a numbattn mask"),
    ({"mask": [[True]]}, TypeError, r"mask: got list, expected a numbattn mask or a boolean array"),
    ({"mask": zeros(2, 4, 5, 7)}, TypeError, r"mask: got numpy.ndarray of float32, .*True = visible .*numbattn.Bias"),
    ({"mask": np.ones((5, 7), int)}, TypeError, r"mask: got numpy.ndarray of int64, .*True = visible"),
    ({"mask": np.ma.array(np.ones((5, 7), bool))}, TypeError, r"mask: got numpy.ma"),
    ({"mask": Tensor()}, TypeError, r"mask: got torch.Tensor of .*, expected a numbattn mask or a boolean array,"),
    ({"mask": Series()}, TypeError, r"mask: got pandas.Series, expected a numbattn mask"),
    ({"mask": Array()}, TypeError, r"mask: got jaxlib.Array of int64, expected a numbattn mask"),
    ({"mask": np.ones((2, 2, 5, 7), bool)}, ValueError,
     r"mask: got booleans of the shape \(2, 2, 5, 7\), which do not broadcast to \(2, 4, 5, 7\)"),
    ({"mask": np.ones((2, 4, 5, 8), bool)}, ValueError, r"mask: got booleans of the shape \(2, 4, 5, 8\)"),
    ({"mask": np.ones((7, 5), bool)}, ValueError, r"mask: got booleans of the shape \(7, 5\)"),
    ({"mask": np.ones((1, 2, 4, 5, 7), bool)}, ValueError, r"mask: got booleans of the shape \(1, 2, 4, 5, 7\)"),
    ({"mask": na.Causal() & np.ones((4, 7), bool)}, ValueError, r"mask: got booleans of the shape \(4, 7\)"),
    ({"mask": np.ones((2, 7), bool)}, ValueError, r"\(2, 4, 5, 7\); if they .* no padding, pass "
     r"visible\[:, None, None, :\], or, .*, Lengths\(keys=visible.sum\(-1\)\[:, None\]\)$"),
    ({"mask": np.ones((2, 4, 5, 7, 7), bool)}, ValueError, r"which do not broadcast to \(2, 4, 5, 7\)$"),
    ({"mask": na.Causal() | np.ones((2, 4, 7), bool)}, ValueError,
     r"visible\[:, :, None, :\], or, .*, Lengths\(keys=visible.sum\(-1\)\)$"),
    ({"mask": na.Bits(np.ones((1, 1, 5, 2), np.uint32))}, ValueError,
     r"mask: Bits words: got 2 words a row, expected 1, for 7 keys"),
    ({"mask": na.Bits(np.ones((4, 1), np.uint32))}, ValueError,
     r"mask: got Bits words of the shape \(4, 1\), which do not broadcast to \(2, 4, 5, 1\)"),
    ({"mask": na.BlockSparse(np.ones((1, 1, 2, 2), bool), (2, 4))}, ValueError, r"BlockSparse blocks: .*, 3, 2\)"),
    ({"mask": na.BlockSparse(np.ones((3, 2), bool), (2, 4))}, ValueError,
     r"BlockSparse blocks: .* size or 1; pass blocks\[None, None\], of the shape \(1, 1, 3, 2\)$"),
    ({"mask": na.Lengths(np.array([3, 4]))}, ValueError,
     r"mask: Lengths keys: got the shape \(2,\), expected \(2 or 1, 4 or 1\): all batch axes, heads included, "
     r"each of full size or 1; pass keys\[:, None\], of the shape \(2, 1\)$"),
    ({"mask": na.Lengths(np.ones(4, int))}, ValueError, r"or 1; pass keys\[None, :\], of the shape \(1, 4\)$"),
    ({"mask": na.Prefix(1, np.ones(1, int))}, ValueError, r"pass offset\[:, None\], .* or offset\[None, :\], "),
    ({"mask": na.Lengths(np.ones(3, int))}, ValueError, r"each of full size or 1$"),
    ({"mask": na.Segments([0, 5], np.zeros((2, 2), int))}, ValueError,
     r"pass keys\[:, None\], of the shape \(2, 1, 2\)$"),
    ({"mask": na.Causal() | na.Lengths(np.array([3, 4]))}, ValueError, r"Lengths keys: got the shape \(2,\)"),
    ({"mask": na.Causal() | na.Lengths(8)}, ValueError, r"mask: Lengths keys: got 8, allowed 0 to 7"),
    ({"mask": na.Causal() | na.Prefix(8) | np.ones((5, 7), bool)}, ValueError, r"mask: Prefix lengths: got 8, allowed"),
    ({"mask": na.Causal() | np.ones((4, 7), bool)}, ValueError, r"mask: got booleans of the shape \(4, 7\)"),
    ({"mask": na.Lengths(queries=np.array([[[3]]]))}, ValueError, r"Lengths queries: got the shape \(1, 1, 1\)"),
    ({"mask": na.Causal(np.zeros((1, 2), int))}, ValueError, r"mask: Causal offset: got the shape \(1, 2\)"),
    ({"mask": na.Window(1, 0, np.zeros((3, 1), int))}, ValueError, r"mask: Window offset: got the shape \(3, 1\)"),
    ({"mask": na.Lengths(np.array([[8], [1]]))}, ValueError, r"Lengths keys: got values from 1 to 8, allowed 0 to 7"),
    ({"mask": na.Lengths(queries=np.array([[-1], [1]]))}, ValueError, r"got values from -1 to 1, allowed 0 to 5"),
    ({"mask": na.Lengths(8)}, ValueError, r"Lengths keys: got 8, allowed 0 to 7"),
    ({"mask": na.Lengths(queries=6)}, ValueError, r"Lengths queries: got 6, allowed 0 to 5"),
    ({"mask": na.Segments([0, 6], [0, 7])}, ValueError, r"Segments queries: got values from 0 to 6, allowed 0 to 5"),
    ({"mask": na.Segments([0, 5], [0, 8])}, ValueError, r"mask: Segments keys: got values from 0 to 8, allowed 0 to 7"),
    ({"mask": na.Segments([0, 6])}, ValueError, r"mask: Segments queries: got values from 0 to 6, allowed 0 to 5"),
    ({"mask": na.Segments([-1, 5])}, ValueError, r"mask: Segments queries: got values from -1 to 5, allowed 0 to 5"),
    ({"mask": na.Causal() & na.Segments([0, 4, 3])}, ValueError,
     r"mask: Segments queries: got 4 before 3, expected offsets that do not decrease"),
    ({"mask": na.Segments(np.array([[[0, 5]], [[5, 0]]], np.uint8))}, ValueError, r"Segments queries: got 5 before 0"),
    ({"mask": na.Segments([0, 5], [7, 0])}, ValueError, r"mask: Segments keys: got 7 before 0, expected offsets that"),
    ({"mask": na.Segments(np.zeros((4, 2), int))}, ValueError,
     r"mask: Segments queries: got the shape \(4, 2\), expected \(2 or 1, 4 or 1, 2\): all batch axes, heads included"),
    ({"mask": na.Segments([0, 5], np.zeros((3, 1, 2), int))}, ValueError, r"Segments keys: got the shape \(3, 1, 2\)"),
    ({"mask": na.First(np.array([[-1]]))}, ValueError, r"mask: First n: got values from -1 to -1, allowed 0 or more"),
    ({"mask": na.First(np.array([3, 4]))}, ValueError, r"mask: First n: got the shape \(2,\), .* pass n\[:, None\]"),
    ({"mask": na.Prefix(8)}, ValueError, r"mask: Prefix lengths: got 8, allowed 0 to 7"),
    ({"mask": na.Prefix(np.array([[-1]]))}, ValueError, r"Prefix lengths: got values from -1 to -1, allowed 0 to 7"),
    ({"mask": na.Prefix(np.array([3, 4]))}, ValueError, r"mask: Prefix lengths: got the shape \(2,\), expected \(2 or"),
    ({"mask": na.Prefix(3, np.zeros((1, 2), int))}, ValueError, r"mask: Prefix offset: got the shape \(1, 2\)"),
    ({"mask": na.Intervals(*np.zeros((2, 1, 1, 7), int))}, ValueError,
     r"mask: got Intervals first of the shape \(1, 1, 7\), which do not broadcast to \(2, 4, 5\)"),
    ({"mask": na.Intervals([0], np.zeros((3, 1, 5), int))}, ValueError, r"got Intervals end of the shape \(3, 1, 5\)"),
    ({"mask": na.Causal() & na.Lengths(-1)}, ValueError, r"Lengths keys: got -1, allowed 0 to 7"),
]
OUTS = [
    ([1], TypeError, r"out: got list, expected a numpy.ndarray"),
    (CupyLike(), TypeError, r"q is a numpy.ndarray, out is a cupy.ndarray"),
    (Tensor(), TypeError, r"out: got torch.Tensor"),
    (zeros(2, 4, 5, 8), ValueError, r"out: got the shape \(2, 4, 5, 8\), expected \(2, 4, 5, 3\)"),
    (zeros(4, 5, 3), ValueError, r"out: got the shape \(4, 5, 3\), expected \(2, 4, 5, 3\)"),
    (zeros(2, 4, 5, 3, dtype=np.float64), TypeError, r"out: got float64, expected float32, the dtype of q"),
    (np.broadcast_to(zeros(3), (2, 4, 5, 3)), ValueError, r"out: got a read-only array"),
    (strided((2, 4, 5, 3), (0, 0, 0, 4)), ValueError, r"out: got strides \(0, 0, 0, 4\) .*: elements share memory"),
    (strided((2, 4, 5, 3), (240, 60, 4, 4)), ValueError, r"elements share memory"),
    (strided((2, 4, 5, 3), (240, 60, 8, 4)), ValueError, r"elements share memory"),
    (strided((2, 4, 5, 3), (240, 60, 12, 2)), ValueError, r"elements share memory"),
]


def overlapping(name):
    """out and an input that share memory, of one shape."""
    buffer = zeros(10, 8)
    arrays = dict(zip("qkv", np.zeros((3, 5, 8), np.float32))) | {name: buffer[:5]}
    return lambda: na.attention(**arrays, out=buffer[4:9])


def overlapping_array(option, make, dtype=np.float32):
    """out and an array of a mask or a score that share memory."""
    out = zeros(7, 7)
    array = out[3:].reshape(-1).view(dtype)[:7]
    return lambda: na.attention(*zeros(3, 7, 7), out=out, **{option: make(array)})


OUT_IN_OPTIONS = [
    (overlapping_array("score", na.Bias), r"out: overlaps Bias bias"),
    (overlapping_array("score", lambda x: [na.Softcap(1.0), na.RelativeBias(x)]), r"out: overlaps RelativeBias table"),
    (overlapping_array("mask", lambda x: na.Causal() & na.Intervals(x, x), np.int32), r"out: overlaps Intervals first"),
    (overlapping_array("mask", lambda x: na.Causal() | na.Intervals([0], x), np.int32), r"out: overlaps Intervals end"),
    (overlapping_array("mask", lambda x: x.view(bool)[:7], np.int32), r"out: overlaps Dense visible"),
]

# ---------------------------------------------------------------------------------------------------- the backward pass
GRADIENTS = [
    ({"do": 3.0}, TypeError, r"do: got 3.0, expected a numpy.ndarray"),
    ({"do": None}, TypeError, r"do: got None, expected a numpy.ndarray"),
    ({"do": Tensor()}, TypeError, r"do: got torch.Tensor of .*, expected a numpy.ndarray"),
    ({"do": CupyLike()}, TypeError, r"q is a numpy.ndarray, do is a cupy.ndarray"),
    ({"do": Q}, ValueError, r"do: got the shape \(2, 4, 5, 8\), expected \(2, 4, 5, 3\), the shape of o"),
    ({"do": zeros(3)}, ValueError, r"do: got the shape \(3,\), expected \(2, 4, 5, 3\), the shape of o"),
    ({"do": O.astype(int)}, TypeError, r"do: got int64, expected float32, the dtype of o"),
    ({"do": O.astype(complex)}, TypeError, r"do: got complex128, expected float32, the dtype of o"),
    ({"dlse": 1.0}, TypeError, r"dlse: got 1.0, expected a numpy.ndarray"),
    ({"dlse": zeros(2, 4, 7)}, ValueError, r"dlse: got the shape \(2, 4, 7\), expected \(2, 4, 5\), the shape of lse"),
    ({"dlse": zeros(2, 4, 5, 1)}, ValueError, r"dlse: got the shape \(2, 4, 5, 1\), expected \(2, 4, 5\)"),
    ({"dlse": LSE.astype(bool)}, TypeError, r"dlse: got bool, expected float32, the dtype of lse"),
    ({"saved": (1, 2)}, TypeError, r"saved: got tuple, expected what attention_forward returned"),
    ({"saved": None}, TypeError, r"saved: got None, expected what attention_forward returned"),
    ({"saved": O}, TypeError, r"saved: got numpy.ndarray of float32, expected what attention_forward returned"),
    ({"deterministic": "banana"}, TypeError, r"deterministic: got 'banana', expected True or False"),
    ({"deterministic": 1}, TypeError, r"deterministic: got 1, expected True or False"),
    ({"deterministic": None}, TypeError, r"deterministic: got None, expected True or False"),
]
SAVED = [
    ((Q, K, V, Q, LSE), {}, ValueError, r"o: got the shape \(2, 4, 5, 8\), expected \(2, 4, 5, 3\)"),
    ((Q, K, V, O.astype(np.float64), LSE), {}, TypeError, r"o: got float64, expected float32"),
    ((Q, K, V, None, LSE), {}, TypeError, r"o: got None, expected a numpy.ndarray"),
    ((Q, K, V, CupyLike(), LSE), {}, TypeError, r"q is a numpy.ndarray, o is a cupy.ndarray"),
    ((Q, K, V, O, O), {}, ValueError, r"lse: got the shape \(2, 4, 5, 3\), expected \(2, 4, 5\)"),
    ((Q, K, V, O, LSE.astype(np.float16)), {}, TypeError, r"lse: got float16, expected float32"),
    ((Q, K, V, O, 0), {}, TypeError, r"lse: got 0, expected a numpy.ndarray"),
    ((Q, K, zeros(2, 2, 6, 3), O, LSE), {}, ValueError, r"v: got 6 rows, expected 7"),
    ((Q, K, V, O, LSE), {"scale": -1}, ValueError, r"scale: got -1, allowed finite and > 0"),
    ((Q, K, V, O, LSE), {"out": O}, TypeError, r"unexpected keyword argument 'out'"),
]

# ------------------------------------------------------------------------------------------------------------- values
INTEGERS = {  # no integers, whatever they are for
    "float": (1.5, "got 1.5, expected an int"),
    "whole float": (2.0, "got 2.0, expected an int"),
    "text": ("three", "got 'three', expected an int"),
    "bool": (True, "got True, expected an int"),
    "complex": (1j, "got complex, expected an int"),
}
NO_INTEGER_ARRAYS = {
    "floats": (np.zeros((2, 1)), "got numpy.ndarray of float64, expected an int or an integer array of NumPy or CuPy"),
    "booleans": (np.array([True]), "got numpy.ndarray of bool, expected an int or an integer array"),
    "masked": (np.ma.array([1]), r"got numpy.ma.\w*\.?MaskedArray, expected an int or an integer array"),
    "axes": (np.ones((1,) * 33, int), "got 33 axes, at most 32"),
    "rows of unequal length": ([[1, 2], [3]], "got list, of which NumPy makes no array: "),
    "objects": (np.array([2**70]), "got numpy.ndarray of object, expected an int or an integer array"),
    "list of floats": ([1.5], "got list, expected an int or an integer array"),
    "torch": (Tensor(), "got torch.Tensor of .*, expected an int or an integer array$"),
    "pandas": (Series(), "got pandas.Series, expected an int or an integer array"),
    "jax": (Array(), "got jaxlib.Array of int64, expected an int or an integer array"),
    "large": (2**70, r"got 1180591620717411303424, allowed -\d+ to 2\*\*63 - 1"),
    "small": (-(2**70), r"got -1180591620717411303424, allowed -\d+ to 2\*\*63 - 1"),
}
WITH_INTEGERS = {
    "Window left": lambda x: na.Window(x, 0),
    "Window right": lambda x: na.Window(0, x),
    "Window offset": lambda x: na.Window(0, 0, x),
    "Causal offset": lambda x: na.Causal(x),
    "Lengths keys": lambda x: na.Lengths(x),
    "Lengths queries": lambda x: na.Lengths(queries=x),
    "Segments queries": lambda x: na.Segments(x),
    "Segments keys": lambda x: na.Segments([0, 1], x),
    "First n": lambda x: na.First(x),
    "Prefix lengths": lambda x: na.Prefix(x),
    "Prefix offset": lambda x: na.Prefix(0, x),
    "Intervals first": lambda x: na.Intervals(x, [1]),
    "Intervals end": lambda x: na.Intervals([1], x),
    "offsets": lambda x: na.unpack(Q, x),
    "Dropout seed": lambda x: na.Dropout(0.1, x),
    "Dropout offset": lambda x: na.Dropout(0.1, 1, x),
    "block_size": lambda x: na.BlockSparse(np.ones((2, 2), bool), (x, 4)),
    "local": lambda x: na.BlockSparse.local_global((8, 8), local=x),
    "everywhere": lambda x: na.BlockSparse.local_global((8, 8), everywhere=x),
    "stride": lambda x: na.BlockSparse.strided((8, 8), stride=x),
    "seqlen_q": lambda x: na.Causal().dense(x, 3),
    "seqlen_k": lambda x: na.Causal().dense(3, x),
}
MAY_BE_ARRAYS = (
    "Window offset", "Causal offset", "Lengths keys", "Lengths queries", "Segments queries", "Segments keys",
    "First n", "Prefix lengths", "Prefix offset", "Intervals first", "Intervals end", "offsets",
)  # fmt: skip
DROP = na.Dropout(0.5, 1)
CACHE = na.KVCache.zeros(1, 2, 8, 8, like=Q)
VALUES = [
    (lambda: na.attention(Q, K, V, mask=na.Lengths(Array())), TypeError, r"mask: Lengths keys: got jaxlib.Array.* "
     r"those of frameworks go with the functions of numbattn.interop"),
    (lambda: CACHE.truncate(Array()), TypeError, r"lengths: got jaxlib.Array of int64, expected an int or"),
    (lambda: CACHE.keep(Array(), nodes=1), TypeError, r"path: got jaxlib.Array of int64, expected an int or"),
    (lambda: CACHE.append(Q[0, :2], Q[0, :2], segments=Array()), TypeError, r"segments: got jaxlib.Array of int64"),
    (lambda: na.Dropout(-0.1, 1), ValueError, r"Dropout p: got -0.1, allowed 0 <= p < 1"),
    (lambda: na.Dropout(1, 1), ValueError, r"Dropout p: got 1, allowed 0 <= p < 1"),
    (lambda: na.Dropout(float("nan"), 1), ValueError, r"Dropout p: got nan, allowed 0 <= p < 1"),
    (lambda: na.Dropout(float("inf"), 1), ValueError, r"Dropout p: got inf, allowed 0 <= p < 1"),
    (lambda: na.Dropout(1e-6, 1), ValueError, r"Dropout p: got 1e-06, which is rounded to 0"),
    (lambda: na.Dropout(1 - 1e-6, 1), ValueError, r"Dropout p: got 0.999999, which is rounded to 1"),
    (lambda: na.Dropout(0.1, -1), ValueError, r"Dropout seed: got -1, allowed 0 to 2\*\*64 - 1"),
    (lambda: na.Dropout(0.1, 2**64), ValueError, r"Dropout seed: got 18446744073709551616, allowed 0 to 2\*\*64 - 1"),
    (lambda: na.Dropout(0.1, 1, -1), ValueError, r"Dropout offset: got -1, allowed 0 to 2\*\*32 - 1"),
    (lambda: na.Dropout(0.1, 1, 2**32), ValueError, r"Dropout offset: got 4294967296, allowed 0 to 2\*\*32 - 1"),
    (lambda: na.Dropout(0.1), TypeError, r"missing 1 required positional argument: 'seed'"),
    (lambda: na.dropout_mask(0.5, (3, 4)), TypeError, r"dropout: got 0.5, expected a numbattn.Dropout\(p, seed\)"),
    (lambda: na.dropout_mask(None, (3, 4)), TypeError, r"dropout: got None, expected a numbattn.Dropout\(p, seed\)"),
    (lambda: na.dropout_mask(DROP, 5), TypeError, r"shape: got 5, expected \(..., seqlen_q, seqlen_k\), integers"),
    (lambda: na.dropout_mask(DROP, (3,)), ValueError, r"shape: got \(3,\), expected \(..., seqlen_q, seqlen_k\)"),
    (lambda: na.dropout_mask(DROP, ()), ValueError, r"shape: got \(\), expected \(..., seqlen_q, seqlen_k\)"),
    (lambda: na.dropout_mask(DROP, (3, -1)), ValueError, r"shape: got -1, allowed 0 or more"),
    (lambda: na.dropout_mask(DROP, (3, 4.0)), TypeError, r"shape: got tuple, expected .*, integers"),
    (lambda: na.dropout_mask(DROP, "34"), TypeError, r"shape: got '34', expected .*, integers"),
    (lambda: na.Window(1), TypeError, r"missing 1 required positional argument: 'right'"),
    (lambda: na.Window(-1, 0), ValueError, r"Window: got left -1 and right 0, between .*; None = unlimited"),
    (lambda: na.Window(-1, -1, 3), ValueError, r"Window: got left -1 and right -1, between .*; None = unlimited"),
    (lambda: na.Causal(0, 1), TypeError, r"takes from 1 to 2 positional arguments"),
    (lambda: na.Causal().dense(-1, 3), ValueError, r"seqlen_q: got -1, allowed 0 or more"),
    (lambda: na.Causal().dense(3, -1), ValueError, r"seqlen_k: got -1, allowed 0 or more"),
    (lambda: na.Dense(zeros(3, 4)), TypeError, r"Dense visible: got numpy.ndarray of float32, expected .* of bool"),
    (lambda: na.Dense([[True]]), TypeError, r"Dense visible: got list, expected an array of bool of NumPy or CuPy"),
    (lambda: na.Dense(True), TypeError, r"Dense visible: got True, expected an array of bool"),
    (lambda: na.Dense(np.array(True)), ValueError, r"Dense visible: got the shape \(\), expected"),
    (lambda: na.Dense(np.ma.array([[True]])), TypeError, r"Dense visible: got numpy.ma"),
    (lambda: na.Dense(Tensor()), TypeError, r"Dense visible: got torch.Tensor of .*, expected an array of bool"),
    (lambda: na.Dense(Series()), TypeError, r"Dense visible: got pandas.Series, expected an array of bool"),
    (lambda: na.Bits(np.ones((3, 1), np.int32)), TypeError, r"Bits words: got numpy.ndarray of int32, .* of uint32"),
    (lambda: na.Bits(np.ones(3, np.uint32)), ValueError, r"Bits words: got the shape \(3,\), expected"),
    (lambda: na.Bits([[1]]), TypeError, r"Bits words: got list, expected an array of uint32"),
    (lambda: na.Bits(Tensor()), TypeError, r"Bits words: got torch.Tensor of .*, expected an array of uint32"),
    (lambda: na.Bits(np.ones((3, 1), ">u4")), TypeError,
     r'Bits words: got numpy.ndarray of >u4, which x.astype\(x.dtype.newbyteorder\("="\)\) casts, expected'),
    (lambda: na.Dense(np.ones((1,) * 33, bool)), ValueError, r"Dense visible: got 33 axes, at most 32"),
    (lambda: na.Bits.pack(np.ones((3, 4))), TypeError, r"Bits.pack visible: got numpy.ndarray of float64, .* of bool"),
    (lambda: na.Bits.pack(np.ones(3, bool)), ValueError, r"Bits.pack visible: got the shape \(3,\)"),
    (lambda: na.Bits.pack([[True]]), TypeError, r"Bits.pack visible: got list, expected an array of bool"),
    (lambda: na.Bits.tree(3), ValueError, r"Bits.tree parents: got a number, expected an array \(..., nodes\)"),
    (lambda: na.Bits.tree([-1.0, 0.0]), TypeError, r"Bits.tree parents: got list, expected an int or an integer array"),
    (lambda: na.Bits.tree("tree"), TypeError, r"Bits.tree parents: got 'tree', expected an int or an integer array"),
    (lambda: na.Bits.tree(Tensor()), TypeError, r"Bits.tree parents: got torch.Tensor"),
    (lambda: na.Bits.tree([-1, 5]), ValueError, r"Bits.tree parents: got values from -1 to 5, allowed -1 to 1"),
    (lambda: na.Bits.tree([-2, 0]), ValueError, r"Bits.tree parents: got values from -2 to 0, allowed -1 to 1"),
    (lambda: na.Bits.tree([1, 0]), ValueError, r"Bits.tree parents: a node is its own ancestor"),
    (lambda: na.Bits.tree([0]), ValueError, r"Bits.tree parents: a node is its own ancestor"),
    (lambda: na.Segments(3), ValueError, r"Segments queries: got a number, expected an array \(..., count \+ 1\)"),
    (lambda: na.Segments(np.zeros((2, 0), int)), ValueError, r"queries: got the shape \(2, 0\), expected at least one"),
    (lambda: na.Segments([0, 1], [0, 1, 2]), ValueError, r"Segments keys: got 3 offsets, expected 2, as many"),
    (lambda: na.Segments([0, 1]) & na.Segments([0, 1]), ValueError, r"&: got more than one Segments, allowed is one"),
    (lambda: na.Segments([0]) & na.Causal() & (na.Causal(0) & na.Segments([0])), ValueError, r"got more than one Segm"),
    (lambda: na.First(-1), ValueError, r"First n: got -1, allowed 0 or more"),
    (lambda: na.Intervals(0, [1]), ValueError, r"Intervals first: got a number, expected an array \(..., seqlen_q\)"),
    (lambda: na.Intervals([0]), TypeError, r"missing 1 required positional argument: 'end'"),
    (lambda: na.pack(3), TypeError, r"arrays: got 3, expected a list of arrays"),
    (lambda: na.pack(np.array(3.0)), TypeError, r"arrays: got numpy.ndarray of float64, expected a list of arrays"),
    (lambda: na.pack([]), ValueError, r"arrays: got none, expected at least one"),
    (lambda: na.pack([Q, [1]]), TypeError, r"arrays\[1\]: got list, expected a numpy.ndarray"),
    (lambda: na.pack([Q, CupyLike()]), TypeError, r"do not mix: arrays\[0\] is a numpy.ndarray, arrays\[1\] is a cupy"),
    (lambda: na.pack([zeros(3)]), ValueError, r"arrays\[0\]: got the shape \(3,\), expected \(..., length, features\)"),
    (lambda: na.pack([Q, K]), ValueError, r"arrays\[1\]: got the shape \(2, 2, 7, 8\), expected .*equal in all arrays"),
    (lambda: na.pack([Q, Q, Q.astype(np.float64)]), TypeError,
     r"arrays\[2\]: got float64, expected float32, the dtype of arrays\[0\]"),
    (lambda: na.pack([Q, O]), ValueError, r"arrays\[1\]: got the shape \(2, 4, 5, 3\), expected"),
    (lambda: na.unpack([1], [0]), TypeError, r"packed: got list, expected a numpy.ndarray"),
    (lambda: na.unpack(zeros(3), [0]), ValueError, r"packed: got the shape \(3,\), expected \(..., total, features\)"),
    (lambda: na.unpack(Q, [[0, 5]]), ValueError, r"offsets: got the shape \(1, 2\), expected \(count \+ 1,\)"),
    (lambda: na.unpack(Q, [[0, 3], [5]]), ValueError, r"offsets: got list, of which NumPy makes no array"),
    (lambda: na.Lengths([[1], [1, 2]]), ValueError, r"Lengths keys: got list, of which NumPy makes no array"),
    (lambda: na.pack(3), TypeError, r"arrays: got 3, expected a list of arrays"),
    (lambda: na.unpack(Q, [0, 6]), ValueError, r"offsets: got values from 0 to 6, allowed 0 to 5"),
    (lambda: na.unpack(Q, [0, 3, 2]), ValueError, r"offsets: got 3 before 2, expected offsets that do not decrease"),
    (lambda: na.BlockSparse(np.ones((2, 2))), TypeError, r"BlockSparse blocks: got numpy.ndarray of float64, .*bool"),
    (lambda: na.BlockSparse(np.ones(2, bool)), ValueError, r"BlockSparse blocks: got the shape \(2,\)"),
    (lambda: na.BlockSparse(Array()), TypeError, r"BlockSparse blocks: got jaxlib.Array of int64, expected an array"),
    (lambda: na.BlockSparse(np.ones((2, 2), bool), 64), TypeError, r"block_size: got 64, expected two integers"),
    (lambda: na.BlockSparse(np.ones((2, 2), bool), (64,)), TypeError, r"block_size: got tuple, expected two integers"),
    (lambda: na.BlockSparse(np.ones((2, 2), bool), (0, 4)), ValueError, r"block_size: got 0, allowed 1 or more"),
    (lambda: na.BlockSparse(np.ones((2, 2), bool), (4, -1)), ValueError, r"block_size: got -1, allowed 1 or more"),
    (lambda: na.BlockSparse.butterfly((33,)), ValueError, r"shape: got \(33,\), expected \(..., seqlen_q, seqlen_k\)"),
    (lambda: na.BlockSparse.butterfly(33), TypeError, r"shape: got 33, expected \(..., seqlen_q, seqlen_k\), integers"),
    (lambda: na.BlockSparse.butterfly((33, 3.5)), TypeError, r"shape: got tuple, expected .*, integers"),
    (lambda: na.BlockSparse.local_global((-1, 3)), ValueError, r"shape: got -1, allowed 0 or more"),
    (lambda: na.BlockSparse.strided((8, 8), stride=0), ValueError, r"stride: got 0, allowed 1 or more"),
    (lambda: na.Causal() and na.Lengths(keys=3), TypeError, r"a mask has no truth value: use & where"),
    (lambda: na.Causal() or na.Lengths(keys=3), TypeError, r"a mask has no truth value"),
    (lambda: not na.Causal(), TypeError, r"a mask has no truth value"),
    (lambda: bool(na.Causal() & na.Lengths(3)), TypeError, r"a mask has no truth value"),
    (lambda: ~na.Causal(), TypeError, r"a mask has no ~: numbattn.Where .* ~mask.dense\(seqlen_q, seqlen_k\)"),
    (lambda: na.attention(Q, K, V, mask=lambda b, h, i, j: True), TypeError, r"mask: got function, .* numbattn.Where"),
    (lambda: na.attention(Q, K, V, score=lambda s, *at: s), TypeError, r"score: got function, .* numbattn.Score\("),
    (lambda: na.attention(Q, K, V, score=[na.Softcap(1), Q]), TypeError, r"score: got numpy.* numbattn.Bias\(...\) of"),
    (lambda: needed("missing.module", "it", "one"), ImportError, "missing not found. it needs pip install one$"),
    (lambda: na.attention(Q, K.astype("d"), V), ValueError, r"k: got float64, .* of q; pass k.astype\(np.float32\)$"),
    (lambda: na.attention(*np.split(BF16, 3)[:2], Q[0, 0]), ValueError, r"; pass v.astype\(ml_dtypes.bfloat16\)$"),
    (lambda: na.attention_jvp(Q, Q, Q, Q.astype("e"), None, None), ValueError, r"tq: got float16, .*; pass tq.astype"),
    (lambda: na.points.product(X, X, X.astype("d"), GAUSSIAN), ValueError, r"b: got float64, .*; pass b.astype\(np.fl"),
    (lambda: na.Causal() & 3, TypeError, r"&: got 3, expected a numbattn mask or a boolean array"),
    (lambda: 3 & na.Causal(), TypeError, r"&: got 3, expected a numbattn mask or a boolean array"),
    (lambda: na.Causal() & zeros(5, 7), TypeError, r"&: got numpy.ndarray of float32, expected a numbattn mask"),
    (lambda: zeros(5, 7) & na.Causal(), TypeError, r"&: got numpy.ndarray of float32, expected a numbattn mask"),
    (lambda: na.Causal() & Tensor(), TypeError, r"&: got torch.Tensor of .*, expected a numbattn mask"),
    (lambda: na.Causal() | 3, TypeError, r"\|: got 3, expected a numbattn mask or a boolean array"),
    (lambda: 3 | na.Causal(), TypeError, r"\|: got 3, expected a numbattn mask or a boolean array"),
    (lambda: na.Causal() | na.Segments([0]), ValueError, r"\|: got Segments, .*: write `segments & \(one \| other\)`"),
    (lambda: na.Causal() & na.Segments([0]) | na.Lengths(3), ValueError, r"\|: got Segments"),
    (lambda: setattr(na.Causal(), "offset", 3), AttributeError, r"offset"),
    (lambda: setattr(DROP, "p", 0.1), AttributeError, r"p"),
    (lambda: na.attention(Q, K, V, True), TypeError, r"takes from 2 to 3 positional arguments but 4"),
    (lambda: na.attention(Q, K), TypeError, r"v: got None, expected a numpy.ndarray or a cupy.ndarray"),
    (lambda: na.attention_weights(Q, V), ValueError, r"k: got head_dim 3, expected 8, the head_dim of q"),
    (lambda: na.attention_weights(Q, [1]), TypeError, r"k: got list, expected a numpy.ndarray"),
    (lambda: na.attention_weights(Q, K, scale=-1), ValueError, r"scale: got -1, allowed finite and > 0"),
    (lambda: na.attention_weights(Q, K, out=O), TypeError, r"unexpected keyword argument 'out'"),
]


# -------------------------------------------------------------------------------------------------------------- calls
def calls():
    """(name, call, error, message) of all of them."""
    functions = {function.__name__: function for function in FUNCTIONS}
    for at, name in enumerate("qkv"):
        for kind, (x, message) in NO_ARRAYS.items():
            arrays = [Q, K, V]
            arrays[at] = x
            text = message if kind == "cupy" else f"{name}: {message}"
            yield f"{name} {kind}", lambda arrays=arrays: na.attention(*arrays), TypeError, text
    for kind, (dtype, message, cast) in DTYPES.items():
        arrays = [x.astype(dtype) for x in (Q, K, V)]
        text = f"q: got ({message}).*, allowed float16, bfloat16, float32, float64"
        text += f"; pass q.astype\\(np.{cast}\\)$" if cast else "$"
        yield f"dtype {kind}", lambda arrays=arrays: na.attention(*arrays), TypeError, text
    for i, (arrays, error, message) in enumerate(SHAPES):
        yield f"shapes {i}", lambda arrays=arrays: na.attention(*arrays), error, message
    for i, (options, error, message) in enumerate(OPTIONS):
        for name, function in functions.items():
            if i % len(functions) == list(functions).index(name):  # all of them come by the same way
                call = lambda options=options, function=function: function(Q, K, V, **options)  # noqa: E731
                yield f"{name} {next(iter(options))} {i}", call, error, message
    for kind, (x, message) in NUMBERS.items():
        yield f"scale {kind}", lambda x=x: na.attention(Q, K, V, scale=x), TypeError, f"scale: {message}"
        yield f"Dropout p {kind}", lambda x=x: na.Dropout(x, 1), TypeError, f"Dropout p: {message}"
    for i, (out, error, message) in enumerate(OUTS):
        for name, function in functions.items():
            yield f"{name} out {i}", lambda out=out, function=function: function(Q, K, V, out=out), error, message
    for name in "qkv":
        yield f"out overlaps {name}", overlapping(name), ValueError, f"out: overlaps {name}"
    for i, (call, message) in enumerate(OUT_IN_OPTIONS):
        yield f"out overlaps {i}", call, ValueError, message
    for i, (arguments, options, error, message) in enumerate(SAVED):
        yield f"Saved.of {i}", lambda a=arguments, o=options: na.Saved.of(*a, **o), error, message
    for name, make in WITH_INTEGERS.items():
        for kind, (x, message) in INTEGERS.items():
            yield f"{name} {kind}", lambda x=x, make=make: make(x), TypeError, f"{name}: {message}"
    for name, (kind, (x, message)) in product(MAY_BE_ARRAYS, NO_INTEGER_ARRAYS.items()):
        if kind != "jax" or name == "offsets":  # masks hold arrays of frameworks, for numbattn.interop
            error = ValueError if kind in ("large", "small", "axes", "rows of unequal length") else TypeError
            yield f"{name} {kind}", lambda x=x, make=WITH_INTEGERS[name]: make(x), error, f"{name}: {message}"
    for i, (call, error, message) in enumerate(VALUES):
        yield f"values {i}", call, error, message


CALLS = {name: call for name, *call in calls()}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call()


@pytest.fixture(scope="module")
def saved():
    return na.attention_forward(Q, K, V)[1]


@pytest.mark.parametrize("number", range(len(GRADIENTS)))
def test_wrong_gradients(number, saved):
    gradients, error, message = GRADIENTS[number]
    with pytest.raises(error, match=message):
        na.attention_backward(**{"do": O, "saved": saved, **gradients})
    if "saved" in gradients or "deterministic" in gradients:
        return
    _, backprop = na.attention_vjp(Q, K, V)
    with pytest.raises(error, match=message):
        backprop(**{"do": O, **gradients})


FAULTS = {
    "base/checks.py": {
        "array.ndim > MOST_AXES": "array.ndim > 99",
        '"jaxlib": "jax"}': '"jaxlib": "torch"}',
        "allowed[0] if len(allowed) == 1 else next(": "next(",
        "except (TypeError, ValueError) as error": "except TypeError as error",
        "array[..., 1:] < array[..., :-1]": "array[1:] < array[:-1]",
        "0 <= array.min() <= array.max() <= largest": "array.max() <= largest",
        '"0 or more" if largest == math.inf': '"0 or more" if False',
        ("scores/test_parts.py::test_numbers_and_lists_are_arrays", "scores/test_parts.py::test_errors"): {
            "isinstance(value, int | np.integer) and not isinstance(value, bool):\n        value =":
                "isinstance(value, int | np.integer):\n        value =",
            "array is not value and array.dtype.kind": "array.dtype.kind",
            "        array = array.astype(np.float64)": "        array = array.astype(np.float32)",
            "str(dtype) if dtype.isnative": "str(dtype) if True",
        },
    },
}
