"""The types of arrays in global memory, and promises about them."""

from dataclasses import dataclass

from ..compiler import TypingError, held_as_llvm, ir, types
from .alignment import alignment_of
from .emit import GLOBAL, I8, I32, I64
from .fragment import ANY, LLVM, constant, name_of


@constant
@dataclass(frozen=True)
class Alignment:
    """A promise about a matrix in global memory, so that vectors may be moved: see `aligned`.

    See `tile.alignment`. Alignment(0) promises nothing.

    >>> Alignment.of(ARRAY), Alignment.of(ARRAY[:, :2]), Alignment.of(ARRAY.T)
    (Alignment(nbytes=16), Alignment(nbytes=8), Alignment(nbytes=0))
    """

    nbytes: int

    @classmethod
    def of(cls, array):
        """The widest alignment that holds for all the matrices (last two axes) of a NumPy array."""
        return cls(alignment_of(array))


@held_as_llvm
class MatrixType(types.Type):
    """A matrix in global memory with a promise. With a fold its rows are those of several matrices, with a page_size
    those of pages, whose numbers a table has."""

    def __init__(self, dtype, alignment, fold=0, page_size=0):
        self.dtype, self.alignment, self.fold, self.page_size = dtype, alignment, fold, page_size
        super().__init__(f"Matrix({dtype}, {alignment.nbytes}, {fold}, {page_size})")

    @property
    def llvm(self):
        """Address, extents and strides; for several matrices or pages, how many and the stride from one to the next;
        the table's address and stride."""
        pointer = ir.PointerType(memory_type(self.dtype), GLOBAL)
        several = [I32, I64] * bool(self.fold or self.page_size)
        table = [ir.PointerType(I32, GLOBAL), I64] * bool(self.page_size)
        return ir.LiteralStructType([pointer, I32, I32, I64, I64, *several, *table])


def stored(dtype):
    """The dtype of an array's numbers, from Numba's dtype of the array."""
    return types.bfloat16 if dtype == types.uint16 else dtype


def memory_type(dtype):
    return I8 if dtype == types.boolean else LLVM[stored(dtype)]


def check_array(word, array, layout=None, takes=ANY):
    """Check that a tile of this layout, or any part of a matrix, may be moved from or to this array."""
    if isinstance(array, types.Type) and not isinstance(array, types.Array | MatrixType):
        raise TypingError(f"{word}: got {array}, expected an array")
    ndim = getattr(array, "ndim", 2)
    if ndim not in (1, 2) or (layout is None and ndim == 1):
        raise TypingError(f"{word}: got an array of {ndim} axes, expected {'2' if layout is None else '1 or 2'}")
    if ndim == 1 and 1 not in layout.shape:
        raise TypingError(f"{word}: a vector is no tile of {layout}")
    dtype = name_of(array.dtype)
    if dtype not in takes and not (dtype == "uint16" and "bfloat16" in takes):
        raise TypingError(f"{word}: got an array of {dtype}, expected one of {', '.join(sorted(takes))}")
