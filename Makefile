# Two commands do all: `make demo` plays the incident, `make test` passes the tests. Each builds its own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint coverage casebook bench dist fuzz reliability clean

$(BIN)/epochgate: pyproject.toml requirements/run.txt requirements/build.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/run.txt -r requirements/build.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.test: $(BIN)/epochgate requirements/test.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/test.txt
	@touch $@

demo: $(BIN)/epochgate
	$(BIN)/epochgate demo

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Two at a time share the machine; a test that missed its time there has to pass alone.
test: lint
	$(BIN)/pytest -n 2 --dist loadfile || $(BIN)/pytest --last-failed --last-failed-no-failures none

coverage: $(VENV)/.test
	$(BIN)/coverage run --branch -m pytest -q tests/guard tests/model
	$(BIN)/coverage report --include='*/guard/*' --fail-under=100

casebook: $(BIN)/epochgate
	$(PYTHON) ../shared/casebook/run.py --proxy "$(CURDIR)/$(BIN)/epochgate serve"

bench: $(VENV)/.test .bench/peers/.done .bench/mitmproxy/.done .bench/mcp-proxy/.done
	$(BIN)/python -m bench --report docs $(BENCH)

$(VENV)/.fuzz: $(VENV)/.test requirements/fuzz.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/fuzz.txt
	@touch $@

fuzz: $(VENV)/.fuzz
	$(BIN)/python -m reliability --only fuzzing

# The wheel and its bill of materials, in dist/: the same bytes for the same commit.
dist: .tools/build/.done
	SOURCE_DATE_EPOCH=$(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct)) sh deploy/dist.sh .tools/build dist

.tools/build/.done: deploy/image/build.txt
.tools/audit/.done: requirements/audit.txt

.tools/%/.done:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

reliability: $(VENV)/.fuzz .tools/build/.done .tools/audit/.done
	$(BIN)/python -m reliability --report docs $(LONG) $(if $(ONLY),--only $(ONLY))

.bench/%/.done: bench/requirements-%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info proxy/*.egg-info
