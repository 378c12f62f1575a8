"""numbattn under a Hugging Face model, by transformers' AttentionInterface.

    pip install torch transformers && python examples/16_hugging_face.py

The model is a tiny Llama of random weights; a line registers the attention for all others. A model masks by a boolean
tensor, or by none where causal is all that it means.
"""

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from numbattn.interop.torch import attention


def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **options):
    """As transformers calls it: keys may have fewer heads than queries, o has its heads after the sequence."""
    if dropout:
        raise NotImplementedError("dropout: numbattn's is a value; see numbattn.Dropout")
    causal = attention_mask is None and query.shape[-2] > 1 and (module.is_causal if is_causal is None else is_causal)
    o = attention(query, key, value, causal=causal, mask=attention_mask, scale=scaling)
    return o.transpose(1, 2), None


AttentionInterface.register("numbattn", attend)
AttentionMaskInterface.register("numbattn", sdpa_mask)

if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2)
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(256, (2, 100))
    padded = torch.ones_like(tokens)
    padded[1, :40] = 0  # the second text is shorter

    def loss_and_gradients(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        loss = model(tokens, attention_mask=padded, labels=tokens.masked_fill(padded == 0, -100)).loss
        loss.backward()
        return loss.item(), torch.cat([x.grad.flatten() for x in model.parameters()])

    (loss, gradients), (expected, others) = map(loss_and_gradients, ("numbattn", "sdpa"))
    error = (gradients - others).norm() / others.norm()
    print(f"loss {loss:.6f}, with torch's own attention {expected:.6f}; relative difference of gradients: {error:.1e}")
    print("generated:", *model.eval().generate(tokens[:1, :5], max_new_tokens=10, do_sample=False)[0].tolist())
