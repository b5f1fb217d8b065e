"""PairLoss in a SentenceTransformerTrainer: cut off and resumed it ends where the undisturbed one does, to the bit."""

import json
import random

import pytest
import torch
from PIL import Image

import fullbatch as fb
from fullbatch.integrations import sentence_transformers as ours
from fullbatch.integrations.sentence_transformers import PairLoss, PairLossMixin, split, with_ids
from fullbatch.integrations.state import carry_state
from tests.integrations.trainings import CutOff, die_at, differences, kill_training
from tests.tiers import first

datasets = pytest.importorskip("datasets", reason="datasets is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer  # noqa: E402
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402

SAMPLES, BATCH, EPOCHS = 40, 8, 3
STEPS = EPOCHS * SAMPLES // BATCH
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{k}" for k in range(30))]
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SETTINGS = {"neuclip": {"prototypes": 16, "rho": 2.0}, "isogclr": {"rho": 2.0}}


class PairTrainer(PairLossMixin, SentenceTransformerTrainer):
    pass


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    return make_text_folder(tmp_path_factory.mktemp("bert"))


def make_text_folder(folder):
    """A BERT of 16 numbers a word, with dropout."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    transformers.BertModel(
        transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **SMALL)
    ).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def text_model(folder):
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(16)], device="cpu")


def text_pairs():
    rng = random.Random(0)
    rows = [rng.sample(WORDS[5:], 6) for _ in range(SAMPLES)]
    return datasets.Dataset.from_dict(
        {"anchor": [" ".join(r[:4]) for r in rows], "positive": [" ".join(r[2:]) for r in rows]}
    )


def objective_for(method):
    return fb.make_objective(method, num_samples=SAMPLES, width=16, **SETTINGS.get(method, {}))


class _Before(transformers.TrainerCallback):
    def __init__(self, call):
        self.call = call

    def on_step_begin(self, *_, **__):
        self.call()


def trainer_for(folder, model, loss, dataset, trainer=PairTrainer, before_step=None, **arguments):
    settings = {
        "per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "save_steps": 4, "learning_rate": 0.01,
        "weight_decay": 0.1, "report_to": [], "use_cpu": True, "logging_steps": 1, "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    callbacks = [_Before(before_step)] if before_step else []
    args = Arguments(str(folder), **{**settings, **arguments})
    return trainer(model=model, args=args, train_dataset=dataset, loss=loss, callbacks=callbacks)


def train(folder, model_folder, method, mini_batch=None, stop_in=None, kill=False, resume=False):
    model = text_model(model_folder)
    loss = PairLoss(model, objective_for(method), mini_batch)
    before = None if stop_in is None else die_at(stop_in, kill)
    trainer = trainer_for(folder, model, loss, with_ids(text_pairs()), before_step=before)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def state_of(trainer):
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


@pytest.mark.parametrize("case", first([("isogclr", 3)], of=[("openclip", None), ("isogclr", 3), ("neuclip", 4)]))
def test_cut_off_and_resumed(tmp_path, text_folder, case):
    method, mini_batch = case
    whole = train(tmp_path / "whole", text_folder, method, mini_batch)
    step = random.Random(method).randint(5, STEPS - 1)
    with pytest.raises(CutOff):
        train(tmp_path / "cut", text_folder, method, mini_batch, stop_in=step)
    resumed = train(tmp_path / "cut", text_folder, method, mini_batch, resume=True)
    assert not differences(state_of(whole), state_of(resumed))


@pytest.mark.slow
def test_killed_and_resumed(tmp_path, text_folder):
    whole = train(tmp_path / "whole", text_folder, "fastclip_v3", 3)
    kill_training(train, tmp_path / "cut", text_folder, "fastclip_v3", 3, random.Random().randint(5, STEPS - 1), True)
    resumed = train(tmp_path / "cut", text_folder, "fastclip_v3", 3, resume=True)
    assert not differences(state_of(whole), state_of(resumed))


def gradients(model, mini_batch, method="sogclr"):
    loss = PairLoss(model.train(), objective_for(method), mini_batch)
    optimizer = carry_state(torch.optim.SGD(model.parameters(), lr=0.1), loss.objective)
    features = [model.preprocess([text_pairs()[k][name] for k in range(BATCH)]) for name in ("anchor", "positive")]
    optimizer.zero_grad()
    value = loss(features, torch.arange(BATCH))
    value.backward()
    named = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return value.detach(), named


@pytest.mark.parametrize("size", [1, 3, 8, 50])
def test_mini_batches_have_the_whole_batchs_gradient(text_folder, size):
    model = text_model(text_folder)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    (value, wanted), (own, found) = gradients(model, None), gradients(model, size)
    assert own.item() == pytest.approx(value.item(), rel=1e-5) and wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


def test_dropout_is_the_same_in_both_passes(text_folder, monkeypatch):
    """So the gradient is that of pieces whose activations were all kept."""
    found = []
    for kept in (False, True):
        if kept:
            monkeypatch.setattr(ours, "_embed_again_in_backward", ours._sentence_embedding)
        torch.manual_seed(1)
        found.append(gradients(text_model(text_folder), 4))
    assert not differences(*found)


# -- image and text ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: k for k, word in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    transformers.CLIPProcessor(images, tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    tokens = {"vocab_size": len(vocabulary), "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config={**SMALL, **tokens, "pad_token_id": 1},
        vision_config={**SMALL, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    return folder


def train_on_images(folder, clip_folder, stop_in=None, resume=False):
    model = SentenceTransformer(str(clip_folder), device="cpu")
    rng = random.Random(0)
    rows = {
        "image": [Image.new("RGB", (8, 8), tuple(rng.randbytes(3))) for _ in range(SAMPLES)],
        "caption": ["".join(rng.sample("abcdefghij", 4)) for _ in range(SAMPLES)],
    }
    loss = PairLoss(model, objective_for("sogclr"), mini_batch=3)
    before = None if stop_in is None else die_at(stop_in, kill=False)
    trainer = trainer_for(folder, model, loss, with_ids(datasets.Dataset.from_dict(rows)), before_step=before)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_images_and_captions(tmp_path, clip_folder):
    whole = train_on_images(tmp_path / "whole", clip_folder)
    with pytest.raises(CutOff):
        train_on_images(tmp_path / "cut", clip_folder, stop_in=random.Random(5).randint(5, STEPS - 1))
    resumed = train_on_images(tmp_path / "cut", clip_folder, resume=True)
    assert not differences(state_of(whole), state_of(resumed))


# -- wrong use ---------------------------------------------------------------------------------------------------------


def test_no_ids(tmp_path, text_folder):
    model = text_model(text_folder)
    trainer = trainer_for(tmp_path, model, PairLoss(model, objective_for("sogclr")), text_pairs())
    with pytest.raises(ValueError, match=r"the rows have no label; give the trainer with_ids\(dataset\)\."):
        trainer.train()


def test_labels_that_are_no_ids(tmp_path, text_folder):
    model = text_model(text_folder)
    scored = text_pairs().add_column("score", [0.5] * SAMPLES)
    trainer = trainer_for(tmp_path, model, PairLoss(model, objective_for("sogclr")), scored)
    with pytest.raises(ValueError, match=r"the rows have labels of type torch\.float32; give the trainer with_ids"):
        trainer.train()
    with pytest.raises(ValueError, match="has a column 'label' already"):
        with_ids(with_ids(text_pairs()))


def test_a_trainer_that_would_lose_the_state(tmp_path, text_folder):
    model = text_model(text_folder)
    loss = PairLoss(model, objective_for("sogclr"))
    trainer = trainer_for(tmp_path, model, loss, with_ids(text_pairs()), trainer=SentenceTransformerTrainer)
    with pytest.raises(ValueError, match=r"No optimizer learns .* class PairTrainer\(PairLossMixin"):
        trainer.train()


def test_three_columns(tmp_path, text_folder):
    model = text_model(text_folder)
    rows = text_pairs().add_column("negative", ["w1"] * SAMPLES)
    trainer = trainer_for(tmp_path, model, PairLoss(model, objective_for("openclip")), rows)
    with pytest.raises(ValueError, match="takes two columns, a pair a row, got 3"):
        trainer.train()


def test_mini_batches_that_cannot_be_cut():
    with pytest.raises(ValueError, match="mini_batch must be a number of rows of at least 1"):
        PairLoss(torch.nn.Linear(1, 1), objective_for("openclip"), mini_batch=0)
    with pytest.raises(ValueError, match="'pixel_values' is laid out otherwise"):
        split({"input_ids": torch.zeros(4, 3), "pixel_values": torch.zeros(9, 5)}, 2)
