"""Attention on CuPy arrays: CUDA kernels that are Python functions.

**What is compiled when.** The first call of a kind compiles its kernels, which takes some seconds. A kind is: the GPU's
compute capability; the dtype; head_dims, rounded up to 32, 64, 128, 192, 256 or larger; the kinds of masks and scores,
and which of their offsets and lengths are arrays; dropout or none; whether rows are aligned to 16 bytes; in the
backward pass whether there is a `dlse`, which gradients are summed over broadcast axes, and `deterministic`. Small
problems have kernels for up to 16, 32 and 64 queries and keys, 128 in half precision, and for scores that a batch
shares. On Hopper most head_dims have two kernels, for queries that see few keys and for those that see thousands.
Nothing else compiles: no stride, array, scale, seed or probability. Binaries are kept on disk, see
`numbattn.base.cache`. To build them beforehand, for the image of a cluster, say, run ``python -m numbattn compile`` on
any machine and copy the folder that it names.

**Which cores compute.** From compute capability 8.0 on tensor cores multiply, float32 as three products of TF32, which
the tests hold to the same errors as sums in float32. CUDA cores do the rest: everything on 7.5, the forward pass in
float64 for head_dims of more than 128, and some tiles where a block has less than 163 KB of shared memory. On Hopper
(9.0) float16 and bfloat16 have kernels with TMA and wgmma. ``python -m numbattn plan`` shows which kernels a call runs.

**Many small problems** in one call, up to 64 queries and keys and head_dims up to 128, run at about the speed at which
a GPU copies their arrays. Blocks of one to four warps compute one after the other, with all scores in registers; the
gradient of a bias that all share is summed as they go. Packed sequences, `BlockSparse` masks and caches have the
kernels for any size, with tiles to match.

**What is copied.** NumPy arrays in masks and scores are copied to the GPU at each call. Numbers in them are checked on
the CPU; lengths on the GPU are clamped instead, since reading them would wait for the GPU. TMA reads arrays
in place if their rows start at multiples of 16 bytes and are a multiple of 16 bytes long, and no stride is negative:
(batch, seqlen, heads, head_dim) with its axes swapped, for instance. Other arrays are copied first, and so are those
whose head_dim is no multiple of 8.

**Rounding.** The maximum by which a row is scaled may lag behind by 1 bit, so that sums are rescaled less often: the
largest weight of a row, which would be 1, is then rounded like the others.

**CUDA graphs** may capture forward and backward calls, after one that has compiled and loaded the kernels. Temporary
arrays then belong to the graph. What goes in, arrays in masks included, and what comes out are yours to keep alive::

    def step():
        o, backprop = na.attention_vjp(q, k, v, causal=True)
        return o, backprop, backprop(do)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        o, backprop, (dq, dk, dv) = step()
        graph = stream.end_capture()
        graph.launch()                      # computes them from what q, k, v and do hold by then

**Kernels of your own** are written in the words of `numbattn.cuda.tile` and run by `numbattn.cuda.kernel.launch`: it
compiles them for CuPy arrays, with the same cache as numbattn's own, and on NumPy arrays runs them in plain Python,
thread by thread, where a debugger works, and races and deadlocks become errors that name the threads. For examples see
``examples/03_own_attention.py`` and ``examples/09_matrix_product.py``.
"""
