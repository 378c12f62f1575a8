from importlib.util import find_spec

# what needs the packages of the extras cu12 and cu13 is collected where they are
CUDA = ["numbattn/cuda/*", "tests/cuda/*", "tests/tools/*"]
collect_ignore_glob = [] if find_spec("numba_cuda") and find_spec("cupy") else CUDA
