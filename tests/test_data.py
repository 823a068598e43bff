"""Reading a corpus: pairs stay pairs, wrong files are refused with a sentence, nothing is lost."""

import contextlib
import gzip
import hashlib
import http.server
import io
import pickle
import re
import socket
import socketserver
import tarfile
import threading

import numpy as np
import pytest
import torch

EN_VI = ("en", "vi")
ENGLISH = ["I am happy .", "It &apos;s late .", "Where is she ?"]
VIETNAMESE = ["Tôi vui .", "Muộn rồi .", "Cô ấy ở đâu ?"]
PAIRS = list(zip(ENGLISH, VIETNAMESE, strict=True))


def as_file(lines):
    return "".join(line + "\n" for line in lines).encode("utf-8")


def put_plain(folder, stem, sides, languages=EN_VI):
    """Write a part of the corpus as two plain files; a side is lines or bytes."""
    for side, language in zip(sides, languages, strict=True):
        content = side if isinstance(side, bytes) else as_file(side)
        (folder / f"{stem}.{language}").write_bytes(content)


def archive_of(members, mode="w:gz"):
    """Return the bytes of an archive: (name or TarInfo, content) in this order."""
    block = io.BytesIO()
    with tarfile.open(fileobj=block, mode=mode) as tar:
        for info, content in members:
            info = tarfile.TarInfo(info) if isinstance(info, str) else info
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return block.getvalue()


def put_archive(lesson8, folder, part, sides, stem=None):
    """Write a part of the corpus as its archive."""
    name, _, stems = lesson8.ARCHIVES[part]
    members = [
        (f"{stem or stems[0]}.{language}", as_file(side))
        for language, side in zip(EN_VI, sides, strict=True)
    ]
    (folder / name).write_bytes(archive_of(members))
    return folder / name


def snapshot(folder):
    """Everything below a folder, with its content: to see that nothing was written."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def message_of(lesson8, call, *args, **kwargs):
    """The sentence of the UserError that a call ends with."""
    with pytest.raises(lesson8.UserError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert " " in message and "Traceback" not in message
    return message


# Where the lines come from

PARTS = [("train", "train"), ("dev", "tst2012"), ("dev", "dev"), ("test", "tst2013")]
PARTS += [("test", "test")]


@pytest.mark.parametrize(("part", "stem"), PARTS)
def test_plain_files_and_the_archive_give_the_same_pairs(lesson8, tmp_path, part, stem):
    (tmp_path / "plain").mkdir()
    (tmp_path / "packed").mkdir()
    put_plain(tmp_path / "plain", stem, (ENGLISH, VIETNAMESE))
    put_archive(lesson8, tmp_path / "packed", part, (ENGLISH, VIETNAMESE), stem)
    assert lesson8.load_pairs(tmp_path / "plain", part, EN_VI) == PAIRS
    assert lesson8.load_pairs(tmp_path / "packed", part, EN_VI) == PAIRS


def test_reading_an_archive_writes_nothing(lesson8, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put_archive(lesson8, tmp_path, "train", (ENGLISH, VIETNAMESE))
    before = snapshot(tmp_path)
    lesson8.load_pairs(tmp_path, "train", EN_VI)
    assert snapshot(tmp_path) == before


def test_members_in_a_folder_of_the_archive_are_found(lesson8, tmp_path):
    members = [("data/train.vi", as_file(VIETNAMESE)), ("data/train.en", as_file(ENGLISH))]
    (tmp_path / "train-en-vi.tgz").write_bytes(archive_of(members))
    assert lesson8.load_pairs(tmp_path, "train", EN_VI) == PAIRS


@pytest.mark.parametrize(("part", "stem"), PARTS)
def test_plain_files_go_before_the_archive(lesson8, tmp_path, part, stem):
    put_archive(lesson8, tmp_path, part, (["packed"], ["gói"]))
    put_plain(tmp_path, stem, (ENGLISH, VIETNAMESE))
    assert lesson8.load_pairs(tmp_path, part, EN_VI) == PAIRS


def test_one_plain_file_is_never_paired_with_one_from_the_archive(lesson8, tmp_path):
    put_archive(lesson8, tmp_path, "train", (ENGLISH, VIETNAMESE))
    (tmp_path / "train.en").write_bytes(as_file(["another", "text", "here"]))
    assert lesson8.load_pairs(tmp_path, "train", EN_VI) == PAIRS


def test_the_reversed_direction_is_really_reversed(lesson8, tmp_path):
    put_plain(tmp_path, "train", (ENGLISH, VIETNAMESE))
    put_archive(lesson8, tmp_path, "dev", (ENGLISH, VIETNAMESE))
    for part in ("train", "dev"):
        pairs = lesson8.load_pairs(tmp_path, part, ("vi", "en"))
        assert pairs == [(vietnamese, english) for english, vietnamese in PAIRS]


def test_other_languages_work_with_plain_files(lesson8, tmp_path):
    put_plain(tmp_path, "train", (["ja", "nein"], ["oui", "non"]), ("de", "fr"))
    put_plain(tmp_path, "dev", (["gut"], ["bon"]), ("de", "fr"))
    assert lesson8.load_pairs(tmp_path, "train", ("de", "fr")) == [("ja", "oui"), ("nein", "non")]
    assert lesson8.load_pairs(tmp_path, "train", ("fr", "de")) == [("oui", "ja"), ("non", "nein")]
    assert lesson8.load_pairs(tmp_path, "dev", ("fr", "de")) == [("bon", "gut")]


# Missing files


@pytest.mark.parametrize("part", ["train", "dev", "test"])
def test_missing_data_is_named_with_its_place_and_origin(lesson8, tmp_path, part):
    message = message_of(lesson8, lesson8.load_pairs, tmp_path, part, EN_VI)
    archive, _, stems = lesson8.ARCHIVES[part]
    for needed in (str(tmp_path), archive, f"{stems[0]}.en", f"{stems[0]}.vi", "--download"):
        assert needed in message
    assert lesson8.ORIGIN in message


def test_a_folder_that_does_not_exist_is_reported_alike(lesson8, tmp_path):
    folder = tmp_path / "nowhere"
    assert str(folder) in message_of(lesson8, lesson8.load_pairs, folder, "train", EN_VI)


def test_missing_data_of_other_languages_names_files_but_no_download(lesson8, tmp_path):
    message = message_of(lesson8, lesson8.load_pairs, tmp_path, "train", ("de", "fr"))
    assert "train.de" in message and "train.fr" in message
    assert "http" not in message


def test_the_english_vietnamese_archive_is_not_taken_for_another_pair(lesson8, tmp_path):
    put_archive(lesson8, tmp_path, "train", (ENGLISH, VIETNAMESE))
    assert "train.fr" in message_of(lesson8, lesson8.load_pairs, tmp_path, "train", ("en", "fr"))


def test_a_part_that_is_not_required_may_be_absent(lesson8, tmp_path):
    assert lesson8.load_pairs(tmp_path, "dev", EN_VI, required=False) is None


def test_a_part_that_is_not_required_is_still_refused_when_wrong(lesson8, tmp_path):
    put_plain(tmp_path, "dev", (ENGLISH, VIETNAMESE[:2]))
    message_of(lesson8, lesson8.load_pairs, tmp_path, "dev", EN_VI, required=False)


# Archives nobody should trust


@pytest.fixture
def hostile_folder(tmp_path):
    """(folder of the corpus, folder around it that nothing may change, with a secret in it)"""
    folder = tmp_path / "outer" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "outer" / "secret").write_bytes(as_file(["secret 1", "secret 2", "secret 3"]))
    return folder, tmp_path


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (tarfile.SYMTYPE, "../secret"),
        (tarfile.SYMTYPE, "{outer}/secret"),
        (tarfile.SYMTYPE, "train.vi"),
        (tarfile.LNKTYPE, "../secret"),
        (tarfile.LNKTYPE, "train.vi"),
        (tarfile.CHRTYPE, ""),
        (tarfile.BLKTYPE, ""),
        (tarfile.FIFOTYPE, ""),
        (tarfile.DIRTYPE, ""),
    ],
)
def test_a_member_that_is_no_regular_file_is_not_followed(lesson8, hostile_folder, kind, target):
    folder, around = hostile_folder
    trap = tarfile.TarInfo("train.en")
    trap.type, trap.linkname = kind, target.format(outer=folder.parent)
    members = [("train.vi", as_file(VIETNAMESE)), (trap, b"")]
    (folder / "train-en-vi.tgz").write_bytes(archive_of(members))
    before = snapshot(around)
    message = message_of(lesson8, lesson8.load_pairs, folder, "train", EN_VI)
    assert "secret" not in message and "train.en" in message
    assert snapshot(around) == before


@pytest.mark.parametrize("path", ["{outer}/train.en", "../train.en", "a/../../../train.en"])
def test_a_member_with_a_path_elsewhere_writes_and_reads_nothing_there(
    lesson8, hostile_folder, path
):
    folder, around = hostile_folder
    (folder.parent / "train.en").write_bytes(as_file(["secret 1", "secret 2", "secret 3"]))
    members = [(path.format(outer=folder.parent), as_file(ENGLISH))]
    members += [("train.vi", as_file(VIETNAMESE))]
    (folder / "train-en-vi.tgz").write_bytes(archive_of(members))
    before = snapshot(around)
    with contextlib.suppress(lesson8.UserError):  # it may be refused as well
        assert lesson8.load_pairs(folder, "train", EN_VI) == PAIRS
    assert snapshot(around) == before


@pytest.fixture(scope="module")
def large_archive():
    """(archive of 234 kB, the text of either side): larger than any buffer on the way."""
    random = np.random.default_rng(5)
    words = np.array([a + b for a in "bcdghklmnt" for b in "aeiouy"])
    text = as_file(" ".join(random.choice(words, 12)) for _ in range(6000))
    return archive_of([("train.en", text), ("train.vi", text)]), text


@pytest.mark.parametrize(
    "content",
    [b"", b"not an archive", b"\x1f\x8b", b"\x1f\x8b\x08\x00" + b"\xff" * 200, b"\0" * 10240],
    ids=["empty", "text", "two bytes of gzip", "broken gzip", "zeros"],
)
def test_what_is_no_archive_is_refused_by_name(lesson8, tmp_path, content):
    (tmp_path / "train-en-vi.tgz").write_bytes(content)
    message = message_of(lesson8, lesson8.load_pairs, tmp_path, "train", EN_VI)
    assert "train-en-vi.tgz" in message and str(tmp_path) in message


def test_a_truncated_archive_is_refused_by_name(lesson8, tmp_path, large_archive):
    content, _ = large_archive
    for share in (0.01, 0.3, 0.5, 0.7, 0.95):
        (tmp_path / "train-en-vi.tgz").write_bytes(content[: int(len(content) * share)])
        message = message_of(lesson8, lesson8.load_pairs, tmp_path, "train", EN_VI)
        assert "train-en-vi.tgz" in message


def test_an_archive_with_one_wrong_bit_never_gives_wrong_text(lesson8, tmp_path, large_archive):
    content, text = large_archive
    random = np.random.default_rng(6)
    path = tmp_path / "train-en-vi.tgz"
    refused = 0
    for position in random.integers(20, len(content), 12):
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        try:
            sides = lesson8.read_part(tmp_path, "train", EN_VI)
        except lesson8.UserError as error:
            refused += path.name in str(error)
        else:
            assert [*sides.values()] == [text, text], (
                f"a wrong bit in byte {position} changed the text"
            )
    assert refused


def test_an_archive_without_the_files_is_no_data(lesson8, tmp_path):
    content = archive_of([("readme", b"hello\n")])
    (tmp_path / "train-en-vi.tgz").write_bytes(content)
    assert "train.en" in message_of(lesson8, lesson8.load_pairs, tmp_path, "train", EN_VI)


def test_damaged_headers_inside_a_sound_gzip_end_with_a_sentence_or_text(lesson8, tmp_path):
    content = archive_of([("train.en", as_file(ENGLISH)), ("train.vi", as_file(VIETNAMESE))], "w")
    random = np.random.default_rng(7)
    for _ in range(300):
        damaged = bytearray(content[:3072])
        damaged[random.integers(512) + 1024 * random.integers(2)] = random.integers(256)
        (tmp_path / "train-en-vi.tgz").write_bytes(gzip.compress(damaged, 1))
        with contextlib.suppress(lesson8.UserError):  # anything else would be a traceback
            lesson8.load_pairs(tmp_path, "train", EN_VI)


# Lines and their ends


def test_different_line_counts_are_refused_with_both_counts(lesson8, tmp_path):
    put_plain(tmp_path, "train", (["a"] * 1204, ["b"] * 1203))
    message = message_of(lesson8, lesson8.load_pairs, tmp_path, "train", EN_VI)
    assert re.search(r"train\.en\D+1,?204\b", message)
    assert re.search(r"train\.vi\D+1,?203\b", message)


def test_different_line_counts_are_counted_for_the_right_side_when_reversed(lesson8, tmp_path):
    put_plain(tmp_path, "train", (["a"] * 7, ["b"] * 5))
    message = message_of(lesson8, lesson8.load_pairs, tmp_path, "train", ("vi", "en"))
    assert re.search(r"train\.en\D+7\b", message) and re.search(r"train\.vi\D+5\b", message)


def test_trailing_empty_lines_of_one_side_are_not_silently_dropped(lesson8, tmp_path):
    put_plain(tmp_path, "train", (as_file(ENGLISH) + b"\n", VIETNAMESE))
    message_of(lesson8, lesson8.load_pairs, tmp_path, "train", EN_VI)


@pytest.mark.parametrize("stem", ["tst2012", "dev"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "archive"])
def test_text_that_is_not_utf8_is_refused_with_file_and_line(lesson8, tmp_path, stem, packed):
    latin = "một\nhai\ncafé\nbốn\n".encode("cp1258", errors="replace")
    utf8 = as_file("abcd")
    if packed:
        content = archive_of([(f"{stem}.en", utf8), (f"{stem}.vi", latin)])
        (tmp_path / "dev-2012-en-vi.tgz").write_bytes(content)
    else:
        put_plain(tmp_path, stem, (utf8, latin))
    first_bad = next(i for i, line in enumerate(latin.split(b"\n"), 1) if not line.isascii())
    message = message_of(lesson8, lesson8.load_pairs, tmp_path, "dev", EN_VI)
    assert f"{stem}.vi" in message
    assert re.search(rf"\bline {first_bad}\b", message)
    assert "UTF-8" in message


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["no BOM", "BOM"])
@pytest.mark.parametrize("line", [1, 2, 3, 900])
def test_the_line_that_is_not_utf8_is_counted_right(lesson8, tmp_path, bom, line):
    content = bom + b"a\n" * (line - 1) + b"\xff\n" + b"a\n" * 3
    put_plain(tmp_path, "train", (content, b"b\n" * (line + 3)))
    message = message_of(lesson8, lesson8.load_pairs, tmp_path, "train", EN_VI)
    assert re.search(rf"train\.en\W+line {line}\b", message)


@pytest.mark.parametrize(
    "character",
    [*"\x00\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\t"],
    ids=ascii,
)
def test_only_a_newline_ends_a_line(lesson8, tmp_path, character):
    english = [f"one{character}two", f"three{character}", f"{character}four", "five"]
    put_plain(tmp_path, "train", (english, "abcd"))
    assert lesson8.load_pairs(tmp_path, "train", EN_VI) == [
        ("one two", "a"),
        ("three", "b"),
        ("four", "c"),
        ("five", "d"),
    ]


def test_windows_line_ends_and_bom_leave_no_trace(lesson8, tmp_path):
    windows = "".join(line + "\r\n" for line in ENGLISH).encode("utf-8-sig")
    put_plain(tmp_path, "train", (windows, VIETNAMESE))
    assert lesson8.load_pairs(tmp_path, "train", EN_VI) == PAIRS


def test_the_last_line_needs_no_newline(lesson8, tmp_path):
    put_plain(tmp_path, "train", (as_file(ENGLISH).rstrip(b"\n"), VIETNAMESE))
    assert lesson8.load_pairs(tmp_path, "train", EN_VI) == PAIRS


def test_decomposed_files_are_composed(lesson8, tmp_path):
    put_plain(tmp_path, "train", ([ENGLISH[0]], ["Tie\u0302\u0301ng Vie\u0323\u0302t"]))
    assert lesson8.load_pairs(tmp_path, "train", EN_VI) == [(ENGLISH[0], "Tiếng Việt")]


def test_empty_lines_stay_where_they_are(lesson8, tmp_path):
    put_plain(tmp_path, "train", (["a", "", "c", "d", ""], ["1", "2", " \t", "4", ""]))
    pairs = [("a", "1"), ("", "2"), ("c", ""), ("d", "4"), ("", "")]
    assert lesson8.load_pairs(tmp_path, "train", EN_VI) == pairs


# Which pairs are used


def encoded(lesson8, pairs):
    """(decoded pairs that are kept, the report) of encode_pairs, with one subword a byte."""
    tokenizer = lesson8.train_bpe([], 300)  # no text: no merges, so lengths are exact
    sides, report = lesson8.encode_pairs(pairs, [tokenizer, tokenizer], "train")
    texts = [[lesson8.ids_to_text(tokenizer, row) for row in rows] for rows in sides]
    return list(zip(*texts, strict=True)), report


def test_a_pair_with_an_empty_side_is_dropped_as_a_pair_and_counted(lesson8):
    kept, report = encoded(lesson8, [("a", "1"), ("", "2"), ("c", ""), ("d", "4"), ("", "")])
    assert kept == [("a", "1"), ("d", "4")]
    assert "5" in report and re.search(r"\b2 kept", report)
    assert re.search(r"\b3 [\w ]*empty", report)


@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_too_long_on_either_side_is_dropped_and_counted(lesson8, side):
    # A word of n letters is n + 1 subwords here: the space before it counts.
    most = lesson8.MAX_LEN - 1
    fits, too_long = ("a" * most, "b" * most), ["a" * (most - 9), "b" * (most - 9)]
    too_long[side] = "c" * (most + 1)
    kept, report = encoded(lesson8, [fits, tuple(too_long), ("d", "e")])
    assert kept == [fits, ("d", "e")]
    assert re.search(rf"\b1 longer than {lesson8.MAX_LEN}\b", report)


@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_of_absurdly_different_lengths_is_dropped_and_counted(lesson8, side):
    absurd = ["a", "b"]
    absurd[side] = "c" * 100
    kept, report = encoded(lesson8, [("short", "ngắn"), tuple(absurd), ("yes", "vâng ạ")])
    assert kept == [("short", "ngắn"), ("yes", "vâng ạ")]
    assert re.search(r"\b1 [\w ]*different length", report)


def test_nothing_dropped_is_said_too(lesson8):
    kept, report = encoded(lesson8, [("a", "1"), ("b", "2")])
    assert len(kept) == 2
    assert "none" in report


def test_large_counts_are_exact(lesson8):
    kept, report = encoded(lesson8, [("a", "1"), ("", "2")] * 1200)
    assert len(kept) == 1200
    assert "2,400" in report and report.count("1,200") == 2


@pytest.mark.parametrize("pairs", [[], [("", "")], [("a", ""), ("", "b")]])
def test_no_usable_pair_is_an_error_with_the_counts(lesson8, pairs):
    tokenizer = lesson8.train_bpe([], 300)
    message = message_of(lesson8, lesson8.encode_pairs, pairs, [tokenizer, tokenizer], "train")
    assert "train" in message and str(len(pairs)) in message


# prepare


def numbered(start, stop):
    """Distinct pairs that show which translates which."""
    return (
        [f"number {n} is here ." for n in range(start, stop)],
        [f"số {n} ở đây ." for n in range(start, stop)],
    )


@pytest.fixture
def corpus(tmp_path):
    """A folder with 250 training pairs and 20 dev pairs."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    put_plain(folder, "train", numbered(0, 250))
    put_plain(folder, "dev", numbered(900, 920))
    return folder


@pytest.fixture
def config(lesson8):
    return lesson8.Config(vocab_size=320)


def texts_of(lesson8, prepared, part):
    """The (source, target) texts of prepared rows."""
    sides = [
        [lesson8.ids_to_text(tokenizer, row) for row in rows]
        for tokenizer, rows in zip(prepared.tokenizers, getattr(prepared, part), strict=True)
    ]
    return list(zip(*sides, strict=True))


def contents(prepared):
    """All that training gets, in a form that == compares."""
    return (
        [tokenizer.to_str() for tokenizer in prepared.tokenizers],
        [
            [[(row.dtype.str, row.tolist()) for row in rows] for rows in sides]
            for sides in (prepared.train, prepared.dev)
        ],
    )


def was_cached(prepared):
    return any("prepared earlier" in line for line in prepared.report)


def cache_files(run):
    """What prepare leaves in the run's folder besides the tokenizers."""
    return [path for path in run.iterdir() if not path.name.endswith("_tokenizer.json")]


def test_prepared_rows_are_the_pairs_of_the_files(lesson8, corpus, config, tmp_path):
    prepared = lesson8.prepare(config, corpus, tmp_path / "run")
    assert texts_of(lesson8, prepared, "train") == list(zip(*numbered(0, 250), strict=True))
    assert texts_of(lesson8, prepared, "dev") == list(zip(*numbered(900, 920), strict=True))
    report = "\n".join(prepared.report)
    assert "250" in report and "20" in report and not was_cached(prepared)
    assert "held out" not in report


def test_prepared_rows_are_reversed_with_the_direction(lesson8, corpus, tmp_path):
    config = lesson8.Config(direction="vi-en", vocab_size=320)
    prepared = lesson8.prepare(config, corpus, tmp_path / "run")
    assert texts_of(lesson8, prepared, "train") == list(zip(*numbered(0, 250)[::-1], strict=True))


def test_the_tokenizers_are_in_the_run_folder_under_their_languages(
    lesson8, corpus, config, tmp_path
):
    run = tmp_path / "run"
    prepared = lesson8.prepare(config, corpus, run)
    for language, tokenizer in zip(EN_VI, prepared.tokenizers, strict=True):
        text = (run / f"{language}_tokenizer.json").read_text(encoding="utf-8")
        assert type(tokenizer).from_str(text).to_str() == tokenizer.to_str()
    assert prepared.tokenizers[0].to_str() != prepared.tokenizers[1].to_str()
    assert not list(run.glob("*.tmp")) and not list(run.glob(".*"))


def test_other_languages_are_prepared_under_their_own_names(lesson8, tmp_path):
    put_plain(tmp_path, "train", numbered(0, 40), ("de", "fr"))
    put_plain(tmp_path, "dev", numbered(50, 55), ("de", "fr"))
    run = tmp_path / "run"
    prepared = lesson8.prepare(lesson8.Config(direction="de-fr", vocab_size=300), tmp_path, run)
    assert len(texts_of(lesson8, prepared, "train")) == 40
    assert (run / "de_tokenizer.json").is_file() and (run / "fr_tokenizer.json").is_file()


def test_dropped_pairs_are_in_the_report_of_prepare(lesson8, corpus, config, tmp_path):
    english, vietnamese = numbered(0, 100)
    english[10], vietnamese[20], vietnamese[30] = "", "", ""
    put_plain(corpus, "train", (english, vietnamese))
    prepared = lesson8.prepare(config, corpus, tmp_path / "run")
    wanted = [pair for pair in zip(english, vietnamese, strict=True) if all(pair)]
    assert texts_of(lesson8, prepared, "train") == wanted
    assert any(re.search(r"train.*\b97\b.*\b3 [\w ]*empty", line) for line in prepared.report)


def test_without_dev_files_one_percent_is_held_out_and_said(lesson8, corpus, config, tmp_path):
    for path in corpus.glob("dev.*"):
        path.unlink()
    prepared = lesson8.prepare(config, corpus, tmp_path / "run")
    train, dev = (texts_of(lesson8, prepared, part) for part in ("train", "dev"))
    assert len(dev) == 2
    assert not set(train) & set(dev)
    everything = list(zip(*numbered(0, 250), strict=True))
    assert sorted(train + dev) == sorted(everything)
    assert train == [pair for pair in everything if pair not in dev]
    assert any("held out" in line and re.search(r"\b2\b", line) for line in prepared.report)


def test_the_held_out_pairs_do_not_depend_on_the_seed(lesson8, corpus, tmp_path):
    for path in corpus.glob("dev.*"):
        path.unlink()
    results = [
        lesson8.prepare(lesson8.Config(vocab_size=320, seed=seed), corpus, tmp_path / f"run{seed}")
        for seed in (1, 2, 77)
    ]
    assert contents(results[0]) == contents(results[1]) == contents(results[2])


def test_at_most_2000_pairs_are_held_out(lesson8, config, tmp_path, monkeypatch):
    pairs = [(f"{n}", f"{n} .") for n in range(230_000)]
    seen = {}

    def note(part, tokenizers, name):
        seen[name] = part
        rows = [np.array([5, lesson8.EOS], dtype=np.int32)]
        return [rows, rows], name

    monkeypatch.setattr(
        lesson8, "load_pairs", lambda folder, part, *_, **__: pairs if part == "train" else None
    )
    monkeypatch.setattr(lesson8, "encode_pairs", note)
    tokenizer = lesson8.train_bpe([], 300)
    monkeypatch.setattr(lesson8, "train_bpe", lambda lines, vocab_size: tokenizer)
    lesson8.prepare(config, tmp_path, tmp_path / "run")
    assert len(seen["dev"]) == 2000
    assert len(seen["train"]) == 228_000
    assert set(seen["train"]) | set(seen["dev"]) == set(pairs)


def test_a_small_corpus_without_dev_files_holds_out_one_pair(lesson8, config, tmp_path):
    put_plain(tmp_path, "train", numbered(0, 12))
    prepared = lesson8.prepare(config, tmp_path, tmp_path / "run")
    assert len(texts_of(lesson8, prepared, "dev")) == 1
    assert len(texts_of(lesson8, prepared, "train")) == 11


@pytest.mark.parametrize("lines", [0, 1])
def test_a_corpus_too_small_to_train_on_is_refused(lesson8, config, tmp_path, lines):
    put_plain(tmp_path, "train", numbered(0, lines))
    message_of(lesson8, lesson8.prepare, config, tmp_path, tmp_path / "run")


def test_prepare_without_training_data_names_it(lesson8, config, tmp_path):
    message = message_of(lesson8, lesson8.prepare, config, tmp_path, tmp_path / "run")
    assert "train-en-vi.tgz" in message


# What is prepared once


def test_the_second_time_is_read_from_the_cache_and_identical(
    lesson8, corpus, config, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    first = lesson8.prepare(config, corpus, run)
    monkeypatch.setattr(lesson8, "train_bpe", lambda *_: pytest.fail("learned BPE again"))
    monkeypatch.setattr(lesson8, "encode_pairs", lambda *_: pytest.fail("encoded again"))
    second = lesson8.prepare(config, corpus, run)
    assert was_cached(second) and not was_cached(first)
    assert contents(first) == contents(second)
    assert set(first.report) <= set(second.report)
    third = lesson8.prepare(config, corpus, run)
    assert sum("prepared earlier" in line for line in third.report) == 1


def test_settings_that_do_not_concern_the_data_keep_the_cache(lesson8, corpus, config, tmp_path):
    lesson8.prepare(config, corpus, tmp_path / "run")
    other = lesson8.Config(vocab_size=320, seed=9, lr=1e-4, d_model=64, n_heads=4)
    assert was_cached(lesson8.prepare(other, corpus, tmp_path / "run"))


@pytest.mark.parametrize("change", [dict(vocab_size=330), dict(direction="vi-en")], ids=str)
def test_other_settings_are_not_answered_from_the_cache(lesson8, corpus, config, tmp_path, change):
    lesson8.prepare(config, corpus, tmp_path / "run")
    other = lesson8.Config(**{"vocab_size": 320, **change})
    again = lesson8.prepare(other, corpus, tmp_path / "run")
    assert not was_cached(again)
    assert contents(again) == contents(lesson8.prepare(other, corpus, tmp_path / "fresh"))


@pytest.mark.parametrize("name", ["train.en", "train.vi", "dev.en", "dev.vi"])
def test_other_data_is_not_answered_from_the_cache(lesson8, corpus, config, tmp_path, name):
    lesson8.prepare(config, corpus, tmp_path / "run")
    lines = (corpus / name).read_bytes().split(b"\n")
    lines[7] = lines[7].replace(b"7", b"8")  # same size, one character
    (corpus / name).write_bytes(b"\n".join(lines))
    again = lesson8.prepare(config, corpus, tmp_path / "run")
    assert not was_cached(again)
    assert contents(again) == contents(lesson8.prepare(config, corpus, tmp_path / "fresh"))


def test_the_order_of_the_training_lines_matters_to_the_cache(lesson8, corpus, config, tmp_path):
    lesson8.prepare(config, corpus, tmp_path / "run")
    put_plain(corpus, "train", [side[::-1] for side in numbered(0, 250)])
    again = lesson8.prepare(config, corpus, tmp_path / "run")
    assert not was_cached(again)
    assert texts_of(lesson8, again, "train")[0] == ("number 249 is here .", "số 249 ở đây .")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("damage", ["empty", "garbage", "truncated", "another program's"])
def test_a_broken_cache_is_ignored_and_replaced(lesson8, corpus, config, tmp_path, damage):
    run = tmp_path / "run"
    first = lesson8.prepare(config, corpus, run)
    (cache,) = cache_files(run)
    content = cache.read_bytes()
    other = io.BytesIO()
    torch.save({"fingerprint": None, "weights": [1, 2]}, other)
    cache.write_bytes(
        {
            "empty": b"",
            "garbage": b"\x80garbage" * 100,
            "truncated": content[: len(content) // 2],
            "another program's": other.getvalue(),
        }[damage]
    )
    again = lesson8.prepare(config, corpus, run)
    assert not was_cached(again)
    assert contents(again) == contents(first)
    assert was_cached(lesson8.prepare(config, corpus, run))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_the_cache_runs_no_code_of_its_file(lesson8, corpus, config, tmp_path):
    class Trap:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'sprung')!r}, 'wb').close()",))

    run = tmp_path / "run"
    lesson8.prepare(config, corpus, run)
    (cache,) = cache_files(run)
    cache.write_bytes(pickle.dumps(Trap()))
    assert not was_cached(lesson8.prepare(config, corpus, run))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("damage", ["missing", "other"])
def test_the_tokenizer_files_fit_the_model_also_when_the_cache_is_used(
    lesson8, corpus, config, tmp_path, damage
):
    """Else hours of training would end in a run whose tokenizer is missing."""
    run = tmp_path / "run"
    prepared = lesson8.prepare(config, corpus, run)
    path = run / "vi_tokenizer.json"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes((run / "en_tokenizer.json").read_bytes())
    lesson8.prepare(config, corpus, run)
    tokenizer = prepared.tokenizers[1]
    assert type(tokenizer).from_str(path.read_text(encoding="utf-8")).to_str() == tokenizer.to_str()


# The demo's pairs


def test_the_demo_prepares_its_styled_pairs_without_a_corpus(lesson8, tmp_path):
    config = lesson8.Config(**lesson8.PRESETS["demo"], preset="demo", demo=True)
    prepared = lesson8.prepare(config, tmp_path / "nowhere", tmp_path / "run")
    train, held_out = map(lesson8.styled, lesson8.demo_pairs())
    assert texts_of(lesson8, prepared, "train") == train
    assert texts_of(lesson8, prepared, "dev") == held_out


def test_the_demo_can_be_reversed(lesson8, tmp_path):
    settings = {**lesson8.PRESETS["demo"], "preset": "demo", "demo": True, "direction": "vi-en"}
    prepared = lesson8.prepare(lesson8.Config(**settings), tmp_path, tmp_path / "run")
    assert texts_of(lesson8, prepared, "dev") == [
        pair[::-1] for pair in lesson8.styled(lesson8.demo_pairs()[1])
    ]


def test_the_demo_knows_no_other_languages(lesson8, tmp_path):
    config = lesson8.Config(direction="de-fr", demo=True)
    message = message_of(lesson8, lesson8.prepare, config, tmp_path, tmp_path / "run")
    assert "de-fr" in message


# write_file


def test_write_file_does_not_bring_back_a_folder_that_was_deleted(lesson8, tmp_path):
    """Whoever deletes a run's folder while it trains frees its lock: it must not reappear."""
    with pytest.raises(lesson8.UserError, match="could not be written"):
        lesson8.write_file(tmp_path / "gone" / "a", b"bytes")
    assert snapshot(tmp_path) == {}


def test_write_file_writes_bytes_or_what_a_function_writes(lesson8, tmp_path):
    (tmp_path / "new").mkdir()
    lesson8.write_file(tmp_path / "new" / "a", b"bytes\r\n")
    lesson8.write_file(tmp_path / "new" / "b", lambda file: file.write(b"from a function"))
    assert snapshot(tmp_path / "new") == {"a": b"bytes\r\n", "b": b"from a function"}


def test_write_file_replaces_the_old_file(lesson8, tmp_path):
    (tmp_path / "a").write_bytes(b"old and longer")
    lesson8.write_file(tmp_path / "a", b"new")
    assert snapshot(tmp_path) == {"a": b"new"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("zip")])
@pytest.mark.parametrize("old", [b"old", None])
def test_a_writer_that_fails_leaves_the_old_file_and_a_sentence(lesson8, tmp_path, error, old):
    def fail_half_way(file):
        file.write(b"half")
        raise error

    if old is not None:
        (tmp_path / "a").write_bytes(old)
    before = snapshot(tmp_path)
    message = message_of(lesson8, lesson8.write_file, tmp_path / "a", fail_half_way)
    assert str(tmp_path / "a") in message and str(error) in message
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
def test_a_writer_that_is_interrupted_leaves_the_old_file_and_nothing_else(
    lesson8, tmp_path, error
):
    def stop_half_way(file):
        file.write(b"half")
        raise error

    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises((error, lesson8.UserError)):
        lesson8.write_file(tmp_path / "a", stop_half_way)
    assert snapshot(tmp_path) == {"a": b"old"}


def test_the_old_file_is_whole_until_the_new_one_is(lesson8, tmp_path):
    (tmp_path / "a").write_bytes(b"old")

    def look(file):
        file.write(b"half")
        file.flush()
        assert (tmp_path / "a").read_bytes() == b"old"
        file.write(b" and half")

    lesson8.write_file(tmp_path / "a", look)
    assert (tmp_path / "a").read_bytes() == b"half and half"


def test_a_place_that_cannot_be_written_is_a_sentence(lesson8, tmp_path):
    (tmp_path / "file").write_bytes(b"in the way")
    message = message_of(lesson8, lesson8.write_file, tmp_path / "file" / "a", b"x")
    assert str(tmp_path / "file") in message
    (tmp_path / "folder").mkdir()
    message_of(lesson8, lesson8.write_file, tmp_path / "folder", b"x")
    assert snapshot(tmp_path) == {"file": b"in the way", "folder": None}


# download


def blob_id(content):
    """What git hash-object says."""
    return hashlib.sha1(b"blob " + str(len(content)).encode() + b"\0" + content).hexdigest()


@pytest.fixture
def server(lesson8, tmp_path, monkeypatch):
    """(folder that is served, paths asked for): lesson 8 downloads from here, three small files."""
    served, asked = tmp_path / "served", []
    served.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(served))

        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *args):
            pass

    archives = {}
    for part, (name, _, stems) in lesson8.ARCHIVES.items():
        content = archive_of([(f"{stems[0]}.en", b"a\n"), (f"{stems[0]}.vi", part.encode())])
        (served / name).write_bytes(content)
        archives[part] = (name, blob_id(content), stems)
    monkeypatch.setattr(lesson8, "ARCHIVES", archives)
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        monkeypatch.setattr(lesson8, "ORIGIN", f"http://127.0.0.1:{running.server_port}/")
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield served, asked
        running.shutdown()


@contextlib.contextmanager
def answering(answer):
    """A server on 127.0.0.1 that sends these bytes to everyone; gives its address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/"
        running.shutdown()


def test_download_fetches_the_archives_and_they_can_be_read(lesson8, server, tmp_path, capsys):
    served, asked = server
    data = tmp_path / "new" / "data"
    lesson8.download(data)
    assert snapshot(data) == snapshot(served)
    assert sorted(asked) == sorted("/" + path.name for path in served.iterdir())
    assert lesson8.load_pairs(data, "test", EN_VI) == [("a", "test")]
    output = capsys.readouterr().out
    assert "CC BY-NC-ND" in output and "verified" in output
    assert all(path.name in output for path in served.iterdir())


def test_download_fetches_only_what_is_not_there(lesson8, server, tmp_path):
    served, asked = server
    data = tmp_path / "data"
    data.mkdir()
    (data / "train-en-vi.tgz").write_bytes((served / "train-en-vi.tgz").read_bytes())
    lesson8.download(data)
    assert "/train-en-vi.tgz" not in asked and len(asked) == 2
    asked.clear()
    lesson8.download(data)
    assert asked == []
    assert snapshot(data) == snapshot(served)


@pytest.mark.parametrize("wrong", [b"", b"<html>404</html>", None])
def test_a_fetched_file_that_is_not_the_expected_one_is_not_saved(lesson8, server, tmp_path, wrong):
    served, _ = server
    path = served / "train-en-vi.tgz"
    path.write_bytes(path.read_bytes()[:-1] + b"!" if wrong is None else wrong)
    data = tmp_path / "data"
    message = message_of(lesson8, lesson8.download, data)
    assert lesson8.ORIGIN + "train-en-vi.tgz" in message
    assert lesson8.ARCHIVES["train"][1] in message
    assert not (data / "train-en-vi.tgz").exists()
    assert not data.exists() or not list(data.glob(".*"))


def test_a_wrong_file_that_is_already_there_is_named_and_left(lesson8, server, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "dev-2012-en-vi.tgz").write_bytes(b"my own")
    message = message_of(lesson8, lesson8.download, data)
    assert str(data / "dev-2012-en-vi.tgz") in message
    assert (data / "dev-2012-en-vi.tgz").read_bytes() == b"my own"


def test_a_file_that_the_server_lacks_is_a_sentence(lesson8, server, tmp_path):
    served, _ = server
    (served / "train-en-vi.tgz").unlink()
    message = message_of(lesson8, lesson8.download, tmp_path / "data")
    assert lesson8.ORIGIN + "train-en-vi.tgz" in message and "404" in message


def test_a_server_that_cannot_be_reached_is_a_sentence(lesson8, server, tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/"
    monkeypatch.setattr(lesson8, "ORIGIN", address)
    message = message_of(lesson8, lesson8.download, tmp_path / "data")
    assert address + "train-en-vi.tgz" in message
    assert not (tmp_path / "data").exists() or snapshot(tmp_path / "data") == {}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"this is not HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nonly this",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\nonly this",
    ],
    ids=["nothing", "no HTTP", "cut short", "a chunk cut short"],
)
def test_a_server_that_answers_nonsense_is_a_sentence(
    lesson8, server, tmp_path, monkeypatch, answer
):
    with answering(answer) as address:
        monkeypatch.setattr(lesson8, "ORIGIN", address)
        message = message_of(lesson8, lesson8.download, tmp_path / "data")
    assert address + "train-en-vi.tgz" in message
    assert not (tmp_path / "data").exists() or snapshot(tmp_path / "data") == {}


# The real archives


@pytest.mark.parametrize(("part", "pairs"), [("dev", 1553), ("test", 1268)])
def test_the_real_archives_have_the_blob_ids_and_pairs_expected(lesson8, iwslt, part, pairs):
    archive, wanted, _ = lesson8.ARCHIVES[part]
    assert blob_id((iwslt / archive).read_bytes()) == wanted
    forward = lesson8.load_pairs(iwslt, part, EN_VI)
    assert len(forward) == pairs
    assert all(text == lesson8.clean(text) for pair in forward for text in pair)
    assert lesson8.load_pairs(iwslt, part, ("vi", "en")) == [pair[::-1] for pair in forward]


def test_real_pairs_survive_preparing(lesson8, iwslt, tmp_path):
    dev = lesson8.load_pairs(iwslt, "dev", EN_VI)
    put_plain(tmp_path, "train", list(zip(*dev[:600], strict=True)))
    put_plain(tmp_path, "dev", list(zip(*dev[600:700], strict=True)))
    config = lesson8.Config(vocab_size=800)
    prepared = lesson8.prepare(config, tmp_path, tmp_path / "run")
    kept = texts_of(lesson8, prepared, "train")
    assert len(kept) > 580
    remaining = iter(dev[:600])
    assert all(pair in remaining for pair in kept)  # the same pairs in the same order
