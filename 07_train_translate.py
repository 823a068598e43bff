# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "torch>=2.6,<3", "numpy>=1.26,<3", "tqdm>=4.66,<5", "tokenizers>=0.20,<1",
#   "matplotlib>=3.8,<4",
# ]
# ///
"""Lesson 7: train and translate.

Lesson 6 built the whole Transformer and taught it to read numbers. This one takes the
training loop apart, puts it together again, and trains a translator on 28 sentences.
When you have worked through it you can write such a loop from memory, save a model
and load it again, decode with and without caches, tell what a score on unseen
sentences means, and build a vocabulary of subwords by hand.

    python 07_train_translate.py               the lesson; --section 3 only a part
    python 07_train_translate.py --quiz        questions, with explanations
    python 07_train_translate.py --check FILE  the exercise, in a file of your own
    python 07_train_translate.py --epochs 20   train only, for so long, and save
    python 07_train_translate.py --infer       translate with the saved model

Exercise: write greedy_decode(next_logits, longest). next_logits is a function: it
takes the ids so far, a list that begins with bos (1), and returns the logits of the
next token. Take the best token each time, until it is eos (2) or `longest` tokens are
written. Return the written ids as a list, without bos and eos.

Source: Vaswani et al., "Attention Is All You Need" (2017), section 5; Sennrich et
al., "Neural Machine Translation of Rare Words with Subword Units" (2016).
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import copy
import functools
import inspect
import io
import itertools
import json
import math
import os
import re
import runpy
import sys
import textwrap
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

PAD, BOS, EOS = 0, 1, 2  # the same ids in every lesson
MAX_POSITIONS = 1024  # rows of the position table: no longer text enters the model

KeysValues = tuple[Tensor, Tensor]  # each (B, heads, S, d_k)
Attended = tuple[Tensor, Tensor]  # output (B, T, d_model) and weights (B, heads, T, S)
Mask = Tensor | None  # boolean, True means "may attend"; broadcasts to (B, heads, query, key)


# ---- The model, as lesson 6 built it ----
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


# ---- Sentences, vocabularies, batches ----
TOY = {
    "the cat sleeps": "le chat dort",
    "the dog sleeps": "le chien dort",
    "the girl sleeps": "la fille dort",
    "the cat eats": "le chat mange",
    "the girl eats a cake": "la fille mange un gâteau",
    "the boy eats an apple": "le garçon mange une pomme",
    "the girl reads a book": "la fille lit un livre",
    "the boy reads a letter": "le garçon lit une lettre",
    "the dog sees the cat": "le chien voit le chat",
    "the cat sees the mouse": "le chat voit la souris",
    "the boy sees the girl": "le garçon voit la fille",
    "the girl sees the dog": "la fille voit le chien",
    "he sees a bird": "il voit un oiseau",
    "he reads the book": "il lit le livre",
    "she reads the letter": "elle lit la lettre",
    "she eats the apple": "elle mange la pomme",
    "we see the house": "nous voyons la maison",
    "we read a book": "nous lisons un livre",
    "they eat a cake": "ils mangent un gâteau",
    "they see a dog": "ils voient un chien",
    "I see the boy": "je vois le garçon",
    "I read the letter": "je lis la lettre",
    "I eat an apple": "je mange une pomme",
    "the house is big": "la maison est grande",
    "the dog is big": "le chien est grand",
    "the cat is small": "le chat est petit",
    "the mouse is small": "la souris est petite",
    "where is the boy": "où est le garçon",
}
NEW = {  # never trained on, made of words that occur above
    "the dog eats": "le chien mange",
    "the boy sleeps": "le garçon dort",
    "the mouse sleeps": "la souris dort",
    "the cat sees the dog": "le chat voit le chien",
    "the girl reads the letter": "la fille lit la lettre",
    "he eats an apple": "il mange une pomme",
    "she sees a bird": "elle voit un oiseau",
    "we read the letter": "nous lisons la lettre",
    "they see the house": "ils voient la maison",
    "I see a bird": "je vois un oiseau",
    "the house is small": "la maison est petite",
    "where is the mouse": "où est la souris",
}


def number_words(words: Sequence[str]) -> dict[str, int]:
    """Return the id of each word; the first three ids are taken.

    >>> number_words(["cat", "dog"])
    {'<pad>': 0, '<bos>': 1, '<eos>': 2, 'cat': 3, 'dog': 4}
    """
    return {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", *words])}


def words_of(sentences: Sequence[str]) -> list[str]:
    """Return each word of the sentences once, in order."""
    return sorted({word for sentence in sentences for word in sentence.split()})


SRC_IDS, TGT_IDS = number_words(words_of(TOY)), number_words(words_of(TOY.values()))
TGT_WORDS = list(TGT_IDS)


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of ids as one tensor, the short ones filled up with PAD."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])


def toy_batch(pairs: dict[str, str]) -> tuple[Tensor, Tensor]:
    """Return source ids (B, S) and target ids (B, T), which end with eos."""
    src = [[SRC_IDS[word] for word in sentence.split()] for sentence in pairs]
    tgt = [[*(TGT_IDS[word] for word in text.split()), EOS] for text in pairs.values()]
    return padded(src), padded(tgt)


def shift_right(tgt: Tensor) -> Tensor:
    """Return the decoder input: bos, then the target without its last token."""
    return torch.cat([torch.full_like(tgt[:, :1], BOS), tgt[:, :-1]], dim=1)


def section_batches() -> None:
    """From sentences to a batch

    28 English sentences and their French translations. Each language has a vocabulary of
    its own words; ids 0, 1 and 2 are PAD, bos and eos as always. A batch is a tensor, and
    all rows of a tensor have one length: shorter sentences are filled up with PAD. The
    target ends with eos. The decoder reads it shifted right by one, as in lesson 5, but
    for one thing: here a short row may read its eos, which is simpler. What it predicts
    there is PAD, and does not count.
    """
    pairs = dict(list(TOY.items())[3:6])
    src, tgt = toy_batch(pairs)
    for name, ids in (("source", src), ("target", tgt), ("decoder input", shift_right(tgt))):
        table([name], *([row] for row in ids.tolist()))
    print(f"\n  {len(TOY)} pairs; {len(SRC_IDS)} English and {len(TGT_IDS)} French ids.\n")
    words = [" ".join(TGT_WORDS[i] for i in row if i > EOS) for row in tgt.tolist()]
    check("ids read back are the sentences", words == list(pairs.values()), words[0])
    known = {*words_of(NEW)} <= SRC_IDS.keys() and {*words_of(NEW.values())} <= TGT_IDS.keys()
    both = len(TOY.keys() & NEW.keys())
    evidence = f"{len(NEW)} sentences, {both} of them among the {len(TOY)}"
    check("unseen sentences are made of known words", known and both == 0, evidence)


# ---- One step of training, taken apart ----
def batch_loss(model: Transformer, src: Tensor, tgt: Tensor, smoothing: float) -> Tensor:
    """Return the cross-entropy summed over the real tokens of tgt (B, T), which ends with eos.

    The decoder reads bos and then the target, one place later than it predicts it. Only states at
    real tokens meet the output matrix: elsewhere the loss would be thrown away.
    """
    states = model.decode(shift_right(tgt), model.encode(src), src)
    real = tgt != PAD
    logits = model.output(states[real])  # (real tokens, vocabulary)
    return F.cross_entropy(logits.float(), tgt[real], label_smoothing=smoothing, reduction="sum")


def new_model() -> Transformer:
    """Return an untrained model for the toy."""
    return Transformer(len(SRC_IDS), len(TGT_IDS), 64, 4, 128, 2, dropout=0.1)


def section_step() -> None:
    """One step of training, taken apart

    Five things happen in a step. Forward: the model reads the batch and gives logits.
    Loss: the cross-entropy, minus the log of the probability given to each right word;
    PAD does not count. Backward: the gradient of the loss with respect to each parameter.
    Clipping: if all the gradients together, as one vector, are longer than 1, they are
    shortened to 1, so that no freak batch throws the model far. Update: the optimizer,
    here Adam, moves each parameter a little against its gradient.

    The loss is a sum over tokens, divided by the number of tokens. A mean of means of
    batches would give the words of small batches more weight than the others.
    """
    model = new_model().eval()  # no dropout, so that the two ways can be compared
    src, tgt = toy_batch(TOY)
    tokens = int((tgt != PAD).sum())
    loss = batch_loss(model, src, tgt, smoothing=0.0) / tokens
    with torch.no_grad():
        logs = model(src, shift_right(tgt)).log_softmax(dim=-1).numpy()
    right = [-logs[b, t, i] for (b, t), i in np.ndenumerate(tgt.numpy()) if i != PAD]
    print(f"  forward   logits {logs.shape}")
    print(f"  loss      {loss:.3f} for {tokens} tokens of {tgt.numel()} places; ln V is ", end="")
    print(f"{math.log(len(TGT_IDS)):.3f}")
    loss.backward()
    before = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    print(f"  backward  {gradients.numel():,} gradients, of length {before:.3f} together")
    print(f"  clipping  now of length {gradients.norm():.3f}")
    old = [p.detach().clone() for p in model.parameters()]
    torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9).step()
    moved = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), old, strict=True)])
    after = batch_loss(model, src, tgt, smoothing=0.0).item() / tokens
    print(f"  update    no parameter moves by more than {moved.abs().max():.1e}, the rate")
    print(f"            loss now {after:.3f}\n")
    check_close("the loss is the mean over tokens, by hand", loss.detach().double(), np.mean(right))
    evidence = f"{before:.3f}, then {gradients.norm():.3f}"
    check("the gradient is clipped", before > 1 >= gradients.norm() - 1e-5, evidence)
    check("one step lowers the loss", after < loss.item(), f"{loss:.3f}, then {after:.3f}")


# ---- The learning rate ----
def learning_rate(step: int, total: int, peak: float, warmup: int) -> float:
    """Return the rate of step 1 ... total: linear warm-up to `peak`, then a cosine down to 0.

    A pure function of the step: a resumed run goes on along the same curve.

    >>> [learning_rate(step, 100, 1.0, 10) for step in (1, 10, 55, 100)]
    [0.1, 1.0, 0.5, 0.0]
    """
    warmup = min(warmup, max(1, total // 5))
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def section_rate() -> None:
    """The learning rate: warm-up, then a cosine

    The learning rate says how far a step moves the parameters. Adam moves each one by a
    running mean of its gradients, divided by their running size, times the rate. The
    first steps are dangerous, since there is nothing yet to take a mean of; so the rate
    starts near 0 and rises. Later, large steps keep the model from settling; so the rate
    falls, along half a cosine, and is 0 at the end. (The paper's falls as 1/sqrt(step).)
    `learning_rate` computes it from the number of the step alone, not from the rate
    before: a resumed training goes on along the same curve.
    """
    steps = (1, 15, 30, 75, 165, 255, 300)
    rates = [learning_rate(step, 300, PEAK, WARMUP) for step in steps]
    bars = ["█" * round(30 * rate / PEAK) for rate in rates]
    table(["step", "rate", ""], *zip(steps, [f"{rate:.6f}" for rate in rates], bars, strict=True))
    print()
    every = [learning_rate(step, 300, PEAK, WARMUP) for step in range(1, 301)]
    top = every.index(max(every)) + 1
    check("it peaks where warm-up ends", top == WARMUP, f"step {top}, rate {max(every)}")
    check("it ends at 0", every[-1] < 1e-12, f"{every[-1]:.1e}")
    halfway = every[(WARMUP + 300) // 2 - 1]
    check("half-way down it is half", math.isclose(halfway, PEAK / 2), f"{halfway} at step 165")


# ---- The loop ----
EPOCHS, BATCH, PEAK, WARMUP, SMOOTHED = 150, 14, 3e-3, 30, 0.1


class Run(NamedTuple):
    """A trained model, and the loss of each epoch on seen and on unseen sentences."""

    model: Transformer
    seen: list[float]
    unseen: list[float]


def train_toy(epochs: int) -> Run:
    """Train a new model on the 28 sentences."""
    torch.set_num_threads(1)  # so small a model gains nothing from more
    run, (src, tgt), held_out = Run(new_model(), [], []), toy_batch(TOY), toy_batch(NEW)
    optimizer = torch.optim.Adam(run.model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    step, total = 0, epochs * math.ceil(len(src) / BATCH)
    for _ in tqdm(range(epochs), unit="epoch", leave=False, disable=None):
        run.model.train()
        losses, words = 0.0, 0
        for rows in torch.randperm(len(src)).split(BATCH):  # a new order in each epoch
            step += 1
            optimizer.param_groups[0]["lr"] = learning_rate(step, total, PEAK, WARMUP)
            loss, count = batch_loss(run.model, src[rows], tgt[rows], SMOOTHED), tgt[rows] != PAD
            optimizer.zero_grad()
            (loss / count.sum()).backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            optimizer.step()
            losses, words = losses + loss.item(), words + int(count.sum())
        run.seen.append(losses / words)
        run.model.eval()
        with torch.no_grad():
            loss = batch_loss(run.model, *held_out, SMOOTHED).item()
        run.unseen.append(loss / int((held_out[1] != PAD).sum()))
    return run


@torch.no_grad()
def greedy(
    model: Transformer, src: Tensor, longest: int = 12, cached: bool = True
) -> list[list[int]]:
    """Return the ids that the model writes for each source, the best next one each time.

    Without caches the decoder reads all that is written at each step, with them only the newest.
    """
    memory, tgt = model.encode(src), torch.full((len(src), 1), BOS)
    caches = model.new_caches(memory) if cached else ()
    while tgt.size(1) <= longest and not (tgt == EOS).any(dim=1).all():
        states = model.decode(tgt[:, -1:] if cached else tgt, memory, src, caches)
        logits = model.output(states[:, -1])
        tgt = torch.cat([tgt, logits.argmax(dim=-1, keepdim=True)], dim=1)
    rows = tgt[:, 1:].tolist()
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]


def translate(model: Transformer, sentences: Sequence[str], cached: bool = True) -> list[str]:
    """Translate sentences made of known words."""
    src = padded([[SRC_IDS[word] for word in sentence.split()] for sentence in sentences])
    model.eval()
    return [" ".join(TGT_WORDS[i] for i in row) for row in greedy(model, src, cached=cached)]


def correct(model: Transformer, pairs: dict[str, str]) -> int:
    """Count the sentences that are translated exactly right."""
    return sum(a == b for a, b in zip(translate(model, list(pairs)), pairs.values(), strict=True))


@functools.cache
def toy(seed: int) -> Run:
    """Return the model of this lesson, trained once for each seed."""
    torch.manual_seed(seed)
    return train_toy(EPOCHS)


def section_loop() -> None:
    """The loop put together

    An epoch is one pass over all sentences, in a new order and in batches of 14; a step
    is one batch. 150 epochs make 300 steps. After each epoch the loss is taken on
    sentences that are never trained on as well. The model has 2 + 2 layers of width 64.

    Watch the two columns part. The loss on the 28 nears the floor that label smoothing
    leaves (lesson 6), the loss on the others stays about twice as high: the model learns
    these sentences, and only a little French. (At first the 28 look worse: their loss is
    taken during the epoch, with dropout, that of the others after it.)
    """
    run = toy(torch.initial_seed())
    shown = [1, 5, 10, 20, 50, 100, EPOCHS]
    rows = ([e, f"{run.seen[e - 1]:.3f}", f"{run.unseen[e - 1]:.3f}"] for e in shown)
    table(["epoch", "loss on the 28", "on unseen ones"], *rows)
    print()
    some = list(TOY)[4:8]
    table(["English", "translated"], *zip(some, translate(run.model, some), strict=True))
    print()
    right = correct(run.model, TOY)
    check("all 28 come back exactly", right == len(TOY), f"{right} of {len(TOY)}")


def draw_losses(figure: Any) -> None:
    """Draw the loss on seen and unseen sentences, and the learning rate, over the epochs."""
    run = toy(torch.initial_seed())
    left, right = figure.subplots(1, 2)
    epochs = range(1, EPOCHS + 1)
    left.plot(epochs, run.seen, color="black", label="the 28")
    left.plot(epochs, run.unseen, "--", color="0.4", label="unseen ones")
    left.set(xlabel="epoch", title="loss, smoothed", ylim=(0, None))
    left.legend()
    steps = range(1, 2 * EPOCHS + 1)
    rates = [learning_rate(step, 2 * EPOCHS, PEAK, WARMUP) for step in steps]
    right.plot(steps, rates, color="black")
    right.set(xlabel="step", title="learning rate", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)


# ---- Saving ----
RUN = Path(__file__).resolve().parent / "runs" / "toy-en-fr"
CHECKPOINT = "toy_transformer.pth"


def save(model: Transformer, folder: Path) -> Path:
    """Save weights and vocabularies; the file is complete or not there at all."""
    folder.mkdir(parents=True, exist_ok=True)
    file, part = folder / CHECKPOINT, folder / f"{CHECKPOINT}.part"
    content = {"weights": model.state_dict(), "src": list(SRC_IDS), "tgt": TGT_WORDS}
    torch.save(content, part)
    part.replace(file)
    return file


def load(folder: Path) -> Transformer:
    """Return the model saved in a folder."""
    file, model = folder / CHECKPOINT, new_model()
    if not file.is_file():
        refuse(f"there is no model in {folder}; run this lesson without flags first.")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        if content["src"] != list(SRC_IDS) or content["tgt"] != TGT_WORDS:
            raise ValueError("its vocabularies are others")
        model.load_state_dict(content["weights"])
    except Exception as error:  # torch.load raises nearly anything on a damaged file
        reason = str(error).partition("\n")[0]
        refuse(f"{file} cannot be used ({reason}); run this lesson without flags again.")
    return model.eval()


def section_checkpoint() -> None:
    """A checkpoint that can be trusted

    state_dict() is a dictionary from the names of all parameters to their tensors. A file
    with it alone would be useless in a year: which word was id 17? So the vocabularies
    are saved beside the weights. It is written under another name first and renamed when
    it is complete: a crash in between leaves the old file. It is read with
    weights_only=True, which reads tensors and plain values and runs no code that a file
    may contain.
    """
    model = toy(torch.initial_seed()).model
    file = save(model, RUN)
    print(f"    {file.stat().st_size:,} bytes in {file.relative_to(RUN.parent.parent)}\n")
    again = load(RUN)
    both = zip(model.parameters(), again.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in both)
    check("the weights come back to the last bit", same, f"{len(model.state_dict())} tensors")
    sentences = [*TOY, *NEW]
    a, b = translate(model, sentences), translate(again, sentences)
    alike = sum(x == y for x, y in zip(a, b, strict=True))
    check("and so do all translations", alike == len(sentences), f"{alike} of {len(sentences)}")
    model.train()
    src = toy_batch(TOY)[0]
    noisy = (model.encode(src) - model.encode(src)).abs().max().item()
    model.eval()
    steady = (model.encode(src) - model.encode(src)).abs().max().item()
    evidence = f"two calls differ by {noisy:.2f} in training mode, by {steady} in eval mode"
    check("eval() belongs before every translation", noisy > 0 == steady, evidence)


# ---- Decoding ----
def section_decoding() -> None:
    """Greedy decoding, without and with caches

    The decoder begins with bos, gives logits for the next word, the best one is appended,
    and so on until eos. Greedy means: never think twice. Lesson 8 also keeps several
    beginnings at a time, which is called beam search.

    Without caches the whole beginning goes through the decoder at every step; for an
    answer of n words that is 1 + 2 + ... + n rows. With the caches of lesson 5 each step
    reads one row. The answers must be the same.
    """
    model = toy(torch.initial_seed()).model.eval()
    sentence = "the girl eats a cake"
    src = padded([[SRC_IDS[word] for word in sentence.split()]])
    with torch.no_grad():
        memory, tgt = model.encode(src), [BOS]
        caches, rows, gaps = model.new_caches(memory), [], []
        while tgt[-1] != EOS and len(tgt) < 12:
            whole, newest = torch.tensor([tgt]), torch.tensor([tgt[-1:]])
            plain = model.output(model.decode(whole, memory, src))[0, -1]
            cached = model.output(model.decode(newest, None, src, caches))[0, -1]
            gaps.append((plain - cached).abs().max())
            best = int(plain.argmax())
            share = plain.softmax(dim=-1)[best]
            written = " ".join(TGT_WORDS[i] for i in tgt)
            rows.append([written, TGT_WORDS[best], f"{share:.2f}", len(tgt), 1])
            tgt.append(best)
    print(f"    {sentence}\n")
    table(["written", "next", "probability", "rows without caches", "with"], *rows)
    print()
    gap = torch.stack(gaps).max().item()
    check("logits are the same with caches", gap < 1e-4, f"max difference {gap:.1e}")
    sentences = [*TOY, *NEW]
    answers = [translate(model, sentences, cached) for cached in (False, True)]
    same = sum(a == b for a, b in zip(*answers, strict=True))
    check("all translations, too", same == len(sentences), f"{same} of {len(sentences)}")
    alone = [translate(model, [sentence])[0] for sentence in sentences]
    same = sum(a == b for a, b in zip(alone, answers[1], strict=True))
    check("alone as in a batch", same == len(sentences), f"{same} of {len(sentences)}")


# ---- Honesty ----
def section_unseen() -> None:
    """Sentences never shown: what the score means

    28 of 28 says that the model can learn by heart. Whether it can translate is asked
    with sentences it was never shown. They are made of words it knows, and but for one
    ("mouse" in the last) these stand where it has seen them, so a person who had
    understood the 28 would get all of them right.

    A word is right if it stands at its place. What goes wrong has a pattern: an answer
    may be correct French for another sentence, one that was learnt by heart and looks
    much like the one asked for.
    """
    model = toy(torch.initial_seed()).model
    written = translate(model, list(NEW))
    rows = [
        [english, mine, "" if mine == french else french, "yes" if mine in TOY.values() else ""]
        for (english, french), mine in zip(NEW.items(), written, strict=True)
    ]
    table(["English", "translated", "would be right", "learnt"], *rows)
    right = correct(model, NEW)
    words = total = 0
    for mine, french in zip(written, NEW.values(), strict=True):
        total += len(french.split())
        words += sum(a == b for a, b in zip(mine.split(), french.split(), strict=False))
    print(f"\n  {right} of {len(NEW)} sentences and {words} of {total} words are right.")
    wrong = [mine for mine, french in zip(written, NEW.values(), strict=True) if mine != french]
    learnt = sum(mine in TOY.values() for mine in wrong)
    print(f"  Of {len(wrong)} wrong answers {learnt} are sentences learnt by heart.\n")
    chance = 1 / (len(TGT_IDS) - 3)
    evidence = f"{words / total:.0%} of the words, by chance {chance:.0%}"
    check("it has learnt more than chance", words / total > 5 * chance, evidence)
    seen = correct(model, TOY)
    gap = f"{right / len(NEW):.0%} of unseen sentences, {seen / len(TOY):.0%} of the 28"
    check("it does worse on unseen ones", right / len(NEW) < seen / len(TOY), gap)
    print("\n  28 sentences can be told apart by a word or two each, and that is what is learnt.")
    print("  What helps is more of them: lesson 8 has 133,317.")


# ---- Subwords ----
MERGES = 20


def merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    """Return the symbols of a word with each occurrence of a pair made one.

    >>> merge(list("banana"), ("a", "n"))
    ['b', 'an', 'an', 'a']
    """
    merged, i = [], 0
    while i < len(symbols):
        width = 2 if tuple(symbols[i : i + 2]) == pair else 1
        merged.append("".join(symbols[i : i + width]))
        i += width
    return merged


def learn_merges(counts: Counter[str]) -> list[tuple[tuple[str, str], int]]:
    """Return the pairs that byte-pair encoding joins, in order, each with its count.

    The most frequent pair of neighbours in all words is joined, again and again. Of several that
    are equally frequent the one whose symbols are older wins; letters come in their Unicode order.
    """
    age = {letter: i for i, letter in enumerate(sorted(set("".join(counts))))}
    spelled, steps = {word: list(word) for word in counts}, []
    for _ in range(MERGES):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in spelled.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] += counts[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], age[pair[0]], age[pair[1]]))
        steps.append((best, pairs[best]))
        age.setdefault("".join(best), len(age))
        spelled = {word: merge(symbols, best) for word, symbols in spelled.items()}
    return steps


def section_subwords() -> None:
    """Subwords: a vocabulary that has a place for every word

    A vocabulary of words has no id for a word it never saw: "petits" is unknown here,
    though "petit" is not. Letters have ids for everything, but make long sequences.
    Byte-pair encoding lies between: begin with letters, join (or merge) the most frequent
    pair of neighbours, count again, and so on. Frequent words become one piece, rare ones
    stay several, and no word is unknown as long as its letters are known.

    Here are the first 20 joins on the French side of the 28 sentences, all done by hand.
    The `tokenizers` library, which lesson 8 uses, must learn the same from the same text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    counts = Counter(word for text in TOY.values() for word in text.split())
    steps = learn_merges(counts)
    rows = [[i, " + ".join(pair), "".join(pair), n] for i, (pair, n) in enumerate(steps, 1)]
    half = MERGES // 2
    header = ["join", "pair", "piece", "count"]
    pairs_of_rows = zip(rows[:half], rows[half:], strict=True)
    table([*header, *header], *([*left, *right] for left, right in pairs_of_rows))
    print()
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    letters = len(set("".join(counts)))
    trainer = trainers.BpeTrainer(vocab_size=letters + MERGES, show_progress=False)
    library.train_from_iterator(TOY.values(), trainer)
    learnt = json.loads(library.to_str())["model"]["merges"]
    theirs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in learnt]
    same = sum(a == b for (a, _), b in zip(steps, theirs, strict=True))
    check("the library learns the same joins", same == MERGES, f"{same} of {MERGES}, in order")
    words = ["garçon", "lettre", "petits", "chatons", "maisonnette"]
    pieces = []
    for word in words:
        symbols = list(word)
        for pair, _ in steps:
            symbols = merge(symbols, pair)
        pieces.append(symbols)
    known = ["yes" if word in counts else "no" for word in words]
    print()
    table(["word", "known", "pieces"], *zip(words, known, map(" ".join, pieces), strict=True))
    print()
    same = sum(library.encode(w).tokens == p for w, p in zip(words, pieces, strict=True))
    check("the library splits words the same way", same == len(words), f"{same} of {len(words)}")
    print("\n  Lesson 8 does all this on 133,317 pairs, and makes a tool of it.")


# ---- Training and translating from the command line ----
def train_only(args: argparse.Namespace) -> int:
    """Train for --epochs, say what came of it, and save the model."""
    if not 1 <= args.epochs <= 100_000:
        refuse(f"--epochs takes a number from 1 to 100,000, not {args.epochs}.")
    torch.manual_seed(args.seed % 2**32)
    run = train_toy(args.epochs)
    print(f"loss {run.seen[-1]:.3f} on the 28, {run.unseen[-1]:.3f} on unseen sentences")
    print(f"exactly right: {correct(run.model, TOY)} of {len(TOY)}, ", end="")
    print(f"{correct(run.model, NEW)} of {len(NEW)} unseen; saved in {save(run.model, RUN)}")
    return 0


def prompt(args: argparse.Namespace) -> int:
    """Translate what is typed, or each line of a file: one line in, one line out."""
    model, talking = load(RUN), bool(sys.stdin) and sys.stdin.isatty()
    if talking:
        words = sorted(SRC_IDS.keys() - {"<pad>", "<bos>", "<eos>"})
        print(textwrap.fill("Known words: " + " ".join(words) + ". Ctrl-D ends.", 86))
    while True:
        try:
            words = input("EN> " if talking else "").split()
        except (EOFError, RuntimeError):  # the latter where there is no input at all
            return 0
        unknown = [word for word in words if word not in SRC_IDS]
        known = 0 < len(words) <= MAX_POSITIONS and not unknown
        if unknown:
            print(f"not among the known words: {' '.join(unknown)}", file=sys.stderr)
        elif len(words) > MAX_POSITIONS:
            print(f"longer than {MAX_POSITIONS} words: not translated", file=sys.stderr)
        answer = translate(model, [" ".join(words)])[0] if known else ""
        print(f"FR> {answer}" if talking else answer, flush=True)


# ---- Quiz and exercise ----
def quiz() -> str:
    """Return the questions: ? the text, = the answer, ! an explanation."""
    src, tgt = toy_batch(TOY)
    logits = new_model()(src[:14], shift_right(tgt[:14]))
    rows = sum(range(1, 6))
    return f"""
? A batch of 14 sentences; its decoder input is {tgt.size(1)} long, the French
   vocabulary has {len(TGT_IDS)} ids. What is the shape of the logits?
= {tuple(logits.shape)}
! For each place of each decoder input a score for every word: PAD places have
logits as well, they only do not count in the loss.

? 28 sentences, batches of 14, 150 epochs: how many steps?
= {150 * math.ceil(28 / 14)}
! Two batches an epoch, and one step a batch.

? Peak rate 0.003 after 30 steps of linear warm-up. What is the rate at step 10?
= {learning_rate(10, 300, 0.003, 30):.3f}
! A third of the way up: 0.003 × 10 / 30.

? The gradients of all parameters together have length 4, and are clipped to 1. By
   which factor is each gradient multiplied?
= {1 / 4:.2f}
! All by the same factor, 1 / 4, so that the direction stays.

? An answer of 4 words and eos is decoded without caches. How many rows go into the
   decoder in all?
= {rows}
! 1 + 2 + 3 + 4 + 5: at every step all that is written, bos included. With caches it
is 5.

? Two batches, of 10 and of 30 real tokens, have mean losses 4 and 2. Which loss per
   token do both have together?
= {(10 * 4 + 30 * 2) / 40:.1f}
! 10 × 4 + 30 × 2 = 100, for 40 tokens. The mean of the two means would be 3.

? The 28 training sentences are all translated exactly right. What does that show?
   a) the model has understood French
   b) 28 sentences are enough data
   c) the model can learn by heart, and the loop works
= c
! Only sentences it was never shown tell whether it can translate.

? Translations change from call to call, though the model is the same. What is
   forgotten?
   a) eval(): dropout is still on
   b) the causal mask
   c) the caches must be saved in the checkpoint
= a
! In training mode each call drops other activations.
"""


def exercise() -> list[tuple]:
    """Return name, solution, inputs by case and usual mistakes of each function to write."""

    def version(
        keep_eos: bool = False,
        keep_bos: bool = False,
        stop: bool = True,
        extra: int = 0,
        best: Callable = np.argmax,
        feed: slice = slice(None),
    ) -> Callable:
        def decode(next_logits: Callable, longest: int) -> list[int]:
            ids = [BOS]
            for _ in range(longest + extra):
                ids.append(int(best(np.asarray(next_logits(ids[feed])))))
                if ids[-1] == EOS and stop:
                    break
            end = [] if keep_eos or ids[-1] != EOS else [EOS]
            return ids[0 if keep_bos else 1 : len(ids) - len(end)]

        return decode

    class Chain:
        """Logits that lead along a sentence; any beginning but its own leads astray."""

        def __init__(self, *sentence: int) -> None:
            self.sentence = [BOS, *sentence, EOS]

        def __call__(self, ids: Sequence[int]) -> Tensor:
            ids, logits = list(ids), torch.linspace(0, 0.5, 10)
            known = ids == self.sentence[: len(ids)] and len(ids) < len(self.sentence)
            logits[self.sentence[len(ids)] if known else 9] = 2.0
            logits[3 if known else 4] -= 1.0
            return logits

    cases = {
        "three words": (Chain(5, 7, 6), 10),
        "one word": (Chain(8), 10),
        "nothing at all: eos comes first": (Chain(), 10),
        "a word twice": (Chain(5, 5, 6, 5), 10),
        "a sentence that is cut off": (Chain(5, 6, 7, 8, 5, 6), 4),
        "a sentence just as long as allowed": (Chain(5, 6, 7), 3),
    }
    mistakes = {
        "eos is among the written ids": version(keep_eos=True),
        "bos is among the written ids": version(keep_bos=True),
        "it goes on after eos": version(stop=False),
        "one token too many is written before it stops": version(extra=1),
        "one token too few is written before it stops": version(extra=-1),
        "the worst token is taken, not the best": version(best=np.argmin),
        "only the newest token is handed to next_logits": version(feed=slice(-1, None)),
        "only bos is handed to next_logits": version(feed=slice(0, 1)),
    }
    return [("greedy_decode", version(), cases, mistakes)]


FLAGS: dict[str, tuple] = {  # flags of this lesson alone: what each does instead, its options
    "--epochs": (train_only, dict(type=int, metavar="N", help="train only, N epochs, and save")),
    "--infer": (
        prompt,
        dict(action="store_true", default=None, help="translate: prompt or filter"),
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
