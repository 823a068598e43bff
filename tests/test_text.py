"""People's text and the corpus's: cleaning, Moses tokens, sentence splitting."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TEST_LINES = 1268  # sentence pairs of tst2013

# Whatever a file or a keyboard can bring: control characters, separators, halves of surrogates.
ANY_TEXT = st.text(st.characters(), max_size=40) | st.text(
    st.sampled_from(
        "aAâ \t\n\r\x00\x0b\x1c\x85\xa0\u2028\u2029\u3000\ufeff\u0302\u0301\ud800\udfff"
    ),
    max_size=40,
)
# Text in which stops, quotes and capitals meet in every order.
STOPS = st.text(st.sampled_from("aB1 .!?…\"'”’)e.g.Mr "), max_size=60)


@pytest.fixture(scope="module", params=["en", "vi"])
def side(request):
    """Each language, and its place in a pair of test lines."""
    return request.param, ["en", "vi"].index(request.param)


@pytest.fixture(scope="module")
def english(lesson8):
    return lesson8.Moses("en")


@pytest.fixture(scope="module")
def real_pairs(lesson8, iwslt):
    return lesson8.load_pairs(iwslt, "test", ("en", "vi"))


# clean


def test_decomposed_vietnamese_becomes_the_same_text_as_composed(lesson8):
    composed = "Tiếng Việt rất đẹp ở Huế"
    decomposed = unicodedata.normalize("NFD", composed)
    assert decomposed != composed
    assert lesson8.clean(decomposed) == composed


def test_mixed_forms_of_one_letter_become_one(lesson8):
    forms = ["\u1ebf", "\u00ea\u0301", "e\u0302\u0301"]  # ế
    assert {lesson8.clean(form) for form in forms} == {"\u1ebf"}


@pytest.mark.parametrize(
    "character",
    [*"\x00\x07\t\n\r\x0b\x0c\x1c\x7f\x85\u2028\u2029\ud800\udfff"],
    ids=ascii,
)
def test_a_control_character_or_lone_surrogate_becomes_a_space(lesson8, character):
    assert lesson8.clean(f"một{character}hai") == "một hai"
    assert lesson8.clean(f"{character}một{character}{character}hai{character}") == "một hai"


def test_emoji_outside_the_basic_plane_are_kept(lesson8):
    assert lesson8.clean("vui 😀 quá 👩‍🔬") == "vui 😀 quá 👩‍🔬"


@settings(deadline=None, derandomize=True, max_examples=300)
@given(text=ANY_TEXT)
def test_cleaned_text_is_one_writable_line_and_cleaning_it_again_changes_nothing(lesson8, text):
    cleaned = lesson8.clean(text)
    assert lesson8.clean(cleaned) == cleaned
    assert len(cleaned.splitlines()) <= 1
    assert cleaned == cleaned.strip() and "  " not in cleaned and "\x00" not in cleaned
    assert unicodedata.is_normalized("NFC", cleaned)
    cleaned.encode("utf-8")  # raises where a lone surrogate is left


# Moses tokens


def test_all_test_lines_survive_both_round_trips(lesson8, real_pairs, side):
    language, index = side
    moses = lesson8.Moses(language)
    assert len(real_pairs) == TEST_LINES
    for pair in real_pairs:
        text = moses.to_text(pair[index])
        corpus = moses.to_corpus(text)
        assert corpus == pair[index]
        assert moses.to_text(corpus) == text


def test_no_escape_of_the_test_lines_reaches_a_person(lesson8, real_pairs, side):
    language, index = side
    moses = lesson8.Moses(language)
    escaped = [pair[index] for pair in real_pairs if "&" in pair[index]]
    assert escaped
    for corpus in escaped:
        text = moses.to_text(corpus)
        for escape in ("&apos;", "&quot;", "&amp;", "&lt;", "&gt;", "&#91;", "&#93;", "&#124;"):
            assert escape not in text, corpus


@pytest.mark.parametrize(
    ("text", "corpus"),
    [
        ("It's mine.", "It &apos;s mine ."),
        ("I don't know.", "I don &apos;t know ."),
        ('He said "no".', "He said &quot; no &quot; ."),
        ("Is it, or isn't it?", "Is it , or isn &apos;t it ?"),
    ],
)
def test_a_plain_apostrophe_or_quote_takes_the_corpus_form_and_comes_back(english, text, corpus):
    assert english.to_corpus(text) == corpus
    assert english.to_text(corpus) == text


@pytest.mark.parametrize("language", ["en", "vi"])
@pytest.mark.parametrize("corpus", ["&quot; a", "a &apos;", "it&apos;s", "&apos; &quot; &apos;"])
def test_even_badly_placed_escapes_are_resolved(lesson8, language, corpus):
    text = lesson8.Moses(language).to_text(corpus)
    assert "&" not in text and ";" not in text
    assert "'" in text or '"' in text


def test_brackets_pipes_and_ampersands_are_escaped_for_the_model(english):
    corpus = english.to_corpus("a & b | <c> [d]")
    assert corpus == "a &amp; b &#124; &lt; c &gt; &#91; d &#93;"
    assert english.to_text(corpus) == "a & b | < c > [d]"


@pytest.mark.parametrize("language", ["en", "vi"])
def test_empty_text_stays_empty_at_the_border(lesson8, language):
    moses = lesson8.Moses(language)
    assert moses.to_corpus("") == ""
    assert moses.to_text("") == ""


def test_a_language_that_moses_does_not_know_still_has_a_border(lesson8):
    moses = lesson8.Moses("xx")
    assert moses.to_corpus('Ay "be", ce.') == "Ay &quot; be &quot; , ce ."
    assert moses.to_text("Ay &quot; be &quot; , ce .") == 'Ay "be", ce.'


# Sentences


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("en", ["Hello there.", "How are you?", "Fine!"]),
        ("vi", ["Anh ấy đi rồi.", "Đó là ai?", "Tôi không biết!"]),
        ("en", ["Mr. Hoa met Dr. Lan.", "They talked."]),
        ("en", ["She lives in the U.S. now.", "He does not."]),
        ("en", ["I like fruit, e.g. Hoa's mangoes.", "You?"]),
        ("en", ["It grew by 3.5 percent.", "Good."]),
        ("en", ['"Go."', "He left."]),
        ("en", ['He said "Stop!"', '"Why?" she asked.']),
        ("en", ["(He was late.)", "We left."]),
        ("en", ["“Really?”", "‘Yes.’", "Well."]),
        ("en", ["Wait...", "What?"]),
        ("en", ["Wait…", "What?!", "No!!"]),
        ("en", ["Is he late?", "No.", "He is early."]),
        ("vi", ["Đó là năm 2013.", "Năm ấy rất tốt."]),
    ],
)
def test_text_is_split_after_its_sentences(lesson8, language, sentences):
    assert lesson8.Moses(language).sentences(" ".join(sentences)) == sentences


@pytest.mark.parametrize(
    "text",
    [
        "He cried stop! and ran.",
        "And then ... nothing happened.",
        "Well… maybe not.",
        "See www.ted.com or mail a.b@c.org about it.",
        "No stop at all",
        ".",
        "?!",
        "Mr.",
    ],
)
def test_one_sentence_is_left_whole(english, text):
    assert english.sentences(text) == [text]


@settings(deadline=None, derandomize=True, max_examples=400)
@given(text=STOPS | ANY_TEXT)
def test_joining_the_sentences_gives_back_the_text(lesson8, english, text):
    text = lesson8.clean(text)
    sentences = english.sentences(text)
    assert " ".join(sentences) == text
    assert all(sentences) or not text


def test_joining_the_sentences_gives_back_every_real_line(lesson8, real_pairs, side):
    language, index = side
    moses = lesson8.Moses(language)
    texts = [moses.to_text(pair[index]) for pair in real_pairs]
    split = [moses.sentences(text) for text in texts]
    assert [" ".join(sentences) for sentences in split] == texts
    assert any(len(sentences) > 1 for sentences in split)
