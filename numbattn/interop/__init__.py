"""Attention as a function of other libraries' arrays, with every option and with first and second derivatives.

`numbattn.interop.jax`, `.torch`, `.autograd` and `.thinc` are imported only when they are asked for, and with each its
framework. After that, masks and scores take arrays of the framework, too. `numbattn.interop.transformers` registers
attention of torch's tensors with the models of Hugging Face's transformers.
"""
