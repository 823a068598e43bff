# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "torch>=2.6,<3", "numpy>=1.26,<3", "tqdm>=4.66,<5", "matplotlib>=3.8,<4",
# ]
# ///
"""Lesson 6: the full Transformer, and the first things it learns.

Lessons 2 to 5 built the parts. This one puts them together, checks the whole against
PyTorch's own, and trains it for the first time: to read numbers aloud. When you have
worked through it you can follow a sentence through every tensor of the model, count
its parameters, predict its loss before training, and tell memorising from learning.

    python 06_full_transformer.py                    the lesson; --section 3 only a part
    python 06_full_transformer.py --quiz             questions, with explanations
    python 06_full_transformer.py --check FILE       the exercise, in a file of your own
    python 06_full_transformer.py --microscope 89    a tiny model, with all its values
    python 06_full_transformer.py --experiment init  what the size of fresh tables does

Exercise: write label_smoothed_loss(logits, targets, smoothing). logits is (N, V),
targets (N,) holds ids, and rows whose target is PAD (0) do not count. The model is to
give the target the probability 1 - smoothing, and smoothing is spread evenly over all
V classes, the target among them. Return the mean cross-entropy of the rows that
count.

Source: Vaswani et al., "Attention Is All You Need" (2017), sections 3 and 5.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import copy
import functools
import inspect
import io
import math
import os
import random
import re
import runpy
import sys
import textwrap
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

PAD, BOS, EOS = 0, 1, 2  # the same ids in every lesson
MAX_POSITIONS = 1024  # rows of the position table: no longer text enters the model

KeysValues = tuple[Tensor, Tensor]  # each (B, heads, S, d_k)
Attended = tuple[Tensor, Tensor]  # output (B, T, d_model) and weights (B, heads, T, S)
Mask = Tensor | None  # boolean, True means "may attend"; broadcasts to (B, heads, query, key)


# ---- The parts, as lessons 2 to 5 built them ----
def padding_mask(ids: Tensor) -> Tensor:
    """Return where ids (B, S) are real tokens, as (B, 1, 1, S)."""
    return (ids != PAD)[:, None, None, :]


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """Return (1, 1, T, T), True where the key is not later than the query.

    >>> causal_mask(3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


class TokenEmbedding(nn.Module):
    """table[ids] * sqrt(d_model): ids (B, S) -> vectors (B, S, d_model) (section 3.4).

    The table starts as N(0, 1/d_model), so after the scaling each entry has variance 1.
    """

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.table.weight, std=d_model**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) * math.sqrt(self.table.embedding_dim)


class PositionalEncoding(nn.Module):
    """Add sinusoids that tell the position, then dropout; (B, S, d_model) -> same (section 3.5).

    PE[p, 2i] = sin(p / 10000^(2i/d_model)), PE[p, 2i+1] = cos(p / 10000^(2i/d_model))
    """

    def __init__(self, d_model: int, max_len: int, dropout: float) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"d_model must be even (sine and cosine in pairs), got {d_model}")
        rate = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        angle = torch.arange(max_len, dtype=torch.float32)[:, None] * rate
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).view(max_len, d_model)
        self.register_buffer("table", table, persistent=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:  # x[:, 0] stands at position `start`
        end = start + x.size(1)
        if end > self.table.size(0):
            raise ValueError(f"input of {end} positions, but the table has {self.table.size(0)}")
        return self.dropout(x + self.table[start:end])


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


# ---- The whole model ----
class Transformer(nn.Module):
    """The encoder-decoder of 2017: source and target ids in, logits of each next token out.

    tie: "all" (one matrix for source, target and output, as in the paper; one vocabulary),
    "output" (the target embedding is the output matrix) or "none". Pre-norm ends both stacks with
    one more LayerNorm, since nothing else there bounds the residual stream.
    """

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        d_model: int,
        n_heads: int,
        d_ff: int,
        n_layers: int,
        dropout: float,
        norm_first: bool = False,
        tie: str = "output",
    ) -> None:
        super().__init__()
        if tie not in ("all", "output", "none"):
            raise ValueError(f'tie must be "all", "output" or "none", got {tie!r}')
        if tie == "all" and src_vocab_size != tgt_vocab_size:
            raise ValueError('tie="all" needs one vocabulary for source and target')
        sizes = (d_model, n_heads, d_ff, dropout, norm_first)
        self.src_embedding = TokenEmbedding(src_vocab_size, d_model)
        self.tgt_embedding = TokenEmbedding(tgt_vocab_size, d_model)
        self.position = PositionalEncoding(d_model, MAX_POSITIONS, dropout)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(n_layers))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(n_layers))
        self.encoder_norm = nn.LayerNorm(d_model) if norm_first else nn.Identity()
        self.decoder_norm = nn.LayerNorm(d_model) if norm_first else nn.Identity()
        self.output = nn.Linear(d_model, tgt_vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if tie == "all":
            self.src_embedding = self.tgt_embedding
        if tie != "none":
            self.output.weight = self.tgt_embedding.table.weight

    def encode(self, src: Tensor) -> Tensor:
        """Map source ids (B, S) to the memory (B, S, d_model)."""
        x, mask = self.position(self.src_embedding(src)), padding_mask(src)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x)

    def new_caches(self, memory: Tensor) -> list[LayerCache]:
        """Return a cache for each decoder layer, filled from memory (B, S, d_model)."""
        return [LayerCache(layer.cross_attention.keys_values(memory)) for layer in self.decoder]

    def decode(
        self, tgt: Tensor, memory: Tensor | None, src: Tensor, caches: Sequence[LayerCache] = ()
    ) -> Tensor:
        """Map decoder input ids (B, T) to states (B, T, d_model), before the output matrix.

        With caches, tgt is only the ids since the last call, none PAD; memory is not read.
        """
        past = caches[0].target[0].size(2) if caches and caches[0].target else 0
        tgt_mask = causal_mask(past + tgt.size(1), tgt.device)[:, :, past:]
        if not caches:
            tgt_mask, caches = tgt_mask & padding_mask(tgt), self.new_caches(memory)
        x, src_mask = self.position(self.tgt_embedding(tgt), past), padding_mask(src)
        for layer, cache in zip(self.decoder, caches, strict=True):
            x = layer(x, cache, tgt_mask, src_mask)
        return self.decoder_norm(x)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Map source ids (B, S) and decoder input ids (B, T) to logits (B, T, tgt_vocab_size)."""
        return self.output(self.decode(tgt, self.encode(src), src))


# ---- A sentence walked through the model ----
Step = tuple[str, str, Tensor]  # what it is, the names of its axes, the values


def trace(model: Transformer, src: Tensor, tgt: Tensor) -> list[Step]:
    """Return every tensor on the way from ids (B, S) and decoder input (B, T) to the logits."""
    steps: list[Step] = []

    def note(name: str, axes: str, tensor: Tensor) -> Tensor:
        steps.append((name, axes, tensor))
        return tensor

    def attend(name: str, module: nn.Module, x: Tensor, memory: Tensor, mask: Mask) -> Tensor:
        note(f"{name}: queries", "batch head query d_k", module.split_heads(module.w_q(x)))
        keys, values = module.keys_values(memory)
        note(f"{name}: keys", "batch head key d_k", keys)
        note(f"{name}: values", "batch head key d_k", values)
        output, weights = module.attend(x, keys, values, mask)
        note(f"{name}: weights", "batch head query key", weights)
        return note(f"{name}: output", "batch query d_model", output)

    def feed(name: str, module: nn.Module, x: Tensor) -> Tensor:
        note(f"{name} feed-forward: inner", "batch position d_ff", module.linear1(x).relu())
        return note(f"{name} feed-forward: output", "batch position d_model", module(x))

    def enter(name: str, ids: Tensor, embedding: nn.Module) -> Tensor:
        note(f"{name}: ids", "batch position", ids)
        x = note(f"{name}: embedding", "batch position d_model", embedding(ids))
        return note(f"{name}: with position", "batch position d_model", model.position(x))

    def residual(module: nn.Module, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return note("add & norm", "batch position d_model", module(x, sublayer))

    src_mask, tgt_mask = padding_mask(src), causal_mask(tgt.size(1)) & padding_mask(tgt)
    x = enter("source", src, model.src_embedding)
    for i, layer in enumerate(model.encoder, 1):
        itself = functools.partial(attend, f"encoder {i} self-attention", layer.self_attention)
        inner = functools.partial(feed, f"encoder {i}", layer.feed_forward)
        x = residual(layer.residual1, x, lambda y, f=itself: f(y, y, src_mask))
        x = residual(layer.residual2, x, inner)
    memory = note("memory", "batch position d_model", model.encoder_norm(x))
    x = enter("decoder input", tgt, model.tgt_embedding)
    for i, layer in enumerate(model.decoder, 1):
        itself = functools.partial(attend, f"decoder {i} self-attention", layer.self_attention)
        cross = functools.partial(attend, f"decoder {i} cross-attention", layer.cross_attention)
        inner = functools.partial(feed, f"decoder {i}", layer.feed_forward)
        x = residual(layer.residual1, x, lambda y, f=itself: f(y, y, tgt_mask))
        x = residual(layer.residual2, x, lambda y, f=cross: f(y, memory, src_mask))
        x = residual(layer.residual3, x, inner)
    logits = note("logits", "batch position vocabulary", model.output(model.decoder_norm(x)))
    note("probabilities", "batch position vocabulary", logits.softmax(dim=-1))
    return steps


def section_walk() -> None:
    """A sentence walked through the whole model

    The source goes through embedding, positions and the encoder layers and becomes the
    memory. The decoder input, which is the target shifted right by one, goes through the
    decoder layers, each of which looks into the memory. The output matrix turns each of
    the last vectors into logits, one score for each word of the target vocabulary.

    `trace` calls the same modules one by one and writes down what comes out. Here the
    model has 1 + 1 layers; more layers repeat the middle. The sentence is the number 427.
    """
    model = Transformer(13, 32, d_model=64, n_heads=4, d_ff=128, n_layers=1, dropout=0.0).eval()
    src, tgt = number_batch([427])
    tgt_in = shift_right(tgt)
    steps = trace(model, src, tgt_in)
    table(["tensor", "shape", "axes"], *([name, tuple(x.shape), axes] for name, axes, x in steps))
    print()
    logits = dict((name, x) for name, _, x in steps)["logits"]
    check_close("the walk ends where the model does", logits, model(src, tgt_in))


# ---- Parameters ----
def count_by_kind(model: nn.Module) -> Counter[str]:
    """Count the parameters of a model by kind of part; a tied matrix counts once."""
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        kinds = ("attention", "feed_forward", "norm", "embedding")
        counts[next((kind for kind in kinds if kind in name), "output")] += parameter.numel()
    return counts


def section_parameters() -> None:
    """Its parameters, by part and by formula

    Lesson 1 counted by formula. Here stands the model itself, with one matrix for source,
    target and output (tie="all"), and it is counted. With d for d_model and n + n layers:

        vocabulary d  +  n (3 · 4(d² + d)  +  2 (2 d d_ff + d_ff + d)  +  5 · 2 d)

    The models are built on the meta device, where tensors have shapes but no memory.
    """
    sizes = {"3 + 3 layers": (16_000, 256, 4, 1024, 3), "opus-mt-en-ru": (62_518, 512, 8, 2048, 6)}
    for name, (vocabulary, d, n_heads, d_ff, n) in sizes.items():
        with torch.device("meta"):
            model = Transformer(vocabulary, vocabulary, d, n_heads, d_ff, n, 0.1, tie="all")
        counts = count_by_kind(model)
        print(f"  {name}: vocabulary {vocabulary:,}, d_model {d}, d_ff {d_ff:,}")
        for part, count in counts.most_common():
            share = count / counts.total()
            print(f"    {part:<12}  {count:>10,}  {share:6.1%}  {'█' * round(40 * share)}")
        layers = 3 * 4 * (d * d + d) + 2 * (2 * d * d_ff + d_ff + d) + 5 * 2 * d
        formula = vocabulary * d + n * layers
        check("model = formula", counts.total() == formula, f"{counts.total():,} = {formula:,}")
        print()


# ---- The yardstick ----
def copy_into_torch(model: Transformer, d_ff: int) -> nn.Transformer:
    """Return an nn.Transformer with the weights of our layers.

    Left to itself it ends post-norm stacks with one more norm, which the paper does not have.
    """
    d, n = model.output.in_features, len(model.encoder)
    n_heads = model.encoder[0].self_attention.n_heads
    pre = not isinstance(model.encoder_norm, nn.Identity)
    sizes = (d, n_heads, d_ff, 0.0)
    encoder_layer = nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=pre)
    decoder_layer = nn.TransformerDecoderLayer(*sizes, batch_first=True, norm_first=pre)
    norms = [nn.LayerNorm(d) if pre else None for _ in range(2)]
    encoder = nn.TransformerEncoder(encoder_layer, n, norms[0], enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(decoder_layer, n, norms[1])
    theirs = nn.Transformer(d, n_heads, custom_encoder=encoder, custom_decoder=decoder)
    theirs.batch_first = True
    for ours, stack in ((model.encoder, theirs.encoder), (model.decoder, theirs.decoder)):
        for mine, other in zip(ours, stack.layers, strict=True):
            pairs = [(mine.self_attention, other.self_attn)]
            if stack is theirs.decoder:
                pairs.append((mine.cross_attention, other.multihead_attn))
            for a, b in pairs:
                inputs = (a.w_q, a.w_k, a.w_v)
                b.in_proj_weight.data = torch.cat([m.weight.data for m in inputs])
                b.in_proj_bias.data = torch.cat([m.bias.data for m in inputs])
                b.out_proj.load_state_dict(a.w_o.state_dict())
            other.linear1.load_state_dict(mine.feed_forward.linear1.state_dict())
            other.linear2.load_state_dict(mine.feed_forward.linear2.state_dict())
            for i in range(1, len(pairs) + 2):
                norm = getattr(mine, f"residual{i}").norm
                getattr(other, f"norm{i}").load_state_dict(norm.state_dict())
    if pre:
        theirs.encoder.norm.load_state_dict(model.encoder_norm.state_dict())
        theirs.decoder.norm.load_state_dict(model.decoder_norm.state_dict())
    return theirs


def section_yardstick() -> None:
    """The model equals nn.Transformer

    The same weights in both, and every weight random: fresh gains are 1 and fresh biases
    0, and would hide errors. Between ids and logits both use our embeddings and output
    matrix, since nn.Transformer has none. Source and target contain PAD. Compared are the
    logits and the gradients that reach the embeddings through all the layers between.
    """
    src, tgt = (torch.randint(3, 50, (4, length)) for length in (7, 6))
    src[2:, 5:], tgt[3:, 4:] = PAD, PAD
    for norm_first in (False, True):
        ours = Transformer(50, 50, 32, 4, 64, 2, 0.0, norm_first, tie="none")
        for parameter in ours.parameters():
            nn.init.normal_(parameter, std=0.2)
        theirs, causal = copy_into_torch(ours, 64), ~causal_mask(6)[0, 0]  # True means blocked
        logits = ours(src, tgt)
        x, y = ours.position(ours.src_embedding(src)), ours.position(ours.tgt_embedding(tgt))
        blocked = {"src_key_padding_mask": src == PAD, "memory_key_padding_mask": src == PAD}
        states = theirs(x, y, tgt_mask=causal, tgt_key_padding_mask=tgt == PAD, **blocked)
        reference, kind = ours.output(states), "pre-norm" if norm_first else "post-norm"
        check_close(f"{kind}: the same logits", logits, reference, 1e-4)
        direction = torch.randn_like(logits)
        for name in ("src", "tgt"):
            weight = getattr(ours, f"{name}_embedding").table.weight
            a, b = (
                torch.autograd.grad(out, weight, direction, retain_graph=True)[0]
                for out in (logits, reference)
            )
            check_close(f"{kind}: the same gradient of the {name} embedding", a, b, 1e-3)


# ---- Before training ----
def section_untrained() -> None:
    """The loss before training, predicted, and a parrot

    The loss is -log of the probability given to the right word, on average: the
    cross-entropy. If the logits of V words are random with mean 0 and variance s², it is
    about ln V + s²/2 at the start. Our states, the decoder's last vectors, have variance
    1 in each of d entries, the rows of the output matrix 1/d, so s² = 1. It takes a
    minute to predict and finds many a mistake: a loss above it at the first step means
    that something already speaks too loudly.

    Here something does. The output matrix is the target embedding (tied). The residual
    stream still carries the embedding of the word just read, and its product with its own
    row is large: the untrained model repeats, like a parrot, what it has read. Every
    sub-layer adds something of its own and the norm shrinks the sum, so the embedding
    fades with depth, and the faster, the larger the fresh weights are. Our model starts
    with Xavier weights, of variance 2 / (inputs + outputs); those that nn.Linear starts
    with by itself are smaller. Take the one word out of the sum, and the formula holds.
    """
    vocabulary, d = 16_000, 256
    src, tgt = torch.randint(3, vocabulary, (2, 6, 20))
    predicted, rows = math.log(vocabulary) + 0.5, []
    kinds = *(("Xavier", n) for n in (1, 2, 3)), *(("PyTorch's", n) for n in (1, 2, 3))
    for name, n in kinds:
        model = Transformer(vocabulary, vocabulary, d, 4, 1024, n, 0.0, tie="all").eval()
        if name != "Xavier":
            for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
                if layer is not model.output:
                    layer.reset_parameters()
        with torch.no_grad():
            logits = model(src, tgt)
        parrot = (logits.argmax(dim=-1) == tgt).float().mean().item()
        expected = logits.mean(dim=-1)  # of a word to predict that is drawn at random
        others = logits.scatter(2, tgt[..., None], -math.inf)  # without the word just read
        losses = [(x.logsumexp(dim=-1) - expected).mean().item() for x in (logits, others)]
        rows.append([name, n, *losses, parrot])
    table(
        ["fresh weights", "layers", "loss", "without the word read", "repeats it"],
        *([name, n, f"{a:.2f}", f"{b:.2f}", f"{p:.0%}"] for name, n, a, b, p in rows),
    )
    print(f"    predicted: ln {vocabulary:,} + 1/2 = {predicted:.2f}\n")
    parrots = [row for row in rows if row[1] == 1 or row[0] != "Xavier"]
    least = min(row[4] for row in parrots)
    check("one layer, or smaller weights: it is a parrot", least > 0.95, f"at least {least:.0%}")
    off = max(abs(row[3] - predicted) for row in rows)
    check("without the word read, the formula holds", off < 0.02, f"at most {off:.3f} off")


# ---- Loss and training ----
def shift_right(tgt: Tensor) -> Tensor:
    """Return the decoder input: bos, then the target without its last token."""
    return torch.cat([torch.full_like(tgt[:, :1], BOS), tgt[:, :-1]], dim=1)


def batch_loss(model: Transformer, src: Tensor, tgt: Tensor, smoothing: float) -> Tensor:
    """Return the cross-entropy summed over the real tokens of tgt (B, T), which ends with eos.

    The decoder reads bos and then the target, one place later than it predicts it. Only states at
    real tokens meet the output matrix: elsewhere the loss would be thrown away.
    """
    states = model.decode(shift_right(tgt), model.encode(src), src)
    real = tgt != PAD
    logits = model.output(states[real])  # (real tokens, vocabulary)
    return F.cross_entropy(logits.float(), tgt[real], label_smoothing=smoothing, reduction="sum")


def fit(
    model: Transformer, src: Tensor, tgt: Tensor, epochs: int, rate: float, smoothing: float
) -> Iterator[float]:
    """Train on all pairs, in batches of 64; yield the mean loss of each epoch.

    Adam as in the paper. The learning rate rises for 50 steps, then falls in a line to 0; lesson 7
    takes the loop apart. The gradient's length is cut off at 1.
    """
    torch.set_num_threads(1)  # so small a model gains nothing from more
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    step, total = 0, epochs * math.ceil(len(src) / 64)
    for _ in tqdm(range(epochs), unit="epoch", leave=False, disable=None):
        model.train()
        losses, tokens = 0.0, 0
        for rows in torch.randperm(len(src)).split(64):
            step += 1
            optimizer.param_groups[0]["lr"] = rate * min(step / 50, 1 - (step - 1) / total)
            count = int((tgt[rows] != PAD).sum())
            loss = batch_loss(model, src[rows], tgt[rows], smoothing)
            optimizer.zero_grad()
            (loss / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses, tokens = losses + loss.item(), tokens + count
        yield losses / tokens


@torch.no_grad()
def answers(model: Transformer, src: Tensor, longest: int = 12) -> list[list[int]]:
    """Return for each source the ids that the model writes, taking the best next one each time."""
    model.eval()
    memory, tgt = model.encode(src), torch.full((len(src), 1), BOS)
    for _ in range(longest):
        logits = model.output(model.decode(tgt, memory, src)[:, -1])
        tgt = torch.cat([tgt, logits.argmax(dim=-1, keepdim=True)], dim=1)
    written = tgt[:, 1:].tolist()
    return [ids[: ids.index(EOS)] if EOS in ids else ids for ids in written]


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of ids as one tensor, the short ones filled up with PAD."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])


def exact(model: Transformer, src: Tensor, tgt: Tensor) -> int:
    """Count the sources that the model answers exactly right."""
    wanted = [[i for i in row if i not in (PAD, EOS)] for row in tgt.tolist()]
    return sum(a == b for a, b in zip(answers(model, src), wanted, strict=True))


def cross_attention(model: Transformer, src: Tensor, tgt: Tensor) -> Tensor:
    """Return the last layer's cross-attention (B, T, S), the mean of its heads."""
    model.eval()
    with torch.no_grad():
        steps = {name: values for name, _, values in trace(model, src, shift_right(tgt))}
    return steps[f"decoder {len(model.decoder)} cross-attention: weights"].mean(dim=1)


def flatness(model: Transformer, src: Tensor, tgt: Tensor) -> float:
    """Return the mean entropy of cross-attention: 1 is flat, 0 looks at one place only."""
    weights = cross_attention(model, src, tgt).clamp_min(1e-9)
    most = (src != PAD).sum(dim=1).log()[:, None]
    return (-(weights * weights.log()).sum(dim=-1) / most)[tgt != PAD].mean().item()


SENTENCES = {
    "the cat sleeps": "le chat dort",
    "the dog sleeps": "le chien dort",
    "the cat drinks milk": "le chat boit du lait",
    "the dog eats meat": "le chien mange de la viande",
    "my sister sings": "ma sœur chante",
    "my brother is tall": "mon frère est grand",
    "she reads a book": "elle lit un livre",
    "he writes a letter": "il écrit une lettre",
    "the house is old": "la maison est vieille",
    "the garden is small": "le jardin est petit",
    "they live in Paris": "ils habitent à Paris",
    "we are going home": "nous rentrons chez nous",
    "it is raining today": "il pleut aujourd'hui",
    "thank you very much": "merci beaucoup",
    "where is the station": "où est la gare",
    "I do not know": "je ne sais pas",
}


def section_overfit() -> None:
    """Overfit one batch: can it learn anything at all?

    Before a long training, a short test: 16 sentence pairs, 200 steps, no smoothing. A
    model without mistakes learns them by heart, all 16. If one does not, look first for a
    wrong mask, shift or gradient; no amount of data will mend that.

    By heart means that nothing was understood. A few words of a sentence tell it from the
    15 others, wherever the model looks, so it need not learn to look: the cross-attention
    stays nearly flat. Flatness is the entropy of a row of weights w, the sum of -w ln w,
    divided by the largest possible: 1 if all are equal, 0 if one has it all.
    """
    sides = [[text.split() for text in side] for side in (SENTENCES, SENTENCES.values())]
    names = [["<pad>", "<bos>", "<eos>", *sorted({w for s in side for w in s})] for side in sides]
    ids = [[[n.index(w) for w in s] for s in side] for n, side in zip(names, sides, strict=True)]
    src, tgt = padded(ids[0]), padded([[*row, EOS] for row in ids[1]])
    model = Transformer(len(names[0]), len(names[1]), 64, 4, 128, 2, dropout=0.0)
    losses = list(fit(model, src, tgt, epochs=200, rate=2e-3, smoothing=0.0))
    every = ([step, f"{losses[step - 1]:.4f}"] for step in (1, 10, 50, 100, 200))
    table(["step", "loss"], *every)
    print()
    written = [" ".join(names[1][i] for i in row) for row in answers(model, src)]
    table(["source", "written by the model"], *list(zip(SENTENCES, written, strict=True))[:4])
    print()
    right = sum(a == b for a, b in zip(written, SENTENCES.values(), strict=True))
    check("all pairs come back exactly", right == 16, f"{right} of 16")
    flat = flatness(model, src, tgt)
    check("its cross-attention is nearly flat", flat > 0.8, f"flatness {flat:.2f}")


# ---- Reading numbers aloud ----
ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen""".split()  # noqa: SIM905
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
WORDS = ["<pad>", "<bos>", "<eos>", *ONES, *TENS, "hundred"]
UNSEEN = sorted(random.Random(0).sample(range(20, 1000), 100))  # whatever the seed
SEEN = sorted(set(range(1000)) - set(UNSEEN))
NUMBER_SMOOTHING, NUMBER_EPOCHS = 0.1, 60


def aloud(number: int) -> list[str]:
    """Return the words of a number below 1000.

    >>> " ".join(aloud(427))
    'four hundred twenty seven'
    """
    if number >= 100:
        rest = number % 100
        return [ONES[number // 100], "hundred", *(aloud(rest) if rest else [])]
    if number >= 20:
        return [TENS[number // 10 - 2], *(aloud(number % 10) if number % 10 else [])]
    return [ONES[number]]


def number_batch(numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return digits as source ids (B, S), 3 for digit 0, and words with eos as target (B, T)."""
    src = padded([[3 + int(digit) for digit in str(number)] for number in numbers])
    return src, padded([[*(WORDS.index(w) for w in aloud(n)), EOS] for n in numbers])


def number_model(tie: str = "output") -> Transformer:
    """Return an untrained model for reading numbers."""
    return Transformer(13, len(WORDS), 64, 4, 128, 2, dropout=0.0, tie=tie)


class Reading(NamedTuple):
    """A model trained to read numbers, and what happened on the way."""

    model: Transformer
    losses: list[float]  # of each epoch
    right: list[int]  # unseen numbers read right after each epoch
    early: list[str]  # what it read after 2 epochs for each of EXAMPLES


@functools.cache
def read_numbers(seed: int) -> Reading:
    """Train once for each seed: 900 numbers, 60 epochs; ask the 100 others after each."""
    torch.manual_seed(seed)
    reading, unseen = Reading(number_model(), [], [], []), number_batch(UNSEEN)
    for loss in fit(reading.model, *number_batch(SEEN), NUMBER_EPOCHS, 3e-3, NUMBER_SMOOTHING):
        reading.losses.append(loss)
        reading.right.append(exact(reading.model, *unseen))
        if len(reading.losses) == 2:
            reading.early.extend(written_aloud(reading.model, EXAMPLES))
    return reading


def written_aloud(model: Transformer, numbers: Sequence[int]) -> list[str]:
    """Return what the model writes for each number."""
    rows = answers(model, number_batch(numbers)[0])
    return [" ".join(WORDS[i] for i in row) for row in rows]


LIKE_427 = [n for n in UNSEEN if n > 120 and n // 10 % 10 > 1 and n % 10]  # four words each
EXAMPLES = LIKE_427[5::25]


def smoothing_floor(classes: int, smoothing: float) -> float:
    """Return the entropy of the smoothed target, below which the loss cannot go."""
    other = smoothing / classes
    right = 1 - smoothing + other
    return -(right * math.log(right) + (classes - 1) * other * math.log(other))


def section_numbers() -> None:
    """First real learning: reading numbers aloud

    The source is a number from 0 to 999, digit by digit; the target is its words. 900
    numbers are for training, each once in an epoch, in batches; 100 are never shown. The
    4 of 427 is "four hundred", the 4 of 742 is "forty", and the 1 of 413 has no word of
    its own: there are rules, and a model that reads the 100 others right has found them.
    0 to 19 are among the 900: each of them alone is an exception, and "zero" occurs
    nowhere else.

    Label smoothing 0.1: the model is to give the right word not probability 1, but 0.9
    and its share of the 0.1 that is spread over all 32 words. Such a loss cannot reach 0.
    The best a model can do is to give just these probabilities, and then the loss is
    their entropy: the floor.
    """
    reading = read_numbers(torch.initial_seed())
    model, losses, right = reading.model, reading.losses, reading.right
    parameters = sum(p.numel() for p in model.parameters())
    print(f"    {parameters:,} parameters, {len(SEEN)} numbers to train, {len(UNSEEN)} unseen\n")
    epochs = (1, 2, 5, 10, 20, 40, NUMBER_EPOCHS)
    rows = ([epoch, f"{losses[epoch - 1]:.4f}", right[epoch - 1]] for epoch in epochs)
    table(["epoch", "loss", "unseen right, of 100"], *rows)
    print("\n  Right in shape comes before right in the digits:\n")
    final = written_aloud(model, EXAMPLES)
    table(
        ["unseen", "after 2 epochs", f"after {NUMBER_EPOCHS}"],
        *zip(map(str, EXAMPLES), reading.early, final, strict=True),
    )
    print()
    shared, fresh = set(SEEN) & set(UNSEEN), exact(number_model(), *number_batch(UNSEEN))
    check("no unseen number is trained on", not shared, f"{len(shared)} of {len(UNSEEN)}")
    check("an untrained model reads none of them", fresh == 0, f"{fresh} of {len(UNSEEN)}")
    check("unseen numbers are read aloud exactly", right[-1] == 100, f"{right[-1]} of 100")
    floor = smoothing_floor(len(WORDS), NUMBER_SMOOTHING)
    src, tgt = number_batch(SEEN)
    with torch.no_grad():
        loss = batch_loss(model, src, tgt, NUMBER_SMOOTHING).item() / int((tgt != PAD).sum())
    evidence = f"floor {floor:.4f}, reached {loss:.4f}"
    check("the loss ends just above the floor", floor - 1e-5 < loss < floor + 0.005, evidence)


def section_alignment() -> None:
    """Now it knows where to look

    To write "four" the decoder looks at the 4. Rows are the words to be written, columns
    the digits read; the weights are those of the last decoder layer, the mean of its
    heads. What was flat in the batch learnt by heart points at single digits here: for
    numbers never seen, memory does not help, and looking does.
    """
    model, number = read_numbers(torch.initial_seed()).model, EXAMPLES[0]
    src, tgt = number_batch([number])
    heat_map(cross_attention(model, src, tgt)[0], [*aloud(number), "eos"], list(str(number)))
    print()
    src, tgt = number_batch(LIKE_427)
    looks = cross_attention(model, src, tgt)[:, [0, 2, 3]].argmax(dim=-1)
    share = (looks == torch.tensor([0, 1, 2])).float().mean().item()
    evidence = f"{share:.0%} of {looks.numel()} words of unseen numbers"
    check("hundreds, tens and ones look at their own digit", share > 0.9, evidence)
    flat = flatness(model, src, tgt)
    check("the attention is not flat any more", flat < 0.6, f"flatness {flat:.2f}")
    print("\n  It need not be so. The encoder has mixed the digits already, and another model may")
    print("  find what it needs elsewhere: see --microscope 42.\n")
    print("  Lesson 7 takes the training loop apart and trains on sentences.")


def draw_learning(figure: Any) -> None:
    """Draw the loss, and the unseen numbers read right, epoch by epoch."""
    reading = read_numbers(torch.initial_seed())
    left, right = figure.subplots(1, 2)
    epochs = range(1, NUMBER_EPOCHS + 1)
    left.plot(epochs, reading.losses, color="black")
    floor = smoothing_floor(len(WORDS), NUMBER_SMOOTHING)
    left.axhline(floor, color="0.5", ls="--", label=f"floor {floor:.3f}")
    left.set(xlabel="epoch", title="training loss, smoothed", ylim=(0, None))
    left.legend()
    right.plot(epochs, reading.right, "o-", ms=3, color="black")
    right.set(xlabel="epoch", title="unseen numbers right, of 100", ylim=(0, 105))
    for axes in (left, right):
        axes.grid(alpha=0.3)


def draw_cross_attention(figure: Any) -> None:
    """Draw the cross-attention of three unseen numbers."""
    model = read_numbers(torch.initial_seed()).model
    for axes, number in zip(figure.subplots(1, len(EXAMPLES)), EXAMPLES, strict=True):
        weights = cross_attention(model, *number_batch([number]))[0].numpy()
        image = axes.imshow(weights, cmap="Greys", vmin=0, vmax=1)
        axes.set_xticks(range(3), list(str(number)))
        axes.set_yticks(range(len(weights)), [*aloud(number), "eos"])
        axes.set(title=f"{number}", xlabel="digit read")
    figure.colorbar(image, ax=figure.axes, label="weight", shrink=0.7)


# ---- The microscope and the experiment ----
def microscope(args: argparse.Namespace) -> int:
    """Train a tiny model on 0 to 99, and show every tensor while it reads one number."""
    number = args.microscope
    if not 0 <= number <= 99:
        refuse(f"--microscope takes a number from 0 to 99, not {number}.")
    torch.manual_seed(args.seed)
    model = Transformer(13, len(WORDS), 6, 1, 12, 1, dropout=0.0)
    src, tgt = number_batch(range(100))
    for _ in fit(model, src, tgt, 300, 2e-2, smoothing=0.0):
        pass
    print("A model with 1 + 1 layers, 1 head, d_model 6, d_ff 12, trained on the numbers 0 to 99:")
    print(f"it reads {exact(model, src, tgt)} of them right, and for {number} it writes:", end=" ")
    print(written_aloud(model, [number])[0] + ".\nIn square brackets: Transformer base.\n")
    words = [BOS, *answers(model, number_batch([number])[0])[0]]
    base = {"batch": 1, "head": 8, "d_k": 64, "d_model": 512, "d_ff": 2048, "vocabulary": 37_000}
    torch.set_printoptions(precision=2, sci_mode=False, linewidth=86)
    with torch.no_grad():
        steps = trace(model, number_batch([number])[0], torch.tensor([words]))
    for name, axes, values in steps:
        sizes = [f"{axis} {n}" for axis, n in zip(axes.split(), values.shape, strict=True)]
        large = tuple(base.get(a, n) for a, n in zip(axes.split(), values.shape, strict=True))
        print(f"{name}  ({', '.join(sizes)})  [{', '.join(map(str, large))}]")
        numbers = str(values[0]).removeprefix("tensor(").removesuffix(")")
        print(textwrap.indent(numbers.replace("\n       ", "\n"), "  "))
        if all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout)):
            try:
                input("(Enter goes on, Ctrl-D ends) ")
            except EOFError:
                break
    return 0


def experiment(args: argparse.Namespace) -> int:
    """Train with embedding tables that start at size 1 and at d_model**-0.5, not tied."""
    unseen, rows = number_batch(UNSEEN), []
    for name, size in (("d_model^-0.5", 64**-0.5), ("1", 1.0)):
        for epochs in (20, 60):
            torch.manual_seed(args.seed)
            model = number_model(tie="none")
            for embedding in (model.src_embedding, model.tgt_embedding):
                nn.init.normal_(embedding.table.weight, std=size)
            loss = list(fit(model, *number_batch(SEEN), epochs, 3e-3, NUMBER_SMOOTHING))[-1]
            rows.append([name, epochs, f"{loss:.3f}", exact(model, *unseen)])
    table(["tables start at size", "epochs", "loss", "unseen right, of 100"], *rows)
    print("\n  After × sqrt(d_model) the second kind has entries of size 8 in place of 1. What may")
    print("  slow it down: a step of Adam moves both by as much, so an entry of size 8 by an 8th")
    print("  of the share.")
    return 0


# ---- Quiz and exercise ----
def quiz() -> str:
    """Return the questions: ? the text, = the answer, ! an explanation."""
    src, tgt = torch.full((64, 3), 4), torch.full((64, 5), 4)
    steps = {name: values for name, _, values in trace(number_model(), src, tgt)}
    parameters = sum(p.numel() for p in number_model().parameters())
    untied = sum(p.numel() for p in number_model("none").parameters())
    share = NUMBER_SMOOTHING / len(WORDS)
    return f"""
? Batch 64, source 3 tokens, decoder input 5, 4 heads: what is the shape of the
   cross-attention weights of one layer?
= {tuple(steps["decoder 1 cross-attention: weights"].shape)}
! Batch, head, query, key. The queries come from the decoder, the keys from the
source.

? The same batch, target vocabulary 32: what is the shape of the logits?
= {tuple(steps["logits"].shape)}
! For each of the 5 places of each decoder input a score for each of 32 words.

? "427" is read aloud. How many tokens has the target, eos included?
= {number_batch([427])[1].size(1)}
! four hundred twenty seven eos. The decoder input has as many: bos in front, eos
left out.

? The number model has {parameters:,} parameters with tie="output". How many with
   tie="none", target vocabulary {len(WORDS)}, d_model 64?
= {untied}
! A second matrix of {len(WORDS)} × 64 for the output, without bias: {untied - parameters:,} more.

? A fresh model spreads its probability about evenly over 1,000 words. Which loss,
   to two decimals?
= {math.log(1000):.2f}
! -ln(1/1000) = ln 1000. Random logits of variance 1 would add 1/2.

? Smoothing 0.1, {len(WORDS)} classes: which probability is the right word to get?
= {1 - NUMBER_SMOOTHING + share:.4f}
! 0.9, and its own share of the 0.1 that is spread over all classes, the right one
among them.

? A model learns 16 pairs by heart, and its cross-attention is flat. What does that
   show?
   a) its masks are wrong
   b) the pairs can be told apart without looking at single words
   c) it will do well on new sentences
= b
! Memorising needs no alignment. Only new sources ask for it.

? After training, the loss with smoothing stays at 0.651 and all answers are right.
   What now?
   a) train longer
   b) raise the learning rate
   c) nothing: the smoothed loss cannot go lower
= c
! The floor is the entropy of the smoothed target; a model below it would be wrong
about it.
"""


def exercise() -> list[tuple]:
    """Return name, solution, inputs by case and usual mistakes of each function to write."""

    def solution(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return F.cross_entropy(logits, targets, label_smoothing=smoothing, ignore_index=PAD)

    def version(
        over: str = "all", pads: bool = False, mean: str = "rows", logs: Callable = F.log_softmax
    ) -> Callable:
        def loss(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
            classes = logits.size(-1)
            hot = F.one_hot(targets, classes)
            spread = {"all": smoothing / classes, "none": 0, "others": smoothing / (classes - 1)}
            wanted = (1 - smoothing) * hot + spread[over] * (1 - hot if over == "others" else 1)
            losses = -(wanted * logs(logits, dim=-1)).sum(dim=-1)
            losses = losses if pads else losses[targets != PAD]
            return losses.sum() / {"rows": len(losses), "sum": 1, "all": len(targets)}[mean]

        return loss

    def two_steps(logits: Tensor, dim: int) -> Tensor:
        return (logits.exp() / logits.exp().sum(dim=dim, keepdim=True)).log()

    torch.manual_seed(3)
    logits, targets = torch.randn(6, 8) * 2, torch.tensor([3, 5, 1, 7, 4, 2])
    some = torch.tensor([3, PAD, 1, PAD, 4, PAD])
    cases = {
        "no smoothing, no PAD": (logits, targets, 0.0),
        "smoothing 0.1": (logits, targets, 0.1),
        "half of the rows PAD": (logits, some, 0.1),
        "smoothing 0.5, 8 classes": (logits, some, 0.5),
        "one row": (logits[:1], targets[:1], 0.1),
        "logits of several hundred": (logits * 300, targets, 0.1),
    }
    mistakes = {
        "PAD rows count": version(pads=True),
        "the sum is divided by all rows, PAD among them": version(mean="all"),
        "it is the sum, not the mean": version(mean="sum"),
        "smoothing goes to the other classes only": version(over="others"),
        "smoothing is taken from the target and given to nobody": version(over="none"),
        "logits are taken for log probabilities": version(logs=lambda logits, dim: logits),
        "probabilities stand where their logarithms belong": version(logs=F.softmax),
        "exp overflows before the logarithm: use log_softmax": version(logs=two_steps),
    }
    return [("label_smoothed_loss", solution, cases, mistakes)]


FLAGS: dict[str, tuple] = {  # flags of this lesson alone: what each does instead, its options
    "--microscope": (
        microscope,
        dict(type=int, metavar="NUMBER", help="a tiny model reads 0 to 99, tensor by tensor"),
    ),
    "--experiment": (
        experiment,
        dict(choices=["init"], help="embeddings that start at size 1 (a minute or two)"),
    ),
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
