"""Tiny models of random weights have the logits and the gradients of transformers' own "eager" attention."""

import os

import pytest

import numbattn as na

torch = pytest.importorskip("torch", reason="torch is not installed")
os.environ["HF_HUB_OFFLINE"] = "1"
tf = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import masking_utils

from numbattn.interop import transformers as interop

TOKENS = 64
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": TOKENS}
DECODER = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
PAIR = {
    "vocab_size": TOKENS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "Llama": DECODER,
    "Mistral": {**DECODER, "sliding_window": 6},
    "Gemma2": {**DECODER, "query_pre_attn_scalar": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    "GptOss": {**DECODER, **EXPERTS, "sliding_window": 6},
    "Qwen3": DECODER,
    "Phi3": {**DECODER, "pad_token_id": 0},
    "Gemma3": {**DECODER, "num_hidden_layers": 6, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "Llama4": {**DECODER, "intermediate_size_mlp": 32, "num_local_experts": 2, "attention_chunk_size": 10},
    "DeepseekV3": {**DECODER, **LATENT},
    "DeepseekV32": {**DECODER, **LATENT, "index_topk": 5, "index_n_heads": 2, "index_head_dim": 16},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": TOKENS, "n_positions": 128,
             "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "T5": {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4,
           "dropout_rate": 0.0, "decoder_start_token_id": 1},
    "Bart": PAIR,
    "Whisper": {**PAIR, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 128},
    "Bert": {**SIZES, "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "ModernBert": {**SIZES, "num_attention_heads": 4, "local_attention": 6, "pad_token_id": 0, "bos_token_id": 1,
                   "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "ViT": {**SIZES, "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.0},
}  # fmt: skip
CONFIGS = {"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"}
HEADS = {"T5": "ForConditionalGeneration", "Bart": "ForConditionalGeneration", "GPT2": "LMHeadModel", "ViT": "Model",
         "Whisper": "ForConditionalGeneration", "Bert": "ForMaskedLM", "ModernBert": "ForMaskedLM"}  # fmt: skip
GENERATES = "Llama", "Gemma2", "Gemma3", "GptOss", "Llama4", "DeepseekV32", "T5", "Bart"
FAST = "Mistral", "Gemma2", "GptOss", "T5", "Bert"


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(autouse=True, scope="module")
def registered():
    interop.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for interface in (tf.AttentionInterface, masking_utils.AttentionMaskInterface):
        del interface._global_mapping["numbattn"]


def model_of(name, **changes):
    config = getattr(tf, CONFIGS.get(name, name) + "Config")(**MODELS[name] | changes)
    torch.manual_seed(0)
    model = getattr(tf, name + HEADS.get(name, "ForCausalLM"))._from_config(config, attn_implementation="eager")
    for what, x in model.named_parameters():
        if x.ndim > 1 or "sinks" in what:
            x.data = torch.randn(x.shape) * 0.3
    if model.can_generate():
        model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return model


def tokens_of(padding):
    """Token numbers of two sequences of 20, of which one is padded on a side."""
    tokens = torch.randint(3, TOKENS, (2, 20), generator=torch.Generator().manual_seed(1))
    there = torch.ones_like(tokens)
    if padding is not None:
        there[1, slice(0, 7) if padding == "left" else slice(16, None)] = 0
    return tokens, there


def inputs_of(name, padding):
    tokens, there = tokens_of(padding)
    if name == "ViT":
        return {"pixel_values": torch.linspace(-1, 1, 6144).sin().reshape(2, 3, 32, 32)}
    if name == "Whisper":
        return {"input_features": torch.linspace(-9, 9, 640).sin().reshape(2, 8, 40), "decoder_input_ids": tokens}
    if padding == "packed":
        places = torch.cat([torch.arange(8), torch.arange(12)])
        return {"input_ids": tokens[:1], "position_ids": places[None]}
    decoder = {"decoder_input_ids": tokens[:, :9]} if "Conditional" in HEADS.get(name, "") else {}
    return {"input_ids": tokens, "attention_mask": there, **decoder}


def results(model, implementation, inputs):
    """Logits, where there is no padding, and the gradients of all parameters, in a row."""
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    model.zero_grad()
    out = model(**inputs)
    logits = out.logits if "logits" in out else out.last_hidden_state
    there = inputs.get("attention_mask")
    seen = logits if there is None or "decoder_input_ids" in inputs else logits[there.bool()]
    (seen * torch.linspace(-1, 1, seen.shape[-1])).square().sum().backward()
    return seen.detach(), torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


def assert_close(got, want, tolerance=1e-5):
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert (x - y).norm() <= tolerance * y.norm()


def of_eager(model, inputs):
    assert_close(results(model, "numbattn", inputs), results(model, "eager", inputs))


@pytest.mark.parametrize("name", [*FAST, *slow(*sorted({*MODELS} - {*FAST}))])
def test_logits_and_gradients(name):
    model = model_of(name)
    packed = ["packed"] if name not in HEADS or name == "GPT2" else []
    for padding in (None, "left", "right", *packed):
        of_eager(model, inputs_of(name, padding))


def generated(model, implementation, padding, sequences=2, **options):
    model.set_attn_implementation(implementation)
    tokens, there = (x[-sequences:] for x in tokens_of(padding))
    options.update(max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True)
    out = model.generate(tokens, attention_mask=there, **options)
    return out.sequences.float(), torch.stack(out.logits)


STATIC = {"cache_implementation": "static", "disable_compile": True}
GENERATION = {
    "dynamic": {},
    "no cache": {"use_cache": False},
    "static": STATIC,
    "chunked prefill": {"prefill_chunk_size": 7},
    "chunked prefill, static": {"prefill_chunk_size": 7, **STATIC},
    "beams": {"num_beams": 3},
    "drafts by look-up": {"sequences": 1, "prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("padding", ["left", *slow(None, "right")])
@pytest.mark.parametrize("name", ["Mistral", *slow(*GENERATES)])
def test_generation_with_every_cache(name, padding):
    """Windows of Mistral are shorter than what is generated: its caches roll."""
    model = model_of(name).eval()
    for how, options in GENERATION.items():
        if how.startswith("chunked") and name in HEADS and padding == "left":
            continue  # of an encoder's padding alone "eager" gives decoders the mean
        got, want = (generated(model, x, padding, **options) for x in ("numbattn", "eager"))
        assert_close(got, want)


def test_generation_with_a_draft_model_and_with_8_bits():
    model, draft = (model_of("Llama", num_hidden_layers=layers).eval() for layers in (2, 1))
    draft.set_attn_implementation("numbattn")
    fp8 = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    for options in ({"sequences": 1, "assistant_model": draft}, fp8):
        got, want = (generated(model, x, "right", **options) for x in ("numbattn", "eager"))
        assert_close(got, want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
@pytest.mark.parametrize("what", ["model", "layers"])
def test_compiled(name, what):
    model, compiled = model_of(name), model_of(name)
    for part in [compiled] if what == "model" else compiled.model.layers:
        part.compile(backend="aot_eager")
    for padding in (None, "right"):
        inputs = inputs_of(name, padding)
        assert_close(results(compiled, "numbattn", inputs), results(model, "eager", inputs))


def masks(**options):
    """The mask of numbattn, and transformers' own booleans."""
    options = {"batch_size": 2, "q_length": 9, "kv_length": 9} | options
    skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return interop.mask_of(**options), masking_utils.sdpa_mask(**options | skip)


PADDED = torch.ones(2, 16, dtype=torch.bool)
PADDED[1, :3] = False
window, chunks = masking_utils.sliding_window_causal_mask_function, masking_utils.chunked_causal_mask_function
both = masking_utils.bidirectional_mask_function


def test_a_mask_stays_as_it_was():
    """A static cache counts on in the offset that it has given."""
    offset = torch.tensor(3)
    mask, expected = masks(q_length=4, q_offset=offset)
    offset += 4
    assert torch.equal(mask[:, 0], expected[:, 0])


@pytest.mark.parametrize("block", [2**22, 50])
@pytest.mark.parametrize("options", [
    {},
    {"kv_length": 16, "q_offset": 0},
    {"kv_length": 16, "q_offset": torch.tensor(4), "attention_mask": PADDED[:, :13]},
    {"kv_length": 12, "q_offset": 7, "kv_offset": 4, "mask_function": window(4), "local_size": 4},
    {"attention_mask": PADDED[:, :9]},
    {"attention_mask": PADDED[:, :9], "mask_function": both, "allow_is_causal_skip": False,
     "allow_is_bidirectional_skip": True},
    {"mask_function": chunks(4, torch.tensor([0, 3])), "local_size": 4},
    {"mask_function": masking_utils.or_masks(window(9), lambda b, h, i, j: j < 4), "use_vmap": True,
     "allow_is_causal_skip": False},
])  # fmt: skip
def test_a_mask_of_intervals_is_not_computed(monkeypatch, options, block):
    monkeypatch.setattr(interop, "BLOCK", block)
    mask, expected = masks(**options)
    assert isinstance(mask, interop.Visible)
    found = na.masks.as_mask(mask.value)._mapped(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x)
    dense = torch.from_numpy(found.dense(*expected.shape[-2:])).expand(expected.shape)
    assert torch.equal(dense, expected)
    assert torch.equal(mask[..., -1:, :], expected[..., -1:, :])
    assert torch.equal(~mask, ~expected)
    with pytest.raises(ValueError, match="attention_mask: the model adds it"):
        torch.ones(1) + mask


def test_other_masks_are_booleans():
    holes = torch.ones(2, 9, dtype=torch.bool)
    holes[0, 4] = False
    for options in ({"attention_mask": holes}, {"q_length": 1, "kv_length": 5, "q_offset": 4}):
        mask, expected = masks(**options, allow_is_causal_skip=False)
        assert type(mask) is torch.Tensor
        assert torch.equal(mask, expected)
    assert masks(mask_function=both, allow_is_causal_skip=False, allow_is_bidirectional_skip=True)[0] is None


class Module(torch.nn.Module):
    is_causal = True


@pytest.fixture
def qkv():
    return torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(0)).unbind()


def test_a_mask_of_another_size_is_looked_at(qkv):
    mask, _ = masks(q_length=8)
    with pytest.raises(ValueError, match="mask"):
        interop.attend(Module(), *qkv, mask)


def test_floats_and_offsets_of_packed_sequences(qkv):
    ends = torch.tensor([0, 3, 8])
    visible = na.Segments(ends.numpy()).dense(8, 8) & na.Causal().dense(8, 8)
    expected = na.attention(*(x.numpy() for x in qkv), mask=visible, scale=0.3)
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "sliding_window": 4, "scaling": 0.3}
    low = torch.where(torch.from_numpy(visible), 0.0, torch.finfo(torch.float32).min)[None, None]
    for mask, options in ((None, given), (low, {"scaling": 0.3})):
        o, weights = interop.attend(Module(), *qkv, mask, **options)
        assert weights is None
        torch.testing.assert_close(o.transpose(1, 2), torch.from_numpy(expected))


@pytest.mark.parametrize("rows", [1, 5])
def test_without_a_mask(qkv, rows):
    """It is torch's is_causal, from the first key on, but for a single query."""
    q, k, v = qkv
    q = q[:, :, :rows]
    for module, is_causal in ((Module(), None), (torch.nn.Module(), None), (Module(), False)):
        o, _ = interop.attend(module, q, k, v, None, is_causal=is_causal)
        causal = rows > 1 and is_causal is None
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(o.transpose(1, 2), expected)


def test_keys_that_an_indexer_chose(qkv):
    chosen = torch.arange(16).reshape(1, 8, 2) * 5 % 8
    visible = torch.zeros(8, 8, dtype=torch.bool).scatter(-1, chosen[0], True) & torch.ones(8, 8).bool().tril()
    visible[:, 0] = True
    chosen = torch.cat([chosen, torch.zeros_like(chosen[..., :1])], -1)
    o, _ = interop.attend(Module(), *qkv, masks(batch_size=1, q_length=8, kv_length=8)[0], indices=chosen.int())
    expected = torch.nn.functional.scaled_dot_product_attention(*qkv, visible)
    torch.testing.assert_close(o.transpose(1, 2), expected)


@pytest.mark.parametrize("option", [{"sinks": torch.ones(2)}, {"temperature": 0.5}, {"blocks": [torch.ones(1)]}])
def test_options_that_are_not_known_are_refused(qkv, option):
    [name] = option
    with pytest.raises(TypeError, match=f"{name}: got"):
        interop.attend(Module(), *qkv, None, **option)
    interop.attend(Module(), *qkv, None, **dict.fromkeys(option), use_cache=True, position_ids=torch.ones(1))


def test_weights_are_refused(qkv):
    with pytest.raises(ValueError, match="output_attentions: got True"):
        interop.attend(Module(), *qkv, None, output_attentions=True)


def test_dropout_follows_torch_s_generator():
    """It is another in each layer and call; checkpoints compute the same again."""
    model, inputs = model_of("Llama", attention_dropout=0.3), inputs_of("Llama", None)

    def seeded(seed):
        torch.manual_seed(seed)
        return results(model, "numbattn", inputs)

    plain = results(model.eval(), "numbattn", inputs)
    assert_close(seeded(0), plain)
    model.train()
    first, again, other = map(seeded, (0, 0, 1))
    assert_close(again, first)
    model.activation_checkpointing_enable()
    assert_close(seeded(0), first)
    for x in (plain, other):
        assert (x[0] - first[0]).norm() > 0.05 * first[0].norm()


FAULTS = {
    "Causal(0) if causal": "Causal() if causal",
    "and query.shape[-2] > 1": "",
    "score.append(Softcap(softcap))": "pass",
    "score.append(Sink(s_aux))": "pass",
    "q_offset + start, device": "q_offset, device",
    "if not torch.equal(block,": "if False and not torch.equal(block,",
    "mask.shape[-2:] == (query.shape[-2], key.shape[-2])": "True",
    "seed=int(torch.randint(2**63 - 1, ()))": "seed=0",
    "chosen.scatter(-1": "~chosen.scatter(-1",
}
