# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6,<3", "numpy>=1.26,<3", "matplotlib>=3.8,<4"]
# ///
"""Lesson 3: multi-head attention.

Lesson 2 ended with a row of vectors, one a token, each of which knows its word and
its place but nothing of its neighbours. Attention lets every vector look at the
others. When you have worked through this lesson you can compute it by hand, say why
the scores are divided by sqrt(d_k), write any mask, and follow every shape through
the heads.

    python 03_multi_head_attention.py               the lesson; --section 3 only a part
    python 03_multi_head_attention.py --quiz        questions, with explanations
    python 03_multi_head_attention.py --check FILE  the exercise, in a file of your own

Exercise: write attention(query, key, value, mask=None) for tensors. query is (..., T,
d_k), key (..., S, d_k), value (..., S, d_v); mask is boolean, broadcasts to (..., T,
S), and True means "may attend". Return the output, (..., T, d_v). A row with all keys
blocked weighs them equally.

Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2.
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
import torch.nn.functional as F
from torch import Tensor, nn

PAD, BOS, EOS = 0, 1, 2  # the same ids in every lesson

KeysValues = tuple[Tensor, Tensor]  # each (B, heads, S, d_k)
Attended = tuple[Tensor, Tensor]  # output (B, T, d_model) and weights (B, heads, T, S)
Mask = Tensor | None  # boolean, True means "may attend"; broadcasts to (B, heads, query, key)


# ---- A soft look-up ----
def section_soft_look_up() -> None:
    """Attention is a look-up that does not have to choose

    A Python dictionary answers a query with the value of the one key that equals it.
    Attention answers with a mixture of all values. How well the query q fits a key k is
    their dot product, the score. Softmax makes the scores positive and lets them add up
    to 1: exp(score), divided by the sum of all exp(score). These weights mix the values.

    One query and three keys, each of d_k = 2 numbers. Before softmax the scores are
    divided by sqrt(d_k); section 3 shows why.
    """
    q, keys = np.array([1.0, 2.0]), np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    values = np.array([[10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    scores = keys @ q / math.sqrt(2)
    weights = np.exp(scores) / np.exp(scores).sum()
    output = weights @ values
    print(f"    query {q}")
    three = ([f"{x:.3f}" for x in column] for column in (scores, np.exp(scores), weights))
    columns = (keys, keys @ q, *three, values)
    table(["key", "q . k", "/ sqrt(2)", "exp", "weight", "value"], *zip(*columns, strict=True))
    print(f"    output = sum of weight * value = {output.round(2)}\n")
    q, keys, values = torch.tensor(q)[None], torch.tensor(keys), torch.tensor(values)
    reference = F.scaled_dot_product_attention(q, keys, values)[0]
    check_close("torch's scaled_dot_product_attention gives the same output", reference, output)


# ---- The formula ----
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


def section_formula() -> None:
    """All queries at once: softmax(Q K^T / sqrt(d_k)) V

    Put the T queries into the rows of a matrix Q (T, d_k), the S keys into K (S, d_k) and
    the S values into V (S, d_k). Row t of Q K^T holds the scores of query t against every
    key; softmax runs along that row. In front there may be more dimensions, here a batch
    of 2 sentences and 4 heads: @ multiplies the last two and repeats over the others.
    key.transpose(-2, -1) swaps the last two, which is the T of K^T.

    Being right has two halves. The output must be right, and so must its gradients: how
    the output moves when an input moves a little, which is all that training sees.
    """
    query = torch.randn(2, 4, 3, 16, requires_grad=True)
    key, value = (torch.randn(2, 4, 6, 16, requires_grad=True) for _ in range(2))
    output, weights = scaled_dot_product_attention(query, key, value)
    print(f"    query       {tuple(query.shape)}  batch, heads, T, d_k")
    print(f"    key, value  {tuple(key.shape)}  batch, heads, S, d_k")
    print(f"    weights     {tuple(weights.shape)}   batch, heads, T, S")
    print(f"    output      {tuple(output.shape)}  batch, heads, T, d_k\n")
    inputs = {"query": (query, query), "key": (key, key), "value": (value, value)}
    check_same(output, F.scaled_dot_product_attention(query, key, value), inputs)


# ---- Why the scores are divided by sqrt(d_k) ----
def scaling_experiment() -> list[list[float]]:
    """Measure 500 random queries, each against 16 keys, for d_k from 4 to 1024.

    A row holds d_k and then, without the division and with it: the variance of the scores, the mean
    of the largest weight, and the share of queries for which softmax lets less than a hundredth of
    a random gradient through, from its weights to its scores.
    """
    rows = []
    for d_k in (4, 16, 64, 256, 1024):
        rows.append([d_k])
        products = torch.randn(500, 1, d_k) @ torch.randn(500, d_k, 16)
        direction = torch.randn(500, 1, 16)
        for divisor in (1, math.sqrt(d_k)):
            scores = (products / divisor).requires_grad_()
            weights = scores.softmax(dim=-1)
            (gradient,) = torch.autograd.grad(weights, scores, direction)
            dead = gradient.norm(dim=-1) < 0.01 * direction.norm(dim=-1)
            figures = scores.var(), weights.amax(dim=-1).mean(), dead.float().mean()
            rows[-1] += [figure.item() for figure in figures]
    return rows


def section_scaling() -> None:
    """Why the scores are divided by sqrt(d_k)

    If the entries of q and k are independent, with mean 0 and variance 1, then q . k is a
    sum of d_k terms of variance 1: its variance is d_k. Long vectors make large scores,
    large scores make softmax choose one key, and where it has chosen, moving a score a
    little changes nothing: the gradient dies there. The few queries that waver between
    two keys get all the more. Dividing by sqrt(d_k) divides the variance by d_k, and it
    is 1 again at every width.

    500 random queries, each against 16 keys, first without the division, then with it.
    "top" is the mean of the largest weight. "dead" is the share of queries for which
    softmax lets less than a hundredth of a gradient pass.
    """
    rows = scaling_experiment()
    header = ["d_k", "variance", "top", "dead", "scaled: variance", "top", "dead"]
    table(header, *([d_k, *(f"{number:.3f}" for number in row)] for d_k, *row in rows))
    print()
    off = max(abs(row[1] / row[0] - 1) for row in rows), max(abs(row[4] - 1) for row in rows)
    check("q . k has variance d_k", off[0] < 0.25, f"at most {off[0]:.1%} off")
    check("divided by sqrt(d_k) it has variance 1", off[1] < 0.25, f"at most {off[1]:.1%} off")
    _, _, top, dead, _, scaled_top, _ = rows[-1]
    chosen = f"at d_k 1,024 the largest weight is {top:.2f}, scaled {scaled_top:.2f}"
    check("without the division softmax chooses one key", top > 0.9 > 0.5 > scaled_top, chosen)
    check("and the gradient dies for most queries", dead > 0.5, f"for {dead:.0%} at d_k 1,024")
    most = max(row[6] for row in rows)
    check("scaled, for none of them, at any width", most < 0.01, f"at most {most:.1%}")


def draw_scaling(figure: Any) -> None:
    """Draw the largest weight and the dead queries against d_k, without the division and with."""
    rows = scaling_experiment()
    widths, (left, right) = [row[0] for row in rows], figure.subplots(1, 2)
    for axes, start, title in ((left, 2, "mean largest weight"), (right, 3, "dead queries")):
        axes.plot(widths, [row[start] for row in rows], "o--", color="0.5", label="q . k")
        axes.plot(widths, [row[start + 3] for row in rows], "s-", label="q . k / sqrt(d_k)")
        axes.set_xscale("log")
        axes.set_xticks(widths, widths)
        axes.minorticks_off()
        axes.set(xlabel="d_k", title=title, ylim=(-0.02, 1))
        axes.grid(alpha=0.3)
        axes.legend(loc="center right" if start == 2 else "upper left")


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


def section_masks() -> None:
    """Masks: who may look at whom

    Two things must not be seen. Sentences of one batch are filled up to one length with
    PAD, which means nothing. And a decoder that learns to predict the next word must not
    look at it. A mask is a tensor of True and False, and True means "may attend". A
    blocked score becomes the most negative finite number. Softmax first subtracts the
    largest score of a row, so a blocked one gets exp of a huge negative number, which is
    exactly 0, and a row with everything blocked has equal scores and equal weights.

    The shapes are chosen so that masks fit scores (batch, heads, T, S) by broadcasting: a
    dimension of size 1 is repeated as often as needed. A padding mask is (B, 1, 1, S),
    the same for all heads and queries; a causal mask is (1, 1, T, T), the same for every
    sentence. `&` of the two lets through what both allow.
    """
    padding, causal = padding_mask(torch.tensor([[5, 6, 7, 8], [9, 4, PAD, PAD]])), causal_mask(4)
    mask, x = causal & padding, torch.randn(2, 1, 4, 8)
    output, weights = scaled_dot_product_attention(x, x, x, mask)
    print(f"    padding {tuple(padding.shape)}, causal {tuple(causal.shape)}, ", end="")
    print(f"both {tuple(mask.shape)}\n\n    the weights of sentence 2, from 0 (light) to 1 (dark):")
    heat_map(weights[1, 0], *[["9", "4", "PAD", "PAD"]] * 2)
    print()
    triangle = np.tri(4, dtype=int)  # 1 where the column is not behind the row
    check_close("the causal mask opens the present and the past", causal[0, 0].int(), triangle, 0)
    blocked = weights[~mask]
    check("blocked weights are 0", bool((blocked == 0).all()), f"all {len(blocked)}, exactly")
    check_close("and every row still adds up to 1", weights.sum(dim=-1), torch.ones(2, 1, 4))
    reference = F.scaled_dot_product_attention(x, x, x, mask)
    check_close("same output as torch's with the same mask", output, reference)
    infinite = torch.full((4,), -math.inf).softmax(dim=0).tolist()
    print(f"\n  A row of which all is blocked: with -inf, softmax would give {infinite}.")
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        y = x.to(kind)
        row = scaled_dot_product_attention(y, y, y, mask & False)[1][0, 0, 0]
        check(f"no NaN in {kind}", bool(row.isfinite().all()), f"softmax gives {row.tolist()}")


# ---- Heads ----
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


def section_heads() -> None:
    """Splitting into heads, watched on the numbers 0 to 15

    One softmax gives one mixture; a word may want several: its verb, its adjective, the
    word before it. So the d_model numbers of a token are cut into n_heads pieces of d_k =
    d_model / n_heads, and each piece attends by itself. Nothing is copied: view reads the
    same numbers as (tokens, heads, d_k), and transpose brings the heads to the front.
    Four tokens of width 4, two heads; and what view alone would have made of it:
    """
    x = torch.arange(16).view(1, 4, 4)
    heads, wrong = MultiHeadAttention(d_model=4, n_heads=2).split_heads(x), x.view(1, 2, 4, 2)
    columns = [side.tolist() for side in (x[0], *heads[0], *wrong[0])]
    table(["token", "head 0", "head 1", "view: 0", "view: 1"], *zip(*columns, strict=True))
    print(f"    {tuple(x.shape)} -> {tuple(heads.shape)}: batch, heads, tokens, d_k\n")
    array = np.arange(16).reshape(4, 4)
    check_close("head 0 has columns 0 and 1 of every token", heads[0, 0], array[:, :2], 0)
    check_close("head 1 has columns 2 and 3", heads[0, 1], array[:, 2:], 0)
    check_close("merged again, they are the tokens", heads.transpose(1, 2).flatten(2), x, 0)
    mixed = wrong[0, 1, 0].tolist()
    check("view alone mixes tokens", mixed == x[0, 2, :2].tolist(), f"token 0 would get {mixed}")


def section_module() -> None:
    """The whole module: project, split, attend, merge, project

    What a token asks, what it offers to be found by, and what it hands over need not be
    the same vector. Four matrices with biases, nn.Linear in PyTorch, learn to make them:
    w_q, w_k and w_v before the split, w_o after the merge, where it lets the heads talk.
    A class derived from nn.Module keeps such parameters and finds them all for training.

    query and memory are two arguments. In self-attention both are the same sentence; in
    cross-attention the query comes from the decoder, and memory is what the name says,
    the output of the encoder.
    """
    ours, theirs = MultiHeadAttention(32, 4), nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():  # nothing in here is recorded for backward()
        for parameter in ours.parameters():
            parameter.normal_(std=0.3)  # also the biases: fresh ones would hide errors
        theirs.in_proj_weight.copy_(torch.cat([m.weight for m in (ours.w_q, ours.w_k, ours.w_v)]))
        theirs.in_proj_bias.copy_(torch.cat([m.bias for m in (ours.w_q, ours.w_k, ours.w_v)]))
        theirs.out_proj.load_state_dict(ours.w_o.state_dict())
    query, memory = (torch.randn(2, length, 32, requires_grad=True) for length in (3, 6))
    mask = padding_mask(torch.tensor([[4, 5, 6, 7, 8, 9], [4, 5, 6, 7, PAD, PAD]]))
    output, weights = ours(query, memory, mask)
    blocked = ~mask[:, 0, 0]  # there, True means blocked
    reference, their_weights = theirs(query, memory, memory, blocked, average_attn_weights=False)
    print(f"    query {tuple(query.shape)}, memory {tuple(memory.shape)} -> ", end="")
    print(f"weights {tuple(weights.shape)}, output {tuple(output.shape)}\n")
    mine, other = list(ours.parameters()), list(theirs.parameters())
    inputs = {"query": (query, query), "memory": (memory, memory)}
    inputs |= {"w_q, w_k and w_v": (mine[0:6:2], other[0]), "their biases": (mine[1:6:2], other[1])}
    check_same(output, reference, {**inputs, "w_o and its bias": (mine[6:], other[2:])})
    check_close("same weights as nn.MultiheadAttention's", weights, their_weights)
    kept = ours.attend(query, *ours.keys_values(memory), mask)[0]
    check_close("keys and values computed beforehand give the same", kept, output, 0)
    modules = [MultiHeadAttention(32, n_heads) for n_heads in (1, 4, 8)]
    counts = [sum(p.numel() for p in module.parameters()) for module in modules]
    formula = 4 * (32**2 + 32)
    check("4(d² + d) parameters with 1, 4 or 8 heads", counts == [formula] * 3, f"{counts}")


# ---- Cross-attention ----
def section_cross() -> None:
    """Cross-attention by hand: a decoder asks a source of two tokens

    The query is [sqrt(2) ln 3, 0], the keys are [1, 0] and [0, 1]. Divided by sqrt(2),
    the scores are ln 3 and 0, and exp makes 3 and 1 of them: the weights must be 3/4 and
    1/4. With the values [4, 0] and [0, 8] the output must be [3, 2].

    The weights have a row for every decoder token and a column for every source token. T
    and S differ, and the output has T rows.
    """
    query, value = torch.tensor([[math.sqrt(2) * math.log(3), 0]]), torch.tensor([[4.0, 0], [0, 8]])
    output, weights = scaled_dot_product_attention(query, torch.eye(2), value)
    check_close("the weights are 3/4 and 1/4", weights[0], [0.75, 0.25])
    check_close("the output is [3, 2]", output[0], [3.0, 2.0])
    decoder, memory = torch.randn(2, 3, 64), torch.randn(2, 6, 64)
    output, weights = MultiHeadAttention(64, 4)(decoder, memory)
    shapes = f"weights {tuple(weights.shape)}, output {tuple(output.shape)}"
    fits = weights.shape == (2, 4, 3, 6) and output.shape == decoder.shape
    check("decoder of 3 tokens, source of 6: rows follow the decoder", fits, shapes)
    print("\n  Lesson 4 puts attention into a layer, together with a feed-forward network and")
    print("  with what keeps a stack of layers trainable.")


# ---- Quiz and exercise ----
def quiz() -> str:
    """Return the questions: ? the text, = the answer, ! an explanation."""
    one_head = MultiHeadAttention(64, 1)(torch.zeros(2, 3, 64), torch.zeros(2, 6, 64))[1][:, 0]
    scores = MultiHeadAttention(64, 4)(torch.zeros(64, 5, 64), torch.zeros(64, 3, 64))[1]
    parameters = sum(p.numel() for p in MultiHeadAttention(512, 8).parameters())
    return f"""
? Batch 2, decoder input of 3 tokens, source of 6: what is the shape of the
   cross-attention weights of one head?
= {tuple(one_head.shape)}
! One row for each decoder token, which asks, one column for each source token,
which is asked, and all of it for each sentence of the batch.

? Batch 64, source 3 tokens, decoder input 5, 4 heads: what is the shape of all
   cross-attention scores together?
= {tuple(scores.shape)}
! The order is batch, heads, query, key. d_k is gone: the dot products have summed
over it.

? Source of 5 tokens, decoder input bos and 5 words: what is the shape of the causal
   mask, without the dimensions for batch and heads?
= {tuple(causal_mask(6)[0, 0].shape)}
! Decoder tokens look at decoder tokens, and there are 6. The source does not enter.

? How many parameters does MultiHeadAttention(d_model=512, n_heads=8) have?
= {parameters}
! Four matrices of 512 × 512, each with a bias of 512: 4(d² + d). Heads only cut the
result into pieces; their number appears nowhere.

? Two scores, 0 and ln 3, already divided by sqrt(d_k): what is the larger weight?
= {torch.tensor([0.0, math.log(3)]).softmax(dim=0)[1]:.2f}
! exp(0) = 1 and exp(ln 3) = 3. There are 4 parts, and the larger score gets 3 of
them.

? Entries of variance 1, d_k = 64, no division: what is the standard deviation of
   q . k?
= {math.isqrt(64)}
! 64 independent terms of variance 1 have a sum of variance 64. The standard
deviation is its root, which is just what the division takes out.

? d_k is large and the division by sqrt(d_k) left out. What happens in training?
   a) the output overflows
   b) softmax saturates, and hardly any gradient gets through
   c) nothing: w_q is smaller after the first step
= b
! Large scores make softmax choose one key, and where it has chosen its slope is
nearly 0. The output stays finite, but most queries are not told how to change.

? In this course a mask is False at row t, column s. What does that say?
   a) token t is PAD
   b) token t may look at token s
   c) token t may not look at token s
= c
! True means "may attend", everywhere. nn.MultiheadAttention has it the other way
round: to compare with it, section 6 turns the mask round with ~.
"""


def exercise() -> list[tuple]:
    """Return name, solution, inputs by case and usual mistakes of each function to write."""

    def version(scale: float = -0.5, dim: int = -1, blocked: float = -1e9, turn: bool = False):
        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask = None) -> Tensor:
            scores = query @ key.transpose(-2, -1) * query.size(-1) ** scale
            if mask is not None:
                scores = torch.where(mask ^ turn, scores, scores if blocked is None else blocked)
            return scores.softmax(dim=dim) @ value

        return attend

    def solution(*arguments: Tensor) -> Tensor:
        return scaled_dot_product_attention(*arguments)[0]

    def late(query: Tensor, key: Tensor, value: Tensor, mask: Mask = None) -> Tensor:
        weights = scaled_dot_product_attention(query, key, value)[1]
        return (weights if mask is None else weights * mask) @ value

    torch.manual_seed(3)
    by_hand = torch.tensor([[math.sqrt(2) * math.log(3), 0.0]])
    padding = padding_mask(torch.tensor([[5, 6, 7, 8], [9, 4, PAD, PAD]]))
    x, y, z = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    cases = {
        "one query by hand": (by_hand, torch.eye(2), torch.tensor([[4.0, 0.0], [0.0, 8.0]])),
        "T = 4 queries, S = 5 keys": (x[0, 0], y[0, 0], y[0, 1]),
        "batch and heads, values narrower than keys": (x, y, z),
        "a causal mask": (x[0, 0], x[0, 1], x[1, 0], causal_mask(4)[0, 0]),
        "a padding mask, broadcast": (x, x, x, padding),
        "a row with everything blocked": (x, x, x, padding & False),
    }
    mistakes = {
        "the division by sqrt(d_k) is missing": version(scale=0),
        "the scores are divided by d_k, not by its root": version(scale=-1),
        "the scores are multiplied by sqrt(d_k)": version(scale=0.5),
        "softmax runs over the queries: over the keys is dim=-1": version(dim=-2),
        "the mask is inverted: True means may attend": version(turn=True),
        "the mask is not used": version(blocked=None),
        "blocked scores become 0, but exp(0) is 1": version(blocked=0.0),
        "the mask comes after softmax, and rows no longer add up to 1": late,
        "a row with everything blocked becomes 0/0, as it does with -inf": version(
            blocked=-math.inf
        ),
    }
    return [("attention", solution, cases, mistakes)]


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
