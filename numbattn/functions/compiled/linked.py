"""Functions that only compiled ones call are linked into these unoptimised: LLVM optimises a kernel once, as a whole.
Users' functions are optimised before.

By itself Numba optimises each function, generates its machine code, and does both again wherever it is inlined, which
took two thirds of a kernel's compile time.
"""

from numba import _dynfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering
from numba.extending import register_jitable


class Library(JITCodeLibrary):
    """The code of a function and its callees, for other libraries: it is not optimised and has no address."""

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True


class OptimisedLibrary(Library):
    """The same, optimised before: loops over what it is inlined into are vectorised."""

    _optimize_final_module = JITCodeLibrary._optimize_final_module

    @global_compiler_lock
    def get_llvm_str(self):
        self._ensure_finalized()  # Numba does not before it is linked
        return super().get_llvm_str()


@register_pass(mutates_CFG=True, analysis_only=False)
class Lowering(NativeLowering):
    """Numba's lowering, without anything that could be executed."""

    _name, library = "numbattn_lowers_to_be_linked", Library

    def run_pass(self, state):
        context = state.targetctx
        state.library, state.flags.no_compile = self.library(context.codegen(), state.func_id.func_qualname), True
        super().run_pass(state)
        about, env = state.cr.fndesc, state.cr.env
        # the object by which Numba finds the code of a call; Python never calls it
        function = _dynfunc.make_function(about.lookup_module(), about.qualname, "", 0, env, (state.library,))
        context.insert_user_function(function, about, [state.library])
        state.cr = state.cr._replace(cfunc=function)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class OptimisedLowering(Lowering):
    _name, library = "numbattn_lowers_to_be_linked_optimised", OptimisedLibrary


def linking(passes, lowering=Lowering):
    """Numba's passes for a function, with that lowering."""
    passes.passes = [(lowering if each is NativeLowering else each, why) for each, why in passes.passes]
    passes.finalize()
    return passes


class LinkedCompiler(CompilerBase):
    def define_pipelines(self):
        return [linking(DefaultPassBuilder.define_nopython_pipeline(self.state))]


NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
LINKED = {"pipeline_class": LinkedCompiler, **NO_WRAPPERS}
linked = register_jitable(**LINKED)
