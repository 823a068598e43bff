# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6,<3", "numpy>=1.26,<3", "matplotlib>=3.8,<4"]
# ///
"""Lesson 2: embeddings and positions.

Lesson 1 drew the plan. Its first boxes turn a sentence into something a network can
compute with: every word becomes a vector, and every vector is told its place. When
you have worked through this lesson you can say why word numbers themselves will not
do, why a look-up is a matrix product, where the two factors sqrt(d_model) come from,
and how sines and cosines tell a position.

    python 02_embeddings.py               the lesson; --section 3 only a part
    python 02_embeddings.py --quiz        questions, with explanations
    python 02_embeddings.py --check FILE  the exercise, in a file of your own

Exercise: write positional_encoding(length, d_model) for an even d_model. Return a
tensor or array of shape (length, d_model): row p is the encoding of position p,
counted from 0; column 2i is sin(p / 10000^(2i/d_model)), column 2i+1 the cosine of
the same angle.

Source: Vaswani et al., "Attention Is All You Need" (2017), sections 3.4 and 3.5.
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


# ---- Ids ----
def number_words(words: Sequence[str]) -> dict[str, int]:
    """Return the id of each word; the first three ids are taken.

    >>> number_words(["cat", "dog"])
    {'<pad>': 0, '<bos>': 1, '<eos>': 2, 'cat': 3, 'dog': 4}
    """
    return {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", *words])}


def section_ids() -> None:
    """Ids are names, not amounts

    A vocabulary gives every word a number, its id. Three ids are taken in every lesson:
    PAD 0 fills up short sentences, bos 1 begins a sentence, eos 2 ends it. Which number a
    word gets is chance; here once by the alphabet and once by the length of the word.

    A network that computed with ids would take chance for meaning: "cat" would have other
    neighbours under another numbering. So each word gets a vector of d_model numbers, its
    embedding, which training is free to move. The vectors are the rows of one table.
    Number the words anew, move the rows along, and nothing changes.
    """
    words = ["ant", "bird", "cat", "house", "king", "of", "the"]
    first, second = number_words(words), number_words(sorted(words, key=len))
    closest = []
    for ids in (first, second):
        others = [word for word in words if word != "cat"]
        closest.append({w for w in others if abs(ids[w] - ids["cat"]) == 1})
    rows = [[first[word] for word in words], [second[word] for word in words]]
    table(["word", *words], ["by alphabet", *rows[0]], ["by length", *rows[1]])
    print()
    evidence = " and ".join(str(sorted(names)) for names in closest)
    check("the ids next to cat's belong to other words", closest[0] != closest[1], evidence)
    vectors = torch.randn(len(first), 4)  # a row for each id of the first numbering
    moved = torch.empty_like(vectors)
    for word, i in first.items():
        moved[second[word]] = vectors[i]
    old, new = (torch.tensor([ids[w] for w in words]) for ids in (first, second))
    same = torch.equal(vectors[old], moved[new])
    check("every word keeps its vector", same, f"{vectors[old].numel()} numbers, all equal")


# ---- Look-up ----
def section_look_up() -> None:
    """A look-up is a matrix product that skips the zeros

    Write an id as a one-hot vector: all zeros, but a 1 at the place of the id. A row of
    zeros and one 1, times the table W, is one row of W. A layer of a network is a matrix
    product, so the embedding is an ordinary layer; only nobody multiplies by zeros.

    The same holds for learning. The loss is a number that says how wrong a model is; its
    gradient with respect to W says for every entry of W how much the loss grows when the
    entry grows a little; backward() computes it, and training takes a small step against
    it. For a look-up the gradient is nonzero only in the rows of words that occur, and a
    word that occurs twice gets the sum of both.
    """
    ids = torch.tensor([3, 1, 3])
    weight = torch.randn(5, 4, requires_grad=True)
    one_hot = F.one_hot(ids, num_classes=5).float()
    looked_up, product = weight[ids], one_hot @ weight
    columns = ids.tolist(), one_hot.int().tolist(), rounded(looked_up)
    table(["id", "one-hot", "row of W"], *zip(*columns, strict=True))
    print()
    check_close("look-up = one-hot × matrix", looked_up, product, tolerance=0)
    loss_gradient = torch.randn(3, 4)  # what the rest of a network might hand back
    gradients = []
    for vectors in (looked_up, product):
        weight.grad = None
        vectors.backward(loss_gradient)
        gradients.append(weight.grad)
    print()
    table(["row of W", "its gradient"], *zip(range(5), rounded(gradients[0]), strict=True))
    print()
    check_close("the same gradient both ways", gradients[0], gradients[1])
    by_hand = np.zeros((5, 4), dtype=np.float32)
    np.add.at(by_hand, ids.numpy(), loss_gradient.numpy())  # row by row, repeated ids add up
    check_close("and the same as NumPy's, added up by hand", gradients[0], by_hand)
    print("\n  With 37,000 words and d_model 512 the look-up copies 512 numbers a word, and the")
    print(f"  product takes {37_000 * 512:,} multiplications.")


def rounded(rows: Tensor) -> list[str]:
    """Return each row as text with two decimals."""
    return ["[" + " ".join(f"{x:5.2f}" for x in row) + "]" for row in rows.tolist()]


# ---- The size of an embedding ----
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


def section_scale() -> None:
    """Why the table starts small, and its rows are multiplied by sqrt(d_model)

    TokenEmbedding is our first module: a class derived from nn.Module, whose __init__
    makes its parameters, the numbers to be learnt, and whose forward says what it
    computes. The call embedding(ids) runs forward. Shapes are written (B, S, d_model): B
    sentences, S tokens each, d_model numbers a token.

    The table has two jobs. Its rows enter the model as vectors, and there their entries
    should have variance 1, the size that all later layers expect. At the other end the
    same rows are the output matrix (tied weights, as in the paper): the score of a word
    is the dot product of its row with a state, the vector that the last layer gives for a
    place, of d_model entries of variance 1. A sum of d_model products has variance 1 only
    if the entries of the row have variance 1/d_model. So the table starts with standard
    deviation 1/sqrt(d_model), and on the way in it is multiplied by sqrt(d_model).
    """
    rows = []
    for d_model in (64, 256, 1024):
        embedding = TokenEmbedding(2000, d_model)
        weight, state = embedding.table.weight, torch.randn(200, d_model)
        ids = torch.randint(3, 2000, (8, 50))
        large = torch.randn(2000, d_model)
        sizes = (weight, embedding(ids), state @ weight.T, state @ large.T)
        rows.append([d_model, *(size.var().item() for size in sizes)])
    header = ["d_model", "in the table", "× sqrt(d_model)", "score", "score, table at size 1"]
    table(header, *([d, *(f"{v:.4f}" for v in variances)] for d, *variances in rows))
    print("    (the variance of each, measured)\n")
    scaled, scores = [row[2] for row in rows], [row[3] for row in rows]
    for name, values in (("vectors", scaled), ("scores", scores)):
        off = max(abs(value - 1) for value in values)
        check(f"{name} have variance 1 at every width", off < 0.1, f"at most {off:.1%} off")
    off = max(abs(row[4] / row[0] - 1) for row in rows)
    check("from a table at size 1 they have d_model", off < 0.1, f"at most {off:.1%} off")


# ---- Order ----
def mix(x: Tensor) -> Tensor:
    """Return for each row of x (S, d) a mixture of all rows: the more alike, the more weight."""
    return (x @ x.T / math.sqrt(x.size(-1))).softmax(dim=-1) @ x


def section_order() -> None:
    """Attention is blind to order

    Attention, which lesson 3 takes apart, replaces every vector by a mixture of all the
    vectors: how much of each is decided by dot products, and nowhere does it matter who
    stands where. `mix` in this file is that in one line; softmax turns a row of numbers
    into positive weights that add up to 1. So "dog bites man" and "man bites dog" are the
    same to it: shuffle the input, and the output is shuffled the same way, nothing else.

    What tells the order must therefore be in the vectors. The simplest way is to add to
    each a second vector that depends on the position alone.
    """
    words, order = ["dog", "bites", "man"], [2, 1, 0]
    x, places = torch.randn(3, 64), torch.randn(3, 64)
    plain, swapped = mix(x), mix(x[order])
    table(
        ["", *words],
        ["dog bites man", *rounded(plain[:, :2])],
        ["man bites dog", *rounded(swapped[order][:, :2])],
    )
    print("    (the first two numbers that each word gets)\n")
    check_close("shuffled in, shuffled out, otherwise unchanged", swapped, plain[order])
    told = (mix(x[order] + places) - mix(x + places)[order]).abs().max().item()
    check("with a vector for each place added, order counts", told > 0.1, f"up to {told:.2f} apart")


# ---- Positions ----
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


def section_clocks() -> None:
    """A position is read off the hands of d_model / 2 clocks

    Columns 2i and 2i+1 of the encoding are the sine and the cosine of one angle: a hand
    of length 1 on a clock, which turns at a rate of its own. The first hand turns by one
    radian (57 degrees) a position; the others ever slower, like minute, hour and day. The
    rates are 10000^(-2i/d_model): i counts the pairs, and 2i is the column. Neighbours
    differ in the fast hands, positions far apart in the slow ones as well.

    The table is a buffer: it belongs to the module, but is not learnt. forward adds the
    rows of the positions at hand, and then applies dropout, which lesson 4 explains.
    """
    d_model = 8
    encoding = PositionalEncoding(d_model, max_len=50, dropout=0.0).table
    hands = encoding.view(50, 4, 2)  # position, hand, (sine, cosine)
    degrees = torch.atan2(hands[..., 0], hands[..., 1]).rad2deg() % 360
    rows = ([p, *(f"{turn:.1f}" for turn in degrees[p])] for p in range(7))
    table(["position", "hand 0", "hand 1", "hand 2", "hand 3"], *rows)
    print("    (d_model 8, in degrees)\n")
    turns = " / ".join(f"{2 * math.pi * 10000 ** (2 * i / 512):,.0f}" for i in (0, 128, 255))
    print(f"  At d_model 512 hands 0 / 128 / 255 come round after {turns} positions.\n")
    by_hand, misread = np.empty((50, d_model)), np.empty((50, d_model))
    for p in range(50):
        for i in range(d_model // 2):
            for array, exponent in ((by_hand, 2 * i / d_model), (misread, i / d_model)):
                angle = p / 10000**exponent
                array[p, 2 * i], array[p, 2 * i + 1] = math.sin(angle), math.cos(angle)
    check_close("all 400 entries are those of the formula", encoding.double(), by_hand)
    check_close("every hand has length 1", hands.norm(dim=-1), torch.ones(50, 4))
    gap = np.abs(misread - by_hand).max(axis=0)
    wrong = f"with that, columns 2 to 7 are each wrong by {gap[2:].min():.2f} or more somewhere"
    check("the exponent is 2i/d_model, not i/d_model", gap[2:].min() > 0.5 and gap[1] == 0, wrong)
    for what, length in (("an odd d_model", 0), ("too long an input", 51)):
        try:
            PositionalEncoding(d_model if length else 7, 50, 0.0)(torch.zeros(1, length, d_model))
        except ValueError as error:
            print(f"  refused: {what}. {error}")


# ---- Distance ----
def similarity(starts: Sequence[int], distances: Sequence[int], d_model: int = 64) -> Tensor:
    """Return PE(p) . PE(p + k) for each start p (rows) and distance k (columns)."""
    encoding = PositionalEncoding(d_model, max_len=1024, dropout=0.0).table
    return torch.stack([encoding[[p + k for k in distances]] @ encoding[p] for p in starts])


def section_distance() -> None:
    """The dot product of two positions depends only on their distance

    Two hands of length 1 have as dot product the cosine of the angle between them.
    Between position p and position p + k, hand i turns by k times its rate, wherever it
    starts. So PE(p) . PE(p + k) is the sum of cos(k rate_i) over all hands, without p.
    Attention works with dot products, so "three words away" can look the same to it all
    over a sentence.

    Before or after, the dot product cannot tell: the cosine is the same. But PE(p + k) is
    PE(p) with hand i turned by k times its rate, which is one matrix for every p. Attention
    puts such matrices, which are learnt, in front of its dot products.
    """
    starts, distances = (0, 17, 400), (0, 1, 2, 4, 8, 16, 64)
    products = similarity(starts, distances)
    rates = 10000 ** (-2 * np.arange(32) / 64)
    formula = np.cos(np.array(distances)[:, None] * rates).sum(axis=1)
    columns = (distances, *([f"{x:.3f}" for x in row] for row in (*products, formula)))
    table(["k", *(f"from p = {p}" for p in starts), "formula"], *zip(*columns, strict=True))
    print()
    spread = (products.amax(dim=0) - products.amin(dim=0)).max().item()
    check("three starting points, one similarity", spread < 1e-3, f"at most {spread:.1e} apart")
    check_close("it is the sum of the cosines", products[0].double(), formula, tolerance=1e-3)
    nearest = products.argmax(dim=1).tolist()
    check("nothing is more similar than the same place", nearest == [0] * 3, "k = 0 for all three")
    turn, encoding = torch.zeros(64, 64), PositionalEncoding(64, 100, 0.0).table
    for i, angle in enumerate(3 * rates):
        sine, cosine = math.sin(angle), math.cos(angle)
        turn[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[cosine, -sine], [sine, cosine]])
    check_close("one matrix moves all positions by 3", encoding[:97] @ turn, encoding[3:], 1e-4)


def draw_positional_encoding(figure: Any) -> None:
    """Draw the encoding as an image: positions downwards, dimensions to the right."""
    axes = figure.subplots()
    values = PositionalEncoding(128, max_len=100, dropout=0.0).table.numpy()
    image = axes.imshow(values, cmap="cividis", aspect="auto", interpolation="nearest")
    axes.set(xlabel="dimension", ylabel="position", title="Positional encoding, d_model = 128")
    figure.colorbar(image, label="value")


def draw_similarity(figure: Any) -> None:
    """Draw the similarity of two positions against their distance, from three starts."""
    axes, distances, starts = figure.subplots(), range(101), (0, 17, 400)
    lines = zip(similarity(starts, distances), starts, ("-", "--", ":"), (5, 3, 1.5), strict=True)
    for (products, p, style, width), grey in zip(lines, ("0.75", "0.4", "black"), strict=True):
        axes.plot(distances, products.numpy(), style, color=grey, lw=width, label=f"from p = {p}")
    axes.set(xlabel="distance k", ylabel="PE(p) . PE(p + k)", title="Similarity, d_model = 64")
    axes.grid(alpha=0.3)
    axes.legend()


# ---- Word and position ----
def section_together() -> None:
    """Word plus position

    The input of the model is the sum of both. Each of the d_model / 2 hands has length 1,
    so a position is a vector of length sqrt(d_model / 2). A word of the bare table has
    length 1, and would drown in it; multiplied by sqrt(d_model) it has length
    sqrt(d_model), and is the louder of the two. That is the last reason for the factor.
    """
    d_model, ids = 512, torch.tensor([[4, 7, 4, EOS], [9, EOS, PAD, PAD]])
    embedding = TokenEmbedding(100, d_model)
    position = PositionalEncoding(d_model, max_len=50, dropout=0.0)
    x = position(embedding(ids))
    table(
        ["step", "shape"],
        ["ids", tuple(ids.shape)],
        ["embedding", tuple(embedding(ids).shape)],
        ["with positions", tuple(x.shape)],
    )
    bare, word = embedding.table(ids).norm(dim=-1).mean(), embedding(ids).norm(dim=-1).mean()
    place = position.table[:4].norm(dim=-1).mean()
    print(f"    length: position {place:.2f}, row of the table {bare:.2f}, word {word:.2f}\n")
    evidence = f"word / position: {bare / place:.2f} before, {word / place:.2f} after"
    check("the factor makes the word louder than its position", bare < place < word, evidence)
    apart = (x[0, 0] - x[0, 2]).norm().item()
    check("the same word at two places is two vectors", apart > 1, f"{apart:.1f} apart")
    alone = position(embedding(ids[1:]))
    check_close("the rest of the batch does not matter", x[1:], alone)
    print("\n  Every vector knows its word and its place, and nothing of its neighbours. Lesson 3")
    print("  lets them look at each other.")


# ---- Quiz and exercise ----
def quiz() -> str:
    """Return the questions: ? the text, = the answer, ! an explanation."""
    embedding = TokenEmbedding(1000, 64)
    output = embedding(torch.zeros(32, 7, dtype=torch.long))
    parameters = sum(p.numel() for p in embedding.parameters())
    distance = similarity([0], [0], d_model=512)[0, 0]
    return f"""
? 32 sentences of 7 tokens go through TokenEmbedding(1000, 64). Which shape comes
   out?
= {tuple(output.shape)}
! Each id becomes a vector: (B, S) -> (B, S, d_model). The vocabulary's size does
not show.

? A batch of 8 sentences with 10 tokens each, vocabulary 1,000: what is the shape of
   its one-hot vectors?
= {tuple(F.one_hot(torch.zeros(8, 10, dtype=torch.long), 1000).shape)}
! Every id becomes as many numbers as the vocabulary has words, all but one of them
0.

? How many parameters does TokenEmbedding(1000, 64) have?
= {parameters}
! One row of 64 numbers for each of 1,000 words. The factor sqrt(d_model) is not
learnt.

? How many parameters does PositionalEncoding(512, 1024, 0.1) have?
= {sum(p.numel() for p in PositionalEncoding(512, 1024, 0.1).parameters())}
! The sinusoids are computed once and kept in a buffer; nothing about them is
learnt.

? d_model 512: what is PE(p) . PE(p), the dot product of a position with itself?
= {distance:.0f}
! 512 / 2 hands of length 1: each gives sin² + cos² = 1, and that at every position.

? The table starts as N(0, 1/d_model), d_model = 256. What is the variance of an
   entry of embedding(ids)?
= {math.sqrt(256) ** 2 / 256:.0f}
! A factor of sqrt(256) = 16 multiplies the variance by 256, and 256 × 1/256 = 1.

? A training batch contains the word "cat" twice and "dog" never. Which rows of the
   table get a gradient, if the table is used for look-up only?
   a) all rows
   b) cat's, the sum of both places; dog's gets none
   c) cat's, the mean of both places; dog's gets none
= b
! The product with one-hot vectors multiplies other rows by 0, and sums what
remains.

? Attention without positions reads "man bites dog" instead of "dog bites man". Then
   a) every word gets the same vector as before, at its new place
   b) every place gets the same vector as before
   c) all vectors change
= a
! Each word mixes the same three vectors with the same weights; only the rows are
swapped.
"""


def exercise() -> list[tuple]:
    """Return name, solution, inputs by case and usual mistakes of each function to write."""

    def version(
        power: float = 2, first: int = 0, up: int = -1, halves: bool = False, order: int = 1
    ) -> Callable:
        def encode(length: int, d_model: int) -> np.ndarray:
            pairs, places = np.arange(d_model // 2), np.arange(first, first + length)
            angle = places[:, None] * 10000.0 ** (up * power * pairs / d_model)
            waves = [np.sin(angle), np.cos(angle)][::order]
            return np.hstack(waves) if halves else np.stack(waves, axis=2).reshape(length, -1)

        return encode

    def every_column(power: float) -> Callable:
        def encode(length: int, d_model: int) -> np.ndarray:
            columns = np.arange(d_model)
            angle = np.arange(length)[:, None] / 10000 ** (power * columns / d_model)
            return np.where(columns % 2, np.cos(angle), np.sin(angle))

        return encode

    def solution(length: int, d_model: int) -> Tensor:
        return PositionalEncoding(d_model, length, dropout=0.0).table

    sizes = ((1, 2), (2, 4), (4, 4), (10, 8), (50, 64), (7, 6))
    cases = {f"length {length}, d_model {d}": (length, d) for length, d in sizes}
    mistakes = {
        "sine and cosine are swapped: the sine comes first": version(order=-1),
        "all sines come first, then all cosines: they alternate": version(halves=True),
        "the exponent is i/d_model with i counting pairs: it is 2i": version(power=1),
        "every column has a rate of its own: sine and cosine share one": every_column(1),
        "i counts columns: it counts pairs, and 2i is the column": every_column(2),
        "positions are counted from 1": version(first=1),
        "the angle is multiplied by 10000^(2i/d_model), not divided": version(up=1),
        "rows and columns are swapped": lambda length, d_model: solution(length, d_model).T,
    }
    return [("positional_encoding", solution, cases, mistakes)]


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
