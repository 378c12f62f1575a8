"""What results say about the claims: functions from the JSON of runs to a text, or None if a peer has not run."""

import math
from collections import Counter

from pictures.basics import OURS, bandwidth_of, geometric_mean, label_of, select, span, values

from paper.pictures.figures import TO_MULTIPROCESSORS, bytes_of
from paper.pictures.training import SMOOTHED, TASKS, is_learned, smoothed, tokens_per_second

STANDARD = "standard"


def times(ratios, what="as fast", digits=1):
    """Such as "2.1 to 3.4 times as fast, at 128 to 2048", from ratios by seqlen; None if there are none."""
    if not ratios:
        return None
    return f"{span(ratios.values(), digits)} times {what}, at {span(ratios, 0)}"


def the(peer):
    """A peer's name in a sentence."""
    return "the " * (peer == STANDARD) + label_of(peer).removeprefix("numbattn, ")


# ---------------------------------------------------------------------------------------------------------- training
def trainings(training):
    return {(x["attention"], x["context"]): x for x in training["records"] if not x["failed"]}


def faster_training(training):
    """Speed relative to the standard formula at each context."""
    ran = trainings(training)
    found = [f"{tokens_per_second(ran[OURS, n]) / tokens_per_second(ran[STANDARD, n]):.1f} at {n}"
             for n in values(training["records"], "context") if {(OURS, n), (STANDARD, n)} <= ran.keys()]  # fmt: skip
    return f"times as fast: {', '.join(found)}" if found else None


def longer_contexts(training):
    """Speed relative to the standard formula at the shortest context."""
    ran, contexts = trainings(training), values(training["records"], "context")
    base = ran.get((STANDARD, contexts[0]))
    found = [f"{tokens_per_second(ran[OURS, n]) / tokens_per_second(base):.1f} at {n}"
             for n in contexts if base and (OURS, n) in ran]  # fmt: skip
    return f"times as fast: {', '.join(found)}" if found else None


def same_losses(training):
    ran, apart = trainings(training), []
    for n in values(training["records"], "context"):
        if {(OURS, n), (STANDARD, n)} <= ran.keys():
            pairs = zip(ran[OURS, n]["losses"], ran[STANDARD, n]["losses"])  # for the steps that both have made
            apart.append(abs(smoothed([ours - standard for ours, standard in pairs])).max())
    return f"means of {SMOOTHED} losses are at most {max(apart):.4f} bits per byte apart" if apart else None


def held_out_losses(training):
    found = {n: record["validation"] for (name, n), record in sorted(trainings(training).items()) if name == OURS}
    told = ", ".join(f"{loss:.3f} at {n}" for n, loss in found.items())
    return f"bits per byte: {told}; best at {min(found, key=found.get)}" if found else None


# ------------------------------------------------------------------------------------------------------- long inputs
def task_times(long_range):
    """Time of a step with the standard formula over one with numbattn, by task."""
    found = {}
    for record in select(long_range["records"], part="tasks", failed=None):
        found.setdefault(record["seqlen"], {})[record["attention"]] = record["seconds"]
    return times({n: x[STANDARD] / x[OURS] for n, x in found.items() if {OURS, STANDARD} <= x.keys()})


def sparse_steps(long_range):
    """Steps on images as long as the tasks of the Long Range Arena."""
    ran = steps_of(long_range)
    return times({n: ran[STANDARD, n]["seconds"] / ran["block-sparse", n]["seconds"]
                  for n in (32 * 32, 64 * 64) if {(STANDARD, n), ("block-sparse", n)} <= ran.keys()})  # fmt: skip


def steps_of(long_range):
    records = select(long_range["records"], part="steps", failed=None)
    return {(x["attention"], x["seqlen"]): x for x in records}


def task_accuracies(long_range):
    """Accuracies of numbattn and of the standard formula after equally many seconds."""
    found, learned = {}, set()
    for record in select(long_range["records"], part="tasks", failed=None):
        found.setdefault(record["task"], {})[record["attention"]] = 100 * record["curve"][-1][2]
        if is_learned(record, long_range["arguments"]["held_out"]):
            learned.add(record["task"])
    told = ", ".join(f"{TASKS[task]} {x[OURS]:.1f} / {x[STANDARD]:.1f}%" + ", not learned" * (task not in learned)
                     for task, x in found.items() if {OURS, STANDARD} <= x.keys())
    return f"{told}, numbattn / the standard formula" if told else None


def steps_at(side):
    """A function that tells seconds and memory of a step on images of side x side pixels."""

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
    """FLOPs, bytes and time over the standard formula's, and where the bytes are from."""
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
    """The fastest block size of the kernel for any GPU."""
    records = [x for x in select(figure2["records"], part="block-size", unit="mma") if x["seconds"]]
    if not records:
        return None
    first, best = records[0], min(records, key=lambda x: x["seconds"])
    return (f"the kernel for any GPU is fastest at {best['tile_m']}, {first['seconds'] / best['seconds']:.1f} times as "
            f"fast as at {first['tile_m']}")  # fmt: skip


def bytes_by_block(figure2):
    """Bytes from L2 to the multiprocessors, with the smallest and with the largest block."""
    records = select(figure2["records"], part="block-size", unit="mma")
    (most, *_, fewest), kind = bytes_of(records, *TO_MULTIPROCESSORS)
    larger = records[-1]["tile_m"] // records[0]["tile_m"]
    return f"{most / fewest:.1f} times fewer bytes with blocks {larger} times as large ({kind})"


def by_sparsity(figure2):
    """Time over the visible share of dense attention's time."""
    ratios = [x["seconds"] / x["ideal"] for x in figure2["records"] if x.get("ideal") and x["seconds"]]
    return ratios and f"{span(ratios)} times the visible share of the dense time"


def intensity(figure2):
    ours, _ = left(figure2)
    (nbytes,), kind = bytes_of([ours])
    return f"{ours['predicted']['flops'] / nbytes:.0f} FLOP for a byte of DRAM ({kind})"


def standard_bytes(figure2):
    """Bytes of DRAM for a pair of a query and a key."""
    _, standard = left(figure2)
    (nbytes,), kind = bytes_of([standard])
    batch, heads, seqlen, _ = standard["shape"]
    return f"{nbytes / (batch * heads * seqlen**2):.0f} n² bytes, forward and backward ({kind})"


def backward_flops(figure2):
    """FLOPs of both passes without forward's 4, in N^2 d."""
    ours, _ = left(figure2)
    batch, heads, seqlen, head_dim = ours["shape"]
    return f"{ours['predicted']['flops'] / (batch * heads * seqlen**2 * head_dim) - 4:.0f} N²d"


# ------------------------------------------------------------------------------------------------------------ figure 3
def settings_of(figure3):
    """The settings, the paper's first: with dropout and padding."""
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
    """A value of one peer over the other's, by seqlen."""
    ran = curves(figure3, setting)
    return {n: value(x) / value(ran[other, n]) for (name, n), x in ran.items()
            if name == peer and (other, n) in ran and n <= longest}  # fmt: skip


def faster_than_standard(figure3):
    """Speed relative to the formula in CuPy, and in PyTorch if that has run."""
    in_cupy, in_torch = (over(figure3, peer, OURS, milliseconds, 2048) for peer in (STANDARD, "math"))
    told = f", {span(in_torch.values(), 1)} times as fast as in PyTorch" if in_torch else ""
    return times(in_cupy, f"as fast as in CuPy{told}")


def overtaken(figure3):
    """The length from which on an approximation is faster, up to the longest. Linear attention has no dropout."""
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
    """At how many of the lengths up to `short` a peer is better than all others; block-sparse is nobody's rival."""
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
    """A function that tells a peer's memory over numbattn's."""
    return lambda figure3: times(over(figure3, peer, OURS, nbytes), f"as much for {the(peer)}")


def memory_growth(figure3):
    return f"bytes of a batch's sequence grow as seqlen^{growth(figure3, OURS, nbytes):.2f}"


def growth(figure3, name, value):
    """The exponent of seqlen between the two longest, for one element of the batch."""
    found = sorted((n, value(x) / x["batch"]) for (peer, n), x in curves(figure3).items() if peer == name)
    (n, first), (m, last) = found[-2:]
    return math.log(last / first) / math.log(m / n)


def time_growth(figure3):
    """Exponents of the peers that ran at two lengths."""
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
    """The exponent of seqlen between the two longest."""
    before, last = costs["memory"][-2:]
    exponent = math.log(last["bytes"][OURS] / before["bytes"][OURS]) / math.log(last["seqlen"] / before["seqlen"])
    return f"seqlen^{exponent:.2f}; {last['bytes'][OURS] / 1e6:.0f} MB at {last['seqlen']}, {last['heads']} heads"


def matrix_bytes(costs):
    """Memory of the standard formula for one head."""
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
    """RMS errors, and their ratio to the standard formula's."""
    records = select(accuracy["accuracy"], dtype="float32")
    if not records:
        return None
    ratios = [x["errors"][OURS][0] / x["errors"]["cupy"][0] for x in records if "cupy" in x["errors"]]
    told = f"RMS error {max(x['errors'][OURS][0] for x in records):.0e} in float32"
    return f"{told}, {span(ratios)} times the standard formula's" if ratios else told


def causal_share(speed):
    """Time with a causal mask over the time without."""
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
    """Bandwidth, and the speed relative to the fastest other."""
    ratios = [x["TB/s"][OURS] / max(others) for x in decoding["records"] if OURS in x["TB/s"]
              and (others := [x["TB/s"][name] for name in ("cudnn", "flash") if name in x["TB/s"]])]  # fmt: skip
    rate = decoding_rate(decoding)
    return f"{rate}; {geometric_mean(ratios):.2f} times the fastest other's" if ratios else rate


def several_gpus(ring):
    """Scaling for the longest sequence, if devices computed at once."""
    n = max(values(ring["speed"], "seqlen"))
    records = select(ring["speed"], seqlen=n)
    devices = records[0]["at once"]
    percent = [100 * record["of devices"] for record in records]
    return f"{span(percent, 0)}% of perfect scaling on {devices} GPUs, at {n}" if devices > 1 else None


def one_backward_kernel(figure2, speed, deterministic):
    """FLOPs of the single kernel, and the speed of two kernels over its own."""
    one, two = ({(x["head_dim"], x["seqlen"], x["causal"]): x["tflops"].get(OURS)
                 for x in select(run["speed"], **{"pass": "backward"})} for run in (speed, deterministic))  # fmt: skip
    ratios = [two[case] / one[case] for case in two if two[case] and one.get(case)]
    told = f"; with a second kernel {span(ratios)} of the speed" if ratios else ""
    return backward_flops(figure2) + told
