//! Checks of the repository itself, that no compiler makes: who may import whom, how long a file
//! may grow, where `unsafe` may stand.
//!
//! `make tidy` runs them, and so does a test of this crate.
#![forbid(unsafe_code)]

mod docs;
mod edges;
mod files;
mod mask;
mod modules;
mod tidy;

pub use tidy::{Finding, Report, tidy};

#[cfg(test)]
mod tests;
