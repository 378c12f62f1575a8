import io
import logging
import sys
import time

import numba
import pytest

import numbattn as na
from numbattn.base import compiling
from numbattn.functions.compiled.derivative import differentiated
from tests.tools.process import printed


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "prompt", "seconds", "said"),
    [(Terminal, False, 0.5, 1), (Terminal, False, 0.0, 0), (io.StringIO, False, 0.5, 0), (io.StringIO, True, 0.5, 1)],
)
def test_it_says_that_it_compiles(tmp_path, monkeypatch, caplog, stream, prompt, seconds, said):
    """On a terminal and in a notebook, which has a prompt, else in the log; once, and only what takes long."""
    if prompt:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "PATIENCE", 0.1)
    monkeypatch.setattr(compiling, "_told", [])
    monkeypatch.setattr(sys, "stderr", stream())
    for _ in range(2):
        with compiling.compiling("cpu", "a kernel"):
            time.sleep(seconds)
    place = f"keeps the result in {tmp_path / 'numbattn' / 'cpu'}"
    assert sys.stderr.getvalue().count(f"{place}\n") == len(sys.stderr.getvalue().splitlines()) == said
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.endswith(place) for message in warned] == [True] * (seconds > 0 and not said)


def test_what_is_compiled_is_logged(caplog):
    with caplog.at_level(logging.INFO, "numbattn"), compiling.compiling("cpu", "a kernel for the CPU"):
        time.sleep(0.06)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("numbattn", "INFO")
    assert record.getMessage() == "compiled a kernel for the CPU in 0.1 s"


def test_what_fails_to_compile_is_not_logged(caplog):
    with caplog.at_level(logging.INFO, "numbattn"), pytest.raises(ValueError, match="no"):  # noqa: SIM117
        with compiling.compiling("cpu", "a kernel"):
            raise ValueError("no")
    assert not caplog.records


CALL = """
import numba, numpy as np, numbattn as na
x = np.ones((40, 8), np.float32)
for score in None, na.Score(lambda s, batch, head, i, j: s / 2):
    for call in na.attention, lambda q, k, v, score: na.attention_weights(q, k, score=score):
        try:
            call(x, x, x, score=score)
        except ImportError as error:
            print(error)
numba.config.DISABLE_JIT = 0
from numbattn.cpu import product
print(hasattr(product, "product"))
"""


def test_numba_told_to_compile_nothing_is_named():
    """Whatever is called first; nothing is left half imported."""
    *said, result = printed(CALL, NUMBA_DISABLE_JIT="1")
    assert (len(said), result) == (4, "True")
    assert all(line.startswith("NUMBA_DISABLE_JIT is set") for line in said)


def test_functions_of_scores_are_not_called_uncompiled(monkeypatch):
    """Kernels for a GPU need nothing else that is compiled for CPUs."""
    score = na.Score(lambda s, batch, head, i, j: s / 3)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ImportError, match="NUMBA_DISABLE_JIT is set"):
        differentiated(score._identity, 1)


def test_the_handlers_are_the_users():
    assert [type(handler) for handler in compiling.LOGGER.handlers] == [logging.NullHandler]


FAULTS = {
    "    if not _told:": "    if True:",
    "if sys.stderr and (sys.stderr.isatty() or hasattr(sys, \"ps1\")):": "if sys.stderr:",
    " or hasattr(sys, \"ps1\")": "",
    "        timer.cancel()\n": "        pass\n",
    "    if getattr(numba.config, name, False):": "    if False:",
    "    finally:\n        timer": "    except ValueError:\n        timer",
}
