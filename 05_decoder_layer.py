# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6,<3", "numpy>=1.26,<3", "matplotlib>=3.8,<4"]
# ///
"""Lesson 5: the decoder layer.

Lesson 4 built the encoder layer. A stack of them turns the source into the memory,
one vector for every source token. The decoder writes the translation from it, word by
word. When you have worked through this lesson you can build its layer, draw its masks
for any padded pair, prove that no place sees the word it is to predict, and say what
a step of writing need not compute again.

    python 05_decoder_layer.py               the lesson; --section 3 only a part
    python 05_decoder_layer.py --quiz        questions, with explanations
    python 05_decoder_layer.py --check FILE  the exercise, in a file of your own

Exercise: write build_masks(src, tgt) and cross_attention_head(states, memory, w_q,
w_k, w_v, mask). src (B, S) and tgt (B, T) are ids, 0 is PAD, tgt is what the decoder
reads. Return a tuple of three boolean masks, True where a token may attend: of the
encoder, of the decoder's self-attention and of its cross-attention, with shapes (B,
1, 1, S), (B, 1, T, T) and (B, 1, 1, S). The other function is one head without
biases: states (..., T, d) of the decoder, memory (..., S, d), matrices w_q, w_k and
w_v (d, d_k), a mask that broadcasts to (..., T, S). Return its output, (..., T, d_k).

Source: Vaswani et al., "Attention Is All You Need" (2017), sections 3.1 and 3.2.3.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

PAD, BOS, EOS = 0, 1, 2  # the same ids in every lesson

KeysValues = tuple[Tensor, Tensor]  # each (B, heads, S, d_k)
Attended = tuple[Tensor, Tensor]  # output (B, T, d_model) and weights (B, heads, T, S)
Mask = Tensor | None  # boolean, True means "may attend"; broadcasts to (B, heads, query, key)


# ---- Teacher forcing ----
TOKENS = ["PAD", "bos", "eos", "two", "forty", "hundred", "seven"]
SRC = torch.tensor([[10, 7, 5], [7, 5, PAD]])  # 742 and 42: the digit d has the id 3 + d
ANSWERS = torch.tensor([[BOS, 6, 5, 4, 3, EOS], [BOS, 4, 3, EOS, PAD, PAD]])  # both in words
PREDICTS = ANSWERS[:, 1:]
READS = ANSWERS[:, :-1].masked_fill(PREDICTS == PAD, PAD)  # after eos nothing is read


def section_teacher_forcing() -> None:
    """Teacher forcing: read the right answer, one place late

    The decoder reads what has been written and predicts the next word. bos begins, and
    the prediction eos ends it. In training the answer is known, so all its words can be
    practised in one pass: each place gets the right words up to there, whatever the
    decoder would have written itself, and is to predict the one that follows. That is
    teacher forcing. Take the row bos ... eos: all but its last token is read, all but its
    first is predicted. The two are one row, shifted by one.

    Our example reads numbers aloud: the sources are the digits of 742 and 42. The shorter
    row is filled up with PAD. Where PAD would be predicted, nothing counts in the loss.
    """
    rows = READS[0], PREDICTS[0], READS[1], PREDICTS[1]
    columns = [[TOKENS[i] for i in row] for row in rows]
    columns.append(["no" if i == PAD else "yes" for i in PREDICTS[1]])
    header = ["place", "742: reads", "predicts", "42: reads", "predicts", "counts"]
    table(header, *zip(range(5), *columns, strict=True))
    print(f"    {(PREDICTS != PAD).sum()} predictions are practised in one pass\n")
    words = READS[:, 1:] != PAD
    same = (READS[:, 1:] == PREDICTS[:, :-1])[words]
    evidence = f"{same.sum()} of {words.sum()} words"
    check("what one place is to predict, the next one reads", bool(same.all()), evidence)


# ---- Masks ----
def padding_mask(ids: Tensor) -> Tensor:
    """Return where ids (B, S) are real tokens, as (B, 1, 1, S)."""
    return (ids != PAD)[:, None, None, :]


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """Return (1, 1, T, T), True where the key is not later than the query.

    >>> causal_mask(3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def drawing() -> dict[str, tuple[np.ndarray, list[str], list[str]]]:
    """Return the masks for 42, made from the names of their rows and columns, and these names.

    A cell is 0 where a token may attend, 1 if its column is PAD, 2 if it lies in the future.
    """
    digits, words = ["4", "2", "PAD"], [TOKENS[i] for i in READS[1]]
    drawn = {"encoder": (digits, digits), "decoder": (words, words), "cross": (words, digits)}
    for name, (rows, columns) in drawn.items():
        cells = np.array([[int(column == "PAD") for column in columns]] * len(rows))
        if name == "decoder":
            cells[np.triu_indices(len(rows), 1)] = 2
        drawn[name] = cells, rows, columns
    return drawn


def section_three_masks() -> None:
    """Three attentions, three masks

    In the encoder source tokens look at source tokens. In the decoder written tokens look
    at written tokens, its self-attention, and then at the source, its cross-attention.
    Rows of a mask are the tokens that look, columns those that are looked at.

    PAD must not be looked at, so a padding mask blocks columns and belongs to those that
    are looked at. In cross-attention, as in the encoder, that is the source: both get the
    source's padding mask. The target's would not fit the columns or, where both have one
    length by chance, fit and be wrong. In the decoder's self-attention the tokens to the
    right are the very words to be predicted: its mask is causal AND padding. Rows of PAD
    stay open. Nobody reads what they compute.

    The masks for 42, while the decoder reads "bos forty two" and two PAD:
    """
    blocks, counts, drawn = [], [], drawing()
    for name, (cells, rows, columns) in drawn.items():
        lines = [[["███", "×××", "···"][cell] for cell in row] for row in cells]
        block = [[name, *columns, ""], *([r, *c, ""] for r, c in zip(rows, lines, strict=True))]
        blocks.append(block + [[""] * len(block[0])] * (6 - len(block)))
        pad, future = (int((cells == reason).sum()) for reason in (1, 2))
        counts.append([name, cells.shape, cells.size, pad + future, future, pad])
    table(*([cell for block in line for cell in block] for line in zip(*blocks, strict=True)))
    print("\n    ███ may attend   ··· blocked, because future   ××× blocked, because PAD\n")
    table(["mask", "shape", "cells", "blocked", "future", "more PAD"], *counts)
    source, decoder = padding_mask(SRC), causal_mask(5) & padding_mask(READS)
    print(f"    tensors for both numbers: {tuple(source.shape)}, {tuple(decoder.shape)}\n")
    for mask, (name, (cells, *_)) in zip((source, decoder, source), drawn.items(), strict=True):
        same = int((mask[1, 0].expand(cells.shape).numpy() == (cells == 0)).sum())
        evidence = f"{same} of {cells.size} cells"
        check(f"the {name} mask allows what is drawn", same == cells.size, evidence)


def draw_masks(figure: Any) -> None:
    """Draw the three masks for 42, with the reasons in shades of grey."""
    panels = figure.subplots(1, 3, width_ratios=(3, 5, 3))
    for axes, (name, (cells, rows, columns)) in zip(panels, drawing().items(), strict=True):
        axes.pcolormesh(cells, cmap="gray", vmin=0, vmax=2, edgecolors="0.3", lw=0.5)
        axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90)
        axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
        axes.set(title=f"{name} {cells.shape}", aspect="equal")
        axes.invert_yaxis()
    for shade, label in (("0", "may attend"), ("0.5", "blocked: PAD"), ("1", "blocked: future")):
        axes.plot([], "s", color=shade, mec="0.3", label=label)
    figure.legend(loc="outside lower center", ncols=3)


# ---- What lessons 3 and 4 built ----
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


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 at every position; (B, S, d_model) -> same (section 3.3)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.linear1(x).relu()))


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


# ---- The layer ----
@dataclass
class LayerCache:
    """Keys and values that a decoder layer attends to, so that it computes none of them twice."""

    memory: KeysValues  # computed once
    target: KeysValues | None = None  # grows by one position a step

    def extend(self, newest: KeysValues) -> KeysValues:
        """Append the newest positions' keys and values; return those of all positions."""
        if self.target is not None:
            newest = tuple(torch.cat(both, dim=2) for both in zip(self.target, newest, strict=True))
        self.target = newest
        return newest


class DecoderLayer(nn.Module):
    """Masked self-attention, cross-attention to the encoder's memory, feed-forward.

    x (B, T, d_model) -> same: the positions since the last call with this cache, which holds the
    keys and values of the memory and of the positions before x.
    """

    def __init__(
        self, d_model: int, n_heads: int, d_ff: int, dropout: float, norm_first: bool = False
    ) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(d_model, n_heads, dropout)
        self.cross_attention = MultiHeadAttention(d_model, n_heads, dropout)
        self.feed_forward = FeedForward(d_model, d_ff, dropout)
        self.residual1 = Residual(d_model, dropout, norm_first)
        self.residual2 = Residual(d_model, dropout, norm_first)
        self.residual3 = Residual(d_model, dropout, norm_first)

    def forward(self, x: Tensor, cache: LayerCache, tgt_mask: Mask, src_mask: Mask) -> Tensor:
        def self_attend(y: Tensor) -> Tensor:
            keys_values = cache.extend(self.self_attention.keys_values(y))
            return self.self_attention.attend(y, *keys_values, tgt_mask)[0]

        x = self.residual1(x, self_attend)
        x = self.residual2(x, lambda y: self.cross_attention.attend(y, *cache.memory, src_mask)[0])
        return self.residual3(x, self.feed_forward)


def full_pass(
    layer: DecoderLayer, x: Tensor, memory: Tensor, tgt_mask: Mask, src_mask: Mask = None
) -> Tensor:
    """Run a layer on all places at once, as in training: with a new cache."""
    cache = LayerCache(layer.cross_attention.keys_values(memory))
    return layer(x, cache, tgt_mask, src_mask)


def random_layer(norm_first: bool = False) -> DecoderLayer:
    """Return a small layer, gains and biases random as well: fresh ones would hide errors."""
    layer = DecoderLayer(32, 4, 64, 0.0, norm_first)
    for parameter in layer.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return layer


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


def section_decoder_layer() -> None:
    """The layer: look back, look at the source, compute

    A decoder layer has three sub-layers, each with a place in the residual stream: masked
    self-attention, cross-attention, feed-forward. In cross-attention the queries come
    from the decoder, keys and values from the memory.

    forward takes a cache in place of the memory, because a decoder works in two ways: in
    training on all places at once, in use on one new place after the other. Of the memory
    and of the places before, attention needs only keys and values. LayerCache holds just
    these, and extend appends those of the new places. In training the cache is new and x
    is the whole row; in use the cache stays and x is one place. Both take the same path:
    what is used is what was trained. Section 6 shows what it saves.

    PyTorch's layer with the same parameters, on the batch and the masks of the example:
    """
    source, padding, causal = padding_mask(SRC), padding_mask(READS), causal_mask(5)
    blocked = dict(tgt_mask=~causal[0, 0], tgt_key_padding_mask=~padding[:, 0, 0])
    blocked["memory_key_padding_mask"] = ~source[:, 0, 0]  # there, True means blocked
    for kind in ("post-norm", "pre-norm"):
        ours, sizes = random_layer(kind == "pre-norm"), dict(dropout=0.0, batch_first=True)
        theirs = nn.TransformerDecoderLayer(32, 4, 64, **sizes, norm_first=kind == "pre-norm")
        copies = []  # in their order, which is ours; but w_q, w_k and w_v are one matrix there
        for attention in (ours.self_attention, ours.cross_attention):
            linears = attention.w_q, attention.w_k, attention.w_v
            copies += [torch.cat([m.weight for m in linears]), torch.cat([m.bias for m in linears])]
            copies += attention.w_o.parameters()
        copies += list(ours.parameters())[16:]
        for parameter, value in zip(theirs.parameters(), copies, strict=True):
            parameter.data.copy_(value)
        x, memory = (torch.randn(2, length, 32, requires_grad=True) for length in (5, 3))
        print(f"  {kind}: x {tuple(x.shape)}, memory {tuple(memory.shape)}")
        mine, other = list(ours.parameters()), list(theirs.parameters())
        both = [
            [*mine[i : i + 6 : 2], *mine[i + 1 : i + 6 : 2], *mine[i + 6 : i + 8]] for i in (0, 8)
        ]
        parameters = {
            "self-attention": (both[0], other[:4]),
            "cross-attention": (both[1], other[4:8]),
        }
        parameters |= {"all the rest": (mine[16:], other[8:])}
        output = full_pass(ours, x, memory, causal & padding, source)
        inputs = {"x": (x, x), "memory": (memory, memory), **parameters}
        check_same(output, theirs(x, memory, **blocked), inputs)


# ---- Causality ----
def section_causality() -> None:
    """Causality: no output depends on a later input

    Feed-forward, norms and additions treat every place by itself. Attention is the only
    way from one place to another, and there the weight of a later place is exactly 0. So
    the layer is causal, and so is a stack of such layers. Two tests. Another vector at
    place 3, where "forty" is read, must leave the outputs before it alone. And the
    gradient of output t with respect to input s must be 0 where s is later than t, here
    of a random mixture of the 32 numbers of output t. The shades show its length, outputs
    in rows (the square root of the length, so that small ones show).

    Without the mask: what a place is to predict stands at the next place, to be read. A
    head that asks for the next place is always right, even on words drawn at random from
    8, where chance is right once in 8. Training can find such a head. In use there is
    no next place yet, and all is nonsense. Accuracy near 100% early on is the sign.
    """
    layer, memory = random_layer(), torch.randn(1, 3, 32).repeat(2, 1, 1)
    x = torch.randn(1, 5, 32).repeat(2, 1, 1)
    x[1, 3] = torch.randn(32)  # the only difference between the two in the batch
    x.requires_grad_()
    names, masks = [TOKENS[i] for i in READS[0]], {"with the mask": causal_mask(5), "without": None}
    outputs = [full_pass(layer, x, memory, mask) for mask in masks.values()]
    moves = [(after - before).norm(dim=-1) for before, after in outputs]
    rows = ([name, *(f"{m:.4f}" for m in row)] for name, row in zip(masks, moves, strict=True))
    table(["outputs move by", *names], *rows)
    print()
    mixtures = outputs[0][0] @ torch.randn(32)
    gradients = [torch.autograd.grad(m, x, retain_graph=True)[0][0] for m in mixtures]
    sizes = torch.stack(gradients).norm(dim=-1)
    heat_map(sizes.sqrt(), names, names)
    print()
    still, free = moves[0][:3].max().item(), moves[1][:3].min().item()
    check("outputs before the change stay", still < 1e-5, f"they move by {still:.1g}")
    check(
        "without the mask they do not",
        free > 1e-3,
        f"they move by at least {math.floor(free * 10) / 10}",
    )
    zeros, others = int((sizes[np.triu_indices(5, 1)] == 0).sum()), int((sizes > 0).sum())
    check("gradients with respect to later inputs are 0", zeros == 10, f"{zeros} of 10, exactly")
    check("all others are not", others == 15, f"{others} of 15")
    words, places = torch.randint(3, 11, (200, 6)), torch.eye(8)
    values = F.one_hot(F.pad(words, (1, 0), value=BOS), 11).float()
    right = []
    for mask in (causal_mask(7)[0, 0], None):
        read = scaled_dot_product_attention(99 * places[1:], places[:7], values, mask)[0]
        right.append((read[:, :6, 3:].argmax(dim=-1) + 3 == words).float().mean().item())
    check("with the mask random words stay random", right[0] < 0.2, f"{right[0]:.1%} right")
    check("without it all are copied from the next place", right[1] == 1, f"{right[1]:.1%} right")


# ---- Cross-attention ----
def section_cross_attention() -> None:
    """Cross-attention: all that the decoder knows of the source

    Its weights have a row for each written token, which asks, and a column for each
    source token, which is asked. The column of PAD is empty: this is the source's mask at
    work. The layer is untrained; where its weights are large means nothing yet.

    Take cross-attention away, here by setting w_o and its bias to 0, so that it adds
    nothing. Words still see earlier words. Such a decoder can learn to write a sentence,
    but it writes the same one for every source: it cannot translate.
    """
    layer, x = random_layer(), torch.randn(1, 5, 32).repeat(3, 1, 1)  # three times the same
    memory = torch.randn(1, 3, 32).repeat(3, 1, 1)
    memory[1, 0], memory[2, 2] = torch.randn(2, 32)  # but another first digit, or another PAD
    source, decoder = padding_mask(SRC[1:]), causal_mask(5) & padding_mask(READS[1:])
    weights = layer.cross_attention(x, memory, source)[1]
    print(f"    weights {tuple(weights.shape)}: batch, heads, T, S; here of [0, 0]:")
    heat_map(weights[0, 0], *drawing()["cross"][1:])
    print()
    moves = []
    for _ in range(2):
        outputs = full_pass(layer, x, memory, decoder, source)
        moves.append((outputs - outputs[0]).norm(dim=-1))
        for parameter in layer.cross_attention.w_o.parameters():
            nn.init.zeros_(parameter)
    digit, pad, cut = moves[0][1].min().item(), moves[0][2].max().item(), moves[1].max().item()
    check("another first digit moves every output", digit > 1e-3, f"by {digit:.2g} or more")
    check("another vector at PAD moves none", pad < 1e-5, f"by {pad:.1g}")
    check("without cross-attention neither moves any", cut < 1e-5, f"by {cut:.1g}")


# ---- Caches ----
def step_by_step(layer: DecoderLayer, x: Tensor, memory: Tensor, cached: bool) -> Tensor:
    """Return the newest output of every step (B, T, d_model), as when writing word by word."""
    cache, newest = None, []
    for t in range(1, x.size(1) + 1):
        if cached:
            cache = cache or LayerCache(layer.cross_attention.keys_values(memory))
            newest.append(layer(x[:, t - 1 : t], cache, None, None))
        else:
            newest.append(full_pass(layer, x[:, :t], memory, causal_mask(t))[:, -1:])
    return torch.cat(newest, dim=1)


def multiplications(steps: int, source: int, d: int, d_ff: int, cached: bool) -> int:
    """Count those of the matrix products in one layer while `steps` words are written."""
    total = 0
    for t in range(1, steps + 1):
        rows, met = (1, source * (t == 1)) if cached else (t, source)
        total += rows * (6 * d * d + 2 * d * d_ff + 2 * (t + source) * d) + met * 2 * d * d
    return total


def section_caches() -> None:
    """Writing word by word, with two caches

    In use there is a step for each word, and each step reads one word more. Only its last
    output is new: by causality earlier places do not see the new word, and in every layer
    their keys and values stay what they were. So do those of the memory. LayerCache keeps
    both, and only the newest place goes in. It may look at all before it, so that no
    causal mask is needed. (A source with PAD still needs its padding mask.)
    """
    layer, x, memory = random_layer(), torch.randn(1, 5, 32), torch.randn(1, 3, 32)
    full, rows, met = full_pass(layer, x, memory, causal_mask(5)), [], []
    for linear, seen in ((layer.self_attention.w_q, rows), (layer.cross_attention.w_k, met)):
        # PyTorch calls a hook whenever the module has run, with its inputs and its output.
        linear.register_forward_hook(lambda _, x, y, seen=seen: seen.append(x[0].size(1)))
    for cached, how in ((False, "without"), (True, "with")):
        with FlopCounterMode(display=False) as counter:  # an addition with each multiplication
            output = step_by_step(layer, x, memory, cached)
        counted, ours = counter.get_total_flops() // 2, multiplications(5, 3, 32, 64, cached)
        check_close(f"{how} caches, step by step = one pass", output, full)
        check(f"{how} caches, multiplications as PyTorch counts", counted == ours, f"{ours:,}")
    check("with caches the memory meets w_k once", len(met) == 5 + 1, "without, in all 5 steps")
    print("\n  742 aloud: rows that go into the layer, rows of the memory that meet its w_k\n")
    columns = ([TOKENS[i] for i in PREDICTS[0]], rows[:5], met[:5], rows[5:], met[5:] + [0] * 4)
    header = ["writes", "without caches: rows", "memory", "with: rows", "memory"]
    table(header, *zip(*columns, strict=True))
    print("\n  Multiplications in a layer of the paper's size, for a source of 20 tokens:\n")
    lines = []
    for n in (5, 25, 100):
        a, b = (multiplications(n, 20, 512, 2048, cached) for cached in (False, True))
        lines.append([n, a, b, f"{a / b:.1f}"])
    table(["words", "without caches", "with caches", "times as many"], *lines)
    print("\n  Lesson 6 puts these layers on top of an encoder, with masks and a cache for each,")
    print("  between embeddings and an output matrix: the whole Transformer.")


# ---- Quiz and exercise ----
def quiz() -> str:
    """Return the questions: ? the text, = the answer, ! an explanation."""
    cross, memory = drawing()["cross"][0], torch.zeros(32, 3, 64)
    causal, padding = causal_mask(4), padding_mask(torch.tensor([[BOS, 3, PAD, PAD]]))
    future, more = (~causal).sum(), (causal & ~padding).sum()
    return f"""
? d_model 64, a batch of 32, sources filled up to 3 tokens, decoder input of 5: what
   is the shape of the memory?
= {tuple(memory.shape)}
! One vector for each source token, PAD included. The decoder's length does not
enter.

? Source of 3 tokens, decoder input of 5: what is the shape of the mask of
   cross-attention, written out for this one example?
= {tuple(cross.shape)}
! Rows follow the decoder, which looks, columns the source, which is looked at.

? The decoder reads "bos fifteen PAD PAD". Of the 16 cells of its self-attention,
   how many are blocked?
= {(~(causal & padding)).sum()}
! {future} lie in the future, and {more} more are PAD: one in the third row, two in
the last.

? 742 aloud, "seven hundred forty" is written. Without caches, how many rows go into
   the decoder for the next word?
= {1 + len(["seven", "hundred", "forty"])}
! bos and three words. With caches it is 1, the row of "forty".

? A decoder of 6 layers writes 20 words with caches. How many times does the memory
   meet a matrix w_k?
= 6
! Once in each layer, however long the answer. Without caches: in each layer and
step.

? Minutes into training 99% of the words are predicted right; in use all is
   nonsense. Which part is the first suspect?
   a) the source's padding mask
   b) the causal mask
   c) the caches
= b
! A decoder that sees the next place copies it. By itself it has nothing to copy
from.

? By mistake cross-attention gets the target's padding mask. When is there an error?
   a) always
   b) never
   c) where source and target differ in length
= c
! Where they do not, the mask fits, and blocks the wrong tokens without a word.
"""


def exercise() -> list[tuple]:
    """Return name, solution, inputs by case and usual mistakes of each function to write."""

    def masks(build):  # from the source's padding mask, True everywhere (T, T), and the target's
        def build_masks(src: Tensor, tgt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            pad = padding_mask(tgt)
            return build(padding_mask(src), torch.ones_like(pad & pad.mT), pad)

        return build_masks

    def head(parts=lambda x, m, q, k, v: (x @ q, m @ k, m @ v), power=-0.5, dim=-1, blocked=0):
        def cross_attention_head(states, memory, w_q, w_k, w_v, mask):
            query, key, value = parts(states, memory, w_q, w_k, w_v)
            scores = query @ key.mT * w_q.size(1) ** power
            if mask.size(-1) == scores.size(-1):
                scores = scores.masked_fill(mask == blocked, -1e9)
            return scores.softmax(dim=dim) @ value

        return cross_attention_head

    torch.manual_seed(5)
    plain, short = torch.tensor([[7, 5, 9, 4]]), SRC[1:, :2]
    mask_cases = {
        "masks: nothing is PAD": (short, plain),
        "masks: PAD in the source": (SRC[1:], plain),
        "masks: PAD in the decoder input": (short, READS[1:]),
        "masks: 742 and 42": (SRC, READS),
        "masks: one token on either side": (plain[:, :1], plain[:, :1]),
    }
    mask_mistakes = {
        "the causal mask is upside down": masks(lambda s, a, t: (s, a.triu() & t, s)),
        "no token may look at itself": masks(lambda s, a, t: (s, a.tril(-1) & t, s)),
        "a token may look at the next one": masks(lambda s, a, t: (s, a.tril(1) & t, s)),
        "the decoder's mask is not causal": masks(lambda s, a, t: (s, a & t, s)),
        "the cross mask is the target's": masks(lambda s, a, t: (s, a.tril() & t, t)),
        "True stands for blocked": masks(lambda s, a, t: (~s, ~(a.tril() & t), ~s)),
        "the source's PAD is open": masks(lambda s, a, t: (s | True, a.tril() & t, s | True)),
        "the target's PAD is open": masks(lambda s, a, t: (s, a.tril(), s)),
        "PAD blocks rows: it blocks columns": masks(lambda s, a, t: (s, a.tril() & t.mT, s)),
    }
    x, y, w = torch.randn(2, 4, 8), torch.randn(2, 3, 8), torch.randn(3, 8, 4) / 4
    query, eye = torch.tensor([[math.sqrt(2) * math.log(3), 0]]), torch.eye(2)
    padding = padding_mask(SRC)[:, 0]
    head_cases = {
        "head: one word by hand": (query, eye, eye, eye, 4 * eye, padding[0, :, :2]),
        "head: 4 words, 3 source tokens": (x[0], y[0], *w, padding[0]),
        "head: as many words as source tokens": (x[0, :3], y[0], *w, padding[0]),
        "head: PAD in the source": (x[1], y[1], *w, padding[1]),
        "head: a batch, PAD in one source": (x, y, *w, padding),
    }
    head_mistakes = {
        "the memory asks, not the states": head(lambda x, m, q, k, v: (m @ q, x @ k, x @ v)),
        "keys and values come from states": head(lambda x, m, q, k, v: (x @ q, x @ k, x @ v)),
        "values are not multiplied by w_v": head(lambda x, m, q, k, v: (x @ q, m @ k, m)),
        "w_k and w_v are swapped": head(lambda x, m, q, k, v: (x @ q, m @ v, m @ k)),
        "the division by sqrt(d_k) is missing": head(power=0),
        "the scores are divided by d_k, not by its root": head(power=-1),
        "softmax runs over the words: over the source tokens is dim=-1": head(dim=-2),
        "the mask is inverted: True means may attend": head(blocked=1),
        "the mask is not used": head(blocked=2),
    }
    right = masks(lambda s, a, t: (s, a.tril() & t, s))
    return [
        ("build_masks", right, mask_cases, mask_mistakes),
        ("cross_attention_head", head(), head_cases, head_mistakes),
    ]


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
