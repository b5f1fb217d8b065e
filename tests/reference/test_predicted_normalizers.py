"""NeuCLIP (Algorithm 1, Algorithm 3, MLP) and AmorLIP against the loops and torch's own optimizers."""

import copy
import math

import pytest
import torch
from torch import nn

import fullbatch as fb
from fullbatch.objective.fitted_net import LambdaNet, build_seeded
from tests.conftest import unit_rows
from tests.reference import papers

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
BATCH, WIDTH = 5, 4


def batches(steps, count=BATCH):
    for step in range(steps):
        yield unit_rows(count, WIDTH, 10 + step).requires_grad_(), unit_rows(count, WIDTH, 50 + step).requires_grad_()


def reference_alpha_loss(fit, anchor, other, prototypes, tau, epsilon, loss, c=None):
    """What one direction's prototypes minimise."""
    if fit == "separate":
        return papers.npn_separate_loss(anchor, other, prototypes, tau, epsilon, loss, c)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(anchor)):
        alpha = papers.npn_alpha(anchor[i], other[i], prototypes, tau, epsilon, loss)
        g = (1.0 if c is None else c[i]) * papers.inner_mean(anchor, other, i, tau, loss)
        total = total + tau * (torch.exp(-alpha) * (epsilon + g) + alpha) / len(anchor)
    return total


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize(
    ("fit", "gradient", "margin", "reset"),
    [
        ("unified", "full", None, False),
        ("unified", "detached", None, True),
        ("separate", "full", None, True),
        ("unified", "full", 0.2, False),
    ],
)
def test_algorithm_1(fit, gradient, margin, reset, chunk, selected):
    """Restart, AdaGrad updates and the gradient of eq. (12), over a restart in the middle."""
    loss = papers.identity if margin is None else papers.squared_hinge(margin)
    pairwise = fb.Identity() if margin is None else fb.SquaredHinge(margin)
    epsilon, rho, lr = 1e-3, 1.1, 0.1
    objective = fb.make_objective(
        "neuclip", width=WIDTH, prototypes=BATCH, updates=3, restart_every=2, prototype_lr=lr, temperature=0.2,
        rho=rho, epsilon=epsilon, fit=fit, prototype_gradient=gradient, pairwise=pairwise, reset_accumulator=reset,
        chunk=chunk,
    ).double()  # fmt: skip
    log_tau = objective.temperatures["both"].log_temperature
    w = {name: torch.zeros(BATCH, WIDTH, dtype=torch.float64, requires_grad=True) for name in ("image", "text")}
    adagrad = {name: torch.optim.Adagrad([w[name]], lr=lr) for name in w}
    for step, (image, text) in enumerate(batches(4)):
        tau = log_tau.detach().exp()
        log_c = torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(step)).double() * selected
        for place, (name, anchor, other) in enumerate(papers.directions(image.detach(), text.detach())):
            c = log_c[:, place].exp()
            if step % 2 == 0:
                w[name].data.copy_(other)
                if reset:
                    adagrad[name] = torch.optim.Adagrad([w[name]], lr=lr)
            for _ in range(3):
                adagrad[name].zero_grad()
                reference_alpha_loss(fit, anchor, other, w[name], tau, epsilon, loss, c).backward()
                adagrad[name].step()
        own = log_tau.detach().clone().requires_grad_()
        expected = papers.neuclip_loss(
            image, text, w["image"].detach(), w["text"].detach(), own.exp(), rho, epsilon, gradient == "detached", loss,
            log_c if selected else None,
        )  # fmt: skip
        out = objective(image, text, log_correction=log_c if selected else None)
        torch.testing.assert_close(out.loss, expected, **CLOSE)
        got = torch.autograd.grad(out.loss, (image, text, log_tau))
        for a, b in zip(got, torch.autograd.grad(expected, (image, text, own)), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        for name in w:
            normalizer = objective.normalizers[name]
            torch.testing.assert_close(normalizer.prototypes_MD, w[name].detach(), **CLOSE)
            accumulator = adagrad[name].state[w[name]]["sum"]
            torch.testing.assert_close(normalizer.accumulator_MD, accumulator, **CLOSE)
        with torch.no_grad():
            log_tau -= 0.01 * got[2]


def test_gradient_to_the_prototypes_in_the_simultaneous_variant():
    """Algorithm 3: prototypes are parameters; their gradient, and the rest, is eq. (12)'s."""
    objective = fb.make_objective(
        "neuclip", width=WIDTH, prototypes=BATCH, temperature=0.2, rho=1.1, epsilon=1e-3, schedule="simultaneous",
        restart_every=None,
    ).double()  # fmt: skip
    optimizer = torch.optim.AdamW(objective.parameters(), lr=0.05)
    for step, (image, text) in enumerate(batches(3)):
        out = objective(image, text)
        mine = [objective.normalizers[name].prototypes_MD for name in ("image", "text")]
        if step == 0:
            torch.testing.assert_close(mine[0].detach(), text.detach(), **CLOSE)
        w = [p.detach().clone().requires_grad_() for p in mine]
        log_tau = objective.temperatures["both"].log_temperature
        own = log_tau.detach().clone().requires_grad_()
        expected = papers.neuclip_loss(image, text, *w, own.exp(), 1.1, 1e-3)
        torch.testing.assert_close(out.loss, expected, **CLOSE)
        got = torch.autograd.grad(out.loss, (image, text, log_tau, *mine), retain_graph=True)
        for a, b in zip(got, torch.autograd.grad(expected, (image, text, own, *w)), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()


def test_restart_tops_up_small_batches_and_samples_large_ones():
    small = fb.make_objective("neuclip", width=WIDTH, prototypes=12, updates=0, restart_every=3).double()
    seen = []
    for image, text in batches(4):
        small(image, text)
        seen.append(text.detach())
    rows = {tuple(row.tolist()) for row in small.normalizers["image"].prototypes_MD}
    assert len(rows) == 12
    assert {tuple(r.tolist()) for r in seen[3]} <= rows, "the restart's own batch is there"
    assert rows <= {tuple(r.tolist()) for batch in seen[1:] for r in batch}, "topped up with the batches before"

    large = fb.make_objective("neuclip", width=WIDTH, prototypes=3, updates=0).double()
    image, text = next(batches(1))
    large(image, text)
    chosen = large.normalizers["image"].prototypes_MD
    rows = [int(row) for row in (chosen[:, None] == text.detach()[None]).all(-1).nonzero()[:, 1]]
    assert len(set(rows)) == 3
    torch.testing.assert_close(large.normalizers["text"].prototypes_MD, image.detach()[rows], rtol=0, atol=0)


def test_restarts_from_the_batch_alone_as_published():
    """Algorithm 1, line 4: a batch smaller than m leaves as many prototypes as it has pairs, until the next restart."""
    lr, epsilon, tau = 0.1, 1e-3, 0.2
    objective = fb.make_objective(
        "neuclip", width=WIDTH, prototypes=12, updates=2, restart_every=3, restart_from="batch", prototype_lr=lr,
        temperature=fb.Constant(tau), epsilon=epsilon, reset_accumulator=True,
    ).double()  # fmt: skip
    tau = torch.tensor(tau, dtype=torch.float64)
    w, adagrad = {}, {}
    for step, (image, text) in enumerate(batches(5)):
        for name, anchor, other in papers.directions(image.detach(), text.detach()):
            if step % 3 == 0:
                w[name] = other.clone().requires_grad_()
                adagrad[name] = torch.optim.Adagrad([w[name]], lr=lr)
            for _ in range(2):
                adagrad[name].zero_grad()
                reference_alpha_loss("unified", anchor, other, w[name], tau, epsilon, papers.identity).backward()
                adagrad[name].step()
        expected = papers.neuclip_loss(image, text, w["image"].detach(), w["text"].detach(), tau, 0.0, epsilon)
        out = objective(image, text)
        got = torch.autograd.grad(out.loss, (image, text))
        for a, b in zip(got, torch.autograd.grad(expected, (image, text)), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        for name in w:
            normalizer = objective.normalizers[name]
            assert normalizer.active == BATCH
            torch.testing.assert_close(normalizer.prototypes_MD[:BATCH], w[name].detach(), **CLOSE)


def test_no_updates_leave_the_prototypes_as_reset():
    objective = fb.make_objective("neuclip", width=WIDTH, prototypes=BATCH, updates=0, restart_every=0).double()
    first = None
    for image, text in batches(3):
        objective(image, text)
        first = text.detach() if first is None else first
        torch.testing.assert_close(objective.normalizers["image"].prototypes_MD, first, rtol=0, atol=0)


@pytest.mark.parametrize("fit", ["unified", "separate"])
def test_mlp_variant(fit):
    """alpha = MLP(stopgrad e) - s_ii / tau with AmorLIP's net, fitted with torch's AdaGrad, restarted afresh."""
    epsilon, rho, lr = 1e-3, 1.1, 0.05
    objective = fb.make_objective(
        "neuclip", width=WIDTH, temperature=0.2, rho=rho,
        normalizer=fb.Mlp(updates=3, restart_every=2, prototype_lr=lr, fit=fit, epsilon=epsilon),
    ).double()  # fmt: skip
    log_tau = objective.temperatures["both"].log_temperature
    nets, optimizers = {}, {}
    for step, (image, text) in enumerate(batches(4)):
        own = log_tau.detach().clone().requires_grad_()
        expected = 2 * own.exp() * (rho - 1.0)
        for tag, (name, anchor, other) in enumerate(papers.directions(image, text)):
            if step % 2 == 0:
                nets[name] = build_seeded(lambda: LambdaNet(WIDTH), 2 * step + tag).double()
                optimizers[name] = torch.optim.Adagrad(nets[name].parameters(), lr=lr)
            positive = (anchor * other).sum(1)
            tau = own.detach().exp()
            g = torch.stack([papers.inner_mean(anchor, other, i, tau) for i in range(BATCH)]).detach()
            for _ in range(3):
                alpha = nets[name](anchor.detach())[:, 0] - positive.detach() / tau
                if fit == "unified":
                    fit_loss = (tau * (torch.exp(-alpha) * (epsilon + g) + alpha)).mean()
                else:
                    fit_loss = 0.5 * (alpha - torch.log(epsilon + g)).square().mean()
                optimizers[name].zero_grad()
                fit_loss.backward()
                optimizers[name].step()
            live = torch.stack([papers.inner_mean(anchor, other, i, own.exp()) for i in range(BATCH)])
            alpha = nets[name](anchor.detach())[:, 0].detach() - positive / own.exp()
            expected = expected + own.exp() * (torch.exp(-alpha) * (epsilon + live) + alpha).mean()
        out = objective(image, text)
        torch.testing.assert_close(out.loss, expected, **CLOSE)
        got = torch.autograd.grad(out.loss, (image, text, log_tau))
        for a, b in zip(got, torch.autograd.grad(expected, (image, text, own)), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        for name, net in nets.items():
            mine = objective.normalizers[name].net
            for weight, theirs in zip(mine.weights.values(), net.parameters(), strict=True):
                torch.testing.assert_close(weight, theirs.detach(), **CLOSE)


@pytest.mark.parametrize("divide_by", ["target", "net"])
def test_amorlip(divide_by):
    """Targets, blending over epochs, Adam with clipping, the averaged net and the encoders' loss."""
    samples, weight, blend_epochs, blend = 2 * BATCH, 1e-3, 2, 0.6
    objective = fb.make_objective(
        "amorlip", width=WIDTH, num_samples=samples, temperature=0.2, rho=1.5, rho_late=-0.7, rho_late_epoch=1,
        positive_weight=weight, blend=blend, blend_epochs=blend_epochs, divide_by=divide_by, net_lr=1e-2,
    ).double()  # fmt: skip
    log_tau = objective.temperatures["both"].log_temperature
    names = ("image", "text")
    nets, averages, previous, optimizers = {}, {}, {}, {}
    for step, (image, text) in enumerate(batches(6)):
        epoch, tau = step // 2, log_tau.detach().exp()
        share = blend * 0.5 * (1 - math.cos(math.pi * min(epoch / blend_epochs, 1.0)))
        log_lambda, constant = {}, 0.0
        for tag, (name, anchor, other) in enumerate(papers.directions(image.detach(), text.detach())):
            if step % 2 == 0:
                previous[name] = averages.get(name)
                nets[name] = build_seeded(lambda: LambdaNet(WIDTH), 2 * epoch + tag).double()
                averages[name] = copy.deepcopy(nets[name])
                optimizers[name] = torch.optim.Adam(nets[name].parameters(), lr=1e-2)
            target = torch.stack([papers.amorlip_sum(anchor, other, i, tau, weight) for i in range(BATCH)])
            if share > 0:
                with torch.no_grad():
                    target = share * previous[name](anchor)[:, 0].exp() + (1 - share) * target
            for _ in range(3):
                optimizers[name].zero_grad()
                nn.functional.mse_loss(nets[name](anchor)[:, 0], target.log()).backward()
                nn.utils.clip_grad_norm_(nets[name].parameters(), 1.0)
                optimizers[name].step()
            if step % 2 == 1:
                for a, b in zip(averages[name].parameters(), nets[name].parameters(), strict=True):
                    a.data.mul_(0.92).add_(b.data, alpha=0.08)
            with torch.no_grad():
                logs = target.log() if divide_by == "target" else nets[name](anchor)[:, 0]
            log_lambda[name] = logs.tolist()
            constant += float(logs.mean()) - math.log(BATCH - 1) - 1.0
        own = log_tau.detach().clone().requires_grad_()
        rho = 1.5 if epoch < 1 else -0.7
        expected = papers.amorlip_loss(image, text, own.exp(), log_lambda, rho, weight)
        out = objective(image, text)
        # the value gains a constant that makes it an estimate of the global loss; the gradient is the paper's
        torch.testing.assert_close(out.loss, expected + float(tau) * constant, **CLOSE)
        got = torch.autograd.grad(out.loss, (image, text, log_tau))
        for a, b in zip(got, torch.autograd.grad(expected, (image, text, own)), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
        for name in names:
            for mine, theirs in (
                (objective.normalizers[name].net, nets[name]),
                (objective.normalizers[name].average, averages[name]),
            ):
                for a, b in zip(mine.weights.values(), theirs.parameters(), strict=True):
                    torch.testing.assert_close(a, b.detach(), **CLOSE)
