"""numbattn under a Hugging Face model, by `numbattn.interop.transformers`.

    pip install torch transformers && python examples/16_hugging_face.py

The model is a tiny one of random weights, of Gemma's kind: layers with and without a window, capped scores. A line
registers the attention; models then take it by its name, in training and in generation.
"""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from numbattn.interop.transformers import register

register()

if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
    config = Gemma2Config(**sizes, **heads, sliding_window=16, attn_logit_softcapping=2.0)
    model = Gemma2ForCausalLM(config).train()
    tokens = torch.randint(256, (2, 100))
    padded = torch.ones_like(tokens)
    padded[1, 60:] = 0  # the second text is shorter

    def loss_and_gradients(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        loss = model(tokens, attention_mask=padded, labels=tokens.masked_fill(padded == 0, -100)).loss
        loss.backward()
        return loss.item(), torch.cat([x.grad.flatten() for x in model.parameters()])

    (loss, gradients), (expected, others) = map(loss_and_gradients, ("numbattn", "eager"))
    error = (gradients - others).norm() / others.norm()
    print(f"loss {loss:.6f}, with transformers' own attention {expected:.6f}; "
          f"relative difference of gradients: {error:.1e}")
    print("generated:", *model.eval().generate(tokens[:1, :5], max_new_tokens=10, do_sample=False)[0].tolist())
