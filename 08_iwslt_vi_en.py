# /// script
# requires-python = ">=3.10"
# dependencies = ["torch", "numpy", "tokenizers", "tqdm", "sacremoses", "sacrebleu", "matplotlib"]
# ///
"""Lesson 8: a translator you can use, trained on IWSLT'15 English-Vietnamese.

The seven lessons before this one build the Transformer of "Attention Is All You Need" (Vaswani et
al., 2017) and train it on toys. This one trains it on real text and turns it into a tool:

    python 08_iwslt_vi_en.py --demo                       built-in pairs, about a minute on a laptop
    python 08_iwslt_vi_en.py --download                   fetch IWSLT'15 (133,317 pairs) into data/
    python 08_iwslt_vi_en.py --full                       train on it (--full --resume goes on)
    python 08_iwslt_vi_en.py --full --direction vi-en     the other way; X-Y reads train.X and train.Y
    python 08_iwslt_vi_en.py --evaluate                   BLEU and chrF on the test set
    python 08_iwslt_vi_en.py --infer                      a prompt: EN> ... VI> ...
    python 08_iwslt_vi_en.py --infer < in.txt > out.txt   a filter: one line in, one line out
    torchrun --nproc-per-node=4 08_iwslt_vi_en.py --full  several GPUs

The file reads from top to bottom: configuration, data, subwords, batches, the model from embeddings
to Transformer, loss and schedule, training, search, evaluation, prompt, command line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import re
import signal
import sys
import tarfile
import time
import unicodedata
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
PAD, BOS, EOS = 0, 1, 2  # the same ids in every lesson
MAX_POSITIONS = 1024  # length of the position table; no text longer than this enters the model
EXTRA_OUTPUT = 50  # a translation is at most this much longer than its source, in subwords
BEST, STATE = "best_iwslt_transformer.pth", "resume_state.pth"  # files of a run


class UserError(Exception):
    """Something outside the program is wrong; `main` prints the sentence and exits with status 2."""


# ------------------------------------------------------------------------------------------------
# Configuration: every number that decides what is computed. Each field is a command-line flag.
# ------------------------------------------------------------------------------------------------


def setting(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that becomes a flag with this default and this help text."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Config:
    """Settings of one run; a checkpoint carries them, and `--resume` insists on the same."""

    direction: str = setting("en-vi", "source and target language, as in the files' names")
    preset: str = setting("laptop", "a set of defaults", choices=("demo", "laptop", "gpu"))
    vocab_size: int = setting(8000, "subwords per language")
    max_len: int = setting(200, "leave out training pairs with a longer side, in subwords")
    d_model: int = setting(256, "width of the model")
    n_heads: int = setting(8, "attention heads; must divide d_model")
    d_ff: int = setting(1024, "inner width of the feed-forward networks")
    n_layers: int = setting(4, "encoder layers, and as many decoder layers")
    dropout: float = setting(0.1, "share of activations dropped in training")
    norm_first: bool = setting(True, "LayerNorm before each sub-layer (pre-norm)")
    tie: str = setting("output", "target embedding as output matrix", choices=("output", "none"))
    batch_tokens: int = setting(4096, "tokens a batch holds on its longer side, padding included")
    accumulate: int = setting(1, "batches summed into one step, by each process")
    lr: float = setting(1.5e-3, "learning rate at the end of warm-up")
    warmup: int = setting(800, "steps of warm-up (at most a fifth of all steps)")
    label_smoothing: float = setting(0.1, "probability spread over the whole vocabulary")
    clip: float = setting(1.0, "largest norm of the gradient")
    epochs: int = setting(10, "passes over the training pairs")
    minutes: float = setting(0.0, "train about this long instead of counting epochs (0: off)")
    validate_every: int = setting(1000, "steps between validations, besides each epoch's end")
    precision: str = setting("auto", "arithmetic", choices=("auto", "fp32", "bf16", "fp16"))
    seed: int = setting(1, "seed of initialisation, batch order and dropout")
    demo: bool = False  # the built-in pairs instead of a corpus; set by --demo, no flag

    def __post_init__(self) -> None:
        counts = [self.n_heads, self.d_model, self.d_ff, self.n_layers, self.accumulate]
        longest = MAX_POSITIONS - EXTRA_OUTPUT
        for holds, rule in (
            (re.fullmatch("[a-z]+-[a-z]+", self.direction), "--direction must look like en-vi"),
            (self.src != self.tgt, "--direction must name two different languages"),
            (min(counts) > 0, "sizes and counts must be at least 1"),
            (self.d_model % max(1, self.n_heads) == 0, "--n-heads must divide --d-model"),
            (self.d_model % 2 == 0, "--d-model must be even"),
            (self.vocab_size >= 300, "--vocab-size must be at least 300"),
            (1 <= self.max_len <= longest, f"--max-len must be between 1 and {longest}"),
            (self.batch_tokens >= 16, "--batch-tokens must be at least 16"),
            (0 <= self.dropout < 1, "--dropout must be at least 0 and below 1"),
            (0 <= self.label_smoothing < 1, "--label-smoothing must be at least 0 and below 1"),
            (self.lr > 0 and self.clip > 0, "--lr and --clip must be above 0"),
            (self.warmup > 0 and self.epochs > 0, "--warmup and --epochs must be at least 1"),
            (self.validate_every > 0, "--validate-every must be at least 1"),
            (self.minutes >= 0, "--minutes must not be negative"),
        ):
            if not holds:
                raise UserError(f"{rule}.")

    @property
    def src(self) -> str:
        return self.direction.split("-")[0]

    @property
    def tgt(self) -> str:
        return self.direction.split("-")[-1]


PRESETS: dict[str, dict[str, Any]] = {
    "demo": {
        "vocab_size": 600, "d_model": 128, "n_heads": 4, "d_ff": 256, "n_layers": 2,
        "batch_tokens": 1024, "warmup": 200, "epochs": 40, "lr": 2e-3,
    },
    "laptop": {},  # the defaults above: 4 + 4 layers of width 256
    "gpu": {
        "d_model": 512, "d_ff": 2048, "n_layers": 6, "dropout": 0.3, "batch_tokens": 16384,
        "lr": 1e-3, "warmup": 2000, "epochs": 40,
    },
}  # fmt: skip


# ------------------------------------------------------------------------------------------------
# Data: pairs of lines, from the archives or from plain files
# ------------------------------------------------------------------------------------------------

ORIGIN = "https://github.com/stefan-it/nmt-en-vi/raw/master/data/"
ARCHIVES = {  # part: archive, its git blob id, and the names its text files may have
    "train": ("train-en-vi.tgz", "76ce2671526e0b05a9422020820e656b6e2a1472", ("train",)),
    "dev": ("dev-2012-en-vi.tgz", "cd22909b078747a13aeed7fb134de8d5ad7c5151", ("tst2012", "dev")),
    "test": (
        "test-2013-en-vi.tgz",
        "39b3722a15dbf07e9a112be4051b2884b1bb0f3f",
        ("tst2013", "test"),
    ),
}
TED_LICENCE = (
    "The IWSLT text comes from TED talks under CC BY-NC-ND: a model trained on it is for "
    "non-commercial use."
)
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
Pair = tuple[str, str]


def clean(text: str) -> str:
    """One line of text in one form: NFC, no control characters, single spaces.

    Vietnamese letters can be written composed or decomposed (one code point or several that look
    alike); without NFC the same word would be two different words.

    >>> clean("tie\\u0302\\u0301ng\\tViệt ") == "tiếng Việt"
    True
    """
    return " ".join(CONTROL.sub(" ", unicodedata.normalize("NFC", text)).split())


def read_part(folder: Path, part: str, languages: Sequence[str]) -> list[bytes] | None:
    """Return the bytes of one part of the corpus in each language, or None where it is absent.

    Plain files (`train.en`, `train.vi`) come before the archive. The archive's members are read in
    memory: nothing is unpacked, so nothing can be written where it should not be.
    """
    archive, _, stems = ARCHIVES[part]
    for stem in stems:
        files = [folder / f"{stem}.{language}" for language in languages]
        if all(file.is_file() for file in files):
            return [file.read_bytes() for file in files]
    if not (folder / archive).is_file():
        return None
    try:
        with tarfile.open(folder / archive) as tar:
            members = {Path(m.name).name: m for m in tar.getmembers() if m.isfile()}
            for stem in stems:
                names = [f"{stem}.{language}" for language in languages]
                if all(name in members for name in names):
                    return [tar.extractfile(members[name]).read() for name in names]
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{folder / archive} cannot be read as a .tgz archive ({error}); "
            "delete it and fetch it again with --download."
        ) from error
    return None


def decode_lines(data: bytes, name: str) -> list[str]:
    """Return the cleaned lines of a UTF-8 file; only a newline ends a line."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}, line {line}: not UTF-8; convert the file to UTF-8.") from error
    return [clean(line) for line in text.removesuffix("\n").split("\n")] if text else []


def load_pairs(folder: Path, part: str, languages: Sequence[str]) -> list[Pair] | None:
    """Return the (source, target) lines of a part, the empty ones too; None where it is absent."""
    found = read_part(folder, part, languages)
    if found is None:
        return None
    names = [f"{part} ({language})" for language in languages]
    src, tgt = (decode_lines(data, name) for data, name in zip(found, names, strict=True))
    if len(src) != len(tgt):
        raise UserError(
            f"{folder}: {names[0]} has {len(src):,} lines, {names[1]} has {len(tgt):,}; "
            "line n of one must translate line n of the other, so the counts must agree."
        )
    return list(zip(src, tgt, strict=True))


def missing_files(folder: Path, part: str, languages: Sequence[str]) -> UserError:
    """Return the error that says which files are wanted, where they come from and go."""
    archive, _, stems = ARCHIVES[part]
    plain = " and ".join(f"{stems[0]}.{language}" for language in languages)
    sentence = f"No {part} data in {folder}: put the files {plain} there"
    if sorted(languages) == ["en", "vi"]:
        sentence += (
            f", or the archive {archive} from {ORIGIN}{archive} "
            "(python 08_iwslt_vi_en.py --download fetches it)"
        )
    return UserError(sentence + ".")


def blob_id(data: bytes) -> str:
    """Return git's id of a file: SHA-1 over "blob <size>\\0" and the content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def download(folder: Path) -> None:
    """Fetch the three archives into `folder`, each verified by its git blob id."""
    for archive, wanted, _ in ARCHIVES.values():
        path = folder / archive
        if path.is_file() and blob_id(path.read_bytes()) == wanted:
            print(f"{path}: already there, verified")
            continue
        data = io.BytesIO()
        try:
            with urllib.request.urlopen(ORIGIN + archive, timeout=30) as response:
                size = int(response.headers.get("Content-Length") or 0) or None
                with tqdm(total=size, unit="B", unit_scale=True, desc=archive) as bar:
                    while block := response.read(1 << 16):
                        bar.update(data.write(block))
        except OSError as error:
            raise UserError(
                f"{ORIGIN}{archive} could not be fetched ({error}); try again, or fetch it with "
                f"a browser and put it into {folder}."
            ) from error
        if blob_id(data.getvalue()) != wanted:
            raise UserError(
                f"{ORIGIN}{archive} is not the expected file (its git blob id should be {wanted}); "
                "nothing was saved."
            )
        write_file(path, data.getvalue())
        print(f"{path}: {path.stat().st_size:,} bytes, verified")
    print(TED_LICENCE)


def write_file(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Replace a file as a whole: after a crash there is the old one or the new one, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            content(file) if callable(content) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(
            f"{path} could not be written ({error}); what was there is kept."
        ) from error


# ------------------------------------------------------------------------------------------------
# The demo's data: everyday English-Vietnamese sentences made from a small table of phrases
# ------------------------------------------------------------------------------------------------


def table(text: str) -> dict[str, str]:
    """Read "english = vietnamese, ..." into a dictionary."""
    return dict(entry.strip().split(" = ") for entry in text.split(","))


# All the words the demo knows, besides those of the patterns below.
SUBJECTS = table(
    "i = tôi, we = chúng tôi, you = bạn, they = họ, he = anh ấy, she = cô ấy, "
    "my mother = mẹ tôi, my father = bố tôi"
)
FEELINGS = table(
    "happy = vui, sad = buồn, tired = mệt, busy = bận, hungry = đói, thirsty = khát, "
    "sleepy = buồn ngủ, well = khỏe"
)
ACTIONS = table(
    "drink coffee = uống cà phê, drink tea = uống trà, eat rice = ăn cơm, eat pho = ăn phở, "
    "read books = đọc sách, read the newspaper = đọc báo, watch television = xem ti vi, "
    "listen to music = nghe nhạc, play football = đá bóng, "
    "learn english = học tiếng anh, learn vietnamese = học tiếng việt"
)
PLACES = table(
    "market = chợ, supermarket = siêu thị, restaurant = nhà hàng, park = công viên, "
    "library = thư viện, hospital = bệnh viện, bank = ngân hàng, post office = bưu điện"
)
# A counted or pointed-at thing takes a classifier, the first word here: "quyển sách", a book.
THINGS = table(
    "book = quyển sách, pen = cái bút, bag = cái túi, phone = chiếc điện thoại, "
    "bicycle = chiếc xe đạp, car = chiếc ô tô, cat = con mèo, dog = con chó"
)
QUALITIES = table("beautiful = đẹp, expensive = đắt, cheap = rẻ, big = to, small = nhỏ")
POINTERS = table("this = này, that = kia")
HABITS = table("every day = mỗi ngày, every morning = mỗi sáng, every evening = mỗi tối")
TIMES = table("today = hôm nay, tonight = tối nay, tomorrow = ngày mai")

# Tables made from those: only English verbs change their form, only classifiers drop out.
ASKED = dict(itertools.islice(SUBJECTS.items(), 2, None))  # nobody asks "am i hungry"
PLANS = ACTIONS | {f"go to the {en}": f"đi {vi}" for en, vi in PLACES.items()}
VERBS = [(*en.partition(" "), vi) for en, vi in ACTIONS.items()]
DOING = {f"{verb}ing {rest}": vi for verb, _, rest, vi in VERBS}
DOES = {
    f"{verb}/{verb}{'es' if verb == 'watch' else 's'} {rest}": vi for verb, _, rest, vi in VERBS
}
BARE = {en: vi.split(" ", 1)[1] for en, vi in THINGS.items()}

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
    ("how do i get to the {0}", "làm sao để đến {0}", PLACES),
    ("where am/are/is {0}", "{0} đang ở đâu", ASKED),
    ("what am/are/is {0} doing", "{0} đang làm gì", ASKED),
]


def agree(sentence: str, subject: str) -> str:
    """Of each choice like "am/are/is" or "want/wants" keep the form that fits the subject."""
    which = {"i": 0, "we": -2, "you": -2, "they": -2}.get(subject, -1)
    return " ".join(word.split("/")[which] if "/" in word else word for word in sentence.split())


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
            pair = agree(english.format(*en), en[0]), vietnamese.format(*vi)
            # Every seventh sentence is kept from training, where two words or more combine.
            (held_out if len(tables) > 1 and taken % 7 == 5 else train).append(pair)
            taken += 1
    return train, held_out


def styled(pairs: Sequence[Pair]) -> list[Pair]:
    """Return each pair as it is, with a capital, with a full stop, and with both.

    >>> styled([("i am happy", "tôi vui")])[3]
    ('I am happy .', 'Tôi vui .')
    """
    capital = [tuple(text[0].upper() + text[1:] for text in pair) for pair in pairs]
    return [
        tuple(text + stop for text in pair)
        for stop in ("", " .")
        for style in (pairs, capital)
        for pair in style
    ]


# ------------------------------------------------------------------------------------------------
# Ordinary text and corpus text
# ------------------------------------------------------------------------------------------------


class Moses:
    """The border between people's text and the corpus's: "It's" against "It &apos;s".

    IWSLT is tokenised and escaped as the Moses toolkit does it. Inside the program text keeps that
    form, so that BLEU is comparable with published figures; sacremoses converts at the border.
    """

    def __init__(self, language: str) -> None:
        from sacremoses import MosesDetokenizer, MosesTokenizer

        self.tokenizer, self.detokenizer = MosesTokenizer(language), MosesDetokenizer(language)

    def to_corpus(self, text: str) -> str:
        return clean(self.tokenizer.tokenize(text, return_str=True))

    def to_text(self, corpus: str) -> str:
        return clean(self.detokenizer.detokenize(corpus.split()))

    def sentences(self, text: str) -> list[str]:
        """Split a line of ordinary text after . ! ? … where a new sentence seems to begin.

        >>> Moses("en").sentences("Mr. Hoa is here. Is he late? No.")
        ['Mr. Hoa is here.', 'Is he late?', 'No.']
        """
        parts, start = [], 0
        for match in re.finditer(r"[.!?…]+[\"'”’»)\]]*\s+(?=[\"'“‘«(\[¿¡-]*[^\W\d_a-z])", text):
            last = text[start : match.start()].split()[-1:]
            dotted = text[match.start()] == "." and match.group().strip() == "."
            if dotted and last and last[0] in self.tokenizer.NONBREAKING_PREFIXES:
                continue  # "Mr." does not end a sentence
            if text[match.end()].islower():
                continue
            parts.append(text[start : match.end()].strip())
            start = match.end()
        return [*parts, text[start:].strip()]


# ------------------------------------------------------------------------------------------------
# Subwords: byte-pair encoding
# ------------------------------------------------------------------------------------------------


def train_bpe(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn byte-level BPE (Sennrich et al., 2016): any text can be written, none is unknown.

    A piece is a word with the space before it, so decoding puts every space back. Ids 0, 1, 2 are
    reserved for pad, bos and eos, but no text ever stands for them: a typed "<pad>" is five
    characters.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend(" ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[^ ]+| +"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<pad>", "<bos>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = []  # the ids stay reserved; the names lose their power over text
    return Tokenizer.from_str(json.dumps(description))


def encode(tokenizer: Tokenizer, lines: Sequence[str]) -> list[np.ndarray]:
    """Return each line's subword ids with eos at the end, as int32 arrays."""
    return [np.array([*e.ids, EOS], dtype=np.int32) for e in tokenizer.encode_batch(list(lines))]


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of subword ids: one clean line, whatever the ids."""
    return clean(tokenizer.decode([i for i in ids if i > EOS], skip_special_tokens=False))


# ------------------------------------------------------------------------------------------------
# Prepared data: read, cleaned, encoded once, kept in the run's folder
# ------------------------------------------------------------------------------------------------


@dataclass
class Encoded:
    """Encoded sentence pairs: for each pair one array of ids a side, both ending with eos."""

    src: list[np.ndarray]
    tgt: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.src)


@dataclass
class Prepared:
    """What training needs of the data."""

    src_tokenizer: Tokenizer
    tgt_tokenizer: Tokenizer
    train: Encoded
    dev: Encoded
    report: list[str]  # what was read, dropped and held out


def encode_pairs(
    pairs: Sequence[Pair], tokenizers: Sequence[Tokenizer], max_len: int, name: str
) -> tuple[Encoded, str]:
    """Encode pairs and leave out the unusable ones; both sides of a pair always go together."""
    sides = [encode(t, [p[i] for p in pairs]) for i, t in enumerate(tokenizers)]
    dropped: Counter[str] = Counter()
    kept = Encoded([], [])
    for src, tgt in zip(*sides, strict=True):
        short, long = sorted((len(src) - 1, len(tgt) - 1))  # without eos
        if short == 0:
            dropped["with an empty side"] += 1
        elif long > max_len:
            dropped[f"longer than {max_len} subwords"] += 1
        elif long > 3 * short + 10:
            dropped["with sides of very different length"] += 1
        else:
            kept.src.append(src)
            kept.tgt.append(tgt)
    reasons = ", ".join(f"{n:,} {why}" for why, n in dropped.items()) or "none"
    return kept, f"{name}: {len(pairs):,} pairs read, {len(kept):,} kept; dropped: {reasons}"


def prepare(config: Config, data: Path, run: Path) -> Prepared:
    """Read, learn BPE, encode; or take all of that from the run's folder if nothing changed."""
    languages = (config.src, config.tgt)
    if config.demo:
        train, dev = demo_pairs()
        train, dev = styled(train), styled(dev)
        if languages == ("vi", "en"):
            train, dev = ([(vi, en) for en, vi in pairs] for pairs in (train, dev))
        elif languages != ("en", "vi"):
            raise UserError(f"The demo speaks en-vi and vi-en, not {config.direction}.")
    else:
        train, dev = load_pairs(data, "train", languages), load_pairs(data, "dev", languages)
        if train is None:
            raise missing_files(data, "train", languages)
    key = json.dumps([train, dev, config.vocab_size, config.max_len, languages, "v1"])
    fingerprint = hashlib.sha256(key.encode("utf-8")).hexdigest()

    paths = [run / f"{language}_tokenizer.json" for language in languages]
    cache = run / "prepared.pth"
    with contextlib.suppress(Exception):  # anything wrong with the cache: prepare again
        stored = torch.load(cache, weights_only=True)
        if stored["fingerprint"] == fingerprint:
            tokenizers = [Tokenizer.from_str(text) for text in stored["tokenizers"]]
            sets = [Encoded(*(unflatten(side) for side in s)) for s in stored["sets"]]
            return Prepared(*tokenizers, *sets, [*stored["report"], "(prepared earlier)"])

    report = []
    if dev is None:
        held_out = np.random.default_rng(0).permutation(len(train))[: min(2000, len(train) // 100)]
        chosen = set(held_out.tolist()) or {0}
        dev = [train[i] for i in sorted(chosen)]
        train = [pair for i, pair in enumerate(train) if i not in chosen]
        report.append(f"no dev files in {data}: {len(dev):,} training pairs held out instead")
    tokenizers = [train_bpe((p[i] for p in train), config.vocab_size) for i in (0, 1)]
    sets = []
    for name, pairs in (("train", train), ("dev", dev)):
        encoded, line = encode_pairs(pairs, tokenizers, config.max_len, name)
        if not len(encoded):
            raise UserError(f"No usable sentence pair: {line}.")
        sets.append(encoded)
        report.append(line)
    for tokenizer, path in zip(tokenizers, paths, strict=True):
        write_file(path, tokenizer.to_str(pretty=True).encode("utf-8"))
    stored = {
        "fingerprint": fingerprint,
        "tokenizers": [tokenizer.to_str() for tokenizer in tokenizers],
        "sets": [[flatten(s.src), flatten(s.tgt)] for s in sets],
        "report": report,
    }
    write_file(cache, lambda file: torch.save(stored, file))
    return Prepared(*tokenizers, *sets, report)


def flatten(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return rows of different lengths as (all ids in a row, the lengths)."""
    return torch.from_numpy(np.concatenate(rows)), torch.tensor([len(row) for row in rows])


def unflatten(flat: tuple[Tensor, Tensor]) -> list[np.ndarray]:
    """Undo `flatten`."""
    return np.split(flat[0].numpy(), np.cumsum(flat[1].numpy())[:-1])


# ------------------------------------------------------------------------------------------------
# Batches
# ------------------------------------------------------------------------------------------------


def plan_batches(
    src: Sequence[Sequence[int]], tgt: Sequence[Sequence[int]], budget: int, seed: Any
) -> list[np.ndarray]:
    """Divide the pairs into batches of similar length; return the pairs' indices, batch by batch.

    A batch of n pairs whose longest side has L tokens holds n x L <= budget tokens, padding
    included. Attention is quadratic in L, so beyond 256 tokens a sentence counts L / 256 times
    more. A pair over the budget makes a batch of its own. Same seed, same plan.
    """
    rng = np.random.default_rng(seed)
    src_len, tgt_len = np.array([len(row) for row in src]), np.array([len(row) for row in tgt])
    order = rng.permutation(len(src_len))  # decides among pairs of equal lengths
    order = order[np.lexsort((src_len[order], tgt_len[order]))]
    longest = np.maximum(src_len, tgt_len)[order]
    cost = longest * np.maximum(1, longest / 256)
    batches, start, widest = [], 0, 0
    for end, price in enumerate(cost):
        widest = max(widest, price)
        if (end + 1 - start) * widest > budget and end > start:
            batches.append(order[start:end])
            start, widest = end, price
    batches.append(order[start:])
    return [batches[i] for i in rng.permutation(len(batches))]


def pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of ids as one (rows, longest) tensor, filled up with PAD at the end.

    >>> pad_rows([[5, 2], [5, 6, 2]]).tolist()
    [[5, 2, 0], [5, 6, 2]]
    """
    padded = np.full((len(rows), max(map(len, rows))), PAD, dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return torch.from_numpy(padded)


def make_batch(data: Encoded, indices: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return source (B, S) and target (B, T) ids of the pairs, both ending with eos."""
    sides = (pad_rows([side[i] for i in indices]) for side in (data.src, data.tgt))
    if device.type == "cuda":  # from pinned memory the copy runs beside the computation
        return [side.pin_memory().to(device, non_blocking=True) for side in sides]
    return [side.to(device) for side in sides]


# ------------------------------------------------------------------------------------------------
# The model, by hand. A mask is boolean, True means "may attend", and it broadcasts to
# (batch, heads, query, key).
# ------------------------------------------------------------------------------------------------


def padding_mask(ids: Tensor) -> Tensor:
    """Return where `ids` (B, S) are real tokens, as (B, 1, 1, S)."""
    return (ids != PAD)[:, None, None, :]


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """Return (1, 1, T, T), True where the key is not later than the query.

    >>> causal_mask(3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


class TokenEmbedding(nn.Module):
    """A table of `vocab_size` learned vectors; output = table[ids] * sqrt(d_model) (section 3.4).

    The table starts as N(0, 1/d_model), so that after the scaling each entry has variance 1.
    """

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.table.weight, std=d_model**-0.5)
        self.scale = math.sqrt(d_model)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (B, S) to vectors (B, S, d_model)."""
        return self.table(ids) * self.scale


class PositionalEncoding(nn.Module):
    """Add sinusoids that tell the position, then dropout (section 3.5).

    PE[p, 2i] = sin(p / 10000^(2i/d_model)), PE[p, 2i+1] = cos(p / 10000^(2i/d_model))
    """

    def __init__(self, d_model: int, max_len: int, dropout: float) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"d_model must be even (sine and cosine in pairs), got {d_model}")
        position = torch.arange(max_len, dtype=torch.float32)[:, None]
        rate = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], dim=-1)
        self.register_buffer("table", table.view(max_len, d_model), persistent=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Map x (B, S, d_model), whose first vector stands at position `start`, to the same shape.

        Raises ValueError where the input is longer than the table.
        """
        end = start + x.size(1)
        if end > self.table.size(0):
            raise ValueError(f"input of {end} positions, but the table has {self.table.size(0)}")
        return self.dropout(x + self.table[start:end])


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(d_k)) V (section 3.2.1).

    query (..., T, d_k), key and value (..., S, d_k), mask broadcastable to (..., T, S), True where
    the query may attend; returns the output (..., T, d_k) and the weights (..., T, S). Blocked
    scores get the most negative finite number, so a row in which all is blocked gives no NaN.
    """
    scores = (query / math.sqrt(query.size(-1))) @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    return (weights if dropout is None else dropout(weights)) @ value, weights


class MultiHeadAttention(nn.Module):
    """Attention in `n_heads` subspaces of size d_k = d_model / n_heads (section 3.2.2)."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"n_heads must divide d_model, got {n_heads} and {d_model}")
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, S, d_model) -> (B, heads, S, d_k)"""
        return x.view(x.size(0), -1, self.n_heads, self.d_k).transpose(1, 2)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Map memory (B, S, d_model) to keys and values (B, heads, S, d_k): what a cache keeps."""
        return self.split_heads(self.w_k(memory)), self.split_heads(self.w_v(memory))

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Let query (B, T, d_model) look things up; return (B, T, d_model), weights (B, h, T, S)"""
        q = self.split_heads(self.w_q(query))
        out, weights = scaled_dot_product_attention(q, keys, values, mask, self.dropout)
        return self.w_o(out.transpose(1, 2).flatten(2)), weights  # heads side by side again

    def forward(
        self, query: Tensor, memory: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """query (B, T, d_model) attends to memory (B, S, d_model), which may be query itself."""
        return self.attend(query, *self.keys_values(memory), mask)


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2, the same at every position (section 3.3)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear1 = nn.Linear(d_model, d_ff)
        self.linear2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, S, d_model) to the same shape."""
        return self.linear2(self.dropout(self.linear1(x).relu()))


class Residual(nn.Module):
    """One sub-layer's place in the residual stream (section 3.1).

    Post-norm, as in 2017: LayerNorm(x + Dropout(sublayer(x)))
    Pre-norm:              x + Dropout(sublayer(LayerNorm(x)))
    """

    def __init__(self, d_model: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Map x (B, S, d_model) to the same shape."""
        if self.norm_first:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each in a residual connection."""

    def __init__(
        self, d_model: int, n_heads: int, d_ff: int, dropout: float, norm_first: bool = False
    ) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(d_model, n_heads, dropout)
        self.feed_forward = FeedForward(d_model, d_ff, dropout)
        self.residual1 = Residual(d_model, dropout, norm_first)
        self.residual2 = Residual(d_model, dropout, norm_first)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x (B, S, d_model) to the same shape; mask broadcasts to (B, heads, S, S)."""
        x = self.residual1(x, lambda y: self.self_attention(y, y, mask)[0])
        return self.residual2(x, self.feed_forward)


@dataclass
class LayerCache:
    """What one decoder layer need not compute again while it writes token after token.

    Keys and values are (B, heads, length, d_k): those of the memory are computed once, those of the
    target grow by one position a step.
    """

    memory: tuple[Tensor, Tensor]
    target: tuple[Tensor, Tensor] | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the newest positions' keys and values; return those of all positions."""
        if self.target is not None:
            keys, values = (torch.cat(kv, dim=2) for kv in zip(self.target, (keys, values)))
        self.target = (keys, values)
        return self.target


class DecoderLayer(nn.Module):
    """Masked self-attention, cross-attention to the encoder's memory, feed-forward."""

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

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        src_mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map x (B, T, d_model) to the same shape.

        memory (B, S, d_model); tgt_mask broadcasts to (B, heads, T, T), src_mask to (B, heads, T,
        S). With a cache, x holds only the positions since the last call and memory is not read.
        """

        def self_attend(y: Tensor) -> Tensor:
            keys, values = self.self_attention.keys_values(y)
            if cache is not None:
                keys, values = cache.extend(keys, values)
            return self.self_attention.attend(y, keys, values, tgt_mask)[0]

        def cross_attend(y: Tensor) -> Tensor:
            keys, values = cache.memory if cache else self.cross_attention.keys_values(memory)
            return self.cross_attention.attend(y, keys, values, src_mask)[0]

        x = self.residual1(x, self_attend)
        x = self.residual2(x, cross_attend)
        return self.residual3(x, self.feed_forward)


class Transformer(nn.Module):
    """The encoder-decoder of 2017: source ids and target ids in, logits of the next token out.

    tie: "all" (one matrix for source, target and output, as in the paper; needs one vocabulary),
    "output" (the target embedding is the output matrix) or "none". Pre-norm ends each stack with
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
        if tie not in ("all", "output", "none"):
            raise ValueError(f'tie must be "all", "output" or "none", got {tie!r}')
        if tie != "none":
            self.output.weight = self.tgt_embedding.table.weight
        if tie == "all":
            if src_vocab_size != tgt_vocab_size:
                raise ValueError('tie="all" needs one vocabulary for source and target')
            self.src_embedding = self.tgt_embedding

    def encode(self, src: Tensor) -> Tensor:
        """Map source ids (B, S) to the memory (B, S, d_model)."""
        mask = padding_mask(src)
        x = self.position(self.src_embedding(src))
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x)

    def decode(
        self, tgt: Tensor, memory: Tensor, src: Tensor, caches: list[LayerCache] | None = None
    ) -> Tensor:
        """Map target ids (B, T) to decoder states (B, T, d_model), before the output matrix.

        With caches, tgt holds only the ids since the last call, and none of them is PAD.
        """
        past = caches[0].target[0].size(2) if caches and caches[0].target else 0
        mask = causal_mask(past + tgt.size(1), tgt.device)[:, :, past:]
        if caches is None:
            mask = mask & padding_mask(tgt)
        x = self.position(self.tgt_embedding(tgt), past)
        for layer, cache in zip(self.decoder, caches or [None] * len(self.decoder), strict=True):
            x = layer(x, memory, mask, padding_mask(src), cache)
        return self.decoder_norm(x)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Map source ids (B, S) and decoder input ids (B, T) to logits (B, T, vocabulary)."""
        return self.output(self.decode(tgt, self.encode(src), src))

    def new_caches(self, memory: Tensor) -> list[LayerCache]:
        """Return a cache a decoder layer, holding the keys and values of memory (B, S, d_model)."""
        return [LayerCache(layer.cross_attention.keys_values(memory)) for layer in self.decoder]


def build_model(config: Config, src_vocab_size: int, tgt_vocab_size: int) -> Transformer:
    """Build the untrained model of a configuration.

    Pre-norm is the default here, unlike in 2017: with the norm inside the branch, the residual
    stream runs from the loss to the embeddings unnormalised, gradients keep their size through any
    depth (lesson 4 measures it), and training stands a high rate after a short warm-up. Post-norm
    (--no-norm-first) reaches the same quality but wants a gentler rate and a longer warm-up.
    """
    return Transformer(
        src_vocab_size,
        tgt_vocab_size,
        config.d_model,
        config.n_heads,
        config.d_ff,
        config.n_layers,
        config.dropout,
        config.norm_first,
        config.tie,
    )


# ------------------------------------------------------------------------------------------------
# Loss and schedule
# ------------------------------------------------------------------------------------------------


def batch_loss(model: Transformer, src: Tensor, tgt: Tensor, smoothing: float) -> Tensor:
    """Return the summed cross-entropy over the real tokens of tgt (B, T), which ends with eos.

    The decoder reads bos and the target but for its last token, and predicts the target: shift by
    one. Only real positions meet the output matrix; on the others the loss would be thrown away.
    """
    tgt_in = torch.cat([torch.full_like(tgt[:, :1], BOS), tgt[:, :-1]], dim=1)
    states = model.decode(tgt_in, model.encode(src), src)
    real = tgt != PAD
    logits = model.output(states[real])  # (real tokens, vocabulary)
    return F.cross_entropy(logits.float(), tgt[real], label_smoothing=smoothing, reduction="sum")


def learning_rate(step: int, total: int, peak: float, warmup: int) -> float:
    """Return the rate of step 1, 2, ..., total: linear warm-up to `peak`, then a cosine to 0.

    A pure function of the step, so a resumed run continues on the same curve. A short run warms up
    for a fifth of its steps.

    >>> [learning_rate(step, 100, 1.0, 10) for step in (1, 10, 55, 100)]
    [0.1, 1.0, 0.5, 0.0]
    """
    warmup = min(warmup, max(1, total // 5))
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


# ------------------------------------------------------------------------------------------------
# Training
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where this process computes: its device, its number, how many processes work together."""

    device: torch.device
    rank: int = 0
    world: int = 1


def find_place(device: str) -> Place:
    """Return this process's place; under torchrun, join the other processes."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    available = {"cpu": True, "cuda": torch.cuda.is_available()}
    available["mps"] = torch.backends.mps.is_available()
    if device == "auto":
        device = next(name for name in ("cuda", "mps", "cpu") if available[name])
    if not available.get(device.split(":")[0]):
        usable = ", ".join(name for name, there in available.items() if there)
        raise UserError(f"--device {device} is not available here; usable: {usable}.")
    if world > 1:
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Place(torch.device(device), rank, world)


def cpu_has_bf16() -> bool:
    """Return whether this processor multiplies bf16 matrices itself (AVX512-BF16 or AMX)."""
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(found.get("avx512_bf16") or found.get("amx_bf16") or found.get("amx_tile"))


def choose_precision(wanted: str, device: torch.device) -> str:
    """Return fp32, bf16 or fp16; "auto" is the fastest that this device computes by itself."""
    if wanted == "fp16" and device.type != "cuda":
        raise UserError("--precision fp16 needs a CUDA GPU; use bf16, fp32 or auto.")
    if wanted == "bf16" and device.type == "mps":
        raise UserError("--precision bf16 is not for Apple GPUs; use fp32 or auto.")
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    return "bf16" if device.type == "cpu" and cpu_has_bf16() else "fp32"


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Return the context in which matrix products run in `precision`; weights stay fp32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


class Trainer:
    """Model, data and optimizer of one run; `step` counts the updates done so far.

    Everything random is a function of (seed, epoch) or (seed, step, rank), and the schedule is one
    of the step: weights, optimizer and the step number are all that an exact resume needs.
    """

    def __init__(self, config: Config, prepared: Prepared, place: Place) -> None:
        self.config, self.prepared, self.place = config, prepared, place
        vocabularies = [
            t.get_vocab_size() for t in (prepared.src_tokenizer, prepared.tgt_tokenizer)
        ]
        torch.manual_seed(config.seed)
        self.model = build_model(config, *vocabularies).to(place.device)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.precision = choose_precision(config.precision, place.device)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=self.precision == "fp16")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=place.device.type != "mps"
        )
        self.step = self.total = 0
        self.best = math.inf
        self.seconds = 0.0  # spent in earlier sessions of this run
        self.epoch_plan: tuple[int, list[list[np.ndarray]]] = (-1, [])
        self.steps_per_epoch = len(self.groups(0))

    def groups(self, epoch: int) -> list[list[np.ndarray]]:
        """Return the epoch's batches, grouped into steps: `accumulate` for each process."""
        if self.epoch_plan[0] != epoch:
            train, size = self.prepared.train, self.config.accumulate * self.place.world
            seed = (self.config.seed, epoch)
            batches = plan_batches(train.src, train.tgt, self.config.batch_tokens, seed)
            grouped = [batches[i : i + size] for i in range(0, len(batches), size)]
            self.epoch_plan = (epoch, grouped)
        return self.epoch_plan[1]

    def tokens(self, group: Sequence[np.ndarray]) -> int:
        """Return the number of real target tokens in a step, those of other processes too."""
        return sum(len(self.prepared.train.tgt[i]) for batch in group for i in batch)

    def backward(self, group: Sequence[np.ndarray], step: int) -> Tensor:
        """Add up the gradient of the mean loss per token over a step; return that loss.

        The sum is weighted by tokens, not by batches: dividing each batch's summed loss by the
        tokens of the whole step makes one process with two batches equal two with one each.
        """
        seed = np.random.SeedSequence((self.config.seed, step, self.place.rank))
        torch.manual_seed(int(seed.generate_state(1)[0]))  # decides the dropout of this step
        self.model.train()
        self.optimizer.zero_grad(set_to_none=False)
        tokens, mean = self.tokens(group), torch.zeros((), device=self.place.device)
        for batch in group[self.place.rank :: self.place.world]:
            src, tgt = make_batch(self.prepared.train, batch, self.place.device)
            with autocast(self.precision, self.place.device):
                loss = batch_loss(self.model, src, tgt, self.config.label_smoothing) / tokens
            self.scaler.scale(loss).backward()
            mean += loss.detach()
        if self.place.world > 1:
            gradients = [parameter.grad for parameter in self.model.parameters()]
            flat = torch.cat([mean.view(1), *(g.flatten() for g in gradients)])
            dist.all_reduce(flat)  # one message: the loss and every gradient
            mean, *summed = flat.split([1, *(g.numel() for g in gradients)])
            for gradient, part in zip(gradients, summed, strict=True):
                gradient.copy_(part.view_as(gradient))
        return mean

    def update(self) -> float:
        """Do one step of training; return its loss per token."""
        epoch, index = divmod(self.step, self.steps_per_epoch)
        loss = float(self.backward(self.groups(epoch)[index], self.step))
        self.scaler.unscale_(self.optimizer)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip))
        if not math.isfinite(loss if self.scaler.is_enabled() else loss + norm):
            raise UserError(
                f"Loss {loss} and gradient norm {norm} at step {self.step + 1} (epoch {epoch + 1}, "
                f"step {index + 1} there): not finite. The checkpoints are from before; start "
                "again with a lower --lr, a longer --warmup or --precision fp32."
            )
        self.step += 1
        rate = learning_rate(self.step, self.total, self.config.lr, self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    @torch.no_grad()
    def validate(self) -> float:
        """Return the cross-entropy per token on the dev set, without smoothing and dropout."""
        self.model.eval()
        dev, device = self.prepared.dev, self.place.device
        total = 0.0
        for batch in plan_batches(dev.src, dev.tgt, self.config.batch_tokens, 0):
            with autocast(self.precision, device):
                total += float(batch_loss(self.model, *make_batch(dev, batch, device), 0.0))
        return total / sum(map(len, dev.tgt))

    def plan_steps(self) -> float:
        """Fix the number of steps; return the expected seconds of training.

        Times the gradient of 20 real batches, spread over all lengths, and one validation.
        """
        groups = self.groups(0)
        sample = groups[:: max(1, len(groups) // 20)][:20]
        self.backward(sample[0], 0)  # the first one also pays for setting up
        start = time.perf_counter()
        for group in sample:
            self.backward(group, 0)
        per_step = (time.perf_counter() - start) / len(sample)
        start = time.perf_counter()
        self.validate()
        validations = 1 / min(self.steps_per_epoch, self.config.validate_every)
        measured = torch.tensor(
            [per_step + (time.perf_counter() - start) * validations], device=self.place.device
        )
        if self.place.world > 1:
            dist.all_reduce(measured, dist.ReduceOp.MAX)
        seconds = float(measured)
        self.total = self.config.epochs * self.steps_per_epoch
        if self.config.minutes:
            self.total = max(1, round(self.config.minutes * 60 / seconds))
        return self.total * seconds

    def state(self, seconds: float) -> dict[str, Any]:
        """Return all that an exact resume needs."""
        return {
            "config": asdict(self.config),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "progress": [self.step, self.total, self.best, self.seconds + seconds],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.total, self.best, self.seconds = state["progress"]

    def checkpoint(self) -> dict[str, Any]:
        """Return what translating needs: weights, architecture, and which tokenizers belong."""
        tokenizers = (self.prepared.src_tokenizer, self.prepared.tgt_tokenizer)
        return {
            "format": "iwslt-transformer-1",
            "config": asdict(self.config),
            "vocab_sizes": [t.get_vocab_size() for t in tokenizers],
            "tokenizers": [text_hash(t.to_str()) for t in tokenizers],
            "weights": self.model.state_dict(),
            "step": self.step,
            "dev_loss": self.best,
        }


def text_hash(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


@contextlib.contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM instead of dying, so that training can save first."""
    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        if caught:  # asked twice: no more waiting
            raise KeyboardInterrupt
        caught.append(number)

    previous = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def train(trainer: Trainer, run: Path, say: Callable[[str], None]) -> int:
    """Train to the end, saving as it goes; return 0, or 128 + the signal that ended it early."""
    config, chief = trainer.config, trainer.place.rank == 0
    metrics = [row for row in read_metrics(run) if row["step"] <= trainer.step]
    started = saved = time.monotonic()
    running = tokens = 0.0  # loss and target tokens since the last line of metrics
    counted = started
    bar = tqdm(
        total=trainer.total, initial=trainer.step, unit="step", disable=None if chief else True
    )

    def save() -> None:
        nonlocal saved
        if chief:
            saved = time.monotonic()
            write_file(run / STATE, lambda f: torch.save(trainer.state(saved - started), f))
            lines = "".join(json.dumps(row) + "\n" for row in metrics)
            write_file(run / "metrics.jsonl", lines.encode("utf-8"))

    with stop_on_signal() as caught, bar:
        while trainer.step < trainer.total:
            epoch, index = divmod(trainer.step, trainer.steps_per_epoch)
            tokens += trainer.tokens(trainer.groups(epoch)[index])
            loss = trainer.update()
            running = loss if not running else 0.95 * running + 0.05 * loss
            rate = trainer.optimizer.param_groups[0]["lr"]
            now = time.monotonic()
            bar.set_postfix_str(
                f"loss {running:.3f}, rate {rate:.1e}, {tokens / (now - counted):,.0f} tokens/s",
                refresh=False,
            )
            bar.update()
            ended = index + 1 == trainer.steps_per_epoch or trainer.step == trainer.total
            if chief and (ended or trainer.step % config.validate_every == 0):
                metrics.append(validation(trainer, run, running, tokens / (now - counted)))
                metrics[-1]["seconds"] = round(trainer.seconds + time.monotonic() - started, 1)
                say("\n".join(describe(trainer, metrics[-1])))
                tokens, counted = 0.0, time.monotonic()
                save()
            elif chief and trainer.step % 50 == 0:
                metrics.append({"step": trainer.step, "loss": round(running, 4), "rate": rate})
            stop = anyone(bool(caught), trainer.place)
            if stop or now - saved > 300:
                save()
            if stop:
                number = caught[0] if caught else signal.SIGTERM
                say(f"Stopped after step {trainer.step:,}; --resume goes on from there.")
                return 128 + number
    return 0


def anyone(wish: bool, place: Place) -> bool:
    """Return whether any process wishes to stop, so that all of them stop after the same step."""
    if place.world == 1:
        return wish
    wishes = torch.tensor([float(wish)], device=place.device)
    dist.all_reduce(wishes)
    return bool(wishes.item())


def validation(trainer: Trainer, run: Path, loss: float, speed: float) -> dict[str, Any]:
    """Measure the dev loss, keep the weights if they are the best so far; return a metrics row."""
    dev_loss = trainer.validate()
    better = dev_loss < trainer.best
    if better:
        trainer.best = dev_loss
        write_file(run / BEST, lambda file: torch.save(trainer.checkpoint(), file))
    return {
        "step": trainer.step,
        "epoch": round(trainer.step / trainer.steps_per_epoch, 3),
        "loss": round(loss, 4),
        "dev_loss": round(dev_loss, 4),
        "best": better,
        "tokens_per_second": round(speed),
    }


def describe(trainer: Trainer, row: dict[str, Any]) -> list[str]:
    """Return a validation as lines to read: the figures, then two dev sentences translated."""
    lines = [
        f"epoch {row['epoch']:.2f}, step {row['step']:,}/{trainer.total:,}: "
        f"loss {row['loss']:.3f}, dev loss {row['dev_loss']:.3f} "
        f"(perplexity {math.exp(min(row['dev_loss'], 50)):.1f})"
        + (", best so far" if row["best"] else "")
    ]
    prepared = trainer.prepared
    samples = [len(prepared.dev) // 3, 2 * len(prepared.dev) // 3]
    outputs = translate_ids(trainer.model, [prepared.dev.src[i] for i in samples], beam=1)
    for i, output in zip(samples, outputs, strict=True):
        lines.append(f"    {decode(prepared.src_tokenizer, prepared.dev.src[i])}")
        lines.append(f"     -> {decode(prepared.tgt_tokenizer, output)}")
    return lines


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, none where there is no such file."""
    try:
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]


def draw_curve(run: Path) -> str:
    """Draw training and dev loss into curve.png; return what was done, in a sentence."""
    try:
        import matplotlib
    except ImportError:
        return "No curve.png: it needs matplotlib."
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(run)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], color="0.6", label="training")
    dev = [r for r in rows if "dev_loss" in r]
    axes.plot([r["step"] for r in dev], [r["dev_loss"] for r in dev], "ko-", ms=4, label="dev")
    axes.set(xlabel="step", ylabel="cross-entropy per target token (nats)")
    axes.set_title(f"{run.name}: training loss with label smoothing, dev loss without", fontsize=10)
    axes.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    pyplot.close(figure)
    write_file(run / "curve.png", image.getvalue())
    return f"Learning curve: {run / 'curve.png'}"


# ------------------------------------------------------------------------------------------------
# The folder of a run
# ------------------------------------------------------------------------------------------------


def lock_folder(run: Path) -> BinaryIO:
    """Keep other processes from writing this folder until this one ends, however it ends."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = open(run / "lock", "a+b")  # noqa: SIM115 (held open on purpose: closing unlocks)
    except OSError as error:
        raise UserError(f"{run} cannot be used as the folder of a run ({error}).") from error
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(
            f"Another process is training in {run}; wait for it, or choose another folder (--run)."
        ) from error
    return file


def load_file(path: Path, device: torch.device) -> dict[str, Any]:
    """Return what torch.save wrote, tensors and plain values only: no code in it is ever run."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises many kinds, depending on what is wrong with the file
        raise UserError(
            f"{path} is damaged or not a checkpoint of this program ({type(error).__name__}); "
            "take another --run, or train again with --restart."
        ) from error


def open_run(
    run: Path, given: dict[str, Any], resume: bool, restart: bool
) -> tuple[Config, dict[str, Any] | None]:
    """Decide between a fresh start and going on; return the configuration and the stored state.

    `given` holds the settings named on the command line. A demo is replaced without asking, since
    it costs a minute; a full run only with --restart.
    """
    files = [run / name for name in (BEST, STATE, "metrics.jsonl")]
    state = load_file(run / STATE, torch.device("cpu")) if (run / STATE).exists() else None
    preset = PRESETS[given.get("preset", "laptop")]
    if resume and not restart:
        if state is None:
            print(f"Nothing to resume in {run}: starting afresh.")
        else:
            config = Config(**state["config"])
            wanted = {**(preset if "preset" in given else {}), **given}
            changed = [n for n, value in wanted.items() if getattr(config, n) != value]
            if changed:
                before = ", ".join(f"{flag(n)} {getattr(config, n)}" for n in changed)
                raise UserError(
                    f"{run} was started with {before}. Resume with the same settings, or begin "
                    "anew with --restart."
                )
            return config, state
    is_demo = given["demo"] and (state is None or state["config"]["demo"])
    if any(file.exists() for file in files) and not restart and not is_demo:
        raise UserError(
            f"{run} holds a trained model. Go on with --resume, replace it with --restart, or "
            "choose another folder with --run."
        )
    for file in files:
        file.unlink(missing_ok=True)
    return Config(**{**preset, **given}), None


# ------------------------------------------------------------------------------------------------
# Search
# ------------------------------------------------------------------------------------------------


def length_penalty(length: Tensor | float, alpha: float) -> Tensor | float:
    """((5 + length) / 6)^alpha (Wu et al., 2016): a hypothesis scores log P / penalty.

    >>> length_penalty(1, 0.6), round(length_penalty(7, 0.6), 4)
    (1.0, 1.5157)
    """
    return ((5 + length) / 6) ** alpha


@torch.inference_mode()
def beam_search(
    model: Transformer, src: Tensor, beam: int = 4, alpha: float = 0.6
) -> list[list[int]]:
    """Translate source ids (B, S) into B lists of target ids, without bos and eos.

    At each step the `width` best continuations of a sentence are kept; one that ends with eos
    leaves the beam, and the width shrinks by one. A sentence is finished when its beam is empty, or
    when no hypothesis in it can still beat the best finished one, even if all further tokens were
    certain. Beam 1 is greedy decoding. Nothing depends on the other sentences of the batch.
    """
    model.eval()
    device, n = src.device, src.size(0)
    limit = (src != PAD).sum(1) + EXTRA_OUTPUT  # (B,)
    caches = model.new_caches(model.encode(src))
    rows = torch.arange(n, device=device).repeat_interleave(beam)  # each sentence `beam` times
    for cache in caches:
        cache.memory = tuple(x[rows] for x in cache.memory)
    sentence = torch.arange(n, device=device)  # which sentences are still open
    src = src[rows]
    history = torch.full((n * beam, 1), BOS, device=device)
    scores = torch.full((n, beam), -math.inf, device=device)
    scores[:, 0] = 0.0  # at first all hypotheses of a sentence are alike: one of them counts
    width = torch.full((n,), beam, device=device)
    best_score = torch.full((n,), -math.inf, device=device)
    best: list[list[int]] = [[] for _ in range(n)]

    for length in itertools.count(1):
        states = model.decode(history[:, -1:], None, src, caches)
        log_p = model.output(states[:, -1]).float().log_softmax(-1)
        log_p[:, [PAD, BOS]] = -math.inf  # never part of a translation
        total = (scores.view(-1, 1) + log_p).view(len(scores), -1)  # (open, beam * vocabulary)
        top, index = total.topk(beam)
        parent, token = index // log_p.size(-1), index % log_p.size(-1)
        inside = (torch.arange(beam, device=device) < width[:, None]) & top.isfinite()
        ended = inside & ((token == EOS) | (length >= limit)[:, None])

        origin = torch.arange(len(scores), device=device)[:, None] * beam + parent
        final = (top / length_penalty(length, alpha)).masked_fill(~ended, -math.inf)
        leading, which = final.max(1)
        for i in (leading > best_score).nonzero().flatten().tolist():
            row = [*history[origin[i, which[i]], 1:].tolist(), int(token[i, which[i]])]
            best[int(sentence[i])] = row[:-1] if row[-1] == EOS else row
        best_score = torch.maximum(best_score, leading)

        width = width - ended.sum(1)
        scores = top.masked_fill(~inside | ended, -math.inf)
        hope = scores.max(1).values / length_penalty(limit.float(), alpha)
        kept = ((width > 0) & (hope > best_score)).nonzero().flatten()
        if len(kept) == 0:
            return best
        rows = origin[kept].flatten()
        history = torch.cat([history[rows], token[kept].view(-1, 1)], dim=1)
        closed = len(kept) < len(scores)
        for cache in caches:
            cache.target = tuple(x[rows] for x in cache.target)
            if closed:  # within a sentence all hypotheses share the memory
                cache.memory = tuple(x[rows] for x in cache.memory)
        if closed:
            src, sentence, limit = src[rows], sentence[kept], limit[kept]
            width, best_score = width[kept], best_score[kept]
        scores = scores[kept]
    raise AssertionError("unreachable: every sentence has a limit")


def translate_ids(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    beam: int,
    alpha: float = 0.6,
    progress: bool = False,
) -> list[list[int]]:
    """Translate any number of encoded sentences, many at once, and return them in their order."""
    device = next(model.parameters()).device
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))  # alike lengths together
    results: list[list[int]] = [[] for _ in sources]
    bar = tqdm(total=len(order), unit="sentence", disable=None if progress else True)
    with bar:
        while order:
            size = max(1, 4096 // (beam * len(sources[order[0]])))
            chosen, order = order[:size], order[size:]
            src = pad_rows([sources[i] for i in chosen]).to(device)
            for i, output in zip(chosen, beam_search(model, src, beam, alpha), strict=True):
                results[i] = output
            bar.update(len(chosen))
    return results


# ------------------------------------------------------------------------------------------------
# A trained run, in use
# ------------------------------------------------------------------------------------------------


class Translator:
    """Ordinary text in, ordinary text out, with the best checkpoint of a run."""

    def __init__(self, run: Path, device: torch.device, beam: int = 4) -> None:
        try:
            checkpoint = load_file(run / BEST, device)
        except FileNotFoundError as error:
            raise UserError(
                f"No trained model in {run}. Train one first: python 08_iwslt_vi_en.py --demo "
                "(a minute) or --full (hours)."
            ) from error
        if checkpoint.get("format") != "iwslt-transformer-1":
            raise UserError(f"{run / BEST} is not a checkpoint of this program.")
        self.run, self.beam = run, beam
        self.config = Config(**checkpoint["config"])
        self.step, self.dev_loss = checkpoint["step"], checkpoint["dev_loss"]
        languages = (self.config.src, self.config.tgt)
        self.tokenizers = []
        for language, wanted in zip(languages, checkpoint["tokenizers"], strict=True):
            path = run / f"{language}_tokenizer.json"
            try:
                tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
            except Exception as error:  # tokenizers raises a plain Exception for a broken file
                raise UserError(f"{path} is missing or damaged ({error}).") from error
            if text_hash(tokenizer.to_str()) != wanted:
                raise UserError(f"{path} is not the tokenizer that {run / BEST} was trained with.")
            self.tokenizers.append(tokenizer)
        self.model = build_model(self.config, *checkpoint["vocab_sizes"]).to(device).eval()
        self.model.load_state_dict(checkpoint["weights"])
        self.borders = [Moses(language) for language in languages]
        self.known = set()  # the demo's words; a full model has seen too many to list
        if self.config.demo:
            side = (self.config.src, self.config.tgt).index("en") and 1
            self.known = {word for pair in demo_pairs()[0] for word in pair[side].split()}

    def to_corpus(self, lines: Sequence[str], progress: bool = False) -> list[str]:
        """Translate lines of ordinary text, sentence by sentence; return lines in corpus form."""
        pieces: list[np.ndarray] = []
        owners: list[int] = []  # the line each piece belongs to
        for number, line in enumerate(lines):
            for sentence in self.borders[0].sentences(clean(line)):
                ids = encode(self.tokenizers[0], [self.borders[0].to_corpus(sentence)])[0][:-1]
                longest = MAX_POSITIONS - EXTRA_OUTPUT - 1
                for start in range(0, len(ids), longest):
                    pieces.append(np.append(ids[start : start + longest], EOS))
                    owners.append(number)
        outputs = translate_ids(self.model, pieces, self.beam, progress=progress)
        translated: list[list[str]] = [[] for _ in lines]
        for owner, output in zip(owners, outputs, strict=True):
            translated[owner].append(decode(self.tokenizers[1], output))
        return [" ".join(parts) for parts in translated]

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Translate lines of ordinary text; an empty line stays empty."""
        return [self.borders[1].to_text(line) for line in self.to_corpus(lines)]

    def unknown_words(self, line: str) -> list[str]:
        """Return the words of a line that the demo was never shown; none for a full model."""
        words = re.findall(r"[^\W_]+", clean(line).lower())
        return [w for w in dict.fromkeys(words) if w not in self.known] if self.known else []


def find_run(direction: str) -> Path:
    """Return the newest full run of a direction, else its demo, among the folders in runs/."""
    found = []
    for checkpoint in (HERE / "runs").glob(f"*/{BEST}"):
        with contextlib.suppress(UserError, KeyError, TypeError):
            config = load_file(checkpoint, torch.device("cpu"))["config"]
            if config["direction"] == direction:
                found.append((not config["demo"], checkpoint.stat().st_mtime, checkpoint.parent))
    if not found:
        raise UserError(
            f"Nothing trained for {direction} yet. Run: python 08_iwslt_vi_en.py --demo --direction "
            f"{direction} (a minute), or --full instead of --demo (hours)."
        )
    return max(found)[-1]


def evaluate(translator: Translator, data: Path, progress: bool = True) -> None:
    """Print BLEU and chrF on the test set, with signatures; write the hypotheses to a file.

    The source goes through the same path as a person's text, so what is scored is what people get.
    """
    from sacrebleu.metrics import BLEU, CHRF

    config, border = translator.config, translator.borders
    if config.demo:
        raise UserError("The demo has no test set; it reports its held-out pairs when it trains.")
    pairs = load_pairs(data, "test", (config.src, config.tgt))
    if pairs is None:
        raise missing_files(data, "test", (config.src, config.tgt))
    start = time.perf_counter()
    sources = [border[0].to_text(src) for src, _ in pairs]
    hypotheses = translator.to_corpus(sources, progress)
    seconds = time.perf_counter() - start
    references = [tgt for _, tgt in pairs]
    texts = [[border[1].to_text(line) for line in lines] for lines in (hypotheses, references)]
    path = translator.run / f"test-{config.direction}-beam{translator.beam}.txt"
    write_file(path, "".join(line + "\n" for line in hypotheses).encode("utf-8"))

    print(f"{len(pairs):,} test sentences, beam {translator.beam}, {seconds:.0f} s; {path}")
    for name, metric, (hypothesis, reference) in (
        ("BLEU, corpus form", BLEU(tokenize="none", force=True), (hypotheses, references)),
        ("BLEU, ordinary text", BLEU(), texts),
        ("chrF, ordinary text", CHRF(), texts),
    ):
        score = metric.corpus_score(hypothesis, [reference], n_bootstrap=1000)
        print(f"{name}: {score.score:.2f} (95% confidence {score._mean:.2f} ± {score._ci:.2f})")
        print(f"    {metric.get_signature()}")
    for i in range(0, len(pairs), max(1, len(pairs) // 10))[:10]:
        print(f"\n{config.src}   {sources[i]}\n{config.tgt}   {texts[1][i]}\n ->  {texts[0][i]}")


def infer(translator: Translator) -> None:
    """Translate what is typed, or, where stdin is no terminal, each line of it."""
    config = translator.config

    def hint(line: str) -> None:
        if unknown := translator.unknown_words(line):
            print(f"(the demo never saw: {', '.join(unknown)})", file=sys.stderr)

    if not sys.stdin.isatty():
        while lines := list(itertools.islice(sys.stdin, 64)):
            for line, output in zip(lines, translator.translate(lines), strict=True):
                hint(line)
                print(output, flush=True)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() its history and editing keys)
    print("Type a sentence; an empty line or Ctrl-D ends.", file=sys.stderr)
    while line := clean(input(f"{config.src.upper()}> ")):
        print(f"{config.tgt.upper()}> {translator.translate([line])[0]}")
        hint(line)


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def flag(name: str) -> str:
    """Return a setting's flag: batch_tokens -> --batch-tokens."""
    return "--" + name.replace("_", "-")


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's parser; a setting that is not given is absent from the result."""
    parser = argparse.ArgumentParser(
        description="Train an English-Vietnamese Transformer, and translate with it.",
        epilog=__doc__[__doc__.index("    python") : __doc__.index("The file reads")],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    modes = parser.add_mutually_exclusive_group()
    for mode, text in {
        "demo": "train on the built-in pairs, then show translations",
        "full": "train on the corpus in --data",
        "infer": "translate what you type, or standard input line by line",
        "evaluate": "score the test set",
        "download": "fetch the IWSLT'15 archives into --data",
    }.items():
        modes.add_argument(flag(mode), dest="mode", action="store_const", const=mode, help=text)
    parser.add_argument("--resume", action="store_true", help="go on where a training stopped")
    parser.add_argument(
        "--restart", action="store_true", help="replace what is in the run's folder"
    )
    parser.add_argument(
        "--run", type=Path, help="folder of the run (default: runs/full-en-vi, ...)"
    )
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder of the corpus")
    parser.add_argument("--beam", type=int, default=4, help="beam width; 1 is greedy (default: 4)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto (default)")
    settings = parser.add_argument_group("settings of a run (presets change some of the defaults)")
    for item in fields(Config):
        if "help" not in item.metadata:
            continue
        kind: dict[str, Any] = {"type": type(item.default)}
        if isinstance(item.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif "choices" in item.metadata:
            kind["choices"] = item.metadata["choices"]
        settings.add_argument(
            flag(item.name),
            default=argparse.SUPPRESS,
            help=f"{item.metadata['help']} (default: {item.default})",
            **kind,
        )
    return parser


def train_command(args: argparse.Namespace, given: dict[str, Any]) -> int:
    """Carry out --demo and --full."""
    demo = args.mode == "demo"
    given = {**given, "demo": demo}
    if demo:
        given.setdefault("preset", "demo")
    direction = given.get("direction", "en-vi")
    run = args.run or HERE / "runs" / f"{args.mode}-{direction}"
    place = find_place(args.device)
    chief = place.rank == 0

    def say(text: str) -> None:
        if chief:
            tqdm.write(text)

    with contextlib.ExitStack() as stack:
        if chief:
            stack.enter_context(lock_folder(run))
            config, state = open_run(run, given, args.resume, args.restart)
            prepared = prepare(config, args.data, run)
        if place.world > 1:
            shared = [config, state] if chief else [None, None]
            dist.broadcast_object_list(shared)
            config, state = shared
            if not chief:
                prepared = prepare(config, args.data, run)
        trainer = Trainer(config, prepared, place)
        if state is not None:
            trainer.load(state)
            if trainer.step >= trainer.total:
                say(f"{run} is finished: {trainer.step:,} steps, dev loss {trainer.best:.3f}.")
                return 0
            say(f"Going on after step {trainer.step:,} of {trainer.total:,}.")
        parameters = sum(p.numel() for p in trainer.model.parameters())
        sizes = [t.get_vocab_size() for t in (prepared.src_tokenizer, prepared.tgt_tokenizer)]
        for line in prepared.report:
            say(line)
        say(
            f"{config.direction}: {config.n_layers}+{config.n_layers} layers, d_model "
            f"{config.d_model}, {config.n_heads} heads, d_ff {config.d_ff}, vocabularies "
            f"{sizes[0]:,} and {sizes[1]:,}: {parameters:,} parameters"
        )
        reason = "" if config.precision != "auto" else {
            "fp32": " (no fast bf16 here)", "bf16": " (native here)", "fp16": " (no bf16 here)"
        }[trainer.precision]  # fmt: skip
        say(
            f"{place.world} process(es) on {place.device.type}, {torch.get_num_threads()} threads, "
            f"{trainer.precision}{reason}"
        )
        seconds = trainer.plan_steps() if state is None else math.nan
        say(
            f"{trainer.total:,} steps, {trainer.total / trainer.steps_per_epoch:.1f} epochs of "
            f"{trainer.steps_per_epoch:,}; about {seconds / 60:.1f} minutes and "
            f"{parameters * 16 / 1e6:,.0f} MB on disk, in {run}"
        )
        status = train(trainer, run, say)
        if status or not chief:
            return status
        say(f"Done: best dev loss {trainer.best:.3f}. {draw_curve(run)}")
        if not demo:
            say(f"{TED_LICENCE}\nNext: python 08_iwslt_vi_en.py --evaluate, or --infer")
            return 0
    show_demo(Translator(run, place.device, args.beam), config)
    return 0


def show_demo(translator: Translator, config: Config) -> None:
    """Translate the held-out pairs, count the exact ones, show some, say what to do next."""
    pairs = [pair if config.src == "en" else pair[::-1] for pair in demo_pairs()[1]]
    outputs = translator.translate([src for src, _ in pairs])
    right = sum(output == tgt for output, (_, tgt) in zip(outputs, pairs, strict=True))
    print(f"\nHeld out, never trained on: {right} of {len(pairs)} exactly right. Some of them:")
    for (src, tgt), output in list(zip(pairs, outputs, strict=True))[:: len(pairs) // 10]:
        print(f"  {src}  ->  {output}" + ("" if output == tgt else f"   (expected: {tgt})"))
    print(f"\nNow try your own: python 08_iwslt_vi_en.py --infer --direction {config.direction}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    parser = build_parser()
    args = parser.parse_args(arguments)
    names = {item.name for item in fields(Config)}
    given = {name: value for name, value in vars(args).items() if name in names}
    try:
        if args.mode is None:
            raise UserError("Say what to do, for instance:\n" + parser.epilog.rstrip())
        if args.beam < 1:
            raise UserError("--beam must be at least 1.")
        if args.mode in ("demo", "full"):
            return train_command(args, given)
        if args.mode == "download":
            download(args.data)
            return 0
        run = args.run or find_run(given.get("direction", "en-vi"))
        translator = Translator(run, find_place(args.device).device, args.beam)
        if given.get("direction", translator.config.direction) != translator.config.direction:
            raise UserError(f"{run} translates {translator.config.direction}.")
        print(f"Model: {run}, {translator.config.direction}", file=sys.stderr)
        if args.mode == "evaluate":
            evaluate(translator, args.data)
        else:
            infer(translator)
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        print(file=sys.stderr)
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
