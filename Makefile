# Entry points. Each does its own set-up on a machine that has a Rust toolchain.
.PHONY: build test lint
build:
	cargo build --release --workspace
test:
	cargo test --workspace
lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
