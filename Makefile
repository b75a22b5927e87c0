# Each target works as the first command after the clone. Extra words pass through: make compare ARGS="--world-size 2"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
BESIDE := -n 3 --dist loadfile --no-loadscope-reorder
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: setup compare test lab site notebooks lint clean

setup: $(VENV)/installed

$(VENV)/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; choose one with: make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

compare: setup
	$(BIN)/ddp-course compare $(ARGS)

# All tests: three files at a time, the longest first, and then those by themselves that look at the clock.
test: setup
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest -m "not alone" $(BESIDE) --durations=20 tests/test_faults.py tests/test_notebooks.py tests; \
	passed=$$?; $(BIN)/python -m pytest -m alone --durations=20 && exit $$passed
else
	$(BIN)/python -m pytest $(ARGS)
endif

lab: setup
	$(BIN)/jupyter lab $(AS_ROOT) --ServerApp.root_dir=. $(ARGS) notebooks/00_start_here.ipynb

notebooks: setup
	$(BIN)/python authoring/build.py --execute $(ARGS)

site: setup
	$(BIN)/python authoring/site.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python authoring/build.py --check

clean:
	rm -rf $(VENV) build site .pytest_cache .ruff_cache
