import inspect
import re
from pathlib import Path

import pytest

import numbattn as na

from .tools.process import printed


def test_public_names():
    assert sorted(na.__all__) == [
        "Alibi", "Bias", "Bits", "BlockSparse", "Causal", "Dense", "Dropout", "First", "Gradients", "Grid",
        "Intervals", "KVCache", "Lengths", "Mask", "Prefix", "RelativeBias", "Rotary", "Saved", "SavedTangents",
        "Score", "SecondGradients", "Segments", "Sink", "Softcap", "Tail", "Where", "Window", "__version__",
        "attention", "attention_backward", "attention_backward_jvp", "attention_backward_vjp", "attention_forward",
        "attention_forward_jvp", "attention_jvp", "attention_laplacian", "attention_statistics",
        "attention_statistics_vjp", "attention_vjp", "attention_weights", "check_mask", "check_score", "dropout_mask",
        "merge", "merge_vjp", "pack", "rotary", "rotary_jvp", "rotary_vjp", "unpack",
    ]  # fmt: skip
    for name in dir(na):
        assert hasattr(na, name)


def test_help_begins_with_a_table_of_what_there_is():
    table = na.__doc__[: na.__doc__.index("``help")]
    for name in set(dir(na)) - {"__version__", "Mask", "Gradients", "SecondGradients", "SavedTangents"}:
        assert re.search(rf"\b{name}\b", table), name
    assert max(map(len, table.splitlines())) <= 120


def test_dir_shows_public_names_alone():
    assert dir(na) == sorted([*na.__all__, "cuda", "distributed", "graphs", "interop", "points", "reference", "sparse"])
    with pytest.raises(AttributeError, match="module 'numbattn' has no attribute 'attnetion'"):
        na.attnetion  # noqa: B018


def test_modules_are_imported_when_asked_for():
    code = "import numbattn as na; print(na.points.product.__name__, na.distributed.__name__)"
    assert printed(code) == ["product numbattn.distributed"]


def functions():
    """All that a user may call, by name."""
    for name in na.__all__:
        thing = getattr(na, name)
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing):
            for method, value in vars(thing).items():
                function = getattr(value, "__func__", value)
                if not method.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{method}", function


@pytest.mark.parametrize(("name", "function"), list(functions()))
def test_docstrings_are_whole(name, function):
    assert not re.search(r"\w -----", function.__doc__), "a heading and its line are one line"
    sections = re.findall(r"^ *(\w+)\n *-+$", function.__doc__, re.M)
    parameters = set(inspect.signature(function).parameters) - {"self", "cls"}
    wanted = ["Parameters", "Returns", "Raises", "Examples"] if parameters else ["Returns", "Examples"]
    assert [section for section in sections if section != "Notes"] == wanted
    if not parameters:
        return
    described = re.search(r"Parameters\n *-+\n(.*?)\n *Returns", function.__doc__, re.S)[1]
    names = re.findall(r"^ *(\w+(?:, \w+)*)(?: : .*)?$", described, re.M)
    assert parameters <= set(re.findall(r"\w+", " ".join(names)))


def test_titles_of_sections_have_lines_of_their_own():
    for path in Path(na.__file__).parent.rglob("*.py"):
        assert not re.search(r"^ *[A-Z][a-z]+ ---", path.read_text(), re.M), path


@pytest.mark.parametrize("name", ["Mask", "Causal", "Window", "Lengths", "First", "Segments", "Prefix", "Intervals",
                                  "Dense", "Bits", "BlockSparse", "Tail"])  # fmt: skip
def test_masks_show_nothing_internal(name):
    public = {attribute for attribute in dir(getattr(na, name)) if not attribute.startswith("_")}
    fields = {"left", "right", "offset", "keys", "queries", "lengths", "first", "end", "visible", "words", "blocks",
              "block_size", "mask", "max_queries", "n", "positions"}  # fmt: skip
    assert public - fields <= {"dense", "from_indices", "pack", "tree", "butterfly", "local_global", "strided"}


@pytest.mark.parametrize("name", ["Alibi", "Bias", "RelativeBias", "Score", "Sink", "Softcap"])
def test_scores_show_nothing_internal(name):
    public = {attribute for attribute in dir(getattr(na, name)) if not attribute.startswith("_")}
    arguments = {"arrays", "bias", "cap", "derivative", "function", "gradient", "logits", "offset", "second",
                 "slopes", "table"}  # fmt: skip
    assert public <= arguments


def test_import_is_light():
    """Compilers and GPU libraries come in with the first call that needs them."""
    heavy = "{'numba', 'cupy', 'llvmlite', 'scipy', 'mpi4py', 'numbattn.cpu'}"
    packages = "numbattn, numbattn.distributed, numbattn.graphs, numbattn.points, numbattn.sparse"
    assert printed(f"import sys, {packages}; print(*sorted({heavy} & set(sys.modules)))") == [""]
