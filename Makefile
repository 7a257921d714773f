# make demo   pretrain on procedural pictures and show what was learned (half a minute on two cores)
# make test   the whole test suite          make check   linter, formatter, types
# make soak   the long loops: 30 kills each of packing and training, 200,000 files (a quarter of an hour)
# Each target makes what it needs: a virtual environment in .venv with the package in it.
BIN  := .venv/bin
READY := .venv/.ready

.PHONY: demo test soak check format clean
demo: $(READY)
	$(BIN)/onecrop demo

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadgroup

soak: $(READY)
	$(BIN)/python -m pytest -n auto tests/soak/test_*.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml
	@set -e; python=""; for p in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$p; break; fi; done; \
	if [ -z "$$python" ]; then echo "make: onecrop needs Python 3.11 or later; set PYTHON=/path/to/python"; exit 1; fi; \
	if command -v uv >/dev/null 2>&1; then \
	  [ -x $(BIN)/python ] || uv venv --quiet --python "$$(command -v $$python)" .venv; \
	  uv pip install --quiet --python $(BIN)/python -e '.[all,dev]'; \
	else \
	  [ -x $(BIN)/python ] || $$python -m venv .venv; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,dev]'; \
	fi
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build dist
