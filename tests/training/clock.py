"""A clock by which a training step takes a second, and what else is said; nothing takes longer on a busy machine."""

from types import SimpleNamespace

from fullbatch.training import display, trainer


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        for module in (display, trainer):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(trainer.Trainer, "train_step", self.passes(1.0, trainer.Trainer.train_step))

    def passes(self, seconds, function):
        """The function, which takes so long."""

        def timed(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return timed
