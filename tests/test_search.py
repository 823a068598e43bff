"""Greedy and beam search: against plain loops, enumeration and hand-computed cases."""

import copy
import functools
import itertools
import math
import threading
import time
import zlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

PAD, BOS, EOS = 0, 1, 2
NEVER = -1e9  # a logit


class Scripted(nn.Module):
    """A stand-in for Transformer whose logits are any function of (source, tokens so far)."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits
        self.anchor = nn.Parameter(torch.zeros(1))  # tells where the model is
        self.batches = []  # sizes of the batches searched


class ScriptedDecoder:
    """The StepDecoder of a Scripted model.

    It remembers sources by sentence and tokens by row, so a mistake in reordering shows.
    """

    def __init__(self, model, src, beam):
        model.batches.append(len(src))
        self.logits, self.beam, self.sources = model.logits, beam, src.tolist()
        self.past, self.places = [()] * len(src), range(0, len(src) * beam, beam)

    def __call__(self, ids):
        self.past = [(*past, token) for past, token in zip(self.past, ids.tolist(), strict=True)]
        assert {(len(past), past[0]) for past in self.past} == {(len(self.past[0]), BOS)}
        sources = [tuple(i for i in source if i != PAD) for source in self.sources]
        owners = (sources[place // self.beam] for place in self.places)
        rows = zip(owners, self.past, strict=True)
        return torch.tensor([self.logits(source, past[1:]) for source, past in rows])

    def keep(self, rows, places, sentences):
        self.past, self.places = [self.past[row] for row in rows], places.tolist()
        if sentences is not None:
            self.sources = [self.sources[i] for i in sentences]


@pytest.fixture(autouse=True)
def scripted_decoders(lesson8, monkeypatch):
    """Let Scripted models be searched; real ones have the real StepDecoder."""
    real = lesson8.StepDecoder

    def chosen(model, *arguments):
        return (ScriptedDecoder if isinstance(model, Scripted) else real)(model, *arguments)

    monkeypatch.setattr(lesson8, "StepDecoder", chosen)


def random_logits(size, seed=0, scale=1.5):
    """A function (source, tokens so far) -> logits of `size` tokens, fixed but arbitrary."""

    @functools.cache
    def logits(source, past):
        key = zlib.crc32(repr((seed, source, past)).encode())
        return (torch.randn(size, generator=torch.Generator().manual_seed(key)) * scale).tolist()

    return logits


def log_probabilities(logits):
    """The same function for log-probabilities."""

    @functools.cache
    def log_p(source, past):
        return torch.tensor(logits(source, past), dtype=torch.float64).log_softmax(-1).tolist()

    return log_p


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def plain_beam(log_p, source, limit, beam, alpha):
    """Beam search for one sentence as one would explain it: lists, no batch, no early stop."""
    live, finished, width = [(0.0, ())], [], beam
    for length in range(1, limit + 1):
        candidates = []
        for score, past in live:
            row = log_p(source, past)
            candidates += [(score + row[token], (*past, token)) for token in range(EOS, len(row))]
        candidates, live = sorted(candidates, reverse=True)[:width], []
        for score, tokens in candidates:
            if tokens[-1] == EOS or length == limit:
                finished.append((score / penalty(length, alpha), tokens))
                width -= 1
            else:
                live.append((score, tokens))
    return [token for token in max(finished)[1] if token != EOS]


def every_hypothesis(log_p, source, limit, size):
    """Yield (log-probability, tokens) of everything that can be said within the limit."""
    for length in range(1, limit + 1):
        for words in itertools.product(range(3, size), repeat=length - 1):
            for last in range(EOS, size) if length == limit else [EOS]:
                tokens = (*words, last)
                yield sum(log_p(source, tokens[:i])[tokens[i]] for i in range(length)), tokens


def sentences(n, seed=1, longest=9, size=20):
    """n encoded sentences of different lengths, the first of them empty but for its eos."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [0, *torch.randint(1, longest, (n - 1,), generator=generator).tolist()]
    return [[*torch.randint(3, size, (k,), generator=generator).tolist(), EOS] for k in lengths]


@pytest.fixture
def model(lesson8, monkeypatch):
    """An untrained Transformer that says different things about different sentences.

    In double precision, so that rounding cannot decide between two hypotheses; some of its answers
    end with eos, some at the limit, which is low here to save time.
    """
    monkeypatch.setattr(lesson8, "EXTRA_OUTPUT", 6)
    torch.manual_seed(22)
    model = lesson8.Transformer(20, 12, 16, 4, 32, 2, 0.4, norm_first=True, tie="none")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    nn.init.normal_(model.tgt_embedding.table.weight, std=0.3)
    with torch.no_grad():
        model.output.weight[EOS] += 1.4 * F.normalize(model.decoder_norm.bias, dim=0)
    return model.double().eval()


def uncached(model):
    """The log-probabilities of a model from full forward passes of single sentences."""

    @functools.cache
    def log_p(source, past):
        with torch.inference_mode():
            logits = model(torch.tensor([source]), torch.tensor([[BOS, *past]]))[0, -1]
        return logits.log_softmax(-1).tolist()

    return log_p


# Caches


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_cached_logits_equal_those_of_the_full_pass(lesson8, norm_first):
    """Token by token, with a padded source, in single precision; one sentence, and four."""
    torch.manual_seed(6)
    model = lesson8.Transformer(20, 12, 32, 4, 64, 3, 0.0, norm_first, tie="none").eval()
    for name, parameter in model.named_parameters():
        gain = name.endswith("norm.weight")  # about 1: small gains would make positions fade
        nn.init.normal_(parameter, mean=float(gain), std=0.2)
    sources = sentences(4)
    tgt = torch.cat([torch.full((4, 1), BOS), torch.randint(3, 12, (4, 15))], dim=1)
    full = torch.cat(
        [model(torch.tensor([source]), row[None]) for source, row in zip(sources, tgt, strict=True)]
    )
    for part in (slice(0, 4), slice(1, 2), slice(2, 4)):
        src = lesson8.pad_rows(sources[part])
        caches = model.new_caches(model.encode(src))
        chunks = tgt[part].split([3] + [1] * 13, dim=1)  # three tokens at once, then one by one
        logits = torch.cat(
            [model.output(model.decode(chunk, None, src, caches)) for chunk in chunks], dim=1
        )
        torch.testing.assert_close(logits, full[part], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.15)],
    ids=["fp64", "fp32", "bf16"],
)
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize(("beam", "count"), [(1, 1), (1, 6), (3, 6), (3, 2), (2, 30)])
def test_the_fast_decoder_of_the_search_equals_the_plain_one(
    lesson8, norm_first, dtype, tolerance, beam, count
):
    """Hypotheses are put into another order and thinned out; few rows and many."""
    torch.manual_seed(7)
    model = lesson8.Transformer(20, 12, 32, 4, 64, 3, 0.0, norm_first, tie="none").eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.2)
    rng = torch.Generator().manual_seed(1)
    src = lesson8.pad_rows(sentences(count))
    decoder = lesson8.StepDecoder(copy.deepcopy(model).to(dtype), src, beam)
    history, places = torch.full((count, 1), BOS), torch.arange(count) * beam
    for length in range(1, 9):
        with torch.inference_mode():
            fast = decoder(history[:, -1])
            plain = model.double()(src[places // beam], history)[:, -1]
        assert fast.dtype == dtype
        torch.testing.assert_close(fast.double(), plain, rtol=0, atol=tolerance)
        kept = torch.arange(len(src))
        if length % 3 == 0 and len(src) > 1:  # a sentence is done
            kept = kept[kept != len(src) // 2]
        taken = torch.rand(len(kept), beam, generator=rng) < 0.8  # not every place
        taken[:, 0] |= taken.sum(1) == 0
        owner = (places // beam)[None, :] == kept[:, None]  # (kept sentences, rows)
        parents = torch.multinomial(owner.double(), beam, replacement=True, generator=rng)
        origin, places = parents[taken], taken.flatten().nonzero().flatten()
        decoder.keep(origin, places, kept if len(kept) < len(src) else None)
        newest = torch.randint(3, 12, (len(origin), 1), generator=rng)
        history, src = torch.cat([history[origin], newest], dim=1), src[kept]


def test_packed_weights_change_a_model_by_no_more_than_rounding_to_fp16(lesson8, tiny_model):
    """Against the same model with all its linear weights rounded."""
    if not lesson8.cpu_packs_fp16():
        pytest.skip("torch has no products with packed fp16 weights here")
    rounded, packed = copy.deepcopy(tiny_model), copy.deepcopy(tiny_model)
    with torch.no_grad():
        for module in rounded.modules():
            if isinstance(module, nn.Linear):  # the output matrix is the embedding as well
                module.weight = nn.Parameter(module.weight.half().float())
    lesson8.set_precision(packed, "fp16")
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    src, tgt = lesson8.pad_rows(sentences(6, size=30)), torch.tensor([[BOS, 7, 9, 4, 30]] * 6)
    with torch.inference_mode():
        plain, expected, found = (model(src, tgt) for model in (tiny_model, rounded, packed))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not torch.equal(found, plain)
    torch.testing.assert_close(found, plain, rtol=0, atol=0.02)


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1e5])
def test_weights_that_fp16_cannot_hold_are_an_error(lesson8, tiny_model, weight):
    with torch.no_grad():
        tiny_model.decoder[0].feed_forward.linear1.weight[2, 3] = weight
    with pytest.raises(lesson8.UserError, match="do not fit into fp16"):
        lesson8.set_precision(tiny_model, "fp16")


@pytest.mark.parametrize(("precision", "name"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_off_the_cpu_all_of_a_model_has_the_precision(lesson8, tiny_model, precision, name):
    model = tiny_model.to("meta")
    lesson8.set_precision(model, precision)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, name)}
    assert not any(isinstance(module, lesson8.PackedLinear) for module in model.modules())


def test_logits_differ_only_by_rounding_whatever_the_batch(lesson8, tiny_model):
    sources = sentences(8)
    tgt = torch.tensor([[BOS, 7, 9, 4, 30]])
    alone = [tiny_model(torch.tensor([source]), tgt)[0] for source in sources]
    together = tiny_model(lesson8.pad_rows(sources), tgt.expand(8, -1))
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=1e-4)


# Greedy


def test_beam_one_is_greedy(lesson8, model):
    """Against a loop that knows neither caches nor batches and takes the best token each time."""
    sources, log_p, expected, at_limit = sentences(16), uncached(model), [], 0
    for source in sources:
        tokens = []
        while len(tokens) < len(source) + 6:
            row = log_p(tuple(source), tuple(tokens))
            token = max(range(EOS, len(row)), key=row.__getitem__)
            if token == EOS:
                break
            tokens.append(token)
        else:
            at_limit += 1
        expected.append(tokens)
    assert 0 < at_limit < len(sources)  # both ways to end occur
    assert lesson8.beam_search(model, lesson8.pad_rows(sources), beam=1) == expected


def test_greedy_stops_at_eos(lesson8):
    """The script says 5 6 7 eos, and 8 for ever after."""
    answer = [5, 6, 7, EOS]

    def logits(source, past):
        row = [0.0] * 10
        row[answer[len(past)] if len(past) < 4 else 8] = 20.0
        return row

    for beam in (1, 3):
        src = torch.tensor([[4, EOS]])
        assert lesson8.beam_search(Scripted(logits), src, beam) == [[5, 6, 7]]


# Beam search


@pytest.mark.parametrize("beam", [1, 2, 3, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_beam_search_equals_a_plain_one_sentence_search(lesson8, monkeypatch, beam, alpha):
    """Many sentences at once, caches, a shrinking beam and an early stop change no result."""
    monkeypatch.setattr(lesson8, "EXTRA_OUTPUT", 3)
    logits, sources = random_logits(7), sentences(24, longest=6)
    log_p = log_probabilities(logits)
    expected = [plain_beam(log_p, tuple(s), len(s) + 3, beam, alpha) for s in sources]
    src = lesson8.pad_rows(sources)
    assert lesson8.beam_search(Scripted(logits), src, beam, alpha) == expected
    assert len({len(output) for output in expected}) > 1


def test_beam_search_of_a_transformer_equals_the_plain_search_without_caches(lesson8, model):
    sources, log_p = sentences(10, longest=6), uncached(model)
    expected = [plain_beam(log_p, tuple(s), len(s) + 6, 3, 0.6) for s in sources]
    assert lesson8.beam_search(model, lesson8.pad_rows(sources), 3, 0.6) == expected
    assert len(set(map(tuple, expected))) > 5


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_beam_wide_enough_finds_the_best_of_all_hypotheses(lesson8, monkeypatch, alpha):
    monkeypatch.setattr(lesson8, "EXTRA_OUTPUT", 1)
    logits, size = random_logits(6, seed=3), 6  # three words, eos, and what is never said
    log_p, sources = log_probabilities(logits), sentences(10, longest=4)
    expected = []
    for source in sources:
        source = tuple(source)
        _, tokens = max(
            (score / penalty(len(tokens), alpha), tokens)
            for score, tokens in every_hypothesis(log_p, source, len(source) + 1, size)
        )
        expected.append([token for token in tokens if token != EOS])
    beam = 4 * 3**4  # more than can be alive at the longest limit, 5
    src = lesson8.pad_rows(sources)
    assert lesson8.beam_search(Scripted(logits), src, beam, alpha) == expected
    greedy = lesson8.beam_search(Scripted(logits), src, 1, alpha)
    assert greedy != expected


def two_candidates(long_score):
    """Logits: "3" with log-probability -1 and "4 5 6" with `long_score`, both then end for sure.

    What remains is spread over a hundred other words, and then over all of them again.
    """
    size = 110
    rest = math.log((1 - math.exp(-1) - math.exp(long_score)) / (size - 7))
    certain = {(3,): EOS, (4,): 5, (4, 5): 6, (4, 5, 6): EOS}

    def logits(source, past):
        row = [NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER] + [rest] * (size - 7)
        if not past:
            row[3], row[4] = -1.0, long_score
        elif past in certain:
            row[7:] = [NEVER] * (size - 7)
            row[certain[past]] = 0.0
        return row

    return logits


@pytest.mark.parametrize(
    ("long_score", "alpha", "expected"),
    [
        (-1.27, 0.0, [3]),  # without penalty the likelier one wins
        # With alpha 1: -1 / (7/6) = -0.857 against -1.27 / (9/6) = -0.847. Lengths counted one
        # too long would give -1 / (8/6) = -0.750 against -1.27 / (10/6) = -0.762.
        (-1.27, 1.0, [4, 5, 6]),
        # -0.857 against -1.30 / (9/6) = -0.867. Lengths without eos, so one too short, would give
        # -1 / (6/6) = -1 against -1.30 / (8/6) = -0.975.
        (-1.30, 1.0, [3]),
    ],
)
def test_length_penalty_decides_as_computed_by_hand(lesson8, long_score, alpha, expected):
    model = Scripted(two_candidates(long_score))
    assert lesson8.beam_search(model, torch.tensor([[9, 8, EOS]]), 4, alpha) == [expected]


@pytest.mark.parametrize(
    ("length", "alpha", "expected"),
    [(1, 0.6, 1.0), (7, 0.6, 2**0.6), (7, 1.0, 2.0), (13, 2.0, 9.0), (30, 0.0, 1.0)],
)
def test_length_penalty_formula(lesson8, length, alpha, expected):
    assert lesson8.length_penalty(length, alpha) == pytest.approx(expected)
    assert lesson8.length_penalty(torch.tensor(float(length)), alpha) == pytest.approx(expected)


def test_a_finished_hypothesis_does_not_go_on_growing(lesson8):
    """Ending at once has 40%. If it could go on, it would add words at no cost for ever."""

    def logits(source, past):
        if EOS in past:
            row = [NEVER] * 60
            row[7] = 0.0
        elif not past:
            row = [NEVER] * 3 + [math.log(0.6 / 57)] * 57
            row[EOS] = math.log(0.4)
        else:
            row = [0.0] * 60
        return row

    for beam in (1, 2, 4):
        src = torch.tensor([[9, EOS]])
        assert lesson8.beam_search(Scripted(logits), src, beam, 1.0) == [[]]


def test_a_finished_hypothesis_gives_up_its_place_in_the_beam(lesson8):
    """Beam 2: "eos" and "3" are kept; of "3" one continuation, 4, goes on, and 5 is lost.

    5 would have won: it ends for sure, after 4 all words are equally likely.
    """
    tables = {
        (): {EOS: 0.3, 3: 0.7},
        (3,): {4: 0.51, 5: 0.49},
        (3, 5): {EOS: 1.0},
    }

    def logits(source, past):
        row = [NEVER] * 3 + [0.0] * 97
        if past in tables:
            row = [math.log(tables[past].get(token, 1e-9)) for token in range(100)]
        return row

    src = torch.tensor([[9, EOS]])
    assert lesson8.beam_search(Scripted(logits), src, 2, 0.0) == [[]]
    assert lesson8.beam_search(Scripted(logits), src, 3, 0.0) == [[3, 5]]


@pytest.mark.parametrize("beam", [1, 2, 4])
def test_pad_and_bos_are_never_said(lesson8, beam):
    def logits(source, past):  # PAD is the likeliest by far, then bos, then the words, then eos
        return [9.0, 8.0, 1.5 * len(past) - 4, *(float(word % 3) for word in range(3, 12))]

    sources = sentences(6)
    outputs = lesson8.beam_search(Scripted(logits), lesson8.pad_rows(sources), beam)
    assert all(output and min(output) > EOS for output in outputs)


def test_pad_bos_and_eos_are_never_in_the_output_of_a_transformer(lesson8, model):
    with torch.no_grad():
        model.output.weight[PAD] = model.output.weight.sum(0) * 3
        model.output.weight[BOS] = -model.output.weight[PAD]  # one of them is always the largest
    sources = sentences(8)
    for beam in (1, 4):
        outputs = lesson8.beam_search(model, lesson8.pad_rows(sources), beam)
        assert all(token > EOS for output in outputs for token in output)
        assert any(outputs)


@pytest.mark.parametrize("beam", [4, 8])
@pytest.mark.parametrize("size", [5, 7, 10])
def test_hypotheses_that_end_in_one_step_each_give_up_their_place(lesson8, monkeypatch, size, beam):
    """A strong length penalty and few words: often several hypotheses end at once."""
    monkeypatch.setattr(lesson8, "EXTRA_OUTPUT", 4)
    sources = sentences(30, size=size)
    for seed in range(6):
        logits = random_logits(size, seed)
        src = lesson8.pad_rows(sources)
        outputs = lesson8.beam_search(Scripted(logits), src, beam, 2.0)
        log_p = log_probabilities(logits)
        for source, output in zip(sources, outputs, strict=True):
            limit = len(source) + 4
            assert output == plain_beam(log_p, tuple(source), limit, beam, 2.0)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_model_that_computes_no_numbers_is_an_error_not_an_empty_line(lesson8, model, broken):
    with torch.no_grad():
        model.decoder[0].feed_forward.linear2.bias.fill_(broken)
    with pytest.raises(lesson8.UserError, match="computes no numbers"):
        lesson8.beam_search(model, lesson8.pad_rows(sentences(3)), 2)


def test_log_probabilities_are_summed_in_fp32(lesson8, model, monkeypatch):
    seen = []
    real = torch.Tensor.topk
    monkeypatch.setattr(
        torch.Tensor, "topk", lambda self, *a, **k: seen.append(self.dtype) or real(self, *a, **k)
    )
    lesson8.beam_search(model.to(torch.bfloat16), lesson8.pad_rows(sentences(3)), 2)
    assert set(seen) == {torch.float32}


def test_a_beam_wider_than_the_vocabulary_works(lesson8, monkeypatch):
    monkeypatch.setattr(lesson8, "EXTRA_OUTPUT", 1)
    logits, sources = random_logits(5, seed=2), sentences(4, longest=3)
    log_p = log_probabilities(logits)
    expected = [plain_beam(log_p, tuple(s), len(s) + 1, 50, 0.6) for s in sources]
    found = lesson8.beam_search(Scripted(logits), lesson8.pad_rows(sources), 50)
    assert found == expected


# Limits


@pytest.mark.parametrize("beam", [1, 3])
def test_the_limit_is_each_source_length_plus_fifty_whatever_the_batch(lesson8, beam):
    def logits(source, past):  # never eos
        return [0.0, 0.0, NEVER, 1.0, 2.0, 1.5]

    model, sources = Scripted(logits), [[5, EOS], [5, 6, 7, 8, 9, EOS], [EOS]]
    together = lesson8.beam_search(model, lesson8.pad_rows(sources), beam)
    assert together == [[4] * 52, [4] * 56, [4] * 51]
    alone = [lesson8.beam_search(model, torch.tensor([source]), beam)[0] for source in sources]
    assert alone == together


def test_the_longest_source_and_its_longest_translation_fit_the_position_table(
    lesson8, monkeypatch
):
    """MAX_POSITIONS - EXTRA_OUTPUT - 1 subwords and eos are what Config and Translator let in."""
    monkeypatch.setattr(lesson8, "MAX_POSITIONS", 24)
    monkeypatch.setattr(lesson8, "EXTRA_OUTPUT", 5)
    torch.manual_seed(1)
    model = lesson8.Transformer(20, 12, 16, 4, 32, 1, 0.0, norm_first=True, tie="none")
    with torch.no_grad():  # eos gets the least of all logits at every state
        model.decoder_norm.bias.fill_(3.0)
        model.output.weight[EOS] = -5.0
    for beam in (1, 3):
        (output,) = lesson8.beam_search(model, torch.tensor([[7] * 18 + [EOS]]), beam)
        assert len(output) == 24


# Many sentences


@pytest.mark.parametrize("beam", [1, 4])
def test_translations_do_not_depend_on_the_batch(lesson8, model, beam):
    """One by one, all together, in another order, beside other sentences: the same."""
    sources = sentences(20)
    alone = [lesson8.beam_search(model, torch.tensor([source]), beam)[0] for source in sources]
    assert lesson8.beam_search(model, lesson8.pad_rows(sources), beam) == alone
    assert lesson8.translate_ids(model, sources, beam) == alone
    assert lesson8.translate_ids(model, sources[::-1], beam) == alone[::-1]
    beside = [sources[3], [5] * 30 + [EOS], sources[7]]
    assert lesson8.translate_ids(model, beside, beam)[::2] == [alone[3], alone[7]]
    assert len(set(map(tuple, alone))) > 10


def echo(source, past):
    """Say the source backwards, with some doubt."""
    words = [*source[-2::-1], EOS]
    row = [0.0] * 100
    row[words[len(past)] if len(past) < len(words) else EOS] = 8.0
    return row


@pytest.mark.parametrize("beam", [1, 64])
def test_results_stay_in_the_order_of_their_sources(lesson8, beam):
    """Though the search takes them by length and, with a wide beam, in several batches."""
    model, sources = Scripted(echo), sentences(14, longest=10, size=100)
    sources += [sources[4], sources[0]]  # repeated sentences too
    expected = [source[-2::-1] for source in sources]
    assert lesson8.translate_ids(model, sources, beam) == expected
    assert sum(model.batches) == len(sources)
    if beam == 64:
        assert len(model.batches) > 1


@pytest.fixture(params=[1, 3, 5])
def threads(request):
    """Have torch compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_each_thread_has_a_batch_of_its_own(lesson8, model, monkeypatch, threads, count):
    """All sentences once, the same translations, and the main thread keeps its threads."""
    sources, real, seen = sentences(count), lesson8.beam_search, []
    expected = [real(model, torch.tensor([source]), 2)[0] for source in sources]

    def watched(model, src, beam, **how):
        seen.append((threading.get_ident(), len(src), torch.get_num_threads()))
        return real(model, src, beam, **how)

    monkeypatch.setattr(lesson8, "beam_search", watched)
    assert lesson8.translate_ids(model, sources, 2) == expected
    idents, sizes, shares = zip(*seen, strict=True)
    assert len(sizes) == min(threads, count) and max(sizes) - min(sizes) <= 1
    assert sum(sizes) == count and set(shares) == {threads // len(sizes)}
    assert (threading.get_ident() in idents) == (len(sizes) == 1)
    later = []
    newcomer = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    newcomer.start()
    newcomer.join()
    assert later == [torch.get_num_threads()] == [threads]


@pytest.mark.parametrize("beam", [1, 4])
def test_a_batch_has_no_more_places_than_4096(lesson8, monkeypatch, beam):
    shapes = []

    def empty(model, src, beam, stop):
        shapes.append(tuple(src.shape))
        return [[]] * len(src)

    monkeypatch.setattr(lesson8, "beam_search", empty)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    lengths = [3, 900, 40, 41, 7] * 60
    lesson8.translate_ids(Scripted(echo), [[5] * n for n in lengths], beam)
    assert sum(count for count, _ in shapes) == len(lengths)
    assert all(count == 1 or count * length * beam <= 4096 for count, length in shapes)
    assert max(count * length * beam for count, length in shapes) > 3600


def test_an_error_in_one_of_the_threads_is_raised(lesson8, model, threads):
    with torch.no_grad():
        model.decoder[0].feed_forward.linear2.bias.fill_(math.nan)
    with pytest.raises(lesson8.UserError, match="computes no numbers"):
        lesson8.translate_ids(model, sentences(9), 2)


def test_a_search_that_is_told_to_stop_ends_within_a_step(lesson8):
    lengths, stop = set(), threading.Event()

    def logits(source, past):  # never eos
        lengths.add(len(past))
        if len(past) == 7:
            stop.set()
        return [0.0, 0.0, NEVER, 1.0]

    lesson8.beam_search(Scripted(logits), torch.tensor([[5, EOS]]), 1, stop=stop)
    assert max(lengths) == 7


def test_after_ctrl_c_no_thread_is_at_work_any_more(lesson8, model, monkeypatch):
    """Python, when it ends, would crash (SIGABRT) with one inside torch."""
    calls, before = [], threading.active_count()

    def endless(model, src, beam, stop):  # all but the first search
        calls.append(len(src))
        if len(calls) > 1:
            assert stop.wait(timeout=60)
            time.sleep(0.3)
        return [[]] * len(src)

    def interrupted(bar, count):
        raise KeyboardInterrupt

    monkeypatch.setattr(lesson8, "beam_search", endless)
    monkeypatch.setattr(lesson8.tqdm, "update", interrupted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with pytest.raises(KeyboardInterrupt):
        lesson8.translate_ids(model, sentences(8), 2)
    assert calls[0] == 2 and threading.active_count() == before


def test_nothing_to_translate_is_no_error(lesson8, model):
    assert lesson8.translate_ids(model, [], 4) == []


def test_sources_are_left_as_they_were(lesson8, model):
    sources = sentences(5)
    copies = [list(source) for source in sources]
    lesson8.translate_ids(model, sources, 2)
    assert sources == copies


@pytest.mark.parametrize("beam", [1, 4])
def test_a_model_left_in_training_mode_translates_the_same(lesson8, model, beam):
    """The model has dropout 0.4, which would change every call."""
    sources = sentences(8)
    expected = lesson8.translate_ids(model, sources, beam)
    for _ in range(2):
        model.train()
        assert lesson8.translate_ids(model, sources, beam) == expected


def test_search_leaves_no_gradients_and_no_changed_weights(lesson8, model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lesson8.translate_ids(model, sentences(3), 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
