"""What to say where a package is not installed that CUDA kernels need."""

EXTRAS = "pip install 'numbattn[cu13]', or 'numbattn[cu12]' for a driver of CUDA 12"


class Missing(RuntimeError, ImportError):
    """A package is not installed."""


def missing(what):
    return Missing(f"{what} not found. CUDA kernels need {EXTRAS}")
