"""The page of all measurements, bench/README.md, and its pictures, from bench/results/*.json.

    python bench/report.py
    python bench/report.py --run                # measures first, all that this machine can
    python bench/report.py --run speed cpu
    python bench/report.py --run --small --folder /tmp/bench    # takes seconds on any machine, to see that it works

Where there are several GPUs, each gets the next run in the order of the names, its output in results/*.log; put the
longest first. What fails, or takes longer than --minutes, is said, and the rest goes on; what it has measured is in
results/*.part.json.

To add a picture: a line in RUNS, the command that writes its results; a function in pictures/, which makes a figure and
a caption and tables of them; a line in SECTIONS, where it stands on the page. What has no results is left out.
Needs matplotlib and tabulate.
"""

import argparse
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import conformance
from pictures.costs import costs, host
from pictures.cpu import cpu, decoding_cpu
from pictures.cpu import readme_sentence as cpu_sentence
from pictures.distributed import ring
from pictures.features import decoding, packed, scores
from pictures.figures import figure2, figure3, listops
from pictures.graphs import graphs, graphs_cpu
from pictures.grids import grids
from pictures.interop import interop
from pictures.kernels import clusters, cross_entropy, kernels, kernels_cpu, transport
from pictures.second import particles, second, second_cpu
from pictures.small import readme_sentence, small
from pictures.sparse_layers import sparse_layers
from pictures.speed import accuracy, deterministic, fa3, floats, mma, readme_table, rooflines, speed, wide
from PIL import Image
from tabulate import tabulate

BENCH = Path(__file__).resolve().parent
COLOURS = 128  # of a picture
MINUTES, POLL, GRACE = 30, 0.1, 10  # a command takes at most; seconds between looks; seconds to stop in
COUNTS = "conformance"  # results that are no measurements
FILLED = {  # the comment before numbers in README.md: the results that say them, and how
    "<!-- from bench/results/speed.json and small.json -->": (
        ("speed", "small"), lambda speed, small: f"{readme_table(speed)}\n\n{readme_sentence(small)}"),
    "<!-- from bench/results/cpu.json -->": (("cpu",), cpu_sentence),
    "<!-- from bench/results/conformance.json -->": ((COUNTS,), conformance.sentence),
}  # fmt: skip
END = "<!-- end -->"  # the comment after them


class Run(NamedTuple):
    command: str              # takes at most 8 minutes on Hopper
    small: str | None = None  # takes seconds on any machine
    gpus: int = 1             # how many the command needs; with fewer, the small one runs


class Section(NamedTuple):
    title: str
    results: str     # name of the run
    draw: Callable   # the run's results -> a figure and a few sentences


RUNS = {
    "speed": Run("gpu.py --dtype bfloat16 --head-dim 64 128 256 --seqlen 512 1024 2048 4096 8192 16384 --rounds 3 "
                 "--peers numbattn flash cudnn fa4"),
    "fa3": Run("gpu.py --dtype bfloat16 --head-dim 64 128 256 --seqlen 1024 4096 16384 --rounds 3 "
               "--peers numbattn cudnn fa3"),
    "wide": Run("gpu.py --dtype bfloat16 --head-dim 320 512 --seqlen 1024 4096 16384 --rounds 3 "
                "--peers numbattn efficient ffpa"),
    "accuracy": Run("gpu.py --accuracy --dtype float16 bfloat16 float32 --head-dim 128 --seqlen 512 1024 2048 4096 "
                    "--peers numbattn flash cudnn efficient fa4 cupy"),
    "deterministic": Run("gpu.py --deterministic --pass backward --dtype bfloat16 --head-dim 64 128 "
                         "--seqlen 1024 4096 16384 --rounds 3 --peers numbattn flash cudnn fa4"),
    "mma": Run("gpu.py --speed --tier mma --dtype bfloat16 --head-dim 64 128 256 --seqlen 1024 2048 4096 16384 "
               "--peers numbattn flash --rounds 3"),
    "scores": Run("gpu.py --score --sparse --full --dtype bfloat16 --head-dim 128 --seqlen 4096 16384 --rounds 3"),
    "figure2": Run("paper figure2", "paper figure2 --small --no-ncu --rounds 1"),
    "figure3": Run("paper figure3 --minutes 6",
                   "paper figure3 --setting none --seqlen 64 128 --batch 1 --heads 2 --rounds 1"),
    "listops": Run("paper listops", "paper listops --small"),
    "packed": Run("packed.py --rounds 3"),
    "decoding": Run("decode.py --peers numbattn lengths ragged cudnn flash 'pages of 16' 'pages of 64' 'pages of 256' "
                    "int8 float8"),
    "small": Run("small.py"),
    "second": Run("second.py --parts speed small"),
    "particles": Run("second.py --parts particles"),
    "kernels": Run("kernels.py --parts products errors costs"),
    "pairs": Run("kernels.py --parts sinkhorn nearest solves"),
    "losses": Run("kernels.py --parts losses"),
    "steps": Run("kernels.py --parts steps"),
    "sparse_layers": Run("sparse_layers.py"),
    "grids": Run("grids.py"),
    "graphs": Run("graphs.py"),
    "ring": Run("ring.py --devices 2 --seqlen 16384 65536",
                "ring.py --devices 2 --engine simulated --seqlen 512 --dtype float32 --heads 2 --heads-k 1 --rounds 1",
                gpus=2),
    "floats": Run("gpu.py --dtype float32 float64 --setting single --seqlen 4096 --head-dim 64 128"),
    "costs": Run("gpu.py --memory --latency --first-call"),
    "host": Run("overhead.py"),
    "interop": Run("interop.py", "interop.py --calls 100", gpus=0),
    "cpu": Run("cpu.py", "cpu.py --what speed --seqlens 64 --rounds 1", gpus=0),
    "second_cpu": Run("second.py --cpu", "second.py --cpu --quick", gpus=0),
    "graphs_cpu": Run("graphs.py --cpu", "graphs.py --cpu --quick", gpus=0),
    "kernels_cpu": Run("kernels.py --cpu", "kernels.py --cpu --quick", gpus=0),
    "decoding_cpu": Run("decode_cpu.py --rounds 10",
                        "decode_cpu.py --kinds float32 --head-dims 64 --keys 128 256 --rounds 2", gpus=0),
}  # fmt: skip
SECTIONS = [
    Section("Half precision on a GPU", "speed", speed),
    Section("FlashAttention 3", "fa3", fa3),
    Section("Wide heads", "wide", wide),
    Section("Compared with what the GPU can do", "speed", rooflines),
    Section("Gradients equal bit for bit", "deterministic", deterministic),
    Section("Kernels for Ampere and later GPUs", "mma", mma),
    Section("How exact", "accuracy", accuracy),
    Section("Scores and masks", "scores", scores),
    Section("The paper's Figure 2", "figure2", figure2),
    Section("The paper's Figure 3", "figure3", figure3),
    Section("The paper's Table 3: ListOps", "listops", listops),
    Section("Packed sequences", "packed", packed),
    Section("Few queries, many keys", "decoding", decoding),
    Section("Many small attentions", "small", small),
    Section("Second derivatives", "second", second),
    Section("Laplacians of particles", "particles", particles),
    Section("Kernels over pairs of points", "kernels", kernels),
    Section("Transport, neighbours and solves", "pairs", transport),
    Section("Losses over pairs", "losses", cross_entropy),
    Section("Clusters", "steps", clusters),
    Section("Products with sparse weights", "sparse_layers", sparse_layers),
    Section("Windows on grids", "grids", grids),
    Section("Graphs", "graphs", graphs),
    Section("Several devices", "ring", ring),
    Section("float32 and float64", "floats", floats),
    Section("Memory, latency, first calls", "costs", costs),
    Section("Host time", "host", host),
    Section("In other frameworks", "interop", interop),
    Section("CPU", "cpu", cpu),
    Section("Second derivatives on a CPU", "second_cpu", second_cpu),
    Section("Graphs on a CPU", "graphs_cpu", graphs_cpu),
    Section("Kernels over pairs of points on a CPU", "kernels_cpu", kernels_cpu),
    Section("Few queries on a CPU", "decoding_cpu", decoding_cpu),
]
# whose titles begin the page
IN_SHORT = speed, mma, accuracy, figure3, decoding, small, second, kernels, transport, ring, cpu


# ---------------------------------------------------------------------------------------------------------------- runs
class Running(NamedTuple):
    name: str
    process: subprocess.Popen
    gpus: list
    start: float
    written: Path   # its results so far


def run(names, small, folder, minutes=MINUTES):
    """Measure: on all GPUs at a time, what needs several first; then, one after the other, what needs none. Returns how
    many commands failed. However it ends, none of them goes on."""
    here, commands = gpus_here(), {}
    for name in names:
        whole, reduced, gpus = RUNS[name]
        if command := reduced if small or len(here) < gpus else whole:
            commands[name] = command
        else:
            print(f"{name}: left out, it needs a GPU", flush=True)
    waiting, free, running, failures = sorted(commands, key=lambda name: -RUNS[name].gpus), here or [None], [], 0
    slots = len(free)
    try:
        while waiting or running:
            while waiting and len(free) >= (needed := min(RUNS[waiting[0]].gpus or slots, slots)):
                name, gpus, free = waiting.pop(0), free[:needed], free[needed:]
                running.append(begin(name, commands[name], folder, gpus, slots > 1 and RUNS[name].gpus > 0))
            time.sleep(POLL)
            for one in [*running]:
                if one.process.poll() is not None or time.perf_counter() > one.start + 60 * minutes:
                    running.remove(one)
                    free += one.gpus
                    failures += end(one)
    finally:
        stop([one.process for one in running])
        for one in running:
            end(one)
    return failures


def begin(name, command, folder, gpus, beside_others):
    """Start a command; beside others, what it prints goes to a file."""
    print(f"{name}: {typed(command)}", flush=True)
    results = folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    script, *options = shlex.split(command)
    written = results / f"{name}.part.json"
    written.unlink(missing_ok=True)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if beside_others else {})
    with open(results / f"{name}.log", "w") if beside_others else nullcontext() as log:
        process = subprocess.Popen([sys.executable, BENCH / script, *options, "--json", written], env=environment,
                                   stdout=log, stderr=log, start_new_session=True)  # fmt: skip
    return Running(name, process, gpus, time.perf_counter(), written)


def end(one):
    """Say how a command went, after stopping it if it still runs; only whole results replace others. Returns whether it
    failed."""
    stop([one.process])
    failed = one.process.returncode != 0
    said = f"{one.name}: {'failed' if failed else 'done'} after {time.perf_counter() - one.start:.0f} s"
    if one.written.exists():
        if failed:
            said += f"; what it has measured is in {one.written.name}"
        else:
            one.written.replace(one.written.with_name(f"{one.name}.json"))
    print(said, flush=True)
    return failed


def stop(processes):
    """End those that still run, with all that they have begun: as Ctrl-C does, then for certain."""
    processes = [process for process in processes if process.poll() is None]
    for number in signal.SIGINT, signal.SIGKILL:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        end = time.monotonic() + GRACE
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0, end - time.monotonic()))


def gpus_here():
    """Names of the GPUs, as CUDA_VISIBLE_DEVICES has them."""
    from peers import cupy, require_gpu  # loads torch

    try:
        require_gpu()
    except SystemExit:
        return []
    count = cupy.cuda.runtime.getDeviceCount()
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]


def typed(command):
    return f"python bench/{command}"


# ---------------------------------------------------------------------------------------------------------------- page
def load(folder):
    """Results by the name of their run."""
    files = {name: folder / f"results/{name}.json" for name in (*RUNS, COUNTS)}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def page(results):
    """The text of the page, and its figures by file name."""
    sections, figures = {}, {}
    for title, name, draw in SECTIONS:
        if name in results:
            figure, said = draw(results[name])
            file = f"plots/{draw.__name__}.png"
            figures[file] = figure
            sections[title] = f"![{figure.get_suptitle()}]({file})\n\n{wrapped(said)}"
    if COUNTS in results:
        sections["Tests of other projects"] = wrapped(conformance.section(results[COUNTS]))
    if missing := [f"- {name}: `{typed(RUNS[name].command)} --json bench/results/{name}.json`"
                   for name in RUNS if name not in results]:  # fmt: skip
        sections["Not measured"] = "\n".join(missing)
    sections["Commands, commits and machines"] = measured(results)
    short = "\n".join(f"- [{title}]({anchor(title)}): {figures[file].get_suptitle()}" for title, _, draw in SECTIONS
                      if draw in IN_SHORT and (file := f"plots/{draw.__name__}.png") in figures)  # fmt: skip
    contents = wrapped("**Contents.** " + " · ".join(f"[{title}]({anchor(title)})" for title in sections))
    parts = (f"## {title}\n\n{text}" for title, text in sections.items())
    return "\n\n".join(filter(None, [TITLE, short, contents, INTRODUCTION, *parts])) + "\n", figures


def anchor(title):
    """Where GitHub's links to a section lead."""
    return "#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def wrapped(text):
    """Paragraphs in lines; tables as they are."""
    return "\n\n".join(part if part[0] in "|<" else textwrap.fill(part, 120, break_on_hyphens=False)
                       for part in text.split("\n\n"))


TITLE = "# How fast, how exact, how much memory"
INTRODUCTION = """This page is generated by `python bench/report.py` from the files in [results](results), which hold
every number; `python bench/report.py --run` measures on your machine first. The libraries take turns in interleaved
rounds, and each number is a median. Timings on a shared machine vary: compare only those of the same run. “The standard
formula” is attention as one writes it in NumPy or CuPy, with its matrix of scores; “the paper” is FlashAttention's (Dao
et al. 2022). Tables of speed over that of others have geometric means, and ranges in brackets. The last section says on
what, by which command and on which commit it was measured."""


def measured(results):
    """What was measured by which command, as it was on its commit, and on which machine."""
    machines = list(dict.fromkeys(describe(found["machine"]) for found in results.values()))
    rows = [{
        "results": f"[{name}](results/{name}.json)",
        "commit": found["commit"] or "-", "date": found["machine"]["date"],
        "machine": machines.index(describe(found["machine"])) + 1, "command": f"`{found['command']}`",
    } for name, found in results.items()]  # fmt: skip
    lines = "\n".join(f"{number}. {machine}" for number, machine in enumerate(machines, 1))
    return f"{tabulate(rows, headers='keys', tablefmt='github')}\n\nMachines:\n\n{lines}"


def describe(machine):
    """Hardware and versions in one line."""
    gpu = machine.get("gpu", {})
    parts = [gpu.get("name"), gpu.get("driver_version") and f"driver {gpu['driver_version']}",
             f"{machine['cpu']}, {machine['cores']} cores",
             *(f"{name} {version}" for name, version in machine["versions"].items() if version)]  # fmt: skip
    return ", ".join(filter(None, parts))


def filled(readme, results):
    """README.md with its numbers up to date: what is between the comments of FILLED and END."""
    for start, (names, said) in FILLED.items():
        before, _, rest = readme.partition(start)
        _, end, after = rest.partition(END)
        if end and results.keys() >= {*names}:
            readme = f"{before}{start}\n{wrapped(said(*map(results.get, names)))}\n{end}{after}"
    return readme


def write_picture(figure, path):
    """In few colours: text and lines look as good, and the file is small."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=180)
    Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def write(folder, readme):
    results = load(folder)
    if not results:
        sys.exit(f"There are no results in {folder / 'results'}: --run measures")
    text, figures = page(results)
    (folder / "plots").mkdir(exist_ok=True)
    for file, figure in figures.items():
        write_picture(figure, folder / file)
    (folder / "README.md").write_text(text)
    if readme:
        readme.write_text(filled(readme.read_text(), results))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", choices=list(RUNS), metavar="NAME",
                        help=f"measure first: {', '.join(RUNS)} (default: all)")
    parser.add_argument("--small", action="store_true", help="--run at the smallest sizes, where a command has them")
    parser.add_argument("--minutes", type=float, default=MINUTES,
                        help=f"after which a command of --run is stopped (default: {MINUTES})")
    parser.add_argument("--folder", type=Path, default=BENCH, help="of results, plots and README.md (default: bench)")
    options = parser.parse_args()
    failed = 0
    if options.run is not None:
        failed = run(options.run or RUNS, options.small, options.folder, options.minutes)
    write(options.folder, BENCH.parent / "README.md" if options.folder == BENCH else None)
    return failed


if __name__ == "__main__":
    for number in signal.SIGINT, signal.SIGTERM:  # in the background, too
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
