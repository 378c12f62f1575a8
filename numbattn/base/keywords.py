"""The options of other libraries' functions: who passes one is told numbattn's."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
ELSEWHERE = {
    "is_causal": "causal=True, which aligns the last query with the last key, or mask=Causal(0) as in torch",
    "attn_mask": "mask=visible for booleans, score=Bias(numbers) for what is added to the scores",
    "softmax_scale": "scale",
    "dropout_p": "dropout=Dropout(p, seed)",
    "window_size": "mask=Window(left, right), with None for -1",
    "bias": "score=Bias(bias)",
    "key_padding_mask": "mask=Lengths(keys=lengths), or mask=visible[:, None, None, :], True = visible",
    "alibi_slopes": "score=Alibi(slopes)",
    "num_splits": "nothing: keys are split wherever that is faster",
    "block_mask": "mask=Where(function), or mask=BlockSparse(blocks)",
    "score_mod": "score=Score(function)",
}


def knows_others(function: F) -> F:
    """A function whose error for an option of ELSEWHERE says what to pass."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError:
            for name in ELSEWHERE.keys() & options:
                raise TypeError(f"{function.__name__}: got {name}, expected {ELSEWHERE[name]}") from None
            raise

    return call  # type: ignore[return-value]
