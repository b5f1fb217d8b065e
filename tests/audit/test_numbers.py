"""An audit's numbers are those of the definition, for every normalizer and temperature, in float64."""

import math

import pytest
import torch

import fullbatch as fb
from fullbatch.audit.errors import normalizer_audit, without
from tests.audit import by_hand
from tests.combinations import COMBINATIONS, SAMPLES, WIDTH, make, parts, tiered
from tests.conftest import unit_rows

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
BATCH, ANCHORS, EPSILON = 8, 20, 1e-14
NAMES = [name for name in COMBINATIONS if not name.startswith("sigmoid")]
ids = torch.arange(SAMPLES)


def tables(dtype=torch.float64):
    """Pairs that are alike, as a trained model's are."""
    shared = unit_rows(SAMPLES, WIDTH, 1)
    rows = [shared + 0.5 * unit_rows(SAMPLES, WIDTH, seed) for seed in (2, 3)]
    return [torch.nn.functional.normalize(table, dim=-1).to(dtype) for table in rows]


def trained(name, steps=5, dtype=torch.float64, **changes):
    """Five batches of eight: some samples are never seen, others twice."""
    objective = make(name, **changes).to(dtype)
    image, text = tables(dtype)
    for step in range(steps):
        rows = torch.randperm(SAMPLES - 3, generator=torch.Generator().manual_seed(step))[:BATCH]
        objective.set_epoch(step // 2)
        with torch.no_grad():
            objective(image[rows], text[rows], rows)
    return objective


def audit(objective, anchors=ANCHORS, seed=0, batch=BATCH, dtype=torch.float64, **options):
    generator = torch.Generator().manual_seed(seed)
    return normalizer_audit(objective, *tables(dtype), ids, anchors, batch, generator, **options)


def log_of(mean):
    return math.log(EPSILON + mean)


def expected(objective, pairwise, seed=0):
    """By direction: lists of (exact, known, in use, batch), in logs, over the anchors."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randperm(SAMPLES, generator=generator)[:ANCHORS].tolist()
    batches = by_hand.batches_for(SAMPLES, ANCHORS, BATCH, generator)
    state = {
        name: value.double() if torch.is_tensor(value) else value for name, value in objective.state_dict().items()
    }
    image, text = tables()
    found = {}
    for direction, own, other in (("image", image, text), ("text", text, image)):
        rows = []
        for i, drawn in zip(anchors, batches, strict=True):
            tau = by_hand.tau_of(state, direction, objective.method.temperature, own[i], i)
            exact = by_hand.mean_over(pairwise, own, other, i, range(SAMPLES), tau)
            seen = by_hand.mean_over(pairwise, own, other, i, by_hand.with_anchor(drawn, i), tau)
            known, in_use = believed(objective, state, direction, pairwise, own[i], other[i], i, tau, seen)
            rows.append((log_of(exact), known, in_use, log_of(seen)))
        found[direction] = rows
    return found


def believed(objective, state, direction, pairwise, own, other, i, tau, seen):
    """Logs of epsilon + g: as the method knows it, nan if it does not, and as a step would divide by it."""
    normalizer, positive = objective.method.normalizer, float(own @ other)
    name = f"normalizers.{direction}"
    match normalizer:
        case fb.BatchMean():
            return log_of(seen), log_of(seen)
        case fb.BatchAndQueue():
            queue = state[f"{name}.queue_MD"][: objective.normalizers[direction].active].double()
            terms = [math.exp(by_hand.term(pairwise, float(own @ row), positive) / tau) for row in queue]
            both = ((BATCH - 1) * seen + sum(terms)) / (BATCH - 1 + len(terms))
            return log_of(sum(terms) / len(terms)), log_of(both)
        case fb.Scent():
            log_u = float(state[f"{name}.log_u.values"][i])
            if math.isnan(log_u):
                return math.nan, log_of(seen)
            gamma = 1 / (1 + math.exp(-normalizer.log_step - log_u))
            return log_u, math.log((1 - gamma) * math.exp(log_u) + gamma * (normalizer.epsilon + seen))
        case fb.MovingAverage():
            log_u = float(state[f"{name}.log_u.values"][i])
            share = min(objective.epoch / normalizer.gamma_epochs, 1.0)
            gamma = 0.5 * (1 + math.cos(math.pi * share)) * (1 - normalizer.gamma) + normalizer.gamma
            if math.isnan(log_u):
                return math.nan, log_of(seen)
            u = math.exp(log_u)
            new = (1 - gamma) * u + gamma * (normalizer.epsilon + seen)
            return math.log(u), math.log(new)
        case fb.Prototypes() | fb.Rolling():
            active = objective.normalizers[direction].active
            known = by_hand.prototype_mean(state, direction, pairwise, own, positive, tau, active)
            return log_of(known), log_of(known)
        case fb.Mlp():
            alpha = by_hand.mlp_alpha(state, direction, pairwise, own, positive, tau)
            return alpha, alpha
        case fb.Amortized():
            reference = 0.0 if pairwise in ("robust_positives", "raw") else positive
            constant = by_hand.WEIGHT * math.exp((positive - reference) / tau)
            total = math.exp(by_hand.lambda_net(state, f"{name}.net.net", own) - reference / tau)
            known = by_hand.less(total, constant) / (BATCH - 1)
            if normalizer.divide_by == "net":
                return log_of(known), log_of(known)
            share = normalizer.blend * 0.5 * (1 - math.cos(math.pi * min(objective.epoch / normalizer.blend_epochs, 1)))
            previous = math.exp(by_hand.lambda_net(state, f"{name}.previous.net", own) - reference / tau)
            target = share * previous + (1 - share) * ((BATCH - 1) * seen + constant)
            return log_of(known), log_of(by_hand.less(target, constant) / (BATCH - 1))
    raise AssertionError(normalizer)


def error_and_bias(rows, column):
    gaps = [row[column] - row[0] for row in rows if not math.isnan(row[column])]
    return sum(gap**2 for gap in gaps) / len(gaps), sum(gaps) / len(gaps)


@pytest.mark.parametrize("name", tiered(NAMES))
def test_equals_the_definition(name):
    objective = trained(name)
    found, by_direction = audit(objective), expected(objective, name.split("-")[0])
    for direction, rows in by_direction.items():
        errors = found["by_direction"][direction]
        for kind, column in (("normalizer", 1), ("in_use", 2), ("batch", 3)):
            error, bias = error_and_bias(rows, column)
            assert errors[f"{kind}_error"] == pytest.approx(error, rel=1e-9, abs=1e-12), kind
            assert errors[f"{kind}_bias"] == pytest.approx(bias, rel=1e-9, abs=1e-12), kind
    unseen = sum(math.isnan(row[1]) for row in by_direction["image"])
    assert found["unseen"] == unseen
    assert found["batch_error"] == pytest.approx(
        (found["by_direction"]["image"]["batch_error"] + found["by_direction"]["text"]["batch_error"]) / 2
    )


def test_negatives_of_both_modalities():
    objective = make("simclr").double()
    found = audit(objective, batch=SAMPLES)
    assert found["batch_error"] == pytest.approx(0.0, abs=1e-20)
    image, text = tables()
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randperm(SAMPLES, generator=generator)[:ANCHORS].tolist()
    batches = by_hand.batches_for(SAMPLES, ANCHORS, BATCH, generator)
    gaps = []
    for i, drawn in zip(anchors, batches, strict=True):
        rows = range(SAMPLES), by_hand.with_anchor(drawn, i)
        exact, seen = (by_hand.mean_over("identity", image, text, i, each, 0.1, both=True) for each in rows)
        gaps.append(math.log(seen) - math.log(exact))
    assert audit(objective)["by_direction"]["image"]["batch_error"] == pytest.approx(
        sum(gap**2 for gap in gaps) / ANCHORS
    )


@pytest.mark.parametrize("name", ["identity-average-constant", "identity-prototypes-constant", "hinge-batch-constant"])
def test_a_method_s_own_epsilon_neither_masks_nor_adds_error(name):
    small = parts(name)["normalizer"]
    large = type(small)(**{**vars(small), "epsilon": 0.05})
    objectives = [trained(name, normalizer=each) for each in (small, large)]
    if name.startswith("identity-prototypes"):  # their fit looks at epsilon; what is asked here is the reading
        objectives[1].load_state_dict(objectives[0].state_dict())
    one, other = (audit(objective)["normalizer_error"] for objective in objectives)
    assert other == pytest.approx(one, rel=1e-6)


def test_openclip_is_judged_without_its_epsilon():
    one, other = (audit(make(name, temperature=fb.Constant(0.07)).double()) for name in ("openclip", "gcl_batch"))
    assert one == other
    assert one["normalizer_error"] == one["batch_error"] > 0.0


@pytest.mark.parametrize("name", ["siglip", "vicreg"])
def test_no_normalizer_has_no_error(name):
    found = audit(make(name).double())
    assert found["normalizer_error"] is None and found["in_use_error"] is None
    assert found["batch_error"] > 0.0
    assert found["normalizer_error"] is None


def test_a_moving_average_that_has_seen_no_anchor_knows_nothing():
    found = audit(make("sogclr").double())
    assert found["unseen"] == ANCHORS and found["normalizer_error"] is None
    assert found["in_use_error"] == pytest.approx(found["batch_error"])  # a first visit takes the batch's word


def test_a_nan_is_shown():
    """Only a table may have nothing to say yet."""
    objective = trained("neuclip")
    for normalizer in objective.normalizers.values():
        normalizer.prototypes_MD.data.fill_(math.nan)
    found = audit(objective)
    assert math.isnan(found["normalizer_error"]) and math.isnan(found["in_use_error"]) and found["unseen"] == 0


def test_converged_prototypes_of_every_sample_have_no_error():
    """With all other samples as prototypes, and only them, alpha is exact."""
    objective = make("identity-prototypes-constant", normalizer=fb.Prototypes(prototypes=SAMPLES, updates=0)).double()
    image, text = tables()
    with torch.no_grad():
        objective(image, text)
    found = audit(objective)
    assert found["normalizer_bias"] > 0.0  # the anchor's own partner is among them
    assert found["normalizer_error"] < found["batch_error"]


@pytest.mark.parametrize("name", ["sogclr", "isogclr", "tempnet", "neuclip", "rolling", "xbm", "amorlip", "openclip"])
def test_nothing_changes(name):
    objective = trained(name)
    before = {key: value.clone() for key, value in objective.state_dict().items()}
    random, mode = torch.random.get_rng_state(), objective.training
    audit(objective)
    assert objective.training == mode and torch.equal(torch.random.get_rng_state(), random)
    for key, value in objective.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[key].nan_to_num()), key


@pytest.mark.parametrize("name", ["identity-average-per_sample", "identity-amortized-robust", "hinge-mlp-constant"])
def test_float32_in_small_pieces_agrees(name, monkeypatch):
    objective = trained(name)
    whole = audit(objective)
    monkeypatch.setattr("fullbatch.audit.errors.PIECE", 3)
    pieces = audit(objective.float(), dtype=torch.float32, chunk=5)
    for key, value in whole.items():
        if isinstance(value, float):
            assert pieces[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key


def on_rank(rank, name, anchors, state):
    objective = make(name).double()
    objective.load_state_dict(state)
    return audit(objective, anchors=anchors)


@pytest.mark.parametrize("anchors", [1, 5, 20])
@pytest.mark.parametrize(
    "name", ["openclip", "siglip", "identity-average-per_sample", "identity-prototypes-predicted", "amorlip"]
)
def test_two_ranks_agree_with_one(two_ranks, name, anchors):
    objective = trained(name)
    alone = audit(objective, anchors=anchors)
    for found in two_ranks.run(on_rank, name, anchors, objective.state_dict()):
        for key, value in alone.items():
            if isinstance(value, float):
                assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-12), key
            elif key != "by_direction":
                assert found[key] == value, key


def test_without_a_constant():
    log_total = torch.tensor([math.log(3.0), math.log(1.0005), math.log(0.5)], dtype=torch.float64)
    found = without(log_total, torch.zeros(3, dtype=torch.float64)).exp()
    assert found.tolist() == pytest.approx([2.0, 1.0005 * 1e-3, 0.5e-3])


def test_more_anchors_than_samples_are_all_of_them():
    assert audit(make("openclip").double(), anchors=1000)["anchors"] == SAMPLES


def test_a_batch_larger_than_the_data_is_the_data():
    found = audit(make("openclip").double(), batch=1000)
    assert found["batch_error"] == pytest.approx(0.0, abs=1e-20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 1}, "batch_size must be that of training"),
        ({"anchors": torch.tensor([SAMPLES])}, "anchors must lie in"),
        ({"anchors": torch.tensor([], dtype=torch.int64)}, "at least one anchor"),
        ({"anchors": 0}, "at least one anchor"),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(ValueError, match=message):
        audit(make("openclip").double(), **changes)


def test_embeddings_that_are_not_numbers():
    image, text = tables()
    image[3] = math.nan
    with pytest.raises(ValueError, match="non-finite value in row 3"):
        normalizer_audit(make("openclip").double(), image, text, ids, 5, 8, torch.Generator())
