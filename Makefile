# make demo: see it work. make test: every test, with a sample of the long campaigns. Both install what they need.

CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=

# rustup's folder is not in the PATH of every shell.
export PATH := $(PATH):$(HOME)/.cargo/bin

target := $(or $(CARGO_TARGET_DIR),target)

.PHONY: all build demo test check soak bench install uninstall doc clean

all: build

build:
	@scripts/setup build
	$(CARGO) build --release -p dsync

demo:
	@scripts/setup build demo
	@$(CARGO) build --release -p dsync
	@$(target)/release/dsync demo

# Formatting, lints, then unit, property and integration tests, the guest's sample among them. A tool that could not
# be installed leaves a line that begins with SKIPPED.
test: check
	@scripts/setup test
	$(CARGO) build --workspace
	DSYNC_BIN=$(abspath $(target))/debug/dsync $(CARGO) test --workspace

check:
	@scripts/setup build lint
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings

# The long campaigns in full: hours.
soak:
	@scripts/setup build test
	$(CARGO) build --workspace --release
	DSYNC_SOAK=1 DSYNC_BIN=$(abspath $(target))/release/dsync $(CARGO) test --workspace --release

# Against the limit and the peers, side by side; results are printed and written to bench/results/.
bench:
	@scripts/setup build bench
	@$(CARGO) build --release -p dsync -p dsync-bench
	DSYNC_BIN=$(abspath $(target))/release/dsync $(target)/release/dsync-bench

install: build
	install -Dm755 $(target)/release/dsync $(DESTDIR)$(PREFIX)/bin/dsync
	ln -sf dsync $(DESTDIR)$(PREFIX)/bin/dmextract
	ln -sf dsync $(DESTDIR)$(PREFIX)/bin/dmmerge

uninstall:
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/bin/,dsync dmextract dmmerge)

doc:
	@scripts/setup build
	$(CARGO) doc --workspace --no-deps

clean:
	$(CARGO) clean
