"""The model: masks by gradient and by perturbation, and every part against an independent one."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

PAD, BOS, EOS = 0, 1, 2
SRC = torch.tensor([[5, 9, 3, 2, 0, 0], [4, 7, 8, 6, 11, 2], [3, 2, 0, 0, 0, 0]])
TGT = torch.tensor([[1, 5, 6, 7], [1, 8, 0, 0], [1, 4, 9, 0]])  # decoder input
TGT_AS_LONG = torch.tensor([[1, 5, 6, 7, 9, 3], [1, 8, 0, 0, 0, 0], [1, 4, 9, 0, 0, 0]])
NORMS = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def randomise(module, std=0.3):
    """Draw every parameter anew: fresh gains of 1 and biases of 0 would hide mistakes."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


@pytest.fixture
def build(lesson8):
    """A function that builds a small random model in double precision."""

    def build(norm_first=True, tie="none", dropout=0.0):
        torch.manual_seed(11)
        vocab = (20, 20) if tie == "all" else (20, 18)
        model = lesson8.Transformer(*vocab, 16, 4, 24, 2, dropout, norm_first, tie)
        return randomise(model).double().eval()

    return build


def keep_output(module):
    """Return a list that will hold what `module` returns, for gradients with respect to it."""
    kept = []
    module.register_forward_hook(lambda module, inputs, output: kept.append(output))
    return kept


def close(actual, expected, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# Masks


def test_padding_mask_is_true_at_real_tokens(lesson8):
    mask = lesson8.padding_mask(torch.tensor([[7, 1, 2, 0], [2, 0, 0, 0]]))
    assert mask.dtype == torch.bool and mask.shape == (2, 1, 1, 4)
    assert mask[:, 0, 0].tolist() == [[True, True, True, False], [True, False, False, False]]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=4), st.integers(1, 4))
def test_masks_allow_real_tokens_of_the_past_whatever_the_ids(lesson8, rows, padding):
    """Entry by entry, and each real position may attend to itself, so that no row is empty."""
    length = max(map(len, rows)) + padding
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = lesson8.causal_mask(length) & lesson8.padding_mask(ids)
    assert mask.shape == (len(rows), 1, length, length)
    for row, real in zip(mask[:, 0], rows, strict=True):
        expected = [[k <= q and k < len(real) for k in range(length)] for q in range(length)]
        assert row.tolist() == expected
        assert row.diagonal().tolist() == [k < len(real) for k in range(length)]


def test_causal_mask_allows_a_position_itself_and_the_past(lesson8):
    mask = lesson8.causal_mask(5)
    assert mask.dtype == torch.bool and mask.shape == (1, 1, 5, 5)
    assert all(mask[0, 0, q, k] == (k <= q) for q in range(5) for k in range(5))


@NORMS
def test_no_gradient_flows_from_a_position_to_later_target_inputs(build, norm_first):
    model = build(norm_first)
    kept = keep_output(model.tgt_embedding)
    logits = model(SRC, TGT_AS_LONG[:1].expand(3, -1))
    direction = torch.randn(logits.size(-1), dtype=logits.dtype)
    for t in range(logits.size(1)):
        (gradient,) = torch.autograd.grad(
            (logits[:, t] @ direction).sum(), kept[0], retain_graph=True
        )
        reached = gradient.abs().sum(-1)
        assert (reached[:, t + 1 :] == 0).all()
        assert (reached[:, : t + 1] > 0).all()


@NORMS
def test_changing_a_target_input_changes_no_earlier_output(build, norm_first):
    model, tgt = build(norm_first), TGT_AS_LONG[:1].expand(3, -1)
    before = model(SRC, tgt)
    for t in range(1, tgt.size(1)):
        changed = tgt.clone()
        changed[:, t] = 12
        after = model(SRC, changed)
        close(after[:, :t], before[:, :t])
        assert ((after - before)[:, t:].abs().amax(-1) > 1e-6).all()


@NORMS
def test_no_gradient_reaches_padding(build, norm_first):
    model = build(norm_first)
    src_kept, tgt_kept = keep_output(model.src_embedding), keep_output(model.tgt_embedding)
    logits = model(SRC, TGT)[TGT != PAD]
    loss = (logits @ torch.randn(logits.size(-1), dtype=logits.dtype)).sum()
    for ids, kept in ((SRC, src_kept), (TGT, tgt_kept)):
        (gradient,) = torch.autograd.grad(loss, kept[0], retain_graph=True)
        reached = gradient.abs().sum(-1)
        assert (reached[ids == PAD] == 0).all()
        assert (reached[ids != PAD] > 0).all()


@NORMS
def test_content_of_padding_does_not_matter(build, norm_first):
    """Whatever vector PAD has, real positions compute the same: source, target, target's front."""
    model = build(norm_first)
    tgt = torch.cat([TGT, torch.tensor([[0, 1, 6, 7]])])
    src = torch.cat([SRC, SRC[:1]])
    memory = model.encode(src)
    states = model.decode(tgt, memory, src)
    with torch.no_grad():
        for embedding in (model.src_embedding, model.tgt_embedding):
            embedding.table.weight[PAD] = torch.randn(16, dtype=torch.float64) * 5
    memory_after = model.encode(src)
    close(memory_after[src != PAD], memory[src != PAD])
    close(model.decode(tgt, memory_after, src)[tgt != PAD], states[tgt != PAD])
    assert not torch.allclose(memory_after[src == PAD], memory[src == PAD])  # it did change there


@NORMS
def test_longer_padding_changes_nothing_at_real_tokens(build, norm_first):
    model = build(norm_first)
    longer = model(F.pad(SRC, (0, 5), value=PAD), F.pad(TGT, (0, 3), value=PAD))
    close(longer[:, : TGT.size(1)][TGT != PAD], model(SRC, TGT)[TGT != PAD])


@NORMS
@pytest.mark.parametrize("tgt", [TGT, TGT_AS_LONG], ids=["shorter than source", "as long"])
def test_a_padded_batch_computes_what_each_pair_gets_alone(build, norm_first, tgt):
    """Fails where any attention has the wrong mask, cross-attention with the target's included."""
    model = build(norm_first)
    together = model(SRC, tgt)
    for i in range(len(SRC)):
        src, own = SRC[i][SRC[i] != PAD], tgt[i][tgt[i] != PAD]
        close(together[i, : len(own)], model(src[None], own[None])[0])


def test_cross_attention_never_sees_source_padding(build):
    """Perturb the memory itself: at PAD nothing changes, at real tokens everything does."""
    model = build()
    memory = model.encode(SRC).detach()
    states = model.decode(TGT_AS_LONG, memory, SRC)
    noise = torch.randn_like(memory)
    at_pad = memory + noise * (SRC == PAD)[..., None]
    close(model.decode(TGT_AS_LONG, at_pad, SRC), states)
    for s in range(SRC.size(1)):
        moved = memory.clone()
        moved[:, s] += noise[:, s]
        change = (model.decode(TGT_AS_LONG, moved, SRC) - states).abs().amax((1, 2))
        assert ((change > 1e-6) == (SRC[:, s] != PAD)).all()


def test_a_real_token_with_a_zero_embedding_is_not_taken_for_padding(build):
    model = build()
    with torch.no_grad():
        for embedding in (model.src_embedding, model.tgt_embedding):
            embedding.table.weight[[PAD, 7]] = 0.0
    real, padded = model.encode(torch.tensor([[5, 7, 6, 2], [5, PAD, 6, 2]]))
    assert (real - padded).abs().amax() > 1e-3
    src = torch.tensor([[5, 6, 2]]).expand(2, -1)
    real, padded = model(src, torch.tensor([[1, 7, 6], [1, PAD, 6]]))[:, 2]
    assert (real - padded).abs().amax() > 1e-3


@DTYPES
def test_a_fully_blocked_row_gives_no_nan(lesson8, dtype):
    torch.manual_seed(0)
    query, key, value = (
        (torch.randn(1, 2, 3, 4) * 50).to(dtype).requires_grad_() for _ in range(3)
    )
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, True]])
    output, weights = lesson8.scaled_dot_product_attention(query, key, value, mask)
    output.float().square().sum().backward()
    for tensor in (output, weights, query.grad, key.grad, value.grad):
        assert tensor.dtype == dtype and tensor.isfinite().all()
    assert (weights[..., [0, 2], :][..., ~mask[[0, 2]]] == 0).all()
    close(weights.float().sum(-1), torch.ones(1, 2, 3), atol=0.02)


@DTYPES
def test_a_source_of_nothing_but_padding_gives_no_nan(build, dtype):
    model = build().to(dtype)
    src, tgt = torch.tensor([[0, 0, 0], [4, 2, 0]]), torch.tensor([[0, 1, 5], [1, 5, 0]])
    logits = model(src, tgt)
    logits.float().square().mean().backward()
    assert logits.dtype == dtype and logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# Attention against torch's


@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_torch_scaled_dot_product_attention(lesson8, masked):
    torch.manual_seed(1)
    ours = [torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    mask = torch.rand(2, 1, 5, 7) > 0.4 if masked else None
    if masked:
        mask[..., 0] = True
    output, weights = lesson8.scaled_dot_product_attention(*ours, mask)
    expected = F.scaled_dot_product_attention(*theirs, attn_mask=mask)
    close(output, expected)
    close(weights @ ours[2], expected)
    direction = torch.randn_like(output)
    (output * direction).sum().backward()
    (expected * direction).sum().backward()
    for mine, reference in zip(ours, theirs, strict=True):
        close(mine.grad, reference.grad)


def test_attention_by_hand(lesson8):
    """q = [sqrt(2) ln 3, 0] looks up two keys: weights 3/4 and 1/4, output [3, 2]."""
    query = torch.tensor([[math.sqrt(2) * math.log(3), 0.0]])
    output, weights = lesson8.scaled_dot_product_attention(
        query, torch.eye(2), torch.tensor([[4.0, 0.0], [0.0, 8.0]])
    )
    close(weights, torch.tensor([[0.75, 0.25]]), atol=1e-6)
    close(output, torch.tensor([[3.0, 2.0]]), atol=1e-6)


def attention_pairs(ours, theirs):
    """Yield (our parameters, torch's parameter that stacks them) of an attention."""
    for kind in ("weight", "bias"):
        yield (
            [getattr(w, kind) for w in (ours.w_q, ours.w_k, ours.w_v)],
            getattr(theirs, f"in_proj_{kind}"),
        )
        yield [getattr(ours.w_o, kind)], getattr(theirs.out_proj, kind)


def module_pairs(ours, theirs):
    """Yield (our parameter, torch's) of a Linear or a LayerNorm."""
    for kind in ("weight", "bias"):
        yield [getattr(ours, kind)], getattr(theirs, kind)


def layer_pairs(ours, theirs, decoder):
    yield from attention_pairs(ours.self_attention, theirs.self_attn)
    if decoder:
        yield from attention_pairs(ours.cross_attention, theirs.multihead_attn)
    yield from module_pairs(ours.feed_forward.linear1, theirs.linear1)
    yield from module_pairs(ours.feed_forward.linear2, theirs.linear2)
    for i in range(1, 4 if decoder else 3):
        yield from module_pairs(getattr(ours, f"residual{i}").norm, getattr(theirs, f"norm{i}"))


def transformer_pairs(ours, theirs, norm_first):
    for own, other in zip(ours.encoder, theirs.encoder.layers, strict=True):
        yield from layer_pairs(own, other, decoder=False)
    for own, other in zip(ours.decoder, theirs.decoder.layers, strict=True):
        yield from layer_pairs(own, other, decoder=True)
    if norm_first:
        yield from module_pairs(ours.encoder_norm, theirs.encoder.norm)
        yield from module_pairs(ours.decoder_norm, theirs.decoder.norm)


def copy_weights(pairs):
    with torch.no_grad():
        for ours, theirs in pairs:
            theirs.copy_(torch.cat(ours))


def same_gradients(pairs):
    for ours, theirs in pairs:
        close(torch.cat([parameter.grad for parameter in ours]), theirs.grad, atol=1e-9)


def test_multi_head_attention_equals_torch(lesson8):
    torch.manual_seed(2)
    ours = randomise(lesson8.MultiHeadAttention(12, 3)).double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    pairs = list(attention_pairs(ours, theirs))
    copy_weights(pairs)
    query, memory = (torch.randn(2, n, 12, dtype=torch.float64) for n in (4, 6))
    blocked = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    output, weights = ours(query, memory, ~blocked[:, None, None, :])
    expected, expected_weights = theirs(
        query, memory, memory, key_padding_mask=blocked, average_attn_weights=False
    )
    close(output, expected)
    close(weights, expected_weights)
    direction = torch.randn_like(output)
    (output * direction).sum().backward()
    (expected * direction).sum().backward()
    same_gradients(pairs)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@NORMS
def test_model_equals_torch_transformer(build, norm_first):
    """Outputs, gradients of all parameters and gradients of both inputs, padding included."""
    ours = build(norm_first)
    theirs = nn.Transformer(
        16, 4, 2, 2, 24, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    if not norm_first:  # torch ends both stacks with a norm that the paper does not have
        theirs.encoder.norm = theirs.decoder.norm = None
    pairs = list(transformer_pairs(ours, theirs, norm_first))
    copy_weights(pairs)

    stack = [p for own, _ in pairs for p in own]
    outside = [ours.src_embedding.table, ours.tgt_embedding.table, ours.output]
    assert {id(p) for p in ours.parameters()} == {id(p) for p in stack} | {
        id(module.weight) for module in outside
    }
    assert {id(p) for p in theirs.parameters()} == {id(p) for _, p in pairs}

    src_kept, tgt_kept = keep_output(ours.src_embedding), keep_output(ours.tgt_embedding)
    memory = ours.encode(SRC)
    states = ours.decode(TGT, memory, SRC)
    src_x, tgt_x = (kept[0].detach().clone().requires_grad_() for kept in (src_kept, tgt_kept))
    expected_memory = theirs.encoder(
        ours.position(src_x), src_key_padding_mask=SRC == PAD, is_causal=False
    )
    expected = theirs(
        ours.position(src_x),
        ours.position(tgt_x),
        tgt_mask=torch.ones(4, 4, dtype=torch.bool).triu(1),
        src_key_padding_mask=SRC == PAD,
        tgt_key_padding_mask=TGT == PAD,
        memory_key_padding_mask=SRC == PAD,
    )
    close(memory, expected_memory)
    close(states, expected)
    close(ours(SRC, TGT), F.linear(expected, ours.output.weight))

    direction = torch.randn_like(states)
    inputs = torch.autograd.grad(
        (states * direction).sum(), [src_kept[0], tgt_kept[0]], retain_graph=True
    )
    (states * direction).sum().backward()
    (expected * direction).sum().backward()
    same_gradients(pairs)
    for mine, reference in zip(inputs, (src_x, tgt_x), strict=True):
        close(mine, reference.grad, atol=1e-9)


def test_n_heads_must_divide_d_model(lesson8):
    with pytest.raises(ValueError, match=r"3.*16"):
        lesson8.MultiHeadAttention(16, 3)


def test_feed_forward_against_numpy(lesson8):
    torch.manual_seed(4)
    module = randomise(lesson8.FeedForward(6, 10))
    x = torch.randn(2, 3, 6)
    w1, b1, w2, b2 = (
        p.detach().numpy()
        for linear in (module.linear1, module.linear2)
        for p in (linear.weight, linear.bias)
    )
    expected = np.maximum(0, x.numpy() @ w1.T + b1) @ w2.T + b2
    np.testing.assert_allclose(module(x).detach().numpy(), expected, atol=1e-5)


# Where the norm is


@NORMS
def test_norm_stands_where_norm_first_says(lesson8, norm_first):
    """Pre-norm: x + f(norm(x)). Post-norm: norm(x + f(x))."""
    torch.manual_seed(5)
    residual = randomise(lesson8.Residual(8, 0.0, norm_first))
    x = torch.randn(2, 3, 8)

    def norm(x):
        return F.layer_norm(x, (8,), residual.norm.weight, residual.norm.bias)

    expected = x + norm(x).sin() if norm_first else norm(x + x.sin())
    close(residual(x, torch.sin), expected, atol=1e-6)


def test_post_norm_is_the_default_of_layers_and_model(lesson8):
    layers = (lesson8.EncoderLayer(8, 2, 16, 0.0), lesson8.DecoderLayer(8, 2, 16, 0.0))
    model = lesson8.Transformer(9, 9, 8, 2, 16, 1, 0.0)
    for layer in (*layers, model.encoder[0], model.decoder[0]):
        assert not layer.residual1.norm_first
    assert isinstance(model.encoder_norm, nn.Identity)
    assert isinstance(model.decoder_norm, nn.Identity)


@NORMS
def test_both_stacks_end_with_a_norm(lesson8, norm_first):
    """An untrained model's memory and states have mean 0 and variance 1 at every position."""
    torch.manual_seed(6)
    model = lesson8.Transformer(20, 20, 64, 4, 64, 2, 0.0, norm_first)
    memory = model.encode(SRC)
    for states in (memory, model.decode(TGT, memory, SRC)):
        close(states.mean(-1), torch.zeros(states.shape[:2]), atol=1e-4)
        close(states.var(-1, unbiased=False), torch.ones(states.shape[:2]), atol=1e-2)


# Embeddings and positions


def test_sinusoids_against_numpy_entry_by_entry(lesson8):
    d_model, length = 12, 1024
    expected = np.empty((length, d_model))
    for p in range(length):
        for i in range(d_model // 2):
            angle = p / 10000 ** (2 * i / d_model)
            expected[p, 2 * i], expected[p, 2 * i + 1] = math.sin(angle), math.cos(angle)
    encoding = lesson8.PositionalEncoding(d_model, length, 0.0)
    table = encoding(torch.zeros(1, length, d_model))[0].numpy()
    np.testing.assert_allclose(table, expected, atol=3e-4)


def test_positions_are_added_from_start_on(lesson8):
    encoding = lesson8.PositionalEncoding(8, 20, 0.0)
    x = torch.randn(2, 20, 8)
    whole = encoding(x)
    close(whole - x, encoding(torch.zeros_like(x)), atol=1e-6)
    assert torch.equal(encoding(x[:, 7:12], start=7), whole[:, 7:12])
    assert torch.equal(encoding(x[:, 19:], start=19), whole[:, 19:])


def test_odd_d_model_is_refused(lesson8):
    with pytest.raises(ValueError, match=r"even.*7"):
        lesson8.PositionalEncoding(7, 10, 0.0)


def test_input_longer_than_the_position_table_is_refused_with_both_numbers(lesson8):
    encoding = lesson8.PositionalEncoding(4, 50, 0.0)
    encoding(torch.zeros(1, 50, 4))
    with pytest.raises(ValueError, match=r"61.*50"):
        encoding(torch.zeros(1, 61, 4))
    with pytest.raises(ValueError, match=r"51.*50"):
        encoding(torch.zeros(1, 6, 4), start=45)


def test_source_longer_than_the_position_table_is_refused(lesson8, tiny_model):
    length = lesson8.MAX_POSITIONS + 1
    with pytest.raises(ValueError, match=rf"{length}.*{lesson8.MAX_POSITIONS}"):
        tiny_model.encode(torch.full((1, length), 5))


def test_embedding_entries_have_variance_one_after_scaling(lesson8):
    torch.manual_seed(7)
    embedding = lesson8.TokenEmbedding(4000, 64)
    assert embedding.table.weight.std().item() == pytest.approx(64**-0.5, rel=0.02)
    vectors = embedding(torch.arange(4000))
    assert vectors.std().item() == pytest.approx(1.0, rel=0.02)
    close(vectors, embedding.table.weight * 8.0, atol=1e-6)


@pytest.mark.parametrize("tie", ["all", "output", "none"])
def test_sqrt_d_model_scales_inputs_once_and_outputs_never(build, tie):
    model = build(tie=tie)
    seen = []
    model.position.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    states = model.decode(TGT, model.encode(SRC), SRC)
    close(seen[0], model.src_embedding.table.weight[SRC] * 4.0)  # d_model is 16
    close(seen[1], model.tgt_embedding.table.weight[TGT] * 4.0)
    close(model(SRC, TGT), states @ model.output.weight.T)


@pytest.mark.parametrize(
    ("tie", "shared"), [("all", {"src", "tgt", "out"}), ("output", {"tgt", "out"}), ("none", set())]
)
def test_tied_matrices_share_their_storage(build, tie, shared):
    model = build(tie=tie)
    weights = {
        "src": model.src_embedding.table.weight,
        "tgt": model.tgt_embedding.table.weight,
        "out": model.output.weight,
    }
    assert len({weights[name].data_ptr() for name in shared}) == (1 if shared else 0)
    assert len({weight.data_ptr() for weight in weights.values()}) == 3 - max(0, len(shared) - 1)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    with torch.no_grad():
        weights["tgt"] += 1
    changed = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert changed == shared | {"tgt"}


def test_gradient_reaches_a_tied_matrix_from_input_and_output(build):
    """Token 15 is read nowhere; its embedding learns only where it is the output matrix as well."""
    for tie, learns in (("all", True), ("output", True), ("none", False)):
        model = build(tie=tie)
        model(SRC, TGT).log_softmax(-1)[..., 3].sum().backward()
        gradient = model.tgt_embedding.table.weight.grad
        assert (gradient[15].abs().sum() > 0) == learns
        assert gradient[8].abs().sum() > 0  # read, in any case
    model = build(tie="all")
    model.encode(SRC).square().sum().backward()
    assert model.output.weight.grad[11].abs().sum() > 0  # the source alone reaches the one matrix


def test_wrong_ties_are_refused(lesson8):
    with pytest.raises(ValueError, match="tie"):
        lesson8.Transformer(20, 20, 8, 2, 16, 1, 0.0, tie="some")
    with pytest.raises(ValueError, match="vocabulary"):
        lesson8.Transformer(20, 21, 8, 2, 16, 1, 0.0, tie="all")


def formula(src_vocab, tgt_vocab, d, d_ff, n_layers, norm_first, tie):
    """The number of parameters, counted by hand."""
    attention, feed_forward, norm = 4 * (d * d + d), 2 * d * d_ff + d_ff + d, 2 * d
    layers = 3 * attention + 2 * feed_forward + 5 * norm
    matrices = {"all": [tgt_vocab], "output": [src_vocab, tgt_vocab]}
    vocabulary = sum(matrices.get(tie, [src_vocab, tgt_vocab, tgt_vocab]))
    return n_layers * layers + vocabulary * d + (2 * norm if norm_first else 0)


@pytest.mark.parametrize(
    ("sizes", "n_heads", "expected"),
    [
        ((16000, 16000, 256, 1024, 3, False, "all"), 4, 9_625_600),
        ((37000, 37000, 512, 2048, 6, False, "all"), 8, 63_082_496),
        ((37000, 37000, 1024, 4096, 6, False, "all"), 16, 214_245_376),
        ((8000, 8000, 256, 1024, 4, True, "output"), 8, None),
        ((50, 60, 16, 24, 2, True, "none"), 2, None),
        ((50, 60, 16, 24, 2, True, "none"), 4, None),
        ((50, 60, 16, 24, 1, False, "output"), 4, None),
    ],
)
def test_parameter_count(lesson8, sizes, n_heads, expected):
    src_vocab, tgt_vocab, d_model, d_ff, n_layers, norm_first, tie = sizes
    with torch.device("meta"):
        model = lesson8.Transformer(
            src_vocab, tgt_vocab, d_model, n_heads, d_ff, n_layers, 0.1, norm_first, tie
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == formula(*sizes)
    assert expected is None or count == expected


# Dropout


def test_dropout_acts_in_training_only(build):
    model = build(dropout=0.5)
    assert torch.equal(model(SRC, TGT), model(SRC, TGT))
    close(model(SRC, TGT), build(dropout=0.0)(SRC, TGT))
    model.train()
    assert not torch.allclose(model(SRC, TGT), model(SRC, TGT))


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_fast_dropout_drops_a_share_and_keeps_the_mean(lesson8, p):
    """The share is p rounded to 1/256, at each of the 8 bytes that one random word gives."""
    torch.manual_seed(8)
    share, n = round(p * 256) / 256, 800_000
    dropped = lesson8.FastDropout(p).train()(torch.ones(n // 8, 8))
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / (1 - share)).item()}
    sigma = math.sqrt(share * (1 - share) / n)
    assert (dropped == 0).float().mean().item() == pytest.approx(share, abs=5 * sigma)
    assert dropped.mean().item() == pytest.approx(1, abs=5 * sigma / (1 - share))
    columns = (dropped == 0).float().mean(0)
    close(columns, torch.full((8,), share), atol=5 * sigma * math.sqrt(8))


def test_fast_dropout_decides_for_each_element_by_itself(lesson8):
    torch.manual_seed(9)
    kept = (lesson8.FastDropout(0.5).train()(torch.ones(80_000)) > 0).float() - 0.5
    for distance in (1, 2, 7, 8, 9):
        agreement = (kept[distance:] * kept[:-distance]).mean().item() * 4
        assert abs(agreement) < 5 / math.sqrt(len(kept))


def test_fast_dropout_is_the_identity_in_eval_and_at_zero(lesson8):
    x = torch.randn(5, 7)
    assert torch.equal(lesson8.FastDropout(0.3).eval()(x), x)
    assert torch.equal(lesson8.FastDropout(0.0).train()(x), x)


@pytest.mark.parametrize("shape", [(1,), (13,), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fast_dropout_gradient_has_the_mask_of_the_output(lesson8, shape, dtype):
    torch.manual_seed(10)
    x = (torch.rand(shape) + 1).to(dtype).requires_grad_()
    y = lesson8.FastDropout(0.5).train()(x)
    y.sum().backward()
    assert y.shape == x.shape and y.dtype == dtype
    assert torch.equal(x.grad, torch.where(y == 0, 0.0, 2.0).to(dtype))


def test_fast_dropout_repeats_its_mask_with_the_seed(lesson8):
    dropout, x, outputs = lesson8.FastDropout(0.4).train(), torch.ones(1000), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(dropout(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(dropout(x), outputs[2])  # the next call draws anew


def test_fast_dropout_close_to_one_stays_finite(lesson8):
    """Config allows every rate below 1."""
    assert lesson8.FastDropout(0.999).train()(torch.ones(1000)).isfinite().all()
