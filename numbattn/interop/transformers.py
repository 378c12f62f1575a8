"""Attention of the models in Hugging Face's transformers.

After `register`, every model that takes its attention from transformers' `AttentionInterface` runs on numbattn by
``attn_implementation="numbattn"``: in training and in generation, with every cache, left or right padding, packed
sequences, windows, chunks, T5's position biases, logits that are capped (Gemma) and sinks (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..dropout import Dropout
from ..masks import Causal, Intervals, Mask, Segments, as_mask
from ..scores import Part
from ..scores.bias import Bias
from ..scores.sink import Sink
from ..scores.softcap import Softcap
from .torch import attention

# What models pass on that is in the mask already, or says nothing of attention's result.
HARMLESS = frozenset({
    "sliding_window", "position_ids", "cache_position", "seq_idx", "max_length_q", "max_length_k", "use_cache",
    "num_items_in_batch", "logits_to_keep", "layer_idx", "output_hidden_states",
})  # fmt: skip
BLOCK = 2**22  # how many booleans of a mask are looked at together


def register(name: str = "numbattn") -> None:
    """Make numbattn's attention one of transformers', by this name.

    Models take it as ``from_pretrained(..., attn_implementation=name)`` or ``model.set_attn_implementation(name)``.
    Results and gradients are those of "eager", but for rows of padding that see nothing: their attention is 0.

    In training, each call of attention draws the seed of its `Dropout` from torch's default generator on the CPU:
    `torch.manual_seed` repeats it, as does gradient checkpointing.

    Parameters
    ----------
    name : str, optional
        Anything but the name, or a part of the name, of an attention that transformers brings along.

    Raises
    ------
    TypeError
        By a model's call, for an option that might change the result and that numbattn does not know.
    ValueError
        By a model's call with ``output_attentions=True``: the weights are never stored.

    Examples
    --------
    >>> from numbattn.interop.transformers import register
    >>> register()
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=8, num_attention_heads=2)
    >>> model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="numbattn")
    >>> model.generate(max_length=4, min_length=4, do_sample=False, bos_token_id=0, pad_token_id=0).shape
    torch.Size([1, 4])
    """
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask_of)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of (batch, heads, seqlen, head_dim); o has its heads after the sequence. transformers and its models
    dictate the arguments."""
    refuse(options)
    mask: Any = attention_mask
    score: list[Part] = []
    if softcap is not None:
        score.append(Softcap(softcap))
    if position_bias is not None:
        score.append(Bias(position_bias))
    if mask is None:  # is causal where the model is, from the first key on: those of a cache's future come last
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = Causal(0) if causal and query.shape[-2] > 1 else None
    elif isinstance(mask, Visible):
        mask = mask.value if mask.shape[-2:] == (query.shape[-2], key.shape[-2]) else mask.booleans()
    elif mask.is_floating_point():
        score.append(Bias(mask))
        mask = None
    if s_aux is not None:
        score.append(Sink(s_aux))
    if cu_seq_lens_q is not None:
        mask = as_mask(mask) & Segments(cu_seq_lens_q, cu_seq_lens_k)
    if indices is not None:  # the keys (batch, q, chosen) of DeepSeek's indexers
        chosen = torch.zeros(*indices.shape[:2], key.shape[-2], dtype=torch.bool, device=key.device)
        mask = as_mask(mask) & chosen.scatter(-1, indices.long(), True)[:, None]
    drop = Dropout(dropout, seed=int(torch.randint(2**63 - 1, ()))) if dropout else None
    o = attention(query, key, value, mask=mask, scale=scaling, score=score or None, dropout=drop)
    return o.transpose(1, 2).contiguous(), None


def refuse(options: dict[str, Any]) -> None:
    """An error for options that numbattn does not know and that hold numbers or tensors."""
    if options.get("output_attentions"):
        raise ValueError('output_attentions: got True, expected False: only attn_implementation="eager" stores weights')
    for name, option in options.items():
        if option is not None and name not in HARMLESS and any(map(is_number, tree_leaves(option))):
            raise TypeError(f"{name}: got {type(option).__name__}, but numbattn does not know this option of attention")


def is_number(x: Any) -> bool:
    return isinstance(x, int | float | torch.Tensor) and not isinstance(x, bool)


def mask_of(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, *, device: Any = "cpu", **options: Any
) -> torch.Tensor | None:
    """The mask function: `sdpa_mask`, but without the booleans of several queries where intervals say the same."""

    def booleans(start: int = 0, rows: int = q_length, **changes: Any) -> Any:
        return sdpa_mask(batch_size, rows, kv_length, q_offset + start, device=device, **options | changes)

    if q_length == 1 or torch.compiler.is_compiling():
        return booleans()
    shape = batch_size, 1, q_length, kv_length
    if booleans(mask_function=one, use_vmap=False) is None:  # as it would be of all: causal and no more, or no mask
        if options.get("allow_is_bidirectional_skip"):
            return None
        end = torch.arange(1, q_length + 1, device=device)
        return Visible(shape, torch.zeros_like(end), end, Causal(0))
    whole = partial(booleans, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    found = intervals(whole, q_length, max(1, BLOCK // (batch_size * kv_length)))
    return whole() if found is None else Visible(shape, *found, Intervals(*found))


def one(batch: Any, head: Any, query: torch.Tensor, key: Any) -> torch.Tensor:
    """A mask function of a single boolean, to ask `sdpa_mask` whether it wants a mask at all."""
    return query[..., :1, :] >= 0


def intervals(booleans: Callable[..., torch.Tensor], queries: int, rows: int) -> list[torch.Tensor] | None:
    """The first and the end of the keys that each query sees, of so many rows at a time; None if there are gaps."""
    found = []
    for start in range(0, queries, rows):
        block = booleans(start, min(rows, queries - start))
        first = block.byte().argmax(-1)
        end = first + block.sum(-1)
        if not torch.equal(block, between(first, end, block.shape[-1])):
            return None
        found.append((first.int(), end.int()))
    return [torch.cat(bounds, -1) for bounds in zip(*found)]


def between(first: torch.Tensor, end: torch.Tensor, keys: int) -> torch.Tensor:
    """Whether first <= key < end."""
    key = torch.arange(keys, device=first.device)
    return (first[..., None] <= key) & (key < end[..., None])


class Visible(torch.Tensor):
    """A mask's booleans (batch, 1, q, k), computed only where a model looks at them: numbattn takes the value."""

    first: torch.Tensor
    end: torch.Tensor
    value: Mask
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, shape: tuple[int, ...], first: torch.Tensor, end: torch.Tensor, value: Mask) -> Visible:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=first.device)
        self.first, self.end, self.value = first, end, value
        return self

    def booleans(self) -> torch.Tensor:
        return between(self.first, self.end, self.shape[-1]).expand(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            raise ValueError("attention_mask: the model adds it to scores itself, expected a model that takes all of "
                             "its attention from AttentionInterface")  # fmt: skip
        args, kwargs = tree_map(lambda x: x.booleans() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)
