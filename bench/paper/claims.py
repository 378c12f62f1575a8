"""What papers claim about FlashAttention in numbers, and what this machine has measured of it.

A claim names the runs of report.py that answer it, and a function from their results to the number found, as text, or
None where a peer that it needs has not run. A few need no run: their function computes the number. `why_not` says what
is not reproduced, and why.
"""

from collections.abc import Callable
from typing import NamedTuple

from paper import answers, worked_examples

NOT_MEASURED = "not measured on this machine"


class Claim(NamedTuple):
    text: str
    source: str
    claimed: str
    runs: tuple[str, ...] = ()
    found: Callable | None = None
    why_not: str = ""


# ------------------------------------------------------------------------------------------------------------- claims
FA, CHAPTER, NOTES = "paper", "chapter", "notes"
DATA = "needs its data set, and days on 8 GPUs"
SETTINGS = "its GPU was an A100 of 40 GB"
CLAIMS = {
    "Training": [
        Claim("BERT-large trains faster than MLPerf 1.1's record", f"{FA}, abstract, section 4.1, Table 1",
              "15%; 17.4±1.4 for 20.0±1.5 minutes to 72.0% on 8 A100",
              why_not="needs 8 A100, MLPerf's data and its code"),
        Claim("GPT-2 trains faster than Huggingface's", f"{FA}, abstract, section 4.1, Table 2",
              "small 3.5x, 2.7 for 9.5 days; medium 3.0x, 6.9 for 21.0 days", ("training",), answers.faster_training,
              "a model of GPT-2 small's size and the standard formula in CuPy, for minutes; not the days on 8 A100"),
        Claim("and faster than Megatron-LM's", f"{FA}, section 4.1, Table 2",
              "1.7x, 2.7 for 4.7 days; medium 1.8x, 6.9 for 11.5 days",
              why_not="needs Megatron-LM, whose fused kernels are not here"),
        Claim("The perplexity is the same, and so are the curves", f"{FA}, section 4.1, Table 2",
              "18.2 and 18.2; medium 14.3 and 14.2", ("training",), answers.same_losses,
              "losses on bytes after some hundred steps; OpenWebText " + DATA),
        Claim("At four times the context still faster than Megatron-LM at 1k", f"{FA}, section 4.2, Table 4",
              "30%; 1.7x, 1.6x and 1.3x at 1k, 2k and 4k; 2.7, 3.0 and 3.6 days", ("training",),
              answers.longer_contexts, "compared with the standard formula, not Megatron-LM"),
        Claim("Longer contexts give a better perplexity", f"{FA}, abstract, section 4.2, Table 4",
              "0.7 better; 18.2, 17.6 and 17.5 at 1k, 2k and 4k", ("training",), answers.held_out_losses,
              "held-out bytes after some hundred steps; OpenWebText " + DATA),
    ],
    "Long inputs": [
        Claim("The Long Range Arena trains faster", f"{FA}, abstract, section 4.1, Table 3", "2.4x", ("long_range",),
              answers.task_times, "two of its five tasks, which generators make"),
        Claim("and with block-sparse attention", f"{FA}, section 3.3, Table 3", "2.8x", ("long_range",),
              answers.sparse_steps),
        Claim("Its accuracies are the standard Transformer's", f"{FA}, Table 3",
              "59.8 and 59.3 on average; ListOps 37.6 and 36.0, Pathfinder 72.7 and 72.7; block-sparse 59.6",
              ("long_range",), answers.task_accuracies,
              "minutes of training; Text, Retrieval and Image need their data sets"),
        Claim("Approximations are slower or less exact", f"{FA}, Table 3",
              "1.3x to 2.5x, 54.9 to 59.6 on average", why_not="models with Performer, Reformer, Smyrf, local "
              "attention, ... are not here; the time of Linformer's and linear attention alone is in Figure 3"),
        Claim("Longer documents are classified better", f"{FA}, abstract, section 4.2, Table 5",
              "6.4 points; MIMIC-III 52.8 at 512 to 57.1 at 16384 (4.3), ECtHR 72.2 to 80.7 at 8192 (8.5)",
              ("documents",), answers.longer_documents,
              "other texts, from random weights; MIMIC-III and ECtHR are not here, nor is a pretrained RoBERTa"),
        Claim("Those documents are long", f"{FA}, section 4.2",
              "2,395 tokens, at most 14,562, and 2,197, at most 49,392", why_not="MIMIC-III and ECtHR are not here"),
        Claim("The first Transformer above chance on Path-X, 16K pixels", f"{FA}, abstract, section 4.2, Table 6",
              "61.4%; block-sparse 56.0", ("long_range",), answers.steps_at(128),
              "a step runs; nothing was pretrained on Path-64 and trained to this accuracy"),
        Claim("and on Path-256, 64K pixels", f"{FA}, abstract, section 4.2, Table 6", "63.1%, block-sparse",
              ("long_range",), answers.steps_at(256), "a step runs; nothing was trained to this accuracy"),
    ],
    "Speed of attention": [
        Claim("GPT-2's attention is faster than the standard one", f"{FA}, section 1, Figure 1", "up to 7.6x",
              ("figure2",), answers.faster_attention),
        Claim("Faster than standard attention from 128 to 2K", f"{FA}, sections 1 and 4.3, Figure 3", "up to 3x",
              ("figure3",), answers.faster_than_standard),
        Claim("It scales to 64K", f"{FA}, sections 1 and 4.3, Figure 3", "64K", ("figure3",), answers.scales_to),
        Claim("Up to 512 nothing is as fast, or takes as little memory", f"{FA}, sections 1 and 4.3", "512",
              ("figure3",), answers.best_when_short, "its descendants in torch are among the others here"),
        Claim("Approximations are faster beyond some length", f"{FA}, sections 1 and 4.3", "between 512 and 1024",
              ("figure3",), answers.overtaken,
              "linear attention without dropout and padding, which it does not know"),
        Claim("Time grows quadratically, linearly for many approximations", f"{FA}, section 4.3", "quadratic, linear",
              ("figure3",), answers.time_growth),
        Claim("Block-sparse attention is faster than dense", f"{FA}, section 1", "2-4x, up to 64k", ("figure3",),
              answers.sparse_over_dense),
        Claim("and faster than all exact, sparse and approximate ones at all lengths", f"{FA}, section 4.3",
              "from 128 to 64K", ("figure3",), answers.best_sparse,
              "Reformer, Smyrf, Performer, local attention, ... are not here"),
        Claim("Times in each setting, with and without dropout, padding and a mask",
              f"{FA}, appendix E, Tables 8 to 21", "a table for each setting",
              ("figure3",), answers.ranges, SETTINGS + "; its cells are not compared one by one"),
        Claim("Faster than standard attention, where Rabe and Staats' is as fast or slower",
              f"{FA}, appendix B.5", "2-4x", ("figure3",), answers.rabe_staats,
              "theirs is written in CuPy here; the first number is above"),
        Claim("Attention over several GPUs", f"{FA}, section 5, appendix D.2", "4-8 GPUs of a node", ("ring",),
              answers.several_gpus),
    ],
    "Memory and bytes": [
        Claim("Memory beyond inputs and output is linear; N²d FLOPs", f"{FA}, Theorem 1, appendix B", "O(N)",
              ("costs",), answers.linear_memory),
        Claim("Also with padding and dropout, by sequence", f"{FA}, section 4.3, Figure 3", "linear", ("figure3",),
              answers.memory_growth),
        Claim("Less memory than exact attention", f"{FA}, section 4.3, Figure 3", "up to 20x", ("figure3",),
              answers.memory_of(answers.STANDARD)),
        Claim("Less memory than Linformer", f"{FA}, section 4.3, Figure 3", "2x, at 64K", ("figure3",),
              answers.memory_of("linformer")),
        Claim("All but Linformer run out of memory before 64K", f"{FA}, section 4.3, Figure 3", "64K", ("figure3",),
              answers.who_reaches_the_end, SETTINGS),
        Claim("Block-sparse attention takes as much memory as dense", f"{FA}, section 4.3, Figure 3", "the same",
              ("figure3",), answers.memory_of("block-sparse")),
        Claim("Less memory than Rabe and Staats', who keep a copy of the output for each of K blocks",
              f"{FA}, appendix B.5", "1 copy, not K", ("figure3",), answers.memory_of("rabe-staats")),
        Claim("All of forward is one kernel", f"{FA}, section 3.1", "one CUDA kernel", (), worked_examples.kernels),
        Claim("Dropout needs no N x N mask", f"{FA}, appendix B.4", "O(N)", ("figure3",), answers.dropout_memory),
        Claim("Fewer accesses to memory", f"{FA}, section 1, Figure 2", "up to 9x", ("figure2",), answers.fewer_bytes),
        Claim("More FLOPs, fewer bytes, less time", f"{FA}, section 3.2, Figure 2 left", "faster with more FLOPs",
              ("figure2",), answers.bytes_decide),
        Claim("Accesses to slow memory are N²d²/M, not Nd + N²", f"{FA}, Theorem 2", "Θ(N²d²/M)", ("figure2",),
              answers.bytes_by_block, "on this GPU the slow memory is the L2 cache, see io_model.py"),
        Claim("In the backward pass, too", f"{FA}, Theorem 5", "Θ(N²d²/M)", ("figure2",), answers.bytes_decide,
              "both passes together, compared with the standard formula"),
        Claim("No exact algorithm has fewer for all M", f"{FA}, Proposition 3", "Ω(N²d²/M)",
              why_not="a proof, nothing to measure"),
        Claim("Larger blocks are faster, until something else is slow", f"{FA}, section 3.2, Figure 2 middle",
              "up to 256", ("figure2",), answers.block_sizes, "blocks are of queries here"),
        Claim("Time falls with the share of visible blocks", f"{FA}, Proposition 4, Figure 2 right",
              "in proportion to s", ("figure2",), answers.by_sparsity),
        Claim("With a share of N^-1/2 or log N / N it is not quadratic", f"{FA}, section 3.3", "N√N or N log N",
              ("figure3",), answers.sparse_growth),
        Claim("An A100's memories, and d² far below M", f"{FA}, sections 2.1 and 3.2",
              "108 multiprocessors, 192KB each at 19TB/s; 40-80GB at 1.5-2.0TB/s; d 64-128, M 100KB", ("decoding",),
              answers.this_gpu, "no A100 here"),
    ],
    "Theory and Practice": [
        Claim("The matrix of scores is large, in FP32", f"{CHAPTER}, “The Problem”",
              "64 MB per head at 4096, 4 GB at 32768; 2 GB and 128 GB for 32 heads", ("costs",), answers.matrix_bytes,
              "its introduction's 32 GB for 32 heads at 32,768 is a quarter of what it counts later"),
        Claim("Without it", f"{CHAPTER}, “Memory Analysis”", "8 MB per head at 32768, 500x less", ("costs",),
              answers.matrix_saved, "float32, head_dim 64, gradients included; the claim is of half precision and 128"),
        Claim("The standard algorithm moves scores four times", f"{CHAPTER}, “The Problem”",
              "16 n² bytes, 256 MB per head at 4096; 1.3 ms at 200 GB/s", ("figure2",), answers.standard_bytes,
              "half precision on a GPU; the claim is of forward in FP32"),
        Claim("The result is exactly the same, bit for bit", f"{CHAPTER}, introduction", "bit for bit",
              ("accuracy",), answers.exact, "not bit for bit: sums have another order"),
        Claim("Online softmax of 2, 5, 1, 4", f"{CHAPTER}, “Online Softmax”", "[0.0347, 0.6964, 0.0128, 0.2562]",
              (), worked_examples.online_softmax),
        Claim("Online attention on three keys", f"{CHAPTER}, “Online Softmax with Running Output Correction”",
              "[0.4421, 0.5579]", (), worked_examples.online_attention),
        Claim("The first tile of six queries, causal", f"{CHAPTER}, “A Complete Numerical Example”",
              "[1.0, 0.0], [0.449, 0.551]", (), worked_examples.tiles),
        Claim("Scores beyond what exp knows do no harm", f"{CHAPTER}, “Numerical Stability”",
              "exp(90) = inf, exp(85 - 90) = 0.0067", (), worked_examples.large_scores),
        Claim("Tiles that a causal mask hides are skipped", f"{CHAPTER}, “The Full Algorithm”",
              "6 of 16 tiles, as drawn", ("speed",), answers.causal_share),
        Claim("SRAM and registers of a tile", f"{CHAPTER}, “Memory Analysis”", "28 KB and 16 KB",
              why_not="tiles of Apple's GPUs; numbattn has no kernels for them"),
        Claim("The best tiles", f"{CHAPTER}, “Tile Size Selection”", "32 or 64 queries", ("figure2",),
              answers.block_sizes, "those are of Apple's GPUs"),
        Claim("Prefill is bound by computation", f"{CHAPTER}, “Memory Bandwidth vs Compute”", "32.75 FLOPs/byte",
              ("figure2",), answers.intensity, "DRAM, both passes; the claim counts a tile's loads"),
        Claim("Decoding is bound by bandwidth", f"{CHAPTER}, “Memory Bandwidth vs Compute”",
              "1 FLOP/byte; 2 MB per head at 4096, 0.32 ms for 32 heads at 200 GB/s", ("decoding",),
              answers.decoding_rate),
        Claim("Tiles of keys in parallel, merged in the end", f"{CHAPTER}, “FlashDecoding”", "32 or 64 keys",
              ("decoding",), answers.chunks_merged),
        Claim("Heads of a group share loads of K and V", f"{CHAPTER}, “GQA Handling”", "32 heads on 8", ("decoding",),
              answers.grouped_heads),
        Claim("Long contexts are practical", f"{CHAPTER}, summary", "128K", ("decoding",), answers.longest_cache),
        Claim("A tree of nine draft tokens", f"{CHAPTER}, “Tree Masking”", "a 9 x 9 mask, D sees A and B but not C",
              (), worked_examples.tree_of_tokens),
        Claim("A mask as bits", f"{CHAPTER}, “Tree Masking”", "8 KB for n=256", (), worked_examples.bits_of_a_mask),
    ],
    "Triton notes": [
        Claim("Backward in one CUDA kernel computes S once, in Triton's two twice", f"{NOTES}, “Triton vs. CUDA”",
              "10 N²d and 12 N²d FLOPs", ("figure2", "speed", "deterministic"), answers.one_backward_kernel,
              "the second kernel, for dQ, is that of deterministic=True"),
        Claim("Exponentials to base 2, of scores times log2(e)", f"{NOTES}, “Base-2 Exponential”", "1.442695", (),
              worked_examples.base_two, "all CUDA kernels use exp2; the gain over exp was not measured"),
        Claim("Padding that is not masked adds 1 to the sum, and overflows to NaN", f"{NOTES}, “NaN Hazard”",
              "2^0 = 1; 2^20 · 0 = NaN", (), worked_examples.padding),
        Claim("D as sums of O and dO needs no N x N matrix", f"{NOTES}, “The O(N) Preprocessing Trick”", "O(N)",
              ("costs",), answers.linear_memory),
    ],
}  # fmt: skip
SOURCES = """Numbers that texts on FlashAttention give, and what this page says of them. “paper” is Dao et al. 2022,
[arXiv 2205.14135](https://arxiv.org/abs/2205.14135); “chapter” is “FlashAttention: Theory and Practice”, of a book on
inference on Apple's GPUs; “notes” are on a FlashAttention in Triton. The paper measured on A100s; the linked sections
say what was measured here. “computed”: by numbattn on a CPU, or by its planner, when this page is made."""


# -------------------------------------------------------------------------------------------------------------- table
def listed():
    return [claim for claims in CLAIMS.values() for claim in claims]


def section(results, links):
    """Markdown: a table for each group; `links` are the links to runs."""
    groups = [f"### {title}\n\n{table(claims, results, links)}" for title, claims in CLAIMS.items()]
    return "\n\n".join([SOURCES, *groups])


def table(claims, results, links):
    rows = [("claim", "where", "claimed", "reproduced", "how, or why not"), ("---",) * 5]
    for claim in claims:
        how = [", ".join(links[name] for name in claim.runs) or ("computed" if claim.found else ""), claim.why_not]
        rows.append((claim.text, claim.source, claim.claimed, reproduced(claim, results), "; ".join(filter(None, how))))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def reproduced(claim, results):
    if claim.found is None:
        return "no"
    if not results.keys() >= {*claim.runs}:
        return NOT_MEASURED
    return claim.found(*(results[name] for name in claim.runs)) or NOT_MEASURED
