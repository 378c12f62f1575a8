"""Draw the pictures of examples/README.md: run the examples as they are, and draw what they compute.

    python examples/gallery.py                      # all of them, in examples/pictures
    python examples/gallery.py masks tree --folder /tmp
    python examples/gallery.py --small --folder /tmp    # short runs, to see that it works
"""

import argparse
import runpy
import sys
from pathlib import Path

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure
from PIL import Image

import numbattn as na

EXAMPLES = Path(__file__).resolve().parent
SHADES = {"cmap": "Blues", "vmin": 0, "vmax": 1}
SHORT = {  # options
    "02_transformer.py": "--steps 20 --batch 2 --seqlen 32 --width 16 --layers 1 --heads 1",
    "08_attention_maps.py": "--steps 5",
    "10_pair_bias.py": "--steps 20",
    "11_generate.py": "--steps 10 --count 20 --nodes 8",
    "14_wave_function.py": "--steps 5",
    "15_curvature.py": "--steps 5 --products 5",
    "17_gaussian_process.py": "--points 1000 --fitted 200",
    "18_optimal_transport.py": "--points 200",
    "19_sparse_layers.py": "--fields 200 --steps 5",
    "21_lattice.py": "--size 16 --steps 5",
    "22_force_field.py": "--steps 5 --moves 5",
}


def run(example, small, *options):
    """Run an example; return its globals."""
    sys.modules.pop("02_transformer", None)  # other examples change it
    sys.argv = [example, *options, *(SHORT.get(example, "").split() if small else ())]
    return runpy.run_path(str(EXAMPLES / example), run_name="__main__")


def loss(file, small):
    run("02_transformer.py", small, "--plot", file)


def maps(file, small):
    run("08_attention_maps.py", small, "--plot", file)


def bias(file, small):
    run("10_pair_bias.py", small, "--plot", file)


def energy(file, small):
    run("14_wave_function.py", small, "--plot", file)


def spectrum(file, small):
    run("15_curvature.py", small, "--plot", file)


def terrain(file, small):
    run("17_gaussian_process.py", small, "--plot", file)


def transport(file, small):
    run("18_optimal_transport.py", small, "--plot", file)


def chaos(file, small):
    run("19_sparse_layers.py", small, "--plot", file)


def lattice(file, small):
    run("21_lattice.py", small, "--plot", file)


def metal(file, small):
    run("22_force_field.py", small, "--plot", file)


def metric(file, small):
    """A function of six features, two of which matter, and its estimates before and after training."""
    ran = run("05_autograd.py", small)
    side = np.linspace(-1, 1, 60)
    x = np.zeros((side.size**2, 6))
    x[:, :2] = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    found = {"function": np.sin(3 * x[:, 0]) * x[:, 1]}
    for name, log_w in (("estimate, all features alike", ran["start"]), ("estimate, learned weights", ran["found"])):
        found[name] = ran["estimate"](ran["attention"], log_w, x, ran["x"][1000:], ran["y"][1000:])
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, (name, y) in zip(panels, found.items()):
        image = axes.imshow(y.reshape(side.size, -1), origin="lower", extent=(-1, 1, -1, 1), vmin=-1, vmax=1)
        axes.set(title=name, xlabel="feature 1")
    panels[0].set_ylabel("feature 2")
    figure.colorbar(image, ax=panels, label="y")
    figure.savefig(file, dpi=150)


def tree(file, small):
    """A draft with many branches and the longest accepted path: its tokens, and what each of them sees."""
    ran = run("11_generate.py", small)
    text, drafts = ran["text"], []
    for n in range(len(ran["PROMPT"]) + 1, len(text)):
        tokens, parents = ran["draft"](ran["followers"], text[:n], 16)
        depths = na.Tail(na.Bits.tree(parents)).positions.tolist()
        choices = [text[n + depth] if n + depth < len(text) else None for depth in depths]  # right on the accepted path
        drafts.append((ran["longest_path"](tokens, parents, choices), tokens, parents, depths))
    path, tokens, parents, depths = max(drafts, key=lambda draft: (2 * max(draft[3]) < len(draft[1]), len(draft[0])))
    letters = [repr(chr(token))[1:-1].replace(" ", "·") for token in tokens]
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    nodes, mask = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for node, (parent, depth) in enumerate(zip(parents, depths)):
        accepted = node in path
        if parent >= 0:
            nodes.plot([depths[parent], depth], [parent, node], color="C0" if accepted else "0.7",
                       linewidth=2 if accepted else 1, zorder=0)  # fmt: skip
        nodes.text(depth, node, letters[node], family="monospace", ha="center", va="center",
                   bbox={"boxstyle": "circle", "facecolor": "white", "edgecolor": "C0" if accepted else "0.7"})
    nodes.set(xlabel="depth", ylabel="node", xlim=(-0.5, max(depths) + 0.5), ylim=(len(tokens), -1),
              title="a drafted tree, the accepted path in bold")  # fmt: skip
    mask.imshow(na.Bits.tree(parents).dense(len(tokens), len(tokens)), **SHADES)
    mask.set_xticks(range(len(tokens)), letters, family="monospace")
    mask.set_yticks(range(len(tokens)), letters, family="monospace")
    mask.set(xlabel="key", ylabel="query", title="its mask")
    figure.savefig(file, dpi=150)


def masks(file, small):
    """What each mask shows of 16 keys to 16 queries, a `Tail` to 8."""
    n, rng = 16, np.random.default_rng(0)
    first, parents = rng.integers(n // 2, size=n), [-1, 0, 0, 1, 1, 2, 3, 3]
    segments, streaming = na.Segments([0, 9, 16]), na.Causal() & (na.Window(2, 0) | na.First(2))
    drawn = {
        "Causal()": na.Causal(),
        "Window(3, 1)": na.Window(3, 1),
        "Lengths(keys=11,\nqueries=14)": na.Lengths(keys=11, queries=14),
        "First(4)": na.First(4),
        "Prefix(5)": na.Prefix(5),
        "Causal() &\n(Window(2, 0) | First(2))": streaming,
        "Segments([0, 9, 16])": segments,
        "Segments(...) & Causal()": segments & na.Causal(),
        "Intervals(first, end)": na.Intervals(first, first + rng.integers(1, n // 2, size=n)),
        "Dense(booleans)": na.Dense(rng.random((n, n)) < 0.5),
        "Where(function)": na.Where(lambda batch, head, i, j: (i - j) % 4 == 0 or abs(i - j) < 2),
        "Tail(Bits.tree(parents))": na.Tail(na.Bits.tree(parents)),
        "BlockSparse.butterfly": na.BlockSparse.butterfly((n, n), (2, 2)),
        "BlockSparse.strided": na.BlockSparse.strided((n, n), (2, 2), stride=3),
        "BlockSparse.local_global": na.BlockSparse.local_global((n, n), (2, 2)),
        "BlockSparse(blocks,\nblock_size=(4, 2))": na.BlockSparse(rng.random((n // 4, n // 2)) < 0.4, (4, 2)),
    }
    figure = Figure(figsize=(7, 7.2), layout="constrained")
    panels = figure.subplots(4, 4)
    for axes, (name, mask) in zip(panels.flat, drawn.items()):
        axes.imshow(mask.dense(len(parents) if isinstance(mask, na.Tail) else n, n), **SHADES)
        axes.set_title(name)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.supxlabel("key")
    figure.supylabel("query")
    figure.savefig(file, dpi=150)


DRAWN = loss, maps, bias, energy, spectrum, metric, tree, masks, terrain, transport, chaos, lattice, metal
PICTURES = {draw.__name__: draw for draw in DRAWN}


def make_smaller(file):
    """Reduce a picture to as few colours as it takes to look the same."""
    picture = Image.open(file).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, optimize=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)} (default: all)")
    parser.add_argument("--folder", type=Path, default=EXAMPLES / "pictures", help="where to draw")
    parser.add_argument("--small", action="store_true", help="short runs of the examples")
    args = parser.parse_args()
    if unknown := set(args.names) - PICTURES.keys():
        parser.error(f"no picture of the name {', '.join(sorted(unknown))}")
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names or PICTURES:
        rcParams.update({"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "figure.labelsize": 8})
        file = args.folder / f"{name}.png"
        PICTURES[name](str(file), args.small)
        make_smaller(file)
        print(file)


if __name__ == "__main__":
    main()
