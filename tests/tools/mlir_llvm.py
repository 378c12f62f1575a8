"""LLVM by way of MLIR: llvmlite's types and constants, which need no MLIR, and the methods of llvmlite's builder that
lowerings call, which emit operations of MLIR's dialect `llvm`."""

import functools
from contextlib import contextmanager
from types import SimpleNamespace

from llvmlite import ir as llvmlite_ir
from numba_cuda_mlir._mlir import ir as mlir
from numba_cuda_mlir._mlir.dialects import func, llvm, scf
from numba_cuda_mlir.lowering_utilities import get_or_insert_function

I1, I8, I32, I64 = map(llvmlite_ir.IntType, (1, 8, 32, 64))
F32, F64 = llvmlite_ir.FloatType(), llvmlite_ir.DoubleType()


class Value:
    """A value of MLIR's, and its type as llvmlite has it."""

    def __init__(self, value, ty):
        self.mlir, self.type = value, ty
        self.attributes = set()  # "convergent" and ranges are lost

    def set_metadata(self, *about):
        pass


def mlir_type(ty):
    match ty:
        case llvmlite_ir.VoidType():
            return None
        case llvmlite_ir.IntType():
            return mlir.IntegerType.get_signless(ty.width)
        case llvmlite_ir.FloatType():
            return mlir.F32Type.get()
        case llvmlite_ir.DoubleType():
            return mlir.F64Type.get()
        case llvmlite_ir.PointerType():
            return mlir.Type.parse(f"!llvm.ptr<{ty.addrspace}>" if ty.addrspace else "!llvm.ptr")
        case llvmlite_ir.ArrayType():
            return mlir.Type.parse(f"!llvm.array<{ty.count} x {mlir_type(ty.element)}>")
        case llvmlite_ir.LiteralStructType():
            return mlir.Type.parse(f"!llvm.struct<({', '.join(str(mlir_type(t)) for t in ty.elements)})>")
        case llvmlite_ir.VectorType():
            return mlir.VectorType.get([ty.count], mlir_type(ty.element))


def operation(name, result, *operands, **attributes):
    results = [] if result is None else [result]
    made = mlir.Operation.create(f"llvm.{name}", results=results, operands=operands, attributes=attributes)
    return made.results[0] if results else None


def raw(x):
    """The value of MLIR's of a Value or constant."""
    if isinstance(x, Value):
        return x.mlir
    ty, number = mlir_type(x.type), x.constant
    if number is None:
        return operation("mlir.zero", ty)
    if number is llvmlite_ir.Undefined or isinstance(x.type, llvmlite_ir.VectorType):  # there are no others of vectors
        return operation("mlir.undef", ty)
    if isinstance(x.type, llvmlite_ir.IntType):
        ones, half = (1 << x.type.width) - 1, 1 << (x.type.width - 1)
        number = mlir.IntegerAttr.get(ty, number & ones if ones == 1 else ((number + half) & ones) - half)
    else:
        number = mlir.FloatAttr.get(ty, float(number))
    return operation("mlir.constant", ty, value=number)


def integers(name, **attributes):
    def emit(self, x, y):
        parsed = {key: mlir.Attribute.parse(text) for key, text in attributes.items()}
        return Value(operation(name, mlir_type(x.type), raw(x), raw(y), **parsed), x.type)

    return emit


def floats(name):
    def emit(self, x, y, flags=()):
        parsed = mlir.Attribute.parse(f"#llvm.fastmath<{', '.join(flags) or 'none'}>")
        return Value(operation(name, mlir_type(x.type), raw(x), raw(y), fastmathFlags=parsed), x.type)

    return emit


def conversion(name):
    return lambda self, x, to: Value(operation(name, mlir_type(to), raw(x)), to)


def comparison(name, *predicates):
    numbers = dict(zip(("==", "!=", "<", "<=", ">", ">=", "uno"), predicates))

    def emit(self, sign, x, y):
        predicate = mlir.IntegerAttr.get(mlir_type(I64), numbers[sign])
        return Value(operation(name, mlir_type(I1), raw(x), raw(y), predicate=predicate), I1)

    return emit


class Function:
    """A function of LLVM's or of libdevice, as llvmlite's."""

    def __init__(self, module, ftype, name):
        self.returned, self.name = ftype.return_type, name


class GlobalVariable:
    def __init__(self, module, ty, name, addrspace):
        self.type, self.name, self.value_type = llvmlite_ir.PointerType(ty, addrspace), name, ty


class Builder:
    """The methods of llvmlite's builder, at MLIR's point of insertion. `lower`: numba-cuda-mlir's own builder."""

    module = SimpleNamespace(globals={}, add_metadata=lambda about: about)

    def __init__(self, lower):
        self.lower = lower

    add, sub, mul, shl = (integers(x, overflowFlags="#llvm.overflow<none>") for x in ("add", "sub", "mul", "shl"))
    udiv, urem, ashr, lshr, and_, or_, xor = map(integers, ("udiv", "urem", "ashr", "lshr", "and", "or", "xor"))
    fadd, fsub, fmul, fdiv = map(floats, ("fadd", "fsub", "fmul", "fdiv"))
    zext, sext, trunc, fpext, fptrunc = map(conversion, ("zext", "sext", "trunc", "fpext", "fptrunc"))
    sitofp, uitofp, fptosi, fptoui = map(conversion, ("sitofp", "uitofp", "fptosi", "fptoui"))
    ptrtoint, inttoptr, addrspacecast = map(conversion, ("ptrtoint", "inttoptr", "addrspacecast"))
    icmp_signed, icmp_unsigned = comparison("icmp", 0, 1, 2, 3, 4, 5), comparison("icmp", 0, 1, 6, 7, 8, 9)
    fcmp_ordered, fcmp_unordered = comparison("fcmp", 1, 6, 4, 5, 2, 3), comparison("fcmp", 8, 13, 11, 12, 9, 10, 14)

    def neg(self, x):
        return self.sub(llvmlite_ir.Constant(x.type, 0), x)

    def not_(self, x):
        return self.xor(x, llvmlite_ir.Constant(x.type, -1))

    def bitcast(self, x, to):
        if x.type == to or isinstance(to, llvmlite_ir.PointerType):  # MLIR's pointers do not say to what
            return Value(raw(x), to)
        return Value(operation("bitcast", mlir_type(to), raw(x)), to)

    def select(self, condition, x, y):
        return Value(operation("select", mlir_type(x.type), raw(condition), raw(x), raw(y)), x.type)

    def extract_value(self, x, i):
        if isinstance(x, tuple):
            return x[i]
        ty = x.type.element if isinstance(x.type, llvmlite_ir.ArrayType) else x.type.elements[i]
        return Value(operation("extractvalue", mlir_type(ty), raw(x), position=mlir.DenseI64ArrayAttr.get([i])), ty)

    def insert_value(self, x, y, i):
        if isinstance(x, tuple):
            return *x[:i], y, *x[i + 1 :]
        position = mlir.DenseI64ArrayAttr.get([i])
        return Value(operation("insertvalue", mlir_type(x.type), raw(x), raw(y), position=position), x.type)

    def extract_element(self, x, i):
        return Value(operation("extractelement", mlir_type(x.type.element), raw(x), raw(i)), x.type.element)

    def insert_element(self, x, y, i):
        return Value(operation("insertelement", mlir_type(x.type), raw(x), raw(y), raw(i)), x.type)

    def gep(self, place, indices):
        place = self._address(place) if isinstance(place, GlobalVariable) else place
        element = place.type.pointee
        to = functools.reduce(lambda ty, _: ty.element, indices[1:], element)
        found, dynamic = llvmlite_ir.PointerType(to, place.type.addrspace), [-(2**31)] * len(indices)
        given = [raw(i) for i in indices]
        return Value(llvm.getelementptr(mlir_type(found), raw(place), given, dynamic, mlir_type(element), 0), found)

    def _address(self, variable):
        body = self.lower.mlir_gpu_module.regions[0].blocks[0]
        names = [x.operation.attributes["sym_name"] for x in body if x.operation.name == "llvm.mlir.global"]
        if variable.name not in [mlir.StringAttr(name).value for name in names]:
            with mlir.InsertionPoint.at_block_begin(body):
                llvm.GlobalOp(
                    global_type=mlir_type(variable.value_type), sym_name=variable.name, alignment=variable.align,
                    linkage=mlir.Attribute.parse("#llvm.linkage<external>"), addr_space=variable.type.addrspace,
                )  # fmt: skip
        return Value(llvm.mlir_addressof(mlir_type(variable.type), variable.name), variable.type)

    def load(self, place, align=None):
        return Value(llvm.load(mlir_type(place.type.pointee), raw(place), alignment=align), place.type.pointee)

    def store(self, value, place, align=None):
        llvm.store(raw(value), raw(place), alignment=align)

    def asm(self, ftype, text, constraints, operands, effect):
        returned = ftype.return_type
        given = [raw(x) for x in operands]
        return Value(llvm.inline_asm(mlir_type(returned), given, text, constraints, has_side_effects=effect), returned)

    def call(self, function, operands):
        given, result = [raw(x) for x in operands], mlir_type(function.returned)
        results = [] if result is None else [result]
        ftype = mlir.FunctionType.get([x.type for x in given], results)
        get_or_insert_function(function.name, ftype, self.lower.mlir_gpu_module)
        return Value(func.call(result=results, callee=function.name, operands_=given), function.returned)

    def atomic_rmw(self, name, place, value, ordering):
        kinds = getattr(llvm.AtomicBinOp, name), getattr(llvm.AtomicOrdering, ordering)
        return Value(llvm.atomicrmw(kinds[0], raw(place), raw(value), kinds[1]), value.type)

    def cttz(self, x, poison):
        return Value(llvm.intr_cttz(raw(x), False), x.type)

    def fma(self, x, y, z):
        name = f"llvm.fma.f{64 if x.type == F64 else 32}"  # the operation is not translated, a function's name is
        return self.call(Function(None, llvmlite_ir.FunctionType(x.type, [x.type] * 3), name), [x, y, z])

    @contextmanager
    def if_then(self, condition):
        branch = scf.IfOp(raw(condition))
        with mlir.InsertionPoint(branch.then_block):
            yield
            scf.yield_([])


def computed_if(b, condition, values, compute):
    branch = scf.IfOp(raw(condition), [mlir_type(x.type) for x in values], has_else=True)
    for block, found in (branch.then_block, compute), (branch.else_block, lambda: values):
        with mlir.InsertionPoint(block):
            scf.yield_([raw(x) for x in found()])
    return [Value(result, x.type) for result, x in zip(branch.results, values)]


def loop(b, ks, registers, turn):
    def rows(values):
        values = iter(values)
        return [[Value(next(values), x.type) for x in row] for row in registers]

    start, stop, step = (raw(I32(x)) for x in (ks.start, ks.stop, ks.step))
    made = scf.ForOp(start, stop, step, [raw(x) for row in registers for x in row])
    with mlir.InsertionPoint(made.body):
        ends = turn(Value(made.induction_variable, I32), rows(made.inner_iter_args))
        scf.yield_([raw(x) for row in ends for x in row])
    return rows(made.results)


ir = SimpleNamespace(
    **{name: getattr(llvmlite_ir, name) for name in (
        "IntType", "FloatType", "DoubleType", "VoidType", "PointerType", "ArrayType", "LiteralStructType", "VectorType",
        "FunctionType", "Constant", "Undefined",
    )},
    IRBuilder=Builder, Function=Function, GlobalVariable=GlobalVariable,
)  # fmt: skip
