"""The demo's built-in pairs: enough of them, unambiguous, and fair to the model."""

import hashlib
import itertools
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def demo(lesson8):
    return lesson8.demo_pairs()


@pytest.fixture(scope="module")
def every_pair(demo):
    return [*demo[0], *demo[1]]


def test_there_are_enough_distinct_pairs(demo, every_pair):
    train, held_out = demo
    assert len(set(train)) >= 400
    assert len(set(held_out)) >= 50
    assert len(every_pair) == len(set(every_pair))


def test_each_sentence_has_exactly_one_translation_in_either_direction(every_pair):
    for side in (0, 1):
        repeated = Counter(pair[side] for pair in every_pair)
        assert [text for text, count in repeated.items() if count > 1] == []


def test_no_held_out_sentence_is_in_training(demo):
    train, held_out = demo
    for side in (0, 1):
        assert not {pair[side] for pair in train} & {pair[side] for pair in held_out}


@pytest.mark.parametrize("side", [0, 1], ids=["english", "vietnamese"])
def test_every_word_is_in_training_at_least_three_times(demo, every_pair, side):
    counts = Counter(word for pair in demo[0] for word in pair[side].split())
    words = {word for pair in every_pair for word in pair[side].split()}
    assert {word: counts[word] for word in words if counts[word] < 3} == {}


def test_the_sentences_are_plain_lower_case_words(lesson8, every_pair):
    for text in itertools.chain.from_iterable(every_pair):
        assert text == lesson8.clean(text) == text.lower()
        assert all(word.isalpha() for word in text.split()), text


def test_the_text_is_nfc(every_pair):
    assert all(unicodedata.is_normalized("NFC", text) for pair in every_pair for text in pair)


def test_english_is_on_the_left_and_vietnamese_on_the_right(every_pair):
    assert all(english.isascii() for english, _ in every_pair)
    assert sum(not vietnamese.isascii() for _, vietnamese in every_pair) > len(every_pair) * 0.9


def test_verbs_agree_with_their_subjects(every_pair):
    starts = {" ".join(english.split()[:2]) for english, _ in every_pair}
    assert {"i am", "you are", "they are", "he is", "she is"} <= starts
    wrong = {"i is", "i are", "he am", "he are", "she are", "they is", "we is", "you am", "he want"}
    assert not starts & wrong


def test_the_best_known_pair_is_there(every_pair):
    assert ("i am happy", "tôi vui") in every_pair


def test_the_pairs_are_the_same_in_another_process(demo):
    program = (
        "import hashlib, importlib, sys; sys.path.insert(0, sys.argv[1]);"
        "pairs = importlib.import_module('08_iwslt_vi_en').demo_pairs();"
        "print(hashlib.sha256(ascii(pairs).encode()).hexdigest())"
    )
    here = hashlib.sha256(ascii(demo).encode()).hexdigest()
    there = subprocess.run(
        [sys.executable, "-c", program, str(ROOT)], capture_output=True, encoding="utf-8"
    )
    assert there.stdout.strip() == here, there.stderr


def test_calling_twice_gives_the_same_pairs_and_the_first_result_is_no_shared_state(lesson8):
    first = lesson8.demo_pairs()
    expected = [list(pairs) for pairs in first]
    first[0].clear()
    assert [list(pairs) for pairs in lesson8.demo_pairs()] == expected


# Capitals and stops


def test_styled_gives_bare_capital_stop_and_both(lesson8):
    assert lesson8.styled([("i am happy", "tôi vui")]) == [
        ("i am happy", "tôi vui"),
        ("I am happy", "Tôi vui"),
        ("i am happy .", "tôi vui ."),
        ("I am happy .", "Tôi vui ."),
    ]


def test_styled_ends_questions_with_a_question_mark_on_both_sides(lesson8):
    styles = lesson8.styled([("are you happy", "bạn có vui không")])
    assert ("Are you happy ?", "Bạn có vui không ?") in styles
    assert not any(text.endswith(".") for pair in styles for text in pair)


def test_styled_capitalises_accented_letters(lesson8):
    styles = lesson8.styled([("how do i get there", "ở đâu"), ("they read", "đọc")])
    assert {vietnamese[0] for _, vietnamese in styles} == {"ở", "Ở", "đ", "Đ"}


def test_both_sides_of_every_styled_pair_are_styled_alike(lesson8, demo):
    for pairs in demo:
        styles = lesson8.styled(pairs)
        assert len(styles) == len(set(styles)) == 4 * len(pairs)
        assert set(pairs) <= set(styles)
        for english, vietnamese in styles:
            assert english[0].isupper() == vietnamese[0].isupper()
            assert english[-1:].isalpha() == vietnamese[-1:].isalpha()
            if not english[-1].isalpha():
                assert english[-2:] == vietnamese[-2:] and english[-2:] in (" .", " ?")


def test_every_question_and_no_statement_ends_with_a_question_mark(lesson8, every_pair):
    openings = {"am", "are", "is", "do", "does", "how", "what", "where"}
    for english, _ in lesson8.styled(every_pair):
        if not english[-1].isalpha():
            assert english.endswith("?") == (english.split()[0].lower() in openings), english


def test_no_styled_held_out_sentence_is_in_the_styled_training_text(lesson8, demo):
    train, held_out = map(lesson8.styled, demo)
    for side in (0, 1):
        assert not {pair[side] for pair in train} & {pair[side] for pair in held_out}


def test_the_corpus_form_of_what_people_type_is_what_the_demo_trains_on(lesson8, demo):
    """A stop typed right after the word must arrive as the ' .' of the training text."""
    border = lesson8.Moses("en")
    for corpus, _ in lesson8.styled(demo[0][:100]):
        assert border.to_corpus(border.to_text(corpus)) == corpus
    assert border.to_corpus("I am happy.") == "I am happy ."
