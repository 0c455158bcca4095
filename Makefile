# Every target sets up what it needs in .venv; running it again costs nothing.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-extras lint docs tables bench release clean

demo: $(INSTALLED) ## train on the built-in digits, adapt under shifts, write demo/index.html
	$(BIN)/testtime demo --out demo

test: lint ## everything that must hold: style, types, tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-extras: $(INSTALLED) ## what takes or needs more: slow tests, models, kernels off, sanitizers, Triton, Ray, LaTeX, made-up requests, a browser, notebooks, the site
	$(BIN)/python tests/extras/run.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: .venv/.docs ## build the site into site/; a broken link or a page outside the navigation fails
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d build/doctrees docs site

tables: $(INSTALLED) ## make the tables and figures of README.md and docs/ again, from results/
	$(BIN)/python docs/generate

bench: $(INSTALLED) ## the quick form of every benchmark
	for script in $$(grep -l -- --quick benchmarks/*.py); do $(BIN)/python $$script --quick || exit 1; done

release: ## build sdist and wheel, check them on the lowest and the newest versions and on every Python; uploads nothing
	$(PYTHON) tools/release.py

clean:
	rm -rf .venv .venv-models demo dist build site .pytest_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cli,report,serve,dev]'
	touch $@

.venv/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@
