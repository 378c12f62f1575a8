"""Tangents of attention and of its gradients, for forward mode, Hessian-vector products, gradients of gradients and
Laplacians. The equations are derived in reference.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .base.checks import A, Array, Integers, flag, words_for
from .base.gradients import Gradients, SecondGradients
from .base.keywords import knows_others
from .call import passes
from .call.particles import checked_particles
from .call.problem import Saved, checked_gradients, describe, refuse_cache
from .call.tangents import SavedTangents, checked_tangents, checked_tangents_of_gradients, weights_of
from .dropout import Dropout
from .masks import Mask
from .scores import Scores


@knows_others
def attention_jvp(
    q: A,
    k: A,
    v: A,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    *,
    tscore: Sequence[Array | None] = (),
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
) -> tuple[A, A]:
    """`attention` and its tangent, in one pass: forward-mode differentiation, a Jacobian-vector product.

    Parameters
    ----------
    q, k, v, causal, mask, scale, dropout, score
        As in `attention`, but k is not a cache.
    tq, tk, tv : arrays or None
        The tangents of q, k and v: of the shape and dtype of each; None is zero. For several tangents at once, all that
        are given have one more axis in front; on CPUs S and P are computed once for four of them.
    tscore : list or tuple, optional
        The tangents of the arrays in score, likewise: one for each gradient in ``grads.score``, in its order, None
        where it is zero. Default: all are zero. Where the array is -inf, its tangent is finite and changes nothing.
        Arrays of a `Score` may have one if their gradients are wanted.

    Returns
    -------
    o : array, (..., seqlen_q, head_dim_v), of the dtype of q
    to : array, likewise
        The tangent of o; for several tangents with their axis in front. 0 where a query sees nothing.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.
    NotImplementedError
        For a tangent of an array of a `Score` whose gradient is not wanted.

    Notes
    -----
    With S = scale Q K^T, P = softmax(S), and Z the dropout mask times its scale,

        tS = scale (tQ K^T + Q tK^T),  tlse = rowsum(P tS),  tO = (Z P) tV + (Z P tS) V - tlse O,

    six products of matrices, in memory linear in the sequence length. A part S = f(S0) of a score multiplies tS by
    f'(S0); its array A adds (df / dA) tA. On a GPU P tS is rounded to the dtype of q before it is multiplied, as P is:
    in float16 it must not exceed 65504. Dropout does not touch tlse, the tangent of lse.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v, tq, tk, tv = np.random.default_rng(0).standard_normal((6, 8, 100, 64))
    >>> o, to = na.attention_jvp(q, k, v, tq, tk, tv, causal=True)
    >>> h = 1e-5
    >>> ahead, behind = (na.attention(q + x * tq, k + x * tk, v + x * tv, causal=True) for x in (h, -h))
    >>> np.allclose(to, (ahead - behind) / (2 * h), atol=1e-6)
    True
    """
    options: Any = {"causal": causal, "mask": mask, "scale": scale, "dropout": dropout, "score": score}
    o, to, _, _ = attention_forward_jvp(q, k, v, tq, tk, tv, tscore=tscore, **options)
    return o, to


@knows_others
def attention_forward_jvp(
    q: A,
    k: A,
    v: A,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    *,
    tscore: Sequence[Array | None] = (),
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
) -> tuple[A, A, Saved[A], SavedTangents[A]]:
    """`attention_jvp`, and what `attention_backward_jvp` needs.

    Parameters
    ----------
    q, k, v, tq, tk, tv, tscore, causal, mask, scale, dropout, score
        As in `attention_jvp`.

    Returns
    -------
    o, to : arrays, (..., seqlen_q, head_dim_v)
        As from `attention_jvp`.
    saved : Saved
        As from `attention_forward`.
    tsaved : SavedTangents
        ``tsaved.tlse`` is the tangent of ``saved.lse``. Both refer to the arrays that the call was given and returned:
        editing these in place before the backward pass changes its results.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in `attention_jvp`.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v, tk = np.random.default_rng(0).standard_normal((4, 100, 64))
    >>> o, to, saved, tsaved = na.attention_forward_jvp(q, k, v, None, tk, None)
    >>> to.shape, tsaved.tlse.shape
    ((100, 64), (100,))
    """
    refuse_cache(k, "tangents")
    problem, inputs = describe(q, k, v, causal, mask, scale, dropout, score, may_wait=True)
    tangents, several = checked_tangents(inputs, tq, tk, tv, tscore)
    saved, to, tlse = passes.tangent(problem, inputs, tangents)
    if not several:
        to, tlse = to[0], tlse[0]
    return saved.o, to, saved, SavedTangents(problem, tangents, to, tlse, several)


def attention_backward_jvp(
    do: Array,
    saved: Saved[A],
    tsaved: SavedTangents[A],
    *,
    tdo: Array | None = None,
    dlse: Array | None = None,
    tdlse: Array | None = None,
    deterministic: bool = False,
) -> tuple[Gradients[A], Gradients[A]]:
    """The gradients of `attention_forward`, and their tangents: forward over reverse, Hessian-vector products.

    Parameters
    ----------
    do, saved, dlse, deterministic
        As in `attention_backward`. From call to call tdq may differ as dq may, on 9.0 alone, where its deterministic
        path takes about twice as long.
    tsaved : SavedTangents
        What `attention_forward_jvp` returned along with saved.
    tdo : array, (..., seqlen_q, head_dim_v), optional
        The tangent of do, with an axis of tangents in front if those of q, k and v have one. Another floating dtype is
        converted. Default: zero.
    tdlse : array, (..., seqlen_q), optional
        The tangent of dlse, which is then given too, likewise.

    Returns
    -------
    grads : Gradients
        As from `attention_backward`.
    tgrads : Gradients
        The tangents of dq, dk and dv; ``tgrads.score`` has those of ``grads.score``. For several tangents with their
        axis in front.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Notes
    -----
    With dP = Z (dO V^T), D = rowsum(dO O) - dlse and dS = P (dP - D), where P is recomputed from lse, and tP from tlse,

        tP = P (tS - tlse),  tdP = Z (dO tV^T + tdO V^T),  tD = rowsum(tdO O + dO tO) - tdlse,
        tdS = tP (dP - D) + P (tdP - tD),
        tdQ = scale (tdS K + dS tK),  tdK = scale (tdS^T Q + dS^T tQ),  tdV = (Z tP)^T dO + (Z P)^T tdO:

    ten products of matrices, twelve with tdO. A part S = f(S0) of a score turns dS into f' dS, and tdS into f' tdS +
    f'' tS0 dS. If tdO and tdlse are zero this is the Hessian of <do, o> + <dlse, lse> times the tangents.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v, tq, do = np.random.default_rng(0).standard_normal((5, 100, 64))
    >>> o, to, saved, tsaved = na.attention_forward_jvp(q, k, v, tq, None, None)
    >>> (dq, dk, dv), (tdq, tdk, tdv) = na.attention_backward_jvp(do, saved, tsaved)
    >>> h = 1e-5
    >>> ahead, behind = (na.attention_vjp(q + x * tq, k, v)[1](do) for x in (h, -h))
    >>> np.allclose(tdk, (ahead.dk - behind.dk) / (2 * h), atol=1e-6)
    True

    The Hessian of a loss, ``((o - wanted) ** 2).sum() / 2``, whose do = o - wanted changes along with o, times tangents
    of q and of a bias:

    >>> wanted, bias, tbias = do, *np.random.default_rng(1).standard_normal((2, 100, 100))
    >>> o, to, saved, tsaved = na.attention_forward_jvp(q, k, v, tq, None, None, score=na.Bias(bias), tscore=[tbias])
    >>> grads, (tdq, tdk, tdv) = na.attention_backward_jvp(o - wanted, saved, tsaved, tdo=to)
    >>> ahead, behind = (na.attention_vjp(q + x * tq, k, v, score=na.Bias(bias + x * tbias)) for x in (h, -h))
    >>> dk, dk_behind = (backprop(o - wanted).dk for o, backprop in (ahead, behind))
    >>> np.allclose(tdk, (dk - dk_behind) / (2 * h), atol=1e-6)
    True
    """
    tgrads = tangents_of_gradients(do, saved, tsaved, tdo, dlse, tdlse, deterministic)
    do, dlse = checked_gradients(saved, do, dlse)
    return passes.backward(saved, do, dlse, deterministic), tgrads


def tangents_of_gradients(
    do: Any, saved: Saved[A], tsaved: SavedTangents[A], tdo: Any, dlse: Any, tdlse: Any, deterministic: bool
) -> Gradients[A]:
    """The second result of `attention_backward_jvp`."""
    do, dlse = checked_gradients(saved, do, dlse)
    tdo, tdlse = checked_tangents_of_gradients(saved, tsaved, tdo, dlse, tdlse)
    flag("deterministic", deterministic)
    to, tlse = (tsaved.to, tsaved.tlse) if tsaved.several else (tsaved.to[None], tsaved.tlse[None])
    tgrads = passes.backward_tangent(saved, do, dlse, tsaved.tangents, to, tlse, tdo, tdlse, deterministic)
    return tgrads if tsaved.several else _only(tgrads)


class SecondBackprop(Protocol[A]):
    """The closure that `attention_backward_vjp` returns."""

    def __call__(
        self, ddq: Array | None, ddk: Array | None, ddv: Array | None, *, ddscore: Sequence[Array | None] = ()
    ) -> SecondGradients[A]: ...


def attention_backward_vjp(
    do: Array, saved: Saved[A], *, dlse: Array | None = None, deterministic: bool = False
) -> tuple[Gradients[A], SecondBackprop[A]]:
    """`attention_backward` with its own gradients as a closure: reverse over reverse, as for gradient penalties.

    Parameters
    ----------
    do, saved, dlse, deterministic
        As in `attention_backward`.

    Returns
    -------
    grads : Gradients
        As from `attention_backward`.
    backprop2 : function
        ``backprop2(ddq, ddk, ddv, *, ddscore=())`` takes the gradients of a function of dq, dk, dv and ``grads.score``
        with respect to these: of the shape and dtype of each, None is zero. It returns those with respect to q, k, v
        and do, a tuple with the attributes `dlse` and `score`. There may be several at once, as in `attention_jvp`.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.

    Notes
    -----
    dq, dk and dv are the gradient of <do, o> + <dlse, lse>, whose Hessian is symmetric: so gq, gk and gv are the
    tangents that `attention_backward_jvp` returns in the direction ddq, ddk, ddv, and the gradients with respect to do
    and dlse are the tangents of o and lse in that direction.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 100, 64))
    >>> o, saved = na.attention_forward(q, k, v)
    >>> (dq, dk, dv), backprop2 = na.attention_backward_vjp(do, saved)
    >>> gq, gk, gv, gdo = backprop2(2 * dq, None, None)        # of the penalty (dq**2).sum()
    >>> gdo.shape
    (100, 64)
    """
    do, dlse = checked_gradients(saved, do, dlse)
    flag("deterministic", deterministic)
    problem, inputs = saved.problem, saved.inputs
    grads = passes.backward(saved, do, dlse, deterministic)

    def backprop2(
        ddq: Array | None, ddk: Array | None, ddv: Array | None, *, ddscore: Sequence[Array | None] = ()
    ) -> SecondGradients[A]:
        tangents, several = checked_tangents(inputs, ddq, ddk, ddv, ddscore, prefix="dd")
        _, to, tlse = passes.tangent(problem, inputs, tangents)
        found = passes.backward_tangent(saved, do, dlse, tangents, to, tlse, deterministic=deterministic)
        if not several:
            to, tlse, found = to[0], tlse[0], _only(found)
        return SecondGradients(found.dq, found.dk, found.dv, to, tlse, found.score)

    return grads, backprop2


@knows_others
def attention_laplacian(
    q: A,
    k: A,
    v: A,
    jq: Array | None,
    jk: Array | None,
    jv: Array | None,
    lq: Array | None = None,
    lk: Array | None = None,
    lv: Array | None = None,
    *,
    jscore: Sequence[Array | None] = (),
    lscore: Sequence[Array | None] = (),
    particle: Integers | tuple[Integers, Integers] | None = None,
    causal: bool = False,
    mask: Mask | Array | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    score: Scores = None,
) -> tuple[A, A, A]:
    """`attention` with its tangents and its Laplacian: the forward Laplacian of quantum Monte Carlo.

    q, k and v depend on coordinates x_1, ..., x_T. Given their first derivatives by each, and their Laplacians, the
    sums of second derivatives, it returns both for o.

    Parameters
    ----------
    q, k, v, causal, mask, scale, dropout, score
        As in `attention`, but k is not a cache.
    jq, jk, jv : arrays, (T, ...), or None
        The derivatives of q, k and v by each coordinate, of their dtype; None is zero.
    lq, lk, lv : arrays or None, optional
        Their Laplacians, of the shape and dtype of q, k and v; None is zero.
    jscore, lscore : list or tuple, optional
        Likewise of the arrays in the score, one for each as tscore in `attention_jvp`: of biases by distance, say. S is
        to be linear in those in jscore, as in `Bias`, `RelativeBias`, `Alibi` and `Sink`, and not those of a `Score`.
    particle : list or integer array of NumPy, (rows,), or a tuple of two, for queries and for keys; optional
        If each row of q, k and v depends on the coordinates of one particle alone, as in a first layer, whose: a number
        from 0 on, or -1 for a row that is constant. jq, jk and jv then have the derivatives of rows by the coordinates
        of their own particle, T = 3 in space. Later layers have none of this: o depends on all particles.

    Returns
    -------
    o : array, (..., seqlen_q, head_dim_v), of the dtype of q
    jo : array, (T, ..., seqlen_q, head_dim_v)
        The derivatives of o. With `particle`, (T n, ..., seqlen_q, head_dim_v) for n particles, one more than the
        largest number: ``jo[T * p + c]`` by coordinate c of particle p.
    lo : array, (..., seqlen_q, head_dim_v)
        Its Laplacian.

    Raises
    ------
    TypeError, ValueError
        For what does not fit: see `attention`.
    NotImplementedError
        For derivatives of an array of a `Score`; with `particle` for jscore, dropout, and parts of a score that are not
        added to S, as `Softcap`, or may not be, as a `Score`.

    Notes
    -----
    lo is the tangent of o in the direction of the Laplacians, see `attention_jvp`, plus the sum over tangents of

        (Z P2) V + 2 (Z P tS) tV - 2 tlse tO - rowsum(P2) O,  P2 = P (2 scale tQ tK^T + tS^2),

    the second derivative of o along q + h tq, k + h tk, v + h tv, with which the arrays in jscore move.

    With `particle` a key j moves along the coordinates of its particle p alone, and jo along one of them is the sum of
    P_ij (tS_ij (V_j - O_i) + tV_j) over the keys of p, but for the queries of p, which all keys move: all of jo takes
    as long as T tangents, and the time of writing it, in place of T n tangents. On a GPU the keys of a particle are to
    lie side by side, in the order of particles, if there is a mask or a bias; else whole matrices are multiplied, in
    memory that grows with seqlen_q x seqlen_k, as jo does.

    Examples
    --------
    >>> import numbattn as na, numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> jq = np.eye(20).reshape(20, 5, 4)                      # by the elements of q themselves
    >>> o, jo, lo = na.attention_laplacian(q, k, v, jq, None, None)
    >>> jo.shape, lo.shape
    ((20, 5, 4), (5, 4))

    Of five particles, each with one row:

    >>> jk = np.random.default_rng(1).standard_normal((3, 5, 4))
    >>> o, jo, lo = na.attention_laplacian(q, k, v, None, jk, None, particle=range(5))
    >>> dense = np.zeros((5, 3, 5, 4))                          # by all coordinates: most are zero
    >>> dense[range(5), :, range(5)] = jk.swapaxes(0, 1)
    >>> np.allclose(jo, na.attention_laplacian(q, k, v, None, dense.reshape(15, 5, 4), None)[1])
    True
    """
    refuse_cache(k, "tangents")
    problem, inputs = describe(q, k, v, causal, mask, scale, dropout, score, may_wait=True)
    tangents, _ = checked_tangents(inputs, jq, jk, jv, jscore, prefix="j", several=True)
    for number, ((part, _), x) in enumerate(zip(weights_of(inputs), tangents.score)):
        if x is not None and not part._is_linear:
            raise NotImplementedError(f"jscore[{number}]: got {words_for(x)} for an array of a {type(part).__name__}, "
                                      "expected None: pass a numbattn.Bias of what it adds")  # fmt: skip
    laplacians, _ = checked_tangents(inputs, lq, lk, lv, lscore, prefix="l", several=False)
    particles = None if particle is None else checked_particles(particle, problem, inputs, tangents)
    return passes.laplacian(problem, inputs, tangents, laplacians, particles)


def _only(grads: Gradients[Any]) -> Gradients[Any]:
    """The gradients of a single tangent, without its axis."""
    score = tuple([None if x is None else x[0, ...] for x in grads.score])  # an array even for a number
    return Gradients(grads.dq[0], grads.dk[0], grads.dv[0], score)
