"""How fast lesson 8 trains, beside other people's code for the same model on the same machine.

    python benchmarks/train_step.py                     random ids in sentences as long as IWSLT's
    python benchmarks/train_step.py --data data         the corpus that lesson 8 reads
    python benchmarks/train_step.py --precision fp32    lesson 8 as without bf16
    python benchmarks/train_step.py --data data --prepare   reading and BPE as a share of an epoch
    python benchmarks/train_step.py --data data --memory    peak memory of a training run

The model is lesson 8's preset laptop: 4+4 layers, d_model 256, 8 heads, d_ff 1024, dropout 0.1 and
two vocabularies of 8,000. A step is forward, backward, clipping and Adam. It is timed twice: on the
same batches for all, made before the clock starts, and end to end, where each makes its own batches
while the clock runs. Tokens are real target tokens: padding costs time and counts nothing.

Each contestant lives in a process of its own. They take turns, round by round, and a ratio compares
speeds within a round: what slows the machine down for minutes slows all of them. Nothing else
should run meanwhile. Transformers and JoeyNMT take part where they are installed. All seven rows
need about 16 GB of memory; with --only it is less.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import logging
import multiprocessing
import platform
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
lesson8 = importlib.import_module("08_iwslt_vi_en")

PAD, BOS, EOS = lesson8.PAD, lesson8.BOS, lesson8.EOS
LANGUAGES = ("en", "vi")
WARM_UP = 3  # steps of each contestant and mode before the first round
JOEY_TOKENS = 4096  # JoeyNMT's batch size: tokens with padding, of which more than half is
MODES = {"same": "The same batches for all", "own": "End to end, each with the batches it makes"}

Batch = tuple[Sequence[int], Any]  # the pairs in it, and the form that its contestant takes


class Row(NamedTuple):
    """What stands at the start of a line of the table."""

    name: str
    dtype: str
    package: str  # that must be installed
    about: str  # how its model differs from lesson 8's


ROWS = {
    "lesson8-auto": Row("lesson 8", "auto", "torch", "what all others are compared with"),
    "lesson8-fp32": Row("lesson 8", "fp32", "torch", "the same"),
    "torch-fp32": Row("nn.Transformer loop", "fp32", "torch", "the same weights in other tensors"),
    "torch-bf16": Row("nn.Transformer loop", "bf16", "torch", "the same weights in other tensors"),
    "marian-fp32": Row("HF MarianMTModel", "fp32", "transformers", "post-norm, it has no other"),
    "marian-bf16": Row("HF MarianMTModel", "bf16", "transformers", "post-norm, it has no other"),
    "joeynmt-fp32": Row("JoeyNMT", "fp32", "joeynmt", "an <unk> in each vocabulary"),
}


# ---- Data ----
class Corpus(NamedTuple):
    """Encoded pairs as flat arrays: another process receives two of them faster than 266,634."""

    ids: list[np.ndarray]  # all subword ids of the source, and of the target
    lengths: list[np.ndarray]  # of the sentences, eos included
    vocab_sizes: list[int]

    def sides(self) -> list[list[np.ndarray]]:
        """Return lesson 8's form: a list of source rows and one of target rows."""
        sides = zip(self.ids, self.lengths, strict=True)
        return [np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in sides]


def pack_corpus(sides: list[list[np.ndarray]], vocab_sizes: list[int]) -> Corpus:
    """Return lesson 8's rows as a Corpus."""
    lengths = [np.array([len(row) for row in rows]) for rows in sides]
    return Corpus([np.concatenate(rows) for rows in sides], lengths, vocab_sizes)


def read_corpus(data: Path, vocab_size: int) -> Corpus:
    """Return the training pairs of a folder, read and encoded by lesson 8's own functions."""
    pairs = lesson8.load_pairs(data, "train", LANGUAGES)
    tokenizers = [lesson8.train_bpe((pair[i] for pair in pairs), vocab_size) for i in (0, 1)]
    sides, report = lesson8.encode_pairs(pairs, tokenizers, "train")
    print(textwrap.fill(report, 100))
    return pack_corpus(sides, [tokenizer.get_vocab_size() for tokenizer in tokenizers])


def make_corpus(vocab_size: int, seed: int, pairs: int = 130_000) -> Corpus:
    """Return random ids in sentences like IWSLT's: lognormal lengths, both sides much alike."""
    rng = np.random.default_rng(seed)
    common = rng.normal(2.85, 0.62, pairs)
    lengths, ids = [], []
    for longer in (0.0, 0.1):
        side = np.exp(common + longer + rng.normal(0, 0.12, pairs))
        lengths.append(np.clip(side.astype(int), 1, lesson8.MAX_LEN) + 1)
        ids.append(rng.integers(EOS + 1, vocab_size, lengths[-1].sum(), dtype=np.int32))
        ids[-1][np.cumsum(lengths[-1]) - 1] = EOS
    return Corpus(ids, lengths, [vocab_size, vocab_size])


# ---- The contestants ----
class Contestant(Protocol):
    """A way to train the model."""

    model: nn.Module

    def pack(self, indices: Sequence[int]) -> Any:
        """Return the batch of these pairs in the form that `step` takes."""

    def own_batches(self) -> Iterator[Batch]:
        """Make batches as this contestant does it by itself, without end."""

    def step(self, packed: Any) -> None:
        """Do one whole step of training."""


class Lesson8:
    """Lesson 8's Trainer, as it is."""

    def __init__(self, corpus: Corpus, config: lesson8.Config) -> None:
        sizes = corpus.vocab_sizes
        tokenizers = [SimpleNamespace(get_vocab_size=lambda size=size: size) for size in sizes]
        prepared = lesson8.Prepared(tokenizers, corpus.sides(), [[], []], [], "")
        self.trainer = lesson8.Trainer(config, prepared, torch.device("cpu"), Path())
        self.trainer.total = config.epochs * self.trainer.steps_per_epoch
        self.model = self.trainer.model

    def pack(self, indices: Sequence[int]) -> list[Sequence[int]]:
        return [indices]

    def own_batches(self) -> Iterator[Batch]:
        for epoch in itertools.count(1):
            for group in self.trainer.groups(epoch):
                yield group[0], group

    def step(self, packed: list[Sequence[int]]) -> None:
        self.trainer.update(packed)


class TorchModel(nn.Module):
    """`torch.nn.Transformer` with what it lacks: embeddings, positions, output matrix."""

    def __init__(self, config: lesson8.Config, vocab_sizes: Sequence[int], dropout: float) -> None:
        super().__init__()
        width = config.d_model
        self.src_embedding, self.tgt_embedding = (
            lesson8.TokenEmbedding(size, width) for size in vocab_sizes
        )
        self.position = lesson8.PositionalEncoding(width, lesson8.MAX_POSITIONS, dropout)
        self.transformer = nn.Transformer(
            width,
            config.n_heads,
            config.n_layers,
            config.n_layers,
            config.d_ff,
            dropout,
            batch_first=True,
            norm_first=config.norm_first,
        )
        self.output = nn.Linear(width, vocab_sizes[1], bias=False)
        self.output.weight = self.tgt_embedding.table.weight

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        later = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool).triu(1)
        states = self.transformer(
            self.position(self.src_embedding(src)),
            self.position(self.tgt_embedding(tgt)),
            tgt_mask=later,
            src_key_padding_mask=src == PAD,
            tgt_key_padding_mask=tgt == PAD,
            memory_key_padding_mask=src == PAD,
        )
        return self.output(states)


class MarianModel(nn.Module):
    """`MarianMTModel` from Hugging Face's Transformers, built from its configuration."""

    def __init__(self, config: lesson8.Config, vocab_sizes: Sequence[int]) -> None:
        from transformers import MarianConfig, MarianMTModel

        super().__init__()
        sides = ("encoder", "decoder")
        sizes = {f"{side}_layers": config.n_layers for side in sides}
        sizes |= {f"{side}_attention_heads": config.n_heads for side in sides}
        sizes |= {f"{side}_ffn_dim": config.d_ff for side in sides}
        rates = ("dropout", "attention_dropout", "activation_dropout")
        special = dict(pad_token_id=PAD, decoder_start_token_id=BOS, bos_token_id=BOS)
        self.marian = MarianMTModel(
            MarianConfig(
                vocab_size=vocab_sizes[0],
                decoder_vocab_size=vocab_sizes[1],
                d_model=config.d_model,
                activation_function="relu",
                scale_embedding=True,
                share_encoder_decoder_embeddings=False,
                eos_token_id=EOS,
                forced_eos_token_id=EOS,
                **sizes,
                **special,
                **dict.fromkeys(rates, config.dropout),
            )
        )

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        about = dict(attention_mask=(src != PAD).long(), decoder_input_ids=tgt, use_cache=False)
        return self.marian(src, **about).logits


def smoothed_loss(logits: Tensor, tgt: Tensor) -> Tensor:
    """Return the mean loss per real token from logits at all positions, as one usually does it."""
    how = dict(ignore_index=PAD, label_smoothing=lesson8.SMOOTHING)
    return F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), **how)


class PlainLoop:
    """The loop that one writes around a model, with a shuffling DataLoader."""

    def __init__(self, model: nn.Module, corpus: Corpus, dtype: str, batch_size: int) -> None:
        self.model, self.sides, self.bf16 = model.train(), corpus.sides(), dtype == "bf16"
        self.batch_size = batch_size
        adam = dict(lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
        self.optimizer = torch.optim.Adam(model.parameters(), **adam)

    def pack(self, indices: Sequence[int]) -> list[Tensor]:
        return [lesson8.pad_rows([rows[i] for i in indices]) for rows in self.sides]

    def own_batches(self) -> Iterator[Batch]:
        how = dict(batch_size=self.batch_size, shuffle=True, drop_last=True)
        pairs = range(len(self.sides[0]))
        loader = DataLoader(pairs, **how, collate_fn=lambda chosen: (chosen, self.pack(chosen)))
        while True:
            yield from loader

    def step(self, packed: list[Tensor]) -> None:
        src, tgt = packed
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = smoothed_loss(self.model(src, lesson8.shift_right(tgt)), tgt)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), lesson8.CLIP)
        self.optimizer.step()
        loss.item()


class JoeyNMT:
    """JoeyNMT 2.3 with its own model, data set, batches, training step, optimizer and schedule.

    It reads a text that is cut into subwords already, "s17 s4711": its own BPE would be slower.
    """

    def __init__(self, corpus: Corpus, config: lesson8.Config) -> None:
        sys.modules.setdefault("importlib_metadata", importlib.metadata)  # it wants the backport
        from joeynmt.config import parse_global_args, set_validation_args
        from joeynmt.prediction import prepare
        from joeynmt.training import TrainManager

        self.folder = tempfile.TemporaryDirectory()
        folder, languages = Path(self.folder.name), {}
        parts = zip(("src", "trg"), corpus.sides(), corpus.vocab_sizes, strict=True)
        for side, rows, size in parts:
            lines = (" ".join(f"s{i}" for i in row[:-1].tolist()) + "\n" for row in rows)
            (folder / f"train.{side}").write_text("".join(lines), encoding="utf-8")
            words = (f"s{i}\n" for i in range(EOS + 1, size))
            (folder / f"words.{side}").write_text("".join(words), encoding="utf-8")
            languages[side] = dict(lang=side, level="word", voc_file=str(folder / f"words.{side}"))
        part = dict(
            type="transformer",
            num_layers=config.n_layers,
            num_heads=config.n_heads,
            embeddings=dict(embedding_dim=config.d_model, scale=True, dropout=config.dropout),
            hidden_size=config.d_model,
            ff_size=config.d_ff,
            dropout=config.dropout,
            layer_norm="pre" if config.norm_first else "post",
        )
        training = dict(
            optimizer="adam",
            adam_betas=[0.9, 0.98],
            learning_rate=1e-4,
            scheduling="warmupinversesquareroot",
            learning_rate_warmup=config.warmup,
            normalization="tokens",
            label_smoothing=lesson8.SMOOTHING,
            clip_grad_norm=lesson8.CLIP,
            batch_size=JOEY_TOKENS,
            batch_type="token",
        )
        args = parse_global_args(
            dict(
                name="benchmark",
                model_dir=str(folder),
                use_cuda=False,
                random_seed=config.seed,
                data=dict(train=str(folder / "train"), dataset_type="plain", **languages),
                model=dict(encoder=part, decoder=part, tied_softmax=True),
                training=training,
                testing={},
            )
        )
        self.model, self.data, _, _ = prepare(args, rank=0, mode="train")
        how = dict(device=args.device, autocast=args.autocast, seed=args.seed)
        validation = set_validation_args(args.test)
        self.manager = TrainManager(
            0, self.model, folder, train_args=args.train, dev_args=validation, **how
        )
        self.special = dict(pad_index=self.model.pad_index, eos_index=self.model.eos_index)

    def pack(self, indices: Sequence[int]) -> Any:
        return self.data.collate_fn([self.data[int(i)] for i in indices], **self.special)

    def own_batches(self) -> Iterator[Batch]:
        how = dict(batch_size=JOEY_TOKENS, batch_type="token", shuffle=True)
        loader = self.data.make_iter(**how, seed=self.manager.seed, **self.special)
        while True:
            for batch in loader:
                yield batch.indices.tolist(), batch

    def step(self, packed: Any) -> None:  # the body of its loop in train_and_validate
        manager = self.manager
        manager._train_step(packed)
        manager.clip_grad_fun(parameters=self.model.parameters())
        manager.optimizer.step()
        manager.scheduler.step(manager.stats.steps)
        self.model.zero_grad()
        manager.stats.steps += 1


def build(key: str, corpus: Corpus, config: lesson8.Config, batch_size: int) -> Contestant:
    """Return the contestant of a row; `batch_size` is the sentences of a shuffled batch."""
    kind, dtype = key.split("-")
    if kind == "lesson8":
        return Lesson8(corpus, config if dtype == "auto" else replace(config, precision=dtype))
    if kind == "joeynmt":
        return JoeyNMT(corpus, config)
    if kind == "marian":
        model = MarianModel(config, corpus.vocab_sizes)
    else:
        model = TorchModel(config, corpus.vocab_sizes, config.dropout)
    return PlainLoop(model, corpus, dtype, batch_size)


def serve(pipe: Connection, threads: int, key: str, *setup: Any) -> None:
    """Be the process of a contestant: build it, then time what is asked for until None comes.

    A request is (batches, None), to be stepped through, or (None, count) of its own batches. The
    answer is (seconds, batches).
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        contestant = build(key, *setup)
        trained = (p.numel() for p in contestant.model.parameters() if p.requires_grad)
        pipe.send(sum(trained))
        own = contestant.own_batches()
        while request := pipe.recv():
            batches, count = request
            if batches:
                packed = iter([(batch, contestant.pack(batch)) for batch in batches])
            else:
                packed = itertools.islice(own, count)
            done, start = [], time.perf_counter()
            for indices, batch in packed:
                contestant.step(batch)
                done.append(np.asarray(indices))
            pipe.send((time.perf_counter() - start, done))
    except Exception as error:  # an unfit version of a package ends its row, not the run
        pipe.send(f"{type(error).__name__}: {error}")


# ---- Counting ----
def useful_flops(
    config: lesson8.Config, vocab_size: int, src: np.ndarray, tgt: np.ndarray
) -> float:
    """Return the floating-point operations of a step's matrix products on real tokens alone.

    With d = d_model, f = d_ff and a sentence of S source and T target tokens, multiply-adds are
        encoder layer:  S (4 d^2 + 2 d f) + 2 S S d             projections, feed-forward, attention
        decoder layer:  T (6 d^2 + 2 d f) + 2 S d^2 + 2 T T d + 2 T S d     keys, values of memory
        output matrix:  T d V
    Each is 2 operations, and backward does two products for each one of forward. The causal half of
    the decoder's scores counts in full, as it is computed in full.
    """
    d, f, s, t = config.d_model, config.d_ff, src.astype(float), tgt.astype(float)
    encoder = s * (4 * d * d + 2 * d * f) + 2 * s * s * d
    decoder = t * (6 * d * d + 2 * d * f) + 2 * s * d * d + 2 * t * t * d + 2 * t * s * d
    multiply_adds = config.n_layers * (encoder + decoder) + t * d * vocab_size
    return 3 * 2 * float(multiply_adds.sum())


def matrix_peak(dtype: torch.dtype, size: int = 2048, times: int = 4) -> float:
    """Return the operations per second of the fastest of some products of square matrices."""
    a, b, c = (torch.randn(size, size).to(dtype) for _ in range(3))
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        torch.mm(a, b, out=c)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def count_round(corpus: Corpus, config: lesson8.Config, seconds: float, done: list) -> dict:
    """Return what a contestant achieved on the batches `done` in these seconds."""
    flops, real, padded = 0.0, np.zeros(2), np.zeros(2)
    for indices in done:
        src, tgt = lengths = [side[indices] for side in corpus.lengths]
        flops += useful_flops(config, corpus.vocab_sizes[1], src, tgt)
        real += [side.sum() for side in lengths]
        padded += [len(side) * side.max() for side in lengths]
    return dict(
        seconds=seconds,
        sentences=sum(map(len, done)),
        target_tokens=int(real[1]),
        tokens_per_second=real[1] / seconds,
        flops_per_second=flops / seconds,
        padding=1 - real.sum() / padded.sum(),
    )


# ---- Checks before the clock starts ----
def copy_weights(ours: nn.Module, theirs: TorchModel) -> None:
    """Give the weights of lesson 8's Transformer to the one made of `nn.Transformer`."""

    def copy(source: nn.Module, target: nn.Module) -> None:
        target.load_state_dict(source.state_dict())

    def copy_attention(source: nn.Module, target: nn.MultiheadAttention) -> None:
        copy(source.w_o, target.out_proj)
        parts = (source.w_q, source.w_k, source.w_v)
        target.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        target.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))

    with torch.no_grad():
        for name in ("src_embedding", "tgt_embedding"):
            copy(getattr(ours, name), getattr(theirs, name))
        for name in ("encoder", "decoder"):
            stack = getattr(theirs.transformer, name)
            copy(getattr(ours, f"{name}_norm"), stack.norm)
            for source, target in zip(getattr(ours, name), stack.layers, strict=True):
                copy_attention(source.self_attention, target.self_attn)
                copy(source.feed_forward.linear1, target.linear1)
                copy(source.feed_forward.linear2, target.linear2)
                copy(source.residual1.norm, target.norm1)
                copy(source.residual2.norm, target.norm2)
                if name == "decoder":
                    copy_attention(source.cross_attention, target.multihead_attn)
                    copy(source.residual3.norm, target.norm3)


def check_setup(corpus: Corpus, config: lesson8.Config, batch: np.ndarray) -> None:
    """Check that `nn.Transformer` computes lesson 8's loss, and that the operations are counted.

    Dropout is 0 here, since no two libraries draw the same numbers.
    """
    ours = lesson8.build_model(replace(config, dropout=0.0), corpus.vocab_sizes)
    theirs = TorchModel(config, corpus.vocab_sizes, dropout=0.0)
    copy_weights(ours, theirs)
    src, tgt = (lesson8.pad_rows([rows[i] for i in batch]) for rows in corpus.sides())
    losses = [lesson8.batch_loss(ours, src, tgt, lesson8.SMOOTHING) / (tgt != PAD).sum()]
    losses.append(smoothed_loss(theirs(src, lesson8.shift_right(tgt)), tgt))
    norms = []
    for model, loss in zip((ours, theirs), losses, strict=True):
        loss.backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=0)
    print(
        f"nn.Transformer with lesson 8's weights: loss {losses[1]:.6f}, gradient norm "
        f"{norms[1]:.5f}\nLesson 8 itself: {losses[0]:.6f} and {norms[0]:.5f}: equal"
    )
    ids = torch.randint(EOS + 1, min(corpus.vocab_sizes), (8, 40))
    src, tgt = ids[:, :23], ids[:, 23:]
    with FlopCounterMode(display=False) as counter:
        lesson8.batch_loss(ours, src, tgt, lesson8.SMOOTHING).backward()
    lengths = [np.full(len(side), side.size(1)) for side in (src, tgt)]
    counted, formula = (
        counter.get_total_flops(),
        useful_flops(config, ours.output.out_features, *lengths),
    )
    assert counted == formula, f"the formula is wrong: {formula:.0f}, but torch counts {counted}"
    print(
        f"Matrix products of a step without padding: {formula / 1e9:.6f} GFLOP by the formula, "
        "and as torch counts them"
    )


# ---- Timing ----
def choose_rows(args: argparse.Namespace) -> dict[str, Row]:
    """Return the rows that can be measured here; say of each other one why not."""
    dtype = lesson8.choose_precision(args.precision, torch.device("cpu"))
    rows = {}
    for key, row in ROWS.items():
        if key == "lesson8-auto":  # always there: the others are compared with it
            rows[key] = row._replace(dtype=dtype)
        elif args.only and not any(key.startswith(name) for name in args.only.split(",")):
            continue
        elif importlib.util.find_spec(row.package) is None:
            print(f"Left out: {key}: {row.package} is not installed")
        elif row.dtype == "bf16" and not lesson8.cpu_has_bf16():
            print(f"Left out: {key}: this processor has no bf16 arithmetic")
        elif key == "lesson8-fp32" and dtype == "fp32":
            print(f"Left out: {key}: lesson8-auto is fp32 itself")
        else:
            rows[key] = row
    return rows


def start_contestants(
    rows: dict[str, Row], threads: int, setup: tuple
) -> dict[str, tuple[Connection, int]]:
    """Start a process for each row; return its connection and its number of parameters."""
    context, started = multiprocessing.get_context("spawn"), {}
    for key in tqdm(rows, desc="Starting", leave=False):
        pipe, end = context.Pipe()
        context.Process(target=serve, args=(end, threads, key, *setup), daemon=True).start()
        end.close()  # then the end of the process ends a recv() here, too
        answer = receive(pipe, key)
        if answer is not None:
            started[key] = (pipe, answer)
    return started


def receive(pipe: Connection, key: str) -> Any:
    """Return a contestant's answer, None if it failed, and say why."""
    try:
        answer = pipe.recv()
    except EOFError:
        answer = "its process died (out of memory?)"
    if not isinstance(answer, str):
        return answer
    tqdm.write(textwrap.fill(f"Left out: {key}: {answer[:300]}", 100))
    return None


def time_rounds(args: argparse.Namespace) -> None:
    """Measure all contestants in turn; print the tables and write the JSON file."""
    config = lesson8.Config(precision=args.precision, seed=args.seed)
    rows, size = choose_rows(args), config.vocab_size
    corpus = read_corpus(args.data, size) if args.data else make_corpus(size, args.seed)
    sides, start = corpus.sides(), time.perf_counter()
    batches = lesson8.plan_batches(*sides, config.batch_tokens, (config.seed, 0))
    planning = time.perf_counter() - start
    pairs, (src_mean, tgt_mean) = len(corpus.lengths[0]), [n.mean() for n in corpus.lengths]
    batch_size = round(pairs / len(batches))
    print(
        f"{args.data or 'Synthetic data'}: {pairs:,} pairs of {src_mean:.1f} source and "
        f"{tgt_mean:.1f} target tokens on average\n"
        f"Lesson 8 plans {len(batches):,} batches an epoch in {planning:.2f} s (not timed below), "
        f"{batch_size} pairs each"
    )
    check_setup(corpus, config, batches[0])
    running = start_contestants(rows, args.threads, (corpus, config, batch_size))
    if "lesson8-auto" not in running:
        sys.exit("Nothing to compare with.")
    ours = running["lesson8-auto"][1]
    for key, (_, count) in running.items():
        print(f"{key:<13}{count:>11,} parameters ({count - ours:+,}): {ROWS[key].about}")

    peaks = dict.fromkeys(sorted({rows[key].dtype for key in running}), 0.0)
    results = {mode: {key: [] for key in running} for mode in MODES}
    with tqdm(total=(args.rounds + 1) * len(MODES) * len(running), desc="Timing") as bar:
        for number in range(-1, args.rounds):  # round -1 warms up
            steps = args.steps if number >= 0 else WARM_UP
            begin = number * steps if number >= 0 else len(batches) - steps
            chosen = [batches[i % len(batches)] for i in range(begin, begin + steps)]
            for dtype in peaks:
                measured = matrix_peak(torch.bfloat16 if dtype == "bf16" else torch.float32)
                peaks[dtype] = max(peaks[dtype], measured)
            for mode, (key, (pipe, _)) in itertools.product(MODES, list(running.items())):
                bar.set_postfix_str(f"round {number + 1} of {args.rounds}, {key}")
                if key in running:
                    pipe.send((chosen, None) if mode == "same" else (None, steps))
                    answer = receive(pipe, key)
                    if answer is None:
                        del running[key]
                    elif number >= 0:
                        results[mode][key].append(count_round(corpus, config, *answer))
                bar.update()
    if "lesson8-auto" not in running:
        sys.exit("Nothing to compare with.")
    for pipe, _ in running.values():
        pipe.send(None)

    tables = {
        mode: [summarize(key, rows[key], results[mode], peaks) for key in running] for mode in MODES
    }
    print(f"\nRounds: {args.rounds}, steps in each: {args.steps}, threads: {args.threads}")
    speeds = ", ".join(f"{dtype} {peak / 1e9:,.0f} GFLOP/s" for dtype, peak in peaks.items())
    print(f"Fastest product of two 2048 x 2048 matrices: {speeds}")
    for mode, table in tables.items():
        print_table(MODES[mode], table)
    if args.json:
        packages = {row.package: None for row in ROWS.values()}
        for name in packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                packages[name] = importlib.metadata.version(name)
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        about = dict(machine=platform.machine(), python=platform.python_version())
        about |= dict(processor=torch.cpu.get_capabilities().get("cpu_name"), packages=packages)
        parameters = {key: count for key, (_, count) in running.items()}
        content = dict(settings=settings, **about, peaks=peaks, parameters=parameters)
        content |= dict(planning_seconds=planning, tables=tables, rounds=results)
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def summarize(key: str, row: Row, rounds: dict[str, list], peaks: dict[str, float]) -> dict:
    """Return a line of the table: medians over the rounds, ratios to lesson 8 round by round."""
    line = dict(key=key, name=row.name, dtype=row.dtype)
    for what in ("tokens_per_second", "flops_per_second", "padding"):
        line[what] = median(entry[what] for entry in rounds[key])
    speeds, base = (
        [entry["tokens_per_second"] for entry in rounds[k]] for k in (key, "lesson8-auto")
    )
    ratios = [speed / reference for speed, reference in zip(speeds, base, strict=True)]
    line |= dict(share_of_peak=line["flops_per_second"] / peaks[row.dtype])
    return line | dict(ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios))


def print_table(title: str, table: list[dict]) -> None:
    """Print lines of `summarize`, at most 100 columns wide."""
    print(f"\n{title}")
    print(
        f"{'':<21}{'dtype':<7}{'tokens/s':>8}{'GFLOP/s':>9}{'of peak':>9}{'padding':>9}"
        f"{'ratio to lesson 8':>22}{'lesson 8':>10}"
    )
    for line in table:
        spread = f"{line['ratio']:.3f} ({line['ratio_min']:.3f}–{line['ratio_max']:.3f})"
        print(
            f"{line['name']:<21}{line['dtype']:<7}{line['tokens_per_second']:>8,.0f}"
            f"{line['flops_per_second'] / 1e9:>9,.1f}{line['share_of_peak']:>9.1%}"
            f"{line['padding']:>9.1%}{spread:>22}{1 / line['ratio']:>9.2f}x"
        )


# ---- Preparing, and memory ----
def time_preparing(args: argparse.Namespace) -> None:
    """Print the seconds of `prepare`, first and again, and their share of an epoch's training."""
    config, seconds = lesson8.Config(precision=args.precision, seed=args.seed), []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            start = time.perf_counter()
            prepared = lesson8.prepare(config, args.data, Path(folder))
            seconds.append(time.perf_counter() - start)
    vocab_sizes = [tokenizer.get_vocab_size() for tokenizer in prepared.tokenizers]
    contestant = Lesson8(pack_corpus(prepared.train, vocab_sizes), config)
    groups = contestant.trainer.groups(0)
    count = min(len(groups), args.rounds * args.steps)
    for group in groups[-WARM_UP:]:
        contestant.step(group)
    start = time.perf_counter()
    for group in tqdm(groups[:count], desc="Training", leave=False):
        contestant.step(group)
    epoch = (time.perf_counter() - start) / count * len(groups)
    print(
        f"An epoch of training: {epoch:,.0f} s (estimated from {count} of {len(groups):,} steps, "
        f"{contestant.trainer.precision}, {args.threads} threads)\n"
        f"Preparing for the first time: {seconds[0]:.2f} s, {seconds[0] / epoch:.2%} of an epoch\n"
        f"Preparing again, from the cache: {seconds[1]:.2f} s, {seconds[1] / epoch:.2%}"
    )


def train_for_memory(pipe: Connection, args: argparse.Namespace) -> None:
    """Train as `--full` does, for --steps steps; send the peak memory in bytes, stage by stage."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peaks = []

    def note_peak() -> None:
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)

    torch.set_num_threads(args.threads)
    config = lesson8.Config(precision=args.precision, seed=args.seed)
    note_peak()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name)
        prepared = lesson8.prepare(config, args.data, folder)
        note_peak()
        trainer = lesson8.Trainer(config, prepared, torch.device("cpu"), folder)
        trainer.plan_steps()
        trainer.total = args.steps
        trainer.run_to_end()
        trainer.draw_curve()
    note_peak()
    pipe.send(peaks)


def show_memory(args: argparse.Namespace) -> None:
    """Print the peak resident memory of a training run in a process of its own."""
    if importlib.util.find_spec("resource") is None:
        print("Peak memory: this system has no getrusage")
        return
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=train_for_memory, args=(end, args))
    process.start()
    end.close()
    try:
        peaks = pipe.recv()
    except EOFError:
        sys.exit("The training run failed; its message stands above.")
    process.join()
    imported, prepared, trained = (f"{peak / 1e6:,.0f} MB" for peak in peaks)
    print(
        f"Peak resident memory of training for {args.steps} steps, validation and saving included: "
        f"{trained}\n({imported} after importing, {prepared} after preparing)"
    )


# ---- Command line ----
def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--prepare", action="store_true", help="time reading, BPE and encoding")
    modes.add_argument("--memory", action="store_true", help="measure the peak memory of a run")
    parser.add_argument("--data", type=Path, help="folder of the corpus (default: synthetic ids)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round (default: 10)")
    threads = torch.get_num_threads()
    parser.add_argument("--threads", type=int, default=threads, help=f"(default: {threads})")
    parser.add_argument("--seed", type=int, default=1, help="of data, weights, order (default: 1)")
    precisions = ("auto", "fp32", "bf16")
    parser.add_argument("--precision", default="auto", choices=precisions, help="of lesson8-auto")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    keys = ", ".join(ROWS)
    parser.add_argument("--only", help=f"rows, or how they begin, with commas between: {keys}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if min(args.rounds, args.steps, args.threads) < 1:
        parser.error("--rounds, --steps and --threads must be at least 1")
    for name in args.only.split(",") if args.only else ():
        if not any(key.startswith(name) for key in ROWS):
            parser.error(f"--only: no row begins with {name!r}; there are {', '.join(ROWS)}")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    if (args.prepare or args.memory) and not args.data:
        parser.error("--prepare and --memory need --data")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    warnings.filterwarnings("ignore", message="enable_nested_tensor")
    try:
        (time_preparing if args.prepare else show_memory if args.memory else time_rounds)(args)
    except lesson8.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
