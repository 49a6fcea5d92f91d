# `make demo` and `make test` do their own set-up: a virtual environment in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint format tutorials docs bench record readme clean help

help:
	@echo "make demo       learn a real velocity field; figure, map and table in demo/"
	@echo "make test       the whole test suite"
	@echo "make lint       ruff"
	@echo "make tutorials  every tutorial (SMOKE=1: at smoke size)"
	@echo "make docs       the site, in docs/build"
	@echo "make bench      every benchmark (an hour; SMOKE=1: minutes; DATA=folder: public data too)"
	@echo "make record     the main job on fixed work, against the best ever reached (20 minutes; DATA=folder:"
	@echo "                public data too)"
	@echo "make readme     the numbers of the last benchmarks into README.md and docs/, and their ages"
	@echo "                (MEASURE=seconds: first measures old ones again that took at most so long)"

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gp_orff needs Python >= 3.11, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python tutorials/01_wing_tip_vortex.py --output demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tutorials: $(VENV)/.installed
	ls tutorials/[0-9]*.py | xargs -P $(if $(SMOKE),2,1) -I{} sh -c \
		'echo {}; $(BIN)/python {} --output tutorials/output $(if $(SMOKE),--smoke)'

docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -j auto -q -W --keep-going -b html docs docs/build
	@echo "open docs/build/index.html"

bench: $(VENV)/.installed
	$(BIN)/python benchmarks --all $(DATA) $(if $(SMOKE),--smoke)

record: $(VENV)/.installed
	$(BIN)/python benchmarks record $(DATA) $(if $(SMOKE),--smoke)

readme: $(VENV)/.installed
	$(BIN)/python benchmarks readme $(if $(MEASURE),--measure $(MEASURE)) $(if $(DATA),--data $(DATA))

clean:
	rm -rf $(VENV) demo tutorials/output docs/build docs/tutorials
