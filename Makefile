# Two commands do everything from a bare clone: make demo and make test.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo check test hostile lint types format docs results clean

demo: $(VENV)/.installed
	$(BIN)/fly demo

# An answer in two minutes: what tests/conftest.py does not list as slow, with two thirds of the examples.
check: $(VENV)/.installed-dev lint types
	$(BIN)/pytest -n auto -m quick --hypothesis-profile quick

# The same examples every time, on every machine.
test: $(VENV)/.installed-dev lint types
	$(BIN)/pytest -n auto --dist worksteal

# Other random examples of each property in every round, some minutes a round: make explore ROUNDS=20 takes hours.
.PHONY: explore
ROUNDS = 1
explore: $(VENV)/.installed-dev
	$(BIN)/python -m tests.explore --rounds $(ROUNDS)

# Attacks on a server, some minutes. Its figures mean something on a machine that does nothing else.
hostile: $(VENV)/.installed-dev
	$(BIN)/pytest -s -vv $(addprefix tests/hostile/,load.py clients.py nonsense.py crash.py)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Replicas on a Ray cluster of two local nodes, one minute. Ray takes 240 MB, so that make test goes without.
.PHONY: ray-test
ray-test: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]' 'ray[data]==2.60.*'
	$(BIN)/pytest tests/test_ray.py tests/test_ray_grid.py tests/test_ray_data.py

# Rules inside vLLM and SGLang, on the code of their wheels (380 MB, without CUDA), four minutes. Another version:
# make engines-test VERSIONS="--vllm 0.34.0"
.PHONY: engines-test
engines-test: $(VENV)/.installed-dev
	$(BIN)/python -m tests.wheels $(VERSIONS)

.PHONY: sanitize soak
# Compiled code under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, some minutes.
sanitize: $(VENV)/.installed-dev
	$(BIN)/python -m tests.sanitizers

# Mixed load against LLM and a server: make soak SECONDS=120 takes two minutes.
SECONDS = 1200
soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.soak --seconds $(SECONDS)

# The documentation as a site, without a network: build/docs/index.html. Its search needs a server of files:
# python3 -m http.server --directory build/docs
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# What docs/results shows of the bundled models, measured again: half an hour on a machine that does nothing else.
results: $(VENV)/.installed
	benchmarks/measure.sh $(abspath $(BIN)/python)

# The constraints come first: they pin torch to one exact build before anything asks for a range of it.
$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(wildcard fly/backends/cpu/src/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
