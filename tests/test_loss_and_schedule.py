"""The loss against NumPy, and the learning rate as a function."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

PAD, BOS, EOS = 0, 1, 2
SRC = torch.tensor([[5, 9, 3, 2, 0], [4, 7, 8, 6, 2], [3, 2, 0, 0, 0]])
TGT = torch.tensor([[6, 7, 9, 2], [8, 2, 0, 0], [2, 0, 0, 0]])


def direct_loss(model, src, tgt, smoothing):
    """Sum over real tokens of the smoothed cross-entropy, one sentence after the other, in NumPy.

    The wanted distribution is `smoothing` spread over all classes, the rest on the right one.
    """
    loss = 0.0
    for source, target in zip(src.tolist(), tgt.tolist(), strict=True):
        source, target = [i for i in source if i != PAD], [i for i in target if i != PAD]
        logits = model(torch.tensor([source]), torch.tensor([[BOS, *target[:-1]]]))[0]
        logits = logits.detach().double().numpy()
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        wanted = np.full_like(log_p, smoothing / log_p.shape[-1])
        wanted[np.arange(len(target)), target] += 1 - smoothing
        loss -= (wanted * log_p).sum()
    return loss


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_loss_equals_direct_computation(lesson8, tiny_model, smoothing):
    loss = lesson8.batch_loss(tiny_model, SRC, TGT, smoothing).item()
    assert loss == pytest.approx(direct_loss(tiny_model, SRC, TGT, smoothing), rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 64, 65, 200])
def test_fast_cross_entropy_equals_torchs_gradient_too(lesson8, rows, smoothing, dtype, tolerance):
    torch.manual_seed(4)
    logits = (3 * torch.randn(rows, 50)).to(dtype)
    targets = torch.randint(50, (rows,))
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    loss = lesson8.SmoothedCrossEntropy.apply(ours, targets, smoothing)
    how = dict(label_smoothing=smoothing, reduction="sum")
    expected = F.cross_entropy(theirs.float(), targets, **how)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    (loss / 7).backward()
    (expected / 7).backward()
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_works_without_any_padding(lesson8, tiny_model, smoothing):
    src, tgt = SRC[1:2], TGT[:1]
    loss = lesson8.batch_loss(tiny_model, src, tgt, smoothing).item()
    assert loss == pytest.approx(direct_loss(tiny_model, src, tgt, smoothing), rel=1e-5)


def test_loss_is_a_sum_over_tokens_so_batches_add_up(lesson8, tiny_model):
    together = lesson8.batch_loss(tiny_model, SRC, TGT, 0.1)
    alone = [lesson8.batch_loss(tiny_model, SRC[i : i + 1], TGT[i : i + 1], 0.1) for i in range(3)]
    torch.testing.assert_close(together, sum(alone), rtol=1e-5, atol=0)


def test_longer_padding_changes_neither_loss_nor_gradient(lesson8, tiny_model):
    model = tiny_model.double()
    loss = lesson8.batch_loss(model, SRC, TGT, 0.1)
    longer = lesson8.batch_loss(model, F.pad(SRC, (0, 4)), F.pad(TGT, (0, 6)), 0.1)
    torch.testing.assert_close(longer, loss, rtol=1e-6, atol=0)
    pairs = zip(gradients(model, loss), gradients(model, longer), strict=True)
    for expected, actual in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_padding_targets_teach_nothing(lesson8, tiny_model):
    """No logit is computed where the target is PAD, and the right answer there would not pay."""
    seen = []
    tiny_model.output.register_forward_hook(lambda module, inputs, out: seen.append(out))
    loss = lesson8.batch_loss(tiny_model, SRC, TGT, 0.0)
    (gradient,) = torch.autograd.grad(loss, seen[0])
    assert (gradient.flatten(0, -2).abs().sum(-1) > 0).sum() == (TGT != PAD).sum()
    assert (gradient[..., PAD] >= 0).all()  # PAD only ever loses probability


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_finite_for_a_model_that_is_certain(lesson8, tiny_model, smoothing):
    """With logits far apart, probabilities round to 0: no log(0)."""
    with torch.no_grad():
        tiny_model.output.weight *= 1e4
    loss = lesson8.batch_loss(tiny_model, SRC, TGT, smoothing)
    assert loss.isfinite() and all(g.isfinite().all() for g in gradients(tiny_model, loss))


def test_loss_is_summed_in_full_precision(lesson8, tiny_model):
    assert lesson8.batch_loss(tiny_model.bfloat16(), SRC, TGT, 0.1).dtype == torch.float32


def test_decoder_reads_bos_then_the_target_one_place_later(lesson8, tiny_model, monkeypatch):
    decode, inputs = tiny_model.decode, []

    def spy(tgt, *args, **kwargs):
        inputs.append(tgt)
        return decode(tgt, *args, **kwargs)

    monkeypatch.setattr(tiny_model, "decode", spy)
    before = TGT.clone()
    lesson8.batch_loss(tiny_model, SRC, TGT, 0.1)
    (read,) = inputs
    assert read.tolist() == [[BOS, 6, 7, 9], [BOS, 8, 2, 0], [BOS, 2, 0, 0]]
    assert torch.equal(TGT, before)


def test_the_logits_of_a_token_do_not_depend_on_it(lesson8, tiny_model):
    """No accuracy by looking: changing target t moves only the logits after t."""
    model, seen = tiny_model.double(), []
    model.output.register_forward_hook(lambda module, inputs, out: seen.append(out))
    src = SRC[1:2]
    for tgt in ([6, 7, 9, 2], [6, 7, 11, 2], [8, 7, 9, 2]):
        lesson8.batch_loss(model, src, torch.tensor([tgt]), 0.1)
    first, later, earlier = (logits.reshape(4, -1) for logits in seen)
    torch.testing.assert_close(later[:3], first[:3], rtol=0, atol=1e-10)
    torch.testing.assert_close(earlier[:1], first[:1], rtol=0, atol=1e-10)
    assert (later[3] - first[3]).abs().max() > 1e-6
    assert ((earlier - first)[1:].abs().amax(-1) > 1e-6).all()


# The schedule


def warmup_end(total, warmup):
    """The step with the highest rate: a fifth of all steps at most."""
    return min(warmup, max(1, total // 5))


def test_warm_up_is_linear_and_ends_at_the_peak(lesson8):
    rates = [lesson8.learning_rate(step, 1000, 3e-4, 100) for step in range(1, 101)]
    assert rates == pytest.approx([3e-4 * step / 100 for step in range(1, 101)], rel=1e-12)
    assert rates[-1] == pytest.approx(3e-4, rel=1e-12)


def test_rate_falls_as_half_a_cosine_to_zero(lesson8):
    def rate(step):
        return lesson8.learning_rate(step, 1100, 2.0, 100)

    assert rate(350) == pytest.approx(1 + math.cos(math.pi / 4))
    assert rate(600) == pytest.approx(1.0)
    assert rate(850) == pytest.approx(1 - math.cos(math.pi / 4))
    assert rate(1100) == 0.0


def test_rate_does_not_depend_on_what_was_asked_before(lesson8):
    steps = [*range(1, 301)]
    forward = [lesson8.learning_rate(step, 300, 1e-3, 40) for step in steps]
    backward = [lesson8.learning_rate(step, 300, 1e-3, 40) for step in reversed(steps)]
    assert forward == backward[::-1]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 50])
def test_a_run_shorter_than_its_warm_up_still_reaches_peak_and_zero(lesson8, total):
    rates = [lesson8.learning_rate(step, total, 1e-3, 400) for step in range(1, total + 1)]
    assert max(rates) == pytest.approx(1e-3)
    assert total == 1 or rates[-1] == 0.0
    assert rates[warmup_end(total, 400) - 1] == max(rates)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rate_rises_to_the_peak_and_falls_to_zero(lesson8, data):
    total = data.draw(st.integers(1, 1_000_000), "total")
    warmup = data.draw(st.integers(1, 1_000_000), "warmup")
    peak = data.draw(st.floats(1e-6, 1), "peak")
    step = data.draw(st.integers(1, total), "step")
    rate = lesson8.learning_rate(step, total, peak, warmup)
    assert 0 <= rate <= peak * (1 + 1e-12)
    assert step == total or rate > 0
    if step < total:
        following = lesson8.learning_rate(step + 1, total, peak, warmup)
        if step < warmup_end(total, warmup):
            assert following > rate
        else:
            assert following <= rate
    if step == total > 1:
        assert rate == 0
