# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "torch>=2.6,<3", "numpy>=1.26,<3", "tqdm>=4.66,<5", "tokenizers>=0.20,<1",
#   "sacremoses>=0.1.1,<1", "sacrebleu>=2.4,<3", "matplotlib>=3.8,<4",
# ]
# ///
"""Lesson 8: a translator you can use, trained on IWSLT'15 English-Vietnamese.

The lessons before this one build the Transformer of "Attention Is All You Need" (Vaswani et al.,
2017). Lesson 7 trained it on 28 sentences, of which it learnt more by heart than French, and cut
words into pieces. This one trains it on real text and makes a tool of it. It reads from top to
bottom: configuration, data, subwords, batches, the model from embeddings to Transformer, loss and
schedule, training, search, evaluation, prompt, command line.

    python 08_iwslt_vi_en.py --demo                       built-in pairs, a minute or two
    python 08_iwslt_vi_en.py --download                   fetch IWSLT'15 (133,317 pairs) into data/
    python 08_iwslt_vi_en.py --full                       train on it; --full --resume goes on
    python 08_iwslt_vi_en.py --full --direction vi-en     the other way; X-Y reads train.X, train.Y
    python 08_iwslt_vi_en.py --evaluate                   BLEU and chrF on the test set
    python 08_iwslt_vi_en.py --infer                      a prompt: EN> ... VI> ...
    python 08_iwslt_vi_en.py --infer < in.txt > out.txt   a filter: one line in, one line out
    torchrun --nproc-per-node=4 -- 08_iwslt_vi_en.py --full   several GPUs or processes
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import re
import signal
import sqlite3
import sys
import tarfile
import time
import unicodedata
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

PAD, BOS, EOS = 0, 1, 2  # the same ids in every lesson
MAX_POSITIONS = 1024  # rows of the position table: no longer text enters the model
MAX_LEN, EXTRA_OUTPUT = 200, 50  # longest training side; how much longer a translation may get
SMOOTHING, CLIP = 0.1, 1.0  # probability spread over all classes; largest norm of the gradient
VALIDATE_EVERY, SAVE_EVERY = 500, 300  # steps, besides the end of each epoch; seconds
RANK = int(os.environ.get("RANK", 0))  # under torchrun: the number of this process,
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # and how many there are
HERE = Path(__file__).resolve().parent
BEST, STATE, METRICS = "best_iwslt_transformer.pth", "resume_state.pth", "metrics.jsonl"
FORMAT = "iwslt-transformer-1"  # marks a checkpoint as ours

Pair = tuple[str, str]  # source and target sentence
Rows = list[np.ndarray]  # encoded sentences: an array of subword ids each
Sides = list[Rows]  # source rows and target rows
Ids = list[list[int]]  # translations of sentences, without bos and eos
KeysValues = tuple[Tensor, Tensor]  # each (B, heads, S, d_k)
Attended = tuple[Tensor, Tensor]  # output (B, T, d_model) and weights (B, heads, T, S)
Mask = Tensor | None  # boolean, True means "may attend"; broadcasts to (B, heads, query, key)


class UserError(Exception):
    """Something outside the program is wrong; `main` prints the sentence, exit status 2."""


# ---- Configuration: what decides the result of a run. Each setting is a command-line flag. ----
def setting(default: Any, help: str, least: float = 0, choices: Sequence[str] | None = None) -> Any:
    """Return a dataclass field with all that its flag needs."""
    return field(default=default, metadata=dict(help=help, least=least, choices=choices))


def flag(name: str) -> str:
    """Return the flag of a setting: batch_tokens -> --batch-tokens."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Config:
    """The settings of one run; checkpoints carry them, and `--resume` insists on the same."""

    direction: str = setting("en-vi", "source and target language, as in the files' names")
    preset: str = setting("laptop", "set of defaults", choices=("demo", "laptop", "gpu"))
    vocab_size: int = setting(8000, "subwords per language", 300)
    d_model: int = setting(256, "width of the model; even", 2)
    n_heads: int = setting(8, "attention heads; must divide d_model", 1)
    d_ff: int = setting(1024, "inner width of the feed-forward networks", 1)
    n_layers: int = setting(4, "encoder layers, and as many decoder layers", 1)
    dropout: float = setting(0.1, "share of activations dropped in training")
    norm_first: bool = setting(True, "LayerNorm before each sub-layer (pre-norm)")
    tie: str = setting("output", "target embedding as output matrix", choices=("output", "none"))
    batch_tokens: int = setting(2048, "tokens of a batch on its longer side, with padding", 16)
    accumulate: int = setting(1, "batches that each process sums up for one step", 1)
    lr: float = setting(1.5e-3, "learning rate at the end of warm-up", 1e-9)
    warmup: int = setting(400, "steps of warm-up (a fifth of all steps at most)", 1)
    epochs: int = setting(10, "passes over the training pairs", 1)
    minutes: float = setting(0.0, "train about so long instead of counting epochs (0: off)")
    precision: str = setting("auto", "also of --infer", choices=("auto", "fp32", "bf16", "fp16"))
    seed: int = setting(1, "seed of initialisation, batch order and dropout")
    demo: bool = False  # the built-in pairs instead of a corpus: set by --demo, so no flag

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least = getattr(self, item.name), item.metadata.get("least", 0)
            if not isinstance(value, str) and not least <= value < 2**32:
                rule = f"must be at least {least} and below 2**32"
                raise UserError(f"{flag(item.name)} {rule}, not {value}.")
        if not re.fullmatch(r"([a-z]+)-(?!\1$)[a-z]+", self.direction):
            raise UserError(f"--direction must be two languages, like en-vi: {self.direction}.")
        if self.d_model % 2 or self.d_model % self.n_heads:
            raise UserError("--d-model must be even, and --n-heads must divide it.")
        if max(self.dropout, self.lr) >= 1:
            raise UserError("--dropout and --lr must be below 1.")

    @property
    def languages(self) -> list[str]:
        """Source and target language."""
        return self.direction.split("-")


DEMO = dict(vocab_size=600, d_model=128, n_heads=4, d_ff=256, n_layers=2, batch_tokens=512)
GPU = dict(d_model=512, d_ff=2048, n_layers=6, dropout=0.3, batch_tokens=16384, lr=1e-3)
PRESETS = {"demo": DEMO | {"epochs": 20}, "laptop": {}, "gpu": GPU | {"epochs": 40}}


# ---- Data: pairs of lines, from the archives or from plain files ----

ORIGIN = "https://github.com/stefan-it/nmt-en-vi/raw/master/data/"
ARCHIVES = dict(  # part of the corpus: its archive, the archive's git blob id, names of its files
    train=("train-en-vi.tgz", "76ce2671526e0b05a9422020820e656b6e2a1472", ("train",)),
    dev=("dev-2012-en-vi.tgz", "cd22909b078747a13aeed7fb134de8d5ad7c5151", ("tst2012", "dev")),
    test=("test-2013-en-vi.tgz", "39b3722a15dbf07e9a112be4051b2884b1bb0f3f", ("tst2013", "test")),
)
TED_LICENCE = "IWSLT is TED talks, CC BY-NC-ND: what is trained on it is for non-commercial use."
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def clean(text: str) -> str:
    """Return text as one line in one form: NFC, no control characters, single spaces.

    Vietnamese can be typed composed or decomposed; without NFC the same word would be two words.

    >>> clean("tie\\u0302\\u0301ng\\tViệt ") == "tiếng Việt"
    True
    """
    return " ".join(CONTROL.sub(" ", unicodedata.normalize("NFC", text)).split())


def read_part(folder: Path, part: str, languages: Sequence[str]) -> dict[str, bytes]:
    """Return name and content of a part's two files, source first; nothing where it is absent.

    Plain files (train.en, train.vi) go before the archive, whose members are read in memory:
    nothing is unpacked, so nothing can be written to a wrong place.
    """
    archive, stems = folder / ARCHIVES[part][0], ARCHIVES[part][2]
    choices = [[f"{stem}.{language}" for language in languages] for stem in stems]
    for names in choices:
        if all((folder / name).is_file() for name in names):
            return {name: (folder / name).read_bytes() for name in names}
    try:  # decompress all of it first: only that verifies the checksum
        content = io.BytesIO(gzip.decompress(archive.read_bytes()))
        with tarfile.open(fileobj=content, mode="r:") as tar:
            files = {Path(m.name).name: tar.extractfile(m).read() for m in tar if m.isfile()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except Exception as error:  # gzip, zlib and tarfile raise what they like
        raise UserError(f"{archive} is no sound .tgz ({error}): fetch it again.") from error
    return next(({n: files[n] for n in names} for names in choices if files.keys() >= {*names}), {})


def load_pairs(
    folder: Path, part: str, languages: Sequence[str], required: bool = True
) -> list[Pair] | None:
    """Return the (source, target) lines of a part, empty ones too; None if absent, not required."""
    found, sides = read_part(folder, part, languages), []
    if not found and not required:
        return None
    if not found:
        names = " and ".join(f"{ARCHIVES[part][2][0]}.{language}" for language in languages)
        if sorted(languages) == ["en", "vi"]:
            archives = " ".join(archive for archive, _, _ in ARCHIVES.values())
            names += f", or the archives {archives} from {ORIGIN} (--download fetches them),"
        raise UserError(f"No {part} data in {folder}: put {names} there.")
    for name, data in found.items():
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise UserError(f"{folder}: {name}, line {line} is not UTF-8: convert it.") from error
        # Only a newline ends a line: splitlines() would cut at rarer characters and misalign.
        sides.append([clean(line) for line in io.StringIO(text, newline="\n")])
    if len(sides[0]) != len(sides[1]):
        counts = (f"{n} has {len(side):,} lines" for n, side in zip(found, sides, strict=True))
        raise UserError(f"{folder}: {' but '.join(counts)}; line n must translate line n.")
    return list(zip(*sides, strict=True))


def download(folder: Path) -> None:
    """Fetch what is missing of the archives, verified by git blob id (`git hash-object FILE`)."""
    for archive, wanted, _ in ARCHIVES.values():
        path, url, content = folder / archive, ORIGIN + archive, io.BytesIO()
        missing = not path.is_file()
        if missing:
            try:
                with urllib.request.urlopen(url, timeout=30) as response:
                    size = int(response.headers.get("Content-Length") or 0) or None
                    with tqdm(total=size, unit="B", unit_scale=True, desc=archive) as bar:
                        while block := response.read(1 << 16):
                            bar.update(content.write(block))
            except Exception as error:  # a connection can fail in many ways
                raise UserError(f"{url} could not be fetched: {error!r}.") from error
        data = content.getvalue() if missing else path.read_bytes()
        if hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() != wanted:
            where = url if missing else path
            raise UserError(f"{where} is not the expected file (git blob id {wanted}): not used.")
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, archive)
        if missing:
            write_file(path, data)
        print(f"{path}: {len(data):,} bytes, verified")
    print(TED_LICENCE)


def write_file(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Replace a file as a whole: whatever happens, there is the old one or the new, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            content(file) if callable(content) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise UserError(f"{path} could not be written ({error}): nothing was changed.") from error
    finally:  # gone already where all went well
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what `write_file` left where the process was killed half-way."""
    for path in folder.glob(f".{name}.[0-9]*.tmp"):
        path.unlink(missing_ok=True)


# ---- The demo's data: everyday sentences made from a small table of phrases ----
def phrases(text: str) -> dict[str, str]:
    """Read "english = vietnamese, ..." into a dictionary."""
    return dict(entry.strip().split(" = ") for entry in text.split(","))


SUBJECTS = phrases("""i = tôi, we = chúng tôi, you = bạn, they = họ, he = anh ấy, she = cô ấy,
    my mother = mẹ tôi, my father = bố tôi""")
FEELINGS = phrases("""happy = vui, sad = buồn, tired = mệt, busy = bận, hungry = đói,
    thirsty = khát, sleepy = buồn ngủ, well = khỏe""")
ACTIONS = phrases("""drink coffee = uống cà phê, drink tea = uống trà, eat rice = ăn cơm,
    eat pho = ăn phở, read books = đọc sách, read the newspaper = đọc báo,
    watch television = xem ti vi, listen to music = nghe nhạc, play football = đá bóng,
    learn to swim = học bơi, learn to drive = học lái xe""")
PLACES = phrases("""market = chợ, supermarket = siêu thị, restaurant = nhà hàng, park = công viên,
    library = thư viện, hospital = bệnh viện, bank = ngân hàng, post office = bưu điện""")
# A counted or pointed-at thing takes a classifier, the first word here: "quyển sách", a book.
THINGS = phrases("""book = quyển sách, pen = cái bút, bag = cái túi, phone = chiếc điện thoại,
    bicycle = chiếc xe đạp, car = chiếc ô tô, cat = con mèo, dog = con chó""")
QUALITIES = phrases("beautiful = đẹp, expensive = đắt, cheap = rẻ, big = to, small = nhỏ")
POINTERS = phrases("this = này, that = kia")
HABITS = phrases("every day = mỗi ngày, every morning = mỗi sáng, every evening = mỗi tối")
TIMES = phrases("today = hôm nay, tonight = tối nay, tomorrow = ngày mai")
# Tables made from those: only English verbs change their form, only classifiers drop out.
ASKED = dict(itertools.islice(SUBJECTS.items(), 2, None))  # nobody asks "am i hungry"
PLANS = ACTIONS | {f"go to the {en}": f"đi {vi}" for en, vi in PLACES.items()}
VERBS = [(*en.partition(" ")[::2], vi) for en, vi in ACTIONS.items()]
DOING = {f"{verb}ing {rest}": vi for verb, rest, vi in VERBS}
DOES = {f"{verb}/{verb}{'e' * (verb == 'watch')}s {rest}": vi for verb, rest, vi in VERBS}
BARE = {en: vi.partition(" ")[2] for en, vi in THINGS.items()}

# {0}, {1}, {2} are filled from the tables that follow; of "am/are/is" the subject picks one.
PATTERNS = [
    ("{0} am/are/is {1}", "{0} {1}", SUBJECTS, FEELINGS),
    ("{0} am/are/is very {1}", "{0} rất {1}", SUBJECTS, FEELINGS),
    ("{0} am/are/is not {1}", "{0} không {1}", SUBJECTS, FEELINGS),
    ("am/are/is {0} {1}", "{0} có {1} không", ASKED, FEELINGS),
    ("{0} am/are/is {1}", "{0} đang {1}", SUBJECTS, DOING),
    ("am/are/is {0} {1}", "{0} có đang {1} không", ASKED, DOING),
    ("{0} like/likes to {1}", "{0} thích {1}", SUBJECTS, ACTIONS),
    ("{0} do/does not like to {1}", "{0} không thích {1}", SUBJECTS, ACTIONS),
    ("{0} want/wants to {1}", "{0} muốn {1}", SUBJECTS, PLANS),
    ("do/does {0} want to {1}", "{0} có muốn {1} không", ASKED, PLANS),
    ("{0} often {1}", "{0} hay {1}", SUBJECTS, DOES),
    ("{0} {1} {2}", "{0} {1} {2}", SUBJECTS, DOES, HABITS),
    ("{0} will {1} {2}", "{2} {0} sẽ {1}", SUBJECTS, PLANS, TIMES),
    ("{0} have/has a {1}", "{0} có một {1}", SUBJECTS, THINGS),
    ("{0} do/does not have a {1}", "{0} không có {1}", SUBJECTS, BARE),
    ("do/does {0} have a {1}", "{0} có {1} không", ASKED, BARE),
    ("{0} want/wants to buy a {1}", "{0} muốn mua một {1}", SUBJECTS, THINGS),
    ("{0} {1} is very {2}", "{1} {0} rất {2}", POINTERS, THINGS, QUALITIES),
    ("{0} {1} is not {2}", "{1} {0} không {2}", POINTERS, THINGS, QUALITIES),
    ("is {0} {1} {2}", "{1} {0} có {2} không", POINTERS, THINGS, QUALITIES),
    ("how much is {0} {1}", "{1} {0} giá bao nhiêu", POINTERS, THINGS),
    ("where is the {0}", "{0} ở đâu", PLACES),
    ("is the {0} near here", "{0} có ở gần đây không", PLACES),
    ("how do you get to the {0}", "làm sao để đến {0}", PLACES),
    ("where am/are/is {0}", "{0} đang ở đâu", ASKED),
    ("what am/are/is {0} doing", "{0} đang làm gì", ASKED),
]
FORMS = {"i": 0, "we": -2, "you": -2, "they": -2}  # of "am/are/is"; all others take the last


def demo_pairs() -> tuple[list[Pair], list[Pair]]:
    """Return (training pairs, held-out pairs), each (English, Vietnamese), no pair twice."""
    train, held_out = [], []
    for shift, (english, vietnamese, *tables) in enumerate(PATTERNS):
        # About forty sentences a pattern are enough: take every step-th diagonal of the grid
        # of combinations, other diagonals for other patterns, so every word gets its turn.
        step = min(5, math.ceil(math.prod(map(len, tables)) / 38))
        taken = 0
        for cells in itertools.product(*(enumerate(t.items()) for t in tables)):
            if (shift + sum(i for i, _ in cells)) % step:
                continue
            en, vi = zip(*(entry for _, entry in cells), strict=True)
            words = (w.split("/") for w in english.format(*en).split())
            forms = [w[FORMS.get(en[0], -1)] if len(w) > 1 else w[0] for w in words]
            # Every seventh sentence is kept from training, where two words or more combine.
            chosen = held_out if len(tables) > 1 and taken % 7 == 5 else train
            chosen.append((" ".join(forms), vietnamese.format(*vi)))
            taken += 1
    return train, held_out


def styled(pairs: Sequence[Pair]) -> list[Pair]:
    """Return each pair four times: bare, with a capital, with . or ?, and with both."""
    styles = []
    for pair in pairs:
        question = pair[0].split()[0] in ("am", "are", "is", "do", "does", "how", "what", "where")
        for end in ("", " ?" if question else " ."):
            styles.append(tuple(text + end for text in pair))
            styles.append(tuple(text[0].upper() + text[1:] + end for text in pair))
    return styles


# ---- Text: people's and the corpus's ----

STRAIGHT = str.maketrans("’‘“”", "''\"\"")  # telephones type curly quotes, IWSLT has none
VIETNAMESE_TITLES = ("TP", "TS", "ThS", "GS", "PGS", "BS")  # unknown to sacremoses


class Moses:
    """The border between people's text, It's, and the corpus's, It &apos;s.

    IWSLT is tokenised and escaped as the Moses toolkit does it. Inside the program text keeps that
    form, so that BLEU compares with published figures; sacremoses converts at the border.
    """

    def __init__(self, language: str) -> None:
        from sacremoses import MosesDetokenizer, MosesTokenizer

        self.tokenizer, self.detokenizer = MosesTokenizer(language), MosesDetokenizer(language)
        self.short = {*self.tokenizer.NONBREAKING_PREFIXES, *VIETNAMESE_TITLES}
        # The same answers as its own, which make these sets anew for each word before a stop.
        letters, lower = frozenset(self.tokenizer.IsAlpha), frozenset(self.tokenizer.IsLower)
        self.tokenizer.isanyalpha = lambda text: not letters.isdisjoint(text)
        self.tokenizer.islower = lower.issuperset

    def to_corpus(self, text: str) -> str:
        return clean(self.tokenizer.tokenize(text.translate(STRAIGHT), return_str=True))

    def to_text(self, corpus: str) -> str:
        return clean(self.detokenizer.detokenize(corpus.split()))

    def sentences(self, text: str) -> list[str]:
        """Split ordinary text after . ! ? … but not after an abbreviation or before lower case.

        >>> Moses("en").sentences("Mr. Hoa is in the U.S. now. Is he late? No.")
        ['Mr. Hoa is in the U.S. now.', 'Is he late?', 'No.']
        """
        parts, start = [], 0
        for match in re.finditer(r"(?<![.!?…])([.!?…]+)[\"'”’»)\]]*\s+(?=\S)", text):
            word = text[start : match.start()].rpartition(" ")[2].lstrip("\"'“‘«([")
            short = word in self.short or "." in word
            if not text[match.end()].islower() and not (match[1] == "." and short):
                parts.append(text[start : match.end()].rstrip())
                start = match.end()
        return [*parts, text[start:]]


# ---- Subwords: byte-pair encoding ----
def train_bpe(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn byte-level BPE (Sennrich et al., 2016): every text can be written, none is unknown.

    A piece may be a word with the space before it, so that decoding restores every space. Ids 0, 1
    and 2 are reserved, but no text stands for them: a typed "<pad>" is five characters. (The names
    that the library wants for them end with a space, which no byte-level piece contains.)
    """
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<pad> ", "<bos> ", "<eos> "]
    how = dict(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend(" ")])
    words = pre_tokenizers.Split(Regex(" ?[^ ]+| +"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=vocab_size, **how))
    # The ids stay reserved; without "added_tokens" the names lose their power over text.
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"added_tokens": []}))


def text_to_ids(tokenizer: Tokenizer, lines: Sequence[str]) -> Rows:
    """Return each line's subword ids, then eos: also of a source, unlike in lessons 5 to 7."""
    return [np.array([*e.ids, EOS], dtype=np.int32) for e in tokenizer.encode_batch(list(lines))]


def ids_to_text(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Return the text of subword ids: one clean line, whatever the ids."""
    return clean(tokenizer.decode([i for i in ids if i > EOS], skip_special_tokens=False))


def text_hash(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def encode_pairs(pairs: list[Pair], tokenizers: list[Tokenizer], name: str) -> tuple[Sides, str]:
    """Encode pairs, leave out the unusable ones (both sides together); say which and why."""
    sides = [text_to_ids(t, [pair[i] for pair in pairs]) for i, t in enumerate(tokenizers)]
    kept, dropped = [], Counter()
    for pair in zip(*sides, strict=True):
        short, long = sorted(len(row) - 1 for row in pair)
        if short == 0:
            dropped["with an empty side"] += 1
        elif long > MAX_LEN:
            dropped[f"longer than {MAX_LEN} subwords"] += 1
        elif long > 3 * short + 10:
            dropped["with sides of very different length"] += 1
        else:
            kept.append(pair)
    why = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
    report = f"{name}: {len(pairs):,} pairs read, {len(kept):,} kept; dropped: {why}"
    if not kept:
        raise UserError(f"No usable sentence pair. {report}. Line n must translate line n.")
    return [list(side) for side in zip(*kept, strict=True)], report


class Prepared(NamedTuple):
    """What training needs of the data."""

    tokenizers: list[Tokenizer]
    train: Sides
    dev: Sides
    report: list[str]  # what was read, dropped and held out
    fingerprint: str  # of the text and the settings that it was prepared with


def prepare(config: Config, data: Path, run: Path, resumed: str | None = None) -> Prepared:
    """Read the data, learn BPE, encode; or take all of it from the run's folder if it fits.

    `resumed` is the fingerprint of the data that a run to be resumed was started with. Without it a
    new run begins: once all is ready, what an earlier run left in the folder is removed.
    """
    report = []
    if config.demo:
        if sorted(config.languages) != ["en", "vi"]:
            raise UserError(f"The demo translates en-vi and vi-en, not {config.direction}.")
        order = 1 if config.direction == "en-vi" else -1
        train, dev = ([pair[::order] for pair in styled(pairs)] for pairs in demo_pairs())
    else:
        train = load_pairs(data, "train", config.languages)
        dev = load_pairs(data, "dev", config.languages, required=False)
    if dev is None:
        shuffled = np.random.default_rng(0).permutation(len(train)).tolist()
        held_out = set(shuffled[: min(2000, max(1, len(train) // 100))])
        dev = [pair for i, pair in enumerate(train) if i in held_out]
        train = [pair for i, pair in enumerate(train) if i not in held_out]
        report.append(f"no dev files in {data}: {len(dev):,} training pairs are held out instead")
    fingerprint = text_hash(json.dumps([config.direction, config.vocab_size, MAX_LEN, train, dev]))
    if resumed not in (None, fingerprint):
        raise UserError(f"{run} was started with another text: give the same --data.")

    cache, stored = run / "prepared.pth", {}
    run.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(Exception):  # whatever is wrong with the cache: prepare again
        stored = dict(torch.load(cache, weights_only=True))
    if stored.get("fingerprint") == fingerprint:
        report = [*stored["report"], "(prepared earlier)"]
    else:
        tokenizers = [train_bpe((pair[i] for pair in train), config.vocab_size) for i in (0, 1)]
        sets = []
        for name, pairs in (("train", train), ("dev", dev)):
            sides, told = encode_pairs(pairs, tokenizers, name)
            sets.append([(torch.tensor(np.concatenate(s)), list(map(len, s))) for s in sides])
            report.append(told)
        texts = [tokenizer.to_str() for tokenizer in tokenizers]
        stored = dict(fingerprint=fingerprint, tokenizers=texts, sets=sets, report=report)
        write_file(cache, lambda file: torch.save(stored, file))
    if resumed is None:
        old = (STATE, BEST, METRICS, "curve.png")  # the state first: it is no use without the rest
        for path in (*(run / name for name in old), *run.glob("test.beam*")):
            path.unlink(missing_ok=True)
    for language, text in zip(config.languages, stored["tokenizers"], strict=True):
        write_file(run / f"{language}_tokenizer.json", text.encode("utf-8"))
    tokenizers = [Tokenizer.from_str(text) for text in stored["tokenizers"]]
    sets = [[np.split(i.numpy(), np.cumsum(n)[:-1]) for i, n in sides] for sides in stored["sets"]]
    return Prepared(tokenizers, *sets, report, fingerprint)


# ---- Batches ----
def plan_batches(src: Rows, tgt: Rows, budget: int, seed: Any) -> list[np.ndarray]:
    """Divide the pairs into batches of like lengths; return each batch's indices. A seed fixes it.

    n pairs whose longest side has L tokens hold n * L <= budget tokens, padding included. Attention
    is quadratic in L: beyond 256 tokens a pair counts L / 256 times more, so that one long line
    does not exhaust the memory. A pair over the budget gets a batch of its own.
    """
    rng = np.random.default_rng(seed)
    src_len, tgt_len = (np.array([len(row) for row in rows]) for rows in (src, tgt))
    order = rng.permutation(len(src_len))  # decides between pairs of equal lengths
    order = order[np.lexsort((src_len[order], tgt_len[order]))]
    longest = np.maximum(src_len, tgt_len)[order]
    batches, start, widest = [], 0, 0.0
    for end, cost in enumerate(longest * np.maximum(1, longest / 256)):
        if end > start and (end + 1 - start) * max(widest, cost) > budget:
            batches.append(order[start:end])
            start, widest = end, 0.0
        widest = max(widest, cost)
    batches.append(order[start:])
    return [batches[i] for i in rng.permutation(len(batches))]


def pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of ids as one tensor (rows, longest), filled up with PAD on the right."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=PAD)


# ---- The model, by hand ----
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


def build_model(config: Config, vocab_sizes: Sequence[int]) -> Transformer:
    """Build the untrained model of a configuration.

    Pre-norm is the default here, unlike in 2017: between the final norm and the embeddings the
    residual stream passes no norm, what tells tokens apart survives in deep stacks (lesson 4
    measures it), and training bears a high rate after a short warm-up. Post-norm needs a lower,
    later one.
    """
    c = config
    sizes = (c.d_model, c.n_heads, c.d_ff, c.n_layers, c.dropout, c.norm_first, c.tie)
    return Transformer(*vocab_sizes, *sizes)


# ---- Loss and schedule ----
def shift_right(tgt: Tensor) -> Tensor:
    """Return the decoder input: bos, then the target without its last token."""
    return torch.cat([torch.full_like(tgt[:, :1], BOS), tgt[:, :-1]], dim=1)


class SmoothedCrossEntropy(torch.autograd.Function):
    """`F.cross_entropy` with label smoothing, summed: sum of -q log p, where p = softmax(logits).

    q is 1 - smoothing for the target, and smoothing is spread over all V classes. The gradient is
    p - q. On a CPU some rows at a time, as many as its caches hold, give loss and gradient in one
    go; logits (N, V) in fp32, their softmax and so on would be by far the largest tensors.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        total, gradient = torch.zeros((), device=logits.device), torch.empty_like(logits)
        rows, even = 64 if logits.is_cpu else len(logits), smoothing / logits.size(1)
        parts = (tensor.split(rows) for tensor in (logits, targets[:, None], gradient))
        for part, target, result in zip(*parts, strict=True):
            log_p = part.log_softmax(1, dtype=torch.float32)
            total -= (1 - smoothing) * log_p.gather(1, target).sum() + even * log_p.sum()
            if ctx.needs_input_grad[0]:  # not where a loss is only measured
                certain = torch.full_like(target, smoothing - 1, dtype=torch.float32)
                result.copy_(log_p.exp_().sub_(even).scatter_add_(1, target, certain))
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * scale, None, None


def batch_loss(model: Transformer, src: Tensor, tgt: Tensor, smoothing: float) -> Tensor:
    """Return the cross-entropy summed over the real tokens of tgt (B, T), which ends with eos.

    The decoder reads bos and then the target, one place later than it predicts it. Only states at
    real tokens meet the output matrix: elsewhere the loss would be thrown away.
    """
    states = model.decode(shift_right(tgt), model.encode(src), src)
    real = tgt != PAD
    logits = model.output(states[real])  # (real tokens, vocabulary)
    return SmoothedCrossEntropy.apply(logits, tgt[real], smoothing)


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


# ---- Where to compute, and how to do it fast ----
def find_device(name: str) -> torch.device:
    """Return the device to compute on; under torchrun, also join the other processes."""
    if name == "auto":
        apple = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else apple
    if name == "cuda" and WORLD > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise UserError(f"--device {name} cannot be used here ({reason}).") from error
    if WORLD > 1:
        if name.startswith("cuda"):
            torch.cuda.set_device(name)
        dist.init_process_group("nccl" if name.startswith("cuda") else "gloo")
    return torch.device(name)


def cpu_has_bf16() -> bool:
    """Return whether this processor itself multiplies bf16 matrices (AVX512-BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "amx_tile"))


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # types of 16 bits, half of fp32


def cpu_packs_fp16() -> bool:
    """Return whether torch can keep weights in fp16 here, packed for products in fp32 (x86)."""
    try:
        torch.ops.quantized.linear_prepack_fp16(torch.zeros(1, 1), None)
    except (RuntimeError, AttributeError):
        return False
    return True


def choose_precision(wanted: str, device: torch.device, translating: bool = False) -> str:
    """Return fp32, bf16 or fp16; "auto" is the fastest that the device computes by itself.

    On a CPU fp16 is for translating only: weights are kept so (PackedLinear), sums are fp32.
    """
    if wanted not in ("auto", "fp32", *HALF):
        raise UserError(f"--precision must be auto, fp32, bf16 or fp16, not {wanted!r}.")
    packs = translating and device.type == "cpu" and cpu_packs_fp16()
    refused = [("fp16", "mps"), ("bf16", "mps"), *([] if packs else [("fp16", "cpu")])]
    if (wanted, device.type) in refused:
        what = "translating" if translating else "training"
        raise UserError(f"--precision {wanted} is not for {what} on {device.type}: use auto.")
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    if device.type == "cpu" and cpu_has_bf16():
        return "bf16"
    return "fp16" if packs else "fp32"


def return_freed_memory() -> None:
    """Have glibc (on Linux) return freed memory, of which it else keeps more and more."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class FastDropout(nn.Module):
    """`nn.Dropout` for CPUs, four times as fast: a random byte decides for an element, not a float.

    p is rounded to 1/256; the scale fits the rounded p, so the expectation is exact.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.threshold = min(255, round(p * 256))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.threshold == 0:
            return x
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.uint8)[: x.numel()].view(x.shape) >= self.threshold
        return x * kept.to(x.dtype).mul_(256 / (256 - self.threshold))


class PackedLinear(nn.Module):
    """`nn.Linear` for translating on a CPU: weights in fp16, laid out once; the rest is fp32.

    A step of the search multiplies few rows by all weights: to read these, and to lay them out anew
    as a product in fp32 does, takes longer than the arithmetic.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if not linear.weight.abs().max() <= torch.finfo(torch.float16).max:  # or it is no number
            raise UserError("The model's weights do not fit into fp16: take --precision fp32.")
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


def set_precision(model: nn.Module, precision: str) -> None:
    """Have a trained fp32 model translate in a precision from now on."""
    if precision == "fp16" and next(model.parameters()).is_cpu:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    setattr(module, name, PackedLinear(child))
    else:
        model.to(HALF.get(precision))


# ---- Training ----
class Trainer:
    """Model, data and optimizer of one run; `step` counts the updates done.

    All that is random is a function of (seed, epoch) or (seed, step, rank), and the rate is one of
    the step: so weights, optimizer and the step number are all that an exact resume needs.
    """

    def __init__(self, config: Config, prepared: Prepared, device: torch.device, run: Path) -> None:
        self.config, self.prepared, self.device, self.run = config, prepared, device, run
        self.vocab_sizes = [tokenizer.get_vocab_size() for tokenizer in prepared.tokenizers]
        torch.manual_seed(config.seed)
        self.model = build_model(config, self.vocab_sizes).to(device)
        for module in list(self.model.modules()):
            if device.type == "cpu" and isinstance(getattr(module, "dropout", None), nn.Dropout):
                module.dropout = FastDropout(config.dropout)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.precision = choose_precision(config.precision, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        # AdamW is Adam that also shrinks each weight by 0.01 * rate a step (weight decay).
        adam = dict(betas=(0.9, 0.98), eps=1e-9, fused=device.type != "mps")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **adam)
        self.step, self.total, self.best, self.metrics = 0, 0, math.inf, []
        self.caught, self.wish = 0, False  # a signal's number; whether any process is to stop
        self.steps_per_epoch = len(self.groups(0))

    def groups(self, epoch: int) -> list[list[np.ndarray]]:
        """Return the batches of an epoch, grouped into steps: `accumulate` for each process."""
        seed, size = (self.config.seed, epoch), self.config.accumulate * WORLD
        batches = plan_batches(*self.prepared.train, self.config.batch_tokens, seed)
        return [batches[i : i + size] for i in range(0, len(batches), size)]

    def loss(self, sides: Sides, batch: np.ndarray, smoothing: float) -> Tensor:
        """Return the summed loss of a batch, in this run's precision (weights stay fp32)."""
        ids = [pad_rows([rows[i] for i in batch]) for rows in sides]
        if self.device.type == "cuda":  # from pinned memory the copy runs beside the computation
            ids = [side.pin_memory() for side in ids]
        src, tgt = (side.to(self.device, non_blocking=True) for side in ids)
        half = HALF.get(self.precision)
        with torch.autocast(self.device.type, half, enabled=half is not None):
            return batch_loss(self.model, src, tgt, smoothing)

    def backward(self, group: Sequence[np.ndarray]) -> tuple[float, int]:
        """Add up the gradient of a step's mean loss per token; return that loss and the tokens.

        Each batch's summed loss is divided by the tokens of the whole step, so that one process
        with two batches computes the same as two with one each.
        """
        seed = np.random.SeedSequence((self.config.seed, self.step, RANK))
        torch.manual_seed(int(seed.generate_state(1)[0]))  # decides the dropout of this step
        self.model.train()
        self.optimizer.zero_grad(set_to_none=False)
        tokens = sum(len(self.prepared.train[1][i]) for batch in group for i in batch)
        mean = torch.zeros((), device=self.device)
        for batch in group[RANK::WORLD]:
            loss = self.loss(self.prepared.train, batch, SMOOTHING) / tokens
            self.scaler.scale(loss).backward()
            mean += loss.detach()
        if WORLD > 1:  # one message: loss, wish to stop, gradients; all of them summed
            wish = torch.tensor(float(self.wish), device=self.device)
            parts = [mean, wish, *(parameter.grad for parameter in self.model.parameters())]
            message = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(message)
            summed = message.split([part.numel() for part in parts])
            for part, values in zip(parts, summed, strict=True):
                part.copy_(values.view_as(part))
            self.wish = bool(wish)
        return float(mean), tokens

    def update(self, group: Sequence[np.ndarray]) -> tuple[float, int]:
        """Do one step of training; return its loss per target token and its target tokens."""
        loss, tokens = self.backward(group)
        self.scaler.unscale_(self.optimizer)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), CLIP))
        if not math.isfinite(loss if self.scaler.is_enabled() else loss + norm):
            first = self.prepared.train[0][group[0][0]]
            batch = f"a batch with {ids_to_text(self.prepared.tokenizers[0], first)[:50]!r}"
            where = f"in step {self.step + 1}, {batch}: loss {loss}, gradient norm {norm}"
            advice = "--restart with a lower --lr or a longer --warmup, or --precision fp32"
            raise UserError(f"Training diverged {where}. The checkpoint is kept. Try {advice}.")
        self.step += 1
        rate = learning_rate(self.step, self.total, self.config.lr, self.config.warmup)
        self.optimizer.param_groups[0]["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, tokens

    @torch.no_grad()
    def dev_loss(self) -> float:
        """Return the cross-entropy per token on the dev set, without smoothing and dropout."""
        self.model.eval()
        batches = plan_batches(*self.prepared.dev, self.config.batch_tokens, 0)
        total = sum(float(self.loss(self.prepared.dev, batch, 0.0)) for batch in batches)
        return total / sum(map(len, self.prepared.dev[1]))

    def plan_steps(self) -> float:
        """Fix the steps of a new run; return the seconds to go, measured without any update."""
        sample = self.groups(0)[:: max(1, self.steps_per_epoch // 20)][:20]  # of all lengths
        self.backward(sample[0])  # the first also pays for setting up
        start = time.perf_counter()
        for group in sample:
            self.backward(group)
        middle = time.perf_counter()
        self.dev_loss()
        validations = 1 / min(self.steps_per_epoch, VALIDATE_EVERY)  # a step's share of them
        seconds = (middle - start) / len(sample) + (time.perf_counter() - middle) * validations
        per_step = torch.tensor(seconds, device=self.device)
        if WORLD > 1:
            dist.all_reduce(per_step, dist.ReduceOp.MAX)
        in_time = max(1, round(self.config.minutes * 60 / float(per_step)))
        in_epochs = self.config.epochs * self.steps_per_epoch
        self.total = self.total or (in_time if self.config.minutes else in_epochs)
        return (self.total - self.step) * float(per_step)

    def save(self, name: str, **parts: Any) -> None:
        """Write a file of this run, to be read by `load_file`."""
        content = {"format": FORMAT, "config": asdict(self.config), **parts}
        write_file(self.run / name, lambda file: torch.save(content, file))

    def validate(self, loss: float, speed: float) -> None:
        """Measure the dev loss, keep the weights if they are the best; print it and two samples.

        Perplexity is exp(loss): as if so many tokens were equally likely at each place.
        """
        dev_loss, epoch = self.dev_loss(), self.step / self.steps_per_epoch
        row = dict(step=self.step, epoch=epoch, loss=loss, dev_loss=dev_loss)
        self.metrics.append({**row, "tokens_per_second": speed})
        tqdm.write(
            f"epoch {epoch:.2f}, step {self.step:,}: loss {loss:.3f}, dev loss {dev_loss:.3f}, "
            f"perplexity {math.exp(min(dev_loss, 99)):.1f}{' (best)' * (dev_loss < self.best)}"
        )
        if dev_loss < self.best:
            self.best = dev_loss
            hashes = [text_hash(tokenizer.to_str()) for tokenizer in self.prepared.tokenizers]
            about = dict(vocab_sizes=self.vocab_sizes, tokenizers=hashes, step=self.step)
            self.save(BEST, **about, dev_loss=dev_loss, weights=self.model.state_dict())
        rows = self.prepared.dev[0]
        samples = [rows[len(rows) // 3], rows[2 * len(rows) // 3]]
        borders = [Moses(language) for language in self.config.languages]
        for sample in zip(samples, translate_ids(self.model, samples, beam=1), strict=True):
            texts = map(ids_to_text, self.prepared.tokenizers, sample)
            source, output = (b.to_text(t) for b, t in zip(borders, texts, strict=True))
            tqdm.write(f"    {source}\n     -> {output}")

    def save_state(self) -> None:
        """Write what an exact resume needs, and the metrics so far."""
        parts = {n: getattr(self, n).state_dict() for n in ("model", "optimizer", "scaler")}
        progress = [self.step, self.total, self.best, self.metrics]
        about = dict(data=self.prepared.fingerprint, processes=WORLD, progress=progress)
        self.save(STATE, **about, **parts)
        lines = "".join(json.dumps(row) + "\n" for row in self.metrics)
        write_file(self.run / METRICS, lines.encode("utf-8"))

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to where `save_state` wrote this."""
        for name in ("model", "optimizer", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        self.step, self.total, self.best, self.metrics = state["progress"]

    def note_signal(self, number: int, frame: object) -> None:
        """Remember Ctrl-C or SIGTERM, so that training ends its step and saves."""
        if self.caught:
            raise KeyboardInterrupt  # asked twice: at once
        self.caught = number

    def run_to_end(self) -> int:
        """Train, saving as it goes; return 0, or 128 + the number of the signal that stopped it."""
        saved = counted = time.monotonic()
        loss, tokens, plan = 0.0, 0, []  # smoothed; target tokens since `counted`; an epoch's steps
        bar = tqdm(total=self.total, initial=self.step, unit="step", disable=RANK > 0 or None)
        with bar, contextlib.ExitStack() as afterwards:
            for number in (signal.SIGINT, signal.SIGTERM):
                afterwards.callback(signal.signal, number, signal.signal(number, self.note_signal))
            if RANK == 0 and self.step == 0:
                self.save_state()  # from now on --resume goes on, whenever this is killed
            while self.step < self.total:
                epoch, index = divmod(self.step, self.steps_per_epoch)
                if index == 0 or not plan:
                    plan = self.groups(epoch)
                self.wish = bool(self.caught)
                newest, new_tokens = self.update(plan[index])
                loss, tokens = 0.95 * loss + 0.05 * newest if loss else newest, tokens + new_tokens
                rate, now = self.optimizer.param_groups[0]["lr"], time.monotonic()
                speed = tokens / (now - counted)
                text = f"loss {loss:.3f}, rate {rate:.1e}, {speed:,.0f} target tokens/s"
                bar.set_postfix_str(text, refresh=False)
                bar.update()
                if self.step % 50 == 0:
                    return_freed_memory()
                ended = self.step == self.total or self.step % self.steps_per_epoch == 0
                stop = self.wish and self.step < self.total
                if RANK == 0:
                    if validating := ended or self.step % VALIDATE_EVERY == 0:
                        self.validate(loss, speed)
                        counted, tokens = time.monotonic(), 0
                    elif self.step % 50 == 0:
                        self.metrics.append({"step": self.step, "loss": loss, "rate": rate})
                    if validating or stop or now - saved > SAVE_EVERY:
                        self.save_state()
                        saved = time.monotonic()
                if stop:
                    return 128 + (self.caught or signal.SIGTERM)
        return 0

    def draw_curve(self) -> str:
        """Draw the losses into curve.png; return a sentence about it."""
        path = self.run / "curve.png"
        try:
            from matplotlib.figure import Figure

            figure = Figure(figsize=(7, 4), layout="constrained")
            axes = figure.subplots()
            for key, label, style in (
                ("loss", "training (smoothed labels, dropout)", "-"),
                ("dev_loss", "dev", "o--"),
            ):
                points = [(row["step"], row[key]) for row in self.metrics if key in row]
                axes.plot(*zip(*points, strict=True), style, label=label)
            axes.set(xlabel="step", ylabel="cross-entropy per target token (nats)")
            axes.set_title(self.run.name, parse_math=False)
            axes.legend()
            write_file(path, lambda file: figure.savefig(file, format="png", dpi=150))
        except Exception as error:  # a picture is no reason to fail after hours of training
            return f"No curve.png ({error})."
        return f"The curve is in {path}."


# ---- The folder of a run ----
@contextlib.contextmanager
def lock_folder(run: Path) -> Iterator[None]:
    """Keep others from writing this folder until this process ends; leave no new, empty one."""
    new = not run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = sqlite3.connect(run / "lock", timeout=0, isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")  # SQLite knows how to lock a file on every system
    except (OSError, sqlite3.Error) as error:
        why = f"Another process trains in {run}, or it cannot be written ({error})"
        raise UserError(f"{why}: wait, or take another --run.") from error
    try:
        remove_leftovers(run)
        yield
    finally:
        lock.close()
        with contextlib.suppress(OSError):
            if new and [path.name for path in run.iterdir()] == ["lock"]:
                (run / "lock").unlink()
                run.rmdir()


def load_file(path: Path) -> dict[str, Any] | None:
    """Return what this program saved, None if nothing; code in a file is never run."""
    if not path.exists():
        return None
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch raises or warns as the file happens to be broken
        stored = torch.load(path, map_location="cpu", weights_only=True)
        if stored["format"] == FORMAT:
            return stored
    raise UserError(f"{path} cannot be read: it is damaged, or not saved by this program.")


@contextlib.contextmanager
def refusing_misfits(path: Path) -> Iterator[None]:
    """Turn what goes wrong in using a sound file with other content into a sentence."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} does not fit this program ({str(error)[:100]!r}).") from error


def open_run(run: Path, named: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """Return the stored state of a run to be resumed, or None where a new one may begin.

    `named` holds the settings that the command line names: a run to be resumed must have the same.
    A demo is replaced without asking, since it costs a minute; a full run only with --restart.
    """
    state = load_file(run / STATE)
    if resume and state:
        config = state["config"]
        wrong = [f"{flag(n)} {config[n]}" for n, value in named.items() if config[n] != value]
        if wrong:
            raise UserError(f"{run} was started with {', '.join(wrong)}: keep that, or --restart.")
        if state["processes"] != WORLD:
            raise UserError(f"{run} was started with {state['processes']} processes, not {WORLD}.")
        return state
    saved = state or load_file(run / BEST)
    if saved and not (named["demo"] and saved["config"]["demo"]):
        advice = "--resume goes on with it, " if state else ""
        raise UserError(f"{run} holds a run: {advice}--restart replaces it.")
    if resume:
        print(f"Nothing to resume in {run}: starting afresh.")
    elif saved:
        print(f"Replacing the demo in {run}.")
    return None


# ---- Search ----
def length_penalty(length: Tensor | float, alpha: float) -> Tensor | float:
    """((5 + length) / 6)^alpha (Wu et al., 2016); a hypothesis scores log P / penalty."""
    return ((5 + length) / 6) ** alpha


class StepDecoder:
    """`Transformer.decode` and the output matrix for search: one token of every hypothesis a call.

    It computes the same, up to rounding, arranged for few rows (one a hypothesis) and many calls:
    one memory for all hypotheses of a sentence, and the past's keys and values as whole vectors,
    which are put into another order from one buffer to the next.
    """

    def __init__(self, model: Transformer, src: Tensor, beam: int) -> None:
        self.model, self.beam, self.src_mask = model, beam, padding_mask(src)
        self.places = torch.arange(len(src), device=src.device) * beam  # at first one a sentence
        memory = model.encode(src)
        caches = model.new_caches(memory)
        self.memory = [[part.contiguous() for part in cache.memory] for cache in caches]
        self.length, self.d_model = 0, memory.size(-1)
        room = (src.size(1) + EXTRA_OUTPUT) * 2 * len(src) * beam * self.d_model  # at most
        self.buffers = [memory.new_empty(room) for _ in range(len(caches) + 1)]

    def past(self, i: int) -> Tensor:
        """Return a view of layer i's keys and values, (length, 2, rows, d_model)."""
        shape = (self.length, 2, len(self.places), self.d_model)
        return self.buffers[i][: math.prod(shape)].view(shape)

    def __call__(self, ids: Tensor) -> Tensor:
        """Map the newest ids (rows) to the logits of the next (rows, vocabulary)."""
        model = self.model
        x = model.position(model.tgt_embedding(ids[:, None]), self.length)[:, 0]
        self.length += 1
        for i, layer in enumerate(model.decoder):
            x = layer.residual1(x, functools.partial(self.self_attend, i, layer.self_attention))
            x = layer.residual2(x, functools.partial(self.cross_attend, i, layer.cross_attention))
            x = layer.residual3(x, layer.feed_forward)
        return model.output(model.decoder_norm(x))

    def self_attend(self, i: int, attention: MultiHeadAttention, y: Tensor) -> Tensor:
        heads, past = (attention.n_heads, attention.d_k), self.past(i)
        past[-1, 0], past[-1, 1] = attention.w_k(y), attention.w_v(y)
        keys, values = past.unflatten(-1, heads).unbind(1)  # each (T, rows, heads, d_k)
        # One query a row: sums of products of vectors are faster than products of matrices.
        query = (attention.w_q(y) / math.sqrt(attention.d_k)).unflatten(-1, heads)
        weights = (keys * query).sum(-1, keepdim=True).softmax(dim=0)
        return attention.w_o((weights * values).sum(dim=0).flatten(1))

    def cross_attend(self, i: int, attention: MultiHeadAttention, y: Tensor) -> Tensor:
        side_by_side = y.new_zeros(len(self.src_mask) * self.beam, self.d_model)  # a sentence's
        side_by_side[self.places] = y
        y = side_by_side.view(-1, self.beam, self.d_model)
        y, _ = attention.attend(y, *self.memory[i], self.src_mask)
        return y.flatten(0, 1)[self.places]

    def keep(self, rows: Tensor, places: Tensor, sentences: Tensor | None) -> None:
        """Go on with these hypotheses, in this order, of these sentences (None: of all).

        A place is sentence * beam + number in the beam; not all need to be taken.
        """
        if sentences is None and self.beam == 1:
            return  # the rows and their order are the same
        before = [self.past(i) for i in range(len(self.memory))]
        self.places = places
        if sentences is not None:
            self.src_mask = self.src_mask[sentences]
            self.memory = [[part[sentences] for part in pair] for pair in self.memory]
        for i, past in enumerate(before):  # layer i moves to the buffer that is free
            self.buffers[i], self.buffers[-1] = self.buffers[-1], self.buffers[i]
            torch.index_select(past, 2, rows, out=self.past(i))


@torch.inference_mode()
def beam_search(
    model: Transformer, src: Tensor, beam: int = 4, alpha: float = 0.6, stop: Event | None = None
) -> Ids:
    """Translate source ids (B, S) into B lists of target ids, without bos and eos.

    Each step keeps the `width` best hypotheses (beginnings of a translation) of a sentence; one
    that ends with eos leaves the beam and the width shrinks by one. A sentence is done when its
    beam is empty, or when no hypothesis in it could still win even if all its further tokens were
    certain. A translation ends EXTRA_OUTPUT tokens beyond its source at the latest. Beam 1 is
    greedy. `stop`, set by another thread, ends the search where it stands.
    """
    model.eval()
    device, n = src.device, src.size(0)
    limit = (src != PAD).sum(1) + EXTRA_OUTPUT  # (open sentences), like all that follows
    open_now, width = torch.arange(n, device=device), torch.full((n,), beam, device=device)
    best_score = torch.full((n,), -math.inf, device=device)
    best: Ids = [[] for _ in range(n)]
    scores = torch.full((n, beam), -math.inf, device=device)  # summed log-probabilities
    scores[:, 0] = 0.0  # at first the hypotheses of a sentence are all alike: one of them counts
    live = scores.isfinite()  # only these hypotheses have a row in history and in the decoder
    history = torch.full((n, 1), BOS, device=device)
    decoder = StepDecoder(model, src, beam)

    for length in itertools.count(1):
        log_p = decoder(history[:, -1]).log_softmax(-1, dtype=torch.float32)
        log_p[:, [PAD, BOS]] = -math.inf  # never an answer
        log_p, words = log_p.topk(min(beam, log_p.size(1)))  # more of one cannot stay
        total = scores.new_full((*scores.shape, log_p.size(1)), -math.inf)
        total[live] = scores[live][:, None] + log_p
        top, index = total.flatten(1).topk(beam)  # (open, beam)
        number = (live.flatten().cumsum(0) - 1).view_as(live)  # of a hypothesis' row
        origin = number.gather(1, index // log_p.size(1))
        token = words[origin, index % log_p.size(1)]
        inside = (torch.arange(beam, device=device) < width[:, None]) & top.isfinite()
        ended = inside & ((token == EOS) | (length >= limit)[:, None])

        final = (top / length_penalty(length, alpha)).masked_fill(~ended, -math.inf)
        leading, which = final.max(1)
        for i in (leading > best_score).nonzero().flatten().tolist():
            row = [*history[origin[i, which[i]], 1:].tolist(), int(token[i, which[i]])]
            best[int(open_now[i])] = row[:-1] if row[-1] == EOS else row
        best_score = torch.maximum(best_score, leading)

        width = width - ended.sum(1)
        scores = top.masked_fill(~inside | ended, -math.inf)
        hope = scores.max(1).values / length_penalty(limit.float(), alpha)
        alive = (width > 0) & (hope > best_score)
        if best_score[~alive].isneginf().any():  # done without any hypothesis
            raise UserError("The model computes no numbers: try --precision fp32, or retrain it.")
        kept = alive.nonzero().flatten()
        if len(kept) == 0 or (stop and stop.is_set()):
            return best
        live = scores[kept].isfinite()
        rows = origin[kept][live]
        history = torch.cat([history[rows], token[kept][live][:, None]], dim=1)
        places = live.flatten().nonzero().flatten()
        decoder.keep(rows, places, kept if len(kept) < len(scores) else None)
        open_now, limit = open_now[kept], limit[kept]
        width, best_score, scores = width[kept], best_score[kept], scores[kept]


def translate_ids(model: Transformer, sources: Rows, beam: int, progress: bool = False) -> Ids:
    """Translate any number of encoded sentences, many at once; return them in their order.

    On a CPU each thread has a batch of its own, where there are several: a step of one is too small
    to share. A batch has at most 4096 places, padding and hypotheses included.
    """
    device = next(model.parameters()).device
    available = torch.get_num_threads()
    threads = available if device.type == "cpu" else 1
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))  # like lengths together
    fair = math.ceil(len(sources) / threads)  # a thread's share
    batches, results, start = [], [[] for _ in sources], 0
    while start < len(order):
        size = max(1, min(fair, 4096 // (beam * len(sources[order[start]]))))
        batches.append(order[start : start + size])
        start += size

    stop = Event()

    def search(chosen: list[int]) -> tuple[list[int], Ids]:
        src = pad_rows([sources[i] for i in chosen]).to(device)
        return chosen, beam_search(model, src, beam, stop=stop)

    workers = max(1, min(threads, len(batches)))
    pool = ThreadPool(workers, torch.set_num_threads, [threads // workers])
    run = map if workers == 1 else pool.imap_unordered
    try:
        with tqdm(total=len(order), unit="sentence", disable=None if progress else True) as bar:
            for chosen, outputs in run(search, batches):
                for i, output in zip(chosen, outputs, strict=True):
                    results[i] = output
                bar.update(len(chosen))
    finally:  # after Ctrl-C: a thread still at work when Python ends would crash it
        stop.set()
        pool.terminate()
        pool.join()
        torch.set_num_threads(available)  # for threads to come, which else take over a worker's
    return results


# ---- Using a trained run: translate, evaluate, prompt ----
class Translator:
    """Ordinary text in, ordinary text out, with the best checkpoint of a run.

    "auto" is the fastest precision of the device, but fp32 for a run trained with --precision fp32.
    """

    def __init__(
        self, run: Path, device: torch.device, beam: int = 4, precision: str = "auto"
    ) -> None:
        checkpoint = load_file(run / BEST)
        if checkpoint is None:
            raise UserError(f"No trained model in {run}: --demo or --full trains one.")
        self.run, self.beam, self.tokenizers = run, beam, []
        with refusing_misfits(run / BEST):
            self.config = Config(**checkpoint["config"])
            self.model = build_model(self.config, checkpoint["vocab_sizes"])
            self.model.load_state_dict(checkpoint["weights"])
            tokenizers = dict(zip(self.config.languages, checkpoint["tokenizers"], strict=True))
        for language, wanted in tokenizers.items():
            path = run / f"{language}_tokenizer.json"
            tokenizer = None
            with contextlib.suppress(Exception):  # tokenizers raises that itself, for a broken file
                tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
            if tokenizer is None or text_hash(tokenizer.to_str()) != wanted:
                raise UserError(f"{path} is not the tokenizer that {BEST} was trained with.")
            self.tokenizers.append(tokenizer)
        if precision == "auto" and self.config.precision == "fp32":
            precision = "fp32"
        self.precision = choose_precision(precision, device, translating=True)
        set_precision(self.model.to(device).eval(), self.precision)
        self.src_border, self.tgt_border = map(Moses, self.config.languages)

    def to_corpus(self, lines: Sequence[str], progress: bool = False) -> list[str]:
        """Translate lines of ordinary text, sentence by sentence, into lines of corpus text."""
        if isinstance(lines, str):
            raise TypeError("lines must be a list of lines, not one string")
        pieces, owners = [], []  # encoded sentences; the line that each belongs to
        longest = MAX_POSITIONS - EXTRA_OUTPUT - 1
        for number, line in enumerate(lines):
            for sentence in self.src_border.sentences(clean(line)):
                (ids,) = text_to_ids(self.tokenizers[0], [self.src_border.to_corpus(sentence)])
                if len(ids) - 1 > longest:
                    what = f"a sentence of {len(ids) - 1:,} subwords, cut into pieces of {longest}"
                    print(f"({what}: {sentence[:30]!r}...)", file=sys.stderr)
                for start in range(0, len(ids) - 1, longest):
                    pieces.append(np.append(ids[:-1][start : start + longest], EOS))
                    owners.append(number)
        translated: list[list[str]] = [[] for _ in lines]
        outputs = translate_ids(self.model, pieces, self.beam, progress)
        for owner, output in zip(owners, outputs, strict=True):
            translated[owner].append(ids_to_text(self.tokenizers[1], output))
        return [" ".join(parts) for parts in translated]

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Translate lines of ordinary text; an empty line stays empty."""
        return [self.tgt_border.to_text(line) for line in self.to_corpus(lines)]


def find_run(direction: str) -> Path:
    """Return the newest full run of a direction, else its newest demo, in the folder runs."""
    found = []
    for path in (HERE / "runs").glob(f"*/{BEST}"):
        with contextlib.suppress(UserError, KeyError, TypeError):
            config = load_file(path)["config"]
            if config["direction"] == direction:
                found.append((not config["demo"], path.stat().st_mtime, path.parent))
    if not found:
        demo = f"--demo --direction {direction} (minutes) or " * (direction in ("en-vi", "vi-en"))
        modes = f"{demo}--full --direction {direction} (hours)"
        raise UserError(f"Nothing is trained for {direction} yet: {modes} does it.")
    return max(found)[-1]


def evaluate(translator: Translator, data: Path) -> None:
    """Print BLEU and chrF on the test set, passed in as people's text is; write the hypotheses.

    Both compare with the reference, on a scale of 100: BLEU by the share of runs of 1 to 4 words
    that the reference has too, less for short output; chrF by runs of 1 to 6 characters.
    """
    from sacrebleu.metrics import BLEU, CHRF

    if translator.config.demo:
        raise UserError("The demo has no test set: --demo itself reports its held-out pairs.")
    pairs = load_pairs(data, "test", translator.config.languages)
    if not pairs:
        raise UserError(f"The test files in {data} are empty.")
    to_text = translator.tgt_border.to_text
    sources = [translator.src_border.to_text(source) for source, _ in pairs]
    references = [reference for _, reference in pairs]
    hypotheses = translator.to_corpus(sources, progress=True)
    outputs, targets = list(map(to_text, hypotheses)), list(map(to_text, references))
    path = translator.run / f"test.beam{translator.beam}.{translator.config.languages[1]}"
    for i in range(0, len(pairs), max(1, len(pairs) // 10))[:10]:
        print(f"{sources[i]}\n -> {outputs[i]}\n  = {targets[i]}\n")
    print(f"{len(pairs):,} test pairs, beam {translator.beam}, {translator.precision}")
    for name, metric, hypothesis, reference in (
        ("BLEU on corpus text", BLEU(tokenize="none", force=True), hypotheses, references),
        ("BLEU on ordinary text", BLEU(), outputs, targets),
        ("chrF on ordinary text", CHRF(), outputs, targets),
    ):
        score = metric.corpus_score(hypothesis, [reference], n_bootstrap=1000)
        print(f"{name}: {score.format(width=2)}\n    {metric.get_signature()}")
    write_file(path, "".join(line + "\n" for line in hypotheses).encode("utf-8"))
    print(f"The hypotheses are in {path}.")


def show_demo(translator: Translator) -> None:
    """Translate the held-out pairs, count the exact ones, show some, say what to do next."""
    direction = translator.config.direction
    pairs = [pair if direction == "en-vi" else pair[::-1] for pair in demo_pairs()[1]]
    outputs = translator.translate([source for source, _ in pairs])
    right = sum(output == target for output, (_, target) in zip(outputs, pairs, strict=True))
    print(f"\nPairs never trained on: {right} of {len(pairs)} exactly right. Some of them:")
    for i, ((source, target), output) in enumerate(zip(pairs, outputs, strict=True)):
        if output != target:
            print(f"  {source} -> {output} (wrong, expected: {target})")
        elif i % 9 == 0:
            print(f"  {source} -> {output}")
    print(f"\nYour turn: python 08_iwslt_vi_en.py --infer --run {translator.run}")


def infer(translator: Translator) -> None:
    """Translate what is typed; where stdin is not a terminal, translate it line by line."""
    config = translator.config
    side = config.languages[0] == "vi"
    known = {word for pair in demo_pairs()[0] for word in pair[side].split()} if config.demo else ()

    def translate(lines: list[str]) -> list[str]:
        for line in lines if known else ():
            words = re.findall(r"[^\W_]+(?:['’][^\W_]+)*", clean(line))
            words = (w if w.isupper() and len(w) > 1 else w.lower() for w in words)  # "AM" is new
            if new := set(words) - known:
                print(f"(the demo never saw: {', '.join(sorted(new))})", file=sys.stderr)
        return translator.translate(lines)

    if not sys.stdin.isatty():
        while lines := list(itertools.islice(sys.stdin, 64)):
            print("\n".join(translate(lines)), flush=True)
        return
    with contextlib.suppress(ImportError):  # on Windows the terminal itself keeps the history
        import readline  # noqa: F401 (importing it gives input() line editing and history)
    print("Type a sentence. An empty line or Ctrl-D ends.", file=sys.stderr)
    source, target = (language.upper() for language in config.languages)
    with contextlib.suppress(EOFError):
        while line := clean(input(f"{source}> ")):
            print(f"{target}> {translate([line])[0]}")


# ---- Command line ----

MODES = {
    "demo": "train on the built-in pairs, then show translations",
    "full": "train on the corpus in --data",
    "infer": "translate what you type, or standard input line by line",
    "evaluate": "score the test set in --data",
    "download": "fetch the IWSLT'15 archives into --data",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; a setting that is not given is absent from what it returns."""
    usage = "python 08" + (__doc__ or "").partition("python 08")[2].rstrip()
    parser = argparse.ArgumentParser(usage=usage, allow_abbrev=False)
    modes = parser.add_mutually_exclusive_group(required=True)
    for mode, text in MODES.items():
        modes.add_argument(flag(mode), dest="mode", action="store_const", const=mode, help=text)
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on where training stopped")
    again.add_argument("--restart", action="store_true", help="replace the run in the folder")
    parser.add_argument("--run", type=Path, help="folder of the run (default: runs/MODE-DIRECTION)")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder of the corpus")
    parser.add_argument("--beam", type=int, default=4, help="beam width, 1 is greedy (default: 4)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto (default)")
    group = parser.add_argument_group("settings of a run (presets other than laptop change some)")
    for item in (item for item in fields(Config) if item.metadata):
        how: dict[str, Any] = {"type": type(item.default), "choices": item.metadata["choices"]}
        if isinstance(item.default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        text = f"{item.metadata['help']} (default: {item.default})"
        group.add_argument(flag(item.name), default=argparse.SUPPRESS, help=text, **how)
    return parser


def train(args: argparse.Namespace, given: dict[str, Any]) -> int:
    """Carry out --demo or --full; return the exit status."""
    demo = args.mode == "demo"
    preset = given.get("preset", "demo" if demo else "laptop")
    fresh = Config(**PRESETS[preset] | given | {"preset": preset, "demo": demo})
    named = (PRESETS[preset] if "preset" in given else {}) | given | {"demo": demo}
    run = args.run or HERE / "runs" / f"{args.mode}-{fresh.direction}"
    device, chief = find_device(args.device), RANK == 0
    choose_precision(fresh.precision, device)  # refused here, before anything is replaced
    say = tqdm.write if chief else lambda text: None
    with lock_folder(run) if chief else contextlib.nullcontext():
        shared = [None, None, None]
        if chief:
            with refusing_misfits(run / STATE):
                state = None if args.restart else open_run(run, named, args.resume)
                config, text = (
                    (Config(**state["config"]), state["data"]) if state else (fresh, None)
                )
            shared = [config, state, prepare(config, args.data, run, text)]
        if WORLD > 1:  # the others wait here until everything is prepared
            dist.broadcast_object_list(shared)
        config, state, prepared = shared
        say("\n".join(prepared.report))
        trainer = Trainer(config, prepared, device, run)
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        if state:
            with refusing_misfits(run / STATE):
                trainer.load_state(state)
            if trainer.step >= trainer.total:
                say(f"{run} is finished: {trainer.step:,} steps, best dev loss {trainer.best:.3f}.")
                return 0
        c, t, bf16 = config, trainer, "has" if cpu_has_bf16() else "lacks"
        say(
            f"{c.direction}: {c.n_layers}+{c.n_layers} layers, d_model {c.d_model}, {c.n_heads} "
            f"heads, d_ff {c.d_ff}, vocabularies {t.vocab_sizes[0]:,} and {t.vocab_sizes[1]:,}: "
            f"{parameters:,} parameters, {16 * parameters / 1e6:,.0f} MB on disk, in {run}\n"
            f"{WORLD} process{'es' * (WORLD > 1)} on {device.type}, {torch.get_num_threads()} "
            f"threads, {t.precision} (this CPU {bf16} bf16 arithmetic)\nMeasuring the speed ..."
        )
        minutes = trainer.plan_steps() / 60
        say(
            f"After step {t.step:,} of {t.total:,}: about {minutes:.1f} minutes to go "
            f"({t.total / t.steps_per_epoch:.2f} epochs in all)"
        )
        if t.total < 200:
            say("So few steps teach little: give more --epochs (or --minutes).")
        status = trainer.run_to_end()
        if status:
            say(f"Stopped after step {trainer.step:,}: --resume goes on from there.")
        if status or not chief:
            return status
        say(f"Best dev loss {trainer.best:.3f}. {trainer.draw_curve()}")
    if demo:
        show_demo(Translator(run, device, args.beam))
    else:
        say(TED_LICENCE if sorted(config.languages) == ["en", "vi"] else "")
        for then in (f"--evaluate --run {run} --data {args.data}", f"--infer --run {run}"):
            say(f"Next: python 08_iwslt_vi_en.py {then}")
    return 0


def carry_out(args: argparse.Namespace) -> int:
    """Do what the command line asks for; return the exit status."""
    given = {k: v for k, v in vars(args).items() if k in Config.__dataclass_fields__}
    if not 1 <= args.beam <= 1000:
        raise UserError("--beam must be between 1 and 1,000.")
    if args.mode in ("demo", "full"):
        return train(args, given)
    useless = [flag(name) for name in ("resume", "restart") if getattr(args, name)]
    useless += [flag(name) for name in given if name not in ("direction", "precision")]
    if useless:
        raise UserError(f"--{args.mode} takes no {', '.join(useless)}: that is for training.")
    if args.mode == "download":
        download(args.data)
        return 0
    run = args.run or find_run(given.get("direction", "en-vi"))
    precision = given.get("precision", "auto")
    translator = Translator(run, find_device(args.device), args.beam, precision)
    direction = translator.config.direction
    if given.get("direction", direction) != direction:
        raise UserError(f"{run} translates {direction}, not {given['direction']}.")
    print(f"Model: {run} ({direction}, {translator.precision})", file=sys.stderr)
    infer(translator) if args.mode == "infer" else evaluate(translator, args.data)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace", newline="\n")
    try:
        try:
            return carry_out(build_parser().parse_args(arguments))
        finally:
            print(end="", flush=True)
    except UserError as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:  # torch tells by its words only, on a CPU
        if not (isinstance(error, MemoryError) or re.search("(of|allocate) memory", str(error))):
            raise
        advice = "lower --batch-tokens, --beam, --d-model or --n-layers"
        print(f"error: out of memory: {advice}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as error:  # a disk that is full, a name that is too long
        with contextlib.suppress(OSError):  # what waits to be written would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever read our output has left
            return 141
        what = error.filename or "output"
        print(f"error: {what} cannot be used: {error.strerror}.", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
