"""Train the transformer of example 02 for a minute or two, then draw what each of its heads looks at in a sentence.

    python examples/08_attention_maps.py --plot maps.png

A row of a map is a query, the byte after which the next one is predicted: its weights on all bytes up to itself.
"""

import argparse
from importlib import import_module

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import numbattn as na

model = import_module("02_transformer")  # `import` takes no name that starts with a digit
LAYERS, HEADS, WIDTH, BATCH, SEQLEN = 3, 3, 96, 16, 128


def train(steps, rng):
    text, held_out = model.read_text()
    weights = model.init_weights(rng, WIDTH, LAYERS)
    adam = model.Adam(weights)
    for step in tqdm(range(steps), unit=" steps"):
        inputs, targets = model.windows(text, rng.integers(len(text) - SEQLEN, size=BATCH), SEQLEN)
        logits, transformer_back = model.transformer(inputs, weights, HEADS)
        _, loss_back = model.cross_entropy(logits, targets)
        adam.step(weights, transformer_back(loss_back()), 3e-3 * model.schedule((step + 0.5) / steps))
    print(f"validation: {model.validate(weights, HEADS, held_out, SEQLEN):.3f} bits per byte")
    return weights


def attention_maps(sentence, weights):
    """The weights of all heads for a text, (LAYERS, HEADS, seqlen, seqlen)."""
    maps = []

    def attention_vjp(q, k, v, **options):
        maps.append(na.attention_weights(q, k, **options)[0])
        return na.attention_vjp(q, k, v, **options)

    model.attention_vjp = attention_vjp  # called with q and k of one layer after the other
    model.transformer(np.frombuffer(sentence.encode(), np.uint8)[None], weights, HEADS)
    return np.array(maps)


def plot(file, maps, sentence):
    matplotlib.rcParams.update({"font.size": 8, "axes.titlesize": 8, "figure.labelsize": 8})
    figure = Figure(figsize=(7, 6.6), layout="constrained")
    panels = figure.subplots(LAYERS, HEADS, sharex=True, sharey=True)
    letters, visible = sentence.replace(" ", "·"), np.tri(len(sentence), dtype=bool)
    for (layer, head), axes in np.ndenumerate(panels):
        image = axes.imshow(np.where(visible, maps[layer, head], np.nan), cmap="Blues", vmin=0, vmax=1)
        axes.set(title=f"layer {layer + 1}, head {head + 1}", facecolor="0.93")
        axes.set_xticks(range(len(letters)), letters, family="monospace", fontsize=6)
        axes.set_yticks(range(len(letters)), letters, family="monospace", fontsize=6)
        axes.tick_params(length=0, pad=2)
        axes.spines[:].set_visible(False)
    figure.supxlabel("key")
    figure.supylabel("query")
    figure.colorbar(image, ax=panels, label="weight", shrink=0.4, aspect=30)
    figure.savefig(file, dpi=200)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="training steps, %(default)s unless given")
    parser.add_argument("--sentence", default="the value of a key value", help="about 25 letters, ASCII")
    parser.add_argument("--plot", metavar="FILE", default="maps.png", help="where to draw, %(default)s unless given")
    args = parser.parse_args()
    weights = train(args.steps, np.random.default_rng(0))
    plot(args.plot, attention_maps(args.sentence, weights), args.sentence)
