"""Rolling prototypes, a queue, XBM and SCENT against loops and torch's own AdaGrad."""

import math

import pytest
import torch

import fullbatch as fb
from tests.conftest import unit_rows
from tests.reference import papers

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
BATCH, WIDTH, KEPT = 4, 5, 11


def batches(steps):
    for step in range(steps):
        yield unit_rows(BATCH, WIDTH, 20 + step).requires_grad_(), unit_rows(BATCH, WIDTH, 80 + step).requires_grad_()


def fit_term(fit, alpha, g, tau, epsilon):
    if fit == "separate":
        return 0.5 * (alpha - torch.log(epsilon + g)) ** 2
    return tau * (torch.exp(-alpha) * (epsilon + g) + alpha)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize(
    ("fit", "gradient", "margin", "own_positive", "updates"),
    [
        ("unified", "full", None, "left_out", 3),
        ("unified", "full", None, "kept", 3),
        ("unified", "detached", None, "left_out", 2),
        ("separate", "full", None, "left_out", 3),
        ("unified", "full", 0.2, "left_out", 3),
        ("unified", "full", None, "left_out", 0),
        ("unified", "full", None, "kept", 0),
    ],
)
def test_rolling_prototypes(fit, gradient, margin, own_positive, updates, chunk):
    """Newest first; a place that gets a new embedding keeps a share of its accumulator; eq. (12)'s gradient after it.

    Five batches of four into eleven places: they fill up, one batch fits in part, then the oldest fall off.
    """
    loss = papers.identity if margin is None else papers.squared_hinge(margin)
    pairwise = fb.Identity() if margin is None else fb.SquaredHinge(margin)
    epsilon, rho, rate, forget = 1e-3, 1.1, 0.1, 0.3
    objective = fb.make_objective(
        "rolling", width=WIDTH, prototypes=KEPT, updates=updates, prototype_lr=rate, temperature=0.2, rho=rho,
        epsilon=epsilon, fit=fit, prototype_gradient=gradient, pairwise=pairwise, reset_accumulator=forget,
        own_positive=own_positive, chunk=chunk,
    ).double()  # fmt: skip
    log_tau = objective.temperatures["both"].log_temperature
    kept = {name: [] for name in ("image", "text")}  # (prototype, accumulator), newest first
    for image, text in batches(5):
        tau = log_tau.detach().exp()
        for name, anchor, other in papers.directions(image.detach(), text.detach()):
            places = kept[name] + [(None, torch.zeros(WIDTH, dtype=torch.float64))] * (KEPT - len(kept[name]))
            fresh = [(row, (1 - forget) * old) for row, (_, old) in zip(other, places[KEPT - BATCH :], strict=True)]
            kept[name] = [*fresh, *kept[name]][:KEPT]
            w = torch.stack([row for row, _ in kept[name]]).requires_grad_()
            adagrad = torch.optim.Adagrad([w], lr=rate)
            adagrad.state[w]["sum"] = torch.stack([old for _, old in kept[name]])
            for _ in range(updates if len(w) == KEPT else 0):  # until all places are taken it is a queue
                total = torch.zeros((), dtype=torch.float64)
                for i in range(BATCH):
                    own = i if own_positive == "left_out" else None
                    alpha = papers.rolling_alpha(anchor[i], other[i], w, own, tau, epsilon, loss)
                    g = papers.inner_mean(anchor, other, i, tau, loss)
                    total = total + fit_term(fit, alpha, g, tau, epsilon) / BATCH
                adagrad.zero_grad()
                total.backward()
                adagrad.step()
            kept[name] = list(zip(w.detach(), adagrad.state[w]["sum"], strict=True))
        own_log_tau = log_tau.detach().clone().requires_grad_()
        live = own_log_tau.exp()
        expected = 2 * live * (rho - 1.0)
        for name, anchor, other in papers.directions(image, text):
            w = torch.stack([row for row, _ in kept[name]])
            for i in range(BATCH):
                own = i if own_positive == "left_out" else None
                alpha = papers.rolling_alpha(anchor[i], other[i], w, own, live, epsilon, loss)
                alpha = alpha.detach() if gradient == "detached" else alpha
                g = papers.inner_mean(anchor, other, i, live, loss)
                expected = expected + live * (torch.exp(-alpha) * (epsilon + g) + alpha) / BATCH
        out = objective(image, text)
        torch.testing.assert_close(out.loss, expected, **CLOSE)
        got = torch.autograd.grad(out.loss, (image, text, log_tau))
        for a, b in zip(got, torch.autograd.grad(expected, (image, text, own_log_tau)), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        for name, rows in kept.items():
            normalizer = objective.normalizers[name]
            assert normalizer.active == len(rows)
            torch.testing.assert_close(
                normalizer.prototypes_MD[: len(rows)], torch.stack([w for w, _ in rows]), **CLOSE
            )
            if updates:
                accumulators = torch.stack([old for _, old in rows])
                torch.testing.assert_close(normalizer.accumulator_MD[: len(rows)], accumulators, **CLOSE)
        with torch.no_grad():
            log_tau -= 0.01 * got[2]


def test_the_first_step_of_a_queue_is_the_batch_itself():
    """Its own positive left out, the mean over the queue is then the batch's, and alpha is exact."""
    queue = fb.make_objective("queue", width=WIDTH, prototypes=KEPT, temperature=0.2).double()
    image, text = next(batches(1))
    metrics = queue(image, text).metrics
    assert float(metrics["log_ratio_image"]) == pytest.approx(0.0, abs=1e-12)
    assert float(metrics["log_ratio_text"]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("own_positive", "learns"), [("left_out", False), ("kept", True)])
def test_a_batch_that_fills_all_places_is_exact_unless_it_counts_itself(own_positive, learns):
    rolling = fb.make_objective("rolling", width=WIDTH, prototypes=BATCH, own_positive=own_positive)
    for image, text in batches(2):
        rolling(image.float(), text.float())
    assert bool(rolling.normalizers["image"].accumulator_MD.any()) == learns


def test_a_batch_that_does_not_fit_is_refused():
    queue = fb.make_objective("queue", width=WIDTH, prototypes=3)
    image, text = next(batches(1))
    with pytest.raises(ValueError, match=r"A batch of 4 pairs does not fit into 3 rolling prototypes; set prototypes"):
        queue(image, text)
    with pytest.raises(ValueError, match="prototypes"):
        fb.RunConfig.of(method="rolling", settings={"prototypes": 64}, batch_size=128)


@pytest.mark.parametrize("chunk", [None, 3])
def test_xbm(chunk):
    """The batches before this one are negatives too, without gradient of their own; the oldest fall off."""
    objective = fb.make_objective("xbm", width=WIDTH, queue=6, starts_after=0, temperature=0.2, chunk=chunk).double()
    log_tau = objective.temperatures["both"].log_temperature
    queues = {"image": [], "text": []}
    for image, text in batches(4):
        own_log_tau = log_tau.detach().clone().requires_grad_()
        expected = papers.xbm(image, text, queues, own_log_tau.exp())
        out = objective(image, text)
        torch.testing.assert_close(out.loss, expected, **CLOSE)
        got = torch.autograd.grad(out.loss, (image, text, log_tau))
        for a, b in zip(got, torch.autograd.grad(expected, (image, text, own_log_tau)), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        for name, _, other in papers.directions(image.detach(), text.detach()):
            queues[name] = [*other, *queues[name]][:6]


def test_scent():
    """Its own weight for every sample, over two epochs of twelve samples; the gradient is eq. (4)'s at the new u."""
    log_step, epsilon, tau = 1.5, 1e-3, 0.2
    objective = fb.make_objective(
        "scent", num_samples=3 * BATCH, log_step=log_step, epsilon=epsilon, temperature=tau
    ).double()
    u = {}
    for step, (image, text) in enumerate(batches(6)):
        ids = (torch.arange(BATCH) + BATCH * step) % (3 * BATCH)
        surrogate = torch.zeros((), dtype=torch.float64)
        for name, anchor, other in papers.directions(image, text):
            for i in range(BATCH):
                g = papers.inner_mean(anchor, other, i, torch.tensor(tau, dtype=torch.float64))
                key = (name, int(ids[i]))
                u[key] = papers.scent_update(u.get(key), epsilon + float(g.detach()), log_step)
                surrogate = surrogate + tau * g / u[key] / BATCH
        out = objective(image, text, ids)
        got = torch.autograd.grad(out.loss, (image, text))
        for a, b in zip(got, torch.autograd.grad(surrogate, (image, text)), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        for name in ("image", "text"):
            log_u = objective.normalizers[name].log_u.get(ids, torch.float64)
            expected = torch.tensor([math.log(u[name, int(sample)]) for sample in ids], dtype=torch.float64)
            torch.testing.assert_close(log_u, expected, rtol=1e-6, atol=1e-6)  # the table is float32 unless asked


def test_scent_is_a_moving_average_whose_weight_is_the_samples_own():
    """u <- (1 - gamma) u + gamma g with gamma = sigmoid(a + nu)."""
    for old, new, log_step in ((0.3, 2.0, 0.7), (5.0, 0.1, -1.0)):
        gamma = 1 / (1 + math.exp(-log_step - math.log(old)))
        assert papers.scent_update(old, new, log_step) == pytest.approx((1 - gamma) * old + gamma * new)
