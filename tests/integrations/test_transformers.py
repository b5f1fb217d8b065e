"""A transformers.Trainer with our objective: cut off and resumed it ends where the undisturbed one does, to the bit."""

import random

import pytest
import torch
from torch import nn

import fullbatch as fb
from fullbatch.integrations.transformers import ContrastiveMixin, keep_ids, with_ids
from tests.integrations.trainings import CutOff, die_at, differences, kill_training
from tests.tiers import first

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate, which is not installed")

SAMPLES, BATCH, EPOCHS, WIDTH = 40, 8, 4, 16
STEPS = EPOCHS * SAMPLES // BATCH
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {
    **SMALL,
    "vocab_size": 50,
    "max_position_embeddings": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {**SMALL, "image_size": 8, "patch_size": 4}
SETTINGS = {"neuclip": {"prototypes": 16, "rho": 2.0}, "isogclr": {"rho": 2.0}}


class ContrastiveTrainer(ContrastiveMixin, transformers.Trainer):
    pass


def clip_model():
    torch.manual_seed(0)
    text = {**TEXT, "attention_dropout": 0.1}  # so that what is random must be resumed as well
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=WIDTH))


def siglip_model():
    torch.manual_seed(0)
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=TEXT, vision_config=VISION))


def pairs(count=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(count, 3, 8, 8, generator=generator)
    tokens = torch.randint(3, 50, (count, 8), generator=generator)
    tokens[:, -1] = 2
    return [{"pixel_values": pixels[k], "input_ids": tokens[k]} for k in range(count)]


def trainer_for(folder, model, method, dataset=None, trainer=ContrastiveTrainer, before_step=None, **arguments):
    settings = {
        "per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "save_steps": 3, "learning_rate": 0.01,
        "weight_decay": 0.1, "report_to": [], "use_cpu": True, "logging_steps": 1, "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    args = transformers.TrainingArguments(str(folder), **{**settings, **arguments})
    objective = fb.make_objective(method, num_samples=SAMPLES, width=WIDTH, **SETTINGS.get(method, {}))
    dataset = with_ids(pairs()) if dataset is None else dataset
    callbacks = [_Before(before_step)] if before_step else []
    return trainer(
        model=model, args=args, objective=objective, train_dataset=dataset, eval_dataset=pairs(16), callbacks=callbacks
    )


class _Before(transformers.TrainerCallback):
    def __init__(self, call):
        self.call = call

    def on_step_begin(self, *_, **__):
        self.call()


def train(folder, make_model, method, stop_in=None, kill=False, resume=False):
    before = None if stop_in is None else die_at(stop_in, kill)
    trainer = trainer_for(folder, make_model(), method, before_step=before)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def state_of(trainer):
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


@pytest.mark.parametrize("method", first(["isogclr"], of=["openclip", "sogclr", "isogclr", "neuclip"]))
def test_cut_off_and_resumed(tmp_path, method):
    whole = train(tmp_path / "whole", clip_model, method)
    with pytest.raises(CutOff):
        train(tmp_path / "cut", clip_model, method, stop_in=random.Random(method).randint(4, STEPS - 1))
    resumed = train(tmp_path / "cut", clip_model, method, resume=True)
    assert not differences(state_of(whole), state_of(resumed))
    assert whole.objective.step == STEPS


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    whole = train(tmp_path / "whole", siglip_model, "fastclip_v3")
    kill_training(train, tmp_path / "cut", siglip_model, "fastclip_v3", random.Random().randint(4, STEPS - 1), True)
    resumed = train(tmp_path / "cut", siglip_model, "fastclip_v3", resume=True)
    assert not differences(state_of(whole), state_of(resumed))


def test_without_the_objectives_state_a_resumed_training_would_differ(tmp_path):
    """So that the tests above could fail."""
    whole = train(tmp_path / "whole", clip_model, "sogclr")
    with pytest.raises(CutOff):
        train(tmp_path / "cut", clip_model, "sogclr", stop_in=10)
    path = max(tmp_path.glob("cut/checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1])) / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    state["fullbatch_objectives"] = [dict(fb.make_objective("sogclr", num_samples=SAMPLES).state_dict())]
    torch.save(state, path)
    resumed = train(tmp_path / "cut", clip_model, "sogclr", resume=True)
    assert differences(whole.model.state_dict(), resumed.model.state_dict())


def test_the_models_temperature_is_the_objectives(tmp_path):
    trainer = train(tmp_path, clip_model, "openclip")
    used_last = transformers.CLIPModel.from_pretrained(tmp_path / f"checkpoint-{STEPS}").logit_scale
    tau = trainer.objective.temperatures["both"].log_temperature
    assert tau.item() != pytest.approx(torch.tensor(0.07).log().item(), abs=1e-4), "it has learned"
    assert used_last.item() == pytest.approx(-tau.item(), abs=0.01), "but for the last step's move"


@pytest.mark.parametrize("method", ["openclip", "sogclr", "isogclr"])
def test_an_evaluation_changes_nothing(tmp_path, method):
    trainer = train(tmp_path, clip_model, method)
    before = {key: value.clone() for key, value in trainer.objective.state_dict().items()}
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.evaluate(pairs(9))["eval_loss"] > 0, "whose last batch is one pair"
    assert not differences(before, dict(trainer.objective.state_dict()))


def test_accumulated_batches_are_averaged(tmp_path):
    """Two batches a step: the gradient is the mean of theirs."""
    norms = []
    for name, accumulated in (("once", 1), ("twice", 2)):
        rows = [row for row in pairs(BATCH) for _ in range(1)] * accumulated  # the same batch, then again
        trainer = trainer_for(
            tmp_path / name, siglip_model(), "openclip", rows, gradient_accumulation_steps=accumulated, max_steps=1,
            train_sampling_strategy="sequential", max_grad_norm=1e9,
        )  # fmt: skip
        trainer.train()
        norms.append(next(line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_ids_of_a_hugging_face_set_stay_with_their_rows(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [{key: value.tolist() for key, value in row.items()} for row in pairs()]
    dataset = with_ids(datasets.Dataset.from_list(rows)).shuffle(seed=0)
    trainer = trainer_for(tmp_path, clip_model(), "sogclr", dataset, max_steps=2)
    trainer.train()
    table = trainer.objective.normalizers["image"].state_dict()
    assert sum(int((~torch.isnan(value)).sum()) for value in table.values()) >= 2 * BATCH
    with pytest.raises(ValueError, match="has a column 'sample_id' already"):
        with_ids(dataset)


def test_an_own_collator_keeps_ids():
    collate = keep_ids(lambda rows: {"pixel_values": torch.stack([row["pixel_values"] for row in rows])})
    batch = collate([with_ids(pairs())[k] for k in (7, 2)])
    assert batch["sample_id"].tolist() == [7, 2] and batch["pixel_values"].shape == (2, 3, 8, 8)
    with pytest.raises(
        ValueError, match=r"Row 0 of a batch has no 'sample_id'; give the trainer with_ids\(dataset\)\."
    ):
        collate(pairs(2))


# -- wrong use ---------------------------------------------------------------------------------------------------------


def test_no_ids(tmp_path):
    trainer = trainer_for(tmp_path, clip_model(), "sogclr", pairs())
    with pytest.raises(ValueError, match=r"the batch has no 'sample_id'; give the trainer with_ids\(train_dataset\)"):
        trainer.train()


def test_ids_of_a_stream():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from pairs()

    with pytest.raises(ValueError, match="can only be iterated over"):
        with_ids(Stream())


def test_a_checkpoint_without_an_optimizer(tmp_path):
    trainer_for(tmp_path, clip_model(), "sogclr", max_steps=4, save_only_model=True).train()
    trainer = trainer_for(tmp_path, clip_model(), "sogclr")
    with pytest.raises(ValueError, match=r"checkpoint-4 has no optimizer\.pt, so the objective's state is not in it"):
        trainer.train(resume_from_checkpoint=True)


class OwnOptimizer(ContrastiveTrainer):
    def create_optimizer(self, *_):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


def test_a_temperature_that_no_optimizer_learns(tmp_path):
    trainer = trainer_for(tmp_path, clip_model(), "openclip", trainer=OwnOptimizer)
    with pytest.raises(ValueError, match=r"No optimizer learns .* call super\(\)\.create_optimizer\(\)"):
        trainer.train()


def test_an_optimizer_of_the_users_own_is_welcome(tmp_path):
    model = clip_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_for(tmp_path, model, "openclip", max_steps=1)
    trainer.optimizer = optimizer
    trainer.train()
    assert [len(group["params"]) for group in optimizer.param_groups][-1] == 1


class Unnormalised(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.layer, self.output = nn.Linear(8, WIDTH), output

    def forward(self, pixel_values, input_ids):
        return self.output(self.layer(pixel_values.flatten(2).mean(1)[:, :8]), self.layer(input_ids.float()))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            lambda image, text: {"image_embeds": image, "text_embeds": text},
            "image_embeddings must have rows of length 1",
        ),
        (lambda image, text: {"logits": image @ text.T}, "The model's output must have image_embeds and text_embeds"),
        (lambda image, text: (image, text), "The model's output must have image_embeds and text_embeds"),
    ],
)
def test_outputs_that_are_no_unit_rows(tmp_path, output, message):
    trainer = trainer_for(tmp_path, Unnormalised(output), "openclip")
    with pytest.raises(ValueError, match=message):
        trainer.train()
