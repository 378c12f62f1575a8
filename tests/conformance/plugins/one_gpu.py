"""A plugin of pytest for suites whose tests want a GPU: some of them at random, and on a CPU where there is no GPU."""

import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from numbattn.interop.torch.arrays import array_of

SEED = 20220524
HAS_GPU = torch.cuda.is_available()


class OnCpu(TorchFunctionMode):
    """Tensors that torch is to make on a GPU are made on the CPU."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if str(options.get("device", "")).startswith("cuda"):
            options = options | {"device": "cpu"}
        arguments = ["cpu" if isinstance(x, str) and x.startswith("cuda") else x for x in arguments]
        return function(*arguments, **options)


class GeneratorOnCpu(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


if not HAS_GPU:
    torch.Generator = GeneratorOnCpu
    torch.cuda.is_available = lambda: True
    torch.backends.cudnn.version = lambda: 0
    torch.cuda.get_device_name = lambda *_: "CPU"
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=0, multi_processor_count=0)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    OnCpu().__enter__()


def pytest_addoption(parser):
    parser.addoption("--sample", type=int, help="how many of the tests to run")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """The same sample each time, of what the suite's own plugin has kept."""
    count = config.getoption("sample")
    if count is not None and count < len(items):
        kept = set(random.Random(SEED).sample(range(len(items)), count))
        config.hook.pytest_deselected(items=[x for number, x in enumerate(items) if number not in kept])
        items[:] = [x for number, x in enumerate(items) if number in kept]


def module(name, **names):
    """Puts a module with these names in the place of one that is not there."""
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(names)


def arrays_in(value):
    """A mask or a part of a score with arrays in the place of tensors."""
    return None if value is None else value._mapped(lambda x: array_of(x.detach()) if torch.is_tensor(x) else x)
