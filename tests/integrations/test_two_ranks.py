"""The same trainers on two ranks, with real collectives: resumed as undisturbed, and one temperature on both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.trainings import differences

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

TRANSFORMERS = """
from pathlib import Path
import sys
from tests.integrations.test_transformers import *

folder, stop_in, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume"
trainer = trainer_for(folder, clip_model(), "fastclip_v3", before_step=die_at(stop_in, kill=False), ddp_backend="gloo")
trainer.train(resume_from_checkpoint=resume)
torch.save(state_of(trainer), folder / f"rank{trainer.args.process_index}.pt")
"""

SENTENCE_TRANSFORMERS = """
from pathlib import Path
import os, sys
from tests.integrations.test_sentence_transformers import *

folder, stop_in, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume"
model = text_model(make_text_folder(folder.parent / f"bert{os.environ['RANK']}"))
loss = PairLoss(model, objective_for("fastclip_v3"), mini_batch=3)
before = die_at(stop_in, kill=False)
trainer = trainer_for(folder, model, loss, with_ids(text_pairs()), before_step=before, ddp_backend="gloo")
trainer.train(resume_from_checkpoint=resume)
torch.save(state_of(trainer), folder / f"rank{trainer.args.process_index}.pt")
"""

OPEN_CLIP = """
from pathlib import Path
import json, sys, torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from fullbatch.integrations import open_clip as ours
from tests.integrations.trainings import die_at

parallel = torch.nn.parallel.DistributedDataParallel
# open_clip names a device, which torch allows on GPUs only
torch.nn.parallel.DistributedDataParallel = lambda model, device_ids=None, **options: parallel(model, **options)
stop_in, arguments = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
register_optimizer_step_pre_hook(die_at(stop_in, kill=False))
sys.exit(ours.train(arguments))
"""


def on_two_ranks(folder, script, *arguments):
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = [str(folder / "script.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *given], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("script", [TRANSFORMERS, SENTENCE_TRANSFORMERS], ids=["transformers", "sentence-transformers"])
def test_trainers(tmp_path, script):
    pytest.importorskip("sentence_transformers" if script is SENTENCE_TRANSFORMERS else "transformers")
    whole = on_two_ranks(tmp_path, script, tmp_path / "whole", -1, "new")
    assert whole.returncode == 0, whole.stderr
    assert "CutOff" in on_two_ranks(tmp_path, script, tmp_path / "cut", 5, "new").stderr
    resumed = on_two_ranks(tmp_path, script, tmp_path / "cut", -1, "resume")
    assert resumed.returncode == 0, resumed.stderr
    states = [torch.load(tmp_path / f"{run}/rank{rank}.pt") for run in ("whole", "cut") for rank in (0, 1)]
    assert not differences(states[0]["model"], states[1]["model"]), "ranks stay equal"
    assert not differences(states[0]["optimizer"], states[1]["optimizer"])
    assert not differences(states[0], states[2])
    assert not differences(states[1], states[3])


def test_open_clip(tmp_path):
    tests = pytest.importorskip("tests.integrations.test_open_clip")
    data = tests.make_data(tmp_path)
    runs = [("whole", -1, []), ("cut", 5, []), ("cut", -1, ["--resume", "latest"])]
    for name, stop_in, more in runs:
        arguments = [*tests.flags(data, tmp_path / name, "fastclip_v3"), *more]
        (tmp_path / "arguments.json").write_text(json.dumps(arguments))  # torchrun would take --logs for its own
        run = on_two_ranks(tmp_path, OPEN_CLIP, stop_in, tmp_path / "arguments.json")
        assert "CutOff" in run.stderr if stop_in >= 0 else run.returncode == 0, run.stderr
    assert not differences(*(tests.final_state(tmp_path / name) for name in ("whole", "cut")))
