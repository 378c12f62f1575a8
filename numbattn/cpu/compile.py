"""Compile by Numba, and keep the result on disk."""

import hashlib
import pickle
import sys
from functools import cache

import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from .. import cache as disk


def kernel(function):
    """Compile a function when it is first called, to run without the GIL."""
    compiled = numba.njit(nogil=True, error_model="numpy")(function)
    compiled._cache = DiskCache(function.__name__)
    compile_now = compiled._compiler.compile

    def compile_or_say_so(*args):
        with disk.compiling("cpu"):
            return compile_now(*args)

    compiled._compiler.compile = compile_or_say_so  # what Numba calls where the cache has nothing
    return compiled


class DiskCache(NullCache):
    """Numba's own cache misses changes in other files than the function's, and fails on a damaged file."""

    def __init__(self, name):
        self.name = name

    def file(self, signature, codegen):
        """The name of the code compiled from these sources, by these versions, for this CPU."""
        parts = self.name, signature, codegen.magic_tuple(), numba.__version__, sys.version_info[:2], _sources()
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def load_overload(self, signature, target_context):
        target_context.refresh()
        content = disk.read("cpu", self.file(signature, target_context.codegen()))
        return content and CompileResult._rebuild(target_context, *pickle.loads(content))

    def save_overload(self, signature, result):
        disk.write("cpu", self.file(signature, result.codegen), dumps(result._reduce()))


@cache
def _sources():
    return disk.sources_digest("*.py", "cpu/*.py")
