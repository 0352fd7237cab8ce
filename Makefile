# make demo: see it work. make test: every test, with a sample of the long campaigns. Both install what they need.

CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
UNITS ?= /etc/systemd/system
INSTALL_PROGRAM ?= install -s

# rustup's folder is not in the PATH of every shell.
export PATH := $(PATH):$(HOME)/.cargo/bin

completions := bash-completion/completions/dsync zsh/site-functions/_dsync fish/vendor_completions.d/dsync.fish
target := $(or $(CARGO_TARGET_DIR),target)

.PHONY: all build bpf bpf-check demo test test-vm test-deb check deny msrv soak fuzz bench figures artifact install uninstall deb static test-static doc clean

all: build

build:
	@scripts/setup build
	$(CARGO) build --release -p dsync

demo:
	@scripts/setup build
	@$(CARGO) build --release -p dsync
	@$(target)/release/dsync demo

# The tracker's program, kept beside its source so that nobody needs clang to build dsync.
bpf_object = cd bpf && clang -target bpf -mcpu=v3 -g -O2 -Wall -Wextra -Werror -ffile-prefix-map=$(CURDIR)/bpf=. -c track.bpf.c -o $(1) && \
	llvm-strip -g $(1)
bpf:
	@scripts/setup bpf
	$(call bpf_object,$(CURDIR)/bpf/track.bpf.o)

# The committed object is what its source gives. Another clang may give other bytes for the same source: use the one of Debian 12.
bpf-check:
	@scripts/setup bpf || true
	@mkdir -p $(target)
	@if command -v clang >/dev/null && command -v llvm-strip >/dev/null; then \
	($(call bpf_object,$(abspath $(target))/track.bpf.o)) && cmp bpf/track.bpf.o $(target)/track.bpf.o && \
	echo "bpf/track.bpf.o is what bpf/track.bpf.c gives"; \
	else echo 'SKIPPED make bpf-check: it needs clang and llvm-strip'; fi

# Formatting, lints, then unit, property and integration tests, the guest's sample among them. What is left out, for want of a
# tool or for time, leaves a line that begins with SKIPPED.
test: check
	@scripts/setup test
	@CARGO='$(CARGO)' tests/suite.sh
	@echo 'SKIPPED: the campaigns ran as samples; run "make soak" for their full counts (hours), "make test-vm" for all guests, "make test-deb" for the packages'

# What needs guests: VMs under libvirt, the kernel module, with all of its tests, on two of Debian's kernels; docs/failover.md; and the package,
# installed and operated on two hosts.
test-vm: deb
	@scripts/setup build test test-deb
	DSYNC_VM=1 DSYNC_DEB=$$(ls $(abspath $(packages))/dsync_*.deb) \
		$(CARGO) test -p dsync-tests --test user -- --nocapture machine vm:: harness:: far_link:: failover_page:: hosts::

# A distribution's Rust may lack a part of cargo.
lint = @if $(CARGO) $(1) --version >/dev/null 2>&1; then echo '$(2)'; $(2); \
	else echo "SKIPPED cargo $(1): it is not installed"; fi

check:
	@scripts/setup build lint
	$(call lint,fmt,$(CARGO) fmt --all --check)
	$(call lint,clippy,$(CARGO) clippy --workspace --all-targets -- -D warnings)
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(deny); else echo 'SKIPPED cargo deny: run "make deny", which installs it'; fi

# Licences, banned crates and sources of what dsync is built from. The tool takes some minutes to build.
deny = $(CARGO) deny --workspace check licenses bans sources
deny:
	@scripts/setup build
	@$(CARGO) deny --version >/dev/null 2>&1 || $(CARGO) install --locked cargo-deny
	$(deny)

# Builds with the oldest Rust that Cargo.toml promises. (Lints refuse what is newer in the standard library.)
msrv := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
msrv:
	@scripts/setup build
	@if command -v rustup >/dev/null; then rustup toolchain install --profile minimal $(msrv); \
	$(CARGO) +$(msrv) check --workspace --target-dir $(target)/msrv; else echo 'SKIPPED make msrv: it needs rustup'; fi

# The long campaigns in full: hours.
soak:
	@scripts/setup build test
	$(CARGO) build --workspace --release
	DSYNC_SOAK=1 DSYNC_BIN=$(abspath $(target))/release/dsync $(CARGO) test --workspace --release --no-fail-fast

# Every fuzz target for so many minutes, one after the other: libFuzzer, with the coverage that any compiler can give. Inputs that fail are in
# fuzz/artifacts; good ones are kept in fuzz/corpus, and the next run begins with them.
MINUTES ?= 5
FUZZ ?= delta_reader link_messages link_session nbd_server replica_state
fuzz_host := $(shell uname -m)-unknown-linux-gnu
fuzz: export RUSTFLAGS = --cfg fuzzing -Cpasses=sancov-module \
	$(addprefix -Cllvm-args=-sanitizer-coverage-,level=4 inline-8bit-counters pc-table trace-compares) \
	-Cdebug-assertions=on -Coverflow-checks=on -Ccodegen-units=1
fuzz:
	@scripts/setup build
	$(CARGO) build --release --manifest-path fuzz/Cargo.toml --target $(fuzz_host) --target-dir $(target)/fuzz
	@for one in $(FUZZ); do mkdir -p fuzz/corpus/$$one fuzz/artifacts/$$one && \
	$(target)/fuzz/$(fuzz_host)/release/$$one -max_total_time=$$(($(MINUTES) * 60)) -timeout=60 -print_final_stats=1 \
		-artifact_prefix=fuzz/artifacts/$$one/ fuzz/corpus/$$one crates/delta/tests/golden || exit; done

# Against the limit and the peers, side by side; results are printed and written to bench/results/.
bench:
	@scripts/setup build bench
	@$(CARGO) build --release -p dsync -p dsync-bench
	DSYNC_BIN=$(abspath $(target))/release/dsync $(target)/release/dsync-bench

# What the papers measured, again, most of it on two hosts of network namespaces; CSV, SVG and tables go to bench/results/. Hours.
figures:
	@scripts/setup build bench
	@$(CARGO) build --release -p dsync -p dsync-bench
	DSYNC_BIN=$(abspath $(target))/release/dsync $(target)/release/dsync-bench figures

# The claims of ARTIFACT.md, with a verdict for each: half an hour on two quiet cores. Fails if one is missed.
artifact:
	@scripts/setup build bench
	@$(CARGO) build --release -p dsync -p dsync-bench
	DSYNC_BIN=$(abspath $(target))/release/dsync $(target)/release/dsync-bench artifact

units := $(wildcard systemd/*.service systemd/*.socket systemd/*.target systemd/*.timer)
hooks := $(wildcard hooks/*)

# The command, under the paper's names too, and what it says of itself: man pages and completions.
share := $(DESTDIR)$(PREFIX)/share
install: build
	$(INSTALL_PROGRAM) -Dm755 $(target)/release/dsync $(DESTDIR)$(PREFIX)/bin/dsync
	ln -sf dsync $(DESTDIR)$(PREFIX)/bin/dmextract
	ln -sf dsync $(DESTDIR)$(PREFIX)/bin/dmmerge
	install -d $(DESTDIR)$(UNITS) $(DESTDIR)/etc/dsync
	install -m644 $(units) $(DESTDIR)$(UNITS)
	sed -i 's|/usr/local/bin|$(PREFIX)/bin|' $(addprefix $(DESTDIR)$(UNITS)/,$(notdir $(units)))
	install -Dm755 systemd/dsync-generator $(DESTDIR)$(UNITS)-generators/dsync-generator
	install -Dm644 systemd/dsync.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/dsync.conf
	install -d $(share)/dsync/hooks
	install -m755 $(hooks) $(share)/dsync/hooks
	install -d $(share)/man/man1 $(addprefix $(share)/,$(dir $(completions)))
	$(target)/release/dsync man $(share)/man/man1
	$(target)/release/dsync completions bash >$(share)/bash-completion/completions/dsync
	$(target)/release/dsync completions zsh >$(share)/zsh/site-functions/_dsync
	$(target)/release/dsync completions fish >$(share)/fish/vendor_completions.d/dsync.fish

uninstall:
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/bin/,dsync dmextract dmmerge)
	rm -f $(addprefix $(DESTDIR)$(UNITS)/,$(notdir $(units))) $(DESTDIR)$(PREFIX)/lib/sysusers.d/dsync.conf
	rm -f $(DESTDIR)$(UNITS)-generators/dsync-generator
	-rmdir --ignore-fail-on-non-empty $(DESTDIR)/etc/dsync
	rm -f $(addprefix $(share)/dsync/,$(hooks))
	-rmdir --ignore-fail-on-non-empty $(share)/dsync/hooks $(share)/dsync
	rm -f $(addprefix $(share)/,$(completions)) $(share)/man/man1/dsync.1 $(share)/man/man1/dsync-*.1

# Debian packages, in target/deb/packages. After the set-up this needs no network.
packages := $(target)/deb/packages
deb:
	@scripts/setup build deb
	rm -rf $(packages)
	mkdir -p $(packages)
	DEB_RULES_REQUIRES_ROOT=no debian/rules clean binary DESTINATION=$(packages)

# What lintian says of them, their life from installation to purge in a new root of Debian 12, and whether another build gives the
# same bytes: some minutes, and those of a build.
test-deb: deb
	@scripts/setup test-deb
	tests/package.sh $(packages)
	tests/reproducible.sh deb $(packages)/*.deb

# One file that runs on any Linux of this architecture, whatever its C library. Names of folders are left out of it, also of the debug
# information that is stripped: the linker's build id is made of that as well.
musl := $(shell uname -m)-unknown-linux-musl
cargo_home := $(or $(CARGO_HOME),$(HOME)/.cargo)
static: export RUSTFLAGS += --remap-path-prefix=$(CURDIR)=/usr/src/dsync --remap-path-prefix=$(cargo_home)=/usr/src/cargo
static: export CFLAGS += -ffile-prefix-map=$(CURDIR)=/usr/src/dsync -ffile-prefix-map=$(cargo_home)=/usr/src/cargo
static:
	@scripts/setup build static
	@if command -v rustup >/dev/null; then rustup -q target add $(musl); fi
	$(CARGO) build --release -p dsync --target $(musl)
	strip -o $(target)/dsync-static $(target)/$(musl)/release/dsync

# It needs no file but itself: a demonstration in a root with nothing else. And another build gives the same bytes. Not a part of
# "make test", for its time: two builds of everything for another target.
test-static: static
	tests/static.sh $(target)/dsync-static
	tests/reproducible.sh static $(target)/dsync-static

doc:
	@scripts/setup build
	$(CARGO) doc --workspace --no-deps

clean:
	$(CARGO) clean
