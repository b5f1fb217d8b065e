"""SogCLR, FastCLIP, TuneCLIP, iSogCLR and TempNet: gradients and tables over several steps against the loops."""

import math

import pytest
import torch

import fullbatch as fb
from tests.conftest import unit_rows
from tests.reference import papers

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
SAMPLES, BATCH, WIDTH = 10, 5, 4  # two batches are an epoch


def batches(steps=5):
    """Steps of five distinct samples each; embeddings drift, as an encoder's would."""
    for step in range(steps):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step // 2))
        ids = order[(step % 2) * BATCH : (step % 2 + 1) * BATCH]
        image = unit_rows(SAMPLES, WIDTH, 10 + step)[ids].requires_grad_()
        text = unit_rows(SAMPLES, WIDTH, 50 + step)[ids].requires_grad_()
        yield step, ids, image, text


def assert_gradients(out, image, text, expected):
    got_image, got_text = torch.autograd.grad(out.loss, (image, text), retain_graph=True)
    torch.testing.assert_close(got_image, expected.image, **CLOSE)
    torch.testing.assert_close(got_text, expected.text, **CLOSE)


def assert_table(table, entries):
    for key, value in entries.items():
        assert math.isclose(float(table.values[key]), value, rel_tol=1e-9, abs_tol=1e-12), (table.name, key)


def assert_u(objective, u):
    for name in ("image", "text"):
        logs = {key: math.log(value) for key, value in getattr(u, name).items()}
        assert_table(objective.normalizers[name].log_u, logs)


HINGE = papers.squared_hinge(0.15)


@pytest.mark.parametrize("selected", ["no", "normalizers", "weights"])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize(
    ("name", "settings", "kind"),
    [
        ("sogclr", {"gamma": 0.3}, {"gamma": 0.3}),
        ("fastclip_v0", {"gamma": 0.4, "gamma_epochs": 3}, {"times_tau": False}),
        ("fastclip_v1", {"gamma": 0.4, "gamma_epochs": 3}, {}),
        ("fastclip_v3", {"gamma": 0.4, "gamma_epochs": 3, "rho": 1.1}, {"rho": 1.1}),
        (
            "fastclip_v3",
            {"gamma": 0.4, "gamma_epochs": 3, "rho": 1.1, "rule": "released"},
            {"rho": 1.1, "released": True},
        ),
        ("tuneclip", {"gamma": 0.4, "gamma_epochs": 3, "margin": 0.15}, {"loss": HINGE}),
        ("sogclr", {"gamma": 0.3, "unit_mean": True}, {"gamma": 0.3, "unit_mean": True}),
        (
            "tuneclip",
            {"gamma": 0.4, "gamma_epochs": 3, "margin": 0.15, "unit_mean": True},
            {"loss": HINGE, "unit_mean": True},
        ),
    ],
)
def test_moving_average_methods(name, settings, kind, chunk, selected):
    weights = selected == "weights"
    objective = fb.make_objective(
        name, temperature=0.2, num_samples=SAMPLES, epsilon=1e-3, chunk=chunk, correct_weights=weights, **settings
    ).double()
    parameter = objective.temperatures["both"].log_temperature
    u = papers.MovingAverages()
    for step, ids, image, text in batches():
        tau = 0.2 if parameter is None else math.exp(parameter.item())
        options = {"gamma": papers.cosine_gamma(0.4, 3, step // 2), **kind}
        log_c = torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(step)).double()
        log_c = None if selected == "no" else log_c
        options |= {"log_c": log_c, "correct_weights": weights}
        expected, value = papers.moving_average_step(image, text, ids.tolist(), u, tau, epsilon=1e-3, **options)
        out = objective(image, text, ids, log_c)
        assert_gradients(out, image, text, expected)
        assert math.isclose(out.loss.item(), value, rel_tol=1e-9)
        assert_u(objective, u)
        if parameter is not None:
            (got,) = torch.autograd.grad(out.loss, parameter)
            torch.testing.assert_close(got, tau * expected.tau, **CLOSE)
            with torch.no_grad():
                parameter -= 0.01 * got


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("gamma", [0.9, 0.3])
def test_sogclr_on_two_views(gamma, chunk):
    objective = fb.make_objective(
        "sogclr_views", temperature=0.2, gamma=gamma, epsilon=0.0, num_samples=SAMPLES, chunk=chunk
    ).double()
    u = {}
    for _, ids, first, second in batches():
        expected, value = papers.sogclr_views_step(first, second, ids.tolist(), u, 0.2, gamma)
        out = objective(first, second, ids)
        assert_gradients(out, first, second, expected)
        assert math.isclose(out.loss.item(), value, rel_tol=1e-9)
        logs = {key: math.log(value) for key, value in u.items()}
        for name in ("image", "text"):
            assert_table(objective.normalizers[name].log_u, logs)


@pytest.mark.parametrize("scale", [fb.Scale(), fb.Scale(times_temperature=False, directions="mean")])
def test_raw_similarities_have_the_loss_of_the_gap(scale):
    """Where the normalizer is exact there is no difference, in value, gradient or the temperature's gradient."""
    _, _, image, text = next(batches())
    found = []
    for pairwise in (fb.Identity(), fb.RawSimilarity()):
        objective = fb.make_objective(
            "gcl_batch", pairwise=pairwise, temperature=fb.LearnedScale(0.2), epsilon=0.0, scale=scale
        ).double()
        out = objective(image, text)
        wanted = (image, text, objective.temperatures["both"].log_temperature)
        found.append((out.loss, out.metrics["global_loss"], *torch.autograd.grad(out.loss, wanted)))
    for gap, raw in zip(*found, strict=True):
        torch.testing.assert_close(raw, gap, **CLOSE)


PER_SAMPLE = {
    "isogclr": {"beta": 0.9, "lr": 0.03, "bounds": (0.005, 1.0), "clip": 5.0, "rho": (1.2, 1.2)},
    "isogclr_new": {"beta": 0.5, "lr": 1e-5, "bounds": (0.005, 0.22), "clip": 5.0, "rho": (0.9, 1.4)},
    "isogclr_new_v2": {"beta": 0.9, "lr": 0.001, "bounds": (0.005, 1.0), "clip": None, "rho": (1.2, 1.2)},
    "fastclip_v2": {"beta": None, "lr": 0.0133, "bounds": (0.01, 1.0), "clip": 5.0, "rho": (1.2, 1.2)},
}


@pytest.mark.parametrize("name", PER_SAMPLE)
@pytest.mark.parametrize("margin", [None, 0.15])
def test_per_sample_temperatures(name, margin):
    plan = PER_SAMPLE[name]
    raw = name == "isogclr_new_v2"
    if raw and margin is not None:
        margin = 0.0  # raw similarities have no hinge; run as it is
    settings = {} if raw or margin is None else {"pairwise": fb.SquaredHinge(margin)}
    if name == "isogclr_new":
        settings |= {"rho_image": 0.9, "rho_text": 1.4, "temperature_max": 0.22}
    else:
        settings |= {"rho": 1.2}
    objective = fb.make_objective(name, temperature=0.2, num_samples=SAMPLES, epsilon=1e-3, **settings).double()
    u, temperatures, r = papers.MovingAverages(), papers.Temperatures(0.2), math.nan
    for step, ids, image, text in batches():
        epoch = step // 2
        gamma = papers.cosine_gamma(0.2, 16, epoch) if name == "fastclip_v2" else 0.8

        def move(state, key, gradient, epoch=epoch):
            if plan["beta"] is None:
                return papers.adam_move(state, key, gradient, epoch)
            return papers.momentum_move(state, key, gradient, plan["beta"])

        expected, value = papers.per_sample_step(
            image, text, ids.tolist(), u, temperatures, gamma, 1e-3,
            {"image": plan["rho"][0], "text": plan["rho"][1]}, move, plan["lr"], plan["bounds"], plan["clip"],
            papers.identity if raw or margin is None else papers.squared_hinge(margin), raw,
        )  # fmt: skip
        if raw:
            rows = image.detach(), text.detach()
            positives, positive_value, r = papers.robust_positives_step(*rows, r, 1.0, 0.8, epoch)
            expected.image += positives.image
            expected.text += positives.text
            value += positive_value
        out = objective(image, text, ids)
        assert_gradients(out, image, text, expected)
        assert math.isclose(out.loss.item(), value, rel_tol=1e-9)
        assert_u(objective, u)
        for direction in ("image", "text"):
            own = objective.temperatures[direction]
            for table, entries in ((own.tau, temperatures.tau), (own.first, temperatures.first)):
                assert_table(table, {key: v for (side, key), v in entries.items() if side == direction})
            if plan["beta"] is None:
                entries = temperatures.second
                assert_table(own.second, {key: v for (side, key), v in entries.items() if side == direction})
    if raw:
        assert math.isclose(math.exp(float(objective.positives.log_r)), r, rel_tol=1e-9)


@pytest.mark.parametrize(("name", "rate"), [("isogclr_new", 1e-5), ("isogclr_new_v2", 1e-3)])
def test_temperatures_move_at_their_authors_rate(name, rate):
    """At iSogCLR's 0.03 one visit would send every temperature to its bound."""
    _, ids, image, text = next(batches())
    objective = fb.make_objective(name, num_samples=SAMPLES, rho=1.0).double()
    assert objective.method.temperature.temperature_lr == rate
    objective(image, text, ids)
    tau = objective.temperatures["image"].tau.values[ids]
    low, high = objective.method.temperature.temperature_min, objective.method.temperature.temperature_max
    assert bool(((tau > low) & (tau < high) & (tau != 0.01)).all())
    set_by_hand = fb.make_objective(name, num_samples=SAMPLES, temperature_lr=0.03)
    assert set_by_hand.method.temperature.temperature_lr == 0.03


def test_tempnet():
    """Encoder gradient with the predicted tau, and the net's from mean(stopgrad(dtau_i) tau_i)."""
    objective = fb.make_objective(
        "tempnet", width=WIDTH, num_samples=SAMPLES, epsilon=1e-3, gamma=0.6, rho=1.2, centers=7, dropout=0.0,
        temperature_min=0.1, temperature_max=0.4,
    ).double()  # fmt: skip
    u = papers.MovingAverages()
    for step, ids, image, text in batches(3):
        out = objective(image, text, ids)
        for name, anchor, other in papers.directions(image.detach(), text.detach()):
            net = objective.temperatures[name]
            if step == 0:
                torch.testing.assert_close(net.centers_CD.detach(), other[torch.arange(7) % BATCH], **CLOSE)
            own = {key: value.detach().clone().requires_grad_() for key, value in net.named_parameters()}
            taus = [
                papers.tempnet(
                    anchor[i], own["projection.weight"], own["projection.bias"], own["centers_CD"],
                    own["log_sharpness"], own["head.weight"][0], own["head.bias"][0], (0.1, 0.4),
                )
                for i in range(BATCH)
            ]  # fmt: skip
            fixed = papers.Temperatures(0.0, {(name, int(k)): t.item() for k, t in zip(ids, taus, strict=True)})
            total = 0.0
            for i, key in enumerate(ids.tolist()):
                tau = torch.tensor(fixed.of(name, key), dtype=torch.float64)
                g = float(papers.inner_mean(anchor, other, i, tau))
                new_u = u.update(name, key, 1e-3 + g, 0.6)
                gradient = math.log(new_u) + 1.2 - float(papers.weighted_mean(anchor, other, i, tau)) / new_u
                total = total + gradient * taus[i] / BATCH
            expected = torch.autograd.grad(total, list(own.values()))
            got = torch.autograd.grad(out.loss, list(net.parameters()), retain_graph=True)
            for key, a, b in zip(own, got, expected, strict=True):
                torch.testing.assert_close(a, b, msg=f"{name}.{key}", **CLOSE)
        assert_u(objective, u)
        with torch.no_grad():
            for parameter in objective.parameters():
                (gradient,) = torch.autograd.grad(out.loss, parameter, retain_graph=True)
                parameter -= 0.01 * gradient
