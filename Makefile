# Entry points. Each does its own set-up on a machine that has a Rust toolchain.
.PHONY: build demo test sim acceptance lint tidy doc deny fuzz bench

build:
	scripts/setup build
	cargo build --release --workspace


# The main job on real files of this machine, in a minute.
demo:
	scripts/setup demo
	scripts/demo

test:
	scripts/setup test
	scripts/run-tests

# Orders of threads, chosen by an explorer of interleavings; a part of `make test`. EXPLORE_RUNS is how many of each case of the engine's
# calls it tries, in each of two ways.
.PHONY: explore
EXPLORE_RUNS ?= 1
explore: export UBTRFS_EXPLORE_RUNS = $(EXPLORE_RUNS)
explore:
	scripts/setup build
	scripts/explore

# The tests of what has `unsafe` code, under AddressSanitizer.
.PHONY: sanitize
sanitize: export UBTRFS_REQUIRE_ORACLES = 1
sanitize:
	scripts/setup test
	scripts/sanitize

# Two million random operations on open files beside arrays, with the kernel's view of every file at each
# reopening, one in four of those that a failing device forced, and of one crash in ten; the stale-data race, 100,000 rounds of each kind of file; threads beside each
# other, 10,000 rounds of each; failing writes of many runs; power cuts beside who compresses what he writes
# himself; then random operations on full filesystems. It fails without the judges, and where less was done.
# IO_SEED is the first seed of the random operations.
.PHONY: io-suite
IO_SEED ?= 0
io-suite: export UBTRFS_REQUIRE_ORACLES = 1
io-suite: export UBTRFS_IOMAP_FIRST_SEED = $(IO_SEED)
io-suite:
	scripts/setup test
	@echo "random operations from seed $(IO_SEED) on"
	UBTRFS_IOMAP_SEEDS=140 UBTRFS_RACE_ROUNDS=100000 UBTRFS_IOMAP_CONCURRENT_ROUNDS=10000 \
		UBTRFS_IOMAP_OPERATIONS_MIN=2000000 UBTRFS_IOMAP_JUDGED_ONE_IN=1 \
		UBTRFS_IOMAP_REPLAYED_ONE_IN=10 \
		cargo test --release -p ubtrfs-engine --test file_io -- --test-threads 4
	UBTRFS_IOMAP_SEEDS=300 UBTRFS_RACE_ROUNDS=100000 UBTRFS_IOMAP_CONCURRENT_ROUNDS=10000 \
		cargo test --release -p ubtrfs-iomap --test operations -- --test-threads 4
	UBTRFS_WRITE_FAILURES=1000 \
		cargo test --release -p ubtrfs-engine --test file_write_failures -- --test-threads 2
	UBTRFS_CRASH_SEEDS=60 UBTRFS_FULL_SEEDS=30 \
		cargo test --release -p ubtrfs-engine --test compressed_crashes --test full_random

# A mount judged by pjdfstest and fsx, which are fetched and built; by programs that check what they write; and killed fifty times under
# load. First by /dev/fuse alone, then a part of it with FUSE over io_uring (`-o io_uring`), where the kernel has that. It fails without
# the judges.
.PHONY: mount-suites
mount-suites: export UBTRFS_REQUIRE_ORACLES = 1
mount-suites:
	scripts/setup test
	scripts/setup load
	scripts/with-rings N scripts/mount-suites
	scripts/with-rings N scripts/mount-load
	LOAD_USER=nobody LOAD_SECONDS=20 scripts/with-rings N scripts/mount-load
	scripts/mount-systems
	UBTRFS_KILLS=50 scripts/with-rings N cargo test --release -p ubtrfs-cli --test mount --test mount_killed
	FSX_OPERATIONS=100000 scripts/with-rings Y scripts/mount-suites
	LOAD_SECONDS=20 scripts/with-rings Y scripts/mount-load
	UBTRFS_KILLS=10 scripts/with-rings Y cargo test --release -p ubtrfs-cli --test mount --test mount_killed

# A million random operations beside a model, a fifth of them with the power cuts of each commit, millions
# of states, cuts of what follows a cut, and failing devices; the kernel and `btrfs check` judge a sample
# of more than 500. Then several threads at one filesystem, and files that are open through memory, each
# with their power cuts. SIM_SEED is the first seed. It fails without
# the judges, and where less was covered than is said here: what a first seed leaves to chance may come
# out a third lower than it was for the first.
SIM_SEED ?= 1
sim: export UBTRFS_REQUIRE_ORACLES = 1
sim:
	scripts/setup test
	cargo run --release -p ubtrfs-sim -- --seed $(SIM_SEED) --runs 110 --operations 2000 \
		--crash-states 2 --check-one-in 0 --mount-one-in 90 --fault-one-in 2 --threads 2 \
		--at-least-operations 220000 --at-least-crash-states 1600000 --at-least-opened 44000 \
		--at-least-cut-again 300 --at-least-struck 1300 --at-least-mounted 500 --at-least-checked 600
	cargo run --release -p ubtrfs-sim -- --seed $$(($(SIM_SEED) + 100000)) --runs 410 \
		--operations 2000 --crash-states 0 --check-one-in 0 --fault-one-in 0 --threads 2 \
		--at-least-operations 820000 --at-least-checked 410
	cargo run --release -p ubtrfs-sim -- --seed $(SIM_SEED) --workers 3 --runs 60 --operations 300 \
		--crash-states 100 --at-least-operations 54000 --at-least-crash-states 100000 \
		--at-least-opened 2500 --at-least-checked 100
	cargo run --release -p ubtrfs-sim -- --open-files --seed $(SIM_SEED) --runs 1500 --operations 300 \
		--commit-one-in 12 --crash-states 20 --check-one-in 100 --mount-one-in 150 --fault-one-in 3 \
		--go-on-one-in 20 --threads 2 --at-least-operations 450000 --at-least-crash-states 5000000 \
		--at-least-opened 120000 --at-least-cut-again 2000 --at-least-struck 4000 \
		--at-least-mounted 800 --at-least-checked 2000

# Debian's linux-source, 84,000 files, there and back, judged on the way: minutes and gigabytes.
acceptance:
	scripts/setup acceptance
	cargo test --release -p ubtrfs-cli --test acceptance -- --ignored --nocapture

# The set-up itself, on a minimal Debian in a folder of its own; as root, with debootstrap. COMMAND:
# what to run there instead, as `make try-fresh COMMAND="make test"`.
.PHONY: try-fresh
try-fresh:
	scripts/try-fresh $(COMMAND)

# The kernel and the engine on one filesystem in turns, a hundred rounds of each of its shapes. It fails
# without the judges, and where too few operations of any kind were done. UBTRFS_TURNS_SHAPE picks one.
SOAK_ROUNDS ?= 100
.PHONY: soak
soak: export UBTRFS_REQUIRE_ORACLES = 1
soak:
	scripts/setup test
	UBTRFS_TURNS=$(SOAK_ROUNDS) cargo test --release -p ubtrfs-engine --test random_turns -- --nocapture

# What a change must pass besides its tests. `deny` needs a tool that takes minutes to build.
lint: fmt-clippy doc tidy deny

.PHONY: fmt-clippy
fmt-clippy:
	scripts/setup lint
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTFLAGS="$$RUSTFLAGS --cfg ubtrfs_explore" cargo clippy --profile test -p ubtrfs-memory -p ubtrfs-iomap -p ubtrfs-engine \
		--lib --test explore --target-dir "$${CARGO_TARGET_DIR:-target}/explore" -- -D warnings

# With private items: what a module is for stands where it begins, and most modules are private.
doc:
	RUSTDOCFLAGS='-D warnings -A rustdoc::private_intra_doc_links' cargo doc --workspace --no-deps --document-private-items

tidy:
	cargo run --quiet -p ubtrfs-xtask -- tidy

deny:
	scripts/setup deny
	cargo deny --workspace check bans licenses sources

# Each target for SECONDS_EACH seconds; findings land in fuzz/artifacts.
fuzz:
	scripts/setup build
	fuzz/run

# BENCH: workloads and options, as `make bench BENCH="import --rounds 5"`; see docs/EXPERIMENTS.md.
bench:
	scripts/setup bench
	cargo build --release --workspace
	"$${CARGO_TARGET_DIR:-target}/release/ubtrfs-bench" $(BENCH)

# Man pages and shell completions, for packagers: from the definitions that make the help.
.PHONY: man
man: build
	"$${CARGO_TARGET_DIR:-target}/release/ubtrfs" generate man target/man
	"$${CARGO_TARGET_DIR:-target}/release/ubtrfs" generate completions target/completions
