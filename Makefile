# What can be done here: `make help`. Needs a Rust toolchain (rustc 1.95 or newer) and a C linker; the rest is looked for,
# and on Debian as root installed, by the target that needs it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CARGO ?= cargo
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/vfiod-lab
CARGO_DENY_VERSION := 0.20.2
CARGO_DENY_ROOT := $(CACHE)/tools/cargo-deny-$(CARGO_DENY_VERSION)
BUILD_DIR := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)

.PHONY: help demo build test test-agent test-kernel measure lint fmt clippy doc deny clean linker

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: build ## Plays the main job on a simulated node, narrates it, ends by itself
	@"$(BUILD_DIR)/debug/vfiod" demo

build: linker ## Builds vfiod with its demo and the simulated kernel (debug); the product is built without
	@$(CARGO) build --locked --features simulation --bin vfiod

test: test-agent test-kernel ## Every test, those on a real kernel too

test-agent: linker ## All tests but those on a real kernel
	@$(CARGO) test --locked --workspace --exclude vm-tests --no-run
	@$(CARGO) test --locked --workspace --exclude vm-tests --no-fail-fast

# What these need beyond Rust (QEMU, a kernel package) their harness checks for, installs or fetches, and explains. It builds
# the agent itself, as the product is built: without the simulation.
test-kernel: linker ## The tests on a real Linux kernel in QEMU
	@$(CARGO) test --locked -p vm-tests --no-run
	@$(CARGO) test --locked -p vm-tests --no-fail-fast

measure: linker ## How fast an agent starts and how much memory it takes, on the simulated HGX node (release build)
	@$(CARGO) bench --locked --bench start

lint: fmt clippy doc deny ## Format, clippy, documentation, licences and sources of dependencies

fmt: ## Is everything formatted?
	@$(CARGO) fmt --all --check

# Tests, and what runs in a guest, turn the simulation on for all that is built with them: the product is looked at by itself.
clippy: linker ## Clippy, every warning an error
	@$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@$(CARGO) clippy --locked --workspace --exclude vm-tests -- -D warnings

doc: linker ## The documentation builds without a warning
	@RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --exclude vm-tests --no-deps
	@RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps

# One cargo-deny, of one version, so that the same tree gets the same answer everywhere.
deny: $(CARGO_DENY_ROOT)/bin/cargo-deny ## Licences, bans and sources of dependencies
	@"$(CARGO_DENY_ROOT)/bin/cargo-deny" --locked check licenses bans sources

$(CARGO_DENY_ROOT)/bin/cargo-deny: | linker
	@echo "cargo-deny $(CARGO_DENY_VERSION) is not in $(CARGO_DENY_ROOT): installing it there (some minutes, once)"
	@$(CARGO) install --locked --quiet --root "$(CARGO_DENY_ROOT)" cargo-deny --version $(CARGO_DENY_VERSION) || { \
		echo "make: cargo-deny could not be installed (the cause stands above)." >&2; \
		echo "Without it licences and sources are not checked: give this machine a way to its crate registry, or put" >&2; \
		echo "cargo-deny $(CARGO_DENY_VERSION) at $@. 'make fmt clippy doc' works without it." >&2; \
		exit 1; }

linker:
	@.ci/need cc:gcc:libc6-dev

clean: ## Removes what was built (not the cache)
	@$(CARGO) clean
