# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6,<3", "numpy>=1.26,<3", "matplotlib>=3.8,<4"]
# ///
"""Lesson 1: architecture overview.

This course builds the Transformer of 2017 by hand, part by part, until lesson 8
trains a translator with it. This lesson is the plan. When you have worked through it
you can say why a translator needs attention, name every part of the model, count its
parameters to the last one, and tell beforehand what a model needs in memory and
arithmetic.

    python 01_architecture_overview.py               the lesson; --section 3 only a part
    python 01_architecture_overview.py --quiz        questions, with explanations
    python 01_architecture_overview.py --check FILE  the exercise, in a file of your own
    python 01_architecture_overview.py --d-model 256 --n-heads 8 --d-ff 1024
        --n-layers 4 --vocab 8000                    what such a model needs

Exercise: write count_parameters(d_model, n_heads, d_ff, n_layers, vocab_size): the
number of parameters of a Transformer as in section 4, with n_layers encoder and
n_layers decoder layers and one matrix for source, target and output. Return an int.

Source: Vaswani et al., "Attention Is All You Need" (2017), sections 1 to 3 and table 1.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import copy
import inspect
import io
import math
import os
import re
import runpy
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode


# ---- The task ----
def section_task() -> None:
    """Why a translator needs words that come later

    Translating word by word fails at the first word. French has two words for "the", le
    and la, and the noun decides, which comes last. Here are six phrases. Read one from
    the left, word by word: how many French words are still possible at each place, if all
    that is known is what was read?

    So a word's vector must take up information from other words, near or far. A recurrent
    network hands it on from word to word: n steps for n words, one after the other, and
    something may be lost at each. Attention looks at every word directly: one step at any
    distance, all words at once. Its price is that n words make n² pairs.
    """
    phrases = {
        "the old garden": "le vieux jardin",
        "the old house": "la vieille maison",
        "the old tree": "le vieil arbre",
        "the new garden": "le nouveau jardin",
        "the new house": "la nouvelle maison",
        "the new tree": "le nouvel arbre",
    }
    open_words = []
    for read in ("", "the", "the old", "the old garden"):
        fitting = [phrases[english].split() for english in phrases if english.startswith(read)]
        open_words.append([sorted(set(words)) for words in zip(*fitting, strict=True)])
        counts = [len(words) for words in open_words[-1]]
        first = " or ".join(open_words[-1][0])
        print(f"    read: {read or '(nothing)':<15} words possible: {counts}   the first: {first}")
    print()
    before, after = open_words[2][0], open_words[3][0]
    evidence = f"{before} after two words, {after} after three"
    check("the last word decides the first one", len(before) > 1 == len(after), evidence)
    print("\n  How the work of a layer grows with the number n of words, of width d = 512 (table 1")
    print("  of the paper, which leaves out constants and what both kinds have in common):\n")
    d = 512
    rows = ([n, 1, n * n * d, n, n * d * d] for n in (10, 25, 100, 512, 2000))
    table(["n", "attention: steps", "n² d", "recurrent: steps", "n d²"], *rows)
    print("\n  Up to n = d attention's part is the smaller one, and few sentences are longer.")


# ---- The plan ----
class Sizes(NamedTuple):
    """What decides the size of a Transformer."""

    d_model: int  # width: numbers in the vector of a token
    n_heads: int  # attention heads; they share the width
    d_ff: int  # inner width of the feed-forward network
    n_layers: int  # encoder layers, and as many decoder layers
    vocab_size: int  # of one vocabulary for both languages


VOCABULARY = 37_000  # the paper's, English-German
SIZES = {
    "Tiny": Sizes(64, 4, 128, 2, VOCABULARY),
    "Small": Sizes(256, 8, 512, 4, VOCABULARY),
    "Base": Sizes(512, 8, 2048, 6, VOCABULARY),
    "Big": Sizes(1024, 16, 4096, 6, VOCABULARY),
}


def torch_transformer(sizes: Sizes) -> tuple[nn.Transformer, nn.Embedding]:
    """Return PyTorch's own Transformer, as in the paper, and its one embedding matrix.

    They stand on the "meta" device, where tensors have shapes but no memory, so that any size can
    be built in no time. PyTorch adds a norm after each stack, which the paper does not have.
    """
    d, heads, d_ff, n, vocabulary = sizes
    with torch.device("meta"):
        model = nn.Transformer(d, heads, n, n, d_ff, dropout=0.1, batch_first=True)
        model.encoder.norm = model.decoder.norm = None
        return model, nn.Embedding(vocabulary, d)


def section_plan() -> None:
    """The whole model, with the shapes on the arrows

    The encoder, on the left, reads the source and makes of every token a vector that
    knows the whole sentence: the memory. The decoder, on the right, reads what has been
    written so far, looks into the memory, and gives for every place a score to each word
    of the vocabulary, the logits; softmax makes probabilities of them. The word after the
    last place is the next word of the translation. It is appended, and the decoder goes
    on.

    A token is a word, or a piece of one; bos and eos are two more, for the beginning and
    the end of a sentence. A tensor is an array of numbers, and its shape says how many
    along each dimension. The first is the batch, the number of sentences, here 1. The
    shapes are read off PyTorch's own model while one sentence pair runs through it.
    """
    source, written = ["the", "old", "garden"], ["bos", "le", "vieux", "jardin"]
    model, embedding = torch_transformer(SIZES["Base"])
    src, tgt = (torch.zeros(1, len(w), dtype=torch.long, device="meta") for w in (source, written))
    src_vectors, tgt_vectors = embedding(src), embedding(tgt)
    memory = model.encoder(src_vectors)
    states = model.decoder(tgt_vectors, memory)
    logits = states @ embedding.weight.T
    tensors = (src, tgt, src_vectors, tgt_vectors, memory, states, logits)
    a, b, c, d, e, f, g = (str(tuple(tensor.shape)) for tensor in tensors)
    print(f"""\
       {" ".join(source):<35}   {" ".join(written)}
             |                                        |
             | {a:<36}   | {b}
             v                                        v
    +------------------+                     +------------------+
    | embedding        |                     | embedding        |    lesson 2
    | + position       |                     | + position       |
    +------------------+                     +------------------+
             | {c:<36}   | {d}
             v                                        v
    +------------------+                     +------------------+
    | self-attention   |                     | masked           |    lesson 3
    |   add & norm     |                     | self-attention   |
    | feed-forward     |                     |   add & norm     |    lesson 4: encoder
    |   add & norm     |  memory             | cross-attention  |    lesson 5: decoder
    +------------------+  {e:<14} +-->|   add & norm     |
        x 6  |                 |             | feed-forward     |
             +-----------------+             |   add & norm     |
                                             +------------------+
                                                 x 6  | {f}
                                                      v
                                             +------------------+
                                             | linear, softmax  |    lesson 6
                                             +------------------+
                                                      | {g}
                                                      v
                                             le vieux jardin eos
""")
    rows = memory.shape[1], logits.shape[1]
    fits = rows == (len(source), len(written))
    check("a row of memory for each source token, of logits for each written one", fits, f"{rows}")


def section_names() -> None:
    """Every name of the paper's figure

    d_model is the width of all vectors that travel along the arrows; N is the number of
    layers of a stack, 6 in the paper. The last column says where each part is built.
    """
    table(
        ["name", "what it is", "lesson"],
        ["Inputs", "ids: the numbers of the source tokens", "2"],
        ["Input Embedding", "a row of a table for each id", "2"],
        ["Positional Encoding", "added: a vector that tells the position", "2"],
        ["Multi-Head Attention", "each token takes h mixtures of all, one a head", "3"],
        ["Masked Multi-Head Att.", "the same, but nobody looks ahead", "3, 5"],
        ["Add & Norm", "what came in is added; then mean 0, variance 1", "4"],
        ["Feed Forward", "two matrices with max(0, x) between, per token", "4"],
        ["Nx", "N layers with weights of their own", "4, 5"],
        ["Outputs (shifted right)", "what has been written, after bos", "5"],
        ["Output Embedding", "the same for the target, with the same table", "2"],
        ["Encoder, decoder", "the left and the right stack", "6"],
        ["Linear", "the scores of all words; shares the table", "6"],
        ["Softmax, probabilities", "exp of the scores, divided by their sum", "3, 6"],
    )
    print("\n  Lesson 7 trains the model on a toy, lesson 8 on real text.")


# ---- Counting ----
def attention_parameters(d: int) -> int:
    """Four matrices (query, key, value, output) with biases. The heads only divide the width."""
    return 4 * (d * d + d)


def feed_forward_parameters(d: int, d_ff: int) -> int:
    """Two matrices with biases."""
    return 2 * d * d_ff + d_ff + d


def norm_parameters(d: int) -> int:
    """A gain and a bias for each of d numbers."""
    return 2 * d


def parameters_by_part(sizes: Sizes) -> dict[str, int]:
    """Count the parameters of a post-norm encoder-decoder with one tied matrix, by part.

    An encoder layer has 1 attention and 2 norms, a decoder layer 2 and 3; each has 1 feed-forward
    network.

    >>> sum(parameters_by_part(Sizes(256, 4, 1024, 3, 16000)).values())
    9625600
    """
    d, _, d_ff, n, vocabulary = sizes
    return {
        "embedding": vocabulary * d,
        "attention": n * (1 + 2) * attention_parameters(d),
        "feed-forward": n * (1 + 1) * feed_forward_parameters(d, d_ff),
        "norms": n * (2 + 3) * norm_parameters(d),
    }


def section_counting() -> None:
    """Parameters, to the last one

    Parameters are the numbers that training sets. A bias is a vector that is added to a
    product with a matrix; a gain multiplies, entry by entry. Query, key, value and heads
    come in lesson 3. With d for d_model:

        attention       4 (d² + d)              query, key, value and output, with biases
        feed-forward    2 d d_ff + d_ff + d     two matrices with biases
        norm            2 d                     gain and bias
        encoder layer   1 attention, 1 feed-forward, 2 norms
        decoder layer   2 attentions, 1 feed-forward, 3 norms
        embedding       vocabulary × d          one matrix for source, target and output

    The number of heads does not occur. The judge is PyTorch's own model, which is built
    in each size and counted.
    """
    header = ["size", "d_model", "heads", "d_ff", "layers", *parameters_by_part(SIZES["Tiny"])]
    parts = {name: parameters_by_part(sizes) for name, sizes in SIZES.items()}
    rows = ([name, *SIZES[name][:4], *part.values()] for name, part in parts.items())
    table(header, *rows)
    print(f"    (vocabulary {VOCABULARY:,}; n layers are n + n)\n")
    for name, sizes in SIZES.items():
        ours, judges = sum(parts[name].values()), torch_transformer(sizes)
        built = sum(p.numel() for module in judges for p in module.parameters())
        check(f"{name}: formula = model", ours == built, f"{ours:,} = {built:,}")
    print("\n  Where they live, in percent:\n")
    shares = [[100 * n / sum(part.values()) for n in part.values()] for part in parts.values()]
    rows = ([name, *(f"{x:.1f}" for x in row)] for name, row in zip(SIZES, shares, strict=True))
    table(["size", *parts["Tiny"]], *rows)


def draw_parameters(figure: Any) -> None:
    """Draw where the parameters of each size live, as stacked bars."""
    axes, parts = figure.subplots(), [parameters_by_part(sizes) for sizes in SIZES.values()]
    totals = [sum(part.values()) for part in parts]
    labels = [f"{name}\n{total / 1e6:.1f}M" for name, total in zip(SIZES, totals, strict=True)]
    left = torch.zeros(len(SIZES))
    for name, grey in zip(parts[0], ("0.3", "0.55", "0.8", "white"), strict=True):
        width = torch.tensor([100 * part[name] / sum(part.values()) for part in parts])
        axes.barh(labels, width, left=left, color=grey, edgecolor="black", label=name)
        left += width
    axes.invert_yaxis()
    axes.set(xlabel=f"percent of all parameters (vocabulary {VOCABULARY:,})", xlim=(0, 100))
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


# ---- Real models ----
def section_blueprints() -> None:
    """Real models, in one notation

    Seven years of models differ in size more than in kind. The sizes are those the
    authors published; "computed" is what the formulas of the last section make of them.
    """
    base, big = SIZES["Base"], SIZES["Big"]
    opus = Sizes(512, 8, 2048, 6, 62_518)
    tied = [sum(parameters_by_part(sizes).values()) for sizes in (base, big, opus)]
    d, layers = 768, 12
    layer = attention_parameters(d) + feed_forward_parameters(d, 4 * d) + 2 * norm_parameters(d)
    gpt2 = (50_257 + 1024) * d + layers * layer + norm_parameters(d)
    d, keys = 4096, 4096 * 8 // 32  # no biases; keys and values have 8 heads of the 32
    layer = 2 * d * d + 2 * d * keys + 3 * d * 14_336 + 2 * d
    llama = 2 * 128_256 * d + 32 * layer + d
    table(
        ["model", "layers", "d_model", "heads", "d_ff", "vocab", "reported", "computed"],
        ["base, 2017", "6+6", 512, 8, 2048, 37_000, "65M", tied[0]],
        ["big, 2017", "6+6", 1024, 16, 4096, 37_000, "213M", tied[1]],
        ["GPT-2, 2019", "12", 768, 12, 3072, 50_257, "124M", gpt2],
        ["opus-mt, 2020", "6+6", 512, 8, 2048, 62_518, "-", tied[2]],
        ["Llama 3.1 8B, 2024", "32", 4096, 32, 14_336, 128_256, "8.03B", llama],
        ["DeepSeek-V3, 2024", "61", 7168, 128, 18_432, 129_280, "671B", "-"],
    )
    print("""
  base and big are the paper's, which does not say how it counted.
  What differs from it:
    GPT-2        decoder only: no cross-attention; a learned table of 1,024 positions;
                 norms before attention and feed-forward, and a last one
    opus-mt      another vocabulary (this is opus-mt-en-ru)
    Llama        decoder only; no biases, norms without them; 8 heads of keys and values
                 for 32 of queries, which are rotated by position; a third matrix in the
                 feed-forward network; two matrices for embedding and output
    DeepSeek-V3  decoder only; most layers have 256 feed-forward networks (experts) of
                 d_ff 2,048, of which a token uses 8, and a shared one: 37B of the 671B
""")
    check("GPT-2 has 124M", round(gpt2 / 1e6) == 124, f"{gpt2:,}")
    check("Llama 3.1 8B has 8.03B", round(llama / 1e9, 2) == 8.03, f"{llama:,}")
    file, weights = 306_991_893, 4 * (tied[2] + 2 * 512 * 512 + 62_518)
    evidence = f"{weights:,} of {file:,} bytes"
    print("\n  The file of opus-mt-en-ru holds two position tables and an output bias besides, 4")
    print("  bytes a number. What is left over are names and sizes of the tensors.")
    check("so its length is explained to 0.02%", 0 <= file - weights < 0.0002 * file, evidence)


# ---- Memory and arithmetic ----
SRC_LENGTH, TGT_LENGTH = 20, 24  # tokens of a usual sentence pair


def forward_flops(sizes: Sizes) -> int:
    """Count the additions and multiplications in the matrix products for such a sentence pair.

    A product (m, k) @ (k, n) takes 2 m k n. Of all arithmetic, only the softmaxes, norms and the
    like are left out, which are few.
    """
    d, _, d_ff, n, vocabulary = sizes
    s, t = SRC_LENGTH, TGT_LENGTH
    encoder = s * 4 * d * d + 2 * s * s * d + s * 2 * d * d_ff
    masked = t * 4 * d * d + 2 * t * t * d
    cross = t * 2 * d * d + s * 2 * d * d + 2 * t * s * d  # keys and values are the memory's
    return 2 * (n * (encoder + masked + cross + t * 2 * d * d_ff) + t * d * vocabulary)


def run_on_meta(sizes: Sizes, batch: int, backward: bool = False) -> tuple[int, int]:
    """Run PyTorch's model on the shapes of a batch; return FLOPs and bytes of activations.

    Activations are what the forward pass must keep for the backward pass: autograd hands each such
    tensor to a hook. Several may share one storage, which counts once; weights do not count.
    """
    model, embedding = torch_transformer(sizes)
    parameters = [*model.parameters(), embedding.weight]
    with torch.device("meta"):
        src, tgt = (torch.zeros(batch, n, dtype=torch.long) for n in (SRC_LENGTH, TGT_LENGTH))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter:
        with hooks:
            logits = model(embedding(src), embedding(tgt)) @ embedding.weight.T
        for parameter in parameters:
            kept.pop(parameter.untyped_storage()._cdata, None)
        if backward:
            logits.sum().backward()
    return counter.get_total_flops(), sum(kept.values())


def needs(sizes: Sizes, activations: int) -> list[str]:
    """Return MB of weights, of training state and of activations, and MFLOP a target token."""
    parameters = sum(parameters_by_part(sizes).values())
    a_token = forward_flops(sizes) / TGT_LENGTH
    numbers = (4 * parameters, 16 * parameters, activations, a_token, 3 * a_token)
    return [f"{number / 1e6:,.1f}" for number in numbers]


NEEDS = ["weights", "training", "activations", "forward", "training"]
UNITS = f"""\
    MB for weights, for training (weights, gradients, Adam), for the activations of 32
    pairs of {SRC_LENGTH} + {TGT_LENGTH} tokens; MFLOP a target token, forward and in training:
"""


def section_needs() -> None:
    """What a model needs: memory and arithmetic

    Training shows the model examples and corrects its parameters a little after each: the
    forward pass computes what it answers, the backward pass how each parameter ought to
    change, its gradient. In use, which is also called inference, there is only the
    forward pass.

    Memory. A number takes 4 bytes (fp32). In use a model needs its weights. In training
    every parameter has three companions: its gradient, and two averages kept by Adam, the
    method that makes the corrections (lesson 7): 16 bytes a parameter in all. On top come
    the activations: results of the forward pass that the backward pass will need, counted
    here while PyTorch's model runs on shapes alone, up to the logits. (The loss keeps one
    more number for each logit.)

    Arithmetic is counted in FLOPs, additions and multiplications of numbers. Nearly all
    of it is matrix products, and a product (m, k) @ (k, n) takes 2 m k n. The backward
    pass needs two products for every one of the forward pass, so training takes 3 times
    as much.
    """
    runs = {name: run_on_meta(sizes, 32) for name, sizes in SIZES.items()}
    print(UNITS)
    rows = ([name, *needs(sizes, runs[name][1])] for name, sizes in SIZES.items())
    table(["size", *NEEDS], *rows)
    print()
    for name, sizes in SIZES.items():
        ours, counted = 32 * forward_flops(sizes), runs[name][0]
        check(f"{name}: FLOPs as PyTorch counts them", ours == counted, f"{ours:,} for 32 pairs")
    flops, small = run_on_meta(SIZES["Tiny"], 8, backward=True)
    ours = 8 * forward_flops(SIZES["Tiny"])
    check("with the backward pass, 3 times as many", flops == 3 * ours, f"{flops:,} = 3 × {ours:,}")
    evidence = f"Tiny, 8 pairs: {small:,} bytes, 32 pairs: {runs['Tiny'][1]:,}"
    check("activations grow with the batch", runs["Tiny"][1] == 4 * small, evidence)
    print("\n  That is the plan and its price. Lesson 2 begins to build: from words to vectors.")


def calculate(args: argparse.Namespace) -> int:
    """Print what a model of the sizes on the command line needs; sizes not given are Base's."""
    given = (args.d_model, args.n_heads, args.d_ff, args.n_layers, args.vocab)
    sizes = Sizes(*(b if g is None else g for g, b in zip(given, SIZES["Base"], strict=True)))
    if not (all(size >= 1 for size in sizes) and sizes.n_layers <= 200 and max(sizes) <= 10**7):
        refuse("sizes must be from 1 to 10,000,000, layers at most 200.")
    if sizes.d_model % 2 or sizes.d_model % sizes.n_heads:
        refuse(f"--d-model must be even, and a multiple of --n-heads: {sizes[0]} and {sizes[1]}.")
    parts = parameters_by_part(sizes)
    table(["part", "parameters"], *parts.items(), ["in all", sum(parts.values())])
    print(f"\n{UNITS}")
    table(NEEDS, needs(sizes, run_on_meta(sizes, 32)[1]))
    return 0


# ---- Quiz and exercise ----
def quiz() -> str:
    """Return the questions: ? the text, = the answer, ! an explanation."""
    base, tiny = parameters_by_part(SIZES["Base"]), SIZES["Tiny"]
    return f"""
? Batch of 32 sentence pairs, source of 3 tokens, decoder input of 5, d_model 64:
   what is the shape of the memory?
= {(32, 3, tiny.d_model)}
! The memory has a vector for each source token. The decoder's length does not
enter.

? The same batch, a vocabulary of 1,000: what is the shape of the logits?
= {(32, 5, 1000)}
! For every place of the decoder input a score for each word of the vocabulary.

? d_model 512: how many parameters does one multi-head attention have?
= {attention_parameters(512)}
! 4 (d² + d): four matrices of 512 × 512, each with 512 biases.

? And with 16 heads in place of 8?
   a) twice as many
   b) just as many
   c) half as many
= b
! More heads are narrower heads: they divide the width d_model among themselves.

? Base, vocabulary {VOCABULARY:,}: how many parameters does its embedding matrix
   have?
= {base["embedding"]}
! {VOCABULARY:,} rows of 512, and it is there only once: source, target and output
share it.

? How many bytes does training with Adam take per parameter in fp32, without
   activations?
= {4 * 4}
! Weight, gradient and Adam's two averages, 4 bytes each.

? A product of a (10, 64) and a (64, 20) matrix: how many FLOPs?
= {2 * 10 * 64 * 20}
! 10 × 20 results, each a sum of 64 products: 64 multiplications and about 64
additions.

? Why can attention use what comes at the far end of a sentence more easily than a
   recurrent network?
   a) it has more parameters
   b) it reads the sentence backwards as well
   c) every word reaches every other in one step
= c
! In a recurrent network the information passes through every word between.
"""


def exercise() -> list[tuple]:
    """Return name, solution, inputs by case and usual mistakes of each function to write."""

    def version(
        bias: int = 1,
        norms: int = 5,
        attentions: int = 3,
        matrices: int = 1,
        final_norms: int = 0,
        times_heads: bool = False,
    ) -> Callable:
        def count(d_model: int, n_heads: int, d_ff: int, n_layers: int, vocab_size: int) -> int:
            attention = 4 * (d_model**2 + bias * d_model) * (n_heads if times_heads else 1)
            feed_forward = 2 * d_model * d_ff + bias * (d_ff + d_model)
            layers = attentions * attention + 2 * feed_forward + norms * 2 * d_model
            final = final_norms * 2 * d_model
            return n_layers * layers + matrices * vocab_size * d_model + final

        return count

    def solution(*sizes: int) -> int:
        return sum(parameters_by_part(Sizes(*sizes)).values())

    cases = {name: tuple(sizes) for name, sizes in SIZES.items()}
    cases["3 + 3 layers, d_model 256, vocabulary 16,000"] = (256, 4, 1024, 3, 16_000)
    cases["1 + 1 layers, one head"] = (8, 1, 32, 1, 100)
    mistakes = {
        "the biases are missing": version(bias=0),
        "the decoder layer is counted with one attention: it has two": version(attentions=2),
        "the decoder layer is counted with two norms: it has three": version(norms=4),
        "the norms are missing": version(norms=0),
        "source, target and output have matrices of their own: they share one": version(matrices=3),
        "source and target have matrices of their own: they share one": version(matrices=2),
        "the embedding is missing": version(matrices=0),
        "attention is multiplied by the heads: they divide the width": version(times_heads=True),
        "final norms are counted, which only pre-norm has": version(final_norms=2),
    }
    return [("count_parameters", solution, cases, mistakes)]


FLAGS: dict[str, tuple] = {  # flags of this lesson alone: what each does instead, its options
    "--d-model": (calculate, dict(type=int, metavar="N", help="calculator: width, even")),
    "--n-heads": (calculate, dict(type=int, metavar="N", help="calculator: heads")),
    "--d-ff": (calculate, dict(type=int, metavar="N", help="calculator: inner width")),
    "--n-layers": (calculate, dict(type=int, metavar="N", help="calculator: layers per stack")),
    "--vocab": (calculate, dict(type=int, metavar="N", help="calculator: vocabulary")),
}


# ---- Asking and grading: the same text in lessons 1 to 7, as is the classroom below it ----
def means(typed: str, answer: str) -> bool:
    """Return whether `typed` is the answer: a shape, a number or the letter of a choice.

    >>> means("2 x 3 x 6", "(2, 3, 6)"), means("3/4", "0.75"), means("1000 rows", "1,000")
    (True, True, True)
    """
    typed = typed.strip().lower()
    if answer.isalpha():
        return typed.strip(" ().:") == answer
    if answer.startswith("("):
        sizes = re.findall(r"\d+|[^\d\s,x×*()\[\]]", typed.removeprefix("torch.size"))
        return sizes == re.findall(r"\d+", answer)
    typed = re.sub(r"(?<!^0)[ _,](?=\d{3}(?!\d))|(?<=\d)\s*[a-z]+$", "", typed)
    over, _, under = typed.replace(",", ".").replace("%", "e-2").partition("/")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        number, slack = float(answer.replace(",", "")), 0.01 * ("." in answer)
        return math.isclose(float(over) / float(under or 1), number, rel_tol=slack)
    return False


def ask() -> int:
    """Ask the questions of `quiz`, each with a second try, until they or the input end."""
    questions = re.findall(r"\? (.+?)\n= (.+?)\n! (.+?)\n(?=\n|$)", quiz(), re.DOTALL)
    first = second = 0
    print("Answer with a number, a shape like (2, 3) or a letter; Ctrl-D ends.")
    with contextlib.suppress(EOFError, RuntimeError):  # the latter where there is no input at all
        for number, (question, answer, why) in enumerate(questions, 1):
            print(f"\n{number}. {question}")
            right = means(input("> "), answer)
            first += right
            print(f"{'Right.' if right else 'Not so.'}\n{why}")
            if not right:
                again = means(input("Once more > "), answer)
                second += again
                print("Right." if again else f"The answer is {answer}.")
    print(f"\nOf {len(questions)} questions, {first} right at once, {second} at the second try.")
    return 0


def refuse(sentence: str) -> NoReturn:
    """Say what is wrong outside the program and end with status 2."""
    print("error:", *sentence.split(), file=sys.stderr)  # an exception's words may have line ends
    sys.exit(2)


def outcome(function: Callable, arguments: tuple) -> list[Tensor]:
    """Return what a function makes of copies of the arguments, each result in float64."""
    results = function(*copy.deepcopy(arguments))
    if results is None:
        raise ValueError("it returns None: is a return missing?")
    results = results if isinstance(results, tuple) else (results,)
    return [torch.as_tensor(result, dtype=torch.float64).detach() for result in results]


def difference(want: list[Tensor], have: list[Tensor]) -> str:
    """Return the first difference in words, nothing where there is none."""
    if len(have) != len(want):
        return f"results expected {len(want)}, got {len(have)}"
    for number, (right, mine) in enumerate(zip(want, have, strict=True), 1):
        which = f"result {number} of {len(want)}: " if len(want) > 1 else ""
        if mine.shape != right.shape:
            return f"{which}shape expected {tuple(right.shape)}, got {tuple(mine.shape)}"
        for cell in (~torch.isclose(mine, right, rtol=0, atol=1e-4, equal_nan=True)).nonzero():
            at = f"at {cell.tolist()} " if right.dim() else ""
            numbers = f"expected {right[tuple(cell)]:.9g}, got {mine[tuple(cell)]:.9g}"
            return f"{which}{at}{numbers}"
    return ""


def grade(file: Path) -> int:
    """Try the functions in a learner's file on the cases of the exercise; return the status."""
    if not file.is_file():
        refuse(f"{file} is {'a folder' if file.exists() else 'not there'}: --check takes a file.")

    def stop() -> None:  # from a second thread, since sleep() and input() hear no exception
        why = f"{file} was stopped at {title}: 20 seconds are enough. Does every loop end?"
        print(f"error: {why}", file=sys.stderr, flush=True)
        os._exit(2)

    alarm = threading.Timer(20, stop)
    alarm.start()
    title, right = "the file itself", 0
    try:
        answers = runpy.run_path(str(file))
        for name, solution, cases, mistakes in exercise():
            function = answers.get(name)
            if not callable(function):
                title = "the file itself"
                raise NameError(f"no function {name} in it; the lesson's first lines describe one")
            for title, arguments in cases.items():
                have = outcome(function, arguments)
                problem = difference(outcome(solution, arguments), have)
                if problem:
                    print(f"✗ {title}: {problem}.")
                    for mistake, wrong in mistakes.items():
                        if not difference(outcome(wrong, arguments), have):
                            print(f"  It looks as if {mistake}.")
                            break
                    return 1
                print(f"✓ {title}", flush=True)
                right += 1
    except (Exception, SystemExit) as error:  # whatever a learner's file may do
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f", line {frame.lineno}," for frame in frames if frame.filename == str(file)]
        refuse(f"{file}{''.join(lines[-1:])} fails at {title}: {type(error).__name__}: {error}.")
    finally:
        alarm.cancel()
    print(f"All {right} cases right.")
    return 0


# ---- Classroom: command line, printing, checks ----
PLAIN = dict(zip("✓✗×·²░▒▓█│─", ["ok", "NO", *"x.2.:+#|-"], strict=True))  # for other terminals
proved: list[str] = []  # what the checks of this run have shown


def check(statement: str, holds: bool, evidence: str) -> None:
    """Print what is proved, and by what; if it does not hold, the run ends with status 1."""
    text = f"{'✓' if holds else '✗'} {statement} ({evidence})"
    print(textwrap.fill(text, 86, initial_indent="  ", subsequent_indent="    "))
    if not holds:
        sys.exit("A check failed: something this lesson says does not hold here.")
    proved.append(statement)


def check_close(statement: str, ours: Tensor, reference: Any, tolerance: float = 1e-5) -> None:
    """Check that two tensors have one shape and nowhere differ by more than `tolerance`."""
    reference = torch.as_tensor(reference)
    assert ours.shape == reference.shape, f"{tuple(ours.shape)} and {tuple(reference.shape)}"
    gap = (ours - reference).abs().max().item()
    check(statement, gap <= tolerance, f"max difference {gap:.1e}")


def table(*rows: Sequence[Any]) -> None:
    """Print rows of cells, the header first; columns of numbers stand right, others left."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    for i, column in enumerate(zip(*texts, strict=True)):
        numbers, width = all(re.match(r"[-+.\d]", c) for c in column[1:]), max(map(len, column))
        for row in texts:
            row[i] = row[i].rjust(width) if numbers else row[i].ljust(width)
    print("\n".join("    " + "  ".join(row).rstrip() for row in texts))


def heat_map(values: Tensor, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Print values (rows, columns) from 0 to their largest as shades, the largest darkest."""
    shades = [["·░▒▓█"[i] * 3 for i in row] for row in (values / values.max() * 4).round().int()]
    table(["", *columns], *([label, *row] for label, row in zip(rows, shades, strict=True)))


def named(prefix: str) -> dict[str, Callable]:
    """Return the lesson's functions whose names begin with `prefix`, by the rest, in order."""
    return {k.removeprefix(prefix): v for k, v in globals().items() if k.startswith(prefix)}


def save_figures(folder: Path, figures: dict[str, Callable]) -> None:
    """Draw figures of the lesson, each into a PNG of its name."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        refuse("--figures needs matplotlib: pip install matplotlib.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in figures.items():
        figure, file = Figure(figsize=(7, 4), layout="constrained"), folder / f"{name}.png"
        torch.manual_seed(torch.initial_seed())
        draw(figure)
        figure.savefig(file.with_suffix(".tmp"), format="png", dpi=150)
        print(f"\nSaved {file.with_suffix('.tmp').replace(file)}")


def teach(args: argparse.Namespace) -> int:
    """Carry out what the flags ask for; return the exit status."""
    modes = {"--quiz": [lambda _: ask()], "--check": [lambda _: grade(args.check)], **FLAGS}
    modes["--section"] = [None]  # which is no action of its own
    given = [n for n in modes if getattr(args, n.strip("-").replace("-", "_")) is not None]
    actions = {modes[name][0] for name in given}
    if len(actions) > 1:
        refuse(f"{' and '.join(given)} do not go together: choose one.")
    for action in actions - {None}:
        return action(args)
    proved.clear()
    print("\n\n".join(__doc__.split("\n\n")[:2]))
    if args.figures:
        save_figures(args.figures, {})  # none yet: what is in the way is told before the lesson
    sections = list(named("section_").values())
    for number in args.section or range(1, len(sections) + 1):
        title, _, explanation = inspect.getdoc(sections[number - 1]).partition("\n\n")
        print(f"\n\n{number}. {title}\n{'─' * (len(title) + 3)}\n{explanation}\n")
        torch.manual_seed(args.seed % 2**32)
        sections[number - 1]()
    if args.figures:
        save_figures(args.figures, named("draw_"))
    done = f"\nAll {len(proved)} checks passed. " if proved else "\n"
    print(f"{done}Next: --quiz; the exercise (in --help), with --check.")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    codecs.register_error("plain", lambda e: (PLAIN.get(e.object[e.start], "?"), e.start + 1))
    for stream in (s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)):
        stream.reconfigure(errors="plain")
    if __doc__ is None:
        refuse("python -OO drops the text of the lesson: run it without -OO.")
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    titles = [section.__doc__.splitlines()[0] for section in named("section_").values()]
    parser.epilog = "\n".join(["sections:", *(f"  {n}  {t}" for n, t in enumerate(titles, 1))])
    numbers = dict(type=int, action="append", choices=range(1, len(titles) + 1), metavar="N")
    parser.add_argument("--section", help="show only this section (repeatable)", **numbers)
    parser.add_argument("--quiz", action="store_true", default=None, help="ask about the lesson")
    parser.add_argument("--check", type=Path, metavar="FILE", help="check the exercise in FILE")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="also save pictures in DIR")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: 1)")
    for name, (_, options) in FLAGS.items():
        parser.add_argument(name, **options)
    try:
        try:
            return teach(parser.parse_args(arguments))
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # a full disk; or whoever read the output has left
        with contextlib.suppress(OSError):  # what waits to be written would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        what = f"{error.filename or 'output'} cannot be written: {error.strerror}."
        return 141 if isinstance(error, BrokenPipeError) else refuse(what)


if __name__ == "__main__":
    sys.exit(main())
