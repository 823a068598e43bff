# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6,<3", "numpy>=1.26,<3", "matplotlib>=3.8,<4"]
# ///
"""Lesson 4: the encoder layer.

Lesson 3 ended with attention, which gives every token a mixture of all of them. The
layer around it has four more parts: a feed-forward network, the residual stream,
LayerNorm and dropout. When you have worked through this lesson you can build the
layer, say what each part is for, count its parameters, and tell post-norm from
pre-norm.

    python 04_encoder_layer.py               the lesson; --section 3 only a part
    python 04_encoder_layer.py --quiz        questions, with explanations
    python 04_encoder_layer.py --check FILE  the exercise, in a file of your own

Exercise: write layer_norm(x, gain, bias, eps=1e-5). x is (..., d_model), gain and
bias are (d_model,). From the numbers of each token subtract their mean; divide by the
root of their variance plus eps; multiply by the gain and add the bias. Return a
tensor or array of the shape of x.

Sources: Vaswani et al., "Attention Is All You Need" (2017), sections 3.1, 3.3 and
5.4; Ba, Kiros and Hinton, "Layer Normalization" (2016).
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
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

PAD, BOS, EOS = 0, 1, 2  # the same ids in every lesson

KeysValues = tuple[Tensor, Tensor]  # each (B, heads, S, d_k)
Attended = tuple[Tensor, Tensor]  # output (B, T, d_model) and weights (B, heads, T, S)
Mask = Tensor | None  # boolean, True means "may attend"; broadcasts to (B, heads, query, key)


# ---- Feed-forward ----
class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 at every position; (B, S, d_model) -> same (section 3.3)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.linear1(x).relu()))


def section_feed_forward() -> None:
    """The feed-forward network: each token by itself

    Attention has fetched something from the other tokens; now each token works on what it
    has. linear1 widens its d_model numbers to d_ff, relu() turns negative numbers into 0,
    linear2 narrows them to d_model again. Without the relu, two matrices in a row would
    be one matrix. nn.Linear keeps its matrix as (out, in) and computes x W^T + b.

    With d_ff = 4 d_model, as in the paper (2,048 for 512), these two matrices hold two
    thirds of the layer's parameters.
    """
    network, x = FeedForward(16, 64), torch.randn(2, 5, 16)
    w1, b1, w2, b2 = (parameter.detach().numpy() for parameter in network.parameters())
    by_hand = np.maximum(0, x.numpy() @ w1.T + b1) @ w2.T + b2
    check_close("one line of NumPy gives the same output", network(x), by_hand)
    other = x + torch.tensor([0, 0, 1, 0, 0])[:, None]  # token 2 becomes another
    moved = (network(other) - network(x)).abs().amax(dim=(0, 2))
    only = moved.nonzero().flatten().tolist()
    check("token 2 changes, and no other output follows", only == [2], f"by up to {moved[2]:.2f}")
    layer = EncoderLayer(512, 8, 2048, dropout=0.1)
    inside, whole = (sum(p.numel() for p in m.parameters()) for m in (layer.feed_forward, layer))
    evidence = f"{inside:,} of {whole:,}, which is {inside / whole:.1%}"
    check("two thirds of the layer's parameters", abs(inside / whole - 2 / 3) < 0.01, evidence)


# ---- The residual stream ----
def share(part: Tensor, whole: Tensor) -> float:
    """Return the length of one tensor, measured by that of another."""
    return (part.norm() / whole.norm()).item()


def section_residual() -> None:
    """The residual stream: a sub-layer adds, it does not replace

    A sub-layer f is attention or the feed-forward network. What goes on is not f(x)
    but x + f(x). So one row of vectors, the residual stream, runs through the whole
    stack, and every sub-layer reads it and adds to it.

    Backwards, the addition is a path of its own. The derivative of x + f(x) is 1 + f'(x):
    the gradient that arrives passes as it is, and what comes through f is added. Without
    that path it must go through every f. Here are up to 24 fresh feed-forward networks in
    a row. How long is the gradient at the input, if the one at the output has length 1?
    """
    x, arriving, lengths = torch.randn(10, 64, requires_grad=True), torch.randn(10, 64), {}
    replaced = stream = x
    for depth in range(1, 25):
        f = FeedForward(64, 256)
        ends = replaced, stream = f(replaced), stream + f(stream)
        through, both = (torch.autograd.grad(y, x, arriving, retain_graph=True)[0] for y in ends)
        if depth == 1:
            check_close("one network: what arrives, plus what f adds", both, arriving + through)
        lengths[depth] = dead, alive = share(through, arriving), share(both, arriving)
    print()
    shown = ([n, *(f"{length:.1e}" for length in lengths[n])] for n in (1, 2, 8, 24))
    table(["networks", "f(x)", "x + f(x)"], *shown)
    print()
    check(
        "with the addition the gradient lives",
        dead < 1e-6 < 0.5 < alive,
        f"{alive:.2f}, not {dead:.0e}",
    )


# ---- LayerNorm ----
class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * gain + bias; (..., d_model) -> same (Ba et al., 2016).

    Mean and variance are those of the last dimension; the variance is the mean of (x - mean)².
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))  # the gain; torch calls it so
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = (centred**2).mean(dim=-1, keepdim=True)
        return centred / (variance + self.eps).sqrt() * self.weight + self.bias


def check_same(ours: Tensor, reference: Tensor, inputs: dict[str, tuple[Any, Any]]) -> None:
    """Check outputs, and the gradients of a random mixture of them.

    inputs: by name, one or several tensors that ours depends on, and those of the reference.
    """
    check_close("same output as torch's", ours, reference)
    direction = torch.randn_like(ours)
    for name, sides in inputs.items():
        mine, other = (
            torch.autograd.grad(output, tensors, direction, retain_graph=True)
            for output, tensors in zip((ours, reference), sides, strict=True)
        )
        flat = [torch.cat([gradient.flatten() for gradient in side]) for side in (mine, other)]
        check_close(f"same gradient of {name}", *flat, 1e-4)


def section_layer_norm() -> None:
    """LayerNorm: every token back to mean 0 and variance 1

    What is added to again and again grows. LayerNorm takes the d_model numbers of one
    token, subtracts their mean and divides by their standard deviation; other tokens do
    not enter. Then each of the d_model places is multiplied by a gain and gets a bias
    added. Both are learnt; they start at 1 and 0, where they change nothing.

    keepdim=True keeps the dimension of the mean, with size 1, so that broadcasting fits
    it to x. The variance is a sum divided by n, not by n - 1. And eps stands under the
    root, so that numbers which are all equal give no 0 / 0.
    """
    ours, theirs = LayerNorm(8), nn.LayerNorm(8)
    x = torch.randn(3, 8) * torch.tensor([[0.1], [1], [20]]) + torch.tensor([[0.0], [9], [0]])
    print("    three tokens, of size 0.1, 1 and 20, and 9 added to the second:\n")
    for name, y in (("x", x), ("LayerNorm(x)", ours(x).detach())):
        mean, std = y.mean(dim=1).abs(), y.std(dim=1, correction=0)
        print(f"    {name:12}  |mean| {mean.numpy().round(2)}  std {std.numpy().round(2)}")
    print()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()  # fresh ones would hide errors
        theirs.load_state_dict(ours.state_dict())
    x.requires_grad_()
    inputs = {"x": (x, x), "gain": (ours.weight, theirs.weight), "bias": (ours.bias, theirs.bias)}
    check_same(ours(x), theirs(x), inputs)
    check_close("numbers that are all equal give the bias", ours(torch.full((8,), 3.0)), ours.bias)
    print("\n  From here on nn.LayerNorm is used, which computes the same, only faster.")


# ---- Dropout ----
def section_dropout() -> None:
    """Dropout: in training, numbers are left out

    In training nn.Dropout(p) sets every number to 0 with probability p, anew at each
    call, so that no part of the network can rely on any one other part. What survives is
    divided by 1 - p, which keeps the mean. In use nothing is left out. A module is in one
    mode or the other: train() and eval() set it, for the module and all inside it.

    The paper has dropout on what a sub-layer adds to the stream, and on embedding plus
    position. This course, like torch, also has it on the attention weights and behind the
    relu. Here 100,000 ones meet p = 0.3.
    """
    dropout, ones = nn.Dropout(0.3), torch.ones(100_000)
    training = dropout.train()(ones)
    zeros, survivors = (training == 0).float().mean().item(), training[training != 0]
    print(f"    the first of them: {training[:12].numpy().round(2)}\n")
    check("a share p is 0", abs(zeros - 0.3) < 0.01, f"{zeros:.3f}")
    check_close("survivors are 1 / (1 - p)", survivors, torch.full_like(survivors, 1 / 0.7))
    check_close("the mean stays", training.mean(), 1.0, 0.02)
    check_close("eval() leaves all as it is", dropout.eval()(ones), ones, 0)


# ---- Attention, as in lesson 3 ----
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask = None, dropout: Callable | None = None
) -> Attended:
    """softmax(Q K^T / sqrt(d_k)) V (section 3.2.1).

    query (..., T, d_k), key and value (..., S, d_k), mask broadcastable to (..., T, S); returns the
    output (..., T, d_k) and the weights (..., T, S). Blocked scores get the most negative finite
    number of their type, so that a row with everything blocked gives no NaN.
    """
    scores = (query / math.sqrt(query.size(-1))) @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    return (dropout(weights) if dropout else weights) @ value, weights


def padding_mask(ids: Tensor) -> Tensor:
    """Return where ids (B, S) are real tokens, as (B, 1, 1, S)."""
    return (ids != PAD)[:, None, None, :]


class MultiHeadAttention(nn.Module):
    """Attention in `n_heads` subspaces of size d_k = d_model / n_heads (section 3.2.2).

    query (B, T, d_model) looks things up in memory (B, S, d_model), which may be query itself.
    """

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"n_heads must divide d_model, got {n_heads} and {d_model}")
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def split_heads(self, x: Tensor) -> Tensor:  # (B, S, d_model) -> (B, heads, S, d_k)
        return x.view(x.size(0), -1, self.n_heads, self.d_k).transpose(1, 2)

    def keys_values(self, memory: Tensor) -> KeysValues:
        """Return what a cache keeps: keys and values, each (B, heads, S, d_k)."""
        return self.split_heads(self.w_k(memory)), self.split_heads(self.w_v(memory))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Mask = None) -> Attended:
        """Attend with the keys and values at hand."""
        q = self.split_heads(self.w_q(query))
        heads, weights = scaled_dot_product_attention(q, keys, values, mask, self.dropout)
        return self.w_o(heads.transpose(1, 2).flatten(2)), weights

    def forward(self, query: Tensor, memory: Tensor, mask: Mask = None) -> Attended:
        return self.attend(query, *self.keys_values(memory), mask)


# ---- The layer ----
class Residual(nn.Module):
    """A sub-layer's place in the residual stream; (B, S, d_model) -> same (section 3.1).

    Post-norm, as in 2017: LayerNorm(x + Dropout(sublayer(x)))
    Pre-norm:              x + Dropout(sublayer(LayerNorm(x)))
    """

    def __init__(self, d_model: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(d_model), nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each in a residual connection; (B, S, d_model) -> same."""

    def __init__(
        self, d_model: int, n_heads: int, d_ff: int, dropout: float, norm_first: bool = False
    ) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(d_model, n_heads, dropout)
        self.feed_forward = FeedForward(d_model, d_ff, dropout)
        self.residual1 = Residual(d_model, dropout, norm_first)
        self.residual2 = Residual(d_model, dropout, norm_first)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        x = self.residual1(x, lambda y: self.self_attention(y, y, mask)[0])
        return self.residual2(x, self.feed_forward)


def section_encoder_layer() -> None:
    """The encoder layer equals torch's

    Two sub-layers, each in a Residual: dropout, addition and norm. Residual is handed the
    sub-layer as a function of x; a lambda makes one of self-attention, where query and
    memory are the same. The norm stands behind the addition, as in the paper (post-norm),
    or before the sub-layer (pre-norm).

    Torch's layer gets our weights, all random. The second sentence ends in two PAD; what
    comes out there nobody reads, so real tokens are compared. In training mode, with
    dropout 0, torch goes step by step; in eval mode it takes a faster way of its own.
    """
    mask = padding_mask(torch.tensor([[5, 6, 7, 8, EOS], [4, 5, EOS, PAD, PAD]]))
    x, real, d, d_ff = torch.randn(2, 5, 32, requires_grad=True), mask[:, 0, 0], 32, 64
    for name, pre in (("post-norm", False), ("pre-norm", True)):
        ours = EncoderLayer(d, 4, d_ff, dropout=0.0, norm_first=pre)
        theirs = nn.TransformerEncoderLayer(d, 4, d_ff, 0.0, batch_first=True, norm_first=pre)
        p, other = list(ours.parameters()), list(theirs.parameters())
        with torch.no_grad():
            for parameter in p:
                parameter.normal_(std=0.2)
            # The order is the same, but torch has one matrix and one bias for w_q, w_k and w_v.
            values = [torch.cat(p[0:6:2]), torch.cat(p[1:6:2]), *p[6:]]
            for parameter, value in zip(other, values, strict=True):
                parameter.copy_(value)
        print(f"  {name}, {tuple(x.shape)}, of which {int(real.sum())} tokens are real")
        inputs = {"x": (x, x), "attention": ([*p[0:6:2], *p[1:6:2], *p[6:8]], other[:4])}
        inputs |= {"feed-forward": (p[8:12], other[4:8]), "the norms": (p[12:], other[8:])}
        output, reference = ours(x, mask)[real], theirs(x, src_key_padding_mask=~real)[real]
        check_same(output, reference, inputs)
        with torch.no_grad():
            faster = theirs.eval()(x, src_key_padding_mask=~real)[real]
            check_close("same output in eval mode", ours.eval()(x, mask)[real], faster)
    formula = 4 * (d**2 + d) + 2 * d * d_ff + d_ff + d + 2 * 2 * d
    built = sum(parameter.numel() for parameter in p)
    print("\n  4(d² + d) for attention, 2 d d_ff + d_ff + d for feed-forward, 2 d for each norm:")
    check("formula = layer", formula == built, f"{formula:,} = {built:,} parameters")


# ---- Untrained stacks ----
def fresh_stack(depth: int, norm_first: bool = False) -> nn.ModuleList:
    """Return layers as they are before training: d_model 64, 4 heads, d_ff 256, no dropout."""
    torch.set_num_threads(1)  # for matrices as small as these, threads only wait for each other
    layers = nn.ModuleList(EncoderLayer(64, 4, 256, 0.0, norm_first) for _ in range(depth))
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)  # variance 2 / (inputs + outputs)
            nn.init.zeros_(module.bias)
    return layers


def section_padding() -> None:
    """Padding changes nothing for real tokens

    Layers are stacked: the output of one is the input of the next, 6 in the paper. Here 6
    of them read a sentence of 3 tokens, alone and in a batch where it is filled up to 7.
    Feed-forward network, norm and addition treat each token by itself, and attention
    gives PAD the weight 0: no real token gets to know what stands there.
    """
    mask = padding_mask(torch.tensor([[4, 5, 6, 7, 8, 9, EOS], [4, 5, EOS, PAD, PAD, PAD, PAD]]))
    batch = unmasked = torch.randn(2, 7, 64)
    alone = batch[1:, :3]
    for layer in fresh_stack(6):
        alone, batch, unmasked = layer(alone), layer(batch, mask), layer(unmasked)
    print(f"    alone {tuple(alone.shape)}, in the batch {tuple(batch.shape)}\n")
    check_close("3 real tokens: in the batch as alone", batch[1:, :3], alone)
    gap = (unmasked[1:, :3] - alone).abs().max().item()
    check("without the mask they differ", gap > 0.05, f"by up to {gap:.2f}")


# ---- Post-norm and pre-norm ----
def apart(x: Tensor) -> Tensor:
    """Return tokens (B, S, d) less the mean of their sentence: what tells them apart."""
    return x - x.mean(dim=1, keepdim=True)


def norm_experiment(depth: int, norm_first: bool) -> tuple[list[list[float]], float]:
    """Measure an untrained stack on 8 sentences of 10 random tokens, as section 7 explains.

    Return "std", "apart" and the gradient by its parameters for each layer; and "its gradient".
    """
    layers, x, rows = fresh_stack(depth, norm_first), torch.randn(8, 10, 64, requires_grad=True), []
    y = x
    for layer in layers:
        y = layer(y)
        rows.append([y.std().item(), share(apart(y), y)])
    output, arriving = nn.LayerNorm(64)(y) if norm_first else y, torch.randn(8, 10, 64)
    signal = apart(arriving)
    (at_input,) = torch.autograd.grad(output, x, signal, retain_graph=True)
    output.backward(arriving / arriving.norm())
    for row, layer in zip(rows, layers, strict=True):
        row.append(math.hypot(*(p.grad.norm() for p in layer.parameters())))
    return rows, share(at_input, signal)


def section_norm_placement() -> None:
    """Post-norm against pre-norm, at depth 2 to 24

    Post-norm normalises the stream itself, x = norm(x + f(x)). Pre-norm normalises only
    what a sub-layer reads, x = x + f(norm(x)); the stream runs on untouched, up to one
    more norm behind the last layer. Both are measured before training, with weights as
    the course starts them: variance 2 / (inputs + outputs), biases 0.

    std           the stream's standard deviation after the last layer
    first, last   a random gradient of length 1 arrives at the output: the length of what
                  the parameters of the first and of the last layer get
    apart         subtract from each token the mean of its sentence; what remains is its
                  own part, here as a share of the stream's length
    its gradient  a gradient of length 1 arrives at the own parts alone: the length of
                  what reaches the input
    """
    found = {}
    for name in ("post", "pre"):
        for depth in (2, 4, 8, 16, 24):
            layers, signal = norm_experiment(depth, norm_first=name == "pre")
            std, different, last = layers[-1]
            found[name, depth] = [std, layers[0][2], last, different, signal]
    shown = ([*key, *(f"{number:.3f}" for number in row)] for key, row in found.items())
    table(["norm", "depth", "std", "first", "last", "apart", "its gradient"], *shown)
    print()
    post2, post24, pre2, pre24 = (found[name, n] for name in ("post", "pre") for n in (2, 24))
    check("post-norm keeps the stream at size 1", abs(post24[0] - 1) < 0.01, f"{post24[0]:.3f}")
    evidence = f"{pre24[0]:.2f} after 24 layers"
    check("in pre-norm it grows with depth", pre24[0] > 2.5 * pre2[0], evidence)
    evidence = f"the first of 24 gets {pre24[1] / pre24[2]:.1f} times the last one's"
    check("and late layers get the smaller gradients", pre24[1] > 2 * pre24[2], evidence)
    kept = post24[1] / post2[1]
    check(
        "in post-norm the first layer gets them, too", 0.1 < kept < 10, f"24 against 2: {kept:.2f}"
    )
    evidence = f"{post24[3]:.2%} tells them apart, in pre-norm {pre24[3]:.0%}"
    check("but 24 layers make the tokens alike", post24[3] < 0.01 < 0.2 < pre24[3], evidence)
    evidence = f"{post24[4]:.3f}, in pre-norm {pre24[4]:.2f}"
    check("and hardly a gradient tells them apart", post24[4] < pre24[4] / 4, evidence)
    print("""
  Attention adds similar mixtures to all tokens of a sentence (without it, section 8
  shows, they stay apart). Post-norm scales the sum down, and with it what was the
  token's own, in every layer. In pre-norm the own part stays in the stream. The paper
  has 6 layers of post-norm; lesson 8 takes pre-norm.""")


def draw_norm_placement(figure: Any) -> None:
    """Draw size, gradient and what tells tokens apart, layer by layer of 24, for both norms."""
    panels = figure.subplots(1, 3)
    titles = "std of the stream", "tokens apart", "gradient by layer"
    for name, style, grey in (("post-norm", "o--", "0.55"), ("pre-norm", "s-", "black")):
        layers, _ = norm_experiment(24, norm_first=name == "pre-norm")
        for axes, title, curve in zip(panels, titles, zip(*layers, strict=True), strict=True):
            axes.plot(range(1, 25), curve, style, color=grey, ms=3, label=name)
            axes.set(xlabel="layer", title=title, xticks=(1, 8, 16, 24))
            axes.grid(alpha=0.3)
    panels[0].legend()
    panels[1].set_yscale("log")
    panels[2].set_ylim(0)


# ---- Without a part ----
def stack_without(part: str) -> nn.Sequential:
    """Return six fresh layers, one after the other, without one of their parts."""
    layers = fresh_stack(6)
    for layer in layers:
        if part == "attention":
            nn.init.zeros_(layer.self_attention.w_o.weight)  # so it adds 0
        if part == "feed-forward":
            nn.init.zeros_(layer.feed_forward.linear2.weight)
        for residual in (layer.residual1, layer.residual2):
            if part == "addition":
                residual.forward = lambda x, sublayer, norm=residual.norm: norm(sublayer(x))
            if part == "norm":
                residual.norm = nn.Identity()  # gives back what it gets
    return nn.Sequential(*layers)


def section_without() -> None:
    """What each part is for: remove it and see

    Six untrained post-norm layers read 4 sentences x of 6 random tokens, first whole,
    then with one part taken out of all six. Four measurements of the output f(x):

    others  token 0 becomes another: by what share do the outputs of the others change?
    bends   the length of f(x) + f(-x), as a share of f(x)'s. While biases are 0,
            everything but the relu turns -x into -f(x), and the sum is 0.
    apart   the share of f(x) that tells the tokens of a sentence apart
    std     the standard deviation of f(x)
    """
    x, found = torch.randn(4, 6, 64), {}
    changed = torch.cat([torch.randn(4, 1, 64), x[:, 1:]], dim=1)
    for part in ("nothing", "attention", "feed-forward", "addition", "norm"):
        f = stack_without(part)
        y, others = f(x), share((f(changed) - f(x))[:, 1:], f(x)[:, 1:])
        found[part] = [others, share(y + f(-x), y), share(apart(y), y), y.std().item()]
    rows = ([part, *(f"{number:.3f}" for number in numbers)] for part, numbers in found.items())
    table(["without", "others", "bends", "apart", "std"], *rows)
    print()
    whole, effects = (
        found["nothing"],
        ("no token knows of another", "nothing bends", "all are alike"),
    )
    parts = ("attention", "feed-forward", "addition")
    for column, (part, effect) in enumerate(zip(parts, effects, strict=True)):
        small, usual = found[part][column], whole[column]
        evidence = f"{small:.1e}, whole {usual:.2f}"
        check(f"without {part} {effect}", small < 1e-3 < 0.1 < usual, evidence)
    loud = found["norm"][3]
    check("without norm the stream grows", loud > 3 * whole[3], f"{loud:.1f}, whole {whole[3]:.2f}")
    print("""
  The encoder is a stack of this layer. Lesson 5 builds the decoder's, which also looks
  at the encoder's output, and must not look at the words that it has yet to write.""")


# ---- Quiz and exercise ----
def quiz() -> str:
    """Return the questions: ? the text, = the answer, ! an explanation."""
    layer, x = EncoderLayer(64, 4, 256, dropout=0.1), torch.zeros(32, 10, 64)
    parameters = sum(p.numel() for p in FeedForward(512, 2048).parameters())
    return f"""
? 32 sentences of 10 tokens, d_model 64, go through EncoderLayer(64, 4, 256, 0.1).
   Which shape comes out?
= {tuple(layer(x).shape)}
! The same that went in: that is why layers can be stacked, and x and f(x) added.

? Inside, what is the shape of what comes out of the feed-forward network's relu?
= {tuple(layer.feed_forward.linear1(x).relu().shape)}
! linear1 widens each token's 64 numbers to d_ff = 256; linear2 makes 64 of them
again.

? How many parameters does FeedForward(512, 2048) have?
= {parameters}
! 2 d d_ff + d_ff + d: two matrices of 512 × 2048, one bias of 2048, one of 512.

? LayerNorm of [1, 1, 1, 5] with gain 1 and bias 0: what is the last number?
= {LayerNorm(4)(torch.tensor([1.0, 1.0, 1.0, 5.0]))[3]:.2f}
! The mean is 2, the variance (1 + 1 + 1 + 9) / 4 = 3, and 3 / sqrt(3) = 1.73.

? Training, dropout 0.2. What does a 4 become if it survives?
= {4 / (1 - 0.2):.0f}
! It is divided by 1 - p = 0.8, so that 80% of 5 is the same mean as 4.

? Over which numbers does LayerNorm take mean and variance?
   a) all tokens of the batch, for each of the d_model columns
   b) all tokens of a sentence
   c) the d_model numbers of one token
= c
! Whatever sentence or batch a token stands in, its norm is the same.

? Pre-norm keeps a token's own gradient through 24 layers. What hands it down?
   a) the addition, past every sub-layer
   b) LayerNorm makes every gradient as long as the one before
   c) its parameters are larger
= a
! The derivative of x + f(x) is 1 + f'(x). In pre-norm no norm stands behind the
addition, which would scale the 1 down in every layer.
"""


def exercise() -> list[tuple]:
    """Return name, solution, inputs by case and usual mistakes of each function to write."""

    def solution(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
        return LayerNorm(x.size(-1), eps)(x) * gain + bias

    def version(dim: Any = -1, n: int = 0, power: float = 0.5, centre: int = 1, under: int = 1):
        def norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
            mean, variance = x.mean(dim, keepdim=True), x.var(dim, correction=n, keepdim=True)
            divisor = (variance + under * eps) ** power + (1 - under) * eps
            return (x - centre * mean) / divisor * gain + bias

        return norm

    torch.manual_seed(4)
    x, gain, bias = torch.randn(2, 3, 4), torch.rand(4) + 1, torch.randn(4)
    cases = {
        "one token by hand": (torch.tensor([[2.0, 6.0]]), torch.ones(2), torch.zeros(2)),
        "two sentences, a gain and a bias": (x, gain, bias),
        "numbers that are all equal": (torch.full((1, 4), 3.0), gain, bias),
        "small numbers": (0.003 * x, gain, bias),
        "eps = 0.5": (x, gain, bias, 0.5),
    }
    mistakes = {
        "the variance is divided by n - 1: it is n": version(n=1),
        "mean and variance run over dim 0: each token is dim=-1": version(dim=0),
        "mean and variance run over dim 1: each token is dim=-1": version(dim=1),
        "mean and variance run over the whole tensor: each token is dim=-1": version(dim=None),
        "the mean is not subtracted": version(centre=0),
        "it divides by the variance: take its root": version(power=1),
        "eps is added to the root: it stands under it": version(under=0),
        "the argument eps is not used": lambda x, gain, bias, _=0: solution(x, gain, bias),
        "eps is missing: 0 / 0 is NaN": lambda x, gain, bias, _=0: solution(x, gain, bias, 0),
        "the gain is forgotten": lambda x, gain, *rest: solution(x, gain**0, *rest),
        "the bias is forgotten": lambda x, gain, bias, *eps: solution(x, gain, 0 * bias, *eps),
    }
    return [("layer_norm", solution, cases, mistakes)]


FLAGS: dict[str, tuple] = {}  # flags of this lesson alone: what each does instead, its options


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
