"""How fast lesson 8 translates, beside CTranslate2 and Hugging Face with the very same weights.

    python benchmarks/translate.py --run RUN_FOLDER --data FOLDER    a trained run, the test set
    python benchmarks/translate.py                                   no run: a made-up task

Who takes part is the list CONTESTANTS below; a package that is missing leaves its row out.

- CTranslate2 gets the run's weights through its model spec. Its batch size is the fastest of a few,
  and all threads work at one batch or each at its own, whichever is faster ("each" in the table).
- Hugging Face has the Transformer as MarianMTModel, which is post-norm. That row and a second row
  of lesson 8 use post-norm weights: those of --post-norm-run, or a model that practises the made-up
  task below for some minutes. Its batch size is the fastest of a few too.

All start from encoded ids and end with ids: no row contains tokenisation. Every round times each
contestant once, in turn, so that a slow spell of the machine strikes all of them; a ratio is taken
within a round, and the table shows the median of the rounds. What still differs:

- Lesson 8 ranks by log P / ((5 + n) / 6)^0.6, n tokens with eos. CTranslate2 and Hugging Face rank
  by log P / n^p (CTranslate2 counts n without eos). p is chosen so that both penalties grow alike
  at the mean length n of the sources: p = 0.6 n / (n + 5).
- Lesson 8's beam shrinks when a hypothesis ends, and a sentence is done when none can still win.
  CTranslate2 and Hugging Face fill the free place; CTranslate2 is done when 4 of 4 have ended,
  Hugging Face when the best open one could not win if it ended now.
- Lesson 8 stops each sentence 50 tokens beyond its source, Hugging Face 50 beyond the longest
  source of the batch, CTranslate2 50 beyond the longest of all. With a trained model nearly every
  sentence ends by itself. The table's column "cut" counts those that reached lesson 8's limit, and
  "equal", the share of translations that are exactly lesson 8's, compares no further than there.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
lesson = importlib.import_module("08_iwslt_vi_en")

Rows, Ids = list[np.ndarray], list[list[int]]
Translate = Callable[[Rows, int], Ids]  # (sources, beam) -> translations without bos and eos
CT2_TOKENS = (512, 1024, 2048, 4096)  # batch sizes to try, in padded source tokens
HF_SENTENCES = (16, 32, 64)  # batch sizes to try
TUNING_SENTENCES = 192  # they are tried on at least so many, where there are
REST = 0.3  # seconds before each timing: OpenMP's idle threads of the last engine fall asleep
SYNONYMS, LONGEST, VOCABULARY = 4, 80, 8000  # of the made-up task


@dataclass
class Work:
    """Weights and the sentences to translate with them."""

    weights: str  # what the table calls them
    model: nn.Module
    sources: Rows
    alone: np.ndarray  # the sentence that is timed alone
    references: list[str] | None = None
    to_text: Callable[[Sequence[int]], str] | None = None

    @property
    def power(self) -> float:
        """The exponent p of n^p that grows as ((5 + n) / 6)^0.6 does at the mean length n."""
        n = statistics.mean(map(len, self.sources))
        return 0.6 * n / (n + 5)


class Contestant(NamedTuple):
    """A row of the table: `build` makes its translating function, or raises if it cannot be."""

    engine: str
    dtype: str
    post_norm: bool  # which weights it takes
    build: Callable[[Work, str, int], Translate]  # (work, dtype, threads)

    @property
    def name(self) -> str:
        """What --only calls it."""
        return f"{self.engine}-{self.dtype}{'-postnorm' * self.post_norm}"


@dataclass
class Entry:
    """A contestant that runs, and what was measured of it."""

    contestant: Contestant
    work: Work
    translate: Translate
    seconds: dict[int, list[float]] = field(default_factory=dict)  # beam -> one a round
    outputs: dict[int, Ids] = field(default_factory=dict)  # beam -> translations
    alone: list[float] = field(default_factory=list)


# ---- The engines ----
def lesson8(work: Work, dtype: str, threads: int) -> Translate:
    """Lesson 8 as it is: its own batches; raises ValueError where it would not use the dtype."""
    if dtype == "bf16" and not lesson.cpu_has_bf16():
        raise ValueError("this processor has no bf16 arithmetic")
    if dtype == "fp16" and not lesson.cpu_packs_fp16():
        raise ValueError("torch has no products with packed fp16 weights here")
    model = copy.deepcopy(work.model)
    lesson.set_precision(model, dtype)
    return partial(lesson.translate_ids, model)


def fastest(settings: Sequence[Any], translate: Callable[..., Ids], rows: Rows, beam: int) -> Any:
    """Return the setting with which `translate(rows, beam, setting)` takes least time."""
    sample = sorted(rows, key=len)[:: max(1, len(rows) // TUNING_SENTENCES)]
    times = []
    for setting in (settings[0], *settings):  # the first is a warm-up
        start = time.perf_counter()
        translate(sample, beam, setting)
        times.append(time.perf_counter() - start)
    return settings[int(np.argmin(times[1:]))]


def with_fastest(settings: Sequence[Any], translate: Callable[..., Ids], rows: Rows) -> Translate:
    """Return `translate` with the setting that is fastest on a sample of rows, for each beam."""
    chosen: dict[int, Any] = {}

    def tuned(sources: Rows, beam: int) -> Ids:
        if beam not in chosen:
            chosen[beam] = fastest(settings, translate, rows, beam)
        return translate(sources, beam, chosen[beam])

    tuned.chosen = chosen
    return tuned


def ctranslate2(work: Work, dtype: str, threads: int) -> Translate:
    """CTranslate2 with the model's weights; raises ValueError where it refuses the dtype."""
    ct2 = importlib.import_module("ctranslate2")
    spec = ctranslate2_spec(work.model)
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        load = partial(ct2.Translator, folder, compute_type=dtype)
        shared = load(intra_threads=threads)  # all threads work at one batch
        engines = {"": shared, "each": load(inter_threads=threads, intra_threads=1)}
    power, longest = work.power, max(map(len, work.sources)) + lesson.EXTRA_OUTPUT
    never = [[str(lesson.PAD)], [str(lesson.BOS)]]

    def translate(sources: Rows, beam: int, setting: str) -> Ids:
        tokens, _, how = setting.partition(" ")
        engine = shared if len(sources) == 1 else engines[how]
        results = engine.translate_batch(
            [[str(i) for i in row] for row in sources],
            max_batch_size=int(tokens),  # it sorts by length before it cuts
            batch_type="tokens",
            beam_size=beam,
            length_penalty=power,
            min_decoding_length=0,
            max_decoding_length=longest,
            suppress_sequences=never,
        )
        return [[int(token) for token in result.hypotheses[0]] for result in results]

    settings = [f"{tokens} {how}".strip() for how in engines for tokens in CT2_TOKENS]
    return with_fastest(settings, translate, work.sources)


def ctranslate2_spec(model: nn.Module) -> Any:
    """Return the model as CTranslate2 describes it; its vocabularies are the ids as strings."""
    specs = importlib.import_module("ctranslate2.specs")
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}

    def fill(spec: Any, *names: str) -> None:  # several Linear layers become one
        spec.weight = np.concatenate([weights[f"{name}.weight"] for name in names])
        spec.bias = np.concatenate([weights[f"{name}.bias"] for name in names])

    def normalise(spec: Any, name: str) -> None:
        spec.gamma, spec.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]

    def attention(spec: Any, name: str, groups: Sequence[str]) -> None:
        for linear, group in zip(spec.linear, groups, strict=True):
            fill(linear, *(f"{name}.w_{letter}" for letter in group))

    first = model.encoder[0]
    pre_norm, heads = first.residual1.norm_first, first.self_attention.n_heads
    how = dict(pre_norm=pre_norm, activation=specs.Activation.RELU)
    encoder = specs.TransformerEncoderSpec(len(model.encoder), heads, **how)
    decoder = specs.TransformerDecoderSpec(len(model.decoder), heads, **how)
    for side, spec in (("encoder", encoder), ("decoder", decoder)):
        if pre_norm:
            normalise(spec.layer_norm, f"{side}_norm")
        spec.position_encodings.encodings = model.position.table.numpy()
        for i, layer in enumerate(spec.layer):
            inside, norms = f"{side}.{i}", [layer.self_attention.layer_norm]
            attention(layer.self_attention, f"{inside}.self_attention", ("qkv", "o"))
            if side == "decoder":
                attention(layer.attention, f"{inside}.cross_attention", ("q", "kv", "o"))
                norms.append(layer.attention.layer_norm)
            for number, norm in enumerate([*norms, layer.ffn.layer_norm], start=1):
                normalise(norm, f"{inside}.residual{number}.norm")
            fill(layer.ffn.linear_0, f"{inside}.feed_forward.linear1")
            fill(layer.ffn.linear_1, f"{inside}.feed_forward.linear2")
    encoder.embeddings[0].weight = weights["src_embedding.table.weight"]  # scaled by sqrt(d_model)
    decoder.embeddings.weight = weights["tgt_embedding.table.weight"]
    decoder.projection.weight = weights["output.weight"]
    spec = specs.TransformerSpec(encoder, decoder)
    pad, bos, eos = map(str, (lesson.PAD, lesson.BOS, lesson.EOS))
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = pad, bos, eos
    spec.config.decoder_start_token = bos
    spec.config.layer_norm_epsilon = first.residual1.norm.eps
    spec.register_source_vocabulary([str(i) for i in range(len(encoder.embeddings[0].weight))])
    spec.register_target_vocabulary([str(i) for i in range(len(decoder.embeddings.weight))])
    spec.validate()
    spec.optimize()
    return spec


def hugging_face(work: Work, dtype: str, threads: int) -> Translate:
    """Hugging Face `generate` with the weights in a MarianMTModel, like lengths together."""
    model, power = marian(work.model, dtype), work.power

    @torch.inference_mode()
    def translate(sources: Rows, beam: int, size: int) -> Ids:
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        results: Ids = [[] for _ in sources]
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            src = lesson.pad_rows([sources[i] for i in chosen])
            output = model.generate(
                src,
                attention_mask=(src != lesson.PAD).long(),
                num_beams=beam,
                do_sample=False,
                length_penalty=power,
                max_new_tokens=src.size(1) + lesson.EXTRA_OUTPUT,
                suppress_tokens=[lesson.PAD, lesson.BOS],
            )
            for i, row in zip(chosen, output[:, 1:].tolist(), strict=True):
                kept = row[: row.index(lesson.EOS)] if lesson.EOS in row else row
                results[i] = [token for token in kept if token != lesson.PAD]
        return results

    return with_fastest(HF_SENTENCES, translate, work.sources)


def marian(model: nn.Module, dtype: str) -> nn.Module:
    """Return a post-norm model of lesson 8 as a MarianMTModel, checked to give the same logits."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    first = model.encoder[0]
    if first.residual1.norm_first:
        raise ValueError("Marian is post-norm, these weights are pre-norm")
    source, target = model.src_embedding.table.weight, model.tgt_embedding.table.weight
    width, layers = first.feed_forward.linear1.out_features, len(model.encoder)
    heads = first.self_attention.n_heads
    config = transformers.MarianConfig(
        vocab_size=len(source),
        decoder_vocab_size=len(target),
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=model.output.weight is target,
        d_model=source.size(1),
        max_position_embeddings=len(model.position.table),
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=lesson.PAD,
        bos_token_id=lesson.BOS,
        eos_token_id=lesson.EOS,
        decoder_start_token_id=lesson.BOS,
        forced_eos_token_id=None,
        **{f"{side}_layers": layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": heads for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": width for side in ("encoder", "decoder")},
    )
    other = transformers.MarianMTModel(config).eval()
    renamed = {
        "src_embedding.table": "model.encoder.embed_tokens",
        "tgt_embedding.table": "model.decoder.embed_tokens",
        "output": "lm_head",
    }
    inside = dict(w_q="q_proj", w_k="k_proj", w_v="v_proj", w_o="out_proj")
    for side in ("encoder", "decoder"):
        crossing = ["encoder_attn"] * (side == "decoder")
        norms = ["self_attn", *crossing, "final"]
        for i in range(layers):
            old, new = f"{side}.{i}", f"model.{side}.layers.{i}"
            for ours, theirs in zip(("self", "cross"), ("self_attn", *crossing), strict=False):
                for a, b in inside.items():
                    renamed[f"{old}.{ours}_attention.{a}"] = f"{new}.{theirs}.{b}"
            for number, norm in enumerate(norms, start=1):
                renamed[f"{old}.residual{number}.norm"] = f"{new}.{norm}_layer_norm"
            for number in (1, 2):
                renamed[f"{old}.feed_forward.linear{number}"] = f"{new}.fc{number}"
    weights = {}
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        weights[f"{renamed[module]}.{kind}"] = tensor
    for side in ("encoder", "decoder"):  # Marian's own table holds all sines before all cosines
        weights[f"model.{side}.embed_positions.weight"] = model.position.table
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"final_logits_bias"}, (missing, unexpected)

    src = torch.tensor([[5, 6, 7, 8, lesson.EOS], [9, 10, lesson.EOS, lesson.PAD, lesson.PAD]])
    tgt = torch.tensor([[lesson.BOS, 5, 6], [lesson.BOS, 7, 8]])
    with torch.inference_mode():
        theirs = other(src, attention_mask=(src != lesson.PAD).long(), decoder_input_ids=tgt).logits
        assert torch.allclose(theirs, model.eval()(src, tgt), atol=1e-3), "other logits"
    return other


# One line is one row: a function that takes (work, dtype, threads) and returns another, which takes
# (sources, beam) and returns ids. Of lesson 8, fp16 is weights in fp16 and sums in fp32.
# The first line of each kind of weights is what the others of that kind are compared with.
CONTESTANTS = [
    Contestant("lesson8", "fp32", False, lesson8),
    Contestant("lesson8", "fp16", False, lesson8),
    Contestant("lesson8", "bf16", False, lesson8),
    Contestant("ctranslate2", "float32", False, ctranslate2),
    Contestant("ctranslate2", "int8", False, ctranslate2),
    Contestant("ctranslate2", "bfloat16", False, ctranslate2),
    Contestant("lesson8", "fp32", True, lesson8),
    Contestant("lesson8", "fp16", True, lesson8),
    Contestant("lesson8", "bf16", True, lesson8),
    Contestant("huggingface", "fp32", True, hugging_face),
]


# ---- What to translate ----
def from_run(run: Path, data: Path, sentences: int | None, weights: str) -> Work:
    """Return a run's model and the encoded test set."""
    translator = lesson.Translator(run, torch.device("cpu"), precision="fp32")
    pairs = lesson.load_pairs(data, "test", translator.config.languages)[:sentences]
    source, target = translator.tokenizers
    rows = lesson.text_to_ids(source, [pair[0] for pair in pairs])
    longest = lesson.MAX_POSITIONS - lesson.EXTRA_OUTPUT
    kept = [i for i, row in enumerate(rows) if 1 < len(row) <= longest]
    alone = min(kept, key=lambda i: abs(len(pairs[i][0].split()) - 20))
    references, to_text = [pairs[i][1] for i in kept], partial(lesson.ids_to_text, target)
    sources = [rows[i] for i in kept]
    return Work(weights, translator.model, sources, rows[alone], references, to_text)


def made_up(count: int, seed: int) -> tuple[Rows, Rows]:
    """Return sources and targets of a task whose answers have lengths like IWSLT's sentences.

    A source is one id that names a length n, then n - 1 random ids. Its target counts down from n,
    and writes each number as one of SYNONYMS ids, drawn at random. So a model soon learns when to
    end, while hypotheses compete as in translation: several next tokens are plausible everywhere.
    """
    rng, first = np.random.default_rng(seed), lesson.EOS + 1
    chances = 1 / np.arange(1, SYNONYMS + 1)
    chances /= chances.sum()
    lengths = np.clip(rng.lognormal(3.1, 0.55, count), 3, LONGEST).astype(int)  # mean 25
    sources, targets = [], []
    for n in lengths:
        words = rng.integers(first + LONGEST + 1, VOCABULARY, n - 1)
        down = first + np.arange(n)[::-1] * SYNONYMS + rng.choice(SYNONYMS, n, p=chances)
        sources.append(np.array([first + n, *words, lesson.EOS], dtype=np.int32))
        targets.append(np.array([*down, lesson.EOS], dtype=np.int32))
    return sources, targets


def practised(post_norm: bool, steps: int, sentences: int | None, weights: str) -> Work:
    """Return a model of the laptop preset's sizes after some steps on the made-up task."""
    torch.manual_seed(1)
    config = lesson.Config(norm_first=not post_norm, dropout=0.0)
    model = lesson.build_model(config, (VOCABULARY, VOCABULARY)).train()
    peak = 5e-4 if post_norm else 1.5e-3
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    rows, bf16 = made_up(40 * steps, seed=2), lesson.cpu_has_bf16()
    plan = lesson.plan_batches(*rows, 1024, seed=3)[:steps]
    for step, batch in enumerate(tqdm(plan, desc=f"{weights}: practice", unit="step"), start=1):
        src, tgt = (lesson.pad_rows([side[i] for i in batch]) for side in rows)
        rate = lesson.learning_rate(step, len(plan), peak, 60)
        optimizer.param_groups[0]["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = lesson.batch_loss(model, src, tgt, lesson.SMOOTHING) / (tgt != 0).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), lesson.CLIP)
        optimizer.step()
    sources = made_up(sentences or 1268, seed=4)[0]  # as many as tst2013 has
    return Work(weights, model.eval(), sources, min(sources, key=lambda row: abs(len(row) - 21)))


# ---- Measuring ----
def build(args: argparse.Namespace) -> list[Entry]:
    """Build the models and the contestants that can be; say of the others why they cannot."""
    wanted = [c for c in CONTESTANTS if not args.only or {c.engine, c.name} & {*args.only}]
    needed = {c.post_norm for c in wanted}
    bases = [next(c for c in CONTESTANTS if c.post_norm == kind) for kind in sorted(needed)]
    works, entries = {}, []
    for kind in needed:
        run, weights = (args.post_norm_run, "post-norm") if kind else (args.run, "main")
        if run:
            works[kind] = from_run(run, args.data, args.sentences, weights)
        else:
            works[kind] = practised(kind, args.practice, args.sentences, weights)
    for contestant in (c for c in CONTESTANTS if c in wanted or c in bases):
        work = works[contestant.post_norm]
        try:
            translate = contestant.build(work, contestant.dtype, args.threads)
        except (ImportError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            print(f"{contestant.name} is left out: {reason}")
        else:
            entries.append(Entry(contestant, work, translate))
    return entries


def measure(entries: Sequence[Entry], beams: Sequence[int], rounds: int, repeats: int) -> None:
    """Time every entry in turn, round after round; the first, untimed round warms up and tunes."""
    alone = [entry for entry in entries if not entry.contestant.post_norm]
    total = len(entries) * len(beams) * (rounds + 1) + len(alone) * repeats
    with tqdm(total=total, unit="turn", desc="measuring") as bar:
        for number in range(rounds + 1):
            for beam in beams:
                for entry in entries:
                    bar.set_postfix_str(f"{entry.contestant.name}, beam {beam}")
                    time.sleep(REST)
                    start = time.perf_counter()
                    entry.outputs[beam] = entry.translate(entry.work.sources, beam)
                    if number:
                        seconds = time.perf_counter() - start
                        entry.seconds.setdefault(beam, []).append(seconds)
                    bar.update()
        for number in range(repeats + 1):
            for entry in alone:
                bar.set_postfix_str(f"{entry.contestant.name}, one sentence")
                time.sleep(REST / 3)
                entry.translate([entry.work.alone], 4)  # wakes up this engine's threads
                start = time.perf_counter()
                entry.translate([entry.work.alone], 4)
                if number:
                    entry.alone.append(time.perf_counter() - start)
                    bar.update()


def start_ratio(run: Path, times: int = 5) -> float:
    """Return how many times as long as importing torch it takes until a run is ready to translate.

    Both are processes of their own, in turn: `import torch`, and lesson 8's filter without input.
    """
    script = Path(str(lesson.__file__))
    commands = (["-c", "import torch"], [script, "--infer", "--run", run])
    ratios = []
    for _ in tqdm(range(times + 1), desc="starting", unit="pair"):
        seconds = []
        for command in commands:
            start = time.perf_counter()
            done = subprocess.run([sys.executable, *command], input=b"", capture_output=True)
            seconds.append(time.perf_counter() - start)
            if done.returncode:
                raise RuntimeError(done.stderr.decode("utf-8", "replace"))
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios[1:])  # the first pair filled the file cache


def summarise(entry: Entry, base: Entry, beam: int) -> dict[str, Any]:
    """Return an entry's figures at one beam, compared with lesson 8 on the same weights."""
    seconds, outputs = entry.seconds[beam], entry.outputs[beam]
    count, tokens = len(outputs), sum(len(row) + 1 for row in outputs)  # with eos
    ratios = [s / b for s, b in zip(seconds, base.seconds[beam], strict=True)]
    limits = [len(row) + lesson.EXTRA_OUTPUT for row in entry.work.sources]
    pairs = zip(base.outputs[beam], outputs, limits, strict=True)
    same = sum(ours == theirs[:limit] for ours, theirs, limit in pairs)
    return dict(
        name=entry.contestant.name,
        engine=entry.contestant.engine,
        dtype=entry.contestant.dtype,
        weights=entry.work.weights,
        beam=beam,
        sentences_per_second=count / statistics.median(seconds),
        target_tokens_per_second=tokens / statistics.median(seconds),
        lesson8_over_this=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        equal_to_lesson8=same / count,
        bleu=bleu(entry, beam),
        mean_tokens=tokens / count,
        cut_at_limit=sum(len(o) >= m for o, m in zip(outputs, limits, strict=True)),
        batch=getattr(entry.translate, "chosen", {}).get(beam),
        seconds=seconds,
    )


def bleu(entry: Entry, beam: int) -> float | None:
    """Return BLEU on corpus text, None where there are no references or no sacrebleu."""
    work = entry.work
    if work.references is None:
        return None
    try:
        metrics = importlib.import_module("sacrebleu.metrics")
    except ImportError:
        return None
    texts = [work.to_text(row) for row in entry.outputs[beam]]
    metric = metrics.BLEU(tokenize="none", force=True)
    return metric.corpus_score(texts, [work.references]).score


def report(entries: Sequence[Entry], beams: Sequence[int]) -> dict[str, Any]:
    """Print the tables; return what they say, for JSON."""
    bases = {e.work.weights: e for e in reversed(entries)}  # the first of its weights
    rows = []
    for beam in beams:
        print(f"\n{'greedy' if beam == 1 else f'beam {beam}'}")
        print(
            f"  {'engine':<12}{'dtype':<9}{'weights':<10}{'sent./s':>8}{'tokens/s':>9}"
            f"  {'lesson 8/it (min-max)':<21}{'equal':>7}{'BLEU':>6}{'cut':>4}{'batch':>10}"
        )
        for entry in entries:
            row = summarise(entry, bases[entry.work.weights], beam)
            rows.append(row)
            ratio = f"{row['lesson8_over_this']:.2f}"
            ratio += f" ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
            score = "-" if row["bleu"] is None else f"{row['bleu']:.1f}"
            print(
                f"  {row['engine']:<12}{row['dtype']:<9}{row['weights']:<10}"
                f"{row['sentences_per_second']:>8.1f}{row['target_tokens_per_second']:>9.0f}"
                f"  {ratio:<21}{row['equal_to_lesson8']:>7.1%}{score:>6}"
                f"{row['cut_at_limit']:>4}{row['batch'] or 'own':>10}"
            )
        fastest_pair(rows, beam)
    single = []
    if any(entry.alone for entry in entries):
        print("\none sentence of 20 words alone, beam 4")
    for entry in (entry for entry in entries if entry.alone):
        middle, high = np.percentile(np.array(entry.alone) * 1000, [50, 95])
        single.append(dict(name=entry.contestant.name, median_ms=middle, p95_ms=high))
        name = f"{entry.contestant.engine:<12}{entry.contestant.dtype:<9}"
        print(f"  {name}median {middle:.1f} ms, 95th percentile {high:.1f} ms")
    return dict(rows=rows, one_sentence_beam_4=single)


def fastest_pair(rows: Sequence[dict[str, Any]], beam: int) -> None:
    """Print how the fastest row of lesson 8 compares with the fastest of each other engine."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["weights"], row["engine"])
        if row["beam"] == beam and row["sentences_per_second"] > best.get(key, {}).get(
            "sentences_per_second", 0
        ):
            best[key] = row
    for (weights, engine), row in best.items():
        ours = best.get((weights, "lesson8"))
        if ours and engine != "lesson8":
            ratios = [t / o for t, o in zip(row["seconds"], ours["seconds"], strict=True)]
            print(
                f"  {weights}: lesson 8 in {ours['dtype']} / {engine} in {row['dtype']}: "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            )


def version(package: str) -> str | None:
    """Return a package's version, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def integers(text: str) -> list[int]:
    """Read "1,4" as [1, 4]."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Measure, print and, with --json, write what was measured; return the exit status."""
    names = ", ".join(contestant.name for contestant in CONTESTANTS)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"rows: {names}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, cores = parser.add_argument, os.cpu_count() or 1
    add("--run", type=Path, help="folder of a trained run of lesson 8 (none: the made-up task)")
    add("--post-norm-run", type=Path, help="the same for the post-norm rows")
    add("--data", type=Path, default=lesson.HERE / "data", help="folder of the corpus")
    add("--sentences", type=int, help="translate only the first so many")
    add("--beams", type=integers, default=[1, 4], help="beam widths, 1 is greedy")
    add("--rounds", type=int, default=5, help="times that each row is timed")
    add("--repeats", type=int, default=30, help="times that the one sentence is timed")
    add("--practice", type=int, default=400, help="training steps of the made-up task")
    add("--threads", type=int, default=cores, help="threads of every engine")
    add("--only", type=lambda text: text.split(","), help="rows or engines, with commas")
    add("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    known = {c.engine for c in CONTESTANTS} | {c.name for c in CONTESTANTS}
    if unknown := {*(args.only or ())} - known:
        parser.error(f"--only knows no {', '.join(sorted(unknown))}; see the rows in --help")
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    counts = (args.rounds, args.repeats, args.threads, args.practice, *args.beams)
    if min(*counts, 1 if args.sentences is None else args.sentences) < 1:
        parser.error("rounds, repeats, threads, practice, beams, sentences must be 1 or more")

    torch.set_num_threads(args.threads)
    try:
        entries = build(args)
    except lesson.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not entries:
        parser.error(f"--only leaves nothing of: {names}")
    for work in {id(entry.work): entry.work for entry in entries}.values():
        told = "test set" if work.references is not None else "made-up task"
        print(f"{work.weights} weights: {told}, {len(work.sources):,} sentences")
    measure(entries, args.beams, args.rounds, args.repeats)
    packages = ("torch", "ctranslate2", "transformers", "sacrebleu")
    versions = {package: version(package) for package in packages}
    print(
        "\n" + ", ".join(f"{name} {number}" for name, number in versions.items() if number),
        f"\n{args.threads} threads, {args.rounds} rounds; ids in, ids out; medians, and within a "
        "round lesson 8's\nfirst row's speed / this row's: above 1, lesson 8 is faster",
    )
    figures = dict(
        versions=versions,
        machine=platform.machine(),
        cores=cores,
        threads=args.threads,
        rounds=args.rounds,
        sentences={e.work.weights: len(e.work.sources) for e in entries},
        **report(entries, args.beams),
    )
    if args.run:
        figures["start_over_import_torch"] = ratio = start_ratio(args.run)
        print(f"\nThe filter is ready after {ratio:.2f} times what importing torch takes.")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
