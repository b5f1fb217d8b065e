"""Mistakes a caller can make: each gets one sentence that names the value and says what to do."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import fullbatch as fb
from tests.conftest import unit_rows

WIDTH, SAMPLES, BATCH = 6, 50, 8


def rows(count=BATCH, width=WIDTH, seed=0):
    return unit_rows(count, width, seed, torch.float32)


def objective(name="sogclr", **settings):
    return fb.make_objective(name, num_samples=SAMPLES, **settings)


def check_refused(call, *words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the words are checked below)
        call()
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert "\n" not in message
    assert len(message) < 700


def with_value(value, row=3):
    changed = rows()
    changed[row, 1] = value
    return changed


def corrected(value):
    log_c = torch.zeros(BATCH, 2)
    log_c[3, 1] = value
    return objective()(rows(), rows(), IDS, log_c)


IDS = torch.arange(BATCH)

CALLS = {
    "batch of one": (lambda: objective()(rows(1), rows(1), IDS[:1]), "batch of 1", "at least 2"),
    "shapes": (lambda: objective()(rows(8), rows(7), IDS), "(8, 6)", "(7, 6)", "same shape"),
    "widths": (lambda: objective()(rows(8), rows(8, 5), IDS), "(8, 6)", "(8, 5)"),
    "one axis": (lambda: objective()(rows()[0], rows()[0], IDS), "(batch, width)", "(6,)"),
    "whole numbers": (lambda: objective()(rows().long(), rows(), IDS), "floating-point", "int64"),
    "not a tensor": (lambda: objective()([1.0], rows(), IDS), "floating-point", "list"),
    "nan": (lambda: objective()(with_value(torch.nan), rows(), IDS), "image_embeddings", "non-finite", "row 3"),
    "inf": (lambda: objective()(rows(), with_value(torch.inf), IDS), "text_embeddings", "non-finite", "row 3"),
    "not unit": (lambda: objective()(3 * rows(), rows(), IDS), "length 3", "normalize(image_embeddings"),
    "zero row": (lambda: objective()(rows(), rows() * 0, IDS), "length 0", "normalize(text_embeddings"),
    "no ids": (lambda: objective()(rows(), rows()), "sample_ids", "num_samples - 1"),
    "ids too high": (lambda: objective()(rows(), rows(), IDS + 43), "[0, 49]", "got 50"),
    "ids negative": (lambda: objective()(rows(), rows(), IDS - 2), "[0, 49]", "got -2"),
    "ids too few": (lambda: objective()(rows(), rows(), IDS[:5]), "8 whole numbers", "(5,)"),
    "ids not whole": (lambda: objective()(rows(), rows(), IDS.float()), "whole numbers", "float32"),
    "three ids": (lambda: objective()(rows(), rows(), (IDS, IDS, IDS)), "one tensor", "or a pair", "tuple of 3"),
    "complex ids": (lambda: objective()(rows(), rows(), IDS.to(torch.complex64)), "whole numbers", "complex64"),
    "text ids too high": (lambda: objective()(rows(), rows(), (IDS, IDS + 99)), "got 106"),
    "other width": (
        lambda: objective("neuclip", width=32, prototypes=8)(rows(), rows()),
        "width 6", "width=32", "make it with width=6",
    ),
    "corrections of one direction": (
        lambda: objective()(rows(), rows(), IDS, torch.zeros(BATCH)), "log_correction", "shape (8, 2)", "got (8,)",
    ),
    "correction nan": (lambda: corrected(torch.nan), "log_correction", "must be finite", "one value is nan"),
    "correction inf": (lambda: corrected(torch.inf), "log_correction", "must be finite", "one value is inf"),
    "correction too small": (lambda: corrected(-30.0), "at least -20", "one value is -30", "log(batch / rows"),
    "asked before training": (
        lambda: objective("neuclip", width=WIDTH, prototypes=8).eval()(rows(), rows()),
        "no prototypes yet", "training mode",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_calls(case):
    call, *words = CALLS[case]
    check_refused(call, *words)


SETTINGS = {
    "unknown method": (lambda: fb.make_objective("neuklip"), "'neuklip'", "did you mean 'neuclip'", "openclip, siglip"),
    "unknown setting": (
        lambda: fb.make_objective("neuclip", width=8, prototpes=3),
        "'prototpes'", "did you mean 'prototypes'", "restart_every",
    ),
    "another method's setting": (lambda: fb.make_objective("openclip", gamma=0.3), "'openclip' has no setting 'gamma'"),
    "gamma zero": (lambda: objective(gamma=0.0), "MovingAverage.gamma", "(0, 1]", "0.0", "BatchMean"),
    "gamma above one": (lambda: objective(gamma=1.5), "MovingAverage.gamma", "1.5"),
    "gamma not a number": (lambda: objective(gamma="fast"), "MovingAverage.gamma", "'fast'"),
    "gamma epochs": (lambda: objective(gamma_epochs=0), "MovingAverage.gamma_epochs", "0"),
    "temperature zero": (lambda: objective(temperature=0.0), "Constant.temperature", "number in (0, 10]", "0.0"),
    "temperature negative": (lambda: fb.make_objective("openclip", temperature=-1.0), "LearnedScale.temperature", "-1"),
    "temperature nan": (lambda: objective(temperature=float("nan")), "Constant.temperature", "nan"),
    "bounds": (
        lambda: objective("isogclr", temperature_min=0.1, temperature_max=0.05),
        "PerSample.temperature_max", "exceed temperature_min (0.1)", "0.05",
    ),
    "epsilon": (lambda: objective(epsilon=-1e-3), "MovingAverage.epsilon", "-0.001"),
    "margin": (lambda: objective("tuneclip", margin=-0.1), "SquaredHinge.margin", "[0, 2]", "-0.1"),
    "weights no bool": (lambda: objective(correct_weights="no"), "correct_weights must be True or False", "'no'"),
    "weights of no memory": (lambda: fb.make_objective("simclr", correct_weights=True), "correct_weights", "left out"),
    "prototypes": (lambda: fb.make_objective("neuclip", width=8, prototypes=0), "Prototypes.prototypes", "at least 1"),
    "gradient": (
        lambda: fb.make_objective("neuclip", width=8, prototype_gradient="half"),
        "Prototypes.prototype_gradient", "'full', 'detached'", "'half'",
    ),
    "no num_samples": (lambda: fb.make_objective("sogclr"), "num_samples", "every sample"),
    "no num_samples for a schedule": (lambda: fb.make_objective("amorlip", width=8), "num_samples", "epochs"),
    "num_samples": (lambda: fb.make_objective("sogclr", num_samples=-5), "num_samples", "-5"),
    "no width": (lambda: fb.make_objective("neuclip"), "width", "None"),
    "chunk": (lambda: fb.make_objective("openclip", chunk=0), "chunk", "0"),
    "operands": (lambda: fb.make_objective("openclip", operands="bf16"), "float16, split, float32", "'bf16'"),
    "a part of another axis": (
        lambda: fb.make_objective("openclip", pairwise=fb.Constant(0.1)),
        "pairwise must be one of Identity(...), RawSimilarity(...), SquaredHinge(...)", "Constant(temperature=0.1)",
    ),
    "a part that is no part": (lambda: fb.make_objective("openclip", normalizer="batch"), "normalizer", "'batch'"),
    "negatives": (lambda: fb.make_objective("openclip", negatives="all"), "'across' or 'both'", "'all'"),
    "table storage": (lambda: objective(table_storage="nodes"), "'auto', 'rank', 'node' or a folder", "'nodes'"),
    "no table storage": (lambda: objective(table_storage=None), "table_storage", "None"),
    "seed": (lambda: objective(seed="a"), "seed", "'a'"),
    "dataset": (lambda: objective(dataset=7), "dataset", "7"),
    "guard": (lambda: objective(guard=0.0), "guard", "(0, 80]", "0.0"),
    "width": (lambda: fb.make_objective("neuclip", width="6"), "width", "'6'"),
    "width true": (lambda: fb.make_objective("neuclip", width=True), "width", "True"),
    "scale": (lambda: objective(directions="average"), "Scale.directions", "'sum', 'mean'", "'average'"),
    "times": (lambda: objective(times_temperature="no"), "Scale.times_temperature", "True, False", "'no'"),
    "reset": (lambda: fb.make_objective("neuclip", width=8, reset_accumulator="no"), "reset_accumulator", "'no'"),
    "rho late": (lambda: objective("amorlip", width=8, rho_late="x"), "RobustGlobal.rho_late", "'x'"),
    "rho late epoch": (lambda: objective("amorlip", width=8, rho_late_epoch=None), "rho_late_epoch", "None"),
    "a method that is a list": (lambda: fb.make_objective(["neuclip"]), "Unknown method", "neuclip"),
    "a start that is predicted": (
        lambda: objective("tempnet", width=8, temperature=0.05), "no setting 'temperature'", "temperature_m",
    ),
    "simultaneous and detached": (
        lambda: fb.make_objective("neuclip", width=8, schedule="simultaneous", prototype_gradient="detached"),
        "Prototypes.prototype_gradient", "simultaneous",
    ),
    "simultaneous and separate": (
        lambda: fb.make_objective("neuclip", width=8, schedule="simultaneous", fit="separate"), "Prototypes.fit",
    ),
    "parts that are none": (lambda: fb.Method("a", 2, None), "pairwise must be one of", "'a'"),
    "negatives of a method": (
        lambda: fb.Method(fb.Identity(), fb.BatchMean(), fb.Constant(), negatives="foo"), "'across' or 'both'", "'foo'",
    ),
    "epoch": (lambda: objective().set_epoch(-4), "set_epoch", "-4"),
    "table of no table": (lambda: fb.make_objective("openclip", table_storage="nod"), "table_storage", "'nod'"),
    "table dtype as text": (lambda: objective(table_dtype="float16"), "table_dtype", "'float16'"),
    "table dtype": (lambda: objective(table_dtype=torch.int8), "table_dtype", "torch.int8"),
    "siglip normalised": (
        lambda: fb.make_objective("siglip", normalizer=fb.MovingAverage(), num_samples=9),
        "Sigmoid (SigLIP)", "MovingAverage", "NoNormalizer()",
    ),
    "nothing to normalise": (lambda: fb.make_objective("openclip", normalizer=fb.NoNormalizer()), "needs a normalizer"),
    "siglip robust": (lambda: fb.make_objective("siglip", temperature=fb.RobustGlobal()), "RobustGlobal", "Constant()"),
    "amorlip hinge": (
        lambda: objective("amorlip", width=8, pairwise=fb.SquaredHinge()), "AmorLIP", "SquaredHinge",
    ),
    "amorlip per sample": (
        lambda: objective("amorlip", width=8, temperature=fb.PerSample()), "AmorLIP", "PerSample",
    ),
    "prototypes of both": (
        lambda: fb.make_objective("neuclip", width=8, negatives="both"), "negatives='both'", "Prototypes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case):
    call, *words = SETTINGS[case]
    check_refused(call, *words)


EXACT = {
    "shapes": (lambda: fb.exact_log_normalizers(rows(4), rows(5), 0.1), "same shape", "(4, 6)", "(5, 6)"),
    "temperature": (lambda: fb.exact_log_normalizers(rows(), rows(), -0.1), "temperature", "-0.1"),
    "temperatures": (
        lambda: fb.exact_log_normalizers(rows(), rows(), torch.ones(3)),
        "one value a sample (8,)",
        "(3,)",
    ),
    "anchors": (lambda: fb.exact_log_normalizers(rows(), rows(), 0.1, anchors=torch.tensor([9])), "[0, 7]", "9"),
    "a mask": (lambda: fb.exact_log_normalizers(rows(), rows(), 0.1, anchors=IDS > 3), "row numbers", "torch.bool"),
    "two axes": (lambda: fb.exact_log_normalizers(rows(), rows(), 0.1, anchors=IDS[None]), "one dimension", "(1, 8)"),
    "temperature text": (lambda: fb.exact_log_normalizers(rows(), rows(), "x"), "temperature", "'x'"),
    "epsilon": (lambda: fb.exact_log_normalizers(rows(), rows(), 0.1, -1), "epsilon", "-1"),
    "not unit": (lambda: fb.exact_log_normalizers(2 * rows(), rows(), 0.1), "length 2"),
    "vicreg": (
        lambda: fb.exact_log_normalizers(rows(), rows(), 0.1, pairwise=fb.VarianceCovariance()),
        "no normalizer",
    ),
    "chunk": (lambda: fb.exact_log_normalizers(rows(), rows(), 0.1, chunk=0), "chunk", "0"),
    "sigmoid": (lambda: fb.exact_log_normalizers(rows(), rows(), 0.1, pairwise=fb.Sigmoid()), "no normalizer"),
}


@pytest.mark.parametrize("case", EXACT)
def test_exact_normalizers(case):
    call, *words = EXACT[case]
    check_refused(call, *words)


def test_numbers_of_numpy_are_numbers():
    made = fb.make_objective("sogclr", num_samples=np.int64(50), temperature=np.float32(0.25), gamma=np.float64(0.5))
    assert torch.isfinite(made(rows(), rows(seed=1), IDS).loss)
    assert torch.isfinite(fb.make_objective("siglip", bias=-10)(rows(), rows(seed=1)).loss)


def test_rounded_rows_are_unit_rows():
    """16-bit rows are a little off length 1 by rounding; that is no mistake."""
    for dtype in (torch.bfloat16, torch.float16):
        wide = normalize(torch.randn(64, 512), dim=-1).to(dtype)
        assert torch.isfinite(fb.make_objective("openclip")(wide, wide).loss)


def test_a_failed_call_leaves_the_state_alone():
    one = objective()
    with pytest.raises(ValueError, match="sample_ids must lie"):
        one(rows(), rows(), IDS + 1000)
    assert one.step == 0
    assert torch.isnan(one.normalizers["image"].log_u.values).all()
