# Each target makes .venv and installs what it needs when that is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROCESS_TESTS := tests/processes tests/deploy
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test soak up stubs lint bench-engine clean

demo: $(STAMP)
	$(BIN)/kvferry run "What is the capital of South Korea?"

test: $(STAMP)
	$(BIN)/kvferry model unpack
	$(BIN)/python -m pytest -m "not soak and not processes" -n 2 --dist worksteal
	$(BIN)/python -m pytest -m "processes and not soak and beside" -n 2 --dist loadfile $(PROCESS_TESTS)
	$(BIN)/python -m pytest -m "processes and not soak and not beside" $(PROCESS_TESTS)

soak: $(STAMP)
	$(BIN)/kvferry model unpack
	$(BIN)/python -m pytest -m soak
	$(BIN)/kvferry bench exact --prompts 200
	for road in inproc shm ray grpc; do $(BIN)/kvferry bench exact --prompts 40 --transport $$road || exit 1; done

bench-engine: $(STAMP)
	@test -n "$(PEERS)" || { echo "make bench-engine PEERS=DIR: where the peers' environments and models are (loadtest/contenders.py says which)"; exit 2; }
	$(BIN)/kvferry model unpack
	$(BIN)/kvferry bench peers --peers $(PEERS) $(BENCH)

up: $(STAMP)
	$(BIN)/kvferry up

stubs: $(STAMP)
	$(BIN)/python -m kvferry.rpc.generate
	$(BIN)/python -m kvferry.rpc.generate --check
	$(BIN)/buf lint

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m kvferry.rpc.generate --check
	$(BIN)/buf lint

clean:
	rm -rf $(VENV)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvferry needs Python 3.11 or newer")'
	@echo "installing kvferry and what it needs into $(VENV) (about a gigabyte, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,ray]'
	@touch $@
