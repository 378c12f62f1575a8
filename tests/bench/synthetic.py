"""Results in the formats of the scripts in bench/, with made-up numbers: what report.py draws in its tests."""

from itertools import product

import numpy as np

GPU = {"name": "NVIDIA H200", "driver_version": "580.1", "multiprocessors": 132}
PEERS = {"numbattn": 0.65, "flash": 0.31, "cudnn": 0.58, "fa4": 0.61}  # shares of a peak


def results(run, **sizes):
    """Made-up results of a run in bench/report.py."""
    machine = {"date": "2026-01-02", "cpu": "made up (none)", "cores": 2, "system": "none",
               "versions": {"python": "3.0", "numpy": "2.0", "torch": None}}  # fmt: skip
    if "cpu" not in run:
        machine["gpu"] = GPU
    return {"command": f"python bench/{run}.py", "commit": "0123456789ab", "machine": machine, **MADE[run](**sizes)}


def cases(dtypes, head_dims, seqlens, passes=("forward", "backward")):
    for dtype, d, causal, n, of in product(dtypes, head_dims, (False, True), seqlens, passes):
        field = {"dtype": dtype, "head_dim": d, "causal": causal, "seqlen": n, "pass": of}
        heads = 2048 // d if dtype == "bfloat16" else 16
        yield field | {"batch": max(1, 16384 // n) if dtype == "bfloat16" else 1, "heads": heads, "heads_k": heads}


def rate(case, share):
    """TFLOP/s that grow with the sequence."""
    n, d = case["seqlen"], case["head_dim"]
    grown = n / (n + (700 if case["causal"] else 300)) * d / (d + 25)
    return 989 * share * grown * (0.85 if case.get("pass") == "backward" else 1.05)


def seconds_of(case, tflops):
    n, d = case["seqlen"], case["head_dim"]
    return 4e-12 * case["batch"] * case["heads"] * n * n * d / tflops


def speed(dtypes=("bfloat16",), head_dims=(64, 128), seqlens=(512, 1024), peers=PEERS):
    records = []
    for case in cases(dtypes, head_dims, seqlens):
        shares = {name: share for name, share in peers.items() if name != "fa4" or case["pass"] == "backward"}
        tflops = {name: rate(case, share) for name, share in shares.items()}
        if "fa4" in tflops and case["head_dim"] == 64:
            tflops["fa4"] *= 1.1
        seconds = {name: seconds_of(case, x) for name, x in tflops.items()}
        records.append({**case, "seconds": seconds, "tflops": tflops, "samples": {}, "errors": {}, "failed": {}})
    return {"arguments": {}, "speed": records}


def deterministic():
    return {"arguments": {}, "speed": [record for record in speed()["speed"] if record["pass"] == "backward"]}


def mma():
    return speed(peers={"numbattn": 0.33, "flash": 0.31})


def accuracy(dtypes=("float16", "float32"), head_dims=(64, 128), seqlens=(512, 1024)):
    unit = {"float16": 4e-4, "bfloat16": 3e-3, "float32": 3e-7}
    worse = {"numbattn": 1.0, "flash": 1.01, "cudnn": 1.2, "cupy": 1.9}
    records = []
    for case in cases(dtypes, head_dims, seqlens):
        names = worse if case["dtype"] != "float32" else ("numbattn", "cupy")
        rms = unit[case["dtype"]] * (1 + case["seqlen"] / 2e4)
        records.append({**case, "errors": {name: [rms * worse[name], 1e-2] for name in names}, "failed": {}})
    return {"accuracy": records}


def scores(head_dims=(64, 128), seqlens=(512, 1024)):
    costs = {"plain": 1.0, "Softcap(50)": 1.8, "Alibi": 1.15, "Score as Alibi": 1.35, "Alibi, gradient": 1.16,
             "Sink": 1.02, "RelativeBias": 1.4, "Bias": 1.7, "Softcap(50), fa4": 2.6}  # fmt: skip
    shares = {"none": 1, "random 10%": 0.1, "random 20%": 0.2, "random 50%": 0.5, "random 100%": 1.0,
              "butterfly": 0.17, "local_global": 0.12, "chosen 10%": 0.1, "Window(1023, 0)": 0.0605,
              "Where, as Window": 0.0605}  # fmt: skip
    scores, masks = [], []
    for case in cases(["bfloat16"], head_dims, seqlens):
        if case["causal"]:
            continue
        plain = seconds_of(case, rate(case, 0.65))
        found = {name: plain * x ** (1 + 16 / case["head_dim"]) for name, x in costs.items()}
        scores.append({**case, "seconds": found, "tflops": {}, "failed": {}})
        found = {name: plain * share ** 0.92 * 1.2 for name, share in shares.items()} | {"none": plain}
        masks.append({**case, "block_size": 128, "seconds": found, "shares": shares, "failed": {}})
    pairs = {"dtype": "float16", "head_dim": 32, "seqlen": 512, "batch": 128, "heads": 8, "pass": "both", "failed": {},
             "seconds": {"numbattn": 1.15e-3, "cupy": 26e-3}, "bytes": {"numbattn": 145e6, "cupy": 3926e6}}  # fmt: skip
    return {"sparse": masks, "score": [*scores, pairs]}


def packed(head_dims=(64, 128)):
    records = []
    lengths = {"512": 0.6, "4096": 0.9, "uniform": 0.7, "lognormal": 0.62, "one_long": 0.95}
    for d, causal, (name, x), of in product(head_dims, (False, True), lengths.items(), ("forward", "backward")):
        about = {"dtype": "bfloat16", "head_dim": d, "causal": causal, "lengths": name, "pass": of}
        rates = {"numbattn": 600 * x, "torch": 290 * x, "fa4": (540 if of == "forward" else 620) * x, "padded": 300 * x}
        rates |= {"dense": 640 * x} if name in ("512", "4096") else {}
        records.append({**about, "tflops": rates, "seconds": {peer: 1 / r for peer, r in rates.items()}, "failed": {}})
    return {"speed": records}


def decoding(cells=((1, 8192, 128, 1), (16, 8192, 128, 1), (64, 4096, 128, 4))):
    shares = {"numbattn": 0.82, "lengths": 0.81, "ragged": 0.72, "cudnn": 0.9, "flash": 0.75, "pages of 16": 0.69,
              "pages of 64": 0.7, "pages of 256": 0.71, "int8": 1.1, "float8": 1.15}  # fmt: skip
    records = []
    for batch, keys, head_dim, queries in cells:
        full = batch * keys / (batch * keys + 9000) * 4.8 * (0.85 if queries > 1 else 1)
        rates = {name: full * x for name, x in shares.items()}
        if batch == 1:
            del rates["ragged"]
        records.append({"batch": batch, "keys": keys, "head_dim": head_dim, "queries": queries, "seconds": {},
                        "failed": {}, "TB/s": rates})  # fmt: skip
    return {"options": {"heads_k": 8, "dtype": "bfloat16"}, "records": records}


def ring(seqlens=(16384, 65536)):
    case = {"dtype": "bfloat16", "head_dim": 128, "heads": 32, "heads_k": 8, "ranks": 2, "at once": 2}
    found = {"speed": [], "checks": [], "errors": []}
    for engine, causal in product(("devices", "nccl"), (False, True)):
        about = {"engine": engine, "causal": causal, **case}
        for n in seqlens:
            reached = n / (n + 3000) * (0.95 if engine == "nccl" else 0.98)
            for of in ("forward", "forward + backward"):
                one = 1e-12 * n * n * (3.5 if "backward" in of else 1)
                found["speed"].append({**about, "seqlen": n, "pass": of, "of devices": reached,
                                       "seconds": {"one": one, "ring": one / 2 / reached},
                                       "TFLOP/s": {"one": 600.0, "ring": 1200.0 * reached}})  # fmt: skip
            found["checks"].append({**about, "seqlen": n, "bytes": {"one": 40000 * n, "ring": 30000 * n},
                                    "apart": dict.fromkeys(("o", "dq", "dk", "dv"), 1e-3), "equal": True})
        rms = {peer: dict.fromkeys(("o", "dq", "dk", "dv"), x) for peer, x in (("one", 2e-3), ("ring", 2.1e-3))}
        found["errors"].append({**about, "seqlen": 8192, "rms": rms})
    return {"options": case, **found}


def ring_model(gpus=(8, 64)):
    args = {"seqlen": 1 << 20, "heads": 32, "heads_k": 8, "head_dim": 128, "node": 8, "within": 278.0, "between": 50.0,
            "start": 10.0, "tflops": None}  # fmt: skip
    hides = [{"pass": of, "link": link, "tokens": n} for of in ("forward", "backward")
             for link, n in (("within", 1267.0), ("between", 7043.0))]  # fmt: skip
    shares = {"ring": 0.5, "two levels": 0.9}
    records = [{"pass": of, "gpus": n, "tokens": args["seqlen"] / n, "kernel": 12 / n**2, "within": 0.02 / n,
                "between": 0.1 / n, "scheme": scheme, "seconds": 12 / n, "share": share}
               for of, n, (scheme, share) in product(("forward", "backward"), gpus, shares.items())]  # fmt: skip
    return {"arguments": args, "hides": hides, "records": records}


def floats(head_dims=(64, 128), seqlens=(4096,)):
    single = {"numbattn": 0.052, "efficient": 0.035, "cupy": 0.018}, {"numbattn": 0.034, "math": 0.013, "cupy": 0.012}
    of_dtype = [speed((dtype,), head_dims, seqlens, peers) for dtype, peers in zip(("float32", "float64"), single)]
    return {"speed": [record for found in of_dtype for record in found["speed"]]}


def costs(seqlens=(512, 1024)):
    memory = [{"dtype": "float32", "head_dim": 64, "causal": False, "seqlen": n, "batch": 1, "heads": 16, "failed": {},
               "bytes": {"numbattn": 16.5e3 * n, "efficient": 24.7e3 * n}} for n in (*seqlens, 32768)]  # fmt: skip
    memory[0]["bytes"]["cupy"] = 260.0 * seqlens[0] ** 2
    shares = {name: PEERS[name] for name in ("numbattn", "flash", "cudnn")}
    latency = [{**case, "pass": "latency", "failed": {},
                "seconds": {name: 3e-5 + seconds_of(case, rate(case, share)) for name, share in shares.items()}}
               for case in cases(["bfloat16"], (64, 128, 256), seqlens, ["forward"])]  # fmt: skip
    first = [{"dtype": dtype, "head_dim": 64, "causal": False, "seqlen": 256, "forward, empty cache": 2.4 - x,
              "backward, empty cache": 2.0, "forward, warm cache": 0.5, "backward, warm cache": 0.1}
             for dtype, x in (("float16", 0), ("float32", 0.3))]  # fmt: skip
    return {"memory": memory, "latency": latency, "first call": first}


def host():
    calls = {"arrays reused": 12, "fresh arrays": 14, "causal=True": 12.5, "mask=Window(20, 0)": 13,
             "mask=Segments(offsets)": 16, "dropout": 13, "forward + backward": 56, "graph replay": 1.3}  # fmt: skip
    records = []
    for dtype, (call, taken) in product(("float16", "float32"), calls.items()):
        median = {"numbattn": float(taken)}
        if call in ("arrays reused", "fresh arrays", "forward + backward"):
            median |= {"flash" if dtype == "float16" else "efficient": taken * 1.1}
            if dtype == "float16":
                median["cudnn"] = taken * 1.7
        records.append({"dtype": dtype, "call": call, "median": median, "failed": {},
                        "p90": {name: 1.3 * x for name, x in median.items()}})  # fmt: skip
    return {"overhead": records}


def cpu(seqlens=(1024, 4096)):
    records = []
    for dtype, of, causal, n in product(("float32", "float64"), ("forward", "backward"), (False, True), seqlens):
        ours = {"float32": 73, "float64": 35}[dtype] * (0.8 if causal else 1) * (1.2 if of == "backward" else 1)
        records.append({"dtype": dtype, "pass": of, "causal": causal, "seqlen": n, "numbattn": ours,
                        "torch": 0.9 * ours, "numpy": ours * (0.2 if causal else 0.4)})  # fmt: skip
    sizes = [{"batch": batch, "heads": 8, "seqlen": n, "head_dim": d, "pair_bias": bias, "pass": of, "numbattn": 9.0,
              "torch": 4.5, "numpy": 36.0, "torch / numbattn": 0.5, "numpy / numbattn": 4.0}
             for batch, n, d, bias in ((1, 1024, 16, False), (256, 64, 32, False), (8, 512, 32, True))
             for of in ("forward", "backward")]  # fmt: skip
    return {"matmul": {"float32": 152.0, "float64": 71.0}, "speed": records, "sizes": sizes,
            "memory": [{"seqlen": 32768, "extra MB": 406.0, "the scores alone, MB": 34360.0}],
            "busy": [{"": name, "slower by": x} for name, x in (("numbattn", 1.9), ("torch", 1.9), ("numpy", 3.4))]}


def small(sizes=((16, 32), (64, 32), (64, 64)), batches=(1, 1000)):
    """Nobody but numbattn takes a bias in half precision."""
    costs = {"numbattn": 1.1, "efficient": 4.0, "math": 9.0, "cupy": 6.0, "fa4": 3.0, "copy": 1.0}
    passes = [("none", "forward"), ("shared", "forward"), ("none", "backward"), ("shared", "backward"),
              ("with gradient", "backward")]  # fmt: skip

    def record(dtype, batch, n, d, bias, of, graph=False):
        arrays = 4 if of == "forward" else 7
        nbytes = arrays * batch * 8 * n * d * (2 if dtype == "bfloat16" else 4)
        names = ["numbattn", "copy", *(["efficient", "math", "cupy"] if dtype == "float32" else ["fa4"])]
        if dtype == "bfloat16" and bias != "none":
            names = ["numbattn", "copy"]
        seconds = {name: nbytes / 3e12 * costs[name] * (1 + n / 256 * (name != "copy")) for name in names}
        seconds["numbattn"] *= 1.05 if bias == "with gradient" else 1
        return {"dtype": dtype, "batch": batch, "seqlen": n, "head_dim": d, "heads": 8, "bias": bias, "pass": of,
                "graph": graph, "bytes": nbytes, "seconds": seconds, "errors": {}, "failed": {}}

    dtypes, variants = ("float32", "bfloat16"), {"plain": 1.0, "Lengths": 1.1, "Bits": 1.2, "Segments": 1.25}
    return {
        "arguments": {},
        "cells": [record(dtype, (1 << 22) // (n * d) if dtype == "float32" else (1 << 23) // (n * d), n, d, bias, of)
                  for dtype, (n, d), (bias, of) in product(dtypes, sizes, passes)],
        "batches": [record("float32", batch, 64, 32, bias, of, graph)
                    for batch, (bias, of), graph in product(batches, passes, (False, True))],
        "variants": [{"dtype": "float32", "batch": 2048, "heads": 8, "seqlen": 64, "head_dim": 32, "pass": of,
                      "seconds": {name: 1e-4 * x for name, x in variants.items()}, "errors": {}, "failed": {}}
                     for of in ("forward", "backward")],
    }  # fmt: skip


def tangents(shapes, dtypes, peers):
    """Records of all passes; a tangent's rate is 0.7 of its pass's."""
    rates = {"forward": 1.0, "backward": 0.8, "tangent": 0.7, "backward_tangent": 0.56}
    return [{"dtype": dtype, "head_dim": d, "causal": causal, "seqlen": n, "batch": batch, "heads": 8, "heads_k": 8,
             "pass": of, "errors": {}, "failed": {},
             "tflops": {name: 100 * x * share for name, x in peers.items() if name in OURS or "tangent" in of},
             "seconds": {name: 1e-3 / x for name, x in peers.items() if name in OURS or "tangent" in of}}
            for dtype, (batch, n, d), causal, (of, share) in product(dtypes, shapes, (False, True), rates.items())
            ]  # fmt: skip


OURS = "numbattn", "numbattn, mma"


def second(shapes=((16, 1024, 64), (4, 4096, 64), (16, 1024, 128), (4, 4096, 128))):
    """The formula does not fit at the end."""
    half = {"numbattn": 1.0, "numbattn, mma": 0.6, "jvp-flash-attention": 0.1, "cupy": 0.05}
    records = tangents(shapes, ["bfloat16"], half) + tangents(shapes, ["float32"], {"numbattn": 0.1, "cupy": 0.02})
    del records[-1]["tflops"]["cupy"]
    small = tangents([(4096, 32, 64), (1024, 128, 64)], ["float32", "float64"], {"numbattn": 0.05, "cupy": 0.02})
    return {"arguments": {}, "speed": records, "small": small}


def second_cpu():
    shapes = (64, 64, 32), (1, 1024, 64)
    return {"arguments": {}, "cpu": tangents(shapes, ["float32", "float64"], {"numbattn": 1e-3, "numpy": 5e-4})}


def decoding_cpu(keys=(128, 512)):
    kinds = {"float32": 1.8, "bfloat16": 6, "float16": 5, "float16 cache": 5.2, "int8 cache": 9}
    return {"options": {}, "records": [
        {"heads": "32 on 8", "head_dim": d, "kind": kind, "keys": n, "NumPy": 100.0, "numbattn": 50.0, "GB/s": 12.0,
         "NumPy / numbattn": float(x * np.log2(n) / 8 * (64 / d) ** 0.2)}
        for d, (kind, x), n in product((64, 128), kinds.items(), keys)
    ]}  # fmt: skip


def figure3(seqlens=(128, 256, 512)):
    """The standard formula runs out of memory at the longest; linear attention is not causal."""
    costs = {"numbattn": (0.06, 2, 300), "block-sparse": (0.08, 1.5, 320), "standard": (0.15, 2, 4e3),
             "rabe-staats": (0.4, 2, 600), "linformer": (0.3, 1, 900), "linear": (0.35, 1, 800),
             "flash": (0.1, 2, 350), "cudnn": (0.07, 2, 350)}  # fmt: skip
    records, settings = [], ("dropout+padding", "none", "causal")
    for setting, n, (name, (ms, power, nbytes)) in product(settings, seqlens, costs.items()):
        case = {"setting": setting, "seqlen": n, "batch": 16, "heads": 8, "dtype": "float16", "head_dim": 64}
        failed = "out of memory" if name == "standard" and n == seqlens[-1] else None
        failed = failed or ("causal" if name == "linear" and setting == "causal" else None)
        both = 1e-3 * (ms + (n / 1024) ** power * 10 * ms)
        seconds = {"forward": both / 3.5, "backward": both / 1.4, "both": both}
        grown = 16 * 8 * nbytes * n * (n / 128 if name == "standard" else 1)
        records.append({"peer": name, **case, "seconds": None if failed else seconds,
                        "bytes": None if failed else int(grown), "failed": failed})  # fmt: skip
    return {"arguments": {}, "records": records}


def figure2():
    shape, missing = [16, 16, 4096, 64], {"not measured": "ncu is not installed"}
    left = [{"part": "left", "peer": peer, "shape": [64, 16, 1024, 64], "seconds": ms / 1e3,
             "predicted": {"flops": gflop * 1e9, "dram": gb * 1e9, "l2": 3 * gb * 1e9}, "measured": missing}
            for peer, ms, gflop, gb in (("standard", 24.0, 825, 59.9), ("flash", 2.9, 962, 2.3))]  # fmt: skip
    sizes = [("mma", 16), ("mma", 32), ("mma", 64), ("mma", 128), ("mma", 256), ("wgmma", 128), ("wgmma", 192)]
    blocks = [{"part": "block-size", "shape": shape, "unit": unit, "tile_m": m, "measured": missing,
               "seconds": None if m == 256 else (200 / m + (1 if unit == "wgmma" else 4)) / 1e3,
               "predicted": {"l2": 4e12 / m}} for unit, m in sizes]  # fmt: skip
    dense = {"part": "sparsity", "shape": shape, "share": None, "seconds": 5e-3}
    sparse = [{"part": "sparsity", "shape": shape, "share": x, "visible": 1.01 * x, "seconds": 5e-3 * x + 4e-4,
               "ideal": 5e-3 * x} for x in (0.1, 0.5, 0.9)]  # fmt: skip
    return {"arguments": {}, "records": [*left, *blocks, dense, *sparse]}


def training(contexts=(1024, 2048, 4096)):
    """The standard formula runs out of memory at the longest."""
    records, steps = [], np.arange(300)
    for n, standard in product(contexts, (False, True)):
        name, full = "standard" if standard else "numbattn", standard and n == contexts[-1]
        losses = 1.5 + 6.5 * np.exp(-steps / 60) + 0.01 * standard * np.sin(steps / 5)
        ran = {"failed": None, "batch": 8192 // n, "losses": losses.tolist(), "validation": 1.6 - n / 1e5,
               "seconds": 0.05 * (1 + standard * n / 1024), "bytes": int(1e9 * (9 + standard * n / 256))}
        records.append({"context": n, "attention": name, **({"failed": "out of memory"} if full else ran)})
    options = {"layers": 12, "heads": 12, "dtype": "float16", "tokens": 8192, "steps": 300}
    return {"arguments": options, "records": records}


LONG_RANGE = {"layers": 4, "heads": 4, "dtype": "float16", "tokens": 32768, "held_out": 1024}


def long_range(sides=(32, 64, 128, 256)):
    """The standard formula runs out of memory with the largest images."""
    speeds = {"numbattn": (1, 1), "block-sparse": (0.9, 0.6), "standard": (1.4, 6)}
    steps = [{"part": "steps", "task": "pathfinder", "seqlen": side**2, "attention": name, "batch": 2,
              "seconds": 0.01 * (x + slope * side**2 / 16384), "bytes": int(1e9 * (1 + slope * side**2 / 16384)),
              "failed": "out of memory" if name == "standard" and side == sides[-1] else None}
             for side, (name, (x, slope)) in product(sides, speeds.items())]  # fmt: skip
    trained = [{"part": "tasks", "task": task, "seqlen": n, "attention": name, "batch": 16, "seconds": 0.01 * slower,
                "curve": curve(high, slower), "guess": guess, "classes": 10, "failed": None}
               for (task, n, high, guess), (name, slower) in product(
                   (("listops", 2048, 0.4, 0.13), ("pathfinder", 1024, 0.7, 0.5)), (("numbattn", 1), ("standard", 2)))
               ]  # fmt: skip
    return {"arguments": LONG_RANGE, "records": [*steps, *trained]}


def curve(high, slower):
    return [[10.0 * i, 1000 * i // slower, high * (1 - 0.5 ** (i / slower))] for i in range(1, 11)]


def interop():
    """Of torch and JAX, of which torch tells what an empty function takes."""
    def record(framework, call, own, empty):
        return {"framework": framework, "device": "CPU", "call": call, "framework's": 2.5 * own, "own": own, **empty}

    calls = {"no gradients": (14.0, {}), "forward": (14.0, {"empty": 8.0}), "both": (40.0, {"empty": 30.0})}
    records = [record("torch", call, *about) for call, about in calls.items()]
    return {"arguments": {}, "interop": records + [record("jax", call, own, {}) for call, (own, _) in calls.items()]}


def documents(contexts=(512, 1024, 2048, 4096)):
    return {"arguments": LONG_RANGE, "records": [
        {"part": "documents", "task": "documents", "seqlen": n, "attention": "numbattn", "batch": 32768 // n,
         "seconds": 0.01 * (1 + n / 16384), "curve": curve(0.5 + 0.03 * i, 1), "guess": 0.09, "classes": 14,
         "failed": None} for i, n in enumerate(contexts)
    ]}  # fmt: skip


FLASH = "keops", "flash-sinkhorn", "flash-sinkhorn, TF32"


def kernels(factor=1.0, dtypes=("float32", "bfloat16"), of_nearest="float16", others=FLASH, clusters=("flash-kmeans",)):
    """The formula has no digit right far from the origin, and does not run in the last product."""
    def record(shares, **about):
        seconds = {name: factor * share for name, share in shares.items()}
        return {**about, "seconds": seconds, "errors": dict.fromkeys(seconds, 1e-6), "failed": {}}

    def errors(of, shares, **about):
        return {"of": of, **about, "errors": dict(shares), "failed": {}}

    products = [record({"numbattn": 1e-4 * d * e**0.5, "standard": 1e-3 * d, "keops": 4e-4 * d * e**0.5},
                       dtype=dtype, n=100_000, features=d, columns=e, length=1.0, offset=0.0)
                for dtype, d, e in product(("float32", "float64"), (3, 64, 512), (1, 64))]  # fmt: skip
    del products[-1]["seconds"]["standard"]
    of_products = [errors("product", {"numbattn": 2e-7, "keops": 3e-7, "standard": 4e-7 if offset == 0 else 40.0},
                          dtype="float32", n=2000, features=d, columns=1, length=length, offset=offset)
                   for d, offset, length in product((3, 64), (0.0, 1e3), (0.3, 1.0))]  # fmt: skip
    potentials = [errors("sinkhorn", dict.fromkeys(("numbattn", "standard", *others), 1e-7 / epsilon), dtype=dtype,
                         n=2000, features=64, epsilon=epsilon, iterations=1)
                  for dtype, epsilon in product(dtypes, (0.1, 0.01))]  # fmt: skip
    return {
        "arguments": {},
        "sinkhorn": [record({"numbattn": 0.1, "standard": 0.4, **dict.fromkeys(others, 0.3)}, dtype=dtype, n=50_000,
                            features=64, epsilon=0.1, iterations=10) for dtype in dtypes],
        "nearest": [*(record({"numbattn": 1e-6 * n, "standard": 1e-5 * n, **dict.fromkeys(clusters, 2e-6 * n)},
                             dtype=of_nearest, m=1_000_000, n=n, features=128, k=1) for n in (1000, 4096)),
                    *(record({"numbattn": 0.01 * k, "keops": 0.02 * k}, dtype="float32", m=100_000, n=100_000,
                             features=3, k=k) for k in (1, 10))],
        "products": products, "errors": of_products + potentials,
        "costs": [{"of": "product", "dtype": "float32", "n": 50_000, "features": 3, "columns": 1, "length": 1.0,
                   "offset": 0.0, "failed": {}, "first, empty cache": 2.5, "later": 0.01, "bytes": 200_000,
                   "first, warm cache": 0.4}],
    }  # fmt: skip


def kernels_cpu():
    return kernels(100.0, ("float32",), "float32", ("keops",), ("keops",))


def sparse_layers():
    return {"arguments": {}, "sparse_layers": [
        {"dtype": dtype, "size": size, "share": share, "rows": 16384, "features": 4096, "pass": of, "errors": {},
         "seconds": {"numbattn": 1e-3 * share * 128 / size, "dense": 8e-4}, "failed": {}}
        for dtype, size, share, of in product(("bfloat16", "float32"), (64, 128), (0.1, 0.5), ("forward", "dX", "dW"))
    ]}  # fmt: skip


RUNS = (accuracy, costs, cpu, decoding, decoding_cpu, deterministic, documents, figure2, figure3, floats, host,
        interop, kernels, kernels_cpu, long_range, mma, packed, ring, ring_model, scores, second, second_cpu, small,
        sparse_layers, speed, training)
MADE = {run.__name__: run for run in RUNS}
