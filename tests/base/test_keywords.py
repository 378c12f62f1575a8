"""Options of other libraries are named with what they are here, and signatures stay as they are."""

import inspect
from importlib import import_module

import pytest

import numbattn as na
from numbattn.base.keywords import ELSEWHERE

FUNCTIONS = (na.attention, na.attention_forward, na.attention_vjp, na.attention_weights, na.attention_jvp,
             na.attention_forward_jvp, na.attention_laplacian)  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_options_of_others(name):
    for function in FUNCTIONS:
        with pytest.raises(TypeError) as raised:
            function(None, None, None, **{name: 1})
        assert str(raised.value) == f"{function.__name__}: got {name}, expected {ELSEWHERE[name]}"


@pytest.mark.parametrize("library", ["autograd", "jax", "torch"])
def test_options_of_others_in_other_libraries(library):
    pytest.importorskip(library)
    attention = import_module(f"numbattn.interop.{library}").attention
    with pytest.raises(TypeError, match=r"^attention: got is_causal, expected causal=True"):
        attention(None, None, None, is_causal=True)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures_name_all_that_is_taken(function):
    kinds = {x.kind for x in inspect.signature(function).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        function(None, None, None, casual=True)


FAULTS = {"from None\n            raise": "from None"}
