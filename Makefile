# Two commands do everything on a machine with Python ≥ 3.11, make and git:
#   make quickstart   the main job, with a report at runs/quickstart/report.html
#   make test         the fast tests (no torch)
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
PYTEST = $(VENV)/bin/python -m pytest --jaxtyping-packages=jppo,beartype.beartype
ARGS ?=

.PHONY: quickstart test test-slow test-parity lint types clean

$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python >= 3.11"'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[quickstart]'
	touch $@

$(VENV)/test: $(VENV)/base
	$(PIP) install -c constraints.txt -e '.[quickstart,test,lint]'
	touch $@

# An environment of its own: torch is several GB on most platforms.
$(VENV)-parity/ready: pyproject.toml constraints.txt
	test -x $(VENV)-parity/bin/python || $(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/python -m pip --disable-pip-version-check --quiet install \
	  -c constraints.txt -e '.[quickstart,test]' torch peft
	touch $@

quickstart: $(VENV)/base
	$(VENV)/bin/jppo quickstart $(ARGS)

test: $(VENV)/test
	$(PYTEST) -n 2 --dist loadfile -m 'not slow and not parity' $(ARGS)

test-slow: $(VENV)/test
	$(PYTEST) -m slow $(ARGS)

test-parity: $(VENV)-parity/ready
	$(VENV)-parity/bin/python -m pytest -m parity tests/parity $(ARGS)

lint: $(VENV)/test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

types: $(VENV)/test
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

clean:
	rm -rf $(VENV) $(VENV)-parity build *.egg-info .pytest_cache .ruff_cache
