"""A kernel's Key -> Python function -> PTX -> cubin, cached on disk. Needs no GPU, and for a cached cubin no compiler.

PTX is assembled by ptxas. Never link it with nvJitLink: that compiles relocatable code, which ignores setmaxnreg,
serialises wgmma and spills.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ..base import cache as disk
from ..base import sources
from ..base.compiling import check_setting, compiling
from ..base.interrupts import uninterrupted
from ..functions.frozen import Frozen
from .missing import missing

SCALARS = ("int32", "uint32", "int64", "uint64", "float32", "float64")


@dataclass(frozen=True)
class Key:
    """Which kernel: equal keys are the same kernel, in every process. Make one with `Key.of`."""

    factory: str  # "package.module:function", which returns the kernel's Source
    cc: tuple  # compute capability: (8, 0), (9, 0, "a")
    parameters: tuple = ()  # (name, value) pairs for the factory, sorted

    @classmethod
    def of(cls, factory, cc, **parameters):
        """The key of factory(**parameters), values being None, bool, int, float, str, Frozen, or tuples or dataclasses
        of them."""
        for name, value in parameters.items():
            check_plain(name, value)
        return cls(f"{factory.__module__}:{factory.__qualname__}", tuple(cc), tuple(sorted(parameters.items())))

    @property
    def name(self):
        """The name of the kernel in PTX, cubin and profiles."""
        return self.factory.partition(":")[2]

    def source(self):
        """Call the factory."""
        module, _, function = self.factory.partition(":")
        return getattr(import_module(module), function)(**dict(self.parameters))


@dataclass(frozen=True)
class GivenSource:
    """In place of a Key, for a Source that no factory could make again: a user's own kernel; or one whose arguments'
    types only a call knows."""

    given: Any
    cc: tuple
    made_by: tuple = ()  # what made its function, if that is known: "package.module:function", and plain values

    @property
    def name(self):
        return re.sub(r"\W", "_", self.given.function.__name__)

    @property
    def about(self):
        """What it is compiled from."""
        made = self.given
        sizes = made.threads, made.blocks, made.cluster, made.shared
        return self.made_by, str(made.signature), *sizes, tuple(map(tuple, made.tensor_maps)), made.overlaps

    def source(self):
        return self.given


class TensorMapArgument(NamedTuple):
    """An argument that is the address of a tensor map passed by value, uint64 in the signature."""

    argument: int  # its number
    box: tuple  # the extent of what is moved at once, along each axis of the array
    swizzle: int = 128  # 0, 32, 64 or 128 bytes
    l2_promotion: int = 256  # bytes that the L2 cache fetches at once; 0: of keys read once 4.5 TB/s, not 4.2 (H200)


@dataclass(frozen=True)
class Source:
    """A kernel in Python: what a factory returns."""

    function: Any
    signature: Any  # compiler.types.void(...) of arrays, SCALARS and tuples of them
    threads: int  # in a block
    blocks: int = 1  # that a multiprocessor should hold at least; without it ptxas ignores setmaxnreg
    shared: int = 0  # bytes of dynamic shared memory
    tensor_maps: tuple = ()  # of TensorMapArgument
    overlaps: bool = False  # from Hopper on it may start before the stream's previous kernel ends; it waits itself
    cluster: int = 1  # blocks of a cluster: see tile.cluster


@dataclass(frozen=True)
class Report:
    """What ``ptxas -v`` says about a kernel; sizes in bytes. Tests of kernels check spills, stack and losses."""

    registers: int  # of a thread
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int  # static
    messages: tuple = ()  # warnings, and notes with a code

    @classmethod
    def parse(cls, log):
        def numbers(pattern):
            return [int(number) for number in re.findall(pattern, log)]

        notes = [line for line in log.splitlines() if re.search(r"warning\s*:|\(C\d+\)", line)]
        return cls(
            registers=max(numbers(r"Used (\d+) registers"), default=0),
            stack=max(numbers(r"(\d+) bytes stack frame"), default=0),
            spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
            spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
            shared=max(numbers(r"(\d+) bytes smem"), default=0),
            messages=tuple(notes),
        )

    @property
    def spills(self):
        return self.spill_stores + self.spill_loads

    @property
    def losses(self):
        """The messages that say that wgmma was serialised (C7509 to C7516) or setmaxnreg ignored (C7504 to C7508).

        C7519, an injected warpgroup.arrive, is harmless.
        """
        return tuple(line for line in self.messages if "serialized" in line or "ignored" in line)


@dataclass(frozen=True)
class Binary:
    """An assembled kernel, and what a launch needs to know of its Source."""

    name: str
    arguments: tuple  # of each: (scalar,), ("tensor_map", box, swizzle, l2_promotion) or ("array", ndim, itemsize)
    threads: int
    shared: int
    overlaps: bool
    report: Report
    cubin: bytes = field(repr=False)


@uninterrupted
def build(key):
    """The Binary of a Key, from the disk, else compiled and stored there. That of a GivenSource is known by its PTX,
    unless it is known what made it."""
    ptx, what = None, f"{key.name} for {arch(key.cc)}"
    if isinstance(key, GivenSource) and not key.made_by:
        with compiling("cuda", f"{what} to PTX"):
            ptx = compile_ptx(key.given, key.cc, key.name)
    name = digest_of(key) if ptx is None else _digest_of_ptx(ptx, key.cc)
    binary = _unpack(disk.read("cuda", name))
    if binary is None:
        with compiling("cuda", what):
            source = key.source()
            cubin, report = assemble(ptx or compile_ptx(source, key.cc, key.name), key.cc)
        overlaps = source.overlaps and key.cc >= (9, 0)
        binary = Binary(key.name, _arguments(source), source.threads, source.shared, overlaps, report, cubin)
        disk.write("cuda", name, *_pack(binary))
    return binary


# ------------------------------------------------------------------------------------------------------------ compile
def compile_ptx(source, cc, name="kernel"):
    """The PTX of a Source for a compute capability, its entry called `name`. Does not need ptxas."""
    _packages()  # says what is missing before the compiler does, in words that help
    check_setting("ENABLE_CUDASIM")
    from .compiler import to_ptx

    ptx = to_ptx(source.function, source.signature, cc, source.threads, source.blocks)
    mangled = re.search(r"\.visible \.entry (\w+)\(", ptx)[1]
    if source.cluster > 1:
        ptx = ptx.replace(".maxntid", f".reqnctapercluster {source.cluster}, 1, 1\n.maxntid", 1)
    return _by_value(ptx.replace(mangled, name), name, _tensor_map_parameters(source))


def _arguments(source):
    """What a launch has to pack for each argument; tuples are passed as their elements."""
    from .compiler import as_dtype, types

    maps = {about.argument: about for about in source.tensor_maps}

    def argument(i, kind):
        if i in maps and kind == types.uint64:
            return "tensor_map", *maps[i][1:]
        if isinstance(kind, types.Array):
            return "array", kind.ndim, as_dtype(kind.dtype).itemsize
        name = "int32" if str(kind) == "index" else str(kind)        # tile.INDEX
        if i not in maps and name in SCALARS:
            return (name,)
        raise TypeError(f"{source.function.__name__}: got {kind} as argument {i}, allowed an array, "
                        f"{', '.join(SCALARS)}, uint64 for a tensor map, or tuples of them")

    def flat(kinds):
        for kind in kinds:
            if isinstance(kind, types.BaseTuple):
                yield from flat(kind)
            else:
                yield kind

    return tuple(argument(i, kind) for i, kind in enumerate(flat(source.signature.args)))


def _tensor_map_parameters(source):
    """The numbers of the PTX parameters that are tensor maps."""
    # Numba passes an array as two owners, size, item size, address, shape and strides
    counts = [5 + 2 * argument[1] if argument[0] == "array" else 1 for argument in _arguments(source)]
    return [sum(counts[: about.argument]) for about in source.tensor_maps]


def _by_value(ptx, name, parameters):
    """Turn pointer parameters into 128 bytes by value, as nvcc does for a __grid_constant__ tensor map."""
    for i in parameters:
        parameter = f"{name}_param_{i}"
        ptx, declared = re.subn(rf"\.param \.[ub]64 {parameter}\b", f".param .align 64 .b8 {parameter}[128]", ptx)
        ptx = re.sub(
            rf"ld\.param\.[ub]64\s+(%rd\d+), \[{parameter}\];",
            rf"{{ .reg .b64 %a; mov.b64 %a, {parameter}; cvta.param.u64 \1, %a; }}",
            ptx,
        )
        if declared != 1 or re.search(rf"\[{parameter}[\]+]", ptx):
            raise RuntimeError(f"{parameter}: the PTX reads this tensor map in an unknown way")
    return ptx


# ----------------------------------------------------------------------------------------------------------- assemble
def assemble(ptx, cc):
    """The cubin and the Report of PTX."""
    code, log = _run_ptxas(ptx, cc)
    newest = re.search(r"Unsupported \.version .*current version is '(\d+\.\d+)'", log)
    if newest:  # libnvvm is newer than ptxas. What Numba writes needs no new PTX
        code, log = _run_ptxas(re.sub(r"\.version \d+\.\d+", f".version {newest[1]}", ptx, count=1), cc)
    if code is None:
        raise RuntimeError(f"ptxas cannot assemble for {arch(cc)}:\n{log[:2000]}")
    return code, Report.parse(log)


def arch(cc):
    """The name of a compute capability: sm_80, sm_90a."""
    return "sm_" + "".join(map(str, cc))


def _run_ptxas(ptx, cc):
    """The cubin, or None, and what ptxas says."""
    with TemporaryDirectory(prefix="numbattn-") as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [_ptxas(), f"-arch={arch(cc)}", "-v", source, "-o", target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return None if done.returncode else target.read_bytes(), done.stdout + done.stderr


@cache
def _ptxas():
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError as error:
        raise missing("cuda-pathfinder") from error
    path = find_nvidia_binary_utility("ptxas") or shutil.which("ptxas")
    if path is None:
        raise missing("ptxas")
    return path


# -------------------------------------------------------------------------------------------------------------- cache
def digest_of(key):
    """A digest of a Key, or of a GivenSource made by a factory, its kernel's sources, and the versions of everything
    that compiles them."""
    known, factory = (key, key.factory) if isinstance(key, Key) else ((*key.about, key.cc), key.made_by[0])
    module = factory.partition(":")[0]
    parts = repr(known), _versions(), _package_sources(), _module_source(module)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _digest_of_ptx(ptx, cc):
    """A digest of PTX without what Numba numbers differently in each process and no instruction refers to."""
    text = "\n".join(line for line in ptx.splitlines() if "NumbaEnv" not in line and not line.startswith("//"))
    return hashlib.sha256(repr((text, cc, _versions())).encode()).hexdigest()


@cache
def _packages():
    """The versions of the packages that make PTX."""
    try:
        versions = [metadata.version(name) for name in ("numba", "numba-cuda", "llvmlite")]
    except metadata.PackageNotFoundError as error:
        raise missing(error.name) from error
    for nvvm in ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"):  # the wheels that bring libnvvm, if it comes from wheels
        with suppress(metadata.PackageNotFoundError):
            versions.append(metadata.version(nvvm))
    return *versions, sys.version_info[:2]


@cache
def _versions():
    """The versions of everything that makes a cubin."""
    return *_packages(), subprocess.run([_ptxas(), "--version"], capture_output=True, text=True, check=True).stdout


def _package_sources():
    """A digest of all files that our kernels may be made from, including numbattn's version."""
    return sources.digest("cuda")


def _module_source(module):
    """A digest of a factory's file, for factories of other packages. Does not import it."""
    if module.startswith(__package__ + "."):
        return None
    return hashlib.sha256(Path(find_spec(module).origin).read_bytes()).hexdigest()


def check_plain(name, value):
    """Refuse values that repr does not tell apart in the same way in every process."""
    if is_dataclass(value):
        value = tuple([getattr(value, each.name) for each in fields(value) if each.compare])
    if isinstance(value, tuple):
        for item in value:
            check_plain(name, item)
    elif type(value) not in (type(None), bool, int, float, str, Frozen):
        raise TypeError(f"{name}: got {value!r}, allowed None, bool, int, float, str, Frozen, and tuples and "
                        "dataclasses of them")


def _pack(binary):
    """A Binary as what JSON can say, and a cubin."""
    fields = asdict(binary)
    return fields, fields.pop("cubin")


def _unpack(kept):
    """The Binary that was packed; None of None."""
    if kept is None:
        return None
    fields = {**kept.header, "arguments": _tuples(kept.header["arguments"])}
    report = fields.pop("report")
    return Binary(**fields, report=Report(**report | {"messages": tuple(report["messages"])}), cubin=kept.code)


def _tuples(x):
    """Lists, which JSON makes of tuples, as tuples again."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
