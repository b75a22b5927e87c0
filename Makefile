# Each target works as the first command after the clone. Extra words pass through: make compare ARGS="--world-size 2"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
# On a terminal pip shows its progress; elsewhere it says only what went wrong. It is the standard error that is looked at,
# since in the shell's $() the standard output is never a terminal. What setuptools warns of concerns those who package.
PIP = PYTHONWARNINGS=ignore $(BIN)/python -m pip install --disable-pip-version-check $$([ -t 2 ] || echo --quiet)
ARGS ?=
BESIDE := -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: help setup tools compare test test-lessons test-rest test-all test-quick test-library lab versions gpu gpu-rehearsal bench notebooks publish site lint clean

help:  # this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

setup: $(VENV)/installed  # install into .venv what learners need
tools: $(VENV)/tools  # and the tools of those who change the course

# On a terminal a growing line of dots, until the shell of this line has ended, be it by Ctrl-C.
dots = { [ ! -t 2 ] || while sleep 2 && kill -0 $$$$ 2>/dev/null; do printf . >&2; done; } &

# From the locks; with Python 3.10, for which not all of that is made any more, from the ranges of pyproject.toml, and so with
# another torch, as in make test TORCH=torch==2.10.0 (TORCH=torch is the newest of everything).
TORCH ?=
define install
	@echo "Installing $$(grep -c == $(1)) packages into $(VENV): $(2), some minutes (once)."
	@if [ -z "$(TORCH)" ] && $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	then $(PIP) -r $(1) && $(PIP) --no-deps --editable .; \
	else $(PIP) $(if $(TORCH),"$(TORCH)") --editable ".[$(3)]"; fi
	@touch $@
endef

$(VENV)/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; choose one with: make PYTHON=python3.12 …")'
	@test -x $(BIN)/python || echo "Making $(VENV), an environment for the course alone, some seconds."
	@# Only pip 25.1 and newer show how far an installation is.
	@test -x $(BIN)/python || { $(dots) $(PYTHON) -m venv --upgrade-deps $(VENV) && echo; }
	$(call install,requirements.lock,1.5 GB of disk or 6 GB if torch brings CUDA,clinic)

$(VENV)/tools: requirements-dev.lock $(VENV)/installed
	$(call install,requirements-dev.lock,0.3 GB of disk,dev)

compare: setup  ## train with every strategy, print the table, write results/compare.png
	@$(BIN)/ddp-course compare $(ARGS)

lab: setup  ## copy lessons and exercises to work/, where yours stay yours, and open them in JupyterLab
	@$(BIN)/ddp-course lab work $(ARGS)

# What a contributor needs while working: the stages against one process, the launcher, and the promises about the code.
QUICK := tests/test_ladder.py tests/test_house.py tests/test_docs.py tests/test_problems.py tests/test_stage1_single.py \
	tests/test_stage2_dataparallel.py tests/test_stage3_paramserver.py tests/test_stage4_ring.py \
	tests/test_stage5_bucketed.py tests/test_wire.py tests/manyranks/test_units.py tests/manyranks/test_library.py \
	tests/manyranks/devices
test-quick: tools  ## in a minute and a half what a contributor needs
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(QUICK)

# Three files at a time: the launches of one file share a server.
run_tests = $(BIN)/python -m pytest --durations=20 -m "$(1) and not weekly" $(BESIDE) tests

test: tools  ## whether a change holds, in five minutes; or make test ARGS=FILE
ifeq ($(strip $(ARGS)),)
	$(call run_tests,not slow)
else
	$(BIN)/python -m pytest $(ARGS)
endif

# The library as somebody has it who has nothing of the course. The environment is no checkout, so tests and ranks that begin
# in it import what was installed; tests/support/alone hides the course.
ALONE := .venv-library
test-library: $(ALONE)/tools  # the library's own tests, in an environment of its own
	rm -rf .build
	$(ALONE)/bin/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall ./manyranks
	cd $(ALONE) && export PYTHONPATH=$(CURDIR)/tests/support/alone && \
	bin/python -c "import manyranks; print('tested:', *manyranks.__path__)" && \
	bin/python -m pytest -c ../pyproject.toml -o "pythonpath=tests tests/support" -p no:cacheprovider -q \
		-m "not slow and not weekly" $(BESIDE) $(ARGS) ../tests/manyranks

$(ALONE)/tools: requirements.lock requirements-dev.lock manyranks/pyproject.toml
	$(PYTHON) -m venv $(ALONE)
	$(ALONE)/bin/python -m pip install --quiet --disable-pip-version-check -c requirements.lock ./manyranks \
		"setuptools>=77" PyYAML $$(grep -E '^(pytest|pytest-xdist|simpy)==' requirements-dev.lock)
	@touch $@

# Style, Python 3.10 to 3.14, types, imports, notebooks in step with their sources, weights of rooms, plain code, cells that can
# run again, errors that docstrings name.
lint: tools  ## what a machine can say of code and lessons
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Two names that only Python 2 had are fields and variables here.
	$(BIN)/vermin -q --violations -t=3.10- --no-tips --exclude file.encoding --exclude long manyranks ddp_* authoring benchmarks exercises tests setup.py
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python authoring/build.py --check
	$(BIN)/python authoring/weights.py
	$(BIN)/python authoring/plainness.py
	$(BIN)/python authoring/rebound.py
	$(BIN)/python authoring/raises.py

test-lessons: tools  ## lessons to their end, without 10 and 15; widgets and the site in a browser
	$(call run_tests,slow and lessons)

test-rest: tools  ## all other tests that cost much: lessons 10 and 15, torch's whole suite, torchrun, known answers, faults
	$(call run_tests,slow and not lessons)

test-all: setup  # make test, make test-lessons, then make test-rest
	$(MAKE) test
	$(MAKE) test-lessons
	$(MAKE) test-rest

notebooks: tools  ## build and run the notebooks from authoring/lessons
	$(BIN)/python authoring/build.py --execute $(ARGS)

site: tools  # the course as a web page, in site/
	$(BIN)/python authoring/site.py $(ARGS)

publish: tools  # where the course is published, for badges and links: make publish URL=https://github.com/owner/name
	$(BIN)/python authoring/build.py --publish "$(URL)"

versions: tools  ## try torch in fresh environments, for docs/VERSIONS.md: make versions ARGS="2.14.1 2.15.0"
	$(BIN)/python authoring/versions.py $(ARGS)

gpu: tools  ## what can only be seen on GPUs: right, safe, fast?
	$(BIN)/python -m benchmarks gpu $(ARGS)

gpu-rehearsal: tools  # every lesson and solution on 1, 2, 4 and 8 pretended GPUs
	PYTHONPATH=tests $(BIN)/python -m pretend_gpu.rehearsal $(ARGS)

bench: tools  ## measure speed ratios side by side: make bench ring
	$(BIN)/python -m benchmarks $(BENCHMARK) $(ARGS)

BENCHMARK := $(and $(filter bench,$(firstword $(MAKECMDGOALS))),$(word 2,$(MAKECMDGOALS)))
ifneq ($(BENCHMARK),)
$(BENCHMARK):;@:  # the word after bench is a benchmark and no target
endif

clean:  ## remove what was installed and built
	rm -rf $(VENV) $(ALONE) .build build site .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
