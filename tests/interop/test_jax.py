"""The tests of the files in_jax*.py and the examples of numbattn.interop.jax, in a process of their own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not find_spec("jax"), reason="jax is not installed")


def in_a_process(*arguments, **environment):
    """Since JAX changes a process for good: every later fork warns."""
    command = sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *arguments
    environment = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


IN_TURN = (
    ("tests/interop/in_jax.py",),
    ("tests/interop/in_jax_vmap.py", "tests/interop/in_jax_laplacian.py", "numbattn/interop/jax/__init__.py"),
    ("tests/interop/in_jax_graphs.py", "tests/interop/in_jax_points.py"),
)
FAST_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


@pytest.mark.parametrize("files", IN_TURN, ids=" ".join)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_cpus(files, which):
    in_a_process(*files, "-m", which, JAX_PLATFORMS="cpu", XLA_FLAGS=f"{FAST_TO_COMPILE} {TWO_DEVICES}")


@pytest.mark.gpu
def test_on_gpus():
    files = "tests/interop/in_jax.py", "tests/interop/in_jax_graphs.py", "tests/interop/in_jax_points.py"
    in_a_process(*files, "-m", "gpu", JAX_PLATFORMS="", XLA_PYTHON_CLIENT_PREALLOCATE="false")


FAULTS = {
    "interop/in_jax_points.py::test_lengths_and_factors_of_a_batch": {
        "interop/points.py": {"kind.name: b.shape[:-2]}, **of_kernel)": "kind.name: b.shape[:-2]})"},
    },
    "interop/in_jax_points.py::test_several_tangents_and_batches[sinkhorn]": {
        "interop/points.py": {"found = map(np.add, found, self.call.backprop(tdo[..., 0, 0]))": "pass"},
    },
    "interop/in_jax.py::test_gradients_in_and_of_a_shard_map": {
        "interop/jax/operands.py": {"*varying_alike(operands)": "*operands", "if not varies_over(aval):": "if True:"},
    },
    "interop/in_jax.py::test_many_callbacks_at_once": {
        "interop/jax/derivatives.py": {"return results[wanted], _zeros": "return results, _zeros"},
    },
    "interop/in_jax.py::test_gradients_that_are_not_wanted_are_zero": {
        "interop/jax/derivatives.py": {"of_score.append(t if wanted else None)": "of_score.append(t)"},
    },
    "interop/in_jax.py::test_what_is_not_asked_for_costs_nothing": {
        "interop/jax/derivatives.py": {"if wanted == options.wanted:": "if True:"},
        "interop/jax/__init__.py": {"with_lse=flag(\"return_lse\", return_lse)": "with_lse=True"},
    },
    "interop/in_jax.py::test_squares_of_both_results": {
        "interop/jax/derivatives.py": {
            "tangents=t, tdo=tdo": "tangents=t, tdo=None",
            "tdo=tdo, tdlse=tdlse)\n    *found": "tdo=tdo, tdlse=None)\n    *found",
            "tangents=along, tdo=to": "tangents=along, tdo=None",
        },
    },
    "interop/in_jax_laplacian.py::test_folx_takes_attention[samples]": {
        "interop/jax/folx.py": {"0, how.loops)": "0, 0)", "jnp.moveaxis(jo, how.loops, 0)": "jo"},
    },
    "interop/in_jax_laplacian.py::test_folx_takes_attention[sparse, with options]": {
        "interop/jax/folx.py": {
            "(0, count - len(x))": "(count - len(x), 0)",
            " or any(part._is_nonlinear for part in options.score)": "",
        },
    },
    "interop/in_jax_laplacian.py::test_folx_takes_attention[sparse, of others]": {
        "interop/jax/folx.py": {".at[places]": ".at[: len(jo)]"},
    },
    "interop/in_jax_laplacian.py::test_folx_takes_attention[sparse, of sums]": {
        "interop/jax/folx.py": {
            "not np.array_equal(*rows[-2:])": "False",
            " or np.unique(coordinates).size < coordinates.size": "",
        },
    },
    "interop/in_jax_laplacian.py::test_first_layers_are_of_particles[sparse, of others-particles1]": {
        "interop/jax/folx.py": {"k is None and v is None": "k is None or v is None"},
    },
    "interop/in_jax_laplacian.py::test_of_particles": {
        "interop/jax/passes.py": {", **_particle(how), **": ", **"},
    },
    "interop/in_jax_laplacian.py::test_folx_takes_attention[graph]": {
        "interop/graphs.py": {' | {f"l{name}": x for name, x in second.items()}': ""},
    },
    "interop/in_jax_laplacian.py::test_folx_takes_attention[bias]": {
        "interop/jax/passes.py": {"lscore=lscore": "lscore=()"},
    },
    "interop/in_jax_laplacian.py::test_walkers_are_as_alone": {
        "interop/jax/passes.py": {"return [0, 1, 0] if": "return [1, 1, 1] if"},
    },
    "interop/in_jax_laplacian.py::test_the_transpose_by_values": {
        "interop/jax/derivatives.py": {"operands)) > 1": "operands)) > 2"},
    },
    "interop/in_jax_vmap.py::test_samples_with_masks_of_their_own[mask-lengths]": {
        "interop/jax/vmap.py": {"whole[0] |= not any(whole[:3])": "pass"},
    },
    "interop/in_jax_vmap.py::test_samples_drop_what_they_drop_alone": {
        "interop/jax/vmap.py": {"if how.loops or x.seed is not None or any(": "if how.loops or any("},
    },
    "interop/in_jax_vmap.py::test_samples_are_as_alone[few heads, last axes]": {
        "interop/jax/vmap.py": {"if compute in (backward, hessian):": "if compute is hessian:"},
    },
    "interop/in_jax.py::test_several_devices": {
        "interop/jax/primitives.py": {"with jax.default_device(device):": "with jax.default_device(None):"},
    },
    "interop/in_jax.py::test_no_number_compiles_anything_again": {
        "interop/jax/passes.py": {", int(x.offset))": ", 0)"},
    },
    "interop/in_jax.py::test_masks_scores_and_gradients_are_pytrees": {
        "interop/jax/pytrees.py": {"isinstance(x, Mask) or ": ""},
    },
}
