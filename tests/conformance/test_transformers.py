"""The models of transformers: every language model that a tiny configuration of common sizes makes, of random weights,
with numbattn and with the package's own "eager" attention.

Left out are models that do not ask AttentionInterface, those of several parts, and those whose configuration needs more
than sizes. A sink for each query, of Inkling 2, is refused by its name.
"""

import inspect
import os

import pytest

from .suites import Counts

torch = pytest.importorskip("torch")
os.environ["HF_HUB_OFFLINE"] = "1"
tf = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZES = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
                       "num_decoder_layers", "num_encoder_layers", "num_experts_per_tok", "full_attention_interval",
                       "linear_num_key_heads", "num_key_value_heads"), 2)  # fmt: skip
SIZES |= dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
                        "decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts",
                        "moe_num_experts", "linear_num_value_heads"), 4)  # fmt: skip
SIZES |= dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
                        "kv_channels", "linear_key_head_dim", "linear_value_head_dim", "attention_chunk_size",
                        "hidden_size_per_layer_input"), 8)  # fmt: skip
SIZES |= dict.fromkeys(("moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "shared_expert_intermediate_size"), 16)
SIZES |= dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 32)
SIZES |= dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim",
                        "ffn_hidden_size"), 48)  # fmt: skip
SIZES |= dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128)
SIZES |= {"vocab_size": 64, "vocab_size_per_layer_input": 64, "sliding_window": 6, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2, "decoder_start_token_id": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
          "first_k_dense_replace": 1, "max_window_layers": 0}  # fmt: skip
MAPPINGS = "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"


def test_language_models(count):
    from transformers.models.auto import modeling_auto

    from numbattn.interop.transformers import register

    register()
    names = [name for which in MAPPINGS for name in getattr(modeling_auto, f"MODEL_FOR_{which}_MAPPING_NAMES").values()]
    found = {name: compared(getattr(tf, name)) for name in dict.fromkeys(names) if isinstance(name, str)}
    wrong = {name: why for name, why in found.items() if why}
    skipped = list(found.values()).count(None)
    ran = len(found) - skipped
    count("transformers", f"transformers {tf.__version__}", Counts(ran - len(wrong), len(wrong), skipped))
    assert not wrong
    assert ran >= 140


def compared(kind):
    """What is wrong with a model's logits or gradients, in words; None where it is left out."""
    config = kind.config_class
    known = {name for base in config.__mro__ for name in getattr(base, "__annotations__", {})}
    known |= set(inspect.signature(config.__init__).parameters)
    if config.sub_configs:
        return None
    try:
        made = config(**{name: size for name, size in SIZES.items() if name in known})
        with torch.device("meta"):
            if kind._from_config(made, attn_implementation="eager").num_parameters() > 3e6:
                return None
        model = kind._from_config(made, attn_implementation="eager").eval()
        weights = torch.Generator().manual_seed(0)
        for x in model.parameters():
            x.data = torch.randn(x.shape, generator=weights) * 0.15 if x.ndim > 1 else x.data
        expected = logits_and_gradients(model)
        model.set_attn_implementation("numbattn")
    except Exception:  # other sizes are needed: numbattn was not asked
        return None
    if model.config._attn_implementation != "numbattn":
        return None
    try:
        got = logits_and_gradients(model)
    except (TypeError, ValueError) as error:
        return None if str(error).startswith(("sinks", "attention_mask")) else repr(error)
    except Exception as error:
        return repr(error)
    errors = [(x - y).norm() / y.norm() for x, y in zip(got, expected)]
    return "" if max(errors) < 1e-4 else f"logits and gradients are wrong by {errors}"


def logits_and_gradients(model):
    """Of two texts, one padded on the right: logits without those of the padding."""
    tokens = torch.arange(3, 43).reshape(2, 20)
    there = torch.ones_like(tokens)
    there[1, 17:] = 0
    decoder = {"decoder_input_ids": tokens[:, :15]} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=tokens, attention_mask=there, **decoder).logits
    logits = logits if decoder else logits[there.bool()]
    model.zero_grad()
    (logits * torch.linspace(-1, 1, logits.shape[-1])).square().mean().backward()
    return logits.detach(), torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
