# make demo and make test need Python >= 3.10 and make, nothing else: they set up .venv by themselves.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready

.PHONY: setup test test-all demo lint bench clean

setup: $(READY)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fullbatch needs Python >= 3.10; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(READY): $(INSTALLED)  ## with the developers' tools
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

test: $(READY)          ## the tier everyone runs
	$(RUN) -m pytest -m "not slow" --numprocesses 2 --dist loadfile

test-all: test          ## and the slow ones
	$(RUN) -m pytest -m slow --numprocesses 2 --dist loadfile

demo: $(INSTALLED)      ## train a tiny CLIP on the built-in emoji with NeuCLIP, and show what it learned
	$(RUN) -m fullbatch train $(if $(wildcard runs/demo/config.yaml),--resume runs/demo,--name demo)
	$(RUN) -m fullbatch report runs/demo

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(READY)         ## time and memory beside open_clip's loss and its input pipeline
	$(RUN) benchmarks/objectives.py
	$(RUN) benchmarks/loader.py

clean:
	rm -rf $(VENV) build *.egg-info
