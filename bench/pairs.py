"""Sums over pairs of points: numbattn, KeOps, flash-sinkhorn, flash-kmeans, losses fused with their products, and the
formulas in blocks, as runs.

A maker takes NumPy's or CuPy's arrays and returns a run, a function without arguments. A product is sum_j K(x_i, y_j)
b_j of a Gaussian K, Sinkhorn's are the potentials f and g after so many iterations, each an update of f, then of g, by
a logsumexp over all pairs; nearest are the indices of the k nearest y of each x; a step, of k-means, is the index of
the nearest y of each x and the means of the x of each y; a solve is (K + ridge)^-1 b of Matern's kernel; a loss is the
cross-entropy of x and classes y, with the gradients of its mean by both.
"""

import math
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import numpy as np
from peers import cupy, tensor_of, torch

from numbattn import points

OURS, FORMULA, TORCH, KEOPS, CG = "numbattn", "standard", "torch", "keops", "cg"
FLASH_SINKHORN, TF32, FLASH_KMEANS = "flash-sinkhorn", "flash-sinkhorn, TF32", "flash-kmeans"
PRODUCTS, LIGER = "products alone", "liger-kernel"
CUT, UNFILTERED = "cut-cross-entropy", "cut-cross-entropy, unfiltered"
PEERS = OURS, FORMULA, TORCH, KEOPS, CG, FLASH_SINKHORN, TF32, FLASH_KMEANS, PRODUCTS, CUT, UNFILTERED, LIGER
MODULES = {KEOPS: "pykeops", FLASH_SINKHORN: "flash_sinkhorn", TF32: "flash_sinkhorn", FLASH_KMEANS: "flash_kmeans",
           CUT: "cut_cross_entropy", UNFILTERED: "cut_cross_entropy", LIGER: "liger_kernel"}  # fmt: skip
PACKAGES = "pykeops", "flash-sinkhorn", "flash-kmeans", "triton", "cut-cross-entropy", "liger-kernel"
PAIRS = {"numpy": 1 << 22, "cupy": 1 << 27}  # of a block
PATIENCE = 20  # seconds for conjugate gradients
MOST_PAIRS = 10**11  # that a formula is timed with: more take it a minute


# ------------------------------------------------------------------------------------------------------------ numbattn
def our_product(x, y, b, length):
    return partial(points.product, x, y, b, points.Gaussian(length))


def our_sinkhorn(x, y, epsilon, iterations):
    cost = points.Cost(2, epsilon)
    updates = [lambda w, x=x, y=y: points.logsumexp(x, y, w, cost) for x, y in ((x, y), (y, x))]
    return partial(alternating, *updates, zeros(y), epsilon, iterations)


def our_nearest(x, y, k):
    return lambda: points.nearest(x, y, k)[1]


def our_step(x, y):
    return lambda: points.kmeans_step(x, y)[:2]


def our_solve(x, b, length, ridge, tol):
    return lambda: points.solve(x, b, points.Matern(2.5, length), ridge=ridge, tol=tol).x


def our_loss(x, y, targets):
    def run():
        f, backprop = points.cross_entropy_vjp(x, y, targets, points.Linear())
        return f.mean(), *backprop(np.full_like(f, 1 / len(f)))[:2]

    return run


def alternating(update_f, update_g, g, epsilon, iterations):
    """f and g of uniform weights; an update is log sum_j exp(w_j - C_ij / epsilon), and likewise."""
    for _ in range(iterations):
        f = -epsilon * update_f(g / epsilon - math.log(len(g)))
        g = -epsilon * update_g(f / epsilon - math.log(len(f)))
    return f, g


def zeros(x):
    return np.zeros(len(x), np.promote_types(x.dtype, np.float32), like=x)


# ------------------------------------------------------------------------------------------------- formulas, in blocks
# As one writes them in NumPy, in CuPy, whose arrays NumPy's functions take, or in torch.
def formula_product(x, y, b, length):
    f = functions_of(x)

    def run():
        return f.concatenate([f.exp(squares / (-2 * length**2)) @ b for squares in squared_distances(x, y)])

    return run


def formula_sinkhorn(x, y, epsilon, iterations):
    f, x, y = functions_of(x), in_single(x), in_single(y)

    def update(x, y, w):
        return f.concatenate([logsumexp(f, w - squares / (2 * epsilon)) for squares in squared_distances(x, y)])

    g = f.zeros_like(y[:, 0])
    return partial(alternating, partial(update, x, y), partial(update, y, x), g, epsilon, iterations)


def formula_nearest(x, y, k):
    f = functions_of(x)

    def smallest(squares):
        if k == 1:
            return squares.argmin(-1)[:, None]
        if f is torch:
            return torch.topk(squares, k, largest=False)[1]
        return np.argpartition(squares, k, -1)[:, :k].copy()  # a view would keep all

    return lambda: f.concatenate([smallest(squares) for squares in squared_distances(x, y)])


def torch_step(x, y):
    nearest = formula_nearest(x, y, 1)

    def run():
        labels = nearest()[:, 0]
        sums = torch.zeros_like(y, dtype=torch.float32).index_add_(0, labels, in_single(x))
        counts = labels.bincount(minlength=len(y))[:, None]
        return labels, torch.where(counts > 0, sums / counts.clamp(min=1), y).to(y.dtype)

    return run


def formula_solve(x, b, length, ridge, tol):
    """SciPy's Cholesky factor of the whole matrix, CuPy's LU."""

    def run():
        K = np.concatenate([matern(np.sqrt(np.maximum(squares, 0)) / length) for squares in squared_distances(x, x)])
        K.reshape(-1)[:: len(x) + 1] += ridge
        if is_on_cpu(x):
            return import_module("scipy.linalg").solve(K, b, assume_a="pos", overwrite_a=True, check_finite=False)
        return np.linalg.solve(K, b)

    return run


def matern(r):
    s = math.sqrt(5) * r
    return (1 + s + s * s / 3) * np.exp(-s)


def functions_of(x):
    return np if library_of(x) in ("numpy", "cupy") else torch


def library_of(x):
    return type(x).__module__.partition(".")[0]


def squared_distances(x, y):
    """|x|^2 + |y|^2 - 2 x y, some rows at a time."""
    if len(x) * len(y) > MOST_PAIRS:
        raise TimeoutError(f"more than {MOST_PAIRS:.0e} pairs")
    norms = (y * y).sum(-1)
    rows = max(1, PAIRS["numpy" if is_on_cpu(x) else "cupy"] // len(y))
    for at in range(0, len(x), rows):
        part = x[at : at + rows]
        yield (part * part).sum(-1)[:, None] + norms - 2 * part @ y.T


def is_on_cpu(x):
    return isinstance(x, np.ndarray) or (library_of(x) == "torch" and x.device.type == "cpu")


def logsumexp(f, z):
    highest = f.amax(z, -1)
    return f.log(f.exp(z - highest[:, None]).sum(-1)) + highest


def in_single(x):
    """Points in half precision as float32."""
    if library_of(x) == "torch":
        return x.float() if x.element_size() == 2 else x
    return x.astype(np.promote_types(x.dtype, np.float32), copy=False)


def in_torch(formula, *arguments):
    """A formula on torch's tensors."""
    return formula(*(tensor_of(x) if hasattr(x, "dtype") else x for x in arguments))


# --------------------------------------------------------------------------------------------------------------- KeOps
# On a GPU of torch's tensors: NumPy's arrays it would copy there and back.
def keops_product(x, y, b, length):
    keops, (x, y, b) = keops_of(x, y, b)
    kernel = (-keops_squares(keops, x, y) / (2 * length**2)).exp()
    return (kernel * keops.Vj(b)).sum(axis=1, call=False)


def keops_sinkhorn(x, y, epsilon, iterations):
    keops, (x, y) = keops_of(in_single(x), in_single(y))

    def update(x, y, w):
        wait_before_keops(w)
        logs = keops.Vj(w[:, None]) - keops_squares(keops, x, y) / (2 * epsilon)
        return logs.logsumexp(axis=1)[:, 0]

    g = functions_of(x).zeros_like(y[:, 0])
    return partial(alternating, partial(update, x, y), partial(update, y, x), g, epsilon, iterations)


def keops_nearest(x, y, k):
    keops, (x, y) = keops_of(x, y)
    return lambda: keops_squares(keops, x, y).argKmin(k, axis=1)


def keops_of(*arrays):
    """KeOps for a library, and its arrays."""
    if isinstance(arrays[0], np.ndarray):
        return import_module("pykeops.numpy"), arrays
    wait_before_keops(arrays[0])
    return import_module("pykeops.torch"), [*map(tensor_of, arrays)]


def wait_before_keops(x):
    """On a GPU KeOps waits for the default stream alone."""
    if not is_on_cpu(x):
        cupy.cuda.get_current_stream().synchronize()


def keops_squares(keops, x, y):
    return ((keops.Vi(x) - keops.Vj(y)) ** 2).sum(-1)


# --------------------------------------------------------------------------------------------------------------- others
def flash_sinkhorn(x, y, epsilon, iterations, allow_tf32=False):
    """Its points are float32, whatever they were."""
    from flash_sinkhorn.sinkhorn_solvers import sinkhorn_flashstyle_alternating

    x, y = map(tensor_of, (x, y))
    weights = [torch.full((len(points),), 1 / len(points), device=points.device) for points in (x, y)]
    options = {"eps": epsilon, "n_iters": iterations, "cost_scale": 0.5, "allow_tf32": allow_tf32}
    return partial(sinkhorn_flashstyle_alternating, x, y, *weights, **options)


def conjugate_gradients(x, b, length, ridge, tol):
    """SciPy's or CuPy's, of one right side at a time, with numbattn's products."""
    linalg = import_module("scipy.sparse.linalg" if is_on_cpu(x) else "cupyx.scipy.sparse.linalg")
    A = points.operator(x, x, points.Matern(2.5, length), ridge=ridge)

    def run():
        start = time.perf_counter()

        def hurry(_):
            if time.perf_counter() - start > PATIENCE:
                raise TimeoutError(f"more than {PATIENCE} s")

        options = {"rtol": tol, "maxiter": 10**5, "callback": hurry}
        return np.stack([linalg.cg(A, column, **options)[0] for column in b.T], axis=1)

    return run


def flash_kmeans(x, y, k):
    from flash_kmeans.assign_euclid_triton import euclid_assign_triton

    x, y = (tensor_of(points)[None] for points in (x, y))
    norms = (x.float() ** 2).sum(-1)  # once for all iterations of k-means
    return lambda: euclid_assign_triton(x, y, norms)[0][:, None]


def flash_kmeans_step(x, y):
    from flash_kmeans import triton_centroid_update_sorted_euclid

    nearest, x, y = flash_kmeans(x, y, 1), *(tensor_of(points)[None] for points in (x, y))

    def run():
        labels = nearest()[:, 0]
        return labels, triton_centroid_update_sorted_euclid(x, labels[None], y)[0]

    return run


# -------------------------------------------------------------------------------------------------------------- losses
# Of torch's tensors, but for numbattn's: the mean, and gradients by x and y.
def torch_loss(x, y, targets, rows=1024):
    """Some rows at a time."""
    x, y, targets = map(tensor_of, (x, y, targets))

    def loss_of(x, y):
        total = 0
        for at in range(0, len(x), rows):
            S, own = x[at : at + rows] @ y.T, targets[at : at + rows]
            part = torch.nn.functional.cross_entropy(S.float(), own, reduction="sum") / len(x)
            part.backward()
            total += part.detach()
        return total

    return differentiated(loss_of, x, y, is_done=True)


def cut_loss(x, y, targets, **options):
    """Unless told otherwise, it leaves out blocks whose softmax is nearly 0 from gradients."""
    from cut_cross_entropy import linear_cross_entropy

    x, y, targets = map(tensor_of, (x, y, targets))
    return differentiated(lambda x, y: linear_cross_entropy(x, y, targets, **options), x, y)


def liger_loss(x, y, targets):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    (x, y, targets), loss = map(tensor_of, (x, y, targets)), LigerFusedLinearCrossEntropyLoss()
    return differentiated(lambda x, y: loss(y, x, targets), x, y)


def differentiated(loss_of, x, y, is_done=False):
    """is_done: whether loss_of has computed the gradients."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()

    def run():
        loss = loss_of(x, y)
        if not is_done:
            loss.backward()
        gradients, x.grad, y.grad = (x.grad, y.grad), None, None
        return loss.detach(), *gradients

    return run


def products_of_loss(x, y, targets):
    """The four products of a loss that stores no scores, whose results are none."""
    x, y = map(tensor_of, (x, y))

    def run():
        S = x @ y.T
        torch.matmul(x, y.T, out=S)
        return S[0, 0], S @ y, S.T @ x

    return run


MAKERS = {
    "product": {OURS: our_product, FORMULA: formula_product, KEOPS: keops_product},
    "sinkhorn": {OURS: our_sinkhorn, FORMULA: formula_sinkhorn, KEOPS: keops_sinkhorn, FLASH_SINKHORN: flash_sinkhorn,
                 TF32: partial(flash_sinkhorn, allow_tf32=True)},
    "nearest": {OURS: our_nearest, FORMULA: formula_nearest, KEOPS: keops_nearest, FLASH_KMEANS: flash_kmeans},
    "step": {OURS: our_step, TORCH: partial(in_torch, torch_step), FLASH_KMEANS: flash_kmeans_step},
    "solve": {OURS: our_solve, FORMULA: formula_solve, CG: conjugate_gradients},
    "loss": {OURS: our_loss, TORCH: torch_loss, PRODUCTS: products_of_loss, CUT: cut_loss,
             UNFILTERED: partial(cut_loss, filter_eps=None), LIGER: liger_loss},
}  # fmt: skip
for _of, _makers in MAKERS.items():
    if TORCH not in _makers and _of != "solve":
        _makers[TORCH] = partial(in_torch, _makers[FORMULA])


def available(of, dtype, on_cpu, peers=PEERS):
    """The peers that this machine has and that take the dtype."""
    here = {OURS: True, FORMULA: True, CG: True, TORCH: torch is not None, PRODUCTS: torch is not None}
    for name, module in MODULES.items():
        here[name] = find_spec(module) is not None and (torch is not None if not on_cpu else name == KEOPS)
    half = dtype in ("float16", "bfloat16")
    here[KEOPS] &= of == "sinkhorn" or not half
    here[FLASH_KMEANS] &= half
    return [name for name in peers if name in MAKERS[of] and here[name]]
