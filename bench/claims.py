"""What papers claim about FlashAttention, with a number, beside what this machine has measured.

A claim names the runs of report.py that answer it, and a function from their results to the number found, as text, or
None where a peer that it needs has not run. Few need no run: their function computes them. `why_not` says what is not
reproduced, and why.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from pictures.basics import OURS, bandwidth_of, geometric_mean, label_of, select, span, values
from pictures.paper import TO_MULTIPROCESSORS, bytes_of
from pictures.training import SMOOTHED, TASKS, smoothed, tokens_per_second

NOT_MEASURED = "not measured on this machine"
STANDARD = "standard"


class Claim(NamedTuple):
    text: str
    source: str
    claimed: str
    runs: tuple[str, ...] = ()
    found: Callable | None = None
    why_not: str = ""


def times(ratios, what="as fast", digits=1):
    """As "2.1 to 3.4 times as fast, at 128 to 2048", of ratios by seqlen; None of none."""
    if not ratios:
        return None
    return f"{span(ratios.values(), digits)} times {what}, at {span(ratios, 0)}"


def the(peer):
    """Its name in a sentence."""
    return "the " * (peer == STANDARD) + label_of(peer).removeprefix("numbattn, ")


# ---------------------------------------------------------------------------------------------------------- training
def trainings(training):
    return {(x["attention"], x["context"]): x for x in training["records"] if not x["failed"]}


def faster_training(training):
    """Beside the standard formula, at each context."""
    ran = trainings(training)
    found = [f"{tokens_per_second(ran[OURS, n]) / tokens_per_second(ran[STANDARD, n]):.1f} at {n}"
             for n in values(training["records"], "context") if {(OURS, n), (STANDARD, n)} <= ran.keys()]  # fmt: skip
    return f"times as fast: {', '.join(found)}" if found else None


def longer_contexts(training):
    """Beside the standard formula at the shortest context."""
    ran, contexts = trainings(training), values(training["records"], "context")
    base = ran.get((STANDARD, contexts[0]))
    found = [f"{tokens_per_second(ran[OURS, n]) / tokens_per_second(base):.1f} at {n}"
             for n in contexts if base and (OURS, n) in ran]  # fmt: skip
    return f"times as fast: {', '.join(found)}" if found else None


def same_losses(training):
    ran, apart = trainings(training), []
    for n in values(training["records"], "context"):
        if {(OURS, n), (STANDARD, n)} <= ran.keys():
            pairs = zip(ran[OURS, n]["losses"], ran[STANDARD, n]["losses"])  # of the steps that both have made
            apart.append(abs(smoothed([ours - standard for ours, standard in pairs])).max())
    return f"means of {SMOOTHED} losses are at most {max(apart):.4f} bits per byte apart" if apart else None


def held_out_losses(training):
    ran = trainings(training)
    found = [f"{record['validation']:.3f} at {n}" for (name, n), record in sorted(ran.items()) if name == OURS]
    return f"bits per byte: {', '.join(found)}" if found else None


# ------------------------------------------------------------------------------------------------------- long inputs
def task_times(long_range):
    """Of a step with the standard formula over one with numbattn, by task."""
    found = {}
    for record in select(long_range["records"], part="tasks", failed=None):
        found.setdefault(record["seqlen"], {})[record["attention"]] = record["seconds"]
    return times({n: x[STANDARD] / x[OURS] for n, x in found.items() if {OURS, STANDARD} <= x.keys()})


def sparse_steps(long_range):
    """Of images as long as the tasks of the Long Range Arena."""
    ran = steps_of(long_range)
    return times({n: ran[STANDARD, n]["seconds"] / ran["block-sparse", n]["seconds"]
                  for n in (32 * 32, 64 * 64) if {(STANDARD, n), ("block-sparse", n)} <= ran.keys()})  # fmt: skip


def steps_of(long_range):
    records = select(long_range["records"], part="steps", failed=None)
    return {(x["attention"], x["seqlen"]): x for x in records}


def task_accuracies(long_range):
    """Of numbattn and of the standard formula after as many seconds."""
    found = {}
    for record in select(long_range["records"], part="tasks", failed=None):
        found.setdefault(record["task"], {})[record["attention"]] = 100 * record["curve"][-1][2]
    told = ", ".join(f"{TASKS[task]} {x[OURS]:.1f} / {x[STANDARD]:.1f}%" for task, x in found.items()
                     if {OURS, STANDARD} <= x.keys())  # fmt: skip
    return f"{told}, numbattn / the standard formula" if told else None


def steps_at(side):
    """A function: seconds and memory of a step on images of side x side pixels."""

    def found(long_range):
        told = [f"{label_of(name)} {1e3 * x['seconds']:.0f} ms, {x['bytes'] / 1e9:.1f} GB"
                for (name, n), x in steps_of(long_range).items() if n == side * side]  # fmt: skip
        return f"a step: {'; '.join(told)}" if told else None

    return found


def longer_documents(documents):
    records = sorted(select(documents["records"], part="documents", failed=None), key=lambda x: x["seqlen"])
    accuracies = {x["seqlen"]: 100 * x["curve"][-1][2] for x in records}
    if not accuracies:
        return None
    shortest, best = next(iter(accuracies)), max(accuracies, key=accuracies.get)
    low, high = accuracies[shortest], accuracies[best]
    return f"accuracy {low:.1f}% at {shortest} bytes, at most {high:.1f}% at {best}: {high - low:.1f} points"


# ------------------------------------------------------------------------------------------------------------ figure 2
def left(figure2):
    """The records of numbattn and of the standard formula."""
    found = {x["peer"]: x for x in select(figure2["records"], part="left")}
    return found["flash"], found[STANDARD]


def work(figure2):
    """FLOPs, bytes and time over the standard formula's, and what the bytes are."""
    ours, standard = left(figure2)
    nbytes, kind = bytes_of(left(figure2))
    timed = ours["seconds"] and standard["seconds"]
    return {"FLOPs": ours["predicted"]["flops"] / standard["predicted"]["flops"], "bytes": nbytes[0] / nbytes[1],
            "time": timed and ours["seconds"] / standard["seconds"]}, kind  # fmt: skip


def fewer_bytes(figure2):
    shares, kind = work(figure2)
    return f"{1 / shares['bytes']:.1f} times fewer bytes of DRAM ({kind})"


def bytes_decide(figure2):
    shares, kind = work(figure2)
    told = ", ".join(f"{share:.2f} of the {name}" for name, share in shares.items() if share)
    return f"{told} (bytes {kind})"


def faster_attention(figure2):
    share = work(figure2)[0]["time"]
    return share and f"{1 / share:.1f} times as fast, forward and backward"


def block_sizes(figure2):
    """Which is the fastest of the kernel for any GPU."""
    records = [x for x in select(figure2["records"], part="block-size", unit="mma") if x["seconds"]]
    if not records:
        return None
    first, best = records[0], min(records, key=lambda x: x["seconds"])
    return (f"the kernel for any GPU is fastest at {best['tile_m']}, {first['seconds'] / best['seconds']:.1f} times as "
            f"fast as at {first['tile_m']}")  # fmt: skip


def bytes_by_block(figure2):
    """From L2 to the multiprocessors, from the smallest to the largest block."""
    records = select(figure2["records"], part="block-size", unit="mma")
    (most, *_, fewest), kind = bytes_of(records, *TO_MULTIPROCESSORS)
    larger = records[-1]["tile_m"] // records[0]["tile_m"]
    return f"{most / fewest:.1f} times fewer bytes with blocks {larger} times as large ({kind})"


def by_sparsity(figure2):
    """Time over that of dense attention times the visible share."""
    ratios = [x["seconds"] / x["ideal"] for x in figure2["records"] if x.get("ideal") and x["seconds"]]
    return ratios and f"{span(ratios)} times the visible share of the dense time"


def intensity(figure2):
    ours, _ = left(figure2)
    (nbytes,), kind = bytes_of([ours])
    return f"{ours['predicted']['flops'] / nbytes:.0f} FLOP for a byte of DRAM ({kind})"


def standard_bytes(figure2):
    """Of DRAM, for a pair of a query and a key."""
    _, standard = left(figure2)
    (nbytes,), kind = bytes_of([standard])
    batch, heads, seqlen, _ = standard["shape"]
    return f"{nbytes / (batch * heads * seqlen**2):.0f} n² bytes, forward and backward ({kind})"


def backward_flops(figure2):
    """Of both passes without the 4 of forward, in N^2 d."""
    ours, _ = left(figure2)
    batch, heads, seqlen, head_dim = ours["shape"]
    return f"{ours['predicted']['flops'] / (batch * heads * seqlen**2 * head_dim) - 4:.0f} N²d"


# ------------------------------------------------------------------------------------------------------------ figure 3
def settings_of(figure3):
    """The paper's first: with dropout and padding."""
    return list(dict.fromkeys(x["setting"] for x in figure3["records"]))


def curves(figure3, setting=None):
    """The records that ran in a setting, by default the first, by peer and seqlen."""
    records = select(figure3["records"], setting=setting or settings_of(figure3)[0], failed=None)
    return {(x["peer"], x["seqlen"]): x for x in records}


def milliseconds(record):
    return 1e3 * record["seconds"]["both"]


def nbytes(record):
    return record["bytes"]


def over(figure3, peer, other, value, longest=math.inf, setting=None):
    """Of one peer over the other, by seqlen."""
    ran = curves(figure3, setting)
    return {n: value(x) / value(ran[other, n]) for (name, n), x in ran.items()
            if name == peer and (other, n) in ran and n <= longest}  # fmt: skip


def faster_than_standard(figure3):
    """Beside the formula in CuPy, and in PyTorch where that has run."""
    in_cupy, in_torch = (over(figure3, peer, OURS, milliseconds, 2048) for peer in (STANDARD, "math"))
    told = f", {span(in_torch.values(), 1)} times as fast as in PyTorch" if in_torch else ""
    return times(in_cupy, f"as fast as in CuPy{told}")


def overtaken(figure3):
    """From which length on an approximation is faster, to the longest. Linear attention knows no dropout."""
    told = []
    for name, setting in (("linformer", None), ("linear", "none")):
        ratios = over(figure3, OURS, name, milliseconds, setting=setting)
        slower = max((n for n, ratio in ratios.items() if ratio < 1), default=0)
        after = [n for n in ratios if n > slower]
        if ratios:
            told.append(f"{label_of(name)} {f'from {min(after)} on' if after else f'at no length up to {slower}'}")
    return "; ".join(told) or None


def longest(figure3):
    return max(n for name, n in curves(figure3) if name == OURS)


def won(figure3, best, value, short=math.inf):
    """At how many of the lengths up to `short` it is better than all others; block-sparse is nobody's rival."""
    ran = curves(figure3)
    lengths = [n for name, n in ran if name == best and n <= short]
    rivals = {n: [value(x) for (name, m), x in ran.items() if m == n and name not in (best, "block-sparse")]
              for n in lengths}  # fmt: skip
    return f"{sum(value(ran[best, n]) <= min(rivals[n], default=math.inf) for n in lengths)} of {len(lengths)} lengths"


def best_when_short(figure3):
    return f"fastest at {won(figure3, OURS, milliseconds, 512)}, least memory at {won(figure3, OURS, nbytes, 512)}"


def best_sparse(figure3):
    return f"faster than all others at {won(figure3, 'block-sparse', milliseconds)}"


def sparse_over_dense(figure3):
    ratios = over(figure3, OURS, "block-sparse", milliseconds)
    return times(ratios) and f"{times(ratios)}; the most at {max(ratios, key=ratios.get)}"


def scales_to(figure3):
    n = longest(figure3)
    record = curves(figure3)[OURS, n]
    return f"{milliseconds(record):.3g} ms at {n}, batch {record['batch']}"


def memory_of(peer):
    """A function: over numbattn's."""
    return lambda figure3: times(over(figure3, peer, OURS, nbytes), f"as much for {the(peer)}")


def memory_growth(figure3):
    return f"bytes of a batch's sequence grow as seqlen^{growth(figure3, OURS, nbytes):.2f}"


def growth(figure3, name, value):
    """The exponent of seqlen from the last but one to the longest, of one element of the batch."""
    found = sorted((n, value(x) / x["batch"]) for (peer, n), x in curves(figure3).items() if peer == name)
    (n, first), (m, last) = found[-2:]
    return math.log(last / first) / math.log(m / n)


def time_growth(figure3):
    """Of those that ran at two lengths."""
    lengths = Counter(name for name, _ in curves(figure3))
    told = [f"{the(name)} {growth(figure3, name, milliseconds):.2f}"
            for name in (OURS, "linformer") if lengths[name] > 1]  # fmt: skip
    return f"as seqlen to the power of: {', '.join(told)}" if told else None


def sparse_growth(figure3):
    return f"time of the butterfly grows as seqlen^{growth(figure3, 'block-sparse', milliseconds):.2f}"


def who_reaches_the_end(figure3):
    n = longest(figure3)
    there = [label_of(name).removeprefix("numbattn, ") for name, m in curves(figure3) if m == n]
    return f"at {n} run: {', '.join(there)}"


def rabe_staats(figure3):
    ratios = over(figure3, "rabe-staats", STANDARD, milliseconds)
    return times(ratios, "as long for Rabe and Staats as for the standard formula", 2)


def ranges(figure3):
    told = []
    for setting in settings_of(figure3):
        if ran := sorted((n, milliseconds(x)) for (name, n), x in curves(figure3, setting).items() if name == OURS):
            named = setting.replace("none", "plain").replace("+", ", ")
            told.append(f"{named} {ran[0][1]:.2g} to {ran[-1][1]:.3g} ms")
    return "; ".join(told)


def dropout_memory(figure3):
    dropping, plain = (curves(figure3, setting) for setting in ("dropout+padding", "none"))
    ratios = {n: x["bytes"] / plain[name, n]["bytes"] for (name, n), x in dropping.items()
              if name == OURS and (name, n) in plain}  # fmt: skip
    return times(ratios, "the bytes without", 2)


# --------------------------------------------------------------------------------------------------------- other runs
def linear_memory(costs):
    """From the last but one to the longest."""
    before, last = costs["memory"][-2:]
    exponent = math.log(last["bytes"][OURS] / before["bytes"][OURS]) / math.log(last["seqlen"] / before["seqlen"])
    return f"seqlen^{exponent:.2f}; {last['bytes'][OURS] / 1e6:.0f} MB at {last['seqlen']}, {last['heads']} heads"


def matrix_bytes(costs):
    """Of the standard formula, for a head."""
    records = [x for x in costs["memory"] if "cupy" in x["bytes"]]
    if not records:
        return None
    record = records[-1]
    share, whole = record["bytes"]["cupy"] / record["heads"], 4 * record["seqlen"] ** 2
    return f"{share / 1e6:.0f} MB for a head at {record['seqlen']}, {share / whole:.1f} matrices, forward and backward"


def matrix_saved(costs):
    record = costs["memory"][-1]
    share, whole = record["bytes"][OURS] / record["heads"], 4 * record["seqlen"] ** 2
    return (f"{share / 1e6:.0f} MB for a head at {record['seqlen']}, forward and backward, 1/{whole / share:.0f} of a "
            "matrix")  # fmt: skip


def exact(accuracy):
    """RMS errors, and over the standard formula's."""
    records = select(accuracy["accuracy"], dtype="float32")
    if not records:
        return None
    ratios = [x["errors"][OURS][0] / x["errors"]["cupy"][0] for x in records if "cupy" in x["errors"]]
    told = f"RMS error {max(x['errors'][OURS][0] for x in records):.0e} in float32"
    return f"{told}, {span(ratios)} times the standard formula's" if ratios else told


def causal_share(speed):
    """Of the time without a mask."""
    found = {(x["head_dim"], x["seqlen"], x["pass"], x["causal"]): x["seconds"].get(OURS) for x in speed["speed"]}
    seqlen = max(values(speed["speed"], "seqlen"))
    shares = [x / found[d, n, of, False] for (d, n, of, causal), x in found.items()
              if causal and n == seqlen and x and found.get((d, n, of, False))]  # fmt: skip
    return f"{span(shares)} of the time without a mask, at {seqlen}" if shares else None


def decoding_rate(decoding):
    rate, bandwidth = max(x["TB/s"].get(OURS, 0) for x in decoding["records"]), bandwidth_of(decoding["machine"]["gpu"])
    return f"{rate:.1f} TB/s of K and V" + (f", {rate / bandwidth:.0%} of the data sheet's" if bandwidth else "")


def grouped_heads(decoding):
    """Rates count K and V once for all heads of a group."""
    return f"32 heads on {decoding['options']['heads_k']} of keys: {decoding_rate(decoding)}, each read once"


def longest_cache(decoding):
    record = max(decoding["records"], key=lambda x: x["keys"])
    size = 2 * record["batch"] * decoding["options"]["heads_k"] * record["keys"] * record["head_dim"] * 2
    return f"{size / record['TB/s'][OURS] / 1e6:.0f} microseconds for a query on {record['keys']} keys"


def this_gpu(decoding):
    gpu = decoding["machine"]["gpu"]
    return f"{gpu['name']}: {gpu['multiprocessors']} multiprocessors, {decoding_rate(decoding)}"


def chunks_merged(decoding):
    """Beside the fastest other."""
    ratios = [x["TB/s"][OURS] / max(others) for x in decoding["records"] if OURS in x["TB/s"]
              and (others := [x["TB/s"][name] for name in ("cudnn", "flash") if name in x["TB/s"]])]  # fmt: skip
    rate = decoding_rate(decoding)
    return f"{rate}; {geometric_mean(ratios):.2f} times the fastest other's" if ratios else rate


def several_gpus(ring):
    """Of the longest sequence, where devices computed at once."""
    n = max(values(ring["speed"], "seqlen"))
    records = select(ring["speed"], seqlen=n)
    devices = records[0]["at once"]
    shares = [record["of devices"] for record in records]
    return f"{span(shares)} of {devices} times one GPU's speed, at {n}" if devices > 1 else None


def one_backward_kernel(figure2, speed, deterministic):
    """Its FLOPs, and the speed of two kernels over its own."""
    one, two = ({(x["head_dim"], x["seqlen"], x["causal"]): x["tflops"].get(OURS)
                 for x in select(run["speed"], **{"pass": "backward"})} for run in (speed, deterministic))  # fmt: skip
    ratios = [two[case] / one[case] for case in two if two[case] and one.get(case)]
    told = f"; with a second kernel {span(ratios)} of the speed" if ratios else ""
    return backward_flops(figure2) + told


# --------------------------------------------------------------------------------------------------- worked examples
def attend(q, k, v, **options):
    """numbattn's attention of one head on the CPU, with scores q k^T."""
    import numbattn as na

    width = max(len(v[0]), len(k[0]))
    q, k, v = (np.pad(np.asarray(x, np.float32), [(0, 0), (0, width - len(x[0]))])[None, None] for x in (q, k, v))
    return na.attention(q, k, v, **{"scale": 1.0, **options})[0, 0]


def printed(row, digits=4):
    return f"[{', '.join(f'{x:.{digits}f}' for x in row)}]"


def online_softmax():
    return printed(attend([[1]], [[2], [5], [1], [4]], np.eye(4))[0])


def online_attention():
    return printed(attend([[1, 0]], [[0.5, 0.3], [0.8, -0.2], [0.1, 0.7]], [[1, 0], [0, 1], [0.5, 0.5]])[0, :2])


def tiles():
    import numbattn as na

    q, k, v = [[1, 0.5], [0.8, -0.1]], [[0.3, 0.7], [0.6, 0.2]], [[1, 0], [0, 1]]
    return ", ".join(printed(row[:2], 3) for row in attend(q, k, v, mask=na.Causal(), scale=2**-0.5))


def large_scores():
    """The weight of a score of 85 beside one of 90, over that one's."""
    first, second = attend([[1]], [[90], [85]], np.eye(2))[0]
    return f"{second / first:.4f}"


def padding():
    """The largest difference that NaN beyond the keys makes."""
    import numbattn as na

    k, v = np.random.default_rng(0).standard_normal((2, 5, 4), np.float32)
    expected = attend(k[:1], k[:3], v[:3])
    k[3:] = v[3:] = math.nan
    found = attend(k[:1], k, v, mask=na.Lengths(np.array([[3]])))
    return f"a difference of {abs(found - expected).max():.0f} with NaN in the padding"


def tree_of_tokens():
    import numbattn as na

    visible = na.Bits.tree([-1, 0, 1, 1, 2, 2, 3, 3, 4]).dense(9, 9)
    seen = ", ".join(letter for letter, sees in zip("ABCDEFGHI", visible[3]) if sees)
    return f"{visible.sum()} of {visible.size} pairs are visible; D sees {seen}"


def kernels():
    import io_model

    return f"{len(io_model.flash_bytes(io_model.Shape(64, 16, 1024, 64), 'forward'))} kernel, planned for Hopper"


def bits_of_a_mask():
    import numbattn as na

    return f"{na.Bits.tree(np.arange(256) - 1).words.nbytes / 1024:.0f} KB"


def base_two():
    return f"{math.log2(math.e):.6f}"


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
              "small 3.5x, 2.7 for 9.5 days; medium 3.0x, 6.9 for 21.0 days", ("training",), faster_training,
              "GPT-2 small's size beside the standard formula in CuPy, for minutes; the days on 8 A100 were not run"),
        Claim("and faster than Megatron-LM's", f"{FA}, section 4.1, Table 2",
              "1.7x, 2.7 for 4.7 days; medium 1.8x, 6.9 for 11.5 days",
              why_not="needs Megatron-LM, whose fused kernels are not here"),
        Claim("The perplexity is the same, the curves are, too", f"{FA}, section 4.1, Table 2",
              "18.2 and 18.2; medium 14.3 and 14.2", ("training",), same_losses,
              "losses on bytes after some hundred steps; OpenWebText " + DATA),
        Claim("At four times the context still faster than Megatron-LM at 1k", f"{FA}, section 4.2, Table 4",
              "30%; 1.7x, 1.6x and 1.3x at 1k, 2k and 4k; 2.7, 3.0 and 3.6 days", ("training",), longer_contexts,
              "beside the standard formula, not Megatron-LM"),
        Claim("Longer contexts give a better perplexity", f"{FA}, abstract, section 4.2, Table 4",
              "0.7 better; 18.2, 17.6 and 17.5 at 1k, 2k and 4k", ("training",), held_out_losses,
              "held-out bytes after some hundred steps; OpenWebText " + DATA),
    ],
    "Long inputs": [
        Claim("The Long Range Arena trains faster", f"{FA}, abstract, section 4.1, Table 3", "2.4x", ("long_range",),
              task_times, "two of its five tasks, which generators make"),
        Claim("and with block-sparse attention", f"{FA}, section 3.3, Table 3", "2.8x", ("long_range",), sparse_steps),
        Claim("Its accuracies are the standard Transformer's", f"{FA}, Table 3",
              "59.8 and 59.3 on average; ListOps 37.6 and 36.0, Pathfinder 72.7 and 72.7; block-sparse 59.6",
              ("long_range",), task_accuracies, "minutes of training; Text, Retrieval and Image need their data sets"),
        Claim("Approximations are slower or less exact", f"{FA}, Table 3",
              "1.3x to 2.5x, 54.9 to 59.6 on average", why_not="models with Performer, Reformer, Smyrf, local "
              "attention, ... are not here; the time of Linformer's and linear attention alone is in Figure 3"),
        Claim("Longer documents are classified better", f"{FA}, abstract, section 4.2, Table 5",
              "6.4 points; MIMIC-III 52.8 at 512 to 57.1 at 16384 (4.3), ECtHR 72.2 to 80.7 at 8192 (8.5)",
              ("documents",), longer_documents, "other texts, from random weights; MIMIC-III and ECtHR are not here, "
              "nor is a pretrained RoBERTa"),
        Claim("Those documents are long", f"{FA}, section 4.2",
              "2,395 tokens, at most 14,562, and 2,197, at most 49,392", why_not="MIMIC-III and ECtHR are not here"),
        Claim("The first Transformer above chance on Path-X, 16K pixels", f"{FA}, abstract, section 4.2, Table 6",
              "61.4%; block-sparse 56.0", ("long_range",), steps_at(128),
              "a step runs; nothing was pretrained on Path-64 and trained to this accuracy"),
        Claim("and on Path-256, 64K pixels", f"{FA}, abstract, section 4.2, Table 6", "63.1%, block-sparse",
              ("long_range",), steps_at(256), "a step runs; nothing was trained to this accuracy"),
    ],
    "Speed of attention": [
        Claim("Attention of GPT-2 is faster than the standard", f"{FA}, section 1, Figure 1", "up to 7.6x",
              ("figure2",), faster_attention),
        Claim("Faster than standard attention from 128 to 2K", f"{FA}, sections 1 and 4.3, Figure 3", "up to 3x",
              ("figure3",), faster_than_standard),
        Claim("It scales to 64K", f"{FA}, sections 1 and 4.3, Figure 3", "64K", ("figure3",), scales_to),
        Claim("Up to 512 nothing is as fast, or takes as little memory", f"{FA}, sections 1 and 4.3", "512",
              ("figure3",), best_when_short, "its descendants in torch are among the others here"),
        Claim("Approximations are faster from lengths on", f"{FA}, sections 1 and 4.3", "between 512 and 1024",
              ("figure3",), overtaken,
              "linear attention without dropout and padding, which it does not know"),
        Claim("Time grows quadratically, of many approximations linearly", f"{FA}, section 4.3", "quadratic, linear",
              ("figure3",), time_growth),
        Claim("Block-sparse attention is faster than dense", f"{FA}, section 1", "2-4x, up to 64k", ("figure3",),
              sparse_over_dense),
        Claim("and than all exact, sparse and approximate ones at all lengths", f"{FA}, section 4.3", "from 128 to 64K",
              ("figure3",), best_sparse, "Reformer, Smyrf, Performer, local attention, ... are not here"),
        Claim("Times in each setting, with and without dropout, padding and a mask",
              f"{FA}, appendix E, Tables 8 to 21", "a table for each setting",
              ("figure3",), ranges, SETTINGS + "; its cells are not compared one by one"),
        Claim("Faster than standard attention, where Rabe and Staats' is as fast or slower",
              f"{FA}, appendix B.5", "2-4x", ("figure3",), rabe_staats,
              "theirs is written in CuPy here; the first number is above"),
        Claim("Attention over several GPUs", f"{FA}, section 5, appendix D.2", "4-8 GPUs of a node", ("ring",),
              several_gpus, "more than two were not measured"),
    ],
    "Memory and bytes": [
        Claim("Memory beyond inputs and output is linear; N²d FLOPs", f"{FA}, Theorem 1, appendix B", "O(N)",
              ("costs",), linear_memory),
        Claim("Also with padding and dropout, by sequence", f"{FA}, section 4.3, Figure 3", "linear", ("figure3",),
              memory_growth),
        Claim("Less memory than exact attention", f"{FA}, section 4.3, Figure 3", "up to 20x", ("figure3",),
              memory_of(STANDARD)),
        Claim("Less memory than Linformer", f"{FA}, section 4.3, Figure 3", "2x, at 64K", ("figure3",),
              memory_of("linformer")),
        Claim("All but Linformer run out of memory before 64K", f"{FA}, section 4.3, Figure 3", "64K", ("figure3",),
              who_reaches_the_end, SETTINGS),
        Claim("Block-sparse attention takes as much memory as dense", f"{FA}, section 4.3, Figure 3", "the same",
              ("figure3",), memory_of("block-sparse")),
        Claim("Less memory than Rabe and Staats', who keep a copy of the output for each of K blocks",
              f"{FA}, appendix B.5", "1 copy, not K", ("figure3",), memory_of("rabe-staats")),
        Claim("All of forward is one kernel", f"{FA}, section 3.1", "one CUDA kernel", (), kernels),
        Claim("Dropout needs no N x N mask", f"{FA}, appendix B.4", "O(N)", ("figure3",), dropout_memory),
        Claim("Fewer accesses to memory", f"{FA}, section 1, Figure 2", "up to 9x", ("figure2",), fewer_bytes),
        Claim("More FLOPs, fewer bytes, less time", f"{FA}, section 3.2, Figure 2 left", "faster with more FLOPs",
              ("figure2",), bytes_decide),
        Claim("Accesses to slow memory are N²d²/M, not Nd + N²", f"{FA}, Theorem 2", "Θ(N²d²/M)", ("figure2",),
              bytes_by_block, "on this GPU the slow memory is the L2 cache, see io_model.py"),
        Claim("In the backward pass, too", f"{FA}, Theorem 5", "Θ(N²d²/M)", ("figure2",), bytes_decide,
              "both passes together, beside the standard formula"),
        Claim("No exact algorithm has fewer for all M", f"{FA}, Proposition 3", "Ω(N²d²/M)",
              why_not="a proof, nothing to measure"),
        Claim("Larger blocks are faster, until something else is slow", f"{FA}, section 3.2, Figure 2 middle",
              "up to 256", ("figure2",), block_sizes, "blocks are of queries here"),
        Claim("Time falls with the share of visible blocks", f"{FA}, Proposition 4, Figure 2 right",
              "in proportion to s", ("figure2",), by_sparsity),
        Claim("With a share of N^-1/2 or log N / N it is not quadratic", f"{FA}, section 3.3", "N√N or N log N",
              ("figure3",), sparse_growth),
        Claim("An A100's memories, and d² far below M", f"{FA}, sections 2.1 and 3.2",
              "108 multiprocessors, 192KB each at 19TB/s; 40-80GB at 1.5-2.0TB/s; d 64-128, M 100KB", ("decoding",),
              this_gpu, "no A100 here; the kernels that it would run were tuned and measured on this GPU"),
    ],
    "Theory and Practice": [
        Claim("The matrix of scores is large, in FP32", f"{CHAPTER}, “The Problem”",
              "64 MB per head at 4096, 4 GB at 32768; 2 GB and 128 GB for 32 heads", ("costs",), matrix_bytes,
              "its introduction's 32 GB for 32 heads at 32,768 is a quarter of what it counts later"),
        Claim("Without it", f"{CHAPTER}, “Memory Analysis”", "8 MB per head at 32768, 500x less", ("costs",),
              matrix_saved, "float32, head_dim 64, gradients included; the claim is of half precision and 128"),
        Claim("The standard algorithm moves scores four times", f"{CHAPTER}, “The Problem”",
              "16 n² bytes, 256 MB per head at 4096; 1.3 ms at 200 GB/s", ("figure2",), standard_bytes,
              "half precision on a GPU; the claim is of forward in FP32"),
        Claim("The result is exactly the same, bit for bit", f"{CHAPTER}, introduction", "bit for bit",
              ("accuracy",), exact, "not bit for bit: sums have another order"),
        Claim("Online softmax of 2, 5, 1, 4", f"{CHAPTER}, “Online Softmax”", "[0.0347, 0.6964, 0.0128, 0.2562]",
              (), online_softmax),
        Claim("Online attention on three keys", f"{CHAPTER}, “Online Softmax with Running Output Correction”",
              "[0.4421, 0.5579]", (), online_attention),
        Claim("The first tile of six queries, causal", f"{CHAPTER}, “A Complete Numerical Example”",
              "[1.0, 0.0], [0.449, 0.551]", (), tiles),
        Claim("Scores beyond what exp knows do no harm", f"{CHAPTER}, “Numerical Stability”",
              "exp(90) = inf, exp(85 - 90) = 0.0067", (), large_scores),
        Claim("Tiles that a causal mask hides are skipped", f"{CHAPTER}, “The Full Algorithm”",
              "6 of 16 tiles, as drawn", ("speed",), causal_share),
        Claim("SRAM and registers of a tile", f"{CHAPTER}, “Memory Analysis”", "28 KB and 16 KB",
              why_not="tiles of Apple's GPUs; numbattn has no kernels for them"),
        Claim("The best tiles", f"{CHAPTER}, “Tile Size Selection”", "32 or 64 queries", ("figure2",), block_sizes,
              "those are of Apple's GPUs"),
        Claim("Prefill is bound by computation", f"{CHAPTER}, “Memory Bandwidth vs Compute”", "32.75 FLOPs/byte",
              ("figure2",), intensity, "DRAM, both passes; the claim counts a tile's loads"),
        Claim("Decoding is bound by bandwidth", f"{CHAPTER}, “Memory Bandwidth vs Compute”",
              "1 FLOP/byte; 2 MB per head at 4096, 0.32 ms for 32 heads at 200 GB/s", ("decoding",), decoding_rate),
        Claim("Tiles of keys in parallel, merged in the end", f"{CHAPTER}, “FlashDecoding”", "32 or 64 keys",
              ("decoding",), chunks_merged),
        Claim("Heads of a group share loads of K and V", f"{CHAPTER}, “GQA Handling”", "32 heads on 8", ("decoding",),
              grouped_heads),
        Claim("Long contexts are practical", f"{CHAPTER}, summary", "128K", ("decoding",), longest_cache),
        Claim("A tree of nine draft tokens", f"{CHAPTER}, “Tree Masking”", "a 9 x 9 mask, D sees A and B but not C",
              (), tree_of_tokens),
        Claim("A mask as bits", f"{CHAPTER}, “Tree Masking”", "8 KB for n=256", (), bits_of_a_mask),
    ],
    "Triton notes": [
        Claim("Backward in one CUDA kernel computes S once, in Triton's two twice", f"{NOTES}, “Triton vs. CUDA”",
              "10 N²d and 12 N²d FLOPs", ("figure2", "speed", "deterministic"), one_backward_kernel,
              "the second kernel, for dQ, is that of deterministic=True"),
        Claim("Exponentials to base 2, of scores times log2(e)", f"{NOTES}, “Base-2 Exponential”", "1.442695", (),
              base_two, "all CUDA kernels use exp2; the gain over exp was not measured"),
        Claim("Padding that is not masked adds 1 to the sum, and overflows to NaN", f"{NOTES}, “NaN Hazard”",
              "2^0 = 1; 2^20 · 0 = NaN", (), padding),
        Claim("D as sums of O and dO needs no N x N matrix", f"{NOTES}, “The O(N) Preprocessing Trick”", "O(N)",
              ("costs",), linear_memory),
    ],
}  # fmt: skip
SOURCES = """Numbers that texts on FlashAttention give, beside those of this page. “paper” is Dao et al. 2022, [arXiv
2205.14135](https://arxiv.org/abs/2205.14135); “chapter” is “FlashAttention: Theory and Practice”, of a book on
inference on Apple's GPUs; “notes” are on a FlashAttention in Triton. The paper measured on A100s; the linked sections
say what was measured here. “computed”: by numbattn on a CPU, or by its planner, when this page is made."""


# -------------------------------------------------------------------------------------------------------------- table
def listed():
    return [claim for claims in CLAIMS.values() for claim in claims]


def section(results, links):
    """Markdown: a table for each group; `links` are what to call a run."""
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
